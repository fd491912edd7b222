// Published view faults of inference engines, each with the numbers that are right.
#include "support/api.h"
#include "support/bytes.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <vector>

using namespace support;
using Numbers = std::vector<std::int64_t>;

namespace {

// A backend whose kernels need dense pages.
Backend dense(const std::string& layout, const std::vector<std::uint64_t>& sizes = {}) {
    BackendOptions options;
    options.layout = layout;
    options.flags = 0;
    if (!sizes.empty()) {
        options.sizes = sizes;
        options.multiples.clear();
    }
    return backend(options);
}

// The bytes of block `block` that a view reaches, as offsets in its allocation. `kv_dim` with an
// index narrows them to keys or values.
std::set<std::size_t> bytes_of_block(const Cache& cache, const std::string& layer,
                                     std::int64_t num_blocks, std::int64_t block,
                                     std::size_t kv_dim = 99, std::int64_t kv = 0) {
    const kvpages_tensor tensor = view(cache, layer);
    const std::size_t block_dim = report(cache, layer).block_dim;
    const std::int64_t ratio = tensor.shape[block_dim] / num_blocks;
    const Allocations allocations(cache);
    const std::size_t bytes = kvpages_dtype_bytes(tensor.dtype);
    std::set<std::size_t> found;
    for_each_index(shape(tensor), [&](const Numbers& index) {
        if (index[block_dim] / ratio != block || (kv_dim != 99 && index[kv_dim] != kv)) {
            return;
        }
        const Place place = allocations.place(element(tensor, index), bytes);
        for (std::size_t byte = 0; byte < bytes; ++byte) {
            found.insert(place.offset + byte);
        }
    });
    return found;
}

std::set<std::size_t> range(std::size_t from, std::size_t to) {
    std::set<std::size_t> all;
    for (std::size_t i = from; i < to; ++i) {
        all.insert(i);
    }
    return all;
}

// Two layers of groups of their own in one buffer.
Parts shared_parts(std::uint64_t num_blocks, std::uint64_t page) {
    Parts parts;
    parts.num_blocks = num_blocks;
    parts.groups = {{{"attn.0"}, 0}, {{"mamba.0"}, 0}};
    parts.tensors = {{page * num_blocks, {"attn.0", "mamba.0"}, 0, 0}};
    return parts;
}

// One packed layer of 4 tokens, 2 heads, width 3.
Parts packed_parts(std::uint64_t num_blocks, std::uint64_t stride, std::uint64_t offset) {
    Parts parts;
    parts.num_blocks = num_blocks;
    parts.groups = {{{"A"}, 0}};
    parts.tensors = {{stride * num_blocks, {"A"}, offset, stride}};
    return parts;
}

}  // namespace

TEST(CasesViews, V01_StateAndKvFirstAttentionShareABuffer) {
    const Model m = model();
    const Backend kernels = dense(kv_first);
    State state;
    state.add(KVPAGES_DTYPE_F32, {2048});
    add(m, "attn.0", full(16, 2, 64), kernels);
    add(m, "mamba.0", state.spec(), state_backend());
    const Plan p = plan_of_blocks(m, 4);
    const Cache c = cache(p);
    ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
    EXPECT_EQ(allocation(c, 0).size_bytes, 32768u);

    const kvpages_tensor kv = view(c, "attn.0");
    EXPECT_EQ(shape(kv), (Numbers{2, 4, 16, 2, 64}));
    EXPECT_EQ(strides(kv), (Numbers{2048, 4096, 128, 64, 1}));
    EXPECT_EQ(report(c, "attn.0").offset_bytes, 0u);
    EXPECT_EQ(report(c, "attn.0").block_dim, 1u);
    for (std::int64_t block = 0; block < 4; ++block) {
        const auto start = static_cast<std::size_t>(8192 * block);
        EXPECT_EQ(bytes_of_block(c, "attn.0", 4, block), range(start, start + 8192));
        EXPECT_EQ(bytes_of_block(c, "mamba.0", 4, block), range(start, start + 8192));
    }
}

