//! Into how many groups each class of layers is split.
//!
//! With N blocks each stage has so many bytes for one, and each class needs at least so many groups
//! for its layers to fit in them. More groups than that only cost, so for each N there is one best
//! split; and a best N is one at which some class just fits.

use super::classes::{Choice, Class, Classes};
use super::cost::{Floor, Lengths, weight};
use super::effort;
use super::kinds::Kind;
use crate::plan::PlanConfig;
use crate::plan::capacity::Capacity;
use crate::plan::finish::Job;
use crate::plan::pack::Packing;
use crate::plan::reach::reached_bytes;

/// Memory of a stage where the engine says how many blocks there are. All that counts is that it is
/// the same on all stages and can be divided finely.
const NOMINAL_MEMORY: u64 = 1 << 56;

/// What there is to share out.
pub(super) struct Pool<'a> {
    /// Bytes of the worker with least, for each stage.
    memory: Vec<u64>,
    config: &'a PlanConfig,
    /// Bytes from the start of a tensor that every kernel reaches.
    reach: Option<u64>,
}

impl<'a> Pool<'a> {
    pub fn of(job: &Job<'_>, kinds: &[Kind<'_>], config: &'a PlanConfig) -> Pool<'a> {
        let mut memory = vec![NOMINAL_MEMORY; job.stages.len()];
        if config.num_blocks_override.is_none() {
            memory.fill(u64::MAX);
            for (worker, &stage) in job.workers.iter().zip(job.stage_of_worker) {
                let bytes = u64::try_from(worker.memory_bytes).unwrap_or(0);
                memory[stage] = memory[stage].min(bytes);
            }
        }
        let reaches = kinds.iter().flat_map(|kind| {
            let of_backend = |backend: &&_| reached_bytes(&kind.smallest, backend);
            kind.backends.iter().filter_map(of_backend)
        });
        Pool {
            memory,
            config,
            reach: reaches.min(),
        }
    }
}

/// How a class is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Which of its choices it takes.
    pub choice: usize,
    /// Into how many groups.
    pub groups: u64,
}

/// How all classes are split.
#[derive(Debug, Clone)]
pub(super) struct Split {
    /// For each class.
    pub parts: Vec<Part>,
    /// Groups of all classes.
    pub groups: u64,
    /// Whether a request of the longest sequence fits.
    pub fits: bool,
    /// Whether a scheduler would step far with it.
    pub steps_far: bool,
    /// What it costs.
    pub cost: f64,
}

impl Split {
    pub fn is_better_than(&self, other: &Split) -> bool {
        (other.fits, self.steps_far, self.cost, self.groups)
            < (self.fits, other.steps_far, other.cost, other.groups)
    }
}

/// Splits that are finished and compared. The search counts as the plan will, so the first is nearly
/// always the one.
const KEPT: usize = 4;

/// The best splits of all that were looked at, with the classes that they split.
pub(super) struct Best<'p, 'k> {
    pool: &'p Pool<'p>,
    lengths: &'p Lengths,
    floor: Option<&'p Floor>,
    has_looked: bool,
    /// Best first.
    splits: Vec<(Classes<'k>, Split)>,
}

impl<'p, 'k> Best<'p, 'k> {
    /// None yet. A split below the floor is none.
    pub fn new(pool: &'p Pool<'p>, lengths: &'p Lengths, floor: Option<&'p Floor>) -> Self {
        Best {
            pool,
            lengths,
            floor,
            has_looked: false,
            splits: Vec::with_capacity(KEPT + 1),
        }
    }

    pub fn lengths(&self) -> &'p Lengths {
        self.lengths
    }

    /// Keeps the classes if their best split is among the best.
    pub fn look_at(&mut self, classes: Classes<'k>) {
        self.has_looked = true;
        let Some(split) = best_split(&classes, self.pool, self.lengths, self.floor) else {
            return;
        };
        let is_no_worse = |(_, other): &(_, Split)| !split.is_better_than(other);
        let place = self.splits.partition_point(is_no_worse);
        if place < KEPT {
            self.splits.insert(place, (classes, split));
            self.splits.truncate(KEPT);
        }
    }

