//! The bodies in `kernels/`, as `kernels/host.cc` offers them.

#![allow(unsafe_code)]

pub(crate) mod device;
mod loaded;

pub(crate) use loaded::Loaded;

/// `kvp::Piece`: memory in which blocks lie at a constant distance.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub data: *mut u8,
    pub step: u64,
    pub span: u64,
}

/// `kvp::Move`: copies one block over another.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub from: u32,
    pub to: u32,
}

/// The spare page, as a block of a [`Move`].
pub(crate) const SPARE: u32 = u32::MAX;

/// `kvp::Rows`: one layer's cache and the rows outside it. Distances are bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub cache: *mut u8,
    pub keys: *mut u8,
    pub values: *mut u8,
    pub key_token: u64,
    pub key_head: u64,
    pub value_token: u64,
    pub value_head: u64,
    pub kernel_block: u64,
    pub token: u64,
    pub head: u64,
    pub content: u64,
    pub value: u64,
    pub kernel_block_slots: u64,
    pub heads: u64,
    pub key_elements: u64,
    pub value_elements: u64,
    pub element: u64,
    pub key_scale: f32,
    pub value_scale: f32,
}

/// `kvp::Slots`: which slot each row means.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    pub slots: *const i64,
    pub blocks: *const i32,
    pub block_slots: u64,
    pub count: u64,
}

// `kernels/host.cc` says the same; neither side compiles when a field is elsewhere.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Piece, data) == 0);
    assert!(offset_of!(Piece, step) == 8);
    assert!(offset_of!(Piece, span) == 16);
    assert!(size_of::<Piece>() == 24);
    assert!(offset_of!(Move, from) == 0);
    assert!(offset_of!(Move, to) == 4);
    assert!(size_of::<Move>() == 8);
    assert!(offset_of!(Rows, cache) == 0);
    assert!(offset_of!(Rows, keys) == 8);
    assert!(offset_of!(Rows, values) == 16);
    assert!(offset_of!(Rows, key_token) == 24);
    assert!(offset_of!(Rows, key_head) == 32);
    assert!(offset_of!(Rows, value_token) == 40);
    assert!(offset_of!(Rows, value_head) == 48);
    assert!(offset_of!(Rows, kernel_block) == 56);
    assert!(offset_of!(Rows, token) == 64);
    assert!(offset_of!(Rows, head) == 72);
    assert!(offset_of!(Rows, content) == 80);
    assert!(offset_of!(Rows, value) == 88);
    assert!(offset_of!(Rows, kernel_block_slots) == 96);
    assert!(offset_of!(Rows, heads) == 104);
    assert!(offset_of!(Rows, key_elements) == 112);
    assert!(offset_of!(Rows, value_elements) == 120);
    assert!(offset_of!(Rows, element) == 128);
    assert!(offset_of!(Rows, key_scale) == 136);
    assert!(offset_of!(Rows, value_scale) == 140);
    assert!(size_of::<Rows>() == 144);
    assert!(offset_of!(Slots, slots) == 0);
    assert!(offset_of!(Slots, blocks) == 8);
    assert!(offset_of!(Slots, block_slots) == 16);
    assert!(offset_of!(Slots, count) == 24);
    assert!(size_of::<Slots>() == 32);
    assert!(offset_of!(SlotRule, block) == 0);
    assert!(offset_of!(SlotRule, interleave) == 16);
    assert!(offset_of!(SlotRule, ranks) == 32);
    assert!(offset_of!(SlotRule, rank) == 48);
    assert!(offset_of!(SlotRule, ratio) == 56);
    assert!(offset_of!(SlotRule, kernel_block_size) == 64);
    assert!(size_of::<SlotRule>() == 72);
    assert!(offset_of!(Divider, factor) == 0);
    assert!(offset_of!(Divider, divisor) == 8);
    assert!(size_of::<Divider>() == 16);
};

/// `kvp::Divider`: divides numbers below 2^32 by a constant.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Divider {
    factor: u64,
    divisor: u64,
}

