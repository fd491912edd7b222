// Calls of a step that must fail: the status, the kind, what the message says, and that all memory
// a step reads or writes is as it was, what was staged included.
#include "support/api.h"
#include "support/garbage.h"
#include "support/refusal.h"
#include "support/tables.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
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
constexpr std::int32_t kMax32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMin32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin64 = std::numeric_limits<std::int64_t>::min();

// --- tables --------------------------------------------------------------------------------------

// Three requests and six tokens; two groups, of 3 and of 2 blocks a row. What was staged last is
// not applied.
TablesHandle tables_in_use() {
    const kvpages_table_group groups[]{{16, 16, 3, 0, 0}, {32, 16, 2, 0, 0}};
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = groups;
    config.num_groups = 2;
    config.max_requests = 3;
    config.max_tokens = 6;
    config.num_blocks = 8;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create(&config, &raw));
    TablesHandle made(raw);
    const std::int32_t ids[]{1, 2, 3, 4, 5};
    must(kvpages_tables_append(raw, 0, 0, ids, 2));
    must(kvpages_tables_append(raw, 0, 1, ids + 2, 1));
    must(kvpages_tables_append(raw, 2, 0, ids + 4, 1));
    must(kvpages_tables_apply(raw, nullptr));
    const std::int32_t requests[]{2, 0};
    const std::int32_t query_start[]{0, 1, 3};
    const std::int64_t positions[]{7, 30, 31};
    must(kvpages_tables_gather(raw, requests, 2, 3, nullptr));
    must(kvpages_tables_map_slots(raw, requests, 2, query_start, positions, 3, nullptr));
    must(kvpages_tables_append(raw, 0, 0, ids + 3, 1));
    must(kvpages_tables_append(raw, 1, 1, ids + 4, 1));
    must(kvpages_tables_clear(raw, 2));
    return made;
}

using TablesCase = Case<TablesHandle>;

// Also what was staged must be as it was: it is applied, and compared to tables that were not
// mistreated.
void expect_refused_by_tables(const std::vector<TablesCase>& cases) {
    TablesHandle used = tables_in_use();
    const TablesHandle twin = tables_in_use();
    expect_refused<TablesHandle>(used, cases, bytes_of_tables);
    for (const TablesHandle* each : {&std::as_const(used), &twin}) {
        must(kvpages_tables_apply(each->get(), nullptr));
        const std::int32_t requests[]{0, 1, 2};
        must(kvpages_tables_gather(each->get(), requests, 3, 3, nullptr));
    }
    EXPECT_TRUE(bytes_of_tables(used) == bytes_of_tables(twin)) << "what was staged has changed";
}

struct Writes {
    Ids requests;
    std::vector<std::uint8_t> overwrite;  // empty: none
    std::vector<std::size_t> starts;
    Ids ids;

    kvpages_row_writes get() const {
        kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
        writes.requests = requests.data();
        writes.num_writes = requests.size();
        writes.overwrite = overwrite.empty() ? nullptr : overwrite.data();
        writes.starts = starts.data();
        writes.block_ids = ids.data();
        writes.num_block_ids = ids.size();
        return writes;
    }
    std::int32_t operator()(const TablesHandle& tables) const {
        const kvpages_row_writes writes = get();
        return kvpages_tables_write(tables.get(), &writes);
    }
};

std::function<std::int32_t(TablesHandle&)> writes(const Writes& all) {
    return [all](TablesHandle& t) { return all(t); };
}

std::function<std::int32_t(TablesHandle&)> append(std::size_t request, std::size_t group,
                                                  const Ids& ids) {
    return [=](TablesHandle& t) {
        return kvpages_tables_append(t.get(), request, group, ids.data(), ids.size());
    };
}

std::function<std::int32_t(TablesHandle&)> overwrite(std::size_t request, std::size_t group,
                                                     const Ids& ids) {
    return [=](TablesHandle& t) {
        return kvpages_tables_overwrite(t.get(), request, group, ids.data(), ids.size());
    };
}

std::function<std::int32_t(TablesHandle&)> map(const Ids& requests, const Ids& query_start,
                                               const Slots& positions) {
    return [=](TablesHandle& t) {
        return kvpages_tables_map_slots(t.get(), requests.data(), requests.size(),
                                        query_start.data(), positions.data(), positions.size(),
                                        nullptr);
    };
}

std::function<std::int32_t(TablesHandle&)> gather(const Ids& requests, std::size_t num_rows) {
    return [=](TablesHandle& t) {
        return kvpages_tables_gather(t.get(), requests.data(), requests.size(), num_rows, nullptr);
    };
}

}  // namespace

