//! Tables of all groups in a device's memory.
//!
//! A call packs what it has to say into a page of pinned memory: the arrays of the batch, how long
//! rows are, and the entries that changed. One copy takes that to the device, where one kernel
//! writes the entries into the tables and another one the input tables and the slots. Nothing is
//! read back: how long rows are there is known here.
//!
//! The arrays that a step points to stand at the end of the page, where they always are. All else is
//! packed from there downwards, so that both are one range. Changes that have no room on the page go
//! before it, on pages of their own.

#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr;
use std::slice;
use std::sync::Arc;

use super::error::TablesError;
use super::group::Group;
use super::ring::Ring;
use super::rows::{bytes_of, filled};
use super::slots::PAD_SLOT;
use super::snapshot::Snapshot;
use super::{Addresses, Batch, BatchAddresses, Task, reserved};
use crate::cuda::{Context, CudaError, DeviceAddress, DeviceBuffer, Entered, Stream, StreamRef};
use crate::kernels::device::{
    GroupTables, RowPatch, TABLE_KERNELS, TableStep, fill_tables, patch_tables,
};
use crate::kernels::{Loaded, SlotRule};
use crate::num::{self, Overflow};

/// What addresses are multiples of: those that an engine sees, and the groups'.
const ALIGNMENT: u64 = 256;

/// Bytes of a page for changes: some 16,000 entries of a few rows, or 2,300 of a row each.
const CHANGE_BYTES: usize = 64 << 10;

/// Tables of all groups in a device's memory.
#[derive(Debug)]
pub(super) struct DeviceTables {
    kernels: Loaded,
    /// Before the memory that its work writes to: going, it waits for that.
    ring: Ring,
    memory: DeviceBuffer,
    layout: Layout,
    max_requests: usize,
    max_tokens: usize,
    groups: Vec<DeviceGroup>,
    /// Rows of the input tables that may not be null.
    input_rows: usize,
    /// Slots that may not be pads.
    used_slots: usize,
    /// Room for the changes of a page.
    patches: Vec<RowPatch>,
    /// A change of which a part had no room.
    rest: Option<Change>,
    /// Whether a call failed midway, so that nobody knows what the tables are.
    is_lost: bool,
}

/// Of a group, its tables and what is in them.
#[derive(Debug)]
struct DeviceGroup {
    tables: GroupTables,
    /// Entries of each row of the table.
    table_len: Vec<u32>,
    /// Entries of each row of the input table.
    input_len: Vec<u32>,
}

/// Where things lie in the memory, in bytes from its start. The memory starts with a page.
#[derive(Debug, Clone)]
struct Layout {
    /// Where the part of a page ends that each call packs anew.
    packed: usize,
    seq_lens: usize,
    query_start: usize,
    positions: usize,
    page_bytes: usize,
    /// [`GroupTables`] of each group.
    groups: usize,
    /// Tables, then input tables.
    rows: Range<usize>,
    slots: Range<usize>,
    bytes: usize,
}

/// Entries `column` to `end` of a row, which are to be written.
#[derive(Debug, Clone, Copy)]
struct Change {
    group: usize,
    row: usize,
    column: usize,
    end: usize,
}

