//! Block tables and slot mappings: which blocks hold a request, and where each of its tokens goes.
//!
//! [`Tables`] has for each group a **table** (a row for each request), an **input table** (a row
//! for each request of the batch) and the **slots** of the batch. All entries count kernel blocks.
//! Writes to rows are staged: [`Tables::num_entries`] counts them at once, gathers and slots see
//! them when they have been applied. Memory is made once and never moves, and no call on a step
//! allocates.
//!
//! Rows are staged in the host's memory, wherever the tables are; in a device's memory a call puts
//! its work on a stream and returns.
//!
//! Past the entries of a row there are null blocks, and past the tokens of a batch pad slots.

mod config;
mod device;
mod error;
mod group;
mod host;
mod ring;
mod rows;
mod slots;
mod snapshot;
#[cfg(test)]
mod tests;

pub use config::{GroupConfig, Ranks, TablesConfig, row_width};
pub use error::TablesError;
pub use rows::NULL_BLOCK;
pub use slots::PAD_SLOT;
pub use snapshot::Snapshot;

use std::sync::Arc;

use crate::cuda::{Context, StreamRef};
use crate::kernels::SlotRule;
use device::DeviceTables;
use group::Group;
use host::HostTables;
use slots::slot_rule;

/// Writes to many rows at once, in order.
#[derive(Debug, Clone, Copy)]
pub struct RowWrites<'a> {
    /// The request of each write.
    pub requests: &'a [i32],
    /// Of each write not 0 when it replaces the blocks of the row; without them all append.
    pub overwrite: Option<&'a [u8]>,
    /// Where the blocks of a write start in `blocks`, for each group of each write, and the end of
    /// the last ones.
    pub starts: &'a [usize],
    /// Block ids.
    pub blocks: &'a [i32],
}

impl<'a> RowWrites<'a> {
    /// Request, blocks by group, and whether they replace. Everything was checked.
    #[inline]
    fn get(&self, write: usize, group: usize, num_groups: usize) -> (usize, &'a [i32], bool) {
        let at = write * num_groups + group;
        (
            self.requests[write] as usize,
            &self.blocks[self.starts[at]..self.starts[at + 1]],
            self.overwrite.is_some_and(|flags| flags[write] != 0),
        )
    }
}

/// The requests that run together in one step.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The row of each request; -1 for a dummy.
    pub requests: &'a [i32],
    /// Where the tokens of each start in `positions`, and where those of the last one end.
    pub query_start: &'a [i32],
    /// Tokens of the sequence of each, those of the step included.
    pub seq_lens: &'a [i32],
    /// Where each token stands in its sequence.
    pub positions: &'a [i64],
}

impl Batch<'_> {
    /// Nothing but pads and nulls.
    const EMPTY: Batch<'static> = Batch {
        requests: &[],
        query_start: &[0],
        seq_lens: &[],
        positions: &[],
    };
}

/// How large a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchExtent {
    /// Tokens of all requests.
    pub num_tokens: usize,
    /// Most tokens of one request.
    pub max_query_len: usize,
    /// Longest sequence.
    pub max_seq_len: usize,
}

/// Where the memory of a group is: addresses of the host, or of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The applied rows of all requests, one after another.
    pub table: *mut i32,
    /// The rows of the batch, one after another.
    pub input_table: *mut i32,
    /// The slots of the batch.
    pub slots: *mut i64,
}

/// Where the arrays of the batch that was prepared last are in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchAddresses {
    /// As in [`Batch`].
    pub query_start: *const i32,
    /// As in [`Batch`].
    pub seq_lens: *const i32,
    /// As in [`Batch`].
    pub positions: *const i64,
}

/// What a call is to do.
#[derive(Debug, Clone, Copy)]
struct Task {
    /// Make the tables what was staged.
    apply: bool,
    /// Fill the input tables with the rows of the batch.
    gather: bool,
    /// Find the slots of the batch.
    map: bool,
    /// Leave the arrays of the batch where a step points to, in a device's memory.
    publish: bool,
}

