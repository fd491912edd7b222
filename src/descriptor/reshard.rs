//! From the caches of some ranks to those of others: which bytes go where when blocks move between
//! tensor-parallel sizes or between layouts.
//!
//! Everything is worked out for block 0 on both sides once. A block is a constant distance behind the
//! one before it, so the copies of any two blocks are those of block 0, moved.

use std::collections::HashMap;

use super::strided::{Location, Step, StridedCopy};
use super::{Attention, Descriptor, DescriptorError, Layer, Pages};
use crate::num::{Overflow, product};

/// How blocks of some ranks become blocks of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reshard {
    /// By group of the targets.
    patterns: Vec<Pattern>,
    num_groups: u64,
    /// Blocks that all sources have.
    source_blocks: u64,
    /// Blocks that all targets have.
    target_blocks: u64,
}

/// A copy of block 0, and how far the next blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pattern {
    group: u64,
    copy: StridedCopy,
    source_block_bytes: u64,
    target_block_bytes: u64,
}

/// A block that moves, with all layers of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    /// The group, as the targets number it.
    pub group: u64,
    /// The block on the sources.
    pub source: i32,
    /// The block on the targets.
    pub target: i32,
}

/// Why blocks cannot move.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReshardError {
    /// Nothing to copy from or to.
    #[error(
        "there are {sources} sources and {targets} targets; there must be one of each at least"
    )]
    NoRanks {
        /// Sources given.
        sources: usize,
        /// Targets given.
        targets: usize,
    },
    /// A layer that would not be the same afterwards.
    #[error("layer {layer}, target {target}: {problem}")]
    Layer {
        /// The layer.
        layer: String,
        /// Which of the targets.
        target: usize,
        /// What is in the way.
        problem: String,
    },
    /// Layers that follow one block table on the targets, and several on the sources.
    #[error(
        "layers {first} and {second} are of one group on the targets, but not on the sources; one block number cannot mean both"
    )]
    GroupsDiffer {
        /// A layer.
        first: String,
        /// Another one.
        second: String,
    },
    /// A group that is not there.
    #[error("entry {index}: group {group} is not there, the targets have {num_groups} groups")]
    NoGroup {
        /// Which entry.
        index: usize,
        /// The group.
        group: u64,
        /// Groups there are.
        num_groups: u64,
    },
    /// A block that is not there.
    #[error("entry {index}: {side} block {block} is out of range, there are {num_blocks} blocks")]
    NoBlock {
        /// Which entry.
        index: usize,
        /// Source or target.
        side: &'static str,
        /// The block.
        block: i32,
        /// Blocks there are.
        num_blocks: u64,
    },
    /// A block that would be written twice.
    #[error("target block {block} is listed twice")]
    BlockTwice {
        /// The block.
        block: i32,
    },
    /// No memory for what the call needs.
    #[error("no memory for {entries} entries")]
    NoMemory {
        /// Entries.
        entries: usize,
    },
    /// A descriptor that is none.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// A size that does not fit.
    #[error(transparent)]
    Overflow(#[from] Overflow),
}

impl ReshardError {
    /// A name that stays the same from version to version.
    pub fn kind(&self) -> &'static str {
        match self {
            ReshardError::NoRanks { .. } => "bad_values",
            ReshardError::Layer { .. } => "layer_not_reshardable",
            ReshardError::GroupsDiffer { .. } => "groups_not_reshardable",
            ReshardError::NoGroup { .. } => "not_found",
            ReshardError::NoBlock { .. } => "block_id_out_of_range",
            ReshardError::BlockTwice { .. } => "duplicate_block_id",
            ReshardError::NoMemory { .. } => "out_of_host_memory",
            ReshardError::Descriptor(error) => error.kind(),
            ReshardError::Overflow(_) => "overflow",
        }
    }
}

/// A layer of a rank.
#[derive(Clone, Copy)]
struct OfRank<'a> {
    rank: usize,
    of: &'a Descriptor,
    layer: &'a Layer,
}

/// What is wrong with a layer, in words that follow its name.
type Described<T> = Result<T, String>;

