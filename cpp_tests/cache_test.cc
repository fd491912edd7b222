// Caches: layers by name and number, regions, binding order.
#include "support/api.h"
#include "support/bytes.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace support;
using Numbers = std::vector<std::size_t>;

namespace {

std::vector<kvpages_region> regions(const Cache& cache) {
    std::vector<kvpages_region> all(kvpages_cache_num_regions(cache.get()));
    for (std::size_t i = 0; i < all.size(); ++i) {
        must(kvpages_cache_get_region(cache.get(), i, &all[i]));
    }
    return all;
}

Numbers bound(const Cache& cache, std::uint64_t modules) {
    Numbers layers(kvpages_cache_num_layers(cache.get()));
    std::size_t count = 0;
    must(kvpages_cache_copy_bound_layers(cache.get(), modules, layers.data(), layers.size(),
                                         &count));
    EXPECT_EQ(count, layers.size());
    return layers;
}

Cache cache_of(const std::vector<std::string>& names) {
    const Model m = model();
    for (const std::string& name : names) {
        add(m, name, full(16, 1, 8), backend(packed_nhd));
    }
    return cache(plan_of_blocks(m, 1));
}

std::ptrdiff_t offset(const kvpages_region& region, const Cache& cache) {
    return static_cast<unsigned char*>(region.data) -
           static_cast<unsigned char*>(allocation(cache, region.allocation).data);
}

}  // namespace

TEST(Cache, LayersAreFoundByNameAndNumber) {
    const Model m = model();
    const Backend kernels = backend(packed_nhd);
    add(m, "b", full(16, 1, 8), kernels);
    add(m, "without.backend", full(16, 1, 8));
    add(m, "encoder", attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 1, 8), kernels);
    share(m, "a", "b", kernels);
    State state;
    state.add(KVPAGES_DTYPE_F32, {100}).add(KVPAGES_DTYPE_F16, {56});
    ASSERT_EQ(page_bytes(state.spec()), page_bytes(full(16, 1, 8)));
    add(m, "c", state.spec(), state_backend());
    const Cache c = cache(plan_of_blocks(m, 4));
    ASSERT_EQ(kvpages_cache_num_layers(c.get()), 3u);
    const std::vector<std::string> names{"b", "a", "c"};
    for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_EQ(kvpages_cache_layer_name(c.get(), i), names[i]);
        EXPECT_EQ(find(c, names[i]), i);
    }
    EXPECT_EQ(kvpages_cache_num_views(c.get(), 0), 1u);
    EXPECT_EQ(kvpages_cache_num_views(c.get(), 1), 1u);
    EXPECT_EQ(kvpages_cache_num_views(c.get(), 2), 2u);
    EXPECT_EQ(report(c, 1).owner_layer, 0u);
    EXPECT_EQ(report(c, 2).owner_layer, 2u);
    std::size_t number = 0;
    for (const char* name : {"without.backend", "encoder", "nobody", ""}) {
        EXPECT_TRUE(fails(kvpages_cache_find_layer(c.get(), name, &number),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {name}));
    }
    // Model layers 1 and 2 have no view, so the numbers behind them differ.
    const auto of_model = [&](std::size_t layer) {
        return kvpages_cache_find_model_layer(c.get(), layer, &number);
    };
    for (const auto& [in_model, in_cache] : {std::pair{0, 0}, std::pair{3, 1}, std::pair{4, 2}}) {
        must(of_model(in_model));
        EXPECT_EQ(number, static_cast<std::size_t>(in_cache));
    }
    for (const std::size_t layer : {std::size_t{1}, std::size_t{2}, std::size_t{5}, SIZE_MAX}) {
        number = 7;
        EXPECT_TRUE(fails(of_model(layer), KVPAGES_STATUS_NOT_FOUND, "not_found",
                          {std::to_string(layer)}));
        EXPECT_EQ(number, 0u);
    }
    EXPECT_EQ(kvpages_cache_find_model_layer(nullptr, 0, &number), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_cache_find_model_layer(c.get(), 0, nullptr), KVPAGES_STATUS_NULL_ARGUMENT);
}

