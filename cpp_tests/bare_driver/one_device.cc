// The stand-in as a real driver looks to tests: without standin_*, which the linker makes local,
// and with one device, as most machines have.
#include "standin.h"

namespace {

const struct OneDevice {
    OneDevice() { standin_set_num_devices(1); }
} one_device;

}  // namespace
