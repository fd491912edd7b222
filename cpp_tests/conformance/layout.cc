#include "layout.h"

#include <algorithm>
#include <vector>

namespace conformance {
namespace {

// What one dimension of a shape counts.
struct Dim {
    bool block = false;
    bool kv = false;
    bool token = false;
    bool head = false;
    bool content = false;
    // The width is that of one key; otherwise it says itself how wide a key and its value are.
    bool of_one_key = false;

    // The outermost axis first; keys and values lie outside what they repeat.
    std::string text() const {
        std::string text;
        const auto add = [&](bool present, const char* axis) {
            if (present) {
                text += (text.empty() ? "" : "*") + std::string(axis);
            }
        };
        add(block, "block");
        add(kv, "kv");
        add(token, "token");
        add(head, "head");
        add(content, "content");
        return text;
    }
};

void set_once(bool& axis, const Json& expression) {
    if (axis) {
        throw Inexpressible("shape: two axes of one name in " + expression.dump());
    }
    axis = true;
}

void add_factor(Dim& dim, const Json& factor) {
    if (factor == "num_blocks") {
        set_once(dim.block, factor);
    } else if (factor == "num_kv_heads") {
        set_once(dim.head, factor);
    } else if (factor == "block_size") {
        set_once(dim.token, factor);
    } else if (factor == "head_size") {
        set_once(dim.content, factor);
        dim.of_one_key = true;
    } else if (factor == 2) {
        set_once(dim.kv, factor);
    } else if (factor.is_number() || (factor.is_object() && factor.contains("add"))) {
        // A width in numbers: packed slots, scales beside the data, a value of another width. The
        // library works it out from the spec, and the view's shape tells whether it agrees.
        set_once(dim.content, factor);
    } else {
        throw Inexpressible("shape: no axis is " + factor.dump());
    }
}

Dim dim_of(const Json& expression) {
    Dim dim;
    const bool is_product = expression.is_object() && expression.contains("mul");
    if (is_product && expression.size() != 1) {
        throw Inexpressible("shape: " + expression.dump() + " both multiplies and adds");
    }
    for (const Json& factor : is_product ? expression.at("mul") : Json::array({expression})) {
        add_factor(dim, factor);
    }
    return dim;
}

// The dimension in which axes of one name stand, over a whole shape.
std::optional<std::size_t> find_dim(const std::vector<Dim>& dims, bool Dim::*axis) {
    std::optional<std::size_t> found;
    for (std::size_t i = 0; i < dims.size(); ++i) {
        if (dims[i].*axis) {
            if (found) {
                throw Inexpressible("shape: two dimensions of one axis");
            }
            found = i;
        }
    }
    return found;
}

std::string join(const std::vector<Dim>& dims) {
    std::string text;
    for (const Dim& dim : dims) {
        text += (text.empty() ? "" : " | ") + dim.text();
    }
    return text;
}

}  // namespace

Layout layout(const Json& backend, const std::string& cache_dtype, bool stores_values) {
    const Json& by_dtype = backend.at("shape_by_cache_dtype");
    const auto own = by_dtype.find(cache_dtype);
    const Json& shape = own != by_dtype.end() ? *own : backend.at("shape");
    if (shape.is_null()) {
        throw Inexpressible("backend " + backend.at("name").dump() + " has no shape for " +
                            cache_dtype);
    }
    std::vector<Dim> dims;
    for (const Json& expression : shape) {
        dims.push_back(dim_of(expression));
    }
    const auto content = find_dim(dims, &Dim::content);
    const auto block = find_dim(dims, &Dim::block);
    if (!content || !block || backend.at("block_dim") != *block) {
        throw Inexpressible("backend " + backend.at("name").dump() +
                            ": a shape without content, or blocks elsewhere than in block_dim");
    }

    Layout layout;
    if (!find_dim(dims, &Dim::kv)) {
        dims[*content].kv = stores_values && !dims[*content].of_one_key;
    } else {
        layout.needs_equal_kv_widths = dims[*content].kv;
    }
    layout.dims = join(dims);
    if (!backend.at("stride_order").is_null()) {
        std::vector<Dim> in_memory;
        for (const std::size_t index : backend.at("stride_order")) {
            if (index >= dims.size()) {
                throw Inexpressible("stride_order: dimension " + std::to_string(index) +
                                    " does not exist");
            }
            in_memory.push_back(dims[index]);
        }
        layout.memory_order = join(in_memory);
    }
    return layout;
}

}  // namespace conformance
