//! Header section: attention backends.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::status::{Failure, kvpages_status};
use crate::backend::{
    Backend, Contract, GraphSupport, IndexWidth, KernelBlockSize, Layout, Preset, ScalePlacement,
    select_kernel_block_size,
};
use crate::spec::QuantMode;

/// An attention backend: how its kernels read a layer's pages, and what they
/// demand of them. Immutable: all calls on it may run concurrently.
pub struct kvpages_backend(Handle<BackendHandle>);
opaque!(kvpages_backend, BackendHandle, "backend");

pub(super) struct BackendHandle {
    pub backend: Arc<Backend>,
    name: CString,
}

/// How far a backend's kernels can be captured into a CUDA graph.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvpages_graph_support {
    /// Not at all.
    Never = 0,
    /// Batches in which every request decodes one token.
    UniformSingleTokenDecode = 1,
    /// Batches in which every request has the same number of tokens.
    UniformBatch = 2,
    /// Any batch.
    Always = 3,
}

/// Contracts of known kernels, as vLLM 0.26 drives them. docs/backends.md lists
/// their layouts.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum kvpages_preset {
    FlashAttentionNhd = 1,
    FlashAttentionHnd = 2,
    TritonNhd = 3,
    TritonHnd = 4,
    FlashInferNhd = 5,
    FlashInferHnd = 6,
    FlashAttentionDiffKvNhd = 7,
    FlashAttentionDiffKvHnd = 8,
    FlexAttention = 9,
    CpuAttention = 10,
    RocmAttention = 11,
    RocmAiterFlashAttention = 12,
    RocmAiterUnifiedAttention = 13,
    HpcAttention = 14,
    TurboQuant = 15,
    SlidingConvolution = 16,
    HiddenState = 17,
    TritonMla = 18,
    FlashMla = 19,
    FlashMlaSparse = 20,
    FlashInferMla = 21,
    FlashInferMlaSparse = 22,
    RocmAiterMla = 23,
    RocmAiterMlaSparse = 24,
    DeepseekV32Indexer = 25,
    DeepseekV4Mla = 26,
    DeepseekV4Indexer = 27,
    DeepseekV4SlidingWindow = 28,
    DeepseekV4Compressor = 29,
    Mamba1 = 30,
    Mamba2 = 31,
    ShortConvolution = 32,
    LinearAttention = 33,
    GatedDeltaNet = 34,
}

/// Flag of kvpages_backend_config: the kernels step from block to block by a
/// stride they are given, so pages may be padded or packed. Without it a page
/// must be dense.
pub const KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE: u32 = 1;
/// Flag of kvpages_backend_config: keys and values must be equally wide, even
/// where the layout could hold others.
pub const KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS: u32 = 2;
/// Flag of kvpages_backend_config: per-token-head scales lie behind the data of a
/// page, outside the view. Without it they lie behind each key and each value, as
/// part of the content axis.
pub const KVPAGES_BACKEND_SCALES_AT_PAGE_END: u32 = 4;

/// A layout for layers of one quantisation mode. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_quantised_layout {
    /// One of KVPAGES_QUANT_MODE_*.
    pub quant_mode: u32,
    /// Zero.
    pub reserved0: u32,
    /// As kvpages_backend_config.layout.
    pub layout: *const c_char,
    /// As kvpages_backend_config.memory_order.
    pub memory_order: *const c_char,
}

