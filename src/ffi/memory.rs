//! Header section: memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{context, kvpages_device};
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::cuda::Segment;
use crate::memory::{
    Adopted, AllocateFn, Callbacks, CudaPlain, CudaVirtual, External, Host, Memory, Pinned, Place,
    ReleaseFn,
};

/// Where a cache's bytes come from. Immutable: all calls on it may run
/// concurrently.
pub struct kvpages_memory(Handle<Arc<dyn Memory>>);
opaque!(kvpages_memory, Arc<dyn Memory>, "memory");

/// Takes memory for a cache.
///
/// @param user             As in kvpages_memory_callbacks.
/// @param bytes            Bytes wanted; may be 0.
/// @param alignment_bytes  What the address must be a multiple of: a power of two,
///                         at least 256.
/// @param[out] out_data    The memory, on the device that the callbacks state.
/// @return 0 when out_data was set to something else than NULL. Anything else is
///         a refusal: the cache is not made.
pub type kvpages_allocate_fn = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        bytes: usize,
        alignment_bytes: usize,
        out_data: *mut *mut c_void,
    ) -> i32,
>;

/// Gives memory back.
///
/// @param user   As in kvpages_memory_callbacks.
/// @param data   What the allocation set.
/// @param bytes  Bytes that were wanted.
pub type kvpages_release_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, data: *mut c_void, bytes: usize)>;

/// An engine's allocator. The functions are called on the threads that create and
/// destroy caches and what was made from them (kvpages_ops, tensors of DLPack), so
/// by several at once when several do. They must not throw, and must not call
/// kvpages with the same memory or cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_memory_callbacks {
    /// sizeof(kvpages_memory_callbacks) as the caller compiled it.
    pub struct_size: usize,
    /// Handed to both functions. Kept until the memory, all caches in it and what was
    /// made from them are destroyed.
    pub user: *mut c_void,
    /// Takes memory. Not NULL.
    pub allocate: kvpages_allocate_fn,
    /// Gives memory back. Not NULL.
    pub release: kvpages_release_fn,
    /// 1 when allocate returns memory that is zero; with 0 the library zeroes it.
    pub is_zeroed: u32,
    /// Zero.
    pub reserved0: u32,
    /// Where the memory is; all zero for the host. The library zeroes memory of a
    /// device on the device. A context is Kept until the memory and all that is made
    /// from it are destroyed.
    pub device: kvpages_device,
}
extensible!(kvpages_memory_callbacks, device: kvpages_device);

/// Flag of kvpages_cuda_memory_config: addresses are reserved first, and memory is
/// put behind them. Only such memory can grow: kvpages_cache_resize().
pub const KVPAGES_CUDA_MEMORY_VIRTUAL: u32 = 1;
/// Flag of kvpages_cuda_memory_config, with KVPAGES_CUDA_MEMORY_VIRTUAL: network
/// cards can be given the memory (GPUDirect RDMA). Plain memory needs no flag.
pub const KVPAGES_CUDA_MEMORY_RDMA: u32 = 2;
/// Flag of kvpages_cuda_memory_config, with KVPAGES_CUDA_MEMORY_VIRTUAL: the memory
/// can be exported to other processes as a file descriptor. Plain memory needs no
/// flag, and is shared in another way (cuIpcGetMemHandle).
pub const KVPAGES_CUDA_MEMORY_SHAREABLE: u32 = 4;

/// Memory of a CUDA device, or host memory pinned for it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_cuda_memory_config {
    /// sizeof(kvpages_cuda_memory_config) as the caller compiled it.
    pub struct_size: usize,
    /// A CUcontext, Kept until the memory and all that is made from it are destroyed.
    /// NULL: the primary context of the device, which is retained.
    pub context: *mut c_void,
    /// The device's number, less than kvpages_device_count(). Without effect when a
    /// context is given.
    pub ordinal: u32,
    /// KVPAGES_CUDA_MEMORY_* flags.
    pub flags: u32,
}
extensible!(kvpages_cuda_memory_config, flags: u32);

/// Memory of the host. The system zeroes each page of it when it is first
/// touched, so a large cache costs nothing until it is used. Large allocations
/// ask for huge pages.
///
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
/// @return Fails only for NULL: memory is asked for when a cache is made.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_host(
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::out(out, "out") }?;
        *out = give(Host);
        Ok(())
    })
}

/// Memory from an engine's own allocator.
///
/// @param callbacks  Copied. Not NULL.
/// @param[out] out   Owned by the caller: kvpages_memory_destroy(). NULL on
///                   failure.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The callbacks state a device; as
///         kvpages_device_count().
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_external(
    callbacks: *const kvpages_memory_callbacks,
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let given = unsafe { extensible::read(callbacks) }?;
        input::known_bits(given.reserved0, 0, "kvpages_memory_callbacks.reserved0")?;
        input::known_bits(given.is_zeroed, 1, "kvpages_memory_callbacks.is_zeroed")?;
        let allocate: AllocateFn = given.allocate.ok_or_else(|| Failure::null("allocate"))?;
        let release: ReleaseFn = given.release.ok_or_else(|| Failure::null("release"))?;
        // SAFETY: the caller's contract.
        let place = unsafe { given.device.place("kvpages_memory_callbacks.device") }?;
        // SAFETY: what the header demands of the callbacks is what `External::new` demands.
        let memory = unsafe {
            External::new(Callbacks {
                allocate,
                release,
                user: given.user,
                is_zeroed: given.is_zeroed == 1,
                place,
            })
        };
        *out = give(memory);
        Ok(())
    })
}

