//! Public reports of engines that planned wrongly, each under its id, and the plans they need.

use std::sync::Arc;

use super::pack::{Packing, Pools};
use super::testing::*;
use super::*;
use crate::backend::KernelBlockSize::{Exact, MultipleOf};
use crate::backend::{Backend, Contract, Preset};
use crate::dtype::Dtype;
use crate::spec::{
    AttentionFields, AttentionKind, QuantMode, State, StateCacheMode, StateFields, StateKind,
};

fn kind<T: std::fmt::Debug>(result: Result<T, PlanError>) -> &'static str {
    result.unwrap_err().kind()
}

fn repeated(spec: &Spec, count: usize) -> impl Iterator<Item = Spec> + use<> {
    std::iter::repeat_n(spec.clone(), count)
}

// S07, S08, S10: layers in full when the hybrid manager is off.
#[test]
fn promotion_keeps_every_field() {
    let off = PlanConfig {
        hybrid_manager_off: true,
        ..config(64)
    };
    let quantised = |mut fields: AttentionFields| {
        fields.quant_mode = QuantMode::Int8PerTokenHead;
        attention(fields)
    };
    let full = quantised(fields(AttentionKind::Full, 16, 64));
    let chunked = quantised(AttentionFields {
        attention_chunk_size: Some(32),
        ..fields(AttentionKind::ChunkedLocal, 16, 64)
    });
    // S07
    let plan = plan_one(&model([full, chunked]), 1 << 20, &off).unwrap();
    let [group] = plan.workers[0].groups.as_slice() else {
        panic!("not one group")
    };
    assert_eq!(group.spec.page_of(1), 2176);
    // S08: under reference, windows keep their block size.
    let mixed = model([super::testing::full(64, 8), sliding(128, 16, 8)]);
    assert_eq!(
        kind(plan_one(&mixed, 1 << 20, &off)),
        "hybrid_disabled_not_unifiable"
    );
    // S10
    let window = |window| {
        changed(&super::testing::full(16, 8), |f| {
            f.sliding_window = Some(window)
        })
    };
    let plan = plan_one(&model([window(128), window(256)]), 1 << 20, &config(64)).unwrap();
    assert_eq!(plan.workers[0].groups.len(), 1);
    assert!(
        matches!(&plan.workers[0].groups[0].spec, GroupSpec::Set(set) if set.specs().len() == 2)
    );
}

// G01, G03: whole plans of what `unify` tests one by one.
#[test]
fn pages_of_one_plan_are_equal() {
    let plan = plan_one(&model([full_page(8192), state(100)]), 1 << 20, &config(64)).unwrap();
    let pages: Vec<u64> = plan.workers[0]
        .groups
        .iter()
        .map(|g| g.spec.page_of(0))
        .collect();
    assert_eq!(pages, [8192, 8192]);
    let unstrided = model([full_page(3072), sliding(64, 16, 128)]);
    let error = plan_one(&unstrided, 1 << 20, &config(64)).unwrap_err();
    assert_eq!(error.kind(), "page_size_not_unifiable");
    for text in ["l0", "3072", "4096", "l1"] {
        assert!(error.to_string().contains(text), "{error}");
    }
}

// G06, G08 and the sizes of groups.
#[test]
fn groups_have_about_as_many_layers() {
    let full_layers = |n| repeated(&full(16, 8), n);
    let windows = |n| repeated(&sliding(64, 16, 8), n);
    let odd = || repeated(&sliding(128, 16, 8), 1);
    for (id, model, groups, longest) in [
        (
            "10 full, 14 windowed",
            model(full_layers(10).chain(windows(14))),
            2,
            14,
        ),
        (
            "10 full, 15 windowed",
            model(full_layers(10).chain(windows(15))),
            3,
            10,
        ),
        (
            "1 full, 7 windowed",
            model(full_layers(1).chain(windows(7))),
            8,
            1,
        ),
        (
            "G06",
            model(
                repeated(&state(64), 30)
                    .chain(full_layers(10))
                    .chain(windows(5))
                    .chain(odd()),
            ),
            46,
            1,
        ),
        ("G08", model([full(16, 8), sliding(512, 16, 8)]), 2, 1),
    ] {
        let plan = plan_one(&model, 1 << 30, &config(511)).unwrap();
        let worker = &plan.workers[0];
        let most = worker.groups.iter().map(|group| group.layers.len()).max();
        assert_eq!((worker.groups.len(), most), (groups, Some(longest)), "{id}");
    }
}

