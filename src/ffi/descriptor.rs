//! Header section: descriptors of caches.

use std::ffi::{CString, c_char};
use std::ptr;

use super::cache::kvpages_cache;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::cache::Ranks;
use crate::descriptor::{
    ContextParallel, Descriptor, DescriptorError, Format, RowPart, TensorParallel,
};

/// All that a transfer engine, or another process, needs to find any block of any
/// layer in the allocations of a cache. It has no addresses, only offsets from the
/// start of each allocation, which whoever has the memory knows.
///
/// Immutable: all calls on it may run concurrently. docs/descriptor.md is the manual
/// of the JSON.
pub struct kvpages_descriptor(Handle<DescriptorHandle>);
opaque!(kvpages_descriptor, DescriptorHandle, "descriptor");

pub(super) struct DescriptorHandle {
    descriptor: Descriptor,
    /// Names of the layers.
    names: Vec<CString>,
}

impl DescriptorHandle {
    pub(super) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }
}

/// What a cache cannot know of its rank, for its descriptor. Zero everywhere is: not
/// told. Blocks can be found without it; kvpages_reshard_create() needs the heads.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_descriptor_config {
    /// sizeof(kvpages_descriptor_config) as the caller compiled it.
    pub struct_size: usize,
    /// Ranks that divide the kv heads, this one included. 0: not told.
    pub tensor_parallel_size: u64,
    /// Which of them this one is.
    pub tensor_parallel_rank: u64,
    /// Ranks that divide the tokens, this one included. 0: not told.
    pub context_parallel_size: u64,
    /// Which of them this one is.
    pub context_parallel_rank: u64,
    /// Tokens that go to one rank before the next one's turn; 0 for 1.
    pub context_parallel_interleave: u64,
    /// Kv heads of the whole model, for each layer of the cache in its order; 0 for
    /// those of all ranks together. Borrowed. NULL: that is so of all layers. It
    /// takes a number where each head is on several ranks: 8 heads on 16 ranks are
    /// 1 on each, as 16 heads are.
    pub model_kv_heads: *const u64,
    /// Entries of model_kv_heads: 0, or the layers of the cache.
    pub num_model_kv_heads: usize,
}
extensible!(kvpages_descriptor_config, num_model_kv_heads: usize);

/// What a descriptor is about.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_descriptor_info {
    /// sizeof(kvpages_descriptor_info) as the caller compiled it.
    pub struct_size: usize,
    /// Blocks that had memory when the descriptor was made.
    pub num_blocks: u64,
    /// Blocks that have addresses.
    pub max_blocks: u64,
    /// What each allocation's start is a multiple of.
    pub alignment_bytes: u64,
    /// Allocations.
    pub num_allocations: u64,
    /// Groups.
    pub num_groups: u64,
    /// Layers: those of the cache, then those whose pages no backend reads.
    pub num_layers: u64,
    /// Ranks that divide the kv heads; 0 when it was not told.
    pub tensor_parallel_size: u64,
    /// Which of them this one is.
    pub tensor_parallel_rank: u64,
    /// Ranks that divide the tokens; 0 when it was not told.
    pub context_parallel_size: u64,
    /// Which of them this one is.
    pub context_parallel_rank: u64,
    /// Tokens that go to one rank before the next one's turn.
    pub context_parallel_interleave: u64,
}
extensible!(kvpages_descriptor_info, context_parallel_interleave: u64);

/// Layers that share a block table, in a descriptor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_described_group {
    /// sizeof(kvpages_described_group) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of one block.
    pub block_size: u64,
    /// Tokens of one kernel block; 0 when no layer has a backend.
    pub kernel_block_size: u64,
}
extensible!(kvpages_described_group, kernel_block_size: u64);

/// What the rows of a layer are made of. A row is one key or one value of one slot
/// and head, or what is stored instead of both.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_row_format {
    /// It has no rows: it keeps states, or no backend says how its pages are read.
    NONE = 0,
    /// Elements, each a number.
    PLAIN = 1,
    /// fp8; the one scale of the layer is the engine's.
    FP8_PER_TENSOR = 2,
    /// int8 and a scale for each row.
    INT8_PER_TOKEN_HEAD = 3,
    /// fp8 and a scale for each row.
    FP8_PER_TOKEN_HEAD = 4,
    /// Two int4 in a byte, and a scale for each row.
    INT4_PER_TOKEN_HEAD = 5,
    /// Two fp4 in a byte, and a scale for each 16; a kernel's own order in a page.
    NVFP4 = 6,
    /// A key and a value packed into one row.
    TURBO_QUANT = 7,
    /// DeepSeek V3.2's packed latent.
    FP8_DS_MLA = 8,
    /// DeepSeek V4's packed latent; a kernel's own order in a page.
    FP8_DS_MLA_V4 = 9,
}

