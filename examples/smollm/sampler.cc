#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace smollm {

std::int32_t most_likely(kvpages::Span<const float> logits) {
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                     logits.begin());
}

Sampler::Sampler(const SamplingOptions& options, std::uint64_t stream) : options_(options) {
    std::seed_seq seed{static_cast<std::uint32_t>(options.seed),
                       static_cast<std::uint32_t>(options.seed >> 32),
                       static_cast<std::uint32_t>(stream),
                       static_cast<std::uint32_t>(stream >> 32)};
    random_.seed(seed);
}

std::int32_t Sampler::choose(kvpages::Span<const float> logits) {
    // NaN has no place in an order: to sort by it is undefined.
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) {
        throw std::runtime_error("the model's logits are not all finite; its file may be damaged");
    }
    if (options_.temperature <= 0) return most_likely(logits);
    candidates_.clear();
    for (std::size_t token = 0; token < logits.size(); ++token) {
        candidates_.emplace_back(logits[token], static_cast<std::int32_t>(token));
    }
    // The most likely first; of equal ones the one with the lower number, so that the order is one.
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    if (options_.top_k != 0 && options_.top_k < candidates_.size()) {
        candidates_.resize(options_.top_k);
    }
    const float largest = candidates_.front().first;
    double sum = 0;
    for (Candidate& candidate : candidates_) {
        candidate.first = std::exp((candidate.first - largest) / options_.temperature);
        sum += static_cast<double>(candidate.first);
    }
    double kept = 0;
    std::size_t count = 0;
    const double wanted = sum * static_cast<double>(options_.top_p);
    do kept += static_cast<double>(candidates_[count++].first);
    while (count < candidates_.size() && kept < wanted);
    double left = uniform() * kept;
    for (std::size_t i = 0; i + 1 < count; ++i) {
        left -= static_cast<double>(candidates_[i].first);
        if (left < 0) return candidates_[i].second;
    }
    return candidates_[count - 1].second;
}

// Not a distribution of the standard library, whose numbers are each library's own.
double Sampler::uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

}  // namespace smollm
