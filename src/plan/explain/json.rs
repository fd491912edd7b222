//! For programs.

use std::sync::Arc;

use serde::Serialize;

use super::facts::{GroupFacts, PlanFacts, WorkerFacts};

/// The facts as one JSON object. Keys come in the order of the fields here.
pub(super) fn render(facts: &PlanFacts) -> String {
    let workers = facts.workers.iter();
    let plan = PlanObject {
        num_blocks: facts.num_blocks,
        reserved_blocks: facts.reserved_blocks,
        max_model_len: facts.max_model_len,
        workers: workers.map(|(numbers, of)| worker(numbers, of)).collect(),
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
    wasted_bytes: WasteObject,
    groups: Vec<GroupObject<'a>>,
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
        wasted_bytes: WasteObject {
            total: facts.waste.total(),
            padding: facts.waste.padding,
            unused_slots: facts.waste.unused_slots,
            left_over: facts.waste.left_over,
        },
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
