//! Where the tokens of a request go: one slot for each position.

/// The slot of a token that is stored nowhere.
pub const PAD_SLOT: i64 = -1;

/// Divides numbers below 2^32 by a constant: a multiplication instead of a division.
#[derive(Debug, Clone, Copy)]
pub(super) struct Divider {
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

    /// Quotient and remainder of `value`, which is below 2^32.
    ///
    /// With 2^64 - 1 = factor * divisor + r, the product is (value + 1) / divisor less
    /// (value + 1) * (r + 1) / (divisor * 2^64). The second part is more than 0 and at most
    /// 1 / divisor, so the whole part is that of value / divisor.
    #[inline(always)]
    pub const fn split(self, value: u64) -> (u64, u64) {
        let quotient = (((value + 1) as u128 * self.factor as u128) >> 64) as u64;
        (quotient, value - quotient * self.divisor)
    }
}

/// How the positions of a group become slots.
///
/// Tokens are dealt to the ranks in runs of `interleave`. The interleave divides the block size, so
/// a block holds whole runs, and the tokens of a rank fill its blocks one after another.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotRule {
    block: Divider,
    interleave: Divider,
    ranks: Divider,
    rank: u64,
    /// Columns of a block.
    ratio: u64,
    kernel_block_size: i64,
}

impl SlotRule {
    /// All numbers are 1 to 2^32 - 1, and `rank` is below `ranks`.
    pub fn new(
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

    /// The slots of a request's tokens. `row` holds its blocks and nothing else.
    pub fn map(&self, row: &[i32], positions: &[i64], slots: &mut [i64]) {
        let tokens = slots.iter_mut().zip(positions);
        match (self.ranks.divisor, self.ratio) {
            (1, 1) => tokens.for_each(|(slot, &at)| *slot = self.slot::<false, false>(row, at)),
            (1, _) => tokens.for_each(|(slot, &at)| *slot = self.slot::<false, true>(row, at)),
            _ => tokens.for_each(|(slot, &at)| *slot = self.slot::<true, true>(row, at)),
        }
    }

    /// The slot of one token; none when it is another rank's, or past the row.
    ///
    /// The kernel blocks of a block are consecutive, so its tokens are too: the first kernel block
    /// says where they start.
    #[inline(always)]
    fn slot<const DEALT: bool, const SPLIT: bool>(&self, row: &[i32], position: i64) -> i64 {
        let Ok(mut local) = u32::try_from(position).map(u64::from) else {
            return PAD_SLOT;
        };
        if DEALT {
            let (run, inside) = self.interleave.split(local);
            let (turn, owner) = self.ranks.split(run);
            if owner != self.rank {
                return PAD_SLOT;
            }
            local = turn * self.interleave.divisor + inside;
        }
        let (block, offset) = self.block.split(local);
        let column = if SPLIT { block * self.ratio } else { block };
        match row.get(column as usize) {
            Some(&id) => i64::from(id) * self.kernel_block_size + offset as i64,
            None => PAD_SLOT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn dividing_is_exact_at_the_edges() {
        let top = u64::from(u32::MAX);
        for divisor in [1, 2, 3, 5, 7, 16, 48, 1056, 65537, 1 << 31, top - 1, top] {
            let divider = Divider::new(divisor);
            for multiple in [0, 1, 2, 1000, top / divisor] {
                let edge = (multiple * divisor).min(top);
                for value in [edge.saturating_sub(1), edge, (edge + 1).min(top), top] {
                    assert_eq!(divider.split(value), (value / divisor, value % divisor));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn dividing_is_exact(value: u32, divisor in 1u32..) {
            let (value, divisor) = (u64::from(value), u64::from(divisor));
            prop_assert_eq!(
                Divider::new(divisor).split(value),
                (value / divisor, value % divisor)
            );
        }
    }
}
