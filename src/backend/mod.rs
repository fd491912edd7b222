//! An attention backend as a contract: the layout its kernels read, and what they demand of it.
//!
//! Nothing about a backend is guessed from a shape. A plan that breaks a contract fails before any
//! memory is taken.

mod kernel_block;
mod layout;
mod preset;

pub use kernel_block::{KernelBlockError, KernelBlockSize, select_kernel_block_size};
pub use layout::{Axis, Layout, LayoutError};
pub use preset::{Preset, PresetError};

use crate::spec::QuantMode;

/// The widest integer that a backend's kernels compute element offsets with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexWidth {
    /// Signed 32 bits: no element of a view may be further than 2^31 − 1 from its start.
    Bits32,
    /// Signed 64 bits.
    Bits64,
}

/// Where the f32 scales of the per-token-head modes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScalePlacement {
    /// Behind each key, value or latent: part of the content axis.
    Inline,
    /// Behind the data of a page, outside the view.
    PageEnd,
}

/// How far a backend's kernels can be captured into a CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum GraphSupport {
    /// Not at all.
    Never = 0,
    /// Batches in which every request decodes one token.
    UniformSingleTokenDecode = 1,
    /// Batches in which every request has the same number of tokens.
    UniformBatch = 2,
    /// Any batch.
    Always = 3,
}

impl GraphSupport {
    /// Every level, from none to all.
    pub const ALL: [GraphSupport; 4] = [
        GraphSupport::Never,
        GraphSupport::UniformSingleTokenDecode,
        GraphSupport::UniformBatch,
        GraphSupport::Always,
    ];
}

/// Everything that describes a backend. Plain data: [`Backend::new`] checks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contract {
    /// The backend's name: its identity, and what messages call it.
    pub name: String,
    /// How attention layers are laid out; `None` for a backend of state layers only.
    pub layout: Option<Layout>,
    /// Layouts that replace `layout` for layers of a quantisation mode.
    pub quantised_layouts: Vec<(QuantMode, Layout)>,
    /// Kernel block sizes that the kernels take.
    pub kernel_block_sizes: Vec<KernelBlockSize>,
    /// Where per-token-head scales lie.
    pub scale_placement: ScalePlacement,
    /// Whether keys and values must be equally wide, even where the layout could hold others.
    pub needs_equal_kv_widths: bool,
    /// The number of key-value heads that the kernels are made for; `None` for any.
    pub num_kv_heads: Option<u64>,
    /// Whether the kernels step from block to block by a stride they are given. Without it a
    /// layer's page must be dense: no padding, nothing else between two blocks.
    pub follows_block_stride: bool,
    /// The widest index the kernels compute with.
    pub index_width: IndexWidth,
    /// Bytes that the first element of every block must be a multiple of, counted from address 0.
    pub alignment: u64,
    /// How far the kernels can be captured.
    pub graph_support: GraphSupport,
}

/// A backend whose contract makes sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    contract: Contract,
}

/// Why a backend cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// No name.
    #[error("the backend's name is empty")]
    NameEmpty,
    /// No kernel block sizes.
    #[error("backend {name}: no kernel block size is given")]
    NoKernelBlockSize {
        /// The backend.
        name: String,
    },
    /// A number that must be positive is not.
    #[error("backend {name}: {field} is 0; it must be at least 1")]
    Zero {
        /// The backend.
        name: String,
        /// The field.
        field: &'static str,
    },
    /// An alignment that is no power of two.
    #[error("backend {name}: alignment is {alignment} bytes; it must be a power of two up to 4096")]
    Alignment {
        /// The backend.
        name: String,
        /// The value given.
        alignment: u64,
    },
    /// Two layouts for one quantisation mode.
    #[error("backend {name}: quantisation mode {mode} has two layouts")]
    TwoLayouts {
        /// The backend.
        name: String,
        /// The mode.
        mode: &'static str,
    },
}

impl Backend {
    /// Checks `contract`.
    pub fn new(contract: Contract) -> Result<Backend, BackendError> {
        let name = || contract.name.clone();
        if contract.name.is_empty() {
            return Err(BackendError::NameEmpty);
        }
        if contract.kernel_block_sizes.is_empty() {
            return Err(BackendError::NoKernelBlockSize { name: name() });
        }
        let zero_size = contract
            .kernel_block_sizes
            .iter()
            .any(|size| size.number() == 0);
        for (field, zero) in [
            ("a kernel block size", zero_size),
            ("num_kv_heads", contract.num_kv_heads == Some(0)),
        ] {
            if zero {
                return Err(BackendError::Zero {
                    name: name(),
                    field,
                });
            }
        }
        if !contract.alignment.is_power_of_two() || contract.alignment > 4096 {
            return Err(BackendError::Alignment {
                name: name(),
                alignment: contract.alignment,
            });
        }
        for (i, (mode, _)) in contract.quantised_layouts.iter().enumerate() {
            if contract.quantised_layouts[..i]
                .iter()
                .any(|(other, _)| other == mode)
            {
                return Err(BackendError::TwoLayouts {
                    name: name(),
                    mode: mode.name(),
                });
            }
        }
        Ok(Backend { contract })
    }

    /// What the backend promises and demands.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// The backend's name.
    pub fn name(&self) -> &str {
        &self.contract.name
    }

    /// The layout for layers of a quantisation mode.
    pub fn layout(&self, mode: QuantMode) -> Option<&Layout> {
        let own = self
            .contract
            .quantised_layouts
            .iter()
            .find(|(m, _)| *m == mode);
        own.map(|(_, layout)| layout)
            .or(self.contract.layout.as_ref())
    }
}
