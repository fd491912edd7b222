//! What makes a plan better than another one, and which are not good enough.

use crate::plan::block_sizes::{scheduler_step, span};
use crate::plan::capacity::Capacity;
use crate::plan::error::PlanError;
use crate::plan::{Plan, PlanConfig};
use crate::spec::{DemandError, Limits, Spec, StateCacheMode};

/// The reference's groups are not counted as a merit above so many: a step's tables, slot mappings and
/// builder calls then cost more than the memory saves.
const MANY_GROUPS: u64 = 32;
/// What is given up for fewer groups than that: at most this part of the requests is kept.
const KEPT_FOR_FEWER_GROUPS: (u64, u64) = (3, 4);

/// The price of `groups`, as a factor on the bytes of a token: 0.3 % for 4 groups, 1 % for 8, 4 % for
/// 16, 17 % for 32. Few groups cost next to nothing, many are what a step spends its time on.
fn price_of_groups(groups: u64) -> f64 {
    let groups = groups as f64;
    1.0 + groups * groups / 6144.0
}

/// Where a scheduler's step is more than so many times the largest block, it finds next to no common
/// prefixes.
const LONGEST_STEP: u64 = 4;

/// Whether a scheduler would step far. States count where earlier ones are kept: without them no prefix
/// of theirs is looked for, and their blocks are as long as a sequence.
pub(super) fn steps_far<'a>(
    specs: impl Iterator<Item = &'a Spec> + Clone,
    limits: &Limits,
) -> bool {
    let ranks = limits.context_parallel_size;
    let keeps_states = limits.state_cache_mode != StateCacheMode::None;
    let specs = specs
        .filter(|spec| spec.takes_cache())
        .filter(|spec| keeps_states || spec.as_state().is_none());
    let spans = specs.clone().map(|spec| span(spec, ranks));
    let largest = spans.map(|span| span.unwrap_or(u64::MAX)).max();
    match scheduler_step(specs, ranks) {
        Ok(step) => step > largest.unwrap_or(1).saturating_mul(LONGEST_STEP),
        Err(_) => true,
    }
}

/// The lengths that memory is saved for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lengths {
    /// The usual length, and the longest.
    pub tokens: [u64; 2],
    pub base: Limits,
}

impl Lengths {
    /// The lengths of requests of `limits`; `typical` is 0 where nobody said.
    pub fn of(limits: &Limits, typical: u64) -> Lengths {
        let longest = limits.max_model_len;
        let typical = match typical {
            0 => longest,
            typical => typical.min(longest),
        };
        Lengths {
            tokens: [typical, longest],
            base: *limits,
        }
    }

    /// What bounds a request of each length.
    pub fn limits(&self) -> [Limits; 2] {
        self.tokens.map(|max_model_len| Limits {
            max_model_len,
            ..self.base
        })
    }

    /// Blocks that one request holds of a layer, at each length.
    pub fn blocks(&self, spec: &Spec) -> Result<[u64; 2], DemandError> {
        let [typical, longest] = self.limits();
        Ok([
            spec.blocks_per_request(&typical)?,
            spec.blocks_per_request(&longest)?,
        ])
    }

    /// What a plan costs that holds requests of `blocks` blocks each, one number for each length, in
    /// `pool` blocks.
    pub fn cost(&self, blocks: [u64; 2], pool: f64, groups: u64) -> f64 {
        let of_length = |i: usize| blocks[i] as f64 / (pool * self.tokens[i].max(1) as f64);
        (of_length(0) + of_length(1)) * price_of_groups(groups)
    }
}

/// Requests that must fit: as many as the reference's plan holds.
pub(super) struct Floor {
    capacities: [Capacity; 2],
    /// At the lengths that the reference fits when it counts in its own way.
    as_it_counts: Vec<Capacity>,
    groups: u64,
    longest: u64,
}

