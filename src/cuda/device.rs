//! Devices and what they can do.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute};

use super::context::{Context, Entered};
use super::driver::{Driver, call};
use super::error::CudaError;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes that are free now.
    pub free_bytes: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Whether it has virtual memory, which caches that grow need.
    pub has_virtual_memory: bool,
    /// Whether virtual memory can be made for RDMA.
    pub has_rdma_virtual_memory: bool,
    /// Whether virtual memory can be shared as a file descriptor.
    pub has_shareable_memory: bool,
}

/// Devices that the driver sees.
pub fn device_count() -> Result<u32, CudaError> {
    count(Driver::get()?)
}

impl DeviceInfo {
    /// What device `ordinal` is. Its primary context is retained while this asks.
    pub fn of(ordinal: u32) -> Result<DeviceInfo, CudaError> {
        Context::primary(ordinal)?.enter()?.device_info()
    }
}

impl Entered<'_> {
    /// What the context's device is.
    pub fn device_info(&self) -> Result<DeviceInfo, CudaError> {
        use CUdevice_attribute as A;
        let number = |attribute| {
            let value = self.attribute(attribute)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let (free_bytes, total_bytes) = self.memory_info()?;
        let has_virtual_memory =
            self.has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        Ok(DeviceInfo {
            name: self.device_name()?,
            total_bytes,
            free_bytes,
            compute_capability: (
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            has_virtual_memory,
            has_rdma_virtual_memory: has_virtual_memory
                && self.has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            has_shareable_memory: has_virtual_memory
                && self.has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        })
    }

    /// Free bytes and all bytes of the device's memory.
    pub fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        call!(self.driver(), cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free as u64, total as u64))
    }

    fn has(&self, attribute: CUdevice_attribute) -> Result<bool, CudaError> {
        Ok(self.attribute(attribute)? != 0)
    }

    /// An attribute that an older driver does not know is 0.
    fn attribute(&self, attribute: CUdevice_attribute) -> Result<c_int, CudaError> {
        const INVALID_VALUE: u32 = 1;
        let mut value = 0;
        let asked = call!(
            self.driver(),
            cuDeviceGetAttribute(&mut value, attribute as u32, self.device())
        );
        match asked {
            Err(CudaError::DriverFailed { code, .. }) if code == INVALID_VALUE => Ok(0),
            other => other.map(|()| value),
        }
    }

    fn device_name(&self) -> Result<String, CudaError> {
        let mut name: [c_char; 256] = [0; 256];
        let room = name.len() as c_int - 1; // the last one stays 0
        call!(
            self.driver(),
            cuDeviceGetName(name.as_mut_ptr(), room, self.device())
        )?;
        // SAFETY: the array ends in a 0 at the latest.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Ok(name.to_string_lossy().into_owned())
    }
}

fn count(driver: &Driver) -> Result<u32, CudaError> {
    let mut count = 0;
    call!(driver, cuDeviceGetCount(&mut count))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Device `ordinal` as the driver knows it.
pub(super) fn device(driver: &Driver, ordinal: u32) -> Result<CUdevice, CudaError> {
    let count = count(driver)?;
    if count == 0 {
        return Err(CudaError::NoDevice);
    }
    let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let number = number.ok_or(CudaError::NoSuchDevice { ordinal, count })?;
    let mut device = 0;
    call!(driver, cuDeviceGet(&mut device, number))?;
    Ok(device)
}

/// The number of a device that the driver knows.
pub(super) fn ordinal_of(driver: &Driver, wanted: CUdevice) -> Result<u32, CudaError> {
    for ordinal in 0..count(driver)? {
        if device(driver, ordinal)? == wanted {
            return Ok(ordinal);
        }
    }
    Err(CudaError::NoDevice)
}
