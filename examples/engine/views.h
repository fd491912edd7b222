// Prints and checks what kvpages says of a cache's views.
#pragma once

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace engine {

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(what);
}

inline bool are_equal(kvpages::Span<const std::int64_t> a, kvpages::Span<const std::int64_t> b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] != b[i]) return false;
    }
    return true;
}

inline std::string to_text(kvpages::Span<const std::int64_t> numbers) {
    std::string text;
    for (const std::int64_t number : numbers) {
        text += (text.empty() ? "" : ", ") + std::to_string(number);
    }
    return "(" + text + ")";
}

/// Compares a view with its report and with the allocation that the report names.
inline void check_report(const kvpages::Cache& cache, std::size_t layer, std::size_t state) {
    const kvpages::Tensor view = cache.view(layer, state);
    const kvpages_view_report report = cache.report(layer, state);
    const kvpages_allocation allocation = cache.allocation(report.allocation);
    std::uint64_t furthest = 0, elements = 1;
    for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
        furthest += static_cast<std::uint64_t>((view.shape[dim] - 1) * view.strides[dim]);
        elements *= static_cast<std::uint64_t>(view.shape[dim]);
    }
    const std::uint64_t bytes = kvpages::bytes(view.dtype);
    const std::string name = cache.layer_name(layer);
    require(view.data == static_cast<char*>(allocation.data) + report.offset_bytes,
            name + ": the view does not start where its report says");
    require(furthest == report.largest_element_offset && elements * bytes == report.logical_bytes,
            name + ": the view has another extent than its report says");
    require(report.end_bytes == report.offset_bytes + (furthest + 1) * bytes,
            name + ": the view ends elsewhere than its report says");
    require(report.end_bytes <= allocation.size_bytes, name + ": the view leaves its allocation");
    require(report.owner_layer == layer, name + ": the view shows another layer's pages");
}

/// Checks the reports of all views; returns the number of layers.
inline std::size_t check_reports(const kvpages::Cache& cache) {
    for (std::size_t layer = 0; layer < cache.num_layers(); ++layer) {
        for (std::size_t state = 0; state < cache.num_views(layer); ++state) {
            check_report(cache, layer, state);
        }
    }
    return cache.num_layers();
}

inline void print_row(const kvpages::Cache& cache, std::size_t layer) {
    for (std::size_t state = 0; state < cache.num_views(layer); ++state) {
        const kvpages::Tensor view = cache.view(layer, state);
        const kvpages_view_report report = cache.report(layer, state);
        std::printf("  %-29s %5llu %9llu  %-9s %-22s %s\n",
                    state == 0 ? cache.layer_name(layer) : "",
                    static_cast<unsigned long long>(report.allocation),
                    static_cast<unsigned long long>(report.offset_bytes),
                    kvpages::name(view.dtype),
                    to_text(view.shape).c_str(), to_text(view.strides).c_str());
    }
}

inline bool are_alike(const kvpages::Cache& cache, std::size_t a, std::size_t b) {
    if (cache.num_views(a) != cache.num_views(b)) return false;
    for (std::size_t state = 0; state < cache.num_views(a); ++state) {
        const kvpages::Tensor one = cache.view(a, state), other = cache.view(b, state);
        if (one.dtype != other.dtype || !are_equal(one.shape, other.shape) ||
            !are_equal(one.strides, other.strides)) {
            return false;
        }
    }
    return true;
}

/// One line for each view, but of the layers of a group that are alike only the first two.
inline void print_views(const kvpages::Plan& plan, const kvpages::Cache& cache) {
    std::printf("  %-29s %5s %9s  %-9s %-22s %s\n", "layer", "alloc", "offset", "dtype", "shape",
                "strides (elements)");
    for (std::size_t group = 0; group < plan.worker().num_groups; ++group) {
        std::size_t num_shown = 0, num_alike = 0, first = 0;
        for (const std::string& name : plan.group_layers(group)) {
            const std::size_t layer = cache.find(name);
            if (num_shown == 0) first = layer;
            if (num_shown >= 2 && are_alike(cache, first, layer)) {
                ++num_alike;
                continue;
            }
            print_row(cache, layer);
            ++num_shown;
        }
        if (num_alike > 0) std::printf("  ... %zu more alike in group %zu\n", num_alike, group);
    }
}

}  // namespace engine
