// bind.json: layer names to layer indices, and to the order in which an engine binds caches.
#include "category.h"
#include "library.h"

namespace conformance {
namespace {

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) {
        if (text.find('\0') != std::string::npos) {
            throw Inexpressible("a layer name with a NUL character");
        }
        pointers.push_back(text.c_str());
    }
    return pointers;
}

std::uint64_t num_modules(const Json& input) {
    const std::uint64_t count = input.at("num_attn_module");
    if (count == 0) {
        throw Inexpressible("num_attn_module of 0 cannot be told from 1");
    }
    return count;
}

Json run_index(const Json& input) {
    const std::vector<const char*> name = c_strings({input.at("name")});
    const std::string text = input.at("name");
    std::uint64_t index = 0;
    check(kvpages_layer_index(text.c_str(), num_modules(input), &index));
    return {{"layer_index", index}};
}

Json run_bind(const Json& input) {
    const std::vector<std::string> layers = input.at("kv_caches");
    const std::vector<std::string> context = input.at("forward_context");
    const std::vector<const char*> layer_pointers = c_strings(layers);
    const std::vector<const char*> context_pointers = c_strings(context);
    auto config = sized<kvpages_bind_config>();
    config.layer_names = layer_pointers.data();
    config.num_layers = layer_pointers.size();
    config.context_names = context_pointers.data();
    config.num_context_names = context_pointers.size();
    config.num_attention_modules = num_modules(input);
    config.num_already_bound = input.at("runner_len");

    std::vector<std::size_t> order(layers.size());
    std::vector<std::size_t> bound(context.size());
    check(kvpages_bind_layers(&config, order.data(), bound.data()));
    Json runner_order = Json::array();
    for (const std::size_t index : order) {
        runner_order.push_back(layers.at(index));
    }
    Json pairs = Json::array();
    for (std::size_t i = 0; i < context.size(); ++i) {
        pairs.push_back({context[i], bound[i] == SIZE_MAX ? Json() : Json(layers.at(bound[i]))});
    }
    return {{"runner_order", runner_order}, {"bound", pairs}};
}

}  // namespace

Category bind_category() {
    return {
        {"index",
         {Schema(R"({"op": "string", "name": "string", "num_attn_module": "uint"})"),
          Schema::of_expectation(R"({"layer_index": "int"})"), run_index, as_it_is}},
        {"bind",
         {Schema(R"({"op": "string", "kv_caches": ["string"], "forward_context": ["string"],
                     "num_attn_module": "uint", "runner_len": "uint"})"),
          Schema::of_expectation(
              R"({"runner_order": ["string"], "bound": [["string", "string|null"]]})"),
          run_bind, as_it_is}},
    };
}

}  // namespace conformance
