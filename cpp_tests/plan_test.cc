// Plans: workers, stages, automatic fitting, packing, tensor-parallel heads.
#include "support/api.h"
#include "support/failure.h"
#include "support/garbage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

using namespace support;
using Names = std::vector<std::string>;

namespace {

std::string layer_name(int i) { return "layers." + std::to_string(i) + ".attn"; }

}  // namespace

TEST(Plan, StagesThatLackAGroupHaveItEmpty) {
    // Full and sliding layers in turn; the second stage has sliding ones only.
    const Model first = model();
    const Model second = model();
    const Backend kernels = backend(packed_nhd);
    for (int i = 0; i < 4; ++i) {
        add(first, layer_name(i), i % 2 == 0 ? full(16, 2, 8) : sliding(32, 16, 2, 8), kernels);
    }
    for (int i = 4; i < 6; ++i) {
        add(second, layer_name(i), sliding(32, 16, 2, 8), kernels);
    }
    kvpages_plan_config config = plan_config(64);
    config.max_tokens_in_flight = 16;
    const Plan p = plan({{first.get(), 400000}, {second.get(), 400000}}, config);
    // Two full layers, four sliding ones: groups of two.
    ASSERT_EQ(worker_info(p, 0).num_groups, 3u);
    ASSERT_EQ(worker_info(p, 1).num_groups, 3u);
    EXPECT_EQ(worker_info(p, 0).num_blocks, worker_info(p, 1).num_blocks);
    Names all;
    for (std::size_t worker = 0; worker < 2; ++worker) {
        for (std::size_t group = 0; group < 3; ++group) {
            const kvpages_group_info info = group_info(p, group, worker);
            const Names names = group_layers(p, group, worker);
            EXPECT_EQ(names.size(), info.num_layers);
            // A group is the same on every worker, whether it has layers there or not.
            EXPECT_EQ(info.block_size, 16u);
            EXPECT_EQ(info.blocks_per_request, group_info(p, group, 0).blocks_per_request);
            EXPECT_EQ(info.row_blocks, group_info(p, group, 0).row_blocks);
            all.insert(all.end(), names.begin(), names.end());
        }
    }
    EXPECT_EQ(group_info(p, 0, 1).num_layers, 0u);
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (Names{layer_name(0), layer_name(1), layer_name(2), layer_name(3),
                          layer_name(4), layer_name(5)}));
    for (std::size_t worker = 0; worker < 2; ++worker) {
        const Cache c = cache(p, host_memory(), worker);
        EXPECT_EQ(kvpages_cache_num_layers(c.get()), worker == 0 ? 4u : 2u);
        EXPECT_EQ(kvpages_cache_num_blocks(c.get()), worker_info(p, 0).num_blocks);
        std::uint64_t bytes = 0;
        for (std::size_t i = 0; i < kvpages_cache_num_allocations(c.get()); ++i) {
            bytes += allocation(c, i).size_bytes;
        }
        EXPECT_EQ(bytes, worker_info(p, worker).total_bytes);
    }
}

TEST(Plan, WorkersOfOneModelAllocateTheSame) {
    const Model m = model();
    add(m, layer_name(0), full(16, 2, 8));
    const Plan p = plan({{m.get(), 50000}, {m.get(), 40000}, {m.get(), 60000}}, plan_config(64));
    ASSERT_EQ(kvpages_plan_num_workers(p.get()), 3u);
    for (std::size_t worker = 0; worker < 3; ++worker) {
        EXPECT_EQ(worker_info(p, worker).num_blocks, 39u);
        EXPECT_EQ(tensor_info(p, 0, worker).size_bytes, 39u * 1024);
        EXPECT_EQ(group_layers(p, 0, worker), (Names{layer_name(0)}));
    }
}

TEST(Plan, WorkersMustAgreeOnALayer) {
    const Model a = model();
    const Model b = model();
    add(a, layer_name(0), full(16, 2, 8));
    add(b, layer_name(0), full(16, 4, 8));
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(try_plan({{a.get(), 50000}, {a.get(), 50000}, {b.get(), 50000}},
                               plan_config(64), &out),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "worker_spec_mismatch",
                      {layer_name(0), "worker 0", "worker 2"}));
    EXPECT_TRUE(out.is_zero());
}

