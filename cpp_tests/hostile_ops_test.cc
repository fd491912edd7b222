// Operations on blocks and rows that must fail: the status, the kind, what the message says, and
// that no byte of any cache, nor of the room for rows, has changed.
#include "support/api.h"
#include "support/arena.h"
#include "support/refusal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace support;

namespace {

using Ids = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;

constexpr std::int32_t kInvalid = KVPAGES_STATUS_INVALID_ARGUMENT;
constexpr std::int32_t kNull = KVPAGES_STATUS_NULL_ARGUMENT;
constexpr std::int32_t kNotFound = KVPAGES_STATUS_NOT_FOUND;
constexpr std::int32_t kUnsupported = KVPAGES_STATUS_UNSUPPORTED;
constexpr std::int32_t kMax32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMin32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin64 = std::numeric_limits<std::int64_t>::min();

// Layers of three groups in one tensor, a layer of fp8 and a latent beside them, of three blocks
// each, and rows to write and room to read them into.
struct Caches {
    Arena arena;
    Cache cache;
    Ops ops;
    std::vector<float> rows = std::vector<float>(64, 1.5f);
    std::vector<float> room = std::vector<float>(64, -2.5f);

    Caches() {
        const Model m = model();
        const Backend kernels = backend(packed_nhd);
        State state;
        state.add(KVPAGES_DTYPE_F32, {32});
        kvpages_spec fp8 = full(4, 1, 16, KVPAGES_DTYPE_F8_E4M3FN);
        fp8.quant_mode = KVPAGES_QUANT_MODE_FP8_PER_TENSOR;
        const kvpages_spec of_latent = mla(4, 8, KVPAGES_DTYPE_F32);
        add(m, "F", full(4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "W", sliding(8, 4, 1, 4, KVPAGES_DTYPE_F32), kernels);
        add(m, "S", state.spec(), state_backend());
        add(m, "E", fp8, kernels);
        add(m, "L", of_latent, backend(latent));
        Parts parts;
        parts.num_blocks = 3;
        parts.groups = {{{"F"}, 0}, {{"W"}, 0}, {{"S"}, 0}, {{"E"}, 0}, {{"L"}, 0}};
        parts.tensors = {{128 * 3, {"F", "W", "S"}, 0, 0},
                         {page_bytes(fp8) * 3, {"E"}, 0, 0},
                         {page_bytes(of_latent) * 3, {"L"}, 0, 0}};
        cache = support::cache(plan_from(m, parts), arena.memory());
        ops = made();
        unsigned char number = 0;
        for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
            const kvpages_allocation part = allocation(cache, i);
            auto* data = static_cast<unsigned char*>(part.data);
            for (std::uint64_t byte = 0; byte < part.size_bytes; ++byte) data[byte] = ++number;
        }
    }

    Ops made(std::uint64_t max_block_ids = 0) const {
        kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
        config.max_block_ids = max_block_ids;
        config.max_concurrency = 1;
        kvpages_ops* raw = nullptr;
        must(kvpages_ops_create(cache.get(), &config, &raw));
        return Ops(raw);
    }
};

Bytes bytes_of_caches(const Caches& caches) {
    Bytes all;
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(caches.cache.get()); ++i) {
        const kvpages_allocation part = allocation(caches.cache, i);
        append_bytes(all, static_cast<const unsigned char*>(part.data),
                     static_cast<std::size_t>(part.size_bytes));
    }
    append_bytes(all, caches.room.data(), caches.room.size());
    return all;
}

using CachesCase = Case<Caches>;

void expect_refused_by_ops(const std::vector<CachesCase>& cases) {
    Caches caches;
    expect_refused<Caches>(caches, cases, bytes_of_caches);
    // And what is right still works.
    const kvpages_block_copy swap[]{{0, 1}, {1, 0}};
    must(kvpages_ops_copy_blocks(caches.ops.get(), swap, 2, nullptr, 3, nullptr));
    must(kvpages_ops_zero_blocks(caches.ops.get(), Ids{2, 0, 1}.data(), 3, nullptr, nullptr));
}