impl Floor {
    /// What the reference's plan holds. `as_it_counts` is its longest sequence when it counts in its
    /// own way, where that is another one.
    pub fn of(
        reference: &Plan,
        lengths: &Lengths,
        as_it_counts: Option<u64>,
    ) -> Result<Floor, PlanError> {
        let [typical, longest] = lengths.tokens;
        let also = as_it_counts
            .into_iter()
            .flat_map(|len| [typical.min(len), len]);
        let also = also.map(|len| reference.capacity_of(len));
        Ok(Floor {
            as_it_counts: also.collect::<Result<_, _>>()?,
            capacities: [
                reference.capacity_of(typical)?,
                reference.capacity_of(longest)?,
            ],
            groups: num_groups(reference),
            longest: reference.config.limits.max_model_len,
        })
    }

    /// The part of the reference's requests that a plan of `groups` groups must hold.
    fn share(&self, groups: u64) -> (u64, u64) {
        match self.groups > MANY_GROUPS && groups <= MANY_GROUPS {
            true => KEPT_FOR_FEWER_GROUPS,
            false => (1, 1),
        }
    }

    /// Whether a plan of `groups` groups with such capacities is good enough.
    pub fn is_met(&self, capacities: &[Capacity; 2], groups: u64) -> bool {
        let share = self.share(groups);
        let mut pairs = capacities.iter().zip(&self.capacities);
        pairs.all(|(own, floor)| own.holds(floor, share))
    }

    /// The same for a finished plan, whose longest sequence counts too.
    pub fn is_reached(&self, plan: &Plan, lengths: &Lengths) -> Result<bool, PlanError> {
        let [typical, longest] = lengths.tokens;
        let capacities = [plan.capacity_of(typical)?, plan.capacity_of(longest)?];
        let groups = num_groups(plan);
        for floor in &self.as_it_counts {
            if !plan
                .capacity_of(floor.len)?
                .holds(floor, self.share(groups))
            {
                return Ok(false);
            }
        }
        let is_long_enough = plan.config.limits.max_model_len >= self.longest;
        Ok(is_long_enough && self.is_met(&capacities, groups))
    }
}

/// How good a finished plan is.
pub(super) struct Merit {
    /// The longest sequence: where it was fitted, a longer one is what the engine asked for.
    longest: u64,
    steps_far: bool,
    cost: f64,
    groups: u64,
}

impl Merit {
    pub fn of(plan: &Plan, lengths: &Lengths) -> Merit {
        let capacities = lengths.tokens.map(|len| plan.capacity_of(len).ok());
        let usable = capacities[0].map_or(0, |capacity| capacity.usable_blocks);
        let blocks = capacities.map(|c| c.map_or(u64::MAX, |c| c.blocks_per_request));
        let workers = plan.workers.iter();
        let bytes = workers.map(|worker| worker.bytes_per_block).max();
        let groups = num_groups(plan);
        let pool = weight(usable, bytes.unwrap_or(0), &plan.config);
        Merit {
            longest: plan.config.limits.max_model_len,
            steps_far: plan.workers.first().is_some_and(|worker| {
                let specs = worker.groups.iter().map(|group| group.spec.first());
                steps_far(specs, &lengths.base)
            }),
            cost: lengths.cost(blocks, pool, groups),
            groups,
        }
    }

    pub fn is_better_than(&self, other: &Merit) -> bool {
        (other.longest, self.steps_far, self.cost, self.groups)
            < (self.longest, other.steps_far, other.cost, other.groups)
    }
}

/// What blocks are counted against: the usable ones. Where the engine says how many there are, larger
/// ones are no gain, so blocks are weighed by their bytes.
pub(super) fn weight(usable: u64, bytes_per_block: u64, config: &PlanConfig) -> f64 {
    match config.num_blocks_override {
        None => usable as f64,
        Some(_) => 1.0 / bytes_per_block.max(1) as f64,
    }
}

fn num_groups(plan: &Plan) -> u64 {
    plan.workers
        .first()
        .map_or(0, |worker| worker.groups.len() as u64)
}
