//! A plan and memory together: allocations, the view of every layer, and the order in which layers
//! are bound.

mod bind;
mod blueprint;
mod describe;
mod growth;
#[cfg(test)]
mod plan_properties;
mod snapshot;

pub use bind::{BindError, bind_layers, bind_order, layer_index};
pub use blueprint::{Blueprint, BlueprintError, GroupSizes, LayerViews, Region};
pub use describe::{DescribeError, Ranks};
pub use snapshot::{BlockBytes, GroupSnapshot, Snapshot, SnapshotTextError, Usage, UsageError};

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::dtype::POISON;
use crate::memory::{Allocation, Memory, MemoryError, Place, Taken};

/// The memory of one worker's layers.
#[derive(Debug)]
pub struct Cache {
    blueprint: Arc<Blueprint>,
    allocations: Vec<Allocation>,
    place: Place,
    /// Why the number of blocks stays as it is; none when it can change.
    fixed: Option<&'static str>,
    /// Blocks behind which memory lies. Operations hold it too.
    num_blocks: Arc<AtomicU64>,
    /// What fresh blocks hold.
    fresh: Fresh,
    /// Goes up with each change of that number.
    generation: AtomicU64,
    /// Held while the number changes.
    resizing: Mutex<()>,
}

/// What blocks hold that were never written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fresh {
    /// Zeros.
    #[default]
    Zero,
    /// [`POISON`], but for block 0: kernels read it where a row has no block.
    Poison,
}

/// Why a cache was not made, or not resized. Memory taken on the way was given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// The memory ran out.
    #[error("allocation {index} of {count}: {error}; the cache needs {needed} bytes in all")]
    Memory {
        /// Which allocation failed.
        index: usize,
        /// How many there are.
        count: usize,
        /// Bytes of all.
        needed: u64,
        /// What happened.
        error: MemoryError,
    },
    /// No blocks, or more than addresses were planned for.
    #[error("a cache of this plan has 1 to {max} blocks, not {wanted}")]
    NumBlocks {
        /// Blocks asked for.
        wanted: u64,
        /// Blocks of the plan.
        max: u64,
    },
    /// A cache that cannot be resized.
    #[error("the cache keeps its {num_blocks} blocks: {why}")]
    Fixed {
        /// Blocks it has.
        num_blocks: u64,
        /// Why.
        why: &'static str,
    },
    /// A block that would go, but is in use.
    #[error(
        "entry {index}: block {block} is in use, so the cache cannot shrink from {num_blocks} to {wanted} blocks"
    )]
    BlockInUse {
        /// Its place in the list of blocks in use.
        index: usize,
        /// The block.
        block: i32,
        /// Blocks the cache has.
        num_blocks: u64,
        /// Blocks asked for.
        wanted: u64,
    },
    /// A block in use that does not exist.
    #[error("entry {index}: block {block} cannot be in use, the cache has {num_blocks} blocks")]
    NoSuchBlock {
        /// Its place in the list of blocks in use.
        index: usize,
        /// The number.
        block: i32,
        /// Blocks the cache has.
        num_blocks: u64,
    },
}

impl Cache {
    /// Takes the memory that the blueprint asks for: that of all blocks, for good.
    pub fn allocate(
        blueprint: Arc<Blueprint>,
        memory: &dyn Memory,
        fresh: Fresh,
    ) -> Result<Cache, CacheError> {
        let fixed = Some("it was made with memory for all blocks of the plan");
        let num_blocks = blueprint.num_blocks();
        let cache = Cache::take(blueprint, memory, num_blocks, fixed, Memory::allocate)?;
        let cache = Cache { fresh, ..cache };
        cache.prepare(0, num_blocks)?;
        Ok(cache)
    }

    /// Reserves addresses for all blocks of the blueprint, and takes memory for the first
    /// `num_blocks` of them.
    pub fn reserve(
        blueprint: Arc<Blueprint>,
        memory: &dyn Memory,
        num_blocks: u64,
        fresh: Fresh,
    ) -> Result<Cache, CacheError> {
        check_num_blocks(&blueprint, num_blocks)?;
        let cache = Cache::take(blueprint, memory, 0, None, Memory::reserve)?;
        let cache = Cache { fresh, ..cache };
        cache.grow(0, num_blocks)?;
        cache.num_blocks.store(num_blocks, Ordering::Release);
        Ok(cache)
    }

