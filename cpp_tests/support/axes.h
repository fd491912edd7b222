// Where every element of an attention layer lies, worked out from the layout's text and the rules
// of the manual, without the library.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_AXES_H
#define KVPAGES_CPP_TESTS_SUPPORT_AXES_H

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace support {

enum Axis : std::size_t { block_axis, kv_axis, head_axis, token_axis, content_axis, num_axes };

using AxisValues = std::array<std::int64_t, num_axes>;

// Dimensions made of axes, and their order in memory.
struct AxisLayout {
    using Dim = std::vector<std::size_t>;

    std::vector<Dim> dims;
    std::vector<Dim> in_memory;

    explicit AxisLayout(const std::string& layout, const std::string& memory_order = "")
        : dims(parse(layout)), in_memory(memory_order.empty() ? dims : parse(memory_order)) {}

    // The axes as they lie in memory, outermost first.
    std::vector<std::size_t> axes_in_memory() const {
        std::vector<std::size_t> axes;
        for (const Dim& dim : in_memory) {
            axes.insert(axes.end(), dim.begin(), dim.end());
        }
        return axes;
    }

    bool has(std::size_t axis) const {
        const std::vector<std::size_t> axes = axes_in_memory();
        return std::find(axes.begin(), axes.end(), axis) != axes.end();
    }

    // Whether a key and its value lie side by side, in one run of elements.
    bool kv_beside_content() const {
        for (const Dim& dim : dims) {
            for (std::size_t i = 0; i + 1 < dim.size(); ++i) {
                if (dim[i] == kv_axis && dim[i + 1] == content_axis) {
                    return true;
                }
            }
        }
        return false;
    }

    std::vector<std::int64_t> shape(const AxisValues& sizes) const {
        std::vector<std::int64_t> shape;
        for (const Dim& dim : dims) {
            std::int64_t size = 1;
            for (const std::size_t axis : dim) {
                size *= sizes[axis];
            }
            shape.push_back(size);
        }
        return shape;
    }

    // The index of an element in each dimension.
    std::vector<std::int64_t> index(const AxisValues& at, const AxisValues& sizes) const {
        std::vector<std::int64_t> index;
        for (const Dim& dim : dims) {
            std::int64_t value = 0;
            for (const std::size_t axis : dim) {
                value = value * sizes[axis] + at[axis];
            }
            index.push_back(value);
        }
        return index;
    }

private:
    static std::vector<Dim> parse(const std::string& text) {
        static const std::array<const char*, num_axes> names{"block", "kv", "head", "token",
                                                             "content"};
        std::vector<Dim> dims(1);
        std::string word;
        std::istringstream words(text);
        const auto take = [&dims](const std::string& name) {
            for (std::size_t axis = 0; axis < names.size(); ++axis) {
                if (name == names[axis]) {
                    dims.back().push_back(axis);
                    return;
                }
            }
            throw std::runtime_error("no axis: " + name);
        };
        while (words >> word) {
            if (word == "|") {
                dims.emplace_back();
                continue;
            }
            std::istringstream parts(word);
            std::string part;
            while (std::getline(parts, part, '*')) {
                take(part);
            }
        }
        return dims;
    }
};

// Elements from one index of an axis to the next when `axes` lie without gaps.
inline AxisValues contiguous(const std::vector<std::size_t>& axes, const AxisValues& sizes) {
    AxisValues strides{};
    std::int64_t stride = 1;
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
        strides[*axis] = stride;
        stride *= sizes[*axis];
    }
    return strides;
}

// Every combination of axis values.
template <typename Visit>
void for_each_place(const AxisValues& sizes, Visit&& visit) {
    AxisValues at{};
    for (at[block_axis] = 0; at[block_axis] < sizes[block_axis]; ++at[block_axis]) {
        for (at[kv_axis] = 0; at[kv_axis] < sizes[kv_axis]; ++at[kv_axis]) {
            for (at[head_axis] = 0; at[head_axis] < sizes[head_axis]; ++at[head_axis]) {
                for (at[token_axis] = 0; at[token_axis] < sizes[token_axis]; ++at[token_axis]) {
                    for (at[content_axis] = 0; at[content_axis] < sizes[content_axis];
                         ++at[content_axis]) {
                        visit(at);
                    }
                }
            }
        }
    }
}

}  // namespace support

#endif
