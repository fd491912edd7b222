//! Header section: operations on blocks.
