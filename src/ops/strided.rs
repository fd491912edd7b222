//! Strided copies in host memory.

use crate::descriptor::{Location, MAX_DIMS, StridedCopy};
use crate::num::Overflow;
use crate::view::AuditError;

/// An allocation of a rank.
#[derive(Debug, Clone, Copy)]
pub struct RankMemory {
    /// Its first byte.
    pub data: *mut u8,
    /// Its bytes.
    pub size_bytes: u64,
}

/// Why nothing was copied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StridedError {
    /// More dimensions than a copy has.
    #[error("copy {index}: it has {num_dims} dimensions, {MAX_DIMS} is the most")]
    Dims {
        /// Which copy.
        index: usize,
        /// Its dimensions.
        num_dims: u64,
    },
    /// Memory that was not given.
    #[error("copy {index}: {side} rank {rank} has no allocation {allocation}")]
    NoMemory {
        /// Which copy.
        index: usize,
        /// Source or target.
        side: &'static str,
        /// The rank.
        rank: u64,
        /// The allocation.
        allocation: u64,
    },
    /// Reading past an allocation's end.
    #[error("copy {index}: it reads to byte {end} of an allocation of {size} bytes")]
    SourceOutOfBounds {
        /// Which copy.
        index: usize,
        /// One past the last byte.
        end: u64,
        /// Bytes of the allocation.
        size: u64,
    },
    /// Writing past an allocation's end, or a byte twice.
    #[error("copy {index}: where it writes, {error}")]
    Target {
        /// Which copy.
        index: usize,
        /// What is wrong.
        error: AuditError,
    },
    /// A size that does not fit.
    #[error("copy {index}: {error}")]
    Overflow {
        /// Which copy.
        index: usize,
        /// What is wrong.
        error: Overflow,
    },
}

impl StridedError {
    /// The name of this kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            StridedError::Dims { .. } => "bad_values",
            StridedError::NoMemory { .. } => "not_found",
            StridedError::SourceOutOfBounds { .. } => "copy_out_of_bounds",
            StridedError::Target { error, .. } => match error {
                AuditError::OutOfBounds { .. } => "copy_out_of_bounds",
                AuditError::Overlaps { .. } => "copy_overlaps_itself",
                _ => "bad_values",
            },
            StridedError::Overflow { .. } => "overflow",
        }
    }
}

/// Makes copies one after another. All are checked before the first byte moves.
///
/// # Safety
/// What `source` and `target` return is readable and writable memory of the host, and nothing else
/// uses the bytes that are read or written.
pub unsafe fn copy_strided(
    copies: impl Iterator<Item = StridedCopy> + Clone,
    source: impl Fn(&Location) -> Option<RankMemory>,
    target: impl Fn(&Location) -> Option<RankMemory>,
) -> Result<(), StridedError> {
    for (index, copy) in copies.clone().enumerate() {
        let missing = |side, place: &Location| StridedError::NoMemory {
            index,
            side,
            rank: place.rank,
            allocation: place.allocation,
        };
        let from = source(&copy.source).ok_or_else(|| missing("source", &copy.source))?;
        let to = target(&copy.target).ok_or_else(|| missing("target", &copy.target))?;
        check(index, &copy, from.size_bytes, to.size_bytes)?;
    }
    for copy in copies {
        if let (Some(from), Some(to)) = (source(&copy.source), target(&copy.target)) {
            // SAFETY: checked above against the sizes of both allocations, which are the caller's.
            unsafe { run(&copy, from.data, to.data) };
        }
    }
    Ok(())
}

fn check(index: usize, copy: &StridedCopy, from: u64, to: u64) -> Result<(), StridedError> {
    if copy.num_dims > MAX_DIMS as u64 {
        return Err(StridedError::Dims {
            index,
            num_dims: copy.num_dims,
        });
    }
    let end = copy
        .source_end()
        .map_err(|error| StridedError::Overflow { index, error })?;
    if end > from {
        return Err(StridedError::SourceOutOfBounds {
            index,
            end,
            size: from,
        });
    }
    // Runs that lie apart inside an allocation are no more than its bytes, so the copy ends.
    copy.check_target(to)
        .map_err(|error| StridedError::Target { index, error })
}

