// Layers that run through the cache, and through memory that is not paged beside it.
#pragma once

#include "../device/device.h"
#include "attention.h"
#include "metadata.h"
#include "models.h"
#include "requests.h"
#include "views.h"

#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace engine {

/// A number from -1 to 1 that follows from a token and its place alone. It stands for what a model
/// computes.
inline float computed(std::uint64_t what, std::int32_t token, std::uint64_t index) {
    std::uint64_t x = (what * 0x9e3779b97f4a7c15u) ^
                      (static_cast<std::uint64_t>(token) << 40) ^ index;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<float>((x ^ (x >> 31)) >> 40) / 8388608.0f - 1.0f;
}

inline float rounded(kvpages::Dtype dtype, float value) {
    return dtype == kvpages::Dtype::bf16 ? from_bf16(to_bf16(value)) : value;
}

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

/// The largest of many differences, and what it may be.
struct Difference {
    float largest = 0;
    float bound = 0;
    bool holds = true;  ///< none is larger than its bound

    void add(float difference, float its_bound) {
        if (difference >= largest) {
            largest = difference;
            bound = its_bound;
        }
        holds = holds && difference <= its_bound;
    }

    void add(const Difference& other) {
        add(other.largest, other.bound);
        holds = holds && other.holds;
    }
};

/// How far what ran in the cache was from what it is compared with.
struct Differences {
    Difference rows;     ///< what is stored, from what was given
    Difference outputs;  ///< results, from those of numbers that were not rounded to be stored
    Difference paging;   ///< results, from those of the same numbers in memory that is not paged

    bool hold() const { return rows.holds && outputs.holds && paging.holds; }
};

/// For each request of a batch, what a layer makes of its last token.
using Outputs = std::vector<std::vector<float>>;

/// A layer under trial.
class LayerTrial {
public:
    explicit LayerTrial(const Layer& layer) : layer_(layer) {}
    virtual ~LayerTrial() = default;

    /// Runs a batch, both ways, and compares.
    virtual Outputs run(const Batch& batch, const Metadata& metadata) = 0;
    /// What a request begins with in the memory that is not paged; `from` is the one it forks.
    virtual void begin(std::size_t request, const std::size_t* from) = 0;
    virtual void end(std::size_t request) = 0;

    const Layer& layer() const { return layer_; }
    const Differences& differences() const { return differences_; }

protected:
    Differences differences_;

private:
    Layer layer_;
};

/// Keys and values of all tokens of one request, one after another.
struct KeysAndValues {
    std::vector<float> keys, values;
};

class AttentionTrial : public LayerTrial {
public:
    AttentionTrial(const device::Device& device, device::HostPages& pages,
                   const kvpages::Ops& ops, const Layer& layer, const CacheFormat& format)
        : LayerTrial(layer),
          device_(device),
          pages_(pages),
          ops_(ops),
          format_(format),
          number_(pages.cache().find(layer.name)),
          view_(pages.cache().view(number_), pages.cache().axes(number_)),
          new_keys_(device),
          new_values_(device),
          slots_(device),
          keys_(device),
          values_(device) {}

    Outputs run(const Batch& batch, const Metadata& metadata) override {
        write(batch, metadata);
        pages_.fetch(number_, metadata.block_table, metadata.seq_lens());
        if (!is_exact()) keep_what_was_stored(batch, metadata);
        Outputs outputs;
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            outputs.push_back(attend_both_ways(*batch.requests[i], i, metadata));
        }
        return outputs;
    }

    void begin(std::size_t request, const std::size_t* from) override {
        contiguous_[request] = from != nullptr ? contiguous_.at(*from) : Contiguous{};
    }

    void end(std::size_t request) override { contiguous_.erase(request); }

