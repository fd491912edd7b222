// Descriptors of caches, for tests of them and of resharding.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_DESCRIPTORS_H
#define KVPAGES_CPP_TESTS_SUPPORT_DESCRIPTORS_H

#include "api.h"
#include "bytes.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace support {

using Descriptor =
    std::unique_ptr<kvpages_descriptor, Destroy<kvpages_descriptor, kvpages_descriptor_destroy>>;
using Reshard = std::unique_ptr<kvpages_reshard, Destroy<kvpages_reshard, kvpages_reshard_destroy>>;

inline std::string descriptor_json(const Cache& cache,
                                   const kvpages_descriptor_config* config = nullptr) {
    std::size_t length = 0;
    const std::int32_t asked =
        kvpages_cache_copy_descriptor(cache.get(), config, nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        must(asked);
    }
    std::string text(length + 1, '\0');
    must(kvpages_cache_copy_descriptor(cache.get(), config, &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

inline std::string json_of(const Descriptor& descriptor) {
    std::size_t length = 0;
    const std::int32_t asked = kvpages_descriptor_copy_json(descriptor.get(), nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        must(asked);
    }
    std::string text(length + 1, '\0');
    must(kvpages_descriptor_copy_json(descriptor.get(), &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

inline Descriptor descriptor_of(const std::string& json) {
    kvpages_descriptor* raw = nullptr;
    must(kvpages_descriptor_create(json.data(), json.size(), &raw));
    return Descriptor(raw);
}

inline kvpages_described_layer described(const Descriptor& descriptor, std::size_t layer) {
    kvpages_described_layer out = KVPAGES_DESCRIBED_LAYER_INIT;
    must(kvpages_descriptor_get_layer(descriptor.get(), layer, &out));
    return out;
}

inline std::vector<kvpages_run> runs_of(const Descriptor& descriptor, std::size_t layer,
                                        std::uint64_t block) {
    std::size_t count = 0;
    std::vector<kvpages_run> runs(static_cast<std::size_t>(described(descriptor, layer).num_runs));
    must(kvpages_descriptor_copy_block_runs(descriptor.get(), layer, block, runs.data(),
                                            runs.size(), &count));
    return runs;
}

inline kvpages_row row_of(const Descriptor& descriptor, std::size_t layer, std::uint64_t block,
                          std::uint64_t slot, std::uint64_t head, std::uint32_t part) {
    kvpages_row row{};
    must(kvpages_descriptor_get_row(descriptor.get(), layer, block, slot, head, part, &row));
    return row;
}

// A cache's descriptor went through text and back and has every layer where its views are: the runs
// of the first and the last block, the keys and values at the corners of both, the states.
inline void expect_descriptor_of_views(const Cache& cache) {
    const std::string json = descriptor_json(cache);
    const Descriptor d = descriptor_of(json);
    ASSERT_EQ(json_of(d), json);
    const Allocations memory(cache);
    const std::uint64_t num_blocks = kvpages_cache_num_blocks(cache.get());
    ASSERT_GE(kvpages_descriptor_num_layers(d.get()), kvpages_cache_num_layers(cache.get()));
    for (std::size_t layer = 0; layer < kvpages_cache_num_layers(cache.get()); ++layer) {
        SCOPED_TRACE(kvpages_cache_layer_name(cache.get(), layer));
        const kvpages_described_layer said = described(d, layer);
        const kvpages_view_report proven = report(cache, layer);
        const kvpages_tensor tensor = view(cache, layer);
        ASSERT_EQ(said.allocation, proven.allocation);
        ASSERT_EQ(said.owner_layer, proven.owner_layer);
        ASSERT_EQ(said.num_runs, proven.num_runs);
        const std::uint64_t start = proven.offset_bytes;
        for (const std::uint64_t block : {std::uint64_t{0}, num_blocks - 1}) {
            const std::vector<kvpages_run> runs = runs_of(d, layer, block);
            for (std::size_t run = 0; run < runs.size(); ++run) {
                ASSERT_EQ(runs[run].offset_bytes,
                          start + run * proven.run_step_bytes + block * proven.block_step_bytes);
            }
            for (std::size_t state = 0; state < said.num_states; ++state) {
                kvpages_described_state of_state = KVPAGES_DESCRIBED_STATE_INIT;
                must(kvpages_descriptor_get_state(d.get(), layer, state, &of_state));
                const kvpages_view_report of_view = report(cache, layer, state);
                ASSERT_EQ(runs[0].offset_bytes + of_state.offset_bytes,
                          of_view.offset_bytes + block * of_view.block_step_bytes);
                ASSERT_EQ(of_state.size_bytes, of_view.block_span_bytes);
            }
        }
        kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
        if (said.row_format == KVPAGES_ROW_FORMAT_NONE) {
            continue;
        }
        must(kvpages_cache_get_axes(cache.get(), layer, &axes));
        const std::uint64_t ratio = said.block_slots / said.kernel_block_slots;
        const std::uint64_t last_slot = said.block_slots - 1;
        const std::uint64_t last_head = said.num_kv_heads - 1;
        for (const std::uint64_t block : {std::uint64_t{0}, num_blocks - 1}) {
            for (const std::uint64_t slot : {std::uint64_t{0}, last_slot}) {
                for (const std::uint64_t head : {std::uint64_t{0}, last_head}) {
                    for (const std::uint32_t part : {0u, 1u}) {
                        kvpages_row row{};
                        const std::int32_t status = kvpages_descriptor_get_row(
                            d.get(), layer, block, slot, head, part, &row);
                        if (status == KVPAGES_STATUS_UNSUPPORTED) {
                            continue;  // a kernel's own order, or no value
                        }
                        must(status);
                        const std::uint64_t at =
                            (block * ratio + slot / axes.kernel_block_slots) *
                                axes.kernel_block_stride +
                            slot % axes.kernel_block_slots * axes.token_stride +
                            head * axes.head_stride + (part == 0 ? 0 : axes.value_offset);
                        const std::uint64_t bytes = kvpages_dtype_bytes(tensor.dtype);
                        const unsigned char* there =
                            memory.data(static_cast<std::size_t>(row.allocation)) +
                            row.offset_bytes;
                        ASSERT_EQ(there, static_cast<unsigned char*>(tensor.data) + at * bytes);
                        ASSERT_EQ(row.stride_elements, axes.content_stride);
                        ASSERT_EQ(row.scale_elements, axes.scale_elements);
                        ASSERT_EQ(row.num_elements,
                                  part == 0 ? axes.key_elements : axes.value_elements);
                    }
                }
            }
        }
    }
}

// A cache is its own target: the copies of every group stay inside its allocations.
inline void expect_reshards_to_itself(const Cache& cache) {
    kvpages_descriptor_config of_rank = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    of_rank.tensor_parallel_size = 1;
    const Descriptor d = descriptor_of(descriptor_json(cache, &of_rank));
    kvpages_descriptor_info info = KVPAGES_DESCRIPTOR_INFO_INIT;
    must(kvpages_descriptor_get_info(d.get(), &info));
    const kvpages_descriptor* const itself[] = {d.get()};
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    config.sources = itself;
    config.targets = itself;
    config.num_sources = 1;
    config.num_targets = 1;
    kvpages_reshard* raw = nullptr;
    must(kvpages_reshard_create(&config, &raw));
    const Reshard reshard(raw);
    std::vector<kvpages_allocation> allocations;
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(cache.get()); ++i) {
        allocations.push_back(allocation(cache, i));
    }
    const kvpages_rank_memory memory{allocations.data(), allocations.size()};
    for (std::uint64_t group = 0; group < info.num_groups; ++group) {
        const auto last = static_cast<std::int32_t>(info.num_blocks) - 1;
        const kvpages_block_move moved{group, last, 0};
        std::size_t count = 0;
        std::vector<kvpages_strided_copy> copies(1000);
        must(kvpages_reshard_copy_copies(raw, &moved, 1, copies.data(), copies.size(), &count));
        must(kvpages_copy_strided(copies.data(), count, &memory, 1, &memory, 1));
    }
}

}  // namespace support

#endif
