//! Why a table cannot be made or changed.

use crate::cuda::CudaError;
use crate::num::Overflow;

/// Why a table cannot be made or changed. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TablesError {
    /// A size that must be there.
    #[error("{field} is 0")]
    Zero {
        /// Which one.
        field: &'static str,
    },
    /// A size of a group that must be there.
    #[error("group {group}: {field} is 0")]
    GroupZero {
        /// The group.
        group: usize,
        /// Which size.
        field: &'static str,
    },
    /// A number that kernels could not count to.
    #[error("{what} is {value}; at most {limit} are possible")]
    TooLarge {
        /// What it counts.
        what: &'static str,
        /// How many were asked for.
        value: u64,
        /// How many there may be.
        limit: u64,
    },
    /// A block that is no whole number of kernel blocks.
    #[error(
        "group {group}: a block of {block_size} tokens is not a multiple of the kernel block of {kernel_block_size}"
    )]
    KernelBlockNotDividing {
        /// The group.
        group: usize,
        /// Tokens of its block.
        block_size: u64,
        /// Tokens of its kernel block.
        kernel_block_size: u64,
    },
    /// A row that spans more tokens than positions are computed with.
    #[error(
        "group {group}: a row of {row_blocks} blocks of {block_size} tokens on {ranks} ranks spans more than 2^32 - 1 tokens"
    )]
    RowTooLong {
        /// The group.
        group: usize,
        /// Blocks of a row.
        row_blocks: u64,
        /// Tokens of a block.
        block_size: u64,
        /// Ranks that share the tokens.
        ranks: u64,
    },
    /// Kernel block ids do not fit in 32 bits.
    #[error(
        "group {group}: {num_blocks} blocks of {ratio} kernel blocks each do not fit in 32-bit ids"
    )]
    IdsTooLarge {
        /// The group.
        group: usize,
        /// Blocks that there are.
        num_blocks: u64,
        /// Kernel blocks of each.
        ratio: u64,
    },
    /// A rank that is not one of the ranks.
    #[error("context-parallel rank {rank} is not below the size {size}")]
    Rank {
        /// The rank.
        rank: u64,
        /// Ranks that there are.
        size: u64,
    },
    /// Runs of tokens that do not fill a block evenly.
    #[error(
        "group {group}: block size {block_size} is not a multiple of the context-parallel interleave {interleave}"
    )]
    InterleaveNotDividing {
        /// The group.
        group: usize,
        /// Tokens of its block.
        block_size: u64,
        /// Tokens of one run.
        interleave: u64,
    },
    /// The host has not enough memory.
    #[error("no memory for {bytes} bytes of {what}")]
    NoMemory {
        /// What they are for.
        what: &'static str,
        /// How many.
        bytes: u64,
    },
    /// The device, or its driver, refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Tables of a device cannot be changed by a graph.
    #[error(
        "the stream is being captured, and a replay would not see the tables' next step: prepare tables before the graph is launched"
    )]
    Capturing,
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
    /// A request that there is no row for.
    #[error("request {request} is not there; rows are 0 to {max_requests} - 1")]
    UnknownRequest {
        /// Its number.
        request: i64,
        /// Rows that there are.
        max_requests: usize,
    },
    /// A group that is not there.
    #[error("group {group} is not there; there are {num_groups} groups")]
    UnknownGroup {
        /// Its number.
        group: usize,
        /// Groups that there are.
        num_groups: usize,
    },
    /// More blocks than a row holds.
    #[error(
        "request {request}, group {group}: the row holds {held} blocks, {added} more do not fit in its {row_blocks}"
    )]
    RowFull {
        /// The request.
        request: usize,
        /// The group.
        group: usize,
        /// Blocks in the row, those staged included.
        held: usize,
        /// Blocks to add.
        added: usize,
        /// Blocks that the row has room for.
        row_blocks: usize,
    },
    /// A block that does not exist.
    #[error("request {request}, group {group}: block id {id} is not one of 0 to {num_blocks} - 1")]
    BlockId {
        /// The request.
        request: usize,
        /// The group.
        group: usize,
        /// The id.
        id: i32,
        /// Blocks that there are.
        num_blocks: u64,
    },
    /// A row cannot be cut to more than it holds.
    #[error("request {request}, group {group}: the row holds {held} blocks, fewer than {wanted}")]
    TruncateLonger {
        /// The request.
        request: usize,
        /// The group.
        group: usize,
        /// Blocks in the row, those staged included.
        held: usize,
        /// Blocks to keep.
        wanted: usize,
    },
    /// An array of another length than the call needs.
    #[error("{what} has {got} entries, {wanted} are needed")]
    Length {
        /// Which array.
        what: &'static str,
        /// Its entries.
        got: usize,
        /// Entries that it must have.
        wanted: usize,
    },
    /// Boundaries that go back, or leave the array they divide.
    #[error("{what}[{at}] is {value}; the entries go up from 0, and the last is at most {limit}")]
    Boundary {
        /// Which array.
        what: &'static str,
        /// The entry.
        at: usize,
        /// What it says.
        value: i64,
        /// Entries of the array that is divided.
        limit: usize,
    },
    /// More rows or tokens than there is room for.
    #[error("{what} is {got}, there is room for {capacity}")]
    Capacity {
        /// What it counts.
        what: &'static str,
        /// How many were given.
        got: usize,
        /// How many fit.
        capacity: usize,
    },
    /// A sequence that is shorter than what a step adds to it.
    #[error(
        "seq_lens[{request}] is {seq_len}, which is less than the {query_len} tokens that the step has of it"
    )]
    SeqLen {
        /// The request's place in the batch.
        request: usize,
        /// Tokens of its sequence.
        seq_len: i32,
        /// Tokens of it in the step.
        query_len: i32,
    },
    /// A token that stands past the end of its sequence.
    #[error(
        "positions[{at}] is {position}, past the end of its request, whose seq_lens[{request}] is {seq_len}"
    )]
    Position {
        /// The token's place in the batch.
        at: usize,
        /// Where it stands.
        position: i64,
        /// The request's place in the batch.
        request: usize,
        /// Tokens of its sequence.
        seq_len: i64,
    },
    /// A batch padded to fewer rows than it has.
    #[error("{num_requests} requests cannot be padded to {num_rows} rows")]
    PaddedBelowBatch {
        /// Requests of the batch.
        num_requests: usize,
        /// Rows to pad to.
        num_rows: usize,
    },
}

