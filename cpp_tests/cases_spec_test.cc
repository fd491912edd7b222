// Published faults in what a layer is said to store, each with the numbers that are right.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

using namespace support;
using Names = std::vector<std::string>;

namespace {

kvpages_spec quantised(kvpages_spec spec, std::uint32_t mode) {
    spec.quant_mode = mode;
    return spec;
}

}  // namespace

TEST(CasesSpec, S01_AlignmentComesAfterTheScales) {
    for (const std::uint64_t head_size : {72u, 71u}) {
        kvpages_spec spec = quantised(mla(16, head_size, KVPAGES_DTYPE_I8),
                                      KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD);
        spec.alignment_bytes = 576;
        EXPECT_EQ(describe(spec).real_page_size_bytes, 16 * head_size);
        EXPECT_EQ(describe(spec).unpadded_page_size_bytes, 16 * head_size + 128);
        EXPECT_EQ(describe(spec).page_size_bytes, 1728u);
    }
}

TEST(CasesSpec, S03_FourBitsHalveEveryKind) {
    const kvpages_spec of_full =
        quantised(full(16, 1, 128, KVPAGES_DTYPE_U8), KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD);
    const kvpages_spec of_sliding = quantised(sliding(64, 16, 1, 128, KVPAGES_DTYPE_U8),
                                              KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD);
    EXPECT_EQ(page_bytes(of_full), 2176u);
    EXPECT_EQ(page_bytes(of_sliding), 2176u);
}

TEST(CasesSpec, S05_BlockScalesOfFp4) {
    const auto fp4 = [](kvpages_spec spec) {
        return quantised(spec, KVPAGES_QUANT_MODE_NVFP4);
    };
    EXPECT_EQ(page_bytes(fp4(full(16, 1, 128, KVPAGES_DTYPE_U8))), 2304u);
    EXPECT_EQ(page_bytes(fp4(sliding(64, 16, 1, 128, KVPAGES_DTYPE_U8))), 2304u);
    for (const kvpages_spec& spec : {fp4(full(16, 1, 72, KVPAGES_DTYPE_U8)),
                                     fp4(sliding(64, 16, 1, 72, KVPAGES_DTYPE_U8))}) {
        kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
        EXPECT_TRUE(fails(kvpages_spec_describe(&spec, &info), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "packed_width_not_dividing", {"head_size", "72", "16"}));
        EXPECT_EQ(info.page_size_bytes, 0u);
    }
}

TEST(CasesSpec, S07_PromotionKeepsTheQuantisation) {
    kvpages_spec chunked = quantised(
        attention(KVPAGES_SPEC_KIND_CHUNKED_LOCAL, 16, 1, 64, KVPAGES_DTYPE_I8),
        KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD);
    chunked.attention_chunk_size = 128;
    const kvpages_spec whole =
        quantised(full(16, 1, 64, KVPAGES_DTYPE_I8), KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD);
    const Model m = model();
    add(m, "chunked", chunked);
    add(m, "full", whole);
    const Plan p = plan_of_blocks(m, 4, KVPAGES_PLAN_HYBRID_MANAGER_OFF);
    ASSERT_EQ(worker_info(p).num_groups, 1u);
    EXPECT_EQ(group_layers(p, 0), (Names{"chunked", "full"}));
    const kvpages_group_info group = group_info(p, 0);
    ASSERT_EQ(group.num_specs, 1u);
    const kvpages_spec promoted = group_spec(p, 0);
    EXPECT_EQ(promoted.kind, static_cast<std::uint32_t>(KVPAGES_SPEC_KIND_FULL_ATTENTION));
    EXPECT_EQ(promoted.quant_mode,
              static_cast<std::uint32_t>(KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD));
    EXPECT_EQ(promoted.attention_chunk_size, 128u);
    EXPECT_EQ(page_bytes(promoted), 2176u);
    EXPECT_EQ(tensor_info(p, 0).size_bytes, 4 * 2176u);
    EXPECT_EQ(tensor_info(p, 1).size_bytes, 4 * 2176u);
}

