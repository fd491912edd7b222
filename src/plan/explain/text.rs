//! For people.

use std::fmt::Write;

use super::facts::{GroupFacts, PlanFacts, WorkerFacts};
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
        render_worker(&mut out, worker);
    }
    out
}

/// Numbers as ranges: "worker 3", "workers 0-3, 8".
fn worker_title(numbers: &[usize]) -> String {
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

fn render_worker(out: &mut String, worker: &WorkerFacts) {
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
                "{} tokens, {:.2} requests of the longest sequence",
                request.capacity_tokens, request.max_concurrency
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
    if !worker.groups.is_empty() {
        out.push('\n');
        render_groups(out, &worker.groups);
    }
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
