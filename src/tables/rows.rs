//! Rows of block ids in one piece of memory that never moves.

use std::ops::Range;

use super::error::TablesError;
use crate::kernels;
use crate::num;

/// The block that nobody owns.
pub const NULL_BLOCK: i32 = 0;

/// As many rows as there may be requests. Past a row's own entries there are null blocks, always.
#[derive(Debug)]
pub(super) struct Rows {
    ids: Vec<i32>,
    lengths: Vec<u32>,
    width: usize,
}

impl Rows {
    pub fn new(rows: usize, width: usize) -> Result<Rows, TablesError> {
        let total = num::product("a block table", [rows as u64, width as u64, 4])? / 4;
        Ok(Rows {
            ids: filled("a block table", total as usize, NULL_BLOCK)?,
            lengths: filled("row lengths", rows, 0)?,
            width,
        })
    }

    /// All rows, one after another.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Bytes of memory.
    pub fn host_bytes(&self) -> u64 {
        bytes_of(&self.ids) + bytes_of(&self.lengths)
    }

    pub fn len(&self, row: usize) -> usize {
        self.lengths[row] as usize
    }

    /// The entries of a row.
    pub fn row(&self, row: usize) -> &[i32] {
        let start = row * self.width;
        &self.ids[start..start + self.len(row)]
    }

    /// Columns of a row, null past its entries.
    pub fn part(&self, row: usize, columns: Range<usize>) -> &[i32] {
        let start = row * self.width;
        &self.ids[start + columns.start..start + columns.end]
    }

    /// Cuts a row.
    pub fn truncate(&mut self, row: usize, len: usize) {
        let start = row * self.width;
        let old = self.len(row);
        if len < old {
            self.ids[start + len..start + old].fill(NULL_BLOCK);
            self.lengths[row] = len as u32;
        }
    }

    /// Adds blocks, each as its `ratio` kernel blocks. There must be room.
    pub fn extend(&mut self, row: usize, blocks: &[i32], ratio: usize) {
        let start = row * self.width + self.len(row);
        let added = blocks.len() * ratio;
        let place = &mut self.ids[start..start + added];
        if ratio == 1 {
            place.copy_from_slice(blocks);
        } else {
            for (block, part) in blocks.iter().zip(place.chunks_exact_mut(ratio)) {
                let first = block * ratio as i32;
                for (id, k) in part.iter_mut().zip(0..) {
                    *id = first + k;
                }
            }
        }
        self.lengths[row] += added as u32;
    }

    /// Makes `row` what `other_row` of `other` is, when they agree up to `from`.
    pub fn take(&mut self, row: usize, from: usize, other: &Rows, other_row: usize) {
        let (start, held) = (row * self.width, self.len(row));
        let ids = other.row(other_row);
        kernels::gather_row(ids, &mut self.ids[start..start + self.width], from, held);
        self.lengths[row] = ids.len() as u32;
    }

    /// Puts the entries of `from` into `to`, and none into `from`.
    pub fn relocate(&mut self, from: usize, to: usize) {
        let len = self.len(from);
        self.truncate(to, len);
        let start = from * self.width;
        self.ids.copy_within(start..start + len, to * self.width);
        self.lengths[to] = len as u32;
        self.truncate(from, 0);
    }

    pub fn swap(&mut self, a: usize, b: usize) {
        let longest = self.len(a).max(self.len(b));
        let (a_start, b_start) = (a * self.width, b * self.width);
        for column in 0..longest {
            self.ids.swap(a_start + column, b_start + column);
        }
        self.lengths.swap(a, b);
    }

    /// Makes all of the memory null again, whatever was written there.
    pub fn reset(&mut self) {
        self.ids.fill(NULL_BLOCK);
        self.lengths.fill(0);
    }
}

/// Bytes that a list takes.
pub(super) fn bytes_of<T>(list: &Vec<T>) -> u64 {
    (list.capacity() * size_of::<T>()) as u64
}

/// Memory whose size a caller chose.
pub(super) fn filled<T: Clone>(
    what: &'static str,
    count: usize,
    value: T,
) -> Result<Vec<T>, TablesError> {
    let mut values = Vec::new();
    reserve(&mut values, what, count)?;
    values.resize(count, value);
    Ok(values)
}

/// Room for `count` values more.
pub(super) fn reserve<T>(
    values: &mut Vec<T>,
    what: &'static str,
    count: usize,
) -> Result<(), TablesError> {
    values
        .try_reserve_exact(count)
        .map_err(|_| TablesError::NoMemory {
            what,
            bytes: (count as u64).saturating_mul(size_of::<T>() as u64),
        })
}
