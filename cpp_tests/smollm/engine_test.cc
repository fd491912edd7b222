// The whole engine with the real model: what a text becomes depends on its prompt alone.
//
// KVPAGES_SMOLLM_MODEL names the model's file; without it these tests are skipped.
#include "smollm/check.h"
#include "smollm/gguf.h"
#include "smollm/kv_cache.h"
#include "smollm/model.h"
#include "smollm/prompts.h"
#include "smollm/sampler.h"
#include "smollm/serve.h"
#include "smollm/server.h"
#include "smollm/threads.h"
#include "smollm/tokenizer.h"

#include "standin.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace smollm;

/// The model, read once.
struct Loaded {
    explicit Loaded(const std::string& path, std::size_t num_threads = 2)
        : file(path), tokenizer(file), threads(num_threads), model(file, threads) {}

    GgufFile file;
    Tokenizer tokenizer;
    ThreadPool threads;
    Model model;
};

class SmolLM : public testing::Test {
protected:
    void SetUp() override {
        const char* path = std::getenv("KVPAGES_SMOLLM_MODEL");
        if (path == nullptr || *path == '\0') GTEST_SKIP() << "KVPAGES_SMOLLM_MODEL is not set";
        if (!loaded) loaded = std::make_unique<Loaded>(path);
    }

    static void TearDownTestSuite() { loaded.reset(); }

    static std::unique_ptr<Loaded> loaded;
};

std::unique_ptr<Loaded> SmolLM::loaded;

/// What became of a text: its tokens, and a hash of the bits of all logits they were chosen from.
struct Outcome {
    std::vector<std::int32_t> tokens;
    std::uint64_t logits = 0xcbf29ce484222325u;

    bool operator==(const Outcome& other) const {
        return tokens == other.tokens && logits == other.logits;
    }
};

void PrintTo(const Outcome& outcome, std::ostream* out) {
    *out << "tokens " << testing::PrintToString(outcome.tokens) << ", logits " << outcome.logits;
}

using Outcomes = std::map<std::pair<std::size_t, std::size_t>, Outcome>;  ///< by prompt, sample

std::uint64_t hash_of(std::uint64_t hash, Logits logits) {
    for (const float logit : logits) {
        std::uint32_t bits;
        std::memcpy(&bits, &logit, sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
}

/// Keeps what is chosen.
class Recorder : public Client {
public:
    Recorder(const SamplingOptions& sampling, std::vector<std::size_t> prompts)
        : sampling_(sampling), prompts_(std::move(prompts)) {}

    std::int32_t choose(const Sequence& sequence, Logits logits) override {
        const std::pair key(prompts_.at(sequence.request), sequence.sample);
        Outcome& outcome = outcomes[key];
        outcome.logits = hash_of(outcome.logits, logits);
        const auto [sampler, _] =
            samplers_.try_emplace(key, sampling_, key.first * 100 + key.second);
        outcome.tokens.push_back(sampler->second.choose(logits));
        return outcome.tokens.back();
    }

    Outcomes outcomes;

private:
    SamplingOptions sampling_;
    std::vector<std::size_t> prompts_;  ///< by request
    std::map<std::pair<std::size_t, std::size_t>, Sampler> samplers_;
};

/// How requests are served.
struct Service {
    CacheOptions cache;
    ServerOptions server;
    SamplingOptions sampling;
    std::vector<std::size_t> order;  ///< which requests arrive, one after the other; empty: all
    std::size_t gap = 0;
    std::optional<std::uint64_t> shuffle;
};

struct Served {
    Outcomes outcomes;
    ServerCounts counts;
    std::uint64_t num_reused = 0;
    std::uint64_t num_held = 0;
};

Served serve(Loaded& loaded, const std::vector<Request>& requests, Service how) {
    how.server.end_token = loaded.tokenizer.end_token();
    how.cache.max_requests = how.server.max_running;
    how.cache.max_tokens = how.server.max_tokens;
    if (how.order.empty()) {
        how.order.resize(requests.size());
        std::iota(how.order.begin(), how.order.end(), std::size_t{0});
    }
    KvCache cache(loaded.model.config(), how.cache, loaded.threads);
    Recorder recorder(how.sampling, how.order);
    Server server(loaded.model, cache, recorder, how.server);
    if (how.shuffle) server.shuffle_blocks(*how.shuffle);
    smollm::serve(
        server, how.order, how.gap, [&](std::size_t request) { return requests[request]; },
        [](std::size_t) {},
        [](std::size_t request, const std::string& why) {
            ADD_FAILURE() << "request " << request << ": " << why;
        });
    Served served;
    served.outcomes = recorder.outcomes;
    served.counts = server.counts();
    served.num_reused = server.blocks().num_reused();
    served.num_held = server.blocks().num_held();
    return served;
}

/// Each request with everything to itself.
Outcomes alone(Loaded& loaded, const std::vector<Request>& requests, Service how = {}) {
    how.server.max_running = 1;
    how.server.chunk_size = how.server.max_tokens;
    Outcomes outcomes;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        how.order = {i};
        outcomes.merge(serve(loaded, requests, how).outcomes);
    }
    return outcomes;
}

/// Short prompts of different lengths, so that most do not fill their last block.
std::vector<Request> short_requests(const Loaded& loaded, std::size_t count,
                                    std::size_t max_new_tokens) {
    static const char* const subjects[] = {"The sea", "A small engine", "My grandmother",
                                           "The number 42", "Rain in Köln", "Every page",
                                           "A cat with a hat", "The oldest bridge in town"};
    static const char* const rests[] = {
        " is", " was never seen again until the day when", " likes to say that",
        " and the other one went to the market, where they bought bread, cheese and"};
    std::vector<Request> requests;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string text = std::string(subjects[i % 8]) + rests[i / 8 % 4];
        requests.push_back({loaded.tokenizer.encode(text), max_new_tokens, 1});
    }
    return requests;
}

