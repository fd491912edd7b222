//! The bodies in `kernels/`, as `kernels/host.cc` offers them.

/// `kvp::Piece`: memory in which blocks lie at a constant distance.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub data: *mut u8,
    pub step: u64,
    pub span: u64,
}

/// `kvp::Move`: copies one block over another.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    pub from: u32,
    pub to: u32,
}

/// The spare page, as a block of a [`Move`].
pub(super) const SPARE: u32 = u32::MAX;

/// `kvp::Rows`: one layer's cache and the rows outside it. Distances are bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
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
pub(super) struct Slots {
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
};

/// The type of rows that are converted.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowType {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
}

/// How elements are stored.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
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
    /// Clears blocks `ids` of every piece.
    pub(super) fn kvpages_host_zero(
        pieces: *const Piece,
        num_pieces: usize,
        ids: *const u32,
        num_ids: usize,
    );

    /// Moves blocks in the order given, in every piece.
    pub(super) fn kvpages_host_copy(
        pieces: *const Piece,
        num_pieces: usize,
        moves: *const Move,
        num_moves: usize,
        spare: *mut u8,
    );

    /// Stores rows. `row_type` is a [`RowType`], `form` a [`Form`].
    pub(super) fn kvpages_host_write(
        form: u32,
        row_type: u32,
        rows: *const Rows,
        slots: *const Slots,
    );

    /// Reads rows.
    pub(super) fn kvpages_host_gather(
        form: u32,
        row_type: u32,
        rows: *const Rows,
        slots: *const Slots,
    );
}
