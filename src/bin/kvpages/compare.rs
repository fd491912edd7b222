//! Several plans in one table.

use std::collections::HashSet;

use kvpages::dtype::Dtype;

use crate::args::{PlanArgs, kv_type};
use crate::planning::{Answer, Holds, Question, Refusal};
use crate::report::{Align, rows_text};
use crate::units::{self, grouped, size};

/// A question, and what came of it.
pub type Row<'a> = (&'a Question, Result<Answer, Refusal>);

/// The model's type, where any plan could be made.
pub fn dtype(rows: &[Row<'_>]) -> Option<Dtype> {
    let made = rows.iter().find_map(|(_, answer)| answer.as_ref().ok());
    made.map(|answer| answer.described.dtype)
}

/// Each row once: sizes may be listed twice, and auto is one of the other types.
pub fn distinct(rows: Vec<Row<'_>>) -> Vec<Row<'_>> {
    let dtype = dtype(&rows);
    let mut seen = HashSet::new();
    let mut is_new = |question: &Question| {
        let kv = dtype.map_or_else(|| question.kv.asked(), |dtype| question.kv.name(dtype));
        seen.insert((question.memory, question.tp, kv))
    };
    rows.into_iter()
        .filter(|(question, _)| is_new(question))
        .collect()
}

/// One question for each combination of what `--compare` lists.
pub fn questions(args: &PlanArgs) -> Result<Vec<Question>, String> {
    let (mut sizes, mut types, mut ranks) = (Vec::new(), Vec::new(), Vec::new());
    for item in args.compare.iter().map(|item| item.trim()) {
        if let Some(number) = item.strip_prefix("tp=") {
            let number =
                units::count(number).map_err(|error| format!("--compare {item}: {error}"))?;
            ranks.push(number);
        } else if let Ok(kv) = kv_type(item) {
            types.push(kv);
        } else {
            let bytes = units::bytes(item).map_err(|error| {
                format!("--compare {item}: it is no type of a cache and no tp=RANKS, and as a size {error}")
            })?;
            sizes.push(bytes);
        }
    }
    if sizes.is_empty() {
        match args.memory {
            Some(memory) => sizes.push(memory),
            None => return Err("--compare of types or ranks needs --memory too".to_owned()),
        }
    }
    if types.is_empty() {
        types.push(args.kv_dtype);
    }
    if ranks.is_empty() {
        ranks.push(args.tp);
    }
    let mut questions = Vec::new();
    for &tp in &ranks {
        for &kv in &types {
            for &memory in &sizes {
                questions.push(Question {
                    tp,
                    kv,
                    ..Question::of(args, memory)
                });
            }
        }
    }
    Ok(questions)
}

/// Why none of the plans can be made: each reason once, with the questions that it is for.
pub fn refusals(rows: &[Row<'_>]) -> String {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (question, answer) in rows {
        let Err(Refusal(reason)) = answer else {
            continue;
        };
        let asked = format!(
            "{} at {}, tp {}",
            question.kv.asked(),
            size(question.memory),
            question.tp
        );
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, questions)) => questions.push(asked),
            None => reasons.push((reason, vec![asked])),
        }
    }
    match &*reasons {
        [(reason, _)] => (*reason).to_owned(),
        _ => {
            let lines = reasons
                .iter()
                .map(|(reason, questions)| format!("{}: {reason}", questions.join("; ")));
            lines.collect::<Vec<_>>().join("\n       ")
        }
    }
}

/// What was assumed for any of the plans, once.
fn all_notes(rows: &[Row<'_>]) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    for (_, answer) in rows {
        for note in answer.iter().flat_map(|answer| &answer.described.notes) {
            if !notes.contains(note) {
                notes.push(note.clone());
            }
        }
    }
    notes
}

/// A column of requests. Their length is in its head where all rows have the same, else in each row.
struct Requests {
    holds: fn(&Answer) -> &Holds,
    length: Option<u64>,
}

impl Requests {
    fn of(rows: &[Row<'_>], holds: fn(&Answer) -> &Holds) -> Requests {
        let answers = rows.iter().filter_map(|(_, answer)| answer.as_ref().ok());
        let mut lengths = answers.map(|answer| holds(answer).len);
        let first = lengths.next();
        let length = first.filter(|first| lengths.all(|length| length == *first));
        Requests { holds, length }
    }

    fn head(&self, name: &str) -> String {
        match self.length {
            Some(length) => format!("{name}, {}", grouped(length)),
            None => name.to_owned(),
        }
    }

    fn cell(&self, answer: &Answer) -> String {
        let holds = (self.holds)(answer);
        let requests = holds.requests_text();
        match self.length {
            Some(_) => requests,
            None => format!("{requests} of {}", grouped(holds.len)),
        }
    }
}

/// The table, with what was assumed below.
pub fn table(rows: &[Row<'_>]) -> String {
    let Some(first) = rows.iter().find_map(|(_, answer)| answer.as_ref().ok()) else {
        return String::new();
    };
    let mut out = format!(
        "{}, policy {}\n\n",
        crate::report::model(first),
        first.question.policy.name()
    );
    let longest = Requests::of(rows, |answer| &answer.longest);
    let typical = Requests::of(rows, |answer| &answer.typical);
    let mut lines = vec![[
        "memory".to_owned(),
        "cache".to_owned(),
        "tp".to_owned(),
        longest.head("longest"),
        "tokens".to_owned(),
        typical.head("usual"),
        "tokens".to_owned(),
        "B/token".to_owned(),
        "waste".to_owned(),
        "groups".to_owned(),
    ]];
    let mut refusals = Vec::new();
    for (question, answer) in rows {
        let head = [
            size(question.memory),
            String::new(),
            question.tp.to_string(),
        ];
        match answer {
            Ok(answer) => {
                let [memory, _, tp] = head;
                lines.push([
                    memory,
                    question.kv.name(answer.described.dtype),
                    tp,
                    longest.cell(answer),
                    grouped(answer.longest.tokens),
                    typical.cell(answer),
                    grouped(answer.typical.tokens),
                    grouped(answer.longest.bytes_per_token.ceil() as u64),
                    format!("{:.1} %", 100.0 * crate::report::waste_share(answer)),
                    answer
                        .plan
                        .workers
                        .first()
                        .map_or(0, |worker| worker.groups.len())
                        .to_string(),
                ]);
            }
            Err(refusal) => {
                let [memory, _, tp] = head;
                let none = String::new;
                refusals.push(format!(
                    "{} at {memory}, tp {tp}: {refusal}",
                    question.kv.name(first.described.dtype)
                ));
                lines.push([
                    memory,
                    question.kv.name(first.described.dtype),
                    tp,
                    "none".to_owned(),
                    none(),
                    none(),
                    none(),
                    none(),
                    none(),
                    none(),
                ]);
            }
        }
    }
    let right = Align::Right;
    rows_text(
        &mut out,
        "",
        &lines,
        &[
            right,
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
    out.push_str(
        "\nlongest, usual: requests of so many tokens that fit at once, and the tokens in them.\n",
    );
    out.push_str("B/token: bytes that each token of a longest request takes on a rank.\n");
    for refusal in refusals {
        out.push_str(&format!("\n{refusal}\n"));
    }
    crate::report::notes(&mut out, &all_notes(rows));
    out
}
