// What an engine calls in every step allocates nothing on the host, with tables in device memory
// too. The linker leads the library's calls of the allocator here.
#include "support/cuda.h"

#include <kvpages/kvpages.h>

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

thread_local std::size_t num_allocations = 0;

}  // namespace

extern "C" {

void* __real_malloc(std::size_t bytes);
void* __real_calloc(std::size_t count, std::size_t bytes);
void* __real_realloc(void* memory, std::size_t bytes);
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);

void* __wrap_malloc(std::size_t bytes);
void* __wrap_calloc(std::size_t count, std::size_t bytes);
void* __wrap_realloc(void* memory, std::size_t bytes);
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);

void* __wrap_malloc(std::size_t bytes) {
    ++num_allocations;
    return __real_malloc(bytes);
}

void* __wrap_calloc(std::size_t count, std::size_t bytes) {
    ++num_allocations;
    return __real_calloc(count, bytes);
}

void* __wrap_realloc(void* memory, std::size_t bytes) {
    ++num_allocations;
    return __real_realloc(memory, bytes);
}

int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    ++num_allocations;
    return __real_posix_memalign(memory, alignment, bytes);
}
}

namespace {

constexpr std::size_t kRequests = 8, kRowBlocks = 20000;

/// The library's allocations of this thread during a call.
template <typename Call>
std::size_t allocations(Call call) {
    const std::size_t before = num_allocations;
    EXPECT_EQ(call(), KVPAGES_STATUS_OK);
    return num_allocations - before;
}

class CudaSteps : public support::CudaTest {
protected:
    void SetUp() override {
        ASSERT_NO_FATAL_FAILURE(support::CudaTest::SetUp());
        const std::array<kvpages_table_group, 2> groups{
            {{16, 16, kRowBlocks, 0, 0}, {64, 16, 64, 1, 0}}};
        kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
        config.groups = groups.data();
        config.num_groups = groups.size();
        config.max_requests = kRequests;
        config.max_tokens = 64;
        config.device = {KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};
        EXPECT_GT(allocations([&] { return kvpages_tables_create(&config, &tables_); }), 0u)
            << "they are counted";
    }

    void TearDown() override {
        kvpages_tables_destroy(tables_);
        support::CudaTest::TearDown();
    }

