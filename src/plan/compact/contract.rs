//! Whether kernels can read a layer's pages as they would be planned.
//!
//! The views that are made of a plan prove it. This looks ahead, so that no plan is chosen whose
//! views are refused.

use std::sync::Arc;

use crate::backend::{Axis, Backend, Layout, select_kernel_block_size};
use crate::model::{Layer, Model};
use crate::num::{lcm, round_up};
use crate::plan::describe::brief;
use crate::plan::{Plan, WorkerPlan, reach};
use crate::spec::{Attention, AttentionKind, Spec};

/// What kernels demand of pages and a layer's pages do not keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) enum Fault {
    /// No kernel block size divides the block and suits all backends.
    KernelBlock,
    /// Blocks of several kernel blocks among other layers' pages.
    PackedSplit,
    /// Padding, or other layers' pages between two pages.
    NotDense,
    /// Kernel blocks that do not begin at whole elements.
    Uneven,
    /// Blocks that are not aligned.
    Alignment,
}

impl Fault {
    /// What kernels demand, for messages.
    fn text(self) -> &'static str {
        match self {
            Fault::KernelBlock => "takes no kernel block that divides such a block",
            Fault::PackedSplit => {
                "splits blocks, and blocks among other layers' pages are not split"
            }
            Fault::NotDense => {
                "needs dense pages, without padding or other layers' pages between them"
            }
            Fault::Uneven => "needs kernel blocks that begin at whole elements",
            Fault::Alignment => "needs blocks aligned otherwise",
        }
    }
}

/// Whether blocks of the layer split into kernel blocks that all backends take, and its pages keep
/// what they demand. `is_packed`: other layers' pages lie between two pages of this one.
pub(super) fn suits(spec: &Spec, backends: &[&Backend], is_packed: bool) -> bool {
    let attention = spec.as_attention();
    let ratio = attention.and_then(|attention| kernel_blocks_of_block(attention, backends));
    fault(spec, backends, ratio, is_packed).is_none()
}

/// What backends do not find in pages of blocks that are split into `ratio` kernel blocks; none where no
/// kernel block suits all.
fn fault(spec: &Spec, backends: &[&Backend], ratio: Option<u64>, is_packed: bool) -> Option<Fault> {
    let Spec::Attention(attention) = spec else {
        // A state is read whole, page by page.
        let page = spec.page().padded;
        let aligned = |b: &&Backend| page.is_multiple_of(b.contract().alignment);
        // Where its page is packed, what is packed sees to the alignment.
        let is_aligned = is_packed || backends.iter().all(aligned);
        return (!is_aligned).then_some(Fault::Alignment);
    };
    if backends.is_empty() {
        return None;
    }
    let Some(ratio) = ratio else {
        return Some(Fault::KernelBlock);
    };
    let page = attention.page();
    let is_padded = page.padded != page.unpadded;
    let step = page.padded / ratio;
    let is_even =
        page.padded.is_multiple_of(ratio) && step.is_multiple_of(attention.fields().dtype.bytes());
    let aligned = |backend: &&Backend| step.is_multiple_of(backend.contract().alignment);
    match () {
        () if is_packed && ratio > 1 => Some(Fault::PackedSplit),
        () if (is_packed || is_padded) && !backends.iter().all(|b| follows_block_stride(b)) => {
            Some(Fault::NotDense)
        }
        () if !is_even => Some(Fault::Uneven),
        () if !backends.iter().all(aligned) => Some(Fault::Alignment),
        () => None,
    }
}

/// Whether kernels can read all layers of a plan that was made without looking at them.
pub(super) fn holds(plan: &Plan) -> bool {
    faults(plan).next().is_none()
}

/// Why kernels cannot read a layer of a plan, in a sentence; `None` where they read all.
pub(in crate::plan) fn why_unread(plan: &Plan) -> Option<String> {
    if let Some((layer, backend, spec, fault)) = faults(plan).next() {
        let (name, backend) = (&layer.name, backend.name());
        return Some(format!(
            "layer {name} ({}): {backend} {}",
            brief(spec),
            fault.text()
        ));
    }
    plan.workers.iter().find_map(|worker| {
        let reach = reach::of_plan(worker)?;
        let is_short = reach.blocks < worker.num_blocks;
        is_short.then(|| {
            format!(
                "layer {}: {} computes 32-bit offsets and reaches {} of {} blocks",
                reach.layer, reach.backend, reach.blocks, worker.num_blocks
            )
        })
    })
}

/// Layers whose kernels cannot read them, index widths left out. Of workers that follow each other with
/// one model the first speaks for all.
fn faults(plan: &Plan) -> impl Iterator<Item = (&Layer, &Backend, &Spec, Fault)> {
    let mut seen: Option<*const Model> = None;
    let workers = plan.workers.iter().filter(move |worker| {
        let model: *const Model = Arc::as_ptr(&worker.model);
        seen.replace(model) != Some(model)
    });
    workers.flat_map(|worker| {
        let is_packed = worker.tensors.iter().any(|tensor| tensor.block_stride > 0);
        let groups = worker.groups.iter();
        let members = groups.flat_map(|group| {
            let members = reach::readers(&worker.model, group);
            members.map(move |(place, layer)| (group, place, layer))
        });
        members.filter_map(move |(group, place, layer)| {
            let backend = layer.backend.as_deref()?;
            let spec = group.spec.spec_of(place);
            // A page that fills the block lies as it would alone.
            let is_packed = is_packed && worker.bytes_per_block != spec.page().padded;
            // Those who read one table read one size of kernel block.
            let attention = spec.as_attention();
            let kernel = attention.zip(group.kernel_block_size);
            let ratio = kernel.map(|(attention, size)| split(attention, size));
            let misplaced = || {
                let owner = *group.layers.get(place)?;
                let is_aligned = match is_packed {
                    true => slot_is_aligned(worker, owner, backend),
                    false => parts_are_aligned(worker, owner, spec, backend, ratio.unwrap_or(1)),
                };
                (!is_aligned).then_some(Fault::Alignment)
            };
            let fault = fault(spec, &[backend], ratio, is_packed).or_else(misplaced)?;
            Some((layer, backend, spec.as_ref(), fault))
        })
    })
}

