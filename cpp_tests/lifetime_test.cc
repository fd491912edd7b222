// Handles: destroyed in any order, changed behind a plan's back, used by several threads.
#include "support/api.h"
#include "support/arena.h"
#include "support/bytes.h"
#include "support/failure.h"
#include "support/world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

using namespace support;

TEST(Lifetime, HandlesAreDestroyedInAnyOrder) {
    std::array<int, 5> order{0, 1, 2, 3, 4};
    do {
        Arena arena;
        Backend kernels = backend(packed_nhd);
        Model layers = model();
        add(layers, "layers.0", full(16, 2, 8), kernels);
        Plan planned = plan_of_blocks(layers, 3);
        Memory memory = arena.memory();
        Cache allocated = cache(planned, memory);
        const kvpages_tensor tensor = view(allocated, "layers.0");
        for (const int handle : order) {
            switch (handle) {
                case 0:
                    kernels.reset();
                    break;
                case 1:
                    layers.reset();
                    break;
                case 2:
                    planned.reset();
                    break;
                case 3:
                    memory.reset();
                    break;
                default:
                    allocated.reset();
            }
            EXPECT_EQ(arena.live(), allocated ? 1u : 0u);
            if (allocated) {
                EXPECT_STREQ(kvpages_cache_layer_name(allocated.get(), 0), "layers.0");
                EXPECT_EQ(shape(tensor), (std::vector<std::int64_t>{3, 16, 2, 16}));
                *element(tensor, {2, 15, 1, 15}) = 1;
                EXPECT_EQ(report(allocated, "layers.0").end_bytes, 3u * 1024);
            }
            if (planned) {
                EXPECT_EQ(worker_info(planned).num_blocks, 3u);
                EXPECT_STREQ(kvpages_plan_group_layer_name(planned.get(), 0, 0, 0), "layers.0");
            }
            if (layers) {
                EXPECT_EQ(worker_info(plan_of_blocks(layers, 2)).num_blocks, 2u);
            }
        }
        EXPECT_EQ(arena.released, 1u);
        EXPECT_EQ(arena.wrong, 0u);
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Lifetime, ACallbackIsKeptAsLongAsACacheIsInIt) {
    Arena arena;
    const Model m = model();
    add(m, "layers.0", full(16, 2, 8));
    Memory memory = arena.memory();
    Cache first = cache(plan_of_blocks(m, 1), memory);
    Cache second = cache(plan_of_blocks(m, 2), memory);
    memory.reset();
    EXPECT_EQ(arena.live(), 2u);
    first.reset();
    EXPECT_EQ(arena.live(), 1u);
    second.reset();
    EXPECT_EQ(arena.live(), 0u);
}

TEST(Lifetime, APlanKeepsTheLayersAsTheyWere) {
    const Backend kernels = backend(packed_nhd);
    const Model m = model();
    add(m, "layers.0", full(16, 2, 8), kernels);
    const Plan before = plan_of_blocks(m, 3);
    const std::string text = explanation(before, KVPAGES_TEXT_FORMAT_JSON);
    for (int i = 1; i < 100; ++i) {
        add(m, "layers." + std::to_string(i), full(16, 2, 8), kernels);
    }
    EXPECT_EQ(worker_info(before).num_tensors, 1u);
    EXPECT_EQ(group_layers(before, 0), (std::vector<std::string>{"layers.0"}));
    EXPECT_EQ(explanation(before, KVPAGES_TEXT_FORMAT_JSON), text);
    const Cache c = cache(before);
    EXPECT_EQ(kvpages_cache_num_layers(c.get()), 1u);
    EXPECT_EQ(worker_info(plan_of_blocks(m, 3)).num_tensors, 100u);
    std::size_t number = 0;
    EXPECT_EQ(kvpages_cache_find_layer(c.get(), "layers.1", &number), KVPAGES_STATUS_NOT_FOUND);
}

// What a caller handed over is copied.
TEST(Lifetime, NothingOfTheCallersIsKept) {
    const Model m = model();
    {
        std::string name = "layers.0";
        std::string cache_dtype = "fp8_ds_mla";
        std::string version = "deepseek_v4";
        kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
        spec.compress_ratio = 4;
        spec.cache_dtype = cache_dtype.c_str();
        spec.model_version = version.c_str();
        std::string layout = latent;
        Backend kernels = backend(layout);
        must(try_add(m, name, &spec, kernels.get()));
        std::string state_name = "layers.1";
        State state;
        state.add(KVPAGES_DTYPE_F32, {64, 146});
        kvpages_spec of_state = state.spec();
        ASSERT_EQ(page_bytes(of_state), 64u * 584);
        must(try_add(m, state_name, &of_state, state_backend().get()));
        for (std::string* text : {&name, &cache_dtype, &version, &layout, &state_name}) {
            std::fill(text->begin(), text->end(), '#');
        }
        // The state's arrays end here.
    }
    const Plan p = plan_of_blocks(m, 4);
    const kvpages_spec planned = group_spec(p, 0);
    EXPECT_STREQ(planned.cache_dtype, "fp8_ds_mla");
    EXPECT_STREQ(planned.model_version, "deepseek_v4");
    const kvpages_spec state = group_spec(p, 1);
    ASSERT_EQ(state.num_state_dims, 2u);
    EXPECT_EQ(state.state_dims[1], 146u);
    EXPECT_EQ(state.state_dtypes[0], static_cast<std::uint32_t>(KVPAGES_DTYPE_F32));
    EXPECT_EQ(state.state_ndims[0], 2u);
    const Cache c = cache(p);
    EXPECT_STREQ(kvpages_cache_layer_name(c.get(), 0), "layers.0");
    EXPECT_STREQ(kvpages_cache_layer_name(c.get(), 1), "layers.1");
    // A planned spec goes back in.
    EXPECT_EQ(page_bytes(state), 64u * 584);
}

TEST(Lifetime, AFailedCallIsTheLastErrorOfItsThreadOnly) {
    kvpages_spec bad = full(0, 1, 8);
    kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
    ASSERT_NE(kvpages_spec_describe(&bad, &info), KVPAGES_STATUS_OK);
    const Failure here = failure_of(0);
    EXPECT_EQ(here.kind, "bad_values");
    std::string message = "untouched";
    std::string kind = "untouched";
    std::string own;
    std::thread other([&] {
        message = kvpages_last_error_message();
        kind = kvpages_last_error_kind();
        std::uint64_t index = 0;
        static_cast<void>(kvpages_layer_index("no.number", 1, &index) == KVPAGES_STATUS_OK);
        own = kvpages_last_error_kind();
    });
    other.join();
    EXPECT_EQ(message, "");
    EXPECT_EQ(kind, "");
    EXPECT_EQ(own, "layer_index_not_one_integer");
    EXPECT_EQ(failure_of(0).message, here.message);
    EXPECT_EQ(failure_of(0).kind, "bad_values");
}

TEST(Lifetime, ThreadsReadOnePlanAndOneCache) {
    const World w;
    const std::string text = explanation(w.planned, KVPAGES_TEXT_FORMAT_TEXT);
    std::atomic<int> wrong{0};
    std::atomic<bool> go{false};
    const World fresh;  // whose explanations nobody has asked for yet
    const auto work = [&] {
        while (!go) {
        }
        for (int i = 0; i < 200; ++i) {
            kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
            kvpages_tensor tensor{};
            std::size_t number = 0;
            std::vector<char> buffer(text.size() + 1);
            std::size_t length = 0;
            const bool right =
                kvpages_plan_get_worker(fresh.planned.get(), 0, &info) == KVPAGES_STATUS_OK &&
                info.num_blocks == 48 &&
                kvpages_plan_copy_explanation(fresh.planned.get(), 0, buffer.data(), buffer.size(),
                                              &length) == KVPAGES_STATUS_OK &&
                text == buffer.data() &&
                kvpages_cache_find_layer(fresh.allocated.get(), "layers.3.attn", &number) ==
                    KVPAGES_STATUS_OK &&
                kvpages_cache_get_view(fresh.allocated.get(), number, 0, &tensor) ==
                    KVPAGES_STATUS_OK &&
                tensor.shape[0] == 48 &&
                // A failure of one thread is none of the others'.
                kvpages_cache_get_view(fresh.allocated.get(), 99, 0, &tensor) ==
                    KVPAGES_STATUS_NOT_FOUND &&
                std::string(kvpages_last_error_kind()) == "not_found" &&
                worker_info(plan({{fresh.layers.get(), 100000}}, fresh.config)).num_blocks == 48 &&
                kvpages_cache_num_layers(cache(fresh.planned, fresh.memory).get()) == 5;
            wrong += right ? 0 : 1;
        }
    };
    std::thread first(work);
    std::thread second(work);
    go = true;
    first.join();
    second.join();
    EXPECT_EQ(wrong, 0);
}
