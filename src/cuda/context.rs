//! Contexts, and being in one.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{CUcontext, CUdevice};

use super::device::{device, ordinal_of};
use super::driver::{Driver, call};
use super::error::CudaError;
use super::module::Modules;
use crate::log::{self, Level};

/// A context of a device: its primary one, which the CUDA runtime and PyTorch use too, or one that a
/// caller lends.
pub struct Context {
    driver: &'static Driver,
    handle: CUcontext,
    device: CUdevice,
    ordinal: u32,
    is_primary: bool,
    pub(super) modules: Mutex<Modules>,
}

// SAFETY: a context may be used by any thread; what is in it is behind a lock.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The primary contexts that are retained now, so that all users of a device share one, and with it
/// the loaded kernels.
static PRIMARIES: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

impl Context {
    /// The primary context of a device, retained until the last user drops it.
    pub fn primary(ordinal: u32) -> Result<Arc<Context>, CudaError> {
        let driver = Driver::get()?;
        let device = device(driver, ordinal)?;
        let mut primaries = PRIMARIES.lock().unwrap_or_else(PoisonError::into_inner);
        let live = |known: &Weak<Context>| known.upgrade().filter(|c| c.ordinal == ordinal);
        if let Some(context) = primaries.iter().find_map(live) {
            return Ok(context);
        }
        let mut handle = ptr::null_mut();
        call!(driver, cuDevicePrimaryCtxRetain(&mut handle, device))?;
        let context = Arc::new(Context {
            driver,
            handle,
            device,
            ordinal,
            is_primary: true,
            modules: Mutex::default(),
        });
        primaries.retain(|known| known.strong_count() > 0);
        primaries.push(Arc::downgrade(&context));
        drop(primaries);
        context.tell_of_opening();
        Ok(context)
    }

    /// A context of the caller's, a CUcontext.
    ///
    /// # Safety
    /// The context lives until the last user of the result is gone.
    pub unsafe fn borrow(handle: NonNull<c_void>) -> Result<Arc<Context>, CudaError> {
        let driver = Driver::get()?;
        let mut context = Context {
            driver,
            handle: handle.as_ptr().cast(),
            device: 0,
            ordinal: 0,
            is_primary: false,
            modules: Mutex::default(),
        };
        let mut device = 0;
        {
            let _entered = context.enter()?;
            call!(driver, cuCtxGetDevice(&mut device))?;
        }
        context.device = device;
        context.ordinal = ordinal_of(driver, device)?;
        context.tell_of_opening();
        Ok(Arc::new(context))
    }

    /// Logs what device it is. A device that does not say is named by its number alone.
    fn tell_of_opening(&self) {
        log::say(Level::Info, || {
            let kind = if self.is_primary {
                "primary"
            } else {
                "the engine's"
            };
            let (major, minor) = (self.driver.version / 1000, self.driver.version % 1000 / 10);
            let device = self.enter().and_then(|entered| entered.device_info());
            let device = device.map_or_else(
                |error| error.to_string(),
                |info| {
                    let (major, minor) = info.compute_capability;
                    format!(
                        "{}, compute capability {major}.{minor}, {} of {} bytes free",
                        info.name, info.free_bytes, info.total_bytes
                    )
                },
            );
            format!(
                "opened CUDA device {}, {kind} context, driver of CUDA {major}.{minor}: {device}",
                self.ordinal
            )
        });
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The number of its device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The context as the driver knows it, a CUcontext.
    pub fn handle(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// [`enter`](Self::enter) to give something back. What fails once is tried again, since nobody
    /// else will give it back.
    pub fn enter_to_release(&self) -> Result<Entered<'_>, CudaError> {
        self.enter().or_else(|_| self.enter())
    }

    /// Makes the context current on this thread until the guard is dropped; then the one that was
    /// current before is so again.
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        call!(self.driver, cuCtxPushCurrent_v2(self.handle))?;
        Ok(Entered {
            context: self,
            on_this_thread: PhantomData,
        })
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_primary { "primary" } else { "lent" };
        write!(f, "Context({kind}, device {})", self.ordinal)
    }
}

impl Drop for Context {
    /// A driver that fails here has nobody left to tell.
    fn drop(&mut self) {
        let modules = self.modules.get_mut();
        let modules = std::mem::take(modules.unwrap_or_else(PoisonError::into_inner));
        if !modules.is_empty()
            && let Ok(entered) = self.enter_to_release()
        {
            let _beside = entered.beside_captures();
            entered.unload(modules);
        }
        if self.is_primary {
            let _ = call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}

/// Being in a context: what the driver does in the current context is a method of this.
pub struct Entered<'c> {
    context: &'c Context,
    /// What is current is a matter of the thread, so the guard stays on it.
    on_this_thread: PhantomData<*mut ()>,
}

impl Entered<'_> {
    pub(super) fn driver(&self) -> &'static Driver {
        self.context.driver
    }

    pub(super) fn device(&self) -> CUdevice {
        self.context.device
    }

    /// The context that is current.
    pub fn context(&self) -> &Context {
        self.context
    }

    /// Lets this thread take and give back memory while another stream of the program captures a
    /// graph, until the result is dropped. Without it the driver would refuse, and spoil the
    /// capture: it cannot know that the capture has nothing to do with our memory.
    pub fn beside_captures(&self) -> Result<BesideCaptures<'_>, CudaError> {
        const RELAXED: u32 = 2;
        let mut mode = RELAXED;
        call!(self.driver(), cuThreadExchangeStreamCaptureMode(&mut mode))?;
        Ok(BesideCaptures {
            entered: self,
            before: mode,
        })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        let _ = call!(self.driver(), cuCtxPopCurrent_v2(&mut popped));
    }
}

/// While it lives, other streams' captures do not concern this thread.
pub struct BesideCaptures<'e> {
    entered: &'e Entered<'e>,
    before: u32,
}

impl Drop for BesideCaptures<'_> {
    fn drop(&mut self) {
        // The mode is the caller's, so one failure is not taken for an answer.
        for _ in 0..2 {
            let mut mode = self.before;
            let driver = self.entered.driver();
            if call!(driver, cuThreadExchangeStreamCaptureMode(&mut mode)).is_ok() {
                return;
            }
        }
    }
}
