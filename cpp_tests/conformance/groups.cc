// groups.json: attention groups and their builders, and what comes before them.
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "category.h"
#include "one_block.h"
#include "spec.h"

namespace conformance {
namespace {

// A backend's identity: two of one module and class are one backend.
std::string identity(const Json& backend) {
    const Json& full_name = backend.at("full_name");
    return full_name[0].get<std::string>() + "." + full_name[1].get<std::string>();
}

const Json& backend_of(const Json& input, const Json& layer) {
    const auto found = input.at("backends").find(layer.at("backend").get<std::string>());
    if (found == input.at("backends").end()) {
        throw Inexpressible("layers: no backend is named " + layer.at("backend").dump());
    }
    return *found;
}

bool shares(const Json& layer) {
    return layer.at("kind") == "attention" && !layer.at("shared_with").is_null();
}

const Json* find_layer(const Json& input, const std::string& name) {
    for (const Json& layer : input.at("layers")) {
        if (layer.at("name") == name) return &layer;
    }
    return nullptr;
}

const Json* spec_in(const Json& group_spec, const std::string& name) {
    if (!is_uniform_type(group_spec)) return &group_spec;
    for (const Json& pair : group_spec.at("layers")) {
        if (pair[0] == name) return &pair[1];
    }
    return nullptr;
}

// A padded page can only be read by a backend that follows the block stride, whatever a case says.
bool is_padded(const Json& spec) {
    if (is_state(spec)) return false;
    const Spec made(spec);
    const kvpages_spec c_spec = made.c();
    auto info = sized<kvpages_spec_info>();
    check(kvpages_spec_describe(&c_spec, &info));
    return info.page_size_bytes != info.unpadded_page_size_bytes;
}

// What a spec is recorded as: with the stride flag of the case, see is_padded().
Json recorded(const kvpages_spec& spec, const Json& given) {
    Json object = spec_object(spec);
    if (object.contains("indexes_kv_by_block_stride") && is_padded(given)) {
        object["indexes_kv_by_block_stride"] = given.at("indexes_kv_by_block_stride");
    }
    return object;
}

OneBlockLayer layer_of(const Json& input, const Json& layer, const Json* spec) {
    OneBlockLayer made;
    if (spec != nullptr && spec->is_null()) spec = nullptr;
    const Json& backend = backend_of(input, layer);
    made.name = layer.at("name");
    made.spec = spec;
    made.backend_name = identity(backend);
    made.sizes = &backend.at("supported_kernel_block_sizes");
    made.num_heads = layer.at("num_heads").is_null() ? 0 : layer.at("num_heads").get<unsigned>();
    made.follows_block_stride =
        spec != nullptr && (spec->value("indexes_kv_by_block_stride", false) || is_padded(*spec));
    return made;
}

// Layers by the groups that list them, and those that share with one of these.
class Init {
public:
    explicit Init(const Json& input) : input_(input) {
        const Json& active = input.at("active_layer_names");
        for (const Json& group : input.at("groups")) {
            groups_.emplace_back();
            for (const Json& name : group.at("layer_names")) {
                groups_.back().push_back(name);
                const Json* layer = find_layer(input, name);
                if (layer == nullptr || layer->at("kind") == "none") continue;
                const Json* spec = spec_in(group.at("spec"), name);
                if (spec == nullptr) {
                    throw LibraryError("uniform_type_layer_missing", "no spec for a layer");
                }
                listed_.emplace(name, Listed{groups_.size() - 1, spec});
            }
        }
        for (const Json& layer : input.at("layers")) {
            const std::string name = layer.at("name");
            const auto listed = listed_.find(name);
            if (listed != listed_.end()) {
                layers_.push_back(layer_of(input, layer, listed->second.spec));
            } else if (shares(layer)) {
                const Listed* owner = owner_of(layer);
                layers_.push_back(layer_of(input, layer, owner ? owner->spec : nullptr));
                layers_.back().shares_with = layer.at("shared_with");
                if (owner != nullptr) groups_[owner->group].push_back(name);
            }
        }
        // The reference does not ask the backends of a group without active layers.
        for (const auto& group : groups_) {
            const auto is_active = [&active](const std::string& name) {
                return active.is_null() ||
                       std::find(active.begin(), active.end(), Json(name)) != active.end();
            };
            if (std::any_of(group.begin(), group.end(), is_active)) continue;
            for (OneBlockLayer& layer : layers_) {
                if (std::find(group.begin(), group.end(), layer.name) != group.end()) {
                    layer.backend_name.clear();
                }
            }
        }
    }

