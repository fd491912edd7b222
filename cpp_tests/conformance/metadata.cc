// metadata.json: what builders are told of a step, and what each layer gets of it.
#include <algorithm>
#include <map>
#include <set>

#include "category.h"
#include "one_block.h"

namespace conformance {
namespace {

template <typename T>
std::vector<T> numbers(const Json& list) {
    std::vector<T> all;
    if (list.is_null()) return all;
    for (const Json& number : list) {
        all.push_back(number.is_boolean() ? static_cast<T>(number.get<bool>() ? 1 : 0)
                                          : number.get<T>());
    }
    return all;
}

template <typename T>
Json list(const T* data, std::size_t count) {
    return data == nullptr ? Json() : Json(std::vector<T>(data, data + count));
}

Json flags(const std::uint8_t* data, std::size_t count) {
    if (data == nullptr) return nullptr;
    Json all = Json::array();
    for (std::size_t i = 0; i < count; ++i) all.push_back(data[i] != 0);
    return all;
}

// A dense tensor of an engine's, and the arrays that it points to.
template <typename T>
class Dense {
public:
    Dense(std::uint32_t dtype, std::vector<T> data, std::vector<std::int64_t> shape)
        : dtype_(dtype), data_(std::move(data)), shape_(std::move(shape)), strides_(shape_) {
        std::int64_t step = 1;
        for (std::size_t dim = shape_.size(); dim-- > 0;) {
            strides_[dim] = step;
            step *= shape_[dim];
        }
        data_.reserve(1);  // so that there is an address
    }

    kvpages_tensor tensor() {
        return {data_.data(), shape_.data(), strides_.data(), dtype_,
                static_cast<std::uint32_t>(shape_.size())};
    }

private:
    std::uint32_t dtype_;
    std::vector<T> data_;
    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> strides_;
};

Dense<std::int32_t> block_table(const Json& rows) {
    std::vector<std::int32_t> data;
    const std::size_t width = rows.empty() ? 0 : rows[0].size();
    for (const Json& row : rows) {
        if (row.size() != width) throw Inexpressible("block_tables: rows of different lengths");
        for (const Json& block : row) data.push_back(block);
    }
    return {KVPAGES_DTYPE_I32, data,
            {static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(width)}};
}

Dense<std::int64_t> slot_mapping(const Json& slots) {
    return {KVPAGES_DTYPE_I64, numbers<std::int64_t>(slots),
            {static_cast<std::int64_t>(slots.size())}};
}

Json slots_of(const kvpages_tensor& tensor) {
    Json slots = Json::array();
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
        slots.push_back(static_cast<const std::int64_t*>(tensor.data)[i * tensor.strides[0]]);
    }
    return slots;
}

Json rows_of(const kvpages_tensor& tensor) {
    Json rows = Json::array();
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
        rows.push_back(Json::array());
        for (std::int64_t j = 0; j < tensor.shape[1]; ++j) {
            rows.back().push_back(static_cast<const std::int32_t*>(
                tensor.data)[i * tensor.strides[0] + j * tensor.strides[1]]);
        }
    }
    return rows;
}

// Attention groups as a case lists them: layers of one cache group that differ in their number of
// query heads are of different attention groups.
class Attention {
public:
    // `groups` is [cache group][attention group][layer names].
    Attention(const Json& groups, const kvpages_builder_callbacks* callbacks) {
        static const Json spec = Json::parse(R"({
            "type": "full_attention", "block_size": 16, "num_kv_heads": 1, "head_size": 8,
            "dtype": "float16", "kv_quant_mode": "none", "page_size_padded": null,
            "indexes_kv_by_block_stride": false, "head_size_v": null, "sliding_window": null,
            "attention_chunk_size": null, "non_causal": false})");
        std::vector<OneBlockLayer> layers;
        std::vector<std::vector<std::string>> cache_groups;
        std::vector<std::string> active;
        const auto add = [&](const std::string& name, std::uint32_t heads) {
            cache_groups.back().push_back(name);
            if (!numbers_.emplace(name, layers.size()).second) return;
            OneBlockLayer layer;
            layer.name = name;
            layer.spec = &spec;
            layer.backend_name = "kernels";
            layer.num_heads = heads;
            layers.push_back(layer);
        };
        for (const Json& cache_group : groups) {
            cache_groups.emplace_back();
            for (std::size_t g = 0; g < cache_group.size(); ++g) {
                for (const Json& name : cache_group[g]) {
                    add(name, static_cast<std::uint32_t>(g + 1));
                    active.push_back(name);
                }
            }
            if (cache_groups.back().empty()) {
                add("not active " + std::to_string(cache_groups.size()), 1);
            }
        }
        plan_ = one_block_plan(layers, cache_groups);
        std::vector<const char*> names;
        names.reserve(active.size() + 1);
        for (const std::string& name : active) names.push_back(name.c_str());
        auto config = sized<kvpages_attention_config>();
        names.push_back(nullptr);
        config.active_layers = names.data();
        config.num_active_layers = active.size();
        config.callbacks = callbacks;
        kvpages_attention* raw = nullptr;
        check(kvpages_attention_create(plan_.plan.get(), &config, &raw));
        handle_.reset(raw);
    }

    kvpages_attention* get() const { return handle_.get(); }
    std::size_t number(const Json& name) const { return numbers_.at(name.get<std::string>()); }

