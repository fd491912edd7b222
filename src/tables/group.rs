//! The table, the input table and the slots of one group.

use super::config::{GroupConfig, Ranks};
use super::error::TablesError;
use super::rows::{Rows, filled};
use super::slots::{PAD_SLOT, slot_rule};
use crate::kernels::{self, SlotRule};

/// Marks a row that is as it was applied.
const UNCHANGED: u32 = u32::MAX;

/// Entries between two staged rows: without them rows of a power of two would all be in the same
/// few places of the processor's caches.
const STAGED_GAP: usize = 16;

#[derive(Debug)]
pub(super) struct Group {
    pub config: GroupConfig,
    /// Kernel blocks of a block.
    pub ratio: usize,
    /// Entries that the blocks of a full row take.
    row_entries: usize,
    /// Ids are below it.
    num_blocks: u64,
    rule: SlotRule,
    /// Rows as they will be once applied.
    staged: Rows,
    /// Rows as gathers and slots see them.
    applied: Rows,
    /// Rows of the batch.
    input: Rows,
    /// Rows of the batch that may not be null.
    input_rows: usize,
    slots: Vec<i64>,
    /// Slots that may not be pads.
    used_slots: usize,
    /// For each row, where it first differs from the applied one.
    changed_from: Vec<u32>,
    /// The rows that differ.
    changed: Vec<u32>,
    /// For each row, its length after the write that is being checked.
    planned: Vec<u32>,
}

impl Group {
    /// `config` and the numbers were checked.
    pub fn new(
        config: GroupConfig,
        max_requests: usize,
        max_tokens: usize,
        num_blocks: u64,
        ranks: Ranks,
        width: usize,
    ) -> Result<Group, TablesError> {
        let ratio = config.block_size / config.kernel_block_size;
        let of_group = match config.is_replicated {
            true => Ranks::ONE,
            false => ranks,
        };
        // One rank has all tokens, in runs of any length.
        let interleave = if of_group.size == 1 {
            1
        } else {
            of_group.interleave
        };
        // The largest first: what cannot be had is found before anything is touched.
        let staged = Rows::new(max_requests, width + STAGED_GAP)?;
        let mut changed = filled("changed rows", max_requests, 0)?;
        changed.clear();
        Ok(Group {
            ratio: ratio as usize,
            row_entries: (config.row_blocks * ratio) as usize,
            num_blocks,
            rule: slot_rule(
                config.block_size,
                config.kernel_block_size,
                of_group.size,
                of_group.rank,
                interleave,
            ),
            staged,
            applied: Rows::new(max_requests, width)?,
            input: Rows::new(max_requests, width)?,
            input_rows: 0,
            slots: filled("slots", max_tokens, PAD_SLOT)?,
            used_slots: 0,
            changed_from: filled("changed rows", max_requests, UNCHANGED)?,
            changed,
            planned: filled("row lengths", max_requests, 0)?,
            config,
        })
    }

    pub fn width(&self) -> usize {
        self.applied.width()
    }

    pub fn table(&self) -> &[i32] {
        self.applied.ids()
    }

    pub fn input_table(&self) -> &[i32] {
        self.input.ids()
    }

    pub fn slots(&self) -> &[i64] {
        &self.slots
    }

    /// Entries of a row, those staged included.
    pub fn staged_len(&self, request: usize) -> usize {
        self.staged.len(request)
    }

    // --- checking a write -------------------------------------------------------------------

    /// Starts to check writes to a row.
    pub fn plan(&mut self, request: usize) {
        self.planned[request] = self.staged.len(request) as u32;
    }

