//! The views of a state layer: its states one behind another in each page.

use super::attention::{check_alignment, check_index_width};
use super::audit::{BlockRuns, audit};
use super::{Pages, View, ViewError};
use crate::backend::Backend;
use crate::num::{product, sum};
use crate::spec::State;

/// One view for each state of the layer, blocks outermost. Its kernels step from page to page, so of
/// their contract only alignment and index width are left to check.
pub fn state_views(spec: &State, backend: &Backend, pages: &Pages) -> Result<Vec<View>, ViewError> {
    check_alignment(backend, pages.offset_bytes, pages.step_bytes)?;
    let parts = spec.parts().enumerate();
    parts
        .map(|(state, part)| {
            let element_bytes = part.dtype.bytes();
            let offset_bytes = sum("a state", [pages.offset_bytes, part.offset])?;
            if !offset_bytes.is_multiple_of(element_bytes) {
                return Err(ViewError::StateMisaligned {
                    state,
                    bytes: offset_bytes,
                    dtype: part.dtype,
                    element_bytes,
                });
            }
            if !pages.step_bytes.is_multiple_of(element_bytes) {
                return Err(ViewError::Misaligned {
                    what: "the block stride",
                    bytes: pages.step_bytes,
                    dtype: part.dtype,
                    element_bytes,
                });
            }
            let ndim = part.shape.len() + 1;
            let mut extents = vec![0i64; 2 * ndim];
            extents[0] = pages.num_blocks as i64;
            extents[ndim] = (pages.step_bytes / element_bytes) as i64;
            let mut stride = 1u64;
            for (dim, &size) in part.shape.iter().enumerate().rev() {
                extents[1 + dim] = size as i64;
                extents[ndim + 1 + dim] = stride as i64;
                stride = product("a state", [stride, size])?;
            }
            let (shape, strides) = extents.split_at(ndim);
            let proof = audit(
                shape,
                strides,
                offset_bytes,
                element_bytes,
                pages.allocation_bytes,
            )?;
            check_index_width(backend, proof.largest_element_offset)?;
            Ok(View {
                dtype: part.dtype,
                offset_bytes,
                block_dim: 0,
                // The whole page is the layer's: zeroing and copying take its states together.
                runs: BlockRuns {
                    num_blocks: pages.num_blocks,
                    offset_bytes: pages.offset_bytes,
                    step_bytes: pages.step_bytes,
                    span_bytes: pages.page_bytes,
                    runs: 1,
                    run_step_bytes: 0,
                },
                axes: None,
                audit: proof,
                extents: extents.into_boxed_slice(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Contract, IndexWidth, Preset};
    use crate::dtype::Dtype;
    use crate::spec::{StateCacheMode, StateFields, StateKind};

    fn views(num_blocks: u64, change: impl FnOnce(&mut Contract)) -> Result<Vec<View>, ViewError> {
        let fields = StateFields {
            kind: StateKind::Mamba2,
            block_size: 16,
            dtypes: vec![Dtype::F32, Dtype::Bf16],
            ndims: vec![1, 2],
            dims: vec![100, 4, 6],
            page_size_padded: Some(1 << 20),
            cache_mode: StateCacheMode::None,
            num_speculative_blocks: 0,
        };
        let mut contract = Preset::Mamba2.contract().unwrap();
        change(&mut contract);
        let pages = Pages {
            num_blocks,
            page_bytes: 1 << 20,
            step_bytes: 1 << 20,
            offset_bytes: 512,
            allocation_bytes: (num_blocks + 1) << 20,
            page_by_page: true,
        };
        let state = State::new(fields).unwrap();
        state_views(&state, &Backend::new(contract).unwrap(), &pages)
    }

    /// Of bf16, 2^31 elements lie in 4096 pages of a mebibyte.
    #[test]
    fn narrow_kernels_of_states_are_refused_what_they_cannot_reach() {
        let narrow = |contract: &mut Contract| contract.index_width = IndexWidth::Bits32;
        let all = views(4096, narrow).unwrap();
        assert!(
            all.iter()
                .all(|view| view.audit.largest_element_offset < 1 << 31)
        );
        let largest = (4096 << 19) + 23;
        assert_eq!(
            views(4097, narrow).unwrap_err(),
            ViewError::IndexWidth { largest }
        );
        assert!(views(4097, |_| ()).is_ok());
    }

    #[test]
    fn kernels_of_states_get_the_alignment_they_want() {
        assert!(views(4, |contract| contract.alignment = 512).is_ok());
        let error = views(4, |contract| contract.alignment = 1024).unwrap_err();
        let expected = ViewError::BlocksNotAligned {
            wanted: 1024,
            aligned: 512,
        };
        assert_eq!(error, expected);
    }
}
