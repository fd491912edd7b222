// The kernels: bodies of blocks.h and rows.h, on grids as src/kernels/device.rs chooses them.
//
// A grid may be smaller than the work: threads go on with what lies a grid further. Nothing is
// `const __restrict__` that may lie in the cache, which is written at the same time. Pieces of work
// are counted in 64 bits, and numbers below 2^32 divide as fast as if they were of 32.
#include "device.h"
#include "device_port.h"
#include "forms.h"

namespace kvp {
namespace {

// What a thread reads before it writes.
constexpr uint32_t kUnrolled = 4;

struct alignas(16) Vector16 {
    uint32_t parts[4];
};

// --- whole blocks --------------------------------------------------------------------------------

// Which part of a block this CTA takes: the grid is pieces x blocks of a list x chunks.
struct Part {
    Piece piece;
    uint32_t place;  // in the list
    uint64_t first;  // of the vectors that the thread takes `step` apart
    uint64_t step;
};

template <typename List>
KVP_DEVICE Part part_of(const List& list, uint32_t num_places, uint32_t unrolled) {
    const uint32_t chunks = gridDim.x / (list.num_pieces * num_places);
    const uint32_t block = blockIdx.x / chunks;
    const uint32_t chunk = blockIdx.x - block * chunks;
    const uint32_t piece = block / num_places;
    const uint64_t per_chunk = static_cast<uint64_t>(blockDim.x) * unrolled;
    return {list.table != nullptr ? list.table[piece] : list.pieces[piece],
            block - piece * num_places, chunk * per_chunk + threadIdx.x, chunks * per_chunk};
}

template <typename V>
KVP_DEVICE void zero(const BlockList& list) {
    const Part part = part_of(list, list.num_ids, kUnrolled);
    V* to = reinterpret_cast<V*>(part.piece.data + list.ids[part.place] * part.piece.step);
    const uint64_t length = part.piece.span / sizeof(V);
    KVP_ROLLED for (uint64_t first = part.first; first < length; first += part.step) {
        KVP_UNROLLED for (uint32_t i = 0; i < kUnrolled; ++i) {
            const uint64_t at = first + i * blockDim.x;
            if (at < length) to[at] = V{};
        }
    }
}

// Copies what a thread takes of a run: vectors from `first` on, `lanes` apart. The loads of the
// loop that is not the last have no condition: they would wait for stores.
template <typename V>
KVP_DEVICE void copy_four(V* to, const V* from, uint64_t first, uint64_t lanes, uint64_t length) {
    if (first + (kUnrolled - 1) * lanes < length) {
        V values[kUnrolled];
        KVP_UNROLLED for (uint32_t i = 0; i < kUnrolled; ++i) values[i] = from[first + i * lanes];
        KVP_UNROLLED for (uint32_t i = 0; i < kUnrolled; ++i) to[first + i * lanes] = values[i];
    } else {
        KVP_ROLLED for (uint64_t at = first; at < length; at += lanes) to[at] = from[at];
    }
}

template <typename V>
KVP_DEVICE void copy(const MoveList& list) {
    const Part part = part_of(list, list.num_moves, kUnrolled);
    const Move move = list.moves[part.place];
    const V* from = reinterpret_cast<const V*>(part.piece.data + move.from * part.piece.step);
    V* to = reinterpret_cast<V*>(part.piece.data + move.to * part.piece.step);
    const uint64_t length = part.piece.span / sizeof(V);
    KVP_ROLLED for (uint64_t first = part.first; first < length; first += part.step) {
        copy_four(to, from, first, blockDim.x, length);
    }
}

// Every thread does all moves for its own bytes of a block, so no thread waits for another.
template <typename V>
KVP_DEVICE void copy_in_order(const MoveList& list) {
    const Part part = part_of(list, 1, 1);
    const uint64_t length = part.piece.span / sizeof(V);
    KVP_ROLLED for (uint64_t at = part.first; at < length; at += part.step) {
        byte* data = part.piece.data + at * sizeof(V);
        V spare{};
        KVP_ROLLED for (uint32_t i = 0; i < list.num_moves; ++i) {
            const Move move = list.moves[i];
            V value = spare;
            if (move.from != kSpare) {
                value = *reinterpret_cast<const V*>(data + move.from * part.piece.step);
            }
            if (move.to != kSpare) {
                *reinterpret_cast<V*>(data + move.to * part.piece.step) = value;
            } else {
                spare = value;
            }
        }
    }
}

// --- rows ----------------------------------------------------------------------------------------

// A key or value: outside the cache and in it.
struct Run {
    byte* row;
    byte* cell;
    uint64_t elements;
    float scale;
};

// Calls `body(rows, cell, row, unit)` for each unit of the rows that mean a slot. The grid is
// layers x CTAs of threads: x share a unit, y have one each.
template <typename Body>
KVP_DEVICE void each_unit(const RowBatch& batch, Body body) {
    const uint32_t ctas = gridDim.x / batch.num_layers;
    const uint32_t layer = blockIdx.x / ctas;
    const Rows& rows = batch.layers[layer];
    const uint64_t count = batch.slots.count * batch.units;
    const uint64_t step = static_cast<uint64_t>(ctas) * blockDim.y;
    const uint64_t first =
        static_cast<uint64_t>(blockIdx.x - layer * ctas) * blockDim.y + threadIdx.y;
    Slots slots = batch.slots;
    KVP_ROLLED for (uint64_t at = first; at < count; at += step) {
        const uint64_t row = at / batch.units;
        slots.slots = opaque(slots.slots);
        const auto slot = static_cast<uint64_t>(slot_of(slots, row));
        // What is negative is more than any number of slots.
        if (slot >= batch.num_slots) continue;
        body(rows, cell_of(rows, slot), row, at - row * batch.units);
    }
}

// Calls `body(rows, run)` for each key and value: a unit is one, the keys of all heads first.
template <typename Body>
KVP_DEVICE void each_run(const RowBatch& batch, Body body) {
    each_unit(batch, [&body](const Rows& rows, byte* cell, uint64_t row, uint64_t unit) {
        const bool is_key = unit < rows.heads;
        const uint64_t head = is_key ? unit : unit - rows.heads;
        const uint64_t elements = is_key ? rows.key_elements : rows.value_elements;
        if (head >= rows.heads || elements == 0) return;
        // One call, so that the body is compiled once.
        byte* start = is_key ? rows.keys : rows.values;
        const uint64_t token = is_key ? rows.key_token : rows.value_token;
        const uint64_t step = is_key ? rows.key_head : rows.value_head;
        cell += head * rows.head + (is_key ? 0 : rows.value);
        body(rows, Run{start + row * token + head * step, cell, elements,
                       is_key ? rows.key_scale : rows.value_scale});
    });
}

template <typename V>
KVP_DEVICE void copy_run(byte* to, const byte* from, uint64_t bytes) {
    const uint64_t length = bytes / sizeof(V);
    const uint32_t lanes = blockDim.x;
    KVP_ROLLED for (uint64_t first = threadIdx.x; first < length; first += lanes * kUnrolled) {
        copy_four(reinterpret_cast<V*>(to), reinterpret_cast<const V*>(from), first, lanes, length);
    }
}

template <typename V>
KVP_DEVICE void write_same(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        copy_run<V>(run.cell, run.row, run.elements * rows.element);
    });
}

