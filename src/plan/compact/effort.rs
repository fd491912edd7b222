//! How much of a large problem is looked at, so that a plan never takes long.
//!
//! Problems of a size that models have are looked at in full. Of larger ones a part is, and since the
//! reference's plan is one of the choices, the outcome is never worse than that.

use super::classes::Classes;
use super::kinds::Kind;

/// What all searches together take, in the time of one class on one stage at one number of blocks: some
/// 10 ns.
const WORK: u64 = 1 << 22;
/// What the search of one page takes of it at most.
const WORK_OF_A_PAGE: u64 = WORK / 16;
/// What fitting a kind to a page takes.
const WORK_OF_A_FIT: u64 = 64;
/// Numbers of blocks that are tried for a page in most models.
const USUAL_NUMBERS: u64 = 16;
/// Pages and numbers of blocks that are tried at least.
const LEAST: usize = 16;

/// Pages that are tried at most.
pub(super) fn pages(kinds: &[Kind<'_>]) -> usize {
    let stages = kinds.iter().map(|kind| kind.on_stages.len() as u64);
    let works = stages.map(|stages| {
        let splits = stages.saturating_mul(USUAL_NUMBERS);
        splits.saturating_add(WORK_OF_A_FIT)
    });
    most(WORK, works)
}

/// Numbers of blocks that are tried at most for these classes.
pub(super) fn numbers(classes: &Classes<'_>, stages: usize) -> usize {
    let works = classes.classes.iter().map(|class| {
        let columns = class.columns.len().saturating_mul(class.choices.len());
        columns.saturating_mul(stages) as u64
    });
    most(WORK_OF_A_PAGE, works)
}

fn most(budget: u64, works: impl Iterator<Item = u64>) -> usize {
    let work = works.fold(0, u64::saturating_add).max(1);
    usize::try_from(budget / work)
        .unwrap_or(usize::MAX)
        .max(LEAST)
}

/// At most so many of sorted numbers, the first and the last among them, evenly spread.
pub(super) fn thin(numbers: Vec<u64>, most: usize) -> Vec<u64> {
    let (all, most) = (numbers.len(), most.max(2));
    if all <= most {
        return numbers;
    }
    // Neither factor is larger than a vector can be long, so the product fits 128 bits.
    let place = |i: usize| (i as u128 * (all - 1) as u128 / (most - 1) as u128) as usize;
    (0..most).map(|i| numbers[place(i)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinned_numbers_keep_their_ends() {
        for (all, most) in [(0, 4), (1, 4), (4, 4), (5, 4), (100, 7), (1000, 2), (3, 0)] {
            let numbers: Vec<u64> = (0..all).collect();
            let thinned = thin(numbers.clone(), most);
            assert_eq!(thinned.len(), numbers.len().min(most.max(2)));
            assert_eq!(thinned.first(), numbers.first());
            assert_eq!(thinned.last(), numbers.last());
            assert!(thinned.is_sorted());
        }
    }
}
