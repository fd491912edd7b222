// Operations in device memory: the same bytes as in host memory.
#include "support/cuda.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using kvpages::Dtype;
using kvpages::QuantMode;
using support::address;
using support::Bytes;
using support::DeviceArray;
using support::Entered;
using support::num_calls;
using support::on_standin;
using support::Stream;

/// How layers store keys and values.
struct Shape {
    const char* layout;
    Dtype dtype;
    QuantMode quant_mode;
    std::uint64_t block_size;
    std::uint64_t kernel_block_size;
    std::uint64_t head_size;
    std::size_t num_layers;
    Dtype rows;  ///< type of the rows that are written and read
};

constexpr std::uint64_t kBlocks = 9;
constexpr std::uint64_t kHeads = 3;

kvpages::Plan plan_of(const Shape& shape) {
    kvpages::BackendConfig config;
    config.name = "TEST";
    config.layout = shape.layout;
    config.kernel_block_sizes = {shape.kernel_block_size};
    config.alignment_bytes = 4;
    const kvpages::Backend backend(config);
    kvpages::AttentionSpec spec;
    spec.dtype = shape.dtype;
    spec.quant_mode = shape.quant_mode;
    spec.block_size = shape.block_size;
    spec.num_kv_heads = kHeads;
    spec.head_size = shape.head_size;
    kvpages::Model model;
    for (std::size_t i = 0; i < shape.num_layers; ++i) {
        model.add("layers." + std::to_string(i), spec, backend, 6);
    }
    kvpages::PlanConfig plan;
    plan.num_blocks_override = kBlocks;
    plan.max_model_len = shape.block_size * (kBlocks - 1);  // all but block 0
    plan.max_tokens_in_flight = 64;
    return kvpages::Plan::make(model, plan);
}

/// One cache on the host and one on the device, of which the same is asked.
class Twins {
public:
    explicit Twins(const Shape& shape, bool is_virtual = true)
        : shape_(shape),
          plan_(plan_of(shape)),
          host_(kvpages::Cache::allocate(plan_, kvpages::Memory::host())),
          device_(kvpages::Cache::allocate(plan_, device_memory(is_virtual))),
          on_host_(host_),
          on_device_(device_) {}

    kvpages::Ops& on_device() { return on_device_; }
    CUstream stream() const { return stream_.get(); }
    std::uint64_t num_slots() const { return kBlocks * shape_.block_size; }

    /// Gives every byte of both a number.
    void fill(unsigned seed) {
        const Entered entered;
        for (std::size_t i = 0; i < host_.num_allocations(); ++i) {
            const kvpages_allocation part = host_.allocation(i);
            auto* data = static_cast<unsigned char*>(part.data);
            for (std::uint64_t byte = 0; byte < part.size_bytes; ++byte) {
                data[byte] = static_cast<unsigned char>(1 + (byte * 7 + seed + i) % 251);
            }
            support::upload(address(device_.allocation(i).data), data, part.size_bytes);
        }
    }

    void zero(const std::vector<std::int32_t>& ids, const kvpages_block_selection* chosen) {
        std::vector<std::int32_t> passing = ids;  // gone before the device has run
        if (chosen != nullptr) {
            on_host_.zero_blocks(passing, *chosen);
            on_device_.zero_blocks(passing, *chosen, stream());
        } else {
            on_host_.zero_blocks(passing);
            on_device_.zero_blocks(passing, stream());
        }
        std::fill(passing.begin(), passing.end(), -1);
    }

    void poison(const std::vector<std::int32_t>& ids, const kvpages_block_selection* chosen) {
        std::vector<std::int32_t> passing = ids;  // gone before the device has run
        if (chosen != nullptr) {
            on_host_.poison_blocks(passing, *chosen);
            on_device_.poison_blocks(passing, *chosen, stream());
        } else {
            on_host_.poison_blocks(passing);
            on_device_.poison_blocks(passing, stream());
        }
        std::fill(passing.begin(), passing.end(), -1);
    }

    void copy(const std::vector<kvpages_block_copy>& copies,
              const kvpages_block_selection* chosen) {
        std::vector<kvpages_block_copy> passing = copies;
        if (chosen != nullptr) {
            on_host_.copy_blocks(passing, *chosen);
            on_device_.copy_blocks(passing, *chosen, stream());
        } else {
            on_host_.copy_blocks(passing);
            on_device_.copy_blocks(passing, stream());
        }
        std::fill(passing.begin(), passing.end(), kvpages_block_copy{-1, -1});
    }

