// UTF-8 and the classes of characters that words are split by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace smollm {

/// What a character is by Unicode: of category L, of category N, White_Space, or none of these.
enum class CharClass : std::uint8_t { letter, number, space, other };

CharClass class_of(char32_t code);

/// Stands for a byte that is not part of valid UTF-8; it is of class `other`.
constexpr char32_t kInvalidChar = 0xffffffff;

struct Char {
    char32_t code;
    std::size_t size_bytes;
};

/// The first character of a text, which must not be empty, or its first byte if that is invalid.
Char first_char(std::string_view text);

}  // namespace smollm
