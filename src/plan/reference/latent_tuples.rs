//! Models that mix full latents of several page sizes with windowed ones (DeepSeek V4).
//!
//! A tuple is one layer of each page size of the full latents. The full latents are one group;
//! windowed layers of one window are split into groups of about as many tuples, each padded to
//! the nearest page of a full latent. The numbers are those of the reference.

use std::collections::HashMap;
use std::sync::Arc;

use crate::num::{Overflow, product, sum};
use crate::plan::error::PlanError;
use crate::plan::group::WholeGroup;
use crate::plan::merge_workers::WholeModel;
use crate::plan::{Group, GroupSpec};
use crate::spec::{AttentionKind, Spec, SpecSet, layers_of_commonest_page};

/// Values above this are refused, which bounds the search for a number of tuples.
const LARGEST_COUNT: u64 = 1 << 20;

/// Whether the model is of this shape.
pub(in crate::plan) fn is_shape(specs: &[Arc<Spec>]) -> bool {
    let mut pages = specs.iter().map(|spec| spec.page().padded);
    let first = pages.next();
    specs
        .iter()
        .any(|spec| spec.is_attention_kind(AttentionKind::SlidingWindowMla))
        && pages.any(|page| Some(page) != first)
}

/// Windowed layers that need the same number of blocks.
struct Windowed {
    block_size: u64,
    window: u64,
    layers: Vec<usize>,
}

/// Groups a model of this shape. Layers that are no latents are left over.
pub(in crate::plan) fn group(whole: &mut WholeModel<'_>) -> Result<Vec<WholeGroup>, PlanError> {
    let (full, windowed) = sort_layers(whole);
    let Some(&first_full) = full.first() else {
        let layer = windowed.first().and_then(|w| w.layers.first());
        return Err(PlanError::NoMlaGroup {
            layer: layer
                .map_or("", |&layer| whole.layers[layer].name)
                .to_owned(),
        });
    };
    let full_set = set_of(whole, &full).ok_or_else(|| mla_not_uniform(whole, first_full, &full))?;
    let full_pages = full_set.distinct_pages();

    let full_tuples = layers_of_commonest_page(full.iter().map(|&layer| page_of(whole, layer)));
    let mut counts = vec![full_tuples];
    for w in &windowed {
        counts.push(layers_of_commonest_page(
            w.layers.iter().map(|&layer| page_of(whole, layer)),
        ));
    }
    let tuples = layer_tuple_count(&counts, full_tuples)?;

    let mut groups = vec![WholeGroup::new(full, GroupSpec::Set(full_set))];
    for w in &windowed {
        split_windowed(whole, w, &full_pages, tuples, &mut groups)?;
    }
    Ok(groups)
}

/// Full latents, and windowed ones by block size and window.
fn sort_layers(whole: &WholeModel<'_>) -> (Vec<usize>, Vec<Windowed>) {
    let mut full = Vec::new();
    let mut windowed: Vec<Windowed> = Vec::new();
    let mut by_window = HashMap::new();
    for (number, layer) in whole.layers.iter().enumerate() {
        let fields = whole.specs[layer.spec].as_attention().map(|a| a.fields());
        match fields.map(|fields| (fields.kind, fields)) {
            Some((AttentionKind::Mla | AttentionKind::HiddenState, _)) => full.push(number),
            Some((AttentionKind::SlidingWindowMla, fields)) => {
                let window = fields.sliding_window.unwrap_or(0);
                let place = *by_window
                    .entry((fields.block_size, window))
                    .or_insert_with(|| {
                        windowed.push(Windowed {
                            block_size: fields.block_size,
                            window,
                            layers: Vec::new(),
                        });
                        windowed.len() - 1
                    });
                windowed[place].layers.push(number);
            }
            _ => {}
        }
    }
    (full, windowed)
}

fn page_of(whole: &WholeModel<'_>, layer: usize) -> u64 {
    whole.specs[whole.layers[layer].spec].page().padded
}

