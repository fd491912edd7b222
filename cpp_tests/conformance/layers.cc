#include "layers.h"

#include <algorithm>

#include "spec.h"

namespace conformance {
namespace {

// The cache groups that name a layer.
std::vector<std::size_t> groups_of(const Json& cache_groups, const Json& name) {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < cache_groups.size(); ++i) {
        const Json& names = cache_groups[i].at("layer_names");
        if (std::find(names.begin(), names.end(), name) != names.end()) {
            found.push_back(i);
        }
    }
    return found;
}

const Json& spec_in_group(const Json& group, const std::string& name) {
    const Json& spec = group.at("spec");
    if (!is_uniform_type(spec)) {
        return spec;
    }
    for (const Json& pair : spec.at("layers")) {
        if (pair[0] == name) {
            return pair[1];
        }
    }
    throw Inexpressible("groups: " + name + " has no spec in its uniform type");
}

}  // namespace

Layers::Layers(const Json& input) {
    for (const Json& group : input.at("attn_groups")) {
        add_attention_group(input, group);
    }
    for (const Json& group : input.at("kv_cache_config").at("groups")) {
        add_cache_group(group);
    }
    for (const Json& pair : input.at("shared_layers")) {
        add_share(pair);
    }
}

const Layer* Layers::find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &layers_[found->second];
}

void Layers::add_attention_group(const Json& input, const Json& group) {
    const Json& backends = input.at("backends");
    const Json& cache_groups = input.at("kv_cache_config").at("groups");
    const auto backend = backends.find(group.at("backend").get<std::string>());
    if (backend == backends.end() || backend->at("name") != group.at("backend")) {
        throw Inexpressible("attn_groups: no backend is named " + group.at("backend").dump());
    }
    for (const Json& name : group.at("layer_names")) {
        Layer& layer = get(name);
        const bool differs = layer.spec != nullptr &&
                             (*layer.spec != group.at("spec") || *layer.backend != *backend);
        const std::vector<std::size_t> owners = groups_of(cache_groups, name);
        // A layer of two cache groups is for the library to refuse, whatever else it has twice.
        if (differs && owners.size() < 2) {
            throw Inexpressible("attn_groups: " + layer.name + " is described in two ways");
        }
        const std::size_t id = group.at("kv_cache_group_id");
        if (!owners.empty() && std::find(owners.begin(), owners.end(), id) == owners.end()) {
            throw Inexpressible("attn_groups: " + layer.name + " is of another cache group");
        }
        if (layer.spec == nullptr) {
            layer.spec = &group.at("spec");
            layer.backend = &*backend;
        }
    }
}

void Layers::add_cache_group(const Json& group) {
    for (const Json& name : group.at("layer_names")) {
        Layer& layer = get(name);
        if (layer.spec == nullptr) {
            layer.spec = &spec_in_group(group, layer.name);
        }
    }
}

void Layers::add_share(const Json& pair) {
    Layer& layer = get(pair[0]);
    if (layer.shares_with != nullptr) {
        throw Inexpressible("shared_layers: " + layer.name + " has two targets");
    }
    layer.shares_with = &pair[1];
}

Layer& Layers::get(const std::string& name) {
    const auto entry = index_.emplace(name, layers_.size());
    if (entry.second) {
        layers_.push_back({name});
    }
    return layers_[entry.first->second];
}

}  // namespace conformance
