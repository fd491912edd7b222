// Runs requests through the views of a cache, and through memory that is not paged beside it.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "models.h"
#include "views.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace engine {

/// A request and the blocks that it holds in each group.
struct Request {
    std::uint64_t number = 0;
    std::uint64_t length = 0;      ///< tokens in the end
    std::uint64_t num_tokens = 0;  ///< tokens so far
    std::vector<BlockTable> tables;

    bool is_done() const { return num_tokens == length; }
};

/// A number from -1 to 1 that follows from its place alone. It stands for what a model computes.
inline float computed(std::uint64_t what, std::uint64_t request, std::uint64_t index) {
    std::uint64_t x = (what * 0x9e3779b97f4a7c15u) ^ (request << 56) ^ index;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<float>((x ^ (x >> 31)) >> 40) / 8388608.0f - 1.0f;
}

/// A layer under trial: after each step it says how far the paged result is from the other one.
class LayerTrial {
public:
    LayerTrial(const Layer& layer, std::size_t group) : layer_(layer), group_(group) {}
    virtual ~LayerTrial() = default;

    /// Runs the tokens from `first` to the request's last.
    virtual float step(const Request& request, std::uint64_t first) = 0;

    const Layer& layer() const { return layer_; }

protected:
    const BlockTable& table(const Request& request) const { return request.tables[group_]; }

private:
    Layer layer_;
    std::size_t group_;
};

/// The largest difference between two results; throws when there is nothing to compare.
inline float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
    require(a.size() == b.size(), "results differ in size");
    float largest = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const float difference = std::fabs(a[i] - b[i]);
        largest = std::max(largest, std::isnan(difference) ? INFINITY : difference);
        norm += std::fabs(b[i]);
    }
    require(norm > 0, "a result is zero everywhere");
    return largest;
}

class AttentionTrial : public LayerTrial {
public:
    AttentionTrial(const kvpages::Cache& cache, const Layer& layer, std::size_t group)
        : LayerTrial(layer, group),
          view_(cache.view(layer.name), cache.axes(cache.find(layer.name))) {}

    float step(const Request& request, std::uint64_t first) override {
        for (std::uint64_t token = first; token < request.num_tokens; ++token) {
            write(request, token);
        }
        return compare(request, request.num_tokens - 1);
    }

private:
    struct Contiguous {
        std::vector<float> keys, values;
    };

    /// Writes a token's keys and values to its slot, and behind those of the token before it.
    void write(const Request& request, std::uint64_t token) {
        const Slot slot = table(request).slot(token);
        Contiguous& beside = contiguous_[request.number];
        for (std::uint64_t head = 0; head < layer().num_kv_heads; ++head) {
            for (std::uint64_t i = 0; i < layer().head_size; ++i) {
                const std::uint64_t at = row(token, head) + i;
                const std::uint16_t key = to_bf16(computed(1, request.number, at));
                const std::uint16_t value = to_bf16(computed(2, request.number, at));
                view_.key(slot.kernel_block, slot.offset, head, i) = key;
                view_.value(slot.kernel_block, slot.offset, head, i) = value;
                beside.keys.push_back(from_bf16(key));
                beside.values.push_back(from_bf16(value));
            }
        }
    }

    /// Both ways of computing the attention of `token`.
    float compare(const Request& request, std::uint64_t token) const {
        const std::vector<float> query = query_of(request, token);
        const std::uint64_t window = layer().sliding_window;
        const std::uint64_t first = window != 0 && token >= window ? token - window + 1 : 0;
        const BlockTable& blocks = table(request);
        const Contiguous& beside = contiguous_.at(request.number);
        const std::uint64_t size = layer().head_size;
        const auto paged = attend(
            layer(), query, first, token,
            [&](std::uint64_t t, std::uint64_t head, float* out) {
                const Slot slot = blocks.slot(t);
                for (std::uint64_t i = 0; i < size; ++i) {
                    out[i] = from_bf16(view_.key(slot.kernel_block, slot.offset, head, i));
                }
            },
            [&](std::uint64_t t, std::uint64_t head, float* out) {
                const Slot slot = blocks.slot(t);
                for (std::uint64_t i = 0; i < size; ++i) {
                    out[i] = from_bf16(view_.value(slot.kernel_block, slot.offset, head, i));
                }
            });
        const auto contiguous = attend(
            layer(), query, first, token,
            [&](std::uint64_t t, std::uint64_t head, float* out) {
                std::memcpy(out, &beside.keys[row(t, head)], size * sizeof(float));
            },
            [&](std::uint64_t t, std::uint64_t head, float* out) {
                std::memcpy(out, &beside.values[row(t, head)], size * sizeof(float));
            });
        return largest_difference(paged, contiguous);
    }

