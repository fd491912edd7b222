// Number formats: one element to f32 and back, by bits alone.
//
// Rounding is to nearest, ties to even. f16 and bf16 overflow to infinity; fp8 saturates at its
// largest number, also from infinity. NaN stays NaN.
#ifndef KVPAGES_KERNELS_CONVERT_H
#define KVPAGES_KERNELS_CONVERT_H

#include "port.h"

namespace kvp {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kQuiet = 0x00400000u;
constexpr float kLargest = 3.40282346638528859812e38f;

KVP_FN bool is_nan(float value) { return (bits_as<uint32_t>(value) & kMagnitude) > kInfinity; }

KVP_FN float magnitude(float value) {
    return bits_as<float>(bits_as<uint32_t>(value) & kMagnitude);
}

#if defined(__CUDA_ARCH__)
// A device has one NaN, where x86 keeps the operand's.
KVP_FN float with_nan(float result, float first, float second) {
    if (!is_nan(result)) return result;
    asm volatile("" : "+f"(second));  // else loops are compiled twice, for a scale that is a NaN
    const float other = is_nan(second) ? second : bits_as<float>(0x80000000u | kInfinity);
    return bits_as<float>(bits_as<uint32_t>(is_nan(first) ? first : other) | kQuiet);
}
#else
KVP_FN float with_nan(float result, float, float) { return result; }
#endif

// Of a number and its scale, with the bits that x86 gives a NaN.
KVP_FN float product(float value, float scale) { return with_nan(value * scale, value, scale); }
KVP_FN float quotient(float value, float scale) { return with_nan(value / scale, value, scale); }

// The code, without its sign, of a magnitude that is no NaN, in a format of `mantissa_bits` and
// the exponent bias `bias`. Numbers beyond the format give codes beyond its own.
template <uint32_t mantissa_bits, uint32_t bias>
KVP_FN uint32_t encode_magnitude(uint32_t bits) {
    constexpr uint32_t dropped = 23u - mantissa_bits;
    constexpr uint32_t smallest_normal = (128u - bias) << 23u;
    // Adding 2^(23 + the exponent of the last subnormal bit) leaves the rounded count of those
    // bits in the mantissa.
    constexpr uint32_t magic = (128u - bias + dropped) << 23u;
    const float sum = bits_as<float>(bits) + bits_as<float>(magic);
    const uint32_t subnormal = bits_as<uint32_t>(sum) - magic;
    const uint32_t odd = (bits >> dropped) & 1u;
    const uint32_t rounded = bits + ((1u << (dropped - 1u)) - 1u) + odd;
    const uint32_t normal = (rounded >> dropped) - ((127u - bias) << mantissa_bits);
    return bits < smallest_normal ? subnormal : normal;
}

struct F32 {
    static constexpr uint64_t bytes = 4;
    static constexpr bool is_scaled = false;
    static KVP_FN float get(const byte* from) { return load<float>(from); }
    static KVP_FN void put(byte* to, float value) { store(to, value); }
};

struct F16 {
    static constexpr uint64_t bytes = 2;
    static constexpr bool is_scaled = false;

    static KVP_FN float decode(uint32_t code) {
        const uint32_t sign = (code & 0x8000u) << 16u;
        const uint32_t rest = code & 0x7fffu;
        // 2^-24 is what the last bit of a subnormal counts.
        const float subnormal = static_cast<float>(rest) * 5.9604644775390625e-8f;
        const uint32_t quiet = rest > 0x7c00u ? kQuiet : 0u;
        const uint32_t special = kInfinity | (rest & 0x3ffu) << 13u | quiet;
        uint32_t bits = (rest << 13u) + (112u << 23u);
        bits = rest < 0x400u ? bits_as<uint32_t>(subnormal) : bits;
        bits = rest >= 0x7c00u ? special : bits;
        return bits_as<float>(sign | bits);
    }

