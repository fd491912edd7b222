//! When layers are one spec, and when they at least need the same number of blocks.

use super::attention::{Attention, AttentionFields, AttentionKind};
use super::set::Family;
use super::{Spec, SpecError};

/// Why specs do not merge into one. A planner takes it as "not one spec", never as a failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Nothing to merge.
    #[error("there is no spec to merge")]
    Empty,
    /// Layers of different kinds, the first of a kind that only merges with itself.
    #[error("a {first} layer and a {other} layer are not one spec")]
    KindsDiffer {
        /// Kind of the first layer.
        first: &'static str,
        /// Kind of the other one.
        other: &'static str,
        /// Whether the first layer's kind has its own rule for merging.
        first_has_own_rule: bool,
    },
    /// Layers that differ in a field that every attention layer has, or in any field of a kind
    /// that merges only when equal.
    #[error("{field} differs between layers")]
    SpecsDiffer {
        /// The field.
        field: &'static str,
    },
    /// Layers that differ in a field of their kind.
    #[error("{field} differs between {kind} layers")]
    FieldsDiffer {
        /// The field.
        field: &'static str,
        /// The kind.
        kind: &'static str,
    },
    /// Two different windows, or two different chunks.
    #[error("{field} is {first} in one layer and {other} in another")]
    WindowsDiffer {
        /// The field.
        field: &'static str,
        /// One value.
        first: u64,
        /// The other.
        other: u64,
    },
    /// A window in one layer and a chunk in another.
    #[error("one layer remembers a window of {window} tokens, another a chunk of {chunk}")]
    WindowAndChunk {
        /// Tokens of the window.
        window: u64,
        /// Tokens of the chunk.
        chunk: u64,
    },
    /// The merged spec is impossible; it is not, when the merged ones exist.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The one spec that all of `specs` are.
///
/// Full kinds merge when they agree on everything but the window, the chunk and `non_causal`:
/// unset and one window merge to that window, and one layer that is not causal makes all so.
/// Every other kind merges when all are equal. Where several things stand against a merge, the
/// one named is the one that the reference checks first.
pub fn merge(specs: &[&Spec]) -> Result<Spec, MergeError> {
    let (&first, others) = specs.split_first().ok_or(MergeError::Empty)?;
    if others
        .iter()
        .all(|&other| std::ptr::eq(other, first) || other == first)
    {
        return Ok(first.clone());
    }
    let Some(rule) = Rule::of(first) else {
        return Err(unequal(first, others));
    };
    let layers = of_family(rule, first, others)?;
    let mut fields = layers[0].fields().clone();
    check_fields(&layers, rule.leading_fields(), &fields, |field| {
        MergeError::FieldsDiffer {
            field,
            kind: fields.kind.name(),
        }
    })?;
    absorb_windows(&mut fields, &layers)?;
    if let Some(latent) = layers
        .iter()
        .find(|l| rule == Rule::Full && l.fields().kind.is_latent())
    {
        return Err(kinds_differ(first, latent.fields().kind.name(), true));
    }
    check_fields(&layers, COMMON_FIELDS, &fields, |field| {
        MergeError::SpecsDiffer { field }
    })?;
    if let (Some(window), Some(chunk)) = (fields.sliding_window, fields.attention_chunk_size) {
        return Err(MergeError::WindowAndChunk { window, chunk });
    }
    if let Some(other) = layers
        .iter()
        .find(|layer| layer.fields().kind != fields.kind)
    {
        return Err(kinds_differ(first, other.fields().kind.name(), true));
    }
    check_fields(&layers, OWN_FIELDS, &fields, |field| {
        MergeError::FieldsDiffer {
            field,
            kind: fields.kind.name(),
        }
    })?;
    Ok(Spec::Attention(Attention::new(fields)?))
}

