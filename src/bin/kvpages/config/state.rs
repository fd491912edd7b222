//! The states of layers that keep no tokens.

use kvpages::dtype::Dtype;
use kvpages::spec::StateKind;
use serde_json::Value;

use super::fields::{ConfigError, Fields, HIDDEN, refused};
use super::{Layer, Store, Wishes};

const CONV: &[&str] = &["conv_kernel", "mamba_d_conv", "d_conv", "conv_kernel_size"];
const STATE: &[&str] = &["ssm_state_size", "mamba_d_state", "state_size", "d_state"];
const HEADS: &[&str] = &["mamba_num_heads", "mamba_n_heads", "n_mamba_heads"];
const HEAD_DIM: &[&str] = &["mamba_head_dim", "mamba_d_head", "mamba_headdim"];
const GROUPS: &[&str] = &["mamba_n_groups", "n_groups", "mamba_ngroups"];
const EXPAND: &[&str] = &["mamba_expand", "expand"];

/// Splits `number` over the ranks.
fn split(fields: &Fields<'_>, what: &str, number: u64, ranks: u64) -> Result<u64, ConfigError> {
    match number.is_multiple_of(ranks) {
        true => Ok(number / ranks),
        false => refused(format!(
            "model_type {}: {what}, {number}, cannot be divided over --tp {ranks} ranks",
            fields.family()
        )),
    }
}

/// A convolution keeps all but the newest of its inputs.
fn earlier(fields: &Fields<'_>, name: &str, kernel: u64) -> Result<u64, ConfigError> {
    match kernel {
        0 | 1 => refused(format!(
            "{} is {kernel}; it must be at least 2",
            fields.named(name)
        )),
        kernel => Ok(kernel - 1),
    }
}

/// A product of what a file says.
fn times(numbers: &[u64]) -> Result<u64, ConfigError> {
    let product = numbers
        .iter()
        .try_fold(1u64, |product, number| product.checked_mul(*number));
    let product = product.filter(|product| *product <= i64::MAX as u64);
    product.ok_or_else(|| ConfigError(format!("the product of {numbers:?} is more than 63 bits")))
}

/// Type of a recurrent state.
fn recurrent_dtype(fields: &Fields<'_>, wishes: &Wishes) -> Result<Dtype, ConfigError> {
    if let Some(dtype) = wishes.state_dtype {
        return Ok(dtype);
    }
    for name in [
        "mamba_ssm_dtype",
        "mamba_ssm_cache_dtype",
        "ssm_cache_dtype",
    ] {
        if let Some(text) = fields.text(name)?.filter(|text| *text != "auto") {
            return match crate::units::dtype(text) {
                Some(dtype) => Ok(dtype),
                None => refused(format!(
                    "{} is \"{text}\", no type known here",
                    fields.named(name)
                )),
            };
        }
    }
    let dtype = fields.dtype()?;
    fields.note(format!(
        "no type of the recurrent states is given: the model's {dtype}; --state-dtype changes it"
    ));
    Ok(dtype)
}

/// Notes where a type of recurrent states was given for a model that has none. Short convolutions keep
/// inputs, which are of the model's type.
pub fn note_unused_dtype(fields: &Fields<'_>, wishes: &Wishes, layers: &[Layer]) {
    let is_recurrent = |layer: &Layer| match layer.store {
        Store::State { kind, .. } => kind != StateKind::ShortConv,
        _ => false,
    };
    if wishes.state_dtype.is_some() && !layers.iter().any(is_recurrent) {
        fields.note("--state-dtype has no effect: the model has no recurrent states");
    }
}

/// A Mamba layer: the second version where it has heads, else the first.
pub fn mamba(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let first = ["jamba", "mamba", "falcon_mamba", "zamba"].contains(&fields.family());
    let heads = match (first, fields.family()) {
        (true, _) => None,
        // The plain model's own names.
        (_, "mamba2") => Some(fields.required(&["num_heads"], "the number of state heads")?),
        _ => match fields.known(HEADS)? {
            None if is_second(fields) => Some(heads_of_width(fields)?),
            heads => heads,
        },
    };
    match heads {
        Some(heads) => mamba2(fields, wishes, heads),
        None => mamba1(fields, wishes),
    }
}