TEST(HostileStep, RowsThatOverflow) {
    const char* kind = "table_row_overflow";
    expect_refused_by_tables({
        {"a row that is full once staged", kInvalid, kind,
         {"request 0", "group 0", "holds 3 blocks", "1 more", "its 3"}, append(0, 0, {5})},
        {"more than an empty row", kInvalid, kind, {"request 2", "group 1", "holds 0", "3 more"},
         append(2, 1, {1, 2, 3})},
        {"replacing by too many", kInvalid, kind, {"request 0", "group 1", "3 more"},
         overwrite(0, 1, {1, 2, 3})},
        {"two writes, each of which fits", kInvalid, kind, {"request 1", "group 1", "holds 2"},
         writes({{1, 1}, {}, {0, 0, 1, 1, 2}, {1, 2}})},
        {"replaced, then added to", kInvalid, kind, {"request 0", "group 1", "holds 2", "1 more"},
         writes({{0, 0}, {1, 0}, {0, 0, 2, 2, 3}, {1, 2, 3}})},
        {"two requests, the second one too long", kInvalid, kind, {"request 2", "group 0"},
         writes({{1, 2}, {}, {0, 3, 3, 7, 7}, {1, 2, 3, 4, 5, 6, 7}})},
        {"another group's block is good", kInvalid, kind, {"request 0", "group 0"},
         writes({{0}, {}, {0, 1, 2}, {1, 2}})},
    });
}

TEST(HostileStep, BlockIds) {
    std::vector<TablesCase> cases;
    for (const std::int32_t id : {-1, 8, kMax32, kMin32}) {
        const Words words{std::to_string(id), "request 1", "group 0", "0 to 8"};
        const std::string name = std::to_string(id);
        const char* kind = "block_id_out_of_range";
        cases.push_back({"append " + name, kInvalid, kind, words, append(1, 0, {1, id})});
        cases.push_back({"overwrite " + name, kInvalid, kind, words, overwrite(1, 0, {id})});
        cases.push_back({"write " + name, kInvalid, kind, words,
                         writes({{0, 1}, {1, 0}, {0, 0, 1, 3, 3}, {1, 2, id}})});
    }
    expect_refused_by_tables(cases);
}

TEST(HostileStep, RequestsAndGroups) {
    std::vector<TablesCase> cases{
        {"write -1", kNotFound, "unknown_request", {"-1"}, writes({{1, -1}, {}, {0, 0, 0, 0, 0}, {}})},
        {"write 3", kNotFound, "unknown_request", {"3"}, writes({{3}, {}, {0, 0, 0}, {}})},
        {"gather -2", kNotFound, "unknown_request", {"-2"}, gather({0, -2}, 2)},
        {"gather 3", kNotFound, "unknown_request", {"3"}, gather({0, 3}, 2)},
        {"gather lowest", kNotFound, "unknown_request", {}, gather({kMin32}, 1)},
        {"map 3", kNotFound, "unknown_request", {"3"}, map({0, 3}, {0, 0, 1}, {0})},
        {"map -2", kNotFound, "unknown_request", {"-2"}, map({-2}, {0, 1}, {0})},
        {"map highest", kNotFound, "unknown_request", {}, map({kMax32}, {0, 1}, {0})},
        {"group of append", kNotFound, "unknown_group", {"group 2", "2 groups"}, append(0, 2, {1})},
        {"group of overwrite", kNotFound, "unknown_group", {}, overwrite(0, SIZE_MAX, {1})},
        {"group of truncate", kNotFound, "unknown_group", {"group 2"},
         [](TablesHandle& t) { return kvpages_tables_truncate(t.get(), 0, 2, 0); }},
        {"blocks to keep", kInvalid, "table_row_too_short", {"request 0", "group 1", "1 blocks", "2"},
         [](TablesHandle& t) { return kvpages_tables_truncate(t.get(), 0, 1, 2); }},
        {"as many blocks as there are numbers", kInvalid, "table_row_too_short", {"request 0"},
         [](TablesHandle& t) { return kvpages_tables_truncate(t.get(), 0, 0, SIZE_MAX); }},
    };
    for (const std::size_t request : {std::size_t{3}, SIZE_MAX, std::size_t{1} << 32}) {
        const std::string name = std::to_string(request);
        const char* kind = "unknown_request";
        cases.push_back({"append " + name, kNotFound, kind, {}, append(request, 0, {})});
        cases.push_back({"truncate " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_truncate(t.get(), request, 0, 0);
                         }});
        cases.push_back({"move from " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_move(t.get(), request, 0);
                         }});
        cases.push_back({"move to " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_move(t.get(), 0, request);
                         }});
        cases.push_back({"move to itself " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_move(t.get(), request, request);
                         }});
        cases.push_back({"swap " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_swap(t.get(), request, request);
                         }});
        cases.push_back({"clear " + name, kNotFound, kind, {}, [=](TablesHandle& t) {
                             return kvpages_tables_clear(t.get(), request);
                         }});
    }
    expect_refused_by_tables(cases);
}

