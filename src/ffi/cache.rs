//! Header section: caches.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use super::device::kvpages_device;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::memory::kvpages_memory;
use super::plan::kvpages_plan;
use super::spec::kind_number;
use super::status::{Failure, kvpages_status};
use super::types::kvpages_tensor;
use super::view::{kvpages_view_report, report};
use crate::cache::{Blueprint, Cache, Fresh, LayerViews, bind_order};
use crate::log::{self, Level};
use crate::memory::{Allocation, Place};
use crate::view::View;

/// The memory of one worker's layers, and a view of it for each layer.
///
/// Immutable but for kvpages_cache_resize(): all other calls on it may run
/// concurrently. Addresses stay as they are until it is destroyed. What is done
/// with the bytes is up to the engine.
pub struct kvpages_cache(Handle<CacheHandle>);
opaque!(kvpages_cache, CacheHandle, "cache");

pub(super) struct CacheHandle {
    cache: Arc<Cache>,
    /// Names of the model's layers.
    names: Arc<Vec<CString>>,
    /// The views of all layers, one layer after another.
    tensors: Vec<kvpages_tensor>,
    /// Where each layer's views start in `tensors`, and where the last one's end.
    starts: Vec<usize>,
}

impl Drop for CacheHandle {
    fn drop(&mut self) {
        log::say(Level::Debug, || {
            let bytes = self.cache.held_bytes();
            let is_used = Arc::strong_count(&self.cache) > 1;
            let kept = if is_used {
                ", which operations on it or tensors of DLPack keep"
            } else {
                ""
            };
            format!("a cache is destroyed, with {bytes} bytes of memory{kept}")
        });
    }
}

// SAFETY: the pointers in `tensors` lead into the cache's own allocations and views, which do not
// move; nothing is written through them here.
unsafe impl Send for CacheHandle {}
// SAFETY: as above.
unsafe impl Sync for CacheHandle {}

/// Flag of kvpages_cache_config: blocks that were never written hold bytes of 0xFF
/// instead of zeros, so that reading them is loud, as kvpages_ops_poison_blocks()
/// says. Blocks that come with kvpages_cache_resize() too; block 0 stays zero. For
/// debugging: host memory is then all touched when it is taken. What the engine must
/// clear before it is used (kvpages_worker_info.needs_zeroing, states) it must clear
/// as ever.
pub const KVPAGES_CACHE_POISON: u32 = 1;

/// What a cache is made of.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_cache_config {
    /// sizeof(kvpages_cache_config) as the caller compiled it.
    pub struct_size: usize,
    /// Number of the worker in the plan.
    pub worker: usize,
    /// Where the bytes come from. Not NULL.
    pub memory: *const kvpages_memory,
    /// Blocks that get memory. 0: all blocks of the plan, for good. Any other
    /// number, up to those of the plan, makes a cache that can be resized: addresses
    /// are reserved for all blocks of the plan, and memory comes and goes with
    /// kvpages_cache_resize().
    pub num_blocks: u64,
    /// KVPAGES_CACHE_* flags.
    pub flags: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_cache_config, reserved0: u32);

/// What a layer of a cache is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_layer_info {
    /// sizeof(kvpages_layer_info) as the caller compiled it.
    pub struct_size: usize,
    /// The group whose block table it follows.
    pub group: u64,
    /// Number of the allocation that holds its pages.
    pub allocation: u64,
    /// The layer of this cache whose pages it reads: another one when it shares.
    pub owner_layer: u64,
    /// Views: 1 of an attention layer, one for each state of a state layer.
    pub num_views: u64,
    /// Tokens of one block, as it was planned.
    pub block_size: u64,
    /// Tokens of one kernel block of the group: what its block table counts.
    pub kernel_block_size: u64,
    /// Slots that one block stores.
    pub storage_block_size: u64,
    /// Bytes of one block in this layer, padding included.
    pub page_size_bytes: u64,
    /// One of KVPAGES_SPEC_KIND_*.
    pub spec_kind: u32,
    /// Query heads on one rank.
    pub num_query_heads: u32,
}
extensible!(kvpages_layer_info, num_query_heads: u32);

