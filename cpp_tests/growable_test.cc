// Caches that grow and shrink between steps, in host memory.
#include "support/api.h"
#include "support/failure.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace support;

namespace {

constexpr std::uint64_t max_blocks = 64;

// Two groups, one with a window, so that layers of both share allocations: blocks in one piece.
Model shared_pages() {
    Model m = model();
    for (int i = 0; i < 4; ++i) {
        const kvpages_spec spec = i % 2 == 0 ? full(16, 2, 64) : sliding(64, 16, 2, 64);
        add(m, "layers." + std::to_string(i), spec, backend(block_first));
    }
    return m;
}

// Keys of all blocks lie before all values: two runs in an allocation. A block's part of a run is
// 2 KiB, so runs begin and end inside pages.
Model split_pages() {
    Model m = model();
    add(m, "layers.0", full(16, 1, 64), backend(kv_first));
    add(m, "layers.1", full(16, 1, 64), backend(kv_first));
    return m;
}

// Pages of an odd size.
Model odd_pages() {
    Model m = model();
    add(m, "layers.0", full(3, 1, 5), backend(packed_nhd));
    add(m, "layers.1", full(3, 1, 701), backend(packed_nhd));
    return m;
}

std::int32_t try_cache(const Plan& plan, const Memory& memory, std::uint64_t num_blocks,
                       kvpages_cache** out) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = num_blocks;
    return kvpages_cache_create(plan.get(), &config, out, nullptr);
}

Cache growable(const Plan& plan, std::uint64_t num_blocks) {
    kvpages_memory* memory = nullptr;
    must(kvpages_memory_create_host(&memory));
    kvpages_cache* raw = nullptr;
    must(try_cache(plan, Memory(memory), num_blocks, &raw));
    return Cache(raw);
}

void resize(const Cache& cache, std::uint64_t num_blocks,
            const std::vector<std::int32_t>& in_use = {}) {
    must(kvpages_cache_resize(cache.get(), num_blocks, in_use.data(), in_use.size()));
}

std::vector<kvpages_region> regions(const Cache& cache) {
    std::vector<kvpages_region> all(kvpages_cache_num_regions(cache.get()));
    for (std::size_t i = 0; i < all.size(); ++i) {
        must(kvpages_cache_get_region(cache.get(), i, &all[i]));
    }
    return all;
}

// Every byte of a block is this value, in every region.
bool block_is(const Cache& cache, std::uint64_t block, unsigned char value) {
    for (const kvpages_region& region : regions(cache)) {
        const auto* start =
            static_cast<unsigned char*>(region.data) + block * region.block_step_bytes;
        if (!std::all_of(start, start + region.block_step_bytes,
                         [value](unsigned char byte) { return byte == value; })) {
            return false;
        }
    }
    return true;
}

void fill_block(const Cache& cache, std::uint64_t block, unsigned char value) {
    for (const kvpages_region& region : regions(cache)) {
        auto* start = static_cast<unsigned char*>(region.data) + block * region.block_step_bytes;
        std::fill(start, start + region.block_step_bytes, value);
    }
}

unsigned char mark(std::uint64_t block) { return static_cast<unsigned char>(block + 1); }

// Bytes of a range that lie in memory now.
std::uint64_t resident_bytes(void* data, std::uint64_t bytes) {
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages((bytes + page - 1) / page);
    EXPECT_EQ(mincore(data, bytes, pages.data()), 0);
    return page * static_cast<std::uint64_t>(
                      std::count_if(pages.begin(), pages.end(),
                                    [](unsigned char flags) { return (flags & 1u) == 1u; }));
}

// The same of all allocations.
std::uint64_t resident_bytes(const Cache& cache) {
    std::uint64_t resident = 0;
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
        const kvpages_allocation part = allocation(cache, i);
        resident += resident_bytes(part.data, part.size_bytes);
    }
    return resident;
}

struct Case {
    const char* name;
    Model (*model)();
};

const Case cases[]{
    {"shared pages", shared_pages}, {"split pages", split_pages}, {"odd pages", odd_pages}};

}  // namespace

