//! Rows of tokens: how a layer stores them, and where.

use super::{LayerMemory, Ops, OpsError};
use crate::cuda::StreamRef;
use crate::dtype::Dtype;
use crate::kernels::device::Way;
use crate::kernels::{self as kernel, Form, RowType, Rows, Slots};
use crate::num;
use crate::spec::{AttentionKind, Content, QuantMode, Spec};
use crate::view::{Axes, View};

/// The rows of one layer, outside its cache. Strides are in elements; 0 means without gaps.
#[derive(Debug, Clone, Copy)]
pub struct LayerRows {
    /// The layer's number in the cache.
    pub layer: usize,
    /// The first token's first key, or latent.
    pub keys: *mut u8,
    /// The first token's first value, or the second part of a latent.
    pub values: *mut u8,
    /// From token to token.
    pub key_token_stride: u64,
    /// From head to head.
    pub key_head_stride: u64,
    /// From token to token.
    pub value_token_stride: u64,
    /// From head to head.
    pub value_head_stride: u64,
    /// Of a latent: elements of its first part; 0 when it comes in one piece.
    pub latent_elements: u64,
    /// fp8 with one scale: a stored number times this is the number meant. 0 for 1.
    pub key_scale: f32,
    /// As `key_scale`, for values.
    pub value_scale: f32,
}

/// Rows to store.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    /// The slot of each row; −1 for a row of no token.
    pub slots: *const [i64],
    /// Element type of the rows.
    pub dtype: Dtype,
    /// Which fp8 a layer of plain bytes holds.
    pub fp8_format: Option<Dtype>,
}

/// Rows to read.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// What to read.
    pub slots: RowSlots,
    /// Element type of the rows.
    pub dtype: Dtype,
    /// Which fp8 a layer of plain bytes holds.
    pub fp8_format: Option<Dtype>,
}

/// Where rows are: arrays of the host, or of the device whose memory the cache lies in.
#[derive(Debug, Clone, Copy)]
pub enum RowSlots {
    /// The slot of each row; a row of slot −1 stays as it is.
    Slots(*const [i64]),
    /// All slots of these blocks.
    Blocks(*const [i32]),
}

/// What kind of numbers a layer stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    /// Elements of its type. Some types are only copied.
    Plain,
    /// fp8, one scale for all.
    Fp8,
    /// With a scale behind each key and value.
    Scaled(QuantMode),
    /// DeepSeek V3.2's packed latent.
    PackedLatent,
    /// Something packed, which is only copied.
    Bytes,
}

/// How a layer stores rows.
#[derive(Debug)]
pub(super) struct Stored {
    /// Element 0 of the view.
    data: *mut u8,
    axes: Axes,
    dtype: Dtype,
    mode: QuantMode,
    numbers: Numbers,
    is_latent: bool,
    num_slots: u64,
    block_slots: u64,
}

/// Elements of the two parts of DeepSeek V3.2's packed latent, and its bytes.
const PACKED_LATENT: (u64, u64, u64) = (512, 64, 656);

// SAFETY: as for `Blocks`.
unsafe impl Send for Stored {}
// SAFETY: as above.
unsafe impl Sync for Stored {}

impl Stored {
    /// How rows are stored in a view; why they are not, in words that follow the layer's name.
    pub(super) fn of(layer: &LayerMemory<'_>, spec: &Spec, view: &View) -> Result<Stored, String> {
        let (Spec::Attention(spec), Some(axes)) = (spec, view.axes) else {
            return Err("it keeps states; rows of tokens are those of attention layers".to_owned());
        };
        let fields = spec.fields();
        let (mode, dtype) = (fields.quant_mode, fields.dtype);
        let is_single = matches!(spec.content(), Content::Single(_));
        let format = fields.cache_dtype.as_deref();
        let is_packed_latent = fields.kind.is_latent() && format == Some(c"fp8_ds_mla");
        let numbers = if is_packed_latent {
            let whole = spec.content().elements() * dtype.bytes() == PACKED_LATENT.2;
            if whole && axes.content_stride == 1 {
                Numbers::PackedLatent
            } else {
                Numbers::Bytes
            }
        } else if matches!(spec.content(), Content::PackedPair(_)) {
            Numbers::Bytes
        } else {
            match mode {
                QuantMode::None => Numbers::Plain,
                QuantMode::Fp8PerTensor => Numbers::Fp8,
                QuantMode::Nvfp4 => return Err(unsupported_mode(mode, dtype)),
                _ if is_single || fields.kind == AttentionKind::TurboQuant => {
                    return Err(format!(
                        "{} is supported for layers that store keys and values; this one is {}",
                        mode.name(),
                        fields.kind.name()
                    ));
                }
                _ if axes.scale_elements == 0 => {
                    return Err(format!(
                        "{} is supported with scales behind each key and value; the backend of this one has them at the end of the page",
                        mode.name()
                    ));
                }
                _ if axes.content_stride != 1 || dtype.bytes() != 1 => {
                    return Err(format!(
                        "{} is supported with one-byte elements one after another; this one has {dtype} {} apart",
                        mode.name(),
                        axes.content_stride
                    ));
                }
                _ => Numbers::Scaled(mode),
            }
        };
        let block_slots = spec.storage_block_size();
        Ok(Stored {
            // The audit proved that the offset lies inside, so nothing wraps.
            data: layer.data.as_ptr().wrapping_add(view.offset_bytes as usize),
            axes,
            dtype,
            mode,
            numbers,
            is_latent: fields.kind.is_latent(),
            num_slots: view.runs.num_blocks.saturating_mul(block_slots),
            block_slots,
        })
    }