/// Whether fields that only the second version has are given.
fn is_second(fields: &Fields<'_>) -> bool {
    let gives = |names: &[&str]| names.iter().any(|name| fields.get(name).is_some());
    gives(HEAD_DIM) && gives(GROUPS)
}

/// The heads of a Mamba 2 layer where only their width is given.
fn heads_of_width(fields: &Fields<'_>) -> Result<u64, ConfigError> {
    let head_dim = fields.required(HEAD_DIM, "the width of a Mamba head")?;
    let width = inner_width(fields)?;
    if !width.is_multiple_of(head_dim) {
        return refused(format!(
            "the width of a Mamba layer, {width}, is no multiple of its heads' width {head_dim}; give {}",
            fields.named(HEADS[0])
        ));
    }
    let heads = width / head_dim;
    fields.note(format!(
        "{} is not given: the width of a Mamba layer {width} over its heads' {head_dim}, {heads}",
        fields.named(HEADS[0])
    ));
    Ok(heads)
}

fn inner_width(fields: &Fields<'_>) -> Result<u64, ConfigError> {
    if let Some(width) = fields.known(&["mamba_d_ssm", "mamba_intermediate_size"])? {
        return Ok(width);
    }
    // Of the plain model this is the width of the layer itself.
    if ["mamba", "falcon_mamba"].contains(&fields.family())
        && let Some(width) = fields.number("intermediate_size")?
    {
        return Ok(width);
    }
    let expand = fields.required(EXPAND, "which widens Mamba layers")?;
    let hidden = fields.required(HIDDEN, "the width that Mamba layers widen")?;
    times(&[expand, hidden])
}

fn mamba1(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let ranks = wishes.tensor_parallel;
    let width = split(
        fields,
        "the width of a Mamba layer",
        inner_width(fields)?,
        ranks,
    )?;
    let state = fields.required(STATE, "the size of a Mamba state")?;
    let kernel = fields.required(CONV, "the length of a Mamba convolution")?;
    Ok(Store::State {
        kind: StateKind::Mamba1,
        states: vec![
            (
                fields.dtype()?,
                vec![earlier(fields, CONV[0], kernel)?, width],
            ),
            (recurrent_dtype(fields, wishes)?, vec![width, state]),
        ],
    })
}

fn mamba2(fields: &Fields<'_>, wishes: &Wishes, heads: u64) -> Result<Store, ConfigError> {
    let ranks = wishes.tensor_parallel;
    let own_names: &[&str] = if fields.family() == "mamba2" {
        &["head_dim"]
    } else {
        HEAD_DIM
    };
    let is_auto = own_names
        .iter()
        .any(|name| fields.get(name).is_some_and(|value| value == "auto"));
    let given = if is_auto {
        None
    } else {
        fields.known(own_names)?
    };
    let head_dim = match given {
        Some(width) => width,
        None => {
            let width = split(
                fields,
                "the width of a Mamba layer",
                inner_width(fields)?,
                heads,
            );
            width.map_err(|_| {
                ConfigError(format!(
                    "the width of a Mamba layer is no multiple of its {heads} heads; give {}",
                    fields.named(own_names[0])
                ))
            })?
        }
    };
    let groups = fields.required(GROUPS, "the groups of a Mamba 2 layer")?;
    if groups != 1 && !groups.is_multiple_of(ranks) {
        fields.note(format!(
            "{groups} groups of Mamba 2 cannot be divided over --tp {ranks} ranks, which most engines demand; the cache is planned all the same"
        ));
    }
    // Ranks that share a group each hold a copy of it.
    let groups = if groups.is_multiple_of(ranks) {
        groups
    } else {
        groups.max(ranks)
    };
    let state = fields.required(STATE, "the size of a Mamba state")?;
    let kernel = fields.required(CONV, "the length of a Mamba convolution")?;
    let inner = times(&[heads, head_dim])?;
    let convolved = inner.checked_add(times(&[2, groups, state])?);
    let convolved = convolved.ok_or_else(|| ConfigError("a convolution is too wide".to_owned()))?;
    let convolved = split(fields, "the width of a Mamba convolution", convolved, ranks)?;
    Ok(Store::State {
        kind: StateKind::Mamba2,
        states: vec![
            (
                fields.dtype()?,
                vec![earlier(fields, CONV[0], kernel)?, convolved],
            ),
            (
                recurrent_dtype(fields, wishes)?,
                vec![
                    split(fields, "the number of Mamba heads", heads, ranks)?,
                    head_dim,
                    state,
                ],
            ),
        ],
    })
}

