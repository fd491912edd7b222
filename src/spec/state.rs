//! Layers whose memory does not grow with the sequence: Mamba, linear attention, convolutions.

use super::{PageBytes, SpecError, StateCacheMode, positive};
use crate::dtype::Dtype;
use crate::num::{product, sum};

/// What computes the state. Layers of different kinds never share one spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum StateKind {
    /// Selective state space, first version.
    Mamba1 = 1,
    /// Selective state space, second version.
    Mamba2 = 2,
    /// A short convolution.
    ShortConv = 3,
    /// Linear attention.
    Linear = 4,
    /// Gated delta net.
    GatedDeltaNet = 5,
    /// Anything else.
    Custom = 6,
}

impl StateKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [StateKind; 6] = [
        StateKind::Mamba1,
        StateKind::Mamba2,
        StateKind::ShortConv,
        StateKind::Linear,
        StateKind::GatedDeltaNet,
        StateKind::Custom,
    ];

    /// The name people use.
    pub const fn name(self) -> &'static str {
        match self {
            StateKind::Mamba1 => "mamba1",
            StateKind::Mamba2 => "mamba2",
            StateKind::ShortConv => "short_conv",
            StateKind::Linear => "linear",
            StateKind::GatedDeltaNet => "gdn",
            StateKind::Custom => "custom",
        }
    }
}

/// Everything that describes a state layer. Plain data: [`State::new`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateFields {
    /// What computes the state.
    pub kind: StateKind,
    /// Tokens of one block.
    pub block_size: u64,
    /// Element type of each state.
    pub dtypes: Vec<Dtype>,
    /// Dimensions of each state.
    pub ndims: Vec<u32>,
    /// Sizes of all states' dimensions, one state after another.
    pub dims: Vec<u64>,
    /// Bytes of one page, padding included.
    pub page_size_padded: Option<u64>,
    /// When the state of an earlier position is kept.
    pub cache_mode: StateCacheMode,
    /// Further states that a request holds for speculative tokens.
    pub num_speculative_blocks: u64,
}

/// A state layer that can be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    fields: StateFields,
    offsets: Vec<u64>,
    page: PageBytes,
}

/// One state of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatePart<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes of its dimensions.
    pub shape: &'a [u64],
    /// Where it starts in the page, in bytes.
    pub offset: u64,
}

impl State {
    /// Checks `fields` and works out where each state lies in the page.
    pub fn new(fields: StateFields) -> Result<State, SpecError> {
        positive("block_size", fields.block_size)?;
        positive("page_size_padded", fields.page_size_padded.unwrap_or(1))?;
        if fields.dtypes.len() != fields.ndims.len() {
            return Err(SpecError::StateListsDiffer {
                shapes: fields.ndims.len(),
                dtypes: fields.dtypes.len(),
            });
        }
        positive("the number of states", fields.dtypes.len() as u64)?;
        let wanted = sum("the dimensions", fields.ndims.iter().map(|&n| u64::from(n)))?;
        if wanted != fields.dims.len() as u64 {
            return Err(SpecError::StateDimsDiffer {
                wanted,
                given: fields.dims.len(),
            });
        }
        let (offsets, real) = place(&fields)?;
        let padded = fields.page_size_padded.unwrap_or(real);
        if padded < real {
            return Err(SpecError::PaddedBelowPage {
                padded,
                unpadded: real,
            });
        }
        for dtype in &fields.dtypes {
            if !padded.is_multiple_of(dtype.bytes()) {
                return Err(SpecError::PageNotWholeElements {
                    page: padded,
                    dtype: dtype.name(),
                    element_bytes: dtype.bytes(),
                });
            }
        }
        Ok(State {
            fields,
            offsets,
            page: PageBytes {
                real,
                unpadded: real,
                padded,
            },
        })
    }

