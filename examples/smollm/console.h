// Prints texts as they come, and what they cost.
#pragma once

#include "kv_cache.h"
#include "sampler.h"
#include "server.h"
#include "tokenizer.h"

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace smollm {

/// Samples, and writes texts to standard output: one streams, those behind it are kept until it has
/// ended.
class Console : public Client {
public:
    Console(const Tokenizer& tokenizer, const SamplingOptions& sampling)
        : tokenizer_(tokenizer), sampling_(sampling) {}

    /// A request's texts begin with this line. To be called in the order of requests.
    void add_request(const std::string& title, std::size_t num_samples);

    std::int32_t choose(const Sequence& sequence, Logits logits) override;
    void on_token(const Sequence& sequence) override;
    void on_finished(const Sequence& sequence) override;

private:
    struct Text {
        std::string title;
        Sampler sampler;
        std::string waiting;  ///< not printed yet
        bool is_finished = false;
    };

    Text& text_of(const Sequence& sequence);
    void print();

    const Tokenizer& tokenizer_;
    SamplingOptions sampling_;
    std::vector<std::size_t> first_texts_;  ///< by request
    std::vector<Text> texts_;               ///< in the order in which they are printed
    std::size_t current_ = 0;               ///< that streams
    bool has_title_ = false;                ///< the current one's is printed
};

/// What a run cost, as a table.
void print_summary(const Server& server, const KvCache& cache, const CacheOptions& options);

}  // namespace smollm