    // Of the layer, or of the one whose cache it shares.
    const Json* spec(const std::string& layer) const {
        return owner_of(*find_layer(input_, layer))->spec;
    }

    OneBlockPlan plan() const { return one_block_plan(layers_, groups_); }
    const std::vector<OneBlockLayer>& layers() const { return layers_; }
    std::string key(const std::string& layer) const {
        const Json* found = find_layer(input_, layer);
        return found == nullptr ? "" : found->at("backend").get<std::string>();
    }
    const Json& input() const { return input_; }

private:
    struct Listed {
        std::size_t group;
        const Json* spec;
    };

    const Listed* owner_of(const Json& layer) const {
        const Json* next = &layer;
        for (std::size_t hops = 0; hops <= input_.at("layers").size(); ++hops) {
            const auto listed = listed_.find(next->at("name"));
            if (listed != listed_.end()) return &listed->second;
            if (!shares(*next)) return nullptr;
            next = find_layer(input_, next->at("shared_with"));
            if (next == nullptr) return nullptr;
        }
        return nullptr;
    }

    const Json& input_;
    std::map<std::string, Listed> listed_;
    std::vector<std::vector<std::string>> groups_;
    std::vector<OneBlockLayer> layers_;
};

constexpr const char* kGraphSupports[] = {"never", "uniform_single_token_decode", "uniform_batch",
                                          "always"};

std::uint32_t graph_support(const std::string& name) {
    for (std::uint32_t i = 0; i < 4; ++i) {
        if (name == kGraphSupports[i]) return i;
    }
    throw Inexpressible("backends: unknown cudagraph_support " + name);
}

// The engine's side: builders that write down what they are told. A workspace is the builder that
// made it.
class Recorder {
public:
    explicit Recorder(const Init& init) : init_(init) {}

    kvpages_builder_callbacks callbacks() {
        auto made = sized<kvpages_builder_callbacks>();
        made.user = this;
        made.create = [](void* user, const kvpages_builder_info* info, void** out) {
            return keep(user, [&] { return of(user)->create(*info, out); });
        };
        made.graph_support = [](void* user, void* builder, std::uint32_t* out) {
            return keep(user, [&] {
                *out = graph_support(made_builder(builder)->backend->at("cudagraph_support"));
                return 0;
            });
        };
        made.get_workspace = [](void* user, void* builder, void** out) {
            return keep(user, [&] { return get_workspace(made_builder(builder), out); });
        };
        made.set_workspace = [](void* user, void* builder, void* workspace) {
            return keep(user, [&] {
                return set_workspace(made_builder(builder), *made_builder(workspace));
            });
        };
        made.build = [](void*, void*, const kvpages_common_metadata*, void*, void**) { return 0; };
        made.destroy = [](void* user, void*) { --of(user)->alive_; };
        return made;
    }

    // Of a call that runs the callbacks.
    void check(kvpages_status status) { thrown_.check(status); }

    Json builders() const {
        Json all = Json::array();
        for (const auto& builder : builders_) all.push_back(builder->record);
        return all;
    }
    int alive() const { return alive_; }

private:
    struct Builder {
        std::size_t index;
        const Json* backend;
        Json record;
    };

