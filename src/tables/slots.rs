//! Where the tokens of a request go: one slot for each position.

use crate::kernels::{Divider, SlotRule};

/// The slot of a token that is stored nowhere.
pub const PAD_SLOT: i64 = -1;

/// How the positions of a group become slots. All numbers are 1 to 2^32 - 1, and `rank` is below
/// `ranks`.
pub(super) fn slot_rule(
    block_size: u64,
    kernel_block_size: u64,
    ranks: u64,
    rank: u64,
    interleave: u64,
) -> SlotRule {
    SlotRule {
        block: Divider::new(block_size),
        interleave: Divider::new(interleave),
        ranks: Divider::new(ranks),
        rank,
        ratio: block_size / kernel_block_size,
        kernel_block_size: kernel_block_size as i64,
    }
}
