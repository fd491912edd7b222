// Zero, copy, write and gather: every byte that a call may touch, and none besides.
#include "support/api.h"
#include "support/failure.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

using namespace support;

namespace {

using Bytes = std::vector<unsigned char>;
using Ids = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;

Ops ops(const Cache& cache, std::uint64_t max_block_ids = 0) {
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_block_ids = max_block_ids;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(cache.get(), &config, &raw));
    return Ops(raw);
}

std::int32_t zero(const Ops& ops, const Ids& ids, const kvpages_block_selection* chosen = nullptr) {
    return kvpages_ops_zero_blocks(ops.get(), ids.data(), ids.size(), chosen, nullptr);
}

std::int32_t poison(const Ops& ops, const Ids& ids,
                    const kvpages_block_selection* chosen = nullptr) {
    return kvpages_ops_poison_blocks(ops.get(), ids.data(), ids.size(), chosen, nullptr);
}

std::int32_t copy(const Ops& ops, const std::vector<kvpages_block_copy>& copies,
                  const kvpages_block_selection* chosen = nullptr, std::uint64_t num_blocks = 0) {
    return kvpages_ops_copy_blocks(ops.get(), copies.data(), copies.size(), chosen, num_blocks, nullptr);
}

// All bytes of a cache, one allocation after another.
Bytes bytes(const Cache& cache) {
    Bytes all;
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
        const kvpages_allocation part = allocation(cache, i);
        const auto* data = static_cast<const unsigned char*>(part.data);
        all.insert(all.end(), data, data + part.size_bytes);
    }
    return all;
}

// Gives every byte a number that is not 0, and returns them.
Bytes filled(const Cache& cache) {
    std::size_t number = 0;
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
        const kvpages_allocation part = allocation(cache, i);
        auto* data = static_cast<unsigned char*>(part.data);
        for (std::uint64_t byte = 0; byte < part.size_bytes; ++byte) {
            data[byte] = static_cast<unsigned char>(1 + number++ % 251);
        }
    }
    return bytes(cache);
}

void clear(Bytes& expected, std::size_t from, std::size_t to) {
    ASSERT_LE(to, expected.size());
    std::fill(expected.begin() + static_cast<std::ptrdiff_t>(from),
              expected.begin() + static_cast<std::ptrdiff_t>(to), static_cast<unsigned char>(0));
}

void move(Bytes& expected, const Bytes& before, std::size_t from, std::size_t to,
          std::size_t count) {
    ASSERT_LE(std::max(from, to) + count, expected.size());
    std::memcpy(expected.data() + to, before.data() + from, count);
}

kvpages_block_selection groups(const std::vector<std::uint64_t>& numbers) {
    kvpages_block_selection chosen = KVPAGES_BLOCK_SELECTION_INIT;
    chosen.groups = numbers.data();
    chosen.num_groups = numbers.size();
    return chosen;
}

kvpages_block_selection layers(const std::vector<std::size_t>& numbers) {
    kvpages_block_selection chosen = KVPAGES_BLOCK_SELECTION_INIT;
    chosen.layers = numbers.data();
    chosen.num_layers = numbers.size();
    return chosen;
}

// --- rows ------------------------------------------------------------------------------------

// The values of numbered elements, so that each differs from its neighbours.
float number(std::size_t i) { return static_cast<float>(static_cast<int>(i * 37 % 255) - 127) / 8; }

std::vector<float> numbers(std::size_t count, std::size_t start = 0) {
    std::vector<float> all;
    for (std::size_t i = 0; i < count; ++i) {
        all.push_back(number(start + i));
    }
    return all;
}

std::int32_t write(const Ops& ops, const std::vector<kvpages_kv_rows>& rows, const Slots& slots,
                   std::uint32_t dtype, std::uint32_t fp8 = 0) {
    kvpages_kv_write call = KVPAGES_KV_WRITE_INIT;
    call.layers = rows.data();
    call.num_layers = rows.size();
    call.slots = slots.data();
    call.num_slots = slots.size();
    call.dtype = dtype;
    call.fp8_format = fp8;
    return kvpages_ops_write_kv(ops.get(), &call);
}

std::int32_t gather(const Ops& ops, const std::vector<kvpages_kv_rows_out>& rows,
                    const Slots& slots, std::uint32_t dtype, std::uint32_t fp8 = 0) {
    kvpages_kv_gather call = KVPAGES_KV_GATHER_INIT;
    call.layers = rows.data();
    call.num_layers = rows.size();
    call.slots = slots.data();
    call.num_slots = slots.size();
    call.dtype = dtype;
    call.fp8_format = fp8;
    return kvpages_ops_gather_kv(ops.get(), &call);
}

kvpages_kv_rows rows_of(std::size_t layer, const void* keys, const void* values) {
    kvpages_kv_rows rows{};
    rows.layer = layer;
    rows.keys = keys;
    rows.values = values;
    return rows;
}

kvpages_kv_rows_out room_for(std::size_t layer, void* keys, void* values) {
    kvpages_kv_rows_out rows{};
    rows.layer = layer;
    rows.keys = keys;
    rows.values = values;
    return rows;
}

// Where an element of a slot lies in its allocation, by the axes alone.
std::size_t place(const Cache& cache, std::size_t layer, std::uint64_t slot, std::uint64_t head,
                  std::uint64_t kv, std::uint64_t element) {
    kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
    must(kvpages_cache_get_axes(cache.get(), layer, &axes));
    const std::uint64_t at = slot / axes.kernel_block_slots * axes.kernel_block_stride +
                             slot % axes.kernel_block_slots * axes.token_stride +
                             head * axes.head_stride + kv * axes.value_offset +
                             element * axes.content_stride;
    return report(cache, layer).offset_bytes + at * kvpages_dtype_bytes(view(cache, layer).dtype);
}

struct Layout {
    const char* name;
    const char* dims;
    const char* order;
    std::uint64_t padding;
    std::uint64_t kernel_block;
    bool packed;
    bool beside_state;
};

const std::vector<Layout>& layouts() {
    static const std::vector<Layout> all{
        {"NHD", packed_nhd, "", 0, 8, false, false},
        {"HND", "block | head | token | kv*content", "", 0, 8, false, false},
        {"HND in memory", packed_nhd, "block | head | token | kv*content", 0, 8, false, false},
        {"kv first", kv_first, "", 0, 8, false, false},
        {"kv first, split", kv_first, "", 0, 4, false, false},
        {"kv first beside a state", kv_first, "", 0, 8, false, true},
        {"block first", block_first, "", 0, 8, false, false},
        {"flat", "block | kv*token*head*content", "", 0, 8, false, false},
        {"content outside tokens", "block | kv | head | content | token", "", 0, 8, false, false},
        {"heads outermost", "block | kv*head | token | content", "kv*head | block | token | content",
         0, 8, false, false},
        {"padded", block_first, "", 64, 8, false, false},
        {"padded, split", packed_nhd, "", 64, 4, false, false},
        {"packed", packed_nhd, "", 0, 8, true, false},
        {"packed, kv first", kv_first, "", 0, 8, true, false},
    };
    return all;
}

