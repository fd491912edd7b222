//! What tables are made for, and the checks of it.

use std::sync::Arc;

use super::error::TablesError;
use crate::cuda::Context;
use crate::num::{self, Overflow};

/// Rows may be made as wide as a whole number of these.
const ALIGNED_TOKENS: u64 = 128;

/// What tables are made for.
#[derive(Debug, Clone)]
pub struct TablesConfig {
    /// The groups, by number.
    pub groups: Vec<GroupConfig>,
    /// Rows: requests that there may be at once.
    pub max_requests: u64,
    /// Tokens that a step may have.
    pub max_tokens: u64,
    /// Block ids are below it; `None` when only their 32 bits limit them.
    pub num_blocks: Option<u64>,
    /// The ranks that share the tokens.
    pub ranks: Ranks,
    /// Whether rows are as wide as [`row_width`] says, and not just as long as they may get.
    pub aligned_rows: bool,
    /// The device whose memory the tables lie in; none when it is the host's.
    pub device: Option<Arc<Context>>,
}

/// What the table of a group is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of a kernel block.
    pub kernel_block_size: u64,
    /// Blocks that a row holds.
    pub row_blocks: u64,
    /// Whether every rank holds all of it, as of state.
    pub is_replicated: bool,
}

/// How context-parallel ranks share the tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// Ranks that there are.
    pub size: u64,
    /// Which of them this is.
    pub rank: u64,
    /// Tokens that one rank gets before the next one does.
    pub interleave: u64,
}

impl Ranks {
    /// One rank, which has all tokens.
    pub const ONE: Ranks = Ranks {
        size: 1,
        rank: 0,
        interleave: 1,
    };
}

/// Entries of a row of `row_blocks` blocks for kernels that read whole runs of 128 tokens: blocks
/// rounded up to whole runs, times the kernel blocks of each.
pub fn row_width(
    row_blocks: u64,
    block_size: u64,
    kernel_block_size: u64,
) -> Result<u64, TablesError> {
    let group = GroupConfig {
        block_size,
        kernel_block_size,
        row_blocks,
        is_replicated: true,
    };
    group.check(0, Ranks::ONE)?;
    Ok(group.width(true)?)
}

impl TablesConfig {
    /// Everything that does not depend on how much memory there is.
    pub(super) fn check(&self) -> Result<(), TablesError> {
        let limit = i32::MAX as u64; // indices and query starts have 32 bits
        for (what, value) in [
            ("max_requests", self.max_requests),
            ("max_tokens", self.max_tokens),
        ] {
            if value == 0 {
                return Err(TablesError::Zero { field: what });
            }
            if value > limit {
                return Err(TablesError::TooLarge { what, value, limit });
            }
        }
        self.ranks.check()?;
        for (number, group) in self.groups.iter().enumerate() {
            group.check(number, self.ranks)?;
            self.block_limit(number, group)?;
        }
        Ok(())
    }

    /// What block ids of a group are below; those of its kernel blocks fit in 32 bits then.
    pub(super) fn block_limit(
        &self,
        number: usize,
        group: &GroupConfig,
    ) -> Result<u64, TablesError> {
        let ratio = group.block_size / group.kernel_block_size;
        let possible = (1 << 31) / ratio;
        let num_blocks = self.num_blocks.unwrap_or(possible);
        if num_blocks > possible {
            return Err(TablesError::IdsTooLarge {
                group: number,
                num_blocks,
                ratio,
            });
        }
        Ok(num_blocks)
    }
}

impl Ranks {
    fn check(self) -> Result<(), TablesError> {
        for (field, value) in [
            ("context_parallel_size", self.size),
            ("context_parallel_interleave", self.interleave),
        ] {
            if value == 0 {
                return Err(TablesError::Zero { field });
            }
        }
        if self.rank >= self.size {
            return Err(TablesError::Rank {
                rank: self.rank,
                size: self.size,
            });
        }
        Ok(())
    }
}

impl GroupConfig {
    fn check(&self, group: usize, ranks: Ranks) -> Result<(), TablesError> {
        for (field, value) in [
            ("block_size", self.block_size),
            ("kernel_block_size", self.kernel_block_size),
        ] {
            if value == 0 {
                return Err(TablesError::GroupZero { group, field });
            }
        }
        if !self.block_size.is_multiple_of(self.kernel_block_size) {
            return Err(TablesError::KernelBlockNotDividing {
                group,
                block_size: self.block_size,
                kernel_block_size: self.kernel_block_size,
            });
        }
        let ranks = if self.is_replicated {
            Ranks::ONE
        } else {
            ranks
        };
        if ranks.size > 1 && !self.block_size.is_multiple_of(ranks.interleave) {
            return Err(TablesError::InterleaveNotDividing {
                group,
                block_size: self.block_size,
                interleave: ranks.interleave,
            });
        }
        // Positions are divided as 32-bit numbers.
        let tokens = [self.row_blocks.max(1), self.block_size, ranks.size];
        num::product("a row", tokens)
            .ok()
            .filter(|&tokens| tokens <= u64::from(u32::MAX))
            .map(|_| ())
            .ok_or(TablesError::RowTooLong {
                group,
                row_blocks: self.row_blocks,
                block_size: self.block_size,
                ranks: ranks.size,
            })
    }

    /// Entries of a row.
    pub(super) fn width(&self, aligned: bool) -> Result<u64, Overflow> {
        let multiple = match aligned {
            true => ALIGNED_TOKENS / num::gcd(ALIGNED_TOKENS, self.block_size),
            false => 1,
        };
        let blocks = num::round_up("a row", self.row_blocks, multiple)?;
        num::product("a row", [blocks, self.block_size / self.kernel_block_size])
    }
}
