//! How many blocks a request needs, and how many requests and tokens fit.

use std::sync::Arc;

use super::error::PlanError;
use super::group::WholeGroup;
use super::merge_workers::WholeModel;
use super::reference::latent_tuples;
use super::{Group, GroupSpec, Plan, WorkerPlan};
use crate::num::{Overflow, sum};
use crate::spec::{AttentionKind, Counting, DemandError, Limits, Spec};

/// What a request needs of each group: a spec that speaks for all its layers, and the name of
/// one, for messages. Layers of one group need the same number of blocks.
pub(super) struct Demand<'a> {
    groups: Vec<(&'a str, &'a Spec)>,
}

impl<'a> Demand<'a> {
    /// What a request needs of the whole model.
    pub fn of(groups: &'a [WholeGroup], whole: &'a WholeModel<'_>) -> Demand<'a> {
        let groups = groups.iter().map(|group| {
            let layer = group.layers.first().map(|&layer| whole.layers[layer].name);
            (layer.unwrap_or(""), group.spec.first())
        });
        Demand {
            groups: groups.collect(),
        }
    }

    /// What a request needs of the groups of a worker's plan.
    pub fn of_plan(plan: &'a WorkerPlan) -> Demand<'a> {
        let groups = plan.groups.iter().map(|group| {
            let layer = group
                .layers
                .first()
                .and_then(|&layer| plan.model.layers().get(layer));
            (layer.map_or("", |layer| &*layer.name), group.spec.first())
        });
        Demand {
            groups: groups.collect(),
        }
    }

    /// The most blocks one request can hold, all groups together, also those that are empty on
    /// some worker. Planning, fitting, an override and the capacity all ask this function.
    pub fn blocks(&self, limits: &Limits) -> Result<u64, PlanError> {
        let mut blocks = 0;
        for group in &self.groups {
            let of_group = of_group(group, limits)?;
            blocks = sum("the blocks of a request", [blocks, of_group])
                .map_err(|error| PlanError::overflow(group.0, error))?;
        }
        Ok(blocks)
    }

    /// The most blocks one request can hold of each group.
    pub fn blocks_of_groups(&self, limits: &Limits) -> Result<Vec<u64>, PlanError> {
        self.groups
            .iter()
            .map(|group| of_group(group, limits))
            .collect()
    }

    /// The longest sequence, up to that of `limits`, that needs at most `blocks`; 0 when none
    /// does. A longer sequence never needs fewer blocks.
    pub fn longest(&self, limits: &Limits, blocks: Option<u64>) -> Result<u64, PlanError> {
        let fits = |max_model_len: u64| match self.blocks(&Limits {
            max_model_len,
            ..*limits
        }) {
            Ok(needed) => Ok(blocks.is_some_and(|blocks| needed <= blocks)),
            // More than any memory holds.
            Err(PlanError::Overflow { .. }) => Ok(false),
            Err(error) => Err(error),
        };
        let (mut fitting, mut too_long) = (0, limits.max_model_len.saturating_add(1));
        while too_long - fitting > 1 {
            let middle = fitting + (too_long - fitting) / 2;
            if fits(middle)? {
                fitting = middle;
            } else {
                too_long = middle;
            }
        }
        Ok(fitting)
    }
}

fn of_group((layer, spec): &(&str, &Spec), limits: &Limits) -> Result<u64, PlanError> {
    spec.blocks_per_request(limits)
        .map_err(|error| PlanError::demand(layer, error))
}

/// Requests of the longest sequence that a worker holds at once, and tokens.
pub(super) fn capacity(
    groups: &[Group],
    blocks_of_groups: &[u64],
    usable_blocks: u64,
    limits: &Limits,
) -> Result<(f64, u64), Overflow> {
    if groups.is_empty() {
        return Ok((0.0, 0));
    }
    let as_tuples = limits.counting == Counting::Reference && latent_tuples::are_tuples(groups);
    let per_request = match as_tuples {
        true => latent_tuples::weighted_blocks(groups, blocks_of_groups)?,
        false => sum("the blocks of a request", blocks_of_groups.iter().copied())?,
    };
    let concurrency = usable_blocks as f64 / per_request.max(1) as f64;
    Ok((
        concurrency,
        (concurrency * limits.max_model_len as f64) as u64,
    ))
}

/// What a plan really holds, counted alike for every policy: block 0 is never handed out, and a
/// request of a length takes of each group the most blocks that it can hold, and no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of each request.
    pub len: u64,
    /// Blocks that requests may use.
    pub usable_blocks: u64,
    /// Blocks that one request can hold.
    pub blocks_per_request: u64,
}

impl Capacity {
    /// Requests that fit at once.
    pub fn requests(&self) -> f64 {
        self.usable_blocks as f64 / self.blocks_per_request.max(1) as f64
    }

    /// Tokens that fit.
    pub fn tokens(&self) -> f64 {
        self.requests() * self.len as f64
    }

