//! Contracts of known kernels.
//!
//! Each is what the kernels of that name read in vLLM 0.26 (`get_kv_cache_shape`,
//! `get_kv_cache_stride_order`, `get_supported_kernel_block_sizes`, `indexes_kv_by_block_stride` of
//! the class in `vllm/v1/attention/backends` or `vllm/models`). Graph support is that of its metadata
//! builder; where it depends on the device or the kernel's version, it is the least of them.
//! DeepSeek V4's classes do not say that they index by block stride, but their pages are aligned and
//! packed, so their kernels do.

use super::{
    Backend, BackendError, Contract, GraphSupport, IndexWidth, KernelBlockSize, Layout,
    LayoutError, ScalePlacement,
};
use crate::spec::QuantMode;

use GraphSupport::{Always, Never, UniformBatch, UniformSingleTokenDecode};
use KernelBlockSize::{Exact, MultipleOf};

macro_rules! presets {
    ($($(#[doc = $doc:literal])+ $variant:ident = $number:literal, $name:literal: $terms:expr;)+) => {
        /// A known contract.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Preset {
            $($(#[doc = $doc])+ $variant = $number,)+
        }

        impl Preset {
            /// Every preset, in the order of their numbers.
            pub const ALL: &'static [Preset] = &[$(Preset::$variant,)+];

            /// The name of the backend.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Preset::$variant => $name,)+
                }
            }

            fn terms(self) -> Terms {
                match self {
                    $(Preset::$variant => $terms,)+
                }
            }
        }
    };
}

/// A contract, as short as a table wants it.
struct Terms {
    layout: Option<(&'static str, Option<&'static str>)>,
    nvfp4_layout: Option<(&'static str, Option<&'static str>)>,
    kernel_block_sizes: &'static [KernelBlockSize],
    needs_equal_kv_widths: bool,
    num_kv_heads: Option<u64>,
    follows_block_stride: bool,
    graph_support: GraphSupport,
}

const PACKED: &str = "block | head | token | kv*content";
const PACKED_NHD: &str = "block | token | head | kv*content";
const NVFP4_PACKED: &str = "block | kv*head | token | content";
const NVFP4_PACKED_NHD: &str = "block | token | kv*head | content";
const LATENT: &str = "block | token | content";

const fn packed(
    order: Option<&'static str>,
    sizes: &'static [KernelBlockSize],
    graph_support: GraphSupport,
) -> Terms {
    Terms {
        layout: Some((PACKED, order)),
        nvfp4_layout: None,
        kernel_block_sizes: sizes,
        needs_equal_kv_widths: true,
        num_kv_heads: None,
        follows_block_stride: true,
        graph_support,
    }
}

const fn latent(sizes: &'static [KernelBlockSize], follows_block_stride: bool) -> Terms {
    Terms {
        layout: Some((LATENT, None)),
        nvfp4_layout: None,
        kernel_block_sizes: sizes,
        needs_equal_kv_widths: false,
        num_kv_heads: None,
        follows_block_stride,
        graph_support: UniformBatch,
    }
}

const fn state(graph_support: GraphSupport) -> Terms {
    Terms {
        layout: None,
        nvfp4_layout: None,
        kernel_block_sizes: &[MultipleOf(1)],
        needs_equal_kv_widths: false,
        num_kv_heads: None,
        follows_block_stride: true,
        graph_support,
    }
}

presets! {
    /// FlashAttention, tokens outside heads.
    FlashAttentionNhd = 1, "FLASH_ATTN": packed(Some(PACKED_NHD), &[MultipleOf(16)], UniformBatch);
    /// FlashAttention, heads outside tokens.
    FlashAttentionHnd = 2, "FLASH_ATTN": packed(None, &[MultipleOf(16)], UniformBatch);
    /// Triton unified attention, tokens outside heads.
    TritonNhd = 3, "TRITON_ATTN": packed(Some(PACKED_NHD), &[MultipleOf(16)], Always);
    /// Triton unified attention, heads outside tokens.
    TritonHnd = 4, "TRITON_ATTN": packed(None, &[MultipleOf(16)], Always);
    /// FlashInfer, tokens outside heads.
    FlashInferNhd = 5, "FLASHINFER": Terms {
        nvfp4_layout: Some((NVFP4_PACKED, Some(NVFP4_PACKED_NHD))),
        ..packed(Some(PACKED_NHD), &[Exact(16), Exact(32), Exact(64)], UniformSingleTokenDecode)
    };
    /// FlashInfer, heads outside tokens.
    FlashInferHnd = 6, "FLASHINFER": Terms {
        nvfp4_layout: Some((NVFP4_PACKED, None)),
        ..packed(None, &[Exact(16), Exact(32), Exact(64)], UniformSingleTokenDecode)
    };
    /// FlashAttention for keys and values of different widths, tokens outside heads.
    FlashAttentionDiffKvNhd = 7, "FLASH_ATTN_DIFFKV": Terms {
        needs_equal_kv_widths: false,
        ..packed(Some(PACKED_NHD), &[MultipleOf(16)], UniformBatch)
    };
    /// FlashAttention for keys and values of different widths, heads outside tokens.
    FlashAttentionDiffKvHnd = 8, "FLASH_ATTN_DIFFKV": Terms {
        needs_equal_kv_widths: false,
        ..packed(None, &[MultipleOf(16)], UniformBatch)
    };
    /// PyTorch flex attention.
    FlexAttention = 9, "FLEX_ATTENTION": packed(Some(PACKED_NHD), &[MultipleOf(16)], Always);
    /// CPU attention.
    CpuAttention = 10, "CPU_ATTN": Terms {
        follows_block_stride: false,
        ..packed(None, &[MultipleOf(16)], Never)
    };
    /// ROCm paged attention: all keys, then all values.
    RocmAttention = 11, "ROCM_ATTN": Terms {
        layout: Some(("kv | block | token | head | content", None)),
        follows_block_stride: false,
        ..packed(None, &[MultipleOf(16)], Always)
    };
    /// AITER FlashAttention.
    RocmAiterFlashAttention = 12, "ROCM_AITER_FA": Terms {
        follows_block_stride: false,
        ..packed(None, &[Exact(16), Exact(32)], UniformBatch)
    };
    /// AITER unified attention.
    RocmAiterUnifiedAttention = 13, "ROCM_AITER_UNIFIED_ATTN": Terms {
        follows_block_stride: false,
        ..packed(None, &[MultipleOf(16)], Always)
    };
    /// HPC attention: keys, then values, in each block.
    HpcAttention = 14, "HPC_ATTN": Terms {
        layout: Some(("block | kv | token | head | content", None)),
        ..packed(None, &[Exact(64)], UniformSingleTokenDecode)
    };
    /// TurboQuant: key and value of a token and head in one slot.
    TurboQuant = 15, "TURBOQUANT": Terms {
        follows_block_stride: false,
        ..packed(None, &[Exact(16), Exact(32), Exact(64), Exact(128)], UniformBatch)
    };
    /// Convolution streams kept as a sliding window of keys without values.
    SlidingConvolution = 16, "INKLING_SCONV_SWA": Terms {
        layout: Some(("block | head | token | content", None)),
        needs_equal_kv_widths: false,
        ..packed(None, &[MultipleOf(1)], UniformBatch)
    };
    /// Hidden states.
    HiddenState = 17, "CACHE_ONLY_ATTENTION": Terms {
        layout: Some(("block | token | head | content", None)),
        needs_equal_kv_widths: false,
        follows_block_stride: false,
        ..packed(None, &[MultipleOf(1)], Never)
    };
    /// MLA in Triton.
    TritonMla = 18, "TRITON_MLA": Terms {
        graph_support: UniformSingleTokenDecode,
        ..latent(&[MultipleOf(16)], true)
    };
    /// FlashMLA.
    FlashMla = 19, "FLASHMLA": latent(&[Exact(64)], true);
    /// FlashMLA, sparse (DeepSeek V3.2).
    FlashMlaSparse = 20, "FLASHMLA_SPARSE": latent(&[Exact(64)], false);
    /// FlashInfer MLA.
    FlashInferMla = 21, "FLASHINFER_MLA": latent(&[Exact(32), Exact(64)], true);
    /// FlashInfer MLA, sparse.
    FlashInferMlaSparse = 22, "FLASHINFER_MLA_SPARSE": latent(&[Exact(32), Exact(64)], false);
    /// AITER MLA.
    RocmAiterMla = 23, "ROCM_AITER_MLA": latent(&[MultipleOf(1)], false);
    /// AITER MLA, sparse.
    RocmAiterMlaSparse = 24, "ROCM_AITER_MLA_SPARSE": latent(&[Exact(1), Exact(64)], false);
    /// The indexer of DeepSeek V3.2.
    DeepseekV32Indexer = 25, "DEEPSEEK_V32_INDEXER": Terms {
        num_kv_heads: Some(1),
        ..latent(&[Exact(64)], false)
    };
    /// DeepSeek V4's compressed latents.
    DeepseekV4Mla = 26, "DEEPSEEK_V4_FLASHMLA": latent(&[Exact(256)], true);
    /// The indexer of DeepSeek V4.
    DeepseekV4Indexer = 27, "DEEPSEEK_V4_INDEXER": Terms {
        num_kv_heads: Some(1),
        ..latent(&[Exact(256)], true)
    };
    /// DeepSeek V4's sliding-window latents.
    DeepseekV4SlidingWindow = 28, "DEEPSEEK_SPARSE_SWA": Terms {
        num_kv_heads: Some(1),
        ..latent(&[MultipleOf(64)], true)
    };
    /// DeepSeek V4's compressor states.
    DeepseekV4Compressor = 29, "DEEPSEEK_V4_COMPRESSOR": Terms {
        num_kv_heads: Some(1),
        graph_support: Always,
        ..latent(&[MultipleOf(1)], true)
    };
    /// Mamba, first version.
    Mamba1 = 30, "MAMBA1_ATTN": state(UniformBatch);
    /// Mamba, second version.
    Mamba2 = 31, "MAMBA2_ATTN": state(UniformBatch);
    /// Short convolutions.
    ShortConvolution = 32, "SHORT_CONV_ATTN": state(UniformBatch);
    /// Linear attention.
    LinearAttention = 33, "LINEAR_ATTN": state(UniformSingleTokenDecode);
    /// Gated delta nets.
    GatedDeltaNet = 34, "GDN_ATTN": state(UniformBatch);
}

/// Why a preset does not make a backend; it always does, and a test makes each.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// Its layout does not read.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Its contract makes no sense.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl Preset {
    /// The contract, to change or to use.
    pub fn contract(self) -> Result<Contract, LayoutError> {
        let terms = self.terms();
        let parse = |(text, order): (&str, Option<&str>)| Layout::parse(text, order);
        let nvfp4 = terms.nvfp4_layout.map(parse).transpose()?;
        Ok(Contract {
            name: self.name().to_owned(),
            layout: terms.layout.map(parse).transpose()?,
            quantised_layouts: nvfp4.map(|l| (QuantMode::Nvfp4, l)).into_iter().collect(),
            kernel_block_sizes: terms.kernel_block_sizes.to_vec(),
            scale_placement: ScalePlacement::Inline,
            needs_equal_kv_widths: terms.needs_equal_kv_widths,
            num_kv_heads: terms.num_kv_heads,
            follows_block_stride: terms.follows_block_stride,
            index_width: IndexWidth::Bits64,
            alignment: 1,
            graph_support: terms.graph_support,
        })
    }

    /// The backend.
    pub fn backend(self) -> Result<Backend, PresetError> {
        Ok(Backend::new(self.contract()?)?)
    }
}

