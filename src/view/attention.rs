//! The view of an attention layer: a backend's layout over the layer's pages.

use super::audit::{BlockRuns, audit};
use super::{Pages, View, ViewError};
use crate::backend::{Axis, Backend, IndexWidth, Layout, ScalePlacement};
use crate::num::product;
use crate::spec::{Attention, Content};

/// The widest byte offset a 32-bit kernel can compute, in elements.
const MAX_OFFSET_32: u64 = i32::MAX as u64;

/// Sizes of a layout's axes; an axis that a layout lacks has size 1.
struct Sizes {
    kv: u64,
    head: u64,
    token: u64,
    content: u64,
}

impl Sizes {
    fn of(&self, axis: Axis, blocks: u64) -> u64 {
        match axis {
            Axis::Block => blocks,
            Axis::Kv => self.kv,
            Axis::Head => self.head,
            Axis::Token => self.token,
            Axis::Content => self.content,
        }
    }

    /// Elements of one kernel block.
    fn kernel_block(&self) -> Result<u64, ViewError> {
        let sizes = [self.kv, self.head, self.token, self.content];
        Ok(product("a kernel block", sizes)?)
    }
}

/// The view of a layer's pages through its backend's layout, with kernel blocks of
/// `kernel_block_size` stored slots.
pub fn attention_view(
    spec: &Attention,
    backend: &Backend,
    kernel_block_size: u64,
    pages: &Pages,
) -> Result<View, ViewError> {
    let layout = backend
        .layout(spec.fields().quant_mode)
        .ok_or(ViewError::NoLayout)?;
    let sizes = axis_sizes(spec, backend, layout, kernel_block_size)?;
    let element_bytes = spec.fields().dtype.bytes();
    let ratio = kernel_blocks_per_block(spec, kernel_block_size)?;
    let content = product("a kernel block", [sizes.kernel_block()?, element_bytes])?;
    let content_of_block = product("a block", [content, ratio])?;
    if content_of_block > pages.page_bytes {
        return Err(ViewError::ContentLargerThanPage {
            content: content_of_block,
            page: pages.page_bytes,
        });
    }

    let blocks = product("the kernel blocks", [pages.num_blocks, ratio])?;
    let mut strides = AxisStrides::default();
    let runs = if !pages.page_by_page && content_of_block == pages.step_bytes {
        strides.set_contiguous(layout.axes_in_memory(), &sizes, blocks)?;
        spread_runs(layout, &sizes, pages)?
    } else {
        let step = kernel_block_step(spec, pages, ratio, content)?;
        let inside = layout.axes_in_memory().filter(|&axis| axis != Axis::Block);
        strides.set_contiguous(inside, &sizes, blocks)?;
        strides.set(Axis::Block, step / element_bytes);
        check_dense(backend, content, step)?;
        BlockRuns {
            num_blocks: pages.num_blocks,
            offset_bytes: pages.offset_bytes,
            step_bytes: pages.step_bytes,
            span_bytes: pages.page_bytes,
            runs: 1,
            run_step_bytes: 0,
        }
    };

    let dims = layout.dims();
    let mut extents = Vec::with_capacity(2 * dims.len());
    for dim in dims {
        let size = product(
            "a dimension",
            dim.iter().map(|&axis| sizes.of(axis, blocks)),
        )?;
        extents.push(size as i64);
    }
    for dim in dims {
        extents.push(strides.fused(layout, dim, &sizes, blocks)? as i64);
    }
    let (shape, view_strides) = extents.split_at(dims.len());
    let proof = audit(
        shape,
        view_strides,
        pages.offset_bytes,
        element_bytes,
        pages.allocation_bytes,
    )?;
    check_alignment(
        backend,
        pages.offset_bytes,
        strides.get(Axis::Block) * element_bytes,
    )?;
    let narrow = backend.contract().index_width == IndexWidth::Bits32;
    if narrow && proof.largest_element_offset > MAX_OFFSET_32 {
        return Err(ViewError::IndexWidth {
            largest: proof.largest_element_offset,
        });
    }
    Ok(View {
        dtype: spec.fields().dtype,
        offset_bytes: pages.offset_bytes,
        block_dim: layout.dim_of(Axis::Block).unwrap_or(0),
        runs,
        audit: proof,
        extents: extents.into_boxed_slice(),
    })
}

/// How large each axis is: the spec decides, never the number in a shape.
fn axis_sizes(
    spec: &Attention,
    backend: &Backend,
    layout: &Layout,
    kernel_block_size: u64,
) -> Result<Sizes, ViewError> {
    let contract = backend.contract();
    let scale = match contract.scale_placement {
        ScalePlacement::Inline => spec.scale_bytes() / spec.fields().dtype.bytes(),
        ScalePlacement::PageEnd => 0,
    };
    let has_kv_axis = layout.dim_of(Axis::Kv).is_some();
    let fused = layout.fuses_kv_with_content();
    let (kv, content) = match spec.content() {
        Content::KeyValue { key, value } => {
            let equal_needed = contract.needs_equal_kv_widths || !fused;
            if equal_needed && key != value {
                return Err(ViewError::WidthsDiffer { key, value });
            }
            match (has_kv_axis, fused) {
                (true, true) => (1, key + value + 2 * scale),
                (true, false) => (2, key + scale),
                (false, _) => {
                    return Err(ViewError::NoKvAxis {
                        layout: layout.to_string(),
                    });
                }
            }
        }
        Content::Single(_) if has_kv_axis => {
            return Err(ViewError::NothingForKvAxis {
                layout: layout.to_string(),
            });
        }
        Content::PackedPair(_) if has_kv_axis && !fused => {
            return Err(ViewError::NothingForKvAxis {
                layout: layout.to_string(),
            });
        }
        Content::Single(elements) | Content::PackedPair(elements) => (1, elements + scale),
    };
    let head = spec.stored_heads();
    if head > 1 && layout.dim_of(Axis::Head).is_none() {
        return Err(ViewError::NoHeadAxis {
            layout: layout.to_string(),
            heads: head,
        });
    }
    Ok(Sizes {
        kv,
        head,
        token: kernel_block_size,
        content,
    })
}

