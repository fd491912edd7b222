// To be compiled with -ffp-contract=off. Compilers else make one rounding of a multiplication and
// an addition where they see fit, and need not see it alike for every shape of a tile. (GCC 12
// does so even then, in Rope::rotate() with -march=native: a token's bits are the same in every
// batch there too, but not those of another build.)
#include "math.h"

#include "quant.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace smollm {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
constexpr std::size_t kVectorSize = kVectorBytes / sizeof(float);

/// An extension of GCC and Clang: loops over lanes that are always made vector instructions.
typedef float Vector __attribute__((vector_size(kVectorBytes)));

Vector load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

struct Lanes {
    static constexpr std::size_t kNumVectors = kNumLanes / kVectorSize;
    Vector vectors[kNumVectors];

    float sum() const {
        float lanes[kNumLanes];
        std::memcpy(lanes, vectors, sizeof lanes);
        for (std::size_t half = kNumLanes / 2; half > 0; half /= 2) {
            for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
        }
        return lanes[0];
    }
};

/// What is loaded once serves a whole tile; its sums should fit in the registers.
constexpr std::size_t kTileRows = 4;
constexpr std::size_t kTileTokens = 4;

template <std::size_t kNumRows, std::size_t kNumTokens>
void multiply_tile(const float* rows, const float* input, std::size_t num_columns, float* output,
                   std::size_t output_stride) {
    Lanes sums[kNumTokens][kNumRows] = {};
    for (std::size_t column = 0; column < num_columns; column += kNumLanes) {
#pragma GCC unroll 16
        for (std::size_t i = 0; i < Lanes::kNumVectors; ++i) {
            const std::size_t at = column + i * kVectorSize;
            Vector weights[kNumRows];
#pragma GCC unroll 16
            for (std::size_t row = 0; row < kNumRows; ++row) {
                weights[row] = load(rows + row * num_columns + at);
            }
#pragma GCC unroll 16
            for (std::size_t token = 0; token < kNumTokens; ++token) {
                const Vector x = load(input + token * num_columns + at);
#pragma GCC unroll 16
                for (std::size_t row = 0; row < kNumRows; ++row) {
                    sums[token][row].vectors[i] += weights[row] * x;
                }
            }
        }
    }
    for (std::size_t token = 0; token < kNumTokens; ++token) {
        for (std::size_t row = 0; row < kNumRows; ++row) {
            output[token * output_stride + row] = sums[token][row].sum();
        }
    }
}

template <std::size_t kNumRows>
void multiply_rows(const float* rows, const float* input, std::size_t num_columns,
                   std::size_t num_tokens, float* output, std::size_t output_stride) {
    std::size_t token = 0;
    for (; token + kTileTokens <= num_tokens; token += kTileTokens) {
        multiply_tile<kNumRows, kTileTokens>(rows, input + token * num_columns, num_columns,
                                             output + token * output_stride, output_stride);
    }
    for (; token < num_tokens; ++token) {
        multiply_tile<kNumRows, 1>(rows, input + token * num_columns, num_columns,
                                   output + token * output_stride, output_stride);
    }
}

}  // namespace

float dot(const float* a, const float* b, std::size_t size) {
    float result;
    multiply_tile<1, 1>(a, b, size, &result, 1);
    return result;
}

void matmul(const GgufTensor& weights, const float* input, std::size_t num_tokens, float* output,
            ThreadPool& threads) {
    const auto num_columns = static_cast<std::size_t>(weights.num_columns());
    const auto num_rows = static_cast<std::size_t>(weights.num_rows());
    if (num_columns % kNumLanes != 0) {
        throw std::invalid_argument("tensor " + weights.name + " has " +
                                    std::to_string(num_columns) + " columns, not a multiple of " +
                                    std::to_string(kNumLanes));
    }
    const std::size_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    threads.run(num_tiles, [&](std::size_t begin, std::size_t end) {
        thread_local AlignedFloats rows;
        rows.resize(kTileRows * num_columns);
        for (std::size_t tile = begin; tile < end; ++tile) {
            const std::size_t first = tile * kTileRows;
            const std::size_t last = std::min(first + kTileRows, num_rows);
            for (std::size_t row = first; row < last; ++row) {
                dequantise_row(weights, row, rows.data() + (row - first) * num_columns);
            }
            if (last - first == kTileRows) {
                multiply_rows<kTileRows>(rows.data(), input, num_columns, num_tokens,
                                         output + first, num_rows);
                continue;
            }
            for (std::size_t row = first; row < last; ++row) {
                multiply_rows<1>(rows.data() + (row - first) * num_columns, input, num_columns,
                                 num_tokens, output + row, num_rows);
            }
        }
    });
}

void rms_norm(const float* input, const std::vector<float>& weights, float eps, float* output) {
    const std::size_t size = weights.size();
    const float mean_square = dot(input, input, size) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(mean_square + eps);
    for (std::size_t i = 0; i < size; ++i) output[i] = input[i] * scale * weights[i];
}

void swiglu(float* gate, const float* up, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
}

void add(float* output, const float* input, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) output[i] += input[i];
}

Rope::Rope(std::size_t head_size, float base) {
    for (std::size_t i = 0; i < head_size; i += 2) {
        const float exponent = static_cast<float>(i) / static_cast<float>(head_size);
        frequencies_.push_back(1.0f / std::pow(base, exponent));
    }
}

void Rope::make_rotation(std::int64_t position, float* rotation) const {
    for (std::size_t i = 0; i < frequencies_.size(); ++i) {
        const float angle = static_cast<float>(position) * frequencies_[i];
        rotation[2 * i] = std::cos(angle);
        rotation[2 * i + 1] = std::sin(angle);
    }
}

void Rope::rotate(const float* rotation, std::size_t num_heads, float* heads) const {
    const std::size_t head_size = frequencies_.size() * 2;
    for (std::size_t head = 0; head < num_heads; ++head, heads += head_size) {
        for (std::size_t i = 0; i < head_size; i += 2) {
            const float cosine = rotation[i];
            const float sine = rotation[i + 1];
            const float x = heads[i];
            const float y = heads[i + 1];
            heads[i] = x * cosine - y * sine;
            heads[i + 1] = x * sine + y * cosine;
        }
    }
}

}  // namespace smollm