TEST(Plan, TheWorkerWithTooLittleIsNamed) {
    const Model m = model();
    add(m, layer_name(0), full(16, 2, 8));
    Info<kvpages_shortfall> shortfall;
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(try_plan({{m.get(), 50000}, {m.get(), 3000}}, plan_config(64), &out,
                               &shortfall),
                      KVPAGES_STATUS_DOES_NOT_FIT, "not_enough_memory",
                      {"worker 1", "64", "4096", "3000", "32"}));
    EXPECT_EQ(shortfall.value.worker, 1u);
    EXPECT_EQ(shortfall.value.needed_bytes, 4096u);
    EXPECT_EQ(shortfall.value.available_bytes, 3000u);
    EXPECT_EQ(shortfall.value.longest_model_len, 32u);
    // What it says is true.
    EXPECT_EQ(worker_info(plan({{m.get(), 50000}, {m.get(), 3000}}, plan_config(32))).num_blocks,
              2u);
    EXPECT_NE(try_plan({{m.get(), 50000}, {m.get(), 3000}}, plan_config(33), &out),
              KVPAGES_STATUS_OK);
    // A plan that fits leaves nothing in it.
    const kvpages_plan_config fits = plan_config(32);
    const kvpages_worker worker{m.get(), 50000};
    Info<kvpages_shortfall> unused;
    kvpages_plan* raw = nullptr;
    must(kvpages_plan_create(&fits, &worker, 1, &raw, &unused));
    const Plan p(raw);
    EXPECT_TRUE(unused.is_zero());
}

// The longest sequence is exactly what the check lets through, for all kinds together.
TEST(Plan, AutoFitIsTheLongestThatFits) {
    const Model first = model();
    add(first, layer_name(0), full(16, 2, 8));
    add(first, layer_name(1), sliding(40, 16, 2, 8));
    const Model second = model();
    add(second, layer_name(2), full(16, 2, 8));
    for (const std::uint64_t reserved : {0u, 1u, 3u}) {
        for (std::int64_t blocks = 4; blocks < 12; ++blocks) {
            const std::vector<kvpages_worker> workers{{first.get(), 1024 * blocks + 7},
                                                      {second.get(), 1024 * 10}};
            kvpages_plan_config config = plan_config(10000);
            config.max_tokens_in_flight = 5;
            config.reserved_blocks = reserved;
            config.flags = KVPAGES_PLAN_AUTO_FIT;
            kvpages_plan* raw = nullptr;
            const std::int32_t status = try_plan(workers, config, &raw);
            const Plan fitted(raw);
            config.flags = 0;
            if (status != KVPAGES_STATUS_OK) {
                EXPECT_EQ(status, KVPAGES_STATUS_DOES_NOT_FIT);
                EXPECT_STREQ(kvpages_last_error_kind(), "auto_fit_impossible");
                config.max_model_len = 1;
                EXPECT_EQ(try_plan(workers, config, &raw), KVPAGES_STATUS_DOES_NOT_FIT);
                continue;
            }
            const std::uint64_t longest = kvpages_plan_max_model_len(fitted.get());
            EXPECT_GT(longest, 0u);
            config.max_model_len = longest;
            const Plan explicitly = plan(workers, config);
            EXPECT_EQ(worker_info(explicitly).num_blocks, worker_info(fitted).num_blocks);
            EXPECT_EQ(worker_info(explicitly).capacity_tokens, worker_info(fitted).capacity_tokens);
            EXPECT_EQ(group_info(explicitly, 0).row_blocks, group_info(fitted, 0).row_blocks);
            config.max_model_len = longest + 1;
            EXPECT_EQ(try_plan(workers, config, &raw), KVPAGES_STATUS_DOES_NOT_FIT);
        }
    }
    // What fits already is not touched.
    kvpages_plan_config config = plan_config(20);
    config.flags = KVPAGES_PLAN_AUTO_FIT;
    EXPECT_EQ(kvpages_plan_max_model_len(plan(first, 1 << 20, config).get()), 20u);
}

TEST(Plan, AnOverrideReplacesTheMemory) {
    const Model m = model();
    add(m, layer_name(0), full(16, 2, 8));
    kvpages_plan_config config = plan_config(64);
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 9;
    for (const std::int64_t memory : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40}) {
        const Plan p = plan(m, memory, config);
        EXPECT_EQ(worker_info(p).num_blocks, 9u);
        EXPECT_EQ(worker_info(p).total_bytes, 9u * 1024);
        EXPECT_EQ(worker_info(p).max_concurrency, 9.0 / 4);
        EXPECT_EQ(worker_info(p).capacity_tokens, 144u);
    }
}

