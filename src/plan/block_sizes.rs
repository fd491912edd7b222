//! The steps in which a scheduler counts tokens and a prefix cache hashes them.

use super::error::PlanError;
use super::{Group, Plan};
use crate::num::{gcd, lcm, product};
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
    let mut sizes = Vec::with_capacity(groups.len());
    let mut scheduler = 1;
    let mut states_agree = true;
    for group in &groups {
        let size = group.spec.block_size();
        let size = match group.spec.first() {
            // Ranks share the tokens of attention; every rank has the whole state.
            Spec::Attention(_) => product("a block over all ranks", [size, ranks]),
            Spec::State(_) => {
                states_agree &= size == cache_block_size;
                Ok(size)
            }
        };
        let size = size.map_err(overflow)?;
        scheduler = lcm("the scheduler's block size", scheduler, size).map_err(overflow)?;
        sizes.push(size);
    }
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