    fn take<M: ?Sized + Memory>(
        blueprint: Arc<Blueprint>,
        memory: &M,
        num_blocks: u64,
        fixed: Option<&'static str>,
        take: impl Fn(&M, u64, u64) -> Result<Allocation, MemoryError>,
    ) -> Result<Cache, CacheError> {
        let sizes = blueprint.allocations();
        let mut allocations = Vec::with_capacity(sizes.len());
        for (index, &bytes) in sizes.iter().enumerate() {
            let taken = take(memory, bytes, blueprint.alignment());
            allocations.push(taken.map_err(|error| CacheError::Memory {
                index,
                count: sizes.len(),
                needed: blueprint.total_bytes(),
                error,
            })?);
        }
        Ok(Cache {
            blueprint,
            allocations,
            place: memory.place(),
            fixed,
            num_blocks: Arc::new(AtomicU64::new(num_blocks)),
            fresh: Fresh::Zero,
            generation: AtomicU64::new(1),
            resizing: Mutex::default(),
        })
    }

    /// Changes the number of blocks, between steps: takes memory for new blocks, which are fresh, or
    /// gives that of the last ones back. Addresses stay. `in_use` are the blocks that hold something;
    /// none of them may go. When growing fails, all is as before.
    pub fn resize(&self, num_blocks: u64, in_use: &[i32]) -> Result<(), CacheError> {
        let _resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.num_blocks();
        if let Some(why) = self.fixed {
            return Err(CacheError::Fixed {
                num_blocks: present,
                why,
            });
        }
        check_num_blocks(&self.blueprint, num_blocks)?;
        check_in_use(in_use, present, num_blocks)?;
        if num_blocks == present {
            return Ok(());
        }
        if num_blocks > present {
            self.grow(present, num_blocks)?;
            self.set_num_blocks(num_blocks);
            return Ok(());
        }
        // First no call can use the blocks any more, then they go.
        self.set_num_blocks(num_blocks);
        self.shrink(num_blocks)
    }

    fn set_num_blocks(&self, num_blocks: u64) {
        self.num_blocks.store(num_blocks, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn grow(&self, from: u64, to: u64) -> Result<(), CacheError> {
        let fresh = self.blueprint.block_bytes(from..to);
        let mut taken: Vec<(&Allocation, Taken)> = Vec::with_capacity(fresh.len());
        let mut grown = Ok(());
        for (index, (allocation, ranges)) in self.allocations.iter().zip(&fresh).enumerate() {
            let Some(reserved) = allocation.reserved() else {
                continue;
            };
            match reserved.grow(ranges) {
                Ok(pieces) => taken.push((allocation, pieces)),
                Err(error) => {
                    grown = Err(self.memory_error(index, &fresh, error));
                    break;
                }
            }
        }
        let grown = grown.and_then(|()| self.prepare(from, to));
        if grown.is_err() {
            for (allocation, pieces) in taken {
                if let Some(reserved) = allocation.reserved() {
                    reserved.give_back(pieces);
                }
            }
        }
        grown
    }

    /// Makes fresh blocks, which are zero, what they are to be.
    fn prepare(&self, from: u64, to: u64) -> Result<(), CacheError> {
        if self.fresh == Fresh::Zero {
            return Ok(());
        }
        let poisoned = self.blueprint.block_bytes(from.max(1)..to.max(1));
        for (index, (allocation, ranges)) in self.allocations.iter().zip(&poisoned).enumerate() {
            let filled = allocation.fill(ranges, POISON);
            filled.map_err(|error| self.memory_error(index, &poisoned, error))?;
        }
        Ok(())
    }

    /// Every allocation is tried; the first failure is the one that is told.
    fn shrink(&self, to: u64) -> Result<(), CacheError> {
        let kept = self.blueprint.block_bytes(0..to);
        let mut result = Ok(());
        for (index, (allocation, ranges)) in self.allocations.iter().zip(&kept).enumerate() {
            let Some(reserved) = allocation.reserved() else {
                continue;
            };
            let shrunk = reserved.shrink(ranges);
            let shrunk = shrunk.map_err(|error| self.memory_error(index, &kept, error));
            result = result.and(shrunk);
        }
        result
    }

    fn memory_error(
        &self,
        index: usize,
        ranges: &[Vec<std::ops::Range<u64>>],
        error: MemoryError,
    ) -> CacheError {
        let bytes = ranges.iter().flatten().map(|range| range.end - range.start);
        CacheError::Memory {
            index,
            count: self.allocations.len(),
            needed: bytes.sum(),
            error,
        }
    }

    /// What was built.
    pub fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    /// The allocations, in the order of the plan's tensors.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// Where they are.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Blocks that have memory: those of the plan, or fewer.
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Acquire)
    }

