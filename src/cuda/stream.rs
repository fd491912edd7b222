//! Streams and events.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUstream};

use super::context::{Context, Entered};
use super::driver::call;
use super::error::CudaError;

/// A stream that somebody else owns, a CUstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRef(pub(super) CUstream);

// SAFETY: a number to the host; the driver takes it from any thread.
unsafe impl Send for StreamRef {}
// SAFETY: as above.
unsafe impl Sync for StreamRef {}

impl StreamRef {
    /// The stream that a caller means; NULL is the context's default stream.
    pub const fn new(handle: *mut c_void) -> StreamRef {
        StreamRef(handle.cast())
    }
}

/// A stream of our own, which waits for no other.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: StreamRef,
}

impl Stream {
    /// A new stream.
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        const NON_BLOCKING: u32 = 1;
        let entered = context.enter()?;
        let mut handle = ptr::null_mut();
        call!(entered.driver(), cuStreamCreate(&mut handle, NON_BLOCKING))?;
        Ok(Stream {
            context: Arc::clone(context),
            handle: StreamRef(handle),
        })
    }

    /// The stream for calls.
    pub fn get(&self) -> StreamRef {
        self.handle
    }
}

impl Drop for Stream {
    /// The driver finishes what was put on it. It knows the stream's context, which need not be
    /// current, so a context that cannot be entered is no reason to keep the stream.
    fn drop(&mut self) {
        let _ = call!(self.context.driver(), cuStreamDestroy_v2(self.handle.0));
    }
}

/// A point on a stream that can be waited for.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: a number to the host; the driver takes it from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, recorded nowhere: it counts as reached.
    pub fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        const DISABLE_TIMING: u32 = 2;
        let entered = context.enter()?;
        let mut handle = ptr::null_mut();
        call!(entered.driver(), cuEventCreate(&mut handle, DISABLE_TIMING))?;
        Ok(Event {
            context: Arc::clone(context),
            handle,
        })
    }
}

impl Drop for Event {
    /// As a stream's.
    fn drop(&mut self) {
        let _ = call!(self.context.driver(), cuEventDestroy_v2(self.handle));
    }
}

impl Entered<'_> {
    /// Waits until all that was put on the stream is done.
    pub fn synchronise(&self, stream: StreamRef) -> Result<(), CudaError> {
        call!(self.driver(), cuStreamSynchronize(stream.0))
    }

    /// Waits until all work of the context is done.
    pub fn synchronise_all(&self) -> Result<(), CudaError> {
        call!(self.driver(), cuCtxSynchronize())
    }

    /// Whether the stream is being captured into a graph.
    pub fn is_capturing(&self, stream: StreamRef) -> Result<bool, CudaError> {
        let mut status = 0;
        call!(self.driver(), cuStreamIsCapturing(stream.0, &mut status))?;
        Ok(status != 0)
    }

    /// Moves the event to where the stream is now.
    pub fn record(&self, event: &Event, stream: StreamRef) -> Result<(), CudaError> {
        call!(self.driver(), cuEventRecord(event.handle, stream.0))
    }

    /// Makes the stream wait for the event; the host does not.
    pub fn wait_on_stream(&self, stream: StreamRef, event: &Event) -> Result<(), CudaError> {
        call!(self.driver(), cuStreamWaitEvent(stream.0, event.handle, 0))
    }

    /// Whether the event was reached.
    pub fn is_reached(&self, event: &Event) -> Result<bool, CudaError> {
        const NOT_READY: u32 = 600;
        match call!(self.driver(), cuEventQuery(event.handle)) {
            Err(CudaError::DriverFailed { code, .. }) if code == NOT_READY => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Waits until the event was reached.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        call!(self.driver(), cuEventSynchronize(event.handle))
    }
}
