// Poison: reading what nobody wrote, or what was freed, gives NaN, and nothing else does.
#include "support/api.h"
#include "support/failure.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using support::fails;

namespace {

constexpr std::uint64_t kBlock = 8, kKernelBlock = 4, kHeadSize = 4, kBlocks = 6;

/// A model of one float layer, whose blocks a kernel reads in halves.
class Engine {
public:
    explicit Engine(std::uint32_t flags = 0, std::uint64_t num_blocks = 0)
        : plan_(plan()),
          cache_(kvpages::Cache::allocate(plan_, kvpages::Memory::host(), 0, num_blocks, flags)),
          ops_(cache_) {}

    kvpages::Cache& cache() { return cache_; }
    kvpages::Ops& ops() { return ops_; }

    /// Stores a key and a value for each token of a request.
    void write(const std::vector<std::int32_t>& blocks, std::uint64_t num_tokens) {
        std::vector<float> keys(num_tokens * kHeadSize, 0.5f), values(keys.size(), 2.0f);
        std::vector<std::int64_t> slots;
        for (std::uint64_t token = 0; token < num_tokens; ++token) {
            slots.push_back(blocks[token / kBlock] * static_cast<std::int64_t>(kBlock) +
                            static_cast<std::int64_t>(token % kBlock));
        }
        ops_.write(kvpages::kv_rows(0, keys.data(), values.data()), slots, kvpages::Dtype::f32);
    }

    /// What one query of all ones gets: softmax over the tokens' keys, of the tokens' values.
    float attend(const std::vector<std::int32_t>& blocks, std::uint64_t num_tokens) const {
        const kvpages::ViewAxes axes = cache_.axes(0);
        const auto* data = static_cast<const float*>(cache_.view(0).data);
        float weights = 0, sum = 0;
        for (std::uint64_t token = 0; token < num_tokens; ++token) {
            const std::uint64_t slot =
                static_cast<std::uint64_t>(blocks[token / kBlock]) * kBlock + token % kBlock;
            const float* key = data + slot / kKernelBlock * axes.kernel_block_stride +
                               slot % kKernelBlock * axes.token_stride;
            float score = 0;
            for (std::uint64_t i = 0; i < kHeadSize; ++i) score += key[i * axes.content_stride];
            weights += std::exp(score);
            sum += std::exp(score) * key[axes.value_offset];
        }
        return sum / weights;
    }

private:
    static kvpages::Plan plan() {
        kvpages::BackendConfig config;
        config.name = "TEST";
        config.layout = "kv | block | token | head | content";
        config.kernel_block_sizes = {kKernelBlock};
        kvpages::AttentionSpec spec;
        spec.dtype = kvpages::Dtype::f32;
        spec.block_size = kBlock;
        spec.num_kv_heads = 1;
        spec.head_size = kHeadSize;
        kvpages::Model model;
        model.add("layers.0", spec, kvpages::Backend(config), 1);
        kvpages::PlanConfig plan;
        plan.num_blocks_override = kBlocks;
        plan.max_model_len = kBlock;
        plan.max_tokens_in_flight = kBlock;
        return kvpages::Plan::make(model, plan);
    }

    kvpages::Plan plan_;
    kvpages::Cache cache_;
    kvpages::Ops ops_;
};

/// Bytes of a block in all regions.
std::vector<unsigned char> bytes_of(const kvpages::Cache& cache, std::uint64_t block) {
    std::vector<unsigned char> bytes;
    for (const kvpages_region& region : cache.regions()) {
        const auto* start =
            static_cast<const unsigned char*>(region.data) + block * region.block_step_bytes;
        bytes.insert(bytes.end(), start, start + region.block_step_bytes);
    }
    return bytes;
}

bool is_all(const kvpages::Cache& cache, std::uint64_t block, unsigned char value) {
    const std::vector<unsigned char> bytes = bytes_of(cache, block);
    return !bytes.empty() && bytes == std::vector<unsigned char>(bytes.size(), value);
}

}  // namespace

TEST(Poison, AnAttentionThatReadsAFreedBlockIsNaN) {
    Engine engine;
    const std::vector<std::int32_t> mine{3, 1}, other{2, 4};
    engine.write(mine, 13);
    engine.write(other, 16);
    EXPECT_EQ(engine.attend(mine, 13), 2.0f);
    const std::vector<std::int32_t> freed{1};
    engine.ops().poison_blocks(freed);
    EXPECT_TRUE(std::isnan(engine.attend(mine, 13))) << "the stale block";
    EXPECT_EQ(engine.attend(mine, 8), 2.0f) << "the block that is still there";
    EXPECT_EQ(engine.attend(other, 16), 2.0f) << "another request";
    // Handed out again and written, it is a block like any other.
    engine.write(mine, 16);
    EXPECT_EQ(engine.attend(mine, 16), 2.0f);
}

TEST(Poison, AnAttentionThatReadsAFreshBlockIsNaN) {
    Engine engine(KVPAGES_CACHE_POISON);
    EXPECT_TRUE(std::isnan(engine.attend({5}, 1)));
    engine.write({5}, 3);
    EXPECT_EQ(engine.attend({5}, 3), 2.0f);
    EXPECT_TRUE(std::isnan(engine.attend({5}, 4))) << "one token more than were written";
    EXPECT_EQ(engine.attend({0}, 8), 0.0f) << "the null block";
    const std::vector<std::int32_t> handed_out{5};
    engine.ops().zero_blocks(handed_out);
    EXPECT_EQ(engine.attend({5}, 8), 0.0f) << "cleared when it is handed out";
    Engine quiet;
    EXPECT_EQ(quiet.attend({5}, 1), 0.0f) << "without the flag";
}

