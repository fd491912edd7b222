//! Why a plan cannot be made.

use super::units::Bytes;
use crate::model::SharingError;
use crate::num::Overflow;
use crate::spec::{DemandError, SpecError};

/// Why a plan cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No worker to plan for.
    #[error("there is no worker to plan for; give at least one")]
    NoWorkers,
    /// A number of the configuration that must be positive is not.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// Sharing that does not resolve.
    #[error("worker {worker}: {error}")]
    Sharing {
        /// The worker.
        worker: usize,
        /// What is wrong.
        error: SharingError,
    },
    /// A layer that reads the pages of one that has none.
    #[error(
        "layer {layer} shares the cache of {target}, an encoder-only layer, which has none; share with a layer that has a cache"
    )]
    ShareTargetWithoutCache {
        /// The layer.
        layer: String,
        /// The layer it names.
        target: String,
    },
    /// Workers that do not agree on a layer.
    #[error(
        "layer {layer}: worker {first_worker} stores {first}, worker {worker} stores {other}; a layer must be the same on every worker that has it"
    )]
    WorkerSpecMismatch {
        /// The layer.
        layer: String,
        /// The worker that named the layer first.
        first_worker: usize,
        /// What it stores there.
        first: String,
        /// The worker that disagrees.
        worker: usize,
        /// What it stores there.
        other: String,
    },
    /// A spec that planning would have to make, but that cannot exist.
    #[error("layer {layer}: planning would change what it stores to something impossible: {error}")]
    Spec {
        /// The layer.
        layer: String,
        /// What is wrong.
        error: SpecError,
    },
    /// Layers that one block table cannot serve.
    #[error(
        "the hybrid manager is off, but one block table cannot serve layer {first_layer} ({first}) and layer {layer} ({other}); switch it on, or give both the same block size and a kind that stores every token"
    )]
    HybridDisabledNotUnifiable {
        /// A layer.
        first_layer: String,
        /// What it stores.
        first: String,
        /// A layer that differs.
        layer: String,
        /// What it stores.
        other: String,
    },
    /// Layers whose pages no block size and no padding makes equal.
    #[error(
        "no page suits layer {first_layer} ({first}) and layer {layer} ({other}); give them block sizes or heads that make equal pages, let their backends follow a block stride so that pages may be padded, or use backends that take other kernel blocks"
    )]
    NoCommonPage {
        /// A layer.
        first_layer: String,
        /// What it stores and its kernels demand.
        first: String,
        /// Another one.
        layer: String,
        /// What it stores and its kernels demand.
        other: String,
    },
    /// A page that can be neither scaled nor padded to the largest one.
    #[error(
        "layer {layer}: its page of {page} bytes cannot become {target} bytes, the page of layer {target_layer}: it does not divide it, and the layer's backend does not follow a block stride, so the page cannot be padded; change a block size, or use a backend that follows the block stride"
    )]
    PageSizeNotUnifiable {
        /// The layer.
        layer: String,
        /// Bytes of its page.
        page: u64,
        /// A layer with the largest page.
        target_layer: String,
        /// Bytes of the largest page.
        target: u64,
    },
    /// One token of hidden state that does not fit into a page.
    #[error(
        "layer {layer}: one token of hidden state needs {bytes} bytes, but the page that all layers share has {page}; raise the block size of the other layers"
    )]
    HiddenStateLargerThanPage {
        /// The layer.
        layer: String,
        /// Bytes of one token, padding that the layer demands included.
        bytes: u64,
        /// Bytes of the common page.
        page: u64,
    },
    /// Windowed latents without a full latent.
    #[error(
        "layer {layer} is sliding-window MLA and pages differ, so a full MLA layer must set the page sizes, but there is none; add one, or make all pages equal"
    )]
    NoMlaGroup {
        /// A windowed layer.
        layer: String,
    },
    /// Full latents of different block sizes.
    #[error(
        "MLA layer {first_layer} has blocks of {first} tokens, MLA layer {layer} of {other}; beside sliding-window MLA all must have the same"
    )]
    MlaNotUniform {
        /// A layer.
        first_layer: String,
        /// Tokens of its block.
        first: u64,
        /// A layer that differs.
        layer: String,
        /// Tokens of its block.
        other: u64,
    },
    /// Windowed latents that need different numbers of blocks.
    #[error(
        "sliding-window MLA layers {first_layer} and {layer} do not need the same number of blocks; give them one window and one block size"
    )]
    SwaNotUniform {
        /// A layer.
        first_layer: String,
        /// A layer that differs.
        layer: String,
    },
    /// A windowed latent whose page no full latent can hold.
    #[error(
        "sliding-window MLA layer {layer} has a page of {page} bytes, more than {largest}, the largest page of a full MLA layer; lower its block size"
    )]
    SwaPageLarger {
        /// The layer.
        layer: String,
        /// Bytes of its page.
        page: u64,
        /// Bytes of the largest page of a full latent.
        largest: u64,
    },
    /// Windowed latents that do not form tuples.
    #[error(
        "sliding-window MLA layers of window {window} and block size {block_size} do not form tuples of one layer for each page size: {first_count} layers fit pages of {first_page} bytes, {other_count} fit {other_page}; the counts must be equal"
    )]
    SwaUnevenLayerTuples {
        /// Tokens of the window.
        window: u64,
        /// Tokens of a block.
        block_size: u64,
        /// A page size.
        first_page: u64,
        /// Layers of it.
        first_count: usize,
        /// Another page size.
        other_page: u64,
        /// Layers of it.
        other_count: usize,
    },
    /// Layers that fit in no group.
    #[error(
        "layer {layer} ({kind}) fits in no group: beside sliding-window MLA of differing pages only MLA layers can be planned; {count} layers are left over"
    )]
    LayersNotGrouped {
        /// The first such layer.
        layer: String,
        /// Its kind.
        kind: &'static str,
        /// How many there are.
        count: usize,
    },
    /// Windows and context parallelism do not go together.
    #[error(
        "layer {layer}: a {kind} layer cannot share its tokens over {ranks} context-parallel ranks; context_parallel_size must be 1"
    )]
    ContextParallelWindow {
        /// The layer.
        layer: String,
        /// Its kind.
        kind: &'static str,
        /// Ranks asked for.
        ranks: u64,
    },
    /// A size that does not fit.
    #[error("{place}: {error}")]
    Overflow {
        /// The layer, worker or helper.
        place: String,
        /// What does not fit.
        error: Overflow,
    },
    /// No memory at all.
    #[error(
        "worker {worker} has {available} bytes for caches{}; one request of {max_model_len} tokens needs {}",
        if *.overridden { ", for num_blocks_override is 0" } else { "" },
        Bytes(*.needed)
    )]
    NoAvailableMemory {
        /// The worker.
        worker: usize,
        /// Bytes given, or what the override comes to.
        available: i64,
        /// Whether a number of blocks replaced the memory.
        overridden: bool,
        /// Bytes that one request needs; 0 when that cannot be worked out.
        needed: u64,
        /// Tokens of the longest sequence asked for.
        max_model_len: u64,
    },
    /// Too little memory for one request.
    #[error("worker {worker}: one request of {max_model_len} tokens needs {}, but {} are available; {}",
        Bytes(*.needed), Bytes(*.available), length_advice(*.longest))]
    NotEnoughMemory {
        /// The worker.
        worker: usize,
        /// Bytes needed, reserved blocks included.
        needed: u64,
        /// Bytes available.
        available: u64,
        /// Tokens of the longest sequence asked for.
        max_model_len: u64,
        /// The longest that would fit; 0 when none does.
        longest: u64,
    },
    /// Too little memory for one token.
    #[error("worker {worker}: a request of 1 token needs {}, but {} are available, so no length fits; give the cache more memory",
        Bytes(*.needed), Bytes(*.available))]
    AutoFitImpossible {
        /// The worker that has least.
        worker: usize,
        /// Bytes that one token needs, reserved blocks included.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// Too little memory for one block.
    #[error("worker {worker}: one block needs {}, but {} are available; give the cache more memory",
        Bytes(*.bytes_per_block), Bytes(*.available))]
    ZeroBlocks {
        /// The worker.
        worker: usize,
        /// Bytes of one block.
        bytes_per_block: u64,
        /// Bytes available.
        available: u64,
    },
    /// Block ids that do not fit 32 bits.
    #[error("{num_blocks} blocks{} are more than the {limit} that a 32-bit block id can name; override the number of blocks with at most {allowed}, or raise the block size",
        ratio_text(*.num_blocks, *.per_block, .layer))]
    TooManyBlocks {
        /// Blocks.
        num_blocks: u64,
        /// Kernel blocks in each.
        per_block: u64,
        /// A layer of the group with those kernel blocks; empty when blocks alone are too many.
        layer: String,
        /// Ids that fit.
        limit: u64,
        /// Blocks that would fit.
        allowed: u64,
    },
    /// Blocks that a backend's kernels, or ids, cannot index.
    #[error("{}", reach_text(.layer, .backend, *.step, *.wanted, *.allowed))]
    IndexTooNarrow {
        /// The layer; empty when ids are too narrow.
        layer: String,
        /// Its backend.
        backend: String,
        /// Bytes from block to block.
        step: u64,
        /// Blocks needed.
        wanted: u64,
        /// Blocks that can be indexed.
        allowed: u64,
    },
    /// Backends that agree on no kernel block size.
    #[error("group {group} (layer {layer}): {error}; change the block size, or use other backends")]
    KernelBlock {
        /// The group.
        group: usize,
        /// Its first layer.
        layer: String,
        /// What is wrong.
        error: crate::backend::KernelBlockError,
    },
    /// A kernel block size that a backend does not take.
    #[error(
        "group {group}, layer {layer}: backend {backend} does not take kernel blocks of {size} tokens; it takes {takes}"
    )]
    BackendBlockSize {
        /// The group.
        group: usize,
        /// The layer.
        layer: String,
        /// Its backend.
        backend: String,
        /// Tokens of a kernel block.
        size: u64,
        /// What the backend takes.
        takes: String,
    },
    /// A number of heads that a backend is not made for.
    #[error("layer {layer} has {given} key-value heads; backend {backend} is made for {wanted}")]
    BackendHeads {
        /// The layer.
        layer: String,
        /// Its backend.
        backend: String,
        /// Heads the backend is made for.
        wanted: u64,
        /// Heads the layer has.
        given: u64,
    },
    /// A layer that the model does not have.
    #[error("group {group} names layer {layer}, which the model does not have")]
    LayerMissing {
        /// The group.
        group: usize,
        /// The layer.
        layer: String,
    },
    /// A layer listed twice in groups.
    #[error("layer {layer} is in group {first} and in group {second}; it must be in one, once")]
    LayerInTwoGroups {
        /// The layer.
        layer: String,
        /// One group.
        first: usize,
        /// The other, or the same one again.
        second: usize,
    },
    /// A layer listed twice in tensors.
    #[error("layer {layer} is in tensor {first} and in tensor {second}; it must be in one, once")]
    LayerInTwoTensors {
        /// The layer.
        layer: String,
        /// One tensor.
        first: usize,
        /// The other, or the same one again.
        second: usize,
    },
    /// A layer of the model that the engine's plan does not mention.
    #[error(
        "layer {layer} has pages of its own, but is in no group and in no tensor; add it to both, or leave it out of the model"
    )]
    RawTensorMissing {
        /// The layer.
        layer: String,
    },
    /// A layer that lacks a group or a tensor, or has one that it must not have.
    #[error(
        "layer {layer} {problem}; every layer with its own cache is in one group and one tensor, every sharing layer in its owner's group and no tensor"
    )]
    LayersNotInitialized {
        /// The layer.
        layer: String,
        /// What is missing or too much.
        problem: &'static str,
    },
    /// A sharing layer with another block table than the layer whose pages it reads.
    #[error(
        "layer {layer} is in group {group}, but shares the cache of {owner} in group {owner_group}; both must be in one group"
    )]
    SharerInOtherGroup {
        /// The layer.
        layer: String,
        /// Its group.
        group: usize,
        /// The layer that owns the pages.
        owner: String,
        /// Its group.
        owner_group: usize,
    },
    /// A group whose layers one block table cannot serve.
    #[error(
        "group {group}: layer {first_layer} ({first}) and layer {layer} ({other}) do not need the same number of blocks, so they cannot share a block table"
    )]
    GroupNotUniform {
        /// The group.
        group: usize,
        /// A layer.
        first_layer: String,
        /// What it stores.
        first: String,
        /// A layer that differs.
        layer: String,
        /// What it stores.
        other: String,
    },
    /// A group without a layer that has pages.
    #[error("group {group} has no layer of its own; give it one, or leave it out")]
    EmptyGroup {
        /// The group.
        group: usize,
    },
    /// A tensor that is no whole number of pages.
    #[error(
        "tensor {tensor} of {size} bytes is not a multiple of {page}, the page of layer {layer}"
    )]
    TensorNotMultipleOfPage {
        /// The tensor.
        tensor: usize,
        /// Its bytes.
        size: u64,
        /// The layer.
        layer: String,
        /// Bytes of the layer's page, or of the packed block.
        page: u64,
    },
    /// A tensor that holds another number of blocks than the plan.
    #[error(
        "tensor {tensor} of {size} bytes holds {held} pages of {page} bytes of layer {layer}, but there are {num_blocks} blocks"
    )]
    NumBlocksMismatch {
        /// The tensor.
        tensor: usize,
        /// Its bytes.
        size: u64,
        /// The layer.
        layer: String,
        /// Bytes of the layer's page, or of the packed block.
        page: u64,
        /// Pages that fit.
        held: u64,
        /// Blocks given.
        num_blocks: u64,
    },
    /// An offset where every page starts at its block.
    #[error(
        "tensor {tensor} has offset {offset} but no block stride; only packed tensors have an offset"
    )]
    OffsetWithoutStride {
        /// The tensor.
        tensor: usize,
        /// Bytes given.
        offset: u64,
    },
    /// Packed tensors of different sizes.
    #[error(
        "packed tensor {first} has {first_size} bytes, packed tensor {tensor} has {size}; they share one backing and must agree"
    )]
    PackedSizeMismatch {
        /// A tensor.
        first: usize,
        /// Its bytes.
        first_size: u64,
        /// One that differs.
        tensor: usize,
        /// Its bytes.
        size: u64,
    },
    /// Packed tensors of different strides.
    #[error(
        "packed tensor {first} steps {first_stride} bytes from block to block, packed tensor {tensor} steps {stride}; they share one backing and must agree"
    )]
    PackedStrideMismatch {
        /// A tensor.
        first: usize,
        /// Bytes from block to block.
        first_stride: u64,
        /// One that differs.
        tensor: usize,
        /// Bytes from block to block.
        stride: u64,
    },
    /// A slot that reaches into the next block.
    #[error(
        "layer {layer}: its page of {page} bytes at offset {offset} ends outside the packed block of {stride} bytes"
    )]
    SlotOutsideBlock {
        /// The layer.
        layer: String,
        /// Bytes of its page.
        page: u64,
        /// Where it starts.
        offset: u64,
        /// Bytes of the packed block.
        stride: u64,
    },
    /// Layers of one group that would write to the same bytes.
    #[error(
        "group {group}: layers {first} and {second} have the same bytes of every block; layers of one group need bytes of their own"
    )]
    LayersOverlap {
        /// The group.
        group: usize,
        /// A layer.
        first: String,
        /// The other.
        second: String,
    },
    /// An array with one entry for each group that has more or fewer.
    #[error(
        "{array} has {given} entries, but there are {groups} groups; it needs one for each group, 0 where there is none"
    )]
    PerGroupArrayLength {
        /// The array.
        array: &'static str,
        /// Its entries.
        given: usize,
        /// Groups.
        groups: usize,
    },
    /// A unit of prefix matching that cuts a block.
    #[error(
        "prefix_match_unit {unit} does not divide {block_size}, the tokens of a block of group {group}; it must divide every group's"
    )]
    PrefixMatchUnitNotDividing {
        /// The unit.
        unit: u64,
        /// The group.
        group: usize,
        /// Tokens of its block.
        block_size: u64,
    },
    /// A value that a helper cannot compute with.
    #[error("{what} {problem}")]
    BadValue {
        /// The value.
        what: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// Tables of a plan that an engine made itself, without a length.
    #[error(
        "the plan does not know how long a request gets, so the rows of its tables have no length; set max_model_len"
    )]
    RowLengthUnknown,
    /// Heads that cannot be spread over ranks.
    #[error(
        "{heads} key-value heads cannot be spread over {ranks} ranks; one number must divide the other"
    )]
    HeadsNotDividing {
        /// Heads in all.
        heads: u64,
        /// Ranks.
        ranks: u64,
    },
}

