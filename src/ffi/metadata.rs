//! Header section: the metadata of a step.

use std::ffi::c_void;
use std::ptr;

use super::attention::{AttentionHandle, kvpages_attention};
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle;
use super::input;
use super::status::{Failure, kvpages_status};
use super::types::kvpages_tensor;
use crate::attention::{
    ArrayLengthError, CacheGroup, Modality, MultimodalError, MultimodalItem, check_per_group,
    visit_ranges,
};
use crate::dtype::Dtype;

/// Which tokens a token attends to.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_causality {
    /// Those before it.
    Causal = 0,
    /// All of its request.
    NonCausal = 1,
    /// Each request has a flag of its own.
    PerRequest = 2,
}

/// Tokens of a request, by their positions, both ends included. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct kvpages_range {
    /// The first token.
    pub first: i64,
    /// The last token.
    pub last: i64,
}

/// Ranges of one request. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_request_ranges {
    /// The ranges; may be NULL when there are none.
    pub ranges: *const kvpages_range,
    /// Number of ranges.
    pub num_ranges: usize,
}

/// A step as the layers of one cache group see it: what a builder is given. Its
/// pointers are those of kvpages_step.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_common_metadata {
    /// sizeof(kvpages_common_metadata) as the library was compiled.
    pub struct_size: usize,
    /// The cache group.
    pub cache_group: u64,
    /// Requests of the step.
    pub num_requests: u64,
    /// Tokens of all requests, padding not counted.
    pub num_tokens: u64,
    /// Most tokens of one request.
    pub max_query_len: u64,
    /// Longest sequence.
    pub max_seq_len: u64,
    /// Where each request's tokens start, and where the last one's end:
    /// num_requests + 1 entries, for the device.
    pub query_start: *const i32,
    /// The same for the host.
    pub query_start_host: *const i32,
    /// Tokens of each request's sequence: num_requests entries, for the device.
    pub seq_lens: *const i32,
    /// Numbers that are at least those, for the host. May be NULL.
    pub seq_lens_host_bound: *const i32,
    /// Tokens of each sequence that this rank holds, in context parallelism. May
    /// be NULL.
    pub local_seq_lens: *const i32,
    /// Position of each token. May be NULL.
    pub positions: *const i64,
    /// 1 for each request that still works on its prompt, else 0. May be NULL.
    pub is_prefilling: *const u8,
    /// For each request the tokens that attend in both directions. May be NULL.
    pub multimodal_ranges: *const kvpages_request_ranges,
    /// Number of multimodal_ranges: num_requests, or 0.
    pub num_multimodal_requests: usize,
    /// Tokens of each request's prefix that R-SWA layers keep. May be NULL.
    pub rswa_prefix_lens: *const i32,
    /// 1 for each causal request, else 0; NULL unless causality is
    /// KVPAGES_CAUSALITY_PER_REQUEST.
    pub causal_by_request: *const u8,
    /// Kernel blocks of each request: i32 [requests, blocks].
    pub block_table: kvpages_tensor,
    /// Slot of each token: i64 [tokens].
    pub slot_mapping: kvpages_tensor,
    /// What the model adds for this cache group. May be NULL.
    pub group_extra: *mut c_void,
    /// Tokens that all sequences begin with and that are computed once: 0.
    pub common_prefix_len: u64,
    /// One of KVPAGES_CAUSALITY_*.
    pub causality: u32,
    /// 1 when the step is captured into a graph.
    pub for_capture: u32,
}

