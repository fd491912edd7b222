// Block tables and slot mappings. Tests named Table.T01... are the cases of that number.
#include "support/api.h"
#include "support/failure.h"
#include "support/world.h"

#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace {

using support::fails;
using support::must;
using Ids = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;
using Handle = std::unique_ptr<kvpages_tables,
                               support::Destroy<kvpages_tables, kvpages_tables_destroy>>;

kvpages_table_group group(std::uint64_t block_size, std::uint64_t kernel_block_size,
                          std::uint64_t row_blocks, std::uint32_t is_replicated = 0) {
    return {block_size, kernel_block_size, row_blocks, is_replicated, 0};
}

kvpages_tables_config config(std::uint64_t max_requests, std::uint64_t max_tokens,
                             std::uint64_t num_blocks = 64) {
    kvpages_tables_config made = KVPAGES_TABLES_CONFIG_INIT;
    made.max_requests = max_requests;
    made.max_tokens = max_tokens;
    made.num_blocks = num_blocks;
    return made;
}

std::int32_t try_tables(const std::vector<kvpages_table_group>& groups,
                        kvpages_tables_config made, kvpages_tables** out) {
    made.groups = groups.data();
    made.num_groups = groups.size();
    return kvpages_tables_create(&made, out);
}

Handle tables(const std::vector<kvpages_table_group>& groups, const kvpages_tables_config& made) {
    kvpages_tables* raw = nullptr;
    must(try_tables(groups, made, &raw));
    return Handle(raw);
}

void append(const Handle& of, std::size_t request, std::size_t of_group, const Ids& ids) {
    must(kvpages_tables_append(of.get(), request, of_group, ids.data(), ids.size()));
}

void apply(const Handle& of) { must(kvpages_tables_apply(of.get(), nullptr)); }

void gather(const Handle& of, const Ids& requests, std::size_t num_rows) {
    must(kvpages_tables_gather(of.get(), requests.data(), requests.size(), num_rows, nullptr));
}

// One request's tokens.
void map(const Handle& of, std::int32_t request, const Slots& positions) {
    const std::int32_t query_start[]{0, static_cast<std::int32_t>(positions.size())};
    must(kvpages_tables_map_slots(of.get(), &request, 1, query_start, positions.data(),
                                  positions.size(), nullptr));
}

using Get = kvpages_status (*)(const kvpages_tables*, std::size_t, kvpages_tensor*);

kvpages_tensor tensor(const Handle& of, Get get, std::size_t of_group = 0) {
    kvpages_tensor made{};
    must(get(of.get(), of_group, &made));
    return made;
}

Ids row(const kvpages_tensor& table, std::int64_t number) {
    const auto* begin = static_cast<const std::int32_t*>(table.data) + number * table.strides[0];
    return {begin, begin + table.shape[1]};
}

Ids table_row(const Handle& of, std::int64_t number, std::size_t of_group = 0) {
    return row(tensor(of, kvpages_tables_get_table, of_group), number);
}

Ids input_row(const Handle& of, std::int64_t number, std::size_t of_group = 0) {
    return row(tensor(of, kvpages_tables_get_input_table, of_group), number);
}

Slots slots(const Handle& of, std::size_t of_group = 0) {
    const kvpages_tensor made = tensor(of, kvpages_tables_get_slots, of_group);
    const auto* begin = static_cast<const std::int64_t*>(made.data);
    return {begin, begin + made.shape[0]};
}

Slots up_to(std::int64_t count) {
    Slots positions;
    for (std::int64_t i = 0; i < count; ++i) positions.push_back(i);
    return positions;
}

std::vector<const void*> addresses(const Handle& of) {
    std::vector<const void*> all;
    for (std::size_t i = 0; i < kvpages_tables_num_groups(of.get()); ++i) {
        for (const Get get : {Get{kvpages_tables_get_table}, Get{kvpages_tables_get_input_table},
                              Get{kvpages_tables_get_slots}}) {
            all.push_back(tensor(of, get, i).data);
        }
    }
    return all;
}

// Blocks 3 and 5 on one of two ranks.
Slots of_rank(std::uint64_t kernel_block_size, std::uint64_t rank, std::uint64_t interleave) {
    kvpages_tables_config made = config(1, 16);
    made.context_parallel_size = 2;
    made.context_parallel_rank = rank;
    made.context_parallel_interleave = interleave;
    const Handle of = tables({group(4, kernel_block_size, 2)}, made);
    append(of, 0, 0, {3, 5});
    apply(of);
    map(of, 0, up_to(16));
    return slots(of);
}

// 4 blocks of 16 tokens in one layer.
struct OneLayer {
    static constexpr std::ptrdiff_t token_bytes = 16;
    static constexpr std::size_t bytes = 4 * 16 * token_bytes;

    support::Model model = support::model();
    support::Plan plan;

    OneLayer() {
        support::add(model, "layer", support::full(16, 1, 4, KVPAGES_DTYPE_F16),
                     support::backend(support::packed_nhd));
        plan = support::plan_of_blocks(model, 4);
    }
};

constexpr unsigned char kWritten = 9;

// Fills a cache of one allocation, and says where it is.
unsigned char* fill(const support::Cache& cache, unsigned char byte) {
    const kvpages_allocation part = support::allocation(cache, 0);
    EXPECT_EQ(part.size_bytes, OneLayer::bytes);
    auto* data = static_cast<unsigned char*>(part.data);
    std::fill_n(data, OneLayer::bytes, byte);
    return data;
}

// Writes a token to each slot.
void write(const support::Cache& cache, const Slots& to) {
    kvpages_ops_config made = KVPAGES_OPS_CONFIG_INIT;
    made.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(cache.get(), &made, &raw));
    const support::Ops ops(raw);
    const std::vector<unsigned char> values(to.size() * 8, kWritten);
    kvpages_kv_rows rows{};
    rows.keys = values.data();
    rows.values = values.data();
    kvpages_kv_write call = KVPAGES_KV_WRITE_INIT;
    call.layers = &rows;
    call.num_layers = 1;
    call.slots = to.data();
    call.num_slots = to.size();
    call.dtype = KVPAGES_DTYPE_F16;
    must(kvpages_ops_write_kv(ops.get(), &call));
}

}  // namespace

// --- cases ---------------------------------------------------------------------------------------

TEST(Table, T01_RanksShareBlocksNotKernelBlocks) {
    EXPECT_EQ(of_rank(2, 0, 4),
              (Slots{12, 13, 14, 15, -1, -1, -1, -1, 20, 21, 22, 23, -1, -1, -1, -1}));
    EXPECT_EQ(of_rank(2, 1, 4),
              (Slots{-1, -1, -1, -1, 12, 13, 14, 15, -1, -1, -1, -1, 20, 21, 22, 23}));
}

TEST(Table, T02_RanksTakeTurnsByToken) {
    for (const std::uint64_t kernel : {4u, 2u}) {
        EXPECT_EQ(of_rank(kernel, 0, 1),
                  (Slots{12, -1, 13, -1, 14, -1, 15, -1, 20, -1, 21, -1, 22, -1, 23, -1}));
        EXPECT_EQ(of_rank(kernel, 1, 1),
                  (Slots{-1, 12, -1, 13, -1, 14, -1, 15, -1, 20, -1, 21, -1, 22, -1, 23}));
    }
}

