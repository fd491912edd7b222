#include "server.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace smollm {

namespace {

bool is_older(const std::unique_ptr<Sequence>& a, const std::unique_ptr<Sequence>& b) {
    return std::pair(a->request, a->sample) < std::pair(b->request, b->sample);
}

void insert(std::vector<std::unique_ptr<Sequence>>& into, std::unique_ptr<Sequence> sequence) {
    const auto at = std::upper_bound(into.begin(), into.end(), sequence, is_older);
    into.insert(at, std::move(sequence));
}

}  // namespace

void Server::Batch::clear() {
    sequences.clear();
    rows.clear();
    query_start.assign(1, 0);
    seq_lens.clear();
    tokens.clear();
    positions.clear();
}

void Server::Batch::add(Sequence& sequence, std::size_t num_tokens) {
    const std::size_t end = sequence.num_cached + num_tokens;
    for (std::size_t position = sequence.num_cached; position < end; ++position) {
        tokens.push_back(sequence.tokens[position]);
        positions.push_back(static_cast<std::int64_t>(position));
    }
    sequences.push_back(&sequence);
    rows.push_back(static_cast<std::int32_t>(sequence.row));
    query_start.push_back(static_cast<std::int32_t>(tokens.size()));
    seq_lens.push_back(static_cast<std::int32_t>(end));
}

Server::Server(Model& model, KvCache& cache, Client& client, const ServerOptions& options)
    : model_(model), cache_(cache), client_(client), options_(options), pool_(cache.num_blocks()) {
    for (std::size_t row = options.max_running; row > 0; --row) free_rows_.push_back(row - 1);
}

std::size_t Server::add(const Request& request) {
    if (request.prompt.empty() || request.max_new_tokens == 0 || request.num_samples == 0) {
        throw std::invalid_argument("a request needs a token, room for another, and a sample");
    }
    // The last token that is chosen is not stored.
    const std::size_t context_length = model_.config().context_length;
    const std::size_t most = context_length - std::min(request.prompt.size(), context_length) + 1;
    if (request.prompt.size() > context_length || request.max_new_tokens > most) {
        throw std::runtime_error("a prompt of " + std::to_string(request.prompt.size()) +
                                 " tokens and " + std::to_string(request.max_new_tokens) +
                                 " behind it do not fit in the model's " +
                                 std::to_string(context_length));
    }
    const std::size_t length = request.prompt.size() + request.max_new_tokens - 1;
    auto sequence =
        std::make_unique<Sequence>(Sequence{num_requests_, 0, request.num_samples,
                                            request.prompt.size(), request.max_new_tokens,
                                            request.prompt, 0, 0, 0,
                                            engine::HeldBlocks(cache_.block_size())});
    const std::uint64_t needed = sequence->blocks.num_missing(length);
    if (needed > cache_.num_usable_blocks()) {
        throw std::runtime_error("it needs " + std::to_string(needed) + " blocks for " +
                                 std::to_string(length) + " tokens, and there are " +
                                 std::to_string(cache_.num_usable_blocks()));
    }
    waiting_.push_back(std::move(sequence));
    return num_requests_++;
}

