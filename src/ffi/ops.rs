//! Header section: operations on blocks.

use std::ffi::c_void;
use std::sync::Arc;

use super::cache::kvpages_cache;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::cache::Cache;
use crate::cuda::StreamRef;
use crate::dtype::Dtype;
use crate::memory::Place;
use crate::ops::{
    BlockCopy, Gather, LayerMemory, LayerRows, Ops, OpsConfig, RowSlots, Selection, Write,
};

/// Operations on the blocks of one cache: zero and copy blocks, store rows of
/// tokens and read them. It keeps the cache's memory.
///
/// What calls need is taken when it is made: a call that succeeds allocates
/// nothing and takes no lock. Calls that take it as const may run concurrently,
/// also with those of another kvpages_ops, as long as they do not touch the same
/// slots; the others must have it for themselves. What a call refuses it refuses
/// before it touches anything.
///
/// In host memory a call returns when its work is done. In a device's it puts the
/// work on the caller's stream and returns: it waits for nothing, allocates nothing
/// on the device, and may be captured into a graph, which then holds the blocks and
/// addresses of the call. Rows, slots and block ids to gather are the device's then
/// and must stay until the stream is done; slots are not looked at by the host, and
/// rows of slots that are out of range are skipped. Ids to zero and pairs to copy
/// are always the host's, and are not needed after the call. When a device fails
/// half way, what it did stays.
pub struct kvpages_ops(Handle<OpsHandle>);
opaque!(kvpages_ops, OpsHandle, "ops");

pub(super) struct OpsHandle {
    ops: Ops,
    /// Whose memory `ops` uses.
    _cache: Arc<Cache>,
}

/// What operations are made for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_ops_config {
    /// sizeof(kvpages_ops_config) as the caller compiled it.
    pub struct_size: usize,
    /// Most block ids, or pairs of them, in one call; 0 for all blocks of the
    /// cache.
    pub max_block_ids: u64,
    /// Calls that may be under way at once. At least 1; nothing needs more yet.
    pub max_concurrency: u64,
}
extensible!(kvpages_ops_config, max_concurrency: u64);

/// The layers that a call on blocks means: those of the groups listed and those
/// listed themselves. With both lists empty it means none; a NULL selection means
/// all layers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_block_selection {
    /// sizeof(kvpages_block_selection) as the caller compiled it.
    pub struct_size: usize,
    /// Numbers of groups. May be NULL when num_groups is 0.
    pub groups: *const u64,
    /// Groups listed.
    pub num_groups: usize,
    /// Numbers of layers in the cache, which leaves out those without views. May be
    /// NULL when num_layers is 0.
    pub layers: *const usize,
    /// Layers listed.
    pub num_layers: usize,
}
extensible!(kvpages_block_selection, num_layers: usize);

/// A block to copy over another one. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_block_copy {
    /// The block that is read.
    pub source: i32,
    /// The block that is written.
    pub target: i32,
}

/// Rows of tokens to store in one layer. A row is what the layer stores of one
/// token: for each head a key and a value, each a run of elements without gaps.
/// Row i starts i token strides behind the first. A latent has one head; it comes
/// as keys alone, or in two parts, the second one as values. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_kv_rows {
    /// Number of the layer in the cache, which leaves out those without views: not
    /// the number in the model.
    pub layer: usize,
    /// The first token's keys, or latent. Not NULL, unless there are no slots.
    pub keys: *const c_void,
    /// The first token's values, or the second part of its latent. NULL when the
    /// layer stores none, and else only when there are no slots.
    pub values: *const c_void,
    /// Elements from one token's keys to the next one's; 0 when there are no gaps.
    pub key_token_stride: u64,
    /// Elements from one head's key to the next one's; 0 when there are no gaps.
    pub key_head_stride: u64,
    /// As key_token_stride, for values.
    pub value_token_stride: u64,
    /// As key_head_stride, for values.
    pub value_head_stride: u64,
    /// Of a latent in two parts: elements of the first. 0: in one piece.
    pub latent_elements: u64,
    /// fp8 with one scale for the tensor: a stored number times this is the number
    /// meant. 0 is 1. Without effect otherwise.
    pub key_scale: f32,
    /// As key_scale, for values, or for the second part of a latent.
    pub value_scale: f32,
}

