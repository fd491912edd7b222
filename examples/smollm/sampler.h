// The next token, from the logits of all.
#pragma once

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace smollm {

/// The token with the largest logit; of equal ones the first.
std::int32_t most_likely(kvpages::Span<const float> logits);

struct SamplingOptions {
    float temperature = 0;  ///< 0: the most likely token, always
    std::size_t top_k = 0;  ///< among that many of the most likely; 0: all
    float top_p = 1;        ///< among the most likely that have this probability together
    std::uint64_t seed = 0;
};

/// Draws tokens. One for each text, so that what a text becomes does not depend on others.
class Sampler {
public:
    /// `stream` tells apart samplers of one seed.
    Sampler(const SamplingOptions& options, std::uint64_t stream);

    std::int32_t choose(kvpages::Span<const float> logits);

private:
    using Candidate = std::pair<float, std::int32_t>;  ///< logit, later its weight; token

    double uniform();  ///< from 0 to less than 1

    SamplingOptions options_;
    std::mt19937_64 random_;
    std::vector<Candidate> candidates_;
};

}  // namespace smollm
