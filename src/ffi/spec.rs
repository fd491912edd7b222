//! Header section: what a layer stores.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;

use super::extensible::{self, extensible};
use super::guard::guard;
use super::input;
use super::status::{Failure, kvpages_status};
use crate::dtype::Dtype;
use crate::num;
use crate::spec::{
    Attention, AttentionFields, AttentionKind, Content, Counting, DemandError, Limits, QuantMode,
    Spec, SpecError, SpecSet, State, StateCacheMode, StateFields, StateKind, merge, uniformity,
};

/// How keys and values are quantised.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_quant_mode {
    /// Stored as they are.
    None = 0,
    /// fp8, one scale for the whole tensor, kept by the engine.
    Fp8PerTensor = 1,
    /// int8, one f32 scale for each token and head, stored in the page.
    Int8PerTokenHead = 2,
    /// fp8, one f32 scale for each token and head, stored in the page.
    Fp8PerTokenHead = 3,
    /// Two int4 in one byte, one f32 scale for each token and head, stored in
    /// the page.
    Int4PerTokenHead = 4,
    /// Two fp4 in one byte, one fp8 scale for each 16 elements, stored behind
    /// the data.
    Nvfp4 = 5,
}

/// What kind of layer it is, as far as its memory is concerned.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_spec_kind {
    /// Every token attends to every earlier one.
    FullAttention = 1,
    /// Full, with tokens at the start that are always attended to.
    SinkAttention = 2,
    /// Full over the prompt, a window over what was generated.
    Rswa = 3,
    /// Full, with key and value of a token and head packed into one slot.
    TurboQuant = 4,
    /// Full, storing one latent instead of keys and values.
    Mla = 5,
    /// Full, storing hidden states instead of keys and values.
    HiddenState = 6,
    /// The last tokens only.
    SlidingWindow = 7,
    /// The last tokens only, storing one latent.
    SlidingWindowMla = 8,
    /// Tokens of the same chunk only.
    ChunkedLocal = 9,
    /// Keys and values of an encoder's output.
    CrossAttention = 10,
    /// An encoder's own attention: it stores nothing between steps.
    EncoderOnly = 11,
    /// Mamba, linear attention, convolutions: a state that does not grow.
    State = 12,
    /// Only reported, for sets of layers of different kinds.
    Mixed = 100,
}

/// What computes a state.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_state_kind {
    /// Selective state space, first version.
    Mamba1 = 1,
    /// Selective state space, second version.
    Mamba2 = 2,
    /// A short convolution.
    ShortConv = 3,
    /// Linear attention.
    Linear = 4,
    /// Gated delta net.
    GatedDeltaNet = 5,
    /// Anything else.
    Custom = 6,
}

/// When a state layer keeps the state of an earlier position.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_state_cache_mode {
    /// Only the current state.
    None = 0,
    /// The current state and the one at the last block boundary.
    Align = 1,
    /// The state at every block boundary.
    All = 2,
}

/// Flag of kvpages_spec: tokens attend to later ones. Does not change the memory.
pub const KVPAGES_SPEC_NON_CAUSAL: u32 = 1;
/// Flag of kvpages_spec: the layer's kernels step from block to block by a stride
/// they are given, so its pages may be padded. A layer with a backend takes this
/// from the backend.
pub const KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE: u32 = 2;
/// kvpages_spec.head_size_v of a layer that stores keys and no values.
pub const KVPAGES_HEAD_SIZE_NONE: u64 = u64::MAX;

