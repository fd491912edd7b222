//! The descriptor of a cache: all that a transfer engine, or another process, needs to find any
//! block of any layer in the cache's allocations, as plain data that can be sent.
//!
//! A descriptor is made of a cache by `cache`, written and read as JSON here, and answers where
//! things are. It has no addresses, only offsets in allocations: whoever has the memory knows where
//! the allocations start. What is read is checked as a stranger's: every block lies inside its
//! allocation, no byte belongs to different blocks, and every element of a block lies in its pages.
//!
//! | word | meaning here |
//! |---|---|
//! | descriptor | the description of one rank's cache |
//! | run | a piece of a page that lies in one: a page is one run, or several where keys and values of all blocks are apart |
//! | row | one key or one value of one slot and head, or one latent |
//! | model kv heads | the kv heads of the whole model, of which a rank holds some |

mod address;
mod check;
mod json;
mod reshard;
mod strided;

pub use address::{Row, RowPart, Run};
pub use reshard::{BlockMove, Reshard, ReshardError};
pub use strided::{Location, MAX_DIMS, Step, StridedCopy};

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// The version that is written and read. It changes when a reader of the former one would find the
/// wrong bytes; keys that such a reader may pass over do not change it.
pub const VERSION: u64 = 1;

/// One rank's cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// [`VERSION`].
    pub descriptor_version: u64,
    /// Blocks that have memory.
    pub num_blocks: u64,
    /// Blocks that have addresses.
    pub max_blocks: u64,
    /// The rank's place among those that share heads, if it was told.
    pub tensor_parallel: Option<TensorParallel>,
    /// The rank's place among those that share tokens, if it was told.
    pub context_parallel: Option<ContextParallel>,
    /// What each allocation's start is a multiple of.
    pub alignment_bytes: u64,
    /// The allocations, in the cache's order.
    pub allocations: Vec<Allocation>,
    /// The groups, those without layers on this rank included.
    pub groups: Vec<Group>,
    /// The layers with views, in the cache's order; then those whose pages no backend reads.
    pub layers: Vec<Layer>,
}

/// A place among ranks that share kv heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorParallel {
    /// Ranks.
    pub size: u64,
    /// Which of them.
    pub rank: u64,
}

/// A place among ranks that share tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextParallel {
    /// Ranks.
    pub size: u64,
    /// Which of them.
    pub rank: u64,
    /// Tokens that go to one rank before the next one's turn.
    pub interleave_tokens: u64,
}

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Its bytes, those of blocks without memory included.
    pub size_bytes: u64,
}

/// Layers that share a block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Tokens of one block.
    pub block_size_tokens: u64,
    /// Tokens of a kernel block; none when no layer has a backend.
    pub kernel_block_size_tokens: Option<u64>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its name, unique in the descriptor.
    pub name: String,
    /// What kind it is, for people.
    pub kind: String,
    /// The group whose block table it follows.
    pub group: u64,
    /// The layer whose pages these are: itself, or the one it shares with.
    pub owner_layer: u64,
    /// The allocation that holds its pages.
    pub allocation: u64,
    /// Where its pages are.
    pub pages: Pages,
    /// How keys, values or latents lie in them; none for other layers.
    pub attention: Option<Attention>,
    /// The states in each page; none for a layer that is none of the kind. Both are missing where no
    /// backend says how pages are read.
    pub states: Option<Vec<State>>,
}

/// Where a layer's pages are. Block `b` is the `run_bytes` bytes at `offset_bytes + b *
/// block_step_bytes + r * run_step_bytes`, for each of `num_runs` runs `r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Where the first run of block 0 starts in the allocation.
    pub offset_bytes: u64,
    /// From block to block.
    pub block_step_bytes: u64,
    /// Runs of a page.
    pub num_runs: u64,
    /// Bytes of one run.
    pub run_bytes: u64,
    /// From run to run of a page; 0 for one run.
    pub run_step_bytes: u64,
    /// Bytes of all runs.
    pub page_bytes: u64,
    /// Those that hold something; the others are padding.
    pub content_bytes: u64,
}

/// How the rows of an attention layer lie in its pages. Key element `e` of head `h` and slot `s` is
/// `(s / kernel_block_slots) * kernel_block_stride_elements + (s % kernel_block_slots) *
/// slot_stride_elements + h * head_stride_elements + e * content_stride_elements` elements behind the
/// start of the block's first run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attention {
    /// Element type.
    #[serde(with = "json::dtype")]
    pub dtype: Dtype,
    /// What a row is made of.
    pub format: Format,
    /// Heads on this rank.
    pub num_kv_heads: u64,
    /// Heads of the whole model, if that is known.
    pub model_kv_heads: Option<u64>,
    /// The model's number of this rank's head 0, if that is known.
    pub first_model_kv_head: Option<u64>,
    /// Slots of a block: its tokens, or fewer where several share one.
    pub block_slots: u64,
    /// Slots of a kernel block.
    pub kernel_block_slots: u64,
    /// From kernel block to kernel block.
    pub kernel_block_stride_elements: u64,
    /// From slot to slot of a kernel block.
    pub slot_stride_elements: u64,
    /// From head to head; 0 when the layout has no heads.
    pub head_stride_elements: u64,
    /// From one element of a row to the next.
    pub content_stride_elements: u64,
    /// From a key to its value; 0 when there is no value of its own.
    pub value_offset_elements: u64,
    /// Stored elements of a key, or of what is stored instead of keys and values.
    pub key_elements: u64,
    /// Stored elements of a value; 0 when there is none of its own.
    pub value_elements: u64,
    /// Type of the scales that are stored; none when there are none.
    #[serde(default, with = "json::optional_dtype")]
    pub scale_dtype: Option<Dtype>,
    /// Elements that the scale behind each key and value takes; 0 when it lies elsewhere.
    pub inline_scale_elements: u64,
    /// Bytes of the scales behind all rows of a page; 0 when they lie elsewhere.
    pub page_end_scale_bytes: u64,
}

