//! Layers that store something for every token: keys and values, or a latent of them.

use std::ffi::CStr;
use std::sync::Arc;

use super::quantisation::{QuantMode, TOKEN_HEAD_SCALE_BYTES};
use super::{PageBytes, SpecError, positive};
use crate::dtype::Dtype;
use crate::num::{product, round_up, sum};

/// What kind of attention a layer computes, as far as its memory is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum AttentionKind {
    /// Every token attends to every earlier one.
    Full = 1,
    /// Full, with tokens at the start that are always attended to.
    Sink = 2,
    /// Full over the prompt, a window over what was generated (reference sliding window).
    Rswa = 3,
    /// Full, with keys and values packed into one slot of a given size.
    TurboQuant = 4,
    /// Full, storing one latent instead of keys and values.
    Mla = 5,
    /// Full, storing hidden states instead of keys and values.
    HiddenState = 6,
    /// The last tokens only.
    SlidingWindow = 7,
    /// The last tokens only, storing one latent.
    SlidingWindowMla = 8,
    /// Tokens of the same chunk only.
    ChunkedLocal = 9,
    /// Keys and values of an encoder's output.
    Cross = 10,
    /// An encoder's own attention: it stores nothing between steps.
    EncoderOnly = 11,
}

impl AttentionKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [AttentionKind; 11] = [
        AttentionKind::Full,
        AttentionKind::Sink,
        AttentionKind::Rswa,
        AttentionKind::TurboQuant,
        AttentionKind::Mla,
        AttentionKind::HiddenState,
        AttentionKind::SlidingWindow,
        AttentionKind::SlidingWindowMla,
        AttentionKind::ChunkedLocal,
        AttentionKind::Cross,
        AttentionKind::EncoderOnly,
    ];

    /// The name people use.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionKind::Full => "full attention",
            AttentionKind::Sink => "sink attention",
            AttentionKind::Rswa => "R-SWA attention",
            AttentionKind::TurboQuant => "TurboQuant attention",
            AttentionKind::Mla => "MLA",
            AttentionKind::HiddenState => "hidden state",
            AttentionKind::SlidingWindow => "sliding window",
            AttentionKind::SlidingWindowMla => "sliding-window MLA",
            AttentionKind::ChunkedLocal => "chunked local attention",
            AttentionKind::Cross => "cross attention",
            AttentionKind::EncoderOnly => "encoder-only attention",
        }
    }

    /// Whether every token of a request stays stored.
    pub const fn is_full_family(self) -> bool {
        matches!(
            self,
            AttentionKind::Full
                | AttentionKind::Sink
                | AttentionKind::Rswa
                | AttentionKind::TurboQuant
                | AttentionKind::Mla
                | AttentionKind::HiddenState
        )
    }

    /// Whether one latent is stored instead of keys and values.
    pub const fn is_latent(self) -> bool {
        matches!(
            self,
            AttentionKind::Mla | AttentionKind::HiddenState | AttentionKind::SlidingWindowMla
        )
    }

    /// Whether only a window of tokens stays stored.
    pub const fn is_sliding(self) -> bool {
        matches!(
            self,
            AttentionKind::SlidingWindow | AttentionKind::SlidingWindowMla
        )
    }
}

/// Everything that describes an attention layer. Plain data: [`Attention::new`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AttentionFields {
    /// The kind.
    pub kind: AttentionKind,
    /// Tokens of one block.
    pub block_size: u64,
    /// Key-value heads on one rank.
    pub num_kv_heads: u64,
    /// Elements of one key, or of the latent.
    pub head_size: u64,
    /// Elements of one value; 0 stores no values.
    pub head_size_v: u64,
    /// Type of one stored element.
    pub dtype: Dtype,
    /// How keys and values are quantised.
    pub quant_mode: QuantMode,
    /// Bytes of one page, padding included.
    pub page_size_padded: Option<u64>,
    /// Whether the layer's kernels step from block to block by a stride they are given, so that
    /// its pages may be padded.
    pub indexes_kv_by_block_stride: bool,
    /// Tokens of the window. Required for sliding kinds, remembered by full ones.
    pub sliding_window: Option<u64>,
    /// Tokens of a chunk. Required for chunked local, remembered by full kinds.
    pub attention_chunk_size: Option<u64>,
    /// Whether tokens attend to later ones. Does not change the memory.
    pub non_causal: bool,
    /// TurboQuant: bytes of one token and head, 0 for the layout of full attention.
    pub tq_slot_size: u64,
    /// Sink: tokens at the start that are always attended to.
    pub sink_len: u64,
    /// R-SWA: generated tokens that stay stored.
    pub rswa_window: u64,
    /// Latents: the cache-dtype string, which may name a packed format (`fp8_ds_mla`).
    pub cache_dtype: Option<Arc<CStr>>,
    /// Latents: bytes that a page must be a multiple of.
    pub alignment: Option<u64>,
    /// Latents: tokens that share one stored slot.
    pub compress_ratio: u64,
    /// Latents: the model version that fixes the format of `fp8_ds_mla`.
    pub model_version: Option<Arc<CStr>>,
}