impl Task {
    const APPLY: Task = Task {
        apply: true,
        gather: false,
        map: false,
        publish: false,
    };
    const GATHER: Task = Task {
        apply: false,
        gather: true,
        ..Task::APPLY
    };
    const MAP: Task = Task {
        apply: false,
        map: true,
        ..Task::APPLY
    };
    const PREPARE: Task = Task {
        apply: true,
        gather: true,
        map: true,
        publish: true,
    };
}

/// The block tables of all groups.
#[derive(Debug)]
pub struct Tables {
    groups: Vec<Group>,
    place: Place,
    max_requests: usize,
    max_tokens: usize,
    /// See [`Snapshot::generation`].
    generation: u64,
}

/// Where the tables are, the input tables and the slots.
#[derive(Debug)]
enum Place {
    /// By group.
    Host(Vec<HostTables>),
    Device(Box<DeviceTables>),
}

impl Tables {
    /// Makes tables without blocks.
    pub fn new(config: &TablesConfig) -> Result<Tables, TablesError> {
        config.check()?;
        let (max_requests, max_tokens) = (config.max_requests as usize, config.max_tokens as usize);
        let mut groups = reserved(config.groups.len())?;
        let mut rules: Vec<SlotRule> = reserved(config.groups.len())?;
        for (number, group) in config.groups.iter().enumerate() {
            let num_blocks = config.block_limit(number, group)?;
            let width = group.width(config.aligned_rows)? as usize;
            groups.push(Group::new(*group, max_requests, num_blocks, width)?);
            rules.push(slot_rule(group, config.ranks));
        }
        let place = match &config.device {
            None => {
                let mut host = reserved(groups.len())?;
                for (group, rule) in groups.iter().zip(rules) {
                    let width = group.width();
                    host.push(HostTables::new(rule, max_requests, max_tokens, width)?);
                }
                Place::Host(host)
            }
            Some(context) => {
                let tables = DeviceTables::new(context, &groups, &rules, max_requests, max_tokens)?;
                Place::Device(Box::new(tables))
            }
        };
        Ok(Tables {
            groups,
            place,
            max_requests,
            max_tokens,
            generation: 1,
        })
    }

    /// Groups that there are.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// Rows of each table.
    pub fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Slots of each group.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// What the table of a group was made for.
    pub fn config(&self, group: usize) -> Result<GroupConfig, TablesError> {
        self.group(group).map(|group| group.config)
    }

    /// Entries of a row.
    pub fn width(&self, group: usize) -> Result<usize, TablesError> {
        self.group(group).map(Group::width)
    }

    /// Kernel blocks of a request, those staged included.
    pub fn num_entries(&self, request: usize, group: usize) -> Result<usize, TablesError> {
        self.check_request(request)?;
        Ok(self.group(group)?.staged_len(request))
    }

    /// Where the memory of a group is.
    pub fn addresses(&self, group: usize) -> Result<Addresses, TablesError> {
        self.group(group)?;
        Ok(match &self.place {
            Place::Host(host) => host[group].addresses(),
            Place::Device(device) => device.addresses(group),
        })
    }

    /// The device whose memory the tables lie in; none when it is the host's.
    pub fn device(&self) -> Option<&Arc<Context>> {
        match &self.place {
            Place::Host(_) => None,
            Place::Device(device) => Some(device.context()),
        }
    }

    /// Where the arrays of a batch that was prepared are on the device; in the host's memory they are
    /// the caller's.
    pub fn batch_addresses(&self) -> Option<BatchAddresses> {
        match &self.place {
            Place::Host(_) => None,
            Place::Device(device) => Some(device.batch()),
        }
    }

    // --- staged writes ----------------------------------------------------------------------

    /// Adds blocks to a row, or replaces those it has.
    pub fn write_row(
        &mut self,
        request: usize,
        group: usize,
        blocks: &[i32],
        overwrite: bool,
    ) -> Result<(), TablesError> {
        self.check_request(request)?;
        let of_group = self.group_mut(group)?;
        of_group.plan(request);
        of_group.check(group, request, blocks, overwrite)?;
        of_group.stage(request, blocks, overwrite);
        Ok(())
    }

