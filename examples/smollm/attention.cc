#include "attention.h"

#include "math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace smollm {

namespace {

// --- one stored element as a float ------------------------------------------------------------

float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// A float with `exponent_bits` and `mantissa_bits`, moved to their places in an f32 and scaled
/// by the difference of the biases, which is exact and gets subnormal numbers right.
template <int exponent_bits, int mantissa_bits>
float widened(std::uint32_t bits) {
    constexpr int size = exponent_bits + mantissa_bits;
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    const float magnitude = from_bits((bits & ((1u << size) - 1)) << (23 - mantissa_bits)) *
                            from_bits(static_cast<std::uint32_t>(127 + 127 - bias) << 23);
    return bits >> size ? -magnitude : magnitude;
}

struct F32 {
    using Stored = float;
    static float load(float value) { return value; }
};
// Infinity and NaN are not needed here: keys and values are finite, and kvpages saturates fp8.
struct F16 {
    using Stored = std::uint16_t;
    static float load(std::uint16_t value) { return widened<5, 10>(value); }
};
struct Bf16 {
    using Stored = std::uint16_t;
    static float load(std::uint16_t value) { return from_bits(std::uint32_t{value} << 16); }
};
struct E4m3 {
    using Stored = std::uint8_t;
    static float load(std::uint8_t value) { return widened<4, 3>(value); }
};
struct Int8 {
    using Stored = std::int8_t;
    static float load(std::int8_t value) { return static_cast<float>(value); }
};

// --- rows of one head -------------------------------------------------------------------------

/// What a key or a value of `size` elements at element `at` of the view is, in float32. It has a
/// scale of its own at element `scale_at` where the view says so. That of fp8 for a whole tensor is
/// 1, as kv_cache.cc stores it.
template <typename Format>
void load_row(const KvView& view, std::uint64_t at, std::uint64_t scale_at, std::size_t size,
              float* row) {
    const auto* stored = static_cast<const typename Format::Stored*>(view.tensor.data) + at;
    const std::uint64_t stride = view.axes.content_stride;
    if (stride == 1) {  // a loop of its own, so that it becomes vector instructions
        for (std::size_t i = 0; i < size; ++i) row[i] = Format::load(stored[i]);
    } else {
        for (std::size_t i = 0; i < size; ++i) row[i] = Format::load(stored[i * stride]);
    }
    if (view.axes.scale_elements == 0) return;
    float scale;
    std::memcpy(&scale, static_cast<const typename Format::Stored*>(view.tensor.data) + scale_at,
                sizeof scale);
    for (std::size_t i = 0; i < size; ++i) row[i] *= scale;
}

/// Keys and values of one head of one request, one row for each of its tokens.
struct Rows {
    std::vector<float> keys, values;
};

template <typename Format>
void load_rows(const KvView& view, const StepMetadata& step, std::size_t request, std::size_t head,
               std::size_t num_tokens, std::size_t head_size, Rows& rows) {
    rows.keys.resize(num_tokens * head_size);
    rows.values.resize(num_tokens * head_size);
    const std::size_t slots = view.axes.kernel_block_slots;
    for (std::size_t token = 0; token < num_tokens; ++token) {
        const auto block =
            static_cast<std::uint64_t>(step.block_table.at<std::int32_t>(request, token / slots));
        const std::uint64_t slot = token % slots;
        load_row<Format>(view, view.axes.key(block, slot, head),
                         view.axes.key_scale(block, slot, head), head_size,
                         &rows.keys[token * head_size]);
        load_row<Format>(view, view.axes.value(block, slot, head),
                         view.axes.value_scale(block, slot, head), head_size,
                         &rows.values[token * head_size]);
    }
}

using LoadRows = decltype(&load_rows<F32>);

LoadRows loader(kvpages::Dtype dtype) {
    switch (dtype) {
        case kvpages::Dtype::f32: return load_rows<F32>;
        case kvpages::Dtype::f16: return load_rows<F16>;
        case kvpages::Dtype::bf16: return load_rows<Bf16>;
        case kvpages::Dtype::f8_e4m3fn:
        case kvpages::Dtype::u8: return load_rows<E4m3>;
        case kvpages::Dtype::i8: return load_rows<Int8>;
        default: break;
    }
    throw std::runtime_error(std::string("no attention over a cache of ") + kvpages::name(dtype));
}

// --- attention --------------------------------------------------------------------------------

/// One query attends to `num_tokens` rows.
void attend_one(const float* query, const Rows& rows, std::size_t num_tokens, std::size_t head_size,
                std::vector<float>& weights, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(head_size));
    weights.resize(num_tokens);
    float largest = -INFINITY;
    for (std::size_t token = 0; token < num_tokens; ++token) {
        weights[token] = scale * dot(query, &rows.keys[token * head_size], head_size);
        largest = std::max(largest, weights[token]);
    }
    float sum = 0;
    for (float& weight : weights) sum += weight = std::exp(weight - largest);
    std::fill_n(out, head_size, 0.0f);
    for (std::size_t token = 0; token < num_tokens; ++token) {
        const float weight = weights[token] / sum;
        const float* value = &rows.values[token * head_size];
        for (std::size_t i = 0; i < head_size; ++i) out[i] += weight * value[i];
    }
}

}  // namespace

void attend(const AttentionShape& shape, const KvView& view, const StepMetadata& step,
            const float* queries, float* out, ThreadPool& threads) {
    const LoadRows load = loader(view.tensor.dtype);
    const std::size_t queries_per_head = shape.num_heads / shape.num_kv_heads;
    const std::size_t row_size = shape.num_heads * shape.head_size;
    threads.run(step.num_requests * shape.num_kv_heads, [&](std::size_t begin, std::size_t end) {
        thread_local Rows rows;  // they keep their memory from step to step
        thread_local std::vector<float> weights;
        for (std::size_t work = begin; work < end; ++work) {
            const std::size_t request = work / shape.num_kv_heads;
            const std::size_t kv_head = work % shape.num_kv_heads;
            const auto first = static_cast<std::size_t>(step.query_start[request]);
            const auto last = static_cast<std::size_t>(step.query_start[request + 1]);
            const auto seq_len = static_cast<std::size_t>(step.seq_lens[request]);
            load(view, step, request, kv_head, seq_len, shape.head_size, rows);
            for (std::size_t token = first; token < last; ++token) {
                const std::size_t num_seen = seq_len - (last - 1 - token);
                for (std::size_t q = 0; q < queries_per_head; ++q) {
                    const std::size_t at =
                        token * row_size + (kv_head * queries_per_head + q) * shape.head_size;
                    attend_one(queries + at, rows, num_seen, shape.head_size, weights, out + at);
                }
            }
        }
    });
}

}  // namespace smollm