/// A step. Arrays by cache group are in the plan's order, groups without cache and
/// groups without active layers included. What the pointers for the device lead to
/// is not looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_step {
    /// sizeof(kvpages_step) as the caller compiled it.
    pub struct_size: usize,
    /// Requests of the step.
    pub num_requests: u64,
    /// Tokens of all requests, padding not counted.
    pub num_tokens: u64,
    /// Most tokens of one request: no less than query_start_host tells.
    pub max_query_len: u64,
    /// Longest sequence.
    pub max_seq_len: u64,
    /// Where each request's tokens start, and where the last one's end:
    /// num_requests + 1 entries, for the device. Not NULL.
    pub query_start: *const i32,
    /// The same for the host. Not NULL. The first is 0, none is less than the one
    /// before, and the last is at most num_tokens. Padded requests have no tokens.
    pub query_start_host: *const i32,
    /// Tokens of each request's sequence: num_requests entries, for the device.
    /// NULL only when there are no requests.
    pub seq_lens: *const i32,
    /// Numbers that are at least those, for the host, and so no less than the
    /// request's tokens in the step. May be NULL.
    pub seq_lens_host_bound: *const i32,
    /// Tokens of each sequence that this rank holds, in context parallelism. May
    /// be NULL.
    pub local_seq_lens: *const i32,
    /// Position of each token. May be NULL.
    pub positions: *const i64,
    /// 1 for each request that still works on its prompt, else 0. May be NULL.
    pub is_prefilling: *const u8,
    /// For each request the tokens that attend in both directions:
    /// kvpages_multimodal_ranges(). May be NULL.
    pub multimodal_ranges: *const kvpages_request_ranges,
    /// Number of multimodal_ranges: num_requests, or 0.
    pub num_multimodal_requests: usize,
    /// Tokens of each request's prefix that R-SWA layers keep. May be NULL.
    pub rswa_prefix_lens: *const i32,
    /// 1 for each causal request, else 0. Needed where causality is
    /// KVPAGES_CAUSALITY_PER_REQUEST.
    pub causal_by_request: *const u8,
    /// By cache group, kernel blocks of each request: i32 [at least num_requests,
    /// blocks]. The stride of blocks is 1; rows do not overlap, so theirs is at
    /// least the number of blocks. All zero for a group without cache.
    pub block_tables: *const kvpages_tensor,
    /// Number of block_tables: that of cache groups.
    pub num_block_tables: usize,
    /// By cache group, slot of each token: i64 [at least num_tokens], stride 1. All
    /// zero for a group without cache. Shapes and strides are Kept until the next
    /// build of the same builder.
    pub slot_mappings: *const kvpages_tensor,
    /// Number of slot_mappings: that of cache groups.
    pub num_slot_mappings: usize,
    /// By cache group, what replaces causality. May be NULL.
    pub causality_by_group: *const u32,
    /// Number of causality_by_group: that of cache groups, or 0.
    pub num_causality_by_group: usize,
    /// By cache group, what the model adds to the common metadata. May be NULL.
    pub group_extra: *const *mut c_void,
    /// Number of group_extra: that of cache groups, or 0.
    pub num_group_extra: usize,
    /// By attention group, counted over all cache groups, what the model hands to
    /// a builder. May be NULL.
    pub builder_extra: *const *mut c_void,
    /// Number of builder_extra: that of attention groups, or 0.
    pub num_builder_extra: usize,
    /// Number of cache groups that the engine has: that of the plan.
    pub num_cache_groups: usize,
    /// Which of the builders of each group: less than num_builders of
    /// kvpages_attention_config.
    pub builder: u64,
    /// One of KVPAGES_CAUSALITY_*.
    pub causality: u32,
    /// 1 when the step is captured into a graph: build_for_capture is called, and
    /// builder_extra is not used.
    pub for_capture: u32,
}
extensible!(kvpages_step, for_capture: u32);

impl kvpages_step {
    /// No request, and no array.
    pub(super) const NOTHING: kvpages_step = kvpages_step {
        struct_size: 0,
        num_requests: 0,
        num_tokens: 0,
        max_query_len: 0,
        max_seq_len: 0,
        query_start: ptr::null(),
        query_start_host: ptr::null(),
        seq_lens: ptr::null(),
        seq_lens_host_bound: ptr::null(),
        local_seq_lens: ptr::null(),
        positions: ptr::null(),
        is_prefilling: ptr::null(),
        multimodal_ranges: ptr::null(),
        num_multimodal_requests: 0,
        rswa_prefix_lens: ptr::null(),
        causal_by_request: ptr::null(),
        block_tables: ptr::null(),
        num_block_tables: 0,
        slot_mappings: ptr::null(),
        num_slot_mappings: 0,
        causality_by_group: ptr::null(),
        num_causality_by_group: 0,
        group_extra: ptr::null(),
        num_group_extra: 0,
        builder_extra: ptr::null(),
        num_builder_extra: 0,
        num_cache_groups: 0,
        builder: 0,
        causality: 0,
        for_capture: 0,
    };
}

