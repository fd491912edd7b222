//! Whole blocks: which bytes they are, and in which order they are copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{LayerMemory, Ops, OpsConfig, OpsError};
use crate::cuda::StreamRef;
use crate::dtype::POISON;
use crate::kernels::{self as kernel, Move, Piece, SPARE};

/// The block that nobody owns, and that kernels read where a row has no block.
const NULL_BLOCK: i32 = 0;

/// Which layers' blocks a call means.
#[derive(Debug, Clone, Copy)]
pub enum Selection<'a> {
    /// Those of all layers.
    All,
    /// Those of the groups and of the layers listed.
    Of {
        /// Numbers of groups.
        groups: &'a [u64],
        /// Numbers of layers.
        layers: &'a [usize],
    },
}

/// A block to copy over another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub source: i32,
    /// The block that is written.
    pub target: i32,
}

/// Where pages start: layers of several groups have theirs at one place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub allocation: usize,
    pub offset: u64,
    data: *mut u8,
    allocation_bytes: u64,
    step: u64,
    runs: u64,
    run_step: u64,
    /// The widest page that starts here.
    span: u64,
}

impl Place {
    pub(super) fn of(layer: &LayerMemory<'_>) -> Place {
        let runs = &layer.runs;
        Place {
            allocation: layer.allocation,
            offset: runs.offset_bytes,
            data: layer.data.as_ptr(),
            allocation_bytes: layer.allocation_bytes,
            step: runs.step_bytes,
            runs: runs.runs,
            run_step: runs.run_step_bytes,
            span: runs.span_bytes,
        }
    }

    /// Layers that share an allocation have one step, and more than one run only when alone.
    pub(super) fn is_at(&self, other: &Place) -> bool {
        self.allocation == other.allocation && self.offset == other.offset
    }
}

/// The room that calls on blocks need, taken once.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Blocks that the cache has now.
    present: Arc<AtomicU64>,
    max_ids: u64,
    /// In order of allocation and offset.
    places: Vec<Place>,
    /// For each place the widest page of the layers that a call means; 0 for none.
    spans: Vec<u64>,
    pieces: Vec<Piece>,
    /// The ids of a call, as they were when it began.
    ids: Vec<u32>,
    /// For each block the last call that listed it, and as which entry.
    listed: Vec<Listed>,
    generation: u32,
    pairs: Vec<Move>,
    ready: Vec<u32>,
    moves: Vec<Move>,
    spare: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Listed {
    /// The call that listed it as a target.
    target_in: u32,
    /// The entry that did.
    entry: u32,
    /// The call that listed it as a source.
    source_in: u32,
    /// How many entries still have to read it.
    readers: u32,
}

// SAFETY: the pointers lead into a cache, which `Ops::new` demands to stay; a call that writes
// through them has the value for itself, or writes only bytes that its caller says are its own.
unsafe impl Send for Blocks {}
// SAFETY: as above.
unsafe impl Sync for Blocks {}

impl Blocks {
    pub(super) fn new(places: Vec<Place>, config: &OpsConfig) -> Result<Blocks, OpsError> {
        let max_ids = match config.max_block_ids {
            0 => config.num_blocks,
            // No id can be listed twice.
            max => max.min(config.num_blocks),
        };
        let num_pieces = places.iter().map(|place| place.runs).sum();
        let mut listed = room(config.num_blocks)?;
        listed.resize(config.num_blocks as usize, Listed::default());
        let mut spans = room(places.len() as u64)?;
        spans.resize(places.len(), 0);
        let mut blocks = Blocks {
            present: Arc::clone(&config.present_blocks),
            max_ids,
            spans,
            pieces: room(num_pieces)?,
            ids: room(max_ids)?,
            listed,
            generation: 0,
            pairs: room(max_ids)?,
            ready: room(max_ids)?,
            // A cycle of two takes three moves.
            moves: room(max_ids + max_ids / 2)?,
            spare: Vec::new(),
            places,
        };
        for (place, span) in blocks.places.iter().zip(&mut blocks.spans) {
            *span = place.span;
        }
        blocks.cut_pieces();
        // Pages of other layers at the same places may be wider than the first one's, but a block's
        // pieces in one run never reach further than a step.
        let widest = blocks.places.iter().map(|place| place.step).max();
        let widest = widest.unwrap_or(0);
        // On a device it is registers.
        if config.device.is_none() {
            blocks.spare = room(widest)?;
            blocks.spare.resize(widest as usize, 0);
        }
        Ok(blocks)
    }

