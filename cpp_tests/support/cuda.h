// Tests of CUDA run on the stand-in driver, and the same programs on a machine with a real one.
// What holds for any driver is tested with both; what steers the stand-in is skipped with the
// other.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_CUDA_H
#define KVPAGES_CPP_TESTS_SUPPORT_CUDA_H

#include "device.h"
#include "driver.h"
#include "standin.h"

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <cstdint>

namespace support {

/// Whether the driver of this process is the stand-in, and standin_* are there.
inline bool on_standin() {
    static const bool found = dlsym(RTLD_DEFAULT, "standin_reset") != nullptr;
    return found;
}

/// The first line of a test, or of a SetUp, that needs what only the stand-in can do. With it
/// nothing is ever skipped: cuda_main.cc sees to that.
#define NEEDS_STANDIN(why)                                       \
    if (!::support::on_standin()) {                              \
        GTEST_SKIP() << "needs the stand-in driver, which " why; \
    }                                                            \
    static_assert(true, "takes the semicolon")

/// Calls of a driver's function so far; always 0 with a real driver, which does not count.
inline std::uint64_t num_calls(const char* function) {
    return on_standin() ? standin_num_calls(function) : 0;
}

/// The devices that there are; the last of them is the first on most machines.
inline std::uint32_t num_devices() {
    int count = 0;
    DRIVER(cuDeviceGetCount(&count));
    return static_cast<std::uint32_t>(count);
}

inline bool has_attribute(int attribute, int device) {
    int value = 0;
    DRIVER(cuDeviceGetAttribute(&value, attribute, device));
    return value != 0;
}

/// Leaves bytes that are not zero in memory that the next allocation is likely to get. The stand-in
/// does that by itself.
inline void soil_free_memory() {
    constexpr std::size_t bytes = std::size_t{256} << 20;
    const Entered entered;
    CUdeviceptr data = 0;
    if (cuMemAlloc_v2(&data, bytes) == CUDA_SUCCESS) {
        DRIVER(cuMemsetD8_v2(data, 0xA5, bytes));
        DRIVER(cuCtxSynchronize());
        DRIVER(cuMemFree_v2(data));
    }
}

/// Holds a primary context until the process ends: to make one takes a driver long, and tests make
/// and drop theirs all the time.
inline void keep_primary_context() {
    static const CUresult kept = [] {
        CUcontext context = nullptr;
        return cuDevicePrimaryCtxRetain(&context, 0);
    }();
    ASSERT_EQ(kept, CUDA_SUCCESS);
}

/// A test for any driver. The stand-in is a fresh one each time, whose memory the host cannot touch
/// and whose work runs only when it is waited for; what a test leaves with it is a failure.
class CudaTest : public ::testing::Test {
protected:
    void SetUp() override {
        if (on_standin()) {
            standin_reset();
        }
        // The library opens a driver once in a process, and a reset makes it forget that.
        ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
        if (on_standin()) {
            standin_set_protected(true);
            standin_set_deferred(true);
        } else {
            ASSERT_NO_FATAL_FAILURE(keep_primary_context());
            soil_free_memory();
        }
    }

    void TearDown() override {
        EXPECT_EQ(current(), nullptr);
        if (on_standin()) {
            EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
            EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
            EXPECT_EQ(standin_used_bytes(0) + standin_used_bytes(1), 0u);
            standin_reset();
        } else {
            // Work that goes wrong is told by a later call: here, and not in another test.
            const Entered entered;
            DRIVER(cuCtxSynchronize());
        }
    }

    static CUcontext current() {
        CUcontext context = nullptr;
        EXPECT_EQ(cuCtxGetCurrent(&context), CUDA_SUCCESS);
        return context;
    }
};

}  // namespace support

#endif
