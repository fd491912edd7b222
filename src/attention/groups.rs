//! Which layers one metadata builder can serve.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::model::SharingError;
use crate::plan::{Group, WorkerPlan};
use crate::spec::{Spec, SpecError};

/// The attention groups of one worker, cache group by cache group.
#[derive(Debug, Clone)]
pub struct AttentionGroups {
    cache_groups: Vec<CacheGroup>,
    /// For each layer of the model where it is.
    places: Vec<Place>,
    num_groups: usize,
}

/// The attention groups of one KV-cache group.
#[derive(Debug, Clone)]
pub struct CacheGroup {
    /// Tokens of a kernel block; `None` for a group without cache.
    pub kernel_block_size: Option<u64>,
    /// The groups, in the order in which their first layers come.
    pub groups: Vec<AttentionGroup>,
    /// The number of the first of `groups` among those of all cache groups.
    pub first: usize,
}

/// Layers of one cache group that read the same thing in the same way.
#[derive(Debug, Clone)]
pub struct AttentionGroup {
    /// What reads them.
    pub backend: Arc<Backend>,
    /// What they store; layers that share, what their owner stores.
    pub spec: Arc<Spec>,
    /// The same in kernel blocks, where there are any.
    pub kernel_spec: Arc<Spec>,
    /// Query heads on one rank.
    pub num_query_heads: u32,
    /// The layers, by their number in the model.
    pub layers: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Place {
    cache_group: Option<usize>,
    group: Option<usize>,
}

/// Why there are no attention groups.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupsError {
    /// An active layer that the model does not have.
    #[error("active layer {layer}: the worker's model has no layer of that name")]
    UnknownLayer {
        /// The name.
        layer: String,
    },
    /// Sharing that does not resolve.
    #[error(transparent)]
    Sharing(#[from] SharingError),
    /// A layer whose owner is in another cache group than it, or in none.
    #[error("layer {layer}: its owner {owner} is not in cache group {cache_group}")]
    OwnerElsewhere {
        /// The layer.
        layer: String,
        /// The layer whose pages it reads.
        owner: String,
        /// The cache group that the layer is in.
        cache_group: usize,
    },
    /// Layers that cannot be read in the group's kernel blocks.
    #[error("layer {layer}: in kernel blocks of {kernel_block_size} tokens: {error}")]
    KernelSpec {
        /// The layer.
        layer: String,
        /// Tokens of a kernel block of its group.
        kernel_block_size: u64,
        /// What is wrong.
        error: SpecError,
    },
}

impl AttentionGroups {
    /// Groups the layers of a worker by backend, spec and query heads. `active` names the layers
    /// that take part; `None` for all. A layer without a backend is in no attention group.
    pub fn new(plan: &WorkerPlan, active: Option<&[&str]>) -> Result<AttentionGroups, GroupsError> {
        let layers = plan.model.layers();
        let is_active = active_layers(plan, active)?;
        let owners = plan.model.owners()?;
        let mut places = vec![Place::default(); layers.len()];
        let mut cache_groups = Vec::with_capacity(plan.groups.len());
        let mut num_groups = 0;
        for (number, cache_group) in plan.groups.iter().enumerate() {
            let mut place_of_owner = HashMap::with_capacity(cache_group.layers.len());
            for (place, &layer) in cache_group.layers.iter().enumerate() {
                place_of_owner.insert(layer, place);
            }
            let splits_compressed = splits_compressed(cache_group);
            let mut groups: Vec<AttentionGroup> = Vec::new();
            let mut known: HashMap<(&str, &Spec, u32), usize> = HashMap::new();
            for &layer in cache_group.layers.iter().chain(&cache_group.sharing_layers) {
                places[layer].cache_group = Some(number);
                let Some(backend) = &layers[layer].backend else {
                    continue;
                };
                if !is_active[layer] {
                    continue;
                }
                let place = place_of_owner.get(&owners[layer]);
                let &place = place.ok_or_else(|| GroupsError::OwnerElsewhere {
                    layer: layers[layer].name.to_string(),
                    owner: layers[owners[layer]].name.to_string(),
                    cache_group: number,
                })?;
                let spec = cache_group.spec.spec_of(place);
                let heads = layers[layer].num_query_heads;
                let group = *known
                    .entry((backend.name(), &**spec, heads))
                    .or_insert(groups.len());
                if group == groups.len() {
                    let kernel = match is_compressed(spec) && !splits_compressed {
                        true => None,
                        false => cache_group.kernel_block_size,
                    };
                    groups.push(AttentionGroup {
                        backend: Arc::clone(backend),
                        spec: Arc::clone(spec),
                        kernel_spec: kernel_spec(&layers[layer].name, spec, kernel)?,
                        num_query_heads: heads,
                        layers: Vec::new(),
                    });
                }
                groups[group].layers.push(layer);
                places[layer].group = Some(num_groups + group);
            }
            let first = num_groups;
            num_groups += groups.len();
            cache_groups.push(CacheGroup {
                kernel_block_size: cache_group.kernel_block_size,
                groups,
                first,
            });
        }
        Ok(AttentionGroups {
            cache_groups,
            places,
            num_groups,
        })
    }

    /// The cache groups, by their number in the plan.
    pub fn cache_groups(&self) -> &[CacheGroup] {
        &self.cache_groups
    }

    /// How many attention groups all cache groups have together.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// The attention groups of all cache groups, each with its cache group and its number there.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, &AttentionGroup)> {
        self.cache_groups.iter().enumerate().flat_map(|(c, group)| {
            let groups = group.groups.iter().enumerate();
            groups.map(move |(g, group)| (c, g, group))
        })
    }

    /// The attention group of a layer among those of all cache groups.
    pub fn group_of(&self, layer: usize) -> Option<usize> {
        self.places.get(layer)?.group
    }

    /// The cache group of a layer, active or not.
    pub fn cache_group_of(&self, layer: usize) -> Option<usize> {
        self.places.get(layer)?.cache_group
    }
}

fn active_layers(plan: &WorkerPlan, active: Option<&[&str]>) -> Result<Vec<bool>, GroupsError> {
    let num_layers = plan.model.layers().len();
    let Some(names) = active else {
        return Ok(vec![true; num_layers]);
    };
    let mut is_active = vec![false; num_layers];
    for &name in names {
        let layer = plan.model.find(name);
        let layer = layer.ok_or_else(|| GroupsError::UnknownLayer {
            layer: name.to_owned(),
        })?;
        is_active[layer] = true;
    }
    Ok(is_active)
}

fn is_compressed(spec: &Spec) -> bool {
    spec.storage_block_size() != spec.block_size()
}

/// Whether all compressed layers of a cache group can be told of in kernel blocks: those that
/// cannot would follow another block size than the rest.
fn splits_compressed(group: &Group) -> bool {
    let Some(size) = group.kernel_block_size else {
        return true;
    };
    let mut specs = group.spec.specs().iter();
    specs.all(|spec| !is_compressed(spec) || spec.with_block_size(size).is_ok())
}

fn kernel_spec(
    layer: &str,
    spec: &Arc<Spec>,
    kernel_block_size: Option<u64>,
) -> Result<Arc<Spec>, GroupsError> {
    match kernel_block_size {
        Some(size) if size != spec.block_size() => spec
            .with_block_size(size)
            .map(Arc::new)
            .map_err(|error| GroupsError::KernelSpec {
                layer: layer.to_owned(),
                kernel_block_size: size,
                error,
            }),
        _ => Ok(Arc::clone(spec)),
    }
}
