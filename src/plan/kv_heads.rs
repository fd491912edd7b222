//! How many key-value heads each rank of a tensor-parallel group holds.

use super::error::PlanError;

/// Heads on each of `ranks`, and how many ranks hold a copy of each head.
///
/// Heads are spread evenly; when there are more ranks than heads, each head is on several ranks.
pub fn kv_heads_per_rank(total: u64, ranks: u64) -> Result<(u64, u64), PlanError> {
    for (field, value) in [
        ("the number of key-value heads", total),
        ("the number of ranks", ranks),
    ] {
        if value == 0 {
            return Err(PlanError::Zero { field });
        }
    }
    if total.is_multiple_of(ranks) {
        return Ok((total / ranks, 1));
    }
    if ranks.is_multiple_of(total) {
        return Ok((1, ranks / total));
    }
    Err(PlanError::HeadsNotDividing {
        heads: total,
        ranks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_spread_or_copied() {
        for (total, ranks, expected) in [
            (8, 1, Some((8, 1))),
            (8, 8, Some((1, 1))),
            (8, 16, Some((1, 2))),
            (4, 2, Some((2, 1))),
            (8, 3, None),
            (3, 8, None),
            (0, 1, None),
            (1, 0, None),
        ] {
            assert_eq!(
                kv_heads_per_rank(total, ranks).ok(),
                expected,
                "{total}/{ranks}"
            );
        }
    }
}
