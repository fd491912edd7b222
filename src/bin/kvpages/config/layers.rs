//! A model's layers, from its fields.

use super::fields::{ConfigError, Fields, LAYERS, refused};
use super::pattern::{self, Kind};
use super::{Layer, Reach, Store, Wishes, attention, defaults, state};

/// More decoder layers than any model has.
const MOST_LAYERS: u64 = 100_000;

/// Decoder layers in all.
pub fn count(fields: &Fields<'_>) -> Result<u64, ConfigError> {
    let names: &[&str] = match is_encoder_decoder(fields)? {
        true => &[
            "decoder_layers",
            "num_decoder_layers",
            "decoder_num_hidden_layers",
            "num_hidden_layers",
            "num_layers",
        ],
        false => LAYERS,
    };
    let count = fields.required(names, "the number of layers")?;
    if count > MOST_LAYERS {
        return refused(format!(
            "{} is {count}; it must be at most {MOST_LAYERS}",
            fields.named(names[0])
        ));
    }
    Ok(count)
}

/// Whether the fields describe an encoder and a decoder together.
fn has_encoder(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    Ok(fields.flag("is_encoder_decoder")? == Some(true) || fields.family() == "whisper")
}

/// Whether the model is the decoder of a file that has an encoder of another kind beside it.
fn is_beside_encoder(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    let attends = fields.flag("add_cross_attention")? == Some(true)
        || fields.get("cross_attention_hidden_size").is_some()
        || fields.is_nested() && fields.outer_flag("is_encoder_decoder")? == Some(true);
    Ok(attends && !has_encoder(fields)?)
}

/// Whether its fields are named as those of BART's decoder.
fn is_encoder_decoder(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    let is_named_so = fields.get("decoder_layers").is_some();
    Ok(has_encoder(fields)? || is_named_so && is_beside_encoder(fields)?)
}

/// All that keeps something.
pub fn layers(fields: &Fields<'_>, wishes: &Wishes) -> Result<Vec<Layer>, ConfigError> {
    if let Some(why) = defaults::why_not(fields.family()) {
        return refused(format!("model_type {}: {why}", fields.family()));
    }
    let mut layers = if is_encoder_decoder(fields)? {
        encoder_decoder(fields, wishes)?
    } else if fields.get("compress_ratios").is_some() {
        compressed(fields)?
    } else if fields.get("block_configs").is_some() {
        searched(fields, wishes)?
    } else if fields.family().starts_with("longcat_flash") {
        twice(fields, wishes)?
    } else {
        by_kind(fields, wishes)?
    };
    if wishes.draft {
        let draft = draft(fields, wishes, &layers)?;
        layers.extend(draft);
    }
    if layers.is_empty() {
        return refused(format!(
            "model_type {}: no layer keeps anything, so there is no cache to plan",
            fields.family()
        ));
    }
    Ok(layers)
}

fn layer(name: String, place: u64, store: Store, query_heads: u64) -> Layer {
    Layer {
        name,
        place,
        store,
        shares_with: None,
        is_draft: false,
        query_heads,
    }
}

fn by_kind(fields: &Fields<'_>, wishes: &Wishes) -> Result<Vec<Layer>, ConfigError> {
    let count = count(fields)?;
    let mut kinds = pattern::kinds(fields, count, num_drafts(fields)?)?;
    kinds.truncate(count as usize);
    let first_sharing = first_sharing(fields, count)?;
    let mut layers: Vec<Layer> = Vec::new();
    for (place, &kind) in (0..).zip(&kinds) {
        let owner = match place >= first_sharing {
            true => Some(owner(
                fields,
                &kinds[..first_sharing as usize],
                kind,
                place,
            )?),
            false => None,
        };
        for (suffix, store) in stores(fields, kind, place, wishes)? {
            let heads = attention::query_heads(fields, place, wishes);
            layers.push(Layer {
                shares_with: owner.map(|owner| format!("model.layers.{owner}{suffix}")),
                ..layer(format!("model.layers.{place}{suffix}"), place, store, heads)
            });
        }
    }
    Ok(layers)
}

fn stores(
    fields: &Fields<'_>,
    kind: Kind,
    place: u64,
    wishes: &Wishes,
) -> Result<Vec<(String, Store)>, ConfigError> {
    let mut stores = Vec::new();
    if matches!(
        kind,
        Kind::Full | Kind::Sliding | Kind::Chunked | Kind::Cross | Kind::FullAndMamba
    ) {
        for (suffix, store) in attention::stores(fields, kind, place, wishes)? {
            let name = if kind == Kind::Cross {
                "cross_attn"
            } else {
                "self_attn"
            };
            stores.push((format!(".{name}{suffix}"), store));
        }
        if kind != Kind::Cross && is_beside_encoder(fields)? {
            for (suffix, store) in attention::stores(fields, Kind::Cross, place, wishes)? {
                stores.push((format!(".encoder_attn{suffix}"), store));
            }
        }
    }
    match kind {
        Kind::Linear => stores.push((".linear_attn".to_owned(), state::linear(fields, wishes)?)),
        Kind::Kda => stores.push((".linear_attn".to_owned(), state::kda(fields, wishes)?)),
        Kind::Mamba | Kind::FullAndMamba => {
            stores.push((".mamba".to_owned(), state::mamba(fields, wishes)?));
        }
        Kind::ShortConv => stores.push((".conv".to_owned(), state::short_conv(fields, wishes)?)),
        _ => {}
    }
    Ok(stores)
}