    /// Slots that there are when `present` blocks have memory, of those that the view has.
    fn present_slots(&self, present: u64) -> u64 {
        self.num_slots.min(present.saturating_mul(self.block_slots))
    }

    /// In which form rows of `rows` are stored.
    fn form(&self, rows: Dtype, fp8_format: Option<Dtype>) -> Result<(Form, RowType), String> {
        let scaled = matches!(self.numbers, Numbers::Scaled(_));
        if rows == self.dtype && !scaled {
            return Ok((Form::Same, RowType::F32));
        }
        let row_type = match rows {
            Dtype::F32 => Some(RowType::F32),
            Dtype::F16 => Some(RowType::F16),
            Dtype::Bf16 => Some(RowType::Bf16),
            _ => None,
        };
        let form = match self.numbers {
            Numbers::Plain => self.plain_form(),
            Numbers::Fp8 => match self.fp8(fp8_format)? {
                Some(Dtype::F8E5m2) => Some(Form::F8E5m2),
                Some(_) => Some(Form::F8E4m3),
                None => self.plain_form(),
            },
            Numbers::Scaled(QuantMode::Int4PerTokenHead) => self.bytes(Form::ScaledInt4),
            Numbers::Scaled(QuantMode::Int8PerTokenHead) => self.bytes(Form::ScaledInt8),
            Numbers::Scaled(_) => match self.fp8(fp8_format)? {
                Some(Dtype::F8E5m2) => Some(Form::ScaledE5m2),
                Some(_) => Some(Form::ScaledE4m3),
                None => None,
            },
            Numbers::PackedLatent => Some(Form::PackedLatent),
            Numbers::Bytes => None,
        };
        form.zip(row_type).ok_or_else(|| {
            let mut text = format!("rows of {rows}: ");
            text += &unsupported_mode(self.mode, self.dtype);
            text
        })
    }

    fn plain_form(&self) -> Option<Form> {
        match self.dtype {
            Dtype::F32 => Some(Form::F32),
            Dtype::F16 => Some(Form::F16),
            Dtype::Bf16 => Some(Form::Bf16),
            Dtype::F8E4m3fn => Some(Form::F8E4m3),
            Dtype::F8E5m2 => Some(Form::F8E5m2),
            _ => None,
        }
    }

    fn bytes(&self, form: Form) -> Option<Form> {
        matches!(self.dtype, Dtype::I8 | Dtype::U8).then_some(form)
    }

    /// Which fp8 is stored: the type says it, or for plain bytes the caller.
    fn fp8(&self, told: Option<Dtype>) -> Result<Option<Dtype>, String> {
        match self.dtype {
            Dtype::F8E4m3fn | Dtype::F8E5m2 => match told {
                Some(told) if told != self.dtype => Err(format!(
                    "it stores {}, and the call says {told}",
                    self.dtype
                )),
                _ => Ok(Some(self.dtype)),
            },
            Dtype::U8 | Dtype::I8 => Ok(Some(told.unwrap_or(Dtype::F8E4m3fn))),
            _ => Ok(None),
        }
    }

