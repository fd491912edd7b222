//! How many blocks one request can need of a layer, and how long its block-table row is.

use super::{AttentionKind, Spec};
use crate::num::{Overflow, product, sum};

/// When a state layer keeps the state of an earlier position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum StateCacheMode {
    /// Only the current state.
    None = 0,
    /// The current state and the one at the last block boundary.
    Align = 1,
    /// The state at every block boundary.
    All = 2,
}

impl StateCacheMode {
    /// Every mode, in the order of their numbers.
    pub const ALL: [StateCacheMode; 3] = [
        StateCacheMode::None,
        StateCacheMode::Align,
        StateCacheMode::All,
    ];
}

/// What bounds one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the longest sequence.
    pub max_model_len: u64,
    /// Ranks that share the tokens of a sequence while decoding. At least 1.
    pub context_parallel_size: u64,
    /// Tokens scheduled and not yet settled, over all concurrent batches.
    pub max_tokens_in_flight: u64,
    /// Tokens of an encoder's output that cross attention caches.
    pub max_encoder_tokens: u64,
    /// When state layers keep the state of an earlier position.
    pub state_cache_mode: StateCacheMode,
}

impl Limits {
    /// Whether there are any: of a plan that an engine made itself they are not known.
    pub fn are_known(&self) -> bool {
        self.max_model_len > 0
    }
}

/// Why a demand cannot be worked out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DemandError {
    /// Windows and context parallelism do not go together.
    #[error(
        "a {kind} layer cannot share its tokens over {ranks} context-parallel ranks; it needs 1"
    )]
    ContextParallelWindow {
        /// The layer's kind.
        kind: &'static str,
        /// Ranks asked for.
        ranks: u64,
    },
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

impl Spec {
    /// The most blocks one request can hold of this layer.
    pub fn blocks_per_request(&self, limits: &Limits) -> Result<u64, DemandError> {
        let state = match self {
            Spec::State(state) => state.fields(),
            Spec::Attention(attention) => {
                return attention_blocks(attention.fields().kind, self, limits);
            }
        };
        let own = match limits.state_cache_mode {
            StateCacheMode::None => 1,
            StateCacheMode::Align => 2,
            StateCacheMode::All => limits.max_model_len.div_ceil(state.block_size),
        };
        Ok(sum(
            "the states of a request",
            [own, state.num_speculative_blocks],
        )?)
    }

    /// The most bytes one request can hold of this layer.
    pub fn max_bytes_per_request(&self, limits: &Limits) -> Result<u64, DemandError> {
        let blocks = self.blocks_per_request(limits)?;
        Ok(product(
            "the bytes of a request",
            [blocks, self.page().padded],
        )?)
    }

    /// Entries of a block-table row for a sequence of `tokens`.
    pub fn row_blocks(&self, limits: &Limits, tokens: u64) -> Result<u64, DemandError> {
        match self {
            Spec::Attention(_) => {
                let ranks = limits.context_parallel_size;
                let span = product("a block over all ranks", [self.block_size(), ranks])?;
                Ok(tokens.div_ceil(span))
            }
            Spec::State(state) if limits.state_cache_mode == StateCacheMode::Align => {
                let blocks = tokens.div_ceil(self.block_size());
                Ok(sum(
                    "a row",
                    [blocks, state.fields().num_speculative_blocks],
                )?)
            }
            Spec::State(_) => self.blocks_per_request(limits),
        }
    }

    /// The most blocks a windowed layer may hold of one request; `None` for other kinds.
    pub fn admission_blocks(&self, limits: &Limits) -> Result<Option<u64>, DemandError> {
        let Spec::Attention(attention) = self else {
            return Ok(None);
        };
        let fields = attention.fields();
        let (earlier, straddle) = match fields.kind {
            AttentionKind::SlidingWindow | AttentionKind::SlidingWindowMla => {
                (fields.sliding_window.unwrap_or(1) - 1, 1)
            }
            AttentionKind::ChunkedLocal => (fields.attention_chunk_size.unwrap_or(0), 0),
            _ => return Ok(None),
        };
        let held = sum(
            "the tokens a window holds",
            [earlier, limits.max_tokens_in_flight],
        )?
        .min(limits.max_model_len);
        // A window may begin inside a block, so it can touch one block more than its length needs.
        Ok(Some(held.div_ceil(fields.block_size) + straddle))
    }
}

fn attention_blocks(kind: AttentionKind, spec: &Spec, limits: &Limits) -> Result<u64, DemandError> {
    let ranks = limits.context_parallel_size;
    if kind.is_sliding() && ranks > 1 {
        return Err(DemandError::ContextParallelWindow {
            kind: kind.name(),
            ranks,
        });
    }
    if let Some(blocks) = spec.admission_blocks(limits)? {
        return Ok(blocks);
    }
    Ok(match kind {
        AttentionKind::EncoderOnly => 0,
        AttentionKind::Cross => limits.max_encoder_tokens.div_ceil(spec.block_size()),
        _ => limits
            .max_model_len
            .div_ceil(ranks)
            .div_ceil(spec.block_size()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::spec::{Attention, AttentionFields};

    fn window(window: u64, block_size: u64) -> Spec {
        Spec::Attention(
            Attention::new(AttentionFields {
                kind: AttentionKind::SlidingWindow,
                sliding_window: Some(window),
                ..AttentionFields::full(block_size, 1, 8, Dtype::F16)
            })
            .unwrap(),
        )
    }

    #[test]
    fn a_window_holds_its_tokens_and_those_in_flight() {
        for (w, in_flight, len, block, blocks) in [
            (1024, 8192, 131072, 16, 577),
            (4, 1, 100, 4, 2),
            (1024, 32768, 1_000_000, 32, 1057),
            (1024, 1024, 1_000_000, 32, 65),
            (128, 512, 100_000, 16, 41),
        ] {
            let limits = Limits {
                max_model_len: len,
                context_parallel_size: 1,
                max_tokens_in_flight: in_flight,
                max_encoder_tokens: 0,
                state_cache_mode: StateCacheMode::None,
            };
            assert_eq!(window(w, block).blocks_per_request(&limits), Ok(blocks));
            let shared = Limits {
                context_parallel_size: 2,
                ..limits
            };
            assert!(window(w, block).blocks_per_request(&shared).is_err());
        }
    }
}