impl Reshard {
    /// Works out how blocks of `sources` become blocks of `targets`: for each layer of each target,
    /// from the sources that hold the layer and the target's heads.
    pub fn new(sources: &[&Descriptor], targets: &[&Descriptor]) -> Result<Reshard, ReshardError> {
        if sources.is_empty() || targets.is_empty() {
            return Err(ReshardError::NoRanks {
                sources: sources.len(),
                targets: targets.len(),
            });
        }
        for rank in sources.iter().chain(targets) {
            rank.check()?;
        }
        let sources_of = layers_by_name(sources);
        let mut patterns = Vec::new();
        let mut groups = Groups::default();
        for (rank, of) in targets.iter().enumerate() {
            for (number, layer) in of.layers.iter().enumerate() {
                let target = OfRank { rank, of, layer };
                let failed = |problem| ReshardError::Layer {
                    layer: layer.name.clone(),
                    target: rank,
                    problem,
                };
                let holders = sources_of.get(layer.name.as_str());
                let holders = holders.map_or(&[][..], Vec::as_slice);
                let Some(first) = holders.first() else {
                    return Err(failed("no source has a layer of that name".to_owned()));
                };
                groups.note(first.layer.group, &target)?;
                for holder in holders {
                    if holder.layer.group != first.layer.group {
                        return Err(failed(
                            "sources have it in groups of different numbers".to_owned(),
                        ));
                    }
                }
                if layer.owner_layer == number as u64 {
                    let of_layer = layer_patterns(holders, &target).map_err(failed)?;
                    patterns.extend(of_layer);
                } else {
                    check_sharer(&sources_of, holders, &target).map_err(failed)?;
                }
            }
        }
        Ok(Reshard {
            patterns: joined(patterns),
            num_groups: fewest(targets, |of| of.groups.len() as u64),
            source_blocks: fewest(sources, |of| of.num_blocks),
            target_blocks: fewest(targets, |of| of.num_blocks),
        })
    }

    /// The copies that `moves` take, those of one move after those of the one before.
    pub fn copies<'a>(
        &'a self,
        moves: &'a [BlockMove],
    ) -> Result<impl Iterator<Item = StridedCopy> + Clone + 'a, ReshardError> {
        self.check(moves)?;
        Ok(moves.iter().flat_map(move |moved| {
            let of_group = self.of_group(moved.group);
            of_group.iter().map(move |pattern| pattern.at(moved))
        }))
    }

    /// How many copies `moves` take.
    pub fn num_copies(&self, moves: &[BlockMove]) -> usize {
        let counts = moves.iter().map(|moved| self.of_group(moved.group).len());
        counts.fold(0, usize::saturating_add)
    }

    fn of_group(&self, group: u64) -> &[Pattern] {
        let start = self
            .patterns
            .partition_point(|pattern| pattern.group < group);
        let end = self
            .patterns
            .partition_point(|pattern| pattern.group <= group);
        &self.patterns[start..end]
    }

    fn check(&self, moves: &[BlockMove]) -> Result<(), ReshardError> {
        for (index, moved) in moves.iter().enumerate() {
            if moved.group >= self.num_groups {
                return Err(ReshardError::NoGroup {
                    index,
                    group: moved.group,
                    num_groups: self.num_groups,
                });
            }
            for (side, block, num_blocks) in [
                ("source", moved.source, self.source_blocks),
                ("target", moved.target, self.target_blocks),
            ] {
                if block < 0 || block as u64 >= num_blocks {
                    return Err(ReshardError::NoBlock {
                        index,
                        side,
                        block,
                        num_blocks,
                    });
                }
            }
        }
        let mut targets = Vec::new();
        targets
            .try_reserve_exact(moves.len())
            .map_err(|_| ReshardError::NoMemory {
                entries: moves.len(),
            })?;
        // A block has one owner, so it can be the target of one group only.
        targets.extend(moves.iter().map(|moved| moved.target));
        targets.sort_unstable();
        match targets.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ReshardError::BlockTwice { block: pair[0] }),
            None => Ok(()),
        }
    }
}

impl Pattern {
    /// The copy of that block: everything lies inside allocations, so nothing overflows.
    fn at(&self, moved: &BlockMove) -> StridedCopy {
        let mut copy = self.copy;
        copy.source.offset_bytes += moved.source as u64 * self.source_block_bytes;
        copy.target.offset_bytes += moved.target as u64 * self.target_block_bytes;
        copy
    }
}

fn fewest(ranks: &[&Descriptor], count: impl Fn(&Descriptor) -> u64) -> u64 {
    ranks.iter().map(|rank| count(rank)).min().unwrap_or(0)
}

