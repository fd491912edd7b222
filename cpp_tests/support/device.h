// What the driver gives and takes back again: contexts, device memory, streams and events. For
// programs that run on the stand-in and on a real driver alike.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_DEVICE_H
#define KVPAGES_CPP_TESTS_SUPPORT_DEVICE_H

#include "driver.h"

#include <cstddef>
#include <vector>

namespace support {

using Bytes = std::vector<unsigned char>;

/// Called when the driver returns an error where none is expected. Each program has its own.
void driver_failed(const char* call, CUresult code);

inline void check_driver(CUresult code, const char* call) {
    if (code != CUDA_SUCCESS) {
        driver_failed(call, code);
    }
}
#define DRIVER(call) ::support::check_driver(call, #call)

inline CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

/// A device's primary context, current while this lives.
class Entered {
public:
    explicit Entered(int device = 0) : device_(device) {
        DRIVER(cuDevicePrimaryCtxRetain(&context_, device));
        DRIVER(cuCtxPushCurrent_v2(context_));
    }
    ~Entered() {
        DRIVER(cuCtxPopCurrent_v2(nullptr));
        DRIVER(cuDevicePrimaryCtxRelease_v2(device_));
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

    CUcontext get() const { return context_; }

private:
    int device_;
    CUcontext context_ = nullptr;
};

/// Copies into device memory, and returns when the bytes are there. The driver's call may return
/// before, and streams that do not block would not wait for it. Needs a current context.
inline void upload(CUdeviceptr to, const void* from, std::size_t bytes) {
    if (bytes > 0) {
        DRIVER(cuMemcpyHtoD_v2(to, from, bytes));
        DRIVER(cuStreamSynchronize(nullptr));
    }
}

/// Device memory of the engine's own.
class DeviceArray {
public:
    explicit DeviceArray(std::size_t size) : size_(size) {
        const Entered entered;
        DRIVER(cuMemAlloc_v2(&data_, size > 0 ? size : 1));
    }
    template <typename T>
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size() * sizeof(T)) {
        write(values);
    }
    ~DeviceArray() {
        const Entered entered;
        DRIVER(cuMemFree_v2(data_));
    }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    template <typename T = void>
    T* data() const {
        return reinterpret_cast<T*>(data_);
    }
    CUdeviceptr get() const { return data_; }
    std::size_t size() const { return size_; }

    /// Values that it has room for, into its beginning.
    template <typename T>
    void write(const std::vector<T>& values) const {
        const Entered entered;
        upload(data_, values.data(), values.size() * sizeof(T));
    }

    Bytes read() const {
        const Entered entered;
        Bytes bytes(size_);
        if (size_ > 0) {
            DRIVER(cuMemcpyDtoH_v2(bytes.data(), data_, size_));
        }
        return bytes;
    }

private:
    std::size_t size_;
    CUdeviceptr data_ = 0;
};

/// A stream that does not wait for the default stream.
class Stream {
public:
    Stream() {
        const Entered entered;
        DRIVER(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    }
    ~Stream() {
        const Entered entered;
        DRIVER(cuStreamDestroy_v2(stream_));
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    CUstream get() const { return stream_; }

    void wait() const {
        const Entered entered;
        DRIVER(cuStreamSynchronize(stream_));
    }

private:
    CUstream stream_ = nullptr;
};

/// A graph that was captured, to be replayed.
class Graph {
public:
    /// Captures what the call puts on the stream.
    template <typename Call>
    Graph(CUstream stream, const Call& call) {
        {
            const Entered entered;
            DRIVER(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        }
        call();  // without a context of ours, as an engine may call
        const Entered entered;
        CUgraph graph = nullptr;
        DRIVER(cuStreamEndCapture(stream, &graph));
        DRIVER(cuGraphInstantiateWithFlags(&exec_, graph, 0));
        DRIVER(cuGraphDestroy(graph));
    }
    ~Graph() {
        const Entered entered;
        DRIVER(cuGraphExecDestroy(exec_));
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void launch(CUstream stream) const {
        const Entered entered;
        DRIVER(cuGraphLaunch(exec_, stream));
    }

private:
    CUgraphExec exec_ = nullptr;
};

}  // namespace support

#endif
