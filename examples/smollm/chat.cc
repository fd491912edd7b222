#include "chat.h"

#include <stdexcept>

namespace smollm {
namespace {

constexpr const char* kTemplate =
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

constexpr const char* kSystemMessage =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

std::string turn(const std::string& role, const std::string& content) {
    return "<|im_start|>" + role + "\n" + content + "<|im_end|>\n";
}

}  // namespace

std::string apply_chat_template(const GgufFile& file, const std::vector<Message>& messages) {
    if (file.string("tokenizer.chat_template") != kTemplate) {
        throw std::runtime_error(file.path() + ": the chat template is not that of SmolLM2");
    }
    std::string prompt;
    if (!messages.empty() && messages[0].role != "system") prompt = turn("system", kSystemMessage);
    for (const Message& message : messages) prompt += turn(message.role, message.content);
    return prompt + "<|im_start|>assistant\n";
}

}  // namespace smollm
