//! Header section: planning.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::{Arc, OnceLock};

use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::model::{ModelHandle, kvpages_model};
use super::spec::{describe_spec, kvpages_spec, state_cache_mode};
use super::status::{Failure, kvpages_status};
use crate::cache::Blueprint;
use crate::log::{self, Level};
use crate::model::Model;
use crate::plan::{
    self, Group, GroupSpec, PartGroup, PartTensor, Parts, Plan, PlanConfig, PlanError, Policy,
    PoolTensor, TableNeeds, TableWishes, Worker, WorkerPlan, plan_from_parts,
};
use crate::spec::{Counting, Limits};

/// How all workers share out their memory: groups of layers, allocations, a number
/// of blocks. Immutable: all calls on it may run concurrently.
pub struct kvpages_plan(Handle<PlanHandle>);
opaque!(kvpages_plan, PlanHandle, "plan");

pub(super) struct PlanHandle {
    plan: Plan,
    /// For each worker the names of its model's layers.
    names: Vec<Arc<Vec<CString>>>,
    /// For each worker what a cache will be: making it proves that every layer has a view.
    blueprints: Vec<Arc<Blueprint>>,
    text: OnceLock<String>,
    json: OnceLock<String>,
}

/// Which rules group layers and unify pages.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_policy {
    /// The best rules this library has: those of Compact.
    Default = 0,
    /// Exactly the rules of vLLM 0.26.
    Reference = 1,
    /// The most tokens in the same memory: at the usual and at the longest length no
    /// plan of this policy holds fewer requests than the reference's (but for models
    /// that the reference splits into more than 32 groups, where a few tokens go for
    /// far fewer groups). Block 0 is counted as reserved, also where reserved_blocks
    /// is 0.
    Compact = 2,
}

/// How an explanation is written.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_text_format {
    /// For people.
    Text = 0,
    /// For programs.
    Json = 1,
}

/// Flag of kvpages_plan_config: lower max_model_len to what fits.
pub const KVPAGES_PLAN_AUTO_FIT: u32 = 1;
/// Flag of kvpages_plan_config: store windowed layers in full, so that one block
/// table serves all layers.
pub const KVPAGES_PLAN_HYBRID_MANAGER_OFF: u32 = 2;
/// Flag of kvpages_plan_config: pack the pages of all layers of a block together
/// when there are several groups.
pub const KVPAGES_PLAN_CROSS_LAYER_BLOCKS: u32 = 4;
/// Flag of kvpages_plan_config: num_blocks_override replaces the memory.
pub const KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS: u32 = 8;
/// Flag of kvpages_plan_config: the last layer belongs to a speculative draft.
pub const KVPAGES_PLAN_DRAFT_LAYERS: u32 = 16;
/// Flag of kvpages_part_group: it holds layers of a speculative draft.
pub const KVPAGES_PART_GROUP_DRAFT: u64 = 1;

/// One rank: the layers it holds and the memory it has for them. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_worker {
    /// Its layers. Workers that hold the same layers may name the same model.
    pub model: *const kvpages_model,
    /// Bytes for caches. A number that is not positive is refused, unless the
    /// worker has no layers or the number of blocks is overridden.
    pub memory_bytes: i64,
}

/// What a plan is made for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_plan_config {
    /// sizeof(kvpages_plan_config) as the caller compiled it.
    pub struct_size: usize,
    /// One of KVPAGES_POLICY_*.
    pub policy: u32,
    /// KVPAGES_PLAN_* flags.
    pub flags: u32,
    /// Tokens of the longest sequence. At least 1.
    pub max_model_len: u64,
    /// Ranks that share the tokens of a sequence while decoding; 0 for 1.
    pub context_parallel_size: u64,
    /// Tokens scheduled and not yet settled, over all concurrent batches.
    pub max_tokens_in_flight: u64,
    /// Tokens of an encoder's output that cross attention caches.
    pub max_encoder_tokens: u64,
    /// Blocks of every group, with KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS.
    pub num_blocks_override: u64,
    /// Blocks that the engine keeps from requests, such as 1 for the null block.
    pub reserved_blocks: u64,
    /// One of KVPAGES_STATE_CACHE_MODE_*.
    pub state_cache_mode: u32,
    /// Zero.
    pub reserved0: u32,
    /// Tokens of a usual request, which the compact policy saves memory for besides
    /// the longest; 0 for max_model_len.
    pub typical_len: u64,
    /// 1 when the layers' block sizes are no one's wish: the compact policy chooses
    /// sizes that their kernels take, also smaller ones, of at least 16 tokens
    /// unless the layer's own are smaller, and padding that was given is dropped. A
    /// state keeps its block size.
    pub choose_block_sizes: u32,
    /// Zero.
    pub reserved1: u32,
}
extensible!(kvpages_plan_config, reserved1: u32);