// The reference keeps the promoted layer's own block, so it refuses. The compact policy gives both
// blocks of 64 tokens.
TEST(CasesSpec, S08_PromotionUnderTheReferenceKeepsTheBlockSize) {
    const Model m = model();
    add(m, "sliding", sliding(128, 16, 2, 64));
    add(m, "full", full(64, 2, 64));
    kvpages_plan_config config = plan_config(1024);
    config.flags = KVPAGES_PLAN_HYBRID_MANAGER_OFF;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{m.get(), 1 << 30}}, config, &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "hybrid_disabled_not_unifiable",
                      {"sliding", "full", "16", "64"}));
    EXPECT_EQ(raw, nullptr);
    config.policy = KVPAGES_POLICY_COMPACT;
    const Plan compact = plan({{m.get(), 1 << 30}}, config);
    ASSERT_EQ(worker_info(compact).num_groups, 1u);
    EXPECT_EQ(group_info(compact, 0).block_size, 64u);
    // With one block size nothing is in the way.
    const Model same = model();
    add(same, "sliding", sliding(128, 64, 2, 64));
    add(same, "full", full(64, 2, 64));
    const Plan p = plan_of_blocks(same, 4, KVPAGES_PLAN_HYBRID_MANAGER_OFF);
    ASSERT_EQ(worker_info(p).num_groups, 1u);
    EXPECT_EQ(group_info(p, 0).block_size, 64u);
    EXPECT_EQ(group_spec(p, 0).sliding_window, 128u);
}

TEST(CasesSpec, S10_TwoWindowsOfFullStorageAreOneGroup) {
    kvpages_spec near = full(16, 2, 64);
    near.sliding_window = 128;
    kvpages_spec far = full(16, 2, 64);
    far.sliding_window = 256;
    const Model m = model();
    add(m, "near", near);
    add(m, "far", far);
    const Plan p = plan_of_blocks(m, 4);
    ASSERT_EQ(worker_info(p).num_groups, 1u);
    EXPECT_EQ(group_layers(p, 0), (Names{"near", "far"}));
    const kvpages_group_info group = group_info(p, 0);
    EXPECT_EQ(group.is_set, 1u);
    ASSERT_EQ(group.num_specs, 2u);
    for (std::size_t i = 0; i < 2; ++i) {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        const char* name = nullptr;
        must(kvpages_plan_get_group_spec(p.get(), 0, 0, i, &spec, &name));
        EXPECT_EQ(spec.sliding_window, i == 0 ? 128u : 256u);
        EXPECT_STREQ(name, i == 0 ? "near" : "far");
    }
}

// The part that planning has in it: query heads do not change what is stored, so they neither split
// a block table nor reorder it.
TEST(CasesSpec, S12_QueryHeadsDoNotSplitABlockTable) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "t0", full(16, 2, 64), kernels, 8);
    add(m, "d0", full(16, 2, 64), kernels, 4);
    add(m, "t1", full(16, 2, 64), kernels, 8);
    const Plan p = plan_of_blocks(m, 4);
    ASSERT_EQ(worker_info(p).num_groups, 1u);
    EXPECT_EQ(group_layers(p, 0), (Names{"t0", "d0", "t1"}));
    EXPECT_EQ(group_info(p, 0).num_specs, 1u);
}

TEST(CasesSpec, S14_KernelBlocksAreIndexedByGroup) {
    const Model m = model();
    const Backend kernels = backend_of_sizes(packed_nhd, {16, 32, 64});
    add(m, "encoder", attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 48, 2, 64), kernels);
    add(m, "full", full(48, 2, 64), kernels);
    Parts parts;
    parts.num_blocks = 4;
    parts.groups = {{{"encoder"}, 0}, {{"full"}, 0}};
    parts.tensors = {{4 * page_bytes(full(48, 2, 64)), {"full"}, 0, 0}};
    const Plan chosen = plan_from(m, parts);
    EXPECT_EQ(group_info(chosen, 0).kernel_block_size, 0u);
    EXPECT_EQ(group_info(chosen, 1).kernel_block_size, 16u);
    // Three kernel blocks in each of four blocks.
    EXPECT_EQ(view(cache(chosen), "full").shape[0], 12);

    parts.kernel_block_sizes = {0, 16};
    const Plan given = plan_from(m, parts);
    EXPECT_EQ(group_info(given, 0).kernel_block_size, 0u);
    EXPECT_EQ(group_info(given, 1).kernel_block_size, 16u);
    for (const std::vector<std::uint64_t>& sizes :
         {std::vector<std::uint64_t>{16}, std::vector<std::uint64_t>{0, 16, 16}}) {
        parts.kernel_block_sizes = sizes;
        kvpages_plan* raw = nullptr;
        EXPECT_TRUE(fails(try_parts(m, parts, &raw), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "per_group_array_length", {std::to_string(sizes.size()), "2 groups"}));
        EXPECT_EQ(raw, nullptr);
    }
}

