//! Kernel block sizes, and what backends demand of the layers they read.

use std::sync::Arc;

use super::error::PlanError;
use super::merge_workers::takes_cache;
use super::{Group, WorkerPlan};
use crate::backend::{Backend, select_kernel_block_size};
use crate::model::{Layer, Model, Storage};
use crate::spec::Spec;

/// Block ids are signed 32-bit integers, and there are at most this many blocks.
pub(super) const MAX_BLOCKS: u64 = i32::MAX as u64;

/// Tokens of a kernel block of a group; `None` when no layer takes a cache or has a backend.
pub(super) fn select(
    model: &Model,
    number: usize,
    group: &Group,
) -> Result<Option<u64>, PlanError> {
    let mut backends: Vec<&Backend> = Vec::new();
    let mut last: Option<&Arc<Backend>> = None;
    for layer in readers(model, group) {
        let Some(backend) = &layer.backend else {
            continue;
        };
        if last.is_some_and(|last| Arc::ptr_eq(last, backend)) {
            continue;
        }
        last = Some(backend);
        if !backends
            .iter()
            .any(|known| std::ptr::eq(*known, &**backend))
        {
            backends.push(backend);
        }
    }
    if backends.is_empty() || !group.spec.first().takes_cache() {
        return Ok(None);
    }
    // A state is read whole, whatever its backend says of tokens.
    if group.spec.first().as_state().is_some() {
        return Ok(Some(group.spec.block_size()));
    }
    let selected = select_kernel_block_size(group.spec.block_size(), &backends);
    selected.map(Some).map_err(|error| PlanError::KernelBlock {
        group: number,
        layer: first_name(model, group).to_owned(),
        error,
    })
}

/// Whether every backend of a group takes kernel blocks of a given size.
pub(super) fn check_given(
    model: &Model,
    number: usize,
    group: &Group,
    size: u64,
) -> Result<(), PlanError> {
    // Compressed layers are read in blocks of stored slots, whatever the table steps by.
    let spec = group.spec.first();
    if spec.storage_block_size() != spec.block_size() {
        return Ok(());
    }
    for layer in readers(model, group) {
        if let Some(backend) = &layer.backend
            && !backend.takes_kernel_block(size)
        {
            return Err(PlanError::BackendBlockSize {
                group: number,
                layer: layer.name.to_string(),
                backend: backend.name().to_owned(),
                size,
                takes: backend.kernel_block_sizes_text(),
            });
        }
    }
    Ok(())
}

/// Whether every backend is made for the number of heads of its layers.
pub(super) fn check_heads(model: &Model, owners: &[usize]) -> Result<(), PlanError> {
    for (layer, &owner) in model.layers().iter().zip(owners) {
        let Some(backend) = &layer.backend else {
            continue;
        };
        let Some(wanted) = backend.contract().num_kv_heads else {
            continue;
        };
        let own = match &layer.storage {
            Storage::Own(spec) => Some(spec),
            Storage::Shared { spec, .. } => spec.as_ref(),
        };
        let spec = own.or_else(|| model.layers().get(owner).and_then(Layer::own_spec));
        let heads = spec
            .and_then(|spec| spec.as_attention())
            .map(|a| a.fields().num_kv_heads);
        if let Some(given) = heads.filter(|&heads| heads != wanted) {
            return Err(PlanError::BackendHeads {
                layer: layer.name.to_string(),
                backend: backend.name().to_owned(),
                wanted,
                given,
            });
        }
    }
    Ok(())
}

/// Whether all block ids, also those of kernel blocks, fit 32 bits.
pub(super) fn check_ids(plan: &WorkerPlan) -> Result<(), PlanError> {
    let check = |per_block: u64, layer: &str| {
        let allowed = MAX_BLOCKS / per_block.max(1);
        if plan.num_blocks <= allowed {
            return Ok(());
        }
        Err(PlanError::TooManyBlocks {
            num_blocks: plan.num_blocks,
            per_block,
            layer: layer.to_owned(),
            limit: MAX_BLOCKS,
            allowed,
        })
    };
    check(1, "")?;
    for group in &plan.groups {
        let kernel = group.kernel_block_size.filter(|&size| size > 0);
        let per_block = kernel.map_or(1, |size| group.spec.block_size() / size);
        check(per_block, first_name(&plan.model, group))?;
    }
    Ok(())
}

