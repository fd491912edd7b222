//! Host memory, mapped from the system.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::reserved::{Backing, Reserved, piece_bytes};
use super::{Allocation, Memory, MemoryError, Place, Release, addressable};

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
        let alignment = addressable(alignment)?.max(natural_alignment(size));
        let data = map_aligned(size, alignment, Access::ReadWrite)
            .map_err(|error| refused(bytes, &error))?;
        // SAFETY: the range was just mapped.
        unsafe { ask_for_huge_pages(data, size) };
        Ok(Allocation {
            data,
            bytes: size,
            place: Place::Host,
            owner: Arc::new(Unmap),
        })
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let too_large = || MemoryError::TooLarge { bytes };
        let alignment = addressable(alignment)?.max(natural_alignment(size));
        let piece = piece_bytes(size, page_bytes()).ok_or_else(too_large)?;
        let whole = size.max(1).checked_next_multiple_of(piece);
        let whole = whole.ok_or_else(too_large)?;
        let start =
            map_aligned(whole, alignment, Access::None).map_err(|error| refused(bytes, &error))?;
        // SAFETY: the range was just mapped.
        unsafe { ask_for_huge_pages(start, whole) };
        // SAFETY: just mapped, in whole pieces of whole pages.
        let reserved = unsafe { Reserved::new(Box::new(Host), start, whole, piece) };
        Ok(reserved.into_allocation(size))
    }
}

// SAFETY: the system zeroes pages when they are first touched, and keeps them until they are mapped
// away.
unsafe impl Backing for Host {
    fn place(&self) -> Place {
        Place::Host
    }

    unsafe fn commit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the caller's contract: reserved pages that nobody uses.
        if unsafe { libc::mprotect(data.as_ptr().cast(), bytes, access) } != 0 {
            return Err(refused(bytes as u64, &io::Error::last_os_error()));
        }
        // SAFETY: as above.
        unsafe { ask_for_huge_pages(data, bytes) };
        Ok(())
    }

    unsafe fn decommit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError> {
        // A fresh mapping over the old one: only that gives back what the system had promised too.
        let flags = RESERVE_FLAGS | libc::MAP_FIXED;
        // SAFETY: the caller's contract: whole pages of the reservation that nobody uses.
        let mapped =
            unsafe { libc::mmap(data.as_ptr().cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(refused(bytes as u64, &io::Error::last_os_error()));
        }
        Ok(())
    }

    unsafe fn zero(&self, ranges: &[(NonNull<u8>, usize)]) -> Result<(), MemoryError> {
        for &(data, bytes) in ranges {
            // SAFETY: the caller's contract.
            unsafe { zero_mapped(data, bytes) };
        }
        Ok(())
    }

    unsafe fn unreserve(&self, data: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { unmap(data.as_ptr(), bytes) };
    }
}

fn refused(bytes: u64, error: &io::Error) -> MemoryError {
    MemoryError::Host {
        bytes,
        reason: error.to_string(),
    }
}

/// Large memory starts at a huge page.
fn natural_alignment(size: usize) -> usize {
    if size >= HUGE_PAGE { HUGE_PAGE } else { 1 }
}

