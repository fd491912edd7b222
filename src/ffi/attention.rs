//! Header section: attention groups and builders.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use super::backend::kvpages_backend;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::metadata::{NO_TENSOR, kvpages_common_metadata};
use super::plan::kvpages_plan;
use super::spec::{describe_spec, kvpages_spec};
use super::status::{Failure, kvpages_status};
use super::types::kvpages_tensor;
use crate::attention::{
    AttentionGroup, AttentionGroups, BuilderInfo, BuilderSource, Builders, BuildersError,
    GroupsError, StepMetadata,
};
use crate::backend::GraphSupport;

/// The attention groups of one worker, their metadata builders, and what these
/// made of the last step.
///
/// Thread-safety: kvpages_attention_build() and
/// kvpages_attention_limit_graph_support() change it, all other calls read it.
/// Builder callbacks run on the thread of the call, one at a time.
pub struct kvpages_attention(Handle<AttentionHandle>);
opaque!(kvpages_attention, AttentionHandle, "attention");

pub(super) struct AttentionHandle {
    pub groups: AttentionGroups,
    pub builders: Option<Builders<EngineBuilders>>,
    pub num_builders: usize,
    pub metadata: StepMetadata<*mut c_void, kvpages_tensor>,
    /// The lowest support, and the attention group that sets it.
    graph_support: (GraphSupport, Option<usize>),
    /// Names of the worker's layers.
    names: Arc<Vec<CString>>,
    /// Names of the attention groups' backends.
    backend_names: Arc<Vec<CString>>,
}

/// What a builder is made for. Valid during the call that it is handed to.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_builder_info {
    /// sizeof(kvpages_builder_info) as the library was compiled.
    pub struct_size: usize,
    /// Name of the backend that reads the layers.
    pub backend_name: *const c_char,
    /// What the layers store, its block size that of the kernel blocks where there
    /// are any. Compressed layers keep their own block size when the ratio of one of
    /// their cache group does not divide the kernel block. Their views are not split
    /// in either case: storage_block_size of kvpages_layer_info.
    pub spec: *const kvpages_spec,
    /// The layers, by their number in the worker's model, which is not that in a
    /// cache: kvpages_cache_find_model_layer().
    pub layers: *const usize,
    /// Number of layers.
    pub num_layers: usize,
    /// The KV-cache group, as the plan numbers it.
    pub cache_group: u64,
    /// The attention group in the cache group.
    pub group: u64,
    /// Which of the group's builders.
    pub builder: u64,
    /// Tokens of a kernel block; 0 for a group without cache.
    pub kernel_block_size: u64,
    /// Query heads on one rank; 0 when the layers have none.
    pub num_query_heads: u32,
    /// Zero.
    pub reserved0: u32,
}

/// Makes a builder.
///
/// @param user              As in kvpages_builder_callbacks.
/// @param info              What it is made for.
/// @param[out] out_builder  The builder, handed to the other callbacks. NULL
///                          before; may stay so.
/// @return 0 when it was made; anything else stops the call.
pub type kvpages_create_builder_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        info: *const kvpages_builder_info,
        out_builder: *mut *mut c_void,
    ) -> i32,
>;

/// How far a builder's metadata can be captured into a graph.
///
/// @param user             As in kvpages_builder_callbacks.
/// @param builder          What create made.
/// @param[out] out_support One of KVPAGES_GRAPH_SUPPORT_*. What the backend's
///                         contract says before.
/// @return 0, or anything else to stop the call.
pub type kvpages_builder_graph_support_fn = Option<
    unsafe extern "C" fn(user: *mut c_void, builder: *mut c_void, out_support: *mut u32) -> i32,
>;

/// The workspace that a builder lets others use.
///
/// @param user               As in kvpages_builder_callbacks.
/// @param builder            What create made.
/// @param[out] out_workspace The workspace. NULL before; stays so when the builder
///                           has none to give.
/// @return 0, or anything else to stop the call.
pub type kvpages_builder_get_workspace_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        builder: *mut c_void,
        out_workspace: *mut *mut c_void,
    ) -> i32,
