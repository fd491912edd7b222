// Text to tokens and back: byte-level byte pair encoding, with the tables of a GGUF file.
#pragma once

#include "gguf.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace smollm {

/// The tokenizer of the SmolLM models.
///
/// Text is any bytes, valid UTF-8 or not. A byte that the vocabulary has no token for is left out,
/// as by the model's own tokenizer. SmolLM2's lacks six control characters (04, 06, 13, 14, 16 and
/// 1d) and the bytes c0, c1, f1, f2 and f5 to ff, none of which any assigned character needs.
class Tokenizer {
public:
    explicit Tokenizer(const GgufFile& file);

    /// A special token that is written out in the text, such as <|im_start|>, is that one token.
    std::vector<std::int32_t> encode(std::string_view text) const;

    /// What a token stands for; it may be a part of a character. A special token is its name.
    std::string_view bytes(std::int32_t token) const;

    bool is_special(std::int32_t token) const;
    std::int32_t end_token() const { return end_token_; }
    std::size_t size() const { return bytes_.size(); }

private:
    struct Merge {
        std::size_t rank;  ///< the lowest goes first
        std::int32_t token;
    };

    void read_tokens(const GgufFile& file, const std::vector<std::string_view>& tokens);
    void read_merges(const GgufFile& file, const std::vector<std::string_view>& tokens);
    std::int32_t read_token_id(const GgufFile& file, std::string_view key) const;

    std::size_t index(std::int32_t token) const;
    std::optional<std::int32_t> special_at_start(std::string_view text) const;
    void append_words(std::string_view text, std::vector<std::int32_t>& out) const;
    void append_word(std::string_view word, std::vector<std::int32_t>& out) const;
    const Merge* find_merge(std::int32_t left, std::int32_t right) const;

    std::vector<std::string> bytes_;
    std::vector<bool> is_special_;
    std::array<std::vector<std::int32_t>, 256> special_tokens_;  ///< by first byte, longest first
    std::array<std::int32_t, 256> byte_tokens_;                  ///< kNoToken if there is none
    std::unordered_map<std::uint64_t, Merge> merges_;            ///< by the pair of tokens
    std::optional<std::int32_t> begin_token_;                    ///< if texts start with it
    std::int32_t end_token_;
};

}  // namespace smollm
