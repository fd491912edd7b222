//! The most blocks that ids and kernels can index.

use super::error::PlanError;
use super::kernel_blocks::MAX_BLOCKS;
use super::pack::Pools;
use super::{Group, PlanConfig, Policy};
use crate::backend::{Backend, IndexWidth};
use crate::model::Model;
use crate::spec::Spec;

/// Elements that a signed 32-bit index reaches.
const REACH_32: u64 = 1 << 31;

/// The most blocks that can be indexed, and what stands in the way of more.
pub(super) struct Reach {
    /// Blocks.
    pub blocks: u64,
    layer: String,
    backend: String,
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
    let narrow = groups
        .iter()
        .flat_map(|group| narrow_layers(model, group, pools));
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

fn narrow_layers<'a>(
    model: &'a Model,
    group: &'a Group,
    pools: &'a Pools,
) -> impl Iterator<Item = Reach> + 'a {
    group
        .layers
        .iter()
        .enumerate()
        .filter_map(|(place, &layer)| {
            let layer = model.layers().get(layer)?;
            let backend = layer.backend.as_deref().filter(|b| is_narrow(b))?;
            let spec = group.spec.spec_of(place);
            let step = match pools.is_packed() {
                true => pools.bytes_per_block,
                false => spec.page().padded,
            };
            Some(Reach {
                blocks: reached_bytes(spec, backend)? / step.max(1),
                layer: layer.name.to_string(),
                backend: backend.name().to_owned(),
                step,
            })
        })
}

fn is_narrow(backend: &Backend) -> bool {
    backend.contract().index_width == IndexWidth::Bits32
}

/// Bytes that a backend's kernels reach from the start of a layer's view; `None` for all.
pub(super) fn reached_bytes(spec: &Spec, backend: &Backend) -> Option<u64> {
    let attention = spec.as_attention().filter(|_| is_narrow(backend))?;
    Some(REACH_32 * attention.fields().dtype.bytes())
}