    /// What the body is given for one layer's rows.
    fn rows(
        &self,
        layer: &str,
        given: &LayerRows,
        form: Form,
        row_dtype: Dtype,
        count: u64,
    ) -> Result<Rows, OpsError> {
        let axes = &self.axes;
        let element = self.dtype.bytes();
        let row_element = row_dtype.bytes();
        let (key, value, value_offset) = self.parts(layer, given, form)?;
        for (rows, name, elements) in [(given.keys, "keys", key), (given.values, "values", value)] {
            // What no row is read from or written to may be an empty list's NULL.
            if elements > 0 && count > 0 && rows.is_null() {
                return Err(OpsError::RowsMissing {
                    layer: layer.to_owned(),
                    rows: name,
                    elements,
                });
            }
            if elements == 0 && !rows.is_null() {
                return Err(OpsError::RowsNotStored {
                    layer: layer.to_owned(),
                    rows: name,
                });
            }
        }
        let strides = |rows: &'static str, token_stride: u64, head_stride: u64, elements: u64| {
            byte_strides(
                (token_stride, head_stride, elements),
                (count, axes.num_heads, row_element),
            )
            .map_err(|_| OpsError::RowsTooFar {
                layer: layer.to_owned(),
                rows,
                count,
                token_stride,
                head_stride,
            })
        };
        let (key_token, key_head) =
            strides("keys", given.key_token_stride, given.key_head_stride, key)?;
        let (value_token, value_head) = strides(
            "values",
            given.value_token_stride,
            given.value_head_stride,
            value,
        )?;
        let is_fp8 = matches!(form, Form::F8E4m3 | Form::F8E5m2);
        let mut rows = Rows {
            cache: self.data,
            keys: given.keys,
            values: given.values,
            key_token,
            key_head,
            value_token,
            value_head,
            kernel_block: axes.kernel_block_stride * element,
            token: axes.token_stride * element,
            head: axes.head_stride * element,
            content: axes.content_stride * element,
            value: value_offset * element,
            kernel_block_slots: axes.kernel_block_slots,
            heads: axes.num_heads,
            key_elements: key,
            value_elements: value,
            element,
            key_scale: scale(layer, "key_scale", given.key_scale, is_fp8)?,
            value_scale: scale(layer, "value_scale", given.value_scale, is_fp8)?,
        };
        if !matches!(self.numbers, Numbers::Scaled(_) | Numbers::PackedLatent) {
            merge_heads(&mut rows, row_element);
        }
        Ok(rows)
    }

    /// Elements of a row's two parts, and how many stored elements lie between their starts.
    fn parts(
        &self,
        layer: &str,
        given: &LayerRows,
        form: Form,
    ) -> Result<(u64, u64, u64), OpsError> {
        let axes = &self.axes;
        let wrong = |allowed: String| OpsError::Parts {
            layer: layer.to_owned(),
            given: given.latent_elements,
            allowed,
        };
        if form == Form::PackedLatent {
            let (latent, rope, _) = PACKED_LATENT;
            return match given.latent_elements {
                0 => Ok((latent, rope, 0)),
                given if given == latent => Ok((latent, rope, 0)),
                _ => Err(wrong(latent.to_string())),
            };
        }
        if given.latent_elements != 0 {
            if !self.is_latent || given.latent_elements > axes.key_elements {
                let most = if self.is_latent { axes.key_elements } else { 0 };
                return Err(wrong(format!("at most {most}")));
            }
            let first = given.latent_elements;
            return Ok((
                first,
                axes.key_elements - first,
                first * axes.content_stride,
            ));
        }
        let packed = if form == Form::ScaledInt4 { 2 } else { 1 };
        Ok((
            axes.key_elements * packed,
            axes.value_elements * packed,
            axes.value_offset,
        ))
    }
}

fn unsupported_mode(mode: QuantMode, dtype: Dtype) -> String {
    format!(
        "a cache of {dtype} in mode {} is not supported so; supported are rows of the cache's own type, rows of float32, float16 or bfloat16 in a cache of those types or of fp8, and int8, fp8 and int4 per token and head",
        mode.name()
    )
}

