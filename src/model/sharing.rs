//! Layers that read another layer's pages: who owns them in the end.

use super::{Model, Storage};
use crate::spec::Spec;

/// Why sharing does not resolve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SharingError {
    /// A layer shares with one that the model does not have.
    #[error("layer {layer} shares the cache of {target}, which the model does not have")]
    TargetMissing {
        /// The layer.
        layer: String,
        /// The layer it names.
        target: String,
    },
    /// Layers that share in a circle, so that none has pages.
    #[error("layer {layer} shares the cache of {target}, which leads back to {layer}")]
    Cycle {
        /// The layer.
        layer: String,
        /// The layer it names.
        target: String,
    },
    /// A layer that would read its owner's pages wrongly.
    #[error("layer {layer} shares the cache of {owner}, but {field} differs: {own} and {other}")]
    GeometryDiffers {
        /// The layer.
        layer: String,
        /// The layer that owns the pages.
        owner: String,
        /// What differs.
        field: &'static str,
        /// The layer's value.
        own: String,
        /// The owner's.
        other: String,
    },
}

impl Model {
    /// For each layer the number of the layer that owns its pages, itself when it has its own.
    pub fn owners(&self) -> Result<Vec<usize>, SharingError> {
        (0..self.layers.len())
            .map(|layer| self.owner(layer))
            .collect()
    }

    fn owner(&self, layer: usize) -> Result<usize, SharingError> {
        let mut owner = layer;
        // A chain longer than the model has come back to a layer it passed.
        for _ in 0..=self.layers.len() {
            let Storage::Shared { target, .. } = &self.layers[owner].storage else {
                self.check_geometry(layer, owner)?;
                return Ok(owner);
            };
            owner = self
                .find(target)
                .ok_or_else(|| SharingError::TargetMissing {
                    layer: self.layers[owner].name.to_string(),
                    target: target.to_string(),
                })?;
        }
        let target = match &self.layers[layer].storage {
            Storage::Shared { target, .. } => target.to_string(),
            Storage::Own(_) => String::new(),
        };
        Err(SharingError::Cycle {
            layer: self.layers[layer].name.to_string(),
            target,
        })
    }

    fn check_geometry(&self, layer: usize, owner: usize) -> Result<(), SharingError> {
        let (
            Storage::Shared {
                spec: Some(own), ..
            },
            Storage::Own(other),
        ) = (&self.layers[layer].storage, &self.layers[owner].storage)
        else {
            return Ok(());
        };
        match geometry_difference(own, other) {
            None => Ok(()),
            Some((field, own, other)) => Err(SharingError::GeometryDiffers {
                layer: self.layers[layer].name.to_string(),
                owner: self.layers[owner].name.to_string(),
                field,
                own,
                other,
            }),
        }
    }
}

/// The first way in which two layers could not read the same pages. Windows may differ.
fn geometry_difference(own: &Spec, other: &Spec) -> Option<(&'static str, String, String)> {
    let (own, other) = match (own, other) {
        (Spec::Attention(own), Spec::Attention(other)) => (own, other),
        (Spec::State(a), Spec::State(b)) if a == b => return None,
        _ => {
            let kinds = (own.kind_name().to_owned(), other.kind_name().to_owned());
            return Some(("what is stored", kinds.0, kinds.1));
        }
    };
    let (a, b) = (own.fields(), other.fields());
    let text = |value: &dyn std::fmt::Debug| format!("{value:?}");
    [
        ("block_size", text(&a.block_size), text(&b.block_size)),
        ("num_kv_heads", text(&a.num_kv_heads), text(&b.num_kv_heads)),
        ("head_size", text(&a.head_size), text(&b.head_size)),
        ("head_size_v", text(&a.head_size_v), text(&b.head_size_v)),
        ("dtype", text(&a.dtype), text(&b.dtype)),
        ("quant_mode", text(&a.quant_mode), text(&b.quant_mode)),
        (
            "compress_ratio",
            text(&a.compress_ratio),
            text(&b.compress_ratio),
        ),
        ("the content", text(&own.content()), text(&other.content())),
        (
            "the page",
            text(&own.page().unpadded),
            text(&other.page().unpadded),
        ),
    ]
    .into_iter()
    .find(|(_, a, b)| a != b)
}