    static KVP_FN uint16_t encode(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t sign = (bits >> 16u) & 0x8000u;
        const uint32_t rest = bits & kMagnitude;
        uint32_t code;
        if (rest > kInfinity) {
            code = 0x7e00u | ((rest >> 13u) & 0x3ffu);
        } else {
            code = encode_magnitude<10, 15>(rest);
            code = code < 0x7c00u ? code : 0x7c00u;
        }
        return static_cast<uint16_t>(sign | code);
    }

    static KVP_FN float get(const byte* from) { return decode(load<uint16_t>(from)); }
    static KVP_FN void put(byte* to, float value) { store(to, encode(value)); }
};

struct Bf16 {
    static constexpr uint64_t bytes = 2;
    static constexpr bool is_scaled = false;

    static KVP_FN float decode(uint32_t code) {
        const uint32_t bits = code << 16u;
        return bits_as<float>(bits | ((bits & kMagnitude) > kInfinity ? kQuiet : 0u));
    }

    static KVP_FN uint16_t encode(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t odd = (bits >> 16u) & 1u;
        const uint32_t rounded = (bits + 0x7fffu + odd) >> 16u;
        const uint32_t nan = (bits >> 16u) | 0x40u;
        return static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? nan : rounded);
    }

    static KVP_FN float get(const byte* from) { return decode(load<uint16_t>(from)); }
    static KVP_FN void put(byte* to, float value) { store(to, encode(value)); }
};

// Four exponent bits; no infinity, one NaN.
struct F8E4m3 {
    static constexpr uint64_t bytes = 1;
    static constexpr bool is_scaled = true;
    static constexpr float largest = 448.0f;

    static KVP_FN float decode(uint32_t code) {
        const uint32_t sign = (code & 0x80u) << 24u;
        const uint32_t rest = code & 0x7fu;
        const float subnormal = static_cast<float>(rest) * 0.001953125f;
        uint32_t bits = (rest << 20u) + (120u << 23u);
        bits = rest < 8u ? bits_as<uint32_t>(subnormal) : bits;
        bits = rest == 0x7fu ? kInfinity | kQuiet : bits;
        return bits_as<float>(sign | bits);
    }

    static KVP_FN byte encode(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t sign = (bits >> 24u) & 0x80u;
        const uint32_t rest = bits & kMagnitude;
        uint32_t code = encode_magnitude<3, 7>(rest);
        code = code < 0x7eu ? code : 0x7eu;
        return static_cast<byte>(sign | (rest > kInfinity ? 0x7fu : code));
    }

    static KVP_FN float get(const byte* from) { return decode(*from); }
    static KVP_FN void put(byte* to, float value) { *to = encode(value); }
};

// Five exponent bits: the upper half of an f16.
struct F8E5m2 {
    static constexpr uint64_t bytes = 1;
    static constexpr bool is_scaled = true;
    static constexpr float largest = 57344.0f;

    static KVP_FN float decode(uint32_t code) { return F16::decode(code << 8u); }

    static KVP_FN byte encode(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t sign = (bits >> 24u) & 0x80u;
        const uint32_t rest = bits & kMagnitude;
        uint32_t code = encode_magnitude<2, 15>(rest);
        code = code < 0x7bu ? code : 0x7bu;
        return static_cast<byte>(sign | (rest > kInfinity ? 0x7fu : code));
    }

    static KVP_FN float get(const byte* from) { return decode(*from); }
    static KVP_FN void put(byte* to, float value) { *to = encode(value); }
};

// The nearest whole number to value / scale, at most `limit` either way; 0 when there is no scale.
KVP_FN int32_t quantise(float value, float scale, float limit) {
    if (!(scale > 0.0f)) {
        return 0;
    }
    float whole = value / scale;
    whole = whole < limit ? whole : limit;
    whole = whole > -limit ? whole : -limit;
    // 1.5 * 2^23: the sum's last bit counts ones, so that adding it rounds.
    return static_cast<int32_t>(bits_as<uint32_t>(whole + 12582912.0f)) - 0x4b400000;
}

}  // namespace kvp

#endif