private:
    OneBlockPlan plan_;
    AttentionHandle handle_;
    std::map<std::string, std::size_t> numbers_;
};

Json cut_to(const Json& kwargs, std::size_t count) {
    Json cut = kwargs;
    for (Json& value : cut) {
        if (value.is_array() && value.size() > count) {
            value = Json(std::vector<Json>(value.begin(), value.begin() + static_cast<long>(count)));
        }
    }
    return cut;
}

// Builders that write down what they are told of a step.
class Recorder {
public:
    explicit Recorder(const Json& input) : input_(input) {}

    kvpages_builder_callbacks callbacks() {
        auto made = sized<kvpages_builder_callbacks>();
        made.user = this;
        made.create = [](void* user, const kvpages_builder_info* info, void** out) {
            return keep(user, [&] {
                std::vector<std::uint64_t>& groups = of(user)->groups_;
                groups.push_back(info->group);
                *out = reinterpret_cast<void*>(groups.size());
                return 0;
            });
        };
        made.build = [](void* user, void* builder, const kvpages_common_metadata* common,
                        void* extra, void** out) {
            return keep(user, [&] {
                return of(user)->record(builder, common, extra, out, "build");
            });
        };
        made.build_for_capture = [](void* user, void* builder,
                                    const kvpages_common_metadata* common, void* extra,
                                    void** out) {
            return keep(user, [&] {
                return of(user)->record(builder, common, extra, out,
                                        "build_for_cudagraph_capture");
            });
        };
        made.destroy = [](void*, void*) {};
        return made;
    }

    const Json& calls() const { return calls_; }

    // Of a call that runs the callbacks.
    void check(kvpages_status status) { thrown_.check(status); }

private:
    static Recorder* of(void* user) { return static_cast<Recorder*>(user); }

    template <typename Body>
    static std::int32_t keep(void* user, Body body) {
        return of(user)->thrown_.keep(body);
    }

    // Numbers that a case gives more of than the step's requests count are read through the
    // pointer as far as the case goes.
    std::size_t given(const char* field) const { return input_.at(field).size(); }

    std::int32_t record(void* builder, const kvpages_common_metadata* common, void* extra,
                        void** out, const char* method) {
        const std::size_t requests = common->num_requests;
        Json fields = {
            {"num_reqs", requests},
            {"num_actual_tokens", common->num_tokens},
            {"max_query_len", common->max_query_len},
            {"max_seq_len", common->max_seq_len},
            {"query_start_loc", list(common->query_start, given("query_start_loc"))},
            {"query_start_loc_cpu", list(common->query_start_host, given("query_start_loc_cpu"))},
            {"seq_lens", list(common->seq_lens, requests)},
            {"seq_lens_cpu_upper_bound", list(common->seq_lens_host_bound, requests)},
            {"dcp_local_seq_lens", list(common->local_seq_lens, requests)},
            {"positions", list(common->positions, given("positions"))},
            {"block_table_tensor", rows_of(common->block_table)},
            {"slot_mapping", slots_of(common->slot_mapping)},
            {"causal", causal(*common)},
            {"is_prefilling", flags(common->is_prefilling, given("is_prefilling"))},
            {"mm_req_doc_ranges", ranges(*common)},
            {"rswa_prefix_lens", list(common->rswa_prefix_lens, given("rswa_prefix_lens"))},
            {"encoder_seq_lens", nullptr},
            {"num_logits_indices", nullptr}};
        if (common->group_extra != nullptr) {
            fields.update(cut_to(*static_cast<const Json*>(common->group_extra), requests));
        }
        const bool captures = common->for_capture != 0;
        calls_.push_back(
            {{"group", common->cache_group},
             {"attn_group", groups_.at(reinterpret_cast<std::size_t>(builder) - 1)},
             {"method", method},
             {"common_prefix_len", captures ? Json() : Json(common->common_prefix_len)},
             {"common", fields},
             {"extra_kwargs", extra == nullptr
                                  ? Json::object()
                                  : cut_to(*static_cast<const Json*>(extra), requests)}});
        *out = reinterpret_cast<void*>(calls_.size());
        return 0;
    }