    static Recorder* of(void* user) { return static_cast<Recorder*>(user); }
    static Builder* made_builder(void* raw) { return static_cast<Builder*>(raw); }

    template <typename Body>
    static std::int32_t keep(void* user, Body body) {
        return of(user)->thrown_.keep(body);
    }

    std::int32_t create(const kvpages_builder_info& info, void** out) {
        Json names = Json::array();
        for (std::size_t i = 0; i < info.num_layers; ++i) {
            names.push_back(init_.layers().at(info.layers[i]).name);
        }
        const std::string key = init_.key(names.at(0));
        const Json& backend = init_.input().at("backends").at(key);
        if (identity(backend) != info.backend_name) return 1;
        auto builder = std::make_unique<Builder>();
        builder->index = builders_.size();
        builder->backend = &backend;
        builder->record = {{"backend", key},
                           {"spec", recorded(*info.spec, *init_.spec(names.at(0)))},
                           {"layer_names", names},
                           {"workspace", nullptr},
                           {"workspace_from", nullptr}};
        *out = builder.get();
        builders_.push_back(std::move(builder));
        ++alive_;
        return 0;
    }

    static std::int32_t get_workspace(Builder* builder, void** out) {
        const std::string kind = builder->backend->at("workspace");
        if (kind == "get" || kind == "get_and_set") {
            builder->record["workspace"] = "created";
            *out = builder;
        }
        return 0;
    }

    static std::int32_t set_workspace(Builder* builder, const Builder& from) {
        const std::string kind = builder->backend->at("workspace");
        if (kind == "set" || kind == "get_and_set") {
            builder->record["workspace"] = "received";
            builder->record["workspace_from"] = from.index;
        }
        return 0;
    }

