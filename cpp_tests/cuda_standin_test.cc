// The stand-in driver itself: what other tests of CUDA rely on it to notice.
#include "support/cuda.h"

#include <gtest/gtest.h>

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

// --- kernels that these tests bring ------------------------------------------

namespace {

struct Fill {
    unsigned char* to;
    std::uint64_t bytes;
    unsigned char value;
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void kvhost_test_fill(const unsigned* grid, const unsigned* block, void** parameters);
EXPORTED const unsigned kvsizes_test_fill[];
EXPORTED const unsigned kvsizes_test_too_many[];
EXPORTED void kvhost_test_too_many(const unsigned* grid, const unsigned* block, void** parameters);

void kvhost_test_fill(const unsigned* grid, const unsigned* block, void** parameters) {
    Fill fill = {};
    std::memcpy(&fill, parameters[0], sizeof(fill));
    const std::uint64_t threads = std::uint64_t{grid[0]} * block[0];
    for (std::uint64_t i = 0; i < std::min(threads, fill.bytes); ++i) {
        fill.to[i] = fill.value;
    }
}
const unsigned kvsizes_test_fill[] = {1, sizeof(Fill)};

void kvhost_test_too_many(const unsigned*, const unsigned*, void**) {}
const unsigned kvsizes_test_too_many[] = {1, 4097};

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
using Bytes = std::vector<unsigned char>;

// Every test begins with a fresh driver, and must leave nothing but what it says.
class StandIn : public ::testing::Test {
protected:
    void SetUp() override {
        NEEDS_STANDIN("is what is tested");
        standin_reset();
        ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
        ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
        ASSERT_EQ(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
    }

    void TearDown() override {
        if (support::on_standin()) {
            standin_reset();
        }
    }

    void expect_clean() {
        CUcontext popped = nullptr;
        EXPECT_EQ(cuCtxPopCurrent_v2(&popped), CUDA_SUCCESS);
        EXPECT_EQ(popped, context);
        EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
    }

    static CUdeviceptr allocate(std::size_t bytes) {
        CUdeviceptr address = 0;
        EXPECT_EQ(cuMemAlloc_v2(&address, bytes), CUDA_SUCCESS);
        return address;
    }

    static unsigned char* pinned(std::size_t bytes) {
        void* address = nullptr;
        EXPECT_EQ(cuMemHostAlloc(&address, bytes, 0), CUDA_SUCCESS);
        return static_cast<unsigned char*>(address);
    }

    static CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
        CUstream made = nullptr;
        EXPECT_EQ(cuStreamCreate(&made, flags), CUDA_SUCCESS);
        return made;
    }

    static CUevent event() {
        CUevent made = nullptr;
        EXPECT_EQ(cuEventCreate(&made, 0), CUDA_SUCCESS);
        return made;
    }

    static Bytes read(CUdeviceptr from, std::size_t bytes) {
        Bytes to(bytes);
        EXPECT_EQ(cuMemcpyDtoH_v2(to.data(), from, bytes), CUDA_SUCCESS);
        return to;
    }

    static CUfunction kernel(const char* name) {
        CUmodule module = nullptr;
        CUfunction function = nullptr;
        EXPECT_EQ(cuModuleLoadData(&module, "image"), CUDA_SUCCESS);
        EXPECT_EQ(cuModuleGetFunction(&function, module, name), CUDA_SUCCESS);
        return function;
    }

    static CUresult launch(CUfunction function, Fill fill, CUstream on) {
        void* parameters[] = {&fill};
        return cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, on, parameters, nullptr);
    }

    CUcontext context = nullptr;
};

bool all_are(const Bytes& bytes, unsigned char value) {
    return std::all_of(bytes.begin(), bytes.end(),
                       [value](unsigned char byte) { return byte == value; });
}

unsigned char* host(CUdeviceptr address) { return reinterpret_cast<unsigned char*>(address); }

CUmemAllocationProp on_device(int device) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    return properties;
}

CUmemAccessDesc read_write(int device) {
    return {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

}  // namespace

// --- the library --------------------------------------------------------------

TEST_F(StandIn, IsWhatDlopenFinds) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    ASSERT_NE(library, nullptr) << dlerror();
    ASSERT_GT(standin_num_functions(), 70u);
    for (std::size_t i = 0; i < standin_num_functions(); ++i) {
        EXPECT_NE(dlsym(library, standin_function(i)), nullptr) << standin_function(i);
    }
    EXPECT_EQ(standin_function(standin_num_functions()), nullptr);
    EXPECT_EQ(dlsym(library, "cuMemAlloc_v2"), reinterpret_cast<void*>(&cuMemAlloc_v2));
    dlclose(library);
}

TEST_F(StandIn, CountsCallsByNameAndInAll) {
    const std::uint64_t all = standin_num_calls(nullptr);
    int count = 0;
    cuDeviceGetCount(&count);
    cuDeviceGetCount(&count);
    EXPECT_EQ(count, 2);
    EXPECT_EQ(standin_num_calls("cuDeviceGetCount"), 2u);
    EXPECT_EQ(standin_num_calls("cuMemAlloc_v2"), 0u);
    EXPECT_EQ(standin_num_calls(nullptr), all + 2);
}

