//! Whether kernels can read a layer's pages as they would be planned.
//!
//! The views that are made of a plan prove it. This looks ahead, so that no plan is chosen whose
//! views are refused.

use std::sync::Arc;

use crate::backend::{Backend, select_kernel_block_size};
use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::spec::{Attention, AttentionKind, Spec};

/// Whether blocks of the layer split into kernel blocks that all backends take, and its pages keep
/// what they demand. `is_packed`: other layers' pages lie between two pages of this one.
pub(super) fn suits(spec: &Spec, backends: &[&Backend], is_packed: bool) -> bool {
    let Spec::Attention(attention) = spec else {
        // A state is read whole, page by page.
        return true;
    };
    if backends.is_empty() {
        return true;
    }
    let Some(ratio) = kernel_blocks_of_block(attention, backends) else {
        return false;
    };
    let page = attention.page();
    let is_padded = page.padded != page.unpadded;
    if is_packed && ratio > 1 {
        return false;
    }
    if (is_packed || is_padded) && !backends.iter().all(|b| follows_block_stride(b)) {
        return false;
    }
    let step = page.padded / ratio;
    let is_even =
        page.padded.is_multiple_of(ratio) && step.is_multiple_of(attention.fields().dtype.bytes());
    let aligned = |backend: &&Backend| step.is_multiple_of(backend.contract().alignment);
    is_even && backends.iter().all(aligned)
}

/// Whether kernels can read all layers of a plan that was made without looking at them.
pub(super) fn holds(plan: &Plan) -> bool {
    let mut seen: Option<*const Model> = None;
    let mut workers = plan.workers.iter().filter(|worker| {
        let model: *const Model = Arc::as_ptr(&worker.model);
        seen.replace(model) != Some(model)
    });
    workers.all(|worker| {
        let is_packed = worker.tensors.iter().any(|tensor| tensor.block_stride > 0);
        let layers = worker.model.layers();
        let is_read = |(place, &layer): (usize, &usize), group: &Group| {
            let backend = layers.get(layer).and_then(|layer| layer.backend.as_deref());
            let backends: &[&Backend] = &backend.into_iter().collect::<Vec<_>>();
            let spec = group.spec.spec_of(place);
            // A page that fills the block lies as it would alone.
            let is_packed = is_packed && worker.bytes_per_block != spec.page().padded;
            suits(spec, backends, is_packed)
        };
        worker.groups.iter().all(|group| {
            let mut members = group.layers.iter().enumerate();
            members.all(|member| is_read(member, group))
        })
    })
}

fn follows_block_stride(backend: &Backend) -> bool {
    backend.contract().follows_block_stride
}

/// Kernel blocks of one block; compressed layers are not split.
fn kernel_blocks_of_block(attention: &Attention, backends: &[&Backend]) -> Option<u64> {
    let block_size = attention.fields().block_size;
    let kernel = select_kernel_block_size(block_size, backends).ok()?;
    match attention.storage_block_size() == block_size {
        true => Some(block_size / kernel),
        false => Some(1),
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

/// The fewest tokens of a block that all backends take and that `divisor` divides; `fallback` where
/// none of their numbers is one.
pub(super) fn smallest_block(backends: &[&Backend], divisor: u64, fallback: u64) -> u64 {
    let numbers = backends
        .iter()
        .flat_map(|backend| &backend.contract().kernel_block_sizes)
        .map(|size| size.number());
    let mut sizes: Vec<u64> = numbers
        .filter_map(|number| crate::num::lcm("a block", number, divisor).ok())
        .collect();
    sizes.sort_unstable();
    let taken = |size: &u64| select_kernel_block_size(*size, backends).is_ok();
    sizes.into_iter().find(taken).unwrap_or(fallback)
}
