// What is said of devices, and snapshots of what lies in their memory.
#include "support/cuda.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using Json = nlohmann::json;
using CudaObserve = support::CudaTest;

class Recorder : public kvpages::Logger {
public:
    Recorder() { kvpages::set_logger(this, kvpages::LogLevel::debug); }
    ~Recorder() override { kvpages::set_logger(nullptr); }

    void log(kvpages::LogLevel level, const char* message) override {
        text_ += std::to_string(static_cast<std::uint32_t>(level)) + " " + message + "\n";
        CUcontext current = nullptr;
        cuCtxGetCurrent(&current);
        num_in_a_context_ += current != nullptr ? 1 : 0;
    }

    /// How often a text was said.
    std::size_t count(const std::string& text) const {
        std::size_t found = 0;
        for (std::size_t at = text_.find(text); at != std::string::npos;
             at = text_.find(text, at + 1)) {
            ++found;
        }
        return found;
    }
    const std::string& text() const { return text_; }
    /// Messages that came while a context was current, which is not the engine's own.
    std::size_t num_in_a_context() const { return num_in_a_context_; }

private:
    std::string text_;
    std::size_t num_in_a_context_ = 0;
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
    config.memory_bytes = 8 << 20;
    config.max_model_len = 64;
    config.max_tokens_in_flight = 16;
    return kvpages::Plan::make(model, config);
}

}  // namespace

TEST_F(CudaObserve, DevicesAndKernelsAreNamed) {
    Recorder recorder;
    const kvpages::Plan made = plan();
    {
        const kvpages::Memory memory = kvpages::Memory::cuda({});
        EXPECT_EQ(recorder.count("2 opened CUDA device 0, primary context, driver of CUDA 1"), 1u)
            << recorder.text();
        const std::string name = kvpages::DeviceInfo::of(0).name;
        EXPECT_EQ(recorder.count(name + ", compute capability "), 1u) << recorder.text();
        const kvpages::Cache cache = kvpages::Cache::allocate(made, memory);
        EXPECT_EQ(recorder.count("in memory of CUDA device 0"), 1u) << recorder.text();
        const kvpages::Ops ops(cache), others(cache);
        EXPECT_EQ(recorder.count("3 CUDA device 0: loaded kernels, "), 1u)
            << "once for a context\n" << recorder.text();
        EXPECT_EQ(recorder.count(" of PTX, which the driver compiles"), 1u) << recorder.text();
    }
    EXPECT_EQ(recorder.count("3 a cache is destroyed"), 1u);
    EXPECT_EQ(recorder.num_in_a_context(), 0u) << recorder.text();
}

TEST_F(CudaObserve, MemoryThatADriverKeepsIsTold) {
    NEEDS_STANDIN("fails when it is told to");
    Recorder recorder;
    {
        const kvpages::Cache cache = kvpages::Cache::allocate(plan(), kvpages::Memory::cuda({}));
        // It goes all the same: a driver tells so of an earlier failure, too.
        ASSERT_TRUE(standin_fail("cuMemFree_v2", 1, CUDA_ERROR_UNKNOWN));
    }
    EXPECT_EQ(recorder.count("\n1 the driver failed when 8388608 bytes of memory were given back: "
                             "cuMemFree_v2 failed"), 1u)
        << recorder.text();
    EXPECT_EQ(recorder.num_in_a_context(), 0u) << recorder.text();
}

TEST_F(CudaObserve, MemoryThatIsOutOfReachIsTold) {
    NEEDS_STANDIN("fails when it is told to");
    Recorder recorder;
    CUcontext primary = nullptr;
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
    CUdeviceptr lost = 0;
    {
        const kvpages::Cache cache = kvpages::Cache::allocate(plan(), kvpages::Memory::cuda({}));
        lost = reinterpret_cast<CUdeviceptr>(cache.allocation(0).data);
        // Its context cannot be entered, not even at the second try.
        ASSERT_TRUE(standin_fail("cuCtxPushCurrent_v2", 1, CUDA_ERROR_UNKNOWN));
        ASSERT_TRUE(standin_fail("cuCtxPushCurrent_v2", 2, CUDA_ERROR_UNKNOWN));
    }
    EXPECT_EQ(recorder.count("\n1 the driver failed when 8388608 bytes of memory were given back: "
                             "cuCtxPushCurrent_v2 failed"), 1u)
        << recorder.text();
    EXPECT_EQ(cuCtxPushCurrent_v2(primary), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFree_v2(lost), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxPopCurrent_v2(&primary), CUDA_SUCCESS);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
}

