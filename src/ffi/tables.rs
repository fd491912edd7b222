//! Header section: block tables and slots.

use std::ffi::c_void;
use std::sync::Arc;

use super::device::kvpages_device;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::metadata::kvpages_step;
use super::plan::kvpages_plan;
use super::status::{Failure, kvpages_status};
use super::types::{kvpages_dtype, kvpages_tensor};
use crate::cuda::StreamRef;
use crate::log::{self, Level};
use crate::memory::Place;
use crate::plan::TableWishes;
use crate::tables::{
    self, Batch, BatchAddresses, BatchExtent, GroupConfig, Ranks, RowWrites, Tables, TablesConfig,
};

/// Which blocks hold each request, and where each token of a step goes, in the
/// memory of the host or of a device. For each group there are
///
/// - a table: a row of kernel block ids for each request;
/// - an input table: a row for each request of the batch;
/// - slots: one for each token of the batch.
///
/// Their addresses stay as they are until the tables are destroyed, so captured
/// graphs may hold them. They are read, not written, by the engine. Past the
/// entries of a row there are null blocks (0), past the tokens of a batch pad
/// slots (-1), always.
///
/// Writes to rows are staged: kvpages_tables_num_entries() and the checks of later
/// writes count them at once, while the tables, kvpages_tables_gather() and
/// kvpages_tables_map_slots() see them after kvpages_tables_apply(). Any number of
/// them may be staged. A request is the number of a row, less than max_requests.
///
/// In a device's memory, rows are staged on the host just so; calls with a stream
/// check what they are given, put their work on the stream and return. They copy
/// what they are given first, so arrays may change as soon as a call returns. They
/// wait for nothing, but when the device is eight such calls behind, of which a call
/// counts once more for each 64 KiB of entries that changed. Whatever streams they
/// are put on, calls take effect one after another; they do not wait for kernels
/// that read what an earlier call left, on other streams than their own. A stream
/// that is being captured is refused (KVPAGES_STATUS_UNSUPPORTED, kind
/// "stream_is_capturing"), and so is the default stream while one that waits for it
/// is: a graph holds the addresses, and finds there what was put on its stream
/// before it is launched. When the driver fails a call
/// (KVPAGES_STATUS_DEVICE_UNAVAILABLE), the call waits until nothing of it is under
/// way, if the driver still can; what was staged stays staged, and the next call with
/// a stream sends all rows again, as kvpages_tables_apply() does.
///
/// No call but those that create and destroy allocates or takes a lock when it
/// succeeds.
pub struct kvpages_tables(Handle<TablesHandle>);
opaque!(kvpages_tables, TablesHandle, "tables");

pub(super) struct TablesHandle {
    pub(super) tables: Tables,
    /// Of each group, what its tensors point to.
    shapes: Vec<Shapes>,
    /// By group, as a step has them.
    input_tables: Vec<kvpages_tensor>,
    slots: Vec<kvpages_tensor>,
}

struct Shapes {
    /// Requests and entries, of the table and of the input table.
    rows: [i64; 2],
    row_strides: [i64; 2],
    slots: [i64; 1],
    slot_strides: [i64; 1],
}

/// Flag of kvpages_tables_config: rows are as wide as kvpages_table_row_width()
/// says, for kernels that read whole runs of 128 tokens. They hold no more blocks
/// than without it.
pub const KVPAGES_TABLES_ALIGNED_ROWS: u32 = 1;

/// What the table of a group is made for. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_table_group {
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block, which divide a block. 0: those of a block.
    pub kernel_block_size: u64,
    /// Blocks that a row holds.
    pub row_blocks: u64,
    /// 1 when every context-parallel rank holds all of it, as of state.
    pub is_replicated: u32,
    /// Zero.
    pub reserved0: u32,
}

