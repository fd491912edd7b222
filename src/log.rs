//! What an engine's operator may want to know, told to one callback of the process.
//!
//! Nothing is said before a callback is set, and then no message is put together either. Calls on a
//! step say nothing: they take no lock.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

/// How much a message matters. Failed calls are no messages: they return an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Level {
    /// Something works worse than it could.
    Warn = 1,
    /// What was decided, and what was taken: a few messages for each cache.
    Info = 2,
    /// Details.
    Debug = 3,
}

/// Takes a message: `(user, level, message)`.
pub type Callback = unsafe extern "C" fn(*mut c_void, u32, *const c_char);

/// Where messages go.
#[derive(Debug, Clone, Copy)]
pub struct Sink {
    /// The least important ones that it wants.
    pub max_level: Level,
    /// Takes them.
    pub callback: Callback,
    /// Handed to it.
    pub user: *mut c_void,
}

// SAFETY: whoever sets a sink promises that its callback may be called from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

/// A call from within the callback, which would wait for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the log callback cannot be changed from within itself")]
pub struct FromWithin;

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// The level of [`SINK`], 0 for none: what most calls look at, and no more.
static MAX_LEVEL: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Whether this thread is in the callback. What it calls from there says nothing.
    static IS_WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Sends messages to `sink` from now on; to nobody without one. The callback that was set before is
/// not called any more when this returns.
///
/// # Safety
/// The callback may be called with its `user` from any thread, by several at once, until another
/// call of this has returned. It does not unwind.
pub unsafe fn set(sink: Option<Sink>) -> Result<(), FromWithin> {
    if IS_WITHIN.get() {
        return Err(FromWithin);
    }
    let mut current = SINK.write().unwrap_or_else(PoisonError::into_inner);
    *current = sink;
    let level = sink.map_or(0, |sink| sink.max_level as u32);
    MAX_LEVEL.store(level, Ordering::Relaxed);
    Ok(())
}

/// Whether a message of this level is wanted.
pub fn is_on(level: Level) -> bool {
    level as u32 <= MAX_LEVEL.load(Ordering::Relaxed)
}

/// Says something, if somebody wants it: only then the message is made.
///
/// No lock may be held that a call of the library could want: the callback may make one.
pub fn say(level: Level, message: impl FnOnce() -> String) {
    if is_on(level) && !IS_WITHIN.get() {
        tell(level, message());
    }
}

#[cold]
fn tell(level: Level, message: String) {
    // No text here has a 0 in it: names come from C.
    let Ok(message) = CString::new(message) else {
        return;
    };
    let current = SINK.read().unwrap_or_else(PoisonError::into_inner);
    // It may be another one than a moment ago.
    if let Some(sink) = current.filter(|sink| level <= sink.max_level) {
        IS_WITHIN.set(true);
        // SAFETY: the contract of `set`; it is still set as long as the lock is held.
        unsafe { (sink.callback)(sink.user, level as u32, message.as_ptr()) };
        IS_WITHIN.set(false);
    }
}
