// copying.json: blocks copied in a cache of known bytes.
#include "category.h"
#include "library.h"
#include "setup.h"

namespace conformance {
namespace {

Json run_copying(const Json& input) {
    const Layers layers(input);
    const Model model = build_model(layers, input);
    const PlanHandle plan = build_plan(model.handle.get(), input);
    const Cache cache = create_cache(plan.get());
    fill_allocations(cache.handle.get());
    Json outcome = {{"sha256_before", hashes(cache.handle.get())}};

    auto config = sized<kvpages_ops_config>();
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    check(kvpages_ops_create(cache.handle.get(), &config, &raw));
    const OpsHandle ops(raw);

    std::vector<std::size_t> chosen;
    for (const Json& name : input.at("layers")) {
        chosen.push_back(find_layer(cache.handle.get(), name));
    }
    auto selection = sized<kvpages_block_selection>();
    selection.layers = chosen.data();
    selection.num_layers = chosen.size();
    std::vector<kvpages_block_copy> copies;
    for (const Json& pair : input.at("copies")) {
        copies.push_back({pair[0], pair[1]});
    }
    const std::uint64_t num_blocks = input.at("num_blocks");
    if (num_blocks == 0) {
        throw Inexpressible("num_blocks of 0 is not told");
    }
    check(kvpages_ops_copy_blocks(ops.get(), copies.data(), copies.size(), &selection,
                                  num_blocks, nullptr));
    outcome["sha256_after"] = hashes(cache.handle.get());
    return outcome;
}

}  // namespace

Category copying_category() {
    return {
        {"",
         {Schema(R"({
              "kv_cache_config": "cache_config", "backends": {"*": "backend"},
              "attn_groups": [{"backend": "string", "layer_names": ["string"], "spec": "spec",
                               "kv_cache_group_id": "uint"}],
              "kernel_block_sizes": ["uint|null"], "cache_dtype": "string",
              "shared_layers": [["string", "string"]], "layers": ["string"],
              "num_blocks": "uint", "copies": [["int", "int"]]})"),
          Schema::of_expectation(
              R"({"sha256_before": ["string"], "sha256_after": ["string"]})"),
          run_copying, as_it_is}},
    };
}

}  // namespace conformance
