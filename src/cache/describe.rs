//! A cache as a descriptor: what its blueprint says, as plain data.

use super::Cache;
use super::blueprint::{Blueprint, LayerViews, UnreadPages};
use crate::descriptor::{
    Allocation, Attention, ContextParallel, Descriptor, DescriptorError, Format, Group, Layer,
    Pages, State, TensorParallel, VERSION,
};
use crate::dtype::Dtype;
use crate::num::{Overflow, product};
use crate::plan::{PlanError, kv_heads_per_rank};
use crate::spec::{self, Content, QuantMode, Spec};
use crate::view::{Axes, BlockRuns, View};

/// What a cache cannot know of its rank, and the engine can.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ranks<'a> {
    /// Its place among those that share heads.
    pub tensor_parallel: Option<TensorParallel>,
    /// Its place among those that share tokens.
    pub context_parallel: Option<ContextParallel>,
    /// The whole model's kv heads of each layer of the cache, 0 for those of all ranks together;
    /// empty when that is so of all layers. It takes a number where heads are copied to several ranks.
    pub model_kv_heads: &'a [u64],
}

/// Why a cache was not described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescribeError {
    /// Another number of layers than the cache has.
    #[error("model_kv_heads has {given} entries, the cache has {num_layers} layers")]
    HeadsOfLayers {
        /// Entries given.
        given: usize,
        /// Layers of the cache.
        num_layers: usize,
    },
    /// Heads without ranks to divide them.
    #[error("model_kv_heads is given, but not among how many ranks; set tensor_parallel_size too")]
    HeadsWithoutRanks,
    /// Heads that do not make those that the rank has.
    #[error(
        "layer {layer}: {model} kv heads of the model on {ranks} ranks are not the {stored} that it stores on this one"
    )]
    HeadsDiffer {
        /// The layer.
        layer: String,
        /// The model's heads.
        model: u64,
        /// Ranks.
        ranks: u64,
        /// Heads that the layer stores.
        stored: u64,
    },
    /// Heads that no even division makes.
    #[error("layer {layer}: {error}")]
    HeadsNotDividing {
        /// The layer.
        layer: String,
        /// What is wrong.
        error: Box<PlanError>,
    },
    /// A descriptor that could not be read.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

impl Cache {
    /// All that another process needs to find blocks in the cache's allocations, of the blocks that
    /// have memory now.
    pub fn describe(&self, ranks: &Ranks<'_>) -> Result<Descriptor, DescribeError> {
        self.blueprint().describe(self.num_blocks(), ranks)
    }
}

impl Blueprint {
    /// The descriptor of a cache with memory for `num_blocks` blocks. What it says is checked as what
    /// is read is.
    pub fn describe(
        &self,
        num_blocks: u64,
        ranks: &Ranks<'_>,
    ) -> Result<Descriptor, DescribeError> {
        let (given, num_layers) = (ranks.model_kv_heads.len(), self.layers().len());
        if given != 0 && given != num_layers {
            return Err(DescribeError::HeadsOfLayers { given, num_layers });
        }
        if given != 0 && ranks.tensor_parallel.is_none() {
            return Err(DescribeError::HeadsWithoutRanks);
        }
        let allocations = self.allocations().iter();
        let groups = self.groups().iter().map(|group| Group {
            block_size_tokens: group.block_size,
            kernel_block_size_tokens: group.kernel_block_size,
        });
        let mut layers = Vec::with_capacity(num_layers + self.unread().len());
        for (number, layer) in self.layers().iter().enumerate() {
            layers.push(self.described(number, layer, ranks)?);
        }
        for unread in self.unread() {
            layers.push(self.described_unread(layers.len(), unread));
        }
        let descriptor = Descriptor {
            descriptor_version: VERSION,
            num_blocks,
            max_blocks: self.num_blocks(),
            tensor_parallel: ranks.tensor_parallel,
            context_parallel: ranks.context_parallel,
            alignment_bytes: self.alignment(),
            allocations: allocations
                .map(|&size_bytes| Allocation { size_bytes })
                .collect(),
            groups: groups.collect(),
            layers,
        };
        descriptor.check()?;
        Ok(descriptor)
    }

    fn described(
        &self,
        number: usize,
        layer: &LayerViews,
        ranks: &Ranks<'_>,
    ) -> Result<Layer, DescribeError> {
        // Of a layer that shares it is the owner's heads that count, by the owner's number.
        let told = ranks.model_kv_heads.get(layer.owner).copied().unwrap_or(0);
        let owner = self.layers().get(layer.owner).unwrap_or(layer);
        let runs = self.views(layer).first().map(|view| view.runs);
        let first = self.views(layer).first().and_then(|view| {
            let attention = layer.spec.as_attention()?;
            Some((attention, view, view.axes?))
        });
        let attention = match first {
            None => None,
            Some((spec, view, axes)) => {
                let heads = model_heads(self.name(owner), spec, &axes, told, ranks)?;
                Some(attention(spec, view, &axes, heads))
            }
        };
        Ok(Layer {
            name: self.name(layer).to_owned(),
            kind: layer.spec.kind_name().to_owned(),
            group: layer.group as u64,
            owner_layer: self
                .layers()
                .get(layer.owner)
                .map_or(number, |_| layer.owner) as u64,
            allocation: layer.allocation as u64,
            pages: pages(runs.unwrap_or(NO_RUNS), &layer.spec),
            attention,
            states: layer.spec.as_state().map(states),
        })
    }

