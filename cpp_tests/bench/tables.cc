// What an engine pays for its block tables in every step.

#include <benchmark/benchmark.h>
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kRequests = 256;
constexpr std::size_t kGroups = 3;
constexpr std::size_t kTokens = 8192;
constexpr std::size_t kRowBlocks = 8192;

void must(kvpages_status status, benchmark::State& state) {
    if (status != KVPAGES_STATUS_OK) state.SkipWithError(kvpages_last_error_message());
}

/// Three groups, blocks of which are kernel blocks.
kvpages::Tables tables(std::uint64_t block_size = 16, std::uint64_t kernel_block_size = 16) {
    kvpages::TablesConfig config;
    config.max_requests = kRequests;
    config.max_tokens = kTokens;
    config.num_blocks = 1u << 20;
    return kvpages::Tables::make(
        std::vector<kvpages_table_group>(kGroups,
                                         {block_size, kernel_block_size, kRowBlocks, 0, 0}),
        config);
}

/// Writes of the same number of blocks to every request and group.
struct Writes {
    explicit Writes(std::size_t blocks_each) : requests(kRequests), overwrite(kRequests, 0) {
        std::iota(requests.begin(), requests.end(), 0);
        for (std::size_t i = 0; i <= kRequests * kGroups; ++i) starts.push_back(i * blocks_each);
        for (std::size_t i = 0; i < kRequests * kGroups * blocks_each; ++i) {
            blocks.push_back(static_cast<std::int32_t>((i * 7919) % (1u << 20)));
        }
    }

    kvpages_row_writes get() const {
        kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
        writes.requests = requests.data();
        writes.num_writes = requests.size();
        writes.overwrite = overwrite.data();
        writes.starts = starts.data();
        writes.block_ids = blocks.data();
        writes.num_block_ids = blocks.size();
        return writes;
    }

    std::vector<std::int32_t> requests;
    std::vector<std::uint8_t> overwrite;
    std::vector<std::size_t> starts;
    std::vector<std::int32_t> blocks;
};

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
        must(kvpages_tables_write(of.get(), &writes), state);
        must(kvpages_tables_apply(of.get()), state);
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
        must(kvpages_tables_gather(of.get(), many.requests.data(), kRequests, kRequests), state);
    }
    per(state, kRequests * kGroups);
}
BENCHMARK(gather256)->Name("step/gather256")->Unit(benchmark::kMicrosecond);

/// 8,192 tokens of `num_requests` requests, each of which starts at some place of a block.
void slots8192(benchmark::State& state, std::uint64_t block_size, std::uint64_t kernel_block_size,
               std::size_t num_requests) {
    kvpages::Tables of = tables(block_size, kernel_block_size);
    const Writes many(1024);
    of.write(many.get());
    of.apply();
    const std::size_t each = kTokens / num_requests;
    std::vector<std::int32_t> query_start{0};
    std::vector<std::int64_t> positions;
    for (std::size_t i = 0; i < num_requests; ++i) {
        for (std::size_t t = 0; t < each; ++t) {
            positions.push_back(static_cast<std::int64_t>(i * 13 + t));
        }
        query_start.push_back(static_cast<std::int32_t>(positions.size()));
    }
    for (auto _ : state) {
        must(kvpages_tables_map_slots(of.get(), many.requests.data(), num_requests,
                                      query_start.data(), positions.data(), positions.size()),
             state);
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
