//! Addresses that are reserved first, and get memory behind them piece by piece.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Allocation, MemoryError, Place, Release};
use crate::log::{self, Level};

/// Most pieces of one reservation, so that the largest is grown with few calls to the system.
const MAX_PIECES: usize = 256;

/// What puts memory behind reserved addresses. Ranges are whole pieces.
///
/// # Safety
/// `commit` puts zeroed memory there that stays until `decommit`.
pub(super) unsafe trait Backing: Send + Sync {
    /// Where the memory is.
    fn place(&self) -> Place;

    /// Puts zeroed memory behind `bytes` at `data`; as before when it fails.
    ///
    /// # Safety
    /// The range is reserved, and nothing lies behind it.
    unsafe fn commit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError>;

    /// Takes away what `commit` put there.
    ///
    /// # Safety
    /// The range is what one call of `commit` had, and is not used any more.
    unsafe fn decommit(&self, data: NonNull<u8>, bytes: usize) -> Result<(), MemoryError>;

    /// Zeroes ranges behind which memory lies.
    ///
    /// # Safety
    /// They are committed, and nothing else uses them.
    unsafe fn zero(&self, ranges: &[(NonNull<u8>, usize)]) -> Result<(), MemoryError>;

    /// Gives the addresses back, behind which nothing lies any more.
    ///
    /// # Safety
    /// They are all of the reservation.
    unsafe fn unreserve(&self, data: NonNull<u8>, bytes: usize);
}

/// Reserved addresses.
pub struct Reserved {
    backing: Box<dyn Backing>,
    start: NonNull<u8>,
    bytes: usize,
    piece_bytes: usize,
    /// For each piece whether memory lies behind it.
    held: Mutex<Vec<bool>>,
    /// Bytes of the pieces that are held, for those who only look.
    held_bytes: AtomicUsize,
}

// SAFETY: an address and a length; what lies behind them changes under a lock.
unsafe impl Send for Reserved {}
// SAFETY: as above.
unsafe impl Sync for Reserved {}

/// Pieces that a call took, so that they can be given back.
#[derive(Debug)]
pub struct Taken(Vec<usize>);

/// Bytes of a piece, when memory comes in multiples of `granularity`.
pub(super) fn piece_bytes(bytes: usize, granularity: usize) -> Option<usize> {
    bytes
        .div_ceil(MAX_PIECES)
        .max(1)
        .checked_next_multiple_of(granularity)
}

impl Reserved {
    /// `bytes` reserved bytes at `start`, which is a multiple of what the backing demands, as
    /// `piece_bytes` is. Nothing lies behind them.
    ///
    /// # Safety
    /// The addresses are the caller's to give, in whole pieces, and nobody else uses them.
    pub(super) unsafe fn new(
        backing: Box<dyn Backing>,
        start: NonNull<u8>,
        bytes: usize,
        piece_bytes: usize,
    ) -> Reserved {
        Reserved {
            backing,
            start,
            bytes,
            piece_bytes,
            held: Mutex::new(vec![false; bytes.div_ceil(piece_bytes)]),
            held_bytes: AtomicUsize::new(0),
        }
    }

    /// The addresses as an allocation; what is taken and given back later shows in it.
    pub(super) fn into_allocation(self, bytes: usize) -> Allocation {
        Allocation {
            data: self.start,
            bytes,
            place: self.backing.place(),
            owner: Arc::new(self),
        }
    }

    /// Puts memory behind ranges of bytes that are not in use, and zeroes them. When it fails, all
    /// that it took is given back.
    pub fn grow(&self, fresh: &[Range<u64>]) -> Result<Taken, MemoryError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.overlaps(fresh, &held);
        let mut taken = Taken(Vec::new());
        let grown = self
            .take(fresh, &mut held, &mut taken)
            // SAFETY: memory lies there already, and the caller says that nobody uses it.
            .and_then(|()| unsafe { self.backing.zero(&old) });
        if let Err(error) = grown {
            self.give_back_pieces(taken, &mut held);
            return Err(error);
        }
        Ok(taken)
    }

    /// Bytes behind which memory lies.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed) as u64
    }

    /// Undoes a [`grow`](Self::grow).
    pub fn give_back(&self, taken: Taken) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.give_back_pieces(taken, &mut held);
    }

    /// Takes the memory away that `kept` ranges do not touch. A piece that the system does not take
    /// back stays, which an error tells.
    pub fn shrink(&self, kept: &[Range<u64>]) -> Result<(), MemoryError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted = vec![false; held.len()];
        for piece in kept.iter().flat_map(|range| self.pieces(range)) {
            wanted[piece] = true;
        }
        let mut result = Ok(());
        for piece in 0..held.len() {
            if held[piece] && !wanted[piece] {
                result = result.and(self.drop_piece(piece, &mut held));
            }
        }
        result
    }

    fn take(
        &self,
        fresh: &[Range<u64>],
        held: &mut [bool],
        taken: &mut Taken,
    ) -> Result<(), MemoryError> {
        for piece in fresh.iter().flat_map(|range| self.pieces(range)) {
            if held[piece] {
                continue;
            }
            let (data, bytes) = self.piece(piece);
            // SAFETY: the piece is reserved and not held.
            unsafe { self.backing.commit(data, bytes) }?;
            held[piece] = true;
            self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
            taken.0.push(piece);
        }
        Ok(())
    }

    fn give_back_pieces(&self, taken: Taken, held: &mut [bool]) {
        for piece in taken.0 {
            // What stays is zeroed before it is used again.
            let _ = self.drop_piece(piece, held);
        }
    }

    fn drop_piece(&self, piece: usize, held: &mut [bool]) -> Result<(), MemoryError> {
        let (data, bytes) = self.piece(piece);
        // SAFETY: the piece is held and nobody needs it.
        unsafe { self.backing.decommit(data, bytes) }?;
        held[piece] = false;
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The parts of `ranges` behind which memory lies.
    fn overlaps(&self, ranges: &[Range<u64>], held: &[bool]) -> Vec<(NonNull<u8>, usize)> {
        let mut found = Vec::new();
        for range in ranges {
            for piece in self.pieces(range).filter(|&piece| held[piece]) {
                let start = (piece * self.piece_bytes).max(range.start as usize);
                let end = ((piece + 1) * self.piece_bytes).min(range.end as usize);
                found.push((self.at(start), end - start));
            }
        }
        found
    }

    /// The pieces that a range touches. Ranges lie inside the reservation.
    fn pieces(&self, range: &Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let end = (range.end as usize).min(self.bytes);
        range.start as usize / self.piece_bytes..end.div_ceil(self.piece_bytes)
    }

    fn piece(&self, piece: usize) -> (NonNull<u8>, usize) {
        let start = piece * self.piece_bytes;
        (self.at(start), self.piece_bytes.min(self.bytes - start))
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        // Never NULL: it lies inside the reservation. Device addresses are not the host's to add to.
        let address = self.start.as_ptr().wrapping_add(offset);
        NonNull::new(address).unwrap_or(self.start)
    }
}

impl Release for Reserved {
    fn release(&self, _data: NonNull<u8>, _bytes: usize) {
        if let Err(error) = self.shrink(&[]) {
            log::say(Level::Warn, || {
                let bytes = self.held_bytes();
                format!("{bytes} bytes of memory were not given back: {error}")
            });
        }
        // SAFETY: the allocation is gone, and with it all users of the addresses.
        unsafe { self.backing.unreserve(self.start, self.bytes) };
    }

    fn reserved(&self) -> Option<&Reserved> {
        Some(self)
    }
}
