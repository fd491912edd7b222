//! Memory of a CUDA device, and host memory pinned for it.

use std::ptr::NonNull;
use std::sync::Arc;

use super::reserved::{Backing, Reserved, piece_bytes};
use super::{Allocation, Memory, MemoryError, Place, Release, addressable};
use crate::cuda::{Context, CudaError, DeviceAddress, DeviceBuffer, PinnedBuffer, Segment};

/// What the driver aligns plain allocations to, at least.
const PLAIN_ALIGNMENT: usize = 256;

/// Memory that the driver allocates as it does for `cudaMalloc`.
#[derive(Debug, Clone)]
pub struct CudaPlain(Arc<Context>);

impl CudaPlain {
    /// Memory of the context's device.
    pub fn new(context: Arc<Context>) -> CudaPlain {
        CudaPlain(context)
    }
}

impl Memory for CudaPlain {
    fn place(&self) -> Place {
        Place::Cuda(Arc::clone(&self.0))
    }

    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let (size, alignment) = (addressable(bytes)?, addressable(alignment)?);
        let buffer = DeviceBuffer::new(&self.0, with_slack(size, alignment, PLAIN_ALIGNMENT)?)?;
        let data = aligned(buffer.address(), alignment)?;
        // SAFETY: the memory was just taken.
        unsafe { self.0.fill_now(&[(address(data), size)], 0) }?;
        Ok(Allocation {
            data,
            bytes: size,
            place: self.place(),
            owner: Arc::new(Kept { _buffer: buffer }),
        })
    }

    fn cannot_grow(&self) -> &'static str {
        "plain CUDA memory cannot grow in place; virtual memory can"
    }
}

/// Memory of the host that a device copies from and to on its own.
#[derive(Debug, Clone)]
pub struct Pinned(Arc<Context>);

/// What pinned memory is aligned to: it comes in pages.
const PINNED_ALIGNMENT: usize = 4096;

impl Pinned {
    /// Host memory, pinned in the context.
    pub fn new(context: Arc<Context>) -> Pinned {
        Pinned(context)
    }
}

impl Memory for Pinned {
    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let (size, alignment) = (addressable(bytes)?, addressable(alignment)?);
        let buffer = PinnedBuffer::new(&self.0, with_slack(size, alignment, PINNED_ALIGNMENT)?)?;
        let data = aligned(buffer.data().as_ptr() as DeviceAddress, alignment)?;
        Ok(Allocation {
            data,
            bytes: size,
            place: Place::Host,
            owner: Arc::new(Kept { _buffer: buffer }),
        })
    }

    fn cannot_grow(&self) -> &'static str {
        "pinned host memory cannot grow in place; plain host memory can"
    }
}

/// Memory of a device behind addresses that were reserved before.
#[derive(Debug, Clone)]
pub struct CudaVirtual {
    context: Arc<Context>,
    segment: Segment,
    granularity: usize,
}

impl CudaVirtual {
    /// Memory of the context's device that is good for what `segment` says.
    pub fn new(context: Arc<Context>, segment: Segment) -> Result<CudaVirtual, CudaError> {
        let entered = context.enter()?;
        let device = entered.device_info()?;
        let lacks = |has: bool, wanted: bool, what| {
            if wanted && !has {
                let ordinal = context.ordinal();
                return Err(CudaError::NotSupported { ordinal, what });
            }
            Ok(())
        };
        lacks(device.has_virtual_memory, true, "virtual memory")?;
        lacks(
            device.has_rdma_virtual_memory,
            segment.rdma,
            "RDMA to virtual memory",
        )?;
        lacks(
            device.has_shareable_memory,
            segment.shareable,
            "memory that is shared as a file descriptor",
        )?;
        let granularity = entered.granularity(segment)?;
        drop(entered);
        Ok(CudaVirtual {
            context,
            segment,
            granularity,
        })
    }

    fn reserved(&self, size: usize, alignment: u64, piece: usize) -> Result<Reserved, MemoryError> {
        let bytes = size as u64;
        let too_large = || MemoryError::TooLarge { bytes };
        let whole = size.max(1).checked_next_multiple_of(piece);
        let whole = whole.ok_or_else(too_large)?;
        let alignment = addressable(alignment)?.max(self.granularity);
        let entered = self.context.enter()?;
        let _beside = entered.beside_captures()?;
        let address = entered.reserve(whole, alignment)?;
        let start = pointer(address)?;
        let backing = Box::new(Self::clone(self));
        // SAFETY: just reserved, in whole pieces.
        Ok(unsafe { Reserved::new(backing, start, whole, piece) })
    }
}

