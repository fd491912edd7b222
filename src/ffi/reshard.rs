//! Header section: resharding.

use super::cache::kvpages_allocation;
use super::descriptor::kvpages_descriptor;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::descriptor::{BlockMove, Location, MAX_DIMS, Reshard, Step, StridedCopy};
use crate::ops::{RankMemory, copy_strided};

/// How blocks of some ranks' caches become blocks of others': which bytes go where
/// when keys and values move between tensor-parallel sizes, or between layouts.
///
/// Immutable: all calls on it may run concurrently. It keeps nothing of the
/// descriptors.
pub struct kvpages_reshard(Handle<Reshard>);
opaque!(kvpages_reshard, Reshard, "reshard");

/// Dimensions of a strided copy at most.
pub const KVPAGES_STRIDED_COPY_MAX_DIMS: usize = 6;
const _: () = assert!(KVPAGES_STRIDED_COPY_MAX_DIMS == MAX_DIMS);

/// From where to where blocks move.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_reshard_config {
    /// sizeof(kvpages_reshard_config) as the caller compiled it.
    pub struct_size: usize,
    /// Descriptors of the ranks that have the blocks. Borrowed. Not NULL.
    pub sources: *const *const kvpages_descriptor,
    /// Those of the ranks that get them. Borrowed. Not NULL.
    pub targets: *const *const kvpages_descriptor,
    /// Entries of sources, at least 1.
    pub num_sources: usize,
    /// Entries of targets, at least 1.
    pub num_targets: usize,
}
extensible!(kvpages_reshard_config, num_targets: usize);

/// A block that moves, with all layers of its group. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_block_move {
    /// The group, as the targets number it.
    pub group: u64,
    /// The block on the sources.
    pub source: i32,
    /// The block on the targets.
    pub target: i32,
}

/// A dimension of a strided copy. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_copy_step {
    /// How many runs, or dimensions inside this one.
    pub count: u64,
    /// Bytes from one to the next where they come from.
    pub source_step_bytes: u64,
    /// Bytes from one to the next where they go.
    pub target_step_bytes: u64,
}

/// One copy: run_bytes bytes for each index of the dimensions. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_strided_copy {
    /// Which of the sources.
    pub source_rank: u64,
    /// Which of its allocations.
    pub source_allocation: u64,
    /// Where its first run starts there.
    pub source_offset_bytes: u64,
    /// Which of the targets.
    pub target_rank: u64,
    /// Which of its allocations.
    pub target_allocation: u64,
    /// Where its first run starts there.
    pub target_offset_bytes: u64,
    /// Bytes of one run.
    pub run_bytes: u64,
    /// Dimensions; 0 is one run.
    pub num_dims: u64,
    /// num_dims of them, the outermost first; the others are zero.
    pub dims: [kvpages_copy_step; 6],
}

/// The allocations of a rank, as kvpages_cache_get_allocation() tells them, or where
/// another process has mapped them. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_rank_memory {
    /// In the descriptor's order. Borrowed.
    pub allocations: *const kvpages_allocation,
    /// How many they are.
    pub num_allocations: usize,
}

