// Rows of block tables, and the slots of tokens.
#ifndef KVPAGES_KERNELS_TABLES_H
#define KVPAGES_KERNELS_TABLES_H

#include "port.h"

namespace kvp {

constexpr int32_t kNullBlock = 0;
constexpr int64_t kPadSlot = -1;

// A row of a block table: the ids of its blocks, of which there are `length`.
struct Row {
    const int32_t* ids;
    uint64_t length;
};

// Divides numbers below 2^32 by a constant: a multiplication instead of a division.
// `factor` is (2^64 - 1) / divisor, and `divisor` is 1 to 2^32 - 1.
struct Divider {
    uint64_t factor;
    uint64_t divisor;
};

struct Split {
    uint64_t quotient;
    uint64_t rest;
};

// How the positions of a group become slots. Tokens are dealt to the ranks in runs of `interleave`.
// The interleave divides the block size, so a block holds whole runs, and the tokens of a rank fill
// its blocks one after another.
struct SlotRule {
    Divider block;
    Divider interleave;
    Divider ranks;
    uint64_t rank;
    uint64_t ratio;  // entries of a block
    int64_t kernel_block_size;
};

// Quotient and rest of `value`, which is below 2^32.
//
// With 2^64 - 1 = factor * divisor + r, the product is (value + 1) / divisor less
// (value + 1) * (r + 1) / (divisor * 2^64). The second part is more than 0 and at most 1 / divisor,
// so the whole part is that of value / divisor.
KVP_FN Split split(Divider by, uint64_t value) {
    const uint64_t quotient = multiply_high(value + 1, by.factor);
    return {quotient, value - quotient * by.divisor};
}

// Index space: rows of a gathered table x columns, in any order.
KVP_FN int32_t gathered_id(Row row, uint64_t column) {
    return column < row.length ? row.ids[column] : kNullBlock;
}

// Index space: tokens, in any order. The slot of a token of the request whose blocks `row` holds;
// none when it is another rank's, or past the row.
//
// The kernel blocks of a block are consecutive, so its tokens are too: the first kernel block says
// where they start.
KVP_FN int64_t slot_of(const SlotRule& rule, Row row, int64_t position) {
    if (position < 0 || position > INT64_C(0xffffffff)) return kPadSlot;
    const Split run = split(rule.interleave, static_cast<uint64_t>(position));
    const Split turn = split(rule.ranks, run.quotient);
    if (turn.rest != rule.rank) return kPadSlot;
    const Split block = split(rule.block, turn.quotient * rule.interleave.divisor + run.rest);
    const uint64_t column = block.quotient * rule.ratio;
    if (column >= row.length) return kPadSlot;
    return row.ids[column] * rule.kernel_block_size + static_cast<int64_t>(block.rest);
}

// Index space: tokens, in any order. Which request has the token: the last one that starts at or
// before it, of `count` that start at `starts`, the first at 0.
KVP_FN uint64_t request_of(const int32_t* starts, uint64_t count, uint64_t token) {
    uint64_t first = 0;
    while (count > 1) {
        const uint64_t half = count / 2;
        if (static_cast<uint64_t>(starts[first + half]) <= token) first += half;
        count -= half;
    }
    return first;
}

}  // namespace kvp

#endif
