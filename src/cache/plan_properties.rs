//! Every plan that a policy makes can be laid out: random layers with the contracts of real kernels.

use std::sync::Arc;

use proptest::prelude::*;

use super::Blueprint;
use crate::backend::{Backend, Contract, IndexWidth, KernelBlockSize, Preset};
use crate::dtype::Dtype;
use crate::model::Model;
use crate::plan::{Plan, PlanConfig, Policy, Worker, plan};
use crate::spec::{
    Attention, AttentionFields, AttentionKind, Counting, Limits, QuantMode, Spec, State,
    StateCacheMode, StateFields, StateKind,
};

/// A kind of layer, and what reads it.
#[derive(Debug, Clone)]
struct Kind {
    spec: Spec,
    backend: Arc<Backend>,
}

fn attention_kind(
    (preset, alignment, narrow): (Preset, u64, bool),
    (block_size, heads, head_size): (u64, u64, u64),
    (window, scales): (Option<u64>, bool),
) -> Kind {
    let contract = Contract {
        alignment,
        index_width: index_width(narrow),
        ..preset.contract().unwrap()
    };
    let is_latent = matches!(preset, Preset::TritonMla | Preset::FlashMla);
    let kind = match (is_latent, window) {
        (true, None) => AttentionKind::Mla,
        (true, Some(_)) => AttentionKind::SlidingWindowMla,
        (false, None) => AttentionKind::Full,
        (false, Some(_)) => AttentionKind::SlidingWindow,
    };
    let (dtype, quant_mode) = match scales && !is_latent {
        true => (Dtype::U8, QuantMode::Fp8PerTokenHead),
        false => (Dtype::Bf16, QuantMode::None),
    };
    let heads = if is_latent { 1 } else { heads };
    let fields = AttentionFields {
        kind,
        sliding_window: window,
        quant_mode,
        ..AttentionFields::full(block_size, heads, head_size, dtype)
    };
    Kind {
        spec: Spec::Attention(Attention::new(fields).unwrap()),
        backend: Arc::new(Backend::new(contract).unwrap()),
    }
}

fn state_kind(elements: u64, alignment: u64, narrow: bool) -> Kind {
    let fields = StateFields {
        kind: StateKind::Mamba2,
        block_size: 64,
        dtypes: vec![Dtype::Bf16, Dtype::F32],
        ndims: vec![1, 1],
        dims: vec![2 * elements, elements],
        page_size_padded: None,
        cache_mode: StateCacheMode::None,
        num_speculative_blocks: 0,
    };
    let contract = Contract {
        alignment,
        index_width: index_width(narrow),
        ..Preset::Mamba2.contract().unwrap()
    };
    Kind {
        spec: Spec::State(State::new(fields).unwrap()),
        backend: Arc::new(Backend::new(contract).unwrap()),
    }
}

fn index_width(narrow: bool) -> IndexWidth {
    match narrow {
        true => IndexWidth::Bits32,
        false => IndexWidth::Bits64,
    }
}

fn any_kind() -> impl Strategy<Value = Kind> {
    let presets = vec![
        Preset::FlashAttentionNhd,
        Preset::FlashAttentionHnd,
        Preset::FlashInferNhd,
        Preset::FlashInferHnd,
        Preset::RocmAttention,
        Preset::RocmAiterFlashAttention,
        Preset::CpuAttention,
        Preset::HpcAttention,
        Preset::TritonMla,
        Preset::FlashMla,
    ];
    let contract = (
        prop::sample::select(presets),
        prop::sample::select(vec![1u64, 1, 1, 16, 256]),
        prop::bool::weighted(0.1),
    );
    let sizes = (
        prop::sample::select(vec![16u64, 32, 64]),
        prop::sample::select(vec![1u64, 2, 8]),
        prop::sample::select(vec![16u64, 24, 64, 128]),
    );
    let window = prop::option::of(prop::sample::select(vec![40u64, 512]));
    let attention = (contract, sizes, (window, any::<bool>()))
        .prop_map(|(contract, sizes, more)| attention_kind(contract, sizes, more));
    let alignment = prop::sample::select(vec![1u64, 1, 256]);
    let state = (8u64..20_000, alignment, prop::bool::weighted(0.1));
    prop_oneof![
        5 => attention,
        1 => state.prop_map(|(elements, alignment, narrow)| state_kind(elements, alignment, narrow)),
    ]
}

