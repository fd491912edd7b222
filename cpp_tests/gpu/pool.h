// Caches of eight layers on the device, and which of their blocks and slots a call is for.
#pragma once

#include "support/device.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

/// How a token is stored. Rows of it are bf16, whatever the cache holds.
struct Format {
    const char* name;
    kvpages::Preset preset;
    kvpages::AttentionKind kind;
    kvpages::Dtype dtype;
    kvpages::QuantMode quant_mode;
    std::uint32_t num_heads;
    std::uint64_t head_size;

    bool is_latent() const { return kind == kvpages::AttentionKind::mla; }
    /// Bytes of a token's keys, or of its latent, in one layer.
    std::uint64_t row_bytes() const { return num_heads * head_size * 2; }
    /// Bytes of a token's rows in one layer.
    std::uint64_t token_bytes() const { return row_bytes() * (is_latent() ? 1 : 2); }
    /// The same as the cache stores them.
    std::uint64_t stored_bytes() const { return token_bytes() * kvpages::bytes(dtype) / 2; }
};

inline constexpr Format kBf16{"bf16",
                              kvpages::Preset::flash_attention_nhd,
                              kvpages::AttentionKind::full,
                              kvpages::Dtype::bf16,
                              kvpages::QuantMode::none,
                              8,
                              128};
inline constexpr Format kFp8{"fp8 e4m3",
                             kvpages::Preset::flash_attention_nhd,
                             kvpages::AttentionKind::full,
                             kvpages::Dtype::f8_e4m3fn,
                             kvpages::QuantMode::fp8_per_tensor,
                             8,
                             128};
inline constexpr Format kMla{"MLA bf16",
                             kvpages::Preset::triton_mla,
                             kvpages::AttentionKind::mla,
                             kvpages::Dtype::bf16,
                             kvpages::QuantMode::none,
                             1,
                             576};

/// A cache of twice the blocks that a call touches, which lie in no order in it.
class Pool {
public:
    static constexpr std::uint64_t kLayers = 8;
    static constexpr std::uint64_t kBlockSize = 16;  // tokens

    /// Whose calls touch `blocks` blocks.
    Pool(const Format& format, std::uint64_t blocks)
        : format_(format),
          cache_(make(format, 2 * blocks)),
          ops_(cache_),
          ids_(shuffled(2 * blocks)),
          slots_(slots_of(blocks)) {
        for (std::uint64_t i = 0; i < blocks; ++i) copies_.push_back({ids_[i], ids_[blocks + i]});
        ids_.resize(blocks);
    }

    /// Blocks whose rows have at most so many bytes, but one at least.
    static std::uint64_t blocks_of(const Format& format, std::uint64_t row_bytes) {
        const std::uint64_t of_block = kLayers * kBlockSize * format.token_bytes();
        return row_bytes < of_block ? 1 : row_bytes / of_block;
    }

    const Format& format() const { return format_; }
    const kvpages::Cache& cache() const { return cache_; }
    kvpages::Ops& ops() { return ops_; }
    const std::vector<std::int32_t>& ids() const { return ids_; }
    const std::vector<kvpages_block_copy>& copies() const { return copies_; }
    kvpages::Span<const std::int64_t> slots() const {
        return {slots_.data<const std::int64_t>(), num_tokens()};
    }
    std::uint64_t num_tokens() const { return ids_.size() * kBlockSize; }
    /// Bytes of the rows of all tokens and layers.
    std::uint64_t row_bytes() const { return kLayers * num_tokens() * format_.token_bytes(); }
    /// Bytes that they take in the cache.
    std::uint64_t stored_bytes() const { return kLayers * num_tokens() * format_.stored_bytes(); }

    /// Rows of all layers, one after the other from an address on.
    std::vector<kvpages_kv_rows> rows(CUdeviceptr data) const {
        std::vector<kvpages_kv_rows> all;
        for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
            const auto [keys, values] = rows_of(layer, data);
            all.push_back(kvpages::kv_rows(layer, keys, values, kScale, kScale));
        }
        return all;
    }
    std::vector<kvpages_kv_rows_out> room(CUdeviceptr data) const {
        std::vector<kvpages_kv_rows_out> all(kLayers);
        for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
            all[layer].layer = layer;
            std::tie(all[layer].keys, all[layer].values) = rows_of(layer, data);
            all[layer].key_scale = all[layer].value_scale = kScale;
        }
        return all;
    }

private:
    static constexpr float kScale = 0.5f;

    std::pair<void*, void*> rows_of(std::uint64_t layer, CUdeviceptr data) const {
        const CUdeviceptr keys = data + layer * num_tokens() * format_.token_bytes();
        const CUdeviceptr values = keys + num_tokens() * format_.row_bytes();
        return {reinterpret_cast<void*>(keys),
                format_.is_latent() ? nullptr : reinterpret_cast<void*>(values)};
    }

    static kvpages::Cache make(const Format& format, std::uint64_t num_blocks) {
        kvpages::AttentionSpec spec;
        spec.kind = format.kind;
        spec.dtype = format.dtype;
        spec.quant_mode = format.quant_mode;
        spec.block_size = kBlockSize;
        spec.num_kv_heads = format.num_heads;
        spec.head_size = format.head_size;
        const kvpages::Backend backend = kvpages::Backend::preset(format.preset);
        kvpages::Model model;
        for (std::uint64_t i = 0; i < kLayers; ++i) {
            model.add("layers." + std::to_string(i), spec, backend, format.num_heads);
        }
        kvpages::PlanConfig config;
        config.num_blocks_override = num_blocks;
        config.max_model_len = kBlockSize;
        config.max_tokens_in_flight = kBlockSize;
        return kvpages::Cache::allocate(kvpages::Plan::make(model, config),
                                        kvpages::Memory::cuda());
    }

    static std::vector<std::int32_t> shuffled(std::uint64_t count) {
        std::vector<std::int32_t> ids(count);
        for (std::uint64_t i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(i);
        std::shuffle(ids.begin(), ids.end(), std::mt19937_64(count));
        return ids;
    }

    /// Those of the first blocks of the order, token after token.
    std::vector<std::int64_t> slots_of(std::uint64_t blocks) const {
        std::vector<std::int64_t> slots;
        slots.reserve(blocks * kBlockSize);
        for (std::uint64_t i = 0; i < blocks; ++i) {
            for (std::uint64_t token = 0; token < kBlockSize; ++token) {
                slots.push_back(static_cast<std::int64_t>(
                    static_cast<std::uint64_t>(ids_[i]) * kBlockSize + token));
            }
        }
        return slots;
    }

    Format format_;
    kvpages::Cache cache_;
    kvpages::Ops ops_;
    std::vector<std::int32_t> ids_;
    support::DeviceArray slots_;
    std::vector<kvpages_block_copy> copies_;
};