/// Builds the metadata of a step: calls one builder of every attention group, in
/// order. When a callback fails, no other is called, and the metadata of the step
/// before stays. A call that succeeds takes no memory and no lock.
///
/// @param attention  Changed. Not NULL.
/// @param step       Borrowed; pointers in it are handed on to the builders. Not
///                   NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such builder.
/// @retval KVPAGES_STATUS_STOPPED    A callback failed:
///                                   kvpages_last_callback_code().
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_build(
    attention: *mut kvpages_attention,
    step: *const kvpages_step,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(attention, |attention| {
            let step = extensible::read(step)?;
            build(attention, &read_step(attention, &step)?)
        })
    }
}

/// The metadata of a layer in the last step of a builder.
///
/// @param attention  Borrowed.
/// @param builder    As in kvpages_step.
/// @param layer      Its number in the worker's model, which is not that in a cache:
///                   kvpages_cache_find_model_layer().
/// @return What the builder of its attention group made. NULL when the layer is in
///         none, or there was no step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_layer_metadata(
    attention: *const kvpages_attention,
    builder: usize,
    layer: usize,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(attention, ptr::null_mut(), |attention| {
            let group = attention.groups.group_of(layer);
            let found = group.and_then(|group| attention.metadata.of_group(builder, group));
            found.unwrap_or(ptr::null_mut())
        })
    }
}

/// The slot mapping of a layer's cache group in the last step of a builder; also
/// of a layer that is not active.
///
/// @param attention  Borrowed. Not NULL.
/// @param builder    As in kvpages_step.
/// @param layer      Its number in the worker's model, which is not that in a cache:
///                   kvpages_cache_find_model_layer().
/// @param[out] out   The step's slot mapping; all zero before the first step. Not
///                   NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such builder, or the layer is in
///                                   no cache group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_get_slot_mapping(
    attention: *const kvpages_attention,
    builder: usize,
    layer: usize,
    out: *mut kvpages_tensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(attention, input::cleared(out, "out"), |attention, out| {
            let group = attention.groups.cache_group_of(layer);
            let group = group
                .ok_or_else(|| Failure::not_found(format!("layer {layer} is in no cache group")))?;
            let found = attention.metadata.slots_of(builder, group);
            *out = found.ok_or_else(|| no_builder(attention, builder))?;
            Ok(())
        })
    }
}

/// What an item of a prompt is.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_modality {
    /// A picture.
    Image = 1,
    /// A series of pictures.
    Video = 2,
    /// Sound.
    Audio = 3,
    /// Anything else.
    Other = 4,
}

/// An item of a prompt: a run of placeholder tokens. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_multimodal_item {
    /// One of KVPAGES_MODALITY_*.
    pub modality: u32,
    /// Zero.
    pub reserved0: u32,
    /// Position of its first token.
    pub offset: i64,
    /// Its tokens.
    pub length: i64,
    /// For each of its tokens 1 when an embedding replaces it, else 0: length
    /// entries. NULL: all of them.
    pub is_embedded: *const u8,
}

/// No window: every range is kept.
pub const KVPAGES_NO_WINDOW: u64 = u64::MAX;

/// The tokens of one request that attend to each other in both directions: the
/// runs of embedded tokens of its images and videos, in order. An item of no
/// tokens has none.
///
/// @param items           Borrowed. num_items items.
/// @param num_items       May be 0.
/// @param sliding_window  Longer ranges are left out: their first tokens would
///                        see past it. Tokens; KVPAGES_NO_WINDOW to keep all.
/// @param[out] ranges     Room for capacity ranges. May be NULL when capacity
///                        is 0.
/// @param capacity        Ranges that fit.
/// @param[out] out_count  How many there are, also when they do not fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is less than the number.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_multimodal_ranges(
    items: *const kvpages_multimodal_item,
    num_items: usize,
    sliding_window: u64,
    ranges: *mut kvpages_range,
    capacity: usize,
    out_count: *mut usize,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (count, given, room) = unsafe {
            (
                input::cleared(out_count, "out_count")?,
                input::array(items, num_items, "items")?,
                input::array_mut(ranges, capacity, "ranges")?,
            )
        };
        let window = (sliding_window != KVPAGES_NO_WINDOW).then_some(sliding_window);
        // Twice: a call that fails has filled nothing.
        let mut found = 0;
        // SAFETY: the caller's contract.
        unsafe { visit_items(given, window, |_| found += 1) }?;
        *count = found;
        if found > room.len() {
            return Err(Failure::too_small("ranges", found, capacity));
        }
        let mut places = room.iter_mut();
        // SAFETY: the caller's contract.
        unsafe {
            visit_items(given, window, |range| {
                if let Some(place) = places.next() {
                    *place = range;
                }
            })
        }
    })
}