TEST(HostileStep, BatchesAndBoundaries) {
    const char* batch = "batch_out_of_range";
    const char* order = "boundaries_not_ascending";
    expect_refused_by_tables({
        {"fewer rows than requests", kInvalid, batch, {"2 requests", "1 rows"}, gather({0, 1}, 1)},
        {"more rows than there are", kInvalid, batch, {"4", "3"}, gather({0}, 4)},
        {"dummies", kInvalid, batch, {"4", "3"},
         [](TablesHandle& t) { return kvpages_tables_gather_dummies(t.get(), 4, nullptr); }},
        {"too many requests", kInvalid, batch, {"4", "3"}, map({0, 1, 2, 0}, {0, 0, 0, 0, 0}, {})},
        {"too many tokens", kInvalid, batch, {"7", "6"}, map({0}, {0, 7}, Slots(7))},
        {"does not start at 0", kInvalid, order, {"query_start[0]", "1"}, map({0}, {1, 1}, {0})},
        {"negative start", kInvalid, order, {"query_start[0]", "-1"}, map({0}, {-1, 0}, {0})},
        {"goes back", kInvalid, order, {"query_start[2]", "1"}, map({0, 1}, {0, 2, 1}, {0, 1})},
        {"ends below 0", kInvalid, order, {}, map({0}, {0, kMin32}, {0})},
        {"leaves the positions", kInvalid, order, {"query_start[1]", "2", "at most 1"},
         map({0}, {0, 2}, {0})},
        {"leaves them far", kInvalid, order, {}, map({0, 1}, {0, kMax32, 1}, {0})},
        {"places do not start at 0", kInvalid, order, {"starts[0]"},
         writes({{0}, {}, {1, 1, 1}, {1}})},
        {"places go back", kInvalid, order, {"starts[2]"}, writes({{0}, {}, {0, 1, 0}, {1}})},
        {"places leave the ids", kInvalid, order, {"starts[2]"}, writes({{0}, {}, {0, 0, 2}, {1}})},
        {"places leave all memory", kInvalid, order, {"starts[1]"},
         writes({{0}, {}, {0, SIZE_MAX, SIZE_MAX}, {1}})},
    });
}

