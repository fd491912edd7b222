//! What the block tables of a worker's groups must hold.

use super::error::PlanError;
use super::{Group, Plan, WorkerPlan};
use crate::spec::{Limits, Spec};
use std::sync::Arc;

/// What an engine says of its tables; what it does not say is the plan's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableWishes {
    /// Blocks of every group.
    pub num_blocks: Option<u64>,
    /// Tokens of the longest request.
    pub max_model_len: Option<u64>,
    /// Ranks that share the tokens of a request.
    pub context_parallel_size: Option<u64>,
}

/// What the tables of a worker are made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableNeeds {
    /// Blocks of every group.
    pub num_blocks: u64,
    /// Ranks that share the tokens of a request.
    pub context_parallel_size: u64,
    /// The rows of each group.
    pub rows: Vec<TableRows>,
}

/// What the rows of a group are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRows {
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block: those of a block where no backend reads the group.
    pub kernel_block_size: u64,
    /// Blocks of the longest row.
    pub blocks: u64,
    /// Whether every context-parallel rank holds all of it: state is not cut into tokens.
    pub is_replicated: bool,
}

impl Plan {
    /// What the tables of one of its workers must hold. An engine may repeat what the plan knows,
    /// and must say what it does not know: of an engine's own plan, how long a request gets.
    pub fn table_needs(
        &self,
        worker: &WorkerPlan,
        wishes: &TableWishes,
    ) -> Result<TableNeeds, PlanError> {
        let num_blocks = same("num_blocks", wishes.num_blocks, worker.num_blocks)?;
        let planned = &self.config.limits;
        let given_ranks = wishes.context_parallel_size;
        let (limits, of_plan) = match planned.are_known() {
            true => {
                let len = planned.max_model_len;
                same("max_model_len", wishes.max_model_len, len)?;
                let ranks = planned.context_parallel_size;
                same("context_parallel_size", given_ranks, ranks)?;
                (*planned, true)
            }
            false => {
                let own = Limits {
                    max_model_len: wishes.max_model_len.unwrap_or(0),
                    context_parallel_size: given_ranks.unwrap_or(1),
                    ..*planned
                };
                (own, false)
            }
        };
        let mut rows = Vec::with_capacity(worker.groups.len());
        for (number, group) in worker.groups.iter().enumerate() {
            if !limits.are_known() {
                return Err(PlanError::RowLengthUnknown);
            }
            let limits = match of_plan {
                true => limits,
                false => with_own_mode(limits, group),
            };
            let of_group = group_rows(group, &limits);
            rows.push(of_group.map_err(|error| {
                let layer = group
                    .layers
                    .first()
                    .map(|&layer| &worker.model.layers()[layer]);
                let name =
                    layer.map_or_else(|| format!("of group {number}"), |l| l.name.to_string());
                PlanError::demand(&name, error)
            })?);
        }
        Ok(TableNeeds {
            num_blocks,
            context_parallel_size: limits.context_parallel_size,
            rows,
        })
    }
}

/// The plan's number, which is also the engine's if it says one.
fn same(what: &'static str, given: Option<u64>, planned: u64) -> Result<u64, PlanError> {
    match given {
        Some(given) if given != planned => Err(PlanError::BadValue {
            what,
            problem: format!("is {given}, the plan has {planned}"),
        }),
        _ => Ok(planned),
    }
}

/// Limits of an engine's own plan say nothing of states, whose specs do.
fn with_own_mode(limits: Limits, group: &Group) -> Limits {
    let state = group.spec.first().as_state();
    Limits {
        state_cache_mode: state.map_or(limits.state_cache_mode, |s| s.fields().cache_mode),
        ..limits
    }
}

