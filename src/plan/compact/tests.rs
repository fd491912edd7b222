//! Public reports of engines that wasted memory or gave up, each under its id, and the plans that this
//! policy makes of them.

use std::sync::Arc;

use crate::backend::KernelBlockSize::{Exact, MultipleOf};
use crate::backend::{Backend, Contract, IndexWidth, Preset};
use crate::dtype::Dtype;
use crate::model::Model;
use crate::plan::testing::*;
use crate::plan::{GroupSpec, Plan, PlanConfig, PlanError, Policy, Worker, WorkerPlan, plan};
use crate::spec::{
    Attention, AttentionFields, AttentionKind, QuantMode, Spec, State, StateCacheMode, StateFields,
    StateKind,
};

fn compact(max_model_len: u64) -> PlanConfig {
    PlanConfig {
        policy: Policy::Compact,
        ..config(max_model_len)
    }
}

fn repeated(spec: &Spec, count: usize) -> impl Iterator<Item = Spec> + use<> {
    std::iter::repeat_n(spec.clone(), count)
}

/// Layers of each group.
fn sizes(worker: &WorkerPlan) -> Vec<usize> {
    let mut sizes: Vec<usize> = worker.groups.iter().map(|g| g.layers.len()).collect();
    sizes.sort_unstable();
    sizes
}

fn pages(plan: &Plan) -> Vec<(u64, u64)> {
    let groups = plan.workers[0].groups.iter();
    groups
        .map(|group| (group.spec.block_size(), group.spec.page_of(0)))
        .collect()
}

/// Bytes of padding in every page of a group.
fn padding(plan: &Plan, group: usize) -> f64 {
    let page = plan.workers[0].groups[group].spec.first().page();
    (page.padded - page.unpadded) as f64 / page.padded as f64
}

fn per_token_head(heads: u64, head_size: u64, window: Option<u64>) -> Spec {
    let kind = match window {
        Some(_) => AttentionKind::SlidingWindow,
        None => AttentionKind::Full,
    };
    Spec::Attention(
        Attention::new(AttentionFields {
            kind,
            sliding_window: window,
            quant_mode: QuantMode::Fp8PerTokenHead,
            indexes_kv_by_block_stride: true,
            ..AttentionFields::full(16, heads, head_size, Dtype::U8)
        })
        .unwrap(),
    )
}

/// Gemma 4 with scales for each token and head: 66,560 and 33,024 bytes.
#[test]
fn blocks_are_scaled_before_pages_are_padded() {
    let sliding = per_token_head(8, 256, Some(1024));
    let full = per_token_head(2, 512, None);
    assert_eq!(
        (sliding.page().padded, full.page().padded),
        (66_560, 33_024)
    );
    let layers = || repeated(&sliding, 5).chain(repeated(&full, 1));
    let model = model((0..5).flat_map(|_| layers()));
    let reference = plan_one(&model, 40 << 30, &config(131_072)).unwrap();
    assert!(padding(&reference, 5) > 0.5, "50 % of the reference's page");
    let own = plan_one(&model, 40 << 30, &compact(131_072)).unwrap();
    assert!(pages(&own).contains(&(16, 66_560)) && pages(&own).contains(&(32, 66_560)));
    let worst = (0..own.workers[0].groups.len()).map(|group| padding(&own, group));
    assert!(worst.fold(0.0, f64::max) < 0.01);
    let ratio = |len| {
        let of = |plan: &Plan| plan.capacity_of(len).unwrap().requests();
        of(&own) / of(&reference)
    };
    assert!(ratio(131_072) > 1.9, "{}", ratio(131_072));
}