TEST(Growable, BytesAndAddressesSurviveAndNewBlocksAreZero) {
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        const Plan plan = plan_of_blocks(given.model(), max_blocks);
        const Cache c = growable(plan, 5);
        EXPECT_EQ(kvpages_cache_max_blocks(c.get()), max_blocks);
        const std::vector<kvpages_region> before = regions(c);
        kvpages_tensor view_before{};
        must(kvpages_cache_get_view(c.get(), 0, 0, &view_before));
        std::uint64_t present = 0;
        for (const std::uint64_t num_blocks : {5u, 6u, 17u, 3u, 4u, 64u, 2u, 33u, 33u, 1u, 64u}) {
            if (num_blocks != kvpages_cache_num_blocks(c.get())) {
                resize(c, num_blocks);
            }
            EXPECT_EQ(kvpages_cache_num_blocks(c.get()), num_blocks);
            for (std::uint64_t block = 0; block < num_blocks; ++block) {
                const unsigned char expected = block < present ? mark(block) : 0;
                ASSERT_TRUE(block_is(c, block, expected))
                    << "block " << block << " of " << num_blocks;
                fill_block(c, block, mark(block));
            }
            present = num_blocks;
        }
        const std::vector<kvpages_region> after = regions(c);
        ASSERT_EQ(before.size(), after.size());
        for (std::size_t i = 0; i < before.size(); ++i) {
            EXPECT_EQ(before[i].data, after[i].data);
            EXPECT_EQ(after[i].num_blocks, max_blocks);
        }
        kvpages_tensor view_after{};
        must(kvpages_cache_get_view(c.get(), 0, 0, &view_after));
        EXPECT_EQ(view_before.data, view_after.data);
    }
}

TEST(Growable, MemoryReturns) {
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        const Plan plan = plan_of_blocks(given.model(), 4096);
        const Cache c = growable(plan, 4096);
        for (std::uint64_t block = 0; block < 4096; ++block) {
            fill_block(c, block, 7);
        }
        const std::uint64_t full = resident_bytes(c);
        const std::uint64_t bytes = worker_info(plan).total_bytes;
        EXPECT_GE(full, bytes);
        // Each run keeps the pieces that its blocks touch, and so may its neighbour.
        const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
        const std::uint64_t piece = bytes / 256 + 2 * page;
        const std::uint64_t slack = 2 * piece * regions(c).size();
        resize(c, 1024);
        EXPECT_LE(resident_bytes(c), bytes / 4 + slack);
        resize(c, 1);
        EXPECT_LE(resident_bytes(c), bytes / 4096 + slack);
        EXPECT_TRUE(block_is(c, 0, 7));
    }
}

TEST(Growable, RefusesToLoseABlockInUse) {
    const Plan plan = plan_of_blocks(shared_pages(), max_blocks);
    const Cache c = growable(plan, 20);
    fill_block(c, 19, 9);
    const std::vector<std::int32_t> in_use{3, 19, 7};
    EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 19, in_use.data(), in_use.size()),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "block_in_use",
                      {"entry 1", "block 19", "from 20 to 19"}));
    EXPECT_EQ(kvpages_cache_num_blocks(c.get()), 20u);
    EXPECT_TRUE(block_is(c, 19, 9));
    resize(c, 20, in_use);
    resize(c, 19, {3, 7});
    for (const std::int32_t unknown : {-1, 19, INT32_MIN, INT32_MAX}) {
        EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 30, &unknown, 1),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range",
                          {"block " + std::to_string(unknown), "19 blocks"}));
    }
    EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 30, nullptr, 1), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument", {"blocks_in_use"}));
    EXPECT_TRUE(fails(kvpages_cache_resize(nullptr, 30, nullptr, 0), KVPAGES_STATUS_NULL_ARGUMENT,
                      "null_argument"));
}

TEST(Growable, NumbersOfBlocksAreThoseOfThePlan) {
    const Plan plan = plan_of_blocks(shared_pages(), max_blocks);
    const Cache c = growable(plan, 20);
    for (const std::uint64_t wanted : {std::uint64_t{0}, max_blocks + 1, UINT64_MAX}) {
        EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), wanted, nullptr, 0),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "cache_num_blocks",
                          {std::to_string(wanted), "1 to 64"}));
    }
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_host(&raw));
    const Memory host(raw);
    kvpages_cache* out = nullptr;
    EXPECT_TRUE(fails(try_cache(plan, host, max_blocks + 1, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "cache_num_blocks"));
    EXPECT_EQ(out, nullptr);
    // All blocks, but not for good.
    must(try_cache(plan, host, max_blocks, &out));
    resize(Cache(out), 1);
}

TEST(Growable, OtherCachesSayWhyTheyStay) {
    const Plan plan = plan_of_blocks(shared_pages(), max_blocks);
    const Cache fixed = growable(plan, 0);
    EXPECT_EQ(kvpages_cache_num_blocks(fixed.get()), max_blocks);
    EXPECT_TRUE(fails(kvpages_cache_resize(fixed.get(), 3, nullptr, 0), KVPAGES_STATUS_UNSUPPORTED,
                      "cache_is_fixed", {"64 blocks"}));
    std::vector<unsigned char> buffer(4 << 20);
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_adopted(buffer.data(), buffer.size(), &raw));
    const Memory adopted(raw);
    kvpages_cache* out = nullptr;
    EXPECT_TRUE(fails(try_cache(plan, adopted, 3, &out), KVPAGES_STATUS_UNSUPPORTED,
                      "memory_cannot_grow", {"adopted"}));
    EXPECT_EQ(out, nullptr);
}

