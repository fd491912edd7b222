//! Which layer is of which kind.

use serde_json::Value;

use super::defaults;
use super::fields::{ConfigError, Fields, refused};

/// What a decoder layer computes, as far as it keeps something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Attention to all tokens.
    Full,
    /// Attention to the last tokens.
    Sliding,
    /// Attention to the tokens of a chunk.
    Chunked,
    /// Attention to an encoder's tokens.
    Cross,
    /// Linear attention: gated delta nets, lightning attention.
    Linear,
    /// Kimi delta attention.
    Kda,
    /// A Mamba layer of either version.
    Mamba,
    /// A short convolution.
    ShortConv,
    /// Attention to all tokens, and a Mamba layer beside it.
    FullAndMamba,
    /// Nothing that is kept: an MLP, experts, or no layer at all.
    Nothing,
}

/// Names of kinds in lists of one for each layer.
const NAMES: &[(&str, Kind)] = &[
    ("full_attention", Kind::Full),
    ("attention", Kind::Full),
    ("full", Kind::Full),
    ("global", Kind::Full),
    ("global_attention", Kind::Full),
    ("dense_attention", Kind::Full),
    ("sliding_attention", Kind::Sliding),
    ("sliding_window_attention", Kind::Sliding),
    ("sliding_window", Kind::Sliding),
    ("sliding", Kind::Sliding),
    ("local", Kind::Sliding),
    ("local_attention", Kind::Sliding),
    ("swa", Kind::Sliding),
    ("chunked_attention", Kind::Chunked),
    ("linear_attention", Kind::Linear),
    ("linear", Kind::Linear),
    ("lightning_attention", Kind::Linear),
    ("kda", Kind::Kda),
    ("mamba", Kind::Mamba),
    ("mamba2", Kind::Mamba),
    ("conv", Kind::ShortConv),
    ("short_conv", Kind::ShortConv),
    ("hybrid", Kind::FullAndMamba),
    ("moe", Kind::Nothing),
    ("mlp", Kind::Nothing),
];

/// Fields that decide layers in ways that only these rules know. An unknown family that has one of
/// them and is not decided by a rule is refused.
const TELLING: &[&str] = &[
    "mamba",
    "ssm",
    "linear_attn",
    "linear_attention",
    "linear_num",
    "linear_conv",
    "linear_silu",
    "lightning",
    "recurrent",
    "retention",
    "delta_net",
    "rwkv",
    "lru",
    "hybrid",
    "block_types",
    "attn_type",
    "attention_type",
    "layer_pattern",
    "layer_group",
    "attn_layer",
    "full_attn",
    "attention_layers",
    "conv_l_cache",
    "conv_kernel",
    "conv1d",
    "short_conv",
    "d_conv",
    "attention_chunk",
    "state_size",
    "sparse_attention",
    "global_attn",
    "cross_attention",
];

/// Fields that say what layers keep beyond their kinds: whose keys and values they read, how those are
/// compressed, and how often the layers run, each time with a cache of its own. No list of kinds
/// answers them.
const BEYOND_KINDS: &[&str] = &[
    "compress_rat",
    "kv_compress",
    "kv_shar",
    "shared_kv",
    "cla_share",
    "yoco",
    "cross_layer",
    "ut_steps",
    "num_loop",
];