/// What one layer stores. Start from KVPAGES_SPEC_INIT; fields of other kinds
/// stay 0. Strings and arrays are Copied by whoever keeps a spec.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_spec {
    /// sizeof(kvpages_spec) as the caller compiled it.
    pub struct_size: usize,
    /// One of KVPAGES_SPEC_KIND_*.
    pub kind: u32,
    /// Attention kinds: one of KVPAGES_DTYPE_*.
    pub dtype: u32,
    /// Attention kinds: one of KVPAGES_QUANT_MODE_*. It says what the elements are,
    /// not of which type: all but KVPAGES_QUANT_MODE_NONE need a dtype of 1 byte.
    pub quant_mode: u32,
    /// KVPAGES_SPEC_* flags.
    pub flags: u32,
    /// Tokens of one block. Of a state that is kept once
    /// (KVPAGES_STATE_CACHE_MODE_NONE) it has no effect on memory; engines set the
    /// longest sequence.
    pub block_size: u64,
    /// Key-value heads on one rank; see kvpages_kv_heads_per_rank().
    pub num_kv_heads: u64,
    /// Elements of one key, or of the latent.
    pub head_size: u64,
    /// Elements of one value; 0 for as many as head_size, KVPAGES_HEAD_SIZE_NONE
    /// for none.
    pub head_size_v: u64,
    /// Bytes of one page, padding included; 0 for no padding. At least what the
    /// page needs.
    pub page_size_padded_bytes: u64,
    /// Tokens of the window. Sliding kinds need it, full kinds may remember one;
    /// 0 for none.
    pub sliding_window: u64,
    /// Tokens of a chunk. Chunked local needs it, full kinds may remember one;
    /// 0 for none.
    pub attention_chunk_size: u64,
    /// TurboQuant: bytes of one token and head; 0 for the page of full attention.
    pub tq_slot_bytes: u64,
    /// Sink: tokens at the start that are always attended to.
    pub sink_len: u64,
    /// R-SWA: generated tokens that stay stored.
    pub rswa_window: u64,
    /// Latent kinds: bytes that a page is made a multiple of; 0 for none.
    pub alignment_bytes: u64,
    /// Latent kinds: tokens that share one stored slot; 0 and 1 for one each. It
    /// divides block_size.
    pub compress_ratio: u64,
    /// Latent kinds: the cache-dtype string; "fp8_ds_mla" is a packed format of
    /// 656 bytes a token, or of 584 bytes a slot for "deepseek_v4". May be NULL.
    pub cache_dtype: *const c_char,
    /// Latent kinds: the model version that fixes the format. May be NULL.
    pub model_version: *const c_char,
    /// State: one of KVPAGES_DTYPE_* for each state.
    pub state_dtypes: *const u32,
    /// Number of state_dtypes.
    pub num_state_dtypes: usize,
    /// State: the number of dimensions of each state.
    pub state_ndims: *const u32,
    /// Number of state_ndims; as many as state_dtypes.
    pub num_state_shapes: usize,
    /// State: the sizes of all states' dimensions, one state after another.
    pub state_dims: *const u64,
    /// Number of state_dims; the sum of state_ndims.
    pub num_state_dims: usize,
    /// State: one of KVPAGES_STATE_KIND_*.
    pub state_kind: u32,
    /// State: one of KVPAGES_STATE_CACHE_MODE_*. It tells layers apart; how many
    /// blocks a request needs follows from the mode of the limits or the plan.
    pub state_cache_mode: u32,
    /// State: further states that a request holds for speculative tokens.
    pub num_speculative_blocks: u64,
}
extensible!(kvpages_spec, num_speculative_blocks: u64);

/// What a layer's page looks like.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_spec_info {
    /// sizeof(kvpages_spec_info) as the caller compiled it.
    pub struct_size: usize,
    /// Bytes of one block in this layer.
    pub page_size_bytes: u64,
    /// Bytes of data alone.
    pub real_page_size_bytes: u64,
    /// Bytes of data and of the scales in the page.
    pub unpadded_page_size_bytes: u64,
    /// Slots of one block: its tokens, but for compressed layers.
    pub storage_block_size: u64,
    /// Stored elements of one key of a token and head, or of whatever is stored
    /// instead of a key and a value. 0 for a state.
    pub key_elements: u64,
    /// Stored elements of one value; 0 when there is none of its own.
    pub value_elements: u64,
    /// Bytes of the scales beside each key and each value, or beside each latent.
    pub scale_bytes: u64,
}
extensible!(kvpages_spec_info, scale_bytes: u64);

