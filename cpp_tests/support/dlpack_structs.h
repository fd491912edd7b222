// The structs of DLPack, as the project's dlpack.h has them, which not every machine has in a version
// that knows them: scripts/test dlpack compares both with dlpack/layout.h.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_DLPACK_STRUCTS_H
#define KVPAGES_CPP_TESTS_SUPPORT_DLPACK_STRUCTS_H

#include <kvpages/kvpages.h>

#include <cstddef>
#include <cstdint>

#define DLPACK_MAJOR_VERSION 1
#define DLPACK_FLAG_BITMASK_READ_ONLY 1u

enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2 };

enum DLDataTypeCode {
    kDLInt = 0,
    kDLUInt = 1,
    kDLFloat = 2,
    kDLBfloat = 4,
    kDLBool = 6,
    kDLFloat8_e4m3fn = 10,
    kDLFloat8_e4m3fnuz = 11,
    kDLFloat8_e5m2 = 12,
    kDLFloat8_e5m2fnuz = 13,
    kDLFloat4_e2m1fn = 17,
};

struct DLPackVersion {
    std::uint32_t major;
    std::uint32_t minor;
};

struct DLDevice {
    DLDeviceType device_type;
    std::int32_t device_id;
};

struct DLDataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    std::int32_t ndim;
    DLDataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};

struct DLManagedTensorVersioned {
    DLPackVersion version;
    void* manager_ctx;
    void (*deleter)(DLManagedTensorVersioned*);
    std::uint64_t flags;
    DLTensor dl_tensor;
};

#include "../dlpack/layout.h"

#endif