    /// Writes to many rows, all or none.
    pub fn write(&mut self, writes: &RowWrites<'_>) -> Result<(), TablesError> {
        let (num_writes, num_groups) = (writes.requests.len(), self.groups.len());
        self.check_writes(writes)?;
        for (number, group) in self.groups.iter_mut().enumerate() {
            for &request in writes.requests {
                group.plan(request as usize);
            }
            for write in 0..num_writes {
                let (request, blocks, overwrite) = writes.get(write, number, num_groups);
                group.check(number, request, blocks, overwrite)?;
            }
        }
        for (number, group) in self.groups.iter_mut().enumerate() {
            for write in 0..num_writes {
                let (request, blocks, overwrite) = writes.get(write, number, num_groups);
                group.stage(request, blocks, overwrite);
            }
        }
        Ok(())
    }

    fn check_writes(&self, writes: &RowWrites<'_>) -> Result<(), TablesError> {
        let num_writes = writes.requests.len();
        for &request in writes.requests {
            self.check_index(request, 0)?;
        }
        let overwrites = writes.overwrite.map_or(num_writes, <[u8]>::len);
        let boundaries = num_writes
            .checked_mul(self.groups.len())
            .and_then(|count| count.checked_add(1))
            .unwrap_or(usize::MAX);
        for (what, got, wanted) in [
            ("overwrite", overwrites, num_writes),
            ("starts", writes.starts.len(), boundaries),
        ] {
            if got != wanted {
                return Err(TablesError::Length { what, got, wanted });
            }
        }
        check_ascending("starts", writes.starts, writes.blocks.len())
    }

    /// Keeps the first blocks of a row.
    pub fn truncate(
        &mut self,
        request: usize,
        group: usize,
        num_blocks: usize,
    ) -> Result<(), TablesError> {
        self.check_request(request)?;
        let of_group = self.group_mut(group)?;
        let held = of_group.staged_len(request) / of_group.ratio;
        if num_blocks > held {
            return Err(TablesError::TruncateLonger {
                request,
                group,
                held,
                wanted: num_blocks,
            });
        }
        of_group.cut(request, num_blocks * of_group.ratio);
        Ok(())
    }

    /// Puts the blocks of `from`, in all groups, into `to`, and none into `from`.
    pub fn relocate(&mut self, from: usize, to: usize) -> Result<(), TablesError> {
        self.check_request(from)?;
        self.check_request(to)?;
        if from != to {
            for group in &mut self.groups {
                group.relocate(from, to);
            }
        }
        Ok(())
    }

    /// Exchanges two requests in all groups.
    pub fn swap(&mut self, a: usize, b: usize) -> Result<(), TablesError> {
        self.check_request(a)?;
        self.check_request(b)?;
        if a != b {
            for group in &mut self.groups {
                group.swap(a, b);
            }
        }
        Ok(())
    }

    /// Takes all blocks from a request, in all groups.
    pub fn clear(&mut self, request: usize) -> Result<(), TablesError> {
        self.check_request(request)?;
        for group in &mut self.groups {
            group.cut(request, 0);
        }
        Ok(())
    }

    /// Makes the tables what was staged.
    pub fn apply(&mut self, stream: StreamRef) -> Result<(), TablesError> {
        self.run(Task::APPLY, &Batch::EMPTY, stream)
    }

    /// Makes all memory what it was at first, whatever stands there now. It does not move.
    pub fn reset(&mut self, stream: StreamRef) -> Result<(), TablesError> {
        let done = match &mut self.place {
            Place::Host(host) => {
                self.groups.iter_mut().for_each(Group::reset);
                host.iter_mut().for_each(HostTables::reset);
                Ok(())
            }
            Place::Device(device) => device.reset(&mut self.groups, stream),
        };
        self.count_change(done)
    }

    // --- a step -----------------------------------------------------------------------------

