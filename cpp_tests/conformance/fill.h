// Writing a known pattern through a view, to see from the bytes where its elements lie.
#pragma once

#include <kvpages/kvpages.h>

#include "json.h"

namespace conformance {

// One past the last byte that the view reaches from its first element; 0 when it is empty.
std::uint64_t reach_bytes(const kvpages_tensor& view);

// Visits the elements in row-major order and writes a counter modulo 251 into all their bytes.
// With `blocks`, only those indices of dimension `block_dim`, the n-th counting from start + n.
void fill(const kvpages_tensor& view, std::size_t block_dim, const Json& blocks,
          std::uint64_t start);

}  // namespace conformance