TEST(HostileStep, PointersAndStructsOfTables) {
    static std::int32_t ids[4]{0, 1, 0, 0};
    static std::int64_t positions[4]{};
    static std::size_t starts[8]{};
    std::vector<TablesCase> cases{
        {"ids NULL", kNull, "null_argument", {"block_ids"},
         [](TablesHandle& t) { return kvpages_tables_append(t.get(), 0, 0, nullptr, 1); }},
        {"ids odd", kInvalid, "misaligned_pointer", {"block_ids"},
         [](TablesHandle& t) { return kvpages_tables_overwrite(t.get(), 0, 0, odd(ids), 1); }},
        {"ids past memory", kInvalid, "overflow", {"block_ids"},
         [](TablesHandle& t) { return kvpages_tables_append(t.get(), 0, 0, ids, SIZE_MAX / 4); }},
        {"requests odd", kInvalid, "misaligned_pointer", {"requests"},
         [](TablesHandle& t) { return kvpages_tables_gather(t.get(), odd(ids), 1, 1, nullptr); }},
        {"requests past memory", kInvalid, "overflow", {"requests"},
         [](TablesHandle& t) { return kvpages_tables_gather(t.get(), ids, SIZE_MAX, SIZE_MAX,
                                                            nullptr); }},
        {"starts odd", kInvalid, "misaligned_pointer", {"query_start"},
         [](TablesHandle& t) {
             return kvpages_tables_map_slots(t.get(), ids, 1, odd(ids), positions, 1, nullptr);
         }},
        {"starts NULL for no request", kNull, "null_argument", {"query_start"},
         [](TablesHandle& t) {
             return kvpages_tables_map_slots(t.get(), nullptr, 0, nullptr, nullptr, 0, nullptr);
         }},
        {"positions odd", kInvalid, "misaligned_pointer", {"positions"},
         [](TablesHandle& t) {
             return kvpages_tables_map_slots(t.get(), ids, 1, ids, odd(positions), 1, nullptr);
         }},
        {"positions NULL", kNull, "null_argument", {"positions"},
         [](TablesHandle& t) { return kvpages_tables_map_slots(t.get(), ids, 1, ids, nullptr, 1,
                                                               nullptr); }},
        {"writes odd", kInvalid, "misaligned_pointer", {"kvpages_row_writes"},
         [](TablesHandle& t) {
             kvpages_row_writes all[2]{KVPAGES_ROW_WRITES_INIT, KVPAGES_ROW_WRITES_INIT};
             return kvpages_tables_write(t.get(), odd(&all[0]));
         }},
        {"a field that nobody knows", kInvalid, "struct_size", {"does not know"},
         [](TablesHandle& t) {
             struct {
                 kvpages_row_writes known;
                 std::uint64_t unknown;
             } newer{KVPAGES_ROW_WRITES_INIT, 1};
             newer.known.struct_size = sizeof newer;
             newer.known.starts = starts;
             return kvpages_tables_write(t.get(), &newer.known);
         }},
    };
    using Spoil = void (*)(kvpages_row_writes&);
    const auto spoilt = [&cases](const char* name, std::int32_t status, const char* kind,
                                 const char* word, Spoil spoil) {
        cases.push_back({name, status, kind, {word}, [spoil](TablesHandle& t) {
                             const Writes good{{0}, {1}, {0, 0, 0}, {1}};
                             kvpages_row_writes given = good.get();
                             spoil(given);
                             return kvpages_tables_write(t.get(), &given);
                         }});
    };
    spoilt("size 0", kInvalid, "struct_size", "0", [](auto& w) { w.struct_size = 0; });
    spoilt("size - 1", kInvalid, "struct_size", "least", [](auto& w) { w.struct_size -= 1; });
    spoilt("size huge", kInvalid, "struct_size", "4097", [](auto& w) { w.struct_size = 4097; });
    spoilt("write NULL", kNull, "null_argument", "requests", [](auto& w) { w.requests = nullptr; });
    spoilt("write odd", kInvalid, "misaligned_pointer", "requests",
           [](auto& w) { w.requests = odd(w.requests); });
    spoilt("places NULL", kNull, "null_argument", "starts", [](auto& w) { w.starts = nullptr; });
    spoilt("places odd", kInvalid, "misaligned_pointer", "starts",
           [](auto& w) { w.starts = odd(w.starts); });
    spoilt("blocks NULL", kNull, "null_argument", "block_ids",
           [](auto& w) { w.block_ids = nullptr; });
    spoilt("blocks odd", kInvalid, "misaligned_pointer", "block_ids",
           [](auto& w) { w.block_ids = odd(w.block_ids); });
    spoilt("writes past memory", kInvalid, "overflow", "entries",
           [](auto& w) { w.num_writes = SIZE_MAX; });
    expect_refused_by_tables(cases);

    const TablesHandle t = tables_in_use();
    Out<kvpages_tensor> untouched;
    EXPECT_TRUE(fails(kvpages_tables_get_table(t.get(), 0, odd(&untouched)), kInvalid,
                      "misaligned_pointer", {"out"}));
    Out<kvpages_tensor> tensor;
    EXPECT_TRUE(fails(kvpages_tables_get_slots(t.get(), SIZE_MAX, &tensor), kNotFound,
                      "unknown_group"));
    EXPECT_TRUE(tensor.is_zero());
    Info<kvpages_table_info> info;
    EXPECT_TRUE(fails(kvpages_tables_get_info(t.get(), 2, &info), kNotFound, "unknown_group"));
    EXPECT_TRUE(info.is_zero());
    Out<std::size_t> count;
    EXPECT_TRUE(fails(kvpages_tables_num_entries(t.get(), 0, 2, &count), kNotFound,
                      "unknown_group"));
    EXPECT_TRUE(count.is_zero());
}

TEST(HostileStep, WhatTablesTake) {
    const TablesHandle used = tables_in_use();
    const TablesHandle twin = tables_in_use();
    kvpages_tables* t = used.get();
    // Nothing at all, and a row with itself.
    must(kvpages_tables_append(t, 0, 0, nullptr, 0));
    must(kvpages_tables_move(t, 0, 0));
    must(kvpages_tables_swap(t, 1, 1));
    must(kvpages_tables_truncate(t, 0, 0, 3));
    must(Writes{{}, {}, {0}, {}}(used));
    EXPECT_TRUE(bytes_of_tables(used) == bytes_of_tables(twin));
    must(kvpages_tables_apply(t, nullptr));
    must(kvpages_tables_apply(twin.get(), nullptr));
    // One request twice is what a batch of drafts may be.
    must(kvpages_tables_gather(t, Ids{0, 0, -1}.data(), 3, 3, nullptr));
    kvpages_tensor input{};
    must(kvpages_tables_get_input_table(t, 0, &input));
    const auto* rows = static_cast<const std::int32_t*>(input.data);
    EXPECT_EQ(Ids(rows, rows + 9), (Ids{1, 2, 4, 1, 2, 4, 0, 0, 0}));
    // Positions that no block holds, in both ways of walking over them.
    const Slots positions{kMin64, -1, 47, 48, kMax64, std::int64_t{1} << 32};
    must(map({0, -1}, {0, 6, 6}, positions)(const_cast<TablesHandle&>(used)));
    kvpages_tensor slots{};
    must(kvpages_tables_get_slots(t, 0, &slots));
    const auto* mapped = static_cast<const std::int64_t*>(slots.data);
    EXPECT_EQ(Slots(mapped, mapped + 6), (Slots{-1, -1, 79, -1, -1, -1}));
    must(kvpages_tables_gather_dummies(t, 3, nullptr));
    must(kvpages_tables_map_slots(t, nullptr, 0, Ids{0}.data(), nullptr, 0, nullptr));
    must(kvpages_tables_map_dummies(t, nullptr));
    EXPECT_EQ(Ids(rows, rows + 9), Ids(9, 0));
    EXPECT_EQ(Slots(mapped, mapped + 6), Slots(6, -1));
}

