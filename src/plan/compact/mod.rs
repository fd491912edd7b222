//! The policy `compact`: the most tokens in the same memory, and never fewer than the reference's
//! plan of the same layers holds.
//!
//! The reference's plan is one candidate. Others come from a search over page sizes, block sizes and
//! numbers of groups. Among those that hold at least as many requests as the reference's, of the usual
//! length and of the longest, the cheapest wins: bytes for each token at both lengths, and a price for
//! groups.
//!
//! | file | what it decides |
//! |---|---|
//! | `kinds` | which layers are the same, and which backends read them |
//! | `contract` | whether kernels can read a page |
//! | `fit` | how a layer fills a page: a larger block first, padding for the rest |
//! | `pages` | which page sizes are worth a look |
//! | `classes` | which kinds share block tables, and what a block of them costs |
//! | `search` | into how many groups each class is split |
//! | `effort` | how much of a large problem is looked at |
//! | `cost` | what is better, and what is too little |

mod classes;
mod contract;
mod cost;
mod effort;
#[cfg(test)]
mod exhaustive;
mod fit;
mod kinds;
mod pages;
#[cfg(test)]
mod properties;
mod search;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::num::lcm;
use crate::plan::error::PlanError;
use crate::plan::finish::{Job, Layout, finish};
use crate::plan::group::{WholeGroup, spec_of_all};
use crate::plan::merge_workers::WholeModel;
use crate::plan::pack::Packing;
use crate::plan::promote::{WindowBlocks, promote};
use crate::plan::reference::{self, latent_tuples};
use crate::plan::{Plan, PlanConfig, Policy};
use crate::spec::{Attention, Counting, Limits, Spec};
use classes::Classes;
pub(super) use contract::why_unread;
use cost::{Floor, Lengths, Merit};
use fit::in_blocks;
use kinds::Kind;
use search::{Best, Pool, Split};

/// The cheapest plan that holds no fewer requests than the reference's.
pub(super) fn plan(
    job: &Job<'_>,
    whole: &WholeModel<'_>,
    config: &PlanConfig,
) -> Result<Plan, PlanError> {
    let as_reference = config;
    let config = &own_config(config);
    let reference = reference::layout(whole.clone(), config);
    let reference = reference.and_then(|layout| finish(job, layout, config));
    match &reference {
        _ if config.hybrid_manager_off => promoted(job, whole, config, reference),
        _ if whole.layers.is_empty() => reference,
        Err(PlanError::NoAvailableMemory { .. } | PlanError::BackendHeads { .. }) => reference,
        // One table serves all, each layer has its own memory, and only a last block is not filled.
        _ if spec_of_all(whole).is_some()
            && !config.choose_block_sizes
            && !is_refused(&reference) =>
        {
            reference
        }
        _ => {
            let as_it_counts = fitted_as_it_counts(job, whole, as_reference);
            searched(job, whole, config, reference, as_it_counts)
        }
    }
}

/// Whether kernels refuse what the reference makes of layers that one table serves: no kernel block suits
/// all of them, or one that does not begin where some want it.
fn is_refused(reference: &Result<Plan, PlanError>) -> bool {
    match reference {
        Ok(plan) => !contract::holds(plan),
        Err(error) => matches!(error, PlanError::KernelBlock { .. }),
    }
}

/// The longest sequence that the reference fits when it counts in its own way. Where it fits a longer
/// one counted exactly, a plan is to be no worse at either.
fn fitted_as_it_counts(job: &Job<'_>, whole: &WholeModel<'_>, config: &PlanConfig) -> Option<u64> {
    if !config.auto_fit_max_model_len {
        return None;
    }
    let config = &PlanConfig {
        policy: Policy::Reference,
        ..config.clone()
    };
    let plan = finish(job, reference::layout(whole.clone(), config).ok()?, config);
    Some(plan.ok()?.config.limits.max_model_len)
}

/// Counts what is held and no more, and never hands out block 0.
fn own_config(config: &PlanConfig) -> PlanConfig {
    PlanConfig {
        limits: Limits {
            counting: Counting::Exact,
            ..config.limits
        },
        reserved_blocks: config.reserved_blocks.max(1),
        ..config.clone()
    }
}