TEST(Poison, BlocksThatComeLaterAreFreshToo) {
    Engine engine(KVPAGES_CACHE_POISON, 2);
    const auto expect_fresh = [&engine](std::uint64_t from, std::uint64_t to) {
        EXPECT_TRUE(is_all(engine.cache(), 0, 0));
        for (std::uint64_t block = from; block < to; ++block) {
            EXPECT_TRUE(is_all(engine.cache(), block, 0xff)) << block;
        }
    };
    expect_fresh(1, 2);
    engine.write({1}, 8);
    const std::vector<unsigned char> written = bytes_of(engine.cache(), 1);
    const std::vector<std::int32_t> in_use{1};
    engine.cache().resize(kBlocks, in_use);
    EXPECT_EQ(bytes_of(engine.cache(), 1), written) << "what is there stays";
    expect_fresh(2, kBlocks);
    engine.write({2, 3, 4, 5}, 32);
    engine.cache().resize(3, in_use);
    engine.cache().resize(5, in_use);
    EXPECT_EQ(bytes_of(engine.cache(), 1), written);
    expect_fresh(3, 5);
    // A cache that has only the null block, and grows.
    Engine small(KVPAGES_CACHE_POISON, 1);
    EXPECT_TRUE(is_all(small.cache(), 0, 0));
    small.cache().resize(2, {});
    EXPECT_TRUE(is_all(small.cache(), 0, 0));
    EXPECT_TRUE(is_all(small.cache(), 1, 0xff));
}

// Every float type that has a NaN of these bits, and the scales behind integers: what gather reads.
TEST(Poison, IsNaNInEveryTypeThatHasOne) {
    struct Stored {
        kvpages::Dtype dtype;
        kvpages::QuantMode mode;
    };
    for (const Stored& stored :
         {Stored{kvpages::Dtype::f32, kvpages::QuantMode::none},
          Stored{kvpages::Dtype::f16, kvpages::QuantMode::none},
          Stored{kvpages::Dtype::bf16, kvpages::QuantMode::none},
          Stored{kvpages::Dtype::f8_e4m3fn, kvpages::QuantMode::fp8_per_tensor},
          Stored{kvpages::Dtype::f8_e5m2, kvpages::QuantMode::fp8_per_tensor},
          Stored{kvpages::Dtype::f8_e4m3fn, kvpages::QuantMode::fp8_per_token_head},
          Stored{kvpages::Dtype::i8, kvpages::QuantMode::int8_per_token_head}}) {
        SCOPED_TRACE(kvpages::name(stored.dtype));
        kvpages::BackendConfig config;
        config.name = "TEST";
        config.layout = "block | token | head | kv*content";
        config.kernel_block_sizes = {kBlock};
        kvpages::AttentionSpec spec;
        spec.dtype = stored.dtype;
        spec.quant_mode = stored.mode;
        spec.block_size = kBlock;
        spec.num_kv_heads = 2;
        spec.head_size = 16;
        kvpages::Model model;
        model.add("layers.0", spec, kvpages::Backend(config), 2);
        kvpages::PlanConfig plan;
        plan.num_blocks_override = 3;
        plan.max_model_len = kBlock;
        plan.max_tokens_in_flight = kBlock;
        const kvpages::Cache cache = kvpages::Cache::allocate(
            kvpages::Plan::make(model, plan), kvpages::Memory::host());
        kvpages::Ops ops(cache);
        const std::vector<std::int32_t> freed{2}, kept{1};
        ops.poison_blocks(freed);
        std::vector<float> keys(kBlock * 32), values(kBlock * 32);
        kvpages_kv_rows_out rows{};
        rows.keys = keys.data();
        rows.values = values.data();
        rows.key_scale = rows.value_scale = 0.5f;
        const auto count_nans = [&](const std::vector<std::int32_t>& ids) {
            ops.gather_blocks({&rows, 1}, ids, kvpages::Dtype::f32);
            std::size_t count = 0;
            for (const float value : keys) count += std::isnan(value) ? 1 : 0;
            for (const float value : values) count += std::isnan(value) ? 1 : 0;
            return count;
        };
        EXPECT_EQ(count_nans(freed), keys.size() + values.size());
        EXPECT_EQ(count_nans(kept), 0u);
    }
}

TEST(Poison, FlagsThatAreNotKnownAreRefused) {
    const support::Model model = support::model();
    support::add(model, "A", support::page_of(64), support::backend(support::packed_nhd));
    const support::Plan plan = support::plan_of_blocks(model, 2);
    const support::Memory memory = support::host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    kvpages_cache* cache = nullptr;
    config.flags = 2;
    EXPECT_TRUE(fails(kvpages_cache_create(plan.get(), &config, &cache, nullptr),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"flags", "0x2"}));
    EXPECT_EQ(cache, nullptr);
    config.flags = 0;
    config.reserved0 = 1;
    EXPECT_TRUE(fails(kvpages_cache_create(plan.get(), &config, &cache, nullptr),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"reserved0"}));
    EXPECT_EQ(cache, nullptr);
}
