//! Everything about a worker's cache but the memory: which allocations it takes, and the proven view
//! of every layer in them.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::Backend;
use crate::memory::MIN_ALIGNMENT;
use crate::model::{Layer, Model, SharingError};
use crate::num::{Overflow, product, sum};
use crate::plan::{Group, PoolTensor, WorkerPlan};
use crate::spec::{Attention, Spec};
use crate::view::{
    BlockRuns, Owned, OwnershipError, Pages, View, ViewError, attention_view, check_ownership,
    state_views,
};

/// Allocations and views, before any memory is taken.
#[derive(Debug, Clone)]
pub struct Blueprint {
    model: Arc<Model>,
    num_blocks: u64,
    groups: Vec<GroupSizes>,
    allocations: Vec<u64>,
    alignment: u64,
    total_bytes: u64,
    layers: Vec<LayerViews>,
    unread: Vec<UnreadPages>,
    views: Vec<View>,
    regions: Vec<Region>,
    /// For each layer of the model its place in `layers`.
    place: Vec<Option<usize>>,
}

/// What the blocks of a group are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSizes {
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block; none when no layer of the group has a backend.
    pub kernel_block_size: Option<u64>,
}

/// The views of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerViews {
    /// The layer's number in the model.
    pub layer: usize,
    /// Whose pages these are: another layer's place when the layer shares, else its own.
    pub owner: usize,
    /// The group whose block table the layer follows.
    pub group: usize,
    /// The allocation that holds the pages.
    pub allocation: usize,
    /// What is stored, as it was planned.
    pub spec: Arc<Spec>,
    /// Tokens of a kernel block of the group.
    pub kernel_block_size: u64,
    views: Range<usize>,
}

/// The pages of a layer that no backend reads, so that it has no view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnreadPages {
    /// The layer's number in the model.
    pub layer: usize,
    /// The group whose block table the layer follows.
    pub group: usize,
    /// The allocation that holds the pages.
    pub allocation: usize,
    /// Which bytes they are: whole pages, one for each block.
    pub runs: BlockRuns,
    /// The kind of layer.
    pub kind: &'static str,
    /// Bytes of a page that hold something.
    pub content_bytes: u64,
}

/// One piece of memory in which blocks lie at a constant distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Region {
    /// The allocation it is part of.
    pub allocation: usize,
    /// Where it starts in the allocation.
    pub offset_bytes: u64,
    /// Its bytes.
    pub size_bytes: u64,
    /// Bytes from block to block.
    pub block_step_bytes: u64,
    /// Blocks.
    pub num_blocks: u64,
}

