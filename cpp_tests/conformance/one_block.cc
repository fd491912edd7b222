#include "one_block.h"

#include <algorithm>

#include "spec.h"

namespace conformance {
namespace {

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) {
        pointers.push_back(text.c_str());
    }
    return pointers;
}

// A layout that holds what the layer stores.
const char* layout_for(const Json& spec) {
    if (is_state(spec)) return nullptr;
    if (is_latent(spec)) return "block | token | content";
    if (spec.at("type") == "tq_full_attention" && spec.at("tq_slot_size") != 0) {
        return "block | token | head | content";
    }
    return "block | token | head | kv*content";
}

}  // namespace

BackendHandle one_block_backend(const OneBlockLayer& layer) {
    auto config = sized<kvpages_backend_config>();
    config.name = layer.backend_name.c_str();
    config.layout = layer.spec == nullptr ? "block | token | content" : layout_for(*layer.spec);
    config.flags = layer.follows_block_stride ? KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE : 0u;
    std::vector<std::uint64_t> exact, multiples;
    if (layer.sizes == nullptr) {
        multiples.push_back(1);
    } else {
        for (const Json& size : *layer.sizes) {
            if (size.is_object()) {
                multiples.push_back(size.at("multiple_of"));
            } else {
                // What is no number is no size; neither is 0.
                exact.push_back(size.is_string() ? 0 : size.get<std::uint64_t>());
            }
        }
    }
    config.kernel_block_sizes = exact.data();
    config.num_kernel_block_sizes = exact.size();
    config.kernel_block_multiples = multiples.data();
    config.num_kernel_block_multiples = multiples.size();
    kvpages_backend* raw = nullptr;
    check(kvpages_backend_create(&config, &raw));
    return BackendHandle(raw);
}

OneBlockPlan one_block_plan(const std::vector<OneBlockLayer>& layers,
                            const std::vector<std::vector<std::string>>& groups) {
    OneBlockPlan made;
    kvpages_model* model = nullptr;
    check(kvpages_model_create(&model));
    made.model.reset(model);
    std::vector<std::vector<std::string>> owners;
    std::vector<std::uint64_t> pages;
    for (const OneBlockLayer& layer : layers) {
        auto given = sized<kvpages_layer>();
        given.name = layer.name.c_str();
        if (!layer.backend_name.empty()) {
            made.backends.push_back(one_block_backend(layer));
            given.backend = made.backends.back().get();
        }
        given.num_query_heads = layer.num_heads;
        if (!layer.shares_with.empty()) {
            given.shares_with = layer.shares_with.c_str();
            check(kvpages_model_add_layer(model, &given));
            continue;
        }
        const Spec spec(*layer.spec);
        const kvpages_spec c_spec = spec.c();
        given.spec = &c_spec;
        check(kvpages_model_add_layer(model, &given));
        if (layer.spec->at("type") != "encoder_only") {
            auto info = sized<kvpages_spec_info>();
            check(kvpages_spec_describe(&c_spec, &info));
            owners.push_back({layer.name});
            pages.push_back(info.page_size_bytes);
        }
    }
    std::vector<std::vector<const char*>> lists;
    lists.reserve(groups.size() + owners.size());
    std::vector<kvpages_part_group> part_groups;
    for (const std::vector<std::string>& group : groups) {
        lists.push_back(c_strings(group));
        part_groups.push_back({lists.back().data(), lists.back().size(), 0});
    }
    std::vector<kvpages_part_tensor> tensors;
    for (std::size_t i = 0; i < owners.size(); ++i) {
        lists.push_back(c_strings(owners[i]));
        tensors.push_back({pages[i], 0, 0, lists.back().data(), 1});
    }
    auto parts = sized<kvpages_plan_parts>();
    parts.num_blocks = 1;
    parts.groups = part_groups.data();
    parts.num_groups = part_groups.size();
    parts.tensors = tensors.data();
    parts.num_tensors = tensors.size();
    kvpages_plan* plan = nullptr;
    check(kvpages_plan_create_from_parts(model, &parts, &plan));
    made.plan.reset(plan);
    return made;
}

Json kernel_block_size(const kvpages_plan* plan, std::size_t group) {
    auto info = sized<kvpages_group_info>();
    check(kvpages_plan_get_group(plan, 0, group, &info));
    auto spec = sized<kvpages_spec>();
    check(kvpages_plan_get_group_spec(plan, 0, group, 0, &spec, nullptr));
    if (spec.kind == KVPAGES_SPEC_KIND_ENCODER_ONLY) {
        return info.kernel_block_size == 0 ? Json() : Json(info.kernel_block_size);
    }
    if (info.kernel_block_size == 0) {
        // The plan leaves it open without backends; what no backends agree on is the answer.
        check(kvpages_select_kernel_block_size(info.block_size, nullptr, 0,
                                               &info.kernel_block_size));
    }
    return info.kernel_block_size;
}

}  // namespace conformance