fn set_of(whole: &WholeModel<'_>, layers: &[usize]) -> Option<SpecSet> {
    let specs = layers
        .iter()
        .map(|&layer| Arc::clone(&whole.specs[whole.layers[layer].spec]));
    SpecSet::new(specs.collect())
}

fn mla_not_uniform(whole: &WholeModel<'_>, first: usize, full: &[usize]) -> PlanError {
    let block_size = |layer: usize| whole.specs[whole.layers[layer].spec].block_size();
    let other = full
        .iter()
        .copied()
        .find(|&layer| block_size(layer) != block_size(first));
    let other = other.unwrap_or(first);
    PlanError::MlaNotUniform {
        first_layer: whole.layers[first].name.to_owned(),
        first: block_size(first),
        layer: whole.layers[other].name.to_owned(),
        other: block_size(other),
    }
}

/// Pads windowed layers to pages of full latents and deals their tuples out to groups.
fn split_windowed(
    whole: &mut WholeModel<'_>,
    windowed: &Windowed,
    full_pages: &[u64],
    tuples: u64,
    groups: &mut Vec<WholeGroup>,
) -> Result<(), PlanError> {
    let largest = full_pages.last().copied().unwrap_or(0);
    let too_large = windowed
        .layers
        .iter()
        .find(|&&layer| page_of(whole, layer) > largest);
    if let Some(&layer) = too_large {
        return Err(PlanError::SwaPageLarger {
            layer: whole.layers[layer].name.to_owned(),
            page: page_of(whole, layer),
            largest,
        });
    }
    let mut columns: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut column_of_page = HashMap::new();
    for &layer in &windowed.layers {
        let page = page_of(whole, layer);
        let wanted = full_pages[full_pages.partition_point(|&full| full < page)];
        if page < wanted {
            // Layers of one spec are of one window, so all of them get here.
            let spec = whole.layers[layer].spec;
            let padded = whole.specs[spec].with_page_size_padded(Some(wanted));
            let padded = padded.map_err(|e| PlanError::spec(whole.layers[layer].name, e))?;
            whole.specs[spec] = Arc::new(padded);
        }
        let column = *column_of_page.entry(wanted).or_insert_with(|| {
            columns.push((wanted, Vec::new()));
            columns.len() - 1
        });
        columns[column].1.push(layer);
    }
    let Some((page, first)) = columns.first() else {
        return Ok(());
    };
    if let Some((other_page, other)) = columns.iter().find(|(_, c)| c.len() != first.len()) {
        return Err(PlanError::SwaUnevenLayerTuples {
            window: windowed.window,
            block_size: windowed.block_size,
            first_page: *page,
            first_count: first.len(),
            other_page: *other_page,
            other_count: other.len(),
        });
    }
    let parts = first
        .len()
        .div_ceil(usize::try_from(tuples).unwrap_or(usize::MAX));
    for part in 0..parts {
        let rows = (part..first.len()).step_by(parts);
        let layers = rows.flat_map(|row| columns.iter().map(move |(_, column)| column[row]));
        let layers: Vec<usize> = layers.collect();
        let set = set_of(whole, &layers).ok_or_else(|| PlanError::SwaNotUniform {
            first_layer: whole.layers[layers[0]].name.to_owned(),
            layer: whole.layers[layers[layers.len() - 1]].name.to_owned(),
        })?;
        groups.push(WholeGroup::new(layers, GroupSpec::Set(set)));
    }
    Ok(())
}

/// Marks the group of the last layer, which belongs to the draft of a DeepSeek-V4 model.
pub(in crate::plan) fn mark_draft(whole: &WholeModel<'_>, groups: &mut [WholeGroup]) {
    let is_v4 = whole
        .specs
        .iter()
        .filter_map(|spec| spec.as_attention())
        .any(|attention| attention.fields().model_version.as_deref() == Some(c"deepseek_v4"));
    let Some(last) = whole.layers.len().checked_sub(1).filter(|_| is_v4) else {
        return;
    };
    if let Some(group) = groups.iter_mut().find(|group| group.layers.contains(&last)) {
        group.is_draft = true;
    }
}