template <typename V>
KVP_DEVICE void gather_same(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        copy_run<V>(run.row, run.cell, run.elements * rows.element);
    });
}

KVP_DEVICE void write_strided(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements; i += blockDim.x) {
            Same::move(run.cell + i * rows.content, 0, run.row + i * rows.element, 0, 1,
                       rows.element);
        }
    });
}

KVP_DEVICE void gather_strided(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements; i += blockDim.x) {
            Same::move(run.row + i * rows.element, 0, run.cell + i * rows.content, 0, 1,
                       rows.element);
        }
    });
}

template <uint64_t bytes>
struct CodeOf;
template <>
struct CodeOf<1> {
    using Type = uint8_t;
};
template <>
struct CodeOf<2> {
    using Type = uint16_t;
};
template <>
struct CodeOf<4> {
    using Type = uint32_t;
};

// `count` elements of a type, one behind another at a multiple of their size. Not as bytes, of
// which each would be one of a device's registers.
template <typename Type, uint32_t count>
struct alignas(Type::bytes * count) Elements {
    typename CodeOf<Type::bytes>::Type codes[count];

    KVP_DEVICE byte* bytes() { return reinterpret_cast<byte*>(codes); }
    KVP_DEVICE const byte* bytes() const { return reinterpret_cast<const byte*>(codes); }
};

