// Views as tensors of DLPack. That every element of every layout can be reached through them is in
// bytes_test.cc; real consumers are in dlpack/.
#include "support/api.h"
#include "support/arena.h"
#include "support/bytes.h"
#include "support/dlpack.h"
#include "support/failure.h"
#include "support/world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace support;

namespace {

// A value for an element that no other one has.
unsigned char value(std::size_t view, std::size_t count) {
    return static_cast<unsigned char>((view * 97 + count * 31) % 251 + 1);
}

// Two attention layers and one that shares, with states of two types in the pages of the first.
Plan hybrid(std::uint64_t num_blocks) {
    State state;
    state.add(KVPAGES_DTYPE_F32, {5, 3}).add(KVPAGES_DTYPE_BF16, {7}).padded(1024);
    const Model m = model();
    add(m, "attn.0", full(16, 2, 8), backend(kv_first));
    add(m, "mamba", state.spec(), state_backend());
    add(m, "attn.1", full(16, 2, 8), backend(packed_nhd));
    share(m, "attn.2", "attn.0", backend(kv_first));
    Parts parts;
    parts.num_blocks = num_blocks;
    parts.groups = {{{"attn.0", "attn.1", "attn.2"}, 0}, {{"mamba"}, 0}};
    parts.tensors = {{num_blocks * 1024, {"attn.0", "mamba"}, 0, 0},
                     {num_blocks * 1024, {"attn.1"}, 0, 0}};
    return plan_from(m, parts);
}

}  // namespace

TEST(Dlpack, EveryViewOfEveryLayer) {
    for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
        const Cache c = cache(hybrid(num_blocks));
        ASSERT_EQ(kvpages_cache_num_layers(c.get()), 4u);
        expect_dlpack_of_views(c);
        const DlpackTensor shared = dlpack(c, "attn.2");
        EXPECT_EQ(shared->dl_tensor.data, dlpack(c, "attn.0")->dl_tensor.data);
        EXPECT_EQ(dlpack(c, "mamba", 1)->dl_tensor.dtype.code, kDLBfloat);
    }
    expect_dlpack_of_views(World().allocated);
}

// What is written through a tensor is in raw memory, where the view says, and nowhere else.
TEST(Dlpack, WritesAreInMemory) {
    for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
        const Cache c = cache(hybrid(num_blocks));
        const Allocations allocations(c);
        for (const char* const layer : {"attn.0", "attn.1", "mamba"}) {
            const std::size_t number = find(c, layer);
            for (std::size_t i = 0; i < kvpages_cache_num_views(c.get(), number); ++i) {
                SCOPED_TRACE(std::string(layer) + ", view " + std::to_string(i));
                const DlpackTensor tensor = dlpack(c, number, i);
                const kvpages_tensor seen = view(c, number, i);
                const std::uint64_t bytes = kvpages_dtype_bytes(seen.dtype);
                std::size_t count = 0;
                for_each_index(shape(seen), [&](const std::vector<std::int64_t>& index) {
                    std::memset(element(tensor->dl_tensor, index), value(i, count++), bytes);
                });
                std::size_t written = 0;
                for_each_index(shape(seen), [&](const std::vector<std::int64_t>& index) {
                    const Place place = allocations.place(element(seen, index), bytes);
                    const unsigned char* const raw =
                        allocations.data(place.allocation) + place.offset;
                    EXPECT_EQ(std::count(raw, raw + bytes, value(i, written)),
                              static_cast<std::ptrdiff_t>(bytes));
                    ++written;
                });
                ASSERT_EQ(written, count);
                std::size_t touched = 0;
                for (std::size_t a = 0; a < allocations.size(); ++a) {
                    const unsigned char* const raw = allocations.data(a);
                    touched += allocations.bytes(a) -
                               static_cast<std::size_t>(
                                   std::count(raw, raw + allocations.bytes(a), 0));
                }
                EXPECT_EQ(touched, count * bytes);
                allocations.fill(0);
            }
        }
    }
}

TEST(Dlpack, EveryElementType) {
    for (std::uint32_t dtype = KVPAGES_DTYPE_F64; dtype <= KVPAGES_DTYPE_F4_E2M1X2; ++dtype) {
        SCOPED_TRACE(kvpages_dtype_name(dtype));
        State state;
        state.add(dtype, {3, 5});
        const Model m = model();
        add(m, "state", state.spec(), state_backend());
        add(m, "attn", full(16, 2, 8, dtype), backend(block_first));
        Parts parts;
        parts.num_blocks = 2;
        parts.groups = {{{"attn"}, 0}, {{"state"}, 0}};
        parts.tensors = {{2 * page_bytes(full(16, 2, 8, dtype)), {"attn"}, 0, 0},
                         {2 * page_bytes(state.spec()), {"state"}, 0, 0}};
        expect_dlpack_of_views(cache(plan_from(m, parts)));
    }
}