impl Memory for CudaVirtual {
    fn place(&self) -> Place {
        Place::Cuda(Arc::clone(&self.context))
    }

    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let piece = size.max(1).checked_next_multiple_of(self.granularity);
        let piece = piece.ok_or(MemoryError::TooLarge { bytes })?;
        let allocation = self.reserved(size, alignment, piece)?.into_allocation(size);
        if let Some(reserved) = allocation.reserved() {
            reserved.grow(std::slice::from_ref(&(0..piece as u64)))?;
        }
        Ok(allocation)
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let piece = piece_bytes(size, self.granularity);
        let piece = piece.ok_or(MemoryError::TooLarge { bytes })?;
        Ok(self.reserved(size, alignment, piece)?.into_allocation(size))
    }
}

// SAFETY: memory that is committed is zeroed, and stays mapped until it is decommitted.
unsafe impl Backing for CudaVirtual {
    fn place(&self) -> Place {
        Place::Cuda(Arc::clone(&self.context))
    }

    unsafe fn commit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError> {
        let entered = self.context.enter()?;
        let _beside = entered.beside_captures()?;
        // SAFETY: the caller's contract; what is committed is not used before it is zero.
        unsafe {
            entered.commit(address(data), bytes, self.segment)?;
            if let Err(error) = self.context.fill_now(&[(address(data), bytes)], 0) {
                let _ = entered.decommit(address(data), bytes);
                return Err(error.into());
            }
        }
        Ok(())
    }

    unsafe fn decommit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError> {
        let entered = self.context.enter_to_release()?;
        // What is to go goes, beside captures or not.
        let _beside = entered.beside_captures();
        // Unlike cuMemFree, cuMemUnmap does not wait for work that may still use the memory. When
        // waiting fails, that work has failed too.
        let _ = entered.synchronise_all();
        // SAFETY: the caller's contract.
        Ok(unsafe { entered.decommit(address(data), bytes) }?)
    }

    unsafe fn zero(&self, ranges: &[(NonNull<u8>, usize)]) -> Result<(), MemoryError> {
        // SAFETY: the caller's contract.
        Ok(unsafe { Backing::place(self).fill(ranges, 0) }?)
    }

    unsafe fn unreserve(&self, data: NonNull<u8>, bytes: usize) {
        if let Ok(entered) = self.context.enter_to_release() {
            let _beside = entered.beside_captures();
            // SAFETY: the caller's contract.
            let _ = unsafe { entered.unreserve(address(data), bytes) };
        }
    }
}

/// A buffer that gives itself back.
struct Kept<B> {
    _buffer: B,
}

impl<B: Send + Sync> Release for Kept<B> {
    /// Nothing to do: the buffer is dropped with this owner, right after.
    fn release(&self, _data: NonNull<u8>, _bytes: usize) {}
}

/// Bytes to ask for, so that a multiple of `alignment` with `size` bytes behind it is inside.
fn with_slack(size: usize, alignment: usize, given: usize) -> Result<usize, MemoryError> {
    let slack = if alignment > given { alignment } else { 0 };
    size.checked_add(slack)
        .ok_or(MemoryError::TooLarge { bytes: size as u64 })
}

/// The first multiple of `alignment` from an address on.
fn aligned(address: DeviceAddress, alignment: usize) -> Result<NonNull<u8>, MemoryError> {
    let up = address.checked_next_multiple_of(alignment as u64);
    pointer(up.unwrap_or(0))
}

pub(super) fn address(data: NonNull<u8>) -> DeviceAddress {
    data.as_ptr() as DeviceAddress
}

/// A driver that says it succeeded does not return 0.
fn pointer(address: DeviceAddress) -> Result<NonNull<u8>, MemoryError> {
    NonNull::new(address as *mut u8).ok_or(MemoryError::Device(CudaError::DriverFailed {
        call: "an allocation",
        code: 0,
        name: "the address is 0".to_owned(),
    }))
}
