// Caches in the memory of a CUDA device: where they lie, that they are zero, that nothing leaks and
// that every failure of the driver leaves nothing behind. Runs on the stand-in driver.
#include "driver.h"
#include "standin.h"
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace support;

namespace {

constexpr std::uint64_t max_blocks = 512;

class CudaMemory : public ::testing::Test {
protected:
    void SetUp() override { standin_reset(); }
    void TearDown() override {
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
    }
};

// 16 KiB pages, keys and values apart in the second layer.
Model two_layers() {
    Model m = model();
    add(m, "layers.0", full(16, 4, 64), backend(block_first));
    add(m, "layers.1", full(16, 4, 64), backend(kv_first));
    return m;
}

std::int32_t try_memory(std::uint32_t flags, kvpages_memory** out, std::uint32_t ordinal = 0,
                        void* context = nullptr) {
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    config.flags = flags;
    config.ordinal = ordinal;
    config.context = context;
    return kvpages_memory_create_cuda(&config, out);
}

Memory cuda_memory(std::uint32_t flags, std::uint32_t ordinal = 0, void* context = nullptr) {
    kvpages_memory* raw = nullptr;
    must(try_memory(flags, &raw, ordinal, context));
    return Memory(raw);
}

std::int32_t try_cache(const Plan& plan, const Memory& memory, std::uint64_t num_blocks,
                       kvpages_cache** out) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = num_blocks;
    return kvpages_cache_create(plan.get(), &config, out, nullptr);
}

Cache cache_of(const Plan& plan, const Memory& memory, std::uint64_t num_blocks = 0) {
    kvpages_cache* raw = nullptr;
    must(try_cache(plan, memory, num_blocks, &raw));
    return Cache(raw);
}

kvpages_device device_of(const Cache& cache) {
    kvpages_device device{};
    must(kvpages_cache_get_device(cache.get(), &device));
    return device;
}

// Makes the cache's context current while it lives.
class Inside {
public:
    explicit Inside(const Cache& cache) {
        cuCtxPushCurrent_v2(static_cast<CUcontext>(device_of(cache).context));
    }
    ~Inside() {
        CUcontext popped = nullptr;
        cuCtxPopCurrent_v2(&popped);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
};

template <typename Visit>
void for_each_part(const Cache& cache, std::uint64_t block, Visit&& visit) {
    for (std::size_t i = 0; i < kvpages_cache_num_regions(cache.get()); ++i) {
        kvpages_region region{};
        must(kvpages_cache_get_region(cache.get(), i, &region));
        visit(reinterpret_cast<CUdeviceptr>(region.data) + block * region.block_step_bytes,
              static_cast<std::size_t>(region.block_step_bytes));
    }
}

bool block_is(const Cache& cache, std::uint64_t block, unsigned char value) {
    const Inside inside(cache);
    bool all = true;
    for_each_part(cache, block, [&](CUdeviceptr data, std::size_t bytes) {
        std::vector<unsigned char> copy(bytes);
        EXPECT_EQ(cuMemcpyDtoHAsync_v2(copy.data(), data, bytes, nullptr), CUDA_SUCCESS);
        EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
        all = all && std::all_of(copy.begin(), copy.end(),
                                 [value](unsigned char byte) { return byte == value; });
    });
    return all;
}

void fill_block(const Cache& cache, std::uint64_t block, unsigned char value) {
    const Inside inside(cache);
    for_each_part(cache, block, [&](CUdeviceptr data, std::size_t bytes) {
        EXPECT_EQ(cuMemsetD8Async(data, value, bytes, nullptr), CUDA_SUCCESS);
    });
    EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
}

void resize(const Cache& cache, std::uint64_t num_blocks) {
    must(kvpages_cache_resize(cache.get(), num_blocks, nullptr, 0));
}

constexpr std::uint32_t all_flags =
    KVPAGES_CUDA_MEMORY_VIRTUAL | KVPAGES_CUDA_MEMORY_RDMA | KVPAGES_CUDA_MEMORY_SHAREABLE;

}  // namespace

TEST_F(CudaMemory, IsZeroOnItsDeviceAndOutOfTheHostsReach) {
    const Plan plan = plan_of_blocks(two_layers(), 8);
    standin_set_protected(true);  // a host that zeroed it would fault
    standin_set_deferred(true);   // and zeroing that is not waited for would not be seen
    for (const std::uint32_t ordinal : {0u, 1u}) {
        for (const std::uint32_t flags : {0u, std::uint32_t{KVPAGES_CUDA_MEMORY_VIRTUAL}}) {
            const Cache c = cache_of(plan, cuda_memory(flags, ordinal));
            EXPECT_EQ(device_of(c).kind, std::uint32_t{KVPAGES_DEVICE_KIND_CUDA});
            EXPECT_EQ(device_of(c).ordinal, ordinal);
            EXPECT_NE(device_of(c).context, nullptr);
            for (std::uint64_t block = 0; block < 8; ++block) {
                EXPECT_TRUE(block_is(c, block, 0)) << block;
            }
            CUcontext current = nullptr;
            EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
            EXPECT_EQ(current, nullptr);
        }
    }
}