/// What bounds one request.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_limits {
    /// sizeof(kvpages_limits) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of the longest sequence.
    pub max_model_len: u64,
    /// Ranks that share the tokens of a sequence while decoding; 0 for 1.
    pub context_parallel_size: u64,
    /// Tokens scheduled and not yet settled, over all concurrent batches.
    pub max_tokens_in_flight: u64,
    /// Tokens of an encoder's output that cross attention caches.
    pub max_encoder_tokens: u64,
    /// One of KVPAGES_STATE_CACHE_MODE_*.
    pub state_cache_mode: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_limits, reserved0: u32);

/// How much one request can need of a layer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_demand {
    /// sizeof(kvpages_demand) as the caller compiled it.
    pub struct_size: usize,
    /// The most blocks.
    pub blocks_per_request: u64,
    /// The most bytes.
    pub bytes_per_request: u64,
    /// Entries of a block-table row for the longest sequence.
    pub row_blocks: u64,
    /// The most blocks a windowed layer may hold; 0 for other kinds.
    pub admission_blocks: u64,
}
extensible!(kvpages_demand, admission_blocks: u64);

/// How alike layers are. The order of the layers does not matter.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_uniformity {
    /// sizeof(kvpages_uniformity) as the caller compiled it.
    pub struct_size: usize,
    /// 1 when they need the same number of blocks: one block size, one family.
    pub is_uniform_type: u32,
    /// 1 when they merge into one spec.
    pub is_uniform_spec: u32,
    /// 1 when their pages have the same number of bytes.
    pub is_page_size_uniform: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_uniformity, reserved0: u32);

/// Layers taken together, as a group of layers that store different things has
/// them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_spec_set_info {
    /// sizeof(kvpages_spec_set_info) as the caller compiled it.
    pub struct_size: usize,
    /// Bytes of one block in all layers.
    pub page_size_bytes: u64,
    /// Tokens of one block of the first layer.
    pub block_size: u64,
    /// Tokens of the window, when all layers slide over the same; else 0.
    pub sliding_window: u64,
    /// How many layers have the commonest page.
    pub num_layer_tuples: u64,
    /// How many different pages there are.
    pub num_distinct_page_sizes: u64,
    /// One of KVPAGES_SPEC_KIND_*; MIXED when the layers' kinds differ.
    pub kind: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_spec_set_info, reserved0: u32);

/// Checks a spec and describes its page.
///
/// @param spec  Borrowed. Not NULL.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A field is out of range, is not one of this
///         kind of layer, or contradicts another; the message names it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_describe(
    spec: *const kvpages_spec,
    out: *mut kvpages_spec_info,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, spec) = unsafe { (extensible::out(out)?, read_spec(spec)?) };
        let page = spec.page();
        let (content, scale_bytes) = match &spec {
            Spec::Attention(attention) => (attention.content(), attention.scale_bytes()),
            Spec::State(_) => (Content::Single(0), 0),
        };
        let (key_elements, value_elements) = match content {
            Content::KeyValue { key, value } => (key, value),
            Content::Single(elements) | Content::PackedPair(elements) => (elements, 0),
        };
        out.fill(kvpages_spec_info {
            struct_size: 0,
            page_size_bytes: page.padded,
            real_page_size_bytes: page.real,
            unpadded_page_size_bytes: page.unpadded,
            storage_block_size: spec.storage_block_size(),
            key_elements,
            value_elements,
            scale_bytes,
        });
        Ok(())
    })
}

/// How much one request can need of a layer.
///
/// @param spec    Borrowed. Not NULL.
/// @param limits  Borrowed. Not NULL.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The spec, as kvpages_spec_describe() says; or
///         a window is shared out to context-parallel ranks (kind
///         "dcp_sliding_window").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_demand(
    spec: *const kvpages_spec,
    limits: *const kvpages_limits,
    out: *mut kvpages_demand,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, spec, limits) = unsafe {
            (
                extensible::out(out)?,
                read_spec(spec)?,
                read_limits(limits)?,
            )
        };
        out.fill(kvpages_demand {
            struct_size: 0,
            blocks_per_request: spec.blocks_per_request(&limits)?,
            bytes_per_request: spec.max_bytes_per_request(&limits)?,
            row_blocks: spec.row_blocks(&limits, limits.max_model_len)?,
            admission_blocks: spec.admission_blocks(&limits)?.unwrap_or(0),
        });
        Ok(())
    })
}