    std::vector<float> query_of(const Request& request, std::uint64_t token) const {
        std::vector<float> query(layer().num_query_heads * layer().head_size);
        for (std::size_t i = 0; i < query.size(); ++i) {
            query[i] = computed(3 + token, request.number, i);
        }
        return query;
    }

    /// Where a token's row of a head lies in memory that is not paged.
    std::uint64_t row(std::uint64_t token, std::uint64_t head) const {
        return (token * layer().num_kv_heads + head) * layer().head_size;
    }

    KvView view_;
    std::map<std::uint64_t, Contiguous> contiguous_;
};

/// A state is one entry of each of the layer's views, at the request's only block.
class StateTrial : public LayerTrial {
public:
    StateTrial(const kvpages::Cache& cache, const Layer& layer, std::size_t group)
        : LayerTrial(layer, group) {
        const std::size_t number = cache.find(layer.name);
        for (std::size_t state = 0; state < cache.num_views(number); ++state) {
            views_.push_back(cache.view(number, state));
        }
    }

    float step(const Request& request, std::uint64_t first) override {
        std::vector<std::vector<float>>& beside = contiguous_[request.number];
        beside.resize(views_.size());
        float largest = 0;
        for (std::size_t state = 0; state < views_.size(); ++state) {
            if (first == 0) beside[state].assign(num_elements(views_[state]), 0.0f);
            update(request, state, beside[state]);
            largest = std::max(largest, largest_difference(read(request, state), beside[state]));
        }
        return largest;
    }

private:
    static std::size_t num_elements(const kvpages::Tensor& view) {
        std::int64_t count = 1;
        for (std::size_t dim = 1; dim < view.shape.size(); ++dim) count *= view.shape[dim];
        return static_cast<std::size_t>(count);
    }

    /// state = state / 2 + input, through the view and beside it. The first step finds zeros.
    void update(const Request& request, std::size_t state, std::vector<float>& beside) const {
        for (std::size_t i = 0; i < beside.size(); ++i) {
            const float input = computed(4 + state, request.number, request.num_tokens + i);
            store(request, state, i, load(request, state, i) / 2 + input);
            const float updated = beside[i] / 2 + input;
            beside[i] = views_[state].dtype == kvpages::Dtype::bf16 ? from_bf16(to_bf16(updated))
                                                                    : updated;
        }
    }

    std::vector<float> read(const Request& request, std::size_t state) const {
        std::vector<float> out(num_elements(views_[state]));
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = load(request, state, i);
        return out;
    }

    float load(const Request& request, std::size_t state, std::size_t i) const {
        const kvpages::Tensor& view = views_[state];
        const std::int64_t at = offset(view, table(request).block(0), i);
        if (view.dtype == kvpages::Dtype::f32) return static_cast<float*>(view.data)[at];
        return from_bf16(static_cast<std::uint16_t*>(view.data)[at]);
    }

    void store(const Request& request, std::size_t state, std::size_t i, float value) const {
        const kvpages::Tensor& view = views_[state];
        const std::int64_t at = offset(view, table(request).block(0), i);
        if (view.dtype == kvpages::Dtype::f32) {
            static_cast<float*>(view.data)[at] = value;
        } else {
            static_cast<std::uint16_t*>(view.data)[at] = to_bf16(value);
        }
    }

    /// The element that is number `i` of block `block` when the last dimension runs fastest.
    static std::int64_t offset(const kvpages::Tensor& view, std::uint64_t block, std::size_t i) {
        std::int64_t out = static_cast<std::int64_t>(block) * view.strides[0];
        std::int64_t rest = static_cast<std::int64_t>(i);
        for (std::size_t dim = view.shape.size() - 1; dim > 0; --dim) {
            out += rest % view.shape[dim] * view.strides[dim];
            rest /= view.shape[dim];
        }
        return out;
    }

    std::vector<kvpages::Tensor> views_;
    std::map<std::uint64_t, std::vector<std::vector<float>>> contiguous_;
};

