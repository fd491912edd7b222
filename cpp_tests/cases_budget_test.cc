// Published faults in turning memory into blocks, each with the numbers that are right.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

using namespace support;

namespace {

Model one_layer(const kvpages_spec& spec) {
    Model m = model();
    add(m, "layers.0.attn", spec);
    return m;
}

kvpages_demand demand(const kvpages_spec& spec, const kvpages_limits& limits) {
    kvpages_demand out = KVPAGES_DEMAND_INIT;
    must(kvpages_spec_demand(&spec, &limits, &out));
    return out;
}

kvpages_limits limits_of(std::uint64_t max_model_len, std::uint64_t in_flight = 0) {
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.max_model_len = max_model_len;
    limits.max_tokens_in_flight = in_flight;
    return limits;
}

}  // namespace

TEST(CasesBudget, B01_AutoFitLeavesTheNullBlockOut) {
    const kvpages_spec spec = page_of(2 * 128, 128);
    const Model m = one_layer(spec);
    kvpages_plan_config config = plan_config(100000);
    config.flags = KVPAGES_PLAN_AUTO_FIT;
    config.reserved_blocks = 1;
    const Plan p = plan(m, 8 * 256, config);
    EXPECT_EQ(worker_info(p).num_blocks, 8u);
    EXPECT_EQ(kvpages_plan_max_model_len(p.get()), 896u);
    EXPECT_EQ(worker_info(p).max_concurrency, 1.0);
    EXPECT_EQ(worker_info(p).capacity_tokens, 896u);
    // An engine that keeps no block has all 8.
    config.reserved_blocks = 0;
    EXPECT_EQ(kvpages_plan_max_model_len(plan(m, 8 * 256, config).get()), 1024u);
}

TEST(CasesBudget, B02_ALengthThatNeedsEveryBlockIsRefused) {
    const std::uint64_t page = 2 * 8192;
    const Model m = one_layer(page_of(page, 8192));
    kvpages_plan_config config = plan_config(106496);
    config.reserved_blocks = 1;
    const auto bytes = static_cast<std::int64_t>(13 * page);
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{m.get(), bytes}}, config, &raw, &shortfall),
                      KVPAGES_STATUS_DOES_NOT_FIT, "not_enough_memory", {"106496", "98304"}));
    EXPECT_EQ(raw, nullptr);
    EXPECT_EQ(shortfall.longest_model_len, 98304u);
    EXPECT_EQ(shortfall.needed_bytes, 14 * page);
    EXPECT_EQ(shortfall.available_bytes, 13 * page);
    EXPECT_EQ(shortfall.worker, 0u);
    config.max_model_len = 98304;
    EXPECT_EQ(worker_info(plan(m, bytes, config)).num_blocks, 13u);
    config.max_model_len = 98305;
    EXPECT_NE(try_plan({{m.get(), bytes}}, config, &raw), KVPAGES_STATUS_OK);
}

TEST(CasesBudget, B05_AnOverrideMustHoldOneRequestToo) {
    const std::uint64_t page = 32;
    const Model m = one_layer(page_of(page, 16));
    kvpages_plan_config config = plan_config(2048);
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 1;
    config.reserved_blocks = 1;
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{m.get(), 1 << 30}}, config, &raw, &shortfall),
                      KVPAGES_STATUS_DOES_NOT_FIT, "not_enough_memory", {"2048"}));
    EXPECT_EQ(shortfall.needed_bytes, 129 * page);
    EXPECT_EQ(shortfall.available_bytes, page);
    config.num_blocks_override = 128;
    EXPECT_EQ(try_plan({{m.get(), 1 << 30}}, config, &raw), KVPAGES_STATUS_DOES_NOT_FIT);
    config.num_blocks_override = 129;
    EXPECT_EQ(worker_info(plan(m, 0, config)).num_blocks, 129u);
}