/// By how much a plan does not fit.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_shortfall {
    /// sizeof(kvpages_shortfall) as the caller compiled it.
    pub struct_size: usize,
    /// The worker that has too little.
    pub worker: u64,
    /// Bytes that one request of the longest sequence needs.
    pub needed_bytes: u64,
    /// Bytes available.
    pub available_bytes: u64,
    /// Tokens of the longest sequence that would fit; 0 when none does.
    pub longest_model_len: u64,
}
extensible!(kvpages_shortfall, longest_model_len: u64);

/// Layers that share a block table, as an engine states them. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_part_group {
    /// Names of the layers, those that share another layer's pages included.
    pub layer_names: *const *const c_char,
    /// Number of layer_names.
    pub num_layers: usize,
    /// KVPAGES_PART_GROUP_* flags.
    pub flags: u64,
}

/// One allocation, or one slot of the packed one, as an engine states it. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_part_tensor {
    /// Bytes; of a packed tensor, those of the one backing that all packed tensors
    /// share.
    pub size_bytes: u64,
    /// Packed: where the layer's page starts in a block.
    pub offset_bytes: u64,
    /// Packed: bytes from block to block. 0 when not packed.
    pub block_stride_bytes: u64,
    /// Names of the layers that have their pages in it.
    pub layer_names: *const *const c_char,
    /// Number of layer_names.
    pub num_layers: usize,
}

/// A plan of one worker as an engine made it itself.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_plan_parts {
    /// sizeof(kvpages_plan_parts) as the caller compiled it.
    pub struct_size: usize,
    /// Blocks of every group.
    pub num_blocks: u64,
    /// Every layer with a cache is in one of them.
    pub groups: *const kvpages_part_group,
    /// Number of groups.
    pub num_groups: usize,
    /// Every layer with pages of its own is in one of them.
    pub tensors: *const kvpages_part_tensor,
    /// Number of tensors.
    pub num_tensors: usize,
    /// Tokens of a kernel block of each group, 0 where it has none. NULL to have
    /// them chosen from the layers' backends.
    pub kernel_block_sizes: *const u64,
    /// Number of kernel_block_sizes: that of groups, or 0 with NULL.
    pub num_kernel_block_sizes: usize,
}
extensible!(kvpages_plan_parts, num_kernel_block_sizes: usize);

/// What one worker allocates.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_worker_info {
    /// sizeof(kvpages_worker_info) as the caller compiled it.
    pub struct_size: usize,
    /// Blocks of every group, the same for all workers.
    pub num_blocks: u64,
    /// Groups of the whole model.
    pub num_groups: u64,
    /// Tensors of this worker.
    pub num_tensors: u64,
    /// Tokens that fit.
    pub capacity_tokens: u64,
    /// Requests of the longest sequence that fit at once.
    pub max_concurrency: f64,
    /// Bytes that one request of the longest sequence needs here.
    pub bytes_per_request: u64,
    /// Bytes of one block here.
    pub bytes_per_block: u64,
    /// Bytes of all allocations here.
    pub total_bytes: u64,
    /// 1 when layers of different types share memory, so that a block must be
    /// zeroed when it gets another owner.
    pub needs_zeroing: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_worker_info, reserved0: u32);