TEST_F(CudaMemory, DevicesAreDescribed) {
    std::uint32_t count = 0;
    must(kvpages_device_count(&count));
    EXPECT_EQ(count, 2u);
    kvpages_device_info info = KVPAGES_DEVICE_INFO_INIT;
    must(kvpages_device_get_info(1, &info));
    EXPECT_GT(std::string(info.name).size(), 0u);
    EXPECT_GT(info.total_bytes, 0u);
    EXPECT_LE(info.free_bytes, info.total_bytes);
    EXPECT_TRUE(fails(kvpages_device_get_info(2, &info), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                      "no_device", {"device 2", "sees 2"}));
}

TEST_F(CudaMemory, GrowsAndShrinksInPlace) {
    const Plan plan = plan_of_blocks(two_layers(), max_blocks);
    const Cache c = cache_of(plan, cuda_memory(KVPAGES_CUDA_MEMORY_VIRTUAL), 3);
    standin_set_protected(true);
    std::uint64_t present = 0;
    for (const std::uint64_t num_blocks : {3, 300, 129, 130, 512, 1, 512}) {
        if (num_blocks != present && present != 0) {
            resize(c, num_blocks);
        }
        for (const std::uint64_t block : {std::uint64_t{0}, num_blocks / 2, num_blocks - 1}) {
            if (block >= present) {
                EXPECT_TRUE(block_is(c, block, 0)) << block << " of " << num_blocks;
            }
        }
        for (std::uint64_t block = 0; block < num_blocks; ++block) {
            if (block >= present) {
                fill_block(c, block, 7);
            }
        }
        EXPECT_TRUE(block_is(c, 0, 7));
        present = num_blocks;
    }
    const std::uint64_t full = standin_used_bytes(0);
    EXPECT_GE(full, worker_info(plan).total_bytes);
    resize(c, 1);
    // Keys, values, and the other layer: a granule each.
    EXPECT_LE(standin_used_bytes(0), std::uint64_t{3} * (2 << 20));
}

TEST_F(CudaMemory, MemoryThatIsNotThereIsAnErrorWithNumbers) {
    const Plan plan = plan_of_blocks(two_layers(), max_blocks);
    standin_set_total_bytes(0, 10 << 20);
    for (const std::uint32_t flags : {0u, std::uint32_t{KVPAGES_CUDA_MEMORY_VIRTUAL}}) {
        const Memory memory = cuda_memory(flags);
        kvpages_cache* out = nullptr;
        EXPECT_TRUE(fails(try_cache(plan, memory, 0, &out), KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY,
                          "out_of_device_memory", {"bytes are needed", "are free"}));
        EXPECT_EQ(out, nullptr);
        EXPECT_EQ(standin_used_bytes(0), 0u);
    }
    const Cache c = cache_of(plan, cuda_memory(KVPAGES_CUDA_MEMORY_VIRTUAL), 3);
    fill_block(c, 2, 9);
    const std::uint64_t used = standin_used_bytes(0);
    EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 512, nullptr, 0),
                      KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY, "out_of_device_memory"));
    EXPECT_EQ(standin_used_bytes(0), used);
    EXPECT_EQ(kvpages_cache_num_blocks(c.get()), 3u);
    EXPECT_TRUE(block_is(c, 2, 9));
}

TEST_F(CudaMemory, EveryFailureOfTheDriverLeavesNothingBehind) {
    const Plan plan = plan_of_blocks(two_layers(), max_blocks);
    constexpr int unknown = 999;
    for (const std::uint32_t flags : {0u, all_flags}) {
        int failures = 0;
        for (std::uint64_t nth = 1;; ++nth) {
            standin_reset();
            standin_fail(nullptr, nth, unknown);
            kvpages_memory* memory = nullptr;
            kvpages_cache* cache = nullptr;
            std::int32_t status = try_memory(flags, &memory);
            if (status == KVPAGES_STATUS_OK) {
                status = try_cache(plan, Memory(memory), flags == 0 ? 0 : 3, &cache);
            }
            if (status == KVPAGES_STATUS_OK && flags != 0) {
                status = kvpages_cache_resize(cache, 300, nullptr, 0);
            }
            const Failure failure = failure_of(status);
            const bool happened = standin_num_failed() != 0;
            const std::string called = happened ? standin_last_failed() : "";
            standin_fail_nothing();
            kvpages_cache_destroy(cache);
            EXPECT_EQ(standin_num_leaks(nullptr), 0u)
                << "call " << nth << ", " << called << ": " << standin_describe_leaks();
            if (status != KVPAGES_STATUS_OK) {
                ++failures;
                EXPECT_EQ(status, KVPAGES_STATUS_DEVICE_UNAVAILABLE) << failure.message;
                EXPECT_EQ(failure.kind, "driver_failed") << failure.message;
                EXPECT_NE(failure.message.find(called), std::string::npos) << failure.message;
            }
            if (!happened) {
                EXPECT_EQ(status, KVPAGES_STATUS_OK) << failure.message;
                break;
            }
        }
        EXPECT_GT(failures, 10);
    }
}

TEST_F(CudaMemory, OperationsOnADeviceSayThatTheyAreNotThere) {
    const Plan plan = plan_of_blocks(two_layers(), 4);
    const Cache c = cache_of(plan, cuda_memory(0));
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* ops = nullptr;
    EXPECT_TRUE(fails(kvpages_ops_create(c.get(), &config, &ops), KVPAGES_STATUS_UNSUPPORTED,
                      "ops_on_device", {"device 0"}));
}