/// What tables are made for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_tables_config {
    /// sizeof(kvpages_tables_config) as the caller compiled it.
    pub struct_size: usize,
    /// The groups, by number. NULL where they are a plan's.
    pub groups: *const kvpages_table_group,
    /// How many.
    pub num_groups: usize,
    /// Rows: requests that there may be at once. Not 0.
    pub max_requests: u64,
    /// Tokens that a step may have. Not 0.
    pub max_tokens: u64,
    /// Block ids are 0 to this number minus 1. 0: the plan's number; without a plan
    /// as many as 32-bit ids of kernel blocks can tell apart.
    pub num_blocks: u64,
    /// Ranks that share the tokens. 0: the plan's number; without a plan 1.
    pub context_parallel_size: u64,
    /// Which of the ranks this is.
    pub context_parallel_rank: u64,
    /// Tokens that a rank gets before the next one does; it divides the block sizes
    /// of the groups that are shared out. 0: 1.
    pub context_parallel_interleave: u64,
    /// KVPAGES_TABLES_* flags.
    pub flags: u32,
    /// Zero.
    pub reserved0: u32,
    /// Tokens of the longest request, its encoder's too: rows of a plan's groups hold
    /// them. 0: the plan's number. A plan from parts has none, so it must be set for
    /// one. Not used without a plan.
    pub max_model_len: u64,
    /// Where the tables, the input tables and the slots are; all zero for the host.
    /// A context is Kept until the tables are destroyed.
    pub device: kvpages_device,
}
extensible!(kvpages_tables_config, device: kvpages_device);

/// What the table of a group is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_table_info {
    /// sizeof(kvpages_table_info) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block.
    pub kernel_block_size: u64,
    /// Kernel blocks of a block.
    pub kernel_blocks_per_block: u64,
    /// Blocks that a row holds.
    pub row_blocks: u64,
    /// Entries of a row: kernel blocks.
    pub row_width: u64,
    /// 1 when every context-parallel rank holds all of it.
    pub is_replicated: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_table_info, reserved0: u32);

/// Writes to many rows, in all groups, in order.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_row_writes {
    /// sizeof(kvpages_row_writes) as the caller compiled it.
    pub struct_size: usize,
    /// The request of each write, num_writes of them.
    pub requests: *const i32,
    /// How many.
    pub num_writes: usize,
    /// Of each write not 0 when its blocks replace those of the row. NULL: all are
    /// added.
    pub overwrite: *const u8,
    /// num_writes * number of groups + 1 places in block_ids, going up from 0: the
    /// blocks of write w for group g are those from starts[w * groups + g] to the
    /// next place.
    pub starts: *const usize,
    /// Block ids, not of kernel blocks.
    pub block_ids: *const i32,
    /// How many.
    pub num_block_ids: usize,
}
extensible!(kvpages_row_writes, num_block_ids: usize);

/// The requests that run together in one step.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_batch {
    /// sizeof(kvpages_batch) as the caller compiled it.
    pub struct_size: usize,
    /// For each request the number of its row in the tables, or -1 for a dummy. NULL
    /// only when there are none.
    pub requests: *const i32,
    /// How many. A batch that is padded to the requests that a graph was captured
    /// for ends with dummies without tokens.
    pub num_requests: usize,
    /// num_requests + 1 numbers going up from 0: request i has the tokens from
    /// query_start[i] to query_start[i + 1]. Not NULL.
    pub query_start: *const i32,
    /// Tokens of each request's sequence, those of the step included. NULL only when
    /// there are no requests.
    pub seq_lens: *const i32,
    /// Where each token stands in its request's sequence. NULL only when there are
    /// none.
    pub positions: *const i64,
    /// How many: as many as there are tokens, or more, which get no slots.
    pub num_positions: usize,
    /// The CUstream on which it is prepared; NULL for the default stream. Not used
    /// for tables in host memory.
    pub stream: *mut c_void,
}
extensible!(kvpages_batch, stream: *mut c_void);

