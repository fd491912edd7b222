// A long life of an engine:  kvpages_soak [STEPS [SEED]]
//
// Requests come, fork, are preempted and go; rows change places, the cache grows and shrinks, freed blocks
// are poisoned. Every step's tables, slots and stored rows are compared with the plainest model of them,
// every now and then all there is, and the memory of the process stays what it was.
#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

// AddressSanitizer keeps what is freed for a while, so there the memory of the process says nothing.
#if defined(__SANITIZE_ADDRESS__)
#define KVPAGES_SOAK_UNDER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPAGES_SOAK_UNDER_ASAN 1
#endif
#endif

namespace {

#ifdef KVPAGES_SOAK_UNDER_ASAN
constexpr bool kMemoryIsTelling = false;
#else
constexpr bool kMemoryIsTelling = true;
#endif

using Ids = std::vector<std::int32_t>;

constexpr std::uint64_t kBlockSize = 16, kWindow = 40, kHeads = 2, kHeadSize = 8;
constexpr std::size_t kRow = kHeads * kHeadSize;
constexpr std::uint64_t kMostBlocks = 128, kFewestBlocks = 96;
constexpr std::size_t kMostRequests = 6, kMostTokens = 64, kLongest = 200;

[[noreturn]] void fail(std::uint64_t step, const char* what) {
    std::fprintf(stderr, "soak: step %llu: %s\n", static_cast<unsigned long long>(step), what);
    std::exit(1);
}

// A request: what each of its tokens stored, and the blocks that it holds in each group.
struct Request {
    std::vector<float> tokens;
    Ids blocks[2];  // the full group's, and the window's, in which blocks left behind are 0
    std::size_t row = 0;
};

class Soak {
public:
    explicit Soak(std::uint64_t seed) : random_(seed) {
        row_is_taken_.assign(kMostRequests, false);
        set_num_blocks(kMostBlocks);
    }

    void run(std::uint64_t steps) {
        const std::uint64_t settled = std::min<std::uint64_t>(steps / 10, 20000);
        std::uint64_t resident = 0;
        for (step_ = 0; step_ < steps; ++step_) {
            if (step_ == settled) resident = resident_bytes();
            change_who_is_there();
            change_places();
            if (below(4000) == 0) resize();
            take_a_step();
            if (step_ % 997 == 0) check_all();
        }
        check_all();
        if (kMemoryIsTelling && resident_bytes() > resident + (std::uint64_t{4} << 20)) {
            fail(step_, "memory has grown");
        }
        std::printf("%llu steps, %llu requests, %llu forks, %llu tokens, %llu resizes, %llu poisoned\n",
                    number(steps), number(num_requests_), number(num_forks_), number(num_tokens_),
                    number(num_resizes_), number(num_poisoned_));
    }

private:
    static unsigned long long number(std::uint64_t n) { return n; }

    static kvpages::Plan make_plan() {
        kvpages::AttentionSpec full;
        full.dtype = kvpages::Dtype::f32;
        full.block_size = kBlockSize;
        full.num_kv_heads = kHeads;
        full.head_size = kHeadSize;
        kvpages::AttentionSpec window = full;
        window.kind = kvpages::AttentionKind::sliding_window;
        window.sliding_window = kWindow;
        const auto flash = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
        kvpages::Model model;
        model.add("layers.0", full, flash);
        model.add("layers.1", window, flash);
        kvpages::PlanConfig config;
        config.num_blocks_override = kMostBlocks;
        config.max_model_len = kLongest + kMostTokens;
        config.max_tokens_in_flight = kMostTokens;
        config.reserved_blocks = 1;
        config.policy = kvpages::Policy::reference;
        return kvpages::Plan::make(model, config);
    }

    static kvpages::Tables make_tables(const kvpages::Plan& plan) {
        kvpages::TablesConfig sizes;
        sizes.max_requests = kMostRequests;
        sizes.max_tokens = kMostTokens;
        return kvpages::Tables::make(plan, sizes);
    }

    std::uint64_t below(std::uint64_t end) { return random_() % end; }

    // --- blocks --------------------------------------------------------------

    void set_num_blocks(std::uint64_t num_blocks) {
        for (std::uint64_t id = holders_.size(); id < num_blocks; ++id) {
            free_.push_back(static_cast<std::int32_t>(id));
        }
        holders_.resize(num_blocks, 0);
        const auto is_gone = [num_blocks](std::int32_t id) {
            return id == 0 || static_cast<std::uint64_t>(id) >= num_blocks;
        };
        free_.erase(std::remove_if(free_.begin(), free_.end(), is_gone), free_.end());
    }

