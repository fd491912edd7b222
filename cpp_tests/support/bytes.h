// Caches looked at byte by byte.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_BYTES_H
#define KVPAGES_CPP_TESTS_SUPPORT_BYTES_H

#include "api.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace support {

// Every index of a shape.
template <typename Visit>
void for_each_index(const std::vector<std::int64_t>& shape, Visit&& visit) {
    for (const std::int64_t size : shape) {
        if (size <= 0) {
            return;
        }
    }
    std::vector<std::int64_t> index(shape.size(), 0);
    for (;;) {
        visit(index);
        std::size_t dim = shape.size();
        while (dim > 0 && ++index[dim - 1] == shape[dim - 1]) {
            index[--dim] = 0;
        }
        if (dim == 0) {
            return;
        }
    }
}

// The first byte of an element, by shape and strides alone.
inline unsigned char* element(const kvpages_tensor& tensor,
                              const std::vector<std::int64_t>& index) {
    std::int64_t offset = 0;
    for (std::size_t dim = 0; dim < index.size(); ++dim) {
        offset += index[dim] * tensor.strides[dim];
    }
    const auto bytes = static_cast<std::int64_t>(kvpages_dtype_bytes(tensor.dtype));
    return static_cast<unsigned char*>(tensor.data) + offset * bytes;
}

// Which allocation of a cache holds an address, and where in it.
struct Place {
    std::size_t allocation = 0;
    std::size_t offset = 0;
};

class Allocations {
public:
    explicit Allocations(const Cache& cache) {
        for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
            all_.push_back(allocation(cache, i));
        }
    }

    std::size_t size() const { return all_.size(); }
    unsigned char* data(std::size_t i) const { return static_cast<unsigned char*>(all_[i].data); }
    std::size_t bytes(std::size_t i) const {
        return static_cast<std::size_t>(all_[i].size_bytes);
    }

    // Throws for an address that no allocation holds.
    Place place(const unsigned char* address, std::size_t bytes_there) const {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        for (std::size_t i = 0; i < all_.size(); ++i) {
            const auto start = reinterpret_cast<std::uintptr_t>(all_[i].data);
            if (at >= start && at + bytes_there <= start + bytes(i)) {
                return {i, static_cast<std::size_t>(at - start)};
            }
        }
        throw std::runtime_error("a view reaches outside every allocation");
    }

    void fill(unsigned char value) const {
        for (std::size_t i = 0; i < size(); ++i) {
            for (std::size_t byte = 0; byte < bytes(i); ++byte) {
                data(i)[byte] = value;
            }
        }
    }

private:
    std::vector<kvpages_allocation> all_;
};

}  // namespace support

#endif
