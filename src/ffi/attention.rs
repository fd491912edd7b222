//! Header section: attention groups and builders.