/// Decides the kinds of so many layers where its fields are given.
type Rule = fn(&Fields<'_>, u64) -> Result<Option<Vec<Kind>>, ConfigError>;

/// One kind for each of `count` layers, and for those of the draft where the file has them.
pub fn kinds(fields: &Fields<'_>, count: u64, drafts: u64) -> Result<Vec<Kind>, ConfigError> {
    let rules: [Rule; 15] = [
        one_name_a_layer,
        letters_of_nemotron,
        kimi_lists,
        numbers_of_mimo,
        numbers_of_minimax,
        attention_indices,
        attention_period,
        every_layer_both,
        every_layer_global,
        full_interval,
        window_pattern,
        chunks_of_llama4,
        cross_layers,
        windows_above,
        only_mamba,
    ];
    refuse_beyond_kinds(fields)?;
    for rule in rules {
        if let Some(kinds) = rule(fields, count)? {
            if !defaults::is_known(fields.family()) {
                fields.note(format!(
                    "model_type {} is not known here: planned from its plain fields, with layers of the kinds that they say",
                    fields.family()
                ));
            }
            return expect_count(fields, kinds, count, drafts);
        }
    }
    uniform(fields, count)
}

fn is_of(name: &str, parts: &[&str]) -> bool {
    let name = name.to_lowercase();
    parts.iter().any(|part| name.contains(part))
}

fn refuse_beyond_kinds(fields: &Fields<'_>) -> Result<(), ConfigError> {
    let family = fields.family();
    // Hunyuan's files have the factor also where it is not used.
    let is_off = fields.flag("use_cla")? == Some(false);
    let is_answered = |name: &str, value: &Value| match name {
        "num_kv_shared_layers" => defaults::is_known(family),
        "cla_share_factor" if is_off => true,
        // A factor of 1 shares nothing, and one run is what any model has.
        _ => value.as_f64() == Some(1.0),
    };
    let beyond = fields
        .set()
        .find(|(name, value)| is_of(name, BEYOND_KINDS) && !is_answered(name, value));
    match beyond {
        None => Ok(()),
        Some((name, _)) => refused(format!(
            "model_type {family}: its field {} is set, which decides beyond the kinds of layers what they keep \
             (whose keys and values they read, or how often they run), in a way that is not known here",
            fields.named(name)
        )),
    }
}

fn expect_count(
    fields: &Fields<'_>,
    kinds: Vec<Kind>,
    count: u64,
    drafts: u64,
) -> Result<Vec<Kind>, ConfigError> {
    let given = kinds.len() as u64;
    match given == count || given == count.saturating_add(drafts) {
        true => Ok(kinds),
        false => refused(format!(
            "the list of kinds has {} entries, but {} is {count}",
            kinds.len(),
            fields.named("num_hidden_layers")
        )),
    }
}

/// All layers alike, and where they are not known to be, nothing that says otherwise.
fn uniform(fields: &Fields<'_>, count: u64) -> Result<Vec<Kind>, ConfigError> {
    let family = fields.family();
    let is_plain = defaults::is_plain(family);
    if !is_plain {
        let latent = fields.get("kv_lora_rank").is_some();
        let telling = fields.set().find(|(name, _)| is_of(name, TELLING));
        if let Some((name, _)) = telling {
            return refused(format!(
                "model_type {family} is not known here, and its field {} may decide what layers keep; \
                 give layer_types, one name for each layer, so that nothing has to be guessed",
                fields.named(name)
            ));
        }
        if !defaults::is_known(family) {
            let what = if latent {
                "latents (MLA)"
            } else {
                "keys and values"
            };
            fields.note(format!(
                "model_type {family} is not known here: planned from its plain fields, all layers alike with {what}"
            ));
        }
    }
    let slides = fields.flag("use_sliding_window")?;
    let (is_said, slides) = (slides.is_some(), slides != Some(false));
    let window = match defaults::windows_all(family) {
        true => fields.known(&["sliding_window"])?,
        false => fields
            .number("sliding_window")?
            .filter(|window| *window > 0),
    };
    let kind = match window {
        Some(_) if slides && defaults::windows_all(family) => Kind::Sliding,
        Some(_) if slides && is_plain && !is_said => Kind::Full,
        Some(_) if slides => {
            return refused(format!(
                "model_type {family}: {} is set, but nothing says which layers have the window; give layer_types",
                fields.named("sliding_window")
            ));
        }
        _ => Kind::Full,
    };
    if let (Some(window), Kind::Sliding) = (window, kind) {
        fields.note(format!(
            "sliding_window {window} holds for all layers of this family"
        ));
    }
    if window.is_some() && slides && kind == Kind::Full {
        fields
            .note("sliding_window is given, but this family does not use it: all layers are full");
    }
    repeat(kind, count)
}

fn repeat(kind: Kind, count: u64) -> Result<Vec<Kind>, ConfigError> {
    each(count, |_| kind)
}

fn each(count: u64, kind: impl Fn(u64) -> Kind) -> Result<Vec<Kind>, ConfigError> {
    Ok((0..count).map(kind).collect())
}

fn named(name: &str) -> Option<Kind> {
    NAMES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, kind)| *kind)
}

fn one_name_a_layer(fields: &Fields<'_>, _: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    for name in [
        "layer_types",
        "layers_block_type",
        "block_types",
        "layer_type",
    ] {
        let Some(items) = fields.items(name)? else {
            continue;
        };
        let kinds = items.iter().enumerate().map(|(layer, item)| {
            let text = item.as_str().unwrap_or("");
            named(text).map_or_else(
                || {
                    refused(format!(
                        "{}[{layer}] is {item}; kinds of layers known here are {}",
                        fields.named(name),
                        NAMES
                            .iter()
                            .map(|(name, _)| *name)
                            .collect::<Vec<_>>()
                            .join(", ")
                    ))
                },
                Ok,
            )
        });
        return kinds.collect::<Result<Vec<_>, _>>().map(Some);
    }
    Ok(None)
}

