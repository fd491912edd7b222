// The driver itself, its devices and contexts.
#include "call.h"
#include "work.h"

#include <cstdio>
#include <cstring>

using namespace standin;

namespace {

bool is_device(CUdevice device) { return device >= 0 && device < state().num_devices; }

int default_attribute(int attribute) {
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    };
    const auto found = values.find(attribute);
    return found == values.end() ? 0 : found->second;
}

CUcontext new_context(int device, bool primary) {
    auto context = std::make_shared<CUctx_st>();
    context->device = device;
    context->primary = primary;
    context->references = 1;
    context->stream = std::make_shared<CUstream_st>();
    context->stream->context = context.get();
    return state().contexts.add(std::move(context));
}

bool is_context(CUcontext context) {
    return state().contexts.find(context) != nullptr && context->references > 0;
}

CUresult get_uuid(CUuuid* uuid, CUdevice device) {
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    std::memset(uuid->bytes, device + 1, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
}

struct Name {
    CUresult error;
    const char* name;
    const char* text;
};

const Name* find_name(CUresult error) {
    static const Name names[] = {
        {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
        {CUDA_ERROR_STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
        {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
        {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
        {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
         "the provided PTX was compiled with an unsupported toolchain."},
        {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
        {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
         "the operation cannot be performed in the present state"},
        {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
        {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
         "an illegal memory access was encountered"},
        {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED",
         "context is destroyed"},
        {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
        {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
         "operation not permitted when stream is capturing"},
        {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
         "operation failed due to a previous error during capture"},
        {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
         "operation would result in a merge of separate capture sequences"},
        {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
         "capture was not ended in the same stream as it began"},
        {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
         "capturing stream has unjoined work"},
        {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
         "dependency created on uncaptured work in another stream"},
        {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
         "operation would make the legacy stream depend on a capturing blocking stream"},
        {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
         "operation not permitted on an event last recorded in a capturing stream"},
        {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
         "attempt to terminate a thread-local capture sequence from another thread"},
        {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
    };
    for (const Name& name : names) {
        if (name.error == error) {
            return &name;
        }
    }
    return nullptr;
}

}  // namespace

DRIVER_FUNCTION(cuInit, unsigned flags) {
    return driver_call(__func__, NEEDS_NOTHING, [&] {
        if (flags != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (state().num_devices == 0) {
            return CUDA_ERROR_NO_DEVICE;
        }
        state().initialized = true;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDriverGetVersion, int* version) {
    return driver_call(__func__, NEEDS_NOTHING, [&] {
        *version = state().driver_version;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuGetErrorName, CUresult error, const char** text) {
    return driver_call(__func__, NEEDS_NOTHING, [&] {
        const Name* const found = find_name(error);
        *text = found == nullptr ? nullptr : found->name;
        return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuGetErrorString, CUresult error, const char** text) {
    return driver_call(__func__, NEEDS_NOTHING, [&] {
        const Name* const found = find_name(error);
        *text = found == nullptr ? nullptr : found->text;
        return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDeviceGetCount, int* count) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        *count = state().num_devices;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDeviceGet, CUdevice* device, int ordinal) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(ordinal)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDeviceGetName, char* name, int capacity, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (name == nullptr || capacity <= 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        std::snprintf(name, static_cast<std::size_t>(capacity), "Stand-in GPU %d", device);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDeviceGetUuid, CUuuid* uuid, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] { return get_uuid(uuid, device); });
}

DRIVER_FUNCTION(cuDeviceGetUuid_v2, CUuuid* uuid, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] { return get_uuid(uuid, device); });
}

DRIVER_FUNCTION(cuDeviceTotalMem_v2, std::size_t* bytes, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        *bytes = state().devices[device].total_bytes;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDeviceGetAttribute, int* value, int attribute, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        if (value == nullptr || attribute <= 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        const auto& changed = state().devices[device].attributes;
        const auto found = changed.find(attribute);
        *value = found == changed.end() ? default_attribute(attribute) : found->second;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        CUcontext& primary = state().devices[device].primary;
        if (primary == nullptr || primary->references == 0) {
            primary = new_context(device, true);
        } else {
            ++primary->references;
        }
        *context = primary;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDevicePrimaryCtxRelease_v2, CUdevice device) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        const CUcontext primary = state().devices[device].primary;
        if (primary == nullptr || primary->references == 0) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        if (primary->references == 1) {
            finish_context(primary);
        }
        --primary->references;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuDevicePrimaryCtxGetState, CUdevice device, unsigned* flags, int* active) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        const CUcontext primary = state().devices[device].primary;
        *flags = 0;
        *active = primary != nullptr && primary->references > 0 ? 1 : 0;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxCreate_v2, CUcontext* context, unsigned flags, CUdevice device) {
    static_cast<void>(flags);
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_device(device)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        *context = new_context(device, false);
        context_stack().push_back(*context);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxDestroy_v2, CUcontext context) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        if (!is_context(context) || context->primary) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        finish_context(context);
        context->references = 0;
        if (current_context() == context) {
            context_stack().pop_back();
        }
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxGetCurrent, CUcontext* context) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        *context = current_context();
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxSetCurrent, CUcontext context) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (context != nullptr && !is_context(context)) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        if (!context_stack().empty()) {
            context_stack().pop_back();
        }
        if (context != nullptr) {
            context_stack().push_back(context);
        }
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxPushCurrent_v2, CUcontext context) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_context(context)) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        context_stack().push_back(context);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxPopCurrent_v2, CUcontext* context) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        if (context_stack().empty()) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        if (context != nullptr) {
            *context = current_context();
        }
        context_stack().pop_back();
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxGetDevice, CUdevice* device) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        *device = current_context()->device;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuCtxGetApiVersion, CUcontext context, unsigned* version) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (context != nullptr && !is_context(context)) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        *version = 3020;
        return CUDA_SUCCESS;
    });
}
