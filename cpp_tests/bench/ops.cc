// Operations on blocks, beside memset and memcpy over the same bytes in the same pieces: what is
// left of the memory's speed is the ratio of bytes_per_second.

#include <benchmark/benchmark.h>
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

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

void count_bytes(benchmark::State& state) {
    const auto bytes = static_cast<std::int64_t>(kLayers * kListed * kPage);
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * bytes);
}

void ops_zero(benchmark::State& state) {
    World world(kvpages::Preset::flash_attention_nhd);
    for (auto _ : state) world.ops().zero_blocks(span(world.ids()));
    count_bytes(state);
}
BENCHMARK(ops_zero)->Name("ops/zero")->Unit(benchmark::kMicrosecond);

void ops_memset(benchmark::State& state) {
    const World world(kvpages::Preset::flash_attention_nhd);
    for (auto _ : state) {
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
            for (const std::int32_t id : world.ids()) {
                std::memset(world.data(layer) + static_cast<std::uint64_t>(id) * kPage, 0, kPage);
            }
        }
        benchmark::ClobberMemory();
    }
    count_bytes(state);
}
BENCHMARK(ops_memset)->Name("ops/memset")->Unit(benchmark::kMicrosecond);

void ops_copy(benchmark::State& state) {
    World world(kvpages::Preset::flash_attention_nhd);
    for (auto _ : state) world.ops().copy_blocks(span(world.copies()));
    count_bytes(state);
}
BENCHMARK(ops_copy)->Name("ops/copy")->Unit(benchmark::kMicrosecond);

void ops_memcpy(benchmark::State& state) {
    const World world(kvpages::Preset::flash_attention_nhd);
    for (auto _ : state) {
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
            for (const kvpages_block_copy& copy : world.copies()) {
                unsigned char* data = world.data(layer);
                std::memcpy(data + static_cast<std::uint64_t>(copy.target) * kPage,
                            data + static_cast<std::uint64_t>(copy.source) * kPage, kPage);
            }
        }
        benchmark::ClobberMemory();
    }
    count_bytes(state);
}
BENCHMARK(ops_memcpy)->Name("ops/memcpy")->Unit(benchmark::kMicrosecond);

/// The bytes that ops/write stores, from the same rows, half a page at a time.
void ops_memcpy_rows(benchmark::State& state) {
    const World world(kvpages::Preset::flash_attention_nhd);
    for (auto _ : state) {
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
            for (std::size_t i = 0; i < kListed; ++i) {
                unsigned char* page =
                    world.data(layer) + static_cast<std::uint64_t>(world.ids()[i]) * kPage;
                std::memcpy(page, world.keys(layer, i), kPage / 2);
                std::memcpy(page + kPage / 2, world.values(layer, i), kPage / 2);
            }
        }
        benchmark::ClobberMemory();
    }
    count_bytes(state);
}
BENCHMARK(ops_memcpy_rows)->Name("ops/memcpy_rows")->Unit(benchmark::kMicrosecond);

void time_write(benchmark::State& state, kvpages::Preset preset, kvpages::Dtype dtype) {
    World world(preset);
    const std::vector<kvpages_kv_rows> rows = world.rows();
    for (auto _ : state) world.ops().write(span(rows), span(world.slots()), dtype);
    count_bytes(state);
}

void ops_write(benchmark::State& state) {
    time_write(state, kvpages::Preset::flash_attention_nhd, kvpages::Dtype::f16);
}
BENCHMARK(ops_write)->Name("ops/write")->Unit(benchmark::kMicrosecond);

void ops_write_hnd(benchmark::State& state) {
    time_write(state, kvpages::Preset::flash_attention_hnd, kvpages::Dtype::f16);
}
BENCHMARK(ops_write_hnd)->Name("ops/write_hnd")->Unit(benchmark::kMicrosecond);

void ops_write_kv_first(benchmark::State& state) {
    time_write(state, kvpages::Preset::rocm_attention, kvpages::Dtype::f16);
}
BENCHMARK(ops_write_kv_first)->Name("ops/write_kv_first")->Unit(benchmark::kMicrosecond);

void ops_write_bf16(benchmark::State& state) {
    time_write(state, kvpages::Preset::flash_attention_nhd, kvpages::Dtype::bf16);
}
BENCHMARK(ops_write_bf16)->Name("ops/write_bf16_to_f16")->Unit(benchmark::kMicrosecond);

void ops_gather(benchmark::State& state) {
    World world(kvpages::Preset::flash_attention_nhd);
    const std::vector<kvpages_kv_rows_out> room = world.room();
    for (auto _ : state) {
        world.ops().gather(span(room), span(world.slots()), kvpages::Dtype::f16);
    }
    count_bytes(state);
}
BENCHMARK(ops_gather)->Name("ops/gather")->Unit(benchmark::kMicrosecond);

}  // namespace