/// Works out how blocks of the sources become blocks of the targets. Every layer of
/// every target gets its rows from sources that have a layer of that name and hold the
/// target's kv heads; a head that several sources hold is taken from one of them.
/// Layouts, strides, padding, kernel blocks, the order of layers and the numbers of
/// groups may differ. Layers that share pages must share them on both sides.
///
/// What cannot be copied is refused, with the layer's name and the reason: another
/// element type, row format or width, another block size, scales at other places, a
/// share of the tokens that no source has. States, pages that no backend reads, nvfp4,
/// DeepSeek V4's latents and scales at the end of a page only move as a whole, between
/// ranks that hold the same. The scale of an fp8 cache is the engine's: it must be the
/// same on both sides.
///
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_reshard_destroy(). NULL on failure.
///                  Not NULL.
/// @retval KVPAGES_STATUS_UNSUPPORTED  A layer cannot move ("layer_not_reshardable"), or
///         layers of one group are of several on the other side
///         ("groups_not_reshardable").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_reshard_create(
    config: *const kvpages_reshard_config,
    out: *mut *mut kvpages_reshard,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let config = unsafe { extensible::read(config) }?;
        // SAFETY: the caller's contract.
        let (sources, targets) = unsafe {
            (
                input::array(config.sources, config.num_sources, "sources")?,
                input::array(config.targets, config.num_targets, "targets")?,
            )
        };
        let mut ranks = [
            input::reserve(sources.len(), "sources")?,
            input::reserve(targets.len(), "targets")?,
        ];
        for (given, ranks) in [sources, targets].into_iter().zip(&mut ranks) {
            for (index, &descriptor) in given.iter().enumerate() {
                // SAFETY: the caller's contract.
                let descriptor = unsafe { handle::shared(descriptor) };
                ranks.push(
                    descriptor
                        .map_err(|failure| failure.at(index))?
                        .descriptor(),
                );
            }
        }
        let [sources, targets] = ranks;
        *out = handle::give(Reshard::new(&sources, &targets)?);
        Ok(())
    })
}

/// Destroys a reshard. NULL is a no-op.
///
/// @param reshard  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_reshard_destroy(reshard: *mut kvpages_reshard) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(reshard) }
}

/// The copies that blocks take, those of one block after those of the one before. They
/// are as few and their runs as long as layouts allow: a page in one run when the order
/// is the same and the heads are, and several layers in one where they lie side by side
/// on both sides.
///
/// @param reshard      Borrowed. Not NULL.
/// @param moves        Borrowed: blocks, no target twice. May be NULL when num_moves is 0.
/// @param num_moves    How many they are.
/// @param[out] copies  Room for capacity copies. May be NULL when capacity is 0.
/// @param capacity     Copies that fit.
/// @param[out] out_count  How many there are, also when they do not fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
/// @retval KVPAGES_STATUS_NOT_FOUND  The targets have no such group.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A block is not there on every rank
///         ("block_id_out_of_range"), or a target is listed twice
///         ("duplicate_block_id").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_reshard_copy_copies(
    reshard: *const kvpages_reshard,
    moves: *const kvpages_block_move,
    num_moves: usize,
    copies: *mut kvpages_strided_copy,
    capacity: usize,
    out_count: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            reshard,
            input::cleared(out_count, "out_count"),
            |reshard, out_count| {
                let given = input::array(moves, num_moves, "moves")?;
                let mut moves = input::reserve(given.len(), "moves")?;
                moves.extend(given.iter().map(|moved| BlockMove {
                    group: moved.group,
                    source: moved.source,
                    target: moved.target,
                }));
                let found = reshard.copies(&moves)?;
                let count = reshard.num_copies(&moves);
                *out_count = count;
                if capacity < count {
                    return Err(Failure::too_small("copies", count, capacity));
                }
                let places = input::array_mut(copies, count, "copies")?;
                for (place, copy) in places.iter_mut().zip(found) {
                    *place = told(&copy);
                }
                Ok(())
            },
        )
    }
}

