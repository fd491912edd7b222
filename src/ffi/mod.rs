//! The C ABI: one file for each section of the header.
//!
//! Functions here translate and nothing more: they check pointers, turn numbers into types, call the
//! core, and turn its errors into a status and a message. Every body runs inside a guard, so that
//! neither a panic nor an error leaves it in any other way.

#![allow(unsafe_code)]
#![allow(non_camel_case_types)]
// What a caller must ensure stands in the @param lines, which also go into the header.
#![allow(clippy::missing_safety_doc)]
// Doc comments are Doxygen's, whose @param[out] rustdoc takes for a link.
#![allow(rustdoc::broken_intra_doc_links)]

mod extensible;
mod guard;
mod handle;
mod input;

pub mod attention;
pub mod backend;
pub mod bind;
pub mod cache;
pub mod descriptor;
pub mod device;
pub mod dlpack;
pub mod log;
pub mod memory;
pub mod metadata;
pub mod model;
pub mod ops;
pub mod plan;
pub mod reshard;
pub mod sizing;
pub mod snapshot;
pub mod spec;
pub mod status;
pub mod tables;
pub mod types;
pub mod version;
pub mod view;

#[cfg(test)]
mod header;
