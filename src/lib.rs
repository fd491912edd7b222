//! The memory of the paged KV cache, for LLM inference engines.
//!
//! An engine describes its layers, kvpages plans how they share memory, allocates it, and hands
//! back for every layer a view that is proven to stay inside its allocation and to touch no other
//! block's bytes. Engines use it through the C ABI in [`ffi`], whose header is
//! `include/kvpages/kvpages.h`.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | token | one position of a request's sequence |
//! | slot | one token's place in a group |
//! | block | the unit of allocation, `block_size` tokens; ids are one space for all groups |
//! | kernel block | what a kernel indexes; its length divides a block's |
//! | page | the bytes of one block in one layer |
//! | group | layers that share a block table |
//! | pool tensor | one allocation, shared by one layer of each group |
//! | view | data pointer, element type, shape and strides of a layer |
//! | state | memory of a Mamba or linear-attention layer, one for a request |
//! | null block | block 0, never handed out |
//!
//! # Architecture
//!
//! ```text
//! layers -- model --> plan --> cache(memory) --> views --> bound layers
//!  spec, backend,      groups,   allocations,     shape, strides,
//!  sharing             tensors   host or caller   proven
//! ```
//!
//! Two halves. The pure half never sees memory: numbers in, values out. The memory half never sees
//! policy. They meet in [`cache`] and in [`ffi`]. `tidy.rs` holds the table of who may import whom
//! and a test that enforces it.
//!
//! | module | what it knows |
//! |---|---|
//! | [`num`] | checked arithmetic |
//! | [`json`] | texts that there may be no memory for |
//! | [`log`] | messages to the engine's callback |
//! | [`dtype`] | element types |
//! | [`spec`] | what one layer stores: kinds, quantisation, page bytes, merging, demand |
//! | [`backend`] | an attention backend's contract: layout, kernel blocks, index width; presets |
//! | [`model`] | layers in order, and who shares whose pages |
//! | [`plan`] | grouping, page unification, packing, budget, workers, capacity, explanation |
//! | `kernels` | the bodies in `kernels/`, as functions of the host |
//! | [`tables`] | block tables, gathered batches, slot mappings |
//! | [`attention`] | attention groups, their builders, the metadata of a step |
//! | [`cuda`] | the CUDA driver: contexts, devices, device memory, streams, launches |
//! | [`memory`] | where bytes come from: host, the engine's allocator, an adopted buffer |
//! | [`view`] | shape and stride algebra, and the proof |
//! | [`descriptor`] | a cache as plain data: read and written, addresses, resharding |
//! | [`dlpack`] | views as tensors of DLPack, which keep their memory |
//! | [`ops`] | zero, copy, write and gather over views |
//! | [`cache`] | plan and memory together; binding order, regions |
//! | [`ffi`] | the C ABI, one file for each section of the header |

pub mod attention;
pub mod backend;
pub mod cache;
pub mod cuda;
pub mod descriptor;
pub mod dlpack;
pub mod dtype;
pub mod ffi;
pub mod json;
mod kernels;
pub mod log;
pub mod memory;
pub mod model;
pub mod num;
pub mod ops;
pub mod plan;
pub mod spec;
pub mod tables;
pub mod view;

#[cfg(test)]
mod tidy;
