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
pub fn merge(specs: &[&Spec]) -> Result<Spec, MergeError> {
    let (&first, others) = specs.split_first().ok_or(MergeError::Empty)?;
    if others
        .iter()
        .all(|&other| std::ptr::eq(other, first) || other == first)
    {
        return Ok(first.clone());
    }
    let Spec::Attention(attention) = first else {
        return Err(differing_from_state(first, others));
    };
    let mut fields = attention.fields().clone();
    for other in others {
        let Some(other) = other
            .as_attention()
            .filter(|o| o.fields().kind == fields.kind)
        else {
            return Err(MergeError::KindsDiffer {
                first: first.kind_name(),
                other: other.kind_name(),
                first_has_own_rule: fields.kind.is_full_family()
                    || fields.kind == AttentionKind::SlidingWindowMla,
            });
        };
        absorb(&mut fields, other.fields())?;
    }
    if let (Some(window), Some(chunk)) = (fields.sliding_window, fields.attention_chunk_size) {
        return Err(MergeError::WindowAndChunk { window, chunk });
    }
    Ok(Spec::Attention(Attention::new(fields)?))
}

fn differing_from_state(first: &Spec, others: &[&Spec]) -> MergeError {
    match others.iter().find(|other| other.as_state().is_none()) {
        Some(other) => MergeError::KindsDiffer {
            first: first.kind_name(),
            other: other.kind_name(),
            first_has_own_rule: false,
        },
        None => MergeError::SpecsDiffer {
            field: "the state description",
        },
    }
}

fn absorb(into: &mut AttentionFields, other: &AttentionFields) -> Result<(), MergeError> {
    if into.kind.is_full_family() {
        absorb_window(
            "sliding_window",
            &mut into.sliding_window,
            other.sliding_window,
        )?;
        absorb_window(
            "attention_chunk_size",
            &mut into.attention_chunk_size,
            other.attention_chunk_size,
        )?;
        into.non_causal |= other.non_causal;
    }
    let own_rule = into.kind.is_full_family() || into.kind == AttentionKind::SlidingWindowMla;
    match first_difference(into, other) {
        None => Ok(()),
        Some((field, Common::Yes)) => Err(MergeError::SpecsDiffer { field }),
        Some((field, Common::No)) if !own_rule => Err(MergeError::SpecsDiffer { field }),
        Some((field, Common::No)) => Err(MergeError::FieldsDiffer {
            field,
            kind: into.kind.name(),
        }),
    }
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

/// Whether a field is one that every attention layer has.
enum Common {
    Yes,
    No,
}

fn first_difference(a: &AttentionFields, b: &AttentionFields) -> Option<(&'static str, Common)> {
    let full = a.kind.is_full_family();
    let stride_is_common = if a.kind.is_latent() {
        Common::No
    } else {
        Common::Yes
    };
    [
        ("block_size", a.block_size == b.block_size, Common::Yes),
        (
            "num_kv_heads",
            a.num_kv_heads == b.num_kv_heads,
            Common::Yes,
        ),
        ("head_size", a.head_size == b.head_size, Common::Yes),
        ("dtype", a.dtype == b.dtype, Common::Yes),
        ("quant_mode", a.quant_mode == b.quant_mode, Common::Yes),
        (
            "page_size_padded",
            a.page_size_padded == b.page_size_padded,
            Common::Yes,
        ),
        (
            "indexes_kv_by_block_stride",
            a.indexes_kv_by_block_stride == b.indexes_kv_by_block_stride,
            stride_is_common,
        ),
        ("head_size_v", a.head_size_v == b.head_size_v, Common::No),
        (
            "sliding_window",
            full || a.sliding_window == b.sliding_window,
            Common::No,
        ),
        (
            "attention_chunk_size",
            full || a.attention_chunk_size == b.attention_chunk_size,
            Common::No,
        ),
        ("tq_slot_size", a.tq_slot_size == b.tq_slot_size, Common::No),
        ("sink_len", a.sink_len == b.sink_len, Common::No),
        ("rswa_window", a.rswa_window == b.rswa_window, Common::No),
        ("cache_dtype", a.cache_dtype == b.cache_dtype, Common::No),
        ("alignment", a.alignment == b.alignment, Common::No),
        (
            "compress_ratio",
            a.compress_ratio == b.compress_ratio,
            Common::No,
        ),
        (
            "model_version",
            a.model_version == b.model_version,
            Common::No,
        ),
    ]
    .into_iter()
    .find(|(_, same, _)| !same)
    .map(|(field, _, common)| (field, common))
}

/// How alike a set of layers is. The order of the layers does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uniformity {
    /// They need the same number of blocks: same block size, same [`Family`].
    pub is_uniform_type: bool,
    /// They merge into one spec.
    pub is_uniform_spec: bool,
    /// Their pages have the same number of bytes.
    pub is_page_size_uniform: bool,
}

/// How alike `specs` are. `None` when a layer that takes no cache is among them.
pub fn uniformity(specs: &[&Spec]) -> Option<Uniformity> {
    Some(Uniformity {
        is_uniform_type: is_uniform_type(specs)?,
        is_uniform_spec: specs.is_empty() || merge(specs).is_ok(),
        is_page_size_uniform: same(specs.iter().map(|spec| spec.page().padded)),
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