TEST(Plan, NumbersOfAPlainModel) {
    const Model m = model();
    for (int i = 0; i < 6; ++i) {
        add(m, layer_name(i), i % 3 == 0 ? full(16, 2, 8) : sliding(32, 16, 2, 8));
    }
    kvpages_plan_config config = plan_config(100);
    config.max_tokens_in_flight = 10;
    const Plan p = plan(m, 2 * 1024 * 50 + 100, config);
    const kvpages_worker_info info = worker_info(p);
    // Groups of two: full, and sliding twice.
    ASSERT_EQ(info.num_groups, 3u);
    EXPECT_EQ(group_layers(p, 0), (Names{layer_name(0), layer_name(3)}));
    EXPECT_EQ(group_layers(p, 1), (Names{layer_name(1), layer_name(4)}));
    EXPECT_EQ(group_layers(p, 2), (Names{layer_name(2), layer_name(5)}));
    ASSERT_EQ(info.num_tensors, 2u);
    EXPECT_EQ(tensor_layers(p, 0), (Names{layer_name(0), layer_name(1), layer_name(2)}));
    EXPECT_EQ(info.bytes_per_block, 2048u);
    EXPECT_EQ(info.num_blocks, 50u);
    // 7 blocks of full, ceil(41 / 16) + 1 = 4 of each sliding group.
    EXPECT_EQ(group_info(p, 0).blocks_per_request, 7u);
    EXPECT_EQ(group_info(p, 1).blocks_per_request, 4u);
    EXPECT_EQ(info.bytes_per_request, 15u * 2048);
    EXPECT_DOUBLE_EQ(info.max_concurrency, 50.0 / 15);
    EXPECT_EQ(info.capacity_tokens, 333u);
    EXPECT_EQ(group_info(p, 0).row_blocks, 7u);
    EXPECT_EQ(group_info(p, 1).row_blocks, 7u);
    EXPECT_EQ(info.needs_zeroing, 0u);
    config.reserved_blocks = 1;
    EXPECT_DOUBLE_EQ(worker_info(plan(m, 2 * 1024 * 50, config)).max_concurrency, 49.0 / 15);
}

TEST(Plan, CrossLayerBlocksArePacked) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    for (int i = 0; i < 6; ++i) {
        add(m, layer_name(i), i % 3 == 0 ? full(16, 2, 8) : sliding(32, 16, 2, 8), kernels);
    }
    const Plan p = plan_of_blocks(m, 10, KVPAGES_PLAN_CROSS_LAYER_BLOCKS);
    ASSERT_EQ(worker_info(p).num_groups, 3u);
    ASSERT_EQ(worker_info(p).num_tensors, 2u);
    for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(tensor_info(p, i).block_stride_bytes, 2048u);
        EXPECT_EQ(tensor_info(p, i).offset_bytes, i * 1024);
        EXPECT_EQ(tensor_info(p, i).size_bytes, 20480u);
        EXPECT_EQ(tensor_layers(p, i).size(), 3u);
    }
    // The packed tensors are one allocation.
    EXPECT_EQ(worker_info(p).total_bytes, 20480u);
    const Cache c = cache(p);
    ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
    EXPECT_EQ(report(c, layer_name(3)).offset_bytes, 1024u);
    EXPECT_EQ(report(c, layer_name(3)).block_step_bytes, 2048u);
    // One group has nothing to pack with.
    const Model one = model();
    add(one, layer_name(0), full(16, 2, 8), kernels);
    add(one, layer_name(1), full(16, 2, 8), kernels);
    const Plan apart = plan_of_blocks(one, 10, KVPAGES_PLAN_CROSS_LAYER_BLOCKS);
    EXPECT_EQ(tensor_info(apart, 0).block_stride_bytes, 0u);
    EXPECT_EQ(kvpages_cache_num_allocations(cache(apart).get()), 2u);
}