/// The one spec that several layers are: they agree on everything but, for full
/// kinds, the window, the chunk and the non-causal flag.
///
/// @param specs      Borrowed. num_specs pointers, none NULL.
/// @param num_specs  At least 1.
/// @param[out] out   Filled; its pointers are those of specs[0]. None of specs. Not
///                   NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  They are not one spec; the kind says
///                   why, and the message names the field.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_merge(
    specs: *const *const kvpages_spec,
    num_specs: usize,
    out: *mut kvpages_spec,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let given = unsafe { input::array(specs, num_specs, "specs") };
        if given
            .as_ref()
            .is_ok_and(|given| given.contains(&out.cast_const()))
        {
            return Err(Failure::invalid(
                "output_is_input",
                "out is one of specs; give it a struct of its own".to_owned(),
            ));
        }
        // SAFETY: the caller's contract.
        let (out, specs_read) = unsafe { (extensible::out(out)?, read_specs(specs, num_specs)?) };
        let refs: Vec<&Spec> = specs_read.iter().map(Arc::as_ref).collect();
        let merged = merge(&refs)?;
        // SAFETY: there is a first one, and it was read above.
        let first: kvpages_spec = unsafe { extensible::read(*specs)? };
        out.fill(kvpages_spec {
            cache_dtype: first.cache_dtype,
            model_version: first.model_version,
            state_dtypes: first.state_dtypes,
            state_ndims: first.state_ndims,
            state_dims: first.state_dims,
            ..describe_spec(&merged)
        });
        Ok(())
    })
}

/// How alike layers are.
///
/// @param specs      Borrowed. num_specs pointers, none NULL.
/// @param num_specs  May be 0.
/// @param[out] out   Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_UNSUPPORTED  An encoder-only layer is among them; it
///                   takes no cache.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_uniformity(
    specs: *const *const kvpages_spec,
    num_specs: usize,
    out: *mut kvpages_uniformity,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, specs) = unsafe { (extensible::out(out)?, read_specs(specs, num_specs)?) };
        let refs: Vec<&Spec> = specs.iter().map(Arc::as_ref).collect();
        let alike = uniformity(&refs).ok_or_else(|| {
            Failure::unsupported(
                "unsupported_spec",
                "an encoder-only layer takes no cache, so it is of no family".to_owned(),
            )
        })?;
        out.fill(kvpages_uniformity {
            struct_size: 0,
            is_uniform_type: u32::from(alike.is_uniform_type),
            is_uniform_spec: u32::from(alike.is_uniform_spec),
            is_page_size_uniform: u32::from(alike.is_page_size_uniform),
            reserved0: 0,
        });
        Ok(())
    })
}

/// Describes layers taken together.
///
/// @param specs      Borrowed. num_specs pointers, none NULL.
/// @param num_specs  At least 1.
/// @param[out] out   Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A spec, as kvpages_spec_describe() says; or
///         there is none.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_set_describe(
    specs: *const *const kvpages_spec,
    num_specs: usize,
    out: *mut kvpages_spec_set_info,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, set) = unsafe { (extensible::out(out)?, read_set(specs, num_specs)?) };
        let kinds: Vec<u32> = set.specs().iter().map(|spec| kind_number(spec)).collect();
        let windows: Vec<u64> = set.specs().iter().map(|spec| own_window(spec)).collect();
        out.fill(kvpages_spec_set_info {
            struct_size: 0,
            page_size_bytes: set.page_bytes()?,
            block_size: set.block_size(),
            sliding_window: only(&windows).unwrap_or(0),
            num_layer_tuples: set.num_layer_tuples(),
            num_distinct_page_sizes: set.distinct_pages().len() as u64,
            kind: only(&kinds).unwrap_or(kvpages_spec_kind::Mixed as u32),
            reserved0: 0,
        });
        Ok(())
    })
}