/// Layers that share a block table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_group_info {
    /// sizeof(kvpages_group_info) as the caller compiled it.
    pub struct_size: usize,
    /// Layers of this worker with pages of their own.
    pub num_layers: u64,
    /// Layers of this worker that share another layer's pages.
    pub num_sharing_layers: u64,
    /// Tokens of one block.
    pub block_size: u64,
    /// Tokens of a kernel block; 0 when no layer has a backend.
    pub kernel_block_size: u64,
    /// Bytes of one layer's page; of a set, of all layers' pages.
    pub page_size_bytes: u64,
    /// Entries of a block-table row for a sequence of max_model_len tokens.
    pub row_blocks: u64,
    /// Entries that a block-table row must have for any request: row_blocks; more
    /// where cross attention caches more encoder tokens than that and where a request
    /// holds more states than that, and fewer where the layers of a set share their
    /// tokens over context-parallel ranks.
    pub table_width_blocks: u64,
    /// The most blocks that one request can hold.
    pub blocks_per_request: u64,
    /// Specs of the group: 1 when its layers store the same; of a set one for each
    /// layer (on a worker without layers of it: of the whole model).
    pub num_specs: u64,
    /// 1 when the layers are a set: the same number of blocks, but different
    /// things stored.
    pub is_set: u32,
    /// 1 when it holds layers of a speculative draft.
    pub is_draft: u32,
}
extensible!(kvpages_group_info, is_draft: u32);

/// Memory that one layer of each group shares.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_tensor_info {
    /// sizeof(kvpages_tensor_info) as the caller compiled it.
    pub struct_size: usize,
    /// Bytes; of a packed tensor, those of the one backing that all packed tensors
    /// share.
    pub size_bytes: u64,
    /// Packed: where the layers' page starts in a block.
    pub offset_bytes: u64,
    /// Packed: bytes from block to block. 0 when not packed.
    pub block_stride_bytes: u64,
    /// Layers that have their pages in it.
    pub num_layers: u64,
}
extensible!(kvpages_tensor_info, num_layers: u64);

/// What decides the steps of a scheduler and of a prefix cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_block_size_config {
    /// sizeof(kvpages_block_size_config) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of a block as the engine was configured. At least 1.
    pub cache_block_size: u64,
    /// Tokens of one hash as the engine wants them; 0 to have it chosen.
    pub prefix_match_unit: u64,
    /// 1 when block hashes are used: prefix caching is on, or blocks are
    /// transferred.
    pub hashes_blocks: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_block_size_config, reserved0: u32);

/// Plans the caches of all workers of a model, and proves that every layer with a
/// backend has a view. Takes no memory.
///
/// @param config       Borrowed. Not NULL.
/// @param workers      Copied: the layers as they are now. num_workers of them.
/// @param num_workers  At least 1.
/// @param[out] out     Owned by the caller: kvpages_plan_destroy(). NULL on
///                     failure.
/// @param[out] out_shortfall  Filled when the model does not fit. May be NULL.
/// @retval KVPAGES_STATUS_DOES_NOT_FIT     Too little memory for one request.
/// @retval KVPAGES_STATUS_CONTRACT_BROKEN  A backend could not read its layers.
/// @note Cost: by the reference linear in the layers of distinct models. The compact
///       policy searches: 2 ms for 1,000 layers of 12 kinds. Of hundreds of kinds of
///       layers it looks at a part, and takes about 0.1 s for 1,000 kinds on 64
///       pipeline stages.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_create(
    config: *const kvpages_plan_config,
    workers: *const kvpages_worker,
    num_workers: usize,
    out: *mut *mut kvpages_plan,
    out_shortfall: *mut kvpages_shortfall,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (shortfall, out) = unsafe {
            let wanted = !out_shortfall.is_null();
            let shortfall = wanted.then(|| extensible::out(out_shortfall)).transpose();
            input::both(shortfall, input::cleared(out, "out"))
        }?;
        // SAFETY: the caller's contract.
        let (config, given) = unsafe {
            (
                read_config(extensible::read(config)?)?,
                input::array(workers, num_workers, "workers")?,
            )
        };
        let mut all = input::reserve(given.len(), "workers")?;
        let mut names = input::reserve(given.len(), "workers")?;
        for (i, worker) in given.iter().enumerate() {
            // SAFETY: the caller's contract.
            let ModelHandle {
                model,
                names: of_model,
                ..
            } = unsafe { handle::shared(worker.model) }.map_err(|failure| failure.at(i))?;
            names.push(Arc::clone(of_model));
            all.push(Worker {
                model: Arc::clone(model),
                memory_bytes: worker.memory_bytes,
            });
        }
        let plan = plan::plan(&all, &config).inspect_err(|error| {
            if let (Some(out), Some(short)) = (shortfall, shortfall_of(error)) {
                out.fill(short);
            }
        })?;
        *out = handle::give(PlanHandle::new(plan, names)?);
        Ok(())
    })
}