/// What a row is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Elements, each a number.
    Plain,
    /// fp8; the one scale of the layer is the engine's.
    Fp8PerTensor,
    /// int8 and a scale for each row.
    Int8PerTokenHead,
    /// fp8 and a scale for each row.
    Fp8PerTokenHead,
    /// Two int4 in a byte, and a scale for each row.
    Int4PerTokenHead,
    /// Two fp4 in a byte, and a scale for each 16; a kernel's own order inside the page.
    Nvfp4,
    /// A key and a value packed into one row.
    TurboQuant,
    /// DeepSeek V3.2's packed latent.
    Fp8DsMla,
    /// DeepSeek V4's packed latent; a kernel's own order inside the page.
    Fp8DsMlaV4,
}

/// One state of a state layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Element type.
    #[serde(with = "json::dtype")]
    pub dtype: Dtype,
    /// Sizes of its dimensions; its elements lie one after another.
    pub shape: Vec<u64>,
    /// Where it starts in the page.
    pub offset_bytes: u64,
}

/// Why a text is no descriptor, or a descriptor has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// No JSON, or not that of a descriptor.
    #[error("the text is no descriptor of a cache: {0}")]
    Json(String),
    /// A version that this library does not know.
    #[error(
        "the descriptor has version {found}; this library reads version {VERSION}: both sides must have a kvpages that knows the version"
    )]
    Version {
        /// The version.
        found: u64,
    },
    /// Numbers that contradict each other.
    #[error("{place}: {problem}")]
    Wrong {
        /// Where in the descriptor.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A name that no layer has.
    #[error("the descriptor has no layer of the name {name}")]
    NoLayerOfName {
        /// The name.
        name: String,
    },
    /// Something that is not there.
    #[error("{what} {number} is not there, the descriptor has {count}")]
    NotThere {
        /// What.
        what: &'static str,
        /// Its number.
        number: u64,
        /// How many there are.
        count: u64,
    },
    /// A part of a layer that is not there.
    #[error("layer {layer}: {what} {number} is out of range, it has {count}")]
    OutOfRange {
        /// The layer.
        layer: String,
        /// Block, slot or head.
        what: &'static str,
        /// Its number.
        number: u64,
        /// How many there are.
        count: u64,
    },
    /// A layer without rows, or without that one.
    #[error("layer {layer}: {why}")]
    NoRow {
        /// The layer.
        layer: String,
        /// Why it has none.
        why: &'static str,
    },
}

impl DescriptorError {
    /// A name that stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            DescriptorError::Json(_) => "descriptor_not_json",
            DescriptorError::Version { .. } => "descriptor_version",
            DescriptorError::Wrong { .. } => "descriptor_invalid",
            DescriptorError::NoLayerOfName { .. } | DescriptorError::NotThere { .. } => "not_found",
            DescriptorError::OutOfRange { what: "block", .. } => "block_id_out_of_range",
            DescriptorError::OutOfRange { .. } => "row_out_of_range",
            DescriptorError::NoRow { .. } => "rows_not_supported",
        }
    }
}

impl Descriptor {
    /// The number of a layer.
    pub fn find(&self, name: &str) -> Result<usize, DescriptorError> {
        let found = self.layers.iter().position(|layer| layer.name == name);
        found.ok_or_else(|| DescriptorError::NoLayerOfName {
            name: name.to_owned(),
        })
    }

    /// A layer by its number.
    pub fn layer(&self, layer: usize) -> Result<&Layer, DescriptorError> {
        self.layers.get(layer).ok_or(DescriptorError::NotThere {
            what: "layer",
            number: layer as u64,
            count: self.layers.len() as u64,
        })
    }
}

impl Format {
    /// Whether where a row's bytes lie depends on nothing but its slot and head, so that rows can be
    /// moved one by one.
    pub fn has_rows(self) -> bool {
        !matches!(self, Format::Nvfp4 | Format::Fp8DsMlaV4)
    }

    /// Whether each row has a scale of its own.
    pub fn has_row_scales(self) -> bool {
        matches!(
            self,
            Format::Int8PerTokenHead | Format::Fp8PerTokenHead | Format::Int4PerTokenHead
        )
    }

    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Plain => "plain",
            Format::Fp8PerTensor => "fp8_per_tensor",
            Format::Int8PerTokenHead => "int8_per_token_head",
            Format::Fp8PerTokenHead => "fp8_per_token_head",
            Format::Int4PerTokenHead => "int4_per_token_head",
            Format::Nvfp4 => "nvfp4",
            Format::TurboQuant => "turbo_quant",
            Format::Fp8DsMla => "fp8_ds_mla",
            Format::Fp8DsMlaV4 => "fp8_ds_mla_v4",
        }
    }
}

impl Attention {
    /// Kernel blocks of one block.
    pub fn kernel_blocks(&self) -> u64 {
        self.block_slots / self.kernel_block_slots.max(1)
    }

    /// Whether a value lies right behind its key and the key's scale, so that both are one run of
    /// elements.
    pub fn value_is_beside_key(&self) -> bool {
        let key = self.key_elements.checked_add(self.inline_scale_elements);
        let behind = key.and_then(|key| key.checked_mul(self.content_stride_elements));
        self.value_elements > 0 && behind == Some(self.value_offset_elements)
    }
}
