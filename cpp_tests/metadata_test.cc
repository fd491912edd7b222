// The metadata of a step: what builders are told, what layers get, and what a failed step leaves.
#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/api.h"
#include "support/failure.h"

using namespace support;

namespace {

using AttentionHandle =
    std::unique_ptr<kvpages_attention, Destroy<kvpages_attention, kvpages_attention_destroy>>;

// Two cache groups with three attention groups, a layer that shares and one that is not active.
struct Step {
    Model model = support::model();
    AttentionHandle attention;
    std::vector<kvpages_common_metadata> seen;
    std::vector<void*> extras;
    int fail_at = -1;
    int captures = 0;

    std::int32_t query_start[3] = {0, 3, 4};
    std::int32_t seq_lens[2] = {10, 13};
    std::int32_t table[2][2][3] = {};
    std::int64_t slots[2][6] = {};
    std::int64_t table_shape[2] = {2, 3}, table_strides[2] = {3, 1};
    std::int64_t slots_shape[1] = {6}, slots_strides[1] = {1};
    kvpages_tensor tables[2];
    kvpages_tensor mappings[2];
    kvpages_step step = KVPAGES_STEP_INIT;

    explicit Step(std::uint64_t num_builders = 1) {
        BackendOptions options;
        options.layout = packed_nhd;
        options.name = "A";
        const Backend a = backend(options);
        options.name = "B";
        const Backend b = backend(options);
        add(model, "full.0", full(16, 1, 8), a);
        add(model, "sliding.0", sliding(32, 16, 1, 8), a);
        add(model, "full.1", full(16, 1, 8), b);
        add(model, "sliding.1", sliding(32, 16, 1, 8), a);
        share(model, "shared", "sliding.0", a);
        const Plan plan = plan_of_blocks(model, 4);
        const char* active[] = {"full.0", "sliding.0", "full.1", "shared"};
        kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
        callbacks.user = this;
        callbacks.create = [](void*, const kvpages_builder_info*, void**) { return 0; };
        callbacks.build = [](void* user, void*, const kvpages_common_metadata* common, void* extra,
                             void** out) {
            return static_cast<Step*>(user)->record(common, extra, out);
        };
        callbacks.build_for_capture = [](void* user, void*, const kvpages_common_metadata* common,
                                         void* extra, void** out) {
            ++static_cast<Step*>(user)->captures;
            return static_cast<Step*>(user)->record(common, extra, out);
        };
        callbacks.destroy = [](void*, void*) {};
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        config.callbacks = &callbacks;
        config.active_layers = active;
        config.num_active_layers = 4;
        config.num_builders = num_builders;
        kvpages_attention* raw = nullptr;
        must(kvpages_attention_create(plan.get(), &config, &raw));
        attention.reset(raw);

        for (int c = 0; c < 2; ++c) {
            tables[c] = {table[c], table_shape, table_strides, KVPAGES_DTYPE_I32, 2};
            mappings[c] = {slots[c], slots_shape, slots_strides, KVPAGES_DTYPE_I64, 1};
        }
        step.num_requests = 2;
        step.num_tokens = 4;
        step.max_query_len = 3;
        step.max_seq_len = 64;
        step.query_start = step.query_start_host = query_start;
        step.seq_lens = seq_lens;
        step.block_tables = tables;
        step.slot_mappings = mappings;
        step.num_block_tables = step.num_slot_mappings = step.num_cache_groups = 2;
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    std::int32_t record(const kvpages_common_metadata* common, void* extra, void** out) {
        if (static_cast<int>(seen.size()) == fail_at) return 41;
        seen.push_back(*common);
        extras.push_back(extra);
        *out = reinterpret_cast<void*>(seen.size());
        return 0;
    }
    std::int32_t build() {
        seen.clear();
        extras.clear();
        return kvpages_attention_build(attention.get(), &step);
    }
    std::vector<std::size_t> layers(std::size_t builder = 0) const {
        std::vector<std::size_t> all;
        for (std::size_t layer = 0; layer < 5; ++layer) {
            all.push_back(reinterpret_cast<std::size_t>(
                kvpages_attention_layer_metadata(attention.get(), builder, layer)));
        }
        return all;
    }
};

using Layers = std::vector<std::size_t>;

TEST(Metadata, EveryLayerGetsThatOfItsGroup) {
    Step s;
    EXPECT_EQ(s.layers(), (Layers{0, 0, 0, 0, 0}));
    must(s.build());
    EXPECT_EQ(s.layers(), (Layers{1, 3, 2, 0, 3}));
    ASSERT_EQ(s.seen.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
        const kvpages_common_metadata& common = s.seen[i];
        const std::size_t c = i < 2 ? 0 : 1;
        EXPECT_EQ(common.struct_size, sizeof(common));
        EXPECT_EQ(common.cache_group, c);
        EXPECT_EQ(common.num_requests, 2u);
        EXPECT_EQ(common.num_tokens, 4u);
        EXPECT_EQ(common.max_query_len, 3u);
        EXPECT_EQ(common.max_seq_len, 64u);
        EXPECT_EQ(common.query_start, s.query_start);
        EXPECT_EQ(common.query_start_host, s.query_start);
        EXPECT_EQ(common.seq_lens, s.seq_lens);
        EXPECT_EQ(common.seq_lens_host_bound, nullptr);
        EXPECT_EQ(common.positions, nullptr);
        EXPECT_EQ(common.block_table.data, s.table[c]);
        EXPECT_EQ(common.slot_mapping.data, s.slots[c]);
        EXPECT_EQ(common.causality, static_cast<std::uint32_t>(KVPAGES_CAUSALITY_CAUSAL));
        EXPECT_EQ(common.causal_by_request, nullptr);
        EXPECT_EQ(common.common_prefix_len, 0u);
        EXPECT_EQ(common.group_extra, nullptr);
        EXPECT_EQ(s.extras[i], nullptr);
    }
    kvpages_tensor slots{};
    for (std::size_t layer = 0; layer < 5; ++layer) {
        must(kvpages_attention_get_slot_mapping(s.attention.get(), 0, layer, &slots));
        EXPECT_EQ(slots.data, s.slots[layer == 0 || layer == 2 ? 0 : 1]) << layer;
    }
}

TEST(Metadata, PointersOfTheModelAndCausality) {
    Step s;
    int a = 0, b = 0, c = 0;
    void* of_groups[] = {nullptr, &a};
    void* of_builders[] = {&b, nullptr, &c};
    s.step.group_extra = of_groups;
    s.step.num_group_extra = 2;
    s.step.builder_extra = of_builders;
    s.step.num_builder_extra = 3;
    const std::uint32_t causality[] = {KVPAGES_CAUSALITY_PER_REQUEST, KVPAGES_CAUSALITY_NON_CAUSAL};
    const std::uint8_t flags[] = {1, 0};
    s.step.causality_by_group = causality;
    s.step.num_causality_by_group = 2;
    s.step.causal_by_request = flags;
    must(s.build());
    EXPECT_EQ(s.extras, (std::vector<void*>{&b, nullptr, &c}));
    EXPECT_EQ(s.seen[1].group_extra, nullptr);
    EXPECT_EQ(s.seen[2].group_extra, &a);
    EXPECT_EQ(s.seen[0].causal_by_request, flags);
    EXPECT_EQ(s.seen[0].causality, causality[0]);
    EXPECT_EQ(s.seen[2].causal_by_request, nullptr);
    EXPECT_EQ(s.seen[2].causality, causality[1]);
    EXPECT_EQ(s.captures, 0);
    s.step.for_capture = 1;
    must(s.build());
    EXPECT_EQ(s.captures, 3);
    EXPECT_EQ(s.extras, (std::vector<void*>{nullptr, nullptr, nullptr}));
}

TEST(Metadata, MicroBatchesAreApart) {
    Step s(2);
    must(s.build());
    EXPECT_EQ(s.layers(1), (Layers{0, 0, 0, 0, 0}));
    s.step.builder = 1;
    must(s.build());
    EXPECT_EQ(s.layers(1), (Layers{1, 3, 2, 0, 3}));
    s.step.builder = 2;
    EXPECT_TRUE(fails(s.build(), KVPAGES_STATUS_NOT_FOUND, "not_found", {"2"}));
    EXPECT_EQ(s.layers(2), (Layers{0, 0, 0, 0, 0}));
}

TEST(Metadata, AFailedStepLeavesTheOneBefore) {
    Step s;
    must(s.build());
    const Layers before = s.layers();
    s.tables[0].data = s.table[1];
    std::int64_t others[6] = {};
    s.mappings[0].data = others;
    for (s.fail_at = 0; s.fail_at < 3; ++s.fail_at) {
        EXPECT_TRUE(fails(s.build(), KVPAGES_STATUS_STOPPED, "callback_failed", {"41"}));
        EXPECT_EQ(kvpages_last_callback_code(), 41);
        EXPECT_EQ(s.seen.size(), static_cast<std::size_t>(s.fail_at));
        EXPECT_EQ(s.layers(), before);
        kvpages_tensor slots{};
        must(kvpages_attention_get_slot_mapping(s.attention.get(), 0, 0, &slots));
        EXPECT_EQ(slots.data, s.slots[0]);
    }
}

TEST(Metadata, HostileSteps) {
    struct Case {
        const char* name;
        std::int32_t status;
        const char* kind;
        std::vector<std::string> words;
        void (*spoil)(Step&);
    };
    const auto invalid = KVPAGES_STATUS_INVALID_ARGUMENT;
    const auto null = KVPAGES_STATUS_NULL_ARGUMENT;
    static std::int64_t one[] = {1, 1};
    static std::int64_t negative[] = {-1, 1};
    static std::uint32_t causality[] = {0, 3};
    static std::int32_t bounds[] = {3, 0};
    static kvpages_request_ranges ranges[] = {{nullptr, 0}, {nullptr, 1}};
    const std::vector<Case> cases{
        {"size", invalid, "struct_size", {}, [](Step& s) { s.step.struct_size = 24; }},
        {"query start", null, "null_argument", {"query_start"},
         [](Step& s) { s.step.query_start = nullptr; }},
        {"query start host", null, "null_argument", {"query_start_host"},
         [](Step& s) { s.step.query_start_host = nullptr; }},
        {"seq lens", null, "null_argument", {"seq_lens"},
         [](Step& s) { s.step.seq_lens = nullptr; }},
        {"one table", invalid, "per_group_array_length", {"block_tables", "group 1"},
         [](Step& s) { s.step.num_block_tables = 1; }},
        {"three tables", invalid, "per_group_array_length", {"block_tables", "group 2"},
         [](Step& s) { s.step.num_block_tables = 3; }},
        {"no mappings", invalid, "per_group_array_length", {"slot_mappings", "group 0"},
         [](Step& s) { s.step.num_slot_mappings = 0; }},
        {"null mappings", null, "null_argument", {"slot_mappings"},
         [](Step& s) { s.step.slot_mappings = nullptr; }},
        {"fewer groups", invalid, "per_group_array_length", {"group 1"},
         [](Step& s) { s.step.num_cache_groups = 1; }},
        {"more groups", invalid, "attn_groups_missing", {"no group 2"},
         [](Step& s) { s.step.num_cache_groups = 3; }},
        {"causality", invalid, "unknown_value", {"3"}, [](Step& s) { s.step.causality = 3; }},
        {"causality of a group", invalid, "unknown_value", {"cache group 1"},
         [](Step& s) {
             s.step.causality_by_group = causality;
             s.step.num_causality_by_group = 2;
         }},
        {"causalities", invalid, "per_group_array_length", {"causality_by_group"},
         [](Step& s) {
             s.step.causality_by_group = causality;
             s.step.num_causality_by_group = 1;
         }},
        {"flags of requests", null, "null_argument", {"causal_by_request"},
         [](Step& s) { s.step.causality = KVPAGES_CAUSALITY_PER_REQUEST; }},
        {"builder extra", invalid, "per_group_array_length", {"builder_extra"},
         [](Step& s) { s.step.num_builder_extra = 2; }},
        {"ranges", null, "null_argument", {"multimodal_ranges"},
         [](Step& s) { s.step.num_multimodal_requests = 2; }},
        {"capture", invalid, "unknown_value", {"for_capture"},
         [](Step& s) { s.step.for_capture = 2; }},
        {"rows", invalid, "step_tensor", {"cache group 1", "block_tables", "2 requests"},
         [](Step& s) { s.tables[1].shape = one; }},
        {"negative rows", invalid, "step_tensor", {"cache group 0", "-1"},
         [](Step& s) { s.tables[0].shape = negative; }},
        {"tokens", invalid, "step_tensor", {"cache group 0", "slot_mappings", "7 tokens"},
         [](Step& s) { s.step.num_tokens = 7; }},
        {"dtype", invalid, "step_tensor", {"cache group 1", "slot_mappings"},
         [](Step& s) { s.mappings[1].dtype = KVPAGES_DTYPE_I32; }},
        {"ndim", invalid, "step_tensor", {"cache group 0", "block_tables"},
         [](Step& s) { s.tables[0].ndim = 1; }},
        {"data", null, "null_argument", {"cache group 1", "block_tables"},
         [](Step& s) { s.tables[1].data = nullptr; }},
        {"shape", null, "null_argument", {"cache group 1"},
         [](Step& s) { s.tables[1].shape = nullptr; }},
        {"one request's ranges", invalid, "step_array", {"num_multimodal_requests", "1", "2"},
         [](Step& s) {
             s.step.multimodal_ranges = ranges;
             s.step.num_multimodal_requests = 1;
         }},
        {"null ranges", null, "null_argument", {"multimodal_ranges", "entry 1"},
         [](Step& s) {
             s.step.multimodal_ranges = ranges;
             s.step.num_multimodal_requests = 2;
         }},
        {"first start", invalid, "step_array", {"query_start_host", "1"},
         [](Step& s) { s.query_start[0] = 1; }},
        {"starts", invalid, "step_array", {"query_start_host", "request 0", "-1"},
         [](Step& s) { s.query_start[1] = -1; }},
        {"falling starts", invalid, "step_array", {"query_start_host", "request 1", "4", "5"},
         [](Step& s) { s.query_start[1] = 5; }},
        {"lowest and highest", invalid, "step_array", {"query_start_host", "request 1"},
         [](Step& s) {
             s.query_start[1] = INT32_MAX;
             s.query_start[2] = INT32_MIN;
         }},
        {"end", invalid, "step_array", {"query_start_host", "900", "4 tokens"},
         [](Step& s) { s.query_start[2] = 900; }},
        {"fewer tokens", invalid, "step_array", {"query_start_host", "3 tokens"},
         [](Step& s) { s.step.num_tokens = 3; }},
        {"query length", invalid, "step_array", {"request 0", "3 tokens", "max_query_len is 2"},
         [](Step& s) { s.step.max_query_len = 2; }},
        {"bounds", invalid, "step_array", {"seq_lens_host_bound", "request 1", "0", "1 tokens"},
         [](Step& s) { s.step.seq_lens_host_bound = bounds; }},
        {"inner stride", invalid, "step_tensor", {"cache group 0", "block_tables", "7"},
         [](Step& s) { s.table_strides[1] = 7; }},
        {"row stride", invalid, "step_tensor", {"cache group 0", "block_tables", "2"},
         [](Step& s) { s.table_strides[0] = 2; }},
        {"no row stride", invalid, "step_tensor", {"cache group 0", "block_tables", "0"},
         [](Step& s) { s.table_strides[0] = 0; }},
        {"negative width", invalid, "step_tensor", {"cache group 0", "block_tables", "-3"},
         [](Step& s) { s.table_shape[1] = -3; }},
        {"slot stride", invalid, "step_tensor", {"cache group 0", "slot_mappings", "2"},
         [](Step& s) { s.slots_strides[0] = 2; }},
        {"absent", invalid, "step_tensor", {"cache group 1"},
         [](Step& s) { s.tables[1] = kvpages_tensor{}; }},
    };
    for (const Case& c : cases) {
        Step s;
        must(s.build());
        const Layers before = s.layers();
        c.spoil(s);
        EXPECT_TRUE(fails(s.build(), c.status, c.kind, c.words)) << c.name;
        EXPECT_EQ(s.layers(), before) << c.name;
        EXPECT_TRUE(s.seen.empty()) << c.name;
    }
    Step s;
    EXPECT_EQ(kvpages_attention_build(s.attention.get(), nullptr), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_attention_build(nullptr, &s.step), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_attention_layer_metadata(nullptr, 0, 0), nullptr);
    EXPECT_EQ(kvpages_attention_layer_metadata(s.attention.get(), 0, SIZE_MAX), nullptr);
    kvpages_tensor slots{};
    EXPECT_EQ(kvpages_attention_get_slot_mapping(s.attention.get(), 0, 5, &slots),
              KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_attention_get_slot_mapping(s.attention.get(), 1, 0, &slots),
              KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_attention_get_slot_mapping(s.attention.get(), 0, 0, nullptr),
              KVPAGES_STATUS_NULL_ARGUMENT);
}

TEST(Metadata, StepsThatArePaddedOrSmall) {
    Step s;
    // A padded request has no tokens; bounds and rows may be larger.
    s.query_start[1] = 4;
    s.step.max_query_len = 9;
    const std::int32_t bounds[] = {4, 0};
    s.step.seq_lens_host_bound = bounds;
    s.table_strides[0] = 8;
    const kvpages_range range{0, 2};
    const kvpages_request_ranges ranges[] = {{&range, 1}, {nullptr, 0}};
    s.step.multimodal_ranges = ranges;
    s.step.num_multimodal_requests = 2;
    must(s.build());
    EXPECT_EQ(s.seen[0].num_multimodal_requests, 2u);
    // Nobody steps over what is one entry.
    Step one;
    one.step.num_requests = one.step.num_tokens = 1;
    one.query_start[1] = 1;
    one.table_shape[0] = one.table_shape[1] = one.slots_shape[0] = 1;
    one.table_strides[0] = one.table_strides[1] = one.slots_strides[0] = 0;
    must(one.build());
}

TEST(Metadata, AGroupWithoutCacheNeedsNoTensors) {
    const Model m = model();
    add(m, "encoder", attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 1, 8), backend(packed_nhd));
    Parts parts;
    parts.groups = {{{"encoder"}}};
    const Plan plan = plan_from(m, parts);
    const kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    kvpages_attention* raw = nullptr;
    must(kvpages_attention_create(plan.get(), &config, &raw));
    const AttentionHandle attention(raw);
    const std::int32_t start = 0;
    const kvpages_tensor absent{};
    kvpages_step step = KVPAGES_STEP_INIT;
    step.query_start = step.query_start_host = &start;
    step.num_tokens = 9;
    step.block_tables = step.slot_mappings = &absent;
    step.num_block_tables = step.num_slot_mappings = step.num_cache_groups = 1;
    must(kvpages_attention_build(raw, &step));
    EXPECT_EQ(kvpages_attention_layer_metadata(raw, 0, 0), nullptr);
}

std::vector<std::pair<std::int64_t, std::int64_t>> ranges(
    const std::vector<kvpages_multimodal_item>& items,
    std::optional<std::uint64_t> window = std::nullopt) {
    std::vector<std::pair<std::int64_t, std::int64_t>> all;
    for (const kvpages_range& range : kvpages::multimodal_ranges(items, window)) {
        all.emplace_back(range.first, range.last);
    }
    return all;
}

using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

TEST(Multimodal, M01_RangesUpToTheWindow) {
    const std::vector<kvpages_multimodal_item> items{
        {KVPAGES_MODALITY_IMAGE, 0, 10, 4, nullptr},
        {KVPAGES_MODALITY_AUDIO, 0, 20, 3, nullptr},
        {KVPAGES_MODALITY_IMAGE, 0, 30, 5, nullptr}};
    EXPECT_EQ(ranges(items), (Pairs{{10, 13}, {30, 34}}));
    EXPECT_EQ(ranges(items, 5), (Pairs{{10, 13}, {30, 34}}));
    EXPECT_EQ(ranges(items, 4), (Pairs{{10, 13}}));
    EXPECT_EQ(ranges(items, 0), Pairs{});
    EXPECT_EQ(ranges({}), Pairs{});
}

TEST(Multimodal, M04_MasksSplitItems) {
    const std::uint8_t mask[] = {0, 1, 0, 1, 1}, none[] = {0, 0, 0, 0, 0};
    EXPECT_EQ(ranges({{KVPAGES_MODALITY_VIDEO, 0, 2, 5, mask}}), (Pairs{{3, 3}, {5, 6}}));
    EXPECT_EQ(ranges({{KVPAGES_MODALITY_IMAGE, 0, 2, 5, none}}), Pairs{});
    EXPECT_EQ(ranges({{KVPAGES_MODALITY_IMAGE, 0, 7, 0, nullptr}}), Pairs{});
}

TEST(Multimodal, HostileInput) {
    kvpages_multimodal_item item{KVPAGES_MODALITY_IMAGE, 0, 0, 5, nullptr};
    kvpages_range range{9, 9};
    std::size_t count = 7;
    const auto call = [&] {
        return kvpages_multimodal_ranges(&item, 1, KVPAGES_NO_WINDOW, &range, 1, &count);
    };
    EXPECT_EQ(kvpages_multimodal_ranges(&item, 1, 0, &range, 1, nullptr),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_multimodal_ranges(nullptr, 1, 0, &range, 1, &count),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_multimodal_ranges(&item, 1, KVPAGES_NO_WINDOW, nullptr, 0, &count),
              KVPAGES_STATUS_BUFFER_TOO_SMALL);
    EXPECT_EQ(count, 1u);
    for (const std::uint32_t modality : {0u, 5u, UINT32_MAX}) {
        item.modality = modality;
        EXPECT_TRUE(fails(call(), KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"entry 0"}));
    }
    item.modality = KVPAGES_MODALITY_IMAGE;
    item.length = -1;
    EXPECT_TRUE(fails(call(), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"-1"}));
    item.offset = 1;
    item.length = INT64_MAX;
    EXPECT_TRUE(fails(call(), KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values"));
    EXPECT_EQ(count, 0u);
    EXPECT_EQ(range.first, 9);
    // The number of an item is told once.
    std::vector<kvpages_multimodal_item> items(3, {KVPAGES_MODALITY_IMAGE, 0, 0, 1, nullptr});
    items[2].offset = -5;
    EXPECT_TRUE(fails(kvpages_multimodal_ranges(items.data(), items.size(), KVPAGES_NO_WINDOW,
                                                &range, 1, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"entry 2: offset -5"}));
    EXPECT_EQ(std::string(kvpages_last_error_message()).find("item"), std::string::npos);
}

}  // namespace
