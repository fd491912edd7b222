// What the command line says.
#pragma once

#include "kv_cache.h"
#include "sampler.h"
#include "server.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smollm {

/// In which order requests arrive.
struct Order {
    enum Kind { given, reversed, random } kind = given;
    std::uint64_t seed = 0;  ///< of random
};

struct Options {
    std::string model;
    std::vector<std::string> prompts;  ///< texts
    std::string prompts_file;
    std::optional<std::string> system;
    bool is_raw = false;  ///< texts are taken as they are
    bool check = false;
    bool explain = false;
    std::size_t max_new_tokens = 64;
    std::size_t num_samples = 1;
    SamplingOptions sampling;
    CacheOptions cache;
    std::size_t max_running = 16;
    std::size_t max_tokens = 256;
    std::size_t chunk_size = 64;
    Order order;
    std::size_t gap = 0;  ///< steps from one arrival to the next
    std::optional<std::uint64_t> shuffle_blocks;
    std::size_t num_threads = 2;
};

/// Throws std::invalid_argument that says what is wrong. Empty when help was asked for, and printed.
std::optional<Options> parse_options(int argc, char** argv);

}  // namespace smollm