>;

/// Hands a builder the workspace of one made before it.
///
/// @param user       As in kvpages_builder_callbacks.
/// @param builder    What create made.
/// @param workspace  The workspace.
/// @return 0, or anything else to stop the call.
pub type kvpages_builder_set_workspace_fn = Option<
    unsafe extern "C" fn(user: *mut c_void, builder: *mut c_void, workspace: *mut c_void) -> i32,
>;

/// Builds the metadata of a step for the layers of a builder.
///
/// @param user              As in kvpages_builder_callbacks.
/// @param builder           What create made.
/// @param common            The step, as the layers' cache group sees it. Valid
///                          during the call; what its pointers lead to is as valid
///                          as the engine made it.
/// @param extra             The entry of builder_extra for the attention group;
///                          NULL when there is none, and for a capture.
/// @param[out] out_metadata The metadata. NULL before.
/// @return 0, or anything else to stop the call.
pub type kvpages_builder_build_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        builder: *mut c_void,
        common: *const kvpages_common_metadata,
        extra: *mut c_void,
        out_metadata: *mut *mut c_void,
    ) -> i32,
>;

/// Ends a builder.
///
/// @param user     As in kvpages_builder_callbacks.
/// @param builder  What create made.
pub type kvpages_destroy_builder_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, builder: *mut c_void)>;

/// An engine's metadata builders. The functions must not throw or jump out, and
/// must not use the attention handle that calls them. One that returns anything
/// but 0 stops the call: it returns KVPAGES_STATUS_STOPPED, and
/// kvpages_last_callback_code() is what the function returned.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_builder_callbacks {
    /// sizeof(kvpages_builder_callbacks) as the caller compiled it.
    pub struct_size: usize,
    /// Handed to all functions. Kept until the attention handle is destroyed.
    pub user: *mut c_void,
    /// Makes a builder. Not NULL.
    pub create: kvpages_create_builder_fn,
    /// NULL: what the backend's contract says.
    pub graph_support: kvpages_builder_graph_support_fn,
    /// Asked of every builder until one gives a workspace. NULL: none does.
    pub get_workspace: kvpages_builder_get_workspace_fn,
    /// Called for every builder made after the one that gave a workspace. NULL:
    /// builders need none.
    pub set_workspace: kvpages_builder_set_workspace_fn,
    /// Builds metadata. Not NULL.
    pub build: kvpages_builder_build_fn,
    /// Builds the metadata of a step that is captured. NULL: build does.
    pub build_for_capture: kvpages_builder_build_fn,
    /// Called once for each builder that create made. Not NULL.
    pub destroy: kvpages_destroy_builder_fn,
}
extensible!(kvpages_builder_callbacks, destroy: kvpages_destroy_builder_fn);

/// The builders of one backend. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_backend_callbacks {
    /// Borrowed. Any backend of that name is meant.
    pub backend: *const kvpages_backend,
    /// Copied.
    pub callbacks: *const kvpages_builder_callbacks,
}

/// What attention groups are made of.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_attention_config {
    /// sizeof(kvpages_attention_config) as the caller compiled it.
    pub struct_size: usize,
    /// Less than kvpages_plan_num_workers().
    pub worker: usize,
    /// Names of the worker's layers that take part. NULL: all do.
    pub active_layers: *const *const c_char,
    /// Number of active_layers.
    pub num_active_layers: usize,
    /// Builders of all backends that backend_callbacks does not list. Copied. When
    /// both are left out there are groups, but no builders.
    pub callbacks: *const kvpages_builder_callbacks,
    /// Builders of single backends.
    pub backend_callbacks: *const kvpages_backend_callbacks,
    /// Number of backend_callbacks.
    pub num_backend_callbacks: usize,
    /// Builders of each attention group, one for each micro-batch; 0 for 1. At most
    /// 256.
    pub num_builders: u64,
}
extensible!(kvpages_attention_config, num_builders: u64);