constexpr std::uint64_t kHeads = 2;
constexpr std::uint64_t kWidth = 6;
constexpr std::uint64_t kBlock = 8;

// One layer "A" as a layout wants it.
Cache cache_of(const Layout& layout, std::uint64_t num_blocks, kvpages_spec spec) {
    const Model m = model();
    BackendOptions options;
    options.layout = layout.dims;
    options.memory_order = layout.order;
    options.sizes = {layout.kernel_block};
    options.multiples.clear();
    const std::uint64_t page = page_bytes(spec) + layout.padding;
    if (layout.padding != 0) {
        spec.page_size_padded_bytes = page;
    }
    add(m, "A", spec, backend(options));
    Parts parts;
    parts.num_blocks = num_blocks;
    parts.groups = {{{"A"}, 0}};
    if (layout.packed) {
        parts.tensors = {{(page + 96) * num_blocks, {"A"}, 32, page + 96}};
    } else if (layout.beside_state) {
        State state;
        state.add(KVPAGES_DTYPE_U8, {page});
        add(m, "S", state.spec(), state_backend());
        parts.groups.push_back({{"S"}, 0});
        parts.tensors = {{page * num_blocks, {"A", "S"}, 0, 0}};
    } else {
        parts.tensors = {{page * num_blocks, {"A"}, 0, 0}};
    }
    return cache(plan_from(m, parts));
}

// Every other slot, from the last to the first, with a row of no token among them.
Slots some_slots(std::uint64_t num_blocks) {
    Slots slots;
    for (auto slot = static_cast<std::int64_t>(num_blocks * kBlock) - 1; slot >= 0; slot -= 2) {
        slots.push_back(slot);
        if (slots.size() == 2) {
            slots.push_back(-1);
        }
    }
    return slots;
}

template <typename Check>
void for_each_layout(Check&& check) {
    for (const Layout& layout : layouts()) {
        for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
            SCOPED_TRACE(std::string(layout.name) + ", " + std::to_string(num_blocks) + " blocks");
            check(layout, num_blocks);
        }
    }
}

}  // namespace

// --- the cases -------------------------------------------------------------------------------

// The case counts the 37376 bytes that are stored; the rule clears the whole page of 37440.
TEST(CasesZero, Z01_APackedLayerClearsItsOwnSlots) {
    kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
    spec.cache_dtype = "fp8_ds_mla";
    spec.model_version = "deepseek_v4";
    spec.compress_ratio = 4;
    spec.alignment_bytes = 576;
    const Model m = model();
    Parts parts;
    parts.num_blocks = 100;
    parts.groups = {{{"0", "1", "2", "3"}, 0}};
    for (std::uint64_t i = 0; i < 4; ++i) {
        add(m, std::to_string(i), spec, backend(latent));
        parts.tensors.push_back({14976000, {std::to_string(i)}, 37440 * i, 149760});
    }
    const Cache c = cache(plan_from(m, parts));
    const Ops o = ops(c);
    // One layer at a time: its page of block 99, and no other slab.
    for (std::size_t layer = 0; layer < 4; ++layer) {
        Bytes expected = filled(c);
        const std::vector<std::size_t> one{layer};
        const kvpages_block_selection chosen = layers(one);
        must(zero(o, {99}, &chosen));
        const std::size_t start = 37440 * layer + 99 * 149760;
        clear(expected, start, start + 37440);
        EXPECT_TRUE(bytes(c) == expected) << layer;
    }
    Bytes expected = filled(c);
    must(zero(o, {99}));
    clear(expected, 99 * 149760, 14976000);
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(CasesZero, Z04_ManagerBlocksNotKernelBlocks) {
    const Model m = model();
    add(m, "A", full(32, 1, 8), backend_of_sizes(kv_first, {16}));
    const Cache c = cache(plan_of_blocks(m, 3));
    const Ops o = ops(c);
    Bytes expected = filled(c);
    ASSERT_EQ(expected.size(), 3072u);
    must(zero(o, {1}));
    clear(expected, 512, 1024);
    clear(expected, 2048, 2560);
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(CasesZero, Z05_GroupsThatOverlayASlab) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "A", page_of(32768), kernels);
    add(m, "B", page_of(8192), kernels);
    add(m, "C", page_of(65536), kernels);
    Parts parts;
    parts.num_blocks = 3;
    parts.groups = {{{"A", "B"}, 0}, {{"C"}, 0}};
    parts.tensors = {{65536 * 3, {"A", "C"}, 0, 65536}, {65536 * 3, {"B"}, 32768, 65536}};
    kvpages_plan* raw = nullptr;
    must(try_parts(m, parts, &raw));
    const Plan p(raw);
    const Cache c = cache(p);
    const Ops o = ops(c);
    Bytes expected = filled(c);
    must(zero(o, {1}));
    clear(expected, 65536, 2 * 65536);
    EXPECT_TRUE(bytes(c) == expected);

    // The first group alone ends where its second layer does.
    expected = filled(c);
    const std::vector<std::uint64_t> first{0};
    const kvpages_block_selection chosen = groups(first);
    must(zero(o, {1}, &chosen));
    clear(expected, 65536, 65536 + 40960);
    EXPECT_TRUE(bytes(c) == expected);

    // A cycle over an overlay moves each byte once.
    const Bytes before = filled(c);
    expected = before;
    must(copy(o, {{0, 1}, {1, 2}, {2, 0}}));
    move(expected, before, 0, 65536, 65536);
    move(expected, before, 65536, 2 * 65536, 65536);
    move(expected, before, 2 * 65536, 0, 65536);
    EXPECT_TRUE(bytes(c) == expected);
}

// Of every layout: each byte that clearing a block writes is 0xFF, and each other one as it was.
TEST(OpsPoison, WritesTheBytesThatClearingDoes) {
    for_each_layout([](const Layout& layout, std::uint64_t num_blocks) {
        const Cache c = cache_of(layout, num_blocks, full(kBlock, kHeads, kWidth));
        const Ops o = ops(c);
        for (std::int32_t block = 1; block < static_cast<std::int32_t>(num_blocks); ++block) {
            const Bytes before = filled(c);
            must(zero(o, {block}));
            const Bytes cleared = bytes(c);
            ASSERT_TRUE(filled(c) == before);
            must(poison(o, {block}));
            const Bytes poisoned = bytes(c);
            std::size_t num_poisoned = 0;
            for (std::size_t i = 0; i < before.size(); ++i) {
                const bool is_of_block = cleared[i] != before[i];
                num_poisoned += is_of_block ? 1 : 0;
                ASSERT_EQ(poisoned[i], is_of_block ? 0xff : before[i]) << "byte " << i;
            }
            EXPECT_GE(num_poisoned, 2 * kBlock * kHeads * kWidth * 2) << "keys and values";
            // By the axes too: all rows of the block are NaN, and none of another block.
            const std::size_t layer = find(c, "A");
            for (std::uint64_t slot = 0; slot < num_blocks * kBlock; ++slot) {
                const bool is_of_block = slot / kBlock == static_cast<std::uint64_t>(block);
                for (std::uint64_t kv = 0; kv < 2; ++kv) {
                    const std::size_t at = place(c, layer, slot, 1, kv, 3);
                    ASSERT_EQ(poisoned[at] == 0xff && poisoned[at + 1] == 0xff, is_of_block);
                }
            }
        }
    });
}