/// Kinds that have a rule of their own for merging.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Full attention that stores keys and values.
    Full,
    /// R-SWA.
    Rswa,
    /// Full attention that stores latents.
    Latent,
    /// Sliding-window latents.
    SlidingLatent,
}

impl Rule {
    /// The rule for layers of which `first` is the first; `None` where only equal ones merge.
    fn of(first: &Spec) -> Option<Rule> {
        match first.as_attention()?.fields().kind {
            AttentionKind::Full | AttentionKind::Sink | AttentionKind::TurboQuant => {
                Some(Rule::Full)
            }
            AttentionKind::Rswa => Some(Rule::Rswa),
            AttentionKind::Mla | AttentionKind::HiddenState => Some(Rule::Latent),
            AttentionKind::SlidingWindowMla => Some(Rule::SlidingLatent),
            AttentionKind::SlidingWindow
            | AttentionKind::ChunkedLocal
            | AttentionKind::Cross
            | AttentionKind::EncoderOnly => None,
        }
    }

    /// Kinds that are looked at any further.
    fn family_has(self, kind: AttentionKind) -> bool {
        match self {
            Rule::Full => kind.is_full_family(),
            Rule::Rswa => kind == AttentionKind::Rswa,
            Rule::Latent => kind.is_latent() && kind.is_full_family(),
            Rule::SlidingLatent => kind == AttentionKind::SlidingWindowMla,
        }
    }

    /// Fields that are compared before those of every attention layer.
    fn leading_fields(self) -> &'static [Field] {
        match self {
            Rule::Full => &[],
            Rule::Rswa => &[("rswa_window", |a, b| a.rswa_window == b.rswa_window)],
            Rule::Latent => LATENT_FIELDS,
            Rule::SlidingLatent => SLIDING_LATENT_FIELDS,
        }
    }
}

/// A field's name, and whether two layers agree on it.
type Field = (&'static str, fn(&AttentionFields, &AttentionFields) -> bool);

const CACHE_DTYPE: Field = ("cache_dtype", |a, b| a.cache_dtype == b.cache_dtype);
const COMPRESS_RATIO: Field = ("compress_ratio", |a, b| {
    a.compress_ratio == b.compress_ratio
});
const MODEL_VERSION: Field = ("model_version", |a, b| a.model_version == b.model_version);
const BLOCK_STRIDE: Field = ("indexes_kv_by_block_stride", |a, b| {
    a.indexes_kv_by_block_stride == b.indexes_kv_by_block_stride
});

const LATENT_FIELDS: &[Field] = &[CACHE_DTYPE, COMPRESS_RATIO, MODEL_VERSION, BLOCK_STRIDE];
const SLIDING_LATENT_FIELDS: &[Field] = &[
    CACHE_DTYPE,
    COMPRESS_RATIO,
    MODEL_VERSION,
    ("sliding_window", |a, b| {
        a.sliding_window == b.sliding_window
    }),
    BLOCK_STRIDE,
];
/// Fields of every attention layer.
const COMMON_FIELDS: &[Field] = &[
    ("block_size", |a, b| a.block_size == b.block_size),
    ("num_kv_heads", |a, b| a.num_kv_heads == b.num_kv_heads),
    ("head_size", |a, b| a.head_size == b.head_size),
    ("dtype", |a, b| a.dtype == b.dtype),
    ("quant_mode", |a, b| a.quant_mode == b.quant_mode),
    ("page_size_padded_bytes", |a, b| {
        a.page_size_padded == b.page_size_padded
    }),
    BLOCK_STRIDE,
    // It decides the padding.
    ("alignment_bytes", |a, b| a.alignment == b.alignment),
];
/// Fields of some kinds. Windows and chunks were absorbed where they may differ.
const OWN_FIELDS: &[Field] = &[
    ("head_size_v", |a, b| a.head_size_v == b.head_size_v),
    ("tq_slot_bytes", |a, b| a.tq_slot_size == b.tq_slot_size),
    ("sink_len", |a, b| a.sink_len == b.sink_len),
];

fn kinds_differ(first: &Spec, other: &'static str, first_has_own_rule: bool) -> MergeError {
    MergeError::KindsDiffer {
        first: first.kind_name(),
        other,
        first_has_own_rule,
    }
}

/// Why layers of a kind that only merges when all are equal do not.
fn unequal(first: &Spec, others: &[&Spec]) -> MergeError {
    let other_kind = others
        .iter()
        .find(|other| other.kind_name() != first.kind_name());
    match other_kind {
        Some(other) => kinds_differ(first, other.kind_name(), false),
        None => MergeError::SpecsDiffer {
            field: "the description",
        },
    }
}

fn of_family<'a>(
    rule: Rule,
    first: &'a Spec,
    others: &[&'a Spec],
) -> Result<Vec<&'a Attention>, MergeError> {
    let all = std::iter::once(&first).chain(others);
    all.map(|spec| {
        let layer = spec.as_attention();
        let layer = layer.filter(|layer| rule.family_has(layer.fields().kind));
        layer.ok_or_else(|| kinds_differ(first, spec.kind_name(), true))
    })
    .collect()
}

