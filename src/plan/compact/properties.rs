//! What holds for every compact plan, on random models.

use proptest::prelude::*;

use crate::plan::properties::{any_config, any_layers, check_worker, stages};
use crate::plan::reference::latent_tuples;
use crate::plan::{Group, Plan, PlanConfig, PlanError, Policy, plan};
use crate::spec::{AttentionKind, StateCacheMode};

fn compact(config: &PlanConfig) -> PlanConfig {
    PlanConfig {
        policy: Policy::Compact,
        ..config.clone()
    }
}

/// Whether the reference says that it holds more than it does: of layer tuples, and of chunks that begin
/// inside a block.
fn overstates(groups: &[Group]) -> bool {
    let begins_inside = |group: &Group| {
        let attention = group.spec.first().as_attention();
        let fields = attention.map(|attention| attention.fields());
        fields.is_some_and(|fields| {
            let chunk = fields
                .attention_chunk_size
                .filter(|_| fields.kind == AttentionKind::ChunkedLocal);
            chunk.is_some_and(|chunk| !chunk.is_multiple_of(fields.block_size))
        })
    };
    latent_tuples::are_tuples(groups) || groups.iter().any(begins_inside)
}

/// Whether a plan holds a request of the longest sequence when block 0 is kept: the reference does not
/// always look.
fn serves(plan: &Plan) -> bool {
    let capacity = plan.capacity_of(plan.config.limits.max_model_len).unwrap();
    capacity.blocks_per_request <= capacity.usable_blocks
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Wherever the reference has a plan that serves, the compact one holds at least as many requests
    /// of the usual and of the longest length, as the plans say themselves and counted alike.
    #[test]
    fn no_fewer_tokens_than_the_reference(
        layers in any_layers(),
        config in any_config(),
        typical_len in 0u64..2000,
        auto_fit_max_model_len in any::<bool>(),
        (cut, memory) in (0usize..24, 1i64..4_000_000),
        (mode, context_parallel_size) in (0usize..3, 1u64..3),
        in_flight in 0u64..200,
    ) {
        let mut config = PlanConfig { auto_fit_max_model_len, typical_len, ..config };
        config.limits.state_cache_mode = StateCacheMode::ALL[mode];
        config.limits.context_parallel_size = context_parallel_size;
        config.limits.max_tokens_in_flight = in_flight;
        let workers = stages(&layers, cut, memory);
        let reference = plan(&workers, &config);
        let own = plan(&workers, &compact(&config));
        if let Ok(own) = &own {
            for worker in &own.workers {
                check_worker(worker, config.num_blocks_override.is_none());
                prop_assert_eq!(worker.num_blocks, own.workers[0].num_blocks);
            }
            prop_assert!(serves(own));
            prop_assert!(!own.explain_text().is_empty() && !own.explain_json().is_empty());
        }
        let Ok(reference) = reference else { return Ok(()) };
        if !serves(&reference) {
            return Ok(());
        }
        let own = own.unwrap();
        let longest = reference.config.limits.max_model_len;
        prop_assert!(own.config.limits.max_model_len >= longest);
        let typical = if typical_len == 0 { longest } else { typical_len.min(longest) };
        for len in [typical, longest] {
            let (ours, theirs) = (own.capacity_of(len).unwrap(), reference.capacity_of(len).unwrap());
            prop_assert!(ours.holds(&theirs, (1, 1)), "{ours:?} {theirs:?}");
        }
        if own.config.limits.max_model_len == longest && !own.workers[0].groups.is_empty() {
            let counted = own.capacity_of(longest).unwrap();
            let (ours, theirs) = (&own.workers[0], &reference.workers[0]);
            prop_assert_eq!(ours.max_concurrency, counted.requests());
            if config.reserved_blocks > 0 && !overstates(&theirs.groups) {
                prop_assert!(ours.max_concurrency >= theirs.max_concurrency);
                prop_assert!(ours.capacity_tokens >= theirs.capacity_tokens);
            }
        }
    }

    /// Where the reference gives up, there is a plan, or the error names what forbids one.
    #[test]
    fn where_the_reference_gives_up(
        layers in any_layers(),
        config in any_config(),
        memory in 1_000_000i64..400_000_000,
    ) {
        let workers = stages(&layers, 0, memory);
        let Err(error) = plan(&workers, &config) else { return Ok(()) };
        match plan(&workers, &compact(&config)) {
            Ok(_) => {}
            // The engine's own wish, not a rule of this library's.
            Err(PlanError::HybridDisabledNotUnifiable { .. }) => {
                prop_assert!(config.hybrid_manager_off);
            }
            Err(
                PlanError::NotEnoughMemory { .. }
                | PlanError::NoAvailableMemory { .. }
                | PlanError::ZeroBlocks { .. },
            ) => {}
            Err(other) => prop_assert!(false, "{error}\n{other}"),
        }
    }

    /// The order of workers, and how many hold the same layers, changes no worker's plan.
    #[test]
    fn plans_are_deterministic(layers in any_layers(), config in any_config(), cut in 0usize..24) {
        let workers = stages(&layers, cut, 1_000_000);
        let doubled: Vec<_> = workers.iter().flat_map(|w| [w.clone(), w.clone()]).collect();
        match (plan(&workers, &compact(&config)), plan(&doubled, &compact(&config))) {
            (Ok(one), Ok(two)) => for (worker, same) in one.workers.iter().zip([0, 2]) {
                prop_assert_eq!(&worker.tensors, &two.workers[same].tensors);
            },
            (one, two) => {
                let kind = |plan: Result<Plan, PlanError>| plan.map_err(|error| error.kind()).err();
                prop_assert_eq!(kind(one), kind(two));
            }
        }
    }
}