TEST(OpsPoison, ManyBlocksOfAGroupOrALayer) {
    const Model m = model();
    add(m, "A", page_of(64), backend(packed_nhd));
    add(m, "B", page_of(64), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 5));
    const Ops o = ops(c);
    Bytes expected = filled(c);
    const auto expect_poison = [&expected](std::size_t from, std::size_t to) {
        std::fill(expected.begin() + static_cast<std::ptrdiff_t>(from),
                  expected.begin() + static_cast<std::ptrdiff_t>(to), static_cast<unsigned char>(0xff));
    };
    const std::vector<std::size_t> second{1};
    const kvpages_block_selection chosen = layers(second);
    must(poison(o, {4, 2}, &chosen));
    expect_poison(320 + 2 * 64, 320 + 3 * 64);
    expect_poison(320 + 4 * 64, 320 + 5 * 64);
    EXPECT_TRUE(bytes(c) == expected);
    must(poison(o, {1, 3}));
    for (const std::size_t layer : {0u, 320u}) {
        expect_poison(layer + 64, layer + 2 * 64);
        expect_poison(layer + 3 * 64, layer + 4 * 64);
    }
    EXPECT_TRUE(bytes(c) == expected);
    const std::vector<std::uint64_t> first{0};
    const kvpages_block_selection group = groups(first);
    must(poison(o, {2, 4}, &group));
    expect_poison(64, 320);
    expect_poison(320 + 64, 640);
    EXPECT_TRUE(bytes(c) == expected);
    must(poison(o, {}));
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(OpsPoison, IsRefusedBeforeItTouchesAnything) {
    const Model m = model();
    add(m, "A", page_of(64), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 4));
    const Ops o = ops(c, 2);
    const Bytes before = filled(c);
    const std::int32_t bad = KVPAGES_STATUS_INVALID_ARGUMENT;
    EXPECT_TRUE(fails(poison(o, {1, 0}), bad, "null_block", {"entry 1", "block 0"}));
    EXPECT_TRUE(fails(poison(o, {1, 4}), bad, "block_id_out_of_range", {"entry 1", "4"}));
    EXPECT_TRUE(fails(poison(o, {-1}), bad, "block_id_out_of_range", {"entry 0", "-1"}));
    EXPECT_TRUE(fails(poison(o, {3, 3}), bad, "duplicate_block_id", {"entry 1", "3"}));
    EXPECT_TRUE(fails(poison(o, {1, 2, 3}), bad, "too_many_block_ids", {"2"}));
    const std::vector<std::size_t> ninth{8};
    const kvpages_block_selection chosen = layers(ninth);
    EXPECT_TRUE(fails(poison(o, {1}, &chosen), KVPAGES_STATUS_NOT_FOUND, "not_found", {"8"}));
    EXPECT_TRUE(fails(kvpages_ops_poison_blocks(o.get(), nullptr, 1, nullptr, nullptr),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"block_ids"}));
    EXPECT_TRUE(fails(kvpages_ops_poison_blocks(nullptr, nullptr, 0, nullptr, nullptr),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"ops"}));
    EXPECT_TRUE(bytes(c) == before);
}

// Blocks are a group's, also in layers that no backend reads.
TEST(OpsLayouts, LayersWithoutABackendAreClearedAndCopied) {
    const Model m = model();
    add(m, "unread", full(16, 1, 8));
    add(m, "read", full(16, 1, 8), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 3));
    const Ops o = ops(c);
    const std::size_t page = 16 * 2 * 8 * 2;
    Bytes expected = filled(c);
    ASSERT_EQ(expected.size(), 2 * 3 * page);
    must(zero(o, {1}));
    clear(expected, page, 2 * page);
    clear(expected, 4 * page, 5 * page);
    EXPECT_TRUE(bytes(c) == expected);
    must(copy(o, {{0, 2}}));
    for (const std::size_t layer : {0u, 3u}) {
        std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(layer * page), page,
                    expected.begin() + static_cast<std::ptrdiff_t>((layer + 2) * page));
    }
    EXPECT_TRUE(bytes(c) == expected);
    // Callers number the layers that have views.
    const std::vector<std::size_t> second{1};
    const kvpages_block_selection chosen = layers(second);
    EXPECT_EQ(zero(o, {1}, &chosen), KVPAGES_STATUS_NOT_FOUND);
}

// The same slot is in another block of a layer that stores fewer of each.
TEST(OpsHostile, LayersOfDifferentBlockSlots) {
    const Model m = model();
    kvpages_spec narrow = mla(256, 64, KVPAGES_DTYPE_F32), wide = narrow;
    narrow.compress_ratio = 128;
    wide.compress_ratio = 4;
    add(m, "narrow", narrow, backend(latent));
    add(m, "wide", wide, backend(latent));
    Parts parts;
    parts.num_blocks = 6;
    parts.groups = {{{"narrow", "wide"}, 0}};
    parts.tensors = {{6 * 2 * 256, {"narrow"}}, {6 * 64 * 256, {"wide"}}};
    const Cache c = cache(plan_from(m, parts));
    const Ops o = ops(c);
    const Bytes before = filled(c);
    const std::vector<float> row(64, 1.0f);
    std::vector<kvpages_kv_rows> both(2);
    both[1].layer = 1;
    both[0].keys = both[1].keys = row.data();
    const std::int64_t slot = 10;
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    write.layers = both.data();
    write.num_layers = 2;
    write.slots = &slot;
    write.num_slots = 1;
    write.dtype = KVPAGES_DTYPE_F32;
    EXPECT_TRUE(fails(kvpages_ops_write_kv(o.get(), &write), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "block_slots_differ", {"narrow", "2", "wide", "64"}));
    EXPECT_TRUE(bytes(c) == before);
}