TEST(CasesBudget, B07_NoMemoryIsAnErrorNotAHugeNumber) {
    const Model m = one_layer(page_of(32, 16));
    for (const std::int64_t bytes : {std::int64_t{-300}, std::int64_t{0}, std::int64_t{-5},
                                     std::int64_t{INT64_MIN}}) {
        for (const std::uint32_t flags : {0u, std::uint32_t{KVPAGES_PLAN_AUTO_FIT}}) {
            kvpages_plan_config config = plan_config(16);
            config.flags = flags;
            kvpages_plan* raw = nullptr;
            kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
            const std::int32_t status = try_plan({{m.get(), bytes}}, config, &raw, &shortfall);
            const Failure failure = failure_of(status);
            EXPECT_EQ(status, KVPAGES_STATUS_DOES_NOT_FIT);
            EXPECT_FALSE(failure.kind.empty());
            EXPECT_NE(failure.message.find("worker 0"), std::string::npos) << failure.message;
            EXPECT_EQ(raw, nullptr);
            EXPECT_EQ(shortfall.available_bytes, 0u);
        }
    }
}

TEST(CasesBudget, B09_AStageWithoutLayersHasNoSay) {
    const Model first = model();
    add(first, "layers.0.attn", full(16, 2, 64));
    add(first, "layers.1.attn", full(16, 2, 64));
    const Model second = model();
    for (const std::int64_t budget : {std::int64_t{40960}, std::int64_t{0}, std::int64_t{-1}}) {
        const Plan p = plan({{first.get(), 163840}, {second.get(), budget}}, plan_config(16));
        EXPECT_EQ(worker_info(p, 0).num_blocks, 10u);
        EXPECT_EQ(worker_info(p, 1).num_blocks, 10u);
        EXPECT_EQ(worker_info(p, 1).num_tensors, 0u);
        EXPECT_EQ(worker_info(p, 1).total_bytes, 0u);
        EXPECT_EQ(worker_info(p, 1).bytes_per_request, 0u);
        const Cache c = cache(p, host_memory(), 1);
        EXPECT_EQ(kvpages_cache_num_blocks(c.get()), 10u);
        EXPECT_EQ(kvpages_cache_num_layers(c.get()), 0u);
        EXPECT_EQ(kvpages_cache_num_allocations(c.get()), 0u);
    }
}

TEST(CasesBudget, B10_SameWithLayersOfUnequalSize) {
    const Model first = model();
    add(first, "layers.0.attn", full(16, 2, 64));
    add(first, "layers.1.attn", full(16, 1, 64));
    const Model second = model();
    const Plan p = plan({{first.get(), 245760}, {second.get(), 0}}, plan_config(16));
    EXPECT_EQ(worker_info(p, 0).num_groups, 1u);
    EXPECT_EQ(worker_info(p, 0).num_blocks, 20u);
    EXPECT_EQ(worker_info(p, 0).bytes_per_block, 12288u);
    EXPECT_EQ(worker_info(p, 1).num_blocks, 20u);
    EXPECT_EQ(worker_info(p, 1).num_tensors, 0u);
}

TEST(CasesBudget, B11_EveryStageShrinksToTheSmallest) {
    const Model first = model();
    add(first, "layers.0.attn", full(16, 2, 64));
    add(first, "layers.1.attn", full(16, 2, 64));
    const Model second = model();
    add(second, "layers.2.attn", full(16, 2, 64));
    const Plan p =
        plan({{first.get(), 20 * 8192}, {second.get(), 7 * 8192}}, plan_config(16));
    for (const std::size_t worker : {0u, 1u}) {
        EXPECT_EQ(worker_info(p, worker).num_blocks, 7u);
        ASSERT_EQ(worker_info(p, worker).num_tensors, worker == 0 ? 2u : 1u);
        for (std::size_t i = 0; i < worker_info(p, worker).num_tensors; ++i) {
            EXPECT_EQ(tensor_info(p, i, worker).size_bytes, 57344u);
        }
    }
}