// B01, B02, B05, B07, B13, B24, B25.
#[test]
fn memory_buys_blocks() {
    let one = |block_size, head_size| model([full(block_size, head_size)]);
    let reserving = |len| PlanConfig {
        reserved_blocks: 1,
        ..config(len)
    };
    // B01
    let fit = PlanConfig {
        auto_fit_max_model_len: true,
        ..reserving(4096)
    };
    let plan = plan_one(&one(128, 1), 8 * 256, &fit).unwrap();
    assert_eq!(
        (plan.config.limits.max_model_len, plan.workers[0].num_blocks),
        (896, 8)
    );
    assert_eq!(
        (
            plan.workers[0].max_concurrency,
            plan.workers[0].capacity_tokens
        ),
        (1.0, 896)
    );
    // B02
    let error = plan_one(&one(8192, 1), 13 * 16384, &reserving(106_496)).unwrap_err();
    assert_eq!(
        error,
        PlanError::NotEnoughMemory {
            worker: 0,
            needed: 14 * 16384,
            available: 13 * 16384,
            max_model_len: 106_496,
            longest: 98_304
        }
    );
    assert!(plan_one(&one(8192, 1), 14 * 16384, &reserving(106_496)).is_ok());
    // B05
    let overridden = PlanConfig {
        num_blocks_override: Some(1),
        ..config(2048)
    };
    assert_eq!(
        kind(plan_one(&one(16, 8), 1 << 40, &overridden)),
        "not_enough_memory"
    );
    // B07
    for memory in [0, -5, -300, i64::MIN] {
        assert_eq!(
            kind(plan_one(&one(16, 8), memory, &config(64))),
            "no_available_memory"
        );
    }
    // B13
    let layers = model(repeated(&full(10, 50), 28));
    assert_eq!(
        plan_one(&layers, 280_000, &config(64)).unwrap().workers[0].num_blocks,
        10
    );
    // B24
    let bytes = model([changed(&full(1, 1), |fields| fields.head_size_v = 0)]);
    let error = plan_one(&bytes, 1 << 33, &config(64)).unwrap_err();
    assert_eq!(error.kind(), "too_many_blocks");
    assert!(error.to_string().contains("8589934592") && error.to_string().contains("2147483647"));
    let mut split = Model::new();
    let spec = changed(&full(33, 1), |fields| fields.head_size_v = 0);
    split
        .add("l0", spec, Some(backend(&[Exact(1)])), 1)
        .unwrap();
    let error = plan_one(&Arc::new(split), 33 << 27, &config(64)).unwrap_err();
    assert_eq!(error.kind(), "too_many_blocks");
    assert!(error.to_string().contains("4429185024"), "{error}");
    // B25
    let fit = PlanConfig {
        auto_fit_max_model_len: true,
        ..config(77)
    };
    let plan = plan_one(&model([]), 0, &fit).unwrap();
    let worker = &plan.workers[0];
    assert_eq!(
        (worker.num_blocks, worker.groups.len(), worker.tensors.len()),
        (1, 0, 0)
    );
    assert_eq!(plan.config.limits.max_model_len, 77);
}

// B09, B10, B11: workers that hold different layers.
#[test]
fn workers_agree_on_the_number_of_blocks() {
    let blocks = |plan: &Plan| {
        plan.workers
            .iter()
            .map(|w| w.num_blocks)
            .collect::<Vec<_>>()
    };
    let equal = model(repeated(&full_page(8192), 2));
    let unequal = model([full_page(8192), full_page(4096)]);
    let none = model([]);
    for (id, full, memory, expected) in
        [("B09", &equal, 163_840, 10), ("B10", &unequal, 245_760, 20)]
    {
        for idle in [40_960, 0, -1] {
            let workers = [worker(full, memory), worker(&none, idle)];
            let plan = plan(&workers, &config(64)).unwrap();
            assert_eq!(blocks(&plan), [expected; 2], "{id}");
            let idle = &plan.workers[1];
            assert!(idle.tensors.is_empty() && idle.groups.iter().all(|g| g.layers.is_empty()));
            assert_eq!((idle.bytes_per_block, idle.bytes_per_request), (0, 0));
            assert_eq!(idle.max_concurrency, plan.workers[0].max_concurrency);
        }
    }
    // B11
    let first = named([("a".into(), full_page(8192)), ("b".into(), full_page(8192))]);
    let second = named([("c".into(), full_page(8192))]);
    let workers = [worker(&first, 20 * 8192), worker(&second, 7 * 8192)];
    let plan = plan(&workers, &config(64)).unwrap();
    assert_eq!(blocks(&plan), [7, 7]);
    assert!(
        plan.workers
            .iter()
            .flat_map(|w| &w.tensors)
            .all(|t| t.size == 57344)
    );
}

