//! How many blocks one request can need of a layer, and how long its block-table row is.

use super::{AttentionKind, Spec};
use crate::num::{Overflow, gcd, product, sum};

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

/// How blocks that a window or a chunk may hold are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Counting {
    /// As the reference counts: a window has a block more than its tokens fill, also where there are
    /// not so many tokens; a chunk never begins inside a block.
    #[default]
    Reference,
    /// The most that can be held, and no block more.
    Exact,
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
    /// How blocks of windows and chunks are counted.
    pub counting: Counting,
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
        let held = match fields.kind {
            AttentionKind::SlidingWindow | AttentionKind::SlidingWindowMla => {
                Held::of_window(fields.sliding_window.unwrap_or(1))
            }
            AttentionKind::ChunkedLocal => {
                Held::of_chunk(fields.attention_chunk_size.unwrap_or(1), fields.block_size)
            }
            _ => return Ok(None),
        };
        held.blocks(fields.block_size, limits).map(Some)
    }
}

/// Tokens of one request that a windowed layer keeps before those in flight.
struct Held {
    /// As the reference counts them.
    reference: u64,
    /// Blocks that the reference adds, since a window may begin inside a block.
    reference_straddle: u64,
    /// The most there can be.
    exact: u64,
    /// They begin at a multiple of it: a window anywhere, a chunk where chunks do.
    step: u64,
}

impl Held {
    /// A token sees itself and those of the window before it.
    fn of_window(window: u64) -> Held {
        let earlier = window.saturating_sub(1);
        Held {
            reference: earlier,
            reference_straddle: 1,
            exact: earlier,
            step: 1,
        }
    }

    /// The first token in flight is in the chunk too.
    fn of_chunk(chunk: u64, block_size: u64) -> Held {
        Held {
            reference: chunk,
            reference_straddle: 0,
            exact: chunk.saturating_sub(1),
            step: gcd(chunk, block_size),
        }
    }

    fn blocks(&self, block_size: u64, limits: &Limits) -> Result<u64, DemandError> {
        let with_flight = |earlier| {
            let tokens = [earlier, limits.max_tokens_in_flight];
            sum("the tokens a window holds", tokens)
        };
        let len = limits.max_model_len;
        Ok(match limits.counting {
            Counting::Reference => {
                let tokens = with_flight(self.reference)?.min(len);
                tokens.div_ceil(block_size) + self.reference_straddle
            }
            Counting::Exact => {
                // The most that lies in the first block before the first token held.
                let before = block_size.saturating_sub(self.step);
                // A span of more tokens than there are numbers is more than a sequence has, and no
                // block size makes a demand impossible that another one can meet.
                let span = with_flight(self.exact)?.saturating_add(before);
                span.div_ceil(block_size).min(len.div_ceil(block_size))
            }
        })
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
                counting: Counting::Reference,
            };
            assert_eq!(window(w, block).blocks_per_request(&limits), Ok(blocks));
            let exact = Limits {
                counting: Counting::Exact,
                ..limits
            };
            assert_eq!(window(w, block).blocks_per_request(&exact), Ok(blocks));
            let shared = Limits {
                context_parallel_size: 2,
                ..limits
            };
            assert!(window(w, block).blocks_per_request(&shared).is_err());
        }
    }

    /// Blocks that hold a token that is still needed or in flight, at the worst step.
    fn held_at_worst(lowest: impl Fn(u64) -> u64, in_flight: u64, len: u64, block: u64) -> u64 {
        let blocks = |computed: u64| {
            let end = (computed + in_flight).min(len);
            end.div_ceil(block) - lowest(computed) / block
        };
        (0..len).map(blocks).max().unwrap_or(0)
    }

    /// B16, B18, B19: exact counts are those of the worst step, found by trying all.
    #[test]
    fn exact_counts_are_what_a_request_can_hold() {
        let chunked = |chunk, block_size| {
            Spec::Attention(
                Attention::new(AttentionFields {
                    kind: AttentionKind::ChunkedLocal,
                    attention_chunk_size: Some(chunk),
                    ..AttentionFields::full(block_size, 1, 8, Dtype::F16)
                })
                .unwrap(),
            )
        };
        for size in [1, 2, 3, 4, 6, 11, 16, 30] {
            for (in_flight, len, block) in [
                (1, 200, 4),
                (1, 200, 128),
                (7, 200, 16),
                (16, 200, 6),
                (100, 8, 4),
                (3, 20, 16),
            ] {
                let limits = Limits {
                    max_model_len: len,
                    context_parallel_size: 1,
                    max_tokens_in_flight: in_flight,
                    max_encoder_tokens: 0,
                    state_cache_mode: StateCacheMode::None,
                    counting: Counting::Exact,
                };
                let window_starts = |computed: u64| computed.saturating_sub(size - 1);
                let chunk_starts = |computed: u64| computed - computed % size;
                for (what, spec, worst) in [
                    (
                        "window",
                        window(size, block),
                        held_at_worst(window_starts, in_flight, len, block),
                    ),
                    (
                        "chunk",
                        chunked(size, block),
                        held_at_worst(chunk_starts, in_flight, len, block),
                    ),
                ] {
                    let counted = spec.blocks_per_request(&limits).unwrap();
                    let full = len.div_ceil(block);
                    assert!(counted >= worst && counted <= full, "{what} of {size}");
                    // Where a sequence is long enough for every place in a block, none is too much.
                    if len >= 2 * (size + in_flight + block) {
                        assert_eq!(counted, worst, "{what} of {size}, {in_flight}, {block}");
                    }
                }
            }
        }
    }
}
