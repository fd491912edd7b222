// The C++ interface to devices, on the stand-in driver.
#include "driver.h"
#include "standin.h"

#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

class CudaHpp : public ::testing::Test {
protected:
    void SetUp() override {
        standin_reset();
        ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
        standin_set_protected(true);
        standin_set_deferred(true);
    }

    void TearDown() override {
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
        standin_reset();
    }
};

kvpages::Plan plan() {
    kvpages::AttentionSpec spec;
    spec.block_size = 16;
    spec.num_kv_heads = 2;
    spec.head_size = 8;
    kvpages::Model model;
    model.add("layers.0.attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig config;
    config.memory_bytes = 100000;
    config.max_model_len = 64;
    config.max_tokens_in_flight = 16;
    return kvpages::Plan::make(model, config);
}

// The kind of the error that a call throws; empty when it throws none.
template <typename Call>
std::string kind_of_error(Call&& call) {
    try {
        call();
    } catch (const kvpages::Error& error) {
        return error.kind();
    }
    return "";
}

}  // namespace

TEST_F(CudaHpp, DevicesSayWhatTheyAre) {
    EXPECT_EQ(kvpages::device_count(), 2u);
    const auto info = kvpages::DeviceInfo::of(1);
    EXPECT_STREQ(info.name, "Stand-in GPU 1");
    EXPECT_EQ(info.has_virtual_memory, 1u);
    EXPECT_EQ(kind_of_error([] { static_cast<void>(kvpages::DeviceInfo::of(2)); }), "no_device");
}

TEST_F(CudaHpp, EveryKindOfMemoryHoldsACache) {
    const kvpages::Plan p = plan();
    kvpages::CudaMemory on_second;
    on_second.ordinal = 1;
    kvpages::CudaMemory shareable = on_second;
    shareable.is_virtual = shareable.rdma = shareable.shareable = true;
    for (const kvpages::CudaMemory& config : {on_second, shareable}) {
        const auto cache = kvpages::Cache::allocate(p, kvpages::Memory::cuda(config));
        EXPECT_EQ(cache.device().kind, std::uint32_t{KVPAGES_DEVICE_KIND_CUDA});
        EXPECT_EQ(cache.device().ordinal, 1u);
        EXPECT_GT(standin_used_bytes(1), 0u);
        // The engine's buffer is, for once, a cache's.
        const auto region = cache.regions().at(0);
        const auto adopted =
            kvpages::Memory::adopted(cache.device(), region.data, region.size_bytes);
        const auto inside = kvpages::Cache::allocate(p, adopted);
        EXPECT_EQ(inside.regions().at(0).data, region.data);
        EXPECT_EQ(inside.device().ordinal, 1u);
    }
    const auto pinned = kvpages::Cache::allocate(p, kvpages::Memory::pinned(on_second));
    EXPECT_EQ(pinned.device().kind, std::uint32_t{KVPAGES_DEVICE_KIND_HOST});
    EXPECT_EQ(standin_num_leaks("pinned memory"), 1u);
    EXPECT_EQ(kind_of_error([&] { static_cast<void>(kvpages::Memory::pinned(shareable)); }),
              "unknown_value");
    kvpages::CudaMemory senseless;
    senseless.rdma = true;
    EXPECT_EQ(kind_of_error([&] { static_cast<void>(kvpages::Memory::cuda(senseless)); }),
              "bad_values");
}

TEST_F(CudaHpp, CachesAreResized) {
    const kvpages::Plan p = plan();
    kvpages::CudaMemory config;
    config.is_virtual = true;
    for (const bool on_device : {false, true}) {
        SCOPED_TRACE(on_device ? "device" : "host");
        auto cache = kvpages::Cache::allocate(
            p, on_device ? kvpages::Memory::cuda(config) : kvpages::Memory::host(), 0, 3);
        EXPECT_EQ(cache.num_blocks(), 3u);
        const std::uint64_t most = cache.max_blocks();
        EXPECT_EQ(most, p.worker().num_blocks);
        cache.resize(most, {});
        EXPECT_EQ(cache.num_blocks(), most);
        const std::vector<std::int32_t> in_use{0, 4};
        EXPECT_EQ(kind_of_error([&] { cache.resize(4, in_use); }), "block_in_use");
        cache.resize(5, in_use);
        EXPECT_EQ(cache.num_blocks(), 5u);
        EXPECT_EQ(kind_of_error([&] { cache.resize(most + 1, {}); }), "cache_num_blocks");
    }
    auto fixed = kvpages::Cache::allocate(p, kvpages::Memory::cuda(config));
    EXPECT_EQ(kind_of_error([&] { fixed.resize(1, {}); }), "cache_is_fixed");
}
