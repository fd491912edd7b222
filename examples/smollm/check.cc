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

Tolerance tolerance_of(const CacheType& type) {
    const std::string name = type.name;
    if (name == "f32") return {1e-3f, 0.01f, 1};
    if (name == "f16") return {0.05f, 0.05f, 1};
    if (name == "bf16") return {0.5f, 0.5f, 1};
    return {4, 0, 0.75f};
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

void Check::set_request(std::size_t request, std::size_t prompt) {
    if (request != prompts_asked_.size()) throw std::logic_error("requests are not in order");
    prompts_asked_.push_back(prompt);
}

std::int32_t Check::choose(const Sequence& sequence, Logits logits) {
    const std::size_t number = prompts_asked_.at(sequence.request);
    const Prompt& prompt = prompts_[number];
    Result& result = results_[number];
    const std::size_t step = sequence.num_new();
    if (step == 0) compare_logits(number, logits);

    const std::int32_t ours = most_likely(logits), theirs = prompt.greedy_ids.at(step);
    ++result.num_steps;
    if (ours == theirs) {
        ++result.num_equal;
        return theirs;
    }
    const float margin = prompt.margins[step];
    if (result.num_equal + 1 == result.num_steps) result.first_different = step;
    if (tolerance_.equal_share >= 1 && margin >= tolerance_.margin && result.failure.empty()) {
        result.failure = "step " + std::to_string(step) + " is " + std::to_string(ours) +
                         ", the reference's is " + std::to_string(theirs) + " (margin " +
                         text_of(margin) + ")";
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

bool Check::is_share_too_small(const Result& result) const {
    return tolerance_.equal_share < 1 &&
           static_cast<float>(result.num_equal) <
               tolerance_.equal_share * static_cast<float>(result.num_steps);
}

bool Check::passed(std::size_t prompt) const {
    const Result& result = results_[prompt];
    return result.failure.empty() && result.num_steps == prompts_[prompt].greedy_ids.size() &&
           !is_share_too_small(result);
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
    std::string text = is_share_too_small(result) ? "FAILED: " : "ok: ";
    text += share;
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

std::string Check::summary() const {
    std::size_t equal = 0, steps = 0;
    float difference = 0;
    for (const Result& result : results_) {
        equal += result.num_equal;
        steps += result.num_steps;
        difference = std::max(difference, result.logit_difference);
    }
    return std::to_string(equal) + " of " + std::to_string(steps) +
           " tokens equal, first logits within " + text_of(difference);
}

}  // namespace smollm