std::function<std::int32_t(Caches&)> zero(const Ids& ids) {
    return [=](Caches& c) {
        return kvpages_ops_zero_blocks(c.ops.get(), ids.data(), ids.size(), nullptr, nullptr);
    };
}

std::function<std::int32_t(Caches&)> copy(const std::vector<kvpages_block_copy>& copies,
                                          std::uint64_t num_blocks = 0) {
    return [=](Caches& c) {
        return kvpages_ops_copy_blocks(c.ops.get(), copies.data(), copies.size(), nullptr,
                                       num_blocks, nullptr);
    };
}

// Rows of one layer, spoilt, and how they are told.
struct Rows {
    std::size_t layer = 0;
    Slots slots{0, -1, 1};
    std::uint32_t dtype = KVPAGES_DTYPE_F32;
    std::function<void(kvpages_kv_rows_out&)> spoil = [](auto&) {};
    std::function<void(kvpages_kv_gather&)> spoil_call = [](auto&) {};
};

// The same fault in a write and in a gather: the structs agree but for what a gather has besides.
void refuse_rows(std::vector<CachesCase>& cases, const std::string& name, std::int32_t status,
                 const std::string& kind, const Words& words, const Rows& given) {
    const auto call = [given](Caches& c, bool is_write) {
        void* data = is_write ? c.rows.data() : c.room.data();
        // The first layer is good: nothing of it may be stored either.
        kvpages_kv_rows_out rows[2]{};
        rows[0].layer = rows[1].layer = given.layer;
        rows[0].keys = rows[1].keys = data;
        rows[0].values = rows[1].values = given.layer == 4 ? nullptr : data;
        given.spoil(rows[1]);
        kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
        gather.layers = rows;
        gather.num_layers = 2;
        gather.slots = given.slots.data();
        gather.num_slots = given.slots.size();
        gather.dtype = given.dtype;
        given.spoil_call(gather);
        if (!is_write) return kvpages_ops_gather_kv(c.ops.get(), &gather);
        static_assert(sizeof(kvpages_kv_rows) == sizeof(kvpages_kv_rows_out), "the same fields");
        std::vector<kvpages_kv_rows> written(2);
        std::memcpy(written.data(), rows, sizeof rows);
        kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
        const bool is_spoilt = gather.layers != rows;
        const auto* other = reinterpret_cast<const kvpages_kv_rows*>(gather.layers);
        write.layers = is_spoilt ? other : written.data();
        write.num_layers = gather.num_layers;
        write.slots = gather.slots;
        write.num_slots = gather.num_slots;
        write.dtype = gather.dtype;
        write.fp8_format = gather.fp8_format;
        return kvpages_ops_write_kv(c.ops.get(), &write);
    };
    cases.push_back({"write: " + name, status, kind, words, [=](Caches& c) { return call(c, true); }});
    cases.push_back(
        {"gather: " + name, status, kind, words, [=](Caches& c) { return call(c, false); }});
}

}  // namespace

