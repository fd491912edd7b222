// Files of prompts, and of what a reference answered to them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace smollm {

/// A prompt, and what the reference made of it where the file says so.
struct Prompt {
    std::string id;
    std::string text;  ///< chat template already applied, where there is one
    std::vector<std::int32_t> prompt_ids;
    std::vector<std::int32_t> greedy_ids;
    std::vector<float> margins;  ///< of each greedy id: its logit minus the second largest
    std::vector<std::pair<std::int32_t, float>> first_top5;  ///< logits after the prompt
};

/// Reads a JSON array of prompts. With `with_answers` every entry must have all fields, and their
/// lengths must agree. Throws with the file, the entry and what is wrong.
std::vector<Prompt> read_prompts(const std::string& path, bool with_answers);

}  // namespace smollm