TEST(Plan, WithoutTheHybridManagerOneTableServesAll) {
    const Model m = model();
    add(m, layer_name(0), full(16, 2, 8));
    add(m, layer_name(1), sliding(32, 16, 2, 8));
    kvpages_spec chunked = attention(KVPAGES_SPEC_KIND_CHUNKED_LOCAL, 16, 2, 8);
    chunked.attention_chunk_size = 64;
    add(m, layer_name(2), chunked);
    const Plan p = plan_of_blocks(m, 10, KVPAGES_PLAN_HYBRID_MANAGER_OFF);
    ASSERT_EQ(worker_info(p).num_groups, 1u);
    EXPECT_EQ(group_layers(p, 0), (Names{layer_name(0), layer_name(1), layer_name(2)}));
    EXPECT_EQ(worker_info(p).num_tensors, 3u);
    // Only sliding layers: nothing to promote to, nothing to promote.
    const Model only = model();
    add(only, layer_name(0), sliding(32, 16, 2, 8));
    add(only, layer_name(1), sliding(32, 16, 2, 8));
    const Plan q = plan_of_blocks(only, 10, KVPAGES_PLAN_HYBRID_MANAGER_OFF);
    EXPECT_EQ(group_spec(q, 0).kind, static_cast<std::uint32_t>(KVPAGES_SPEC_KIND_SLIDING_WINDOW));
    const Model unlike = model();
    add(unlike, layer_name(0), sliding(32, 16, 2, 8));
    add(unlike, layer_name(1), sliding(64, 16, 2, 8));
    kvpages_plan_config config = plan_config();
    config.flags = KVPAGES_PLAN_HYBRID_MANAGER_OFF;
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(try_plan({{unlike.get(), 1 << 20}}, config, &out),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "hybrid_disabled_not_unifiable",
                      {layer_name(0), layer_name(1)}));
}

TEST(Plan, ZeroingIsAskedForWhereTypesMeet) {
    const auto needs = [](const kvpages_spec& a, const kvpages_spec& b) {
        const Model m = model();
        add(m, layer_name(0), a);
        add(m, layer_name(1), b);
        return worker_info(plan_of_blocks(m, 10)).needs_zeroing;
    };
    State state;
    state.add(KVPAGES_DTYPE_F16, {512});
    EXPECT_EQ(needs(full(16, 2, 8), state.spec()), 1u);
    EXPECT_EQ(needs(full(16, 2, 8), sliding(32, 16, 2, 8)), 0u);
    EXPECT_EQ(needs(full(16, 2, 8), sliding(32, 16, 2, 4, KVPAGES_DTYPE_F32)), 1u);
    EXPECT_EQ(needs(full(16, 2, 8), full(16, 2, 8)), 0u);
}

TEST(Plan, TensorParallelHeads) {
    struct Case {
        std::uint64_t total, ranks, heads, replicas;
    };
    for (const Case& given : {Case{8, 1, 8, 1}, Case{8, 2, 4, 1}, Case{8, 8, 1, 1},
                              Case{8, 16, 1, 2}, Case{1, 8, 1, 8}, Case{6, 3, 2, 1},
                              Case{1, 1, 1, 1}, Case{3, 9, 1, 3}}) {
        std::uint64_t heads = 0;
        std::uint64_t replicas = 0;
        must(kvpages_kv_heads_per_rank(given.total, given.ranks, &heads, &replicas));
        EXPECT_EQ(heads, given.heads);
        EXPECT_EQ(replicas, given.replicas);
        // The ranks together store every head, and each as often.
        EXPECT_EQ(heads * given.ranks, given.total * replicas);
    }
}

TEST(Plan, BlockSizesOfASchedulerAndAPrefixCache) {
    const Model m = model();
    add(m, layer_name(0), full(16, 2, 8));
    const Plan one = plan_of_blocks(m, 10);
    kvpages_block_size_config config = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
    config.cache_block_size = 16;
    config.hashes_blocks = 1;
    std::uint64_t scheduler = 0;
    std::uint64_t hash = 0;
    must(kvpages_plan_resolve_block_sizes(one.get(), &config, &scheduler, &hash));
    EXPECT_EQ(scheduler, 16u);
    EXPECT_EQ(hash, 16u);
    add(m, layer_name(1), sliding(64, 24, 2, 8));
    // Pages of 1024 and 1536 bytes: padded, as the specs say they may be.
    const Model strided = model();
    for (const std::uint64_t block : {16u, 24u}) {
        kvpages_spec spec = block == 16 ? full(16, 2, 8) : sliding(64, 24, 2, 8);
        spec.flags = KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE;
        add(strided, layer_name(static_cast<int>(block)), spec);
    }
    const Plan two = plan_of_blocks(strided, 10);
    ASSERT_EQ(worker_info(two).num_groups, 2u);
    must(kvpages_plan_resolve_block_sizes(two.get(), &config, &scheduler, &hash));
    EXPECT_EQ(scheduler, 48u);
    EXPECT_EQ(hash, 8u);
    config.prefix_match_unit = 16;
    EXPECT_TRUE(fails(kvpages_plan_resolve_block_sizes(two.get(), &config, &scheduler, &hash),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "prefix_match_unit_not_dividing",
                      {"16", "24"}));
    EXPECT_EQ(scheduler, 0u);
    EXPECT_EQ(hash, 0u);
}

