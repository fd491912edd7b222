//! The memory as a picture: what fills it, what lies where in a block, who holds which block.
//!
//! Rectangles of the bars have `data-bytes`; those of a bar add up to the memory of the rank.

mod canvas;
mod colours;

use kvpages::plan::WorkerPlan;
use kvpages::spec::{Counting, Limits, Spec};
use serde_json::Value;

use crate::planning::{Answer, Holds};
use crate::report::{self, GroupRow};
use crate::units::{grouped, size};
use canvas::{Anchor, Canvas, Fill};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 36.0;
const BAR: f64 = 34.0;
const ROW: f64 = 24.0;
/// Where pages begin beside the names of groups.
const LABELS: f64 = 92.0;
/// Pages narrower than this are not drawn; a part of the block is shown instead.
const LEAST_PAGE: f64 = 11.0;
/// Ranks that are drawn where stages differ.
const MOST_RANKS: usize = 4;

/// The picture as SVG.
pub fn svg(answer: &Answer) -> String {
    let rows = report::group_rows(answer);
    let kinds: Vec<&Spec> = answer.plan.workers.first().map_or(Vec::new(), |worker| {
        worker
            .groups
            .iter()
            .map(|group| group.spec.first())
            .collect()
    });
    let colours = colours::of(&kinds);
    let mut canvas = Canvas::new(WIDTH);
    let mut y = title(&mut canvas, answer);
    y = legend(&mut canvas, y, &rows, &colours, answer);
    let drawn = ranks(answer);
    for (index, (name, worker)) in drawn.iter().enumerate().take(MOST_RANKS) {
        if drawn.len() > 1 {
            y = heading(&mut canvas, y, name);
        }
        y = bars(&mut canvas, y, answer, worker, &colours, index);
        y = block(&mut canvas, y, worker, &colours);
        if index == 0 {
            y = ids(&mut canvas, y, answer, worker, &rows, &colours);
        }
    }
    if drawn.len() > MOST_RANKS {
        let text = format!(
            "{} more stages differ and are not drawn",
            drawn.len() - MOST_RANKS
        );
        canvas.text(MARGIN, y + 14.0, 13.0, Anchor::Start, "#555", &text);
        y += 28.0;
    }
    canvas.finish(y + 8.0)
}

/// Workers that differ, each with its name.
fn ranks(answer: &Answer) -> Vec<(String, &WorkerPlan)> {
    let empty = Vec::new();
    let workers = answer.explanation["workers"].as_array().unwrap_or(&empty);
    let first = |worker: &Value| {
        let numbers = worker["workers"].as_array()?;
        let number = usize::try_from(numbers.first()?.as_u64()?).ok()?;
        let name = match numbers.len() {
            1 => format!("Stage {number}"),
            more => format!("Stage {number} and {} alike", more - 1),
        };
        Some((name, answer.plan.workers.get(number)?))
    };
    workers.iter().filter_map(first).collect()
}

fn heading(canvas: &mut Canvas, y: f64, text: &str) -> f64 {
    canvas.bold(MARGIN, y + 16.0, 17.0, text);
    y + 30.0
}

fn section(canvas: &mut Canvas, y: f64, text: &str, aside: &str) -> f64 {
    canvas.bold(MARGIN, y + 14.0, 15.0, text);
    canvas.text(WIDTH - MARGIN, y + 14.0, 12.0, Anchor::End, "#555", aside);
    y + 26.0
}

fn title(canvas: &mut Canvas, answer: &Answer) -> f64 {
    let described = &answer.described;
    let question = &answer.question;
    let name = described
        .architecture
        .as_deref()
        .unwrap_or(&described.model_type);
    canvas.bold(
        MARGIN,
        44.0,
        22.0,
        &format!("{name}: {} of cache on a rank", size(question.memory)),
    );
    let ranks = match (question.tp, question.pp) {
        (1, 1) => "one rank".to_owned(),
        (tp, 1) => format!("tp {tp}"),
        (tp, pp) => format!("tp {tp}, pp {pp}"),
    };
    let text = format!(
        "{} layers, {} cache, {ranks}, policy {}. {}",
        described.num_layers,
        question.kv.name(described.dtype),
        question.policy.name(),
        fits_text(&answer.longest)
    );
    canvas.text(MARGIN, 68.0, 14.0, Anchor::Start, "#333", &text);
    92.0
}