private:
    struct Contiguous {
        KeysAndValues given;   ///< before they were rounded to be stored
        KeysAndValues stored;  ///< after; empty when the format is exact
    };

    std::uint64_t row_elements() const { return layer().num_kv_heads * layer().head_size; }

    bool is_exact() const { return format_.largest_error == 0; }

    bool is_quantised() const { return format_.quant_mode != kvpages::QuantMode::none; }

    /// Stores the keys and values of the step's tokens, and behind those of the tokens before.
    void write(const Batch& batch, const Metadata& metadata) {
        KeysAndValues rows;
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            const Request& request = *batch.requests[i];
            for (std::uint64_t t = request.num_cached; t < batch.seq_len(i); ++t) {
                project(request.tokens[t], t, rows, contiguous_.at(request.number).given);
            }
        }
        const kvpages_kv_rows given =
            kvpages::kv_rows(number_, new_keys_(rows.keys).data(), new_values_(rows.values).data(),
                             format_.scale, format_.scale);
        ops_.write(given, metadata.new_slots(), kvpages::Dtype::f32, std::nullopt, device_.stream());
    }

    void project(std::int32_t token, std::uint64_t position, KeysAndValues& rows,
                 KeysAndValues& beside) const {
        for (std::uint64_t i = 0; i < row_elements(); ++i) {
            const std::uint64_t at = position * row_elements() + i;
            const float key = computed(1, token, at), value = computed(2, token, at);
            rows.keys.push_back(key);
            rows.values.push_back(value);
            beside.keys.push_back(is_exact() ? rounded(format_.dtype, key) : key);
            beside.values.push_back(is_exact() ? rounded(format_.dtype, value) : value);
        }
    }

    std::vector<float> attend_both_ways(const Request& request, std::size_t i,
                                        const Metadata& metadata) {
        const std::uint64_t first = request.num_cached, last = metadata.seq_len(i) - 1;
        const Rows paged = is_quantised() ? gathered(i, metadata) : through_view(i, metadata);
        const Contiguous& beside = contiguous_.at(request.number);
        compare_rows(paged, in_order(beside.given), first, last);
        // A model samples from the last token. The first one's window reaches furthest back.
        if (first < last) attend_both_ways(request.tokens[first], first, paged, beside);
        return attend_both_ways(request.tokens[last], last, paged, beside);
    }

    std::vector<float> attend_both_ways(std::int32_t token, std::uint64_t position,
                                        const Rows& paged, const Contiguous& beside) {
        const std::vector<float> query = project_query(token, position);
        const auto attend_to = [&](const Rows& rows) {
            const std::uint64_t window = layer().sliding_window;
            const bool is_cut = window != 0 && position >= window;
            return attend(layer(), query, is_cut ? position - window + 1 : 0, position, rows);
        };
        const std::vector<float> output = attend_to(paged);
        const float difference = largest_difference(output, attend_to(in_order(beside.given)));
        differences_.outputs.add(difference, output_bound(query));
        differences_.paging.add(
            is_exact() ? difference
                       : largest_difference(output, attend_to(in_order(beside.stored))),
            0);
        return output;
    }

    std::vector<float> project_query(std::int32_t token, std::uint64_t position) const {
        std::vector<float> query(layer().num_query_heads * layer().head_size);
        for (std::size_t i = 0; i < query.size(); ++i) {
            query[i] = computed(3, token, position * query.size() + i);
        }
        return query;
    }

    /// Reads where the block table says, element by element, as a kernel does.
    Rows through_view(std::size_t i, const Metadata& metadata) const {
        return {[this, i, &metadata](std::uint64_t token, std::uint64_t head, float* row) {
                    view_.load_key(metadata.slot(i, token), head, row);
                },
                [this, i, &metadata](std::uint64_t token, std::uint64_t head, float* row) {
                    view_.load_value(metadata.slot(i, token), head, row);
                }};
    }

    /// Lets kvpages read what is quantised.
    Rows gathered(std::size_t i, const Metadata& metadata) {
        std::vector<std::int64_t> slots;
        for (std::uint64_t token = 0; token < metadata.seq_len(i); ++token) {
            slots.push_back(static_cast<std::int64_t>(metadata.slot(i, token)));
        }
        gathered_ = gather(slots_(slots));
        return in_order(gathered_);
    }

    KeysAndValues gather(kvpages::Span<const std::int64_t> slots) {
        kvpages_kv_rows_out room{};
        room.layer = number_;
        room.keys = keys_.room(slots.size() * row_elements());
        room.values = values_.room(slots.size() * row_elements());
        room.key_scale = room.value_scale = format_.scale;
        ops_.gather({&room, 1}, slots, kvpages::Dtype::f32, std::nullopt, device_.stream());
        const auto keys = keys_.read(), values = values_.read();
        return {{keys.begin(), keys.end()}, {values.begin(), values.end()}};
    }

    /// Right after it was, so that whatever happens to it later is a difference.
    void keep_what_was_stored(const Batch& batch, const Metadata& metadata) {
        const KeysAndValues rows = gather(metadata.new_slots());
        const auto append = [&](std::vector<float>& to, const std::vector<float>& from,
                                std::size_t i) {
            const auto size = static_cast<std::ptrdiff_t>(row_elements());
            to.insert(to.end(), from.begin() + batch.query_start[i] * size,
                      from.begin() + batch.query_start[i + 1] * size);
        };
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            KeysAndValues& stored = contiguous_.at(batch.requests[i]->number).stored;
            append(stored.keys, rows.keys, i);
            append(stored.values, rows.values, i);
        }
    }

    Rows in_order(const KeysAndValues& rows) const {
        return {copies_from(rows.keys), copies_from(rows.values)};
    }

    LoadRow copies_from(const std::vector<float>& rows) const {
        return [this, &rows](std::uint64_t token, std::uint64_t head, float* row) {
            const std::uint64_t at = (token * layer().num_kv_heads + head) * layer().head_size;
            std::memcpy(row, &rows[at], layer().head_size * sizeof(float));
        };
    }

    void compare_rows(const Rows& paged, const Rows& beside, std::uint64_t first,
                      std::uint64_t last) {
        std::vector<float> a(layer().head_size), b(layer().head_size);
        for (std::uint64_t token = first; token <= last; ++token) {
            for (std::uint64_t head = 0; head < layer().num_kv_heads; ++head) {
                paged.load_key(token, head, a.data());
                beside.load_key(token, head, b.data());
                differences_.rows.add(largest_difference(a, b), format_.largest_error);
                paged.load_value(token, head, a.data());
                beside.load_value(token, head, b.data());
                differences_.rows.add(largest_difference(a, b), format_.largest_error);
            }
        }
    }

    /// How far the result may be off when each key and value is off by the format's error e.
    /// A score changes by at most d = e * scale * sum |query|, so a weight by a factor of at most
    /// exp(2 d); and no value is larger than 1.
    float output_bound(const std::vector<float>& query) const {
        const std::uint64_t size = layer().head_size;
        float largest = 0;
        for (std::uint64_t start = 0; start < query.size(); start += size) {
            float sum = 0;
            for (std::uint64_t i = 0; i < size; ++i) sum += std::fabs(query[start + i]);
            largest = std::max(largest, sum / std::sqrt(static_cast<float>(size)));
        }
        return format_.largest_error + std::expm1(2 * format_.largest_error * largest);
    }

    const device::Device& device_;
    device::HostPages& pages_;
    const kvpages::Ops& ops_;
    CacheFormat format_;
    std::size_t number_;
    KvView view_;
    device::Upload<float> new_keys_, new_values_;
    device::Upload<std::int64_t> slots_;
    device::Results<float> keys_, values_;
    KeysAndValues gathered_;
    std::map<std::size_t, Contiguous> contiguous_;
};

