// Whole blocks: fill and copy.
#ifndef KVPAGES_KERNELS_BLOCKS_H
#define KVPAGES_KERNELS_BLOCKS_H

#include "port.h"

namespace kvp {

// Memory in which blocks lie at a constant distance; block b is the `span` bytes at
// data + b * step.
struct Piece {
    byte* data;
    uint64_t step;
    uint64_t span;
};

// Copies block `from` over block `to`. kSpare stands for the spare page.
struct Move {
    uint32_t from;
    uint32_t to;
};

constexpr uint32_t kSpare = 0xffffffffu;

// Index space: pieces x ids, in any order.
KVP_FN void fill_block(const Piece& piece, uint32_t id, byte value) {
    __builtin_memset(piece.data + id * piece.step, value, piece.span);
}

// Index space: pieces, in any order, x moves, in the order given: a block is read by a move before
// another one overwrites it. `spare` holds one span.
KVP_FN void copy_block(const Piece& piece, Move move, byte* spare) {
    const byte* from = move.from == kSpare ? spare : piece.data + move.from * piece.step;
    byte* to = move.to == kSpare ? spare : piece.data + move.to * piece.step;
    __builtin_memcpy(to, from, piece.span);
}

}  // namespace kvp

#endif
