// Random calls of a step, good and bad, next to the plainest model of what they mean: the statuses
// agree, and so does all memory after every call.
#include "support/api.h"
#include "support/refusal.h"
#include "support/tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace support;

namespace {

using Ids = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    std::uint64_t below(std::uint64_t end) { return engine_() % end; }
    bool one_in(std::uint64_t n) { return below(n) == 0; }
    std::uint64_t bits() { return engine_(); }

    template <typename T>
    T pick(std::initializer_list<T> from) {
        return from.begin()[below(from.size())];
    }
    // Mostly one of 0 to end - 1, at times a number that is nearly one, or far off.
    template <typename T>
    T number(std::uint64_t end) {
        if (!one_in(12)) return static_cast<T>(below(end));
        return pick<T>({static_cast<T>(-1), static_cast<T>(-2), static_cast<T>(end),
                        static_cast<T>(end + 1), std::numeric_limits<T>::max(),
                        std::numeric_limits<T>::min(), static_cast<T>(bits())});
    }

private:
    std::mt19937_64 engine_;
};

// Runs rounds of a seed each for a while; a sanitizer makes fewer of them in the same time.
template <typename Round>
void fuzz(Round round) {
    const auto start = std::chrono::steady_clock::now();
    for (std::uint64_t seed = 0; seed < 4000; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Random random(seed);
        round(random);
        if (::testing::Test::HasFailure()) return;
        if (std::chrono::steady_clock::now() - start > std::chrono::milliseconds(1500)) return;
    }
}

// --- tables --------------------------------------------------------------------------------------

// Block ids as lists, and everything computed anew from them.
class TablesModel {
public:
    struct Group {
        std::uint64_t block, kernel, row_blocks;
        bool is_replicated;
        std::uint64_t width;
    };
    std::vector<Group> groups;
    std::size_t max_requests = 0, max_tokens = 0;
    std::uint64_t num_blocks = 0, ranks = 1, rank = 0, interleave = 1;
    std::vector<std::vector<Ids>> staged, applied;  // by group, by request
    Ids input;                                      // requests of the last batch
    std::vector<std::vector<Ids>> input_rows;
    std::vector<Slots> slots;

    void start() {
        staged.assign(groups.size(), std::vector<Ids>(max_requests));
        applied = input_rows = staged;
        slots.assign(groups.size(), Slots(max_tokens, -1));
    }

