// The files that the smollm example reads, its tokenizer and its chat template. No model needed.
#include "smollm/chat.h"
#include "smollm/gguf.h"
#include "smollm/tokenizer.h"
#include "smollm/unicode.h"
#include "support/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ios>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using smollm::CharClass;
using smollm::GgufFile;
using smollm::Message;
using smollm::TensorType;
using smollm::Tokenizer;
using support::GgufWriter;
using support::TemporaryFile;
using Ids = std::vector<std::int32_t>;

// What a call throws as std::runtime_error; empty if it throws nothing.
std::string error_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

std::string error_of_reading(const std::string& bytes) {
    const TemporaryFile file(bytes);
    const std::string error = error_of([&file] { GgufFile read(file.path()); });
    if (!error.empty()) {
        EXPECT_EQ(error.find(file.path() + ": "), 0u) << error;
    }
    return error;
}

::testing::AssertionResult has(const std::string& text, const std::string& words) {
    if (text.find(words) != std::string::npos) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "\"" << words << "\" is not in \"" << text << "\"";
}

std::string floats(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

GgufWriter good_writer() {
    GgufWriter writer;
    writer.uint32("small", 7);
    writer.int32("negative", -7);
    writer.uint64("large", std::numeric_limits<std::uint64_t>::max());
    writer.float32("half", 0.5f);
    writer.boolean("yes", true);
    writer.string("word", "hello");
    writer.strings("words", {"a", "", "bc"});
    writer.int32s("numbers", {1, -2, 3});
    writer.tensor("vector", {3}, 0, floats({1, 2, 3}));
    writer.tensor("matrix", {32, 2}, 3, std::string(2 * 20, 'x'));
    return writer;
}

TEST(SmollmGguf, ReadsBackWhatWasWritten) {
    const TemporaryFile on_disk(good_writer().bytes());
    GgufFile first(on_disk.path());
    const GgufFile file = std::move(first);
    EXPECT_TRUE(file.has("small"));
    EXPECT_FALSE(file.has("smal"));
    EXPECT_EQ(file.uint("small"), 7u);
    EXPECT_EQ(file.number("small"), 7.0);
    EXPECT_EQ(file.number("negative"), -7.0);
    EXPECT_EQ(file.number("half"), 0.5);
    EXPECT_TRUE(file.flag("yes"));
    EXPECT_EQ(file.string("word"), "hello");
    EXPECT_EQ(file.strings("words"), (std::vector<std::string_view>{"a", "", "bc"}));
    EXPECT_EQ(file.integers("numbers"), (std::vector<std::int64_t>{1, -2, 3}));

    EXPECT_FALSE(file.has_tensor("tensor"));
    const smollm::GgufTensor& vector = file.tensor("vector");
    EXPECT_EQ(vector.type, TensorType::f32);
    EXPECT_EQ(vector.num_columns(), 3u);
    EXPECT_EQ(vector.num_rows(), 1u);
    EXPECT_EQ(std::memcmp(vector.data, floats({1, 2, 3}).data(), vector.size_bytes), 0);
    const smollm::GgufTensor& matrix = file.tensor("matrix");
    EXPECT_EQ(matrix.shape, (std::vector<std::uint64_t>{32, 2}));
    EXPECT_EQ(matrix.size_bytes, 40u);
    EXPECT_EQ(matrix.num_rows(), 2u);
    EXPECT_EQ(matrix.data[39], 'x');
}

TEST(SmollmGguf, TellsWhichMetadataIsMissingOrOfAnotherType) {
    const TemporaryFile on_disk(good_writer().bytes());
    const GgufFile file(on_disk.path());
    const auto uint_error = [&file](const char* key) {
        return error_of([&file, key] { file.uint(key); });
    };
    EXPECT_TRUE(has(uint_error("none"), "there is no metadata 'none'"));
    EXPECT_TRUE(has(uint_error("word"), "'word' is of type string, but an integer is needed"));
    EXPECT_TRUE(has(uint_error("words"), "'words' is an array of string, but an integer"));
    EXPECT_TRUE(has(uint_error("negative"), "'negative' is negative: -7"));
    EXPECT_TRUE(has(uint_error("large"), "an integer above 2^63 - 1"));
    EXPECT_TRUE(has(error_of([&] { file.number("yes"); }), "a number is needed"));
    EXPECT_TRUE(has(error_of([&] { file.flag("small"); }), "a bool is needed"));
    EXPECT_TRUE(has(error_of([&] { file.string("words"); }), "a string is needed"));
    EXPECT_TRUE(has(error_of([&] { file.strings("numbers"); }), "an array of strings is needed"));
    EXPECT_TRUE(has(error_of([&] { file.integers("words"); }), "an array of integers is needed"));
    EXPECT_TRUE(has(error_of([&] { file.tensor("none"); }), "there is no tensor 'none'"));
}

TEST(SmollmGguf, TellsWhyAFileCannotBeOpened) {
    EXPECT_TRUE(has(error_of([] { GgufFile("/no/such/file"); }),
                    "/no/such/file: cannot open: No such file"));
    EXPECT_TRUE(has(error_of([] { GgufFile("/"); }), "/: not a regular file"));
    EXPECT_TRUE(has(error_of_reading(""), "the file is empty"));
}

TEST(SmollmGguf, TellsWhatIsWrongWithAFile) {
    constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
    constexpr std::uint64_t half = std::uint64_t{1} << 63;
    struct Fault {
        const char* error;
        std::function<void(GgufWriter&)> make;
    };
    const Fault faults[] = {
        {"it does not start with 'GGUF'", [](GgufWriter& w) { w.magic = 0x47475546; }},
        {"version 1, but only 2 and 3", [](GgufWriter& w) { w.version = 1; }},
        {"the file is big-endian", [](GgufWriter& w) { w.version = 0x03000000; }},
        {"a metadata key needs", [](GgufWriter& w) { w.more_values = huge / 2; }},
        {"has 0 dimensions", [](GgufWriter& w) { w.more_tensors = huge / 2; }},
        {"metadata 'small' is there twice", [](GgufWriter& w) { w.uint32("small", 8); }},
        {"metadata of unknown type 13", [](GgufWriter& w) { w.begin("key", 13); }},
        {"arrays of arrays", [](GgufWriter& w) { w.begin("key", 9).number(9).number(half); }},
        {"a metadata key needs 18446744073709551615 bytes",
         [](GgufWriter& w) {
             w.more_values = 1;
             w.metadata.number(huge);
         }},
        {"values of type string, but only",
         [](GgufWriter& w) { w.begin("key", 9).number(8).number(half); }},
        {"values of type int64, but only",
         [](GgufWriter& w) { w.begin("key", 9).number(11).number(huge / 8 + 2); }},
        {"a string needs 18446744073709551615 bytes",
         [](GgufWriter& w) { w.begin("key", 8).number(huge); }},
        {"tensor 'vector' is there twice", [](GgufWriter& w) { w.tensor_at("vector", {3}, 0, 0); }},
        {"tensor 'x' is of type 12 of ggml", [](GgufWriter& w) { w.tensor_at("x", {256}, 12, 0); }},
        {"the name of a tensor has 65 bytes",
         [](GgufWriter& w) { w.tensor_at(std::string(65, 'x'), {1}, 0, 0); }},
        {"tensor 'x' has 0 dimensions", [](GgufWriter& w) { w.tensor_at("x", {}, 0, 0); }},
        {"tensor 'x' has 5 dimensions",
         [](GgufWriter& w) { w.tensor_at("x", {1, 1, 1, 1, 1}, 0, 0); }},
        {"tensor 'x' is empty", [](GgufWriter& w) { w.tensor_at("x", {4, 0}, 0, 0); }},
        {"larger than any memory", [](GgufWriter& w) { w.tensor_at("x", {half, 2}, 0, 0); }},
        {"larger than any memory", [](GgufWriter& w) { w.tensor_at("x", {huge, huge}, 0, 0); }},
        {"rows of 33 numbers, but type q8_0 has blocks of 32",
         [](GgufWriter& w) { w.tensor_at("x", {33}, 8, 0); }},
        {"tensor 'x': 400 bytes at offset 0", [](GgufWriter& w) { w.tensor_at("x", {100}, 0, 0); }},
        {"the offset must be a multiple of 32", [](GgufWriter& w) { w.tensor_at("x", {1}, 0, 8); }},
        {"tensor 'x': 4 bytes at offset 18446744073709551584",
         [](GgufWriter& w) { w.tensor_at("x", {1}, 0, huge - 31); }},
        {"an alignment of 0 bytes", [](GgufWriter& w) { w.uint32("general.alignment", 0); }},
        {"an alignment of 4 bytes", [](GgufWriter& w) { w.uint32("general.alignment", 4); }},
        {"the padding before the tensors needs",
         [](GgufWriter& w) { w.uint32("general.alignment", 1 << 16); }},
        {"'general.alignment' is of type string",
         [](GgufWriter& w) { w.string("general.alignment", "32"); }},
        {"tensor 'a?b?' is of type 99", [](GgufWriter& w) { w.tensor_at("a\nb\x80", {1}, 99, 0); }},
    };
    for (const Fault& fault : faults) {
        GgufWriter writer = good_writer();
        fault.make(writer);
        EXPECT_TRUE(has(error_of_reading(writer.bytes()), fault.error));
    }
}

// A vocabulary of a few symbols: printable ASCII, a space, a newline, the two bytes of an e with
// an acute accent, and what the merges make of them.
const std::vector<std::string> kSpecial = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im"};
const std::vector<std::string> kMerges = {
    "l l", "h e", "he ll", "hell o", "\u0120 \u0120", "1 2", "\u0120 t", "a b", "b c",
    "' s", "\u00c3 \u00a9", "\u010a \u010a", "a a", "aa aa"};

struct Vocabulary {
    std::vector<std::string> tokens = kSpecial;
    std::vector<std::int32_t> types = std::vector<std::int32_t>(kSpecial.size(), 3);
    std::vector<std::string> merges = kMerges;

    Vocabulary() {
        for (char c = '!'; c <= '~'; ++c) add(std::string(1, c));
        for (const char* symbol : {"\u0120", "\u010a", "\u00c3", "\u00a9"}) add(symbol);
        for (std::string merge : kMerges) add(merge.erase(merge.find(' '), 1));
    }

    void add(const std::string& token) {
        tokens.push_back(token);
        types.push_back(1);
    }

    std::int32_t id(const std::string& token) const {
        const auto found = std::find(tokens.begin(), tokens.end(), token);
        EXPECT_NE(found, tokens.end()) << token;
        return static_cast<std::int32_t>(found - tokens.begin());
    }

    Ids ids(const std::vector<std::string>& wanted) const {
        Ids out;
        for (const std::string& token : wanted) out.push_back(id(token));
        return out;
    }
};

GgufWriter tokenizer_writer(const Vocabulary& vocabulary) {
    GgufWriter writer;
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.string("tokenizer.ggml.pre", "smollm");
    writer.strings("tokenizer.ggml.tokens", vocabulary.tokens);
    writer.int32s("tokenizer.ggml.token_type", vocabulary.types);
    writer.strings("tokenizer.ggml.merges", vocabulary.merges);
    return writer;
}

Tokenizer make_tokenizer(const GgufWriter& writer) {
    const TemporaryFile on_disk(writer.bytes());
    return Tokenizer(GgufFile(on_disk.path()));
}

Tokenizer small_tokenizer() {
    GgufWriter writer = tokenizer_writer(Vocabulary());
    writer.uint32("tokenizer.ggml.eos_token_id", 2);
    return make_tokenizer(writer);
}

TEST(SmollmTokenizer, SplitsWordsAndMergesByRank) {
    const Vocabulary vocabulary;
    const Tokenizer tokenizer = small_tokenizer();
    EXPECT_EQ(tokenizer.size(), vocabulary.tokens.size());
    EXPECT_EQ(tokenizer.end_token(), 2);
    const std::string space = "\u0120";
    const std::string newline = "\u010a";
    struct Case {
        const char* text;
        std::vector<std::string> tokens;
    };
    const Case cases[] = {
        {"", {}},
        {"hello", {"hello"}},
        {"hellhe", {"hell", "he"}},
        {"abc", {"ab", "c"}},       // the lower rank first
        {"aaaaa", {"aaaa", "a"}},   // of equal ranks the leftmost
        {" to", {space + "t", "o"}},
        {"  to", {space, space + "t", "o"}},  // the last space goes with the word
        {"  ", {space + space}},
        {"   ", {space + space, space}},
        {"  1", {space + space, "1"}},  // but not with a number
        {"12", {"1", "2"}},             // whose digits stay alone, whatever the merges are
        {"a1b", {"a", "1", "b"}},
        {"he's", {"he", "'s"}},
        {"he 's", {"he", space, "'", "s"}},  // not the contraction
        {"he''s", {"he", "'", "'", "s"}},
        {"\n\n", {newline + newline}},
        {"\n\na", {newline, newline, "a"}},
        {"\u00e9", {"\u00c3\u00a9"}},
        {"a\u00e9", {"a", "\u00c3\u00a9"}},
        {"a\u00a9", {"a", "\u00a9"}},  // its first byte has no token
        {"a\xc3", {"a", "\u00c3"}},    // nor is this a character
    };
    for (const Case& one : cases) {
        EXPECT_EQ(tokenizer.encode(one.text), vocabulary.ids(one.tokens)) << one.text;
    }
}

TEST(SmollmTokenizer, TakesTheLongestSpecialTokenOfAText) {
    const Vocabulary vocabulary;
    const Tokenizer tokenizer = small_tokenizer();
    EXPECT_EQ(tokenizer.encode("<|im_start|>hello<|im_end|>"), (Ids{1, vocabulary.id("hello"), 2}));
    EXPECT_EQ(tokenizer.encode("<|im_end|><|im"), (Ids{2, 3}));
    EXPECT_EQ(tokenizer.encode("<<|im_end|>"), (Ids{vocabulary.id("<"), 2}));
    EXPECT_EQ(tokenizer.encode("<|i"), vocabulary.ids({"<", "|", "i"}));
    EXPECT_TRUE(tokenizer.is_special(3));
    EXPECT_FALSE(tokenizer.is_special(4));
    EXPECT_EQ(tokenizer.bytes(1), "<|im_start|>");
}

TEST(SmollmTokenizer, GivesTheBytesBack) {
    const Tokenizer tokenizer = small_tokenizer();
    for (const std::string text : {"hello  \n\nworld's <|im_end|> 12 \u00e9\xc3\xc3", "\xa9'"}) {
        std::string bytes;
        for (const std::int32_t token : tokenizer.encode(text)) bytes += tokenizer.bytes(token);
        EXPECT_EQ(bytes, text);
    }
    EXPECT_TRUE(has(error_of([&] { tokenizer.bytes(-1); }), "there is no token -1"));
    EXPECT_TRUE(has(error_of([&] { tokenizer.is_special(1000); }), "there is no token 1000"));
}

TEST(SmollmTokenizer, MergesALongWordInTime) {
    const Ids ids = small_tokenizer().encode(std::string(400000, 'a'));
    EXPECT_EQ(ids, Ids(100000, Vocabulary().id("aaaa")));
}

TEST(SmollmTokenizer, StartsWithTheBeginTokenIfTheFileSaysSo) {
    GgufWriter writer = tokenizer_writer(Vocabulary());
    writer.uint32("tokenizer.ggml.eos_token_id", 2);
    writer.uint32("tokenizer.ggml.bos_token_id", 1);
    EXPECT_EQ(make_tokenizer(writer).encode(""), Ids{});
    writer.boolean("tokenizer.ggml.add_bos_token", true);
    EXPECT_EQ(make_tokenizer(writer).encode(""), Ids{1});
}

TEST(SmollmTokenizer, TellsWhatIsWrongWithAVocabulary) {
    const auto error_with = [](const std::function<void(Vocabulary&)>& change) {
        Vocabulary vocabulary;
        change(vocabulary);
        GgufWriter writer = tokenizer_writer(vocabulary);
        writer.uint32("tokenizer.ggml.eos_token_id", 2);
        return error_of([&writer] { make_tokenizer(writer); });
    };
    EXPECT_TRUE(has(error_with([](Vocabulary& v) { v.merges[3] = "hello"; }),
                    "merge 3 is not of two tokens"));
    for (const char* merge : {"x y", "xx y", "y xx", " y", "y ", " ", "h e e", "<|im _end|>"}) {
        EXPECT_TRUE(has(error_with([merge](Vocabulary& v) { v.merges[0] = merge; }),
                        "merge 0 needs a token that is not there"));
    }
    EXPECT_TRUE(has(error_with([](Vocabulary& v) { v.types.pop_back(); }), "but types of"));
    EXPECT_TRUE(has(error_with([](Vocabulary& v) { v.tokens[5] = "a b"; }),
                    "token 5 has a symbol that stands for no byte"));
    EXPECT_TRUE(has(error_with([](Vocabulary& v) { v.tokens[5] = "\xc3"; }),
                    "token 5 has a symbol that stands for no byte"));
}

TEST(SmollmTokenizer, TellsWhatMetadataItNeeds) {
    GgufWriter writer;
    const auto error = [&writer] { return error_of([&writer] { make_tokenizer(writer); }); };
    EXPECT_TRUE(has(error(), "there is no metadata 'tokenizer.ggml.model'"));
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.string("tokenizer.ggml.pre", "llama-bpe");
    EXPECT_TRUE(has(error(), "not 'gpt2' with 'llama-bpe'"));

    writer = tokenizer_writer(Vocabulary());
    EXPECT_TRUE(has(error(), "there is no metadata 'tokenizer.ggml.eos_token_id'"));
    writer.uint32("tokenizer.ggml.eos_token_id", 100000);
    EXPECT_TRUE(has(error(), "tokenizer.ggml.eos_token_id is 100000, but there are"));
}

TEST(SmollmUnicode, KnowsTheClassesOfCharacters) {
    for (const char32_t code : {U'a', U'Z', U'\u00e9', U'\u00aa', U'\u4e2d', U'\U000323af'}) {
        EXPECT_EQ(smollm::class_of(code), CharClass::letter) << std::hex << code;
    }
    for (const char32_t code : {U'0', U'\u00b2', U'\u0663', U'\u2163', U'\u3007'}) {
        EXPECT_EQ(smollm::class_of(code), CharClass::number) << std::hex << code;
    }
    for (const char32_t code : {U'\t', U' ', U'\u0085', U'\u00a0', U'\u2028', U'\u3000'}) {
        EXPECT_EQ(smollm::class_of(code), CharClass::space) << std::hex << code;
    }
    for (const char32_t code : {U'\0', U'!', U'\u001c', U'\u0301', U'\u200b', U'\U0001f600',
                                U'\U0010ffff', smollm::kInvalidChar}) {
        EXPECT_EQ(smollm::class_of(code), CharClass::other) << std::hex << code;
    }
}

TEST(SmollmUnicode, ReadsUtf8AndBytesThatAreNot) {
    const auto first = [](const char* text) { return smollm::first_char(text); };
    EXPECT_EQ(first("a").code, U'a');
    EXPECT_EQ(first("\u00e9x").code, U'\u00e9');
    EXPECT_EQ(first("\u4e2dx").code, U'\u4e2d');
    EXPECT_EQ(first("\U0001f600x").code, U'\U0001f600');
    EXPECT_EQ(first("\U0001f600x").size_bytes, 4u);
    const char* const cut_short[] = {"\x80", "\xc3", "\xc3(", "\xe4\xb8", "\xf0\x9f\x98"};
    const char* const too_long_for_its_code[] = {"\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf",
                                                 "\xf0\x8f\xbf\xbf"};
    const char* const no_code_point[] = {"\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80",
                                         "\xff"};
    const auto expect_invalid = [](const auto& texts) {
        for (const char* text : texts) {
            EXPECT_EQ(smollm::first_char(text).code, smollm::kInvalidChar);
            EXPECT_EQ(smollm::first_char(text).size_bytes, 1u);
        }
    };
    expect_invalid(cut_short);
    expect_invalid(too_long_for_its_code);
    expect_invalid(no_code_point);
}

TEST(SmollmChat, WritesMessagesAsTheModelKnowsThem) {
    const std::string known =
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}";
    GgufWriter writer;
    writer.string("tokenizer.chat_template", known);
    const TemporaryFile on_disk(writer.bytes());
    const GgufFile file(on_disk.path());
    EXPECT_EQ(smollm::apply_chat_template(file, {{"system", "Be brief."}, {"user", "Hi"}}),
              "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
              "<|im_start|>assistant\n");
    EXPECT_EQ(smollm::apply_chat_template(
                  file, {{"user", "Hi"}, {"assistant", "Hello"}, {"user", "Bye"}}),
              "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
              "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
              "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(smollm::apply_chat_template(file, {}), "<|im_start|>assistant\n");
}

TEST(SmollmChat, RefusesAnotherTemplate) {
    GgufWriter writer;
    const auto error = [&writer] {
        const TemporaryFile on_disk(writer.bytes());
        return error_of([&] { smollm::apply_chat_template(GgufFile(on_disk.path()), {}); });
    };
    EXPECT_TRUE(has(error(), "there is no metadata 'tokenizer.chat_template'"));
    writer.string("tokenizer.chat_template", "{{ messages }}");
    EXPECT_TRUE(has(error(), "the chat template is not that of SmolLM2"));
}

// Reads a file as the example does. It works or throws std::runtime_error; nothing else.
void read_all(const std::string& bytes) {
    const TemporaryFile on_disk(bytes);
    error_of([&on_disk] {
        const GgufFile file(on_disk.path());
        for (const char* name : {"vector", "matrix"}) {
            if (!file.has_tensor(name)) continue;
            const smollm::GgufTensor& tensor = file.tensor(name);
            volatile std::uint8_t last = tensor.data[tensor.size_bytes - 1];
            static_cast<void>(last);
        }
        const Tokenizer tokenizer(file);
        for (const std::int32_t token : tokenizer.encode("hello  <|im_end|> 12")) {
            tokenizer.bytes(token);
        }
    });
}

std::string small_model() {
    GgufWriter writer = tokenizer_writer(Vocabulary());
    writer.uint32("tokenizer.ggml.eos_token_id", 2);
    writer.tensor("vector", {3}, 0, floats({1, 2, 3}));
    writer.tensor("matrix", {32, 2}, 3, std::string(2 * 20, 'x'));
    return writer.bytes();
}

TEST(SmollmHostile, EveryTruncationIsAnError) {
    const std::string bytes = small_model();
    const std::size_t end_of_last_tensor = bytes.size() - 24;  // the rest is padding
    for (std::size_t size = 0; size < end_of_last_tensor; ++size) {
        EXPECT_NE(error_of_reading(bytes.substr(0, size)), "") << size;
    }
    EXPECT_EQ(error_of_reading(bytes.substr(0, end_of_last_tensor)), "");
}

TEST(SmollmHostile, ChangedBytesAreReadOrAnError) {
    const std::string bytes = small_model();
    for (std::size_t at = 0; at < bytes.size(); ++at) {
        for (const int value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
            std::string changed = bytes;
            changed[at] = static_cast<char>(value);
            read_all(changed);
        }
    }
    std::mt19937 random(1);
    for (int i = 0; i < 2000; ++i) {
        std::string changed = bytes;
        for (int change = 0; change < 8; ++change) {
            changed[random() % changed.size()] = static_cast<char>(random());
        }
        read_all(changed);
    }
}

}  // namespace
