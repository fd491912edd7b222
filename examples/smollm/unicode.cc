#include "unicode.h"

#include <algorithm>
#include <iterator>

namespace smollm {
namespace {

struct Range {
    char32_t first;
    char32_t last;
    CharClass char_class;
};

constexpr CharClass kLetter = CharClass::letter;
constexpr CharClass kNumber = CharClass::number;
constexpr CharClass kSpace = CharClass::space;

constexpr Range kRanges[] = {
#include "unicode_tables.inc"
};

}  // namespace

CharClass class_of(char32_t code) {
    const auto after =
        std::upper_bound(std::begin(kRanges), std::end(kRanges), code,
                         [](char32_t value, const Range& range) { return value < range.first; });
    if (after == std::begin(kRanges)) return CharClass::other;
    const Range& range = *std::prev(after);
    return code <= range.last ? range.char_class : CharClass::other;
}

Char first_char(std::string_view text) {
    constexpr Char invalid = {kInvalidChar, 1};
    const auto byte = [text](std::size_t at) { return static_cast<unsigned char>(text[at]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return {lead, 1};
    if (lead < 0xc0 || lead >= 0xf8) return invalid;
    const std::size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (text.size() < size) return invalid;
    char32_t code = lead & (0x7fu >> size);
    for (std::size_t i = 1; i < size; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return invalid;
        code = code << 6 | (byte(i) & 0x3fu);
    }
    constexpr char32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};  // shorter forms are not valid
    const bool is_surrogate = code >= 0xd800 && code < 0xe000;
    if (code < smallest[size] || is_surrogate || code > 0x10ffff) return invalid;
    return {code, size};
}

}  // namespace smollm
