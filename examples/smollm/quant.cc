#include "quant.h"

#include <cstddef>
#include <stdexcept>

namespace smollm {
namespace {

float read_half(const std::uint8_t* at) {
    std::uint16_t half;
    std::memcpy(&half, at, sizeof half);
    return half_to_float(half);
}

/// `out = scale * numbers + minimum`, for 16 numbers.
void scale_bytes(const std::uint8_t* numbers, float scale, float minimum, float* out) {
#ifdef __AVX512F__
    // Extensions of GCC and Clang. With registers this wide GCC makes code of it that is four
    // times faster than of the loop below; with narrower ones, code that is much slower.
    typedef std::uint8_t Bytes __attribute__((vector_size(16)));
    typedef std::int32_t Ints __attribute__((vector_size(64)));
    typedef float Floats __attribute__((vector_size(64)));
    Bytes bytes;
    std::memcpy(&bytes, numbers, sizeof bytes);
    const auto ints = __builtin_convertvector(bytes, Ints);
    const Floats scaled = __builtin_convertvector(ints, Floats) * scale + minimum;
    std::memcpy(out, &scaled, sizeof scaled);
#else
    for (std::size_t i = 0; i < 16; ++i) out[i] = scale * static_cast<float>(numbers[i]) + minimum;
#endif
}

/// A scale, a minimum, and 32 numbers of 4 bits: the low halves of 16 bytes, then the high ones.
struct Q4_1 {
    static constexpr std::size_t kSize = 32;
    static constexpr std::size_t kBytes = 20;

    static void dequantise(const std::uint8_t* block, float* out) {
        const float scale = read_half(block);
        const float minimum = read_half(block + 2);
        std::uint8_t low[16], high[16];
        for (std::size_t i = 0; i < 16; ++i) {
            low[i] = block[4 + i] & 15;
            high[i] = static_cast<std::uint8_t>(block[4 + i] >> 4);
        }
        scale_bytes(low, scale, minimum, out);
        scale_bytes(high, scale, minimum, out + 16);
    }
};

/// A scale, and 32 signed bytes.
struct Q8_0 {
    static constexpr std::size_t kSize = 32;
    static constexpr std::size_t kBytes = 34;

    static void dequantise(const std::uint8_t* __restrict block, float* __restrict out) {
        const float scale = read_half(block);
        for (std::size_t i = 0; i < kSize; ++i) {
            out[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
        }
    }
};

/// 256 numbers of 6 bits: 4 low bits each, 2 high bits each, a signed scale for each 16 numbers,
/// and a scale of the scales. In each half, low bits come as in Q4_1 with runs of 64 numbers, and
/// a byte has the high bits of 4 numbers that are 32 apart.
struct Q6_K {
    static constexpr std::size_t kSize = 256;
    static constexpr std::size_t kBytes = 210;

    static void dequantise(const std::uint8_t* __restrict block, float* __restrict out) {
        const std::uint8_t* scales = block + 192;
        const float scale = read_half(block + 208);
        for (std::size_t run = 0; run < 8; ++run, out += 32) {
            const std::size_t half = run / 4;
            const std::size_t quarter = run % 4;
            const std::uint8_t* low = block + half * 64 + quarter % 2 * 32;
            const std::uint8_t* high = block + 128 + half * 32;
            for (std::size_t i = 0; i < 32; ++i) {
                const int low_bits = low[i] >> (quarter / 2 * 4) & 15;
                const int high_bits = high[i] >> (quarter * 2) & 3;
                const auto scale_of_run = static_cast<std::int8_t>(scales[run * 2 + i / 16]);
                out[i] = scale * static_cast<float>(scale_of_run) *
                         static_cast<float>((low_bits | high_bits << 4) - 32);
            }
        }
    }
};

struct F16 {
    static constexpr std::size_t kSize = 1;
    static constexpr std::size_t kBytes = 2;

    static void dequantise(const std::uint8_t* block, float* out) { *out = read_half(block); }
};

template <class Type>
void dequantise_blocks(const GgufTensor& tensor, std::uint64_t row, float* out) {
    const std::uint64_t num_blocks = tensor.num_columns() / Type::kSize;
    const std::uint8_t* block = tensor.data + row * num_blocks * Type::kBytes;
    for (std::uint64_t i = 0; i < num_blocks; ++i) {
        Type::dequantise(block + i * Type::kBytes, out + i * Type::kSize);
    }
}

}  // namespace

void dequantise_row(const GgufTensor& tensor, std::uint64_t row, float* out) {
    switch (tensor.type) {
        case TensorType::f32: {
            const std::uint64_t size_bytes = tensor.num_columns() * sizeof(float);
            std::memcpy(out, tensor.data + row * size_bytes, size_bytes);
            return;
        }
        case TensorType::f16: return dequantise_blocks<F16>(tensor, row, out);
        case TensorType::q4_1: return dequantise_blocks<Q4_1>(tensor, row, out);
        case TensorType::q8_0: return dequantise_blocks<Q8_0>(tensor, row, out);
        case TensorType::q6_k: return dequantise_blocks<Q6_K>(tensor, row, out);
    }
    throw std::invalid_argument("tensor " + tensor.name + " has an unknown type");
}

}  // namespace smollm
