//! The groups of the whole model as one stage has them.

use std::sync::Arc;

use super::error::PlanError;
use super::group::WholeGroup;
use super::merge_workers::{Stage, WholeModel};
use super::{Group, GroupSpec};
use crate::spec::SpecSet;

/// Where each layer of the whole model is: its group, and its place there. `None` for one that fits
/// in no group.
pub(super) fn places(groups: &[WholeGroup], num_layers: usize) -> Vec<Option<(usize, usize)>> {
    let mut places = vec![None; num_layers];
    for (group, members) in groups.iter().enumerate() {
        for (place, &layer) in members.layers.iter().enumerate() {
            places[layer] = Some((group, place));
        }
    }
    places
}

/// Refuses a model with layers that fit in no group.
pub(super) fn check_all_placed(
    places: &[Option<(usize, usize)>],
    whole: &WholeModel<'_>,
) -> Result<(), PlanError> {
    let left_over = || {
        whole
            .layers
            .iter()
            .zip(places)
            .filter(|(_, place)| place.is_none())
    };
    match left_over().next() {
        None => Ok(()),
        Some((layer, _)) => Err(PlanError::LayersNotGrouped {
            layer: layer.name.to_owned(),
            kind: whole.specs[layer.spec].kind_name(),
            count: left_over().count(),
        }),
    }
}

/// Each group with the layers of it that the stage has, in the group's order. A group may be
/// empty here.
pub(super) fn project(
    groups: &[WholeGroup],
    places: &[Option<(usize, usize)>],
    stage: &Stage<'_>,
) -> Vec<Group> {
    let mut members: Vec<Vec<(usize, usize)>> = vec![Vec::new(); groups.len()];
    let mut sharing: Vec<Vec<usize>> = vec![Vec::new(); groups.len()];
    for (layer, whole) in stage.whole.iter().enumerate() {
        let owner = stage.owners[layer];
        let place_of = |whole: usize| places[whole];
        match (
            whole.and_then(place_of),
            stage.whole[owner].and_then(place_of),
        ) {
            (Some((group, place)), _) => members[group].push((place, layer)),
            (None, Some((group, _))) if whole.is_none() => sharing[group].push(layer),
            _ => {}
        }
    }
    let stage_groups = groups.iter().zip(members).zip(sharing);
    let stage_groups = stage_groups.map(|((whole, mut members), sharing_layers)| {
        members.sort_unstable();
        Group {
            spec: spec_of(whole, &members),
            is_draft: whole.is_draft && !members.is_empty(),
            layers: members.into_iter().map(|(_, layer)| layer).collect(),
            sharing_layers,
            kernel_block_size: None,
        }
    });
    stage_groups.collect()
}

fn spec_of(whole: &WholeGroup, members: &[(usize, usize)]) -> GroupSpec {
    match &whole.spec {
        GroupSpec::Set(set) if !members.is_empty() && members.len() < whole.layers.len() => {
            let specs = members
                .iter()
                .map(|&(place, _)| Arc::clone(&set.specs()[place]));
            // Part of a set of one family is one.
            SpecSet::new(specs.collect()).map_or_else(|| whole.spec.clone(), GroupSpec::Set)
        }
        spec => spec.clone(),
    }
}