TEST(Cache, WhatALayerIs) {
    const Model m = model();
    const Backend kernels = backend_of_sizes(packed_nhd, {8});
    add(m, "layers.0", full(16, 2, 8), kernels, 6);
    add(m, "layers.1", sliding(32, 16, 2, 8), kernels, 4);
    share(m, "layers.2", "layers.1", kernels);
    State state;
    state.add(KVPAGES_DTYPE_F32, {100}).add(KVPAGES_DTYPE_F16, {3, 4});
    add(m, "layers.3", state.spec(), state_backend());
    const Plan p = plan_of_blocks(m, 4);
    const Cache c = cache(p);
    const auto info = [&c](std::size_t layer) {
        kvpages_layer_info out = KVPAGES_LAYER_INFO_INIT;
        must(kvpages_cache_get_layer(c.get(), layer, &out));
        return out;
    };
    for (std::size_t layer = 0; layer < 4; ++layer) {
        SCOPED_TRACE(layer);
        const kvpages_layer_info out = info(layer);
        const std::vector<std::string> names = group_layers(p, out.group);
        EXPECT_EQ(std::count(names.begin(), names.end(), "layers." + std::to_string(layer)), 1);
        EXPECT_EQ(out.allocation, report(c, layer).allocation);
        EXPECT_EQ(out.owner_layer, layer == 2 ? 1u : layer);
        EXPECT_EQ(out.num_views, layer == 3 ? 2u : 1u);
        EXPECT_EQ(out.block_size, 16u);
        EXPECT_EQ(out.page_size_bytes, 1024u);
    }
    EXPECT_EQ(info(0).num_query_heads, 6u);
    EXPECT_EQ(info(1).num_query_heads, 4u);
    EXPECT_EQ(info(0).kernel_block_size, 8u);
    EXPECT_EQ(info(0).storage_block_size, 16u);
    EXPECT_EQ(info(0).spec_kind, static_cast<std::uint32_t>(KVPAGES_SPEC_KIND_FULL_ATTENTION));
    EXPECT_EQ(info(2).spec_kind, static_cast<std::uint32_t>(KVPAGES_SPEC_KIND_SLIDING_WINDOW));
    EXPECT_EQ(info(3).spec_kind, static_cast<std::uint32_t>(KVPAGES_SPEC_KIND_STATE));
    kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
    EXPECT_TRUE(fails(kvpages_cache_get_axes(c.get(), 3, &axes), KVPAGES_STATUS_UNSUPPORTED,
                      "state_without_axes", {"layers.3"}));
    EXPECT_EQ(axes.num_heads, 0u);
}

TEST(Cache, ALayerWithoutABackendStillHasItsMemory) {
    const Model m = model();
    add(m, "a", full(16, 1, 8));
    const Cache c = cache(plan_of_blocks(m, 4));
    EXPECT_EQ(kvpages_cache_num_layers(c.get()), 0u);
    ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
    EXPECT_EQ(allocation(c, 0).size_bytes, 4 * 512u);
    // Together the regions are all that a transfer engine must register.
    const std::vector<kvpages_region> all = regions(c);
    ASSERT_EQ(all.size(), 1u) << "the memory of a layer without a view is in no region";
    EXPECT_EQ(all[0].size_bytes, 4 * 512u);
    EXPECT_EQ(all[0].block_step_bytes, 512u);
}

TEST(Cache, OneRegionForPagesInOnePiece) {
    const Model m = model();
    add(m, "a", full(16, 1, 8), backend(packed_nhd));
    add(m, "b", sliding(8, 16, 1, 8), backend(kv_first));
    const Cache c = cache(plan_of_blocks(m, 5));
    const std::vector<kvpages_region> all = regions(c);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].allocation, 0u);
    EXPECT_EQ(offset(all[0], c), 0);
    EXPECT_EQ(all[0].size_bytes, 5u * 512);
    EXPECT_EQ(all[0].block_step_bytes, 512u);
    EXPECT_EQ(all[0].num_blocks, 5u);
}

TEST(Cache, TwoRegionsForKeysAndValuesApart) {
    const Model m = model();
    const Backend kernels = backend_of_sizes(kv_first, {8});
    add(m, "layers.0", full(16, 1, 8), kernels);
    add(m, "layers.1", full(16, 1, 8), backend(packed_nhd));
    const Cache c = cache(plan_of_blocks(m, 5));
    const std::vector<kvpages_region> all = regions(c);
    ASSERT_EQ(all.size(), 3u);
    for (std::size_t kv = 0; kv < 2; ++kv) {
        EXPECT_EQ(all[kv].allocation, 0u);
        EXPECT_EQ(offset(all[kv], c), static_cast<std::ptrdiff_t>(kv * 5 * 256));
        EXPECT_EQ(all[kv].size_bytes, 5u * 256);
        EXPECT_EQ(all[kv].block_step_bytes, 256u);
        EXPECT_EQ(all[kv].num_blocks, 5u);
    }
    EXPECT_EQ(all[2].allocation, 1u);
    EXPECT_EQ(all[2].size_bytes, 5u * 512);
    const kvpages_view_report apart = report(c, "layers.0");
    EXPECT_EQ(apart.num_runs, 2u);
    EXPECT_EQ(apart.run_step_bytes, 5u * 256);
    EXPECT_EQ(apart.block_step_bytes, 256u);
    EXPECT_EQ(apart.block_span_bytes, 256u);
    EXPECT_EQ(apart.kernel_block_step_bytes, 128u);
    EXPECT_EQ(report(c, "layers.1").num_runs, 1u);
    EXPECT_EQ(report(c, "layers.1").allocation, 1u);
    // Keys start where the first region does, values where the second does.
    const kvpages_tensor tensor = view(c, "layers.0");
    EXPECT_EQ(static_cast<void*>(element(tensor, {0, 0, 0, 0, 0})), all[0].data);
    EXPECT_EQ(static_cast<void*>(element(tensor, {1, 0, 0, 0, 0})), all[1].data);
}

