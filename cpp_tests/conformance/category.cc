#include "category.h"

namespace conformance {

const Category& category(const std::string& name) {
    static const std::map<std::string, Category> categories = {
        {"specs", specs_category()},
        {"plan", plan_category()},
        {"views", views_category()},
        {"bind", bind_category()},
        {"slots", slots_category()},
        {"zeroing", zeroing_category()},
        {"copying", copying_category()},
        {"groups", groups_category()},
        {"metadata", metadata_category()},
    };
    const auto found = categories.find(name);
    if (found == categories.end()) {
        throw Inexpressible("unknown category " + name);
    }
    return found->second;
}

const Operation& operation(const Category& category, const Json& input) {
    if (!input.is_object()) {
        throw Inexpressible("input: not an object");
    }
    std::string name;
    if (const auto op = input.find("op"); op != input.end()) {
        name = op->is_string() ? op->get<std::string>() : op->dump();
    }
    const auto found = category.find(name);
    if (found == category.end()) {
        throw Inexpressible("input.op: unknown op \"" + name + "\"");
    }
    return found->second;
}

}  // namespace conformance
