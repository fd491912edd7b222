#include "setup.h"

#include "layout.h"
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

std::vector<const char*> names(const Json& list) {
    std::vector<const char*> pointers;
    for (const Json& name : list) {
        pointers.push_back(name.get_ref<const std::string&>().c_str());
    }
    return pointers;
}

}  // namespace

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

kvpages_allocation get_allocation(const kvpages_cache* cache, std::size_t index) {
    kvpages_allocation allocation{};
    check(kvpages_cache_get_allocation(cache, index, &allocation));
    return allocation;
}

Json hashes(const kvpages_cache* cache) {
    Json digests = Json::array();
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache); ++i) {
        const kvpages_allocation allocation = get_allocation(cache, i);
        digests.push_back(sha256(allocation.data, allocation.size_bytes));
    }
    return digests;
}

void fill_allocations(const kvpages_cache* cache) {
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache); ++i) {
        const kvpages_allocation allocation = get_allocation(cache, i);
        auto* bytes = static_cast<unsigned char*>(allocation.data);
        for (std::uint64_t byte = 0; byte < allocation.size_bytes; ++byte) {
            bytes[byte] = static_cast<unsigned char>(byte % 251);
        }
    }
}

std::size_t find_layer(const kvpages_cache* cache, const std::string& name) {
    std::size_t layer = 0;
    check(kvpages_cache_find_layer(cache, name.c_str(), &layer));
    return layer;
}

}  // namespace conformance
