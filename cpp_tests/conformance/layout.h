// Backend templates of the case files, as the library's layouts of named axes.
#pragma once

#include <optional>
#include <string>

#include "json.h"

namespace conformance {

struct Layout {
    std::string dims;                         // "block | head | token | kv*content"
    std::optional<std::string> memory_order;  // unset: as listed
    bool needs_equal_kv_widths = false;       // twice one width, so keys as wide as values
};

// How a layer's cache is laid out by `backend`, given the layer's cache dtype string.
Layout layout(const Json& backend, const std::string& cache_dtype, bool stores_values);

}  // namespace conformance