/// The first layer that reads another's keys and values.
fn first_sharing(fields: &Fields<'_>, count: u64) -> Result<u64, ConfigError> {
    let shared = fields.number("num_kv_shared_layers")?.unwrap_or(0);
    match count.checked_sub(shared) {
        Some(first) if first > 0 || shared == 0 => Ok(first),
        _ => refused(format!(
            "{} is {shared}, but there are {count} layers, and one must own what is shared",
            fields.named("num_kv_shared_layers")
        )),
    }
}

/// Gemma: a sharing layer reads the last layer of its kind that has keys and values of its own.
fn owner(
    fields: &Fields<'_>,
    owners: &[Kind],
    kind: Kind,
    place: u64,
) -> Result<usize, ConfigError> {
    owners
        .iter()
        .rposition(|owner| *owner == kind)
        .ok_or_else(|| {
            ConfigError(format!(
                "{}: layer {place} shares, but no earlier layer is of its kind",
                fields.named("num_kv_shared_layers")
            ))
        })
}

/// Encoder and decoder: a decoder layer attends to its own tokens and to the encoder's.
fn encoder_decoder(fields: &Fields<'_>, wishes: &Wishes) -> Result<Vec<Layer>, ConfigError> {
    let count = count(fields)?;
    let heads = fields.required(
        &[
            "decoder_attention_heads",
            "decoder_num_attention_heads",
            "num_attention_heads",
            "num_heads",
        ],
        "the heads of a decoder layer",
    )?;
    let kv_heads = fields
        .known(&["decoder_num_key_value_heads", "num_key_value_heads"])?
        .unwrap_or(heads);
    let width = match fields.number("d_kv")?.or(fields.number("head_dim")?) {
        Some(width) => width,
        None => {
            let hidden =
                fields.required(&["d_model", "hidden_size"], "the width of the decoder")?;
            if !hidden.is_multiple_of(heads) {
                return refused(format!(
                    "d_model {hidden} is no multiple of the {heads} heads of a decoder layer"
                ));
            }
            hidden / heads
        }
    };
    let heads = attention::heads_per_rank(fields, kv_heads, wishes)?;
    let mut layers = Vec::new();
    for place in 0..count {
        for (name, reach) in [("self_attn", Reach::Full), ("encoder_attn", Reach::Encoder)] {
            let store = Store::KeyValue {
                reach,
                heads,
                key: width,
                value: width,
            };
            layers.push(layer(
                format!("model.decoder.layers.{place}.{name}"),
                place,
                store,
                heads,
            ));
        }
    }
    Ok(layers)
}

/// DeepSeek V4: one ratio for each layer, and for each of the draft.
fn compressed(fields: &Fields<'_>) -> Result<Vec<Layer>, ConfigError> {
    let count = count(fields)?;
    let ratios = fields.numbers("compress_ratios")?.unwrap_or_default();
    if (ratios.len() as u64) < count {
        return refused(format!(
            "{} has {} entries, but there are {count} layers",
            fields.named("compress_ratios"),
            ratios.len()
        ));
    }
    let mut layers = Vec::new();
    for (place, &ratio) in (0..count).zip(&ratios) {
        for (suffix, store) in attention::compressed(fields, ratio)? {
            layers.push(layer(
                format!("model.layers.{place}.attn{suffix}"),
                place,
                store,
                1,
            ));
        }
    }
    Ok(layers)
}

/// Nemotron Super and others that a search over architectures made.
fn searched(fields: &Fields<'_>, wishes: &Wishes) -> Result<Vec<Layer>, ConfigError> {
    let count = count(fields)?;
    let blocks = fields.items("block_configs")?.unwrap_or_default();
    if blocks.len() as u64 != count {
        return refused(format!(
            "{} has {} entries, but there are {count} layers",
            fields.named("block_configs"),
            blocks.len()
        ));
    }
    let mut layers = Vec::new();
    for (place, block) in (0..).zip(blocks) {
        if let Some(store) = attention::searched(fields, block, place, wishes)? {
            let heads = attention::query_heads(fields, place, wishes);
            layers.push(layer(
                format!("model.layers.{place}.self_attn"),
                place,
                store,
                heads,
            ));
        }
    }
    Ok(layers)
}

