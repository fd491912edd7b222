//! An answer for people.

use std::fmt::Write;

use kvpages::plan::WorkerPlan;
use serde_json::Value;

use crate::planning::{Answer, Holds};
use crate::units::{grouped, size};

/// Which end of a column is even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// The whole report.
pub fn text(answer: &Answer, explain: bool) -> String {
    let mut out = title(answer);
    out.push_str("\n\n");
    fits(&mut out, answer);
    memory(&mut out, answer);
    groups(&mut out, answer);
    notes(&mut out, &answer.described.notes);
    if explain {
        let _ = write!(out, "\nexplanation\n\n{}", answer.plan.explain_text());
    }
    out
}

/// What is planned, in a line.
pub fn title(answer: &Answer) -> String {
    let question = &answer.question;
    let ranks = match (question.tp, question.pp) {
        (1, 1) => "one rank".to_owned(),
        (tp, 1) => format!("{tp} ranks"),
        (tp, pp) => format!("{} ranks, {pp} stages of {tp}", tp.saturating_mul(pp)),
    };
    format!(
        "{}, {} cache, {ranks}, policy {}",
        model(answer),
        question.kv.name(answer.described.dtype),
        question.policy.name(),
    )
}

/// The model and what of it keeps something.
pub fn model(answer: &Answer) -> String {
    let described = &answer.described;
    let architecture = match &described.architecture {
        Some(name) => format!(" ({name})"),
        None => String::new(),
    };
    let sharing = |layer: &&crate::config::Layer| layer.shares_with.is_some();
    let shared = match described.layers.iter().filter(sharing).count() {
        0 => String::new(),
        shared => format!(" and {shared} that read another's"),
    };
    let owning = described
        .layers
        .iter()
        .filter(|layer| layer.shares_with.is_none());
    format!(
        "{}{architecture}: {} layers, {} caches{shared}",
        described.model_type,
        described.num_layers,
        owning.count(),
    )
}

fn fits(out: &mut String, answer: &Answer) {
    let mut rows = vec![[
        "what fits".to_owned(),
        "tokens of each".to_owned(),
        "requests".to_owned(),
        "tokens in all".to_owned(),
        "bytes of one".to_owned(),
        "bytes/token".to_owned(),
    ]];
    let row = |name: &str, holds: &Holds| {
        [
            name.to_owned(),
            grouped(holds.len),
            holds.requests_text(),
            grouped(holds.tokens),
            size(holds.bytes),
            grouped(holds.bytes_per_token.ceil() as u64),
        ]
    };
    rows.push(row("longest requests", &answer.longest));
    if answer.typical.len != answer.longest.len {
        rows.push(row("usual requests", &answer.typical));
    }
    let right = Align::Right;
    rows_text(
        out,
        "",
        &rows,
        &[Align::Left, right, right, right, right, right],
    );
    let further = answer.bytes_per_further_token_on_rank;
    let mut line = match further > 0.0 {
        true => format!(
            "each further token of a long request: {} bytes",
            whole(further)
        ),
        false => "a long request takes no more bytes for further tokens".to_owned(),
    };
    if further > 0.0 && answer.question.tp.saturating_mul(answer.question.pp) > 1 {
        let _ = write!(
            line,
            " on a rank, {} on all",
            whole(answer.bytes_per_further_token)
        );
    }
    let _ = writeln!(out, "{line}\n");
}

/// A number of bytes that need not be whole: a slot may be shared by several tokens.
pub fn whole(bytes: f64) -> String {
    match bytes.fract() == 0.0 {
        true => grouped(bytes as u64),
        false => format!("{bytes:.1}"),
    }
}

