// The loop of examples/engine.cc on a device whose memory the host cannot touch, and where work is
// done when it is waited for: a pointer that is followed on the wrong side, or a result that is read
// too early, does not pass.
#include "engine/loop.h"

#include "support/cuda.h"

#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using CudaEngine = support::CudaTest;

/// One forks; the last two wait for a row, and get blocks that had another owner.
std::vector<engine::Arrival> arrivals() {
    return {{150, 8, {}}, {40, 12, {}}, {7, 5, {}}, {0, 9, 1}, {70, 6, {}}, {33, 4, {}}};
}

/// Full attention, a sliding window and states, which share blocks.
engine::EngineModel small_hybrid() {
    const kvpages::Backend attention = kvpages::Backend::preset(kvpages::Preset::flash_infer_hnd);
    const engine::Layer full{"", "full", 4, 2, 64, 0}, sliding{"", "sliding", 4, 2, 64, 48};
    engine::EngineModel hybrid{
        "hybrid", {}, {}, engine::laptop(4096), engine::bf16_on_both_sides()};
    hybrid.plan_config.memory_bytes = std::int64_t{8} << 20;

    kvpages::StateSpec state;
    state.kind = kvpages::StateKind::gated_delta_net;
    state.add(kvpages::Dtype::bf16, {3, 64});
    state.add(kvpages::Dtype::f32, {2, 16, 16});
    const kvpages_hybrid_block block =
        kvpages::hybrid_block_size(engine::attention_spec(full, 16), state, attention);
    state.block_size = hybrid.plan_config.max_model_len;
    state.page_size_padded_bytes = block.page_size_bytes;
    for (int i = 0; i < 6; ++i) {
        if (i % 3 == 0) {
            engine::add_state(hybrid, i, state,
                              kvpages::Backend::preset(kvpages::Preset::gated_delta_net));
        } else {
            engine::add_attention(hybrid, i % 3 == 1 ? full : sliding, i, block.block_size,
                                  attention);
        }
    }
    return hybrid;
}

struct Outcome {
    engine::Counts counts;
    engine::Differences differences;
    std::vector<std::string> kinds;
};

bool operator==(const engine::Difference& a, const engine::Difference& b) {
    return a.largest == b.largest && a.bound == b.bound && a.holds == b.holds;
}

Outcome serve(const engine::EngineModel& model, const device::Place& place) {
    const device::Device device(place);
    const kvpages::Plan plan = kvpages::Plan::make(model.model, model.plan_config);
    const kvpages::Cache cache = kvpages::Cache::allocate(plan, device.memory());
    engine::check_reports(cache);
    engine::Loop loop(model, plan, cache, device);
    loop.run(arrivals());
    Outcome outcome{loop.counts(), loop.differences(), {}};
    for (const auto& trial : loop.trials()) outcome.kinds.push_back(trial->layer().kind);
    return outcome;
}

void expect_the_same_on_a_device(const engine::EngineModel& model) {
    const Outcome host = serve(model, {}), device = serve(model, {support::num_devices() - 1});
    EXPECT_TRUE(device.differences.hold());
    EXPECT_TRUE(device.differences.rows == host.differences.rows);
    EXPECT_TRUE(device.differences.outputs == host.differences.outputs);
    EXPECT_TRUE(device.differences.paging == host.differences.paging);
    EXPECT_EQ(device.counts.steps, host.counts.steps);
    EXPECT_EQ(device.counts.tokens, host.counts.tokens);
    EXPECT_EQ(device.counts.forks, 1u);
    EXPECT_GT(device.counts.reused_blocks, 0u);
}

}  // namespace

TEST_F(CudaEngine, EachCacheFormatIsTheSameAsOnTheHost) {
    for (const engine::CacheFormat& format : engine::cache_formats()) {
        SCOPED_TRACE(format.name);
        expect_the_same_on_a_device(engine::small_llama(format));
    }
}

