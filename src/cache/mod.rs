//! A plan and memory together: allocations, the view of every layer, and the order in which layers
//! are bound.

mod bind;
mod blueprint;

pub use bind::{BindError, bind_layers, bind_order, layer_index};
pub use blueprint::{Blueprint, BlueprintError, LayerViews, Region};

use std::sync::Arc;

use crate::memory::{Allocation, Memory, MemoryError};

/// The memory of one worker's layers.
#[derive(Debug)]
pub struct Cache {
    blueprint: Arc<Blueprint>,
    allocations: Vec<Allocation>,
}

/// Why a cache was not made. Memory taken on the way was given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// The memory ran out.
    #[error("allocation {index} of {count}: {error}; the cache needs {needed} bytes in all")]
    Memory {
        /// Which allocation failed.
        index: usize,
        /// How many there are.
        count: usize,
        /// Bytes of all.
        needed: u64,
        /// What happened.
        error: MemoryError,
    },
}

impl Cache {
    /// Takes the memory that the blueprint asks for.
    pub fn allocate(blueprint: Arc<Blueprint>, memory: &dyn Memory) -> Result<Cache, CacheError> {
        let sizes = blueprint.allocations();
        let mut allocations = Vec::with_capacity(sizes.len());
        for (index, &bytes) in sizes.iter().enumerate() {
            let taken = memory.allocate(bytes, blueprint.alignment());
            allocations.push(taken.map_err(|error| CacheError::Memory {
                index,
                count: sizes.len(),
                needed: blueprint.total_bytes(),
                error,
            })?);
        }
        Ok(Cache {
            blueprint,
            allocations,
        })
    }

    /// What was built.
    pub fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    /// The allocations, in the order of the plan's tensors.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }
}