/// Takes a plan that the engine made itself: checks it, completes it, and proves
/// that every layer with a backend has a view. The plan has one worker; the limits
/// of a request are not known, so its longest sequence, rows, capacity and
/// concurrency are 0.
///
/// @param model     Copied: the layers as they are now. Not NULL.
/// @param parts     Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_plan_destroy(). NULL on failure.
/// @retval KVPAGES_STATUS_CONTRACT_BROKEN  A backend could not read its layers.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_create_from_parts(
    model: *const kvpages_model,
    parts: *const kvpages_plan_parts,
    out: *mut *mut kvpages_plan,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let (model, parts) = unsafe {
            (
                handle::shared(model)?,
                read_parts(&extensible::read(parts)?)?,
            )
        };
        let plan = plan_from_parts(Arc::clone(&model.model), parts)?;
        *out = handle::give(PlanHandle::new(plan, vec![Arc::clone(&model.names)])?);
        Ok(())
    })
}

/// Destroys a plan. NULL is a no-op. Caches made from it live on.
///
/// @param plan  Not used any more, and neither are its strings and specs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_destroy(plan: *mut kvpages_plan) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(plan) }
}

/// Number of workers.
///
/// @param plan  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_num_workers(plan: *const kvpages_plan) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(plan, 0, |plan| plan.plan.workers.len()) }
}

/// Tokens of the longest sequence, as they were fitted.
///
/// @param plan  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_max_model_len(plan: *const kvpages_plan) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { handle::get(plan, 0, |plan| plan.plan.config.limits.max_model_len) }
}

/// What a worker allocates.
///
/// @param plan      Borrowed. Not NULL.
/// @param worker    Less than kvpages_plan_num_workers().
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_get_worker(
    plan: *const kvpages_plan,
    worker: usize,
    out: *mut kvpages_worker_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(plan, extensible::out(out), |plan, out| {
            let found = plan.worker(worker)?;
            out.fill(kvpages_worker_info {
                struct_size: 0,
                num_blocks: found.num_blocks,
                num_groups: found.groups.len() as u64,
                num_tensors: found.tensors.len() as u64,
                capacity_tokens: found.capacity_tokens,
                max_concurrency: found.max_concurrency,
                bytes_per_request: found.bytes_per_request,
                bytes_per_block: found.bytes_per_block,
                total_bytes: allocated_bytes(&found.tensors),
                needs_zeroing: u32::from(found.needs_zeroing),
                reserved0: 0,
            });
            Ok(())
        })
    }
}

/// A group as a worker has it.
///
/// @param plan      Borrowed. Not NULL.
/// @param worker    Less than kvpages_plan_num_workers().
/// @param group     Less than the worker's num_groups.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_get_group(
    plan: *const kvpages_plan,
    worker: usize,
    group: usize,
    out: *mut kvpages_group_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(plan, extensible::out(out), |plan, out| {
            let found = plan.group(worker, group)?;
            out.fill(describe_group(found, &plan.plan.config.limits)?);
            Ok(())
        })
    }
}

/// A spec of a group as it was planned: block sizes scaled, pages padded.
///
/// @param plan      Borrowed. Not NULL.
/// @param worker    Less than kvpages_plan_num_workers().
/// @param group     Less than the worker's num_groups.
/// @param index     Less than the group's num_specs.
/// @param[out] out  Filled; its pointers are Kept until the plan is destroyed. Not
///                  NULL; struct_size set.
/// @param[out] out_layer_name  Of a set the layer that has this spec, else NULL. A
///                  string of the plan's. May be NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker, group or spec.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_get_group_spec(
    plan: *const kvpages_plan,
    worker: usize,
    group: usize,
    index: usize,
    out: *mut kvpages_spec,
    out_layer_name: *mut *const c_char,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        let wanted = !out_layer_name.is_null();
        let out_name = wanted.then(|| input::cleared(out_layer_name, "out_layer_name"));
        let outputs = input::both(out_name.transpose(), extensible::out(out));
        handle::read(plan, outputs, |plan, (out_name, out)| {
            let found = plan.group(worker, group)?;
            let specs = found.spec.specs();
            let spec = specs.get(index).ok_or_else(|| {
                let count = specs.len();
                Failure::not_found(format!("spec {index} of {count} of group {group}"))
            })?;
            out.fill(describe_spec(spec));
            if let Some(out_name) = out_name {
                *out_name = plan.name_of_spec(worker, group, index);
            }
            Ok(())
        })
    }
}

