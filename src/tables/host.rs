//! The table, the input table and the slots of one group in the host's memory.

use super::error::TablesError;
use super::group::Group;
use super::rows::{Rows, bytes_of, filled};
use super::slots::PAD_SLOT;
use super::{Addresses, Batch, Task};
use crate::kernels::{self, SlotRule};

#[derive(Debug)]
pub(super) struct HostTables {
    rule: SlotRule,
    /// Rows as gathers and slots see them.
    pub applied: Rows,
    /// Rows of the batch.
    pub input: Rows,
    /// Rows of the batch that may not be null.
    input_rows: usize,
    pub slots: Vec<i64>,
    /// Slots that may not be pads.
    used_slots: usize,
}

impl HostTables {
    pub fn new(
        rule: SlotRule,
        max_requests: usize,
        max_tokens: usize,
        width: usize,
    ) -> Result<HostTables, TablesError> {
        Ok(HostTables {
            rule,
            applied: Rows::new(max_requests, width)?,
            input: Rows::new(max_requests, width)?,
            input_rows: 0,
            slots: filled("slots", max_tokens, PAD_SLOT)?,
            used_slots: 0,
        })
    }

    pub fn addresses(&self) -> Addresses {
        Addresses {
            table: self.applied.ids().as_ptr().cast_mut(),
            input_table: self.input.ids().as_ptr().cast_mut(),
            slots: self.slots.as_ptr().cast_mut(),
        }
    }

    /// Bytes of memory.
    pub fn host_bytes(&self) -> u64 {
        self.applied.host_bytes() + self.input.host_bytes() + bytes_of(&self.slots)
    }

    /// Requests and tokens that it holds of the batch.
    pub fn batch_extent(&self) -> (u64, u64) {
        (self.input_rows as u64, self.used_slots as u64)
    }

    /// Does what was checked.
    pub fn run(&mut self, group: &mut Group, task: Task, batch: &Batch<'_>) {
        if task.apply {
            self.apply(group);
        }
        if task.gather {
            self.gather(batch.requests);
        }
        if task.map {
            self.map_slots(batch);
        }
    }

    /// Makes the table what was staged.
    fn apply(&mut self, group: &mut Group) {
        while let Some((row, from)) = group.take_change() {
            self.applied.take(row, from, group.staged(), row);
        }
    }

    /// Makes the input table the rows of the requests, null for a dummy, and null past them.
    fn gather(&mut self, requests: &[i32]) {
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

    /// Finds the slots of a batch.
    fn map_slots(&mut self, batch: &Batch<'_>) {
        let mut end = 0;
        for (&request, &next) in batch.requests.iter().zip(&batch.query_start[1..]) {
            let tokens = end..next as usize;
            end = tokens.end;
            let slots = &mut self.slots[tokens.clone()];
            match usize::try_from(request) {
                Ok(request) => {
                    let row = self.applied.row(request);
                    kernels::map_slots(&self.rule, row, &batch.positions[tokens], slots);
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
        self.applied.reset();
        self.input.reset();
        self.input_rows = 0;
        self.slots.fill(PAD_SLOT);
        self.used_slots = 0;
    }
}
