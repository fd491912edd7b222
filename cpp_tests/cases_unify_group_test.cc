// Published faults in making pages equal and in grouping, each with the numbers that are right.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

using namespace support;
using Names = std::vector<std::string>;

namespace {

// Layers of different kinds with one page of 32 bytes.
kvpages_spec small_full() { return full(4, 1, 2); }
kvpages_spec small_sliding() { return sliding(8, 4, 1, 2); }

}  // namespace

TEST(CasesUnify, G01_AStateIsPaddedNotScaled) {
    State state;
    state.add(KVPAGES_DTYPE_F32, {100});
    const Model m = model();
    add(m, "mamba", state.spec(), state_backend());
    add(m, "attn", full(16, 2, 64), backend(packed_nhd));
    const Plan p = plan_of_blocks(m, 4);
    ASSERT_EQ(worker_info(p).num_groups, 2u);
    EXPECT_EQ(group_layers(p, 0), (Names{"mamba"}));
    EXPECT_EQ(group_spec(p, 0).block_size, 16u);
    EXPECT_EQ(page_bytes(group_spec(p, 0)), 8192u);
    EXPECT_EQ(group_spec(p, 0).page_size_padded_bytes, 8192u);
    EXPECT_EQ(group_spec(p, 1).block_size, 16u);
    EXPECT_EQ(page_bytes(group_spec(p, 1)), 8192u);
    EXPECT_EQ(group_spec(p, 1).page_size_padded_bytes, 0u);
    ASSERT_EQ(worker_info(p).num_tensors, 1u);
    EXPECT_EQ(tensor_info(p, 0).size_bytes, 4 * 8192u);
}

TEST(CasesUnify, G03_PagesThatDoNotDivide) {
    // 3072 and 4096 bytes in blocks of 16 tokens.
    for (const bool strided : {false, true}) {
        kvpages_spec a = full(16, 1, 96, KVPAGES_DTYPE_U8);
        a.flags = strided ? KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE : 0;
        const kvpages_spec b = sliding(64, 16, 1, 128, KVPAGES_DTYPE_U8);
        ASSERT_EQ(page_bytes(a), 3072u);
        ASSERT_EQ(page_bytes(b), 4096u);
        const Model m = model();
        add(m, "A", a);
        add(m, "B", b);
        kvpages_plan_config config = plan_config(64);
        config.max_tokens_in_flight = 1;
        kvpages_plan* raw = nullptr;
        const std::int32_t status = try_plan({{m.get(), 1 << 20}}, config, &raw);
        const Plan p(raw);
        if (!strided) {
            EXPECT_TRUE(fails(status, KVPAGES_STATUS_INVALID_ARGUMENT, "page_size_not_unifiable",
                              {"A", "3072", "4096"}));
            EXPECT_EQ(raw, nullptr);
            continue;
        }
        ASSERT_EQ(status, KVPAGES_STATUS_OK) << kvpages_last_error_message();
        EXPECT_EQ(group_spec(p, 0).block_size, 16u);
        EXPECT_EQ(page_bytes(group_spec(p, 0)), 4096u);
        EXPECT_EQ(page_bytes(group_spec(p, 1)), 4096u);
    }
}

// The seed's number: blocks of 16 tokens, most of each page padding.
TEST(CasesUnify, G04_SmallAttentionPageBesideAHugeState) {
    State state;
    state.add(KVPAGES_DTYPE_U8, {10000});
    kvpages_spec a = full(16, 1, 48, KVPAGES_DTYPE_U8);
    ASSERT_EQ(page_bytes(a), 1536u);
    const Model m = model();
    add(m, "attn", a, backend(packed_nhd));
    add(m, "mamba", state.spec(), state_backend());
    const Plan p = plan_of_blocks(m, 4);
    ASSERT_EQ(worker_info(p).num_groups, 2u);
    EXPECT_EQ(page_bytes(group_spec(p, 0)), 10000u);
    EXPECT_EQ(page_bytes(group_spec(p, 1)), 10000u);
    EXPECT_EQ(group_spec(p, 0).block_size, 16u);
    EXPECT_EQ(describe(group_spec(p, 0)).unpadded_page_size_bytes, 1536u);
    // The views step over the padding.
    const Cache c = cache(p);
    EXPECT_EQ(view(c, "attn").strides[0], 10000);
    EXPECT_EQ(view(c, "mamba").strides[0], 10000);
}

// The seed's number.
TEST(CasesGroup, G06_OneOddLayerMakesGroupsOfOne) {
    State state;
    state.add(KVPAGES_DTYPE_U8, {32});
    const Model m = model();
    for (int i = 0; i < 30; ++i) {
        add(m, "state." + std::to_string(i), state.spec());
    }
    for (int i = 0; i < 10; ++i) {
        add(m, "full." + std::to_string(i), small_full());
    }
    for (int i = 0; i < 5; ++i) {
        add(m, "sliding." + std::to_string(i), small_sliding());
    }
    kvpages_spec odd = full(8, 1, 1);
    ASSERT_EQ(page_bytes(odd), page_bytes(small_full()));
    add(m, "odd", odd);
    const Plan p = plan_of_blocks(m, 100);
    ASSERT_EQ(worker_info(p).num_groups, 46u);
    for (std::size_t group = 0; group < 46; ++group) {
        EXPECT_EQ(group_info(p, group).num_layers, 1u);
    }
    EXPECT_EQ(worker_info(p).num_tensors, 1u);
    EXPECT_EQ(tensor_info(p, 0).num_layers, 46u);
}

// The seed's answer: the window is no reason for one group, however long it is.
TEST(CasesGroup, G08_WindowAsLongAsTheContext) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "A", full(16, 1, 8), kernels);
    add(m, "B", sliding(512, 16, 1, 8), kernels);
    kvpages_plan_config config = plan_config(511);
    config.max_tokens_in_flight = 64;
    const Plan p = plan(m, 1 << 20, config);
    ASSERT_EQ(worker_info(p).num_groups, 2u);
    EXPECT_EQ(group_layers(p, 0), (Names{"A"}));
    EXPECT_EQ(group_layers(p, 1), (Names{"B"}));
    const Cache c = cache(p);
    const auto num_blocks = static_cast<std::int64_t>(worker_info(p).num_blocks);
    for (const char* name : {"A", "B"}) {
        EXPECT_EQ(shape(view(c, name)), (std::vector<std::int64_t>{num_blocks, 16, 1, 16}));
        EXPECT_EQ(strides(view(c, name)), (std::vector<std::int64_t>{256, 16, 16, 1}));
    }
}
