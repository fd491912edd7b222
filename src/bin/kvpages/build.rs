//! A described model as the library's: specs, block sizes, backends, pipeline stages.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use kvpages::backend::{Backend, Preset};
use kvpages::dtype::Dtype;
use kvpages::model::Model;
use kvpages::plan::{HybridModel, hybrid_block_size};
use kvpages::spec::{
    Attention, AttentionFields, AttentionKind, QuantMode, Spec, State, StateCacheMode, StateFields,
    StateKind,
};
use kvpages::view::{Pages, attention_view};

use crate::config::{Described, Layer, Part, Reach, Store};

/// Tokens of a block where nobody says, as engines have it.
const USUAL_BLOCK: u64 = 16;
/// The same for latents.
const LATENT_BLOCK: u64 = 64;
/// Bytes that pages of DeepSeek V4 are aligned to, packed fp8 and not.
const V4_ALIGNMENT: (u64, u64) = (576, 512);

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// In the model's type.
    Auto,
    /// As plain elements.
    Plain(Dtype),
    /// fp8 with one scale, e4m3 or e5m2.
    Fp8(Dtype),
    /// With scales in the page.
    Scaled(QuantMode),
}

impl KvType {
    /// Names that are read.
    pub const NAMES: [&str; 10] = [
        "auto",
        "bf16",
        "f16",
        "f32",
        "fp8",
        "fp8_e5m2",
        "fp8_per_token_head",
        "int8_per_token_head",
        "int4_per_token_head",
        "nvfp4",
    ];

    /// A type by its name.
    pub fn parse(text: &str) -> Option<KvType> {
        Some(match text {
            "auto" => KvType::Auto,
            "fp8" | "fp8_e4m3" | "fp8_ds_mla" => KvType::Fp8(Dtype::F8E4m3fn),
            "fp8_e5m2" => KvType::Fp8(Dtype::F8E5m2),
            "fp8_per_token_head" => KvType::Scaled(QuantMode::Fp8PerTokenHead),
            "int8_per_token_head" => KvType::Scaled(QuantMode::Int8PerTokenHead),
            "int4_per_token_head" => KvType::Scaled(QuantMode::Int4PerTokenHead),
            "nvfp4" => KvType::Scaled(QuantMode::Nvfp4),
            other => match crate::units::dtype(other)? {
                Dtype::F64 => return None,
                dtype => KvType::Plain(dtype),
            },
        })
    }

    /// The type for people.
    pub fn name(self, model: Dtype) -> String {
        match self {
            KvType::Auto => model.name().to_owned(),
            asked => asked.asked(),
        }
    }

    /// The type as it is asked for.
    pub fn asked(self) -> String {
        match self {
            KvType::Auto => "auto".to_owned(),
            KvType::Plain(dtype) => dtype.name().to_owned(),
            KvType::Fp8(Dtype::F8E5m2) => "fp8_e5m2".to_owned(),
            KvType::Fp8(_) => "fp8".to_owned(),
            KvType::Scaled(mode) => mode.name().to_owned(),
        }
    }

    fn element(self, model: Dtype) -> (Dtype, QuantMode) {
        match self {
            KvType::Auto => (model, QuantMode::None),
            KvType::Plain(dtype) => (dtype, QuantMode::None),
            KvType::Fp8(dtype) => (dtype, QuantMode::Fp8PerTensor),
            KvType::Scaled(QuantMode::Fp8PerTokenHead) => {
                (Dtype::F8E4m3fn, QuantMode::Fp8PerTokenHead)
            }
            KvType::Scaled(QuantMode::Int8PerTokenHead) => (Dtype::I8, QuantMode::Int8PerTokenHead),
            KvType::Scaled(mode) => (Dtype::U8, mode),
        }
    }
}

/// Which backends read the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backends {
    /// What the layers need.
    Auto,
    /// None: layers have no demands, and pages may be padded.
    None,
    /// This one where it suits, and what the others need.
    Preset(Preset),
}

impl Backends {
    /// Names of presets that can be chosen.
    pub fn preset_names() -> impl Iterator<Item = String> {
        let chosen = |preset: &&Preset| takes_latents(**preset) || takes_key_values(**preset);
        Preset::ALL
            .iter()
            .filter(chosen)
            .map(|preset| preset_name(*preset))
    }