impl AttentionFields {
    /// A full attention layer whose keys and values are alike, without anything special. Others
    /// are described from it.
    pub fn full(
        block_size: u64,
        num_kv_heads: u64,
        head_size: u64,
        dtype: Dtype,
    ) -> AttentionFields {
        AttentionFields {
            kind: AttentionKind::Full,
            block_size,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            dtype,
            quant_mode: QuantMode::None,
            page_size_padded: None,
            indexes_kv_by_block_stride: false,
            sliding_window: None,
            attention_chunk_size: None,
            non_causal: false,
            tq_slot_size: 0,
            sink_len: 0,
            rswa_window: 0,
            cache_dtype: None,
            alignment: None,
            compress_ratio: 1,
            model_version: None,
        }
    }
}

/// What one token and head stores, in elements of the layer's dtype and without per-token-head
/// scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// A key and a value, each addressable.
    KeyValue {
        /// Elements of a key.
        key: u64,
        /// Elements of a value.
        value: u64,
    },
    /// One run of elements: a latent, a hidden state, or a key without a value.
    Single(u64),
    /// A key and a value packed into one run of elements.
    PackedPair(u64),
}

impl Content {
    /// Elements in all.
    pub fn elements(self) -> u64 {
        match self {
            Content::KeyValue { key, value } => key + value,
            Content::Single(elements) | Content::PackedPair(elements) => elements,
        }
    }
}

/// An attention layer that can be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Attention {
    fields: AttentionFields,
    content: Content,
    page: PageBytes,
}

const FP8_DS_MLA: &CStr = c"fp8_ds_mla";
const DEEPSEEK_V4: &CStr = c"deepseek_v4";
/// Bytes of one token in DeepSeek V3.2's packed latent: 512 fp8, 4 f32 scales, 64 bf16.
const FP8_DS_MLA_BYTES: u64 = 656;
/// Bytes of one slot in DeepSeek V4's packed latent: 448 fp8, 64 bf16, 8 bytes of scales.
const FP8_DS_MLA_V4_BYTES: u64 = 584;

impl Attention {
    /// Checks `fields` and works out the page.
    pub fn new(fields: AttentionFields) -> Result<Attention, SpecError> {
        check_numbers(&fields)?;
        check_fields_of_kind(&fields)?;
        let content = content(&fields)?;
        let page = page(&fields, content)?;
        Ok(Attention {
            fields,
            content,
            page,
        })
    }

    /// A spec with some fields changed and every other one kept.
    pub fn changed(
        &self,
        change: impl FnOnce(&mut AttentionFields),
    ) -> Result<Attention, SpecError> {
        let mut fields = self.fields.clone();
        change(&mut fields);
        Attention::new(fields)
    }

    /// What the layer was described with.
    pub fn fields(&self) -> &AttentionFields {
        &self.fields
    }

    /// Bytes of one page.
    pub fn page(&self) -> PageBytes {
        self.page
    }

    /// Slots that one block stores.
    pub fn storage_block_size(&self) -> u64 {
        storage_block_size(&self.fields)
    }

    /// Heads that are stored: the packed latents hold one, whatever the number of heads says.
    pub fn stored_heads(&self) -> u64 {
        stored_heads(&self.fields)
    }

