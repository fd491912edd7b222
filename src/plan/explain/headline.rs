//! In a line, for a log.

use super::facts;
use super::reference;
use super::text::{narrow_text, worker_title};
use crate::plan::units::Bytes;
use crate::plan::{Plan, Policy};

impl Plan {
    /// The plan in one line.
    pub fn headline(&self) -> String {
        let totals = reference::totals(self);
        let policy = match self.asked.as_ref().map(|asked| asked.policy) {
            Some(Policy::Reference) => "plan of the policy reference",
            Some(Policy::Compact) => "plan of the policy compact",
            None => "plan of the engine",
        };
        let held = match totals.max_model_len {
            0 => String::new(),
            len => format!(
                ", {} tokens in requests of up to {len}",
                totals.capacity_tokens
            ),
        };
        format!(
            "{policy} for {}: {} in {}{held}; {} in all tensors, of which {} of padding and {} of \
             unused slots; {} left over",
            counted(self.workers.len() as u64, "worker"),
            counted(totals.num_blocks, "block"),
            counted(totals.num_groups as u64, "group"),
            Bytes(totals.tensor_bytes),
            Bytes(totals.waste.padding),
            Bytes(totals.waste.unused_slots),
            Bytes(totals.waste.left_over),
        )
    }

    /// Why there are no more blocks, where that is not the memory: a sentence for each worker.
    pub fn limits(&self) -> Vec<String> {
        let workers = facts::of_workers(self);
        let narrow = workers.iter().filter_map(|(numbers, worker)| {
            let narrow = worker.narrow.as_ref()?;
            let num_blocks = reference::totals(self).num_blocks;
            let text = narrow_text(narrow, num_blocks);
            Some(format!("{}: {text}", worker_title(numbers)))
        });
        narrow.collect()
    }

    /// Why a compact plan is the reference's, if it is.
    pub fn fallback(&self) -> Option<String> {
        let beside = reference::compare(self)?.outcome.ok()?;
        beside.is_taken.then(|| {
            "the policy compact took the groups and pages of the policy reference: it found nothing \
             better"
                .to_owned()
        })
    }
}

/// "1 block", "2 blocks".
fn counted(count: u64, what: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {what}{ending}")
}