impl DeviceTables {
    /// Makes empty tables, and waits until they are. `groups` and `rules` go together.
    pub fn new(
        context: &Arc<Context>,
        groups: &[Group],
        rules: &[SlotRule],
        max_requests: usize,
        max_tokens: usize,
    ) -> Result<DeviceTables, TablesError> {
        let widths = || groups.iter().map(Group::width);
        let layout = Layout::new(widths(), max_requests, max_tokens)?;
        let memory = DeviceBuffer::new(context, layout.bytes)?;
        let ring = Ring::new(context, layout.page_bytes)?;
        let kernels = Loaded::new(context, TABLE_KERNELS)?;
        let mut placed = reserved(groups.len())?;
        let at = |offset: usize| memory.address() + offset as DeviceAddress;
        let (mut row, mut slot) = (layout.rows.start, layout.slots.start);
        let inputs = (layout.rows.end - layout.rows.start) / 2;
        for (width, &rule) in widths().zip(rules) {
            placed.push(DeviceGroup {
                tables: GroupTables {
                    table: at(row),
                    input: at(row + inputs),
                    slots: at(slot),
                    width: width as u64,
                    rule,
                },
                table_len: filled("row lengths", max_requests, 0)?,
                input_len: filled("row lengths", max_requests, 0)?,
            });
            // The layout has room for all of them.
            row += aligned(width * max_requests * size_of::<i32>());
            slot += aligned(max_tokens * size_of::<i64>());
        }
        let mut patches = filled("changes", CHANGE_BYTES / size_of::<RowPatch>(), NO_PATCH)?;
        patches.clear();
        let mut tables = DeviceTables {
            kernels,
            memory,
            layout,
            ring,
            max_requests,
            max_tokens,
            groups: placed,
            input_rows: 0,
            used_slots: 0,
            patches,
            rest: None,
            is_lost: false,
        };
        tables.clear_now(context)?;
        Ok(tables)
    }

    pub fn context(&self) -> &Arc<Context> {
        self.kernels.context()
    }

    pub fn addresses(&self, group: usize) -> Addresses {
        let tables = &self.groups[group].tables;
        Addresses {
            table: pointer(tables.table),
            input_table: pointer(tables.input),
            slots: pointer(tables.slots),
        }
    }

    /// Where the arrays of the last batch are.
    pub fn batch(&self) -> BatchAddresses {
        BatchAddresses {
            query_start: pointer(self.at(self.layout.query_start)),
            seq_lens: pointer(self.at(self.layout.seq_lens)),
            positions: pointer(self.at(self.layout.positions)),
        }
    }

    /// Adds what it is and holds.
    pub fn look(&self, snapshot: &mut Snapshot) {
        for group in &self.groups {
            snapshot.host_bytes += bytes_of(&group.table_len) + bytes_of(&group.input_len);
        }
        snapshot.host_bytes += bytes_of(&self.patches);
        snapshot.device_bytes = self.memory.bytes() as u64;
        snapshot.pinned_bytes = self.ring.bytes();
        (snapshot.pinned_pages, snapshot.pinned_pages_in_use) = self.ring.num_pages();
        snapshot.is_lost = self.is_lost;
        if !self.is_lost {
            snapshot.batch_requests = self.input_rows as u64;
            snapshot.batch_tokens = self.used_slots as u64;
        }
    }

    /// Puts a task on the stream. The batch was checked. After a failure nothing is under way any
    /// more, and the next call sends all rows again.
    pub fn run(
        &mut self,
        groups: &mut [Group],
        task: Task,
        batch: &Batch<'_>,
        stream: StreamRef,
    ) -> Result<(), TablesError> {
        let context = Arc::clone(self.context());
        let entered = context.enter()?;
        refuse_capture(&entered, stream)?;
        let task = Task {
            apply: task.apply || self.is_lost,
            ..task
        };
        let done = self.put(&entered, groups, task, batch, stream);
        self.settle(&entered, groups, done, stream)
    }

    /// Puts on the stream: makes all memory what it was at first.
    pub fn reset(&mut self, groups: &mut [Group], stream: StreamRef) -> Result<(), TablesError> {
        let context = Arc::clone(self.context());
        let entered = context.enter()?;
        refuse_capture(&entered, stream)?;
        let done = self.put_reset(&entered, stream);
        self.settle(&entered, groups, done, stream)?;
        groups.iter_mut().for_each(Group::reset);
        for group in &mut self.groups {
            group.table_len.fill(0);
            group.input_len.fill(0);
        }
        (self.input_rows, self.used_slots) = (0, 0);
        Ok(())
    }