#[test]
fn workers_must_agree_on_their_layers() {
    let one = named([("a".into(), full_page(8192))]);
    let other = named([("b".into(), full_page(8192)), ("a".into(), full_page(4096))]);
    let workers = [
        worker(&one, 1 << 20),
        worker(&one, 1 << 20),
        worker(&other, 1 << 20),
    ];
    let error = plan(&workers, &config(64)).unwrap_err();
    assert_eq!(error.kind(), "worker_spec_mismatch");
    assert!(
        error.to_string().contains("layer a: worker 0 ") && error.to_string().contains("worker 2 ")
    );
}

// B15: the slots of a packed block, in the reference's layout.
#[test]
fn packed_blocks_have_a_slot_for_each_page_size() {
    let first = repeated(&full_page(32768), 3).chain(repeated(&full_page(8192), 3));
    let second = repeated(&sliding(64, 16, 1024), 5);
    let mut number = 0;
    let mut group = |specs: Vec<Spec>| {
        let layers = number..number + specs.len();
        number = layers.end;
        Group {
            layers: layers.collect(),
            sharing_layers: Vec::new(),
            spec: GroupSpec::Set(SpecSet::new(specs.into_iter().map(Arc::new).collect()).unwrap()),
            kernel_block_size: None,
            is_draft: false,
        }
    };
    let groups = [group(first.collect()), group(second.collect())];
    let as_reference = Packing::BySets {
        cross_layer_blocks: false,
    };
    let pools = Pools::of(&groups, as_reference).unwrap();
    assert_eq!(pools.bytes_per_block, 188_416);
    assert_eq!(8_388_608 / pools.bytes_per_block, 44);
    let tensors = pools.tensors(44).unwrap();
    let slots: Vec<_> = tensors
        .iter()
        .map(|t| (t.offset, t.layers.as_slice()))
        .collect();
    let expected: [(u64, &[usize]); 8] = [
        (0, &[0, 6]),
        (32768, &[1, 7]),
        (65536, &[2, 8]),
        (98304, &[9]),
        (131_072, &[10]),
        (163_840, &[3]),
        (172_032, &[4]),
        (180_224, &[5]),
    ];
    assert_eq!(slots, expected);
    assert!(
        tensors
            .iter()
            .all(|t| (t.size, t.block_stride) == (44 * 188_416, 188_416))
    );
}

// B17, B18, B20, B22: blocks that one request needs.
#[test]
fn requests_need_blocks() {
    let blocks = |spec: Spec, limits: Limits| {
        let plan = plan_one(
            &model([spec]),
            1 << 40,
            &PlanConfig {
                limits,
                ..config(1)
            },
        )
        .unwrap();
        plan.workers[0].blocks_per_request(&limits).unwrap()
    };
    let limits = |len, in_flight| Limits {
        max_model_len: len,
        max_tokens_in_flight: in_flight,
        ..config(1).limits
    };
    for (id, window, in_flight, len, block, expected) in [
        ("B17a", 1024, 8192, 131_072, 16, 577),
        ("B17b", 4, 1, 100, 4, 2),
        ("B17c", 1024, 32768, 1_000_000, 32, 1057),
        ("B17d", 1024, 1024, 1_000_000, 32, 65),
        ("B17e", 128, 512, 100_000, 16, 41),
        ("B18", 4, 100, 8, 4, 3),
    ] {
        assert_eq!(
            blocks(sliding(window, block, 4096), limits(len, in_flight)),
            expected,
            "{id}"
        );
    }
    let ranks = |len, ranks| Limits {
        context_parallel_size: ranks,
        ..limits(len, 1)
    };
    assert_eq!(blocks(full(16, 4096), ranks(1024, 1)), 64, "B20");
    assert_eq!(blocks(full(16, 4096), ranks(1000, 4)), 16, "B20");
    let cross = attention(fields(AttentionKind::Cross, 16, 4096));
    let encoder = Limits {
        max_encoder_tokens: 1500,
        ..limits(448, 1)
    };
    assert_eq!(blocks(cross, encoder), 94, "B22");
}

