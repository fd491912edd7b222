//! Opaque handles: made on the heap, poisoned by a panic, destroyed once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use super::guard::{guard_or, panic_text};
use super::status::{Failure, kvpages_status, remember};

/// What stands behind a handle.
pub(super) struct Handle<T> {
    poisoned: AtomicBool,
    value: T,
}

impl<T> Handle<T> {
    pub(super) fn new(value: T) -> Handle<T> {
        Handle {
            poisoned: AtomicBool::new(false),
            value,
        }
    }

    fn usable(&self, name: &str) -> Result<&Handle<T>, Failure> {
        if self.poisoned.load(Ordering::Relaxed) {
            return Err(Failure::poisoned(name));
        }
        Ok(self)
    }
}

/// Runs the body of a call on a handle; a panic in it poisons the handle.
fn run(poisoned: &AtomicBool, body: impl FnOnce() -> Result<(), Failure>) -> kvpages_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => kvpages_status::Ok,
        Ok(Err(failure)) => remember(failure),
        Err(panic) => {
            poisoned.store(true, Ordering::Relaxed);
            remember(Failure::internal(panic_text(&*panic)))
        }
    }
}

/// An opaque type of the header: a [`Handle`] by another name.
pub(super) trait Opaque: Sized {
    /// What the handle holds.
    type Value;
    /// What messages call it.
    const NAME: &'static str;

    fn of(handle: Handle<Self::Value>) -> Self;
    fn handle(&self) -> &Handle<Self::Value>;
    fn handle_mut(&mut self) -> &mut Handle<Self::Value>;
}

/// Declares that a tuple struct of the header is a handle.
macro_rules! opaque {
    ($handle:ident, $value:ty, $name:literal) => {
        impl $crate::ffi::handle::Opaque for $handle {
            type Value = $value;
            const NAME: &'static str = $name;

            fn of(handle: $crate::ffi::handle::Handle<$value>) -> Self {
                $handle(handle)
            }
            fn handle(&self) -> &$crate::ffi::handle::Handle<$value> {
                &self.0
            }
            fn handle_mut(&mut self) -> &mut $crate::ffi::handle::Handle<$value> {
                &mut self.0
            }
        }
    };
}
pub(super) use opaque;

/// A new handle for the caller.
pub(super) fn give<H: Opaque>(value: H::Value) -> *mut H {
    Box::into_raw(Box::new(H::of(Handle::new(value))))
}

/// The value behind a handle.
///
/// # Safety
/// `handle` is NULL or live, and for the returned lifetime no call has it for itself.
pub(super) unsafe fn shared<'a, H: Opaque + 'a>(handle: *const H) -> Result<&'a H::Value, Failure> {
    // SAFETY: the caller's contract.
    let handle = unsafe { handle.as_ref() }.ok_or_else(|| Failure::null(H::NAME))?;
    handle.handle().usable(H::NAME).map(|handle| &handle.value)
}

/// Runs a call that reads a handle and fills `outputs`, which were cleared before.
///
/// # Safety
/// As [`shared`].
pub(super) unsafe fn read<H: Opaque, O>(
    handle: *const H,
    outputs: Result<O, Failure>,
    body: impl FnOnce(&H::Value, O) -> Result<(), Failure>,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    let Some(handle) = (unsafe { handle.as_ref() }) else {
        return remember(Failure::null(H::NAME));
    };
    match handle.handle().usable(H::NAME) {
        Ok(Handle { poisoned, value }) => run(poisoned, || body(value, outputs?)),
        Err(failure) => remember(failure),
    }
}

/// Runs a call that changes a handle.
///
/// # Safety
/// `handle` is NULL or live, and this call has it for itself.
pub(super) unsafe fn change<H: Opaque>(
    handle: *mut H,
    body: impl FnOnce(&mut H::Value) -> Result<(), Failure>,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    let Some(handle) = (unsafe { handle.as_mut() }) else {
        return remember(Failure::null(H::NAME));
    };
    if let Err(failure) = handle.handle().usable(H::NAME) {
        return remember(failure);
    }
    let Handle { poisoned, value } = handle.handle_mut();
    run(poisoned, || body(value))
}

/// Runs an accessor that cannot fail: `default` for NULL and for a poisoned handle.
///
/// # Safety
/// As [`shared`].
pub(super) unsafe fn get<H: Opaque, T: Copy>(
    handle: *const H,
    default: T,
    body: impl FnOnce(&H::Value) -> T,
) -> T {
    guard_or(default, || {
        // SAFETY: the caller's contract.
        match unsafe { handle.as_ref() }.map(H::handle) {
            Some(handle) if !handle.poisoned.load(Ordering::Relaxed) => body(&handle.value),
            _ => default,
        }
    })
}

/// Destroys a handle. NULL is a no-op.
///
/// # Safety
/// `handle` is NULL or came from [`give`] and is not used any more.
pub(super) unsafe fn destroy<H: Opaque>(handle: *mut H) {
    guard_or((), || {
        if !handle.is_null() {
            // SAFETY: the caller's contract.
            drop(unsafe { Box::from_raw(handle) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Number(Handle<u32>);
    opaque!(Number, u32, "number");

    #[test]
    fn a_panic_poisons_its_handle_and_only_destroying_is_left() {
        let number: *mut Number = give(7);
        // SAFETY: the handle is live and used by this thread only.
        unsafe {
            assert_eq!(
                read(number, Ok(()), |n, ()| {
                    assert_eq!(*n, 7);
                    Ok(())
                }),
                kvpages_status::Ok
            );
            assert_eq!(change(number, |_| panic!("boom")), kvpages_status::Internal);
            assert_eq!(
                read(number, Ok(()), |_, ()| Ok(())),
                kvpages_status::Poisoned
            );
            assert_eq!(change(number, |_| Ok(())), kvpages_status::Poisoned);
            assert!(shared(number.cast_const()).is_err());
            assert_eq!(get(number, 3, |n| *n), 3);
            destroy(number);
            let number: *mut Number = give(7);
            assert_eq!(
                read(number, Ok(()), |_, ()| panic!("boom")),
                kvpages_status::Internal
            );
            assert_eq!(
                read(number, Ok(()), |_, ()| Ok(())),
                kvpages_status::Poisoned
            );
            destroy(number);
            destroy::<Number>(std::ptr::null_mut());
            assert_eq!(
                read::<Number, ()>(std::ptr::null(), Ok(()), |_, ()| Ok(())),
                kvpages_status::NullArgument
            );
        }
    }
}
