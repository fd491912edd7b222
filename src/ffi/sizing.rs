//! Header section: numbers to be asked before layers are described and planned.

use super::extensible::{self, extensible};
use super::guard::guard;
use super::input;
use super::spec::state_cache_mode;
use super::status::kvpages_status;
use crate::plan::{self, HybridModel};

/// What decides the block size of a model that mixes attention and state.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_hybrid_config {
    /// sizeof(kvpages_hybrid_config) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of a block as the engine was configured. At least 1.
    pub block_size: u64,
    /// Tokens of the smallest kernel block that the attention backend takes. At
    /// least 1.
    pub smallest_kernel_block: u64,
    /// Bytes of one token in one attention layer. At least 1.
    pub attention_bytes_per_token: u64,
    /// Bytes of the largest state page.
    pub state_page_bytes: u64,
    /// Tokens between two states that the state kernels can keep; only for
    /// KVPAGES_STATE_CACHE_MODE_ALL.
    pub base_chunk: u64,
    /// One of KVPAGES_STATE_CACHE_MODE_*.
    pub state_cache_mode: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_hybrid_config, reserved0: u32);

/// A block size with which an attention page holds a state.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_hybrid_block {
    /// sizeof(kvpages_hybrid_block) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of an attention block.
    pub block_size: u64,
    /// Bytes of an attention page, and what state pages are to be padded to.
    pub page_size_bytes: u64,
    /// Tokens of a state block; 0 where the state keeps its own.
    pub state_block_size: u64,
}
extensible!(kvpages_hybrid_block, state_block_size: u64);

/// Key-value heads that one tensor-parallel rank stores. With fewer heads than
/// ranks each head is stored by several ranks.
///
/// @param total_kv_heads  Heads of the model. At least 1.
/// @param num_ranks       Ranks. At least 1; it divides the heads, or the heads
///                        divide it.
/// @param[out] out_heads     Heads on one rank. Not NULL.
/// @param[out] out_replicas  Ranks that store the same head. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A number is 0, or neither divides the other.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_kv_heads_per_rank(
    total_kv_heads: u64,
    num_ranks: u64,
    out_heads: *mut u64,
    out_replicas: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out_heads, out_replicas) = unsafe {
            input::both(
                input::cleared(out_heads, "out_heads"),
                input::cleared(out_replicas, "out_replicas"),
            )
        }?;
        (*out_heads, *out_replicas) = plan::kv_heads_per_rank(total_kv_heads, num_ranks)?;
        Ok(())
    })
}

/// How many layer tuples a model of latents is cut into: the number from the lower
/// bound to the largest value to which the values are rounded up with the least
/// padding, and of equal ones the largest.
///
/// @param values       Borrowed. num_values numbers, each 1 to 2^20.
/// @param num_values   At least 1.
/// @param lower_bound  The smallest number allowed, and the answer when it is more
///                     than every value; 0 for 1.
/// @param[out] out     The number. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no value, or one is out of range.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_layer_tuple_count(
    values: *const u64,
    num_values: usize,
    lower_bound: u64,
    out: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, values) = unsafe {
            (
                input::cleared(out, "out")?,
                input::array(values, num_values, "values")?,
            )
        };
        *out = plan::layer_tuple_count(values, lower_bound)?;
        Ok(())
    })
}

/// The smallest block size whose attention page holds a state page. To be asked
/// before the layers are described: attention layers get the block size, state
/// layers the page as their padding.
///
/// @param config    Borrowed. Not NULL.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A number is 0 that must not be, or the block
///         would be larger than 63 bits can say.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_hybrid_block_size(
    config: *const kvpages_hybrid_config,
    out: *mut kvpages_hybrid_block,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, given) = unsafe { (extensible::out(out)?, extensible::read(config)?) };
        input::known_bits(given.reserved0, 0, "kvpages_hybrid_config.reserved0")?;
        let block = plan::hybrid_block_size(&HybridModel {
            block_size: given.block_size,
            smallest_kernel_block: given.smallest_kernel_block,
            attention_bytes_per_token: given.attention_bytes_per_token,
            state_page_bytes: given.state_page_bytes,
            state_cache_mode: state_cache_mode(given.state_cache_mode)?,
            base_chunk: given.base_chunk,
        })?;
        out.fill(kvpages_hybrid_block {
            struct_size: 0,
            block_size: block.block_size,
            page_size_bytes: block.page_bytes,
            state_block_size: block.state_block_size.unwrap_or(0),
        });
        Ok(())
    })
}
