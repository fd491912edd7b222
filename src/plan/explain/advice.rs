//! The cheapest change that would help.
//!
//! A set of changes is stated here, and each is planned: at most [`MOST_PLANS`] plans, only when somebody
//! asks for an explanation.

use std::fmt;

use super::change::Change;
use crate::backend::select_kernel_block_size;
use crate::plan::capacity::{Capacity, Demand};
use crate::plan::compact::why_unread;
use crate::plan::{Plan, PlanConfig, Policy, Worker, plan, reach};
use crate::spec::{AttentionKind, Counting, Limits, Spec};

/// Changes that are planned, at most.
const MOST_PLANS: usize = 24;
/// A change helps when it wins at least one part of so many.
const LEAST_GAIN: u64 = 100;
/// Block sizes that are tried of a kind of layers, as numerators and denominators.
const BLOCK_SIZES: [(u64, u64); 4] = [(2, 1), (4, 1), (1, 2), (1, 4)];
/// A shorter longest sequence is named when it keeps so much of it.
const KEPT_LENGTH: (u64, u64) = (7, 8);
/// Where nobody said what a usual request is, one of this part of the longest is tried.
const TYPICAL_PART: u64 = 8;

/// A change, and what it wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    /// The change.
    pub change: Change,
    /// Tokens of each request that is counted: of the usual length, or of the longest where nobody
    /// said what is usual.
    pub len: u64,
    /// Tokens that would fit in requests of that length.
    pub tokens: u64,
    /// Tokens that fit without the change.
    pub tokens_now: u64,
}

impl Advice {
    /// The part by which there would be more tokens.
    pub fn gain(&self) -> f64 {
        self.tokens as f64 / self.tokens_now.max(1) as f64 - 1.0
    }

    fn helps(&self) -> bool {
        let (then, now) = (u128::from(self.tokens), u128::from(self.tokens_now));
        then * u128::from(LEAST_GAIN) >= now * u128::from(LEAST_GAIN + 1) && then > now
    }

    /// Whether it wins clearly more than another one.
    fn is_clearly_better_than(&self, other: &Advice) -> bool {
        self.tokens as f64 / self.tokens_now.max(1) as f64
            > 1.01 * (other.tokens as f64 / other.tokens_now.max(1) as f64)
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.gain();
        write!(
            f,
            "{} would hold {} tokens instead of {} (+{percent:.1} %), in requests of {}",
            self.change, self.tokens, self.tokens_now, self.len
        )
    }
}

/// The longest sequence at which one more of them fits at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OneMoreRequest {
    /// Tokens of each.
    pub max_model_len: u64,
    /// Requests that would fit.
    pub requests: u64,
    /// Requests of the longest sequence that fit now.
    pub requests_now: u64,
}

impl Plan {
    /// The change of what the engine asked for that wins most tokens; of those that win nearly as much
    /// the least. `None` where none wins 1 %, and of a plan that the engine made itself.
    pub fn cheapest_change(&self) -> Option<Advice> {
        let asked = self.asked.as_ref()?;
        let workers = workers_of(self);
        let now = usual_capacity(self)?;
        let tried = candidates(self, asked).into_iter().take(MOST_PLANS);
        let helpful: Vec<Advice> = tried
            .filter_map(|change| advice(self, &workers, asked, now, change))
            .filter(Advice::helps)
            .collect();
        let (conditional, certain): (Vec<Advice>, Vec<Advice>) = helpful
            .into_iter()
            .partition(|advice| advice.change.is_conditional());
        best(&certain).or_else(|| best(&conditional))
    }
}

/// The one that wins most, or the first that wins nearly as much: candidates come least change first.
fn best(all: &[Advice]) -> Option<Advice> {
    let is_near_best =
        |advice: &&Advice| !all.iter().any(|other| other.is_clearly_better_than(advice));
    all.iter().find(is_near_best).copied()
}

/// What a change wins; `None` where there would be no plan, or one that kernels cannot read.
fn advice(
    own: &Plan,
    workers: &[Worker],
    asked: &PlanConfig,
    now: Capacity,
    change: Change,
) -> Option<Advice> {
    let changed = changed_plan(workers, asked, &change)?;
    let (now, then) = match change {
        Change::TypicalLen(len) => (own.capacity_of(len).ok()?, changed.capacity_of(len).ok()?),
        _ => (now, usual_capacity(&changed)?),
    };
    Some(Advice {
        change,
        len: then.len,
        tokens: then.tokens() as u64,
        tokens_now: now.tokens() as u64,
    })
}

