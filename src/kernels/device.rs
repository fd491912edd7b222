//! The kernels of `kernels/device.cu`: their arguments, and which one to launch on which grid.
//!
//! A launch carries its block ids, moves and layers itself, at most 4000 bytes. What has more of
//! them is several launches, which one stream runs one after another.

use std::ffi::CStr;
use std::ptr;

use super::{Form, Move, Piece, RowType, Rows, SPARE, Slots};

/// The most pieces of a launch.
pub(crate) const MAX_PIECES: usize = 64;
/// The most blocks that a launch clears.
pub(crate) const MAX_IDS: usize = 600;
/// The most moves of a launch.
pub(crate) const MAX_MOVES: usize = 300;
/// The most layers of a launch.
pub(crate) const MAX_LAYERS: usize = 24;

/// Threads of a block, at most.
const MAX_THREADS: u64 = 256;
/// Blocks of a grid, at most.
const MAX_GRID: u64 = (1 << 31) - 1;
/// What a thread has under way at a time, in pieces of the kernel's width.
const UNROLLED: u64 = 4;

/// `kvp::BlockList`: blocks `ids` of all pieces.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct BlockList {
    /// In device memory; null: `pieces`.
    table: *const Piece,
    num_pieces: u32,
    num_ids: u32,
    pieces: [Piece; MAX_PIECES],
    ids: [u32; MAX_IDS],
}

/// `kvp::MoveList`: moves of blocks in all pieces.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct MoveList {
    /// In device memory; null: `pieces`.
    table: *const Piece,
    num_pieces: u32,
    num_moves: u32,
    pieces: [Piece; MAX_PIECES],
    moves: [Move; MAX_MOVES],
}

/// `kvp::RowBatch`: rows of the same slots for several layers. All pointers are the device's.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct RowBatch {
    slots: Slots,
    /// Rows of slots from here on mean no token.
    num_slots: u64,
    num_layers: u32,
    /// Of a row: how many pieces of work it is in the layer that has the most.
    units: u32,
    layers: [Rows; MAX_LAYERS],
}

// `kernels/device.h` says the same; neither side compiles when a field is elsewhere.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(BlockList, table) == 0);
    assert!(offset_of!(BlockList, num_pieces) == 8);
    assert!(offset_of!(BlockList, num_ids) == 12);
    assert!(offset_of!(BlockList, pieces) == 16);
    assert!(offset_of!(BlockList, ids) == 1552);
    assert!(size_of::<BlockList>() == 3952);
    assert!(offset_of!(MoveList, table) == 0);
    assert!(offset_of!(MoveList, num_pieces) == 8);
    assert!(offset_of!(MoveList, num_moves) == 12);
    assert!(offset_of!(MoveList, pieces) == 16);
    assert!(offset_of!(MoveList, moves) == 1552);
    assert!(size_of::<MoveList>() == 3952);
    assert!(offset_of!(RowBatch, slots) == 0);
    assert!(offset_of!(RowBatch, num_slots) == 32);
    assert!(offset_of!(RowBatch, num_layers) == 40);
    assert!(offset_of!(RowBatch, units) == 44);
    assert!(offset_of!(RowBatch, layers) == 48);
    assert!(size_of::<RowBatch>() == 3504);
};

/// Which kernel to launch, on how many blocks of how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    pub name: &'static CStr,
    pub grid: [u32; 3],
    pub block: [u32; 3],
}

/// Whether rows are stored or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Write,
    Gather,
}

/// So that a driver finds every part of the image at the multiple that it is at.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static ALIGNED: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kvpages.image")));

/// The kernels, as a driver loads them: PTX and a NUL, or what the build was told to embed.
pub(crate) static IMAGE: &[u8] = &ALIGNED.0;

// --- names ---------------------------------------------------------------------------------------