impl Divider {
    /// `divisor` is 1 to 2^32 - 1.
    pub const fn new(divisor: u64) -> Divider {
        Divider {
            factor: u64::MAX / divisor,
            divisor,
        }
    }
}

/// `kvp::SlotRule`: how the positions of a group become slots.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRule {
    /// Tokens of a block.
    pub block: Divider,
    /// Tokens that follow each other on one rank; divides the tokens of a block.
    pub interleave: Divider,
    /// Ranks that share the tokens of a request.
    pub ranks: Divider,
    /// Which of them this is.
    pub rank: u64,
    /// Entries of a block in a row.
    pub ratio: u64,
    /// Tokens of a kernel block.
    pub kernel_block_size: i64,
}

/// `kvp::Row`: ids, and how many there are.
#[repr(C)]
#[derive(Clone, Copy)]
struct Row {
    ids: *const i32,
    length: u64,
}

impl Row {
    fn of(ids: &[i32]) -> Row {
        Row {
            ids: ids.as_ptr(),
            length: ids.len() as u64,
        }
    }
}

/// Makes `to` the ids from `begin` on, and null past them up to `end`.
///
/// # Panics
/// When `to` has less than `end` entries or less than there are ids.
pub(crate) fn gather_row(ids: &[i32], to: &mut [i32], begin: usize, end: usize) {
    assert!(to.len() >= end.max(ids.len()), "a row that holds its ids");
    // SAFETY: columns from 0 to the larger of the two lengths are written, which `to` has.
    unsafe { kvpages_host_gather_row(Row::of(ids), to.as_mut_ptr(), begin as u64, end as u64) }
}

/// The slots of the tokens of a request whose blocks are `ids`; of as many as both lists have.
pub(crate) fn map_slots(rule: &SlotRule, ids: &[i32], positions: &[i64], slots: &mut [i64]) {
    let count = positions.len().min(slots.len()) as u64;
    // SAFETY: both lists have `count` entries, and the row is as long as it says.
    unsafe {
        kvpages_host_map_slots(
            rule,
            Row::of(ids),
            positions.as_ptr(),
            slots.as_mut_ptr(),
            count,
        );
    }
}

/// The type of rows that are converted.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowType {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
}

/// How elements are stored.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Same = 0,
    F32 = 1,
    F16 = 2,
    Bf16 = 3,
    F8E4m3 = 4,
    F8E5m2 = 5,
    ScaledE4m3 = 6,
    ScaledE5m2 = 7,
    ScaledInt8 = 8,
    ScaledInt4 = 9,
    PackedLatent = 10,
}

unsafe extern "C" {
    /// Sets every byte of blocks `ids` of every piece to `value`.
    pub(crate) fn kvpages_host_fill(
        pieces: *const Piece,
        num_pieces: usize,
        ids: *const u32,
        num_ids: usize,
        value: u8,
    );

    /// Moves blocks in the order given, in every piece.
    pub(crate) fn kvpages_host_copy(
        pieces: *const Piece,
        num_pieces: usize,
        moves: *const Move,
        num_moves: usize,
        spare: *mut u8,
    );

    /// Stores rows. `row_type` is a [`RowType`], `form` a [`Form`].
    pub(crate) fn kvpages_host_write(
        form: u32,
        row_type: u32,
        rows: *const Rows,
        slots: *const Slots,
    );

    /// Reads rows.
    pub(crate) fn kvpages_host_gather(
        form: u32,
        row_type: u32,
        rows: *const Rows,
        slots: *const Slots,
    );

    /// Copies the ids of a row from column `begin` on, and nulls what follows up to `end`.
    fn kvpages_host_gather_row(row: Row, to: *mut i32, begin: u64, end: u64);

    /// Finds the slots of `count` tokens.
    fn kvpages_host_map_slots(
        rule: *const SlotRule,
        row: Row,
        positions: *const i64,
        slots: *mut i64,
        count: u64,
    );
}
