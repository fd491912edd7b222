// specs.json: pages, demand, merging and uniformity of layer specs.
#include <algorithm>

#include "category.h"
#include "config.h"
#include "library.h"
#include "spec.h"

namespace conformance {
namespace {

kvpages_limits limits(const Json& config) {
    auto limits = sized<kvpages_limits>();
    limits.max_model_len = config.at("max_model_len");
    limits.context_parallel_size = context_parallel_size(config);
    limits.max_tokens_in_flight = tokens_in_flight(config);
    limits.max_encoder_tokens = config.at("max_num_encoder_input_tokens");
    limits.state_cache_mode = state_cache_mode(config.at("mamba_cache_mode"));
    return limits;
}

// `demand(limits, out)` for each config. Single windowed specs say how many blocks admit a request.
template <typename Demand>
Json per_config(const Json& configs, bool has_admission_limit, Demand demand) {
    Json entries = Json::array();
    for (const Json& config : configs) {
        const kvpages_limits given = limits(config);
        auto needed = sized<kvpages_demand>();
        try {
            check(demand(&given, &needed));
        } catch (const LibraryError& error) {
            entries.push_back(error.outcome());
            continue;
        }
        Json entry = {{"max_memory_usage_bytes", needed.bytes_per_request},
                      {"max_num_blocks_per_req", needed.row_blocks},
                      {"max_in_flight_tokens", given.max_tokens_in_flight}};
        if (has_admission_limit) {
            entry["max_admission_blocks_per_request"] = needed.admission_blocks;
        }
        entries.push_back(entry);
    }
    return entries;
}

// The spec's fields as the library keeps them: a merge of one.
Json stored_fields(const kvpages_spec& spec) {
    const kvpages_spec* one = &spec;
    auto merged = sized<kvpages_spec>();
    check(kvpages_spec_merge(&one, 1, &merged));
    return spec_object(merged);
}

kvpages_spec_info describe(const kvpages_spec& spec) {
    auto info = sized<kvpages_spec_info>();
    check(kvpages_spec_describe(&spec, &info));
    return info;
}

Json run_single(const Json& input) {
    const Json& given = input.at("spec");
    const Spec converted(given);
    const kvpages_spec spec = converted.c();
    const kvpages_spec_info info = describe(spec);
    Json outcome = {{"spec", stored_fields(spec)},
                    {"page_size_bytes", info.page_size_bytes},
                    {"storage_block_size", info.storage_block_size},
                    {"kind", reported_kind(spec.kind)},
                    {"sliding_window", reported_window(given)}};
    if (!is_state(given)) {
        outcome["real_page_size_bytes"] = info.real_page_size_bytes;
        outcome["unpadded_page_size_bytes"] = info.unpadded_page_size_bytes;
    }
    outcome["per_config"] = per_config(
        input.at("configs"), is_windowed(given),
        [&](auto* limits, auto* out) { return kvpages_spec_demand(&spec, limits, out); });
    return outcome;
}

// Case files tell fewer kinds apart than the library, so its mixed set may be of one kind there.
const char* reported_kind_of_set(std::uint32_t kind, const kvpages_spec* const* specs,
                                 std::size_t count) {
    const char* first = reported_kind(specs[0]->kind);
    const bool is_one = std::all_of(specs, specs + count, [&](const kvpages_spec* spec) {
        return std::string(first) == reported_kind(spec->kind);
    });
    return kind == KVPAGES_SPEC_KIND_MIXED && is_one ? first : reported_kind(kind);
}

Json set_outcome(const Json& input, const kvpages_spec* const* specs, std::size_t count) {
    auto info = sized<kvpages_spec_set_info>();
    check(kvpages_spec_set_describe(specs, count, &info));
    std::vector<std::uint64_t> pages(count);
    std::size_t num_pages = 0;
    check(kvpages_spec_set_copy_page_sizes(specs, count, pages.data(), pages.size(), &num_pages));
    if (num_pages > pages.size() || num_pages != info.num_distinct_page_sizes) {
        throw Contradiction("a set reports two numbers of distinct page sizes");
    }
    pages.resize(num_pages);

    Json layers = Json::array();
    const Json& given = input.at("spec").at("layers");
    for (std::size_t i = 0; i < count; ++i) {
        layers.push_back({given[i][0], stored_fields(*specs[i])});
    }
    const bool is_sliding = info.sliding_window != 0;
    return {
        {"spec", {{"type", "uniform_type"}, {"block_size", info.block_size}, {"layers", layers}}},
        {"page_size_bytes", info.page_size_bytes},
        {"storage_block_size", info.block_size},
        {"kind", reported_kind_of_set(info.kind, specs, count)},
        {"sliding_window", is_sliding ? Json(info.sliding_window) : Json()},
        {"distinct_page_sizes_sorted", pages},
        {"num_layer_tuples", info.num_layer_tuples},
        {"per_config", per_config(input.at("configs"), false, [&](auto* limits, auto* out) {
             return kvpages_spec_set_demand(specs, count, limits, out);
         })}};
}

Json run_spec(const Json& input) {
    const Json& given = input.at("spec");
    if (!is_uniform_type(given)) {
        return run_single(input);
    }
    SpecList list;
    for (const Json& layer : given.at("layers")) {
        list.add(layer[1]);
    }
    return list.with_pointers([&](const kvpages_spec* const* specs, std::size_t count) {
        return set_outcome(input, specs, count);
    });
}

Json run_with_block_size(const Json& input) {
    Spec converted(input.at("spec"));
    converted.set_block_size(input.at("block_size"));
    const kvpages_spec spec = converted.c();
    const kvpages_spec_info info = describe(spec);
    return {{"spec", stored_fields(spec)},
            {"page_size_bytes", info.page_size_bytes},
            {"storage_block_size", info.storage_block_size}};
}

Json run_merge(const Json& input) {
    SpecList list;
    for (const Json& spec : input.at("specs")) {
        list.add(spec);
    }
    return list.with_pointers([](const kvpages_spec* const* specs, std::size_t count) -> Json {
        auto merged = sized<kvpages_spec>();
        check(kvpages_spec_merge(specs, count, &merged));
        return {{"spec", spec_object(merged)},
                {"page_size_bytes", describe(merged).page_size_bytes}};
    });
}

Json run_uniform(const Json& input) {
    SpecList list;
    for (const Json& layer : input.at("layers")) {
        list.add(layer[1]);
    }
    return list.with_pointers([](const kvpages_spec* const* specs, std::size_t count) -> Json {
        auto uniformity = sized<kvpages_uniformity>();
        check(kvpages_spec_uniformity(specs, count, &uniformity));
        return {{"is_uniform_type", uniformity.is_uniform_type != 0},
                {"is_uniform_spec", uniformity.is_uniform_spec != 0},
                {"is_page_size_uniform", uniformity.is_page_size_uniform != 0}};
    });
}

Json run_quant_mode(const Json& input) {
    const std::string cache_dtype = input.at("cache_dtype");
    std::uint32_t mode = 0;
    check(kvpages_quant_mode_from_cache_dtype(cache_dtype.c_str(), &mode));
    return {{"kv_quant_mode", quant_mode_name(mode)}};
}

Json run_approximate_gcd(const Json& input) {
    const std::vector<std::uint64_t> values = input.at("values");
    const Json& given = input.at("lower_bound");
    const std::uint64_t lower_bound = given.is_null() ? 0 : given.get<std::uint64_t>();
    std::uint64_t gcd = 0;
    check(kvpages_layer_tuple_count(values.data(), values.size(), lower_bound, &gcd));
    return {{"gcd", gcd}};
}

}  // namespace

Category specs_category() {
    return {
        {"spec",
         {Schema(R"({"op": "string", "spec": "spec", "configs": [{
                       "max_model_len": "uint", "original_max_model_len": "null",
                       "dcp_size": "uint", "max_num_batched_tokens": "uint",
                       "max_concurrent_batches": "uint", "max_num_encoder_input_tokens": "uint",
                       "mamba_cache_mode": "string", "disable_hybrid_kv_cache_manager": "bool",
                       "num_gpu_blocks_override": "null", "enable_cross_layers_blocks": "bool",
                       "use_eagle": "bool"}]})"),
          Schema::of_expectation(R"({
              "spec": "spec", "page_size_bytes": "uint", "real_page_size_bytes?": "uint",
              "unpadded_page_size_bytes?": "uint", "storage_block_size": "uint", "kind": "string",
              "sliding_window": "uint|null", "distinct_page_sizes_sorted?": ["uint"],
              "num_layer_tuples?": "uint", "per_config": [{
                  "max_memory_usage_bytes": "uint", "max_num_blocks_per_req": "uint",
                  "max_in_flight_tokens": "uint", "max_admission_blocks_per_request?": "uint"}]})"),
          run_spec, normalise_specs}},
        {"with_block_size",
         {Schema(R"({"op": "string", "spec": "spec", "block_size": "uint"})"),
          Schema::of_expectation(
              R"({"spec": "spec", "page_size_bytes": "uint", "storage_block_size": "uint"})"),
          run_with_block_size, normalise_specs}},
        {"merge",
         {Schema(R"({"op": "string", "specs": ["spec"]})"),
          Schema::of_expectation(R"({"spec": "spec", "page_size_bytes": "uint"})"), run_merge,
          normalise_specs}},
        {"uniform",
         {Schema(R"({"op": "string", "layers": [["string", "spec"]]})"),
          Schema::of_expectation(R"({"is_uniform_type": "bool", "is_uniform_spec": "bool",
                                     "is_page_size_uniform": "bool"})"),
          run_uniform, as_it_is}},
        {"quant_mode",
         {Schema(R"({"op": "string", "cache_dtype": "string"})"),
          Schema::of_expectation(R"({"kv_quant_mode": "string"})"), run_quant_mode, as_it_is}},
        {"approximate_gcd",
         {Schema(R"({"op": "string", "values": ["uint"], "lower_bound": "uint|null"})"),
          Schema::of_expectation(R"({"gcd": "uint"})"), run_approximate_gcd, as_it_is}},
    };
}

}  // namespace conformance