/// A tensor that is not there.
pub(super) const NO_TENSOR: kvpages_tensor = kvpages_tensor {
    data: ptr::null_mut(),
    shape: ptr::null(),
    strides: ptr::null(),
    dtype: 0,
    ndim: 0,
};

/// A step that was found to fit the groups.
struct Step<'a> {
    given: &'a kvpages_step,
    builder: usize,
    block_tables: &'a [kvpages_tensor],
    slot_mappings: &'a [kvpages_tensor],
    /// Empty when all groups have the step's.
    causality_by_group: &'a [u32],
    /// Empty when there are none.
    group_extra: &'a [*mut c_void],
    /// Empty when there are none.
    builder_extra: &'a [*mut c_void],
}

fn build(attention: &mut AttentionHandle, step: &Step<'_>) -> Result<(), Failure> {
    let given = step.given;
    let mut common = kvpages_common_metadata {
        struct_size: size_of::<kvpages_common_metadata>(),
        cache_group: 0,
        num_requests: given.num_requests,
        num_tokens: given.num_tokens,
        max_query_len: given.max_query_len,
        max_seq_len: given.max_seq_len,
        query_start: given.query_start,
        query_start_host: given.query_start_host,
        seq_lens: given.seq_lens,
        seq_lens_host_bound: given.seq_lens_host_bound,
        local_seq_lens: given.local_seq_lens,
        positions: given.positions,
        is_prefilling: given.is_prefilling,
        multimodal_ranges: given.multimodal_ranges,
        num_multimodal_requests: given.num_multimodal_requests,
        rswa_prefix_lens: given.rswa_prefix_lens,
        causal_by_request: ptr::null(),
        block_table: NO_TENSOR,
        slot_mapping: NO_TENSOR,
        group_extra: ptr::null_mut(),
        common_prefix_len: 0,
        causality: given.causality,
        for_capture: given.for_capture,
    };
    if let Some(builders) = &attention.builders {
        for (number, cache_group) in attention.groups.cache_groups().iter().enumerate() {
            common.cache_group = number as u64;
            common.block_table = step.block_tables[number];
            common.slot_mapping = step.slot_mappings[number];
            common.causality = *step
                .causality_by_group
                .get(number)
                .unwrap_or(&given.causality);
            common.causal_by_request = match common.causality {
                PER_REQUEST => given.causal_by_request,
                _ => ptr::null(),
            };
            common.group_extra = *step.group_extra.get(number).unwrap_or(&ptr::null_mut());
            for group in cache_group.first..cache_group.first + cache_group.groups.len() {
                let extra = *step.builder_extra.get(group).unwrap_or(&ptr::null_mut());
                let builder = builders.get(group, step.builder);
                // A copy, so that a builder that writes to it harms only itself.
                let common = common;
                let metadata = builders.source().build(group, builder, &common, extra)?;
                attention.metadata.stage(group, metadata);
            }
        }
    }
    attention.metadata.commit(step.builder, step.slot_mappings);
    Ok(())
}

const PER_REQUEST: u32 = kvpages_causality::PerRequest as u32;

