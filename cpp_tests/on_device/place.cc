// Puts what the tests make in host memory into the memory of a device, of which they know nothing.
//
// The linker gives the tests these functions for those of the library (--wrap). On the stand-in
// driver, which does at once what it is asked for, the host can look at device memory, so the same
// tests hold there: caches, their operations and block tables do in a device's memory what they do
// in the host's.
#include <kvpages/kvpages.h>

#include "standin.h"

#include <cstdint>
#include <cstdlib>

extern "C" {

kvpages_status __real_kvpages_tables_create(const kvpages_tables_config* config,
                                            kvpages_tables** out);
kvpages_status __real_kvpages_tables_create_for_plan(const kvpages_plan* plan, size_t worker,
                                                     const kvpages_tables_config* config,
                                                     kvpages_tables** out);
kvpages_status __wrap_kvpages_memory_create_host(kvpages_memory** out);
kvpages_status __wrap_kvpages_tables_create(const kvpages_tables_config* config,
                                            kvpages_tables** out);
kvpages_status __wrap_kvpages_tables_create_for_plan(const kvpages_plan* plan, size_t worker,
                                                     const kvpages_tables_config* config,
                                                     kvpages_tables** out);
}

namespace {

constexpr kvpages_device kDevice{KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};

/// A driver with room for what tests make, in small pieces.
void make_driver() {
    static const bool is_made = [] {
        standin_set_total_bytes(0, std::uint64_t{8} << 30);
        return standin_set_granularity_bytes(4096);
    }();
    if (!is_made) std::abort();
}

/// Calls `create` with a config whose tables lie on the device; with the caller's own where that is
/// one which the library refuses, or reads in part.
template <typename Create>
kvpages_status on_device(const kvpages_tables_config* config, Create create) {
    const auto address = reinterpret_cast<std::uintptr_t>(config);
    if (config == nullptr || address % alignof(kvpages_tables_config) != 0 ||
        config->struct_size != sizeof *config) {
        return create(config);
    }
    make_driver();
    kvpages_tables_config placed = *config;
    placed.device = kDevice;
    return create(&placed);
}

}  // namespace

kvpages_status __wrap_kvpages_memory_create_host(kvpages_memory** out) {
    make_driver();
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    config.flags = KVPAGES_CUDA_MEMORY_VIRTUAL;
    return kvpages_memory_create_cuda(&config, out);
}

kvpages_status __wrap_kvpages_tables_create(const kvpages_tables_config* config,
                                            kvpages_tables** out) {
    return on_device(config, [&](const kvpages_tables_config* placed) {
        return __real_kvpages_tables_create(placed, out);
    });
}

kvpages_status __wrap_kvpages_tables_create_for_plan(const kvpages_plan* plan, size_t worker,
                                                     const kvpages_tables_config* config,
                                                     kvpages_tables** out) {
    return on_device(config, [&](const kvpages_tables_config* placed) {
        return __real_kvpages_tables_create_for_plan(plan, worker, placed, out);
    });
}
