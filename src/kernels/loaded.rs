//! The kernels of a device, loaded.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use super::device::{IMAGE, Launch};
use crate::cuda::{Context, CudaError, Entered, Function, StreamRef};

/// Kernels that one context has loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    context: Arc<Context>,
    functions: Vec<(&'static CStr, Function)>,
}

impl Loaded {
    /// Loads kernels, so that no call has to.
    pub fn new(
        context: &Arc<Context>,
        names: impl IntoIterator<Item = &'static CStr>,
    ) -> Result<Loaded, CudaError> {
        let mut functions = Vec::new();
        for name in names {
            functions.push((name, context.function(IMAGE, name)?));
        }
        Ok(Loaded {
            context: Arc::clone(context),
            functions,
        })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Puts a kernel on a stream.
    ///
    /// # Safety
    /// The kernel takes `parameter`, whose addresses are memory of the context until the stream has
    /// done it. `entered` is of the context.
    pub unsafe fn launch<P>(
        &self,
        entered: &Entered<'_>,
        launch: &Launch,
        parameter: &P,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        let found = self.functions.iter().find(|(name, _)| *name == launch.name);
        let &(_, function) = found.ok_or(CudaError::NotLoaded { name: launch.name })?;
        let mut parameters: [*mut c_void; 1] = [ptr::from_ref(parameter).cast_mut().cast()];
        let [grid, ..] = launch.grid;
        // SAFETY: the caller's contract; the driver copies the parameter.
        unsafe { entered.launch(function, grid, launch.block, stream, &mut parameters) }
    }
}
