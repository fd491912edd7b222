//! A compact plan beside the plan that the policy `reference` makes of the same layers.

use super::advice::{usual_len, workers_of};
use super::facts::{self, Waste};
use crate::plan::compact::why_unread;
use crate::plan::units::Bytes;
use crate::plan::{Group, Plan, PlanConfig, Policy, WorkerPlan, plan};
use crate::spec::{Counting, Limits};

/// A difference of wasted memory that is worth a sentence, as a part of all tensors.
const WORTH_A_WORD: f64 = 0.001;

/// What the policy `reference` makes of the same layers.
#[derive(Debug, PartialEq)]
pub(super) struct Comparison {
    /// Its plan beside this one, or why it gives none.
    pub outcome: Result<Beside, String>,
}

/// Two plans beside each other.
#[derive(Debug, PartialEq)]
pub(super) struct Beside {
    /// This plan.
    pub own: Totals,
    /// The reference's.
    pub reference: Totals,
    /// What both hold of requests of the usual and of the longest length, counted alike.
    pub lengths: Vec<Held>,
    /// Whether this plan is the reference's.
    pub is_taken: bool,
    /// Why kernels cannot read the reference's plan; `None` where they can.
    pub unread: Option<String>,
    /// Why this plan is the one, each reason a sentence.
    pub reasons: Vec<String>,
}

/// What a plan is, all workers together.
#[derive(Debug, PartialEq)]
pub(super) struct Totals {
    pub max_model_len: u64,
    pub num_blocks: u64,
    pub num_groups: usize,
    /// Of the worker whose blocks are largest.
    pub bytes_per_block: u64,
    /// As the plan says itself.
    pub capacity_tokens: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    pub waste: Waste,
}

/// Tokens that both plans hold in requests of one length.
#[derive(Debug, PartialEq)]
pub(super) struct Held {
    pub len: u64,
    pub requests: f64,
    pub requests_of_reference: f64,
}

impl Held {
    pub fn tokens(&self) -> u64 {
        (self.requests * self.len as f64) as u64
    }

    pub fn tokens_of_reference(&self) -> u64 {
        (self.requests_of_reference * self.len as f64) as u64
    }

    /// `None` where the reference holds none.
    pub fn ratio(&self) -> Option<f64> {
        (self.requests_of_reference > 0.0).then(|| self.requests / self.requests_of_reference)
    }
}

/// The comparison; `None` of a plan that follows the reference itself or that an engine made.
pub(super) fn compare(own: &Plan) -> Option<Comparison> {
    let asked = own.asked.as_ref()?;
    if asked.policy == Policy::Reference {
        return None;
    }
    let config = PlanConfig {
        policy: Policy::Reference,
        ..asked.clone()
    };
    let outcome = plan(&workers_of(own), &config)
        .map_err(|error| error.to_string())
        .and_then(|reference| beside(own, &reference).ok_or_else(cannot_be_counted));
    Some(Comparison { outcome })
}

fn cannot_be_counted() -> String {
    "its blocks cannot be counted".to_owned()
}

fn beside(own: &Plan, reference: &Plan) -> Option<Beside> {
    let longest = own.config.limits.max_model_len;
    // Both fit what is counted, where lengths were fitted.
    let longest = longest.min(reference.config.limits.max_model_len);
    let mut lengths = vec![usual_len(own).min(longest), longest];
    lengths.dedup();
    let held = |&len: &u64| {
        Some(Held {
            len,
            requests: own.capacity_of(len).ok()?.requests(),
            requests_of_reference: reference.capacity_of(len).ok()?.requests(),
        })
    };
    let mut beside = Beside {
        own: totals(own),
        reference: totals(reference),
        lengths: lengths.iter().map(held).collect::<Option<_>>()?,
        is_taken: is_same(own, reference),
        unread: why_unread(reference),
        reasons: Vec::new(),
    };
    beside.reasons = reasons(own, reference, &beside, longest);
    Some(beside)
}

/// What a plan is, all workers together.
pub(super) fn totals(plan: &Plan) -> Totals {
    let facts = facts::of_workers(plan);
    let mut waste = Waste::default();
    let mut tensor_bytes = 0u64;
    for (numbers, worker) in &facts {
        let times = |bytes: u64| bytes.saturating_mul(numbers.len() as u64);
        waste.padding = waste.padding.saturating_add(times(worker.waste.padding));
        waste.unused_slots = waste
            .unused_slots
            .saturating_add(times(worker.waste.unused_slots));
        waste.left_over = waste
            .left_over
            .saturating_add(times(worker.waste.left_over));
        tensor_bytes = tensor_bytes.saturating_add(times(worker.tensor_bytes));
    }
    let first = plan.workers.first();
    let bytes = plan.workers.iter().map(|worker| worker.bytes_per_block);
    Totals {
        max_model_len: plan.config.limits.max_model_len,
        num_blocks: first.map_or(0, |worker| worker.num_blocks),
        num_groups: first.map_or(0, |worker| worker.groups.len()),
        bytes_per_block: bytes.max().unwrap_or(0),
        capacity_tokens: first.map_or(0, |worker| worker.capacity_tokens),
        tensor_bytes,
        waste,
    }
}

/// Whether layers share tables and memory alike, however many blocks there are.
fn is_same(own: &Plan, other: &Plan) -> bool {
    let is_same_group = |(a, b): (&Group, &Group)| {
        let pages = |group: &Group| -> Vec<u64> {
            let places = 0..group.layers.len();
            places.map(|place| group.spec.page_of(place)).collect()
        };
        let alike = a.layers == b.layers && a.spec.block_size() == b.spec.block_size();
        alike && pages(a) == pages(b)
    };
    let is_same_worker = |(a, b): (&WorkerPlan, &WorkerPlan)| {
        a.bytes_per_block == b.bytes_per_block
            && a.groups.len() == b.groups.len()
            && a.groups.iter().zip(&b.groups).all(is_same_group)
    };
    own.workers.len() == other.workers.len()
        && own.workers.iter().zip(&other.workers).all(is_same_worker)
}