// --- builders and steps --------------------------------------------------------------------------

namespace {

using Attention =
    std::unique_ptr<kvpages_attention, Destroy<kvpages_attention, kvpages_attention_destroy>>;

// Two cache groups with three attention groups, and an engine whose callbacks are numbered: one of them fails.
class Engine {
public:
    Backend kernels = backend(packed_nhd);
    Model layers = model();
    Plan planned;
    int calls = 0;
    int fail_at = -1;
    std::uint32_t support = KVPAGES_GRAPH_SUPPORT_ALWAYS;
    std::vector<int> created;
    std::vector<int> destroyed;
    std::function<void()> meddle = [] {};

    Engine() {
        add(layers, "F", full(16, 1, 8), kernels, 4);
        add(layers, "G", full(16, 1, 8), kernels, 8);
        add(layers, "W", sliding(32, 16, 1, 8), kernels, 4);
        add(layers, "X", sliding(32, 16, 1, 8), kernels, 4);
        planned = plan_of_blocks(layers, 4);
        for (int c = 0; c < 2; ++c) {
            tables[c] = {table, table_shape, table_strides, KVPAGES_DTYPE_I32, 2};
            mappings[c] = {slots, slots_shape, slots_strides, KVPAGES_DTYPE_I64, 1};
        }
        step.num_requests = 2;
        step.num_tokens = 4;
        step.max_query_len = 3;
        step.query_start = step.query_start_host = query_start;
        step.seq_lens = query_start + 1;
        step.block_tables = tables;
        step.slot_mappings = mappings;
        step.num_block_tables = step.num_slot_mappings = step.num_cache_groups = 2;
    }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::int32_t create(kvpages_attention** out) {
        kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
        callbacks.user = this;
        callbacks.create = [](void* user, const kvpages_builder_info*, void** made) {
            auto& engine = *static_cast<Engine*>(user);
            const int number = static_cast<int>(engine.created.size());
            *made = &engine.names[number];
            const std::int32_t code = engine.answer();
            if (code == 0) engine.created.push_back(number);
            return code;
        };
        callbacks.graph_support = [](void* user, void*, std::uint32_t* out_support) {
            *out_support = static_cast<Engine*>(user)->support;
            return static_cast<Engine*>(user)->answer();
        };
        callbacks.get_workspace = [](void* user, void* builder, void** workspace) {
            // The second one has one to give.
            auto& engine = *static_cast<Engine*>(user);
            if (builder == &engine.names[1]) *workspace = builder;
            return engine.answer();
        };
        callbacks.set_workspace = [](void* user, void*, void* workspace) {
            auto& engine = *static_cast<Engine*>(user);
            EXPECT_EQ(workspace, &engine.names[1]);
            return engine.answer();
        };
        callbacks.build = build_one;
        callbacks.build_for_capture = build_one;
        callbacks.destroy = [](void* user, void* builder) {
            auto& engine = *static_cast<Engine*>(user);
            engine.meddle();
            engine.destroyed.push_back(static_cast<int>(static_cast<char*>(builder) - engine.names));
        };
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        config.callbacks = &callbacks;
        config.num_builders = 2;
        return kvpages_attention_create(planned.get(), &config, out);
    }
    Attention made() {
        kvpages_attention* raw = nullptr;
        must(create(&raw));
        return Attention(raw);
    }

    char names[16]{};
    std::int32_t query_start[3] = {0, 3, 4};
    std::int32_t table[6] = {};
    std::int64_t slots[6] = {};
    std::int64_t table_shape[2] = {2, 3}, table_strides[2] = {3, 1};
    std::int64_t slots_shape[1] = {6}, slots_strides[1] = {1};
    kvpages_tensor tables[2];
    kvpages_tensor mappings[2];
    kvpages_step step = KVPAGES_STEP_INIT;

private:
    std::int32_t answer() {
        meddle();
        return calls++ == fail_at ? 7 : 0;
    }
    static std::int32_t build_one(void* user, void* builder, const kvpages_common_metadata*, void*,
                                  void** out) {
        auto& engine = *static_cast<Engine*>(user);
        *out = static_cast<char*>(builder) + engine.calls;
        return engine.answer();
    }
};

// What the last step of either builder left.
Bytes bytes_of_metadata(const Attention& attention) {
    Bytes all;
    for (std::size_t builder = 0; builder < 2; ++builder) {
        for (std::size_t layer = 0; layer < 4; ++layer) {
            const void* metadata =
                kvpages_attention_layer_metadata(attention.get(), builder, layer);
            kvpages_tensor slots{};
            must(kvpages_attention_get_slot_mapping(attention.get(), builder, layer, &slots));
            append_bytes(all, &metadata, 1);
            append_bytes(all, &slots, 1);
        }
    }
    return all;
}

}  // namespace