    // --- what is put on the stream ----------------------------------------------------------

    fn put(
        &mut self,
        entered: &Entered<'_>,
        groups: &mut [Group],
        task: Task,
        batch: &Batch<'_>,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        self.ring.follow(entered, stream)?;
        loop {
            let mut page = Page::new(self.ring.page(entered)?, self.layout.packed);
            let mut step = TableStep::default();
            let is_last = !task.apply || {
                let changes = Changes {
                    groups,
                    placed: &mut self.groups,
                    rest: &mut self.rest,
                    patches: &mut self.patches,
                };
                changes.pack(&mut page, &mut step)
            };
            if is_last {
                self.input_rows = match task.gather {
                    true => {
                        step.num_rows = self.input_rows.max(batch.requests.len()) as u32;
                        batch.requests.len()
                    }
                    false => self.input_rows,
                };
                if task.gather || task.map {
                    pack_lengths(&mut self.groups, batch.requests, &mut page, &mut step);
                }
            }
            let mut end = self.layout.packed;
            if is_last && task.map {
                let num_tokens = batch.query_start[batch.requests.len()] as usize;
                step.num_slots = self.used_slots.max(num_tokens) as u64;
                self.used_slots = num_tokens;
                end = match task.publish {
                    true => self.layout.publish(batch, &mut page, &mut step),
                    false => {
                        step.positions = page.put(&batch.positions[..num_tokens]);
                        step.query_start = page.put(batch.query_start);
                        end
                    }
                };
            }
            let packed = page.start..end;
            if !packed.is_empty() {
                self.send(entered, packed, step, stream)?;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// Copies a part of the page to the device, and lets kernels do what it says. In `step`, what is
    /// on the page counts from the start of it.
    fn send(
        &mut self,
        entered: &Entered<'_>,
        packed: Range<usize>,
        mut step: TableStep,
        stream: StreamRef,
    ) -> Result<(), CudaError> {
        let base = self.memory.address();
        let from = self.ring.page(entered)?[packed.clone()].as_ptr();
        // SAFETY: the page is pinned and not written until the event behind the launches was
        // reached; the memory starts with a page.
        unsafe {
            let to = base + packed.start as DeviceAddress;
            entered.copy_in(to, from, packed.len(), stream)?;
        }
        step.groups = self.at(self.layout.groups);
        step.num_groups = self.groups.len() as u32;
        for on_page in [
            &mut step.patches,
            &mut step.requests,
            &mut step.lengths,
            &mut step.ends,
            &mut step.query_start,
            &mut step.positions,
        ] {
            *on_page += base;
        }
        step.ids = base; // of which patches count from the start
        // SAFETY: the kernels take such a step; what it leads to lies in the memory, which lives
        // until the stream is done: freeing it waits.
        unsafe {
            if let Some(launch) = patch_tables(&step) {
                self.kernels.launch(entered, &launch, &step, stream)?;
            }
            if let Some((launch, step)) = fill_tables(&step) {
                self.kernels.launch(entered, &launch, &step, stream)?;
            }
        }
        self.ring.record(entered, stream)
    }

    fn put_reset(&mut self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        self.ring.follow(entered, stream)?;
        self.ring.page(entered)?;
        self.fill(entered, stream)?;
        self.ring.record(entered, stream)
    }

    /// Puts on the stream: makes all rows null and all slots pads.
    fn fill(&self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        const { assert!(PAD_SLOT == -1, "all bits of a pad are set") };
        let Layout { rows, slots, .. } = &self.layout;
        // SAFETY: both ranges lie in the memory, which lives until the stream is done.
        unsafe {
            entered.fill(self.at(rows.start), 0, rows.len(), stream)?;
            entered.fill(self.at(slots.start), 0xff, slots.len(), stream)
        }
    }

    /// Fills fresh memory, and waits until it is done.
    fn clear_now(&mut self, context: &Arc<Context>) -> Result<(), CudaError> {
        let entered = context.enter()?;
        let _beside = entered.beside_captures()?;
        let stream = Stream::new(context)?;
        let done = self.put_first(&entered, stream.get());
        done.and(self.ring.settle(&entered, stream.get()))?;
        self.ring.free_all();
        Ok(())
    }

    fn put_first(&mut self, entered: &Entered<'_>, stream: StreamRef) -> Result<(), CudaError> {
        self.fill(entered, stream)?;
        let page_bytes = self.layout.page_bytes;
        let per_page = page_bytes / size_of::<GroupTables>();
        let mut to = self.at(self.layout.groups);
        for groups in self.groups.chunks(per_page) {
            let mut page = Page::new(self.ring.page(entered)?, page_bytes);
            for group in groups.iter().rev() {
                page.put(&[group.tables]);
            }
            let packed = &page.bytes[page.start..];
            // SAFETY: pinned memory that is not written before this is done, to the groups' place.
            unsafe { entered.copy_in(to, packed.as_ptr(), packed.len(), stream) }?;
            to += packed.len() as DeviceAddress;
            self.ring.record(entered, stream)?;
        }
        // What kernels of the engine see before the first batch.
        // SAFETY: the memory starts with a page.
        unsafe { entered.fill(self.memory.address(), 0, page_bytes, stream) }
    }

    // --- failures ---------------------------------------------------------------------------

    /// After a failure, waits until nothing that was put on the stream is under way, and forgets
    /// what is in the tables.
    fn settle(
        &mut self,
        entered: &Entered<'_>,
        groups: &mut [Group],
        done: Result<(), CudaError>,
        stream: StreamRef,
    ) -> Result<(), TablesError> {
        self.is_lost = done.is_err();
        if self.is_lost {
            let _ = self.ring.settle(entered, stream);
            self.rest = None;
            groups.iter_mut().for_each(Group::mark_all);
            for group in &mut self.groups {
                // Nothing was ever written past that many entries.
                let width = u32::try_from(group.tables.width).unwrap_or(u32::MAX);
                group.table_len.fill(width);
                group.input_len.fill(width);
            }
            (self.input_rows, self.used_slots) = (self.max_requests, self.max_tokens);
        }
        Ok(done?)
    }

    fn at(&self, offset: usize) -> DeviceAddress {
        self.memory.address() + offset as DeviceAddress
    }
}

impl Layout {
    /// The numbers were checked, but not how much memory they come to.
    fn new(
        widths: impl Iterator<Item = usize> + Clone,
        max_requests: usize,
        max_tokens: usize,
    ) -> Result<Layout, Overflow> {
        let what = "block tables";
        let (requests, tokens) = (max_requests as u64, max_tokens as u64);
        let num_groups = widths.clone().count() as u64;
        let [i32s, i64s] = [size_of::<i32>(), size_of::<i64>()].map(|bytes| bytes as u64);
        let mut end = 0;
        let mut place = |bytes: u64| -> Result<Range<usize>, Overflow> {
            let start = end;
            end = num::round_up(what, num::sum(what, [start, bytes])?, ALIGNMENT)?;
            Ok(start as usize..end as usize)
        };
        // Of each group, lengths and ends of the rows; of the batch, its requests, and its positions
        // and starts when they are not published; and what alignment may skip before each of them.
        let lengths = num::product(what, [num_groups, requests, 2 * i32s])?;
        let of_batch = num::product(what, [tokens + requests + 1, 2 * i64s])?;
        let changes = (CHANGE_BYTES + size_of::<RowPatch>()) as u64;
        let packed = place(num::sum(what, [lengths, of_batch, changes])?)?;
        let seq_lens = place(requests * i32s)?;
        let query_start = place((requests + 1) * i32s)?;
        let positions = place(tokens * i64s)?;
        let page_bytes = positions.end;
        let group_bytes = size_of::<GroupTables>() as u64;
        let groups = place(num::product(what, [num_groups, group_bytes])?)?;
        let mut all_rows = groups.end..groups.end;
        for width in widths.clone().chain(widths.clone()) {
            let bytes = num::product(what, [width as u64, requests, i32s])?;
            all_rows.end = place(bytes)?.end;
        }
        let mut slots = all_rows.end..all_rows.end;
        for _ in widths {
            slots.end = place(tokens * i64s)?.end;
        }
        Ok(Layout {
            packed: packed.end,
            seq_lens: seq_lens.start,
            query_start: query_start.start,
            positions: positions.start,
            page_bytes,
            groups: groups.start,
            rows: all_rows,
            bytes: slots.end,
            slots,
        })
    }

    /// Puts the arrays of a batch where a step points to; returns where they end. Positions past the
    /// tokens come along: an engine that pads its steps has numbers there that its kernels may read.
    fn publish(&self, batch: &Batch<'_>, page: &mut Page<'_>, step: &mut TableStep) -> usize {
        let room = (self.page_bytes - self.positions) / size_of::<i64>();
        let positions = &batch.positions[..batch.positions.len().min(room)];
        page.put_at(self.seq_lens, batch.seq_lens);
        step.query_start = page.put_at(self.query_start, batch.query_start);
        step.positions = page.put_at(self.positions, positions);
        self.positions + size_of_val(positions)
    }
}

/// A page that is packed downwards. What `put` returns counts from the start of the page.
struct Page<'p> {
    bytes: &'p mut [u8],
    /// Where the packed part starts.
    start: usize,
}

impl<'p> Page<'p> {
    fn new(bytes: &'p mut [u8], end: usize) -> Page<'p> {
        Page { bytes, start: end }
    }

    /// Packs values below all others.
    fn put<T: Plain>(&mut self, values: &[T]) -> DeviceAddress {
        let (offset, room) = self.room(values.len());
        room.copy_from_slice(values);
        offset
    }

    /// Room for values below all others; whatever an earlier call left there is in it.
    fn room<T: Plain>(&mut self, count: usize) -> (DeviceAddress, &mut [T]) {
        let start = self.start - count * size_of::<T>();
        self.start = start - start % align_of::<T>();
        (self.start as DeviceAddress, self.place(self.start, count))
    }

    /// Puts values where they always are.
    fn put_at<T: Plain>(&mut self, offset: usize, values: &[T]) -> DeviceAddress {
        self.place(offset, values.len()).copy_from_slice(values);
        offset as DeviceAddress
    }

    fn place<T: Plain>(&mut self, offset: usize, count: usize) -> &mut [T] {
        let place = &mut self.bytes[offset..offset + count * size_of::<T>()];
        let start = place.as_mut_ptr().cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: `count` values lie in the bytes, aligned, and any bytes are a `Plain` value.
        unsafe { slice::from_raw_parts_mut(start, count) }
    }
}

/// Types that a device reads as they lie in the host's memory.
///
/// # Safety
/// They have no padding, and any bytes are a value.
unsafe trait Plain: Copy {}
// SAFETY: a number.
unsafe impl Plain for i32 {}
// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for i64 {}
// SAFETY: numbers whose sizes add up to the struct's.
unsafe impl Plain for RowPatch {}
// SAFETY: numbers whose sizes add up to the struct's.
unsafe impl Plain for GroupTables {}

/// Packs how long the rows of the batch are, and how much of each input row is written.
fn pack_lengths(
    groups: &mut [DeviceGroup],
    requests: &[i32],
    page: &mut Page<'_>,
    step: &mut TableStep,
) {
    let (num_requests, num_rows) = (requests.len(), step.num_rows as usize);
    step.num_requests = num_requests as u32;
    step.requests = page.put(requests);
    let (offset, lengths) = page.room::<u32>(groups.len() * num_requests);
    step.lengths = offset;
    // No group has any where `requests` is empty.
    for (group, lengths) in groups
        .iter()
        .zip(lengths.chunks_exact_mut(num_requests.max(1)))
    {
        for (length, &request) in lengths.iter_mut().zip(requests) {
            *length = group.len(request);
        }
    }
    let (offset, ends) = page.room::<u32>(groups.len() * num_rows);
    step.ends = offset;
    for (group, ends) in groups
        .iter_mut()
        .zip(ends.chunks_exact_mut(num_rows.max(1)))
    {
        for (row, end) in ends.iter_mut().enumerate() {
            let len = requests.get(row).map_or(0, |&request| group.len(request));
            let before = std::mem::replace(&mut group.input_len[row], len);
            *end = len.max(before);
        }
    }
}

impl DeviceGroup {
    /// Entries of the row of a request; none for a dummy.
    fn len(&self, request: i32) -> u32 {
        usize::try_from(request).map_or(0, |request| self.table_len[request])
    }
}

/// The changes of all groups that were not sent yet.
struct Changes<'c> {
    groups: &'c mut [Group],
    placed: &'c mut [DeviceGroup],
    rest: &'c mut Option<Change>,
    patches: &'c mut Vec<RowPatch>,
}

impl Changes<'_> {
    /// Packs as many changes as have room; returns whether these were the last.
    fn pack(self, page: &mut Page<'_>, step: &mut TableStep) -> bool {
        let mut room = CHANGE_BYTES;
        self.patches.clear();
        let mut number = 0;
        let is_last = loop {
            let change = match self.rest.take() {
                Some(rest) => rest,
                None if number == self.groups.len() => break true,
                None => match next_change(number, &mut self.groups[number], self.placed) {
                    Some(change) => change,
                    None => {
                        number += 1;
                        continue;
                    }
                },
            };
            let entries = room.saturating_sub(size_of::<RowPatch>()) / size_of::<i32>();
            if entries == 0 {
                *self.rest = Some(change);
                break false;
            }
            let end = change.end.min(change.column + entries);
            let ids = self.groups[change.group]
                .staged()
                .part(change.row, change.column..end);
            let first_id = page.put(ids) / size_of::<i32>() as u64;
            self.patches.push(RowPatch {
                group: change.group as u32,
                row: change.row as u32,
                column: change.column as u32,
                count: ids.len() as u32,
                first_id,
            });
            room -= size_of::<RowPatch>() + size_of_val(ids);
            if end < change.end {
                *self.rest = Some(Change {
                    column: end,
                    ..change
                });
            }
        };
        step.num_patches = self.patches.len() as u32;
        step.patches = page.put(self.patches);
        is_last
    }
}

/// The next change of a group. It counts as sent from now on.
fn next_change(number: usize, group: &mut Group, placed: &mut [DeviceGroup]) -> Option<Change> {
    loop {
        let (row, column) = group.take_change()?;
        let len = group.staged_len(row);
        let before = std::mem::replace(&mut placed[number].table_len[row], len as u32);
        // What the row had past its new end becomes null, as it is in the staged row.
        let end = len.max(before as usize);
        if column < end {
            return Some(Change {
                group: number,
                row,
                column,
                end,
            });
        }
    }
}

/// A page of a graph's copy would be read again by its replays, when it holds another step.
fn refuse_capture(entered: &Entered<'_>, stream: StreamRef) -> Result<(), TablesError> {
    match entered.is_capturing(stream)? {
        true => Err(TablesError::Capturing),
        false => Ok(()),
    }
}

const NO_PATCH: RowPatch = RowPatch {
    group: 0,
    row: 0,
    column: 0,
    count: 0,
    first_id: 0,
};

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT as usize)
}

fn pointer<T>(address: DeviceAddress) -> *mut T {
    ptr::without_provenance_mut(address as usize)
}