fn changed_plan(workers: &[Worker], asked: &PlanConfig, change: &Change) -> Option<Plan> {
    let (workers, config) = change.applied(workers, asked)?;
    let changed = plan(&workers, &config).ok()?;
    why_unread(&changed).is_none().then_some(changed)
}

/// The workers as they were given.
pub(super) fn workers_of(plan: &Plan) -> Vec<Worker> {
    let workers = plan.workers.iter().map(|worker| Worker {
        model: std::sync::Arc::clone(&worker.model),
        memory_bytes: worker.memory_bytes,
    });
    workers.collect()
}

/// The usual length of a plan: the longest where nobody said.
pub(super) fn usual_len(plan: &Plan) -> u64 {
    let longest = plan.config.limits.max_model_len;
    match plan.config.typical_len {
        0 => longest,
        typical => typical.min(longest),
    }
}

fn usual_capacity(plan: &Plan) -> Option<Capacity> {
    plan.capacity_of(usual_len(plan)).ok()
}

/// The changes that are tried, the least first.
fn candidates(plan: &Plan, asked: &PlanConfig) -> Vec<Change> {
    if asked.num_blocks_override.is_some() {
        // Of so many blocks larger ones hold more, and take more memory.
        return shorter_by_a_block(plan);
    }
    let mut all = flags(plan, asked);
    let kinds = kinds(plan);
    all.extend(kinds.iter().flat_map(Kind::other_block_sizes));
    all.extend(shorter_by_a_block(plan));
    let rigid = kinds.iter().filter(|kind| kind.is_rigid);
    let strides = rigid.map(|kind| Change::BlockStride { kind: kind.name });
    for change in strides {
        if !all.contains(&change) {
            all.push(change);
        }
    }
    let longest = plan.config.limits.max_model_len;
    let is_compact = asked.policy == Policy::Compact;
    if is_compact && asked.typical_len == 0 && longest >= TYPICAL_PART {
        all.push(Change::TypicalLen(longest / TYPICAL_PART));
    }
    all
}

/// Changes of what is said of the whole plan.
fn flags(plan: &Plan, asked: &PlanConfig) -> Vec<Change> {
    let mut all = Vec::new();
    match asked.policy {
        Policy::Compact if !asked.choose_block_sizes => all.push(Change::ChooseBlockSizes),
        Policy::Compact => {}
        Policy::Reference => all.push(Change::CompactPolicy),
    }
    let several = plan
        .workers
        .first()
        .is_some_and(|worker| worker.groups.len() > 1);
    if asked.cross_layer_blocks || (several && all_may_be_packed(plan)) {
        all.push(Change::CrossLayerBlocks(!asked.cross_layer_blocks));
    }
    if asked.hybrid_manager_off {
        all.push(Change::HybridManagerOn);
    }
    all
}

/// Whether the kernels of all attention layers take a block stride.
fn all_may_be_packed(plan: &Plan) -> bool {
    let mut specs = own_specs(plan);
    specs.all(|(spec, _)| {
        let attention = spec.as_attention();
        attention.is_none_or(|attention| attention.fields().indexes_kv_by_block_stride)
    })
}

/// Attention layers of one kind and one block size.
struct Kind {
    name: &'static str,
    block_size: u64,
    /// Whether some pages of theirs may not be padded.
    is_rigid: bool,
    /// Whether all have backends, which say what smaller blocks their kernels take.
    is_known: bool,
    /// Sizes that all their backends take.
    block_sizes: Vec<u64>,
}

impl Kind {
    fn other_block_sizes(&self) -> impl Iterator<Item = Change> + '_ {
        let taken = self.block_sizes.iter();
        taken.map(|&to| Change::BlockSize {
            kind: self.name,
            from: self.block_size,
            to,
        })
    }
}

