// Compares what the engine says with what a reference said.
#pragma once

#include "kv_cache.h"
#include "prompts.h"
#include "server.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smollm {

/// How far from a reference that keeps keys and values in float32 an engine may be.
struct Tolerance {
    float logit = 0;   ///< between the logits after a prompt
    float margin = 0;  ///< where the best two are closer, either may be chosen
    float equal_share = 0;  ///< of the tokens of all prompts, whatever their margins
};

Tolerance tolerance_of(const CacheType& type);

/// Chooses greedily and compares. Where a step goes the other way it goes on with the reference's
/// token, so that every later step is compared too.
class Check : public Client {
public:
    Check(std::vector<Prompt> prompts, const Tolerance& tolerance)
        : prompts_(std::move(prompts)), tolerance_(tolerance), results_(prompts_.size()) {}

    /// The ids that the tokenizer made of a prompt.
    void compare_ids(std::size_t prompt, const std::vector<std::int32_t>& ids);
    /// A prompt cannot be served.
    void refuse(std::size_t prompt, const std::string& why);
    /// The next request asks for this prompt.
    void add_request(std::size_t prompt) { prompts_asked_.push_back(prompt); }

    std::int32_t choose(const Sequence& sequence, Logits logits) override;

    bool passed(std::size_t prompt) const;
    /// "ok", or the first difference; and how large differences were.
    std::string line(std::size_t prompt) const;

    std::size_t num_prompts() const { return prompts_.size(); }
    std::size_t num_passed() const;
    /// Whether enough tokens of all prompts together are equal.
    bool has_equal_share() const;
    /// Of all prompts together.
    std::string summary() const;

private:
    struct Result {
        std::string failure;  ///< the first
        std::size_t num_steps = 0;
        std::size_t num_equal = 0;
        std::size_t first_different = 0;
        float logit_difference = 0;
    };

    void compare_logits(std::size_t prompt, Logits logits);
    Result total() const;

    std::vector<Prompt> prompts_;
    Tolerance tolerance_;
    std::vector<Result> results_;             ///< by prompt
    std::vector<std::size_t> prompts_asked_;  ///< by request
};

}  // namespace smollm
