// Who owns which block: the engine's side of paging.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace engine {

/// Stands for no block: it is never handed out, and nothing is ever written to it.
constexpr std::int32_t kNullBlock = 0;

/// Hands out block ids and counts who holds them. All groups draw from one pool.
class BlockPool {
public:
    explicit BlockPool(std::uint64_t num_blocks) : num_holders_(num_blocks, 0) {}

    /// A block that nobody holds. What its last owner left in it is still there.
    std::int32_t take() {
        std::int32_t id = next_unused_;
        if (!returned_.empty()) {
            id = returned_.back();
            returned_.pop_back();
            ++num_reused_;
        } else if (static_cast<std::size_t>(next_unused_) < num_holders_.size()) {
            ++next_unused_;
        } else {
            // A larger engine would take blocks from a request that can run again later.
            throw std::runtime_error("the pool has no free block");
        }
        holders(id) = 1;
        largest_num_held_ = std::max(largest_num_held_, ++num_held_);
        return id;
    }

    /// One more request holds the block, and nobody may write to it from now on.
    void share(std::int32_t id) {
        if (id != kNullBlock) ++holders(id);
    }

    void give_back(std::int32_t id) {
        if (id == kNullBlock || --holders(id) > 0) return;
        returned_.push_back(id);
        --num_held_;
    }

    std::uint64_t num_held() const { return num_held_; }
    std::uint64_t largest_num_held() const { return largest_num_held_; }
    /// How often a block was handed out that had an owner before.
    std::uint64_t num_reused() const { return num_reused_; }

private:
    std::uint32_t& holders(std::int32_t id) { return num_holders_[static_cast<std::size_t>(id)]; }

    std::vector<std::uint32_t> num_holders_;
    std::vector<std::int32_t> returned_;
    std::int32_t next_unused_ = kNullBlock + 1;
    std::uint64_t num_held_ = 0;
    std::uint64_t largest_num_held_ = 0;
    std::uint64_t num_reused_ = 0;
};

/// The blocks that a request holds in one group, in the order of its tokens.
class HeldBlocks {
public:
    explicit HeldBlocks(std::uint64_t block_size) : block_size_(block_size) {}

    const std::vector<std::int32_t>& ids() const { return ids_; }

    /// Takes blocks until there is room for `num_tokens`; returns those that are new.
    std::vector<std::int32_t> grow(std::uint64_t num_tokens, BlockPool& pool) {
        const std::size_t num_before = ids_.size();
        while (ids_.size() * block_size_ < num_tokens) ids_.push_back(pool.take());
        return {ids_.begin() + static_cast<std::ptrdiff_t>(num_before), ids_.end()};
    }

    /// The same tokens for another request: full blocks are shared, the last one is replaced if
    /// it has room left, because both will write to it. Then it has to be copied.
    HeldBlocks fork(std::uint64_t num_tokens, BlockPool& pool) const {
        HeldBlocks copy = *this;
        const std::size_t num_full = num_tokens / block_size_;
        for (std::size_t i = 0; i < ids_.size(); ++i) {
            if (i < num_full) pool.share(ids_[i]);
            else copy.ids_[i] = pool.take();
        }
        return copy;
    }

    /// Gives back all blocks whose tokens are all earlier than `first_needed`.
    void release_before(std::uint64_t first_needed, BlockPool& pool) {
        const std::size_t end = std::min<std::size_t>(first_needed / block_size_, ids_.size());
        for (; num_released_ < end; ++num_released_) {
            pool.give_back(ids_[num_released_]);
            ids_[num_released_] = kNullBlock;
        }
    }

    void release_all(BlockPool& pool) {
        for (const std::int32_t id : ids_) pool.give_back(id);
        ids_.clear();
    }

private:
    std::uint64_t block_size_;
    std::size_t num_released_ = 0;
    std::vector<std::int32_t> ids_;
};

}  // namespace engine