/// A layer in a descriptor. Slot s of block b is in kernel block k = b * (block_slots /
/// kernel_block_slots) + s / kernel_block_slots, in whole numbers. Element e of the key
/// of head h is there k * kernel_block_stride + (s % kernel_block_slots) * slot_stride +
/// h * head_stride + e * content_stride elements behind offset_bytes, and its value
/// value_offset elements further. kvpages_descriptor_get_row() computes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_described_layer {
    /// sizeof(kvpages_described_layer) as the caller compiled it.
    pub struct_size: usize,
    /// The group whose block table it follows.
    pub group: u64,
    /// The layer whose pages these are: another one when the layer shares.
    pub owner_layer: u64,
    /// The allocation that holds its pages.
    pub allocation: u64,
    /// Where the first run of block 0 starts in the allocation.
    pub offset_bytes: u64,
    /// Bytes from block to block.
    pub block_step_bytes: u64,
    /// Runs of a page: 1 when it is in one piece.
    pub num_runs: u64,
    /// Bytes of one run.
    pub run_bytes: u64,
    /// Bytes from run to run of a page; 0 for one run.
    pub run_step_bytes: u64,
    /// Bytes of all runs.
    pub page_size_bytes: u64,
    /// Those that hold something; the others are padding.
    pub content_bytes: u64,
    /// States in a page; 0 for a layer that keeps none.
    pub num_states: u64,
    /// Kv heads on this rank; this and all below are 0 for a layer without rows.
    pub num_kv_heads: u64,
    /// Kv heads of the whole model; 0 when that is not known.
    pub model_kv_heads: u64,
    /// The model's number of head 0, if model_kv_heads is known.
    pub first_model_kv_head: u64,
    /// Slots of a block: its tokens, or fewer where several share one.
    pub block_slots: u64,
    /// Slots of a kernel block.
    pub kernel_block_slots: u64,
    /// Elements from kernel block to kernel block.
    pub kernel_block_stride: u64,
    /// Elements from slot to slot of a kernel block.
    pub slot_stride: u64,
    /// Elements from head to head; 0 when the layout has no heads.
    pub head_stride: u64,
    /// Elements from one element of a row to the next.
    pub content_stride: u64,
    /// Elements from a key to its value; 0 when there is no value of its own.
    pub value_offset: u64,
    /// Stored elements of a key, or of what is stored instead of keys and values.
    pub key_elements: u64,
    /// Stored elements of a value; 0 when there is none of its own.
    pub value_elements: u64,
    /// Elements that the scale behind each key and value takes; 0 when it lies
    /// elsewhere.
    pub inline_scale_elements: u64,
    /// Bytes of the scales behind all rows of a page; 0 when they lie elsewhere.
    pub page_end_scale_bytes: u64,
    /// One of KVPAGES_DTYPE_*: type of the rows' elements.
    pub dtype: u32,
    /// One of KVPAGES_DTYPE_*: type of the scales; 0 when none are stored.
    pub scale_dtype: u32,
    /// One of KVPAGES_ROW_FORMAT_*.
    pub row_format: u32,
    /// 0.
    pub reserved0: u32,
}
extensible!(kvpages_described_layer, reserved0: u32);

/// A state in a descriptor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_described_state {
    /// sizeof(kvpages_described_state) as the caller compiled it.
    pub struct_size: usize,
    /// Where it starts in the page.
    pub offset_bytes: u64,
    /// Its bytes; elements lie one after another.
    pub size_bytes: u64,
    /// Sizes of its dimensions, ndim of them. Kept until the descriptor is destroyed.
    pub shape: *const u64,
    /// Number of dimensions.
    pub ndim: u32,
    /// One of KVPAGES_DTYPE_*.
    pub dtype: u32,
}
extensible!(kvpages_described_state, dtype: u32);

