// What a machine without a CUDA driver answers, and what is refused before a driver is asked.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <cstdint>

using namespace support;

namespace {

class WithoutDriver : public ::testing::Test {
protected:
    void SetUp() override {
        std::uint32_t count = 0;
        if (kvpages_device_count(&count) == KVPAGES_STATUS_OK ||
            failure_of(KVPAGES_STATUS_DEVICE_UNAVAILABLE).kind != "driver_missing") {
            GTEST_SKIP() << "this machine has a driver";
        }
    }
};

::testing::AssertionResult is_missing(std::int32_t status) {
    return fails(status, KVPAGES_STATUS_DEVICE_UNAVAILABLE, "driver_missing",
                 {"there is no CUDA driver", "libcuda.so.1"});
}

}  // namespace

TEST_F(WithoutDriver, EveryEntrySaysSo) {
    std::uint32_t count = 7;
    EXPECT_TRUE(is_missing(kvpages_device_count(&count)));
    EXPECT_EQ(count, 0u);
    kvpages_device_info info = KVPAGES_DEVICE_INFO_INIT;
    EXPECT_TRUE(is_missing(kvpages_device_get_info(0, &info)));
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    for (const std::uint32_t flags : {0u, 1u, 7u}) {
        config.flags = flags;
        kvpages_memory* memory = nullptr;
        EXPECT_TRUE(is_missing(kvpages_memory_create_cuda(&config, &memory)));
        EXPECT_EQ(memory, nullptr);
    }
    config.flags = 0;
    kvpages_memory* memory = nullptr;
    EXPECT_TRUE(is_missing(kvpages_memory_create_pinned(&config, &memory)));
    const kvpages_device device{KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};
    alignas(256) unsigned char buffer[256];
    EXPECT_TRUE(is_missing(
        kvpages_memory_create_adopted_device(&device, buffer, sizeof(buffer), &memory)));
    EXPECT_EQ(memory, nullptr);
}

TEST(Device, WhatMakesNoSenseIsRefused) {
    EXPECT_TRUE(fails(kvpages_device_count(nullptr), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument", {"out_count"}));
    EXPECT_TRUE(fails(kvpages_device_get_info(0, nullptr), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument"));
    kvpages_memory* out = nullptr;
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    EXPECT_TRUE(fails(kvpages_memory_create_cuda(nullptr, &out), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument"));
    EXPECT_TRUE(fails(kvpages_memory_create_cuda(&config, nullptr), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument"));
    config.flags = 8;
    EXPECT_TRUE(fails(kvpages_memory_create_cuda(&config, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "unknown_value", {"0x8"}));
    config.flags = KVPAGES_CUDA_MEMORY_RDMA;
    EXPECT_TRUE(fails(kvpages_memory_create_cuda(&config, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "bad_values", {"KVPAGES_CUDA_MEMORY_VIRTUAL"}));
    config.flags = KVPAGES_CUDA_MEMORY_VIRTUAL;
    EXPECT_TRUE(fails(kvpages_memory_create_pinned(&config, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "unknown_value", {"0x1"}));
    unsigned char buffer[16];
    for (const kvpages_device& bad :
         {kvpages_device{2, 0, nullptr}, kvpages_device{KVPAGES_DEVICE_KIND_HOST, 1, nullptr},
          kvpages_device{KVPAGES_DEVICE_KIND_HOST, 0, buffer}}) {
        EXPECT_EQ(kvpages_memory_create_adopted_device(&bad, buffer, sizeof(buffer), &out),
                  KVPAGES_STATUS_INVALID_ARGUMENT);
        EXPECT_EQ(out, nullptr);
    }
}

TEST(Device, HostCachesLieOnTheHost) {
    Model m = model();
    add(m, "layers.0", full(16, 1, 64), backend(packed_nhd));
    const Plan plan = plan_of_blocks(m, 3);
    alignas(256) static unsigned char buffer[65536];
    const kvpages_device host{KVPAGES_DEVICE_KIND_HOST, 0, nullptr};
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_adopted_device(&host, buffer, sizeof(buffer), &raw));
    const Memory memory(raw);
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    kvpages_cache* cache = nullptr;
    must(kvpages_cache_create(plan.get(), &config, &cache, nullptr));
    const Cache c(cache);
    kvpages_device device{7, 7, buffer};
    must(kvpages_cache_get_device(c.get(), &device));
    EXPECT_EQ(device.kind, std::uint32_t{KVPAGES_DEVICE_KIND_HOST});
    EXPECT_EQ(device.context, nullptr);
    EXPECT_TRUE(fails(kvpages_cache_get_device(c.get(), nullptr), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument"));
}
