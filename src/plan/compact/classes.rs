//! Kinds that can share block tables, and what a block of them costs.

use std::sync::Arc;

use super::contract::suits;
use super::cost::{Lengths, steps_far};
use super::fit::{fit, in_blocks};
use super::kinds::Kind;
use super::search::Part;
use crate::backend::Backend;
use crate::num::lcm;
use crate::plan::GroupSpec;
use crate::plan::error::PlanError;
use crate::plan::group::{WholeGroup, dealt};
use crate::plan::pack::Packing;
use crate::spec::{Family, Spec, SpecSet, merge};

/// Blocks of so many times a kind's size are tried in packed blocks: any number, which fills blocks
/// best, and numbers that keep a scheduler's step short.
pub(super) const SCALES: [&[u64]; 2] = [
    &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
    &[1, 2, 4, 8, 16, 32],
];
/// All kinds, in classes.
pub(super) struct Classes {
    pub classes: Vec<Class>,
    pub packing: Packing,
}

/// Kinds whose layers need the same blocks, so that any of them can be in one group.
pub(super) struct Class {
    /// Layers whose pages count alike.
    pub columns: Vec<Column>,
    /// Which kind each of `layers` is of.
    kinds: Vec<usize>,
    /// What the kinds may store. At least one.
    pub choices: Vec<Choice>,
}

/// Layers of a class that are dealt out to its groups together.
pub(super) struct Column {
    /// How many of them each stage has.
    pub on_stages: Vec<u64>,
    /// The kinds that they are of.
    kinds: Vec<usize>,
}

/// One size of a class's blocks.
pub(super) struct Choice {
    /// Bytes of a block in one layer of each column.
    pub pages: Vec<u64>,
    /// Blocks that one request holds of a group, at each length.
    pub blocks: [u64; 2],
    /// What each of the class's kinds stores.
    specs: Vec<Arc<Spec>>,
}

impl Classes {
    /// Whether a scheduler would step far with blocks as a split has them.
    pub fn step_far(&self, parts: &[Part]) -> bool {
        let specs = self.classes.iter().zip(parts);
        steps_far(specs.map(|(class, part)| &*class.choices[part.choice].specs[0]))
    }
}

