//! Header section: version.

use std::ffi::c_char;

/// The SONAME's number: raised only when a program built against an older one would break.
const ABI: u32 = 0;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Version of the library, such as "0.1.0".
///
/// @return A static string.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_version() -> *const c_char {
    VERSION.as_ptr().cast()
}

/// Number of the binary interface. A program runs with any library of the same
/// number that is not older than the header it was compiled with.
///
/// @return The number; the suffix of the shared library's SONAME.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_abi_version() -> u32 {
    ABI
}

#[cfg(test)]
mod tests {
    #[test]
    fn abi_number_is_that_of_the_shared_library() {
        let script = include_str!("../../build.rs");
        assert!(script.contains(&format!("const ABI: u32 = {};", super::ABI)));
    }
}
