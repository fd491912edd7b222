// Attention over a paged cache, read through the view of a layer.
#pragma once

#include "threads.h"

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>

namespace smollm {

/// Heads of a layer.
struct AttentionShape {
    std::size_t num_heads = 0;
    std::size_t num_kv_heads = 0;  ///< divides num_heads
    std::size_t head_size = 0;
};

/// Where a layer's keys and values lie.
struct KvView {
    kvpages::Tensor tensor;
    kvpages::ViewAxes axes;
};

/// What kernels are told of a step.
struct StepMetadata {
    std::size_t num_requests = 0;
    const std::int32_t* query_start = nullptr;  ///< num_requests + 1
    const std::int32_t* seq_lens = nullptr;     ///< with the tokens of the step
    kvpages::Tensor block_table;                ///< kernel blocks of each request
    kvpages::Span<const std::int64_t> slots;    ///< where each token of the step is stored
};

/// Each token of the step attends to those of its request up to itself. Queries and results are
/// [tokens of the step][num_heads * head_size].
///
/// What comes out for a token depends on its query and on the numbers stored for its request alone,
/// to the last bit: not on the layout, the block size, the other requests or the threads.
void attend(const AttentionShape& shape, const KvView& view, const StepMetadata& step,
            const float* queries, float* out, ThreadPool& threads);

}  // namespace smollm