TEST(CasesZero, Z07_StatePagesAreClearedWhole) {
    State state;
    state.add(KVPAGES_DTYPE_BF16, {3, 8}).add(KVPAGES_DTYPE_F32, {2, 4}).padded(8192);
    const Model m = model();
    add(m, "S", state.spec(), state_backend());
    const Cache c = cache(plan_of_blocks(m, 3));
    const Ops o = ops(c);
    Bytes expected = filled(c);
    must(zero(o, {2}));
    clear(expected, 2 * 8192, 3 * 8192);
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(CasesCopy, Z09_ChainsAndCycles) {
    const Model m = model();
    add(m, "A", page_of(64), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 3));
    const Ops o = ops(c);
    Bytes before = filled(c);
    must(copy(o, {{0, 1}, {1, 2}}));
    Bytes expected = before;
    move(expected, before, 0, 64, 64);
    move(expected, before, 64, 128, 64);
    EXPECT_TRUE(bytes(c) == expected);
    before = expected;
    must(copy(o, {{1, 2}, {2, 1}}));
    move(expected, before, 64, 128, 64);
    move(expected, before, 128, 64, 64);
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(CasesCopy, Z12_KeysAndValuesInHalves) {
    const Model m = model();
    add(m, "A", full(16, 2, 64), backend(kv_first));
    const Cache c = cache(plan_of_blocks(m, 4));
    const Ops o = ops(c);
    const Bytes before = filled(c);
    must(copy(o, {{0, 1}}));
    Bytes expected = before;
    move(expected, before, 0, 4096, 4096);
    move(expected, before, 16384, 20480, 4096);
    EXPECT_TRUE(bytes(c) == expected);
    // A swap goes through the spare page in both halves.
    const Bytes second = bytes(c);
    must(copy(o, {{2, 3}, {3, 2}}));
    for (const std::size_t half : {0u, 16384u}) {
        move(expected, second, half + 8192, half + 12288, 4096);
        move(expected, second, half + 12288, half + 8192, 4096);
    }
    EXPECT_TRUE(bytes(c) == expected);
}

TEST(CasesCopy, Z13_NothingAliasesAndSeveralBuffers) {
    const Model m = model();
    State state;
    state.add(KVPAGES_DTYPE_U8, {40}).add(KVPAGES_DTYPE_U8, {24});
    add(m, "A", page_of(64), backend(packed_nhd));
    share(m, "B", "A");
    add(m, "S", state.spec(), state_backend());
    Parts parts;
    parts.num_blocks = 3;
    parts.groups = {{{"A", "B"}, 0}, {{"S"}, 0}};
    parts.tensors = {{64 * 3, {"A"}, 0, 0}, {64 * 3, {"S"}, 0, 0}};
    const Cache c = cache(plan_from(m, parts));
    const Ops o = ops(c);
    const Bytes before = filled(c);
    must(copy(o, {}));
    must(kvpages_ops_copy_blocks(o.get(), nullptr, 0, nullptr, 0, nullptr));
    must(kvpages_ops_zero_blocks(o.get(), nullptr, 0, nullptr, nullptr));
    const std::vector<std::size_t> nobody;
    const kvpages_block_selection none = layers(nobody);
    must(copy(o, {{0, 1}}, &none));
    must(zero(o, {0, 1}, &none));
    EXPECT_TRUE(bytes(c) == before);

    // One buffer by two names, in a swap that two passes would undo.
    const std::vector<std::size_t> twice{0, 1, 0};
    const kvpages_block_selection aliases = layers(twice);
    must(copy(o, {{0, 1}, {1, 0}}, &aliases));
    Bytes expected = before;
    move(expected, before, 0, 64, 64);
    move(expected, before, 64, 0, 64);
    EXPECT_TRUE(bytes(c) == expected);

    // Both states of a layer, and a block onto itself.
    const std::vector<std::size_t> states{2};
    const kvpages_block_selection of_state = layers(states);
    must(copy(o, {{0, 2}, {1, 1}}, &of_state));
    move(expected, before, 192, 192 + 128, 64);
    EXPECT_TRUE(bytes(c) == expected);
}

// --- bytes outside ----------------------------------------------------------------------------

TEST(OpsLayouts, ZeroAndCopyTouchTheBlocksOnly) {
    for_each_layout([](const Layout& layout, std::uint64_t num_blocks) {
        const Cache c = cache_of(layout, num_blocks, full(kBlock, kHeads, kWidth));
        const Ops o = ops(c);
        const kvpages_view_report where = report(c, "A");
        const Bytes before = filled(c);
        const std::size_t last = num_blocks - 1;
        Bytes expected = before;
        Bytes copied = before;
        for (std::size_t run = 0; run < where.num_runs; ++run) {
            const std::size_t start = where.offset_bytes + run * where.run_step_bytes;
            const std::size_t at = start + last * where.block_step_bytes;
            clear(expected, at, at + where.block_span_bytes);
            move(copied, before, start, at, where.block_span_bytes);
            move(copied, before, at, start, where.block_span_bytes);
        }
        const std::vector<std::size_t> one{find(c, "A")};
        const kvpages_block_selection chosen = layers(one);
        must(zero(o, {static_cast<std::int32_t>(last)}, &chosen));
        EXPECT_TRUE(bytes(c) == expected);
        filled(c);
        const auto end = static_cast<std::int32_t>(last);
        must(copy(o, last == 0 ? std::vector<kvpages_block_copy>{{0, 0}}
                               : std::vector<kvpages_block_copy>{{0, end}, {end, 0}},
                  &chosen));
        EXPECT_TRUE(bytes(c) == copied);
    });
}

TEST(OpsLayouts, WrittenElementsLieWhereTheAxesSay) {
    for_each_layout([](const Layout& layout, std::uint64_t num_blocks) {
        const Cache c = cache_of(layout, num_blocks, full(kBlock, kHeads, kWidth));
        const Ops o = ops(c);
        const std::size_t layer = find(c, "A");
        const Slots slots = some_slots(num_blocks);
        // Gaps between heads and tokens, other ones for keys than for values.
        const std::uint64_t head[2]{kWidth + 1, kWidth + 3};
        const std::uint64_t token[2]{kHeads * head[0] + 5, kHeads * head[1]};
        std::vector<std::uint16_t> source[2];
        for (std::size_t kv = 0; kv < 2; ++kv) {
            for (std::size_t i = 0; i < token[kv] * slots.size(); ++i) {
                source[kv].push_back(static_cast<std::uint16_t>(1000 * (kv + 1) + i));
            }
        }
        kvpages_kv_rows rows = rows_of(layer, source[0].data(), source[1].data());
        rows.key_head_stride = head[0];
        rows.key_token_stride = token[0];
        rows.value_head_stride = head[1];
        rows.value_token_stride = token[1];
        Bytes expected = filled(c);
        for (std::size_t row = 0; row < slots.size(); ++row) {
            if (slots[row] < 0) {
                continue;
            }
            for (std::size_t h = 0; h < kHeads; ++h) {
                for (std::size_t kv = 0; kv < 2; ++kv) {
                    for (std::size_t e = 0; e < kWidth; ++e) {
                        const auto slot = static_cast<std::uint64_t>(slots[row]);
                        std::memcpy(expected.data() + place(c, layer, slot, h, kv, e),
                                    &source[kv][row * token[kv] + h * head[kv] + e], 2);
                    }
                }
            }
        }
        must(write(o, {rows}, slots, KVPAGES_DTYPE_F16));
        EXPECT_TRUE(bytes(c) == expected);

        // And back, with other gaps; rooms of no token and gaps stay.
        const std::size_t row_elements = kHeads * kWidth;
        std::vector<std::uint16_t> out[2];
        out[0].assign(slots.size() * row_elements, 0xABCD);
        out[1].assign(slots.size() * (row_elements + 1), 0xABCD);
        kvpages_kv_rows_out room = room_for(layer, out[0].data(), out[1].data());
        room.value_token_stride = row_elements + 1;
        must(gather(o, {room}, slots, KVPAGES_DTYPE_F16));
        for (std::size_t row = 0; row < slots.size(); ++row) {
            for (std::size_t i = 0; i < row_elements; ++i) {
                const std::size_t h = i / kWidth;
                const std::size_t e = i % kWidth;
                for (std::size_t kv = 0; kv < 2; ++kv) {
                    const std::uint16_t wanted =
                        slots[row] < 0 ? 0xABCD : source[kv][row * token[kv] + h * head[kv] + e];
                    EXPECT_EQ(out[kv][row * (row_elements + kv) + i], wanted);
                }
            }
            EXPECT_EQ(out[1][row * (row_elements + 1) + row_elements], 0xABCD);
        }
        EXPECT_TRUE(bytes(c) == expected);
    });
}

namespace {

struct Mode {
    const char* name;
    std::uint32_t dtype;
    std::uint32_t quant_mode;
    std::uint32_t fp8;
    float bound;  // of the error, relative to the largest magnitude
};

const std::vector<Mode>& modes() {
    static const std::vector<Mode> all{
        {"f32", KVPAGES_DTYPE_F32, KVPAGES_QUANT_MODE_NONE, 0, 0},
        {"f16", KVPAGES_DTYPE_F16, KVPAGES_QUANT_MODE_NONE, 0, 0.0005f},
        {"bf16", KVPAGES_DTYPE_BF16, KVPAGES_QUANT_MODE_NONE, 0, 0.004f},
        {"e4m3", KVPAGES_DTYPE_F8_E4M3FN, KVPAGES_QUANT_MODE_FP8_PER_TENSOR, 0, 0.0626f},
        {"e5m2", KVPAGES_DTYPE_F8_E5M2, KVPAGES_QUANT_MODE_FP8_PER_TENSOR, 0, 0.126f},
        {"e4m3 in bytes", KVPAGES_DTYPE_U8, KVPAGES_QUANT_MODE_FP8_PER_TENSOR, 0, 0.0626f},
        {"e5m2 in bytes", KVPAGES_DTYPE_U8, KVPAGES_QUANT_MODE_FP8_PER_TENSOR,
         KVPAGES_DTYPE_F8_E5M2, 0.126f},
        {"int8", KVPAGES_DTYPE_I8, KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD, 0, 0.004f},
        {"e4m3 with scales", KVPAGES_DTYPE_U8, KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD, 0, 0.0626f},
        {"e5m2 with scales", KVPAGES_DTYPE_F8_E5M2, KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD, 0,
         0.126f},
        {"int4", KVPAGES_DTYPE_U8, KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD, 0, 0.072f},
    };
    return all;
}

}  // namespace

TEST(OpsLayouts, EveryModeComesBackWithinItsBound) {
    for (const Mode& mode : modes()) {
        SCOPED_TRACE(mode.name);
        const bool scaled = mode.quant_mode >= KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
        for_each_layout([&](const Layout& layout, std::uint64_t num_blocks) {
            kvpages_spec spec = full(kBlock, kHeads, kWidth, mode.dtype);
            spec.quant_mode = mode.quant_mode;
            const Cache c = cache_of(layout, num_blocks, spec);
            const Ops o = ops(c);
            const std::size_t layer = find(c, "A");
            const Slots slots = some_slots(num_blocks);
            const std::size_t count = slots.size() * kHeads * kWidth;
            const std::vector<float> keys = numbers(count);
            const std::vector<float> values = numbers(count, 100);
            kvpages_kv_rows rows = rows_of(layer, keys.data(), values.data());
            rows.key_scale = 0.5f;
            rows.value_scale = 2;
            const Bytes before = filled(c);
            const std::int32_t status = write(o, {rows}, slots, KVPAGES_DTYPE_F32, mode.fp8);
            if (scaled && std::string(layout.name) == "content outside tokens") {
                EXPECT_TRUE(fails(status, KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported",
                                  {"layer A", "per_token_head"}));
                EXPECT_TRUE(bytes(c) == before);
                return;
            }
            must(status);

            // Only bytes of cells of these slots changed.
            kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
            must(kvpages_cache_get_axes(c.get(), layer, &axes));
            std::set<std::size_t> allowed;
            for (const std::int64_t slot : slots) {
                for (std::uint64_t i = 0; slot >= 0 && i < 2 * kHeads; ++i) {
                    const std::uint64_t elements = axes.key_elements + axes.scale_elements;
                    for (std::uint64_t e = 0; e < elements; ++e) {
                        const std::size_t at =
                            place(c, layer, static_cast<std::uint64_t>(slot), i / 2, i % 2, e);
                        for (std::size_t b = 0; b < kvpages_dtype_bytes(mode.dtype); ++b) {
                            allowed.insert(at + b);
                        }
                    }
                }
            }
            const Bytes after = bytes(c);
            for (std::size_t i = 0; i < after.size(); ++i) {
                ASSERT_TRUE(after[i] == before[i] || allowed.count(i) != 0) << "byte " << i;
            }

            std::vector<float> out[2];
            out[0].assign(count, -77);
            out[1].assign(count, -77);
            kvpages_kv_rows_out room = room_for(layer, out[0].data(), out[1].data());
            room.key_scale = 0.5f;
            room.value_scale = 2;
            must(gather(o, {room}, slots, KVPAGES_DTYPE_F32, mode.fp8));
            for (std::size_t i = 0; i < count; ++i) {
                const bool is_row = slots[i / (kHeads * kWidth)] >= 0;
                EXPECT_NEAR(out[0][i], is_row ? keys[i] : -77, is_row ? 16 * mode.bound : 0);
                EXPECT_NEAR(out[1][i], is_row ? values[i] : -77, is_row ? 16 * mode.bound : 0);
            }

            // Whole blocks are their slots.
            std::vector<float> whole(num_blocks * kBlock * kHeads * kWidth);
            std::vector<float> whole_values(whole.size());
            Ids ids;
            for (std::uint64_t block = num_blocks; block > 0; --block) {
                ids.push_back(static_cast<std::int32_t>(block - 1));
            }
            kvpages_kv_rows_out all = room_for(layer, whole.data(), whole_values.data());
            all.key_scale = 0.5f;
            all.value_scale = 2;
            kvpages_kv_gather call = KVPAGES_KV_GATHER_INIT;
            call.layers = &all;
            call.num_layers = 1;
            call.block_ids = ids.data();
            call.num_block_ids = ids.size();
            call.dtype = KVPAGES_DTYPE_F32;
            call.fp8_format = mode.fp8;
            must(kvpages_ops_gather_kv(o.get(), &call));
            for (std::size_t row = 0; row < slots.size(); ++row) {
                if (slots[row] < 0) {
                    continue;
                }
                const auto slot = static_cast<std::uint64_t>(slots[row]);
                const std::uint64_t at =
                    (num_blocks - 1 - slot / kBlock) * kBlock + slot % kBlock;
                for (std::size_t i = 0; i < kHeads * kWidth; ++i) {
                    EXPECT_EQ(whole[at * kHeads * kWidth + i], out[0][row * kHeads * kWidth + i]);
                    EXPECT_EQ(whole_values[at * kHeads * kWidth + i],
                              out[1][row * kHeads * kWidth + i]);
                }
            }
        });
    }
}

// --- latents -------------------------------------------------------------------------------------

TEST(OpsLatent, TwoPartsMakeOneRow) {
    for (const std::uint32_t dtype : {KVPAGES_DTYPE_BF16, KVPAGES_DTYPE_F32}) {
        const Model m = model();
        add(m, "A", mla(4, 12, dtype), backend(latent));
        const Cache c = cache(plan_of_blocks(m, 3));
        const Ops o = ops(c);
        const std::vector<float> first = numbers(2 * 8);
        const std::vector<float> second = numbers(2 * 4, 50);
        kvpages_kv_rows rows = rows_of(0, first.data(), second.data());
        rows.latent_elements = 8;
        must(write(o, {rows}, {9, 2}, KVPAGES_DTYPE_F32));
        std::vector<float> whole(2 * 12);
        must(gather(o, {room_for(0, whole.data(), nullptr)}, {9, 2}, KVPAGES_DTYPE_F32));
        for (std::size_t i = 0; i < 24; ++i) {
            const float wanted = i % 12 < 8 ? first[i / 12 * 8 + i % 12]
                                            : second[i / 12 * 4 + i % 12 - 8];
            EXPECT_EQ(whole[i], wanted);
        }
        rows.latent_elements = 13;
        EXPECT_TRUE(fails(write(o, {rows}, {0}, KVPAGES_DTYPE_F32),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"layer A", "13", "12"}));
    }
}