/// Entries of a row of row_blocks blocks for kernels that read whole runs of 128
/// tokens: blocks rounded up to a multiple of 128 / gcd(128, block_size), times the
/// kernel blocks of each.
///
/// @param row_blocks         Blocks.
/// @param block_size         Tokens of a block.
/// @param kernel_block_size  Tokens of a kernel block, which divide it. 0: those
///                           of a block.
/// @param[out] out           Entries; 0 on failure. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A size is 0, or kernel_block_size does not
///         divide block_size.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_table_row_width(
    row_blocks: u64,
    block_size: u64,
    kernel_block_size: u64,
    out: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        let kernel_block_size = or(kernel_block_size, block_size);
        *out = tables::row_width(row_blocks, block_size, kernel_block_size)?;
        Ok(())
    })
}

/// Makes tables of groups that the engine states.
///
/// @param config    Copied. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_tables_destroy(). NULL on failure.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough memory.
/// @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough memory.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
///         there is no such device.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_create(
    config: *const kvpages_tables_config,
    out: *mut *mut kvpages_tables,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let given = unsafe { extensible::read(config) }?;
        // SAFETY: the caller's contract.
        let groups = unsafe { input::array(given.groups, given.num_groups, "groups") }?;
        let mut read = input::reserve(groups.len(), "groups")?;
        for (i, group) in groups.iter().enumerate() {
            read.push(read_group(group).map_err(|failure| failure.at(i))?);
        }
        let num_blocks = (given.num_blocks != 0).then_some(given.num_blocks);
        let ranks = or(given.context_parallel_size, 1);
        // SAFETY: the caller's contract.
        *out = unsafe { create(&given, read, num_blocks, ranks) }?;
        Ok(())
    })
}

/// Makes tables of a worker's groups. Rows are as long as the plan's
/// table_width_blocks; state is not shared out to the context-parallel ranks.
///
/// A plan from parts knows neither how long a request gets nor how many ranks there
/// are: both are the config's, and the cache mode of state is its specs'.
///
/// @param plan      Borrowed. Not NULL.
/// @param worker    Number of the worker in the plan.
/// @param config    Copied. Not NULL; without groups. What the plan knows, of
///                  num_blocks, max_model_len and context_parallel_size, is 0 or
///                  the plan's number.
/// @param[out] out  Owned by the caller: kvpages_tables_destroy(). NULL on failure.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough memory.
/// @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough memory.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
///         there is no such device.
/// @retval KVPAGES_STATUS_NOT_FOUND  The plan has no such worker.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  Neither the plan nor the config knows
///         max_model_len (kind "max_model_len_unknown"), or the config contradicts
///         the plan ("bad_values").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_create_for_plan(
    plan: *const kvpages_plan,
    worker: usize,
    config: *const kvpages_tables_config,
    out: *mut *mut kvpages_tables,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let (plan, given) = unsafe { (handle::shared(plan)?, extensible::read(config)?) };
        if !given.groups.is_null() || given.num_groups != 0 {
            let message = "kvpages_tables_config.groups are set, but the plan has its own";
            return Err(Failure::invalid("bad_values", message.to_owned()));
        }
        let stated = |number: u64| (number != 0).then_some(number);
        let wishes = TableWishes {
            num_blocks: stated(given.num_blocks),
            max_model_len: stated(given.max_model_len),
            context_parallel_size: stated(given.context_parallel_size),
        };
        let needs = plan.table_needs(worker, &wishes)?;
        let groups = needs.rows.iter().map(|rows| GroupConfig {
            block_size: rows.block_size,
            kernel_block_size: rows.kernel_block_size,
            row_blocks: rows.blocks,
            is_replicated: rows.is_replicated,
        });
        let (num_blocks, ranks) = (Some(needs.num_blocks), needs.context_parallel_size);
        // SAFETY: the caller's contract.
        *out = unsafe { create(&given, groups.collect(), num_blocks, ranks) }?;
        Ok(())
    })
}

/// Destroys tables. NULL is a no-op.
///
/// @param tables  Not used any more, and neither are its tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_destroy(tables: *mut kvpages_tables) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(tables) }
}