TEST(CasesViews, V02_TwoBlocksAreNotKeysAndValues) {
    for (const std::int64_t num_blocks : {1, 2, 3}) {
        const Model m = model();
        State state;
        state.add(KVPAGES_DTYPE_F32, {2048});
        add(m, "attn.0", full(16, 2, 64), dense(kv_first));
        add(m, "mamba.0", state.spec(), state_backend());
        const Cache c =
            cache(plan_from(m, shared_parts(static_cast<std::uint64_t>(num_blocks), 8192)));
        const kvpages_tensor kv = view(c, "attn.0");
        EXPECT_EQ(shape(kv), (Numbers{2, num_blocks, 16, 2, 64}));
        EXPECT_EQ(strides(kv), (Numbers{2048, 4096, 128, 64, 1}));
    }
    const Model m = model();
    State state;
    state.add(KVPAGES_DTYPE_F32, {256});
    add(m, "attn.0", full(32, 1, 8), dense(kv_first, {16}));
    add(m, "mamba.0", state.spec(), state_backend());
    const Cache c = cache(plan_from(m, shared_parts(1, 1024)));
    const kvpages_tensor kv = view(c, "attn.0");
    EXPECT_EQ(shape(kv), (Numbers{2, 2, 16, 1, 8}));
    EXPECT_EQ(strides(kv), (Numbers{128, 256, 8, 8, 1}));
    EXPECT_EQ(bytes_of_block(c, "attn.0", 1, 0), range(0, 1024));
}

TEST(CasesViews, V04_PackedSlotOfAKvFirstLayer) {
    const Model m = model();
    add(m, "A", full(4, 2, 3), backend(kv_first));
    for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
        const Cache c = cache(plan_from(m, packed_parts(num_blocks, 256, 32)));
        const kvpages_tensor kv = view(c, "A");
        EXPECT_EQ(shape(kv), (Numbers{2, static_cast<std::int64_t>(num_blocks), 4, 2, 3}));
        EXPECT_EQ(strides(kv), (Numbers{24, 128, 6, 3, 1}));
        EXPECT_EQ(report(c, "A").offset_bytes, 16u * 2);
        EXPECT_EQ(static_cast<unsigned char*>(kv.data) -
                      static_cast<unsigned char*>(allocation(c, 0).data),
                  32);
        for (std::size_t block = 0; block < num_blocks; ++block) {
            EXPECT_EQ(bytes_of_block(c, "A", static_cast<std::int64_t>(num_blocks),
                                     static_cast<std::int64_t>(block)),
                      range(256 * block + 32, 256 * block + 32 + 96));
        }
    }
}

TEST(CasesViews, V05_PaddingIsSpreadOverKernelBlocks) {
    const Backend kernels = backend_of_sizes(block_first, {16});
    const auto padded = [&kernels](std::uint64_t bytes) {
        kvpages_spec spec = full(32, 1, 8);
        spec.page_size_padded_bytes = bytes;
        Model m = model();
        add(m, "A", spec, kernels);
        return m;
    };
    const Cache c = cache(plan_of_blocks(padded(1280), 3));
    EXPECT_EQ(allocation(c, 0).size_bytes, 3840u);
    EXPECT_EQ(shape(view(c, "A")), (Numbers{6, 2, 16, 1, 8}));
    EXPECT_EQ(strides(view(c, "A")), (Numbers{320, 128, 8, 8, 1}));
    EXPECT_EQ(report(c, "A").kernel_block_step_bytes, 640u);
    for (std::size_t block = 0; block < 3; ++block) {
        for (const std::size_t byte :
             bytes_of_block(c, "A", 3, static_cast<std::int64_t>(block))) {
            EXPECT_GE(byte, 1280 * block);
            EXPECT_LT(byte, 1280 * (block + 1));
        }
    }

    // 642 bytes are a whole number of elements, so this splits; 641 are not.
    EXPECT_EQ(strides(view(cache(plan_of_blocks(padded(1284), 3)), "A")),
              (Numbers{321, 128, 8, 8, 1}));
    const Model odd = padded(1282);
    kvpages_plan_config config = plan_config();
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 3;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{odd.get(), 0}}, config, &raw), KVPAGES_STATUS_CONTRACT_BROKEN,
                      "padded_split_not_even", {"A", "1282", "2 kernel blocks"}));
    EXPECT_EQ(raw, nullptr);
}