void Server::step() {
    const auto begin = std::chrono::steady_clock::now();
    schedule();
    cache_.begin_step({batch_.rows, batch_.query_start, batch_.seq_lens, batch_.positions});
    model_.forward(batch_.tokens, batch_.positions, wanted_, cache_, logits_);
    advance();
    drop_finished();
    ++counts_.steps;
    counts_.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// --- schedule --------------------------------------------------------------------------------

void Server::schedule() {
    batch_.clear();
    wanted_.clear();
    // Who comes in would take the blocks that were missing.
    if (schedule_running()) schedule_waiting();
}

/// Returns whether there were blocks for all.
bool Server::schedule_running() {
    const std::size_t num_preemptions = counts_.preemptions;
    for (std::size_t i = 0; i < running_.size(); ++i) {
        Sequence& sequence = *running_[i];
        const std::size_t num_tokens = num_next_tokens(sequence, running_.size() - i - 1);
        while (!has_room(sequence, num_tokens) && i + 1 < running_.size()) preempt_youngest();
        if (!has_room(sequence, num_tokens)) {
            preempt_youngest();  // itself
            break;
        }
        schedule(sequence, num_tokens);
    }
    return counts_.preemptions == num_preemptions;
}

void Server::schedule_waiting() {
    while (!waiting_.empty() && !free_rows_.empty()) {
        const std::size_t num_tokens = num_next_tokens(*waiting_.front(), 0);
        if (num_tokens == 0 || !has_room(*waiting_.front(), num_tokens)) return;
        std::unique_ptr<Sequence> sequence = std::move(waiting_.front());
        waiting_.erase(waiting_.begin());
        Sequence& started = *sequence;
        start(std::move(sequence));
        schedule(started, num_tokens);
    }
}

/// Leaves a token of the step to each of those behind, so that no chunk of a prompt holds them up.
std::size_t Server::num_next_tokens(const Sequence& sequence, std::size_t num_behind) const {
    const std::size_t left = options_.max_tokens - batch_.tokens.size();
    const std::size_t its_share =
        left > num_behind ? left - num_behind : std::min<std::size_t>(left, 1);
    return std::min({sequence.tokens.size() - sequence.num_cached, options_.chunk_size, its_share});
}

bool Server::has_room(const Sequence& sequence, std::size_t num_tokens) const {
    return sequence.blocks.num_missing(sequence.num_cached + num_tokens) <= pool_.num_free();
}

void Server::schedule(Sequence& sequence, std::size_t num_tokens) {
    if (num_tokens == 0) return;  // the step is full
    const std::size_t end = sequence.num_cached + num_tokens;
    const std::vector<std::int32_t> fresh = sequence.blocks.grow(end, pool_);
    cache_.append_blocks(sequence.row, fresh);
    batch_.add(sequence, num_tokens);
    if (end == sequence.tokens.size()) wanted_.push_back(batch_.tokens.size() - 1);
}

void Server::start(std::unique_ptr<Sequence> sequence) {
    sequence->row = free_rows_.back();
    free_rows_.pop_back();
    cache_.append_blocks(sequence->row, sequence->blocks.ids());
    insert(running_, std::move(sequence));
}

void Server::preempt_youngest() {
    std::unique_ptr<Sequence> sequence = std::move(running_.back());
    running_.pop_back();
    release(*sequence);
    sequence->num_cached = 0;
    insert(waiting_, std::move(sequence));
    ++counts_.preemptions;
}

void Server::release(Sequence& sequence) {
    sequence.blocks.release_all(pool_);
    cache_.clear_row(sequence.row);
    free_rows_.push_back(sequence.row);
}

// --- advance ---------------------------------------------------------------------------------

void Server::advance() {
    const std::size_t vocab_size = model_.config().vocab_size;
    const float* next = logits_.data();
    for (std::size_t i = 0; i < batch_.sequences.size(); ++i) {
        Sequence& sequence = *batch_.sequences[i];
        count(sequence, static_cast<std::size_t>(batch_.seq_lens[i]));
        if (sequence.num_cached < sequence.tokens.size()) continue;  // more of it to come
        const Logits logits(next, vocab_size);
        next += vocab_size;
        const bool ends_prompt = sequence.num_new() == 0;
        for (std::size_t sample = 1; ends_prompt && sample < sequence.num_samples; ++sample) {
            fork(sequence, sample, logits);
        }
        choose(sequence, logits);
    }
}

void Server::count(Sequence& sequence, std::size_t end) {
    const std::size_t known = std::clamp(sequence.num_computed, sequence.num_cached, end);
    counts_.repeated_tokens += known - sequence.num_cached;
    counts_.computed_tokens += end - known;
    sequence.num_cached = end;
    sequence.num_computed = std::max(sequence.num_computed, end);
}

void Server::choose(Sequence& sequence, Logits logits) {
    sequence.tokens.push_back(client_.choose(sequence, logits));
    ++counts_.new_tokens;
    client_.on_token(sequence);
    if (is_finished(sequence)) client_.on_finished(sequence);
}

/// Another text that goes on from the prompt that was just computed. It shares the blocks that are
/// full and gets a copy of the last one. Where there is no room for that, it waits, and its prompt
/// is computed again.
void Server::fork(const Sequence& from, std::size_t sample, Logits logits) {
    auto sequence = std::make_unique<Sequence>(
        Sequence{from.request, sample, from.num_samples, from.prompt_length, from.max_new_tokens,
                 from.tokens, 0, from.num_computed, 0, engine::HeldBlocks(cache_.block_size())});
    choose(*sequence, logits);
    if (is_finished(*sequence)) return;
    if (free_rows_.empty() ||
        from.blocks.num_missing_to_fork(from.num_cached) > pool_.num_free()) {
        ++counts_.late_forks;
        insert(waiting_, std::move(sequence));
        return;
    }
    ++counts_.forks;
    sequence->num_cached = from.num_cached;
    sequence->blocks = from.blocks.fork(from.num_cached, pool_);
    const std::int32_t last = from.blocks.ids().back(), its_last = sequence->blocks.ids().back();
    if (its_last != last) {
        const kvpages_block_copy copy{last, its_last};
        cache_.copy_blocks({&copy, 1});
    }
    start(std::move(sequence));
}

bool Server::is_finished(const Sequence& sequence) const {
    return sequence.num_new() == sequence.max_new_tokens ||
           (sequence.num_new() > 0 && sequence.tokens.back() == options_.end_token);
}

void Server::drop_finished() {
    for (const auto& sequence : running_) {
        if (is_finished(*sequence)) release(*sequence);
    }
    const auto is_done = [&](const auto& sequence) { return is_finished(*sequence); };
    running_.erase(std::remove_if(running_.begin(), running_.end(), is_done), running_.end());
}

}  // namespace smollm
