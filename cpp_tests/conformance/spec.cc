#include "spec.h"

#include <array>
#include <optional>

#include "library.h"

namespace conformance {
namespace {

struct Name {
    const char* text;
    std::uint32_t value;
};

constexpr std::array<Name, 12> kSpecTypes = {{
    {"full_attention", KVPAGES_SPEC_KIND_FULL_ATTENTION},
    {"sink_full_attention", KVPAGES_SPEC_KIND_SINK_ATTENTION},
    {"rswa", KVPAGES_SPEC_KIND_RSWA},
    {"tq_full_attention", KVPAGES_SPEC_KIND_TURBO_QUANT},
    {"mla_attention", KVPAGES_SPEC_KIND_MLA},
    {"hidden_state", KVPAGES_SPEC_KIND_HIDDEN_STATE},
    {"sliding_window", KVPAGES_SPEC_KIND_SLIDING_WINDOW},
    {"sliding_window_mla", KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA},
    {"chunked_local", KVPAGES_SPEC_KIND_CHUNKED_LOCAL},
    {"cross_attention", KVPAGES_SPEC_KIND_CROSS_ATTENTION},
    {"encoder_only", KVPAGES_SPEC_KIND_ENCODER_ONLY},
    {"mamba", KVPAGES_SPEC_KIND_STATE},
}};

constexpr std::array<Name, 6> kQuantModes = {{
    {"none", KVPAGES_QUANT_MODE_NONE},
    {"fp8_per_tensor", KVPAGES_QUANT_MODE_FP8_PER_TENSOR},
    {"int8_per_token_head", KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD},
    {"fp8_per_token_head", KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD},
    {"int4_per_token_head", KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD},
    {"nvfp4", KVPAGES_QUANT_MODE_NVFP4},
}};

constexpr std::array<Name, 6> kStateKinds = {{
    {"mamba1", KVPAGES_STATE_KIND_MAMBA1},
    {"mamba2", KVPAGES_STATE_KIND_MAMBA2},
    {"short_conv", KVPAGES_STATE_KIND_SHORT_CONV},
    {"linear", KVPAGES_STATE_KIND_LINEAR},
    {"gdn", KVPAGES_STATE_KIND_GATED_DELTA_NET},
    {"custom", KVPAGES_STATE_KIND_CUSTOM},
}};

constexpr std::array<Name, 3> kStateCacheModes = {{
    {"none", KVPAGES_STATE_CACHE_MODE_NONE},
    {"align", KVPAGES_STATE_CACHE_MODE_ALIGN},
    {"all", KVPAGES_STATE_CACHE_MODE_ALL},
}};

template <std::size_t N>
std::uint32_t value_of(const std::array<Name, N>& names, const std::string& text) {
    for (const Name& name : names) {
        if (text == name.text) {
            return name.value;
        }
    }
    throw Inexpressible("the library has no name for \"" + text + "\"");
}

template <std::size_t N>
const char* text_of(const std::array<Name, N>& names, std::uint32_t value) {
    for (const Name& name : names) {
        if (value == name.value) {
            return name.text;
        }
    }
    return "unknown";
}

std::uint32_t dtype(const std::string& name) {
    constexpr std::uint32_t kLastCandidate = 64;
    for (std::uint32_t candidate = 0; candidate <= kLastCandidate; ++candidate) {
        if (name == kvpages_dtype_name(candidate)) {
            return candidate;
        }
    }
    throw Inexpressible("the library has no dtype \"" + name + "\"");
}

// A number whose absence the library writes as 0, so that a 0 itself cannot be said.
std::uint64_t number_or_none(const Json& spec, const char* field) {
    const auto found = spec.find(field);
    if (found == spec.end() || found->is_null()) {
        return 0;
    }
    const auto value = found->get<std::uint64_t>();
    if (value == 0) {
        throw Inexpressible(std::string(field) + " of 0 cannot be told from none");
    }
    return value;
}

std::uint64_t number_or_zero(const Json& spec, const char* field) {
    return spec.value(field, std::uint64_t{0});
}

std::uint64_t head_size_v(const Json& spec) {
    const auto found = spec.find("head_size_v");
    if (found == spec.end() || found->is_null()) {
        return 0;  // as head_size
    }
    const auto value = found->get<std::uint64_t>();
    return value == 0 ? KVPAGES_HEAD_SIZE_NONE : value;
}

std::optional<std::string> text_or_none(const Json& spec, const char* field) {
    const auto found = spec.find(field);
    if (found == spec.end() || found->is_null()) {
        return std::nullopt;
    }
    auto text = found->get<std::string>();
    if (text.find('\0') != std::string::npos) {
        throw Inexpressible(std::string(field) + " with a NUL character");
    }
    return text;
}

Json none_if_zero(std::uint64_t value) { return value == 0 ? Json() : Json(value); }
Json none_if_null(const char* text) { return text == nullptr ? Json() : Json(text); }

Json state_object(const kvpages_spec& spec) {
    Json shapes = Json::array();
    const std::uint64_t* next = spec.state_dims;
    for (std::size_t i = 0; i < spec.num_state_shapes; ++i) {
        shapes.push_back(std::vector<std::uint64_t>(next, next + spec.state_ndims[i]));
        next += spec.state_ndims[i];
    }
    Json dtypes = Json::array();
    for (std::size_t i = 0; i < spec.num_state_dtypes; ++i) {
        dtypes.push_back(kvpages_dtype_name(spec.state_dtypes[i]));
    }
    return {{"type", "mamba"},
            {"block_size", spec.block_size},
            {"shapes", shapes},
            {"dtypes", dtypes},
            {"page_size_padded", none_if_zero(spec.page_size_padded_bytes)},
            {"mamba_type", text_of(kStateKinds, spec.state_kind)},
            {"mamba_cache_mode", text_of(kStateCacheModes, spec.state_cache_mode)},
            {"num_speculative_blocks", spec.num_speculative_blocks}};
}

Json resulting_page(const Json& spec) {
    try {
        const Spec converted(spec);
        const kvpages_spec c = converted.c();
        auto info = sized<kvpages_spec_info>();
        check(kvpages_spec_describe(&c, &info));
        return info.page_size_bytes;
    } catch (const LibraryError& error) {
        return "refused: " + error.kind();
    }
}

}  // namespace

Spec::Spec(const Json& spec) : fields_(sized<kvpages_spec>()) {
    fields_.block_size = spec.at("block_size");
    if (is_uniform_type(spec)) {
        fields_.kind = KVPAGES_SPEC_KIND_MIXED;
        return;
    }
    fields_.kind = value_of(kSpecTypes, spec.at("type"));
    fields_.page_size_padded_bytes = number_or_none(spec, "page_size_padded");
    if (is_state(spec)) {
        for (const Json& name : spec.at("dtypes")) {
            state_dtypes_.push_back(dtype(name));
        }
        for (const Json& shape : spec.at("shapes")) {
            state_ndims_.push_back(static_cast<std::uint32_t>(shape.size()));
            state_dims_.insert(state_dims_.end(), shape.begin(), shape.end());
        }
        fields_.state_kind = value_of(kStateKinds, spec.at("mamba_type"));
        fields_.state_cache_mode = state_cache_mode(spec.at("mamba_cache_mode"));
        fields_.num_speculative_blocks = spec.at("num_speculative_blocks");
        return;
    }
    fields_.dtype = dtype(spec.at("dtype"));
    fields_.quant_mode = quant_mode(spec.at("kv_quant_mode"));
    fields_.num_kv_heads = spec.at("num_kv_heads");
    fields_.head_size = spec.at("head_size");
    fields_.head_size_v = head_size_v(spec);
    fields_.sliding_window = number_or_none(spec, "sliding_window");
    fields_.attention_chunk_size = number_or_none(spec, "attention_chunk_size");
    fields_.tq_slot_bytes = number_or_zero(spec, "tq_slot_size");
    fields_.sink_len = number_or_zero(spec, "sink_len");
    fields_.rswa_window = number_or_zero(spec, "rswa_window");
    fields_.alignment_bytes = number_or_none(spec, "alignment");
    fields_.compress_ratio = number_or_none(spec, "compress_ratio");
    if (spec.at("indexes_kv_by_block_stride").get<bool>()) {
        fields_.flags |= KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE;
    }
    if (spec.value("non_causal", false)) {
        fields_.flags |= KVPAGES_SPEC_NON_CAUSAL;
    }
    if (auto text = text_or_none(spec, "cache_dtype_str")) {
        cache_dtype_ = *text;
        has_cache_dtype_ = true;
    }
    if (auto text = text_or_none(spec, "model_version")) {
        model_version_ = *text;
        has_model_version_ = true;
    }
}

kvpages_spec Spec::c() const {
    kvpages_spec spec = fields_;
    spec.cache_dtype = has_cache_dtype_ ? cache_dtype_.c_str() : nullptr;
    spec.model_version = has_model_version_ ? model_version_.c_str() : nullptr;
    spec.state_dtypes = state_dtypes_.data();
    spec.num_state_dtypes = state_dtypes_.size();
    spec.state_ndims = state_ndims_.data();
    spec.num_state_shapes = state_ndims_.size();
    spec.state_dims = state_dims_.data();
    spec.num_state_dims = state_dims_.size();
    return spec;
}

Json spec_object(const kvpages_spec& spec) {
    if (spec.kind == KVPAGES_SPEC_KIND_STATE) {
        return state_object(spec);
    }
    const bool strides = (spec.flags & KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE) != 0;
    Json object = {{"type", text_of(kSpecTypes, spec.kind)},
                   {"block_size", spec.block_size},
                   {"num_kv_heads", spec.num_kv_heads},
                   {"head_size", spec.head_size},
                   {"dtype", kvpages_dtype_name(spec.dtype)},
                   {"kv_quant_mode", quant_mode_name(spec.quant_mode)},
                   {"page_size_padded", none_if_zero(spec.page_size_padded_bytes)},
                   {"indexes_kv_by_block_stride", strides}};
    const auto add_value_width = [&] {
        object["head_size_v"] = spec.head_size_v == KVPAGES_HEAD_SIZE_NONE ? 0
                                : spec.head_size_v == 0                    ? spec.head_size
                                                                           : spec.head_size_v;
    };
    const auto add_full = [&] {
        add_value_width();
        object["sliding_window"] = none_if_zero(spec.sliding_window);
        object["attention_chunk_size"] = none_if_zero(spec.attention_chunk_size);
        object["non_causal"] = (spec.flags & KVPAGES_SPEC_NON_CAUSAL) != 0;
    };
    const auto add_latent = [&] {
        object["cache_dtype_str"] = none_if_null(spec.cache_dtype);
        object["alignment"] = none_if_zero(spec.alignment_bytes);
        object["compress_ratio"] = spec.compress_ratio == 0 ? 1 : spec.compress_ratio;
        object["model_version"] = none_if_null(spec.model_version);
    };
    switch (spec.kind) {
        case KVPAGES_SPEC_KIND_FULL_ATTENTION:
            add_full();
            break;
        case KVPAGES_SPEC_KIND_SINK_ATTENTION:
            add_full();
            object["sink_len"] = spec.sink_len;
            break;
        case KVPAGES_SPEC_KIND_RSWA:
            add_full();
            object["rswa_window"] = spec.rswa_window;
            break;
        case KVPAGES_SPEC_KIND_TURBO_QUANT:
            add_full();
            object["tq_slot_size"] = spec.tq_slot_bytes;
            break;
        case KVPAGES_SPEC_KIND_MLA:
        case KVPAGES_SPEC_KIND_HIDDEN_STATE:
            add_full();
            add_latent();
            break;
        case KVPAGES_SPEC_KIND_SLIDING_WINDOW:
            add_value_width();
            object["sliding_window"] = spec.sliding_window;
            break;
        case KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA:
            add_value_width();
            object["sliding_window"] = spec.sliding_window;
            add_latent();
            break;
        case KVPAGES_SPEC_KIND_CHUNKED_LOCAL:
            object["attention_chunk_size"] = spec.attention_chunk_size;
            break;
        default:
            break;
    }
    return object;
}

const char* reported_kind(std::uint32_t kind) {
    switch (kind) {
        case KVPAGES_SPEC_KIND_FULL_ATTENTION:
        case KVPAGES_SPEC_KIND_TURBO_QUANT:
        case KVPAGES_SPEC_KIND_RSWA:
            return "full_attention";
        case KVPAGES_SPEC_KIND_SINK_ATTENTION:
            return "sink_full_attention";
        case KVPAGES_SPEC_KIND_MLA:
        case KVPAGES_SPEC_KIND_HIDDEN_STATE:
            return "mla_attention";
        case KVPAGES_SPEC_KIND_CHUNKED_LOCAL:
            return "chunked_local_attention";
        case KVPAGES_SPEC_KIND_ENCODER_ONLY:
            return "encoder_only_attention";
        default:
            return text_of(kSpecTypes, kind);
    }
}

bool is_uniform_type(const Json& spec) { return spec.at("type") == "uniform_type"; }

bool is_state(const Json& spec) { return spec.at("type") == "mamba"; }

bool is_latent(const Json& spec) {
    const Json& type = spec.at("type");
    return type == "mla_attention" || type == "hidden_state" || type == "sliding_window_mla";
}

bool is_windowed(const Json& spec) {
    return spec.at("type") == "chunked_local" || !reported_window(spec).is_null();
}

Json reported_window(const Json& spec) {
    const Json& type = spec.at("type");
    const bool slides = type == "sliding_window" || type == "sliding_window_mla";
    return slides ? spec.at("sliding_window") : Json();
}

std::uint32_t quant_mode(const std::string& name) { return value_of(kQuantModes, name); }

const char* quant_mode_name(std::uint32_t mode) { return text_of(kQuantModes, mode); }

std::uint32_t state_cache_mode(const std::string& name) { return value_of(kStateCacheModes, name); }

void normalise_specs(Json& outcome) {
    if (!outcome.is_structured()) {
        return;
    }
    for (Json& child : outcome) {
        normalise_specs(child);
    }
    if (!outcome.is_object() || !outcome.contains("type") || is_uniform_type(outcome)) {
        return;
    }
    // No sink tokens is one thing, however it is written.
    if (outcome.contains("sink_len") && outcome.at("sink_len").is_null()) outcome["sink_len"] = 0;
    if (outcome.contains("head_size_v") && outcome.at("head_size_v").is_null()) {
        outcome["head_size_v"] = outcome.at("head_size");
    }
    if (is_latent(outcome)) {
        outcome["page_size_bytes"] = resulting_page(outcome);
        outcome.erase("page_size_padded");
    }
}

}  // namespace conformance
