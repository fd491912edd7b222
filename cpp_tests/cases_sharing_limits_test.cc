// Published faults in sharing between layers and in the width of indices.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

using namespace support;
using Names = std::vector<std::string>;

namespace {

void expect_alias(const Cache& cache, const std::string& layer, const std::string& owner) {
    const kvpages_tensor a = view(cache, layer);
    const kvpages_tensor b = view(cache, owner);
    EXPECT_EQ(a.data, b.data);
    EXPECT_EQ(a.dtype, b.dtype);
    EXPECT_EQ(shape(a), shape(b));
    EXPECT_EQ(strides(a), strides(b));
    EXPECT_EQ(report(cache, layer).owner_layer, find(cache, owner));
}

// A model of one layer that spreads `stride` elements from block to block.
Model spread(std::uint64_t stride, std::uint32_t index_bits) {
    BackendOptions options;
    options.layout = latent;
    options.index_bits = index_bits;
    Model m = model();
    add(m, "layers.0.latent", mla(1, stride, KVPAGES_DTYPE_U8), backend(options));
    return m;
}

}  // namespace

TEST(CasesSharing, K01_ChainsResolveInAnyOrder) {
    std::vector<std::pair<std::string, std::string>> layers{{"A", "B"}, {"B", "C"}, {"C", ""}};
    std::sort(layers.begin(), layers.end());
    do {
        const Model m = model();
        const Backend kernels = backend(kv_first);
        for (const auto& [name, target] : layers) {
            if (target.empty()) {
                add(m, name, full(16, 2, 8), kernels);
            } else {
                share(m, name, target, kernels);
            }
        }
        const Plan p = plan_of_blocks(m, 3);
        ASSERT_EQ(worker_info(p).num_groups, 1u);
        EXPECT_EQ(group_info(p, 0).num_layers, 1u);
        EXPECT_EQ(group_info(p, 0).num_sharing_layers, 2u);
        Names names = group_layers(p, 0);
        EXPECT_EQ(names[0], "C");
        std::sort(names.begin(), names.end());
        EXPECT_EQ(names, (Names{"A", "B", "C"}));
        const Cache c = cache(p);
        EXPECT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
        expect_alias(c, "A", "C");
        expect_alias(c, "B", "C");
        expect_alias(c, "C", "C");
    } while (std::next_permutation(layers.begin(), layers.end()));
}

TEST(CasesSharing, K02_NoOwner) {
    struct Case {
        std::vector<std::pair<std::string, std::string>> layers;
        const char* kind;
        Names words;
    };
    const std::vector<Case> cases{
        {{{"layer.A", "layer.Z"}}, "share_target_missing", {"layer.A", "layer.Z"}},
        {{{"layer.A", "layer.B"}, {"layer.B", "layer.A"}}, "share_cycle", {"layer.A", "layer.B"}},
        {{{"layer.A", "layer.A"}}, "share_cycle", {"layer.A"}},
    };
    for (const Case& given : cases) {
        const Model m = model();
        add(m, "other", full(16, 2, 8), backend(packed_nhd));
        for (const auto& [name, target] : given.layers) {
            share(m, name, target);
        }
        kvpages_plan* raw = nullptr;
        EXPECT_TRUE(fails(try_plan({{m.get(), 1 << 20}}, plan_config(16), &raw),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, given.words));
        EXPECT_EQ(raw, nullptr);
        Parts parts;
        parts.num_blocks = 1;
        parts.groups = {{{"other"}, 0}};
        parts.tensors = {{page_bytes(full(16, 2, 8)), {"other"}, 0, 0}};
        EXPECT_TRUE(fails(try_parts(m, parts, &raw), KVPAGES_STATUS_INVALID_ARGUMENT, given.kind,
                          given.words));
        EXPECT_EQ(raw, nullptr);
    }
}

TEST(CasesSharing, K04_SharingLayersCostNothing) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "layers.0", full(16, 2, 64), kernels);
    add(m, "layers.1", full(16, 2, 64), kernels);
    share(m, "layers.2", "layers.0", kernels);
    share(m, "layers.3", "layers.1", kernels);
    const Plan p = plan(m, 163840, plan_config(16));
    EXPECT_EQ(worker_info(p).num_blocks, 10u);
    ASSERT_EQ(worker_info(p).num_tensors, 2u);
    EXPECT_EQ(tensor_info(p, 0).size_bytes, 81920u);
    EXPECT_EQ(tensor_info(p, 1).size_bytes, 81920u);
    const Cache c = cache(p);
    std::vector<std::size_t> bound(4);
    std::size_t count = 0;
    EXPECT_EQ(kvpages_cache_num_layers(c.get()), 4u);
    must(kvpages_cache_copy_bound_layers(c.get(), 1, bound.data(), 4, &count));
    EXPECT_EQ(count, 4u);
    EXPECT_EQ(bound, (std::vector<std::size_t>{0, 1, 2, 3}));
    expect_alias(c, "layers.2", "layers.0");
    expect_alias(c, "layers.3", "layers.1");
}

