// An engine with an allocator and kernels of its own, whose pages lie as nobody else's do.
//
//   own_layout     prints what it does, and ends with 0 when all of it was as it should be
//
// kvpages has no line for this layout (kernels.h): it is named axes, and the rest follows. The
// engine stores tokens with its own kernel and looks for them in its raw memory, at addresses that
// it computes itself; what kvpages writes, its kernels read, and the other way round. Three things
// go wrong on the way, and the engine handles them: a length that does not fit, an allocator that
// has less than was planned for, and a request that gets longer than it may.

#include "arena.h"
#include "kernels.h"

#include <kvpages/kvpages.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace own_layout {
namespace {

constexpr std::size_t kLayers = 4, kHeads = 2, kHeadSize = 32, kRow = kHeads * kHeadSize;
constexpr std::size_t kWindow = 24, kTokens = 40;
constexpr std::uint64_t kAskedBlockSize =
    24;  // the kernels do not take it: a plan makes more of it

void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(std::string("not as it should be: ") + what);
}

bool is_sliding(std::size_t layer) { return layer % 2 == 1; }

kvpages::Model make_model(std::uint64_t block_size) {
    kvpages::AttentionSpec full;
    full.dtype = kvpages::Dtype::f32;
    full.block_size = block_size;
    full.num_kv_heads = kHeads;
    full.head_size = kHeadSize;
    kvpages::AttentionSpec sliding = full;
    sliding.kind = kvpages::AttentionKind::sliding_window;
    sliding.sliding_window = kWindow;
    const kvpages::Backend lanes = kernels();
    kvpages::Model model;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
        model.add("layers." + std::to_string(layer) + ".attn", is_sliding(layer) ? sliding : full,
                  lanes);
    }
    return model;
}

/// Plans for the length that was asked for, or for the longest that fits.
kvpages::Plan make_plan(const kvpages::Model& model, std::int64_t memory_bytes) {
    kvpages::PlanConfig config;
    config.memory_bytes = memory_bytes;
    config.max_model_len = 8192;
    config.max_tokens_in_flight = 64;
    config.reserved_blocks = 1;
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    if (auto plan = kvpages::Plan::try_make(model, config, shortfall)) return std::move(*plan);
    std::printf("%llu tokens would need %llu KiB; serving %llu\n",
                static_cast<unsigned long long>(config.max_model_len),
                static_cast<unsigned long long>(shortfall.needed_bytes >> 10),
                static_cast<unsigned long long>(shortfall.longest_model_len));
    if (shortfall.longest_model_len == 0) throw std::runtime_error("no request fits");
    config.max_model_len = shortfall.longest_model_len;
    return kvpages::Plan::make(model, config);
}

struct Served {
    kvpages::Plan plan;
    kvpages::Cache cache;
};

/// Plans for `memory_bytes`. When the arena turns out to have less, plans anew for what it has.
Served serve_from(Arena& arena, std::int64_t memory_bytes) {
    const auto memory = kvpages::Memory::external(arena.callbacks());
    kvpages::Plan plan = make_plan(make_model(kAskedBlockSize), memory_bytes);
    try {
        kvpages::Cache cache = kvpages::Cache::allocate(plan, memory);
        return {std::move(plan), std::move(cache)};
    } catch (const kvpages::Error& error) {
        if (error.status() != KVPAGES_STATUS_OUT_OF_HOST_MEMORY) throw;
        std::printf("refused: %s\n", error.what());
    }
    require(arena.num_pieces() == 0, "a cache that is not made gives all back");
    return serve_from(arena, static_cast<std::int64_t>(arena.free_bytes()));
}

/// Keys and values of all tokens of a layer, as a model would compute them: [tokens, heads, head
/// size].
struct Rows {
    std::vector<float> keys = std::vector<float>(kTokens * kRow);
    std::vector<float> values = std::vector<float>(kTokens * kRow);

    explicit Rows(std::size_t layer) {
        for (std::size_t i = 0; i < keys.size(); ++i) {
            keys[i] = std::sin(static_cast<float>(i + 7 * layer));
            values[i] = std::cos(static_cast<float>(3 * i + layer)) + 2;  // never 0
        }
    }
};

/// The address of an element as this engine computes it, from what the layout says and nothing
/// else.
const float* address(const kvpages::Cache& cache, std::size_t layer, std::int64_t slot,
                     std::size_t kv, std::size_t head, std::size_t element) {
    const auto* start = static_cast<const std::byte*>(cache.view(layer).data);
    const std::size_t page = 2 * kHeads * kHeadSize * kLanes * sizeof(float);
    const std::size_t block = static_cast<std::size_t>(slot) / kLanes;
    const std::size_t in_page = (((kv * kHeads + head) * kHeadSize + element) * kLanes +
                                 static_cast<std::size_t>(slot) % kLanes) *
                                sizeof(float);
    return reinterpret_cast<const float*>(start + block * page + in_page);
}

/// How many elements of a layer's tokens lie where the engine's own arithmetic has them.
std::size_t count_in_place(const kvpages::Cache& cache, std::size_t layer,
                           const std::int64_t* slots, const Rows& rows) {
    std::size_t in_place = 0;
    for (std::size_t token = 0; token < kTokens; ++token) {
        for (std::size_t i = 0; i < kRow; ++i) {
            const std::size_t head = i / kHeadSize, element = i % kHeadSize;
            in_place += *address(cache, layer, slots[token], 0, head, element) ==
                        rows.keys[token * kRow + i];
            in_place += *address(cache, layer, slots[token], 1, head, element) ==
                        rows.values[token * kRow + i];
        }
    }
    return in_place;
}

