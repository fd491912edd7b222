//! Header section: status and errors.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use crate::backend::{BackendError, KernelBlockError, LayoutError, PresetError};
use crate::cache::{
    BindError, BlueprintError, CacheError, DescribeError, SnapshotTextError, UsageError,
};
use crate::cuda::CudaError;
use crate::descriptor::{DescriptorError, ReshardError};
use crate::dlpack::NoMemory;
use crate::json;
use crate::log::FromWithin;
use crate::memory::MemoryError;
use crate::model::{ModelError, SharingError};
use crate::num::Overflow;
use crate::ops::{OpsError, StridedError};
use crate::plan::PlanError;
use crate::spec::{DemandError, MergeError, SpecError};
use crate::tables::TablesError;
use crate::view::{AuditError, ViewError};

/// Result of every call that can fail. Zero is success, every failure is
/// negative. Values are never renumbered or used again.
///
/// Any call may return NULL_ARGUMENT, INVALID_ARGUMENT, POISONED or INTERNAL;
/// the functions list only what else a caller can act on.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_status {
    /// The call did all that it was asked to.
    Ok = 0,
    /// A pointer that is required is NULL.
    NullArgument = -1,
    /// An argument is out of range, or arguments contradict each other.
    InvalidArgument = -2,
    /// There is nothing of that name or number.
    NotFound = -3,
    /// The caller's array is too small; the size that is needed was written.
    BufferTooSmall = -4,
    /// A backend cannot read its layers as they were planned.
    ContractBroken = -5,
    /// The library does not do this.
    Unsupported = -6,
    /// A callback asked to stop.
    Stopped = -7,
    /// The model does not fit in the memory it was planned for.
    DoesNotFit = -20,
    /// The host, or the engine's allocator, has not enough memory.
    OutOfHostMemory = -21,
    /// The device has not enough memory.
    OutOfDeviceMemory = -22,
    /// There is no device, no driver for it, or the driver failed.
    DeviceUnavailable = -40,
    /// An earlier call on this handle met a bug; it can only be destroyed.
    Poisoned = -99,
    /// A bug in the library; the message says where.
    Internal = -100,
}

impl kvpages_status {
    const ALL: [kvpages_status; 14] = [
        kvpages_status::Ok,
        kvpages_status::NullArgument,
        kvpages_status::InvalidArgument,
        kvpages_status::NotFound,
        kvpages_status::BufferTooSmall,
        kvpages_status::ContractBroken,
        kvpages_status::Unsupported,
        kvpages_status::Stopped,
        kvpages_status::DoesNotFit,
        kvpages_status::OutOfHostMemory,
        kvpages_status::OutOfDeviceMemory,
        kvpages_status::DeviceUnavailable,
        kvpages_status::Poisoned,
        kvpages_status::Internal,
    ];

    const fn name(self) -> &'static CStr {
        match self {
            kvpages_status::Ok => c"OK",
            kvpages_status::NullArgument => c"NULL_ARGUMENT",
            kvpages_status::InvalidArgument => c"INVALID_ARGUMENT",
            kvpages_status::NotFound => c"NOT_FOUND",
            kvpages_status::BufferTooSmall => c"BUFFER_TOO_SMALL",
            kvpages_status::ContractBroken => c"CONTRACT_BROKEN",
            kvpages_status::Unsupported => c"UNSUPPORTED",
            kvpages_status::Stopped => c"STOPPED",
            kvpages_status::DoesNotFit => c"DOES_NOT_FIT",
            kvpages_status::OutOfHostMemory => c"OUT_OF_HOST_MEMORY",
            kvpages_status::OutOfDeviceMemory => c"OUT_OF_DEVICE_MEMORY",
            kvpages_status::DeviceUnavailable => c"DEVICE_UNAVAILABLE",
            kvpages_status::Poisoned => c"POISONED",
            kvpages_status::Internal => c"INTERNAL",
        }
    }
}

/// Name of a status, such as "INVALID_ARGUMENT".
///
/// @param status  A kvpages_status.
/// @return A static string; "UNKNOWN" for a number that is no status.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_status_name(status: i32) -> *const c_char {
    let known = kvpages_status::ALL
        .into_iter()
        .find(|known| *known as i32 == status);
    known.map_or(c"UNKNOWN", kvpages_status::name).as_ptr()
}

/// Text of the last failed call on this thread, or an empty string.
///
/// @return A string of the library's, never NULL. Valid until the next call on
///         this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_last_error_message() -> *const c_char {
    last(|error| error.message.as_ptr())
}

