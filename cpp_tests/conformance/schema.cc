#include "schema.h"

#include <algorithm>
#include <map>

namespace conformance {
namespace {

// message and python_type are the reference's words and not compared.
constexpr const char* kError =
    R"({"error": "string", "message": "string", "python_type": "string|null"})";

// Some fields only tell where a case comes from, and nothing is made of them:
// - Of a backend vllm_class, layout, indexes_kv_by_block_stride and supported_kernel_block_sizes;
//   the shape, its order and what it requires decide.
// - The spec of a cache group whose layers have one in an attention group, which is the one that
//   counts.
const std::map<std::string, Json>& named_patterns() {
    static const std::map<std::string, Json> patterns = {
        {"cache_config", Json::parse(R"({
            "num_blocks": "uint",
            "tensors": [{"size": "uint", "shared_by": ["string"], "offset": "uint",
                         "block_stride": "uint"}],
            "groups": [{"layer_names": ["string"], "spec": "spec", "is_eagle_group": "bool"}]})")},
        {"backend", Json::parse(R"({
            "name": "string", "vllm_class": "string|null", "layout": "string|null",
            "shape": "shape|null", "shape_by_cache_dtype": {"*": "shape"},
            "stride_order": "numbers|null", "block_dim": "uint|null",
            "supported_kernel_block_sizes": ["uint|multiple"],
            "require_block_size_multiple_of": "uint|null", "require_num_kv_heads": "uint|null",
            "indexes_kv_by_block_stride": "bool|null"})")},
        {"shape", Json::parse(R"(["uint|string|expression"])")},
        {"expression",
         Json::parse(
             R"({"mul?": ["uint|string|expression"], "add?": ["uint|string|expression"]})")},
        {"numbers", Json::parse(R"(["uint"])")},
        {"tables", Json::parse(R"([[["int"]]])")},
        {"strings", Json::parse(R"(["string"])")},
        {"segments",
         Json::parse(R"([{"allocation": "uint", "offset_bytes": "uint", "span_bytes?": "uint",
                          "step_bytes?": "uint"}])")},
        {"ints", Json::parse(R"(["int"])")},
        {"bools", Json::parse(R"(["bool"])")},
        {"causal_map", Json::parse(R"({"*": "bool"})")},
        {"request_ranges", Json::parse(R"([["uint", [["int", "int"]]]])")},
        {"specific", Json::parse(R"({"common": {"*": {"*": "any"}},
                                     "builder": {"*": {"*": "any"}}})")},
        {"strings", Json::parse(R"(["string"])")},
        {"builders", Json::parse(R"([{
            "backend": "string", "spec": "spec", "layer_names": ["string"],
            "workspace": "string|null", "workspace_from": "uint|null"}])")},
        {"multiple", Json::parse(R"({"multiple_of": "uint"})")},
    };
    return patterns;
}

Json with(Json fields, const char* more) {
    fields.update(Json::parse(more));
    return fields;
}

// Fields of a spec object by its type.
const std::map<std::string, Json>& spec_patterns() {
    static const std::map<std::string, Json> patterns = [] {
        const Json attention = Json::parse(R"({
            "type": "string", "block_size": "uint", "num_kv_heads": "uint", "head_size": "uint",
            "dtype": "string", "kv_quant_mode": "string", "page_size_padded": "uint|null",
            "indexes_kv_by_block_stride": "bool"})");
        const Json full = with(attention, R"({
            "head_size_v": "uint|null", "sliding_window": "uint|null",
            "attention_chunk_size": "uint|null", "non_causal": "bool"})");
        const Json sliding =
            with(attention, R"({"sliding_window": "uint", "head_size_v": "uint|null"})");
        constexpr const char* kLatent = R"({
            "cache_dtype_str": "string|null", "alignment": "uint|null", "compress_ratio": "uint",
            "model_version": "string|null"})";
        return std::map<std::string, Json>{
            {"full_attention", full},
            {"tq_full_attention", with(full, R"({"tq_slot_size": "uint"})")},
            {"mla_attention", with(full, kLatent)},
            {"hidden_state", with(full, kLatent)},
            {"rswa", with(full, R"({"rswa_window": "uint"})")},
            {"sink_full_attention", with(full, R"({"sink_len": "uint|null"})")},
            {"chunked_local", with(attention, R"({"attention_chunk_size": "uint"})")},
            {"sliding_window", sliding},
            {"sliding_window_mla", with(sliding, kLatent)},
            {"cross_attention", attention},
            {"encoder_only", attention},
            {"mamba", Json::parse(R"({
                "type": "string", "block_size": "uint", "shapes": [["uint"]],
                "dtypes": ["string"], "page_size_padded": "uint|null", "mamba_type": "string",
                "mamba_cache_mode": "string", "num_speculative_blocks": "uint"})")},
            {"uniform_type", Json::parse(R"({
                "type": "string", "block_size": "uint", "layers": [["string", "spec"]]})")},
        };
    }();
    return patterns;
}

