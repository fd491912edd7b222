//! Views: the shape, strides and offset by which kernels reach a layer's pages, and the proof that
//! they reach nothing else.
//!
//! Pure arithmetic on sizes: an allocation is a number of bytes here, and a view can be worked out
//! and proven before any memory is taken.

mod attention;
mod audit;
mod state;

pub use attention::{Axes, attention_view};
pub use audit::{Audit, AuditError, BlockRuns, Owned, OwnershipError, audit, check_ownership};
pub use state::state_views;

use crate::dtype::Dtype;
use crate::num::Overflow;

/// Pieces of a block, at most: one for each index of the axes before the block axis, such as keys and
/// values. Each is a region that somebody lists.
pub const MAX_RUNS: u64 = 1 << 20;

/// A strided view into an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Type of one element.
    pub dtype: Dtype,
    /// Where the first element lies in the allocation, in bytes.
    pub offset_bytes: u64,
    /// Which dimension counts blocks (of a state) or kernel blocks.
    pub block_dim: usize,
    /// Where the blocks lie.
    pub runs: BlockRuns,
    /// How the axes lie; `None` for a state.
    pub axes: Option<Axes>,
    /// What was proven.
    pub audit: Audit,
    /// Sizes, then strides in elements: one allocation for both.
    extents: Box<[i64]>,
}

impl View {
    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.extents[..self.extents.len() / 2]
    }

    /// Elements from one index of a dimension to the next.
    pub fn strides(&self) -> &[i64] {
        &self.extents[self.extents.len() / 2..]
    }

    /// Whether the other view means the same elements by the same indices.
    pub fn is_same_as(&self, other: &View) -> bool {
        self.dtype == other.dtype
            && self.offset_bytes == other.offset_bytes
            && self.axes == other.axes
            && self.extents == other.extents
    }
}

/// The pages that a layer has in an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// Blocks.
    pub num_blocks: u64,
    /// Bytes of the layer's page of one block.
    pub page_bytes: u64,
    /// Bytes from one block's page to the next one's.
    pub step_bytes: u64,
    /// Where the first page starts.
    pub offset_bytes: u64,
    /// Bytes of the whole allocation.
    pub allocation_bytes: u64,
    /// Whether the pages must lie one after another, each in one piece. Without it, a layout whose
    /// outermost axis is not the block may spread a block over the allocation.
    pub page_by_page: bool,
}

impl Pages {
    /// The pages as they lie when no layout spreads them.
    pub fn runs(&self) -> BlockRuns {
        BlockRuns {
            num_blocks: self.num_blocks,
            offset_bytes: self.offset_bytes,
            step_bytes: self.step_bytes,
            span_bytes: self.page_bytes,
            runs: 1,
            run_step_bytes: 0,
        }
    }
}

