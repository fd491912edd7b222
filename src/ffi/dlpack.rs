//! Header section: DLPack.

use std::any::Any;
use std::sync::Arc;

use super::cache::kvpages_cache;
use super::guard::guard_or;
use super::handle;
use super::input;
use super::status::kvpages_status;
// The names that dlpack.h has for them, which the header declares and does not define.
use crate::dlpack::{
    self, ManagedUnversioned as DLManagedTensor, ManagedVersioned as DLManagedTensorVersioned,
};

/// Flag of kvpages_cache_export_dlpack(): sets DLPACK_FLAG_BITMASK_READ_ONLY, by
/// which a consumer must not write.
pub const KVPAGES_DLPACK_READ_ONLY: u32 = 1;

/// A view of a layer as a tensor of DLPack 1.1, whose structs dlpack.h of that
/// project defines; it may be included before or after this header. Nothing is
/// copied: the tensor has the view's bytes, shape and strides. Its data is the
/// first element and its byte_offset 0, since some consumers forget to add that. A
/// view without elements has NULL. The device is kDLCPU for memory of the host,
/// pinned or not, and kDLCUDA with the device's number. Types are those of the
/// same names, and KVPAGES_DTYPE_F4_E2M1X2 is kDLFloat4_e2m1fn with 4 bits and 2
/// lanes.
///
/// The tensor keeps the cache's memory, also when the cache is destroyed first,
/// and does not keep blocks from going when the cache shrinks. Like the view, it
/// describes all blocks of the plan: those without memory must not be touched. It
/// does not wait for work on a stream, which the caller and the consumer agree on.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param view      Less than kvpages_cache_num_views(): 0, or which state.
/// @param flags     KVPAGES_DLPACK_* flags.
/// @param[out] out  Owned by the caller, or by the consumer that it is handed to:
///                  its deleter, or kvpages_dlpack_destroy(), is called once, on any
///                  thread. The last one of a destroyed cache gives the memory back,
///                  with all that kvpages_cache_destroy() says of that. NULL on
///                  failure.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is unknown ("unknown_value").
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the description.
/// @note Cost: two allocations on the host; no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_export_dlpack(
    cache: *const kvpages_cache,
    layer: usize,
    view: usize,
    flags: u32,
    out: *mut *mut DLManagedTensorVersioned,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |handle, out| {
            let flags = input::known_bits(flags, KVPAGES_DLPACK_READ_ONLY, "flags")?;
            let (view, allocation) = handle.memory_of(layer, view)?;
            let keeper = Arc::clone(handle.cache()) as Arc<dyn Any + Send + Sync>;
            let read_only = flags & KVPAGES_DLPACK_READ_ONLY != 0;
            *out = dlpack::export(view, allocation, keeper, read_only)?;
            Ok(())
        })
    }
}

/// As kvpages_cache_export_dlpack(), for consumers that do not know the structs of
/// DLPack 1.0, such as PyTorch 2.7 and JAX 0.8. Such a tensor has no flags, so a
/// consumer may write to it.
///
/// @param cache     Borrowed. Not NULL.
/// @param layer     Less than kvpages_cache_num_layers().
/// @param view      Less than kvpages_cache_num_views(): 0, or which state.
/// @param[out] out  Owned by the caller, or by the consumer that it is handed to:
///                  its deleter, or kvpages_dlpack_destroy_unversioned(), is called
///                  once, on any thread. NULL on failure.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
/// @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the description.
/// @note Cost: two allocations on the host; no lock.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_cache_export_dlpack_unversioned(
    cache: *const kvpages_cache,
    layer: usize,
    view: usize,
    out: *mut *mut DLManagedTensor,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(cache, input::cleared(out, "out"), |handle, out| {
            let (view, allocation) = handle.memory_of(layer, view)?;
            let keeper = Arc::clone(handle.cache()) as Arc<dyn Any + Send + Sync>;
            *out = dlpack::export_unversioned(view, allocation, keeper)?;
            Ok(())
        })
    }
}

/// Calls a tensor's deleter, for who has no dlpack.h. NULL is a no-op.
///
/// @param tensor  Not used any more. Whoever made it, its deleter must not throw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_dlpack_destroy(tensor: *mut DLManagedTensorVersioned) {
    guard_or((), || {
        // SAFETY: the caller's contract.
        if let Some(deleter) = unsafe { tensor.as_ref() }.and_then(|tensor| tensor.deleter) {
            // SAFETY: the caller's contract.
            unsafe { deleter(tensor) };
        }
    });
}

/// As kvpages_dlpack_destroy().
///
/// @param tensor  Not used any more. Whoever made it, its deleter must not throw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_dlpack_destroy_unversioned(tensor: *mut DLManagedTensor) {
    guard_or((), || {
        // SAFETY: the caller's contract.
        if let Some(deleter) = unsafe { tensor.as_ref() }.and_then(|tensor| tensor.deleter) {
            // SAFETY: the caller's contract.
            unsafe { deleter(tensor) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Preset;
    use crate::dtype::Dtype;
    use crate::memory::{Host, Memory};
    use crate::spec::{Attention, AttentionFields};
    use crate::view::{Pages, View, attention_view};

    fn view_of(num_blocks: u64) -> View {
        let spec = Attention::new(AttentionFields::full(16, 2, 8, Dtype::F16)).unwrap();
        let backend = Preset::FlashAttentionNhd.backend().unwrap();
        let pages = Pages {
            num_blocks,
            page_bytes: 1024,
            step_bytes: 1024,
            offset_bytes: 512,
            allocation_bytes: 512 + 1024 * num_blocks,
            page_by_page: true,
        };
        attention_view(&spec, &backend, 16, &pages).unwrap()
    }

    /// What dlpack.h demands of a tensor without elements.
    #[test]
    fn a_tensor_has_data_exactly_when_it_has_elements() {
        for num_blocks in [0, 1] {
            let allocation = Host.allocate(2048, 256).unwrap();
            let start = allocation.data().as_ptr();
            let keeper: Arc<dyn Any + Send + Sync> = Arc::new(());
            let view = view_of(num_blocks);
            let tensor = dlpack::export(&view, &allocation, Arc::clone(&keeper), false).unwrap();
            assert_eq!(Arc::strong_count(&keeper), 2);
            // SAFETY: the tensor was just made, and is given back once, at the end.
            unsafe {
                let found = &(*tensor).dl_tensor;
                let shape = std::slice::from_raw_parts(found.shape, found.ndim as usize);
                assert_eq!(shape, view.shape());
                match num_blocks {
                    0 => assert!(found.data.is_null()),
                    _ => assert_eq!(found.data, start.add(512).cast()),
                }
                kvpages_dlpack_destroy(tensor);
            }
            assert_eq!(Arc::strong_count(&keeper), 1);
        }
    }
}
