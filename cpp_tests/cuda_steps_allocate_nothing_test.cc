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

}  // namespace
