//! What holds for every plan, on random models.

use std::sync::Arc;

use proptest::prelude::*;

use super::testing::*;
use super::*;
use crate::spec::AttentionFields;
use crate::spec::AttentionKind;

fn any_spec() -> impl Strategy<Value = Spec> {
    let sizes = (
        prop::sample::select(vec![8u64, 16, 32]),
        prop::sample::select(vec![8u64, 16, 24, 64]),
    );
    (0..8, sizes, any::<bool>()).prop_map(|(kind, (block_size, head_size), strides)| {
        let spec = match kind {
            0 => return state(head_size * 10),
            1 => sliding(64, block_size, head_size),
            2 => sliding(128, block_size, head_size),
            3 => attention(AttentionFields {
                attention_chunk_size: Some(32),
                ..fields(AttentionKind::ChunkedLocal, block_size, head_size)
            }),
            4 => attention(fields(AttentionKind::Mla, block_size, head_size)),
            5 => attention(AttentionFields {
                sliding_window: Some(64),
                ..fields(AttentionKind::SlidingWindowMla, block_size, head_size)
            }),
            6 => attention(fields(AttentionKind::HiddenState, block_size, head_size)),
            _ => full(block_size, head_size),
        };
        if strides { strided(spec) } else { spec }
    })
}

/// Latents of several page sizes, full and windowed, as DeepSeek V4 mixes them.
fn any_latent() -> impl Strategy<Value = Spec> {
    let alignment = prop::option::of(prop::sample::select(vec![96u64, 576]));
    let head_size = prop::sample::select(vec![8u64, 20, 64]);
    (0..3, head_size, alignment).prop_map(|(kind, head_size, alignment)| {
        let (kind, block_size, sliding_window) = match kind {
            0 => (AttentionKind::Mla, 64, None),
            1 => (AttentionKind::SlidingWindowMla, 16, Some(64)),
            _ => (AttentionKind::SlidingWindowMla, 8, Some(128)),
        };
        attention(AttentionFields {
            sliding_window,
            alignment,
            ..fields(kind, block_size, head_size)
        })
    })
}

/// Few different specs, so that layers share them.
pub(super) fn any_layers() -> impl Strategy<Value = Vec<Spec>> {
    let specs = prop_oneof![
        prop::collection::vec(any_spec(), 1..4),
        prop::collection::vec(any_latent(), 2..5),
    ];
    specs.prop_flat_map(|specs| prop::collection::vec(prop::sample::select(specs), 1..24))
}

pub(super) fn any_config() -> impl Strategy<Value = PlanConfig> {
    (
        1u64..2000,
        any::<[bool; 2]>(),
        0u64..3,
        prop::option::of(0u64..500),
    )
        .prop_map(
            |(max_model_len, [hybrid_manager_off, cross_layer_blocks], reserved_blocks, blocks)| {
                PlanConfig {
                    hybrid_manager_off,
                    cross_layer_blocks,
                    reserved_blocks,
                    num_blocks_override: blocks,
                    ..config(max_model_len)
                }
            },
        )
}

/// The layers cut into stages, and a worker for each.
pub(super) fn stages(layers: &[Spec], cut: usize, memory: i64) -> Vec<Worker> {
    let layers: Vec<(String, Spec)> = layers
        .iter()
        .enumerate()
        .map(|(i, spec)| (format!("l{i}"), spec.clone()))
        .collect();
    let (first, second) = layers.split_at(cut.min(layers.len()));
    vec![
        worker(&named(first.to_vec()), memory),
        worker(&named(second.to_vec()), memory),
    ]
}

pub(super) fn check_worker(plan: &WorkerPlan, own_memory: bool) {
    let mut in_groups: Vec<usize> = plan.groups.iter().flat_map(|g| g.layers.clone()).collect();
    let mut in_tensors: Vec<usize> = plan.tensors.iter().flat_map(|t| t.layers.clone()).collect();
    in_groups.sort_unstable();
    in_tensors.sort_unstable();
    let all: Vec<usize> = (0..plan.model.layers().len()).collect();
    assert_eq!(in_groups, all);
    assert_eq!(in_tensors, all);

    let page_of = |layer: usize| {
        let found = plan.groups.iter().find_map(|group| {
            let place = group.layers.iter().position(|&member| member == layer)?;
            Some(group.spec.page_of(place))
        });
        found.unwrap()
    };
    let mut bytes = 0;
    for tensor in &plan.tensors {
        let pages: Vec<u64> = tensor.layers.iter().map(|&layer| page_of(layer)).collect();
        assert!(pages.iter().all(|&page| page == pages[0]));
        if tensor.block_stride > 0 {
            assert_eq!(tensor.size, tensor.block_stride * plan.num_blocks);
            assert_eq!(tensor.block_stride, plan.bytes_per_block);
            assert!(tensor.offset + pages[0] <= tensor.block_stride);
            bytes = tensor.size;
        } else {
            assert_eq!(tensor.size, pages[0] * plan.num_blocks);
            bytes += tensor.size;
        }
    }
    assert_eq!(bytes, plan.bytes_per_block * plan.num_blocks);
    if own_memory && !plan.tensors.is_empty() {
        assert!(bytes <= plan.memory_bytes as u64);
    }
}

