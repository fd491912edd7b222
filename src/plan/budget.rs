//! From memory to a number of blocks, and whether a request fits in them.

use super::capacity::Demand;
use super::error::PlanError;
use super::pack::Pools;
use super::reach::Reach;
use super::reference::latent_tuples;
use super::{Group, PlanConfig, Worker};
use crate::num::{product, sum};
use crate::spec::{Counting, Limits};

/// What memory buys on one stage.
pub(super) struct Price {
    /// Bytes of one block in all tensors; 0 on a stage without layers.
    pub block: u64,
    /// Bytes that one block of a request counts as.
    pub request_block: u64,
    /// The most blocks that the kernels can index, where that is looked at.
    pub reach: Option<Reach>,
}

/// What the memory of all workers affords.
pub(super) struct Budget {
    /// The limits, the longest sequence as it was fitted.
    pub limits: Limits,
    /// Blocks that one request needs.
    pub blocks_per_request: u64,
    /// Blocks that every worker can hold.
    pub num_blocks: u64,
}

/// What a block costs on a stage.
pub(super) fn price(
    groups: &[Group],
    pools: &Pools,
    counting: Counting,
) -> Result<Price, PlanError> {
    let block = pools.bytes_per_block;
    let as_tuples = counting == Counting::Reference && latent_tuples::are_tuples(groups);
    let request_block = match as_tuples {
        // A stage without layers has nothing to count.
        _ if block == 0 => 0,
        true => latent_tuples::counted_block_bytes(groups)
            .map_err(|error| PlanError::overflow_at("a layer tuple", error))?,
        false => block,
    };
    Ok(Price {
        block,
        request_block,
        reach: None,
    })
}

/// A worker that has layers, and the memory it plans with.
struct Purse<'a> {
    worker: usize,
    price: &'a Price,
    bytes: i64,
}

impl Purse<'_> {
    fn available(&self) -> u64 {
        u64::try_from(self.bytes).unwrap_or(0)
    }

    /// Blocks that requests may use; `None` when even the reserved ones do not fit.
    fn request_blocks(&self, reserved: u64) -> Option<u64> {
        let afforded = self.available() / self.price.request_block.max(1);
        self.reached(afforded).checked_sub(reserved)
    }

    /// As many of the blocks as the kernels can index.
    fn reached(&self, blocks: u64) -> u64 {
        let reach = self.price.reach.as_ref();
        reach.map_or(blocks, |reach| blocks.min(reach.blocks))
    }

    fn needed(&self, blocks: u64, reserved: u64) -> Result<u64, PlanError> {
        let blocks = sum("the blocks of a request", [blocks, reserved]);
        let bytes = blocks.and_then(|b| product("a request", [b, self.price.request_block]));
        bytes.map_err(|error| PlanError::overflow_at(format!("worker {}", self.worker), error))
    }
}

/// Fits the longest sequence if asked to, checks that one request fits on every worker, and finds
/// the number of blocks. Workers without layers have no say.
pub(super) fn budget<'a>(
    workers: &[Worker],
    price_of: impl Fn(usize) -> &'a Price,
    demand: &Demand<'_>,
    config: &PlanConfig,
) -> Result<Budget, PlanError> {
    let purses = purses(workers, price_of, config)?;
    let reserved = config.reserved_blocks;
    let mut limits = config.limits;
    if config.auto_fit_max_model_len {
        limits.max_model_len = fitted(&purses, demand, &limits, reserved)?;
    }
    // A worker without any memory is named before a demand that cannot be worked out.
    let check_not_empty = |purse: &Purse<'_>| check_not_empty(purse, demand, &limits, config);
    purses.first().map_or(Ok(()), check_not_empty)?;
    let blocks_per_request = demand.blocks(&limits)?;
    let mut num_blocks = None;
    for purse in &purses {
        check_not_empty(purse)?;
        check_request_fits(purse, demand, &limits, blocks_per_request, reserved)?;
        let afforded = purse.available() / purse.price.block;
        let blocks = purse.reached(afforded);
        if let Some(reach) = &purse.price.reach
            && config.num_blocks_override.is_some()
            && blocks < afforded
        {
            return Err(reach.too_short(afforded));
        }
        if blocks == 0 {
            return Err(PlanError::ZeroBlocks {
                worker: purse.worker,
                bytes_per_block: purse.price.block,
                available: purse.available(),
            });
        }
        num_blocks = Some(num_blocks.map_or(blocks, |least: u64| least.min(blocks)));
    }
    Ok(Budget {
        limits,
        blocks_per_request,
        // Without layers there is the null block.
        num_blocks: num_blocks.unwrap_or(1),
    })
}