    bool fits(std::size_t g, const Ids& row) const {
        return row.size() <= groups[g].row_blocks &&
               std::all_of(row.begin(), row.end(), [this](std::int32_t id) {
                   return id >= 0 && static_cast<std::uint64_t>(id) < num_blocks;
               });
    }
    bool write(std::vector<std::vector<Ids>>& rows, std::size_t request, std::size_t g,
               const Ids& ids, bool overwrite) const {
        if (request >= max_requests || g >= groups.size()) return false;
        Ids row = overwrite ? Ids{} : rows[g][request];
        row.insert(row.end(), ids.begin(), ids.end());
        if (!fits(g, row)) return false;
        rows[g][request] = row;
        return true;
    }
    bool is_request(std::int64_t request, std::int64_t lowest) const {
        return request >= lowest && request < static_cast<std::int64_t>(max_requests);
    }
    bool are_requests(const Ids& requests) const {
        return std::all_of(requests.begin(), requests.end(),
                           [this](std::int32_t r) { return is_request(r, -1); });
    }
    bool gather(const Ids& requests, std::size_t num_rows) {
        if (num_rows > max_requests || num_rows < requests.size() || !are_requests(requests)) {
            return false;
        }
        for (std::size_t g = 0; g < groups.size(); ++g) {
            for (std::size_t i = 0; i < max_requests; ++i) {
                const bool is_real = i < requests.size() && requests[i] >= 0;
                input_rows[g][i] = is_real ? applied[g][static_cast<std::size_t>(requests[i])]
                                           : Ids{};
            }
        }
        return true;
    }
    bool map(const Ids& requests, const Ids& query_start, const Slots& positions) {
        if (requests.size() > max_requests || !are_requests(requests) || query_start[0] != 0) {
            return false;
        }
        for (std::size_t i = 0; i < requests.size(); ++i) {
            if (query_start[i + 1] < query_start[i]) return false;
        }
        const auto tokens = static_cast<std::size_t>(query_start.back());
        if (tokens > positions.size() || tokens > max_tokens) return false;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            slots[g].assign(max_tokens, -1);
            for (std::size_t i = 0; i < requests.size(); ++i) {
                if (requests[i] < 0) continue;
                const Ids& row = applied[g][static_cast<std::size_t>(requests[i])];
                for (auto t = static_cast<std::size_t>(query_start[i]);
                     t < static_cast<std::size_t>(query_start[i + 1]); ++t) {
                    slots[g][t] = slot(groups[g], row, positions[t]);
                }
            }
        }
        return true;
    }
    std::int64_t slot(const Group& group, const Ids& row, std::int64_t position) const {
        if (position < 0) return -1;
        auto local = static_cast<std::uint64_t>(position);
        if (!group.is_replicated && ranks > 1) {
            const std::uint64_t run = local / interleave;
            if (run % ranks != rank) return -1;
            local = run / ranks * interleave + local % interleave;
        }
        const std::uint64_t block = local / group.block;
        if (block >= row.size()) return -1;
        return row[block] * static_cast<std::int64_t>(group.block) +
               static_cast<std::int64_t>(local % group.block);
    }

    // What the memory of tables must hold.
    Bytes bytes() const {
        Bytes all;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            for (const auto* rows : {&applied[g], &input_rows[g]}) {
                for (const Ids& row : *rows) {
                    const Ids entries = expanded(groups[g], row);
                    append_bytes(all, entries.data(), entries.size());
                }
            }
            append_bytes(all, slots[g].data(), slots[g].size());
            for (const Ids& row : staged[g]) {
                const std::size_t count = row.size() * groups[g].block / groups[g].kernel;
                append_bytes(all, &count, 1);
            }
        }
        return all;
    }

private:
    static Ids expanded(const Group& group, const Ids& row) {
        const auto ratio = static_cast<std::int32_t>(group.block / group.kernel);
        Ids entries;
        for (const std::int32_t id : row) {
            for (std::int32_t k = 0; k < ratio; ++k) entries.push_back(id * ratio + k);
        }
        entries.resize(group.width, 0);
        return entries;
    }
};

TablesHandle make(Random& random, TablesModel& model) {
    model.max_requests = 1 + random.below(4);
    model.max_tokens = 1 + random.below(24);
    model.num_blocks = 1 + random.below(6);
    model.ranks = 1 + random.below(3);
    model.rank = random.below(model.ranks);
    model.interleave = random.pick<std::uint64_t>({1, 2, 4});
    std::vector<kvpages_table_group> groups(random.below(4));
    for (kvpages_table_group& group : groups) {
        group.kernel_block_size = random.pick<std::uint64_t>({4, 8});
        group.block_size = group.kernel_block_size * (1 + random.below(3));
        group.row_blocks = random.below(4);
        group.is_replicated = static_cast<std::uint32_t>(random.below(2));
    }
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = groups.data();
    config.num_groups = groups.size();
    config.max_requests = model.max_requests;
    config.max_tokens = model.max_tokens;
    config.num_blocks = model.num_blocks;
    config.context_parallel_size = model.ranks;
    config.context_parallel_rank = model.rank;
    config.context_parallel_interleave = model.interleave;
    config.flags = random.one_in(2) ? KVPAGES_TABLES_ALIGNED_ROWS : 0u;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create(&config, &raw));
    TablesHandle made(raw);
    for (std::size_t g = 0; g < groups.size(); ++g) {
        kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
        must(kvpages_tables_get_info(raw, g, &info));
        model.groups.push_back({groups[g].block_size, groups[g].kernel_block_size,
                                groups[g].row_blocks, groups[g].is_replicated != 0,
                                info.row_width});
    }
    model.start();
    return made;
}