/// Whether a layer's slot begins in every packed block where its kernels want it.
fn slot_is_aligned(worker: &WorkerPlan, layer: usize, backend: &Backend) -> bool {
    let alignment = backend.contract().alignment;
    if alignment == 1 {
        return true;
    }
    let mut slots = worker.tensors.iter();
    let slot = slots.find(|tensor| tensor.layers.contains(&layer));
    slot.is_none_or(|slot| (slot.offset | slot.block_stride).is_multiple_of(alignment))
}

/// Whether the blocks of a layer that is alone in its memory begin where its kernels want them also where
/// they are spread: all keys, then all values.
fn parts_are_aligned(
    worker: &WorkerPlan,
    layer: usize,
    spec: &Spec,
    backend: &Backend,
    ratio: u64,
) -> bool {
    let alignment = backend.contract().alignment;
    let Some(attention) = spec.as_attention().filter(|_| alignment > 1) else {
        return true;
    };
    let groups = worker.groups.iter();
    let has_state = groups
        .flat_map(|group| group.spec.specs())
        .any(|spec| spec.as_state().is_some());
    let mut tensors = worker.tensors.iter();
    let is_alone = tensors.any(|tensor| tensor.layers == [layer]);
    let Some(layout) = backend.layout(attention.fields().quant_mode) else {
        return true;
    };
    // Pages that are shared lie one by one, and so do blocks that are outermost.
    let is_spread = layout.axes_in_memory().next() != Some(Axis::Block);
    if has_state || !is_alone || !is_spread {
        return true;
    }
    let element = attention.fields().dtype.bytes();
    let outer = layout
        .axes_in_memory()
        .take_while(|&axis| axis != Axis::Block);
    let step = outer.fold(attention.page().unpadded / ratio, |step, axis| match axis {
        Axis::Kv => step / 2,
        Axis::Head => step / attention.stored_heads().max(1),
        Axis::Token => step / (attention.storage_block_size() / ratio).max(1),
        // Nobody's kernels have blocks inside an element's place; a step of one element is the least.
        Axis::Content | Axis::Block => step.min(element),
    });
    step.is_multiple_of(alignment)
}

/// Whether there may be something between two pages of a layer. One dimension of blocks and of something
/// inside them has one stride, so not even kernels that are given it could.
fn follows_block_stride(backend: &Backend) -> bool {
    let contract = backend.contract();
    let fused = |layout: &Layout| {
        let block = layout.dim_of(Axis::Block).map(|dim| &layout.dims()[dim]);
        block.is_some_and(|axes| axes.len() > 1)
    };
    let others = contract.quantised_layouts.iter().map(|(_, layout)| layout);
    contract.follows_block_stride && !contract.layout.iter().chain(others).any(fused)
}

/// What a page of such a block is a multiple of so that each of its kernel blocks is aligned.
pub(super) fn kernel_step(spec: &Spec, backends: &[&Backend]) -> u64 {
    let Some(attention) = spec.as_attention().filter(|_| !backends.is_empty()) else {
        return 1;
    };
    let aligned = backends.iter().map(|backend| backend.contract().alignment);
    // Alignments and element sizes are powers of two.
    let bytes = aligned.fold(attention.fields().dtype.bytes(), u64::max);
    let ratio = kernel_blocks_of_block(attention, backends).unwrap_or(1);
    ratio.saturating_mul(bytes)
}

/// Kernel blocks of one block, where one size suits all backends.
fn kernel_blocks_of_block(attention: &Attention, backends: &[&Backend]) -> Option<u64> {
    let kernel = select_kernel_block_size(attention.fields().block_size, backends).ok()?;
    Some(split(attention, kernel))
}

/// Kernel blocks of `kernel` tokens in one block; compressed layers are not split.
fn split(attention: &Attention, kernel: u64) -> u64 {
    let block_size = attention.fields().block_size;
    match attention.storage_block_size() == block_size {
        true => (block_size / kernel.max(1)).max(1),
        false => 1,
    }
}

/// Whether the layer's pages may have padding that it did not come with.
pub(super) fn may_pad(attention: &Attention, backends: &[&Backend]) -> bool {
    let fields = attention.fields();
    // Hidden states are written to whatever page the others agree on.
    let is_hidden = fields.kind == AttentionKind::HiddenState;
    (is_hidden || fields.indexes_kv_by_block_stride)
        && backends.iter().all(|b| follows_block_stride(b))
}

/// The fewest tokens of a block, not fewer than `at_least`, that all backends take and that `divisor`
/// divides; `fallback` where none of their numbers leads to one.
pub(super) fn smallest_block(
    backends: &[&Backend],
    divisor: u64,
    at_least: u64,
    fallback: u64,
) -> u64 {
    let numbers = backends
        .iter()
        .flat_map(|backend| &backend.contract().kernel_block_sizes)
        .map(|size| size.number());
    let mut sizes: Vec<u64> = numbers
        .filter_map(|number| lcm("a block", number, divisor).ok())
        .filter_map(|step| round_up("a block", at_least, step).ok())
        .collect();
    sizes.sort_unstable();
    let taken = |size: &u64| select_kernel_block_size(*size, backends).is_ok();
    sizes.into_iter().find(taken).unwrap_or(fallback)
}
