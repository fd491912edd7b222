// Operations on blocks, beside memset and memcpy over the same bytes in the same pieces: what is
// left of the memory's speed is the ratio of bytes_per_second.

#include "ops.h"

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

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
