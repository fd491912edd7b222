#include "tokenizer.h"

#include "unicode.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>

namespace smollm {
namespace {

constexpr std::int32_t kNoToken = -1;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// The types of tokens in a file that matter here.
constexpr std::int64_t kNormal = 1;
constexpr std::int64_t kControl = 3;
constexpr std::int64_t kUserDefined = 4;

[[noreturn]] void fail(const GgufFile& file, const std::string& fault) {
    throw std::runtime_error(file.path() + ": tokenizer: " + fault);
}

std::uint8_t byte_at(std::string_view text, std::size_t at) {
    return static_cast<std::uint8_t>(text[at]);
}

/// The tokens of a file are in printable characters, of which each stands for a byte: itself if it
/// is printable in Latin-1, else the next of those from U+0100 on. GPT-2 started this.
class ByteSymbols {
public:
    ByteSymbols() {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const bool is_printable =
                (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
            symbols_.emplace(is_printable ? byte : 0x100 + num_others_++, static_cast<char>(byte));
        }
    }

    /// The bytes of a token; nothing if it has a character that stands for no byte.
    std::optional<std::string> bytes(std::string_view token) const {
        std::string out;
        while (!token.empty()) {
            const Char symbol = first_char(token);
            const auto found = symbols_.find(symbol.code);
            if (found == symbols_.end()) return std::nullopt;
            out += found->second;
            token.remove_prefix(symbol.size_bytes);
        }
        return out;
    }

private:
    std::unordered_map<char32_t, char> symbols_;
    char32_t num_others_ = 0;
};

// A text is split into words before any merge; no token goes beyond its word. The rules are those
// of GPT-2, a regular expression, after every number has been made a word of its own:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// There `\S` sees no number either.

std::size_t contraction_size(std::string_view text) {
    for (const std::string_view end : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
        if (text.substr(0, end.size()) == end) return end.size();
    }
    return 0;
}

/// The bytes of the characters at the start that are of a class.
std::size_t run_size(std::string_view text, CharClass char_class) {
    std::size_t size = 0;
    while (size < text.size()) {
        const Char next = first_char(text.substr(size));
        if (class_of(next.code) != char_class) break;
        size += next.size_bytes;
    }
    return size;
}

/// The bytes of the white space at the start, all but the last of it if a word comes after.
std::size_t space_size(std::string_view text) {
    std::size_t size = 0;
    std::size_t last = 0;
    while (size < text.size()) {
        const Char next = first_char(text.substr(size));
        const CharClass char_class = class_of(next.code);
        if (char_class != CharClass::space) {
            const bool is_word = char_class != CharClass::number;
            return is_word && last > 0 ? last : size;
        }
        last = size;
        size += next.size_bytes;
    }
    return size;
}

/// The bytes of the first word of a text that is not empty.
std::size_t word_size(std::string_view text) {
    if (const std::size_t size = contraction_size(text)) return size;
    const std::size_t space = text[0] == ' ' ? 1 : 0;
    if (space == text.size()) return space;
    const Char first = first_char(text.substr(space));
    switch (class_of(first.code)) {
        case CharClass::letter:
        case CharClass::other:
            return space + run_size(text.substr(space), class_of(first.code));
        case CharClass::number:
            return space > 0 ? space : first.size_bytes;
        case CharClass::space:
            break;
    }
    return space_size(text);
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file) {
    const std::string_view model = file.string("tokenizer.ggml.model");
    const std::string_view pre = file.string("tokenizer.ggml.pre");
    if (model != "gpt2" || pre != "smollm") {
        fail(file, "only model 'gpt2' with words split as for 'smollm' is known, not " +
                       quoted(model) + " with " + quoted(pre));
    }
    const std::vector<std::string_view> tokens = file.strings("tokenizer.ggml.tokens");
    if (tokens.size() > std::numeric_limits<std::int32_t>::max()) fail(file, "too many tokens");
    read_tokens(file, tokens);
    read_merges(file, tokens);
    end_token_ = read_token_id(file, "tokenizer.ggml.eos_token_id");
    constexpr std::string_view add_begin = "tokenizer.ggml.add_bos_token";
    if (file.has(add_begin) && file.flag(add_begin)) {
        begin_token_ = read_token_id(file, "tokenizer.ggml.bos_token_id");
    }
}

void Tokenizer::read_tokens(const GgufFile& file, const std::vector<std::string_view>& tokens) {
    const std::vector<std::int64_t> types = file.integers("tokenizer.ggml.token_type");
    if (types.size() != tokens.size()) {
        fail(file, std::to_string(tokens.size()) + " tokens, but types of " +
                       std::to_string(types.size()));
    }
    const ByteSymbols symbols;
    byte_tokens_.fill(kNoToken);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto id = static_cast<std::int32_t>(i);
        is_special_.push_back(types[i] == kControl || types[i] == kUserDefined);
        if (types[i] != kNormal) {
            bytes_.emplace_back(tokens[i]);
            if (is_special_[i] && !tokens[i].empty()) {
                special_tokens_[byte_at(tokens[i], 0)].push_back(id);
            }
            continue;
        }
        std::optional<std::string> bytes = symbols.bytes(tokens[i]);
        if (!bytes) {
            fail(file, "token " + std::to_string(i) +
                           " has a symbol that stands for no byte: " + quoted(tokens[i]));
        }
        if (bytes->size() == 1) byte_tokens_[byte_at(*bytes, 0)] = id;
        bytes_.push_back(std::move(*bytes));
    }
    for (std::vector<std::int32_t>& same_start : special_tokens_) {
        std::stable_sort(
            same_start.begin(), same_start.end(),
            [this](std::int32_t a, std::int32_t b) { return bytes(a).size() > bytes(b).size(); });
    }
}

void Tokenizer::read_merges(const GgufFile& file, const std::vector<std::string_view>& tokens) {
    std::unordered_map<std::string_view, std::int32_t> ids;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (!is_special_[i]) ids.emplace(tokens[i], static_cast<std::int32_t>(i));
    }
    const std::vector<std::string_view> merges = file.strings("tokenizer.ggml.merges");
    for (std::size_t rank = 0; rank < merges.size(); ++rank) {
        const std::size_t space = merges[rank].find(' ');
        if (space == std::string_view::npos) {
            fail(file, "merge " + std::to_string(rank) +
                           " is not of two tokens: " + quoted(merges[rank]));
        }
        const std::string_view left = merges[rank].substr(0, space);
        const std::string_view right = merges[rank].substr(space + 1);
        const std::string whole = std::string(left) + std::string(right);
        const auto id = [&](std::string_view token) {
            const auto found = ids.find(token);
            if (found == ids.end()) {
                fail(file, "merge " + std::to_string(rank) +
                               " needs a token that is not there: " + quoted(token));
            }
            return found->second;
        };
        merges_.emplace(pair_key(id(left), id(right)), Merge{rank, id(whole)});
    }
}

