//! Device memory, pinned host memory, virtual memory, fills and copies.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use super::DeviceAddress;
use super::context::{Context, Entered};
use super::driver::call;
use super::error::CudaError;
use super::stream::{Stream, StreamRef};
use crate::log::{self, Level};

/// What virtual memory must be good for. It cannot be added later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segment {
    /// Network cards may read and write it.
    pub rdma: bool,
    /// It can be exported to other processes as a file descriptor.
    pub shareable: bool,
}

impl Entered<'_> {
    /// Takes device memory; its bytes are anything.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        let mut address = 0;
        let taken = call!(self.driver(), cuMemAlloc_v2(&mut address, bytes));
        self.explain(taken, bytes)?;
        Ok(address)
    }

    /// Gives back what [`allocate`](Self::allocate) took. Waits for all work of the context.
    ///
    /// # Safety
    /// The memory is not used any more.
    pub unsafe fn free(&self, address: DeviceAddress) -> Result<(), CudaError> {
        call!(self.driver(), cuMemFree_v2(address))
    }

    /// Takes pinned host memory, which the device copies from and to without the host's help.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        let mut data: *mut c_void = ptr::null_mut();
        match call!(self.driver(), cuMemHostAlloc(&mut data, bytes, 0)) {
            Err(error) if error.is_out_of_memory() => Err(CudaError::OutOfPinnedMemory {
                needed: bytes as u64,
            }),
            other => other.and_then(|()| {
                NonNull::new(data.cast()).ok_or(CudaError::OutOfPinnedMemory {
                    needed: bytes as u64,
                })
            }),
        }
    }

    /// Gives back what [`allocate_pinned`](Self::allocate_pinned) took.
    ///
    /// # Safety
    /// The memory is not used any more.
    pub unsafe fn free_pinned(&self, data: NonNull<u8>) -> Result<(), CudaError> {
        call!(self.driver(), cuMemFreeHost(data.as_ptr().cast()))
    }

    /// What sizes and addresses of virtual memory must be multiples of, in bytes.
    pub fn granularity(&self, segment: Segment) -> Result<usize, CudaError> {
        let properties = self.properties(segment);
        let how = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        call!(
            self.driver(),
            cuMemGetAllocationGranularity(&mut bytes, &properties, how as u32)
        )?;
        Ok(bytes.max(1))
    }

    /// Reserves addresses; nothing lies behind them.
    pub fn reserve(&self, bytes: usize, alignment: usize) -> Result<DeviceAddress, CudaError> {
        let mut address = 0;
        call!(
            self.driver(),
            cuMemAddressReserve(&mut address, bytes, alignment, 0, 0)
        )?;
        Ok(address)
    }

    /// Gives addresses back that [`reserve`](Self::reserve) took.
    ///
    /// # Safety
    /// They are all of one reservation, and nothing is mapped there.
    pub unsafe fn unreserve(&self, address: DeviceAddress, bytes: usize) -> Result<(), CudaError> {
        call!(self.driver(), cuMemAddressFree(address, bytes))
    }

    /// Puts fresh memory behind reserved addresses; its bytes are anything. When any of it fails,
    /// nothing lies there, as before. Addresses and bytes are multiples of the granularity.
    ///
    /// # Safety
    /// The addresses are reserved, and nothing is mapped there.
    pub unsafe fn commit(
        &self,
        address: DeviceAddress,
        bytes: usize,
        segment: Segment,
    ) -> Result<(), CudaError> {
        let properties = self.properties(segment);
        let mut handle: CUmemGenericAllocationHandle = 0;
        let made = call!(
            self.driver(),
            cuMemCreate(&mut handle, bytes, &properties, 0)
        );
        self.explain(made, bytes)?;
        let mapped = call!(self.driver(), cuMemMap(address, bytes, 0, handle, 0));
        // The mapping keeps the memory; without one it goes back now.
        let released = call!(self.driver(), cuMemRelease(handle));
        self.explain(mapped, bytes)?;
        let access = CUmemAccessDesc {
            location: properties.location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let opened = released
            .and_then(|()| call!(self.driver(), cuMemSetAccess(address, bytes, &access, 1)));
        if opened.is_err() {
            let _ = call!(self.driver(), cuMemUnmap(address, bytes));
        }
        self.explain(opened, bytes)
    }

    /// Takes away what [`commit`](Self::commit) put behind addresses: all of one call.
    ///
    /// # Safety
    /// The memory is not used any more, and no work on the device uses it.
    pub unsafe fn decommit(&self, address: DeviceAddress, bytes: usize) -> Result<(), CudaError> {
        call!(self.driver(), cuMemUnmap(address, bytes))
    }

    fn properties(&self, segment: Segment) -> CUmemAllocationProp {
        let handles = if segment.shareable {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        };
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: handles,
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device(),
            },
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: segment.rdma.into(),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// Turns the driver's "out of memory" into an error with numbers.
    fn explain(&self, result: Result<(), CudaError>, bytes: usize) -> Result<(), CudaError> {
        result.map_err(|error| {
            if !error.is_out_of_memory() {
                return error;
            }
            let Ok((free, total)) = self.memory_info() else {
                return error;
            };
            CudaError::OutOfMemory {
                ordinal: self.context().ordinal(),
                needed: bytes as u64,
                free,
                total,
            }
        })
    }

    /// Puts on the stream: sets `bytes` bytes to `value`.
    ///
    /// # Safety
    /// The range is device memory of this context, valid until the stream has done it.
    pub unsafe fn fill(
        &self,
        address: DeviceAddress,
        value: u8,
        bytes: usize,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        call!(
            self.driver(),
            cuMemsetD8Async(address, value, bytes, stream.0)
        )
    }

    /// Puts on the stream: copies from the host. From memory that is not pinned the driver may copy
    /// at once, and may not during a capture.
    ///
    /// # Safety
    /// Both ranges are valid until the stream has done it, the target of this context.
    pub unsafe fn copy_in(
        &self,
        to: DeviceAddress,
        from: *const u8,
        bytes: usize,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        call!(
            self.driver(),
            cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.0)
        )
    }

    /// Puts on the stream: copies to the host.
    ///
    /// # Safety
    /// Both ranges are valid until the stream has done it, the source of this context.
    pub unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: DeviceAddress,
        bytes: usize,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        call!(
            self.driver(),
            cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.0)
        )
    }

    /// Puts on the stream: copies on the device, between ranges that do not overlap.
    ///
    /// # Safety
    /// Both ranges are device memory of this context, valid until the stream has done it.
    pub unsafe fn copy_within(
        &self,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: usize,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        call!(
            self.driver(),
            cuMemcpyDtoDAsync_v2(to, from, bytes, stream.0)
        )
    }
}