class Checker {
public:
    explicit Checker(bool errors_allowed) : errors_allowed_(errors_allowed) {}

    void check(const Json& pattern, const Json& value, const std::string& path) const {
        if (errors_allowed_ && is_error(value)) {
            static const Json error = Json::parse(kError);
            check_object(error, value, path);
        } else if (pattern.is_string()) {
            check_alternatives(pattern.get<std::string>(), value, path);
        } else if (pattern.is_array()) {
            check_array(pattern, value, path);
        } else {
            check_object(pattern, value, path);
        }
    }

private:
    void check_alternatives(const std::string& names, const Json& value,
                            const std::string& path) const {
        for (std::size_t begin = 0; begin <= names.size();) {
            const std::size_t end = std::min(names.find('|', begin), names.size());
            if (check_named(names.substr(begin, end - begin), value, path)) {
                return;
            }
            begin = end + 1;
        }
        throw Inexpressible(path + ": is " + value.dump().substr(0, 80) + ", not " + names);
    }

    // False when the value is of another JSON type; throws when it is of this one and wrong inside.
    bool check_named(const std::string& name, const Json& value, const std::string& path) const {
        if (name == "any") return true;
        if (name == "null") return value.is_null();
        if (name == "bool") return value.is_boolean();
        if (name == "string") return value.is_string();
        if (name == "number") return value.is_number();
        if (name == "int") return value.is_number_integer();
        if (name == "uint") return value.is_number_unsigned();
        if (name == "spec") {
            if (!value.is_object()) return false;
            check_object(spec_pattern(value, path), value, path);
            return true;
        }
        const auto& patterns = named_patterns();
        const auto pattern = patterns.find(name);
        if (pattern == patterns.end()) {
            throw std::logic_error("no pattern is named " + name);
        }
        if (pattern->second.type() != value.type()) return false;
        check(pattern->second, value, path);
        return true;
    }

    static const Json& spec_pattern(const Json& value, const std::string& path) {
        const auto& patterns = spec_patterns();
        const auto type = value.find("type");
        if (type == value.end() || !type->is_string()) {
            throw Inexpressible(path + ": a spec without a type");
        }
        const auto pattern = patterns.find(type->get<std::string>());
        if (pattern == patterns.end()) {
            throw Inexpressible(path + ".type: unknown spec type " + type->dump());
        }
        return pattern->second;
    }

    void check_array(const Json& pattern, const Json& value, const std::string& path) const {
        const bool is_list = pattern.size() == 1;
        if (!value.is_array() || (!is_list && value.size() != pattern.size())) {
            throw Inexpressible(path + ": is " + value.dump().substr(0, 80) + ", not " +
                                (is_list ? "a list" : "a pair"));
        }
        for (std::size_t i = 0; i < value.size(); ++i) {
            check(pattern[is_list ? 0 : i], value[i], path + "[" + std::to_string(i) + "]");
        }
    }

    void check_object(const Json& pattern, const Json& value, const std::string& path) const {
        if (!value.is_object()) {
            throw Inexpressible(path + ": is " + value.dump().substr(0, 80) + ", not an object");
        }
        for (const auto& [key, child] : value.items()) {
            const std::string child_path = path + "." + key;
            const Json* child_pattern = pattern_of(pattern, key);
            if (child_pattern == nullptr) {
                throw Inexpressible(child_path + ": unknown field");
            }
            check(*child_pattern, child, child_path);
        }
        for (const auto& [key, child] : pattern.items()) {
            if (key != "*" && key.back() != '?' && !value.contains(key)) {
                throw Inexpressible(path + "." + key + ": missing");
            }
        }
    }

    static const Json* pattern_of(const Json& pattern, const std::string& key) {
        for (const std::string& candidate : {key, key + "?", std::string("*")}) {
            const auto found = pattern.find(candidate);
            if (found != pattern.end()) {
                return &*found;
            }
        }
        return nullptr;
    }

    bool errors_allowed_;
};

}  // namespace

void Schema::check(const Json& value, const std::string& path) const {
    Checker(errors_allowed_).check(pattern_, value, path);
}

bool is_error(const Json& value) { return value.is_object() && value.contains("error"); }

}  // namespace conformance
