// What the examples ask of NVIDIA's driver, beside what kvpages does: memory for what they compute,
// a stream, and copies. Its library is opened when a device is asked for, so nothing of the CUDA
// toolkit is needed, to build or to run. An engine that has kernels of its own links the toolkit.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

struct CUctx_st;     // CUcontext points to it
struct CUstream_st;  // CUstream does

namespace device {

/// Functions of libcuda.so.1, with the types that they have in cuda.h. They return 0 or a code.
struct CudaDriver {
    int (*init)(unsigned flags);
    int (*get_error_name)(int code, const char** name);
    int (*get_device)(int* device, int ordinal);
    int (*retain_primary_context)(CUctx_st** context, int device);
    int (*release_primary_context)(int device);
    int (*push_context)(CUctx_st* context);
    int (*pop_context)(CUctx_st** context);
    int (*create_stream)(CUstream_st** stream, unsigned flags);
    int (*destroy_stream)(CUstream_st* stream);
    int (*wait_for_stream)(CUstream_st* stream);
    int (*allocate)(std::uint64_t* address, std::size_t bytes);
    int (*free)(std::uint64_t address);
    int (*allocate_pinned)(void** data, std::size_t bytes, unsigned flags);
    int (*free_pinned)(void* data);
    int (*copy_to_device)(std::uint64_t to, const void* from, std::size_t bytes,
                          CUstream_st* stream);
    int (*copy_to_host)(void* to, std::uint64_t from, std::size_t bytes,
                        CUstream_st* stream);

    /// Opened once, and never closed.
    static const CudaDriver& get() {
        static const CudaDriver driver = open();
        return driver;
    }

    void check(int code, const char* what) const {
        if (code == 0) return;
        const char* name = nullptr;
        if (get_error_name(code, &name) != 0 || name == nullptr) name = "an error without a name";
        throw std::runtime_error(std::string("the CUDA driver cannot ") + what + ": " + name + " (" +
                                 std::to_string(code) + ")");
    }

private:
    static CudaDriver open() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw std::runtime_error(dlerror());
        const auto find = [library](const char* name, auto& function) {
            void* symbol = dlsym(library, name);
            if (symbol == nullptr) {
                throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name);
            }
            function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
        };
        CudaDriver driver{};
        find("cuInit", driver.init);
        find("cuGetErrorName", driver.get_error_name);
        find("cuDeviceGet", driver.get_device);
        find("cuDevicePrimaryCtxRetain", driver.retain_primary_context);
        find("cuDevicePrimaryCtxRelease_v2", driver.release_primary_context);
        find("cuCtxPushCurrent_v2", driver.push_context);
        find("cuCtxPopCurrent_v2", driver.pop_context);
        find("cuStreamCreate", driver.create_stream);
        find("cuStreamDestroy_v2", driver.destroy_stream);
        find("cuStreamSynchronize", driver.wait_for_stream);
        find("cuMemAlloc_v2", driver.allocate);
        find("cuMemFree_v2", driver.free);
        find("cuMemHostAlloc", driver.allocate_pinned);
        find("cuMemFreeHost", driver.free_pinned);
        find("cuMemcpyHtoDAsync_v2", driver.copy_to_device);
        find("cuMemcpyDtoHAsync_v2", driver.copy_to_host);
        return driver;
    }
};

/// The primary context of a device, which kvpages and CUDA's runtime use too, and a stream in it.
/// Any thread may call: the context is current during a call, and afterwards what was before.
class CudaStream {
public:
    explicit CudaStream(std::uint32_t ordinal) {
        driver_.check(driver_.init(0), "start");
        driver_.check(driver_.get_device(&device_, static_cast<int>(ordinal)), "find the device");
        driver_.check(driver_.retain_primary_context(&context_, device_), "make a context");
        try {
            constexpr unsigned kNonBlocking = 1;  // does not wait for the legacy default stream
            in_context("make a stream",
                       [&] { return driver_.create_stream(&stream_, kNonBlocking); });
        } catch (...) {
            driver_.release_primary_context(device_);
            throw;
        }
    }

    ~CudaStream() {
        give_back([&] { return driver_.destroy_stream(stream_); });
        driver_.release_primary_context(device_);
    }

    CudaStream(const CudaStream&) = delete;
    CudaStream& operator=(const CudaStream&) = delete;

    void* get() const { return stream_; }

    void wait() const {
        in_context("wait for a stream", [&] { return driver_.wait_for_stream(stream_); });
    }

    /// Neither copy waits. Host memory is pinned and stays as it is until wait() returned.
    void copy_to_device(void* to, const void* from, std::size_t bytes) const {
        in_context("copy to the device",
                   [&] { return driver_.copy_to_device(address(to), from, bytes, stream_); });
    }
    void copy_to_host(void* to, const void* from, std::size_t bytes) const {
        in_context("copy from the device",
                   [&] { return driver_.copy_to_host(to, address(from), bytes, stream_); });
    }

    void* allocate(std::size_t bytes) const {
        std::uint64_t data = 0;
        in_context("allocate device memory", [&] { return driver_.allocate(&data, bytes); });
        return reinterpret_cast<void*>(static_cast<std::uintptr_t>(data));
    }
    void* allocate_pinned(std::size_t bytes) const {
        void* data = nullptr;
        in_context("pin host memory", [&] { return driver_.allocate_pinned(&data, bytes, 0); });
        return data;
    }

    /// What work is on the stream may still need the memory, so these wait for it.
    void free(void* data) const noexcept {
        give_back([&] { return driver_.wait_for_stream(stream_); });
        give_back([&] { return driver_.free(address(data)); });
    }
    void free_pinned(void* data) const noexcept {
        give_back([&] { return driver_.wait_for_stream(stream_); });
        give_back([&] { return driver_.free_pinned(data); });
    }

private:
    static std::uint64_t address(const void* data) {
        return reinterpret_cast<std::uintptr_t>(data);
    }

    template <typename Call>
    void in_context(const char* what, Call call) const {
        driver_.check(driver_.push_context(context_), "enter its context");
        const int code = call();
        CUctx_st* popped = nullptr;
        driver_.check(driver_.pop_context(&popped), "leave its context");
        driver_.check(code, what);
    }

    /// For destructors: a driver that fails there has failed before, and said so.
    template <typename Call>
    void give_back(Call call) const noexcept {
        if (driver_.push_context(context_) != 0) return;
        call();
        CUctx_st* popped = nullptr;
        driver_.pop_context(&popped);
    }

    const CudaDriver& driver_ = CudaDriver::get();
    int device_ = 0;
    CUctx_st* context_ = nullptr;
    CUstream_st* stream_ = nullptr;
};

}  // namespace device