/// One kernel for each width of its loads and stores.
type Widths = [(u64, &'static CStr); 3];

const ZERO: Widths = [
    (16, c"kvpages_zero_v16"),
    (4, c"kvpages_zero_v4"),
    (1, c"kvpages_zero_v1"),
];
const COPY: Widths = [
    (16, c"kvpages_copy_v16"),
    (4, c"kvpages_copy_v4"),
    (1, c"kvpages_copy_v1"),
];
const COPY_IN_ORDER: Widths = [
    (16, c"kvpages_copy_in_order_v16"),
    (4, c"kvpages_copy_in_order_v4"),
    (1, c"kvpages_copy_in_order_v1"),
];
const WRITE_SAME: Widths = [
    (16, c"kvpages_write_same_v16"),
    (4, c"kvpages_write_same_v4"),
    (1, c"kvpages_write_same_v1"),
];
const GATHER_SAME: Widths = [
    (16, c"kvpages_gather_same_v16"),
    (4, c"kvpages_gather_same_v4"),
    (1, c"kvpages_gather_same_v1"),
];
const WRITE_STRIDED: &CStr = c"kvpages_write_same_strided";
const GATHER_STRIDED: &CStr = c"kvpages_gather_same_strided";

/// The kernels of rows that are not copied.
struct RowKernels {
    row_type: RowType,
    form: Form,
    write: &'static CStr,
    gather: &'static CStr,
    /// Those of four elements at a time, where there are some.
    four: Option<(&'static CStr, &'static CStr)>,
}

/// A name, of text that ends in its NUL.
const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name of a kernel ends in one NUL"),
    }
}

macro_rules! converted {
    ($row_type:ident, $form:ident, $name:literal) => {
        RowKernels {
            row_type: RowType::$row_type,
            form: Form::$form,
            write: name(concat!("kvpages_write_", $name, "_x1\0")),
            gather: name(concat!("kvpages_gather_", $name, "_x1\0")),
            four: Some((
                name(concat!("kvpages_write_", $name, "_x4\0")),
                name(concat!("kvpages_gather_", $name, "_x4\0")),
            )),
        }
    };
}

macro_rules! scaled {
    ($row_type:ident, $form:ident, $name:literal) => {
        RowKernels {
            row_type: RowType::$row_type,
            form: Form::$form,
            write: name(concat!("kvpages_write_", $name, "\0")),
            gather: name(concat!("kvpages_gather_", $name, "\0")),
            four: None,
        }
    };
}

const ROWS: &[RowKernels] = &[
    converted!(F32, F16, "f32_f16"),
    converted!(F32, Bf16, "f32_bf16"),
    converted!(F32, F8E4m3, "f32_e4m3"),
    converted!(F32, F8E5m2, "f32_e5m2"),
    converted!(F16, F32, "f16_f32"),
    converted!(F16, Bf16, "f16_bf16"),
    converted!(F16, F8E4m3, "f16_e4m3"),
    converted!(F16, F8E5m2, "f16_e5m2"),
    converted!(Bf16, F32, "bf16_f32"),
    converted!(Bf16, F16, "bf16_f16"),
    converted!(Bf16, F8E4m3, "bf16_e4m3"),
    converted!(Bf16, F8E5m2, "bf16_e5m2"),
    scaled!(F32, ScaledE4m3, "f32_scaled_e4m3"),
    scaled!(F32, ScaledE5m2, "f32_scaled_e5m2"),
    scaled!(F32, ScaledInt8, "f32_scaled_int8"),
    scaled!(F32, ScaledInt4, "f32_scaled_int4"),
    scaled!(F32, PackedLatent, "f32_packed_latent"),
    scaled!(F16, ScaledE4m3, "f16_scaled_e4m3"),
    scaled!(F16, ScaledE5m2, "f16_scaled_e5m2"),
    scaled!(F16, ScaledInt8, "f16_scaled_int8"),
    scaled!(F16, ScaledInt4, "f16_scaled_int4"),
    scaled!(F16, PackedLatent, "f16_packed_latent"),
    scaled!(Bf16, ScaledE4m3, "bf16_scaled_e4m3"),
    scaled!(Bf16, ScaledE5m2, "bf16_scaled_e5m2"),
    scaled!(Bf16, ScaledInt8, "bf16_scaled_int8"),
    scaled!(Bf16, ScaledInt4, "bf16_scaled_int4"),
    scaled!(Bf16, PackedLatent, "bf16_packed_latent"),
];