/// Advice only; a kernel without huge pages refuses it and loses nothing.
///
/// # Safety
/// The range is mapped and starts at a page.
unsafe fn ask_for_huge_pages(data: NonNull<u8>, size: usize) {
    if size >= HUGE_PAGE {
        // SAFETY: the caller's contract.
        unsafe { libc::madvise(data.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
    }
}

/// Zeroes memory of a mapping of ours. Whole pages go back to the system, which zeroes them when they
/// are next touched: a piece of a large reservation may be larger than what the machine has.
///
/// # Safety
/// The range is mapped by [`map_aligned`], readable and writable, and nothing else uses it.
unsafe fn zero_mapped(data: NonNull<u8>, bytes: usize) {
    let page = page_bytes();
    let before = data.addr().get().wrapping_neg() % page;
    let whole = bytes.saturating_sub(before) / page * page;
    // SAFETY: the caller's contract; all parts lie in the range.
    unsafe {
        let pages = data.add(before.min(bytes));
        // Pages that are locked stay.
        if whole == 0 || libc::madvise(pages.as_ptr().cast(), whole, libc::MADV_DONTNEED) != 0 {
            ptr::write_bytes(data.as_ptr(), 0, bytes);
            return;
        }
        ptr::write_bytes(data.as_ptr(), 0, before);
        ptr::write_bytes(pages.add(whole).as_ptr(), 0, bytes - before - whole);
    }
}

/// What access is given and taken away in; more than [`PAGE`] on some machines.
fn page_bytes() -> usize {
    // SAFETY: a question about a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(PAGE).max(PAGE)
}

/// A mapping that promises no memory yet.
const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// What may be done with a mapping.
#[derive(Clone, Copy)]
enum Access {
    ReadWrite,
    /// Only the addresses are taken.
    None,
}

/// Maps `size` bytes at a multiple of `alignment`; what was mapped too much is given back at once.
fn map_aligned(size: usize, alignment: usize, access: Access) -> io::Result<NonNull<u8>> {
    // An empty mapping does not exist; an empty allocation still has an address of its own.
    let size = mapped_size(size);
    let slack = if alignment > PAGE { alignment } else { 0 };
    let total = size.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
    let (protection, flags) = match access {
        Access::ReadWrite => (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        ),
        Access::None => (libc::PROT_NONE, RESERVE_FLAGS),
    };
    // SAFETY: a new private mapping without a file, at an address of the system's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), total, protection, flags, -1, 0) };
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
    use std::slice::from_ref;

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

    /// Pages of the allocation that take memory.
    fn resident_pages(allocation: &Allocation) -> usize {
        let mut pages = vec![0u8; allocation.bytes / page_bytes()];
        // SAFETY: the range is reserved, and there is a byte for each page.
        let asked = unsafe {
            libc::mincore(
                allocation.data.as_ptr().cast(),
                allocation.bytes,
                pages.as_mut_ptr(),
            )
        };
        assert_eq!(asked, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn reserved_memory_comes_zeroed_and_goes_piece_by_piece() {
        let bytes = 64 * page_bytes() as u64;
        let page = page_bytes() as u64;
        let allocation = Host.reserve(bytes, 256).unwrap();
        let reserved = allocation.reserved().unwrap();
        let slice = |start: u64, end: u64| {
            // SAFETY: the tests ask for committed bytes only.
            unsafe {
                std::slice::from_raw_parts_mut(
                    allocation.data().as_ptr().add(start as usize),
                    (end - start) as usize,
                )
            }
        };
        // Half a page more than three, at two places.
        let (near, far) = (0..3 * page + 7, 32 * page..33 * page);
        reserved.grow(&[near.clone(), far.clone()]).unwrap();
        for range in [near.clone(), far.clone()] {
            assert!(slice(range.start, range.end).iter().all(|&byte| byte == 0));
            slice(range.start, range.end).fill(7);
        }
        assert_eq!(resident_pages(&allocation), 5);
        // Bytes that stay are as they were, the rest of their page comes back zeroed.
        slice(3 * page, 4 * page).fill(9);
        reserved.grow(from_ref(&(3 * page + 7..5 * page))).unwrap();
        assert!(slice(0, 3 * page).iter().all(|&byte| byte == 7));
        assert!(slice(3 * page, 3 * page + 7).iter().all(|&byte| byte == 9));
        assert!(slice(3 * page + 7, 5 * page).iter().all(|&byte| byte == 0));
        reserved.shrink(&[0..page, far]).unwrap();
        assert_eq!(resident_pages(&allocation), 2);
        assert!(slice(0, page).iter().all(|&byte| byte == 7));
        // What is undone is gone.
        let taken = reserved.grow(from_ref(&(page..2 * page))).unwrap();
        slice(page, 2 * page).fill(1);
        reserved.give_back(taken);
        assert_eq!(resident_pages(&allocation), 2);
        reserved.grow(from_ref(&(page..2 * page))).unwrap();
        assert!(slice(page, 2 * page).iter().all(|&byte| byte == 0));
    }

    #[test]
    fn zeroing_reaches_the_last_byte_and_no_further() {
        let page = page_bytes();
        let bytes = 4 * page;
        let allocation = Host.allocate(bytes as u64, 256).unwrap();
        // SAFETY: the allocation holds that many bytes and nothing else uses it.
        let slice = unsafe { std::slice::from_raw_parts_mut(allocation.data.as_ptr(), bytes) };
        for (start, end) in [
            (0, bytes),
            (0, 1),
            (7, page),
            (page, 2 * page),
            (page - 1, page + 1),
            (1, 3 * page - 1),
            (page, 3 * page + 1),
            (page - 1, 3 * page),
            (page, page),
            (5, 5),
        ] {
            slice.fill(3);
            // SAFETY: as above.
            unsafe { zero_mapped(allocation.data.add(start), end - start) };
            for (i, &byte) in slice.iter().enumerate() {
                let expected = if (start..end).contains(&i) { 0 } else { 3 };
                assert_eq!(byte, expected, "byte {i} of {start}..{end}");
            }
        }
    }

    #[test]
    fn addresses_are_reserved_without_the_memory() {
        // More than any machine has. A system that counts what it promises counts nothing here.
        let allocation = Host.reserve(1 << 44, 256).unwrap();
        let reserved = allocation.reserved().unwrap();
        reserved.grow(from_ref(&((1 << 44) - 1..1 << 44))).unwrap();
        // SAFETY: the last byte is committed.
        unsafe { allocation.data().as_ptr().add((1 << 44) - 1).write(1) };
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
