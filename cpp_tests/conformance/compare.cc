#include "compare.h"

#include <algorithm>

#include "schema.h"

namespace conformance {
namespace {

constexpr std::size_t kShownCharacters = 160;

std::string shown(const Json* value) {
    if (value == nullptr) {
        return "nothing";
    }
    if (is_error(*value)) {
        const std::string kind = "error " + value->at("error").get<std::string>();
        return value->contains("message")
                   ? kind + " (" + value->at("message").get<std::string>() + ")"
                   : kind;
    }
    const std::string text = value->dump();
    return text.size() <= kShownCharacters ? text : text.substr(0, kShownCharacters) + "...";
}

std::string difference(const std::string& path, const Json* expected, const Json* got) {
    return (path.empty() ? "" : path + ": ") + "expected " + shown(expected) + ", got " +
           shown(got);
}

// A field's error is also met by the same error of a larger part, up to the whole case.
bool holds_error(const Json& expected, const Json& kind) {
    if (is_error(expected)) {
        return expected.at("error") == kind;
    }
    return expected.is_structured() &&
           std::any_of(expected.begin(), expected.end(),
                       [&](const Json& child) { return holds_error(child, kind); });
}

// What an expectation may leave out, or say without it being compared.
bool may_be_absent(const std::string& key) { return key == "sha256"; }
bool is_not_compared(const std::string& key) { return key == "layout_warnings"; }

std::optional<std::string> compare(const std::string& path, const Json& expected, const Json& got);

std::optional<std::string> compare_objects(const std::string& path, const Json& expected,
                                           const Json& got) {
    for (const auto& [key, child] : expected.items()) {
        if (is_not_compared(key)) {
            continue;
        }
        const std::string child_path = path.empty() ? key : path + "." + key;
        const auto found = got.find(key);
        if (found == got.end()) {
            return difference(child_path, &child, nullptr);
        }
        if (auto found_difference = compare(child_path, child, *found)) {
            return found_difference;
        }
    }
    for (const auto& [key, child] : got.items()) {
        if (!expected.contains(key) && !may_be_absent(key)) {
            return difference(path.empty() ? key : path + "." + key, nullptr, &child);
        }
    }
    return std::nullopt;
}

std::optional<std::string> compare_arrays(const std::string& path, const Json& expected,
                                          const Json& got) {
    const std::size_t common = std::min(expected.size(), got.size());
    for (std::size_t i = 0; i < common; ++i) {
        if (auto found = compare(path + "[" + std::to_string(i) + "]", expected[i], got[i])) {
            return found;
        }
    }
    if (expected.size() != got.size()) {
        const Json expected_size = expected.size();
        const Json got_size = got.size();
        return difference(path + ".length", &expected_size, &got_size);
    }
    return std::nullopt;
}

std::optional<std::string> compare(const std::string& path, const Json& expected, const Json& got) {
    if (is_error(got)) {
        return holds_error(expected, got.at("error"))
                   ? std::nullopt
                   : std::optional(difference(path, &expected, &got));
    }
    if (expected.is_object() && got.is_object() && !is_error(expected)) {
        return compare_objects(path, expected, got);
    }
    if (expected.is_array() && got.is_array()) {
        return compare_arrays(path, expected, got);
    }
    return expected == got ? std::nullopt : std::optional(difference(path, &expected, &got));
}

}  // namespace

std::optional<std::string> first_difference(const Json& expected, const Json& got) {
    return compare("", expected, got);
}

}  // namespace conformance