TEST(OpsLatent, PackedFormOfDeepSeek) {
    kvpages_spec spec = mla(64, 576, KVPAGES_DTYPE_U8);
    spec.cache_dtype = "fp8_ds_mla";
    const Model m = model();
    add(m, "A", spec, preset(KVPAGES_PRESET_FLASH_MLA));
    const Cache c = cache(plan_of_blocks(m, 2));
    const Ops o = ops(c);
    const Bytes before = filled(c);
    const std::vector<float> compressed = numbers(512);
    const std::vector<float> rope = numbers(64, 9);
    must(write(o, {rows_of(0, compressed.data(), rope.data())}, {70}, KVPAGES_DTYPE_F32));
    const Bytes after = bytes(c);
    for (std::size_t i = 0; i < after.size(); ++i) {
        ASSERT_TRUE(after[i] == before[i] || (i >= 70 * 656 && i < 71 * 656)) << i;
    }
    for (std::size_t tile = 0; tile < 4; ++tile) {
        float largest = 0;
        for (std::size_t i = 0; i < 128; ++i) {
            largest = std::max(largest, std::fabs(compressed[128 * tile + i]));
        }
        float scale = 0;
        std::memcpy(&scale, after.data() + 70 * 656 + 512 + 4 * tile, 4);
        EXPECT_EQ(scale, largest / 448);
    }
    std::vector<float> out(512);
    std::vector<float> out_rope(64);
    must(gather(o, {room_for(0, out.data(), out_rope.data())}, {70}, KVPAGES_DTYPE_F32));
    for (std::size_t i = 0; i < 512; ++i) {
        EXPECT_NEAR(out[i], compressed[i], std::fabs(compressed[i]) / 16 + 0.01);
    }
    EXPECT_EQ(out_rope, rope);
    // As bytes, in one piece.
    Bytes raw(656);
    must(gather(o, {room_for(0, raw.data(), nullptr)}, {70}, KVPAGES_DTYPE_U8));
    EXPECT_EQ(std::memcmp(raw.data(), after.data() + 70 * 656, 656), 0);
}

