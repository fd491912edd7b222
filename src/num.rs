//! Checked arithmetic on numbers that come from a caller.
//!
//! Every size stays below 2^63, so that a byte offset or a stride also fits the signed 64-bit
//! integers that tensors use.

/// The largest size, count or offset that is accepted anywhere.
pub const MAX: u64 = i64::MAX as u64;

/// A size that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    /// What was being computed.
    pub what: &'static str,
    /// The first numbers it was computed from, 0 where there were fewer.
    pub from: [u64; 4],
}

impl std::error::Error for Overflow {}

impl std::fmt::Display for Overflow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of ", self.what)?;
        for (i, number) in self.from.iter().filter(|&&number| number != 0).enumerate() {
            write!(f, "{}{number}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(" would need more than 63 bits")
    }
}

fn checked(
    what: &'static str,
    numbers: impl Iterator<Item = u64> + Clone,
    result: Option<u64>,
) -> Result<u64, Overflow> {
    result.filter(|&value| value <= MAX).ok_or_else(|| {
        let mut from = [0; 4];
        for (place, number) in from.iter_mut().zip(numbers) {
            *place = number;
        }
        Overflow { what, from }
    })
}

/// The product of `factors`.
pub fn product<I: IntoIterator<Item = u64, IntoIter: Clone>>(
    what: &'static str,
    factors: I,
) -> Result<u64, Overflow> {
    let factors = factors.into_iter();
    let result = factors.clone().try_fold(1u64, u64::checked_mul);
    checked(what, factors, result)
}

/// The sum of `terms`.
pub fn sum<I: IntoIterator<Item = u64, IntoIter: Clone>>(
    what: &'static str,
    terms: I,
) -> Result<u64, Overflow> {
    let terms = terms.into_iter();
    let result = terms.clone().try_fold(0u64, u64::checked_add);
    checked(what, terms, result)
}

/// The smallest multiple of `multiple` (not zero) that is at least `value`.
pub fn round_up(what: &'static str, value: u64, multiple: u64) -> Result<u64, Overflow> {
    product(what, [value.div_ceil(multiple), multiple])
}

/// The greatest common divisor; `gcd(0, b)` is `b`.
pub fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The least common multiple of two numbers that are not zero.
pub fn lcm(what: &'static str, a: u64, b: u64) -> Result<u64, Overflow> {
    product(what, [a / gcd(a, b), b])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_sums_stop_at_63_bits() {
        assert_eq!(product("p", [1 << 31, 1 << 31]), Ok(1 << 62));
        assert_eq!(
            product("the page", [1 << 32, 1 << 31])
                .unwrap_err()
                .to_string(),
            "the page of 4294967296, 2147483648 would need more than 63 bits"
        );
        assert!(product("p", [u64::MAX, u64::MAX]).is_err());
        assert_eq!(product("p", [u64::MAX, 0]), Ok(0));
        assert_eq!(sum("s", [MAX, 0]), Ok(MAX));
        assert!(sum("s", [MAX, 1]).is_err());
    }

    #[test]
    fn rounding_and_common_multiples() {
        assert_eq!(round_up("r", 1168, 576), Ok(1728));
        assert_eq!(round_up("r", 0, 576), Ok(0));
        assert!(round_up("r", MAX, MAX - 1).is_err());
        assert_eq!((gcd(128, 48), gcd(0, 7)), (16, 7));
        assert_eq!(lcm("l", 16, 48), Ok(48));
    }
}
