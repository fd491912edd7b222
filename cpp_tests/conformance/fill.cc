#include "fill.h"

#include <cstring>
#include <vector>

namespace conformance {
namespace {

constexpr std::uint64_t kModulus = 251;

// A view with one dimension narrowed to one index.
struct Visit {
    unsigned char* data;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;
    std::uint64_t element_bytes;
};

void write_counters(const Visit& visit, std::uint64_t counter) {
    for (const std::int64_t size : visit.shape) {
        if (size == 0) {
            return;
        }
    }
    std::vector<std::int64_t> index(visit.shape.size(), 0);
    for (;;) {
        std::int64_t element = 0;
        for (std::size_t dim = 0; dim < index.size(); ++dim) {
            element += index[dim] * visit.strides[dim];
        }
        std::memset(visit.data + element * static_cast<std::int64_t>(visit.element_bytes),
                    static_cast<int>(counter % kModulus), visit.element_bytes);
        ++counter;
        std::size_t dim = index.size();
        while (dim > 0 && ++index[dim - 1] == visit.shape[dim - 1]) {
            index[--dim] = 0;
        }
        if (dim == 0) {
            return;
        }
    }
}

}  // namespace

std::uint64_t reach_bytes(const kvpages_tensor& view) {
    std::uint64_t last = 0;
    for (std::uint32_t dim = 0; dim < view.ndim; ++dim) {
        if (view.shape[dim] == 0) {
            return 0;
        }
        last += static_cast<std::uint64_t>((view.shape[dim] - 1) * view.strides[dim]);
    }
    return (last + 1) * kvpages_dtype_bytes(view.dtype);
}

void fill(const kvpages_tensor& view, std::size_t block_dim, const Json& blocks,
          std::uint64_t start) {
    Visit whole{static_cast<unsigned char*>(view.data),
                {view.shape, view.shape + view.ndim},
                {view.strides, view.strides + view.ndim},
                kvpages_dtype_bytes(view.dtype)};
    if (blocks.is_null()) {
        write_counters(whole, start);
        return;
    }
    for (std::size_t n = 0; n < blocks.size(); ++n) {
        const std::int64_t block = blocks[n];
        if (block_dim >= whole.shape.size() || block >= whole.shape[block_dim]) {
            throw Contradiction("fill: the view has no block " + std::to_string(block));
        }
        Visit one = whole;
        one.data += block * one.strides[block_dim] * static_cast<std::int64_t>(one.element_bytes);
        one.shape[block_dim] = 1;
        write_counters(one, start + n);
    }
}

}  // namespace conformance