    /// All that a step asks of tables: applies what was staged, gathers the rows of a batch and
    /// finds its slots.
    pub fn prepare(
        &mut self,
        batch: &Batch<'_>,
        stream: StreamRef,
    ) -> Result<BatchExtent, TablesError> {
        let num_tokens = self.check_batch(batch.requests, batch.query_start, batch.positions)?;
        let (max_query_len, max_seq_len) = check_seq_lens(batch.query_start, batch.seq_lens)?;
        check_positions(batch)?;
        self.run(Task::PREPARE, batch, stream)?;
        Ok(BatchExtent {
            num_tokens,
            max_query_len,
            max_seq_len,
        })
    }

    /// Fills the input tables with the rows of the requests of a batch; -1 is a dummy. Rows past
    /// them are null. `num_rows` are those that kernels will read.
    pub fn gather(
        &mut self,
        requests: &[i32],
        num_rows: usize,
        stream: StreamRef,
    ) -> Result<(), TablesError> {
        self.check_num_rows(requests.len(), num_rows)?;
        self.check_indices(requests)?;
        let batch = Batch {
            requests,
            ..Batch::EMPTY
        };
        self.run(Task::GATHER, &batch, stream)
    }

    /// Makes the input tables those of a batch of dummies.
    pub fn gather_dummies(
        &mut self,
        num_rows: usize,
        stream: StreamRef,
    ) -> Result<(), TablesError> {
        self.gather(&[], num_rows, stream)
    }

    /// Finds the slots of a batch: request `i` of it, -1 for a dummy, has the positions from
    /// `query_start[i]` to `query_start[i + 1]`. Slots past them are pads.
    pub fn map_slots(
        &mut self,
        requests: &[i32],
        query_start: &[i32],
        positions: &[i64],
        stream: StreamRef,
    ) -> Result<(), TablesError> {
        self.check_batch(requests, query_start, positions)?;
        let batch = Batch {
            requests,
            query_start,
            positions,
            ..Batch::EMPTY
        };
        self.run(Task::MAP, &batch, stream)
    }

    /// Makes all slots pads.
    pub fn map_dummies(&mut self, stream: StreamRef) -> Result<(), TablesError> {
        self.run(Task::MAP, &Batch::EMPTY, stream)
    }

    /// Does what was checked.
    fn run(&mut self, task: Task, batch: &Batch<'_>, stream: StreamRef) -> Result<(), TablesError> {
        let done = match &mut self.place {
            Place::Host(host) => {
                for (group, tables) in self.groups.iter_mut().zip(host) {
                    tables.run(group, task, batch);
                }
                Ok(())
            }
            Place::Device(device) => device.run(&mut self.groups, task, batch, stream),
        };
        self.count_change(done)
    }

    /// What a device did before a failure is not known, so that counts as a change; a captured
    /// stream is refused before anything is done.
    fn count_change(&mut self, done: Result<(), TablesError>) -> Result<(), TablesError> {
        if !matches!(done, Err(TablesError::Capturing)) {
            self.generation += 1;
        }
        done
    }

    // --- checks -----------------------------------------------------------------------------

    fn group(&self, group: usize) -> Result<&Group, TablesError> {
        self.groups.get(group).ok_or(TablesError::UnknownGroup {
            group,
            num_groups: self.groups.len(),
        })
    }

    fn group_mut(&mut self, group: usize) -> Result<&mut Group, TablesError> {
        let num_groups = self.groups.len();
        let found = self.groups.get_mut(group);
        found.ok_or(TablesError::UnknownGroup { group, num_groups })
    }

    fn check_request(&self, request: usize) -> Result<(), TablesError> {
        if request >= self.max_requests {
            return Err(TablesError::UnknownRequest {
                request: i64::try_from(request).unwrap_or(i64::MAX),
                max_requests: self.max_requests,
            });
        }
        Ok(())
    }

    /// `lowest` is -1 where there may be dummies, else 0.
    fn check_index(&self, request: i32, lowest: i32) -> Result<(), TablesError> {
        if request < lowest || i64::from(request) >= self.max_requests as i64 {
            return Err(TablesError::UnknownRequest {
                request: i64::from(request),
                max_requests: self.max_requests,
            });
        }
        Ok(())
    }

    fn check_indices(&self, requests: &[i32]) -> Result<(), TablesError> {
        requests
            .iter()
            .try_for_each(|&request| self.check_index(request, -1))
    }