    /// Stores rows in all layers.
    void write(const Bytes& rows, const std::vector<std::int64_t>& slots) {
        const DeviceArray device_rows(rows), device_slots(slots);
        on_host_.write(layers(rows.data()), slots, shape_.rows);
        on_device_.write(layers(device_rows.data()),
                         {device_slots.data<const std::int64_t>(), slots.size()}, shape_.rows,
                         std::nullopt, stream());
        stream_.wait();
    }

    /// Reads rows of all layers, and compares.
    void gather(const std::vector<std::int64_t>& slots) {
        const std::size_t room = num_layers() * 2 * row_bytes() * slots.size();
        Bytes host_room(room + 1, 0xee);
        const DeviceArray device_room(host_room), device_slots(slots);
        on_host_.gather(rooms(host_room.data(), slots.size()), slots, shape_.rows);
        on_device_.gather(rooms(device_room.data<unsigned char>(), slots.size()),
                          {device_slots.data<const std::int64_t>(), slots.size()}, shape_.rows,
                          std::nullopt, stream());
        stream_.wait();
        ASSERT_EQ(device_room.read(), host_room);
    }

    void gather_blocks(const std::vector<std::int32_t>& ids) {
        const std::size_t count = ids.size() * shape_.block_size;
        Bytes host_room(num_layers() * 2 * row_bytes() * count + 1, 0xee);
        const DeviceArray device_room(host_room), device_ids(ids);
        on_host_.gather_blocks(rooms(host_room.data(), count), ids, shape_.rows);
        on_device_.gather_blocks(rooms(device_room.data<unsigned char>(), count),
                                 {device_ids.data<const std::int32_t>(), ids.size()}, shape_.rows,
                                 std::nullopt, stream());
        stream_.wait();
        ASSERT_EQ(device_room.read(), host_room);
    }

    void wait() const { stream_.wait(); }

    void compare() const {
        wait();
        for (std::size_t i = 0; i < host_.num_allocations(); ++i) {
            ASSERT_EQ(device_bytes(i), host_bytes(i)) << "allocation " << i;
        }
    }

    Bytes host_bytes(std::size_t allocation) const {
        const kvpages_allocation part = host_.allocation(allocation);
        const auto* data = static_cast<const unsigned char*>(part.data);
        return Bytes(data, data + part.size_bytes);
    }

    Bytes device_bytes(std::size_t allocation) const {
        const Entered entered;
        const kvpages_allocation part = device_.allocation(allocation);
        Bytes bytes(part.size_bytes);
        DRIVER(cuMemcpyDtoH_v2(bytes.data(), address(part.data), bytes.size()));
        return bytes;
    }

    std::size_t num_layers() const { return host_.num_layers(); }
    std::size_t row_bytes() const {
        return kHeads * shape_.head_size * kvpages::bytes(shape_.rows);
    }

private:
    static kvpages::Memory device_memory(bool is_virtual) {
        kvpages::CudaMemory config;
        config.is_virtual = is_virtual;
        return kvpages::Memory::cuda(config);
    }

    /// Each layer stores rows of its own, from which those of the next start.
    std::vector<kvpages_kv_rows> layers(const void* rows) const {
        std::vector<kvpages_kv_rows> all;
        const auto* data = static_cast<const unsigned char*>(rows);
        for (std::size_t layer = 0; layer < num_layers(); ++layer) {
            const unsigned char* keys = data + layer * row_bytes();
            all.push_back(kvpages::kv_rows(layer, keys, keys + row_bytes(), 0.5f, 2.0f));
        }
        return all;
    }

    std::vector<kvpages_kv_rows_out> rooms(unsigned char* data, std::size_t count) const {
        std::vector<kvpages_kv_rows_out> all(num_layers());
        for (std::size_t layer = 0; layer < num_layers(); ++layer) {
            all[layer].layer = layer;
            all[layer].keys = data + 2 * layer * row_bytes() * count;
            all[layer].values = data + (2 * layer + 1) * row_bytes() * count;
            all[layer].key_scale = 0.5f;
            all[layer].value_scale = 2;
        }
        return all;
    }

