//! Strided copies: runs of bytes at constant distances, from the memory of one rank to that of
//! another.

use crate::num::{Overflow, product, sum};
use crate::view::{AuditError, audit};

/// Dimensions of a copy: slots of a kernel block, of the larger one of the other side, kernel blocks,
/// keys and values, heads, elements.
pub const MAX_DIMS: usize = 6;

/// A place in the memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// Which of the ranks.
    pub rank: u64,
    /// Which of its allocations.
    pub allocation: u64,
    /// Where in the allocation.
    pub offset_bytes: u64,
}

/// Runs at constant distances on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step {
    /// How many.
    pub count: u64,
    /// From one to the next where they come from.
    pub source_bytes: u64,
    /// From one to the next where they go.
    pub target_bytes: u64,
}

/// One copy: a run of bytes for each index of the dimensions, the first one outermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedCopy {
    /// Where the first run comes from.
    pub source: Location,
    /// Where it goes.
    pub target: Location,
    /// Bytes of one run.
    pub run_bytes: u64,
    /// How many of `dims` there are; those behind them are zero.
    pub num_dims: u64,
    /// The dimensions.
    pub dims: [Step; MAX_DIMS],
}

impl StridedCopy {
    /// The same bytes in as few and as long runs as there can be. No more than [`MAX_DIMS`] of
    /// `steps` are more than one.
    pub(super) fn coalesced(
        source: Location,
        target: Location,
        run: u64,
        steps: &[Step],
    ) -> StridedCopy {
        let mut steps: Vec<Step> = steps.iter().copied().filter(|s| s.count != 1).collect();
        let mut run_bytes = run;
        while join_one(&mut steps, &mut run_bytes) {}
        // In the order of the target, which is written.
        steps.sort_by_key(|step| std::cmp::Reverse((step.target_bytes, step.source_bytes)));
        let mut dims = [Step::default(); MAX_DIMS];
        for (place, step) in dims.iter_mut().zip(&steps) {
            *place = *step;
        }
        StridedCopy {
            source,
            target,
            run_bytes,
            num_dims: steps.len() as u64,
            dims,
        }
    }

    /// The dimensions that there are.
    pub fn steps(&self) -> &[Step] {
        let num = usize::try_from(self.num_dims).unwrap_or(MAX_DIMS);
        &self.dims[..num.min(MAX_DIMS)]
    }

    /// One past the last byte that is read, counted from the allocation's start; 0 when nothing is.
    pub fn source_end(&self) -> Result<u64, Overflow> {
        if self.run_bytes == 0 || self.steps().iter().any(|step| step.count == 0) {
            return Ok(0);
        }
        let mut end = sum("a copy", [self.source.offset_bytes, self.run_bytes])?;
        for step in self.steps() {
            let reach = product("a copy", [step.count - 1, step.source_bytes])?;
            end = sum("a copy", [end, reach])?;
        }
        Ok(end)
    }

    /// Proves that the runs that are written lie apart and in an allocation of so many bytes.
    pub fn check_target(&self, allocation_bytes: u64) -> Result<(), AuditError> {
        let mut shape = [0; MAX_DIMS + 1];
        let mut strides = [1; MAX_DIMS + 1];
        let steps = self.steps();
        // A number that does not fit is one too large, whatever its sign would be.
        let signed = |value: u64| product("a copy", [value]).map(|value| value as i64);
        for (dim, step) in steps.iter().enumerate() {
            shape[dim] = signed(step.count)?;
            strides[dim] = signed(step.target_bytes)?;
        }
        shape[steps.len()] = signed(self.run_bytes)?;
        let num = steps.len() + 1;
        let offset = self.target.offset_bytes;
        audit(&shape[..num], &strides[..num], offset, 1, allocation_bytes)?;
        Ok(())
    }
}

/// Makes the run longer by a dimension that continues it, or one dimension of two that continue each
/// other. Returns whether there was one.
fn join_one(steps: &mut Vec<Step>, run: &mut u64) -> bool {
    let continues = |step: &Step| step.source_bytes == *run && step.target_bytes == *run;
    if let Some(at) = steps.iter().position(continues) {
        *run = run.saturating_mul(steps.remove(at).count);
        return true;
    }
    for inner in 0..steps.len() {
        let Step {
            count,
            source_bytes,
            target_bytes,
        } = steps[inner];
        let continues = |outer: &Step| {
            count.checked_mul(source_bytes) == Some(outer.source_bytes)
                && count.checked_mul(target_bytes) == Some(outer.target_bytes)
        };
        let found = (0..steps.len()).find(|&outer| outer != inner && continues(&steps[outer]));
        if let Some(outer) = found {
            steps[inner].count = count.saturating_mul(steps[outer].count);
            steps.remove(outer);
            return true;
        }
    }
    false
}