// Scales lie among the elements or at the page's end; a view has the former, and no view is of
// scales alone.
TEST(Dlpack, QuantisedLayersAreTheirBytes) {
    for (const auto& [mode, dtype] :
         {std::pair<std::uint32_t, std::uint32_t>{KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD,
                                                  KVPAGES_DTYPE_I8},
          {KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD, KVPAGES_DTYPE_F8_E4M3FN},
          {KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD, KVPAGES_DTYPE_U8},
          {KVPAGES_QUANT_MODE_FP8_PER_TENSOR, KVPAGES_DTYPE_F8_E5M2},
          {KVPAGES_QUANT_MODE_NVFP4, KVPAGES_DTYPE_U8}}) {
        for (const char* const layout : {block_first, kv_first, packed_nhd}) {
            kvpages_spec spec = full(4, 2, 16, dtype);
            spec.quant_mode = mode;
            const Model m = model();
            add(m, "layer", spec, backend(layout));
            const Cache c = cache(plan_of_blocks(m, 3));
            expect_dlpack_of_views(c);
            EXPECT_EQ(dlpack(c, 0)->dl_tensor.dtype.code, dlpack_type(dtype).code);
        }
    }
}

// dlpack.h demands NULL of a tensor without elements.
TEST(Dlpack, WithoutBlocksThereIsNoData) {
    const Model m = model();
    add(m, "layer", full(16, 2, 8), backend(packed_nhd));
    Parts parts;
    parts.groups = {{{"layer"}, 0}};
    parts.tensors = {{0, {"layer"}, 0, 0}};
    const Cache c = cache(plan_from(m, parts));
    const DlpackTensor tensor = dlpack(c, 0);
    EXPECT_EQ(tensor->dl_tensor.data, nullptr);
    EXPECT_EQ(tensor->dl_tensor.shape[0], 0);
    EXPECT_EQ(unversioned_dlpack(c, 0)->dl_tensor.data, nullptr);
}

TEST(Dlpack, AFailedExportLeavesNull) {
    const World world;
    const kvpages_cache* const c = world.allocated.get();
    auto* const garbage = reinterpret_cast<DLManagedTensorVersioned*>(std::uintptr_t{64});
    DLManagedTensorVersioned* out = garbage;
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, 5, 0, 0, &out), KVPAGES_STATUS_NOT_FOUND,
                      "not_found", {"layer 5", "5 layers"}));
    EXPECT_EQ(out, nullptr);
    out = garbage;
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, 1, 1, 0, &out), KVPAGES_STATUS_NOT_FOUND,
                      "not_found", {"view 1", "layer 1", "1 views"}));
    EXPECT_EQ(out, nullptr);
    out = garbage;
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, SIZE_MAX, SIZE_MAX, 0, &out),
                      KVPAGES_STATUS_NOT_FOUND, "not_found"));
    EXPECT_EQ(out, nullptr);
    for (const std::uint32_t flags : {2u, 3u, 0x80000000u}) {
        out = garbage;
        EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, 0, 0, flags, &out),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"flags"}));
        EXPECT_EQ(out, nullptr);
    }
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, 0, 0, 0, nullptr),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"out"}));
    out = garbage;
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack(nullptr, 0, 0, 0, &out),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"cache"}));
    EXPECT_EQ(out, nullptr);
    DLManagedTensor* unversioned = reinterpret_cast<DLManagedTensor*>(std::uintptr_t{64});
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack_unversioned(c, 0, 9, &unversioned),
                      KVPAGES_STATUS_NOT_FOUND, "not_found", {"view 9"}));
    EXPECT_EQ(unversioned, nullptr);
    EXPECT_TRUE(fails(kvpages_cache_export_dlpack_unversioned(c, 0, 0, nullptr),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"out"}));
    world.expect_unchanged();
}

TEST(Dlpack, DestroyCallsTheDeleterOfWhoeverMadeIt) {
    static int calls;
    calls = 0;
    kvpages_dlpack_destroy(nullptr);
    kvpages_dlpack_destroy_unversioned(nullptr);
    DLManagedTensorVersioned versioned{};
    DLManagedTensor unversioned{};
    kvpages_dlpack_destroy(&versioned);  // one without a deleter
    kvpages_dlpack_destroy_unversioned(&unversioned);
    versioned.deleter = [](DLManagedTensorVersioned*) { ++calls; };
    unversioned.deleter = [](DLManagedTensor*) { calls += 10; };
    kvpages_dlpack_destroy(&versioned);
    kvpages_dlpack_destroy_unversioned(&unversioned);
    EXPECT_EQ(calls, 11);

    Arena arena;
    const Model m = model();
    add(m, "layer", full(16, 2, 8), backend(packed_nhd));
    Cache c = cache(plan_of_blocks(m, 2), arena.memory());
    DLManagedTensorVersioned* first = dlpack(c, 0).release();
    DLManagedTensor* second = unversioned_dlpack(c, 0).release();
    c.reset();
    kvpages_dlpack_destroy(first);
    EXPECT_EQ(arena.live(), 1u);
    kvpages_dlpack_destroy_unversioned(second);
    EXPECT_EQ(arena.live(), 0u);
}

