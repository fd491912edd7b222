//! Where the tokens of a request go: one slot for each position.

use super::config::{GroupConfig, Ranks};
use crate::kernels::{Divider, SlotRule};

/// The slot of a token that is stored nowhere.
pub const PAD_SLOT: i64 = -1;

/// How the positions of a group become slots. The numbers were checked.
pub(super) fn slot_rule(group: &GroupConfig, ranks: Ranks) -> SlotRule {
    let ranks = match group.is_replicated {
        true => Ranks::ONE,
        false => ranks,
    };
    // One rank has all tokens, in runs of any length.
    let interleave = match ranks.size {
        1 => 1,
        _ => ranks.interleave,
    };
    SlotRule {
        block: Divider::new(group.block_size),
        interleave: Divider::new(interleave),
        ranks: Divider::new(ranks.size),
        rank: ranks.rank,
        ratio: group.block_size / group.kernel_block_size,
        kernel_block_size: group.kernel_block_size as i64,
    }
}