TEST_F(StandIn, NothingWorksBeforeInit) {
    standin_reset();
    int count = 0;
    CUcontext current = nullptr;
    CUdeviceptr address = 0;
    EXPECT_EQ(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT_EQ(cuMemAlloc_v2(&address, 1), CUDA_ERROR_NOT_INITIALIZED);
    int version = 0;
    EXPECT_EQ(cuDriverGetVersion(&version), CUDA_SUCCESS);
    EXPECT_EQ(version, 13000);
    standin_set_num_devices(0);
    EXPECT_EQ(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

TEST_F(StandIn, NamesErrors) {
    const char* text = nullptr;
    EXPECT_EQ(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
    EXPECT_STREQ(text, "CUDA_ERROR_OUT_OF_MEMORY");
    EXPECT_EQ(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
    EXPECT_STREQ(text, "out of memory");
    EXPECT_EQ(cuGetErrorName(12345, &text), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(text, nullptr);
}

// --- contexts -------------------------------------------------------------------

TEST_F(StandIn, PrimaryContextsAreCounted) {
    CUcontext again = nullptr;
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&again, 0), CUDA_SUCCESS);
    EXPECT_EQ(again, context);
    EXPECT_EQ(standin_num_leaks("context"), 2u);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(1), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(cuDevicePrimaryCtxRetain(&again, 2), CUDA_ERROR_INVALID_DEVICE);
    EXPECT_EQ(cuCtxDestroy_v2(context), CUDA_ERROR_INVALID_CONTEXT);
    expect_clean();
    EXPECT_EQ(cuCtxPushCurrent_v2(context), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(StandIn, EachThreadHasItsOwnStack) {
    CUcontext made = nullptr;
    ASSERT_EQ(cuCtxCreate_v2(&made, 0, 1), CUDA_SUCCESS);
    CUcontext current = nullptr;
    EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, made);
    std::thread([] {
        CUcontext theirs = nullptr;
        CUdeviceptr address = 0;
        EXPECT_EQ(cuCtxGetCurrent(&theirs), CUDA_SUCCESS);
        EXPECT_EQ(theirs, nullptr);
        EXPECT_EQ(cuMemAlloc_v2(&address, 256), CUDA_ERROR_INVALID_CONTEXT);
        EXPECT_EQ(cuCtxPopCurrent_v2(&theirs), CUDA_ERROR_INVALID_CONTEXT);
    }).join();
    EXPECT_EQ(cuCtxDestroy_v2(made), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, context);
    expect_clean();
}

// --- memory ---------------------------------------------------------------------

TEST_F(StandIn, FreshMemoryIsNotZeroAndCountsAgainstTheDevice) {
    standin_set_total_bytes(0, 4 * mib);
    const CUdeviceptr address = allocate(3 * mib);
    EXPECT_EQ(address % 256, 0u);
    EXPECT_TRUE(all_are(read(address, 3 * mib), 0xA5));
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    EXPECT_EQ(cuMemGetInfo_v2(&free_bytes, &total_bytes), CUDA_SUCCESS);
    EXPECT_EQ(free_bytes, mib);
    EXPECT_EQ(total_bytes, 4 * mib);
    CUdeviceptr more = 0;
    EXPECT_EQ(cuMemAlloc_v2(&more, mib + 1), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cuMemAlloc_v2(&more, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cuMemAlloc_v2(&more, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemFree_v2(address + 256), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE);
    expect_clean();
}

TEST_F(StandIn, RangesAreChecked) {
    const CUdeviceptr address = allocate(1000);
    unsigned char bytes[1001] = {};
    EXPECT_EQ(cuMemsetD8_v2(address, 1, 1001), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemsetD8Async(address + 1, 1, 1000, nullptr), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemsetD8_v2(address, 1, SIZE_MAX), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemcpyHtoD_v2(address, bytes, 1001), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemcpyDtoH_v2(bytes, address - 1, 2), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemcpyDtoD_v2(address + 500, address, 501), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemcpyDtoDAsync_v2(address, address + 500, 501, nullptr),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemcpyHtoDAsync_v2(address, bytes, 1000, nullptr), CUDA_SUCCESS);
    EXPECT_TRUE(all_are(read(address, 1000), 0));
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, GuardBytesTellOfOverruns) {
    const CUdeviceptr after = allocate(1000);
    const CUdeviceptr before = allocate(1000);
    host(after)[1000] = 0;
    host(before)[-1] = 0;
    EXPECT_EQ(standin_num_violations(), 2u);
    EXPECT_EQ(standin_num_violations(), 2u);
    EXPECT_NE(std::string(standin_describe_violations()).find("byte 1000 outside"),
              std::string::npos);
    EXPECT_NE(std::string(standin_describe_violations()).find("byte -1 outside"),
              std::string::npos);
    EXPECT_EQ(cuMemFree_v2(after), CUDA_SUCCESS);
    EXPECT_EQ(standin_num_violations(), 2u);
}

TEST_F(StandIn, PointersKnowWhatTheyAre) {
    const CUdeviceptr address = allocate(512);
    unsigned char* const buffer = pinned(64);
    struct Case {
        CUdeviceptr at;
        unsigned type;
        CUdeviceptr start;
    };
    for (const Case& wanted :
         {Case{address + 5, CU_MEMORYTYPE_DEVICE, address},
          Case{reinterpret_cast<CUdeviceptr>(buffer) + 3, CU_MEMORYTYPE_HOST,
               reinterpret_cast<CUdeviceptr>(buffer)}}) {
        unsigned type = 0;
        CUdeviceptr start = 0;
        int device = -1;
        CUcontext owner = nullptr;
        EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, wanted.at),
                  CUDA_SUCCESS);
        EXPECT_EQ(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, wanted.at),
                  CUDA_SUCCESS);
        EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, wanted.at),
                  CUDA_SUCCESS);
        EXPECT_EQ(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, wanted.at),
                  CUDA_SUCCESS);
        EXPECT_EQ(type, wanted.type);
        EXPECT_EQ(start, wanted.start);
        EXPECT_EQ(device, 0);
        EXPECT_EQ(owner, context);
    }
    unsigned type = 7;
    int attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    void* value = &type;
    EXPECT_EQ(cuPointerGetAttribute(&type, attribute, reinterpret_cast<CUdeviceptr>(&type)),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuPointerGetAttributes(1, &attribute, &value, reinterpret_cast<CUdeviceptr>(&type)),
              CUDA_SUCCESS);
    EXPECT_EQ(type, 0u);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFreeHost(buffer), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFreeHost(&type), CUDA_ERROR_INVALID_VALUE);
    expect_clean();
}

