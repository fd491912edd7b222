//! Page sizes that are worth a look, where all layers' pages are equally large.

use super::contract::{kernel_step, suits};
use super::cost::Lengths;
use super::effort;
use super::kinds::Kind;
use crate::num::{lcm, round_up};
use crate::plan::describe::brief;
use crate::plan::error::PlanError;
use crate::spec::Spec;

/// Multiples of each kind's page that are looked at.
const MULTIPLES: u64 = 8;
/// Blocks of a request so few that one more or less counts.
const FEW_BLOCKS: u64 = 32;
/// Pages larger than the largest layer's smallest page by more than this factor only waste.
const LARGEST_FACTOR: u64 = 4;

/// The sizes, smallest first. A best page is filled by some kind: were there room left in all, a
/// smaller page would do. Where there are too many to look at, they are those that the kinds with most
/// bytes fill.
pub(super) fn worth_a_look(kinds: &[Kind<'_>], lengths: &Lengths) -> Vec<u64> {
    let least = least_page(kinds);
    let Some(step) = page_step(kinds) else {
        return Vec::new();
    };
    let even = even_page(kinds, least, step);
    let largest = least.saturating_mul(LARGEST_FACTOR).max(step);
    let most_pages = effort::pages(kinds);
    let mut filled = vec![least];
    for kind in heaviest_first(kinds) {
        if filled.len() >= most_pages {
            break;
        }
        let one = kind.unit();
        let first = least.div_ceil(one);
        let multiples = first..first.saturating_add(MULTIPLES);
        filled.extend(multiples.filter_map(|times| one.checked_mul(times)));
        // Blocks of which a large page holds many are as good a step in larger pages.
        filled.extend((2..=LARGEST_FACTOR).filter_map(|factor| {
            let target = least.checked_mul(factor)?;
            round_up("a page", target, one).ok()
        }));
        filled.extend(fewer_blocks(kind, lengths, least..=largest));
        filled.extend(as_long_as_states(kind, kinds));
    }
    // One at least is never too large: what the least page is rounded up to.
    let rounded = filled
        .into_iter()
        .filter_map(|page| round_up("a page", page, step).ok());
    let mut pages: Vec<u64> = rounded
        .filter(|&page| page <= largest || page < least.saturating_add(step.saturating_mul(2)))
        .chain(even)
        .collect();
    pages.sort_unstable();
    pages.dedup();
    effort::thin(pages, most_pages)
}

/// The kinds whose blocks can be enlarged, first those whose layers have most bytes.
fn heaviest_first<'k, 'a>(kinds: &'k [Kind<'a>]) -> Vec<&'k Kind<'a>> {
    let attention = kinds
        .iter()
        .filter(|kind| kind.smallest.as_attention().is_some());
    let mut kinds: Vec<&Kind<'_>> = attention.collect();
    let bytes = |kind: &&Kind<'_>| kind.unit().saturating_mul(kind.layers.len() as u64);
    kinds.sort_by_key(|kind| std::cmp::Reverse(bytes(kind)));
    kinds
}

/// Pages in which blocks are as long as those of states, so that a scheduler's step is no longer.
fn as_long_as_states(kind: &Kind<'_>, kinds: &[Kind<'_>]) -> Vec<u64> {
    let states = kinds
        .iter()
        .filter(|other| other.smallest.as_state().is_some());
    let mut times: Vec<u64> = states
        .map(|state| state.smallest.block_size())
        .filter(|size| size.is_multiple_of(kind.smallest.block_size().max(1)))
        .map(|size| size / kind.smallest.block_size().max(1))
        .collect();
    times.sort_unstable();
    times.dedup();
    let pages = times
        .into_iter()
        .filter_map(|times| kind.unit().checked_mul(times));
    pages.collect()
}

/// Pages in which a request of one of the lengths needs a block less than in any smaller one. Where it
/// needs many, one less is no matter.
fn fewer_blocks(
    kind: &Kind<'_>,
    lengths: &Lengths,
    pages: std::ops::RangeInclusive<u64>,
) -> Vec<u64> {
    let one = kind.unit();
    let block_size = kind.smallest.block_size().max(1);
    let (fewest, most) = (pages.start().div_ceil(one), pages.end() / one);
    let mut found = Vec::new();
    for limits in lengths.limits() {
        let blocks = |times: u64| {
            let spec = kind
                .smallest
                .with_block_size(block_size.checked_mul(times)?);
            spec.ok()?.blocks_per_request(&limits).ok()
        };
        let Some(least) = blocks(most).filter(|&blocks| blocks <= FEW_BLOCKS) else {
            continue;
        };
        for wanted in least..=FEW_BLOCKS {
            // Larger blocks are no more of them.
            let (mut few_enough, mut below) = (most, fewest.saturating_sub(1));
            while few_enough - below > 1 {
                let middle = below + (few_enough - below) / 2;
                match blocks(middle).is_some_and(|blocks| blocks <= wanted) {
                    true => few_enough = middle,
                    false => below = middle,
                }
            }
            found.extend(one.checked_mul(few_enough));
            if few_enough <= fewest {
                break;
            }
        }
    }
    found
}

