//! For people.

use std::fmt::Write;

use super::facts::{GroupFacts, NarrowFacts, PlanFacts, WorkerFacts};
use super::reference::Comparison;
use crate::plan::units::Bytes;

/// Names shown of a group's layers.
const SHOWN_NAMES: usize = 3;

/// The facts as aligned lines.
pub(super) fn render(facts: &PlanFacts) -> String {
    let mut out = String::new();
    line(&mut out, 0, "workers", &facts.num_workers.to_string());
    let reserved = match facts.reserved_blocks {
        0 => String::new(),
        reserved => format!(", {reserved} of them kept from requests"),
    };
    line(
        &mut out,
        0,
        "blocks",
        &format!("{}{reserved}", facts.num_blocks),
    );
    let longest = match facts.max_model_len {
        0 => "unknown".to_owned(),
        tokens => format!("{tokens} tokens"),
    };
    line(&mut out, 0, "longest sequence", &longest);
    for (numbers, worker) in &facts.workers {
        out.push('\n');
        let _ = writeln!(out, "{}", worker_title(numbers));
        render_worker(&mut out, worker, facts.num_blocks);
    }
    if let Some(comparison) = &facts.reference {
        render_reference(&mut out, comparison);
    }
    render_advice(&mut out, facts);
    out
}

/// A number of requests, rounded down: one that just does not fit must not be promised.
fn hundredths(requests: f64) -> String {
    format!("{:.2}", (requests * 100.0).floor() / 100.0)
}

/// What the reference makes of the same layers.
fn render_reference(out: &mut String, comparison: &Comparison) {
    out.push('\n');
    let beside = match &comparison.outcome {
        Ok(beside) => beside,
        Err(error) => {
            let _ = writeln!(out, "the policy reference gives no plan: {error}");
            return;
        }
    };
    let _ = writeln!(out, "beside the policy reference");
    let (own, reference) = (&beside.own, &beside.reference);
    let mut rows = vec![[
        "".to_owned(),
        "this plan".to_owned(),
        "reference".to_owned(),
        "ratio".to_owned(),
    ]];
    let mut row = |what: String, is: u64, was: u64, ratio: Option<f64>| {
        let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        rows.push([what, is.to_string(), was.to_string(), ratio]);
    };
    for held in &beside.lengths {
        let what = format!("tokens in requests of {}", held.len);
        row(
            what,
            held.tokens(),
            held.tokens_of_reference(),
            held.ratio(),
        );
    }
    for (what, is, was) in [
        (
            "longest sequence",
            own.max_model_len,
            reference.max_model_len,
        ),
        ("groups", own.num_groups as u64, reference.num_groups as u64),
        ("blocks", own.num_blocks, reference.num_blocks),
        (
            "bytes of a block",
            own.bytes_per_block,
            reference.bytes_per_block,
        ),
        ("wasted bytes", own.waste.total(), reference.waste.total()),
        ("  padding", own.waste.padding, reference.waste.padding),
        (
            "  unused slots",
            own.waste.unused_slots,
            reference.waste.unused_slots,
        ),
        (
            "  left over",
            own.waste.left_over,
            reference.waste.left_over,
        ),
    ] {
        row(what.to_owned(), is, was, quotient(is, was));
    }
    render_rows(out, &rows);
    for reason in &beside.reasons {
        let _ = writeln!(out, "  - {reason}");
    }
}

fn quotient(is: u64, was: u64) -> Option<f64> {
    (was > 0).then(|| is as f64 / was as f64)
}

/// Names by their first letter, numbers by their last digit.
fn render_rows(out: &mut String, rows: &[[String; 4]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3].map(width);
    for [what, own, reference, ratio] in rows {
        let [first, second, third, fourth] = widths;
        let _ = writeln!(
            out,
            "  {what:<first$}  {own:>second$}  {reference:>third$}  {ratio:>fourth$}"
        );
    }
}

/// What would help.
fn render_advice(out: &mut String, facts: &PlanFacts) {
    if let Some(advice) = &facts.cheapest_change {
        let _ = writeln!(out, "\ncheapest change: {advice}");
    }
    if let Some(more) = &facts.one_more_request {
        let _ = writeln!(
            out,
            "\none more request: {} of {} tokens would fit instead of {} of {}",
            more.requests, more.max_model_len, more.requests_now, facts.max_model_len
        );
    }
}

