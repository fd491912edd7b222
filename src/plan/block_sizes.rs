//! The steps in which a scheduler counts tokens and a prefix cache hashes them.

use super::error::PlanError;
use super::{Group, Plan};
use crate::num::{Overflow, gcd, lcm, product};
use crate::spec::Spec;

/// Tokens that a scheduler rounds to, and tokens of one hash of a prefix.
///
/// With several groups the first is a multiple of every group's block, the second divides every
/// group's block: `prefix_match_unit` when it is given, else the largest that does. Nothing is
/// hashed in smaller steps than the scheduler's when `hashes_blocks` is false, or when a state
/// layer has another block size than `cache_block_size`, the engine's own.
pub fn resolve_block_sizes(
    plan: &Plan,
    cache_block_size: u64,
    prefix_match_unit: Option<u64>,
    hashes_blocks: bool,
) -> Result<(u64, u64), PlanError> {
    if cache_block_size == 0 {
        return Err(PlanError::Zero {
            field: "cache_block_size",
        });
    }
    let ranks = plan.config.limits.context_parallel_size;
    let groups = plan
        .workers
        .first()
        .map_or(&[][..], |worker| worker.groups.as_slice());
    let groups: Vec<&Group> = groups
        .iter()
        .filter(|g| g.spec.first().takes_cache())
        .collect();
    let overflow = |error| PlanError::overflow_at("block sizes", error);
    if groups.len() <= 1 {
        let size = product("the block size", [cache_block_size, ranks]).map_err(overflow)?;
        return Ok((size, size));
    }
    let specs = || groups.iter().map(|group| group.spec.first());
    let scheduler = scheduler_step(specs(), ranks).map_err(overflow)?;
    let sizes: Result<Vec<u64>, Overflow> = specs().map(|spec| span(spec, ranks)).collect();
    let sizes = sizes.map_err(overflow)?;
    let states_agree = specs()
        .filter(|spec| spec.as_state().is_some())
        .all(|spec| spec.block_size() == cache_block_size);
    if !hashes_blocks || !states_agree {
        return Ok((scheduler, scheduler));
    }
    let unit = prefix_match_unit.unwrap_or_else(|| sizes.iter().copied().fold(0, gcd));
    let cut = sizes
        .iter()
        .position(|size| unit == 0 || !size.is_multiple_of(unit));
    match cut {
        None => Ok((scheduler, unit)),
        Some(group) => Err(PlanError::PrefixMatchUnitNotDividing {
            unit,
            group,
            block_size: sizes[group],
        }),
    }
}

/// Tokens that a scheduler rounds to, with groups of these specs.
pub(super) fn scheduler_step<'a>(
    mut specs: impl Iterator<Item = &'a Spec>,
    ranks: u64,
) -> Result<u64, Overflow> {
    specs.try_fold(1, |step, spec| {
        lcm("the scheduler's block size", step, span(spec, ranks)?)
    })
}

/// Tokens of a sequence that a block of each rank stands for.
pub(super) fn span(spec: &Spec, ranks: u64) -> Result<u64, Overflow> {
    match spec {
        // Ranks share the tokens of attention; every rank has the whole state.
        Spec::Attention(_) => product("a block over all ranks", [spec.block_size(), ranks]),
        Spec::State(_) => Ok(spec.block_size()),
    }
}
