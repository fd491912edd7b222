//! Why an operation was refused. Nothing was touched then, unless a device failed half way.

use crate::cuda::CudaError;

/// A refused operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpsError {
    /// Room for no call at all.
    #[error("the number of calls that may be under way at once is 0; it must be at least 1")]
    NoConcurrency,
    /// No memory for what the operations need.
    #[error("no memory for {bytes} bytes of scratch")]
    NoMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The device, or its driver, refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A layer that is not there.
    #[error("layer {layer} is not there, the cache has {num_layers} layers")]
    NoLayer {
        /// Its number.
        layer: usize,
        /// Layers there are.
        num_layers: usize,
    },
    /// A group that is not there.
    #[error("group {group} is not there, the cache has {num_groups} groups")]
    NoGroup {
        /// Its number.
        group: u64,
        /// Groups there are.
        num_groups: usize,
    },
    /// A block outside the cache.
    #[error("entry {index}: block id {id} is out of range, the cache has {num_blocks} blocks")]
    BlockOutOfRange {
        /// Which entry.
        index: usize,
        /// The id.
        id: i32,
        /// Blocks of the cache.
        num_blocks: u64,
    },
    /// The block that kernels read where there is none of a request.
    #[error(
        "entry {index}: block 0 is not poisoned: kernels read it where a row has no block, and what they weigh with 0 must be a number"
    )]
    NullBlock {
        /// Which entry.
        index: usize,
    },
    /// A block that is listed twice.
    #[error("entry {index}: block {id} is listed twice")]
    BlockTwice {
        /// The second entry.
        index: usize,
        /// The id.
        id: i32,
    },
    /// More blocks than there is room for.
    #[error("more than {max} block ids are given; these operations were made for {max}")]
    TooManyBlocks {
        /// Ids that fit.
        max: u64,
    },
    /// A caller that thinks of another cache.
    #[error("the cache has {num_blocks} blocks, not {told}")]
    NumBlocksMismatch {
        /// Blocks that the caller told.
        told: u64,
        /// Blocks of the cache.
        num_blocks: u64,
    },
    /// A caller whose blocks do not even divide the memory.
    #[error("{bytes} bytes do not fall into {told} blocks; the cache has {num_blocks} blocks")]
    NotMultipleOfBlocks {
        /// Bytes of an allocation.
        bytes: u64,
        /// Blocks that the caller told.
        told: u64,
        /// Blocks of the cache.
        num_blocks: u64,
    },
    /// A slot outside the cache.
    #[error("row {index}: slot {slot} is out of range, layer {layer} has {num_slots} slots")]
    SlotOutOfRange {
        /// Which row.
        index: usize,
        /// The slot.
        slot: i64,
        /// The layer.
        layer: String,
        /// Slots it has.
        num_slots: u64,
    },
    /// Rows of one token in layers that follow different block tables.
    #[error(
        "layers {first} and {second} are of groups {first_group} and {second_group}; slots are those of one group"
    )]
    SeveralGroups {
        /// A layer.
        first: String,
        /// Its group.
        first_group: usize,
        /// A layer of another group.
        second: String,
        /// Its group.
        second_group: usize,
    },
    /// Rows of one token in layers that store another number of slots for it.
    #[error(
        "layers {first} and {second} store {first_slots} and {second_slots} slots of each block; write them in calls of their own"
    )]
    SeveralBlockSlots {
        /// A layer.
        first: String,
        /// Slots that it stores of each block.
        first_slots: u64,
        /// A layer with another number.
        second: String,
        /// Its number.
        second_slots: u64,
    },
    /// Rows that the library cannot store or read.
    #[error("layer {layer}: {reason}")]
    NotSupported {
        /// The layer.
        layer: String,
        /// What is missing.
        reason: String,
    },
    /// Rows that a layer needs.
    #[error("layer {layer}: {rows} are NULL, and it stores {elements} elements of each")]
    RowsMissing {
        /// The layer.
        layer: String,
        /// Which rows.
        rows: &'static str,
        /// Their elements.
        elements: u64,
    },
    /// Rows that a layer does not store.
    #[error("layer {layer}: it stores no {rows}, but they are given")]
    RowsNotStored {
        /// The layer.
        layer: String,
        /// Which rows.
        rows: &'static str,
    },
    /// Rows that lie further apart than memory reaches.
    #[error(
        "layer {layer}: {count} rows of {rows}, {token_stride} elements apart, with heads {head_stride} apart, do not fit in memory"
    )]
    RowsTooFar {
        /// The layer.
        layer: String,
        /// Which rows.
        rows: &'static str,
        /// Rows given.
        count: u64,
        /// Elements from token to token, as given.
        token_stride: u64,
        /// Elements from head to head, as given.
        head_stride: u64,
    },
    /// Parts of a latent that do not make a latent.
    #[error(
        "layer {layer}: the first part of a row has {given} elements, {allowed} is what it stores"
    )]
    Parts {
        /// The layer.
        layer: String,
        /// Elements given.
        given: u64,
        /// What it stores.
        allowed: String,
    },
    /// A scale by which nothing can be divided.
    #[error("layer {layer}: {scale} is {value}; it must be a positive number")]
    Scale {
        /// The layer.
        layer: String,
        /// Which scale.
        scale: &'static str,
        /// Its value.
        value: String,
    },
}

impl OpsError {
    /// The name of this kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            OpsError::NoConcurrency => "max_concurrency",
            OpsError::NoMemory { .. } => "out_of_host_memory",
            OpsError::Cuda(error) => error.kind(),
            OpsError::NoLayer { .. } | OpsError::NoGroup { .. } => "not_found",
            OpsError::BlockOutOfRange { .. } => "block_id_out_of_range",
            OpsError::NullBlock { .. } => "null_block",
            OpsError::BlockTwice { .. } => "duplicate_block_id",
            OpsError::TooManyBlocks { .. } => "too_many_block_ids",
            OpsError::NumBlocksMismatch { .. } => "num_blocks_mismatch",
            OpsError::NotMultipleOfBlocks { .. } => "copy_not_multiple_of_blocks",
            OpsError::SlotOutOfRange { .. } => "slot_out_of_range",
            OpsError::SeveralGroups { .. } => "layers_of_several_groups",
            OpsError::SeveralBlockSlots { .. } => "block_slots_differ",
            OpsError::NotSupported { .. } => "rows_not_supported",
            OpsError::RowsMissing { .. } => "null_argument",
            OpsError::RowsNotStored { .. } => "rows_not_stored",
            OpsError::RowsTooFar { .. } => "overflow",
            OpsError::Parts { .. } | OpsError::Scale { .. } => "bad_values",
        }
    }
}
