//! A cache in numbers, as it is now.

use serde::Serialize;

use super::{Blueprint, Cache, Fresh, Region};
use crate::json::{self, Each};
use crate::memory::Place;

/// The version of the JSON. Keys may be added to one version; none goes or changes its meaning.
pub const VERSION: u64 = 1;

/// A cache in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Snapshot {
    /// See [`Cache::generation`].
    pub generation: u64,
    /// Blocks that have memory.
    pub num_blocks: u64,
    /// Blocks that have addresses.
    pub max_blocks: u64,
    /// Bytes of a block in all allocations.
    pub bytes_per_block: u64,
    /// Bytes of all blocks that have memory.
    pub block_bytes: u64,
    /// Bytes of memory that are taken.
    pub held_bytes: u64,
    /// Bytes that have addresses.
    pub allocation_bytes: u64,
    /// Whether blocks that were never written are poisoned.
    pub is_poisoned: bool,
    /// What of it is used, where the caller told.
    pub usage: Option<Usage>,
}

/// What of a cache is used.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Usage {
    /// Blocks in use, of all groups.
    pub blocks_in_use: u64,
    /// Blocks in use of one that has memory, 0 to 1.
    pub utilisation: f64,
    /// Bytes of the blocks in use.
    pub bytes_in_use: u64,
    /// What of these bytes is for something, where it is known whose blocks they are.
    pub of_groups: Option<BlockBytes>,
}

/// The bytes of blocks, by what they are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BlockBytes {
    /// Keys, values, scales and states.
    pub content_bytes: u64,
    /// Pages are padded with them.
    pub padding_bytes: u64,
    /// Bytes that this group does not use: other groups do, or nobody.
    pub unused_bytes: u64,
}

impl BlockBytes {
    /// Adds `count` times as much. Numbers that fit nowhere stop at the largest.
    fn add(&mut self, count: u64, other: &BlockBytes) {
        for (sum, bytes) in [
            (&mut self.content_bytes, other.content_bytes),
            (&mut self.padding_bytes, other.padding_bytes),
            (&mut self.unused_bytes, other.unused_bytes),
        ] {
            *sum = sum.saturating_add(count.saturating_mul(bytes));
        }
    }
}

/// What a block of a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GroupSnapshot {
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block; none when no layer of the group has a backend.
    pub kernel_block_size: Option<u64>,
    /// Layers with pages of their own.
    pub num_layers: u64,
    /// Its bytes in all allocations.
    #[serde(flatten)]
    pub per_block: BlockBytes,
}

/// What a caller told is not true of the cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    /// Neither one number nor one for each group.
    #[error(
        "{given} numbers of blocks in use are given; the cache has {num_groups} groups: give 1 for all or one for each"
    )]
    Groups {
        /// Numbers given.
        given: usize,
        /// Groups there are.
        num_groups: usize,
    },
    /// More blocks than there are.
    #[error("{blocks_in_use} blocks are in use, but the cache has {num_blocks}")]
    TooMany {
        /// Blocks of all groups.
        blocks_in_use: u64,
        /// Blocks that have memory.
        num_blocks: u64,
    },
}

/// Why there is no text of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotTextError {
    /// What the caller told is not true.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// The host has no memory for it.
    #[error(transparent)]
    NoMemory(#[from] json::NoMemory),
}

impl Cache {
    /// The cache in numbers. `in_use` says how many blocks hold something: nothing, one number for
    /// all groups together, or one for each group. Takes no memory and no lock.
    pub fn snapshot(&self, in_use: &[u64]) -> Result<Snapshot, UsageError> {
        let blueprint = self.blueprint();
        let (num_blocks, bytes_per_block) = (self.num_blocks(), blueprint.bytes_per_block());
        Ok(Snapshot {
            generation: self.generation(),
            num_blocks,
            max_blocks: blueprint.num_blocks(),
            bytes_per_block,
            block_bytes: num_blocks.saturating_mul(bytes_per_block),
            held_bytes: self.held_bytes(),
            allocation_bytes: blueprint.total_bytes(),
            is_poisoned: self.fresh() == Fresh::Poison,
            usage: usage(blueprint, num_blocks, in_use)?,
        })
    }