TEST(CasesSpec, S15_LargestKernelBlockThatSuitsAll) {
    struct Takes {
        std::vector<std::uint64_t> sizes;
        std::vector<std::uint64_t> multiples;
    };
    struct Case {
        std::uint64_t block_size;
        std::vector<Takes> backends;
        std::uint64_t selected;  // 0: none
    };
    const std::vector<Case> cases{
        {528, {{{}, {16}}}, 528},
        {528, {{{16, 32, 64}, {}}}, 16},
        {4192, {{{16, 32, 64}, {}}}, 32},
        {2112, {{{16, 32, 64}, {}}}, 64},
        {64, {{{16, 32}, {}}, {{}, {16}}}, 32},
        {32, {{{64}, {}}}, 0},
        {96, {{{16, 32}, {}}, {{64}, {}}}, 0},
    };
    for (const Case& given : cases) {
        std::vector<Backend> backends;
        std::vector<const kvpages_backend*> pointers;
        for (const Takes& takes : given.backends) {
            BackendOptions options;
            options.layout = packed_nhd;
            options.sizes = takes.sizes;
            options.multiples = takes.multiples;
            backends.push_back(backend(options));
            pointers.push_back(backends.back().get());
        }
        std::uint64_t selected = 77;
        const std::int32_t status = kvpages_select_kernel_block_size(
            given.block_size, pointers.data(), pointers.size(), &selected);
        EXPECT_EQ(selected, given.selected);
        if (given.selected == 0) {
            EXPECT_TRUE(fails(status, KVPAGES_STATUS_INVALID_ARGUMENT, "no_common_block_size",
                              {std::to_string(given.block_size), "64"}));
        } else {
            EXPECT_EQ(status, KVPAGES_STATUS_OK);
        }
    }
}

TEST(CasesSpec, S17_NamesWithTwoNumbers) {
    std::uint64_t index = 77;
    must(kvpages_layer_index("model.layers.3.self_attn.1.attn", 2, &index));
    EXPECT_EQ(index, 7u);
    index = 77;
    EXPECT_TRUE(fails(kvpages_layer_index("layers.0.self_attn.2", 2, &index),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "module_index_out_of_range",
                      {"layers.0.self_attn.2", "2"}));
    EXPECT_EQ(index, 0u);
    index = 77;
    EXPECT_TRUE(fails(kvpages_layer_index("layers.3.mixer.1", 1, &index),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "layer_index_not_one_integer",
                      {"layers.3.mixer.1", "2"}));
    EXPECT_EQ(index, 0u);

    const std::vector<const char*> names{"layers.3.self_attn.attn", "layers.1.self_attn.1.attn"};
    kvpages_bind_config config = KVPAGES_BIND_CONFIG_INIT;
    config.layer_names = names.data();
    config.num_layers = names.size();
    config.context_names = names.data();
    config.num_context_names = names.size();
    config.num_attention_modules = 2;
    std::vector<std::size_t> order(2, 77);
    std::vector<std::size_t> bound(2, 77);
    EXPECT_TRUE(fails(kvpages_bind_layers(&config, order.data(), bound.data()),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "layer_index_collision",
                      {names[0], names[1], "3"}));
}

TEST(CasesSpec, S19_LayersAreBoundByNumber) {
    const std::vector<const char*> names{"layers.10", "layers.9", "layers.1.self",
                                         "layers.1.cross"};
    kvpages_bind_config config = KVPAGES_BIND_CONFIG_INIT;
    config.layer_names = names.data();
    config.num_layers = names.size();
    config.context_names = names.data();
    config.num_context_names = names.size();
    std::vector<std::size_t> order(4, 77);
    std::vector<std::size_t> bound(4, 77);
    must(kvpages_bind_layers(&config, order.data(), bound.data()));
    EXPECT_EQ(order, (std::vector<std::size_t>{2, 3, 1, 0}));
    EXPECT_EQ(bound, (std::vector<std::size_t>{0, 1, 2, 3}));

    const Model m = model();
    for (const char* name : names) {
        add(m, name, full(16, 1, 8), backend(packed_nhd));
    }
    const Cache c = cache(plan_of_blocks(m, 2));
    std::size_t count = 0;
    std::vector<std::size_t> layers(4, 77);
    must(kvpages_cache_copy_bound_layers(c.get(), 1, layers.data(), 4, &count));
    EXPECT_EQ(count, 4u);
    EXPECT_EQ(layers, (std::vector<std::size_t>{2, 3, 1, 0}));
}