/// `M` for Mamba, `*` for attention, `-` and `E` for what keeps nothing.
fn letters_of_nemotron(fields: &Fields<'_>, _: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(text) = fields.text("hybrid_override_pattern")? else {
        return Ok(None);
    };
    let kinds = text
        .chars()
        .enumerate()
        .map(|(layer, letter)| match letter {
            'M' => Ok(Kind::Mamba),
            '*' => Ok(Kind::Full),
            '-' | 'E' => Ok(Kind::Nothing),
            other => refused(format!(
                "{} has the letter {other} for layer {layer}; known are M, *, - and E",
                fields.named("hybrid_override_pattern")
            )),
        });
    kinds.collect::<Result<Vec<_>, _>>().map(Some)
}

/// Two lists of layers, counted from 1.
fn kimi_lists(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(Value::Object(linear)) = fields.get("linear_attn_config") else {
        return Ok(None);
    };
    let list = |name: &str| {
        let full_name = format!("linear_attn_config.{name}");
        match linear.get(name).and_then(Value::as_array) {
            Some(items) => fields.layers_of(&full_name, items, 1..count + 1),
            None => refused(format!(
                "the field {} is missing, the list of such layers",
                fields.named(&full_name)
            )),
        }
    };
    let (full, kda) = (list("full_attn_layers")?, list("kda_layers")?);
    let mut kinds = Vec::new();
    for layer in 1..=count {
        kinds.push(match (full.contains(&layer), kda.contains(&layer)) {
            (true, false) => Kind::Full,
            (false, true) => Kind::Kda,
            _ => {
                return refused(format!(
                    "layer {layer} (from 1) must be in one of {}'s lists full_attn_layers and kda_layers",
                    fields.named("linear_attn_config")
                ));
            }
        });
    }
    Ok(Some(kinds))
}

/// 1 for a window, 0 for full attention.
fn numbers_of_mimo(fields: &Fields<'_>, _: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let kinds = (Kind::Full, Kind::Sliding);
    one_number_a_layer(fields, "hybrid_layer_pattern", kinds)
}

/// 1 for full attention, 0 for lightning attention.
fn numbers_of_minimax(fields: &Fields<'_>, _: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    one_number_a_layer(fields, "attn_type_list", (Kind::Linear, Kind::Full))
}

/// The kind of a layer where its number is 0, and where it is 1.
fn one_number_a_layer(
    fields: &Fields<'_>,
    name: &str,
    (zero, one): (Kind, Kind),
) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(switches) = fields.switches(name)? else {
        return Ok(None);
    };
    let kind = |is_one| if is_one { one } else { zero };
    Ok(Some(switches.into_iter().map(kind).collect()))
}

/// The layers with attention; the others convolve (LFM2) or are Mamba.
fn attention_indices(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    for (name, other) in [
        ("attn_layer_indices", Kind::Mamba),
        ("full_attn_idxs", Kind::ShortConv),
    ] {
        if let Some(full) = fields.layers(name, 0..count)? {
            let kind = |layer| {
                if full.contains(&layer) {
                    Kind::Full
                } else {
                    other
                }
            };
            return each(count, kind).map(Some);
        }
    }
    // Families whose class takes what is left out for none.
    match fields.family() {
        "bamba" => {
            fields.note("attn_layer_indices is not given: no layer has attention");
            repeat(Kind::Mamba, count).map(Some)
        }
        "granitemoehybrid" => {
            fields.note("layer_types is not given: all layers are Mamba");
            repeat(Kind::Mamba, count).map(Some)
        }
        _ => Ok(None),
    }
}

/// One layer with attention in so many.
fn attention_period(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(period) = fields.known(&["attn_layer_period"])? else {
        return Ok(None);
    };
    // 0 is a place of its own, so this field is not asked for as a positive number.
    let given = fields.number("attn_layer_offset")?;
    let offset = match given.or(defaults::of(fields.family(), "attn_layer_offset")) {
        Some(offset) => offset,
        None => {
            return refused(format!(
                "the field {} is missing",
                fields.named("attn_layer_offset")
            ));
        }
    };
    if given.is_none() {
        fields.note(format!(
            "attn_layer_offset is not given: {offset}, the default of the class"
        ));
    }
    if offset >= period {
        return refused(format!(
            "{} is {offset}; it must be less than attn_layer_period, {period}",
            fields.named("attn_layer_offset")
        ));
    }
    each(count, |layer| match layer % period == offset {
        true => Kind::Full,
        false => Kind::Mamba,
    })
    .map(Some)
}

