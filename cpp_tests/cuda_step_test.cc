// A whole step in a graph: captured once, and replayed with other rows in the tables, other slots
// and other keys and values. It leaves the bytes that the same calls leave in host memory.
#include "support/cuda.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using kvpages::Dtype;
using kvpages::QuantMode;
using support::address;
using support::Bytes;
using support::DeviceArray;
using support::Entered;
using support::Graph;
using support::Stream;

using CudaStep = support::CudaTest;
using Ids = std::vector<std::int32_t>;

constexpr std::size_t kRequests = 5;
constexpr std::size_t kTokens = 24;  // that the graph is captured for
constexpr std::uint64_t kBlockSize = 16;
constexpr std::uint64_t kHeads = 2;
constexpr std::uint64_t kHeadSize = 32;
constexpr std::uint64_t kRowBytes = kHeads * kHeadSize * 2;
constexpr std::int64_t kMaxLength = 64;
constexpr std::size_t kNumLayers = 4;
constexpr std::int32_t kNumBlocks = 64;

// Blocks that no request gets: what each replay clears, and where it copies blocks of requests to.
const Ids kCleared{60, 61};
const std::vector<kvpages_block_copy> kCopied{{1, 62}, {2, 63}, {3, 59}, {4, 3}};

struct Stored {
    Dtype dtype;
    QuantMode quant_mode;
};

/// Layers of full and of sliding-window attention by turns: two groups, which share memory.
kvpages::Plan plan_of(const Stored& stored) {
    kvpages::AttentionSpec full;
    full.dtype = stored.dtype;
    full.quant_mode = stored.quant_mode;
    full.block_size = kBlockSize;
    full.num_kv_heads = kHeads;
    full.head_size = kHeadSize;
    kvpages::AttentionSpec sliding = full;
    sliding.kind = kvpages::AttentionKind::sliding_window;
    sliding.sliding_window = 32;
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    kvpages::Model model;
    for (std::size_t i = 0; i < kNumLayers; ++i) {
        model.add("layers." + std::to_string(i), i % 2 == 0 ? full : sliding, backend, kHeads);
    }
    kvpages::PlanConfig config;
    config.num_blocks_override = kNumBlocks;
    config.max_model_len = kMaxLength;
    config.max_tokens_in_flight = kTokens;
    return kvpages::Plan::make(model, config);
}

/// The rows of one layer and token after another: all keys, then all values.
struct Rows {
    explicit Rows(unsigned char* data) : data_(data) {}

    unsigned char* keys(std::size_t layer) const { return data_ + 2 * layer * kTokens * kRowBytes; }
    unsigned char* values(std::size_t layer) const { return keys(layer) + kTokens * kRowBytes; }

    static constexpr std::size_t bytes() { return 2 * kNumLayers * kTokens * kRowBytes; }

private:
    unsigned char* data_;
};

/// What an engine holds of one cache.
class Side {
public:
    Side(const kvpages::Plan& plan, const kvpages::Memory& memory)
        : cache_(kvpages::Cache::allocate(plan, memory)), ops_(cache_), tables_(make(plan)) {
        for (std::size_t layer = 0; layer < kNumLayers; ++layer) {
            const std::size_t group = layer % 2;
            layers_of_[group].push_back(layer);
        }
    }

    const kvpages::Cache& cache() const { return cache_; }
    kvpages::Tables& tables() { return tables_; }

    /// A step's work on blocks and rows, of as many tokens as can be: slots of no token are -1.
    void work(const Rows& rows, const Rows& room, CUstream stream) {
        ops_.zero_blocks(kCleared, stream);
        ops_.copy_blocks(kCopied, stream);
        for (std::size_t group = 0; group < tables_.num_groups(); ++group) {
            const auto* slots = static_cast<const std::int64_t*>(tables_.slots(group).data);
            std::vector<kvpages_kv_rows> written;
            std::vector<kvpages_kv_rows_out> read;
            for (const std::size_t layer : layers_of_[group]) {
                written.push_back(
                    kvpages::kv_rows(layer, rows.keys(layer), rows.values(layer), 0.5f, 2.0f));
                kvpages_kv_rows_out out{};
                out.layer = layer;
                out.keys = room.keys(layer);
                out.values = room.values(layer);
                out.key_scale = 0.5f;
                out.value_scale = 2;
                read.push_back(out);
            }
            ops_.write(written, {slots, kTokens}, Dtype::bf16, std::nullopt, stream);
            ops_.gather(read, {slots, kTokens}, Dtype::bf16, std::nullopt, stream);
        }
    }

private:
    kvpages::Tables make(const kvpages::Plan& plan) const {
        kvpages::TablesConfig config;
        config.max_requests = kRequests;
        config.max_tokens = kTokens;
        if (cache_.device().kind == KVPAGES_DEVICE_KIND_CUDA) config.device = cache_.device();
        return kvpages::Tables::make(plan, config);
    }

    kvpages::Cache cache_;
    kvpages::Ops ops_;
    kvpages::Tables tables_;
    std::vector<std::size_t> layers_of_[2];
};

/// Requests that come, grow, change places and go.
class Scheduler {
public:
    Scheduler() {
        for (std::int32_t id = 1; id < 50; ++id) free_.push_back(id);
    }

    struct Step {
        Ids requests, query_start{0}, seq_lens;
        std::vector<std::int64_t> positions;
    };

