//! What the builders made of a step, kept until the next one.

use super::groups::AttentionGroups;

/// Metadata of each attention group and slot mapping of each cache group, as the last successful
/// step left them; apart for each of the builders of a group.
///
/// All room is taken when it is made. A step fills a second set, and takes over when it is whole.
#[derive(Debug, Clone)]
pub struct StepMetadata<M, S> {
    /// Builder by builder.
    current: Vec<Set<M, S>>,
    next: Set<M, S>,
}

#[derive(Debug, Clone)]
struct Set<M, S> {
    of_groups: Vec<M>,
    of_cache_groups: Vec<S>,
}

impl<M: Copy, S: Copy> StepMetadata<M, S> {
    /// Room for the groups' metadata, empty until the first step.
    pub fn new(
        groups: &AttentionGroups,
        num_builders: usize,
        no_metadata: M,
        no_slots: S,
    ) -> StepMetadata<M, S> {
        let empty = Set {
            of_groups: vec![no_metadata; groups.num_groups()],
            of_cache_groups: vec![no_slots; groups.cache_groups().len()],
        };
        StepMetadata {
            current: vec![empty.clone(); num_builders],
            next: empty,
        }
    }

    /// Keeps what an attention group got of the step under way.
    #[inline]
    pub fn stage(&mut self, group: usize, metadata: M) {
        self.next.of_groups[group] = metadata;
    }

    /// Ends the step under way: all that was staged is from now on what `builder` made last.
    #[inline]
    pub fn commit(&mut self, builder: usize, slots: &[S]) {
        self.next.of_cache_groups.copy_from_slice(slots);
        std::mem::swap(&mut self.current[builder], &mut self.next);
    }

    /// What a builder of an attention group made last.
    #[inline]
    pub fn of_group(&self, builder: usize, group: usize) -> Option<M> {
        self.current.get(builder)?.of_groups.get(group).copied()
    }

    /// The slot mapping of a cache group in the last step of a builder.
    #[inline]
    pub fn slots_of(&self, builder: usize, cache_group: usize) -> Option<S> {
        let set = self.current.get(builder)?;
        set.of_cache_groups.get(cache_group).copied()
    }
}

/// An array that should have an entry for each group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{array} has {given} entries for {groups} groups; {}", self.which())]
pub struct ArrayLengthError {
    /// What the array is called.
    pub array: &'static str,
    /// Its entries.
    pub given: usize,
    /// The groups there are.
    pub groups: usize,
}

impl ArrayLengthError {
    fn which(&self) -> String {
        if self.given < self.groups {
            format!("group {} has none", self.given)
        } else {
            format!("there is no group {}", self.groups)
        }
    }
}

/// Whether an array has an entry for each of `groups` groups.
#[inline]
pub fn check_per_group(
    array: &'static str,
    given: usize,
    groups: usize,
) -> Result<(), ArrayLengthError> {
    if given == groups {
        return Ok(());
    }
    Err(ArrayLengthError {
        array,
        given,
        groups,
    })
}