    /// Blocks that the cache has now.
    pub(super) fn num_blocks(&self) -> u64 {
        self.present.load(Ordering::Acquire)
    }

    fn block(&self, index: usize, id: i32) -> Result<u32, OpsError> {
        let known = u32::try_from(id).ok();
        known
            .filter(|&id| u64::from(id) < self.num_blocks())
            .ok_or(OpsError::BlockOutOfRange {
                index,
                id,
                num_blocks: self.num_blocks(),
            })
    }

    fn check_room(&self, taken: usize) -> Result<(), OpsError> {
        if taken as u64 == self.max_ids {
            return Err(OpsError::TooManyBlocks { max: self.max_ids });
        }
        Ok(())
    }

    /// A number that no earlier call had.
    fn next_generation(&mut self) -> u32 {
        if self.generation == u32::MAX {
            self.listed.fill(Listed::default());
            self.generation = 0;
        }
        self.generation += 1;
        self.generation
    }

    /// The pieces of memory that the chosen pages are, each byte in one of them.
    fn cut_pieces(&mut self) {
        self.pieces.clear();
        let mut open: Option<(&Place, u64)> = None; // the first place of a piece, and its end
        for (place, &span) in self.places.iter().zip(&self.spans) {
            if span == 0 {
                continue;
            }
            let end = place.offset + span;
            match &mut open {
                Some((first, last))
                    if first.allocation == place.allocation && place.offset <= *last =>
                {
                    *last = end.max(*last);
                }
                _ => {
                    if let Some((first, last)) = open {
                        push_pieces(&mut self.pieces, first, last);
                    }
                    open = Some((place, end));
                }
            }
        }
        if let Some((first, last)) = open {
            push_pieces(&mut self.pieces, first, last);
        }
    }

    /// What to move in which order, so that it comes out as if all blocks were read first.
    pub(super) fn moves_of(
        &mut self,
        copies: impl Iterator<Item = BlockCopy>,
    ) -> Result<&[Move], OpsError> {
        let call = self.list_pairs(copies)?;
        self.order_pairs(call);
        Ok(&self.moves)
    }

    /// Whether a block is both read and written by the moves of the call.
    fn order_matters(&self) -> bool {
        let is_read = |block: u32| self.listed[block as usize].source_in == self.generation;
        let matters = |next: &Move| next.from == SPARE || next.to == SPARE || is_read(next.to);
        self.moves.iter().any(matters)
    }

    /// Takes the pairs over, checked, and counts who reads which block.
    fn list_pairs(&mut self, copies: impl Iterator<Item = BlockCopy>) -> Result<u32, OpsError> {
        let call = self.next_generation();
        self.pairs.clear();
        for (index, copy) in copies.enumerate() {
            let pair = Move {
                from: self.block(index, copy.source)?,
                to: self.block(index, copy.target)?,
            };
            let target = &mut self.listed[pair.to as usize];
            if target.target_in == call {
                return Err(OpsError::BlockTwice {
                    index,
                    id: copy.target,
                });
            }
            (target.target_in, target.entry) = (call, index as u32);
            if pair.from != pair.to {
                let source = &mut self.listed[pair.from as usize];
                if source.source_in != call {
                    (source.source_in, source.readers) = (call, 0);
                }
                source.readers += 1;
            }
            self.check_room(self.pairs.len())?;
            self.pairs.push(pair);
        }
        Ok(call)
    }

