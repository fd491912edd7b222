//! Header section: memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::memory::{Adopted, AllocateFn, Callbacks, External, Host, Memory, Place, ReleaseFn};

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
/// @param[out] out_data    The memory: the host can read and write it.
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
/// destroy caches, so by several at once when several do. They must not throw, and
/// must not call kvpages with the same memory or cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_memory_callbacks {
    /// sizeof(kvpages_memory_callbacks) as the caller compiled it.
    pub struct_size: usize,
    /// Handed to both functions. Kept until the memory and all caches in it are
    /// destroyed.
    pub user: *mut c_void,
    /// Takes memory. Not NULL.
    pub allocate: kvpages_allocate_fn,
    /// Gives memory back. Not NULL.
    pub release: kvpages_release_fn,
    /// 1 when allocate returns memory that is zero; with 0 the library zeroes it.
    pub is_zeroed: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_memory_callbacks, reserved0: u32);

/// Memory of the host. The system zeroes each page of it when it is first
/// touched, so a large cache costs nothing until it is used. Large allocations
/// ask for huge pages.
///
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
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
        // SAFETY: what the header demands of the callbacks is what `External::new` demands.
        let memory = unsafe {
            External::new(Callbacks {
                allocate,
                release,
                user: given.user,
                is_zeroed: given.is_zeroed == 1,
                place: Place::Host,
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
/// @param data      Kept until the memory and all caches in it are destroyed; the
///                  host can read and write it, and nothing else uses it. Not NULL.
/// @param bytes     Its bytes.
/// @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
///                  failure.
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
        let data = NonNull::new(data.cast::<u8>()).ok_or_else(|| Failure::null("data"))?;
        let ends_inside = (data.as_ptr() as usize).checked_add(bytes).is_some();
        if !ends_inside || isize::try_from(bytes).is_err() {
            return Err(Failure::invalid(
                "overflow",
                format!("a buffer of {bytes} bytes at {data:p} leaves the address space"),
            ));
        }
        // SAFETY: what the header demands of the buffer is what `Adopted::new` demands.
        *out = give(unsafe { Adopted::new(data, bytes, Place::Host) });
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

fn give(memory: impl Memory + 'static) -> *mut kvpages_memory {
    handle::give(Arc::new(memory) as Arc<dyn Memory>)
}