// Four elements at a time, at multiples of their size.
template <typename Row, typename Stored>
KVP_DEVICE void write_fours(const RowBatch& batch) {
    each_run(batch, [](const Rows&, const Run& run) {
        const auto* from = reinterpret_cast<const Elements<Row, 4>*>(run.row);
        auto* to = reinterpret_cast<Elements<Stored, 4>*>(run.cell);
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements / 4; i += blockDim.x) {
            const Elements<Row, 4> given = from[i];
            Elements<Stored, 4> stored;
            Converted<Row, Stored>::write(given.bytes(), stored.bytes(), 4, Stored::bytes,
                                          run.scale);
            to[i] = stored;
        }
    });
}

template <typename Row, typename Stored>
KVP_DEVICE void gather_fours(const RowBatch& batch) {
    each_run(batch, [](const Rows&, const Run& run) {
        const auto* from = reinterpret_cast<const Elements<Stored, 4>*>(run.cell);
        auto* to = reinterpret_cast<Elements<Row, 4>*>(run.row);
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements / 4; i += blockDim.x) {
            const Elements<Stored, 4> stored = from[i];
            Elements<Row, 4> given;
            Converted<Row, Stored>::read(given.bytes(), stored.bytes(), 4, Stored::bytes,
                                         run.scale);
            to[i] = given;
        }
    });
}

// Calls `body` with how a type is stored. A thread for each element, or for each key and value.
// These kernels know all forms: there would be many of them, most of which nobody runs.
template <typename Row, typename Body>
KVP_DEVICE void with_converted(uint32_t form, Body body) {
    switch (form) {
        case kF32: body(Converted<Row, F32>{}, F32::bytes); break;
        case kF16: body(Converted<Row, F16>{}, F16::bytes); break;
        case kBf16: body(Converted<Row, Bf16>{}, Bf16::bytes); break;
        case kF8E4m3: body(Converted<Row, F8E4m3>{}, F8E4m3::bytes); break;
        case kF8E5m2: body(Converted<Row, F8E5m2>{}, F8E5m2::bytes); break;
        default: break;
    }
}

template <typename Row, typename Body>
KVP_DEVICE void with_scaled(uint32_t form, Body body) {
    switch (form) {
        case kScaledE4m3: body(ScaledFloat<Row, F8E4m3>{}); break;
        case kScaledE5m2: body(ScaledFloat<Row, F8E5m2>{}); break;
        case kScaledInt8: body(ScaledInt8<Row>{}); break;
        case kScaledInt4: body(ScaledInt4<Row>{}); break;
        default: break;
    }
}

// One element at a time, which may lie anywhere.
template <typename Row>
KVP_DEVICE void write_converted(const RowBatch& batch) {
    each_run(batch, [form = batch.form](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements; i += blockDim.x) {
            const byte* from = run.row + i * Row::bytes;
            byte* to = run.cell + i * rows.content;
            with_converted<Row>(form, [&](auto how, uint64_t element) {
                how.write(from, to, 1, element, run.scale);
            });
        }
    });
}

template <typename Row>
KVP_DEVICE void gather_converted(const RowBatch& batch) {
    each_run(batch, [form = batch.form](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements; i += blockDim.x) {
            const byte* from = run.cell + i * rows.content;
            byte* to = run.row + i * Row::bytes;
            with_converted<Row>(form, [&](auto how, uint64_t element) {
                how.read(to, from, 1, element, run.scale);
            });
        }
    });
}

// A thread for each key and value, which need their largest number first.
template <typename Row>
KVP_DEVICE void write_scaled(const RowBatch& batch) {
    each_run(batch, [form = batch.form](const Rows& rows, const Run& run) {
        with_scaled<Row>(form, [&](auto how) {
            how.write(run.row, run.cell, run.elements, rows.content, run.scale);
        });
    });
}