    std::int32_t take() {
        const std::int32_t id = free_.back();
        free_.pop_back();
        holders_[static_cast<std::size_t>(id)] = 1;
        fresh_.push_back(id);
        return id;
    }

    void give_back(std::int32_t id) {
        if (id == 0 || --holders_[static_cast<std::size_t>(id)] > 0) return;
        free_.push_back(id);
        freed_.push_back(id);
    }

    void poison_freed() {
        ops_.poison_blocks(freed_);
        num_poisoned_ += freed_.size();
        freed_.clear();
    }

    // Blocks that a request lacks for so many tokens, in both groups.
    static std::uint64_t num_missing(const Request& request, std::uint64_t tokens) {
        const std::uint64_t needed = (tokens + kBlockSize - 1) / kBlockSize;
        return 2 * needed - request.blocks[0].size() - request.blocks[1].size();
    }

    // --- who is there --------------------------------------------------------

    void change_who_is_there() {
        if (requests_.empty() || (requests_.size() < kMostRequests && below(20) == 0)) start();
        if (below(60) == 0 && requests_.size() < kMostRequests) fork(below(requests_.size()));
        for (std::size_t i = requests_.size(); i-- > 0;) {
            if (requests_[i].tokens.size() > kLongest || below(400) == 0) finish(i);
        }
        poison_freed();
    }

    std::size_t free_row() {
        const auto row = std::find(row_is_taken_.begin(), row_is_taken_.end(), false);
        *row = true;
        return static_cast<std::size_t>(row - row_is_taken_.begin());
    }

    void start() {
        requests_.emplace_back();
        requests_.back().row = free_row();
        ++num_requests_;
    }

    void fork(std::size_t from) {
        const std::size_t full = requests_[from].tokens.size() / kBlockSize;
        if (free_.size() < 2 * (requests_[from].blocks[0].size() - full)) return;
        Request copy;
        copy.tokens = requests_[from].tokens;
        std::vector<kvpages_block_copy> copies;
        for (std::size_t group = 0; group < 2; ++group) {
            const Ids& ids = requests_[from].blocks[group];
            for (std::size_t i = 0; i < ids.size(); ++i) {
                // Full blocks are shared; one that both would write to is copied.
                if (i < full || ids[i] == 0) {
                    if (ids[i] != 0) ++holders_[static_cast<std::size_t>(ids[i])];
                    copy.blocks[group].push_back(ids[i]);
                } else {
                    copy.blocks[group].push_back(take());
                    fresh_.pop_back();  // the copy fills it
                    copies.push_back({ids[i], copy.blocks[group].back()});
                }
            }
        }
        ops_.copy_blocks(copies);
        copy.row = free_row();
        for (std::size_t group = 0; group < 2; ++group) {
            tables_.append(copy.row, group, copy.blocks[group]);
        }
        requests_.push_back(std::move(copy));
        ++num_forks_;
    }

    void finish(std::size_t which) {
        for (Ids& ids : requests_[which].blocks) {
            for (const std::int32_t id : ids) give_back(id);
        }
        tables_.clear(requests_[which].row);
        row_is_taken_[requests_[which].row] = false;
        requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(which));
    }

    void change_places() {
        if (requests_.size() < 2 || below(30) != 0) return;
        Request& a = requests_[below(requests_.size())];
        if (below(2) == 0 && requests_.size() < kMostRequests) {
            const std::size_t row = free_row();
            tables_.move(a.row, row);
            row_is_taken_[a.row] = false;
            a.row = row;
            return;
        }
        Request& b = requests_[below(requests_.size())];
        if (a.row == b.row) return;
        tables_.swap(a.row, b.row);
        std::swap(a.row, b.row);
    }

    void resize() {
        const std::uint64_t wanted = kFewestBlocks + below(kMostBlocks - kFewestBlocks + 1);
        Ids in_use;
        for (std::size_t id = 1; id < holders_.size(); ++id) {
            if (holders_[id] > 0) in_use.push_back(static_cast<std::int32_t>(id));
        }
        const bool fits = in_use.empty() || static_cast<std::uint64_t>(in_use.back()) < wanted;
        const std::uint64_t before = cache_.num_blocks();
        bool was_done = true;
        try {
            cache_.resize(wanted, in_use);
        } catch (const kvpages::Error&) {
            was_done = false;
        }
        if (was_done != fits) fail(step_, "a resize is refused or allowed wrongly");
        if (cache_.num_blocks() != (fits ? wanted : before)) fail(step_, "a resize to another size");
        if (fits) set_num_blocks(wanted);
        ++num_resizes_;
    }

