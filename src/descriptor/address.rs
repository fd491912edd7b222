//! Where things are: a block of a layer, and one row of it.

use super::{Attention, Descriptor, DescriptorError, Layer};

/// A piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The allocation that it is part of.
    pub allocation: u64,
    /// Where it starts there.
    pub offset_bytes: u64,
    /// Its bytes.
    pub size_bytes: u64,
}

/// Which row of a slot and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RowPart {
    /// The key, or what is stored instead of keys and values.
    Key = 0,
    /// The value.
    Value = 1,
}

/// Where a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The allocation that holds it.
    pub allocation: u64,
    /// Where its first element starts there.
    pub offset_bytes: u64,
    /// Its elements.
    pub num_elements: u64,
    /// Elements from one to the next.
    pub stride_elements: u64,
    /// Further elements behind them, at the same distance, that are the row's scale; 0 when it has
    /// none there.
    pub scale_elements: u64,
}

impl Descriptor {
    /// The runs of a block's page.
    pub fn block_runs(
        &self,
        layer: usize,
        block: u64,
    ) -> Result<impl ExactSizeIterator<Item = Run> + use<>, DescriptorError> {
        let layer = self.layer(layer)?;
        check_range(layer, "block", block, self.num_blocks)?;
        let (pages, allocation) = (layer.pages, layer.allocation);
        // All blocks were proven to lie inside the allocation, so nothing overflows.
        let first = pages.offset_bytes + block * pages.block_step_bytes;
        // 32-bit hosts have no allocation of more runs than they can count.
        let num_runs = usize::try_from(pages.num_runs).unwrap_or(usize::MAX);
        Ok((0..num_runs).map(move |run| Run {
            allocation,
            offset_bytes: first + run as u64 * pages.run_step_bytes,
            size_bytes: pages.run_bytes,
        }))
    }

    /// One row of an attention layer.
    pub fn row(
        &self,
        layer: usize,
        block: u64,
        slot: u64,
        head: u64,
        part: RowPart,
    ) -> Result<Row, DescriptorError> {
        let layer = self.layer(layer)?;
        let stored = rows_of(layer)?;
        check_range(layer, "block", block, self.num_blocks)?;
        check_range(layer, "slot", slot, stored.block_slots)?;
        check_range(layer, "head", head, stored.num_kv_heads)?;
        let (num_elements, behind_key) = match part {
            RowPart::Key => (stored.key_elements, 0),
            RowPart::Value if stored.value_elements == 0 => {
                return Err(no_row(layer, "it stores no values of their own"));
            }
            RowPart::Value => (stored.value_elements, stored.value_offset_elements),
        };
        // All rows were proven to lie inside the allocation, so nothing overflows.
        let kernel_block = block * stored.kernel_blocks() + slot / stored.kernel_block_slots;
        let element = kernel_block * stored.kernel_block_stride_elements
            + slot % stored.kernel_block_slots * stored.slot_stride_elements
            + head * stored.head_stride_elements
            + behind_key;
        Ok(Row {
            allocation: layer.allocation,
            offset_bytes: layer.pages.offset_bytes + element * stored.dtype.bytes(),
            num_elements,
            stride_elements: stored.content_stride_elements,
            scale_elements: stored.inline_scale_elements,
        })
    }
}

fn rows_of(layer: &Layer) -> Result<&Attention, DescriptorError> {
    match &layer.attention {
        Some(stored) if stored.format.has_rows() => Ok(stored),
        Some(_) => Err(no_row(
            layer,
            "its kernels order the bytes of a page as they like; move whole blocks of it",
        )),
        None if layer.states.is_some() => Err(no_row(
            layer,
            "it keeps states; rows are those of attention layers",
        )),
        None => Err(no_row(layer, "no backend says how its pages are read")),
    }
}

fn no_row(layer: &Layer, why: &'static str) -> DescriptorError {
    DescriptorError::NoRow {
        layer: layer.name.clone(),
        why,
    }
}

fn check_range(
    layer: &Layer,
    what: &'static str,
    number: u64,
    count: u64,
) -> Result<(), DescriptorError> {
    if number < count {
        return Ok(());
    }
    Err(DescriptorError::OutOfRange {
        layer: layer.name.clone(),
        what,
        number,
        count,
    })
}
