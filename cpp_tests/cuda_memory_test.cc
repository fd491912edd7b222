// Memory of CUDA devices and caches in it.
#include "support/api.h"
#include "support/cuda.h"
#include "support/failure.h"
#include "support/garbage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <set>
#include <string>
#include <vector>

using namespace support;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

using CudaMemory = CudaTest;

// Of a machine's devices the first, and one more where there are two.
int another_device() { return static_cast<int>(num_devices()) - 1; }

struct Kind {
    const char* name;
    std::uint32_t flags;
    bool is_pinned;
};

const Kind plain = {"plain", 0, false};
const Kind virtually = {"virtual", KVPAGES_CUDA_MEMORY_VIRTUAL, false};
const Kind pinned = {"pinned", 0, true};
const Kind shareable = {"shareable",
                        KVPAGES_CUDA_MEMORY_VIRTUAL | KVPAGES_CUDA_MEMORY_SHAREABLE |
                            KVPAGES_CUDA_MEMORY_RDMA,
                        false};
const std::vector<Kind> all_kinds = {plain, virtually, pinned, shareable};

// What a kind needs of a device and a real one may lack: then there is nothing to test.
bool is_supported(const Kind& kind, int device) {
    if ((kind.flags & KVPAGES_CUDA_MEMORY_SHAREABLE) == 0) {
        return true;
    }
    return has_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) &&
           has_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
}

std::vector<Kind> kinds_of(int device) {
    std::vector<Kind> supported;
    for (const Kind& kind : all_kinds) {
        if (is_supported(kind, device)) {
            supported.push_back(kind);
        }
    }
    return supported;
}

std::int32_t try_memory(const Kind& kind, CUcontext context, std::uint32_t ordinal,
                        kvpages_memory** out) {
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    config.context = context;
    config.ordinal = ordinal;
    config.flags = kind.flags;
    return kind.is_pinned ? kvpages_memory_create_pinned(&config, out)
                          : kvpages_memory_create_cuda(&config, out);
}

Memory memory(const Kind& kind, CUcontext context = nullptr, std::uint32_t ordinal = 0) {
    kvpages_memory* raw = nullptr;
    must(try_memory(kind, context, ordinal, &raw));
    return Memory(raw);
}

// Three allocations of odd sizes.
Plan three_tensors(std::uint64_t num_blocks = 7) {
    const Model m = model();
    for (std::uint64_t i = 0; i < 3; ++i) {
        add(m, "layers." + std::to_string(i), full(3, 1, 5 + i), backend(packed_nhd));
    }
    return plan_of_blocks(m, num_blocks);
}

// Two allocations of 64 KiB a block.
Plan two_large_tensors(std::uint64_t num_blocks) {
    const Model m = model();
    for (int i = 0; i < 2; ++i) {
        add(m, "layers." + std::to_string(i), full(16, 8, 128), backend(packed_nhd));
    }
    return plan_of_blocks(m, num_blocks);
}

std::int32_t try_growable(const Plan& plan, const Memory& from, std::uint64_t num_blocks,
                          kvpages_cache** out) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = from.get();
    config.num_blocks = num_blocks;
    return kvpages_cache_create(plan.get(), &config, out, nullptr);
}

// Reads device memory as an engine would, in a context of its own choice.
std::vector<unsigned char> read(const void* from, std::uint64_t bytes, int device) {
    std::vector<unsigned char> to(bytes);
    const Entered entered(device);
    DRIVER(cuMemcpyDtoH_v2(to.data(), address(from), to.size()));
    return to;
}

void expect_zeroed_and_aligned(const Cache& cache, const Kind& kind, int device,
                               std::size_t alignment = 256) {
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
        const kvpages_allocation part = allocation(cache, i);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(part.data) % alignment, 0u);
        const auto* const host = static_cast<const unsigned char*>(part.data);
        const std::vector<unsigned char> bytes =
            kind.is_pinned ? std::vector<unsigned char>(host, host + part.size_bytes)
                           : read(part.data, part.size_bytes, device);
        EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(),
                                [](unsigned char byte) { return byte == 0; }))
            << "allocation " << i;
    }
}

// An engine that allocates on a device by itself, as with cudaMalloc.
class Engine {
public:
    Engine(CUcontext context, bool zeroes, std::int32_t refusal = 0)
        : context_(context), zeroes_(zeroes), refusal_(refusal) {}

    kvpages_memory_callbacks callbacks(const kvpages_device& device) {
        kvpages_memory_callbacks made = KVPAGES_MEMORY_CALLBACKS_INIT;
        made.user = this;
        made.allocate = allocate;
        made.release = release;
        made.is_zeroed = zeroes_ ? 1 : 0;
        made.device = device;
        return made;
    }

    std::size_t alive = 0;

private:
    static std::int32_t allocate(void* user, std::size_t bytes, std::size_t, void** out) {
        auto* const engine = static_cast<Engine*>(user);
        if (engine->refusal_ != 0) {
            return engine->refusal_;
        }
        CUdeviceptr address = 0;
        EXPECT_EQ(cuCtxPushCurrent_v2(engine->context_), CUDA_SUCCESS);
        EXPECT_EQ(cuMemAlloc_v2(&address, bytes), CUDA_SUCCESS);
        if (engine->zeroes_) {
            EXPECT_EQ(cuMemsetD8Async(address, 0, bytes, nullptr), CUDA_SUCCESS);
            EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
        }
        EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
        *out = reinterpret_cast<void*>(address);
        ++engine->alive;
        return 0;
    }