TEST(Table, T04_APositionPastTheRowIsNotTheNeighbours) {
    const Handle of = tables({group(16, 16, 1)}, config(2, 2));
    append(of, 0, 0, {5});
    append(of, 1, 0, {9});
    apply(of);
    map(of, 0, {0, 16});
    EXPECT_EQ(slots(of), (Slots{80, -1}));
}

TEST(Table, T06_RowsAreWholeRunsOf128Tokens) {
    struct Row {
        std::uint64_t blocks, block_size, kernel, width;
    };
    for (const Row& given : {Row{295, 32, 32, 296}, Row{3, 48, 48, 8}, Row{3, 96, 32, 12},
                             Row{3, 160, 32, 20}, Row{1, 256, 64, 4}}) {
        std::uint64_t width = 0;
        must(kvpages_table_row_width(given.blocks, given.block_size, given.kernel, &width));
        EXPECT_EQ(width, given.width);
        kvpages_tables_config made = config(1, 1);
        made.flags = KVPAGES_TABLES_ALIGNED_ROWS;
        const Handle of = tables({group(given.block_size, given.kernel, given.blocks)}, made);
        EXPECT_EQ(static_cast<std::uint64_t>(tensor(of, kvpages_tables_get_table).shape[1]),
                  given.width);
    }
}

TEST(Table, T08_UnequalLayersOfAGroupShareTheirTokensToo) {
    const support::Model model = support::model();
    const support::Backend backend = support::backend(support::packed_nhd);
    support::add(model, "a", support::full(4, 2, 8), backend);
    support::add(model, "b", support::full(4, 2, 16), backend);
    kvpages_plan_config planned = support::plan_config(64);
    planned.context_parallel_size = 2;
    const support::Plan plan = support::plan({{model.get(), 1 << 20}}, planned);
    ASSERT_EQ(support::worker_info(plan).num_groups, 1u);
    EXPECT_EQ(support::group_info(plan, 0).is_set, 1u);
    EXPECT_EQ(support::group_info(plan, 0).table_width_blocks, 8u);
    kvpages_tables_config made = config(1, 64, 0);
    made.context_parallel_rank = 1;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(plan.get(), 0, &made, &raw));
    const Handle of(raw);
    EXPECT_EQ(tensor(of, kvpages_tables_get_table).shape[1], 8);
    // They hold the longest sequence.
    append(of, 0, 0, {1, 2, 3, 4, 5, 6, 7, 8});
    apply(of);
    map(of, 0, up_to(64));
    EXPECT_EQ(slots(of)[62], -1);
    EXPECT_EQ(slots(of)[63], 8 * 4 + 3);
}

TEST(Table, T09_DummiesAreNullWhereTheRealStepWas) {
    const Handle of = tables({group(16, 16, 3)}, config(2, 4));
    append(of, 0, 0, {1, 2});
    apply(of);
    gather(of, {0}, 1);
    EXPECT_EQ(input_row(of, 0), (Ids{1, 2, 0}));
    const std::vector<const void*> before = addresses(of);
    must(kvpages_tables_gather_dummies(of.get(), 1, nullptr));
    EXPECT_EQ(input_row(of, 0), (Ids{0, 0, 0}));
    EXPECT_EQ(addresses(of), before);
    EXPECT_EQ(table_row(of, 0), (Ids{1, 2, 0})) << "the request's own row stays";
}

TEST(Table, T11_PaddingRowsAreNull) {
    const Handle of = tables({group(16, 16, 3)}, config(3, 4));
    for (std::size_t request = 0; request < 3; ++request) append(of, request, 0, {1, 2, 3});
    apply(of);
    gather(of, {0, 1, 2}, 3);
    gather(of, {2}, 3);
    EXPECT_EQ(input_row(of, 0), (Ids{1, 2, 3}));
    EXPECT_EQ(input_row(of, 1), (Ids{0, 0, 0}));
    EXPECT_EQ(input_row(of, 2), (Ids{0, 0, 0}));
}

TEST(Table, T12_SlotsArePadsToTheEnd) {
    const Handle of = tables({group(16, 16, 1)}, config(1, 8));
    append(of, 0, 0, {2});
    apply(of);
    map(of, 0, up_to(8));
    EXPECT_EQ(slots(of), (Slots{32, 33, 34, 35, 36, 37, 38, 39}));
    // Three real tokens; the positions behind them are padding of the engine's.
    const std::int32_t request = 0;
    const std::int32_t query_start[]{0, 3};
    const Slots positions{8, 9, 10, 0, 0, 0, 0, 0};
    must(kvpages_tables_map_slots(of.get(), &request, 1, query_start, positions.data(),
                                  positions.size(), nullptr));
    EXPECT_EQ(slots(of), (Slots{40, 41, 42, -1, -1, -1, -1, -1}));
}

TEST(Table, T13_APadSlotIsNeverWritten) {
    const OneLayer world;
    const support::Cache cache = support::cache(world.plan);
    kvpages_tables_config made = config(1, 2, 0);
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(world.plan.get(), 0, &made, &raw));
    const Handle of(raw);
    append(of, 0, 0, {1});
    apply(of);
    map(of, 0, {0, 16});
    EXPECT_EQ(slots(of), (Slots{16, -1}));
    unsigned char* bytes = fill(cache, 7);
    write(cache, slots(of));
    std::vector<unsigned char> wanted(OneLayer::bytes, 7);
    std::fill_n(wanted.begin() + 16 * OneLayer::token_bytes, OneLayer::token_bytes, kWritten);
    EXPECT_EQ(std::vector<unsigned char>(bytes, bytes + OneLayer::bytes), wanted)
        << "slot 63, the last, is what -1 counts to from the end";
}

TEST(Table, T15_ADummyHasNoSlots) {
    const Handle of = tables({group(4, 4, 2)}, config(1, 3));
    append(of, 0, 0, {7, 8});
    apply(of);
    map(of, -1, {1, 2, 3});
    EXPECT_EQ(slots(of), (Slots{-1, -1, -1}));
    map(of, 0, {1, 2, 3});
    EXPECT_EQ(slots(of), (Slots{29, 30, 31}));
}

TEST(Table, T18_BlocksAreStoredAsKernelBlocks) {
    const Handle of = tables({group(48, 16, 3)}, config(1, 1));
    append(of, 0, 0, {2, 0});
    apply(of);
    EXPECT_EQ(table_row(of, 0), (Ids{6, 7, 8, 0, 1, 2, 0, 0, 0}));
    append(of, 0, 0, {5});
    apply(of);
    EXPECT_EQ(table_row(of, 0), (Ids{6, 7, 8, 0, 1, 2, 15, 16, 17}));
    std::size_t entries = 0;
    must(kvpages_tables_num_entries(of.get(), 0, 0, &entries));
    EXPECT_EQ(entries, 9u);
}

