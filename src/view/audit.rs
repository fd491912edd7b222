//! The proof: a view stays inside its allocation, its elements are aligned and do not overlap, and
//! no byte belongs to different blocks of layers that share an allocation.
//!
//! Everything is in closed form, linear in dimensions and layers. Tests compare it with the set of
//! bytes that the views really reach.

use crate::num::{Overflow, product, sum};

/// What is proven of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Audit {
    /// Elements of the view.
    pub elements: u64,
    /// The furthest element, counted in elements from the first.
    pub largest_element_offset: u64,
    /// One past the last byte that the view reaches, counted from the allocation's start. 0 when the
    /// view is empty.
    pub end_bytes: u64,
}

/// Why a view is not proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// A size or stride below zero.
    #[error("{what} of dimension {dim} is {value}; it must not be negative")]
    Negative {
        /// Size or stride.
        what: &'static str,
        /// Which dimension.
        dim: usize,
        /// Its value.
        value: i64,
    },
    /// An element that starts between two elements.
    #[error(
        "the view starts at byte {offset}, which is not a multiple of its {element_bytes}-byte elements"
    )]
    Misaligned {
        /// Where it starts.
        offset: u64,
        /// Bytes of an element.
        element_bytes: u64,
    },
    /// A byte outside the allocation.
    #[error("the view reaches byte {end} of an allocation of {allocation} bytes")]
    OutOfBounds {
        /// One past the last byte.
        end: u64,
        /// Bytes of the allocation.
        allocation: u64,
    },
    /// Two indices that may mean one element.
    #[error(
        "dimension {dim} steps by {stride} elements, but the dimensions inside it span {inner}"
    )]
    Overlaps {
        /// Which dimension.
        dim: usize,
        /// Its stride.
        stride: u64,
        /// Elements that the dimensions inside it span.
        inner: u64,
    },
    /// Elements of no bytes.
    #[error("an element has 0 bytes")]
    ZeroElement,
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

/// Proves that a view of `shape` and `strides` (in elements) stays inside the allocation and that
/// no two indices mean one element.
pub fn audit(
    shape: &[i64],
    strides: &[i64],
    offset_bytes: u64,
    element_bytes: u64,
    allocation_bytes: u64,
) -> Result<Audit, AuditError> {
    if element_bytes == 0 {
        return Err(AuditError::ZeroElement);
    }
    for (dim, (&size, &stride)) in shape.iter().zip(strides).enumerate() {
        for (what, value) in [("size", size), ("stride", stride)] {
            if value < 0 {
                return Err(AuditError::Negative { what, dim, value });
            }
        }
    }
    if !offset_bytes.is_multiple_of(element_bytes) {
        return Err(AuditError::Misaligned {
            offset: offset_bytes,
            element_bytes,
        });
    }
    let elements = product("the view", shape.iter().map(|&size| size as u64))?;
    if elements == 0 {
        return Ok(Audit {
            elements,
            largest_element_offset: 0,
            end_bytes: 0,
        });
    }
    let largest_element_offset = check_nesting(shape, strides)?;
    let reach = product("the view", [largest_element_offset + 1, element_bytes])?;
    let end_bytes = sum("the view", [offset_bytes, reach])?;
    if end_bytes > allocation_bytes {
        return Err(AuditError::OutOfBounds {
            end: end_bytes,
            allocation: allocation_bytes,
        });
    }
    Ok(Audit {
        elements,
        largest_element_offset,
        end_bytes,
    })
}

/// From the smallest stride to the largest, each dimension must step over all that lies inside it.
/// Returns the offset of the furthest element.
fn check_nesting(shape: &[i64], strides: &[i64]) -> Result<u64, AuditError> {
    let mut furthest: u64 = 0;
    let mut last: Option<(u64, usize)> = None;
    // Dimensions are few: picking the next larger stride each time needs no memory.
    for _ in 0..shape.len() {
        let candidates = (0..shape.len()).map(|dim| (strides[dim] as u64, dim));
        let next = candidates
            .filter(|&key| last.is_none_or(|last| key > last))
            .min();
        let Some((stride, dim)) = next else { break };
        last = Some((stride, dim));
        let size = shape[dim] as u64;
        if size <= 1 {
            continue;
        }
        if stride <= furthest {
            return Err(AuditError::Overlaps {
                dim,
                stride,
                inner: furthest + 1,
            });
        }
        let reach = product("the view", [size - 1, stride])?;
        furthest = sum("the view", [furthest, reach])?;
    }
    Ok(furthest)
}

/// Where the blocks of a layer lie in an allocation: `runs` pieces of memory of the same kind, one
/// every `run_step_bytes`; block `b` owns bytes
/// `[offset_bytes + b * step_bytes, + span_bytes)` of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRuns {
    /// Blocks.
    pub num_blocks: u64,
    /// Where block 0 starts in the first run.
    pub offset_bytes: u64,
    /// Bytes from block to block.
    pub step_bytes: u64,
    /// Bytes that a block owns in one run.
    pub span_bytes: u64,
    /// How many runs: 1 when a block is in one piece, 2 when keys and values are apart.
    pub runs: u64,
    /// Bytes from run to run.
    pub run_step_bytes: u64,
}

/// A layer's blocks in an allocation, and the group whose block table they follow.
#[derive(Debug, Clone, Copy)]
pub struct Owned<'a> {
    /// The layer.
    pub layer: &'a str,
    /// Its group.
    pub group: usize,
    /// Its blocks.
    pub runs: BlockRuns,
}