/// What an attention group is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_attention_group_info {
    /// sizeof(kvpages_attention_group_info) as the caller compiled it.
    pub struct_size: usize,
    /// Its number among the attention groups of all cache groups.
    pub index: u64,
    /// Its layers.
    pub num_layers: u64,
    /// Tokens of a kernel block; 0 for a group without cache.
    pub kernel_block_size: u64,
    /// Query heads on one rank; 0 when the layers have none.
    pub num_query_heads: u32,
    /// What the backend's contract says: one of KVPAGES_GRAPH_SUPPORT_*.
    pub graph_support: u32,
}
extensible!(kvpages_attention_group_info, graph_support: u32);

/// Makes the attention groups of a worker, and the builders of each. Layers of one
/// cache group with the same backend (by name), spec and number of query heads are
/// one attention group; groups and the layers in them come in the order of the
/// plan. Layers that share a cache are in a group of their owner's cache group. A
/// layer without a backend is in none.
///
/// Builders are made group after group. When a callback fails, all builders that
/// were made are destroyed, the last first.
///
/// @param plan      Borrowed. Not NULL.
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_attention_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or active layer.
/// @retval KVPAGES_STATUS_STOPPED    A callback failed:
///                                   kvpages_last_callback_code().
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_create(
    plan: *const kvpages_plan,
    config: *const kvpages_attention_config,
    out: *mut *mut kvpages_attention,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let (plan, config) = unsafe { (handle::shared(plan)?, extensible::read(config)?) };
        let worker = plan.worker(config.worker)?;
        let (_, names) = plan.worker_blueprint(config.worker)?;
        // SAFETY: the caller's contract.
        let active = unsafe {
            input::texts(
                config.active_layers,
                config.num_active_layers,
                "active_layers",
            )
        }?;
        let active = (!config.active_layers.is_null()).then_some(&*active);
        let groups = AttentionGroups::new(worker, active)?;
        let backend_names = groups
            .iter()
            .map(|(_, _, group)| CString::new(group.backend.name()).unwrap_or_default());
        let backend_names = Arc::new(backend_names.collect());
        let num_builders = num_builders(&config)?;
        // SAFETY: the caller's contract.
        let callbacks = unsafe { read_callbacks(&config, &groups) }?;
        let builders = callbacks.map(|of_group| {
            let source = EngineBuilders {
                of_group,
                backend_names: Arc::clone(&backend_names),
            };
            Builders::new(source, &groups, num_builders).map_err(builders_failure)
        });
        let builders = builders.transpose()?;
        *out = handle::give(AttentionHandle {
            graph_support: match &builders {
                Some(builders) => builders.graph_support(),
                None => groups.promised_graph_support(),
            },
            metadata: StepMetadata::new(&groups, num_builders, ptr::null_mut(), NO_TENSOR),
            groups,
            builders,
            num_builders,
            names: Arc::clone(names),
            backend_names,
        });
        Ok(())
    })
}

/// Destroys attention groups and their builders, the last made first. NULL is a
/// no-op.
///
/// @param attention  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_destroy(attention: *mut kvpages_attention) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(attention) }
}

/// What the callback returned that stopped the last call on this thread which
/// returned KVPAGES_STATUS_STOPPED; 0 when there was none.
///
/// @return The callback's own number, not a kvpages_status.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_last_callback_code() -> i32 {
    CALLBACK_CODE.try_with(Cell::get).unwrap_or(0)
}

/// Number of KV-cache groups: those of the plan, by their number there.
///
/// @param attention  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_num_cache_groups(
    attention: *const kvpages_attention,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(attention, 0, |found| found.groups.cache_groups().len()) }
}

