//! A step takes no memory: counted by the allocator.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use kvpages::ffi::attention::*;
use kvpages::ffi::backend::*;
use kvpages::ffi::metadata::*;
use kvpages::ffi::model::*;
use kvpages::ffi::plan::*;
use kvpages::ffi::spec::*;
use kvpages::ffi::status::kvpages_status;
use kvpages::ffi::types::{kvpages_dtype, kvpages_tensor};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(data, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn zeroed<T>(set: impl FnOnce(&mut T)) -> T {
    // SAFETY: used for structs of the header, of which all zero bytes are a value.
    let mut value: T = unsafe { std::mem::zeroed() };
    set(&mut value);
    value
}

fn must(status: kvpages_status) {
    assert_eq!(status, kvpages_status::Ok);
}

unsafe extern "C" fn create(
    _: *mut c_void,
    _: *const kvpages_builder_info,
    _: *mut *mut c_void,
) -> i32 {
    0
}

unsafe extern "C" fn build(
    user: *mut c_void,
    _: *mut c_void,
    _: *const kvpages_common_metadata,
    _: *mut c_void,
    out: *mut *mut c_void,
) -> i32 {
    // SAFETY: a place for the metadata.
    unsafe { *out = user };
    0
}

unsafe extern "C" fn destroy(_: *mut c_void, _: *mut c_void) {}

#[test]
fn a_step_takes_no_memory() {
    // SAFETY: every handle is live, and every pointer is to something that outlives the call.
    unsafe {
        let (mut backend, mut model, mut plan) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        must(kvpages_backend_create_preset(
            kvpages_preset::TritonNhd as u32,
            &mut backend,
        ));
        must(kvpages_model_create(&mut model));
        for (i, name) in [c"l.0", c"l.1", c"l.2", c"l.3"].into_iter().enumerate() {
            let spec: kvpages_spec = zeroed(|spec: &mut kvpages_spec| {
                spec.struct_size = size_of::<kvpages_spec>();
                spec.kind = kvpages_spec_kind::FullAttention as u32;
                spec.dtype = kvpages_dtype::F16 as u32;
                spec.block_size = 16;
                spec.num_kv_heads = 1;
                spec.head_size = 64;
                if i % 2 == 0 {
                    spec.kind = kvpages_spec_kind::SlidingWindow as u32;
                    spec.sliding_window = 64;
                }
            });
            let layer = zeroed(|layer: &mut kvpages_layer| {
                layer.struct_size = size_of::<kvpages_layer>();
                layer.name = name.as_ptr();
                layer.spec = &spec;
                layer.backend = backend;
                layer.num_query_heads = i as u32;
            });
            must(kvpages_model_add_layer(model, &layer));
        }
        let config = zeroed(|config: &mut kvpages_plan_config| {
            config.struct_size = size_of::<kvpages_plan_config>();
            config.max_model_len = 16;
            config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
            config.num_blocks_override = 8;
        });
        let worker = kvpages_worker {
            model,
            memory_bytes: 0,
        };
        must(kvpages_plan_create(
            &config,
            &worker,
            1,
            &mut plan,
            ptr::null_mut(),
        ));
        let mut metadata = 0u8;
        let callbacks = zeroed(|callbacks: &mut kvpages_builder_callbacks| {
            callbacks.struct_size = size_of::<kvpages_builder_callbacks>();
            callbacks.user = ptr::from_mut(&mut metadata).cast();
            callbacks.create = Some(create);
            callbacks.build = Some(build);
            callbacks.destroy = Some(destroy);
        });
        let attention_config = zeroed(|config: &mut kvpages_attention_config| {
            config.struct_size = size_of::<kvpages_attention_config>();
            config.callbacks = &callbacks;
            config.num_builders = 2;
        });
        let mut attention = ptr::null_mut();
        must(kvpages_attention_create(
            plan,
            &attention_config,
            &mut attention,
        ));
        assert_eq!(kvpages_attention_num_cache_groups(attention), 2);
        assert_eq!(kvpages_attention_num_groups(attention, 0), 2);

        let mut numbers = [0i32; 6];
        let starts = [0i32, 3, 4];
        let mut slots = [0i64; 4];
        let (table_shape, table_strides) = ([2i64, 3], [3i64, 1]);
        let (slots_shape, slots_strides) = ([4i64], [1i64]);
        let tables = [kvpages_tensor {
            data: numbers.as_mut_ptr().cast(),
            shape: table_shape.as_ptr(),
            strides: table_strides.as_ptr(),
            dtype: kvpages_dtype::I32 as u32,
            ndim: 2,
        }; 2];
        let mappings = [kvpages_tensor {
            data: slots.as_mut_ptr().cast(),
            shape: slots_shape.as_ptr(),
            strides: slots_strides.as_ptr(),
            dtype: kvpages_dtype::I64 as u32,
            ndim: 1,
        }; 2];
        let mut step = zeroed(|step: &mut kvpages_step| {
            step.struct_size = size_of::<kvpages_step>();
            step.num_requests = 2;
            step.num_tokens = 4;
            step.max_query_len = 3;
            step.query_start = starts.as_ptr();
            step.query_start_host = starts.as_ptr();
            step.seq_lens = numbers.as_ptr();
            step.block_tables = tables.as_ptr();
            step.num_block_tables = 2;
            step.slot_mappings = mappings.as_ptr();
            step.num_slot_mappings = 2;
            step.num_cache_groups = 2;
        });
        let before = ALLOCATIONS.get();
        for i in 0..100 {
            step.builder = i % 2;
            step.for_capture = u32::from(i % 5 == 0);
            must(kvpages_attention_build(attention, &step));
            for layer in 0..4 {
                let found = kvpages_attention_layer_metadata(attention, 0, layer);
                assert_eq!(found, ptr::from_mut(&mut metadata).cast());
                let mut mapping = mappings[0];
                must(kvpages_attention_get_slot_mapping(
                    attention,
                    0,
                    layer,
                    &mut mapping,
                ));
            }
        }
        assert_eq!(ALLOCATIONS.get(), before);
        kvpages_attention_destroy(attention);
        kvpages_plan_destroy(plan);
        kvpages_model_destroy(model);
        kvpages_backend_destroy(backend);
    }
}