/// How the axes of an attention layer's view lie, whatever dimensions its backend
/// fuses them to. Key element e of a token in slot s of kernel block b and of head
/// h is element b * kernel_block_stride + s * token_stride + h * head_stride + e *
/// content_stride of the view; its value lies value_offset elements behind.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_view_axes {
    /// sizeof(kvpages_view_axes) as the caller compiled it.
    pub struct_size: usize,
    /// Elements from kernel block to kernel block.
    pub kernel_block_stride: u64,
    /// Elements from slot to slot.
    pub token_stride: u64,
    /// Elements from head to head; 0 when the layout has no heads.
    pub head_stride: u64,
    /// Elements from one element of a key or value to the next.
    pub content_stride: u64,
    /// Elements from a key to its value; 0 when there is no value of its own.
    pub value_offset: u64,
    /// Stored elements of a key, or of what is stored instead of keys and values.
    pub key_elements: u64,
    /// Stored elements of a value; 0 when there is none of its own.
    pub value_elements: u64,
    /// Elements that the scale behind each key and value takes; 0 when there is
    /// none, or when it lies at the end of the page.
    pub scale_elements: u64,
    /// Slots of one kernel block.
    pub kernel_block_slots: u64,
    /// Heads.
    pub num_heads: u64,
}
extensible!(kvpages_view_axes, num_heads: u64);

/// One piece of memory in which blocks lie at a constant distance: block b is the
/// block_step_bytes bytes at data + b * block_step_bytes. Together the regions
/// hold every byte of every block, so they are what a transfer engine registers,
/// and what is cleared to clear a block. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_region {
    /// Its first byte.
    pub data: *mut std::ffi::c_void,
    /// Its bytes.
    pub size_bytes: u64,
    /// Bytes from block to block.
    pub block_step_bytes: u64,
    /// Blocks.
    pub num_blocks: u64,
    /// Number of the allocation it is part of.
    pub allocation: u64,
}

/// One allocation. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_allocation {
    /// Its first byte, at a multiple of at least 256.
    pub data: *mut std::ffi::c_void,
    /// Its bytes, those of blocks without memory included.
    pub size_bytes: u64,
}

/// Allocates a worker's part of a plan. Fresh memory is zero, but with
/// KVPAGES_CACHE_POISON. When the memory runs
/// out half-way, all of it is given back.
///
/// @param plan      Borrowed; the cache keeps what it needs of it. Not NULL.
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_cache_destroy(). NULL on failure.
/// @param[out] out_needed_bytes  Bytes that all blocks of the plan take, also when
///                  the call fails for want of them or of another kind of memory.
///                  May be NULL.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The memory has not enough.
/// @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed; the kind is
///         "driver_failed", and the text names the driver's function.
/// @retval KVPAGES_STATUS_NOT_FOUND  The plan has no such worker.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_blocks is more than the plan has; the
///         kind is "cache_num_blocks".
/// @retval KVPAGES_STATUS_UNSUPPORTED  num_blocks is set, and this kind of memory
///         cannot grow: only host memory and virtual CUDA memory can.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_create(
    plan: *const kvpages_plan,
    config: *const kvpages_cache_config,
    out: *mut *mut kvpages_cache,
    out_needed_bytes: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (needed, out) = unsafe {
            let wanted = !out_needed_bytes.is_null();
            let needed = wanted.then(|| input::cleared(out_needed_bytes, "out_needed_bytes"));
            input::both(needed.transpose(), input::cleared(out, "out"))
        }?;
        // SAFETY: the caller's contract.
        let (plan, config) = unsafe { (handle::shared(plan)?, extensible::read(config)?) };
        let (blueprint, names) = plan.worker_blueprint(config.worker)?;
        if let Some(needed) = needed {
            *needed = blueprint.total_bytes();
        }
        let what = "kvpages_cache_config.flags";
        let fresh = match input::known_bits(config.flags, KVPAGES_CACHE_POISON, what)? {
            0 => Fresh::Zero,
            _ => Fresh::Poison,
        };
        input::known_bits(config.reserved0, 0, "kvpages_cache_config.reserved0")?;
        // SAFETY: the caller's contract.
        let memory = unsafe { handle::shared(config.memory) }?;
        let cache = match config.num_blocks {
            0 => Cache::allocate(Arc::clone(blueprint), &**memory, fresh)?,
            num_blocks => Cache::reserve(Arc::clone(blueprint), &**memory, num_blocks, fresh)?,
        };
        tell_of_new(&cache, config.worker);
        *out = handle::give(CacheHandle::new(cache, Arc::clone(names)));
        Ok(())
    })
}

