//! Operations in a device's memory: the same bodies, launched on the caller's stream.
//!
//! What a call lists travels in the parameters of its launches, so nothing is staged: a call takes
//! no memory and waits for nothing, and a captured graph has all that it needs.

use std::slice;
use std::sync::Arc;

use super::OpsError;
use crate::cuda::{Context, DeviceAddress, Entered, StreamRef};
use crate::dtype::POISON;
use crate::kernels::device::{self, MAX_LAYERS, Way};
use crate::kernels::{Form, Loaded, Move, Piece, RowType, Rows, Slots};

/// The kernels of a device.
#[derive(Debug)]
pub(super) struct Device(Loaded);

impl Device {
    /// Loads all kernels, so that no call has to.
    pub(super) fn new(context: &Arc<Context>) -> Result<Device, OpsError> {
        Ok(Device(Loaded::new(context, device::names())?))
    }

    /// Clears blocks `ids` of all pieces.
    ///
    /// # Safety
    /// They are memory of the context, and nothing else uses them until the stream has done it.
    pub(super) unsafe fn zero(
        &self,
        pieces: &[Piece],
        ids: &[u32],
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        let entered = self.0.context().enter()?;
        if let Some((address, bytes)) = one_range(pieces, ids) {
            // SAFETY: the caller's contract.
            return Ok(unsafe { entered.fill(address, 0, bytes, stream) }?);
        }
        device::zero(pieces, ids, |launch, list| {
            // SAFETY: the caller's contract; the kernel takes such a list.
            Ok(unsafe { self.0.launch(&entered, launch, list, stream) }?)
        })
    }

    /// Fills blocks `ids` of all pieces with [`POISON`]: the driver fills the first, which is copied
    /// over the others. `copies` has room for as many.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn poison(
        &self,
        pieces: &[Piece],
        ids: &[u32],
        copies: &mut Vec<Move>,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        let entered = self.0.context().enter()?;
        if let Some((address, bytes)) = one_range(pieces, ids) {
            // SAFETY: the caller's contract.
            return Ok(unsafe { entered.fill(address, POISON, bytes, stream) }?);
        }
        let Some((first, others)) = ids.split_first() else {
            return Ok(());
        };
        for piece in pieces {
            if let Some((address, bytes)) = one_range(slice::from_ref(piece), &[*first]) {
                // SAFETY: the caller's contract.
                unsafe { entered.fill(address, POISON, bytes, stream) }?;
            }
        }
        copies.clear();
        copies.extend(others.iter().map(|&to| Move { from: *first, to }));
        device::copy(pieces, copies, false, |launch, list| {
            // SAFETY: the caller's contract; the kernel takes such a list.
            Ok(unsafe { self.0.launch(&entered, launch, list, stream) }?)
        })
    }

    /// Moves blocks in all pieces, in the order given where that matters.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn copy(
        &self,
        pieces: &[Piece],
        moves: &[Move],
        in_order: bool,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        let entered = self.0.context().enter()?;
        device::copy(pieces, moves, in_order, |launch, list| {
            // SAFETY: the caller's contract; the kernel takes such a list.
            Ok(unsafe { self.0.launch(&entered, launch, list, stream) }?)
        })
    }

    /// A call on rows, whose layers follow.
    pub(super) fn rows<'d>(
        &'d self,
        way: Way,
        num_slots: u64,
        stream: StreamRef,
    ) -> Result<RowCall<'d>, OpsError> {
        Ok(RowCall {
            device: self,
            entered: self.0.context().enter()?,
            way,
            num_slots,
            stream,
            waiting: None,
        })
    }
}

/// The bytes, when all blocks together are one range: the driver fills it faster than a kernel.
fn one_range(pieces: &[Piece], ids: &[u32]) -> Option<(DeviceAddress, usize)> {
    let ([piece], [first, ..]) = (pieces, ids) else {
        return None;
    };
    let follow = ids.windows(2).all(|pair| pair[1] == pair[0] + 1);
    if !follow || (piece.span != piece.step && ids.len() > 1) {
        return None;
    }
    let bytes = usize::try_from(piece.span).ok()?.checked_mul(ids.len())?;
    let address = piece.data as DeviceAddress + u64::from(*first) * piece.step;
    Some((address, bytes))
}

/// Layers of one call. Those that are alike go together, as many as a launch takes.
pub(super) struct RowCall<'d> {
    device: &'d Device,
    entered: Entered<'d>,
    way: Way,
    num_slots: u64,
    stream: StreamRef,
    waiting: Option<Alike>,
}

/// Layers whose rows are stored in one form.
struct Alike {
    form: (Form, RowType),
    slots: Slots,
    count: usize,
    layers: [Rows; MAX_LAYERS],
}

impl RowCall<'_> {
    /// Adds a layer.
    ///
    /// # Safety
    /// Rows and slots are memory of the context, and nothing else uses the rows and the slots named
    /// until the stream has done it.
    pub(super) unsafe fn add(
        &mut self,
        form: (Form, RowType),
        rows: Rows,
        slots: Slots,
    ) -> Result<(), OpsError> {
        match &mut self.waiting {
            Some(alike) if alike.form == form && alike.count < MAX_LAYERS => {
                alike.layers[alike.count] = rows;
                alike.count += 1;
            }
            _ => {
                // SAFETY: the caller's contract.
                unsafe { self.flush() }?;
                self.waiting = Some(Alike {
                    form,
                    slots,
                    count: 1,
                    layers: [rows; MAX_LAYERS],
                });
            }
        }
        Ok(())
    }

    /// Launches what was added and not launched yet.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    pub(super) unsafe fn flush(&mut self) -> Result<(), OpsError> {
        let Some(alike) = self.waiting.take() else {
            return Ok(());
        };
        let layers = &alike.layers[..alike.count];
        let kernels = &self.device.0;
        device::rows(
            self.way,
            alike.form,
            &alike.slots,
            self.num_slots,
            layers,
            |launch, batch| {
                // SAFETY: the caller's contract; the kernel takes such a batch.
                Ok(unsafe { kernels.launch(&self.entered, launch, batch, self.stream) }?)
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    fn piece(step: u64, span: u64) -> Piece {
        Piece {
            data: ptr::without_provenance_mut(0x1000),
            step,
            span,
        }
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_range() {
        let whole = piece(64, 64);
        assert_eq!(one_range(&[whole], &[3, 4, 5]), Some((0x1000 + 192, 192)));
        assert_eq!(one_range(&[piece(64, 32)], &[3]), Some((0x1000 + 192, 32)));
        for (pieces, ids) in [
            (&[whole][..], &[3, 5][..]),
            (&[whole], &[4, 3]),
            (&[whole], &[]),
            (&[piece(64, 32)], &[3, 4]),
            (&[whole, whole], &[3, 4]),
            (&[], &[3]),
        ] {
            assert_eq!(one_range(pieces, ids), None, "{pieces:?} {ids:?}");
        }
    }
}
