// Blocks of eight layers, and lists of some of them to operate on.

#pragma once

#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

constexpr std::uint64_t kLayers = 8;
constexpr std::uint64_t kHeads = 8;
constexpr std::uint64_t kWidth = 128;
constexpr std::uint64_t kBlock = 16;                              // tokens
constexpr std::uint64_t kPage = 2 * kBlock * kHeads * kWidth * 2;  // 64 KiB
constexpr std::uint64_t kBlocks = 256;
constexpr std::uint64_t kListed = 64;  // blocks of a call
constexpr std::uint64_t kRowElements = kHeads * kWidth;

/// Layers of 64 KiB pages in their own allocations, all touched.
class World {
public:
    explicit World(kvpages::Preset preset) : cache_(make(preset)), ops_(cache_) {
        for (std::size_t i = 0; i < cache_.num_allocations(); ++i) {
            const kvpages_allocation part = cache_.allocation(i);
            std::memset(part.data, 1, part.size_bytes);
        }
        // Blocks far apart, in no order that a prefetcher knows.
        for (std::uint64_t i = 0; i < kListed; ++i) {
            ids_.push_back(static_cast<std::int32_t>(i * 37 % kBlocks));
            copies_.push_back({ids_.back(), (ids_.back() + 128) % 256});
        }
        for (std::uint64_t i = 0; i < kListed * kBlock; ++i) {
            const auto block = static_cast<std::int64_t>(ids_[i / kBlock]);
            slots_.push_back(block * static_cast<std::int64_t>(kBlock) +
                             static_cast<std::int64_t>(i % kBlock));
        }
        keys_.assign(kLayers * slots_.size() * kRowElements, 0x3c00);
        values_.assign(kLayers * slots_.size() * kRowElements, 0x3c00);
    }

    const std::vector<std::int32_t>& ids() const { return ids_; }
    const std::vector<kvpages_block_copy>& copies() const { return copies_; }
    const std::vector<std::int64_t>& slots() const { return slots_; }
    unsigned char* data(std::size_t layer) const {
        return static_cast<unsigned char*>(cache_.allocation(layer).data);
    }
    kvpages::Ops& ops() { return ops_; }

    std::vector<kvpages_kv_rows> rows() const {
        std::vector<kvpages_kv_rows> all;
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
            kvpages_kv_rows rows{};
            rows.layer = layer;
            rows.keys = keys_.data() + layer * slots_.size() * kRowElements;
            rows.values = values_.data() + layer * slots_.size() * kRowElements;
            all.push_back(rows);
        }
        return all;
    }

    std::vector<kvpages_kv_rows_out> room() {
        std::vector<kvpages_kv_rows_out> all;
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
            kvpages_kv_rows_out rows{};
            rows.layer = layer;
            rows.keys = keys_.data() + layer * slots_.size() * kRowElements;
            rows.values = values_.data() + layer * slots_.size() * kRowElements;
            all.push_back(rows);
        }
        return all;
    }

    // Half a page of keys, and half a page of values.
    const void* keys(std::size_t layer, std::size_t block) const {
        return keys_.data() + (layer * kListed + block) * kBlock * kRowElements;
    }
    const void* values(std::size_t layer, std::size_t block) const {
        return values_.data() + (layer * kListed + block) * kBlock * kRowElements;
    }

private:
    static kvpages::Cache make(kvpages::Preset preset) {
        kvpages::AttentionSpec spec;
        spec.block_size = kBlock;
        spec.num_kv_heads = kHeads;
        spec.head_size = kWidth;
        spec.dtype = kvpages::Dtype::f16;
        const kvpages::Backend backend = kvpages::Backend::preset(preset);
        kvpages::Model model;
        kvpages::PlanParts parts;
        parts.num_blocks = kBlocks;
        parts.groups.emplace_back();
        for (std::size_t i = 0; i < kLayers; ++i) {
            const std::string name = "layers." + std::to_string(i);
            model.add(name, spec, backend, kHeads);
            parts.groups[0].layers.push_back(name);
            kvpages::PartTensor tensor;
            tensor.size_bytes = kBlocks * kPage;
            tensor.layers = {name};
            parts.tensors.push_back(tensor);
        }
        return kvpages::Cache::allocate(kvpages::Plan::from_parts(model, parts),
                                        kvpages::Memory::host());
    }

    kvpages::Cache cache_;
    kvpages::Ops ops_;
    std::vector<std::int32_t> ids_;
    std::vector<kvpages_block_copy> copies_;
    std::vector<std::int64_t> slots_;
    std::vector<std::uint16_t> keys_;
    std::vector<std::uint16_t> values_;
};

template <typename T>
kvpages::Span<const T> span(const std::vector<T>& values) {
    return {values.data(), values.size()};
}