TEST_F(StandIn, AnotherDevicesMemoryIsCopiedButNotSet) {
    const CUdeviceptr first = allocate(256);
    CUcontext other = nullptr;
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxPushCurrent_v2(other), CUDA_SUCCESS);
    EXPECT_EQ(cuMemsetD8_v2(first, 0, 256), CUDA_ERROR_INVALID_VALUE);
    const CUdeviceptr second = allocate(256);
    EXPECT_EQ(cuMemsetD8_v2(second, 9, 256), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyDtoD_v2(first, second, 256), CUDA_SUCCESS);
    EXPECT_EQ(standin_used_bytes(0), 256u);
    EXPECT_EQ(standin_used_bytes(1), 256u);
    EXPECT_EQ(cuMemFree_v2(second), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(1), CUDA_SUCCESS);
    EXPECT_TRUE(all_are(read(first, 256), 9));
    EXPECT_EQ(cuMemFree_v2(first), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, VirtualMemoryIsReservedMappedAndGivenBack) {
    const CUmemAllocationProp properties = on_device(0);
    std::size_t unit = 0;
    ASSERT_EQ(cuMemGetAllocationGranularity(&unit, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(unit, 2 * mib);
    CUdeviceptr base = 0;
    EXPECT_EQ(cuMemAddressReserve(&base, unit + 1, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemAddressReserve(&base, unit, 3, 0, 0), CUDA_ERROR_INVALID_VALUE);
    ASSERT_EQ(cuMemAddressReserve(&base, 4 * unit, 8 * unit, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(base % (8 * unit), 0u);
    CUmemGenericAllocationHandle handles[2] = {};
    EXPECT_EQ(cuMemCreate(&handles[0], unit - 1, &properties, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemMap(base, unit, 0, 77, 0), CUDA_ERROR_INVALID_VALUE);
    for (std::size_t i = 0; i < 2; ++i) {
        ASSERT_EQ(cuMemCreate(&handles[i], unit, &properties, 0), CUDA_SUCCESS);
        const CUdeviceptr at = base + i * unit;
        EXPECT_EQ(cuMemMap(at, 2 * unit, 0, handles[i], 0), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cuMemMap(base + 4 * unit, unit, 0, handles[i], 0), CUDA_ERROR_INVALID_VALUE);
        ASSERT_EQ(cuMemMap(at, unit, 0, handles[i], 0), CUDA_SUCCESS);
        EXPECT_EQ(cuMemMap(at, unit, 0, handles[i], 0), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cuMemRelease(handles[i]), CUDA_SUCCESS);
        EXPECT_EQ(cuMemRelease(handles[i]), CUDA_ERROR_INVALID_VALUE);
    }
    EXPECT_EQ(cuMemsetD8_v2(base, 0, 1), CUDA_ERROR_INVALID_VALUE);  // no access yet
    const CUmemAccessDesc access = read_write(0);
    EXPECT_EQ(cuMemSetAccess(base, 3 * unit, &access, 1), CUDA_ERROR_INVALID_VALUE);
    ASSERT_EQ(cuMemSetAccess(base, 2 * unit, &access, 1), CUDA_SUCCESS);
    EXPECT_TRUE(all_are(read(base, 2 * unit), 0xA5));
    EXPECT_EQ(cuMemsetD8_v2(base + unit - 5, 3, 10), CUDA_SUCCESS);
    EXPECT_TRUE(all_are(read(base + unit - 5, 10), 3));
    EXPECT_EQ(cuMemsetD8_v2(base + 2 * unit - 1, 3, 2), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(standin_used_bytes(0), 2 * unit);
    EXPECT_EQ(standin_num_leaks("mapping"), 2u);
    EXPECT_EQ(cuMemAddressFree(base, 4 * unit), CUDA_ERROR_INVALID_VALUE);  // still mapped
    EXPECT_EQ(cuMemUnmap(base, 3 * unit), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemUnmap(base, 2 * unit), CUDA_SUCCESS);
    EXPECT_EQ(standin_used_bytes(0), 0u);
    EXPECT_EQ(cuMemAddressFree(base, unit), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemAddressFree(base, 4 * unit), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, OnlyShareableMemoryIsExported) {
    CUmemAllocationProp properties = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    int file = -1;
    ASSERT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemExportToShareableHandle(&file, handle, 1, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    ASSERT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemExportToShareableHandle(&file, handle, 1, 0), CUDA_SUCCESS);
    EXPECT_EQ(close(file), 0);
    EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
    properties.requestedHandleTypes = 8;  // fabric
    EXPECT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_ERROR_NOT_SUPPORTED);
    properties = on_device(5);
    EXPECT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_ERROR_INVALID_DEVICE);
    expect_clean();
}

// --- protection -----------------------------------------------------------------

using StandInDeathTest = StandIn;

TEST_F(StandInDeathTest, ProtectedMemoryIsOnlyTheDrivers) {
    const CUdeviceptr plain = allocate(1000);
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp properties = on_device(0);
    const CUmemAccessDesc access = read_write(0);
    ASSERT_EQ(cuMemAddressReserve(&base, 2 * mib, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemMap(base, 2 * mib, 0, handle, 0), CUDA_SUCCESS);
    standin_set_protected(true);
    ASSERT_EQ(cuMemSetAccess(base, 2 * mib, &access, 1), CUDA_SUCCESS);
    for (const CUdeviceptr address : {plain, base, allocate(10)}) {
        volatile unsigned char* const byte = host(address);
        EXPECT_DEATH(*byte = 1, "");
        EXPECT_DEATH(static_cast<void>(*byte), "");
        EXPECT_EQ(cuMemsetD8_v2(address, 4, 10), CUDA_SUCCESS);
        EXPECT_TRUE(all_are(read(address, 10), 4));
        EXPECT_DEATH(*byte = 1, "");
    }
    EXPECT_EQ(standin_num_violations(), 0u);
    standin_set_protected(false);
    EXPECT_EQ(*host(plain), 4);
    EXPECT_EQ(*host(base), 4);
}

TEST_F(StandInDeathTest, FreedAddressesFault) {
    const CUdeviceptr address = allocate(1000);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    volatile unsigned char* const byte = host(address);
    EXPECT_DEATH(*byte = 1, "");
}

// --- work -----------------------------------------------------------------------

TEST_F(StandIn, DeferredWorkRunsWhenItIsWaitedFor) {
    const CUdeviceptr address = allocate(256);
    const CUstream first = stream();
    const CUstream second = stream();
    const CUevent mark = event();
    const std::map<std::string, std::function<CUresult()>> waits = {
        {"cuStreamSynchronize", [&] { return cuStreamSynchronize(first); }},
        {"cuCtxSynchronize", [] { return cuCtxSynchronize(); }},
        {"cuEventSynchronize", [&] { return cuEventSynchronize(mark); }},
        {"cuStreamWaitEvent",
         [&] {
             EXPECT_EQ(cuStreamWaitEvent(second, mark, 0), CUDA_SUCCESS);
             return cuStreamSynchronize(second);
         }},
    };
    unsigned char value = 0;
    for (const auto& [name, wait] : waits) {
        SCOPED_TRACE(name);
        standin_set_deferred(true);
        const unsigned char before = *host(address);
        ++value;
        EXPECT_EQ(cuMemsetD8Async(address, value, 256, first), CUDA_SUCCESS);
        EXPECT_EQ(cuEventRecord(mark, first), CUDA_SUCCESS);
        EXPECT_EQ(cuEventQuery(mark), CUDA_ERROR_NOT_READY);
        EXPECT_EQ(cuStreamQuery(first), CUDA_ERROR_NOT_READY);
        EXPECT_EQ(cuStreamSynchronize(second), CUDA_SUCCESS);  // another stream's affair
        EXPECT_EQ(standin_num_pending(), 2u);
        EXPECT_EQ(*host(address), before);
        EXPECT_EQ(wait(), CUDA_SUCCESS);
        EXPECT_EQ(*host(address), value);
        EXPECT_EQ(cuEventQuery(mark), CUDA_SUCCESS);
        EXPECT_EQ(cuStreamQuery(first), CUDA_SUCCESS);
        EXPECT_EQ(standin_num_pending(), 0u);
        standin_set_deferred(false);
    }
    EXPECT_EQ(cuEventDestroy_v2(mark), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy_v2(first), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy_v2(second), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy_v2(second), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, DestroyingAStreamIsNoWaiting) {
    const CUdeviceptr address = allocate(1);
    const std::vector<std::pair<const char*, std::function<CUresult()>>> waits{
        {"context", cuCtxSynchronize},
        {"default stream", [] { return cuStreamSynchronize(nullptr); }},
    };
    unsigned char value = 0;
    for (const auto& [name, wait] : waits) {
        SCOPED_TRACE(name);
        standin_set_deferred(true);
        CUstream blocking = nullptr;
        CUevent mark = nullptr;
        ASSERT_EQ(cuStreamCreate(&blocking, CU_STREAM_DEFAULT), CUDA_SUCCESS);
        ASSERT_EQ(cuEventCreate(&mark, 0), CUDA_SUCCESS);
        const unsigned char before = *host(address);
        EXPECT_EQ(cuMemsetD8Async(address, ++value, 1, blocking), CUDA_SUCCESS);
        EXPECT_EQ(cuEventRecord(mark, blocking), CUDA_SUCCESS);
        EXPECT_EQ(cuStreamDestroy_v2(blocking), CUDA_SUCCESS);
        EXPECT_EQ(cuEventQuery(mark), CUDA_ERROR_NOT_READY);
        EXPECT_EQ(standin_num_pending(), 2u);
        EXPECT_EQ(*host(address), before);
        EXPECT_EQ(wait(), CUDA_SUCCESS);
        EXPECT_EQ(*host(address), value);
        EXPECT_EQ(standin_num_pending(), 0u);
        EXPECT_EQ(cuEventDestroy_v2(mark), CUDA_SUCCESS);
        standin_set_deferred(false);
    }
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, AnEventMarksTheWorkBeforeItsRecord) {
    const CUdeviceptr address = allocate(2);
    const CUstream on = stream();
    const CUevent mark = event();
    standin_set_deferred(true);
    EXPECT_EQ(cuMemsetD8Async(address, 1, 1, on), CUDA_SUCCESS);
    EXPECT_EQ(cuEventRecord(mark, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemsetD8Async(address + 1, 2, 1, on), CUDA_SUCCESS);
    EXPECT_EQ(cuEventSynchronize(mark), CUDA_SUCCESS);
    EXPECT_EQ(host(address)[0], 1);
    EXPECT_EQ(host(address)[1], 0xA5);
    EXPECT_EQ(standin_num_pending(), 1u);
}

TEST_F(StandIn, PinnedMemoryIsReadWhenTheCopyRuns) {
    const CUdeviceptr address = allocate(2);
    unsigned char* const buffer = pinned(1);
    unsigned char pageable = 1;
    const CUstream on = stream();
    standin_set_deferred(true);
    *buffer = 1;
    EXPECT_EQ(cuMemcpyHtoDAsync_v2(address, buffer, 1, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyHtoDAsync_v2(address + 1, &pageable, 1, on), CUDA_SUCCESS);
    *buffer = 2;
    pageable = 2;
    EXPECT_EQ(cuStreamSynchronize(on), CUDA_SUCCESS);
    EXPECT_EQ(host(address)[0], 2);  // the host was too early
    EXPECT_EQ(host(address)[1], 1);
    EXPECT_EQ(cuMemcpyDtoHAsync_v2(&pageable, address, 1, on), CUDA_SUCCESS);
    EXPECT_EQ(pageable, 2);  // blocks
    EXPECT_EQ(cuMemcpyDtoHAsync_v2(buffer, address + 1, 1, on), CUDA_SUCCESS);
    EXPECT_EQ(*buffer, 2);  // does not
    EXPECT_EQ(cuStreamSynchronize(on), CUDA_SUCCESS);
    EXPECT_EQ(*buffer, 1);
}

TEST_F(StandIn, TheDefaultStreamAndBlockingStreamsWaitForEachOther) {
    const CUdeviceptr address = allocate(2);
    const CUstream blocking = stream(CU_STREAM_DEFAULT);
    const CUstream free_running = stream();
    standin_set_deferred(true);
    EXPECT_EQ(cuMemsetD8Async(address, 1, 1, blocking), CUDA_SUCCESS);
    EXPECT_EQ(cuMemsetD8Async(address + 1, 1, 1, free_running), CUDA_SUCCESS);
    EXPECT_EQ(read(address, 2), (Bytes{1, 0xA5}));
    EXPECT_EQ(cuMemsetD8_v2(address, 2, 1), CUDA_SUCCESS);
    EXPECT_EQ(host(address)[0], 1);  // a memset does not block the host
    EXPECT_EQ(cuMemsetD8Async(address, 3, 1, blocking), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamSynchronize(blocking), CUDA_SUCCESS);
    EXPECT_EQ(host(address)[0], 3);
}

TEST_F(StandIn, WorkOnMemoryThatIsGoneBreaksTheContext) {
    unsigned char* const buffer = pinned(16);
    const CUdeviceptr address = allocate(16);
    const CUstream on = stream();
    standin_set_deferred(true);
    EXPECT_EQ(cuMemcpyHtoDAsync_v2(address, buffer, 16, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFreeHost(buffer), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamSynchronize(on), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(standin_num_violations(), 1u);
    CUdeviceptr more = 0;
    EXPECT_EQ(cuMemAlloc_v2(&more, 1), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(standin_num_leaks("device memory"), 0u);  // given back nevertheless
}

TEST_F(StandIn, UnmappingDoesNotWait) {
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp properties = on_device(0);
    const CUmemAccessDesc access = read_write(0);
    ASSERT_EQ(cuMemAddressReserve(&base, 2 * mib, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemMap(base, 2 * mib, 0, handle, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemSetAccess(base, 2 * mib, &access, 1), CUDA_SUCCESS);
    standin_set_deferred(true);
    EXPECT_EQ(cuMemsetD8Async(base, 0, 2 * mib, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(cuMemUnmap(base, 2 * mib), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_F(StandIn, FreeingWaits) {
    const CUdeviceptr address = allocate(16);
    const CUstream on = stream();
    standin_set_deferred(true);
    EXPECT_EQ(cuMemsetD8Async(address, 0, 16, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    EXPECT_EQ(standin_num_pending(), 0u);
    EXPECT_EQ(standin_num_violations(), 0u);
}

// --- kernels --------------------------------------------------------------------

TEST_F(StandIn, KernelsRunWithTheParametersOfTheirLaunch) {
    const CUdeviceptr address = allocate(100);
    const CUfunction fill = kernel("test_fill");
    standin_set_deferred(true);
    Fill argument = {host(address), 100, 7};
    void* parameters[] = {&argument};
    EXPECT_EQ(cuLaunchKernel(fill, 1, 1, 1, 100, 1, 1, 0, nullptr, parameters, nullptr),
              CUDA_SUCCESS);
    argument = {};
    EXPECT_EQ(*host(address), 0xA5);
    EXPECT_TRUE(all_are(read(address, 100), 7));
}

TEST_F(StandIn, LaunchesAreCheckedAsOnADevice) {
    const CUdeviceptr address = allocate(1);
    const CUfunction fill = kernel("test_fill");
    Fill argument = {host(address), 1, 7};
    void* parameters[] = {&argument};
    struct Case {
        unsigned grid[3];
        unsigned block[3];
        unsigned shared_bytes;
        CUresult result;
    };
    const Case cases[] = {
        {{1, 1, 1}, {1, 1, 1}, 0, CUDA_SUCCESS},
        {{1, 65535, 1}, {1, 1, 1}, 0, CUDA_SUCCESS},
        {{0, 1, 1}, {1, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 0}, {1, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{2147483648u, 1, 1}, {1, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 65536, 1}, {1, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 65536}, {1, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 1}, {1, 0, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 1}, {1025, 1, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 1}, {64, 32, 1}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 1}, {1, 1, 65}, 0, CUDA_ERROR_INVALID_VALUE},
        {{1, 1, 1}, {1, 1, 1}, 49153, CUDA_ERROR_INVALID_VALUE},
    };
    for (const Case& c : cases) {
        EXPECT_EQ(cuLaunchKernel(fill, c.grid[0], c.grid[1], c.grid[2], c.block[0], c.block[1],
                                 c.block[2], c.shared_bytes, nullptr, parameters, nullptr),
                  c.result)
            << c.grid[0] << " " << c.block[0];
    }
    EXPECT_EQ(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr),
              CUDA_ERROR_INVALID_VALUE);
    std::vector<unsigned char> big(4097);
    void* too_many[] = {big.data()};
    EXPECT_EQ(cuLaunchKernel(kernel("test_too_many"), 1, 1, 1, 1, 1, 1, 0, nullptr, too_many,
                             nullptr),
              CUDA_ERROR_INVALID_VALUE);
    CUmodule module = nullptr;
    CUfunction none = nullptr;
    EXPECT_EQ(cuModuleLoadData(&module, nullptr), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuModuleLoadData(&module, "image"), CUDA_SUCCESS);
    EXPECT_EQ(cuModuleGetFunction(&none, module, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
    EXPECT_EQ(cuModuleUnload(module), CUDA_SUCCESS);
    EXPECT_EQ(cuModuleGetFunction(&none, module, "test_fill"), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(StandIn, AKernelThatFaultsBreaksTheContext) {
    const CUdeviceptr address = allocate(256);
    const CUfunction fill = kernel("test_fill");
    EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
    EXPECT_EQ(launch(fill, {host(address), 256, 7}, nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_NE(std::string(standin_describe_violations()).find("kernel test_fill"),
              std::string::npos);
}

TEST_F(StandIn, HandlesOfAnotherContextAreRefused) {
    const CUfunction fill = kernel("test_fill");
    const CUdeviceptr address = allocate(256);
    const CUstream here = stream();
    const CUevent mark = event();
    CUcontext other = nullptr;
    ASSERT_EQ(cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    const CUstream there = stream();
    EXPECT_EQ(launch(fill, {host(address), 1, 7}, there), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuMemsetD8Async(address, 0, 1, here), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuEventRecord(mark, there), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuStreamWaitEvent(there, mark, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamDestroy_v2(there), CUDA_SUCCESS);
    EXPECT_EQ(cuCtxDestroy_v2(other), CUDA_SUCCESS);
    EXPECT_EQ(cuMemsetD8Async(address, 0, 1, here), CUDA_SUCCESS);
}

// --- capture --------------------------------------------------------------------

TEST_F(StandIn, ACapturedStreamRunsOnlyWhenItsGraphIsLaunched) {
    const CUdeviceptr address = allocate(256);
    const CUdeviceptr copied = allocate(256);
    const CUfunction fill = kernel("test_fill");
    const CUstream on = stream();
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    int status = -1;
    ASSERT_EQ(cuStreamBeginCapture_v2(on, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    EXPECT_EQ(cuStreamBeginCapture_v2(on, CU_STREAM_CAPTURE_MODE_GLOBAL),
              CUDA_ERROR_ILLEGAL_STATE);
    EXPECT_EQ(cuStreamIsCapturing(on, &status), CUDA_SUCCESS);
    EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EXPECT_EQ(launch(fill, {host(address), 256, 7}, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyDtoDAsync_v2(copied, address, 256, on), CUDA_SUCCESS);
    EXPECT_EQ(cuMemsetD8Async(address, 0, 256, on), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamEndCapture(on, &graph), CUDA_SUCCESS);
    std::size_t nodes = 0;
    EXPECT_EQ(cuGraphGetNodes(graph, nullptr, &nodes), CUDA_SUCCESS);
    EXPECT_EQ(nodes, 3u);
    EXPECT_TRUE(all_are(read(address, 256), 0xA5));
    ASSERT_EQ(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
    for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(cuMemsetD8_v2(copied, 1, 256), CUDA_SUCCESS);
        EXPECT_EQ(cuGraphLaunch(exec, on), CUDA_SUCCESS);
        EXPECT_EQ(cuStreamSynchronize(on), CUDA_SUCCESS);
        EXPECT_TRUE(all_are(read(copied, 256), 7));
        EXPECT_TRUE(all_are(read(address, 256), 0));
    }
    EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    EXPECT_EQ(standin_num_leaks("graph") + standin_num_leaks("graph exec"), 0u);
}

TEST_F(StandIn, StreamsJoinACaptureByEvents) {
    const CUdeviceptr address = allocate(2);
    const CUstream origin = stream();
    const CUstream side = stream();
    const CUevent fork = event();
    const CUevent joined = event();
    const auto capture = [&](bool joins, CUgraph* graph) {
        EXPECT_EQ(cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
        EXPECT_EQ(cuEventRecord(fork, origin), CUDA_SUCCESS);
        EXPECT_EQ(cuStreamWaitEvent(side, fork, 0), CUDA_SUCCESS);
        EXPECT_EQ(cuMemsetD8Async(address, 3, 1, side), CUDA_SUCCESS);
        EXPECT_EQ(cuEventRecord(joined, side), CUDA_SUCCESS);
        if (joins) {
            EXPECT_EQ(cuStreamWaitEvent(origin, joined, 0), CUDA_SUCCESS);
        }
        CUgraph wrong = nullptr;
        EXPECT_EQ(cuStreamEndCapture(side, &wrong), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        return cuStreamEndCapture(origin, graph);
    };
    CUgraph graph = nullptr;
    EXPECT_EQ(capture(false, &graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(capture(true, &graph), CUDA_SUCCESS);
    EXPECT_NE(graph, nullptr);
    EXPECT_EQ(host(address)[0], 0xA5);
    EXPECT_EQ(cuMemsetD8Async(address, 4, 1, side), CUDA_SUCCESS);  // free again
    EXPECT_EQ(host(address)[0], 4);
}

TEST_F(StandIn, WhatACaptureDoesNotTakeSpoilsIt) {
    const CUdeviceptr address = allocate(256);
    const CUstream on = stream();
    const CUstream other = stream();
    const CUevent outside = event();
    const CUevent inside = event();
    ASSERT_EQ(cuEventRecord(outside, other), CUDA_SUCCESS);
    unsigned char pageable[16] = {};
    CUdeviceptr made = 0;
    void* made_host = nullptr;
    CUmodule module = nullptr;
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp properties = on_device(0);
    struct Case {
        const char* name;
        std::function<CUresult()> call;
        CUresult result;
    };
    const Case cases[] = {
        {"alloc", [&] { return cuMemAlloc_v2(&made, 1); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"free", [&] { return cuMemFree_v2(address); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"pinned", [&] { return cuMemHostAlloc(&made_host, 1, 0); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"create", [&] { return cuMemCreate(&handle, 2 * mib, &properties, 0); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"module", [&] { return cuModuleLoadData(&module, "image"); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"synchronize", [&] { return cuStreamSynchronize(on); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"synchronize another", [&] { return cuStreamSynchronize(other); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"query", [&] { return cuStreamQuery(on); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"context", [] { return cuCtxSynchronize(); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"event query", [&] { return cuEventQuery(outside); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"copy from pageable", [&] { return cuMemcpyHtoDAsync_v2(address, pageable, 16, on); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"copy to pageable", [&] { return cuMemcpyDtoHAsync_v2(pageable, address, 16, on); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"blocking copy", [&] { return cuMemcpyHtoD_v2(address, pageable, 16); },
         CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {"event outside", [&] { return cuStreamWaitEvent(on, outside, 0); },
         CUDA_ERROR_STREAM_CAPTURE_ISOLATION},
        {"captured event",
         [&] {
             EXPECT_EQ(cuEventRecord(inside, on), CUDA_SUCCESS);
             return cuEventSynchronize(inside);
         },
         CUDA_ERROR_CAPTURED_EVENT},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.name);
        ASSERT_EQ(cuStreamBeginCapture_v2(on, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
        EXPECT_EQ(c.call(), c.result);
        int status = -1;
        EXPECT_EQ(cuStreamIsCapturing(on, &status), CUDA_SUCCESS);
        EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        EXPECT_EQ(cuMemsetD8Async(address, 1, 1, on), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        CUgraph graph = nullptr;
        EXPECT_EQ(cuStreamEndCapture(on, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        EXPECT_EQ(graph, nullptr);
        EXPECT_EQ(cuStreamEndCapture(on, &graph), CUDA_ERROR_ILLEGAL_STATE);
    }
    EXPECT_EQ(cuStreamBeginCapture_v2(nullptr, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_TRUE(all_are(read(address, 256), 0xA5));
}

TEST_F(StandIn, TheDefaultStreamMayNotWaitForACapture) {
    const CUdeviceptr address = allocate(16);
    const CUstream blocking = stream(CU_STREAM_DEFAULT);
    CUgraph graph = nullptr;
    ASSERT_EQ(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    int status = -1;
    EXPECT_EQ(cuStreamIsCapturing(nullptr, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    EXPECT_EQ(cuStreamIsCapturing(blocking, &status), CUDA_SUCCESS);
    EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);  // asking spoils nothing
    EXPECT_EQ(cuMemsetD8Async(address, 0, 16, nullptr), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    EXPECT_EQ(cuStreamEndCapture(blocking, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_F(StandIn, WhoMayAllocateDuringACaptureDependsOnItsMode) {
    const CUstream on = stream();
    // Whether this thread, and another, may allocate; and this one after it exchanged its mode.
    struct Case {
        int mode;
        bool same;
        bool another;
    };
    for (const Case& c : {Case{CU_STREAM_CAPTURE_MODE_GLOBAL, false, false},
                          Case{CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false, true},
                          Case{CU_STREAM_CAPTURE_MODE_RELAXED, true, true}}) {
        SCOPED_TRACE(c.mode);
        const auto try_one = [&](bool on_another_thread, bool relaxed) {
            EXPECT_EQ(cuStreamBeginCapture_v2(on, c.mode), CUDA_SUCCESS);
            CUresult result = CUDA_ERROR_UNKNOWN;
            const auto attempt = [&] {
                EXPECT_EQ(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
                int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
                if (relaxed) {
                    EXPECT_EQ(cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
                    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
                }
                CUdeviceptr address = 0;
                result = cuMemAlloc_v2(&address, 16);
                if (relaxed) {
                    EXPECT_EQ(cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
                }
                EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
            };
            if (on_another_thread) {
                std::thread(attempt).join();
            } else {
                attempt();
            }
            CUgraph graph = nullptr;
            EXPECT_EQ(cuStreamEndCapture(on, &graph),
                      result == CUDA_SUCCESS ? CUDA_SUCCESS
                                             : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            return result == CUDA_SUCCESS;
        };
        EXPECT_EQ(try_one(false, false), c.same);
        EXPECT_EQ(try_one(true, false), c.another);
        EXPECT_TRUE(try_one(false, true));
        EXPECT_TRUE(try_one(true, true));
    }
    ASSERT_EQ(cuStreamBeginCapture_v2(on, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    CUgraph graph = nullptr;
    std::thread([&] {
        EXPECT_EQ(cuStreamEndCapture(on, &graph), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }).join();
    EXPECT_EQ(cuStreamEndCapture(on, &graph), CUDA_SUCCESS);
}

// --- failures and leaks -----------------------------------------------------------

TEST_F(StandIn, TheNthCallFails) {
    int count = 0;
    EXPECT_FALSE(standin_fail("cuNoSuchFunction", 1, CUDA_ERROR_UNKNOWN));
    EXPECT_FALSE(standin_fail("cuDeviceGetCount", 0, CUDA_ERROR_UNKNOWN));
    ASSERT_TRUE(standin_fail("cuDeviceGetCount", 2, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(standin_last_failed(), nullptr);
    EXPECT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
    EXPECT_EQ(cuDeviceGetCount(&count), CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
    EXPECT_STREQ(standin_last_failed(), "cuDeviceGetCount");
    ASSERT_TRUE(standin_fail(nullptr, 3, CUDA_ERROR_ILLEGAL_ADDRESS));
    int version = 0;
    CUdevice device = 0;
    EXPECT_EQ(cuDriverGetVersion(&version), CUDA_SUCCESS);
    EXPECT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
    EXPECT_EQ(cuDeviceGet(&device, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(standin_num_failed(), 2u);
    ASSERT_TRUE(standin_fail(nullptr, 1, CUDA_ERROR_UNKNOWN));
    standin_fail_nothing();
    EXPECT_EQ(cuDeviceGet(&device, 0), CUDA_SUCCESS);
}

TEST_F(StandIn, GivingBackIsDoneEvenWhenItFails) {
    const CUdeviceptr address = allocate(16);
    ASSERT_TRUE(standin_fail("cuMemFree_v2", 1, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(cuMemFree_v2(address), CUDA_ERROR_UNKNOWN);
    ASSERT_TRUE(standin_fail("cuCtxPopCurrent_v2", 1, CUDA_ERROR_UNKNOWN));
    EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_ERROR_UNKNOWN);
    CUcontext current = context;
    EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
    EXPECT_EQ(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
    expect_clean();
}

TEST_F(StandIn, LeaksAreNamedByKind) {
    allocate(16);
    pinned(16);
    stream();
    event();
    kernel("test_fill");
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp properties = on_device(0);
    ASSERT_EQ(cuMemAddressReserve(&base, 2 * mib, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemCreate(&handle, 2 * mib, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemMap(base, 2 * mib, 0, handle, 0), CUDA_SUCCESS);
    const std::string text = standin_describe_leaks();
    for (const char* kind : {"device memory", "pinned memory", "stream", "event", "module",
                             "reservation", "physical memory", "mapping", "context"}) {
        EXPECT_EQ(standin_num_leaks(kind), 1u) << kind;
        EXPECT_NE(text.find(std::string(kind) + ": "), std::string::npos) << text;
    }
    EXPECT_EQ(standin_num_leaks(nullptr), 9u);
    // What a context that is gone still owned was never given back.
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    EXPECT_EQ(standin_num_leaks(nullptr), 8u);
    CUdeviceptr more = 0;
    EXPECT_EQ(cuMemAlloc_v2(&more, 1), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    standin_reset();
    EXPECT_EQ(standin_num_leaks(nullptr), 0u);
    EXPECT_EQ(standin_used_bytes(0), 0u);
}

TEST_F(StandIn, ThreadsMayCallAtOnce) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([this] {
            EXPECT_EQ(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
            const CUstream on = stream();
            for (int round = 0; round < 50; ++round) {
                const CUdeviceptr address = allocate(64);
                EXPECT_EQ(cuMemsetD8Async(address, 1, 64, on), CUDA_SUCCESS);
                EXPECT_EQ(cuStreamSynchronize(on), CUDA_SUCCESS);
                EXPECT_TRUE(all_are(read(address, 64), 1));
                EXPECT_EQ(cuMemFree_v2(address), CUDA_SUCCESS);
            }
            EXPECT_EQ(cuStreamDestroy_v2(on), CUDA_SUCCESS);
            EXPECT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    expect_clean();
}
