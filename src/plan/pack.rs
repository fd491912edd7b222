//! Which layers share memory, and where their pages lie.

use std::collections::HashMap;

use super::{Group, GroupSpec, PoolTensor};
use crate::num::{Overflow, product, round_up, sum};

/// Memory of one page in every block, before the number of blocks is known.
pub(super) struct Slot {
    /// Bytes of the page.
    page: u64,
    /// The layers, at most one of each group.
    layers: Vec<usize>,
}

/// How the pages of groups share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// As the reference does: packed, with slots for each page size, when all groups are sets or the
    /// engine asks for it; else a tensor for each place in a group.
    BySets {
        /// Whether the engine asks for it.
        cross_layer_blocks: bool,
    },
    /// A tensor for each place in a group. All pages are equal.
    ByPlace,
    /// Packed: each group lies from the start of a block. Slots begin at multiples of `step`.
    Overlaid {
        /// Bytes; what every layer's page must be aligned to.
        step: u64,
    },
}

/// All memory of a worker.
pub(super) struct Pools {
    /// Where each lies in a packed block, and the slot.
    slots: Vec<(u64, Slot)>,
    /// Whether the slots of a block lie together, block after block.
    is_packed: bool,
    /// Bytes of one block in all slots.
    pub bytes_per_block: u64,
}

impl Pools {
    /// Memory for the layers of `groups`.
    pub fn of(groups: &[Group], packing: Packing) -> Result<Pools, Overflow> {
        let all_sets = groups
            .iter()
            .all(|group| matches!(group.spec, GroupSpec::Set(_)));
        let several = groups.len() > 1;
        let (is_packed, slots) = match packing {
            Packing::BySets { cross_layer_blocks }
                if several && (all_sets || cross_layer_blocks) =>
            {
                (true, slots_by_page(groups))
            }
            Packing::Overlaid { step } if several => {
                return overlaid_pools(groups, step);
            }
            _ if several => (false, slots_by_place(groups)),
            _ => (false, groups.first().map_or_else(Vec::new, slots_of_layers)),
        };
        let bytes_per_block = sum("a block", slots.iter().map(|slot| slot.page))?;
        let mut offset = 0;
        let mut placed = Vec::with_capacity(slots.len());
        for slot in slots {
            let start = if is_packed { offset } else { 0 };
            offset = sum("a packed block", [offset, slot.page])?;
            placed.push((start, slot));
        }
        Ok(Pools {
            slots: placed,
            is_packed,
            bytes_per_block,
        })
    }

    /// Whether the slots of a block lie together, block after block.
    pub fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// The allocations for a number of blocks.
    pub fn tensors(self, num_blocks: u64) -> Result<Vec<PoolTensor>, Overflow> {
        let mut tensors = Vec::with_capacity(self.slots.len());
        for (offset, slot) in self.slots {
            let (step, block_stride) = match self.is_packed {
                true => (self.bytes_per_block, self.bytes_per_block),
                false => (slot.page, 0),
            };
            tensors.push(PoolTensor {
                size: product("a tensor", [step, num_blocks])?,
                offset,
                block_stride,
                layers: slot.layers,
            });
        }
        Ok(tensors)
    }
}

/// Slots of blocks that belong to one group each: every group lies in a block from its start, its
/// largest pages first, so a block is as large as the largest group and no larger.
fn overlaid_pools(groups: &[Group], step: u64) -> Result<Pools, Overflow> {
    let step = step.max(1);
    let mut slots: Vec<(u64, Slot)> = Vec::new();
    let mut slot_at = HashMap::new();
    let mut bytes_per_block = 0;
    for group in groups {
        let mut members: Vec<(u64, usize)> = Vec::with_capacity(group.layers.len());
        for (place, &layer) in group.layers.iter().enumerate() {
            members.push((group.spec.page_of(place), layer));
        }
        // Layers of one page size keep their order.
        members.sort_by_key(|&(page, _)| std::cmp::Reverse(page));
        let mut offset = 0;
        for (page, layer) in members {
            let slot = *slot_at.entry((offset, page)).or_insert_with(|| {
                let layers = Vec::new();
                slots.push((offset, Slot { page, layers }));
                slots.len() - 1
            });
            slots[slot].1.layers.push(layer);
            let room = round_up("a packed slot", page, step)?;
            offset = sum("a packed block", [offset, room])?;
        }
        bytes_per_block = bytes_per_block.max(offset);
    }
    Ok(Pools {
        slots,
        is_packed: true,
        bytes_per_block,
    })
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