/// Bytes from token to token and from head to head, for strides in elements of which 0 means
/// without gaps. All `count` rows of `heads` runs of `elements` must fit in memory.
fn byte_strides(
    (token, head, elements): (u64, u64, u64),
    (count, heads, row_element): (u64, u64, u64),
) -> Result<(u64, u64), num::Overflow> {
    if elements == 0 {
        return Ok((0, 0)); // there are no such rows
    }
    let what = "rows";
    let head = if head == 0 { elements } else { head };
    let token = match token {
        0 => num::product(what, [head, heads])?,
        token => token,
    };
    let last_row = num::product(what, [count.saturating_sub(1), token, row_element])?;
    let last_head = num::product(what, [heads.saturating_sub(1), head, row_element])?;
    let last_run = num::product(what, [elements, row_element])?;
    num::sum(what, [last_row, last_head, last_run])?;
    let bytes = |stride| num::product(what, [stride, row_element]);
    Ok((bytes(token)?, bytes(head)?))
}

/// Heads that lie one behind another on both sides are one run.
fn merge_heads(rows: &mut Rows, row_element: u64) {
    let stored = rows.key_elements * rows.element;
    let given = rows.key_elements * row_element;
    let values_too = rows.value_elements == 0
        || (rows.value_elements, rows.value_head) == (rows.key_elements, given);
    if rows.heads > 1
        && rows.content == rows.element
        && rows.head == stored
        && rows.key_head == given
        && values_too
    {
        rows.key_elements *= rows.heads;
        rows.value_elements *= rows.heads;
        rows.heads = 1;
    }
}

fn scale(layer: &str, name: &'static str, given: f32, is_used: bool) -> Result<f32, OpsError> {
    if !is_used || given == 0.0 {
        return Ok(1.0);
    }
    if given > 0.0 && given.is_finite() {
        return Ok(given);
    }
    Err(OpsError::Scale {
        layer: layer.to_owned(),
        scale: name,
        value: given.to_string(),
    })
}

impl Ops {
    /// Stores rows of tokens in the slots of `layers`, all of one group.
    ///
    /// # Safety
    /// For every layer the rows of all slots that are not −1 are readable, each element by the
    /// strides given, and no row lies in the cache. Nothing else uses the slots during the call. On a
    /// device that is so until the stream has done it, and the arrays are the device's.
    pub unsafe fn write_kv(
        &self,
        write: &Write,
        layers: impl Iterator<Item = LayerRows> + Clone,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        let slots = RowSlots::Slots(write.slots);
        let call = Call {
            slots,
            dtype: write.dtype,
            fp8_format: write.fp8_format,
        };
        // SAFETY: the caller's contract.
        unsafe { self.run(&call, layers, Way::Write, stream) }
    }

    /// Reads rows of tokens from the slots of `layers`, all of one group.
    ///
    /// # Safety
    /// As [`write_kv`](Self::write_kv), with rows that are writable and do not overlap.
    pub unsafe fn gather_kv(
        &self,
        gather: &Gather,
        layers: impl Iterator<Item = LayerRows> + Clone,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        // SAFETY: the caller's contract.
        unsafe { self.run(gather, layers, Way::Gather, stream) }
    }

    /// Checks everything, then runs a body on each layer.
    ///
    /// # Safety
    /// As [`write_kv`](Self::write_kv) or [`gather_kv`](Self::gather_kv), whichever `way` means.
    unsafe fn run(
        &self,
        call: &Call,
        layers: impl Iterator<Item = LayerRows> + Clone,
        way: Way,
        stream: StreamRef,
    ) -> Result<(), OpsError> {
        // SAFETY: the caller's contract.
        let num_slots = unsafe { self.check(call, layers.clone()) }?;
        let prepared = layers.map(|given| {
            let (layer, stored) = self.stored(given.layer)?;
            let (form, row_type, rows) = self.prepare(call, &given, layer, stored)?;
            Ok::<_, OpsError>(((form, row_type), rows, call.slots_of(stored)))
        });
        let Some(device) = &self.device else {
            let body: Body = match way {
                Way::Write => kernel::kvpages_host_write,
                Way::Gather => kernel::kvpages_host_gather,
            };
            for layer in prepared {
                let ((form, row_type), rows, slots) = layer?;
                // SAFETY: every slot is one of the layer's, whose cells the view proves to lie inside
                // its allocation; the rows are by the caller's contract.
                unsafe { body(form as u32, row_type as u32, &rows, &slots) };
            }
            return Ok(());
        };
        let mut launches = device.rows(way, num_slots, stream)?;
        for layer in prepared {
            let (form, rows, slots) = layer?;
            // SAFETY: as above; kernels skip slots that are not the layers'.
            unsafe { launches.add(form, rows, slots) }?;
        }
        // SAFETY: as above.
        unsafe { launches.flush() }
    }