/// The different pages of a set of layers, smallest first.
///
/// @param specs      Borrowed. num_specs pointers, none NULL.
/// @param num_specs  At least 1.
/// @param[out] page_sizes_bytes  Room for capacity numbers. May be NULL when
///                   capacity is 0.
/// @param capacity   Numbers that fit.
/// @param[out] out_count  How many there are, also when they do not fit.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_set_copy_page_sizes(
    specs: *const *const kvpages_spec,
    num_specs: usize,
    page_sizes_bytes: *mut u64,
    capacity: usize,
    out_count: *mut usize,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let out_count = input::cleared(out_count, "out_count")?;
            let pages = read_set(specs, num_specs)?.distinct_pages();
            input::copy_out(
                &pages,
                page_sizes_bytes,
                capacity,
                out_count,
                "page_sizes_bytes",
            )
        }
    })
}

/// How much one request can need of a set of layers.
///
/// @param specs      Borrowed. num_specs pointers, none NULL.
/// @param num_specs  At least 1.
/// @param limits     Borrowed. Not NULL.
/// @param[out] out   Filled; bytes are those of all layers. Not NULL; struct_size
///                   set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_spec_demand(); or there is no
///         spec.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_spec_set_demand(
    specs: *const *const kvpages_spec,
    num_specs: usize,
    limits: *const kvpages_limits,
    out: *mut kvpages_demand,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, set, limits) = unsafe {
            (
                extensible::out(out)?,
                read_set(specs, num_specs)?,
                read_limits(limits)?,
            )
        };
        let blocks = set.blocks_per_request(&limits)?;
        let admission: Result<Vec<_>, DemandError> = set
            .specs()
            .iter()
            .map(|spec| spec.admission_blocks(&limits))
            .collect();
        out.fill(kvpages_demand {
            struct_size: 0,
            blocks_per_request: blocks,
            bytes_per_request: num::product("the bytes of a request", [blocks, set.page_bytes()?])?,
            row_blocks: set.row_blocks(limits.max_model_len),
            admission_blocks: admission?.into_iter().flatten().max().unwrap_or(0),
        });
        Ok(())
    })
}

/// The quantisation mode that a cache-dtype string such as "fp8_e4m3" or
/// "int4_per_token_head" asks for; KVPAGES_QUANT_MODE_NONE for "auto" and any
/// other.
///
/// @param cache_dtype  Borrowed. Not NULL.
/// @param[out] out     One of KVPAGES_QUANT_MODE_*. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The string is not UTF-8.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_quant_mode_from_cache_dtype(
    cache_dtype: *const c_char,
    out: *mut u32,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, text) = unsafe {
            (
                input::cleared(out, "out")?,
                input::text(cache_dtype, "cache_dtype")?,
            )
        };
        *out = QuantMode::from_cache_dtype(text) as u32;
        Ok(())
    })
}

fn only<T: Copy + PartialEq>(values: &[T]) -> Option<T> {
    let (&first, rest) = values.split_first()?;
    rest.iter().all(|&value| value == first).then_some(first)
}

/// The window of a layer that slides; a window that a full layer remembers does not count.
fn own_window(spec: &Spec) -> u64 {
    let fields = spec.as_attention().map(Attention::fields);
    let sliding = fields.filter(|fields| fields.kind.is_sliding());
    sliding
        .and_then(|fields| fields.sliding_window)
        .unwrap_or(0)
}

/// The number of a spec's kind in the header.
pub(super) fn kind_number(spec: &Spec) -> u32 {
    match spec {
        Spec::Attention(attention) => attention.fields().kind as u32,
        Spec::State(_) => kvpages_spec_kind::State as u32,
    }
}

/// # Safety
/// `specs` is NULL or valid for reads of `count` pointers, each as in [`read_spec`].
unsafe fn read_specs(
    specs: *const *const kvpages_spec,
    count: usize,
) -> Result<Vec<Arc<Spec>>, Failure> {
    // SAFETY: the caller's contract.
    let pointers = unsafe { input::array(specs, count, "specs") }?;
    let mut all = input::reserve(count, "specs")?;
    for (i, &pointer) in pointers.iter().enumerate() {
        // SAFETY: the caller's contract.
        let spec = unsafe { read_spec(pointer) }.map_err(|failure| failure.at(i))?;
        all.push(Arc::new(spec));
    }
    Ok(all)
}