impl Class {
    /// Bytes that a group takes of a block on a stage, when the class is split into `groups`.
    pub fn bytes(&self, choice: &Choice, stage: usize, groups: u64) -> u64 {
        let columns = self.columns.iter().zip(&choice.pages);
        let bytes = columns.map(|(column, page)| {
            page.saturating_mul(column.on_stages[stage].div_ceil(groups.max(1)))
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// The most layers that a column has on one stage.
    pub fn longest_column(&self) -> u64 {
        let counts = self.columns.iter().flat_map(|column| &column.on_stages);
        counts.copied().max().unwrap_or(1).max(1)
    }

    /// The class's layers in as many groups as a split says, each stage's share of a column dealt out
    /// in turn.
    pub fn groups(&self, kinds: &[Kind<'_>], part: &Part) -> Vec<WholeGroup> {
        let number = usize::try_from(part.groups).unwrap_or(usize::MAX);
        let mut members: Vec<Vec<(usize, &Arc<Spec>)>> = Vec::new();
        for column in &self.columns {
            let mut layers: Vec<usize> = Vec::new();
            for &kind in &column.kinds {
                layers.extend(&kinds[kind].layers);
            }
            layers.sort_unstable();
            for (group, dealt) in dealt(&layers, number).enumerate() {
                if members.len() <= group {
                    members.push(Vec::new());
                }
                let with_spec = dealt.into_iter().map(|l| (l, self.spec_of(kinds, l, part)));
                members[group].extend(with_spec);
            }
        }
        members.retain(|group| !group.is_empty());
        let groups = members.into_iter().map(|mut members| {
            members.sort_unstable_by_key(|&(layer, _)| layer);
            group_of(&members)
        });
        groups.collect()
    }

    fn spec_of(&self, kinds: &[Kind<'_>], layer: usize, part: &Part) -> &Arc<Spec> {
        let has = |kind: &usize| kinds[*kind].layers.binary_search(&layer).is_ok();
        let place = match self.kinds.len() {
            1 => 0,
            _ => self.kinds.iter().position(has).unwrap_or(0),
        };
        &self.choices[part.choice].specs[place]
    }
}

fn group_of(members: &[(usize, &Arc<Spec>)]) -> WholeGroup {
    let layers = members.iter().map(|&(layer, _)| layer).collect();
    let first = members[0].1;
    let mut different: Vec<&Spec> = Vec::new();
    for (_, spec) in members {
        if !different
            .iter()
            .any(|known| std::ptr::eq(*known, spec.as_ref()))
        {
            different.push(spec);
        }
    }
    let spec = match different.as_slice() {
        [_] => GroupSpec::One(Arc::clone(first)),
        _ => match merge(&different) {
            Ok(merged) => GroupSpec::One(Arc::new(merged)),
            Err(_) => {
                let specs = members.iter().map(|(_, spec)| Arc::clone(spec)).collect();
                // Classes are made of one family and one block size, so this is a set.
                let set = SpecSet::new(specs);
                set.map_or_else(|| GroupSpec::One(Arc::clone(first)), GroupSpec::Set)
            }
        },
    };
    WholeGroup::new(layers, spec)
}

/// What decides whether layers can share a block table.
fn key(spec: &Spec) -> (Option<Family>, u64) {
    (Family::of(spec), spec.block_size())
}

/// Kinds in pages of `page` bytes; `None` where some kind has no such page.
pub(super) fn of_page(
    kinds: &[Kind<'_>],
    page: u64,
    lengths: &Lengths,
) -> Result<Option<Classes>, PlanError> {
    let mut classes: Vec<Class> = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        let Some(spec) = fit(kind, page) else {
            return Ok(None);
        };
        let like = |class: &&mut Class| {
            let choice = &class.choices[0];
            let members = class.kinds.iter().map(|&kind| &kinds[kind]);
            key(&choice.specs[0]) == key(&spec)
                && suit_together(members, &choice.specs, (kind, &spec), false)
        };
        match classes.iter_mut().find(like) {
            Some(class) => {
                class.kinds.push(number);
                class.choices[0].specs.push(spec);
                let column = &mut class.columns[0];
                column.kinds.push(number);
                for (sum, own) in column.on_stages.iter_mut().zip(&kind.on_stages) {
                    *sum += own;
                }
            }
            None => classes.push(Class {
                columns: vec![Column {
                    on_stages: kind.on_stages.clone(),
                    kinds: vec![number],
                }],
                kinds: vec![number],
                choices: vec![Choice {
                    pages: vec![page],
                    blocks: blocks(kind, &spec, lengths)?,
                    specs: vec![spec],
                }],
            }),
        }
    }
    Ok(Some(Classes {
        classes,
        packing: Packing::ByPlace,
    }))
}

/// Whether one kernel block size suits a kind and those it would share a table with.
fn suit_together<'k, 'a: 'k>(
    members: impl Iterator<Item = &'k Kind<'a>>,
    specs: &[Arc<Spec>],
    (kind, spec): (&Kind<'a>, &Arc<Spec>),
    is_packed: bool,
) -> bool {
    let mut backends: Vec<&Backend> = kind.backends.clone();
    for member in members {
        backends.extend(&member.backends);
    }
    let mut all = specs.iter().chain(std::iter::once(spec));
    backends.is_empty() || all.all(|spec| suits(spec, &backends, is_packed))
}

fn blocks(kind: &Kind<'_>, spec: &Spec, lengths: &Lengths) -> Result<[u64; 2], PlanError> {
    let [typical, longest] = lengths.limits();
    let of = |limits| {
        let blocks = spec.blocks_per_request(&limits);
        blocks.map_err(|error| PlanError::demand(kind.name, error))
    };
    Ok([of(typical)?, of(longest)?])
}

/// Kinds in packed blocks: pages of any size, each group from the start of a block. `None` where a
/// kind's kernels cannot read such pages.
pub(super) fn overlaid(
    kinds: &[Kind<'_>],
    scales: &[u64],
    lengths: &Lengths,
) -> Result<Option<Classes>, PlanError> {
    let Some(step) = slot_step(kinds) else {
        return Ok(None);
    };
    let mut classes: Vec<Class> = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        if !suits(&kind.smallest, &kind.backends, true) {
            return Ok(None);
        }
        let like = |class: &&mut Class| {
            let choice = &class.choices[0];
            let members = class.kinds.iter().map(|&kind| &kinds[kind]);
            key(&choice.specs[0]) == key(&kind.smallest)
                && suit_together(members, &choice.specs, (kind, &kind.smallest), true)
        };
        let column = Column {
            on_stages: kind.on_stages.clone(),
            kinds: vec![number],
        };
        match classes.iter_mut().find(like) {
            Some(class) => {
                class.kinds.push(number);
                class.columns.push(column);
                class.choices[0].specs.push(Arc::clone(&kind.smallest));
            }
            None => classes.push(Class {
                columns: vec![column],
                kinds: vec![number],
                choices: vec![Choice {
                    pages: Vec::new(),
                    blocks: [0; 2],
                    specs: vec![Arc::clone(&kind.smallest)],
                }],
            }),
        }
    }
    for class in &mut classes {
        let smallest = std::mem::take(&mut class.choices[0].specs);
        class.choices.clear();
        for &times in scales {
            let members = || class.kinds.iter().map(|&kind| &kinds[kind]);
            let Some(specs) = scaled_together(members, &smallest, times) else {
                continue;
            };
            let first = &kinds[class.kinds[0]];
            let rooms = specs.iter().map(|spec| {
                let page = spec.page().padded;
                page.div_ceil(step).saturating_mul(step)
            });
            class.choices.push(Choice {
                pages: rooms.collect(),
                blocks: blocks(first, &specs[0], lengths)?,
                specs,
            });
        }
    }
    Ok(Some(Classes {
        classes,
        packing: Packing::Overlaid { step },
    }))
}

/// What all slots of a packed block are multiples of, so that each is aligned for any layer.
fn slot_step(kinds: &[Kind<'_>]) -> Option<u64> {
    let mut step = 1;
    for kind in kinds {
        let own: Vec<u64> = match kind.smallest.as_ref() {
            Spec::State(state) => state.fields().dtypes.iter().map(|d| d.bytes()).collect(),
            Spec::Attention(attention) => vec![attention.fields().dtype.bytes()],
        };
        let demanded = kind.backends.iter().map(|b| b.contract().alignment);
        for bytes in own.into_iter().chain(demanded) {
            step = lcm("a slot", step, bytes).ok()?;
        }
    }
    Some(step)
}

/// All specs in blocks `times` as large, if their kernels read them together in packed blocks. States
/// have one size.
fn scaled_together<'k, 'a: 'k, I: Iterator<Item = &'k Kind<'a>>>(
    members: impl Fn() -> I,
    smallest: &[Arc<Spec>],
    times: u64,
) -> Option<Vec<Arc<Spec>>> {
    if times == 1 {
        return Some(smallest.to_vec());
    }
    let backends: Vec<&Backend> = members().flat_map(|kind| kind.backends.clone()).collect();
    let scaled = smallest.iter().map(|spec| {
        let attention = spec.as_attention()?;
        // Padding that was given is for the size that it was given with.
        if attention.fields().page_size_padded.is_some() {
            return None;
        }
        let scaled = Spec::Attention(in_blocks(attention, times, None)?);
        suits(&scaled, &backends, true).then(|| Arc::new(scaled))
    });
    scaled.collect()
}