/// Room for rows that are read. As kvpages_kv_rows. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_kv_rows_out {
    /// Number of the layer in the cache, which leaves out those without views: not
    /// the number in the model.
    pub layer: usize,
    /// Room for the first token's keys, or latent. Not NULL, unless there are no
    /// slots.
    pub keys: *mut c_void,
    /// Room for the first token's values, or the second part of its latent. NULL
    /// when the layer stores none, and else only when there are no slots.
    pub values: *mut c_void,
    /// Elements from one token's keys to the next one's; 0 when there are no gaps.
    pub key_token_stride: u64,
    /// Elements from one head's key to the next one's; 0 when there are no gaps.
    pub key_head_stride: u64,
    /// As key_token_stride, for values.
    pub value_token_stride: u64,
    /// As key_head_stride, for values.
    pub value_head_stride: u64,
    /// Of a latent in two parts: elements of the first. 0: in one piece.
    pub latent_elements: u64,
    /// fp8 with one scale for the tensor: a stored number times this is the number
    /// meant. 0 is 1. Without effect otherwise.
    pub key_scale: f32,
    /// As key_scale, for values, or for the second part of a latent.
    pub value_scale: f32,
}

/// Rows to store.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_kv_write {
    /// sizeof(kvpages_kv_write) as the caller compiled it.
    pub struct_size: usize,
    /// The layers, all of one group. May be NULL when num_layers is 0.
    pub layers: *const kvpages_kv_rows,
    /// Layers listed.
    pub num_layers: usize,
    /// The slot of each row in the layers' group. A layer that is compressed stores
    /// fewer slots than a block has tokens: its slot is the token's divided by
    /// compress_ratio, and all layers of a call store as many of each block. Rows of
    /// slot -1 are skipped. Two rows of one slot leave either. May be NULL when
    /// num_slots is 0.
    pub slots: *const i64,
    /// Rows.
    pub num_slots: usize,
    /// Element type of the rows: one of KVPAGES_DTYPE_*.
    pub dtype: u32,
    /// Which fp8 layers of plain bytes hold: KVPAGES_DTYPE_F8_E4M3FN or
    /// KVPAGES_DTYPE_F8_E5M2. 0 is the former.
    pub fp8_format: u32,
    /// The CUstream on which it is done; NULL for the default stream. Not used for
    /// host memory.
    pub stream: *mut c_void,
}
extensible!(kvpages_kv_write, stream: *mut c_void);

/// Rows to read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_kv_gather {
    /// sizeof(kvpages_kv_gather) as the caller compiled it.
    pub struct_size: usize,
    /// The layers, all of one group. May be NULL when num_layers is 0.
    pub layers: *const kvpages_kv_rows_out,
    /// Layers listed.
    pub num_layers: usize,
    /// The slot of each row, as in kvpages_kv_write. The room of a row of slot -1
    /// stays as it is. May be NULL when num_slots is 0.
    pub slots: *const i64,
    /// Rows. 0 when block_ids are given.
    pub num_slots: usize,
    /// Blocks whose slots are read one after another, instead of slots. May be
    /// NULL when num_block_ids is 0.
    pub block_ids: *const i32,
    /// Blocks. 0 when slots are given.
    pub num_block_ids: usize,
    /// Element type of the rows: one of KVPAGES_DTYPE_*.
    pub dtype: u32,
    /// Which fp8 layers of plain bytes hold: KVPAGES_DTYPE_F8_E4M3FN or
    /// KVPAGES_DTYPE_F8_E5M2. 0 is the former.
    pub fp8_format: u32,
    /// The CUstream on which it is done; NULL for the default stream. Not used for
    /// host memory.
    pub stream: *mut c_void,
}
extensible!(kvpages_kv_gather, stream: *mut c_void);

