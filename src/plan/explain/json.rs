//! For programs.

use std::sync::Arc;

use serde::Serialize;

use super::advice::{Advice, OneMoreRequest};
use super::facts::{GroupFacts, NarrowFacts, PlanFacts, Waste, WorkerFacts};
use super::reference::{Beside, Comparison, Held, Totals};

/// The facts as one JSON object. Keys come in the order of the fields here.
pub(super) fn render(facts: &PlanFacts) -> String {
    let workers = facts.workers.iter();
    let plan = PlanObject {
        num_blocks: facts.num_blocks,
        reserved_blocks: facts.reserved_blocks,
        max_model_len: facts.max_model_len,
        workers: workers.map(|(numbers, of)| worker(numbers, of)).collect(),
        reference: facts.reference.as_ref().map(reference),
        cheapest_change: facts.cheapest_change.as_ref().map(cheapest_change),
        one_more_request: facts.one_more_request.as_ref().map(one_more_request),
    };
    // Strings and numbers can always be written.
    serde_json::to_string(&plan).unwrap_or_default()
}

#[derive(Serialize)]
struct PlanObject<'a> {
    num_blocks: u64,
    reserved_blocks: u64,
    max_model_len: u64,
    workers: Vec<WorkerObject<'a>>,
    reference: Option<ReferenceObject<'a>>,
    cheapest_change: Option<ChangeObject>,
    one_more_request: Option<OneMoreRequestObject>,
}

#[derive(Serialize)]
struct WorkerObject<'a> {
    workers: &'a [usize],
    memory_bytes: i64,
    num_tensors: usize,
    tensor_bytes: u64,
    bytes_per_block: u64,
    blocks_per_request: Option<u64>,
    bytes_per_request: Option<u64>,
    capacity_tokens: Option<u64>,
    /// A quotient of whole numbers and finite, which JSON can write.
    max_concurrency: Option<f64>,
    needs_zeroing: bool,
    narrow_index: Option<NarrowObject<'a>>,
    wasted_bytes: WasteObject,
    groups: Vec<GroupObject<'a>>,
}

#[derive(Serialize)]
struct NarrowObject<'a> {
    layer: &'a str,
    backend: &'a str,
    blocks_of_memory: u64,
}

#[derive(Serialize)]
struct WasteObject {
    total: u64,
    padding: u64,
    unused_slots: u64,
    left_over: u64,
}

#[derive(Serialize)]
struct GroupObject<'a> {
    kinds: &'a [&'static str],
    is_draft: bool,
    block_size: u64,
    kernel_block_size: Option<u64>,
    smallest_page_bytes: u64,
    largest_page_bytes: u64,
    blocks_per_request: u64,
    bytes_per_block: u64,
    padding_bytes_per_block: u64,
    padding_share: f64,
    unused_bytes_per_block: u64,
    reasons: &'a [String],
    layers: Vec<&'a str>,
    sharing_layers: Vec<&'a str>,
}

/// Of the reference's plan: `None` where it gives none, and then `error` says why.
#[derive(Serialize)]
struct ReferenceObject<'a> {
    error: Option<&'a str>,
    is_taken: bool,
    unread: Option<&'a str>,
    reasons: &'a [String],
    lengths: Vec<HeldObject>,
    plan: Option<TotalsObject>,
    own_plan: Option<TotalsObject>,
}

#[derive(Serialize)]
struct HeldObject {
    len: u64,
    tokens: u64,
    tokens_of_reference: u64,
    requests: f64,
    requests_of_reference: f64,
    ratio: Option<f64>,
}

#[derive(Serialize)]
struct TotalsObject {
    max_model_len: u64,
    num_blocks: u64,
    num_groups: usize,
    bytes_per_block: u64,
    capacity_tokens: u64,
    tensor_bytes: u64,
    wasted_bytes: WasteObject,
}

#[derive(Serialize)]
struct ChangeObject {
    change: &'static str,
    kind: Option<&'static str>,
    from: Option<u64>,
    to: Option<u64>,
    len: u64,
    tokens: u64,
    tokens_now: u64,
    text: String,
}

#[derive(Serialize)]
struct OneMoreRequestObject {
    max_model_len: u64,
    requests: u64,
    requests_now: u64,
}

