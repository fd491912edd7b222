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
        if self.ranks.divisor == 1 {
            self.map_runs(row, positions, slots);
        } else {
            self.map_each(row, positions, slots);
        }
    }

    /// As [`SlotRule::slot`] of every token.
    fn map_each(&self, row: &[i32], positions: &[i64], slots: &mut [i64]) {
        for (slot, &position) in slots.iter_mut().zip(positions) {
            *slot = self.slot(row, position);
        }
    }

    /// The same for one rank. Tokens mostly follow each other, so those that may fill the block of
    /// the first one are looked at together.
    fn map_runs(&self, row: &[i32], mut positions: &[i64], mut slots: &mut [i64]) {
        while let Some(&first) = positions.first() {
            let slot = self.slot(row, first);
            // Past the row there is no block to fill.
            let (offset, end) = match slot {
                PAD_SLOT => (0, 1),
                _ => (self.block.split(first as u64).1, self.block.divisor),
            };
            let run = positions.len().min((end - offset) as usize);
            let (these, later) = positions.split_at(run);
            let (out, out_later) = slots.split_at_mut(run);
            let start = first.wrapping_sub(offset as i64);
            if !shift_within(these, out, start, end as i64, slot.wrapping_sub(first)) {
                self.map_each(row, these, out);
            }
            (positions, slots) = (later, out_later);
        }
    }

    /// The slot of one token; none when it is another rank's, or past the row.
    ///
    /// The kernel blocks of a block are consecutive, so its tokens are too: the first kernel block
    /// says where they start.
    #[inline(always)]
    fn slot(&self, row: &[i32], position: i64) -> i64 {
        let Ok(position) = u32::try_from(position) else {
            return PAD_SLOT;
        };
        let (run, inside) = self.interleave.split(position.into());
        let (turn, owner) = self.ranks.split(run);
        if owner != self.rank {
            return PAD_SLOT;
        }
        let local = turn * self.interleave.divisor + inside;
        let (block, offset) = self.block.split(local);
        match row.get((block * self.ratio) as usize) {
            Some(&id) => i64::from(id) * self.kernel_block_size + offset as i64,
            None => PAD_SLOT,
        }
    }
}

/// Adds `shift` to all positions, and says whether they are the `length` from `start` on.
///
/// Without a branch in the loop, so that it becomes vector instructions.
#[inline(always)]
fn shift_within(positions: &[i64], out: &mut [i64], start: i64, length: i64, shift: i64) -> bool {
    let mut outside = 0; // negative once a position is before the start or past the end
    for (slot, &position) in out.iter_mut().zip(positions) {
        let offset = position.wrapping_sub(start);
        outside |= offset | (length - 1).wrapping_sub(offset);
        *slot = position.wrapping_add(shift);
    }
    outside >= 0
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
