//! Kernels: loading an image of them, and launching.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::PoisonError;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::context::{Context, Entered};
use super::driver::call;
use super::error::CudaError;
use super::stream::StreamRef;
use crate::log::{self, Level};

/// The images that a context has loaded, by their address.
pub(super) type Modules = Vec<(usize, Module)>;

pub(super) struct Module(CUmodule);

/// A kernel of a context. It is loaded as long as the context lives.
#[derive(Debug, Clone, Copy)]
pub struct Function(CUfunction);

// SAFETY: a number to the host; the driver takes it from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Context {
    /// The kernel `name` of an image, which is PTX text with a 0 at its end, or a cubin or a fatbin.
    /// The first kernel of an image loads it; that may compile PTX, and takes long.
    pub fn function(&self, image: &'static [u8], name: &CStr) -> Result<Function, CudaError> {
        let (module, is_new) = self.module(image)?;
        // Outside the context, which is none of the callback's.
        if is_new {
            self.tell_of_loading(image);
        }
        let entered = self.enter()?;
        let mut function = ptr::null_mut();
        call!(
            entered.driver(),
            cuModuleGetFunction(&mut function, module, name.as_ptr())
        )?;
        Ok(Function(function))
    }

    /// The module of an image, and whether it was loaded just now.
    fn module(&self, image: &'static [u8]) -> Result<(CUmodule, bool), CudaError> {
        let entered = self.enter()?;
        let _beside = entered.beside_captures()?;
        let address = image.as_ptr() as usize;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = modules.iter().find(|(known, _)| *known == address) {
            return Ok((module.0, false));
        }
        let mut module = ptr::null_mut();
        call!(
            entered.driver(),
            cuModuleLoadData(&mut module, image.as_ptr().cast())
        )?;
        modules.push((address, Module(module)));
        Ok((module, true))
    }

    /// Logs that kernels were loaded.
    fn tell_of_loading(&self, image: &[u8]) {
        log::say(Level::Debug, || {
            let form = match image {
                [b'/' | b'.', ..] => "PTX, which the driver compiles",
                _ => "code of the device",
            };
            let (ordinal, bytes) = (self.ordinal(), image.len());
            format!("CUDA device {ordinal}: loaded kernels, {bytes} bytes of {form}")
        });
    }
}

impl Entered<'_> {
    pub(super) fn unload(&self, modules: Modules) {
        for (_, module) in modules {
            let _ = call!(self.driver(), cuModuleUnload(module.0));
        }
    }

    /// Puts a kernel on a stream: `grid` blocks of `block` threads, without shared memory. A grid of
    /// 0 blocks is nothing to do.
    ///
    /// # Safety
    /// `parameters` are pointers to what the kernel declares, in its order; the driver copies what
    /// they point to. The addresses among it are valid until the stream has run the kernel, and the
    /// function is of this context.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: u32,
        block: [u32; 3],
        stream: StreamRef,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if grid == 0 {
            return Ok(());
        }
        let [x, y, z] = block;
        call!(
            self.driver(),
            cuLaunchKernel(
                function.0,
                grid,
                1,
                1,
                x,
                y,
                z,
                0,
                stream.0,
                parameters.as_mut_ptr(),
                ptr::null_mut()
            )
        )
    }
}
