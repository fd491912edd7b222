//! Memory from an engine's own allocator.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{Allocation, Memory, MemoryError, Place, Release, addressable};

/// Takes memory: `(user, bytes, alignment, out)`; 0 when `*out` was set.
pub type AllocateFn = unsafe extern "C" fn(*mut c_void, usize, usize, *mut *mut c_void) -> i32;
/// Gives memory back: `(user, data, bytes)`.
pub type ReleaseFn = unsafe extern "C" fn(*mut c_void, *mut c_void, usize);

/// An engine's allocator.
#[derive(Debug, Clone)]
pub struct Callbacks {
    /// Takes memory.
    pub allocate: AllocateFn,
    /// Gives it back.
    pub release: ReleaseFn,
    /// Handed to both.
    pub user: *mut c_void,
    /// Whether the memory is zero already.
    pub is_zeroed: bool,
    /// Where the memory is.
    pub place: Place,
}

// SAFETY: whoever makes an `External` promises that the callbacks may be called from any thread.
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

/// Memory from an engine's own allocator.
#[derive(Debug, Clone)]
pub struct External(Arc<Callbacks>);

impl External {
    /// Memory from `callbacks`.
    ///
    /// # Safety
    /// The functions may be called with `user` from any thread, as long as an `External` or an
    /// allocation from it lives. Memory they return is of the place stated, valid for reads and
    /// writes of the bytes asked for until it is released, and nothing else uses it. They do not
    /// unwind.
    pub unsafe fn new(callbacks: Callbacks) -> External {
        External(Arc::new(callbacks))
    }
}

impl Memory for External {
    fn place(&self) -> Place {
        self.0.place.clone()
    }

    fn cannot_grow(&self) -> &'static str {
        "memory of the engine's allocator cannot grow in place; host memory and CUDA virtual memory can"
    }

    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let callbacks = &self.0;
        let mut data = ptr::null_mut();
        // SAFETY: the contract of `new`.
        let code = unsafe {
            (callbacks.allocate)(callbacks.user, size, addressable(alignment)?, &mut data)
        };
        let data = match NonNull::new(data.cast::<u8>()) {
            Some(data) if code == 0 => data,
            _ => return Err(MemoryError::Callback { bytes, code }),
        };
        let allocation = Allocation {
            data,
            bytes: size,
            place: callbacks.place.clone(),
            owner: Arc::clone(&self.0) as Arc<dyn Release>,
        };
        let address = data.as_ptr() as usize;
        if !(address as u64).is_multiple_of(alignment) {
            return Err(MemoryError::CallbackMisaligned {
                bytes,
                address,
                alignment,
            });
        }
        if !callbacks.is_zeroed {
            // SAFETY: the contract of `new`: that many bytes, writable, used by nobody else.
            unsafe { callbacks.place.fill(&[(data, size)], 0) }?;
        }
        Ok(allocation)
    }
}

impl Release for Callbacks {
    fn release(&self, data: NonNull<u8>, bytes: usize) {
        // SAFETY: the contract of `External::new`; called once for what `allocate` returned.
        unsafe { (self.release)(self.user, data.as_ptr().cast(), bytes) };
    }
}