/// Why a plan cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlueprintError {
    /// A layer that has no view.
    #[error("layer {layer}, backend {backend}: {error}")]
    View {
        /// The layer.
        layer: String,
        /// Its backend.
        backend: String,
        /// What is wrong.
        error: ViewError,
    },
    /// Layers that would damage each other.
    #[error("allocation {allocation}: {error}")]
    Ownership {
        /// The allocation.
        allocation: usize,
        /// What is wrong.
        error: OwnershipError,
    },
    /// A layer that shares with one whose backend lays pages out differently.
    #[error(
        "layer {layer} shares the cache of {owner}, but reads {wanted}, and {owner} is laid out as {given}"
    )]
    SharedLayoutDiffers {
        /// The layer.
        layer: String,
        /// The layer that owns the pages.
        owner: String,
        /// What the layer's backend reads.
        wanted: String,
        /// What the owner's backend writes.
        given: String,
    },
    /// A layer of a group that no tensor holds.
    #[error("layer {layer} is in a group, but no tensor holds it")]
    TensorMissing {
        /// The layer.
        layer: String,
    },
    /// The host has no room for a list of regions.
    #[error(
        "there is no memory for a list of {regions} regions; a layout whose block axis comes first has one"
    )]
    NoMemory {
        /// Regions of one allocation.
        regions: u64,
    },
    /// Sharing that does not resolve.
    #[error(transparent)]
    Sharing(#[from] SharingError),
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

impl Blueprint {
    /// Lays out a worker's plan. Layers without a backend, and encoder-only ones, have no view.
    pub fn of(plan: &WorkerPlan) -> Result<Blueprint, BlueprintError> {
        let mut draft = Draft::new(plan);
        let packed: Vec<&PoolTensor> = plan.tensors.iter().filter(|t| t.block_stride > 0).collect();
        let mut packed_is_placed = false;
        for tensor in &plan.tensors {
            if tensor.block_stride == 0 {
                draft.place_allocation(&[tensor])?;
            } else if !packed_is_placed {
                draft.place_allocation(&packed)?;
                packed_is_placed = true;
            }
        }
        draft.finish()
    }

    /// The model whose layers these are.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Blocks of every group.
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Groups of the plan, those without layers here included.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// The same groups.
    pub fn groups(&self) -> &[GroupSizes] {
        &self.groups
    }

    /// Bytes of each allocation.
    pub fn allocations(&self) -> &[u64] {
        &self.allocations
    }

    /// What every allocation must be aligned to, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Bytes of all allocations.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Bytes of a block in all allocations, whichever group has it.
    pub fn bytes_per_block(&self) -> u64 {
        let of_regions = self.regions.iter().map(|region| region.block_step_bytes);
        of_regions.fold(0, u64::saturating_add)
    }

    /// The layers that have views, in the model's order.
    pub fn layers(&self) -> &[LayerViews] {
        &self.layers
    }

    /// The pages that no backend reads. The views say nothing of them, but blocks are theirs too.
    pub fn unread(&self) -> &[UnreadPages] {
        &self.unread
    }

    /// The views of a layer: one of an attention layer, one for each state of a state layer.
    pub fn views(&self, layer: &LayerViews) -> &[View] {
        &self.views[layer.views.clone()]
    }

    /// The pieces of memory in which blocks lie at a constant distance.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The name of a layer.
    pub fn name(&self, layer: &LayerViews) -> &str {
        &self.model.layers()[layer.layer].name
    }

    /// The place of a layer in [`layers`](Self::layers).
    pub fn find(&self, name: &str) -> Option<usize> {
        self.model.find(name).and_then(|layer| self.place[layer])
    }

    /// The same by the layer's number in the model.
    pub fn find_number(&self, layer: usize) -> Option<usize> {
        *self.place.get(layer)?
    }
}

/// What a layer of the model is in the plan.
#[derive(Clone, Copy)]
struct Member<'a> {
    group: usize,
    spec: &'a Arc<Spec>,
    kernel_block_size: Option<u64>,
}

/// Where a layer's own pages are, and its views of them.
#[derive(Clone)]
struct Placed {
    allocation: usize,
    pages: Pages,
    views: Range<usize>,
}

struct Draft<'a> {
    plan: &'a WorkerPlan,
    members: Vec<Option<Member<'a>>>,
    has_state: bool,
    allocations: Vec<u64>,
    alignment: u64,
    views: Vec<View>,
    unread: Vec<UnreadPages>,
    regions: Vec<Region>,
    /// For each layer of the model where its own pages are.
    placed: Vec<Option<Placed>>,
}

impl<'a> Draft<'a> {
    fn new(plan: &'a WorkerPlan) -> Draft<'a> {
        let num_layers = plan.model.layers().len();
        let mut members = vec![None; num_layers];
        for (group, members_of) in plan.groups.iter().enumerate() {
            for (i, &layer) in members_of.layers.iter().enumerate() {
                if let Some(slot) = members.get_mut(layer) {
                    *slot = Some(Member {
                        group,
                        spec: members_of.spec.spec_of(i),
                        kernel_block_size: members_of.kernel_block_size,
                    });
                }
            }
        }
        let has_state = members
            .iter()
            .flatten()
            .any(|member| member.spec.as_state().is_some());
        let contracts = plan
            .model
            .layers()
            .iter()
            .filter_map(|layer| layer.backend.as_deref());
        let alignment = contracts.map(|backend| backend.contract().alignment).max();
        Draft {
            plan,
            members,
            has_state,
            allocations: Vec::with_capacity(plan.tensors.len()),
            alignment: alignment.unwrap_or(1).max(MIN_ALIGNMENT),
            views: Vec::with_capacity(num_layers),
            unread: Vec::new(),
            regions: Vec::with_capacity(plan.tensors.len()),
            placed: vec![None; num_layers],
        }
    }

    fn layer(&self, layer: usize) -> &'a Layer {
        &self.plan.model.layers()[layer]
    }

