//! What a descriptor says is proven before it is believed, by the proofs that views of a cache have.

use std::collections::HashSet;

use super::{Attention, Descriptor, DescriptorError, Layer, Pages, State};
use crate::num::{MAX, Overflow, product, sum};
use crate::view::{AuditError, BlockRuns, MAX_RUNS, Owned, audit, check_ownership};

/// Block ids are signed 32-bit integers.
const MAX_BLOCKS: u64 = i32::MAX as u64;

/// What is wrong at a place that the caller knows.
struct Problem(String);

impl From<String> for Problem {
    fn from(text: String) -> Problem {
        Problem(text)
    }
}

impl From<Overflow> for Problem {
    fn from(error: Overflow) -> Problem {
        Problem(error.to_string())
    }
}

type Checked = Result<(), Problem>;

impl Descriptor {
    /// Proves that every block of every layer lies inside its allocation, that no byte belongs to
    /// different blocks, and that every row and state lies in its block.
    pub fn check(&self) -> Result<(), DescriptorError> {
        at("the descriptor", || self.check_numbers())?;
        for (number, allocation) in self.allocations.iter().enumerate() {
            at(format!("allocation {number}"), || {
                most("size_bytes", allocation.size_bytes, MAX)
            })?;
        }
        for (number, group) in self.groups.iter().enumerate() {
            at(format!("group {number}"), || {
                within("block_size_tokens", group.block_size_tokens, 1, MAX)?;
                let kernel_block = group.kernel_block_size_tokens.unwrap_or(1);
                within("kernel_block_size_tokens", kernel_block, 1, MAX)
            })?;
        }
        let mut names = HashSet::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let place = match layer.name.as_str() {
                "" => format!("layer number {number}"),
                name => format!("layer {name}"),
            };
            at(place, || {
                if layer.name.is_empty() || layer.name.contains('\0') {
                    return Err(problem("its name is empty or has a NUL in it"));
                }
                if !names.insert(layer.name.as_str()) {
                    return Err(problem("two layers have that name"));
                }
                self.check_layer(number, layer)
            })?;
        }
        self.check_blocks_are_apart()
    }

    fn check_numbers(&self) -> Checked {
        most("max_blocks", self.max_blocks, MAX_BLOCKS)?;
        most("num_blocks", self.num_blocks, self.max_blocks)?;
        if !self.alignment_bytes.is_power_of_two() || self.alignment_bytes > MAX {
            let given = self.alignment_bytes;
            return Err(format!("alignment_bytes is {given}; it must be a power of two").into());
        }
        if let Some(ranks) = &self.tensor_parallel {
            within("tensor_parallel.size", ranks.size, 1, MAX)?;
            most("tensor_parallel.rank", ranks.rank, ranks.size - 1)?;
        }
        if let Some(ranks) = &self.context_parallel {
            within("context_parallel.size", ranks.size, 1, MAX)?;
            most("context_parallel.rank", ranks.rank, ranks.size - 1)?;
            let interleave = ranks.interleave_tokens;
            within("context_parallel.interleave_tokens", interleave, 1, MAX)?;
        }
        Ok(())
    }

    /// Of a cache without blocks, what one would be is proven: strides are used before blocks are.
    fn proven_blocks(&self) -> u64 {
        self.max_blocks.max(1)
    }

    fn check_layer(&self, number: usize, layer: &Layer) -> Checked {
        below("group", layer.group, self.groups.len())?;
        below("allocation", layer.allocation, self.allocations.len())?;
        below("owner_layer", layer.owner_layer, self.layers.len())?;
        let allocation = match self.max_blocks {
            0 => MAX,
            _ => self.allocations[layer.allocation as usize].size_bytes,
        };
        check_pages(&layer.pages, self.proven_blocks(), allocation)?;
        match (&layer.attention, &layer.states) {
            (Some(_), Some(_)) => return Err(problem("it has both attention and states")),
            (Some(attention), None) => self.check_attention(layer, attention, allocation)?,
            (None, Some(states)) => self.check_states(&layer.pages, states, allocation)?,
            (None, None) => {}
        }
        if layer.owner_layer == number as u64 {
            return Ok(());
        }
        let owner = &self.layers[layer.owner_layer as usize];
        let same = owner.owner_layer == layer.owner_layer
            && owner.group == layer.group
            && owner.allocation == layer.allocation
            && owner.pages == layer.pages
            && owner.attention == layer.attention
            && owner.states == layer.states;
        if !same {
            return Err(format!(
                "it shares the pages of layer {}, which has others or shares itself",
                owner.name
            )
            .into());
        }
        Ok(())
    }

    fn check_attention(&self, layer: &Layer, stored: &Attention, allocation: u64) -> Checked {
        let pages = &layer.pages;
        for (name, value) in [
            ("num_kv_heads", stored.num_kv_heads),
            ("block_slots", stored.block_slots),
            ("kernel_block_slots", stored.kernel_block_slots),
            ("key_elements", stored.key_elements),
        ] {
            within(name, value, 1, MAX)?;
        }
        if !stored.block_slots.is_multiple_of(stored.kernel_block_slots) {
            return Err(format!(
                "a kernel block of {} slots does not divide a block of {}",
                stored.kernel_block_slots, stored.block_slots
            )
            .into());
        }
        let tokens = self.groups[layer.group as usize].block_size_tokens;
        if !tokens.is_multiple_of(stored.block_slots) {
            return Err(format!(
                "block_slots is {}, which does not divide the {tokens} tokens of a block of its group",
                stored.block_slots
            )
            .into());
        }
        self.check_aligned(stored.dtype.bytes())?;
        check_heads(stored)?;
        check_scales(stored)?;
        let dims = row_dims(stored)?;
        let ratio = stored.kernel_blocks();
        let kernel_blocks = product("the kernel blocks", [self.proven_blocks(), ratio])?;
        let block_dim = Dim {
            name: "kernel_block_stride_elements",
            count: kernel_blocks,
            stride: stored.kernel_block_stride_elements,
        };
        let mut all = vec![block_dim];
        all.extend(&dims);
        prove(&all, pages.offset_bytes, stored.dtype.bytes(), allocation)?;
        let counts = dims.iter().map(|dim| dim.count);
        let factors = [ratio, stored.dtype.bytes()].into_iter().chain(counts);
        let rows = product("the rows of a block", factors)?;
        let held = sum("a page", [rows, stored.page_end_scale_bytes])?;
        if held > pages.content_bytes {
            return Err(format!(
                "its rows and scales take {held} bytes of a block, and pages.content_bytes is {}",
                pages.content_bytes
            )
            .into());
        }
        check_rows_are_in_pages(stored, &dims, pages, self.proven_blocks())
    }

    fn check_states(&self, pages: &Pages, states: &[State], allocation: u64) -> Checked {
        if pages.num_runs != 1 {
            return Err(problem("pages of states must be in one run"));
        }
        let mut free = 0;
        for (number, state) in states.iter().enumerate() {
            let bytes = state.dtype.bytes();
            self.check_aligned(bytes)?;
            let sizes = state.shape.iter().copied();
            let size = product("a state", sizes.chain([bytes]))?;
            let end = sum("a state", [state.offset_bytes, size])?;
            if state.offset_bytes < free || end > pages.content_bytes {
                return Err(format!(
                    "state {number} is bytes {} to {end} of a page; it must be behind the state before it and in the first {} bytes",
                    state.offset_bytes, pages.content_bytes
                )
                .into());
            }
            free = end;
            if !pages.block_step_bytes.is_multiple_of(bytes) {
                return Err(format!(
                    "block_step_bytes is {}, which is not a multiple of {bytes}, the bytes of one {} of state {number}",
                    pages.block_step_bytes, state.dtype
                )
                .into());
            }
            let dims = [
                Dim {
                    name: "pages.block_step_bytes",
                    count: self.proven_blocks(),
                    stride: pages.block_step_bytes / bytes,
                },
                Dim {
                    name: "a state",
                    count: size / bytes,
                    stride: 1,
                },
            ];
            let offset = sum("a state", [pages.offset_bytes, state.offset_bytes])?;
            prove(&dims, offset, bytes, allocation)?;
        }
        Ok(())
    }

    fn check_aligned(&self, element_bytes: u64) -> Checked {
        if !self.alignment_bytes.is_multiple_of(element_bytes) {
            return Err(format!(
                "its elements of {element_bytes} bytes need more than alignment_bytes, {}",
                self.alignment_bytes
            )
            .into());
        }
        Ok(())
    }

    /// Layers of one allocation, as those of a cache are checked.
    fn check_blocks_are_apart(&self) -> Result<(), DescriptorError> {
        let mut owned: Vec<Vec<Owned<'_>>> = vec![Vec::new(); self.allocations.len()];
        for (number, layer) in self.layers.iter().enumerate() {
            if layer.owner_layer == number as u64 {
                owned[layer.allocation as usize].push(Owned {
                    layer: &layer.name,
                    group: layer.group as usize,
                    runs: runs(&layer.pages, self.max_blocks),
                });
            }
        }
        for (number, layers) in owned.iter_mut().enumerate() {
            check_ownership(layers).map_err(|error| DescriptorError::Wrong {
                place: format!("allocation {number}"),
                problem: error.to_string(),
            })?;
        }
        Ok(())
    }
}