/// Destroys a cache and gives its memory back, or once what was made from it is
/// destroyed too (kvpages_ops, tensors of DLPack). NULL is a no-op.
///
/// Nothing that runs on a device uses the memory any more. When the cache is in
/// virtual CUDA memory, no stream of its context is being captured into a graph: the
/// call waits for all work of the context, which would spoil the capture.
///
/// @param cache  Not used any more, and neither are its views.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_destroy(cache: *mut kvpages_cache) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(cache) }
}

/// Changes how many blocks have memory, between steps. No address changes; views
/// and regions describe all blocks of the plan as before. New blocks are zero, or
/// poisoned with KVPAGES_CACHE_POISON. The operations of the cache know at once: a
/// block without memory is out of range. Tables do not: they take any id below the
/// number of blocks they were made for. Which blocks are handed out is the caller's
/// to decide, and a kernel that follows a table to a block without memory faults.
///
/// Nothing that runs on a device uses the blocks that go, no other call uses the
/// cache or its operations, and nobody touches these blocks through a tensor of
/// DLPack, which describes them still. Shrinking on a device waits for all work of
/// the context, of which no stream may be in the course of a capture. Memory comes
/// and goes in pieces, for each run of blocks (keys and values may lie apart): whole
/// pages or device granules, and no more than about one 256th of an allocation. When
/// growing fails, all is as before. When a device fails while shrinking, the blocks
/// are gone, and some of their memory stays until the cache grows or is destroyed.
///
/// @param cache          For itself. Not NULL.
/// @param num_blocks     1 to kvpages_cache_max_blocks().
/// @param blocks_in_use  Borrowed: the blocks that hold something; none of them may
///                       go. May be NULL when num_blocks_in_use is 0.
/// @param num_blocks_in_use  How many they are.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A block in use would go ("block_in_use"),
///         or has no memory now ("block_id_out_of_range"); the text names it. Or
///         num_blocks is 0 or more than there are addresses for ("cache_num_blocks").
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough.
/// @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The cache was made with memory for all
///         blocks: kvpages_cache_config.num_blocks was 0.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_resize(
    cache: *mut kvpages_cache,
    num_blocks: u64,
    blocks_in_use: *const i32,
    num_blocks_in_use: usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(cache, |cache| {
            let in_use = input::array(blocks_in_use, num_blocks_in_use, "blocks_in_use")?;
            let before = cache.cache.num_blocks();
            cache.cache.resize(num_blocks, in_use)?;
            tell_of_resized(&cache.cache, before);
            Ok(())
        })
    }
}

/// Blocks of every group that have memory. Block ids are 0 to this number minus 1.
///
/// @param cache  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_num_blocks(cache: *const kvpages_cache) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.cache.num_blocks()) }
}

/// Blocks of every group that have addresses: those of the plan. Views and regions
/// describe them all.
///
/// @param cache  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_max_blocks(cache: *const kvpages_cache) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.blueprint().num_blocks()) }
}

/// Where a cache's bytes are.
///
/// @param cache     Borrowed. Not NULL.
/// @param[out] out  Filled; its context is valid until the cache is destroyed. Not
///                  NULL.
/// @return Fails only for NULL.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_device(
    cache: *const kvpages_cache,
    out: *mut kvpages_device,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |cache, out| {
            *out = kvpages_device::of(cache.cache.place());
            Ok(())
        })
    }
}

/// Layers that have views, in the model's order: layers with pages of their own
/// and layers that share. Layers without a backend and encoder-only ones are left
/// out.
///
/// @param cache  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_num_layers(cache: *const kvpages_cache) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.blueprint().layers().len()) }
}

/// Name of a layer.
///
/// @param cache  Borrowed.
/// @param layer  Less than kvpages_cache_num_layers().
/// @return A string of the cache's; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_layer_name(
    cache: *const kvpages_cache,
    layer: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(cache, ptr::null(), |cache| {
            let layer = cache.blueprint().layers().get(layer);
            let name = layer.and_then(|layer| cache.names.get(layer.layer));
            name.map_or(ptr::null(), |name| name.as_ptr())
        })
    }
}

