//! Specs, models and configurations for tests.

use std::sync::Arc;

use super::{Plan, PlanConfig, PlanError, Policy, Worker, plan};
use crate::backend::{Backend, Contract, KernelBlockSize, Preset};
use crate::dtype::Dtype;
use crate::model::Model;
use crate::spec::{
    Attention, AttentionFields, AttentionKind, Counting, Limits, Spec, State, StateCacheMode,
    StateFields, StateKind,
};

/// One u8 head: a page of `2 · block_size · head_size` bytes.
pub(super) fn fields(kind: AttentionKind, block_size: u64, head_size: u64) -> AttentionFields {
    AttentionFields {
        kind,
        ..AttentionFields::full(block_size, 1, head_size, Dtype::U8)
    }
}

pub(super) fn attention(fields: AttentionFields) -> Spec {
    Spec::Attention(Attention::new(fields).unwrap())
}

/// Full attention, block size 16, a page of so many bytes.
pub(super) fn full_page(page: u64) -> Spec {
    attention(fields(AttentionKind::Full, 16, page / 32))
}

pub(super) fn full(block_size: u64, head_size: u64) -> Spec {
    attention(fields(AttentionKind::Full, block_size, head_size))
}

pub(super) fn sliding(window: u64, block_size: u64, head_size: u64) -> Spec {
    attention(AttentionFields {
        sliding_window: Some(window),
        ..fields(AttentionKind::SlidingWindow, block_size, head_size)
    })
}

pub(super) fn changed(spec: &Spec, change: impl FnOnce(&mut AttentionFields)) -> Spec {
    Spec::Attention(spec.as_attention().unwrap().changed(change).unwrap())
}

pub(super) fn strided(spec: Spec) -> Spec {
    changed(&spec, |fields| fields.indexes_kv_by_block_stride = true)
}

pub(super) fn padded(spec: Spec, page: u64) -> Spec {
    spec.with_page_size_padded(Some(page)).unwrap()
}

/// A state of so many f32.
pub(super) fn state(elements: u64) -> Spec {
    Spec::State(
        State::new(StateFields {
            kind: StateKind::Mamba2,
            block_size: 16,
            dtypes: vec![Dtype::F32],
            ndims: vec![1],
            dims: vec![elements],
            page_size_padded: None,
            cache_mode: StateCacheMode::None,
            num_speculative_blocks: 0,
        })
        .unwrap(),
    )
}

/// A backend that takes kernel blocks of such sizes.
pub(super) fn backend(sizes: &[KernelBlockSize]) -> Arc<Backend> {
    let contract = Contract {
        kernel_block_sizes: sizes.to_vec(),
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    Arc::new(Backend::new(contract).unwrap())
}

/// Layers `l0`, `l1`, … without backends.
pub(super) fn model(specs: impl IntoIterator<Item = Spec>) -> Arc<Model> {
    named(
        specs
            .into_iter()
            .enumerate()
            .map(|(i, spec)| (format!("l{i}"), spec)),
    )
}

pub(super) fn named(layers: impl IntoIterator<Item = (String, Spec)>) -> Arc<Model> {
    let mut model = Model::new();
    for (name, spec) in layers {
        model.add(&name, spec, None, 1).unwrap();
    }
    Arc::new(model)
}

pub(super) fn worker(model: &Arc<Model>, memory_bytes: i64) -> Worker {
    Worker {
        model: Arc::clone(model),
        memory_bytes,
    }
}

pub(super) fn config(max_model_len: u64) -> PlanConfig {
    PlanConfig {
        policy: Policy::Reference,
        limits: Limits {
            max_model_len,
            context_parallel_size: 1,
            max_tokens_in_flight: 16,
            max_encoder_tokens: 0,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: None,
        reserved_blocks: 0,
        has_draft_layers: false,
        typical_len: 0,
        choose_block_sizes: false,
    }
}

/// A plan for one worker.
pub(super) fn plan_one(
    model: &Arc<Model>,
    memory_bytes: i64,
    config: &PlanConfig,
) -> Result<Plan, PlanError> {
    plan(&[worker(model, memory_bytes)], config)
}

/// The names of a worker's layers.
pub(super) fn names(model: &Model, layers: &[usize]) -> Vec<String> {
    layers
        .iter()
        .map(|&layer| model.layers()[layer].name.to_string())
        .collect()
}
