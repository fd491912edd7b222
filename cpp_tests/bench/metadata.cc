// What an engine pays for the metadata of a step, its own callbacks left empty.

#include <benchmark/benchmark.h>
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kNumLayers = 64;
constexpr std::int64_t kNumRequests = 256;

struct EmptyCallbacks {
    static std::int32_t create(void*, const kvpages_builder_info*, void**) { return 0; }
    static std::int32_t build(void* user, void*, const kvpages_common_metadata*, void*,
                              void** out) {
        *out = user;
        return 0;
    }
    static void destroy(void*, void*) {}
};

/// 256 requests decode one token each: build, then the metadata and the slot mapping of 64 layers in
/// several cache groups.
void step_metadata256(benchmark::State& state) {
    const kvpages::Backend backend = kvpages::Backend::preset(kvpages::Preset::triton_nhd);
    kvpages::AttentionSpec sliding;
    sliding.kind = kvpages::AttentionKind::sliding_window;
    sliding.num_kv_heads = 8;
    sliding.head_size = 128;
    sliding.sliding_window = 1024;
    kvpages::AttentionSpec full;
    full.num_kv_heads = 8;
    full.head_size = 128;
    kvpages::Model model;
    for (std::size_t i = 0; i < kNumLayers; ++i) {
        model.add("model.layers." + std::to_string(i), i % 4 == 3 ? full : sliding, backend, 16);
    }
    kvpages::PlanConfig config;
    config.max_model_len = 4096;
    config.num_blocks_override = 4096;
    const kvpages::Plan plan = kvpages::Plan::make(model, config);

    int metadata = 0;
    kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
    callbacks.user = &metadata;
    callbacks.create = EmptyCallbacks::create;
    callbacks.build = EmptyCallbacks::build;
    callbacks.destroy = EmptyCallbacks::destroy;
    kvpages_attention_config attention_config = KVPAGES_ATTENTION_CONFIG_INIT;
    attention_config.callbacks = &callbacks;
    kvpages_attention* attention = nullptr;
    kvpages::check(kvpages_attention_create(plan.get(), &attention_config, &attention));
    const std::size_t num_groups = kvpages_attention_num_cache_groups(attention);

    std::vector<std::int32_t> numbers(kNumRequests + 1);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::vector<std::int32_t> table(kNumRequests * 256);
    std::vector<std::int64_t> slots(kNumRequests);
    const std::int64_t table_shape[] = {kNumRequests, 256}, table_strides[] = {256, 1};
    const std::int64_t slots_shape[] = {kNumRequests}, slots_strides[] = {1};
    const std::vector<kvpages_tensor> tables(
        num_groups, {table.data(), table_shape, table_strides, KVPAGES_DTYPE_I32, 2});
    const std::vector<kvpages_tensor> mappings(
        num_groups, {slots.data(), slots_shape, slots_strides, KVPAGES_DTYPE_I64, 1});
    kvpages_step step = KVPAGES_STEP_INIT;
    step.num_requests = step.num_tokens = kNumRequests;
    step.max_query_len = 1;
    step.max_seq_len = 4096;
    step.query_start = step.query_start_host = step.seq_lens = numbers.data();
    step.block_tables = tables.data();
    step.slot_mappings = mappings.data();
    step.num_block_tables = step.num_slot_mappings = step.num_cache_groups = num_groups;
    for (auto _ : state) {
        if (kvpages_attention_build(attention, &step) != KVPAGES_STATUS_OK) {
            state.SkipWithError(kvpages_last_error_message());
            break;
        }
        for (std::size_t layer = 0; layer < kNumLayers; ++layer) {
            benchmark::DoNotOptimize(kvpages_attention_layer_metadata(attention, 0, layer));
        }
    }
    state.counters["groups"] = static_cast<double>(num_groups);
    kvpages_attention_destroy(attention);
}
BENCHMARK(step_metadata256)->Name("step/metadata256");

}  // namespace
