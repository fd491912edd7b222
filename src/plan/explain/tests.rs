//! What explanations say beside the plan itself: the reference's plan, narrow kernels, and what would
//! help.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::Change;
use super::advice::workers_of;
use crate::backend::KernelBlockSize::{Exact, MultipleOf};
use crate::backend::{Backend, Contract, IndexWidth, Preset};
use crate::model::Model;
use crate::plan::properties::{any_config, any_layers, stages};
use crate::plan::testing::*;
use crate::plan::{Plan, PlanConfig, Policy, plan};
use crate::spec::Spec;

fn compact(max_model_len: u64) -> PlanConfig {
    PlanConfig {
        policy: Policy::Compact,
        ..config(max_model_len)
    }
}

fn json(plan: &Plan) -> Value {
    serde_json::from_str(&plan.explain_json()).unwrap()
}

fn repeated(spec: &Spec, count: usize) -> impl Iterator<Item = Spec> + use<> {
    std::iter::repeat_n(spec.clone(), count)
}

/// Layers with one backend, which takes the place of what their specs say of strides.
fn with_backend(specs: impl IntoIterator<Item = Spec>, backend: &Arc<Backend>) -> Arc<Model> {
    let mut model = Model::new();
    for (number, spec) in specs.into_iter().enumerate() {
        let name = format!("l{number}");
        model
            .add(&name, spec, Some(Arc::clone(backend)), 1)
            .unwrap();
    }
    Arc::new(model)
}

fn with_contract(change: impl FnOnce(&mut Contract)) -> Arc<Backend> {
    let mut contract = Preset::FlashAttentionNhd.contract().unwrap();
    change(&mut contract);
    Arc::new(Backend::new(contract).unwrap())
}

/// Every number of the comparison is one of the two plans'.
fn expect_beside(own: &Plan, reference: &Plan) {
    let json = json(own);
    let beside = &json["reference"];
    assert!(beside["error"].is_null());
    for (which, plan) in [("own_plan", own), ("plan", reference)] {
        let (said, worker) = (&beside[which], &plan.workers[0]);
        assert_eq!(said["num_blocks"], worker.num_blocks);
        assert_eq!(said["num_groups"], worker.groups.len());
        assert_eq!(said["bytes_per_block"], worker.bytes_per_block);
        assert_eq!(said["capacity_tokens"], worker.capacity_tokens);
        let wasted = &said["wasted_bytes"];
        let kinds = ["padding", "unused_slots", "left_over"].map(|kind| wasted[kind].as_u64());
        assert_eq!(
            wasted["total"].as_u64(),
            kinds.into_iter().sum::<Option<u64>>()
        );
    }
    for held in beside["lengths"].as_array().unwrap() {
        let len = held["len"].as_u64().unwrap();
        let (ours, theirs) = (
            own.capacity_of(len).unwrap(),
            reference.capacity_of(len).unwrap(),
        );
        assert_eq!(held["tokens"], ours.tokens() as u64);
        assert_eq!(held["tokens_of_reference"], theirs.tokens() as u64);
        assert_eq!(held["ratio"], ours.requests() / theirs.requests());
    }
}