    Shape shape_;
    kvpages::Plan plan_;
    kvpages::Cache host_, device_;
    kvpages::Ops on_host_, on_device_;
    Stream stream_;
};

const char* const kNhd = "block | token | head | kv*content";
const char* const kHnd = "block | head | token | kv*content";
const char* const kKvFirst = "kv | block | token | head | content";

std::vector<Shape> shapes() {
    const QuantMode none = QuantMode::none, tensor = QuantMode::fp8_per_tensor;
    const QuantMode int8 = QuantMode::int8_per_token_head, fp8 = QuantMode::fp8_per_token_head;
    return {
        {kNhd, Dtype::bf16, none, 16, 16, 64, 3, Dtype::bf16},
        {kHnd, Dtype::f16, none, 16, 8, 32, 2, Dtype::f16},
        {kKvFirst, Dtype::f32, none, 8, 8, 12, 2, Dtype::f32},
        {kNhd, Dtype::f16, none, 8, 8, 33, 2, Dtype::f16},
        {kKvFirst, Dtype::bf16, none, 16, 8, 64, 2, Dtype::f32},
        {kHnd, Dtype::f16, none, 16, 16, 30, 2, Dtype::bf16},
        {kNhd, Dtype::f8_e4m3fn, tensor, 16, 16, 64, 2, Dtype::f32},
        {kHnd, Dtype::f8_e5m2, tensor, 16, 8, 48, 2, Dtype::f16},
        {kKvFirst, Dtype::i8, int8, 16, 16, 64, 2, Dtype::f32},
        {kNhd, Dtype::f8_e4m3fn, fp8, 16, 8, 64, 2, Dtype::bf16},
        {kNhd, Dtype::bf16, none, 16, 16, 16, 70, Dtype::bf16},  // more layers than a launch takes
    };
}

using CudaOps = support::CudaTest;

class Random {
public:
    explicit Random(std::uint64_t seed) : random_(seed) {}

    std::size_t below(std::size_t end) { return random_() % end; }

    std::vector<std::int32_t> blocks(std::size_t count) {
        std::vector<std::int32_t> ids;
        for (std::int32_t id = 0; id < static_cast<std::int32_t>(kBlocks); ++id) ids.push_back(id);
        for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[below(i)]);
        ids.resize(count);
        return ids;
    }

    /// Each target once; chains, cycles and blocks that are read twice come by themselves.
    std::vector<kvpages_block_copy> copies(std::size_t count) {
        std::vector<kvpages_block_copy> all;
        for (const std::int32_t target : blocks(count)) {
            all.push_back({static_cast<std::int32_t>(below(kBlocks)), target});
        }
        return all;
    }

    /// Different slots, some of which stand for no token.
    std::vector<std::int64_t> slots(std::size_t count, std::uint64_t num_slots) {
        std::vector<std::int64_t> all;
        const std::size_t first = below(num_slots), step = below(2) == 0 ? 1 : 5;
        for (std::size_t i = 0; i < count; ++i) {
            const bool is_pad = below(7) == 0;
            all.push_back(is_pad ? -1
                                 : static_cast<std::int64_t>((first + i * step) % num_slots));
        }
        return all;
    }

    /// Numbers that all types can hold.
    Bytes rows(std::size_t bytes, Dtype dtype) {
        Bytes all;
        while (all.size() < bytes) {
            const float value = static_cast<float>(static_cast<int>(below(255)) - 127) / 8;
            std::uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
            if (dtype == Dtype::f16) {  // the value has few bits, so this is exact
                const std::uint32_t exponent = (bits >> 23 & 255);
                half = static_cast<std::uint16_t>(
                    (bits >> 16 & 0x8000) |
                    (value == 0 ? 0 : ((exponent - 112) << 10 | (bits >> 13 & 0x3ff))));
            }
            const auto* from = dtype == Dtype::f32
                                   ? reinterpret_cast<const unsigned char*>(&bits)
                                   : reinterpret_cast<const unsigned char*>(&half);
            all.insert(all.end(), from, from + kvpages::bytes(dtype));
        }
        return all;
    }

private:
    std::mt19937_64 random_;
};