    // --- a step --------------------------------------------------------------

    void take_a_step() {
        Ids rows, query_start{0}, seq_lens;
        std::vector<std::int64_t> positions;
        std::vector<std::size_t> batch;
        for (std::size_t i = 0; i < requests_.size(); ++i) {
            const std::uint64_t tokens = 1 + (requests_[i].tokens.empty() ? below(9) : 0);
            if (below(5) == 0 || positions.size() + tokens > kMostTokens) continue;
            if (num_missing(requests_[i], requests_[i].tokens.size() + tokens) > free_.size()) continue;
            grow(requests_[i], tokens, positions);
            batch.push_back(i);
            rows.push_back(static_cast<std::int32_t>(requests_[i].row));
            query_start.push_back(static_cast<std::int32_t>(positions.size()));
            seq_lens.push_back(static_cast<std::int32_t>(requests_[i].tokens.size()));
        }
        if (batch.empty() && !requests_.empty() && free_.size() < 8) {
            finish(0);  // preempted
            poison_freed();
        }
        ops_.zero_blocks(fresh_);
        fresh_.clear();
        tables_.prepare({rows, query_start, seq_lens, positions});
        check_tables(batch);
        store(batch, query_start, positions);
        if (!batch.empty()) check_request(requests_[batch[below(batch.size())]]);
        leave_the_window();
    }

    void grow(Request& request, std::uint64_t tokens, std::vector<std::int64_t>& positions) {
        for (std::uint64_t token = 0; token < tokens; ++token) {
            positions.push_back(static_cast<std::int64_t>(request.tokens.size()));
            request.tokens.push_back(static_cast<float>(++num_tokens_ % 1000003));
        }
        const std::size_t needed = (request.tokens.size() + kBlockSize - 1) / kBlockSize;
        for (std::size_t group = 0; group < 2; ++group) {
            Ids taken;
            while (request.blocks[group].size() < needed) {
                taken.push_back(take());
                request.blocks[group].push_back(taken.back());
            }
            if (!taken.empty()) tables_.append(request.row, group, taken);
        }
    }

    void check_tables(const std::vector<std::size_t>& batch) {
        for (std::size_t group = 0; group < 2; ++group) {
            const kvpages::Tensor input = tables_.input_table(group);
            for (std::size_t row = 0; row < batch.size(); ++row) {
                const Ids& ids = requests_[batch[row]].blocks[group];
                for (std::size_t i = 0; i < ids.size(); ++i) {
                    if (input.at<std::int32_t>(static_cast<std::int64_t>(row),
                                               static_cast<std::int64_t>(i)) != ids[i]) {
                        fail(step_, "an input row is not what the request holds");
                    }
                }
            }
        }
    }