impl PlanError {
    /// The kind of error, as a word that programs compare.
    pub fn kind(&self) -> &'static str {
        match self {
            PlanError::NoWorkers => "no_workers",
            PlanError::Zero { .. } | PlanError::BadValue { .. } => "bad_values",
            PlanError::Sharing { error, .. } => error.kind(),
            PlanError::ShareTargetWithoutCache { .. } => "share_target_missing",
            PlanError::WorkerSpecMismatch { .. } => "worker_spec_mismatch",
            PlanError::Spec { error, .. } => error.kind(),
            PlanError::HybridDisabledNotUnifiable { .. } => "hybrid_disabled_not_unifiable",
            PlanError::PageSizeNotUnifiable { .. } => "page_size_not_unifiable",
            PlanError::NoCommonPage { .. } => "page_size_not_unifiable",
            PlanError::HiddenStateLargerThanPage { .. } => "hidden_state_larger_than_page",
            PlanError::NoMlaGroup { .. } => "no_mla_group",
            PlanError::MlaNotUniform { .. } => "mla_not_uniform",
            PlanError::SwaNotUniform { .. } => "swa_not_uniform",
            PlanError::SwaPageLarger { .. } => "swa_page_larger",
            PlanError::SwaUnevenLayerTuples { .. } => "swa_uneven_layer_tuples",
            PlanError::LayersNotGrouped { .. } => "layers_not_grouped",
            PlanError::ContextParallelWindow { .. } => "dcp_sliding_window",
            PlanError::Overflow { .. } => "overflow",
            PlanError::NoAvailableMemory { .. } => "no_available_memory",
            PlanError::NotEnoughMemory { .. } => "not_enough_memory",
            PlanError::AutoFitImpossible { .. } => "auto_fit_impossible",
            PlanError::ZeroBlocks { .. } => "worker_with_zero_blocks",
            PlanError::TooManyBlocks { .. } => "too_many_blocks",
            PlanError::IndexTooNarrow { .. } => "index_width_exceeded",
            PlanError::KernelBlock { .. } => "no_common_block_size",
            PlanError::BackendBlockSize { .. } => "backend_block_size",
            PlanError::BackendHeads { .. } => "backend_num_kv_heads",
            PlanError::LayerMissing { .. } => "layer_missing",
            PlanError::LayerInTwoGroups { .. } => "layer_in_two_groups",
            PlanError::LayerInTwoTensors { .. } => "layer_in_two_tensors",
            PlanError::RawTensorMissing { .. } => "raw_tensor_missing",
            PlanError::LayersNotInitialized { .. } => "layers_not_initialized",
            PlanError::SharerInOtherGroup { .. } => "sharer_in_other_group",
            PlanError::GroupNotUniform { .. } => "group_not_uniform",
            PlanError::EmptyGroup { .. } => "empty_group",
            PlanError::TensorNotMultipleOfPage { .. } => "tensor_not_multiple_of_page",
            PlanError::NumBlocksMismatch { .. } => "num_blocks_mismatch",
            PlanError::OffsetWithoutStride { .. } => "offset_without_stride",
            PlanError::PackedSizeMismatch { .. } => "packed_size_mismatch",
            PlanError::PackedStrideMismatch { .. } => "packed_stride_mismatch",
            PlanError::SlotOutsideBlock { .. } => "view_out_of_bounds",
            PlanError::LayersOverlap { .. } => "layers_overlap",
            PlanError::PerGroupArrayLength { .. } => "per_group_array_length",
            PlanError::PrefixMatchUnitNotDividing { .. } => "prefix_match_unit_not_dividing",
            PlanError::RowLengthUnknown => "max_model_len_unknown",
            PlanError::HeadsNotDividing { .. } => "heads_not_dividing",
        }
    }

    /// A demand of `layer` that cannot be worked out.
    pub(super) fn demand(layer: &str, error: DemandError) -> PlanError {
        match error {
            DemandError::ContextParallelWindow { kind, ranks } => {
                PlanError::ContextParallelWindow {
                    layer: layer.to_owned(),
                    kind,
                    ranks,
                }
            }
            DemandError::Overflow(error) => PlanError::overflow(layer, error),
        }
    }

    /// A size of `layer` that does not fit.
    pub(super) fn overflow(layer: &str, error: Overflow) -> PlanError {
        PlanError::overflow_at(format!("layer {layer}"), error)
    }

    /// A size that belongs to no single layer.
    pub(super) fn overflow_at(place: impl Into<String>, error: Overflow) -> PlanError {
        PlanError::Overflow {
            place: place.into(),
            error,
        }
    }

    /// A spec of `layer` that cannot exist.
    pub(super) fn spec(layer: &str, error: SpecError) -> PlanError {
        PlanError::Spec {
            layer: layer.to_owned(),
            error,
        }
    }
}

fn length_advice(longest: u64) -> String {
    if longest == 0 {
        "not even 1 token fits: give the cache more memory".to_owned()
    } else {
        format!(
            "lower max_model_len to {longest}, the longest that fits, or give the cache more memory"
        )
    }
}

fn reach_text(layer: &str, backend: &str, step: u64, wanted: u64, allowed: u64) -> String {
    if layer.is_empty() {
        return format!(
            "{wanted} blocks are needed, but 32-bit ids name only {allowed}; raise the block size, or lower max_model_len"
        );
    }
    format!(
        "layer {layer}: {wanted} blocks of {step} bytes are needed, but {backend} computes 32-bit offsets and reaches only {allowed}; lower max_model_len, or use a backend with 64-bit offsets"
    )
}

fn ratio_text(num_blocks: u64, per_block: u64, layer: &str) -> String {
    if layer.is_empty() {
        return String::new();
    }
    let total = u128::from(num_blocks) * u128::from(per_block);
    format!(" of {per_block} kernel blocks each (layer {layer}), {total} kernel blocks in all,")
}
