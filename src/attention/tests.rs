//! Random models against what a group and its builders must be.

use std::cell::RefCell;
use std::sync::Arc;

use proptest::prelude::*;

use super::{AttentionGroups, BuilderInfo, BuilderSource, Builders, BuildersError, GroupsError};
use crate::backend::{Backend, GraphSupport, Preset};
use crate::dtype::Dtype;
use crate::model::Model;
use crate::plan::{Plan, PlanConfig, Policy, Worker, plan};
use crate::spec::{
    Attention, AttentionFields, AttentionKind, Counting, Limits, QuantMode, Spec, StateCacheMode,
};

fn spec(window: Option<u64>, num_kv_heads: u64) -> Spec {
    let fields = AttentionFields {
        kind: match window {
            Some(_) => AttentionKind::SlidingWindow,
            None => AttentionKind::Full,
        },
        block_size: 16,
        num_kv_heads,
        head_size: 8,
        head_size_v: 8,
        dtype: Dtype::U8,
        quant_mode: QuantMode::None,
        page_size_padded: None,
        indexes_kv_by_block_stride: false,
        sliding_window: window,
        attention_chunk_size: None,
        non_causal: false,
        tq_slot_size: 0,
        sink_len: 0,
        rswa_window: 0,
        cache_dtype: None,
        alignment: None,
        compress_ratio: 1,
        model_version: None,
    };
    Spec::Attention(Attention::new(fields).unwrap())
}

/// Of each layer whether it slides, which backend it has, its query heads, and which layer, if
/// there is one of that number, it shares with.
type Layers = Vec<(bool, bool, u32, Option<usize>)>;

fn plan_of(layers: &Layers) -> Plan {
    let backends = [Preset::TritonNhd, Preset::FlashAttentionNhd];
    let backends = backends.map(|preset| Arc::new(preset.backend().unwrap()));
    let mut model = Model::new();
    for (i, &(slides, backend, heads, target)) in layers.iter().enumerate() {
        let backend: Arc<Backend> = Arc::clone(&backends[usize::from(backend)]);
        let name = format!("l.{i}");
        match target.filter(|&target| target < i) {
            Some(target) => {
                let target = format!("l.{target}");
                model
                    .share(&name, &target, None, Some(backend), heads)
                    .unwrap();
            }
            None => {
                let spec = spec(slides.then_some(32), 1);
                model.add(&name, spec, Some(backend), heads).unwrap();
            }
        }
    }
    let config = PlanConfig {
        policy: Policy::Reference,
        limits: Limits {
            max_model_len: 16,
            context_parallel_size: 1,
            max_tokens_in_flight: 0,
            max_encoder_tokens: 0,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: Some(64),
        reserved_blocks: 0,
        has_draft_layers: false,
        typical_len: 0,
        choose_block_sizes: false,
    };
    let worker = Worker {
        model: Arc::new(model),
        memory_bytes: 0,
    };
    plan(&[worker], &config).unwrap()
}

/// Builders that are numbers; call number `fail_at` fails.
struct Source<'a> {
    fail_at: usize,
    calls: &'a RefCell<usize>,
    alive: &'a RefCell<Vec<usize>>,
    made: &'a RefCell<usize>,
}

impl Source<'_> {
    fn call(&self) -> Result<(), usize> {
        let call = *self.calls.borrow();
        *self.calls.borrow_mut() += 1;
        if call == self.fail_at {
            Err(call)
        } else {
            Ok(())
        }
    }
}

impl BuilderSource for Source<'_> {
    type Builder = usize;
    type Workspace = usize;
    type Error = usize;

    fn create(&self, _: &BuilderInfo<'_>) -> Result<usize, usize> {
        self.call()?;
        let number = *self.made.borrow();
        *self.made.borrow_mut() += 1;
        self.alive.borrow_mut().push(number);
        Ok(number)
    }
    fn workspace(&self, _: usize, builder: usize) -> Result<Option<usize>, usize> {
        self.call()?;
        Ok((builder > 0).then_some(builder))
    }
    fn set_workspace(&self, _: usize, builder: usize, workspace: usize) -> Result<(), usize> {
        assert!(workspace == 1 && builder > 1);
        self.call()
    }
    fn graph_support(&self, _: usize, _: usize, own: GraphSupport) -> Result<GraphSupport, usize> {
        self.call()?;
        Ok(own)
    }
    fn destroy(&self, _: usize, builder: usize) {
        assert_eq!(self.alive.borrow_mut().pop(), Some(builder));
    }
}