/// Prepares operations on a cache. They keep its memory, also when the cache is
/// destroyed first.
///
/// When the cache is resized, its operations know: a block that has no memory is out
/// of range.
///
/// @param cache     Borrowed. Not NULL. For one in a device's memory its kernels are
///                  loaded now, which may compile them and take a second.
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_ops_destroy(). NULL on failure.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the scratch.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed, or cannot load the
///         kernels.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_create(
    cache: *const kvpages_cache,
    config: *const kvpages_ops_config,
    out: *mut *mut kvpages_ops,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let (cache, config) = unsafe { (handle::shared(cache)?, extensible::read(config)?) };
        let cache = Arc::clone(cache.cache());
        let ops = operations(&cache, &config)?;
        *out = handle::give(OpsHandle { ops, _cache: cache });
        Ok(())
    })
}

fn operations(cache: &Cache, config: &kvpages_ops_config) -> Result<Ops, Failure> {
    let blueprint = cache.blueprint();
    let model = blueprint.model();
    let of = |layer: usize, group, allocation, runs, read| {
        let name = &*model.layers()[layer].name;
        let memory = cache.allocations().get(allocation).ok_or_else(|| {
            Failure::internal(format!("a bug in kvpages: layer {name} has no allocation"))
        })?;
        Ok::<_, Failure>(LayerMemory {
            name,
            group,
            allocation,
            data: memory.data(),
            allocation_bytes: memory.bytes(),
            runs,
            read,
        })
    };
    let mut layers = Vec::with_capacity(blueprint.layers().len() + blueprint.unread().len());
    for layer in blueprint.layers() {
        // A layer with views has at least one.
        let Some(view) = blueprint.views(layer).first() else {
            continue;
        };
        layers.push(of(
            layer.layer,
            layer.group,
            layer.allocation,
            view.runs,
            Some((&*layer.spec, view)),
        )?);
    }
    for pages in blueprint.unread() {
        layers.push(of(
            pages.layer,
            pages.group,
            pages.allocation,
            pages.runs,
            None,
        )?);
    }
    let config = OpsConfig {
        num_blocks: blueprint.num_blocks(),
        present_blocks: Arc::clone(cache.present_blocks()),
        device: match cache.place() {
            Place::Host => None,
            Place::Cuda(context) => Some(Arc::clone(context)),
        },
        num_groups: blueprint.num_groups(),
        max_block_ids: config.max_block_ids,
        max_concurrency: config.max_concurrency,
    };
    // SAFETY: the handle keeps the cache, whose views are proven; the rest is the caller's contract.
    Ok(unsafe { Ops::new(&layers, &config) }?)
}

/// Destroys operations. NULL is a no-op.
///
/// @param ops  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_destroy(ops: *mut kvpages_ops) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(ops) }
}

/// Clears blocks: in every layer chosen the whole page of each block, padding
/// included, of attention and of states alike. Layers that no backend reads are
/// cleared with their group. Memory that layers share is cleared as far as the
/// widest chosen page reaches, and nothing else.
///
/// @param ops            Not NULL. The call has it for itself.
/// @param block_ids      Borrowed; of manager blocks, not of kernel blocks. May be
///                       NULL when num_block_ids is 0.
/// @param num_block_ids  Blocks listed.
/// @param selection      Borrowed. NULL for all layers; struct_size set.
/// @param stream         The CUstream on which it is done; NULL for the default
///                       stream. Not used for host memory.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  An id is out of range (kind
///         "block_id_out_of_range") or listed twice ("duplicate_block_id"), or
///         there are more than max_block_ids ("too_many_block_ids").
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_zero_blocks(
    ops: *mut kvpages_ops,
    block_ids: *const i32,
    num_block_ids: usize,
    selection: *const kvpages_block_selection,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(ops, |handle| {
            let ids = input::array(block_ids, num_block_ids, "block_ids")?;
            let stream = StreamRef::new(stream);
            Ok(handle.ops.zero_blocks(ids, selected(selection)?, stream)?)
        })
    }
}