    /// Places the layers of one allocation: those of one tensor, or of all packed tensors.
    fn place_allocation(&mut self, tensors: &[&PoolTensor]) -> Result<(), BlueprintError> {
        let Some(first) = tensors.first() else {
            return Ok(());
        };
        let allocation = self.allocations.len();
        self.allocations.push(first.size);
        let is_packed = first.block_stride > 0;
        let is_shared = first.layers.len() > 1;
        let mut owned: Vec<Owned<'a>> = Vec::with_capacity(first.layers.len() * tensors.len());
        let mut region = None;
        for tensor in tensors {
            for &layer in &tensor.layers {
                let Some(member) = self.members.get(layer).copied().flatten() else {
                    continue;
                };
                let page_bytes = member.spec.page().padded;
                let pages = Pages {
                    num_blocks: self.plan.num_blocks,
                    page_bytes,
                    step_bytes: if is_packed {
                        tensor.block_stride
                    } else {
                        page_bytes
                    },
                    offset_bytes: tensor.offset,
                    allocation_bytes: tensor.size,
                    page_by_page: is_packed || is_shared || self.has_state,
                };
                let first_view = self.views.len();
                self.push_views(layer, member, &pages)?;
                let view = self.views.get(first_view);
                let runs = view.map_or_else(|| pages.runs(), |view| view.runs);
                owned.push(Owned {
                    layer: &self.layer(layer).name,
                    group: member.group,
                    runs,
                });
                if view.is_none() {
                    self.unread.push(UnreadPages {
                        layer,
                        group: member.group,
                        allocation,
                        runs,
                        kind: member.spec.kind_name(),
                        content_bytes: member.spec.page().unpadded,
                    });
                    continue;
                }
                region.get_or_insert(runs);
                self.placed[layer] = Some(Placed {
                    allocation,
                    pages,
                    views: first_view..self.views.len(),
                });
            }
        }
        check_ownership(&mut owned)
            .map_err(|error| BlueprintError::Ownership { allocation, error })?;
        self.push_regions(allocation, first, region)
    }

    fn push_views(
        &mut self,
        layer: usize,
        member: Member<'a>,
        pages: &Pages,
    ) -> Result<(), BlueprintError> {
        let Layer { name, backend, .. } = self.layer(layer);
        let Some(backend) = backend.as_deref() else {
            return Ok(());
        };
        let failed = |error| BlueprintError::View {
            layer: name.to_string(),
            backend: backend.name().to_owned(),
            error,
        };
        match member.spec.as_ref() {
            Spec::Attention(attention) => {
                let size = kernel_block_slots(attention, member.kernel_block_size);
                let view = attention_view(attention, backend, size, pages).map_err(failed)?;
                self.views.push(view);
            }
            Spec::State(state) => self
                .views
                .extend(state_views(state, backend, pages).map_err(failed)?),
        }
        Ok(())
    }

    /// A layer that shares gets its owner's view, so its own backend must read just that one.
    fn check_sharer(
        &self,
        layer: usize,
        owner: usize,
        member: Member<'a>,
        placed: &Placed,
    ) -> Result<(), BlueprintError> {
        let (layer, owner) = (self.layer(layer), self.layer(owner));
        let (Some(wants), Some(has)) = (&layer.backend, &owner.backend) else {
            return Ok(());
        };
        let Spec::Attention(attention) = member.spec.as_ref() else {
            return Ok(());
        };
        if Arc::ptr_eq(wants, has) || wants == has {
            return Ok(());
        }
        let size = kernel_block_slots(attention, member.kernel_block_size);
        let view = attention_view(attention, wants, size, &placed.pages);
        let view = view.map_err(|error| BlueprintError::View {
            layer: layer.name.to_string(),
            backend: wants.name().to_owned(),
            error,
        })?;
        let given = self.views.get(placed.views.start);
        if given.is_some_and(|given| given.is_same_as(&view)) {
            return Ok(());
        }
        let mode = attention.fields().quant_mode;
        let text = |backend: &Backend| match backend.layout(mode) {
            Some(layout) => format!("\"{layout}\" ({})", backend.name()),
            None => format!("nothing ({})", backend.name()),
        };
        Err(BlueprintError::SharedLayoutDiffers {
            layer: layer.name.to_string(),
            owner: owner.name.to_string(),
            wanted: text(wants),
            given: text(has),
        })
    }