TEST(CasesViews, V07_KernelBlocksAreCountedInStoredSlots) {
    kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
    spec.cache_dtype = "fp8_ds_mla";
    spec.model_version = "deepseek_v4";
    spec.compress_ratio = 128;
    spec.alignment_bytes = 576;
    EXPECT_EQ(page_bytes(spec), 1728u);
    const Model m = model();
    BackendOptions options;
    options.layout = latent;
    options.sizes = {256};
    options.multiples.clear();
    add(m, "A", spec, backend(options));
    const Cache c = cache(plan_of_blocks(m, 4));
    EXPECT_EQ(allocation(c, 0).size_bytes, 6912u);
    EXPECT_EQ(shape(view(c, "A")), (Numbers{4, 2, 584}));
    EXPECT_EQ(strides(view(c, "A")), (Numbers{1728, 584, 1}));
    EXPECT_EQ(view(c, "A").dtype, static_cast<std::uint32_t>(KVPAGES_DTYPE_U8));
}

TEST(CasesViews, V08_AlignedLatentPage) {
    kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
    spec.cache_dtype = "fp8_ds_mla";
    spec.model_version = "deepseek_v4";
    spec.compress_ratio = 4;
    spec.alignment_bytes = 576;
    EXPECT_EQ(describe(spec).unpadded_page_size_bytes, 37376u);
    EXPECT_EQ(page_bytes(spec), 37440u);
    const Model m = model();
    add(m, "A", spec, backend(latent));
    const Cache c = cache(plan_of_blocks(m, 4));
    EXPECT_EQ(shape(view(c, "A")), (Numbers{4, 64, 584}));
    EXPECT_EQ(strides(view(c, "A")), (Numbers{37440, 584, 1}));
}

TEST(CasesViews, V10_OffsetsAndStridesAreWholeElements) {
    struct Case {
        std::uint32_t dtype;
        std::uint64_t stride;
        std::uint64_t offset;
        const char* number;
    };
    for (const std::string layout : {kv_first, block_first}) {
        for (const Case& given : {Case{KVPAGES_DTYPE_F16, 256, 33, "33"},
                                  Case{KVPAGES_DTYPE_F16, 257, 32, "257"},
                                  Case{KVPAGES_DTYPE_F32, 256, 6, "6"}}) {
            const Model m = model();
            add(m, "A", full(4, 2, 3, given.dtype), backend(layout));
            kvpages_plan* raw = nullptr;
            EXPECT_TRUE(fails(try_parts(m, packed_parts(2, given.stride, given.offset), &raw),
                              KVPAGES_STATUS_CONTRACT_BROKEN, "view_dtype_misaligned",
                              {"A", given.number}));
            EXPECT_EQ(raw, nullptr);
        }
    }
}

TEST(CasesViews, V12_APackedPageDoesNotSplit) {
    const Model m = model();
    add(m, "A", full(4, 2, 3), backend_of_sizes(block_first, {2}));
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_parts(m, packed_parts(2, 256, 32), &raw), KVPAGES_STATUS_CONTRACT_BROKEN,
                      "view_size_mismatch", {"A", "96", "256", "2 kernel blocks"}));
    EXPECT_EQ(raw, nullptr);
}

TEST(CasesViews, V13_SecondStateBetweenTwoOfItsElements) {
    State state;
    state.add(KVPAGES_DTYPE_BF16, {25}).add(KVPAGES_DTYPE_F32, {2, 4});
    const kvpages_spec spec = state.spec();
    kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
    EXPECT_TRUE(fails(kvpages_spec_describe(&spec, &info), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "mamba_state_misaligned", {"state 1", "50", "4"}));
    const Model m = model();
    EXPECT_TRUE(fails(try_add(m, "mamba.0", &spec, nullptr), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "mamba_state_misaligned", {"mamba.0", "state 1", "50", "4"}));
    EXPECT_EQ(kvpages_model_num_layers(m.get()), 0u);
}