fn reference(comparison: &Comparison) -> ReferenceObject<'_> {
    match &comparison.outcome {
        Err(error) => ReferenceObject {
            error: Some(error),
            is_taken: false,
            unread: None,
            reasons: &[],
            lengths: Vec::new(),
            plan: None,
            own_plan: None,
        },
        Ok(beside) => reference_beside(beside),
    }
}

fn reference_beside(beside: &Beside) -> ReferenceObject<'_> {
    ReferenceObject {
        error: None,
        is_taken: beside.is_taken,
        unread: beside.unread.as_deref(),
        reasons: &beside.reasons,
        lengths: beside.lengths.iter().map(held).collect(),
        plan: Some(totals(&beside.reference)),
        own_plan: Some(totals(&beside.own)),
    }
}

fn held(held: &Held) -> HeldObject {
    HeldObject {
        len: held.len,
        tokens: held.tokens(),
        tokens_of_reference: held.tokens_of_reference(),
        requests: held.requests,
        requests_of_reference: held.requests_of_reference,
        ratio: held.ratio(),
    }
}

fn totals(totals: &Totals) -> TotalsObject {
    TotalsObject {
        max_model_len: totals.max_model_len,
        num_blocks: totals.num_blocks,
        num_groups: totals.num_groups,
        bytes_per_block: totals.bytes_per_block,
        capacity_tokens: totals.capacity_tokens,
        tensor_bytes: totals.tensor_bytes,
        wasted_bytes: waste(&totals.waste),
    }
}

fn cheapest_change(advice: &Advice) -> ChangeObject {
    let numbers = advice.change.numbers();
    ChangeObject {
        change: advice.change.name(),
        kind: advice.change.kind(),
        from: numbers.map(|(from, _)| from),
        to: numbers.map(|(_, to)| to),
        len: advice.len,
        tokens: advice.tokens,
        tokens_now: advice.tokens_now,
        text: advice.to_string(),
    }
}

fn one_more_request(more: &OneMoreRequest) -> OneMoreRequestObject {
    OneMoreRequestObject {
        max_model_len: more.max_model_len,
        requests: more.requests,
        requests_now: more.requests_now,
    }
}

fn narrow(facts: &NarrowFacts) -> NarrowObject<'_> {
    NarrowObject {
        layer: &facts.layer,
        backend: &facts.backend,
        blocks_of_memory: facts.blocks_of_memory,
    }
}

fn waste(waste: &Waste) -> WasteObject {
    WasteObject {
        total: waste.total(),
        padding: waste.padding,
        unused_slots: waste.unused_slots,
        left_over: waste.left_over,
    }
}

fn worker<'a>(numbers: &'a [usize], facts: &'a WorkerFacts) -> WorkerObject<'a> {
    let request = facts.request.as_ref();
    WorkerObject {
        workers: numbers,
        memory_bytes: facts.memory_bytes,
        num_tensors: facts.tensors,
        tensor_bytes: facts.tensor_bytes,
        bytes_per_block: facts.bytes_per_block,
        blocks_per_request: request.map(|request| request.blocks),
        bytes_per_request: request.map(|request| request.bytes),
        capacity_tokens: request.map(|request| request.capacity_tokens),
        max_concurrency: request.map(|request| request.max_concurrency),
        needs_zeroing: facts.needs_zeroing,
        narrow_index: facts.narrow.as_ref().map(narrow),
        wasted_bytes: waste(&facts.waste),
        groups: facts.groups.iter().map(group).collect(),
    }
}

fn group(facts: &GroupFacts) -> GroupObject<'_> {
    GroupObject {
        kinds: &facts.kinds,
        is_draft: facts.is_draft,
        block_size: facts.block_size,
        kernel_block_size: facts.kernel_block_size,
        smallest_page_bytes: facts.page_bytes.0,
        largest_page_bytes: facts.page_bytes.1,
        blocks_per_request: facts.blocks_per_request,
        bytes_per_block: facts.bytes_per_block,
        padding_bytes_per_block: facts.padding_bytes,
        padding_share: facts.padding_share(),
        unused_bytes_per_block: facts.unused_bytes,
        reasons: &facts.reasons,
        layers: names(&facts.layers),
        sharing_layers: names(&facts.sharing_layers),
    }
}

fn names(layers: &[Arc<str>]) -> Vec<&str> {
    layers.iter().map(|name| &**name).collect()
}
