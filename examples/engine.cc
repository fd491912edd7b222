// What an inference engine does with kvpages, in host memory: it describes its layers, plans,
// allocates, and gives each layer's view to its kernels.
//
// engine/models.h    three published models as layers
// engine/blocks.h    a block allocator and block tables
// engine/attention.h attention in plain C++ that reads through a view
// engine/views.h     the table of views, and their reports checked
// engine/trial.h     requests that run through the views, compared with memory that is not paged

#include "engine/models.h"
#include "engine/trial.h"
#include "engine/views.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

struct Totals {
    std::size_t num_layers = 0;
    float max_abs_diff = 0;
};

void run(const engine::EngineModel& model, Totals& totals) {
    std::printf("=== %s ===\n\n", model.name.c_str());
    const kvpages::Plan plan = kvpages::Plan::make(model.model, model.plan_config);
    std::printf("%s\n", plan.explain().c_str());

    const kvpages::Cache cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    engine::print_views(plan, cache);
    const std::size_t num_layers = engine::check_reports(cache);

    // None fills its last block, and the first is longer than a sliding window. The fourth starts
    // when the third ends, in blocks that had another owner.
    const std::vector<std::uint64_t> lengths = {1500, 333, 47, 200};
    engine::ModelTrial trial(model, plan, cache);
    const float difference = trial.run(lengths);
    std::printf("\n  %zu reports hold; %zu requests through %s: max abs diff %g\n\n", num_layers,
                lengths.size(), trial.tried_layers().c_str(), static_cast<double>(difference));
    totals.num_layers += num_layers;
    totals.max_abs_diff = std::max(totals.max_abs_diff, difference);
}

}  // namespace

int main() {
    try {
        Totals totals;
        run(engine::llama_3_1_8b(), totals);
        run(engine::gemma_4_26b(), totals);
        run(engine::qwen_3_5_35b(), totals);
        std::printf("views verified: %zu layers, max abs diff %g\n", totals.num_layers,
                    static_cast<double>(totals.max_abs_diff));
        return totals.max_abs_diff == 0 ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "engine: %s\n", error.what());
        return 1;
    }
}