    /// A layer whose pages are there, but that no backend reads.
    fn described_unread(&self, number: usize, unread: &UnreadPages) -> Layer {
        let of_model = &self.model().layers()[unread.layer];
        Layer {
            name: of_model.name.to_string(),
            kind: unread.kind.to_owned(),
            group: unread.group as u64,
            owner_layer: number as u64,
            allocation: unread.allocation as u64,
            pages: pages_of(unread.runs, unread.content_bytes),
            attention: None,
            states: None,
        }
    }
}

/// Of a layer without views, which there is none.
const NO_RUNS: BlockRuns = BlockRuns {
    num_blocks: 0,
    offset_bytes: 0,
    step_bytes: 0,
    span_bytes: 0,
    runs: 0,
    run_step_bytes: 0,
};

fn pages(runs: BlockRuns, spec: &Spec) -> Pages {
    pages_of(runs, spec.page().unpadded)
}

fn pages_of(runs: BlockRuns, content_bytes: u64) -> Pages {
    Pages {
        offset_bytes: runs.offset_bytes,
        block_step_bytes: runs.step_bytes,
        num_runs: runs.runs,
        run_bytes: runs.span_bytes,
        run_step_bytes: match runs.runs {
            1 => 0,
            // A cache without blocks has its strides as of one.
            _ => runs.run_step_bytes.max(runs.span_bytes),
        },
        // Runs are a page cut in equal pieces.
        page_bytes: runs.runs.saturating_mul(runs.span_bytes),
        content_bytes,
    }
}

/// The model's heads and the first of them on this rank, if that is known.
fn model_heads(
    name: &str,
    spec: &spec::Attention,
    axes: &Axes,
    told: u64,
    ranks: &Ranks<'_>,
) -> Result<Option<(u64, u64)>, DescribeError> {
    let stored = axes.num_heads;
    if spec.fields().kind.is_latent() {
        // Every rank has all of a latent.
        return Ok(Some((stored, 0)));
    }
    let Some(TensorParallel { size, rank }) = ranks.tensor_parallel else {
        return Ok(None);
    };
    let model = match told {
        0 => product("the kv heads", [stored, size])?,
        told => told,
    };
    let (of_rank, copies) =
        kv_heads_per_rank(model, size).map_err(|error| DescribeError::HeadsNotDividing {
            layer: name.to_owned(),
            error: Box::new(error),
        })?;
    if of_rank != stored {
        return Err(DescribeError::HeadsDiffer {
            layer: name.to_owned(),
            model,
            ranks: size,
            stored,
        });
    }
    let first = product("the kv heads", [rank / copies, of_rank])?;
    Ok(Some((model, first)))
}

fn attention(
    spec: &spec::Attention,
    view: &View,
    axes: &Axes,
    heads: Option<(u64, u64)>,
) -> Attention {
    let mode = spec.fields().quant_mode;
    let page = spec.page();
    let scales_at_end = mode.is_per_token_head() && axes.scale_elements == 0;
    Attention {
        dtype: view.dtype,
        format: format(spec),
        num_kv_heads: axes.num_heads,
        model_kv_heads: heads.map(|(model, _)| model),
        first_model_kv_head: heads.map(|(_, first)| first),
        block_slots: spec.storage_block_size(),
        kernel_block_slots: axes.kernel_block_slots,
        kernel_block_stride_elements: axes.kernel_block_stride,
        slot_stride_elements: axes.token_stride,
        head_stride_elements: axes.head_stride,
        content_stride_elements: axes.content_stride,
        value_offset_elements: axes.value_offset,
        key_elements: axes.key_elements,
        value_elements: axes.value_elements,
        scale_dtype: match mode {
            QuantMode::Nvfp4 => Some(Dtype::F8E4m3fn),
            mode if mode.is_per_token_head() => Some(Dtype::F32),
            _ => None,
        },
        inline_scale_elements: axes.scale_elements,
        page_end_scale_bytes: if scales_at_end {
            page.unpadded - page.real
        } else {
            0
        },
    }
}

