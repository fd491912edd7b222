// Tensors of DLPack, for tests of what caches export.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_DLPACK_H
#define KVPAGES_CPP_TESTS_SUPPORT_DLPACK_H

#include "api.h"
#include "bytes.h"
#include "dlpack_structs.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace support {

// As a consumer gives a tensor back.
template <typename Managed>
struct CallDeleter {
    void operator()(Managed* tensor) const { tensor->deleter(tensor); }
};

using DlpackTensor =
    std::unique_ptr<DLManagedTensorVersioned, CallDeleter<DLManagedTensorVersioned>>;
using UnversionedDlpackTensor = std::unique_ptr<DLManagedTensor, CallDeleter<DLManagedTensor>>;

inline DlpackTensor dlpack(const Cache& cache, std::size_t layer, std::size_t view = 0,
                           std::uint32_t flags = 0) {
    DLManagedTensorVersioned* raw = nullptr;
    must(kvpages_cache_export_dlpack(cache.get(), layer, view, flags, &raw));
    return DlpackTensor(raw);
}

inline DlpackTensor dlpack(const Cache& cache, const std::string& name, std::size_t view = 0,
                           std::uint32_t flags = 0) {
    return dlpack(cache, find(cache, name), view, flags);
}

inline UnversionedDlpackTensor unversioned_dlpack(const Cache& cache, std::size_t layer,
                                                  std::size_t view = 0) {
    DLManagedTensor* raw = nullptr;
    must(kvpages_cache_export_dlpack_unversioned(cache.get(), layer, view, &raw));
    return UnversionedDlpackTensor(raw);
}

// The first byte of an element, by what dlpack.h says of a tensor.
inline unsigned char* element(const DLTensor& tensor, const std::vector<std::int64_t>& index) {
    std::int64_t offset = 0;
    for (std::size_t dim = 0; dim < index.size(); ++dim) {
        offset += index[dim] * tensor.strides[dim];
    }
    const std::int64_t bytes = (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
    return static_cast<unsigned char*>(tensor.data) + tensor.byte_offset + offset * bytes;
}

// What DLPack calls the element types of kvpages.
inline DLDataType dlpack_type(std::uint32_t dtype) {
    static const std::map<std::uint32_t, DLDataType> all{
        {KVPAGES_DTYPE_F64, {kDLFloat, 64, 1}},
        {KVPAGES_DTYPE_F32, {kDLFloat, 32, 1}},
        {KVPAGES_DTYPE_F16, {kDLFloat, 16, 1}},
        {KVPAGES_DTYPE_BF16, {kDLBfloat, 16, 1}},
        {KVPAGES_DTYPE_I8, {kDLInt, 8, 1}},
        {KVPAGES_DTYPE_U8, {kDLUInt, 8, 1}},
        {KVPAGES_DTYPE_I16, {kDLInt, 16, 1}},
        {KVPAGES_DTYPE_I32, {kDLInt, 32, 1}},
        {KVPAGES_DTYPE_I64, {kDLInt, 64, 1}},
        {KVPAGES_DTYPE_BOOL, {kDLBool, 8, 1}},
        {KVPAGES_DTYPE_F8_E4M3FN, {kDLFloat8_e4m3fn, 8, 1}},
        {KVPAGES_DTYPE_F8_E5M2, {kDLFloat8_e5m2, 8, 1}},
        {KVPAGES_DTYPE_F8_E4M3FNUZ, {kDLFloat8_e4m3fnuz, 8, 1}},
        {KVPAGES_DTYPE_F8_E5M2FNUZ, {kDLFloat8_e5m2fnuz, 8, 1}},
        {KVPAGES_DTYPE_F4_E2M1X2, {kDLFloat4_e2m1fn, 4, 2}},
    };
    return all.at(dtype);
}

// The tensor says what the view does.
inline void expect_same(const DLTensor& tensor, const kvpages_tensor& view,
                        const kvpages_device& device) {
    EXPECT_EQ(tensor.data, view.data);
    EXPECT_EQ(tensor.byte_offset, 0u);
    ASSERT_EQ(static_cast<std::uint32_t>(tensor.ndim), view.ndim);
    EXPECT_EQ(std::vector<std::int64_t>(tensor.shape, tensor.shape + tensor.ndim), shape(view));
    EXPECT_EQ(std::vector<std::int64_t>(tensor.strides, tensor.strides + tensor.ndim),
              strides(view));
    // A consumer that changes them changes nothing of the view.
    EXPECT_NE(tensor.shape, view.shape);
    EXPECT_NE(tensor.strides, view.strides);
    const DLDataType type = dlpack_type(view.dtype);
    EXPECT_EQ(tensor.dtype.code, type.code);
    EXPECT_EQ(tensor.dtype.bits, type.bits);
    EXPECT_EQ(tensor.dtype.lanes, type.lanes);
    EXPECT_EQ(tensor.dtype.bits * tensor.dtype.lanes, 8 * kvpages_dtype_bytes(view.dtype));
    EXPECT_EQ(tensor.device.device_type,
              device.kind == KVPAGES_DEVICE_KIND_HOST ? kDLCPU : kDLCUDA);
    EXPECT_EQ(static_cast<std::uint32_t>(tensor.device.device_id), device.ordinal);
}

// Every view of a cache can be exported in each form, and says what the view does.
inline void expect_dlpack_of_views(const Cache& cache) {
    kvpages_device device{};
    must(kvpages_cache_get_device(cache.get(), &device));
    for (std::size_t layer = 0; layer < kvpages_cache_num_layers(cache.get()); ++layer) {
        for (std::size_t i = 0; i < kvpages_cache_num_views(cache.get(), layer); ++i) {
            SCOPED_TRACE("view " + std::to_string(i) + " of layer " + std::to_string(layer));
            const kvpages_tensor wanted = view(cache, layer, i);
            for (const std::uint32_t flags : {0u, KVPAGES_DLPACK_READ_ONLY + 0u}) {
                const DlpackTensor tensor = dlpack(cache, layer, i, flags);
                EXPECT_EQ(tensor->version.major, 1u);
                EXPECT_EQ(tensor->version.minor, 1u);
                EXPECT_EQ(tensor->flags, flags == 0 ? 0 : DLPACK_FLAG_BITMASK_READ_ONLY);
                ASSERT_NE(tensor->deleter, nullptr);
                expect_same(tensor->dl_tensor, wanted, device);
            }
            const UnversionedDlpackTensor tensor = unversioned_dlpack(cache, layer, i);
            ASSERT_NE(tensor->deleter, nullptr);
            expect_same(tensor->dl_tensor, wanted, device);
        }
    }
}

}  // namespace support

#endif
