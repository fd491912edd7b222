//! Where bytes come from: the host, a CUDA device, or whatever an engine brings.
//!
//! Fresh memory is zero. An allocation gives its memory back when it is dropped.

#![allow(unsafe_code)]

mod adopted;
mod cuda;
mod external;
mod host;
mod reserved;
#[cfg(test)]
pub mod testing;

pub use adopted::Adopted;
pub use cuda::{CudaPlain, CudaVirtual, Pinned};
pub use external::{AllocateFn, Callbacks, External, ReleaseFn};
pub use host::Host;
pub use reserved::{Reserved, Taken};

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::cuda::{Context, CudaError};

/// What every allocation is aligned to at least, in bytes.
pub const MIN_ALIGNMENT: u64 = 256;

/// Where bytes are.
#[derive(Debug, Clone, Default)]
pub enum Place {
    /// The host reads and writes them.
    #[default]
    Host,
    /// A device does; to the host their addresses are numbers.
    Cuda(Arc<Context>),
}

impl Place {
    /// Sets the bytes of ranges to `value`, and returns when it is done.
    ///
    /// # Safety
    /// They are memory of this place, and nothing else uses them.
    unsafe fn fill(&self, ranges: &[(NonNull<u8>, usize)], value: u8) -> Result<(), CudaError> {
        match self {
            Place::Host => {
                for &(data, bytes) in ranges {
                    // SAFETY: the caller's contract.
                    unsafe { ptr::write_bytes(data.as_ptr(), value, bytes) };
                }
                Ok(())
            }
            Place::Cuda(context) => {
                let addresses = ranges.iter();
                let addresses: Vec<_> = addresses
                    .map(|&(data, bytes)| (cuda::address(data), bytes))
                    .collect();
                // SAFETY: the caller's contract.
                unsafe { context.fill_now(&addresses, value) }
            }
        }
    }
}

/// A source of memory.
pub trait Memory: Send + Sync {
    /// Where its bytes are.
    fn place(&self) -> Place {
        Place::Host
    }

    /// Reserves addresses for `bytes` at a multiple of `alignment`, as for
    /// [`allocate`](Self::allocate). Memory comes with [`Reserved::grow`], which the allocation
    /// leads to.
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let _ = (bytes, alignment);
        Err(MemoryError::CannotGrow {
            why: self.cannot_grow(),
        })
    }

    /// Why addresses cannot be reserved.
    fn cannot_grow(&self) -> &'static str {
        "this kind of memory cannot grow in place"
    }

    /// Takes `bytes` of zeroed memory at a multiple of `alignment`, a power of two that is at least
    /// [`MIN_ALIGNMENT`].
    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError>;
}

/// Why memory was not given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The host has not enough.
    #[error("the host refused {bytes} bytes: {reason}")]
    Host {
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
    /// The engine's allocator has not enough.
    #[error("the engine's allocator refused {bytes} bytes with code {code}")]
    Callback {
        /// Bytes asked for.
        bytes: u64,
        /// What it returned.
        code: i32,
    },
    /// The engine's allocator returned something unusable.
    #[error(
        "the engine's allocator returned {address:#x} for {bytes} bytes, which is not a multiple of {alignment}"
    )]
    CallbackMisaligned {
        /// Bytes asked for.
        bytes: u64,
        /// What it returned.
        address: usize,
        /// What the address must be a multiple of.
        alignment: u64,
    },
    /// The adopted buffer is used up.
    #[error(
        "the adopted buffer has {free} of {total} bytes left; {bytes} more at a multiple of {alignment} do not fit"
    )]
    AdoptedFull {
        /// Bytes asked for.
        bytes: u64,
        /// What the address must be a multiple of.
        alignment: u64,
        /// Bytes left.
        free: u64,
        /// Bytes of the buffer.
        total: u64,
    },
    /// A device has not enough, or failed.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// Memory that is all there from the beginning.
    #[error("{why}")]
    CannotGrow {
        /// Which kind it is, and which one can.
        why: &'static str,
    },
    /// More bytes than this machine can address.
    #[error("{bytes} bytes are more than this machine can address")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
}

/// Gives memory back.
trait Release: Send + Sync {
    fn release(&self, data: NonNull<u8>, bytes: usize);

    /// What puts memory behind the allocation, if that is done later.
    fn reserved(&self) -> Option<&Reserved> {
        None
    }
}

/// Memory that is given back when it is dropped.
pub struct Allocation {
    data: NonNull<u8>,
    bytes: usize,
    place: Place,
    owner: Arc<dyn Release>,
}

// SAFETY: an allocation is an address and a length; what is done with the bytes is up to whoever
// holds the pointer, and `Release` is called from any thread by its own contract.
unsafe impl Send for Allocation {}
// SAFETY: as above; a shared reference only gives out the address.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// The first byte.
    pub fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// The bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Where they are.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Bytes of memory behind them.
    pub fn held_bytes(&self) -> u64 {
        match self.reserved() {
            Some(reserved) => reserved.held_bytes(),
            None => self.bytes(),
        }
    }

    /// Sets the bytes of ranges that are not in use, and behind which memory lies, to `value`.
    pub fn fill(&self, ranges: &[Range<u64>], value: u8) -> Result<(), MemoryError> {
        let places = ranges.iter().map(|range| {
            let start = range.start.min(self.bytes());
            let bytes = range.end.min(self.bytes()).saturating_sub(start);
            // Never NULL: it lies inside. Device addresses are not the host's to add to.
            let data = self.data.as_ptr().wrapping_add(start as usize);
            (NonNull::new(data).unwrap_or(self.data), bytes as usize)
        });
        let places: Vec<_> = places.collect();
        // SAFETY: they lie inside, and the caller says that nobody uses them.
        Ok(unsafe { self.place.fill(&places, value) }?)
    }

    /// What puts memory behind them, when they were only reserved.
    pub fn reserved(&self) -> Option<&Reserved> {
        self.owner.reserved()
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({:?}, {} bytes)", self.data, self.bytes)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.owner.release(self.data, self.bytes);
    }
}

fn addressable(bytes: u64) -> Result<usize, MemoryError> {
    isize::try_from(bytes)
        .map(isize::unsigned_abs)
        .map_err(|_| MemoryError::TooLarge { bytes })
}