TEST(CasesViews, V15_PageThatSuitsOneOfTwoElementTypes) {
    State state;
    state.add(KVPAGES_DTYPE_BF16, {3, 8}).add(KVPAGES_DTYPE_F32, {2, 4});
    const Model m = model();
    const kvpages_spec odd = state.padded(86).spec();
    EXPECT_TRUE(fails(try_add(m, "mamba.0", &odd, nullptr), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "view_dtype_misaligned", {"mamba.0", "86", "4"}));

    add(m, "mamba.0", state.padded(88).spec(), state_backend());
    const Cache c = cache(plan_of_blocks(m, 2));
    ASSERT_EQ(kvpages_cache_num_views(c.get(), 0), 2u);
    const kvpages_tensor conv = view(c, "mamba.0", 0);
    EXPECT_EQ(shape(conv), (Numbers{2, 3, 8}));
    EXPECT_EQ(strides(conv), (Numbers{44, 8, 1}));
    EXPECT_EQ(report(c, "mamba.0", 0).offset_bytes, 0u);
    const kvpages_tensor recurrent = view(c, "mamba.0", 1);
    EXPECT_EQ(shape(recurrent), (Numbers{2, 2, 4}));
    EXPECT_EQ(strides(recurrent), (Numbers{22, 4, 1}));
    EXPECT_EQ(report(c, "mamba.0", 1).offset_bytes, 12u * 4);
}

// Of the two storages that are right, this library has the one that goes page by page.
TEST(CasesViews, V17_SelfAndCrossAttentionAgreeOnBytes) {
    const Model m = model();
    add(m, "S", full(16, 2, 64), dense(kv_first));
    add(m, "X", attention(KVPAGES_SPEC_KIND_CROSS_ATTENTION, 16, 2, 64), dense(block_first));
    const Cache c = cache(plan_of_blocks(m, 4));
    ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
    EXPECT_EQ(allocation(c, 0).size_bytes, 32768u);
    EXPECT_EQ(shape(view(c, "S")), (Numbers{2, 4, 16, 2, 64}));
    EXPECT_EQ(strides(view(c, "S")), (Numbers{2048, 4096, 128, 64, 1}));
    EXPECT_EQ(shape(view(c, "X")), (Numbers{4, 2, 16, 2, 64}));
    EXPECT_EQ(strides(view(c, "X")), (Numbers{4096, 2048, 128, 64, 1}));
    for (std::int64_t block = 0; block < 4; ++block) {
        for (std::int64_t kv = 0; kv < 2; ++kv) {
            EXPECT_EQ(bytes_of_block(c, "S", 4, block, 0, kv),
                      bytes_of_block(c, "X", 4, block, 1, kv));
        }
    }
}

TEST(CasesViews, V18_SameWithHeadsBeforeTokens) {
    const Model m = model();
    BackendOptions options;
    options.layout = block_first;
    options.memory_order = "block | kv | head | token | content";
    options.flags = 0;
    add(m, "S", full(16, 2, 64), dense(kv_first));
    add(m, "X", attention(KVPAGES_SPEC_KIND_CROSS_ATTENTION, 16, 2, 64), backend(options));
    const Cache c = cache(plan_of_blocks(m, 4));
    EXPECT_EQ(strides(view(c, "S")), (Numbers{2048, 4096, 128, 64, 1}));
    EXPECT_EQ(shape(view(c, "X")), (Numbers{4, 2, 16, 2, 64}));
    EXPECT_EQ(strides(view(c, "X")), (Numbers{4096, 2048, 64, 1024, 1}));
    for (std::int64_t block = 0; block < 4; ++block) {
        for (std::int64_t kv = 0; kv < 2; ++kv) {
            EXPECT_EQ(bytes_of_block(c, "S", 4, block, 0, kv),
                      bytes_of_block(c, "X", 4, block, 1, kv));
        }
    }
}