fn layers_by_name<'a>(ranks: &[&'a Descriptor]) -> HashMap<&'a str, Vec<OfRank<'a>>> {
    let mut by_name: HashMap<&str, Vec<OfRank<'_>>> = HashMap::new();
    for (rank, of) in ranks.iter().copied().enumerate() {
        for layer in &of.layers {
            by_name
                .entry(&layer.name)
                .or_default()
                .push(OfRank { rank, of, layer });
        }
    }
    by_name
}

/// Which group of the sources each group of the targets is, and that layers stay together.
#[derive(Default)]
struct Groups<'a> {
    /// By the targets' group: the sources' group, and the layer that said so.
    source_of: HashMap<u64, (u64, &'a str)>,
    /// The targets' group of each layer.
    target_of: HashMap<&'a str, u64>,
}

impl<'a> Groups<'a> {
    fn note(&mut self, source_group: u64, target: &OfRank<'a>) -> Result<(), ReshardError> {
        let layer = target.layer;
        let known = *self
            .source_of
            .entry(layer.group)
            .or_insert((source_group, &layer.name));
        if known.0 != source_group {
            return Err(ReshardError::GroupsDiffer {
                first: known.1.to_owned(),
                second: layer.name.clone(),
            });
        }
        let known = *self.target_of.entry(&layer.name).or_insert(layer.group);
        if known != layer.group {
            return Err(ReshardError::Layer {
                layer: layer.name.clone(),
                target: target.rank,
                problem: format!(
                    "it is in group {} here and in group {known} on a target before",
                    layer.group
                ),
            });
        }
        Ok(())
    }
}