/// # Safety
/// As [`read_specs`].
unsafe fn read_set(specs: *const *const kvpages_spec, count: usize) -> Result<SpecSet, Failure> {
    // SAFETY: the caller's contract.
    let specs = unsafe { read_specs(specs, count) }?;
    SpecSet::of_any(specs)
        .ok_or_else(|| Failure::invalid("bad_values", "there is no spec in the set".to_owned()))
}

/// # Safety
/// `limits` is NULL or valid for reads of its stated size.
unsafe fn read_limits(limits: *const kvpages_limits) -> Result<Limits, Failure> {
    // SAFETY: the caller's contract.
    let limits = unsafe { extensible::read(limits) }?;
    input::known_bits(limits.reserved0, 0, "kvpages_limits.reserved0")?;
    Ok(Limits {
        max_model_len: limits.max_model_len,
        context_parallel_size: limits.context_parallel_size.max(1),
        max_tokens_in_flight: limits.max_tokens_in_flight,
        max_encoder_tokens: limits.max_encoder_tokens,
        state_cache_mode: state_cache_mode(limits.state_cache_mode)?,
        counting: Counting::Reference,
    })
}

/// The mode with a number of the header.
pub(super) fn state_cache_mode(number: u32) -> Result<StateCacheMode, Failure> {
    let found = StateCacheMode::ALL
        .into_iter()
        .find(|mode| *mode as u32 == number);
    found.ok_or_else(|| unknown("state_cache_mode", number))
}

fn unknown(name: &str, number: u32) -> Failure {
    Failure::invalid(
        "unknown_value",
        format!("{name} is {number}, which is not one of its values"),
    )
}

/// The spec that a caller describes.
///
/// # Safety
/// `spec` is NULL or valid for reads of its stated size; its strings and arrays are NULL or as long
/// as it says.
pub(super) unsafe fn read_spec(spec: *const kvpages_spec) -> Result<Spec, Failure> {
    // SAFETY: the caller's contract.
    let given = unsafe { extensible::read(spec) }?;
    let known = KVPAGES_SPEC_NON_CAUSAL | KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE;
    input::known_bits(given.flags, known, "kvpages_spec.flags")?;
    if given.kind == kvpages_spec_kind::Mixed as u32 {
        return Err(Failure::unsupported(
            "unsupported_spec",
            "a set of layers is not the spec of one layer; add each layer with its own".to_owned(),
        ));
    }
    if given.kind == kvpages_spec_kind::State as u32 {
        // SAFETY: the caller's contract.
        return Ok(Spec::State(unsafe { read_state(&given) }?));
    }
    let kind = AttentionKind::ALL
        .into_iter()
        .find(|kind| *kind as u32 == given.kind);
    let kind = kind.ok_or_else(|| unknown("kvpages_spec.kind", given.kind))?;
    if given.num_state_dtypes != 0 || given.num_state_shapes != 0 || given.num_state_dims != 0 {
        return Err(Failure::invalid(
            "field_not_of_kind",
            format!("states are given, but a {} layer has none", kind.name()),
        ));
    }
    // Every other field that only states have.
    let stray = [
        ("state_kind", given.state_kind != 0),
        ("state_cache_mode", given.state_cache_mode != 0),
        ("num_speculative_blocks", given.num_speculative_blocks != 0),
    ];
    refuse_strays(&stray, kind.name())?;
    // SAFETY: the caller's contract.
    Ok(Spec::Attention(unsafe { read_attention(&given, kind) }?))
}

/// # Safety
/// The strings are NULL or NUL-terminated.
unsafe fn read_attention(given: &kvpages_spec, kind: AttentionKind) -> Result<Attention, Failure> {
    let set = |value: u64| (value != 0).then_some(value);
    // SAFETY: the caller's contract.
    let keep = |text| unsafe { input::optional_c_str(text) }.map(Arc::<CStr>::from);
    Ok(Attention::new(AttentionFields {
        kind,
        block_size: given.block_size,
        num_kv_heads: given.num_kv_heads,
        head_size: given.head_size,
        head_size_v: match given.head_size_v {
            0 => given.head_size,
            KVPAGES_HEAD_SIZE_NONE => 0,
            width => width,
        },
        dtype: input::listed::<Dtype>(given.dtype, "kvpages_spec.dtype")?,
        quant_mode: input::listed::<QuantMode>(given.quant_mode, "kvpages_spec.quant_mode")?,
        page_size_padded: set(given.page_size_padded_bytes),
        indexes_kv_by_block_stride: given.flags & KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE != 0,
        sliding_window: set(given.sliding_window),
        attention_chunk_size: set(given.attention_chunk_size),
        non_causal: given.flags & KVPAGES_SPEC_NON_CAUSAL != 0,
        tq_slot_size: given.tq_slot_bytes,
        sink_len: given.sink_len,
        rswa_window: given.rswa_window,
        cache_dtype: keep(given.cache_dtype),
        alignment: set(given.alignment_bytes),
        compress_ratio: given.compress_ratio.max(1),
        model_version: keep(given.model_version),
    })?)
}

