//! One colour a group: the hue says the kind, the shade which group of it.

use kvpages::spec::{AttentionKind, Spec};

/// A colour for each group.
pub fn of(specs: &[&Spec]) -> Vec<String> {
    let hues: Vec<u32> = specs.iter().map(|spec| hue(spec)).collect();
    let mut colours = Vec::with_capacity(specs.len());
    for (number, &base) in hues.iter().enumerate() {
        let alike = hues.iter().filter(|hue| **hue == base).count();
        let place = hues[..number].iter().filter(|hue| **hue == base).count();
        colours.push(shade(base, place, alike));
    }
    colours
}

fn hue(spec: &Spec) -> u32 {
    let Spec::Attention(attention) = spec else {
        return 150;
    };
    match attention.fields().kind {
        AttentionKind::SlidingWindow => 28,
        AttentionKind::ChunkedLocal => 45,
        AttentionKind::Cross | AttentionKind::EncoderOnly => 320,
        AttentionKind::Mla | AttentionKind::HiddenState => 265,
        AttentionKind::SlidingWindowMla => 10,
        _ => 212,
    }
}

/// From dark to light, and a little around the circle.
fn shade(base: u32, place: usize, alike: usize) -> String {
    let at = match alike {
        0 | 1 => 0.35,
        alike => place as f64 / (alike - 1) as f64,
    };
    let lightness = 0.36 + 0.34 * at;
    let hue = f64::from(base) - 12.0 + 26.0 * at;
    rgb(hue.rem_euclid(360.0), 0.62, lightness)
}

fn rgb(hue: f64, saturation: f64, lightness: f64) -> String {
    let chroma = (1.0 - (2.0 * lightness - 1.0).abs()) * saturation;
    let x = chroma * (1.0 - ((hue / 60.0).rem_euclid(2.0) - 1.0).abs());
    let (red, green, blue) = match hue as u32 / 60 {
        0 => (chroma, x, 0.0),
        1 => (x, chroma, 0.0),
        2 => (0.0, chroma, x),
        3 => (0.0, x, chroma),
        4 => (x, 0.0, chroma),
        _ => (chroma, 0.0, x),
    };
    let part = |value: f64| ((value + lightness - chroma / 2.0) * 255.0).round() as u8;
    format!("#{:02x}{:02x}{:02x}", part(red), part(green), part(blue))
}

/// The colour of a text that is read on another.
pub fn on(colour: &str) -> &'static str {
    let part = |from: usize| {
        let digits = colour.get(from..from + 2).unwrap_or("00");
        f64::from(u8::from_str_radix(digits, 16).unwrap_or(0)) / 255.0
    };
    let light = 0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5);
    if light > 0.55 { "#111" } else { "#fff" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_readable_and_differ() {
        let shades: Vec<String> = (0..16).map(|place| shade(28, place, 16)).collect();
        for (at, shade) in shades.iter().enumerate() {
            assert!(!shades[..at].contains(shade), "{shade}");
            assert_eq!(shade.len(), 7);
        }
        assert_eq!(on("#ffffff"), "#111");
        assert_eq!(on("#103060"), "#fff");
    }
}
