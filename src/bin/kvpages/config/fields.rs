//! The fields of a file, looked up by any of their names, with what is noted on the way.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;

use kvpages::dtype::Dtype;
use serde_json::{Map, Value};

use super::{defaults, list};
use crate::units;

/// Why a file cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// An error with a text.
pub fn refused<T>(text: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError(text.into()))
}

/// Where files of several models in one keep the one that decodes, most telling first.
const NESTED: &[&str] = &[
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "decoder",
];
/// Names of the number of layers.
pub const LAYERS: &[&str] = &[
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_transformer_layers",
];
/// Names of the number of query heads.
pub const HEADS: &[&str] = &[
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_query_heads",
];
/// Names of the number of key-value heads.
pub const KV_HEADS: &[&str] = &[
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "multi_query_group_num",
    "num_attention_groups",
    "num_key_value_heads_per_layer",
];
/// Names of the width of the residual stream.
pub const HIDDEN: &[&str] = &[
    "hidden_size",
    "n_embd",
    "n_embed",
    "d_model",
    "model_dim",
    "dim",
];
const HEAD_DIM: &[&str] = &[
    "head_dim",
    "attention_head_dim",
    "kv_channels",
    "head_size",
    "d_kv",
];
const MAX_LEN: &[&str] = &[
    "max_position_embeddings",
    "max_target_positions",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "n_ctx",
    "max_context_length",
];

/// Reads JSON that may hold what Python writes besides: NaN, Infinity and -Infinity.
pub fn parse(text: &str) -> Result<Value, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return refused("the config is empty");
    }
    let plain = serde_json::from_str(text);
    let value =
        plain.or_else(|error| serde_json::from_str(&without_python(text)).map_err(|_| error));
    match value {
        Ok(Value::Object(object)) => Ok(Value::Object(object)),
        Ok(_) => refused("the config is JSON, but no object with fields"),
        Err(error) => refused(format!("the config is not JSON: {error}")),
    }
}

/// The text with Python's numbers outside strings replaced by null.
fn without_python(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(first) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"]
            .into_iter()
            .find(|word| !in_string && rest.starts_with(word));
        let length = match (word, first) {
            (Some(word), _) => {
                out.push_str("null");
                rest = &rest[word.len()..];
                continue;
            }
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, '"') => {
                in_string = !in_string;
                1
            }
            (None, other) => other.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out
}

/// The fields of the model that decodes, and of the file around it.
pub struct Fields<'a> {
    inner: &'a Map<String, Value>,
    outer: &'a Map<String, Value>,
    path: String,
    model_type: String,
    family: String,
    notes: RefCell<Vec<String>>,
}