/// With the hybrid manager off: where the reference finds that windows stored in full do not go with
/// the full layers, they get blocks of the full layers' size.
fn promoted(
    job: &Job<'_>,
    whole: &WholeModel<'_>,
    config: &PlanConfig,
    reference: Result<Plan, PlanError>,
) -> Result<Plan, PlanError> {
    let Err(PlanError::HybridDisabledNotUnifiable { .. }) = &reference else {
        return reference;
    };
    let mut whole = whole.clone();
    promote(&mut whole, WindowBlocks::OfFullLayers)?;
    let Some(spec) = spec_of_all(&whole) else {
        return reference;
    };
    let layers = (0..whole.layers.len()).collect();
    let layout = Layout {
        whole,
        groups: vec![WholeGroup::new(layers, spec)],
        packing: Packing::ByPlace,
    };
    finish(job, layout, config)
}

/// The best of the reference's plan and of those that a search finds.
fn searched(
    job: &Job<'_>,
    whole: &WholeModel<'_>,
    config: &PlanConfig,
    reference: Result<Plan, PlanError>,
    as_it_counts: Option<u64>,
) -> Result<Plan, PlanError> {
    // A plan whose views would be refused is neither a floor nor a choice.
    let known = reference.as_ref().ok().filter(|plan| contract::holds(plan));
    let kinds = match kinds::of(job, whole, config) {
        Ok(kinds) => kinds,
        Err(error) => return reference.or(Err(error)),
    };
    let fitted = known.map_or(&config.limits, |plan| &plan.config.limits);
    let lengths = Lengths::of(fitted, config.typical_len);
    if let Err(error) = check_demand(&kinds, &lengths) {
        return reference.or(Err(error));
    }
    let floor = known.map(|plan| Floor::of(plan, &lengths, as_it_counts));
    let Ok(floor) = floor.transpose() else {
        return reference;
    };
    let mut layouts = Vec::new();
    let has_one_table = spec_of_all(whole).is_some();
    let suits_alone = |kind: &Kind<'_>| contract::suits(&kind.smallest, &kind.backends, false);
    let is_one_layers_fault = kinds.len() == 1 || !kinds.iter().all(suits_alone);
    if has_one_table && !config.choose_block_sizes && is_one_layers_fault {
        // A block that a layer's own kernels do not take is the engine's to change.
        return reference;
    }
    if has_one_table && config.choose_block_sizes {
        layouts.extend(in_smallest_blocks(whole, &kinds));
    }
    if !has_one_table || is_refused(&reference) {
        let pool = Pool::of(job, &kinds, config);
        let mut found = Best::new(&pool, &lengths, floor.as_ref());
        look_at_all(&mut found, whole, &kinds, config);
        if !found.has_looked() && layouts.is_empty() {
            // What the reference says of too little memory has the numbers that an engine needs.
            let none = |error| match error {
                PlanError::NotEnoughMemory { .. } | PlanError::AutoFitImpossible { .. } => error,
                _ if has_one_table => error,
                _ => pages::none_fits(&kinds),
            };
            return reference.map_err(none);
        }
        let splits = found.into_splits().into_iter();
        layouts
            .extend(splits.map(|(classes, split)| layout(whole, &kinds, &classes, &split, config)));
    }
    cheapest(job, layouts, config, reference, &lengths, floor.as_ref())
}

/// The cheapest of the reference's plan and of those of other layouts that reach the floor.
fn cheapest(
    job: &Job<'_>,
    layouts: Vec<Layout<'_>>,
    config: &PlanConfig,
    reference: Result<Plan, PlanError>,
    lengths: &Lengths,
    floor: Option<&Floor>,
) -> Result<Plan, PlanError> {
    let known = reference.as_ref().ok().filter(|plan| contract::holds(plan));
    let mut merit = known.map(|plan| Merit::of(plan, lengths));
    let mut best = reference;
    for layout in layouts {
        match finish(job, layout, config) {
            // What kernels could not read is no choice, whatever it holds.
            Ok(plan) if !contract::holds(&plan) => {}
            Ok(plan) => {
                let of_plan = Merit::of(&plan, lengths);
                let is_enough = match floor {
                    Some(floor) => floor.is_reached(&plan, lengths).unwrap_or(false),
                    None => true,
                };
                let is_better = merit
                    .as_ref()
                    .is_none_or(|best| of_plan.is_better_than(best));
                if is_enough && is_better {
                    merit = Some(of_plan);
                    best = Ok(plan);
                }
            }
            Err(error) => best = best.map_err(|known| better_error(known, error)),
        }
    }
    best
}