/// # Safety
/// Pointers in `given` are NULL or valid, those for the device excepted.
unsafe fn read_step<'a>(
    attention: &AttentionHandle,
    given: &'a kvpages_step,
) -> Result<Step<'a>, Failure> {
    let cache_groups = attention.groups.cache_groups();
    check_per_group("the step", given.num_cache_groups, cache_groups.len()).map_err(|error| {
        let unknown = error.given > error.groups;
        let failure = Failure::from(error);
        match unknown {
            true => failure.with_kind("attn_groups_missing"),
            false => failure,
        }
    })?;
    let builder = usize::try_from(given.builder).unwrap_or(usize::MAX);
    if builder >= attention.num_builders {
        return Err(no_builder(attention, builder));
    }
    input::known_bits(given.for_capture, 1, "kvpages_step.for_capture")?;
    // SAFETY: the caller's contract.
    let step = unsafe {
        Step {
            given,
            builder,
            block_tables: per_group(
                given.block_tables,
                given.num_block_tables,
                cache_groups.len(),
                "block_tables",
            )?,
            slot_mappings: per_group(
                given.slot_mappings,
                given.num_slot_mappings,
                cache_groups.len(),
                "slot_mappings",
            )?,
            causality_by_group: optional_per_group(
                given.causality_by_group,
                given.num_causality_by_group,
                cache_groups.len(),
                "causality_by_group",
            )?,
            group_extra: optional_per_group(
                given.group_extra,
                given.num_group_extra,
                cache_groups.len(),
                "group_extra",
            )?,
            builder_extra: optional_per_group(
                given.builder_extra,
                given.num_builder_extra,
                attention.groups.num_groups(),
                "builder_extra",
            )?,
        }
    };
    for (name, missing) in [
        ("query_start", given.query_start.is_null()),
        ("query_start_host", given.query_start_host.is_null()),
        (
            "seq_lens",
            given.num_requests > 0 && given.seq_lens.is_null(),
        ),
        (
            "multimodal_ranges",
            given.num_multimodal_requests > 0 && given.multimodal_ranges.is_null(),
        ),
    ] {
        if missing {
            return Err(Failure::null(name));
        }
    }
    check_causality(given, given.causality)?;
    for (number, &causality) in step.causality_by_group.iter().enumerate() {
        check_causality(given, causality).map_err(|failure| in_group(failure, number))?;
    }
    for (number, group) in cache_groups.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            check_tensor(
                &BLOCK_TABLE,
                &step.block_tables[number],
                group,
                given.num_requests,
            )
            .and_then(|()| {
                let slots = &step.slot_mappings[number];
                check_tensor(&SLOT_MAPPING, slots, group, given.num_tokens)
            })
            .map_err(|failure| in_group(failure, number))?;
        }
    }
    // Last, as it reads as many numbers as there are said to be requests.
    // SAFETY: the caller's contract.
    unsafe {
        check_requests(given)?;
        check_multimodal(given)?;
    }
    Ok(step)
}

/// Whether the host's numbers of requests agree with each other.
///
/// # Safety
/// The host's arrays are as long as the step says.
unsafe fn check_requests(step: &kvpages_step) -> Result<(), Failure> {
    let requests = usize::try_from(step.num_requests).unwrap_or(usize::MAX);
    // SAFETY: the caller's contract.
    let starts = unsafe {
        input::array(
            step.query_start_host,
            requests.saturating_add(1),
            "query_start_host",
        )
    }?;
    let bounds = if step.seq_lens_host_bound.is_null() {
        &[]
    } else {
        // SAFETY: the caller's contract.
        unsafe { input::array(step.seq_lens_host_bound, requests, "seq_lens_host_bound") }?
    };
    let wrong = |message| Err(Failure::invalid("step_array", message));
    if let Some(first) = starts.first().filter(|&&first| first != 0) {
        return wrong(format!("query_start_host begins with {first}, not with 0"));
    }
    let lens = || {
        starts
            .windows(2)
            .map(|pair| i64::from(pair[1]) - i64::from(pair[0]))
    };
    // Without a branch for each request, as this is done in every step.
    let (least, most) = lens().fold((0, 0), |(least, most), len| (len.min(least), len.max(most)));
    if least < 0 {
        let request = lens().position(|len| len < 0).unwrap_or(0);
        return wrong(format!(
            "query_start_host ends request {request} at {}, before it starts at {}",
            starts[request + 1],
            starts[request]
        ));
    }
    let end = starts[requests];
    if i64::from(end).unsigned_abs() > step.num_tokens {
        return wrong(format!(
            "query_start_host ends with {end}, and the step has {} tokens",
            step.num_tokens
        ));
    }
    if most.unsigned_abs() > step.max_query_len {
        let request = lens().position(|len| len == most).unwrap_or(0);
        return wrong(format!(
            "request {request} has {most} tokens, and max_query_len is {}",
            step.max_query_len
        ));
    }
    let too_small = || {
        lens()
            .zip(bounds)
            .map(|(len, &bound)| len > i64::from(bound))
    };
    if too_small().fold(false, |any, small| any | small) {
        let request = too_small().position(|small| small).unwrap_or(0);
        return wrong(format!(
            "seq_lens_host_bound of request {request} is {}, which is less than its {} tokens",
            bounds[request],
            starts[request + 1] - starts[request]
        ));
    }
    Ok(())
}