    /// What blocks hold that were never written.
    pub fn fresh(&self) -> Fresh {
        self.fresh
    }

    /// How often the number of blocks was changed, and 1: another number says that what was read
    /// before may be stale.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Bytes of memory that are taken for it: those of its blocks, and what comes with them where
    /// memory comes in pieces.
    pub fn held_bytes(&self) -> u64 {
        self.allocations.iter().map(Allocation::held_bytes).sum()
    }

    /// The same, for those who must see it change.
    pub fn present_blocks(&self) -> &Arc<AtomicU64> {
        &self.num_blocks
    }
}

fn check_num_blocks(blueprint: &Blueprint, wanted: u64) -> Result<(), CacheError> {
    let max = blueprint.num_blocks();
    if wanted == 0 || wanted > max {
        return Err(CacheError::NumBlocks { wanted, max });
    }
    Ok(())
}

fn check_in_use(in_use: &[i32], present: u64, wanted: u64) -> Result<(), CacheError> {
    for (index, &block) in in_use.iter().enumerate() {
        match u64::try_from(block) {
            Ok(number) if number < present.min(wanted) => {}
            Ok(number) if number < present => {
                return Err(CacheError::BlockInUse {
                    index,
                    block,
                    num_blocks: present,
                    wanted,
                });
            }
            _ => {
                return Err(CacheError::NoSuchBlock {
                    index,
                    block,
                    num_blocks: present,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Preset;
    use crate::dtype::Dtype;
    use crate::memory::Host;
    use crate::memory::testing::{Faulty, adopted_buffer};
    use crate::model::Model;
    use crate::plan::{PartGroup, PartTensor, Parts, plan_from_parts};
    use crate::spec::{Attention, AttentionFields, Spec};
    use std::sync::atomic::Ordering;

    /// Three full layers of 8192-byte pages, each with its own tensor of four blocks.
    fn blueprint() -> Arc<Blueprint> {
        let backend = Arc::new(Preset::FlashAttentionNhd.backend().unwrap());
        let spec = Attention::new(AttentionFields::full(16, 2, 64, Dtype::Bf16));
        let spec = Spec::Attention(spec.unwrap());
        let names: Vec<String> = (0..3).map(|i| format!("layers.{i}.attn")).collect();
        let mut model = Model::new();
        for name in &names {
            model
                .add(name, spec.clone(), Some(Arc::clone(&backend)), 2)
                .unwrap();
        }
        let tensor = |name: &String| PartTensor {
            size: 4 * 8192,
            layers: vec![name.clone()],
            ..PartTensor::default()
        };
        let parts = Parts {
            num_blocks: 4,
            tensors: names.iter().map(tensor).collect(),
            groups: vec![PartGroup {
                layers: names.clone(),
                is_draft: false,
            }],
            kernel_block_sizes: None,
        };
        let plan = plan_from_parts(Arc::new(model), parts).unwrap();
        Arc::new(Blueprint::of(&plan.workers[0]).unwrap())
    }

    #[test]
    fn memory_that_runs_out_half_way_is_given_back() {
        let blueprint = blueprint();
        for fail_at in 0..4 {
            let adopted = adopted_buffer(160_000);
            for memory in [
                Box::new(Faulty::new(Host, fail_at)),
                Box::new(Faulty::new(adopted, fail_at)) as Box<dyn Counting>,
            ] {
                let cache = Cache::allocate(Arc::clone(&blueprint), memory.memory(), Fresh::Zero);
                match cache {
                    Ok(cache) => {
                        assert_eq!(fail_at, 3);
                        assert_eq!((cache.allocations().len(), memory.out()), (3, 3));
                    }
                    Err(CacheError::Memory {
                        index,
                        count,
                        needed,
                        ..
                    }) => {
                        assert_eq!((index, count, needed), (fail_at, 3, 3 * 4 * 8192));
                    }
                    Err(other) => panic!("{other}"),
                }
                assert_eq!(memory.out(), 0);
            }
        }
    }

    /// The bytes of block `block` in each allocation of [`blueprint`].
    #[allow(unsafe_code)]
    fn blocks_of(cache: &Cache, block: usize) -> impl Iterator<Item = &mut [u8]> {
        cache.allocations().iter().map(move |allocation| {
            // SAFETY: the block has memory, and only this test uses it.
            unsafe {
                let data = allocation.data().as_ptr().add(block * 8192);
                std::slice::from_raw_parts_mut(data, 8192)
            }
        })
    }

    #[test]
    fn bytes_survive_growth_and_new_blocks_are_zero() {
        let cache = Cache::reserve(blueprint(), &Host, 1, Fresh::Zero).unwrap();
        let starts: Vec<_> = cache.allocations().iter().map(Allocation::data).collect();
        blocks_of(&cache, 0).for_each(|bytes| bytes.fill(1));
        for num_blocks in [4, 2, 3, 3, 1, 4] {
            let before = cache.num_blocks();
            cache.resize(num_blocks, &[0]).unwrap();
            assert_eq!(cache.num_blocks(), num_blocks);
            assert!(blocks_of(&cache, 0).all(|bytes| bytes.iter().all(|&byte| byte == 1)));
            for new in before..num_blocks {
                for bytes in blocks_of(&cache, new as usize) {
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    bytes.fill(2);
                }
            }
        }
        let now: Vec<_> = cache.allocations().iter().map(Allocation::data).collect();
        assert_eq!(starts, now);
    }

    #[test]
    fn what_cannot_be_resized_says_why() {
        let cache = Cache::reserve(blueprint(), &Host, 3, Fresh::Zero).unwrap();
        let text = |result: Result<(), CacheError>| result.unwrap_err().to_string();
        for (wanted, in_use, expected) in [
            (0, [0; 1], "a cache of this plan has 1 to 4 blocks, not 0"),
            (5, [0], "a cache of this plan has 1 to 4 blocks, not 5"),
            (
                2,
                [2],
                "entry 0: block 2 is in use, so the cache cannot shrink from 3 to 2 blocks",
            ),
            (
                4,
                [3],
                "entry 0: block 3 cannot be in use, the cache has 3 blocks",
            ),
            (
                4,
                [-1],
                "entry 0: block -1 cannot be in use, the cache has 3 blocks",
            ),
        ] {
            assert_eq!(text(cache.resize(wanted, &in_use)), expected);
            assert_eq!(cache.num_blocks(), 3);
        }
        let whole = Cache::allocate(blueprint(), &Host, Fresh::Zero).unwrap();
        assert_eq!(
            text(whole.resize(2, &[])),
            "the cache keeps its 4 blocks: it was made with memory for all blocks of the plan"
        );
        let adopted = Cache::reserve(blueprint(), &adopted_buffer(160_000), 2, Fresh::Zero);
        let error = adopted.unwrap_err().to_string();
        assert!(
            error.contains("an adopted buffer is all there and cannot grow"),
            "{error}"
        );
    }

    /// A faulty memory over any other.
    trait Counting {
        fn memory(&self) -> &dyn Memory;
        fn out(&self) -> usize;
    }

    impl<M: Memory> Counting for Faulty<M> {
        fn memory(&self) -> &dyn Memory {
            self
        }
        fn out(&self) -> usize {
            self.counts().out.load(Ordering::Relaxed)
        }
    }
}