fn memory(out: &mut String, answer: &Answer) {
    let empty = Vec::new();
    let workers = answer.explanation["workers"].as_array().unwrap_or(&empty);
    let mut rows = vec![[
        "memory of a rank".to_owned(),
        "given".to_owned(),
        "in tensors".to_owned(),
        "blocks".to_owned(),
        "bytes/block".to_owned(),
        "padding".to_owned(),
        "unused slots".to_owned(),
        "left over".to_owned(),
        "waste".to_owned(),
    ]];
    for worker in workers {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let waste = &worker["wasted_bytes"];
        let given = number(&worker["memory_bytes"]);
        rows.push([
            stages_text(answer, worker),
            size(given),
            format!(
                "{} in {}",
                size(number(&worker["tensor_bytes"])),
                number(&worker["num_tensors"])
            ),
            grouped(number(&answer.explanation["num_blocks"])),
            grouped(number(&worker["bytes_per_block"])),
            size(number(&waste["padding"])),
            size(number(&waste["unused_slots"])),
            size(number(&waste["left_over"])),
            match is_idle(worker) {
                true => "idle".to_owned(),
                false => format!(
                    "{:.1} %",
                    100.0 * number(&waste["total"]) as f64 / given.max(1) as f64
                ),
            },
        ]);
    }
    let right = Align::Right;
    rows_text(
        out,
        "",
        &rows,
        &[
            Align::Left,
            right,
            right,
            right,
            right,
            right,
            right,
            right,
            right,
        ],
    );
    out.push_str("one block is kept from requests\n\n");
}

/// The ranks that a worker of the explanation stands for.
fn stages_text(answer: &Answer, worker: &Value) -> String {
    let stages: Vec<u64> = worker["workers"]
        .as_array()
        .map(|stages| stages.iter().filter_map(Value::as_u64).collect())
        .unwrap_or_default();
    if answer.question.pp == 1 {
        return match answer.question.tp {
            1 => "the rank".to_owned(),
            tp => format!("each of {tp} ranks"),
        };
    }
    let list: Vec<String> = stages.iter().map(ToString::to_string).collect();
    match list.len() {
        1 => format!("stage {}", list[0]),
        _ => format!("stages {}", list.join(", ")),
    }
}

/// Whether a worker of the explanation has no layer that keeps anything. It needs no memory for a cache, so
/// none of it is wasted.
fn is_idle(worker: &Value) -> bool {
    worker["bytes_per_block"] == 0
}

/// The part of the memory of all ranks with layers that holds nothing, 0 to 1.
pub fn waste_share(answer: &Answer) -> f64 {
    let empty = Vec::new();
    let workers = answer.explanation["workers"].as_array().unwrap_or(&empty);
    let (mut given, mut wasted) = (0.0, 0.0);
    for worker in workers.iter().filter(|worker| !is_idle(worker)) {
        let times = worker["workers"].as_array().map_or(1, Vec::len) as f64;
        given += times * worker["memory_bytes"].as_f64().unwrap_or(0.0);
        wasted += times * worker["wasted_bytes"]["total"].as_f64().unwrap_or(0.0);
    }
    if given > 0.0 { wasted / given } else { 0.0 }
}

/// What there is to say about a group of the whole model.
pub struct GroupRow {
    /// Kinds of its layers.
    pub kinds: String,
    /// Layers with pages of their own, on all stages.
    pub layers: usize,
    /// Tokens of a block; `None` of states, which have one for a request.
    pub block: Option<u64>,
    /// The smallest and the largest page in bytes.
    pub pages: (u64, u64),
    /// One block in all its layers, on all stages, in bytes.
    pub bytes: u64,
    /// Padding in it.
    pub padding: u64,
    /// Blocks of a longest request and of a usual one.
    pub blocks: [u64; 2],
    /// Some of the layers' names.
    pub names: String,
    /// Whether it holds layers of a draft.
    pub is_draft: bool,
}

impl GroupRow {
    /// Kinds, and whether there are draft layers.
    pub fn kinds_text(&self) -> String {
        match self.is_draft {
            true => format!("{}, with draft layers", self.kinds),
            false => self.kinds.clone(),
        }
    }

    /// The part of a block that is padding, 0 to 1.
    pub fn padding_share(&self) -> f64 {
        self.padding as f64 / self.bytes.max(1) as f64
    }
}

/// All groups, in the order of their numbers.
pub fn group_rows(answer: &Answer) -> Vec<GroupRow> {
    let Some(first) = answer.plan.workers.first() else {
        return Vec::new();
    };
    (0..first.groups.len())
        .map(|group| group_row(answer, group))
        .collect()
}