    /// Returns the number of tokens.
    fn check_batch(
        &self,
        requests: &[i32],
        query_start: &[i32],
        positions: &[i64],
    ) -> Result<usize, TablesError> {
        self.check_num_rows(requests.len(), requests.len())?;
        self.check_indices(requests)?;
        if query_start.len() != requests.len() + 1 {
            return Err(TablesError::Length {
                what: "query_start",
                got: query_start.len(),
                wanted: requests.len() + 1,
            });
        }
        check_ascending("query_start", query_start, positions.len())?;
        let tokens = query_start[requests.len()] as usize;
        if tokens > self.max_tokens {
            return Err(TablesError::Capacity {
                what: "the number of tokens",
                got: tokens,
                capacity: self.max_tokens,
            });
        }
        Ok(tokens)
    }

    fn check_num_rows(&self, num_requests: usize, num_rows: usize) -> Result<(), TablesError> {
        if num_rows > self.max_requests {
            return Err(TablesError::Capacity {
                what: "the number of rows",
                got: num_rows,
                capacity: self.max_requests,
            });
        }
        if num_rows < num_requests {
            return Err(TablesError::PaddedBelowBatch {
                num_requests,
                num_rows,
            });
        }
        Ok(())
    }
}

/// Checks that sequences hold the tokens of the step; `query_start` was checked. Returns the most
/// tokens of one request, and the longest sequence.
fn check_seq_lens(query_start: &[i32], seq_lens: &[i32]) -> Result<(usize, usize), TablesError> {
    let wanted = query_start.len() - 1;
    if seq_lens.len() != wanted {
        return Err(TablesError::Length {
            what: "seq_lens",
            got: seq_lens.len(),
            wanted,
        });
    }
    let (mut max_query_len, mut max_seq_len) = (0, 0);
    for (request, (pair, &seq_len)) in query_start.windows(2).zip(seq_lens).enumerate() {
        let query_len = pair[1] - pair[0];
        if seq_len < query_len {
            return Err(TablesError::SeqLen {
                request,
                seq_len,
                query_len,
            });
        }
        max_query_len = max_query_len.max(query_len);
        max_seq_len = max_seq_len.max(seq_len);
    }
    Ok((max_query_len as usize, max_seq_len as usize))
}

/// Checks that no token is stored where attention, which ends with the sequence, does not look. The
/// rest of the batch was checked.
fn check_positions(batch: &Batch<'_>) -> Result<(), TablesError> {
    for (request, (pair, &seq_len)) in batch.query_start.windows(2).zip(batch.seq_lens).enumerate()
    {
        let tokens = pair[0] as usize..pair[1] as usize;
        let seq_len = i64::from(seq_len);
        let is_past = |&position: &i64| position >= seq_len;
        // Without a branch for each token.
        let any = batch.positions[tokens.clone()]
            .iter()
            .fold(false, |any, position| any | is_past(position));
        if any && batch.requests[request] >= 0 {
            let at = tokens.start
                + batch.positions[tokens]
                    .iter()
                    .position(is_past)
                    .unwrap_or(0);
            return Err(TablesError::Position {
                at,
                position: batch.positions[at],
                request,
                seq_len,
            });
        }
    }
    Ok(())
}

/// Checks numbers that divide an array into parts.
fn check_ascending<T: Copy + TryInto<usize> + TryInto<i64>>(
    what: &'static str,
    boundaries: &[T],
    limit: usize,
) -> Result<(), TablesError> {
    let mut last = 0;
    for (at, &boundary) in boundaries.iter().enumerate() {
        match boundary.try_into() {
            Ok(value) if value >= last && value <= limit && (at > 0 || value == 0) => last = value,
            _ => {
                return Err(TablesError::Boundary {
                    what,
                    at,
                    value: boundary.try_into().unwrap_or(i64::MAX),
                    limit,
                });
            }
        }
    }
    Ok(())
}

/// Room for as many values as there are groups.
fn reserved<T>(num_groups: usize) -> Result<Vec<T>, TablesError> {
    let mut values = Vec::new();
    rows::reserve(&mut values, "groups", num_groups)?;
    Ok(values)
}
