// A plan and a cache of 64 hybrid layers, whose memory nobody touches.

#pragma once

#include <kvpages/kvpages.hpp>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "must.h"

inline std::string layer_name(std::size_t layer) {
    return "model.layers." + std::to_string(layer) + ".self_attn";
}

constexpr std::uint64_t kStatePage = 1056 * 2048;

/// Three layers of two states to each of attention: 64 layers, 112 views.
inline kvpages::Model state_hybrid64() {
    const kvpages::Backend attention = kvpages::Backend::preset(kvpages::Preset::flash_infer_hnd);
    const kvpages::Backend delta_net = kvpages::Backend::preset(kvpages::Preset::gated_delta_net);
    kvpages::AttentionSpec full;
    full.block_size = 1056;
    full.num_kv_heads = 2;
    full.head_size = 256;
    kvpages::StateSpec state;
    state.kind = kvpages::StateKind::gated_delta_net;
    state.page_size_padded_bytes = kStatePage;
    state.add(kvpages::Dtype::bf16, {3, 8192}).add(kvpages::Dtype::f32, {32, 128, 128});
    kvpages::Model model;
    for (std::size_t i = 0; i < 64; ++i) {
        if (i % 4 == 3) {
            model.add(layer_name(i), full, attention, 16);
        } else {
            model.add(layer_name(i), state, delta_net);
        }
    }
    return model;
}

inline kvpages_cache* create_cache(const kvpages_plan* plan, const kvpages::Memory& memory) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    kvpages_cache* cache = nullptr;
    must(kvpages_cache_create(plan, &config, &cache, nullptr));
    return cache;
}

/// An allocator that costs nothing: it hands out one address range again and again, and nobody
/// touches it. What is left is what the library does.
class FreeMemory {
public:
    static constexpr std::size_t kBytes = std::size_t{1} << 32;

    FreeMemory() {
        constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        range_ = mmap(nullptr, kBytes, PROT_NONE, kFlags, -1, 0);
        if (range_ == MAP_FAILED) std::abort();
    }
    FreeMemory(const FreeMemory&) = delete;
    FreeMemory& operator=(const FreeMemory&) = delete;
    ~FreeMemory() { munmap(range_, kBytes); }

    kvpages::Memory memory() {
        kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
        callbacks.user = range_;
        callbacks.allocate = [](void* user, std::size_t bytes, std::size_t, void** out) {
            *out = user;
            return static_cast<std::int32_t>(bytes > kBytes);
        };
        callbacks.release = [](void*, void*, std::size_t) {};
        callbacks.is_zeroed = 1;
        return kvpages::Memory::external(callbacks);
    }

private:
    void* range_;
};

/// The plan of state_hybrid64() as an engine states it: 16 tensors, each of four layers.
struct Parts64 {
    static constexpr std::uint64_t kNumBlocks = 1024;

    Parts64() {
        for (std::size_t i = 0; i < 64; ++i) names.push_back(layer_name(i));
        for (std::size_t group = 0; group < 4; ++group) {
            for (std::size_t i = group; i < 64; i += 4) by_group.push_back(names[i].c_str());
        }
        for (const std::string& name : names) by_tensor.push_back(name.c_str());
        for (std::size_t group = 0; group < 4; ++group) {
            groups.push_back({&by_group[group * 16], 16, 0});
        }
        for (std::size_t tensor = 0; tensor < 16; ++tensor) {
            tensors.push_back({kStatePage * kNumBlocks, 0, 0, &by_tensor[tensor * 4], 4});
        }
        parts.num_blocks = kNumBlocks;
        parts.groups = groups.data();
        parts.num_groups = groups.size();
        parts.tensors = tensors.data();
        parts.num_tensors = tensors.size();
    }
    Parts64(const Parts64&) = delete;
    Parts64& operator=(const Parts64&) = delete;

    std::vector<std::string> names;
    std::vector<const char*> by_group, by_tensor;
    std::vector<kvpages_part_group> groups;
    std::vector<kvpages_part_tensor> tensors;
    kvpages_plan_parts parts = KVPAGES_PLAN_PARTS_INIT;
};

inline kvpages_plan* create_plan_from(const kvpages::Model& model, const Parts64& parts) {
    kvpages_plan* plan = nullptr;
    must(kvpages_plan_create_from_parts(model.get(), &parts.parts, &plan));
    return plan;
}

/// A cache of 64 hybrid layers that nobody touches.
class Cache64 {
public:
    Cache64() {
        const kvpages::Model model = state_hybrid64();
        kvpages_plan* plan = create_plan_from(model, Parts64());
        cache_ = create_cache(plan, free_memory_.memory());
        kvpages_plan_destroy(plan);
    }
    Cache64(const Cache64&) = delete;
    Cache64& operator=(const Cache64&) = delete;
    ~Cache64() { kvpages_cache_destroy(cache_); }

    const kvpages_cache* get() const { return cache_; }

private:
    FreeMemory free_memory_;
    kvpages_cache* cache_ = nullptr;
};