fn kernel_blocks_per_block(spec: &Attention, kernel_block_size: u64) -> Result<u64, ViewError> {
    let block_slots = spec.storage_block_size();
    if kernel_block_size == 0 || !block_slots.is_multiple_of(kernel_block_size) {
        return Err(ViewError::KernelBlockNotDividing {
            kernel_block_size,
            block_slots,
        });
    }
    Ok(block_slots / kernel_block_size)
}

/// Bytes from kernel block to kernel block when pages lie one after another. Padding is spread
/// evenly over the kernel blocks of a page, so that one stride reaches them all.
fn kernel_block_step(
    spec: &Attention,
    pages: &Pages,
    ratio: u64,
    content: u64,
) -> Result<u64, ViewError> {
    let dtype = spec.fields().dtype;
    let element_bytes = dtype.bytes();
    for (what, bytes) in [
        ("the block stride", pages.step_bytes),
        ("the offset", pages.offset_bytes),
    ] {
        if !bytes.is_multiple_of(element_bytes) {
            return Err(ViewError::Misaligned {
                what,
                bytes,
                dtype,
                element_bytes,
            });
        }
    }
    if ratio > 1 && pages.step_bytes != pages.page_bytes {
        return Err(ViewError::PackedSplit {
            page: pages.page_bytes,
            step: pages.step_bytes,
            ratio,
        });
    }
    let step = pages.step_bytes / ratio;
    let even = pages.step_bytes.is_multiple_of(ratio)
        && step >= content
        && step.is_multiple_of(element_bytes);
    if !even {
        return Err(ViewError::PaddedSplitNotEven {
            page: pages.page_bytes,
            ratio,
            content,
            element_bytes,
        });
    }
    Ok(step)
}

/// Where blocks lie when the layout fills the allocation without gaps: axes outside the block axis
/// cut each block into that many pieces.
fn spread_runs(layout: &Layout, sizes: &Sizes, pages: &Pages) -> Result<BlockRuns, ViewError> {
    let outside = layout
        .axes_in_memory()
        .take_while(|&axis| axis != Axis::Block);
    let runs = product(
        "the axes outside the blocks",
        outside.map(|axis| sizes.of(axis, 1)),
    )?;
    let span_bytes = pages.page_bytes / runs;
    Ok(BlockRuns {
        num_blocks: pages.num_blocks,
        offset_bytes: pages.offset_bytes,
        step_bytes: span_bytes,
        span_bytes,
        runs,
        run_step_bytes: product("a run of blocks", [span_bytes, pages.num_blocks])?,
    })
}

fn check_dense(backend: &Backend, content: u64, step: u64) -> Result<(), ViewError> {
    if !backend.contract().follows_block_stride && step != content {
        return Err(ViewError::PageNotDense { content, step });
    }
    Ok(())
}

fn check_alignment(backend: &Backend, offset: u64, step: u64) -> Result<(), ViewError> {
    let wanted = backend.contract().alignment;
    // The lowest bit set in either is what every block is aligned to.
    let bits = offset | step;
    if bits & (wanted - 1) != 0 {
        return Err(ViewError::BlocksNotAligned {
            wanted,
            aligned: 1 << bits.trailing_zeros(),
        });
    }
    Ok(())
}

/// Elements from one index of an axis to the next.
#[derive(Default)]
struct AxisStrides([u64; Axis::ALL.len()]);

impl AxisStrides {
    fn get(&self, axis: Axis) -> u64 {
        self.0[axis as usize]
    }

    fn set(&mut self, axis: Axis, stride: u64) {
        self.0[axis as usize] = stride;
    }

    /// Lays the axes out without gaps, the last one innermost.
    fn set_contiguous(
        &mut self,
        axes: impl DoubleEndedIterator<Item = Axis>,
        sizes: &Sizes,
        blocks: u64,
    ) -> Result<(), ViewError> {
        let mut stride = 1;
        for axis in axes.rev() {
            self.set(axis, stride);
            stride = product("a stride", [stride, sizes.of(axis, blocks).max(1)])?;
        }
        Ok(())
    }

    /// The one stride of a dimension of fused axes, if they have one.
    fn fused(
        &self,
        layout: &Layout,
        dim: &[Axis],
        sizes: &Sizes,
        blocks: u64,
    ) -> Result<u64, ViewError> {
        let mut inner: Option<Axis> = None;
        for &axis in dim
            .iter()
            .rev()
            .filter(|&&axis| sizes.of(axis, blocks) != 1)
        {
            if let Some(inner) = inner {
                let span = product("a stride", [self.get(inner), sizes.of(inner, blocks)])?;
                if self.get(axis) != span {
                    return Err(ViewError::FusedAxesApart {
                        layout: layout.to_string(),
                        outer: axis.name(),
                        inner: inner.name(),
                    });
                }
            }
            inner = Some(axis);
        }
        let innermost = dim.iter().rev().find(|&&axis| sizes.of(axis, blocks) != 1);
        let innermost = innermost.or(dim.last()).copied().unwrap_or(Axis::Content);
        Ok(self.get(innermost))
    }
}