/// Number of attention groups of a cache group.
///
/// @param attention    Borrowed.
/// @param cache_group  Less than kvpages_attention_num_cache_groups().
/// @return 0 for NULL, and when there is no such cache group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_num_groups(
    attention: *const kvpages_attention,
    cache_group: usize,
) -> usize {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(attention, 0, |found| {
            let cache_groups = found.groups.cache_groups();
            cache_groups.get(cache_group).map_or(0, |c| c.groups.len())
        })
    }
}

/// An attention group.
///
/// @param attention    Borrowed. Not NULL.
/// @param cache_group  Less than kvpages_attention_num_cache_groups().
/// @param group        Less than kvpages_attention_num_groups().
/// @param[out] out     Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_get_group(
    attention: *const kvpages_attention,
    cache_group: usize,
    group: usize,
    out: *mut kvpages_attention_group_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(attention, extensible::out(out), |attention, out| {
            let (index, found) = attention.group(cache_group, group)?;
            let kernel = attention.groups.cache_groups()[cache_group].kernel_block_size;
            out.fill(kvpages_attention_group_info {
                struct_size: 0,
                index: index as u64,
                num_layers: found.layers.len() as u64,
                kernel_block_size: kernel.unwrap_or(0),
                num_query_heads: found.num_query_heads,
                graph_support: found.backend.contract().graph_support as u32,
            });
            Ok(())
        })
    }
}

/// What the layers of an attention group store, as it was planned: the block size
/// is the plan's, not that of kernel blocks.
///
/// @param attention    Borrowed. Not NULL.
/// @param cache_group  Less than kvpages_attention_num_cache_groups().
/// @param group        Less than kvpages_attention_num_groups().
/// @param[out] out     Filled; its pointers are Kept until the attention handle is
///                     destroyed. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_get_group_spec(
    attention: *const kvpages_attention,
    cache_group: usize,
    group: usize,
    out: *mut kvpages_spec,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(attention, extensible::out(out), |attention, out| {
            let (_, found) = attention.group(cache_group, group)?;
            out.fill(describe_spec(&found.spec));
            Ok(())
        })
    }
}

/// Name of the backend of an attention group.
///
/// @param attention    Borrowed.
/// @param cache_group  Less than kvpages_attention_num_cache_groups().
/// @param group        Less than kvpages_attention_num_groups().
/// @return A string of the handle's; NULL when there is no such group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_group_backend(
    attention: *const kvpages_attention,
    cache_group: usize,
    group: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(attention, ptr::null(), |attention| {
            let found = attention.groups.cache_groups().get(cache_group);
            let found = found.filter(|found| group < found.groups.len());
            found.map_or(ptr::null(), |c| attention.backend_name(c.first + group))
        })
    }
}

/// Name of a layer of an attention group.
///
/// @param attention    Borrowed.
/// @param cache_group  Less than kvpages_attention_num_cache_groups().
/// @param group        Less than kvpages_attention_num_groups().
/// @param index        Less than the group's num_layers.
/// @return A string of the handle's; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_group_layer_name(
    attention: *const kvpages_attention,
    cache_group: usize,
    group: usize,
    index: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(attention, ptr::null(), |attention| {
            let found = attention.groups.cache_groups().get(cache_group);
            let found = found.and_then(|found| found.groups.get(group));
            let layer = found.and_then(|found| found.layers.get(index));
            let name = layer.and_then(|&layer| attention.names.get(layer));
            name.map_or(ptr::null(), |name| name.as_ptr())
        })
    }
}