/// What a backend is. Everything is Copied.
///
/// A layout names the view's dimensions, outermost first: axes between bars,
/// fused axes joined by a star. The axes are block (kernel blocks), kv (key, then
/// value), head (kv heads), token (slots of a kernel block) and content (elements
/// of one key or value of one token and head, as the quantisation mode packs
/// them). Their sizes follow from the layer; nothing is guessed from a number.
/// Examples: "block | head | token | kv*content" with the memory order
/// "block | token | head | kv*content" is the packed NHD layout;
/// "kv | block | token | head | content" keeps all keys before all values.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_backend_config {
    /// sizeof(kvpages_backend_config) as the caller compiled it.
    pub struct_size: usize,
    /// The backend's name: its identity, and what messages call it. Not empty.
    pub name: *const c_char,
    /// The dimensions of a view. NULL for a backend of state layers only.
    pub layout: *const c_char,
    /// The same dimensions in the order in which they lie in memory. NULL when
    /// they lie as they are listed.
    pub memory_order: *const c_char,
    /// Layouts that replace it for layers of a quantisation mode.
    pub quantised_layouts: *const kvpages_quantised_layout,
    /// Number of quantised_layouts.
    pub num_quantised_layouts: usize,
    /// Kernel block sizes, in tokens, that the kernels take.
    pub kernel_block_sizes: *const u64,
    /// Number of kernel_block_sizes.
    pub num_kernel_block_sizes: usize,
    /// The kernels take any multiple of one of these, in tokens.
    pub kernel_block_multiples: *const u64,
    /// Number of kernel_block_multiples. Together with kernel_block_sizes at
    /// least one.
    pub num_kernel_block_multiples: usize,
    /// Key-value heads that the kernels are made for; 0 for any number.
    pub num_kv_heads: u64,
    /// Bytes that the first element of every block must be a multiple of: a power
    /// of two up to 4096; 0 for 1.
    pub alignment_bytes: u64,
    /// Bits of the integers that the kernels compute element offsets with: 32 or
    /// 64; 0 for 64.
    pub index_bits: u32,
    /// KVPAGES_BACKEND_* flags.
    pub flags: u32,
    /// One of KVPAGES_GRAPH_SUPPORT_*.
    pub graph_support: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_backend_config, reserved0: u32);

/// What a backend takes and demands.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_backend_info {
    /// sizeof(kvpages_backend_info) as the caller compiled it.
    pub struct_size: usize,
    /// Tokens of the smallest kernel block that the kernels take.
    pub smallest_kernel_block: u64,
    /// Key-value heads that the kernels are made for; 0 for any number.
    pub num_kv_heads: u64,
    /// Bytes that the first element of every block is a multiple of.
    pub alignment_bytes: u64,
    /// Bits of the integers that the kernels compute element offsets with.
    pub index_bits: u32,
    /// KVPAGES_BACKEND_* flags.
    pub flags: u32,
    /// One of KVPAGES_GRAPH_SUPPORT_*.
    pub graph_support: u32,
    /// 1 when the backend has a layout for attention layers.
    pub has_layout: u32,
}
extensible!(kvpages_backend_info, has_layout: u32);

/// Creates a backend.
///
/// @param config    Copied. Not NULL.
/// @param[out] out  Owned by the caller: kvpages_backend_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The layout cannot be read, or a number
///         is out of range; the message has the part or the field.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_backend_create(
    config: *const kvpages_backend_config,
    out: *mut *mut kvpages_backend,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        // SAFETY: the caller's contract.
        let contract = unsafe { read_contract(extensible::read(config)?) }?;
        *out = give(Backend::new(contract)?);
        Ok(())
    })
}

/// Creates a backend from a known contract.
///
/// @param preset    One of KVPAGES_PRESET_*.
/// @param[out] out  Owned by the caller: kvpages_backend_destroy(). NULL on
///                  failure.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no preset of that number.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_backend_create_preset(
    preset: u32,
    out: *mut *mut kvpages_backend,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out, "out") }?;
        *out = give(input::listed::<Preset>(preset, "preset")?.backend()?);
        Ok(())
    })
}

/// Destroys a backend. NULL is a no-op. Models that use it keep it alive.
///
/// @param backend  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_backend_destroy(backend: *mut kvpages_backend) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(backend) }
}

