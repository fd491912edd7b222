// What this engine's kernels are told of a step, and the builders that make it.
#pragma once

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace engine {

/// A step as the layers of one attention group see it.
struct Metadata {
    kvpages_common_metadata common = KVPAGES_COMMON_METADATA_INIT;
    std::uint64_t kernel_block_size = 0;

    /// Entry `index` of a request's row of the block table.
    std::uint64_t kernel_block(std::size_t request, std::uint64_t index) const {
        const kvpages::Tensor block_table = common.block_table;
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

    std::uint64_t seq_len(std::size_t request) const {
        return static_cast<std::uint64_t>(common.seq_lens[request]);
    }
};

/// Keeps the metadata of one attention group. Kernels on a device would have theirs made here:
/// how work is split, what is copied to the device.
class MetadataBuilder : public kvpages::Builder {
public:
    explicit MetadataBuilder(std::uint64_t kernel_block_size) {
        metadata_.kernel_block_size = kernel_block_size;
    }

    void* build(const kvpages_common_metadata& common, void*) override {
        metadata_.common = common;
        return &metadata_;
    }

private:
    Metadata metadata_;
};

class MetadataBuilders : public kvpages::BuilderFactory {
public:
    std::unique_ptr<kvpages::Builder> create(const kvpages_builder_info& info) override {
        return std::make_unique<MetadataBuilder>(info.kernel_block_size);
    }
};

}  // namespace engine
