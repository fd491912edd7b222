// The loop of an inference engine: requests come, run together step by step, and go.
#pragma once

#include "../device/device.h"
#include "blocks.h"
#include "metadata.h"
#include "models.h"
#include "requests.h"
#include "trial.h"
#include "views.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace engine {

/// What a loop did.
struct Counts {
    std::uint64_t steps = 0;
    std::uint64_t tokens = 0;  ///< whose keys, values and states were stored
    std::uint64_t requests = 0;
    std::uint64_t forks = 0;
    std::uint64_t most_blocks = 0;
    std::uint64_t reused_blocks = 0;
};

/// Runs requests on the first layer of each group of a model: these share their memory.
class Loop {
public:
    Loop(const EngineModel& model, const kvpages::Plan& plan, const kvpages::Cache& cache,
         const device::Device& device)
        : device_(device),
          pages_(device, plan, cache),
          needs_zeroing_(plan.worker().needs_zeroing != 0),
          pool_(cache.num_blocks()),
          ops_(cache),
          tables_(kvpages::Tables::make(plan, tables_config(cache))),
          builders_(device),
          attention_(kvpages::Attention::make(plan, builders_)) {
        for (std::size_t row = kMaxRunning; row > 0; --row) free_rows_.push_back(row - 1);
        windows_.resize(tables_.num_groups());
        std::vector<bool> has_trial(tables_.num_groups());
        for (std::size_t number = 0; number < model.layers.size(); ++number) {
            const Layer& layer = model.layers[number];
            const std::size_t group = cache.layer(cache.find(layer.name)).group;
            windows_[group] = layer.sliding_window;
            if (!has_trial[group]) add_trial(model, number);
            has_trial[group] = true;
        }
    }

    /// Serves all arrivals, those of a fork when what they go on from is past its prompt.
    void run(const std::vector<Arrival>& arrivals) {
        arrivals_ = arrivals;
        while (next_arrival_ < arrivals_.size() || !running_.empty()) step();
        require(pool_.num_held() == 0, "a request that is done still holds blocks");
        require_untouched_null_block();
        counts_.most_blocks = pool_.largest_num_held();
        counts_.reused_blocks = pool_.num_reused();
    }

    const Counts& counts() const { return counts_; }

    /// The largest of all layers that ran.
    Differences differences() const {
        Differences all;
        for (const auto& trial : trials_) {
            all.rows.add(trial->differences().rows);
            all.outputs.add(trial->differences().outputs);
            all.paging.add(trial->differences().paging);
        }
        return all;
    }

    /// The layers that ran.
    const std::vector<std::unique_ptr<LayerTrial>>& trials() const { return trials_; }

private:
    static constexpr std::size_t kMaxRunning = 4;
    static constexpr std::uint64_t kChunk = 64;  ///< most tokens of one request in one step

    /// All of an engine's step. A layer stores its keys and values where the slot mapping says,
    /// and reads them where the block table says: both come with the metadata of its group.
    void step() {
        admit();
        const Batch batch = schedule();
        append_blocks(batch);
        zero_fresh_blocks();

        attention_.build(tables_.prepare(
            {batch.rows, batch.query_start, batch.seq_lens, batch.positions, device_.stream()}));

        Outputs outputs;
        for (std::size_t i = 0; i < trials_.size(); ++i) {
            outputs = trials_[i]->run(batch, metadata_of(layer_numbers_[i]));
        }
        sample(batch, outputs);
        finish();
    }

    // --- admit -----------------------------------------------------------------------------------

    /// Requests wait in the order of their arrival for a row of the tables.
    void admit() {
        for (; next_arrival_ < arrivals_.size() && !free_rows_.empty(); ++next_arrival_) {
            const Arrival& arrival = arrivals_[next_arrival_];
            if (!arrival.fork_of) {
                start(arrival);
                continue;
            }
            const Request& from = running_request(*arrival.fork_of);
            if (!from.is_past_prompt()) return;
            fork(from, arrival);
        }
    }

    void start(const Arrival& arrival) {
        auto request = std::make_unique<Request>();
        request->prompt_length = arrival.prompt_length;
        for (std::uint64_t i = 0; i < arrival.prompt_length; ++i) {
            request->tokens.push_back(static_cast<std::int32_t>((i * 31 + next_arrival_) % 1000));
        }
        for (std::size_t group = 0; group < tables_.num_groups(); ++group) {
            request->blocks.emplace_back(tables_.info(group).block_size);
        }
        add(std::move(request), arrival, nullptr);
    }

    /// Another way to go on from the same tokens: it shares the blocks that are full, and gets a
    /// copy of the last one.
    void fork(const Request& from, const Arrival& arrival) {
        auto request = std::make_unique<Request>();
        request->tokens = from.tokens;
        request->tokens.back() = (from.tokens.back() + 1) % 1000;
        request->prompt_length = from.prompt_length;
        request->num_cached = from.num_cached;
        std::vector<kvpages_block_copy> copies;
        for (std::size_t group = 0; group < from.blocks.size(); ++group) {
            request->blocks.push_back(from.blocks[group].fork(from.num_cached, pool_));
            const std::vector<std::int32_t>& before = from.blocks[group].ids();
            const std::vector<std::int32_t>& after = request->blocks[group].ids();
            for (std::size_t i = 0; i < after.size(); ++i) {
                if (after[i] != before[i]) copies.push_back({before[i], after[i]});
            }
        }
        ops_.copy_blocks(copies, device_.stream());
        const std::size_t number = from.number;
        add(std::move(request), arrival, &number);
        ++counts_.forks;
    }

