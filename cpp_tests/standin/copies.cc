// Memset and copies. Ranges are checked when a call is made, and again when its work runs.
#include "capture.h"
#include "work.h"

#include <cstring>

namespace standin {

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// A range that an operation touches, and whose memory it is.
struct Touched {
    CUdeviceptr address;
    std::size_t bytes;
    int device;
    bool pinned;
};

bool is_there(const Touched& range) {
    return range.pinned ? is_pinned(pointer(range.address), range.bytes)
                        : is_device_memory(range.address, range.bytes, range.device);
}

// Work that looks at its ranges first.
Operation checked(const char* name, std::vector<Touched> ranges, Operation run) {
    const CUcontext context = current_context();
    return [=] {
        for (const Touched& range : ranges) {
            if (!is_there(range)) {
                break_context(context, std::string(name) + ": " + std::to_string(range.bytes) +
                                           " bytes are gone that it was called with");
                return;
            }
        }
        run();
    };
}

CUresult set(const char* name, CUdeviceptr to, unsigned char value, std::size_t bytes,
             CUstream stream) {
    const Touched target = {to, bytes, current_context()->device, false};
    if (!is_there(target)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return submit(stream,
                  checked(name, {target}, [=] { std::memset(pointer(to), value, bytes); }));
}

CUresult copy_on_device(const char* name, CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                        CUstream stream) {
    const Touched target = {to, bytes, any_device, false};
    const Touched source = {from, bytes, any_device, false};
    if (!is_there(target) || !is_there(source)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return submit(stream, checked(name, {target, source}, [=] {
                      std::memmove(pointer(to), pointer(from), bytes);
                  }));
}

CUresult copy_to_device(const char* name, CUdeviceptr to, const void* from, std::size_t bytes,
                        CUstream stream) {
    const Touched target = {to, bytes, any_device, false};
    if (!is_there(target) || (from == nullptr && bytes > 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (is_pinned(from, bytes)) {  // read when the work runs
        const Touched source = {reinterpret_cast<CUdeviceptr>(from), bytes, any_device, true};
        return submit(stream, checked(name, {target, source},
                                      [=] { std::memcpy(pointer(to), from, bytes); }));
    }
    // Pageable memory is staged before the call returns.
    std::vector<unsigned char> staged(bytes);
    if (bytes > 0) {
        std::memcpy(staged.data(), from, bytes);
    }
    return submit_uncapturable(stream, checked(name, {target}, [to, staged] {
                                   if (!staged.empty()) {
                                       std::memcpy(pointer(to), staged.data(), staged.size());
                                   }
                               }));
}

// Copies into pageable memory are done when the call returns.
CUresult copy_to_host(const char* name, void* to, CUdeviceptr from, std::size_t bytes,
                      CUstream stream) {
    const Touched source = {from, bytes, any_device, false};
    if (!is_there(source) || (to == nullptr && bytes > 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto copy = [=] {
        if (bytes > 0) {
            std::memcpy(to, pointer(from), bytes);
        }
    };
    if (is_pinned(to, bytes)) {
        const Touched target = {reinterpret_cast<CUdeviceptr>(to), bytes, any_device, true};
        return submit(stream, checked(name, {source, target}, copy));
    }
    const CUresult result = submit_uncapturable(stream, checked(name, {source}, copy));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    std::shared_ptr<CUstream_st> resolved;
    resolve_stream(stream, &resolved);
    finish_stream(resolved);
    return outcome(current_context());
}

// What a copy that blocks does after its work is on the default stream.
CUresult wait_for_default(CUresult submitted) {
    if (submitted != CUDA_SUCCESS) {
        return submitted;
    }
    finish_stream(current_context()->stream);
    return outcome(current_context());
}

}  // namespace

}  // namespace standin

using namespace standin;

// Like the copy from device to device it does not block, though its name does not say so.
DRIVER_FUNCTION(cuMemsetD8_v2, CUdeviceptr to, unsigned char value, std::size_t bytes) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE,
                       [&] { return set("cuMemsetD8_v2", to, value, bytes, nullptr); });
}

DRIVER_FUNCTION(cuMemsetD8Async, CUdeviceptr to, unsigned char value, std::size_t bytes,
                CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT,
                       [&] { return set("cuMemsetD8Async", to, value, bytes, stream); });
}

DRIVER_FUNCTION(cuMemcpyHtoD_v2, CUdeviceptr to, const void* from, std::size_t bytes) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE, [&] {
        return wait_for_default(copy_to_device("cuMemcpyHtoD_v2", to, from, bytes, nullptr));
    });
}

DRIVER_FUNCTION(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void* from, std::size_t bytes,
                CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        return copy_to_device("cuMemcpyHtoDAsync_v2", to, from, bytes, stream);
    });
}

DRIVER_FUNCTION(cuMemcpyDtoH_v2, void* to, CUdeviceptr from, std::size_t bytes) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE, [&] {
        return wait_for_default(copy_to_host("cuMemcpyDtoH_v2", to, from, bytes, nullptr));
    });
}

DRIVER_FUNCTION(cuMemcpyDtoHAsync_v2, void* to, CUdeviceptr from, std::size_t bytes,
                CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        return copy_to_host("cuMemcpyDtoHAsync_v2", to, from, bytes, stream);
    });
}

DRIVER_FUNCTION(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE,
                       [&] { return copy_on_device("cuMemcpyDtoD_v2", to, from, bytes, nullptr); });
}

DRIVER_FUNCTION(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        return copy_on_device("cuMemcpyDtoDAsync_v2", to, from, bytes, stream);
    });
}
