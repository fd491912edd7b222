// What an engine pays for its block tables in every step.

#include "tables.h"

#include <benchmark/benchmark.h>

#include <cstdint>

#include "must.h"

namespace {

/// Time of one request and group, or of one token and group.
void per(benchmark::State& state, std::size_t things) {
    state.counters["each"] = benchmark::Counter(
        static_cast<double>(things),
        benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

/// 256 requests get a block in each of three groups, and the tables become so.
void append256(benchmark::State& state) {
    kvpages::Tables of = tables();
    const Writes one(1);
    const kvpages_row_writes writes = one.get();
    std::size_t filled = 0;
    for (auto _ : state) {
        must(kvpages_tables_write(of.get(), &writes));
        must(kvpages_tables_apply(of.get(), nullptr));
        if (++filled == kRowBlocks) {
            state.PauseTiming();
            of.reset();
            filled = 0;
            state.ResumeTiming();
        }
    }
    per(state, kRequests * kGroups);
}
BENCHMARK(append256)->Name("step/append256")->Unit(benchmark::kMicrosecond);

/// A batch of 256 requests of 64 blocks (1,024 tokens), 3 groups.
void gather256(benchmark::State& state) {
    kvpages::Tables of = tables();
    const Writes many(64);
    of.write(many.get());
    of.apply();
    for (auto _ : state) {
        must(kvpages_tables_gather(of.get(), many.requests.data(), kRequests, kRequests, nullptr));
    }
    per(state, kRequests * kGroups);
}
BENCHMARK(gather256)->Name("step/gather256")->Unit(benchmark::kMicrosecond);

/// All that a decode step of 256 requests of 64 blocks asks of the tables of 3 groups.
void prepare256(benchmark::State& state) {
    kvpages::Tables of = tables();
    const Writes many(64);
    of.write(many.get());
    const Decode decode;
    for (auto _ : state) benchmark::DoNotOptimize(of.prepare(decode.batch()));
    per(state, kRequests * kGroups);
}
BENCHMARK(prepare256)->Name("step/prepare256")->Unit(benchmark::kMicrosecond);

/// 8,192 tokens of `num_requests` requests.
void slots8192(benchmark::State& state, std::uint64_t block_size, std::uint64_t kernel_block_size,
               std::size_t num_requests) {
    kvpages::Tables of = tables(block_size, kernel_block_size);
    const Writes many(1024);
    of.write(many.get());
    of.apply();
    const Batch batch(num_requests);
    for (auto _ : state) {
        must(kvpages_tables_map_slots(of.get(), many.requests.data(), num_requests,
                                      batch.query_start.data(), batch.positions.data(),
                                      batch.positions.size(), nullptr));
    }
    per(state, kTokens * kGroups);
}
BENCHMARK_CAPTURE(slots8192, requests32, 16, 16, 32)
    ->Name("step/slots8192")
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(slots8192, decode, 16, 16, 256)
    ->Name("step/slots8192/requests256")
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(slots8192, split, 1056, 32, 32)
    ->Name("step/slots8192/split_blocks")
    ->Unit(benchmark::kMicrosecond);

}  // namespace