    /// Checks one write that follows those checked before.
    #[inline]
    pub fn check(
        &mut self,
        group: usize,
        request: usize,
        blocks: &[i32],
        overwrite: bool,
    ) -> Result<(), TablesError> {
        let held = if overwrite {
            0
        } else {
            self.planned[request] as usize
        };
        if blocks.len() > (self.row_entries - held) / self.ratio {
            return Err(TablesError::RowFull {
                request,
                group,
                held: held / self.ratio,
                added: blocks.len(),
                row_blocks: self.config.row_blocks as usize,
            });
        }
        // A negative id is a large one here.
        let is_block = |id: &i32| u64::from(*id as u32) < self.num_blocks;
        if let Some(&id) = blocks.iter().find(|id| !is_block(id)) {
            return Err(TablesError::BlockId {
                request,
                group,
                id,
                num_blocks: self.num_blocks,
            });
        }
        self.planned[request] = (held + blocks.len() * self.ratio) as u32;
        Ok(())
    }

    // --- staging, after all was checked -----------------------------------------------------

    #[inline]
    pub fn stage(&mut self, request: usize, blocks: &[i32], overwrite: bool) {
        if overwrite {
            self.cut(request, 0);
        }
        if !blocks.is_empty() {
            self.mark(request, self.staged.len(request));
            self.staged.extend(request, blocks, self.ratio);
        }
    }

    /// Keeps that many entries of a row that has at least as many.
    pub fn cut(&mut self, request: usize, entries: usize) {
        if entries < self.staged.len(request) {
            self.mark(request, entries);
            self.staged.truncate(request, entries);
        }
    }

    pub fn relocate(&mut self, from: usize, to: usize) {
        self.mark(from, 0);
        self.mark(to, 0);
        self.staged.relocate(from, to);
    }

    pub fn swap(&mut self, a: usize, b: usize) {
        self.mark(a, 0);
        self.mark(b, 0);
        self.staged.swap(a, b);
    }

    /// Notes that a row changes from an entry on.
    fn mark(&mut self, request: usize, from: usize) {
        let changed_from = &mut self.changed_from[request];
        if *changed_from == UNCHANGED {
            self.changed.push(request as u32);
        }
        *changed_from = (*changed_from).min(from as u32);
    }

    pub fn apply(&mut self) {
        for &request in &self.changed {
            let row = request as usize;
            let from = std::mem::replace(&mut self.changed_from[row], UNCHANGED);
            self.applied.take(row, from as usize, &self.staged, row);
        }
        self.changed.clear();
    }

    // --- a step -----------------------------------------------------------------------------

    /// Makes the input table the rows of the requests, null for a dummy, and null past them.
    pub fn gather(&mut self, requests: &[i32]) {
        for (row, &request) in requests.iter().enumerate() {
            match usize::try_from(request) {
                Ok(request) => self.input.take(row, 0, &self.applied, request),
                Err(_) => self.input.truncate(row, 0),
            }
        }
        for row in requests.len()..self.input_rows {
            self.input.truncate(row, 0);
        }
        self.input_rows = requests.len();
    }

    /// Finds the slots of a batch, whose numbers were checked: request `i` has the tokens from
    /// `query_start[i]` to `query_start[i + 1]`.
    pub fn map_slots(&mut self, requests: &[i32], query_start: &[i32], positions: &[i64]) {
        let mut end = 0;
        for (&request, &next) in requests.iter().zip(&query_start[1..]) {
            let tokens = end..next as usize;
            end = tokens.end;
            let slots = &mut self.slots[tokens.clone()];
            match usize::try_from(request) {
                Ok(request) => {
                    let row = self.applied.row(request);
                    kernels::map_slots(&self.rule, row, &positions[tokens], slots);
                }
                Err(_) => slots.fill(PAD_SLOT),
            }
        }
        if end < self.used_slots {
            self.slots[end..self.used_slots].fill(PAD_SLOT);
        }
        self.used_slots = end;
    }

    /// Makes all memory what it was at first.
    pub fn reset(&mut self) {
        self.staged.reset();
        self.applied.reset();
        self.input.reset();
        self.input_rows = 0;
        self.slots.fill(PAD_SLOT);
        self.used_slots = 0;
        self.changed_from.fill(UNCHANGED);
        self.changed.clear();
    }
}