/// Name of a layer of a group: the layers with pages of their own, then those that
/// share.
///
/// @param plan    Borrowed.
/// @param worker  Less than kvpages_plan_num_workers().
/// @param group   Less than the worker's num_groups.
/// @param index   Less than num_layers + num_sharing_layers of the group.
/// @return A string of the plan's; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_group_layer_name(
    plan: *const kvpages_plan,
    worker: usize,
    group: usize,
    index: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(plan, ptr::null(), |plan| {
            let found = plan.group(worker, group).ok();
            let layer = found.and_then(|g| g.layers.iter().chain(&g.sharing_layers).nth(index));
            layer.map_or(ptr::null(), |&layer| plan.name(worker, layer))
        })
    }
}

/// A tensor of a worker.
///
/// @param plan      Borrowed. Not NULL.
/// @param worker    Less than kvpages_plan_num_workers().
/// @param tensor    Less than the worker's num_tensors.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or tensor.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_get_tensor(
    plan: *const kvpages_plan,
    worker: usize,
    tensor: usize,
    out: *mut kvpages_tensor_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(plan, extensible::out(out), |plan, out| {
            let all = &plan.worker(worker)?.tensors;
            let found = all.get(tensor).ok_or_else(|| {
                let count = all.len();
                Failure::not_found(format!("tensor {tensor} of {count} of worker {worker}"))
            })?;
            out.fill(kvpages_tensor_info {
                struct_size: 0,
                size_bytes: found.size,
                offset_bytes: found.offset,
                block_stride_bytes: found.block_stride,
                num_layers: found.layers.len() as u64,
            });
            Ok(())
        })
    }
}

/// Name of a layer that has its pages in a tensor.
///
/// @param plan    Borrowed.
/// @param worker  Less than kvpages_plan_num_workers().
/// @param tensor  Less than the worker's num_tensors.
/// @param index   Less than the tensor's num_layers.
/// @return A string of the plan's; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_tensor_layer_name(
    plan: *const kvpages_plan,
    worker: usize,
    tensor: usize,
    index: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(plan, ptr::null(), |plan| {
            let found = plan
                .worker(worker)
                .ok()
                .and_then(|worker| worker.tensors.get(tensor));
            let layer = found.and_then(|tensor| tensor.layers.get(index));
            layer.map_or(ptr::null(), |&layer| plan.name(worker, layer))
        })
    }
}

/// The steps in which a scheduler counts tokens and a prefix cache hashes them.
///
/// @param plan    Borrowed. Not NULL.
/// @param config  Borrowed. Not NULL.
/// @param[out] out_scheduler_block_size  Tokens that a scheduler rounds to. Not
///                NULL.
/// @param[out] out_hash_block_size  Tokens of one hash. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  cache_block_size is 0, or
///                prefix_match_unit does not divide the blocks of a group; the
///                message names the group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_resolve_block_sizes(
    plan: *const kvpages_plan,
    config: *const kvpages_block_size_config,
    out_scheduler_block_size: *mut u64,
    out_hash_block_size: *mut u64,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        let outputs = input::both(
            input::cleared(out_scheduler_block_size, "out_scheduler_block_size"),
            input::cleared(out_hash_block_size, "out_hash_block_size"),
        );
        handle::read(plan, outputs, |plan, (scheduler, hash)| {
            let given = extensible::read(config)?;
            input::known_bits(given.reserved0, 0, "kvpages_block_size_config.reserved0")?;
            input::known_bits(given.hashes_blocks, 1, "hashes_blocks")?;
            let unit = (given.prefix_match_unit != 0).then_some(given.prefix_match_unit);
            (*scheduler, *hash) = plan::resolve_block_sizes(
                &plan.plan,
                given.cache_block_size,
                unit,
                given.hashes_blocks == 1,
            )?;
            Ok(())
        })
    }
}

