//! The policy `reference`: exactly the groups and pages of vLLM 0.26.

pub mod latent_tuples;
mod unify;

use std::sync::Arc;

use crate::plan::error::PlanError;
use crate::plan::finish::Layout;
use crate::plan::group::{WholeGroup, dealt, spec_of_all};
use crate::plan::merge_workers::{SpecNumbers, WholeModel};
use crate::plan::pack::Packing;
use crate::plan::promote::{WindowBlocks, promote};
use crate::plan::{GroupSpec, PlanConfig};
use crate::spec::{AttentionKind, Spec};
use unify::unify_pages;

/// What the reference makes of the layers.
pub(in crate::plan) fn layout<'a>(
    mut whole: WholeModel<'a>,
    config: &PlanConfig,
) -> Result<Layout<'a>, PlanError> {
    let groups = group_layers(&mut whole, config)?;
    Ok(Layout {
        whole,
        groups,
        packing: Packing::BySets {
            cross_layer_blocks: config.cross_layer_blocks,
        },
    })
}

/// Groups the layers of the whole model. Specs change where pages or block sizes must agree.
fn group_layers(
    whole: &mut WholeModel<'_>,
    config: &PlanConfig,
) -> Result<Vec<WholeGroup>, PlanError> {
    if config.hybrid_manager_off {
        promote(whole, WindowBlocks::OwnSize)?;
    }
    let all = || (0..whole.layers.len()).collect();
    match spec_of_all(whole) {
        _ if whole.layers.is_empty() => Ok(Vec::new()),
        Some(spec) => Ok(vec![WholeGroup::new(all(), spec)]),
        None if latent_tuples::is_shape(&whole.specs) => {
            let mut groups = latent_tuples::group(whole)?;
            if config.has_draft_layers {
                latent_tuples::mark_draft(whole, &mut groups);
            }
            Ok(groups)
        }
        None => group_by_spec(whole),
    }
}

/// One page size for all, then groups of equally many layers of one spec.
fn group_by_spec(whole: &mut WholeModel<'_>) -> Result<Vec<WholeGroup>, PlanError> {
    // Hidden states follow whatever page the other layers agree on. Without others they are
    // ordinary layers.
    let is_hidden = |spec: &Arc<Spec>| spec.is_attention_kind(AttentionKind::HiddenState);
    let all_hidden = whole.specs.iter().all(is_hidden);
    let set_aside: Vec<bool> = whole
        .specs
        .iter()
        .map(|spec| is_hidden(spec) && !all_hidden)
        .collect();
    let ordinary: Vec<usize> = (0..whole.specs.len())
        .filter(|&spec| !set_aside[spec])
        .collect();
    unify_pages(whole, &ordinary)?;

    let mut numbers = SpecNumbers::default();
    let mut unified: Vec<Arc<Spec>> = Vec::with_capacity(ordinary.len());
    let mut class_of_spec = vec![0; whole.specs.len()];
    for &spec in &ordinary {
        class_of_spec[spec] = numbers.number(&whole.specs[spec], &mut unified);
    }
    let mut classes: Vec<Vec<usize>> = vec![Vec::new(); unified.len()];
    let mut hidden = Vec::new();
    for (number, layer) in whole.layers.iter().enumerate() {
        match set_aside[layer.spec] {
            true => hidden.push(number),
            false => classes[class_of_spec[layer.spec]].push(number),
        }
    }

    let mut groups = Vec::new();
    let size = group_size(classes.iter().map(Vec::len));
    for (layers, spec) in classes.iter().zip(&unified) {
        for part in dealt(layers, layers.len().div_ceil(size)) {
            groups.push(WholeGroup::new(part, GroupSpec::One(Arc::clone(spec))));
        }
    }
    let page = unified.first().map_or(0, |spec| spec.page().padded);
    for number in hidden {
        let layer = whole.layers[number];
        let spec = hidden_in_page(layer.name, &whole.specs[layer.spec], page)?;
        groups.push(WholeGroup::new(
            vec![number],
            GroupSpec::One(Arc::new(spec)),
        ));
    }
    Ok(groups)
}

/// Layers of each group: as many as the smallest class has, unless the largest is hardly larger.
/// Then a few unused slots cost less than many groups.
fn group_size(counts: impl Iterator<Item = usize> + Clone) -> usize {
    let smallest = counts.clone().min().unwrap_or(1).max(1);
    let largest = counts.max().unwrap_or(1);
    if 2 * largest < 3 * smallest {
        largest
    } else {
        smallest
    }
}

/// A hidden state in pages of `page` bytes, with as many tokens as they hold.
fn hidden_in_page(layer: &str, spec: &Spec, page: u64) -> Result<Spec, PlanError> {
    let Some(attention) = spec.as_attention() else {
        return Ok(spec.clone());
    };
    let fields = attention.fields();
    let factors = [fields.num_kv_heads, fields.head_size, fields.dtype.bytes()];
    let token = crate::num::product("a token of hidden state", factors)
        .map_err(|error| PlanError::overflow(layer, error))?;
    let too_large = |bytes| PlanError::HiddenStateLargerThanPage {
        layer: layer.to_owned(),
        bytes,
        page,
    };
    if token > page {
        return Err(too_large(token));
    }
    let changed = attention.changed(|fields| {
        fields.block_size = page / token;
        fields.page_size_padded = Some(page);
    });
    let changed = changed.map_err(|error| PlanError::spec(layer, error))?;
    match changed.page().padded {
        bytes if bytes > page => Err(too_large(bytes)),
        _ => Ok(Spec::Attention(changed)),
    }
}
