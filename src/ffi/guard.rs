//! The boundary itself: nothing but a status leaves a call.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::status::{Failure, kvpages_status, remember};

/// Runs the body of a call. An error or a panic becomes a status and this thread's message.
pub(super) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> kvpages_status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return kvpages_status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::internal(panic_text(&*panic)),
    };
    remember(failure)
}

/// Runs the body of a call that has no status to return.
pub(super) fn guard_or<T>(default: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(default)
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "no text".to_owned());
    format!("a bug in kvpages: {text}; please report it")
}
