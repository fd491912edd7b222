//! Kinds that can share block tables, and what a block of them costs.

use std::sync::Arc;

use super::contract::suits;
use super::cost::{Lengths, steps_far};
use super::fit::{fit, in_blocks};
use super::kinds::{Kind, add};
use super::search::Part;
use crate::backend::Backend;
use crate::num::lcm;
use crate::plan::GroupSpec;
use crate::plan::group::{WholeGroup, dealt};
use crate::plan::pack::Packing;
use crate::spec::{Family, Spec, SpecSet, merge};

/// Blocks of so many times a kind's size are tried in packed blocks: any number, which fills blocks
/// best, and numbers that keep a scheduler's step short.
pub(super) const SCALES: [&[u64]; 2] = [
    &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
    &[1, 2, 4, 8, 16, 32],
];

/// The most different backends that read one table. One kernel block size must suit all of them.
const MOST_READERS: usize = 16;

/// All kinds, in classes.
pub(super) struct Classes<'a> {
    pub classes: Vec<Class<'a>>,
    pub packing: Packing,
}

/// Kinds whose layers need the same blocks, so that any of them can be in one group.
pub(super) struct Class<'a> {
    /// Layers whose pages count alike.
    pub columns: Vec<Column>,
    /// What the kinds may store. At least one.
    pub choices: Vec<Choice>,
    /// The different backends that read its layers.
    backends: Vec<&'a Backend>,
}

/// Layers of a class that are dealt out to its groups together.
pub(super) struct Column {
    /// How many of them each stage has.
    pub on_stages: Vec<u64>,
    /// The kinds that they are of, each with the place of its spec in a choice.
    kinds: Vec<(usize, usize)>,
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

impl Classes<'_> {
    /// Whether a scheduler would step far with blocks as a split has them.
    pub fn step_far(&self, parts: &[Part], lengths: &Lengths) -> bool {
        let specs = self.classes.iter().zip(parts);
        let specs = specs.map(|(class, part)| &*class.choices[part.choice].specs[0]);
        steps_far(specs, &lengths.base)
    }
}

impl<'a> Class<'a> {
    /// A class of one kind.
    fn of(number: usize, kind: &Kind<'a>, choice: Choice) -> Class<'a> {
        Class {
            columns: vec![Column {
                on_stages: kind.on_stages.clone(),
                kinds: vec![(number, 0)],
            }],
            choices: vec![choice],
            backends: kind.backends.clone(),
        }
    }

    /// Takes in a kind that stores `spec`, if its layers need the same blocks as these and one kernel
    /// block size suits all who read them. Tells the place of its spec.
    fn take(&mut self, kind: &Kind<'a>, spec: &Arc<Spec>, is_packed: bool) -> Option<usize> {
        let specs = &mut self.choices[0].specs;
        if key(&specs[0]) != key(spec) {
            return None;
        }
        let known = self.backends.len();
        let mut all = self.backends.clone();
        kind.backends
            .iter()
            .for_each(|backend| add(&mut all, backend));
        // What is here goes with the backends that are here.
        let unknown = match all.len() == known {
            true => &[][..],
            false => &specs[..],
        };
        let mut to_check = unknown.iter().chain(std::iter::once(spec));
        if all.len() > MOST_READERS || !to_check.all(|spec| suits(spec, &all, is_packed)) {
            return None;
        }
        self.backends = all;
        specs.push(Arc::clone(spec));
        Some(specs.len() - 1)
    }

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
        let specs = &self.choices[part.choice].specs;
        let mut members: Vec<Vec<(usize, &Arc<Spec>)>> = Vec::new();
        for column in &self.columns {
            let of_kind = |&(kind, place): &(usize, usize)| {
                let layers = kinds[kind].layers.iter();
                layers.map(move |&layer| (layer, &specs[place]))
            };
            let mut layers: Vec<_> = column.kinds.iter().flat_map(of_kind).collect();
            layers.sort_unstable_by_key(|&(layer, _)| layer);
            for (group, dealt) in dealt(&layers, number).enumerate() {
                if members.len() <= group {
                    members.push(Vec::new());
                }
                members[group].extend(dealt);
            }
        }
        members.retain(|group| !group.is_empty());
        let groups = members.into_iter().map(|mut members| {
            members.sort_unstable_by_key(|&(layer, _)| layer);
            group_of(&members)
        });
        groups.collect()
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
pub(super) fn of_page<'a>(kinds: &[Kind<'a>], page: u64, lengths: &Lengths) -> Option<Classes<'a>> {
    let mut classes: Vec<Class<'a>> = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        let spec = fit(kind, page)?;
        let taken = classes.iter_mut().find_map(|class| {
            let place = class.take(kind, &spec, false)?;
            Some((class, place))
        });
        match taken {
            // Equal pages count alike.
            Some((class, place)) => {
                let column = &mut class.columns[0];
                column.kinds.push((number, place));
                for (sum, own) in column.on_stages.iter_mut().zip(&kind.on_stages) {
                    *sum += own;
                }
            }
            None => {
                let choice = Choice {
                    pages: vec![page],
                    blocks: lengths.blocks(&spec).ok()?,
                    specs: vec![spec],
                };
                classes.push(Class::of(number, kind, choice));
            }
        }
    }
    Some(Classes {
        classes,
        packing: Packing::ByPlace,
    })
}

