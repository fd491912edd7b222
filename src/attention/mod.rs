//! Attention groups: layers that one metadata builder serves, their builders, and the metadata of
//! a step.

mod builders;
mod groups;
mod metadata;
mod multimodal;
#[cfg(test)]
mod tests;

pub use builders::{BuilderInfo, BuilderSource, Builders, BuildersError};
pub use groups::{AttentionGroup, AttentionGroups, CacheGroup, GroupsError};
pub use metadata::{ArrayLengthError, StepMetadata, check_per_group};
pub use multimodal::{Modality, MultimodalError, MultimodalItem, TokenRange, visit_ranges};