    /// What one token and head stores.
    pub fn content(&self) -> Content {
        self.content
    }

    /// Bytes of the scales beside one key, one value, or one latent of a token and head.
    pub fn scale_bytes(&self) -> u64 {
        match (self.fields.quant_mode.is_per_token_head(), self.content) {
            (false, _) => 0,
            (true, Content::KeyValue { .. }) => TOKEN_HEAD_SCALE_BYTES,
            (true, Content::Single(_) | Content::PackedPair(_)) => 2 * TOKEN_HEAD_SCALE_BYTES,
        }
    }
}

fn check_numbers(fields: &AttentionFields) -> Result<(), SpecError> {
    positive("block_size", fields.block_size)?;
    positive("num_kv_heads", fields.num_kv_heads)?;
    positive("head_size", fields.head_size)?;
    positive("compress_ratio", fields.compress_ratio)?;
    for (field, value) in [
        ("page_size_padded_bytes", fields.page_size_padded),
        ("sliding_window", fields.sliding_window),
        ("attention_chunk_size", fields.attention_chunk_size),
        ("alignment_bytes", fields.alignment),
    ] {
        positive(field, value.unwrap_or(1))?;
    }
    if !fields.block_size.is_multiple_of(fields.compress_ratio) {
        return Err(SpecError::CompressRatioNotDividing {
            ratio: fields.compress_ratio,
            block_size: fields.block_size,
        });
    }
    let (mode, element_bytes) = (fields.quant_mode, fields.dtype.bytes());
    if mode != QuantMode::None && element_bytes != 1 {
        return Err(SpecError::QuantisedDtype {
            mode: mode.name(),
            dtype: fields.dtype.name(),
            element_bytes,
        });
    }
    Ok(())
}

/// A field that the kind does not use would be silently without effect, so it is refused.
fn check_fields_of_kind(fields: &AttentionFields) -> Result<(), SpecError> {
    let kind = fields.kind;
    let latent = kind.is_latent();
    let full = kind.is_full_family();
    let wrong = [
        (
            "tq_slot_bytes",
            fields.tq_slot_size != 0,
            kind == AttentionKind::TurboQuant,
        ),
        (
            "sink_len",
            fields.sink_len != 0,
            kind == AttentionKind::Sink,
        ),
        (
            "rswa_window",
            fields.rswa_window != 0,
            kind == AttentionKind::Rswa,
        ),
        ("cache_dtype", fields.cache_dtype.is_some(), latent),
        ("alignment_bytes", fields.alignment.is_some(), latent),
        ("compress_ratio", fields.compress_ratio != 1, latent),
        ("model_version", fields.model_version.is_some(), latent),
        ("non_causal", fields.non_causal, full),
        (
            "sliding_window",
            fields.sliding_window.is_some(),
            full || kind.is_sliding(),
        ),
        (
            "attention_chunk_size",
            fields.attention_chunk_size.is_some(),
            full || kind == AttentionKind::ChunkedLocal,
        ),
    ]
    .into_iter()
    .find(|&(_, set, belongs)| set && !belongs);
    if let Some((field, _, _)) = wrong {
        return Err(SpecError::FieldNotOfKind {
            field,
            kind: kind.name(),
        });
    }
    match kind {
        AttentionKind::SlidingWindow | AttentionKind::SlidingWindowMla => {
            positive("sliding_window", fields.sliding_window.unwrap_or(0))?;
        }
        AttentionKind::ChunkedLocal => {
            positive(
                "attention_chunk_size",
                fields.attention_chunk_size.unwrap_or(0),
            )?;
        }
        AttentionKind::Rswa => {
            positive("rswa_window", fields.rswa_window)?;
        }
        _ => {}
    }
    let own_value_width = full || kind.is_sliding();
    if !own_value_width && fields.head_size_v != fields.head_size {
        return Err(SpecError::ValueWidth {
            kind: kind.name(),
            head_size: fields.head_size,
            head_size_v: fields.head_size_v,
        });
    }
    if kind == AttentionKind::SlidingWindowMla {
        let unknown = fields
            .model_version
            .as_deref()
            .filter(|&version| version != DEEPSEEK_V4);
        if let Some(version) = unknown {
            return Err(SpecError::UnsupportedModelVersion {
                version: version.to_string_lossy().into_owned(),
            });
        }
    }
    Ok(())
}

