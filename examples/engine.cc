// What an inference engine does with kvpages: it describes its layers, plans, allocates, and then
// serves requests, step by step, through the views of its cache.
//
// engine [--device DEVICE]: the cache, its tables and operations are in the host's memory, or on a
// CUDA device with cuda:N. It prints the same for both.
//
// engine/models.h     three published models as layers, and small ones for each cache format
// engine/views.h      the table of views, and their reports checked
// engine/blocks.h     a block allocator
// engine/requests.h   requests and batches of them
// engine/metadata.h   what kernels are told of a step
// engine/loop.h       the loop: start reading at Loop::step()
// engine/attention.h  attention in plain C++ that reads through a view
// engine/trial.h      layers that run in the cache and in memory that is not paged
// device/             where the cache is; on the host it does nothing

#include "device/device.h"
#include "engine/loop.h"
#include "engine/models.h"
#include "engine/views.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Totals {
    std::size_t num_layers = 0;
    std::uint64_t num_steps = 0;
    float max_abs_diff = 0;  ///< of the published models, where it must be 0
    bool holds = true;
};

/// None fills its last block, and the first is longer than a sliding window. The last two find no
/// room until others end, and get blocks that had another owner.
std::vector<engine::Arrival> arrivals() {
    return {
        {1400, 20, {}}, {310, 30, {}}, {47, 12, {}}, {0, 25, 1}, {200, 16, {}}, {90, 10, {}},
    };
}

void print_counts(const engine::Counts& counts) {
    std::printf("\n  %7s %7s %9s %6s %12s %14s\n", "steps", "tokens", "requests", "forks",
                "most blocks", "blocks reused");
    std::printf("  %7llu %7llu %9llu %6llu %12llu %14llu\n",
                static_cast<unsigned long long>(counts.steps),
                static_cast<unsigned long long>(counts.tokens),
                static_cast<unsigned long long>(counts.requests),
                static_cast<unsigned long long>(counts.forks),
                static_cast<unsigned long long>(counts.most_blocks),
                static_cast<unsigned long long>(counts.reused_blocks));
}

/// Such as "1 full, 5 sliding".
std::string kinds_of(const engine::Loop& loop) {
    std::map<std::string, int> counts;
    for (const auto& trial : loop.trials()) ++counts[trial->layer().kind];
    std::string text;
    for (const auto& [kind, count] : counts) {
        text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + kind;
    }
    return text;
}

void run(const engine::EngineModel& model, const device::Device& device, Totals& totals) {
    std::printf("=== %s ===\n\n", model.name.c_str());
    const kvpages::Plan plan = kvpages::Plan::make(model.model, model.plan_config);
    std::printf("%s\n", plan.explain().c_str());

    const kvpages::Cache cache = kvpages::Cache::allocate(plan, device.memory());
    engine::print_views(plan, cache);
    const std::size_t num_layers = engine::check_reports(cache);

    engine::Loop loop(model, plan, cache, device);
    loop.run(arrivals());
    const engine::Differences differences = loop.differences();
    const float difference = std::max(differences.rows.largest, differences.paging.largest);
    print_counts(loop.counts());
    std::printf("\n  %zu reports hold; a layer of each group ran (%s): max abs diff %g\n\n",
                num_layers, kinds_of(loop).c_str(), static_cast<double>(difference));
    totals.num_layers += num_layers;
    totals.num_steps += loop.counts().steps;
    totals.max_abs_diff = std::max(totals.max_abs_diff, difference);
    totals.holds = totals.holds && differences.hold();
}

/// The same requests with a small model, compared with f32 that was never rounded, and with
/// memory that is not paged and holds what was stored.
void run(const engine::CacheFormat& format, const device::Device& device, Totals& totals) {
    const engine::EngineModel model = engine::small_llama(format);
    const kvpages::Plan plan = kvpages::Plan::make(model.model, model.plan_config);
    const kvpages::Cache cache = kvpages::Cache::allocate(plan, device.memory());
    engine::Loop loop(model, plan, cache, device);
    loop.run(arrivals());
    const auto [rows, outputs, paging] = loop.differences();
    std::printf("  %-19s  %9.6f %9.6f  %9.6f %9.6f  %6g\n", format.name.c_str(),
                static_cast<double>(rows.largest), static_cast<double>(rows.bound),
                static_cast<double>(outputs.largest), static_cast<double>(outputs.bound),
                static_cast<double>(paging.largest));
    totals.num_steps += loop.counts().steps;
    totals.holds = totals.holds && loop.differences().hold();
}

/// Throws std::invalid_argument that says what is wrong.
device::Place parse_options(int argc, char** argv) {
    device::Place place;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name != "--device") {
            throw std::invalid_argument("there is no option " + name + ", but --device");
        }
        if (++i == argc) throw std::invalid_argument(name + " needs a value: host or cuda:N");
        try {
            place = device::parse_place(argv[i]);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(name + " " + error.what());
        }
    }
    return place;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const device::Device device(parse_options(argc, argv));
        Totals totals;
        run(engine::llama_3_1_8b(), device, totals);
        run(engine::gemma_4_26b(), device, totals);
        run(engine::qwen_3_5_35b(), device, totals);
        std::printf("=== cache formats ===\n\n");
        std::printf("  %-19s  %9s %9s  %9s %9s  %6s\n", "keys and values in", "rows off", "at most",
                    "result", "at most", "paging");
        for (const engine::CacheFormat& format : engine::cache_formats()) {
            run(format, device, totals);
        }
        std::printf("\nsteps verified: %llu steps, all differences %s\n",
                    static_cast<unsigned long long>(totals.num_steps),
                    totals.holds ? "within bounds" : "NOT within bounds");
        std::printf("views verified: %zu layers, max abs diff %g\n", totals.num_layers,
                    static_cast<double>(totals.max_abs_diff));
        return totals.holds && totals.max_abs_diff == 0 ? 0 : 1;
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "engine: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "engine: %s\n", error.what());
        return 1;
    }
}