/// Whether memory of some tensor is read as different types, so that a block must be zeroed
/// before another layer gets it.
pub(super) fn needs_zeroing(plan: &WorkerPlan) -> bool {
    let mut spec_of = vec![None; plan.model.layers().len()];
    for group in &plan.groups {
        for (place, &layer) in group.layers.iter().enumerate() {
            if let Some(slot) = spec_of.get_mut(layer) {
                *slot = Some(group.spec.spec_of(place));
            }
        }
    }
    let of_layer = |&layer: &usize| spec_of.get(layer).copied().flatten();
    let mix = plan.tensors.iter().any(|tensor| {
        let mut specs = tensor.layers.iter().filter_map(of_layer);
        let first = specs.next();
        first.is_some_and(|first| specs.any(|spec| reads_otherwise(first, spec)))
    });
    let packed = plan
        .tensors
        .iter()
        .filter(|tensor| tensor.block_stride != 0);
    mix || overlap_otherwise(packed.flat_map(|tensor| {
        let specs = tensor.layers.iter().filter_map(of_layer);
        specs.map(|spec| (tensor.offset, spec.as_ref()))
    }))
}

/// Whether pages of packed tensors, which all lie in one memory, overlap and are read otherwise.
/// Pages of one group do not overlap, so those that do are different groups'.
fn overlap_otherwise<'a>(pages: impl Iterator<Item = (u64, &'a Spec)>) -> bool {
    let mut places: Vec<(u64, u64, &Spec)> = Vec::new();
    for (start, spec) in pages {
        let end = start.saturating_add(spec.page().padded);
        let is_known = |&(from, to, known): &(u64, u64, &Spec)| {
            (from, to) == (start, end) && std::ptr::eq(known, spec)
        };
        if !places.iter().any(is_known) {
            places.push((start, end, spec));
        }
    }
    let mix = |a: &(u64, u64, &Spec), b: &(u64, u64, &Spec)| {
        let overlap = a.0 < b.1 && b.0 < a.1;
        let is_shifted = a.0 != b.0 && (has_places(a.2) || has_places(b.2));
        overlap && (is_shifted || reads_otherwise(a.2, b.2))
    };
    let mut pairs = places.iter().enumerate();
    pairs.any(|(n, a)| places[..n].iter().any(|b| mix(a, b)))
}

/// Whether it depends on the place in a page what bytes mean: not all are elements of one type.
fn has_places(spec: &Spec) -> bool {
    match spec {
        Spec::State(_) => true,
        Spec::Attention(attention) => {
            let fields = attention.fields();
            let mode = fields.quant_mode;
            mode.is_per_token_head() || mode.width_multiple() > 1 || fields.cache_dtype.is_some()
        }
    }
}

/// Whether bytes that one layer wrote could be no numbers to another one.
fn reads_otherwise(a: &Spec, b: &Spec) -> bool {
    match (a, b) {
        _ if std::ptr::eq(a, b) => false,
        (Spec::State(a), Spec::State(b)) => {
            let (a, b) = (a.fields(), b.fields());
            a.dtypes != b.dtypes || a.ndims != b.ndims || a.dims != b.dims
        }
        (Spec::Attention(first), Spec::Attention(second)) => {
            let (a, b) = (first.fields(), second.fields());
            let same_type = a.dtype == b.dtype
                && a.quant_mode == b.quant_mode
                && a.cache_dtype == b.cache_dtype;
            // Scales lie between or behind the data, so their places must agree as well.
            let has_scales = a.quant_mode.is_per_token_head() || a.quant_mode.width_multiple() > 1;
            let same_places = first.content() == second.content()
                && first.stored_heads() == second.stored_heads()
                && first.storage_block_size() == second.storage_block_size();
            !same_type || (has_scales && !same_places)
        }
        _ => true,
    }
}

/// The layers that read a group's pages.
fn readers<'a>(model: &'a Model, group: &'a Group) -> impl Iterator<Item = &'a Layer> {
    let numbers = group.layers.iter().chain(&group.sharing_layers);
    numbers
        .filter_map(|&layer| model.layers().get(layer))
        .filter(|layer| takes_cache(layer) || matches!(layer.storage, Storage::Shared { .. }))
}

fn first_name<'a>(model: &'a Model, group: &Group) -> &'a str {
    let first = group
        .layers
        .first()
        .and_then(|&layer| model.layers().get(layer));
    first.map_or("", |layer| &layer.name)
}
