// The engine's kernels. They know how a page lies: 16 tokens side by side for each element of a
// head, so that one load brings an element of 16 tokens, one to a lane.
//
//   block | kv | head | content | token
#pragma once

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace own_layout {

constexpr std::size_t kLanes = 16;  ///< tokens of a kernel block

/// The contract: all that kvpages has to know of these kernels.
inline kvpages::Backend kernels() {
    kvpages::BackendConfig config;
    config.name = "LANES";
    config.layout = "block | kv | head | content | token";
    config.kernel_block_sizes = {kLanes};
    config.alignment_bytes = kLanes * sizeof(float);  // a row of lanes is one aligned load
    config.follows_block_stride = true;               // Pages::block_stride
    return kvpages::Backend(config);
}

/// One layer's pages, as the kernels are given them.
struct Pages {
    float* data = nullptr;
    std::size_t block_stride = 0;  ///< elements from kernel block to kernel block
    std::size_t num_heads = 0;
    std::size_t head_size = 0;

    explicit Pages(const kvpages::Tensor& view)
        : data(static_cast<float*>(view.data)),
          block_stride(static_cast<std::size_t>(view.strides[0])),
          num_heads(static_cast<std::size_t>(view.shape[2])),
          head_size(static_cast<std::size_t>(view.shape[3])) {}

    /// The lanes of one element: kLanes tokens of a kernel block.
    float* lanes(std::size_t block, std::size_t kv, std::size_t head, std::size_t element) const {
        return data + block * block_stride +
               ((kv * num_heads + head) * head_size + element) * kLanes;
    }
};

/// Stores a token's keys and values, [heads, head_size] each, in a slot.
inline void store(const Pages& pages, std::int64_t slot, const float* keys, const float* values) {
    const std::size_t block = static_cast<std::size_t>(slot) / kLanes;
    const std::size_t lane = static_cast<std::size_t>(slot) % kLanes;
    for (std::size_t head = 0; head < pages.num_heads; ++head) {
        for (std::size_t element = 0; element < pages.head_size; ++element) {
            pages.lanes(block, 0, head, element)[lane] = keys[head * pages.head_size + element];
            pages.lanes(block, 1, head, element)[lane] = values[head * pages.head_size + element];
        }
    }
}

/// The weights of a request's tokens for one query: softmax of the scaled products.
inline std::vector<float> weights(const Pages& pages, const std::int32_t* table, std::size_t first,
                                  std::size_t len, std::size_t head, const float* query) {
    std::vector<float> all((len + kLanes - 1) / kLanes * kLanes);
    const float scale = 1 / std::sqrt(static_cast<float>(pages.head_size));
    for (std::size_t begin = 0; begin < len; begin += kLanes) {
        const auto block = static_cast<std::size_t>(table[begin / kLanes]);
        std::array<float, kLanes> sums{};
        for (std::size_t element = 0; element < pages.head_size; ++element) {
            const float* keys = pages.lanes(block, 0, head, element);
            for (std::size_t lane = 0; lane < kLanes; ++lane)
                sums[lane] += query[element] * keys[lane];
        }
        for (std::size_t lane = 0; lane < kLanes; ++lane) all[begin + lane] = sums[lane] * scale;
    }
    float largest = -std::numeric_limits<float>::infinity();
    for (std::size_t token = first; token < len; ++token) largest = std::max(largest, all[token]);
    float sum = 0;
    for (std::size_t token = 0; token < all.size(); ++token) {
        const bool seen = token >= first && token < len;  // lanes past the end hold anything
        all[token] = seen ? std::exp(all[token] - largest) : 0;
        sum += all[token];
    }
    for (float& weight : all) weight /= sum;
    return all;
}

/// Attention of one query of one head over tokens `first` to `len` - 1 of a request.
inline void attend(const Pages& pages, const std::int32_t* table, std::size_t first,
                   std::size_t len, std::size_t head, const float* query, float* out) {
    const std::vector<float> weight = weights(pages, table, first, len, head, query);
    for (std::size_t element = 0; element < pages.head_size; ++element) {
        float sum = 0;
        for (std::size_t begin = first / kLanes * kLanes; begin < len; begin += kLanes) {
            const auto block = static_cast<std::size_t>(table[begin / kLanes]);
            const float* values = pages.lanes(block, 1, head, element);
            const std::size_t lanes = std::min(kLanes, len - begin);
            for (std::size_t lane = 0; lane < lanes; ++lane)
                sum += weight[begin + lane] * values[lane];
        }
        out[element] = sum;
    }
}

}  // namespace own_layout
