//! Header section: proofs of views.

use super::extensible::{self, extensible};
use super::guard::guard;
use super::input;
use super::status::kvpages_status;
use crate::view::{self, View};

/// What is proven of a view: it stays inside its allocation, its elements are
/// aligned, and no two indices mean one element. Of the views of a cache also: no
/// byte belongs to different blocks of layers that share an allocation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_view_report {
    /// sizeof(kvpages_view_report) as the caller compiled it.
    pub struct_size: usize,
    /// Number of the allocation that holds it.
    pub allocation: u64,
    /// Where the first element lies in the allocation.
    pub offset_bytes: u64,
    /// Bytes of all elements.
    pub logical_bytes: u64,
    /// One past the last byte that the view reaches, counted from the
    /// allocation's start; 0 when the view is empty.
    pub end_bytes: u64,
    /// The furthest element, in elements from the first.
    pub largest_element_offset: u64,
    /// The largest power of two, up to 256, that the first element of every block
    /// is aligned to.
    pub alignment_bytes: u64,
    /// Bytes from kernel block to kernel block; 0 for an engine's own view.
    pub kernel_block_step_bytes: u64,
    /// Bytes from block to block. Block b owns bytes offset_bytes + b *
    /// block_step_bytes to + block_span_bytes of each run. 0 for an engine's own
    /// view.
    pub block_step_bytes: u64,
    /// Bytes that a block owns in one run: its page, or a state's part of it.
    pub block_span_bytes: u64,
    /// Runs that a block is spread over: 1 when it is in one piece, 2 when keys
    /// and values are apart.
    pub num_runs: u64,
    /// Bytes from run to run.
    pub run_step_bytes: u64,
    /// The layer whose pages these are: another one when the layer shares.
    pub owner_layer: u64,
    /// 1 when all element offsets fit signed 32-bit integers.
    pub fits_int32: u32,
    /// The dimension that counts kernel blocks, or a state's blocks.
    pub block_dim: u32,
}
extensible!(kvpages_view_report, block_dim: u32);

/// A strided view of an engine's own. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_view {
    /// Sizes of the dimensions, ndim of them.
    pub shape: *const i64,
    /// Elements from one index of a dimension to the next, ndim of them.
    pub strides: *const i64,
    /// Number of dimensions.
    pub ndim: u64,
    /// Where the first element lies in the allocation.
    pub offset_bytes: u64,
    /// Bytes of one element.
    pub element_bytes: u64,
    /// Bytes of the allocation.
    pub allocation_bytes: u64,
}

/// Alignments are reported up to what every allocation has.
const REPORTED_ALIGNMENT: u64 = crate::memory::MIN_ALIGNMENT;

/// Proves a view of an engine's own, or says why it cannot: it leaves its
/// allocation (kind "view_out_of_bounds"), it starts between two elements
/// ("view_dtype_misaligned"), or two indices may mean one element
/// ("view_overlaps_itself": each dimension must step over all that lies inside
/// it).
///
/// @param view      Borrowed. Not NULL.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  It cannot be proven; see the kinds above.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_view_audit(
    view: *const kvpages_view,
    out: *mut kvpages_view_report,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, view) = unsafe { (extensible::out(out)?, input::one(view, "view")?) };
        let ndim = usize::try_from(view.ndim).unwrap_or(usize::MAX);
        // SAFETY: the caller's contract.
        let (shape, strides) = unsafe {
            (
                input::array(view.shape, ndim, "shape")?,
                input::array(view.strides, ndim, "strides")?,
            )
        };
        let proof = view::audit(
            shape,
            strides,
            view.offset_bytes,
            view.element_bytes,
            view.allocation_bytes,
        )?;
        out.fill(kvpages_view_report {
            offset_bytes: view.offset_bytes,
            logical_bytes: proof.elements.saturating_mul(view.element_bytes),
            end_bytes: proof.end_bytes,
            largest_element_offset: proof.largest_element_offset,
            alignment_bytes: power_of_two_in(view.offset_bytes),
            fits_int32: fits_int32(proof.largest_element_offset),
            ..EMPTY
        });
        Ok(())
    })
}

/// What was proven of a view of a cache.
pub(super) fn report(view: &View, allocation: usize, owner: usize) -> kvpages_view_report {
    let element_bytes = view.dtype.bytes();
    let states_stride = view.strides().first().map_or(0, |&stride| stride as u64);
    let step = view
        .axes
        .map_or(states_stride, |axes| axes.kernel_block_stride);
    let kernel_step = step * element_bytes;
    let logical_bytes = view.audit.elements.saturating_mul(element_bytes);
    // A state is one of several in a page, and owns its own part of it.
    let span = match view.axes {
        Some(_) => view.runs.span_bytes,
        None => logical_bytes / view.runs.num_blocks.max(1),
    };
    kvpages_view_report {
        allocation: allocation as u64,
        offset_bytes: view.offset_bytes,
        logical_bytes,
        end_bytes: view.audit.end_bytes,
        largest_element_offset: view.audit.largest_element_offset,
        alignment_bytes: power_of_two_in(view.offset_bytes | kernel_step),
        kernel_block_step_bytes: kernel_step,
        block_step_bytes: view.runs.step_bytes,
        block_span_bytes: span,
        num_runs: view.runs.runs,
        run_step_bytes: view.runs.run_step_bytes,
        owner_layer: owner as u64,
        fits_int32: fits_int32(view.audit.largest_element_offset),
        block_dim: view.block_dim as u32,
        ..EMPTY
    }
}

fn fits_int32(offset: u64) -> u32 {
    u32::from(i32::try_from(offset).is_ok())
}

fn power_of_two_in(bytes: u64) -> u64 {
    match bytes {
        0 => REPORTED_ALIGNMENT,
        bytes => (1 << bytes.trailing_zeros()).min(REPORTED_ALIGNMENT),
    }
}

const EMPTY: kvpages_view_report = kvpages_view_report {
    struct_size: 0,
    allocation: 0,
    offset_bytes: 0,
    logical_bytes: 0,
    end_bytes: 0,
    largest_element_offset: 0,
    alignment_bytes: 0,
    kernel_block_step_bytes: 0,
    block_step_bytes: 0,
    block_span_bytes: 0,
    num_runs: 0,
    run_step_bytes: 0,
    owner_layer: 0,
    fits_int32: 0,
    block_dim: 0,
};