    Json causal(const kvpages_common_metadata& common) const {
        if (common.causality == KVPAGES_CAUSALITY_PER_REQUEST) {
            return flags(common.causal_by_request, input_.at("causal").size());
        }
        return common.causality == KVPAGES_CAUSALITY_CAUSAL;
    }

    static Json ranges(const kvpages_common_metadata& common) {
        if (common.multimodal_ranges == nullptr) return nullptr;
        Json all = Json::array();
        for (std::size_t i = 0; i < common.num_multimodal_requests; ++i) {
            const kvpages_request_ranges& request = common.multimodal_ranges[i];
            Json of_request = Json::array();
            for (std::size_t j = 0; j < request.num_ranges; ++j) {
                of_request.push_back({request.ranges[j].first, request.ranges[j].last});
            }
            all.push_back({i, of_request});
        }
        return all;
    }

    const Json& input_;
    std::vector<std::uint64_t> groups_;
    Json calls_ = Json::array();
    Thrown thrown_;
};

template <typename T>
const T* data_of(const std::vector<T>& values, const Json& given) {
    static const T nothing{};
    if (given.is_null()) return nullptr;
    return values.empty() ? &nothing : values.data();
}

Json run_build(const Json& input) {
    Recorder recorder(input);
    const kvpages_builder_callbacks callbacks = recorder.callbacks();
    const Json& groups = input.at("attn_groups");
    const Attention attention(groups, &callbacks);

    auto step = sized<kvpages_step>();
    step.num_requests = input.at("num_reqs");
    step.num_tokens = input.at("num_tokens");
    step.max_query_len = input.at("max_query_len");
    step.max_seq_len = input.at("max_seq_len");
    const auto query_start = numbers<std::int32_t>(input.at("query_start_loc"));
    const auto query_start_host = numbers<std::int32_t>(input.at("query_start_loc_cpu"));
    const auto seq_lens = numbers<std::int32_t>(input.at("seq_lens"));
    const auto bounds = numbers<std::int32_t>(input.at("seq_lens_cpu_upper_bound"));
    const auto local = numbers<std::int32_t>(input.at("dcp_local_seq_lens"));
    const auto positions = numbers<std::int64_t>(input.at("positions"));
    const auto prefilling = numbers<std::uint8_t>(input.at("is_prefilling"));
    const auto prefixes = numbers<std::int32_t>(input.at("rswa_prefix_lens"));
    step.query_start = data_of(query_start, input.at("query_start_loc"));
    step.query_start_host = data_of(query_start_host, input.at("query_start_loc_cpu"));
    step.seq_lens = data_of(seq_lens, input.at("seq_lens"));
    step.seq_lens_host_bound = data_of(bounds, input.at("seq_lens_cpu_upper_bound"));
    step.local_seq_lens = data_of(local, input.at("dcp_local_seq_lens"));
    step.positions = data_of(positions, input.at("positions"));
    step.is_prefilling = data_of(prefilling, input.at("is_prefilling"));
    step.rswa_prefix_lens = data_of(prefixes, input.at("rswa_prefix_lens"));
    for (const auto& [name, values] :
         {std::pair{"seq_lens", &seq_lens}, std::pair{"seq_lens_cpu_upper_bound", &bounds},
          std::pair{"dcp_local_seq_lens", &local}}) {
        if (!input.at(name).is_null() && values->size() < step.num_requests) {
            throw Inexpressible(std::string(name) + ": shorter than num_reqs");
        }
    }

    std::vector<std::vector<kvpages_range>> ranges;
    std::vector<kvpages_request_ranges> request_ranges;
    for (const Json& request : input.at("mm_req_doc_ranges")) {
        if (request[0] != ranges.size()) {
            throw Inexpressible("mm_req_doc_ranges: not one entry for each request");
        }
        ranges.emplace_back();
        for (const Json& range : request[1]) ranges.back().push_back({range[0], range[1]});
    }
    for (const auto& of_request : ranges) {
        request_ranges.push_back({of_request.data(), of_request.size()});
    }
    step.multimodal_ranges = data_of(request_ranges, input.at("mm_req_doc_ranges"));
    step.num_multimodal_requests = request_ranges.size();

    std::vector<Dense<std::int32_t>> tables;
    for (const Json& rows : input.at("block_tables")) tables.push_back(block_table(rows));
    std::vector<Dense<std::int64_t>> slots;
    for (const Json& mapping : input.at("slot_mappings")) slots.push_back(slot_mapping(mapping));
    std::vector<kvpages_tensor> block_tables, slot_mappings;
    for (auto& table : tables) block_tables.push_back(table.tensor());
    for (auto& mapping : slots) slot_mappings.push_back(mapping.tensor());
    step.block_tables = block_tables.data();
    step.num_block_tables = block_tables.size();
    step.slot_mappings = slot_mappings.data();
    step.num_slot_mappings = slot_mappings.size();
    step.num_cache_groups = input.at("num_kv_cache_groups");
    step.for_capture = input.at("for_cudagraph_capture").get<bool>() ? 1 : 0;

    const Json& causal = input.at("causal");
    std::vector<std::uint32_t> by_group;
    std::vector<std::uint8_t> by_request;
    if (causal.is_boolean()) {
        step.causality = causal.get<bool>() ? KVPAGES_CAUSALITY_CAUSAL : KVPAGES_CAUSALITY_NON_CAUSAL;
    } else if (causal.is_array()) {
        by_request = numbers<std::uint8_t>(causal);
        step.causality = KVPAGES_CAUSALITY_PER_REQUEST;
        step.causal_by_request = data_of(by_request, causal);
    } else {
        for (std::size_t c = 0; c < groups.size(); ++c) {
            by_group.push_back(causal.value(std::to_string(c), true) ? KVPAGES_CAUSALITY_CAUSAL
                                                                     : KVPAGES_CAUSALITY_NON_CAUSAL);
        }
        step.causality_by_group = by_group.data();
        step.num_causality_by_group = by_group.size();
    }

    std::vector<Json> kept;
    kept.reserve(groups.size() + 64 * groups.size());
    std::vector<void*> group_extra, builder_extra;
    if (const Json& specific = input.at("model_specific"); !specific.is_null()) {
        const auto entry = [&kept](const Json& of, const std::string& key) -> void* {
            const auto found = of.find(key);
            if (found == of.end()) return nullptr;
            kept.push_back(*found);
            return &kept.back();
        };
        for (std::size_t c = 0; c < groups.size(); ++c) {
            group_extra.push_back(entry(specific.at("common"), std::to_string(c)));
            for (std::size_t g = 0; g < groups[c].size(); ++g) {
                builder_extra.push_back(entry(specific.at("builder"),
                                              std::to_string(c) + "." + std::to_string(g)));
            }
        }
        step.group_extra = group_extra.data();
        step.num_group_extra = group_extra.size();
        step.builder_extra = builder_extra.data();
        step.num_builder_extra = builder_extra.size();
    }
    recorder.check(kvpages_attention_build(attention.get(), &step));

    Json layers = Json::array();
    for (const Json& cache_group : groups) {
        for (const Json& group : cache_group) {
            for (const Json& name : group) {
                void* metadata =
                    kvpages_attention_layer_metadata(attention.get(), 0, attention.number(name));
                if (metadata == nullptr) {
                    throw Contradiction("layer " + name.get<std::string>() + " has no metadata");
                }
                layers.push_back({name, reinterpret_cast<std::size_t>(metadata) - 1});
            }
        }
    }
    return {{"calls", recorder.calls()}, {"layers", layers}};
}

