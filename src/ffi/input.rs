//! What comes in as pointers: checked once, here.

use std::ffi::{CStr, c_char};
use std::{ptr, slice};

use super::status::Failure;

/// A place for a result.
///
/// # Safety
/// `out` is NULL or valid for writes during the call.
pub(super) unsafe fn out<'a, T>(out: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    aligned(out, name)?;
    // SAFETY: the caller's contract, and the pointer was checked.
    Ok(unsafe { &mut *out })
}

/// A frozen struct.
///
/// # Safety
/// `given` is NULL or valid for reads during the call.
pub(super) unsafe fn one<'a, T>(given: *const T, name: &str) -> Result<&'a T, Failure> {
    aligned(given, name)?;
    // SAFETY: the caller's contract, and the pointer was checked.
    Ok(unsafe { &*given })
}

/// Refuses a pointer to nothing, and one that cannot point to a `T`.
pub(super) fn aligned<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::null(name));
    }
    if !pointer.is_aligned() {
        let message = format!(
            "{name} is {pointer:p}, which is not a multiple of {}",
            align_of::<T>()
        );
        return Err(Failure::invalid("misaligned_pointer", message));
    }
    Ok(())
}

/// A place for a result, all zero until it is filled: what stands there after a failure.
///
/// # Safety
/// As [`out`], and all zero bytes are a value of `T`.
pub(super) unsafe fn cleared<'a, T: Copy>(out: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    aligned(out, name)?;
    // SAFETY: the caller's contract, and the pointer was checked.
    unsafe {
        out.write_bytes(0, 1);
        Ok(&mut *out)
    }
}

/// Two places, both cleared before either is found missing.
pub(super) fn both<A, B>(a: Result<A, Failure>, b: Result<B, Failure>) -> Result<(A, B), Failure> {
    Ok((a?, b?))
}

/// An array.
///
/// # Safety
/// `data` is NULL or valid for reads of `count` values during the call.
pub(super) unsafe fn array<'a, T>(
    data: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check_array(data, count, name)?;
    // SAFETY: the caller's contract, and the pointer and the size were checked.
    Ok(unsafe { slice::from_raw_parts(data, count) })
}

/// An array that may lie where the host cannot read.
pub(super) fn address<T>(data: *const T, count: usize, name: &str) -> Result<*const [T], Failure> {
    if count == 0 {
        return Ok(&[] as *const [T]);
    }
    check_array(data, count, name)?;
    Ok(ptr::slice_from_raw_parts(data, count))
}

/// An array to fill.
///
/// # Safety
/// `data` is NULL or valid for writes of `count` values during the call.
pub(super) unsafe fn array_mut<'a, T>(
    data: *mut T,
    count: usize,
    name: &str,
) -> Result<&'a mut [T], Failure> {
    if count == 0 {
        return Ok(&mut []);
    }
    check_array(data, count, name)?;
    // SAFETY: the caller's contract, and the pointer and the size were checked.
    Ok(unsafe { slice::from_raw_parts_mut(data, count) })
}

fn check_array<T>(data: *const T, count: usize, name: &str) -> Result<(), Failure> {
    aligned(data, name)?;
    let fits = count
        .checked_mul(size_of::<T>())
        .is_some_and(|bytes| bytes <= isize::MAX as usize);
    if !fits {
        return Err(Failure::invalid(
            "overflow",
            format!("{name}: {count} entries do not fit in memory"),
        ));
    }
    Ok(())
}

/// A string that must be there.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string that is valid during the call.
pub(super) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's contract.
    let text = unsafe { optional_c_str(text) }.ok_or_else(|| Failure::null(name))?;
    utf8(text, name)
}

/// A string that may be left out.
///
/// # Safety
/// As [`text`].
pub(super) unsafe fn optional_text<'a>(
    text: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Failure> {
    // SAFETY: the caller's contract.
    unsafe { optional_c_str(text) }
        .map(|text| utf8(text, name))
        .transpose()
}

/// A string that may be left out, as it is.
///
/// # Safety
/// As [`text`].
pub(super) unsafe fn optional_c_str<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller's contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

fn utf8<'a>(text: &'a CStr, name: &str) -> Result<&'a str, Failure> {
    text.to_str().map_err(|error| {
        Failure::invalid(
            "not_utf8",
            format!(
                "{name} is \"{}\", which is not UTF-8: {error}",
                text.to_string_lossy()
            ),
        )
    })
}

/// An array of strings.
///
/// # Safety
/// `texts` is NULL or valid for reads of `count` pointers, each as in [`text`].
pub(super) unsafe fn texts<'a>(
    texts: *const *const c_char,
    count: usize,
    name: &str,
) -> Result<Vec<&'a str>, Failure> {
    // SAFETY: the caller's contract.
    let pointers = unsafe { array(texts, count, name) }?;
    let mut all = reserve(count, name)?;
    for (i, &pointer) in pointers.iter().enumerate() {
        // SAFETY: the caller's contract.
        all.push(unsafe { text(pointer, name) }.map_err(|failure| failure.at(i))?);
    }
    Ok(all)
}

/// Room for `count` values that a caller asked for.
pub(super) fn reserve<T>(count: usize, name: &str) -> Result<Vec<T>, Failure> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| {
        Failure::out_of_host_memory(format!("no memory for {count} entries of {name}"))
    })?;
    Ok(values)
}

/// A number that stands for one of a list.
pub(super) fn listed<T: TryFrom<u32>>(number: u32, name: &str) -> Result<T, Failure> {
    T::try_from(number).map_err(|_| {
        Failure::invalid(
            "unknown_value",
            format!("{name} is {number}, which is not one of its values"),
        )
    })
}

/// Refuses bits and reserved fields that this version does not know.
pub(super) fn known_bits(value: u32, known: u32, name: &str) -> Result<u32, Failure> {
    if value & !known != 0 {
        return Err(Failure::invalid(
            "unknown_value",
            format!("{name} is {value:#x}; this library knows the bits {known:#x}"),
        ));
    }
    Ok(value)
}

/// Copies values into a caller's array, or says how many there are.
///
/// # Safety
/// `data` is NULL or valid for writes of `capacity` values.
pub(super) unsafe fn copy_out<T: Copy>(
    values: &[T],
    data: *mut T,
    capacity: usize,
    out_count: &mut usize,
    name: &str,
) -> Result<(), Failure> {
    *out_count = values.len();
    if capacity < values.len() {
        return Err(Failure::too_small(name, values.len(), capacity));
    }
    // SAFETY: the caller's contract; at most `capacity` values.
    unsafe { array_mut(data, values.len(), name) }?.copy_from_slice(values);
    Ok(())
}

/// Copies a text and a NUL into a caller's buffer, or says how long it is.
///
/// # Safety
/// `buffer` is NULL or valid for writes of `capacity` bytes.
pub(super) unsafe fn copy_text_out(
    text: &str,
    buffer: *mut c_char,
    capacity: usize,
    out_length: &mut usize,
) -> Result<(), Failure> {
    if capacity <= text.len() {
        *out_length = text.len();
        return Err(Failure::too_small("buffer", text.len() + 1, capacity));
    }
    // SAFETY: the caller's contract; no more than `capacity` bytes.
    let buffer = unsafe { array_mut(buffer.cast::<u8>(), text.len() + 1, "buffer") }?;
    *out_length = text.len();
    buffer[..text.len()].copy_from_slice(text.as_bytes());
    buffer[text.len()] = 0;
    Ok(())
}
