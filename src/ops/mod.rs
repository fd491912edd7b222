//! Operations on blocks through views: zero, copy, write, gather.
//!
//! Here calls are checked and put into the terms of the bodies in `kernels/`, which do the work: on
//! the host they are compiled by `build.rs`. Everything that a call needs is taken when [`Ops`] is
//! made, so a call that succeeds takes no memory and no lock.

#![allow(unsafe_code)]

mod blocks;
mod device;
mod error;
mod rows;
mod strided;
#[cfg(test)]
mod tests;

pub use blocks::{BlockCopy, Selection};
pub use error::OpsError;
pub use rows::{Gather, LayerRows, RowSlots, Write};
pub use strided::{RankMemory, StridedError, copy_strided};

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::cuda::Context;
use crate::spec::Spec;
use crate::view::{BlockRuns, View};
use blocks::{Blocks, Place};
use device::Device;
use rows::Stored;

/// A layer of a cache, and where its memory is.
#[derive(Debug, Clone, Copy)]
pub struct LayerMemory<'a> {
    /// Its name.
    pub name: &'a str,
    /// The group whose block table it follows.
    pub group: usize,
    /// The number of its allocation.
    pub allocation: usize,
    /// The first byte of the allocation.
    pub data: NonNull<u8>,
    /// Bytes of the allocation.
    pub allocation_bytes: u64,
    /// Where its pages are.
    pub runs: BlockRuns,
    /// What it stores, and its first view, proven; none when no backend says how its pages are read.
    pub read: Option<(&'a Spec, &'a View)>,
}

/// What a cache's operations are made for.
#[derive(Debug, Clone)]
pub struct OpsConfig {
    /// Most blocks that the cache can have.
    pub num_blocks: u64,
    /// Blocks that it has; they change when it is resized.
    pub present_blocks: Arc<AtomicU64>,
    /// The device whose memory the cache lies in; none when it is the host's.
    pub device: Option<Arc<Context>>,
    /// Groups of the cache.
    pub num_groups: usize,
    /// Most block ids, or pairs of them, in one call; 0 for all blocks.
    pub max_block_ids: u64,
    /// Calls that may be under way at once.
    pub max_concurrency: u64,
}

/// Operations on the blocks of one cache, with the room that they need.
#[derive(Debug)]
pub struct Ops {
    layers: Vec<Layer>,
    /// Layers that callers can name: the first ones.
    num_layers: usize,
    num_groups: usize,
    blocks: Blocks,
    device: Option<Device>,
}

/// What is kept of a layer.
#[derive(Debug)]
struct Layer {
    name: Box<str>,
    group: usize,
    /// Its pages, in the places of [`Blocks`].
    place: usize,
    span: u64,
    /// How rows of tokens are stored; why not, for a layer that takes none.
    stored: Result<Stored, Box<str>>,
}

impl Ops {
    /// Prepares operations on `layers`, those of one cache in its order. Layers without a view come
    /// last and have no number: their blocks are cleared and copied with those of their group.
    ///
    /// # Safety
    /// The layers' memory is the host's or that of the device stated, holds what the views say, and
    /// stays where it is as long as this value is used. Nothing else uses the bytes that a call reads
    /// or writes during the call; on a device, until the call's stream has done it.
    pub unsafe fn new(layers: &[LayerMemory<'_>], config: &OpsConfig) -> Result<Ops, OpsError> {
        if config.max_concurrency == 0 {
            return Err(OpsError::NoConcurrency);
        }
        let mut places: Vec<Place> = Vec::with_capacity(layers.len());
        for layer in layers {
            let place = Place::of(layer);
            if !places.iter().any(|known| known.is_at(&place)) {
                places.push(place);
            }
        }
        places.sort_by_key(|place| (place.allocation, place.offset));
        let mut kept = Vec::with_capacity(layers.len());
        for layer in layers {
            let at = Place::of(layer);
            let place = places.iter().position(|known| known.is_at(&at));
            kept.push(Layer {
                name: layer.name.into(),
                group: layer.group,
                // Every layer's place was put there above.
                place: place.unwrap_or(0),
                span: layer.runs.span_bytes,
                stored: match layer.read {
                    Some((spec, view)) => {
                        Stored::of(layer, spec, view).map_err(String::into_boxed_str)
                    }
                    None => Err("no backend says how its pages are read".into()),
                },
            });
        }
        let blocks = Blocks::new(places, config)?;
        let device = config.device.as_ref().map(Device::new).transpose()?;
        Ok(Ops {
            device,
            num_layers: layers.iter().filter(|layer| layer.read.is_some()).count(),
            layers: kept,
            num_groups: config.num_groups,
            blocks,
        })
    }

    fn layer(&self, layer: usize) -> Result<&Layer, OpsError> {
        let found = self.layers[..self.num_layers].get(layer);
        found.ok_or(OpsError::NoLayer {
            layer,
            num_layers: self.num_layers,
        })
    }
}
