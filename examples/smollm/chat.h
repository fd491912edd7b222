// Chat messages as the text that the model was trained on.
#pragma once

#include "gguf.h"

#include <string>
#include <vector>

namespace smollm {

struct Message {
    std::string role;  ///< system, user or assistant
    std::string content;
};

/// The prompt of a chat, up to where the assistant's next message begins. If the first message is
/// not the system's, the model's usual one goes before it.
///
/// The template is a program in the file. This does not run it: it does what SmolLM2's does, and
/// fails if the file has another. As there, a special token that a message spells out counts.
std::string apply_chat_template(const GgufFile& file, const std::vector<Message>& messages);

}  // namespace smollm