    /// Backends by their name, which has been checked.
    pub fn parse(text: &str) -> Backends {
        let preset = Preset::ALL
            .iter()
            .find(|preset| preset_name(**preset) == text);
        match (text, preset) {
            ("none", _) => Backends::None,
            (_, Some(preset)) => Backends::Preset(*preset),
            _ => Backends::Auto,
        }
    }
}

/// `FlashInferNhd` is `flash-infer-nhd`.
pub fn preset_name(preset: Preset) -> String {
    let mut name = String::new();
    for letter in format!("{preset:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

fn takes_key_values(preset: Preset) -> bool {
    (preset as u32) <= Preset::HpcAttention as u32
}

fn takes_latents(preset: Preset) -> bool {
    (Preset::TritonMla as u32..=Preset::RocmAiterMlaSparse as u32).contains(&(preset as u32))
}

/// What decides specs besides the model.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// How keys and values are stored.
    pub kv: KvType,
    /// Tokens of a block, where somebody said.
    pub block_size: Option<u64>,
    /// Which backends read the pages.
    pub backends: Backends,
    /// Tokens of the longest request.
    pub max_len: u64,
    /// Pipeline stages.
    pub stages: u64,
}

/// One model for each pipeline stage.
pub fn stages(described: &Described, choices: &Choices) -> Result<Vec<Arc<Model>>, String> {
    let builder = Builder::new(described, choices)?;
    let bounds = stage_bounds(described.num_layers, choices.stages)?;
    let mut stages = Vec::with_capacity(bounds.len());
    let mut made = HashMap::new();
    let mut first = 0;
    for end in bounds {
        let mut model = Model::new();
        let here = |layer: &&Layer| (first..end).contains(&layer.place);
        for layer in described.layers.iter().filter(here) {
            if let Some(target) = &layer.shares_with
                && model.find(target).is_none()
            {
                return Err(format!(
                    "--pp {}: layer {} reads the pages of {target}, which would be on another stage; use fewer stages",
                    choices.stages, layer.name
                ));
            }
            builder.add(&mut model, layer, &mut made)?;
        }
        stages.push(Arc::new(model));
        first = end;
    }
    Ok(stages)
}

/// Where each stage ends. Layers left over go to the stages before the last, from the back, since the
/// last one has the output's weights too.
fn stage_bounds(layers: u64, stages: u64) -> Result<Vec<u64>, String> {
    if stages > layers {
        return Err(format!(
            "--pp {stages} is more than the model's {layers} layers"
        ));
    }
    let (each, left) = (layers / stages, layers % stages);
    let mut end = 0;
    Ok((0..stages)
        .map(|stage| {
            let from_back = stages - 1 - stage;
            let more = if left == 0 {
                false
            } else {
                (1..=left).contains(&from_back)
            };
            end += each + u64::from(more);
            end
        })
        .collect())
}

/// Whether the kernels of a model fix its block sizes: those of DeepSeek V4 do.
pub fn blocks_are_fixed(described: &Described) -> bool {
    let is_v4 = |layer: &Layer| matches!(layer.store, Store::Compressed { .. });
    described.layers.iter().any(is_v4)
}

struct Builder<'a> {
    described: &'a Described,
    choices: &'a Choices,
    /// Whether states share the memory with attention.
    is_hybrid: bool,
    attention_block: Option<u64>,
    state_page: Option<u64>,
}

