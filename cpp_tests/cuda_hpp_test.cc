// The C++ interface to devices.
#include "support/cuda.h"

#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using CudaHpp = support::CudaTest;
using support::has_attribute;
using support::num_devices;
using support::on_standin;

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
    const std::uint32_t count = kvpages::device_count();
    EXPECT_EQ(count, num_devices());
    const auto info = kvpages::DeviceInfo::of(count - 1);
    char name[256] = {};
    DRIVER(cuDeviceGetName(name, sizeof(name), static_cast<int>(count) - 1));
    EXPECT_STREQ(info.name, name);
    EXPECT_GE(info.compute_capability_major, 8u);  // the oldest that the kernels are for
    EXPECT_EQ(info.has_virtual_memory, 1u);
    EXPECT_EQ(kind_of_error([count] { static_cast<void>(kvpages::DeviceInfo::of(count)); }),
              "no_device");
}

TEST_F(CudaHpp, EveryKindOfMemoryHoldsACache) {
    const kvpages::Plan p = plan();
    const auto last = static_cast<int>(num_devices()) - 1;
    kvpages::CudaMemory on_last;
    on_last.ordinal = static_cast<std::uint32_t>(last);
    kvpages::CudaMemory shareable = on_last;
    shareable.is_virtual = true;
    shareable.rdma =
        has_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, last);
    shareable.shareable =
        has_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, last);
    for (const kvpages::CudaMemory& config : {on_last, shareable}) {
        const auto cache = kvpages::Cache::allocate(p, kvpages::Memory::cuda(config));
        EXPECT_EQ(cache.device().kind, std::uint32_t{KVPAGES_DEVICE_KIND_CUDA});
        EXPECT_EQ(cache.device().ordinal, on_last.ordinal);
        if (on_standin()) {
            EXPECT_GT(standin_used_bytes(1), 0u);
        }
        // The engine's buffer is, for once, a cache's.
        const auto region = cache.regions().at(0);
        const auto adopted =
            kvpages::Memory::adopted(cache.device(), region.data, region.size_bytes);
        const auto inside = kvpages::Cache::allocate(p, adopted);
        EXPECT_EQ(inside.regions().at(0).data, region.data);
        EXPECT_EQ(inside.device().ordinal, on_last.ordinal);
    }
    const auto pinned = kvpages::Cache::allocate(p, kvpages::Memory::pinned(on_last));
    EXPECT_EQ(pinned.device().kind, std::uint32_t{KVPAGES_DEVICE_KIND_HOST});
    if (on_standin()) {
        EXPECT_EQ(standin_num_leaks("pinned memory"), 1u);
    }
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