TEST_F(CudaOps, DoWhatTheyDoInHostMemory) {
    std::uint64_t seed = 0;
    for (const Shape& shape : shapes()) {
        SCOPED_TRACE(std::string(shape.layout) + ", " + kvpages::name(shape.dtype) + " from " +
                     kvpages::name(shape.rows) + ", head size " + std::to_string(shape.head_size));
        Random random(++seed);
        Twins twins(shape, seed % 2 == 0);
        for (unsigned round = 0; round < 12; ++round) {
            twins.fill(round);
            const std::vector<std::size_t> layers{random.below(shape.num_layers)};
            kvpages_block_selection one_layer = KVPAGES_BLOCK_SELECTION_INIT;
            one_layer.layers = layers.data();
            one_layer.num_layers = 1;
            const kvpages_block_selection* const chosen =
                random.below(3) == 0 ? &one_layer : nullptr;
            twins.zero(random.blocks(random.below(kBlocks + 1)), chosen);
            twins.copy(random.copies(random.below(kBlocks + 1)), chosen);
            ASSERT_NO_FATAL_FAILURE(twins.compare());
            const std::size_t count = random.below(40);
            const std::size_t bytes = (count + shape.num_layers + 2) * twins.row_bytes();
            twins.write(random.rows(bytes, shape.rows), random.slots(count, twins.num_slots()));
            ASSERT_NO_FATAL_FAILURE(twins.compare());
            ASSERT_NO_FATAL_FAILURE(twins.gather(random.slots(count, twins.num_slots())));
            ASSERT_NO_FATAL_FAILURE(twins.gather_blocks(random.blocks(random.below(4))));
        }
    }
}

TEST_F(CudaOps, PoisonWhatTheyDoInHostMemory) {
    std::uint64_t seed = 100;
    for (const Shape& shape : shapes()) {
        SCOPED_TRACE(std::string(shape.layout) + ", " + std::to_string(shape.num_layers));
        Random random(++seed);
        Twins twins(shape, seed % 2 == 0);
        for (unsigned round = 0; round < 6; ++round) {
            twins.fill(round);
            const std::vector<std::size_t> layers{random.below(shape.num_layers)};
            kvpages_block_selection one_layer = KVPAGES_BLOCK_SELECTION_INIT;
            one_layer.layers = layers.data();
            one_layer.num_layers = 1;
            std::vector<std::int32_t> ids = random.blocks(random.below(kBlocks + 1));
            ids.erase(std::remove(ids.begin(), ids.end(), 0), ids.end());
            twins.poison(ids, random.below(3) == 0 ? &one_layer : nullptr);
            ASSERT_NO_FATAL_FAILURE(twins.compare());
        }
        twins.fill(7);
        twins.poison({3, 4, 5}, nullptr);  // blocks that follow each other
        ASSERT_NO_FATAL_FAILURE(twins.compare());
    }
}

TEST_F(CudaOps, PoisonInACapturedGraph) {
    Twins twins(shapes()[4]);
    twins.fill(1);
    const support::Graph graph(twins.stream(), [&] {
        std::vector<std::int32_t> ids{5, 2, 7};
        twins.on_device().poison_blocks(ids, twins.stream());
        ids.assign(3, 8);
    });
    for (unsigned replay = 0; replay < 2; ++replay) {
        twins.fill(replay);
        const Bytes filled = twins.device_bytes(0);
        graph.launch(twins.stream());
        twins.wait();
        const Bytes poisoned = twins.device_bytes(0);
        // Keys of all blocks lie before all values.
        const std::size_t part = filled.size() / 2 / kBlocks;
        for (std::size_t i = 0; i < filled.size(); ++i) {
            const std::size_t block = i / part % kBlocks;
            const bool is_listed = block == 5 || block == 2 || block == 7;
            ASSERT_EQ(poisoned[i], is_listed ? 0xff : filled[i]) << "byte " << i;
        }
    }
}

