//! Header section: snapshots.

use std::ffi::c_char;

use super::cache::kvpages_cache;
use super::extensible::{self, extensible};
use super::handle;
use super::input;
use super::status::{Failure, kvpages_status};
use super::tables::kvpages_tables;
use crate::cache::BlockBytes;

/// What an engine tells of the blocks of a cache, whose pool is its own.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_cache_usage {
    /// sizeof(kvpages_cache_usage) as the caller compiled it.
    pub struct_size: usize,
    /// How many blocks are in use: one number for all groups together, or one for
    /// each group. May be NULL when num_counts is 0.
    pub blocks_in_use: *const u64,
    /// 0: it is not told. 1: all groups together. Groups of the cache: by group.
    pub num_counts: usize,
}
extensible!(kvpages_cache_usage, num_counts: usize);

/// A cache in numbers, as it is now.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_cache_snapshot {
    /// sizeof(kvpages_cache_snapshot) as the caller compiled it.
    pub struct_size: usize,
    /// 1 at first, and one more with each change of the number of blocks. It never
    /// goes down: another number than before says that what was read may be stale.
    pub generation: u64,
    /// Blocks that have memory.
    pub num_blocks: u64,
    /// Blocks that have addresses: those of the plan.
    pub max_blocks: u64,
    /// Bytes of a block in all allocations, whichever group has it.
    pub bytes_per_block: u64,
    /// Bytes of all blocks that have memory.
    pub block_bytes: u64,
    /// Bytes of memory that the cache holds. More than block_bytes where memory comes
    /// in pieces, or where the plan left bytes over.
    pub held_bytes: u64,
    /// Bytes of all allocations, those of blocks without memory included.
    pub allocation_bytes: u64,
    /// Groups of the plan.
    pub num_groups: u64,
    /// Layers with views.
    pub num_layers: u64,
    /// Allocations.
    pub num_allocations: u64,
    /// Memory regions.
    pub num_regions: u64,
    /// Blocks in use, of all groups; 0 when it was not told.
    pub blocks_in_use: u64,
    /// bytes_per_block for each of them.
    pub bytes_in_use: u64,
    /// Of the bytes in use those that hold keys, values, scales and states when every
    /// slot is filled. 0 unless has_group_usage is 1.
    pub content_bytes_in_use: u64,
    /// Of the bytes in use those that pages are padded with. 0 unless
    /// has_group_usage is 1.
    pub padding_bytes_in_use: u64,
    /// Of the bytes in use those that the groups whose blocks these are do not use:
    /// other groups do, or nobody. 0 unless has_group_usage is 1.
    pub unused_bytes_in_use: u64,
    /// blocks_in_use / num_blocks, 0 to 1.
    pub utilisation: f64,
    /// 1 when it was told how many blocks are in use.
    pub has_usage: u32,
    /// 1 when it was told of each group, or of the only one.
    pub has_group_usage: u32,
    /// 1 when blocks that were never written are poisoned (KVPAGES_CACHE_POISON).
    pub is_poisoned: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_cache_snapshot, reserved0: u32);

/// What a block of a group is. It never changes. The three parts add up to the
/// bytes of a block, but where pages of layers of one group lie over each other.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_cache_group {
    /// sizeof(kvpages_cache_group) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block; 0 when no layer of the group has a backend.
    pub kernel_block_size: u64,
    /// Layers with pages of their own, those that no backend reads included.
    pub num_layers: u64,
    /// Bytes of a block that hold keys, values, scales and states.
    pub content_bytes_per_block: u64,
    /// Bytes of a block that pages are padded with.
    pub padding_bytes_per_block: u64,
    /// Bytes of a block that this group does not use: other groups do, or nobody.
    pub unused_bytes_per_block: u64,
}
extensible!(kvpages_cache_group, unused_bytes_per_block: u64);