std::size_t count_not_zero(const Arena& arena) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < arena.size_bytes() - arena.free_bytes(); at += sizeof(float)) {
        float number = 0;
        std::memcpy(&number, arena.data() + at, sizeof number);
        count += number != 0;
    }
    return count;
}

/// The same attention over memory that is not paged.
float difference(const Pages& pages, const std::int32_t* table, std::size_t layer,
                 const Rows& rows) {
    const std::size_t first = is_sliding(layer) ? kTokens - kWindow : 0;
    float largest = 0;
    for (std::size_t head = 0; head < kHeads; ++head) {
        const float* query = &rows.keys[head * kHeadSize];
        std::vector<float> out(kHeadSize);
        attend(pages, table, first, kTokens, head, query, out.data());
        std::vector<double> weight(kTokens);
        double sum = 0;
        for (std::size_t token = first; token < kTokens; ++token) {
            double product = 0;
            for (std::size_t i = 0; i < kHeadSize; ++i) {
                product +=
                    double{query[i]} * double{rows.keys[token * kRow + head * kHeadSize + i]};
            }
            sum += weight[token] = std::exp(product / std::sqrt(double{kHeadSize}));
        }
        for (std::size_t i = 0; i < kHeadSize; ++i) {
            double expected = 0;
            for (std::size_t token = first; token < kTokens; ++token) {
                expected +=
                    weight[token] / sum * double{rows.values[token * kRow + head * kHeadSize + i]};
            }
            largest = std::max(largest, std::fabs(out[i] - static_cast<float>(expected)));
        }
    }
    return largest;
}

/// Gives request 1 blocks until it has as many as a request may have; then it ends.
void end_when_full(kvpages::Tables& tables) {
    const std::vector<std::int32_t> block{1};
    try {
        while (true) tables.append(1, 0, block);
    } catch (const kvpages::Error& error) {
        if (error.kind() != "table_row_overflow") throw;
        std::printf("request 1 ends: %s\n", error.what());
    }
    tables.clear(1);
    require(tables.num_entries(1, 0) == 0, "its row is free");
}

void run() {
    Arena arena(std::size_t{512} << 10);
    const Served served = serve_from(arena, std::int64_t{1} << 20);
    const kvpages::Cache& cache = served.cache;
    const std::uint64_t block_size = served.plan.group(0).block_size;
    require(block_size % kLanes == 0, "blocks are made of what the kernels take");
    std::printf("%llu blocks of %llu tokens, where %llu were asked for, in the engine's arena\n",
                static_cast<unsigned long long>(cache.num_blocks()),
                static_cast<unsigned long long>(block_size),
                static_cast<unsigned long long>(kAskedBlockSize));

    // Request 1 has 40 tokens, and two blocks of each group. Tables list kernel blocks.
    kvpages::TablesConfig sizes;
    sizes.max_requests = 4;
    sizes.max_tokens = 64;
    auto tables = kvpages::Tables::make(served.plan, sizes);
    auto low = std::int32_t{0}, high = static_cast<std::int32_t>(cache.num_blocks());
    for (std::size_t group = 0; group < tables.num_groups(); ++group) {
        const std::vector<std::int32_t> blocks{--high, ++low};  // no block is handed out twice
        tables.append(1, group, blocks);
    }
    require(low < high, "there are blocks for a request");
    const std::vector<std::int32_t> requests{1}, query_start{0, kTokens}, seq_lens{kTokens};
    std::vector<std::int64_t> positions(kTokens);
    for (std::size_t i = 0; i < kTokens; ++i) positions[i] = static_cast<std::int64_t>(i);
    tables.prepare({requests, query_start, seq_lens, positions});

    const kvpages::Ops ops(cache);
    const std::size_t elements = 2 * kTokens * kRow;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
        const std::size_t group = cache.layer(layer).group;
        const auto* slots = static_cast<const std::int64_t*>(tables.slots(group).data);
        const Pages pages(cache.view(layer));
        const Rows rows(layer);
        Rows read(0);
        const bool by_engine = layer < 2;
        const std::size_t before = count_not_zero(arena);
        if (by_engine) {
            for (std::size_t token = 0; token < kTokens; ++token) {
                store(pages, slots[token], &rows.keys[token * kRow], &rows.values[token * kRow]);
            }
        } else {
            ops.write(kvpages::kv_rows(layer, rows.keys.data(), rows.values.data()),
                      {slots, kTokens}, kvpages::Dtype::f32);
        }
        require(count_in_place(cache, layer, slots, rows) == elements,
                "every element is where the engine's own arithmetic has it");
        const std::size_t zeros = layer == 0 ? 1 : 0;  // sin(0)
        require(count_not_zero(arena) - before == elements - zeros, "nothing else was written");

        kvpages_kv_rows_out out{};
        out.layer = layer;
        out.keys = read.keys.data();
        out.values = read.values.data();
        ops.gather({&out, 1}, {slots, kTokens}, kvpages::Dtype::f32);
        require(read.keys == rows.keys && read.values == rows.values,
                "kvpages reads the same rows");

        const auto* table = static_cast<const std::int32_t*>(tables.input_table(group).data);
        const float differs = difference(pages, table, layer, rows);
        require(differs < 1e-5f, "attention is that over memory that is not paged");
        std::printf("layer %zu, group %zu: %zu elements in place, written by %s, read by both\n",
                    layer, group, elements, by_engine ? "the engine" : "kvpages");
    }
    end_when_full(tables);
    std::puts("all as it should be");
}

}  // namespace
}  // namespace own_layout

int main() {
    try {
        own_layout::run();
        return 0;
    } catch (const kvpages::Error& error) {
        std::fprintf(stderr, "%s, %s: %s\n", kvpages_status_name(error.status()),
                     error.kind().c_str(), error.what());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
    }
    return 1;
}
