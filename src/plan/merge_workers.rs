//! The layers of all workers as those of one model.
//!
//! Most workers hold the same layers as another one, so each different list of layers, a stage, is
//! looked at once.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::Worker;
use super::describe::brief;
use super::error::PlanError;
use crate::model::{Layer, Model, Storage};
use crate::spec::Spec;

/// A list of layers that one worker or several hold.
pub(super) struct Stage<'a> {
    /// The first worker that holds it.
    pub worker: usize,
    /// The layers.
    pub model: &'a Arc<Model>,
    /// For each layer the layer that owns its pages.
    pub owners: Vec<usize>,
    /// For each layer its number in the whole model; `None` when it has no pages of its own.
    pub whole: Vec<Option<usize>>,
}

/// The layers of all workers that have pages of their own, each once.
#[derive(Clone)]
pub(super) struct WholeModel<'a> {
    /// The layers, in the order in which the workers name them.
    pub layers: Vec<WholeLayer<'a>>,
    /// The different specs, in the same order.
    pub specs: Vec<Arc<Spec>>,
    /// For each spec the first layer that has it.
    pub first_layers: Vec<usize>,
}

/// A layer of the whole model.
#[derive(Clone, Copy)]
pub(super) struct WholeLayer<'a> {
    /// Its name.
    pub name: &'a str,
    /// Which of the specs it has.
    pub spec: usize,
}

impl<'a> WholeModel<'a> {
    /// The name of the first layer that has a spec.
    pub fn name_of_spec(&self, spec: usize) -> &'a str {
        let layer = self
            .first_layers
            .get(spec)
            .and_then(|&layer| self.layers.get(layer));
        layer.map_or("", |layer| layer.name)
    }
}

/// The stages, and for each worker its stage.
pub(super) fn stages_of(workers: &[Worker]) -> Result<(Vec<Stage<'_>>, Vec<usize>), PlanError> {
    let mut stages: Vec<Stage> = Vec::new();
    let mut stage_of_worker: Vec<usize> = Vec::with_capacity(workers.len());
    let mut by_hash: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut hashed = 0;
    let mut equal = EqualLayers::default();
    for (number, worker) in workers.iter().enumerate() {
        // Ranks of one stage follow each other, so the stage before is worth a look.
        let before = stage_of_worker.last().copied();
        let mut found = before.filter(|&stage| equal.models(stages[stage].model, &worker.model));
        if found.is_none() && !stages.is_empty() {
            for (stage, known) in stages.iter().enumerate().skip(hashed) {
                by_hash
                    .entry(name_hash(known.model))
                    .or_default()
                    .push(stage);
            }
            hashed = stages.len();
            let candidates = by_hash
                .get(&name_hash(&worker.model))
                .map_or(&[][..], Vec::as_slice);
            let mut candidates = candidates.iter().copied();
            found = candidates.find(|&stage| equal.models(stages[stage].model, &worker.model));
        }
        let stage = match found {
            Some(stage) => stage,
            None => {
                stages.push(stage(number, &worker.model)?);
                stages.len() - 1
            }
        };
        stage_of_worker.push(stage);
    }
    Ok((stages, stage_of_worker))
}

fn stage(worker: usize, model: &Arc<Model>) -> Result<Stage<'_>, PlanError> {
    let owners = model
        .owners()
        .map_err(|error| PlanError::Sharing { worker, error })?;
    check_owners_have_caches(model, &owners)?;
    Ok(Stage {
        worker,
        model,
        owners,
        whole: Vec::new(),
    })
}

/// Every layer that shares must share with one that has pages.
pub(super) fn check_owners_have_caches(model: &Model, owners: &[usize]) -> Result<(), PlanError> {
    for (layer, &owner) in model.layers().iter().zip(owners) {
        let Storage::Shared { .. } = layer.storage else {
            continue;
        };
        if let Some(owner) = model.layers().get(owner)
            && !takes_cache(owner)
        {
            return Err(PlanError::ShareTargetWithoutCache {
                layer: layer.name.to_string(),
                target: owner.name.to_string(),
            });
        }
    }
    Ok(())
}

/// Whether a layer has pages of its own.
pub(super) fn takes_cache(layer: &Layer) -> bool {
    layer.own_spec().is_some_and(|spec| spec.takes_cache())
}

fn name_hash(model: &Model) -> u64 {
    // Hashes only find candidates, which are then compared, so their order is no one's business.
    let mut hasher = DefaultHasher::new();
    for layer in model.layers() {
        layer.name.hash(&mut hasher);
    }
    hasher.finish()
}

/// Compares layers of different models. Equal specs are one allocation in a model but two in two
/// models, so a few pairs that were found equal are remembered.
#[derive(Default)]
struct EqualLayers {
    pairs: [(usize, usize); 8],
    next: usize,
}