/// The largest of the smallest pages.
fn least_page(kinds: &[Kind<'_>]) -> u64 {
    let pages = kinds.iter().map(|kind| kind.smallest.page().padded);
    pages.max().unwrap_or(1).max(1)
}

/// What every page is a multiple of: the pages that must be filled without padding, and what elements and
/// alignments of all layers go with. `None` where that is no size of a page.
fn page_step(kinds: &[Kind<'_>]) -> Option<u64> {
    let mut rigid = kinds.iter().filter(|kind| !kind.may_pad);
    rigid.try_fold(granule(kinds), |step, kind| {
        lcm("a page", step, exact_page(kind)?).ok()
    })
}

/// A page that splits evenly into the kernel blocks of each kind's smallest block, where pages that other
/// kinds fill may not.
fn even_page(kinds: &[Kind<'_>], least: u64, step: u64) -> Option<u64> {
    let step = kinds.iter().try_fold(step, |step, kind| {
        lcm("a page", step, kernel_step(&kind.smallest, &kind.backends)).ok()
    });
    round_up("a page", least, step?).ok()
}

/// The smallest page that is filled without padding. Where kernels do not read the padding that an
/// alignment demands of one block, it holds several that need none.
fn exact_page(kind: &Kind<'_>) -> Option<u64> {
    let page = kind.smallest.page();
    let attention = kind.smallest.as_attention();
    let alignment = attention.and_then(|attention| attention.fields().alignment);
    match alignment {
        Some(alignment) if !suits(&kind.smallest, &kind.backends, false) => {
            lcm("a page", page.unpadded, alignment).ok()
        }
        _ => Some(page.padded.max(1)),
    }
}

/// What every page is a multiple of so that elements and alignments of all layers go with it.
fn granule(kinds: &[Kind<'_>]) -> u64 {
    let steps = kinds.iter().flat_map(|kind| match kind.smallest.as_ref() {
        Spec::State(state) => {
            let aligned = kind.backends.iter().map(|b| b.contract().alignment);
            let own = state.fields().dtypes.iter().map(|d| d.bytes());
            own.chain(aligned).collect::<Vec<u64>>()
        }
        Spec::Attention(attention) => {
            let fields = attention.fields();
            let aligned = kind.backends.iter().map(|b| b.contract().alignment);
            let own = [fields.dtype.bytes(), fields.alignment.unwrap_or(1)];
            own.into_iter().chain(aligned).collect::<Vec<u64>>()
        }
    });
    let mut steps = steps;
    let all = steps.try_fold(1, |step, own| lcm("a page", step, own).ok());
    all.unwrap_or(1)
}

/// Why no page suits all layers.
pub(super) fn none_fits(kinds: &[Kind<'_>]) -> PlanError {
    let page = |kind: &Kind<'_>| kind.smallest.page().padded;
    let rigid = |kind: &&Kind<'_>| !kind.may_pad;
    let first = kinds.iter().find(rigid).unwrap_or(&kinds[0]);
    let other = kinds
        .iter()
        .filter(rigid)
        .find(|kind| page(kind) != page(first));
    let other = other.or_else(|| kinds.iter().find(|kind| page(kind) != page(first)));
    let other = other.unwrap_or(first);
    let contract = |kind: &Kind<'_>| {
        let takes = kind.backends.iter().map(|b| {
            format!(
                "{} takes kernel blocks of {}",
                b.name(),
                b.kernel_block_sizes_text()
            )
        });
        let padding = match kind.may_pad {
            true => "pages may be padded",
            false => "pages may not be padded",
        };
        let texts: Vec<String> = std::iter::once(padding.to_owned()).chain(takes).collect();
        format!("{}; {}", brief(&kind.smallest), texts.join(", "))
    };
    PlanError::NoCommonPage {
        first_layer: first.name.to_owned(),
        first: contract(first),
        layer: other.name.to_owned(),
        other: contract(other),
    }
}