    kvpages_tables* tables_ = nullptr;
};

TEST_F(CudaSteps, OfTablesAllocateNothing) {
    const std::vector<std::int32_t> requests{0, -1, 2}, query_start{0, 2, 3, 4}, seq_lens{2, 1, 7};
    const std::vector<std::int64_t> positions{0, 1, 0, 6};
    const std::vector<std::int32_t> blocks(kRowBlocks, 3);
    kvpages_batch batch = KVPAGES_BATCH_INIT;
    batch.requests = requests.data();
    batch.num_requests = requests.size();
    batch.query_start = query_start.data();
    batch.seq_lens = seq_lens.data();
    batch.positions = positions.data();
    batch.num_positions = positions.size();
    kvpages_step step = KVPAGES_STEP_INIT;
    // Often enough to wait for the device.
    for (int round = 0; round < 20; ++round) {
        EXPECT_EQ(allocations([&] {
                      return kvpages_tables_overwrite(tables_, 2, 0, blocks.data(), kRowBlocks);
                  }),
                  0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_swap(tables_, 0, 2); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_prepare(tables_, &batch, &step); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_clear(tables_, 0); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_apply(tables_, nullptr); }), 0u);
        EXPECT_EQ(allocations([&] {
                      return kvpages_tables_gather(tables_, requests.data(), 3, 3, nullptr);
                  }),
                  0u);
        EXPECT_EQ(allocations([&] {
                      return kvpages_tables_map_slots(tables_, requests.data(), 3,
                                                      query_start.data(), positions.data(), 4,
                                                      nullptr);
                  }),
                  0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_gather_dummies(tables_, 3, nullptr); }),
                  0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_map_dummies(tables_, nullptr); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_reset(tables_, nullptr); }), 0u);
    }
    if (!support::on_standin()) return;
    // Also when all is sent again.
    ASSERT_TRUE(standin_fail("cuLaunchKernel", 1, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(kvpages_tables_gather(tables_, requests.data(), 3, 3, nullptr),
              KVPAGES_STATUS_DEVICE_UNAVAILABLE);
    EXPECT_EQ(allocations([&] { return kvpages_tables_prepare(tables_, &batch, &step); }), 0u);
}

// Nor do those on blocks, also while a log callback takes everything, of which they say nothing.
TEST_F(CudaSteps, OfBlocksAllocateAndSayNothing) {
    kvpages_backend* backend = nullptr;
    ASSERT_EQ(kvpages_backend_create_preset(KVPAGES_PRESET_FLASH_ATTENTION_NHD, &backend), 0);
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    spec.kind = KVPAGES_SPEC_KIND_FULL_ATTENTION;
    spec.dtype = KVPAGES_DTYPE_F16;
    spec.block_size = 16;
    spec.num_kv_heads = 2;
    spec.head_size = 32;
    kvpages_model* model = nullptr;
    ASSERT_EQ(kvpages_model_create(&model), 0);
    kvpages_layer layer = KVPAGES_LAYER_INIT;
    layer.spec = &spec;
    layer.backend = backend;
    for (const char* name : {"layers.0", "layers.1"}) {
        layer.name = name;
        ASSERT_EQ(kvpages_model_add_layer(model, &layer), 0);
    }
    kvpages_plan_config plan_config = KVPAGES_PLAN_CONFIG_INIT;
    plan_config.max_model_len = 16;
    const kvpages_worker worker{model, 1 << 20};
    kvpages_plan* plan = nullptr;
    ASSERT_EQ(kvpages_plan_create(&plan_config, &worker, 1, &plan, nullptr), 0);
    kvpages_cuda_memory_config memory_config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    kvpages_memory* memory = nullptr;
    ASSERT_EQ(kvpages_memory_create_cuda(&memory_config, &memory), 0);
    kvpages_cache_config cache_config = KVPAGES_CACHE_CONFIG_INIT;
    cache_config.memory = memory;
    kvpages_cache* cache = nullptr;
    ASSERT_EQ(kvpages_cache_create(plan, &cache_config, &cache, nullptr), 0);
    kvpages_ops_config ops_config = KVPAGES_OPS_CONFIG_INIT;
    ops_config.max_concurrency = 1;
    kvpages_ops* ops = nullptr;
    ASSERT_EQ(kvpages_ops_create(cache, &ops_config, &ops), 0);

    int num_messages = 0;
    const auto count = [](void* user, std::uint32_t, const char*) { ++*static_cast<int*>(user); };
    ASSERT_EQ(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_DEBUG, count, &num_messages), 0);
    const std::int32_t blocks[]{5, 2, 9};
    const std::uint64_t in_use = 3;
    kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
    usage.blocks_in_use = &in_use;
    usage.num_counts = 1;
    kvpages_cache_snapshot of_cache = KVPAGES_CACHE_SNAPSHOT_INIT;
    kvpages_cache_group of_group = KVPAGES_CACHE_GROUP_INIT;
    kvpages_tables_snapshot of_tables = KVPAGES_TABLES_SNAPSHOT_INIT;
    for (int round = 0; round < 3; ++round) {
        EXPECT_EQ(allocations([&] {
                      return kvpages_ops_poison_blocks(ops, blocks, 3, nullptr, nullptr);
                  }),
                  0u);
        EXPECT_EQ(
            allocations([&] { return kvpages_ops_zero_blocks(ops, blocks, 3, nullptr, nullptr); }),
            0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_apply(tables_, nullptr); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_cache_get_snapshot(cache, &usage, &of_cache); }),
                  0u);
        EXPECT_EQ(allocations([&] { return kvpages_cache_get_group(cache, 0, &of_group); }), 0u);
        EXPECT_EQ(allocations([&] { return kvpages_tables_get_snapshot(tables_, &of_tables); }),
                  0u);
    }
    EXPECT_EQ(of_cache.blocks_in_use, 3u);
    EXPECT_EQ(num_messages, 0);
    kvpages_ops_destroy(ops);
    kvpages_cache_destroy(cache);
    EXPECT_EQ(num_messages, 1) << "the cache that is destroyed";
    ASSERT_EQ(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_OFF, nullptr, nullptr), 0);
    kvpages_memory_destroy(memory);
    kvpages_plan_destroy(plan);
    kvpages_model_destroy(model);
    kvpages_backend_destroy(backend);
}

}  // namespace