    /// Orders the pairs so that every block is read before it is written: chains from their ends,
    /// then cycles through the spare page.
    fn order_pairs(&mut self, call: u32) {
        self.moves.clear();
        self.ready.clear();
        let is_read = |listed: &Listed| listed.source_in == call && listed.readers > 0;
        for (entry, pair) in self.pairs.iter().enumerate() {
            if pair.from != pair.to && !is_read(&self.listed[pair.to as usize]) {
                self.ready.push(entry as u32);
            }
        }
        while let Some(entry) = self.ready.pop() {
            let pair = self.pairs[entry as usize];
            self.moves.push(pair);
            // A block copied over itself is nothing left to do.
            self.pairs[entry as usize].from = pair.to;
            let source = &mut self.listed[pair.from as usize];
            source.readers -= 1;
            let next = source.entry;
            let is_target = source.target_in == call;
            if source.readers == 0 && is_target {
                let next_pair = self.pairs[next as usize];
                if next_pair.from != next_pair.to {
                    self.ready.push(next);
                }
            }
        }
        // What is left are cycles: each block has one reader, and is written by one.
        for entry in 0..self.pairs.len() {
            let Move { from, to: first } = self.pairs[entry];
            if from == first {
                continue;
            }
            self.moves.push(Move {
                from: first,
                to: SPARE,
            });
            let mut at = entry;
            loop {
                let pair = self.pairs[at];
                self.pairs[at].from = pair.to;
                if pair.from == first {
                    self.moves.push(Move {
                        from: SPARE,
                        to: pair.to,
                    });
                    break;
                }
                self.moves.push(pair);
                at = self.listed[pair.from as usize].entry as usize;
            }
        }
    }
}

/// A piece for each run of pages from a place to `end`.
fn push_pieces(pieces: &mut Vec<Piece>, first: &Place, end: u64) {
    for run in 0..first.runs {
        let start = first.offset + run * first.run_step;
        pieces.push(Piece {
            // The audit proved that all pages lie inside, so nothing wraps.
            data: first.data.wrapping_add(start as usize),
            step: first.step,
            span: end - first.offset,
        });
    }
}

/// An empty list with room for `count` values.
fn room<T>(count: u64) -> Result<Vec<T>, OpsError> {
    let mut list = Vec::new();
    let failed = || OpsError::NoMemory {
        bytes: count.saturating_mul(size_of::<T>() as u64),
    };
    let count = usize::try_from(count).map_err(|_| failed())?;
    list.try_reserve_exact(count).map_err(|_| failed())?;
    Ok(list)
}

impl Ops {
    /// Clears the listed blocks of the chosen layers.
    pub fn zero_blocks(
        &mut self,
        ids: &[i32],
        selection: Selection<'_>,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        self.select(selection)?;
        let blocks = &mut self.blocks;
        blocks.list_ids(ids)?;
        blocks.cut_pieces();
        if let Some(device) = &self.device {
            // SAFETY: as in `Blocks::fill_on_host`.
            return unsafe { device.zero(&blocks.pieces, &blocks.ids, stream) };
        }
        blocks.fill_on_host(0);
        Ok(())
    }

    /// Fills the listed blocks of the chosen layers with [`POISON`]: the bytes that
    /// [`zero_blocks`](Self::zero_blocks) clears.
    pub fn poison_blocks(
        &mut self,
        ids: &[i32],
        selection: Selection<'_>,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        self.select(selection)?;
        let blocks = &mut self.blocks;
        blocks.list_ids(ids)?;
        if let Some(index) = ids.iter().position(|&id| id == NULL_BLOCK) {
            return Err(OpsError::NullBlock { index });
        }
        blocks.cut_pieces();
        if let Some(device) = &self.device {
            // SAFETY: as in `Blocks::fill_on_host`.
            return unsafe {
                device.poison(&blocks.pieces, &blocks.ids, &mut blocks.moves, stream)
            };
        }
        blocks.fill_on_host(POISON);
        Ok(())
    }