/// Number of groups.
///
/// @param tables  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_num_groups(tables: *const kvpages_tables) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(tables, 0, |handle| handle.tables.num_groups()) }
}

/// Where the tables are, the input tables and the slots.
///
/// @param tables    Borrowed. Not NULL.
/// @param[out] out  The device; its context is the tables'. Not NULL.
/// @return Fails only for NULL.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_device(
    tables: *const kvpages_tables,
    out: *mut kvpages_device,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, input::cleared(out, "out"), |handle, out| {
            let place = match handle.tables.device() {
                Some(context) => Place::Cuda(Arc::clone(context)),
                None => Place::Host,
            };
            *out = kvpages_device::of(&place);
            Ok(())
        })
    }
}

/// What the table of a group is.
///
/// @param tables    Borrowed. Not NULL.
/// @param group     Less than kvpages_tables_num_groups().
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_info(
    tables: *const kvpages_tables,
    group: usize,
    out: *mut kvpages_table_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, extensible::out(out), |handle, out| {
            let config = handle.tables.config(group)?;
            out.fill(kvpages_table_info {
                struct_size: 0,
                block_size: config.block_size,
                kernel_block_size: config.kernel_block_size,
                kernel_blocks_per_block: config.block_size / config.kernel_block_size,
                row_blocks: config.row_blocks,
                row_width: handle.tables.width(group)? as u64,
                is_replicated: u32::from(config.is_replicated),
                reserved0: 0,
            });
            Ok(())
        })
    }
}

/// The table of a group: int32 [max_requests, row width], as it was last applied.
///
/// @param tables    Borrowed. Not NULL.
/// @param group     Less than kvpages_tables_num_groups().
/// @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
///                  Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_table(
    tables: *const kvpages_tables,
    group: usize,
    out: *mut kvpages_tensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, input::cleared(out, "out"), |handle, out| {
            *out = handle.rows(group, handle.tables.addresses(group)?.table);
            Ok(())
        })
    }
}

/// The input table of a group: int32 [max_requests, row width], as it was last
/// gathered.
///
/// @param tables    Borrowed. Not NULL.
/// @param group     Less than kvpages_tables_num_groups().
/// @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
///                  Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_input_table(
    tables: *const kvpages_tables,
    group: usize,
    out: *mut kvpages_tensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, input::cleared(out, "out"), |handle, out| {
            handle.tables.config(group)?;
            *out = handle.input_tables[group];
            Ok(())
        })
    }
}

/// The slots of a group: int64 [max_tokens], as they were last mapped.
///
/// @param tables    Borrowed. Not NULL.
/// @param group     Less than kvpages_tables_num_groups().
/// @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
///                  Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_get_slots(
    tables: *const kvpages_tables,
    group: usize,
    out: *mut kvpages_tensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, input::cleared(out, "out"), |handle, out| {
            handle.tables.config(group)?;
            *out = handle.slots[group];
            Ok(())
        })
    }
}

/// Kernel blocks in the row of a request, those staged included.
///
/// @param tables    Borrowed. Not NULL.
/// @param request   Number of its row.
/// @param group     Less than kvpages_tables_num_groups().
/// @param[out] out  How many; 0 on failure. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_num_entries(
    tables: *const kvpages_tables,
    request: usize,
    group: usize,
    out: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(tables, input::cleared(out, "out"), |handle, out| {
            *out = handle.tables.num_entries(request, group)?;
            Ok(())
        })
    }
}

/// Stages blocks to be added to a row, each as its kernel blocks.
///
/// @param tables     Changed. Not NULL.
/// @param request    Number of its row.
/// @param group      Less than kvpages_tables_num_groups().
/// @param block_ids  Copied. NULL only when there are none.
/// @param count      How many.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The row has no room for them (kind
///         "table_row_overflow"), or one does not exist ("block_id_out_of_range").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_append(
    tables: *mut kvpages_tables,
    request: usize,
    group: usize,
    block_ids: *const i32,
    count: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { write_row(tables, request, group, block_ids, count, false) }
}

