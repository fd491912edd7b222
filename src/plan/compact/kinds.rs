//! Layers of one spec, and which backends read them.

use std::sync::Arc;

use super::contract;
use crate::backend::Backend;
use crate::plan::PlanConfig;
use crate::plan::error::PlanError;
use crate::plan::finish::Job;
use crate::plan::merge_workers::WholeModel;
use crate::spec::{AttentionKind, Spec, SpecError};

/// Tokens of a block that is chosen, at least, unless the engine's own has fewer: smaller blocks save next
/// to nothing, and make block tables long.
const FEWEST_TOKENS: u64 = 16;

/// Layers of the whole model that have one spec.
pub(super) struct Kind<'a> {
    /// The name of the first one, for messages.
    pub name: &'a str,
    /// What they store, in the smallest block and page that they may have.
    pub smallest: Arc<Spec>,
    /// Their numbers in the whole model.
    pub layers: Vec<usize>,
    /// How many of them each stage has.
    pub on_stages: Vec<u64>,
    /// The different backends that read them.
    pub backends: Vec<&'a Backend>,
    /// Whether their pages may get padding.
    pub may_pad: bool,
}

impl Kind<'_> {
    /// Bytes that a block of the smallest size takes of a page that holds several: what it stores, and
    /// padding that was given.
    pub fn unit(&self) -> u64 {
        let page = self.smallest.page();
        let attention = self.smallest.as_attention();
        let given = attention.and_then(|attention| attention.fields().page_size_padded);
        given.map_or(page.unpadded, |_| page.padded).max(1)
    }
}

/// The kinds of layers of the whole model, in the order of their first layers.
pub(super) fn of<'a>(
    job: &Job<'a>,
    whole: &WholeModel<'a>,
    config: &PlanConfig,
) -> Result<Vec<Kind<'a>>, PlanError> {
    let mut kinds: Vec<Kind<'a>> = Vec::with_capacity(whole.specs.len());
    for (number, spec) in whole.specs.iter().enumerate() {
        kinds.push(Kind {
            name: whole.name_of_spec(number),
            smallest: Arc::clone(spec),
            layers: Vec::new(),
            on_stages: vec![0; job.stages.len()],
            backends: Vec::new(),
            may_pad: true,
        });
    }
    for (number, layer) in whole.layers.iter().enumerate() {
        kinds[layer.spec].layers.push(number);
    }
    for (number, stage) in job.stages.iter().enumerate() {
        for (layer, &own) in stage.whole.iter().enumerate() {
            if let Some(own) = own {
                kinds[whole.layers[own].spec].on_stages[number] += 1;
            }
            // Layers that share read their owner's pages.
            let Some(owner) = stage.whole[stage.owners[layer]] else {
                continue;
            };
            if let Some(backend) = &stage.model.layers()[layer].backend {
                add(&mut kinds[whole.layers[owner].spec].backends, backend);
            }
        }
    }
    for kind in &mut kinds {
        if let Spec::Attention(attention) = kind.smallest.as_ref() {
            kind.may_pad = contract::may_pad(attention, &kind.backends);
        }
        let smallest = smallest(&kind.smallest, &kind.backends, config);
        if let Some(spec) = smallest.map_err(|error| PlanError::spec(kind.name, error))? {
            kind.smallest = Arc::new(spec);
        }
    }
    Ok(kinds)
}

/// Adds a backend to different ones, if it is not one of them.
pub(super) fn add<'a>(backends: &mut Vec<&'a Backend>, backend: &'a Backend) {
    let is_same = |known: &&Backend| std::ptr::eq(*known, backend) || **known == *backend;
    if !backends.iter().any(is_same) {
        backends.push(backend);
    }
}

/// The spec in its smallest block; `None` where that is the one it has.
fn smallest(
    spec: &Spec,
    backends: &[&Backend],
    config: &PlanConfig,
) -> Result<Option<Spec>, SpecError> {
    let attention = match spec {
        Spec::State(_) => {
            return match config.choose_block_sizes {
                // One that needs its padding, as some of two types do, keeps it.
                true => Ok(spec.with_page_size_padded(None).ok()),
                false => Ok(None),
            };
        }
        Spec::Attention(attention) => attention,
    };
    let fields = attention.fields();
    // As many hidden states lie in a block as its page holds, so one is the least.
    let is_open = config.choose_block_sizes || fields.kind == AttentionKind::HiddenState;
    if !is_open {
        return Ok(None);
    }
    let (at_least, fallback) = match config.choose_block_sizes {
        true => (FEWEST_TOKENS.min(fields.block_size), fields.block_size),
        false if backends.is_empty() => (1, fields.compress_ratio),
        false => (1, fields.block_size),
    };
    let block_size = contract::smallest_block(backends, fields.compress_ratio, at_least, fallback);
    let changed = attention.changed(|fields| {
        fields.block_size = block_size;
        fields.page_size_padded = None;
    });
    changed.map(|attention| Some(Spec::Attention(attention)))
}