impl<'a> Fields<'a> {
    /// The fields of a file; the nested ones where it holds several models.
    pub fn of(root: &'a Value) -> Result<Fields<'a>, ConfigError> {
        let Value::Object(outer) = root else {
            return refused("the config is JSON, but no object with fields");
        };
        let mut inner = outer;
        let mut path = String::new();
        while let Some((name, nested)) = nested(inner) {
            path.push_str(name);
            path.push('.');
            inner = nested;
        }
        let text = |map: &Map<String, Value>| map.get("model_type")?.as_str().map(str::to_owned);
        let Some(family) = text(inner).or_else(|| text(outer)) else {
            return refused(
                "the config has no model_type; it must be a config.json as Hugging Face publishes it",
            );
        };
        Ok(Fields {
            inner,
            outer,
            path,
            model_type: text(outer).unwrap_or_else(|| family.clone()),
            family,
            notes: RefCell::new(Vec::new()),
        })
    }

    /// `model_type` of the file.
    pub fn model_type(&self) -> &str {
        &self.model_type
    }

    /// `model_type` of the model that decodes, as tables have it.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// The first of `architectures`.
    pub fn architecture(&self) -> Option<String> {
        let of = |map: &Map<String, Value>| {
            let first = map.get("architectures")?.as_array()?.first()?;
            first.as_str().map(str::to_owned)
        };
        of(self.outer).or_else(|| of(self.inner))
    }

    /// Notes something for people, once.
    pub fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&text) {
            notes.push(text);
        }
    }

    /// What was noted.
    pub fn into_notes(self) -> Vec<String> {
        self.notes.into_inner()
    }

    /// Whether the file holds other models around the one that decodes.
    pub fn is_nested(&self) -> bool {
        !self.path.is_empty()
    }

    /// A yes or no of the file around the model that decodes.
    pub fn outer_flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        let value = self.outer.get(name).filter(|value| !value.is_null());
        value.map(|value| as_flag(name, value)).transpose()
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.inner.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there, null or not.
    pub fn names(&self, name: &str) -> bool {
        self.inner.contains_key(name)
    }

    /// Names and values of fields that are not null, false, 0 or empty.
    pub fn set(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.inner.iter().filter_map(|(name, value)| {
            let empty = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Number(number) => number.as_f64() == Some(0.0),
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                _ => false,
            };
            (!empty).then_some((name.as_str(), value))
        })
    }

    /// A field's name as messages have it.
    pub fn named(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A whole number, where the field is given.
    pub fn number(&self, name: &str) -> Result<Option<u64>, ConfigError> {
        self.get(name)
            .map(|value| self.as_number(name, value))
            .transpose()
    }

    /// A value as a whole number.
    pub fn as_number(&self, name: &str, value: &Value) -> Result<u64, ConfigError> {
        let whole = value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && *number >= 0.0);
        let number = value.as_u64().or_else(|| {
            // 4096.0 is what some writers make of 4096.
            whole
                .filter(|number| *number < 9e15)
                .map(|number| number as u64)
        });
        match number.filter(|number| *number <= i64::MAX as u64) {
            Some(number) => Ok(number),
            None => refused(format!(
                "{} is {value}; it must be a whole number that is not negative",
                self.named(name)
            )),
        }
    }

    /// A positive number by the first of its names that is given, or by the table of defaults.
    pub fn known(&self, names: &[&str]) -> Result<Option<u64>, ConfigError> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return self.positive(name, number).map(Some);
            }
        }
        for name in names {
            // A null is a choice of its own, not a field left out.
            if self.names(name) {
                continue;
            }
            let nested = || defaults::of_nested(&self.family, name).filter(|_| self.is_nested());
            if let Some(number) = defaults::of(&self.family, name).or_else(nested) {
                self.note(format!(
                    "{} is not given: {number}, the default of {}'s configuration class",
                    self.named(name),
                    self.family
                ));
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn positive(&self, name: &str, number: u64) -> Result<u64, ConfigError> {
        match number {
            0 => refused(format!("{} is 0; it must be at least 1", self.named(name))),
            number => Ok(number),
        }
    }

    /// A positive number that must be known.
    pub fn required(&self, names: &[&str], why: &str) -> Result<u64, ConfigError> {
        match self.known(names)? {
            Some(number) => Ok(number),
            None => refused(format!(
                "model_type {}: the field {} is missing, {why}; none of {} is given",
                self.family,
                self.named(names[0]),
                list(names)
            )),
        }
    }

    /// A list, where the field is given.
    pub fn items(&self, name: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => refused(format!(
                "{} is {other}; it must be a list",
                self.named(name)
            )),
        }
    }

    /// A list of whole numbers, where the field is given.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<u64>>, ConfigError> {
        let Some(items) = self.items(name)? else {
            return Ok(None);
        };
        let numbers = items.iter().map(|item| self.as_number(name, item));
        numbers.collect::<Result<_, _>>().map(Some)
    }

    /// A list of numbers of layers, as [`layers_of`](Fields::layers_of) takes it, where the field is given.
    pub fn layers(
        &self,
        name: &str,
        numbers: Range<u64>,
    ) -> Result<Option<BTreeSet<u64>>, ConfigError> {
        let items = self.items(name)?;
        items
            .map(|items| self.layers_of(name, items, numbers))
            .transpose()
    }

    /// Numbers of layers, each of `numbers` and none twice.
    pub fn layers_of(
        &self,
        name: &str,
        items: &[Value],
        numbers: Range<u64>,
    ) -> Result<BTreeSet<u64>, ConfigError> {
        let mut layers = BTreeSet::new();
        for item in items {
            let layer = self.as_number(name, item)?;
            if !numbers.contains(&layer) {
                return refused(format!(
                    "{} has layer {layer}, but layers are numbered {} to {}",
                    self.named(name),
                    numbers.start,
                    numbers.end.saturating_sub(1)
                ));
            }
            if !layers.insert(layer) {
                return refused(format!(
                    "{} has layer {layer} twice; it must be there once",
                    self.named(name)
                ));
            }
        }
        Ok(layers)
    }

    /// A list of 0 and 1, where the field is given.
    pub fn switches(&self, name: &str) -> Result<Option<Vec<bool>>, ConfigError> {
        let Some(numbers) = self.numbers(name)? else {
            return Ok(None);
        };
        let switches = numbers.iter().enumerate().map(|(at, number)| match number {
            0 => Ok(false),
            1 => Ok(true),
            other => refused(format!(
                "{}[{at}] is {other}; it must be 0 or 1",
                self.named(name)
            )),
        });
        switches.collect::<Result<_, _>>().map(Some)
    }

    /// A text, where the field is given.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => refused(format!(
                "{} is {other}; it must be a text",
                self.named(name)
            )),
        }
    }

    /// A yes or no, where the field is given.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        let value = self.get(name);
        value
            .map(|value| as_flag(&self.named(name), value))
            .transpose()
    }

    /// Query heads of a layer.
    pub fn heads(&self, layer: u64) -> Result<u64, ConfigError> {
        self.of_layer(HEADS, layer)?
            .map_or_else(|| self.required(HEADS, "the number of query heads"), Ok)
    }

    /// Key-value heads of a layer.
    pub fn kv_heads(&self, layer: u64) -> Result<u64, ConfigError> {
        // Hunyuan's layers may read the keys and values of the one before.
        if self.flag("use_cla")? == Some(true) {
            return refused(format!(
                "model_type {}: {} is true, layers that share keys and values in a way not known here",
                self.family,
                self.named("use_cla")
            ));
        }
        // One head for all queries. Falcon's class writes num_kv_heads into its files all the same, and
        // does not look at it unless the architecture is the new one.
        let is_new = self.flag("new_decoder_architecture")? == Some(true);
        if !is_new && self.is_multi_query()? {
            return Ok(1);
        }
        // SantaCoder, of GPT-2's family.
        if self.text("attention_head_type")? == Some("multiquery") {
            return Ok(1);
        }
        // ChatGLM's class looks at the number of groups where this is true.
        if self.flag("multi_query_attention")? == Some(false) {
            return self.heads(layer);
        }
        if let Some(heads) = self.of_layer(KV_HEADS, layer)? {
            return Ok(heads);
        }
        // DBRX and MPT keep it with the rest of their attention.
        let attention = self.get("attn_config");
        let of_attention = |name: &str| {
            let value = attention.and_then(|config| config.get(name));
            value.filter(|value| !value.is_null())
        };
        if of_attention("attn_type").and_then(Value::as_str) == Some("multiquery_attention") {
            return Ok(1);
        }
        if let Some(value) = of_attention("kv_n_heads") {
            let heads = self.as_number("attn_config.kv_n_heads", value)?;
            return self.positive("attn_config.kv_n_heads", heads);
        }
        if !defaults::is_known(&self.family) {
            return refused(format!(
                "model_type {} is not known here, and the field {} is missing, the number of key-value heads",
                self.family,
                self.named(KV_HEADS[0])
            ));
        }
        let heads = self.heads(layer)?;
        self.note(format!(
            "{} is not given: as many as query heads, {heads}",
            self.named(KV_HEADS[0])
        ));
        Ok(heads)
    }

    fn is_multi_query(&self) -> Result<bool, ConfigError> {
        let given = self.flag("multi_query")?;
        let is_left_out = !self.names("multi_query") && defaults::is_multi_query(&self.family);
        if is_left_out {
            self.note(format!(
                "{} is not given: true, the default of {}'s configuration class",
                self.named("multi_query"),
                self.family
            ));
        }
        Ok(is_left_out || given == Some(true))
    }

    /// A number that may be one for all layers or a list of one for each.
    fn of_layer(&self, names: &[&str], layer: u64) -> Result<Option<u64>, ConfigError> {
        for name in names {
            if let Some(Value::Array(items)) = self.get(name) {
                let at = usize::try_from(layer)
                    .ok()
                    .and_then(|layer| items.get(layer));
                return match at {
                    Some(item) => self.as_number(name, item).map(Some),
                    None => refused(format!(
                        "{} has {} entries, but there is a layer {layer}",
                        self.named(name),
                        items.len()
                    )),
                };
            }
        }
        self.known(names)
    }

    /// Elements of one head.
    pub fn head_dim(&self) -> Result<u64, ConfigError> {
        // Zamba's attention reads the embeddings beside the hidden state. Its other fields of a width are
        // not those of its attention.
        let (names, times, twice) = match self.family.as_str() {
            "zamba" | "zamba2" => (&["attention_head_dim"][..], 2, "twice the "),
            _ => (HEAD_DIM, 1, ""),
        };
        if let Some(width) = self.known(names)? {
            return Ok(width);
        }
        let why = format!("and {} is not given either", names[0]);
        let hidden = self.required(HIDDEN, &why)?.saturating_mul(times);
        let heads = self.heads(0)?;
        if !hidden.is_multiple_of(heads) {
            return refused(format!(
                "{} is not given, and {twice}{} {hidden} is no multiple of the {heads} query heads; give {}",
                self.named(names[0]),
                HIDDEN[0],
                names[0]
            ));
        }
        self.note(format!(
            "{} is not given: {twice}hidden size {hidden} over {heads} query heads, {}",
            self.named(names[0]),
            hidden / heads
        ));
        Ok(hidden / heads)
    }

    /// The longest sequence, where the file has it.
    pub fn max_len(&self) -> Result<Option<u64>, ConfigError> {
        // Cohere's max_position_embeddings are those of its training.
        if defaults::has_own_max_len(&self.family)
            && let Some(len) = self.number("model_max_length")?
        {
            return self.positive("model_max_length", len).map(Some);
        }
        if let Some(len) = self.known(MAX_LEN)? {
            return Ok(Some(len));
        }
        for name in MAX_LEN {
            let value = self.outer.get(*name).filter(|value| !value.is_null());
            if let Some(value) = value {
                return self.as_number(name, value).map(Some);
            }
        }
        Ok(None)
    }

    /// Type of the model's activations.
    pub fn dtype(&self) -> Result<Dtype, ConfigError> {
        let maps = [(self.inner, self.path.as_str()), (self.outer, "")];
        let places = maps.into_iter().flat_map(|(map, path)| {
            ["dtype", "torch_dtype"].map(|name| (format!("{path}{name}"), map.get(name)))
        });
        let mut given = places.filter_map(|(name, value)| Some((name, value?)));
        let (name, text) = match given.find(|(_, value)| !value.is_null()) {
            Some((name, Value::String(text))) if text != "auto" => (name, text),
            None | Some((_, Value::String(_))) => {
                self.note("neither dtype nor torch_dtype is given: bfloat16 is assumed");
                return Ok(Dtype::Bf16);
            }
            Some((name, other)) => {
                return refused(format!(
                    "{name} is {other}; it must be a text such as \"bfloat16\""
                ));
            }
        };
        match units::dtype(text) {
            Some(Dtype::F32) => {
                self.note(
                    "dtype is float32, as the file says; engines often cast it: --kv-dtype bf16",
                );
                Ok(Dtype::F32)
            }
            Some(dtype) => Ok(dtype),
            None => refused(format!(
                "{name} is \"{text}\"; known are float32, float16 and bfloat16"
            )),
        }
    }
}

