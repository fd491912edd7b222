// Where bytes come from: the host, an engine's allocator, an engine's buffer.
#include "support/api.h"
#include "support/arena.h"
#include "support/bytes.h"
#include "support/failure.h"
#include "support/garbage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace support;

namespace {

// Four allocations of odd sizes.
Model four_layers() {
    Model m = model();
    for (int i = 0; i < 4; ++i) {
        add(m, "layers." + std::to_string(i), full(3, 1, 5 + static_cast<std::uint64_t>(i)),
            backend(packed_nhd));
    }
    return m;
}

void expect_zeroed_and_aligned(const Cache& cache, std::size_t alignment) {
    const Allocations all(cache);
    for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.data(i)) % alignment, 0u);
        EXPECT_TRUE(std::all_of(all.data(i), all.data(i) + all.bytes(i),
                                [](unsigned char byte) { return byte == 0; }));
    }
}

}  // namespace

TEST(Memory, HostMemoryIsZeroAlignedAndWritable) {
    const Plan p = plan_of_blocks(four_layers(), 7);
    const Memory host = host_memory();
    for (int round = 0; round < 3; ++round) {
        const Cache c = cache(p, host);
        ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 4u);
        expect_zeroed_and_aligned(c, 256);
        // Dirtied, so that memory that comes back is seen to be zeroed.
        Allocations(c).fill(0xAB);
    }
}

TEST(Memory, EveryKindHonoursTheAlignmentOfTheBackend) {
    BackendOptions options;
    options.layout = latent;
    options.alignment = 4096;
    const Model m = model();
    add(m, "layers.0", mla(16, 128), backend(options));
    add(m, "layers.1", mla(16, 128), backend(options));
    const Plan p = plan_of_blocks(m, 3);
    expect_zeroed_and_aligned(cache(p), 4096);
    Arena arena;
    {
        const Memory external = arena.memory();
        expect_zeroed_and_aligned(cache(p, external), 4096);
        EXPECT_EQ(arena.smallest_alignment, 4096u);
    }
    std::vector<unsigned char> buffer(40000, 0xEE);
    const Memory adopted = adopted_memory(buffer.data() + 1, buffer.size() - 1);
    expect_zeroed_and_aligned(cache(p, adopted), 4096);
}

TEST(Memory, ExternalMemoryIsZeroedUnlessItIs) {
    const Plan p = plan_of_blocks(four_layers(), 7);
    for (const bool zeroes : {false, true}) {
        Arena arena;
        arena.zeroes = zeroes;
        const Memory memory = arena.memory();
        {
            const Cache c = cache(p, memory);
            EXPECT_EQ(arena.calls, 4);
            EXPECT_EQ(arena.live(), 4u);
            EXPECT_GE(arena.smallest_alignment, 256u);
            expect_zeroed_and_aligned(c, 256);
        }
        EXPECT_EQ(arena.live(), 0u);
        EXPECT_EQ(arena.released, 4u);
        EXPECT_EQ(arena.wrong, 0u);
    }
}

TEST(Memory, WhatRunsOutHalfWayIsGivenBack) {
    const Plan p = plan_of_blocks(four_layers(), 7);
    const std::uint64_t total = worker_info(p).total_bytes;
    for (int at = 0; at < 4; ++at) {
        SCOPED_TRACE("call " + std::to_string(at));
        Arena refusing;
        refusing.fail_at = at;
        Arena lying;
        lying.null_at = at;
        Arena misaligned;
        misaligned.misalign_at = at;
        for (Arena* arena : {&refusing, &lying, &misaligned}) {
            const Memory memory = arena->memory();
            Out<kvpages_cache*> out;
            std::uint64_t needed = 0;
            const std::int32_t status = try_cache(p, memory, &out, &needed);
            if (arena == &misaligned) {
                EXPECT_TRUE(fails(status, KVPAGES_STATUS_INVALID_ARGUMENT, "allocator_misaligned",
                                  {"256", std::to_string(at)}));
            } else {
                EXPECT_TRUE(fails(status, KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "allocator_refused",
                                  {std::to_string(total), arena == &refusing ? "42" : "0",
                                   "allocation " + std::to_string(at)}));
            }
            EXPECT_TRUE(out.is_zero());
            EXPECT_EQ(needed, total);
            EXPECT_EQ(arena->calls, at + 1);
            EXPECT_EQ(arena->live(), 0u);
            EXPECT_EQ(arena->wrong, 0u);
            EXPECT_EQ(arena->released, static_cast<std::size_t>(at) +
                                           (arena == &misaligned ? 1u : 0u));
            // The same memory serves the next call.
            {
                const Cache c = cache(p, memory);
                expect_zeroed_and_aligned(c, 256);
                EXPECT_EQ(arena->live(), 4u);
            }
            EXPECT_EQ(arena->live(), 0u);
        }
    }
}