impl EqualLayers {
    fn models(&mut self, a: &Arc<Model>, b: &Arc<Model>) -> bool {
        if Arc::ptr_eq(a, b) {
            return true;
        }
        let (a, b) = (a.layers(), b.layers());
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.layers(a, b))
    }

    fn layers(&mut self, a: &Layer, b: &Layer) -> bool {
        a.name == b.name
            && self.optional(a.backend.as_ref(), b.backend.as_ref())
            && match (&a.storage, &b.storage) {
                (Storage::Own(a), Storage::Own(b)) => self.values(a, b),
                (
                    Storage::Shared {
                        target: a,
                        spec: own,
                    },
                    Storage::Shared {
                        target: b,
                        spec: other,
                    },
                ) => a == b && self.optional(own.as_ref(), other.as_ref()),
                _ => false,
            }
    }

    fn optional<T: PartialEq>(&mut self, a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
        match (a, b) {
            (Some(a), Some(b)) => self.values(a, b),
            (None, None) => true,
            _ => false,
        }
    }

    fn values<T: PartialEq>(&mut self, a: &Arc<T>, b: &Arc<T>) -> bool {
        if Arc::ptr_eq(a, b) {
            return true;
        }
        let pair = (Arc::as_ptr(a) as usize, Arc::as_ptr(b) as usize);
        if self.pairs.contains(&pair) {
            return true;
        }
        let equal = a == b;
        if equal {
            self.pairs[self.next % self.pairs.len()] = pair;
            self.next += 1;
        }
        equal
    }
}

/// The layers of all stages, each once, and for each stage where its layers are among them.
pub(super) fn merge_stages<'a>(stages: &mut [Stage<'a>]) -> Result<WholeModel<'a>, PlanError> {
    let mut merging = Merging {
        whole: WholeModel {
            layers: Vec::new(),
            specs: Vec::new(),
            first_layers: Vec::new(),
        },
        numbers: SpecNumbers {
            one_model: stages.len() == 1,
            ..SpecNumbers::default()
        },
    };
    match stages {
        // Names are unique in a model, so one model needs no look-up by name.
        [only] => merging.add_new(only),
        _ => {
            let mut by_name = HashMap::new();
            for stage in stages {
                merging.add(stage, &mut by_name)?;
            }
        }
    }
    Ok(merging.whole)
}

/// What is known of a name: the worker that named it first, and what it has there.
#[derive(Clone, Copy)]
struct Named<'a> {
    worker: usize,
    layer: &'a Layer,
    whole: Option<usize>,
}

struct Merging<'a> {
    whole: WholeModel<'a>,
    numbers: SpecNumbers,
}

impl<'a> Merging<'a> {
    fn add_new(&mut self, stage: &mut Stage<'a>) {
        let model: &'a Model = stage.model;
        stage.whole = model
            .layers()
            .iter()
            .map(|layer| self.push(layer))
            .collect();
    }

    fn add(
        &mut self,
        stage: &mut Stage<'a>,
        by_name: &mut HashMap<&'a str, Named<'a>>,
    ) -> Result<(), PlanError> {
        let model: &'a Model = stage.model;
        stage.whole.reserve_exact(model.layers().len());
        for layer in model.layers() {
            let whole = match by_name.get(&*layer.name) {
                Some(named) => {
                    self.check_same(named, stage.worker, layer)?;
                    named.whole
                }
                None => {
                    let whole = self.push(layer);
                    let worker = stage.worker;
                    by_name.insert(
                        &layer.name,
                        Named {
                            worker,
                            layer,
                            whole,
                        },
                    );
                    whole
                }
            };
            stage.whole.push(whole);
        }
        Ok(())
    }

    fn push(&mut self, layer: &'a Layer) -> Option<usize> {
        let spec = layer.own_spec().filter(|spec| spec.takes_cache())?;
        let number = self.whole.layers.len();
        let spec = self.numbers.number(spec, &mut self.whole.specs);
        if spec == self.whole.first_layers.len() {
            self.whole.first_layers.push(number);
        }
        self.whole.layers.push(WholeLayer {
            name: &layer.name,
            spec,
        });
        Some(number)
    }

    fn check_same(
        &mut self,
        named: &Named<'a>,
        worker: usize,
        layer: &Layer,
    ) -> Result<(), PlanError> {
        let same = match (named.layer.own_spec(), layer.own_spec()) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a == b,
            (None, None) => true,
            _ => false,
        };
        if same {
            return Ok(());
        }
        let text = |layer: &Layer| match &layer.storage {
            Storage::Own(spec) => brief(spec),
            Storage::Shared { target, .. } => format!("nothing, but reads {target}"),
        };
        Err(PlanError::WorkerSpecMismatch {
            layer: layer.name.to_string(),
            first_worker: named.worker,
            first: text(named.layer),
            worker,
            other: text(layer),
        })
    }
}

/// Numbers for specs, the same for equal ones.
#[derive(Default)]
pub(super) struct SpecNumbers {
    /// All specs are of one model, which keeps equal specs once: the address is enough.
    one_model: bool,
    last: Option<(usize, usize)>,
    by_address: HashMap<usize, usize>,
    by_value: HashMap<Arc<Spec>, usize>,
}

impl SpecNumbers {
    /// The number of `spec`, which is added to `specs` when it is new.
    pub fn number(&mut self, spec: &Arc<Spec>, specs: &mut Vec<Arc<Spec>>) -> usize {
        let address = Arc::as_ptr(spec) as usize;
        if let Some((last, number)) = self.last
            && last == address
        {
            return number;
        }
        let number = match self.by_address.get(&address) {
            Some(&number) => number,
            None => {
                let number = self.number_of_value(spec, specs);
                self.by_address.insert(address, number);
                number
            }
        };
        self.last = Some((address, number));
        number
    }

    fn number_of_value(&mut self, spec: &Arc<Spec>, specs: &mut Vec<Arc<Spec>>) -> usize {
        let mut add = || {
            specs.push(Arc::clone(spec));
            specs.len() - 1
        };
        if self.one_model {
            return add();
        }
        *self.by_value.entry(Arc::clone(spec)).or_insert_with(add)
    }
}