// Consumers may move the struct elsewhere: what stands behind it is found all the same.
TEST(Dlpack, ACopyOfTheStructGivesItBackToo) {
    Arena arena;
    const Model m = model();
    add(m, "layer", full(16, 2, 8), backend(packed_nhd));
    Cache c = cache(plan_of_blocks(m, 2), arena.memory());
    DLManagedTensorVersioned copy = *dlpack(c, 0).release();
    c.reset();
    EXPECT_EQ(arena.live(), 1u);
    copy.deleter(&copy);
    EXPECT_EQ(arena.live(), 0u);
}

TEST(Dlpack, HandlesAndTensorsAreDestroyedInAnyOrder) {
    std::array<int, 6> order{0, 1, 2, 3, 4, 5};
    do {
        Arena arena;
        const Model layers = model();
        add(layers, "layers.0", full(16, 2, 8), backend(packed_nhd));
        Plan planned = plan_of_blocks(layers, 3);
        Memory memory = arena.memory();
        Cache allocated = cache(planned, memory);
        DlpackTensor first = dlpack(allocated, 0);
        DlpackTensor second = dlpack(allocated, 0, 0, KVPAGES_DLPACK_READ_ONLY);
        UnversionedDlpackTensor third = unversioned_dlpack(allocated, 0);
        unsigned char* const last = element(first->dl_tensor, {2, 15, 1, 15});
        *last = 77;
        for (const int handle : order) {
            switch (handle) {
                case 0:
                    planned.reset();
                    break;
                case 1:
                    memory.reset();
                    break;
                case 2:
                    allocated.reset();
                    break;
                case 3:
                    first.reset();
                    break;
                case 4:
                    second.reset();
                    break;
                default:
                    third.reset();
            }
            const bool is_used = allocated || first || second || third;
            EXPECT_EQ(arena.live(), is_used ? 1u : 0u);
            for (const DLTensor* tensor : {first ? &first->dl_tensor : nullptr,
                                           second ? &second->dl_tensor : nullptr,
                                           third ? &third->dl_tensor : nullptr}) {
                if (tensor != nullptr) {
                    EXPECT_EQ(tensor->ndim, 4);
                    EXPECT_EQ(tensor->shape[0], 3);
                    EXPECT_EQ(element(*tensor, {2, 15, 1, 15}), last);
                    EXPECT_EQ(*last, 77);
                }
            }
        }
        EXPECT_EQ(arena.released, 1u);
        EXPECT_EQ(arena.wrong, 0u);
    } while (std::next_permutation(order.begin(), order.end()));
}

// Many tensors of several caches, given back in a random order, each on a thread of its own.
TEST(Dlpack, ManyTensorsGoInAnyOrderOnAnyThread) {
    std::mt19937 random(7);
    for (int round = 0; round < 10; ++round) {
        Arena arena;
        const Plan planned = hybrid(2);
        const std::size_t allocations = worker_info(planned).num_tensors;
        std::vector<Cache> caches;
        std::vector<DlpackTensor> tensors;
        std::vector<std::size_t> cache_of;
        std::array<std::size_t, 3> left{};
        for (std::size_t i = 0; i < left.size(); ++i) {
            caches.push_back(cache(planned, arena.memory()));
            for (int export_number = 0; export_number < 40; ++export_number) {
                const std::size_t layer = random() % 4;
                const std::size_t views = kvpages_cache_num_views(caches[i].get(), layer);
                tensors.push_back(dlpack(caches[i], layer, random() % views));
                cache_of.push_back(i);
                ++left[i];
            }
            ++left[i];  // the cache itself
        }
        std::vector<std::size_t> order(tensors.size() + caches.size());
        for (std::size_t i = 0; i < order.size(); ++i) {
            order[i] = i;
        }
        std::shuffle(order.begin(), order.end(), random);
        std::size_t live = left.size();
        for (const std::size_t item : order) {
            const bool is_tensor = item < tensors.size();
            const std::size_t of = is_tensor ? cache_of[item] : item - tensors.size();
            std::thread([&] {
                if (is_tensor) {
                    tensors[item].reset();
                } else {
                    caches[of].reset();
                }
            }).join();
            live -= --left[of] == 0 ? 1 : 0;
            ASSERT_EQ(arena.live(), live * allocations);
        }
        EXPECT_EQ(arena.wrong, 0u);
    }
}