    /// Stages a step in all tables.
    Step next(const std::vector<kvpages::Tables*>& tables) {
        if (below(4) == 0) leave(tables, below(kRequests));
        if (below(3) == 0) {
            const std::size_t a = below(kRequests), b = below(kRequests);
            std::swap(requests_[a], requests_[b]);
            for (kvpages::Tables* each : tables) each->swap(a, b);
        }
        Step step;
        for (std::size_t row = 0; row < kRequests; ++row) {
            const std::size_t room = kTokens - step.positions.size();
            const std::size_t most = std::min<std::size_t>(room, below(3) == 0 ? 18 : 1);
            if (most == 0 || below(5) == 0) continue;
            if (requests_[row].length + static_cast<std::int64_t>(most) > kMaxLength) {
                leave(tables, row);
            }
            add(tables, step, row, most);
        }
        return step;
    }

private:
    struct Request {
        std::int64_t length = 0;
        Ids blocks[2];
    };

    std::size_t below(std::size_t end) { return random_() % end; }

    void add(const std::vector<kvpages::Tables*>& tables, Step& step, std::size_t row,
             std::size_t count) {
        Request& request = requests_[row];
        for (std::size_t i = 0; i < count; ++i) step.positions.push_back(request.length++);
        for (std::size_t group = 0; group < 2; ++group) {
            Ids& blocks = request.blocks[group];
            while (blocks.size() * kBlockSize < static_cast<std::uint64_t>(request.length)) {
                const std::size_t chosen = below(free_.size());
                blocks.push_back(free_[chosen]);
                free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(chosen));
                for (kvpages::Tables* each : tables) {
                    each->append(row, group, kvpages::Span<const std::int32_t>(&blocks.back(), 1));
                }
            }
        }
        step.requests.push_back(static_cast<std::int32_t>(row));
        step.query_start.push_back(static_cast<std::int32_t>(step.positions.size()));
        step.seq_lens.push_back(static_cast<std::int32_t>(request.length));
    }

    void leave(const std::vector<kvpages::Tables*>& tables, std::size_t row) {
        for (const Ids& blocks : requests_[row].blocks) {
            free_.insert(free_.end(), blocks.begin(), blocks.end());
        }
        requests_[row] = Request{};
        for (kvpages::Tables* each : tables) each->clear(row);
    }

    std::mt19937_64 random_{7};
    Ids free_;
    Request requests_[kRequests];
};

/// Numbers that are not equal by chance, and that fp8 and int8 round.
std::vector<std::uint16_t> any_rows(std::mt19937_64& random) {
    std::vector<std::uint16_t> all(Rows::bytes() / 2);
    for (std::uint16_t& bf16 : all) {
        const float value = static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 16;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof(bits));
        bf16 = static_cast<std::uint16_t>(bits >> 16);
    }
    return all;
}

void expect_equal(const kvpages::Cache& host, const kvpages::Cache& device) {
    const Entered entered;
    for (std::size_t i = 0; i < host.num_allocations(); ++i) {
        const kvpages_allocation part = host.allocation(i);
        const auto* bytes = static_cast<const unsigned char*>(part.data);
        Bytes on_device(part.size_bytes);
        DRIVER(cuMemcpyDtoH_v2(on_device.data(), address(device.allocation(i).data),
                               on_device.size()));
        ASSERT_EQ(on_device, Bytes(bytes, bytes + part.size_bytes)) << "allocation " << i;
    }
}

}  // namespace

// Nothing has run on the device before: what the first calls of operations load is loaded when they
// are made, and not in the capture.
TEST_F(CudaStep, IsCapturedOnceAndReplayedWithWhatHasChanged) {
    for (const Stored& stored :
         {Stored{Dtype::bf16, QuantMode::none}, Stored{Dtype::f8_e4m3fn, QuantMode::fp8_per_tensor},
          Stored{Dtype::i8, QuantMode::int8_per_token_head}}) {
        SCOPED_TRACE(kvpages::name(stored.dtype));
        const kvpages::Plan plan = plan_of(stored);
        Side host(plan, kvpages::Memory::host()), device(plan, kvpages::Memory::cuda());
        ASSERT_EQ(host.tables().num_groups(), 2u);
        Bytes host_rows(Rows::bytes()), host_room(Rows::bytes(), 0xee);
        const DeviceArray device_rows(Rows::bytes()), device_room(host_room);
        const Stream stream;
        const Graph graph(stream.get(), [&] {
            device.work(Rows(device_rows.data<unsigned char>()),
                        Rows(device_room.data<unsigned char>()), stream.get());
        });
        Scheduler scheduler;
        std::mt19937_64 random(11);
        std::size_t num_tokens = 0;
        for (int replay = 0; replay < 20; ++replay) {
            SCOPED_TRACE("replay " + std::to_string(replay));
            const Scheduler::Step step = scheduler.next({&host.tables(), &device.tables()});
            num_tokens += step.positions.size();
            const std::vector<std::uint16_t> rows = any_rows(random);
            std::memcpy(host_rows.data(), rows.data(), host_rows.size());
            device_rows.write(rows);
            const kvpages::Batch batch{step.requests, step.query_start, step.seq_lens,
                                       step.positions, stream.get()};
            host.tables().prepare(batch);
            device.tables().prepare(batch);
            host.work(Rows(host_rows.data()), Rows(host_room.data()), nullptr);
            graph.launch(stream.get());
            stream.wait();
            ASSERT_NO_FATAL_FAILURE(expect_equal(host.cache(), device.cache()));
            ASSERT_EQ(device_room.read(), host_room);
        }
        EXPECT_GT(num_tokens, 100u);
    }
}
