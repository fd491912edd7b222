//! What there is to say about a plan.

use std::collections::HashMap;
use std::sync::Arc;

use super::advice::{self, Advice, OneMoreRequest};
use super::reference::{self, Comparison};
use crate::plan::{Group, GroupSpec, Plan, WorkerPlan, reach};
use crate::spec::{AttentionKind, Spec};

/// What there is to say about a plan.
pub(super) struct PlanFacts {
    pub num_workers: usize,
    pub num_blocks: u64,
    pub max_model_len: u64,
    pub reserved_blocks: u64,
    /// Each with the workers that it is true of.
    pub workers: Vec<(Vec<usize>, WorkerFacts)>,
    /// The reference's plan beside this one, of a plan by another policy.
    pub reference: Option<Comparison>,
    /// What would win most tokens.
    pub cheapest_change: Option<Advice>,
    /// The longest sequence at which one more fits.
    pub one_more_request: Option<OneMoreRequest>,
}

/// What there is to say about a worker.
#[derive(PartialEq)]
pub(super) struct WorkerFacts {
    pub memory_bytes: i64,
    pub tensors: usize,
    pub tensor_bytes: u64,
    pub bytes_per_block: u64,
    /// What a request needs and how many fit; `None` when the limits are not known.
    pub request: Option<RequestFacts>,
    pub needs_zeroing: bool,
    /// Why there are no more blocks, where that is not the memory.
    pub narrow: Option<NarrowFacts>,
    pub waste: Waste,
    pub groups: Vec<GroupFacts>,
}

/// A layer whose kernels reach no more blocks than there are, though there is memory for more.
#[derive(PartialEq)]
pub(super) struct NarrowFacts {
    pub layer: String,
    pub backend: String,
    /// Blocks that there is memory for on this worker.
    pub blocks_of_memory: u64,
}

/// What a request of the longest sequence needs, and how many fit.
#[derive(PartialEq)]
pub(super) struct RequestFacts {
    pub blocks: u64,
    pub bytes: u64,
    pub max_concurrency: f64,
    pub capacity_tokens: u64,
}

/// Bytes that hold nothing when all blocks are used, by groups in the proportions of one request.
#[derive(Debug, PartialEq, Default)]
pub(super) struct Waste {
    pub padding: u64,
    pub unused_slots: u64,
    pub left_over: u64,
}

impl Waste {
    pub fn total(&self) -> u64 {
        self.padding
            .saturating_add(self.unused_slots)
            .saturating_add(self.left_over)
    }
}

/// What there is to say about a group.
#[derive(PartialEq)]
pub(super) struct GroupFacts {
    pub layers: Vec<Arc<str>>,
    pub sharing_layers: Vec<Arc<str>>,
    pub kinds: Vec<&'static str>,
    pub block_size: u64,
    pub kernel_block_size: Option<u64>,
    /// The smallest and the largest page.
    pub page_bytes: (u64, u64),
    pub blocks_per_request: u64,
    /// Of one block, in all layers.
    pub bytes_per_block: u64,
    /// Of one block, in all layers.
    pub padding_bytes: u64,
    /// Of one block: slots that other groups use and this one does not.
    pub unused_bytes: u64,
    pub is_draft: bool,
    pub reasons: Vec<String>,
}

impl GroupFacts {
    /// The part of a block that is padding, 0 to 1.
    pub fn padding_share(&self) -> f64 {
        self.padding_bytes as f64 / self.bytes_per_block.max(1) as f64
    }
}

/// All there is to say.
pub(super) fn facts(plan: &Plan) -> PlanFacts {
    PlanFacts {
        num_workers: plan.workers.len(),
        num_blocks: plan.workers.first().map_or(0, |worker| worker.num_blocks),
        max_model_len: plan.config.limits.max_model_len,
        reserved_blocks: plan.config.reserved_blocks,
        workers: of_workers(plan),
        reference: reference::compare(plan),
        cheapest_change: plan.cheapest_change(),
        one_more_request: advice::one_more_request(plan),
    }
}

/// What there is to say about each worker. Workers of one model and memory are looked at once.
pub(super) fn of_workers(plan: &Plan) -> Vec<(Vec<usize>, WorkerFacts)> {
    let mut workers: Vec<(Vec<usize>, WorkerFacts)> = Vec::new();
    let mut known: HashMap<(usize, i64), usize> = HashMap::new();
    for (number, worker) in plan.workers.iter().enumerate() {
        let key = (Arc::as_ptr(&worker.model) as usize, worker.memory_bytes);
        let place = *known.entry(key).or_insert_with(|| {
            let facts = worker_facts(plan, worker);
            workers
                .iter()
                .position(|(_, other)| *other == facts)
                .unwrap_or_else(|| {
                    workers.push((Vec::new(), facts));
                    workers.len() - 1
                })
        });
        workers[place].0.push(number);
    }
    workers
}