/// # Safety
/// The arrays are NULL or as long as they are said to be.
unsafe fn read_state(given: &kvpages_spec) -> Result<State, Failure> {
    // Every field that only attention layers have.
    let stray = [
        ("dtype", given.dtype != 0),
        ("quant_mode", given.quant_mode != 0),
        ("flags", given.flags != 0),
        ("num_kv_heads", given.num_kv_heads != 0),
        ("head_size", given.head_size != 0),
        ("head_size_v", given.head_size_v != 0),
        ("sliding_window", given.sliding_window != 0),
        ("attention_chunk_size", given.attention_chunk_size != 0),
        ("tq_slot_bytes", given.tq_slot_bytes != 0),
        ("sink_len", given.sink_len != 0),
        ("rswa_window", given.rswa_window != 0),
        ("alignment_bytes", given.alignment_bytes != 0),
        ("compress_ratio", given.compress_ratio != 0),
        ("cache_dtype", !given.cache_dtype.is_null()),
        ("model_version", !given.model_version.is_null()),
    ];
    refuse_strays(&stray, "state")?;
    let kind = StateKind::ALL
        .into_iter()
        .find(|kind| *kind as u32 == given.state_kind);
    // SAFETY: the caller's contract.
    let (dtypes, ndims, dims) = unsafe {
        (
            input::array(given.state_dtypes, given.num_state_dtypes, "state_dtypes")?,
            input::array(given.state_ndims, given.num_state_shapes, "state_ndims")?,
            input::array(given.state_dims, given.num_state_dims, "state_dims")?,
        )
    };
    let mut kept = input::reserve(dims.len(), "state_dims")?;
    kept.extend_from_slice(dims);
    Ok(State::new(StateFields {
        kind: kind.ok_or_else(|| unknown("kvpages_spec.state_kind", given.state_kind))?,
        block_size: given.block_size,
        dtypes: dtypes
            .iter()
            .map(|&dtype| input::listed::<Dtype>(dtype, "a state's dtype"))
            .collect::<Result<_, _>>()?,
        ndims: ndims.to_vec(),
        dims: kept,
        page_size_padded: (given.page_size_padded_bytes != 0)
            .then_some(given.page_size_padded_bytes),
        cache_mode: state_cache_mode(given.state_cache_mode)?,
        num_speculative_blocks: given.num_speculative_blocks,
    })?)
}