/// Falcon H1: attention and Mamba side by side in every layer.
fn every_layer_both(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    match fields.family() {
        "falcon_h1" => repeat(Kind::FullAndMamba, count).map(Some),
        _ => Ok(None),
    }
}

/// Grok 2: one in so many layers is full, and the number is one.
fn every_layer_global(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    match fields.number("global_attn_every_n")? {
        Some(1) => repeat(Kind::Full, count).map(Some),
        _ => Ok(None),
    }
}

/// The last of so many layers has full attention, the others linear attention.
fn full_interval(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(interval) = fields.known(&["full_attention_interval"])? else {
        return Ok(None);
    };
    each(count, |layer| match (layer + 1) % interval {
        0 => Kind::Full,
        _ => Kind::Linear,
    })
    .map(Some)
}

/// The last of so many layers is full, the others have windows; or a letter for each, repeated.
fn window_pattern(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    for name in ["sliding_window_pattern", "_sliding_window_pattern"] {
        if let Some(letters) = fields.get(name).and_then(Value::as_str) {
            let letters: Vec<char> = letters.chars().collect();
            let kinds =
                (0..count).map(
                    |layer| match letters.get(layer as usize % letters.len().max(1)) {
                        Some('L') => Ok(Kind::Sliding),
                        Some('G') => Ok(Kind::Full),
                        _ => refused(format!(
                            "{} must be of the letters L and G",
                            fields.named(name)
                        )),
                    },
                );
            return kinds.collect::<Result<Vec<_>, _>>().map(Some);
        }
        if let Some(Value::Number(_)) | None = fields.get(name)
            && let Some(period) = fields.known(&[name])?
        {
            if fields.known(&["sliding_window"])?.is_none() {
                return repeat(Kind::Full, count).map(Some);
            }
            return each(count, |layer| match (layer + 1) % period {
                0 => Kind::Full,
                _ => Kind::Sliding,
            })
            .map(Some);
        }
    }
    // gpt-oss and OLMo 3 say their layers themselves; their classes have these where a file does not.
    let period = match fields.family() {
        "gpt_oss" => 2,
        "olmo3" => 4,
        _ => return Ok(None),
    };
    fields.note(format!(
        "layer_types is not given: one layer in {period} is full, as the class has it"
    ));
    each(count, |layer| match (layer + 1) % period {
        0 => Kind::Full,
        _ => Kind::Sliding,
    })
    .map(Some)
}

/// Layers with rotary positions attend to their chunk, those without to all tokens.
fn chunks_of_llama4(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    if !["llama4", "llama4_text"].contains(&fields.family()) {
        return Ok(None);
    }
    let chunk = match fields.names("attention_chunk_size") {
        true => fields.number("attention_chunk_size")?,
        false => fields.known(&["attention_chunk_size"])?,
    };
    if chunk.is_none() {
        return repeat(Kind::Full, count).map(Some);
    }
    let rotary = one_number_a_layer(fields, "no_rope_layers", (Kind::Full, Kind::Chunked))?;
    if let Some(kinds) = rotary.filter(|kinds| !kinds.is_empty()) {
        return Ok(Some(kinds));
    }
    let interval = fields.required(
        &["no_rope_layer_interval"],
        "every how many layers one is full",
    )?;
    each(count, |layer| match (layer + 1) % interval {
        0 => Kind::Full,
        _ => Kind::Chunked,
    })
    .map(Some)
}

/// Layers that attend to an image's tokens.
fn cross_layers(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let Some(cross) = fields.layers("cross_attention_layers", 0..count)? else {
        return Ok(None);
    };
    let kind = |layer| {
        if cross.contains(&layer) {
            Kind::Cross
        } else {
            Kind::Full
        }
    };
    each(count, kind).map(Some)
}

/// Qwen 2 and 3: windows from a layer on, where they are used at all.
fn windows_above(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    let slides = fields.flag("use_sliding_window")? == Some(true);
    if !slides || fields.number("sliding_window")?.is_none() {
        return Ok(None);
    }
    let Some(first) = fields.number("max_window_layers")? else {
        return Ok(None);
    };
    each(count, |layer| match layer >= first {
        true => Kind::Sliding,
        false => Kind::Full,
    })
    .map(Some)
}

/// Models of Mamba layers alone.
fn only_mamba(fields: &Fields<'_>, count: u64) -> Result<Option<Vec<Kind>>, ConfigError> {
    match fields.family() {
        "mamba" | "mamba2" | "falcon_mamba" => repeat(Kind::Mamba, count).map(Some),
        _ => Ok(None),
    }
}
