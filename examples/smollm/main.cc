// A small inference engine on kvpages. Start reading at Server::step() and at KvCache.
//
// kv_cache     plan, cache, tables and operations: all calls to kvpages
// attention    attention in plain C++ that reads through a view, by the block table
// server       continuous batching: schedule, preempt, fork; serve: requests that arrive
// model, math  the transformer, and its arithmetic; quant: how weights are stored
// gguf, tokenizer, chat, unicode   the model's file, and text
// sampler, console, check, prompts, options, threads   what is around it

#include "chat.h"
#include "check.h"
#include "console.h"
#include "gguf.h"
#include "kv_cache.h"
#include "model.h"
#include "options.h"
#include "prompts.h"
#include "serve.h"
#include "server.h"
#include "threads.h"
#include "tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace smollm;

/// All that stays while requests come and go.
struct Engine {
    explicit Engine(const Options& its_options)
        : options(its_options),
          file(options.model),
          tokenizer(file),
          threads(options.num_threads),
          model(file, threads),
          cache(model.config(), options.cache, threads) {
        if (options.explain) std::printf("%s\n", cache.explain().c_str());
    }

    const Options& options;
    GgufFile file;
    Tokenizer tokenizer;
    ThreadPool threads;
    Model model;
    KvCache cache;
};

Server make_server(Engine& engine, Client& client) {
    ServerOptions options;
    options.max_running = engine.options.max_running;
    options.max_tokens = engine.options.max_tokens;
    options.chunk_size = engine.options.chunk_size;
    options.end_token = engine.tokenizer.end_token();
    Server server(engine.model, engine.cache, client, options);
    if (engine.options.shuffle_blocks) server.shuffle_blocks(*engine.options.shuffle_blocks);
    return server;
}

/// Numbers from 0 in the order in which requests arrive.
std::vector<std::size_t> order_of_arrival(std::size_t count, const Order& order) {
    std::vector<std::size_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), std::size_t{0});
    if (order.kind == Order::reversed) std::reverse(numbers.begin(), numbers.end());
    if (order.kind == Order::random) engine::shuffle(numbers, order.seed);
    return numbers;
}

std::vector<std::int32_t> encode(const Engine& engine, const Prompt& prompt) {
    std::vector<std::int32_t> ids = engine.tokenizer.encode(prompt.text);
    if (ids.empty()) throw std::runtime_error("it has no tokens");
    return ids;
}

std::vector<Prompt> prompts_of(const Engine& engine) {
    const Options& options = engine.options;
    if (!options.prompts_file.empty()) return read_prompts(options.prompts_file, options.check);
    std::vector<Prompt> prompts;
    for (const std::string& text : options.prompts) {
        Prompt prompt;
        prompt.id = text;
        std::vector<Message> messages;
        if (options.system) messages.push_back({"system", *options.system});
        messages.push_back({"user", text});
        prompt.text = options.is_raw ? text : apply_chat_template(engine.file, messages);
        prompts.push_back(std::move(prompt));
    }
    return prompts;
}

int generate(Engine& engine) {
    const Options& options = engine.options;
    const std::vector<Prompt> prompts = prompts_of(engine);
    Console console(engine.tokenizer, options.sampling);
    Server server = make_server(engine, console);
    bool all_served = true;
    serve(
        server, order_of_arrival(prompts.size(), options.order), options.gap,
        [&](std::size_t prompt) {
            return Request{encode(engine, prompts[prompt]), options.max_new_tokens,
                           options.num_samples};
        },
        [&](std::size_t prompt) { console.add_request(prompts[prompt].id, options.num_samples); },
        [&](std::size_t prompt, const std::string& why) {
            std::fprintf(stderr, "smollm: %s: %s\n", prompts[prompt].id.c_str(), why.c_str());
            all_served = false;
        });
    print_summary(server, engine.cache, options.cache);
    return all_served ? 0 : 1;
}

int check(Engine& engine) {
    const Options& options = engine.options;
    const std::vector<Prompt> prompts = prompts_of(engine);
    Check check(prompts, tolerance_of(options.cache.type));
    Server server = make_server(engine, check);
    serve(
        server, order_of_arrival(prompts.size(), options.order), options.gap,
        [&](std::size_t prompt) {
            std::vector<std::int32_t> ids = encode(engine, prompts[prompt]);
            check.compare_ids(prompt, ids);
            return Request{std::move(ids), prompts[prompt].greedy_ids.size(), 1};
        },
        [&](std::size_t prompt) { check.add_request(prompt); },
        [&](std::size_t prompt, const std::string& why) { check.refuse(prompt, why); });
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        std::printf("%-16s %s\n", prompts[i].id.c_str(), check.line(i).c_str());
    }
    std::printf("\n  %s\n", check.summary().c_str());
    print_summary(server, engine.cache, options.cache);
    std::printf("%zu passed, %zu failed\n", check.num_passed(),
                prompts.size() - check.num_passed());
    return check.num_passed() == prompts.size() && check.has_equal_share() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::optional<Options> options = parse_options(argc, argv);
        if (!options) return 0;
        Engine engine(*options);
        return options->check ? check(engine) : generate(engine);
    } catch (const kvpages::Error& error) {  // such as a device that is not there
        std::fprintf(stderr, "smollm: %s\n", error.what());
        return 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "smollm: %s\n", error.what());
        return 2;
    }
}