template <typename Row>
KVP_DEVICE void gather_scaled(const RowBatch& batch) {
    each_run(batch, [form = batch.form](const Rows& rows, const Run& run) {
        with_scaled<Row>(form, [&](auto how) {
            how.read(run.row, run.cell, run.elements, rows.content, run.scale);
        });
    });
}

// A thread for each tile, and one for what is behind them.
template <typename Row>
KVP_DEVICE void write_packed_latent(const RowBatch& batch) {
    each_unit(batch, [](const Rows& rows, byte* cell, uint64_t row, uint64_t unit) {
        if (unit < kTiles) {
            PackedLatent<Row>::write_tile(rows, cell, row, unit);
        } else {
            PackedLatent<Row>::write_rope(rows, cell, row);
        }
    });
}

template <typename Row>
KVP_DEVICE void gather_packed_latent(const RowBatch& batch) {
    each_unit(batch, [](const Rows& rows, byte* cell, uint64_t row, uint64_t unit) {
        if (unit < kTiles) {
            PackedLatent<Row>::read_tile(rows, cell, row, unit);
        } else {
            PackedLatent<Row>::read_rope(rows, cell, row);
        }
    });
}

// --- tables --------------------------------------------------------------------------------------

// A CTA for each patch.
KVP_DEVICE void patch_tables(const TableStep& step) {
    KVP_ROLLED for (uint32_t i = blockIdx.x; i < step.num_patches; i += gridDim.x) {
        const RowPatch patch = step.patches[i];
        const GroupTables& group = step.groups[patch.group];
        int32_t* to = group.table + patch.row * group.width + patch.column;
        const int32_t* from = step.ids + patch.first_id;
        KVP_ROLLED for (uint32_t id = threadIdx.x; id < patch.count; id += blockDim.x) {
            to[id] = from[id];
        }
    }
}

// The row of a request of the batch; without blocks for a dummy.
KVP_DEVICE Row row_of(const TableStep& step, uint32_t number, uint64_t place) {
    const GroupTables& group = step.groups[number];
    const int32_t request = step.requests[place];
    if (request < 0) return {group.table, 0};
    const uint64_t at = static_cast<uint64_t>(number) * step.num_requests + place;
    return {group.table + static_cast<uint64_t>(request) * group.width, step.lengths[at]};
}

// Some of a grid's CTAs.
struct Ctas {
    uint32_t first;
    uint32_t count;
};

// A CTA for each row of each group.
KVP_DEVICE void gather_rows(const TableStep& step, Ctas ctas) {
    const uint64_t count = static_cast<uint64_t>(step.num_groups) * step.num_rows;
    KVP_ROLLED for (uint64_t i = blockIdx.x - ctas.first; i < count; i += ctas.count) {
        const auto number = static_cast<uint32_t>(i / step.num_rows);
        const uint64_t place = i - static_cast<uint64_t>(number) * step.num_rows;
        const GroupTables& group = step.groups[number];
        const Row none{group.table, 0};
        const Row row = place < step.num_requests ? row_of(step, number, place) : none;
        int32_t* to = group.input + place * group.width;
        const uint32_t end = step.ends[i];
        KVP_ROLLED for (uint64_t column = threadIdx.x; column < end; column += blockDim.x) {
            to[column] = gathered_id(row, column);
        }
    }
}

// A thread for each slot of each group.
KVP_DEVICE void map_tokens(const TableStep& step, Ctas ctas) {
    const uint64_t count = step.num_groups * step.num_slots;
    const auto tokens = static_cast<uint64_t>(step.query_start[step.num_requests]);
    const uint64_t lanes = static_cast<uint64_t>(ctas.count) * blockDim.x;
    const uint64_t cta = blockIdx.x - ctas.first;
    KVP_ROLLED for (uint64_t i = cta * blockDim.x + threadIdx.x; i < count; i += lanes) {
        const auto number = static_cast<uint32_t>(i / step.num_slots);
        const uint64_t token = i - number * step.num_slots;
        const GroupTables& group = step.groups[number];
        int64_t slot = kPadSlot;
        if (token < tokens) {
            const uint64_t place = request_of(step.query_start, step.num_requests, token);
            slot = slot_of(group.rule, row_of(step, number, place), step.positions[token]);
        }
        group.slots[token] = slot;
    }
}