TEST_F(CudaOps, PoisonTakesAFillForEachPieceAndOneLaunch) {
    NEEDS_STANDIN("counts calls");
    Shape shape = shapes()[0];
    shape.num_layers = 20;
    Twins twins(shape);
    twins.fill(1);
    const std::uint64_t launches = standin_num_calls("cuLaunchKernel");
    const std::uint64_t fills = standin_num_calls("cuMemsetD8Async");
    const std::uint64_t taken = standin_num_calls("cuMemAlloc_v2");
    twins.poison({1, 3, 5, 8}, nullptr);
    EXPECT_EQ(standin_num_calls("cuLaunchKernel") - launches, 1u);
    EXPECT_EQ(standin_num_calls("cuMemsetD8Async") - fills, 20u);
    EXPECT_EQ(standin_num_calls("cuMemAlloc_v2"), taken);
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaOps, AFreshCacheIsPoisonedWhereItIsAsked) {
    for (const bool is_virtual : {true, false}) {
        kvpages::CudaMemory config;
        config.is_virtual = is_virtual;
        const kvpages::Memory memory = kvpages::Memory::cuda(config);
        for (const std::size_t number : {0u, 4u}) {  // in one piece, and in two runs
            const kvpages::Plan plan = plan_of(shapes()[number]);
            kvpages::Cache cache = kvpages::Cache::allocate(
                plan, memory, 0, is_virtual ? 3 : 0, KVPAGES_CACHE_POISON);
            const auto expect_poison = [&cache](std::uint64_t num_blocks) {
                const Entered entered;
                for (const kvpages_region& region : cache.regions()) {
                    Bytes bytes(num_blocks * region.block_step_bytes);
                    DRIVER(cuMemcpyDtoH_v2(bytes.data(), address(region.data), bytes.size()));
                    for (std::size_t i = 0; i < bytes.size(); ++i) {
                        ASSERT_EQ(bytes[i], i < region.block_step_bytes ? 0 : 0xff) << i;
                    }
                }
            };
            ASSERT_NO_FATAL_FAILURE(expect_poison(is_virtual ? 3 : kBlocks));
            if (is_virtual) {
                for (const std::uint64_t num_blocks : {kBlocks, std::uint64_t{1}, std::uint64_t{5}}) {
                    cache.resize(num_blocks, {});
                    ASSERT_NO_FATAL_FAILURE(expect_poison(num_blocks));
                }
            }
        }
    }
}