/// A buffer of the engine's, handed out piece by piece, each behind the last one
/// that is in use. The library zeroes what it takes. Creating and destroying caches
/// in it takes a lock.
///
/// @param data      Kept until the memory, all caches in it and what was made from
///                  them are destroyed; the host can read and write it, and nothing
///                  else uses it. Not NULL.
/// @param bytes     Its bytes.
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The buffer leaves the address space.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_adopted(
    data: *mut c_void,
    bytes: usize,
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        let data = buffer(data, bytes)?;
        // SAFETY: what the header demands of the buffer is what `Adopted::new` demands.
        *out = give(unsafe { Adopted::new(data, bytes, Place::Host) });
        Ok(())
    })
}

/// As kvpages_memory_create_adopted(), for a buffer in a device's memory: the
/// library zeroes what it takes on the device, and does not touch it from the host.
///
/// @param device    Where the buffer is. Copied; its context is Kept as the buffer
///                  is. Not NULL.
/// @param data      A device pointer. Kept until the memory, all caches in it and
///                  what was made from them are destroyed; nothing else uses the
///                  buffer. Not NULL.
/// @param bytes     Its bytes.
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count().
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_adopted_device(
    device: *const kvpages_device,
    data: *mut c_void,
    bytes: usize,
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let device = unsafe { input::one(device, "device") }?;
        let data = buffer(data, bytes)?;
        // SAFETY: the caller's contract.
        let place = unsafe { device.place("device") }?;
        // SAFETY: what the header demands of the buffer is what `Adopted::new` demands.
        *out = give(unsafe { Adopted::new(data, bytes, place) });
        Ok(())
    })
}

/// Memory of a CUDA device. Fresh memory is zeroed on a stream of its own, and the
/// call that takes it waits for that; no other stream is waited for.
///
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
///         there is no device of that number.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is unknown, or goes with
///         KVPAGES_CUDA_MEMORY_VIRTUAL and is given without it.
/// @retval KVPAGES_STATUS_UNSUPPORTED  The device lacks what a flag asks for.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_cuda(
    config: *const kvpages_cuda_memory_config,
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let given = unsafe { extensible::read(config) }?;
        let known =
            KVPAGES_CUDA_MEMORY_VIRTUAL | KVPAGES_CUDA_MEMORY_RDMA | KVPAGES_CUDA_MEMORY_SHAREABLE;
        let flags = input::known_bits(given.flags, known, "kvpages_cuda_memory_config.flags")?;
        let is_virtual = flags & KVPAGES_CUDA_MEMORY_VIRTUAL != 0;
        if flags != 0 && !is_virtual {
            return Err(Failure::invalid(
                "bad_values",
                format!(
                    "kvpages_cuda_memory_config.flags is {flags:#x}: the other flags go with KVPAGES_CUDA_MEMORY_VIRTUAL"
                ),
            ));
        }
        // SAFETY: the caller's contract.
        let context = unsafe { context(given.context, given.ordinal) }?;
        *out = if is_virtual {
            let segment = Segment {
                rdma: flags & KVPAGES_CUDA_MEMORY_RDMA != 0,
                shareable: flags & KVPAGES_CUDA_MEMORY_SHAREABLE != 0,
            };
            give(CudaVirtual::new(context, segment)?)
        } else {
            give(CudaPlain::new(context))
        };
        Ok(())
    })
}

/// Memory of the host that a CUDA device copies from and to on its own. The host
/// reads and writes it like any other. A cache in it cannot be resized.
///
/// @param config    Borrowed; no flags. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
///         there is no device of that number.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is set.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_create_pinned(
    config: *const kvpages_cuda_memory_config,
    out: *mut *mut kvpages_memory,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let given = unsafe { extensible::read(config) }?;
        input::known_bits(given.flags, 0, "kvpages_cuda_memory_config.flags")?;
        // SAFETY: the caller's contract.
        *out = give(Pinned::new(unsafe {
            context(given.context, given.ordinal)
        }?));
        Ok(())
    })
}

/// Destroys a memory. NULL is a no-op. Caches in it live on.
///
/// @param memory  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_memory_destroy(memory: *mut kvpages_memory) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(memory) }
}

/// The start of a buffer that lies in the address space.
fn buffer(data: *mut c_void, bytes: usize) -> Result<NonNull<u8>, Failure> {
    let data = NonNull::new(data.cast::<u8>()).ok_or_else(|| Failure::null("data"))?;
    let ends_inside = (data.as_ptr() as usize).checked_add(bytes).is_some();
    if !ends_inside || isize::try_from(bytes).is_err() {
        return Err(Failure::invalid(
            "overflow",
            format!("a buffer of {bytes} bytes at {data:p} leaves the address space"),
        ));
    }
    Ok(data)
}

fn give(memory: impl Memory + 'static) -> *mut kvpages_memory {
    handle::give(Arc::new(memory) as Arc<dyn Memory>)
}
