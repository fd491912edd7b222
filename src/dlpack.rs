//! Views as tensors of DLPack, by which tensor libraries hand memory to each other without copying:
//! <https://dmlc.github.io/dlpack/latest/>.
//!
//! The structs are those of its header, dlpack.h 1.x, field by field. A tensor keeps alive whatever
//! its memory belongs to, until its consumer calls its deleter.

#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use crate::dtype::Dtype;
use crate::memory::{Allocation, Place};
use crate::view::View;

/// Which dlpack.h a tensor follows. 1.1 is the first that has numbers for fp8 and fp4.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Another one has other structs.
    pub major: u32,
    /// Another one has other numbers of devices and types.
    pub minor: u32,
}

/// The version of every tensor made here.
pub const VERSION: Version = Version { major: 1, minor: 1 };

/// `flags`: whoever gets the tensor must not write through it.
pub const READ_ONLY: u64 = 1;

/// A kind of device. Numbers of dlpack.h.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceType {
    /// Memory of the host, pinned or not.
    Cpu = 1,
    /// Memory of a CUDA device.
    Cuda = 2,
}

/// Where the elements are.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// What kind of device.
    pub device_type: DeviceType,
    /// Which of that kind; 0 for the host.
    pub device_id: i32,
}

/// The type of one element: `lanes` numbers of `bits` bits each.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    /// What the bits mean. A number of dlpack.h.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers of one element.
    pub lanes: u16,
}

/// A tensor, whoever owns it.
#[repr(C)]
#[derive(Debug)]
pub struct Tensor {
    /// The first element. NULL when there is none.
    pub data: *mut c_void,
    /// Where it is.
    pub device: Device,
    /// Dimensions.
    pub ndim: i32,
    /// Type of one element.
    pub dtype: DataType,
    /// Sizes of the dimensions.
    pub shape: *mut i64,
    /// Elements from one index of a dimension to the next.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element: always 0 here.
    pub byte_offset: u64,
}

/// A tensor that its consumer gives back: `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedVersioned {
    /// What the rest follows.
    pub version: Version,
    /// What stands behind it: the deleter's business.
    pub manager_ctx: *mut c_void,
    /// Called once, from any thread, with the tensor.
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    /// [`READ_ONLY`] or nothing.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: Tensor,
}

/// The same before DLPack 1.0, without flags: `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedUnversioned {
    /// The tensor.
    pub dl_tensor: Tensor,
    /// What stands behind it: the deleter's business.
    pub manager_ctx: *mut c_void,
    /// Called once, from any thread, with the tensor.
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedUnversioned)>,
}

// The places that dlpack.h's fields have on 64-bit machines.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Tensor>() == 48 && size_of::<DataType>() == 4 && size_of::<Device>() == 8);
    assert!(offset_of!(Tensor, device) == 8 && offset_of!(Tensor, ndim) == 16);
    assert!(offset_of!(Tensor, dtype) == 20 && offset_of!(Tensor, shape) == 24);
    assert!(offset_of!(Tensor, strides) == 32 && offset_of!(Tensor, byte_offset) == 40);
    assert!(offset_of!(ManagedVersioned, manager_ctx) == 8);
    assert!(offset_of!(ManagedVersioned, deleter) == 16);
    assert!(offset_of!(ManagedVersioned, flags) == 24);
    assert!(offset_of!(ManagedVersioned, dl_tensor) == 32);
    assert!(size_of::<ManagedVersioned>() == 80);
    assert!(offset_of!(ManagedUnversioned, manager_ctx) == 48);
    assert!(offset_of!(ManagedUnversioned, deleter) == 56);
    assert!(size_of::<ManagedUnversioned>() == 64);
};

/// The host has no memory for the few bytes that describe a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for the description of a tensor of {ndim} dimensions")]
pub struct NoMemory {
    /// Dimensions of the tensor.
    pub ndim: usize,
}

/// A view into `allocation` as a tensor. `keeper` is what the allocation belongs to: the tensor holds
/// it until its deleter is called.
pub fn export(
    view: &View,
    allocation: &Allocation,
    keeper: Arc<dyn Any + Send + Sync>,
    read_only: bool,
) -> Result<*mut ManagedVersioned, NoMemory> {
    give(view, allocation, keeper, |dl_tensor, manager_ctx| {
        ManagedVersioned {
            version: VERSION,
            manager_ctx,
            deleter: Some(delete::<ManagedVersioned>),
            flags: if read_only { READ_ONLY } else { 0 },
            dl_tensor,
        }
    })
}

/// The same for consumers that do not know DLPack 1.0. They may write.
pub fn export_unversioned(
    view: &View,
    allocation: &Allocation,
    keeper: Arc<dyn Any + Send + Sync>,
) -> Result<*mut ManagedUnversioned, NoMemory> {
    give(view, allocation, keeper, |dl_tensor, manager_ctx| {
        ManagedUnversioned {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete::<ManagedUnversioned>),
        }
    })
}