TEST(Growable, OperationsSeeTheSizeAtOnce) {
    const Plan plan = plan_of_blocks(shared_pages(), max_blocks);
    const Cache c = growable(plan, 4);
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(c.get(), &config, &raw));
    const Ops ops(raw);
    const std::int32_t block = 4;
    const auto zero = [&] { return kvpages_ops_zero_blocks(ops.get(), &block, 1, nullptr, nullptr); };
    EXPECT_TRUE(fails(zero(), KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range",
                      {"block id 4", "4 blocks"}));
    resize(c, 5);
    fill_block(c, 4, 3);
    must(zero());
    EXPECT_TRUE(block_is(c, 4, 0));
    resize(c, 2);
    EXPECT_TRUE(fails(zero(), KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range",
                      {"block id 4", "2 blocks"}));
}

TEST(Growable, AddressesCostNoMemory) {
    // 8 KiB pages in each of two allocations: 2 TiB of addresses.
    const Plan plan = plan_of_blocks(shared_pages(), std::uint64_t{1} << 27);
    const Cache c = growable(plan, 2);
    fill_block(c, 1, 5);
    resize(c, 3, {1});
    EXPECT_TRUE(block_is(c, 1, 5));
    EXPECT_TRUE(block_is(c, 2, 0));
}

TEST(Growable, MoreThanAnyMachineHasIsReservedOrRefused) {
    // Pieces of 8 GiB: a block more does not touch the rest of its piece.
    const std::uint64_t tebi = std::uint64_t{1} << 40;
    const Plan large = plan_of_blocks(shared_pages(), 4 * tebi / (2 * 8192));
    ASSERT_EQ(worker_info(large).total_bytes, 4 * tebi);
    const Cache c = growable(large, 1);
    const std::uint64_t all = kvpages_cache_max_blocks(c.get());
    fill_block(c, 0, 5);
    for (int round = 0; round < 2; ++round) {
        resize(c, all, {0});
        EXPECT_TRUE(block_is(c, 0, 5));
        EXPECT_TRUE(block_is(c, 1, 0));
        EXPECT_TRUE(block_is(c, all / 2, 0));
        EXPECT_TRUE(block_is(c, all - 1, 0));
        const std::uint64_t piece = 2 * tebi / 256;
        EXPECT_LT(resident_bytes(allocation(c, 0).data, piece), std::uint64_t{64} << 20);
        fill_block(c, 1, 7);
        fill_block(c, all - 1, 7);
        resize(c, 1, {0});
    }
    // 256 TiB are more than processes have addresses.
    const Model wide = model();
    add(wide, "layers.0", full(16, 8, 1024), backend(block_first));
    const Plan larger = plan_of_blocks(wide, 256 * tebi / (512 << 10));
    ASSERT_EQ(worker_info(larger).total_bytes, 256 * tebi);
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_host(&raw));
    const Memory host(raw);
    for (const std::uint64_t num_blocks : {0u, 1u}) {
        kvpages_cache* out = nullptr;
        EXPECT_TRUE(fails(try_cache(larger, host, num_blocks, &out),
                          KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "out_of_host_memory",
                          {"allocation 0 of 1", "the host refused"}));
        EXPECT_EQ(out, nullptr);
    }
}

TEST(Growable, WhatIsMadeOfACacheKeepsItsMemory) {
    Plan plan = plan_of_blocks(shared_pages(), max_blocks);
    Cache c = growable(plan, 3);
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(c.get(), &config, &raw));
    const Ops ops(raw);
    plan.reset();
    resize(c, max_blocks);
    resize(c, 40);
    fill_block(c, 39, 8);
    const std::vector<kvpages_region> before = regions(c);
    c.reset();
    // The operations outlive the cache, with the blocks it had.
    const auto zero = [&](std::int32_t block) {
        return kvpages_ops_zero_blocks(ops.get(), &block, 1, nullptr, nullptr);
    };
    must(zero(39));
    for (const kvpages_region& region : before) {
        EXPECT_EQ(static_cast<unsigned char*>(region.data)[39 * region.block_step_bytes], 0);
    }
    for (const std::int32_t gone : {40, static_cast<std::int32_t>(max_blocks), -1, INT32_MAX}) {
        EXPECT_TRUE(fails(zero(gone), KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range",
                          {std::to_string(gone), "40 blocks"}));
    }
}