TEST(Memory, AnAdoptedBufferIsCutInOrderAndStartsAnew) {
    const Plan p = plan_of_blocks(four_layers(), 5);
    const std::size_t piece = 512;  // each tensor, rounded up to 256
    for (std::size_t i = 0; i < 4; ++i) {
        ASSERT_LE(tensor_info(p, i).size_bytes, piece);
        ASSERT_GT(tensor_info(p, i).size_bytes, piece - 256);
    }
    alignas(256) static unsigned char buffer[8 * 512 + 256];
    std::fill(std::begin(buffer), std::end(buffer), static_cast<unsigned char>(0xEE));
    const std::size_t wanted = 8 * piece;
    const Memory memory = adopted_memory(buffer, wanted);
    {
        const Cache first = cache(p, memory);
        expect_zeroed_and_aligned(first, 256);
        EXPECT_EQ(allocation(first, 0).data, buffer);
        Allocations(first).fill(0x11);
        Cache second = cache(p, memory);
        expect_zeroed_and_aligned(second, 256);
        EXPECT_EQ(allocation(second, 0).data, buffer + 4 * piece);
        // The first is untouched by the second.
        EXPECT_EQ(buffer[0], 0x11);

        Out<kvpages_cache*> out;
        std::uint64_t needed = 0;
        EXPECT_TRUE(fails(try_cache(p, memory, &out, &needed), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                          "adopted_buffer_full", {std::to_string(wanted)}));
        EXPECT_TRUE(out.is_zero());
        EXPECT_EQ(needed, worker_info(p).total_bytes);
        second.reset();
    }
    // All caches in it are gone.
    const Cache again = cache(p, memory);
    EXPECT_EQ(allocation(again, 0).data, buffer);
    expect_zeroed_and_aligned(again, 256);
    // Nothing behind the buffer was touched.
    EXPECT_TRUE(std::all_of(buffer + wanted, buffer + sizeof buffer,
                            [](unsigned char byte) { return byte == 0xEE; }));
}

TEST(Memory, AnAdoptedBufferThatIsTooSmall) {
    const Plan p = plan_of_blocks(four_layers(), 5);
    alignas(256) static unsigned char buffer[4 * 512];
    // The last tensor ends before the end of its 512 bytes.
    const std::size_t exact = 3 * 512 + tensor_info(p, 3).size_bytes;
    EXPECT_EQ(kvpages_cache_num_layers(cache(p, adopted_memory(buffer, exact)).get()), 4u);
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{512}, exact - 1}) {
        const Memory memory = adopted_memory(buffer, bytes);
        Out<kvpages_cache*> out;
        EXPECT_TRUE(fails(try_cache(p, memory, &out), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                          "adopted_buffer_full", {std::to_string(bytes)}));
        EXPECT_TRUE(out.is_zero());
        // What the failed cache took came back.
        EXPECT_TRUE(fails(try_cache(p, memory, &out), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                          "adopted_buffer_full", {std::to_string(bytes)}));
    }
    Out<kvpages_memory*> out;
    EXPECT_TRUE(fails(kvpages_memory_create_adopted(buffer, SIZE_MAX, &out),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow",
                      {"18446744073709551615"}));
    EXPECT_TRUE(out.is_zero());
}

TEST(Memory, HugeSizesAreRefusedOrFree) {
    // 2^62 bytes.
    const Model huge = model();
    add(huge, "layers.0", full(std::uint64_t{1} << 20, 1, std::uint64_t{1} << 20,
                               KVPAGES_DTYPE_U8));
    const Plan p = plan_of_blocks(huge, std::uint64_t{1} << 21);
    ASSERT_EQ(worker_info(p).total_bytes, std::uint64_t{1} << 62);
    Out<kvpages_cache*> out;
    std::uint64_t needed = 0;
    EXPECT_TRUE(fails(try_cache(p, host_memory(), &out, &needed),
                      KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "out_of_host_memory",
                      {"4611686018427387904"}));
    EXPECT_TRUE(out.is_zero());
    EXPECT_EQ(needed, std::uint64_t{1} << 62);
    // 4 GiB cost nothing until they are touched.
    const Model large = model();
    add(large, "layers.0", full(1024, 8, 1024), backend(packed_nhd));
    const Plan q = plan_of_blocks(large, 128);
    ASSERT_EQ(worker_info(q).total_bytes, std::uint64_t{1} << 32);
    const Cache c = cache(q);
    const kvpages_tensor tensor = view(c, "layers.0");
    unsigned char* last = element(tensor, {127, 1023, 7, 2047});
    EXPECT_EQ(*last, 0);
    *last = 1;
}

// A cache that fails half-way gives its bytes back, also beside one that lives.
TEST(Memory, AFailedCacheLeavesItsNeighbourAndItsBytesAlone) {
    const Model m = model();
    for (const char* name : {"A", "B"}) add(m, name, full(16, 2, 8), backend(packed_nhd));
    const Model one = model();
    add(one, "A", full(16, 2, 8), backend(packed_nhd));
    const Plan large = plan_of_blocks(m, 40);   // two allocations of 40 KiB
    const Plan small = plan_of_blocks(one, 40);  // one
    std::vector<unsigned char> buffer(100 * 1024 + 256);
    const Memory memory = adopted_memory(buffer.data(), buffer.size());
    const Cache neighbour = cache(small, memory);
    kvpages_cache* out = nullptr;
    EXPECT_TRUE(fails(try_cache(large, memory, &out), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                      "adopted_buffer_full", {"allocation 1 of 2"}));
    const Cache after = cache(small, memory);
    expect_zeroed_and_aligned(after, 256);
}