    static void release(void* user, void* data, std::size_t) {
        auto* const engine = static_cast<Engine*>(user);
        EXPECT_EQ(cuCtxPushCurrent_v2(engine->context_), CUDA_SUCCESS);
        EXPECT_EQ(cuMemFree_v2(reinterpret_cast<CUdeviceptr>(data)), CUDA_SUCCESS);
        EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
        --engine->alive;
    }

    CUcontext context_;
    bool zeroes_;
    std::int32_t refusal_;
};

Memory external(Engine& engine, const kvpages_device& device) {
    const kvpages_memory_callbacks callbacks = engine.callbacks(device);
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_external(&callbacks, &raw));
    return Memory(raw);
}

kvpages_device cuda_device(CUcontext context, std::uint32_t ordinal) {
    return {KVPAGES_DEVICE_KIND_CUDA, ordinal, context};
}

}  // namespace

TEST_F(CudaMemory, CachesAreZeroedAlignedAndGivenBack) {
    const Plan p = three_tensors();
    for (const int device : std::set<int>{0, another_device()}) {
        for (const Kind& kind : kinds_of(device)) {
            SCOPED_TRACE(kind.name + std::string(" on ") + std::to_string(device));
            {
                const Memory from = memory(kind, nullptr, static_cast<std::uint32_t>(device));
                const Cache c = cache(p, from);
                if (on_standin()) {
                    EXPECT_EQ(standin_num_pending(), 0u);
                    EXPECT_EQ(standin_used_bytes(1 - device), 0u);
                    EXPECT_EQ(standin_used_bytes(device) == 0, kind.is_pinned);
                    EXPECT_EQ(standin_num_leaks("context"), 1u);  // retained once
                }
                expect_zeroed_and_aligned(c, kind, device);
                kvpages_device at = {};
                must(kvpages_cache_get_device(c.get(), &at));
                EXPECT_EQ(at.kind, kind.is_pinned ? KVPAGES_DEVICE_KIND_HOST
                                                  : KVPAGES_DEVICE_KIND_CUDA);
            }
            if (on_standin()) {
                EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
            }
            EXPECT_EQ(current(), nullptr);
        }
    }
}

TEST_F(CudaMemory, TheAlignmentOfTheBackendIsHonoured) {
    BackendOptions options;
    options.layout = latent;
    options.alignment = 4096;
    const Model m = model();
    add(m, "layers.0", mla(16, 128), backend(options));
    const Plan p = plan_of_blocks(m, 3);
    for (const Kind& kind : kinds_of(0)) {
        SCOPED_TRACE(kind.name);
        expect_zeroed_and_aligned(cache(p, memory(kind)), kind, 0, 4096);
    }
}

TEST_F(CudaMemory, AContextOfTheCallersIsBorrowed) {
    const Plan p = three_tensors();
    CUcontext lent = nullptr;
    CUcontext callers = nullptr;
    const int device = another_device();
    ASSERT_EQ(cuCtxCreate_v2(&lent, 0, device), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxCreate_v2(&callers, 0, 0), CUDA_SUCCESS);
    for (const Kind& kind : kinds_of(device)) {
        SCOPED_TRACE(kind.name);
        {
            const Memory from = memory(kind, lent);
            EXPECT_EQ(current(), callers);
            const Cache c = cache(p, from);
            EXPECT_EQ(current(), callers);
            expect_zeroed_and_aligned(c, kind, device);
            if (on_standin()) {
                EXPECT_EQ(standin_used_bytes(0), 0u);
            }
        }
        EXPECT_EQ(current(), callers);
        if (on_standin()) {
            EXPECT_EQ(standin_num_leaks(nullptr), 2u) << standin_describe_leaks();
        }
    }
    EXPECT_EQ(cuCtxDestroy_v2(callers), CUDA_SUCCESS);
    EXPECT_EQ(current(), lent);
    EXPECT_EQ(cuCtxDestroy_v2(lent), CUDA_SUCCESS);
}

TEST_F(CudaMemory, DevicesTellWhatTheyAre) {
    NEEDS_STANDIN("has the devices that it is told to have");
    std::uint32_t count = 0;
    must(kvpages_device_count(&count));
    EXPECT_EQ(count, 2u);
    standin_set_total_bytes(1, 100 * mib);
    standin_set_attribute(1, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0);
    kvpages_device_info info = KVPAGES_DEVICE_INFO_INIT;
    must(kvpages_device_get_info(1, &info));
    EXPECT_STREQ(info.name, "Stand-in GPU 1");
    EXPECT_EQ(info.total_bytes, 100 * mib);
    EXPECT_EQ(info.free_bytes, 100 * mib);
    EXPECT_EQ(info.compute_capability_major, 9u);
    EXPECT_EQ(info.num_multiprocessors, 132u);
    EXPECT_EQ(info.has_virtual_memory, 0u);
    Out<kvpages_memory*> out;
    EXPECT_TRUE(fails(try_memory(virtually, nullptr, 1, &out), KVPAGES_STATUS_UNSUPPORTED,
                      "device_lacks_support", {"virtual memory", "1"}));
    EXPECT_TRUE(out.is_zero());
    EXPECT_TRUE(fails(try_memory(plain, nullptr, 2, &out), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                      "no_device", {"no CUDA device 2", "sees 2"}));
}