/// The kinds of attention layers, in the order of their first layers.
fn kinds(plan: &Plan) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::new();
    for (spec, backends) in own_specs(plan) {
        let Some(attention) = spec.as_attention() else {
            continue;
        };
        // As many hidden states are in a block as its page holds, and encoders keep nothing.
        let kind = attention.fields().kind;
        if kind == AttentionKind::HiddenState || kind == AttentionKind::EncoderOnly {
            continue;
        }
        let (name, block_size) = (spec.kind_name(), spec.block_size());
        let has = |kind: &Kind| kind.name == name && kind.block_size == block_size;
        let place = kinds.iter().position(has).unwrap_or_else(|| {
            kinds.push(Kind {
                name,
                block_size,
                is_rigid: false,
                is_known: true,
                block_sizes: tried_sizes(block_size),
            });
            kinds.len() - 1
        });
        let kind = &mut kinds[place];
        kind.is_rigid |= !attention.fields().indexes_kv_by_block_stride;
        kind.is_known &= !backends.is_empty();
        kind.block_sizes
            .retain(|&size| select_kernel_block_size(size, &backends).is_ok());
    }
    for kind in &mut kinds {
        let least = if kind.is_known { 0 } else { kind.block_size };
        kind.block_sizes.retain(|&size| size > least);
    }
    kinds
}

fn tried_sizes(block_size: u64) -> Vec<u64> {
    let sizes = BLOCK_SIZES.iter().filter_map(|&(times, part)| {
        let size = block_size.checked_mul(times)?;
        size.is_multiple_of(part).then_some(size / part)
    });
    sizes.collect()
}

/// What each layer with pages of its own stores, as it was given, and the backends of all that read
/// them. Of workers that hold the same layers one is looked at.
fn own_specs(plan: &Plan) -> impl Iterator<Item = (&Spec, Vec<&crate::backend::Backend>)> {
    let mut seen = Vec::new();
    let workers = plan.workers.iter().filter(move |worker| {
        let model = std::sync::Arc::as_ptr(&worker.model);
        let is_new = !seen.contains(&model);
        if is_new {
            seen.push(model);
        }
        is_new
    });
    workers.flat_map(|worker| {
        let groups = worker.groups.iter();
        groups.flat_map(|group| {
            let mut backends = vec![Vec::new(); group.layers.len()];
            for (place, layer) in reach::readers(&worker.model, group) {
                backends[place].extend(layer.backend.as_deref());
            }
            let members = group.layers.iter().zip(backends);
            members.filter_map(|(&layer, backends)| {
                let own = worker.model.layers().get(layer)?.own_spec()?;
                Some((own.as_ref(), backends))
            })
        })
    })
}

/// The longest sequences that fill whole blocks, where the longest begins another one.
fn shorter_by_a_block(plan: &Plan) -> Vec<Change> {
    let from = plan.config.limits.max_model_len;
    let groups = plan
        .workers
        .first()
        .map_or(&[][..], |worker| &worker.groups);
    let mut lengths: Vec<u64> = Vec::new();
    for group in groups
        .iter()
        .filter(|group| group.spec.first().as_attention().is_some())
    {
        let block = group.spec.block_size();
        let block = block
            .saturating_mul(plan.config.limits.context_parallel_size)
            .max(1);
        let to = from / block * block;
        if to < from && is_kept(to, from) && !lengths.contains(&to) {
            lengths.push(to);
        }
    }
    // A longer one gives up less.
    lengths.sort_unstable_by_key(|&to| std::cmp::Reverse(to));
    let shorter = lengths
        .into_iter()
        .map(|to| Change::MaxModelLen { from, to });
    shorter.collect()
}

fn is_kept(to: u64, from: u64) -> bool {
    let (numerator, denominator) = KEPT_LENGTH;
    u128::from(to) * u128::from(denominator) >= u128::from(from) * u128::from(numerator)
}

/// The longest sequence at which one more fits at once, if it is not much shorter. One more plan.
pub(super) fn one_more_request(own: &Plan) -> Option<OneMoreRequest> {
    let asked = own.asked.as_ref()?;
    let longest = own.config.limits.max_model_len;
    let now = own.capacity_of(longest).ok()?;
    let requests_now = now.usable_blocks / now.blocks_per_request.max(1);
    let requests = requests_now.checked_add(1)?;
    let exact = Limits {
        counting: Counting::Exact,
        ..own.config.limits
    };
    let worker = own
        .workers
        .first()
        .filter(|worker| !worker.groups.is_empty())?;
    let blocks = now.usable_blocks / requests;
    let to = Demand::of_plan(worker).longest(&exact, Some(blocks)).ok()?;
    if to == longest || !is_kept(to, longest) {
        return None;
    }
    let change = Change::MaxModelLen { from: longest, to };
    let then = changed_plan(&workers_of(own), asked, &change)?
        .capacity_of(to)
        .ok()?;
    let fits = then.usable_blocks / then.blocks_per_request.max(1);
    (fits >= requests).then_some(OneMoreRequest {
        max_model_len: to,
        requests: fits,
        requests_now,
    })
}
