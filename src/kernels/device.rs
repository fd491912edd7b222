//! The kernels of `kernels/device.cu`: their arguments, and which one to launch on which grid.
//!
//! A launch carries its block ids, moves and layers itself, at most 4000 bytes. What has more of
//! them is several launches, which one stream runs one after another.

mod tables;

use std::ffi::CStr;
use std::ptr;

pub(crate) use tables::{
    GroupTables, RowPatch, TABLE_KERNELS, TableStep, fill_tables, patch_tables,
};

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
    /// A [`Form`], for kernels that know several.
    form: u32,
    unused: u32,
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
    assert!(offset_of!(RowBatch, form) == 48);
    assert!(offset_of!(RowBatch, layers) == 56);
    assert!(size_of::<RowBatch>() == 3512);
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

/// A kernel for each way.
#[derive(Debug, Clone, Copy)]
struct Ways {
    write: &'static CStr,
    gather: &'static CStr,
}

/// The kernels of one type of rows.
struct RowKernels {
    row_type: RowType,
    /// One element at a time.
    converted: Ways,
    scaled: Ways,
    packed_latent: Ways,
    /// Four elements at a time. None for rows that are only copied.
    fours: &'static [(Form, Ways)],
}

/// A name, of text that ends in its NUL.
const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name of a kernel ends in one NUL"),
    }
}

macro_rules! ways {
    ($name:expr) => {
        Ways {
            write: name(concat!("kvpages_write_", $name, "\0")),
            gather: name(concat!("kvpages_gather_", $name, "\0")),
        }
    };
}

macro_rules! row_kernels {
    ($row_type:ident $row:literal: $($form:ident $stored:literal),*) => {
        RowKernels {
            row_type: RowType::$row_type,
            converted: ways!(concat!($row, "_converted")),
            scaled: ways!(concat!($row, "_scaled")),
            packed_latent: ways!(concat!($row, "_packed_latent")),
            fours: &[$((Form::$form, ways!(concat!($row, "_", $stored)))),*],
        }
    };
}

const ROWS: [RowKernels; 3] = [
    row_kernels!(F32 "f32": F16 "f16", Bf16 "bf16", F8E4m3 "e4m3", F8E5m2 "e5m2"),
    row_kernels!(F16 "f16": F32 "f32", Bf16 "bf16", F8E4m3 "e4m3", F8E5m2 "e5m2"),
    row_kernels!(Bf16 "bf16": F32 "f32", F16 "f16", F8E4m3 "e4m3", F8E5m2 "e5m2"),
];

/// The names of the kernels of a cache's memory.
pub(crate) fn names() -> impl Iterator<Item = &'static CStr> {
    let widths = [ZERO, COPY, COPY_IN_ORDER, WRITE_SAME, GATHER_SAME];
    let of_widths = widths.into_iter().flatten().map(|(_, name)| name);
    let of_rows = ROWS.iter().flat_map(|kernels| {
        let any = [kernels.converted, kernels.scaled, kernels.packed_latent];
        let fours = kernels.fours.iter().map(|&(_, ways)| ways);
        any.into_iter().chain(fours)
    });
    let of_rows = of_rows.flat_map(|ways| [ways.write, ways.gather]);
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
            form: form as u32,
            unused: 0,
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
    let kernels = ROWS.iter().find(|kernels| kernels.row_type == row_type)?;
    let fours = kernels.fours.iter().find(|(of, _)| *of == form);
    let in_fours = || layers.iter().all(|rows| is_in_fours(form, row_type, rows));
    let (ways, lanes) = match (form, fours) {
        (Form::PackedLatent, _) => (kernels.packed_latent, 1),
        (form, _) if is_scaled(form) => (kernels.scaled, 1),
        (_, Some(&(_, fours))) if in_fours() => (fours, lanes_of(longest / 4)),
        _ => (kernels.converted, lanes_of(longest)),
    };
    let name = match way {
        Way::Write => ways.write,
        Way::Gather => ways.gather,
    };
    Some((name, lanes))
}