    void add(std::unique_ptr<Request> request, const Arrival& arrival, const std::size_t* from) {
        request->number = next_arrival_;
        request->length = request->tokens.size() + arrival.output_length;
        request->row = free_rows_.back();
        free_rows_.pop_back();
        for (std::size_t group = 0; group < request->blocks.size(); ++group) {
            tables_.append(request->row, group, request->blocks[group].ids());
        }
        for (const auto& trial : trials_) trial->begin(request->number, from);
        running_.push_back(std::move(request));
        ++counts_.requests;
    }

    const Request& running_request(std::size_t number) const {
        for (const auto& request : running_) {
            if (request->number == number) return *request;
        }
        throw std::runtime_error("a fork of a request that does not run");
    }

    // --- prepare ---------------------------------------------------------------------------------

    /// Prompts run in chunks, so that requests that are past theirs do not wait for long.
    Batch schedule() const {
        Batch batch;
        for (const auto& request : running_) {
            batch.add(*request, std::min<std::uint64_t>(
                                    request->tokens.size() - request->num_cached, kChunk));
        }
        return batch;
    }

    void append_blocks(const Batch& batch) {
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            Request& request = *batch.requests[i];
            for (std::size_t group = 0; group < request.blocks.size(); ++group) {
                const std::vector<std::int32_t> fresh =
                    request.blocks[group].grow(batch.seq_len(i), pool_);
                tables_.append(request.row, group, fresh);
                fresh_.insert(fresh_.end(), fresh.begin(), fresh.end());
            }
        }
    }

    /// Where layers of different types share memory, a block's new owner must find zeros: a state
    /// starts from them. The plan knows whether that is so.
    void zero_fresh_blocks() {
        if (needs_zeroing_) ops_.zero_blocks(fresh_, device_.stream());
        fresh_.clear();
    }

    const Metadata& metadata_of(std::size_t layer) const {
        return *attention_.metadata<const Metadata>(layer);
    }

    // --- sample and finish -----------------------------------------------------------------------

    /// The next token is the place of the largest output, in place of a model's logits.
    void sample(const Batch& batch, const Outputs& outputs) {
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            Request& request = *batch.requests[i];
            request.num_cached = batch.seq_len(i);
            if (request.num_cached < request.tokens.size()) continue;  // more of the prompt to come
            const auto largest = std::max_element(outputs[i].begin(), outputs[i].end());
            request.tokens.push_back(static_cast<std::int32_t>(largest - outputs[i].begin()));
        }
        ++counts_.steps;
        counts_.tokens += batch.positions.size();
    }

    void finish() {
        for (const auto& request : running_) {
            if (request->is_done()) release(*request);
            else release_what_left_the_window(*request);
        }
        running_.erase(std::remove_if(running_.begin(), running_.end(),
                                      [](const auto& request) { return request->is_done(); }),
                       running_.end());
    }

    void release(Request& request) {
        for (HeldBlocks& blocks : request.blocks) blocks.release_all(pool_);
        tables_.clear(request.row);
        free_rows_.push_back(request.row);
        for (const auto& trial : trials_) trial->end(request.number);
    }

    /// The table's row keeps the ids: no kernel reads what is before the window.
    void release_what_left_the_window(Request& request) {
        for (std::size_t group = 0; group < windows_.size(); ++group) {
            const std::uint64_t window = windows_[group];
            if (window == 0 || request.num_cached < window) continue;
            request.blocks[group].release_before(request.num_cached - window + 1, pool_);
        }
    }

    // --- trials ----------------------------------------------------------------------------------

    void add_trial(const EngineModel& model, std::size_t number) {
        const Layer& layer = model.layers[number];
        layer_numbers_.push_back(number);
        if (layer.is_state()) {
            trials_.push_back(std::make_unique<StateTrial>(pages_, layer));
        } else {
            trials_.push_back(
                std::make_unique<AttentionTrial>(device_, pages_, ops_, layer, model.format));
        }
    }

    void require_untouched_null_block() {
        pages_.fetch_all({&kNullBlock, 1});
        for (const kvpages_region& region : pages_.cache().regions()) {
            const char* bytes = static_cast<const char*>(region.data);
            for (std::uint64_t i = 0; i < region.block_step_bytes; ++i) {
                require(bytes[i] == 0, "somebody wrote to the null block");
            }
        }
    }

    static kvpages::TablesConfig tables_config(const kvpages::Cache& cache) {
        kvpages::TablesConfig config;
        config.device = cache.device();
        config.max_requests = kMaxRunning;
        config.max_tokens = kMaxRunning * kChunk;
        return config;
    }

    const device::Device& device_;
    device::HostPages pages_;
    bool needs_zeroing_;
    BlockPool pool_;
    kvpages::Ops ops_;
    kvpages::Tables tables_;
    MetadataBuilders builders_;
    kvpages::Attention attention_;
    std::vector<std::uint64_t> windows_;      ///< by group
    std::vector<std::unique_ptr<LayerTrial>> trials_;
    std::vector<std::size_t> layer_numbers_;  ///< by trial

    std::vector<Arrival> arrivals_;
    std::size_t next_arrival_ = 0;
    std::vector<std::unique_ptr<Request>> running_;
    std::vector<std::size_t> free_rows_;
    std::vector<std::int32_t> fresh_;
    Counts counts_;
};

}  // namespace engine