    /// Whether there were any classes.
    pub fn has_looked(&self) -> bool {
        self.has_looked
    }

    pub fn into_splits(self) -> Vec<(Classes<'k>, Split)> {
        self.splits
    }
}

/// The best split of all classes that reaches the floor.
fn best_split(
    classes: &Classes<'_>,
    pool: &Pool<'_>,
    lengths: &Lengths,
    floor: Option<&Floor>,
) -> Option<Split> {
    let mut best: Option<Split> = None;
    let mut parts = Vec::with_capacity(classes.classes.len());
    for num_blocks in numbers_of_blocks(classes, pool) {
        if !split_at(num_blocks, classes, pool, lengths, &mut parts) {
            continue;
        }
        let Some(mut split) = weighed(&parts, classes, pool, lengths, floor) else {
            continue;
        };
        let wins = |split: &Split| best.as_ref().is_none_or(|best| split.is_better_than(best));
        // Whether it steps far takes long to find out, and does not make it better.
        if !wins(&split) {
            continue;
        }
        split.steps_far = classes.step_far(&parts, lengths);
        if wins(&split) {
            split.parts.clone_from(&parts);
            best = Some(split);
        }
    }
    // So that finishing it says what is missing.
    best.or_else(|| floor.is_none().then(|| smallest_blocks(classes)))
}

/// A layer in each group: the least memory that a block can have.
fn smallest_blocks(classes: &Classes<'_>) -> Split {
    let parts: Vec<Part> = classes
        .classes
        .iter()
        .map(|class| Part {
            choice: 0,
            groups: class.longest_column(),
        })
        .collect();
    Split {
        groups: parts.iter().map(|part| part.groups).sum(),
        parts,
        fits: false,
        steps_far: true,
        cost: f64::INFINITY,
    }
}