    /// Checks a call. Returns the slots that each of its layers has.
    ///
    /// # Safety
    /// Arrays that are the host's are readable.
    unsafe fn check(
        &self,
        call: &Call,
        layers: impl Iterator<Item = LayerRows>,
    ) -> Result<u64, OpsError> {
        let mut first: Option<(&super::Layer, &Stored)> = None;
        let mut checked_slots = u64::MAX;
        for given in layers {
            let (layer, stored) = self.stored(given.layer)?;
            let (first, first_stored) = *first.get_or_insert((layer, stored));
            if first.group != layer.group {
                return Err(OpsError::SeveralGroups {
                    first: first.name.to_string(),
                    first_group: first.group,
                    second: layer.name.to_string(),
                    second_group: layer.group,
                });
            }
            // The same slot would be in another block.
            if first_stored.block_slots != stored.block_slots {
                return Err(OpsError::SeveralBlockSlots {
                    first: first.name.to_string(),
                    first_slots: first_stored.block_slots,
                    second: layer.name.to_string(),
                    second_slots: stored.block_slots,
                });
            }
            self.prepare(call, &given, layer, stored)?;
            // Layers of a group nearly always have the same number of slots.
            let num_slots = stored.present_slots(self.blocks.num_blocks());
            if num_slots < checked_slots {
                checked_slots = num_slots;
                // What lies on a device is not read; its kernels check.
                if self.device.is_none() {
                    // SAFETY: the caller's contract.
                    unsafe { call.check_slots(&layer.name, stored, num_slots) }?;
                }
            }
        }
        Ok(checked_slots)
    }

    fn stored(&self, layer: usize) -> Result<(&super::Layer, &Stored), OpsError> {
        let layer = self.layer(layer)?;
        match &layer.stored {
            Ok(stored) => Ok((layer, stored)),
            Err(reason) => Err(OpsError::NotSupported {
                layer: layer.name.to_string(),
                reason: reason.to_string(),
            }),
        }
    }

    fn prepare(
        &self,
        call: &Call,
        given: &LayerRows,
        layer: &super::Layer,
        stored: &Stored,
    ) -> Result<(Form, RowType, Rows), OpsError> {
        let form = stored.form(call.dtype, call.fp8_format);
        let (form, row_type) = form.map_err(|reason| OpsError::NotSupported {
            layer: layer.name.to_string(),
            reason,
        })?;
        let count = call.slots_of(stored).count;
        let rows = stored.rows(&layer.name, given, form, call.dtype, count)?;
        Ok((form, row_type, rows))
    }
}

type Call = Gather;
type Body = unsafe extern "C" fn(u32, u32, *const Rows, *const Slots);

impl Call {
    /// # Safety
    /// The arrays are the host's, and readable.
    unsafe fn check_slots(
        &self,
        layer: &str,
        stored: &Stored,
        num_slots: u64,
    ) -> Result<(), OpsError> {
        match self.slots {
            RowSlots::Slots(slots) => {
                // SAFETY: the caller's contract.
                let slots = unsafe { &*slots };
                let inside = |slot: i64| slot == -1 || (slot as u64) < num_slots;
                match slots.iter().position(|&slot| !inside(slot)) {
                    Some(index) => Err(OpsError::SlotOutOfRange {
                        index,
                        slot: slots[index],
                        layer: layer.to_owned(),
                        num_slots,
                    }),
                    None => Ok(()),
                }
            }
            RowSlots::Blocks(blocks) => {
                // SAFETY: the caller's contract.
                let blocks = unsafe { &*blocks };
                let num_blocks = num_slots / stored.block_slots;
                let inside = |id: i32| id >= 0 && (id as u64) < num_blocks;
                match blocks.iter().position(|&id| !inside(id)) {
                    Some(index) => Err(OpsError::BlockOutOfRange {
                        index,
                        id: blocks[index],
                        num_blocks,
                    }),
                    None => Ok(()),
                }
            }
        }
    }

    fn slots_of(&self, stored: &Stored) -> Slots {
        match self.slots {
            RowSlots::Slots(slots) => Slots {
                slots: slots.cast(),
                blocks: std::ptr::null(),
                block_slots: stored.block_slots,
                count: slots.len() as u64,
            },
            RowSlots::Blocks(blocks) => Slots {
                slots: std::ptr::null(),
                blocks: blocks.cast(),
                block_slots: stored.block_slots,
                count: (blocks.len() as u64).saturating_mul(stored.block_slots),
            },
        }
    }
}
