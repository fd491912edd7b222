//! The view of an attention layer: a backend's layout over the layer's pages.

use super::audit::{BlockRuns, audit};
use super::{MAX_RUNS, Pages, View, ViewError};
use crate::backend::{Axis, Backend, IndexWidth, Layout, ScalePlacement};
use crate::num::product;
use crate::spec::{Attention, Content};

/// The widest byte offset a 32-bit kernel can compute, in elements.
const MAX_OFFSET_32: u64 = i32::MAX as u64;

/// How the axes of an attention view lie, whatever dimensions they are fused to. In elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axes {
    /// From kernel block to kernel block.
    pub kernel_block_stride: u64,
    /// From a key to its value; 0 when there is no value of its own.
    pub value_offset: u64,
    /// From head to head; 0 when the layout has no heads.
    pub head_stride: u64,
    /// From slot to slot.
    pub token_stride: u64,
    /// From element to element of a key or value.
    pub content_stride: u64,
    /// Stored elements of a key, or of what is stored instead of keys and values.
    pub key_elements: u64,
    /// Stored elements of a value; 0 when there is none of its own.
    pub value_elements: u64,
    /// Elements that the scale behind each key and value takes; 0 when it lies elsewhere.
    pub scale_elements: u64,
    /// Slots of a kernel block.
    pub kernel_block_slots: u64,
    /// Heads.
    pub num_heads: u64,
}

/// Sizes of a layout's axes; an axis that a layout lacks has size 1.
struct Sizes {
    kv: u64,
    head: u64,
    token: u64,
    content: u64,
    /// What the content is made of.
    key: u64,
    value: u64,
    scale: u64,
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
    let dtype = spec.fields().dtype;
    let ratio = kernel_blocks_per_block(spec, kernel_block_size)?;
    let blocks = product("the kernel blocks", [pages.num_blocks, ratio])?;
    let (strides, runs) = lay_out(spec, backend, layout, &sizes, ratio, pages)?;
    let extents = extents(layout, &sizes, &strides, blocks)?;
    let (shape, view_strides) = extents.split_at(extents.len() / 2);
    let proof = audit(
        shape,
        view_strides,
        pages.offset_bytes,
        dtype.bytes(),
        pages.allocation_bytes,
    )?;
    let step = product("a kernel block", [strides.get(Axis::Block), dtype.bytes()])?;
    check_alignment(backend, pages.offset_bytes, step)?;
    check_index_width(backend, proof.largest_element_offset)?;
    Ok(View {
        dtype,
        offset_bytes: pages.offset_bytes,
        block_dim: layout.dim_of(Axis::Block).unwrap_or(0),
        runs,
        axes: Some(axes(layout, &sizes, &strides)),
        audit: proof,
        extents,
    })
}

/// The stride of each axis and the place of each block: without gaps where the layer is alone and
/// its content fills its pages, else page by page.
fn lay_out(
    spec: &Attention,
    backend: &Backend,
    layout: &Layout,
    sizes: &Sizes,
    ratio: u64,
    pages: &Pages,
) -> Result<(AxisStrides, BlockRuns), ViewError> {
    let element_bytes = spec.fields().dtype.bytes();
    let blocks = product("the kernel blocks", [pages.num_blocks, ratio])?;
    let content = product("a kernel block", [sizes.kernel_block()?, element_bytes])?;
    let content_of_block = product("a block", [content, ratio])?;
    if content_of_block > pages.page_bytes {
        return Err(ViewError::ContentLargerThanPage {
            content: content_of_block,
            page: pages.page_bytes,
        });
    }
    let mut strides = AxisStrides::default();
    if !pages.page_by_page && content_of_block == pages.step_bytes {
        strides.set_contiguous(layout.axes_in_memory(), sizes, blocks)?;
        return Ok((strides, spread_runs(layout, sizes, pages)?));
    }
    let step = kernel_block_step(spec, pages, ratio, content)?;
    let inside = layout.axes_in_memory().filter(|&axis| axis != Axis::Block);
    strides.set_contiguous(inside, sizes, blocks)?;
    strides.set(Axis::Block, step / element_bytes);
    check_dense(backend, content, step)?;
    let runs = BlockRuns {
        num_blocks: pages.num_blocks,
        offset_bytes: pages.offset_bytes,
        step_bytes: pages.step_bytes,
        span_bytes: pages.page_bytes,
        runs: 1,
        run_step_bytes: 0,
    };
    Ok((strides, runs))
}