/// A piece of an allocation. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_run {
    /// The allocation.
    pub allocation: u64,
    /// Where it starts there.
    pub offset_bytes: u64,
    /// Its bytes.
    pub size_bytes: u64,
}

/// Where a row is. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_row {
    /// The allocation that holds it.
    pub allocation: u64,
    /// Where its first element starts there.
    pub offset_bytes: u64,
    /// Its elements.
    pub num_elements: u64,
    /// Elements from one to the next.
    pub stride_elements: u64,
    /// Further elements behind them, at the same distance, that are the row's scale;
    /// 0 when it has none there.
    pub scale_elements: u64,
}

/// Which row of a slot and head.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_row_part {
    /// The key, or what is stored instead of keys and values.
    KEY = 0,
    /// The value.
    VALUE = 1,
}

/// The descriptor of a cache as JSON, of the blocks that have memory now. The same
/// cache and config give the same text. docs/descriptor.md says what it means.
///
/// @param cache        Borrowed. Not NULL.
/// @param config       Borrowed. NULL: nothing is told of the rank.
/// @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL when
///                     capacity is 0.
/// @param capacity     Bytes that fit.
/// @param[out] out_length  Bytes of the text, the NUL not counted, also when it does
///                     not fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The heads that are told do not make those
///         of a layer ("kv_heads_differ", "heads_not_dividing"); the text names it.
/// @note Cost: the text is made by each call, also by one that asks for its length.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_copy_descriptor(
    cache: *const kvpages_cache,
    config: *const kvpages_descriptor_config,
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
                let mut ranks = Ranks::default();
                if !config.is_null() {
                    ranks = ranks_of(&extensible::read(config)?)?;
                }
                let text = cache.cache().describe(&ranks)?.to_json()?;
                input::copy_text_out(&text, buffer, capacity, length)
            },
        )
    }
}

/// # Safety
/// The config's array is NULL or valid for reads as long as the result is used.
unsafe fn ranks_of<'a>(given: &kvpages_descriptor_config) -> Result<Ranks<'a>, Failure> {
    for (name, size, others) in [
        (
            "tensor_parallel_size",
            given.tensor_parallel_size,
            given.tensor_parallel_rank,
        ),
        (
            "context_parallel_size",
            given.context_parallel_size,
            given.context_parallel_rank | given.context_parallel_interleave,
        ),
    ] {
        if size == 0 && others != 0 {
            let message = format!("{name} is 0, but the rank's place among the ranks is set");
            return Err(Failure::invalid("bad_values", message));
        }
    }
    // SAFETY: the caller's contract.
    let model_kv_heads = unsafe {
        input::array(
            given.model_kv_heads,
            given.num_model_kv_heads,
            "model_kv_heads",
        )
    }?;
    Ok(Ranks {
        tensor_parallel: (given.tensor_parallel_size != 0).then_some(TensorParallel {
            size: given.tensor_parallel_size,
            rank: given.tensor_parallel_rank,
        }),
        context_parallel: (given.context_parallel_size != 0).then_some(ContextParallel {
            size: given.context_parallel_size,
            rank: given.context_parallel_rank,
            interleave_tokens: given.context_parallel_interleave.max(1),
        }),
        model_kv_heads,
    })
}

/// Reads a descriptor and proves what it says: every block of every layer lies inside
/// its allocation, no byte belongs to different blocks, and every row and state lies
/// in its block. Then no answer of the descriptor reaches outside an allocation of the
/// size it states.
///
/// @param json      Borrowed: UTF-8; no NUL is needed behind it. Not NULL.
/// @param length    Its bytes.
/// @param[out] out  Owned by the caller: kvpages_descriptor_destroy(). NULL on
///                  failure. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  It is no descriptor ("descriptor_not_json"),
///         or its numbers contradict each other ("descriptor_invalid").
/// @retval KVPAGES_STATUS_UNSUPPORTED  Its version is another one than this library
///         knows ("descriptor_version").
/// @note Cost: memory in proportion to the text.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_create(
    json: *const c_char,
    length: usize,
    out: *mut *mut kvpages_descriptor,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        input::aligned(json, "json")?;
        // SAFETY: the caller's contract.
        let text = unsafe { input::array(json.cast::<u8>(), length, "json") }?;
        let descriptor = Descriptor::from_json(text)?;
        let mut names = input::reserve(descriptor.layers.len(), "layers")?;
        for layer in &descriptor.layers {
            // No name with a NUL was read.
            names.push(CString::new(layer.name.as_str()).unwrap_or_default());
        }
        *out = handle::give(DescriptorHandle { descriptor, names });
        Ok(())
    })
}