// Both read tables that were patched before, and neither reads what the other writes: one launch.
KVP_DEVICE void fill_tables(const TableStep& step) {
    if (blockIdx.x < step.gather_ctas) {
        gather_rows(step, {0, step.gather_ctas});
    } else {
        map_tokens(step, {step.gather_ctas, gridDim.x - step.gather_ctas});
    }
}

}  // namespace
}  // namespace kvp

// --- kernels -------------------------------------------------------------------------------------

// KVP_KERNEL(name, argument, body): a kernel of at most 256 threads.
#define KVP_WIDTHS(name, argument, body)                                  \
    KVP_KERNEL(kvpages_##name##_v16, argument, kvp::body<kvp::Vector16>)  \
    KVP_KERNEL(kvpages_##name##_v4, argument, kvp::body<uint32_t>)        \
    KVP_KERNEL(kvpages_##name##_v1, argument, kvp::body<kvp::byte>)

#define KVP_FOURS(name, Row, Stored)                                                          \
    KVP_KERNEL(kvpages_write_##name, kvp::RowBatch, (kvp::write_fours<kvp::Row, kvp::Stored>)) \
    KVP_KERNEL(kvpages_gather_##name, kvp::RowBatch, (kvp::gather_fours<kvp::Row, kvp::Stored>))

#define KVP_ROWS(name, Row)                                                                \
    KVP_KERNEL(kvpages_write_##name##_converted, kvp::RowBatch, kvp::write_converted<kvp::Row>) \
    KVP_KERNEL(kvpages_gather_##name##_converted, kvp::RowBatch,                           \
               kvp::gather_converted<kvp::Row>)                                            \
    KVP_KERNEL(kvpages_write_##name##_scaled, kvp::RowBatch, kvp::write_scaled<kvp::Row>)  \
    KVP_KERNEL(kvpages_gather_##name##_scaled, kvp::RowBatch, kvp::gather_scaled<kvp::Row>) \
    KVP_KERNEL(kvpages_write_##name##_packed_latent, kvp::RowBatch,                        \
               kvp::write_packed_latent<kvp::Row>)                                         \
    KVP_KERNEL(kvpages_gather_##name##_packed_latent, kvp::RowBatch,                       \
               kvp::gather_packed_latent<kvp::Row>)

KVP_WIDTHS(zero, kvp::BlockList, zero)
KVP_WIDTHS(copy, kvp::MoveList, copy)
KVP_WIDTHS(copy_in_order, kvp::MoveList, copy_in_order)
KVP_WIDTHS(write_same, kvp::RowBatch, write_same)
KVP_WIDTHS(gather_same, kvp::RowBatch, gather_same)
KVP_KERNEL(kvpages_write_same_strided, kvp::RowBatch, kvp::write_strided)
KVP_KERNEL(kvpages_gather_same_strided, kvp::RowBatch, kvp::gather_strided)
KVP_FOURS(f32_f16, F32, F16)
KVP_FOURS(f32_bf16, F32, Bf16)
KVP_FOURS(f32_e4m3, F32, F8E4m3)
KVP_FOURS(f32_e5m2, F32, F8E5m2)
KVP_FOURS(f16_f32, F16, F32)
KVP_FOURS(f16_bf16, F16, Bf16)
KVP_FOURS(f16_e4m3, F16, F8E4m3)
KVP_FOURS(f16_e5m2, F16, F8E5m2)
KVP_FOURS(bf16_f32, Bf16, F32)
KVP_FOURS(bf16_f16, Bf16, F16)
KVP_FOURS(bf16_e4m3, Bf16, F8E4m3)
KVP_FOURS(bf16_e5m2, Bf16, F8E5m2)
KVP_ROWS(f32, F32)
KVP_ROWS(f16, F16)
KVP_ROWS(bf16, Bf16)
KVP_KERNEL(kvpages_patch_tables, kvp::TableStep, kvp::patch_tables)
KVP_KERNEL(kvpages_fill_tables, kvp::TableStep, kvp::fill_tables)