fn runs(pages: &Pages, num_blocks: u64) -> BlockRuns {
    BlockRuns {
        num_blocks,
        offset_bytes: pages.offset_bytes,
        step_bytes: pages.block_step_bytes,
        span_bytes: pages.run_bytes,
        runs: pages.num_runs,
        run_step_bytes: pages.run_step_bytes,
    }
}

fn check_pages(pages: &Pages, max_blocks: u64, allocation: u64) -> Checked {
    within("pages.num_runs", pages.num_runs, 1, MAX_RUNS)?;
    within("pages.run_bytes", pages.run_bytes, 1, MAX)?;
    most("pages.offset_bytes", pages.offset_bytes, MAX)?;
    most("pages.block_step_bytes", pages.block_step_bytes, MAX)?;
    if (pages.num_runs == 1) != (pages.run_step_bytes == 0) {
        return Err(format!(
            "pages.run_step_bytes is {} for {} runs; it is 0 for one run and only then",
            pages.run_step_bytes, pages.num_runs
        )
        .into());
    }
    let page = product("a page", [pages.num_runs, pages.run_bytes])?;
    if page != pages.page_bytes {
        return Err(format!(
            "pages.page_bytes is {}, and its runs have {page}",
            pages.page_bytes
        )
        .into());
    }
    most("pages.content_bytes", pages.content_bytes, page)?;
    let dims = [
        Dim {
            name: "pages.run_step_bytes",
            count: pages.num_runs,
            stride: pages.run_step_bytes,
        },
        Dim {
            name: "pages.block_step_bytes",
            count: max_blocks,
            stride: pages.block_step_bytes,
        },
        Dim {
            name: "a run",
            count: pages.run_bytes,
            stride: 1,
        },
    ];
    prove(&dims, pages.offset_bytes, 1, allocation)
}

