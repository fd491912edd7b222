// Rows of tokens, to slots of a cache and back.
//
// A row is what a layer stores of one token: for each head a key and a value, each a run of
// elements without gaps. A latent is one head whose "key" is the latent and whose "value" is the
// rest of it.
#ifndef KVPAGES_KERNELS_ROWS_H
#define KVPAGES_KERNELS_ROWS_H

#include "convert.h"
#include "port.h"

namespace kvp {

// One layer's cache, and the rows outside it. Distances are bytes.
struct Rows {
    byte* cache;  // element 0 of the view
    byte* keys;
    byte* values;
    uint64_t key_token;    // from one token's key to the next one's
    uint64_t key_head;     // from one head's key to the next one's
    uint64_t value_token;  // as for keys
    uint64_t value_head;
    uint64_t kernel_block;  // in the cache: from kernel block to kernel block
    uint64_t token;         // from slot to slot
    uint64_t head;          // from head to head
    uint64_t content;       // from element to element
    uint64_t value;         // from a key to its value
    uint64_t kernel_block_slots;
    uint64_t heads;
    uint64_t key_elements;  // of a row, not as they are packed
    uint64_t value_elements;
    uint64_t element;  // of one element when rows and cache are of one type
    float key_scale;
    float value_scale;
};

// Which slot each row means. A negative slot stands for no token.
struct Slots {
    const int64_t* slots;     // null: the slots of `blocks`, one block after another
    const int32_t* blocks;
    uint64_t block_slots;
    uint64_t count;  // rows
};

KVP_FN int64_t slot_of(const Slots& slots, uint64_t row) {
    if (slots.slots != nullptr) {
        return slots.slots[row];
    }
    const uint64_t entry = row / slots.block_slots;
    const uint64_t in_block = row - entry * slots.block_slots;
    const auto block = static_cast<uint64_t>(slots.blocks[entry]);
    return static_cast<int64_t>(block * slots.block_slots + in_block);
}

// Where a slot's first head lies.
KVP_FN byte* cell_of(const Rows& rows, uint64_t slot) {
    const uint64_t block = slot / rows.kernel_block_slots;
    const uint64_t in_block = slot - block * rows.kernel_block_slots;
    return rows.cache + block * rows.kernel_block + in_block * rows.token;
}

// --- how one key or value is stored ----------------------------------------------------------
// Each form has write(row, cell, elements, content, scale) and read(...), its inverse: `row` is a
// run of Row elements, `cell` the stored elements, `content` bytes apart.

// Rows and cache of one type.
struct Same {
    // Short runs, such as one head's key, are copied here: a call would take as long as they do.
    static KVP_FN void copy(byte* to, const byte* from, uint64_t bytes) {
        if (bytes % 64 != 0 || bytes > 512) {
            __builtin_memcpy(to, from, bytes);
            return;
        }
        for (uint64_t i = 0; i < bytes; i += 64) {
            __builtin_memcpy(to + i, from + i, 64);
        }
    }
    static KVP_FN void move(byte* to, uint64_t to_step, const byte* from, uint64_t from_step,
                            uint64_t elements, uint64_t element) {
        if (to_step == element && from_step == element) {
            copy(to, from, elements * element);
            return;
        }
        KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
            KVP_ROLLED for (uint64_t b = 0; b < element; ++b) {
                to[i * to_step + b] = from[i * from_step + b];
            }
        }
    }
};

// How many rows from `row` on lie one behind another, in the rows as in the cache. Only for rows of
// one run for keys, and one for values, that are as long as a token's step.
KVP_FN uint64_t rows_together(const Rows& rows, const Slots& slots, uint64_t row, int64_t slot) {
    const uint64_t in_block = static_cast<uint64_t>(slot) % rows.kernel_block_slots;
    const uint64_t left = slots.count - row;
    const uint64_t room = rows.kernel_block_slots - in_block;
    const uint64_t most = left < room ? left : room;
    uint64_t count = 1;
    while (count < most && slot_of(slots, row + count) == slot + static_cast<int64_t>(count)) {
        ++count;
    }
    return count;
}

KVP_FN bool tokens_are_dense(const Rows& rows) {
    const uint64_t bytes = rows.key_elements * rows.element;
    const bool values = rows.value_elements == 0 ||
                        (rows.value_elements == rows.key_elements && rows.value_token == bytes);
    return rows.heads == 1 && rows.content == rows.element && rows.token == bytes &&
           rows.key_token == bytes && values;
}

