//! A plan that the engine made itself: checked, completed, and laid out as it says.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::PlanError;
use super::group::spec_of_given;
use super::merge_workers::{check_owners_have_caches, takes_cache};
use super::{Group, Plan, PlanConfig, Policy, PoolTensor, WorkerPlan, kernel_blocks};
use crate::model::Model;
use crate::num::{product, sum};
use crate::spec::{Counting, Limits, Spec, StateCacheMode};

/// A plan as an engine states it. Layers are given by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// Blocks of every group.
    pub num_blocks: u64,
    /// Layers that share a block table.
    pub groups: Vec<PartGroup>,
    /// The allocations.
    pub tensors: Vec<PartTensor>,
    /// Tokens of a kernel block of each group, 0 where there is none; `None` to have them chosen.
    pub kernel_block_sizes: Option<Vec<u64>>,
}

/// Layers that share a block table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartGroup {
    /// The layers, those that share another layer's pages included.
    pub layers: Vec<String>,
    /// Whether it holds layers of a speculative draft.
    pub is_draft: bool,
}

/// One allocation, or one slot of the packed one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartTensor {
    /// Bytes; of a packed tensor, those of the one backing that all packed tensors share.
    pub size: u64,
    /// Packed: where the layer's page starts in a block.
    pub offset: u64,
    /// Packed: bytes from block to block. 0 when not packed.
    pub block_stride: u64,
    /// The layers that have their pages in it.
    pub layers: Vec<String>,
}

/// Checks an engine's own plan of one worker and completes it. The layers' specs are the model's.
///
/// The limits of a request are not known: the plan's longest sequence, concurrency and capacity
/// are 0.
pub fn plan_from_parts(model: Arc<Model>, parts: Parts) -> Result<Plan, PlanError> {
    let owners = model
        .owners()
        .map_err(|error| PlanError::Sharing { worker: 0, error })?;
    check_owners_have_caches(&model, &owners)?;
    kernel_blocks::check_heads(&model, &owners)?;
    check_array_lengths(&parts)?;
    let group_of = groups_of_layers(&model, &parts)?;
    let tensor_of = tensors_of_layers(&model, &parts)?;
    check_places(&model, &owners, &group_of, &tensor_of)?;
    let mut groups = groups(&model, &parts)?;
    set_kernel_blocks(&model, &parts, &mut groups)?;
    let tensors = tensors(&model, &parts);
    let checks = TensorChecks {
        model: &model,
        num_blocks: parts.num_blocks,
        groups: &groups,
        group_of: &group_of,
    };
    checks.all(&tensors)?;
    let bytes_per_block = checks.bytes_per_block(&tensors)?;
    let mut plan = WorkerPlan {
        model: Arc::clone(&model),
        memory_bytes: 0,
        num_blocks: parts.num_blocks,
        groups,
        tensors,
        bytes_per_request: 0,
        bytes_per_block,
        max_concurrency: 0.0,
        capacity_tokens: 0,
        needs_zeroing: false,
    };
    plan.needs_zeroing = kernel_blocks::needs_zeroing(&plan);
    kernel_blocks::check_ids(&plan)?;
    Ok(Plan {
        config: unknown_config(),
        asked: None,
        workers: vec![plan],
    })
}

