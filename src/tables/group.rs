//! The rows of one group as they will be once they are applied, wherever its tables are.

use super::config::GroupConfig;
use super::error::TablesError;
use super::rows::{Rows, bytes_of, filled};

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
    /// Entries of a row of the table.
    width: usize,
    /// Rows as they will be once applied.
    staged: Rows,
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
        num_blocks: u64,
        width: usize,
    ) -> Result<Group, TablesError> {
        let ratio = config.block_size / config.kernel_block_size;
        let staged = Rows::new(max_requests, width + STAGED_GAP)?;
        let mut changed = filled("changed rows", max_requests, 0)?;
        changed.clear();
        Ok(Group {
            ratio: ratio as usize,
            row_entries: (config.row_blocks * ratio) as usize,
            num_blocks,
            width,
            staged,
            changed_from: filled("changed rows", max_requests, UNCHANGED)?,
            changed,
            planned: filled("row lengths", max_requests, 0)?,
            config,
        })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Entries of a row, those staged included.
    pub fn staged_len(&self, request: usize) -> usize {
        self.staged.len(request)
    }

    /// Entries that the blocks of a full row take.
    pub fn row_entries(&self) -> usize {
        self.row_entries
    }

    /// Rows with changes that were not applied.
    pub fn pending_rows(&self) -> usize {
        self.changed.len()
    }

    /// Bytes that the group takes of the host, its tables aside.
    pub fn host_bytes(&self) -> u64 {
        let lists = [&self.changed_from, &self.changed, &self.planned];
        self.staged.host_bytes() + lists.map(bytes_of).iter().sum::<u64>()
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

    // --- applying ---------------------------------------------------------------------------

    /// The rows as they will be once applied.
    pub fn staged(&self) -> &Rows {
        &self.staged
    }

    /// A row that differs from the applied one, and where it first does. It is as it was applied
    /// from now on.
    pub fn take_change(&mut self) -> Option<(usize, usize)> {
        let row = self.changed.pop()? as usize;
        let from = std::mem::replace(&mut self.changed_from[row], UNCHANGED);
        Some((row, from as usize))
    }

    /// Notes that nothing is known of what was applied.
    pub fn mark_all(&mut self) {
        for row in 0..self.changed_from.len() {
            self.mark(row, 0);
        }
    }

    /// Makes all rows empty, as they are where they are applied.
    pub fn reset(&mut self) {
        self.staged.reset();
        self.changed_from.fill(UNCHANGED);
        self.changed.clear();
    }
}
