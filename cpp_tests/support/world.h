// A model, its plan and its cache, all in order, to be mistreated.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_WORLD_H
#define KVPAGES_CPP_TESTS_SUPPORT_WORLD_H

#include "api.h"

#include <gtest/gtest.h>

#include <string>

namespace support {

// Two groups in two tensors: full and sliding attention, and a layer that shares.
struct World {
    Backend kernels = backend(packed_nhd);
    Model layers = model();
    kvpages_spec of_full = full(16, 2, 8);
    kvpages_spec of_sliding = sliding(32, 16, 2, 8);
    kvpages_plan_config config = plan_config(64);
    Plan planned;
    Memory memory = host_memory();
    Cache allocated;

    World() {
        config.policy = KVPAGES_POLICY_REFERENCE;  // whose numbers expect_unchanged() knows
        config.max_tokens_in_flight = 16;
        add(layers, "layers.0.attn", of_full, kernels, 4);
        add(layers, "layers.1.attn", of_sliding, kernels, 4);
        add(layers, "layers.2.attn", of_full, kernels, 4);
        add(layers, "layers.3.attn", of_sliding, kernels, 4);
        share(layers, "layers.4.attn", "layers.0.attn", kernels);
        planned = plan({{layers.get(), 100000}}, config);
        allocated = cache(planned, memory);
    }

    // What a failed call must not have changed.
    void expect_unchanged() const {
        EXPECT_STREQ(kvpages_backend_name(kernels.get()), "kernels");
        EXPECT_EQ(kvpages_model_num_layers(layers.get()), 5u);
        std::size_t index = 0;
        EXPECT_EQ(kvpages_model_find_layer(layers.get(), "layers.3.attn", &index),
                  KVPAGES_STATUS_OK);
        EXPECT_EQ(index, 3u);
        EXPECT_EQ(worker_info(planned).num_blocks, 48u);
        EXPECT_EQ(worker_info(planned).num_groups, 2u);
        EXPECT_EQ(group_info(planned, 0).block_size, 16u);
        EXPECT_EQ(kvpages_plan_max_model_len(planned.get()), 64u);
        EXPECT_EQ(kvpages_cache_num_layers(allocated.get()), 5u);
        EXPECT_EQ(kvpages_cache_num_blocks(allocated.get()), 48u);
        const kvpages_tensor tensor = view(allocated, "layers.3.attn");
        EXPECT_EQ(shape(tensor), (std::vector<std::int64_t>{48, 16, 2, 16}));
        // And new things can be made.
        EXPECT_EQ(worker_info(plan({{layers.get(), 100000}}, config)).num_blocks, 48u);
        EXPECT_EQ(kvpages_cache_num_layers(cache(planned, memory).get()), 5u);
    }
};

}  // namespace support

#endif