TEST(CasesBudget, B13_EveryLayerCountsOnce) {
    const Model m = model();
    for (int i = 0; i < 28; ++i) {
        add(m, "layers." + std::to_string(i), page_of(1000, 4));
    }
    const Plan p = plan(m, 280000, plan_config(4));
    EXPECT_EQ(worker_info(p).num_blocks, 10u);
    EXPECT_EQ(worker_info(p).bytes_per_block, 28000u);
    EXPECT_EQ(worker_info(p).total_bytes, 280000u);
    EXPECT_EQ(worker_info(plan(m, 279999, plan_config(4))).num_blocks, 9u);
}

// The seed's numbers: a slot for every page of the group that has most of it.
TEST(CasesBudget, B15_PackedBlockOfTwoGroups) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    // Windows that differ make groups; pages of two sizes make sets of them.
    const auto large = [](std::uint64_t window) { return sliding(window, 16, 8, 64); };
    const auto small = [](std::uint64_t window) { return sliding(window, 16, 2, 64); };
    ASSERT_EQ(page_bytes(large(64)), 32768u);
    ASSERT_EQ(page_bytes(small(64)), 8192u);
    Parts parts;
    parts.groups = {{{}, 0}, {{}, 0}};
    for (int i = 0; i < 3; ++i) {
        add(m, "a.large." + std::to_string(i), large(64), kernels);
        parts.groups[0].layers.push_back("a.large." + std::to_string(i));
    }
    for (int i = 0; i < 3; ++i) {
        add(m, "a.small." + std::to_string(i), small(64), kernels);
        parts.groups[0].layers.push_back("a.small." + std::to_string(i));
    }
    for (int i = 0; i < 5; ++i) {
        add(m, "b.large." + std::to_string(i), large(128), kernels);
        parts.groups[1].layers.push_back("b.large." + std::to_string(i));
    }
    // What the planner makes of these layers is general groups; an engine can state the packing.
    parts.num_blocks = 8388608 / 188416;
    EXPECT_EQ(parts.num_blocks, 44u);
    for (int slot = 0; slot < 8; ++slot) {
        Parts::Tensor tensor;
        tensor.stride = 188416;
        tensor.size = 188416 * parts.num_blocks;
        if (slot < 5) {
            tensor.offset = static_cast<std::uint64_t>(slot) * 32768;
            tensor.layers.push_back("b.large." + std::to_string(slot));
            if (slot < 3) {
                tensor.layers.push_back("a.large." + std::to_string(slot));
            }
        } else {
            tensor.offset = 5 * 32768 + static_cast<std::uint64_t>(slot - 5) * 8192;
            tensor.layers.push_back("a.small." + std::to_string(slot - 5));
        }
        parts.tensors.push_back(tensor);
    }
    const Plan stated = plan_from(m, parts);
    EXPECT_EQ(worker_info(stated).bytes_per_block, 188416u);

    // And the planner's own packing under the reference: it makes several sets of latents only, so
    // two groups of them are what it packs.
    const Model latents = model();
    const auto of_latent = [](std::uint64_t head_size) {
        return mla(16, head_size, KVPAGES_DTYPE_U8);
    };
    const auto windowed = [](std::uint64_t head_size) {
        kvpages_spec spec = attention(KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA, 16, 1, head_size,
                                      KVPAGES_DTYPE_U8);
        spec.sliding_window = 64;
        return spec;
    };
    for (int i = 0; i < 3; ++i) {
        add(latents, "full.large." + std::to_string(i), of_latent(2048));
        add(latents, "full.small." + std::to_string(i), of_latent(512));
        add(latents, "window.large." + std::to_string(i), windowed(2048));
        add(latents, "window.small." + std::to_string(i), windowed(512));
    }
    kvpages_plan_config config = plan_config(64);
    config.max_tokens_in_flight = 16;
    const Plan p = plan(latents, 8388608, config);
    ASSERT_EQ(worker_info(p).num_groups, 2u);
    EXPECT_EQ(worker_info(p).bytes_per_block, 3u * 32768 + 3u * 8192);
    EXPECT_EQ(worker_info(p).num_blocks, 8388608u / (3 * 32768 + 3 * 8192));
    for (std::size_t i = 0; i < worker_info(p).num_tensors; ++i) {
        EXPECT_EQ(tensor_info(p, i).block_stride_bytes, 3u * 32768 + 3u * 8192);
    }
}

