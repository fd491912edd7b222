// Block tables of 256 requests in three groups, and what a step does to them.

#pragma once

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

constexpr std::size_t kRequests = 256;
constexpr std::size_t kGroups = 3;
constexpr std::size_t kTokens = 8192;
constexpr std::size_t kRowBlocks = 8192;

/// Three groups, blocks of which are kernel blocks, in memory of the host or of a device.
inline kvpages::Tables tables(std::uint64_t block_size = 16, std::uint64_t kernel_block_size = 16,
                              const kvpages_device& device = {}) {
    kvpages::TablesConfig config;
    config.device = device;
    config.max_requests = kRequests;
    config.max_tokens = kTokens;
    config.num_blocks = 1u << 20;
    return kvpages::Tables::make(
        std::vector<kvpages_table_group>(kGroups,
                                         {block_size, kernel_block_size, kRowBlocks, 0, 0}),
        config);
}

/// Writes of the same number of blocks to every group of all requests, or of the first ones.
struct Writes {
    explicit Writes(std::size_t blocks_each, std::size_t num_requests = kRequests)
        : requests(num_requests), overwrite(num_requests, 0) {
        const std::size_t num_rows = num_requests * kGroups;
        std::iota(requests.begin(), requests.end(), 0);
        for (std::size_t i = 0; i <= num_rows; ++i) starts.push_back(i * blocks_each);
        for (std::size_t i = 0; i < num_rows * blocks_each; ++i) {
            blocks.push_back(static_cast<std::int32_t>((i * 7919) % (1u << 20)));
        }
    }

    kvpages_row_writes get() const {
        kvpages_row_writes writes = KVPAGES_ROW_WRITES_INIT;
        writes.requests = requests.data();
        writes.num_writes = requests.size();
        writes.overwrite = overwrite.data();
        writes.starts = starts.data();
        writes.block_ids = blocks.data();
        writes.num_block_ids = blocks.size();
        return writes;
    }

    std::vector<std::int32_t> requests;
    std::vector<std::uint8_t> overwrite;
    std::vector<std::size_t> starts;
    std::vector<std::int32_t> blocks;
};

/// A batch of requests that share 8,192 tokens; each starts at some place of a block.
struct Batch {
    explicit Batch(std::size_t num_requests) {
        const std::size_t each = kTokens / num_requests;
        for (std::size_t i = 0; i < num_requests; ++i) {
            for (std::size_t t = 0; t < each; ++t) {
                positions.push_back(static_cast<std::int64_t>(i * 13 + t));
            }
            query_start.push_back(static_cast<std::int32_t>(positions.size()));
        }
    }

    std::vector<std::int32_t> query_start{0};
    std::vector<std::int64_t> positions;
};

/// A step in which each of 256 requests of 1,024 tokens gets one more.
struct Decode {
    Decode() : requests(kRequests), query_start(kRequests + 1), seq_lens(kRequests, 1024) {
        std::iota(requests.begin(), requests.end(), 0);
        std::iota(query_start.begin(), query_start.end(), 0);
        positions.assign(kRequests, 1023);
    }

    kvpages::Batch batch() const { return {requests, query_start, seq_lens, positions}; }

    std::vector<std::int32_t> requests, query_start, seq_lens;
    std::vector<std::int64_t> positions;
};