std::int32_t Tokenizer::read_token_id(const GgufFile& file, std::string_view key) const {
    const std::uint64_t id = file.uint(key);
    if (id >= size()) {
        fail(file, std::string(key) + " is " + std::to_string(id) + ", but there are " +
                       std::to_string(size()) + " tokens");
    }
    return static_cast<std::int32_t>(id);
}

std::size_t Tokenizer::index(std::int32_t token) const {
    const auto index = static_cast<std::size_t>(token);
    if (token < 0 || index >= size()) {
        throw std::runtime_error("there is no token " + std::to_string(token) + " among " +
                                 std::to_string(size()));
    }
    return index;
}

std::string_view Tokenizer::bytes(std::int32_t token) const { return bytes_[index(token)]; }

bool Tokenizer::is_special(std::int32_t token) const { return is_special_[index(token)]; }

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
    std::vector<std::int32_t> out;
    if (begin_token_) out.push_back(*begin_token_);
    std::size_t plain = 0;  // where the text starts that has not been encoded
    for (std::size_t at = 0; at < text.size();) {
        const std::optional<std::int32_t> special = special_at_start(text.substr(at));
        if (!special) {
            ++at;
            continue;
        }
        append_words(text.substr(plain, at - plain), out);
        out.push_back(*special);
        at += bytes(*special).size();
        plain = at;
    }
    append_words(text.substr(plain), out);
    return out;
}

std::optional<std::int32_t> Tokenizer::special_at_start(std::string_view text) const {
    for (const std::int32_t token : special_tokens_[byte_at(text, 0)]) {
        const std::string_view name = bytes(token);
        if (text.substr(0, name.size()) == name) return token;
    }
    return std::nullopt;
}

void Tokenizer::append_words(std::string_view text, std::vector<std::int32_t>& out) const {
    while (!text.empty()) {
        const std::size_t size = word_size(text);
        append_word(text.substr(0, size), out);
        text.remove_prefix(size);
    }
}

const Tokenizer::Merge* Tokenizer::find_merge(std::int32_t left, std::int32_t right) const {
    const auto found = merges_.find(pair_key(left, right));
    return found != merges_.end() ? &found->second : nullptr;
}

/// Merges the pair of the lowest rank, the leftmost of equals, until no pair can be merged.
void Tokenizer::append_word(std::string_view word, std::vector<std::int32_t>& out) const {
    // The parts of the word as a linked list: a merge replaces the left part and takes out the
    // right one. The queue may hold pairs that another merge has changed since.
    struct Part {
        std::int32_t token;  // kNoToken if it has been taken out
        std::size_t previous;
        std::size_t next;
    };
    std::vector<Part> parts;
    for (std::size_t i = 0; i < word.size(); ++i) {
        const std::int32_t token = byte_tokens_[byte_at(word, i)];
        if (token != kNoToken) parts.push_back({token, parts.size() - 1, parts.size() + 1});
    }
    if (parts.empty()) return;
    parts.front().previous = kNone;
    parts.back().next = kNone;

    const auto merge_at = [&](std::size_t left) -> const Merge* {
        if (parts[left].token == kNoToken || parts[left].next == kNone) return nullptr;
        return find_merge(parts[left].token, parts[parts[left].next].token);
    };
    using RankAndPart = std::pair<std::size_t, std::size_t>;
    std::priority_queue<RankAndPart, std::vector<RankAndPart>, std::greater<>> queue;
    const auto add = [&](std::size_t left) {
        if (const Merge* merge = merge_at(left)) queue.push({merge->rank, left});
    };
    for (std::size_t i = 0; i < parts.size(); ++i) add(i);
    while (!queue.empty()) {
        const auto [rank, left] = queue.top();
        queue.pop();
        const Merge* merge = merge_at(left);
        if (merge == nullptr || merge->rank != rank) continue;
        const std::size_t right = parts[left].next;
        parts[left].token = merge->token;
        parts[left].next = parts[right].next;
        parts[right].token = kNoToken;
        if (parts[left].next != kNone) parts[parts[left].next].previous = left;
        if (parts[left].previous != kNone) add(parts[left].previous);
        add(left);
    }
    for (std::size_t i = 0; i != kNone; i = parts[i].next) out.push_back(parts[i].token);
}

}  // namespace smollm
