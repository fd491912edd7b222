//! Specs and layers in a few words, for messages and explanations.

use crate::spec::{AttentionFields, QuantMode, Spec, State};

/// What a layer stores, in one line.
pub(super) fn brief(spec: &Spec) -> String {
    let what = match spec {
        Spec::Attention(attention) => attention_text(attention.fields()),
        Spec::State(state) => state_text(state),
    };
    format!("{what}, page {} bytes", spec.page().padded)
}

fn attention_text(fields: &AttentionFields) -> String {
    let mut text = format!(
        "{}, block size {}, {} heads of {}",
        fields.kind.name(),
        fields.block_size,
        fields.num_kv_heads,
        fields.head_size
    );
    if fields.head_size_v != fields.head_size {
        text += &format!("/{}", fields.head_size_v);
    }
    text += &format!(" {}", fields.dtype);
    if fields.quant_mode != QuantMode::None {
        text += &format!(" {}", fields.quant_mode.name());
    }
    for (name, value) in [
        ("window", fields.sliding_window),
        ("chunk", fields.attention_chunk_size),
        ("padded to", fields.page_size_padded),
    ] {
        if let Some(value) = value {
            text += &format!(", {name} {value}");
        }
    }
    text
}

fn state_text(state: &State) -> String {
    let fields = state.fields();
    format!(
        "{} state, block size {}, {} speculative blocks",
        fields.kind.name(),
        fields.block_size,
        fields.num_speculative_blocks
    )
}
