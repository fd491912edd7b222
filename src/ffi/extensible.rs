//! Structs that grow: the caller says how much of one it knows.

use std::mem::MaybeUninit;
use std::ptr;

use super::input;
use super::status::Failure;

/// A `repr(C)` struct that starts with `struct_size: usize`, has no padding at its end, and whose
/// other fields may all be zero bytes.
///
/// # Safety
/// The implementor keeps that promise; every field added later reads zero as the old behaviour.
pub(super) unsafe trait Extensible: Copy {
    /// What messages call it.
    const NAME: &'static str;
    /// Bytes of the first published layout; a smaller one is refused.
    const MIN_SIZE: usize;
}

/// Declares a struct extensible from `$last` on: the field that ended its first published layout.
macro_rules! extensible {
    ($name:ident, $last:ident: $type:ty) => {
        // SAFETY: plain integers and pointers; the assertions check the rest.
        unsafe impl $crate::ffi::extensible::Extensible for $name {
            const NAME: &'static str = stringify!($name);
            const MIN_SIZE: usize = std::mem::offset_of!($name, $last) + size_of::<$type>();
        }
        const _: () = {
            assert!(std::mem::offset_of!($name, struct_size) == 0);
            // A field appended later must not land in padding that older callers leave unset.
            assert!(std::mem::offset_of!($name, $last) + size_of::<$type>() == size_of::<$name>());
        };
    };
}
pub(super) use extensible;

/// No struct is longer; a larger size is a mistake, not a newer caller.
const MAX_SIZE: usize = 4096;

/// Reads a caller's struct: what the caller does not know is zero, and what this library does not
/// know must be.
///
/// # Safety
/// `given` is NULL or valid for reads of the `struct_size` bytes that its first field states.
pub(super) unsafe fn read<T: Extensible>(given: *const T) -> Result<T, Failure> {
    // SAFETY: the caller's contract.
    let size = unsafe { stated_size(given) }?;
    let bytes = given.cast::<u8>();
    for i in size_of::<T>()..size {
        // SAFETY: inside the stated size.
        if unsafe { bytes.add(i).read() } != 0 {
            return Err(Failure::invalid(
                "struct_size",
                format!(
                    "{} sets a field that this library, which knows {} bytes of it, does not know",
                    T::NAME,
                    size_of::<T>()
                ),
            ));
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold that many bytes; zero is a value of every field.
    unsafe {
        ptr::copy_nonoverlapping(bytes, value.as_mut_ptr().cast(), size.min(size_of::<T>()));
        Ok(value.assume_init())
    }
}

/// Where a result goes: a caller's struct, all zero but its size until it is filled.
pub(super) struct Out<T> {
    place: *mut T,
    size: usize,
}

/// Checks and clears a caller's struct.
///
/// # Safety
/// `place` is NULL or valid for reads and writes of the `struct_size` bytes that its first field
/// states, until the returned value is dropped.
pub(super) unsafe fn out<T: Extensible>(place: *mut T) -> Result<Out<T>, Failure> {
    // SAFETY: the caller's contract.
    let size = unsafe { stated_size(place) }?;
    let rest = size - size_of::<usize>();
    // SAFETY: inside the stated size.
    unsafe { ptr::write_bytes(place.cast::<u8>().add(size_of::<usize>()), 0, rest) };
    Ok(Out { place, size })
}

impl<T: Extensible> Out<T> {
    /// Fills the struct as far as the caller knows it.
    pub(super) fn fill(self, value: T) {
        let skip = size_of::<usize>();
        let known = self.size.min(size_of::<T>());
        let from = ptr::from_ref(&value).cast::<u8>();
        // SAFETY: `out` checked the place; both sides hold `known` bytes.
        unsafe {
            let to = self.place.cast::<u8>().add(skip);
            ptr::copy_nonoverlapping(from.add(skip), to, known - skip);
        }
    }
}

/// # Safety
/// `given` is NULL or valid for a read of its first field.
unsafe fn stated_size<T: Extensible>(given: *const T) -> Result<usize, Failure> {
    input::aligned(given, T::NAME)?;
    // SAFETY: the first field, by the trait's and the caller's contract.
    let size = unsafe { given.cast::<usize>().read() };
    // A compiler rounds a struct up to its alignment, so other sizes are mistakes, not older layouts.
    let is_rounded = size.is_multiple_of(align_of::<T>());
    if size < T::MIN_SIZE || size > MAX_SIZE || !is_rounded {
        return Err(Failure::invalid(
            "struct_size",
            format!(
                "{}.struct_size is {size}; it must be at least {} (this library knows {}): start from its _INIT macro",
                T::NAME,
                T::MIN_SIZE,
                size_of::<T>()
            ),
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Growing {
        struct_size: usize,
        first: u64,
        second: u64,
    }
    // SAFETY: integers only. The first layout ended with `first`.
    unsafe impl Extensible for Growing {
        const NAME: &'static str = "growing";
        const MIN_SIZE: usize = 16;
    }

    fn given(struct_size: usize, rest: [u64; 4]) -> [u64; 5] {
        [struct_size as u64, rest[0], rest[1], rest[2], rest[3]]
    }

    #[test]
    fn older_and_newer_callers_are_read() {
        let read_from = |words: &[u64; 5]| {
            // SAFETY: five words are there, and no size below states more.
            unsafe { read(words.as_ptr().cast::<Growing>()) }
        };
        let older = read_from(&given(16, [1, 9, 9, 9])).unwrap();
        assert_eq!((older.first, older.second), (1, 0));
        let newer = read_from(&given(40, [1, 2, 0, 0])).unwrap();
        assert_eq!((newer.first, newer.second), (1, 2));
        assert!(read_from(&given(40, [1, 2, 0, 1])).is_err());
        assert!(read_from(&given(8, [1, 2, 0, 0])).is_err());
        assert!(read_from(&given(23, [1, 2, 0, 0])).is_err());
        assert!(read_from(&given(1 << 20, [1, 2, 0, 0])).is_err());
    }

    #[test]
    fn nothing_is_written_past_what_the_caller_knows() {
        let mut words = given(16, [7, 7, 7, 7]);
        let value = Growing {
            struct_size: 24,
            first: 1,
            second: 2,
        };
        // SAFETY: five words are there.
        unsafe { out(words.as_mut_ptr().cast::<Growing>()) }
            .unwrap()
            .fill(value);
        assert_eq!(words, [16, 1, 7, 7, 7]);
        let mut words = given(40, [7, 7, 7, 7]);
        // SAFETY: five words are there.
        unsafe { out(words.as_mut_ptr().cast::<Growing>()) }
            .unwrap()
            .fill(value);
        assert_eq!(words, [40, 1, 2, 0, 0]);
    }
}