TEST(CasesBudget, B17_BlocksThatAWindowCanHold) {
    struct Case {
        std::uint64_t window, in_flight, max_len, block, blocks;
    };
    for (const Case& given : {Case{1024, 8192, 131072, 16, 577}, Case{4, 1, 100, 4, 2},
                              Case{1024, 32768, 1000000, 32, 1057},
                              Case{1024, 1024, 1000000, 32, 65}, Case{128, 512, 100000, 16, 41}}) {
        const kvpages_spec spec = sliding(given.window, given.block, 1, 8);
        const kvpages_demand out = demand(spec, limits_of(given.max_len, given.in_flight));
        EXPECT_EQ(out.blocks_per_request, given.blocks);
        EXPECT_EQ(out.bytes_per_request, given.blocks * page_bytes(spec));
        EXPECT_EQ(out.admission_blocks, given.blocks);
    }
}

// The seed's number, which has a block more than 8 tokens can ever fill.
TEST(CasesBudget, B18_StraddleBlockOfAShortContext) {
    EXPECT_EQ(demand(sliding(4, 4, 1, 8), limits_of(8, 100)).blocks_per_request, 3u);
}

// Prefill ranks share work and no tokens, so they are no number of this library's at all.
TEST(CasesBudget, B20_OnlyDecodeRanksShareTokens) {
    EXPECT_EQ(demand(full(16, 1, 8), limits_of(1024)).blocks_per_request, 64u);
    kvpages_limits limits = limits_of(1000);
    limits.context_parallel_size = 4;
    EXPECT_EQ(demand(full(16, 1, 8), limits).blocks_per_request, 16u);
    const kvpages_spec spec = sliding(64, 16, 1, 8);
    kvpages_demand out = KVPAGES_DEMAND_INIT;
    EXPECT_TRUE(fails(kvpages_spec_demand(&spec, &limits, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "dcp_sliding_window", {"4"}));
    EXPECT_EQ(out.blocks_per_request, 0u);
}

TEST(CasesBudget, B22_CrossAttentionCachesTheEncoder) {
    const kvpages_spec spec = attention(KVPAGES_SPEC_KIND_CROSS_ATTENTION, 16, 1, 8);
    kvpages_limits limits = limits_of(448);
    limits.max_encoder_tokens = 1500;
    EXPECT_EQ(demand(spec, limits).blocks_per_request, 94u);
    // As a group of a model that decodes at most 448 tokens.
    const Model m = model();
    add(m, "layers.0.self", full(16, 1, 8));
    add(m, "layers.0.cross", spec);
    kvpages_plan_config config = plan_config(448);
    config.max_encoder_tokens = 1500;
    const Plan p = plan(m, 1 << 20, config);
    ASSERT_EQ(worker_info(p).num_groups, 2u);
    EXPECT_EQ(group_info(p, 1).blocks_per_request, 94u);
    EXPECT_GE(group_info(p, 1).table_width_blocks, 94u);
    EXPECT_EQ(group_info(p, 0).blocks_per_request, 28u);
    EXPECT_EQ(group_info(p, 0).row_blocks, 28u);
    EXPECT_EQ(group_info(p, 0).table_width_blocks, 28u);
}

TEST(CasesBudget, B24_BlockIdsFit32Bits) {
    const Model m = one_layer(full(1, 1, 1, KVPAGES_DTYPE_U8));
    const std::int64_t page = 2;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{m.get(), page << 33}}, plan_config(16), &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "too_many_blocks",
                      {"8589934592", "2147483647"}));
    EXPECT_EQ(raw, nullptr);
    EXPECT_TRUE(fails(try_plan({{m.get(), page << 31}}, plan_config(16), &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "too_many_blocks",
                      {"2147483648", "2147483647"}));
    EXPECT_EQ(worker_info(plan(m, (page << 31) - page, plan_config(16))).num_blocks, 2147483647u);

    const Model split = model();
    add(split, "layers.0.attn", full(33, 1, 1, KVPAGES_DTYPE_U8),
        backend_of_sizes(packed_nhd, {1}));
    kvpages_plan_config config = plan_config(16);
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 1u << 27;
    EXPECT_TRUE(fails(try_plan({{split.get(), 0}}, config, &raw), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "too_many_blocks", {"layers.0.attn", "4429185024", "33"}));
    EXPECT_EQ(raw, nullptr);
    config.num_blocks_override = 2147483647u / 33;
    EXPECT_EQ(worker_info(plan({{split.get(), 0}}, config)).num_blocks, 65075262u);
    config.num_blocks_override = 2147483647u / 33 + 1;
    EXPECT_NE(try_plan({{split.get(), 0}}, config, &raw), KVPAGES_STATUS_OK);
}