/// Whether groups of a plan are of this shape.
pub(in crate::plan) fn are_tuples(groups: &[Group]) -> bool {
    groups.len() > 1
        && groups
            .iter()
            .all(|group| matches!(group.spec, GroupSpec::Set(_)))
}

/// Bytes that the reference counts for a block of a request: every tuple in full, also those that
/// a group lacks, with a page of each size that the full latents have.
pub(in crate::plan) fn counted_block_bytes(groups: &[Group]) -> Result<u64, Overflow> {
    let sets = groups.iter().filter_map(|group| match &group.spec {
        GroupSpec::Set(set) => Some(set),
        GroupSpec::One(_) => None,
    });
    let tuples = sets.clone().map(|set| set.num_layer_tuples());
    let tuples = tuples.max().unwrap_or(0);
    let pages = sets.take(1).flat_map(SpecSet::distinct_pages);
    let tuple = sum("a layer tuple", pages)?;
    product("the tuples of a block", [tuples, tuple])
}

/// Blocks that the reference divides by for the concurrency: each group's blocks weigh as much as
/// the group's pages compared to the first group's.
pub(in crate::plan) fn weighted_blocks(groups: &[Group], blocks: &[u64]) -> Result<u64, Overflow> {
    let Some(first) = groups.first() else {
        return Ok(0);
    };
    let mut bytes = 0;
    for (group, &blocks) in groups.iter().zip(blocks) {
        let of_group = product("a group's bytes", [blocks, group.spec.page_bytes()?])?;
        bytes = sum("the groups' bytes", [bytes, of_group])?;
    }
    Ok(bytes.div_ceil(first.spec.page_bytes()?.max(1)))
}

/// The number `d` of at least `lower_bound` that pads `values` least when each is rounded up to a
/// multiple of it; of several such numbers the largest. `lower_bound` itself when it is above all
/// values.
///
/// `values` must be positive, at most 2^20 each, and at least one.
pub fn layer_tuple_count(values: &[u64], lower_bound: u64) -> Result<u64, PlanError> {
    let bad = |problem: String| PlanError::BadValue {
        what: "values",
        problem,
    };
    let largest = values.iter().copied().max();
    let largest = largest.ok_or_else(|| bad("are empty; give at least one".to_owned()))?;
    if let Some(value) = values
        .iter()
        .find(|&&value| value == 0 || value > LARGEST_COUNT)
    {
        return Err(bad(format!(
            "contain {value}; each must be 1 to {LARGEST_COUNT}"
        )));
    }
    let lower_bound = lower_bound.max(1);
    if lower_bound > largest {
        return Ok(lower_bound);
    }
    // more[t]: how many values are more than t. A value x needs one multiple of d for each
    // k with x > k·d.
    let mut more = vec![0u64; largest as usize + 1];
    for &value in values {
        more[value as usize - 1] += 1;
    }
    for t in (0..largest as usize).rev() {
        more[t] += more[t + 1];
    }
    let rounded = |d: u64| -> u64 { d * more.iter().step_by(d as usize).sum::<u64>() };
    let best = (lower_bound..=largest).rev().min_by_key(|&d| rounded(d));
    Ok(best.unwrap_or(lower_bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tuple_count_pads_least() {
        for (values, lower_bound, expected) in [
            (&[38, 4, 59][..], 38, Some(38)),
            (&[6], 70, Some(70)),
            (&[27, 10, 35], 0, Some(1)),
            (&[43], 0, Some(43)),
            (&[26, 36, 18, 57], 26, Some(29)),
            (&[21, 43, 20, 22], 21, Some(22)),
            (&[], 1, None),
            (&[3, 0], 1, None),
            (&[1 << 20], 1, Some(1 << 20)),
            (&[(1 << 20) + 1], 1, None),
        ] {
            assert_eq!(
                layer_tuple_count(values, lower_bound).ok(),
                expected,
                "{values:?}"
            );
        }
    }
}