Ids some_ids(Random& random, const TablesModel& model) {
    Ids ids(random.below(4));
    for (std::int32_t& id : ids) id = random.number<std::int32_t>(model.num_blocks);
    return ids;
}

Ids some_requests(Random& random, const TablesModel& model) {
    Ids requests(random.below(model.max_requests + (random.one_in(6) ? 2 : 1)));
    for (std::int32_t& request : requests) {
        request = random.one_in(8) ? -1 : random.number<std::int32_t>(model.max_requests);
    }
    return requests;
}

bool write_many(Random& random, TablesModel& model, kvpages_tables* tables,
                std::int32_t* status) {
    Ids requests(random.below(4));
    for (auto& request : requests) request = random.number<std::int32_t>(model.max_requests);
    std::vector<std::uint8_t> overwrite(requests.size());
    for (auto& flag : overwrite) flag = static_cast<std::uint8_t>(random.below(3));
    Ids ids;
    std::vector<std::size_t> starts{0};
    auto after = model.staged;
    bool is_good = true;
    for (std::size_t w = 0; w < requests.size(); ++w) {
        is_good = is_good && model.is_request(requests[w], 0);
        for (std::size_t g = 0; g < model.groups.size(); ++g) {
            Ids of_group = some_ids(random, model);
            if (random.one_in(2)) of_group.clear();
            is_good = is_good && model.write(after, static_cast<std::size_t>(requests[w]), g,
                                             of_group, overwrite[w] != 0);
            ids.insert(ids.end(), of_group.begin(), of_group.end());
            starts.push_back(ids.size());
        }
    }
    if (random.one_in(12)) {
        starts[random.below(starts.size())] = random.pick<std::size_t>({ids.size() + 1, SIZE_MAX});
        is_good = false;
    }
    kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
    writes.requests = requests.data();
    writes.num_writes = requests.size();
    writes.overwrite = overwrite.data();
    writes.starts = starts.data();
    writes.block_ids = ids.data();
    writes.num_block_ids = ids.size();
    *status = kvpages_tables_write(tables, &writes);
    if (is_good) model.staged = after;
    return is_good;
}

bool map_slots(Random& random, TablesModel& model, kvpages_tables* tables, std::int32_t* status) {
    const Ids requests = some_requests(random, model);
    Ids query_start{0};
    for (std::size_t i = 0; i < requests.size(); ++i) {
        query_start.push_back(query_start.back() + static_cast<std::int32_t>(random.below(9)));
    }
    Slots positions(static_cast<std::size_t>(query_start.back()) + random.below(2));
    auto position = static_cast<std::int64_t>(random.below(20));
    for (std::int64_t& each : positions) {
        if (random.one_in(6)) position = static_cast<std::int64_t>(random.below(80));
        each = random.one_in(20) ? random.number<std::int64_t>(std::uint64_t{1} << 32) : position++;
    }
    if (random.one_in(10)) {
        query_start[random.below(query_start.size())] = random.number<std::int32_t>(30);
    }
    *status = kvpages_tables_map_slots(tables, requests.data(), requests.size(),
                                       query_start.data(), positions.data(), positions.size(),
                                       nullptr);
    return model.map(requests, query_start, positions);
}