/// The number of a layer in this cache, which counts only layers with views. Look
/// it up once, and ask for views by number. kvpages_block_selection and
/// kvpages_kv_rows take this number too.
///
/// @param cache     Borrowed. Not NULL.
/// @param name      Borrowed. Not NULL.
/// @param[out] out_layer  Its number. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name with a view.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_find_layer(
    cache: *const kvpages_cache,
    name: *const c_char,
    out_layer: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            cache,
            input::cleared(out_layer, "out_layer"),
            |cache, out| {
                let name = input::text(name, "name")?;
                let found = cache.blueprint().find(name);
                *out = found.ok_or_else(|| {
                    Failure::not_found(format!("the cache has no layer of the name {name}"))
                })?;
                Ok(())
            },
        )
    }
}

/// The number in this cache of a layer that is known by its number in the worker's
/// model: the one in kvpages_builder_info, and what the calls on kvpages_attention
/// take. The two differ when a layer before it has no view.
///
/// @param cache        Borrowed. Not NULL.
/// @param model_layer  Its number in the worker's model.
/// @param[out] out_layer  Its number in the cache. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  The model has no such layer, or it has no view.
/// @note Cost: one array read; no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_find_model_layer(
    cache: *const kvpages_cache,
    model_layer: usize,
    out_layer: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            cache,
            input::cleared(out_layer, "out_layer"),
            |cache, out| {
                let found = cache.blueprint().find_number(model_layer);
                *out = found.ok_or_else(|| {
                    Failure::not_found(format!(
                        "layer {model_layer} of the model has no view in the cache"
                    ))
                })?;
                Ok(())
            },
        )
    }
}

/// Views of a layer: 1 of an attention layer, one for each state of a state layer.
///
/// @param cache  Borrowed.
/// @param layer  Less than kvpages_cache_num_layers().
/// @return 0 when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_num_views(
    cache: *const kvpages_cache,
    layer: usize,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.views_of(layer).len()) }
}

/// A view of a layer.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param view      Less than kvpages_cache_num_views(): 0, or which state.
/// @param[out] out  Filled; its pointers are Kept until the cache is destroyed.
///                  Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
/// @note Cost: two array reads; no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_view(
    cache: *const kvpages_cache,
    layer: usize,
    view: usize,
    out: *mut kvpages_tensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |cache, out| {
            let found = cache.views_of(layer).get(view);
            *out = *found.ok_or_else(|| cache.no_view(layer, view))?;
            Ok(())
        })
    }
}

/// What is proven of a view.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param view      Less than kvpages_cache_num_views(): 0, or which state.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_report(
    cache: *const kvpages_cache,
    layer: usize,
    view: usize,
    out: *mut kvpages_view_report,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, extensible::out(out), |cache, out| {
            let (layer, view) = cache.found(layer, view)?;
            out.fill(report(view, layer.allocation, layer.owner));
            Ok(())
        })
    }
}

/// What a layer is.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_layer(
    cache: *const kvpages_cache,
    layer: usize,
    out: *mut kvpages_layer_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, extensible::out(out), |cache, out| {
            let found = cache.blueprint().layers().get(layer);
            let found = found.ok_or_else(|| cache.no_view(layer, 0))?;
            let of_model = cache.blueprint().model().layers().get(found.layer);
            out.fill(kvpages_layer_info {
                struct_size: 0,
                group: found.group as u64,
                allocation: found.allocation as u64,
                owner_layer: found.owner as u64,
                num_views: cache.views_of(layer).len() as u64,
                block_size: found.spec.block_size(),
                kernel_block_size: found.kernel_block_size,
                storage_block_size: found.spec.storage_block_size(),
                page_size_bytes: found.spec.page().padded,
                spec_kind: kind_number(&found.spec),
                num_query_heads: of_model.map_or(0, |layer| layer.num_query_heads),
            });
            Ok(())
        })
    }
}