fn storage_block_size(fields: &AttentionFields) -> u64 {
    fields.block_size / fields.compress_ratio
}

fn stored_heads(fields: &AttentionFields) -> u64 {
    match packed_latent_bytes(fields) {
        Some(_) => 1,
        None => fields.num_kv_heads,
    }
}

/// The packed latent formats: the cache dtype decides, whatever the quantisation mode says.
/// Returns bytes of one slot.
fn packed_latent_bytes(fields: &AttentionFields) -> Option<u64> {
    if fields.cache_dtype.as_deref() != Some(FP8_DS_MLA) {
        return None;
    }
    let is_v4 = fields.model_version.as_deref() == Some(DEEPSEEK_V4);
    match fields.kind {
        AttentionKind::Mla | AttentionKind::HiddenState if is_v4 => Some(FP8_DS_MLA_V4_BYTES),
        // One slot holds the whole 656 bytes of each of its tokens.
        AttentionKind::Mla | AttentionKind::HiddenState => {
            Some(FP8_DS_MLA_BYTES.saturating_mul(fields.compress_ratio))
        }
        AttentionKind::SlidingWindowMla if is_v4 => Some(FP8_DS_MLA_V4_BYTES),
        _ => None,
    }
}

fn content(fields: &AttentionFields) -> Result<Content, SpecError> {
    if let Some(bytes) = packed_latent_bytes(fields) {
        return Ok(Content::Single(whole_elements(fields, bytes)?));
    }
    if fields.kind == AttentionKind::TurboQuant && fields.tq_slot_size > 0 {
        return Ok(Content::PackedPair(whole_elements(
            fields,
            fields.tq_slot_size,
        )?));
    }
    if fields.kind.is_latent() {
        // Of the packing modes a latent only knows int4, and a windowed one none.
        let packs = fields.kind != AttentionKind::SlidingWindowMla
            && fields.quant_mode == QuantMode::Int4PerTokenHead;
        return Ok(Content::Single(if packs {
            packed_width(fields, "head_size", fields.head_size)?
        } else {
            fields.head_size
        }));
    }
    let key = packed_width(fields, "head_size", fields.head_size)?;
    if fields.head_size_v == 0 {
        return Ok(Content::Single(key));
    }
    let value = packed_width(fields, "head_size_v", fields.head_size_v)?;
    // Their sum with two scales is computed in many places.
    sum(
        "a key and a value",
        [key, value, 2 * TOKEN_HEAD_SCALE_BYTES],
    )?;
    Ok(Content::KeyValue { key, value })
}

fn packed_width(
    fields: &AttentionFields,
    field: &'static str,
    width: u64,
) -> Result<u64, SpecError> {
    let mode = fields.quant_mode;
    if !width.is_multiple_of(mode.width_multiple()) {
        return Err(SpecError::PackedWidthNotDividing {
            field,
            width,
            mode: mode.name(),
            multiple: mode.width_multiple(),
        });
    }
    Ok(mode.stored_width(width))
}

fn whole_elements(fields: &AttentionFields, bytes: u64) -> Result<u64, SpecError> {
    let element_bytes = fields.dtype.bytes();
    if !bytes.is_multiple_of(element_bytes) {
        return Err(SpecError::PageNotWholeElements {
            page: bytes,
            dtype: fields.dtype.name(),
            element_bytes,
        });
    }
    Ok(bytes / element_bytes)
}

fn page(fields: &AttentionFields, content: Content) -> Result<PageBytes, SpecError> {
    let element_bytes = fields.dtype.bytes();
    let mode = fields.quant_mode;
    let real = product(
        "the page",
        [
            storage_block_size(fields),
            stored_heads(fields),
            content.elements(),
            element_bytes,
        ],
    )?;
    let scales = if mode.is_per_token_head() {
        product(
            "the scales of a page",
            [
                2,
                fields.block_size,
                fields.num_kv_heads,
                TOKEN_HEAD_SCALE_BYTES,
            ],
        )?
    } else {
        0
    };
    let unpadded = sum("the page", [real, scales])?;
    let padded = padded_page(fields.page_size_padded, fields.alignment, unpadded)?;
    if !padded.is_multiple_of(element_bytes) {
        return Err(SpecError::PageNotWholeElements {
            page: padded,
            dtype: fields.dtype.name(),
            element_bytes,
        });
    }
    Ok(PageBytes {
        real,
        unpadded,
        padded,
    })
}

