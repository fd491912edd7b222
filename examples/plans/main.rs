//! What the policies make of real models, as the table in docs/plans.md:
//!
//! ```sh
//! cargo run --release --example plans -- --write   # or --check; without either it prints
//! ```
//!
//! `models.json` has their layers: shapes of transformers' configurations and of the conformance
//! vectors, with memory that such models run in.

use std::fmt::Write as _;
use std::sync::Arc;

use kvpages::dtype::Dtype;
use kvpages::model::Model;
use kvpages::plan::{Plan, PlanConfig, PlanError, Policy, Worker, plan};
use kvpages::spec::{
    Attention, AttentionFields, AttentionKind, Counting, Limits, QuantMode, Spec, State,
    StateCacheMode, StateFields, StateKind,
};
use serde_json::Value;

const MODELS: &str = include_str!("models.json");
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/plans.md");
const BEGIN: &str = "<!-- made by cargo run --release --example plans -- --write -->\n";
const END: &str = "<!-- end -->\n";

/// Tokens of a usual request, where the longest is longer.
const TYPICAL: u64 = 8192;

fn main() {
    let table = table();
    let is_asked = |option: &str| std::env::args().any(|argument| argument == option);
    if is_asked("--check") {
        let text = std::fs::read_to_string(DOCUMENT).expect(DOCUMENT);
        let is_current = text.contains(&format!("{BEGIN}{table}{END}"));
        assert!(
            is_current,
            "{DOCUMENT} has another table: make it anew with --write"
        );
        return;
    }
    if !is_asked("--write") {
        print!("{table}");
        return;
    }
    let text = std::fs::read_to_string(DOCUMENT).expect(DOCUMENT);
    let (before, rest) = text
        .split_once(BEGIN)
        .expect("docs/plans.md has the table's begin");
    let (_, after) = rest
        .split_once(END)
        .expect("docs/plans.md has the table's end");
    std::fs::write(DOCUMENT, format!("{before}{BEGIN}{table}{END}{after}")).expect(DOCUMENT);
}

/// A model as the file has it.
struct Shape {
    name: String,
    model: Arc<Model>,
    limits: Limits,
    memory: i64,
    /// Whether layers of different demand share the memory.
    is_hybrid: bool,
}

/// What one policy makes of a model.
struct Outcome {
    plan: Plan,
    typical: f64,
    longest: f64,
    waste: f64,
}