/// Whether a scale lies behind each key and value.
fn is_scaled(form: Form) -> bool {
    use Form::{ScaledE4m3, ScaledE5m2, ScaledInt4, ScaledInt8};
    matches!(form, ScaledE4m3 | ScaledE5m2 | ScaledInt8 | ScaledInt4)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeSet, HashMap};
    use std::convert::Infallible;

    fn at(address: u64) -> *mut u8 {
        ptr::without_provenance_mut(address as usize)
    }

    fn piece(address: u64, step: u64, span: u64) -> Piece {
        let data = at(address);
        Piece { data, step, span }
    }

    fn text(name: &'static CStr) -> &'static str {
        name.to_str().unwrap()
    }

    #[test]
    fn kernels_are_those_of_the_image() {
        let all = || names().chain(TABLE_KERNELS).map(text);
        let ours: BTreeSet<&str> = all().collect();
        assert_eq!(ours.len(), all().count(), "no name twice");
        let Ok(ptx) = str::from_utf8(IMAGE) else {
            return; // the build was told to embed something else
        };
        let entries = ptx.lines().filter_map(|line| {
            let rest = line.strip_prefix(".visible .entry ")?;
            Some(rest.trim_end_matches('('))
        });
        assert_eq!(ours, entries.collect::<BTreeSet<_>>());
        assert!(IMAGE.ends_with(b"\n\0"));
        assert!(IMAGE.as_ptr().addr().is_multiple_of(64));
        assert!(ptx.contains("\n.version 7.0\n.target sm_80\n"));
    }

    fn zero_launches(pieces: &[Piece], ids: &[u32]) -> Vec<(Launch, BlockList)> {
        let mut launches = Vec::new();
        let done = zero(pieces, ids, |how, list| {
            launches.push((*how, list.clone()));
            Ok::<(), Infallible>(())
        });
        done.unwrap();
        launches
    }

    #[test]
    fn zero_is_as_wide_as_all_pieces_allow() {
        let cases: &[(&[Piece], &str, u32, u32)] = &[
            // 16 KiB by 256 threads of four vectors; one CTA for each of two blocks.
            (&[piece(64, 16384, 16384)], "kvpages_zero_v16", 2, 256),
            (&[piece(64, 16400, 16400)], "kvpages_zero_v16", 4, 256),
            (&[piece(64, 512, 64)], "kvpages_zero_v16", 2, 32),
            (&[piece(64, 2048, 2048)], "kvpages_zero_v16", 2, 32),
            (&[piece(64, 4096, 4096)], "kvpages_zero_v16", 2, 64),
            (&[piece(68, 512, 64)], "kvpages_zero_v4", 2, 32),
            (&[piece(64, 516, 64)], "kvpages_zero_v4", 2, 32),
            (&[piece(64, 512, 68)], "kvpages_zero_v4", 2, 32),
            (&[piece(64, 512, 66)], "kvpages_zero_v1", 2, 32),
            (
                &[piece(64, 512, 64), piece(65, 512, 64)],
                "kvpages_zero_v1",
                4,
                32,
            ),
        ];
        for (pieces, name, grid, threads) in cases {
            let launches = zero_launches(pieces, &[3, 9]);
            let [(how, list)] = launches.as_slice() else {
                panic!("one launch: {launches:?}")
            };
            assert_eq!(text(how.name), *name, "{pieces:?}");
            assert_eq!(how.grid, [*grid, 1, 1], "{pieces:?}");
            assert_eq!(how.block, [*threads, 1, 1], "{pieces:?}");
            assert_eq!((list.num_ids, list.ids[1]), (2, 9));
            assert!(list.table.is_null());
        }
    }

    #[test]
    fn what_is_too_much_for_a_launch_is_several() {
        let pieces = [piece(0, 64, 64); 130];
        let ids: Vec<u32> = (0..1201).collect();
        let launches = zero_launches(&pieces, &ids);
        let sizes: Vec<(u32, u32)> = launches
            .iter()
            .map(|(_, list)| (list.num_pieces, list.num_ids))
            .collect();
        let of_ids = |pieces| [(pieces, 600), (pieces, 600), (pieces, 1)];
        assert_eq!(sizes, [of_ids(64), of_ids(64), of_ids(2)].concat());
        assert_eq!(launches[8].1.ids[0], 1200);
    }

    #[test]
    fn nothing_to_do_is_no_launch() {
        assert!(zero_launches(&[], &[1]).is_empty());
        assert!(zero_launches(&[piece(0, 64, 64)], &[]).is_empty());
        assert!(zero_launches(&[piece(0, 64, 0)], &[1]).is_empty());
        assert!(row_launch(Way::Write, (Form::Same, RowType::F32), 0, &[rows_of(8)]).is_none());
    }

    #[test]
    fn grids_never_pass_the_limit() {
        let pieces = [piece(0, 1 << 40, 1 << 40); 64];
        let ids: Vec<u32> = (0..600).collect();
        for (how, list) in zero_launches(&pieces, &ids) {
            let blocks = list.num_pieces * list.num_ids;
            assert!(u64::from(how.grid[0]) <= MAX_GRID);
            assert_eq!(how.grid[0] % blocks, 0);
            assert!(how.grid[0] > 0);
        }
        let layers = [rows_of(4096); 24];
        let form = (Form::Same, RowType::F32);
        let (how, _) = row_launch(Way::Write, form, u64::MAX, &layers).unwrap();
        assert!(u64::from(how.grid[0]) <= MAX_GRID);
        assert_eq!(how.grid[0] % 24, 0);
    }

    /// Does what the launches say, on blocks that are one number each.
    fn after_copy(moves: &[Move], in_order: bool) -> (usize, HashMap<u32, u32>) {
        let mut blocks = HashMap::new();
        let mut launches = 0;
        let done = copy(&[piece(0, 64, 64)], moves, in_order, |_, list| {
            launches += 1;
            let mut spare = u32::MAX; // of this launch alone
            for next in &list.moves[..list.num_moves as usize] {
                let value = match next.from {
                    SPARE => spare,
                    from => *blocks.get(&from).unwrap_or(&from),
                };
                match next.to {
                    SPARE => spare = value,
                    to => drop(blocks.insert(to, value)),
                }
            }
            Ok::<(), Infallible>(())
        });
        done.unwrap();
        (launches, blocks)
    }

    #[test]
    fn cycles_go_on_in_the_next_launch() {
        // Block i takes what block i + 1 has, and the last what the first has.
        let cycle = |first: u32, length: u32| {
            let mut moves = vec![Move {
                from: first,
                to: SPARE,
            }];
            moves.extend((first..first + length - 1).map(|to| Move { from: to + 1, to }));
            moves.push(Move {
                from: SPARE,
                to: first + length - 1,
            });
            moves
        };
        for lengths in [
            &[5][..],
            &[298],
            &[299],
            &[300],
            &[597, 3],
            &[1000],
            &[296, 4, 700],
            &[297, 299, 298, 600],
            &[2; 400],
        ] {
            let mut first = 0;
            let mut moves = Vec::new();
            let mut expected = HashMap::new();
            for &length in lengths {
                moves.extend(cycle(first, length));
                for at in 0..length {
                    expected.insert(first + at, first + (at + 1) % length);
                }
                first += length;
            }
            let (launches, blocks) = after_copy(&moves, true);
            assert_eq!(blocks, expected, "{lengths:?}");
            assert_eq!(launches > 1, moves.len() >= MAX_MOVES, "{lengths:?}");
        }
    }

    #[test]
    fn moves_in_any_order_are_wider_grids() {
        let moves = [Move { from: 1, to: 0 }, Move { from: 2, to: 3 }];
        let mut seen = Vec::new();
        for in_order in [false, true] {
            let pieces = [piece(64, 16384, 16384); 2];
            let done = copy(&pieces, &moves, in_order, |how, _| {
                seen.push((text(how.name), how.grid[0]));
                Ok::<(), Infallible>(())
            });
            done.unwrap();
        }
        assert_eq!(
            seen,
            [("kvpages_copy_v16", 4), ("kvpages_copy_in_order_v16", 8)]
        );
    }

    /// One head of `elements` 2-byte elements, in a cache of blocks of 16 tokens.
    fn rows_of(elements: u64) -> Rows {
        let bytes = elements * 2;
        Rows {
            cache: at(1 << 20),
            keys: at(2 << 20),
            values: at(3 << 20),
            key_token: bytes,
            key_head: bytes,
            value_token: bytes,
            value_head: bytes,
            kernel_block: bytes * 32,
            token: bytes,
            head: bytes,
            content: 2,
            value: bytes * 16,
            kernel_block_slots: 16,
            heads: 1,
            key_elements: elements,
            value_elements: elements,
            element: 2,
            key_scale: 1.0,
            value_scale: 1.0,
        }
    }

    fn kernel_of(form: (Form, RowType), rows: Rows) -> (&'static str, [u32; 3]) {
        let (how, _) = row_launch(Way::Write, form, 100, &[rows]).unwrap();
        (text(how.name), how.block)
    }

    #[test]
    fn rows_of_one_type_are_copied_as_wide_as_they_lie() {
        let form = (Form::Same, RowType::F32);
        // 1024 elements of 2 bytes are 128 vectors: 32 threads of four.
        assert_eq!(
            kernel_of(form, rows_of(1024)),
            ("kvpages_write_same_v16", [32, 8, 1])
        );
        // 576 are 72.
        assert_eq!(
            kernel_of(form, rows_of(576)),
            ("kvpages_write_same_v16", [18, 14, 1])
        );
        assert_eq!(
            kernel_of(form, rows_of(16)),
            ("kvpages_write_same_v16", [2, 128, 1])
        );
        type Change = fn(&mut Rows);
        let changes: &[(Change, &str)] = &[
            (|rows| rows.cache = at(4), "_v4"),
            (|rows| rows.keys = at(2), "_v1"),
            (|rows| rows.values = at(4), "_v4"),
            (|rows| rows.key_token += 4, "_v4"),
            (|rows| rows.value_token += 2, "_v1"),
            (|rows| rows.kernel_block += 8, "_v4"),
            (|rows| rows.token += 2, "_v1"),
            (|rows| rows.value += 4, "_v4"),
            (|rows| rows.key_elements -= 2, "_v4"),
            (|rows| rows.value_elements -= 1, "_v1"),
            // No head is another one's neighbour, and no values are there.
            (|rows| rows.head += 2, "_v16"),
            (|rows| rows.key_head += 2, "_v16"),
            (|rows| (rows.heads, rows.head) = (2, 2050), "_v1"),
            (|rows| (rows.heads, rows.key_head) = (2, 2052), "_v4"),
            (|rows| (rows.heads, rows.value_head) = (2, 2052), "_v4"),
            (
                |rows| (rows.value_elements, rows.values, rows.value) = (0, at(1), 1),
                "_v16",
            ),
            (|rows| rows.content = 32, "_strided"),
        ];
        for (index, (change, suffix)) in changes.iter().enumerate() {
            let mut rows = rows_of(1024);
            change(&mut rows);
            let (name, _) = kernel_of(form, rows);
            assert_eq!(name, format!("kvpages_write_same{suffix}"), "case {index}");
        }
    }

    #[test]
    fn rows_of_another_type_are_converted_four_at_a_time_where_they_lie_so() {
        let form = (Form::Bf16, RowType::F32);
        let good = Rows {
            key_token: 4096,
            value_token: 4096,
            ..rows_of(1024)
        };
        assert_eq!(
            kernel_of(form, good),
            ("kvpages_write_f32_bf16", [64, 4, 1])
        );
        type Change = fn(&mut Rows);
        let changes: &[Change] = &[
            |rows| rows.cache = at(4),
            |rows| rows.keys = at(8),
            |rows| rows.values = at(8),
            |rows| rows.key_token += 8,
            |rows| rows.token += 4,
            |rows| rows.key_elements -= 2,
            |rows| rows.content = 4,
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut rows = good;
            change(&mut rows);
            let (name, _) = kernel_of(form, rows);
            assert_eq!(name, "kvpages_write_f32_converted", "case {index}");
        }
    }

    #[test]
    fn every_form_has_its_kernel() {
        use Form::*;
        for (row_type, row) in [
            (RowType::F32, "f32"),
            (RowType::F16, "f16"),
            (RowType::Bf16, "bf16"),
        ] {
            let scaled = [ScaledE4m3, ScaledE5m2, ScaledInt8, ScaledInt4];
            for form in scaled {
                let (name, block) = kernel_of((form, row_type), rows_of(64));
                assert_eq!(name, format!("kvpages_write_{row}_scaled"));
                assert_eq!(block, [1, 256, 1]);
            }
            let packed = (PackedLatent, row_type);
            let (how, units) = row_launch(Way::Gather, packed, 512, &[rows_of(512)]).unwrap();
            assert_eq!(
                text(how.name),
                format!("kvpages_gather_{row}_packed_latent")
            );
            assert_eq!((units, how.grid[0]), (5, 10));
        }
    }

    #[test]
    fn layers_go_in_batches_with_the_most_units_of_each() {
        let mut layers = vec![rows_of(64); 30];
        layers[3].heads = 4;
        layers[29].value_elements = 0;
        let slots = Slots {
            slots: ptr::null(),
            blocks: ptr::null(),
            block_slots: 16,
            count: 33,
        };
        let mut seen = Vec::new();
        let form = (Form::Same, RowType::F32);
        let done = rows(Way::Gather, form, &slots, 99, &layers, |how, batch| {
            // Eight vectors by eight threads, 32 units at a time.
            assert_eq!(how.block, [8, 32, 1]);
            assert_eq!((batch.num_slots, batch.slots.count), (99, 33));
            seen.push((batch.num_layers, batch.units, how.grid[0]));
            Ok::<(), Infallible>(())
        });
        done.unwrap();
        assert_eq!(seen, [(24, 8, 24 * 9), (6, 2, 6 * 3)]);
    }

    #[test]
    fn what_a_launch_returns_ends_the_rest() {
        let mut calls = 0;
        let failed = zero(&[piece(0, 64, 64)], &[0; 1000], |_, _| {
            calls += 1;
            Err("no driver")
        });
        assert_eq!((failed, calls), (Err("no driver"), 1));
    }
}