/// Name of a backend.
///
/// @param backend  Borrowed.
/// @return A string of the backend's; empty for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_backend_name(backend: *const kvpages_backend) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe { handle::get(backend, c"".as_ptr(), |backend| backend.name.as_ptr()) }
}

/// What a backend takes and demands.
///
/// @param backend   Borrowed. Not NULL.
/// @param[out] out  Filled. Not NULL; struct_size set.
/// @return Fails only for NULL and for a struct_size that no version has.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_backend_get(
    backend: *const kvpages_backend,
    out: *mut kvpages_backend_info,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(backend, extensible::out(out), |backend, out| {
            out.fill(describe(&backend.backend));
            Ok(())
        })
    }
}

/// The kernel block size that several backends agree on for a block: the block
/// itself when all take it, else the largest exact size of any of them that
/// divides it and that all take.
///
/// @param block_size    Tokens of a block. At least 1.
/// @param backends      Borrowed. num_backends pointers, none NULL.
/// @param num_backends  May be 0.
/// @param[out] out      Tokens of a kernel block. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no such size (kind
///         "no_common_block_size"); the message names what the backends take.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_select_kernel_block_size(
    block_size: u64,
    backends: *const *const kvpages_backend,
    num_backends: usize,
    out: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, pointers) = unsafe {
            (
                input::cleared(out, "out")?,
                input::array(backends, num_backends, "backends")?,
            )
        };
        let mut all = input::reserve(num_backends, "backends")?;
        for (i, &pointer) in pointers.iter().enumerate() {
            // SAFETY: the caller's contract.
            let backend = unsafe { handle::shared(pointer) }.map_err(|f| f.at(i))?;
            all.push(&*backend.backend);
        }
        *out = select_kernel_block_size(block_size, &all)?;
        Ok(())
    })
}

fn describe(backend: &Backend) -> kvpages_backend_info {
    let contract = backend.contract();
    let flag = |set, flag| if set { flag } else { 0 };
    kvpages_backend_info {
        struct_size: 0,
        smallest_kernel_block: backend.smallest_kernel_block(),
        num_kv_heads: contract.num_kv_heads.unwrap_or(0),
        alignment_bytes: contract.alignment,
        index_bits: match contract.index_width {
            IndexWidth::Bits32 => 32,
            IndexWidth::Bits64 => 64,
        },
        flags: flag(
            contract.follows_block_stride,
            KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE,
        ) | flag(
            contract.needs_equal_kv_widths,
            KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS,
        ) | flag(
            contract.scale_placement == ScalePlacement::PageEnd,
            KVPAGES_BACKEND_SCALES_AT_PAGE_END,
        ),
        graph_support: contract.graph_support as u32,
        has_layout: u32::from(contract.layout.is_some()),
    }
}

fn give(backend: Backend) -> *mut kvpages_backend {
    // A name that came in as a C string has no NUL inside.
    let name = CString::new(backend.name()).unwrap_or_default();
    handle::give(BackendHandle {
        backend: Arc::new(backend),
        name,
    })
}