fn table() -> String {
    let shapes: Value = serde_json::from_str(MODELS).expect("models.json");
    let shapes: Vec<Shape> = list(&shapes).iter().map(shape).collect();
    let mut out = String::from(
        "| model | memory | usual: tokens | reference | ratio | longest: tokens | reference | ratio | waste | reference | groups | reference |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let mut ratios = Vec::new();
    let mut hybrids = Vec::new();
    for shape in &shapes {
        for memory in [shape.memory, 2 * shape.memory] {
            let compact = outcome(shape, memory, Policy::Compact);
            let reference = outcome(shape, memory, Policy::Reference);
            let row = row(shape, memory, compact, reference);
            out.push_str(&row.0);
            ratios.extend(row.1);
            if shape.is_hybrid {
                hybrids.extend(row.1);
            }
        }
    }
    let least = ratios
        .iter()
        .flatten()
        .copied()
        .fold(f64::INFINITY, f64::min);
    let _ = writeln!(
        out,
        "\n{} models, {} of them with layers of different demand. Least ratio {least:.4}.\n\n\
         Geometric mean of the ratios of models with layers of different demand: usual length {:.3}, \
         longest {:.3}.",
        shapes.len(),
        shapes.iter().filter(|shape| shape.is_hybrid).count(),
        mean(hybrids.iter().map(|ratio| ratio[0])),
        mean(hybrids.iter().map(|ratio| ratio[1])),
    );
    out
}

fn mean(ratios: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = ratios.clone().count().max(1) as f64;
    (ratios.map(f64::ln).sum::<f64>() / count).exp()
}

fn outcome(shape: &Shape, memory: i64, policy: Policy) -> Result<Outcome, PlanError> {
    let config = PlanConfig {
        policy,
        limits: shape.limits,
        auto_fit_max_model_len: false,
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: None,
        reserved_blocks: 1,
        has_draft_layers: false,
        typical_len: TYPICAL,
        choose_block_sizes: false,
    };
    let worker = Worker {
        model: Arc::clone(&shape.model),
        memory_bytes: memory,
    };
    let plan = plan(&[worker], &config)?;
    let longest = shape.limits.max_model_len;
    let explained: Value = serde_json::from_str(&plan.explain_json()).expect("an explanation");
    let wasted = explained["workers"][0]["wasted_bytes"]["total"].as_u64();
    Ok(Outcome {
        typical: plan.capacity_of(TYPICAL.min(longest))?.tokens(),
        longest: plan.capacity_of(longest)?.tokens(),
        waste: wasted.unwrap_or(0) as f64 / memory as f64,
        plan,
    })
}

fn row(
    shape: &Shape,
    memory: i64,
    compact: Result<Outcome, PlanError>,
    reference: Result<Outcome, PlanError>,
) -> (String, Option<[f64; 2]>) {
    let gib = memory as f64 / f64::from(1 << 30);
    let name = &shape.name;
    let groups = |outcome: &Outcome| outcome.plan.workers[0].groups.len();
    match (compact, reference) {
        (Ok(own), Ok(other)) => {
            let ratios = [own.typical / other.typical, own.longest / other.longest];
            let text = format!(
                "| {name} | {gib:.0} GiB | {:.0} | {:.0} | {:.3} | {:.0} | {:.0} | {:.3} | {:.1} % | {:.1} % | {} | {} |\n",
                own.typical,
                other.typical,
                ratios[0],
                own.longest,
                other.longest,
                ratios[1],
                100.0 * own.waste,
                100.0 * other.waste,
                groups(&own),
                groups(&other),
            );
            (text, Some(ratios))
        }
        (Ok(own), Err(error)) => {
            let text = format!(
                "| {name} | {gib:.0} GiB | {:.0} | {} | | {:.0} | | | {:.1} % | | {} | |\n",
                own.typical,
                error.kind(),
                own.longest,
                100.0 * own.waste,
                groups(&own),
            );
            (text, None)
        }
        (Err(error), _) => panic!("{name}, {gib} GiB: {error}"),
    }
}

fn shape(json: &Value) -> Shape {
    let specs: Vec<Spec> = list(&json["specs"]).iter().map(spec).collect();
    let mut model = Model::new();
    for (number, layer) in list(&json["layers"]).iter().enumerate() {
        let spec = specs[number_of(layer) as usize].clone();
        model
            .add(&format!("layers.{number}"), spec, None, 1)
            .expect("a layer");
    }
    let limits = Limits {
        max_model_len: number_of(&json["max_model_len"]),
        context_parallel_size: 1,
        max_tokens_in_flight: number_of(&json["tokens_in_flight"]),
        max_encoder_tokens: number_of(&json["encoder_tokens"]),
        state_cache_mode: cache_mode(&json["state_cache_mode"]),
        counting: Counting::Reference,
    };
    let families = |spec: &Spec| kvpages::spec::Family::of(spec);
    Shape {
        name: text(&json["name"]).to_owned(),
        model: Arc::new(model),
        limits,
        memory: number_of(&json["memory"]) as i64,
        is_hybrid: specs
            .iter()
            .any(|spec| families(spec) != families(&specs[0])),
    }
}

fn spec(json: &Value) -> Spec {
    let made = match text(&json["type"]) {
        "mamba" => State::new(state(json)).map(Spec::State),
        kind => Attention::new(attention(kind, json)).map(Spec::Attention),
    };
    made.unwrap_or_else(|error| panic!("{json}: {error}"))
}

fn attention(kind: &str, json: &Value) -> AttentionFields {
    let head_size = number_of(&json["head_size"]);
    let c_text = |value: &Value| {
        let text = value.as_str()?;
        Some(Arc::from(std::ffi::CString::new(text).expect("no NUL")))
    };
    AttentionFields {
        kind: match kind {
            "full_attention" => AttentionKind::Full,
            "sliding_window" => AttentionKind::SlidingWindow,
            "chunked_local" => AttentionKind::ChunkedLocal,
            "cross_attention" => AttentionKind::Cross,
            "mla_attention" => AttentionKind::Mla,
            "sliding_window_mla" => AttentionKind::SlidingWindowMla,
            other => panic!("layer type {other}"),
        },
        head_size_v: json["head_size_v"].as_u64().unwrap_or(head_size),
        quant_mode: match json["kv_quant_mode"].as_str().unwrap_or("none") {
            "none" => QuantMode::None,
            "fp8_per_tensor" => QuantMode::Fp8PerTensor,
            "fp8_per_token_head" => QuantMode::Fp8PerTokenHead,
            "int4_per_token_head" => QuantMode::Int4PerTokenHead,
            other => panic!("quantisation mode {other}"),
        },
        page_size_padded: json["page_size_padded"].as_u64(),
        indexes_kv_by_block_stride: json["indexes_kv_by_block_stride"] == true,
        sliding_window: json["sliding_window"].as_u64(),
        attention_chunk_size: json["attention_chunk_size"].as_u64(),
        cache_dtype: c_text(&json["cache_dtype_str"]),
        alignment: json["alignment"].as_u64(),
        compress_ratio: json["compress_ratio"].as_u64().unwrap_or(1),
        model_version: c_text(&json["model_version"]),
        ..AttentionFields::full(
            number_of(&json["block_size"]),
            number_of(&json["num_kv_heads"]),
            head_size,
            dtype(&json["dtype"]),
        )
    }
}

fn state(json: &Value) -> StateFields {
    let shapes: Vec<&[Value]> = list(&json["shapes"]).iter().map(list).collect();
    StateFields {
        kind: match text(&json["mamba_type"]) {
            "mamba1" => StateKind::Mamba1,
            "mamba2" => StateKind::Mamba2,
            "short_conv" => StateKind::ShortConv,
            "linear" => StateKind::Linear,
            "gdn" => StateKind::GatedDeltaNet,
            _ => StateKind::Custom,
        },
        block_size: number_of(&json["block_size"]),
        dtypes: list(&json["dtypes"]).iter().map(dtype).collect(),
        ndims: shapes.iter().map(|shape| shape.len() as u32).collect(),
        dims: shapes.concat().iter().map(number_of).collect(),
        page_size_padded: json["page_size_padded"].as_u64(),
        cache_mode: cache_mode(&json["mamba_cache_mode"]),
        num_speculative_blocks: number_of(&json["num_speculative_blocks"]),
    }
}

fn cache_mode(json: &Value) -> StateCacheMode {
    match text(json) {
        "none" => StateCacheMode::None,
        "align" => StateCacheMode::Align,
        "all" => StateCacheMode::All,
        other => panic!("state cache mode {other}"),
    }
}

fn dtype(json: &Value) -> Dtype {
    match text(json) {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        "uint8" | "int8" => Dtype::U8,
        other => panic!("element type {other}"),
    }
}

fn list(json: &Value) -> &[Value] {
    json.as_array()
        .map_or_else(|| panic!("{json} is no list"), Vec::as_slice)
}

fn number_of(json: &Value) -> u64 {
    json.as_u64()
        .unwrap_or_else(|| panic!("{json} is no number"))
}

fn text(json: &Value) -> &str {
    json.as_str().unwrap_or_else(|| panic!("{json} is no text"))
}
