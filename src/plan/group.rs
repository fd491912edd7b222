//! Groups of layers that share a block table, whatever policy makes them.

use std::sync::Arc;

use super::GroupSpec;
use super::describe::brief;
use super::error::PlanError;
use super::merge_workers::{SpecNumbers, WholeModel};
use crate::spec::{Spec, SpecSet, merge};

/// A group of the whole model.
pub(super) struct WholeGroup {
    /// Its layers, as numbers in the whole model.
    pub layers: Vec<usize>,
    /// What they store.
    pub spec: GroupSpec,
    /// Whether it holds layers of a speculative draft.
    pub is_draft: bool,
}

impl WholeGroup {
    /// A group of layers that belong to no draft.
    pub fn new(layers: Vec<usize>, spec: GroupSpec) -> WholeGroup {
        WholeGroup {
            layers,
            spec,
            is_draft: false,
        }
    }
}

/// The spec of all layers in one group, if one block table serves all.
pub(super) fn spec_of_all(whole: &WholeModel<'_>) -> Option<GroupSpec> {
    let specs = &whole.specs;
    if let [only] = specs.as_slice() {
        return Some(GroupSpec::One(Arc::clone(only)));
    }
    let refs: Vec<&Spec> = specs.iter().map(Arc::as_ref).collect();
    if let Ok(merged) = merge(&refs) {
        return Some(GroupSpec::One(Arc::new(merged)));
    }
    SpecSet::new(specs.clone())?;
    let of_layers = whole
        .layers
        .iter()
        .map(|layer| Arc::clone(&specs[layer.spec]));
    SpecSet::new(of_layers.collect()).map(GroupSpec::Set)
}

/// Layers dealt out in turn, so that each pipeline stage has its share of every group.
pub(super) fn dealt<T: Copy>(layers: &[T], groups: usize) -> impl Iterator<Item = Vec<T>> {
    let groups = groups.max(1);
    (0..groups).map(move |first| layers.iter().copied().skip(first).step_by(groups).collect())
}

/// The spec of a group of given layers, named for messages, if one block table serves them.
pub(super) fn spec_of_given<'a>(
    group: usize,
    layers: &[(&'a str, &'a Arc<Spec>)],
) -> Result<Option<GroupSpec>, PlanError> {
    let Some(((first_layer, first), _)) = layers.split_first() else {
        return Ok(None);
    };
    let mut numbers = SpecNumbers::default();
    let mut different = Vec::new();
    for (_, spec) in layers {
        numbers.number(spec, &mut different);
    }
    let refs: Vec<&Spec> = different.iter().map(Arc::as_ref).collect();
    if let Ok(merged) = merge(&refs) {
        let merged = if different.len() == 1 {
            Arc::clone(first)
        } else {
            Arc::new(merged)
        };
        return Ok(Some(GroupSpec::One(merged)));
    }
    let of_layers = layers.iter().map(|(_, spec)| Arc::clone(spec)).collect();
    if let Some(set) = SpecSet::new(of_layers) {
        return Ok(Some(GroupSpec::Set(set)));
    }
    let alone =
        |spec: &Arc<Spec>| SpecSet::new(vec![Arc::clone(first), Arc::clone(spec)]).is_none();
    let (layer, other) = layers
        .iter()
        .find(|(_, spec)| alone(spec))
        .unwrap_or(&layers[0]);
    Err(PlanError::GroupNotUniform {
        group,
        first_layer: (*first_layer).to_owned(),
        first: brief(first),
        layer: (*layer).to_owned(),
        other: brief(other),
    })
}