/// # Safety
/// Strings and arrays are NULL or as long as they are said to be.
unsafe fn read_contract(given: kvpages_backend_config) -> Result<Contract, Failure> {
    let known = KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE
        | KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS
        | KVPAGES_BACKEND_SCALES_AT_PAGE_END;
    let flags = input::known_bits(given.flags, known, "kvpages_backend_config.flags")?;
    input::known_bits(given.reserved0, 0, "kvpages_backend_config.reserved0")?;
    // SAFETY: the caller's contract.
    let (name, exact, multiples, quantised) = unsafe {
        (
            input::text(given.name, "the backend's name")?,
            input::array(
                given.kernel_block_sizes,
                given.num_kernel_block_sizes,
                "kernel_block_sizes",
            )?,
            input::array(
                given.kernel_block_multiples,
                given.num_kernel_block_multiples,
                "kernel_block_multiples",
            )?,
            input::array(
                given.quantised_layouts,
                given.num_quantised_layouts,
                "quantised_layouts",
            )?,
        )
    };
    let mut kernel_block_sizes =
        input::reserve(exact.len() + multiples.len(), "kernel block sizes")?;
    kernel_block_sizes.extend(exact.iter().map(|&size| KernelBlockSize::Exact(size)));
    kernel_block_sizes.extend(
        multiples
            .iter()
            .map(|&base| KernelBlockSize::MultipleOf(base)),
    );
    let mut quantised_layouts = input::reserve(quantised.len(), "quantised_layouts")?;
    for (i, entry) in quantised.iter().enumerate() {
        input::known_bits(entry.reserved0, 0, "kvpages_quantised_layout.reserved0")?;
        let mode = input::listed::<QuantMode>(entry.quant_mode, "quant_mode")?;
        // SAFETY: the caller's contract.
        let layout = unsafe { read_layout(entry.layout, entry.memory_order) }?;
        let layout = layout.ok_or_else(|| Failure::null("layout").at(i))?;
        quantised_layouts.push((mode, layout));
    }
    let graph = GraphSupport::ALL
        .into_iter()
        .find(|level| *level as u32 == given.graph_support);
    Ok(Contract {
        name: name.to_owned(),
        // SAFETY: the caller's contract.
        layout: unsafe { read_layout(given.layout, given.memory_order) }?,
        quantised_layouts,
        kernel_block_sizes,
        scale_placement: if flags & KVPAGES_BACKEND_SCALES_AT_PAGE_END != 0 {
            ScalePlacement::PageEnd
        } else {
            ScalePlacement::Inline
        },
        needs_equal_kv_widths: flags & KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS != 0,
        num_kv_heads: (given.num_kv_heads != 0).then_some(given.num_kv_heads),
        follows_block_stride: flags & KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE != 0,
        index_width: match given.index_bits {
            32 => IndexWidth::Bits32,
            0 | 64 => IndexWidth::Bits64,
            other => {
                return Err(Failure::invalid(
                    "unknown_value",
                    format!("index_bits is {other}; it is 32 or 64"),
                ));
            }
        },
        alignment: given.alignment_bytes.max(1),
        graph_support: graph.ok_or_else(|| {
            Failure::invalid(
                "unknown_value",
                format!(
                    "graph_support is {}, which is not one of its values",
                    given.graph_support
                ),
            )
        })?,
    })
}

/// # Safety
/// The strings are NULL or NUL-terminated.
unsafe fn read_layout(
    layout: *const c_char,
    memory_order: *const c_char,
) -> Result<Option<Layout>, Failure> {
    // SAFETY: the caller's contract.
    let (layout, order) = unsafe {
        (
            input::optional_text(layout, "layout")?,
            input::optional_text(memory_order, "memory_order")?,
        )
    };
    match (layout, order) {
        (Some(layout), order) => Ok(Some(Layout::parse(layout, order)?)),
        (None, None) => Ok(None),
        (None, Some(order)) => Err(Failure::invalid(
            "layout_order",
            format!("memory_order is \"{order}\", but there is no layout"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_core() {
        assert_eq!(kvpages_preset::GatedDeltaNet as usize, Preset::ALL.len());
        for (number, preset) in [
            (kvpages_preset::RocmAttention as u32, Preset::RocmAttention),
            (kvpages_preset::HiddenState as u32, Preset::HiddenState),
            (kvpages_preset::TritonMla as u32, Preset::TritonMla),
            (kvpages_preset::DeepseekV4Mla as u32, Preset::DeepseekV4Mla),
            (kvpages_preset::Mamba1 as u32, Preset::Mamba1),
        ] {
            assert_eq!(Preset::try_from(number), Ok(preset));
        }
        assert_eq!(
            kvpages_graph_support::UniformBatch as u32,
            GraphSupport::UniformBatch as u32
        );
    }
}