/// A layer of linear attention: a gated delta net where its fields are given, else lightning attention.
pub fn linear(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    if fields.get("linear_attn_config").is_some() {
        return kda(fields, wishes);
    }
    if fields.known(&["linear_num_value_heads"])?.is_some() {
        return gated_delta_net(fields, wishes);
    }
    if ["minimax", "minimax_m1", "minimax_text_01"].contains(&fields.family())
        || fields.get("attn_type_list").is_some()
    {
        return lightning(fields, wishes);
    }
    refused(format!(
        "model_type {}: it has layers of linear attention, but {} is missing, the size of their states",
        fields.family(),
        fields.named("linear_num_value_heads")
    ))
}

fn gated_delta_net(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let ranks = wishes.tensor_parallel;
    let need = |name: &str| fields.required(&[name], "of linear attention");
    let key_heads = need("linear_num_key_heads")?;
    let value_heads = need("linear_num_value_heads")?;
    let key = need("linear_key_head_dim")?;
    let value = need("linear_value_head_dim")?;
    let kernel = need("linear_conv_kernel_dim")?;
    let keys = split(fields, "linear_num_key_heads", key_heads, ranks)?;
    let values = split(fields, "linear_num_value_heads", value_heads, ranks)?;
    let convolved = times(&[2, keys, key])?.saturating_add(times(&[values, value])?);
    Ok(Store::State {
        kind: StateKind::GatedDeltaNet,
        states: vec![
            (
                fields.dtype()?,
                vec![
                    earlier(fields, "linear_conv_kernel_dim", kernel)?,
                    convolved,
                ],
            ),
            (recurrent_dtype(fields, wishes)?, vec![values, value, key]),
        ],
    })
}

/// Kimi's delta attention: a convolution each of queries, keys and values, and an f32 state.
pub fn kda(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let config = fields.get("linear_attn_config");
    let need = |name: &str| {
        let full = format!("linear_attn_config.{name}");
        match config
            .and_then(|config| config.get(name))
            .filter(|value| !value.is_null())
        {
            Some(value @ Value::Number(_)) => fields.as_number(&full, value),
            _ => refused(format!(
                "the field {} is missing, of Kimi's delta attention",
                fields.named(&full)
            )),
        }
    };
    let (heads, width) = (need("num_heads")?, need("head_dim")?);
    let kernel = need("short_conv_kernel_size")?;
    let heads = split(
        fields,
        "linear_attn_config.num_heads",
        heads,
        wishes.tensor_parallel,
    )?;
    let convolved = vec![
        earlier(fields, "linear_attn_config.short_conv_kernel_size", kernel)?,
        times(&[heads, width])?,
    ];
    let conv = (fields.dtype()?, convolved);
    let recurrent = wishes.state_dtype.unwrap_or(Dtype::F32);
    Ok(Store::State {
        kind: StateKind::Linear,
        states: vec![
            conv.clone(),
            conv.clone(),
            conv,
            (recurrent, vec![heads, width, width]),
        ],
    })
}

/// MiniMax's lightning attention: one square for each query head.
fn lightning(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let heads = split(
        fields,
        "the number of heads",
        fields.heads(0)?,
        wishes.tensor_parallel,
    )?;
    let width = fields.head_dim()?;
    let dtype = wishes.state_dtype.unwrap_or(Dtype::F32);
    if wishes.state_dtype.is_none() {
        fields.note(
            "states of lightning attention are taken to be float32; --state-dtype changes it",
        );
    }
    Ok(Store::State {
        kind: StateKind::Linear,
        states: vec![(dtype, vec![heads, width, width])],
    })
}

/// A short convolution over the hidden state (LFM2).
pub fn short_conv(fields: &Fields<'_>, wishes: &Wishes) -> Result<Store, ConfigError> {
    let kernel = fields.required(&["conv_L_cache"], "the length of a short convolution")?;
    let hidden = fields.required(HIDDEN, "the width of a short convolution")?;
    let width = split(
        fields,
        "the width of a short convolution",
        hidden,
        wishes.tensor_parallel,
    )?;
    Ok(Store::State {
        kind: StateKind::ShortConv,
        states: vec![(
            fields.dtype()?,
            vec![earlier(fields, "conv_L_cache", kernel)?, width],
        )],
    })
}
