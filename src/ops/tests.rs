//! The bodies, compared with `half` and with slow, obvious references.

use crate::kernels::{Form, RowType, Rows, Slots, kvpages_host_gather, kvpages_host_write};
use half::{bf16, f16};
use proptest::prelude::*;

/// Rows of one head: `keys` as one token's elements, `cache` as what is stored.
fn rows(keys: &mut [u8], cache: &mut [u8], elements: usize, stored_bytes: u64) -> Rows {
    Rows {
        cache: cache.as_mut_ptr(),
        keys: keys.as_mut_ptr(),
        values: std::ptr::null_mut(),
        key_token: 0,
        key_head: 0,
        value_token: 0,
        value_head: 0,
        kernel_block: 0,
        token: 0,
        head: 0,
        content: stored_bytes,
        value: 0,
        kernel_block_slots: 1,
        heads: 1,
        key_elements: elements as u64,
        value_elements: 0,
        element: stored_bytes,
        key_scale: 1.0,
        value_scale: 1.0,
    }
}

const ONE: [i64; 1] = [0];

fn one_slot() -> Slots {
    Slots {
        slots: ONE.as_ptr(),
        blocks: std::ptr::null(),
        block_slots: 1,
        count: 1,
    }
}

fn row_bytes(row_type: RowType) -> usize {
    match row_type {
        RowType::F32 => 4,
        RowType::F16 | RowType::Bf16 => 2,
    }
}

/// Stores one token's elements.
fn store(row: &[u8], row_type: RowType, form: Form, stored_bytes: usize, room: usize) -> Vec<u8> {
    let mut row = row.to_vec();
    let mut cache = vec![0xaa; room];
    let elements = row.len() / row_bytes(row_type);
    let rows = rows(&mut row, &mut cache, elements, stored_bytes as u64);
    // SAFETY: both buffers hold the elements.
    unsafe { kvpages_host_write(form as u32, row_type as u32, &rows, &one_slot()) };
    cache
}

/// Reads one token's elements.
fn fetch(cache: &[u8], row_type: RowType, form: Form, stored_bytes: usize, n: usize) -> Vec<u8> {
    let mut cache = cache.to_vec();
    let mut row = vec![0xaa; n * row_bytes(row_type)];
    let rows = rows(&mut row, &mut cache, n, stored_bytes as u64);
    // SAFETY: both buffers hold the elements.
    unsafe { kvpages_host_gather(form as u32, row_type as u32, &rows, &one_slot()) };
    row
}

fn bytes16(values: impl Iterator<Item = u16>) -> Vec<u8> {
    values.flat_map(u16::to_ne_bytes).collect()
}

fn of_bytes16(bytes: &[u8]) -> Vec<u16> {
    let pairs = bytes.chunks_exact(2);
    pairs
        .map(|pair| u16::from_ne_bytes([pair[0], pair[1]]))
        .collect()
}