/// Runs requests side by side, as a scheduler does, on one layer of each kind.
class ModelTrial {
public:
    ModelTrial(const EngineModel& model, const kvpages::Plan& plan, const kvpages::Cache& cache)
        : cache_(cache),
          regions_(cache.regions()),
          needs_zeroing_(plan.worker().needs_zeroing != 0),
          pool_(cache.num_blocks()) {
        for (std::size_t i = 0; i < plan.worker().num_groups; ++i) {
            groups_.push_back({plan.group(i), 0});
        }
        for (const Layer& layer : model.layers) {
            const std::size_t group = cache.layer(cache.find(layer.name)).group;
            groups_[group].sliding_window = layer.sliding_window;
            if (!has_trial_of(layer.kind)) trials_.push_back(trial_of(layer, group));
        }
    }

    /// Runs requests of these lengths, a few at a time; returns the largest difference.
    float run(const std::vector<std::uint64_t>& lengths) {
        float largest = 0;
        std::size_t num_started = 0;
        std::vector<Request> running;
        while (num_started < lengths.size() || !running.empty()) {
            while (running.size() < kMaxRunning && num_started < lengths.size()) {
                running.push_back(start(num_started, lengths[num_started]));
                ++num_started;
            }
            for (Request& request : running) {
                largest = std::max(largest, step(request));
                if (request.is_done()) release(request);
            }
            const auto is_done = [](const Request& request) { return request.is_done(); };
            running.erase(std::remove_if(running.begin(), running.end(), is_done), running.end());
        }
        require_untouched_null_block();
        return largest;
    }

    std::string tried_layers() const {
        std::string text;
        for (const auto& trial : trials_) {
            const Layer& layer = trial->layer();
            text += (text.empty() ? "" : ", ") + layer.name + " (" + layer.kind + ")";
        }
        return text;
    }

private:
    static constexpr std::size_t kMaxRunning = 3;
    static constexpr std::uint64_t kTokensPerStep = 64;  ///< of one request

    struct Group {
        kvpages_group_info info;
        std::uint64_t sliding_window;
    };

    bool has_trial_of(const std::string& kind) const {
        return std::any_of(trials_.begin(), trials_.end(),
                           [&](const auto& trial) { return trial->layer().kind == kind; });
    }

    std::unique_ptr<LayerTrial> trial_of(const Layer& layer, std::size_t group) const {
        if (layer.is_state()) return std::make_unique<StateTrial>(cache_, layer, group);
        return std::make_unique<AttentionTrial>(cache_, layer, group);
    }

    Request start(std::uint64_t number, std::uint64_t length) const {
        Request request{number, length, 0, {}};
        for (const Group& group : groups_) {
            request.tables.emplace_back(group.info.block_size, group.info.kernel_block_size);
        }
        return request;
    }

    float step(Request& request) {
        const std::uint64_t first = request.num_tokens;
        request.num_tokens = std::min(first + kTokensPerStep, request.length);
        for (BlockTable& table : request.tables) {
            while (!table.holds(request.num_tokens - 1)) table.add(take_block());
        }
        float largest = 0;
        for (const auto& trial : trials_) largest = std::max(largest, trial->step(request, first));
        release_what_left_the_window(request);
        return largest;
    }

    /// Where layers of different types share memory, a block's new owner must find zeros.
    std::uint64_t take_block() {
        const BlockPool::Block block = pool_.take();
        require(block.id != kNullBlock, "the pool handed out the null block");
        if (block.had_an_owner && needs_zeroing_) {
            for (const kvpages_region& region : regions_) {
                std::memset(static_cast<char*>(region.data) + block.id * region.block_step_bytes, 0,
                            region.block_step_bytes);
            }
        }
        return block.id;
    }

    void release_what_left_the_window(Request& request) {
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            const std::uint64_t window = groups_[i].sliding_window;
            if (window == 0 || request.num_tokens < window) continue;
            request.tables[i].release_before(request.num_tokens - window + 1, pool_);
        }
    }

    void release(Request& request) {
        for (BlockTable& table : request.tables) table.release_all(pool_);
    }

    void require_untouched_null_block() const {
        for (const kvpages_region& region : regions_) {
            const char* bytes = static_cast<const char*>(region.data);
            for (std::uint64_t i = 0; i < region.block_step_bytes; ++i) {
                if (bytes[i] != 0) throw std::runtime_error("somebody wrote to the null block");
            }
        }
    }

    const kvpages::Cache& cache_;
    std::vector<kvpages_region> regions_;
    bool needs_zeroing_;
    BlockPool pool_;
    std::vector<Group> groups_;
    std::vector<std::unique_ptr<LayerTrial>> trials_;
};

}  // namespace engine