const CacheType& type_named(const std::string& name) {
    return *std::find_if(cache_types().begin(), cache_types().end(),
                         [&](const CacheType& type) { return type.name == name; });
}

TEST_F(SmolLM, ThirtyTwoRequestsInTightMemory) {
    const std::vector<Request> requests = short_requests(*loaded, 32, 12);
    Service tight;
    tight.cache.block_size = 8;
    tight.cache.num_blocks = 14;
    tight.server.max_running = 8;
    tight.server.max_tokens = 48;
    tight.server.chunk_size = 7;
    const Served served = serve(*loaded, requests, tight);
    EXPECT_EQ(served.outcomes.size(), 32u);
    EXPECT_EQ(served.outcomes, alone(*loaded, requests));
    EXPECT_GT(served.counts.preemptions, 0u) << "memory was not tight";
    EXPECT_GT(served.counts.repeated_tokens, 0u);
    EXPECT_GT(served.num_reused, 32u);
    EXPECT_EQ(served.num_held, 0u) << "blocks were not given back";
}

TEST_F(SmolLM, NeitherArrivalNorFragmentationChangesATextByABit) {
    const std::vector<Request> requests = short_requests(*loaded, 10, 10);
    const Outcomes expected = alone(*loaded, requests);
    std::mt19937_64 random(1);
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
        Service how;
        how.order.resize(requests.size());
        std::iota(how.order.begin(), how.order.end(), std::size_t{0});
        engine::shuffle(how.order, seed);
        how.gap = random() % 4;
        how.shuffle = random();
        how.cache.block_size = std::uint64_t{8} << random() % 3;
        how.cache.num_blocks = 6 + random() % 40;
        how.server.max_running = 2 + random() % 8;
        how.server.max_tokens = 16 + random() % 64;
        how.server.chunk_size = 1 + random() % 24;
        EXPECT_EQ(serve(*loaded, requests, how).outcomes, expected) << "seed " << seed;
    }
}

TEST_F(SmolLM, NeitherLayoutNorBlockSizeChangesATextByABit) {
    std::vector<Request> requests = short_requests(*loaded, 4, 6);
    for (const CacheType& type : cache_types()) {
        Service how;
        how.cache.type = type;
        const Outcomes expected = alone(*loaded, requests, how);
        for (const CacheLayout& layout : cache_layouts()) {
            for (const auto& [block, kernel_block] :
                 {std::pair(8, 8), std::pair(16, 8), std::pair(16, 16), std::pair(32, 8),
                  std::pair(32, 16), std::pair(32, 32)}) {
                how.cache.layout = layout;
                how.cache.block_size = static_cast<std::uint64_t>(block);
                how.cache.kernel_block_size = static_cast<std::uint64_t>(kernel_block);
                EXPECT_EQ(serve(*loaded, requests, how).outcomes, expected)
                    << type.name << ' ' << layout.name << ' ' << block << '/' << kernel_block;
            }
        }
    }
}

TEST_F(SmolLM, ThreadsDoNotChangeATextByABit) {
    const std::vector<Request> requests = short_requests(*loaded, 3, 6);
    const Outcomes expected = alone(*loaded, requests);
    for (const std::size_t num_threads : {std::size_t{1}, std::size_t{3}}) {
        Loaded other(loaded->file.path(), num_threads);
        EXPECT_EQ(serve(other, requests, {}).outcomes, expected) << num_threads << " threads";
    }
}

/// Device memory is not the host's to touch, and work waits until it is waited for.
TEST_F(SmolLM, ADeviceDoesNotChangeATextByABit) {
    std::vector<Request> requests = short_requests(*loaded, 6, 6);
    requests[1].num_samples = 3;
    for (const char* type : {"f16", "int8"}) {
        Service how;
        how.cache.type = type_named(type);
        how.cache.num_blocks = 12;
        how.sampling.temperature = 0.9f;
        const Outcomes expected = serve(*loaded, requests, how).outcomes;
        how.cache.place = {0};
        standin_set_protected(true);
        standin_set_deferred(true);
        const Served served = serve(*loaded, requests, how);
        standin_set_protected(false);
        standin_set_deferred(false);
        EXPECT_EQ(served.outcomes, expected) << type;
        EXPECT_GT(served.counts.forks, 0u) << type;
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
    }
}

