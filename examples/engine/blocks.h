// Who owns which block: the engine's side of paging.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace engine {

/// Stands for no block: it is never handed out, and nothing is ever written to it.
constexpr std::int32_t kNullBlock = 0;

/// Not std::shuffle, whose order is each library's own.
template <typename T>
void shuffle(std::vector<T>& values, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random() % i]);
}

/// Hands out block ids and counts who holds them. All groups draw from one pool.
class BlockPool {
public:
    explicit BlockPool(std::uint64_t num_blocks) : blocks_(num_blocks) {
        for (auto id = static_cast<std::int32_t>(num_blocks); --id > kNullBlock;) {
            free_.push_back(id);
        }
    }

    /// Blocks that nobody holds come in another order from now on.
    void shuffle(std::uint64_t seed) { engine::shuffle(free_, seed); }

    std::uint64_t num_free() const { return free_.size(); }

    /// A block that nobody holds. What its last owner left in it is still there.
    std::int32_t take() {
        if (free_.empty()) throw std::runtime_error("the pool has no free block");
        const std::int32_t id = free_.back();
        free_.pop_back();
        num_reused_ += block(id).had_owner;
        block(id) = {1, true};
        largest_num_held_ = std::max(largest_num_held_, ++num_held_);
        return id;
    }

    /// One more request holds the block, and nobody may write to it from now on.
    void share(std::int32_t id) {
        if (id != kNullBlock) ++block(id).num_holders;
    }

    void give_back(std::int32_t id) {
        if (id == kNullBlock || --block(id).num_holders > 0) return;
        free_.push_back(id);
        --num_held_;
    }

    std::uint64_t num_held() const { return num_held_; }
    std::uint64_t largest_num_held() const { return largest_num_held_; }
    /// How often a block was handed out that had an owner before.
    std::uint64_t num_reused() const { return num_reused_; }

private:
    struct Block {
        std::uint32_t num_holders = 0;
        bool had_owner = false;
    };

    Block& block(std::int32_t id) { return blocks_[static_cast<std::size_t>(id)]; }

    std::vector<Block> blocks_;
    std::vector<std::int32_t> free_;  ///< the last is taken first
    std::uint64_t num_held_ = 0;
    std::uint64_t largest_num_held_ = 0;
    std::uint64_t num_reused_ = 0;
};

/// The blocks that a request holds in one group, in the order of its tokens. Who copied it would
/// hold them uncounted, so only fork() does.
class HeldBlocks {
public:
    explicit HeldBlocks(std::uint64_t block_size) : block_size_(block_size) {}
    HeldBlocks(HeldBlocks&&) = default;
    HeldBlocks& operator=(HeldBlocks&&) = default;

    const std::vector<std::int32_t>& ids() const { return ids_; }

    /// Blocks that grow() would take.
    std::uint64_t num_missing(std::uint64_t num_tokens) const {
        const std::uint64_t needed = (num_tokens + block_size_ - 1) / block_size_;
        return needed - std::min<std::uint64_t>(needed, ids_.size());
    }

    /// Takes blocks until there is room for `num_tokens`; returns those that are new.
    std::vector<std::int32_t> grow(std::uint64_t num_tokens, BlockPool& pool) {
        const std::size_t num_before = ids_.size();
        for (std::uint64_t i = num_missing(num_tokens); i > 0; --i) ids_.push_back(pool.take());
        return {ids_.begin() + static_cast<std::ptrdiff_t>(num_before), ids_.end()};
    }

    /// Blocks that fork() would take.
    std::uint64_t num_missing_to_fork(std::uint64_t num_tokens) const {
        return ids_.size() - std::min<std::uint64_t>(num_tokens / block_size_, ids_.size());
    }

    /// The same tokens for another request: full blocks are shared, the last one is replaced if
    /// it has room left, because both will write to it. Then it has to be copied.
    HeldBlocks fork(std::uint64_t num_tokens, BlockPool& pool) const {
        HeldBlocks copy(block_size_);
        copy.num_released_ = num_released_;
        const std::size_t num_shared = ids_.size() - num_missing_to_fork(num_tokens);
        for (std::size_t i = 0; i < ids_.size(); ++i) {
            if (i < num_shared) pool.share(ids_[i]);
            copy.ids_.push_back(i < num_shared ? ids_[i] : pool.take());
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
        num_released_ = 0;
    }

private:
    std::uint64_t block_size_;
    std::size_t num_released_ = 0;
    std::vector<std::int32_t> ids_;
};

}  // namespace engine
