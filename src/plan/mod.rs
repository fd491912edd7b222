//! Layers and memory in, groups, tensors and a number of blocks out. A pure function.
//!
//! [`plan`] decides how layers share memory; [`plan_from_parts`] takes an engine's own decision
//! and proves that it holds together. Both give a [`Plan`], which every worker allocates from.

mod block_sizes;
mod budget;
mod capacity;
mod compact;
mod describe;
mod error;
mod explain;
mod finish;
mod group;
mod hybrid_block;
mod kernel_blocks;
mod kv_heads;
mod merge_workers;
mod pack;
mod parts;
mod project;
mod promote;
#[cfg(test)]
mod properties;
mod reach;
mod reference;
mod table_rows;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod units;

use std::sync::Arc;

pub use block_sizes::resolve_block_sizes;
pub use capacity::Capacity;
pub use error::PlanError;
pub use explain::{Advice, Change};
pub use hybrid_block::{HybridBlock, HybridModel, hybrid_block_size};
pub use kv_heads::kv_heads_per_rank;
pub use parts::{PartGroup, PartTensor, Parts, plan_from_parts};
pub use reference::latent_tuples::layer_tuple_count;
pub use table_rows::{TableNeeds, TableRows, TableWishes};

use crate::model::Model;
use crate::num::MAX;
use crate::spec::{Limits, Spec, SpecSet};
use finish::{Job, finish};

/// Which rules group layers and unify pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Exactly the rules of vLLM 0.26.
    Reference,
    /// The most tokens in the same memory, and never fewer than the reference has.
    Compact,
}

/// What a plan is made for.
#[derive(Debug, Clone)]
pub struct PlanConfig {
    /// Which rules to follow.
    pub policy: Policy,
    /// What bounds one request.
    pub limits: Limits,
    /// Lower the longest sequence to what fits.
    pub auto_fit_max_model_len: bool,
    /// Store windowed layers in full, so that one block table serves all.
    pub hybrid_manager_off: bool,
    /// Pack all layers of a block together when there are several groups.
    pub cross_layer_blocks: bool,
    /// This many blocks, whatever the memory.
    pub num_blocks_override: Option<u64>,
    /// Blocks that the engine keeps from requests.
    pub reserved_blocks: u64,
    /// The last layer belongs to a speculative draft.
    pub has_draft_layers: bool,
    /// Tokens of a usual request, which the compact policy saves memory for besides the longest; 0
    /// where nobody said.
    pub typical_len: u64,
    /// The layers' block sizes are no one's wish: the compact policy may choose others that their
    /// kernels take, smaller ones too, and drop padding that was given.
    pub choose_block_sizes: bool,
}

/// One rank: the layers it holds and the memory it has for them.
#[derive(Debug, Clone)]
pub struct Worker {
    /// Its layers.
    pub model: Arc<Model>,
    /// Bytes for caches; not positive when there are none.
    pub memory_bytes: i64,
}

/// What all workers allocate.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What it was made for, the longest sequence as it was fitted.
    pub config: PlanConfig,
    /// What the engine asked for; `None` of a plan that it made itself.
    pub asked: Option<PlanConfig>,
    /// One for each worker, in order.
    pub workers: Vec<WorkerPlan>,
}

/// What one worker allocates.
#[derive(Debug, Clone)]
pub struct WorkerPlan {
    /// Its layers. Layers are named by their number in it.
    pub model: Arc<Model>,
    /// Bytes it was given; 0 when that is not known.
    pub memory_bytes: i64,
    /// Blocks of every group, the same for all workers.
    pub num_blocks: u64,
    /// The groups of the whole model, each with the layers of it that this worker has.
    pub groups: Vec<Group>,
    /// The allocations.
    pub tensors: Vec<PoolTensor>,
    /// Bytes that one request of the longest sequence needs, reserved blocks not counted.
    pub bytes_per_request: u64,
    /// Bytes of one block in all tensors.
    pub bytes_per_block: u64,
    /// Requests of the longest sequence that fit at once; 0 for a model without caches.
    pub max_concurrency: f64,
    /// Tokens that fit; 0 for a model without caches.
    pub capacity_tokens: u64,
    /// Whether a block must be zeroed before another layer reads it as something else.
    pub needs_zeroing: bool,
}

/// Layers that share a block table.
#[derive(Debug, Clone)]
pub struct Group {
    /// Layers that have pages of their own.
    pub layers: Vec<usize>,
    /// Layers that read the pages of one of `layers`.
    pub sharing_layers: Vec<usize>,
    /// What the layers store.
    pub spec: GroupSpec,
    /// Tokens of a kernel block; `None` when no layer of the group has a backend.
    pub kernel_block_size: Option<u64>,
    /// Whether it holds layers of a speculative draft.
    pub is_draft: bool,
}

/// What the layers of a group store.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupSpec {
    /// All the same.
    One(Arc<Spec>),
    /// The same number of blocks, but different things: one spec for each layer. On a worker
    /// without layers of the group, one for each layer of the whole model.
    Set(SpecSet),
}

/// Memory that one layer of each group shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTensor {
    /// Bytes; of a packed tensor, those of the one backing that all packed tensors share.
    pub size: u64,
    /// Packed: where the layer's page starts in a block.
    pub offset: u64,
    /// Packed: bytes from block to block. 0 when not packed.
    pub block_stride: u64,
    /// The layers.
    pub layers: Vec<usize>,
}

/// Plans the caches of all workers of a model.
///
/// Groups are made for the whole model, then each worker gets the layers of them that it has.
/// Every worker gets the same number of blocks. A worker without layers neither limits nor breaks
/// a plan.
pub fn plan(workers: &[Worker], config: &PlanConfig) -> Result<Plan, PlanError> {
    check_config(workers, config)?;
    let (mut stages, stage_of_worker) = merge_workers::stages_of(workers)?;
    let whole = merge_workers::merge_stages(&mut stages)?;
    let job = Job {
        workers,
        stages: &stages,
        stage_of_worker: &stage_of_worker,
    };
    let plan = match config.policy {
        Policy::Reference => finish(&job, reference::layout(whole, config)?, config),
        Policy::Compact => compact::plan(&job, &whole, config),
    };
    Ok(Plan {
        asked: Some(config.clone()),
        ..plan?
    })
}

fn check_config(workers: &[Worker], config: &PlanConfig) -> Result<(), PlanError> {
    if workers.is_empty() {
        return Err(PlanError::NoWorkers);
    }
    for (field, value) in [
        ("max_model_len", config.limits.max_model_len),
        ("context_parallel_size", config.limits.context_parallel_size),
    ] {
        if value == 0 {
            return Err(PlanError::Zero { field });
        }
        if value > MAX {
            return Err(PlanError::BadValue {
                what: field,
                problem: format!("is {value}; it must be at most {MAX}"),
            });
        }
    }
    Ok(())
}