/// Stages blocks to take the place of those in a row.
///
/// @param tables     Changed. Not NULL.
/// @param request    Number of its row.
/// @param group      Less than kvpages_tables_num_groups().
/// @param block_ids  Copied. NULL only when there are none.
/// @param count      How many.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The row has no room for them (kind
///         "table_row_overflow"), or one does not exist ("block_id_out_of_range").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_overwrite(
    tables: *mut kvpages_tables,
    request: usize,
    group: usize,
    block_ids: *const i32,
    count: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { write_row(tables, request, group, block_ids, count, true) }
}

/// Stages writes to many rows: all of them, or none when one is refused.
///
/// @param tables  Changed. Not NULL.
/// @param writes  Copied. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A row has no room for its blocks (kind
///         "table_row_overflow"), a block does not exist
///         ("block_id_out_of_range"), or starts do not go up from 0
///         ("boundaries_not_ascending").
/// @note Cost: O(writes * groups + blocks); no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_write(
    tables: *mut kvpages_tables,
    writes: *const kvpages_row_writes,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let given = extensible::read(writes)?;
            let num_writes = given.num_writes;
            let boundaries = num_writes.saturating_mul(handle.tables.num_groups());
            let overwrite = match given.overwrite.is_null() {
                true => None,
                false => Some(input::array(given.overwrite, num_writes, "overwrite")?),
            };
            handle.tables.write(&RowWrites {
                requests: input::array(given.requests, num_writes, "requests")?,
                overwrite,
                starts: input::array(given.starts, boundaries.saturating_add(1), "starts")?,
                blocks: input::array(given.block_ids, given.num_block_ids, "block_ids")?,
            })?;
            Ok(())
        })
    }
}

/// Stages that a row keeps its first blocks only.
///
/// @param tables      Changed. Not NULL.
/// @param request     Number of its row.
/// @param group       Less than kvpages_tables_num_groups().
/// @param num_blocks  Blocks to keep, not of kernel blocks.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  It has fewer (kind
///         "table_row_too_short").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_truncate(
    tables: *mut kvpages_tables,
    request: usize,
    group: usize,
    num_blocks: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            Ok(handle.tables.truncate(request, group, num_blocks)?)
        })
    }
}

/// Stages that a request takes the place of another, in all groups. Its own row is
/// empty then.
///
/// @param tables  Changed. Not NULL.
/// @param from    Number of its row.
/// @param to      Number of the row that gets its blocks, and loses those it had.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_move(
    tables: *mut kvpages_tables,
    from: usize,
    to: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { handle::change(tables, |handle| Ok(handle.tables.relocate(from, to)?)) }
}

/// Stages that two requests change places, in all groups.
///
/// @param tables  Changed. Not NULL.
/// @param a       Number of one row.
/// @param b       Number of the other.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_swap(
    tables: *mut kvpages_tables,
    a: usize,
    b: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { handle::change(tables, |handle| Ok(handle.tables.swap(a, b)?)) }
}

/// Stages that a request has no blocks, in any group.
///
/// @param tables   Changed. Not NULL.
/// @param request  Number of its row.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_clear(
    tables: *mut kvpages_tables,
    request: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { handle::change(tables, |handle| Ok(handle.tables.clear(request)?)) }
}

/// Makes the tables what was staged, in the order in which it was.
///
/// @param tables  Changed. Not NULL.
/// @param stream  The CUstream on which it is done; NULL for the default stream. Not
///                used for host memory.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
/// @note Cost: O(entries that changed); no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_apply(
    tables: *mut kvpages_tables,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            Ok(handle.tables.apply(StreamRef::new(stream))?)
        })
    }
}