/// The lowest graph support over all builders; without builders, over the
/// backends' contracts.
///
/// @param attention              Borrowed.
/// @param[out] out_backend_name  The first backend that has it: a string of the
///                               handle's. NULL when it is always, and when the
///                               engine's own limit is lower. May be NULL.
/// @return One of KVPAGES_GRAPH_SUPPORT_*; NEVER for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_graph_support(
    attention: *const kvpages_attention,
    out_backend_name: *mut *const c_char,
) -> u32 {
    // SAFETY: the caller's contract.
    unsafe {
        let (support, name) =
            handle::get(attention, (GraphSupport::Never, ptr::null()), |attention| {
                let (support, group) = attention.graph_support;
                let name = group.map_or(ptr::null(), |group| attention.backend_name(group));
                (support, name)
            });
        if let Ok(out) = input::out(out_backend_name, "out_backend_name") {
            *out = name;
        }
        support as u32
    }
}

/// Lowers the graph support to what the engine itself can capture. A limit that is
/// not lower changes nothing.
///
/// @param attention  Changed. Not NULL.
/// @param limit      One of KVPAGES_GRAPH_SUPPORT_*.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no such limit.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_attention_limit_graph_support(
    attention: *mut kvpages_attention,
    limit: u32,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::change(attention, |attention| {
            let limit = graph_support(limit, "limit")?;
            if limit < attention.graph_support.0 {
                attention.graph_support = (limit, None);
            }
            Ok(())
        })
    }
}

impl AttentionHandle {
    /// An attention group and its number among those of all cache groups.
    fn group(&self, cache_group: usize, group: usize) -> Result<(usize, &AttentionGroup), Failure> {
        let all = self.groups.cache_groups();
        let found = all.get(cache_group).ok_or_else(|| {
            Failure::not_found(format!("cache group {cache_group} of {}", all.len()))
        })?;
        let attention = found.groups.get(group).ok_or_else(|| {
            Failure::not_found(format!(
                "attention group {group} of {} of cache group {cache_group}",
                found.groups.len()
            ))
        })?;
        Ok((found.first + group, attention))
    }

    fn backend_name(&self, group: usize) -> *const c_char {
        let name = self.backend_names.get(group);
        name.map_or(ptr::null(), |name| name.as_ptr())
    }
}

thread_local! {
    static CALLBACK_CODE: Cell<i32> = const { Cell::new(0) };
}

fn graph_support(number: u32, name: &str) -> Result<GraphSupport, Failure> {
    let found = GraphSupport::ALL.into_iter().find(|s| *s as u32 == number);
    found.ok_or_else(|| {
        Failure::invalid(
            "unknown_value",
            format!("{name} is {number}, which is not one of its values"),
        )
    })
}

const MAX_BUILDERS: u64 = 256;

fn num_builders(config: &kvpages_attention_config) -> Result<usize, Failure> {
    match config.num_builders.max(1) {
        count @ ..=MAX_BUILDERS => Ok(count as usize),
        count => Err(Failure::invalid(
            "bad_values",
            format!("num_builders is {count}; it must be at most {MAX_BUILDERS}"),
        )),
    }
}

impl From<GroupsError> for Failure {
    fn from(error: GroupsError) -> Failure {
        let message = error.to_string();
        match error {
            GroupsError::UnknownLayer { .. } => {
                Failure::not_found(message).with_kind("layer_missing")
            }
            GroupsError::Sharing(error) => error.into(),
            GroupsError::OwnerElsewhere { .. } => Failure::invalid("owner_elsewhere", message),
            GroupsError::KernelSpec { error, .. } => Failure::invalid(error.kind(), message),
        }
    }
}

fn builders_failure(error: BuildersError<Failure>) -> Failure {
    match error {
        BuildersError::Source(failure) => failure,
        BuildersError::TooMany { groups, builders } => Failure::out_of_host_memory(format!(
            "no memory for {builders} builders of each of {groups} attention groups"
        )),
    }
}

type CreateFn =
    unsafe extern "C" fn(*mut c_void, *const kvpages_builder_info, *mut *mut c_void) -> i32;