/// Kind of the last failed call on this thread, such as "not_enough_memory": a
/// name that stays the same from version to version, finer than the status. An
/// empty string when no call failed.
///
/// @return A string of the library's, never NULL. Valid until the next call on
///         this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_last_error_kind() -> *const c_char {
    last(|error| error.kind.as_ptr())
}

struct LastError {
    message: CString,
    kind: CString,
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

fn last(pick: impl FnOnce(&LastError) -> *const c_char) -> *const c_char {
    // A thread that is ending has lost its message.
    let picked = LAST.try_with(|last| last.borrow().as_ref().map(pick));
    picked.ok().flatten().unwrap_or(c"".as_ptr())
}

/// Keeps a failure as this thread's last error.
pub(super) fn remember(failure: Failure) -> kvpages_status {
    // A NUL inside a message would cut it short.
    let message = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    let kind = CString::new(failure.kind).unwrap_or_default();
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(LastError { message, kind }));
    failure.status
}

/// Why a call failed, as it leaves the library.
#[derive(Debug)]
pub(super) struct Failure {
    pub status: kvpages_status,
    pub kind: &'static str,
    pub message: String,
}

impl Failure {
    fn new(status: kvpages_status, kind: &'static str, message: impl ToString) -> Failure {
        Failure {
            status,
            kind,
            message: message.to_string(),
        }
    }

    pub(super) fn null(name: &str) -> Failure {
        let message = format!("{name} is NULL");
        Failure::new(kvpages_status::NullArgument, "null_argument", message)
    }

    pub(super) fn invalid(kind: &'static str, message: String) -> Failure {
        Failure::new(kvpages_status::InvalidArgument, kind, message)
    }

    pub(super) fn not_found(message: String) -> Failure {
        Failure::new(kvpages_status::NotFound, "not_found", message)
    }

    pub(super) fn stopped(kind: &'static str, message: String) -> Failure {
        Failure::new(kvpages_status::Stopped, kind, message)
    }

    /// The same failure under another kind.
    pub(super) fn with_kind(self, kind: &'static str) -> Failure {
        Failure { kind, ..self }
    }

    pub(super) fn unsupported(kind: &'static str, message: String) -> Failure {
        Failure::new(kvpages_status::Unsupported, kind, message)
    }

    pub(super) fn too_small(name: &str, needed: usize, capacity: usize) -> Failure {
        let message = format!("{name} has room for {capacity}, {needed} are needed");
        Failure::new(kvpages_status::BufferTooSmall, "buffer_too_small", message)
    }

    pub(super) fn out_of_host_memory(message: String) -> Failure {
        Failure::new(
            kvpages_status::OutOfHostMemory,
            "out_of_host_memory",
            message,
        )
    }

    pub(super) fn poisoned(name: &str) -> Failure {
        let message = format!("an earlier call on this {name} met a bug; it can only be destroyed");
        Failure::new(kvpages_status::Poisoned, "poisoned", message)
    }

    pub(super) fn internal(message: String) -> Failure {
        Failure::new(kvpages_status::Internal, "internal", message)
    }

    /// The same failure, of entry `index` of an array.
    pub(super) fn at(self, index: usize) -> Failure {
        Failure {
            message: format!("entry {index}: {}", self.message),
            ..self
        }
    }

    /// The same failure, of something with a name.
    pub(super) fn of(self, what: &str, name: &str) -> Failure {
        Failure {
            message: format!("{what} {name}: {}", self.message),
            ..self
        }
    }
}

impl From<FromWithin> for Failure {
    fn from(error: FromWithin) -> Failure {
        Failure::invalid("log_callback_is_running", error.to_string())
    }
}

impl From<Overflow> for Failure {
    fn from(error: Overflow) -> Failure {
        Failure::invalid("overflow", error.to_string())
    }
}

impl From<SpecError> for Failure {
    fn from(error: SpecError) -> Failure {
        Failure::invalid(error.kind(), error.to_string())
    }
}