impl TryFrom<u32> for Preset {
    type Error = u32;

    /// The preset with that number; the number itself when there is none.
    fn try_from(number: u32) -> Result<Preset, u32> {
        let found = Preset::ALL.iter().find(|preset| **preset as u32 == number);
        found.copied().ok_or(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_makes_a_backend() {
        for (i, preset) in Preset::ALL.iter().enumerate() {
            assert_eq!(*preset as usize, i + 1);
            let backend = preset.backend().unwrap();
            assert_eq!(backend.name(), preset.name());
        }
    }

    /// A cell of the table in docs/backends.md: the bars of a layout are no borders of cells.
    fn cell(layout: &str) -> String {
        format!("`{}`", layout.replace('|', "\\|"))
    }

    /// `FlashMla` is `FLASH_MLA` in the header.
    fn name_in_header(preset: Preset) -> String {
        let mut name = String::new();
        for letter in format!("{preset:?}").chars() {
            if letter.is_ascii_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(letter.to_ascii_uppercase());
        }
        name
    }

    fn kernel_block_cell(contract: &Contract) -> String {
        match contract.kernel_block_sizes.as_slice() {
            [MultipleOf(1)] => "any".to_owned(),
            sizes => {
                let texts: Vec<String> = sizes.iter().map(ToString::to_string).collect();
                texts.join(", ")
            }
        }
    }

    fn demands_cell(contract: &Contract) -> String {
        let mut demands = Vec::new();
        if contract.needs_equal_kv_widths {
            demands.push("equal widths".to_owned());
        }
        if let Some(heads) = contract.num_kv_heads {
            demands.push(format!("{heads} head"));
        }
        if !contract.quantised_layouts.is_empty() {
            demands.push("nvfp4 below".to_owned());
        }
        demands.join("; ")
    }

    /// All cells of a preset's row but the source.
    fn row(preset: Preset) -> Vec<String> {
        let (contract, terms) = (preset.contract().unwrap(), preset.terms());
        let (layout, order) = match terms.layout {
            None => ("(state)".to_owned(), String::new()),
            Some((text, None)) => (cell(text), "as listed".to_owned()),
            Some((text, Some(order))) => (cell(text), cell(order)),
        };
        let scales = match (&contract.layout, contract.scale_placement) {
            (None, _) => "",
            (_, ScalePlacement::Inline) => "inline",
            (_, ScalePlacement::PageEnd) => "page end",
        };
        let graph = match contract.graph_support {
            Never => "never",
            UniformSingleTokenDecode => "single-token decode",
            UniformBatch => "uniform batch",
            Always => "always",
        };
        vec![
            (preset as u32).to_string(),
            format!("`{}`", name_in_header(preset)),
            format!("`{}`", preset.name()),
            layout,
            order,
            kernel_block_cell(&contract),
            if contract.follows_block_stride {
                "yes"
            } else {
                "no"
            }
            .to_owned(),
            match contract.alignment {
                1 => "1 byte".to_owned(),
                bytes => format!("{bytes} bytes"),
            },
            match contract.index_width {
                IndexWidth::Bits32 => "32 bits".to_owned(),
                IndexWidth::Bits64 => "64 bits".to_owned(),
            },
            scales.to_owned(),
            demands_cell(&contract),
            graph.to_owned(),
        ]
    }

    /// Every contract of every preset is in docs/backends.md, with the file that says so.
    #[test]
    fn the_table_of_presets_is_documented() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/backends.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        let is_row = |line: &&str| {
            line.starts_with("| ") && line[2..].starts_with(|c: char| c.is_ascii_digit())
        };
        let mut rows = docs.lines().filter(is_row);
        for &preset in Preset::ALL {
            let line = rows.next().unwrap_or("");
            let cells = line.replace("\\|", "\0");
            let cells: Vec<String> = cells
                .trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().replace('\0', "\\|"))
                .collect();
            let (source, others) = cells.split_last().unwrap();
            assert_eq!(others, row(preset), "{preset:?}");
            let is_path = source.starts_with('`') && source.ends_with(".py`");
            assert!(is_path, "{preset:?}: {source} is no source");
        }
        assert_eq!(rows.next(), None);
    }
}
