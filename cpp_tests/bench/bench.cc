// What an engine pays at start-up, and for a view while it runs. Everything that is timed goes
// through the C interface.

#include <benchmark/benchmark.h>
#include <kvpages/kvpages.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "views.h"

namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// --- models --------------------------------------------------------------------------------------

/// Adds layers of a model with five sliding layers to each full one, and two page sizes to unify.
void add_sliding_hybrid(kvpages::Model& model, std::size_t first, std::size_t num_layers) {
    const kvpages::Backend backend = kvpages::Backend::preset(kvpages::Preset::triton_nhd);
    kvpages::AttentionSpec sliding;
    sliding.kind = kvpages::AttentionKind::sliding_window;
    sliding.num_kv_heads = 8;
    sliding.head_size = 256;
    sliding.sliding_window = 1024;
    kvpages::AttentionSpec full;
    full.num_kv_heads = 2;
    full.head_size = 512;
    for (std::size_t i = first; i < first + num_layers; ++i) {
        model.add(layer_name(i), i % 6 == 5 ? full : sliding, backend, 16);
    }
}

kvpages::Model sliding_hybrid(std::size_t num_layers) {
    kvpages::Model model;
    add_sliding_hybrid(model, 0, num_layers);
    return model;
}

// --- planning ------------------------------------------------------------------------------------

kvpages_plan_config plan_config() {
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.max_model_len = 131072;
    config.max_tokens_in_flight = 8192;
    config.reserved_blocks = 1;
    return config;
}

kvpages_plan* create_plan(const std::vector<kvpages_worker>& workers) {
    const kvpages_plan_config config = plan_config();
    kvpages_plan* plan = nullptr;
    must(kvpages_plan_create(&config, workers.data(), workers.size(), &plan, nullptr));
    return plan;
}

/// Plans from layers that are already described, views proven, and destroys the plan.
void time_plans(benchmark::State& state, const std::vector<kvpages_worker>& workers) {
    for (auto _ : state) kvpages_plan_destroy(create_plan(workers));
}

void plan_hybrid126(benchmark::State& state) {
    const kvpages::Model model = sliding_hybrid(126);
    time_plans(state, {{model.get(), 40 * kGiB}});
}
BENCHMARK(plan_hybrid126)->Name("plan/hybrid126")->Unit(benchmark::kMicrosecond);

constexpr std::size_t kNumStages = 16;
constexpr std::size_t kRanksPerStage = 64;

/// One stage of a pipeline over 126 layers.
kvpages::Model stage_model(std::size_t stage) {
    const std::size_t first = 126 * stage / kNumStages, end = 126 * (stage + 1) / kNumStages;
    kvpages::Model model;
    add_sliding_hybrid(model, first, end - first);
    return model;
}

/// All ranks of a stage name one model.
void plan_workers1024(benchmark::State& state) {
    std::vector<kvpages::Model> models;
    std::vector<kvpages_worker> workers;
    for (std::size_t stage = 0; stage < kNumStages; ++stage) {
        models.push_back(stage_model(stage));
        workers.insert(workers.end(), kRanksPerStage, {models.back().get(), 40 * kGiB});
    }
    time_plans(state, workers);
}
BENCHMARK(plan_workers1024)->Name("plan/workers1024")->Unit(benchmark::kMicrosecond);

/// Every worker has a model handle of its own.
void plan_workers1024_own_models(benchmark::State& state) {
    std::vector<kvpages::Model> models;
    std::vector<kvpages_worker> workers;
    for (std::size_t i = 0; i < kNumStages * kRanksPerStage; ++i) {
        models.push_back(stage_model(i / kRanksPerStage));
        workers.push_back({models.back().get(), 40 * kGiB});
    }
    time_plans(state, workers);
}
BENCHMARK(plan_workers1024_own_models)
    ->Name("plan/workers1024_own_models")
    ->Unit(benchmark::kMicrosecond);

void plan_layers(benchmark::State& state) {
    const auto num_layers = static_cast<std::size_t>(state.range(0));
    const kvpages::Model model = sliding_hybrid(num_layers);
    // The more layers, the more memory, so that the number of blocks stays about the same.
    time_plans(state, {{model.get(), state.range(0) * kGiB / 3}});
    state.counters["per_layer"] =
        benchmark::Counter(static_cast<double>(num_layers),
                           benchmark::Counter::kIsIterationInvariantRate |
                               benchmark::Counter::kInvert);
    state.SetComplexityN(state.range(0));
}
BENCHMARK(plan_layers)
    ->Name("plan/layers")
    ->Arg(128)
    ->Arg(1024)
    ->Arg(8192)
    ->Unit(benchmark::kMicrosecond)
    ->Complexity(benchmark::oN);