fn format(spec: &spec::Attention) -> Format {
    let fields = spec.fields();
    if fields.kind.is_latent() && fields.cache_dtype.as_deref() == Some(c"fp8_ds_mla") {
        return match fields.model_version.as_deref() {
            Some(version) if version == c"deepseek_v4" => Format::Fp8DsMlaV4,
            _ => Format::Fp8DsMla,
        };
    }
    match fields.quant_mode {
        QuantMode::Int8PerTokenHead => Format::Int8PerTokenHead,
        QuantMode::Fp8PerTokenHead => Format::Fp8PerTokenHead,
        QuantMode::Int4PerTokenHead => Format::Int4PerTokenHead,
        QuantMode::Nvfp4 => Format::Nvfp4,
        _ if matches!(spec.content(), Content::PackedPair(_)) => Format::TurboQuant,
        QuantMode::Fp8PerTensor => Format::Fp8PerTensor,
        QuantMode::None => Format::Plain,
    }
}

fn states(spec: &spec::State) -> Vec<State> {
    let of_part = |part: spec::StatePart<'_>| State {
        dtype: part.dtype,
        shape: part.shape.to_vec(),
        offset_bytes: part.offset,
    };
    spec.parts().map(of_part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Contract, KernelBlockSize, Layout, Preset};
    use crate::descriptor::{BlockMove, Reshard, ReshardError, RowPart, StridedCopy};
    use crate::model::Model;
    use crate::plan::{PartGroup, PartTensor, Parts, plan_from_parts};
    use crate::spec::AttentionFields;
    use proptest::prelude::*;
    use std::sync::Arc;

    const NUM_BLOCKS: u64 = 3;
    const BLOCK_SIZE: u64 = 12;

    /// Layouts of caches that engines have, and some that they do not.
    const LAYOUTS: &[(&str, Option<&str>)] = &[
        ("block | kv | token | head | content", None),
        ("kv | block | token | head | content", None),
        (
            "kv | block | token | head | content",
            Some("kv | block | head | token | content"),
        ),
        (
            "block | head | token | kv*content",
            Some("block | token | head | kv*content"),
        ),
        ("block | head | token | kv*content", None),
        ("block | kv*head | token | content", None),
        ("block | content | kv | token | head", None),
        ("head | block | kv | token | content", None),
        ("token | block | kv | head | content", None),
        ("kv | token | head | content | block", None),
        (
            "block | kv | token | head | content",
            Some("content | head | token | kv | block"),
        ),
    ];

    /// How the ranks of one side keep their layers.
    #[derive(Debug, Clone)]
    struct Side {
        ranks: u64,
        layout: usize,
        kernel_block: u64,
        padding: u64,
        /// Both layers in one packed allocation.
        is_packed: bool,
    }

    /// What is the same on both sides.
    #[derive(Debug, Clone)]
    struct Stored {
        heads: u64,
        dtype: Dtype,
        key: u64,
        value: u64,
        mode: QuantMode,
    }

    struct Rank {
        blueprint: Blueprint,
        descriptor: Descriptor,
        memory: Vec<Vec<u8>>,
    }

    fn spec(stored: &Stored, side: &Side) -> Option<Spec> {
        let (heads, _) = kv_heads_per_rank(stored.heads, side.ranks).ok()?;
        let fields = AttentionFields {
            head_size_v: stored.value,
            quant_mode: stored.mode,
            indexes_kv_by_block_stride: true,
            ..AttentionFields::full(BLOCK_SIZE, heads, stored.key, stored.dtype)
        };
        let dense = spec::Attention::new(fields.clone()).ok()?;
        let padding = side.padding * stored.dtype.bytes() * (BLOCK_SIZE / side.kernel_block);
        let padded = (padding > 0).then(|| dense.page().unpadded + padding);
        let spec = spec::Attention::new(AttentionFields {
            page_size_padded: padded,
            ..fields
        });
        spec.ok().map(Spec::Attention)
    }

    /// The nearest that memory can have: pages in a packed block do not split, and keys and values of
    /// two widths lie beside each other.
    fn possible(stored: &Stored, side: &Side) -> Side {
        let layout = match stored.key == stored.value {
            true => side.layout,
            false => 3 + side.layout % 2,
        };
        Side {
            layout,
            kernel_block: if side.is_packed {
                BLOCK_SIZE
            } else {
                side.kernel_block
            },
            ..side.clone()
        }
    }

    /// Two layers and a third that shares with the first; none when the layout cannot be had.
    fn rank(stored: &Stored, side: &Side, rank: u64) -> Option<Rank> {
        let (text, order) = LAYOUTS[side.layout];
        let backend = Backend::new(Contract {
            layout: Some(Layout::parse(text, order).unwrap()),
            kernel_block_sizes: vec![KernelBlockSize::Exact(side.kernel_block)],
            needs_equal_kv_widths: false,
            ..Preset::FlashAttentionNhd.contract().unwrap()
        });
        let backend = Some(Arc::new(backend.unwrap()));
        let spec = spec(stored, side)?;
        let page = spec.page().padded;
        let mut model = Model::new();
        for name in ["a", "b"] {
            model.add(name, spec.clone(), backend.clone(), 1).unwrap();
        }
        model.share("c", "a", None, backend, 1).unwrap();
        let tensor = |slot: u64, name: &str| PartTensor {
            size: NUM_BLOCKS * page * if side.is_packed { 2 } else { 1 },
            layers: vec![name.to_owned()],
            offset: if side.is_packed { slot * page } else { 0 },
            block_stride: if side.is_packed { 2 * page } else { 0 },
        };
        let parts = Parts {
            num_blocks: NUM_BLOCKS,
            groups: vec![PartGroup {
                layers: ["a", "b", "c"].map(str::to_owned).to_vec(),
                is_draft: false,
            }],
            tensors: vec![tensor(0, "a"), tensor(1, "b")],
            kernel_block_sizes: None,
        };
        let plan = plan_from_parts(Arc::new(model), parts).ok()?;
        let blueprint = Blueprint::of(&plan.workers[0]).ok()?;
        let heads = [stored.heads; 3];
        let descriptor = blueprint.describe(
            NUM_BLOCKS,
            &Ranks {
                tensor_parallel: Some(TensorParallel {
                    size: side.ranks,
                    rank,
                }),
                context_parallel: None,
                model_kv_heads: &heads,
            },
        );
        let memory = blueprint.allocations().iter();
        Some(Rank {
            descriptor: descriptor.unwrap(),
            memory: memory.map(|&bytes| vec![0xEE; bytes as usize]).collect(),
            blueprint,
        })
    }

    fn ranks(stored: &Stored, side: &Side) -> Option<Vec<Rank>> {
        (0..side.ranks)
            .map(|number| rank(stored, side, number))
            .collect()
    }

    /// Where every byte of a rank's rows is by its views, and a number that names it in the model.
    fn bytes_of(rank: &Rank, block: u64, see: &mut dyn FnMut(usize, usize, u64)) {
        for (number, layer) in rank.blueprint.layers().iter().enumerate() {
            let view = &rank.blueprint.views(layer)[0];
            let axes = view.axes.unwrap();
            let bytes = view.dtype.bytes();
            let first = rank.descriptor.layers[number].attention.as_ref().unwrap();
            let first = first.first_model_kv_head.unwrap();
            let ratio = BLOCK_SIZE / axes.kernel_block_slots;
            let parts = [
                (axes.key_elements, 0),
                (axes.value_elements, axes.value_offset),
            ];
            for (part, &(elements, offset)) in parts.iter().enumerate() {
                for slot in 0..BLOCK_SIZE {
                    for head in 0..axes.num_heads {
                        for e in 0..elements + axes.scale_elements {
                            let kernel_block = block * ratio + slot / axes.kernel_block_slots;
                            let element = kernel_block * axes.kernel_block_stride
                                + slot % axes.kernel_block_slots * axes.token_stride
                                + head * axes.head_stride
                                + e * axes.content_stride
                                + offset;
                            let start = view.offset_bytes + element * bytes;
                            // Layer c is a by another name.
                            let named = [layer.owner as u64, part as u64, slot, first + head, e];
                            let name = named.iter().fold(7, |so_far: u64, &n| {
                                (so_far ^ n)
                                    .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                                    .rotate_left(23)
                            });
                            for byte in 0..bytes {
                                see(layer.allocation, (start + byte) as usize, name + byte);
                            }
                        }
                    }
                }
            }
        }
    }

    fn fill(rank: &mut Rank, block: u64) {
        let mut memory = std::mem::take(&mut rank.memory);
        bytes_of(rank, block, &mut |allocation, at, name| {
            memory[allocation][at] = (name >> 8) as u8;
        });
        rank.memory = memory;
    }

    fn check(rank: &Rank, block: u64) -> Result<(), TestCaseError> {
        let mut wrong = 0;
        bytes_of(rank, block, &mut |allocation, at, name| {
            wrong += u64::from(rank.memory[allocation][at] != (name >> 8) as u8);
        });
        prop_assert_eq!(wrong, 0);
        Ok(())
    }

    fn run(copy: &StridedCopy, from: &[Rank], to: &mut [Rank]) {
        let mut places = vec![(copy.source.offset_bytes, copy.target.offset_bytes)];
        for step in copy.steps() {
            let further = |&(s, t): &(u64, u64)| {
                let step = *step;
                (0..step.count).map(move |i| (s + i * step.source_bytes, t + i * step.target_bytes))
            };
            places = places.iter().flat_map(further).collect();
        }
        let source = &from[copy.source.rank as usize].memory[copy.source.allocation as usize];
        let target = &mut to[copy.target.rank as usize].memory[copy.target.allocation as usize];
        for (s, t) in places {
            let (s, t, bytes) = (s as usize, t as usize, copy.run_bytes as usize);
            target[t..t + bytes].copy_from_slice(&source[s..s + bytes]);
        }
    }

    fn reshard(from: &[Rank], to: &[Rank]) -> Result<Reshard, ReshardError> {
        let of = |ranks: &[Rank]| -> Vec<Descriptor> {
            ranks.iter().map(|rank| rank.descriptor.clone()).collect()
        };
        let (from, to) = (of(from), of(to));
        Reshard::new(
            &from.iter().collect::<Vec<_>>(),
            &to.iter().collect::<Vec<_>>(),
        )
    }

    fn side() -> impl Strategy<Value = Side> {
        (
            prop_oneof![Just(1u64), Just(2), Just(4), Just(8)],
            0..LAYOUTS.len(),
            prop_oneof![Just(12u64), Just(6), Just(4), Just(2), Just(1)],
            0u64..3,
            any::<bool>(),
        )
            .prop_map(|(ranks, layout, kernel_block, padding, is_packed)| Side {
                ranks,
                layout,
                kernel_block,
                padding,
                is_packed,
            })
    }

    fn stored() -> impl Strategy<Value = Stored> {
        let heads = prop_oneof![Just(1u64), Just(2), Just(4), Just(8)];
        let kinds = prop_oneof![
            Just((Dtype::F16, 3, 3, QuantMode::None)),
            Just((Dtype::F32, 2, 1, QuantMode::None)),
            Just((Dtype::U8, 4, 4, QuantMode::Fp8PerTensor)),
            Just((Dtype::I8, 4, 4, QuantMode::Int8PerTokenHead)),
            Just((Dtype::U8, 6, 6, QuantMode::Int4PerTokenHead)),
        ];
        (heads, kinds).prop_map(|(heads, (dtype, key, value, mode))| Stored {
            heads,
            dtype,
            key,
            value,
            mode,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn resharded_rows_are_the_models(stored in stored(), a in side(), b in side()) {
            let (a, b) = (possible(&stored, &a), possible(&stored, &b));
            let (Some(mut from), Some(mut to)) = (ranks(&stored, &a), ranks(&stored, &b)) else {
                return Ok(()); // a layout that this memory cannot have
            };
            from.iter_mut().for_each(|rank| fill(rank, 1));
            let (small, large) = (a.kernel_block.min(b.kernel_block), a.kernel_block.max(b.kernel_block));
            if large % small != 0 {
                let error = reshard(&from, &to).unwrap_err().to_string();
                prop_assert!(error.ends_with("do not nest"), "{}", error);
                return Ok(());
            }
            let there = reshard(&from, &to).unwrap();
            let moves = [BlockMove { group: 0, source: 1, target: 2 }];
            for copy in there.copies(&moves).unwrap() {
                run(&copy, &from, &mut to);
            }
            for rank in &to {
                check(rank, 2)?;
                // Nothing but rows of block 2 was written.
                let mut image: Vec<Vec<u8>> = rank.memory.iter().map(|m| vec![0xEE; m.len()]).collect();
                bytes_of(rank, 2, &mut |allocation, at, name| image[allocation][at] = (name >> 8) as u8);
                let whole = a.padding == b.padding && there.num_copies(&moves) <= to.len();
                prop_assert!(whole || image == rank.memory);
            }
            // And back to where it came from.
            from.iter_mut().flat_map(|rank| &mut rank.memory).for_each(|memory| memory.fill(0));
            let back = reshard(&to, &from).unwrap();
            for copy in back.copies(&[BlockMove { group: 0, source: 2, target: 0 }]).unwrap() {
                run(&copy, &to, &mut from);
            }
            for rank in &from {
                check(rank, 0)?;
            }
        }

        #[test]
        fn what_is_written_is_read_and_says_where_views_are(stored in stored(), side in side()) {
            let side = possible(&stored, &side);
            let Some(rank) = rank(&stored, &side, side.ranks - 1) else {
                return Ok(());
            };
            let text = rank.descriptor.to_json().unwrap();
            let read = Descriptor::from_json(text.as_bytes()).unwrap();
            prop_assert_eq!(&read, &rank.descriptor);
            prop_assert_eq!(read.to_json().unwrap(), text);
            let mut wanted = Vec::new();
            let mut found = Vec::new();
            for block in 0..NUM_BLOCKS {
                bytes_of(&rank, block, &mut |allocation, at, _| wanted.push((allocation, at)));
                for number in 0..read.layers.len() {
                    let runs: Vec<_> = read.block_runs(number, block).unwrap().collect();
                    let stored = read.layers[number].attention.as_ref().unwrap();
                    let bytes = stored.dtype.bytes();
                    for part in [RowPart::Key, RowPart::Value] {
                        for slot in 0..stored.block_slots {
                            for head in 0..stored.num_kv_heads {
                                let row = read.row(number, block, slot, head, part).unwrap();
                                for e in 0..row.num_elements + row.scale_elements {
                                    for byte in 0..bytes {
                                        let at = row.offset_bytes + e * row.stride_elements * bytes + byte;
                                        found.push((row.allocation as usize, at as usize));
                                        let inside = |run: &crate::descriptor::Run| {
                                            run.allocation == row.allocation
                                                && (run.offset_bytes..run.offset_bytes + run.size_bytes).contains(&at)
                                        };
                                        prop_assert!(runs.iter().any(inside));
                                    }
                                }
                            }
                        }
                    }
                }
            }
            prop_assert_eq!(found, wanted);
        }

        /// Whatever the numbers are, what is read reaches nothing outside.
        #[test]
        fn numbers_that_were_changed_are_refused_or_harmless(
            stored in stored(),
            side in side(),
            which in 0usize..200,
            change in prop_oneof![Just(0u64), Just(1), Just(u64::MAX), Just(i64::MAX as u64), Just(1 << 31), any::<u64>(), 0u64..200],
        ) {
            let side = possible(&stored, &side);
            let Some(rank) = rank(&stored, &side, 0) else {
                return Ok(());
            };
            let text = rank.descriptor.to_json().unwrap();
            let text = with_number(&text, which, change);
            let Ok(read) = Descriptor::from_json(text.as_bytes()) else {
                return Ok(());
            };
            for number in 0..read.layers.len() {
                for block in [0, read.num_blocks.saturating_sub(1)] {
                    let Ok(runs) = read.block_runs(number, block) else { continue };
                    for run in runs.take(100) {
                        let size = read.allocations[run.allocation as usize].size_bytes;
                        prop_assert!(run.offset_bytes + run.size_bytes <= size);
                    }
                    let rows = read.layers[number].attention.clone().unwrap();
                    for slot in [0, rows.block_slots - 1] {
                        for head in [0, rows.num_kv_heads - 1] {
                            let Ok(row) = read.row(number, block, slot, head, RowPart::Value) else { continue };
                            let last = (row.num_elements + row.scale_elements - 1) * row.stride_elements;
                            let end = row.offset_bytes + (last + 1) * rows.dtype.bytes();
                            prop_assert!(end <= read.allocations[row.allocation as usize].size_bytes);
                        }
                    }
                }
            }
            let _ = Reshard::new(&[&read], &[&rank.descriptor]);
            let _ = Reshard::new(&[&rank.descriptor], &[&read]);
        }
    }

    /// The text with its `which`th number replaced.
    fn with_number(text: &str, which: usize, number: u64) -> String {
        let is_digit = |c: char| c.is_ascii_digit();
        let mut starts = Vec::new();
        let mut before = ' ';
        for (at, c) in text.char_indices() {
            if is_digit(c) && before == ':' {
                starts.push(at);
            }
            before = c;
        }
        let start = starts[which % starts.len()];
        let rest = text[start..].trim_start_matches(is_digit);
        format!("{}{number}{rest}", &text[..start])
    }

    fn plain() -> Stored {
        Stored {
            heads: 4,
            dtype: Dtype::F16,
            key: 8,
            value: 8,
            mode: QuantMode::None,
        }
    }

    fn on(ranks: u64, layout: usize) -> Side {
        Side {
            ranks,
            layout,
            kernel_block: BLOCK_SIZE,
            padding: 0,
            is_packed: true,
        }
    }

    #[test]
    fn copies_are_as_few_and_as_long_as_layouts_allow() {
        let stored = plain();
        let copies = |a: &Side, b: &Side| {
            let (from, to) = (ranks(&stored, a).unwrap(), ranks(&stored, b).unwrap());
            let reshard = reshard(&from, &to).unwrap();
            let moves = [BlockMove {
                group: 0,
                source: 1,
                target: 1,
            }];
            let copies: Vec<_> = reshard.copies(&moves).unwrap().collect();
            let longest = copies.iter().map(|copy| copy.run_bytes).max().unwrap();
            let dims = copies.iter().map(|copy| copy.num_dims).max().unwrap();
            (copies.len(), longest, dims)
        };
        let page = 2 * BLOCK_SIZE * 4 * 8 * 2;
        let (nhd, hnd) = (3, 4);
        // The same order and heads: both layers of the packed block at once.
        assert_eq!(copies(&on(1, nhd), &on(1, nhd)), (1, 2 * page, 0));
        assert_eq!(copies(&on(2, hnd), &on(2, hnd)), (2, page, 0));
        // Half of the heads: of HND pages one run for each layer and rank, of NHD one for each slot.
        assert_eq!(copies(&on(1, hnd), &on(2, hnd)), (4, page / 2, 0));
        assert_eq!(
            copies(&on(1, nhd), &on(2, nhd)),
            (4, page / BLOCK_SIZE / 2, 1)
        );
        // Another order: one row of key and value at a time.
        assert_eq!(copies(&on(1, nhd), &on(1, hnd)), (2, 32, 2));
    }

    #[test]
    fn what_cannot_be_resharded_says_which_layer_and_why() {
        let text = |a: &[Rank], b: &[Rank]| reshard(a, b).unwrap_err().to_string();
        let from = ranks(&plain(), &on(1, 0)).unwrap();
        let wider = Stored {
            dtype: Dtype::F32,
            ..plain()
        };
        assert_eq!(
            text(&from, &ranks(&wider, &on(1, 0)).unwrap()),
            "layer a, target 0: source 0 stores plain of float16, the target plain of float32; converting is not copying"
        );
        let longer = Stored {
            key: 16,
            value: 16,
            ..plain()
        };
        assert_eq!(
            text(&from, &ranks(&longer, &on(1, 0)).unwrap()),
            "layer a, target 0: a key has elements: 8 on source 0, 16 on the target"
        );
        let halves = ranks(&plain(), &on(2, 0)).unwrap();
        assert_eq!(
            text(&halves[1..], &from),
            "layer a, target 0: no source holds kv head 0 of the model, which the target does"
        );
        let mut other = ranks(&plain(), &on(1, 0)).unwrap();
        other[0].descriptor.layers[1].name = "z".to_owned();
        assert_eq!(
            text(&other, &from),
            "layer b, target 0: no source has a layer of that name"
        );
        let mut unknown = ranks(&plain(), &on(1, 0)).unwrap();
        unknown[0].descriptor = unknown[0].blueprint.describe(3, &Ranks::default()).unwrap();
        let error = text(&unknown, &unknown);
        assert!(error.contains("give tensor_parallel_size"), "{error}");
        let mut alone = ranks(&plain(), &on(1, 0)).unwrap();
        let layers = &mut alone[0].descriptor.layers;
        layers.swap(1, 2);
        layers[1].owner_layer = 0;
        layers[2].owner_layer = 2;
        assert!(reshard(&alone, &from).is_ok());
        layers_of_their_own(&mut alone[0].descriptor);
        assert_eq!(
            text(&alone, &from),
            "layer c, target 0: it shares the pages of a, and on source 0 it does not"
        );
        let of_one = [BlockMove {
            group: 0,
            source: 0,
            target: 1,
        }];
        let reshard = reshard(&from, &from).unwrap();
        for (moved, expected) in [
            (
                BlockMove {
                    group: 1,
                    ..of_one[0]
                },
                "entry 0: group 1 is not there, the targets have 1 groups",
            ),
            (
                BlockMove {
                    source: 3,
                    ..of_one[0]
                },
                "entry 0: source block 3 is out of range, there are 3 blocks",
            ),
            (
                BlockMove {
                    target: -1,
                    ..of_one[0]
                },
                "entry 0: target block -1 is out of range, there are 3 blocks",
            ),
        ] {
            let error = reshard.copies(&[moved]).err().unwrap().to_string();
            assert_eq!(error, expected);
        }
        let error = reshard.copies(&[of_one[0], of_one[0]]).err().unwrap();
        assert_eq!(error.to_string(), "target block 1 is listed twice");
    }

    #[test]
    fn pages_of_a_kernels_own_order_move_as_a_whole_or_not_at_all() {
        let text = |a: &[Rank], b: &[Rank]| reshard(a, b).unwrap_err().to_string();
        let of = |side: &Side, change: fn(&mut Attention)| {
            let mut ranks = ranks(&plain(), side).unwrap();
            for layer in ranks
                .iter_mut()
                .flat_map(|rank| &mut rank.descriptor.layers)
            {
                change(layer.attention.as_mut().unwrap());
            }
            ranks
        };
        let nvfp4 = |rows: &mut Attention| rows.format = Format::Nvfp4;
        let at_end = |rows: &mut Attention| {
            rows.format = Format::Int8PerTokenHead;
            rows.scale_dtype = Some(Dtype::F32);
            // One slot less, and scales where it was.
            rows.page_end_scale_bytes = 4;
            rows.key_elements -= 1;
            rows.value_elements -= 1;
        };
        let inline = |rows: &mut Attention| {
            rows.format = Format::Int8PerTokenHead;
            rows.scale_dtype = Some(Dtype::F32);
            rows.inline_scale_elements = 1;
            rows.key_elements -= 1;
            rows.value_elements -= 1;
        };
        let (keys_first, nhd) = (0, 3);
        for change in [nvfp4, at_end] {
            let same = of(&on(2, keys_first), change);
            let reshard = reshard(&same, &same).unwrap();
            let moves = [BlockMove {
                group: 0,
                source: 0,
                target: 1,
            }];
            let whole = 2 * same[0].descriptor.layers[0].pages.page_bytes;
            for copy in reshard.copies(&moves).unwrap() {
                assert_eq!((copy.run_bytes, copy.num_dims), (whole, 0));
                assert_eq!(copy.source.rank, copy.target.rank);
            }
            let error = text(&same, &of(&on(1, keys_first), change));
            assert!(error.contains("pages can only move as a whole"), "{error}");
        }
        // Pages in several runs: keys first, alone in their allocations.
        let spread = Side {
            is_packed: false,
            ..on(1, 1)
        };
        let same = of(&spread, nvfp4);
        let pages = same[0].descriptor.layers[0].pages;
        assert_eq!(pages.num_runs, 2);
        let there = reshard(&same, &same).unwrap();
        let moves = [BlockMove {
            group: 0,
            source: 0,
            target: 1,
        }];
        for copy in there.copies(&moves).unwrap() {
            assert_eq!((copy.run_bytes, copy.num_dims), (pages.run_bytes, 1));
        }
        let error = text(&of(&on(1, keys_first), nvfp4), &of(&on(1, nhd), nvfp4));
        assert!(error.contains("pages can only move as a whole"), "{error}");
        let error = text(
            &of(&on(1, keys_first), inline),
            &of(&on(1, keys_first), at_end),
        );
        assert_eq!(
            error,
            "layer a, target 0: the scale behind a row takes elements: 1 on source 0, 0 on the target"
        );
    }

    #[test]
    fn tokens_blocks_and_groups_must_be_the_same() {
        let text = |a: &[Rank], b: &[Rank]| reshard(a, b).unwrap_err().to_string();
        let from = ranks(&plain(), &on(1, 0)).unwrap();
        let of = |change: fn(&mut Descriptor)| {
            let mut ranks = ranks(&plain(), &on(1, 0)).unwrap();
            change(&mut ranks[0].descriptor);
            ranks
        };
        let share = |of: &mut Descriptor, size: u64| {
            of.context_parallel = Some(ContextParallel {
                size,
                rank: 0,
                interleave_tokens: 1,
            });
        };
        let mut halves = ranks(&plain(), &on(1, 0)).unwrap();
        share(&mut halves[0].descriptor, 2);
        assert!(text(&halves, &from).contains("no source that has it holds the same tokens"));
        assert!(reshard(&halves, &halves).is_ok());
        share(&mut halves[0].descriptor, 1);
        assert!(reshard(&halves, &from).is_ok());
        let longer = of(|of| of.groups[0].block_size_tokens *= 2);
        assert_eq!(
            text(&longer, &from),
            "layer a, target 0: a block has tokens: 24 on source 0, 12 on the target"
        );
        let apart = of(|of| {
            let group = of.groups[0];
            of.groups.push(group);
            of.layers[1].group = 1;
        });
        assert_eq!(
            text(&apart, &from),
            "layers a and b are of one group on the targets, but not on the sources; one block number cannot mean both"
        );
        // The other way each group is a part of one.
        assert!(reshard(&from, &apart).is_ok());
        let empty: &[Rank] = &[];
        assert_eq!(
            text(empty, &from),
            "there are 0 sources and 1 targets; there must be one of each at least"
        );
    }

    /// Gives the sharing layer pages of its own, in an allocation of its own.
    fn layers_of_their_own(descriptor: &mut Descriptor) {
        let size_bytes = descriptor.allocations[0].size_bytes;
        descriptor.allocations.push(Allocation { size_bytes });
        let allocation = descriptor.allocations.len() as u64 - 1;
        let number = descriptor.find("c").unwrap();
        let layer = &mut descriptor.layers[number];
        layer.owner_layer = number as u64;
        layer.allocation = allocation;
    }

    #[test]
    fn heads_that_are_told_must_be_those_of_the_layers() {
        let rank = rank(&plain(), &on(2, 0), 0).unwrap();
        let error = |size: u64, model_kv_heads: &[u64]| {
            let ranks = Ranks {
                tensor_parallel: (size > 0).then_some(TensorParallel { size, rank: 0 }),
                context_parallel: None,
                model_kv_heads,
            };
            rank.blueprint.describe(3, &ranks).unwrap_err().to_string()
        };
        assert_eq!(
            error(2, &[4]),
            "model_kv_heads has 1 entries, the cache has 3 layers"
        );
        assert_eq!(
            error(0, &[4; 3]),
            "model_kv_heads is given, but not among how many ranks; set tensor_parallel_size too"
        );
        assert_eq!(
            error(2, &[8; 3]),
            "layer a: 8 kv heads of the model on 2 ranks are not the 2 that it stores on this one"
        );
        assert!(error(2, &[3; 3]).starts_with("layer a: 3 key-value heads"));
    }
}