// --- many layers -----------------------------------------------------------------------------

TEST(Ops, ManyLayersInOneCallThroughTheWrapper) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "A", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
    add(m, "B", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
    share(m, "C", "A", kernels);
    kvpages_cache* raw = nullptr;
    const Plan p = plan_of_blocks(m, 4);
    must(try_cache(p, host_memory(), &raw));
    Cache c(raw);
    Ops o = ops(c);
    // The operations keep the memory.
    auto* data = static_cast<const float*>(view(c, "A").data);
    c.reset();
    const std::vector<float> keys = numbers(8);
    const std::vector<float> values = numbers(8, 50);
    must(write(o, {rows_of(0, keys.data(), values.data()), rows_of(1, values.data(), keys.data())},
               {5, 0}, KVPAGES_DTYPE_F32));
    EXPECT_EQ(data[0], keys[4]);
    std::vector<float> out[2]{std::vector<float>(8), std::vector<float>(8)};
    must(gather(o, {room_for(2, out[0].data(), out[1].data())}, {5, 0}, KVPAGES_DTYPE_F32));
    EXPECT_EQ(out[0], keys);
    EXPECT_EQ(out[1], values);
    must(zero(o, {1}));
    must(gather(o, {room_for(1, out[0].data(), out[1].data())}, {5, 0}, KVPAGES_DTYPE_F32));
    EXPECT_EQ(out[0][0], 0);
    EXPECT_EQ(out[0][4], values[4]);
}

