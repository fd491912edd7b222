#include "prompts.h"

#include <nlohmann/json.hpp>

#include <fstream>
#include <stdexcept>

namespace smollm {

namespace {

using Json = nlohmann::json;

Prompt read_prompt(const Json& entry, bool with_answers) {
    Prompt prompt;
    prompt.text = entry.at("prompt").get<std::string>();
    if (!with_answers) return prompt;
    entry.at("prompt_ids").get_to(prompt.prompt_ids);
    entry.at("greedy_ids").get_to(prompt.greedy_ids);
    entry.at("margins").get_to(prompt.margins);
    entry.at("first_top5").get_to(prompt.first_top5);
    if (prompt.greedy_ids.empty()) throw std::runtime_error("greedy_ids is empty");
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