/// Numbers as ranges: "worker 3", "workers 0-3, 8".
pub(super) fn worker_title(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let texts = ranges.iter().map(|&(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let texts = texts.collect::<Vec<_>>().join(", ");
    match numbers.len() {
        1 => format!("worker {texts}"),
        _ => format!("each of workers {texts}"),
    }
}

fn render_worker(out: &mut String, worker: &WorkerFacts, num_blocks: u64) {
    let bytes = |value: u64| Bytes(value).to_string();
    let given = match worker.memory_bytes {
        0 => "unknown".to_owned(),
        given => u64::try_from(given).map_or_else(|_| format!("{given} bytes"), bytes),
    };
    line(out, 2, "memory given", &given);
    line(
        out,
        2,
        "in tensors",
        &format!("{} in {}", bytes(worker.tensor_bytes), worker.tensors),
    );
    line(out, 2, "one block", &bytes(worker.bytes_per_block));
    let (request, capacity) = match &worker.request {
        Some(request) => (
            format!("{} in {} blocks", bytes(request.bytes), request.blocks),
            format!(
                "{} tokens, {} requests of the longest sequence",
                request.capacity_tokens,
                hundredths(request.max_concurrency)
            ),
        ),
        None => ("unknown".to_owned(), "unknown".to_owned()),
    };
    line(out, 2, "one request", &request);
    line(out, 2, "capacity", &capacity);
    line(out, 2, "wasted", &bytes(worker.waste.total()));
    line(out, 4, "padding", &bytes(worker.waste.padding));
    line(out, 4, "unused slots", &bytes(worker.waste.unused_slots));
    line(out, 4, "left over", &bytes(worker.waste.left_over));
    let zeroing = match worker.needs_zeroing {
        true => "blocks must be zeroed when another group gets them",
        false => "not needed",
    };
    line(out, 2, "zeroing", zeroing);
    if let Some(narrow) = &worker.narrow {
        line(out, 2, "index width", &narrow_text(narrow, num_blocks));
    }
    if !worker.groups.is_empty() {
        out.push('\n');
        render_groups(out, &worker.groups);
    }
}

/// Why kernels reach no more blocks.
pub(super) fn narrow_text(narrow: &NarrowFacts, num_blocks: u64) -> String {
    format!(
        "layer {}: {} computes 32-bit offsets and reaches {num_blocks} blocks; there is memory for {}",
        narrow.layer, narrow.backend, narrow.blocks_of_memory
    )
}

fn render_groups(out: &mut String, groups: &[GroupFacts]) {
    let header = [
        "group",
        "layers",
        "block",
        "kernel block",
        "blocks/request",
        "page bytes",
        "bytes/block",
        "padding/block",
        "padding",
        "kind",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(
        groups
            .iter()
            .enumerate()
            .map(|(number, group)| row(number, group)),
    );
    let widths: Vec<usize> = (0..header.len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    for (number, row) in rows.iter().enumerate() {
        out.push_str("  ");
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            // The kind stands last and is text; numbers are aligned by their last digit.
            let _ = match column + 1 == row.len() {
                true => write!(out, "{gap}{cell}"),
                false => write!(out, "{gap}{cell:>width$}"),
            };
        }
        out.push('\n');
        if let Some(group) = number.checked_sub(1).and_then(|group| groups.get(group)) {
            render_details(out, group);
        }
    }
}

fn row(number: usize, group: &GroupFacts) -> [String; 10] {
    let kernel = group
        .kernel_block_size
        .map_or("-".to_owned(), |size| size.to_string());
    let page = match group.page_bytes {
        (smallest, largest) if smallest == largest => largest.to_string(),
        (smallest, largest) => format!("{smallest}-{largest}"),
    };
    let draft = if group.is_draft { " (draft)" } else { "" };
    [
        number.to_string(),
        group.layers.len().to_string(),
        group.block_size.to_string(),
        kernel,
        group.blocks_per_request.to_string(),
        page,
        group.bytes_per_block.to_string(),
        group.padding_bytes.to_string(),
        format!("{:.1} %", 100.0 * group.padding_share()),
        format!("{}{draft}", group.kinds.join(", ")),
    ]
}

fn render_details(out: &mut String, group: &GroupFacts) {
    for layers in [&group.layers, &group.sharing_layers] {
        if layers.is_empty() {
            continue;
        }
        let shown: Vec<&str> = layers
            .iter()
            .take(SHOWN_NAMES)
            .map(|name| &**name)
            .collect();
        let more = match layers.len() - shown.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let what = if std::ptr::eq(layers, &group.layers) {
            ""
        } else {
            "sharing: "
        };
        let _ = writeln!(out, "           {what}{}{more}", shown.join(", "));
    }
    for reason in &group.reasons {
        let _ = writeln!(out, "         - {reason}");
    }
}

fn line(out: &mut String, indent: usize, what: &str, value: &str) {
    let width = 20 - indent;
    let _ = writeln!(out, "{:indent$}{what:<width$}{value}", "");
}

#[cfg(test)]
mod tests {
    use super::hundredths;

    #[test]
    fn requests_are_rounded_down() {
        assert_eq!(hundredths(20479.0 / 2560.0), "7.99");
        assert_eq!(hundredths(8.0), "8.00");
        assert_eq!(hundredths(4.65), "4.65");
    }
}
