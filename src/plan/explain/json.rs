//! For programs.

use std::fmt::Write;
use std::sync::Arc;

use super::facts::{GroupFacts, PlanFacts, WorkerFacts};

/// The facts as one JSON object.
pub(super) fn render(facts: &PlanFacts) -> String {
    let mut json = Json::default();
    json.object(|json| {
        json.number("num_blocks", facts.num_blocks);
        json.number("reserved_blocks", facts.reserved_blocks);
        json.number("max_model_len", facts.max_model_len);
        json.list("workers", &facts.workers, |json, (numbers, worker)| {
            json.object(|json| {
                json.list("workers", numbers, |json, number| {
                    json.raw(&number.to_string())
                });
                render_worker(json, worker);
            });
        });
    });
    json.out
}

fn render_worker(json: &mut Json, worker: &WorkerFacts) {
    json.key("memory_bytes");
    json.raw(&worker.memory_bytes.to_string());
    json.number("num_tensors", worker.tensors as u64);
    json.number("tensor_bytes", worker.tensor_bytes);
    json.number("bytes_per_block", worker.bytes_per_block);
    let request = worker.request.as_ref();
    json.optional("blocks_per_request", request.map(|request| request.blocks));
    json.optional("bytes_per_request", request.map(|request| request.bytes));
    json.optional(
        "capacity_tokens",
        request.map(|request| request.capacity_tokens),
    );
    // A concurrency is a quotient of whole numbers and finite, which JSON can write.
    json.optional(
        "max_concurrency",
        request.map(|request| request.max_concurrency),
    );
    json.boolean("needs_zeroing", worker.needs_zeroing);
    json.key("wasted_bytes");
    json.object(|json| {
        json.number("total", worker.waste.total());
        json.number("padding", worker.waste.padding);
        json.number("unused_slots", worker.waste.unused_slots);
        json.number("left_over", worker.waste.left_over);
    });
    json.list("groups", &worker.groups, |json, group| {
        render_group(json, group)
    });
}

fn render_group(json: &mut Json, group: &GroupFacts) {
    json.object(|json| {
        let names = |json: &mut Json, name: &Arc<str>| json.string(name);
        json.list("kinds", &group.kinds, |json, kind| json.string(kind));
        json.boolean("is_draft", group.is_draft);
        json.number("block_size", group.block_size);
        json.optional("kernel_block_size", group.kernel_block_size);
        json.number("smallest_page_bytes", group.page_bytes.0);
        json.number("largest_page_bytes", group.page_bytes.1);
        json.number("blocks_per_request", group.blocks_per_request);
        json.number("bytes_per_block", group.bytes_per_block);
        json.number("padding_bytes_per_block", group.padding_bytes);
        json.key("padding_share");
        json.raw(&format!("{:?}", group.padding_share()));
        json.number("unused_bytes_per_block", group.unused_bytes);
        json.list("reasons", &group.reasons, |json, reason| {
            json.string(reason)
        });
        json.list("layers", &group.layers, names);
        json.list("sharing_layers", &group.sharing_layers, names);
    });
}

/// Writes JSON from front to back.
#[derive(Default)]
struct Json {
    out: String,
}

impl Json {
    fn object(&mut self, fields: impl FnOnce(&mut Json)) {
        self.raw("{");
        fields(self);
        self.out.push('}');
    }

    fn list<T>(&mut self, key: &str, items: &[T], mut item: impl FnMut(&mut Json, &T)) {
        self.key(key);
        self.raw("[");
        for value in items {
            item(self, value);
        }
        self.out.push(']');
    }

    fn number(&mut self, key: &str, value: u64) {
        self.key(key);
        self.raw(&value.to_string());
    }

    fn optional(&mut self, key: &str, value: Option<impl std::fmt::Debug>) {
        self.key(key);
        self.raw(&value.map_or("null".to_owned(), |value| format!("{value:?}")));
    }

    fn boolean(&mut self, key: &str, value: bool) {
        self.key(key);
        self.raw(if value { "true" } else { "false" });
    }

    fn key(&mut self, key: &str) {
        self.string(key);
        self.out.push(':');
    }

    fn string(&mut self, text: &str) {
        self.comma();
        self.out.push('"');
        for character in text.chars() {
            let _ = match character {
                '"' => write!(self.out, "\\\""),
                '\\' => write!(self.out, "\\\\"),
                control if control < ' ' => write!(self.out, "\\u{:04x}", control as u32),
                other => write!(self.out, "{other}"),
            };
        }
        self.out.push('"');
    }

    fn raw(&mut self, text: &str) {
        self.comma();
        self.out.push_str(text);
    }

    /// A value follows another one unless it is the first, or a key stands before it.
    fn comma(&mut self) {
        if !matches!(self.out.chars().next_back(), None | Some('{' | '[' | ':')) {
            self.out.push(',');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let mut json = Json::default();
        json.object(|json| {
            json.list("a\"\\\n", &["x:", "y["], |json, text| json.string(text));
            json.number("b", 1);
        });
        assert_eq!(json.out, "{\"a\\\"\\\\\\u000a\":[\"x:\",\"y[\"],\"b\":1}");
    }
}