// K01, K02, K04.
#[test]
fn sharing_layers_cost_nothing() {
    // K04
    let mut sharing = Model::new();
    for name in ["l0", "l1"] {
        sharing.add(name, full_page(8192), None, 1).unwrap();
    }
    sharing.share("l2", "l0", None, None, 1).unwrap();
    sharing.share("l3", "l1", None, None, 1).unwrap();
    let plan = plan_one(&Arc::new(sharing), 163_840, &config(64)).unwrap();
    let worker = &plan.workers[0];
    assert_eq!(
        (
            worker.num_blocks,
            worker.groups[0].sharing_layers.as_slice()
        ),
        (10, &[2, 3][..])
    );
    let sizes: Vec<u64> = worker.tensors.iter().map(|tensor| tensor.size).collect();
    assert_eq!(sizes, [81920, 81920]);
    // K01
    for order in [[("A", "B"), ("B", "C")], [("B", "C"), ("A", "B")]] {
        let mut model = Model::new();
        model.share(order[0].0, order[0].1, None, None, 1).unwrap();
        model.add("C", full_page(8192), None, 1).unwrap();
        model.share(order[1].0, order[1].1, None, None, 1).unwrap();
        let plan = plan_one(&Arc::new(model), 1 << 20, &config(64)).unwrap();
        let group = &plan.workers[0].groups[0];
        assert_eq!(
            (&group.layers[..], &group.sharing_layers[..]),
            (&[1][..], &[0, 2][..])
        );
    }
    // K02
    for (pairs, expected) in [
        (&[("A", "Z")][..], "share_target_missing"),
        (&[("A", "B"), ("B", "A")], "share_cycle"),
        (&[("A", "A")], "share_cycle"),
        (&[("A", "E")], "share_target_missing"),
    ] {
        let mut model = Model::new();
        let encoder = attention(fields(AttentionKind::EncoderOnly, 16, 8));
        model.add("E", encoder, None, 1).unwrap();
        for (layer, target) in pairs {
            model.share(layer, target, None, None, 1).unwrap();
        }
        let error = plan_one(&Arc::new(model), 1 << 20, &config(64)).unwrap_err();
        assert_eq!(error.kind(), expected);
        assert!(error.to_string().contains(pairs[0].0) && error.to_string().contains(pairs[0].1));
    }
}

#[test]
fn impossible_configurations_are_refused() {
    let layers = model([full(16, 8), sliding(64, 16, 8)]);
    let with = |change: fn(&mut PlanConfig)| {
        let mut config = config(64);
        change(&mut config);
        kind(plan_one(&layers, 1 << 20, &config))
    };
    assert_eq!(with(|c| c.limits.context_parallel_size = 0), "bad_values");
    assert_eq!(
        with(|c| c.limits.context_parallel_size = 2),
        "dcp_sliding_window"
    );
    assert_eq!(with(|c| c.limits.max_model_len = 0), "bad_values");
    assert_eq!(with(|c| c.limits.max_model_len = u64::MAX), "bad_values");
    assert_eq!(
        with(|c| c.limits.max_tokens_in_flight = u64::MAX),
        "overflow"
    );
    assert_eq!(with(|c| c.reserved_blocks = u64::MAX), "overflow");
    assert_eq!(
        with(|c| c.num_blocks_override = Some(0)),
        "no_available_memory"
    );
    assert_eq!(with(|c| c.num_blocks_override = Some(u64::MAX)), "overflow");
    assert_eq!(kind(plan(&[], &config(64))), "no_workers");
}

