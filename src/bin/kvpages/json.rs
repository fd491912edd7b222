//! An answer for programs. docs/cli.md has the fields.

use serde_json::{Value, json};

use kvpages::dtype::Dtype;

use crate::compare::{self, Row};
use crate::planning::{Answer, Holds, Question};
use crate::report;

/// Raised when a field changes its meaning or goes; new fields may come without.
const VERSION: u64 = 1;

/// One plan.
pub fn plan(answer: &Answer) -> String {
    pretty(&object(answer))
}

/// Several plans.
pub fn comparison(rows: &[Row<'_>]) -> String {
    // Where none can be made there is nothing to compare, and no type to name.
    let dtype = compare::dtype(rows).unwrap_or(Dtype::Bf16);
    let plans: Vec<Value> = rows
        .iter()
        .map(|(question, answer)| match answer {
            Ok(answer) => object(answer),
            Err(refusal) => json!({
                "version": VERSION,
                "question": asked(question, dtype),
                "error": refusal.to_string(),
            }),
        })
        .collect();
    pretty(&json!({ "version": VERSION, "plans": plans }))
}

fn pretty(value: &Value) -> String {
    // Strings and finite numbers can always be written.
    serde_json::to_string_pretty(value).unwrap_or_default()
}

fn asked(question: &Question, dtype: Dtype) -> Value {
    json!({
        "memory_bytes": question.memory,
        "tensor_parallel": question.tp,
        "pipeline_parallel": question.pp,
        "kv_dtype": question.kv.name(dtype),
        "block_size": question.block_size,
        "max_batched_tokens": question.in_flight,
        "policy": question.policy.name(),
    })
}

fn held(holds: &Holds) -> Value {
    json!({
        "len": holds.len,
        "requests": holds.requests,
        "tokens": holds.tokens,
        "blocks_per_request": holds.blocks,
        "bytes_per_request": holds.bytes,
        "bytes_per_token": holds.bytes_per_token,
    })
}

fn object(answer: &Answer) -> Value {
    let described = &answer.described;
    let groups: Vec<Value> = report::group_rows(answer)
        .into_iter()
        .map(|row| {
            json!({
                "kind": row.kinds,
                "layers": row.layers,
                "block_size": row.block,
                "smallest_page_bytes": row.pages.0,
                "largest_page_bytes": row.pages.1,
                "bytes_per_block": row.bytes,
                "padding_bytes_per_block": row.padding,
                "blocks_per_longest": row.blocks[0],
                "blocks_per_typical": row.blocks[1],
                "is_draft": row.is_draft,
            })
        })
        .collect();
    json!({
        "version": VERSION,
        "model": {
            "model_type": described.model_type,
            "architecture": described.architecture,
            "dtype": described.dtype.name(),
            "num_layers": described.num_layers,
            "max_len": described.max_len,
            "encoder_tokens": described.encoder_tokens,
        },
        "question": asked(&answer.question, described.dtype),
        "max_model_len": answer.longest.len,
        "longest": held(&answer.longest),
        "typical": held(&answer.typical),
        "bytes_per_further_token": answer.bytes_per_further_token_on_rank,
        "bytes_per_further_token_all_ranks": answer.bytes_per_further_token,
        "waste_share": report::waste_share(answer),
        "groups": groups,
        "notes": described.notes,
        "explanation": answer.explanation,
    })
}