// The tables hold no address of a cache, so what a new mapping asks of them is to be empty, in
// place, with their sizes as they were. What holds addresses is made again: the next test.
TEST(Table, T19_AResetEmptiesInPlace) {
    const Handle of = tables({group(48, 16, 2), group(16, 16, 3)}, config(2, 4));
    for (std::size_t i = 0; i < 2; ++i) {
        append(of, 1, i, {3, 4});
    }
    apply(of);
    gather(of, {1, 1}, 2);
    map(of, 1, {0, 1, 2, 3});
    append(of, 0, 1, {9});
    const std::vector<const void*> before = addresses(of);
    // Whatever a lost mapping has left there.
    const kvpages_tensor lost = tensor(of, kvpages_tables_get_table);
    for (std::int64_t i = 0; i < lost.shape[0] * lost.shape[1]; ++i) {
        static_cast<std::int32_t*>(lost.data)[i] = 0x55555555;
    }
    must(kvpages_tables_reset(of.get(), nullptr));
    apply(of);
    EXPECT_EQ(addresses(of), before);
    for (std::size_t i = 0; i < 2; ++i) {
        const Ids null(i == 0 ? 6 : 3, 0);
        for (std::int64_t request = 0; request < 2; ++request) {
            EXPECT_EQ(table_row(of, request, i), null);
            EXPECT_EQ(input_row(of, request, i), null);
        }
        EXPECT_EQ(slots(of, i), (Slots{-1, -1, -1, -1}));
        kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
        must(kvpages_tables_get_info(of.get(), i, &info));
        EXPECT_EQ(info.block_size, i == 0 ? 48u : 16u);
    }
    append(of, 1, 0, {1});
    apply(of);
    EXPECT_EQ(table_row(of, 1), (Ids{3, 4, 5, 0, 0, 0}));
}

// A pool that is released and mapped again elsewhere: tables stay, and lead to the new pool.
TEST(Table, T19_TablesOutliveTheMemoryOfTheirCache) {
    const OneLayer world;
    kvpages_tables_config made = config(1, 4, 0);
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(world.plan.get(), 0, &made, &raw));
    const Handle of(raw);
    const auto sizes = [&of] {
        kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
        must(kvpages_tables_get_info(of.get(), 0, &info));
        std::vector<std::uint64_t> all{info.block_size, info.kernel_block_size, info.row_blocks,
                                       info.row_width};
        for (const Get get : {Get{kvpages_tables_get_table}, Get{kvpages_tables_get_input_table},
                              Get{kvpages_tables_get_slots}}) {
            const kvpages_tensor found = tensor(of, get);
            for (std::uint32_t i = 0; i < found.ndim; ++i) {
                all.push_back(static_cast<std::uint64_t>(found.shape[i]));
                all.push_back(static_cast<std::uint64_t>(found.strides[i]));
            }
        }
        return all;
    };
    struct alignas(256) Buffer {
        unsigned char bytes[OneLayer::bytes];
    };
    const auto pools = std::make_unique<Buffer[]>(2);
    const auto mapped = [&](std::size_t pool) {
        return support::cache(world.plan, support::adopted_memory(pools[pool].bytes,
                                                                  OneLayer::bytes));
    };
    const std::vector<const void*> before = addresses(of);
    const std::vector<std::uint64_t> before_sizes = sizes();
    std::vector<std::int64_t> strides;
    {
        const support::Cache cache = mapped(0);
        EXPECT_EQ(support::view(cache, 0).data, pools[0].bytes);
        const kvpages_tensor view = support::view(cache, 0);
        strides.assign(view.strides, view.strides + view.ndim);
        append(of, 0, 0, {2});
        apply(of);
        gather(of, {0}, 1);
        map(of, 0, {5});
        write(cache, slots(of));
    }
    const support::Cache cache = mapped(1);
    fill(cache, 0);
    must(kvpages_tables_reset(of.get(), nullptr));
    const kvpages_tensor view = support::view(cache, 0);
    EXPECT_EQ(view.data, pools[1].bytes);
    EXPECT_EQ(std::vector<std::int64_t>(view.strides, view.strides + view.ndim), strides);
    EXPECT_EQ(addresses(of), before);
    EXPECT_EQ(sizes(), before_sizes);
    EXPECT_EQ(table_row(of, 0), (Ids{0}));
    EXPECT_EQ(input_row(of, 0), (Ids{0}));
    EXPECT_EQ(slots(of), (Slots{-1, -1, -1, -1}));
    const std::vector<unsigned char> old(pools[0].bytes, pools[0].bytes + OneLayer::bytes);
    write(cache, slots(of));
    append(of, 0, 0, {3});
    apply(of);
    map(of, 0, {15});
    write(cache, slots(of));
    std::vector<unsigned char> wanted(OneLayer::bytes, 0);
    std::fill_n(wanted.end() - OneLayer::token_bytes, OneLayer::token_bytes, kWritten);
    EXPECT_EQ(std::vector<unsigned char>(pools[1].bytes, pools[1].bytes + OneLayer::bytes), wanted);
    EXPECT_EQ(std::vector<unsigned char>(pools[0].bytes, pools[0].bytes + OneLayer::bytes), old);
}

// --- rows ----------------------------------------------------------------------------------------

