// What an engine pays for the metadata of a step, its own callbacks left empty.

#include "metadata.h"

#include <benchmark/benchmark.h>

namespace {

/// Build, then the metadata and the slot mapping of 64 layers in several cache groups.
void step_metadata256(benchmark::State& state) {
    MetadataStep step;
    for (auto _ : state) {
        step.build();
        for (std::size_t layer = 0; layer < kNumLayers; ++layer) {
            benchmark::DoNotOptimize(step.layer(layer));
        }
    }
    state.counters["groups"] = static_cast<double>(step.num_groups());
}
BENCHMARK(step_metadata256)->Name("step/metadata256");

}  // namespace
