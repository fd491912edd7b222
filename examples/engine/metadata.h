// What this engine's kernels are told of a step, and the builders that make it.
#pragma once

#include "../device/device.h"

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace engine {

/// A step as the layers of one attention group see it.
struct Metadata {
    kvpages_common_metadata common = KVPAGES_COMMON_METADATA_INIT;
    kvpages::Tensor block_table;  ///< as the host can read it, where this example's kernels are
    std::uint64_t kernel_block_size = 0;

    /// Entry `index` of a request's row of the block table.
    std::uint64_t kernel_block(std::size_t request, std::uint64_t index) const {
        return static_cast<std::uint64_t>(block_table.at<std::int32_t>(request, index));
    }

    /// Where a request's token is stored. Slots count the tokens of all kernel blocks.
    std::uint64_t slot(std::size_t request, std::uint64_t token) const {
        return kernel_block(request, token / kernel_block_size) * kernel_block_size +
               token % kernel_block_size;
    }

    /// Where the tokens of this step go.
    kvpages::Span<const std::int64_t> new_slots() const {
        return {static_cast<const std::int64_t*>(common.slot_mapping.data), common.num_tokens};
    }

    /// Tokens of each request. The bounds are the batch's own numbers, so they are exact.
    kvpages::Span<const std::int32_t> seq_lens() const {
        return {common.seq_lens_host_bound, common.num_requests};
    }

    std::uint64_t seq_len(std::size_t request) const {
        return static_cast<std::uint64_t>(seq_lens()[request]);
    }
};

/// Keeps the metadata of one attention group. Kernels on a device would have theirs made here, such
/// as how work is split. They would read the block table where it is; ours are the host's.
class MetadataBuilder : public kvpages::Builder {
public:
    MetadataBuilder(const device::Device& device, std::uint64_t kernel_block_size)
        : read_table_(device) {
        metadata_.kernel_block_size = kernel_block_size;
    }

    void* build(const kvpages_common_metadata& common, void*) override {
        metadata_.common = common;
        metadata_.block_table = device::download_table(read_table_, common.block_table);
        return &metadata_;
    }

private:
    device::Download<std::int32_t> read_table_;
    Metadata metadata_;
};

class MetadataBuilders : public kvpages::BuilderFactory {
public:
    explicit MetadataBuilders(const device::Device& device) : device_(device) {}

    std::unique_ptr<kvpages::Builder> create(const kvpages_builder_info& info) override {
        return std::make_unique<MetadataBuilder>(device_, info.kernel_block_size);
    }

private:
    const device::Device& device_;
};

}  // namespace engine