/// How the axes of an attention layer's view lie.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND    There is no such layer.
/// @retval KVPAGES_STATUS_UNSUPPORTED  It is a state layer; a state's dimensions
///                                     are those it was described with.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_axes(
    cache: *const kvpages_cache,
    layer: usize,
    out: *mut kvpages_view_axes,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, extensible::out(out), |cache, out| {
            let (found, view) = cache.found(layer, 0)?;
            let axes = view.axes.ok_or_else(|| {
                let name = cache.blueprint().name(found);
                Failure::unsupported("state_without_axes", format!("layer {name} keeps states"))
            })?;
            out.fill(kvpages_view_axes {
                struct_size: 0,
                kernel_block_stride: axes.kernel_block_stride,
                token_stride: axes.token_stride,
                head_stride: axes.head_stride,
                content_stride: axes.content_stride,
                value_offset: axes.value_offset,
                key_elements: axes.key_elements,
                value_elements: axes.value_elements,
                scale_elements: axes.scale_elements,
                kernel_block_slots: axes.kernel_block_slots,
                num_heads: axes.num_heads,
            });
            Ok(())
        })
    }
}

/// Number of allocations.
///
/// @param cache  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_num_allocations(cache: *const kvpages_cache) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.cache.allocations().len()) }
}

/// An allocation.
///
/// @param cache       Borrowed. Not NULL.
/// @param allocation  Less than kvpages_cache_num_allocations().
/// @param[out] out    Filled; its pointer is Kept until the cache is destroyed.
///                    Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such allocation.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_allocation(
    cache: *const kvpages_cache,
    allocation: usize,
    out: *mut kvpages_allocation,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |cache, out| {
            let all = cache.cache.allocations();
            let found = all
                .get(allocation)
                .ok_or_else(|| none_of("allocation", allocation, all.len()))?;
            *out = kvpages_allocation {
                data: found.data().as_ptr().cast(),
                size_bytes: found.bytes(),
            };
            Ok(())
        })
    }
}

/// Number of memory regions.
///
/// @param cache  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_num_regions(cache: *const kvpages_cache) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(cache, 0, |cache| cache.blueprint().regions().len()) }
}

/// A memory region.
///
/// @param cache     Borrowed. Not NULL.
/// @param region    Less than kvpages_cache_num_regions().
/// @param[out] out  Filled; its pointer is Kept until the cache is destroyed. Not
///                  NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such region.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_get_region(
    cache: *const kvpages_cache,
    region: usize,
    out: *mut kvpages_region,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |cache, out| {
            let all = cache.blueprint().regions();
            let found = all
                .get(region)
                .ok_or_else(|| none_of("region", region, all.len()))?;
            *out = kvpages_region {
                data: cache.address(found.allocation, found.offset_bytes).cast(),
                size_bytes: found.size_bytes,
                block_step_bytes: found.block_step_bytes,
                num_blocks: found.num_blocks,
                allocation: found.allocation as u64,
            };
            Ok(())
        })
    }
}

/// The layers in binding order: by the index in their names, see
/// kvpages_layer_index(), and layers of one index in the model's order.
///
/// @param cache                  Borrowed. Not NULL.
/// @param num_attention_modules  Attention modules of one layer; 0 for 1.
/// @param[out] layers            Room for capacity numbers of layers. May be NULL
///                               when capacity is 0.
/// @param capacity               Numbers that fit.
/// @param[out] out_count         How many there are, also when they do not fit.
///                               Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_copy_bound_layers(
    cache: *const kvpages_cache,
    num_attention_modules: u64,
    layers: *mut usize,
    capacity: usize,
    out_count: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            cache,
            input::cleared(out_count, "out_count"),
            |cache, out_count| {
                let blueprint = cache.blueprint();
                let names = blueprint.layers().iter().map(|layer| blueprint.name(layer));
                let names: Vec<&str> = names.collect();
                let order = bind_order(&names, num_attention_modules.max(1))?;
                input::copy_out(&order, layers, capacity, out_count, "layers")
            },
        )
    }
}

/// Where bytes are, for people.
fn place_text(place: &Place) -> String {
    match place {
        Place::Host => "host memory".to_owned(),
        Place::Cuda(context) => format!("memory of CUDA device {}", context.ordinal()),
    }
}

