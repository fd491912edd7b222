/* Where dlpack.h 1.x has its fields, and its numbers, on machines of 64 bits. Checked of the structs
 * that the tests use (support/dlpack_structs.h) and of the real header (real_header.h). */
#ifndef KVPAGES_CPP_TESTS_DLPACK_LAYOUT_H
#define KVPAGES_CPP_TESTS_DLPACK_LAYOUT_H

#include <assert.h>
#include <stddef.h>

#define PLACE(type, field, at, bytes)                                                             \
    static_assert(offsetof(type, field) == (at) && sizeof(((type*)NULL)->field) == (bytes), \
                  #type "." #field)
#define SIZE(type, bytes) static_assert(sizeof(type) == (bytes), #type)

PLACE(DLPackVersion, major, 0, 4);
PLACE(DLPackVersion, minor, 4, 4);
SIZE(DLPackVersion, 8);
PLACE(DLDevice, device_type, 0, 4);
PLACE(DLDevice, device_id, 4, 4);
SIZE(DLDevice, 8);
PLACE(DLDataType, code, 0, 1);
PLACE(DLDataType, bits, 1, 1);
PLACE(DLDataType, lanes, 2, 2);
SIZE(DLDataType, 4);
PLACE(DLTensor, data, 0, 8);
PLACE(DLTensor, device, 8, 8);
PLACE(DLTensor, ndim, 16, 4);
PLACE(DLTensor, dtype, 20, 4);
PLACE(DLTensor, shape, 24, 8);
PLACE(DLTensor, strides, 32, 8);
PLACE(DLTensor, byte_offset, 40, 8);
SIZE(DLTensor, 48);
PLACE(struct DLManagedTensorVersioned, version, 0, 8);
PLACE(struct DLManagedTensorVersioned, manager_ctx, 8, 8);
PLACE(struct DLManagedTensorVersioned, deleter, 16, 8);
PLACE(struct DLManagedTensorVersioned, flags, 24, 8);
PLACE(struct DLManagedTensorVersioned, dl_tensor, 32, 48);
SIZE(struct DLManagedTensorVersioned, 80);
PLACE(struct DLManagedTensor, dl_tensor, 0, 48);
PLACE(struct DLManagedTensor, manager_ctx, 48, 8);
PLACE(struct DLManagedTensor, deleter, 56, 8);
SIZE(struct DLManagedTensor, 64);

static_assert(kDLCPU == 1 && kDLCUDA == 2, "devices");
static_assert(kDLInt == 0 && kDLUInt == 1 && kDLFloat == 2 && kDLBfloat == 4 && kDLBool == 6,
              "element types");
static_assert(kDLFloat8_e4m3fn == 10 && kDLFloat8_e4m3fnuz == 11 && kDLFloat8_e5m2 == 12 &&
                  kDLFloat8_e5m2fnuz == 13 && kDLFloat4_e2m1fn == 17,
              "element types of DLPack 1.1");
static_assert(DLPACK_FLAG_BITMASK_READ_ONLY == 1, "flags");
static_assert(DLPACK_MAJOR_VERSION == 1, "another version has other structs");

#undef PLACE
#undef SIZE

#endif