/// The names of all kernels.
pub(crate) fn names() -> impl Iterator<Item = &'static CStr> {
    let widths = [ZERO, COPY, COPY_IN_ORDER, WRITE_SAME, GATHER_SAME];
    let of_widths = widths.into_iter().flatten().map(|(_, name)| name);
    let of_rows = ROWS.iter().flat_map(|kernels| {
        let four = kernels.four.into_iter().flat_map(|(a, b)| [a, b]);
        [kernels.write, kernels.gather].into_iter().chain(four)
    });
    let strided = [WRITE_STRIDED, GATHER_STRIDED];
    of_widths.chain(strided).chain(of_rows)
}

// --- whole blocks --------------------------------------------------------------------------------

const NO_PIECE: Piece = Piece {
    data: ptr::null_mut(),
    step: 0,
    span: 0,
};

/// Clears blocks `ids` of all pieces: calls `launch` for each launch that it takes.
pub(crate) fn zero<E>(
    pieces: &[Piece],
    ids: &[u32],
    mut launch: impl FnMut(&Launch, &BlockList) -> Result<(), E>,
) -> Result<(), E> {
    for pieces in pieces.chunks(MAX_PIECES) {
        let mut list = BlockList {
            table: ptr::null(),
            num_pieces: pieces.len() as u32,
            num_ids: 0,
            pieces: [NO_PIECE; MAX_PIECES],
            ids: [0; MAX_IDS],
        };
        list.pieces[..pieces.len()].copy_from_slice(pieces);
        for ids in ids.chunks(MAX_IDS) {
            list.num_ids = ids.len() as u32;
            list.ids[..ids.len()].copy_from_slice(ids);
            if let Some(how) = block_launch(&ZERO, pieces, ids.len(), UNROLLED) {
                launch(&how, &list)?;
            }
        }
    }
    Ok(())
}

/// Moves blocks in all pieces: calls `launch` for each launch that it takes. Moves that are not
/// `in_order` may come in any: no block is both read and written, and none is [`SPARE`].
pub(crate) fn copy<E>(
    pieces: &[Piece],
    moves: &[Move],
    in_order: bool,
    mut launch: impl FnMut(&Launch, &MoveList) -> Result<(), E>,
) -> Result<(), E> {
    let (widths, unrolled) = match in_order {
        true => (&COPY_IN_ORDER, 1),
        false => (&COPY, UNROLLED),
    };
    for pieces in pieces.chunks(MAX_PIECES) {
        let mut list = MoveList {
            table: ptr::null(),
            num_pieces: pieces.len() as u32,
            num_moves: 0,
            pieces: [NO_PIECE; MAX_PIECES],
            moves: [Move { from: 0, to: 0 }; MAX_MOVES],
        };
        list.pieces[..pieces.len()].copy_from_slice(pieces);
        let mut rest = moves;
        let mut parked = None;
        while !rest.is_empty() {
            (rest, parked) = list.take(rest, parked);
            let places = if in_order { 1 } else { list.num_moves as usize };
            if let Some(how) = block_launch(widths, pieces, places, unrolled) {
                launch(&how, &list)?;
            }
        }
    }
    Ok(())
}

impl MoveList {
    /// Takes as many moves as have room, after what an earlier launch left `parked`; returns the
    /// rest, and where this launch parks the spare page.
    ///
    /// The spare page is a register, which a launch does not hand to the next. Within a cycle the
    /// block that was read last is free until the next move writes it, and keeps it meanwhile.
    fn take<'a>(&mut self, moves: &'a [Move], parked: Option<u32>) -> (&'a [Move], Option<u32>) {
        let mut taken = 0;
        let mut is_held = parked.is_some();
        self.num_moves = 0;
        if let Some(free) = parked {
            self.push(Move {
                from: free,
                to: SPARE,
            });
        }
        // One place is left to park the spare page.
        while taken < moves.len() && (self.num_moves as usize) < MAX_MOVES - 1 {
            let next = moves[taken];
            is_held = (is_held || next.to == SPARE) && next.from != SPARE;
            self.push(next);
            taken += 1;
        }
        let (done, rest) = moves.split_at(taken);
        let free = done.last().map(|last| last.from);
        let parked = free.filter(|_| is_held && !rest.is_empty());
        if let Some(free) = parked {
            self.push(Move {
                from: SPARE,
                to: free,
            });
        }
        (rest, parked)
    }

    fn push(&mut self, next: Move) {
        self.moves[self.num_moves as usize] = next;
        self.num_moves += 1;
    }
}