/// How an element type is called in DLPack. A byte of two fp4 numbers is one element of two lanes, as
/// PyTorch has it: so shape and strides are the view's own.
pub const fn data_type(dtype: Dtype) -> DataType {
    let (code, bits, lanes) = match dtype {
        Dtype::I8 => (0, 8, 1),
        Dtype::I16 => (0, 16, 1),
        Dtype::I32 => (0, 32, 1),
        Dtype::I64 => (0, 64, 1),
        Dtype::U8 => (1, 8, 1),
        Dtype::F16 => (2, 16, 1),
        Dtype::F32 => (2, 32, 1),
        Dtype::F64 => (2, 64, 1),
        Dtype::Bf16 => (4, 16, 1),
        Dtype::Bool => (6, 8, 1),
        Dtype::F8E4m3fn => (10, 8, 1),
        Dtype::F8E4m3fnuz => (11, 8, 1),
        Dtype::F8E5m2 => (12, 8, 1),
        Dtype::F8E5m2fnuz => (13, 8, 1),
        Dtype::F4E2m1x2 => (17, 4, 2),
    };
    DataType { code, bits, lanes }
}

/// What a consumer gets, and what the deleter finds behind it.
struct Exported<T> {
    managed: T,
    /// Sizes, then strides: the tensor's own, so that no consumer can change those of the view.
    _extents: Vec<i64>,
    _keeper: Arc<dyn Any + Send + Sync>,
}

fn give<T>(
    view: &View,
    allocation: &Allocation,
    keeper: Arc<dyn Any + Send + Sync>,
    managed: impl FnOnce(Tensor, *mut c_void) -> T,
) -> Result<*mut T, NoMemory> {
    let ndim = view.shape().len();
    let mut extents = Vec::new();
    let reserved = extents.try_reserve_exact(2 * ndim);
    reserved.map_err(|_| NoMemory { ndim })?;
    extents.extend_from_slice(view.shape());
    extents.extend_from_slice(view.strides());
    // SAFETY: the layout has bytes.
    let place = unsafe { alloc::alloc(Layout::new::<Exported<T>>()) }.cast::<Exported<T>>();
    if place.is_null() {
        return Err(NoMemory { ndim });
    }
    let tensor = tensor(view, allocation, &mut extents);
    let exported = Exported {
        managed: managed(tensor, place.cast()),
        _extents: extents,
        _keeper: keeper,
    };
    // SAFETY: fresh memory of that layout.
    unsafe {
        place.write(exported);
        Ok(&raw mut (*place).managed)
    }
}

/// Consumers add `byte_offset` to `data` or forget to, so `data` is the first element itself. That is
/// aligned as the element type is, not to the 256 bytes that dlpack.h once wished for.
fn tensor(view: &View, allocation: &Allocation, extents: &mut [i64]) -> Tensor {
    let ndim = view.shape().len();
    let start = allocation.data().as_ptr();
    let (shape, strides) = extents.split_at_mut(ndim);
    Tensor {
        data: match view.audit.elements {
            0 => ptr::null_mut(),
            // The audit proved that the offset lies inside, so nothing wraps.
            _ => start.wrapping_add(view.offset_bytes as usize).cast(),
        },
        device: device(allocation.place()),
        ndim: ndim as i32,
        dtype: data_type(view.dtype),
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    }
}

fn device(place: &Place) -> Device {
    let (device_type, device_id) = match place {
        Place::Host => (DeviceType::Cpu, 0),
        Place::Cuda(context) => (DeviceType::Cuda, context.ordinal() as i32),
    };
    Device {
        device_type,
        device_id,
    }
}

/// A struct that leads to what stands behind it.
trait Managed {
    fn manager_ctx(&self) -> *mut c_void;
}

impl Managed for ManagedVersioned {
    fn manager_ctx(&self) -> *mut c_void {
        self.manager_ctx
    }
}

impl Managed for ManagedUnversioned {
    fn manager_ctx(&self) -> *mut c_void {
        self.manager_ctx
    }
}

/// The deleter of every tensor. The last one of a cache gives the cache's memory back, here.
///
/// # Safety
/// `managed` is NULL, or a tensor of this module or a copy of one, and was not given before.
unsafe extern "C" fn delete<T: Managed>(managed: *mut T) {
    // SAFETY: the caller's contract.
    let Some(managed) = (unsafe { managed.as_ref() }) else {
        return;
    };
    let place = managed.manager_ctx().cast::<Exported<T>>();
    // SAFETY: `give` made it with the layout that Box frees, and this is the one time it is taken.
    let exported = unsafe { Box::from_raw(place) };
    // Nothing behind it panics; if it did, that must not reach the consumer.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(exported)));
}