// A driver is there, so nothing but the arguments is wrong.
TEST_F(CudaMemory, WhatMakesNoSenseIsRefused) {
    NEEDS_STANDIN("takes a context that is gone without crashing");
    kvpages_memory* raw = nullptr;
    const auto with = [&raw](bool is_pinned, const std::function<void(kvpages_cuda_memory_config&)>&
                                                 change) {
        kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
        change(config);
        raw = reinterpret_cast<kvpages_memory*>(std::uintptr_t{0x5A});
        return is_pinned ? kvpages_memory_create_pinned(&config, &raw)
                         : kvpages_memory_create_cuda(&config, &raw);
    };
    for (const bool is_pinned : {false, true}) {
        SCOPED_TRACE(is_pinned);
        for (const std::size_t size : {std::size_t{0}, sizeof(kvpages_cuda_memory_config) - 1,
                                       std::size_t{1} << 20, SIZE_MAX}) {
            EXPECT_TRUE(fails(with(is_pinned, [size](auto& c) { c.struct_size = size; }),
                              KVPAGES_STATUS_INVALID_ARGUMENT, "struct_size"));
            EXPECT_EQ(raw, nullptr);
        }
        for (const std::uint32_t ordinal : {2u, UINT32_MAX / 2 + 1, UINT32_MAX}) {
            EXPECT_TRUE(fails(with(is_pinned, [ordinal](auto& c) { c.ordinal = ordinal; }),
                              KVPAGES_STATUS_DEVICE_UNAVAILABLE, "no_device",
                              {std::to_string(ordinal), "sees 2"}));
            EXPECT_EQ(raw, nullptr);
        }
        EXPECT_TRUE(fails(with(is_pinned, [](auto& c) { c.flags = 0x80000000u; }),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value", {"0x80000000"}));
        EXPECT_EQ(raw, nullptr);
        standin_set_num_devices(0);
        EXPECT_TRUE(fails(with(is_pinned, [](auto&) {}), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                          "no_device", {"sees no device"}));
        standin_set_num_devices(2);
    }
    // A context that was destroyed is the driver's to notice.
    CUcontext gone = nullptr;
    ASSERT_EQ(cuCtxCreate_v2(&gone, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxDestroy_v2(gone), CUDA_SUCCESS);
    EXPECT_TRUE(fails(with(false, [gone](auto& c) { c.context = gone; }),
                      KVPAGES_STATUS_DEVICE_UNAVAILABLE, "driver_failed"));
    EXPECT_EQ(raw, nullptr);
    Info<kvpages_device_info> info;
    info.value.struct_size = sizeof(kvpages_device_info) - 1;
    EXPECT_TRUE(fails(kvpages_device_get_info(0, &info), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "struct_size"));
    Info<kvpages_device_info> missing;
    EXPECT_TRUE(fails(kvpages_device_get_info(UINT32_MAX, &missing),
                      KVPAGES_STATUS_DEVICE_UNAVAILABLE, "no_device"));
    Engine engine(nullptr, false);
    for (const kvpages_device& bad :
         {kvpages_device{2, 0, nullptr}, kvpages_device{KVPAGES_DEVICE_KIND_HOST, 1, nullptr},
          kvpages_device{KVPAGES_DEVICE_KIND_HOST, 0, &info}, cuda_device(nullptr, 2)}) {
        const kvpages_memory_callbacks callbacks = engine.callbacks(bad);
        EXPECT_NE(kvpages_memory_create_external(&callbacks, &raw), KVPAGES_STATUS_OK);
        EXPECT_EQ(raw, nullptr);
    }
    EXPECT_TRUE(fails(kvpages_memory_create_adopted_device(nullptr, &info, 1, &raw),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"device"}));
    const kvpages_device device = cuda_device(nullptr, 0);
    EXPECT_TRUE(fails(kvpages_memory_create_adopted_device(&device, nullptr, 1, &raw),
                      KVPAGES_STATUS_NULL_ARGUMENT, "null_argument", {"data"}));
    EXPECT_TRUE(fails(kvpages_memory_create_adopted_device(&device, &info, SIZE_MAX, &raw),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow"));
    EXPECT_EQ(raw, nullptr);
}

TEST_F(CudaMemory, OutOfMemoryNamesNeededAndFreeBytes) {
    NEEDS_STANDIN("has as much memory as it is told to have");
    const Plan p = two_large_tensors(160);  // 10 MiB each
    standin_set_total_bytes(0, 15 * mib);
    for (const Kind& kind : {plain, virtually}) {
        SCOPED_TRACE(kind.name);
        const Memory from = memory(kind);
        Out<kvpages_cache*> out;
        std::uint64_t needed = 0;
        EXPECT_TRUE(fails(try_cache(p, from, &out, &needed), KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY,
                          "out_of_device_memory",
                          {std::to_string(10 * mib) + " bytes are needed",
                           std::to_string(5 * mib) + " of " + std::to_string(15 * mib)}));
        EXPECT_TRUE(out.is_zero());
        EXPECT_EQ(needed, 20 * mib);
        EXPECT_EQ(standin_used_bytes(0), 0u);  // the first of both was given back
        EXPECT_EQ(standin_num_leaks(nullptr), 1u) << standin_describe_leaks();
    }
}

// Plain memory: of virtual memory a device would give all it has before it refuses.
TEST_F(CudaMemory, MoreThanADeviceHasIsRefused) {
    kvpages_device_info info = KVPAGES_DEVICE_INFO_INIT;
    must(kvpages_device_get_info(0, &info));
    constexpr std::uint64_t block_bytes = std::uint64_t{64} << 10;
    const Plan p = two_large_tensors(2 * info.total_bytes / block_bytes);
    Out<kvpages_cache*> out;
    EXPECT_TRUE(fails(try_cache(p, memory(plain), &out), KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY,
                      "out_of_device_memory", {"bytes are needed"}));
    EXPECT_TRUE(out.is_zero());
    expect_zeroed_and_aligned(cache(three_tensors(), memory(plain)), plain, 0);  // all is well
}

TEST_F(CudaMemory, CachesGrowAndShrinkWhereTheyAre) {
    const Plan p = two_large_tensors(640);  // 40 MiB each
    const Memory from = memory(virtually);
    kvpages_cache* raw = nullptr;
    must(try_growable(p, from, 10, &raw));
    const Cache c(raw);
    const void* const data = allocation(c, 0).data;
    for (int round = 0; round < 2; ++round) {
        must(kvpages_cache_resize(c.get(), 640, nullptr, 0));
        EXPECT_EQ(allocation(c, 0).data, data);
        expect_zeroed_and_aligned(c, virtually, 0);
        const Entered entered;  // blocks that go are not zero; when they come back they are
        const kvpages_allocation part = allocation(c, 0);
        const std::uint64_t kept = part.size_bytes / 640 * 10;
        DRIVER(cuMemsetD8_v2(address(part.data) + kept, 1, part.size_bytes - kept));
        DRIVER(cuCtxSynchronize());
        must(kvpages_cache_resize(c.get(), 10, nullptr, 0));
    }
}

TEST_F(CudaMemory, GrowingTakesMemoryAndShrinkingGivesItBack) {
    NEEDS_STANDIN("says how much is in use, and has as much as it is told to have");
    const Plan p = two_large_tensors(640);  // 40 MiB each
    kvpages_cache* raw = nullptr;
    must(try_growable(p, memory(virtually), 10, &raw));
    const Cache c(raw);
    const std::uint64_t small = standin_used_bytes(0);
    EXPECT_LE(small, 8 * mib);
    must(kvpages_cache_resize(c.get(), 640, nullptr, 0));
    EXPECT_EQ(standin_used_bytes(0), 80 * mib);
    must(kvpages_cache_resize(c.get(), 10, nullptr, 0));
    EXPECT_EQ(standin_used_bytes(0), small);
    standin_set_total_bytes(0, 60 * mib);
    EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 640, nullptr, 0),
                      KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY, "out_of_device_memory"));
    EXPECT_EQ(kvpages_cache_num_blocks(c.get()), 10u);
    EXPECT_EQ(standin_used_bytes(0), small);
}

TEST_F(CudaMemory, PiecesHonourTheGranularityOfTheDevice) {
    NEEDS_STANDIN("has the granularity that it is told to have");
    EXPECT_FALSE(standin_set_granularity_bytes(5000));
    for (const std::uint64_t granule : {std::uint64_t{64} << 10, 2 * mib, 16 * mib}) {
        SCOPED_TRACE(granule);
        ASSERT_TRUE(standin_set_granularity_bytes(granule));
        kvpages_cache* raw = nullptr;
        must(try_growable(two_large_tensors(100), memory(virtually), 1, &raw));
        const Cache c(raw);
        EXPECT_EQ(standin_used_bytes(0), 2 * granule);
        must(kvpages_cache_resize(c.get(), 100, nullptr, 0));
        const std::uint64_t bytes = 100 * (std::uint64_t{64} << 10);
        EXPECT_EQ(standin_used_bytes(0), 2 * ((bytes + granule - 1) / granule * granule));
        expect_zeroed_and_aligned(c, virtually, 0);
    }
}

TEST_F(CudaMemory, ShrinkingWaitsForWorkOnWhatGoes) {
    const Plan p = two_large_tensors(640);
    kvpages_cache* raw = nullptr;
    must(try_growable(p, memory(virtually), 640, &raw));
    Cache c(raw);
    CUcontext context = nullptr;
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
    const kvpages_allocation part = allocation(c, 0);
    const auto address = reinterpret_cast<CUdeviceptr>(part.data);
    EXPECT_EQ(cuMemsetD8Async(address, 1, part.size_bytes, nullptr), CUDA_SUCCESS);
    must(kvpages_cache_resize(c.get(), 1, nullptr, 0));
    EXPECT_EQ(cuMemsetD8Async(address, 1, 1, nullptr), CUDA_SUCCESS);
    c.reset();
    EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
}

TEST_F(CudaMemory, AnEnginesAllocatorOnADeviceIsZeroedThere) {
    const Plan p = three_tensors();
    const std::uint32_t ordinal = num_devices() - 1;
    const auto device_number = static_cast<int>(ordinal);
    const Entered primary(device_number);
    for (const bool zeroes : {false, true}) {
        for (CUcontext context : {CUcontext{nullptr}, primary.get()}) {
            SCOPED_TRACE(std::string(zeroes ? "zeroes" : "does not zero") +
                         (context == nullptr ? ", by ordinal" : ", by context"));
            Engine engine(primary.get(), zeroes);
            {
                const Memory from = external(engine, cuda_device(context, ordinal));
                const std::uint64_t fills = num_calls("cuMemsetD8Async");
                const Cache c = cache(p, from);
                EXPECT_EQ(engine.alive, 3u);
                if (on_standin()) {
                    EXPECT_EQ(num_calls("cuMemsetD8Async") - fills, 3u);  // whoever does it
                    EXPECT_EQ(standin_num_pending(), 0u);
                }
                expect_zeroed_and_aligned(c, plain, device_number);
                kvpages_device device = {};
                must(kvpages_cache_get_device(c.get(), &device));
                EXPECT_EQ(device.kind, std::uint32_t{KVPAGES_DEVICE_KIND_CUDA});
                EXPECT_EQ(device.ordinal, ordinal);
                EXPECT_EQ(device.context, primary.get());
                kvpages_cache* out = nullptr;
                EXPECT_TRUE(fails(try_growable(p, from, 3, &out), KVPAGES_STATUS_UNSUPPORTED,
                                  "memory_cannot_grow", {"engine's allocator"}));
            }
            EXPECT_EQ(engine.alive, 0u);
        }
    }
    Engine refusing(primary.get(), false, 17);
    Out<kvpages_cache*> out;
    EXPECT_TRUE(fails(try_cache(p, external(refusing, cuda_device(nullptr, ordinal)), &out),
                      KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "allocator_refused", {"code 17"}));
    EXPECT_TRUE(out.is_zero());
}

TEST_F(CudaMemory, AnEnginesMemoryComesBackWhenADeviceFails) {
    NEEDS_STANDIN("fails when it is told to");
    const Plan p = three_tensors();
    const Entered primary(0);
    for (const char* function : {"cuMemsetD8Async", "cuStreamSynchronize", "cuStreamCreate"}) {
        for (std::uint64_t nth = 1; nth <= 3; ++nth) {
            SCOPED_TRACE(function + std::string(" ") + std::to_string(nth));
            Engine engine(primary.get(), false);
            const Memory from = external(engine, cuda_device(nullptr, 0));
            ASSERT_TRUE(standin_fail(function, nth, CUDA_ERROR_UNKNOWN));
            Out<kvpages_cache*> out;
            EXPECT_TRUE(fails(try_cache(p, from, &out), KVPAGES_STATUS_DEVICE_UNAVAILABLE,
                              "driver_failed", {function, "999"}));
            EXPECT_TRUE(out.is_zero());
            EXPECT_EQ(engine.alive, 0u);
            EXPECT_EQ(standin_num_pending(), 0u);
        }
    }
}

TEST_F(CudaMemory, AnAdoptedBufferOnADeviceIsCutAndZeroed) {
    const Plan p = three_tensors();
    const int ordinal = another_device();
    const Entered primary(ordinal);
    const std::uint64_t bytes = mib;
    CUdeviceptr buffer = 0;
    ASSERT_EQ(cuMemAlloc_v2(&buffer, bytes), CUDA_SUCCESS);
    DRIVER(cuMemsetD8_v2(buffer, 0xA5, bytes));
    DRIVER(cuCtxSynchronize());
    const kvpages_device device = cuda_device(nullptr, static_cast<std::uint32_t>(ordinal));
    auto* const data = reinterpret_cast<void*>(buffer);
    {
        kvpages_memory* raw = nullptr;
        must(kvpages_memory_create_adopted_device(&device, data, bytes, &raw));
        const Memory from(raw);
        for (int round = 0; round < 2; ++round) {
            const Cache c = cache(p, from);
            EXPECT_EQ(allocation(c, 0).data, data);
            expect_zeroed_and_aligned(c, plain, ordinal);
            const kvpages_allocation last = allocation(c, 2);
            const auto after = reinterpret_cast<CUdeviceptr>(last.data) + last.size_bytes;
            // Only what was taken is zeroed.
            EXPECT_EQ(read(reinterpret_cast<void*>(after), 1, ordinal).front(), 0xA5);
            EXPECT_EQ(cuMemsetD8Async(buffer, 7, after - buffer, nullptr), CUDA_SUCCESS);
            EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
        }
        Out<kvpages_cache*> out;
        EXPECT_TRUE(fails(try_cache(two_large_tensors(160), from, &out),
                          KVPAGES_STATUS_OUT_OF_HOST_MEMORY, "adopted_buffer_full",
                          {std::to_string(bytes)}));
        EXPECT_TRUE(out.is_zero());
        EXPECT_TRUE(fails(try_growable(p, from, 3, &out), KVPAGES_STATUS_UNSUPPORTED,
                          "memory_cannot_grow", {"adopted"}));
    }
    Out<kvpages_memory*> out;
    const kvpages_device missing = cuda_device(nullptr, UINT32_MAX);
    EXPECT_TRUE(fails(kvpages_memory_create_adopted_device(&missing, data, bytes, &out),
                      KVPAGES_STATUS_DEVICE_UNAVAILABLE, "no_device",
                      {"no CUDA device 4294967295", "sees " + std::to_string(num_devices())}));
    EXPECT_TRUE(out.is_zero());
    EXPECT_EQ(cuMemFree_v2(buffer), CUDA_SUCCESS);
}

TEST_F(CudaMemory, PinnedMemoryIsTheHostsAndTheDriversToo) {
    const Plan p = three_tensors();
    const Entered primary(0);
    const Memory from = memory(pinned);
    const Cache c = cache(p, from);
    if (on_standin()) {
        EXPECT_EQ(standin_num_leaks("pinned memory"), 3u);
    }
    unsigned type = 0;
    DRIVER(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                 address(allocation(c, 0).data)));
    EXPECT_EQ(type, CU_MEMORYTYPE_HOST);
    const kvpages_allocation part = allocation(c, 1);
    std::fill_n(static_cast<unsigned char*>(part.data), part.size_bytes, 9);
    CUdeviceptr device = 0;
    ASSERT_EQ(cuMemAlloc_v2(&device, part.size_bytes), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyHtoDAsync_v2(device, part.data, part.size_bytes, nullptr), CUDA_SUCCESS);
    // The driver reads pinned memory only when the copy's turn comes. When that is, only the
    // stand-in can be told.
    if (!on_standin()) {
        DRIVER(cuStreamSynchronize(nullptr));
    }
    static_cast<unsigned char*>(part.data)[part.size_bytes - 1] = 10;
    const std::vector<unsigned char> copied =
        read(reinterpret_cast<void*>(device), part.size_bytes, 0);
    EXPECT_EQ(copied.front(), 9);
    EXPECT_EQ(copied.back(), on_standin() ? 10 : 9);
    EXPECT_EQ(cuMemFree_v2(device), CUDA_SUCCESS);

    // Operations run on it as on any host memory.
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(c.get(), &config, &raw));
    const std::int32_t block = 0;
    must(kvpages_ops_zero_blocks(Ops(raw).get(), &block, 1, nullptr, nullptr));
    EXPECT_EQ(static_cast<const unsigned char*>(part.data)[0], 0);

    Out<kvpages_cache*> out;
    EXPECT_TRUE(fails(try_growable(p, from, 3, &out), KVPAGES_STATUS_UNSUPPORTED,
                      "memory_cannot_grow", {"pinned"}));
    if (on_standin()) {
        ASSERT_TRUE(standin_fail("cuMemHostAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY));
        EXPECT_TRUE(fails(try_cache(p, from, &out), KVPAGES_STATUS_OUT_OF_HOST_MEMORY,
                          "out_of_pinned_memory", {"cannot pin", "bytes"}));
        EXPECT_TRUE(out.is_zero());
        EXPECT_EQ(standin_num_leaks("pinned memory"), 3u);
    }
}

// A capture elsewhere in the program is not spoilt by taking memory, nor by giving back any but
// virtual memory, which waits for its context.
TEST_F(CudaMemory, ACaptureElsewhereGoesOn) {
    const Plan p = two_large_tensors(64);
    const Entered primary(0);
    CUstream stream = nullptr;
    ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CUdeviceptr buffer = 0;
    ASSERT_EQ(cuMemAlloc_v2(&buffer, 16 * mib), CUDA_SUCCESS);
    const kvpages_device device = cuda_device(nullptr, 0);
    const auto captured = [&](const std::function<void()>& meanwhile) {
        ASSERT_EQ(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
        meanwhile();
        CUgraph graph = nullptr;
        EXPECT_EQ(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
        EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
    };
    for (const Kind& kind : {plain, pinned}) {
        SCOPED_TRACE(kind.name);
        captured([&] { const Cache c = cache(p, memory(kind)); });
    }
    Cache grown;
    captured([&] {
        kvpages_cache* raw = nullptr;
        must(try_growable(p, memory(virtually), 1, &raw));
        grown.reset(raw);
        must(kvpages_cache_resize(grown.get(), 64, nullptr, 0));
    });
    expect_zeroed_and_aligned(grown, virtually, 0);
    captured([&] {
        kvpages_memory* raw = nullptr;
        auto* const data = reinterpret_cast<void*>(buffer);
        must(kvpages_memory_create_adopted_device(&device, data, 16 * mib, &raw));
        const Cache c = cache(p, Memory(raw));
    });
    captured([&] {
        kvpages_device_info info = KVPAGES_DEVICE_INFO_INIT;
        must(kvpages_device_get_info(0, &info));
    });
    EXPECT_EQ(cuMemFree_v2(buffer), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy_v2(stream), CUDA_SUCCESS);
}

// Of several fills one fails: those before it are not left to run when the blocks may be in use.
TEST_F(CudaMemory, NoFillOutlivesAGrowthThatFailed) {
    NEEDS_STANDIN("fails when it is told to");
    const Model m = model();
    add(m, "layers.0", full(16, 8, 128), backend(kv_first));  // keys, and apart from them values
    kvpages_cache* raw = nullptr;
    must(try_growable(plan_of_blocks(m, 64), memory(virtually), 1, &raw));
    const Cache c(raw);
    for (std::uint64_t nth = 1; nth <= 2; ++nth) {
        SCOPED_TRACE(nth);
        ASSERT_TRUE(standin_fail("cuMemsetD8Async", nth, CUDA_ERROR_UNKNOWN));
        EXPECT_TRUE(fails(kvpages_cache_resize(c.get(), 2, nullptr, 0),
                          KVPAGES_STATUS_DEVICE_UNAVAILABLE, "driver_failed",
                          {"cuMemsetD8Async"}));
        EXPECT_EQ(standin_num_pending(), 0u);
        EXPECT_EQ(kvpages_cache_num_blocks(c.get()), 1u);
    }
    must(kvpages_cache_resize(c.get(), 2, nullptr, 0));
}

// What was made of a cache keeps its memory, in whatever order the handles go.
TEST_F(CudaMemory, HandlesMayGoInAnyOrder) {
    std::vector<int> order{0, 1, 2, 3};
    do {
        Plan p = two_large_tensors(64);
        Memory from = memory(virtually);
        kvpages_cache* raw = nullptr;
        must(try_growable(p, from, 1, &raw));
        Cache first(raw);
        must(try_growable(p, from, 2, &raw));
        Cache second(raw);
        const std::vector<std::function<void()>> goes{
            [&] { p.reset(); }, [&] { from.reset(); }, [&] { first.reset(); },
            [&] { second.reset(); }};
        for (const int which : order) {
            goes[static_cast<std::size_t>(which)]();
            for (const Cache* left : {&first, &second}) {
                if (*left != nullptr) {
                    must(kvpages_cache_resize(left->get(), 64, nullptr, 0));
                    must(kvpages_cache_resize(left->get(), 3, nullptr, 0));
                }
            }
        }
        if (on_standin()) {
            ASSERT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        }
    } while (std::next_permutation(order.begin(), order.end()));
}

// --- a failure at every call of the driver ---------------------------------------

namespace {

// One step of a scenario after another until one fails; everything is destroyed then.
struct Run {
    std::int32_t status = KVPAGES_STATUS_OK;
    Failure failure;
    std::uint64_t failed_before_destroying = 0;
};

// A cache is made, grown and shrunk if it can be, and destroyed.
Run scenario(const Kind& kind, CUcontext context, const Plan& p) {
    Run run;
    const auto step = [&run](std::int32_t status) {
        if (status != KVPAGES_STATUS_OK) {
            run.status = status;
            run.failure = failure_of(status);
        }
        return status == KVPAGES_STATUS_OK;
    };
    kvpages_memory* raw_memory = nullptr;
    const bool made = step(try_memory(kind, context, 0, &raw_memory));
    const Memory from(raw_memory);
    kvpages_cache* raw_cache = nullptr;
    const bool grows = (kind.flags & KVPAGES_CUDA_MEMORY_VIRTUAL) != 0;
    const bool cached = made && step(try_growable(p, from, grows ? 1 : 0, &raw_cache));
    const Cache c(raw_cache);
    if (cached && grows && step(kvpages_cache_resize(c.get(), 3, nullptr, 0))) {
        step(kvpages_cache_resize(c.get(), 2, nullptr, 0));
    }
    run.failed_before_destroying = standin_num_failed();
    return run;
}

// Calls that may fail without the caller being told: they give something back, or wait for work
// that failed by itself, or ask for a name.
bool may_fail_silently(const std::string& function) {
    static const std::set<std::string> functions = {
        "cuCtxPopCurrent_v2", "cuCtxSynchronize",    "cuDevicePrimaryCtxRelease_v2",
        "cuMemAddressFree",   "cuMemFreeHost",       "cuMemFree_v2",
        "cuMemUnmap",         "cuStreamDestroy_v2",  "cuThreadExchangeStreamCaptureMode",
        "cuCtxPushCurrent_v2",
    };
    return functions.count(function) == 1;
}

void expect_every_failure_is_told(const Kind& kind, bool lends) {
    const Plan p = two_large_tensors(3);
    ASSERT_TRUE(standin_set_granularity_bytes(64 << 10));  // a block, so that each is a piece
    CUcontext context = nullptr;
    if (lends) {
        ASSERT_EQ(cuCtxCreate_v2(&context, 0, 0), CUDA_SUCCESS);
        ASSERT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
    }
    const std::size_t known_leaks = lends ? 1 : 0;  // what is not ours
    ASSERT_EQ(scenario(kind, context, p).status, KVPAGES_STATUS_OK);  // opens the driver
    const std::uint64_t before = standin_num_calls(nullptr);
    ASSERT_EQ(scenario(kind, context, p).status, KVPAGES_STATUS_OK);
    const std::uint64_t num_calls = standin_num_calls(nullptr) - before;
    ASSERT_GT(num_calls, 15u);
    for (const int code : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN}) {
        for (std::uint64_t nth = 1; nth <= num_calls; ++nth) {
            const std::uint64_t failed = standin_num_failed();
            ASSERT_TRUE(standin_fail(nullptr, nth, code));
            const Run run = scenario(kind, context, p);
            ASSERT_EQ(standin_num_failed(), failed + 1);
            const std::string function = standin_last_failed();
            SCOPED_TRACE(std::string(kind.name) + ", call " + std::to_string(nth) + " (" +
                         function + ") fails with " + std::to_string(code));
            const bool while_destroying = run.failed_before_destroying == failed;
            if (run.status == KVPAGES_STATUS_OK) {
                EXPECT_TRUE(while_destroying || may_fail_silently(function));
            } else {
                EXPECT_FALSE(while_destroying);
                const bool memory_ran_out = run.status == KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY ||
                                            run.status == KVPAGES_STATUS_OUT_OF_HOST_MEMORY;
                EXPECT_TRUE(memory_ran_out ? code == CUDA_ERROR_OUT_OF_MEMORY
                                           : run.status == KVPAGES_STATUS_DEVICE_UNAVAILABLE)
                    << run.status << " " << run.failure.message;
                EXPECT_FALSE(run.failure.message.empty());
                EXPECT_TRUE(memory_ran_out ||
                            run.failure.message.find(function) != std::string::npos)
                    << run.failure.message;
            }
            EXPECT_EQ(standin_num_pending(), 0u);
            EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
            CUcontext now = nullptr;
            EXPECT_EQ(cuCtxGetCurrent(&now), CUDA_SUCCESS);
            EXPECT_EQ(now, nullptr);
            ASSERT_EQ(standin_num_leaks(nullptr), known_leaks) << standin_describe_leaks();
            ASSERT_EQ(scenario(kind, context, p).status, KVPAGES_STATUS_OK);
        }
    }
    if (lends) {
        EXPECT_EQ(cuCtxDestroy_v2(context), CUDA_SUCCESS);
    }
}

}  // namespace

TEST_F(CudaMemory, AFailureAtAnyCallLeavesNothingBehind) {
    NEEDS_STANDIN("fails when it is told to");
    for (const Kind& kind : all_kinds) {
        expect_every_failure_is_told(kind, false);
    }
}

TEST_F(CudaMemory, AFailureAtAnyCallLeavesALentContextAsItWas) {
    NEEDS_STANDIN("fails when it is told to");
    for (const Kind& kind : all_kinds) {
        expect_every_failure_is_told(kind, true);
    }
}

// --- a driver that cannot be used -------------------------------------------------

// The library keeps the driver that it has opened, so each of these is a process of its own.
TEST(CudaDriverDeathTest, SaysWhyItCannotBeUsed) {
    NEEDS_STANDIN("fails when it is told to");
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto ask = [](const std::function<void()>& prepare) {
        prepare();
        std::uint32_t count = 7;
        const std::int32_t status = kvpages_device_count(&count);
        std::cerr << kvpages_status_name(status) << "|" << kvpages_last_error_kind() << "|"
                  << kvpages_last_error_message() << "|" << count << std::endl;
        std::exit(0);
    };
    EXPECT_EXIT(ask([] { standin_set_driver_version(10020); }), ::testing::ExitedWithCode(0),
                "DEVICE_UNAVAILABLE.driver_too_old.*CUDA 10.2.*11.0.*.0");
    EXPECT_EXIT(ask([] { standin_set_num_devices(0); }), ::testing::ExitedWithCode(0),
                "DEVICE_UNAVAILABLE.no_device.*.0");
    EXPECT_EXIT(ask([] { standin_fail("cuInit", 1, CUDA_ERROR_NO_DEVICE); }),
                ::testing::ExitedWithCode(0), "DEVICE_UNAVAILABLE.no_device.*.0");
    EXPECT_EXIT(ask([] { standin_fail("cuInit", 1, CUDA_ERROR_UNKNOWN); }),
                ::testing::ExitedWithCode(0),
                "DEVICE_UNAVAILABLE.driver_failed.*cuInit.*999.*CUDA_ERROR_UNKNOWN.*.0");
    EXPECT_EXIT(ask([] { standin_fail("cuInit", 1, CUDA_ERROR_STUB_LIBRARY); }),
                ::testing::ExitedWithCode(0),
                "DEVICE_UNAVAILABLE.driver_failed.*CUDA_ERROR_STUB_LIBRARY");
    EXPECT_EXIT(ask([] {
                    // A failure is not kept: the next call tries again.
                    std::uint32_t count = 0;
                    standin_fail("cuInit", 1, CUDA_ERROR_UNKNOWN);
                    if (kvpages_device_count(&count) == KVPAGES_STATUS_OK) {
                        std::exit(1);
                    }
                }),
                ::testing::ExitedWithCode(0), "OK.*.2");
}