/// The launch that does something with `places` blocks of each piece; none for nothing.
fn block_launch(widths: &Widths, pieces: &[Piece], places: usize, unrolled: u64) -> Option<Launch> {
    let of_piece = |piece: &Piece| piece.data as u64 | piece.step | piece.span;
    let (width, name) = widest(widths, pieces.iter().map(of_piece));
    let longest = pieces.iter().map(|piece| piece.span / width).max()?;
    if longest == 0 || places == 0 {
        return None;
    }
    let threads = longest.div_ceil(unrolled).next_multiple_of(32);
    let threads = threads.min(MAX_THREADS);
    let blocks = (pieces.len() * places) as u64;
    // The kernel goes on where the grid ends.
    let chunks = longest.div_ceil(threads * unrolled).min(MAX_GRID / blocks);
    Some(Launch {
        name,
        grid: [(blocks * chunks) as u32, 1, 1],
        block: [threads as u32, 1, 1],
    })
}

/// The widest loads and stores that addresses, distances and lengths allow, each list of which is
/// given as its bits put together.
fn widest(widths: &Widths, bits: impl Iterator<Item = u64>) -> (u64, &'static CStr) {
    let bits = bits.fold(0, |all, bits| all | bits);
    let fits = |&&(width, _): &&(u64, _)| bits.is_multiple_of(width);
    *widths.iter().find(fits).unwrap_or(&widths[2])
}

// --- rows ----------------------------------------------------------------------------------------

/// Stores or reads rows of `layers`, all in one form: calls `launch` for each launch that it takes.
/// `num_slots` is how many each of the layers has.
pub(crate) fn rows<E>(
    way: Way,
    (form, row_type): (Form, RowType),
    slots: &Slots,
    num_slots: u64,
    layers: &[Rows],
    mut launch: impl FnMut(&Launch, &RowBatch) -> Result<(), E>,
) -> Result<(), E> {
    for layers in layers.chunks(MAX_LAYERS) {
        let Some((how, units)) = row_launch(way, (form, row_type), slots.count, layers) else {
            continue;
        };
        let mut batch = RowBatch {
            slots: *slots,
            num_slots,
            num_layers: layers.len() as u32,
            units,
            layers: [layers[0]; MAX_LAYERS],
        };
        batch.layers[..layers.len()].copy_from_slice(layers);
        launch(&how, &batch)?;
    }
    Ok(())
}

/// The launch that does something with `count` rows, and the units of a row; none for nothing.
fn row_launch(
    way: Way,
    (form, row_type): (Form, RowType),
    count: u64,
    layers: &[Rows],
) -> Option<(Launch, u32)> {
    let (name, lanes) = row_kernel(way, (form, row_type), layers)?;
    let units = layers.iter().map(|rows| units_of(form, rows)).max()?;
    let units = u32::try_from(units).ok()?;
    if count == 0 || units == 0 {
        return None;
    }
    let together = MAX_THREADS / lanes;
    let blocks = count.saturating_mul(u64::from(units)).div_ceil(together);
    // The kernel goes on where the grid ends.
    let num_layers = layers.len() as u64;
    let blocks = blocks.min(MAX_GRID / num_layers);
    let launch = Launch {
        name,
        grid: [(num_layers * blocks) as u32, 1, 1],
        block: [lanes as u32, together as u32, 1],
    };
    Some((launch, units))
}

