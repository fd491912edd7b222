//! Attention groups: layers that one metadata builder serves, their builders, and the metadata of a step.