/// # Safety
/// All runs of the copy lie inside the memory at `from` and `to`.
unsafe fn run(copy: &StridedCopy, from: *const u8, to: *mut u8) {
    let steps = copy.steps();
    if copy.run_bytes == 0 || steps.iter().any(|step| step.count == 0) {
        return;
    }
    let mut at = [0u64; MAX_DIMS];
    let mut source = copy.source.offset_bytes;
    let mut target = copy.target.offset_bytes;
    loop {
        // SAFETY: inside both, by the caller's contract; they may be one memory, so runs may overlap.
        unsafe {
            let from = from.add(source as usize);
            from.copy_to(to.add(target as usize), copy.run_bytes as usize);
        }
        let mut dim = steps.len();
        loop {
            let Some(inner) = dim.checked_sub(1) else {
                return;
            };
            dim = inner;
            let step = &steps[dim];
            at[dim] += 1;
            if at[dim] < step.count {
                source += step.source_bytes;
                target += step.target_bytes;
                break;
            }
            source -= step.source_bytes * (step.count - 1);
            target -= step.target_bytes * (step.count - 1);
            at[dim] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Step;
    use proptest::prelude::*;

    fn memory(bytes: &mut [u8]) -> Option<RankMemory> {
        Some(RankMemory {
            data: bytes.as_mut_ptr(),
            size_bytes: bytes.len() as u64,
        })
    }

    /// What a copy must do, the slow way; none when it leaves either side or writes a byte twice.
    fn expected(copy: &StridedCopy, from: &[u8], to: &[u8]) -> Option<Vec<u8>> {
        let mut places = vec![(copy.source.offset_bytes, copy.target.offset_bytes)];
        for step in copy.steps() {
            places = places
                .iter()
                .flat_map(|&(s, t)| {
                    (0..step.count)
                        .map(move |i| (s + i * step.source_bytes, t + i * step.target_bytes))
                })
                .collect();
        }
        let mut out = to.to_vec();
        let mut written = vec![false; to.len()];
        for (s, t) in places {
            for byte in 0..copy.run_bytes {
                let value = *from.get((s + byte) as usize)?;
                let place = (t + byte) as usize;
                if *written.get(place)? {
                    return None;
                }
                written[place] = true;
                out[place] = value;
            }
        }
        Some(out)
    }

    proptest! {
        #[test]
        fn a_copy_moves_its_bytes_or_none(
            steps in proptest::collection::vec((0u64..4, 0u64..30, 0u64..30), 0..4),
            run_bytes in 0u64..9,
            offsets in (0u64..20, 0u64..20),
        ) {
            let place = |offset_bytes| Location { rank: 0, allocation: 0, offset_bytes };
            let mut copy = StridedCopy {
                source: place(offsets.0),
                target: place(offsets.1),
                run_bytes,
                num_dims: steps.len() as u64,
                dims: [Step::default(); MAX_DIMS],
            };
            for (dim, (count, source_bytes, target_bytes)) in copy.dims.iter_mut().zip(steps) {
                *dim = Step { count, source_bytes, target_bytes };
            }
            let mut from: Vec<u8> = (0..100).map(|byte| byte as u8).collect();
            let mut to = vec![255; 100];
            let wanted = expected(&copy, &from, &to);
            let (source, target) = (memory(&mut from), memory(&mut to));
            // SAFETY: two arrays, of the bytes that are stated.
            let result = unsafe { copy_strided([copy].into_iter(), |_| source, |_| target) };
            match (result, wanted) {
                (Ok(()), Some(wanted)) => prop_assert_eq!(to, wanted),
                (Ok(()), None) => prop_assert!(false, "it left its memory"),
                // What lies apart in no nested way may be refused, but nothing is written then.
                (Err(_), _) => prop_assert!(to.iter().all(|&byte| byte == 255)),
            }
        }
    }
}