/// Runs of a row that threads take on their own: the keys and values of its heads.
fn units_of(form: Form, rows: &Rows) -> u64 {
    if form == Form::PackedLatent {
        return PACKED_LATENT_UNITS;
    }
    match rows.value_elements {
        0 => rows.heads,
        _ => rows.heads.saturating_mul(2),
    }
}

/// Four tiles, and the numbers behind them.
const PACKED_LATENT_UNITS: u64 = 5;

/// The kernel for rows in a form, and how many threads share a run.
fn row_kernel(
    way: Way,
    (form, row_type): (Form, RowType),
    layers: &[Rows],
) -> Option<(&'static CStr, u64)> {
    let longest = layers
        .iter()
        .map(|rows| rows.key_elements.max(rows.value_elements));
    let longest = longest.max()?;
    if form == Form::Same {
        return Some(same_kernel(way, layers));
    }
    let kernels = ROWS
        .iter()
        .find(|kernels| kernels.form == form && kernels.row_type == row_type)?;
    let (write, gather, lanes) = match kernels.four {
        Some((write, gather)) if layers.iter().all(|rows| is_in_fours(form, row_type, rows)) => {
            (write, gather, lanes_of(longest / 4))
        }
        Some(_) => (kernels.write, kernels.gather, lanes_of(longest)),
        None => (kernels.write, kernels.gather, 1),
    };
    let name = match way {
        Way::Write => write,
        Way::Gather => gather,
    };
    Some((name, lanes))
}

/// Threads that share a run of `pieces`: as many as give each some to have under way, but enough
/// that their loads lie together.
fn lanes_of(pieces: u64) -> u64 {
    let few = pieces.min(8);
    pieces.div_ceil(UNROLLED).max(few).clamp(1, MAX_THREADS)
}

fn same_kernel(way: Way, layers: &[Rows]) -> (&'static CStr, u64) {
    let longest = |of: &dyn Fn(&Rows) -> u64| {
        let runs = layers
            .iter()
            .map(|rows| of(rows) * rows.key_elements.max(rows.value_elements));
        runs.max().unwrap_or(0)
    };
    if layers.iter().any(|rows| rows.content != rows.element) {
        let name = match way {
            Way::Write => WRITE_STRIDED,
            Way::Gather => GATHER_STRIDED,
        };
        return (name, lanes_of(longest(&|_| 1)));
    }
    let widths = match way {
        Way::Write => &WRITE_SAME,
        Way::Gather => &GATHER_SAME,
    };
    let bits = layers.iter().map(|rows| {
        let lengths = (rows.key_elements | rows.value_elements) * rows.element;
        row_bits(rows) | cell_bits(rows) | lengths
    });
    let (width, name) = widest(widths, bits);
    (name, lanes_of(longest(&|rows| rows.element) / width))
}

/// Whether runs are fours of elements that lie together, at multiples of their size.
fn is_in_fours(form: Form, row_type: RowType, rows: &Rows) -> bool {
    let stored = match form {
        Form::F32 => 4,
        Form::F16 | Form::Bf16 => 2,
        _ => 1,
    };
    let row = match row_type {
        RowType::F32 => 4,
        RowType::F16 | RowType::Bf16 => 2,
    };
    (rows.key_elements | rows.value_elements).is_multiple_of(4)
        && rows.content == stored
        && row_bits(rows).is_multiple_of(4 * row)
        && cell_bits(rows).is_multiple_of(4 * stored)
}

/// The bits of all addresses and distances of rows outside the cache.
fn row_bits(rows: &Rows) -> u64 {
    let mut bits = rows.keys as u64 | rows.key_token;
    if rows.heads > 1 {
        bits |= rows.key_head;
    }
    if rows.value_elements > 0 {
        bits |= rows.values as u64 | rows.value_token;
        if rows.heads > 1 {
            bits |= rows.value_head;
        }
    }
    bits
}

/// The bits of all addresses and distances in the cache.
fn cell_bits(rows: &Rows) -> u64 {
    let mut bits = rows.cache as u64 | rows.kernel_block | rows.token;
    if rows.heads > 1 {
        bits |= rows.head;
    }
    if rows.value_elements > 0 {
        bits |= rows.value;
    }
    bits
}