/// Tables in numbers, as they are now.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_tables_snapshot {
    /// sizeof(kvpages_tables_snapshot) as the caller compiled it.
    pub struct_size: usize,
    /// 1 at first, and one more with each call that changes tables, input tables or
    /// slots: kvpages_tables_apply(), _gather(), _map_slots(), _prepare(), _reset()
    /// and those for dummies, also when a device fails them. It never goes down:
    /// another number than before says that what was read may be stale. Writes that
    /// are only staged do not count.
    pub generation: u64,
    /// Groups.
    pub num_groups: u64,
    /// Rows of each table.
    pub max_requests: u64,
    /// Slots of each group.
    pub max_tokens: u64,
    /// Requests that have blocks in some group, those staged included.
    pub rows_in_use: u64,
    /// Entries (kernel blocks) in the rows of all groups, those staged included.
    pub num_entries: u64,
    /// Entries that there is room for.
    pub max_entries: u64,
    /// Rows, of all groups, with writes that were staged and not applied yet.
    pub pending_rows: u64,
    /// Entries of the batch that the input tables hold now, those of dummies (-1)
    /// included; rows of NULL blocks behind them do not count. 0 when is_lost is 1.
    pub batch_requests: u64,
    /// Tokens of the batch that have slots now. 0 when is_lost is 1.
    pub batch_tokens: u64,
    /// Bytes of host memory, without those that are pinned.
    pub host_bytes: u64,
    /// Bytes of the device's memory; 0 for tables in host memory.
    pub device_bytes: u64,
    /// Bytes of pinned host memory; 0 for tables in host memory.
    pub pinned_bytes: u64,
    /// Pages of the pinned memory: how many calls the host may be ahead of the device
    /// before it waits. 0 for tables in host memory.
    pub pinned_pages: u64,
    /// Pages that were sent and not waited for since; the device may be done with
    /// them.
    pub pinned_pages_in_use: u64,
    /// 1 when a device failed a call midway, so that the next one sends all rows
    /// again.
    pub is_lost: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_tables_snapshot, reserved0: u32);

/// A cache in numbers.
///
/// @param cache     Borrowed. Not NULL. May be called while other threads read the
///                  cache or use its operations, but not during
///                  kvpages_cache_resize().
/// @param usage     Borrowed. NULL when it is not told which blocks are in use;
///                  struct_size set.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_counts is neither 0, 1 nor the number
///         of groups (kind "counts_of_groups"), or more blocks are in use than have
///         memory ("too_many_blocks_in_use").
/// @note Cost: a look at every layer; no allocation, no lock, no call of a driver.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_snapshot(
    cache: *const kvpages_cache,
    usage: *const kvpages_cache_usage,
    out: *mut kvpages_cache_snapshot,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, extensible::out(out), |cache, out| {
            let cache = cache.cache();
            let now = cache.snapshot(counts(usage)?)?;
            let blueprint = cache.blueprint();
            let of_groups = now.usage.and_then(|usage| usage.of_groups);
            let BlockBytes {
                content_bytes,
                padding_bytes,
                unused_bytes,
            } = of_groups.unwrap_or_default();
            out.fill(kvpages_cache_snapshot {
                struct_size: 0,
                generation: now.generation,
                num_blocks: now.num_blocks,
                max_blocks: now.max_blocks,
                bytes_per_block: now.bytes_per_block,
                block_bytes: now.block_bytes,
                held_bytes: now.held_bytes,
                allocation_bytes: now.allocation_bytes,
                num_groups: blueprint.num_groups() as u64,
                num_layers: blueprint.layers().len() as u64,
                num_allocations: cache.allocations().len() as u64,
                num_regions: blueprint.regions().len() as u64,
                blocks_in_use: now.usage.map_or(0, |usage| usage.blocks_in_use),
                bytes_in_use: now.usage.map_or(0, |usage| usage.bytes_in_use),
                content_bytes_in_use: content_bytes,
                padding_bytes_in_use: padding_bytes,
                unused_bytes_in_use: unused_bytes,
                utilisation: now.usage.map_or(0.0, |usage| usage.utilisation),
                has_usage: u32::from(now.usage.is_some()),
                has_group_usage: u32::from(of_groups.is_some()),
                is_poisoned: u32::from(now.is_poisoned),
                reserved0: 0,
            });
            Ok(())
        })
    }
}

