//! Pages of one size: a larger block where it fits exactly, padding where it does not.

use std::sync::Arc;

use crate::plan::error::PlanError;
use crate::plan::merge_workers::WholeModel;
use crate::spec::{Attention, Spec, SpecError};

/// Makes the pages of the specs in `which` as large as the largest of them.
pub(in crate::plan) fn unify_pages(
    whole: &mut WholeModel<'_>,
    which: &[usize],
) -> Result<(), PlanError> {
    let page = |number: usize| whole.specs[number].page().padded;
    let Some(largest) = which
        .iter()
        .copied()
        .reduce(|a, b| if page(b) > page(a) { b } else { a })
    else {
        return Ok(());
    };
    let target = page(largest);
    for &number in which {
        let spec = &whole.specs[number];
        if spec.page().padded == target {
            continue;
        }
        let unified = unified(spec, target)
            .map_err(|error| PlanError::spec(whole.name_of_spec(number), error))?;
        let Some(unified) = unified else {
            return Err(PlanError::PageSizeNotUnifiable {
                layer: whole.name_of_spec(number).to_owned(),
                page: spec.page().padded,
                target_layer: whole.name_of_spec(largest).to_owned(),
                target,
            });
        };
        whole.specs[number] = Arc::new(unified);
    }
    Ok(())
}

/// The spec with a page of `target` bytes; `None` when nothing leads there.
fn unified(spec: &Spec, target: u64) -> Result<Option<Spec>, SpecError> {
    let attention = match spec {
        // A state is as large in a block of any size.
        Spec::State(_) => return spec.with_page_size_padded(Some(target)).map(Some),
        Spec::Attention(attention) => attention,
    };
    let page = attention.page();
    for part in [page.unpadded, page.padded] {
        if let Some(scaled) = scaled(attention, part, target) {
            return Ok(Some(Spec::Attention(scaled)));
        }
    }
    if !attention.fields().indexes_kv_by_block_stride {
        return Ok(None);
    }
    let padded = spec.with_page_size_padded(Some(target))?;
    Ok((padded.page().padded == target).then_some(padded))
}

/// A block as many times larger as `part` fits into the target. A page that has padding may be
/// padded again, to the target; one that has none must fill it.
fn scaled(attention: &Attention, part: u64, target: u64) -> Option<Attention> {
    if part == 0 || !target.is_multiple_of(part) {
        return None;
    }
    let block_size = attention.fields().block_size.checked_mul(target / part)?;
    let page = attention.page();
    let scaled = attention.changed(|fields| {
        fields.block_size = block_size;
        fields.page_size_padded = (page.padded > page.unpadded).then_some(target);
    });
    // Padding that pads nothing would make two specs of one.
    let scaled = scaled.ok()?;
    let scaled = match scaled.page().unpadded == target {
        true => scaled
            .changed(|fields| fields.page_size_padded = None)
            .ok()?,
        false => scaled,
    };
    (scaled.page().padded == target).then_some(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::testing::*;

    /// (page of A, is A strided, page of B) to A's block size and page.
    #[test]
    fn pages_become_as_large_as_the_largest() {
        for (id, small, target, expected) in [
            (
                "G01 a state is padded, not scaled",
                state(100),
                8192,
                Some((16, 8192)),
            ),
            (
                "G03a neither divides nor strides",
                full_page(3072),
                4096,
                None,
            ),
            (
                "G03b pads when strided",
                strided(full_page(3072)),
                4096,
                Some((16, 4096)),
            ),
            (
                "G04 keeps its block under reference",
                strided(full_page(1536)),
                10000,
                Some((16, 10000)),
            ),
            ("divides", full_page(1024), 4096, Some((64, 4096))),
            (
                "padded, its content divides",
                padded(full_page(4096), 8192),
                16384,
                Some((64, 16384)),
            ),
            (
                "padded, only its page divides",
                padded(full_page(3072), 4096),
                8192,
                Some((32, 8192)),
            ),
            (
                "padded, nothing divides",
                padded(full_page(3072), 5000),
                8192,
                None,
            ),
        ] {
            let unified = unified(&small, target).unwrap();
            let got = unified.map(|spec| (spec.block_size(), spec.page().padded));
            assert_eq!(got, expected, "{id}");
        }
    }
}
