//! Which kernel block size a group of backends agrees on.

use std::fmt;

use super::Backend;

/// A kernel block size that a backend's kernels take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelBlockSize {
    /// Exactly that many tokens.
    Exact(u64),
    /// Any multiple of that many tokens.
    MultipleOf(u64),
}

impl KernelBlockSize {
    /// The number, whatever it means.
    pub fn number(self) -> u64 {
        match self {
            KernelBlockSize::Exact(number) | KernelBlockSize::MultipleOf(number) => number,
        }
    }

    fn takes(self, size: u64) -> bool {
        match self {
            KernelBlockSize::Exact(exact) => size == exact,
            KernelBlockSize::MultipleOf(base) => size.is_multiple_of(base),
        }
    }
}

impl fmt::Display for KernelBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelBlockSize::Exact(exact) => write!(f, "{exact}"),
            KernelBlockSize::MultipleOf(base) => write!(f, "multiples of {base}"),
        }
    }
}

/// Why no kernel block size fits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelBlockError {
    /// A block of no tokens.
    #[error("the block size is 0; it must be at least 1")]
    ZeroBlockSize,
    /// The backends and the block size do not go together.
    #[error("no kernel block size divides block size {block_size} and suits {backends}")]
    NoCommonSize {
        /// Tokens of a block.
        block_size: u64,
        /// The backends and what they take.
        backends: String,
    },
}

impl Backend {
    /// Whether the backend's kernels take blocks of `size` tokens.
    pub fn takes_kernel_block(&self, size: u64) -> bool {
        let sizes = &self.contract().kernel_block_sizes;
        size > 0 && sizes.iter().any(|supported| supported.takes(size))
    }

    /// Tokens of the smallest kernel block that the kernels take.
    pub fn smallest_kernel_block(&self) -> u64 {
        let sizes = &self.contract().kernel_block_sizes;
        sizes.iter().map(|size| size.number()).min().unwrap_or(1)
    }

    /// What [`takes_kernel_block`](Self::takes_kernel_block) accepts, for messages.
    pub fn kernel_block_sizes_text(&self) -> String {
        let sizes = &self.contract().kernel_block_sizes;
        let texts: Vec<String> = sizes.iter().map(ToString::to_string).collect();
        texts.join(", ")
    }
}

/// The block size itself when every backend takes it, else the largest exact size of any backend
/// that divides it and that every backend takes. No backends agree on the block size.
pub fn select_kernel_block_size(
    block_size: u64,
    backends: &[&Backend],
) -> Result<u64, KernelBlockError> {
    if block_size == 0 {
        return Err(KernelBlockError::ZeroBlockSize);
    }
    let suits = |size| {
        backends
            .iter()
            .all(|backend| backend.takes_kernel_block(size))
    };
    if suits(block_size) {
        return Ok(block_size);
    }
    // A "multiple of" size that divides the block would have let the block itself pass, so only
    // exact sizes are left to try.
    let exact = backends
        .iter()
        .flat_map(|b| &b.contract().kernel_block_sizes);
    let exact = exact.filter_map(|size| match size {
        KernelBlockSize::Exact(exact) => Some(*exact),
        KernelBlockSize::MultipleOf(_) => None,
    });
    let best = exact
        .filter(|&size| block_size.is_multiple_of(size) && suits(size))
        .max();
    best.ok_or_else(|| {
        let texts = backends
            .iter()
            .map(|b| format!("{} (takes {})", b.name(), b.kernel_block_sizes_text()));
        KernelBlockError::NoCommonSize {
            block_size,
            backends: texts.collect::<Vec<_>>().join(", "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Contract, Preset};
    use KernelBlockSize::{Exact, MultipleOf};

    fn backend(sizes: &[KernelBlockSize]) -> Backend {
        let contract = Preset::FlashAttentionNhd.contract().unwrap();
        Backend::new(Contract {
            kernel_block_sizes: sizes.to_vec(),
            ..contract
        })
        .unwrap()
    }

    #[test]
    fn the_largest_size_that_suits_all() {
        type Case<'a> = (u64, &'a [&'a [KernelBlockSize]], Option<u64>);
        let cases: &[Case] = &[
            (528, &[&[MultipleOf(16)]], Some(528)),
            (528, &[&[Exact(16), Exact(32), Exact(64)]], Some(16)),
            (4192, &[&[Exact(16), Exact(32), Exact(64)]], Some(32)),
            (2112, &[&[Exact(16), Exact(32), Exact(64)]], Some(64)),
            (64, &[&[Exact(16), Exact(32)], &[MultipleOf(16)]], Some(32)),
            (32, &[&[Exact(64)]], None),
            (96, &[&[Exact(16), Exact(32)], &[Exact(64)]], None),
            (48, &[], Some(48)),
            (0, &[&[MultipleOf(16)]], None),
        ];
        for (block_size, sizes, expected) in cases {
            let backends: Vec<Backend> = sizes.iter().map(|s| backend(s)).collect();
            let backends: Vec<&Backend> = backends.iter().collect();
            let selected = select_kernel_block_size(*block_size, &backends).ok();
            assert_eq!(selected, *expected, "{block_size} {sizes:?}");
        }
    }
}
