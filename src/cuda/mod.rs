//! The CUDA driver. Nothing else in the library talks to it.
//!
//! The driver's library is opened when a program first asks for a device; a machine without one is
//! an error like any other. Every function that is used is looked up at once, so that no later call
//! can meet a missing one. Handles and structs are cudarc's; its functions are not used.
//!
//! A call needs a current context. [`Context::enter`] makes one current, and what needs it is a
//! method of the guard it returns; with the guard goes the context, and the caller's is current
//! again.

#![allow(unsafe_code)]

mod context;
mod device;
mod driver;
mod error;
mod memory;
mod module;
mod stream;

pub use context::{Context, Entered};
pub use device::{DeviceInfo, device_count};
pub use error::CudaError;
pub use memory::{DeviceBuffer, PinnedBuffer, Segment};
pub use module::Function;
pub use stream::{Event, Stream, StreamRef};

/// An address in device memory. The host cannot follow it.
pub type DeviceAddress = u64;

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests of the C++ side run with a driver; these state what a machine without one answers.
    fn expect_missing<T>(result: Result<T, CudaError>) {
        match result.err() {
            Some(error @ CudaError::DriverMissing { .. }) => {
                assert_eq!(error.kind(), "driver_missing");
                let text = error.to_string();
                assert!(text.contains("libcuda.so.1"), "{text}");
                assert!(text.contains("cannot open shared object file"), "{text}");
            }
            other => panic!("expected driver_missing, not {other:?}"),
        }
    }

    #[test]
    fn without_a_driver_every_entry_says_so_each_time() {
        if std::path::Path::new("/proc/driver/nvidia").exists() {
            return;
        }
        for _ in 0..2 {
            expect_missing(device_count());
            expect_missing(DeviceInfo::of(0));
            expect_missing(Context::primary(0));
            // SAFETY: without a driver the handle is not used.
            expect_missing(unsafe { Context::borrow(std::ptr::NonNull::dangling()) });
        }
    }

    #[test]
    fn threads_that_ask_together_get_the_same_answer() {
        if std::path::Path::new("/proc/driver/nvidia").exists() {
            return;
        }
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| expect_missing(device_count()));
            }
        });
    }
}
