//! Element types of a cache.

use std::ffi::CStr;

/// The byte of which poisoned memory is made. Elements of it are NaN in every float type that has a
/// NaN of all ones: double, single, half, bfloat16 and both 8-bit floats of OCP.
pub const POISON: u8 = 0xff;

/// The type of one element of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Dtype {
    /// IEEE double.
    F64 = 1,
    /// IEEE single.
    F32 = 2,
    /// IEEE half.
    F16 = 3,
    /// bfloat16.
    Bf16 = 4,
    /// Signed 8-bit integer.
    I8 = 5,
    /// Unsigned 8-bit integer; also the carrier of packed formats.
    U8 = 6,
    /// Signed 16-bit integer.
    I16 = 7,
    /// Signed 32-bit integer.
    I32 = 8,
    /// Signed 64-bit integer.
    I64 = 9,
    /// One byte, 0 or 1.
    Bool = 10,
    /// 8-bit float with 4 exponent bits, finite and NaN only.
    F8E4m3fn = 11,
    /// 8-bit float with 5 exponent bits.
    F8E5m2 = 12,
    /// As `F8E4m3fn`, with unsigned zero and a bias of 8.
    F8E4m3fnuz = 13,
    /// As `F8E5m2`, with unsigned zero and a bias of 16.
    F8E5m2fnuz = 14,
    /// Two 4-bit floats with 2 exponent bits, in one byte.
    F4E2m1x2 = 15,
}

impl Dtype {
    /// Every element type, in the order of their numbers.
    pub const ALL: [Dtype; 15] = [
        Dtype::F64,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::I8,
        Dtype::U8,
        Dtype::I16,
        Dtype::I32,
        Dtype::I64,
        Dtype::Bool,
        Dtype::F8E4m3fn,
        Dtype::F8E5m2,
        Dtype::F8E4m3fnuz,
        Dtype::F8E5m2fnuz,
        Dtype::F4E2m1x2,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::I16 => 2,
            Dtype::I8
            | Dtype::U8
            | Dtype::Bool
            | Dtype::F8E4m3fn
            | Dtype::F8E5m2
            | Dtype::F8E4m3fnuz
            | Dtype::F8E5m2fnuz
            | Dtype::F4E2m1x2 => 1,
        }
    }

    /// The name people use.
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    /// The name people use, for C.
    pub const fn c_name(self) -> &'static CStr {
        match self {
            Dtype::F64 => c"float64",
            Dtype::F32 => c"float32",
            Dtype::F16 => c"float16",
            Dtype::Bf16 => c"bfloat16",
            Dtype::I8 => c"int8",
            Dtype::U8 => c"uint8",
            Dtype::I16 => c"int16",
            Dtype::I32 => c"int32",
            Dtype::I64 => c"int64",
            Dtype::Bool => c"bool",
            Dtype::F8E4m3fn => c"float8_e4m3fn",
            Dtype::F8E5m2 => c"float8_e5m2",
            Dtype::F8E4m3fnuz => c"float8_e4m3fnuz",
            Dtype::F8E5m2fnuz => c"float8_e5m2fnuz",
            Dtype::F4E2m1x2 => c"float4_e2m1fn_x2",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl TryFrom<u32> for Dtype {
    type Error = u32;

    /// The element type with that number; the number itself when there is none.
    fn try_from(number: u32) -> Result<Dtype, u32> {
        Dtype::ALL
            .into_iter()
            .find(|dtype| *dtype as u32 == number)
            .ok_or(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_dense_and_round_trip() {
        for (i, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, i + 1);
            assert_eq!(Dtype::try_from(dtype as u32), Ok(dtype));
        }
        assert_eq!(Dtype::try_from(0), Err(0));
        assert_eq!(Dtype::try_from(16), Err(16));
    }

    #[test]
    fn poison_is_nan() {
        assert!(f64::from_ne_bytes([POISON; 8]).is_nan());
        assert!(f32::from_ne_bytes([POISON; 4]).is_nan());
        assert!(half::f16::from_ne_bytes([POISON; 2]).is_nan());
        assert!(half::bf16::from_ne_bytes([POISON; 2]).is_nan());
        // All bits of the exponent and of the mantissa set is the NaN of both 8-bit floats.
        assert_eq!(POISON & 0x7f, 0x7f);
    }
}
