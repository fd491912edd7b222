// What the configs of specs and plan cases share.
#pragma once

#include <cstdint>
#include <limits>

#include "json.h"

namespace conformance {

// max_in_flight_tokens: a step's tokens, for every batch that may be under way.
inline std::uint64_t tokens_in_flight(const Json& config) {
    const std::uint64_t tokens = config.at("max_num_batched_tokens");
    const std::uint64_t batches = config.at("max_concurrent_batches");
    if (batches != 0 && tokens > std::numeric_limits<std::uint64_t>::max() / batches) {
        throw Inexpressible("max_num_batched_tokens x max_concurrent_batches has over 64 bits");
    }
    return tokens * batches;
}

inline std::uint64_t context_parallel_size(const Json& config) {
    const std::uint64_t size = config.at("dcp_size");
    if (size == 0) {
        throw Inexpressible("dcp_size of 0 cannot be told from 1");
    }
    return size;
}

}  // namespace conformance