/// Kinds in packed blocks: pages of any size, each group from the start of a block. `None` where a
/// kind's kernels cannot read such pages.
pub(super) fn overlaid<'a>(
    kinds: &[Kind<'a>],
    scales: &[u64],
    lengths: &Lengths,
) -> Option<Classes<'a>> {
    let step = slot_step(kinds)?;
    let mut classes: Vec<Class<'a>> = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        if !suits(&kind.smallest, &kind.backends, true) {
            return None;
        }
        let taken = classes.iter_mut().find_map(|class| {
            let place = class.take(kind, &kind.smallest, true)?;
            Some((class, place))
        });
        match taken {
            Some((class, place)) => class.columns.push(Column {
                on_stages: kind.on_stages.clone(),
                kinds: vec![(number, place)],
            }),
            None => {
                let as_they_are = Choice {
                    pages: Vec::new(),
                    blocks: [0; 2],
                    specs: vec![Arc::clone(&kind.smallest)],
                };
                classes.push(Class::of(number, kind, as_they_are));
            }
        }
    }
    for class in &mut classes {
        let smallest = std::mem::take(&mut class.choices[0].specs);
        class.choices.clear();
        for &times in scales {
            let choice = scaled_together(&class.backends, &smallest, times);
            let choice = choice.and_then(|specs| packed_choice(specs, step, lengths));
            class.choices.extend(choice);
        }
        if class.choices.is_empty() {
            return None;
        }
    }
    Some(Classes {
        classes,
        packing: Packing::Overlaid { step },
    })
}

fn packed_choice(specs: Vec<Arc<Spec>>, step: u64, lengths: &Lengths) -> Option<Choice> {
    let rooms = specs.iter().map(|spec| {
        let page = spec.page().padded;
        page.div_ceil(step).saturating_mul(step)
    });
    Some(Choice {
        pages: rooms.collect(),
        blocks: lengths.blocks(&specs[0]).ok()?,
        specs,
    })
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
fn scaled_together(
    backends: &[&Backend],
    smallest: &[Arc<Spec>],
    times: u64,
) -> Option<Vec<Arc<Spec>>> {
    if times == 1 {
        return Some(smallest.to_vec());
    }
    let scaled = smallest.iter().map(|spec| {
        let attention = spec.as_attention()?;
        // Padding that was given is for the size that it was given with.
        if attention.fields().page_size_padded.is_some() {
            return None;
        }
        let scaled = Spec::Attention(in_blocks(attention, times, None)?);
        suits(&scaled, backends, true).then(|| Arc::new(scaled))
    });
    scaled.collect()
}
