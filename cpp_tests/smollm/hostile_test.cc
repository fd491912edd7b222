// What the smollm example refuses of files and options. No model needed.
#include "smollm/check.h"
#include "smollm/gguf.h"
#include "smollm/model.h"
#include "smollm/options.h"
#include "smollm/prompts.h"
#include "smollm/sampler.h"
#include "smollm/threads.h"
#include "support/gguf.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace smollm;
using support::GgufWriter;
using support::TemporaryFile;

// What a call throws; empty if it throws nothing.
template <typename Call>
std::string error_of(const Call& call) {
    try {
        call();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

bool has(const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
}

std::string answers(const std::string& prompt_ids, const std::string& greedy_ids,
                    const std::string& first_top5) {
    return R"([{"prompt": "a", "margins": [1], "prompt_ids": )" + prompt_ids +
           R"(, "greedy_ids": )" + greedy_ids + R"(, "first_top5": )" + first_top5 + "}]";
}

TEST(SmollmHostileFile, APipeIsNotWaitedFor) {
    const std::string path = TemporaryFile("").path() + "-pipe";
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    const std::string error = error_of([&] { GgufFile file(path); });
    std::remove(path.c_str());
    EXPECT_TRUE(has(error, "not a regular file")) << error;
}

TEST(SmollmHostileFile, HeadsThatAreNotWholeLanesAreRefused) {
    GgufWriter writer;
    writer.string("general.architecture", "llama");
    // Two heads of 24 make rows of 48, which are whole lanes.
    for (const char* key : {"block_count", "attention.head_count_kv", "feed_forward_length"}) {
        writer.uint32(std::string("llama.") + key, 1);
    }
    writer.uint32("llama.attention.head_count", 2);
    writer.uint32("llama.embedding_length", 48);
    writer.uint32("llama.context_length", 64);
    writer.float32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    writer.tensor("token_embd.weight", {48, 2}, 0, std::string(2 * 48 * 4, '\0'));
    const TemporaryFile on_disk(writer.bytes());
    const GgufFile file(on_disk.path());
    ThreadPool threads(1);
    const std::string error = error_of([&] { Model model(file, threads); });
    EXPECT_TRUE(has(error, "heads of 24, not of a multiple of 16")) << error;
}

TEST(SmollmHostilePrompts, NoneAreRefused) {
    const TemporaryFile file("[]");
    for (const bool with_answers : {false, true}) {
        const std::string error = error_of([&] { read_prompts(file.path(), with_answers); });
        EXPECT_TRUE(has(error, "there are no prompts")) << error;
    }
}

TEST(SmollmHostilePrompts, TokensNeitherWrapNorLoseTheirFraction) {
    ASSERT_EQ(error_of([] {
                  const TemporaryFile file(answers("[1]", "[2147483647]", "[[3, 0.5]]"));
                  read_prompts(file.path(), true);
              }),
              "");
    for (const char* token :
         {"4294967297", "18446744073709551615", "2147483648", "1.5", "1e300", "-1", "true",
          "null"}) {
        const std::string ids = std::string("[") + token + "]";
        for (const std::string& text :
             {answers(ids, "[1]", "[]"), answers("[1]", ids, "[]"),
              answers("[1]", "[1]", "[[" + std::string(token) + ", 1]]")}) {
            const TemporaryFile file(text);
            const std::string error = error_of([&] { read_prompts(file.path(), true); });
            EXPECT_TRUE(has(error, "is not a token")) << text << ": " << error;
        }
    }
}

TEST(SmollmHostileCheck, ATokenThatTheModelDoesNotHaveIsNoNearTie) {
    Prompt prompt;
    prompt.id = "it";
    prompt.greedy_ids = {4};
    prompt.margins = {0};
    const std::vector<Prompt> prompts{prompt};
    Check check(prompts, {0.05f, 0.05f, 0});
    check.add_request(0);
    const Sequence sequence{0, 0, 1, 1, 1, {1}, 0, 0, 0, engine::HeldBlocks(16)};
    const std::vector<float> logits{0, 1, 2, 3};
    const std::string error = error_of([&] { check.choose(sequence, logits); });
    EXPECT_TRUE(has(error, "it: greedy_ids has token 4")) << error;
}

TEST(SmollmHostileSampler, RefusesLogitsThatAreNotFinite) {
    for (const float temperature : {0.0f, 1.0f}) {
        SamplingOptions options;
        options.temperature = temperature;
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity()}) {
            Sampler sampler(options, 0);
            const std::vector<float> logits{1, bad, 2};
            EXPECT_THROW(sampler.choose(logits), std::runtime_error);
        }
    }
}

TEST(SmollmHostileOptions, WhatHasMemoryOfItsOwnIsBounded) {
    const auto parse = [](const char* name, const char* value) {
        std::vector<std::string> words{"smollm", "--model", "m", "--prompt", "p", name, value};
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        return error_of([&] { parse_options(static_cast<int>(argv.size()), argv.data()); });
    };
    EXPECT_EQ(parse("--samples", "1024"), "");
    EXPECT_TRUE(has(parse("--samples", "1025"), "from 1 to 1024"));
    EXPECT_EQ(parse("--threads", "256"), "");
    EXPECT_TRUE(has(parse("--threads", "257"), "from 1 to 256"));
}

}  // namespace