fn unknown_config() -> PlanConfig {
    PlanConfig {
        policy: Policy::Reference,
        limits: Limits {
            max_model_len: 0,
            // Block-table rows divide by it.
            context_parallel_size: 1,
            max_tokens_in_flight: 0,
            max_encoder_tokens: 0,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: None,
        reserved_blocks: 0,
        has_draft_layers: false,
        typical_len: 0,
        choose_block_sizes: false,
    }
}

/// For each layer of the model its group.
fn groups_of_layers(model: &Model, parts: &Parts) -> Result<Vec<Option<usize>>, PlanError> {
    let mut group_of = vec![None; model.layers().len()];
    for (group, given) in parts.groups.iter().enumerate() {
        for name in &given.layers {
            let layer = model.find(name).ok_or_else(|| PlanError::LayerMissing {
                group,
                layer: name.clone(),
            })?;
            if let Some(first) = group_of[layer].replace(group) {
                return Err(PlanError::LayerInTwoGroups {
                    layer: name.clone(),
                    first,
                    second: group,
                });
            }
        }
    }
    Ok(group_of)
}

/// For each layer of the model its tensor.
fn tensors_of_layers(model: &Model, parts: &Parts) -> Result<Vec<Option<usize>>, PlanError> {
    let mut tensor_of = vec![None; model.layers().len()];
    for (tensor, given) in parts.tensors.iter().enumerate() {
        for name in &given.layers {
            let layer = model
                .find(name)
                .ok_or_else(|| PlanError::LayersNotInitialized {
                    layer: name.clone(),
                    problem: "is in a tensor, but the model does not have it",
                })?;
            if let Some(first) = tensor_of[layer].replace(tensor) {
                return Err(PlanError::LayerInTwoTensors {
                    layer: name.clone(),
                    first,
                    second: tensor,
                });
            }
        }
    }
    Ok(tensor_of)
}

/// Every layer must be where its kind belongs, and nowhere else.
fn check_places(
    model: &Model,
    owners: &[usize],
    group_of: &[Option<usize>],
    tensor_of: &[Option<usize>],
) -> Result<(), PlanError> {
    for (number, layer) in model.layers().iter().enumerate() {
        let (group, tensor) = (group_of[number], tensor_of[number]);
        let owns = takes_cache(layer);
        let shares = layer.own_spec().is_none();
        let problem = match (group, tensor) {
            (None, Some(_)) if owns => Some("is in a tensor, but in no group"),
            (Some(_), None) if owns => Some("is in a group, but in no tensor"),
            (None, None) if owns => {
                return Err(PlanError::RawTensorMissing {
                    layer: layer.name.to_string(),
                });
            }
            (None, _) if shares => Some("shares another layer's cache, but is in no group"),
            (_, Some(_)) if shares => Some("shares another layer's cache, but is in a tensor"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(PlanError::LayersNotInitialized {
                layer: layer.name.to_string(),
                problem,
            });
        }
        let owner = owners[number];
        if let (Some(group), Some(owner_group)) = (group, group_of[owner])
            && group != owner_group
        {
            return Err(PlanError::SharerInOtherGroup {
                layer: layer.name.to_string(),
                group,
                owner: model.layers()[owner].name.to_string(),
                owner_group,
            });
        }
    }
    Ok(())
}

fn groups(model: &Model, parts: &Parts) -> Result<Vec<Group>, PlanError> {
    let mut groups = Vec::with_capacity(parts.groups.len());
    for (number, given) in parts.groups.iter().enumerate() {
        let mut layers = Vec::with_capacity(given.layers.len());
        let mut sharing_layers = Vec::new();
        let mut specs = Vec::with_capacity(given.layers.len());
        for layer in numbers(model, &given.layers) {
            let Some(known) = model.layers().get(layer) else {
                continue;
            };
            match known.own_spec() {
                Some(spec) => {
                    layers.push(layer);
                    specs.push((&*known.name, spec));
                }
                None => sharing_layers.push(layer),
            }
        }
        sharing_layers.sort_unstable();
        let spec = spec_of_given(number, &specs)?.ok_or(PlanError::EmptyGroup { group: number })?;
        groups.push(Group {
            layers,
            sharing_layers,
            spec,
            kernel_block_size: None,
            is_draft: given.is_draft,
        });
    }
    Ok(groups)
}

/// The numbers of named layers; all names are known by now.
fn numbers(model: &Model, names: &[String]) -> impl Iterator<Item = usize> {
    names.iter().filter_map(|name| model.find(name))
}

fn check_array_lengths(parts: &Parts) -> Result<(), PlanError> {
    let groups = parts.groups.len();
    match &parts.kernel_block_sizes {
        Some(sizes) if sizes.len() != groups => Err(PlanError::PerGroupArrayLength {
            array: "kernel_block_sizes",
            given: sizes.len(),
            groups,
        }),
        _ => Ok(()),
    }
}

fn set_kernel_blocks(model: &Model, parts: &Parts, groups: &mut [Group]) -> Result<(), PlanError> {
    for (number, group) in groups.iter_mut().enumerate() {
        let given = parts
            .kernel_block_sizes
            .as_ref()
            .and_then(|sizes| sizes.get(number));
        group.kernel_block_size = match given.copied() {
            None => kernel_blocks::select(model, number, group)?,
            Some(size) if size > 0 && group.spec.first().takes_cache() => {
                kernel_blocks::check_given(model, number, group, size)?;
                Some(size)
            }
            Some(_) => None,
        };
    }
    Ok(())
}

/// An encoder-only layer has no pages, so its name in a tensor means nothing.
fn tensors(model: &Model, parts: &Parts) -> Vec<PoolTensor> {
    let has_pages = |layer: &usize| model.layers().get(*layer).is_some_and(takes_cache);
    let tensors = parts.tensors.iter().map(|given| PoolTensor {
        size: given.size,
        offset: given.offset,
        block_stride: given.block_stride,
        layers: numbers(model, &given.layers).filter(has_pages).collect(),
    });
    tensors.collect()
}

struct TensorChecks<'a> {
    model: &'a Model,
    num_blocks: u64,
    groups: &'a [Group],
    group_of: &'a [Option<usize>],
}

impl TensorChecks<'_> {
    fn all(&self, tensors: &[PoolTensor]) -> Result<(), PlanError> {
        let mut packed: Vec<(usize, &PoolTensor)> = Vec::new();
        for (number, tensor) in tensors.iter().enumerate() {
            if tensor.block_stride > 0 {
                packed.push((number, tensor));
            } else {
                self.plain(number, tensor)?;
            }
        }
        self.packed(&packed)
    }

    fn plain(&self, number: usize, tensor: &PoolTensor) -> Result<(), PlanError> {
        if tensor.offset != 0 {
            return Err(PlanError::OffsetWithoutStride {
                tensor: number,
                offset: tensor.offset,
            });
        }
        let mut layer_of_group: HashMap<usize, usize> = HashMap::new();
        for &layer in &tensor.layers {
            self.blocks(number, tensor.size, layer, self.page(layer))?;
            let Some(group) = self.group(layer) else {
                continue;
            };
            if let Some(other) = layer_of_group.insert(group, layer) {
                return Err(self.overlap(group, other, layer));
            }
        }
        Ok(())
    }

    /// The packed tensors are one backing with a slot for each tensor.
    fn packed(&self, tensors: &[(usize, &PoolTensor)]) -> Result<(), PlanError> {
        let Some(&(first, model)) = tensors.first() else {
            return Ok(());
        };
        for &(number, tensor) in tensors {
            if tensor.size != model.size {
                return Err(PlanError::PackedSizeMismatch {
                    first,
                    first_size: model.size,
                    tensor: number,
                    size: tensor.size,
                });
            }
            if tensor.block_stride != model.block_stride {
                return Err(PlanError::PackedStrideMismatch {
                    first,
                    first_stride: model.block_stride,
                    tensor: number,
                    stride: tensor.block_stride,
                });
            }
        }
        // Ends of the slots of each group, in the order of their starts.
        let mut slots: Vec<(usize, u64, u64, usize)> = Vec::new();
        for &(number, tensor) in tensors {
            for &layer in &tensor.layers {
                let page = self.page(layer);
                let end = sum("a packed slot", [tensor.offset, page])
                    .map_err(|error| PlanError::overflow(self.name(layer), error))?;
                if end > tensor.block_stride {
                    return Err(PlanError::SlotOutsideBlock {
                        layer: self.name(layer).to_owned(),
                        page,
                        offset: tensor.offset,
                        stride: tensor.block_stride,
                    });
                }
                self.blocks(number, tensor.size, layer, tensor.block_stride)?;
                slots.extend(
                    self.group(layer)
                        .map(|group| (group, tensor.offset, end, layer)),
                );
            }
        }
        slots.sort_unstable();
        for pair in slots.windows(2) {
            if let [(group, _, end, first), (other, start, _, second)] = pair
                && group == other
                && start < end
            {
                return Err(self.overlap(*group, *first, *second));
            }
        }
        Ok(())
    }

    /// The tensor must hold exactly the plan's blocks.
    fn blocks(&self, tensor: usize, size: u64, layer: usize, page: u64) -> Result<(), PlanError> {
        if page == 0 || !size.is_multiple_of(page) {
            return Err(PlanError::TensorNotMultipleOfPage {
                tensor,
                size,
                layer: self.name(layer).to_owned(),
                page,
            });
        }
        if size / page != self.num_blocks {
            return Err(PlanError::NumBlocksMismatch {
                tensor,
                size,
                layer: self.name(layer).to_owned(),
                page,
                held: size / page,
                num_blocks: self.num_blocks,
            });
        }
        Ok(())
    }

    fn bytes_per_block(&self, tensors: &[PoolTensor]) -> Result<u64, PlanError> {
        let packed = tensors.iter().find(|tensor| tensor.block_stride > 0);
        let plain = tensors.iter().filter(|tensor| tensor.block_stride == 0);
        let pages = plain
            .filter_map(|tensor| tensor.layers.first())
            .map(|&layer| self.page(layer));
        let bytes = sum(
            "a block",
            packed
                .map(|tensor| tensor.block_stride)
                .into_iter()
                .chain(pages),
        );
        let bytes = bytes.map_err(|error| PlanError::overflow_at("all tensors", error))?;
        product("all blocks", [bytes, self.num_blocks])
            .map_err(|error| PlanError::overflow_at("all tensors", error))?;
        Ok(bytes)
    }

    fn overlap(&self, group: usize, first: usize, second: usize) -> PlanError {
        PlanError::LayersOverlap {
            group,
            first: self.name(first).to_owned(),
            second: self.name(second).to_owned(),
        }
    }

    fn group(&self, layer: usize) -> Option<usize> {
        self.group_of
            .get(layer)
            .copied()
            .flatten()
            .filter(|&group| group < self.groups.len())
    }

    fn page(&self, layer: usize) -> u64 {
        let spec = self
            .model
            .layers()
            .get(layer)
            .and_then(|layer| layer.own_spec());
        spec.map_or(0, |spec: &Arc<Spec>| spec.page().padded)
    }

    fn name(&self, layer: usize) -> &str {
        self.model
            .layers()
            .get(layer)
            .map_or("", |layer| &layer.name)
    }
}