/// Destroys a descriptor. NULL is a no-op.
///
/// @param descriptor  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_destroy(descriptor: *mut kvpages_descriptor) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(descriptor) }
}

/// A descriptor as JSON: of one that was read from what this version of the library
/// wrote, the same bytes.
///
/// @param descriptor   Borrowed. Not NULL.
/// @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL when
///                     capacity is 0.
/// @param capacity     Bytes that fit.
/// @param[out] out_length  Bytes of the text, the NUL not counted, also when it does
///                     not fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_copy_json(
    descriptor: *const kvpages_descriptor,
    buffer: *mut c_char,
    capacity: usize,
    out_length: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            descriptor,
            input::cleared(out_length, "out_length"),
            |handle, length| {
                let text = handle.descriptor.to_json()?;
                input::copy_text_out(&text, buffer, capacity, length)
            },
        )
    }
}

/// What a descriptor is about.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param[out] out    Filled. Not NULL; struct_size set.
/// @return Fails only for NULL and for a struct_size that no version has.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_get_info(
    descriptor: *const kvpages_descriptor,
    out: *mut kvpages_descriptor_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(descriptor, extensible::out(out), |handle, out| {
            let of = &handle.descriptor;
            let tensor = of.tensor_parallel.as_ref();
            let context = of.context_parallel.as_ref();
            out.fill(kvpages_descriptor_info {
                struct_size: 0,
                num_blocks: of.num_blocks,
                max_blocks: of.max_blocks,
                alignment_bytes: of.alignment_bytes,
                num_allocations: of.allocations.len() as u64,
                num_groups: of.groups.len() as u64,
                num_layers: of.layers.len() as u64,
                tensor_parallel_size: tensor.map_or(0, |ranks| ranks.size),
                tensor_parallel_rank: tensor.map_or(0, |ranks| ranks.rank),
                context_parallel_size: context.map_or(0, |ranks| ranks.size),
                context_parallel_rank: context.map_or(0, |ranks| ranks.rank),
                context_parallel_interleave: context.map_or(0, |ranks| ranks.interleave_tokens),
            });
            Ok(())
        })
    }
}

/// Bytes of an allocation, those of blocks without memory included.
///
/// @param descriptor  Borrowed.
/// @param allocation  Less than kvpages_descriptor_info.num_allocations.
/// @return 0 when there is no such allocation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_allocation_bytes(
    descriptor: *const kvpages_descriptor,
    allocation: usize,
) -> u64 {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(descriptor, 0, |handle| {
            let found = handle.descriptor.allocations.get(allocation);
            found.map_or(0, |allocation| allocation.size_bytes)
        })
    }
}

/// A group.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param group       Less than kvpages_descriptor_info.num_groups.
/// @param[out] out    Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_get_group(
    descriptor: *const kvpages_descriptor,
    group: usize,
    out: *mut kvpages_described_group,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(descriptor, extensible::out(out), |handle, out| {
            let groups = &handle.descriptor.groups;
            let found = groups.get(group).ok_or(DescriptorError::NotThere {
                what: "group",
                number: group as u64,
                count: groups.len() as u64,
            })?;
            out.fill(kvpages_described_group {
                struct_size: 0,
                block_size: found.block_size_tokens,
                kernel_block_size: found.kernel_block_size_tokens.unwrap_or(0),
            });
            Ok(())
        })
    }
}

/// Layers: those with views, numbered as in the cache; then those whose pages no
/// backend reads.
///
/// @param descriptor  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_num_layers(
    descriptor: *const kvpages_descriptor,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(descriptor, 0, |handle| handle.descriptor.layers.len()) }
}

/// Name of a layer.
///
/// @param descriptor  Borrowed.
/// @param layer       Less than kvpages_descriptor_num_layers().
/// @return A string of the descriptor's; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_layer_name(
    descriptor: *const kvpages_descriptor,
    layer: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(descriptor, ptr::null(), |handle| {
            let name = handle.names.get(layer);
            name.map_or(ptr::null(), |name| name.as_ptr())
        })
    }
}

