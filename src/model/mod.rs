//! A model as its layers: named, in order, each with what it stores and the backend that reads it.

mod sharing;

pub use sharing::SharingError;

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::spec::{Spec, SpecError};

/// Layers in the order they were added.
#[derive(Debug, Clone, Default)]
pub struct Model {
    layers: Vec<Layer>,
    by_name: HashMap<Arc<str>, usize>,
    /// Equal specs are kept once, so that the same memory means the same spec.
    specs: HashMap<Arc<Spec>, ()>,
}

/// One layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its name, unique in the model.
    pub name: Arc<str>,
    /// Where its keys and values are.
    pub storage: Storage,
    /// The backend that reads them; a layer without one can be planned, but has no view.
    pub backend: Option<Arc<Backend>>,
    /// Query heads on one rank.
    pub num_query_heads: u32,
}

/// Where a layer's keys and values are.
#[derive(Debug, Clone)]
pub enum Storage {
    /// In its own pages.
    Own(Arc<Spec>),
    /// In those of another layer.
    Shared {
        /// The layer whose pages are read, which may itself share.
        target: Arc<str>,
        /// What the layer itself says it stores, if it says so.
        spec: Option<Arc<Spec>>,
    },
}

/// Why a layer cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// No name.
    #[error("layer {index}: the name is empty")]
    NameEmpty {
        /// Which layer it would have been.
        index: usize,
    },
    /// A name that another layer has.
    #[error("layer {name}: the model has a layer of that name, number {index}")]
    NameTwice {
        /// The name.
        name: String,
        /// The other layer.
        index: usize,
    },
    /// Something that cannot be stored.
    #[error("layer {name}: {error}")]
    Spec {
        /// The layer.
        name: String,
        /// What is wrong.
        error: SpecError,
    },
}

impl Model {
    /// A model without layers.
    pub fn new() -> Model {
        Model::default()
    }

    /// Adds a layer that has its own pages. When a backend is given, it decides whether pages may
    /// be padded, not the spec.
    pub fn add(
        &mut self,
        name: &str,
        spec: Spec,
        backend: Option<Arc<Backend>>,
        num_query_heads: u32,
    ) -> Result<usize, ModelError> {
        self.check_name(name)?;
        let spec = follow_backend(spec, backend.as_deref());
        let spec = spec.map_err(|error| ModelError::Spec {
            name: name.to_owned(),
            error,
        })?;
        let spec = self.intern(spec);
        Ok(self.push(name, Storage::Own(spec), backend, num_query_heads))
    }

    /// Adds a layer that reads another layer's pages. The other layer may be added later.
    pub fn share(
        &mut self,
        name: &str,
        target: &str,
        spec: Option<Spec>,
        backend: Option<Arc<Backend>>,
        num_query_heads: u32,
    ) -> Result<usize, ModelError> {
        self.check_name(name)?;
        let spec = spec.map(|spec| follow_backend(spec, backend.as_deref()));
        let spec = spec.transpose().map_err(|error| ModelError::Spec {
            name: name.to_owned(),
            error,
        })?;
        let storage = Storage::Shared {
            target: Arc::from(target),
            spec: spec.map(|spec| self.intern(spec)),
        };
        Ok(self.push(name, storage, backend, num_query_heads))
    }

    /// The layers, in the order they were added.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The number of a layer.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    fn check_name(&self, name: &str) -> Result<(), ModelError> {
        if name.is_empty() {
            return Err(ModelError::NameEmpty {
                index: self.layers.len(),
            });
        }
        match self.find(name) {
            Some(index) => Err(ModelError::NameTwice {
                name: name.to_owned(),
                index,
            }),
            None => Ok(()),
        }
    }

    fn intern(&mut self, spec: Spec) -> Arc<Spec> {
        if let Some((known, ())) = self.specs.get_key_value(&spec) {
            return Arc::clone(known);
        }
        let spec = Arc::new(spec);
        self.specs.insert(Arc::clone(&spec), ());
        spec
    }

    fn push(
        &mut self,
        name: &str,
        storage: Storage,
        backend: Option<Arc<Backend>>,
        num_query_heads: u32,
    ) -> usize {
        let index = self.layers.len();
        let name: Arc<str> = Arc::from(name);
        self.by_name.insert(Arc::clone(&name), index);
        self.layers.push(Layer {
            name,
            storage,
            backend,
            num_query_heads,
        });
        index
    }
}

impl Layer {
    /// What the layer stores in its own pages.
    pub fn own_spec(&self) -> Option<&Arc<Spec>> {
        match &self.storage {
            Storage::Own(spec) => Some(spec),
            Storage::Shared { .. } => None,
        }
    }
}

fn follow_backend(spec: Spec, backend: Option<&Backend>) -> Result<Spec, SpecError> {
    match (spec, backend) {
        (Spec::Attention(attention), Some(backend)) => {
            let follows = backend.contract().follows_block_stride;
            let changed = attention.changed(|f| f.indexes_kv_by_block_stride = follows);
            changed.map(Spec::Attention)
        }
        (spec, _) => Ok(spec),
    }
}
