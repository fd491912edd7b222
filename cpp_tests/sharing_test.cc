// Layers that read another layer's pages.
#include "support/api.h"
#include "support/bytes.h"
#include "support/failure.h"
#include "support/garbage.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

using namespace support;
using Names = std::vector<std::string>;

namespace {

std::int32_t plans(const Model& model, kvpages_plan** out) {
    kvpages_plan_config config = plan_config();
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 9;
    return try_plan({{model.get(), 0}}, config, out);
}

// Whether a model breaks a contract in this way.
::testing::AssertionResult refused(const Model& model, const std::string& kind,
                                   const Names& words) {
    kvpages_plan* raw = nullptr;
    const ::testing::AssertionResult result =
        fails(plans(model, &raw), KVPAGES_STATUS_CONTRACT_BROKEN, kind, words);
    const Plan owned(raw);
    return result;
}

}  // namespace

TEST(Sharing, AnAliasIsTheOwnersView) {
    const Model m = model();
    const Backend kernels = backend(kv_first);
    share(m, "layers.2", "layers.1", kernels);
    add(m, "layers.0", full(16, 2, 8), kernels);
    share(m, "layers.1", "layers.0", kernels);
    const Cache c = cache(plan_of_blocks(m, 3));
    const kvpages_tensor owner = view(c, "layers.0");
    for (const char* name : {"layers.1", "layers.2"}) {
        const kvpages_tensor alias = view(c, name);
        EXPECT_EQ(alias.data, owner.data);
        EXPECT_EQ(alias.ndim, owner.ndim);
        EXPECT_EQ(alias.dtype, owner.dtype);
        EXPECT_EQ(shape(alias), shape(owner));
        EXPECT_EQ(strides(alias), strides(owner));
        EXPECT_EQ(report(c, name).owner_layer, find(c, "layers.0"));
        EXPECT_EQ(report(c, name).block_step_bytes, report(c, "layers.0").block_step_bytes);
    }
    *element(owner, {1, 2, 15, 1, 7}) = 0x5B;
    EXPECT_EQ(*element(view(c, "layers.2"), {1, 2, 15, 1, 7}), 0x5B);
}