/// The number of a layer.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param name        Borrowed. Not NULL.
/// @param[out] out_layer  Its number. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_find_layer(
    descriptor: *const kvpages_descriptor,
    name: *const c_char,
    out_layer: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            descriptor,
            input::cleared(out_layer, "out_layer"),
            |handle, out| {
                *out = handle.descriptor.find(input::text(name, "name")?)?;
                Ok(())
            },
        )
    }
}

/// A layer.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param layer       Less than kvpages_descriptor_num_layers().
/// @param[out] out    Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_get_layer(
    descriptor: *const kvpages_descriptor,
    layer: usize,
    out: *mut kvpages_described_layer,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(descriptor, extensible::out(out), |handle, out| {
            let found = handle.descriptor.layer(layer)?;
            let pages = &found.pages;
            let mut described = kvpages_described_layer {
                group: found.group,
                owner_layer: found.owner_layer,
                allocation: found.allocation,
                offset_bytes: pages.offset_bytes,
                block_step_bytes: pages.block_step_bytes,
                num_runs: pages.num_runs,
                run_bytes: pages.run_bytes,
                run_step_bytes: pages.run_step_bytes,
                page_size_bytes: pages.page_bytes,
                content_bytes: pages.content_bytes,
                num_states: found
                    .states
                    .as_ref()
                    .map_or(0, |states| states.len() as u64),
                ..NO_ROWS
            };
            if let Some(rows) = &found.attention {
                described = kvpages_described_layer {
                    num_kv_heads: rows.num_kv_heads,
                    model_kv_heads: rows.model_kv_heads.unwrap_or(0),
                    first_model_kv_head: rows.first_model_kv_head.unwrap_or(0),
                    block_slots: rows.block_slots,
                    kernel_block_slots: rows.kernel_block_slots,
                    kernel_block_stride: rows.kernel_block_stride_elements,
                    slot_stride: rows.slot_stride_elements,
                    head_stride: rows.head_stride_elements,
                    content_stride: rows.content_stride_elements,
                    value_offset: rows.value_offset_elements,
                    key_elements: rows.key_elements,
                    value_elements: rows.value_elements,
                    inline_scale_elements: rows.inline_scale_elements,
                    page_end_scale_bytes: rows.page_end_scale_bytes,
                    dtype: rows.dtype as u32,
                    scale_dtype: rows.scale_dtype.map_or(0, |dtype| dtype as u32),
                    row_format: format_number(rows.format) as u32,
                    ..described
                };
            }
            out.fill(described);
            Ok(())
        })
    }
}

const fn format_number(format: Format) -> kvpages_row_format {
    match format {
        Format::Plain => kvpages_row_format::PLAIN,
        Format::Fp8PerTensor => kvpages_row_format::FP8_PER_TENSOR,
        Format::Int8PerTokenHead => kvpages_row_format::INT8_PER_TOKEN_HEAD,
        Format::Fp8PerTokenHead => kvpages_row_format::FP8_PER_TOKEN_HEAD,
        Format::Int4PerTokenHead => kvpages_row_format::INT4_PER_TOKEN_HEAD,
        Format::Nvfp4 => kvpages_row_format::NVFP4,
        Format::TurboQuant => kvpages_row_format::TURBO_QUANT,
        Format::Fp8DsMla => kvpages_row_format::FP8_DS_MLA,
        Format::Fp8DsMlaV4 => kvpages_row_format::FP8_DS_MLA_V4,
    }
}

const NO_ROWS: kvpages_described_layer = kvpages_described_layer {
    struct_size: 0,
    group: 0,
    owner_layer: 0,
    allocation: 0,
    offset_bytes: 0,
    block_step_bytes: 0,
    num_runs: 0,
    run_bytes: 0,
    run_step_bytes: 0,
    page_size_bytes: 0,
    content_bytes: 0,
    num_states: 0,
    num_kv_heads: 0,
    model_kv_heads: 0,
    first_model_kv_head: 0,
    block_slots: 0,
    kernel_block_slots: 0,
    kernel_block_stride: 0,
    slot_stride: 0,
    head_stride: 0,
    content_stride: 0,
    value_offset: 0,
    key_elements: 0,
    value_elements: 0,
    inline_scale_elements: 0,
    page_end_scale_bytes: 0,
    dtype: 0,
    scale_dtype: 0,
    row_format: kvpages_row_format::NONE as u32,
    reserved0: 0,
};