TEST(HostileStep, EveryCallbackFailsAndCallsBack) {
    // What an engine may do in a callback: use all of the library but the handle that calls it.
    Engine inner;
    const TablesHandle tables = tables_in_use();
    int rounds = 0;
    const auto meddle = [&] {
        ++rounds;
        inner.calls = 0;
        inner.fail_at = 3;
        inner.created.clear();
        kvpages_attention* raw = nullptr;
        EXPECT_TRUE(fails(inner.create(&raw), KVPAGES_STATUS_STOPPED, "callback_failed"));
        EXPECT_EQ(raw, nullptr);
        EXPECT_TRUE(fails(append(1, 0, {8})(const_cast<TablesHandle&>(tables)), kInvalid,
                          "block_id_out_of_range"));
        must(kvpages_tables_apply(tables.get(), nullptr));
    };
    int points = 0;
    for (bool is_done = false; !is_done; ++points) {
        SCOPED_TRACE(points);
        Engine engine;
        engine.meddle = meddle;
        engine.fail_at = points;
        Out<kvpages_attention*> raw;
        const std::int32_t status = engine.create(&raw);
        is_done = status == KVPAGES_STATUS_OK;
        if (is_done) {
            kvpages_attention_destroy(raw.value);
        } else {
            // The outer failure is the last one, although destroying builders failed inside.
            EXPECT_TRUE(fails(status, KVPAGES_STATUS_STOPPED, "callback_failed",
                              {"attention group", "kernels", "returned 7"}));
            EXPECT_TRUE(raw.is_zero());
        }
        EXPECT_EQ(engine.destroyed,
                  std::vector<int>(engine.created.rbegin(), engine.created.rend()));
    }
    EXPECT_EQ(points, 1 + 6 * 3);  // of each builder create, a workspace and the support
    EXPECT_GT(rounds, points);
}

TEST(HostileStep, TheOuterFailureIsTheLastOne) {
    Engine inner;
    inner.fail_at = 0;
    Engine engine;
    const Attention attention = engine.made();
    engine.meddle = [&] {
        inner.calls = 0;
        kvpages_attention* raw = nullptr;
        EXPECT_EQ(inner.create(&raw), KVPAGES_STATUS_STOPPED);
        Writes{{9}, {}, {0, 0, 0}, {}}(tables_in_use());
    };
    engine.fail_at = engine.calls + 1;
    EXPECT_TRUE(fails(kvpages_attention_build(attention.get(), &engine.step),
                      KVPAGES_STATUS_STOPPED, "callback_failed",
                      {"build", "attention group 1", "kernels", "7"}));
    EXPECT_EQ(kvpages_last_callback_code(), 7);
}

TEST(HostileStep, AStepThatABuilderStopsLeavesTheOneBefore) {
    for (const std::uint32_t capture : {0u, 1u}) {
        for (int group = 0; group < 3; ++group) {
            SCOPED_TRACE(std::to_string(capture) + " " + std::to_string(group));
            Engine engine;
            Attention attention = engine.made();
            must(kvpages_attention_build(attention.get(), &engine.step));
            engine.step.builder = 1;
            must(kvpages_attention_build(attention.get(), &engine.step));
            engine.step.for_capture = capture;
            engine.mappings[0].data = engine.slots + 1;
            for (const std::uint64_t builder : {0u, 1u}) {
                engine.step.builder = builder;
                engine.fail_at = engine.calls + group;
                expect_refused<Attention>(
                    attention,
                    {{"build", KVPAGES_STATUS_STOPPED, "callback_failed",
                      {"build", "attention group " + std::to_string(group)},
                      [&](Attention& a) { return kvpages_attention_build(a.get(), &engine.step); }}},
                    bytes_of_metadata);
                EXPECT_EQ(engine.calls, engine.fail_at + 1) << "a builder was called after that";
            }
        }
    }
}

