// The cache of a views, zeroing or copying case: from its groups and tensors, all through the library.
#pragma once

#include <kvpages/kvpages.h>

#include <vector>

#include "json.h"
#include "layers.h"
#include "library.h"

namespace conformance {

// A model and what it must not outlive.
struct Model {
    std::vector<BackendHandle> backends;
    ModelHandle handle;
};

Model build_model(const Layers& layers, const Json& input);

PlanHandle build_plan(const kvpages_model* model, const Json& input);

struct Cache {
    MemoryHandle memory;
    CacheHandle handle;
};

Cache create_cache(const kvpages_plan* plan);

kvpages_allocation get_allocation(const kvpages_cache* cache, std::size_t index);

// SHA-256 of every whole allocation.
Json hashes(const kvpages_cache* cache);

// Gives every byte of every allocation its own number modulo 251.
void fill_allocations(const kvpages_cache* cache);

// The number of a layer.
std::size_t find_layer(const kvpages_cache* cache, const std::string& name);

}  // namespace conformance
