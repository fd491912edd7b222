// Where the elements of a planned layer must lie, by the rules of the manual alone.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_EXPECTED_H
#define KVPAGES_CPP_TESTS_SUPPORT_EXPECTED_H

#include "api.h"
#include "axes.h"
#include "bytes.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace support {

// The pages of a layer with its own, as a plan has them.
struct Pages {
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    std::size_t group = 0;
    std::size_t tensor = 0;
    std::uint64_t kernel_block_size = 0;
    std::uint64_t page = 0;
    std::uint64_t step = 0;
    std::uint64_t offset = 0;
    std::uint64_t num_blocks = 0;
    bool alone = false;  // the only layer of an unpacked tensor
};

inline Pages pages_of(const Plan& plan, const std::string& name) {
    Pages pages;
    const kvpages_worker_info worker = worker_info(plan);
    pages.num_blocks = worker.num_blocks;
    bool in_group = false;
    for (std::size_t group = 0; group < worker.num_groups; ++group) {
        const std::vector<std::string> layers = group_layers(plan, group);
        const kvpages_group_info info = group_info(plan, group);
        for (std::size_t i = 0; i < info.num_layers; ++i) {
            if (layers[i] == name) {
                in_group = true;
                pages.group = group;
                pages.spec = group_spec(plan, group, info.is_set != 0 ? i : 0);
                pages.kernel_block_size = info.kernel_block_size;
            }
        }
    }
    bool in_tensor = false;
    for (std::size_t tensor = 0; tensor < worker.num_tensors; ++tensor) {
        const std::vector<std::string> layers = tensor_layers(plan, tensor);
        for (const std::string& layer : layers) {
            if (layer == name) {
                const kvpages_tensor_info info = tensor_info(plan, tensor);
                in_tensor = true;
                pages.tensor = tensor;
                pages.page = page_bytes(pages.spec);
                pages.offset = info.offset_bytes;
                pages.step =
                    info.block_stride_bytes != 0 ? info.block_stride_bytes : pages.page;
                pages.alone = info.block_stride_bytes == 0 && layers.size() == 1;
            }
        }
    }
    if (!in_group || !in_tensor) {
        throw std::runtime_error("layer " + name + " is in no group or in no tensor");
    }
    return pages;
}

// An attention layer: the sizes of its axes, and elements from one index of an axis to the next.
struct ExpectedLayer {
    AxisLayout layout;
    AxisValues sizes{};
    AxisValues strides{};
    std::int64_t ratio = 1;  // kernel blocks of a block
    std::uint64_t element_bytes = 1;
    std::uint64_t content_bytes = 0;  // of one block
    bool spread = false;              // a block may be in several pieces
    Pages pages;

    ExpectedLayer(const Pages& of_layer, const AxisLayout& of_backend, bool model_has_state,
                  bool scales_at_end = false)
        : layout(of_backend), pages(of_layer) {
        const kvpages_spec_info info = describe(pages.spec);
        element_bytes = kvpages_dtype_bytes(pages.spec.dtype);
        const std::uint64_t scales = scales_at_end ? 0 : info.scale_bytes / element_bytes;
        const bool pair = info.value_elements != 0;
        const bool fused = layout.kv_beside_content();
        const std::uint64_t slots = info.storage_block_size;
        const bool compressed = slots != pages.spec.block_size;
        const std::uint64_t kernel_slots = compressed ? slots : pages.kernel_block_size;
        ratio = static_cast<std::int64_t>(slots / kernel_slots);
        sizes[block_axis] = static_cast<std::int64_t>(pages.num_blocks) * ratio;
        sizes[kv_axis] = pair && !fused ? 2 : 1;
        sizes[token_axis] = static_cast<std::int64_t>(kernel_slots);
        sizes[content_axis] = static_cast<std::int64_t>(
            pair && fused ? info.key_elements + info.value_elements + 2 * scales
                          : info.key_elements + scales);
        // The packed latents hold one head whatever the spec says.
        sizes[head_axis] =
            static_cast<std::int64_t>(info.real_page_size_bytes / element_bytes / slots /
                                      (info.key_elements + info.value_elements));
        content_bytes = element_bytes * static_cast<std::uint64_t>(ratio);
        for (const std::size_t axis : {kv_axis, head_axis, token_axis, content_axis}) {
            content_bytes *= static_cast<std::uint64_t>(sizes[axis]);
        }

        std::vector<std::size_t> inside = layout.axes_in_memory();
        spread = pages.alone && !model_has_state && content_bytes == pages.page;
        if (spread) {
            strides = contiguous(inside, sizes);
            return;
        }
        inside.erase(std::find(inside.begin(), inside.end(), std::size_t{block_axis}));
        strides = contiguous(inside, sizes);
        strides[block_axis] = static_cast<std::int64_t>(pages.step / element_bytes) / ratio;
    }

    // Whether each dimension has one stride.
    bool has_strides() const {
        for (const AxisLayout::Dim& dim : layout.dims) {
            std::int64_t inner = -1;
            for (auto axis = dim.rbegin(); axis != dim.rend(); ++axis) {
                if (sizes[*axis] == 1) {
                    continue;
                }
                if (inner >= 0 && strides[*axis] != inner) {
                    return false;
                }
                inner = strides[*axis] * sizes[*axis];
            }
        }
        return true;
    }

    std::size_t byte(const AxisValues& at) const {
        std::int64_t offset = 0;
        for (std::size_t axis = 0; axis < num_axes; ++axis) {
            offset += at[axis] * strides[axis];
        }
        return static_cast<std::size_t>(pages.offset) +
               static_cast<std::size_t>(offset) * static_cast<std::size_t>(element_bytes);
    }

    std::int64_t block(const AxisValues& at) const { return at[block_axis] / ratio; }
};

// What a layer writes to an element: no other layer and element has the same bytes by rule.
inline void value_of(std::uint64_t layer, const AxisValues& at, std::uint64_t bytes,
                     unsigned char* out) {
    std::uint64_t hash = layer + 0x9e3779b97f4a7c15u;
    for (const std::int64_t value : at) {
        hash = (hash ^ static_cast<std::uint64_t>(value)) * 0xbf58476d1ce4e5b9u;
        hash ^= hash >> 29;
    }
    std::memcpy(out, &hash, static_cast<std::size_t>(bytes));
}

// The memory of a cache as it should be after layers wrote to it.
class Image {
public:
    static constexpr unsigned char untouched = 0xCD;

    explicit Image(const Cache& cache) : allocations_(cache) {
        allocations_.fill(untouched);
        for (std::size_t i = 0; i < allocations_.size(); ++i) {
            bytes_.emplace_back(allocations_.bytes(i), untouched);
        }
    }

    std::vector<unsigned char>& operator[](std::size_t allocation) { return bytes_[allocation]; }
    const Allocations& allocations() const { return allocations_; }

    // The first byte that differs, as text; empty when none does.
    std::string difference() const {
        for (std::size_t i = 0; i < bytes_.size(); ++i) {
            const unsigned char* data = allocations_.data(i);
            for (std::size_t byte = 0; byte < bytes_[i].size(); ++byte) {
                if (data[byte] != bytes_[i][byte]) {
                    return "byte " + std::to_string(byte) + " of allocation " +
                           std::to_string(i) + " is " + std::to_string(data[byte]) + ", not " +
                           std::to_string(bytes_[i][byte]);
                }
            }
        }
        return "";
    }

private:
    Allocations allocations_;
    std::vector<std::vector<unsigned char>> bytes_;
};

}  // namespace support

#endif