#[test]
fn kernel_blocks_and_contracts() {
    let with_backend = |spec: Spec, backend: Arc<Backend>| {
        let mut model = Model::new();
        model.add("l0", spec, Some(backend), 1).unwrap();
        plan_one(&Arc::new(model), 1 << 20, &config(64))
    };
    let sizes = [Exact(16), Exact(32)];
    let plan = with_backend(full(64, 8), backend(&sizes)).unwrap();
    assert_eq!(plan.workers[0].groups[0].kernel_block_size, Some(32));
    let plan = with_backend(full(48, 8), backend(&[MultipleOf(16)])).unwrap();
    assert_eq!(plan.workers[0].groups[0].kernel_block_size, Some(48));
    assert_eq!(
        kind(with_backend(full(24, 8), backend(&sizes))),
        "no_common_block_size"
    );
    let one_head = Contract {
        num_kv_heads: Some(2),
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    let one_head = Arc::new(Backend::new(one_head).unwrap());
    assert_eq!(
        kind(with_backend(full(16, 8), one_head)),
        "backend_num_kv_heads"
    );
}

#[test]
fn zeroing_is_needed_where_types_mix() {
    let quantised = changed(&sliding(64, 16, 8), |fields| {
        fields.quant_mode = QuantMode::Fp8PerTensor
    });
    for (layers, expected) in [
        ([full(16, 8), sliding(64, 16, 8)], false),
        ([full(16, 8), full(16, 16)], false),
        ([full_page(8192), state(100)], true),
        ([full(16, 8), quantised], true),
    ] {
        let plan = plan_one(&model(layers), 1 << 20, &config(64)).unwrap();
        assert_eq!(plan.workers[0].needs_zeroing, expected);
    }
}

#[test]
fn zeroing_is_needed_where_packed_groups_of_other_types_overlap() {
    let compact = |cycle: &[Spec]| {
        let config = PlanConfig {
            policy: Policy::Compact,
            cross_layer_blocks: true,
            ..config(2048)
        };
        let layers = (0..4).flat_map(|_| cycle.to_vec()).collect::<Vec<_>>();
        plan_one(&model(layers), 1 << 26, &config).unwrap()
    };
    let plan = compact(&[full_page(8192), state(1000), state(1000)]);
    let tensors = &plan.workers[0].tensors;
    assert!(tensors.iter().all(|tensor| tensor.block_stride != 0));
    // Each in a tensor of its own, over the same bytes.
    let alone = |tensor: &PoolTensor| tensor.layers.len() == 1;
    assert!(tensors.iter().any(alone), "{tensors:?}");
    assert!(plan.workers[0].needs_zeroing);
    // Elements of one type are numbers to whoever finds them.
    let plan = compact(&[full_page(8192), sliding(64, 16, 96)]);
    assert!(!plan.workers[0].needs_zeroing);
}

#[test]
fn encoder_only_layers_take_no_group() {
    let encoder = attention(fields(AttentionKind::EncoderOnly, 16, 8));
    let plan = plan_one(&model([encoder.clone(), full(16, 8)]), 1 << 20, &config(64)).unwrap();
    assert_eq!(plan.workers[0].groups[0].layers, [1]);
    let plan = plan_one(&model([encoder]), 0, &config(64)).unwrap();
    assert_eq!(
        (plan.workers[0].num_blocks, plan.workers[0].groups.len()),
        (1, 0)
    );
}

#[test]
fn block_sizes_of_scheduler_and_hashes() {
    let plan = plan_one(
        &model([full(32, 8), sliding(64, 48, 8)]),
        1 << 20,
        &config(64),
    );
    assert_eq!(kind(plan), "page_size_not_unifiable");
    let two = plan_one(
        &model([full(32, 12), sliding(64, 48, 8)]),
        1 << 20,
        &config(64),
    )
    .unwrap();
    let resolve = |unit, hashes| resolve_block_sizes(&two, 16, unit, hashes);
    assert_eq!(resolve(None, true), Ok((96, 16)));
    assert_eq!(resolve(Some(8), true), Ok((96, 8)));
    assert_eq!(resolve(Some(8), false), Ok((96, 96)));
    assert_eq!(
        kind(resolve(Some(32), true)),
        "prefix_match_unit_not_dividing"
    );
    assert_eq!(
        kind(resolve(Some(0), true)),
        "prefix_match_unit_not_dividing"
    );
    let state = plan_one(&model([full_page(8192), state(64)]), 1 << 20, &config(64)).unwrap();
    assert_eq!(resolve_block_sizes(&state, 32, None, true), Ok((16, 16)));
}

#[test]
fn explanations_say_why() {
    let mut layers = Model::new();
    layers.add("full \"0\"", full_page(8192), None, 1).unwrap();
    layers.add("full 1", full_page(8192), None, 1).unwrap();
    layers.add("state", state(100), None, 1).unwrap();
    let layers = Arc::new(layers);
    let workers = [
        worker(&layers, 1 << 20),
        worker(&layers, 1 << 20),
        worker(&layers, 1 << 19),
    ];
    let plan = plan(&workers, &config(64)).unwrap();
    let text = plan.explain_text();
    for part in [
        "each of workers 0-1",
        "worker 2",
        "memory given      1.00 MiB (1048576 bytes)",
        "state padded from 400 bytes to 8192 bytes, the page of full \"0\"",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let json = plan.explain_json();
    assert!(json.contains("\"layers\":[\"full \\\"0\\\"\"]"), "{json}");
    assert_eq!(text, plan.explain_text());
}

/// The parts of a plan with two groups that share a tensor.
fn parts() -> Parts {
    let group = |names: &[&str]| PartGroup {
        layers: names.iter().map(ToString::to_string).collect(),
        is_draft: false,
    };
    Parts {
        num_blocks: 3,
        groups: vec![group(&["full", "reader"]), group(&["window"])],
        tensors: vec![PartTensor {
            size: 3 * 256,
            offset: 0,
            block_stride: 0,
            layers: vec!["full".into(), "window".into()],
        }],
        kernel_block_sizes: None,
    }
}

// B27 and other plans that do not hold together.
#[test]
fn parts_are_checked() {
    let mut layers = Model::new();
    let flash = || Some(backend(&[MultipleOf(16)]));
    layers.add("full", full(16, 8), flash(), 1).unwrap();
    layers
        .add("window", sliding(64, 16, 8), flash(), 1)
        .unwrap();
    layers.share("reader", "full", None, flash(), 1).unwrap();
    let layers = Arc::new(layers);
    let with = |change: &dyn Fn(&mut Parts)| {
        let mut parts = parts();
        change(&mut parts);
        plan_from_parts(Arc::clone(&layers), parts)
    };
    let plan = with(&|_| ()).unwrap();
    let worker = &plan.workers[0];
    assert_eq!((worker.num_blocks, worker.bytes_per_block), (3, 256));
    assert_eq!(
        (
            &worker.groups[0].layers[..],
            &worker.groups[0].sharing_layers[..]
        ),
        (&[0][..], &[2][..])
    );
    assert_eq!(worker.groups[1].kernel_block_size, Some(16));
    let plan = with(&|p| p.kernel_block_sizes = Some(vec![16, 0])).unwrap();
    assert_eq!(plan.workers[0].groups[1].kernel_block_size, None);

    let packed = |p: &mut Parts| {
        let slot = |offset, layer: &str| PartTensor {
            size: 3 * 512,
            offset,
            block_stride: 512,
            layers: vec![layer.into()],
        };
        p.tensors = vec![slot(0, "full"), slot(256, "window")];
    };
    assert_eq!(with(&packed).unwrap().workers[0].bytes_per_block, 512);
    type Change<'a> = &'a dyn Fn(&mut Parts);
    let cases: &[(&str, Change)] = &[
        ("layer_missing", &|p| p.groups[1].layers.push("x".into())),
        ("layer_in_two_groups", &|p| {
            p.groups[1].layers.push("full".into())
        }),
        ("layer_in_two_tensors", &|p| {
            p.tensors[0].layers.push("full".into())
        }),
        ("layers_not_initialized", &|p| {
            p.tensors[0].layers.push("x".into())
        }),
        ("layers_not_initialized", &|p| {
            p.tensors[0].layers.push("reader".into())
        }),
        ("layers_not_initialized", &|p| {
            p.tensors[0].layers.truncate(1)
        }),
        ("layers_not_initialized", &|p| {
            p.groups[0].layers.truncate(1)
        }),
        ("layers_not_initialized", &|p| p.groups.truncate(1)),
        ("sharer_in_other_group", &|p| {
            let reader = p.groups[0].layers.pop();
            p.groups[1].layers.extend(reader);
        }),
        ("empty_group", &|p| p.groups.push(PartGroup::default())),
        ("group_not_uniform", &|p| {
            let group = p.groups.remove(1);
            p.groups[0].layers.extend(group.layers);
        }),
        ("tensor_not_multiple_of_page", &|p| p.tensors[0].size += 1),
        ("num_blocks_mismatch", &|p| p.tensors[0].size += 256),
        ("num_blocks_mismatch", &|p| p.num_blocks = u64::MAX),
        ("offset_without_stride", &|p| p.tensors[0].offset = 1),
        ("per_group_array_length", &|p| {
            p.kernel_block_sizes = Some(vec![16])
        }),
        ("backend_block_size", &|p| {
            p.kernel_block_sizes = Some(vec![16, 8])
        }),
        ("packed_size_mismatch", &|p| {
            packed(p);
            p.tensors[1].size += 512;
        }),
        ("packed_stride_mismatch", &|p| {
            packed(p);
            p.tensors[1].block_stride = 768;
        }),
        ("view_out_of_bounds", &|p| {
            packed(p);
            p.tensors[1].offset = 257;
        }),
        ("overflow", &|p| {
            packed(p);
            p.tensors[1].offset = u64::MAX;
        }),
    ];
    for (expected, change) in cases {
        assert_eq!(kind(with(change)), *expected);
    }
    let mut two = Model::new();
    two.add("a", full(16, 8), None, 1).unwrap();
    two.add("b", full(16, 8), None, 1).unwrap();
    let tensor = PartTensor {
        size: 256,
        layers: vec!["a".into(), "b".into()],
        ..PartTensor::default()
    };
    let overlapping = Parts {
        num_blocks: 1,
        groups: vec![PartGroup {
            layers: vec!["a".into(), "b".into()],
            is_draft: false,
        }],
        tensors: vec![tensor],
        kernel_block_sizes: None,
    };
    assert_eq!(
        kind(plan_from_parts(Arc::new(two), overlapping)),
        "layers_overlap"
    );
}

#[test]
fn state_modes_count_blocks() {
    for (mode, expected) in [
        (StateCacheMode::None, 1),
        (StateCacheMode::Align, 2),
        (StateCacheMode::All, 4),
    ] {
        let mut config = config(64);
        config.limits.state_cache_mode = mode;
        let plan = plan_one(&model([state(64)]), 1 << 20, &config).unwrap();
        assert_eq!(plan.workers[0].bytes_per_request, expected * 256);
    }
}

/// One group of two states of different sizes: its rows hold the speculative ones too.
#[test]
fn rows_of_unequal_states_hold_all_states_of_a_request() {
    let speculative = |elements| {
        Spec::State(
            State::new(StateFields {
                kind: StateKind::Mamba2,
                block_size: 64,
                dtypes: vec![Dtype::F32],
                ndims: vec![1],
                dims: vec![elements],
                page_size_padded: None,
                cache_mode: StateCacheMode::None,
                num_speculative_blocks: 2,
            })
            .unwrap(),
        )
    };
    for (mode, of_64, of_1000) in [
        (StateCacheMode::None, 3, 3),
        (StateCacheMode::Align, 4, 18),
        (StateCacheMode::All, 3, 18),
    ] {
        for layers in [vec![64, 32], vec![64]] {
            for (tokens, wanted) in [(64, of_64), (1000, of_1000)] {
                let mut config = config(tokens);
                config.limits.state_cache_mode = mode;
                let layers = layers.iter().map(|&elements| speculative(elements));
                let plan = plan_one(&model(layers), 1 << 20, &config).unwrap();
                let groups = &plan.workers[0].groups;
                assert_eq!(groups.len(), 1);
                let limits = &plan.config.limits;
                let width = groups[0].spec.table_width_blocks(limits);
                assert_eq!(width, Ok(wanted), "{mode:?}, {tokens} tokens");
                assert!(groups[0].spec.blocks_per_request(limits).unwrap() <= wanted);
            }
        }
    }
}
