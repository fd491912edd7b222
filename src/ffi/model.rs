//! Header section: models.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use super::backend::kvpages_backend;
use super::extensible::{self, extensible};
use super::guard::guard;
use super::handle::{self, Handle, opaque};
use super::input;
use super::spec::{describe_spec, kvpages_spec, read_spec};
use super::status::{Failure, kvpages_status};
use crate::model::Model;

/// A model: its layers, in order.
///
/// Thread-safety: adding a layer changes it, all other calls read it. A plan keeps
/// the layers as they were when it was made.
pub struct kvpages_model(Handle<ModelHandle>);
opaque!(kvpages_model, ModelHandle, "model");

/// A model and its layers' names for C. Both are copied when they change while a plan uses them.
#[derive(Default, Clone)]
pub(super) struct ModelHandle {
    pub model: Arc<Model>,
    pub names: Arc<Vec<CString>>,
    /// For each layer the one it shares with.
    targets: Vec<Option<CString>>,
}

/// One layer. Everything is Copied.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_layer {
    /// sizeof(kvpages_layer) as the caller compiled it.
    pub struct_size: usize,
    /// Its name: UTF-8, not empty, unique in the model.
    pub name: *const c_char,
    /// What it stores. Needed unless shares_with is set; then it is checked
    /// against what the other layer stores.
    pub spec: *const kvpages_spec,
    /// What reads it. May be NULL: such a layer can be planned, but has no view.
    pub backend: *const kvpages_backend,
    /// Name of the layer whose pages this one reads, added before or after it,
    /// which may itself share. NULL for pages of its own.
    pub shares_with: *const c_char,
    /// Query heads on one rank; 0 when it has none.
    pub num_query_heads: u32,
    /// Zero.
    pub reserved0: u32,
}
extensible!(kvpages_layer, reserved0: u32);

/// Creates a model without layers.
///
/// @param[out] out  Owned by the caller: kvpages_model_destroy(). NULL on failure.
/// @return Fails only for NULL.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_create(out: *mut *mut kvpages_model) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::out(out, "out") }?;
        *out = handle::give(ModelHandle::default());
        Ok(())
    })
}

/// Destroys a model. NULL is a no-op. Plans made from it live on.
///
/// @param model  Not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_destroy(model: *mut kvpages_model) {
    // SAFETY: the caller's contract.
    unsafe { handle::destroy(model) }
}

/// Adds a layer behind the others.
///
/// @param model  Changed. Not NULL.
/// @param layer  Copied. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The name is empty or taken, or the spec is
///         wrong, as kvpages_spec_describe() says. The model is as it was.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_add_layer(
    model: *mut kvpages_model,
    layer: *const kvpages_layer,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe { handle::change(model, |model| add_layer(model, extensible::read(layer)?)) }
}

/// Number of layers.
///
/// @param model  Borrowed.
/// @return 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_num_layers(model: *const kvpages_model) -> usize {
    // SAFETY: the caller's contract.
    unsafe { handle::get(model, 0, |model| model.model.layers().len()) }
}

/// The number of a layer.
///
/// @param model     Borrowed. Not NULL.
/// @param name      Borrowed. Not NULL.
/// @param[out] out_index  Its number. Not NULL.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_find_layer(
    model: *const kvpages_model,
    name: *const c_char,
    out_index: *mut usize,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(
            model,
            input::cleared(out_index, "out_index"),
            |model, out| {
                let name = input::text(name, "name")?;
                let found = model.model.find(name);
                *out = found.ok_or_else(|| {
                    Failure::not_found(format!("the model has no layer of the name {name}"))
                })?;
                Ok(())
            },
        )
    }
}

/// Name of a layer.
///
/// @param model  Borrowed.
/// @param layer  Less than kvpages_model_num_layers().
/// @return A string of the model's, Kept until a layer is added or the model is
///         destroyed; NULL when there is no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_layer_name(
    model: *const kvpages_model,
    layer: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(model, ptr::null(), |model| {
            let name = model.names.get(layer);
            name.map_or(ptr::null(), |name| name.as_ptr())
        })
    }
}

/// Name of the layer whose pages a layer reads, which may itself share.
///
/// @param model  Borrowed.
/// @param layer  Less than kvpages_model_num_layers().
/// @return A string of the model's, Kept until a layer is added or the model is
///         destroyed; NULL when the layer has pages of its own, and when there is
///         no such layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_layer_shares_with(
    model: *const kvpages_model,
    layer: usize,
) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe {
        handle::get(model, ptr::null(), |model| {
            let target = model.targets.get(layer).and_then(Option::as_ref);
            target.map_or(ptr::null(), |target| target.as_ptr())
        })
    }
}

/// What a layer with pages of its own stores: as it was described, and what its
/// backend decides.
///
/// @param model     Borrowed. Not NULL.
/// @param layer     Less than kvpages_model_num_layers().
/// @param[out] out  Filled; its pointers are Kept until the model is destroyed. Not
///                  NULL; struct_size set.
/// @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer, or it shares.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_model_get_layer_spec(
    model: *const kvpages_model,
    layer: usize,
    out: *mut kvpages_spec,
) -> kvpages_status {
    // SAFETY: the caller's contract.
    unsafe {
        handle::read(model, extensible::out(out), |model, out| {
            let layers = model.model.layers();
            let found = layers.get(layer).ok_or_else(|| {
                Failure::not_found(format!("layer {layer} of {} of the model", layers.len()))
            })?;
            let spec = found.own_spec().ok_or_else(|| {
                Failure::not_found(format!("layer {} has no pages of its own", found.name))
            })?;
            out.fill(describe_spec(spec));
            Ok(())
        })
    }
}

/// # Safety
/// Pointers in `given` are NULL or valid.
unsafe fn add_layer(model: &mut ModelHandle, given: kvpages_layer) -> Result<(), Failure> {
    input::known_bits(given.reserved0, 0, "kvpages_layer.reserved0")?;
    // SAFETY: the caller's contract.
    let name = unsafe { input::text(given.name, "the layer's name") }?;
    let of_layer = |failure: Failure| failure.of("layer", name);
    // SAFETY: the caller's contract.
    let target = unsafe { input::optional_text(given.shares_with, "shares_with") };
    let target = target.map_err(of_layer)?;
    let spec = if given.spec.is_null() {
        None
    } else {
        // SAFETY: the caller's contract.
        Some(unsafe { read_spec(given.spec) }.map_err(of_layer)?)
    };
    let backend = if given.backend.is_null() {
        None
    } else {
        // SAFETY: the caller's contract.
        let backend = unsafe { handle::shared(given.backend) }.map_err(of_layer)?;
        Some(Arc::clone(&backend.backend))
    };
    let c_name = CString::new(name).unwrap_or_default();
    let core = Arc::make_mut(&mut model.model);
    match (target, spec) {
        (Some(target), spec) => {
            core.share(name, target, spec, backend, given.num_query_heads)?;
        }
        (None, Some(spec)) => {
            core.add(name, spec, backend, given.num_query_heads)?;
        }
        (None, None) => {
            return Err(of_layer(Failure::null("spec, and shares_with too,")));
        }
    }
    Arc::make_mut(&mut model.names).push(c_name);
    let c_target = target.map(|target| CString::new(target).unwrap_or_default());
    model.targets.push(c_target);
    Ok(())
}