    const Init& init_;
    std::vector<std::unique_ptr<Builder>> builders_;
    int alive_ = 0;
    Thrown thrown_;
};

Json attention_groups(const kvpages_attention* attention, const Init& init) {
    Json all = Json::array();
    for (std::size_t c = 0; c < kvpages_attention_num_cache_groups(attention); ++c) {
        Json groups = Json::array();
        for (std::size_t g = 0; g < kvpages_attention_num_groups(attention, c); ++g) {
            auto info = sized<kvpages_attention_group_info>();
            check(kvpages_attention_get_group(attention, c, g, &info));
            auto spec = sized<kvpages_spec>();
            check(kvpages_attention_get_group_spec(attention, c, g, &spec));
            Json names = Json::array();
            for (std::size_t i = 0; i < info.num_layers; ++i) {
                names.push_back(text(kvpages_attention_group_layer_name(attention, c, g, i)));
            }
            const std::string key = init.key(names.at(0));
            if (identity(init.input().at("backends").at(key)) !=
                text(kvpages_attention_group_backend(attention, c, g))) {
                throw Contradiction("an attention group is of another backend than its layers");
            }
            groups.push_back({{"backend", key},
                              {"layer_names", names},
                              {"spec", recorded(spec, *init.spec(names.at(0)))},
                              {"kv_cache_group_id", c}});
        }
        all.push_back(groups);
    }
    return all;
}

Json run_init(const Json& input) {
    const Init init(input);
    const OneBlockPlan plan = init.plan();
    Recorder recorder(init);
    const kvpages_builder_callbacks callbacks = recorder.callbacks();
    auto config = sized<kvpages_attention_config>();
    config.callbacks = &callbacks;
    std::vector<const char*> active;
    const Json& names = input.at("active_layer_names");
    const char* nobody = nullptr;
    if (!names.is_null()) {
        for (const Json& name : names) active.push_back(name.get_ref<const std::string&>().c_str());
        config.active_layers = active.empty() ? &nobody : active.data();
        config.num_active_layers = active.size();
    }
    kvpages_attention* raw = nullptr;
    recorder.check(kvpages_attention_create(plan.plan.get(), &config, &raw));
    AttentionHandle attention(raw);

    Json kernel_blocks = Json::array();
    Json cache_group_names = Json::array();
    for (std::size_t c = 0; c < kvpages_attention_num_cache_groups(raw); ++c) {
        kernel_blocks.push_back(kernel_block_size(plan.plan.get(), c));
        Json list = Json::array();
        while (const char* name = kvpages_plan_group_layer_name(plan.plan.get(), 0, c, list.size())) {
            list.push_back(name);
        }
        cache_group_names.push_back(list);
    }
    const char* lowest_name = nullptr;
    const std::uint32_t lowest = kvpages_attention_graph_support(raw, &lowest_name);
    Json lowest_class;
    for (const Json& backend : input.at("backends")) {
        if (lowest_name != nullptr && identity(backend) == lowest_name) {
            lowest_class = backend.at("full_name")[1];
        }
    }
    Json outcome = {{"attn_groups", attention_groups(raw, init)},
                    {"kernel_block_sizes", kernel_blocks},
                    {"min_cudagraph_support", kGraphSupports[lowest]},
                    {"min_cudagraph_backend", lowest_class},
                    {"builders", names.is_null() ? recorder.builders() : Json()},
                    {"cache_group_layer_names", cache_group_names}};
    attention.reset();
    if (recorder.alive() != 0) {
        throw Contradiction(std::to_string(recorder.alive()) + " builders were not destroyed");
    }
    return outcome;
}

// With active layers the reference iterates over a set, so the order means nothing.
void normalise_init(Json& outcome) {
    normalise_specs(outcome);
    if (is_error(outcome) || !outcome.at("builders").is_null()) return;
    for (Json& groups : outcome.at("attn_groups")) {
        for (Json& group : groups) {
            std::sort(group.at("layer_names").begin(), group.at("layer_names").end());
        }
        std::sort(groups.begin(), groups.end());
    }
}

Json run_select(const Json& input) {
    std::vector<BackendHandle> backends;
    std::vector<const kvpages_backend*> pointers;
    for (const Json& sizes : input.at("backends_sizes")) {
        OneBlockLayer layer;
        layer.backend_name = "backend " + std::to_string(backends.size());
        layer.sizes = &sizes;
        backends.push_back(one_block_backend(layer));
        pointers.push_back(backends.back().get());
    }
    std::uint64_t size = 0;
    check(kvpages_select_kernel_block_size(input.at("block_size"), pointers.data(),
                                           pointers.size(), &size));
    return {{"kernel_block_size", size}};
}

// A layer for every backend of a group.
Json run_prepare(const Json& input) {
    const Json& keys = input.at("group_backends");
    if (keys.size() != input.at("groups").size()) {
        throw Inexpressible("group_backends: not one list for each group");
    }
    std::vector<OneBlockLayer> layers;
    std::vector<std::vector<std::string>> groups;
    for (std::size_t c = 0; c < keys.size(); ++c) {
        const Json& spec = input.at("groups")[c].at("spec");
        const Json& first = is_uniform_type(spec) ? spec.at("layers").at(0)[1] : spec;
        groups.emplace_back();
        for (const Json& key : keys[c]) {
            const std::string name = std::to_string(c) + "." + std::to_string(layers.size());
            layers.push_back(
                layer_of(input, {{"name", name}, {"backend", key}, {"num_heads", nullptr}}, &first));
            groups.back().push_back(name);
        }
        if (keys[c].empty()) {
            OneBlockLayer layer;
            layer.name = std::to_string(c) + ".alone";
            layer.spec = &first;
            layers.push_back(layer);
            groups.back().push_back(layer.name);
        }
    }
    const OneBlockPlan plan = one_block_plan(layers, groups);
    Json sizes = Json::array();
    for (std::size_t c = 0; c < groups.size(); ++c) {
        sizes.push_back(kernel_block_size(plan.plan.get(), c));
    }
    return {{"kernel_block_sizes", sizes}};
}

Json run_layer_specs(const Json& input) {
    kvpages_model* raw = nullptr;
    check(kvpages_model_create(&raw));
    const ModelHandle model(raw);
    for (const Json& layer : input.at("layers")) {
        if (!shares(layer) && layer.at("spec").is_null()) continue;
        OneBlockLayer described = layer_of(input, layer, &layer.at("spec"));
        described.follows_block_stride = backend_of(input, layer).at("indexes_kv_by_block_stride");
        const BackendHandle backend = one_block_backend(described);
        const std::string target = shares(layer) ? layer.at("shared_with") : Json("");
        auto given = sized<kvpages_layer>();
        given.name = described.name.c_str();
        given.backend = backend.get();
        if (shares(layer)) {
            given.shares_with = target.c_str();
            check(kvpages_model_add_layer(raw, &given));
            continue;
        }
        const Spec spec(layer.at("spec"));
        const kvpages_spec c_spec = spec.c();
        given.spec = &c_spec;
        check(kvpages_model_add_layer(raw, &given));
    }
    Json specs = Json::array();
    Json shared = Json::array();
    for (std::size_t i = 0; i < kvpages_model_num_layers(raw); ++i) {
        const std::string name = text(kvpages_model_layer_name(raw, i));
        if (const char* target = kvpages_model_layer_shares_with(raw, i)) {
            shared.push_back({name, target});
            continue;
        }
        auto spec = sized<kvpages_spec>();
        check(kvpages_model_get_layer_spec(raw, i, &spec));
        specs.push_back({name, spec_object(spec)});
    }
    return {{"specs", specs}, {"shared_layers", shared}};
}

constexpr const char* kBackends = R"({"*": {
    "full_name": ["string", "string"], "supported_kernel_block_sizes": ["uint|multiple|string"],
    "cudagraph_support": "string", "workspace": "string", "indexes_kv_by_block_stride": "bool"}})";