type BuildFn = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *const kvpages_common_metadata,
    *mut c_void,
    *mut *mut c_void,
) -> i32;
type DestroyFn = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// An engine's functions, those that must be there known to be.
#[derive(Clone, Copy)]
struct Callbacks {
    user: *mut c_void,
    create: CreateFn,
    graph_support: kvpages_builder_graph_support_fn,
    get_workspace: kvpages_builder_get_workspace_fn,
    set_workspace: kvpages_builder_set_workspace_fn,
    build: BuildFn,
    build_for_capture: kvpages_builder_build_fn,
    destroy: DestroyFn,
}

/// An engine's builders: the functions of each attention group.
pub(super) struct EngineBuilders {
    of_group: Vec<Callbacks>,
    backend_names: Arc<Vec<CString>>,
}

impl EngineBuilders {
    /// 0 is success; anything else stops the call.
    #[inline]
    fn stop_unless_zero(&self, code: i32, call: &str, group: usize) -> Result<(), Failure> {
        match code {
            0 => Ok(()),
            code => Err(self.stopped(code, call, group)),
        }
    }

    #[cold]
    fn stopped(&self, code: i32, call: &str, group: usize) -> Failure {
        let _ = CALLBACK_CODE.try_with(|last| last.set(code));
        let name = self.backend_names[group].to_string_lossy();
        Failure::stopped(
            "callback_failed",
            format!("{call} of attention group {group} (backend {name}) returned {code}"),
        )
    }

    /// Builds the metadata of a step.
    #[inline]
    pub(super) fn build(
        &self,
        group: usize,
        builder: *mut c_void,
        common: &kvpages_common_metadata,
        extra: *mut c_void,
    ) -> Result<*mut c_void, Failure> {
        let callbacks = &self.of_group[group];
        let mut metadata = ptr::null_mut();
        let (build, extra) = match (common.for_capture, callbacks.build_for_capture) {
            (0, _) => (callbacks.build, extra),
            (_, build) => (build.unwrap_or(callbacks.build), ptr::null_mut()),
        };
        // SAFETY: what the header demands of the function.
        let code = unsafe { build(callbacks.user, builder, common, extra, &mut metadata) };
        self.stop_unless_zero(code, "build", group)?;
        Ok(metadata)
    }
}

impl BuilderSource for EngineBuilders {
    type Builder = *mut c_void;
    type Workspace = *mut c_void;
    type Error = Failure;

    fn create(&self, info: &BuilderInfo<'_>) -> Result<*mut c_void, Failure> {
        let callbacks = &self.of_group[info.index];
        let layers = &info.attention.layers;
        let spec = describe_spec(&info.attention.kernel_spec);
        let c_info = kvpages_builder_info {
            struct_size: size_of::<kvpages_builder_info>(),
            backend_name: self.backend_names[info.index].as_ptr(),
            spec: &spec,
            layers: layers.as_ptr(),
            num_layers: layers.len(),
            cache_group: info.cache_group as u64,
            group: info.group as u64,
            builder: info.builder as u64,
            kernel_block_size: info.kernel_block_size.unwrap_or(0),
            num_query_heads: info.attention.num_query_heads,
            reserved0: 0,
        };
        let mut builder = ptr::null_mut();
        // SAFETY: what the header demands of the function.
        let code = unsafe { (callbacks.create)(callbacks.user, &c_info, &mut builder) };
        self.stop_unless_zero(code, "create", info.index)?;
        Ok(builder)
    }

    fn workspace(
        &self,
        group: usize,
        builder: *mut c_void,
    ) -> Result<Option<*mut c_void>, Failure> {
        let callbacks = &self.of_group[group];
        let Some(get_workspace) = callbacks.get_workspace else {
            return Ok(None);
        };
        let mut workspace = ptr::null_mut();
        // SAFETY: what the header demands of the function.
        let code = unsafe { get_workspace(callbacks.user, builder, &mut workspace) };
        self.stop_unless_zero(code, "get_workspace", group)?;
        Ok((!workspace.is_null()).then_some(workspace))
    }

