// zeroing.json: blocks cleared in a cache of known bytes.
#include <algorithm>

#include "category.h"
#include "library.h"
#include "setup.h"
#include "spec.h"

namespace conformance {
namespace {

OpsHandle create_ops(const kvpages_cache* cache, std::uint64_t max_concurrency) {
    auto config = sized<kvpages_ops_config>();
    config.max_concurrency = max_concurrency;
    kvpages_ops* raw = nullptr;
    check(kvpages_ops_create(cache, &config, &raw));
    return OpsHandle(raw);
}

// All layers but those that only the runner knows.
std::vector<std::size_t> chosen_layers(const kvpages_cache* cache, const Json& runner_only) {
    std::vector<std::size_t> chosen;
    for (std::size_t layer = 0; layer < kvpages_cache_num_layers(cache); ++layer) {
        const Json name = text(kvpages_cache_layer_name(cache, layer));
        if (std::find(runner_only.begin(), runner_only.end(), name) == runner_only.end()) {
            chosen.push_back(layer);
        }
    }
    return chosen;
}

Json run_zeroing(const Json& input) {
    const Layers layers(input);
    const Model model = build_model(layers, input);
    const PlanHandle plan = build_plan(model.handle.get(), input);
    const Cache cache = create_cache(plan.get());
    fill_allocations(cache.handle.get());
    const OpsHandle ops = create_ops(cache.handle.get(), input.at("max_concurrency"));

    std::vector<std::size_t> chosen;
    auto selection = sized<kvpages_block_selection>();
    const bool all = input.at("runner_only_layers").is_null();
    if (!all) {
        chosen = chosen_layers(cache.handle.get(), input.at("runner_only_layers"));
        selection.layers = chosen.data();
        selection.num_layers = chosen.size();
    }
    for (const Json& list : input.at("zero")) {
        const auto ids = list.get<std::vector<std::int32_t>>();
        check(kvpages_ops_zero_blocks(ops.get(), ids.data(), ids.size(),
                                      all ? nullptr : &selection, nullptr));
    }
    return {{"sha256", hashes(cache.handle.get())}};
}

// How the bytes are cut is up to a library; their hash decides.
void normalise_zeroing(Json& outcome) {
    for (const char* field : {"segments", "page_size_el", "block_size_el"}) {
        outcome.erase(field);
    }
    if (!is_error(outcome) && !outcome.contains("sha256")) {
        throw Inexpressible("expect: neither sha256 nor an error");
    }
}

}  // namespace

Category zeroing_category() {
    return {
        {"",
         {Schema(R"({
              "kv_cache_config": "cache_config", "backends": {"*": "backend"},
              "attn_groups": [{"backend": "string", "layer_names": ["string"], "spec": "spec",
                               "kv_cache_group_id": "uint"}],
              "kernel_block_sizes": ["uint|null"], "cache_dtype": "string",
              "shared_layers": [["string", "string"]], "zero": [["int"]],
              "runner_only_layers": "strings|null", "max_concurrency": "uint"})"),
          Schema::of_expectation(R"({
              "segments": "segments|null", "page_size_el": "uint|null",
              "block_size_el": "uint|null", "sha256": ["string"]})"),
          run_zeroing, normalise_zeroing}},
    };
}

}  // namespace conformance