constexpr const char* kLayers = R"([{
    "name": "string", "backend": "string", "num_heads": "uint|null", "kind": "string",
    "shared_with": "string|null", "spec": "spec|null"}])";
constexpr const char* kGroups = R"([{"layer_names": ["string"], "spec": "spec"}])";

Schema schema(const std::string& fields) { return Schema(("{\"op\": \"string\", " + fields + "}").c_str()); }

}  // namespace

Category groups_category() {
    const std::string backends = std::string("\"backends\": ") + kBackends;
    const std::string layers = std::string("\"layers\": ") + kLayers;
    const std::string groups = std::string("\"groups\": ") + kGroups;
    return {
        {"init",
         {schema(layers + ", " + groups + ", " + backends +
                 R"(, "active_layer_names": "strings|null")"),
          Schema::of_expectation(R"({
              "attn_groups": [[{"backend": "string", "layer_names": ["string"], "spec": "spec",
                                "kv_cache_group_id": "uint"}]],
              "kernel_block_sizes": ["uint|null"], "min_cudagraph_support": "string",
              "min_cudagraph_backend": "string|null", "builders": "builders|null",
              "cache_group_layer_names": [["string"]]})"),
          run_init, normalise_init}},
        {"select",
         {schema(R"("block_size": "uint", "backends_sizes": [["uint|multiple|string"]])"),
          Schema::of_expectation(R"({"kernel_block_size": "uint"})"), run_select, as_it_is}},
        {"prepare",
         {schema(groups + ", " + backends + R"(, "group_backends": [["string"]])"),
          Schema::of_expectation(R"({"kernel_block_sizes": ["uint|null"]})"), run_prepare,
          as_it_is}},
        {"layer_specs",
         {schema(layers + ", " + backends),
          Schema::of_expectation(
              R"({"specs": [["string", "spec"]], "shared_layers": [["string", "string"]]})"),
          run_layer_specs, normalise_specs}},
    };
}

}  // namespace conformance
