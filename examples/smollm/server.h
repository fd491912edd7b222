// Continuous batching: requests come, run together step by step, wait for memory, and go.
#pragma once

#include "../engine/blocks.h"
#include "kv_cache.h"
#include "model.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace smollm {

/// One number for each token of the vocabulary.
using Logits = kvpages::Span<const float>;

/// What somebody asks for.
struct Request {
    std::vector<std::int32_t> prompt;  ///< not empty
    std::size_t max_new_tokens = 0;    ///< at least 1
    std::size_t num_samples = 1;       ///< texts that go on from the same prompt
};

/// One text in the making.
struct Sequence {
    std::size_t request = 0;  ///< number of the request, in the order of arrival
    std::size_t sample = 0;   ///< which of the request's
    std::size_t num_samples = 1;
    std::size_t prompt_length = 0;
    std::size_t max_new_tokens = 0;
    std::vector<std::int32_t> tokens;  ///< the prompt, and what was chosen
    std::size_t num_cached = 0;        ///< tokens whose keys and values are in the cache
    std::size_t num_computed = 0;      ///< tokens whose keys and values ever were
    std::size_t row = 0;               ///< in the block table, while it runs
    engine::HeldBlocks blocks;

    std::size_t num_new() const { return tokens.size() - prompt_length; }
};

/// Chooses tokens, and is told of what happens.
class Client {
public:
    virtual ~Client() = default;

    /// The next token of a sequence, from the logits of all tokens.
    virtual std::int32_t choose(const Sequence& sequence, Logits logits) = 0;
    /// The chosen token is the sequence's last one now.
    virtual void on_token(const Sequence&) {}
    virtual void on_finished(const Sequence&) {}
};

struct ServerOptions {
    std::size_t max_running = 16;  ///< sequences of a step
    std::size_t max_tokens = 256;  ///< of a step
    std::size_t chunk_size = 64;   ///< most tokens of one sequence in a step
    std::int32_t end_token = -1;
};

/// What a server did.
struct ServerCounts {
    std::size_t steps = 0;
    std::size_t computed_tokens = 0;  ///< whose keys and values were stored, for the first time
    std::size_t new_tokens = 0;       ///< chosen
    std::size_t repeated_tokens = 0;  ///< computed again, by who was preempted or could not fork
    std::size_t preemptions = 0;
    std::size_t forks = 0;        ///< that share their prompt's blocks
    std::size_t late_forks = 0;   ///< for which there was no room, and that wait
    double seconds = 0;               ///< of steps
};

/// Serves requests. A step has one token of each running sequence that is past its prompt, and the
/// next chunk of those that are not, as far as its tokens suffice. Of the running ones the oldest go
/// first; when blocks run out, the youngest gives its own back and is computed again later.
class Server {
public:
    Server(Model& model, KvCache& cache, Client& client, const ServerOptions& options);

    /// Another order in which blocks are handed out.
    void shuffle_blocks(std::uint64_t seed) { pool_.shuffle(seed); }

    /// Returns the request's number. Throws when it could not end with all blocks to itself.
    std::size_t add(const Request& request);
    /// Whether there is anything to do.
    bool is_busy() const { return !running_.empty() || !waiting_.empty(); }
    void step();

    const ServerCounts& counts() const { return counts_; }
    const engine::BlockPool& blocks() const { return pool_; }

private:
    /// The tokens of one step, one sequence after another.
    struct Batch {
        std::vector<Sequence*> sequences;
        std::vector<std::int32_t> rows, query_start, seq_lens, tokens;
        std::vector<std::int64_t> positions;

        void clear();
        void add(Sequence& sequence, std::size_t num_tokens);
    };

    using Sequences = std::vector<std::unique_ptr<Sequence>>;  ///< the oldest first

    void schedule();
    bool schedule_running();
    void schedule_waiting();
    std::size_t num_next_tokens(const Sequence& sequence, std::size_t num_behind) const;
    bool has_room(const Sequence& sequence, std::size_t num_tokens) const;
    void schedule(Sequence& sequence, std::size_t num_tokens);

    void start(std::unique_ptr<Sequence> sequence);
    void preempt_youngest();
    void release(Sequence& sequence);

    void advance();
    void count(Sequence& sequence, std::size_t end);
    void choose(Sequence& sequence, Logits logits);
    void fork(const Sequence& from, std::size_t sample, Logits logits);
    bool is_finished(const Sequence& sequence) const;
    void drop_finished();

    Model& model_;
    KvCache& cache_;
    Client& client_;
    ServerOptions options_;
    engine::BlockPool pool_;
    std::vector<std::size_t> free_rows_;
    std::size_t num_requests_ = 0;
    Sequences waiting_, running_;
    Batch batch_;
    std::vector<std::size_t> wanted_;  ///< tokens of the batch that another one follows
    std::vector<float> logits_;
    ServerCounts counts_;
};

}  // namespace smollm