TEST_F(CudaEngine, SlidingWindowsAndStatesAreTheSameAsOnTheHost) {
    const engine::EngineModel model = small_hybrid();
    const Outcome host = serve(model, {});
    EXPECT_EQ(host.kinds.size(), 3u);
    EXPECT_EQ(host.differences.paging.largest, 0);
    expect_the_same_on_a_device(model);
}

TEST_F(CudaEngine, AnUploadWaitsForWorkThatReadsTheLastOne) {
    NEEDS_STANDIN("lets work wait, and counts it");
    const device::Device device({0});
    device::Upload<float> upload(device);
    device::Download<float> download(device);
    const float* first = upload(std::vector<float>{1, 2, 3}).data();
    EXPECT_EQ(standin_num_pending(), 1u);
    const auto second = upload(std::vector<float>{4, 5});
    EXPECT_EQ(standin_num_pending(), 1u) << "the first copy was not waited for";
    EXPECT_EQ(second.data(), first);
    const auto back = download(second);
    EXPECT_EQ(std::vector<float>(back.begin(), back.end()), (std::vector<float>{4, 5}));
    EXPECT_EQ(upload({}).size(), 0u);
    upload(std::vector<float>(100));  // larger, and under way when it is destroyed
    EXPECT_EQ(standin_num_pending(), 1u);

    const device::Device host;
    device::Upload<float> stays(host);
    const std::vector<float> numbers{6};
    EXPECT_EQ(stays(numbers).data(), numbers.data()) << "copied on the host";
}

TEST_F(CudaEngine, PagesGoToTheDeviceAndBack) {
    const device::Device device({0});
    const engine::EngineModel model = engine::small_llama(engine::cache_formats().front());
    const kvpages::Plan plan = kvpages::Plan::make(model.model, model.plan_config);
    const kvpages::Cache cache = kvpages::Cache::allocate(plan, device.memory());
    device::HostPages pages(device, plan, cache);
    const kvpages::Tensor view = pages.cache().view(1);
    const kvpages::ViewAxes axes = cache.axes(1);
    const auto value_of_block = [&](std::uint64_t block) -> float& {
        return static_cast<float*>(view.data)[axes.value(block, 3, 1)];
    };
    const std::vector<std::int32_t> blocks{3, 4, 9, 2};
    for (const std::int32_t block : blocks) {
        value_of_block(static_cast<std::uint64_t>(block)) = static_cast<float>(block);
    }
    value_of_block(5) = 5;  // not put
    pages.put(1, blocks);
    if (support::on_standin()) {
        EXPECT_EQ(standin_num_pending(), 0u) << "the host may change the pages now";
    }
    for (std::uint64_t block = 0; block < 10; ++block) value_of_block(block) = -1;
    pages.fetch_all(std::vector<std::int32_t>{2, 3, 4, 5, 6, 7, 8, 9});
    EXPECT_EQ(value_of_block(1), -1);  // not fetched
    for (const int block : {2, 3, 4, 9}) {
        EXPECT_EQ(value_of_block(static_cast<std::uint64_t>(block)), static_cast<float>(block));
    }
    for (const std::uint64_t block : {5u, 6u, 7u, 8u}) EXPECT_EQ(value_of_block(block), 0);
}

TEST_F(CudaEngine, PlacesThatAreNone) {
    EXPECT_EQ(device::parse_place("host").name(), "host");
    EXPECT_EQ(device::parse_place("cuda:12").name(), "cuda:12");
    for (const char* text : {"", "cuda", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999", "gpu:0"}) {
        EXPECT_THROW(static_cast<void>(device::parse_place(text)), std::invalid_argument) << text;
    }
    try {
        const device::Device device({support::num_devices()});
        ADD_FAILURE() << "a device that is not there";
    } catch (const kvpages::Error& error) {
        EXPECT_EQ(error.status(), KVPAGES_STATUS_DEVICE_UNAVAILABLE);
        EXPECT_EQ(error.kind(), "no_device");
    }
}