// Another type; fp8 with the scale of the whole tensor.
template <typename Row, typename Stored>
struct Converted {
    static KVP_FN void write(const byte* row, byte* cell, uint64_t elements, uint64_t content,
                             float scale) {
        if (content == Stored::bytes) {
            run(row, cell, elements, Stored::bytes, scale);
        } else {
            run(row, cell, elements, content, scale);
        }
    }
    static KVP_FN void read(byte* row, const byte* cell, uint64_t elements, uint64_t content,
                            float scale) {
        for (uint64_t i = 0; i < elements; ++i) {
            const float value = Stored::get(cell + i * content);
            Row::put(row + i * Row::bytes, Stored::is_scaled ? product(value, scale) : value);
        }
    }

private:
    static KVP_FN void run(const byte* row, byte* cell, uint64_t elements, uint64_t content,
                           float scale) {
        for (uint64_t i = 0; i < elements; ++i) {
            const float value = Row::get(row + i * Row::bytes);
            Stored::put(cell + i * content, Stored::is_scaled ? quotient(value, scale) : value);
        }
    }
};

// The largest magnitude of a run that is no NaN, at most the largest number.
template <typename Row>
KVP_FN float largest_of(const byte* row, uint64_t elements, bool* has_nan) {
    float largest = 0.0f;
    *has_nan = false;
    KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
        const float value = magnitude(Row::get(row + i * Row::bytes));
        *has_nan = *has_nan || is_nan(value);
        largest = value > largest ? value : largest;
    }
    return largest < kLargest ? largest : kLargest;
}

// fp8 with a scale of its own behind it. A NaN stays one element's.
template <typename Row, typename Stored>
struct ScaledFloat {
    static KVP_FN void write(const byte* row, byte* cell, uint64_t elements, uint64_t, float) {
        bool has_nan = false;
        const float scale = largest_of<Row>(row, elements, &has_nan) / Stored::largest;
        // A scale of 0 means that there are only zeros, or numbers too small to have one.
        const float divisor = scale > 0.0f ? scale : 1.0f;
        KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
            cell[i] = Stored::encode(quotient(Row::get(row + i * Row::bytes), divisor));
        }
        store(cell + elements, scale);
    }
    static KVP_FN void read(byte* row, const byte* cell, uint64_t elements, uint64_t, float) {
        const float scale = load<float>(cell + elements);
        KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
            Row::put(row + i * Row::bytes, product(Stored::decode(cell[i]), scale));
        }
    }
};

// int8 with a scale of its own behind it. A NaN makes the scale NaN: the format has none.
template <typename Row>
struct ScaledInt8 {
    static KVP_FN void write(const byte* row, byte* cell, uint64_t elements, uint64_t, float) {
        bool has_nan = false;
        float scale = largest_of<Row>(row, elements, &has_nan) / 127.0f;
        scale = has_nan ? bits_as<float>(kInfinity | kQuiet) : scale;
        KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
            const float value = Row::get(row + i * Row::bytes);
            cell[i] = static_cast<byte>(quantise(value, scale, 127.0f));
        }
        store(cell + elements, scale);
    }
    static KVP_FN void read(byte* row, const byte* cell, uint64_t elements, uint64_t, float) {
        const float scale = load<float>(cell + elements);
        KVP_ROLLED for (uint64_t i = 0; i < elements; ++i) {
            const auto code = static_cast<int8_t>(cell[i]);
            Row::put(row + i * Row::bytes, product(static_cast<float>(code), scale));
        }
    }
};

// Two int4 in a byte, the first in its lower half, -7 to 7, with a scale of their own behind them.
template <typename Row>
struct ScaledInt4 {
    static KVP_FN void write(const byte* row, byte* cell, uint64_t elements, uint64_t, float) {
        bool has_nan = false;
        float scale = largest_of<Row>(row, elements, &has_nan) / 7.0f;
        scale = has_nan ? bits_as<float>(kInfinity | kQuiet) : scale;
        KVP_ROLLED for (uint64_t i = 0; i < elements / 2; ++i) {
            const byte* pair = row + 2 * i * Row::bytes;
            const int32_t low = quantise(Row::get(pair), scale, 7.0f);
            const int32_t high = quantise(Row::get(pair + Row::bytes), scale, 7.0f);
            cell[i] = static_cast<byte>((low & 15) | ((high & 15) << 4));
        }
        store(cell + elements / 2, scale);
    }
    static KVP_FN void read(byte* row, const byte* cell, uint64_t elements, uint64_t, float) {
        const float scale = load<float>(cell + elements / 2);
        KVP_ROLLED for (uint64_t i = 0; i < elements / 2; ++i) {
            byte* pair = row + 2 * i * Row::bytes;
            Row::put(pair, product(sign_extended(cell[i] & 15), scale));
            Row::put(pair + Row::bytes, product(sign_extended(cell[i] >> 4), scale));
        }
    }

private:
    static KVP_FN float sign_extended(int32_t nibble) {
        return static_cast<float>((nibble ^ 8) - 8);
    }
};

// --- one row ------------------------------------------------------------------------------------
// Index space: rows of `Slots` x heads, in any order when no slot is named twice.