fn purses<'a>(
    workers: &[Worker],
    price_of: impl Fn(usize) -> &'a Price,
    config: &PlanConfig,
) -> Result<Vec<Purse<'a>>, PlanError> {
    let mut purses = Vec::with_capacity(workers.len());
    for (worker, given) in workers.iter().enumerate() {
        let price = price_of(worker);
        if price.block == 0 {
            continue;
        }
        let bytes = match config.num_blocks_override {
            None => given.memory_bytes,
            Some(blocks) => {
                let bytes = product("the bytes of num_blocks_override", [blocks, price.block])
                    .map_err(|e| PlanError::overflow_at(format!("worker {worker}"), e))?;
                i64::try_from(bytes).unwrap_or(i64::MAX)
            }
        };
        purses.push(Purse {
            worker,
            price,
            bytes,
        });
    }
    Ok(purses)
}

/// The longest sequence that fits on every worker.
fn fitted(
    purses: &[Purse<'_>],
    demand: &Demand<'_>,
    limits: &Limits,
    reserved: u64,
) -> Result<u64, PlanError> {
    // The worker with the fewest blocks decides; `None` is fewer than any number.
    let Some(tightest) = purses
        .iter()
        .min_by_key(|purse| purse.request_blocks(reserved))
    else {
        return Ok(limits.max_model_len);
    };
    let longest = demand.longest(limits, tightest.request_blocks(reserved))?;
    if longest == 0 {
        let one_token = Limits {
            max_model_len: 1,
            ..*limits
        };
        return Err(PlanError::AutoFitImpossible {
            worker: tightest.worker,
            needed: tightest.needed(demand.blocks(&one_token)?, reserved)?,
            available: tightest.available(),
        });
    }
    Ok(longest)
}

fn check_not_empty(
    purse: &Purse<'_>,
    demand: &Demand<'_>,
    limits: &Limits,
    config: &PlanConfig,
) -> Result<(), PlanError> {
    if purse.bytes > 0 {
        return Ok(());
    }
    let blocks = demand.blocks(limits);
    let needed = blocks.and_then(|blocks| purse.needed(blocks, config.reserved_blocks));
    Err(PlanError::NoAvailableMemory {
        worker: purse.worker,
        available: purse.bytes,
        overridden: config.num_blocks_override.is_some(),
        needed: needed.unwrap_or(0),
        max_model_len: limits.max_model_len,
    })
}

fn check_request_fits(
    purse: &Purse<'_>,
    demand: &Demand<'_>,
    limits: &Limits,
    blocks: u64,
    reserved: u64,
) -> Result<(), PlanError> {
    let needed = purse.needed(blocks, reserved)?;
    if needed <= purse.available() {
        // The sum was part of what is needed, so it fits.
        let all = blocks.saturating_add(reserved);
        return match &purse.price.reach {
            Some(reach) if all > reach.blocks => Err(reach.too_short(all)),
            _ => Ok(()),
        };
    }
    Err(PlanError::NotEnoughMemory {
        worker: purse.worker,
        needed,
        available: purse.available(),
        max_model_len: limits.max_model_len,
        longest: demand.longest(limits, purse.request_blocks(reserved))?,
    })
}