/// Logs a cache that was made.
fn tell_of_new(cache: &Cache, worker: usize) {
    log::say(Level::Info, || {
        let blueprint = cache.blueprint();
        let (blocks, max) = (cache.num_blocks(), blueprint.num_blocks());
        let fresh = match cache.fresh() {
            Fresh::Zero => "",
            Fresh::Poison => "; blocks that were never written are poisoned",
        };
        format!(
            "cache of worker {worker}: {blocks} of {max} blocks of {} bytes in {} allocations of {} bytes, in {}{fresh}",
            blueprint.bytes_per_block(),
            cache.allocations().len(),
            blueprint.total_bytes(),
            place_text(cache.place()),
        )
    });
}

/// Logs a cache that has another number of blocks than before.
fn tell_of_resized(cache: &Cache, before: u64) {
    let now = cache.num_blocks();
    if now == before {
        return;
    }
    log::say(Level::Info, || {
        let what = if now > before { "grew" } else { "shrank" };
        format!(
            "a cache {what} from {before} to {now} blocks of {} bytes, in {}; {} bytes of memory are held",
            cache.blueprint().bytes_per_block(),
            place_text(cache.place()),
            cache.held_bytes(),
        )
    });
}

fn none_of(what: &str, number: usize, count: usize) -> Failure {
    Failure::not_found(format!(
        "{what} {number} is not there, the cache has {count}"
    ))
}

impl CacheHandle {
    fn new(cache: Cache, names: Arc<Vec<CString>>) -> CacheHandle {
        let mut handle = CacheHandle {
            cache: Arc::new(cache),
            names,
            tensors: Vec::new(),
            starts: vec![0],
        };
        let blueprint = handle.cache.blueprint();
        let mut tensors = Vec::with_capacity(blueprint.layers().len());
        let mut starts = Vec::with_capacity(blueprint.layers().len() + 1);
        for layer in blueprint.layers() {
            starts.push(tensors.len());
            tensors.extend(
                blueprint
                    .views(layer)
                    .iter()
                    .map(|view| handle.tensor(layer, view)),
            );
        }
        starts.push(tensors.len());
        handle.tensors = tensors;
        handle.starts = starts;
        handle
    }

    /// The cache, for what must keep it alive.
    pub(super) fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    fn blueprint(&self) -> &Blueprint {
        self.cache.blueprint()
    }

    fn tensor(&self, layer: &LayerViews, view: &View) -> kvpages_tensor {
        kvpages_tensor {
            data: self.address(layer.allocation, view.offset_bytes).cast(),
            shape: view.shape().as_ptr(),
            strides: view.strides().as_ptr(),
            dtype: view.dtype as u32,
            ndim: view.shape().len() as u32,
        }
    }

    fn address(&self, allocation: usize, offset_bytes: u64) -> *mut u8 {
        let found = self.cache.allocations().get(allocation);
        // The audit proved that the offset lies inside, so nothing wraps.
        found.map_or(ptr::null_mut(), |found| {
            found.data().as_ptr().wrapping_add(offset_bytes as usize)
        })
    }

    fn views_of(&self, layer: usize) -> &[kvpages_tensor] {
        let range = self
            .starts
            .get(layer)
            .zip(self.starts.get(layer.saturating_add(1)));
        range.map_or(&[], |(&start, &end)| &self.tensors[start..end])
    }

    /// A view, and the allocation that it is in.
    pub(super) fn memory_of(
        &self,
        layer: usize,
        view: usize,
    ) -> Result<(&View, &Allocation), Failure> {
        let (found, view) = self.found(layer, view)?;
        let allocation = self.cache.allocations().get(found.allocation);
        let allocation = allocation.ok_or_else(|| {
            let name = self.blueprint().name(found);
            Failure::internal(format!("a bug in kvpages: layer {name} has no allocation"))
        })?;
        Ok((view, allocation))
    }

    fn found(&self, layer: usize, view: usize) -> Result<(&LayerViews, &View), Failure> {
        let blueprint = self.blueprint();
        let of_layer = blueprint.layers().get(layer);
        let found = of_layer.and_then(|layer| Some((layer, blueprint.views(layer).get(view)?)));
        found.ok_or_else(|| self.no_view(layer, view))
    }

    fn no_view(&self, layer: usize, view: usize) -> Failure {
        let layers = self.blueprint().layers().len();
        Failure::not_found(match self.views_of(layer).len() {
            0 => format!("layer {layer} is not there, the cache has {layers} layers"),
            views => format!("view {view} of layer {layer} is not there, it has {views} views"),
        })
    }
}