fn group_row(answer: &Answer, number: usize) -> GroupRow {
    let workers = &answer.plan.workers;
    let with_layers = |worker: &&WorkerPlan| !worker.groups[number].layers.is_empty();
    let shown = workers.iter().find(with_layers).unwrap_or(&workers[0]);
    let group = &shown.groups[number];
    let specs = group.spec.specs();
    let mut kinds: Vec<String> = Vec::new();
    for spec in specs {
        let kind = kind_text(spec);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let pages = || specs.iter().map(|spec| spec.page().padded);
    let (mut bytes, mut padding) = (0u64, 0u64);
    for group in workers.iter().map(|worker| &worker.groups[number]) {
        for place in 0..group.layers.len() {
            let page = group.spec.spec_of(place).page();
            bytes = bytes.saturating_add(page.padded);
            padding = padding.saturating_add(page.padded - page.unpadded);
        }
    }
    let blocks = [answer.longest.len, answer.typical.len].map(|len| {
        let limits = kvpages::spec::Limits {
            max_model_len: len,
            counting: kvpages::spec::Counting::Exact,
            ..answer.plan.config.limits
        };
        group.spec.blocks_per_request(&limits).unwrap_or(0)
    });
    let names = workers.iter().flat_map(|worker| {
        let group = &worker.groups[number];
        group
            .layers
            .iter()
            .filter_map(|&layer| worker.model.layers().get(layer))
    });
    let names: Vec<&str> = names.map(|layer| &*layer.name).collect();
    GroupRow {
        kinds: kinds.join(", "),
        layers: names.len(),
        block: specs[0].as_attention().map(|_| group.spec.block_size()),
        pages: (pages().min().unwrap_or(0), pages().max().unwrap_or(0)),
        bytes,
        padding,
        blocks,
        names: some_of(&names),
        is_draft: group.is_draft,
    }
}

/// A kind, with its window, chunk or shapes.
fn kind_text(spec: &kvpages::spec::Spec) -> String {
    use kvpages::spec::Spec;
    match spec {
        Spec::Attention(attention) => {
            let fields = attention.fields();
            match (fields.sliding_window, fields.attention_chunk_size) {
                (Some(window), _) => format!("{} of {window}", spec.kind_name()),
                (_, Some(chunk)) => format!("{} of {chunk}", spec.kind_name()),
                _ if fields.compress_ratio > 1 => {
                    format!("{} over {}", spec.kind_name(), fields.compress_ratio)
                }
                _ => spec.kind_name().to_owned(),
            }
        }
        Spec::State(state) => format!("{} state", state.fields().kind.name()),
    }
}

fn some_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first, second] => format!("{first}, {second}"),
        [first, second, .., last] => format!("{first}, {second} ... {last}"),
    }
}

fn groups(out: &mut String, answer: &Answer) {
    let mut rows = vec![[
        "group".to_owned(),
        "layers".to_owned(),
        "block".to_owned(),
        "page bytes".to_owned(),
        "padding".to_owned(),
        "blocks/longest".to_owned(),
        "blocks/usual".to_owned(),
        "kind".to_owned(),
    ]];
    let mut names = Vec::new();
    for (number, row) in group_rows(answer).into_iter().enumerate() {
        rows.push([
            number.to_string(),
            row.layers.to_string(),
            row.block.map_or("request".to_owned(), grouped),
            match row.pages {
                (low, high) if low == high => grouped(high),
                (low, high) => format!("{}-{}", grouped(low), grouped(high)),
            },
            format!("{:.1} %", 100.0 * row.padding_share()),
            grouped(row.blocks[0]),
            grouped(row.blocks[1]),
            row.kinds_text(),
        ]);
        names.push(row.names);
    }
    let right = Align::Right;
    let aligns = [right, right, right, right, right, right, right, Align::Left];
    let mut table = String::new();
    rows_text(&mut table, "", &rows, &aligns);
    let mut lines = table.lines();
    let _ = writeln!(out, "{}", lines.next().unwrap_or(""));
    for (line, names) in lines.zip(names) {
        let _ = writeln!(out, "{line}\n       {names}");
    }
}

/// What was assumed.
pub fn notes(out: &mut String, notes: &[String]) {
    if notes.is_empty() {
        return;
    }
    out.push_str("\nnotes\n");
    for note in notes {
        let _ = writeln!(out, "  - {note}");
    }
}

/// Rows with even columns.
pub fn rows_text<const N: usize>(
    out: &mut String,
    indent: &str,
    rows: &[[String; N]],
    aligns: &[Align; N],
) {
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        let mut line = indent.to_owned();
        for (column, cell) in row.iter().enumerate() {
            let space = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            if column > 0 {
                line.push_str("  ");
            }
            match aligns[column] {
                Align::Left => line.extend([cell.as_str(), &space]),
                Align::Right => line.extend([space.as_str(), cell]),
            }
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}