proptest! {
    /// Whatever is given, there is an error or a plan that holds together.
    #[test]
    fn plans_hold_together(
        layers in any_layers(),
        config in any_config(),
        cut in 0usize..24,
        memory in 1i64..4_000_000,
    ) {
        let workers = stages(&layers, cut, memory);
        let Ok(plan) = plan(&workers, &config) else { return Ok(()) };
        let (text, json) = (plan.explain_text(), plan.explain_json());
        prop_assert!(!text.is_empty() && !json.is_empty());
        for worker in &plan.workers {
            check_worker(worker, config.num_blocks_override.is_none());
            prop_assert_eq!(worker.num_blocks, plan.workers[0].num_blocks);
            prop_assert_eq!(worker.groups.len(), plan.workers[0].groups.len());
        }
    }

    /// An engine that hands a plan's parts back gets the same plan, as far as its specs are the
    /// model's own.
    #[test]
    fn parts_of_a_plan_are_accepted(layers in any_layers(), cross in any::<bool>()) {
        let config = PlanConfig { cross_layer_blocks: cross, ..config(64) };
        let model = model(layers);
        let Ok(plan) = plan_one(&model, 4_000_000, &config) else { return Ok(()) };
        let worker = &plan.workers[0];
        let unchanged = worker.groups.iter().all(|group| {
            group.layers.iter().enumerate().all(|(place, &layer)| {
                model.layers()[layer].own_spec().unwrap().page() == group.spec.spec_of(place).page()
            })
        });
        if !unchanged {
            return Ok(());
        }
        let parts = Parts {
            num_blocks: worker.num_blocks,
            groups: worker.groups.iter().map(|group| PartGroup {
                layers: names(&model, &group.layers),
                is_draft: group.is_draft,
            }).collect(),
            tensors: worker.tensors.iter().map(|tensor| PartTensor {
                size: tensor.size,
                offset: tensor.offset,
                block_stride: tensor.block_stride,
                layers: names(&model, &tensor.layers),
            }).collect(),
            kernel_block_sizes: None,
        };
        let given = plan_from_parts(Arc::clone(&model), parts).unwrap();
        prop_assert_eq!(&given.workers[0].tensors, &worker.tensors);
        prop_assert_eq!(given.workers[0].bytes_per_block, worker.bytes_per_block);
        prop_assert_eq!(given.workers[0].needs_zeroing, worker.needs_zeroing);
    }

    /// The fitted length fits, and one token more does not.
    #[test]
    fn fitted_lengths_are_the_longest(
        layers in any_layers(),
        config in any_config(),
        cut in 0usize..24,
        memory in 1i64..400_000,
    ) {
        let workers = stages(&layers, cut, memory);
        let asked = config.limits.max_model_len;
        let fit = PlanConfig { auto_fit_max_model_len: true, ..config.clone() };
        let exact = |max_model_len| plan(&workers, &PlanConfig {
            limits: Limits { max_model_len, ..config.limits },
            ..config.clone()
        });
        match plan(&workers, &fit) {
            Ok(fitted) => {
                let length = fitted.config.limits.max_model_len;
                prop_assert!(length >= 1 && length <= asked);
                prop_assert!(exact(length).is_ok());
                if length < asked {
                    let error = exact(length + 1).unwrap_err();
                    prop_assert_eq!(error.kind(), "not_enough_memory");
                    if let PlanError::NotEnoughMemory { longest, needed, available, .. } = error {
                        prop_assert!(longest >= length && needed > available);
                    }
                }
            }
            Err(PlanError::AutoFitImpossible { .. }) => prop_assert!(exact(1).is_err()),
            Err(_) => {}
        }
    }

    /// The order of workers, and how many hold the same layers, changes no worker's plan.
    #[test]
    fn workers_may_come_in_any_number(
        layers in any_layers(),
        copies in 1usize..4,
        memory in 100_000i64..4_000_000,
    ) {
        let one = [worker(&model(layers.clone()), memory)];
        let many: Vec<Worker> =
            (0..copies).map(|i| worker(&model(layers.clone()), memory + i as i64)).collect();
        match (plan(&one, &config(64)), plan(&many, &config(64))) {
            (Ok(one), Ok(many)) => for worker in &many.workers {
                prop_assert_eq!(&worker.tensors, &one.workers[0].tensors);
                prop_assert_eq!(worker.num_blocks, one.workers[0].num_blocks);
                prop_assert_eq!(worker.max_concurrency, one.workers[0].max_concurrency);
            },
            (one, many) => prop_assert_eq!(one.err(), many.err()),
        }
    }

    /// Whether one table serves all layers, and with which number of blocks, does not depend on
    /// the order of the layers.
    #[test]
    fn order_does_not_change_the_number_of_blocks(
        (layers, shuffled) in any_layers().prop_flat_map(|l| (Just(l.clone()), Just(l).prop_shuffle())),
    ) {
        let blocks = |layers: Vec<Spec>| {
            plan_one(&model(layers), 4_000_000, &config(64))
                .map(|plan| plan.workers[0].num_blocks)
                .map_err(|error| error.kind())
        };
        prop_assert_eq!(blocks(layers), blocks(shuffled));
    }
}