/// Makes all tables null and all slots pads, and forgets what was staged, whatever
/// stands in their memory. Addresses stay as they are. For an engine that has
/// released its caches and has them again.
///
/// @param tables  Changed. Not NULL.
/// @param stream  The CUstream on which it is done; NULL for the default stream. Not
///                used for host memory.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_reset(
    tables: *mut kvpages_tables,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            Ok(handle.tables.reset(StreamRef::new(stream))?)
        })
    }
}

/// All that a step asks of tables, in one call: kvpages_tables_apply(),
/// kvpages_tables_gather() and kvpages_tables_map_slots() for a batch, whose arrays
/// are in the host's memory, and which is also described as
/// kvpages_attention_build() takes it. What the engine alone knows of the step, such
/// as causality, stays zero and can be set before that call.
///
/// @param tables    Changed. Not NULL.
/// @param batch     Borrowed. Not NULL. Its arrays are what out_step points to for
///                  the host, so they must stay until that is not used any more.
///                  They are not the tables' own.
/// @param[out] out_step  The step: its counts, the batch's arrays for the host, and
///                  the input table and the slots of each group, which are Kept
///                  until the tables are destroyed. For the device it has the
///                  batch's arrays again; with tables in a device's memory, copies
///                  of them there, which are Kept too, and always at the same
///                  addresses: positions past the tokens are copied as well, to
///                  max_tokens. Zero on failure. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_tables_map_slots() says, or a
///         sequence is shorter than its tokens of the step, or ends before one of
///         their positions (kind "seq_len_too_small"). Nothing is applied then.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
/// @note Cost: O(entries that changed + entries of the rows + tokens * groups); no
///       allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_prepare(
    tables: *mut kvpages_tables,
    batch: *const kvpages_batch,
    out_step: *mut kvpages_step,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    let out = unsafe { extensible::out(out_step) };
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let out = out?;
            let given = extensible::read(batch)?;
            let count = given.num_requests;
            let batch = Batch {
                requests: input::array(given.requests, count, "requests")?,
                query_start: input::array(
                    given.query_start,
                    count.saturating_add(1),
                    "query_start",
                )?,
                seq_lens: input::array(given.seq_lens, count, "seq_lens")?,
                positions: input::array(given.positions, given.num_positions, "positions")?,
            };
            let extent = handle
                .tables
                .prepare(&batch, StreamRef::new(given.stream))?;
            out.fill(handle.step(&given, &extent));
            Ok(())
        })
    }
}

/// Fills the input tables of all groups with the rows of a batch. Rows past it are
/// null.
///
/// @param tables        Changed. Not NULL.
/// @param requests      Borrowed: for each request of the batch the number of its
///                      row, or -1 for a dummy, whose row is null. NULL only when
///                      there are none.
/// @param num_requests  How many.
/// @param num_rows      Rows that kernels will read: num_requests or more, at most
///                      max_requests.
/// @param stream        The CUstream on which it is done; NULL for the default
///                      stream. Not used for host memory.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_rows is out of range (kind
///         "batch_out_of_range").
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
/// @note Cost: O(entries of the rows); no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_gather(
    tables: *mut kvpages_tables,
    requests: *const i32,
    num_requests: usize,
    num_rows: usize,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let requests = input::array(requests, num_requests, "requests")?;
            let stream = StreamRef::new(stream);
            Ok(handle.tables.gather(requests, num_rows, stream)?)
        })
    }
}

/// Makes the input tables of all groups those of a batch of dummies: all null.
///
/// @param tables    Changed. Not NULL.
/// @param num_rows  Rows that kernels will read, at most max_requests.
/// @param stream    The CUstream on which it is done; NULL for the default stream.
///                  Not used for host memory.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_rows is out of range (kind
///         "batch_out_of_range").
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_gather_dummies(
    tables: *mut kvpages_tables,
    num_rows: usize,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let stream = StreamRef::new(stream);
            Ok(handle.tables.gather_dummies(num_rows, stream)?)
        })
    }
}

