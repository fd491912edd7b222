//! Tables in numbers, as they are now.

use serde::Serialize;

use super::{Place, Tables};
use crate::json::{self, Each};

/// The version of the JSON. Keys may be added to one version; none goes or changes its meaning.
pub const VERSION: u64 = 1;

/// Tables in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Goes up with each call that changes tables, input tables or slots: another number says that
    /// what was read of them before may be stale. Staged writes do not count.
    pub generation: u64,
    /// Rows of each table.
    pub max_requests: u64,
    /// Slots of each group.
    pub max_tokens: u64,
    /// Requests that have blocks, those staged included.
    pub rows_in_use: u64,
    /// Kernel blocks in all rows, those staged included.
    pub num_entries: u64,
    /// Kernel blocks that there is room for.
    pub max_entries: u64,
    /// Rows, of all groups, with writes that were not applied.
    pub pending_rows: u64,
    /// Requests that the input tables hold.
    pub batch_requests: u64,
    /// Tokens that have slots.
    pub batch_tokens: u64,
    /// Bytes of host memory, without those that are pinned.
    pub host_bytes: u64,
    /// Bytes of a device's memory.
    pub device_bytes: u64,
    /// Bytes of pinned host memory.
    pub pinned_bytes: u64,
    /// Pages that the pinned memory is: calls that the host may be ahead of the device.
    pub pinned_pages: u64,
    /// Pages that the device may still read.
    pub pinned_pages_in_use: u64,
    /// Whether a device failed a call midway, so that the next call sends all rows again. The batch
    /// is not known then.
    pub is_lost: bool,
}

/// The tables of a group in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct GroupSnapshot {
    block_size: u64,
    kernel_block_size: u64,
    row_blocks: u64,
    row_width: u64,
    rows_in_use: u64,
    num_entries: u64,
    max_entries: u64,
    pending_rows: u64,
}

#[derive(Serialize)]
struct SnapshotObject<G: Serialize> {
    snapshot_version: u64,
    kind: &'static str,
    cuda_device: Option<u32>,
    #[serde(flatten)]
    tables: Snapshot,
    groups: G,
}

impl Tables {
    /// The tables in numbers. Looks at the length of every row; takes no memory and no lock.
    pub fn snapshot(&self) -> Snapshot {
        let is_used = |&row: &usize| self.groups.iter().any(|group| group.staged_len(row) > 0);
        let mut snapshot = Snapshot {
            generation: self.generation,
            max_requests: self.max_requests as u64,
            max_tokens: self.max_tokens as u64,
            rows_in_use: (0..self.max_requests).filter(is_used).count() as u64,
            num_entries: 0,
            max_entries: 0,
            pending_rows: 0,
            batch_requests: 0,
            batch_tokens: 0,
            host_bytes: 0,
            device_bytes: 0,
            pinned_bytes: 0,
            pinned_pages: 0,
            pinned_pages_in_use: 0,
            is_lost: false,
        };
        for number in 0..self.groups.len() {
            let group = self.group_snapshot(number);
            snapshot.num_entries += group.num_entries;
            snapshot.max_entries += group.max_entries;
            snapshot.pending_rows += group.pending_rows;
            snapshot.host_bytes += self.groups[number].host_bytes();
        }
        match &self.place {
            Place::Host(host) => {
                snapshot.host_bytes += host.iter().map(|tables| tables.host_bytes()).sum::<u64>();
                if let Some(tables) = host.first() {
                    (snapshot.batch_requests, snapshot.batch_tokens) = tables.batch_extent();
                }
            }
            Place::Device(device) => device.look(&mut snapshot),
        }
        snapshot
    }

    /// The same as one JSON object, with its groups.
    pub fn snapshot_json(&self) -> Result<String, json::NoMemory> {
        let whole = SnapshotObject {
            snapshot_version: VERSION,
            kind: "tables",
            cuda_device: self.device().map(|context| context.ordinal()),
            tables: self.snapshot(),
            groups: Each(|| (0..self.groups.len()).map(|number| self.group_snapshot(number))),
        };
        json::text(&whole)
    }

    fn group_snapshot(&self, number: usize) -> GroupSnapshot {
        let group = &self.groups[number];
        let lengths = (0..self.max_requests).map(|row| group.staged_len(row));
        GroupSnapshot {
            block_size: group.config.block_size,
            kernel_block_size: group.config.kernel_block_size,
            row_blocks: group.config.row_blocks,
            row_width: group.width() as u64,
            rows_in_use: lengths.clone().filter(|&len| len > 0).count() as u64,
            num_entries: lengths.map(|len| len as u64).sum(),
            max_entries: (group.row_entries() * self.max_requests) as u64,
            pending_rows: group.pending_rows() as u64,
        }
    }
}
