//! Layers of one group that need the same number of blocks, but store different things.

use std::collections::HashMap;
use std::sync::Arc;

use super::attention::AttentionKind;
use super::demand::{DemandError, Limits};
use super::merge::is_uniform_type;
use super::{Spec, SpecError};
use crate::num::{Overflow, sum};

/// What decides how many blocks a layer needs. Layers of one family and one block size can share
/// a block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Every token stays stored.
    Full,
    /// The last `window` tokens stay stored.
    SlidingWindow(u64),
    /// The tokens of the current chunk stay stored.
    ChunkedLocal(u64),
    /// A state, and states for so many speculative tokens.
    State(u64),
    /// The encoder's tokens.
    Cross,
}

impl Family {
    /// The family of a spec; `None` for one that takes no cache.
    pub fn of(spec: &Spec) -> Option<Family> {
        let fields = match spec {
            Spec::State(state) => {
                return Some(Family::State(state.fields().num_speculative_blocks));
            }
            Spec::Attention(attention) => attention.fields(),
        };
        match fields.kind {
            AttentionKind::EncoderOnly => None,
            AttentionKind::Cross => Some(Family::Cross),
            AttentionKind::ChunkedLocal => fields.attention_chunk_size.map(Family::ChunkedLocal),
            AttentionKind::SlidingWindow | AttentionKind::SlidingWindowMla => {
                fields.sliding_window.map(Family::SlidingWindow)
            }
            _ => Some(Family::Full),
        }
    }
}

/// How many of these pages have the commonest size.
pub fn layers_of_commonest_page(pages: impl Iterator<Item = u64>) -> u64 {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    let mut most = 0;
    for page in pages {
        let count = counts.entry(page).or_default();
        *count += 1;
        most = most.max(*count);
    }
    most
}

/// Specs of layers that are taken together, one for each layer: those of a group, which are of one
/// family and one block size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecSet {
    specs: Vec<Arc<Spec>>,
}

impl SpecSet {
    /// A set, if `specs` are of one family and one block size, and at least one.
    pub fn new(specs: Vec<Arc<Spec>>) -> Option<SpecSet> {
        let refs: Vec<&Spec> = specs.iter().map(Arc::as_ref).collect();
        (!refs.is_empty() && is_uniform_type(&refs) == Some(true)).then_some(SpecSet { specs })
    }

    /// Layers taken together whatever they are, if there is any.
    pub fn of_any(specs: Vec<Arc<Spec>>) -> Option<SpecSet> {
        (!specs.is_empty()).then_some(SpecSet { specs })
    }

    /// The specs, in the order of the group's layers.
    pub fn specs(&self) -> &[Arc<Spec>] {
        &self.specs
    }

    /// Tokens of one block of the first layer.
    pub fn block_size(&self) -> u64 {
        self.specs[0].block_size()
    }

    /// Bytes of one block in all layers together.
    pub fn page_bytes(&self) -> Result<u64, Overflow> {
        sum(
            "the pages of a group",
            self.specs.iter().map(|spec| spec.page().padded),
        )
    }

    /// The different pages' bytes, smallest first.
    pub fn distinct_pages(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.specs.iter().map(|spec| spec.page().padded).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// How many layers have the commonest page: the layer tuples the set splits into.
    pub fn num_layer_tuples(&self) -> u64 {
        layers_of_commonest_page(self.specs.iter().map(|spec| spec.page().padded))
    }

    /// The most blocks a request can hold.
    pub fn blocks_per_request(&self, limits: &Limits) -> Result<u64, DemandError> {
        let mut blocks = self
            .specs
            .iter()
            .map(|spec| spec.blocks_per_request(limits));
        blocks.try_fold(0, |most, blocks| Ok(most.max(blocks?)))
    }

    /// Entries of a block-table row for a sequence of `tokens`. As the reference has it, a set does
    /// not share its tokens over context-parallel ranks, so its rows are wider than they must be.
    pub fn row_blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.block_size())
    }

    /// The same set without some of its layers.
    pub fn restricted_to(&self, keep: impl Fn(usize) -> bool) -> Option<SpecSet> {
        let kept = self.specs.iter().enumerate().filter(|(i, _)| keep(*i));
        SpecSet::new(kept.map(|(_, spec)| Arc::clone(spec)).collect())
    }

    /// The same set with one spec changed; still of one family, since only padding may change.
    pub fn with_page_size_padded(&self, layer: usize, padded: u64) -> Result<SpecSet, SpecError> {
        let mut specs = self.specs.clone();
        specs[layer] = Arc::new(specs[layer].with_page_size_padded(Some(padded))?);
        Ok(SpecSet { specs })
    }
}
