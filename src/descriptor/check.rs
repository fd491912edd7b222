//! What a descriptor says is proven before it is believed, by the proofs that views of a cache have.

use std::collections::HashSet;

use super::{Attention, Descriptor, DescriptorError, Layer, Pages, State};
use crate::num::{MAX, Overflow, product, sum};
use crate::view::{AuditError, BlockRuns, Owned, audit, check_ownership};

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

impl From<AuditError> for Problem {
    fn from(error: AuditError) -> Problem {
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
        within("max_blocks", self.max_blocks, 1, MAX_BLOCKS)?;
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

    fn check_layer(&self, number: usize, layer: &Layer) -> Checked {
        below("group", layer.group, self.groups.len())?;
        below("allocation", layer.allocation, self.allocations.len())?;
        below("owner_layer", layer.owner_layer, self.layers.len())?;
        let allocation = self.allocations[layer.allocation as usize].size_bytes;
        check_pages(&layer.pages, self.max_blocks, allocation)?;
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
        let kernel_blocks = product("the kernel blocks", [self.max_blocks, ratio])?;
        let block_dim = Dim {
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
        check_rows_are_in_pages(stored, &dims, pages, self.max_blocks)
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
                    count: self.max_blocks,
                    stride: pages.block_step_bytes / bytes,
                },
                Dim {
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
    within("pages.num_runs", pages.num_runs, 1, MAX)?;
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
            count: pages.num_runs,
            stride: pages.run_step_bytes,
        },
        Dim {
            count: max_blocks,
            stride: pages.block_step_bytes,
        },
        Dim {
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
            count: stored.kernel_block_slots,
            stride: stored.slot_stride_elements,
        },
        Dim {
            count: kv,
            stride: stored.value_offset_elements,
        },
        Dim {
            count: stored.num_kv_heads,
            stride: stored.head_stride_elements,
        },
        Dim {
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

/// The proof of a view, for numbers that may be too large for one.
fn prove(dims: &[Dim], offset: u64, element_bytes: u64, allocation: u64) -> Checked {
    let mut shape = Vec::with_capacity(dims.len());
    let mut strides = Vec::with_capacity(dims.len());
    for dim in dims {
        for value in [dim.count, dim.stride] {
            most("a size or stride", value, MAX)?;
        }
        shape.push(dim.count as i64);
        strides.push(dim.stride as i64);
    }
    audit(&shape, &strides, offset, element_bytes, allocation)?;
    Ok(())
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