Json run_slots(const Json& input) {
    Json groups = Json::array();
    for (const Json& names : input.at("groups")) {
        groups.push_back(names.empty() ? Json::array() : Json::array({names}));
    }
    const Attention attention(groups, nullptr);
    std::vector<Dense<std::int64_t>> slots;
    for (const Json& mapping : input.at("slot_mappings")) slots.push_back(slot_mapping(mapping));
    std::vector<kvpages_tensor> slot_mappings;
    for (auto& mapping : slots) slot_mappings.push_back(mapping.tensor());
    Dense<std::int32_t> no_rows = block_table(Json::array());
    const std::vector<kvpages_tensor> block_tables(groups.size(), no_rows.tensor());
    const std::int32_t start = 0;

    auto step = sized<kvpages_step>();
    step.query_start = &start;
    step.query_start_host = &start;
    step.block_tables = block_tables.data();
    step.num_block_tables = block_tables.size();
    step.slot_mappings = slot_mappings.data();
    step.num_slot_mappings = slot_mappings.size();
    step.num_cache_groups = groups.size();
    check(kvpages_attention_build(attention.get(), &step));
    Json layers = Json::array();
    for (const Json& names : input.at("groups")) {
        for (const Json& name : names) {
            kvpages_tensor found{};
            check(kvpages_attention_get_slot_mapping(attention.get(), 0, attention.number(name),
                                                     &found));
            layers.push_back({name, slots_of(found)});
        }
    }
    return {{"layers", layers}};
}

