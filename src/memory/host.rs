//! Host memory, mapped from the system.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{Allocation, Memory, MemoryError, Release, addressable};

/// Memory of the host. The system zeroes each page of it when it is first touched, so a large cache
/// costs nothing until it is used.
#[derive(Debug, Default, Clone, Copy)]
pub struct Host;

/// From this size on, huge pages are asked for, and the memory starts at a multiple of it.
const HUGE_PAGE: usize = 2 << 20;
/// What `mmap` itself aligns to, at least, on every system Linux runs on.
const PAGE: usize = 4096;

impl Memory for Host {
    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let wanted = addressable(alignment)?;
        let huge = size >= HUGE_PAGE;
        let alignment = wanted.max(if huge { HUGE_PAGE } else { 1 });
        let data = map_aligned(size, alignment).map_err(|error| MemoryError::Host {
            bytes,
            reason: error.to_string(),
        })?;
        if huge {
            // SAFETY: the range was just mapped. Advice only; a kernel without huge pages refuses it
            // and loses nothing.
            unsafe { libc::madvise(data.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Ok(Allocation {
            data,
            bytes: size,
            owner: Arc::new(Unmap),
        })
    }
}

/// Maps `size` bytes at a multiple of `alignment`; what was mapped too much is given back at once.
fn map_aligned(size: usize, alignment: usize) -> io::Result<NonNull<u8>> {
    // An empty mapping does not exist; an empty allocation still has an address of its own.
    let size = mapped_size(size);
    let slack = if alignment > PAGE { alignment } else { 0 };
    let total = size.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a new private mapping without a file, at an address of the system's choice.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            total,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start: *mut u8 = start.cast();
    let skip = start.align_offset(alignment.max(PAGE)).min(slack);
    // SAFETY: both ends lie inside the mapping, on page boundaries, and nothing uses them.
    unsafe {
        unmap(start, skip);
        let data = start.add(skip);
        unmap(data.add(size), slack - skip);
        Ok(NonNull::new_unchecked(data))
    }
}

fn mapped_size(size: usize) -> usize {
    size.max(1).next_multiple_of(PAGE)
}

/// # Safety
/// The range is mapped, starts at a page and is not used any more.
unsafe fn unmap(start: *mut u8, size: usize) {
    if size > 0 {
        // SAFETY: the caller's contract. It cannot fail on a range that is mapped.
        unsafe { libc::munmap(start.cast(), size) };
    }
}

struct Unmap;

impl Release for Unmap {
    fn release(&self, data: NonNull<u8>, bytes: usize) {
        // SAFETY: called once, with what `map_aligned` returned.
        unsafe { unmap(data.as_ptr(), mapped_size(bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_aligned_and_given_back() {
        for (bytes, alignment) in [(0, 256), (1, 256), (5000, 8192), (3 << 20, 256)] {
            let allocation = Host.allocate(bytes, alignment).unwrap();
            let address = allocation.data().as_ptr() as u64;
            assert_eq!(
                address % alignment.max(if bytes >= 2 << 20 { 2 << 20 } else { 1 }),
                0
            );
            // SAFETY: the allocation holds that many bytes and nothing else uses it.
            let slice = unsafe {
                std::slice::from_raw_parts_mut(allocation.data().as_ptr(), bytes as usize)
            };
            assert!(slice.iter().all(|&byte| byte == 0));
            slice.fill(7);
        }
    }

    #[test]
    fn too_much_is_an_error() {
        assert!(matches!(
            Host.allocate(1 << 62, 256),
            Err(MemoryError::Host { .. })
        ));
        assert!(matches!(
            Host.allocate(u64::MAX, 256),
            Err(MemoryError::TooLarge { .. })
        ));
    }
}
