// views.json: a cache from given groups and tensors, its views, and the bytes written through them.
#include <algorithm>

#include "category.h"
#include "fill.h"
#include "library.h"
#include "setup.h"
#include "spec.h"

namespace conformance {
namespace {

struct View {
    kvpages_tensor tensor;
    kvpages_view_report report;
    kvpages_allocation allocation;
};

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// A view, once its report, its tensor and its allocation are found to agree.
View get_view(const kvpages_cache* cache, std::size_t layer, std::size_t state) {
    View view{};
    view.report = sized<kvpages_view_report>();
    check(kvpages_cache_get_view(cache, layer, state, &view.tensor));
    check(kvpages_cache_get_report(cache, layer, state, &view.report));
    view.allocation = get_allocation(cache, view.report.allocation);

    std::uint64_t elements = 1;
    for (std::uint32_t dim = 0; dim < view.tensor.ndim; ++dim) {
        elements *= static_cast<std::uint64_t>(view.tensor.shape[dim]);
    }
    const std::uint64_t offset = view.report.offset_bytes;
    const std::uint64_t reach = reach_bytes(view.tensor);
    const std::uint64_t end = reach == 0 ? 0 : offset + reach;
    const auto agree = [&](const char* what, std::uint64_t reported, std::uint64_t found) {
        if (reported != found) {
            throw Contradiction("layer " + text(kvpages_cache_layer_name(cache, layer)) +
                                ", state " + std::to_string(state) + ": reports " + what + " " +
                                std::to_string(reported) + ", but its tensor has " +
                                std::to_string(found));
        }
    };
    agree("data at", address(view.allocation.data) + offset, address(view.tensor.data));
    agree("logical_bytes", view.report.logical_bytes,
          elements * kvpages_dtype_bytes(view.tensor.dtype));
    agree("end_bytes", view.report.end_bytes, end);
    if (end > view.allocation.size_bytes) {
        throw Contradiction("layer " + text(kvpages_cache_layer_name(cache, layer)) + ", state " +
                            std::to_string(state) + ": reaches byte " + std::to_string(end) +
                            " of an allocation of " + std::to_string(view.allocation.size_bytes));
    }
    return view;
}

Json view_object(const View& view) {
    const kvpages_tensor& tensor = view.tensor;
    const std::vector<std::int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
    const std::vector<std::int64_t> strides(tensor.strides, tensor.strides + tensor.ndim);
    return {{"dtype", kvpages_dtype_name(tensor.dtype)},
            {"shape", shape},
            {"strides", strides},
            {"storage_offset_bytes", view.report.offset_bytes},
            {"allocation", view.report.allocation},
            {"nbytes", view.report.logical_bytes},
            {"end_bytes", view.report.end_bytes}};
}

// Attention or state, by the spec of whoever owns the memory.
const char* layer_kind(const Layers& layers, const kvpages_cache* cache, std::uint64_t owner) {
    const Layer* layer = layers.find(text(kvpages_cache_layer_name(cache, owner)));
    if (layer == nullptr || layer->spec == nullptr) {
        throw Contradiction("a view is owned by a layer that does not exist");
    }
    return is_state(*layer->spec) ? "mamba" : "attention";
}

Json layer_objects(const Layers& layers, const kvpages_cache* cache) {
    Json objects = Json::array();
    for (std::size_t i = 0; i < kvpages_cache_num_layers(cache); ++i) {
        Json views = Json::array();
        const char* kind = "without views";
        for (std::size_t state = 0; state < kvpages_cache_num_views(cache, i); ++state) {
            const View view = get_view(cache, i, state);
            kind = layer_kind(layers, cache, view.report.owner_layer);
            views.push_back(view_object(view));
        }
        objects.push_back(
            {{"name", text(kvpages_cache_layer_name(cache, i))}, {"kind", kind}, {"views", views}});
    }
    return objects;
}

// Fills in the order given and hashes every allocation.
Json fill_and_hash(const kvpages_cache* cache, const Json& fills) {
    for (const Json& entry : fills) {
        const std::string name = entry.at("layer");
        const std::size_t state = entry.at("state");
        std::size_t layer = 0;
        check(kvpages_cache_find_layer(cache, name.c_str(), &layer));
        const View view = get_view(cache, layer, state);
        fill(view.tensor, view.report.block_dim, entry.at("blocks"), entry.at("start"));
    }
    return hashes(cache);
}

Json run_views(const Json& input) {
    const Layers layers(input);
    const Model model = build_model(layers, input);
    const PlanHandle plan = build_plan(model.handle.get(), input);
    const Cache cache = create_cache(plan.get());

    Json allocations = Json::array();
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.handle.get()); ++i) {
        allocations.push_back({{"size", get_allocation(cache.handle.get(), i).size_bytes}});
    }
    Json outcome = {{"allocations", allocations},
                    {"layers", layer_objects(layers, cache.handle.get())}};
    if (!input.at("fill").empty()) {
        outcome["sha256"] = fill_and_hash(cache.handle.get(), input.at("fill"));
    }
    return outcome;
}

// Layers by name, and no strides of dimensions that are never stepped along.
void normalise_views(Json& outcome) {
    if (!outcome.contains("layers") || is_error(outcome.at("layers"))) {
        return;
    }
    Json by_name = Json::object();
    for (Json& layer : outcome.at("layers")) {
        for (Json& view : layer.at("views")) {
            const Json& shape = view.at("shape");
            Json& strides = view.at("strides");
            for (std::size_t dim = 0; dim < std::min(shape.size(), strides.size()); ++dim) {
                if (shape[dim] == 0 || shape[dim] == 1) {
                    strides[dim] = nullptr;
                }
            }
        }
        const std::string name = layer.at("name");
        if (by_name.contains(name)) {
            throw Contradiction("layers: " + name + " is listed twice");
        }
        by_name[name] = {{"kind", layer.at("kind")}, {"views", layer.at("views")}};
    }
    outcome["layers"] = by_name;
}

}  // namespace

// pass_kv_cache_config makes no difference here: a packed tensor is packed for every reader.
Category views_category() {
    return {
        {"",
         {Schema(R"({
              "kv_cache_config": "cache_config", "backends": {"*": "backend"},
              "attn_groups": [{"backend": "string", "layer_names": ["string"], "spec": "spec",
                               "kv_cache_group_id": "uint"}],
              "kernel_block_sizes": ["uint|null"], "cache_dtype": "string",
              "shared_layers": [["string", "string"]], "pass_kv_cache_config": "bool",
              "fill": [{"layer": "string", "state": "uint", "blocks": "numbers|null",
                        "start": "uint"}]})"),
          Schema::of_expectation(R"({
              "allocations": [{"size": "uint"}],
              "layers": [{"name": "string", "kind": "string", "views": [{
                  "dtype": "string", "shape": ["uint"], "strides": ["uint"],
                  "storage_offset_bytes": "uint", "allocation": "uint", "nbytes": "uint",
                  "end_bytes": "uint"}]}],
              "layout_warnings": [["uint"]], "sha256?": ["string"]})"),
          run_views, normalise_views}},
    };
}

}  // namespace conformance