// When the device fails to fill new blocks, all is as before.
TEST_F(CudaOps, BlocksThatCannotBePoisonedAreNotThere) {
    NEEDS_STANDIN("fails when it is told to");
    kvpages::CudaMemory config;
    config.is_virtual = true;
    const kvpages::Memory memory = kvpages::Memory::cuda(config);
    const kvpages::Plan plan = plan_of(shapes()[0]);
    kvpages::Cache cache = kvpages::Cache::allocate(plan, memory, 0, 2, KVPAGES_CACHE_POISON);
    const std::size_t used = standin_used_bytes(0);
    // Zeroed when it is taken, and then filled.
    const std::size_t tensors = cache.num_allocations();
    const auto before = standin_num_calls("cuMemsetD8Async");
    cache.resize(4, {});
    const auto fills = standin_num_calls("cuMemsetD8Async") - before;
    EXPECT_GE(fills, tensors);
    cache.resize(2, {});
    ASSERT_TRUE(standin_fail("cuMemsetD8Async", fills, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(kvpages_cache_resize(const_cast<kvpages_cache*>(cache.get()), 4, nullptr, 0),
              KVPAGES_STATUS_DEVICE_UNAVAILABLE);
    EXPECT_EQ(cache.num_blocks(), 2u);
    EXPECT_EQ(standin_used_bytes(0), used);
    cache.resize(4, {});
}

TEST_F(CudaOps, OrderOfCopiesIsAsIfAllWereReadFirst) {
    Twins twins(shapes()[0]);
    for (const std::vector<kvpages_block_copy>& copies :
         {std::vector<kvpages_block_copy>{{1, 2}, {2, 3}, {3, 4}},     // a chain
          std::vector<kvpages_block_copy>{{1, 2}, {2, 1}},             // a swap
          std::vector<kvpages_block_copy>{{1, 2}, {2, 3}, {3, 1}, {3, 5}},
          std::vector<kvpages_block_copy>{{1, 2}, {1, 3}, {1, 4}},     // one to many
          std::vector<kvpages_block_copy>{{4, 4}}}) {
        twins.fill(5);
        twins.copy(copies, nullptr);
        ASSERT_NO_FATAL_FAILURE(twins.compare());
    }
}

TEST_F(CudaOps, WaitForNothingAndRunOnTheStreamOfTheCall) {
    NEEDS_STANDIN("counts calls and lets work wait");
    Twins twins(shapes()[0]);
    twins.fill(1);
    const Bytes before = twins.device_bytes(0);
    const std::uint64_t waits = standin_num_calls("cuStreamSynchronize") +
                                standin_num_calls("cuCtxSynchronize") +
                                standin_num_calls("cuEventSynchronize");
    const std::uint64_t taken = standin_num_calls("cuMemAlloc_v2");
    twins.zero({2}, nullptr);
    twins.copy({{1, 4}}, nullptr);
    EXPECT_EQ(standin_num_pending(), 2u) << "on the stream, and not done yet";
    EXPECT_EQ(standin_num_calls("cuStreamSynchronize") + standin_num_calls("cuCtxSynchronize") +
                  standin_num_calls("cuEventSynchronize"),
              waits);
    EXPECT_EQ(standin_num_calls("cuMemAlloc_v2"), taken);
    ASSERT_NO_FATAL_FAILURE(twins.compare());
    EXPECT_NE(twins.device_bytes(0), before);
}

TEST_F(CudaOps, TakeOneLaunchForAllLayers) {
    NEEDS_STANDIN("counts calls");
    Shape shape = shapes()[0];
    shape.num_layers = 20;
    Twins twins(shape);
    twins.fill(1);
    const auto launches = [&](auto call) {
        const std::uint64_t before = standin_num_calls("cuLaunchKernel");
        call();
        return standin_num_calls("cuLaunchKernel") - before;
    };
    EXPECT_EQ(launches([&] { twins.zero({1, 3, 5}, nullptr); }), 1u);
    EXPECT_EQ(launches([&] { twins.copy({{1, 2}, {3, 4}}, nullptr); }), 1u);
    EXPECT_EQ(launches([&] { twins.copy({{1, 2}, {2, 1}}, nullptr); }), 1u);
    const Bytes rows = Random(1).rows(60 * twins.row_bytes(), shape.rows);
    EXPECT_EQ(launches([&] { twins.write(rows, {1, 2, 3}); }), 1u);
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaOps, OneRangeIsFilledByTheDriver) {
    Shape shape = shapes()[0];
    shape.num_layers = 1;
    Twins twins(shape);
    twins.fill(1);
    const std::uint64_t launches = num_calls("cuLaunchKernel");
    twins.zero({3, 4, 5}, nullptr);
    EXPECT_EQ(num_calls("cuLaunchKernel"), launches);
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaOps, ACapturedGraphHasAllThatItNeeds) {
    Twins twins(shapes()[0]);
    const Bytes rows = Random(1).rows(40 * twins.row_bytes(), Dtype::bf16);
    const DeviceArray device_rows(rows), device_slots(std::vector<std::int64_t>{4, -1, 70});
    const kvpages_kv_rows layer =
        kvpages::kv_rows(1, device_rows.data(), device_rows.data());
    twins.fill(1);
    const support::Graph graph(twins.stream(), [&] {
        std::vector<std::int32_t> ids{2, 5};
        std::vector<kvpages_block_copy> copies{{1, 4}, {4, 1}};
        twins.on_device().zero_blocks(ids, twins.stream());
        twins.on_device().copy_blocks(copies, twins.stream());
        twins.on_device().write(layer, {device_slots.data<const std::int64_t>(), 3}, Dtype::bf16,
                                std::nullopt, twins.stream());
        ids.assign(2, 8);
        copies.assign(2, {0, 0});
    });
    for (unsigned replay = 0; replay < 2; ++replay) {
        twins.fill(replay);
        graph.launch(twins.stream());
        twins.wait();
        Bytes expected = twins.host_bytes(0);
        const std::size_t page = expected.size() / kBlocks;
        const Bytes filled = expected;
        const auto at = [&](std::size_t block) {
            return static_cast<std::ptrdiff_t>(block * page);
        };
        for (const std::size_t block : {2u, 5u}) {
            std::fill_n(expected.begin() + at(block), page, static_cast<unsigned char>(0));
        }
        std::copy_n(filled.begin() + at(1), page, expected.begin() + at(4));
        std::copy_n(filled.begin() + at(4), page, expected.begin() + at(1));
        EXPECT_EQ(twins.device_bytes(0), expected) << "replay " << replay;
        EXPECT_NE(twins.device_bytes(1), twins.host_bytes(1)) << "rows were not written";
    }
}

TEST_F(CudaOps, RowsOfSlotsThatAreNotThereAreSkipped) {
    for (const Shape& shape : shapes()) {
        Twins twins(shape);
        twins.fill(3);
        const auto num_slots = static_cast<std::int64_t>(twins.num_slots());
        const std::vector<std::int64_t> slots{num_slots, -2, num_slots * 1000, INT64_MAX,
                                              INT64_MIN};
        const DeviceArray device_slots(slots);
        const DeviceArray rows(Random(1).rows(80 * twins.row_bytes(), shape.rows));
        const kvpages_kv_rows layer =
            kvpages::kv_rows(0, rows.data(), rows.data<unsigned char>() + twins.row_bytes());
        twins.on_device().write(layer, {device_slots.data<const std::int64_t>(), slots.size()},
                                shape.rows, std::nullopt, twins.stream());
        ASSERT_NO_FATAL_FAILURE(twins.compare());
    }
}

TEST_F(CudaOps, WhatIsRefusedIsNotLaunched) {
    Twins twins(shapes()[0]);
    const std::uint64_t before = num_calls("cuLaunchKernel");
    const std::vector<std::int32_t> beyond{static_cast<std::int32_t>(kBlocks)}, twice{1, 1};
    EXPECT_THROW(twins.on_device().zero_blocks(beyond), kvpages::Error);
    EXPECT_THROW(twins.on_device().zero_blocks(twice), kvpages::Error);
    const std::vector<kvpages_block_copy> same_target{{1, 2}, {3, 2}};
    EXPECT_THROW(twins.on_device().copy_blocks(same_target), kvpages::Error);
    const DeviceArray slots(std::vector<std::int64_t>{1});
    kvpages_kv_rows layer = kvpages::kv_rows(99, slots.data(), slots.data());
    EXPECT_THROW(twins.on_device().write(layer, {slots.data<const std::int64_t>(), 1}, Dtype::bf16),
                 kvpages::Error);
    EXPECT_EQ(num_calls("cuLaunchKernel"), before);
}

/// Makes a cache and operations and runs each of them once; returns the first status that is not OK.
std::int32_t scenario(const kvpages::Plan& plan) {
    try {
        const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::cuda());
        kvpages::Ops ops(cache);
        ops.zero_blocks(std::vector<std::int32_t>{2, 4});
        ops.copy_blocks(std::vector<kvpages_block_copy>{{1, 2}, {2, 1}});
        return KVPAGES_STATUS_OK;
    } catch (const kvpages::Error& error) {
        return error.status();
    }
}

TEST_F(CudaOps, AFailureAtAnyCallIsToldAndLeavesNothing) {
    NEEDS_STANDIN("fails when it is told to");
    standin_set_deferred(false);
    const kvpages::Plan plan = plan_of(shapes()[0]);
    ASSERT_EQ(scenario(plan), KVPAGES_STATUS_OK);  // opens the driver
    const std::uint64_t before = standin_num_calls(nullptr);
    ASSERT_EQ(scenario(plan), KVPAGES_STATUS_OK);
    const std::uint64_t num_calls = standin_num_calls(nullptr) - before;
    ASSERT_GT(num_calls, 100u);
    std::size_t num_told = 0;
    for (std::uint64_t nth = 1; nth <= num_calls; ++nth) {
        ASSERT_TRUE(standin_fail(nullptr, nth, CUDA_ERROR_UNKNOWN));
        const std::int32_t status = scenario(plan);
        const std::string function = standin_last_failed();
        SCOPED_TRACE("call " + std::to_string(nth) + ", " + function);
        standin_fail_nothing();
        num_told += status == KVPAGES_STATUS_DEVICE_UNAVAILABLE;
        if (function == "cuModuleLoadData" || function == "cuModuleGetFunction" ||
            function == "cuLaunchKernel" || function == "cuMemsetD8Async") {
            EXPECT_EQ(status, KVPAGES_STATUS_DEVICE_UNAVAILABLE);
        }
        // Memory cannot be given back to a context that cannot be entered.
        if (standin_num_leaks(nullptr) != 0) {
            EXPECT_EQ(function, "cuCtxPushCurrent_v2") << standin_describe_leaks();
            standin_reset();
            ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
        }
        ASSERT_EQ(scenario(plan), KVPAGES_STATUS_OK);
        ASSERT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
    }
    EXPECT_GT(num_told, num_calls / 2);
}

}  // namespace