// Only a report is looked at: a view of an engine's own takes no memory.
TEST(CasesLimits, L01_LargestElementOffsetIsReported) {
    const std::int64_t step = 480 * 576;
    for (const auto& [id, offset, fits] :
         {std::tuple<std::int64_t, std::uint64_t, std::uint32_t>{7767, 2147420160u, 1u},
          std::tuple<std::int64_t, std::uint64_t, std::uint32_t>{7768, 2147696640u, 0u}}) {
        const std::int64_t sizes[]{id + 1, 1};
        const std::int64_t steps[]{step, 1};
        const kvpages_view audited{sizes, steps, 2, 0, 1, static_cast<std::uint64_t>(step) * 8000};
        kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
        must(kvpages_view_audit(&audited, &out));
        EXPECT_EQ(out.largest_element_offset, offset);
        EXPECT_EQ(out.fits_int32, fits);
    }
    // The same of a cache; the host's memory is only there when it is touched.
    for (const auto& [num_blocks, fits] :
         {std::pair<std::uint64_t, std::uint32_t>{7767, 1u},
          std::pair<std::uint64_t, std::uint32_t>{7768, 0u}}) {
        const Model m = spread(static_cast<std::uint64_t>(step), 64);
        const Cache c = cache(plan_of_blocks(m, num_blocks));
        const kvpages_view_report out = report(c, "layers.0.latent");
        EXPECT_EQ(out.largest_element_offset, num_blocks * static_cast<std::uint64_t>(step) - 1);
        EXPECT_EQ(out.fits_int32, fits);
    }
}

TEST(CasesLimits, L02_A32BitBackendIsRefusedWhenPlanned) {
    const std::uint64_t stride = 1039680;
    // 2065 blocks end at 2146939200 - 1; of the 2066th block only the start fits.
    ASSERT_EQ(2065 * stride, 2146939200u);
    ASSERT_EQ(2066 * stride, 2147978880u);
    kvpages_plan* raw = nullptr;
    const Model narrow = spread(stride, 32);
    kvpages_plan_config config = plan_config(1);
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    for (const std::uint64_t num_blocks : {2066u, 2067u}) {
        config.num_blocks_override = num_blocks;
        EXPECT_TRUE(fails(try_plan({{narrow.get(), 0}}, config, &raw),
                          KVPAGES_STATUS_CONTRACT_BROKEN, "index_width_exceeded",
                          {"layers.0.latent", "kernels", std::to_string(num_blocks * stride - 1)}));
        EXPECT_EQ(raw, nullptr);
        const Model wide = spread(stride, 64);
        EXPECT_EQ(worker_info(plan({{wide.get(), 0}}, config)).num_blocks, num_blocks);
    }
    config.num_blocks_override = 2065;
    const Plan p = plan({{narrow.get(), 0}}, config);
    EXPECT_EQ(report(cache(p), "layers.0.latent").largest_element_offset, 2146939199u);
    EXPECT_EQ(report(cache(p), "layers.0.latent").fits_int32, 1u);

    // Elements of a narrow content in wide steps: what counts is the furthest element, so the start
    // of block 2065 may be used.
    for (const auto& [num_blocks, accepted] :
         {std::pair<std::uint64_t, bool>{2066, true},
          std::pair<std::uint64_t, bool>{2067, false}}) {
        BackendOptions options;
        options.layout = latent;
        options.index_bits = 32;
        kvpages_spec spec = mla(1, 16, KVPAGES_DTYPE_U8);
        spec.page_size_padded_bytes = stride;
        const Model m = model();
        add(m, "layers.0.latent", spec, backend(options));
        config.num_blocks_override = num_blocks;
        const std::int32_t status = try_plan({{m.get(), 0}}, config, &raw);
        const Plan owned(raw);
        EXPECT_EQ(status == KVPAGES_STATUS_OK, accepted) << kvpages_last_error_message();
    }
}