TEST(Tables, RowsAreCutMovedSwappedAndCleared) {
    const Handle of = tables({group(32, 16, 3)}, config(3, 4));
    append(of, 0, 0, {1, 2, 3});
    append(of, 1, 0, {4});
    must(kvpages_tables_truncate(of.get(), 0, 0, 2));
    apply(of);
    EXPECT_EQ(table_row(of, 0), (Ids{2, 3, 4, 5, 0, 0}));
    must(kvpages_tables_swap(of.get(), 0, 1));
    must(kvpages_tables_move(of.get(), 0, 2));
    EXPECT_EQ(table_row(of, 0), (Ids{2, 3, 4, 5, 0, 0})) << "only staged";
    apply(of);
    EXPECT_EQ(table_row(of, 0), (Ids{0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(table_row(of, 1), (Ids{2, 3, 4, 5, 0, 0}));
    EXPECT_EQ(table_row(of, 2), (Ids{8, 9, 0, 0, 0, 0}));
    const Ids shorter{6};
    must(kvpages_tables_overwrite(of.get(), 1, 0, shorter.data(), shorter.size()));
    must(kvpages_tables_clear(of.get(), 2));
    apply(of);
    EXPECT_EQ(table_row(of, 1), (Ids{12, 13, 0, 0, 0, 0}));
    EXPECT_EQ(table_row(of, 2), (Ids{0, 0, 0, 0, 0, 0}));
}

TEST(Tables, StateIsNotSharedOut) {
    kvpages_tables_config made = config(1, 8);
    made.context_parallel_size = 2;
    made.context_parallel_interleave = 4;
    const Handle of = tables({group(4, 4, 2), group(4, 4, 2, 1)}, made);
    for (std::size_t i = 0; i < 2; ++i) append(of, 0, i, {1, 2});
    apply(of);
    map(of, 0, up_to(8));
    EXPECT_EQ(slots(of, 0), (Slots{4, 5, 6, 7, -1, -1, -1, -1}));
    EXPECT_EQ(slots(of, 1), (Slots{4, 5, 6, 7, 8, 9, 10, 11}));
}

// Two groups of an engine's own plan, which does not know how long requests get.
TEST(Tables, OfAPlanFromPartsAreAsLongAsTheEngineSays) {
    const support::Model model = support::model();
    const support::Backend backend = support::backend(support::packed_nhd);
    support::add(model, "a", support::full(16, 1, 8, KVPAGES_DTYPE_U8), backend);
    support::add(model, "b", support::full(32, 1, 8, KVPAGES_DTYPE_U8), backend);
    support::Parts parts;
    parts.num_blocks = 8;
    parts.groups = {{{"a"}}, {{"b"}}};
    parts.tensors = {{8 * 256, {"a"}}, {8 * 512, {"b"}}};
    parts.kernel_block_sizes = {8, 32};
    const support::Plan plan = support::plan_from(model, parts);
    kvpages_tables_config made = config(1, 100, 0);
    kvpages_tables* raw = nullptr;
    const auto create = [&] {
        raw = reinterpret_cast<kvpages_tables*>(&raw);
        return kvpages_tables_create_for_plan(plan.get(), 0, &made, &raw);
    };
    EXPECT_TRUE(fails(create(), KVPAGES_STATUS_INVALID_ARGUMENT, "max_model_len_unknown",
                      {"max_model_len"}));
    EXPECT_EQ(raw, nullptr);
    made.max_model_len = 100;
    must(create());
    {
        const Handle of(raw);
        EXPECT_EQ(table_row(of, 0, 0).size(), 14u) << "7 blocks of 2 kernel blocks";
        EXPECT_EQ(table_row(of, 0, 1).size(), 4u);
        append(of, 0, 0, {1, 2, 3, 4, 5, 6, 7});
        append(of, 0, 1, {1, 2, 3, 4});
        apply(of);
        map(of, 0, up_to(100));
        EXPECT_EQ(slots(of, 0)[99], 7 * 16 + 3);
        EXPECT_EQ(slots(of, 1)[99], 4 * 32 + 3);
        const Ids past{8};
        EXPECT_TRUE(fails(kvpages_tables_overwrite(of.get(), 0, 0, past.data(), 1),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range", {"8"}));
    }
    // Two ranks share the tokens.
    made.context_parallel_size = 2;
    made.context_parallel_rank = 1;
    must(create());
    {
        const Handle of(raw);
        EXPECT_EQ(table_row(of, 0, 0).size(), 8u);
        EXPECT_EQ(table_row(of, 0, 1).size(), 2u);
        append(of, 0, 0, {1, 2, 3, 4});
        apply(of);
        map(of, 0, up_to(100));
        EXPECT_EQ(slots(of, 0)[98], -1);
        EXPECT_EQ(slots(of, 0)[99], 4 * 16 + 1);
    }
    made.max_model_len = std::numeric_limits<std::uint64_t>::max();
    EXPECT_TRUE(fails(create(), KVPAGES_STATUS_INVALID_ARGUMENT, "overflow"));
    // The C++ interface has it too.
    kvpages::TablesConfig wrapped;
    wrapped.max_model_len = 33;
    EXPECT_EQ(wrapped.c_config().max_model_len, 33u);
}

// The views of compressed layers are not split into kernel blocks, so their rows are not either.
TEST(Tables, OfCompressedLayersSayBlocks) {
    const support::Model model = support::model();
    kvpages_spec spec = support::mla(256, 64, KVPAGES_DTYPE_F32);
    spec.compress_ratio = 4;
    support::add(model, "a", spec, support::backend_of_sizes(support::latent, {64}));
    support::Parts parts;
    parts.num_blocks = 62;
    parts.groups = {{{"a"}}};
    parts.tensors = {{62 * 64 * 64 * 4, {"a"}}};
    const support::Plan plan = support::plan_from(model, parts);
    const support::Cache cache = support::cache(plan);
    kvpages_tables_config made = config(1, 256, 0);
    made.max_model_len = 256;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(plan.get(), 0, &made, &raw));
    const Handle of(raw);
    append(of, 0, 0, {61});
    apply(of);
    EXPECT_EQ(table_row(of, 0), Ids{61});
    map(of, 0, up_to(256));
    // A stored row stands for four tokens.
    const std::int64_t slot = slots(of)[200] / 4;
    const kvpages_tensor view = support::view(cache, 0);
    EXPECT_EQ(slot / view.shape[1], 61);
    EXPECT_EQ(slot % view.shape[1], 50);
    EXPECT_EQ(view.shape[0], 62);
}

TEST(Tables, RowsOfUnequalStatesHoldAllTheirStates) {
    for (const std::uint32_t mode : {KVPAGES_STATE_CACHE_MODE_NONE, KVPAGES_STATE_CACHE_MODE_ALIGN,
                                     KVPAGES_STATE_CACHE_MODE_ALL}) {
        const support::Model model = support::model();
        support::State small, large;
        small.add(KVPAGES_DTYPE_F32, {8}).block(64);
        large.add(KVPAGES_DTYPE_F32, {16}).block(64);
        for (const support::State* state : {&small, &large}) {
            kvpages_spec spec = state->spec();
            spec.num_speculative_blocks = 2;
            support::add(model, state == &small ? "small" : "large", spec,
                         support::state_backend());
        }
        for (const std::uint64_t length : {64u, 1000u}) {
            kvpages_plan_config planned = support::plan_config(length);
            planned.state_cache_mode = mode;
            const support::Plan plan = support::plan({{model.get(), 1 << 20}}, planned);
            ASSERT_EQ(support::worker_info(plan).num_groups, 1u);
            const kvpages_group_info info = support::group_info(plan, 0);
            EXPECT_EQ(info.is_set, 1u);
            EXPECT_GE(info.table_width_blocks, info.blocks_per_request);
            EXPECT_GE(info.table_width_blocks, mode == KVPAGES_STATE_CACHE_MODE_NONE
                                                   ? 3
                                                   : (length + 63) / 64 + 2);
            kvpages_tables_config made = config(1, 1, 0);
            kvpages_tables* raw = nullptr;
            must(kvpages_tables_create_for_plan(plan.get(), 0, &made, &raw));
            const Handle of(raw);
            append(of, 0, 0, Ids(info.blocks_per_request, 1));
        }
    }
}

TEST(Tables, AreThoseOfAPlan) {
    support::World world;
    kvpages_tables_config made = config(2, 8, 0);
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(world.planned.get(), 0, &made, &raw));
    const Handle of(raw);
    ASSERT_EQ(kvpages_tables_num_groups(of.get()), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
        kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
        must(kvpages_tables_get_info(of.get(), i, &info));
        const kvpages_group_info planned = support::group_info(world.planned, i);
        EXPECT_EQ(info.block_size, planned.block_size);
        EXPECT_EQ(info.kernel_block_size, planned.kernel_block_size);
        EXPECT_EQ(info.row_blocks, planned.table_width_blocks);
        EXPECT_EQ(info.is_replicated, 0u);
    }
    const Ids past{48};
    EXPECT_TRUE(fails(kvpages_tables_append(of.get(), 0, 0, past.data(), 1),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range",
                      {"request 0", "group 0", "48"}));

    const auto refused = [&](const kvpages_tables_config& given, std::size_t worker = 0) {
        raw = of.get();
        const std::int32_t status =
            kvpages_tables_create_for_plan(world.planned.get(), worker, &given, &raw);
        EXPECT_EQ(raw, nullptr);
        return status;
    };
    made.num_blocks = 49;
    EXPECT_TRUE(fails(refused(made), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"49", "48"}));
    made.num_blocks = 48;
    made.context_parallel_size = 2;
    EXPECT_TRUE(fails(refused(made), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"2", "1"}));
    made.context_parallel_size = 1;
    made.max_model_len = 65;
    EXPECT_TRUE(fails(refused(made), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values",
                      {"max_model_len", "65", "64"}));
    made.max_model_len = 64;
    EXPECT_TRUE(fails(refused(made, 1), KVPAGES_STATUS_NOT_FOUND, "not_found"));
    made.num_groups = 1;
    EXPECT_TRUE(fails(refused(made), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values"));
}

TEST(Tables, StateGroupsOfAPlanAreReplicated) {
    const support::Model model = support::model();
    support::State state;
    state.add(KVPAGES_DTYPE_F32, {4, 4}).block(16).padded(1024);
    const support::Backend backend = support::backend(support::packed_nhd);
    support::add(model, "a", support::full(16, 2, 8), backend);
    support::add(model, "s", state.spec(), support::state_backend());
    const support::Plan plan = support::plan({{model.get(), 1 << 20}}, support::plan_config(64));
    kvpages_tables_config made = config(1, 1, 0);
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create_for_plan(plan.get(), 0, &made, &raw));
    const Handle of(raw);
    ASSERT_EQ(kvpages_tables_num_groups(of.get()), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
        kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
        must(kvpages_tables_get_info(of.get(), i, &info));
        const bool is_state = support::group_layers(plan, i).front() == "s";
        EXPECT_EQ(info.is_replicated, is_state ? 1u : 0u);
    }
}

TEST(Tables, InCpp) {
    kvpages::TablesConfig made;
    made.max_requests = 2;
    made.max_tokens = 4;
    made.num_blocks = 16;
    auto of = kvpages::Tables::make({group(32, 16, 2)}, made);
    const Ids ids{3, 1};
    of.append(0, 0, {ids.data(), ids.size()});
    of.apply();
    of.move(0, 1);
    of.swap(0, 1);
    of.truncate(0, 0, 1);
    EXPECT_EQ(of.num_entries(0, 0), 2u);
    of.apply();
    const Ids batch{0, -1};
    of.gather({batch.data(), batch.size()}, 2);
    EXPECT_EQ(row(of.input_table(0).c_tensor(), 0), (Ids{6, 7, 0, 0}));
    const std::int32_t query_start[]{0, 2, 3};
    const Slots positions{0, 17, 0};
    const void* before = of.slots(0).data;
    kvpages::Tables moved = std::move(of);
    moved.map_slots({batch.data(), batch.size()}, query_start, {positions.data(), 3});
    const auto* found = static_cast<const std::int64_t*>(moved.slots(0).data);
    EXPECT_EQ(found, before);
    EXPECT_EQ(Slots(found, found + 4), (Slots{96, 113, -1, -1}));
    moved.overwrite(0, 0, {ids.data(), 1});
    moved.clear(0);
    moved.gather_dummies(2);
    moved.map_dummies();
    moved.reset();
    EXPECT_EQ(moved.num_groups(), 1u);
    EXPECT_EQ(moved.info(0).row_width, 4u);
    EXPECT_EQ(row(moved.table(0).c_tensor(), 0), (Ids{0, 0, 0, 0}));
    EXPECT_EQ(kvpages::Tables::row_width(3, 48), 8u);
    EXPECT_THROW(moved.append(2, 0, {ids.data(), 1}), kvpages::Error);
    EXPECT_THROW(moved.map_slots(batch, batch, positions), kvpages::Error);
}

// --- a step in one call --------------------------------------------------------------------------

namespace {

struct Step {
    Ids requests{1, -1, 0}, query_start{0, 3, 3, 4}, seq_lens{20, 0, 1};
    Slots positions{17, 18, 19, 0};

    kvpages_batch c_batch() const {
        kvpages_batch batch = KVPAGES_BATCH_INIT;
        batch.requests = requests.data();
        batch.num_requests = requests.size();
        batch.query_start = query_start.data();
        batch.seq_lens = seq_lens.data();
        batch.positions = positions.data();
        batch.num_positions = positions.size();
        return batch;
    }
};

kvpages::Tables two_groups() {
    kvpages::TablesConfig made;
    made.max_requests = 3;
    made.max_tokens = 8;
    made.num_blocks = 16;
    auto of = kvpages::Tables::make({group(16, 16, 2), group(32, 16, 1)}, made);
    const Ids first{5, 6}, second{7};
    of.append(1, 0, first);
    of.append(1, 1, second);
    return of;
}

}  // namespace

TEST(TablesPrepare, DoesWhatApplyGatherAndMapSlotsDo) {
    const Step step;
    kvpages::Tables one = two_groups(), other = two_groups();
    const kvpages_step prepared =
        one.prepare({step.requests, step.query_start, step.seq_lens, step.positions});
    other.apply();
    other.gather(step.requests, step.requests.size());
    other.map_slots(step.requests, step.query_start, step.positions);
    for (std::size_t of_group = 0; of_group < 2; ++of_group) {
        for (std::int64_t number = 0; number < 3; ++number) {
            EXPECT_EQ(row(one.input_table(of_group).c_tensor(), number),
                      row(other.input_table(of_group).c_tensor(), number));
        }
        const auto* a = static_cast<const std::int64_t*>(one.slots(of_group).data);
        const auto* b = static_cast<const std::int64_t*>(other.slots(of_group).data);
        EXPECT_EQ(Slots(a, a + 8), Slots(b, b + 8));
        EXPECT_EQ(prepared.block_tables[of_group].data, one.input_table(of_group).data);
        EXPECT_EQ(prepared.slot_mappings[of_group].data, one.slots(of_group).data);
        EXPECT_EQ(prepared.slot_mappings[of_group].ndim, 1u);
    }
    EXPECT_EQ(prepared.num_requests, 3u);
    EXPECT_EQ(prepared.num_tokens, 4u);
    EXPECT_EQ(prepared.max_query_len, 3u);
    EXPECT_EQ(prepared.max_seq_len, 20u);
    EXPECT_EQ(prepared.query_start_host, step.query_start.data());
    EXPECT_EQ(prepared.seq_lens, step.seq_lens.data());
    EXPECT_EQ(prepared.positions, step.positions.data());
    EXPECT_EQ(prepared.num_cache_groups, 2u);
    EXPECT_EQ(prepared.causality, static_cast<std::uint32_t>(KVPAGES_CAUSALITY_CAUSAL));
}

TEST(TablesPrepare, RefusesAndChangesNothing) {
    kvpages::Tables of = two_groups();
    kvpages_step step = KVPAGES_STEP_INIT;
    const auto refused = [&](const kvpages_batch& batch, const char* kind) {
        step.num_tokens = 99;
        EXPECT_NE(kvpages_tables_prepare(of.get(), &batch, &step), KVPAGES_STATUS_OK);
        EXPECT_STREQ(kvpages_last_error_kind(), kind) << kvpages_last_error_message();
        EXPECT_EQ(step.num_tokens, 0u);
        EXPECT_EQ(step.block_tables, nullptr);
        EXPECT_EQ(row(of.table(0).c_tensor(), 1), (Ids{0, 0}));
        EXPECT_EQ(row(of.input_table(0).c_tensor(), 0), (Ids{0, 0}));
    };
    Step wrong;
    wrong.requests[0] = 3;
    refused(wrong.c_batch(), "unknown_request");
    wrong = {};
    wrong.seq_lens[0] = 2;
    refused(wrong.c_batch(), "seq_len_too_small");
    EXPECT_NE(std::string(kvpages_last_error_message()).find("seq_lens[0] is 2"),
              std::string::npos);
    wrong = {};
    wrong.query_start[3] = 5;
    refused(wrong.c_batch(), "boundaries_not_ascending");
    wrong = {};
    wrong.positions.resize(9);
    wrong.seq_lens[2] = 6;
    wrong.query_start[3] = 9;
    refused(wrong.c_batch(), "batch_out_of_range");
    for (int field = 0; field < 4; ++field) {
        const Step good;
        kvpages_batch batch = good.c_batch();
        if (field == 0) batch.requests = nullptr;
        if (field == 1) batch.query_start = nullptr;
        if (field == 2) batch.seq_lens = nullptr;
        if (field == 3) batch.positions = nullptr;
        refused(batch, "null_argument");
    }
    const kvpages_batch good = Step().c_batch();
    EXPECT_EQ(kvpages_tables_prepare(of.get(), nullptr, &step), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_tables_prepare(nullptr, &good, &step), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_tables_prepare(of.get(), &good, nullptr), KVPAGES_STATUS_NULL_ARGUMENT);
    step.struct_size = 8;
    EXPECT_EQ(kvpages_tables_prepare(of.get(), &good, &step), KVPAGES_STATUS_INVALID_ARGUMENT);
}

TEST(TablesPrepare, ChecksLengthsThatCannotBeSeenInC) {
    kvpages::Tables of = two_groups();
    Step step;
    step.seq_lens.pop_back();
    try {
        of.prepare({step.requests, step.query_start, step.seq_lens, step.positions});
        FAIL();
    } catch (const kvpages::Error& error) {
        EXPECT_STREQ(error.what(), "seq_lens has 2 entries, 3 are needed");
        EXPECT_EQ(error.kind(), "per_group_array_length");
        EXPECT_EQ(error.status(), KVPAGES_STATUS_INVALID_ARGUMENT);
    }
}

// --- hostile use ---------------------------------------------------------------------------------

namespace {

constexpr std::int32_t kInvalid = KVPAGES_STATUS_INVALID_ARGUMENT;
constexpr std::int32_t kNull = KVPAGES_STATUS_NULL_ARGUMENT;
constexpr std::int32_t kNotFound = KVPAGES_STATUS_NOT_FOUND;

// Tables in use, which no refused call may change.
struct Used {
    Handle of = tables({group(16, 16, 3), group(32, 16, 2)}, config(2, 4, 8));
    kvpages_tables* raw = of.get();
    std::vector<const void*> before;

    Used() {
        for (std::size_t i = 0; i < 2; ++i) append(of, 1, i, {5});
        apply(of);
        gather(of, {1}, 2);
        map(of, 1, {1, 2});
        before = addresses(of);
    }
    Used(const Used&) = delete;
    Used& operator=(const Used&) = delete;
    ~Used() {
        must(kvpages_tables_apply(raw, nullptr));
        EXPECT_EQ(addresses(of), before);
        EXPECT_EQ(table_row(of, 0), (Ids{0, 0, 0}));
        EXPECT_EQ(table_row(of, 1), (Ids{5, 0, 0}));
        EXPECT_EQ(table_row(of, 1, 1), (Ids{10, 11, 0, 0}));
        EXPECT_EQ(input_row(of, 0), (Ids{5, 0, 0}));
        EXPECT_EQ(input_row(of, 1), (Ids{0, 0, 0}));
        EXPECT_EQ(slots(of), (Slots{81, 82, -1, -1}));
    }
};

}  // namespace

TEST(TablesHostile, Sizes) {
    kvpages_tables* raw = nullptr;
    const auto refused = [&raw](const std::vector<kvpages_table_group>& groups,
                                const kvpages_tables_config& given) {
        raw = reinterpret_cast<kvpages_tables*>(&raw);
        const std::int32_t status = try_tables(groups, given, &raw);
        EXPECT_EQ(raw, nullptr);
        return status;
    };
    constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
    const auto good = config(2, 4);
    EXPECT_TRUE(fails(refused({group(0, 0, 1)}, good), kInvalid, "bad_values", {"group 0"}));
    EXPECT_TRUE(fails(refused({group(16, 16, 1), group(16, 5, 1)}, good), kInvalid,
                      "kernel_block_not_dividing", {"group 1", "16", "5"}));
    EXPECT_TRUE(fails(refused({group(16, 16, kHuge)}, good), kInvalid, "overflow"));
    EXPECT_TRUE(fails(refused({group(kHuge, 1, 1)}, good), kInvalid, "overflow"));
    EXPECT_TRUE(fails(refused({group(16, 16, 1, 2)}, good), kInvalid, "unknown_value"));
    EXPECT_TRUE(fails(refused({}, config(0, 4)), kInvalid, "bad_values", {"max_requests"}));
    EXPECT_TRUE(fails(refused({}, config(2, 0)), kInvalid, "bad_values", {"max_tokens"}));
    EXPECT_TRUE(fails(refused({}, config(kHuge, 4)), kInvalid, "overflow"));
    EXPECT_TRUE(fails(refused({}, config(2, kHuge)), kInvalid, "overflow"));
    EXPECT_TRUE(fails(refused({group(64, 16, 1)}, config(2, 4, 1u << 30)), kInvalid, "overflow"));
    EXPECT_TRUE(fails(refused({group(1, 1, 1u << 24)}, config(0x7FFFFFFF, 4)),
                      KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "out_of_host_memory"));
    auto given = config(2, 4);
    given.context_parallel_rank = 1;
    EXPECT_TRUE(fails(refused({group(16, 16, 1)}, given), kInvalid, "cp_rank_out_of_range"));
    given.context_parallel_size = 3;
    given.context_parallel_interleave = 5;
    EXPECT_TRUE(fails(refused({group(16, 16, 1)}, given), kInvalid, "cp_interleave_not_dividing",
                      {"16", "5"}));
    given.context_parallel_size = kHuge;
    EXPECT_TRUE(fails(refused({group(16, 16, 1)}, given), kInvalid, "cp_interleave_not_dividing"));
    given.context_parallel_interleave = 1;
    EXPECT_TRUE(fails(refused({group(16, 16, 1)}, given), kInvalid, "overflow"));
    given = config(2, 4);
    given.flags = 2;
    EXPECT_TRUE(fails(refused({}, given), kInvalid, "unknown_value"));
    given = config(2, 4);
    given.reserved0 = 1;
    EXPECT_TRUE(fails(refused({}, given), kInvalid, "unknown_value"));
    for (const std::size_t size : {std::size_t{0}, std::size_t{87}, std::size_t{5000}}) {
        given = config(2, 4);
        given.struct_size = size;
        EXPECT_TRUE(fails(refused({}, given), kInvalid, "struct_size"));
    }
    given = config(2, 4);
    given.num_groups = 1;
    EXPECT_TRUE(fails(kvpages_tables_create(&given, &raw), kNull, "null_argument", {"groups"}));
    EXPECT_TRUE(fails(kvpages_tables_create(nullptr, &raw), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_create(&given, nullptr), kNull, "null_argument", {"out"}));
    EXPECT_TRUE(fails(kvpages_tables_create_for_plan(nullptr, 0, &given, &raw), kNull,
                      "null_argument", {"plan"}));
    std::uint64_t width = 7;
    EXPECT_TRUE(fails(kvpages_table_row_width(kHuge, 16, 16, &width), kInvalid, "overflow"));
    EXPECT_EQ(width, 0u);
    EXPECT_TRUE(fails(kvpages_table_row_width(1, 0, 0, &width), kInvalid, "bad_values"));
    EXPECT_TRUE(fails(kvpages_table_row_width(1, 16, 16, nullptr), kNull, "null_argument"));
    // A model without caches has no tables, and that is fine.
    must(try_tables({}, config(2, 4), &raw));
    const Handle none(raw);
    EXPECT_EQ(kvpages_tables_num_groups(none.get()), 0u);
    gather(none, {1}, 2);
    apply(none);
}

TEST(TablesHostile, Nulls) {
    const std::int32_t id = 1;
    const std::int32_t starts[]{0, 0};
    kvpages_tensor made{};
    kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
    kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
    std::size_t count = 0;
    const std::vector<std::function<std::int32_t(kvpages_tables*)>> calls{
        [&](kvpages_tables* t) { return kvpages_tables_get_info(t, 0, &info); },
        [&](kvpages_tables* t) { return kvpages_tables_get_table(t, 0, &made); },
        [&](kvpages_tables* t) { return kvpages_tables_get_input_table(t, 0, &made); },
        [&](kvpages_tables* t) { return kvpages_tables_get_slots(t, 0, &made); },
        [&](kvpages_tables* t) { return kvpages_tables_num_entries(t, 0, 0, &count); },
        [&](kvpages_tables* t) { return kvpages_tables_append(t, 0, 0, &id, 1); },
        [&](kvpages_tables* t) { return kvpages_tables_overwrite(t, 0, 0, &id, 1); },
        [&](kvpages_tables* t) { return kvpages_tables_write(t, &writes); },
        [&](kvpages_tables* t) { return kvpages_tables_truncate(t, 0, 0, 0); },
        [&](kvpages_tables* t) { return kvpages_tables_move(t, 0, 1); },
        [&](kvpages_tables* t) { return kvpages_tables_swap(t, 0, 1); },
        [&](kvpages_tables* t) { return kvpages_tables_clear(t, 0); },
        [&](kvpages_tables* t) { return kvpages_tables_apply(t, nullptr); },
        [&](kvpages_tables* t) { return kvpages_tables_reset(t, nullptr); },
        [&](kvpages_tables* t) { return kvpages_tables_gather(t, &id, 1, 1, nullptr); },
        [&](kvpages_tables* t) { return kvpages_tables_gather_dummies(t, 1, nullptr); },
        [&](kvpages_tables* t) {
            return kvpages_tables_map_slots(t, &id, 1, starts, nullptr, 0, nullptr);
        },
        [&](kvpages_tables* t) { return kvpages_tables_map_dummies(t, nullptr); },
    };
    for (std::size_t i = 0; i < calls.size(); ++i) {
        EXPECT_TRUE(fails(calls[i](nullptr), kNull, "null_argument", {"tables"})) << i;
    }
    EXPECT_EQ(kvpages_tables_num_groups(nullptr), 0u);
    kvpages_tables_destroy(nullptr);

    const Used used;
    EXPECT_TRUE(fails(kvpages_tables_append(used.raw, 0, 0, nullptr, 1), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_write(used.raw, nullptr), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_write(used.raw, &writes), kNull, "null_argument", {"starts"}));
    writes.num_writes = 1;
    EXPECT_TRUE(fails(kvpages_tables_write(used.raw, &writes), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_gather(used.raw, nullptr, 1, 1, nullptr),
                      kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_map_slots(used.raw, &id, 1, nullptr, nullptr, 0, nullptr),
                      kNull,
                      "null_argument", {"query_start"}));
    EXPECT_TRUE(fails(kvpages_tables_map_slots(used.raw, &id, 1, starts, nullptr, 1, nullptr),
                      kNull,
                      "null_argument", {"positions"}));
    EXPECT_TRUE(fails(kvpages_tables_get_table(used.raw, 0, nullptr), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_get_info(used.raw, 0, nullptr), kNull, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_num_entries(used.raw, 0, 0, nullptr), kNull, "null_argument"));
}

TEST(TablesHostile, Writes) {
    const Used used;
    const auto append_ids = [&](std::size_t request, std::size_t of_group, const Ids& ids) {
        return kvpages_tables_append(used.raw, request, of_group, ids.data(), ids.size());
    };
    EXPECT_TRUE(fails(append_ids(1, 1, {1, 2}), kInvalid, "table_row_overflow",
                      {"request 1", "group 1", "1 blocks", "2 more", "its 2"}));
    EXPECT_TRUE(fails(append_ids(0, 0, {1, 2, 3, 4}), kInvalid, "table_row_overflow"));
    EXPECT_TRUE(fails(append_ids(0, 0, {1, 8}), kInvalid, "block_id_out_of_range", {"8", "0 to 8"}));
    EXPECT_TRUE(fails(append_ids(0, 0, {-1}), kInvalid, "block_id_out_of_range", {"-1"}));
    EXPECT_TRUE(fails(append_ids(0, 0, {INT32_MIN}), kInvalid, "block_id_out_of_range"));
    EXPECT_TRUE(fails(append_ids(2, 0, {1}), kNotFound, "unknown_request", {"request 2"}));
    EXPECT_TRUE(fails(append_ids(SIZE_MAX, 0, {1}), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(append_ids(0, 2, {1}), kNotFound, "unknown_group", {"group 2"}));
    EXPECT_TRUE(fails(append_ids(0, SIZE_MAX, {1}), kNotFound, "unknown_group"));
    const std::int32_t id = 1;
    EXPECT_TRUE(fails(kvpages_tables_append(used.raw, 0, 0, &id, SIZE_MAX), kInvalid, "overflow"));
    EXPECT_TRUE(fails(kvpages_tables_truncate(used.raw, 1, 0, 2), kInvalid, "table_row_too_short"));
    EXPECT_TRUE(fails(kvpages_tables_truncate(used.raw, 1, 2, 0), kNotFound, "unknown_group"));
    EXPECT_TRUE(fails(kvpages_tables_truncate(used.raw, 2, 0, 0), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(kvpages_tables_move(used.raw, 1, 2), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(kvpages_tables_move(used.raw, 2, 1), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(kvpages_tables_swap(used.raw, 1, 2), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(kvpages_tables_clear(used.raw, 2), kNotFound, "unknown_request"));
    must(kvpages_tables_move(used.raw, 1, 1));
    must(kvpages_tables_swap(used.raw, 1, 1));
    must(kvpages_tables_truncate(used.raw, 1, 0, 1));
    must(kvpages_tables_append(used.raw, 1, 0, nullptr, 0));
}

TEST(TablesHostile, BatchesOfWrites) {
    const Used used;
    const auto write = [&](const Ids& requests, const std::vector<std::size_t>& starts,
                           const Ids& ids) {
        kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
        writes.requests = requests.data();
        writes.num_writes = requests.size();
        writes.starts = starts.data();
        writes.block_ids = ids.data();
        writes.num_block_ids = ids.size();
        return kvpages_tables_write(used.raw, &writes);
    };
    // The first writes are good, the last is not: none of them is done.
    EXPECT_TRUE(fails(write({0, 0, 0}, {0, 1, 2, 3, 4, 4, 5}, {1, 2, 3, 4, 5}), kInvalid,
                      "table_row_overflow", {"request 0", "group 1"}));
    EXPECT_TRUE(fails(write({0, 1}, {0, 1, 1, 2, 2}, {1, 9}), kInvalid, "block_id_out_of_range"));
    EXPECT_TRUE(fails(write({0, 2}, {0, 0, 0, 0, 0}, {}), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(write({-1}, {0, 0, 0}, {}), kNotFound, "unknown_request", {"-1"}));
    EXPECT_TRUE(fails(write({0}, {0, 2, 1}, {1, 2}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(write({0}, {0, 1, 3}, {1, 2}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(write({0}, {1, 1, 2}, {1, 2}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(write({0}, {0, 1, SIZE_MAX}, {1, 2}), kInvalid, "boundaries_not_ascending"));
    kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
    writes.struct_size = 8;
    EXPECT_TRUE(fails(kvpages_tables_write(used.raw, &writes), kInvalid, "struct_size"));
    const std::size_t start = 0;
    const std::int32_t request = 0;
    writes = KVPAGES_ROW_WRITES_INIT;
    writes.requests = &request;
    writes.starts = &start;
    writes.num_writes = SIZE_MAX / 2;
    EXPECT_TRUE(fails(kvpages_tables_write(used.raw, &writes), kInvalid, "overflow"));
    writes.num_writes = 0;
    must(kvpages_tables_write(used.raw, &writes));
}

TEST(TablesHostile, Steps) {
    const Used used;
    const auto gather_ids = [&](const Ids& requests, std::size_t num_rows) {
        return kvpages_tables_gather(used.raw, requests.data(), requests.size(), num_rows, nullptr);
    };
    EXPECT_TRUE(fails(gather_ids({0, 1}, 1), kInvalid, "batch_out_of_range", {"2", "1"}));
    EXPECT_TRUE(fails(gather_ids({0}, 3), kInvalid, "batch_out_of_range", {"3", "2"}));
    EXPECT_TRUE(fails(gather_ids({2}, 2), kNotFound, "unknown_request", {"2"}));
    EXPECT_TRUE(fails(gather_ids({-2}, 2), kNotFound, "unknown_request", {"-2"}));
    EXPECT_TRUE(fails(kvpages_tables_gather_dummies(used.raw, SIZE_MAX, nullptr), kInvalid,
                      "batch_out_of_range"));
    const auto map_tokens = [&](const Ids& requests, const Ids& query_start,
                                const Slots& positions) {
        return kvpages_tables_map_slots(used.raw, requests.data(), requests.size(),
                                        query_start.data(), positions.data(), positions.size(),
                                        nullptr);
    };
    EXPECT_TRUE(fails(map_tokens({0, 1}, {0, 2, 1}, {0, 1}), kInvalid, "boundaries_not_ascending",
                      {"query_start[2]"}));
    EXPECT_TRUE(fails(map_tokens({0}, {1, 1}, {0}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(map_tokens({0}, {0, -1}, {0}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(map_tokens({0}, {0, 2}, {0}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(map_tokens({0}, {0, INT32_MAX}, {0}), kInvalid, "boundaries_not_ascending"));
    EXPECT_TRUE(fails(map_tokens({0}, {0, 5}, {0, 1, 2, 3, 4}), kInvalid, "batch_out_of_range",
                      {"5", "4"}));
    EXPECT_TRUE(fails(map_tokens({0, 0, 0}, {0, 0, 0, 0}, {}), kInvalid, "batch_out_of_range"));
    EXPECT_TRUE(fails(map_tokens({2}, {0, 1}, {0}), kNotFound, "unknown_request"));
    EXPECT_TRUE(fails(map_tokens({-2}, {0, 1}, {0}), kNotFound, "unknown_request"));
    kvpages_tensor made{};
    made.ndim = 9;
    EXPECT_TRUE(fails(kvpages_tables_get_table(used.raw, 2, &made), kNotFound, "unknown_group"));
    EXPECT_EQ(made.ndim, 0u);
    EXPECT_TRUE(fails(kvpages_tables_get_input_table(used.raw, 2, &made), kNotFound,
                      "unknown_group"));
    EXPECT_TRUE(fails(kvpages_tables_get_slots(used.raw, 2, &made), kNotFound, "unknown_group"));
    kvpages_table_info info = KVPAGES_TABLE_INFO_INIT;
    EXPECT_TRUE(fails(kvpages_tables_get_info(used.raw, 2, &info), kNotFound, "unknown_group"));
    std::size_t count = 9;
    EXPECT_TRUE(fails(kvpages_tables_num_entries(used.raw, 2, 0, &count), kNotFound,
                      "unknown_request"));
    EXPECT_EQ(count, 0u);
}

TEST(TablesHostile, Positions) {
    const Handle of = tables({group(16, 16, 2)}, config(1, 8));
    append(of, 0, 0, {5});
    apply(of);
    constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
    constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
    map(of, 0, {-1, kMin, kMax, std::int64_t{1} << 32, 16, 31, 15, kMin + 1});
    EXPECT_EQ(slots(of), (Slots{-1, -1, -1, -1, -1, -1, 95, -1}));
}
