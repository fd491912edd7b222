//! Windowed layers stored in full, so that one block table serves all layers.

use std::sync::Arc;

use super::describe::brief;
use super::error::PlanError;
use super::merge_workers::WholeModel;
use crate::spec::{AttentionFields, AttentionKind, Spec, SpecError, SpecSet, merge};

/// Whether one block table can serve layers of all of `specs`.
pub(super) fn one_table_serves(specs: &[Arc<Spec>]) -> bool {
    let refs: Vec<&Spec> = specs.iter().map(Arc::as_ref).collect();
    specs.is_empty() || SpecSet::new(specs.to_vec()).is_some() || merge(&refs).is_ok()
}

/// Tokens of a block of a windowed layer that is stored in full.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowBlocks {
    /// Its own number.
    OwnSize,
    /// That of the full layers, so that one block table can serve both.
    OfFullLayers,
}

/// Turns windowed and chunked layers into full ones that remember their window or chunk, if
/// there are full layers and one block table does not serve all as they are.
pub(super) fn promote(whole: &mut WholeModel<'_>, blocks: WindowBlocks) -> Result<(), PlanError> {
    if one_table_serves(&whole.specs) {
        return Ok(());
    }
    if let Some(full) = whole.specs.iter().find(|spec| is_full(spec)) {
        // Compressed windows cache few tokens in a block; only the full layers' block size can
        // serve both. Whether every other layer keeps its own is the policy's decision.
        let full_block_size = full.block_size();
        for number in 0..whole.specs.len() {
            let spec = &whole.specs[number];
            let promoted = promoted(spec, full_block_size, blocks)
                .map_err(|error| PlanError::spec(whole.name_of_spec(number), error))?;
            if let Some(promoted) = promoted {
                whole.specs[number] = Arc::new(promoted);
            }
        }
    }
    if one_table_serves(&whole.specs) {
        return Ok(());
    }
    Err(not_unifiable(whole))
}

fn is_full(spec: &Spec) -> bool {
    spec.as_attention()
        .is_some_and(|attention| attention.fields().kind.is_full_family())
}

/// `None` for a layer that stays as it is.
fn promoted(
    spec: &Spec,
    full_block_size: u64,
    blocks: WindowBlocks,
) -> Result<Option<Spec>, SpecError> {
    let Some(attention) = spec.as_attention() else {
        return Ok(None);
    };
    let change = |change: &dyn Fn(&mut AttentionFields)| {
        attention
            .changed(|fields| change(fields))
            .map(|spec| Some(Spec::Attention(spec)))
    };
    match attention.fields().kind {
        AttentionKind::SlidingWindow | AttentionKind::ChunkedLocal => change(&|fields| {
            fields.kind = AttentionKind::Full;
            if blocks == WindowBlocks::OfFullLayers {
                fields.block_size = full_block_size;
            }
        }),
        AttentionKind::SlidingWindowMla => change(&|fields| {
            fields.kind = AttentionKind::Mla;
            fields.block_size = full_block_size;
        }),
        _ => Ok(None),
    }
}

/// Names the first two layers that no block table serves together.
fn not_unifiable(whole: &WholeModel<'_>) -> PlanError {
    let specs = &whole.specs;
    let other = (1..specs.len())
        .find(|&other| !one_table_serves(&[Arc::clone(&specs[0]), Arc::clone(&specs[other])]));
    let other = other.unwrap_or(specs.len().saturating_sub(1));
    PlanError::HybridDisabledNotUnifiable {
        first_layer: whole.name_of_spec(0).to_owned(),
        first: brief(&specs[0]),
        layer: whole.name_of_spec(other).to_owned(),
        other: brief(&specs[other]),
    }
}