/// Whether there are ranges for every request, or for none.
///
/// # Safety
/// The ranges are as many as the step says.
unsafe fn check_multimodal(step: &kvpages_step) -> Result<(), Failure> {
    let count = step.num_multimodal_requests;
    if count == 0 {
        return Ok(());
    }
    if count as u64 != step.num_requests {
        let message = format!(
            "num_multimodal_requests is {count}, and the step has {} requests",
            step.num_requests
        );
        return Err(Failure::invalid("step_array", message));
    }
    // SAFETY: the caller's contract.
    let requests = unsafe { input::array(step.multimodal_ranges, count, "multimodal_ranges") }?;
    for (number, request) in requests.iter().enumerate() {
        if request.ranges.is_null() && request.num_ranges > 0 {
            let name = format!("the ranges of entry {number} of multimodal_ranges");
            return Err(Failure::null(&name));
        }
    }
    Ok(())
}

/// # Safety
/// As [`input::array`].
unsafe fn per_group<'a, T>(
    data: *const T,
    count: usize,
    groups: usize,
    name: &'static str,
) -> Result<&'a [T], Failure> {
    check_per_group(name, count, groups)?;
    // SAFETY: the caller's contract.
    unsafe { input::array(data, count, name) }
}

/// # Safety
/// As [`input::array`].
unsafe fn optional_per_group<'a, T>(
    data: *const T,
    count: usize,
    groups: usize,
    name: &'static str,
) -> Result<&'a [T], Failure> {
    match count {
        0 if data.is_null() => Ok(&[]),
        // SAFETY: the caller's contract.
        _ => unsafe { per_group(data, count, groups, name) },
    }
}

fn check_causality(step: &kvpages_step, causality: u32) -> Result<(), Failure> {
    match causality {
        0 | 1 => Ok(()),
        PER_REQUEST if step.num_requests > 0 && step.causal_by_request.is_null() => {
            Err(Failure::null("causal_by_request"))
        }
        PER_REQUEST => Ok(()),
        other => Err(Failure::invalid(
            "unknown_value",
            format!("causality is {other}, which is not one of its values"),
        )),
    }
}

/// What a tensor of a step must be.
struct Wanted {
    name: &'static str,
    dtype: Dtype,
    ndim: u32,
    rows: &'static str,
}

const BLOCK_TABLE: Wanted = Wanted {
    name: "block_tables",
    dtype: Dtype::I32,
    ndim: 2,
    rows: "requests",
};
const SLOT_MAPPING: Wanted = Wanted {
    name: "slot_mappings",
    dtype: Dtype::I64,
    ndim: 1,
    rows: "tokens",
};

