//! Steps allocate nothing: operations through the C interface, with a counting allocator.

// A test of the boundary: raw pointers, and structs whose fields are zero unless set.
#![allow(unsafe_code, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::mem::{self, size_of};
use std::ptr;

use kvpages::ffi::backend::{kvpages_backend_create_preset, kvpages_backend_destroy};
use kvpages::ffi::cache::{kvpages_cache_config, kvpages_cache_create, kvpages_cache_destroy};
use kvpages::ffi::memory::{kvpages_memory_create_host, kvpages_memory_destroy};
use kvpages::ffi::model::{
    kvpages_layer, kvpages_model_add_layer, kvpages_model_create, kvpages_model_destroy,
};
use kvpages::ffi::ops::*;
use kvpages::ffi::plan::{kvpages_plan_config, kvpages_plan_create, kvpages_plan_destroy};
use kvpages::ffi::plan::{kvpages_shortfall, kvpages_worker};
use kvpages::ffi::spec::kvpages_spec;
use kvpages::ffi::status::kvpages_status;

struct Counting;

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    let _ = TAKEN.try_with(|taken| taken.set(taken.get() + 1));
}

// SAFETY: the system's allocator, with a count.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(data, layout) }
    }
    unsafe fn realloc(&self, data: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.realloc(data, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn must(status: kvpages_status) {
    assert_eq!(status, kvpages_status::Ok);
}

/// A struct of the header, zero but for its size.
fn sized<T: Copy>() -> T {
    // SAFETY: plain integers and pointers; the first field is the size.
    unsafe {
        let mut value: T = mem::zeroed();
        ptr::from_mut(&mut value)
            .cast::<usize>()
            .write(size_of::<T>());
        value
    }
}

#[test]
fn calls_that_succeed_allocate_nothing() {
    const F16: u32 = 3;
    const F32: u32 = 2;
    // SAFETY: everything is alive, and used by this thread only.
    unsafe {
        let mut backend = ptr::null_mut();
        must(kvpages_backend_create_preset(1, &mut backend));
        let mut model = ptr::null_mut();
        must(kvpages_model_create(&mut model));
        let mut spec: kvpages_spec = sized();
        (spec.kind, spec.dtype) = (1, F16);
        (spec.block_size, spec.num_kv_heads, spec.head_size) = (16, 2, 8);
        for name in [c"layers.0", c"layers.1", c"layers.2"] {
            let mut layer: kvpages_layer = sized();
            layer.name = name.as_ptr();
            layer.spec = &spec;
            layer.backend = backend;
            must(kvpages_model_add_layer(model, &layer));
        }
        let mut config: kvpages_plan_config = sized();
        (config.max_model_len, config.max_tokens_in_flight) = (64, 64);
        let worker = kvpages_worker {
            model,
            memory_bytes: 1 << 20,
        };
        let mut plan = ptr::null_mut();
        let none: *mut kvpages_shortfall = ptr::null_mut();
        must(kvpages_plan_create(&config, &worker, 1, &mut plan, none));
        let mut memory = ptr::null_mut();
        must(kvpages_memory_create_host(&mut memory));
        let mut config: kvpages_cache_config = sized();
        config.memory = memory;
        let mut cache = ptr::null_mut();
        must(kvpages_cache_create(
            plan,
            &config,
            &mut cache,
            ptr::null_mut(),
        ));
        let mut config: kvpages_ops_config = sized();
        config.max_concurrency = 1;
        let mut ops = ptr::null_mut();
        must(kvpages_ops_create(cache, &config, &mut ops));

        let ids = [3, 1, 4];
        let pair = |source, target| kvpages_block_copy { source, target };
        let copies = [
            pair(1, 2),
            pair(2, 1),
            pair(3, 4),
            pair(4, 5),
            pair(5, 3),
            pair(1, 6),
        ];
        let group = [0u64];
        let layer = [1usize];
        let mut selection: kvpages_block_selection = sized();
        (selection.groups, selection.num_groups) = (group.as_ptr(), 1);
        (selection.layers, selection.num_layers) = (layer.as_ptr(), 1);
        let slots = [70i64, -1, 5, 6];
        let rows = [0.5f32; 4 * 2 * 8];
        let mut room = [0f32; 4 * 2 * 8];
        let mut room_v = room;
        let mut stored: [kvpages_kv_rows; 3] = mem::zeroed();
        let mut read: [kvpages_kv_rows_out; 3] = mem::zeroed();
        for i in 0..3 {
            (stored[i].layer, read[i].layer) = (i, i);
            (stored[i].keys, stored[i].values) = (rows.as_ptr().cast(), rows.as_ptr().cast());
            (read[i].keys, read[i].values) = (room.as_mut_ptr().cast(), room_v.as_mut_ptr().cast());
        }
        let mut write: kvpages_kv_write = sized();
        (write.layers, write.num_layers) = (stored.as_ptr(), 3);
        (write.slots, write.num_slots, write.dtype) = (slots.as_ptr(), 4, F32);
        let mut gather: kvpages_kv_gather = sized();
        (gather.layers, gather.num_layers) = (read.as_ptr(), 3);
        (gather.slots, gather.num_slots, gather.dtype) = (slots.as_ptr(), 4, F32);

        let before = TAKEN.get();
        for _ in 0..3 {
            must(kvpages_ops_zero_blocks(
                ops,
                ids.as_ptr(),
                3,
                ptr::null(),
                ptr::null_mut(),
            ));
            must(kvpages_ops_zero_blocks(
                ops,
                ids.as_ptr(),
                3,
                &selection,
                ptr::null_mut(),
            ));
            must(kvpages_ops_poison_blocks(
                ops,
                ids.as_ptr(),
                3,
                &selection,
                ptr::null_mut(),
            ));
            must(kvpages_ops_copy_blocks(
                ops,
                copies.as_ptr(),
                6,
                ptr::null(),
                0,
                ptr::null_mut(),
            ));
            must(kvpages_ops_copy_blocks(
                ops,
                copies.as_ptr(),
                6,
                &selection,
                0,
                ptr::null_mut(),
            ));
            must(kvpages_ops_write_kv(ops, &write));
            must(kvpages_ops_gather_kv(ops, &gather));
        }
        assert_eq!(TAKEN.get() - before, 0);
        assert_eq!(room[..8], [0.5; 8]);
        // The count counts.
        assert_ne!(
            kvpages_ops_zero_blocks(ops, [-1].as_ptr(), 1, ptr::null(), ptr::null_mut()),
            kvpages_status::Ok
        );
        assert!(TAKEN.get() > before);

        kvpages_ops_destroy(ops);
        kvpages_cache_destroy(cache);
        kvpages_memory_destroy(memory);
        kvpages_plan_destroy(plan);
        kvpages_model_destroy(model);
        kvpages_backend_destroy(backend);
    }
}
