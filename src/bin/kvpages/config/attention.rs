//! What layers with attention keep.

use kvpages::plan::kv_heads_per_rank;
use serde_json::Value;

use super::fields::{ConfigError, Fields, as_flag, refused};
use super::pattern::Kind;
use super::{Part, Reach, Store, Wishes};

/// Elements that share one f32 scale in an indexer's keys.
const INDEXER_SCALE_GROUP: u64 = 128;

/// Heads of one rank: divided, or copied where there are fewer than ranks.
pub fn heads_per_rank(
    fields: &Fields<'_>,
    heads: u64,
    wishes: &Wishes,
) -> Result<u64, ConfigError> {
    let ranks = wishes.tensor_parallel;
    match kv_heads_per_rank(heads, ranks) {
        Ok((heads_here, copies)) => {
            if copies > 1 {
                fields.note(format!(
                    "key-value heads ({heads}) are fewer than --tp {ranks} ranks: each is on {copies} of them"
                ));
            }
            Ok(heads_here)
        }
        Err(error) => refused(format!("model_type {}: {error}", fields.family())),
    }
}

/// Query heads of one rank, which only messages and backends look at.
pub fn query_heads(fields: &Fields<'_>, layer: u64, wishes: &Wishes) -> u64 {
    let heads = fields.heads(layer).unwrap_or(1);
    let ranks = wishes.tensor_parallel;
    if !heads.is_multiple_of(ranks) {
        fields.note(format!(
            "{heads} query heads cannot be divided over --tp {ranks} ranks, which most engines demand; the cache is planned all the same"
        ));
    }
    heads.div_ceil(wishes.tensor_parallel).max(1)
}

/// Whether layers keep a latent.
pub fn is_latent(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    Ok(fields.get("kv_lora_rank").is_some() && fields.flag("use_mla")? != Some(false))
}

/// What a layer with attention keeps: one thing, or a latent and its indexer.
pub fn stores(
    fields: &Fields<'_>,
    kind: Kind,
    layer: u64,
    wishes: &Wishes,
) -> Result<Vec<(&'static str, Store)>, ConfigError> {
    let latent = is_latent(fields)?;
    match kind {
        Kind::Full | Kind::FullAndMamba if latent => latents(fields),
        Kind::Sliding | Kind::Chunked if latent => refused(format!(
            "model_type {}: layer {layer} has a window or a chunk of latents, which is not known here",
            fields.family()
        )),
        Kind::Sliding => {
            let window = fields.required(
                &["sliding_window", "sliding_window_size", "window_size"],
                "the tokens of a window",
            )?;
            let reach = match fields.max_len()? {
                Some(longest) if window >= longest => {
                    fields.note(format!(
                        "windows of {window} tokens are not shorter than the longest sequence, {longest}: layers are full"
                    ));
                    Reach::Full
                }
                _ => Reach::Window(window),
            };
            Ok(vec![("", sliding(fields, layer, reach, wishes)?)])
        }
        Kind::Chunked => {
            let chunk = fields.required(&["attention_chunk_size"], "the tokens of a chunk")?;
            Ok(vec![(
                "",
                key_value(fields, layer, Reach::Chunk(chunk), wishes)?,
            )])
        }
        Kind::Cross => Ok(vec![(
            "",
            key_value(fields, layer, Reach::Encoder, wishes)?,
        )]),
        _ => Ok(vec![("", full(fields, layer, wishes)?)]),
    }
}

fn latents(fields: &Fields<'_>) -> Result<Vec<(&'static str, Store)>, ConfigError> {
    let rank = fields.required(&["kv_lora_rank"], "the width of a latent")?;
    let rope = fields.required(&["qk_rope_head_dim"], "the part of a latent with positions")?;
    let width = rank.saturating_add(rope);
    let index = fields.number("index_head_dim")?.filter(|width| *width > 0);
    let Some(index) = index else {
        return Ok(vec![(
            "",
            Store::Latent {
                width,
                sparse: false,
            },
        )]);
    };
    let bytes = indexer_bytes(index);
    Ok(vec![
        (
            "",
            Store::Latent {
                width,
                sparse: true,
            },
        ),
        (".indexer", Store::Indexer { bytes }),
    ])
}

/// fp8 keys, and an f32 scale for each 128 elements.
fn indexer_bytes(width: u64) -> u64 {
    width.saturating_add(width.div_ceil(INDEXER_SCALE_GROUP).saturating_mul(4))
}

fn widths(fields: &Fields<'_>) -> Result<(u64, u64), ConfigError> {
    let key = fields.head_dim()?;
    Ok((
        key,
        fields
            .number("v_head_dim")?
            .filter(|value| *value > 0)
            .unwrap_or(key),
    ))
}

/// Key-value heads of a layer. Each is read by as many query heads.
fn kv_heads(fields: &Fields<'_>, layer: u64) -> Result<u64, ConfigError> {
    let heads = fields.kv_heads(layer)?;
    let query_heads = fields.heads(layer).unwrap_or(heads);
    if !query_heads.is_multiple_of(heads) {
        fields.note(format!(
            "{heads} key-value heads do not divide {query_heads} query heads, which kernels demand; the cache is planned all the same"
        ));
    }
    Ok(heads)
}

fn key_value(
    fields: &Fields<'_>,
    layer: u64,
    reach: Reach,
    wishes: &Wishes,
) -> Result<Store, ConfigError> {
    let (key, value) = widths(fields)?;
    Ok(Store::KeyValue {
        reach,
        heads: heads_per_rank(fields, kv_heads(fields, layer)?, wishes)?,
        key,
        value,
    })
}

