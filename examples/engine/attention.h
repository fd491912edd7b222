// Attention in plain C++, over rows of keys and values that may lie anywhere.
#pragma once

#include "models.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace engine {

inline float from_bf16(std::uint16_t value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

/// Rounds to the nearest, of two equally near ones to the even. Not for NaN.
inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Reads keys and values of f32 or bf16 in a view, whatever its backend's layout is.
class KvView {
public:
    KvView(const kvpages::Tensor& view, const kvpages::ViewAxes& axes)
        : data_(view.data), is_bf16_(view.dtype == kvpages::Dtype::bf16), axes_(axes) {}

    void load_key(std::uint64_t slot, std::uint64_t head, float* row) const {
        load(axes_.key(slot / slots(), slot % slots(), head), axes_.key_elements, row);
    }

    void load_value(std::uint64_t slot, std::uint64_t head, float* row) const {
        load(axes_.value(slot / slots(), slot % slots(), head), axes_.value_elements, row);
    }

private:
    std::uint64_t slots() const { return axes_.kernel_block_slots; }

    void load(std::uint64_t at, std::uint64_t count, float* row) const {
        for (std::uint64_t i = 0; i < count; ++i, at += axes_.content_stride) {
            row[i] = is_bf16_ ? from_bf16(static_cast<const std::uint16_t*>(data_)[at])
                              : static_cast<const float*>(data_)[at];
        }
    }

    const void* data_;
    bool is_bf16_;
    kvpages::ViewAxes axes_;
};

/// Reads one key or one value of a token and head into `row`.
using LoadRow = std::function<void(std::uint64_t token, std::uint64_t head, float* row)>;

/// The keys and values of one request, wherever they lie.
struct Rows {
    LoadRow load_key;
    LoadRow load_value;
};

inline float dot(const float* a, const float* b, std::uint64_t size) {
    constexpr std::uint64_t lanes = 8;  // sums that do not wait for each other; divides head sizes
    float sums[lanes] = {};
    for (std::uint64_t i = 0; i < size; i += lanes) {
        for (std::uint64_t lane = 0; lane < lanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    return std::accumulate(sums, sums + lanes, 0.0f);
}

/// Turns scores into weights that add up to 1.
inline void softmax(std::vector<float>& scores) {
    const float largest = *std::max_element(scores.begin(), scores.end());
    float sum = 0;
    for (float& score : scores) sum += score = std::exp(score - largest);
    for (float& score : scores) score /= sum;
}

/// One token's attention to tokens `first` to `last`. Heads of `query` and of the result lie one
/// after another. Rows are loaded before anything is computed, so the order of the arithmetic does
/// not depend on where they lie, and equal rows give equal bits.
inline std::vector<float> attend(const Layer& layer, const std::vector<float>& query,
                                 std::uint64_t first, std::uint64_t last, const Rows& rows) {
    const std::uint64_t size = layer.head_size;
    const std::uint64_t queries_per_head = layer.num_query_heads / layer.num_kv_heads;
    const float scale = 1 / std::sqrt(static_cast<float>(size));
    std::vector<float> out(query.size()), row(size);
    for (std::uint64_t head = 0; head < layer.num_kv_heads; ++head) {
        const std::uint64_t first_query = head * queries_per_head;
        std::vector<std::vector<float>> weights(queries_per_head);
        for (std::uint64_t token = first; token <= last; ++token) {
            rows.load_key(token, head, row.data());
            for (std::uint64_t q = 0; q < queries_per_head; ++q) {
                const float* one = &query[(first_query + q) * size];
                weights[q].push_back(scale * dot(one, row.data(), size));
            }
        }
        for (std::vector<float>& scores : weights) softmax(scores);
        for (std::uint64_t token = first; token <= last; ++token) {
            rows.load_value(token, head, row.data());
            for (std::uint64_t q = 0; q < queries_per_head; ++q) {
                const float weight = weights[q][token - first];
                float* one = &out[(first_query + q) * size];
                for (std::uint64_t i = 0; i < size; ++i) one[i] += weight * row[i];
            }
        }
    }
    return out;
}

}  // namespace engine
