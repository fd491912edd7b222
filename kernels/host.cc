// The bodies on the host: each index space as loops, and the types chosen once for a call.
#include "blocks.h"
#include "convert.h"
#include "forms.h"
#include "rows.h"
#include "tables.h"

#include <stddef.h>

#define KVP_HOST extern "C" __attribute__((visibility("hidden"))) void

namespace kvp {
namespace {

// Both sides say where each field is, and neither compiles when it is elsewhere.
static_assert(offsetof(Piece, data) == 0);
static_assert(offsetof(Piece, step) == 8);
static_assert(offsetof(Piece, span) == 16);
static_assert(sizeof(Piece) == 24);
static_assert(offsetof(Move, from) == 0);
static_assert(offsetof(Move, to) == 4);
static_assert(sizeof(Move) == 8);
static_assert(offsetof(Rows, cache) == 0);
static_assert(offsetof(Rows, keys) == 8);
static_assert(offsetof(Rows, values) == 16);
static_assert(offsetof(Rows, key_token) == 24);
static_assert(offsetof(Rows, key_head) == 32);
static_assert(offsetof(Rows, value_token) == 40);
static_assert(offsetof(Rows, value_head) == 48);
static_assert(offsetof(Rows, kernel_block) == 56);
static_assert(offsetof(Rows, token) == 64);
static_assert(offsetof(Rows, head) == 72);
static_assert(offsetof(Rows, content) == 80);
static_assert(offsetof(Rows, value) == 88);
static_assert(offsetof(Rows, kernel_block_slots) == 96);
static_assert(offsetof(Rows, heads) == 104);
static_assert(offsetof(Rows, key_elements) == 112);
static_assert(offsetof(Rows, value_elements) == 120);
static_assert(offsetof(Rows, element) == 128);
static_assert(offsetof(Rows, key_scale) == 136);
static_assert(offsetof(Rows, value_scale) == 140);
static_assert(sizeof(Rows) == 144);
static_assert(offsetof(Slots, slots) == 0);
static_assert(offsetof(Slots, blocks) == 8);
static_assert(offsetof(Slots, block_slots) == 16);
static_assert(offsetof(Slots, count) == 24);
static_assert(sizeof(Slots) == 32);
static_assert(offsetof(SlotRule, block) == 0);
static_assert(offsetof(SlotRule, interleave) == 16);
static_assert(offsetof(SlotRule, ranks) == 32);
static_assert(offsetof(SlotRule, rank) == 48);
static_assert(offsetof(SlotRule, ratio) == 56);
static_assert(offsetof(SlotRule, kernel_block_size) == 64);
static_assert(sizeof(SlotRule) == 72);
static_assert(offsetof(Divider, factor) == 0);
static_assert(offsetof(Divider, divisor) == 8);
static_assert(sizeof(Divider) == 16);

// Calls `body(cell, row, count)` for all rows that mean a slot, as many at a time as lie together.
template <typename Body>
void each_run(const Rows& rows, const Slots& slots, Body body) {
    const bool dense = tokens_are_dense(rows);
    for (uint64_t row = 0; row < slots.count;) {
        const int64_t slot = slot_of(slots, row);
        uint64_t count = 1;
        if (slot >= 0) {
            count = dense ? rows_together(rows, slots, row, slot) : 1;
            body(cell_of(rows, static_cast<uint64_t>(slot)), row, count);
        }
        row += count;
    }
}

// Calls `body(cell, row)` for every row that means a slot.
template <typename Body>
void each_row(const Rows& rows, const Slots& slots, Body body) {
    for (uint64_t row = 0; row < slots.count; ++row) {
        const int64_t slot = slot_of(slots, row);
        if (slot >= 0) {
            body(cell_of(rows, static_cast<uint64_t>(slot)), row);
        }
    }
}

struct Write {
    template <typename F>
    static void form(const Rows& rows, const Slots& slots) {
        each_row(rows, slots, [&rows](byte* cell, uint64_t row) {
            for (uint64_t head = 0; head < rows.heads; ++head) write_row<F>(rows, cell, row, head);
        });
    }
    static void same(const Rows& rows, const Slots& slots) {
        each_run(rows, slots, [&rows](byte* cell, uint64_t row, uint64_t count) {
            for (uint64_t head = 0; head < rows.heads; ++head) {
                write_same_rows(rows, cell, row, head, count);
            }
        });
    }
    template <typename Row>
    static void packed_latent(const Rows& rows, const Slots& slots) {
        each_row(rows, slots, [&rows](byte* cell, uint64_t row) {
            PackedLatent<Row>::write(rows, cell, row);
        });
    }
};

struct Read {
    template <typename F>
    static void form(const Rows& rows, const Slots& slots) {
        each_row(rows, slots, [&rows](const byte* cell, uint64_t row) {
            for (uint64_t head = 0; head < rows.heads; ++head) read_row<F>(rows, cell, row, head);
        });
    }
    static void same(const Rows& rows, const Slots& slots) {
        each_run(rows, slots, [&rows](const byte* cell, uint64_t row, uint64_t count) {
            for (uint64_t head = 0; head < rows.heads; ++head) {
                read_same_rows(rows, cell, row, head, count);
            }
        });
    }
    template <typename Row>
    static void packed_latent(const Rows& rows, const Slots& slots) {
        each_row(rows, slots, [&rows](const byte* cell, uint64_t row) {
            PackedLatent<Row>::read(rows, cell, row);
        });
    }
};

template <typename Way, typename Row>
void run_form(uint32_t form, const Rows& rows, const Slots& slots) {
    switch (form) {
        case kF32: Way::template form<Converted<Row, F32>>(rows, slots); break;
        case kF16: Way::template form<Converted<Row, F16>>(rows, slots); break;
        case kBf16: Way::template form<Converted<Row, Bf16>>(rows, slots); break;
        case kF8E4m3: Way::template form<Converted<Row, F8E4m3>>(rows, slots); break;
        case kF8E5m2: Way::template form<Converted<Row, F8E5m2>>(rows, slots); break;
        case kScaledE4m3: Way::template form<ScaledFloat<Row, F8E4m3>>(rows, slots); break;
        case kScaledE5m2: Way::template form<ScaledFloat<Row, F8E5m2>>(rows, slots); break;
        case kScaledInt8: Way::template form<ScaledInt8<Row>>(rows, slots); break;
        case kScaledInt4: Way::template form<ScaledInt4<Row>>(rows, slots); break;
        case kPackedLatent: Way::template packed_latent<Row>(rows, slots); break;
        default: break;
    }
}

template <typename Way>
void run(uint32_t form, uint32_t row_type, const Rows& rows, const Slots& slots) {
    if (form == kSame) {
        Way::same(rows, slots);
        return;
    }
    switch (row_type) {
        case kRowF32: run_form<Way, F32>(form, rows, slots); break;
        case kRowF16: run_form<Way, F16>(form, rows, slots); break;
        case kRowBf16: run_form<Way, Bf16>(form, rows, slots); break;
        default: break;
    }
}

// Adds `shift` to all positions, and says whether they are the `length` from `start` on. Sums wrap.
//
// Without a branch in the loop, so that it becomes vector instructions.
bool shift_within(const int64_t* positions, int64_t* slots, uint64_t count, uint64_t start,
                  uint64_t length, uint64_t shift) {
    uint64_t outside = 0;  // its sign is set once a position is before the start or past the end
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t position = static_cast<uint64_t>(positions[i]);
        const uint64_t offset = position - start;
        outside |= offset | (length - 1 - offset);
        slots[i] = static_cast<int64_t>(position + shift);
    }
    return static_cast<int64_t>(outside) >= 0;
}

void map_each(const SlotRule& rule, Row row, const int64_t* positions, int64_t* slots,
              uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) slots[i] = slot_of(rule, row, positions[i]);
}