TEST(HostileOps, BlocksToZeroAndCopy) {
    static std::int32_t ids[4]{};
    static std::uint64_t numbers[2]{0, 5};
    static std::size_t layers[2]{0, 5};
    const char* range = "block_id_out_of_range";
    const char* twice = "duplicate_block_id";
    std::vector<CachesCase> cases{
        {"zero twice", kInvalid, twice, {"entry 2", "block 0"}, zero({0, 1, 0})},
        {"zero more than there are", kInvalid, twice, {}, zero({0, 1, 2, 0})},
        {"two copies to one", kInvalid, twice, {"entry 2", "block 1"}, copy({{0, 1}, {1, 2}, {2, 1}})},
        {"onto itself and over it", kInvalid, twice, {"entry 1", "block 0"}, copy({{0, 0}, {1, 0}})},
        {"fewer blocks", kInvalid, "num_blocks_mismatch", {"3 blocks", "1"}, copy({{0, 1}}, 1)},
        {"most blocks", kInvalid, "copy_not_multiple_of_blocks", {"3 blocks"},
         copy({}, UINT64_MAX)},
        {"zero NULL", kNull, "null_argument", {"block_ids"},
         [](Caches& c) { return kvpages_ops_zero_blocks(c.ops.get(), nullptr, 1, nullptr, nullptr); }},
        {"zero odd", kInvalid, "misaligned_pointer", {"block_ids"},
         [](Caches& c) { return kvpages_ops_zero_blocks(c.ops.get(), odd(ids), 1, nullptr, nullptr); }},
        {"zero past memory", kInvalid, "overflow", {"block_ids"},
         [](Caches& c) { return kvpages_ops_zero_blocks(c.ops.get(), ids, SIZE_MAX, nullptr, nullptr); }},
        {"copy odd", kInvalid, "misaligned_pointer", {"copies"},
         [](Caches& c) {
             const auto* odd_copies = reinterpret_cast<const kvpages_block_copy*>(odd(ids));
             return kvpages_ops_copy_blocks(c.ops.get(), odd_copies, 1, nullptr, 0, nullptr);
         }},
        {"too many", kInvalid, "too_many_block_ids", {"1"},
         [](Caches& c) {
             return kvpages_ops_zero_blocks(c.made(1).get(), Ids{0, 1}.data(), 2, nullptr, nullptr);
         }},
    };
    for (const std::int32_t id : {-1, 3, kMin32, kMax32}) {
        const Words words{"entry 1", std::to_string(id), "3 blocks"};
        cases.push_back({"zero", kInvalid, range, words, zero({0, id})});
        cases.push_back({"from", kInvalid, range, words, copy({{0, 1}, {id, 2}})});
        cases.push_back({"to", kInvalid, range, words, copy({{0, 1}, {1, id}})});
    }
    using Spoil = void (*)(kvpages_block_selection&);
    const auto selection = [&cases](const char* name, std::int32_t status, const char* kind,
                                    const Words& words, Spoil spoil) {
        cases.push_back({name, status, kind, words, [spoil](Caches& c) {
                             kvpages_block_selection chosen = KVPAGES_BLOCK_SELECTION_INIT;
                             spoil(chosen);
                             return kvpages_ops_zero_blocks(c.ops.get(), ids, 1, &chosen, nullptr);
                         }});
    };
    selection("group 5", kNotFound, "not_found", {"group 5", "5 groups"}, [](auto& s) {
        s.groups = numbers;
        s.num_groups = 2;
    });
    selection("layer 5", kNotFound, "not_found", {"layer 5", "5 layers"}, [](auto& s) {
        s.layers = layers;
        s.num_layers = 2;
    });
    selection("groups NULL", kNull, "null_argument", {"groups"}, [](auto& s) { s.num_groups = 1; });
    selection("layers odd", kInvalid, "misaligned_pointer", {"layers"}, [](auto& s) {
        s.layers = odd(layers);
        s.num_layers = 1;
    });
    selection("layers past memory", kInvalid, "overflow", {"layers"}, [](auto& s) {
        s.layers = layers;
        s.num_layers = SIZE_MAX;
    });
    selection("size", kInvalid, "struct_size", {}, [](auto& s) { s.struct_size = 8; });
    expect_refused_by_ops(cases);
}

