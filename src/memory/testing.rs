//! Memory for tests: it counts what is out, and fails when it is told to.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Adopted, Allocation, Memory, MemoryError, Place, Release};

/// Wraps another memory, counts its allocations and refuses one of them.
pub struct Faulty<M> {
    inner: M,
    counts: Arc<Counts>,
    /// Which allocation fails, counted from 0.
    fail_at: usize,
}

/// What was taken and what is still out.
#[derive(Debug, Default)]
pub struct Counts {
    /// Allocations asked for.
    pub asked: AtomicUsize,
    /// Allocations that did not come back yet.
    pub out: AtomicUsize,
}

struct Counted {
    inner: Allocation,
    counts: Arc<Counts>,
}

impl<M: Memory> Faulty<M> {
    /// Wraps `inner`; allocation number `fail_at` fails.
    pub fn new(inner: M, fail_at: usize) -> Faulty<M> {
        Faulty {
            inner,
            counts: Arc::default(),
            fail_at,
        }
    }

    /// What was taken so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl<M: Memory> Memory for Faulty<M> {
    fn allocate(&self, bytes: u64, alignment: u64) -> Result<Allocation, MemoryError> {
        if self.counts.asked.fetch_add(1, Ordering::Relaxed) == self.fail_at {
            return Err(MemoryError::Host {
                bytes,
                reason: "told to fail".to_owned(),
            });
        }
        let inner = self.inner.allocate(bytes, alignment)?;
        self.counts.out.fetch_add(1, Ordering::Relaxed);
        Ok(Allocation {
            data: inner.data(),
            bytes: inner.bytes,
            place: inner.place.clone(),
            owner: Arc::new(Counted {
                inner,
                counts: Arc::clone(&self.counts),
            }),
        })
    }
}

impl Release for Counted {
    fn release(&self, data: NonNull<u8>, _bytes: usize) {
        assert_eq!(data, self.inner.data());
        self.counts.out.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A buffer of the test's own, adopted. It lives as long as the test program.
pub fn adopted_buffer(bytes: usize) -> Adopted {
    let buffer: &'static mut [u8] = Vec::leak(vec![0xff; bytes]);
    let start = NonNull::from(&mut *buffer).cast();
    // SAFETY: the buffer is leaked, and nothing else has it.
    unsafe { Adopted::new(start, bytes, Place::Host) }
}
