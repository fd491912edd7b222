//! The most blocks that ids and kernels can index.

use super::error::PlanError;
use super::kernel_blocks::MAX_BLOCKS;
use super::pack::Pools;
use super::{Group, PlanConfig, Policy, WorkerPlan};
use crate::backend::{Backend, IndexWidth, ScalePlacement};
use crate::model::{Layer, Model};
use crate::spec::{Attention, Content, Spec, StatePart};

/// Elements that a signed 32-bit index reaches.
const REACH_32: u64 = 1 << 31;

/// The most blocks that can be indexed, and what stands in the way of more.
pub(super) struct Reach {
    /// Blocks.
    pub blocks: u64,
    /// The layer whose kernels reach no more; empty when ids are too narrow.
    pub layer: String,
    /// Its backend.
    pub backend: String,
    /// Bytes from block to block.
    step: u64,
}

impl Reach {
    /// That `wanted` blocks are more.
    pub fn too_short(&self, wanted: u64) -> PlanError {
        PlanError::IndexTooNarrow {
            layer: self.layer.clone(),
            backend: self.backend.clone(),
            step: self.step,
            wanted,
            allowed: self.blocks,
        }
    }
}

/// The most blocks that every kernel of a stage can index. The reference takes as many blocks as
/// memory holds, and a view that is too large is refused when it is made; here there are fewer
/// blocks. `None` where nothing stands in the way.
pub(super) fn of_stage(
    model: &Model,
    groups: &[Group],
    pools: &Pools,
    config: &PlanConfig,
) -> Option<Reach> {
    if config.policy == Policy::Reference {
        return None;
    }
    let ids = match config.num_blocks_override {
        // An engine that says a number is told that it is too large.
        Some(_) => None,
        None => ids_of(groups).map(|blocks| Reach {
            blocks,
            layer: String::new(),
            backend: String::new(),
            step: 0,
        }),
    };
    let packed_step = pools.is_packed().then_some(pools.bytes_per_block);
    let narrow = groups
        .iter()
        .flat_map(|group| narrow_layers(model, group, packed_step));
    ids.into_iter()
        .chain(narrow)
        .min_by_key(|reach| reach.blocks)
}

/// Blocks whose kernel blocks all have a 32-bit id.
fn ids_of(groups: &[Group]) -> Option<u64> {
    let ratios = groups.iter().map(|group| {
        let kernel = group.kernel_block_size.filter(|&size| size > 0);
        kernel.map_or(1, |size| (group.spec.block_size() / size).max(1))
    });
    ratios.max().map(|ratio| MAX_BLOCKS / ratio)
}

/// What stands in the way of more blocks of a finished plan, ids left out; `None` where every kernel
/// computes with 64 bits.
pub(super) fn of_plan(worker: &WorkerPlan) -> Option<Reach> {
    let is_packed = worker.tensors.iter().any(|tensor| tensor.block_stride > 0);
    let packed_step = is_packed.then_some(worker.bytes_per_block);
    let groups = worker.groups.iter();
    let narrow = groups.flat_map(|group| narrow_layers(&worker.model, group, packed_step));
    narrow.min_by_key(|reach| reach.blocks)
}

/// The layers of a group whose kernels compute with 32 bits, those that share included: they read
/// the same pages. `packed_step`: bytes from block to block where pages are packed.
fn narrow_layers<'a>(
    model: &'a Model,
    group: &'a Group,
    packed_step: Option<u64>,
) -> impl Iterator<Item = Reach> + 'a {
    readers(model, group).filter_map(move |(place, layer)| {
        let backend = layer.backend.as_deref().filter(|b| is_narrow(b))?;
        let spec = group.spec.spec_of(place);
        let step = packed_step.unwrap_or(spec.page().padded);
        let kernel_blocks = kernel_blocks_of_block(spec, group.kernel_block_size);
        Some(Reach {
            blocks: reached_blocks(spec, backend, kernel_blocks, step)?,
            layer: layer.name.to_string(),
            backend: backend.name().to_owned(),
            step,
        })
    })
}

/// The layers that read a group's pages, each with the place in the group of the layer whose pages
/// they are.
pub(super) fn readers<'a>(
    model: &'a Model,
    group: &'a Group,
) -> impl Iterator<Item = (usize, &'a Layer)> {
    // Nearly no model shares, and finding owners goes through all layers.
    let owners = match group.sharing_layers.is_empty() {
        true => Vec::new(),
        false => model.owners().unwrap_or_default(),
    };
    let own = group.layers.iter().copied().enumerate();
    let sharing = group.sharing_layers.iter().filter_map(move |&layer| {
        let owner = owners.get(layer)?;
        let place = group.layers.iter().position(|own| own == owner)?;
        Some((place, layer))
    });
    let all = own.chain(sharing);
    all.filter_map(|(place, layer)| Some((place, model.layers().get(layer)?)))
}

fn is_narrow(backend: &Backend) -> bool {
    backend.contract().index_width == IndexWidth::Bits32
}

