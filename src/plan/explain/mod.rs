//! Why a plan is as it is: what each group costs, what is wasted, and the reason; what the policy
//! `reference` makes of the same layers, and which change would help.

mod advice;
mod change;
mod facts;
mod headline;
mod json;
mod reference;
#[cfg(test)]
mod tests;
mod text;

pub use advice::Advice;
pub use change::Change;

use super::Plan;

impl Plan {
    /// The plan for people: what was decided, what it costs, what is wasted and why. Workers with
    /// equal plans are described once.
    pub fn explain_text(&self) -> String {
        text::render(&facts::facts(self))
    }

    /// The same as [`explain_text`](Self::explain_text) for programs: one JSON object that names
    /// every layer.
    pub fn explain_json(&self) -> String {
        json::render(&facts::facts(self))
    }
}
