//! Header section: the metadata of a step.