/// Fills blocks with bytes of 0xFF, so that reading one that holds nothing is loud:
/// for debugging, when an engine frees blocks. The bytes are those that
/// kvpages_ops_zero_blocks() clears, and no others.
///
/// Elements of such bytes are NaN as F64, F32, F16, BF16, F8_E4M3FN and F8_E5M2, and
/// so are the f32 scales behind keys and values of int8, int4 and fp8. Integers
/// without a scale of their own are -1, or 255; F8_E4M3FNUZ, F8_E5M2FNUZ and
/// F4_E2M1X2 have no NaN of these bits, and become their largest negative number.
///
/// Block 0 is refused: kernels read it where a row has no block, and multiply what
/// they read by a weight of 0, which only of a number is 0. For the same reason
/// clear a block with kvpages_ops_zero_blocks() when it is handed out, if kernels
/// read slots of it behind the last token.
///
/// @param ops            Not NULL. The call has it for itself.
/// @param block_ids      Borrowed; of manager blocks, not of kernel blocks. May be
///                       NULL when num_block_ids is 0.
/// @param num_block_ids  Blocks listed.
/// @param selection      Borrowed. NULL for all layers; struct_size set.
/// @param stream         The CUstream on which it is done; NULL for the default
///                       stream. Not used for host memory.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_ops_zero_blocks(); or a block
///         is block 0 (kind "null_block").
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_poison_blocks(
    ops: *mut kvpages_ops,
    block_ids: *const i32,
    num_block_ids: usize,
    selection: *const kvpages_block_selection,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(ops, |handle| {
            let ids = input::array(block_ids, num_block_ids, "block_ids")?;
            let stream = StreamRef::new(stream);
            Ok(handle
                .ops
                .poison_blocks(ids, selected(selection)?, stream)?)
        })
    }
}

/// Copies blocks in the layers chosen, as if all were read before any is written:
/// chains, swaps and longer cycles come out right.
///
/// @param ops         Not NULL. The call has it for itself.
/// @param copies      Borrowed. May be NULL when num_copies is 0.
/// @param num_copies  Pairs listed.
/// @param selection   Borrowed. NULL for all layers; struct_size set.
/// @param num_blocks  Blocks that the caller believes the cache to have; 0 to leave
///                    that out.
/// @param stream      The CUstream on which it is done; NULL for the default
///                    stream. Not used for host memory.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  An id is out of range (kind
///         "block_id_out_of_range"), a block is the target of two copies
///         ("duplicate_block_id"), there are more pairs than max_block_ids
///         ("too_many_block_ids"), or the cache has another number of blocks
///         ("num_blocks_mismatch", "copy_not_multiple_of_blocks").
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_copy_blocks(
    ops: *mut kvpages_ops,
    copies: *const kvpages_block_copy,
    num_copies: usize,
    selection: *const kvpages_block_selection,
    num_blocks: u64,
    stream: *mut c_void,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(ops, |handle| {
            let copies = input::array(copies, num_copies, "copies")?;
            let copies = copies.iter().map(|copy| BlockCopy {
                source: copy.source,
                target: copy.target,
            });
            let told = (num_blocks != 0).then_some(num_blocks);
            let selection = selected(selection)?;
            let stream = StreamRef::new(stream);
            Ok(handle.ops.copy_blocks(copies, selection, told, stream)?)
        })
    }
}

/// Stores rows of tokens in the slots of one or many layers.
///
/// Rows of the cache's own type are copied. Rows of F32, F16 or BF16 are also
/// converted to each other, to fp8 with one scale for the tensor, and to int8, fp8
/// or int4 with an f32 scale for each token and head, which is the largest
/// magnitude divided by the largest number (127, 448 or 57344, 7) and is stored
/// behind its key or value. int4 are symmetric, two in a byte, the first in its
/// lower half. Latents of the form fp8_ds_mla with 656 bytes take 512 and 64
/// elements. Rounding is to nearest, ties to even; fp8 saturates, F16 and BF16
/// overflow to infinity. NaN stays NaN: with int8 and int4 it makes its token and
/// head NaN.
///
/// @param ops    Not NULL.
/// @param write  Borrowed, with its arrays and rows. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A slot is out of range (kind
///         "slot_out_of_range"), layers are of several groups
///         ("layers_of_several_groups") or store different numbers of slots of each
///         block ("block_slots_differ"), or rows do not fit a layer.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
/// @retval KVPAGES_STATUS_UNSUPPORTED  Rows of this type cannot be stored in a
///         layer of this kind; the message says what can.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_write_kv(
    ops: *const kvpages_ops,
    write: *const kvpages_kv_write,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(ops, Ok(()), |handle, ()| {
            let given = extensible::read(write)?;
            let layers = input::array(given.layers, given.num_layers, "layers")?;
            let layers = layers.iter().map(|rows| LayerRows {
                layer: rows.layer,
                keys: rows.keys.cast_mut().cast(),
                values: rows.values.cast_mut().cast(),
                key_token_stride: rows.key_token_stride,
                key_head_stride: rows.key_head_stride,
                value_token_stride: rows.value_token_stride,
                value_head_stride: rows.value_head_stride,
                latent_elements: rows.latent_elements,
                key_scale: rows.key_scale,
                value_scale: rows.value_scale,
            });
            let write = Write {
                slots: input::address(given.slots, given.num_slots, "slots")?,
                dtype: input::listed(given.dtype, "dtype")?,
                fp8_format: fp8_format(given.fp8_format)?,
            };
            let stream = StreamRef::new(given.stream);
            Ok(handle.ops.write_kv(&write, layers, stream)?)
        })
    }
}