TEST(HostileStep, SupportThatIsNone) {
    Engine engine;
    engine.support = 99;
    Out<kvpages_attention*> raw;
    EXPECT_TRUE(fails(engine.create(&raw), kInvalid, "unknown_value",
                      {"backend kernels", "graph_support", "99"}));
    EXPECT_TRUE(raw.is_zero());
    EXPECT_EQ(engine.created, std::vector<int>{0});
    EXPECT_EQ(engine.destroyed, std::vector<int>{0});
    engine.support = KVPAGES_GRAPH_SUPPORT_ALWAYS;
    engine.created.clear();
    Attention attention = engine.made();
    const auto limit = [](std::uint32_t number) {
        return [number](Attention& a) {
            return kvpages_attention_limit_graph_support(a.get(), number);
        };
    };
    expect_refused<Attention>(
        attention,
        {{"past the last", kInvalid, "unknown_value", {"limit", "4"}, limit(4)},
         {"highest", kInvalid, "unknown_value", {"limit"}, limit(UINT32_MAX)}},
        [](const Attention& a) {
            Bytes all;
            const std::uint32_t support = kvpages_attention_graph_support(a.get(), nullptr);
            append_bytes(all, &support, 1);
            return all;
        });
    // A place that cannot hold a pointer is left alone.
    const char* names[2]{"a", "b"};
    EXPECT_EQ(kvpages_attention_graph_support(attention.get(), odd(&names[0])),
              static_cast<std::uint32_t>(KVPAGES_GRAPH_SUPPORT_ALWAYS));
    EXPECT_STREQ(names[0], "a");
    EXPECT_STREQ(names[1], "b");
}

TEST(HostileStep, StepsThatDoNotFit) {
    Engine engine;
    Attention attention = engine.made();
    must(kvpages_attention_build(attention.get(), &engine.step));
    const int calls = engine.calls;
    static std::int64_t negative[2]{2, -1};
    static std::int64_t lowest[2]{kMin64, 1};
    static kvpages_request_ranges ranges[3]{};
    using Spoil = std::function<void(kvpages_step&, kvpages_tensor*, kvpages_tensor*)>;
    struct Bad {
        const char* name;
        std::int32_t status;
        const char* kind;
        Words words;
        Spoil spoil;
    };
    const std::vector<Bad> all{
        {"size 0", kInvalid, "struct_size", {}, [](auto& s, auto*, auto*) { s.struct_size = 0; }},
        {"size + 1", kInvalid, "struct_size", {"4097"},
         [](auto& s, auto*, auto*) { s.struct_size = 4097; }},
        {"builder 2", kNotFound, "not_found", {"builder 2 of 2"},
         [](auto& s, auto*, auto*) { s.builder = 2; }},
        {"the last builder", kNotFound, "not_found", {"of 2"},
         [](auto& s, auto*, auto*) { s.builder = UINT64_MAX; }},
        {"requests", kInvalid, "step_tensor", {"cache group 0", "block_tables", "2 rows"},
         [](auto& s, auto*, auto*) { s.num_requests = UINT64_MAX; }},
        {"tokens", kInvalid, "step_tensor", {"cache group 0", "slot_mappings", "6 rows"},
         [](auto& s, auto*, auto*) { s.num_tokens = UINT64_MAX; }},
        {"tables odd", kInvalid, "misaligned_pointer", {"block_tables"},
         [](auto& s, auto*, auto*) { s.block_tables = odd(s.block_tables); }},
        {"mappings odd", kInvalid, "misaligned_pointer", {"slot_mappings"},
         [](auto& s, auto*, auto*) { s.slot_mappings = odd(s.slot_mappings); }},
        {"shape odd", kInvalid, "misaligned_pointer", {"cache group 1", "block_tables", "shape"},
         [](auto&, auto* t, auto*) { t[1].shape = odd(t[1].shape); }},
        {"strides odd", kInvalid, "misaligned_pointer", {"cache group 0", "slot_mappings", "strides"},
         [](auto&, auto*, auto* m) { m[0].strides = odd(m[0].strides); }},
        {"strides NULL", kNull, "null_argument", {"cache group 1", "slot_mappings", "strides"},
         [](auto&, auto*, auto* m) { m[1].strides = nullptr; }},
        {"negative width", kInvalid, "step_tensor", {"cache group 1", "block_tables", "-1"},
         [](auto&, auto* t, auto*) { t[1].shape = negative; }},
        {"negative tokens", kInvalid, "step_tensor", {"cache group 1", "slot_mappings"},
         [](auto&, auto*, auto* m) { m[1].shape = lowest; }},
        {"dimensions", kInvalid, "step_tensor", {"block_tables", "4294967295"},
         [](auto&, auto* t, auto*) { t[0].ndim = UINT32_MAX; }},
        {"type", kInvalid, "step_tensor", {"cache group 0", "block_tables"},
         [](auto&, auto* t, auto*) { t[0].dtype = KVPAGES_DTYPE_I64; }},
        {"ranges of one request", kInvalid, "step_array", {"num_multimodal_requests", "1", "2 requests"},
         [](auto& s, auto*, auto*) {
             s.multimodal_ranges = ranges;
             s.num_multimodal_requests = 1;
         }},
        {"ranges of three", kInvalid, "step_array", {"num_multimodal_requests", "3", "2 requests"},
         [](auto& s, auto*, auto*) {
             s.multimodal_ranges = ranges;
             s.num_multimodal_requests = 3;
         }},
        {"more extras than groups", kInvalid, "per_group_array_length", {"group_extra"},
         [](auto& s, auto*, auto*) { s.num_group_extra = SIZE_MAX; }},
        {"flags of requests", kNull, "null_argument", {"causal_by_request"},
         [](auto& s, auto*, auto*) { s.causality = KVPAGES_CAUSALITY_PER_REQUEST; }},
        {"capture", kInvalid, "unknown_value", {"for_capture"},
         [](auto& s, auto*, auto*) { s.for_capture = UINT32_MAX; }},
    };
    for (const Bad& bad : all) {
        const auto call = [&](Attention& a) {
            kvpages_tensor tables[2]{engine.tables[0], engine.tables[1]};
            kvpages_tensor mappings[2]{engine.mappings[0], engine.mappings[1]};
            kvpages_step step = engine.step;
            step.block_tables = tables;
            step.slot_mappings = mappings;
            bad.spoil(step, tables, mappings);
            return kvpages_attention_build(a.get(), &step);
        };
        expect_refused<Attention>(attention, {{bad.name, bad.status, bad.kind, bad.words, call}},
                                  bytes_of_metadata);
        EXPECT_EQ(engine.calls, calls) << bad.name << ": a builder was called";
    }
}

