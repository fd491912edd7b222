//! Numbers as people read them.

use std::fmt;

/// Bytes, with a binary unit and exactly.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match short(self.0) {
            Some(short) => write!(f, "{short} ({} bytes)", self.0),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// With a binary unit; `None` below 1 KiB.
pub(super) fn short(bytes: u64) -> Option<String> {
    let (unit, name) = match bytes {
        0..0x400 => return None,
        0x400..0x10_0000 => (0x400u64, "KiB"),
        0x10_0000..0x4000_0000 => (0x10_0000, "MiB"),
        _ => (0x4000_0000, "GiB"),
    };
    Some(format!("{:.2} {name}", bytes as f64 / unit as f64))
}