impl From<MergeError> for Failure {
    fn from(error: MergeError) -> Failure {
        let kind = match &error {
            MergeError::Empty => "bad_values",
            MergeError::KindsDiffer {
                first_has_own_rule: true,
                ..
            } => "merge_type_mismatch",
            MergeError::KindsDiffer { .. } | MergeError::SpecsDiffer { .. } => {
                "merge_spec_mismatch"
            }
            MergeError::FieldsDiffer { .. } => "merge_field_mismatch",
            MergeError::WindowsDiffer { .. } => "merge_window_mismatch",
            MergeError::WindowAndChunk { .. } => "merge_window_and_chunk",
            MergeError::Spec(inner) => inner.kind(),
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<DemandError> for Failure {
    fn from(error: DemandError) -> Failure {
        let kind = match error {
            DemandError::ContextParallelWindow { .. } => "dcp_sliding_window",
            DemandError::Overflow(_) => "overflow",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<LayoutError> for Failure {
    fn from(error: LayoutError) -> Failure {
        let kind = match error {
            LayoutError::UnknownAxis { .. } => "layout_unknown_axis",
            LayoutError::AxisTwice { .. } => "layout_axis_twice",
            LayoutError::AxisMissing { .. } => "layout_axis_missing",
            LayoutError::OrderLength { .. } => "stride_order_length",
            LayoutError::OrderDim { .. } => "layout_order",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Failure {
        let kind = match error {
            BackendError::NameEmpty => "backend_name_empty",
            BackendError::NoKernelBlockSize { .. } => "no_common_block_size",
            BackendError::Zero {
                field: "a kernel block size",
                ..
            } => "unknown_supported_size",
            BackendError::Zero { .. } => "bad_values",
            BackendError::Alignment { .. } => "backend_alignment",
            BackendError::TwoLayouts { .. } => "layout_twice",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<PresetError> for Failure {
    fn from(error: PresetError) -> Failure {
        match error {
            PresetError::Layout(error) => error.into(),
            PresetError::Backend(error) => error.into(),
        }
    }
}

impl From<KernelBlockError> for Failure {
    fn from(error: KernelBlockError) -> Failure {
        let kind = match error {
            KernelBlockError::ZeroBlockSize => "bad_values",
            KernelBlockError::NoCommonSize { .. } => "no_common_block_size",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        let kind = match &error {
            ModelError::NameEmpty { .. } => "layer_name_empty",
            ModelError::NameTwice { .. } => "layer_name_twice",
            ModelError::Spec { error, .. } => error.kind(),
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<SharingError> for Failure {
    fn from(error: SharingError) -> Failure {
        Failure::invalid(error.kind(), error.to_string())
    }
}

impl From<AuditError> for Failure {
    fn from(error: AuditError) -> Failure {
        Failure::invalid(audit_kind(&error), error.to_string())
    }
}

fn audit_kind(error: &AuditError) -> &'static str {
    match error {
        AuditError::Negative { .. } | AuditError::ZeroElement => "bad_values",
        AuditError::Misaligned { .. } => "view_dtype_misaligned",
        AuditError::OutOfBounds { .. } => "view_out_of_bounds",
        AuditError::Overlaps { .. } => "view_overlaps_itself",
        AuditError::Overflow(_) => "overflow",
    }
}

fn view_kind(error: &ViewError) -> &'static str {
    match error {
        ViewError::NoLayout => "backend_without_layout",
        ViewError::KernelBlockNotDividing { .. }
        | ViewError::WidthsDiffer { .. }
        | ViewError::NothingForKvAxis { .. }
        | ViewError::NoKvAxis { .. }
        | ViewError::NoHeadAxis { .. }
        | ViewError::ContentLargerThanPage { .. }
        | ViewError::PackedSplit { .. } => "view_size_mismatch",
        ViewError::PaddedSplitNotEven { .. } => "padded_split_not_even",
        ViewError::TooManyRuns { .. } => "too_many_runs",
        ViewError::Misaligned { .. } => "view_dtype_misaligned",
        ViewError::StateMisaligned { .. } => "mamba_state_misaligned",
        ViewError::FusedAxesApart { .. } => "fused_axes_apart",
        ViewError::PageNotDense { .. } => "page_not_dense",
        ViewError::BlocksNotAligned { .. } => "blocks_not_aligned",
        ViewError::IndexWidth { .. } => "index_width_exceeded",
        ViewError::Audit(inner) => audit_kind(inner),
        ViewError::Overflow(_) => "overflow",
    }
}

impl From<BlueprintError> for Failure {
    fn from(error: BlueprintError) -> Failure {
        let message = error.to_string();
        let kind = match error {
            BlueprintError::View { error, .. } => view_kind(&error),
            BlueprintError::Ownership { .. } => "blocks_share_bytes",
            BlueprintError::SharedLayoutDiffers { .. } => "share_layout_differs",
            BlueprintError::TensorMissing { .. } => "raw_tensor_missing",
            BlueprintError::NoMemory { .. } => return Failure::out_of_host_memory(message),
            BlueprintError::Sharing(error) => return error.into(),
            BlueprintError::Overflow(error) => return error.into(),
        };
        Failure::new(kvpages_status::ContractBroken, kind, message)
    }
}

impl From<MemoryError> for Failure {
    fn from(error: MemoryError) -> Failure {
        memory_failure(&error, error.to_string())
    }
}

fn cuda_status(error: &CudaError) -> kvpages_status {
    match error {
        CudaError::OutOfMemory { .. } => kvpages_status::OutOfDeviceMemory,
        CudaError::OutOfPinnedMemory { .. } => kvpages_status::OutOfHostMemory,
        CudaError::NotSupported { .. } => kvpages_status::Unsupported,
        CudaError::NotLoaded { .. } => kvpages_status::Internal,
        CudaError::DriverMissing { .. }
        | CudaError::DriverIncomplete { .. }
        | CudaError::DriverTooOld { .. }
        | CudaError::NoDevice
        | CudaError::NoSuchDevice { .. }
        | CudaError::DriverFailed { .. } => kvpages_status::DeviceUnavailable,
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        Failure::new(cuda_status(&error), error.kind(), error)
    }
}

fn memory_failure(error: &MemoryError, message: String) -> Failure {
    let kind = match error {
        MemoryError::Host { .. } | MemoryError::TooLarge { .. } => "out_of_host_memory",
        MemoryError::Callback { .. } => "allocator_refused",
        MemoryError::CallbackMisaligned { .. } => {
            return Failure::invalid("allocator_misaligned", message);
        }
        MemoryError::AdoptedFull { .. } => "adopted_buffer_full",
        MemoryError::Device(error) => {
            return Failure::new(cuda_status(error), error.kind(), message);
        }
        MemoryError::CannotGrow { .. } => {
            return Failure::unsupported("memory_cannot_grow", message);
        }
    };
    Failure::new(kvpages_status::OutOfHostMemory, kind, message)
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Failure {
        let message = error.to_string();
        match error {
            CacheError::Memory { error, .. } => memory_failure(&error, message),
            CacheError::NumBlocks { .. } => Failure::invalid("cache_num_blocks", message),
            CacheError::Fixed { .. } => Failure::unsupported("cache_is_fixed", message),
            CacheError::BlockInUse { .. } => Failure::invalid("block_in_use", message),
            CacheError::NoSuchBlock { .. } => Failure::invalid("block_id_out_of_range", message),
        }
    }
}

impl From<UsageError> for Failure {
    fn from(error: UsageError) -> Failure {
        let kind = match error {
            UsageError::Groups { .. } => "counts_of_groups",
            UsageError::TooMany { .. } => "too_many_blocks_in_use",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<SnapshotTextError> for Failure {
    fn from(error: SnapshotTextError) -> Failure {
        match error {
            SnapshotTextError::Usage(error) => error.into(),
            SnapshotTextError::NoMemory(error) => error.into(),
        }
    }
}

impl From<json::NoMemory> for Failure {
    fn from(error: json::NoMemory) -> Failure {
        Failure::out_of_host_memory(error.to_string())
    }
}

impl From<OpsError> for Failure {
    fn from(error: OpsError) -> Failure {
        let status = match &error {
            OpsError::NoMemory { .. } => kvpages_status::OutOfHostMemory,
            OpsError::Cuda(error) => cuda_status(error),
            OpsError::NoLayer { .. } | OpsError::NoGroup { .. } => kvpages_status::NotFound,
            OpsError::NotSupported { .. } => kvpages_status::Unsupported,
            OpsError::RowsMissing { .. } => kvpages_status::NullArgument,
            _ => kvpages_status::InvalidArgument,
        };
        Failure::new(status, error.kind(), error.to_string())
    }
}

fn descriptor_status(error: &DescriptorError) -> kvpages_status {
    match error {
        DescriptorError::Version { .. } | DescriptorError::NoRow { .. } => {
            kvpages_status::Unsupported
        }
        DescriptorError::NoLayerOfName { .. } | DescriptorError::NotThere { .. } => {
            kvpages_status::NotFound
        }
        DescriptorError::Json(_)
        | DescriptorError::Wrong { .. }
        | DescriptorError::OutOfRange { .. } => kvpages_status::InvalidArgument,
    }
}

impl From<DescriptorError> for Failure {
    fn from(error: DescriptorError) -> Failure {
        Failure::new(descriptor_status(&error), error.kind(), error)
    }
}

impl From<DescribeError> for Failure {
    fn from(error: DescribeError) -> Failure {
        let kind = match error {
            DescribeError::HeadsOfLayers { .. } => "per_layer_array_length",
            DescribeError::HeadsWithoutRanks => "bad_values",
            DescribeError::HeadsDiffer { .. } => "kv_heads_differ",
            DescribeError::HeadsNotDividing { .. } => "heads_not_dividing",
            DescribeError::Descriptor(error) => return error.into(),
            DescribeError::Overflow(error) => return error.into(),
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<ReshardError> for Failure {
    fn from(error: ReshardError) -> Failure {
        let status = match &error {
            ReshardError::Layer { .. } | ReshardError::GroupsDiffer { .. } => {
                kvpages_status::Unsupported
            }
            ReshardError::NoGroup { .. } => kvpages_status::NotFound,
            ReshardError::NoMemory { .. } => kvpages_status::OutOfHostMemory,
            ReshardError::Descriptor(inner) => descriptor_status(inner),
            ReshardError::NoRanks { .. }
            | ReshardError::NoBlock { .. }
            | ReshardError::BlockTwice { .. }
            | ReshardError::Overflow(_) => kvpages_status::InvalidArgument,
        };
        Failure::new(status, error.kind(), error)
    }
}

impl From<StridedError> for Failure {
    fn from(error: StridedError) -> Failure {
        let status = match error {
            StridedError::NoMemory { .. } => kvpages_status::NotFound,
            _ => kvpages_status::InvalidArgument,
        };
        Failure::new(status, error.kind(), error)
    }
}

impl From<NoMemory> for Failure {
    fn from(error: NoMemory) -> Failure {
        Failure::out_of_host_memory(error.to_string())
    }
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Failure {
        let kind = match error {
            BindError::NotOneInteger { .. } => "layer_index_not_one_integer",
            BindError::TooManyIntegers { .. } => "layer_index_too_many_integers",
            BindError::ModuleOutOfRange { .. } => "module_index_out_of_range",
            BindError::IndexOverflow { .. } => "overflow",
            BindError::Collision { .. } => "layer_index_collision",
            BindError::NoModules => "bad_values",
            BindError::ListNotEmpty { .. } => "runner_list_not_empty",
            BindError::ContextMissing { .. } => "forward_context_missing",
        };
        Failure::invalid(kind, error.to_string())
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Failure {
        let (kind, message) = (error.kind(), error.to_string());
        let status = match error {
            PlanError::NotEnoughMemory { .. }
            | PlanError::AutoFitImpossible { .. }
            | PlanError::NoAvailableMemory { .. }
            | PlanError::ZeroBlocks { .. } => kvpages_status::DoesNotFit,
            PlanError::KernelBlock { .. }
            | PlanError::IndexTooNarrow { .. }
            | PlanError::BackendBlockSize { .. }
            | PlanError::BackendHeads { .. } => kvpages_status::ContractBroken,
            _ => kvpages_status::InvalidArgument,
        };
        Failure::new(status, kind, message)
    }
}

impl From<TablesError> for Failure {
    fn from(error: TablesError) -> Failure {
        let status = match error {
            TablesError::NoMemory { .. } => kvpages_status::OutOfHostMemory,
            TablesError::Cuda(ref error) => cuda_status(error),
            TablesError::Capturing => kvpages_status::Unsupported,
            TablesError::UnknownRequest { .. } | TablesError::UnknownGroup { .. } => {
                kvpages_status::NotFound
            }
            _ => kvpages_status::InvalidArgument,
        };
        Failure::new(status, error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A string that the library returned just now.
    fn text(pointer: *const c_char) -> &'static CStr {
        // SAFETY: never NULL, and valid until the next call on this thread.
        unsafe { CStr::from_ptr(pointer) }
    }

    #[test]
    fn every_status_has_a_name_and_a_number_of_its_own() {
        for (i, status) in kvpages_status::ALL.into_iter().enumerate() {
            let others = &kvpages_status::ALL[..i];
            assert!(others.iter().all(|other| *other as i32 != status as i32));
            assert!(others.iter().all(|other| other.name() != status.name()));
            assert_eq!(text(kvpages_status_name(status as i32)), status.name());
        }
        assert_eq!(text(kvpages_status_name(-12345)), c"UNKNOWN");
    }

    #[test]
    fn a_message_is_whole_even_with_a_nul_in_it() {
        let failure = Failure::invalid("test", "a\0b".to_owned());
        remember(failure.at(3).of("layer", "x"));
        assert_eq!(text(kvpages_last_error_message()), c"layer x: entry 3: a b");
        assert_eq!(text(kvpages_last_error_kind()), c"test");
    }
}