TEST_F(SmolLM, ForksAreWhatTheirSamplesWouldBeAlone) {
    std::vector<Request> requests = short_requests(*loaded, 3, 12);
    Service how;
    how.sampling.temperature = 0.9f;
    how.sampling.top_p = 0.95f;
    how.sampling.seed = 7;
    for (Request& request : requests) request.num_samples = 4;
    how.cache.block_size = 8;
    const Served roomy = serve(*loaded, requests, how);
    EXPECT_EQ(roomy.counts.forks, 9u);
    EXPECT_EQ(roomy.counts.repeated_tokens, 0u) << "forks compute nothing again";
    EXPECT_EQ(roomy.outcomes.size(), 12u);
    EXPECT_EQ(roomy.num_held, 0u);

    // Samples are told apart, and none is another's.
    for (std::size_t prompt = 0; prompt < 3; ++prompt) {
        EXPECT_NE(roomy.outcomes.at({prompt, 0}).tokens, roomy.outcomes.at({prompt, 1}).tokens);
    }
    // Without the memory or the rows to fork, prompts are computed again, to the same end.
    Service tight = how;
    tight.cache.num_blocks = 7;
    tight.server.max_running = 3;
    const Served narrow = serve(*loaded, requests, tight);
    EXPECT_GT(narrow.counts.late_forks, 0u);
    EXPECT_GT(narrow.counts.repeated_tokens, 0u);
    EXPECT_EQ(narrow.outcomes, roomy.outcomes);
    // One after the other there is nothing to share with.
    tight.server.max_running = 1;
    tight.cache.num_blocks = 32;
    EXPECT_EQ(serve(*loaded, requests, tight).outcomes, roomy.outcomes);
}

/// Chooses what another run chose, and compares logits.
class Follower : public Client {
public:
    Follower(std::vector<std::vector<std::vector<float>>>& kept, bool keeps)
        : kept_(kept), keeps_(keeps) {}

    std::int32_t choose(const Sequence& sequence, Logits logits) override {
        if (keeps_) {
            kept_[sequence.request].emplace_back(logits.begin(), logits.end());
            return most_likely(logits);
        }
        const std::vector<float>& theirs = kept_[sequence.request][sequence.num_new()];
        for (std::size_t i = 0; i < logits.size(); ++i) {
            largest = std::max(largest, std::fabs(logits[i] - theirs[i]));
        }
        const std::int32_t token = most_likely(theirs);
        num_equal += most_likely(logits) == token;
        ++num_steps;
        return token;
    }

    float largest = 0;
    std::size_t num_equal = 0, num_steps = 0;

private:
    std::vector<std::vector<std::vector<float>>>& kept_;
    bool keeps_;
};

TEST_F(SmolLM, SmallerTypesStayNearF32) {
    const std::vector<Request> requests = short_requests(*loaded, 8, 12);
    std::vector<std::vector<std::vector<float>>> logits(requests.size());
    const auto run = [&](const std::string& type, bool keeps) {
        CacheOptions cache_options;
        cache_options.type = type_named(type);
        KvCache cache(loaded->model.config(), cache_options, loaded->threads);
        Follower follower(logits, keeps);
        Server server(loaded->model, cache, follower, {});
        for (const Request& request : requests) server.add(request);
        while (server.is_busy()) server.step();
        return follower;
    };
    run("f32", true);
    struct Bound {
        const char* type;
        float logits;
        double share;
    };
    for (const Bound& bound : {Bound{"f16", 0.1f, 0.98}, Bound{"bf16", 0.8f, 0.95},
                               Bound{"fp8", 6, 0.8}, Bound{"int8", 2, 0.9}}) {
        const Follower follower = run(bound.type, false);
        const double share =
            static_cast<double>(follower.num_equal) / static_cast<double>(follower.num_steps);
        std::printf("%-5s %zu of %zu tokens equal, all logits within %g\n", bound.type,
                    follower.num_equal, follower.num_steps,
                    static_cast<double>(follower.largest));
        EXPECT_LE(follower.largest, bound.logits) << bound.type;
        EXPECT_GT(follower.largest, 0) << bound.type << ": not stored in that type";
        EXPECT_GE(share, bound.share) << bound.type;
    }
}

TEST_F(SmolLM, RequestsThatCannotEndAreRefusedAndOthersGoOn) {
    std::vector<Request> requests = short_requests(*loaded, 2, 4);
    CacheOptions options;
    options.num_blocks = 2;
    KvCache cache(loaded->model.config(), options, loaded->threads);
    Recorder recorder({}, {0, 1});
    Server server(loaded->model, cache, recorder, {});
    server.add(requests[0]);
    Request longer = requests[1];
    longer.max_new_tokens = 100;
    EXPECT_THROW(server.add(longer), std::runtime_error);
    longer.max_new_tokens = 1 << 20;
    EXPECT_THROW(server.add(longer), std::runtime_error);
    EXPECT_THROW(server.add({{}, 4, 1}), std::invalid_argument);
    server.add(requests[1]);
    while (server.is_busy()) server.step();
    EXPECT_EQ(recorder.outcomes, alone(*loaded, requests));
}

}  // namespace