    /// An allocation is one region, unless its only layer spreads each block over several runs.
    fn push_regions(
        &mut self,
        allocation: usize,
        tensor: &PoolTensor,
        runs: Option<BlockRuns>,
    ) -> Result<(), BlueprintError> {
        // Memory of layers without a backend has no view, but its blocks lie one after another.
        let step = match tensor.block_stride {
            0 => tensor.size / self.plan.num_blocks.max(1),
            stride => stride,
        };
        let runs = runs.unwrap_or(BlockRuns {
            num_blocks: self.plan.num_blocks,
            offset_bytes: 0,
            step_bytes: step,
            span_bytes: step,
            runs: 1,
            run_step_bytes: 0,
        });
        let room = usize::try_from(runs.runs).map(|runs| self.regions.try_reserve(runs));
        if !matches!(room, Ok(Ok(()))) {
            return Err(BlueprintError::NoMemory { regions: runs.runs });
        }
        for run in 0..runs.runs {
            let spread = runs.runs > 1;
            self.regions.push(Region {
                allocation,
                offset_bytes: product("a region", [run, runs.run_step_bytes])?,
                size_bytes: if spread {
                    runs.run_step_bytes
                } else {
                    tensor.size
                },
                block_step_bytes: runs.step_bytes,
                num_blocks: runs.num_blocks,
            });
        }
        Ok(())
    }

    fn finish(self) -> Result<Blueprint, BlueprintError> {
        for (layer, member) in self.members.iter().enumerate() {
            let lost = member.is_some_and(|member| member.spec.takes_cache())
                && self.layer(layer).backend.is_some()
                && self.placed[layer].is_none();
            if lost {
                return Err(BlueprintError::TensorMissing {
                    layer: self.layer(layer).name.to_string(),
                });
            }
        }
        let model = &self.plan.model;
        let owners = model.owners()?;
        let mut layers = Vec::with_capacity(owners.len());
        let mut place = vec![None; owners.len()];
        for (layer, &owner) in owners.iter().enumerate() {
            let Some(placed) = self.placed[owner].clone() else {
                continue;
            };
            let Some(member) = self.members[owner] else {
                continue;
            };
            self.check_sharer(layer, owner, member, &placed)?;
            place[layer] = Some(layers.len());
            layers.push(LayerViews {
                layer,
                owner,
                group: member.group,
                allocation: placed.allocation,
                spec: Arc::clone(member.spec),
                kernel_block_size: member.kernel_block_size.unwrap_or(0),
                views: placed.views,
            });
        }
        for layer in &mut layers {
            layer.owner = place[layer.owner].unwrap_or(layer.owner);
        }
        Ok(Blueprint {
            model: Arc::clone(model),
            num_blocks: self.plan.num_blocks,
            groups: self.plan.groups.iter().map(group_sizes).collect(),
            total_bytes: sum("the allocations", self.allocations.iter().copied())?,
            allocations: self.allocations,
            alignment: self.alignment,
            layers,
            unread: self.unread,
            views: self.views,
            regions: self.regions,
            place,
        })
    }
}

fn group_sizes(group: &Group) -> GroupSizes {
    GroupSizes {
        block_size: group.spec.block_size(),
        kernel_block_size: group.kernel_block_size.filter(|&size| size > 0),
    }
}

/// Stored slots of a kernel block. Compressed layers are not split: their kernels take a block's
/// slots at once.
fn kernel_block_slots(spec: &Attention, kernel_block_size: Option<u64>) -> u64 {
    if spec.storage_block_size() != spec.fields().block_size {
        return spec.storage_block_size();
    }
    kernel_block_size.unwrap_or(0)
}