fn group_rows(group: &Group, limits: &Limits) -> Result<TableRows, crate::spec::DemandError> {
    // Refuses windows that would be shared out.
    group.spec.blocks_per_request(limits)?;
    let block_size = group.spec.block_size();
    // Views of compressed layers are not split: a row says blocks.
    let is_whole = |spec: &Arc<Spec>| spec.storage_block_size() != spec.block_size();
    let kernel_block_size = match group.spec.specs().iter().any(is_whole) {
        true => None,
        false => group.kernel_block_size,
    };
    Ok(TableRows {
        block_size,
        kernel_block_size: kernel_block_size.unwrap_or(block_size),
        blocks: group.spec.table_width_blocks(limits)?,
        is_replicated: group.spec.first().as_state().is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::plan::testing::*;
    use crate::plan::{PartGroup, PartTensor, Parts, plan_from_parts};

    const NOTHING: TableWishes = TableWishes {
        num_blocks: None,
        max_model_len: None,
        context_parallel_size: None,
    };

    /// An engine's own plan of 4 blocks: a group and a tensor for each spec.
    fn own_plan(specs: &[Spec]) -> Plan {
        let model: Arc<Model> = model(specs.iter().cloned());
        let mut parts = Parts {
            num_blocks: 4,
            ..Parts::default()
        };
        for (i, spec) in specs.iter().enumerate() {
            parts.groups.push(PartGroup {
                layers: vec![format!("l{i}")],
                is_draft: false,
            });
            parts.tensors.push(PartTensor {
                size: 4 * spec.page().padded,
                layers: vec![format!("l{i}")],
                ..PartTensor::default()
            });
        }
        plan_from_parts(model, parts).unwrap()
    }

    fn needs(plan: &Plan, wishes: TableWishes) -> Result<TableNeeds, PlanError> {
        plan.table_needs(&plan.workers[0], &wishes)
    }

    fn wish(max_model_len: u64, context_parallel_size: u64) -> TableWishes {
        TableWishes {
            max_model_len: Some(max_model_len),
            context_parallel_size: Some(context_parallel_size),
            ..NOTHING
        }
    }

    #[test]
    fn a_plan_says_everything() {
        let mut config = config(64);
        config.limits.context_parallel_size = 2;
        let mut layers = Model::new();
        layers.add("l0", full_page(8192), None, 1).unwrap();
        layers.add("l1", state(100), None, 1).unwrap();
        let plan = plan_one(&Arc::new(layers), 1 << 20, &config).unwrap();
        let found = needs(&plan, NOTHING).unwrap();
        assert_eq!(found.num_blocks, plan.workers[0].num_blocks);
        assert_eq!(found.context_parallel_size, 2);
        assert_eq!(
            found.rows,
            [
                TableRows {
                    block_size: 16,
                    kernel_block_size: 16,
                    blocks: 2,
                    is_replicated: false
                },
                TableRows {
                    block_size: 16,
                    kernel_block_size: 16,
                    blocks: 1,
                    is_replicated: true
                },
            ]
        );
        assert_eq!(needs(&plan, wish(64, 2)), Ok(found));
        for wrong in [
            wish(65, 2),
            wish(64, 1),
            TableWishes {
                num_blocks: Some(1),
                ..NOTHING
            },
        ] {
            assert_eq!(needs(&plan, wrong).unwrap_err().kind(), "bad_values");
        }
    }

    #[test]
    fn an_own_plan_takes_the_length_and_the_ranks() {
        let plan = own_plan(&[full(16, 8), full(32, 8)]);
        for unknown in [
            NOTHING,
            TableWishes {
                context_parallel_size: Some(2),
                ..NOTHING
            },
        ] {
            assert_eq!(needs(&plan, unknown), Err(PlanError::RowLengthUnknown));
        }
        let blocks = |wishes| -> Vec<u64> {
            let found = needs(&plan, wishes).unwrap();
            found.rows.iter().map(|rows| rows.blocks).collect()
        };
        assert_eq!(blocks(wish(100, 1)), [7, 4]);
        assert_eq!(blocks(wish(100, 2)), [4, 2]);
        assert_eq!(needs(&plan, wish(100, 2)).unwrap().context_parallel_size, 2);
        assert_eq!(needs(&plan, wish(100, 2)).unwrap().num_blocks, 4);
    }

    #[test]
    fn an_own_plan_of_windows_is_not_shared_out() {
        let plan = own_plan(&[sliding(32, 16, 8)]);
        assert_eq!(needs(&plan, wish(100, 1)).unwrap().rows[0].blocks, 7);
        let kind = needs(&plan, wish(100, 2)).unwrap_err().kind();
        assert_eq!(kind, "dcp_sliding_window");
    }

    #[test]
    fn an_own_plan_without_groups_needs_no_length() {
        assert_eq!(needs(&own_plan(&[]), NOTHING).unwrap().rows, []);
    }
}
