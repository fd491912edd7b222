//! How long a plan of many layers takes under each policy:
//!
//! ```sh
//! cargo run --release --example plan_time
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpages::dtype::Dtype;
use kvpages::model::Model;
use kvpages::plan::{PlanConfig, Policy, Worker, plan};
use kvpages::spec::{
    Attention, AttentionFields, AttentionKind, Counting, Limits, Spec, State, StateCacheMode,
    StateFields, StateKind,
};

/// Plans made for each number; the least time is what the machine's other work does not disturb.
const RUNS: usize = 20;
/// Of those that take long.
const FEW_RUNS: usize = 3;

fn main() {
    println!("layers  kinds  stages  reference     compact");
    for (layers, kinds, stages) in [
        (126, 2, 1),
        (1000, 12, 1),
        (1000, 12, 8),
        (8000, 12, 1),
        (6400, 100, 64),
        (1000, 1000, 1),
        (6400, 1000, 64),
    ] {
        let workers = workers(layers, kinds, stages);
        let [reference, compact] = [Policy::Reference, Policy::Compact].map(|p| least(&workers, p));
        println!("{layers:6}  {kinds:5}  {stages:6}  {reference:>9.2?}  {compact:>10.2?}");
    }
}

fn least(workers: &[Worker], policy: Policy) -> Duration {
    let config = PlanConfig {
        policy,
        limits: Limits {
            max_model_len: 131_072,
            context_parallel_size: 1,
            max_tokens_in_flight: 8192,
            max_encoder_tokens: 0,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: None,
        reserved_blocks: 1,
        has_draft_layers: false,
        typical_len: 8192,
        choose_block_sizes: false,
    };
    let layers: usize = workers.iter().map(|w| w.model.layers().len()).sum();
    let runs = if layers > 1000 { FEW_RUNS } else { RUNS };
    let times = (0..runs).map(|_| {
        let start = Instant::now();
        let plan = plan(workers, &config).expect("a plan");
        let took = start.elapsed();
        assert!(plan.workers[0].num_blocks > 0);
        took
    });
    times.min().unwrap_or_default()
}

/// Layers of many kinds, some rare, cut into stages.
fn workers(layers: usize, kinds: u64, stages: usize) -> Vec<Worker> {
    let kinds: Vec<Spec> = (0..kinds).map(kind).collect();
    let per_stage = layers.div_ceil(stages);
    let stage = |stage: usize| {
        let mut model = Model::new();
        for number in stage * per_stage..layers.min((stage + 1) * per_stage) {
            // The first kinds are common, the last ones rare.
            let pick = (number * 7919) % (kinds.len() * (kinds.len() + 1) / 2);
            let place = (0..kinds.len()).find(|&k| pick < (k + 1) * (2 * kinds.len() - k) / 2);
            let spec = kinds[place.unwrap_or(0)].clone();
            model
                .add(&format!("layers.{number}"), spec, None, 1)
                .expect("a layer");
        }
        Worker {
            model: Arc::new(model),
            memory_bytes: 1 << 46,
        }
    };
    (0..stages).map(stage).collect()
}

/// Full layers, windows and states, with heads of several sizes; from the thirteenth on like one of the
/// first twelve and a little larger.
fn kind(number: u64) -> Spec {
    let (number, larger) = (number % 12, number / 12);
    if number % 4 == 3 {
        let fields = StateFields {
            kind: StateKind::Mamba2,
            block_size: 131_072,
            dtypes: vec![Dtype::F32],
            ndims: vec![1],
            dims: vec![40_000 + 5000 * number + 100 * larger],
            page_size_padded: None,
            cache_mode: StateCacheMode::None,
            num_speculative_blocks: 0,
        };
        return Spec::State(State::new(fields).expect("a state"));
    }
    let window = (!number.is_multiple_of(4)).then_some((512 << (number % 3)) + 16 * larger);
    let fields = AttentionFields {
        kind: window.map_or(AttentionKind::Full, |_| AttentionKind::SlidingWindow),
        sliding_window: window,
        indexes_kv_by_block_stride: true,
        ..AttentionFields::full(
            16,
            1 + number % 3 + larger,
            64 + 32 * (number % 5),
            Dtype::Bf16,
        )
    };
    Spec::Attention(Attention::new(fields).expect("an attention layer"))
}