#[test]
fn a_layer_without_its_owner_is_refused() {
    let mut plan = plan_of(&vec![
        (false, false, 1, None),
        (false, false, 1, None),
        (false, false, 1, Some(1)),
    ]);
    let worker = &mut plan.workers[0];
    assert!(AttentionGroups::new(worker, None).is_ok());
    worker.groups[0].layers.retain(|&layer| layer != 1);
    let error = AttentionGroups::new(worker, None).unwrap_err();
    let wanted = GroupsError::OwnerElsewhere {
        layer: "l.2".to_owned(),
        owner: "l.1".to_owned(),
        cache_group: 0,
    };
    assert_eq!(error, wanted);
}

proptest! {
    #[test]
    fn layers_of_a_group_are_alike_and_each_is_in_one(
        layers in prop::collection::vec(
            (any::<bool>(), any::<bool>(), 0u32..3, prop::option::weighted(0.3, 0usize..8)),
            1..16,
        ),
        active in prop::collection::vec(any::<bool>(), 16),
    ) {
        let plan = plan_of(&layers);
        let worker = &plan.workers[0];
        let names: Vec<String> = (0..layers.len())
            .filter(|&i| active[i])
            .map(|i| format!("l.{i}"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let groups = AttentionGroups::new(worker, Some(&names)).unwrap();
        prop_assert_eq!(groups.cache_groups().len(), worker.groups.len());
        let owners = worker.model.owners().unwrap();
        let mut seen = vec![false; layers.len()];
        for (number, (cache_group, _, group)) in groups.iter().enumerate() {
            let of_cache_group = &worker.groups[cache_group];
            let order: Vec<usize> =
                [&of_cache_group.layers[..], &of_cache_group.sharing_layers].concat();
            let places = group.layers.iter().map(|l| order.iter().position(|o| o == l).unwrap());
            prop_assert!(places.is_sorted());
            for &layer in &group.layers {
                prop_assert!(active[layer] && !std::mem::replace(&mut seen[layer], true));
                prop_assert_eq!(groups.group_of(layer), Some(number));
                prop_assert_eq!(groups.cache_group_of(layer), Some(cache_group));
                let of_model = &worker.model.layers()[layer];
                prop_assert_eq!(of_model.num_query_heads, group.num_query_heads);
                prop_assert_eq!(of_model.backend.as_ref().unwrap().name(), group.backend.name());
                prop_assert!(of_cache_group.layers.contains(&owners[layer]));
            }
        }
        for layer in 0..layers.len() {
            prop_assert_eq!(seen[layer], active[layer]);
            prop_assert!(groups.cache_group_of(layer).is_some());
        }
    }

    #[test]
    fn builders_are_balanced_wherever_a_call_fails(
        layers in prop::collection::vec(
            (any::<bool>(), any::<bool>(), 0u32..3, Just(None)),
            1..8,
        ),
        per_group in 1usize..3,
        fail_at in 0usize..40,
    ) {
        let plan = plan_of(&layers);
        let groups = AttentionGroups::new(&plan.workers[0], None).unwrap();
        let (calls, alive, made) = (RefCell::new(0), RefCell::default(), RefCell::new(0));
        let source = Source { fail_at, calls: &calls, alive: &alive, made: &made };
        let count = groups.num_groups() * per_group;
        match Builders::new(source, &groups, per_group) {
            Ok(builders) => {
                prop_assert_eq!(*calls.borrow(), 3 * count);
                prop_assert_eq!(alive.borrow().len(), count);
                prop_assert_eq!(builders.get(groups.num_groups() - 1, per_group - 1), count - 1);
                prop_assert_eq!(builders.graph_support(), groups.promised_graph_support());
                drop(builders);
            }
            Err(error) => {
                prop_assert_eq!(error, BuildersError::Source(fail_at));
                prop_assert_eq!(*calls.borrow(), fail_at + 1);
            }
        }
        prop_assert!(alive.borrow().is_empty());
    }
}