TEST(Ops, Wrapper) {
    kvpages::Model m;
    kvpages::AttentionSpec spec;
    spec.block_size = 4;
    spec.head_size = 4;
    spec.dtype = kvpages::Dtype::f32;
    kvpages::BackendConfig kernels;
    kernels.name = "kernels";
    kernels.layout = packed_nhd;
    kernels.kernel_block_sizes = {4};
    m.add("layers.0", spec, kvpages::Backend(kernels), 1);
    kvpages::PlanParts parts;
    parts.num_blocks = 3;
    parts.groups.push_back({{"layers.0"}});
    kvpages::PartTensor tensor;
    tensor.size_bytes = 3 * 128;
    tensor.layers = {"layers.0"};
    parts.tensors.push_back(tensor);
    parts.kernel_block_sizes = {4};
    const kvpages::Plan p = kvpages::Plan::from_parts(m, parts);
    const kvpages::Cache c = kvpages::Cache::allocate(p, kvpages::Memory::host());
    kvpages::Ops o(c);
    const std::vector<float> keys = numbers(4);
    const std::vector<float> values = numbers(4, 50);
    const kvpages_kv_rows rows = rows_of(0, keys.data(), values.data());
    const std::int64_t slot = 6;
    o.write({&rows, 1}, {&slot, 1}, kvpages::Dtype::f32);
    const kvpages_block_copy swap[]{{1, 2}, {2, 1}};
    o.copy_blocks({swap, 2});
    std::vector<float> out[2]{std::vector<float>(16), std::vector<float>(16)};
    const kvpages_kv_rows_out room = room_for(0, out[0].data(), out[1].data());
    const std::int32_t block = 2;
    o.gather_blocks({&room, 1}, {&block, 1}, kvpages::Dtype::f32);
    EXPECT_TRUE(std::equal(keys.begin(), keys.end(), out[0].begin() + 8));
    const std::int64_t moved = 10;
    o.gather({&room, 1}, {&moved, 1}, kvpages::Dtype::f32);
    EXPECT_TRUE(std::equal(values.begin(), values.end(), out[1].begin()));
    const std::uint64_t group = 0;
    o.zero_blocks_of({&group, 1}, {&block, 1});
    o.zero_blocks({&block, 1});
    o.gather({&room, 1}, {&moved, 1}, kvpages::Dtype::f32);
    EXPECT_EQ(out[1][0], 0);
    const std::int32_t bad = 3;
    EXPECT_THROW(o.zero_blocks({&bad, 1}), kvpages::Error);
}

// --- hostile use ---------------------------------------------------------------------------------

namespace {

// Full, sliding and state layers of groups of their own.
struct Hostile {
    Model m = model();
    Cache c;
    Ops o;
    Bytes before;
    std::vector<float> keys = numbers(64);

