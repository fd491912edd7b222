// What the kernels of device.cu are given, by value: a launch carries its block ids, moves and
// layers itself, so that nothing is staged in device memory, and a captured graph holds them.
//
// src/kernels/device.rs has the same structs, and says which kernel to launch on which grid.
#ifndef KVPAGES_KERNELS_DEVICE_H
#define KVPAGES_KERNELS_DEVICE_H

#include <stddef.h>

#include "blocks.h"
#include "port.h"
#include "rows.h"
#include "tables.h"

namespace kvp {

// All arguments of a launch fit in 4096 bytes on every device and driver.
constexpr size_t kArgumentBytes = 4000;
constexpr uint32_t kMaxPieces = 64;
constexpr uint32_t kMaxIds = 600;
constexpr uint32_t kMaxMoves = 300;
constexpr uint32_t kMaxLayers = 24;

// Blocks `ids` of all pieces.
struct BlockList {
    const Piece* table;  // in device memory; null: `pieces`
    uint32_t num_pieces;
    uint32_t num_ids;
    Piece pieces[kMaxPieces];
    uint32_t ids[kMaxIds];
};

// Moves of blocks in all pieces. Either in order, each byte by one thread, whose register is the
// spare page; or in any order, and then no block is both read and written, nor one of them kSpare.
struct MoveList {
    const Piece* table;  // in device memory; null: `pieces`
    uint32_t num_pieces;
    uint32_t num_moves;
    Piece pieces[kMaxPieces];
    Move moves[kMaxMoves];
};

// Rows of the same slots for several layers. All pointers are the device's.
struct RowBatch {
    Slots slots;
    uint64_t num_slots;  // rows of slots from here on mean no token
    uint32_t num_layers;
    uint32_t units;  // of a row: how many pieces of work it is in the layer that has the most
    uint32_t form;   // a Form, for kernels that know several
    uint32_t unused;
    Rows layers[kMaxLayers];
};

// The tables of a group.
struct GroupTables {
    int32_t* table;  // a row of `width` ids for each request
    int32_t* input;  // a row for each request of the batch
    int64_t* slots;
    uint64_t width;
    SlotRule rule;
};

// Entries of one row that change: `count` of `TableStep::ids` from `first_id` on.
struct RowPatch {
    uint32_t group;
    uint32_t row;
    uint32_t column;
    uint32_t count;
    uint64_t first_id;
};

// What a step does to tables. All pointers are the device's. It has no table of groups of its own,
// so there may be any number of them.
struct TableStep {
    const GroupTables* groups;
    const RowPatch* patches;
    const int32_t* ids;
    const int32_t* requests;     // of the batch; negative for a dummy
    const uint32_t* lengths;     // of their rows, num_requests for each group
    const uint32_t* ends;        // of what is written of each input row, num_rows for each group
    const int32_t* query_start;  // num_requests + 1, going up from 0
    const int64_t* positions;
    uint32_t num_groups;
    uint32_t num_patches;
    uint32_t num_requests;
    uint32_t num_rows;     // of the input tables that are written: null from num_requests on
    uint64_t num_slots;    // that are written: pads past the tokens of the batch
    uint32_t gather_ctas;  // of the grid, the first ones, which write rows; the others write slots
    uint32_t unused;
};

// src/kernels/device.rs says the same; neither side compiles when a field is elsewhere.
static_assert(offsetof(BlockList, table) == 0);
static_assert(offsetof(BlockList, num_pieces) == 8);
static_assert(offsetof(BlockList, num_ids) == 12);
static_assert(offsetof(BlockList, pieces) == 16);
static_assert(offsetof(BlockList, ids) == 1552);
static_assert(sizeof(BlockList) == 3952);
static_assert(offsetof(MoveList, table) == 0);
static_assert(offsetof(MoveList, num_pieces) == 8);
static_assert(offsetof(MoveList, num_moves) == 12);
static_assert(offsetof(MoveList, pieces) == 16);
static_assert(offsetof(MoveList, moves) == 1552);
static_assert(sizeof(MoveList) == 3952);
static_assert(offsetof(RowBatch, slots) == 0);
static_assert(offsetof(RowBatch, num_slots) == 32);
static_assert(offsetof(RowBatch, num_layers) == 40);
static_assert(offsetof(RowBatch, units) == 44);
static_assert(offsetof(RowBatch, form) == 48);
static_assert(offsetof(RowBatch, layers) == 56);
static_assert(sizeof(RowBatch) == 3512);
static_assert(sizeof(BlockList) <= kArgumentBytes);
static_assert(sizeof(MoveList) <= kArgumentBytes);
static_assert(sizeof(RowBatch) <= kArgumentBytes);
static_assert(sizeof(TableStep) <= kArgumentBytes);

// Without padding, for whoever lays them out by hand.
static_assert(sizeof(GroupTables) == 104);
static_assert(sizeof(RowPatch) == 24);
static_assert(sizeof(TableStep) == 96);

}  // namespace kvp

#endif
