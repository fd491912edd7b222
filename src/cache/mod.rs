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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Preset;
    use crate::dtype::Dtype;
    use crate::memory::Host;
    use crate::memory::testing::{Faulty, adopted_buffer};
    use crate::model::Model;
    use crate::plan::{PartGroup, PartTensor, Parts, plan_from_parts};
    use crate::spec::{Attention, AttentionFields, Spec};
    use std::sync::atomic::Ordering;

    /// Three full layers of 8192-byte pages, each with its own tensor of four blocks.
    fn blueprint() -> Arc<Blueprint> {
        let backend = Arc::new(Preset::FlashAttentionNhd.backend().unwrap());
        let spec = Attention::new(AttentionFields::full(16, 2, 64, Dtype::Bf16));
        let spec = Spec::Attention(spec.unwrap());
        let names: Vec<String> = (0..3).map(|i| format!("layers.{i}.attn")).collect();
        let mut model = Model::new();
        for name in &names {
            model
                .add(name, spec.clone(), Some(Arc::clone(&backend)), 2)
                .unwrap();
        }
        let tensor = |name: &String| PartTensor {
            size: 4 * 8192,
            layers: vec![name.clone()],
            ..PartTensor::default()
        };
        let parts = Parts {
            num_blocks: 4,
            tensors: names.iter().map(tensor).collect(),
            groups: vec![PartGroup {
                layers: names.clone(),
                is_draft: false,
            }],
            kernel_block_sizes: None,
        };
        let plan = plan_from_parts(Arc::new(model), parts).unwrap();
        Arc::new(Blueprint::of(&plan.workers[0]).unwrap())
    }

    #[test]
    fn memory_that_runs_out_half_way_is_given_back() {
        let blueprint = blueprint();
        for fail_at in 0..4 {
            let adopted = adopted_buffer(160_000);
            for memory in [
                Box::new(Faulty::new(Host, fail_at)),
                Box::new(Faulty::new(adopted, fail_at)) as Box<dyn Counting>,
            ] {
                let cache = Cache::allocate(Arc::clone(&blueprint), memory.memory());
                match cache {
                    Ok(cache) => {
                        assert_eq!(fail_at, 3);
                        assert_eq!((cache.allocations().len(), memory.out()), (3, 3));
                    }
                    Err(CacheError::Memory {
                        index,
                        count,
                        needed,
                        ..
                    }) => {
                        assert_eq!((index, count, needed), (fail_at, 3, 3 * 4 * 8192));
                    }
                }
                assert_eq!(memory.out(), 0);
            }
        }
    }

    /// A faulty memory over any other.
    trait Counting {
        fn memory(&self) -> &dyn Memory;
        fn out(&self) -> usize;
    }

    impl<M: Memory> Counting for Faulty<M> {
        fn memory(&self) -> &dyn Memory {
            self
        }
        fn out(&self) -> usize {
            self.counts().out.load(Ordering::Relaxed)
        }
    }
}