    /// Whether at least `numerator / denominator` as many requests of the length fit as in `other`.
    pub fn holds(&self, other: &Capacity, (numerator, denominator): (u64, u64)) -> bool {
        // requests >= other's: a/b >= c/d where b and d are positive. A product of 63-bit numbers has
        // 126 bits, so the small factors are multiplied into what is compared in two parts.
        let one = |blocks: u64| u128::from(blocks.max(1));
        let own = u128::from(self.usable_blocks) * one(other.blocks_per_request);
        let others = u128::from(other.usable_blocks) * one(self.blocks_per_request);
        own.saturating_mul(u128::from(denominator)) >= others.saturating_mul(u128::from(numerator))
    }
}

impl Plan {
    /// What the plan really holds of requests of `len` tokens.
    pub fn capacity_of(&self, len: u64) -> Result<Capacity, PlanError> {
        let limits = Limits {
            max_model_len: len,
            counting: Counting::Exact,
            ..self.config.limits
        };
        let worker = self.workers.first();
        let reserved = self.config.reserved_blocks.max(1);
        Ok(Capacity {
            len,
            usable_blocks: worker.map_or(0, |w| w.num_blocks.saturating_sub(reserved)),
            blocks_per_request: worker.map_or(Ok(0), |w| w.blocks_per_request(&limits))?,
        })
    }
}

impl WorkerPlan {
    /// The most blocks a request of the given limits can hold, all groups together, also those
    /// that are empty on this worker. Reserved blocks are not counted.
    pub fn blocks_per_request(&self, limits: &Limits) -> Result<u64, PlanError> {
        Demand::of_plan(self).blocks(limits)
    }
}

impl GroupSpec {
    /// A spec that speaks for all layers where they do not differ: the block size and the number
    /// of blocks.
    pub fn first(&self) -> &Spec {
        self.spec_of(0)
    }

    /// The specs: one, or one for each layer.
    pub fn specs(&self) -> &[Arc<Spec>] {
        match self {
            GroupSpec::One(spec) => std::slice::from_ref(spec),
            GroupSpec::Set(set) => set.specs(),
        }
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> u64 {
        self.first().block_size()
    }

    /// Entries of a block-table row for a sequence of `tokens`; 0 when the limits are not known.
    pub fn row_blocks(&self, limits: &Limits, tokens: u64) -> Result<u64, DemandError> {
        match self {
            _ if !limits.are_known() => Ok(0),
            GroupSpec::One(spec) => spec.row_blocks(limits, tokens),
            GroupSpec::Set(set) => Ok(set.row_blocks(tokens)),
        }
    }

    /// Entries that a block-table row must have for any request of one rank; 0 when the limits are
    /// not known. The widest row of any layer, since the layers of a group share it: row_blocks()
    /// of unequal layers leaves out the ranks and the states for speculative tokens. A request of
    /// cross attention holds the encoder's tokens, which may be more than the longest sequence
    /// has. One of state may hold more states at once than its tokens fill blocks.
    pub fn table_width_blocks(&self, limits: &Limits) -> Result<u64, DemandError> {
        if !limits.are_known() {
            return Ok(0);
        }
        let tokens = match self.first().is_attention_kind(AttentionKind::Cross) {
            true => limits.max_model_len.max(limits.max_encoder_tokens),
            false => limits.max_model_len,
        };
        let width = |spec: &Arc<Spec>| -> Result<u64, DemandError> {
            let row = spec.row_blocks(limits, tokens)?;
            match spec.as_state() {
                Some(_) => Ok(row.max(spec.blocks_per_request(limits)?)),
                None => Ok(row),
            }
        };
        let mut widths = self.specs().iter().map(width);
        widths.try_fold(0, |most, blocks| Ok(most.max(blocks?)))
    }

    /// The most blocks one request can hold; 0 when the limits are not known. Layers of a group need
    /// the same number, so any of them speaks for all.
    pub fn blocks_per_request(&self, limits: &Limits) -> Result<u64, DemandError> {
        match limits.are_known() {
            true => self.first().blocks_per_request(limits),
            false => Ok(0),
        }
    }

    /// Bytes of a block in the layer at `place` of the group's layers.
    pub fn page_of(&self, place: usize) -> u64 {
        match self {
            GroupSpec::One(spec) => spec.page().padded,
            GroupSpec::Set(set) => set.specs().get(place).map_or(0, |spec| spec.page().padded),
        }
    }

    /// What the layer at `place` of the group's layers stores; for a layer that is not there, what
    /// the first one does.
    pub fn spec_of(&self, place: usize) -> &Arc<Spec> {
        let specs = self.specs();
        specs.get(place).unwrap_or(&specs[0])
    }

    /// Bytes of a block in one layer when all store the same, else in all layers together.
    pub fn page_bytes(&self) -> Result<u64, Overflow> {
        match self {
            GroupSpec::One(spec) => Ok(spec.page().padded),
            GroupSpec::Set(set) => set.page_bytes(),
        }
    }
}
