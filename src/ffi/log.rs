//! Header section: log messages.

use std::ffi::{c_char, c_void};

use super::guard::guard;
use super::status::{Failure, kvpages_status};
use crate::log::{self, Level, Sink};

/// How much a message matters. There is none for errors: a call that fails returns
/// its error.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_log_level {
    /// Nothing is said.
    Off = 0,
    /// Something works worse than it could: kernels that cannot reach all blocks that
    /// there is memory for, a driver that fails when memory is given back.
    Warn = 1,
    /// What was decided and taken: a plan, a cache that is made, grown or shrunk,
    /// tables, a device that is opened, poison. A few messages for each.
    Info = 2,
    /// Details: kernels that are loaded, what is destroyed, the whole explanation of
    /// a plan.
    Debug = 3,
}

/// Takes a message. It may be called from any thread that is in a call of kvpages,
/// and by several at once. It must not throw: an exception cannot pass through the
/// library, and is undefined behaviour (kvpages.hpp catches them).
///
/// It may call kvpages, but not on a handle that the call around it uses; what those
/// calls would say is dropped. It must not wait for another thread that calls
/// kvpages.
///
/// @param user     As it was set.
/// @param level    One of KVPAGES_LOG_LEVEL_*.
/// @param message  One line, or several of an explanation, without a line end behind
///                 the last one. Valid until the callback returns.
pub type kvpages_log_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, level: u32, message: *const c_char)>;

/// Says where the messages of this process go: to one callback for all handles. At
/// first there is none, and then no message is put together either. Calls on a step
/// (those on kvpages_tables and kvpages_ops but to create and destroy, and views)
/// say nothing, whatever is set.
///
/// May be called at any time, also while other threads are in calls that say
/// something: when it returns, the callback that was set before is not called any
/// more, and not running, so what it uses may go. That means that it waits for calls
/// of the callback that are under way: the caller holds no lock that the callback
/// takes.
///
/// @param max_level  The least important messages that are wanted: one of
///                   KVPAGES_LOG_LEVEL_*.
/// @param callback   NULL for none.
/// @param user       Handed to the callback. Kept until another callback is set, also
///                   by what is destroyed when the process ends.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The callback itself made this call (kind
///         "log_callback_is_running"), or there is no such level.
/// @note A plan's message has numbers of its explanation. For the compact policy that
///       takes the reference's plan of the same layers, too.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_set_log_callback(
    max_level: u32,
    callback: kvpages_log_fn,
    user: *mut c_void,
) -> kvpages_status {
    guard(|| {
        let max_level = read_level(max_level)?;
        let sink = callback.zip(max_level).map(|(callback, max_level)| Sink {
            max_level,
            callback,
            user,
        });
        // SAFETY: the caller's contract.
        Ok(unsafe { log::set(sink) }?)
    })
}

fn read_level(number: u32) -> Result<Option<Level>, Failure> {
    const OFF: u32 = kvpages_log_level::Off as u32;
    const WARN: u32 = kvpages_log_level::Warn as u32;
    const INFO: u32 = kvpages_log_level::Info as u32;
    const DEBUG: u32 = kvpages_log_level::Debug as u32;
    const _: () = {
        assert!(WARN == Level::Warn as u32);
        assert!(INFO == Level::Info as u32);
        assert!(DEBUG == Level::Debug as u32);
    };
    match number {
        OFF => Ok(None),
        WARN => Ok(Some(Level::Warn)),
        INFO => Ok(Some(Level::Info)),
        DEBUG => Ok(Some(Level::Debug)),
        other => Err(Failure::invalid(
            "unknown_value",
            format!("max_level is {other}, which is not one of its values"),
        )),
    }
}