impl Context {
    /// Sets the bytes of ranges of device memory, each an address and its bytes, to `value`, and waits
    /// until it is done. Other streams neither wait nor are waited for.
    ///
    /// # Safety
    /// They are device memory of this context, and nothing else uses them.
    pub unsafe fn fill_now(
        self: &Arc<Context>,
        ranges: &[(DeviceAddress, usize)],
        value: u8,
    ) -> Result<(), CudaError> {
        if ranges.iter().all(|&(_, bytes)| bytes == 0) {
            return Ok(());
        }
        let entered = self.enter()?;
        let _beside = entered.beside_captures()?;
        let stream = Stream::new(self)?;
        let filled = ranges.iter().try_for_each(|&(address, bytes)| {
            // SAFETY: the caller's contract; this waits until it is done.
            unsafe { entered.fill(address, value, bytes, stream.get()) }
        });
        // Also after a failure: what was put on before it would write to memory that the caller
        // gives back, or to blocks that hold something by then.
        let waited = entered.synchronise(stream.get());
        if waited.is_err() {
            let _ = entered.synchronise_all();
        }
        filled.and(waited)
    }
}

/// Device memory that goes back when it is dropped. Its bytes are anything at first.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: DeviceAddress,
    bytes: usize,
}

impl DeviceBuffer {
    /// Takes memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        let entered = context.enter()?;
        let _beside = entered.beside_captures()?;
        // The driver refuses 0 bytes.
        let address = entered.allocate(bytes.max(1))?;
        Ok(DeviceBuffer {
            context: Arc::clone(context),
            address,
            bytes,
        })
    }

    /// Its first byte.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    /// The driver waits for work that uses the memory.
    fn drop(&mut self) {
        let freed = self.context.enter_to_release().and_then(|entered| {
            let _beside = entered.beside_captures();
            // SAFETY: whoever owned the buffer does not use its memory any more.
            unsafe { entered.free(self.address) }
        });
        tell_if_failed(freed, self.bytes);
    }
}

/// Pinned host memory that goes back when it is dropped. Its bytes are zero at first.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Arc<Context>,
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length, as good as a boxed slice.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; a shared reference only gives out the address.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Takes memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let entered = context.enter()?;
        let _beside = entered.beside_captures()?;
        let data = entered.allocate_pinned(bytes.max(1))?;
        // SAFETY: that many bytes were just taken.
        unsafe { ptr::write_bytes(data.as_ptr(), 0, bytes.max(1)) };
        Ok(PinnedBuffer {
            context: Arc::clone(context),
            data,
            bytes,
        })
    }

    /// Its first byte.
    pub fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let freed = self.context.enter_to_release().and_then(|entered| {
            let _beside = entered.beside_captures();
            // SAFETY: whoever owned the buffer does not use its memory any more.
            unsafe { entered.free_pinned(self.data) }
        });
        tell_if_failed(freed, self.bytes);
    }
}

/// Logs a failure to give memory back: nobody else hears of it. Called outside the context, which is
/// none of the callback's.
fn tell_if_failed(freed: Result<(), CudaError>, bytes: usize) {
    if let Err(error) = freed {
        log::say(Level::Warn, || {
            format!("the driver failed when {bytes} bytes of memory were given back: {error}")
        });
    }
}