TEST(HostileOps, RowsToWriteAndGather) {
    std::vector<CachesCase> cases;
    for (const std::int64_t slot : {std::int64_t{12}, std::int64_t{-2}, kMax64, kMin64}) {
        refuse_rows(cases, std::to_string(slot), kInvalid, "slot_out_of_range",
                    {"row 2", std::to_string(slot), "layer F", "12 slots"}, {0, {0, -1, slot}});
    }
    const std::uint64_t strides[]{std::uint64_t{1} << 63, std::uint64_t{1} << 62,
                                  (std::uint64_t{1} << 62) + 8, UINT64_MAX, UINT64_MAX / 4 + 1,
                                  std::uint64_t{1} << 61};
    for (const std::uint64_t stride : strides) {
        const std::string text = std::to_string(stride);
        const Words keys{"layer F", "3 rows", "keys", text};
        const Words values{"layer F", "3 rows", "values", text};
        const auto refuse = [&](const std::string& name, const Words& words,
                                std::uint64_t kvpages_kv_rows_out::*field) {
            refuse_rows(cases, name + " " + text, kInvalid, "overflow", words,
                        {0, {0, -1, 1}, KVPAGES_DTYPE_F32, [=](auto& r) { r.*field = stride; }});
        };
        refuse("token of keys", keys, &kvpages_kv_rows_out::key_token_stride);
        refuse("head of keys", keys, &kvpages_kv_rows_out::key_head_stride);
        refuse("token of values", values, &kvpages_kv_rows_out::value_token_stride);
        refuse("head of values", values, &kvpages_kv_rows_out::value_head_stride);
    }
    const Slots slots{0, 1};
    refuse_rows(cases, "keys NULL", kNull, "null_argument", {"layer F", "keys"},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.keys = nullptr; }});
    refuse_rows(cases, "values NULL", kNull, "null_argument", {"layer F", "values"},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.values = nullptr; }});
    refuse_rows(cases, "values of a latent", kInvalid, "rows_not_stored", {"layer L", "values"},
                {4, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.values = r.keys; }});
    refuse_rows(cases, "a second part that is missing", kNull, "null_argument", {"layer L", "values"},
                {4, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.latent_elements = 5; }});
    refuse_rows(cases, "longer than a latent", kInvalid, "bad_values", {"layer L", "9", "8"},
                {4, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.latent_elements = 9; }});
    refuse_rows(cases, "longest", kInvalid, "bad_values", {"layer L"},
                {4, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.latent_elements = UINT64_MAX; }});
    refuse_rows(cases, "parts of a key", kInvalid, "bad_values", {"layer F", "1"},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.latent_elements = 1; }});
    refuse_rows(cases, "another group", kInvalid, "layers_of_several_groups", {"F", "W", "0", "1"},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.layer = 1; }});
    refuse_rows(cases, "no layer", kNotFound, "not_found", {"layer 5", "5 layers"},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.layer = 5; }});
    refuse_rows(cases, "the last layer", kNotFound, "not_found", {},
                {0, slots, KVPAGES_DTYPE_F32, [](auto& r) { r.layer = SIZE_MAX; }});
    refuse_rows(cases, "a state", kUnsupported, "rows_not_supported", {"layer S"}, {2, slots});
    for (const std::uint32_t dtype : {KVPAGES_DTYPE_I32, KVPAGES_DTYPE_F64, KVPAGES_DTYPE_BOOL}) {
        refuse_rows(cases, "type", kUnsupported, "rows_not_supported", {"layer F"},
                    {0, slots, dtype});
    }
    for (const std::uint32_t dtype : {0u, 99u, UINT32_MAX}) {
        refuse_rows(cases, "no type", kInvalid, "unknown_value", {"dtype", std::to_string(dtype)},
                    {0, slots, dtype});
    }
    for (const float scale : {-1.0f, -0.001f, std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        refuse_rows(cases, "scale of keys", kInvalid, "bad_values", {"layer E", "key_scale"},
                    {3, slots, KVPAGES_DTYPE_F32, [=](auto& r) { r.key_scale = scale; }});
        refuse_rows(cases, "scale of values", kInvalid, "bad_values", {"layer E", "value_scale"},
                    {3, slots, KVPAGES_DTYPE_F32, [=](auto& r) { r.value_scale = scale; }});
    }
    const auto call = [&](const char* name, std::int32_t status, const char* kind,
                          const Words& words, std::function<void(kvpages_kv_gather&)> spoil) {
        Rows rows;
        rows.spoil_call = std::move(spoil);
        refuse_rows(cases, name, status, kind, words, rows);
    };
    call("slots NULL", kNull, "null_argument", {"slots"}, [](auto& g) { g.slots = nullptr; });
    call("slots odd", kInvalid, "misaligned_pointer", {"slots"},
         [](auto& g) { g.slots = odd(g.slots); });
    call("slots past memory", kInvalid, "overflow", {"slots"},
         [](auto& g) { g.num_slots = SIZE_MAX; });
    call("layers NULL", kNull, "null_argument", {"layers"}, [](auto& g) { g.layers = nullptr; });
    call("layers odd", kInvalid, "misaligned_pointer", {"layers"},
         [](auto& g) { g.layers = odd(g.layers); });
    call("layers past memory", kInvalid, "overflow", {"layers"},
         [](auto& g) { g.num_layers = SIZE_MAX; });
    call("no fp8", kInvalid, "unknown_value", {"fp8_format"}, [](auto& g) { g.fp8_format = 77; });
    call("another fp8", kUnsupported, "rows_not_supported", {"fp8_format"},
         [](auto& g) { g.fp8_format = KVPAGES_DTYPE_F16; });
    expect_refused_by_ops(cases);
}