/// Why a plan is as it is: for every group its layers, block and page sizes,
/// padding and the reason for it, in total blocks, tokens, concurrency and bytes
/// wasted; beside a compact plan the reference's plan of the same layers, and the
/// change of what was asked for that would win most tokens. docs/explanation.md has
/// the keys of the JSON.
///
/// @param plan         Borrowed. Not NULL.
/// @param format       One of KVPAGES_TEXT_FORMAT_*.
/// @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL
///                     when capacity is 0.
/// @param capacity     Bytes that fit.
/// @param[out] out_length  Bytes of the text, the NUL not counted, also when it
///                     does not fit. Not NULL.
/// @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
/// @note Cost: the first call for a format makes up to 26 plans of the same layers;
///       the text is kept for later ones.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_plan_copy_explanation(
    plan: *const kvpages_plan,
    format: u32,
    buffer: *mut c_char,
    capacity: usize,
    out_length: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            plan,
            input::cleared(out_length, "out_length"),
            |plan, length| {
                const TEXT: u32 = kvpages_text_format::Text as u32;
                const JSON: u32 = kvpages_text_format::Json as u32;
                let text = match format {
                    TEXT => plan.text.get_or_init(|| plan.plan.explain_text()),
                    JSON => plan.json.get_or_init(|| plan.plan.explain_json()),
                    other => {
                        return Err(Failure::invalid(
                            "unknown_value",
                            format!("format is {other}, which is not one of its values"),
                        ));
                    }
                };
                input::copy_text_out(text, buffer, capacity, length)
            },
        )
    }
}

impl PlanHandle {
    fn new(plan: Plan, names: Vec<Arc<Vec<CString>>>) -> Result<PlanHandle, Failure> {
        let blueprints = blueprints(&plan.workers)?;
        tell_of(&plan);
        Ok(PlanHandle {
            plan,
            names,
            blueprints,
            text: OnceLock::new(),
            json: OnceLock::new(),
        })
    }

    pub(super) fn worker(&self, worker: usize) -> Result<&WorkerPlan, Failure> {
        self.plan
            .workers
            .get(worker)
            .ok_or_else(|| self.no_worker(worker))
    }

    /// What tables of one of its workers must hold.
    pub(super) fn table_needs(
        &self,
        worker: usize,
        wishes: &TableWishes,
    ) -> Result<TableNeeds, Failure> {
        Ok(self.plan.table_needs(self.worker(worker)?, wishes)?)
    }

    fn no_worker(&self, worker: usize) -> Failure {
        let count = self.plan.workers.len();
        Failure::not_found(format!("worker {worker} of {count} of the plan"))
    }

    fn group(&self, worker: usize, group: usize) -> Result<&Group, Failure> {
        let groups = &self.worker(worker)?.groups;
        groups.get(group).ok_or_else(|| {
            let count = groups.len();
            Failure::not_found(format!("group {group} of {count} of the plan"))
        })
    }

    fn name(&self, worker: usize, layer: usize) -> *const c_char {
        let name = self.names.get(worker).and_then(|names| names.get(layer));
        name.map_or(ptr::null(), |name| name.as_ptr())
    }

    /// The layer that has a spec of a set. On a worker without layers of the set, its specs are
    /// those of the whole model, worker after worker.
    fn name_of_spec(&self, worker: usize, group: usize, index: usize) -> *const c_char {
        let Ok(found) = self.group(worker, group) else {
            return ptr::null();
        };
        match (&found.spec, found.layers.get(index)) {
            (GroupSpec::One(_), _) => ptr::null(),
            (GroupSpec::Set(_), Some(&layer)) => self.name(worker, layer),
            (GroupSpec::Set(_), None) => self.name_in_whole_group(group, index),
        }
    }

    fn name_in_whole_group(&self, group: usize, index: usize) -> *const c_char {
        let mut seen: Vec<&CString> = Vec::new();
        for (worker, names) in self.plan.workers.iter().zip(&self.names) {
            let layers = worker
                .groups
                .get(group)
                .map_or(&[][..], |group| &group.layers);
            for name in layers.iter().filter_map(|&layer| names.get(layer)) {
                if !seen.contains(&name) {
                    seen.push(name);
                }
            }
        }
        seen.get(index).map_or(ptr::null(), |name| name.as_ptr())
    }

