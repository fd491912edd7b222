//! Small models, planned by trying everything: no way to fill pages and to split layers is better than
//! the one that the search finds.

use proptest::prelude::*;

use super::cost::Lengths;
use crate::num::lcm;
use crate::plan::capacity::Capacity;
use crate::plan::testing::*;
use crate::plan::{Plan, PlanConfig, Policy, plan};
use crate::spec::{Counting, Limits, Spec};

/// Layers of one kind.
#[derive(Debug, Clone)]
struct Layers {
    spec: Spec,
    count: u64,
}

/// Kinds that never share a table, whose pages may be padded.
fn any_layers() -> impl Strategy<Value = Vec<Layers>> {
    let kind = |number: usize| {
        let sizes = (
            prop::sample::select(vec![4u64, 8]),
            prop::sample::select(vec![1u64, 2, 3, 5, 6, 7, 9]),
        );
        (sizes, 1u64..6).prop_map(move |((block_size, head_size), count)| {
            let spec = match number {
                0 => strided(full(block_size, head_size)),
                1 => strided(sliding(20, block_size, head_size)),
                2 => strided(sliding(50, block_size, head_size)),
                _ => state(head_size * block_size),
            };
            Layers { spec, count }
        })
    };
    let all = (
        kind(0),
        kind(1),
        kind(2),
        kind(3),
        prop::collection::vec(any::<bool>(), 4),
    );
    all.prop_map(|(a, b, c, d, used)| {
        let kinds = [a, b, c, d].into_iter().zip(used);
        kinds
            .filter(|(_, used)| *used)
            .map(|(kind, _)| kind)
            .collect()
    })
}

fn block_size_in(spec: &Spec, page: u64) -> u64 {
    match spec {
        Spec::State(_) => spec.block_size(),
        Spec::Attention(_) => spec.block_size() * (page / spec.page().unpadded),
    }
}

/// Blocks of one group of a kind in pages of `page` bytes, at each length.
fn blocks_of(spec: &Spec, page: u64, lengths: &Lengths) -> [u64; 2] {
    let spec = spec.with_block_size(block_size_in(spec, page)).unwrap();
    lengths
        .limits()
        .map(|limits| spec.blocks_per_request(&limits).unwrap())
}

fn steps_far(layers: &[Layers], page: u64) -> bool {
    let attention = layers
        .iter()
        .filter(|kind| kind.spec.as_attention().is_some());
    let sizes: Vec<u64> = attention
        .map(|kind| block_size_in(&kind.spec, page))
        .collect();
    let step = sizes
        .iter()
        .fold(1, |step, &size| lcm("a step", step, size).unwrap());
    step > 4 * sizes.iter().copied().max().unwrap_or(1)
}

/// The least cost of all page sizes up to four times the least, and all splits.
fn least_cost(
    layers: &[Layers],
    memory: u64,
    lengths: &Lengths,
    floor: &[Capacity; 2],
) -> Option<f64> {
    let least = layers.iter().map(|kind| kind.spec.page().padded).max()?;
    // States of f32 lie at multiples of 4 bytes.
    let has_states = layers.iter().any(|kind| kind.spec.as_state().is_some());
    let granule = if has_states { 4 } else { 1 };
    let mut best: Option<f64> = None;
    let mut before = Vec::new();
    for page in (least..=4 * least).filter(|page| page % granule == 0) {
        let of_kind = |kind: &Layers| blocks_of(&kind.spec, page, lengths);
        let blocks: Vec<[u64; 2]> = layers.iter().map(of_kind).collect();
        // A larger page for the same blocks is a waste.
        let is_same = before == blocks;
        before.clone_from(&blocks);
        if is_same || steps_far(layers, page) {
            continue;
        }
        let mut groups = vec![1; layers.len()];
        loop {
            let slots = layers
                .iter()
                .zip(&groups)
                .map(|(kind, g)| kind.count.div_ceil(*g));
            let usable = (memory / (page * slots.max()?)).saturating_sub(1);
            let of_length = |i: usize| blocks.iter().zip(&groups).map(|(b, g)| b[i] * g).sum();
            let sums: [u64; 2] = [of_length(0), of_length(1)];
            let enough = (0..2).all(|i| {
                let own = Capacity {
                    len: lengths.tokens[i],
                    usable_blocks: usable,
                    blocks_per_request: sums[i],
                };
                own.holds(&floor[i], (1, 1))
            });
            if enough && sums[1] <= usable {
                let cost = lengths.cost(sums, usable as f64, groups.iter().sum());
                best = Some(best.map_or(cost, |best| best.min(cost)));
            }
            // The next split, as a number is counted up.
            let Some(place) = (0..groups.len()).find(|&i| groups[i] < layers[i].count) else {
                break;
            };
            groups[..place].fill(1);
            groups[place] += 1;
        }
    }
    best
}

fn capacities(plan: &Plan, lengths: &Lengths) -> [Capacity; 2] {
    lengths.tokens.map(|len| plan.capacity_of(len).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_split_is_better_than_the_one_found(
        layers in any_layers(),
        max_model_len in 1u64..400,
        typical_len in 0u64..400,
        memory in 2_000u64..400_000,
    ) {
        let specs = layers.iter().flat_map(|k| (0..k.count).map(|_| k.spec.clone()));
        let workers = [worker(&model(specs), memory as i64)];
        let config = PlanConfig { typical_len, ..config(max_model_len) };
        let limits = Limits { counting: Counting::Exact, ..config.limits };
        let lengths = Lengths::of(&limits, typical_len);
        let own = plan(&workers, &PlanConfig { policy: Policy::Compact, ..config.clone() });
        let reference = plan(&workers, &config);
        let floor = match &reference {
            Ok(plan) => capacities(plan, &lengths),
            Err(_) => lengths.tokens.map(|len| Capacity {
                len,
                usable_blocks: 0,
                blocks_per_request: 1,
            }),
        };
        if layers.len() < 2 {
            return Ok(());
        }
        let least = least_cost(&layers, memory, &lengths, &floor);
        match (own, least) {
            (Ok(own), Some(least)) => {
                let [typical, longest] = capacities(&own, &lengths);
                let cost = lengths.cost(
                    [typical.blocks_per_request, longest.blocks_per_request],
                    typical.usable_blocks as f64,
                    own.workers[0].groups.len() as u64,
                );
                prop_assert!(cost <= least * (1.0 + 1e-12), "{cost} {least}");
            }
            (Err(error), Some(_)) => prop_assert!(false, "{error}"),
            // The reference's plan may step farther than the search looks.
            _ => {}
        }
    }
}