fn check_fields(
    layers: &[&Attention],
    fields: &[Field],
    first: &AttentionFields,
    error: impl Fn(&'static str) -> MergeError,
) -> Result<(), MergeError> {
    for layer in layers {
        for (field, agree) in fields {
            if !agree(first, layer.fields()) {
                return Err(error(field));
            }
        }
    }
    Ok(())
}

/// Full kinds remember one window and one chunk at most.
fn absorb_windows(fields: &mut AttentionFields, layers: &[&Attention]) -> Result<(), MergeError> {
    if !fields.kind.is_full_family() {
        return Ok(());
    }
    for layer in layers {
        let other = layer.fields();
        absorb_window(
            "sliding_window",
            &mut fields.sliding_window,
            other.sliding_window,
        )?;
        absorb_window(
            "attention_chunk_size",
            &mut fields.attention_chunk_size,
            other.attention_chunk_size,
        )?;
        fields.non_causal |= other.non_causal;
    }
    Ok(())
}

fn absorb_window(
    field: &'static str,
    into: &mut Option<u64>,
    other: Option<u64>,
) -> Result<(), MergeError> {
    match (*into, other) {
        (Some(first), Some(other)) if first != other => Err(MergeError::WindowsDiffer {
            field,
            first,
            other,
        }),
        (None, Some(other)) => {
            *into = Some(other);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// How alike a set of layers is. The order of the layers does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uniformity {
    /// They need the same number of blocks: same block size, same [`Family`].
    pub is_uniform_type: bool,
    /// They merge into one spec.
    pub is_uniform_spec: bool,
    /// There are layers, and their pages have the same number of bytes.
    pub is_page_size_uniform: bool,
}

/// How alike `specs` are. `None` when a layer that takes no cache is among them.
pub fn uniformity(specs: &[&Spec]) -> Option<Uniformity> {
    Some(Uniformity {
        is_uniform_type: is_uniform_type(specs)?,
        is_uniform_spec: specs.is_empty() || merge(specs).is_ok(),
        is_page_size_uniform: !specs.is_empty()
            && same(specs.iter().map(|spec| spec.page().padded)),
    })
}

/// Whether `specs` need the same number of blocks. `None` when a layer that takes no cache is
/// among them.
pub(super) fn is_uniform_type(specs: &[&Spec]) -> Option<bool> {
    let families = specs.iter().map(|spec| Family::of(spec));
    let families: Option<Vec<Family>> = families.collect();
    Some(same(families?) && same(specs.iter().map(|spec| spec.block_size())))
}

fn same<T: PartialEq>(values: impl IntoIterator<Item = T>) -> bool {
    let mut values = values.into_iter();
    match values.next() {
        None => true,
        Some(first) => values.all(|value| value == first),
    }
}
