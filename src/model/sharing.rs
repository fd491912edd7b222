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

impl SharingError {
    /// A name that stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            SharingError::TargetMissing { .. } => "share_target_missing",
            SharingError::Cycle { .. } => "share_cycle",
            SharingError::GeometryDiffers { .. } => "share_geometry_differs",
        }
    }
}

impl Model {
    /// For each layer the number of the layer that owns its pages, itself when it has its own.
    pub fn owners(&self) -> Result<Vec<usize>, SharingError> {
        let mut owners: Vec<Option<usize>> = vec![None; self.layers.len()];
        let mut chain = Vec::new();
        for layer in 0..self.layers.len() {
            let owner = self.follow(layer, &owners, &mut chain)?;
            for passed in chain.drain(..) {
                owners[passed] = Some(owner);
            }
        }
        let owners: Vec<usize> = owners.into_iter().flatten().collect();
        for (layer, &owner) in owners.iter().enumerate() {
            self.check_geometry(layer, owner)?;
        }
        Ok(owners)
    }

    /// Follows a chain to a layer with pages of its own, or to one whose owner is known. `chain`
    /// gets the layers on the way.
    fn follow(
        &self,
        layer: usize,
        owners: &[Option<usize>],
        chain: &mut Vec<usize>,
    ) -> Result<usize, SharingError> {
        let mut next = layer;
        loop {
            if let Some(owner) = owners[next] {
                return Ok(owner);
            }
            chain.push(next);
            let Storage::Shared { target, .. } = &self.layers[next].storage else {
                return Ok(next);
            };
            let name = || self.layers[next].name.to_string();
            let found = self
                .find(target)
                .ok_or_else(|| SharingError::TargetMissing {
                    layer: name(),
                    target: target.to_string(),
                })?;
            // A chain longer than the model has come back to a layer it passed.
            if chain.len() > self.layers.len() {
                return Err(SharingError::Cycle {
                    layer: name(),
                    target: target.to_string(),
                });
            }
            next = found;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model(shares: &[(&str, &str)]) -> Model {
        let mut model = Model::new();
        for (name, target) in shares {
            model.share(name, target, None, None, 0).unwrap();
        }
        model
    }

    #[test]
    fn circles_and_missing_targets_are_named() {
        // K02
        let missing = model(&[("a", "z")]).owners();
        assert!(matches!(
            missing,
            Err(SharingError::TargetMissing { layer, target }) if layer == "a" && target == "z"
        ));
        for shares in [
            &[("a", "b"), ("b", "a")][..],
            &[("a", "a")],
            &[("c", "a"), ("a", "a")],
        ] {
            assert!(matches!(
                model(shares).owners(),
                Err(SharingError::Cycle { .. })
            ));
        }
    }

    #[test]
    fn a_long_chain_is_followed_once() {
        let names: Vec<String> = (0..20_000).map(|i| format!("l.{i}")).collect();
        let shares: Vec<(&str, &str)> = names
            .windows(2)
            .map(|pair| (pair[0].as_str(), pair[1].as_str()))
            .collect();
        // The last name is not a layer: the whole chain is walked before that is known.
        assert!(matches!(
            model(&shares).owners(),
            Err(SharingError::TargetMissing { layer, .. }) if layer == "l.19998"
        ));
    }
}