/// What limits the blocks of a worker besides its memory.
fn narrow(plan: &Plan, worker: &WorkerPlan) -> Option<NarrowFacts> {
    if plan.config.num_blocks_override.is_some() {
        return None;
    }
    let reach = reach::of_plan(worker)?;
    let given = u64::try_from(worker.memory_bytes).unwrap_or(0);
    let blocks_of_memory = given.checked_div(worker.bytes_per_block)?;
    (reach.blocks == worker.num_blocks && reach.blocks < blocks_of_memory).then_some(NarrowFacts {
        layer: reach.layer,
        backend: reach.backend,
        blocks_of_memory,
    })
}

fn worker_facts(plan: &Plan, worker: &WorkerPlan) -> WorkerFacts {
    let limits = &plan.config.limits;
    let groups: Vec<GroupFacts> = (0..worker.groups.len())
        .map(|group| {
            let blocks = worker.groups[group].spec.blocks_per_request(limits);
            group_facts(worker, group, blocks.unwrap_or(0))
        })
        .collect();
    let tensor_bytes = worker.bytes_per_block.saturating_mul(worker.num_blocks);
    let waste = waste(worker, &groups, tensor_bytes);
    WorkerFacts {
        memory_bytes: worker.memory_bytes,
        tensors: worker.tensors.len(),
        tensor_bytes,
        bytes_per_block: worker.bytes_per_block,
        request: limits.are_known().then(|| RequestFacts {
            blocks: total(groups.iter().map(|group| group.blocks_per_request)),
            bytes: worker.bytes_per_request,
            max_concurrency: worker.max_concurrency,
            capacity_tokens: worker.capacity_tokens,
        }),
        needs_zeroing: worker.needs_zeroing,
        narrow: narrow(plan, worker),
        waste,
        groups,
    }
}

fn waste(worker: &WorkerPlan, groups: &[GroupFacts], tensor_bytes: u64) -> Waste {
    // Where no request is known, or none needs a block, groups count alike.
    let of_request = total(groups.iter().map(|group| group.blocks_per_request));
    let weight = |group: &GroupFacts| match of_request {
        0 => 1,
        _ => u128::from(group.blocks_per_request),
    };
    let weights: u128 = groups.iter().map(weight).sum();
    let in_all_blocks = |of_group: fn(&GroupFacts) -> u64| {
        let bytes: u128 = groups
            .iter()
            .map(|g| weight(g) * u128::from(of_group(g)))
            .sum();
        let bytes = bytes.saturating_mul(u128::from(worker.num_blocks)) / weights.max(1);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    };
    let given = u64::try_from(worker.memory_bytes).unwrap_or(0);
    Waste {
        padding: in_all_blocks(|group| group.padding_bytes),
        unused_slots: in_all_blocks(|group| group.unused_bytes),
        left_over: match worker.bytes_per_block {
            // The memory of a worker without caches is not the plan's.
            0 => 0,
            _ => given.saturating_sub(tensor_bytes),
        },
    }
}

fn group_facts(worker: &WorkerPlan, number: usize, blocks_per_request: u64) -> GroupFacts {
    let group = &worker.groups[number];
    let name = |&layer: &usize| {
        worker
            .model
            .layers()
            .get(layer)
            .map(|l| Arc::clone(&l.name))
    };
    let specs: Vec<&Arc<Spec>> = (0..group.layers.len())
        .map(|place| group.spec.spec_of(place))
        .collect();
    let pages = specs.iter().map(|spec| spec.page().padded);
    let bytes_per_block = match specs.iter().all(|spec| spec.takes_cache()) {
        true => total(pages.clone()),
        false => 0,
    };
    let mut kinds: Vec<&'static str> = Vec::new();
    for spec in &specs {
        if !kinds.contains(&spec.kind_name()) {
            kinds.push(spec.kind_name());
        }
    }
    GroupFacts {
        layers: group.layers.iter().filter_map(name).collect(),
        sharing_layers: group.sharing_layers.iter().filter_map(name).collect(),
        kinds,
        block_size: group.spec.block_size(),
        kernel_block_size: group.kernel_block_size,
        page_bytes: (pages.clone().min().unwrap_or(0), pages.max().unwrap_or(0)),
        blocks_per_request,
        bytes_per_block,
        padding_bytes: total(
            specs
                .iter()
                .map(|spec| spec.page().padded - spec.page().unpadded),
        ),
        unused_bytes: worker.bytes_per_block.saturating_sub(bytes_per_block),
        is_draft: group.is_draft,
        reasons: reasons(worker, group, bytes_per_block),
    }
}

