//! Header section: binding caches to an engine's layers.

use std::ffi::c_char;

use super::extensible::{self, extensible};
use super::guard::guard;
use super::input;
use super::status::kvpages_status;
use crate::cache::{bind_layers, layer_index};

/// Layers with a cache, and the engine's layers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvpages_bind_config {
    /// sizeof(kvpages_bind_config) as the caller compiled it.
    pub struct_size: usize,
    /// Names of the layers with a cache, in the order of their declaration.
    pub layer_names: *const *const c_char,
    /// Number of layer_names.
    pub num_layers: usize,
    /// Names of the engine's layers; every layer with a cache is among them.
    pub context_names: *const *const c_char,
    /// Number of context_names.
    pub num_context_names: usize,
    /// Attention modules of one layer; 0 for 1.
    pub num_attention_modules: u64,
    /// Caches that the engine's list holds before; it must be 0.
    pub num_already_bound: u64,
}
extensible!(kvpages_bind_config, num_already_bound: u64);

/// The index of a layer by the numbers in its dotted name: of
/// "model.layers.7.self_attn" it is 7. A number is a part of ASCII digits only.
/// With several attention modules in a layer, the name of an attention layer may
/// hold a second number, its module: of "layers.3.self_attn.1" and 2 modules it
/// is 3 * 2 + 1.
///
/// @param layer_name             Borrowed. Not NULL.
/// @param num_attention_modules  Attention modules of one layer; 0 for 1.
/// @param[out] out_index         The index. Not NULL.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  The name has no number or too many
///         ("layer_index_not_one_integer", "layer_index_too_many_integers"), or
///         its module is out of range ("module_index_out_of_range").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_layer_index(
    layer_name: *const c_char,
    num_attention_modules: u64,
    out_index: *mut u64,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let out = unsafe { input::cleared(out_index, "out_index") }?;
        // SAFETY: the caller's contract.
        let name = unsafe { input::text(layer_name, "layer_name") }?;
        *out = layer_index(name, num_attention_modules.max(1))?;
        Ok(())
    })
}

/// Binds caches to an engine's layers: in the order of the layers' indices, and
/// layers of one index as they were declared.
///
/// @param config          Borrowed. Not NULL.
/// @param[out] out_order  Room for num_layers numbers: layer_names in binding
///                        order. May be NULL when there are none.
/// @param[out] out_bound  Room for num_context_names numbers: for each of
///                        context_names which of layer_names it is, SIZE_MAX for
///                        a layer without a cache. May be NULL when there are
///                        none.
/// @retval KVPAGES_STATUS_INVALID_ARGUMENT  A name has no index, as kvpages_layer_index()
///         says; two layers get one index though their names say otherwise
///         ("layer_index_collision"); or a layer is missing in context_names
///         ("forward_context_missing").
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpages_bind_layers(
    config: *const kvpages_bind_config,
    out_order: *mut usize,
    out_bound: *mut usize,
) -> kvpages_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let config = unsafe { extensible::read(config) }?;
        // SAFETY: the caller's contract.
        let (layers, context, out_order, out_bound) = unsafe {
            (
                input::texts(config.layer_names, config.num_layers, "layer_names")?,
                input::texts(
                    config.context_names,
                    config.num_context_names,
                    "context_names",
                )?,
                input::array_mut(out_order, config.num_layers, "out_order")?,
                input::array_mut(out_bound, config.num_context_names, "out_bound")?,
            )
        };
        let (order, bound) = bind_layers(
            &layers,
            &context,
            config.num_attention_modules.max(1),
            config.num_already_bound,
        )?;
        out_order.copy_from_slice(&order);
        for (out, layer) in out_bound.iter_mut().zip(bound) {
            *out = layer.unwrap_or(usize::MAX);
        }
        Ok(())
    })
}
