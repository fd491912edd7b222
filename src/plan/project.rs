//! The groups of the whole model as one stage has them.

use std::sync::Arc;

use super::group::WholeGroup;
use super::merge_workers::Stage;
use super::{Group, GroupSpec};
use crate::spec::SpecSet;

/// Where each layer of the whole model is: its group, and its place there.
pub(super) fn places(groups: &[WholeGroup], num_layers: usize) -> Vec<(usize, usize)> {
    let mut places = vec![(0, 0); num_layers];
    for (group, members) in groups.iter().enumerate() {
        for (place, &layer) in members.layers.iter().enumerate() {
            places[layer] = (group, place);
        }
    }
    places
}

/// Each group with the layers of it that the stage has, in the group's order. A group may be
/// empty here.
pub(super) fn project(
    groups: &[WholeGroup],
    places: &[(usize, usize)],
    stage: &Stage<'_>,
) -> Vec<Group> {
    let mut members: Vec<Vec<(usize, usize)>> = vec![Vec::new(); groups.len()];
    let mut sharing: Vec<Vec<usize>> = vec![Vec::new(); groups.len()];
    for (layer, whole) in stage.whole.iter().enumerate() {
        let owner = stage.owners[layer];
        match (whole, stage.whole[owner]) {
            (Some(whole), _) => {
                let (group, place) = places[*whole];
                members[group].push((place, layer));
            }
            (None, Some(owner)) => sharing[places[owner].0].push(layer),
            (None, None) => {}
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