TEST(Plan, BlockSizeOfAModelThatMixesAttentionAndState) {
    struct Case {
        std::uint32_t mode;
        std::uint64_t block, kernel, token, state, chunk, size, state_size;
    };
    for (const Case& given :
         {Case{KVPAGES_STATE_CACHE_MODE_NONE, 16, 16, 100, 5000, 0, 64, 0},
          Case{KVPAGES_STATE_CACHE_MODE_NONE, 16, 16, 100, 1, 0, 16, 0},
          Case{KVPAGES_STATE_CACHE_MODE_ALIGN, 16, 32, 100, 6401, 0, 96, 96},
          Case{KVPAGES_STATE_CACHE_MODE_ALL, 16, 16, 100, 5000, 24, 96, 96},
          Case{KVPAGES_STATE_CACHE_MODE_ALL, 16, 16, 100, 4800, 24, 48, 48}}) {
        kvpages_hybrid_config config = KVPAGES_HYBRID_CONFIG_INIT;
        config.block_size = given.block;
        config.smallest_kernel_block = given.kernel;
        config.attention_bytes_per_token = given.token;
        config.state_page_bytes = given.state;
        config.base_chunk = given.chunk;
        config.state_cache_mode = given.mode;
        kvpages_hybrid_block out = KVPAGES_HYBRID_BLOCK_INIT;
        must(kvpages_hybrid_block_size(&config, &out));
        EXPECT_EQ(out.block_size, given.size);
        EXPECT_EQ(out.page_size_bytes, given.size * given.token);
        EXPECT_EQ(out.state_block_size, given.state_size);
        EXPECT_GE(out.page_size_bytes, given.state);
    }
}

TEST(Plan, TheSameInputGivesTheSamePlan) {
    const auto text = [] {
        const Model m = model();
        for (int i = 0; i < 40; ++i) {
            add(m, layer_name(i),
                i % 5 == 0 ? full(16, 2, 8) : sliding(16 + 16 * (static_cast<std::uint64_t>(i) % 3),
                                                      16, 2, 8));
        }
        return explanation(plan_of_blocks(m, 1000), KVPAGES_TEXT_FORMAT_JSON);
    };
    EXPECT_EQ(text(), text());
}

// Latents of DeepSeek V4, whose pages are a multiple of 576 bytes, through the preset for them.
TEST(Plan, DeepseekV4PresetsReadItsAlignedPages) {
    const auto v4 = [](std::uint64_t ratio) {
        kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
        spec.cache_dtype = "fp8_ds_mla";
        spec.model_version = "deepseek_v4";
        spec.compress_ratio = ratio;
        spec.alignment_bytes = 576;
        return spec;
    };
    for (const std::uint64_t ratio : {4u, 128u}) {
        const Model m = model();
        add(m, layer_name(0), v4(ratio), preset(KVPAGES_PRESET_DEEPSEEK_V4_MLA));
        const Cache c = cache(plan_of_blocks(m, 3));
        EXPECT_EQ(view(c, layer_name(0)).shape[1], static_cast<std::int64_t>(256 / ratio));
        EXPECT_EQ(view(c, layer_name(0)).strides[0],
                  static_cast<std::int64_t>(page_bytes(v4(ratio))));
    }
}

// Every way of not fitting says by how much.
TEST(Plan, AShortfallIsAlwaysFilled) {
    const Model m = model();
    add(m, "A", full(16, 2, 8), backend(packed_nhd));  // a page of 1024 bytes
    for (const std::int64_t memory : {std::int64_t{-5}, std::int64_t{0}, std::int64_t{1000}}) {
        Info<kvpages_shortfall> shortfall;
        kvpages_plan* out = nullptr;
        EXPECT_TRUE(fails(try_plan({{m.get(), memory}}, plan_config(64), &out, &shortfall),
                          KVPAGES_STATUS_DOES_NOT_FIT,
                          memory > 0 ? "not_enough_memory" : "no_available_memory",
                          {"worker 0", "4096", std::to_string(memory)}));
        EXPECT_EQ(shortfall.value.needed_bytes, 4096u);
        EXPECT_EQ(shortfall.value.available_bytes,
                  memory > 0 ? static_cast<std::uint64_t>(memory) : 0u);
        EXPECT_EQ(shortfall.value.longest_model_len, 0u);
    }
    kvpages_plan_config config = plan_config(64);
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    kvpages_plan* out = nullptr;
    EXPECT_TRUE(fails(try_plan({{m.get(), 1 << 30}}, config, &out), KVPAGES_STATUS_DOES_NOT_FIT,
                      "no_available_memory", {"num_blocks_override"}));
}