TEST(Cache, OneRegionForAPackedBacking) {
    const Model m = model();
    add(m, "a", full(16, 1, 8), backend(packed_nhd));
    add(m, "b", sliding(8, 16, 1, 8), backend(packed_nhd));
    add(m, "c", full(16, 1, 8), backend(kv_first));
    add(m, "d", sliding(8, 16, 1, 8), backend(packed_nhd));
    const Plan p = plan_of_blocks(m, 6, KVPAGES_PLAN_CROSS_LAYER_BLOCKS);
    const Cache c = cache(p);
    const std::vector<kvpages_region> all = regions(c);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].size_bytes, 6u * 1024);
    EXPECT_EQ(all[0].block_step_bytes, 1024u);
    EXPECT_EQ(all[0].num_blocks, 6u);
    ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
}

TEST(Cache, BoundInTheOrderOfTheNumbersInTheNames) {
    EXPECT_EQ(bound(cache_of({"l.10", "l.9", "l.1.b", "l.1.a", "l.0"}), 1),
              (Numbers{4, 2, 3, 1, 0}));
    EXPECT_EQ(bound(cache_of({"l.10", "l.9", "l.1"}), 0), (Numbers{2, 1, 0}));
    EXPECT_EQ(bound(cache_of({"l.007", "l.6"}), 1), (Numbers{1, 0}));
    // Two modules in a layer.
    EXPECT_EQ(bound(cache_of({"l.1.attn.1", "l.1.attn.0", "l.0.attn.1", "l.0.attn.0"}), 2),
              (Numbers{3, 2, 1, 0}));
    EXPECT_EQ(bound(cache_of({}), 1), Numbers{});
}

TEST(Cache, NamesThatCannotBeBound) {
    std::size_t count = 0;
    Numbers layers(4, 77);
    EXPECT_TRUE(fails(kvpages_cache_copy_bound_layers(cache_of({"l.0", "attn"}).get(), 1,
                                                      layers.data(), 4, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "layer_index_not_one_integer",
                      {"attn", "0"}));
    EXPECT_EQ(count, 0u);
    EXPECT_TRUE(fails(kvpages_cache_copy_bound_layers(
                          cache_of({"l.0.attn.0", "l.1.attn.2"}).get(), 2, layers.data(), 4,
                          &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "module_index_out_of_range",
                      {"l.1.attn.2", "2"}));
    EXPECT_TRUE(fails(kvpages_cache_copy_bound_layers(
                          cache_of({"l.3.attn", "l.1.attn.1"}).get(), 2, layers.data(), 4,
                          &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "layer_index_collision",
                      {"l.3.attn", "l.1.attn.1", "3"}));
    EXPECT_EQ(layers, Numbers(4, 77));
}

TEST(Cache, BindingToAnEnginesLayers) {
    const std::vector<const char*> layers{"l.2", "l.0", "l.1"};
    const std::vector<const char*> context{"l.0", "mlp.0", "l.1", "l.2"};
    kvpages_bind_config config = KVPAGES_BIND_CONFIG_INIT;
    config.layer_names = layers.data();
    config.num_layers = layers.size();
    config.context_names = context.data();
    config.num_context_names = context.size();
    Numbers order(3, 77);
    Numbers places(4, 77);
    must(kvpages_bind_layers(&config, order.data(), places.data()));
    EXPECT_EQ(order, (Numbers{1, 2, 0}));
    EXPECT_EQ(places, (Numbers{1, SIZE_MAX, 2, 0}));

    config.num_context_names = 3;
    EXPECT_TRUE(fails(kvpages_bind_layers(&config, order.data(), places.data()),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "forward_context_missing", {"l.2"}));
    config.num_context_names = 4;
    config.num_already_bound = 3;
    EXPECT_TRUE(fails(kvpages_bind_layers(&config, order.data(), places.data()),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "runner_list_not_empty", {"3"}));
}