/// A state is one entry of each of the layer's views, at the request's only block.
class StateTrial : public LayerTrial {
public:
    StateTrial(device::HostPages& pages, const Layer& layer)
        : LayerTrial(layer), pages_(pages), number_(pages.cache().find(layer.name)) {
        for (std::size_t state = 0; state < pages.cache().num_views(number_); ++state) {
            views_.push_back(pages.cache().view(number_, state));
            require_no_gaps(views_.back());
        }
    }

    Outputs run(const Batch& batch, const Metadata& metadata) override {
        Outputs outputs(batch.requests.size());
        for (std::size_t i = 0; i < batch.requests.size(); ++i) {
            const Request& request = *batch.requests[i];
            const std::uint64_t block = metadata.kernel_block(i, 0);
            const auto id = static_cast<std::int32_t>(block);
            pages_.fetch(number_, {&id, 1});
            for (std::size_t state = 0; state < views_.size(); ++state) {
                std::vector<float>& beside = contiguous_.at(request.number)[state];
                update(request.tokens[batch.seq_len(i) - 1], state, block, beside);
                outputs[i] = load(state, block);
                differences_.paging.add(largest_difference(outputs[i], beside), 0);
            }
            pages_.put(number_, {&id, 1});
        }
        return outputs;
    }

    void begin(std::size_t request, const std::size_t* from) override {
        if (from != nullptr) {
            contiguous_[request] = contiguous_.at(*from);
            return;
        }
        for (const kvpages::Tensor& view : views_) {
            contiguous_[request].emplace_back(num_elements(view), 0.0f);
        }
    }

