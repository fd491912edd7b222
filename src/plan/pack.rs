//! Which layers share memory, and where their pages lie.

use std::collections::HashMap;

use super::{Group, GroupSpec, PoolTensor};
use crate::num::{Overflow, product, sum};

/// Memory of one page in every block, before the number of blocks is known.
pub(super) struct Slot {
    /// Bytes of the page.
    page: u64,
    /// The layers, at most one of each group.
    layers: Vec<usize>,
}

/// All memory of a worker.
pub(super) struct Pools {
    slots: Vec<Slot>,
    /// Whether the slots of a block lie together, block after block.
    is_packed: bool,
    /// Bytes of one block in all slots.
    pub bytes_per_block: u64,
}

impl Pools {
    /// Memory for the layers of `groups`.
    pub fn of(groups: &[Group], cross_layer_blocks: bool) -> Result<Pools, Overflow> {
        let all_sets = groups
            .iter()
            .all(|group| matches!(group.spec, GroupSpec::Set(_)));
        let is_packed = groups.len() > 1 && (all_sets || cross_layer_blocks);
        let slots = match groups {
            _ if is_packed => slots_by_page(groups),
            [only] => slots_of_layers(only),
            _ => slots_by_place(groups),
        };
        let bytes_per_block = sum("a block", slots.iter().map(|slot| slot.page))?;
        Ok(Pools {
            slots,
            is_packed,
            bytes_per_block,
        })
    }

    /// The allocations for a number of blocks.
    pub fn tensors(self, num_blocks: u64) -> Result<Vec<PoolTensor>, Overflow> {
        let mut offset = 0;
        let mut tensors = Vec::with_capacity(self.slots.len());
        for slot in self.slots {
            let (step, block_stride) = match self.is_packed {
                true => (self.bytes_per_block, self.bytes_per_block),
                false => (slot.page, 0),
            };
            tensors.push(PoolTensor {
                size: product("a tensor", [step, num_blocks])?,
                offset: if self.is_packed { offset } else { 0 },
                block_stride,
                layers: slot.layers,
            });
            offset = sum("a packed block", [offset, slot.page])?;
        }
        Ok(tensors)
    }
}

/// One slot for each layer of the only group.
fn slots_of_layers(group: &Group) -> Vec<Slot> {
    let slots = group.layers.iter().enumerate().map(|(place, &layer)| Slot {
        page: group.spec.page_of(place),
        layers: vec![layer],
    });
    slots.collect()
}

/// Slot `i` holds the `i`-th layer of every group. All pages are equal.
fn slots_by_place(groups: &[Group]) -> Vec<Slot> {
    let longest = groups
        .iter()
        .map(|group| group.layers.len())
        .max()
        .unwrap_or(0);
    let page = groups
        .iter()
        .map(|group| group.spec.page_of(0))
        .max()
        .unwrap_or(0);
    let slots = (0..longest).map(|place| Slot {
        page,
        layers: groups
            .iter()
            .filter_map(|group| group.layers.get(place).copied())
            .collect(),
    });
    slots.collect()
}

/// Slots of one page size, as many as a group has layers of it at most.
struct Bucket {
    slots: Vec<Slot>,
    /// The group that was last put in, and how many of its layers are in.
    group: usize,
    filled: usize,
}

/// The `k`-th slot of a page size holds the `k`-th layer of that page size of every group.
fn slots_by_page(groups: &[Group]) -> Vec<Slot> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut bucket_of_page = HashMap::new();
    for (number, group) in groups.iter().enumerate() {
        for (place, &layer) in group.layers.iter().enumerate() {
            let page = group.spec.page_of(place);
            let bucket = *bucket_of_page.entry(page).or_insert_with(|| {
                buckets.push(Bucket {
                    slots: Vec::new(),
                    group: number,
                    filled: 0,
                });
                buckets.len() - 1
            });
            let bucket = &mut buckets[bucket];
            if bucket.group != number {
                bucket.group = number;
                bucket.filled = 0;
            }
            match bucket.slots.get_mut(bucket.filled) {
                Some(slot) => slot.layers.push(layer),
                None => bucket.slots.push(Slot {
                    page,
                    layers: vec![layer],
                }),
            }
            bucket.filled += 1;
        }
    }
    buckets
        .into_iter()
        .flat_map(|bucket| bucket.slots)
        .collect()
}