/// Why a layer has no view.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ViewError {
    /// The backend only knows state layers.
    #[error("the backend has no layout for attention layers")]
    NoLayout,
    /// The kernel block does not divide the block.
    #[error(
        "a kernel block of {kernel_block_size} slots does not divide a block of {block_slots} slots"
    )]
    KernelBlockNotDividing {
        /// Slots of a kernel block.
        kernel_block_size: u64,
        /// Slots of a block.
        block_slots: u64,
    },
    /// A layout with a kv axis of its own, or kernels made for equal widths, and a layer whose keys
    /// and values differ.
    #[error(
        "the backend needs keys and values of one width; the layer stores {key} and {value} elements"
    )]
    WidthsDiffer {
        /// Stored elements of a key.
        key: u64,
        /// Stored elements of a value.
        value: u64,
    },
    /// A layout with a kv axis, and a layer that stores one thing for each token and head.
    #[error("layout \"{layout}\" has a kv axis; the layer stores no separate keys and values")]
    NothingForKvAxis {
        /// The layout.
        layout: String,
    },
    /// A layout without a kv axis, and a layer that stores keys and values.
    #[error("layout \"{layout}\" has no kv axis; the layer stores keys and values")]
    NoKvAxis {
        /// The layout.
        layout: String,
    },
    /// A layout without a head axis, and a layer of several heads.
    #[error("layout \"{layout}\" has no head axis; the layer has {heads} kv heads")]
    NoHeadAxis {
        /// The layout.
        layout: String,
        /// Its heads.
        heads: u64,
    },
    /// The content does not fit in the page.
    #[error("the layout covers {content} bytes of a block; its page has {page}")]
    ContentLargerThanPage {
        /// Bytes that the layout covers.
        content: u64,
        /// Bytes of the page.
        page: u64,
    },
    /// A padded page that does not fall into equal kernel blocks.
    #[error(
        "a page of {page} bytes does not split into {ratio} kernel blocks of at least {content} bytes, each a multiple of {element_bytes}"
    )]
    PaddedSplitNotEven {
        /// Bytes of the page.
        page: u64,
        /// Kernel blocks of one block.
        ratio: u64,
        /// Bytes that one kernel block stores.
        content: u64,
        /// Bytes of an element.
        element_bytes: u64,
    },
    /// Axes outside the block axis that cut a block into too many pieces.
    #[error(
        "axes before the block axis cut each block into {runs} pieces; at most {MAX_RUNS} are listed"
    )]
    TooManyRuns {
        /// The pieces.
        runs: u64,
    },
    /// Kernel blocks of a packed page, which are not equally far apart.
    #[error(
        "a packed page of {page} bytes, repeated every {step} bytes, does not split into {ratio} kernel blocks at one distance; use a kernel block of the whole block"
    )]
    PackedSplit {
        /// Bytes of the page.
        page: u64,
        /// Bytes from block to block.
        step: u64,
        /// Kernel blocks of one block.
        ratio: u64,
    },
    /// An offset or a step between two elements.
    #[error(
        "{what} of {bytes} bytes is not a multiple of {element_bytes}, the bytes of one {dtype}"
    )]
    Misaligned {
        /// What is misaligned.
        what: &'static str,
        /// Its bytes.
        bytes: u64,
        /// The element type.
        dtype: Dtype,
        /// Its bytes.
        element_bytes: u64,
    },
    /// A state that starts between two of its elements.
    #[error(
        "state {state} starts at byte {bytes}, which is not a multiple of {element_bytes}, the bytes of one {dtype}"
    )]
    StateMisaligned {
        /// Which state.
        state: usize,
        /// Where it starts.
        bytes: u64,
        /// The element type.
        dtype: Dtype,
        /// Its bytes.
        element_bytes: u64,
    },
    /// A layout that fuses axes which do not follow on each other in these pages.
    #[error(
        "layout \"{layout}\" fuses {outer} with {inner}, which are not evenly spaced here: the page is padded, packed or shared"
    )]
    FusedAxesApart {
        /// The layout.
        layout: String,
        /// The outer axis.
        outer: &'static str,
        /// The inner axis.
        inner: &'static str,
    },
    /// Kernels that need dense pages, and pages that are not.
    #[error(
        "the backend does not follow a block stride, so kernel blocks must lie {content} bytes apart; here they lie {step} bytes apart"
    )]
    PageNotDense {
        /// Bytes that a kernel block stores.
        content: u64,
        /// Bytes from kernel block to kernel block.
        step: u64,
    },
    /// Kernels that need aligned blocks, and blocks that are not.
    #[error("the backend needs blocks aligned to {wanted} bytes; they are aligned to {aligned}")]
    BlocksNotAligned {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes they are aligned to.
        aligned: u64,
    },
    /// Kernels that compute with 32 bits, and elements further away.
    #[error(
        "the backend computes with 32-bit offsets; the largest here is {largest}, the limit is 2147483647; use fewer blocks"
    )]
    IndexWidth {
        /// Largest offset in elements.
        largest: u64,
    },
    /// A view that is not proven.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}