fn fits_text(holds: &Holds) -> String {
    format!(
        "{} requests of {} tokens fit, {} bytes a token.",
        holds.requests_text(),
        grouped(holds.len),
        grouped(holds.bytes_per_token.ceil() as u64)
    )
}

/// One line a group, and one for what is no group's.
fn legend(
    canvas: &mut Canvas,
    y: f64,
    rows: &[GroupRow],
    colours: &[String],
    answer: &Answer,
) -> f64 {
    const COLUMNS: [(&str, f64, Anchor); 6] = [
        ("group", 92.0, Anchor::End),
        ("layers", 460.0, Anchor::End),
        ("tokens of a block", 600.0, Anchor::End),
        ("page", 790.0, Anchor::End),
        ("padding in it", 920.0, Anchor::End),
        ("blocks of one longest request", WIDTH - MARGIN, Anchor::End),
    ];
    for (name, x, anchor) in COLUMNS {
        canvas.text(x, y + 12.0, 12.0, anchor, "#555", name);
    }
    canvas.text(112.0, y + 12.0, 12.0, Anchor::Start, "#555", "kind");
    canvas.line((MARGIN, y + 19.0), (WIDTH - MARGIN, y + 19.0), "#bbb");
    let mut y = y + 24.0;
    for (number, row) in rows.iter().enumerate() {
        canvas.rect(
            (MARGIN, y + 2.0, 22.0, 14.0),
            &Fill::Plain(colours[number].clone()),
            None,
            "",
        );
        let middle = y + 14.0;
        let cells = [
            number.to_string(),
            row.layers.to_string(),
            row.block.map_or("one for a request".to_owned(), grouped),
            match row.pages {
                (low, high) if low == high => size(high),
                (low, high) => format!("{} to {}", size(low), size(high)),
            },
            match row.padding {
                0 => "none".to_owned(),
                _ => format!("{:.1} %", 100.0 * row.padding_share()),
            },
            grouped(row.blocks[0]),
        ];
        for (cell, (_, x, anchor)) in cells.iter().zip(COLUMNS) {
            canvas.text(x, middle, 13.0, anchor, "#111", cell);
        }
        canvas.text(
            112.0,
            middle,
            13.0,
            Anchor::Start,
            "#111",
            &shortened(&row.kinds_text(), 48),
        );
        y += 20.0;
    }
    y += 8.0;
    let sharing: usize = answer
        .plan
        .workers
        .iter()
        .flat_map(|worker| &worker.groups)
        .map(|group| group.sharing_layers.len())
        .sum();
    let mut x = MARGIN;
    for (fill, text) in [
        (Fill::Padding, "padding of pages"),
        (Fill::Unused, "slot that the group leaves unused"),
        (Fill::Kept, "kept: block 0 and what is no whole block"),
    ] {
        canvas.rect((x, y, 22.0, 14.0), &fill, None, "");
        canvas.text(x + 28.0, y + 12.0, 12.0, Anchor::Start, "#333", text);
        x += 60.0 + 6.6 * text.len() as f64;
    }
    if sharing > 0 {
        let text = format!("{sharing} more layers read the pages of others and cost nothing");
        canvas.text(x, y + 12.0, 12.0, Anchor::Start, "#333", &text);
    }
    y + 34.0
}

