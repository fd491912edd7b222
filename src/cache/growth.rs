//! Which bytes the blocks of a cache are, from the first one to any other.

use std::ops::Range;

use super::{Blueprint, Region};

impl Blueprint {
    /// For each allocation the bytes of blocks `blocks`: one range for each region of it. The last
    /// block's range reaches to the end of the region.
    pub(super) fn block_bytes(&self, blocks: Range<u64>) -> Vec<Vec<Range<u64>>> {
        let mut of_allocation = vec![Vec::new(); self.allocations().len()];
        for region in self.regions() {
            if let Some(ranges) = of_allocation.get_mut(region.allocation) {
                ranges.push(start_of(region, blocks.start)..start_of(region, blocks.end));
            }
        }
        of_allocation
    }
}

/// Where a block starts; one block behind the last starts where the region ends.
fn start_of(region: &Region, block: u64) -> u64 {
    if block >= region.num_blocks {
        return region.offset_bytes.saturating_add(region.size_bytes);
    }
    // The audit proved that all blocks lie inside, so nothing wraps.
    let inside = block.saturating_mul(region.block_step_bytes);
    region.offset_bytes.saturating_add(inside)
}