    Hostile() {
        State state;
        state.add(KVPAGES_DTYPE_F32, {32});
        const Backend kernels = backend(packed_nhd);
        add(m, "F", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "W", sliding(8, 4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "S", state.spec(), state_backend());
        Parts parts;
        parts.num_blocks = 3;
        parts.groups = {{{"F"}, 0}, {{"W"}, 0}, {{"S"}, 0}};
        parts.tensors = {{128 * 3, {"F", "W", "S"}, 0, 0}};
        c = cache(plan_from(m, parts));
        o = ops(c);
        before = filled(c);
    }
    ~Hostile() {
        EXPECT_TRUE(bytes(c) == before);
        // And what is right still works.
        must(copy(o, {{0, 1}, {1, 2}, {2, 0}}));
        must(zero(o, {2, 0, 1}));
    }
};

}  // namespace

TEST(OpsHostile, Handles) {
    const Hostile h;
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    kvpages_ops* raw = reinterpret_cast<kvpages_ops*>(8);
    EXPECT_TRUE(fails(kvpages_ops_create(h.c.get(), &config, &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "max_concurrency"));
    EXPECT_EQ(raw, nullptr);
    config.max_concurrency = 1;
    for (const std::int32_t status :
         {kvpages_ops_create(nullptr, &config, &raw), kvpages_ops_create(h.c.get(), nullptr, &raw),
          kvpages_ops_create(h.c.get(), &config, nullptr),
          kvpages_ops_zero_blocks(nullptr, nullptr, 0, nullptr, nullptr),
          kvpages_ops_copy_blocks(nullptr, nullptr, 0, nullptr, 0, nullptr),
          kvpages_ops_write_kv(nullptr, nullptr), kvpages_ops_gather_kv(nullptr, nullptr),
          kvpages_ops_write_kv(h.o.get(), nullptr), kvpages_ops_gather_kv(h.o.get(), nullptr),
          kvpages_ops_zero_blocks(h.o.get(), nullptr, 1, nullptr, nullptr),
          kvpages_ops_copy_blocks(h.o.get(), nullptr, 1, nullptr, 0, nullptr)}) {
        EXPECT_EQ(status, KVPAGES_STATUS_NULL_ARGUMENT);
    }
    config.struct_size = 8;
    EXPECT_TRUE(fails(kvpages_ops_create(h.c.get(), &config, &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "struct_size"));
    kvpages_ops_destroy(nullptr);
}

TEST(OpsHostile, BlockIds) {
    const Hostile h;
    const std::int32_t lowest = std::numeric_limits<std::int32_t>::min();
    const std::int32_t highest = std::numeric_limits<std::int32_t>::max();
    for (const std::int32_t id : {-1, 3, lowest, highest}) {
        const std::string text = std::to_string(id);
        EXPECT_TRUE(fails(zero(h.o, {0, id}), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "block_id_out_of_range", {"entry 1", text, "3 blocks"}));
        EXPECT_TRUE(fails(copy(h.o, {{0, 1}, {id, 2}}), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "block_id_out_of_range", {"entry 1", text}));
        EXPECT_TRUE(fails(copy(h.o, {{0, 1}, {2, id}}), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "block_id_out_of_range", {"entry 1", text}));
    }
    EXPECT_TRUE(fails(zero(h.o, {2, 1, 2}), KVPAGES_STATUS_INVALID_ARGUMENT, "duplicate_block_id",
                      {"entry 2", "block 2"}));
    EXPECT_TRUE(fails(copy(h.o, {{0, 1}, {2, 1}}), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "duplicate_block_id", {"entry 1", "block 1"}));
    EXPECT_TRUE(fails(zero(ops(h.c, 1), {0, 1}), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "too_many_block_ids", {"1"}));
    EXPECT_TRUE(fails(copy(ops(h.c, 1), {{0, 1}, {1, 2}}), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "too_many_block_ids", {"1"}));
    EXPECT_TRUE(fails(copy(h.o, {{0, 1}}, nullptr, 1), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "num_blocks_mismatch", {"3 blocks, not 1"}));
    EXPECT_TRUE(fails(copy(h.o, {{0, 1}}, nullptr, 5), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "copy_not_multiple_of_blocks", {"384", "5"}));
}

TEST(OpsHostile, Selections) {
    const Hostile h;
    const std::vector<std::uint64_t> no_group{3};
    const std::vector<std::size_t> no_layer{3};
    kvpages_block_selection chosen = groups(no_group);
    EXPECT_TRUE(fails(zero(h.o, {0}, &chosen), KVPAGES_STATUS_NOT_FOUND, "not_found",
                      {"group 3", "3 groups"}));
    chosen = layers(no_layer);
    EXPECT_TRUE(fails(copy(h.o, {{0, 1}}, &chosen), KVPAGES_STATUS_NOT_FOUND, "not_found",
                      {"layer 3", "3 layers"}));
    chosen.layers = nullptr;
    EXPECT_EQ(zero(h.o, {0}, &chosen), KVPAGES_STATUS_NULL_ARGUMENT);
    chosen = KVPAGES_BLOCK_SELECTION_INIT;
    chosen.struct_size = 0;
    EXPECT_EQ(zero(h.o, {0}, &chosen), KVPAGES_STATUS_INVALID_ARGUMENT);
}

TEST(OpsHostile, Rows) {
    const Hostile h;
    const float* keys = h.keys.data();
    std::vector<float> room(64);
    const kvpages_kv_rows good = rows_of(0, keys, keys);
    const auto refused = [&](const std::vector<kvpages_kv_rows>& rows, const Slots& slots,
                             std::uint32_t dtype, std::int32_t status, const char* kind,
                             const std::vector<std::string>& words) {
        EXPECT_TRUE(fails(write(h.o, rows, slots, dtype), status, kind, words));
        std::vector<kvpages_kv_rows_out> out;
        for (const kvpages_kv_rows& row : rows) {
            kvpages_kv_rows_out one = room_for(row.layer, row.keys != nullptr ? room.data() : nullptr,
                                               row.values != nullptr ? room.data() : nullptr);
            one.latent_elements = row.latent_elements;
            out.push_back(one);
        }
        EXPECT_TRUE(fails(gather(h.o, out, slots, dtype), status, kind, words));
    };
    const std::uint32_t f32 = KVPAGES_DTYPE_F32;
    for (const std::int64_t slot : {std::int64_t{12}, std::int64_t{-2},
                                    std::numeric_limits<std::int64_t>::max(),
                                    std::numeric_limits<std::int64_t>::min()}) {
        refused({good}, {0, slot}, f32, KVPAGES_STATUS_INVALID_ARGUMENT, "slot_out_of_range",
                {"row 1", std::to_string(slot), "layer F", "12 slots"});
    }
    refused({rows_of(7, keys, keys)}, {0}, f32, KVPAGES_STATUS_NOT_FOUND, "not_found",
            {"layer 7", "3 layers"});
    refused({good, rows_of(1, keys, keys)}, {0}, f32, KVPAGES_STATUS_INVALID_ARGUMENT,
            "layers_of_several_groups", {"F", "W"});
    refused({rows_of(2, keys, keys)}, {0}, f32, KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported",
            {"layer S", "states"});
    refused({rows_of(0, nullptr, keys)}, {0}, f32, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument",
            {"layer F", "keys"});
    refused({rows_of(0, keys, nullptr)}, {0}, f32, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument",
            {"layer F", "values"});
    // An empty list's data() may be NULL.
    must(write(h.o, {rows_of(0, nullptr, nullptr)}, {}, f32));
    must(gather(h.o, {room_for(0, nullptr, nullptr)}, {}, f32));
    refused({good}, {0}, KVPAGES_DTYPE_I32, KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported",
            {"layer F", "int32", "float32"});
    refused({good}, {0}, 99, KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"dtype", "99"});
    kvpages_kv_rows parts = good;
    parts.latent_elements = 2;
    refused({parts}, {0}, f32, KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"layer F", "2"});

    EXPECT_TRUE(fails(write(h.o, {good}, {0}, f32, KVPAGES_DTYPE_F16), KVPAGES_STATUS_UNSUPPORTED,
                      "rows_not_supported", {"fp8_format", "float16"}));
    kvpages_kv_write call = KVPAGES_KV_WRITE_INIT;
    call.dtype = f32;
    call.num_slots = 1;
    EXPECT_EQ(kvpages_ops_write_kv(h.o.get(), &call), KVPAGES_STATUS_NULL_ARGUMENT);
    call.num_slots = 0;
    call.num_layers = 1;
    EXPECT_EQ(kvpages_ops_write_kv(h.o.get(), &call), KVPAGES_STATUS_NULL_ARGUMENT);
    call.num_layers = 0;
    EXPECT_EQ(kvpages_ops_write_kv(h.o.get(), &call), KVPAGES_STATUS_OK);

    const kvpages_kv_rows_out out = room_for(0, room.data(), room.data());
    const std::int32_t ids[]{0, 3};
    const std::int64_t slot = 0;
    kvpages_kv_gather both = KVPAGES_KV_GATHER_INIT;
    both.layers = &out;
    both.num_layers = 1;
    both.dtype = f32;
    both.block_ids = ids;
    both.num_block_ids = 2;
    EXPECT_TRUE(fails(kvpages_ops_gather_kv(h.o.get(), &both), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "block_id_out_of_range", {"entry 1", "3"}));
    both.slots = &slot;
    both.num_slots = 1;
    EXPECT_TRUE(fails(kvpages_ops_gather_kv(h.o.get(), &both), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "slots_and_blocks"));
}

TEST(OpsHostile, ScalesAndModes) {
    const Model m = model();
    kvpages_spec fp8 = full(4, 1, 16, KVPAGES_DTYPE_F8_E4M3FN);
    fp8.quant_mode = KVPAGES_QUANT_MODE_FP8_PER_TENSOR;
    kvpages_spec fp4 = full(4, 1, 16, KVPAGES_DTYPE_U8);
    fp4.quant_mode = KVPAGES_QUANT_MODE_NVFP4;
    add(m, "A", fp8, backend(packed_nhd));
    add(m, "B", fp4, backend(packed_nhd));
    Parts parts;
    parts.num_blocks = 2;
    parts.groups = {{{"A"}, 0}, {{"B"}, 0}};
    parts.tensors = {{page_bytes(fp8) * 2, {"A"}, 0, 0}, {page_bytes(fp4) * 2, {"B"}, 0, 0}};
    const Cache c = cache(plan_from(m, parts));
    const Ops o = ops(c);
    const Bytes before = filled(c);
    const std::vector<float> keys = numbers(16);
    for (const float scale : {-1.0f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        kvpages_kv_rows rows = rows_of(0, keys.data(), keys.data());
        rows.value_scale = scale;
        EXPECT_TRUE(fails(write(o, {rows}, {0}, KVPAGES_DTYPE_F32),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values",
                          {"layer A", "value_scale"}));
    }
    EXPECT_TRUE(fails(write(o, {rows_of(0, keys.data(), keys.data())}, {0}, KVPAGES_DTYPE_F32,
                            KVPAGES_DTYPE_F8_E5M2),
                      KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported",
                      {"layer A", "float8_e4m3fn", "float8_e5m2"}));
    EXPECT_TRUE(fails(write(o, {rows_of(1, keys.data(), keys.data())}, {0}, KVPAGES_DTYPE_F32),
                      KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported", {"layer B", "nvfp4"}));
    EXPECT_TRUE(bytes(c) == before);
}
