// The kernels: bodies of blocks.h and rows.h, on grids as src/kernels/device.rs chooses them.
//
// A grid may be smaller than the work: threads go on with what lies a grid further. Nothing is
// `const __restrict__` that may lie in the cache, which is written at the same time. Pieces of work
// are counted in 64 bits, and numbers below 2^32 divide as fast as if they were of 32.
#include "device.h"
#include "device_port.h"

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

// `count` elements of a type, one behind another at a multiple of their size.
template <typename Type, uint32_t count>
struct alignas(Type::bytes * count) Elements {
    byte bytes[Type::bytes * count];
};

// Stores 1 or 4 elements at a time. One may lie anywhere, four at multiples of their size.
template <typename Row, typename Stored, uint32_t count>
KVP_DEVICE void write_converted(const RowBatch& batch) {
    using Form = Converted<Row, Stored>;
    each_run(batch, [](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements / count; i += blockDim.x) {
            if constexpr (count == 1) {
                Form::write(run.row + i * Row::bytes, run.cell + i * rows.content, 1, Stored::bytes,
                            run.scale);
            } else {
                const auto from = reinterpret_cast<const Elements<Row, count>*>(run.row)[i];
                Elements<Stored, count> to;
                Form::write(from.bytes, to.bytes, count, Stored::bytes, run.scale);
                reinterpret_cast<Elements<Stored, count>*>(run.cell)[i] = to;
            }
        }
    });
}

template <typename Row, typename Stored, uint32_t count>
KVP_DEVICE void gather_converted(const RowBatch& batch) {
    using Form = Converted<Row, Stored>;
    each_run(batch, [](const Rows& rows, const Run& run) {
        KVP_ROLLED for (uint64_t i = threadIdx.x; i < run.elements / count; i += blockDim.x) {
            if constexpr (count == 1) {
                Form::read(run.row + i * Row::bytes, run.cell + i * rows.content, 1, Stored::bytes,
                           run.scale);
            } else {
                const auto from = reinterpret_cast<const Elements<Stored, count>*>(run.cell)[i];
                Elements<Row, count> to;
                Form::read(to.bytes, from.bytes, count, Stored::bytes, run.scale);
                reinterpret_cast<Elements<Row, count>*>(run.row)[i] = to;
            }
        }
    });
}

// A thread for each key and value, which need their largest number first.
template <typename Form>
KVP_DEVICE void write_scaled(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        Form::write(run.row, run.cell, run.elements, rows.content, run.scale);
    });
}

template <typename Form>
KVP_DEVICE void gather_scaled(const RowBatch& batch) {
    each_run(batch, [](const Rows& rows, const Run& run) {
        Form::read(run.row, run.cell, run.elements, rows.content, run.scale);
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

}  // namespace
}  // namespace kvp

// --- kernels -------------------------------------------------------------------------------------

// KVP_KERNEL(name, argument, body): a kernel of at most 256 threads.
#define KVP_WIDTHS(name, argument, body)                                  \
    KVP_KERNEL(kvpages_##name##_v16, argument, kvp::body<kvp::Vector16>)  \
    KVP_KERNEL(kvpages_##name##_v4, argument, kvp::body<uint32_t>)        \
    KVP_KERNEL(kvpages_##name##_v1, argument, kvp::body<kvp::byte>)

#define KVP_CONVERTED(name, Row, Stored)                                                       \
    KVP_KERNEL(kvpages_write_##name##_x1, kvp::RowBatch,                                       \
               (kvp::write_converted<kvp::Row, kvp::Stored, 1>))                               \
    KVP_KERNEL(kvpages_write_##name##_x4, kvp::RowBatch,                                       \
               (kvp::write_converted<kvp::Row, kvp::Stored, 4>))                               \
    KVP_KERNEL(kvpages_gather_##name##_x1, kvp::RowBatch,                                      \
               (kvp::gather_converted<kvp::Row, kvp::Stored, 1>))                              \
    KVP_KERNEL(kvpages_gather_##name##_x4, kvp::RowBatch,                                      \
               (kvp::gather_converted<kvp::Row, kvp::Stored, 4>))

#define KVP_SCALED(name, ...)                                                                  \
    KVP_KERNEL(kvpages_write_##name, kvp::RowBatch, (kvp::write_scaled<kvp::__VA_ARGS__>))     \
    KVP_KERNEL(kvpages_gather_##name, kvp::RowBatch, (kvp::gather_scaled<kvp::__VA_ARGS__>))

#define KVP_SCALED_ROWS(name, Row)                                                             \
    KVP_SCALED(name##_scaled_e4m3, ScaledFloat<kvp::Row, kvp::F8E4m3>)                         \
    KVP_SCALED(name##_scaled_e5m2, ScaledFloat<kvp::Row, kvp::F8E5m2>)                         \
    KVP_SCALED(name##_scaled_int8, ScaledInt8<kvp::Row>)                                       \
    KVP_SCALED(name##_scaled_int4, ScaledInt4<kvp::Row>)                                       \
    KVP_KERNEL(kvpages_write_##name##_packed_latent, kvp::RowBatch,                            \
               kvp::write_packed_latent<kvp::Row>)                                             \
    KVP_KERNEL(kvpages_gather_##name##_packed_latent, kvp::RowBatch,                           \
               kvp::gather_packed_latent<kvp::Row>)

KVP_WIDTHS(zero, kvp::BlockList, zero)
KVP_WIDTHS(copy, kvp::MoveList, copy)
KVP_WIDTHS(copy_in_order, kvp::MoveList, copy_in_order)
KVP_WIDTHS(write_same, kvp::RowBatch, write_same)
KVP_WIDTHS(gather_same, kvp::RowBatch, gather_same)
KVP_KERNEL(kvpages_write_same_strided, kvp::RowBatch, kvp::write_strided)
KVP_KERNEL(kvpages_gather_same_strided, kvp::RowBatch, kvp::gather_strided)
KVP_CONVERTED(f32_f16, F32, F16)
KVP_CONVERTED(f32_bf16, F32, Bf16)
KVP_CONVERTED(f32_e4m3, F32, F8E4m3)
KVP_CONVERTED(f32_e5m2, F32, F8E5m2)
KVP_CONVERTED(f16_f32, F16, F32)
KVP_CONVERTED(f16_bf16, F16, Bf16)
KVP_CONVERTED(f16_e4m3, F16, F8E4m3)
KVP_CONVERTED(f16_e5m2, F16, F8E5m2)
KVP_CONVERTED(bf16_f32, Bf16, F32)
KVP_CONVERTED(bf16_f16, Bf16, F16)
KVP_CONVERTED(bf16_e4m3, Bf16, F8E4m3)
KVP_CONVERTED(bf16_e5m2, Bf16, F8E5m2)
KVP_SCALED_ROWS(f32, F32)
KVP_SCALED_ROWS(f16, F16)
KVP_SCALED_ROWS(bf16, Bf16)
