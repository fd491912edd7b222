#include "prompts.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <stdexcept>

namespace smollm {

namespace {

using Json = nlohmann::json;

/// The library's own conversion lets numbers wrap and drops their fractions, so that what the file
/// does not say could pass.
std::int32_t read_token(const Json& entry) {
    const auto token = entry.is_number_integer() ? entry.get<std::int64_t>() : -1;
    // What the model does not have beyond that is refused when it is known.
    if (token < 0 || token > std::numeric_limits<std::int32_t>::max()) {
        throw std::runtime_error(entry.dump() + " is not a token");
    }
    return static_cast<std::int32_t>(token);
}

float read_logit(const Json& entry) {
    if (!entry.is_number()) throw std::runtime_error(entry.dump() + " is not a logit");
    const auto logit = entry.get<float>();
    if (!std::isfinite(logit)) throw std::runtime_error(entry.dump() + " is not a logit");
    return logit;
}

std::vector<std::int32_t> read_tokens(const Json& entries) {
    if (!entries.is_array()) throw std::runtime_error("tokens are not in an array");
    std::vector<std::int32_t> tokens;
    for (const Json& entry : entries) tokens.push_back(read_token(entry));
    return tokens;
}

Prompt read_prompt(const Json& entry, bool with_answers) {
    Prompt prompt;
    prompt.text = entry.at("prompt").get<std::string>();
    if (!with_answers) return prompt;
    prompt.prompt_ids = read_tokens(entry.at("prompt_ids"));
    prompt.greedy_ids = read_tokens(entry.at("greedy_ids"));
    for (const Json& margin : entry.at("margins")) prompt.margins.push_back(read_logit(margin));
    for (const Json& pair : entry.at("first_top5")) {
        prompt.first_top5.emplace_back(read_token(pair.at(0)), read_logit(pair.at(1)));
    }
    if (prompt.greedy_ids.empty()) throw std::runtime_error("greedy_ids is empty");
    if (prompt.first_top5.empty()) throw std::runtime_error("first_top5 is empty");
    if (prompt.margins.size() != prompt.greedy_ids.size()) {
        throw std::runtime_error("margins has " + std::to_string(prompt.margins.size()) +
                                 " entries, greedy_ids " +
                                 std::to_string(prompt.greedy_ids.size()));
    }
    return prompt;
}

}  // namespace

std::vector<Prompt> read_prompts(const std::string& path, bool with_answers) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error(path + ": cannot be read");
    std::vector<Prompt> prompts;
    std::string at = path;
    try {
        const Json entries = Json::parse(file);
        if (!entries.is_array()) throw std::runtime_error("not an array of prompts");
        if (entries.empty()) throw std::runtime_error("there are no prompts in it");
        for (const Json& entry : entries) {
            at = path + ", entry " + std::to_string(prompts.size());
            const std::string id = entry.value("id", std::to_string(prompts.size()));
            at += " (" + id + ")";
            prompts.push_back(read_prompt(entry, with_answers));
            prompts.back().id = id;
        }
    } catch (const std::exception& error) {
        throw std::runtime_error(at + ": " + error.what());
    }
    return prompts;
}

}  // namespace smollm
