//! What one layer stores: its kind, its geometry, the bytes of its page, and how many blocks a
//! request can need of it.
//!
//! A spec is checked when it is made, so one that exists can be laid out. Changing a spec makes a
//! new one through the same checks and keeps every field that is not changed.

mod attention;
mod demand;
mod merge;
mod quantisation;
mod set;
mod state;

pub use attention::{Attention, AttentionFields, AttentionKind, Content};
pub use demand::{Counting, DemandError, Limits, StateCacheMode};
pub use merge::{MergeError, Uniformity, merge, uniformity};
pub use quantisation::{QuantMode, TOKEN_HEAD_SCALE_BYTES};
pub use set::{Family, SpecSet, layers_of_commonest_page};
pub use state::{State, StateFields, StateKind, StatePart};

use crate::num::Overflow;

/// What one layer stores.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Spec {
    /// Keys and values, or a latent of them, of every token.
    Attention(Attention),
    /// A state that is as large for one token as for a thousand.
    State(State),
}

/// Bytes of one page, from what is stored to what is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageBytes {
    /// Data only.
    pub real: u64,
    /// Data and the scales that are carved from the page.
    pub unpadded: u64,
    /// What one block takes in memory: `unpadded` and the padding asked for, by a number or by an
    /// alignment.
    pub padded: u64,
}

/// Why a spec cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// A number that must be positive is not.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A field that this kind of layer has no use for.
    #[error("{field} is set, but a {kind} layer has no such field")]
    FieldNotOfKind {
        /// The field.
        field: &'static str,
        /// The layer's kind.
        kind: &'static str,
    },
    /// Keys and values of different widths where the kind stores both alike.
    #[error(
        "head_size_v is {head_size_v}; a {kind} layer stores it as wide as head_size, {head_size}"
    )]
    ValueWidth {
        /// The layer's kind.
        kind: &'static str,
        /// Elements of one key.
        head_size: u64,
        /// Elements of one value.
        head_size_v: u64,
    },
    /// A width that a packed format would cut.
    #[error("{field} is {width}; quantisation mode {mode} packs multiples of {multiple}")]
    PackedWidthNotDividing {
        /// The field.
        field: &'static str,
        /// Its value.
        width: u64,
        /// The quantisation mode.
        mode: &'static str,
        /// What the width must be a multiple of.
        multiple: u64,
    },
    /// An element type that a quantisation mode does not store.
    #[error(
        "quant_mode {mode} stores elements of 1 byte, but dtype is {dtype}, of {element_bytes} bytes; set dtype to the stored type too: uint8, int8 or one of float8"
    )]
    QuantisedDtype {
        /// The quantisation mode.
        mode: &'static str,
        /// The element type.
        dtype: &'static str,
        /// Its bytes.
        element_bytes: u64,
    },
    /// A compression ratio that leaves part of a slot.
    #[error("compress_ratio {ratio} does not divide block_size {block_size}")]
    CompressRatioNotDividing {
        /// Tokens that share one slot.
        ratio: u64,
        /// Tokens of a block.
        block_size: u64,
    },
    /// A sliding-window latent of a model version nobody knows the format of.
    #[error("model_version \"{version}\" is not supported; it is unset or \"deepseek_v4\"")]
    UnsupportedModelVersion {
        /// The version given.
        version: String,
    },
    /// Padding that is smaller than what must be stored.
    #[error("page_size_padded_bytes is {padded}; the page needs {unpadded}")]
    PaddedBelowPage {
        /// Bytes given.
        padded: u64,
        /// Bytes needed.
        unpadded: u64,
    },
    /// A page that is no whole number of elements.
    #[error(
        "the page of {page} bytes is not a multiple of {element_bytes}, the bytes of one {dtype}"
    )]
    PageNotWholeElements {
        /// Bytes of the page.
        page: u64,
        /// The element type.
        dtype: &'static str,
        /// Its bytes.
        element_bytes: u64,
    },
    /// A state list and its element types that do not pair up.
    #[error("{shapes} state shapes, but {dtypes} state dtypes")]
    StateListsDiffer {
        /// Shapes given.
        shapes: usize,
        /// Element types given.
        dtypes: usize,
    },
    /// Shapes whose numbers of dimensions do not add up to the sizes given.
    #[error("the state shapes have {wanted} dimensions in all, but {given} sizes are given")]
    StateDimsDiffer {
        /// Dimensions in all.
        wanted: u64,
        /// Sizes given.
        given: usize,
    },
    /// A state that would start between two of its elements.
    #[error(
        "state {state} starts at byte {offset} of the page, which is not a multiple of {element_bytes}, the bytes of one {dtype}"
    )]
    StateMisaligned {
        /// Which state.
        state: usize,
        /// Where it starts.
        offset: u64,
        /// The element type.
        dtype: &'static str,
        /// Its bytes.
        element_bytes: u64,
    },
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