    /// A spec with some fields changed and every other one kept.
    pub fn changed(&self, change: impl FnOnce(&mut StateFields)) -> Result<State, SpecError> {
        let mut fields = self.fields.clone();
        change(&mut fields);
        State::new(fields)
    }

    /// What the layer was described with.
    pub fn fields(&self) -> &StateFields {
        &self.fields
    }

    /// Bytes of one page.
    pub fn page(&self) -> PageBytes {
        self.page
    }

    /// The states, in the order they lie in the page.
    pub fn parts(&self) -> impl Iterator<Item = StatePart<'_>> {
        let mut dims = self.fields.dims.as_slice();
        let per_state = self
            .fields
            .dtypes
            .iter()
            .zip(&self.fields.ndims)
            .zip(&self.offsets);
        per_state.map(move |((&dtype, &ndim), &offset)| {
            let (shape, rest) = dims.split_at(ndim as usize);
            dims = rest;
            StatePart {
                dtype,
                shape,
                offset,
            }
        })
    }
}

/// Where each state starts, and where the last one ends.
fn place(fields: &StateFields) -> Result<(Vec<u64>, u64), SpecError> {
    let mut offsets = Vec::with_capacity(fields.dtypes.len());
    let mut offset = 0u64;
    let mut dims = fields.dims.as_slice();
    for (state, (dtype, &ndim)) in fields.dtypes.iter().zip(&fields.ndims).enumerate() {
        let (shape, rest) = dims.split_at(ndim as usize);
        dims = rest;
        for &size in shape {
            positive("a state's dimension", size)?;
        }
        if !offset.is_multiple_of(dtype.bytes()) {
            return Err(SpecError::StateMisaligned {
                state,
                offset,
                dtype: dtype.name(),
                element_bytes: dtype.bytes(),
            });
        }
        offsets.push(offset);
        let elements = product("a state", shape.iter().copied())?;
        let bytes = product("a state", [elements, dtype.bytes()])?;
        offset = sum("the states", [offset, bytes])?;
    }
    Ok((offsets, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(shapes: &[(&[u64], Dtype)], padded: Option<u64>) -> Result<State, SpecError> {
        State::new(StateFields {
            kind: StateKind::Mamba2,
            block_size: 16,
            dtypes: shapes.iter().map(|s| s.1).collect(),
            ndims: shapes.iter().map(|s| s.0.len() as u32).collect(),
            dims: shapes.iter().flat_map(|s| s.0.iter().copied()).collect(),
            page_size_padded: padded,
            cache_mode: StateCacheMode::None,
            num_speculative_blocks: 0,
        })
    }

    #[test]
    fn states_lie_one_after_another() {
        let spec = state(&[(&[3, 8], Dtype::Bf16), (&[2, 4], Dtype::F32)], Some(88)).unwrap();
        assert_eq!((spec.page().real, spec.page().padded), (80, 88));
        let parts: Vec<_> = spec.parts().collect();
        assert_eq!((parts[0].shape, parts[0].offset), (&[3, 8][..], 0));
        assert_eq!((parts[1].shape, parts[1].offset), (&[2, 4][..], 48));
    }

    #[test]
    fn states_that_cannot_be_addressed_are_refused() {
        assert!(matches!(
            state(&[(&[25], Dtype::Bf16), (&[2, 4], Dtype::F32)], None),
            Err(SpecError::StateMisaligned {
                state: 1,
                offset: 50,
                ..
            })
        ));
        assert!(matches!(
            state(&[(&[3, 8], Dtype::Bf16), (&[2, 4], Dtype::F32)], Some(86)),
            Err(SpecError::PageNotWholeElements { page: 86, .. })
        ));
        assert!(matches!(
            state(&[(&[8], Dtype::Bf16)], Some(8)),
            Err(SpecError::PaddedBelowPage {
                padded: 8,
                unpadded: 16
            })
        ));
        assert!(matches!(state(&[], None), Err(SpecError::Zero { .. })));
    }
}