/// # Safety
/// The tensor's shape and strides are NULL or as long as it has dimensions.
#[inline]
unsafe fn check_tensor(
    wanted: &Wanted,
    tensor: &kvpages_tensor,
    group: &CacheGroup,
    rows: u64,
) -> Result<(), Failure> {
    let absent = tensor.ndim == 0 && tensor.shape.is_null() && tensor.data.is_null();
    if absent && group.kernel_block_size.is_none() {
        return Ok(());
    }
    if tensor.dtype != wanted.dtype as u32 || tensor.ndim != wanted.ndim {
        let message = format!(
            "{} is a tensor of {} dimensions and dtype {}; wanted are {} and {}",
            wanted.name, tensor.ndim, tensor.dtype, wanted.ndim, wanted.dtype as u32
        );
        return Err(Failure::invalid("step_tensor", message));
    }
    let ndim = tensor.ndim as usize;
    // SAFETY: the caller's contract.
    let arrays = unsafe {
        input::array(tensor.strides, ndim, "strides")
            .and_then(|strides| Ok((input::array(tensor.shape, ndim, "shape")?, strides)))
    };
    let (shape, strides) = arrays.map_err(|failure| failure.of("tensor", wanted.name))?;
    let wrong = |message| Err(Failure::invalid("step_tensor", message));
    let held = shape[0];
    if u64::try_from(held).map_or(true, |held| held < rows) {
        return wrong(format!(
            "{} has {held} rows for {rows} {}",
            wanted.name, wanted.rows
        ));
    }
    if held > 0 && tensor.data.is_null() {
        return Err(Failure::null(&format!("the data of {}", wanted.name)));
    }
    // Where there is one element, nobody steps.
    let (inner, step) = (shape[shape.len() - 1], strides[strides.len() - 1]);
    if inner < 0 || (inner > 1 && step != 1) {
        return wrong(format!(
            "{} has {inner} entries in a row, {step} apart; wanted is a stride of 1",
            wanted.name
        ));
    }
    if wanted.ndim > 1 && held > 1 && strides[0] < inner {
        return wrong(format!(
            "{} has rows {} apart, and each has {inner} entries",
            wanted.name, strides[0]
        ));
    }
    Ok(())
}

fn in_group(failure: Failure, group: usize) -> Failure {
    failure.of("cache group", &group.to_string())
}

fn no_builder(attention: &AttentionHandle, builder: usize) -> Failure {
    Failure::not_found(format!(
        "builder {builder} of {} of each attention group",
        attention.num_builders
    ))
}

impl From<ArrayLengthError> for Failure {
    fn from(error: ArrayLengthError) -> Failure {
        Failure::invalid("per_group_array_length", error.to_string())
    }
}

impl From<MultimodalError> for Failure {
    fn from(error: MultimodalError) -> Failure {
        Failure::invalid("bad_values", error.to_string())
    }
}

/// # Safety
/// Masks are NULL or as long as their items.
unsafe fn visit_items(
    given: &[kvpages_multimodal_item],
    window: Option<u64>,
    mut visit: impl FnMut(kvpages_range),
) -> Result<(), Failure> {
    for (i, item) in given.iter().enumerate() {
        // SAFETY: the caller's contract.
        let read = unsafe { read_item(item) }.map_err(|failure| failure.at(i))?;
        visit_ranges(&read, window, |range| {
            visit(kvpages_range {
                first: range.first,
                last: range.last,
            });
        })
        .map_err(|error| Failure::from(error).at(i))?;
    }
    Ok(())
}

/// # Safety
/// The mask is NULL or as long as the item.
unsafe fn read_item<'a>(item: &kvpages_multimodal_item) -> Result<MultimodalItem<'a>, Failure> {
    input::known_bits(item.reserved0, 0, "kvpages_multimodal_item.reserved0")?;
    let index = (item.modality as usize).wrapping_sub(1);
    let modality = Modality::ALL.get(index).copied().ok_or_else(|| {
        Failure::invalid(
            "unknown_value",
            format!(
                "modality is {}, which is not one of its values",
                item.modality
            ),
        )
    })?;
    let length = usize::try_from(item.length).unwrap_or(0);
    let is_embedded = if item.is_embedded.is_null() {
        None
    } else {
        // SAFETY: the caller's contract.
        Some(unsafe { input::array(item.is_embedded, length, "is_embedded") }?)
    };
    Ok(MultimodalItem {
        modality,
        offset: item.offset,
        length: item.length,
        is_embedded,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_core() {
        for (number, modality) in [
            (kvpages_modality::Image, Modality::Image),
            (kvpages_modality::Video, Modality::Video),
            (kvpages_modality::Audio, Modality::Audio),
            (kvpages_modality::Other, Modality::Other),
        ] {
            assert_eq!(Modality::ALL[number as usize - 1], modality);
        }
    }
}