TEST(HostileStep, ConfigurationsOfBuilders) {
    const Engine engine;
    static const char* const not_utf8[]{"F", "\xFF\xFE"};
    static const char* const unknown[]{"F", "Z"};
    static const char* const nothing[]{"F", nullptr};
    kvpages_builder_callbacks callbacks[2]{KVPAGES_BUILDER_CALLBACKS_INIT,
                                           KVPAGES_BUILDER_CALLBACKS_INIT};
    const kvpages_backend_callbacks listed[]{{engine.kernels.get(), nullptr}};
    struct Bad {
        const char* name;
        std::int32_t status;
        const char* kind;
        Words words;
        std::function<void(kvpages_attention_config&)> spoil;
    };
    const std::vector<Bad> all{
        {"size", kInvalid, "struct_size", {}, [](auto& c) { c.struct_size -= 1; }},
        {"worker", kNotFound, "not_found", {"1"}, [](auto& c) { c.worker = 1; }},
        {"no worker", kNotFound, "not_found", {}, [](auto& c) { c.worker = SIZE_MAX; }},
        {"names NULL", kNull, "null_argument", {"active_layers"},
         [](auto& c) { c.num_active_layers = 1; }},
        {"a name NULL", kNull, "null_argument", {"entry 1"},
         [](auto& c) {
             c.active_layers = nothing;
             c.num_active_layers = 2;
         }},
        {"no text", kInvalid, "not_utf8", {"entry 1", "active_layers"},
         [](auto& c) {
             c.active_layers = not_utf8;
             c.num_active_layers = 2;
         }},
        {"no layer", kNotFound, "layer_missing", {"Z"},
         [](auto& c) {
             c.active_layers = unknown;
             c.num_active_layers = 2;
         }},
        {"names odd", kInvalid, "misaligned_pointer", {"active_layers"},
         [](auto& c) {
             c.active_layers = odd(unknown);
             c.num_active_layers = 1;
         }},
        {"names past memory", kInvalid, "overflow", {"active_layers"},
         [](auto& c) {
             c.active_layers = unknown;
             c.num_active_layers = SIZE_MAX;
         }},
        {"builders", kInvalid, "bad_values", {"num_builders", "257"},
         [](auto& c) { c.num_builders = 257; }},
        {"no create", kNull, "null_argument", {"create"},
         [&](auto& c) { c.callbacks = callbacks; }},
        {"callbacks odd", kInvalid, "misaligned_pointer", {"kvpages_builder_callbacks"},
         [&](auto& c) { c.callbacks = odd(callbacks); }},
        {"no callbacks of a backend", kNull, "null_argument", {"entry 0"},
         [&](auto& c) {
             c.backend_callbacks = listed;
             c.num_backend_callbacks = 1;
         }},
        {"backends NULL", kNull, "null_argument", {"backend_callbacks"},
         [](auto& c) { c.num_backend_callbacks = 1; }},
    };
    for (const Bad& bad : all) {
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        bad.spoil(config);
        Out<kvpages_attention*> raw;
        EXPECT_TRUE(fails(kvpages_attention_create(engine.planned.get(), &config, &raw),
                          bad.status, bad.kind, bad.words))
            << bad.name;
        EXPECT_TRUE(raw.is_zero()) << bad.name;
    }
}