/// A cache in numbers, with its groups, allocations and regions, as one JSON object:
/// docs/observability.md has its keys.
///
/// @param cache       Borrowed. Not NULL. As kvpages_cache_get_snapshot().
/// @param usage       As kvpages_cache_get_snapshot().
/// @param[out] buffer Room for capacity bytes. May be NULL when capacity is 0.
/// @param capacity    Bytes that fit, with the NUL at the end.
/// @param[out] out_length  Bytes of the text without the NUL, also when it does not
///                    fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  It does not fit.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for it on the host.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_cache_get_snapshot().
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_copy_snapshot(
    cache: *const kvpages_cache,
    usage: *const kvpages_cache_usage,
    buffer: *mut c_char,
    capacity: usize,
    out_length: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            cache,
            input::cleared(out_length, "out_length"),
            |cache, length| {
                let text = cache.cache().snapshot_json(counts(usage)?)?;
                input::copy_text_out(&text, buffer, capacity, length)
            },
        )
    }
}

/// What a block of a group of the cache is.
///
/// @param cache     Borrowed. Not NULL.
/// @param group     Less than the num_groups of a snapshot.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
/// @note Cost: a look at every layer; no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_group(
    cache: *const kvpages_cache,
    group: usize,
    out: *mut kvpages_cache_group,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, extensible::out(out), |cache, out| {
            let blueprint = cache.cache().blueprint();
            let found = blueprint.group_snapshot(group).ok_or_else(|| {
                let count = blueprint.num_groups();
                Failure::not_found(format!("group {group} is not there, the cache has {count}"))
            })?;
            out.fill(kvpages_cache_group {
                struct_size: 0,
                block_size: found.block_size,
                kernel_block_size: found.kernel_block_size.unwrap_or(0),
                num_layers: found.num_layers,
                content_bytes_per_block: found.per_block.content_bytes,
                padding_bytes_per_block: found.per_block.padding_bytes,
                unused_bytes_per_block: found.per_block.unused_bytes,
            });
            Ok(())
        })
    }
}

/// Tables in numbers.
///
/// @param tables    Borrowed. Not NULL. May be called while other threads read the
///                  tables, but not during a call that takes them as not const.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @return KVPAGES_STATUS_OK, or what is wrong with an argument.
/// @note Cost: a look at the length of every row; no allocation, no lock, no call of
///       a driver.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_snapshot(
    tables: *const kvpages_tables,
    out: *mut kvpages_tables_snapshot,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, extensible::out(out), |handle, out| {
            let now = handle.tables.snapshot();
            out.fill(kvpages_tables_snapshot {
                struct_size: 0,
                generation: now.generation,
                num_groups: handle.tables.num_groups() as u64,
                max_requests: now.max_requests,
                max_tokens: now.max_tokens,
                rows_in_use: now.rows_in_use,
                num_entries: now.num_entries,
                max_entries: now.max_entries,
                pending_rows: now.pending_rows,
                batch_requests: now.batch_requests,
                batch_tokens: now.batch_tokens,
                host_bytes: now.host_bytes,
                device_bytes: now.device_bytes,
                pinned_bytes: now.pinned_bytes,
                pinned_pages: now.pinned_pages,
                pinned_pages_in_use: now.pinned_pages_in_use,
                is_lost: u32::from(now.is_lost),
                reserved0: 0,
            });
            Ok(())
        })
    }
}

/// Tables in numbers, with their groups, as one JSON object: docs/observability.md
/// has its keys.
///
/// @param tables      Borrowed. Not NULL. As kvpages_tables_get_snapshot().
/// @param[out] buffer Room for capacity bytes. May be NULL when capacity is 0.
/// @param capacity    Bytes that fit, with the NUL at the end.
/// @param[out] out_length  Bytes of the text without the NUL, also when it does not
///                    fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  It does not fit.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for it on the host.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_copy_snapshot(
    tables: *const kvpages_tables,
    buffer: *mut c_char,
    capacity: usize,
    out_length: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            tables,
            input::cleared(out_length, "out_length"),
            |handle, length| {
                let text = handle.tables.snapshot_json()?;
                input::copy_text_out(&text, buffer, capacity, length)
            },
        )
    }
}

/// # Safety
/// `usage` is NULL or valid, with its array, during the call.
unsafe fn counts<'a>(usage: *const kvpages_cache_usage) -> Result<&'a [u64], Failure> {
    if usage.is_null() {
        return Ok(&[]);
    }
    // SAFETY: the caller's contract.
    unsafe {
        let given = extensible::read(usage)?;
        input::array(given.blocks_in_use, given.num_counts, "blocks_in_use")
    }
}
