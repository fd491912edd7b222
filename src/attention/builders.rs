//! Metadata builders: made by the engine, one or more for each attention group.

use super::groups::{AttentionGroup, AttentionGroups};
use crate::backend::GraphSupport;

/// What a builder is made for.
#[derive(Debug, Clone, Copy)]
pub struct BuilderInfo<'a> {
    /// The cache group.
    pub cache_group: usize,
    /// The attention group in it.
    pub group: usize,
    /// The same among the attention groups of all cache groups.
    pub index: usize,
    /// Which of the group's builders.
    pub builder: usize,
    /// What it serves.
    pub attention: &'a AttentionGroup,
    /// Tokens of a kernel block; `None` for a group without cache.
    pub kernel_block_size: Option<u64>,
}

/// Where builders come from. A failing call stops everything; its error comes back unchanged.
pub trait BuilderSource {
    /// One builder.
    type Builder: Copy;
    /// Memory that builders may use together.
    type Workspace: Copy;
    /// Why a call failed.
    type Error;

    /// Makes a builder.
    fn create(&self, info: &BuilderInfo<'_>) -> Result<Self::Builder, Self::Error>;
    /// The workspace that a builder has to give, if it has one.
    fn workspace(
        &self,
        group: usize,
        builder: Self::Builder,
    ) -> Result<Option<Self::Workspace>, Self::Error>;
    /// Hands a builder another one's workspace, which it may ignore.
    fn set_workspace(
        &self,
        group: usize,
        builder: Self::Builder,
        workspace: Self::Workspace,
    ) -> Result<(), Self::Error>;
    /// How far a builder can be captured; `own` is what its backend promises.
    fn graph_support(
        &self,
        group: usize,
        builder: Self::Builder,
        own: GraphSupport,
    ) -> Result<GraphSupport, Self::Error>;
    /// Ends a builder. Called once for each one made.
    fn destroy(&self, group: usize, builder: Self::Builder);
}

/// Why there are no builders.
#[derive(Debug, PartialEq, Eq)]
pub enum BuildersError<E> {
    /// A call of the source failed.
    Source(E),
    /// So many builders cannot be counted or kept.
    TooMany {
        /// Attention groups.
        groups: usize,
        /// Builders of each.
        builders: usize,
    },
}

/// The builders of all attention groups. Dropping it destroys them, the last made first.
pub struct Builders<S: BuilderSource> {
    source: S,
    /// Group by group, the builders of a group beside each other.
    made: Vec<S::Builder>,
    per_group: usize,
    lowest: LowestSupport,
}

/// The lowest graph support of all, and the group whose backend sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LowestSupport {
    support: GraphSupport,
    group: Option<usize>,
}

impl LowestSupport {
    const NONE: LowestSupport = LowestSupport {
        support: GraphSupport::Always,
        group: None,
    };

    /// The first of equals stays.
    fn lower(&mut self, support: GraphSupport, group: usize) {
        if support < self.support {
            self.support = support;
            self.group = Some(group);
        }
    }
}

impl AttentionGroups {
    /// The lowest graph support that the backends promise, and the attention group, among those
    /// of all cache groups, that sets it; none when it is always.
    pub fn promised_graph_support(&self) -> (GraphSupport, Option<usize>) {
        let mut lowest = LowestSupport::NONE;
        for (number, (_, _, group)) in self.iter().enumerate() {
            lowest.lower(group.backend.contract().graph_support, number);
        }
        (lowest.support, lowest.group)
    }
}

impl<S: BuilderSource> Builders<S> {
    /// Makes `per_group` builders for each attention group, in order. The first workspace that
    /// one gives is handed to every builder made after it. When a call fails, all that was made
    /// is destroyed.
    pub fn new(
        source: S,
        groups: &AttentionGroups,
        per_group: usize,
    ) -> Result<Builders<S>, BuildersError<S::Error>> {
        let too_many = || BuildersError::TooMany {
            groups: groups.num_groups(),
            builders: per_group,
        };
        let count = groups.num_groups().checked_mul(per_group);
        let mut made = Vec::new();
        made.try_reserve_exact(count.ok_or_else(too_many)?)
            .map_err(|_| too_many())?;
        let mut builders = Builders {
            source,
            made,
            per_group,
            lowest: LowestSupport::NONE,
        };
        builders.make_all(groups).map_err(BuildersError::Source)?;
        Ok(builders)
    }

    fn make_all(&mut self, groups: &AttentionGroups) -> Result<(), S::Error> {
        let mut workspace = None;
        for (number, (cache_group, group, attention)) in groups.iter().enumerate() {
            for builder in 0..self.per_group {
                let made = self.source.create(&BuilderInfo {
                    cache_group,
                    group,
                    index: number,
                    builder,
                    attention,
                    kernel_block_size: groups.cache_groups()[cache_group].kernel_block_size,
                })?;
                self.made.push(made);
                match workspace {
                    None => workspace = self.source.workspace(number, made)?,
                    Some(workspace) => self.source.set_workspace(number, made, workspace)?,
                }
                let own = attention.backend.contract().graph_support;
                let support = self.source.graph_support(number, made, own)?;
                self.lowest.lower(support, number);
            }
        }
        Ok(())
    }

    /// Where the builders come from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Builders of each attention group.
    pub fn per_group(&self) -> usize {
        self.per_group
    }

    /// A builder of an attention group, counted over all cache groups.
    #[inline]
    pub fn get(&self, group: usize, builder: usize) -> S::Builder {
        self.made[group * self.per_group + builder]
    }

    /// The lowest graph support of all builders, and the attention group that sets it; none when
    /// it is always.
    pub fn graph_support(&self) -> (GraphSupport, Option<usize>) {
        (self.lowest.support, self.lowest.group)
    }
}

impl<S: BuilderSource> Drop for Builders<S> {
    fn drop(&mut self) {
        let per_group = self.per_group;
        while let Some(builder) = self.made.pop() {
            self.source.destroy(self.made.len() / per_group, builder);
        }
    }
}