/// A layer that shares must find in its owner's pages what its own would hold.
fn check_sharer(
    sources_of: &HashMap<&str, Vec<OfRank<'_>>>,
    holders: &[OfRank<'_>],
    target: &OfRank<'_>,
) -> Described<()> {
    let owner = target.of.layers[target.layer.owner_layer as usize]
        .name
        .as_str();
    let of_owners = sources_of.get(owner).map_or(&[][..], Vec::as_slice);
    for holder in holders {
        let same = of_owners.iter().any(|of_owner| {
            of_owner.rank == holder.rank && of_owner.layer.owner_layer == holder.layer.owner_layer
        });
        if !same {
            return Err(format!(
                "it shares the pages of {owner}, and on source {} it does not",
                holder.rank
            ));
        }
    }
    Ok(())
}

fn layer_patterns(holders: &[OfRank<'_>], target: &OfRank<'_>) -> Described<Vec<Pattern>> {
    let holders = of_the_same_tokens(holders, target)?;
    for holder in &holders {
        check_same_blocks(holder, target)?;
    }
    let Some(stored) = &target.layer.attention else {
        let holder = the_same_rank(&holders, target)?;
        return match (&holder.layer.states, &target.layer.states) {
            (Some(_), Some(_)) => state_patterns(holder, target),
            _ => page_pattern(holder, target).map(|pattern| vec![pattern]),
        };
    };
    let mut of_holders = Vec::with_capacity(holders.len());
    for holder in holders {
        let from = holder.layer.attention.as_ref();
        let from = from.ok_or_else(|| "a source does not keep it as attention".to_owned())?;
        check_same_rows(from, stored, holder.rank)?;
        let first =
            first_head(from).map_err(|problem| format!("source {}: {problem}", holder.rank))?;
        of_holders.push((holder, from, first));
    }
    let first = first_head(stored)?;
    // A kernel's own order inside a page is only known to be the same when all of the page is.
    let whole = !stored.format.has_rows() || stored.page_end_scale_bytes > 0;
    let mut patterns = Vec::new();
    let mut head = first;
    while head < first + stored.num_kv_heads {
        let (from, heads) = holder_of(&of_holders, head, target.rank).ok_or_else(|| {
            format!("no source holds kv head {head} of the model, which the target does")
        })?;
        let heads = heads.min(first + stored.num_kv_heads - head);
        let (holder, from_stored, from_first) = from;
        if whole {
            check_same_page(holder, target)?;
            patterns.push(page_pattern(holder, target)?);
        } else {
            let part = HeadRange {
                in_source: head - from_first,
                in_target: head - first,
                count: heads,
            };
            patterns.extend(row_patterns((holder, from_stored), (target, stored), part)?);
        }
        head += heads;
    }
    Ok(patterns)
}

/// The sources that hold the target's share of the tokens.
fn of_the_same_tokens<'a>(
    holders: &[OfRank<'a>],
    target: &OfRank<'_>,
) -> Described<Vec<OfRank<'a>>> {
    // One rank alone has all tokens, whether it was told or not.
    let share = |of: &Descriptor| of.context_parallel.filter(|ranks| ranks.size > 1);
    let wanted = share(target.of);
    let found: Vec<OfRank<'a>> = holders
        .iter()
        .filter(|holder| share(holder.of) == wanted)
        .copied()
        .collect();
    if found.is_empty() {
        return Err(
            "no source that has it holds the same tokens: context-parallel size, rank and interleave must be the same"
                .to_owned(),
        );
    }
    Ok(found)
}

fn check_same_blocks(holder: &OfRank<'_>, target: &OfRank<'_>) -> Described<()> {
    let tokens = |of: &OfRank<'_>| of.of.groups[of.layer.group as usize].block_size_tokens;
    same(
        "a block has tokens",
        holder.rank,
        tokens(holder),
        tokens(target),
    )
}

fn check_same_rows(from: &Attention, to: &Attention, rank: usize) -> Described<()> {
    if from.dtype != to.dtype || from.format != to.format {
        return Err(format!(
            "source {rank} stores {} of {}, the target {} of {}; converting is not copying",
            from.format.name(),
            from.dtype,
            to.format.name(),
            to.dtype
        ));
    }
    for (what, from, to) in [
        ("a block has slots", from.block_slots, to.block_slots),
        ("a key has elements", from.key_elements, to.key_elements),
        (
            "a value has elements",
            from.value_elements,
            to.value_elements,
        ),
        (
            "the scale behind a row takes elements",
            from.inline_scale_elements,
            to.inline_scale_elements,
        ),
        (
            "the model has kv heads",
            from.model_kv_heads.unwrap_or(0),
            to.model_kv_heads.unwrap_or(0),
        ),
    ] {
        same(what, rank, from, to)?;
    }
    let scales = |stored: &Attention| (stored.scale_dtype, stored.page_end_scale_bytes > 0);
    if scales(from) != scales(to) {
        return Err(format!(
            "source {rank} and the target have scales of different types or at different places"
        ));
    }
    Ok(())
}

fn same(what: &str, rank: usize, from: u64, to: u64) -> Described<()> {
    if from != to {
        return Err(format!(
            "{what}: {from} on source {rank}, {to} on the target"
        ));
    }
    Ok(())
}

fn first_head(stored: &Attention) -> Described<u64> {
    stored.first_model_kv_head.ok_or_else(|| {
        "its descriptor does not say which heads of the model it holds; give tensor_parallel_size when it is made"
            .to_owned()
    })
}

type HolderOfHeads<'a> = (OfRank<'a>, &'a Attention, u64);

/// Who gives head `head` and how many from it on: the one that has most, and of equals another one
/// for each target, so that copies of a head are all read.
fn holder_of<'a, 'h>(
    holders: &'h [HolderOfHeads<'a>],
    head: u64,
    target: usize,
) -> Option<(&'h HolderOfHeads<'a>, u64)> {
    let heads_from = |(_, stored, first): &HolderOfHeads<'_>| {
        let end = first + stored.num_kv_heads;
        (*first..end).contains(&head).then(|| end - head)
    };
    let most = holders.iter().filter_map(heads_from).max()?;
    let equals = || {
        holders
            .iter()
            .filter(|holder| heads_from(holder) == Some(most))
    };
    let chosen = equals().nth(target % equals().count().max(1))?;
    Some((chosen, most))
}

/// The source that is the target's counterpart: for what heads do not say how to divide.
fn the_same_rank<'h, 'a>(
    holders: &'h [OfRank<'a>],
    target: &OfRank<'_>,
) -> Described<&'h OfRank<'a>> {
    let wanted = target.of.tensor_parallel.ok_or_else(|| {
        "it keeps no rows of heads, and the target does not say which tensor-parallel rank it is; give tensor_parallel_size when its descriptor is made"
            .to_owned()
    })?;
    let found = holders
        .iter()
        .find(|holder| holder.of.tensor_parallel == Some(wanted));
    found.ok_or_else(|| {
        format!(
            "it keeps no rows of heads, so it can only move from tensor-parallel rank {} of {}, and no source is that one",
            wanted.rank, wanted.size
        )
    })
}