/// Why this plan is the one.
fn reasons(own: &Plan, reference: &Plan, beside: &Beside, longest: u64) -> Vec<String> {
    let mut all = Vec::new();
    match beside.is_taken {
        true => all.push(
            "the reference's groups and pages are taken: nothing better was found".to_owned(),
        ),
        false => {
            all.extend(
                beside
                    .unread
                    .iter()
                    .map(|why| format!("kernels could not read the reference's plan: {why}")),
            );
            all.extend(fewer_bytes(own, reference, longest));
            all.extend(less_padding(own, reference, beside));
            all.extend(fewer_groups(beside));
            all.extend(less_unused(beside));
            all.extend(overlaid(own, beside));
        }
    }
    all.extend(exact_counting(reference));
    all.extend(null_block(own));
    all
}

/// What one request takes: all the other reasons add up to it.
fn fewer_bytes(own: &Plan, reference: &Plan, len: u64) -> Option<String> {
    let bytes = |plan: &Plan| {
        let blocks = plan.capacity_of(len).ok()?.blocks_per_request;
        let of_workers = plan.workers.iter().map(|worker| worker.bytes_per_block);
        blocks.checked_mul(of_workers.max()?)
    };
    let (own, theirs) = (bytes(own)?, bytes(reference)?);
    (own < theirs).then(|| {
        format!(
            "a request of {len} tokens takes {}, in the reference's plan {}",
            Bytes(own),
            Bytes(theirs)
        )
    })
}

fn share(bytes: u64, totals: &Totals) -> f64 {
    bytes as f64 / totals.tensor_bytes.max(1) as f64
}

fn less_padding(own: &Plan, reference: &Plan, beside: &Beside) -> Option<String> {
    let is = share(beside.own.waste.padding, &beside.own);
    let was = share(beside.reference.waste.padding, &beside.reference);
    if was - is < WORTH_A_WORD {
        return None;
    }
    let what = match has_larger_blocks(own, reference) {
        true => "larger blocks instead of padding",
        false => "less padding",
    };
    let (was, is) = (100.0 * was, 100.0 * is);
    Some(format!(
        "{what}: {was:.1} % of the reference's tensors would be padding, {is:.1} % of these are"
    ))
}

/// Whether some layer has more tokens in a block than in the reference's plan.
fn has_larger_blocks(own: &Plan, reference: &Plan) -> bool {
    let (Some(own), Some(reference)) = (own.workers.first(), reference.workers.first()) else {
        return false;
    };
    let mut block_sizes = vec![0; reference.model.layers().len()];
    for group in &reference.groups {
        for &layer in &group.layers {
            if let Some(size) = block_sizes.get_mut(layer) {
                *size = group.spec.block_size();
            }
        }
    }
    own.groups.iter().any(|group| {
        let mut layers = group.layers.iter();
        layers.any(|&layer| {
            block_sizes
                .get(layer)
                .is_some_and(|&size| size < group.spec.block_size())
        })
    })
}

fn fewer_groups(beside: &Beside) -> Option<String> {
    let (is, was) = (beside.own.num_groups, beside.reference.num_groups);
    (is < was).then(|| format!("fewer groups: {is} instead of {was}"))
}

fn less_unused(beside: &Beside) -> Option<String> {
    let is = share(beside.own.waste.unused_slots, &beside.own);
    let was = share(beside.reference.waste.unused_slots, &beside.reference);
    let (was, is) = (was >= is + WORTH_A_WORD).then_some((100.0 * was, 100.0 * is))?;
    Some(format!(
        "fewer unused slots: {was:.1} % of the reference's tensors would be slots that a group leaves empty, {is:.1} % of these are"
    ))
}

/// Groups that lie over each other in packed blocks.
fn overlaid(own: &Plan, beside: &Beside) -> Option<String> {
    let worker = own
        .workers
        .iter()
        .max_by_key(|worker| worker.bytes_per_block)?;
    let slots = worker
        .tensors
        .iter()
        .filter(|tensor| tensor.block_stride > 0);
    let mut offsets: Vec<u64> = slots.map(|tensor| tensor.offset).collect();
    let all = offsets.len();
    offsets.sort_unstable();
    offsets.dedup();
    let (is, was) = (beside.own.bytes_per_block, beside.reference.bytes_per_block);
    // Slots of different groups begin at the same byte.
    (offsets.len() < all).then(|| {
        format!(
            "groups that never share a block lie over each other: a block has {is} bytes, in the reference's plan {was}"
        )
    })
}

/// Blocks of a request that the reference counts and no request holds.
fn exact_counting(reference: &Plan) -> Option<String> {
    let worker = reference.workers.first()?;
    let blocks = |counting| {
        let limits = Limits {
            counting,
            ..reference.config.limits
        };
        worker.blocks_per_request(&limits).ok()
    };
    let (counted, held) = (blocks(Counting::Reference)?, blocks(Counting::Exact)?);
    (held < counted).then(|| {
        let len = reference.config.limits.max_model_len;
        format!(
            "exact counting: in the reference's plan a request of {len} tokens holds {held} blocks, and the reference counts {counted}"
        )
    })
}

fn null_block(own: &Plan) -> Option<String> {
    let asked = own.asked.as_ref()?;
    (asked.reserved_blocks < own.config.reserved_blocks).then(|| {
        "block 0 is kept from requests, which the reference would not do unasked".to_owned()
    })
}