fn check_heads(stored: &Attention) -> Checked {
    match (stored.model_kv_heads, stored.first_model_kv_head) {
        (None, None) => Ok(()),
        (Some(all), Some(first)) => {
            most("model_kv_heads", all, MAX)?;
            let end = sum("the kv heads", [first, stored.num_kv_heads])?;
            if end > all {
                return Err(format!(
                    "it holds the model's kv heads {first} to {end} of {all}; there are not as many"
                )
                .into());
            }
            Ok(())
        }
        _ => Err(problem(
            "model_kv_heads and first_model_kv_head must both be there, or neither",
        )),
    }
}

fn check_scales(stored: &Attention) -> Checked {
    let stores = stored.inline_scale_elements > 0 || stored.page_end_scale_bytes > 0;
    let both = stored.inline_scale_elements > 0 && stored.page_end_scale_bytes > 0;
    if both || (stored.format.has_row_scales() && !stores) {
        return Err(format!(
            "inline_scale_elements is {} and page_end_scale_bytes is {}; rows of {} have scales in one place",
            stored.inline_scale_elements,
            stored.page_end_scale_bytes,
            stored.format.name()
        )
        .into());
    }
    if stores && stored.scale_dtype.is_none() {
        return Err(problem("it stores scales, and scale_dtype is null"));
    }
    Ok(())
}

/// A number of places at a distance.
#[derive(Clone, Copy)]
struct Dim {
    /// The key of the distance.
    name: &'static str,
    count: u64,
    stride: u64,
}

/// The dimensions of a kernel block's elements.
fn row_dims(stored: &Attention) -> Result<Vec<Dim>, Problem> {
    let row = sum("a row", [stored.key_elements, stored.inline_scale_elements])?;
    let (kv, content) = if stored.value_elements == 0 {
        if stored.value_offset_elements != 0 {
            return Err(problem(
                "value_offset_elements is set, but it has no values",
            ));
        }
        (1, row)
    } else if stored.value_is_beside_key() {
        let value = sum(
            "a row",
            [stored.value_elements, stored.inline_scale_elements],
        )?;
        (1, sum("a row", [row, value])?)
    } else if stored.key_elements == stored.value_elements {
        (2, row)
    } else {
        return Err(problem(
            "keys and values of different widths must lie beside each other",
        ));
    };
    Ok(vec![
        Dim {
            name: "slot_stride_elements",
            count: stored.kernel_block_slots,
            stride: stored.slot_stride_elements,
        },
        Dim {
            name: "value_offset_elements",
            count: kv,
            stride: stored.value_offset_elements,
        },
        Dim {
            name: "head_stride_elements",
            count: stored.num_kv_heads,
            stride: stored.head_stride_elements,
        },
        Dim {
            name: "content_stride_elements",
            count: content,
            stride: stored.content_stride_elements,
        },
    ])
}

