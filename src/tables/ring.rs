//! Pinned memory that the device copies from, page by page.

#![allow(unsafe_code)]

use std::slice;
use std::sync::Arc;

use crate::cuda::{Context, CudaError, Entered, Event, PinnedBuffer, StreamRef};

/// Calls that the host may be ahead of the device before it waits.
const NUM_PAGES: usize = 8;

/// Pages that are written by the host and read by the device, in turn. The event of a page is
/// recorded behind all that reads it, and waited for before the page is written again.
#[derive(Debug)]
pub(super) struct Ring {
    context: Arc<Context>,
    memory: PinnedBuffer,
    page_bytes: usize,
    events: Vec<Event>,
    /// Whether the event of a page was recorded, and not waited for since.
    is_pending: [bool; NUM_PAGES],
    /// Whether there may be work that no event is behind, and that could not be waited for.
    is_astray: bool,
    /// The page that is written next.
    next: usize,
}

impl Ring {
    pub fn new(context: &Arc<Context>, page_bytes: usize) -> Result<Ring, CudaError> {
        let total = page_bytes.checked_mul(NUM_PAGES);
        let memory = PinnedBuffer::new(context, total.unwrap_or(usize::MAX))?;
        let events: Result<Vec<Event>, CudaError> =
            (0..NUM_PAGES).map(|_| Event::new(context)).collect();
        Ok(Ring {
            context: Arc::clone(context),
            memory,
            page_bytes,
            events: events?,
            is_pending: [false; NUM_PAGES],
            is_astray: false,
            next: 0,
        })
    }

    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// How many pages there are, and how many the device may still read.
    pub fn num_pages(&self) -> (u64, u64) {
        let pending = self.is_pending.iter().filter(|is_pending| **is_pending);
        (NUM_PAGES as u64, pending.count() as u64)
    }

    /// The next page, which nobody reads any more.
    pub fn page(&mut self, entered: &Entered<'_>) -> Result<&mut [u8], CudaError> {
        if self.is_astray {
            let _beside = entered.beside_captures()?;
            entered.synchronise_all()?;
            self.is_astray = false;
        }
        if self.is_pending[self.next] {
            let _beside = entered.beside_captures()?;
            entered.wait_for(&self.events[self.next])?;
            self.is_pending[self.next] = false;
        }
        let start = self.next * self.page_bytes;
        // SAFETY: the page lies in the buffer, whose bytes were written when it was made. The device
        // does not read it: the event behind what did was reached.
        Ok(unsafe {
            slice::from_raw_parts_mut(self.memory.data().as_ptr().add(start), self.page_bytes)
        })
    }

    /// Notes that the page is read by what was put on the stream up to now, and goes on to the next.
    pub fn record(&mut self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        entered.record(&self.events[self.next], stream)?;
        self.is_pending[self.next] = true;
        self.next = (self.next + 1) % NUM_PAGES;
        Ok(())
    }

    /// Waits for all that was put on the stream. When even that fails, no page is written before all
    /// work of the context was waited for: an earlier copy would take what it was not meant to.
    pub fn settle(&mut self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        let _beside = entered.beside_captures();
        let waited = entered.synchronise(stream);
        if waited.is_err() || self.is_astray {
            self.is_astray = entered.synchronise_all().is_err();
        }
        waited
    }

    /// Notes that nobody reads any page.
    pub fn free_all(&mut self) {
        self.is_pending = [false; NUM_PAGES];
    }

    /// Makes the stream wait for what the last page was for, whichever stream that was put on.
    pub fn follow(&self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        let last = (self.next + NUM_PAGES - 1) % NUM_PAGES;
        if self.is_pending[last] {
            entered.wait_on_stream(stream, &self.events[last])?;
        }
        Ok(())
    }
}

impl Drop for Ring {
    /// Pinned memory must not go while a copy from it is under way.
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter_to_release() else {
            return;
        };
        let _beside = entered.beside_captures();
        let pending = self.events.iter().zip(self.is_pending);
        let mut pending = pending.filter(|(_, is_pending)| *is_pending);
        if pending.any(|(event, _)| entered.wait_for(event).is_err()) || self.is_astray {
            let _ = entered.synchronise_all();
        }
    }
}
