// Who owns which block: the engine's side of paging.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace engine {

/// Stands for no block: it is never handed out, and nothing is ever written to it.
constexpr std::uint64_t kNullBlock = 0;

/// Hands out block ids. All groups draw from one pool.
class BlockPool {
public:
    explicit BlockPool(std::uint64_t num_blocks) : num_blocks_(num_blocks) {}

    struct Block {
        std::uint64_t id;
        bool had_an_owner;  ///< then it holds what its last owner left there
    };

    Block take() {
        if (!returned_.empty()) {
            const std::uint64_t id = returned_.back();
            returned_.pop_back();
            return {id, true};
        }
        if (next_fresh_ == num_blocks_) throw std::runtime_error("the pool has no free block");
        return {next_fresh_++, false};
    }

    void give_back(std::uint64_t id) {
        if (id != kNullBlock) returned_.push_back(id);
    }

private:
    std::uint64_t num_blocks_;
    std::uint64_t next_fresh_ = kNullBlock + 1;
    std::vector<std::uint64_t> returned_;
};

/// Where a token lies in a view: the kernel block and the place in it.
struct Slot {
    std::uint64_t kernel_block;
    std::uint64_t offset;
};

/// The blocks that a request holds in one group.
class BlockTable {
public:
    BlockTable(std::uint64_t block_size, std::uint64_t kernel_block_size)
        : block_size_(block_size), kernel_block_size_(kernel_block_size) {}

    std::uint64_t block(std::uint64_t index) const { return blocks_[index]; }
    void add(std::uint64_t block) { blocks_.push_back(block); }

    bool holds(std::uint64_t token) const { return token / block_size_ < blocks_.size(); }

    /// A block is block_size / kernel_block_size kernel blocks long, and views count those.
    Slot slot(std::uint64_t token) const {
        const std::uint64_t block = blocks_[token / block_size_];
        const std::uint64_t in_block = token % block_size_;
        return {block * (block_size_ / kernel_block_size_) + in_block / kernel_block_size_,
                in_block % kernel_block_size_};
    }

    /// Gives back all blocks whose tokens are all earlier than `first_needed`. Their places in the
    /// table stay, as null blocks.
    void release_before(std::uint64_t first_needed, BlockPool& pool) {
        const std::uint64_t end =
            std::min<std::uint64_t>(first_needed / block_size_, blocks_.size());
        for (; num_released_ < end; ++num_released_) {
            pool.give_back(blocks_[num_released_]);
            blocks_[num_released_] = kNullBlock;
        }
    }

    void release_all(BlockPool& pool) {
        for (const std::uint64_t block : blocks_) pool.give_back(block);
        blocks_.clear();
    }

private:
    std::uint64_t block_size_;
    std::uint64_t kernel_block_size_;
    std::uint64_t num_released_ = 0;
    std::vector<std::uint64_t> blocks_;
};

}  // namespace engine