TEST(Sharing, LongChains) {
    const Model m = model();
    const int count = 300;
    for (int i = 0; i < count; ++i) {
        share(m, "layers." + std::to_string(i), "layers." + std::to_string(i + 1));
    }
    add(m, "layers." + std::to_string(count), full(16, 2, 8));
    const Plan p = plan_of_blocks(m, 3);
    EXPECT_EQ(group_info(p, 0).num_sharing_layers, 300u);
    EXPECT_EQ(worker_info(p).num_tensors, 1u);
    // A circle as long.
    const Model circle = model();
    for (int i = 0; i < count; ++i) {
        share(circle, "layers." + std::to_string(i), "layers." + std::to_string((i + 1) % count));
    }
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(plans(circle, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "share_cycle",
                      {"layers.0", "layers.1"}));
    EXPECT_TRUE(out.is_zero());
    // A chain that ends in a circle it is not part of.
    const Model tail = model();
    share(tail, "tail", "x");
    share(tail, "x", "y");
    share(tail, "y", "x");
    EXPECT_TRUE(fails(plans(tail, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "share_cycle", {"x"}));
}

TEST(Sharing, ASharerIsCheckedAgainstItsOwner) {
    struct Case {
        const char* field;
        Names words;
        kvpages_spec spec;
    };
    const Backend kernels = backend(packed_nhd);
    kvpages_spec quantised = full(16, 2, 8, KVPAGES_DTYPE_I8);
    quantised.quant_mode = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
    kvpages_spec narrow = full(16, 2, 8);
    narrow.head_size_v = 4;
    for (const Case& given :
         {Case{"block_size", {"16", "32"}, full(32, 2, 8)},
          Case{"num_kv_heads", {"2", "1"}, full(16, 1, 8)},
          Case{"head_size", {"8", "4"}, full(16, 2, 4)},
          Case{"head_size_v", {"8", "4"}, narrow},
          Case{"dtype", {}, full(16, 2, 8, KVPAGES_DTYPE_F32)}, Case{"dtype", {}, quantised}}) {
        SCOPED_TRACE(given.field);
        const Model m = model();
        add(m, "owner", full(16, 2, 8), kernels);
        must(try_add(m, "sharer", &given.spec, kernels.get(), "owner"));
        Names words = given.words;
        words.insert(words.end(), {"sharer", "owner", given.field});
        Out<kvpages_plan*> out;
        EXPECT_TRUE(fails(plans(m, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "share_geometry_differs",
                          words));
        EXPECT_TRUE(out.is_zero());
    }
    // A window changes nothing that is stored.
    const Model m = model();
    add(m, "owner", full(16, 2, 8), kernels);
    const kvpages_spec windowed = sliding(8, 16, 2, 8);
    must(try_add(m, "sharer", &windowed, kernels.get(), "owner"));
    EXPECT_EQ(worker_info(plan_of_blocks(m, 3)).num_groups, 1u);
    // A state is no attention.
    State state;
    state.add(KVPAGES_DTYPE_F32, {256});
    const kvpages_spec of_state = state.spec();
    const Model mixed = model();
    add(mixed, "owner", full(16, 2, 8), kernels);
    must(try_add(mixed, "sharer", &of_state, nullptr, "owner"));
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(plans(mixed, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "share_geometry_differs",
                      {"sharer", "owner"}));
}

TEST(Sharing, ASharerWithAnotherLayoutIsRefused) {
    const Model m = model();
    add(m, "owner", full(16, 2, 8), backend(packed_nhd));
    share(m, "sharer", "owner", backend(kv_first));
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(plans(m, &out), KVPAGES_STATUS_CONTRACT_BROKEN, "share_layout_differs",
                      {"sharer", "owner", "kv | block"}));
    EXPECT_TRUE(out.is_zero());
}

// The sharer's kernels read the same pages, so their demands count as much as the owner's.
TEST(Sharing, ASharersBackendDemandsCount) {
    const auto shared_with = [](const BackendOptions& options) {
        BackendOptions of_owner;
        of_owner.layout = packed_nhd;
        Model m = model();
        kvpages_spec spec = full(16, 2, 8);
        spec.page_size_padded_bytes = 1024 + 512;
        add(m, "owner", spec, backend(of_owner));
        share(m, "sharer", "owner", backend(options));
        return m;
    };
    BackendOptions options;
    options.name = "picky";
    options.layout = packed_nhd;
    EXPECT_EQ(worker_info(plan_of_blocks(shared_with(options), 8)).num_groups, 1u);

    BackendOptions dense = options;
    dense.flags = 0;
    EXPECT_TRUE(refused(shared_with(dense), "page_not_dense", {"sharer", "picky"}));
    BackendOptions aligned = options;
    aligned.alignment = 1024;
    EXPECT_TRUE(refused(shared_with(aligned), "blocks_not_aligned", {"sharer", "picky", "1024"}));
    BackendOptions sizes = options;
    sizes.multiples = {5};
    EXPECT_TRUE(refused(shared_with(sizes), "no_common_block_size", {"picky", "16"}));
    BackendOptions heads = options;
    heads.num_kv_heads = 4;
    EXPECT_TRUE(refused(shared_with(heads), "backend_num_kv_heads", {"sharer", "picky", "2", "4"}));
    // 32-bit indices, and elements beyond them.
    const auto wide = [](std::uint32_t bits) {
        BackendOptions of_owner;
        of_owner.layout = latent;
        BackendOptions of_sharer = of_owner;
        of_sharer.name = "picky";
        of_sharer.index_bits = bits;
        Model m = model();
        add(m, "owner", mla(1, std::uint64_t{1} << 28, KVPAGES_DTYPE_U8), backend(of_owner));
        share(m, "sharer", "owner", backend(of_sharer));
        return m;
    };
    EXPECT_EQ(worker_info(plan_of_blocks(wide(64), 9)).num_blocks, 9u);
    EXPECT_TRUE(refused(wide(32), "index_width_exceeded", {"sharer", "picky"}));
    // Scales read in another place than they are written.
    kvpages_spec spec = full(16, 2, 8, KVPAGES_DTYPE_I8);
    spec.quant_mode = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
    BackendOptions inside;
    inside.layout = packed_nhd;
    BackendOptions behind = inside;
    behind.flags |= KVPAGES_BACKEND_SCALES_AT_PAGE_END;
    const Model m = model();
    add(m, "owner", spec, backend(inside));
    share(m, "sharer", "owner", backend(behind));
    EXPECT_TRUE(refused(m, "share_layout_differs", {"sharer", "owner"}));
}

TEST(Sharing, AnEncoderOnlyLayerHasNothingToShare) {
    const Model m = model();
    add(m, "encoder", attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 2, 8));
    share(m, "sharer", "encoder");
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(plans(m, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "share_target_missing",
                      {"sharer", "encoder"}));
    EXPECT_TRUE(out.is_zero());
}
