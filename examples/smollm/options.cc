#include "options.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>

namespace smollm {

namespace {

constexpr const char* kHelp = R"(usage: smollm --model FILE (--prompt TEXT | --prompts FILE)... [OPTION...]

Runs SmolLM2-135M-Instruct, or another small model of the llama architecture with its tokenizer, on
a paged KV cache made by kvpages. All prompts are served at once, with continuous batching.

  --model FILE          GGUF; weights in F32, F16, Q8_0, Q6_K or Q4_1

what to say
  --prompt TEXT         a user's message; may be given more than once
  --system TEXT         the system's message for them; the model's own when not given
  --raw                 prompts are plain text, without the model's chat template
  --prompts FILE        a JSON array of {"id", "prompt"}; the template is in them, where it is wanted
  --check               compares with "prompt_ids", "greedy_ids", "margins" and "first_top5" of the
                        file: a line for each prompt, then "N passed, M failed"; status 1 if M > 0,
                        or if with an 8-bit cache less than 75 % of all tokens are equal
  --max-tokens N        of each text, at most; 64
  --samples N           texts from each prompt, which share its blocks, at most 1024; 1
  --temperature T       0: always the most likely token; 0
  --top-k N             draw among the N most likely; 0: all
  --top-p P             draw among the most likely that have probability P together; 1
  --seed N              of the draws; 0

the cache
  --cache TYPE          f32, f16, bf16, fp8 (one scale for all) or int8 (scales for each token and
                        head); f16
  --layout LAYOUT       nhd, hnd or kv-first; nhd
  --block-size N        tokens of a block; 16
  --kernel-block N      tokens of a kernel block, which divide a block; those of a block
  --blocks N            blocks that there are. With few, requests wait and are computed again; 256
  --shuffle-blocks N    blocks are handed out in another order, by this seed
  --device DEVICE       host, or cuda:N: the cache, its tables and what kvpages does are on that CUDA
                        device. The model is computed on the host all the same, so this is slower;
                        host
  --explain             prints how the memory is shared out

the engine
  --max-requests N      texts that run at the same time; 16
  --batch-tokens N      tokens of a step, at most; 256
  --chunk N             tokens of one prompt in a step, at most; 64
  --order ORDER         in which requests arrive: given, reversed or random:SEED; given
  --gap N               steps from one arrival to the next; 0
  --threads N           at most 256; 2
  --help

Steps are counted from 0. A near-tie, a step of --check whose margin is small for the type of the
cache, may differ without fault; it is named.
)";

// What kvpages sizes by a number is checked there; this keeps sums from wrapping.
constexpr std::uint64_t kMostOfAny = std::numeric_limits<std::int32_t>::max();
// Each sample and each thread has memory of its own, which nothing else bounds.
constexpr std::uint64_t kMostSamples = 1024;
constexpr std::uint64_t kMostThreads = 256;

std::uint64_t whole(const std::string& text, std::uint64_t least = 0,
                    std::uint64_t most = kMostOfAny) {
    std::size_t end = 0;
    std::uint64_t value = 0;
    try {
        if (text.find_first_not_of("0123456789") == std::string::npos) {
            value = std::stoull(text, &end);
        }
    } catch (const std::out_of_range&) {
    }
    if (end == 0 || end != text.size() || value < least || value > most) {
        throw std::invalid_argument("is \"" + text + "\", not a number from " +
                                    std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
}

float real(const std::string& text, float least, float most) {
    char* end = nullptr;
    const float value = std::strtof(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= least && value <= most)) {
        throw std::invalid_argument("is \"" + text + "\", not a number from " +
                                    std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
}

template <typename Named>
Named named(const std::string& name, const std::vector<Named>& all) {
    std::string names;
    for (const Named& one : all) {
        if (name == one.name) return one;
        names += std::string(names.empty() ? "" : ", ") + one.name;
    }
    throw std::invalid_argument("is \"" + name + "\", not one of " + names);
}

Order order(const std::string& text) {
    const std::string random = "random:";
    if (text == "given") return {Order::given, 0};
    if (text == "reversed") return {Order::reversed, 0};
    if (text.compare(0, random.size(), random) == 0) {
        return {Order::random, whole(text.substr(random.size()))};
    }
    throw std::invalid_argument("is \"" + text + "\", not given, reversed or random:SEED");
}

using Set = std::function<void(const std::string&)>;

std::map<std::string, Set> options_with_value(Options& o) {
    const float infinity = std::numeric_limits<float>::infinity();
    return {
        {"--model", [&](const std::string& v) { o.model = v; }},
        {"--prompt", [&](const std::string& v) { o.prompts.push_back(v); }},
        {"--prompts", [&](const std::string& v) { o.prompts_file = v; }},
        {"--system", [&](const std::string& v) { o.system = v; }},
        {"--max-tokens", [&](const std::string& v) { o.max_new_tokens = whole(v, 1); }},
        {"--samples", [&](const std::string& v) { o.num_samples = whole(v, 1, kMostSamples); }},
        {"--temperature",
         [&, infinity](const std::string& v) { o.sampling.temperature = real(v, 0, infinity); }},
        {"--top-k", [&](const std::string& v) { o.sampling.top_k = whole(v); }},
        {"--top-p", [&](const std::string& v) { o.sampling.top_p = real(v, 0, 1); }},
        {"--seed", [&](const std::string& v) { o.sampling.seed = whole(v); }},
        {"--cache", [&](const std::string& v) { o.cache.type = named(v, cache_types()); }},
        {"--layout", [&](const std::string& v) { o.cache.layout = named(v, cache_layouts()); }},
        {"--block-size", [&](const std::string& v) { o.cache.block_size = whole(v, 1); }},
        {"--kernel-block", [&](const std::string& v) { o.cache.kernel_block_size = whole(v, 1); }},
        {"--blocks", [&](const std::string& v) { o.cache.num_blocks = whole(v, 1); }},
        {"--device", [&](const std::string& v) { o.cache.place = device::parse_place(v); }},
        {"--shuffle-blocks", [&](const std::string& v) { o.shuffle_blocks = whole(v); }},
        {"--max-requests", [&](const std::string& v) { o.max_running = whole(v, 1); }},
        {"--batch-tokens", [&](const std::string& v) { o.max_tokens = whole(v, 1); }},
        {"--chunk", [&](const std::string& v) { o.chunk_size = whole(v, 1); }},
        {"--order", [&](const std::string& v) { o.order = order(v); }},
        {"--gap", [&](const std::string& v) { o.gap = whole(v); }},
        {"--threads", [&](const std::string& v) { o.num_threads = whole(v, 1, kMostThreads); }},
    };
}

void require_sense(const Options& o) {
    if (o.model.empty()) throw std::invalid_argument("--model is missing");
    if (o.prompts.empty() == o.prompts_file.empty()) {
        throw std::invalid_argument("give either --prompt or --prompts");
    }
    if (o.check && o.prompts_file.empty()) {
        throw std::invalid_argument("--check needs --prompts, whose file has the answers");
    }
    if (o.check && (o.num_samples > 1 || o.sampling.temperature > 0)) {
        throw std::invalid_argument("--check is greedy: no --samples, no --temperature");
    }
    if (!o.prompts_file.empty() && (o.system || o.is_raw)) {
        throw std::invalid_argument("--system and --raw are for --prompt");
    }
    if (o.system && o.is_raw) throw std::invalid_argument("--raw leaves no place for --system");
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv) {
    Options options;
    const std::map<std::string, Set> with_value = options_with_value(options);
    const std::map<std::string, bool*> flags{{"--raw", &options.is_raw},
                                             {"--check", &options.check},
                                             {"--explain", &options.explain}};
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help") {
            std::fputs(kHelp, stdout);
            return std::nullopt;
        }
        if (const auto flag = flags.find(name); flag != flags.end()) {
            *flag->second = true;
            continue;
        }
        const auto option = with_value.find(name);
        if (option == with_value.end()) throw std::invalid_argument("there is no option " + name);
        if (++i == argc) throw std::invalid_argument(name + " needs a value");
        try {
            option->second(argv[i]);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(name + " " + error.what());
        }
    }
    require_sense(options);
    options.cache.max_requests = options.max_running;
    options.cache.max_tokens = options.max_tokens;
    return options;
}

}  // namespace smollm