std::uint32_t modality(const std::string& name) {
    if (name == "image") return KVPAGES_MODALITY_IMAGE;
    if (name == "video") return KVPAGES_MODALITY_VIDEO;
    if (name == "audio") return KVPAGES_MODALITY_AUDIO;
    return KVPAGES_MODALITY_OTHER;
}

Json ranges_of(const Json& features, std::uint64_t window) {
    std::vector<std::vector<std::uint8_t>> masks;
    masks.reserve(features.size());
    std::vector<kvpages_multimodal_item> items;
    for (const Json& feature : features) {
        const Json& mask = feature.at("is_embed");
        if (!mask.is_null() && mask.size() != feature.at("length")) {
            throw Inexpressible("is_embed: not one flag for each token");
        }
        masks.push_back(numbers<std::uint8_t>(mask));
        items.push_back({modality(feature.at("modality")), 0, feature.at("offset"),
                         feature.at("length"), data_of(masks.back(), mask)});
    }
    std::size_t count = 0;
    std::vector<kvpages_range> ranges;
    auto status =
        kvpages_multimodal_ranges(items.data(), items.size(), window, nullptr, 0, &count);
    if (status == KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        ranges.resize(count);
        status = kvpages_multimodal_ranges(items.data(), items.size(), window, ranges.data(),
                                           count, &count);
    }
    check(status);
    Json all = Json::array();
    for (const kvpages_range& range : ranges) all.push_back({range.first, range.last});
    return all;
}

Json run_ranges(const Json& input) {
    const Json& window = input.at("sliding_window");
    Json all = Json::array();
    for (const Json& id : input.at("req_ids")) {
        Json features = Json::array();
        for (const Json& pair : input.at("features")) {
            if (pair[0] == id) features = pair[1];
        }
        const Json ranges =
            ranges_of(features, window.is_null() ? KVPAGES_NO_WINDOW : window.get<std::uint64_t>());
        all.push_back({all.size(), ranges});
    }
    return {{"ranges", all}};
}

}  // namespace

Category metadata_category() {
    return {
        {"build",
         {Schema(R"({
              "op": "string", "attn_groups": [[["string"]]], "num_kv_cache_groups": "uint",
              "num_reqs": "uint", "num_tokens": "uint", "query_start_loc": ["int"],
              "query_start_loc_cpu": ["int"], "max_query_len": "uint", "seq_lens": ["int"],
              "max_seq_len": "uint", "block_tables": [[["int"]]], "slot_mappings": [["int"]],
              "seq_lens_cpu_upper_bound": "ints|null", "dcp_local_seq_lens": "ints|null",
              "positions": "ints|null", "is_prefilling": "bools|null",
              "mm_req_doc_ranges": "request_ranges|null", "model_specific": "specific|null",
              "for_cudagraph_capture": "bool", "causal": "bool|bools|causal_map",
              "rswa_prefix_lens": "ints|null"})"),
          Schema::of_expectation(R"({
              "calls": [{"group": "uint", "attn_group": "uint", "method": "string",
                         "common_prefix_len": "uint|null", "common": {"*": "any"},
                         "extra_kwargs": {"*": "any"}}],
              "layers": [["string", "uint"]]})"),
          run_build, as_it_is}},
        {"slot_mappings_by_layer",
         {Schema(R"({"op": "string", "groups": [["string"]], "slot_mappings": [["int"]]})"),
          Schema::of_expectation(R"({"layers": [["string", ["int"]]]})"), run_slots, as_it_is}},
        {"mm_prefix_ranges",
         {Schema(R"({
              "op": "string", "req_ids": ["string"],
              "features": [["string", [{"modality": "string", "offset": "int", "length": "int",
                                        "is_embed": "bools|null"}]]],
              "sliding_window": "uint|null"})"),
          Schema::of_expectation(R"({"ranges": [["uint", [["int", "int"]]]]})"), run_ranges,
          as_it_is}},
    };
}

}  // namespace conformance
