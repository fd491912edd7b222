//! A model's `config.json`, read: which layers keep something, and what.
//!
//! Rules go by fields. Where a family's fields mean something of their own, or where the maker's
//! configuration class has a default, a table says so by `model_type`. What is assumed is noted.

mod attention;
mod defaults;
mod fields;
mod layers;
mod pattern;
mod state;
#[cfg(test)]
mod tests;

use kvpages::dtype::Dtype;
use kvpages::spec::StateKind;

pub use fields::ConfigError;
use fields::Fields;

/// What the reader is asked for besides the file.
#[derive(Debug, Clone, Copy)]
pub struct Wishes {
    /// Ranks of tensor parallelism.
    pub tensor_parallel: u64,
    /// Whether the layers of the draft that the file describes are wanted too.
    pub draft: bool,
    /// Type of the recurrent states, where it is not the file's.
    pub state_dtype: Option<Dtype>,
    /// Tokens of an encoder's output, where they are not the file's.
    pub encoder_tokens: Option<u64>,
}

/// A model as one rank of tensor parallelism holds it.
#[derive(Debug, Clone)]
pub struct Described {
    /// `model_type` of the file.
    pub model_type: String,
    /// The first of `architectures`.
    pub architecture: Option<String>,
    /// Type of the model's activations, and of what a layer stores unless it is quantised.
    pub dtype: Dtype,
    /// The longest sequence that the model is made for.
    pub max_len: Option<u64>,
    /// Tokens of an encoder's output that cross attention keeps.
    pub encoder_tokens: u64,
    /// Decoder layers in all, also those that keep nothing.
    pub num_layers: u64,
    /// What keeps something, in order.
    pub layers: Vec<Layer>,
    /// What was assumed, for people.
    pub notes: Vec<String>,
}

/// Something that keeps bytes for requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Its name, unique in the model.
    pub name: String,
    /// The decoder layer that it belongs to, which decides its pipeline stage.
    pub place: u64,
    /// What it stores.
    pub store: Store,
    /// The layer whose pages it reads, if it has none of its own.
    pub shares_with: Option<String>,
    /// Whether it belongs to a draft.
    pub is_draft: bool,
    /// Query heads on one rank.
    pub query_heads: u64,
}

/// Which tokens an attention layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All.
    Full,
    /// The last so many.
    Window(u64),
    /// Those of the same chunk.
    Chunk(u64),
    /// Those of the encoder.
    Encoder,
}

/// What a layer stores, on one rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Store {
    /// A key and a value for each token and head.
    KeyValue {
        /// Which tokens.
        reach: Reach,
        /// Heads.
        heads: u64,
        /// Elements of a key.
        key: u64,
        /// Elements of a value.
        value: u64,
    },
    /// A latent for each token (MLA).
    Latent {
        /// Elements.
        width: u64,
        /// Whether its kernels are sparse ones, which have a packed fp8 format of their own.
        sparse: bool,
    },
    /// The fp8 keys of a sparse layer's indexer, scales included.
    Indexer {
        /// Bytes of one token.
        bytes: u64,
    },
    /// A part of DeepSeek V4's attention.
    Compressed {
        /// Which.
        part: Part,
        /// Elements, or bytes of an indexer.
        width: u64,
        /// Tokens that share a slot, or tokens of a window.
        tokens: u64,
    },
    /// States that are as large for one token as for a thousand.
    State {
        /// What computes them.
        kind: StateKind,
        /// Type and dimensions of each.
        states: Vec<(Dtype, Vec<u64>)>,
    },
}

/// The parts of DeepSeek V4's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Compressed latents of all tokens.
    Main,
    /// Latents of the last tokens.
    Window,
    /// What the compressor still works on.
    Compressor,
    /// Compressed keys of the indexer.
    Indexer,
    /// What the indexer's compressor still works on.
    IndexerCompressor,
}

/// Reads `text`, the content of a `config.json`.
pub fn read(text: &str, wishes: &Wishes) -> Result<Described, ConfigError> {
    let root = fields::parse(text)?;
    let fields = Fields::of(&root)?;
    let layers = layers::layers(&fields, wishes)?;
    let dtype = fields.dtype()?;
    let encoder_tokens = layers::encoder_tokens(&fields, wishes, &layers)?;
    state::note_unused_dtype(&fields, wishes, &layers);
    fields.note_what_engines_may_do();
    Ok(Described {
        model_type: fields.model_type().to_owned(),
        architecture: fields.architecture(),
        dtype,
        max_len: fields.max_len()?,
        encoder_tokens,
        num_layers: layers::count(&fields)?,
        layers,
        notes: fields.into_notes(),
    })
}

/// Names that messages list.
fn list(names: &[&str]) -> String {
    names.join(", ")
}

/// Whether `text` is a JSON object at all.
pub fn check_json(text: &str) -> Result<(), ConfigError> {
    fields::parse(text).map(|_| ())
}