/// Gemma 4's full layers have heads of their own.
fn full(fields: &Fields<'_>, layer: u64, wishes: &Wishes) -> Result<Store, ConfigError> {
    let Some(width) = fields.known(&["global_head_dim"])? else {
        return key_value(fields, layer, Reach::Full, wishes);
    };
    let own = fields.number("num_global_key_value_heads")?;
    let shares_values = fields.flag("attention_k_eq_v")? != Some(false);
    let own = own.filter(|heads| *heads > 0 && shares_values);
    let heads = match own {
        Some(heads) => heads,
        None => kv_heads(fields, layer)?,
    };
    Ok(Store::KeyValue {
        reach: Reach::Full,
        heads: heads_per_rank(fields, heads, wishes)?,
        key: width,
        value: width,
    })
}

/// MiMo's and Step's layers with windows have heads of their own.
fn sliding(
    fields: &Fields<'_>,
    layer: u64,
    reach: Reach,
    wishes: &Wishes,
) -> Result<Store, ConfigError> {
    let other = fields.get("attention_other_setting");
    let of_other = |name: &str| -> Result<Option<u64>, ConfigError> {
        let value = other
            .and_then(|other| other.get(name))
            .filter(|value| !value.is_null());
        value.map(|value| fields.as_number(name, value)).transpose()
    };
    let heads = fields
        .number("swa_num_key_value_heads")?
        .or(of_other("num_attention_groups")?);
    let key = fields.number("swa_head_dim")?.or(of_other("head_dim")?);
    let value = fields.number("swa_v_head_dim")?;
    let (common_key, common_value) = widths(fields)?;
    let own_key = key.unwrap_or(common_key);
    Ok(Store::KeyValue {
        reach,
        heads: match heads {
            Some(heads) => heads_per_rank(fields, heads, wishes)?,
            None => heads_per_rank(fields, kv_heads(fields, layer)?, wishes)?,
        },
        key: own_key,
        value: value.unwrap_or(if key.is_some() { own_key } else { common_value }),
    })
}

/// DeepSeek V4: latents of a window, compressed latents of all tokens, and what compressors and the
/// indexer keep. A ratio of 0 or 1 means the window alone.
pub fn compressed(
    fields: &Fields<'_>,
    ratio: u64,
) -> Result<Vec<(&'static str, Store)>, ConfigError> {
    // Not the hidden size over the heads, which is another width.
    let width = fields.required(&["head_dim"], "the width of a latent")?;
    let window = fields.required(&["sliding_window"], "the tokens of a window")?;
    let part = |part, width, tokens| Store::Compressed {
        part,
        width,
        tokens,
    };
    let mut stores = vec![(".swa", part(Part::Window, width, window))];
    match ratio {
        0 | 1 => return Ok(stores),
        4 | 128 => {}
        other => {
            return refused(format!(
                "{} has {other}; ratios known here are 0, 4 and 128",
                fields.named("compress_ratios")
            ));
        }
    }
    // A compressor of 4 overlaps with the one before, so it keeps twice as many tokens, each twice as wide.
    let overlap = if ratio == 4 { 2 } else { 1 };
    let kept = |width: u64| width.saturating_mul(2 * overlap);
    stores.push((".mla", part(Part::Main, width, ratio)));
    stores.push((
        ".compressor",
        part(Part::Compressor, kept(width), overlap * ratio),
    ));
    if ratio == 4 {
        let index = fields.required(&["index_head_dim"], "the width of the indexer's keys")?;
        let bytes = indexer_bytes(index);
        stores.push((".indexer", part(Part::Indexer, bytes, ratio)));
        let state = part(Part::IndexerCompressor, kept(index), overlap * ratio);
        stores.push((".indexer.compressor", state));
    }
    Ok(stores)
}

/// A layer of a model that a search over architectures made; `None` where it has no attention.
pub fn searched(
    fields: &Fields<'_>,
    block: &Value,
    layer: u64,
    wishes: &Wishes,
) -> Result<Option<Store>, ConfigError> {
    let place = fields.named(&format!("block_configs[{layer}].attention"));
    let attention = match block.get("attention") {
        Some(Value::Object(attention)) => attention,
        Some(Value::Null) => return Ok(None),
        _ => return refused(format!("the field {place} is missing")),
    };
    for name in ["no_op", "replace_with_linear"] {
        let value = attention.get(name).filter(|value| !value.is_null());
        let is_set = value.map(|value| as_flag(&format!("{place}.{name}"), value));
        if is_set.transpose()? == Some(true) {
            return Ok(None);
        }
    }
    let number = |name: &str| -> Result<Option<u64>, ConfigError> {
        let value = attention.get(name).filter(|value| !value.is_null());
        let value = value.map(|value| {
            fields.as_number(&format!("block_configs[{layer}].attention.{name}"), value)
        });
        Ok(value.transpose()?.filter(|number| *number > 0))
    };
    let heads = fields.heads(layer)?;
    let kv_heads = match (number("num_key_value_heads")?, number("n_heads_in_group")?) {
        (Some(heads), _) => heads,
        (None, Some(in_group)) if heads.is_multiple_of(in_group) => heads / in_group,
        (None, Some(in_group)) => {
            return refused(format!(
                "{place}.n_heads_in_group is {in_group}, which does not divide {heads} heads"
            ));
        }
        (None, None) => return refused(format!("the field {place}.n_heads_in_group is missing")),
    };
    let width = fields.head_dim()?;
    Ok(Some(Store::KeyValue {
        reach: number("window_length")?.map_or(Reach::Full, Reach::Window),
        heads: heads_per_rank(fields, kv_heads, wishes)?,
        key: width,
        value: width,
    }))
}