/// Kernel blocks that a block of a layer is split into. States and compressed layers are not split.
fn kernel_blocks_of_block(spec: &Spec, kernel_block_size: Option<u64>) -> u64 {
    let block_size = spec.block_size();
    match (spec.as_attention(), kernel_block_size) {
        (Some(attention), Some(size)) if attention.storage_block_size() == block_size => {
            (block_size / size.max(1)).max(1)
        }
        _ => 1,
    }
}

/// Bytes that a backend's kernels reach from the start of a layer's view; `None` for all. Of a layer
/// with several states, what the narrowest elements reach.
pub(super) fn reached_bytes(spec: &Spec, backend: &Backend) -> Option<u64> {
    if !is_narrow(backend) {
        return None;
    }
    match spec {
        Spec::Attention(attention) => Some(REACH_32 * attention.fields().dtype.bytes()),
        Spec::State(state) => state
            .parts()
            .map(|part| REACH_32 * part.dtype.bytes())
            .min(),
    }
}

/// Blocks, `step` bytes from each to the next, whose elements a narrow backend's kernels all reach.
/// Of the last block only what the layer stores in it counts.
fn reached_blocks(spec: &Spec, backend: &Backend, kernel_blocks: u64, step: u64) -> Option<u64> {
    let blocks = |reached: u64, last: u64| match reached.checked_sub(last) {
        Some(rest) => rest / step.max(1) + 1,
        None => 0,
    };
    match spec {
        Spec::Attention(attention) => {
            let reached = reached_bytes(spec, backend)?;
            Some(blocks(
                reached,
                last_block_bytes(attention, backend, kernel_blocks),
            ))
        }
        Spec::State(state) => {
            let of_part = |part: StatePart<'_>| {
                let elements = part
                    .shape
                    .iter()
                    .fold(1, |all: u64, &n| all.saturating_mul(n));
                let bytes = part.dtype.bytes();
                blocks(REACH_32 * bytes, elements.saturating_mul(bytes))
            };
            state.parts().map(of_part).min()
        }
    }
}

/// From the start of a page to the end of its last kernel block's content.
fn last_block_bytes(attention: &Attention, backend: &Backend, kernel_blocks: u64) -> u64 {
    let page = attention.page();
    let scales = match backend.contract().scale_placement {
        ScalePlacement::Inline => 0,
        // Behind the data and outside the view.
        ScalePlacement::PageEnd => {
            let each = match attention.content() {
                Content::KeyValue { .. } => 2 * attention.scale_bytes(),
                Content::Single(_) | Content::PackedPair(_) => attention.scale_bytes(),
            };
            let slots = attention
                .stored_heads()
                .saturating_mul(attention.storage_block_size());
            each.saturating_mul(slots)
        }
    };
    let content = page.unpadded.saturating_sub(scales) / kernel_blocks.max(1);
    let before = page.padded / kernel_blocks.max(1) * (kernel_blocks.max(1) - 1);
    before.saturating_add(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::testing::{full, padded, state, strided};

    fn narrow() -> Backend {
        let contract = crate::backend::Preset::FlashAttentionNhd.contract();
        Backend::new(crate::backend::Contract {
            index_width: IndexWidth::Bits32,
            ..contract.unwrap()
        })
        .unwrap()
    }

    /// L01 and L02 in their own numbers: the last element is at most 2^31 − 1.
    #[test]
    fn the_most_blocks_are_those_whose_last_element_is_reached() {
        // One u8 head: a page of 480 · 576 bytes in 480 tokens.
        let dense = full(480, 288);
        assert_eq!(dense.page().padded, 480 * 576);
        assert_eq!(reached_blocks(&dense, &narrow(), 1, 480 * 576), Some(7767));
        // Pages that step 1039680 bytes: with all of them filled 2065, with a start of them 2066.
        let slab = full(1, 1_039_680 / 2);
        assert_eq!(reached_blocks(&slab, &narrow(), 1, 1_039_680), Some(2065));
        let start = padded(strided(full(1, 256)), 1_039_680);
        assert_eq!(reached_blocks(&start, &narrow(), 1, 1_039_680), Some(2066));
        for (spec, blocks) in [(&dense, 7767u64), (&slab, 2065), (&start, 2066)] {
            let page = spec.page();
            let last = |blocks: u64| (blocks - 1) * page.padded + page.unpadded - 1;
            assert!(last(blocks) <= i32::MAX as u64 && last(blocks + 1) > i32::MAX as u64);
        }
        // Four bytes each: as many elements are four times the bytes.
        let of_state = reached_blocks(&state(1 << 20), &narrow(), 1, 1 << 22);
        assert_eq!(of_state, Some(1 << 11));
    }

    #[test]
    fn the_last_kernel_block_may_lie_before_the_padding() {
        // 2 kernel blocks of 8 tokens in 64 bytes each, every 128: the last ends 64 before the page.
        let spec = padded(strided(full(16, 4)), 256);
        let attention = spec.as_attention().unwrap();
        assert_eq!(last_block_bytes(attention, &narrow(), 2), 128 + 64);
        assert_eq!(last_block_bytes(attention, &narrow(), 1), 128);
    }
}