/// Whether every row has the same place in both pages, of the same heads.
fn check_same_page(from: &OfRank<'_>, to: &OfRank<'_>) -> Described<()> {
    let placed = |of: &OfRank<'_>| {
        let stored = of.layer.attention.clone()?;
        let strides = [
            // Of a page of one kernel block this is where the next block is.
            match stored.kernel_blocks() {
                1 => 0,
                _ => stored.kernel_block_stride_elements,
            },
            stored.slot_stride_elements,
            stored.head_stride_elements,
            stored.content_stride_elements,
            stored.value_offset_elements,
        ];
        let bytes = stored.dtype.bytes();
        let in_page = strides.map(|stride| place_in_page(&of.layer.pages, stride, bytes));
        let of_rank = (stored.num_kv_heads, stored.first_model_kv_head);
        Some((in_page, of_rank, stored.kernel_block_slots))
    };
    if placed(from) != placed(to) {
        return Err(
            "its kernels have an order of their own in a page, so pages can only move as a whole: heads and layout must be the same"
                .to_owned(),
        );
    }
    Ok(())
}

/// A stride as runs and bytes of one: how far runs are apart depends on the number of blocks.
fn place_in_page(pages: &Pages, stride: u64, element_bytes: u64) -> (u64, u64) {
    let bytes = stride.saturating_mul(element_bytes);
    match pages.run_step_bytes {
        0 => (0, bytes),
        run_step => (bytes / run_step, bytes % run_step),
    }
}

/// All of a page.
fn page_pattern(from: &OfRank<'_>, to: &OfRank<'_>) -> Described<Pattern> {
    let (source, target) = (&from.layer.pages, &to.layer.pages);
    let kinds = |of: &OfRank<'_>| (of.layer.attention.is_some(), of.layer.states.is_some());
    if kinds(from) != kinds(to) {
        return Err(format!(
            "source {} keeps something else in its pages",
            from.rank
        ));
    }
    for (what, source, target) in [
        ("a page has bytes", source.page_bytes, target.page_bytes),
        (
            "a page has bytes of content",
            source.content_bytes,
            target.content_bytes,
        ),
        ("a page has runs", source.num_runs, target.num_runs),
    ] {
        same(what, from.rank, source, target)?;
    }
    let runs = Step {
        count: source.num_runs,
        source_bytes: source.run_step_bytes,
        target_bytes: target.run_step_bytes,
    };
    Ok(pattern(from, to, 0, 0, source.run_bytes, &[runs]))
}

fn state_patterns(from: &OfRank<'_>, to: &OfRank<'_>) -> Described<Vec<Pattern>> {
    let (source, target) = (from.layer.states.as_deref(), to.layer.states.as_deref());
    let (source, target) = (source.unwrap_or(&[]), target.unwrap_or(&[]));
    let kinds = |states: &[super::State]| -> Vec<_> {
        states.iter().map(|s| (s.dtype, s.shape.clone())).collect()
    };
    if kinds(source) != kinds(target) {
        return Err(format!(
            "source {} has states of other types or shapes",
            from.rank
        ));
    }
    let mut patterns = Vec::with_capacity(source.len());
    for (a, b) in source.iter().zip(target) {
        let sizes = a.shape.iter().copied().chain([a.dtype.bytes()]);
        let bytes = product("a state", sizes).map_err(|error| error.to_string())?;
        if bytes > 0 {
            patterns.push(pattern(
                from,
                to,
                a.offset_bytes,
                b.offset_bytes,
                bytes,
                &[],
            ));
        }
    }
    Ok(patterns)
}

/// Heads that a source gives to a target, and their numbers on both.
#[derive(Clone, Copy)]
struct HeadRange {
    in_source: u64,
    in_target: u64,
    count: u64,
}