/// The numbers of blocks at which some class just fits on some stage; of very many a part.
fn numbers_of_blocks(classes: &Classes<'_>, pool: &Pool<'_>) -> Vec<u64> {
    let mut numbers = Vec::new();
    for class in &classes.classes {
        for (stage, &memory) in pool.memory.iter().enumerate() {
            let splits = splits_of_all(class, stage);
            for choice in &class.choices {
                let bytes = splits
                    .iter()
                    .map(|&groups| class.bytes(choice, stage, groups));
                let fitting = bytes.filter_map(|bytes| memory.checked_div(bytes));
                numbers.extend(fitting.filter(|&number| number > 0));
            }
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    effort::thin(numbers, effort::numbers(classes, pool.memory.len()))
}

/// The numbers of groups at which some column of a class gets shorter on a stage.
fn splits_of_all(class: &Class<'_>, stage: usize) -> Vec<u64> {
    let mut lengths: Vec<u64> = class.columns.iter().map(|c| c.on_stages[stage]).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut splits: Vec<u64> = lengths.into_iter().flat_map(splits_of).collect();
    splits.sort_unstable();
    splits.dedup();
    splits
}

/// The numbers of groups at which the longest of them gets shorter.
fn splits_of(layers: u64) -> impl Iterator<Item = u64> {
    let first = (layers > 0).then_some(1);
    std::iter::successors(first, move |groups| {
        let longest = layers.div_ceil(*groups);
        (longest > 1).then(|| layers.div_ceil(longest - 1))
    })
}

/// The cheapest way to split each class so that a block fits `num_blocks` times. False where some class
/// does not fit at all.
fn split_at(
    num_blocks: u64,
    classes: &Classes<'_>,
    pool: &Pool<'_>,
    lengths: &Lengths,
    parts: &mut Vec<Part>,
) -> bool {
    parts.clear();
    for class in &classes.classes {
        let mut best: Option<(f64, Part)> = None;
        for (number, choice) in class.choices.iter().enumerate() {
            let Some(groups) = fewest_groups(class, choice, num_blocks, pool) else {
                continue;
            };
            let blocks = choice.blocks.map(|blocks| blocks.saturating_mul(groups));
            let cost = lengths.cost(blocks, 1.0, 0);
            let part = Part {
                choice: number,
                groups,
            };
            // Of equals the first, which has the smaller blocks.
            if best.is_none_or(|(least, known)| (cost, groups) < (least, known.groups)) {
                best = Some((cost, part));
            }
        }
        match best {
            Some((_, part)) => parts.push(part),
            None => return false,
        }
    }
    true
}

/// The fewest groups of a class that fit in a block on every stage.
fn fewest_groups(
    class: &Class<'_>,
    choice: &Choice,
    num_blocks: u64,
    pool: &Pool<'_>,
) -> Option<u64> {
    let room = |stage: usize| pool.memory[stage] / num_blocks.max(1);
    if let ([column], [page]) = (class.columns.as_slice(), choice.pages.as_slice()) {
        let mut groups = 1;
        for (stage, &layers) in column.on_stages.iter().enumerate() {
            match room(stage) / (*page).max(1) {
                0 if layers > 0 => return None,
                slots => groups = groups.max(layers.div_ceil(slots.max(1))),
            }
        }
        return Some(groups);
    }
    let fits = |groups: u64| {
        let mut stages = 0..pool.memory.len();
        stages.all(|stage| class.bytes(choice, stage, groups) <= room(stage))
    };
    let (mut too_few, mut enough) = (0, class.longest_column());
    if !fits(enough) {
        return None;
    }
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match fits(middle) {
            true => enough = middle,
            false => too_few = middle,
        }
    }
    Some(enough)
}

/// What a split holds and costs; `None` where it is below the floor. Its parts are left out, and so is
/// whether it steps far.
fn weighed(
    parts: &[Part],
    classes: &Classes<'_>,
    pool: &Pool<'_>,
    lengths: &Lengths,
    floor: Option<&Floor>,
) -> Option<Split> {
    let mut blocks = [0u64; 2];
    let mut groups = 0u64;
    for (class, part) in classes.classes.iter().zip(parts) {
        for (sum, own) in blocks.iter_mut().zip(class.choices[part.choice].blocks) {
            *sum = sum.saturating_add(own.saturating_mul(part.groups));
        }
        groups = groups.saturating_add(part.groups);
    }
    let mut num_blocks = u64::MAX;
    let mut largest = 0;
    for (stage, &memory) in pool.memory.iter().enumerate() {
        let of_classes = classes.classes.iter().zip(parts);
        let bytes = of_classes
            .map(|(class, part)| class.bytes(&class.choices[part.choice], stage, part.groups));
        let bytes = bytes.max().unwrap_or(0);
        num_blocks = num_blocks.min(memory.checked_div(bytes).unwrap_or(u64::MAX));
        largest = largest.max(bytes);
    }
    if let Some(reach) = pool.reach {
        let step = match classes.packing {
            Packing::Overlaid { .. } => largest,
            _ => classes.classes[0].choices[0].pages[0],
        };
        num_blocks = num_blocks.min(reach / step.max(1));
    }
    let num_blocks = pool.config.num_blocks_override.unwrap_or(num_blocks);
    let usable = num_blocks.saturating_sub(pool.config.reserved_blocks);
    let [typical, longest] = [0, 1].map(|i| Capacity {
        len: lengths.tokens[i],
        usable_blocks: usable,
        blocks_per_request: blocks[i],
    });
    if floor.is_some_and(|floor| !floor.is_met(&[typical, longest], groups)) {
        return None;
    }
    Some(Split {
        parts: Vec::new(),
        groups,
        fits: blocks[1] <= usable,
        steps_far: false,
        cost: lengths.cost(blocks, weight(usable, largest, pool.config), groups),
    })
}