/// Whether the rows of block `b` lie in the runs of block `b`: dimensions that step from run to run
/// must do so exactly, and the others must stay in one run.
fn check_rows_are_in_pages(
    stored: &Attention,
    dims: &[Dim],
    pages: &Pages,
    max_blocks: u64,
) -> Checked {
    let bytes = stored.dtype.bytes();
    let ratio = stored.kernel_blocks();
    let kernel_block = product(
        "a kernel block",
        [stored.kernel_block_stride_elements, bytes],
    )?;
    let block = product("a block", [kernel_block, ratio])?;
    if (ratio > 1 || max_blocks > 1) && block != pages.block_step_bytes {
        return Err(format!(
            "{ratio} kernel blocks of {kernel_block} bytes do not make pages.block_step_bytes, {}",
            pages.block_step_bytes
        )
        .into());
    }
    let mut last_run = 0;
    let mut reach = product("a run", [ratio - 1, kernel_block])?;
    for dim in dims.iter().filter(|dim| dim.count > 1) {
        let stride = product("a stride", [dim.stride, bytes])?;
        let steps = dim.count - 1;
        if pages.num_runs > 1 && stride >= pages.run_step_bytes {
            if !stride.is_multiple_of(pages.run_step_bytes) {
                return Err(format!(
                    "a stride of {stride} bytes ends between two runs, which are {} bytes apart",
                    pages.run_step_bytes
                )
                .into());
            }
            let runs = product("the runs", [steps, stride / pages.run_step_bytes])?;
            last_run = sum("the runs", [last_run, runs])?;
        } else {
            let further = product("a run", [steps, stride])?;
            reach = sum("a run", [reach, further])?;
        }
    }
    let end = sum("a run", [reach, bytes])?;
    if last_run >= pages.num_runs || end > pages.run_bytes {
        return Err(format!(
            "its rows reach byte {end} of run {last_run} of a block, which has {} runs of {} bytes",
            pages.num_runs, pages.run_bytes
        )
        .into());
    }
    Ok(())
}

/// The proof of a view, for numbers that may be too large for one, and in the descriptor's words.
fn prove(dims: &[Dim], offset: u64, element_bytes: u64, allocation: u64) -> Checked {
    let mut shape = Vec::with_capacity(dims.len());
    let mut strides = Vec::with_capacity(dims.len());
    for dim in dims {
        most(dim.name, dim.stride, MAX)?;
        let count = product("a number of places", [dim.count])?;
        shape.push(count as i64);
        strides.push(dim.stride as i64);
    }
    match audit(&shape, &strides, offset, element_bytes, allocation) {
        Ok(_) => Ok(()),
        Err(AuditError::Overlaps { dim, stride, inner }) => Err(format!(
            "{} is {stride}, but what lies in between takes {inner}",
            dims[dim].name
        )
        .into()),
        Err(AuditError::OutOfBounds { end, allocation }) => Err(format!(
            "its blocks reach byte {end} of an allocation of {allocation} bytes"
        )
        .into()),
        Err(AuditError::Misaligned {
            offset,
            element_bytes,
        }) => Err(format!(
            "it starts at byte {offset}, which is not a multiple of its {element_bytes}-byte elements"
        )
        .into()),
        Err(error) => Err(error.to_string().into()),
    }
}

fn at(place: impl Into<String>, check: impl FnOnce() -> Checked) -> Result<(), DescriptorError> {
    check().map_err(|Problem(problem)| DescriptorError::Wrong {
        place: place.into(),
        problem,
    })
}

fn problem(text: &str) -> Problem {
    Problem(text.to_owned())
}

fn most(name: &str, value: u64, most: u64) -> Checked {
    within(name, value, 0, most)
}

fn below(name: &str, value: u64, count: usize) -> Checked {
    if value >= count as u64 {
        return Err(format!("{name} is {value}, and there are {count}").into());
    }
    Ok(())
}