/// Why bytes are not owned by one block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OwnershipError {
    /// A block that reaches into the next one.
    #[error(
        "layer {layer}: a block owns bytes {offset} to {end} of every {step}; it reaches into the next block"
    )]
    BlockTooLong {
        /// The layer.
        layer: String,
        /// Where the block starts.
        offset: u64,
        /// Where it ends.
        end: u64,
        /// Bytes from block to block.
        step: u64,
    },
    /// Two layers whose blocks do not lie at the same places.
    #[error(
        "layers {first} and {second} share an allocation, but their blocks do not lie alike: every {first_step} and every {second_step} bytes, {first_blocks} and {second_blocks} blocks"
    )]
    StepsDiffer {
        /// A layer.
        first: String,
        /// Another layer.
        second: String,
        /// Bytes from block to block of the first.
        first_step: u64,
        /// Bytes from block to block of the second.
        second_step: u64,
        /// Blocks of the first.
        first_blocks: u64,
        /// Blocks of the second.
        second_blocks: u64,
    },
    /// Two layers of one group that would write the same bytes of the same block.
    #[error(
        "layers {first} and {second} of group {group} own the same bytes of a block, from byte {offset}"
    )]
    SameBytes {
        /// A layer.
        first: String,
        /// Another layer.
        second: String,
        /// Their group.
        group: usize,
        /// Where they meet.
        offset: u64,
    },
}

/// Proves that no byte of one allocation belongs to different blocks, nor to two layers of one
/// group. `owned` is put in order of group and place.
pub fn check_ownership(owned: &mut [Owned<'_>]) -> Result<(), OwnershipError> {
    let Some(first) = owned.first().copied() else {
        return Ok(());
    };
    if owned.len() == 1 && first.runs.runs > 1 {
        // Alone in its allocation and with nested strides: its blocks are apart already.
        return Ok(());
    }
    for layer in owned.iter() {
        let runs = layer.runs;
        let alike = runs.step_bytes == first.runs.step_bytes
            && runs.num_blocks == first.runs.num_blocks
            && runs.runs == 1
            && first.runs.runs == 1;
        if !alike {
            return Err(OwnershipError::StepsDiffer {
                first: first.layer.to_owned(),
                second: layer.layer.to_owned(),
                first_step: first.runs.step_bytes,
                second_step: runs.step_bytes,
                first_blocks: first.runs.num_blocks,
                second_blocks: runs.num_blocks,
            });
        }
        let end = runs.offset_bytes.saturating_add(runs.span_bytes);
        if end > runs.step_bytes {
            return Err(OwnershipError::BlockTooLong {
                layer: layer.layer.to_owned(),
                offset: runs.offset_bytes,
                end,
                step: runs.step_bytes,
            });
        }
    }
    owned.sort_unstable_by_key(|layer| (layer.group, layer.runs.offset_bytes));
    for pair in owned.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        let apart =
            a.group != b.group || a.runs.offset_bytes + a.runs.span_bytes <= b.runs.offset_bytes;
        if !apart {
            return Err(OwnershipError::SameBytes {
                first: a.layer.to_owned(),
                second: b.layer.to_owned(),
                group: a.group,
                offset: b.runs.offset_bytes,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every element's offset, the slow way.
    fn offsets(shape: &[i64], strides: &[i64]) -> Vec<u64> {
        shape
            .iter()
            .zip(strides)
            .fold(vec![0], |so_far, (&size, &stride)| {
                let step = |base: u64| (0..size).map(move |i| base + (i * stride) as u64);
                so_far.into_iter().flat_map(step).collect()
            })
    }

    proptest! {
        #[test]
        fn what_is_proven_is_true(
            dims in proptest::collection::vec((0i64..4, 0i64..40), 0..5),
            offset in 0u64..8,
            allocation in 0u64..400,
        ) {
            let (shape, strides): (Vec<i64>, Vec<i64>) = dims.into_iter().unzip();
            let mut all = offsets(&shape, &strides);
            all.sort_unstable();
            match audit(&shape, &strides, offset * 2, 2, allocation) {
                Ok(proof) => {
                    prop_assert_eq!(proof.elements as usize, all.len());
                    prop_assert_eq!(proof.largest_element_offset, all.last().copied().unwrap_or(0));
                    prop_assert!(all.windows(2).all(|w| w[0] < w[1]));
                    prop_assert!(proof.end_bytes <= allocation);
                    let end = all.last().map_or(0, |last| offset * 2 + last * 2 + 2);
                    prop_assert_eq!(proof.end_bytes, end);
                }
                Err(AuditError::OutOfBounds { end, .. }) => {
                    prop_assert_eq!(all.last().map(|last| offset * 2 + last * 2 + 2), Some(end));
                    prop_assert!(end > allocation);
                }
                Err(_) => {}
            }
        }
    }

    #[test]
    fn views_that_cannot_be_proven_are_refused() {
        assert!(matches!(
            audit(&[2, 2], &[1, 1], 0, 2, 100),
            Err(AuditError::Overlaps { .. })
        ));
        assert!(matches!(
            audit(&[2], &[-1], 0, 2, 100),
            Err(AuditError::Negative {
                what: "stride",
                dim: 0,
                value: -1
            })
        ));
        assert!(matches!(
            audit(&[4], &[1], 1, 2, 100),
            Err(AuditError::Misaligned { .. })
        ));
        assert!(matches!(
            audit(&[i64::MAX, 4], &[1, 1], 0, 2, 100),
            Err(AuditError::Overflow(_))
        ));
        assert!(matches!(
            audit(&[1], &[1], 0, 0, 8),
            Err(AuditError::ZeroElement)
        ));
    }
}
