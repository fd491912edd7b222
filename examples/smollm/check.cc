#include "check.h"

#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace smollm {

namespace {

std::string text_of(float number) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", static_cast<double>(number));
    return text;
}

}  // namespace

/// Of f32, f16 and bf16 what the reference's own notes allow; of 8 bits some more than was seen.
Tolerance tolerance_of(const CacheType& type) {
    switch (type.dtype) {
        case kvpages::Dtype::f32: return {0.001f, 0.01f, 0};
        case kvpages::Dtype::f16: return {0.05f, 0.05f, 0};
        case kvpages::Dtype::bf16: return {0.5f, 0.5f, 0};
        default: return {2, 2, 0.75f};
    }
}

void Check::compare_ids(std::size_t prompt, const std::vector<std::int32_t>& ids) {
    const std::vector<std::int32_t>& wanted = prompts_[prompt].prompt_ids;
    const auto [ours, theirs] =
        std::mismatch(ids.begin(), ids.end(), wanted.begin(), wanted.end());
    if (ours == ids.end() && theirs == wanted.end()) return;
    const auto id_at = [](auto at, const std::vector<std::int32_t>& in) {
        return at == in.end() ? "missing" : std::to_string(*at);
    };
    results_[prompt].failure = "prompt id " + std::to_string(ours - ids.begin()) + " is " +
                               id_at(ours, ids) + ", the reference's is " + id_at(theirs, wanted);
}

void Check::refuse(std::size_t prompt, const std::string& why) {
    results_[prompt].failure = why;
}

std::int32_t Check::choose(const Sequence& sequence, Logits logits) {
    const std::size_t number = prompts_asked_.at(sequence.request);
    const Prompt& prompt = prompts_[number];
    Result& result = results_[number];
    const std::size_t step = sequence.num_new();
    if (step == 0) compare_logits(number, logits);

    const std::int32_t ours = most_likely(logits), theirs = prompt.greedy_ids.at(step);
    if (static_cast<std::size_t>(theirs) >= logits.size()) {
        throw std::runtime_error(prompt.id + ": greedy_ids has token " + std::to_string(theirs) +
                                 ", which the model does not have");
    }
    ++result.num_steps;
    if (ours == theirs) {
        ++result.num_equal;
        return theirs;
    }
    const float margin = prompt.margins[step];
    const float gap =
        logits[static_cast<std::size_t>(ours)] - logits[static_cast<std::size_t>(theirs)];
    if (result.num_equal + 1 == result.num_steps) result.first_different = step;
    // A near-tie is one on both sides.
    const bool is_near_tie = margin < tolerance_.margin && gap < tolerance_.margin;
    if (!is_near_tie && result.failure.empty()) {
        result.failure = "step " + std::to_string(step) + " is " + std::to_string(ours) +
                         ", the reference's is " + std::to_string(theirs) + " (margin " +
                         text_of(margin) + ", here " + text_of(gap) + " the other way)";
    }
    return theirs;
}

void Check::compare_logits(std::size_t prompt, Logits logits) {
    Result& result = results_[prompt];
    for (const auto& [token, theirs] : prompts_[prompt].first_top5) {
        if (token < 0 || static_cast<std::size_t>(token) >= logits.size()) {
            throw std::runtime_error(prompts_[prompt].id + ": first_top5 has token " +
                                     std::to_string(token) + ", which the model does not have");
        }
        const float ours = logits[static_cast<std::size_t>(token)];
        const float difference = std::fabs(ours - theirs);
        // Not the other way round, so that NaN fails.
        if (!(difference <= tolerance_.logit) && result.failure.empty()) {
            result.failure = "after the prompt the logit of " + std::to_string(token) + " is " +
                             text_of(ours) + ", the reference's is " + text_of(theirs);
        }
        result.logit_difference = std::max(result.logit_difference, difference);
    }
}

bool Check::passed(std::size_t prompt) const {
    const Result& result = results_[prompt];
    return result.failure.empty() && result.num_steps == prompts_[prompt].greedy_ids.size();
}

std::string Check::line(std::size_t prompt) const {
    const Result& result = results_[prompt];
    const std::size_t num_wanted = prompts_[prompt].greedy_ids.size();
    const std::string share =
        std::to_string(result.num_equal) + " of " + std::to_string(num_wanted) + " tokens equal";
    if (!result.failure.empty()) return "FAILED: " + result.failure + "; " + share;
    if (result.num_steps != num_wanted) {
        return "FAILED: it ended after " + std::to_string(result.num_steps) + " of " +
               std::to_string(num_wanted) + " tokens";
    }
    std::string text = "ok: " + share;
    if (result.num_equal < num_wanted) {
        text += ", the first that differs is step " + std::to_string(result.first_different) +
                " (margin " + text_of(prompts_[prompt].margins[result.first_different]) + ")";
    }
    return text + "; first logits within " + text_of(result.logit_difference);
}

std::size_t Check::num_passed() const {
    std::size_t count = 0;
    for (std::size_t prompt = 0; prompt < num_prompts(); ++prompt) count += passed(prompt);
    return count;
}

Check::Result Check::total() const {
    Result total;
    for (const Result& result : results_) {
        total.num_steps += result.num_steps;
        total.num_equal += result.num_equal;
        total.logit_difference = std::max(total.logit_difference, result.logit_difference);
    }
    return total;
}

bool Check::has_equal_share() const {
    const Result all = total();
    return static_cast<float>(all.num_equal) >=
           tolerance_.equal_share * static_cast<float>(all.num_steps);
}

std::string Check::summary() const {
    const Result all = total();
    return std::to_string(all.num_equal) + " of " + std::to_string(all.num_steps) +
           " tokens equal" + (has_equal_share() ? "" : ", which is too few") +
           "; first logits within " + text_of(all.logit_difference);
}

}  // namespace smollm