impl<'a> Builder<'a> {
    fn new(described: &'a Described, choices: &'a Choices) -> Result<Builder<'a>, String> {
        let is_state = |layer: &Layer| matches!(layer.store, Store::State { .. });
        let states = described.layers.iter().any(is_state);
        let is_hybrid = states && !described.layers.iter().all(is_state);
        let mut builder = Builder {
            described,
            choices,
            is_hybrid,
            attention_block: choices.block_size,
            state_page: None,
        };
        if choices.block_size.is_some() && blocks_are_fixed(described) {
            return Err("--block-size: layers of DeepSeek V4 have blocks of several sizes, which their kernels set, so that no one size can be given".to_owned());
        }
        if is_hybrid {
            builder.size_blocks()?;
        }
        Ok(builder)
    }

    /// An attention block as large as a state.
    fn size_blocks(&mut self) -> Result<(), String> {
        let (mut token, mut state, mut kernel_block) = (0, 0, 1);
        for layer in &self.described.layers {
            match self.spec(layer, Some(1))? {
                Spec::State(spec) => state = state.max(spec.page().real),
                Spec::Attention(spec) => {
                    token = token.max(spec.page().unpadded);
                    if let Some(preset) = self.preset(&layer.store) {
                        kernel_block = kernel_block.max(backend(preset)?.smallest_kernel_block());
                    }
                }
            }
        }
        let sized = hybrid_block_size(&HybridModel {
            block_size: self.choices.block_size.unwrap_or(USUAL_BLOCK),
            smallest_kernel_block: kernel_block,
            attention_bytes_per_token: token,
            state_page_bytes: state,
            state_cache_mode: StateCacheMode::None,
            base_chunk: 1,
        });
        let sized = sized.map_err(|error| error.to_string())?;
        self.attention_block = Some(sized.block_size);
        self.state_page = Some(sized.page_bytes);
        Ok(())
    }

    fn add(
        &self,
        model: &mut Model,
        layer: &Layer,
        made: &mut HashMap<Preset, Arc<Backend>>,
    ) -> Result<(), String> {
        let preset = self.preset(&layer.store);
        let backend = match preset {
            None => None,
            Some(preset) => Some(match made.get(&preset) {
                Some(known) => Arc::clone(known),
                None => {
                    let new = Arc::new(backend(preset)?);
                    made.insert(preset, Arc::clone(&new));
                    new
                }
            }),
        };
        let spec = self.spec(layer, None)?;
        if let (Some(preset), Some(backend), Spec::Attention(spec)) = (preset, &backend, &spec) {
            check_readable(spec, backend).map_err(|why| {
                format!(
                    "layer {}: kernels of the backend {} cannot read it: {why}; choose another --backend, or none to plan for no kernels",
                    layer.name,
                    preset_name(preset)
                )
            })?;
        }
        let heads = u32::try_from(layer.query_heads).unwrap_or(u32::MAX);
        let added = match &layer.shares_with {
            Some(target) => model.share(&layer.name, target, Some(spec), backend, heads),
            None => model.add(&layer.name, spec, backend, heads),
        };
        added.map(|_| ()).map_err(|error| error.to_string())
    }

    fn preset(&self, store: &Store) -> Option<Preset> {
        let chosen = match self.choices.backends {
            Backends::None => return None,
            Backends::Preset(preset) => Some(preset),
            Backends::Auto => None,
        };
        Some(match store {
            Store::KeyValue { key, value, .. } => match (chosen, self.choices.kv) {
                (Some(preset), _) if takes_key_values(preset) => preset,
                (_, KvType::Scaled(QuantMode::Nvfp4)) => Preset::FlashInferNhd,
                (_, _) if key != value => Preset::FlashAttentionDiffKvNhd,
                (_, KvType::Scaled(_)) => Preset::TritonNhd,
                _ => Preset::FlashAttentionNhd,
            },
            Store::Latent { sparse, .. } => match chosen {
                Some(preset) if takes_latents(preset) => preset,
                _ if *sparse => Preset::FlashMlaSparse,
                // Its pages grow in smaller steps, so that a state's page is padded less.
                _ if self.is_hybrid => Preset::TritonMla,
                _ => Preset::FlashMla,
            },
            Store::Indexer { .. } => Preset::DeepseekV32Indexer,
            Store::Compressed { part, .. } => match part {
                Part::Main => Preset::DeepseekV4Mla,
                Part::Window => Preset::DeepseekV4SlidingWindow,
                Part::Indexer => Preset::DeepseekV4Indexer,
                Part::Compressor | Part::IndexerCompressor => Preset::DeepseekV4Compressor,
            },
            Store::State { kind, .. } => match kind {
                StateKind::Mamba1 => Preset::Mamba1,
                StateKind::Mamba2 => Preset::Mamba2,
                StateKind::ShortConv => Preset::ShortConvolution,
                StateKind::GatedDeltaNet => Preset::GatedDeltaNet,
                StateKind::Linear | StateKind::Custom => Preset::LinearAttention,
            },
        })
    }

    fn spec(&self, layer: &Layer, block: Option<u64>) -> Result<Spec, String> {
        let fields = match &layer.store {
            Store::State { kind, states } => return self.state(layer, *kind, states),
            Store::KeyValue {
                reach,
                heads,
                key,
                value,
            } => self.key_value(*reach, *heads, (*key, *value), block),
            Store::Latent { width, sparse } => self.latent(*width, *sparse, block)?,
            Store::Indexer { bytes } => AttentionFields {
                kind: AttentionKind::Mla,
                ..AttentionFields::full(self.latent_block(block), 1, *bytes, Dtype::U8)
            },
            Store::Compressed {
                part,
                width,
                tokens,
            } => self.compressed(*part, *width, *tokens)?,
        };
        let fields = AttentionFields {
            indexes_kv_by_block_stride: true,
            ..fields
        };
        let made = Attention::new(fields).map(Spec::Attention);
        made.map_err(|error| format!("layer {}: {error}", layer.name))
    }

    fn key_value(
        &self,
        reach: Reach,
        heads: u64,
        (key, value): (u64, u64),
        block: Option<u64>,
    ) -> AttentionFields {
        let (dtype, quant_mode) = self.choices.kv.element(self.described.dtype);
        let smallest = match self.choices.backends {
            Backends::Preset(preset) if takes_key_values(preset) => {
                backend(preset).map_or(1, |backend| backend.smallest_kernel_block())
            }
            _ => 1,
        };
        let block = block
            .or(self.attention_block)
            .unwrap_or(USUAL_BLOCK.max(smallest));
        let (kind, sliding_window, attention_chunk_size) = match reach {
            Reach::Full => (AttentionKind::Full, None, None),
            Reach::Window(tokens) => (AttentionKind::SlidingWindow, Some(tokens), None),
            Reach::Chunk(tokens) => (AttentionKind::ChunkedLocal, None, Some(tokens)),
            Reach::Encoder => (AttentionKind::Cross, None, None),
        };
        AttentionFields {
            kind,
            sliding_window,
            attention_chunk_size,
            head_size_v: value,
            quant_mode,
            ..AttentionFields::full(block, heads, key, dtype)
        }
    }

    fn latent_block(&self, block: Option<u64>) -> u64 {
        block.or(self.attention_block).unwrap_or(LATENT_BLOCK)
    }

    fn latent(
        &self,
        width: u64,
        sparse: bool,
        block: Option<u64>,
    ) -> Result<AttentionFields, String> {
        let (dtype, quant_mode) = self.latent_element()?;
        let packed = sparse && quant_mode == QuantMode::Fp8PerTensor;
        let dtype = if packed { Dtype::U8 } else { dtype };
        Ok(AttentionFields {
            kind: AttentionKind::Mla,
            quant_mode,
            cache_dtype: if packed {
                Some(c_text("fp8_ds_mla"))
            } else {
                None
            },
            ..AttentionFields::full(self.latent_block(block), 1, width, dtype)
        })
    }

    /// Latents have no heads to scale.
    fn latent_element(&self) -> Result<(Dtype, QuantMode), String> {
        match self.choices.kv {
            KvType::Scaled(mode) => Err(format!(
                "--kv-dtype {}: this model keeps latents, which have no such format; use auto, bf16 or fp8",
                mode.name()
            )),
            other => Ok(other.element(self.described.dtype)),
        }
    }

    fn compressed(&self, part: Part, width: u64, tokens: u64) -> Result<AttentionFields, String> {
        let (dtype, quant_mode) = self.latent_element()?;
        let packed = quant_mode == QuantMode::Fp8PerTensor;
        let alignment = Some(if packed {
            V4_ALIGNMENT.0
        } else {
            V4_ALIGNMENT.1
        });
        let latent = |fields: AttentionFields| AttentionFields {
            quant_mode,
            cache_dtype: Some(c_text(if packed { "fp8_ds_mla" } else { "auto" })),
            model_version: Some(c_text("deepseek_v4")),
            dtype: if packed { Dtype::U8 } else { dtype },
            ..fields
        };
        let windowed = |block, dtype| AttentionFields {
            kind: AttentionKind::SlidingWindowMla,
            sliding_window: Some(tokens),
            alignment,
            ..AttentionFields::full(block, 1, width, dtype)
        };
        let whole = |dtype| AttentionFields {
            kind: AttentionKind::Mla,
            compress_ratio: tokens,
            alignment,
            ..AttentionFields::full(256, 1, width, dtype)
        };
        Ok(match part {
            Part::Main => latent(whole(dtype)),
            Part::Window => latent(windowed(64, dtype)),
            Part::Indexer => whole(Dtype::U8),
            Part::Compressor | Part::IndexerCompressor => {
                windowed(if tokens > 8 { 8 } else { 4 }, Dtype::F32)
            }
        })
    }

    fn state(
        &self,
        layer: &Layer,
        kind: StateKind,
        states: &[(Dtype, Vec<u64>)],
    ) -> Result<Spec, String> {
        let made = State::new(StateFields {
            kind,
            block_size: self.choices.max_len,
            dtypes: states.iter().map(|(dtype, _)| *dtype).collect(),
            ndims: states.iter().map(|(_, dims)| dims.len() as u32).collect(),
            dims: states
                .iter()
                .flat_map(|(_, dims)| dims.iter().copied())
                .collect(),
            page_size_padded: self.state_page,
            cache_mode: StateCacheMode::None,
            num_speculative_blocks: 0,
        });
        made.map(Spec::State)
            .map_err(|error| format!("layer {}: {error}", layer.name))
    }
}