/// Layers of few kinds; every fifth reads the pages of the one before it.
fn model_of(layers: &[Kind]) -> Arc<Model> {
    let mut model = Model::new();
    for (number, kind) in layers.iter().enumerate() {
        let backend = || Some(Arc::clone(&kind.backend));
        let name = format!("l{number}");
        model.add(&name, kind.spec.clone(), backend(), 1).unwrap();
        if number % 5 == 4 && kind.spec.as_attention().is_some() {
            let sharer = format!("s{number}");
            model.share(&sharer, &name, None, backend(), 1).unwrap();
        }
    }
    Arc::new(model)
}

fn config(policy: Policy, cross_layer_blocks: bool, choose_block_sizes: bool) -> PlanConfig {
    PlanConfig {
        policy,
        limits: Limits {
            max_model_len: 2000,
            context_parallel_size: 1,
            max_tokens_in_flight: 100,
            max_encoder_tokens: 0,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks,
        num_blocks_override: None,
        reserved_blocks: 1,
        has_draft_layers: false,
        typical_len: 600,
        choose_block_sizes,
    }
}

/// A plan whose views are proven, or why there is none.
fn laid_out(layers: &[Kind], memory_bytes: i64, config: &PlanConfig) -> Result<Plan, String> {
    let worker = Worker {
        model: model_of(layers),
        memory_bytes,
    };
    let plan = plan(&[worker], config).map_err(|error| error.to_string())?;
    match Blueprint::of(&plan.workers[0]) {
        Ok(_) => Ok(plan),
        Err(error) => Err(format!("laid out: {error}")),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// A compact plan's views are proven whenever those of each layer alone are, and there is one
    /// whenever the reference's can be laid out.
    #[test]
    fn compact_plans_can_be_laid_out(
        layers in prop::collection::vec(any_kind(), 1..4).prop_flat_map(|kinds| {
            prop::collection::vec(prop::sample::select(kinds), 1..14)
        }),
        memory in 1i64 << 24..1i64 << 34,
        choose_block_sizes in any::<bool>(),
        cross in prop::bool::weighted(0.2),
    ) {
        let own = laid_out(&layers, memory, &config(Policy::Compact, cross, choose_block_sizes));
        let reference = laid_out(&layers, memory, &config(Policy::Reference, cross, false));
        if let (Ok(reference), Ok(own)) = (&reference, &own) {
            for len in [600, 2000] {
                let (ours, theirs) = (own.capacity_of(len).unwrap(), reference.capacity_of(len).unwrap());
                prop_assert!(ours.holds(&theirs, (1, 1)), "{ours:?} {theirs:?}");
            }
        }
        if let Err(error) = &own {
            prop_assert!(reference.is_err(), "{error}");
            let alone = |kind: &Kind| {
                let config = config(Policy::Reference, false, false);
                laid_out(std::slice::from_ref(kind), memory, &config).is_ok()
            };
            // Packing is the engine's wish, and not every kernel reads packed pages.
            if !cross && layers.iter().all(alone) {
                prop_assert!(!error.starts_with("laid out"), "{error}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// A change that an explanation names breaks no contract, and gives what it promised.
    #[test]
    fn what_is_advised_can_be_laid_out(
        layers in prop::collection::vec(any_kind(), 1..4).prop_flat_map(|kinds| {
            prop::collection::vec(prop::sample::select(kinds), 1..14)
        }),
        memory in 1i64 << 24..1i64 << 34,
        own_policy in any::<bool>(),
        cross in prop::bool::weighted(0.2),
    ) {
        let policy = if own_policy { Policy::Compact } else { Policy::Reference };
        let asked = config(policy, cross, false);
        let workers = [Worker { model: model_of(&layers), memory_bytes: memory }];
        let Ok(own) = plan(&workers, &asked) else { return Ok(()) };
        let Some(advice) = own.cheapest_change() else { return Ok(()) };
        let (changed_workers, changed) = advice.change.applied(&workers, &asked).unwrap();
        let changed = plan(&changed_workers, &changed).unwrap();
        let counted = changed.capacity_of(advice.len).unwrap();
        prop_assert_eq!(counted.tokens() as u64, advice.tokens);
        if let Err(error) = Blueprint::of(&changed.workers[0]) {
            // What no change mends is not the change's fault.
            let alone = |layer: usize| {
                // Not so much that a narrow index ends.
                let config = config(Policy::Reference, false, false);
                laid_out(&layers[layer..=layer], 1 << 28, &config).is_ok()
            };
            prop_assert!(!(0..layers.len()).all(alone), "{} {error}", advice);
        }
    }
}

fn dense(preset: Preset, alignment: u64, sizes: (u64, u64, u64)) -> Kind {
    attention_kind((preset, alignment, false), sizes, (None, false))
}

fn taking(kind: &Kind, sizes: &[KernelBlockSize]) -> Kind {
    let contract = Contract {
        kernel_block_sizes: sizes.to_vec(),
        ..kind.backend.contract().clone()
    };
    Kind {
        spec: kind.spec.clone(),
        backend: Arc::new(Backend::new(contract).unwrap()),
    }
}

fn planned(layers: &[Kind], choose_block_sizes: bool, max_model_len: u64) -> Plan {
    let mut config = config(Policy::Compact, false, choose_block_sizes);
    config.limits.max_model_len = max_model_len;
    config.typical_len = 0;
    let reference = PlanConfig {
        policy: Policy::Reference,
        ..config.clone()
    };
    let memory = 1 << 30;
    assert!(choose_block_sizes || laid_out(layers, memory, &reference).is_err());
    laid_out(layers, memory, &config).unwrap()
}

/// What the largest dense page and the strictest alignment both go into may be many pages.
#[test]
fn dense_pages_and_alignments_meet_in_large_pages() {
    let rigid = dense(Preset::CpuAttention, 1, (16, 1, 33));
    let aligned = dense(Preset::FlashAttentionNhd, 512, (32, 1, 16));
    let plan = planned(&[rigid, aligned], false, 2000);
    let groups = plan.workers[0].groups.iter();
    let pages: Vec<u64> = groups.map(|group| group.spec.page_of(0)).collect();
    assert_eq!(pages, [16896, 16896]);
}

/// One table would serve, but the kernel block that all take is not what each of them reads.
#[test]
fn kernels_that_do_not_go_together_get_tables_of_their_own() {
    let splitting = dense(Preset::FlashInferNhd, 1, (256, 1, 16));
    let aligned = dense(Preset::FlashAttentionNhd, 512, (256, 1, 7));
    let whole = dense(Preset::HpcAttention, 1, (64, 1, 16));
    let small = dense(Preset::RocmAiterFlashAttention, 1, (64, 2, 16));
    for layers in [[splitting, aligned], [whole, small]] {
        let plan = planned(&layers, false, 2000);
        assert_eq!(plan.workers[0].groups.len(), 2);
    }
}

/// A page is looked at that splits into the kernel blocks of the layer that has most of them.
#[test]
fn pages_split_into_kernel_blocks_of_every_layer() {
    let sixteens = taking(
        &dense(Preset::FlashAttentionNhd, 512, (256, 1, 7)),
        &[KernelBlockSize::Exact(16)],
    );
    let whole = dense(Preset::FlashAttentionNhd, 1, (16, 1, 40));
    planned(&[sixteens, whole], false, 2000);
    // Of all blocks that nearly fill 1,343,488 bytes none splits so.
    let rigid = [(64, 8, 16), (16, 1, 41)].map(|sizes| dense(Preset::CpuAttention, 1, sizes));
    let splitting = dense(Preset::FlashInferNhd, 1, (16, 1, 24));
    let [first, second] = rigid;
    planned(&[first, second, splitting], false, 2000);
}

/// Blocks are judged by the kernel block of their table, not by the largest that each layer's kernels
/// take.
#[test]
fn chosen_blocks_split_into_the_kernel_blocks_of_their_table() {
    let latent = |alignment, sizes: &[KernelBlockSize]| {
        let kind = dense(Preset::TritonMla, 1, (64, 1, 10));
        let attention = kind.spec.as_attention().unwrap();
        let padded = attention.changed(|fields| fields.alignment = alignment);
        let spec = Spec::Attention(padded.unwrap());
        taking(&Kind { spec, ..kind }, sizes)
    };
    use KernelBlockSize::{Exact, MultipleOf};
    let aligned = latent(Some(512), &[Exact(64), Exact(7), MultipleOf(32)]);
    planned(&[latent(None, &[Exact(64)]), aligned], true, 1_000_000);
}