impl Fields<'_> {
    /// Notes what the file says beside layers that an engine may act on, and that is planned only when it
    /// is asked for.
    pub fn note_what_engines_may_do(&self) {
        let scheme = [self.inner, self.outer].into_iter().any(|map| {
            let config = map.get("quantization_config");
            ["kv_cache_scheme", "kv_cache_quant_algo"]
                .into_iter()
                .any(|name| {
                    config
                        .and_then(|config| config.get(name))
                        .is_some_and(|value| !value.is_null())
                })
        });
        if scheme {
            self.note(
                "quantization_config says that the cache is quantised too; --kv-dtype fp8 plans that where it is fp8",
            );
        }
        if let (Some(stretched), Ok(Some(own))) = (self.stretched(), self.max_len())
            && stretched > own
        {
            self.note(format!(
                "rope scaling may stretch sequences from {own} to {stretched} tokens; --max-model-len plans that"
            ));
        }
    }

    /// Tokens that scaled positions reach.
    fn stretched(&self) -> Option<u64> {
        let scaling = self
            .get("rope_scaling")
            .or_else(|| self.get("rope_parameters"))?;
        let kind = scaling
            .get("rope_type")
            .or_else(|| scaling.get("type"))?
            .as_str()?;
        let factor = scaling.get("factor")?.as_f64()?;
        let original = scaling.get("original_max_position_embeddings");
        let original = match (original.and_then(Value::as_u64), kind) {
            (Some(original), "yarn" | "linear" | "dynamic") => original,
            // Gemma 3's max_position_embeddings are those that it was stretched to.
            (None, "linear" | "dynamic") if !self.family.starts_with("gemma3") => {
                self.number("max_position_embeddings").ok()??
            }
            _ => return None,
        };
        let tokens = factor * original as f64;
        (1.0..1e15).contains(&tokens).then_some(tokens as u64)
    }
}

/// A value as a yes or no.
pub fn as_flag(name: &str, value: &Value) -> Result<bool, ConfigError> {
    match value {
        Value::Bool(flag) => Ok(*flag),
        other => refused(format!("{name} is {other}; it must be true or false")),
    }
}

/// The model that decodes of a file that holds several.
fn nested(map: &Map<String, Value>) -> Option<(&'static str, &Map<String, Value>)> {
    NESTED.iter().find_map(|name| {
        let inner = map.get(*name)?.as_object()?;
        let describes = |map: &Map<String, Value>| {
            map.contains_key("model_type") || LAYERS.iter().any(|name| map.contains_key(*name))
        };
        let is_model = describes(inner) || NESTED.iter().any(|name| inner.contains_key(*name));
        is_model.then_some((*name, inner))
    })
}