TEST(CasesBudget, B25_ModelWithoutCachedLayers) {
    const Model none = model();
    const Model encoder = model();
    add(encoder, "encoder.0", attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 1, 8),
        backend(packed_nhd));
    for (const std::uint32_t flags : {0u, std::uint32_t{KVPAGES_PLAN_AUTO_FIT}}) {
        for (const Model* of_worker : {&none, &encoder}) {
            kvpages_plan_config config = plan_config(4096);
            config.flags = flags;
            const Plan p = plan({{of_worker->get(), 0}, {none.get(), 12345}}, config);
            EXPECT_EQ(kvpages_plan_max_model_len(p.get()), 4096u);
            for (const std::size_t worker : {0u, 1u}) {
                EXPECT_EQ(worker_info(p, worker).num_blocks, 1u);
                EXPECT_EQ(worker_info(p, worker).num_groups, 0u);
                EXPECT_EQ(worker_info(p, worker).num_tensors, 0u);
                EXPECT_EQ(worker_info(p, worker).total_bytes, 0u);
            }
            EXPECT_EQ(kvpages_cache_num_layers(cache(p).get()), 0u);
        }
    }
}

TEST(CasesBudget, B27_LayersAreInOneGroupAndOneTensor) {
    const Model m = model();
    for (const char* name : {"A", "B"}) {
        add(m, name, full(16, 1, 8), backend(packed_nhd));
    }
    const std::uint64_t page = page_bytes(full(16, 1, 8));
    Parts good;
    good.num_blocks = 2;
    good.groups = {{{"A", "B"}, 0}};
    good.tensors = {{2 * page, {"A"}, 0, 0}, {2 * page, {"B"}, 0, 0}};
    EXPECT_EQ(worker_info(plan_from(m, good)).num_tensors, 2u);

    const auto refused = [&m](const Parts& parts, const std::string& kind) {
        kvpages_plan* raw = nullptr;
        EXPECT_TRUE(
            fails(try_parts(m, parts, &raw), KVPAGES_STATUS_INVALID_ARGUMENT, kind, {"B"}));
        EXPECT_EQ(raw, nullptr);
    };
    Parts lost = good;
    lost.tensors.pop_back();
    refused(lost, "layers_not_initialized");
    Parts ungrouped = good;
    ungrouped.groups[0].layers.pop_back();
    refused(ungrouped, "layers_not_initialized");
    Parts two_tensors = good;
    two_tensors.tensors.push_back({2 * page, {"B"}, 0, 0});
    refused(two_tensors, "layer_in_two_tensors");
    Parts two_groups = good;
    two_groups.groups.push_back({{"B"}, 0});
    refused(two_groups, "layer_in_two_groups");
    Parts twice = good;
    twice.groups[0].layers.push_back("B");
    refused(twice, "layer_in_two_groups");
}