    fn set_workspace(
        &self,
        group: usize,
        builder: *mut c_void,
        workspace: *mut c_void,
    ) -> Result<(), Failure> {
        let callbacks = &self.of_group[group];
        let Some(set_workspace) = callbacks.set_workspace else {
            return Ok(());
        };
        // SAFETY: what the header demands of the function.
        let code = unsafe { set_workspace(callbacks.user, builder, workspace) };
        self.stop_unless_zero(code, "set_workspace", group)
    }

    fn graph_support(
        &self,
        group: usize,
        builder: *mut c_void,
        own: GraphSupport,
    ) -> Result<GraphSupport, Failure> {
        let callbacks = &self.of_group[group];
        let Some(ask) = callbacks.graph_support else {
            return Ok(own);
        };
        let mut support = own as u32;
        // SAFETY: what the header demands of the function.
        let code = unsafe { ask(callbacks.user, builder, &mut support) };
        self.stop_unless_zero(code, "graph_support", group)?;
        let name = self.backend_names[group].to_string_lossy();
        graph_support(support, "graph_support").map_err(|failure| failure.of("backend", &name))
    }

    fn destroy(&self, group: usize, builder: *mut c_void) {
        let callbacks = &self.of_group[group];
        // SAFETY: what the header demands of the function.
        unsafe { (callbacks.destroy)(callbacks.user, builder) };
    }
}

/// The functions of each attention group; `None` when the engine has no builders.
///
/// # Safety
/// Pointers in `config` are NULL or valid.
unsafe fn read_callbacks(
    config: &kvpages_attention_config,
    groups: &AttentionGroups,
) -> Result<Option<Vec<Callbacks>>, Failure> {
    // SAFETY: the caller's contract.
    let listed = unsafe {
        input::array(
            config.backend_callbacks,
            config.num_backend_callbacks,
            "backend_callbacks",
        )
    }?;
    let default = if config.callbacks.is_null() {
        None
    } else {
        // SAFETY: the caller's contract.
        Some(unsafe { read_functions(config.callbacks) }?)
    };
    let mut by_backend = HashMap::new();
    for (i, entry) in listed.iter().enumerate() {
        // SAFETY: the caller's contract.
        let backend = unsafe { handle::shared(entry.backend) }.map_err(|f| f.at(i))?;
        // SAFETY: the caller's contract.
        let functions = unsafe { read_functions(entry.callbacks) }.map_err(|f| f.at(i))?;
        let name = backend.backend.name();
        if by_backend.insert(name, functions).is_some() {
            let message = format!("backend_callbacks lists backend {name} twice");
            return Err(Failure::invalid("backend_twice", message));
        }
    }
    if default.is_none() && by_backend.is_empty() {
        return Ok(None);
    }
    let mut of_groups = input::reserve(groups.num_groups(), "attention groups")?;
    for (_, _, group) in groups.iter() {
        let name = group.backend.name();
        let found = by_backend.get(name).copied().or(default);
        of_groups.push(found.ok_or_else(|| Failure::null("callbacks").of("backend", name))?);
    }
    Ok(Some(of_groups))
}

/// # Safety
/// `callbacks` is NULL or valid.
unsafe fn read_functions(
    callbacks: *const kvpages_builder_callbacks,
) -> Result<Callbacks, Failure> {
    // SAFETY: the caller's contract.
    let given = unsafe { extensible::read(callbacks) }?;
    Ok(Callbacks {
        user: given.user,
        create: given.create.ok_or_else(|| Failure::null("create"))?,
        graph_support: given.graph_support,
        get_workspace: given.get_workspace,
        set_workspace: given.set_workspace,
        build: given.build.ok_or_else(|| Failure::null("build"))?,
        build_for_capture: given.build_for_capture,
        destroy: given.destroy.ok_or_else(|| Failure::null("destroy"))?,
    })
}
