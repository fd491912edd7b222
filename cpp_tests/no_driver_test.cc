// CUDA on a machine that has no driver: the library works, and says why devices do not.
#include "support/api.h"
#include "support/failure.h"
#include "support/garbage.h"

#include <gtest/gtest.h>

#include <dlfcn.h>

using namespace support;

namespace {

bool has_driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (library != nullptr) {
        dlclose(library);
    }
    return library != nullptr;
}

}  // namespace

TEST(NoDriver, DevicesAreUnavailableAndTheHostIsNot) {
    if (has_driver()) {
        GTEST_SKIP() << "this machine has a CUDA driver";
    }
    const kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    for (int round = 0; round < 2; ++round) {
        Out<std::uint32_t> count;
        EXPECT_TRUE(fails(kvpages_device_count(&count), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                          "driver_missing", {"no CUDA driver", "libcuda.so.1"}));
        EXPECT_TRUE(count.is_zero());
        Info<kvpages_device_info> info;
        EXPECT_TRUE(fails(kvpages_device_get_info(0, &info), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                          "driver_missing", {"libcuda.so.1"}));
        Out<kvpages_memory*> memory;
        EXPECT_TRUE(fails(kvpages_memory_create_cuda(&config, &memory),
                          KVPAGES_STATUS_DEVICE_UNAVAILABLE, "driver_missing", {"libcuda.so.1"}));
        EXPECT_TRUE(memory.is_zero());
        EXPECT_TRUE(fails(kvpages_memory_create_pinned(&config, &memory),
                          KVPAGES_STATUS_DEVICE_UNAVAILABLE, "driver_missing", {"libcuda.so.1"}));
        EXPECT_TRUE(memory.is_zero());
    }
    const Model m = model();
    add(m, "layers.0", full(16, 2, 64), backend(kv_first));
    EXPECT_EQ(kvpages_cache_num_allocations(cache(plan_of_blocks(m, 3)).get()), 1u);
}