    /// The same as one JSON object, with its groups, allocations and regions.
    pub fn snapshot_json(&self, in_use: &[u64]) -> Result<String, SnapshotTextError> {
        let blueprint = self.blueprint();
        let is_by_group = in_use.len() == blueprint.num_groups();
        let group_object = |number| GroupObject {
            group: blueprint.group_snapshot(number),
            blocks_in_use: in_use.get(number).copied().filter(|_| is_by_group),
        };
        let groups = || (0..blueprint.num_groups()).map(group_object);
        let allocations = || {
            let all = self.allocations().iter();
            all.map(|allocation| AllocationObject {
                size_bytes: allocation.bytes(),
                held_bytes: allocation.held_bytes(),
            })
        };
        let whole = SnapshotObject {
            snapshot_version: VERSION,
            kind: "cache",
            cuda_device: match self.place() {
                Place::Host => None,
                Place::Cuda(context) => Some(context.ordinal()),
            },
            cache: self.snapshot(in_use)?,
            groups: Each(groups),
            allocations: Each(allocations),
            regions: blueprint.regions(),
        };
        Ok(json::text(&whole)?)
    }
}

#[derive(Serialize)]
struct SnapshotObject<'a, G: Serialize, A: Serialize> {
    snapshot_version: u64,
    kind: &'static str,
    cuda_device: Option<u32>,
    #[serde(flatten)]
    cache: Snapshot,
    groups: G,
    allocations: A,
    regions: &'a [Region],
}

#[derive(Serialize)]
struct GroupObject {
    #[serde(flatten)]
    group: Option<GroupSnapshot>,
    blocks_in_use: Option<u64>,
}

#[derive(Serialize)]
struct AllocationObject {
    size_bytes: u64,
    held_bytes: u64,
}

impl Blueprint {
    /// What a block of a group is.
    pub fn group_snapshot(&self, group: usize) -> Option<GroupSnapshot> {
        let sizes = self.groups().get(group)?;
        let mut found = GroupSnapshot {
            block_size: sizes.block_size,
            kernel_block_size: sizes.kernel_block_size,
            num_layers: 0,
            per_block: BlockBytes::default(),
        };
        let read = self.layers().iter().enumerate();
        let read = read.filter(|(number, layer)| layer.owner == *number && layer.group == group);
        let read = read.map(|(_, layer)| {
            let page = layer.spec.page();
            (page.unpadded, page.padded)
        });
        let unread = self.unread().iter().filter(|pages| pages.group == group);
        let unread = unread.map(|pages| {
            let bytes = pages.runs.runs.saturating_mul(pages.runs.span_bytes);
            (pages.content_bytes, bytes)
        });
        let mut page_bytes = 0u64;
        for (content, page) in read.chain(unread) {
            found.num_layers += 1;
            let bytes = BlockBytes {
                content_bytes: content,
                padding_bytes: page.saturating_sub(content),
                unused_bytes: 0,
            };
            found.per_block.add(1, &bytes);
            page_bytes = page_bytes.saturating_add(page);
        }
        found.per_block.unused_bytes = self.bytes_per_block().saturating_sub(page_bytes);
        Some(found)
    }
}

fn usage(
    blueprint: &Blueprint,
    num_blocks: u64,
    in_use: &[u64],
) -> Result<Option<Usage>, UsageError> {
    let num_groups = blueprint.num_groups();
    let is_by_group = in_use.len() == num_groups;
    if in_use.is_empty() {
        return Ok(None);
    }
    if in_use.len() != 1 && !is_by_group {
        return Err(UsageError::Groups {
            given: in_use.len(),
            num_groups,
        });
    }
    let blocks_in_use = in_use
        .iter()
        .fold(0, |sum: u64, &count| sum.saturating_add(count));
    if blocks_in_use > num_blocks {
        return Err(UsageError::TooMany {
            blocks_in_use,
            num_blocks,
        });
    }
    let of_groups = is_by_group.then(|| {
        let mut sum = BlockBytes::default();
        for (number, &count) in in_use.iter().enumerate() {
            let group = blueprint.group_snapshot(number);
            let per_block = group.map_or(BlockBytes::default(), |group| group.per_block);
            sum.add(count, &per_block);
        }
        sum
    });
    Ok(Some(Usage {
        blocks_in_use,
        utilisation: blocks_in_use as f64 / num_blocks.max(1) as f64,
        bytes_in_use: blocks_in_use.saturating_mul(blueprint.bytes_per_block()),
        of_groups,
    }))
}
