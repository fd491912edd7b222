// An engine's own allocator: one piece of memory, taken when the engine starts, for everything.
#pragma once

#include <kvpages/kvpages.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace own_layout {

class Arena {
public:
    explicit Arena(std::size_t bytes)
        : memory_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes))), bytes_(bytes) {
        if (memory_ == nullptr) throw std::bad_alloc();
    }

    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::byte* data() const { return memory_.get(); }
    std::size_t size_bytes() const { return bytes_; }
    std::size_t free_bytes() const { return bytes_ - used_; }
    std::size_t num_pieces() const { return num_pieces_; }

    /// What kvpages is given: functions of C, which do not throw, and the arena as `user`. The
    /// arena outlives the caches in it.
    kvpages_memory_callbacks callbacks() {
        kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
        callbacks.user = this;
        callbacks.allocate = allocate;
        callbacks.release = release;
        return callbacks;  // is_zeroed is 0: kvpages clears what it gets
    }

private:
    static constexpr std::size_t kAlignment = 4096;

    static std::int32_t allocate(void* user, std::size_t bytes, std::size_t alignment,
                                 void** out_data) noexcept {
        auto* arena = static_cast<Arena*>(user);
        const std::size_t begin = (arena->used_ + alignment - 1) / alignment * alignment;
        if (alignment > kAlignment || begin > arena->bytes_ || bytes > arena->bytes_ - begin)
            return 1;
        arena->used_ = begin + bytes;
        ++arena->num_pieces_;
        *out_data = arena->data() + begin;
        return 0;
    }

    /// The arena is empty again when the last piece comes back.
    static void release(void* user, void*, std::size_t) noexcept {
        auto* arena = static_cast<Arena*>(user);
        if (--arena->num_pieces_ == 0) arena->used_ = 0;
    }

    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };

    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_;
    std::size_t used_ = 0;
    std::size_t num_pieces_ = 0;
};

}  // namespace own_layout