template <typename Form>
KVP_FN void write_row(const Rows& rows, byte* cell, uint64_t row, uint64_t head) {
    cell += head * rows.head;
    Form::write(rows.keys + row * rows.key_token + head * rows.key_head, cell, rows.key_elements,
                rows.content, rows.key_scale);
    if (rows.value_elements != 0) {
        Form::write(rows.values + row * rows.value_token + head * rows.value_head,
                    cell + rows.value, rows.value_elements, rows.content, rows.value_scale);
    }
}

template <typename Form>
KVP_FN void read_row(const Rows& rows, const byte* cell, uint64_t row, uint64_t head) {
    cell += head * rows.head;
    Form::read(rows.keys + row * rows.key_token + head * rows.key_head, cell, rows.key_elements,
               rows.content, rows.key_scale);
    if (rows.value_elements != 0) {
        Form::read(rows.values + row * rows.value_token + head * rows.value_head,
                   cell + rows.value, rows.value_elements, rows.content, rows.value_scale);
    }
}

// `count` rows that lie together, or one.
KVP_FN void write_same_rows(const Rows& rows, byte* cell, uint64_t row, uint64_t head,
                            uint64_t count) {
    cell += head * rows.head;
    Same::move(cell, rows.content, rows.keys + row * rows.key_token + head * rows.key_head,
               rows.element, count * rows.key_elements, rows.element);
    if (rows.value_elements != 0) {
        Same::move(cell + rows.value, rows.content,
                   rows.values + row * rows.value_token + head * rows.value_head, rows.element,
                   count * rows.value_elements, rows.element);
    }
}

KVP_FN void read_same_rows(const Rows& rows, const byte* cell, uint64_t row, uint64_t head,
                           uint64_t count) {
    cell += head * rows.head;
    Same::move(rows.keys + row * rows.key_token + head * rows.key_head, rows.element, cell,
               rows.content, count * rows.key_elements, rows.element);
    if (rows.value_elements != 0) {
        Same::move(rows.values + row * rows.value_token + head * rows.value_head, rows.element,
                   cell + rows.value, rows.content, count * rows.value_elements, rows.element);
    }
}

// --- DeepSeek V3.2's packed latent ---------------------------------------------------------------
// 512 fp8 numbers in four tiles, an f32 scale for each tile, 64 bf16 numbers.

constexpr uint64_t kTiles = 4;
constexpr uint64_t kTile = 128;
constexpr uint64_t kTileScales = kTiles * kTile;
constexpr uint64_t kRope = kTileScales + kTiles * 4;
constexpr uint64_t kRopeElements = 64;

template <typename Row>
struct PackedLatent {
    static KVP_FN void write(const Rows& rows, byte* cell, uint64_t row) {
        KVP_ROLLED for (uint64_t tile = 0; tile < kTiles; ++tile) write_tile(rows, cell, row, tile);
        write_rope(rows, cell, row);
    }
    static KVP_FN void write_tile(const Rows& rows, byte* cell, uint64_t row, uint64_t tile) {
        const byte* from = rows.keys + row * rows.key_token + tile * kTile * Row::bytes;
        bool has_nan = false;
        const float scale = largest_of<Row>(from, kTile, &has_nan) / F8E4m3::largest;
        const float divisor = scale > 0.0f ? scale : 1.0f;
        KVP_ROLLED for (uint64_t i = 0; i < kTile; ++i) {
            const float value = quotient(Row::get(from + i * Row::bytes), divisor);
            cell[tile * kTile + i] = F8E4m3::encode(value);
        }
        store(cell + kTileScales + tile * 4, scale);
    }
    static KVP_FN void write_rope(const Rows& rows, byte* cell, uint64_t row) {
        const byte* rope = rows.values + row * rows.value_token;
        KVP_ROLLED for (uint64_t i = 0; i < kRopeElements; ++i) {
            Bf16::put(cell + kRope + i * Bf16::bytes, Row::get(rope + i * Row::bytes));
        }
    }

    static KVP_FN void read(const Rows& rows, const byte* cell, uint64_t row) {
        KVP_ROLLED for (uint64_t tile = 0; tile < kTiles; ++tile) read_tile(rows, cell, row, tile);
        read_rope(rows, cell, row);
    }
    static KVP_FN void read_tile(const Rows& rows, const byte* cell, uint64_t row, uint64_t tile) {
        byte* to = rows.keys + row * rows.key_token + tile * kTile * Row::bytes;
        const float scale = load<float>(cell + kTileScales + tile * 4);
        KVP_ROLLED for (uint64_t i = 0; i < kTile; ++i) {
            Row::put(to + i * Row::bytes, product(F8E4m3::decode(cell[tile * kTile + i]), scale));
        }
    }
    static KVP_FN void read_rope(const Rows& rows, const byte* cell, uint64_t row) {
        byte* rope = rows.values + row * rows.value_token;
        KVP_ROLLED for (uint64_t i = 0; i < kRopeElements; ++i) {
            Row::put(rope + i * Row::bytes, Bf16::get(cell + kRope + i * Bf16::bytes));
        }
    }
};

}  // namespace kvp

#endif