// One call, and whether it is a good one; the model has made it too then.
bool call(Random& random, TablesModel& model, kvpages_tables* t, std::int32_t* status) {
    const auto request = random.number<std::size_t>(model.max_requests);
    const auto other = random.number<std::size_t>(model.max_requests);
    const auto group = random.number<std::size_t>(std::max<std::size_t>(model.groups.size(), 1));
    const bool is_group = group < model.groups.size();
    const bool is_request = request < model.max_requests;
    const bool are_requests = is_request && other < model.max_requests;
    switch (random.below(11)) {
        case 0: {
            const Ids ids = some_ids(random, model);
            *status = kvpages_tables_append(t, request, group, ids.data(), ids.size());
            return model.write(model.staged, request, group, ids, false);
        }
        case 1: {
            const Ids ids = some_ids(random, model);
            *status = kvpages_tables_overwrite(t, request, group, ids.data(), ids.size());
            return model.write(model.staged, request, group, ids, true);
        }
        case 2: return write_many(random, model, t, status);
        case 3: {
            const auto blocks = random.number<std::size_t>(3);
            *status = kvpages_tables_truncate(t, request, group, blocks);
            if (!is_request || !is_group || blocks > model.staged[group][request].size()) {
                return false;
            }
            model.staged[group][request].resize(blocks);
            return true;
        }
        case 4:
            *status = kvpages_tables_move(t, request, other);
            for (auto& rows : model.staged) {
                if (!are_requests || request == other) break;
                rows[other] = rows[request];
                rows[request].clear();
            }
            return are_requests;
        case 5:
            *status = kvpages_tables_swap(t, request, other);
            for (auto& rows : model.staged) {
                if (are_requests && request != other) std::swap(rows[request], rows[other]);
            }
            return are_requests;
        case 6:
            *status = kvpages_tables_clear(t, request);
            for (auto& rows : model.staged) {
                if (is_request) rows[request].clear();
            }
            return is_request;
        case 7: {
            const Ids requests = some_requests(random, model);
            const auto num_rows = random.number<std::size_t>(model.max_requests + 1);
            *status = kvpages_tables_gather(t, requests.data(), requests.size(), num_rows, nullptr);
            return model.gather(requests, num_rows);
        }
        case 8: return map_slots(random, model, t, status);
        case 9:
            if (random.one_in(8)) {
                *status = kvpages_tables_reset(t, nullptr);
                model.start();
                return true;
            }
            if (random.one_in(4)) {
                const auto num_rows = random.number<std::size_t>(model.max_requests + 1);
                *status = kvpages_tables_gather_dummies(t, num_rows, nullptr);
                return model.gather({}, num_rows);
            }
            [[fallthrough]];
        default:
            *status = kvpages_tables_apply(t, nullptr);
            model.applied = model.staged;
            return true;
    }
}

}  // namespace

TEST(StepFuzz, TablesAreLists) {
    fuzz([](Random& random) {
        TablesModel model;
        const TablesHandle tables = make(random, model);
        for (int i = 0; i < 60; ++i) {
            std::int32_t status = 0;
            const bool is_good = call(random, model, tables.get(), &status);
            ASSERT_EQ(status == KVPAGES_STATUS_OK, is_good)
                << "call " << i << ": " << kvpages_last_error_message();
            ASSERT_TRUE(bytes_of_tables(tables) == model.bytes()) << "call " << i;
        }
    });
}

// --- operations ----------------------------------------------------------------------------------

namespace {

// Layers F and W, of two groups, in one tensor, and G of F's group in another: a page is four slots
// of a key and a value of four f32 each.
constexpr std::size_t kSlot = 8;
constexpr std::size_t kPage = 4 * kSlot;
constexpr std::int32_t kBlocks = 5;
using Floats = std::vector<float>;

struct Pages {
    Cache cache;
    Ops ops;
    float* data[2] = {};
    Floats model[2];  // of each tensor

