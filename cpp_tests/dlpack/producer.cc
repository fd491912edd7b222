// An engine's side of DLPack, as a library that consumers.py loads: caches in C++, tensors of their
// views, and what it writes and reads through the views itself.
#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define EXPORTED __attribute__((visibility("default")))

namespace {

std::uint64_t live_allocations = 0;

// The engine's allocator, which counts.
kvpages::Memory counted_memory() {
    kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
    callbacks.allocate = [](void*, std::size_t bytes, std::size_t alignment, void** out) {
        *out = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
        live_allocations += *out != nullptr ? 1 : 0;
        return std::int32_t{*out != nullptr ? 0 : 1};
    };
    callbacks.release = [](void*, void* data, std::size_t) {
        std::free(data);
        --live_allocations;
    };
    return kvpages::Memory::external(callbacks);
}

kvpages::Backend backend(const char* layout, const char* memory_order = "",
                         std::uint64_t kernel_block_size = 0) {
    kvpages::BackendConfig config;
    config.name = "kernels";
    config.layout = layout;
    config.memory_order = memory_order;
    if (kernel_block_size != 0) {
        config.kernel_block_sizes = {kernel_block_size};
    } else {
        config.kernel_block_multiples = {1};
    }
    config.follows_block_stride = true;
    return kvpages::Backend(config);
}

kvpages::AttentionSpec spec(kvpages::Dtype dtype) {
    kvpages::AttentionSpec made;
    made.dtype = dtype;
    made.block_size = 4;
    made.num_kv_heads = 2;
    made.head_size = 6;
    return made;
}

constexpr const char* hnd = "block | head | token | kv*content";
constexpr const char* nhd = "block | token | head | kv*content";
constexpr const char* kv_first = "kv | block | token | head | content";

// Layers of different groups, so that each has the allocation or its part of one.
kvpages::Model layers() {
    using kvpages::Dtype;
    kvpages::Model model;
    model.add("f32", spec(Dtype::f32), backend(hnd, nhd));
    model.add("f16", spec(Dtype::f16), backend(hnd));
    model.add("bf16", spec(Dtype::bf16), backend(kv_first));
    model.add("u8", spec(Dtype::u8), backend(nhd, "", 2));
    model.add("e4m3fn", spec(Dtype::f8_e4m3fn), backend(kv_first));
    model.add("e5m2", spec(Dtype::f8_e5m2), backend(hnd, nhd));
    model.add("e2m1x2", spec(Dtype::f4_e2m1x2), backend(hnd));
    kvpages::AttentionSpec latent = spec(Dtype::bf16);
    latent.kind = kvpages::AttentionKind::mla;
    latent.num_kv_heads = 1;
    model.add("latent", latent, backend("block | token | content"));
    kvpages::StateSpec states;
    states.kind = kvpages::StateKind::mamba2;
    states.block_size = 4;
    states.add(Dtype::f32, {3, 5}).add(Dtype::bf16, {2, 3});
    model.add("states", states, kvpages::Backend::preset(kvpages::Preset::mamba2));
    return model;
}

// A number for every byte of a view, of element `count` in the order of its indices.
unsigned char value(std::uint32_t seed, std::size_t count, std::size_t byte) {
    return static_cast<unsigned char>((seed + count * 7 + byte * 3) % 251);
}

struct Element {
    unsigned char* data;
    std::size_t count;
};

// Every element of a view in the order of its indices, found by the view's strides.
template <typename Visit>
std::size_t for_each_element(const kvpages::Tensor& view, Visit visit) {
    const std::size_t bytes = kvpages_dtype_bytes(static_cast<std::uint32_t>(view.dtype));
    const auto total = static_cast<std::size_t>(view.num_elements());
    for (std::size_t count = 0; count < total; ++count) {
        std::size_t rest = count;
        std::size_t offset = 0;
        for (std::size_t dim = view.shape.size(); dim-- > 0;) {
            const auto size = static_cast<std::size_t>(view.shape[dim]);
            offset += rest % size * static_cast<std::size_t>(view.strides[dim]);
            rest /= size;
        }
        visit(Element{static_cast<unsigned char*>(view.data) + offset * bytes, count}, bytes);
    }
    return total * bytes;
}

std::string last_error;

// NULL and a text instead of an exception, which Python could not catch.
template <typename Call>
auto guarded(Call call) noexcept -> decltype(call()) {
    try {
        return call();
    } catch (const std::exception& error) {
        last_error = error.what();
        return {};
    }
}

}  // namespace

extern "C" {

EXPORTED const char* producer_last_error() {
    return last_error.c_str();
}

EXPORTED std::uint64_t producer_live_allocations() {
    return live_allocations;
}

EXPORTED kvpages::Cache* producer_create(std::uint64_t num_blocks) {
    return guarded([&]() -> kvpages::Cache* {
        kvpages::PlanConfig config;
        config.max_model_len = 1;
        config.num_blocks_override = num_blocks;
        const auto plan = kvpages::Plan::make(layers(), config);
        return new kvpages::Cache(kvpages::Cache::allocate(plan, counted_memory()));
    });
}

EXPORTED void producer_destroy(kvpages::Cache* cache) {
    delete cache;
}

EXPORTED DLManagedTensorVersioned* producer_export(
    const kvpages::Cache* cache, const char* layer, std::size_t state, bool read_only) {
    return guarded([&] {
        const auto access = read_only ? kvpages::Access::read_only : kvpages::Access::read_write;
        return cache->to_dlpack(layer, state, access).release();
    });
}

EXPORTED DLManagedTensor* producer_export_unversioned(
    const kvpages::Cache* cache, const char* layer, std::size_t state) {
    return guarded([&] { return cache->to_unversioned_dlpack(layer, state).release(); });
}

/// Writes every byte of a view, and returns how many they are.
EXPORTED std::size_t producer_write(const kvpages::Cache* cache,
                                                                  const char* layer,
                                                                  std::size_t state,
                                                                  std::uint32_t seed) {
    return guarded([&] {
        return for_each_element(cache->view(layer, state), [&](Element element, std::size_t bytes) {
            for (std::size_t byte = 0; byte < bytes; ++byte) {
                element.data[byte] = value(seed, element.count, byte);
            }
        });
    });
}

/// Reads every byte of a view, in the order of its indices.
EXPORTED std::size_t producer_read(const kvpages::Cache* cache,
                                                                 const char* layer,
                                                                 std::size_t state,
                                                                 unsigned char* out) {
    return guarded([&] {
        return for_each_element(cache->view(layer, state), [&](Element element, std::size_t bytes) {
            std::memcpy(out + element.count * bytes, element.data, bytes);
        });
    });
}

/// The handle for C. It stays the producer's.
EXPORTED const kvpages_cache* producer_handle(
    const kvpages::Cache* cache) {
    return cache->get();
}
}