TEST(CasesViews, V20_StoredBytesNotHeadWidth) {
    kvpages_spec spec = mla(64, 576, KVPAGES_DTYPE_U8);
    spec.cache_dtype = "fp8_ds_mla";
    const Model m = model();
    add(m, "A", spec, preset(KVPAGES_PRESET_FLASH_MLA));
    const Cache c = cache(plan_of_blocks(m, 32));
    EXPECT_EQ(allocation(c, 0).size_bytes, 1343488u);
    EXPECT_EQ(shape(view(c, "A")), (Numbers{32, 64, 656}));
    EXPECT_EQ(strides(view(c, "A")), (Numbers{41984, 656, 1}));
    EXPECT_EQ(view(c, "A").dtype, static_cast<std::uint32_t>(KVPAGES_DTYPE_U8));
}

TEST(CasesViews, V22_NoViewLeavesItsAllocation) {
    struct Case {
        Numbers shape;
        Numbers strides;
        std::uint64_t offset;
        std::uint64_t element;
        std::uint64_t bytes;
        const char* kind;  // empty: proven
        std::uint64_t largest;
        std::uint64_t end;
    };
    const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
    const std::vector<Case> cases{
        {{2, 3}, {3, 1}, 0, 2, 12, "", 5, 12},
        {{2, 3}, {3, 1}, 0, 2, 11, "view_out_of_bounds", 0, 0},
        {{2, 3}, {3, 1}, 2, 2, 14, "", 5, 14},
        {{2, 3}, {3, 1}, 2, 2, 13, "view_out_of_bounds", 0, 0},
        {{2, 3}, {10, 1}, 4, 4, 56, "", 12, 56},
        {{2, 3}, {10, 1}, 4, 4, 55, "view_out_of_bounds", 0, 0},
        {{3, 2}, {1, 3}, 0, 1, 6, "", 5, 6},
        {{}, {}, 8, 8, 16, "", 0, 16},
        {{}, {}, 8, 8, 15, "view_out_of_bounds", 0, 0},
        {{2, 0, 4}, {100, 7, 1}, 0, 1, 0, "", 0, 0},
        {{1, 4}, {0, 1}, 0, 1, 4, "", 3, 4},
        {{2, 3}, {2, 1}, 0, 1, 100, "view_overlaps_itself", 0, 0},
        {{2, 2}, {0, 1}, 0, 1, 100, "view_overlaps_itself", 0, 0},
        {{2, 2}, {1, 1}, 0, 1, 100, "view_overlaps_itself", 0, 0},
        {{2, 3}, {-3, 1}, 12, 1, 100, "bad_values", 0, 0},
        {{2, 3}, {3, -1}, 12, 1, 100, "bad_values", 0, 0},
        {{-2, 3}, {3, 1}, 0, 1, 100, "bad_values", 0, 0},
        {{2, 3}, {3, 1}, 0, 0, 100, "bad_values", 0, 0},
        {{2, 3}, {3, 1}, 1, 2, 100, "view_dtype_misaligned", 0, 0},
        {{2, 3}, {3, 1}, 33, 2, 100, "view_dtype_misaligned", 0, 0},
        {{huge, huge}, {huge, 1}, 0, 1, 100, "overflow", 0, 0},
        {{2, huge}, {huge, 1}, 0, 8, UINT64_MAX, "overflow", 0, 0},
        {{2}, {huge}, UINT64_MAX - 7, 8, UINT64_MAX, "overflow", 0, 0},
    };
    for (std::size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(i);
        const Case& given = cases[i];
        const kvpages_view audited{given.shape.data(), given.strides.data(), given.shape.size(),
                                   given.offset,       given.element,        given.bytes};
        kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
        out.end_bytes = 77;
        const std::int32_t status = kvpages_view_audit(&audited, &out);
        if (*given.kind != '\0') {
            EXPECT_TRUE(fails(status, KVPAGES_STATUS_INVALID_ARGUMENT, given.kind));
        } else {
            EXPECT_EQ(status, KVPAGES_STATUS_OK) << kvpages_last_error_message();
        }
        EXPECT_EQ(out.largest_element_offset, given.largest);
        EXPECT_EQ(out.end_bytes, given.end);
    }
}