fn shortened(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// A part of a rank's memory.
struct Part {
    fill: Fill,
    bytes: f64,
    what: String,
}

/// What the memory holds when it is full of requests of one length.
fn parts(answer: &Answer, worker: &WorkerPlan, holds: &Holds, colours: &[String]) -> Vec<Part> {
    let limits = Limits {
        max_model_len: holds.len,
        counting: Counting::Exact,
        ..answer.plan.config.limits
    };
    let blocks: Vec<u64> = worker
        .groups
        .iter()
        .map(|group| group.spec.blocks_per_request(&limits).unwrap_or(0))
        .collect();
    let all = blocks
        .iter()
        .map(|blocks| *blocks as f64)
        .sum::<f64>()
        .max(1.0);
    let reserved = answer.plan.config.reserved_blocks.max(1);
    let usable = worker.num_blocks.saturating_sub(reserved) as f64;
    let block = worker.bytes_per_block as f64;
    let mut parts = Vec::new();
    let mut unused = 0.0;
    for (number, (group, blocks)) in worker.groups.iter().zip(&blocks).enumerate() {
        let share = usable * *blocks as f64 / all;
        let (real, padded) = page_bytes(worker, number);
        let kind = group.spec.first().kind_name();
        parts.push(Part {
            fill: Fill::Plain(colours[number].clone()),
            bytes: share * real,
            what: format!("group {number}, {kind}"),
        });
        parts.push(Part {
            fill: Fill::Padding,
            bytes: share * (padded - real),
            what: format!("padding of group {number}"),
        });
        unused += share * (block - padded);
    }
    parts.push(Part {
        fill: Fill::Unused,
        bytes: unused,
        what: "slots that groups leave unused".to_owned(),
    });
    let held: f64 = parts.iter().map(|part| part.bytes).sum();
    parts.push(Part {
        fill: Fill::Kept,
        bytes: worker.memory_bytes as f64 - held,
        what: "block 0, and what is no whole block".to_owned(),
    });
    parts
}

/// Bytes of one block of a group's layers here, without padding and with it.
fn page_bytes(worker: &WorkerPlan, group: usize) -> (f64, f64) {
    let group = &worker.groups[group];
    let (mut real, mut padded) = (0.0, 0.0);
    for place in 0..group.layers.len() {
        let page = group.spec.spec_of(place).page();
        real += page.unpadded as f64;
        padded += page.padded as f64;
    }
    (real, padded)
}

fn bars(
    canvas: &mut Canvas,
    y: f64,
    answer: &Answer,
    worker: &WorkerPlan,
    colours: &[String],
    rank: usize,
) -> f64 {
    let memory = worker.memory_bytes as f64;
    let mut y = section(
        canvas,
        y,
        "The memory of a rank when it is full",
        "widths are bytes",
    );
    let mut lengths = vec![("longest", &answer.longest)];
    if answer.typical.len != answer.longest.len {
        lengths.push(("usual", &answer.typical));
    }
    for (name, holds) in lengths {
        let text = format!(
            "of {name} requests, {} tokens each: {} fit",
            grouped(holds.len),
            holds.requests_text()
        );
        canvas.text(MARGIN, y + 12.0, 13.0, Anchor::Start, "#333", &text);
        y += 18.0;
        canvas.open_group(&format!("bar {name} {rank}"));
        bar(canvas, y, &parts(answer, worker, holds, colours), memory);
        canvas.close_group();
        y += BAR + 8.0;
    }
    axis(
        canvas,
        (MARGIN, WIDTH - MARGIN),
        y - 4.0,
        worker.memory_bytes.unsigned_abs(),
    );
    y + 34.0
}

/// Parts beside one another, as wide as they have bytes; bytes are rounded so that they add up.
fn bar(canvas: &mut Canvas, y: f64, parts: &[Part], memory: f64) {
    let scale = (WIDTH - 2.0 * MARGIN) / memory.max(1.0);
    let (mut from, mut rounded) = (0.0, 0.0);
    for part in parts {
        let until = (from + part.bytes.max(0.0)).min(memory);
        let whole = until.round() - rounded;
        if whole > 0.0 {
            let place = (MARGIN + from * scale, y, (until - from) * scale, BAR);
            let tip = format!("{}: {}", part.what, size(whole as u64));
            canvas.rect(place, &part.fill, Some(whole as u64), &tip);
            let label = size(whole as u64);
            if let Fill::Plain(colour) = &part.fill
                && place.2 > 8.5 * label.len() as f64
            {
                let middle = place.0 + place.2 / 2.0;
                canvas.text(
                    middle,
                    y + BAR / 2.0 + 5.0,
                    13.0,
                    Anchor::Middle,
                    colours::on(colour),
                    &label,
                );
            }
        }
        rounded = until.round();
        from = until;
    }
    canvas.frame((MARGIN, y, WIDTH - 2.0 * MARGIN, BAR));
}

/// A line with sizes below.
fn axis(canvas: &mut Canvas, (left, right): (f64, f64), y: f64, bytes: u64) {
    let scale = (right - left) / bytes.max(1) as f64;
    let step = step(bytes);
    canvas.line((left, y), (right, y), "#888");
    let mut at = 0u64;
    // The end has a mark of its own, which needs room.
    while right - (left + at as f64 * scale) > 100.0 {
        let x = left + at as f64 * scale;
        canvas.line((x, y), (x, y + 5.0), "#888");
        let (anchor, text) = match at {
            0 => (Anchor::Start, "0".to_owned()),
            _ => (Anchor::Middle, size(at)),
        };
        canvas.text(x, y + 18.0, 12.0, anchor, "#555", &text);
        at = at.saturating_add(step);
    }
    canvas.line((right, y), (right, y + 5.0), "#888");
    canvas.text(right, y + 18.0, 12.0, Anchor::End, "#555", &size(bytes));
}

/// Bytes between two marks: a power of two, so that there are six to twelve.
fn step(bytes: u64) -> u64 {
    (bytes / 6)
        .max(1)
        .checked_next_power_of_two()
        .map_or(1 << 62, |step| (step / 2).max(1))
}

/// Where a page of a group's layer lies in a block.
struct Page {
    group: usize,
    from: u64,
    real: u64,
    padded: u64,
    layer: String,
}

/// One allocation, or one slot of the allocation that all share.
struct Slot {
    from: u64,
    bytes: u64,
}

/// Where all pages of a block lie, one tensor after another.
fn pages(worker: &WorkerPlan) -> (Vec<Slot>, Vec<Page>) {
    let mut slots = Vec::new();
    let mut pages = Vec::new();
    let mut next = 0u64;
    for tensor in &worker.tensors {
        let packed = tensor.block_stride > 0;
        let from = if packed { tensor.offset } else { next };
        let mut widest = 0;
        for &layer in &tensor.layers {
            let Some((group, place)) = place_of(worker, layer) else {
                continue;
            };
            let page = worker.groups[group].spec.spec_of(place).page();
            widest = widest.max(page.padded);
            let name = worker
                .model
                .layers()
                .get(layer)
                .map_or("", |layer| &*layer.name);
            pages.push(Page {
                group,
                from,
                real: page.unpadded,
                padded: page.padded,
                layer: name.to_owned(),
            });
        }
        slots.push(Slot {
            from,
            bytes: widest,
        });
        next = next.max(from.saturating_add(widest));
    }
    slots.sort_by_key(|slot| slot.from);
    slots.dedup_by_key(|slot| slot.from);
    (slots, pages)
}

fn place_of(worker: &WorkerPlan, layer: usize) -> Option<(usize, usize)> {
    worker
        .groups
        .iter()
        .enumerate()
        .find_map(|(number, group)| {
            let place = group.layers.iter().position(|other| *other == layer)?;
            Some((number, place))
        })
}

fn block(canvas: &mut Canvas, y: f64, worker: &WorkerPlan, colours: &[String]) -> f64 {
    let (slots, pages) = pages(worker);
    let packed = worker.tensors.iter().any(|tensor| tensor.block_stride > 0);
    let aside = match packed {
        true => format!(
            "one allocation, {} from block to block",
            size(worker.bytes_per_block)
        ),
        false => format!(
            "{} pool tensors of {} pages; a column is one of them",
            worker.tensors.len(),
            grouped(worker.num_blocks)
        ),
    };
    let mut y = section(
        canvas,
        y,
        "One block: the page of each layer, by number, where its group holds the block",
        &aside,
    );
    let total = worker.bytes_per_block.max(1);
    let shown = shown_bytes(&slots, &pages, total);
    let (left, room) = (MARGIN + LABELS, WIDTH - 2.0 * MARGIN - LABELS);
    let room = if shown < total { room - 120.0 } else { room };
    let scale = room / shown as f64;
    let top = y;
    for (number, group) in worker.groups.iter().enumerate() {
        canvas.rect(
            (MARGIN, y + 4.0, 14.0, 14.0),
            &Fill::Plain(colours[number].clone()),
            None,
            "",
        );
        canvas.text(
            MARGIN + 20.0,
            y + 16.0,
            12.0,
            Anchor::Start,
            "#111",
            &format!("group {number}"),
        );
        canvas.rect(
            (left, y, shown as f64 * scale, ROW - 4.0),
            &Fill::Unused,
            None,
            "unused",
        );
        if group.layers.is_empty() {
            canvas.text(
                left + 6.0,
                y + 15.0,
                12.0,
                Anchor::Start,
                "#555",
                "no layer on this stage",
            );
        }
        for page in pages.iter().filter(|page| page.group == number) {
            if page.from < shown {
                draw_page(canvas, page, (left, y), (scale, shown), &colours[number]);
            }
        }
        y += ROW;
    }
    let lines = slots
        .iter()
        .skip(1)
        .filter(|slot| !packed && slot.from < shown);
    for slot in lines {
        let x = left + slot.from as f64 * scale;
        canvas.line((x, top - 3.0), (x, y - 1.0), "#fff");
    }
    if shown < total {
        let hidden = slots.iter().filter(|slot| slot.from >= shown).count();
        let x = left + room + 10.0;
        canvas.text(
            x,
            top + 14.0,
            12.0,
            Anchor::Start,
            "#555",
            &format!("… {hidden} more"),
        );
        canvas.text(
            x,
            top + 29.0,
            12.0,
            Anchor::Start,
            "#555",
            &format!("to {}", size(total)),
        );
    }
    axis(canvas, (left, left + room), y + 2.0, shown);
    y + 42.0
}

/// A page, or what of it lies in the part that is shown.
fn draw_page(
    canvas: &mut Canvas,
    page: &Page,
    (left, y): (f64, f64),
    (scale, shown): (f64, u64),
    colour: &str,
) {
    let (x, height) = (left + page.from as f64 * scale, ROW - 4.0);
    let in_view = |bytes: u64| bytes.min(shown - page.from) as f64 * scale;
    let tip = format!(
        "{}: {} of {}",
        page.layer,
        size(page.real),
        size(page.padded)
    );
    let (width, whole) = (in_view(page.real), in_view(page.padded));
    canvas.rect(
        (x, y, width, height),
        &Fill::Plain(colour.to_owned()),
        None,
        &tip,
    );
    if whole > width {
        canvas.rect(
            (x + width, y, whole - width, height),
            &Fill::Padding,
            None,
            "padding",
        );
    }
    canvas.outline((x, y, whole, height));
    let number: String = page
        .layer
        .split('.')
        .find(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
        .unwrap_or("")
        .to_owned();
    if !number.is_empty() && width > 6.4 * number.len() as f64 + 3.0 {
        canvas.text(
            x + width / 2.0,
            y + 14.5,
            11.0,
            Anchor::Middle,
            colours::on(colour),
            &number,
        );
    }
}

/// So many bytes of a block that the narrowest page is still seen; all of it where it is.
fn shown_bytes(slots: &[Slot], pages: &[Page], total: u64) -> u64 {
    let room = WIDTH - 2.0 * MARGIN - LABELS;
    let narrowest = pages
        .iter()
        .map(|page| page.padded)
        .min()
        .unwrap_or(total)
        .max(1);
    let most = (narrowest as f64 * room / LEAST_PAGE) as u64;
    if most >= total {
        return total;
    }
    let ends = slots
        .iter()
        .map(|slot| slot.from.saturating_add(slot.bytes));
    let fitting = ends.clone().filter(|end| *end <= most).max();
    // Where pages are so unlike that not even a few are seen, the first few are drawn all the same.
    let few = ends.take(6).max();
    fitting.max(few).unwrap_or(total).min(total)
}

/// Ids of blocks, some of them held by requests, for example.
fn ids(
    canvas: &mut Canvas,
    y: f64,
    answer: &Answer,
    worker: &WorkerPlan,
    rows: &[GroupRow],
    colours: &[String],
) -> f64 {
    let usable = worker.num_blocks.saturating_sub(1);
    let aside = format!(
        "a longest request holds {} of {}",
        grouped(answer.longest.blocks),
        grouped(usable)
    );
    let mut y = section(
        canvas,
        y,
        "Block ids: one space for all groups, any group may hold any block, for example",
        &aside,
    );
    let cells = worker.num_blocks.min(30) as usize;
    let owners = example_owners(rows, cells.saturating_sub(1));
    let width = (WIDTH - 2.0 * MARGIN - 84.0) / 30.0;
    for cell in 0..cells {
        let x = MARGIN + cell as f64 * width;
        let place = (x, y, width - 2.0, 26.0);
        let owner = cell
            .checked_sub(1)
            .and_then(|at| owners.get(at).copied().flatten());
        let (fill, text) = match (cell, owner) {
            (0, _) => (Fill::Kept, "#222".to_owned()),
            (_, Some(group)) => {
                let colour: &String = &colours[group];
                (Fill::Plain(colour.clone()), colours::on(colour).to_owned())
            }
            _ => (Fill::Free, "#555".to_owned()),
        };
        let tip = match (cell, owner) {
            (0, _) => "block 0 is never handed out".to_owned(),
            (_, Some(group)) => format!("held by a request in group {group}"),
            _ => "free".to_owned(),
        };
        canvas.rect(place, &fill, None, &tip);
        canvas.text(
            x + width / 2.0 - 1.0,
            y + 17.0,
            11.0,
            Anchor::Middle,
            &text,
            &cell.to_string(),
        );
    }
    if worker.num_blocks > cells as u64 {
        let text = format!("… {}", grouped(worker.num_blocks - 1));
        canvas.text(WIDTH - MARGIN, y + 17.0, 12.0, Anchor::End, "#555", &text);
    }
    y += 40.0;
    canvas.text(
        MARGIN,
        y + 2.0,
        12.0,
        Anchor::Start,
        "#555",
        "Block 0 is kept; white blocks are free. Every id has its own bytes of all that is drawn above.",
    );
    y + 24.0
}

/// Groups that hold blocks, mixed as requests would leave them, and the last ones free.
fn example_owners(rows: &[GroupRow], cells: usize) -> Vec<Option<usize>> {
    let held = cells * 4 / 5;
    let all: f64 = rows
        .iter()
        .map(|row| row.blocks[1] as f64)
        .sum::<f64>()
        .max(1.0);
    let mut owed: Vec<f64> = vec![0.0; rows.len()];
    let mut owners = Vec::with_capacity(cells);
    for cell in 0..cells {
        if cell >= held {
            owners.push(None);
            continue;
        }
        for (owed, row) in owed.iter_mut().zip(rows) {
            *owed += row.blocks[1] as f64 / all;
        }
        let most = (0..rows.len()).max_by(|&a, &b| owed[a].total_cmp(&owed[b]).then(b.cmp(&a)));
        if let Some(group) = most {
            owed[group] -= 1.0;
        }
        owners.push(most);
    }
    owners
}
