// views.json: a cache from given groups and tensors, its views, and the bytes written through them.
#include <algorithm>

#include "category.h"
#include "fill.h"
#include "layers.h"
#include "layout.h"
#include "library.h"
#include "sha256.h"
#include "spec.h"

namespace conformance {
namespace {

bool stores_values(const Json& spec) {
    return !is_latent(spec) && (!spec.contains("head_size_v") || spec.at("head_size_v") != 0);
}

// The cache dtype string by which a backend chooses its shape.
std::string cache_dtype(const Json& spec, const Json& input) {
    const bool is_plain =
        spec.value("kv_quant_mode", "none") == "none" && spec.at("type") != "tq_full_attention";
    return is_plain ? "auto" : input.at("cache_dtype").get<std::string>();
}

BackendHandle create_backend(const Json& backend, const Json& spec, const Json& input) {
    const std::string name = backend.at("name");
    auto config = sized<kvpages_backend_config>();
    config.name = name.c_str();
    const Json& multiple = backend.at("require_block_size_multiple_of");
    const std::uint64_t multiples[] = {multiple.is_null() ? 1 : multiple.get<std::uint64_t>()};
    config.kernel_block_multiples = multiples;
    config.num_kernel_block_multiples = 1;
    const Json& heads = backend.at("require_num_kv_heads");
    config.num_kv_heads = heads.is_null() ? 0 : heads.get<std::uint64_t>();
    config.flags = KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE;

    Layout shape;
    if (!is_state(spec)) {
        shape = layout(backend, cache_dtype(spec, input), stores_values(spec));
        config.layout = shape.dims.c_str();
        config.memory_order = shape.memory_order ? shape.memory_order->c_str() : nullptr;
        config.flags |= shape.needs_equal_kv_widths ? KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS : 0u;
    }
    kvpages_backend* raw = nullptr;
    check(kvpages_backend_create(&config, &raw));
    return BackendHandle(raw);
}

// A model and what it must not outlive.
struct Model {
    std::vector<BackendHandle> backends;
    ModelHandle handle;
};

Model build_model(const Layers& layers, const Json& input) {
    Model model;
    kvpages_model* raw = nullptr;
    check(kvpages_model_create(&raw));
    model.handle.reset(raw);
    for (const Layer& layer : layers.all()) {
        auto given = sized<kvpages_layer>();
        given.name = layer.name.c_str();
        std::string target;
        if (layer.shares_with != nullptr) {
            target = *layer.shares_with;
            given.shares_with = target.c_str();
        }
        std::vector<Spec> specs;
        kvpages_spec spec;
        if (layer.spec != nullptr) {
            specs.emplace_back(*layer.spec);
            spec = specs.back().c();
            given.spec = &spec;
        }
        // An encoder's own attention has no cache, so nothing for a backend to lay out.
        if (layer.backend != nullptr && layer.spec->at("type") != "encoder_only") {
            model.backends.push_back(create_backend(*layer.backend, *layer.spec, input));
            given.backend = model.backends.back().get();
        }
        check(kvpages_model_add_layer(model.handle.get(), &given));
    }
    return model;
}

std::vector<const char*> names(const Json& list) {
    std::vector<const char*> pointers;
    for (const Json& name : list) {
        pointers.push_back(name.get_ref<const std::string&>().c_str());
    }
    return pointers;
}

PlanHandle build_plan(const kvpages_model* model, const Json& input) {
    const Json& config = input.at("kv_cache_config");
    std::vector<std::vector<const char*>> lists;
    const auto keep = [&](const Json& list) -> const std::vector<const char*>& {
        return lists.emplace_back(names(list));
    };
    std::vector<kvpages_part_group> groups;
    for (const Json& group : config.at("groups")) {
        const auto& list = keep(group.at("layer_names"));
        groups.push_back(
            {list.data(), list.size(), group.at("is_eagle_group").get<bool>() ? 1u : 0u});
    }
    std::vector<kvpages_part_tensor> tensors;
    for (const Json& tensor : config.at("tensors")) {
        const auto& list = keep(tensor.at("shared_by"));
        tensors.push_back({tensor.at("size"), tensor.at("offset"), tensor.at("block_stride"),
                           list.data(), list.size()});
    }
    std::vector<std::uint64_t> kernel_blocks;
    for (const Json& size : input.at("kernel_block_sizes")) {
        kernel_blocks.push_back(size.is_null() ? 0 : size.get<std::uint64_t>());
    }
    const std::uint64_t no_kernel_block = 0;  // an empty list is not NULL, which asks for a choice

    auto parts = sized<kvpages_plan_parts>();
    parts.num_blocks = config.at("num_blocks");
    parts.groups = groups.data();
    parts.num_groups = groups.size();
    parts.tensors = tensors.data();
    parts.num_tensors = tensors.size();
    parts.kernel_block_sizes = kernel_blocks.empty() ? &no_kernel_block : kernel_blocks.data();
    parts.num_kernel_block_sizes = kernel_blocks.size();
    kvpages_plan* raw = nullptr;
    check(kvpages_plan_create_from_parts(model, &parts, &raw));
    return PlanHandle(raw);
}

struct Cache {
    MemoryHandle memory;
    CacheHandle handle;
};

Cache create_cache(const kvpages_plan* plan) {
    Cache cache;
    kvpages_memory* memory = nullptr;
    check(kvpages_memory_create_host(&memory));
    cache.memory.reset(memory);
    auto config = sized<kvpages_cache_config>();
    config.memory = memory;
    kvpages_cache* raw = nullptr;
    check(kvpages_cache_create(plan, &config, &raw, nullptr));
    cache.handle.reset(raw);
    return cache;
}

struct View {
    kvpages_tensor tensor;
    kvpages_view_report report;
    kvpages_allocation allocation;
};

kvpages_allocation get_allocation(const kvpages_cache* cache, std::size_t index) {
    kvpages_allocation allocation{};
    check(kvpages_cache_get_allocation(cache, index, &allocation));
    return allocation;
}

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
    Json digests = Json::array();
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache); ++i) {
        const kvpages_allocation allocation = get_allocation(cache, i);
        digests.push_back(sha256(allocation.data, allocation.size_bytes));
    }
    return digests;
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