TEST_F(CudaObserve, ASnapshotOfACacheIsOfTheDevicesMemory) {
    const kvpages::Plan made = plan();
    kvpages::CudaMemory config;
    config.is_virtual = true;
    const kvpages::Memory memory = kvpages::Memory::cuda(config);
    kvpages::Cache cache = kvpages::Cache::allocate(made, memory, 0, 10);
    kvpages_cache_snapshot before = cache.snapshot();
    for (const std::uint64_t num_blocks : {cache.max_blocks(), std::uint64_t{10}}) {
        cache.resize(num_blocks, {});
        const kvpages_cache_snapshot now = cache.snapshot();
        EXPECT_EQ(now.generation, before.generation + 1);
        EXPECT_EQ(now.held_bytes > before.held_bytes, num_blocks > before.num_blocks);
        if (support::on_standin()) {
            EXPECT_EQ(now.held_bytes, standin_used_bytes(0));
        }
        before = now;
    }
    const Json json = Json::parse(cache.snapshot_json());
    EXPECT_EQ(json.at("cuda_device"), 0);
    EXPECT_EQ(json.at("held_bytes"), before.held_bytes);
}

TEST_F(CudaObserve, ASnapshotOfTablesIsOfTheDevicesMemory) {
    kvpages::TablesConfig config;
    config.max_requests = 4;
    config.max_tokens = 32;
    config.device = {KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};
    kvpages::Tables tables = kvpages::Tables::make({{16, 16, 4, 0, 0}}, config);
    kvpages_tables_snapshot now = tables.snapshot();
    EXPECT_GE(now.device_bytes, 2 * 4 * 4 * 4u + 32 * 8u);
    EXPECT_GT(now.pinned_bytes, 0u);
    EXPECT_EQ(now.pinned_bytes % now.pinned_pages, 0u);
    EXPECT_EQ(now.pinned_pages_in_use, 0u);
    if (support::on_standin()) {
        EXPECT_EQ(now.device_bytes, standin_used_bytes(0));
    }
    const std::vector<std::int32_t> blocks{1, 2}, requests{0, 2}, query_start{0, 3, 4},
        seq_lens{3, 1};
    const std::vector<std::int64_t> positions{0, 1, 2, 0};
    tables.append(0, 0, blocks);
    const support::Stream stream;
    tables.prepare({requests, query_start, seq_lens, positions, stream.get()});
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 2u);
    EXPECT_EQ(now.batch_requests, 2u);
    EXPECT_EQ(now.batch_tokens, 4u);
    EXPECT_EQ(now.pinned_pages_in_use, 1u);
    EXPECT_EQ(now.is_lost, 0u);
    EXPECT_EQ(Json::parse(tables.snapshot_json()).at("cuda_device"), 0);
    stream.wait();
    if (!support::on_standin()) return;
    ASSERT_TRUE(standin_fail("cuLaunchKernel", 1, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(kvpages_tables_gather(tables.get(), requests.data(), 2, 2, stream.get()),
              KVPAGES_STATUS_DEVICE_UNAVAILABLE);
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 3u) << "the device may have done a part";
    EXPECT_EQ(now.is_lost, 1u);
    EXPECT_EQ(now.batch_requests + now.batch_tokens, 0u);
    tables.prepare({requests, query_start, seq_lens, positions, stream.get()});
    now = tables.snapshot();
    EXPECT_EQ(now.is_lost, 0u);
    EXPECT_EQ(now.batch_requests, 2u);
    stream.wait();
}
