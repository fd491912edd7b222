// How elements are stored, as numbers. src/kernels/mod.rs has the same.
#ifndef KVPAGES_KERNELS_FORMS_H
#define KVPAGES_KERNELS_FORMS_H

#include "port.h"
#include "rows.h"

namespace kvp {

enum RowType : uint32_t { kRowF32 = 0, kRowF16 = 1, kRowBf16 = 2 };
enum Form : uint32_t {
    kSame = 0,
    kF32 = 1,
    kF16 = 2,
    kBf16 = 3,
    kF8E4m3 = 4,
    kF8E5m2 = 5,
    kScaledE4m3 = 6,
    kScaledE5m2 = 7,
    kScaledInt8 = 8,
    kScaledInt4 = 9,
    kPackedLatent = 10,
};

}  // namespace kvp

#endif