/// Finds the slots of a batch in all groups. The slot of a token is -1 when its
/// position is negative or past the blocks of its request, when it is another
/// context-parallel rank's, and when its request is a dummy. Slots past the tokens
/// of the batch are -1, to max_tokens.
///
/// @param tables         Changed. Not NULL.
/// @param requests       Borrowed: for each request of the batch the number of its
///                       row, or -1 for a dummy. NULL only when there are none.
/// @param num_requests   How many.
/// @param query_start    Borrowed: num_requests + 1 numbers going up from 0.
///                       Request i has the tokens from query_start[i] to
///                       query_start[i + 1]. Not NULL.
/// @param positions      Borrowed: where each token stands in its request. NULL
///                       only when there are none.
/// @param num_positions  How many: as many as there are tokens, or more, which are
///                       left alone.
/// @param stream         The CUstream on which it is done; NULL for the default
///                       stream. Not used for host memory.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  There are more requests or tokens than
///         the tables are made for (kind "batch_out_of_range"), or query_start does
///         not go up from 0 or leaves positions ("boundaries_not_ascending").
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
/// @note Cost: O(tokens * groups); no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_map_slots(
    tables: *mut kvpages_tables,
    requests: *const i32,
    num_requests: usize,
    query_start: *const i32,
    positions: *const i64,
    num_positions: usize,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let requests = input::array(requests, num_requests, "requests")?;
            let boundaries = num_requests.saturating_add(1);
            let query_start = input::array(query_start, boundaries, "query_start")?;
            let positions = input::array(positions, num_positions, "positions")?;
            let stream = StreamRef::new(stream);
            let tables = &mut handle.tables;
            Ok(tables.map_slots(requests, query_start, positions, stream)?)
        })
    }
}

/// Makes all slots of all groups those of a batch of dummies: -1.
///
/// @param tables  Changed. Not NULL.
/// @param stream  The CUstream on which it is done; NULL for the default stream. Not
///                used for host memory.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_tables_map_dummies(
    tables: *mut kvpages_tables,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            Ok(handle.tables.map_dummies(StreamRef::new(stream))?)
        })
    }
}

impl TablesHandle {
    fn new(tables: Tables) -> Result<TablesHandle, Failure> {
        let num_groups = tables.num_groups();
        let mut handle = TablesHandle {
            tables,
            shapes: input::reserve(num_groups, "groups")?,
            input_tables: input::reserve(num_groups, "groups")?,
            slots: input::reserve(num_groups, "groups")?,
        };
        for group in 0..num_groups {
            let width = handle.tables.width(group)? as i64;
            handle.shapes.push(Shapes {
                rows: [handle.tables.max_requests() as i64, width],
                row_strides: [width, 1],
                slots: [handle.tables.max_tokens() as i64],
                slot_strides: [1],
            });
        }
        // Shapes do not move any more.
        for group in 0..num_groups {
            let addresses = handle.tables.addresses(group)?;
            handle
                .input_tables
                .push(handle.rows(group, addresses.input_table));
            let shapes = &handle.shapes[group];
            handle.slots.push(kvpages_tensor {
                data: addresses.slots.cast(),
                shape: shapes.slots.as_ptr(),
                strides: shapes.slot_strides.as_ptr(),
                dtype: kvpages_dtype::I64 as u32,
                ndim: 1,
            });
        }
        Ok(handle)
    }

    fn rows(&self, group: usize, ids: *mut i32) -> kvpages_tensor {
        let shapes = &self.shapes[group];
        kvpages_tensor {
            data: ids.cast(),
            shape: shapes.rows.as_ptr(),
            strides: shapes.row_strides.as_ptr(),
            dtype: kvpages_dtype::I32 as u32,
            ndim: 2,
        }
    }