fn bytes32(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn of_bytes32(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

fn same_bits(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan() && a.signum() == b.signum())
}

/// The numbers of an fp8 format, by its definition. `None` is NaN.
fn fp8_number(code: u8, mantissa_bits: u32, bias: i32, form: Form) -> Option<f64> {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let rest = u32::from(code & 0x7f);
    let (exponent, mantissa) = (rest >> mantissa_bits, rest & ((1 << mantissa_bits) - 1));
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    match form {
        Form::F8E4m3 if rest == 0x7f => return None,
        Form::F8E5m2 if exponent == 31 => {
            return (mantissa == 0).then_some(sign * f64::INFINITY);
        }
        _ => {}
    }
    Some(match exponent {
        0 => sign * fraction * 2f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2f64.powi(exponent as i32 - bias),
    })
}

const FORMATS: [(Form, u32, i32); 2] = [(Form::F8E4m3, 3, 7), (Form::F8E5m2, 2, 15)];

/// The nearest finite code, of two equally near ones the even one.
fn fp8_code(value: f32, (form, mantissa_bits, bias): (Form, u32, i32)) -> Option<u8> {
    if value.is_nan() {
        return None;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let value = f64::from(value.abs()).min(1e6);
    let distance = |code: u8| {
        let number = fp8_number(code, mantissa_bits, bias, form);
        number.filter(|n| n.is_finite()).map(|n| (n - value).abs())
    };
    let mut best = (f64::INFINITY, 0u8);
    for code in 0..0x7f {
        let Some(distance) = distance(code) else {
            continue;
        };
        if distance < best.0 || (distance == best.0 && code % 2 == 0) {
            best = (distance, code);
        }
    }
    Some(sign | best.1)
}

fn check_fp8(values: &[f32], row: &[u8], row_type: RowType) {
    for format in FORMATS {
        let stored = store(row, row_type, format.0, 1, values.len());
        for (&value, &code) in values.iter().zip(&stored) {
            match fp8_code(value, format) {
                Some(wanted) => assert_eq!(code, wanted, "{value} in {:?}", format.0),
                None => assert_eq!(code & 0x7f, 0x7f, "{value} in {:?}", format.0),
            }
        }
    }
}

#[test]
fn all_f16_and_bf16_convert_as_half_does() {
    let all = bytes16(0..=u16::MAX);
    let n = 1 << 16;
    let f16s: Vec<f32> = (0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).collect();
    let bf16s: Vec<f32> = (0..=u16::MAX)
        .map(|b| bf16::from_bits(b).to_f32())
        .collect();

    for (row_type, form, values) in [
        (RowType::F16, Form::F16, &f16s),
        (RowType::Bf16, Form::Bf16, &bf16s),
    ] {
        // To f32 and back.
        let as_f32 = of_bytes32(&store(&all, row_type, Form::F32, 4, 4 * n));
        let fetched = of_bytes32(&fetch(&all, RowType::F32, form, 2, n));
        for ((&wanted, &stored), &fetched) in values.iter().zip(&as_f32).zip(&fetched) {
            assert!(same_bits(wanted, stored) && same_bits(wanted, fetched));
        }
        let back = of_bytes16(&store(&bytes32(&as_f32), RowType::F32, form, 2, 2 * n));
        for (bits, &back) in (0..=u16::MAX).zip(&back) {
            if values[usize::from(bits)].is_nan() {
                let value = if form == Form::F16 {
                    f16::from_bits(back).to_f32()
                } else {
                    bf16::from_bits(back).to_f32()
                };
                assert!(value.is_nan());
            } else {
                assert_eq!(bits, back);
            }
        }
        check_fp8(values, &all, row_type);
    }
    // To each other.
    let to_bf16 = of_bytes16(&store(&all, RowType::F16, Form::Bf16, 2, 2 * n));
    let to_f16 = of_bytes16(&store(&all, RowType::Bf16, Form::F16, 2, 2 * n));
    for i in 0..n {
        let wanted = bf16::from_f32(f16s[i]);
        assert!(wanted.to_bits() == to_bf16[i] || wanted.is_nan());
        assert!(!wanted.is_nan() || bf16::from_bits(to_bf16[i]).is_nan());
        let wanted = f16::from_f32(bf16s[i]);
        assert!(wanted.to_bits() == to_f16[i] || wanted.is_nan(), "{i:#x}");
        assert!(!wanted.is_nan() || f16::from_bits(to_f16[i]).is_nan());
    }
}

#[test]
fn all_fp8_codes_mean_what_the_formats_say() {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    for (form, mantissa_bits, bias) in FORMATS {
        let numbers = of_bytes32(&fetch(&codes, RowType::F32, form, 1, 256));
        let as_f16 = of_bytes16(&fetch(&codes, RowType::F16, form, 1, 256));
        let as_bf16 = of_bytes16(&fetch(&codes, RowType::Bf16, form, 1, 256));
        for (i, &code) in codes.iter().enumerate() {
            match fp8_number(code, mantissa_bits, bias, form) {
                None => assert!(
                    numbers[i].is_nan()
                        && f16::from_bits(as_f16[i]).is_nan()
                        && bf16::from_bits(as_bf16[i]).is_nan()
                ),
                Some(wanted) => {
                    let wanted = wanted as f32;
                    assert_eq!(wanted.to_bits(), numbers[i].to_bits(), "{code:#x}");
                    assert_eq!(f16::from_f32(wanted).to_bits(), as_f16[i]);
                    assert_eq!(bf16::from_f32(wanted).to_bits(), as_bf16[i]);
                }
            }
        }
        // Codes come back as themselves; infinities saturate.
        let back = store(&bytes32(&numbers), RowType::F32, form, 1, 256);
        for (&code, &back) in codes.iter().zip(&back) {
            let number = fp8_number(code, mantissa_bits, bias, form);
            if number.is_some_and(f64::is_finite) {
                assert_eq!(code, back);
            }
        }
    }
}

#[test]
fn f32_near_every_step_of_every_format() {
    // All half-way points of fp8 and f16, and their neighbours.
    let mut values = vec![
        0.0f32,
        -0.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        f32::INFINITY,
    ];
    for bits in 0..0x7c00u16 {
        let low = f16::from_bits(bits).to_f32();
        let high = f16::from_bits(bits + 1).to_f32();
        let middle = if high.is_finite() {
            (low + high) / 2.0
        } else {
            65520.0
        };
        values.extend([middle.next_down(), middle, middle.next_up()]);
    }
    values.extend(values.clone().iter().map(|value| -value));
    values.push(f32::NAN);
    let row = bytes32(&values);
    check_fp8(&values, &row, RowType::F32);
    let as_f16 = of_bytes16(&store(&row, RowType::F32, Form::F16, 2, 2 * values.len()));
    let as_bf16 = of_bytes16(&store(&row, RowType::F32, Form::Bf16, 2, 2 * values.len()));
    for (i, &value) in values.iter().enumerate() {
        if value.is_nan() {
            assert!(f16::from_bits(as_f16[i]).is_nan() && bf16::from_bits(as_bf16[i]).is_nan());
        } else {
            assert_eq!(f16::from_f32(value).to_bits(), as_f16[i], "{value:e}");
            assert_eq!(bf16::from_f32(value).to_bits(), as_bf16[i], "{value:e}");
        }
    }
}

/// The scale of a run: the largest magnitude by the largest number.
fn scale_of(values: &[f32], largest: f32) -> f32 {
    let finite = values.iter().filter(|value| !value.is_nan());
    finite
        .fold(0f32, |most, value| most.max(value.abs()))
        .min(f32::MAX)
        / largest
}

fn whole(value: f32, scale: f32, limit: f32) -> f32 {
    if scale > 0.0 {
        (value / scale).clamp(-limit, limit).round_ties_even()
    } else {
        0.0
    }
}

proptest! {
    #[test]
    fn any_f32_converts_as_half_and_the_definitions_do(bits in proptest::collection::vec(any::<u32>(), 1..64)) {
        let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        let row = bytes32(&values);
        check_fp8(&values, &row, RowType::F32);
        let as_f16 = of_bytes16(&store(&row, RowType::F32, Form::F16, 2, 2 * values.len()));
        let as_bf16 = of_bytes16(&store(&row, RowType::F32, Form::Bf16, 2, 2 * values.len()));
        for (i, &value) in values.iter().enumerate() {
            prop_assert!(value.is_nan() == f16::from_bits(as_f16[i]).is_nan());
            prop_assert!(value.is_nan() == bf16::from_bits(as_bf16[i]).is_nan());
            if !value.is_nan() {
                prop_assert_eq!(f16::from_f32(value).to_bits(), as_f16[i]);
                prop_assert_eq!(bf16::from_f32(value).to_bits(), as_bf16[i]);
            }
        }
    }

    #[test]
    fn scales_of_a_token_and_head(
        values in proptest::collection::vec(
            prop_oneof![8 => -100f32..100.0, 1 => Just(0.0), 1 => any::<f32>()], 1..20),
    ) {
        let mut values = values;
        values.extend(values.clone());
        let n = values.len();
        let row = bytes32(&values);
        let has_nan = values.iter().any(|value| value.is_nan());

        let stored = store(&row, RowType::F32, Form::ScaledInt8, 1, n + 4);
        let scale = scale_of(&values, 127.0);
        let kept = of_bytes32(&stored[n..])[0];
        prop_assert!((has_nan && kept.is_nan()) || kept == scale);
        let fetched = of_bytes32(&fetch(&stored, RowType::F32, Form::ScaledInt8, 1, n));
        for i in 0..n {
            if has_nan {
                prop_assert!(fetched[i].is_nan());
            } else {
                let code = whole(values[i], scale, 127.0);
                prop_assert_eq!(stored[i] as i8, code as i8);
                prop_assert_eq!(fetched[i], code * scale);
            }
        }

        let stored = store(&row, RowType::F32, Form::ScaledInt4, 1, n / 2 + 4);
        let scale = scale_of(&values, 7.0);
        let fetched = of_bytes32(&fetch(&stored, RowType::F32, Form::ScaledInt4, 1, n));
        for i in 0..n {
            if has_nan {
                prop_assert!(fetched[i].is_nan());
            } else {
                let code = whole(values[i], scale, 7.0);
                let nibble = (stored[i / 2] >> (4 * (i % 2))) & 15;
                prop_assert_eq!(nibble, (code as i8 as u8) & 15);
                prop_assert_eq!(fetched[i], code * scale);
            }
        }

        for ((format, scaled), largest) in FORMATS
            .into_iter()
            .zip([Form::ScaledE4m3, Form::ScaledE5m2])
            .zip([448.0, 57344.0])
        {
            let stored = store(&row, RowType::F32, scaled, 1, n + 4);
            let scale = scale_of(&values, largest);
            prop_assert_eq!(of_bytes32(&stored[n..])[0], scale);
            let divisor = if scale > 0.0 { scale } else { 1.0 };
            let fetched = of_bytes32(&fetch(&stored, RowType::F32, scaled, 1, n));
            for i in 0..n {
                match fp8_code(values[i] / divisor, format) {
                    Some(code) => prop_assert_eq!(stored[i], code),
                    None => prop_assert!(fetched[i].is_nan()),
                }
            }
        }
    }
}

#[test]
fn tensor_scales_divide_and_multiply() {
    let values = [1.0f32, -3.0, 1000.0, 0.1];
    let mut row = bytes32(&values);
    let mut cache = vec![0u8; 4];
    let mut rows = rows(&mut row, &mut cache, 4, 1);
    rows.key_scale = 4.0;
    // SAFETY: both buffers hold the elements.
    unsafe { kvpages_host_write(Form::F8E4m3 as u32, 0, &rows, &one_slot()) };
    let wanted: Vec<u8> = values
        .iter()
        .filter_map(|value| fp8_code(value / 4.0, FORMATS[0]))
        .collect();
    assert_eq!(cache, wanted);
    // SAFETY: as above.
    unsafe { kvpages_host_gather(Form::F8E4m3 as u32, 0, &rows, &one_slot()) };
    assert_eq!(of_bytes32(&row)[..3], [1.0, -3.0, 1024.0]);
}

/// Copies with every chain, cycle and tree that random pairs make.
mod copies {
    use super::*;
    use std::sync::Arc;

    use crate::kernels::SPARE;
    use crate::ops::blocks::{BlockCopy, Blocks, Place};
    use crate::ops::{OpsConfig, OpsError};

    fn blocks(num_blocks: u64) -> Blocks {
        let config = OpsConfig {
            num_blocks,
            present_blocks: Arc::new(num_blocks.into()),
            device: None,
            num_groups: 1,
            max_block_ids: 0,
            max_concurrency: 1,
        };
        Blocks::new(Vec::<Place>::new(), &config).unwrap()
    }

    proptest! {
        #[test]
        fn are_ordered_as_if_all_were_read_first(
            sources in proptest::collection::vec((any::<bool>(), 0i32..8), 8),
        ) {
            let copies: Vec<BlockCopy> = (0i32..)
                .zip(&sources)
                .filter(|(_, (used, _))| *used)
                .map(|(target, &(_, source))| BlockCopy { source, target })
                .collect();
            let mut blocks = blocks(8);
            for _ in 0..2 {
                let moves = blocks.moves_of(copies.iter().copied()).unwrap().to_vec();
                let mut memory: Vec<i32> = (0..8).collect();
                let mut spare = -1;
                for step in moves {
                    let value = if step.from == SPARE { spare } else { memory[step.from as usize] };
                    if step.to == SPARE { spare = value } else { memory[step.to as usize] = value }
                }
                let mut wanted: Vec<i32> = (0..8).collect();
                for copy in &copies {
                    wanted[copy.target as usize] = copy.source;
                }
                prop_assert_eq!(&memory, &wanted);
            }
        }
    }

    #[test]
    fn with_one_target_twice_are_refused() {
        let copies = [(0, 1), (2, 1)].map(|(source, target)| BlockCopy { source, target });
        let refused = blocks(3).moves_of(copies.into_iter()).map(<[_]>::to_vec);
        assert_eq!(refused, Err(OpsError::BlockTwice { index: 1, id: 1 }));
    }
}
