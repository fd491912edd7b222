// An allocator of a test's own: it counts, it can refuse, and it can return nonsense.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_ARENA_H
#define KVPAGES_CPP_TESTS_SUPPORT_ARENA_H

#include "api.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

namespace support {

class Arena {
public:
    int calls = 0;
    int fail_at = -1;          // refuse that call
    int misalign_at = -1;      // return an address that is off by 64
    int null_at = -1;          // say yes and return NULL
    bool zeroes = false;       // hand out memory that is zero, and say so
    std::size_t released = 0;  // calls
    std::size_t wrong = 0;     // releases of what was not handed out, or of another size
    std::size_t smallest_alignment = SIZE_MAX;

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        for (const auto& [data, piece] : pieces_) {
            std::free(piece.block);
        }
    }

    std::size_t live() const { return pieces_.size(); }

    Memory memory() {
        kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
        callbacks.user = this;
        callbacks.allocate = allocate;
        callbacks.release = release;
        callbacks.is_zeroed = zeroes ? 1 : 0;
        kvpages_memory* raw = nullptr;
        must(kvpages_memory_create_external(&callbacks, &raw));
        return Memory(raw);
    }

private:
    struct Piece {
        void* block;
        std::size_t bytes;
    };

    static std::int32_t allocate(void* user, std::size_t bytes, std::size_t alignment,
                                 void** out_data) {
        auto& arena = *static_cast<Arena*>(user);
        const int call = arena.calls++;
        arena.smallest_alignment = std::min(arena.smallest_alignment, alignment);
        if (call == arena.fail_at) {
            return 42;
        }
        if (call == arena.null_at) {
            *out_data = nullptr;
            return 0;
        }
        const std::size_t rounded = (bytes + 2 * alignment - 1) / alignment * alignment;
        void* block = std::aligned_alloc(alignment, rounded + alignment);
        std::memset(block, arena.zeroes ? 0 : 0xEE, rounded + alignment);
        auto* data = static_cast<unsigned char*>(block) + (call == arena.misalign_at ? 64 : 0);
        arena.pieces_[data] = {block, bytes};
        *out_data = data;
        return 0;
    }

    static void release(void* user, void* data, std::size_t bytes) {
        auto& arena = *static_cast<Arena*>(user);
        ++arena.released;
        const auto piece = arena.pieces_.find(data);
        if (piece == arena.pieces_.end() || piece->second.bytes != bytes) {
            ++arena.wrong;
            return;
        }
        std::free(piece->second.block);
        arena.pieces_.erase(piece);
    }

    std::map<void*, Piece> pieces_;
};

}  // namespace support

#endif
