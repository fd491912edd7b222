//! How keys and values are stored: quantisation modes and the widths they make.

/// How a layer's keys and values are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QuantMode {
    /// Stored as they are.
    None = 0,
    /// fp8, one scale for the whole tensor, kept by the engine.
    Fp8PerTensor = 1,
    /// int8, one f32 scale for each token and head, stored in the page.
    Int8PerTokenHead = 2,
    /// fp8, one f32 scale for each token and head, stored in the page.
    Fp8PerTokenHead = 3,
    /// Two int4 in one byte, one f32 scale for each token and head, stored in the page.
    Int4PerTokenHead = 4,
    /// Two fp4 in one byte, one fp8 scale for each 16 elements, stored behind the data.
    Nvfp4 = 5,
}

/// Elements that share one fp8 scale in [`QuantMode::Nvfp4`].
const NVFP4_SCALE_GROUP: u64 = 16;
/// Bytes of one per-token-head scale.
pub const TOKEN_HEAD_SCALE_BYTES: u64 = 4;

impl QuantMode {
    /// Every mode, in the order of their numbers.
    pub const ALL: [QuantMode; 6] = [
        QuantMode::None,
        QuantMode::Fp8PerTensor,
        QuantMode::Int8PerTokenHead,
        QuantMode::Fp8PerTokenHead,
        QuantMode::Int4PerTokenHead,
        QuantMode::Nvfp4,
    ];

    /// The mode that a cache-dtype string such as `fp8_e4m3` or `int4_per_token_head` asks for.
    pub fn from_cache_dtype(text: &str) -> QuantMode {
        match text {
            "int4_per_token_head" => QuantMode::Int4PerTokenHead,
            "int8_per_token_head" => QuantMode::Int8PerTokenHead,
            "fp8_per_token_head" => QuantMode::Fp8PerTokenHead,
            "nvfp4" => QuantMode::Nvfp4,
            other if other.starts_with("fp8") => QuantMode::Fp8PerTensor,
            _ => QuantMode::None,
        }
    }

    /// The name people use.
    pub const fn name(self) -> &'static str {
        match self {
            QuantMode::None => "none",
            QuantMode::Fp8PerTensor => "fp8_per_tensor",
            QuantMode::Int8PerTokenHead => "int8_per_token_head",
            QuantMode::Fp8PerTokenHead => "fp8_per_token_head",
            QuantMode::Int4PerTokenHead => "int4_per_token_head",
            QuantMode::Nvfp4 => "nvfp4",
        }
    }

    /// Whether each token and head has an f32 scale in the page.
    pub const fn is_per_token_head(self) -> bool {
        matches!(
            self,
            QuantMode::Int8PerTokenHead | QuantMode::Fp8PerTokenHead | QuantMode::Int4PerTokenHead
        )
    }

    /// What the number of elements of a head must be a multiple of, so that nothing is lost.
    pub const fn width_multiple(self) -> u64 {
        match self {
            QuantMode::Int4PerTokenHead => 2,
            QuantMode::Nvfp4 => NVFP4_SCALE_GROUP,
            _ => 1,
        }
    }

    /// Stored elements of one head of `width` elements, a multiple of
    /// [`width_multiple`](Self::width_multiple).
    pub const fn stored_width(self, width: u64) -> u64 {
        match self {
            QuantMode::Int4PerTokenHead => width / 2,
            QuantMode::Nvfp4 => width / 2 + width / NVFP4_SCALE_GROUP,
            _ => width,
        }
    }
}

impl TryFrom<u32> for QuantMode {
    type Error = u32;

    /// The mode with that number; the number itself when there is none.
    fn try_from(number: u32) -> Result<QuantMode, u32> {
        QuantMode::ALL
            .into_iter()
            .find(|mode| *mode as u32 == number)
            .ok_or(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_dtype_strings() {
        for (text, mode) in [
            ("auto", QuantMode::None),
            ("bfloat16", QuantMode::None),
            ("", QuantMode::None),
            ("fp8", QuantMode::Fp8PerTensor),
            ("fp8_e5m2", QuantMode::Fp8PerTensor),
            ("fp8_ds_mla", QuantMode::Fp8PerTensor),
            ("fp8_per_token_head", QuantMode::Fp8PerTokenHead),
            ("int8_per_token_head", QuantMode::Int8PerTokenHead),
            ("int4_per_token_head", QuantMode::Int4PerTokenHead),
            ("nvfp4", QuantMode::Nvfp4),
            ("FP8", QuantMode::None),
        ] {
            assert_eq!(QuantMode::from_cache_dtype(text), mode, "{text}");
        }
    }

    #[test]
    fn widths() {
        assert_eq!(QuantMode::Nvfp4.stored_width(128), 72);
        assert_eq!(QuantMode::Int4PerTokenHead.stored_width(64), 32);
        assert_eq!(QuantMode::Fp8PerTensor.stored_width(64), 64);
    }
}