fn within(name: &str, value: u64, least: u64, most: u64) -> Checked {
    if value < least || value > most {
        return Err(format!("{name} is {value}; it must be {least} to {most}").into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::{
        Allocation, ContextParallel, Format, Group, RowPart, TensorParallel, VERSION,
    };
    use crate::dtype::Dtype;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SLOTS: u64 = 4;
    const HEADS: u64 = 2;
    const ELEMENTS: u64 = 3;

    /// A layer of fp16 keys and values: all keys before all values, or a page in one run whose
    /// keys have their values beside them. In kernel blocks of two slots.
    fn layer(name: &str, number: u64, keys_first: bool, max_blocks: u64) -> Layer {
        let page_bytes = 2 * SLOTS * HEADS * ELEMENTS * 2;
        let row = if keys_first { ELEMENTS } else { 2 * ELEMENTS };
        let num_runs = if keys_first { 2 } else { 1 };
        let run_bytes = page_bytes / num_runs;
        let run_step = run_bytes * max_blocks;
        Layer {
            name: name.to_owned(),
            kind: "full attention".to_owned(),
            group: 0,
            owner_layer: number,
            allocation: number,
            pages: Pages {
                offset_bytes: 0,
                block_step_bytes: run_bytes,
                num_runs,
                run_bytes,
                run_step_bytes: if keys_first { run_step } else { 0 },
                page_bytes,
                content_bytes: page_bytes,
            },
            attention: Some(Attention {
                dtype: Dtype::F16,
                format: Format::Plain,
                num_kv_heads: HEADS,
                model_kv_heads: Some(4),
                first_model_kv_head: Some(2),
                block_slots: SLOTS,
                kernel_block_slots: SLOTS / 2,
                kernel_block_stride_elements: SLOTS / 2 * HEADS * row,
                slot_stride_elements: HEADS * row,
                head_stride_elements: row,
                content_stride_elements: 1,
                value_offset_elements: if keys_first { run_step / 2 } else { ELEMENTS },
                key_elements: ELEMENTS,
                value_elements: ELEMENTS,
                scale_dtype: None,
                inline_scale_elements: 0,
                page_end_scale_bytes: 0,
            }),
            states: None,
        }
    }

    fn descriptor(keys_first: bool) -> Descriptor {
        let page_bytes = 2 * SLOTS * HEADS * ELEMENTS * 2;
        let size_bytes = 3 * page_bytes;
        let states = vec![
            State {
                dtype: Dtype::F32,
                shape: vec![3, 2],
                offset_bytes: 0,
            },
            State {
                dtype: Dtype::F16,
                shape: vec![4],
                offset_bytes: 24,
            },
        ];
        let mut state_layer = layer("states", 1, false, 3);
        state_layer.attention = None;
        state_layer.states = Some(states);
        Descriptor {
            descriptor_version: VERSION,
            num_blocks: 3,
            max_blocks: 3,
            tensor_parallel: Some(TensorParallel { size: 2, rank: 1 }),
            context_parallel: Some(ContextParallel {
                size: 2,
                rank: 0,
                interleave_tokens: 1,
            }),
            alignment_bytes: 256,
            allocations: vec![Allocation { size_bytes }; 2],
            groups: vec![Group {
                block_size_tokens: SLOTS,
                kernel_block_size_tokens: Some(SLOTS / 2),
            }],
            layers: vec![layer("rows", 0, keys_first, 3), state_layer],
        }
    }

    /// The numbers of a descriptor that decide where things are.
    fn numbers(of: &mut Descriptor) -> Vec<&mut u64> {
        let mut all = vec![
            &mut of.num_blocks,
            &mut of.max_blocks,
            &mut of.alignment_bytes,
        ];
        all.extend(of.allocations.iter_mut().map(|a| &mut a.size_bytes));
        all.extend(
            of.groups
                .iter_mut()
                .map(|group| &mut group.block_size_tokens),
        );
        for layer in &mut of.layers {
            let pages = &mut layer.pages;
            all.extend([
                &mut layer.allocation,
                &mut layer.owner_layer,
                &mut pages.offset_bytes,
                &mut pages.block_step_bytes,
                &mut pages.num_runs,
                &mut pages.run_bytes,
                &mut pages.run_step_bytes,
                &mut pages.page_bytes,
                &mut pages.content_bytes,
            ]);
            if let Some(rows) = &mut layer.attention {
                all.extend([
                    &mut rows.num_kv_heads,
                    &mut rows.block_slots,
                    &mut rows.kernel_block_slots,
                    &mut rows.kernel_block_stride_elements,
                    &mut rows.slot_stride_elements,
                    &mut rows.head_stride_elements,
                    &mut rows.content_stride_elements,
                    &mut rows.value_offset_elements,
                    &mut rows.key_elements,
                    &mut rows.value_elements,
                    &mut rows.inline_scale_elements,
                ]);
            }
            for state in layer.states.iter_mut().flatten() {
                all.push(&mut state.offset_bytes);
                all.extend(&mut state.shape);
            }
        }
        all
    }

    /// What a descriptor that was believed must not do, looked for byte by byte.
    fn harm(of: &Descriptor) -> Option<String> {
        // Which block of which group has a byte.
        let mut block_of: HashMap<(u64, u64), (u64, u64)> = HashMap::new();
        for (number, layer) in of.layers.iter().enumerate() {
            let size = of.allocations[layer.allocation as usize].size_bytes;
            for block in 0..of.num_blocks {
                let mut mine = HashSet::new();
                for run in of.block_runs(number, block).ok()? {
                    for byte in run.offset_bytes..run.offset_bytes + run.size_bytes {
                        if byte >= size {
                            return Some(format!("block {block} has byte {byte}"));
                        }
                        mine.insert(byte);
                        let place = (run.allocation, byte);
                        let owner = *block_of.entry(place).or_insert((layer.group, block));
                        if owner.1 != block {
                            return Some(format!("byte {byte} is of several blocks"));
                        }
                    }
                }
                let mut seen = HashSet::new();
                for (start, bytes) in parts(of, number, block) {
                    for byte in start..start + bytes {
                        if !mine.contains(&byte) || !seen.insert(byte) {
                            return Some(format!(
                                "byte {byte} of block {block} is read twice or not its own"
                            ));
                        }
                    }
                }
            }
        }
        None
    }

    /// Every element of a block: where it is, and its bytes.
    fn parts(of: &Descriptor, number: usize, block: u64) -> Vec<(u64, u64)> {
        let layer = &of.layers[number];
        let mut all = Vec::new();
        if let Some(rows) = &layer.attention {
            let bytes = rows.dtype.bytes();
            for slot in 0..rows.block_slots {
                for head in 0..rows.num_kv_heads {
                    for part in [RowPart::Key, RowPart::Value] {
                        let Ok(row) = of.row(number, block, slot, head, part) else {
                            continue;
                        };
                        for e in 0..row.num_elements + row.scale_elements {
                            all.push((row.offset_bytes + e * row.stride_elements * bytes, bytes));
                        }
                    }
                }
            }
        }
        for state in layer.states.iter().flatten() {
            let run = of.block_runs(number, block).unwrap().next().unwrap();
            let elements: u64 = state.shape.iter().product();
            let start = run.offset_bytes + state.offset_bytes;
            all.push((start, elements * state.dtype.bytes()));
        }
        all
    }

    #[test]
    fn what_caches_are_is_believed() {
        for keys_first in [true, false] {
            let of = descriptor(keys_first);
            assert_eq!(of.check(), Ok(()));
            assert_eq!(harm(&of), None);
        }
        let mut empty = descriptor(false);
        empty.max_blocks = 0;
        empty.num_blocks = 0;
        empty.allocations.iter_mut().for_each(|a| a.size_bytes = 0);
        assert_eq!(empty.check(), Ok(()));
        assert!(empty.block_runs(0, 0).is_err());
        assert!(empty.row(0, 0, 0, 0, RowPart::Key).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        #[test]
        fn what_is_believed_does_no_harm(
            keys_first in any::<bool>(),
            changes in proptest::collection::vec((0usize..60, -3i64..4, 1u64..5, any::<bool>()), 1..4),
        ) {
            let mut of = descriptor(keys_first);
            for (which, more, times, both) in changes {
                let mut all = numbers(&mut of);
                let count = all.len();
                let number = &mut all[which % count];
                let change = |number: u64| number.saturating_add_signed(more).saturating_mul(times);
                let (before, after) = (**number, change(**number));
                **number = after;
                // Numbers that are the same mean the same, mostly.
                for other in all.into_iter().filter(|number| both && **number == before) {
                    *other = after;
                }
            }
            let small = of.max_blocks < 20 && of.allocations.iter().all(|a| a.size_bytes < 10_000);
            if small && of.check().is_ok() {
                prop_assert_eq!(harm(&of), None);
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_number() {
        type Change = fn(&mut Descriptor);
        fn rows(of: &mut Descriptor) -> &mut Attention {
            of.layers[0].attention.as_mut().unwrap()
        }
        fn pages(of: &mut Descriptor) -> &mut Pages {
            &mut of.layers[0].pages
        }
        fn state(of: &mut Descriptor, number: usize) -> &mut State {
            &mut of.layers[1].states.as_mut().unwrap()[number]
        }
        let cases: &[(Change, &str)] = &[
            (
                |of| of.max_blocks = 1 << 31,
                "the descriptor: max_blocks is 2147483648; it must be 0 to 2147483647",
            ),
            (
                |of| of.num_blocks = 4,
                "the descriptor: num_blocks is 4; it must be 0 to 3",
            ),
            (
                |of| of.alignment_bytes = 24,
                "the descriptor: alignment_bytes is 24; it must be a power of two",
            ),
            (
                |of| of.alignment_bytes = 1,
                "layer rows: its elements of 2 bytes need more than alignment_bytes, 1",
            ),
            (
                |of| of.tensor_parallel = Some(TensorParallel { size: 2, rank: 2 }),
                "the descriptor: tensor_parallel.rank is 2; it must be 0 to 1",
            ),
            (
                |of| of.tensor_parallel = Some(TensorParallel { size: 0, rank: 0 }),
                "tensor_parallel.size is 0",
            ),
            (
                |of| of.context_parallel.as_mut().unwrap().rank = 2,
                "context_parallel.rank is 2",
            ),
            (
                |of| of.context_parallel.as_mut().unwrap().size = 0,
                "context_parallel.size is 0",
            ),
            (
                |of| of.context_parallel.as_mut().unwrap().interleave_tokens = 0,
                "context_parallel.interleave_tokens is 0",
            ),
            (
                |of| of.allocations[1].size_bytes = u64::MAX,
                "allocation 1: size_bytes is 18446744073709551615",
            ),
            (
                |of| of.groups[0].block_size_tokens = 0,
                "group 0: block_size_tokens is 0",
            ),
            (
                |of| of.groups[0].kernel_block_size_tokens = Some(0),
                "group 0: kernel_block_size_tokens is 0",
            ),
            (
                |of| of.layers[0].name.clear(),
                "layer number 0: its name is empty",
            ),
            (
                |of| of.layers[1].name = "rows".to_owned(),
                "layer rows: two layers have that name",
            ),
            (
                |of| of.layers[0].group = 1,
                "layer rows: group is 1, and there are 1",
            ),
            (
                |of| of.layers[0].allocation = 2,
                "layer rows: allocation is 2, and there are 2",
            ),
            (
                |of| of.layers[0].owner_layer = 2,
                "layer rows: owner_layer is 2, and there are 2",
            ),
            (
                |of| of.layers[0].owner_layer = 1,
                "layer rows: it shares the pages of layer states",
            ),
            (
                |of| pages(of).num_runs = 0,
                "layer rows: pages.num_runs is 0",
            ),
            (
                |of| pages(of).run_bytes = 0,
                "layer rows: pages.run_bytes is 0",
            ),
            (
                |of| pages(of).run_step_bytes = 0,
                "layer rows: pages.run_step_bytes is 0 for 2 runs",
            ),
            (
                |of| pages(of).page_bytes = 95,
                "layer rows: pages.page_bytes is 95, and its runs have 96",
            ),
            (
                |of| pages(of).content_bytes = 97,
                "layer rows: pages.content_bytes is 97; it must be 0 to 96",
            ),
            (
                |of| pages(of).content_bytes = 95,
                "layer rows: its rows and scales take 96 bytes of a block, and pages.content_bytes is 95",
            ),
            (
                |of| pages(of).offset_bytes = 2,
                "layer rows: its blocks reach byte 290 of an allocation of 288 bytes",
            ),
            (
                |of| pages(of).offset_bytes = u64::MAX,
                "layer rows: pages.offset_bytes is",
            ),
            (
                |of| pages(of).block_step_bytes = 47,
                "layer rows: pages.block_step_bytes is 47, but what lies in between takes 48",
            ),
            (
                |of| of.allocations[0].size_bytes = 287,
                "layer rows: its blocks reach byte 288 of an allocation of 287",
            ),
            (
                |of| of.layers[0].states = Some(Vec::new()),
                "layer rows: it has both attention and states",
            ),
            (
                |of| rows(of).num_kv_heads = 0,
                "layer rows: num_kv_heads is 0",
            ),
            (
                |of| rows(of).key_elements = 0,
                "layer rows: key_elements is 0",
            ),
            (
                |of| rows(of).kernel_block_slots = 3,
                "layer rows: a kernel block of 3 slots does not divide a block of 4",
            ),
            (
                |of| of.groups[0].block_size_tokens = 6,
                "layer rows: block_slots is 4, which does not divide the 6 tokens",
            ),
            (
                |of| rows(of).first_model_kv_head = Some(3),
                "layer rows: it holds the model's kv heads 3 to 5 of 4",
            ),
            (
                |of| rows(of).first_model_kv_head = None,
                "layer rows: model_kv_heads and first_model_kv_head must both",
            ),
            (
                |of| rows(of).format = Format::Int8PerTokenHead,
                "layer rows: inline_scale_elements is 0 and page_end_scale_bytes is 0; rows of int8",
            ),
            (
                |of| rows(of).page_end_scale_bytes = 4,
                "layer rows: it stores scales, and scale_dtype is null",
            ),
            (
                |of| rows(of).value_elements = 2,
                "layer rows: keys and values of different widths",
            ),
            (
                |of| rows(of).value_elements = 0,
                "layer rows: value_offset_elements is set, but it has no values",
            ),
            (
                |of| rows(of).head_stride_elements = 2,
                "layer rows: head_stride_elements is 2, but what lies in between takes 3",
            ),
            (
                |of| rows(of).slot_stride_elements = 1 << 62,
                "more than 63 bits",
            ),
            (
                |of| rows(of).slot_stride_elements = u64::MAX,
                "layer rows: slot_stride_elements is 18446744073709551615",
            ),
            (
                |of| rows(of).slot_stride_elements = 10_000,
                "layer rows: its blocks reach byte 20276 of an allocation of 288",
            ),
            (
                |of| rows(of).value_offset_elements = 73,
                "layer rows: its blocks reach byte 290",
            ),
            (
                |of| rows(of).value_offset_elements = 71,
                "layer rows: value_offset_elements is 71, but what lies in between takes 72",
            ),
            (
                |of| state(of, 1).offset_bytes = 22,
                "layer states: state 1 is bytes 22 to 30 of a page; it must be behind the state before it",
            ),
            (
                |of| state(of, 1).offset_bytes = 25,
                "layer states: it starts at byte 25, which is not a multiple",
            ),
            (
                |of| state(of, 0).shape = vec![25],
                "layer states: state 0 is bytes 0 to 100 of a page",
            ),
            (
                |of| state(of, 0).shape = vec![1 << 40, 1 << 40],
                "layer states: a state of",
            ),
            (
                |of| {
                    of.layers[1].allocation = 0;
                    of.layers[0] = layer("rows", 0, false, 3);
                },
                "allocation 0: layers rows and states of group 0",
            ),
        ];
        for (change, expected) in cases {
            let mut of = descriptor(true);
            change(&mut of);
            let error = of.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}\n is not\n{expected}");
        }
    }

    #[test]
    fn rows_stay_in_the_runs_of_their_block() {
        // Alone, rows and pages are possible; together they are not.
        let mut of = descriptor(false);
        let page = of.layers[0].pages;
        of.layers[0].pages = Pages {
            run_bytes: 48,
            page_bytes: 48,
            content_bytes: 48,
            ..page
        };
        let error = of.check().unwrap_err().to_string();
        assert!(error.contains("take 96 bytes of a block"), "{error}");
        // Slots of a block that lie in the next one.
        let mut of = descriptor(false);
        let rows = of.layers[0].attention.as_mut().unwrap();
        rows.kernel_block_stride_elements = 12;
        rows.slot_stride_elements = 72;
        let error = of.check().unwrap_err().to_string();
        assert!(
            error.contains("do not make pages.block_step_bytes"),
            "{error}"
        );
        let mut of = descriptor(false);
        of.max_blocks = 2;
        of.num_blocks = 2;
        of.allocations[0].size_bytes = 1000;
        let rows = of.layers[0].attention.as_mut().unwrap();
        rows.block_slots = 2;
        rows.kernel_block_slots = 2;
        rows.kernel_block_stride_elements = 48;
        rows.slot_stride_elements = 96;
        of.groups[0].block_size_tokens = 2;
        let error = of.check().unwrap_err().to_string();
        assert!(
            error.contains("its rows reach byte 216 of run 0 of a block, which has 1 runs of 96"),
            "{error}"
        );
        // Values in a run that the page does not have.
        let mut of = descriptor(true);
        let rows = of.layers[0].attention.as_mut().unwrap();
        rows.value_offset_elements *= 2;
        of.allocations[0].size_bytes = 1000;
        let error = of.check().unwrap_err().to_string();
        assert!(
            error.contains("of run 2 of a block, which has 2 runs"),
            "{error}"
        );
        // A stride that ends between two runs.
        let mut of = descriptor(true);
        let rows = of.layers[0].attention.as_mut().unwrap();
        rows.value_offset_elements += 1;
        of.allocations[0].size_bytes += 2;
        let error = of.check().unwrap_err().to_string();
        assert!(error.contains("ends between two runs"), "{error}");
    }
}