    /// What a worker's cache will be, and the names of its model's layers.
    pub(super) fn worker_blueprint(
        &self,
        worker: usize,
    ) -> Result<(&Arc<Blueprint>, &Arc<Vec<CString>>), Failure> {
        let found = self.blueprints.get(worker).zip(self.names.get(worker));
        found.ok_or_else(|| self.no_worker(worker))
    }
}

/// Logs a plan.
fn tell_of(plan: &Plan) {
    log::say(Level::Info, || plan.headline());
    if log::is_on(Level::Warn) {
        for limit in plan.limits() {
            log::say(Level::Warn, || limit);
        }
    }
    if log::is_on(Level::Info)
        && let Some(fallback) = plan.fallback()
    {
        log::say(Level::Info, || fallback);
    }
    log::say(Level::Debug, || plan.explain_text().trim_end().to_owned());
}

/// Workers that name the same model allocate the same, so their blueprint is made once.
fn blueprints(workers: &[WorkerPlan]) -> Result<Vec<Arc<Blueprint>>, Failure> {
    let mut made: HashMap<*const Model, Arc<Blueprint>> = HashMap::new();
    let mut all = input::reserve(workers.len(), "workers")?;
    for worker in workers {
        let model = Arc::as_ptr(&worker.model);
        if let Some(blueprint) = made.get(&model) {
            all.push(Arc::clone(blueprint));
            continue;
        }
        let blueprint = Arc::new(Blueprint::of(worker)?);
        made.insert(model, Arc::clone(&blueprint));
        all.push(blueprint);
    }
    Ok(all)
}

fn describe_group(group: &Group, limits: &Limits) -> Result<kvpages_group_info, Failure> {
    Ok(kvpages_group_info {
        struct_size: 0,
        num_layers: group.layers.len() as u64,
        num_sharing_layers: group.sharing_layers.len() as u64,
        block_size: group.spec.block_size(),
        kernel_block_size: group.kernel_block_size.unwrap_or(0),
        page_size_bytes: group.spec.page_bytes()?,
        row_blocks: group.spec.row_blocks(limits, limits.max_model_len)?,
        table_width_blocks: group.spec.table_width_blocks(limits)?,
        blocks_per_request: group.spec.blocks_per_request(limits)?,
        num_specs: group.spec.specs().len() as u64,
        is_set: u32::from(matches!(group.spec, GroupSpec::Set(_))),
        is_draft: u32::from(group.is_draft),
    })
}

/// Packed tensors share one backing.
fn allocated_bytes(tensors: &[PoolTensor]) -> u64 {
    let packed = tensors.iter().find(|tensor| tensor.block_stride > 0);
    let apart = tensors.iter().filter(|tensor| tensor.block_stride == 0);
    apart
        .chain(packed)
        .fold(0, |sum: u64, tensor| sum.saturating_add(tensor.size))
}

fn shortfall_of(error: &PlanError) -> Option<kvpages_shortfall> {
    let (worker, needed_bytes, available_bytes, longest_model_len) = match *error {
        PlanError::NotEnoughMemory {
            worker,
            needed,
            available,
            longest,
            ..
        } => (worker, needed, available, longest),
        PlanError::AutoFitImpossible {
            worker,
            needed,
            available,
        } => (worker, needed, available, 0),
        PlanError::NoAvailableMemory {
            worker,
            needed,
            available,
            ..
        } => (worker, needed, u64::try_from(available).unwrap_or(0), 0),
        PlanError::ZeroBlocks {
            worker,
            bytes_per_block,
            available,
        } => (worker, bytes_per_block, available, 0),
        _ => return None,
    };
    Some(kvpages_shortfall {
        struct_size: 0,
        worker: worker as u64,
        needed_bytes,
        available_bytes,
        longest_model_len,
    })
}