#[test]
fn pages_are_equal_as_the_contracts_allow() {
    let two = |a: Spec, b: Spec| plan_one(&model([a, b]), 1 << 24, &compact(4096));
    let window = |page: u64| sliding(64, 16, page / 32);
    // G01
    let got = two(full_page(8192), state(100)).unwrap();
    assert_eq!(pages(&got), [(16, 8192), (16, 8192)]);
    // G03a: the reference gives up; blocks of 4 and of 3 times the size have equal pages.
    let got = two(full_page(3072), window(4096)).unwrap();
    assert_eq!(pages(&got), [(64, 12288), (48, 12288)]);
    // G03b
    let got = two(strided(full_page(3072)), window(4096)).unwrap();
    let wasted = padding(&got, 0).max(padding(&got, 1));
    assert!(wasted <= 0.25 && pages(&got)[0].1 == pages(&got)[1].1);
    // G04: 6 blocks of 1536 bytes in the state's page would be right; this needs no more.
    let got = two(strided(full_page(1536)), state(2500)).unwrap();
    assert_eq!(pages(&got)[0].1, pages(&got)[1].1);
    let with_6_blocks = (4096u64.div_ceil(96) + 1) * 10_000;
    assert!(got.workers[0].bytes_per_request <= with_6_blocks);
    assert!(pages(&got)[0].0 >= 96 && padding(&got, 0) < 0.08);
    let reference = plan_one(
        &model([strided(full_page(1536)), state(2500)]),
        1 << 24,
        &config(4096),
    );
    assert_eq!(padding(&reference.unwrap(), 0), 0.8464);
}