/// A state of a state layer.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param layer       Less than kvpages_descriptor_num_layers().
/// @param state       Less than kvpages_described_layer.num_states.
/// @param[out] out    Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or state.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_get_state(
    descriptor: *const kvpages_descriptor,
    layer: usize,
    state: usize,
    out: *mut kvpages_described_state,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(descriptor, extensible::out(out), |handle, out| {
            let states = handle.descriptor.layer(layer)?.states.as_deref();
            let states = states.unwrap_or(&[]);
            let found = states.get(state).ok_or(DescriptorError::NotThere {
                what: "state",
                number: state as u64,
                count: states.len() as u64,
            })?;
            let elements = found.shape.iter().copied().fold(1, u64::saturating_mul);
            out.fill(kvpages_described_state {
                struct_size: 0,
                offset_bytes: found.offset_bytes,
                size_bytes: elements.saturating_mul(found.dtype.bytes()),
                shape: found.shape.as_ptr(),
                ndim: u32::try_from(found.shape.len()).unwrap_or(u32::MAX),
                dtype: found.dtype as u32,
            });
            Ok(())
        })
    }
}

/// Where a block of a layer is: the runs of its page.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param layer       Less than kvpages_descriptor_num_layers().
/// @param block       Less than kvpages_descriptor_info.num_blocks.
/// @param[out] runs   Room for capacity runs. May be NULL when capacity is 0.
/// @param capacity    Runs that fit.
/// @param[out] out_count  How many there are, also when they do not fit: the layer's
///                    num_runs. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The block had no memory when the descriptor
///         was made ("block_id_out_of_range").
/// @note Cost: no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_copy_block_runs(
    descriptor: *const kvpages_descriptor,
    layer: usize,
    block: u64,
    runs: *mut kvpages_run,
    capacity: usize,
    out_count: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            descriptor,
            input::cleared(out_count, "out_count"),
            |handle, out_count| {
                let found = handle.descriptor.block_runs(layer, block)?;
                *out_count = found.len();
                if capacity < found.len() {
                    return Err(Failure::too_small("runs", found.len(), capacity));
                }
                let places = input::array_mut(runs, found.len(), "runs")?;
                for (place, run) in places.iter_mut().zip(found) {
                    *place = kvpages_run {
                        allocation: run.allocation,
                        offset_bytes: run.offset_bytes,
                        size_bytes: run.size_bytes,
                    };
                }
                Ok(())
            },
        )
    }
}

/// Where one row of an attention layer is.
///
/// @param descriptor  Borrowed. Not NULL.
/// @param layer       Less than kvpages_descriptor_num_layers().
/// @param block       Less than kvpages_descriptor_info.num_blocks.
/// @param slot        Less than kvpages_described_layer.block_slots.
/// @param head        Less than kvpages_described_layer.num_kv_heads.
/// @param part        One of KVPAGES_ROW_PART_*.
/// @param[out] out    Filled. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The block ("block_id_out_of_range"), slot
///         or head ("row_out_of_range") is not there.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The layer has no rows, or none of that part
///         ("rows_not_supported").
/// @note Cost: no allocation, no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_descriptor_get_row(
    descriptor: *const kvpages_descriptor,
    layer: usize,
    block: u64,
    slot: u64,
    head: u64,
    part: u32,
    out: *mut kvpages_row,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(descriptor, input::cleared(out, "out"), |handle, out| {
            const KEY: u32 = kvpages_row_part::KEY as u32;
            const VALUE: u32 = kvpages_row_part::VALUE as u32;
            let part = match part {
                KEY => RowPart::Key,
                VALUE => RowPart::Value,
                other => {
                    let message = format!("part is {other}, which is not one of its values");
                    return Err(Failure::invalid("unknown_value", message));
                }
            };
            let row = handle.descriptor.row(layer, block, slot, head, part)?;
            *out = kvpages_row {
                allocation: row.allocation,
                offset_bytes: row.offset_bytes,
                num_elements: row.num_elements,
                stride_elements: row.stride_elements,
                scale_elements: row.scale_elements,
            };
            Ok(())
        })
    }
}
