// Requests, and the tokens of them that run together in one step.
#pragma once

#include "blocks.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace engine {

/// What a user asks for.
struct Arrival {
    std::uint64_t prompt_length = 0;
    std::uint64_t output_length = 0;
    std::optional<std::size_t> fork_of;  ///< has no prompt: goes on from this arrival's
};

struct Request {
    std::size_t number = 0;
    std::size_t row = 0;                ///< in the tables
    std::vector<std::int32_t> tokens;   ///< the prompt, and what was sampled
    std::uint64_t prompt_length = 0;
    std::uint64_t length = 0;           ///< tokens in the end
    std::uint64_t num_cached = 0;       ///< tokens whose keys, values and states are stored
    std::vector<HeldBlocks> blocks;     ///< by group

    bool is_past_prompt() const { return num_cached >= prompt_length; }
    bool is_done() const { return tokens.size() == length; }
};

/// The tokens of one step, one request after another, as kvpages and kernels take them.
struct Batch {
    std::vector<Request*> requests;
    std::vector<std::int32_t> rows;
    std::vector<std::int32_t> query_start{0};
    std::vector<std::int32_t> seq_lens;
    std::vector<std::int64_t> positions;
    std::uint64_t max_query_len = 0;
    std::uint64_t max_seq_len = 0;

    void add(Request& request, std::uint64_t num_tokens) {
        const std::uint64_t end = request.num_cached + num_tokens;
        for (std::uint64_t position = request.num_cached; position < end; ++position) {
            positions.push_back(static_cast<std::int64_t>(position));
        }
        requests.push_back(&request);
        rows.push_back(static_cast<std::int32_t>(request.row));
        query_start.push_back(static_cast<std::int32_t>(positions.size()));
        seq_lens.push_back(static_cast<std::int32_t>(end));
        max_query_len = std::max(max_query_len, num_tokens);
        max_seq_len = std::max(max_seq_len, end);
    }

    std::uint64_t seq_len(std::size_t i) const { return static_cast<std::uint64_t>(seq_lens[i]); }
};

}  // namespace engine