/// Why the group is as it is, each reason once.
fn reasons(worker: &WorkerPlan, group: &Group, bytes_per_block: u64) -> Vec<String> {
    let mut reasons: Vec<String> = Vec::new();
    let mut seen: Option<(usize, usize)> = None;
    for (place, &layer) in group.layers.iter().enumerate() {
        let own = worker
            .model
            .layers()
            .get(layer)
            .and_then(|layer| layer.own_spec());
        let Some(own) = own else { continue };
        let planned = group.spec.spec_of(place);
        let pair = (
            std::ptr::from_ref(planned) as usize,
            Arc::as_ptr(own) as usize,
        );
        if seen.replace(pair) == Some(pair) {
            continue;
        }
        for reason in layer_reasons(worker, own, planned) {
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
    }
    if matches!(group.spec, GroupSpec::Set(_)) && group.layers.len() > 1 {
        reasons.push("one block table serves layers that store different things".to_owned());
    }
    if !group.sharing_layers.is_empty() {
        let count = group.sharing_layers.len();
        reasons.push(format!(
            "{count} more read the pages of these layers and cost nothing"
        ));
    }
    reasons.extend(unused_reason(worker, group, bytes_per_block));
    reasons
}

fn unused_reason(worker: &WorkerPlan, group: &Group, bytes_per_block: u64) -> Option<String> {
    if group.layers.is_empty() {
        return Some("this worker has no layer of the group".to_owned());
    }
    if !group.spec.first().takes_cache() {
        return Some("encoder-only layers keep nothing between steps".to_owned());
    }
    let unused = worker
        .bytes_per_block
        .checked_sub(bytes_per_block)
        .filter(|&bytes| bytes > 0)?;
    let slots = worker.tensors.len().saturating_sub(group.layers.len());
    let all = worker.tensors.len();
    Some(format!(
        "leaves {slots} of {all} layer slots unused, {unused} bytes of a block"
    ))
}

/// How the planned spec came from the layer's own.
fn layer_reasons(worker: &WorkerPlan, own: &Spec, planned: &Spec) -> Vec<String> {
    let mut reasons = Vec::new();
    let (before, after) = (own.page(), planned.page());
    if own.kind_name() != planned.kind_name() {
        let was = own.kind_name();
        reasons.push(format!(
            "hybrid manager off: {was} is stored as {}",
            planned.kind_name()
        ));
    }
    if own.block_size() != planned.block_size() {
        let (was, is) = (own.block_size(), planned.block_size());
        let why = match (own.kind_name() != planned.kind_name(), is_hidden(own)) {
            (true, _) => "the block size of the full layers".to_owned(),
            (_, true) => format!("as many tokens as a page of {} bytes holds", after.padded),
            _ => format!("its page must equal {}", target(worker, after.padded)),
        };
        reasons.push(format!("block size {was} became {is}: {why}"));
    }
    if after.padded == after.unpadded {
        return reasons;
    }
    let padding = after.padded - after.unpadded;
    let page = after.padded;
    let (given, alignment) = (given_padding(own), alignment(planned));
    let changed = given_padding(planned) != given;
    reasons.push(match (changed, given, alignment) {
        (false, Some(given), _) if given == page => {
            format!("padding of {padding} bytes a page was given with the layer")
        }
        (false, _, Some(alignment)) => {
            format!("padding of {padding} bytes a page aligns it to {alignment} bytes")
        }
        _ if own.as_state().is_some() => {
            format!(
                "state padded from {} bytes to {}",
                before.padded,
                target(worker, page)
            )
        }
        _ if is_windowed_latent(own) => format!(
            "page padded from {} to {page} bytes, the nearest page of a full MLA layer",
            before.padded
        ),
        _ => format!(
            "page padded from {} bytes to {}",
            after.unpadded,
            target(worker, page)
        ),
    });
    reasons
}

fn is_hidden(spec: &Spec) -> bool {
    spec.is_attention_kind(AttentionKind::HiddenState)
}

fn is_windowed_latent(spec: &Spec) -> bool {
    spec.is_attention_kind(AttentionKind::SlidingWindowMla)
}

fn given_padding(spec: &Spec) -> Option<u64> {
    match spec {
        Spec::Attention(attention) => attention.fields().page_size_padded,
        Spec::State(state) => state.fields().page_size_padded,
    }
}

fn alignment(spec: &Spec) -> Option<u64> {
    spec.as_attention()
        .and_then(|attention| attention.fields().alignment)
}

/// The page that others were made equal to, with a layer that has it by itself.
fn target(worker: &WorkerPlan, page: u64) -> String {
    let layer = worker
        .groups
        .iter()
        .flat_map(|group| &group.layers)
        .find_map(|&layer| {
            let layer = worker.model.layers().get(layer)?;
            (layer.own_spec()?.page().padded == page).then_some(&layer.name)
        });
    match layer {
        Some(layer) => format!("{page} bytes, the page of {layer}"),
        None => format!("{page} bytes, the common page of the model"),
    }
}

/// A sum for reading only: numbers that fit nowhere stop at the largest.
fn total(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