fn expect_text(plan: &Plan, parts: &[&str]) {
    let text = plan.explain_text();
    for part in parts {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn each_rule_that_won_is_named() {
    let both = |model: &Arc<Model>, memory: i64, own: &PlanConfig| {
        let reference = PlanConfig {
            policy: Policy::Reference,
            ..own.clone()
        };
        (
            plan_one(model, memory, own).unwrap(),
            plan_one(model, memory, &reference).unwrap(),
        )
    };
    // Pages of 8192 and of 3072 bytes: the reference pads, larger blocks need not.
    let layers = repeated(&sliding(1024, 16, 256), 5).chain([strided(full_page(3072))]);
    let layers = model(layers);
    let usual = PlanConfig {
        typical_len: 2048,
        ..compact(32_768)
    };
    let (own, reference) = both(&layers, 1 << 28, &usual);
    expect_beside(&own, &reference);
    let lengths = json(&own)["reference"]["lengths"].clone();
    assert_eq!(
        (&lengths[0]["len"], &lengths[1]["len"]),
        (&2048.into(), &32_768.into())
    );
    assert!(lengths[1]["ratio"].as_f64().unwrap() > 1.5);
    expect_text(
        &own,
        &[
            "beside the policy reference",
            "larger blocks instead of padding: ",
            "a request of 32768 tokens takes ",
        ],
    );

    let odd = repeated(&sliding(128, 16, 8), 1);
    let layers = repeated(&state(64), 30)
        .chain(repeated(&full(16, 8), 10))
        .chain(odd);
    let (own, reference) = both(&model(layers), 1 << 30, &compact(511));
    expect_beside(&own, &reference);
    let groups = own.workers[0].groups.len();
    expect_text(&own, &[&format!("fewer groups: {groups} instead of 41")]);

    let packed = PlanConfig {
        cross_layer_blocks: true,
        ..compact(2048)
    };
    let first = repeated(&full_page(32_768), 3).chain(repeated(&full_page(8192), 3));
    let layers = first.chain(repeated(&sliding(64, 16, 1024), 5));
    let layers = with_backend(layers, &with_contract(|_| ()));
    let (own, reference) = both(&layers, 32 << 20, &packed);
    expect_beside(&own, &reference);
    expect_text(
        &own,
        &["groups that never share a block lie over each other: "],
    );
}

#[test]
fn the_references_plan_is_taken_where_it_is_best() {
    let counted = PlanConfig {
        reserved_blocks: 1,
        ..compact(8)
    };
    let mut counted = counted;
    counted.limits.max_tokens_in_flight = 100;
    let own = plan_one(&model([sliding(4, 4, 64)]), 1 << 20, &counted).unwrap();
    assert_eq!(json(&own)["reference"]["is_taken"], true);
    expect_text(
        &own,
        &[
            "the reference's groups and pages are taken",
            // B18.
            "a request of 8 tokens holds 2 blocks, and the reference counts 3",
        ],
    );
    assert!(!own.explain_text().contains("block 0 is kept"));
    let unasked = plan_one(&model([full(16, 8)]), 1 << 20, &compact(64)).unwrap();
    expect_text(&unasked, &["block 0 is kept from requests"]);
    // A plan by the reference has nothing to be compared with.
    let reference = plan_one(&model([full(16, 8)]), 1 << 20, &config(64)).unwrap();
    assert!(json(&reference)["reference"].is_null());
}

#[test]
fn why_the_reference_gives_no_plan() {
    // G03a
    let layers = model([full_page(3072), sliding(64, 16, 128)]);
    let own = plan_one(&layers, 1 << 24, &compact(4096)).unwrap();
    let error = plan_one(&layers, 1 << 24, &config(4096)).unwrap_err();
    let said = &json(&own)["reference"];
    assert_eq!(said["error"], error.to_string());
    assert!(said["plan"].is_null() && said["lengths"].as_array().unwrap().is_empty());
    expect_text(
        &own,
        &[&format!("the policy reference gives no plan: {error}")],
    );

    // A plan whose pages are padded for kernels that need them dense.
    let rigid = with_contract(|contract| contract.follows_block_stride = false);
    let mut layers = Model::new();
    let given = padded(full_page(3072), 4096);
    layers.add("padded", given, Some(rigid), 1).unwrap();
    let reference = plan_one(&Arc::new(layers), 1 << 24, &config(4096)).unwrap();
    let why = crate::plan::compact::why_unread(&reference).unwrap();
    for part in [
        "layer padded",
        "FLASH_ATTN needs dense pages",
        "padded to 4096",
    ] {
        assert!(why.contains(part), "{why}");
    }
}

/// All keys, then all values: what is aligned is half a page.
#[test]
fn blocks_of_keys_alone_must_be_aligned() {
    let why = |block_size: u64| {
        let contract = Contract {
            alignment: 256,
            ..Preset::RocmAttention.contract().unwrap()
        };
        let rocm = Arc::new(Backend::new(contract).unwrap());
        let layers = with_backend([full(block_size, 8)], &rocm);
        let own = plan_one(&layers, 1 << 20, &compact(64)).unwrap();
        crate::plan::compact::why_unread(&own)
    };
    // 256 bytes of keys in a block of 32 tokens, 128 in one of 16.
    assert_eq!(why(32), None);
    let why = why(16).unwrap();
    assert!(
        why.contains("layer l0") && why.contains("ROCM_ATTN needs blocks aligned"),
        "{why}"
    );
}

/// L01, L02: how many blocks there would be, and which layer stands in the way.
#[test]
fn narrow_kernels_are_named() {
    let narrow = with_contract(|contract| contract.index_width = IndexWidth::Bits32);
    let layers = with_backend([full(16, 32), sliding(64, 16, 32)], &narrow);
    let own = plan_one(&layers, 1 << 33, &compact(4096)).unwrap();
    assert_eq!(own.workers[0].num_blocks, 1 << 21);
    let said = &json(&own)["workers"][0]["narrow_index"];
    assert_eq!(
        (&said["layer"], &said["backend"]),
        (&"l0".into(), &"FLASH_ATTN".into())
    );
    // Pages of 1024 bytes; two groups of one layer share a tensor.
    assert_eq!(said["blocks_of_memory"], 1u64 << 23);
    expect_text(
        &own,
        &[
            "layer l0: FLASH_ATTN computes 32-bit offsets and reaches 2097152 blocks; there is memory for 8388608",
        ],
    );
    // With memory for less nothing stands in the way.
    let own = plan_one(&layers, 1 << 30, &compact(4096)).unwrap();
    assert!(json(&own)["workers"][0]["narrow_index"].is_null());
    // The reference plans them all, and its views are refused.
    let reference = plan_one(&layers, 1 << 33, &config(4096)).unwrap();
    let why = crate::plan::compact::why_unread(&reference).unwrap();
    assert!(why.contains("reaches 2097152 of 8388608 blocks"), "{why}");
}

/// Where kernels reach fewer blocks than there is memory for, more layers in each of fewer groups hold
/// more than the reference's groups could.
#[test]
fn narrow_kernels_get_the_groups_that_hold_most() {
    let narrow = with_contract(|contract| contract.index_width = IndexWidth::Bits32);
    let layers = || repeated(&full(16, 32), 2).chain(repeated(&sliding(64, 16, 32), 6));
    let requests = |backend: &Arc<Backend>, memory: i64| {
        let own = plan_one(&with_backend(layers(), backend), memory, &compact(4096)).unwrap();
        (
            own.workers[0].groups.len(),
            own.capacity_of(4096).unwrap().requests(),
        )
    };
    let (of_four, of_memory) = requests(&with_contract(|_| ()), 1 << 36);
    let (of_narrow, reached) = requests(&narrow, 1 << 36);
    assert!(of_narrow < of_four, "{of_narrow} {of_four}");
    assert!(reached < of_memory);
    // With the reference's groups: 2^21 blocks, of which a request takes what it takes there.
    let reference = plan_one(&with_backend(layers(), &narrow), 1 << 36, &config(4096)).unwrap();
    let blocks = reference.capacity_of(4096).unwrap().blocks_per_request;
    assert!(reached > ((1u64 << 21) - 1) as f64 / blocks as f64);
}

/// Layers that read another layer's pages with narrower kernels than its own.
#[test]
fn kernels_of_sharing_layers_count() {
    let narrow = with_contract(|contract| {
        contract.name = "NARROW".to_owned();
        contract.index_width = IndexWidth::Bits32;
    });
    let mut layers = Model::new();
    let wide = || Some(with_contract(|_| ()));
    layers.add("own", full(16, 32), wide(), 1).unwrap();
    layers
        .share("reader", "own", None, Some(narrow), 1)
        .unwrap();
    let own = plan_one(&Arc::new(layers), 1 << 33, &compact(4096)).unwrap();
    assert_eq!(own.workers[0].num_blocks, 1 << 21);
    assert_eq!(json(&own)["workers"][0]["narrow_index"]["layer"], "reader");
}

#[test]
fn smaller_blocks_are_named_where_they_help() {
    // 150 tokens need 2 blocks of 128, or 3 of 64, or 5 of 32: 160 tokens instead of 256.
    let layers = || repeated(&full(128, 64), 4);
    let to = |to: u64| Change::BlockSize {
        kind: "full attention",
        from: 128,
        to,
    };
    let flash = with_backend(layers(), &backend(&[MultipleOf(16)]));
    let config = config(150);
    let own = plan_one(&flash, 1 << 24, &config).unwrap();
    let advice = own.cheapest_change().unwrap();
    assert_eq!((advice.change, advice.len), (to(32), 150));
    let smaller = with_backend(repeated(&full(32, 64), 4), &backend(&[MultipleOf(16)]));
    let changed = plan_one(&smaller, 1 << 24, &config).unwrap();
    let tokens = changed.capacity_of(150).unwrap().tokens() as u64;
    assert_eq!(advice.tokens, tokens);
    let text = format!(
        "cheapest change: blocks of 32 tokens for full attention layers instead of 128 would hold {tokens} tokens instead of {} (+",
        advice.tokens_now
    );
    expect_text(&own, &[&text]);
    let said = &json(&own)["cheapest_change"];
    assert_eq!(said["change"], "block_size");
    assert_eq!((&said["from"], &said["to"]), (&128.into(), &32.into()));
    assert_eq!(said["tokens"], tokens);
    // Compact is to be told that sizes are open: it gets as far, and finds the size itself.
    let own = plan_one(&flash, 1 << 24, &compact(150)).unwrap();
    let open = own.cheapest_change().unwrap();
    assert_eq!(open.change, Change::ChooseBlockSizes);
    assert!(open.tokens >= tokens);
    // Kernels that take only 64 cannot have smaller ones, and whose kernels nobody knows neither.
    let exact = with_backend(layers(), &backend(&[Exact(64)]));
    let own = plan_one(&exact, 1 << 24, &config).unwrap();
    assert_eq!(own.cheapest_change().unwrap().change, to(64));
    let own = plan_one(&model(layers()), 1 << 24, &compact(150)).unwrap();
    assert_eq!(own.cheapest_change(), None);
}

/// 130 tokens begin a second block of 128.
#[test]
fn a_shorter_sequence_is_named_where_it_ends_in_a_block() {
    let layers = model(repeated(&full(128, 64), 4));
    let own = plan_one(&layers, 1 << 24, &compact(130)).unwrap();
    let advice = own.cheapest_change().unwrap();
    assert_eq!(advice.change, Change::MaxModelLen { from: 130, to: 128 });
    let changed = plan_one(&layers, 1 << 24, &compact(128)).unwrap();
    assert_eq!(
        advice.tokens,
        changed.capacity_of(128).unwrap().tokens() as u64
    );
}

#[test]
fn a_stride_is_named_where_padding_would_help() {
    // G03a: without padding blocks of 64 and 48 tokens.
    let rigid = with_contract(|contract| {
        contract.follows_block_stride = false;
        contract.kernel_block_sizes = vec![Exact(16), Exact(32), Exact(64)];
    });
    let layers = repeated(&sliding(64, 16, 1000), 3).chain(repeated(&full_page(3072), 1));
    let layers = with_backend(layers, &rigid);
    let own = plan_one(&layers, 1 << 27, &compact(1024)).unwrap();
    let advice = own.cheapest_change().unwrap();
    assert!(
        matches!(advice.change, Change::BlockStride { .. }),
        "{advice}"
    );
    let (workers, config) = advice
        .change
        .applied(&workers_of(&own), &compact(1024))
        .unwrap();
    let changed = plan(&workers, &config).unwrap();
    assert_eq!(
        changed.capacity_of(1024).unwrap().tokens() as u64,
        advice.tokens
    );
}

#[test]
fn nothing_is_named_where_nothing_helps() {
    let flash = backend(&[MultipleOf(16)]);
    let layers = with_backend(repeated(&full(16, 64), 4), &flash);
    let own = plan_one(&layers, 1 << 26, &compact(4096)).unwrap();
    assert_eq!(own.cheapest_change(), None);
    assert!(json(&own)["cheapest_change"].is_null());
    assert!(!own.explain_text().contains("cheapest change"));
}

#[test]
fn one_more_request_is_named() {
    let layers = model([full(16, 64)]);
    // 48 blocks of 16 tokens and block 0: 1.92 requests of 400 tokens, two of 384.
    let own = plan_one(&layers, 49 * 2048, &compact(400)).unwrap();
    let said = &json(&own)["one_more_request"];
    assert_eq!(said["max_model_len"], 384);
    assert_eq!(
        (&said["requests"], &said["requests_now"]),
        (&2.into(), &1.into())
    );
    expect_text(
        &own,
        &["one more request: 2 of 384 tokens would fit instead of 1 of 400"],
    );
    // 1.5 requests: two of them would have to be far shorter.
    let own = plan_one(&layers, 38 * 2048, &compact(400)).unwrap();
    assert!(json(&own)["one_more_request"].is_null());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// A change that is named gives the tokens that were promised, and at least 1 % more.
    #[test]
    fn promises_are_kept(
        layers in any_layers(),
        asked in any_config(),
        memory in 1i64 << 16..1 << 24,
        (typical_len, own_policy) in (0u64..500, any::<bool>()),
    ) {
        let policy = if own_policy { Policy::Compact } else { Policy::Reference };
        let asked = PlanConfig { policy, typical_len, ..asked };
        let workers = stages(&layers, layers.len() / 2, memory);
        let Ok(own) = plan(&workers, &asked) else { return Ok(()) };
        let Some(advice) = own.cheapest_change() else { return Ok(()) };
        let (changed_workers, config) = advice.change.applied(&workers, &asked).unwrap();
        let changed = plan(&changed_workers, &config).unwrap();
        let tokens = |plan: &Plan, len| plan.capacity_of(len).unwrap().tokens() as u64;
        prop_assert_eq!(tokens(&changed, advice.len), advice.tokens);
        prop_assert!(100 * advice.tokens >= 101 * advice.tokens_now);
        let len = match advice.change {
            // The usual length may be the longest.
            Change::MaxModelLen { from, to } if advice.len == to => match typical_len {
                0 => from,
                typical => typical.min(from),
            },
            _ => advice.len,
        };
        prop_assert_eq!(tokens(&own, len), advice.tokens_now);
    }
}
