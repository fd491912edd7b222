//! Changes of what an engine asked for, one at a time.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, Contract};
use crate::model::{Layer, Model, Storage};
use crate::plan::{PlanConfig, Policy, Worker};
use crate::spec::{AttentionFields, Spec};

/// One change of what an engine asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// To let the policy choose block sizes.
    ChooseBlockSizes,
    /// To pack the layers of a block together, or not to.
    CrossLayerBlocks(bool),
    /// To store windowed layers as windows.
    HybridManagerOn,
    /// To plan by the policy compact.
    CompactPolicy,
    /// Blocks of `to` tokens instead of `from` for the attention layers of a kind.
    BlockSize {
        /// The kind of layers.
        kind: &'static str,
        /// Tokens of a block now.
        from: u64,
        /// Tokens of a block then.
        to: u64,
    },
    /// A shorter longest sequence.
    MaxModelLen {
        /// Tokens now.
        from: u64,
        /// Tokens then.
        to: u64,
    },
    /// Kernels that are told how far it is from block to block, so that pages may be padded, for the
    /// attention layers of a kind.
    BlockStride {
        /// The kind of layers.
        kind: &'static str,
    },
    /// To say how long a usual request is.
    TypicalLen(u64),
}

impl Change {
    /// What it is about, as a word that programs compare.
    pub fn name(&self) -> &'static str {
        match self {
            Change::ChooseBlockSizes => "choose_block_sizes",
            Change::CrossLayerBlocks(_) => "cross_layer_blocks",
            Change::HybridManagerOn => "hybrid_manager_off",
            Change::CompactPolicy => "policy",
            Change::BlockSize { .. } => "block_size",
            Change::MaxModelLen { .. } => "max_model_len",
            Change::BlockStride { .. } => "block_stride",
            Change::TypicalLen(_) => "typical_len",
        }
    }

    /// The kind of layers that it is about; `None` for all.
    pub fn kind(&self) -> Option<&'static str> {
        match *self {
            Change::BlockSize { kind, .. } | Change::BlockStride { kind } => Some(kind),
            _ => None,
        }
    }

    /// The number before and after, of a change of a number.
    pub fn numbers(&self) -> Option<(u64, u64)> {
        match *self {
            Change::BlockSize { from, to, .. } | Change::MaxModelLen { from, to } => {
                Some((from, to))
            }
            Change::TypicalLen(to) => Some((0, to)),
            _ => None,
        }
    }

    /// Whether it only pays if something holds that nobody said.
    pub(super) fn is_conditional(&self) -> bool {
        matches!(self, Change::TypicalLen(_))
    }

    /// What the engine would ask for with the change; `None` where its layers cannot be so.
    pub fn applied(
        &self,
        workers: &[Worker],
        config: &PlanConfig,
    ) -> Option<(Vec<Worker>, PlanConfig)> {
        let mut config = config.clone();
        match *self {
            Change::ChooseBlockSizes => config.choose_block_sizes = true,
            Change::CrossLayerBlocks(on) => config.cross_layer_blocks = on,
            Change::HybridManagerOn => config.hybrid_manager_off = false,
            Change::CompactPolicy => config.policy = Policy::Compact,
            Change::MaxModelLen { to, .. } => config.limits.max_model_len = to,
            Change::TypicalLen(to) => config.typical_len = to,
            Change::BlockSize { .. } | Change::BlockStride { .. } => {
                return Some((self.applied_to_layers(workers)?, config));
            }
        }
        Some((workers.to_vec(), config))
    }

    fn applied_to_layers(&self, workers: &[Worker]) -> Option<Vec<Worker>> {
        // Workers mostly share a model, and its copy is shared again.
        let mut changed: Vec<(*const Model, Arc<Model>)> = Vec::new();
        let mut all = Vec::with_capacity(workers.len());
        for worker in workers {
            let own = Arc::as_ptr(&worker.model);
            let known = changed.iter().find(|(of, _)| *of == own);
            let model = match known {
                Some((_, model)) => Arc::clone(model),
                None => {
                    let model = Arc::new(self.applied_to_model(&worker.model)?);
                    changed.push((own, Arc::clone(&model)));
                    model
                }
            };
            all.push(Worker { model, ..*worker });
        }
        Some(all)
    }

    fn applied_to_model(&self, model: &Model) -> Option<Model> {
        let owners = model.owners().ok()?;
        let mut changed = Model::new();
        for (layer, &owner) in model.layers().iter().zip(&owners) {
            let owner = model.layers().get(owner)?.own_spec()?;
            let is_meant = self.means(owner);
            let spec = |spec: &Spec| match is_meant {
                true => self.changed_spec(spec),
                false => Some(spec.clone()),
            };
            let backend = match is_meant {
                true => self.changed_backend(layer)?,
                false => layer.backend.clone(),
            };
            let added = match &layer.storage {
                Storage::Own(own) => {
                    changed.add(&layer.name, spec(own)?, backend, layer.num_query_heads)
                }
                Storage::Shared { target, spec: None } => {
                    changed.share(&layer.name, target, None, backend, layer.num_query_heads)
                }
                Storage::Shared {
                    target,
                    spec: Some(own),
                } => {
                    let spec = Some(spec(own)?);
                    changed.share(&layer.name, target, spec, backend, layer.num_query_heads)
                }
            };
            added.ok()?;
        }
        Some(changed)
    }

    /// Whether the change is about layers that store `spec`.
    fn means(&self, spec: &Spec) -> bool {
        match *self {
            Change::BlockSize { kind, from, .. } => {
                is_attention(spec, kind) && spec.block_size() == from
            }
            Change::BlockStride { kind } => is_attention(spec, kind),
            _ => false,
        }
    }

    fn changed_spec(&self, spec: &Spec) -> Option<Spec> {
        let attention = spec.as_attention()?;
        let change = |fields: &mut AttentionFields| match *self {
            Change::BlockSize { to, .. } => {
                fields.block_size = to;
                // Padding that was given is for the size that it was given with.
                fields.page_size_padded = None;
            }
            Change::BlockStride { .. } => fields.indexes_kv_by_block_stride = true,
            _ => {}
        };
        attention.changed(change).ok().map(Spec::Attention)
    }

    /// The layer's backend with the change; `None` inside where it has none, outside where there can be
    /// no such backend.
    fn changed_backend(&self, layer: &Layer) -> Option<Option<Arc<Backend>>> {
        match (self, &layer.backend) {
            (Change::BlockStride { .. }, Some(backend))
                if !backend.contract().follows_block_stride =>
            {
                let contract = Contract {
                    follows_block_stride: true,
                    ..backend.contract().clone()
                };
                Some(Some(Arc::new(Backend::new(contract).ok()?)))
            }
            (_, backend) => Some(backend.clone()),
        }
    }
}

fn is_attention(spec: &Spec, kind: &str) -> bool {
    spec.as_attention().is_some() && spec.kind_name() == kind
}

impl fmt::Display for Change {
    /// As the subject of a sentence: "… would hold so many tokens".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Change::ChooseBlockSizes => f.write_str("block sizes left to the policy"),
            Change::CrossLayerBlocks(true) => f.write_str("packing all layers of a block together"),
            Change::CrossLayerBlocks(false) => {
                f.write_str("not packing the layers of a block together")
            }
            Change::HybridManagerOn => f.write_str("storing windowed layers as windows"),
            Change::CompactPolicy => f.write_str("the policy compact"),
            Change::BlockSize { kind, from, to } => {
                write!(
                    f,
                    "blocks of {to} tokens for {kind} layers instead of {from}"
                )
            }
            Change::MaxModelLen { from, to } => {
                write!(f, "a longest sequence of {to} tokens instead of {from}")
            }
            Change::BlockStride { kind } => write!(
                f,
                "kernels that are given the bytes from block to block, so that pages may be padded, for {kind} layers"
            ),
            Change::TypicalLen(len) => {
                write!(
                    f,
                    "saying that a usual request has {len} tokens, if it has,"
                )
            }
        }
    }
}