TEST(HostileOps, WhatOperationsTake) {
    Caches c;
    kvpages_ops* o = c.ops.get();
    const Bytes before = bytes_of_caches(c);
    // Nothing, a block onto itself, only pads, and scales that are not used.
    must(kvpages_ops_zero_blocks(o, nullptr, 0, nullptr, nullptr));
    must(kvpages_ops_copy_blocks(o, nullptr, 0, nullptr, 0, nullptr));
    must(copy({{1, 1}, {0, 0}, {2, 2}}, 3)(c));
    const kvpages_block_selection none = KVPAGES_BLOCK_SELECTION_INIT;
    must(kvpages_ops_zero_blocks(o, Ids{0, 1, 2}.data(), 3, &none, nullptr));
    kvpages_kv_rows rows{};
    rows.keys = rows.values = c.rows.data();
    rows.key_scale = std::numeric_limits<float>::quiet_NaN();
    const std::int64_t slots[]{-1, -1, 5, 5};
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    write.layers = &rows;
    write.num_layers = 1;
    write.slots = slots;
    write.num_slots = 2;
    write.dtype = KVPAGES_DTYPE_F32;
    must(kvpages_ops_write_kv(o, &write));
    EXPECT_TRUE(bytes_of_caches(c) == before);
    // Two rows of one slot leave either, and nothing besides.
    write.num_slots = 4;
    must(kvpages_ops_write_kv(o, &write));
    Bytes expected = before;
    std::memcpy(expected.data() + 5 * 32, c.rows.data(), 32);
    EXPECT_TRUE(bytes_of_caches(c) == expected);
}

TEST(HostileOps, OperationsKeepTheCache) {
    Caches c;
    const kvpages_allocation first = allocation(c.cache, 0);
    const std::size_t live = c.arena.live();
    c.cache.reset();
    EXPECT_EQ(c.arena.live(), live);
    const auto* data = static_cast<const unsigned char*>(first.data);
    const Bytes before(data, data + first.size_bytes);
    must(copy({{0, 1}, {1, 2}, {2, 0}}, 3)(c));
    must(zero({1})(c));
    Bytes expected = before;
    ASSERT_GE(expected.size(), 3u * 128);
    std::copy_n(before.begin() + 256, 128, expected.begin());
    std::fill_n(expected.begin() + 128, 128, static_cast<unsigned char>(0));
    std::copy_n(before.begin() + 128, 128, expected.begin() + 256);
    EXPECT_TRUE(Bytes(data, data + first.size_bytes) == expected);
    c.ops.reset();
    EXPECT_EQ(c.arena.live(), 0u);
    EXPECT_EQ(c.arena.wrong, 0u);
}

// T13 by the library's own write: -1 is no token, and neither the last slot.
TEST(HostileOps, T13_APadSlotIsNeverWritten) {
    const Model m = model();
    add(m, "A", full(16, 1, 4, KVPAGES_DTYPE_F32), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 4));
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(c.get(), &config, &raw));
    const Ops ops(raw);
    auto* cells = static_cast<float*>(allocation(c, 0).data);
    std::fill_n(cells, 64 * 8, 7.0f);
    const std::vector<float> token(16, 1.0f);
    kvpages_kv_rows rows{};
    rows.keys = rows.values = token.data();
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    write.layers = &rows;
    write.num_layers = 1;
    write.dtype = KVPAGES_DTYPE_F32;
    const std::int64_t slots[]{-1, -1};
    write.slots = slots;
    write.num_slots = 2;
    must(kvpages_ops_write_kv(raw, &write));
    EXPECT_EQ(std::vector<float>(cells, cells + 64 * 8), std::vector<float>(64 * 8, 7.0f));
}