/// Makes strided copies in host memory, one after another. All are checked against the
/// sizes of the allocations before the first byte moves: none reads or writes outside,
/// and none writes a byte twice. Copies may also be an engine's own.
///
/// @param copies       Borrowed. May be NULL when num_copies is 0.
/// @param num_copies   How many they are.
/// @param sources      Borrowed: memory of each rank that copies come from. May be NULL
///                     when num_sources is 0.
/// @param num_sources  Ranks.
/// @param targets      Borrowed: memory of each rank that copies go to. May be NULL when
///                     num_targets is 0.
/// @param num_targets  Ranks.
/// @retval KVPAGES_STATUS_NOT_FOUND  A copy names a rank or an allocation that is not
///         given.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A copy leaves an allocation
///         ("copy_out_of_bounds"), or its runs may overlap where they go
///         ("copy_overlaps_itself").
/// @note Nothing else uses the bytes meanwhile. Where source and target are one memory,
///       a copy may read what one before it has written.
/// @note Cost: no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_copy_strided(
    copies: *const kvpages_strided_copy,
    num_copies: usize,
    sources: *const kvpages_rank_memory,
    num_sources: usize,
    targets: *const kvpages_rank_memory,
    num_targets: usize,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (copies, sources, targets) = unsafe {
            (
                input::array(copies, num_copies, "copies")?,
                input::array(sources, num_sources, "sources")?,
                input::array(targets, num_targets, "targets")?,
            )
        };
        for (name, ranks) in [("sources", sources), ("targets", targets)] {
            for (index, rank) in ranks.iter().enumerate() {
                // SAFETY: the caller's contract.
                unsafe { check_memory(rank) }
                    .map_err(|failure| failure.at(index).of("in", name))?;
            }
        }
        // SAFETY: the arrays were checked above, and the memory is the caller's.
        unsafe {
            copy_strided(
                copies.iter().map(given),
                |place| memory(sources, place),
                |place| memory(targets, place),
            )
        }?;
        Ok(())
    })
}

/// # Safety
/// The rank's array is NULL or valid for reads.
unsafe fn check_memory(rank: &kvpages_rank_memory) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    let all = unsafe { input::array(rank.allocations, rank.num_allocations, "allocations") }?;
    for (index, allocation) in all.iter().enumerate() {
        if allocation.size_bytes > isize::MAX as u64 {
            let message = format!("size_bytes is {}, more than memory", allocation.size_bytes);
            return Err(Failure::invalid("overflow", message).at(index));
        }
        if allocation.size_bytes > 0 && allocation.data.is_null() {
            return Err(Failure::null("data").at(index));
        }
    }
    Ok(())
}

/// # Safety
/// [`check_memory`] was well with all ranks.
unsafe fn memory(ranks: &[kvpages_rank_memory], place: &Location) -> Option<RankMemory> {
    let rank = ranks.get(usize::try_from(place.rank).ok()?)?;
    // SAFETY: the caller's contract.
    let all = unsafe { input::array(rank.allocations, rank.num_allocations, "allocations") };
    let all = all.ok()?;
    let found = all.get(usize::try_from(place.allocation).ok()?)?;
    Some(RankMemory {
        data: found.data.cast(),
        size_bytes: found.size_bytes,
    })
}

fn told(copy: &StridedCopy) -> kvpages_strided_copy {
    kvpages_strided_copy {
        source_rank: copy.source.rank,
        source_allocation: copy.source.allocation,
        source_offset_bytes: copy.source.offset_bytes,
        target_rank: copy.target.rank,
        target_allocation: copy.target.allocation,
        target_offset_bytes: copy.target.offset_bytes,
        run_bytes: copy.run_bytes,
        num_dims: copy.num_dims,
        dims: copy.dims.map(|step| kvpages_copy_step {
            count: step.count,
            source_step_bytes: step.source_bytes,
            target_step_bytes: step.target_bytes,
        }),
    }
}

fn given(copy: &kvpages_strided_copy) -> StridedCopy {
    StridedCopy {
        source: Location {
            rank: copy.source_rank,
            allocation: copy.source_allocation,
            offset_bytes: copy.source_offset_bytes,
        },
        target: Location {
            rank: copy.target_rank,
            allocation: copy.target_allocation,
            offset_bytes: copy.target_offset_bytes,
        },
        run_bytes: copy.run_bytes,
        num_dims: copy.num_dims,
        dims: copy.dims.map(|step| Step {
            count: step.count,
            source_bytes: step.source_step_bytes,
            target_bytes: step.target_step_bytes,
        }),
    }
}