fn read_config(given: kvpages_plan_config) -> Result<PlanConfig, Failure> {
    let known = KVPAGES_PLAN_AUTO_FIT
        | KVPAGES_PLAN_HYBRID_MANAGER_OFF
        | KVPAGES_PLAN_CROSS_LAYER_BLOCKS
        | KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS
        | KVPAGES_PLAN_DRAFT_LAYERS;
    let flags = input::known_bits(given.flags, known, "kvpages_plan_config.flags")?;
    input::known_bits(given.reserved0, 0, "kvpages_plan_config.reserved0")?;
    input::known_bits(given.choose_block_sizes, 1, "choose_block_sizes")?;
    input::known_bits(given.reserved1, 0, "kvpages_plan_config.reserved1")?;
    const DEFAULT: u32 = kvpages_policy::Default as u32;
    const REFERENCE: u32 = kvpages_policy::Reference as u32;
    const COMPACT: u32 = kvpages_policy::Compact as u32;
    let has = |flag| flags & flag != 0;
    let overrides = has(KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS);
    if given.num_blocks_override != 0 && !overrides {
        return Err(Failure::invalid(
            "bad_values",
            format!(
                "num_blocks_override is {}, but the flag KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS is not set",
                given.num_blocks_override
            ),
        ));
    }
    Ok(PlanConfig {
        policy: match given.policy {
            // What the default is, is decided here and nowhere else.
            REFERENCE => Policy::Reference,
            DEFAULT | COMPACT => Policy::Compact,
            other => {
                return Err(Failure::invalid(
                    "unknown_value",
                    format!("policy is {other}, which is not one of its values"),
                ));
            }
        },
        limits: Limits {
            max_model_len: given.max_model_len,
            context_parallel_size: given.context_parallel_size.max(1),
            max_tokens_in_flight: given.max_tokens_in_flight,
            max_encoder_tokens: given.max_encoder_tokens,
            state_cache_mode: state_cache_mode(given.state_cache_mode)?,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: has(KVPAGES_PLAN_AUTO_FIT),
        hybrid_manager_off: has(KVPAGES_PLAN_HYBRID_MANAGER_OFF),
        cross_layer_blocks: has(KVPAGES_PLAN_CROSS_LAYER_BLOCKS),
        num_blocks_override: overrides.then_some(given.num_blocks_override),
        reserved_blocks: given.reserved_blocks,
        has_draft_layers: has(KVPAGES_PLAN_DRAFT_LAYERS),
        typical_len: given.typical_len,
        choose_block_sizes: given.choose_block_sizes == 1,
    })
}

/// # Safety
/// Arrays and strings are NULL or as long as they are said to be.
unsafe fn read_parts(given: &kvpages_plan_parts) -> Result<Parts, Failure> {
    // SAFETY: the caller's contract.
    let (groups, tensors, kernel_block_sizes) = unsafe {
        (
            input::array(given.groups, given.num_groups, "groups")?,
            input::array(given.tensors, given.num_tensors, "tensors")?,
            input::array(
                given.kernel_block_sizes,
                given.num_kernel_block_sizes,
                "kernel_block_sizes",
            )?,
        )
    };
    let owned = |names, count| {
        // SAFETY: the caller's contract.
        let names = unsafe { input::texts(names, count, "layer_names") }?;
        Ok::<_, Failure>(names.into_iter().map(str::to_owned).collect())
    };
    let mut parts = Parts {
        num_blocks: given.num_blocks,
        groups: input::reserve(groups.len(), "groups")?,
        tensors: input::reserve(tensors.len(), "tensors")?,
        kernel_block_sizes: (!given.kernel_block_sizes.is_null())
            .then(|| kernel_block_sizes.to_vec()),
    };
    for (i, group) in groups.iter().enumerate() {
        if group.flags & !KVPAGES_PART_GROUP_DRAFT != 0 {
            let message = format!(
                "flags of group {i} are {:#x}; this library knows the bits 0x1",
                group.flags
            );
            return Err(Failure::invalid("unknown_value", message));
        }
        let layers = owned(group.layer_names, group.num_layers);
        parts.groups.push(PartGroup {
            layers: layers.map_err(|failure| failure.of("group", &i.to_string()))?,
            is_draft: group.flags & KVPAGES_PART_GROUP_DRAFT != 0,
        });
    }
    for (i, tensor) in tensors.iter().enumerate() {
        let layers = owned(tensor.layer_names, tensor.num_layers);
        parts.tensors.push(PartTensor {
            size: tensor.size_bytes,
            offset: tensor.offset_bytes,
            block_stride: tensor.block_stride_bytes,
            layers: layers.map_err(|failure| failure.of("tensor", &i.to_string()))?,
        });
    }
    Ok(parts)
}
