//! What an engine calls in every step allocates nothing, through the C ABI and with errors left
//! out.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

use kvpages::ffi::metadata::kvpages_step;
use kvpages::ffi::status::kvpages_status;
use kvpages::ffi::tables::*;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread during a call.
fn allocations(body: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    body();
    ALLOCATIONS.get() - before
}

#[track_caller]
fn good(status: kvpages_status) {
    assert_eq!(status, kvpages_status::Ok);
}

const REQUESTS: usize = 8;

fn tables() -> *mut kvpages_tables {
    let group = |block_size, kernel_block_size, is_replicated| kvpages_table_group {
        block_size,
        kernel_block_size,
        row_blocks: 64,
        is_replicated,
        reserved0: 0,
    };
    let groups = [group(16, 16, 0), group(64, 16, 0), group(16, 0, 1)];
    let config = kvpages_tables_config {
        struct_size: size_of::<kvpages_tables_config>(),
        groups: groups.as_ptr(),
        num_groups: groups.len(),
        max_requests: REQUESTS as u64,
        max_tokens: 256,
        num_blocks: 1024,
        context_parallel_size: 2,
        context_parallel_rank: 1,
        context_parallel_interleave: 4,
        flags: KVPAGES_TABLES_ALIGNED_ROWS,
        reserved0: 0,
        max_model_len: 0,
        // SAFETY: all zero is the host.
        device: unsafe { std::mem::zeroed() },
    };
    let mut out = ptr::null_mut();
    // SAFETY: the config and its groups are there, and `out` is a place.
    good(unsafe { kvpages_tables_create(&config, &mut out) });
    out
}

#[test]
fn every_call_of_a_step() {
    let tables = tables();
    assert!(allocations(|| drop(Box::new(1))) == 1, "the counter counts");
    let requests: Vec<i32> = (0..REQUESTS as i32).collect();
    let blocks: Vec<i32> = (0..3 * REQUESTS as i32).collect();
    let starts: Vec<usize> = (0..=blocks.len()).collect();
    let overwrite = [0, 1, 0, 0, 0, 1, 0, 0];
    let writes = kvpages_row_writes {
        struct_size: size_of::<kvpages_row_writes>(),
        requests: requests.as_ptr(),
        num_writes: REQUESTS,
        overwrite: overwrite.as_ptr(),
        starts: starts.as_ptr(),
        block_ids: blocks.as_ptr(),
        num_block_ids: blocks.len(),
    };
    let batch = [3, -1, 0, 7];
    let query_start = [0, 40, 50, 51, 80];
    let positions: Vec<i64> = (0..80).collect();
    let seq_lens = [40, 10, 90, 80];
    let prepared = kvpages_batch {
        struct_size: size_of::<kvpages_batch>(),
        requests: batch.as_ptr(),
        num_requests: batch.len(),
        query_start: query_start.as_ptr(),
        seq_lens: seq_lens.as_ptr(),
        positions: positions.as_ptr(),
        num_positions: positions.len(),
        stream: ptr::null_mut(),
    };
    let calls = || {
        // SAFETY: the handle is live, and the arrays are as long as they are said to be.
        unsafe {
            good(kvpages_tables_write(tables, &writes));
            good(kvpages_tables_append(tables, 2, 1, blocks.as_ptr(), 2));
            good(kvpages_tables_overwrite(tables, 3, 0, blocks.as_ptr(), 5));
            good(kvpages_tables_truncate(tables, 3, 0, 1));
            good(kvpages_tables_move(tables, 4, 5));
            good(kvpages_tables_swap(tables, 0, 6));
            good(kvpages_tables_apply(tables, ptr::null_mut()));
            let rows = batch.len();
            good(kvpages_tables_gather(
                tables,
                batch.as_ptr(),
                rows,
                REQUESTS,
                ptr::null_mut(),
            ));
            let (starts, tokens) = (query_start.as_ptr(), positions.as_ptr());
            good(kvpages_tables_map_slots(
                tables,
                batch.as_ptr(),
                rows,
                starts,
                tokens,
                80,
                ptr::null_mut(),
            ));
            let mut step: kvpages_step = std::mem::zeroed();
            step.struct_size = size_of::<kvpages_step>();
            good(kvpages_tables_prepare(tables, &prepared, &mut step));
            assert_eq!((step.num_tokens, step.max_query_len), (80, 40));
            good(kvpages_tables_gather_dummies(
                tables,
                REQUESTS,
                ptr::null_mut(),
            ));
            good(kvpages_tables_map_dummies(tables, ptr::null_mut()));
            good(kvpages_tables_clear(tables, 1));
            good(kvpages_tables_apply(tables, ptr::null_mut()));
            let mut entries = 0;
            good(kvpages_tables_num_entries(tables, 2, 1, &mut entries));
            assert_ne!(entries, 0);
        }
    };
    // From the first step on, and many writes to one row without applying them.
    for _ in 0..3 {
        assert_eq!(allocations(calls), 0);
    }
    let many = || {
        for _ in 0..1000 {
            // SAFETY: as above.
            unsafe {
                good(kvpages_tables_append(tables, 1, 0, blocks.as_ptr(), 3));
                good(kvpages_tables_clear(tables, 1));
            }
        }
    };
    assert_eq!(allocations(many), 0);
    // SAFETY: the handle is live.
    good(unsafe { kvpages_tables_reset(tables, ptr::null_mut()) });
    // SAFETY: the handle is not used any more.
    unsafe { kvpages_tables_destroy(tables) };
}
