//! Header section: element types and tensors.

use std::ffi::{c_char, c_void};

use crate::dtype::Dtype;

/// Type of one element. fp4 is stored two to a byte.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum kvpages_dtype {
    F64 = 1,
    F32 = 2,
    F16 = 3,
    BF16 = 4,
    I8 = 5,
    U8 = 6,
    I16 = 7,
    I32 = 8,
    I64 = 9,
    BOOL = 10,
    F8_E4M3FN = 11,
    F8_E5M2 = 12,
    F8_E4M3FNUZ = 13,
    F8_E5M2FNUZ = 14,
    F4_E2M1X2 = 15,
}

/// A view: what a kernel is given. Frozen; it never gets more fields.
///
/// Element [i, j, ...] lies at data + (i * strides[0] + j * strides[1] + ...) *
/// kvpages_dtype_bytes(dtype).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_tensor {
    /// The first element: a host or device pointer, as the cache's memory is.
    pub data: *mut c_void,
    /// Sizes of the dimensions, ndim of them. Kept until the cache is destroyed.
    pub shape: *const i64,
    /// Elements from one index of a dimension to the next, ndim of them. Kept
    /// until the cache is destroyed.
    pub strides: *const i64,
    /// One of KVPAGES_DTYPE_*.
    pub dtype: u32,
    /// Number of dimensions.
    pub ndim: u32,
}

/// Bytes of one element.
///
/// @param dtype  One of KVPAGES_DTYPE_*.
/// @return 0 for a number that is no element type.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_dtype_bytes(dtype: u32) -> u64 {
    Dtype::try_from(dtype).map_or(0, Dtype::bytes)
}

/// Name of an element type, such as "bfloat16".
///
/// @param dtype  One of KVPAGES_DTYPE_*.
/// @return A static string; empty for a number that is no element type.
#[unsafe(no_mangle)]
pub extern "C" fn kvpages_dtype_name(dtype: u32) -> *const c_char {
    Dtype::try_from(dtype).map_or(c"", Dtype::c_name).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn numbers_and_names_are_those_of_the_core() {
        let listed = [
            kvpages_dtype::F64,
            kvpages_dtype::F32,
            kvpages_dtype::F16,
            kvpages_dtype::BF16,
            kvpages_dtype::I8,
            kvpages_dtype::U8,
            kvpages_dtype::I16,
            kvpages_dtype::I32,
            kvpages_dtype::I64,
            kvpages_dtype::BOOL,
            kvpages_dtype::F8_E4M3FN,
            kvpages_dtype::F8_E5M2,
            kvpages_dtype::F8_E4M3FNUZ,
            kvpages_dtype::F8_E5M2FNUZ,
            kvpages_dtype::F4_E2M1X2,
        ];
        assert_eq!(listed.len(), Dtype::ALL.len());
        for (dtype, core) in listed.into_iter().zip(Dtype::ALL) {
            assert_eq!(dtype as u32, core as u32);
            // SAFETY: a static string.
            let name = unsafe { CStr::from_ptr(kvpages_dtype_name(dtype as u32)) };
            assert_eq!(name, core.c_name());
            assert_eq!(kvpages_dtype_bytes(dtype as u32), core.bytes());
        }
        assert_eq!(kvpages_dtype_bytes(0), 0);
    }
}
