//! Header section: devices.

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::extensible::{self, extensible};
use super::guard::guard;
use super::input;
use super::status::{Failure, kvpages_status};
use crate::cuda::{Context, DeviceInfo, device_count};
use crate::memory::Place;

/// What kind of device memory is on.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_device_kind {
    /// The host reads and writes it; so it does pinned memory.
    Host = 0,
    /// A CUDA device does. To the host its addresses are numbers.
    Cuda = 1,
}

/// Where memory is. All zero is the host. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_device {
    /// One of KVPAGES_DEVICE_KIND_*.
    pub kind: u32,
    /// The CUDA device's number among those that the driver shows. Without effect
    /// when a context is given.
    pub ordinal: u32,
    /// A CUcontext. NULL: the device's primary context, which the CUDA runtime and
    /// PyTorch use too.
    pub context: *mut c_void,
}

/// What a CUDA device is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_device_info {
    /// sizeof(kvpages_device_info) as the caller compiled it.
    pub struct_size: usize,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes that are free now.
    pub free_bytes: u64,
    /// Compute capability, the number before the point.
    pub compute_capability_major: u32,
    /// Compute capability, the number behind the point.
    pub compute_capability_minor: u32,
    /// Multiprocessors.
    pub num_multiprocessors: u32,
    /// 1 when it has virtual memory: KVPAGES_CUDA_MEMORY_VIRTUAL.
    pub has_virtual_memory: u32,
    /// 1 when it has KVPAGES_CUDA_MEMORY_RDMA.
    pub has_rdma: u32,
    /// 1 when it has KVPAGES_CUDA_MEMORY_SHAREABLE.
    pub has_shareable: u32,
    /// Its name. A longer one is cut.
    pub name: [c_char; 256],
}
extensible!(kvpages_device_info, name: [c_char; 256]);

/// CUDA devices that the driver shows. The driver's library is opened when a
/// program first asks for a device; until then the library does not look for it.
///
/// @param[out] out_count  How many there are; 0 on failure. Not NULL.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  There is no driver, or it cannot be
///         used; the kind says which: "driver_missing", "driver_incomplete",
///         "driver_too_old", "no_device" or "driver_failed", and the text why.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_device_count(out_count: *mut u32) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out_count, "out_count") }?;
        *out = device_count()?;
        Ok(())
    })
}

/// What a CUDA device is. Its primary context is retained during the call, which
/// makes one when nobody has it, and takes time and memory then.
///
/// @param ordinal   Its number, less than kvpages_device_count().
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
///         there is no such device.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_device_get_info(
    ordinal: u32,
    out: *mut kvpages_device_info,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { extensible::out(out) }?;
        let device = DeviceInfo::of(ordinal)?;
        let mut name = [0; 256];
        // The last one stays 0.
        for (to, from) in name.iter_mut().take(255).zip(device.name.bytes()) {
            *to = from as c_char;
        }
        let (major, minor) = device.compute_capability;
        out.fill(kvpages_device_info {
            struct_size: 0,
            total_bytes: device.total_bytes,
            free_bytes: device.free_bytes,
            compute_capability_major: major,
            compute_capability_minor: minor,
            num_multiprocessors: device.multiprocessors,
            has_virtual_memory: device.has_virtual_memory.into(),
            has_rdma: device.has_rdma_virtual_memory.into(),
            has_shareable: device.has_shareable_memory.into(),
            name,
        });
        Ok(())
    })
}

impl kvpages_device {
    pub(super) fn of(place: &Place) -> kvpages_device {
        match place {
            Place::Host => kvpages_device {
                kind: kvpages_device_kind::Host as u32,
                ordinal: 0,
                context: ptr::null_mut(),
            },
            Place::Cuda(context) => kvpages_device {
                kind: kvpages_device_kind::Cuda as u32,
                ordinal: context.ordinal(),
                context: context.handle(),
            },
        }
    }

    /// # Safety
    /// The context, if there is one, lives until the result and all copies of it are gone.
    pub(super) unsafe fn place(&self, name: &str) -> Result<Place, Failure> {
        const HOST: u32 = kvpages_device_kind::Host as u32;
        const CUDA: u32 = kvpages_device_kind::Cuda as u32;
        match self.kind {
            HOST if self.ordinal == 0 && self.context.is_null() => Ok(Place::Host),
            HOST => Err(Failure::invalid(
                "bad_values",
                format!("{name} is the host, which has no ordinal and no context"),
            )),
            // SAFETY: the caller's contract.
            CUDA => Ok(Place::Cuda(unsafe { context(self.context, self.ordinal) }?)),
            kind => Err(Failure::invalid(
                "unknown_value",
                format!("{name}.kind is {kind}; this library knows {HOST} and {CUDA}"),
            )),
        }
    }
}

/// A context that a caller means: its own one, or the primary one of a device.
///
/// # Safety
/// A context that is not NULL lives until the result and all copies of it are gone.
pub(super) unsafe fn context(own: *mut c_void, ordinal: u32) -> Result<Arc<Context>, Failure> {
    Ok(match NonNull::new(own) {
        // SAFETY: the caller's contract.
        Some(own) => unsafe { Context::borrow(own) }?,
        None => Context::primary(ordinal)?,
    })
}