/// Reads rows of tokens from the slots, or from whole blocks, of one or many
/// layers: the inverse of kvpages_ops_write_kv(), with the same types.
///
/// @param ops     Not NULL.
/// @param gather  Borrowed, with its arrays; the rooms for rows are filled. Not
///                NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_ops_write_kv(); or a block id
///         is out of range (kind "block_id_out_of_range"), or slots and block ids
///         are both given ("slots_and_blocks").
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
/// @retval KVPAGES_STATUS_UNSUPPORTED  Rows of this type cannot be read from a layer
///         of this kind; the message says what can.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_ops_gather_kv(
    ops: *const kvpages_ops,
    gather: *const kvpages_kv_gather,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(ops, Ok(()), |handle, ()| {
            let given = extensible::read(gather)?;
            let layers = input::array(given.layers, given.num_layers, "layers")?;
            let layers = layers.iter().map(|rows| LayerRows {
                layer: rows.layer,
                keys: rows.keys.cast(),
                values: rows.values.cast(),
                key_token_stride: rows.key_token_stride,
                key_head_stride: rows.key_head_stride,
                value_token_stride: rows.value_token_stride,
                value_head_stride: rows.value_head_stride,
                latent_elements: rows.latent_elements,
                key_scale: rows.key_scale,
                value_scale: rows.value_scale,
            });
            if given.num_slots != 0 && given.num_block_ids != 0 {
                return Err(Failure::invalid(
                    "slots_and_blocks",
                    format!(
                        "{} slots and {} block ids are given; rows are those of one of them",
                        given.num_slots, given.num_block_ids
                    ),
                ));
            }
            let slots = if given.num_block_ids != 0 {
                let ids = input::address(given.block_ids, given.num_block_ids, "block_ids")?;
                RowSlots::Blocks(ids)
            } else {
                RowSlots::Slots(input::address(given.slots, given.num_slots, "slots")?)
            };
            let gather = Gather {
                slots,
                dtype: input::listed(given.dtype, "dtype")?,
                fp8_format: fp8_format(given.fp8_format)?,
            };
            let stream = StreamRef::new(given.stream);
            Ok(handle.ops.gather_kv(&gather, layers, stream)?)
        })
    }
}

/// # Safety
/// `selection` is NULL or valid, with its arrays, during the call.
unsafe fn selected<'a>(
    selection: *const kvpages_block_selection,
) -> Result<Selection<'a>, Failure> {
    if selection.is_null() {
        return Ok(Selection::All);
    }
    // SAFETY: the caller's contract.
    unsafe {
        let given = extensible::read(selection)?;
        Ok(Selection::Of {
            groups: input::array(given.groups, given.num_groups, "groups")?,
            layers: input::array(given.layers, given.num_layers, "layers")?,
        })
    }
}

fn fp8_format(number: u32) -> Result<Option<Dtype>, Failure> {
    if number == 0 {
        return Ok(None);
    }
    match input::listed(number, "fp8_format")? {
        format @ (Dtype::F8E4m3fn | Dtype::F8E5m2) => Ok(Some(format)),
        other => Err(Failure::unsupported(
            "rows_not_supported",
            format!("fp8_format is {other}; supported are float8_e4m3fn and float8_e5m2"),
        )),
    }
}
