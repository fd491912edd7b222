//! A block size for models that mix attention and state, before they are planned.

use super::error::PlanError;
use crate::num::{Overflow, lcm, product};
use crate::spec::StateCacheMode;

/// What decides the block size of a model that mixes attention and state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridModel {
    /// Tokens of a block as the engine asks for it.
    pub block_size: u64,
    /// Tokens of the smallest kernel block that the attention backend takes.
    pub smallest_kernel_block: u64,
    /// Bytes of one token in one attention layer.
    pub attention_bytes_per_token: u64,
    /// Bytes of the largest state page.
    pub state_page_bytes: u64,
    /// When state layers keep the state of an earlier position.
    pub state_cache_mode: StateCacheMode,
    /// Tokens between two states that the state kernels can keep; only for
    /// [`StateCacheMode::All`].
    pub base_chunk: u64,
}

/// A block size with which an attention page holds a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridBlock {
    /// Tokens of an attention block.
    pub block_size: u64,
    /// Bytes of an attention page, and what state pages are padded to.
    pub page_bytes: u64,
    /// Tokens of a state block; `None` where the state keeps its own.
    pub state_block_size: Option<u64>,
}

/// The smallest block size whose attention page holds a state page.
pub fn hybrid_block_size(model: &HybridModel) -> Result<HybridBlock, PlanError> {
    for (field, value) in [
        ("block_size", model.block_size),
        ("smallest_kernel_block", model.smallest_kernel_block),
        ("attention_bytes_per_token", model.attention_bytes_per_token),
        ("base_chunk", chunk_if_used(model)),
    ] {
        if value == 0 {
            return Err(PlanError::Zero { field });
        }
    }
    let sizes = sizes(model);
    sizes.map_err(|error| PlanError::overflow_at("hybrid block size", error))
}

fn chunk_if_used(model: &HybridModel) -> u64 {
    match model.state_cache_mode {
        StateCacheMode::All => model.base_chunk,
        StateCacheMode::None | StateCacheMode::Align => 1,
    }
}

fn sizes(model: &HybridModel) -> Result<HybridBlock, Overflow> {
    let token = model.attention_bytes_per_token;
    let unit = model.smallest_kernel_block.max(model.block_size);
    // A state of no bytes still needs a block.
    let state = model.state_page_bytes.max(1);
    let block_size = match model.state_cache_mode {
        StateCacheMode::None | StateCacheMode::Align => {
            let step = product("an attention page", [unit, token])?;
            product("the block size", [unit, state.div_ceil(step)])?
        }
        StateCacheMode::All => {
            let chunk = lcm("the chunk", model.base_chunk, unit)?;
            product(
                "the block size",
                [chunk, state.div_ceil(token).div_ceil(chunk)],
            )?
        }
    };
    Ok(HybridBlock {
        block_size,
        page_bytes: product("an attention page", [block_size, token])?,
        state_block_size: match model.state_cache_mode {
            StateCacheMode::None => None,
            StateCacheMode::Align | StateCacheMode::All => Some(block_size),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attention_page_holds_a_state() {
        use StateCacheMode::{Align, All, None as Off};
        for (block, kernel, token, state, mode, chunk, expected) in [
            (16, 16, 512, 8192, Off, 0, Some((16, 8192, None))),
            (16, 16, 512, 8193, Off, 0, Some((32, 16384, None))),
            (16, 64, 512, 40000, Align, 0, Some((128, 65536, Some(128)))),
            (
                16,
                16,
                512,
                400_000,
                All,
                256,
                Some((1024, 524_288, Some(1024))),
            ),
            (48, 16, 512, 1, All, 256, Some((768, 393_216, Some(768)))),
            (16, 16, 512, 0, Off, 0, Some((16, 8192, None))),
            (16, 16, 0, 1, Off, 0, None),
            (16, 16, 1, 1, All, 0, None),
            (16, 16, u64::MAX, 1, Off, 0, None),
        ] {
            let got = hybrid_block_size(&HybridModel {
                block_size: block,
                smallest_kernel_block: kernel,
                attention_bytes_per_token: token,
                state_page_bytes: state,
                state_cache_mode: mode,
                base_chunk: chunk,
            });
            let got = got
                .ok()
                .map(|b| (b.block_size, b.page_bytes, b.state_block_size));
            assert_eq!(got, expected, "{block} {kernel} {token} {state} {mode:?}");
        }
    }
}