    /// A batch that was prepared, as attention takes it.
    fn step(&self, batch: &kvpages_batch, extent: &BatchExtent) -> kvpages_step {
        let num_groups = self.tables.num_groups();
        // In the host's memory they are the caller's.
        let arrays = self.tables.batch_addresses().unwrap_or(BatchAddresses {
            query_start: batch.query_start,
            seq_lens: batch.seq_lens,
            positions: batch.positions,
        });
        kvpages_step {
            num_requests: batch.num_requests as u64,
            num_tokens: extent.num_tokens as u64,
            max_query_len: extent.max_query_len as u64,
            max_seq_len: extent.max_seq_len as u64,
            query_start: arrays.query_start,
            query_start_host: batch.query_start,
            seq_lens: arrays.seq_lens,
            seq_lens_host_bound: batch.seq_lens,
            positions: arrays.positions,
            block_tables: self.input_tables.as_ptr(),
            num_block_tables: num_groups,
            slot_mappings: self.slots.as_ptr(),
            num_slot_mappings: num_groups,
            num_cache_groups: num_groups,
            ..kvpages_step::NOTHING
        }
    }
}

/// # Safety
/// `block_ids` is NULL or valid for reads of `count` ids; `tables` as in [`handle::change`].
unsafe fn write_row(
    tables: *mut kvpages_tables,
    request: usize,
    group: usize,
    block_ids: *const i32,
    count: usize,
    overwrite: bool,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(tables, |handle| {
            let blocks = input::array(block_ids, count, "block_ids")?;
            let written = handle.tables.write_row(request, group, blocks, overwrite);
            Ok(written?)
        })
    }
}

/// # Safety
/// The context of the device, if there is one, lives until the tables are destroyed.
unsafe fn create(
    given: &kvpages_tables_config,
    groups: Vec<GroupConfig>,
    num_blocks: Option<u64>,
    ranks: u64,
) -> Result<*mut kvpages_tables, Failure> {
    let known = KVPAGES_TABLES_ALIGNED_ROWS;
    let flags = input::known_bits(given.flags, known, "kvpages_tables_config.flags")?;
    input::known_bits(given.reserved0, 0, "kvpages_tables_config.reserved0")?;
    // SAFETY: the caller's contract.
    let place = unsafe { given.device.place("kvpages_tables_config.device") }?;
    let tables = Tables::new(&TablesConfig {
        groups,
        max_requests: given.max_requests,
        max_tokens: given.max_tokens,
        num_blocks,
        ranks: Ranks {
            size: ranks,
            rank: given.context_parallel_rank,
            interleave: or(given.context_parallel_interleave, 1),
        },
        aligned_rows: flags & KVPAGES_TABLES_ALIGNED_ROWS != 0,
        device: match place {
            Place::Host => None,
            Place::Cuda(context) => Some(context),
        },
    })?;
    tell_of_new(&tables);
    Ok(handle::give(TablesHandle::new(tables)?))
}

/// Logs tables that were made.
fn tell_of_new(tables: &Tables) {
    log::say(Level::Info, || {
        let now = tables.snapshot();
        let place = match tables.device() {
            Some(context) => format!("memory of CUDA device {}", context.ordinal()),
            None => "host memory".to_owned(),
        };
        format!(
            "tables of {} groups, {} requests and {} tokens, in {place}: {} bytes of the host, {} of the device, {} pinned",
            tables.num_groups(),
            now.max_requests,
            now.max_tokens,
            now.host_bytes,
            now.device_bytes,
            now.pinned_bytes,
        )
    });
}

fn read_group(given: &kvpages_table_group) -> Result<GroupConfig, Failure> {
    input::known_bits(given.reserved0, 0, "kvpages_table_group.reserved0")?;
    let replicated = input::known_bits(given.is_replicated, 1, "is_replicated")?;
    Ok(GroupConfig {
        block_size: given.block_size,
        kernel_block_size: or(given.kernel_block_size, given.block_size),
        row_blocks: given.row_blocks,
        is_replicated: replicated == 1,
    })
}

/// A number of which 0 stands for another.
fn or(number: u64, default: u64) -> u64 {
    match number {
        0 => default,
        number => number,
    }
}