/// The sizes of the view's dimensions, then their strides.
fn extents(
    layout: &Layout,
    sizes: &Sizes,
    strides: &AxisStrides,
    blocks: u64,
) -> Result<Box<[i64]>, ViewError> {
    let dims = layout.dims();
    let mut extents = Vec::with_capacity(2 * dims.len());
    for dim in dims {
        let axes = dim.iter().map(|&axis| sizes.of(axis, blocks));
        extents.push(product("a dimension", axes)? as i64);
    }
    for dim in dims {
        extents.push(strides.fused(layout, dim, sizes, blocks)? as i64);
    }
    Ok(extents.into_boxed_slice())
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
    let (key, value) = match spec.content() {
        Content::KeyValue { key, value } => (key, value),
        Content::Single(elements) | Content::PackedPair(elements) => (elements, 0),
    };
    Ok(Sizes {
        kv,
        head,
        token: kernel_block_size,
        content,
        key,
        value,
        scale,
    })
}

fn axes(layout: &Layout, sizes: &Sizes, strides: &AxisStrides) -> Axes {
    let content_stride = strides.get(Axis::Content);
    let value_offset = match (sizes.value, sizes.kv) {
        (0, _) => 0,
        (_, 2) => strides.get(Axis::Kv),
        // Fused with the content: the value begins where the key and its scale end.
        _ => (sizes.key + sizes.scale) * content_stride,
    };
    let has_heads = layout.dim_of(Axis::Head).is_some();
    Axes {
        kernel_block_stride: strides.get(Axis::Block),
        value_offset,
        head_stride: if has_heads {
            strides.get(Axis::Head)
        } else {
            0
        },
        token_stride: strides.get(Axis::Token),
        content_stride,
        key_elements: sizes.key,
        value_elements: sizes.value,
        scale_elements: sizes.scale,
        kernel_block_slots: sizes.token,
        num_heads: sizes.head,
    }
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
    if runs > MAX_RUNS {
        return Err(ViewError::TooManyRuns { runs });
    }
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

pub(super) fn check_alignment(backend: &Backend, offset: u64, step: u64) -> Result<(), ViewError> {
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

pub(super) fn check_index_width(backend: &Backend, largest: u64) -> Result<(), ViewError> {
    let narrow = backend.contract().index_width == IndexWidth::Bits32;
    if narrow && largest > MAX_OFFSET_32 {
        return Err(ViewError::IndexWidth { largest });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Contract, KernelBlockSize, Preset};
    use crate::dtype::Dtype;
    use crate::spec::AttentionFields;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn spec(block_size: u64, heads: u64, head_size: u64, padded: Option<u64>) -> Attention {
        Attention::new(AttentionFields {
            page_size_padded: padded,
            indexes_kv_by_block_stride: true,
            ..AttentionFields::full(block_size, heads, head_size, Dtype::F16)
        })
        .unwrap()
    }

    fn backend(text: &str, order: Option<&str>) -> Backend {
        Backend::new(Contract {
            layout: Some(Layout::parse(text, order).unwrap()),
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(1)],
            ..Preset::FlashAttentionNhd.contract().unwrap()
        })
        .unwrap()
    }

    fn pages(num_blocks: u64, page_bytes: u64, page_by_page: bool) -> Pages {
        Pages {
            num_blocks,
            page_bytes,
            step_bytes: page_bytes,
            offset_bytes: 0,
            allocation_bytes: num_blocks * page_bytes,
            page_by_page,
        }
    }

    const KV_FIRST: &str = "kv | block | token | head | content";

    #[test]
    fn keys_and_values_lie_apart_only_where_nobody_else_does() {
        let (spec, kv_first) = (spec(16, 2, 64, None), backend(KV_FIRST, None));
        for num_blocks in [1, 2, 3, 4] {
            let alone = attention_view(&spec, &kv_first, 16, &pages(num_blocks, 8192, false));
            let alone = alone.unwrap();
            assert_eq!(alone.shape(), [2, num_blocks as i64, 16, 2, 64]);
            assert_eq!(
                alone.strides(),
                [2048 * num_blocks as i64, 2048, 128, 64, 1]
            );
            assert_eq!((alone.runs.runs, alone.runs.span_bytes), (2, 4096));
            // V01 and V02: two blocks are not special.
            let beside = attention_view(&spec, &kv_first, 16, &pages(num_blocks, 8192, true));
            assert_eq!(beside.unwrap().strides(), [2048, 4096, 128, 64, 1]);
        }
    }

    #[test]
    fn padding_is_spread_over_the_kernel_blocks_of_a_page() {
        // V05
        let layout = backend("block | kv | token | head | content", None);
        let even = spec(32, 1, 8, Some(1280));
        let view = attention_view(&even, &layout, 16, &pages(3, 1280, false)).unwrap();
        assert_eq!(view.shape(), [6, 2, 16, 1, 8]);
        assert_eq!(view.strides(), [320, 128, 8, 8, 1]);
        let odd = spec(32, 1, 8, Some(1282));
        assert!(matches!(
            attention_view(&odd, &layout, 16, &pages(3, 1282, false)),
            Err(ViewError::PaddedSplitNotEven { .. })
        ));
    }

    #[test]
    fn a_packed_page_steps_by_the_slab() {
        // V04 and V12
        let (spec, kv_first) = (spec(4, 2, 3, None), backend(KV_FIRST, None));
        let packed = Pages {
            num_blocks: 2,
            page_bytes: 96,
            step_bytes: 256,
            offset_bytes: 32,
            allocation_bytes: 512,
            page_by_page: true,
        };
        let view = attention_view(&spec, &kv_first, 4, &packed).unwrap();
        assert_eq!(
            (view.strides(), view.offset_bytes),
            (&[24, 128, 6, 3, 1][..], 32)
        );
        assert!(matches!(
            attention_view(&spec, &kv_first, 2, &packed),
            Err(ViewError::PackedSplit { ratio: 2, .. })
        ));
        for (offset_bytes, step_bytes) in [(33, 256), (32, 257)] {
            let odd = Pages {
                offset_bytes,
                step_bytes,
                allocation_bytes: 600,
                ..packed
            };
            assert!(matches!(
                attention_view(&spec, &kv_first, 4, &odd),
                Err(ViewError::Misaligned { .. })
            ));
        }
    }

    #[test]
    fn fused_axes_need_even_steps() {
        let slots = backend("block*token | head | kv*content", None);
        let dense = spec(16, 2, 8, None);
        let page = dense.page().padded;
        let view = attention_view(&dense, &slots, 16, &pages(3, page, true)).unwrap();
        assert_eq!(
            (view.shape(), view.strides()),
            (&[48, 2, 16][..], &[32, 16, 1][..])
        );
        let padded = spec(16, 2, 8, Some(page + 64));
        assert!(matches!(
            attention_view(&padded, &slots, 16, &pages(3, page + 64, true)),
            Err(ViewError::FusedAxesApart {
                outer: "block",
                inner: "token",
                ..
            })
        ));
    }

    /// A layout of all five axes in some order, cut into dimensions at some places.
    fn layouts() -> impl Strategy<Value = (String, String)> {
        let axes = Just(vec!["block", "kv", "head", "token", "content"]).prop_shuffle();
        (axes, proptest::collection::vec(any::<bool>(), 4))
            .prop_map(|(axes, cuts)| {
                let mut dims = vec![axes[0].to_owned()];
                for (axis, cut) in axes[1..].iter().zip(cuts) {
                    match dims.last_mut() {
                        Some(last) if !cut => *last = format!("{last}*{axis}"),
                        _ => dims.push((*axis).to_owned()),
                    }
                }
                dims
            })
            .prop_flat_map(|dims| (Just(dims.join("|")), Just(dims).prop_shuffle()))
            .prop_map(|(text, order)| (text, order.join("|")))
    }

    proptest! {
        #[test]
        fn every_element_lies_in_its_own_block(
            (text, order) in layouts(),
            kernel in 1u64..4, ratio in 1u64..4, heads in 1u64..4, head_size in 1u64..4,
            num_blocks in 1u64..4, padding in 0u64..20, slab in 0u64..3, page_by_page: bool,
        ) {
            let content = 2 * kernel * ratio * heads * head_size * 2;
            let page = content + 2 * padding;
            let spec = spec(kernel * ratio, heads, head_size, Some(page));
            let backend = backend(&text, Some(&order));
            let packed = slab > 0;
            let step = page + 2 * slab;
            let pages = Pages {
                num_blocks,
                page_bytes: page,
                step_bytes: step,
                offset_bytes: 2 * slab,
                allocation_bytes: step * num_blocks + 2 * slab,
                page_by_page: page_by_page || packed,
            };
            let Ok(view) = attention_view(&spec, &backend, kernel, &pages) else {
                return Ok(());
            };
            let elements: i64 = view.shape().iter().product();
            prop_assert_eq!(elements as u64 * 2, content * num_blocks);
            let runs = view.runs;
            let mut seen = HashSet::new();
            let mut by_axes = HashSet::new();
            let axes = view.axes.unwrap();
            prop_assert_eq!((axes.key_elements, axes.value_elements), (head_size, head_size));
            for block in 0..num_blocks * ratio {
                for flat in 0..2 * heads * kernel * head_size {
                    let (kv, rest) = (flat % 2, flat / 2);
                    let (head, rest) = (rest % heads, rest / heads);
                    let (slot, element) = (rest % kernel, rest / kernel);
                    let offset = block * axes.kernel_block_stride
                        + kv * axes.value_offset
                        + head * axes.head_stride
                        + slot * axes.token_stride
                        + element * axes.content_stride;
                    by_axes.insert(view.offset_bytes + 2 * offset);
                }
            }
            let dims: Vec<&str> = text.split('|').collect();
            for flat in 0..elements {
                let (mut rest, mut offset, mut kernel_block) = (flat, 0, 0);
                for (dim, (&size, &stride)) in
                    view.shape().iter().zip(view.strides()).enumerate().rev()
                {
                    let index = rest % size;
                    rest /= size;
                    offset += index * stride;
                    if dim == view.block_dim {
                        // The block's part of an index into fused axes.
                        let inner = dims[dim].split('*').skip_while(|a| *a != "block").skip(1);
                        let inner: u64 = inner.map(|axis| match axis {
                            "kv" => 2,
                            "head" => heads,
                            "token" => kernel,
                            _ => head_size,
                        }).product();
                        let blocks = num_blocks * ratio;
                        kernel_block = index as u64 / inner % blocks;
                    }
                }
                let byte = view.offset_bytes + offset as u64 * 2;
                prop_assert!(seen.insert(byte));
                prop_assert!(byte + 2 <= pages.allocation_bytes);
                let block = kernel_block / ratio;
                let start = runs.offset_bytes + block * runs.step_bytes;
                let inside = (0..runs.runs).any(|run| {
                    let start = start + run * runs.run_step_bytes;
                    (start..start + runs.span_bytes).contains(&byte)
                });
                prop_assert!(inside, "{text} / {order}: byte {byte} of block {block}, {runs:?}");
            }
            prop_assert_eq!(seen, by_axes);
        }
    }
}
