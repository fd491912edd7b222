//! Numbers as people write and read them.

use kvpages::dtype::Dtype;

/// What a unit is worth in bytes.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
];

/// Bytes from `80GiB`, `80GB`, `1.5 TiB` or `8_000_000_000`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err("a size cannot be negative".to_owned());
    }
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '_' && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim();
    let worth = UNITS.iter().find(|(name, _)| *name == unit);
    let Some((_, worth)) = worth else {
        return Err(format!(
            "\"{unit}\" is no unit of size; use B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
        ));
    };
    let number = number.replace('_', "");
    let (whole, part) = number.split_once('.').unwrap_or((&number, ""));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || (number.contains('.') && !digits(part)) {
        return Err("it does not begin with a number, such as 80GiB".to_owned());
    }
    let too_large = || "it is more than a 63-bit number of bytes".to_owned();
    let whole: u128 = whole.parse().map_err(|_| too_large())?;
    let scale = 10u128
        .checked_pow(u32::try_from(part.len()).map_err(|_| too_large())?)
        .ok_or_else(too_large)?;
    let part: u128 = format!("0{part}").parse().map_err(|_| too_large())?;
    let worth = u128::from(*worth);
    let sum = whole
        .checked_mul(worth)
        .and_then(|bytes| Some(bytes + part.checked_mul(worth)? / scale));
    let bytes = sum.filter(|bytes| *bytes <= i64::MAX as u128);
    let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
    match bytes.ok_or_else(too_large)? {
        0 => Err("it must be at least 1 byte".to_owned()),
        bytes => Ok(bytes),
    }
}

/// More than any number of tokens or ranks, and few enough that their bytes can be counted.
const MOST: u64 = 1 << 40;

/// A positive number of tokens, ranks or the like, with `_` between digits and k or Ki behind them.
pub fn count(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err("it cannot be negative".to_owned());
    }
    let (digits, factor) = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("k", 1000),
        ("K", 1 << 10),
        ("M", 1_000_000),
    ]
    .into_iter()
    .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))
    .unwrap_or((text, 1u64));
    let number: u64 = digits
        .replace('_', "")
        .parse()
        .map_err(|_| "it is no whole number, such as 131072, 131_072 or 128Ki".to_owned())?;
    match number.checked_mul(factor) {
        Some(0) => Err("it must be at least 1".to_owned()),
        Some(number) if number <= MOST => Ok(number),
        _ => Err(format!("it must be at most {}", grouped(MOST))),
    }
}

/// Bytes with a unit that leaves few digits: `64.00 GiB`.
pub fn size(bytes: u64) -> String {
    const STEPS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    let step = STEPS.into_iter().find(|(_, worth)| bytes >= *worth);
    match step {
        Some((unit, worth)) => {
            let number = bytes as f64 / worth as f64;
            let text = format!("{number:.2}");
            let text = text.trim_end_matches('0').trim_end_matches('.');
            format!("{text} {unit}")
        }
        None => format!("{bytes} B"),
    }
}

/// A whole number with a thin place between groups of three digits: `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Text without characters that a terminal obeys: names in a config may hold any. They are written as JSON
/// has them, so that JSON stays what it is. Lines and tabs are the tool's own.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\n' | '\t' => out.push(letter),
            letter if letter.is_control() => {
                out.push_str(&format!("\\u{:04x}", u32::from(letter)));
            }
            letter => out.push(letter),
        }
    }
    out
}

/// An element type by the names that configs and people use.
pub fn dtype(text: &str) -> Option<Dtype> {
    let text = text.strip_prefix("torch.").unwrap_or(text);
    Some(match text {
        "float64" | "f64" => Dtype::F64,
        "float32" | "float" | "fp32" | "f32" => Dtype::F32,
        "float16" | "half" | "fp16" | "f16" => Dtype::F16,
        "bfloat16" | "bf16" => Dtype::Bf16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, expected) in [
            ("80GiB", Some(80 << 30)),
            ("80 GiB", Some(80 << 30)),
            ("80GB", Some(80_000_000_000)),
            ("8_000_000_000", Some(8_000_000_000)),
            ("1.5GiB", Some(3 << 29)),
            ("0.1kB", Some(100)),
            ("512MiB", Some(512 << 20)),
            ("7Gi", Some(7 << 30)),
            ("0", None),
            ("0GiB", None),
            ("-1GiB", None),
            ("GiB", None),
            ("", None),
            (".5GiB", None),
            ("5.GiB", None),
            ("1.2.3GiB", None),
            ("80gigs", None),
            ("80 G", None),
            ("9223372036854775807", Some(i64::MAX as u64)),
            ("9223372036854775808", None),
            ("99999999TiB", None),
            ("340282366920938463463374607431768211456", None),
            ("0.00000000000000000000000000000000000000001GiB", None),
        ] {
            assert_eq!(bytes(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn counts_are_read() {
        for (text, expected) in [
            ("8", Some(8)),
            ("131_072", Some(131_072)),
            ("128Ki", Some(131_072)),
            ("128K", Some(131_072)),
            ("8k", Some(8000)),
            ("1M", Some(1_000_000)),
            ("1048576Mi", Some(1 << 40)),
            ("1048577Mi", None),
            ("9223372036854775807", None),
            ("0", None),
            ("-8", None),
            ("1.5k", None),
            ("eight", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(count(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn a_terminal_has_nothing_to_obey() {
        let text = "a\u{1b}[31m\u{9b}2J\u{7f}\r\n\tb";
        let expected = "a\\u001b[31m\\u009b2J\\u007f\\u000d\n\tb";
        assert_eq!(printable(text), expected);
    }

    #[test]
    fn numbers_are_written() {
        assert_eq!(size(80 << 30), "80 GiB");
        assert_eq!(size(3 << 29), "1.5 GiB");
        assert_eq!(size(1000), "1000 B");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(12), "12");
        assert_eq!(dtype("torch.bfloat16"), Some(Dtype::Bf16));
        assert_eq!(dtype("int7"), None);
    }
}