/// Whether kernels can read a layer's pages at all. Plans are made without a look at it; the library looks
/// when it makes views, as is done here of one block without padding.
fn check_readable(spec: &Attention, backend: &Backend) -> Result<(), String> {
    // The usual layout has no room for nvfp4's scales, which are behind all data of a page.
    let has_own_layout = |mode| {
        let mut layouts = backend.contract().quantised_layouts.iter();
        layouts.any(|(other, _)| *other == mode)
    };
    if spec.fields().quant_mode == QuantMode::Nvfp4 && !has_own_layout(QuantMode::Nvfp4) {
        return Err("the backend has no layout for nvfp4".to_owned());
    }
    let bytes = spec.page().unpadded;
    let pages = Pages {
        num_blocks: 1,
        page_bytes: bytes,
        step_bytes: bytes,
        offset_bytes: 0,
        allocation_bytes: bytes,
        page_by_page: false,
    };
    attention_view(spec, backend, spec.storage_block_size(), &pages)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

fn backend(preset: Preset) -> Result<Backend, String> {
    preset.backend().map_err(|error| error.to_string())
}

fn c_text(text: &str) -> Arc<std::ffi::CStr> {
    // The texts above hold no NUL.
    Arc::from(CString::new(text).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_get_layers_as_engines_deal_them() {
        for (layers, stages, expected) in [
            (32, 1, Some(vec![32])),
            (32, 4, Some(vec![8, 16, 24, 32])),
            // 61 layers on 4: 15, 15, 16, 15.
            (61, 4, Some(vec![15, 30, 46, 61])),
            (7, 4, Some(vec![2, 4, 6, 7])),
            (3, 4, None),
        ] {
            assert_eq!(
                stage_bounds(layers, stages).ok(),
                expected,
                "{layers} on {stages}"
            );
        }
    }

    #[test]
    fn presets_have_names() {
        let names: Vec<String> = Backends::preset_names().collect();
        assert!(
            names.contains(&"flash-attention-nhd".to_owned()),
            "{names:?}"
        );
        assert!(names.contains(&"flash-mla".to_owned()), "{names:?}");
        assert!(!names.contains(&"mamba2".to_owned()), "{names:?}");
        for name in names {
            assert!(
                matches!(Backends::parse(&name), Backends::Preset(_)),
                "{name}"
            );
        }
    }

    #[test]
    fn cache_types_have_names() {
        for name in KvType::NAMES {
            assert!(KvType::parse(name).is_some(), "{name}");
        }
        assert_eq!(KvType::parse("float64"), None);
    }
}