/// LongCat Flash: two attentions in a layer.
fn twice(fields: &Fields<'_>, wishes: &Wishes) -> Result<Vec<Layer>, ConfigError> {
    fields.note("a LongCat Flash layer has two attentions, each with a cache");
    let mut layers = Vec::new();
    for place in 0..count(fields)? {
        for half in 0..2 {
            for (suffix, store) in attention::stores(fields, Kind::Full, place, wishes)? {
                let heads = attention::query_heads(fields, place, wishes);
                let name = format!("model.layers.{place}.self_attn.{half}{suffix}");
                layers.push(layer(name, place, store, heads));
            }
        }
    }
    Ok(layers)
}

/// Whether kinds of layers come from rules of their own.
fn is_listed(fields: &Fields<'_>) -> bool {
    let other = ["compress_ratios", "block_configs"];
    !other.iter().any(|name| fields.get(name).is_some())
        && !fields.family().starts_with("longcat_flash")
}

/// Layers of the draft that the file describes.
fn num_drafts(fields: &Fields<'_>) -> Result<u64, ConfigError> {
    let modules = fields
        .number("num_mtp_modules")?
        .filter(|modules| *modules > 0);
    if let Some(modules) = modules {
        let layers = fields.number("mtp_transformer_layers")?.unwrap_or(1).max(1);
        return Ok(modules.saturating_mul(layers));
    }
    let mut number = 0;
    for name in [
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_layers",
    ] {
        number = number.max(fields.number(name)?.unwrap_or(0));
    }
    Ok(number)
}

/// The layers of the draft that the file describes.
fn draft(
    fields: &Fields<'_>,
    wishes: &Wishes,
    layers: &[Layer],
) -> Result<Vec<Layer>, ConfigError> {
    let number = num_drafts(fields)?;
    if number == 0 {
        return refused(format!(
            "--draft: the config of model_type {} describes no draft layers; none of num_nextn_predict_layers, \
             mtp_num_hidden_layers, num_mtp_modules is given and positive",
            fields.family()
        ));
    }
    if number > 1024 {
        return refused(format!(
            "--draft: the config describes {number} draft layers; at most 1024 are planned"
        ));
    }
    let count = count(fields)?;
    let ratios = fields.numbers("compress_ratios")?;
    let kinds = match is_listed(fields) {
        true => pattern::kinds(fields, count, number)?,
        false => Vec::new(),
    };
    let last = layers.iter().map(|layer| layer.place).max().unwrap_or(0);
    let mut added = Vec::new();
    for place in count..count + number {
        let stores = match &ratios {
            Some(ratios) => {
                let ratio = ratios.get(place as usize).copied().unwrap_or(0);
                attention::compressed(fields, ratio)?
            }
            None => {
                // Where numbers go by layer, a draft's layer is like the last.
                let kind = kinds.get(place as usize).copied().unwrap_or(Kind::Full);
                attention::stores(fields, kind, count - 1, wishes)?
            }
        };
        for (suffix, store) in stores {
            let heads = attention::query_heads(fields, count - 1, wishes);
            added.push(Layer {
                is_draft: true,
                ..layer(
                    format!("draft.layers.{place}.self_attn{suffix}"),
                    last,
                    store,
                    heads,
                )
            });
        }
    }
    fields.note(match ratios {
        Some(_) => format!("draft layers: {number}, by their compress_ratios"),
        None if kinds.len() as u64 > count => {
            format!("draft layers: {number}, of the kinds that the list of kinds ends with")
        }
        None => {
            format!("draft layers: {number}, each with full attention like that of the model's own")
        }
    });
    Ok(added)
}

/// Tokens of an encoder's output that cross attention keeps.
pub fn encoder_tokens(
    fields: &Fields<'_>,
    wishes: &Wishes,
    layers: &[Layer],
) -> Result<u64, ConfigError> {
    let crosses = layers.iter().any(|layer| {
        matches!(
            layer.store,
            Store::KeyValue {
                reach: Reach::Encoder,
                ..
            }
        )
    });
    if !crosses {
        if wishes.encoder_tokens.is_some() {
            fields.note("--encoder-tokens has no effect: the model has no cross attention");
        }
        return Ok(0);
    }
    if let Some(tokens) = wishes.encoder_tokens {
        return Ok(tokens);
    }
    if let Some(tokens) = fields.known(&["max_source_positions"])? {
        return Ok(tokens);
    }
    // A decoder beside an encoder of another kind has these for itself alone.
    if has_encoder(fields)?
        && let Some(tokens) = fields.known(&["max_position_embeddings", "n_positions"])?
    {
        fields.note(format!(
            "the encoder is taken to give as many tokens as the decoder may have, {tokens}; --encoder-tokens changes it"
        ));
        return Ok(tokens);
    }
    refused(format!(
        "model_type {}: it has cross attention, but no field says how many tokens its encoder gives; give --encoder-tokens",
        fields.family()
    ))
}
