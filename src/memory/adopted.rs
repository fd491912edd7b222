//! A buffer of the engine's, handed out piece by piece.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Allocation, Memory, MemoryError, Place, Release, addressable};

/// One buffer that the caller keeps. Pieces are cut from it in order, behind the last one that has
/// not come back.
#[derive(Debug, Clone)]
pub struct Adopted(Arc<Buffer>);

#[derive(Debug)]
struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    place: Place,
    used: Mutex<Used>,
}

/// What of the buffer is handed out.
#[derive(Debug, Default)]
struct Used {
    /// Where the last piece ends.
    bytes: usize,
    /// Where each piece starts and ends.
    pieces: Vec<(usize, usize)>,
}

// SAFETY: the buffer is only written while a piece is cut, under the lock; `new` promises that
// nothing else uses it.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Adopted {
    /// Memory from `bytes` bytes at `start`, which are at `place`.
    ///
    /// # Safety
    /// The buffer is valid for reads and writes, and nothing else uses it, as long as an `Adopted` or
    /// an allocation from it lives.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, place: Place) -> Adopted {
        Adopted(Arc::new(Buffer {
            start,
            bytes,
            place,
            used: Mutex::default(),
        }))
    }
}

impl Memory for Adopted {
    fn place(&self) -> Place {
        self.0.place.clone()
    }

    fn cannot_grow(&self) -> &'static str {
        "an adopted buffer is all there and cannot grow; host memory and CUDA virtual memory can"
    }

    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        let size = addressable(bytes)?;
        let buffer = &self.0;
        let mut used = buffer.used.lock().unwrap_or_else(PoisonError::into_inner);
        let free = buffer.bytes - used.bytes;
        // Plain numbers, since the addresses may be a device's.
        let alignment_bytes = addressable(alignment)?;
        let next = buffer.start.addr().get() + used.bytes;
        let skip = next.wrapping_neg() & (alignment_bytes - 1);
        let taken = skip.checked_add(size).filter(|&taken| taken <= free);
        let Some(taken) = taken else {
            return Err(MemoryError::AdoptedFull {
                bytes,
                alignment,
                free: free as u64,
                total: buffer.bytes as u64,
            });
        };
        let data = buffer.start.as_ptr().wrapping_add(used.bytes + skip);
        // Inside the buffer, so not NULL.
        let data = NonNull::new(data).unwrap_or(buffer.start);
        // SAFETY: `skip + size` bytes are left, and no piece that was handed out lies in them.
        unsafe { buffer.place.fill(&[(data, size)], 0) }?;
        let end = used.bytes + taken;
        used.pieces.push((end - size, end));
        used.bytes = end;
        Ok(Allocation {
            data,
            bytes: size,
            place: buffer.place.clone(),
            owner: Arc::clone(buffer) as Arc<dyn Release>,
        })
    }
}

impl Release for Buffer {
    fn release(&self, data: NonNull<u8>, bytes: usize) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let start = data.as_ptr() as usize - self.start.as_ptr() as usize;
        let piece = (start, start + bytes);
        if let Some(found) = used.pieces.iter().position(|&other| other == piece) {
            used.pieces.swap_remove(found);
        }
        used.bytes = used.pieces.iter().map(|&(_, end)| end).max().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_zeroed_and_come_back() {
        let mut buffer = vec![0xffu8; 4096];
        let start = NonNull::new(buffer.as_mut_ptr()).unwrap();
        // SAFETY: the vector outlives the memory and is not touched meanwhile.
        let memory = unsafe { Adopted::new(start, buffer.len(), Place::Host) };
        let first = memory.allocate(100, 256).unwrap();
        let second = memory.allocate(1000, 256).unwrap();
        let apart = second.data().as_ptr() as usize - first.data().as_ptr() as usize;
        assert_eq!(apart, 256);
        // SAFETY: the piece has 1000 bytes.
        let zero = unsafe { std::slice::from_raw_parts(second.data().as_ptr(), 1000) };
        assert!(zero.iter().all(|&byte| byte == 0));
        assert!(matches!(
            memory.allocate(4096, 256),
            Err(MemoryError::AdoptedFull { total: 4096, .. })
        ));
        // What comes back behind a piece that stays can be taken again.
        let (at_first, at_second) = (first.data(), second.data());
        drop(second);
        assert_eq!(memory.allocate(1, 256).unwrap().data(), at_second);
        drop(first);
        assert_eq!(memory.allocate(1, 256).unwrap().data(), at_first);
    }
}