/// The first explanation of a plan: the plan keeps it, so each is asked of a new plan, which is
/// made outside the time that counts.
void explain_hybrid126(benchmark::State& state) {
    using Clock = std::chrono::steady_clock;
    const kvpages::Model model = sliding_hybrid(126);
    std::vector<char> text(std::size_t{1} << 20);
    for (auto _ : state) {
        kvpages_plan* plan = create_plan({{model.get(), 40 * kGiB}});
        std::size_t length = 0;
        const Clock::time_point begin = Clock::now();
        must(kvpages_plan_copy_explanation(plan, KVPAGES_TEXT_FORMAT_TEXT, text.data(), text.size(),
                                           &length));
        state.SetIterationTime(std::chrono::duration<double>(Clock::now() - begin).count());
        kvpages_plan_destroy(plan);
    }
}
BENCHMARK(explain_hybrid126)
    ->Name("explain/hybrid126")
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// --- caches --------------------------------------------------------------------------------------

void time_caches(benchmark::State& state, const kvpages_plan* plan, const kvpages::Memory& memory) {
    for (auto _ : state) kvpages_cache_destroy(create_cache(plan, memory));
}

/// Host memory, which is mapped and unmapped but never touched.
void cache_create_hybrid126(benchmark::State& state) {
    const kvpages::Model model = sliding_hybrid(126);
    kvpages::PlanConfig config;
    config.memory_bytes = 8 * kGiB;
    config.max_model_len = 8192;
    config.max_tokens_in_flight = 2048;
    const kvpages::Plan plan = kvpages::Plan::make(model, config);
    time_caches(state, plan.get(), kvpages::Memory::host());
}
BENCHMARK(cache_create_hybrid126)
    ->Name("cache_create/hybrid126")
    ->Unit(benchmark::kMicrosecond);

/// What an engine with a planner of its own pays for the views of 64 hybrid layers: its plan
/// checked, views built and proven (both happen while the plan is taken), a cache made.
void cache_create_views64(benchmark::State& state) {
    const kvpages::Model model = state_hybrid64();
    const Parts64 parts;
    FreeMemory free_memory;
    const kvpages::Memory memory = free_memory.memory();
    for (auto _ : state) {
        kvpages_plan* plan = create_plan_from(model, parts);
        kvpages_cache_destroy(create_cache(plan, memory));
        kvpages_plan_destroy(plan);
    }
}
BENCHMARK(cache_create_views64)->Name("cache_create/views64")->Unit(benchmark::kMicrosecond);

/// Of that, the cache alone.
void cache_create_views64_cache_only(benchmark::State& state) {
    const kvpages::Model model = state_hybrid64();
    const Parts64 parts;
    FreeMemory free_memory;
    kvpages_plan* plan = create_plan_from(model, parts);
    time_caches(state, plan, free_memory.memory());
    kvpages_plan_destroy(plan);
}
BENCHMARK(cache_create_views64_cache_only)
    ->Name("cache_create/views64_cache_only")
    ->Unit(benchmark::kMicrosecond);

// --- views ---------------------------------------------------------------------------------------

void view_query(benchmark::State& state) {
    const Cache64 cache;
    std::size_t layer = 0;
    for (auto _ : state) {
        kvpages_tensor tensor;
        must(kvpages_cache_get_view(cache.get(), layer, 0, &tensor));
        benchmark::DoNotOptimize(tensor);
        layer = (layer + 1) % 64;
    }
}
BENCHMARK(view_query);

void view_query_by_name(benchmark::State& state) {
    const Cache64 cache;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < 64; ++i) names.push_back(layer_name(i));
    std::size_t at = 0;
    for (auto _ : state) {
        std::size_t layer = 0;
        kvpages_tensor tensor;
        must(kvpages_cache_find_layer(cache.get(), names[at].c_str(), &layer));
        must(kvpages_cache_get_view(cache.get(), layer, 0, &tensor));
        benchmark::DoNotOptimize(tensor);
        at = (at + 1) % 64;
    }
}
BENCHMARK(view_query_by_name)->Name("view_query/by_name");

}  // namespace