    Pages() {
        const Model m = support::model();
        const Backend kernels = backend(packed_nhd);
        add(m, "F", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "W", sliding(8, 4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "G", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        Parts parts;
        parts.num_blocks = kBlocks;
        parts.groups = {{{"F", "G"}, 0}, {{"W"}, 0}};
        parts.tensors = {{kPage * 4 * kBlocks, {"F", "W"}, 0, 0}, {kPage * 4 * kBlocks, {"G"}, 0, 0}};
        cache = support::cache(plan_from(m, parts));
        kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
        config.max_concurrency = 1;
        kvpages_ops* raw = nullptr;
        must(kvpages_ops_create(cache.get(), &config, &raw));
        ops.reset(raw);
        for (std::size_t t = 0; t < 2; ++t) {
            data[t] = static_cast<float*>(allocation(cache, t).data);
            model[t].assign(kPage * kBlocks, 0.0f);
        }
    }
    bool agree() const {
        return std::equal(model[0].begin(), model[0].end(), data[0]) &&
               std::equal(model[1].begin(), model[1].end(), data[1]);
    }
};

// Which tensors a call means; an empty selection means none.
struct Chosen {
    std::vector<std::uint64_t> groups;
    std::vector<std::size_t> layers;
    kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
    const kvpages_block_selection* pointer = nullptr;
    bool is_good = true;
    bool tensors[2] = {true, true};

    explicit Chosen(Random& random) {
        if (random.one_in(2)) return;
        tensors[0] = tensors[1] = false;
        groups.resize(random.below(3));
        layers.resize(random.below(3));
        for (auto& group : groups) {
            group = random.number<std::uint64_t>(2);
            is_good = is_good && group < 2;
            tensors[0] = true;
            tensors[1] = tensors[1] || group == 0;
        }
        for (auto& layer : layers) {
            layer = random.number<std::size_t>(3);
            is_good = is_good && layer < 3;
            tensors[layer == 2 ? 1 : 0] = true;
        }
        selection.groups = groups.data();
        selection.num_groups = groups.size();
        selection.layers = layers.data();
        selection.num_layers = layers.size();
        pointer = &selection;
    }
};

bool is_block(std::int32_t id) { return id >= 0 && id < kBlocks; }

bool zero(Random& random, Pages& pages, std::int32_t* status) {
    const Chosen chosen(random);
    Ids ids(random.below(4));
    bool is_good = chosen.is_good;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = random.number<std::int32_t>(kBlocks);
        const auto end = ids.begin() + static_cast<std::ptrdiff_t>(i);
        is_good = is_good && is_block(ids[i]) && std::find(ids.begin(), end, ids[i]) == end;
    }
    *status = kvpages_ops_zero_blocks(pages.ops.get(), ids.data(), ids.size(), chosen.pointer, nullptr);
    for (std::size_t t = 0; t < 2 && is_good; ++t) {
        for (const std::int32_t id : ids) {
            if (!chosen.tensors[t]) continue;
            std::fill_n(pages.model[t].data() + static_cast<std::size_t>(id) * kPage, kPage, 0.0f);
        }
    }
    return is_good;
}

bool copy(Random& random, Pages& pages, std::int32_t* status) {
    const Chosen chosen(random);
    std::vector<kvpages_block_copy> copies(random.below(6));
    bool is_good = chosen.is_good;
    Ids targets;
    for (kvpages_block_copy& each : copies) {
        each = {random.number<std::int32_t>(kBlocks), random.number<std::int32_t>(kBlocks)};
        // Mostly targets that no other copy has, so that long chains and cycles come up.
        for (int i = 0; i < 20 && std::count(targets.begin(), targets.end(), each.target); ++i) {
            each.target = static_cast<std::int32_t>(random.below(kBlocks));
        }
        is_good = is_good && is_block(each.source) && is_block(each.target) &&
                  std::count(targets.begin(), targets.end(), each.target) == 0;
        targets.push_back(each.target);
    }
    const auto told = random.one_in(4) ? random.number<std::uint64_t>(kBlocks + 1) : kBlocks;
    is_good = is_good && (told == kBlocks || told == 0);
    *status = kvpages_ops_copy_blocks(pages.ops.get(), copies.data(), copies.size(),
                                      chosen.pointer, told, nullptr);
    for (std::size_t t = 0; t < 2 && is_good; ++t) {
        const Floats before = pages.model[t];
        for (const kvpages_block_copy& each : copies) {
            if (!chosen.tensors[t]) continue;
            std::copy_n(before.data() + static_cast<std::size_t>(each.source) * kPage, kPage,
                        pages.model[t].data() + static_cast<std::size_t>(each.target) * kPage);
        }
    }
    return is_good;
}

// Rows of one or two layers: written, or read and compared.
bool rows(Random& random, Pages& pages, std::int32_t* status) {
    Slots slots(random.below(5));
    for (auto& slot : slots) {
        slot = random.one_in(6) ? -1 : random.number<std::int64_t>(4 * kBlocks);
    }
    const std::uint64_t stride = random.pick<std::uint64_t>({0, 4, 7});
    const std::size_t step = stride == 0 ? 4 : static_cast<std::size_t>(stride);
    std::vector<std::size_t> layers(random.below(3));
    bool is_good = true;
    for (auto& layer : layers) {
        layer = random.one_in(4) ? random.number<std::size_t>(3) : 0;
        is_good = is_good && layer < 3 && (layer == 1) == (layers[0] == 1);
    }
    const auto is_slot = [](std::int64_t s) { return s >= -1 && s < 4 * kBlocks; };
    is_good = is_good && (layers.empty() || std::all_of(slots.begin(), slots.end(), is_slot));
    const bool is_write = random.one_in(2);
    std::vector<Floats> keys(layers.size(), Floats(slots.size() * step + 1));
    std::vector<Floats> values = keys;
    std::vector<kvpages_kv_rows_out> out(layers.size());
    std::vector<kvpages_kv_rows> in(layers.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
        for (auto* all : {&keys[l], &values[l]}) {
            for (float& value : *all) value = static_cast<float>(random.below(1000));
        }
        out[l].layer = layers[l];
        out[l].keys = keys[l].data();
        out[l].values = values[l].data();
        out[l].key_token_stride = out[l].value_token_stride = stride;
        std::memcpy(&in[l], &out[l], sizeof in[l]);
    }
    auto wanted_keys = keys, wanted_values = values;
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
    write.layers = in.data();
    gather.layers = out.data();
    write.num_layers = gather.num_layers = layers.size();
    write.slots = gather.slots = slots.data();
    write.num_slots = gather.num_slots = slots.size();
    write.dtype = gather.dtype = KVPAGES_DTYPE_F32;
    *status = is_write ? kvpages_ops_write_kv(pages.ops.get(), &write)
                       : kvpages_ops_gather_kv(pages.ops.get(), &gather);
    for (std::size_t l = 0; l < layers.size() && is_good; ++l) {
        Floats& cells = pages.model[layers[l] == 2 ? 1 : 0];
        for (std::size_t row = 0; row < slots.size(); ++row) {
            if (slots[row] < 0) continue;
            float* cell = cells.data() + static_cast<std::size_t>(slots[row]) * kSlot;
            float* key = wanted_keys[l].data() + row * step;
            float* value = wanted_values[l].data() + row * step;
            std::copy_n(is_write ? key : cell, 4, is_write ? cell : key);
            std::copy_n(is_write ? value : cell + 4, 4, is_write ? cell + 4 : value);
        }
    }
    EXPECT_TRUE(keys == wanted_keys && values == wanted_values);
    return is_good;
}

}  // namespace

TEST(StepFuzz, OperationsAreThoseOfPages) {
    fuzz([](Random& random) {
        Pages pages;
        for (int i = 0; i < 60; ++i) {
            std::int32_t status = 0;
            const std::uint64_t which = random.below(4);
            const bool is_good = which == 0   ? zero(random, pages, &status)
                                 : which == 1 ? copy(random, pages, &status)
                                              : rows(random, pages, &status);
            ASSERT_EQ(status == KVPAGES_STATUS_OK, is_good)
                << "call " << i << ": " << kvpages_last_error_message();
            ASSERT_TRUE(pages.agree()) << "call " << i;
        }
    });
}

// --- garbage -------------------------------------------------------------------------------------

namespace {

// Numbers are small or far off, so that what is accepted is not large.
std::uint64_t garbage(Random& random) {
    if (!random.one_in(3)) return random.below(20);
    const unsigned shift = 33 + static_cast<unsigned>(random.below(31));
    return random.pick<std::uint64_t>({UINT64_MAX, std::uint64_t{1} << shift,
                                       UINT64_MAX - random.below(9), random.bits() | 1ull << 63});
}

// A stride that stays in the room of this test, or one that no memory has: what lies between is the
// caller's to know.
std::uint64_t garbage_stride(Random& random) {
    const std::uint64_t any = garbage(random);
    return any < 20 || any >= std::uint64_t{1} << 61 ? any : any | std::uint64_t{1} << 61;
}

// As many entries as arrays of this test have at least, or more than memory has.
std::size_t garbage_count(Random& random) {
    return random.one_in(6) ? random.pick<std::size_t>({SIZE_MAX, SIZE_MAX / 2 + 1})
                            : random.below(3);
}

template <typename T>
T* garbage_pointer(Random& random, T* good) {
    if (!random.one_in(8)) return good;
    return random.one_in(2) ? nullptr : odd(good);
}

std::size_t garbage_size(Random& random, std::size_t good) {
    return random.one_in(12) ? random.pick<std::size_t>({0, 8, good - 1, 4097, SIZE_MAX}) : good;
}

std::int32_t garbage_tables(Random& random) {
    kvpages_table_group groups[2];
    for (kvpages_table_group& group : groups) {
        group = {garbage(random), garbage(random), garbage(random),
                 static_cast<std::uint32_t>(random.below(3)),
                 static_cast<std::uint32_t>(random.one_in(9))};
    }
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.struct_size = garbage_size(random, sizeof config);
    config.groups = garbage_pointer(random, groups);
    config.num_groups = garbage_count(random);
    config.max_requests = garbage(random);
    config.max_tokens = garbage(random);
    config.num_blocks = garbage(random);
    config.context_parallel_size = garbage(random);
    config.context_parallel_rank = random.one_in(4) ? garbage(random) : 0;
    config.context_parallel_interleave = garbage(random);
    config.flags = static_cast<std::uint32_t>(random.below(3));
    kvpages_tables* raw = nullptr;
    const std::int32_t status = kvpages_tables_create(&config, &raw);
    EXPECT_EQ(raw != nullptr, status == KVPAGES_STATUS_OK);
    kvpages_tables_destroy(raw);
    return status;
}

std::int32_t garbage_writes(Random& random, kvpages_tables* tables) {
    Ids numbers(8);
    for (auto& number : numbers) number = random.number<std::int32_t>(3);
    std::uint8_t overwrite[2]{static_cast<std::uint8_t>(random.bits()), 0};
    std::size_t starts[8]{};
    for (std::size_t i = 1; i < 8; ++i) starts[i] = starts[i - 1] + random.below(2);
    if (random.one_in(4)) starts[random.below(8)] = random.number<std::size_t>(8);
    kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
    writes.struct_size = garbage_size(random, sizeof writes);
    writes.requests = garbage_pointer(random, numbers.data());
    writes.num_writes = garbage_count(random);
    writes.overwrite = random.one_in(2) ? nullptr : overwrite;
    writes.starts = garbage_pointer(random, starts);
    writes.block_ids = garbage_pointer(random, numbers.data());
    writes.num_block_ids = garbage_count(random);
    return kvpages_tables_write(tables, &writes);
}

std::int32_t garbage_rows(Random& random, const Pages& pages, Floats& room) {
    std::vector<kvpages_kv_rows_out> rows(2);
    for (kvpages_kv_rows_out& row : rows) {
        // Float pointers need not be aligned: what is odd is fine.
        row.layer = random.number<std::size_t>(3);
        row.keys = garbage_pointer(random, room.data());
        row.values = garbage_pointer(random, room.data() + 100);
        row.key_token_stride = garbage_stride(random);
        row.key_head_stride = garbage_stride(random);
        row.value_token_stride = garbage_stride(random);
        row.value_head_stride = garbage_stride(random);
        row.latent_elements = random.one_in(6) ? garbage(random) : 0;
        const auto bits = static_cast<std::uint32_t>(random.bits());
        std::memcpy(&row.key_scale, &bits, sizeof bits);
    }
    Slots slots(3);
    for (auto& slot : slots) slot = random.number<std::int64_t>(4 * kBlocks);
    Ids blocks(3);
    for (auto& block : blocks) block = random.number<std::int32_t>(kBlocks);
    kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
    gather.struct_size = garbage_size(random, sizeof gather);
    gather.layers = garbage_pointer(random, rows.data());
    gather.num_layers = garbage_count(random);
    gather.slots = garbage_pointer(random, slots.data());
    gather.num_slots = garbage_count(random);
    gather.block_ids = garbage_pointer(random, blocks.data());
    gather.num_block_ids = random.one_in(2) ? 0 : garbage_count(random);
    gather.dtype = random.one_in(6) ? static_cast<std::uint32_t>(random.bits())
                                    : std::uint32_t{KVPAGES_DTYPE_F32};
    gather.fp8_format = random.one_in(6) ? static_cast<std::uint32_t>(random.below(20)) : 0;
    return kvpages_ops_gather_kv(pages.ops.get(), &gather);
}

std::int32_t garbage_ranges(Random& random, kvpages_range* ranges) {
    std::uint8_t mask[8]{1, 0, 7, 0, 0, 255, 1, 1};
    kvpages_multimodal_item items[2];
    for (kvpages_multimodal_item& item : items) {
        item.modality = random.number<std::uint32_t>(6);
        item.reserved0 = static_cast<std::uint32_t>(random.one_in(9));
        item.offset = random.number<std::int64_t>(40);
        item.length = random.number<std::int64_t>(9);
        // A mask is as long as its item; only what is refused may say more.
        item.is_embedded = item.length > 8 || random.one_in(2) ? nullptr : mask;
    }
    std::size_t count = 77;
    const std::size_t capacity = random.below(9);
    const std::int32_t status =
        kvpages_multimodal_ranges(garbage_pointer(random, items), garbage_count(random),
                                  garbage(random), garbage_pointer(random, ranges), capacity,
                                  &count);
    if (status == KVPAGES_STATUS_OK) {
        EXPECT_LE(count, capacity);
    } else if (status != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        EXPECT_EQ(count, 0u);
    }
    return status;
}

}  // namespace

TEST(StepFuzz, GarbageChangesNothing) {
    int good = 0;
    int bad = 0;
    fuzz([&](Random& random) {
        TablesModel model;
        const TablesHandle tables = make(random, model);
        const Pages pages;
        Floats room(400, 0.5f);
        std::vector<kvpages_range> ranges(8, {-9, -9});
        for (int i = 0; i < 40; ++i) {
            const Bytes tables_before = bytes_of_tables(tables);
            const Floats room_before = room;
            const auto ranges_before = ranges;
            std::int32_t status = 0;
            switch (random.below(4)) {
                case 0: status = garbage_tables(random); break;
                case 1: status = garbage_writes(random, tables.get()); break;
                case 2: status = garbage_rows(random, pages, room); break;
                default: status = garbage_ranges(random, ranges.data()); break;
            }
            ASSERT_TRUE(pages.agree());
            if (status == KVPAGES_STATUS_OK) {
                ++good;
                continue;
            }
            ++bad;
            ASSERT_GT(status, KVPAGES_STATUS_POISONED) << kvpages_last_error_message();
            ASSERT_STRNE(kvpages_last_error_message(), "");
            ASSERT_TRUE(bytes_of_tables(tables) == tables_before);
            ASSERT_TRUE(room == room_before);
            ASSERT_EQ(std::memcmp(ranges.data(), ranges_before.data(), 8 * sizeof ranges[0]), 0);
        }
    });
    EXPECT_GT(good, bad / 50);
    EXPECT_GT(bad, good / 50);
}