    /// Copies blocks of the chosen layers, as if all were read before any is written. `told` is how
    /// many blocks the caller believes the cache to have, if it says so.
    pub fn copy_blocks(
        &mut self,
        copies: impl Iterator<Item = BlockCopy>,
        selection: Selection<'_>,
        told: Option<u64>,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        self.select(selection)?;
        self.blocks.check_told(told)?;
        let blocks = &mut self.blocks;
        blocks.moves_of(copies)?;
        blocks.cut_pieces();
        if let Some(device) = &self.device {
            let in_order = blocks.order_matters();
            // SAFETY: as in `Blocks::fill_on_host`.
            return unsafe { device.copy(&blocks.pieces, &blocks.moves, in_order, stream) };
        }
        // SAFETY: as in `Blocks::fill_on_host`; the spare page holds a step, and no piece spans more.
        unsafe {
            kernel::kvpages_host_copy(
                blocks.pieces.as_ptr(),
                blocks.pieces.len(),
                blocks.moves.as_ptr(),
                blocks.moves.len(),
                blocks.spare.as_mut_ptr(),
            );
        }
        Ok(())
    }

    /// Notes for each place how much of a block the chosen layers have there.
    fn select(&mut self, selection: Selection<'_>) -> Result<(), OpsError> {
        let spans = &mut self.blocks.spans;
        spans.fill(0);
        let mut widen = |layer: &super::Layer| {
            let span = &mut spans[layer.place];
            *span = layer.span.max(*span);
        };
        match selection {
            Selection::All => self.layers.iter().for_each(widen),
            Selection::Of { groups, layers } => {
                for &group in groups {
                    if group >= self.num_groups as u64 {
                        return Err(OpsError::NoGroup {
                            group,
                            num_groups: self.num_groups,
                        });
                    }
                    let of_group = self.layers.iter().filter(|l| l.group as u64 == group);
                    of_group.for_each(&mut widen);
                }
                for &layer in layers {
                    let num_layers = self.num_layers;
                    let found = self.layers[..num_layers].get(layer);
                    widen(found.ok_or(OpsError::NoLayer { layer, num_layers })?);
                }
            }
        }
        Ok(())
    }
}

impl Blocks {
    /// Takes ids over, checked.
    fn list_ids(&mut self, ids: &[i32]) -> Result<(), OpsError> {
        let call = self.next_generation();
        self.ids.clear();
        for (index, &id) in ids.iter().enumerate() {
            let block = self.block(index, id)?;
            let listed = &mut self.listed[block as usize];
            if listed.target_in == call {
                return Err(OpsError::BlockTwice { index, id });
            }
            listed.target_in = call;
            self.check_room(self.ids.len())?;
            self.ids.push(block);
        }
        Ok(())
    }

    /// Sets every byte of the listed blocks in the pieces to `value`, in the host's memory.
    fn fill_on_host(&self, value: u8) {
        // SAFETY: the pieces are pages of `num_blocks` blocks, the ids are less, and the caller of
        // `Ops::new` promised that nothing else uses the bytes.
        unsafe {
            kernel::kvpages_host_fill(
                self.pieces.as_ptr(),
                self.pieces.len(),
                self.ids.as_ptr(),
                self.ids.len(),
                value,
            );
        }
    }

    fn check_told(&self, told: Option<u64>) -> Result<(), OpsError> {
        let Some(told) = told.filter(|&told| told != self.num_blocks()) else {
            return Ok(());
        };
        let num_blocks = self.num_blocks();
        let cut = |place: &&Place| told == 0 || !place.allocation_bytes.is_multiple_of(told);
        Err(match self.places.iter().find(cut) {
            Some(place) => OpsError::NotMultipleOfBlocks {
                bytes: place.allocation_bytes,
                told,
                num_blocks,
            },
            None => OpsError::NumBlocksMismatch { told, num_blocks },
        })
    }
}