/// Alignment comes last, and never shrinks a padding that was given.
fn padded_page(
    given: Option<u64>,
    alignment: Option<u64>,
    unpadded: u64,
) -> Result<u64, SpecError> {
    let given = given.unwrap_or(unpadded);
    if given < unpadded {
        return Err(SpecError::PaddedBelowPage {
            padded: given,
            unpadded,
        });
    }
    let aligned = round_up("the aligned page", unpadded, alignment.unwrap_or(1))?;
    Ok(given.max(aligned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_by_mode() {
        for (mode, dtype, page) in [
            (QuantMode::None, Dtype::Bf16, 65536),
            (QuantMode::Fp8PerTensor, Dtype::U8, 32768),
            (QuantMode::Int8PerTokenHead, Dtype::I8, 32768 + 1024),
            (QuantMode::Int4PerTokenHead, Dtype::U8, 16384 + 1024),
            (QuantMode::Nvfp4, Dtype::U8, 16 * 8 * 144),
        ] {
            let mut fields = AttentionFields::full(16, 8, 128, dtype);
            fields.quant_mode = mode;
            assert_eq!(
                Attention::new(fields).unwrap().page().padded,
                page,
                "{mode:?}"
            );
        }
    }

    #[test]
    fn alignment_is_last_and_never_shrinks_a_padding() {
        let latent = |padding, alignment| AttentionFields {
            kind: AttentionKind::Mla,
            quant_mode: QuantMode::Int8PerTokenHead,
            page_size_padded: padding,
            alignment: Some(alignment),
            ..AttentionFields::full(16, 1, 72, Dtype::I8)
        };
        assert_eq!(
            Attention::new(latent(None, 576)).unwrap().page().padded,
            1728
        );
        assert_eq!(
            Attention::new(latent(Some(20000), 576))
                .unwrap()
                .page()
                .padded,
            20000
        );
    }

    #[test]
    fn a_changed_spec_keeps_its_other_fields() {
        let mut fields = AttentionFields::full(16, 1, 64, Dtype::I8);
        fields.quant_mode = QuantMode::Int8PerTokenHead;
        fields.indexes_kv_by_block_stride = true;
        let before = Attention::new(fields).unwrap();
        let after = before.changed(|fields| fields.block_size = 32).unwrap();
        assert_eq!(after.page().padded, 2 * before.page().padded);
        assert_eq!(
            after.changed(|fields| fields.block_size = 16).unwrap(),
            before
        );
    }

    #[test]
    fn impossible_specs_are_refused() {
        let zero = AttentionFields::full(0, 1, 64, Dtype::F16);
        assert!(matches!(
            Attention::new(zero),
            Err(SpecError::Zero {
                field: "block_size"
            })
        ));
        let mut odd = AttentionFields::full(16, 1, 33, Dtype::U8);
        odd.quant_mode = QuantMode::Int4PerTokenHead;
        assert!(matches!(
            Attention::new(odd),
            Err(SpecError::PackedWidthNotDividing { width: 33, .. })
        ));
        let huge = AttentionFields::full(1 << 40, 1 << 20, 1 << 10, Dtype::F16);
        assert!(matches!(Attention::new(huge), Err(SpecError::Overflow(_))));
        let mut window = AttentionFields::full(16, 1, 64, Dtype::F16);
        window.kind = AttentionKind::SlidingWindow;
        assert!(matches!(
            Attention::new(window),
            Err(SpecError::Zero {
                field: "sliding_window"
            })
        ));
        let mut stray = AttentionFields::full(16, 1, 64, Dtype::F16);
        stray.tq_slot_size = 54;
        assert!(matches!(
            Attention::new(stray),
            Err(SpecError::FieldNotOfKind {
                field: "tq_slot_bytes",
                ..
            })
        ));
    }
}
