//! From a layout of the whole model to the plan of every worker, whatever policy made the layout.

use std::sync::Arc;

use super::budget::{self, Budget, budget, price};
use super::capacity::{Demand, capacity};
use super::error::PlanError;
use super::group::WholeGroup;
use super::merge_workers::{Stage, WholeModel};
use super::pack::{Packing, Pools};
use super::{Group, Plan, PlanConfig, Worker, WorkerPlan, kernel_blocks, project, reach};
use crate::num::product;
use crate::spec::Limits;

/// The workers of a plan, and which of them hold the same layers.
pub(super) struct Job<'a> {
    pub workers: &'a [Worker],
    pub stages: &'a [Stage<'a>],
    pub stage_of_worker: &'a [usize],
}

/// What a policy decides.
pub(super) struct Layout<'a> {
    /// The layers, their specs as they are planned.
    pub whole: WholeModel<'a>,
    /// Which of them share a block table.
    pub groups: Vec<WholeGroup>,
    /// How their pages share memory.
    pub packing: Packing,
}

/// The plan of a layout.
pub(super) fn finish(
    job: &Job<'_>,
    layout: Layout<'_>,
    config: &PlanConfig,
) -> Result<Plan, PlanError> {
    let Layout {
        whole,
        groups,
        packing,
    } = layout;
    let places = project::places(&groups, whole.layers.len());
    let mut drafts = Vec::with_capacity(job.stages.len());
    for stage in job.stages {
        kernel_blocks::check_heads(stage.model, &stage.owners)?;
        let mut groups = project::project(&groups, &places, stage);
        for (number, group) in groups.iter_mut().enumerate() {
            group.kernel_block_size = kernel_blocks::select(stage.model, number, group)?;
        }
        let pools = Pools::of(&groups, packing);
        let pools = pools.map_err(|error| worker_overflow(stage.worker, error))?;
        let mut price = price(&groups, &pools, config.limits.counting)?;
        price.reach = reach::of_stage(stage.model, &groups, &pools, config);
        drafts.push((price, pools, groups));
    }

    let demand = Demand::of(&groups, &whole);
    let price_of = |worker: usize| &drafts[job.stage_of_worker[worker]].0;
    let budget = budget(job.workers, price_of, &demand, config)?;
    // Named only now: that the rest does not fit is the first thing to mend.
    project::check_all_placed(&places, &whole)?;
    let blocks_of_groups = demand.blocks_of_groups(&budget.limits)?;
    check_rows(&groups, &whole, &budget.limits)?;

    let mut plans = Vec::with_capacity(job.stages.len());
    for ((price, pools, groups), stage) in drafts.into_iter().zip(job.stages) {
        let plan = worker_plan(
            stage,
            price,
            pools,
            groups,
            &budget,
            &blocks_of_groups,
            config,
        );
        plans.push(plan?);
    }
    Ok(Plan {
        config: PlanConfig {
            limits: budget.limits,
            ..config.clone()
        },
        asked: None,
        workers: dealt_to_workers(job.workers, job.stage_of_worker, plans),
    })
}

/// A plan whose rows cannot be counted could not be used.
fn check_rows(
    groups: &[WholeGroup],
    whole: &WholeModel<'_>,
    limits: &Limits,
) -> Result<(), PlanError> {
    for group in groups {
        let layer = group
            .layers
            .first()
            .map_or("", |&layer| whole.layers[layer].name);
        let width = group.spec.table_width_blocks(limits);
        width.map_err(|error| PlanError::demand(layer, error))?;
    }
    Ok(())
}

fn worker_plan(
    stage: &Stage<'_>,
    price: budget::Price,
    pools: Pools,
    groups: Vec<Group>,
    budget: &Budget,
    blocks_of_groups: &[u64],
    config: &PlanConfig,
) -> Result<WorkerPlan, PlanError> {
    let failed = |error| worker_overflow(stage.worker, error);
    let usable = budget.num_blocks.saturating_sub(config.reserved_blocks);
    let (max_concurrency, capacity_tokens) =
        capacity(&groups, blocks_of_groups, usable, &budget.limits).map_err(failed)?;
    let request = [budget.blocks_per_request, price.request_block];
    let mut plan = WorkerPlan {
        model: Arc::clone(stage.model),
        memory_bytes: 0,
        num_blocks: budget.num_blocks,
        groups,
        tensors: pools.tensors(budget.num_blocks).map_err(failed)?,
        bytes_per_request: product("a request", request).map_err(failed)?,
        bytes_per_block: price.block,
        max_concurrency,
        capacity_tokens,
        needs_zeroing: false,
    };
    plan.needs_zeroing = kernel_blocks::needs_zeroing(&plan);
    kernel_blocks::check_ids(&plan)?;
    Ok(plan)
}

/// Every worker's own copy of its stage's plan.
fn dealt_to_workers(
    workers: &[Worker],
    stage_of_worker: &[usize],
    plans: Vec<WorkerPlan>,
) -> Vec<WorkerPlan> {
    let of_worker = |(worker, plan): (&Worker, WorkerPlan)| WorkerPlan {
        model: Arc::clone(&worker.model),
        memory_bytes: worker.memory_bytes,
        ..plan
    };
    if plans.len() == workers.len() {
        return workers.iter().zip(plans).map(of_worker).collect();
    }
    let plans = stage_of_worker.iter().map(|&stage| plans[stage].clone());
    workers.iter().zip(plans).map(of_worker).collect()
}

fn worker_overflow(worker: usize, error: crate::num::Overflow) -> PlanError {
    PlanError::overflow_at(format!("worker {worker}"), error)
}
