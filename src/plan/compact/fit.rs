//! How a layer fills a page of a given size: a larger block first, padding for the rest.

use std::sync::Arc;

use super::contract::suits;
use super::kinds::Kind;
use crate::spec::{Attention, Spec};

/// Block sizes that are tried before a page is given up.
const TRIES: u64 = 64;

/// The kind's spec with a page of exactly `page` bytes; `None` where nothing leads there. Of several
/// block sizes it is the largest, which wastes least.
pub(super) fn fit(kind: &Kind<'_>, page: u64) -> Option<Arc<Spec>> {
    let smallest = &kind.smallest;
    let attention = match smallest.as_ref() {
        // A state is as large in a block of any size.
        Spec::State(_) if smallest.page().padded == page => return Some(Arc::clone(smallest)),
        Spec::State(_) if smallest.page().padded > page => return None,
        Spec::State(_) => {
            return smallest
                .with_page_size_padded(Some(page))
                .ok()
                .map(Arc::new);
        }
        Spec::Attention(attention) => attention,
    };
    let most = page / kind.unit();
    let fewest = most.saturating_sub(TRIES).max(1);
    // Where alignment pads far more than there is, one that is padded as it came is not among them.
    let as_it_came = match kind.may_pad {
        true => None,
        false => Some(page / attention.page().padded.max(1)),
    };
    // Kernel blocks that no number near the most divides a page into.
    let halves = std::iter::successors(most.checked_ilog2(), |bits| bits.checked_sub(1));
    let mut few = (fewest..=most)
        .rev()
        .chain(as_it_came.filter(|&times| times > 0))
        .chain(halves.map(|bits| 1 << bits).filter(|_| kind.may_pad));
    few.find_map(|times| {
        let spec = Spec::Attention(scaled(attention, times, page, kind.may_pad)?);
        suits(&spec, &kind.backends, false).then(|| match spec == **smallest {
            true => Arc::clone(smallest),
            false => Arc::new(spec),
        })
    })
}

/// A block `times` as large with a page of exactly `page` bytes.
fn scaled(attention: &Attention, times: u64, page: u64, may_pad: bool) -> Option<Attention> {
    if times == 1 && attention.page().padded == page {
        return Some(attention.clone());
    }
    // Padding that was given is kept, once for each block that is joined.
    let given = match attention.fields().page_size_padded {
        Some(given) => Some(given.checked_mul(times)?),
        None => None,
    };
    let joined = in_blocks(attention, times, given)?;
    match joined.page().padded {
        bytes if bytes == page => Some(joined),
        bytes if bytes < page && may_pad => {
            in_blocks(attention, times, Some(page)).filter(|spec| keeps_alignment(spec, page))
        }
        _ => None,
    }
}

/// A block of `times` as many tokens.
pub(super) fn in_blocks(
    attention: &Attention,
    times: u64,
    padded: Option<u64>,
) -> Option<Attention> {
    let block_size = attention.fields().block_size.checked_mul(times)?;
    let changed = attention.changed(|fields| {
        fields.block_size = block_size;
        fields.page_size_padded = padded;
    });
    changed.ok()
}

fn keeps_alignment(attention: &Attention, page: u64) -> bool {
    let alignment = attention.fields().alignment.unwrap_or(1);
    attention.page().padded == page && page.is_multiple_of(alignment)
}