    void end(std::size_t request) override { contiguous_.erase(request); }

private:
    static std::size_t num_elements(const kvpages::Tensor& view) {
        return static_cast<std::size_t>(view.num_elements() / view.shape[0]);
    }

    void require_no_gaps(const kvpages::Tensor& view) const {
        std::int64_t stride = 1;
        for (std::size_t dim = view.shape.size() - 1; dim > 0; --dim) {
            require(view.strides[dim] == stride, layer().name + ": a state has gaps");
            stride *= view.shape[dim];
        }
    }

    /// state = state / 2 + input, through the view and beside it. The first step finds zeros.
    void update(std::int32_t token, std::size_t state, std::uint64_t block,
                std::vector<float>& beside) const {
        const kvpages::Tensor& view = views_[state];
        std::vector<float> updated = load(state, block);
        for (std::size_t i = 0; i < beside.size(); ++i) {
            const float input = computed(4 + state, token, i);
            store(view, offset(view, block) + i, updated[i] / 2 + input);
            beside[i] = rounded(view.dtype, beside[i] / 2 + input);
        }
    }

    std::vector<float> load(std::size_t state, std::uint64_t block) const {
        const kvpages::Tensor& view = views_[state];
        std::vector<float> out(num_elements(view));
        for (std::size_t i = 0; i < out.size(); ++i) {
            const std::size_t at = offset(view, block) + i;
            out[i] = view.dtype == kvpages::Dtype::f32
                         ? static_cast<const float*>(view.data)[at]
                         : from_bf16(static_cast<const std::uint16_t*>(view.data)[at]);
        }
        return out;
    }

    static void store(const kvpages::Tensor& view, std::size_t at, float value) {
        if (view.dtype == kvpages::Dtype::f32) {
            static_cast<float*>(view.data)[at] = value;
        } else {
            static_cast<std::uint16_t*>(view.data)[at] = to_bf16(value);
        }
    }

    static std::size_t offset(const kvpages::Tensor& view, std::uint64_t block) {
        return static_cast<std::size_t>(block) * static_cast<std::size_t>(view.strides[0]);
    }

    device::HostPages& pages_;
    std::size_t number_;
    std::vector<kvpages::Tensor> views_;
    std::map<std::size_t, std::vector<std::vector<float>>> contiguous_;
};

}  // namespace engine