fn row_patterns(
    (from, source): (&OfRank<'_>, &Attention),
    (to, target): (&OfRank<'_>, &Attention),
    heads: HeadRange,
) -> Described<Vec<Pattern>> {
    let bytes = target.dtype.bytes();
    let step = |count: u64, source: u64, target: u64| Step {
        count,
        source_bytes: source.saturating_mul(bytes),
        target_bytes: target.saturating_mul(bytes),
    };
    let mut steps = Vec::with_capacity(6);
    steps.push(step(
        heads.count,
        source.head_stride_elements,
        target.head_stride_elements,
    ));
    let (small, large) = nested_kernel_blocks(source, target)?;
    for (count, slots) in [
        (small, 1),
        (large / small, small),
        (target.block_slots / large, large),
    ] {
        if count > 1 {
            steps.push(step(
                count,
                slots_apart(source, slots),
                slots_apart(target, slots),
            ));
        }
    }
    let beside = source.value_is_beside_key() && target.value_is_beside_key();
    let row = target.key_elements + target.inline_scale_elements;
    let content = match target.value_elements {
        value if beside => row + value + target.inline_scale_elements,
        _ => row,
    };
    steps.push(step(
        content,
        source.content_stride_elements,
        target.content_stride_elements,
    ));
    if target.value_elements > 0 && !beside {
        // Without keys and values beside each other they have one width.
        steps.push(step(
            2,
            source.value_offset_elements,
            target.value_offset_elements,
        ));
    }
    // Of one there is no distance, and the number that stands there may be anything.
    steps.retain(|step| step.count > 1);
    let source_offset = heads.in_source * source.head_stride_elements * bytes;
    let target_offset = heads.in_target * target.head_stride_elements * bytes;
    Ok(vec![pattern(
        from,
        to,
        source_offset,
        target_offset,
        bytes,
        &steps,
    )])
}

/// Slots of the smaller and of the larger kernel block, one of which divides the other.
fn nested_kernel_blocks(source: &Attention, target: &Attention) -> Described<(u64, u64)> {
    let (a, b) = (source.kernel_block_slots, target.kernel_block_slots);
    let (small, large) = (a.min(b), a.max(b));
    if !large.is_multiple_of(small) {
        return Err(format!(
            "kernel blocks of {a} slots on the source and {b} on the target do not nest"
        ));
    }
    Ok((small, large))
}

/// Elements from a slot to the one `slots` behind it, where a kernel block starts or inside one.
fn slots_apart(stored: &Attention, slots: u64) -> u64 {
    if slots < stored.kernel_block_slots {
        return slots * stored.slot_stride_elements;
    }
    slots / stored.kernel_block_slots * stored.kernel_block_stride_elements
}

fn pattern(
    from: &OfRank<'_>,
    to: &OfRank<'_>,
    source_offset: u64,
    target_offset: u64,
    run: u64,
    steps: &[Step],
) -> Pattern {
    let place = |of: &OfRank<'_>, offset: u64| Location {
        rank: of.rank as u64,
        allocation: of.layer.allocation,
        offset_bytes: of.layer.pages.offset_bytes + offset,
    };
    let (source, target) = (place(from, source_offset), place(to, target_offset));
    Pattern {
        group: to.layer.group,
        copy: StridedCopy::coalesced(source, target, run, steps),
        source_block_bytes: from.layer.pages.block_step_bytes,
        target_block_bytes: to.layer.pages.block_step_bytes,
    }
}

/// Patterns in the order of groups and targets; those that continue each other on both sides are
/// one, as layers of a packed block are.
fn joined(mut patterns: Vec<Pattern>) -> Vec<Pattern> {
    patterns.sort_by_key(|pattern| (pattern.group, pattern.copy.target, pattern.copy.source));
    let mut joined: Vec<Pattern> = Vec::with_capacity(patterns.len());
    for next in patterns {
        match joined.last_mut() {
            Some(last) if continues(last, &next) => last.copy.run_bytes += next.copy.run_bytes,
            _ => joined.push(next),
        }
    }
    joined
}

fn continues(last: &Pattern, next: &Pattern) -> bool {
    let behind = |place: &Location, run: u64| Location {
        offset_bytes: place.offset_bytes + run,
        ..*place
    };
    let (a, b) = (&last.copy, &next.copy);
    last.group == next.group
        && last.source_block_bytes == next.source_block_bytes
        && last.target_block_bytes == next.target_block_bytes
        && (a.num_dims, b.num_dims) == (0, 0)
        && behind(&a.source, a.run_bytes) == b.source
        && behind(&a.target, a.run_bytes) == b.target
}