/// All layers in one group, in the smallest blocks that all their kernels take: of those a request fills
/// all but the last.
fn in_smallest_blocks<'a>(whole: &WholeModel<'a>, kinds: &[Kind<'_>]) -> Option<Layout<'a>> {
    let attention = kinds.iter().map(|kind| kind.smallest.as_attention());
    let attention: Vec<&Attention> = attention.collect::<Option<_>>()?;
    let mut sizes = attention
        .iter()
        .map(|attention| attention.fields().block_size);
    let block_size = sizes.try_fold(1, |all, size| lcm("a block", all, size).ok())?;
    let mut whole = whole.clone();
    for ((spec, attention), kind) in whole.specs.iter_mut().zip(attention).zip(kinds) {
        let times = block_size / attention.fields().block_size.max(1);
        let scaled = Spec::Attention(in_blocks(attention, times, None)?);
        if !contract::suits(&scaled, &kind.backends, false) {
            return None;
        }
        *spec = Arc::new(scaled);
    }
    let spec = spec_of_all(&whole)?;
    let layers = (0..whole.layers.len()).collect();
    Some(Layout {
        whole,
        groups: vec![WholeGroup::new(layers, spec)],
        packing: Packing::ByPlace,
    })
}

/// What makes a request of some layer impossible whatever its blocks are.
fn check_demand(kinds: &[Kind<'_>], lengths: &Lengths) -> Result<(), PlanError> {
    for kind in kinds {
        let blocks = lengths.blocks(&kind.smallest);
        blocks.map_err(|error| PlanError::demand(kind.name, error))?;
    }
    Ok(())
}

/// Looks at kinds as they may share block tables, in each way that is worth it.
fn look_at_all<'k>(
    found: &mut Best<'_, 'k>,
    whole: &WholeModel<'_>,
    kinds: &[Kind<'k>],
    config: &PlanConfig,
) {
    let lengths = found.lengths();
    // Where the reference packs, packing may be taken for granted.
    if config.cross_layer_blocks || latent_tuples::is_shape(&whole.specs) {
        let packed = classes::SCALES.iter();
        let packed = packed.filter_map(|scales| classes::overlaid(kinds, scales, lengths));
        packed.for_each(|classes| found.look_at(classes));
    }
    if !config.cross_layer_blocks {
        let pages = pages::worth_a_look(kinds, lengths).into_iter();
        let unified = pages.filter_map(|page| classes::of_page(kinds, page, lengths));
        unified.for_each(|classes| found.look_at(classes));
    }
}

/// The groups of a split, in the order of their first layers.
fn layout<'a>(
    whole: &WholeModel<'a>,
    kinds: &[Kind<'_>],
    classes: &Classes<'_>,
    split: &Split,
    config: &PlanConfig,
) -> Layout<'a> {
    let mut groups = Vec::with_capacity(usize::try_from(split.groups).unwrap_or(0));
    for (class, part) in classes.classes.iter().zip(&split.parts) {
        groups.extend(class.groups(kinds, part));
    }
    groups.sort_by_key(|group| group.layers.first().copied());
    if config.has_draft_layers && latent_tuples::is_shape(&whole.specs) {
        latent_tuples::mark_draft(whole, &mut groups);
    }
    Layout {
        whole: whole.clone(),
        groups,
        packing: classes.packing,
    }
}

/// Of two reasons why there is no plan the one that is nearer to a plan.
fn better_error(known: PlanError, other: PlanError) -> PlanError {
    let nearness = |error: &PlanError| match error {
        PlanError::NotEnoughMemory { longest, .. } => (4, *longest),
        PlanError::AutoFitImpossible { .. } | PlanError::ZeroBlocks { .. } => (3, 0),
        PlanError::IndexTooNarrow { allowed, .. } => (2, *allowed),
        PlanError::NoAvailableMemory { .. } => (1, 0),
        // Of a number that the engine gave: what the reference says of the layers is no matter here.
        PlanError::TooManyBlocks { .. } | PlanError::Overflow { .. } => (1, 0),
        _ => (0, 0),
    };
    match nearness(&other) > nearness(&known) {
        true => other,
        false => known,
    }
}
