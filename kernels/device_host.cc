// device.cu for the host: what a stand-in driver and tests run.
#include "device_port.h"

namespace kvp {
thread_local Indices gridDim, blockDim, blockIdx, threadIdx;
}

#include "device.cu"