// The same for one rank. Tokens mostly follow each other, so those that may fill the block of the
// first one are looked at together.
void map_runs(const SlotRule& rule, Row row, const int64_t* positions, int64_t* slots,
              uint64_t count) {
    while (count > 0) {
        const int64_t slot = slot_of(rule, row, *positions);
        const uint64_t first = static_cast<uint64_t>(*positions);
        // Past the row there is no block to fill.
        uint64_t offset = 0, length = 1;
        if (slot != kPadSlot) {
            offset = split(rule.block, first).rest;
            length = rule.block.divisor;
        }
        const uint64_t run = count < length - offset ? count : length - offset;
        if (!shift_within(positions, slots, run, first - offset, length,
                          static_cast<uint64_t>(slot) - first)) {
            map_each(rule, row, positions, slots, run);
        }
        positions += run;
        slots += run;
        count -= run;
    }
}

}  // namespace
}  // namespace kvp

KVP_HOST kvpages_host_fill(const kvp::Piece* pieces, size_t num_pieces, const uint32_t* ids,
                           size_t num_ids, kvp::byte value) {
    for (size_t piece = 0; piece < num_pieces; ++piece) {
        for (size_t i = 0; i < num_ids; ++i) kvp::fill_block(pieces[piece], ids[i], value);
    }
}

KVP_HOST kvpages_host_copy(const kvp::Piece* pieces, size_t num_pieces, const kvp::Move* moves,
                           size_t num_moves, kvp::byte* spare) {
    for (size_t piece = 0; piece < num_pieces; ++piece) {
        for (size_t i = 0; i < num_moves; ++i) kvp::copy_block(pieces[piece], moves[i], spare);
    }
}

KVP_HOST kvpages_host_write(uint32_t form, uint32_t row_type, const kvp::Rows* rows,
                            const kvp::Slots* slots) {
    kvp::run<kvp::Write>(form, row_type, *rows, *slots);
}

KVP_HOST kvpages_host_gather(uint32_t form, uint32_t row_type, const kvp::Rows* rows,
                             const kvp::Slots* slots) {
    kvp::run<kvp::Read>(form, row_type, *rows, *slots);
}

KVP_HOST kvpages_host_gather_row(kvp::Row row, int32_t* __restrict to, uint64_t begin, uint64_t end) {
    for (uint64_t column = begin; column < row.length; ++column) {
        to[column] = kvp::gathered_id(row, column);
    }
    for (uint64_t column = row.length; column < end; ++column) {
        to[column] = kvp::gathered_id(row, column);
    }
}

KVP_HOST kvpages_host_map_slots(const kvp::SlotRule* rule, kvp::Row row, const int64_t* positions,
                                int64_t* slots, uint64_t count) {
    if (rule->ranks.divisor == 1) {
        kvp::map_runs(*rule, row, positions, slots, count);
    } else {
        kvp::map_each(*rule, row, positions, slots, count);
    }
}