    // Both layers store the token's number in all elements of the key, and its negative in the value.
    void store(const std::vector<std::size_t>& batch, const Ids& query_start,
               const std::vector<std::int64_t>& positions) {
        std::vector<float> keys(positions.size() * kRow), values(keys.size());
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const Request& request = requests_[batch[i]];
            for (auto token = static_cast<std::size_t>(query_start[i]);
                 token < static_cast<std::size_t>(query_start[i + 1]); ++token) {
                const auto at = static_cast<std::size_t>(positions[token]);
                for (std::size_t group = 0; group < 2; ++group) {
                    const std::int64_t slot = slot_of(request, group, at);
                    if (tables_.slots(group).span<std::int64_t>()[token] != slot) {
                        fail(step_, "a slot is not the token's");
                    }
                }
                std::fill_n(keys.begin() + static_cast<std::ptrdiff_t>(token * kRow), kRow, request.tokens[at]);
                std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(token * kRow), kRow, -request.tokens[at]);
            }
        }
        for (std::size_t layer = 0; layer < 2; ++layer) {
            const auto slots = tables_.slots(layer).span<std::int64_t>().first(positions.size());
            ops_.write(kvpages::kv_rows(layer, keys.data(), values.data()), slots, kvpages::Dtype::f32);
        }
    }

    static std::int64_t slot_of(const Request& request, std::size_t group, std::size_t position) {
        return request.blocks[group][position / kBlockSize] * static_cast<std::int64_t>(kBlockSize) +
               static_cast<std::int64_t>(position % kBlockSize);
    }

    // Blocks whose tokens no later token sees are given back, and their entries become 0.
    void leave_the_window() {
        for (Request& request : requests_) {
            const std::size_t size = request.tokens.size();
            const std::size_t end = size > kWindow ? (size - kWindow) / kBlockSize : 0;
            bool has_left = false;
            for (std::size_t i = 0; i < end; ++i) {
                if (request.blocks[1][i] == 0) continue;
                give_back(request.blocks[1][i]);
                request.blocks[1][i] = 0;
                has_left = true;
            }
            if (has_left) tables_.overwrite(request.row, 1, request.blocks[1]);
        }
        poison_freed();
    }

    // --- what must hold ------------------------------------------------------

    void check_request(const Request& request) {
        for (std::size_t group = 0; group < 2; ++group) {
            std::vector<std::int64_t> slots;
            std::vector<float> wanted;
            const std::size_t size = request.tokens.size();
            const std::size_t first = group == 1 && size > kWindow ? size - kWindow : 0;
            for (std::size_t at = first; at < size; ++at) {
                slots.push_back(slot_of(request, group, at));
                wanted.push_back(request.tokens[at]);
            }
            std::vector<float> keys(slots.size() * kRow, 0), values(keys);
            kvpages_kv_rows_out out{};
            out.layer = group;
            out.keys = keys.data();
            out.values = values.data();
            out.key_scale = out.value_scale = 1;
            ops_.gather({&out, 1}, slots, kvpages::Dtype::f32);
            for (std::size_t i = 0; i < keys.size(); ++i) {
                if (keys[i] != wanted[i / kRow] || values[i] != -wanted[i / kRow]) {
                    fail(step_, "a token is not what was stored");
                }
            }
        }
    }

    void check_all() {
        std::vector<std::uint32_t> held(holders_.size(), 0);
        for (const Request& request : requests_) {
            check_request(request);
            for (const Ids& ids : request.blocks) {
                for (const std::int32_t id : ids) held[static_cast<std::size_t>(id)] += id != 0;
            }
        }
        if (held != holders_) fail(step_, "blocks are held by others than count them");
        std::uint64_t in_use = 0;
        for (const std::uint32_t count : held) in_use += count > 0;
        if (in_use + free_.size() + 1 != holders_.size()) fail(step_, "blocks were lost");
        check_null_block();
        const kvpages_cache_snapshot now = cache_.snapshot({&in_use, 1});
        if (now.num_blocks != holders_.size() || now.generation < generation_) {
            fail(step_, "a snapshot of another cache");
        }
        generation_ = now.generation;
    }

    // Nobody writes to block 0, and it is not poisoned.
    void check_null_block() {
        for (std::size_t layer = 0; layer < 2; ++layer) {
            std::vector<float> keys(kBlockSize * kRow, 1), values(keys);
            std::vector<std::int64_t> slots(kBlockSize);
            for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
            kvpages_kv_rows_out out{};
            out.layer = layer;
            out.keys = keys.data();
            out.values = values.data();
            out.key_scale = out.value_scale = 1;
            ops_.gather({&out, 1}, slots, kvpages::Dtype::f32);
            for (std::size_t i = 0; i < keys.size(); ++i) {
                if (keys[i] != 0 || values[i] != 0) fail(step_, "block 0 was written");
            }
        }
    }

    static std::uint64_t resident_bytes() {
        std::ifstream statm("/proc/self/statm");
        std::uint64_t total = 0, resident = 0;
        statm >> total >> resident;
        return resident * 4096;
    }

    std::mt19937_64 random_;
    kvpages::Plan plan_ = make_plan();
    kvpages::Cache cache_ =
        kvpages::Cache::allocate(plan_, kvpages::Memory::host(), 0, kMostBlocks, KVPAGES_CACHE_POISON);
    kvpages::Tables tables_ = make_tables(plan_);
    kvpages::Ops ops_{cache_};
    std::vector<Request> requests_;
    std::vector<bool> row_is_taken_;
    std::vector<std::uint32_t> holders_;
    Ids free_, fresh_, freed_;
    std::uint64_t step_ = 0, generation_ = 0, num_requests_ = 0, num_forks_ = 0, num_tokens_ = 0,
                  num_resizes_ = 0, num_poisoned_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    Soak(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1).run(steps);
    return 0;
}
