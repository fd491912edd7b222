// The numbers of quantised tensors.
#pragma once

#include "gguf.h"

#include <cstdint>
#include <cstring>

namespace smollm {

/// Exact for every half, those without an inverse of their size (subnormal ones) included.
inline float half_to_float(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7fffu;
    // A float's exponent is 3 bits wider and biased by 112 more. Multiplying adds these 112, and
    // makes normal floats of subnormal halves. Infinity and NaN have the largest exponent in both.
    std::uint32_t bits = magnitude << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    std::memcpy(&bits, &value, sizeof bits);
    if (magnitude >= 0x7c00u) bits |= 0x7f800000u;
    bits |= (half & 0x8000u) << 16;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// Writes the `num_columns()` numbers of a row to `out`. No step rounds more than once, so that
/// they are the same bits whatever the compiler makes of it.
void dequantise_row(const GgufTensor& tensor, std::uint64_t row, float* out);

}  // namespace smollm