/// Refuses fields that are set and have no effect on layers of that kind.
fn refuse_strays(stray: &[(&'static str, bool)], kind: &'static str) -> Result<(), Failure> {
    match stray.iter().find(|(_, is_set)| *is_set) {
        Some(&(field, _)) => Err(SpecError::FieldNotOfKind { field, kind }.into()),
        None => Ok(()),
    }
}

const EMPTY: kvpages_spec = kvpages_spec {
    struct_size: size_of::<kvpages_spec>(),
    kind: 0,
    dtype: 0,
    quant_mode: 0,
    flags: 0,
    block_size: 0,
    num_kv_heads: 0,
    head_size: 0,
    head_size_v: 0,
    page_size_padded_bytes: 0,
    sliding_window: 0,
    attention_chunk_size: 0,
    tq_slot_bytes: 0,
    sink_len: 0,
    rswa_window: 0,
    alignment_bytes: 0,
    compress_ratio: 0,
    cache_dtype: ptr::null(),
    model_version: ptr::null(),
    state_dtypes: ptr::null(),
    num_state_dtypes: 0,
    state_ndims: ptr::null(),
    num_state_shapes: 0,
    state_dims: ptr::null(),
    num_state_dims: 0,
    state_kind: 0,
    state_cache_mode: 0,
    num_speculative_blocks: 0,
};

/// A spec as the header describes it. Its pointers lead into `spec`.
pub(super) fn describe_spec(spec: &Spec) -> kvpages_spec {
    match spec {
        Spec::Attention(attention) => describe_attention(attention.fields()),
        Spec::State(state) => describe_state(state.fields()),
    }
}

fn describe_attention(fields: &AttentionFields) -> kvpages_spec {
    let flag = |set, flag| if set { flag } else { 0 };
    let pointer = |text: &Option<Arc<CStr>>| text.as_ref().map_or(ptr::null(), |t| t.as_ptr());
    kvpages_spec {
        kind: fields.kind as u32,
        dtype: fields.dtype as u32,
        quant_mode: fields.quant_mode as u32,
        flags: flag(fields.non_causal, KVPAGES_SPEC_NON_CAUSAL)
            | flag(
                fields.indexes_kv_by_block_stride,
                KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE,
            ),
        block_size: fields.block_size,
        num_kv_heads: fields.num_kv_heads,
        head_size: fields.head_size,
        head_size_v: match fields.head_size_v {
            0 => KVPAGES_HEAD_SIZE_NONE,
            width => width,
        },
        page_size_padded_bytes: fields.page_size_padded.unwrap_or(0),
        sliding_window: fields.sliding_window.unwrap_or(0),
        attention_chunk_size: fields.attention_chunk_size.unwrap_or(0),
        tq_slot_bytes: fields.tq_slot_size,
        sink_len: fields.sink_len,
        rswa_window: fields.rswa_window,
        alignment_bytes: fields.alignment.unwrap_or(0),
        compress_ratio: fields.compress_ratio,
        cache_dtype: pointer(&fields.cache_dtype),
        model_version: pointer(&fields.model_version),
        ..EMPTY
    }
}

fn describe_state(fields: &StateFields) -> kvpages_spec {
    kvpages_spec {
        kind: kvpages_spec_kind::State as u32,
        block_size: fields.block_size,
        page_size_padded_bytes: fields.page_size_padded.unwrap_or(0),
        // Dtype is repr(u32), so its array is one of numbers.
        state_dtypes: fields.dtypes.as_ptr().cast(),
        num_state_dtypes: fields.dtypes.len(),
        state_ndims: fields.ndims.as_ptr(),
        num_state_shapes: fields.ndims.len(),
        state_dims: fields.dims.as_ptr(),
        num_state_dims: fields.dims.len(),
        state_kind: fields.kind as u32,
        state_cache_mode: fields.cache_mode as u32,
        num_speculative_blocks: fields.num_speculative_blocks,
        ..EMPTY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_core() {
        use kvpages_spec_kind as kind;
        let kinds = [
            kind::FullAttention,
            kind::SinkAttention,
            kind::Rswa,
            kind::TurboQuant,
            kind::Mla,
            kind::HiddenState,
            kind::SlidingWindow,
            kind::SlidingWindowMla,
            kind::ChunkedLocal,
            kind::CrossAttention,
            kind::EncoderOnly,
        ];
        let core = AttentionKind::ALL.map(|kind| kind as u32);
        assert_eq!(kinds.map(|kind| kind as u32), core);
        assert!(!core.contains(&(kind::State as u32)));
        assert_eq!(kvpages_quant_mode::Nvfp4 as u32, QuantMode::Nvfp4 as u32);
        assert_eq!(
            kvpages_quant_mode::Int8PerTokenHead as u32,
            QuantMode::Int8PerTokenHead as u32
        );
        assert_eq!(kvpages_state_kind::Custom as u32, StateKind::Custom as u32);
        assert_eq!(
            kvpages_state_kind::ShortConv as u32,
            StateKind::ShortConv as u32
        );
        assert_eq!(
            kvpages_state_cache_mode::All as u32,
            StateCacheMode::All as u32
        );
    }
}