impl SpecError {
    /// A name that stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            SpecError::Zero { .. } => "bad_values",
            SpecError::FieldNotOfKind { .. } => "field_not_of_kind",
            SpecError::ValueWidth { .. } => "value_width_differs",
            SpecError::PackedWidthNotDividing { .. } => "packed_width_not_dividing",
            SpecError::QuantisedDtype { .. } => "quantised_dtype",
            SpecError::CompressRatioNotDividing { .. } => "compress_ratio_not_dividing",
            SpecError::UnsupportedModelVersion { .. } => "unsupported_model_version",
            SpecError::PaddedBelowPage { .. } => "padded_below_page",
            SpecError::PageNotWholeElements { .. } => "view_dtype_misaligned",
            SpecError::StateListsDiffer { .. } | SpecError::StateDimsDiffer { .. } => {
                "state_lists_differ"
            }
            SpecError::StateMisaligned { .. } => "mamba_state_misaligned",
            SpecError::Overflow(_) => "overflow",
        }
    }
}

impl Spec {
    /// Tokens of one block.
    pub fn block_size(&self) -> u64 {
        match self {
            Spec::Attention(attention) => attention.fields().block_size,
            Spec::State(state) => state.fields().block_size,
        }
    }

    /// Slots that one block stores: its tokens, but for compressed layers.
    pub fn storage_block_size(&self) -> u64 {
        match self {
            Spec::Attention(attention) => attention.storage_block_size(),
            Spec::State(state) => state.fields().block_size,
        }
    }

    /// Bytes of one page.
    pub fn page(&self) -> PageBytes {
        match self {
            Spec::Attention(attention) => attention.page(),
            Spec::State(state) => state.page(),
        }
    }

    /// The kind's name.
    pub fn kind_name(&self) -> &'static str {
        match self {
            Spec::Attention(attention) => attention.fields().kind.name(),
            Spec::State(_) => "state",
        }
    }

    /// The attention half, if it is one.
    pub fn as_attention(&self) -> Option<&Attention> {
        match self {
            Spec::Attention(attention) => Some(attention),
            Spec::State(_) => None,
        }
    }

    /// The state half, if it is one.
    pub fn as_state(&self) -> Option<&State> {
        match self {
            Spec::State(state) => Some(state),
            Spec::Attention(_) => None,
        }
    }

    /// Whether the layer is attention of that kind.
    pub fn is_attention_kind(&self, kind: AttentionKind) -> bool {
        self.as_attention()
            .is_some_and(|attention| attention.fields().kind == kind)
    }

    /// Whether the layer takes memory at all: encoder-only attention does not.
    pub fn takes_cache(&self) -> bool {
        !self.is_attention_kind(AttentionKind::EncoderOnly)
    }

    /// The same spec with another padding of the page.
    pub fn with_page_size_padded(&self, padded: Option<u64>) -> Result<Spec, SpecError> {
        match self {
            Spec::Attention(attention) => attention
                .changed(|fields| fields.page_size_padded = padded)
                .map(Spec::Attention),
            Spec::State(state) => state
                .changed(|fields| fields.page_size_padded = padded)
                .map(Spec::State),
        }
    }

    /// The same spec with another number of tokens in a block.
    pub fn with_block_size(&self, block_size: u64) -> Result<Spec, SpecError> {
        match self {
            Spec::Attention(attention) => attention
                .changed(|fields| fields.block_size = block_size)
                .map(Spec::Attention),
            Spec::State(state) => state
                .changed(|fields| fields.block_size = block_size)
                .map(Spec::State),
        }
    }
}

fn positive(field: &'static str, value: u64) -> Result<u64, SpecError> {
    if value == 0 {
        return Err(SpecError::Zero { field });
    }
    Ok(value)
}
