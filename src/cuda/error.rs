//! Why something on a device failed.

use std::ffi::CStr;

/// Why something on a device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library cannot be opened.
    #[error("there is no CUDA driver: {reason}")]
    DriverMissing {
        /// What the loader said.
        reason: String,
    },
    /// The driver's library lacks a function.
    #[error("the CUDA driver lacks the function {function}; {}", told(*version))]
    DriverIncomplete {
        /// The function.
        function: &'static str,
        /// The driver's version as it tells it, 0 when it does not: 1000 for each major and 10 for
        /// each minor one.
        version: i32,
    },
    /// The driver is older than what the library needs.
    #[error(
        "the CUDA driver is for CUDA {}.{}, it must be for CUDA {}.{} or later",
        version / 1000,
        version % 1000 / 10,
        needed / 1000,
        needed % 1000 / 10
    )]
    DriverTooOld {
        /// The driver's version: 1000 for each major and 10 for each minor one.
        version: i32,
        /// The oldest one that does.
        needed: i32,
    },
    /// There is a driver, but no device.
    #[error("the CUDA driver sees no device; CUDA_VISIBLE_DEVICES may hide them")]
    NoDevice,
    /// There is no device of that number.
    #[error("there is no CUDA device {ordinal}, the driver sees {count}")]
    NoSuchDevice {
        /// The number.
        ordinal: u32,
        /// Devices there are.
        count: u32,
    },
    /// The device has not enough memory.
    #[error(
        "CUDA device {ordinal} has not enough memory: {needed} bytes are needed, {free} of {total} are free"
    )]
    OutOfMemory {
        /// The device.
        ordinal: u32,
        /// Bytes asked for.
        needed: u64,
        /// Bytes free when they were refused.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// The host has not enough memory that can be pinned.
    #[error("the CUDA driver cannot pin {needed} bytes of host memory")]
    OutOfPinnedMemory {
        /// Bytes asked for.
        needed: u64,
    },
    /// A device lacks something that was asked for.
    #[error("CUDA device {ordinal} does not support {what}")]
    NotSupported {
        /// The device.
        ordinal: u32,
        /// What it lacks.
        what: &'static str,
    },
    /// A bug in the library.
    #[error("a bug in kvpages: the kernel {name:?} was not loaded")]
    NotLoaded {
        /// What was looked for.
        name: &'static CStr,
    },
    /// A call of the driver failed.
    #[error("{call} failed with code {code} ({name})")]
    DriverFailed {
        /// The driver's function.
        call: &'static str,
        /// What it returned.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
}

/// What a driver says of its version.
fn told(version: i32) -> String {
    match version {
        0 => "it cannot be asked for its version, so it is hardly one".to_owned(),
        _ => format!(
            "it says it is for CUDA {}.{}",
            version / 1000,
            version % 1000 / 10
        ),
    }
}

/// CUDA_ERROR_OUT_OF_MEMORY
pub(super) const OUT_OF_MEMORY: u32 = 2;

impl CudaError {
    /// A name that stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            CudaError::DriverMissing { .. } => "driver_missing",
            CudaError::DriverIncomplete { .. } => "driver_incomplete",
            CudaError::DriverTooOld { .. } => "driver_too_old",
            CudaError::NoDevice | CudaError::NoSuchDevice { .. } => "no_device",
            CudaError::OutOfMemory { .. } => "out_of_device_memory",
            CudaError::OutOfPinnedMemory { .. } => "out_of_pinned_memory",
            CudaError::NotSupported { .. } => "device_lacks_support",
            CudaError::NotLoaded { .. } => "internal",
            CudaError::DriverFailed { .. } => "driver_failed",
        }
    }

    /// Whether the driver said that memory ran out.
    pub(super) fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::DriverFailed { code, .. } if *code == OUT_OF_MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_versions_and_numbers() {
        for (error, text) in [
            (
                CudaError::DriverTooOld {
                    version: 10020,
                    needed: 11000,
                },
                "the CUDA driver is for CUDA 10.2, it must be for CUDA 11.0 or later",
            ),
            (
                CudaError::DriverIncomplete {
                    function: "cuMemMap",
                    version: 12040,
                },
                "the CUDA driver lacks the function cuMemMap; it says it is for CUDA 12.4",
            ),
            (
                CudaError::DriverIncomplete {
                    function: "cuDriverGetVersion",
                    version: 0,
                },
                "the CUDA driver lacks the function cuDriverGetVersion; it cannot be asked for its version, so it is hardly one",
            ),
            (
                CudaError::NoSuchDevice {
                    ordinal: 8,
                    count: 2,
                },
                "there is no CUDA device 8, the driver sees 2",
            ),
            (
                CudaError::DriverFailed {
                    call: "cuMemMap",
                    code: 1,
                    name: "CUDA_ERROR_INVALID_VALUE".to_owned(),
                },
                "cuMemMap failed with code 1 (CUDA_ERROR_INVALID_VALUE)",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}