impl TablesError {
    /// The name of the failure, which stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            TablesError::Zero { .. } | TablesError::GroupZero { .. } => "bad_values",
            TablesError::TooLarge { .. }
            | TablesError::RowTooLong { .. }
            | TablesError::IdsTooLarge { .. }
            | TablesError::Overflow(_) => "overflow",
            TablesError::KernelBlockNotDividing { .. } => "kernel_block_not_dividing",
            TablesError::Rank { .. } => "cp_rank_out_of_range",
            TablesError::InterleaveNotDividing { .. } => "cp_interleave_not_dividing",
            TablesError::NoMemory { .. } => "out_of_host_memory",
            TablesError::Cuda(error) => error.kind(),
            TablesError::Capturing => "stream_is_capturing",
            TablesError::UnknownRequest { .. } => "unknown_request",
            TablesError::UnknownGroup { .. } => "unknown_group",
            TablesError::RowFull { .. } => "table_row_overflow",
            TablesError::BlockId { .. } => "block_id_out_of_range",
            TablesError::TruncateLonger { .. } => "table_row_too_short",
            TablesError::Length { .. } => "per_group_array_length",
            TablesError::Boundary { .. } => "boundaries_not_ascending",
            TablesError::SeqLen { .. } | TablesError::Position { .. } => "seq_len_too_small",
            TablesError::Capacity { .. } | TablesError::PaddedBelowBatch { .. } => {
                "batch_out_of_range"
            }
        }
    }
}