// A cache is destroyed while threads use and give back its tensors; other threads export.
TEST(Dlpack, ThreadsExportAndGiveBackAtOnce) {
    constexpr int num_threads = 4;
    constexpr int per_thread = 200;
    Arena arena;
    Cache c = cache(hybrid(3), arena.memory());
    const std::size_t allocations = arena.live();
    std::array<std::vector<DlpackTensor>, num_threads> kept;
    {
        std::vector<std::thread> threads;
        for (auto& tensors : kept) {
            threads.emplace_back([&c, &tensors] {
                for (int i = 0; i < per_thread; ++i) {
                    tensors.push_back(dlpack(c, static_cast<std::size_t>(i % 4)));
                    if (i % 3 == 0) {
                        tensors.erase(tensors.begin() + i / 3);
                    }
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
    EXPECT_EQ(arena.live(), allocations);
    std::vector<std::thread> threads;
    for (auto& tensors : kept) {
        threads.emplace_back([&tensors] {
            for (DlpackTensor& tensor : tensors) {
                EXPECT_EQ(tensor->version.major, 1u);
                EXPECT_GT(tensor->dl_tensor.ndim, 1);
                tensor.reset();
            }
        });
    }
    c.reset();
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(arena.live(), 0u);
    EXPECT_EQ(arena.released, allocations);
    EXPECT_EQ(arena.wrong, 0u);
}

// Operations and a tensor keep the same memory; each sees what the other does.
TEST(Dlpack, OperationsGoOnBesideATensor) {
    Arena arena;
    const Model m = model();
    add(m, "layer", full(16, 2, 8), backend(packed_nhd));
    Cache c = cache(plan_of_blocks(m, 3), arena.memory());
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* ops = nullptr;
    must(kvpages_ops_create(c.get(), &config, &ops));
    DlpackTensor tensor = dlpack(c, 0);
    c.reset();
    *element(tensor->dl_tensor, {1, 0, 0, 0}) = 9;
    *element(tensor->dl_tensor, {2, 0, 0, 0}) = 9;
    const std::int32_t block = 1;
    must(kvpages_ops_zero_blocks(ops, &block, 1, nullptr, nullptr));
    EXPECT_EQ(*element(tensor->dl_tensor, {1, 0, 0, 0}), 0);
    EXPECT_EQ(*element(tensor->dl_tensor, {2, 0, 0, 0}), 9);
    tensor.reset();
    EXPECT_EQ(arena.live(), 1u);
    kvpages_ops_destroy(ops);
    EXPECT_EQ(arena.live(), 0u);
}

// A buffer of the engine's is in use until the last tensor is gone.
TEST(Dlpack, AnAdoptedBufferIsUsedUntilTheLastTensorGoes) {
    alignas(256) static unsigned char buffer[4096];
    const Model m = model();
    add(m, "layer", full(16, 2, 8), backend(packed_nhd));
    const Plan planned = plan_of_blocks(m, 3);
    const Memory memory = adopted_memory(buffer, sizeof buffer);
    Cache c = cache(planned, memory);
    DlpackTensor tensor = dlpack(c, 0);
    EXPECT_EQ(tensor->dl_tensor.data, buffer);
    c.reset();
    kvpages_cache* second = nullptr;
    EXPECT_TRUE(fails(try_cache(planned, memory, &second), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                      "adopted_buffer_full"));
    tensor.reset();
    must(try_cache(planned, memory, &second));
    EXPECT_EQ(view(Cache(second), "layer").data, buffer);
}

// A tensor of a cache that grows describes all blocks from the beginning, at addresses that stay.
TEST(Dlpack, BlocksThatComeLaterAreInATensorThatWasThere) {
    const Model m = model();
    add(m, "layer", full(16, 8, 128), backend(kv_first));
    const Memory memory = host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = 1;
    kvpages_cache* raw = nullptr;
    must(kvpages_cache_create(plan_of_blocks(m, 8).get(), &config, &raw, nullptr));
    Cache c(raw);
    DlpackTensor tensor = dlpack(c, 0);
    EXPECT_EQ(tensor->dl_tensor.shape[1], 8);
    *element(tensor->dl_tensor, {1, 0, 15, 7, 127}) = 5;
    must(kvpages_cache_resize(c.get(), 8, nullptr, 0));
    EXPECT_EQ(dlpack(c, 0)->dl_tensor.data, tensor->dl_tensor.data);
    EXPECT_EQ(*element(tensor->dl_tensor, {1, 0, 15, 7, 127}), 5);
    *element(tensor->dl_tensor, {1, 7, 15, 7, 127}) = 6;
    EXPECT_EQ(*element(view(c, "layer"), {1, 7, 15, 7, 127}), 6);
    c.reset();
    EXPECT_EQ(*element(tensor->dl_tensor, {1, 7, 15, 7, 127}), 6);
}