/// G03 with kernels: what forbids a page is named.
#[test]
fn a_contract_that_forbids_all_pages_is_named() {
    let mut layers = Model::new();
    let rigid = Contract {
        kernel_block_sizes: vec![Exact(16)],
        follows_block_stride: false,
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    let rigid = Arc::new(Backend::new(rigid).unwrap());
    let add = |layers: &mut Model, name: &str, spec| {
        layers.add(name, spec, Some(Arc::clone(&rigid)), 1).unwrap();
    };
    add(&mut layers, "a", full(16, 24));
    add(&mut layers, "b", sliding(64, 16, 32));
    // Kernels split blocks, so larger ones do.
    let got = plan_one(&Arc::new(layers), 1 << 24, &compact(256)).unwrap();
    assert_eq!(pages(&got), [(64, 3072), (48, 3072)]);
    let kernel = |number: usize| got.workers[0].groups[number].kernel_block_size;
    assert_eq!((kernel(0), kernel(1)), (Some(16), Some(16)));

    let mut layers = Model::new();
    let odd = AttentionFields {
        alignment: Some(96),
        ..fields(AttentionKind::Mla, 16, 24)
    };
    layers.add("latent", attention(odd), None, 1).unwrap();
    // A page of one prime, which nothing else divides, in a number that no size holds.
    let prime = changed(&full(1, 1), |f| {
        f.num_kv_heads = 2_305_843_009_213_693_951 / 2;
        f.head_size_v = 0;
    });
    layers.add("huge", prime, None, 1).unwrap();
    let error = plan_one(&Arc::new(layers), i64::MAX, &compact(256)).unwrap_err();
    assert_eq!(error.kind(), "page_size_not_unifiable");
    for text in ["latent", "huge", "may not be padded"] {
        assert!(error.to_string().contains(text), "{error}");
    }
}

/// G06 and the sizes of groups.
#[test]
fn groups_are_chosen_by_cost() {
    let full_layers = |n| repeated(&full(16, 8), n);
    let windows = |n| repeated(&sliding(64, 16, 8), n);
    let odd = || repeated(&sliding(128, 16, 8), 1);
    let worker = |model: Arc<Model>, config: &PlanConfig| {
        plan_one(&model, 1 << 30, config).unwrap().workers.remove(0)
    };
    let twenty_thirty = || model(full_layers(20).chain(windows(30)));
    let reference = worker(twenty_thirty(), &config(511));
    assert_eq!(sizes(&reference), [15, 15, 20]);
    let own = worker(twenty_thirty(), &compact(511));
    assert_eq!(sizes(&own), [10; 5]);
    assert_eq!(own.tensors.len(), 10);

    let mixed = || {
        let states = repeated(&state(64), 30);
        model(states.chain(full_layers(10)).chain(windows(5)).chain(odd()))
    };
    let reference = plan_one(&mixed(), 1 << 30, &config(511)).unwrap();
    assert_eq!(reference.workers[0].groups.len(), 46);
    let own = plan_one(&mixed(), 1 << 30, &compact(511)).unwrap();
    let groups = own.workers[0].groups.len();
    assert!((6..=12).contains(&groups), "{groups} groups");
    // What far fewer groups cost is bounded.
    let requests = |plan: &Plan| plan.capacity_of(511).unwrap().requests();
    assert!(requests(&own) >= 0.85 * requests(&reference));
}

/// Layers of one family and one block size share tables whatever else differs.
#[test]
fn an_odd_layer_joins_those_that_need_the_same_blocks() {
    let sink = changed(&full(16, 8), |f| {
        f.kind = AttentionKind::Sink;
        f.sink_len = 4;
    });
    let layers = repeated(&state(64), 22)
        .chain(repeated(&full(16, 8), 10))
        .chain([sink]);
    let got = plan_one(&model(layers), 1 << 30, &compact(4096)).unwrap();
    let worker = &got.workers[0];
    assert_eq!(sizes(worker), [11, 11, 11]);
    assert!(worker.groups.iter().any(|group| matches!(
        &group.spec,
        GroupSpec::Set(set) if set.specs().len() == 11
    )));
}

/// Every stage has its share of every group.
#[test]
fn groups_are_balanced_over_stages() {
    let layers = |from: usize| {
        named((from..from + 25).map(|i| {
            let spec = match i % 5 {
                0 | 1 => full(16, 8),
                _ => sliding(64, 16, 8),
            };
            (format!("l{i}"), spec)
        }))
    };
    let workers = [worker(&layers(0), 1 << 24), worker(&layers(25), 1 << 24)];
    let own = plan(&workers, &compact(511)).unwrap();
    for worker in &own.workers {
        assert_eq!(worker.num_blocks, own.workers[0].num_blocks);
        assert_eq!(worker.tensors.len(), 5);
        assert_eq!(sizes(worker), [5; 5]);
    }
    let reference = plan(&workers, &config(511)).unwrap();
    assert!(own.workers[0].num_blocks >= 2 * reference.workers[0].num_blocks);
}

/// B01, B02, B05: block 0 is kept although nobody says so.
#[test]
fn the_null_block_is_counted() {
    let one = |block_size| model([full(block_size, 1)]);
    let fit = PlanConfig {
        auto_fit_max_model_len: true,
        ..compact(4096)
    };
    let plan = plan_one(&one(128), 8 * 256, &fit).unwrap();
    assert_eq!(
        (
            plan.config.limits.max_model_len,
            plan.config.reserved_blocks
        ),
        (896, 1)
    );
    let error = plan_one(&one(8192), 13 * 16384, &compact(106_496)).unwrap_err();
    assert!(
        matches!(
            error,
            PlanError::NotEnoughMemory {
                longest: 98_304,
                ..
            }
        ),
        "{error}"
    );
    let overridden = PlanConfig {
        num_blocks_override: Some(1),
        ..compact(2048)
    };
    let error = plan_one(&one(16), 1 << 40, &overridden).unwrap_err();
    assert_eq!(error.kind(), "not_enough_memory");
}

/// B18, B19: what a request can hold, and no block more.
#[test]
fn demand_has_no_slack() {
    let chunked = |chunk, block_size| {
        attention(AttentionFields {
            attention_chunk_size: Some(chunk),
            ..fields(AttentionKind::ChunkedLocal, block_size, 64)
        })
    };
    for (id, spec, in_flight, len, expected, of_reference) in [
        ("B18", sliding(4, 4, 64), 100, 8, 2, 3),
        ("a window in a block", sliding(11, 128, 64), 1, 4096, 2, 2),
        ("B19, chunks fill blocks", chunked(64, 16), 32, 4096, 6, 6),
        (
            "B19, chunks begin in blocks",
            chunked(40, 16),
            32,
            4096,
            5,
            5,
        ),
        ("B19, a block more", chunked(24, 16), 9, 4096, 3, 3),
    ] {
        for (mut config, expected) in [(compact(len), expected), (config(len), of_reference)] {
            config.limits.max_tokens_in_flight = in_flight;
            let plan = plan_one(&model([spec.clone()]), 1 << 30, &config).unwrap();
            let blocks = plan.workers[0].blocks_per_request(&plan.config.limits);
            assert_eq!(blocks.unwrap(), expected, "{id}");
        }
    }
}

/// B15: groups that never share a block's bytes lie over each other.
#[test]
fn packed_blocks_are_as_large_as_the_largest_group() {
    let first = repeated(&full_page(32768), 3).chain(repeated(&full_page(8192), 3));
    let layers = first.chain(repeated(&sliding(64, 16, 1024), 5));
    let packed = PlanConfig {
        cross_layer_blocks: true,
        num_blocks_override: None,
        ..compact(2048)
    };
    let follows = Preset::FlashAttentionNhd.contract().unwrap();
    let follows = Arc::new(Backend::new(follows).unwrap());
    let mut model = Model::new();
    for (number, spec) in layers.enumerate() {
        let name = format!("l{number}");
        let spec = changed(&spec, |f| f.indexes_kv_by_block_stride = true);
        model
            .add(&name, spec, Some(Arc::clone(&follows)), 1)
            .unwrap();
    }
    let plan = plan_one(&Arc::new(model), 32 << 20, &packed).unwrap();
    let worker = &plan.workers[0];
    assert!(
        worker
            .tensors
            .iter()
            .all(|t| t.block_stride == worker.bytes_per_block)
    );
    let of_group = |group: &crate::plan::Group| -> u64 {
        let places = 0..group.layers.len();
        places.map(|place| group.spec.page_of(place)).sum()
    };
    let largest = worker.groups.iter().map(of_group).max().unwrap();
    assert_eq!(worker.bytes_per_block, largest);
}

/// B15 in its own numbers: the slots of two given groups.
#[test]
fn slots_of_a_packed_block_lie_from_its_start() {
    use crate::plan::Group;
    use crate::plan::pack::{Packing, Pools};
    use crate::spec::SpecSet;
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
    let pools = Pools::of(&groups, Packing::Overlaid { step: 1 }).unwrap();
    assert_eq!(pools.bytes_per_block, 163_840);
    assert_eq!(8_388_608 / pools.bytes_per_block, 51);
    let tensors = pools.tensors(51).unwrap();
    let offset_of = |layer: usize| {
        let tensor = tensors.iter().find(|t| t.layers.contains(&layer)).unwrap();
        assert_eq!((tensor.size, tensor.block_stride), (51 * 163_840, 163_840));
        tensor.offset
    };
    let offsets: Vec<u64> = (0..11).map(offset_of).collect();
    assert_eq!(
        offsets,
        [
            0, 32768, 65536, 98304, 106_496, 114_688, // the first group
            0, 32768, 65536, 98304, 131_072,
        ]
    );
}

/// A block size that nobody wished: the one that wastes least at the usual length.
#[test]
fn open_block_sizes_are_chosen() {
    let flash = backend(&[MultipleOf(16)]);
    let attention = |block_size| strided(full(block_size, 64));
    let big_state = |block_size| {
        Spec::State(
            State::new(StateFields {
                kind: StateKind::Mamba2,
                block_size,
                dtypes: vec![Dtype::F32],
                ndims: vec![1],
                dims: vec![20_000],
                page_size_padded: None,
                cache_mode: StateCacheMode::None,
                num_speculative_blocks: 0,
            })
            .unwrap(),
        )
    };
    let mut layers = Model::new();
    for number in 0..12 {
        let spec = match number % 4 {
            3 => attention(1024),
            _ => big_state(4096),
        };
        let backend = (number % 4 == 3).then(|| Arc::clone(&flash));
        layers.add(&format!("l{number}"), spec, backend, 1).unwrap();
    }
    let layers = Arc::new(layers);
    let open = |typical_len| PlanConfig {
        choose_block_sizes: true,
        typical_len,
        ..compact(65_536)
    };
    // 1024 tokens of 128 bytes are 131072 bytes, the state has 80000: as given, states are padded.
    let given = plan_one(&layers, 1 << 28, &compact(65_536)).unwrap();
    assert_eq!(pages(&given)[0].1, 131_072);
    let own = plan_one(&layers, 1 << 28, &open(2048)).unwrap();
    // 624 tokens are 79872 bytes, 640 are 81920.
    let (block_size, page) = *pages(&own).iter().find(|(size, _)| *size != 4096).unwrap();
    assert!(
        page < 90_000 && block_size.is_multiple_of(16),
        "{block_size} {page}"
    );
    for len in [2048, 65_536] {
        let (own, given) = (
            own.capacity_of(len).unwrap(),
            given.capacity_of(len).unwrap(),
        );
        assert!(own.requests() > given.requests());
    }
    assert!(
        own.capacity_of(2048).unwrap().requests()
            > 1.1 * given.capacity_of(2048).unwrap().requests()
    );
}

/// L01, L02: kernels that compute with 32 bits get fewer blocks, never a wrap.
#[test]
fn narrow_kernels_get_fewer_blocks() {
    let narrow = Contract {
        index_width: IndexWidth::Bits32,
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    let narrow = Arc::new(Backend::new(narrow).unwrap());
    let model = |count: usize| {
        let mut model = Model::new();
        for number in 0..count {
            let spec = match number % 2 {
                0 => full(16, 32),
                _ => sliding(64, 16, 32),
            };
            let name = format!("l{number}");
            model
                .add(&name, spec, Some(Arc::clone(&narrow)), 1)
                .unwrap();
        }
        Arc::new(model)
    };
    // Pages of 1024 bytes and elements of one: 2^21 blocks reach 2^31.
    let own = plan_one(&model(2), 1 << 40, &compact(4096)).unwrap();
    let worker = &own.workers[0];
    assert_eq!(worker.num_blocks, 1 << 21);
    assert!(worker.tensors.iter().all(|tensor| tensor.size <= 1 << 31));
    // Where so many blocks are needed, the error names the layer and both numbers.
    let long = PlanConfig {
        num_blocks_override: Some((1 << 21) + 1),
        ..compact(4096)
    };
    let error = plan_one(&model(2), 0, &long).unwrap_err();
    assert_eq!(error.kind(), "index_width_exceeded");
    for text in ["l0", "FLASH_ATTN", "2097153", "2097152"] {
        assert!(error.to_string().contains(text), "{error}");
    }
    // B24: ids are 32 bits for everyone.
    let bytes = crate::plan::testing::model([changed(&full(1, 1), |f| f.head_size_v = 0)]);
    let own = plan_one(&bytes, 1 << 33, &compact(64)).unwrap();
    assert_eq!(own.workers[0].num_blocks, i32::MAX as u64);
}

/// S08: windows stored in full get the full layers' blocks.
#[test]
fn promoted_windows_get_the_full_layers_blocks() {
    let off = PlanConfig {
        hybrid_manager_off: true,
        ..compact(64)
    };
    let plan = plan_one(&model([full(64, 8), sliding(128, 16, 8)]), 1 << 20, &off).unwrap();
    assert_eq!(sizes(&plan.workers[0]), [2]);
    assert_eq!(pages(&plan), [(64, 1024)]);
    let error = plan_one(&model([full(64, 8), state(8)]), 1 << 20, &off).unwrap_err();
    assert_eq!(error.kind(), "hybrid_disabled_not_unifiable");
}

/// Shapes of latents that the reference refuses.
#[test]
fn latents_of_any_shape_are_planned() {
    let latent = |kind, window, block_size, head_size| {
        attention(AttentionFields {
            sliding_window: window,
            ..fields(kind, block_size, head_size)
        })
    };
    let full_latent =
        |block_size, head_size| latent(AttentionKind::Mla, None, block_size, head_size);
    let windowed = |block_size, head_size| {
        latent(
            AttentionKind::SlidingWindowMla,
            Some(64),
            block_size,
            head_size,
        )
    };
    for (refused, layers) in [
        ("no_mla_group", vec![windowed(16, 8), windowed(32, 16)]),
        (
            "swa_page_larger",
            vec![full_latent(16, 8), windowed(16, 16)],
        ),
        (
            "mla_not_uniform",
            vec![full_latent(16, 8), full_latent(64, 16), windowed(16, 8)],
        ),
        (
            "swa_uneven_layer_tuples",
            vec![
                full_latent(64, 8),
                full_latent(64, 16),
                windowed(16, 8),
                windowed(16, 64),
                windowed(16, 8),
            ],
        ),
        (
            "layers_not_grouped",
            vec![
                full_latent(64, 16),
                windowed(16, 16),
                windowed(16, 4),
                state(16),
            ],
        ),
    ] {
        let model = model(layers);
        let error = plan_one(&model, 1 << 24, &config(256)).unwrap_err();
        assert_eq!(error.kind(), refused);
        let plan = plan_one(&model, 1 << 24, &compact(256)).unwrap();
        let layers: usize = plan.workers[0].groups.iter().map(|g| g.layers.len()).sum();
        assert_eq!(layers, model.layers().len(), "{refused}");
    }
}

/// The engine says what it serves, and the plan follows.
#[test]
fn the_usual_length_decides() {
    let layers = || {
        let windows = repeated(&sliding(4096, 16, 8), 52);
        model(repeated(&full(16, 8), 10).chain(windows))
    };
    let plan_for = |typical_len| {
        let mut config = PlanConfig {
            typical_len,
            ..compact(131_072)
        };
        config.limits.max_tokens_in_flight = 8192;
        plan_one(&layers(), 1 << 32, &config).unwrap()
    };
    let (short, long) = (plan_for(2048), plan_for(0));
    let requests = |plan: &Plan, len| plan.capacity_of(len).unwrap().requests();
    assert!(requests(&short, 2048) >= requests(&long, 2048));
    assert!(requests(&long, 131_072) >= requests(&short, 131_072));
}

/// All workers of a plan agree, empty stages included.
#[test]
fn a_stage_without_layers_has_no_say() {
    let layers = model(repeated(&full(16, 8), 4).chain(repeated(&sliding(64, 16, 8), 6)));
    let workers: [Worker; 2] = [worker(&layers, 1 << 20), worker(&model([]), -1)];
    let own = plan(&workers, &compact(64)).unwrap();
    assert_eq!(own.workers[0].num_blocks, own.workers[1].num_blocks);
    assert!(own.workers[1].tensors.is_empty());
}

#[test]
fn a_page_that_is_mostly_padding_is_fitted_at_once() {
    // Every number of blocks that the padding has room for would be a try: more than a day of them.
    let layers = [padded(full(1, 3), 1 << 40), strided(sliding(64, 16, 8))];
    let planned = plan_one(&model(layers), i64::MAX, &compact(64));
    let reference = PlanConfig {
        policy: Policy::Reference,
        ..compact(64)
    };
    let layers = [padded(full(1, 3), 1 << 40), strided(sliding(64, 16, 8))];
    let expected = plan_one(&model(layers), i64::MAX, &reference);
    assert_eq!(planned.is_ok(), expected.is_ok());
}

#[test]
fn a_state_that_needs_its_padding_keeps_it() {
    // Two types, and a page that is no multiple of the wider one without padding.
    let state = State::new(StateFields {
        kind: StateKind::Mamba2,
        block_size: 16,
        dtypes: vec![Dtype::F32, Dtype::Bf16],
        ndims: vec![1, 1],
        dims: vec![4096, 1023],
        page_size_padded: Some(18432),
        cache_mode: StateCacheMode::None,
        num_speculative_blocks: 0,
    });
    let layers = [
        Spec::State(state.unwrap()),
        strided(attention(AttentionFields::full(16, 2, 128, Dtype::Bf16))),
    ];
    let config = PlanConfig {
        choose_block_sizes: true,
        ..compact(2048)
    };
    plan_one(&model(layers), 1 << 30, &config).unwrap();
}

/// `count` kinds of layers, each with pages and blocks of its own.
fn many_kinds(count: u64) -> impl Iterator<Item = Spec> {
    (0..count).map(|number| match number % 3 {
        0 => strided(full(16, 8 + number)),
        1 => strided(sliding(64 + 16 * number, 16, 8 + number)),
        _ => state(100 + number),
    })
}

/// Hundreds of kinds are planned, and not worse than by the reference.
#[test]
fn many_kinds_are_planned() {
    for (count, stages) in [(300, 1), (100, 16)] {
        let layers: Vec<Spec> = many_kinds(count).collect();
        let workers: Vec<Worker> = (0..stages)
            .map(|_| worker(&model(layers.iter().cloned()), 1 << 28))
            .collect();
        for packed in [false, true] {
            let with = |policy| PlanConfig {
                policy,
                cross_layer_blocks: packed,
                reserved_blocks: 1,
                ..config(2048)
            };
            let own = plan(&workers, &with(Policy::Compact)).unwrap();
            let reference = plan(&workers, &with(Policy::Reference)).unwrap();
            let requests = |plan: &Plan| plan.capacity_of(2048).unwrap().requests();
            let share = match own.workers[0].groups.len() {
                ..=32 => 0.75,
                _ => 1.0,
            };
            assert!(requests(&own) >= share * requests(&reference));
        }
    }
}

/// States whose earlier ones are kept have a say in a scheduler's step.
#[test]
fn blocks_of_kept_states_keep_the_step_short() {
    let flash = backend(&[MultipleOf(16)]);
    let mut layers = Model::new();
    for number in 0..8 {
        let (spec, backend) = match number % 4 {
            3 => (strided(full(16, 64)), Some(Arc::clone(&flash))),
            _ => {
                let mut fields = state(16_750).as_state().unwrap().fields().clone();
                fields.block_size = 592;
                (Spec::State(State::new(fields).unwrap()), None)
            }
        };
        layers.add(&format!("l{number}"), spec, backend, 1).unwrap();
    }
    let layers = Arc::new(layers);
    for mode in StateCacheMode::ALL {
        let mut config = PlanConfig {
            choose_block_sizes: true,
            ..compact(65_536)
        };
        config.limits.state_cache_mode = mode;
        let own = plan_one(&layers, 1 << 28, &config).unwrap();
        let sizes = || pages(&own).into_iter().map(|(block_size, _)| block_size);
        let (step, _) = crate::plan::resolve_block_sizes(&own, 592, None, true).unwrap();
        if mode == StateCacheMode::None {
            // No prefix is looked for, so the block that wastes least is taken.
            assert!(step > 4 * sizes().max().unwrap(), "{:?}", pages(&own));
        } else {
            assert!(step <= 4 * sizes().max().unwrap(), "{mode:?}: {step}");
        }
    }
}

/// Padding that was given is kept where block sizes are.
#[test]
fn given_padding_is_kept_unless_block_sizes_are_chosen() {
    let bf16 = |kind, window| {
        attention(AttentionFields {
            kind,
            sliding_window: window,
            page_size_padded: Some(8192),
            ..AttentionFields::full(16, 1, 64, Dtype::Bf16)
        })
    };
    let full = || bf16(AttentionKind::Full, None);
    let window = || bf16(AttentionKind::SlidingWindow, Some(256));
    let layers = || model((0..4).flat_map(|_| [full(), window()]));
    let kept = plan_one(&layers(), 1 << 26, &compact(4096)).unwrap();
    assert!(
        pages(&kept).iter().all(|&page| page == (16, 8192)),
        "{:?}",
        pages(&kept)
    );
    // Of a larger page as many blocks as it holds with their padding, where six would do without it.
    let larger = model([strided(full()), strided(sliding(64, 16, 800))]);
    let larger = plan_one(&larger, 1 << 26, &compact(4096)).unwrap();
    let (block_size, page) = pages(&larger)[0];
    assert_eq!(block_size / 16, page / 8192, "{:?}", pages(&larger));
    let chosen = PlanConfig {
        choose_block_sizes: true,
        ..compact(4096)
    };
    let chosen = plan_one(&layers(), 1 << 26, &chosen).unwrap();
    assert!((0..chosen.workers[0].groups.len()).all(|group| padding(&chosen, group) == 0.0));
}

/// A number that is too large for larger blocks is no reason to give no plan.
#[test]
fn a_window_of_nearly_all_numbers_is_planned() {
    for window in [(1 << 63) - 17, (1 << 63) - 40, 1 << 40] {
        let layers = || model([strided(full(16, 24)), sliding(window, 16, 32)]);
        let own = plan_one(&layers(), 1 << 26, &compact(4096));
        assert!(own.is_ok(), "{window}: {:?}", own.err());
    }
}

/// The search looks at a layer's pages as they are shared; alone in its memory, as here, all keys lie
/// before all values, and those are not where one of the kernels wants them.
#[test]
fn plans_whose_views_are_refused_are_not_chosen() {
    let kernels = |preset: Preset, alignment| {
        let contract = Contract {
            alignment,
            ..preset.contract().unwrap()
        };
        Arc::new(Backend::new(contract).unwrap())
    };
    let spec = |block_size| {
        attention(AttentionFields {
            quant_mode: QuantMode::Fp8PerTokenHead,
            ..AttentionFields::full(block_size, 1, 128, Dtype::U8)
        })
    };
    let (rocm, cpu) = (
        kernels(Preset::RocmAttention, 256),
        kernels(Preset::CpuAttention, 16),
    );
    let mut layers = Model::new();
    layers.add("k0", spec(64), Some(rocm), 1).unwrap();
    layers.add("k1", spec(32), Some(cpu), 1).unwrap();
    let open = PlanConfig {
        choose_block_sizes: true,
        ..compact(2000)
    };
    let own = plan_one(&Arc::new(layers), 1 << 28, &open).unwrap();
    assert_eq!(super::why_unread(&own), None);
}

/// Too little memory is what is said of packed blocks too, with the numbers that an engine needs.
#[test]
fn a_shortfall_of_packed_blocks_is_told() {
    let kernels = Contract {
        kernel_block_sizes: vec![Exact(16)],
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    let kernels = Arc::new(Backend::new(kernels).unwrap());
    let bf16 = |kind, window| {
        strided(attention(AttentionFields {
            kind,
            sliding_window: window,
            ..AttentionFields::full(16, 8, 128, Dtype::Bf16)
        }))
    };
    let mut layers = Model::new();
    // Blocks of 32 would be split, which packed ones are not: there is no packed layout at all.
    let full = changed(&bf16(AttentionKind::Full, None), |f| f.block_size = 32);
    layers
        .add("full", full, Some(Arc::clone(&kernels)), 1)
        .unwrap();
    let window = bf16(AttentionKind::SlidingWindow, Some(64));
    layers.add("window", window, Some(kernels), 1).unwrap();
    let packed = PlanConfig {
        cross_layer_blocks: true,
        ..compact(4096)
    };
    let error = plan_one(&Arc::new(layers), 1 << 20, &packed).unwrap_err();
    assert_eq!(error.kind(), "not_enough_memory", "{error}");
}

/// Where one table serves all layers too: of smaller blocks a request's last one wastes less.
#[test]
fn one_table_gets_small_blocks_if_they_are_open() {
    let (sixteens, any) = (backend(&[MultipleOf(16)]), backend(&[MultipleOf(1)]));
    let layers = |kernels: &[&Arc<Backend>], block_size| {
        let mut model = Model::new();
        for (number, backend) in kernels.iter().enumerate() {
            let spec = strided(full(block_size, 8 + 8 * number as u64));
            model
                .add(&format!("l{number}"), spec, Some(Arc::clone(backend)), 1)
                .unwrap();
        }
        Arc::new(model)
    };
    let open = |choose_block_sizes| PlanConfig {
        choose_block_sizes,
        typical_len: 150,
        ..compact(4096)
    };
    for (kernels, given, chosen) in [
        (&[&sixteens][..], 128, 16),
        (&[&sixteens, &sixteens], 128, 16),
        (&[&sixteens, &any], 128, 16),
        // Shorter ones are not tried, unless the engine has them.
        (&[&any, &any], 128, 16),
        (&[&any, &any], 4, 4),
        (&[&sixteens], 16, 16),
    ] {
        let layers = layers(kernels, given);
        let [asked, own] = [false, true].map(|o| plan_one(&layers, 1 << 26, &open(o)).unwrap());
        assert_eq!(pages(&asked)[0].0, given);
        assert_eq!((pages(&own).len(), pages(&own)[0].0), (1, chosen));
        for len in [150, 4096] {
            let requests = |plan: &Plan| plan.capacity_of(len).unwrap().requests();
            assert!(requests(&own) >= requests(&asked), "{given} {chosen}");
        }
    }
}

/// Where layers can be planned but a number cannot be met, the error is of the number.
#[test]
fn numbers_that_are_too_large_are_named() {
    let window = attention(AttentionFields {
        sliding_window: Some(16),
        ..fields(AttentionKind::SlidingWindowMla, 16, 16)
    });
    let layers = model([window, full(16, 16)].map(strided));
    let with = |reserved_blocks, num_blocks_override| PlanConfig {
        reserved_blocks,
        num_blocks_override,
        ..compact(1000)
    };
    plan_one(&layers, 1 << 20, &with(1, None)).unwrap();
    for (config, kind) in [
        (with(1 << 62, None), "overflow"),
        (with(1, Some(1 << 31)), "too_many_blocks"),
    ] {
        let error = plan_one(&layers, 1 << 20, &config).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}

/// Padding keeps blocks aligned that would not be without it, also those of a layer alone.
#[test]
fn padding_that_aligns_blocks_is_seen() {
    let contract = Contract {
        alignment: 512,
        ..Preset::FlashAttentionNhd.contract().unwrap()
    };
    let mut layers = Model::new();
    let backend = Arc::new(Backend::new(contract).unwrap());
    let spec = padded(full(16, 7), 512);
    layers.add("l0", spec, Some(backend), 1).unwrap();
    let own = plan_one(&Arc::new(layers), 1 << 20, &compact(1000)).unwrap();
    assert_eq!(pages(&own), [(16, 512)]);
}
