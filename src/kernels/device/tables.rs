//! The kernels of block tables.

use std::ffi::CStr;

use super::{Launch, MAX_THREADS};
use crate::cuda::DeviceAddress;
use crate::kernels::SlotRule;

const PATCH: &CStr = c"kvpages_patch_tables";
const FILL: &CStr = c"kvpages_fill_tables";

/// The names of the kernels of block tables.
pub(crate) const TABLE_KERNELS: [&CStr; 2] = [PATCH, FILL];

/// Blocks of threads that write rows or slots, at most: they fill any device, and go on where the
/// grid ends.
const MAX_CTAS: u64 = 1 << 16;

/// `kvp::GroupTables`: the tables of a group.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupTables {
    /// A row of `width` ids for each request.
    pub table: DeviceAddress,
    /// A row for each request of the batch.
    pub input: DeviceAddress,
    pub slots: DeviceAddress,
    pub width: u64,
    pub rule: SlotRule,
}

/// `kvp::RowPatch`: entries of one row that change, `count` ids from `first_id` on.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowPatch {
    pub group: u32,
    pub row: u32,
    pub column: u32,
    pub count: u32,
    pub first_id: u64,
}

/// `kvp::TableStep`: what a step does to tables.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TableStep {
    /// [`GroupTables`] of each group.
    pub groups: DeviceAddress,
    /// [`RowPatch`], `num_patches`.
    pub patches: DeviceAddress,
    /// i32: what patches write.
    pub ids: DeviceAddress,
    /// i32: of the batch; negative for a dummy.
    pub requests: DeviceAddress,
    /// u32: of their rows, `num_requests` for each group.
    pub lengths: DeviceAddress,
    /// u32: of what is written of each input row, `num_rows` for each group.
    pub ends: DeviceAddress,
    /// i32: `num_requests` + 1, going up from 0.
    pub query_start: DeviceAddress,
    /// i64.
    pub positions: DeviceAddress,
    pub num_groups: u32,
    pub num_patches: u32,
    pub num_requests: u32,
    /// Of the input tables that are written: null from `num_requests` on.
    pub num_rows: u32,
    /// That are written: pads past the tokens of the batch.
    pub num_slots: u64,
    /// Set by [`fill_tables`].
    gather_ctas: u32,
    unused: u32,
}

// `kernels/device.h` says the same; neither side compiles when a struct has another size.
const _: () = {
    assert!(size_of::<GroupTables>() == 104);
    assert!(size_of::<RowPatch>() == 24);
    assert!(size_of::<TableStep>() == 96);
};

/// The launch that patches tables; none for nothing.
pub(crate) fn patch_tables(step: &TableStep) -> Option<Launch> {
    grid(PATCH, u64::from(step.num_patches).min(MAX_CTAS))
}

/// The launch that writes input tables and slots, after they were patched; none for nothing.
pub(crate) fn fill_tables(step: &TableStep) -> Option<(Launch, TableStep)> {
    let num_groups = u64::from(step.num_groups);
    let rows = num_groups * u64::from(step.num_rows);
    let slots = num_groups.saturating_mul(step.num_slots);
    let gather_ctas = rows.min(MAX_CTAS);
    let map_ctas = slots.div_ceil(MAX_THREADS).min(MAX_CTAS);
    let launch = grid(FILL, gather_ctas + map_ctas)?;
    let step = TableStep {
        gather_ctas: gather_ctas as u32,
        ..*step
    };
    Some((launch, step))
}

fn grid(name: &'static CStr, ctas: u64) -> Option<Launch> {
    (ctas > 0).then_some(Launch {
        name,
        grid: [ctas as u32, 1, 1],
        block: [MAX_THREADS as u32, 1, 1],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_as_large_as_what_they_write() {
        let step = TableStep {
            num_groups: 3,
            ..TableStep::default()
        };
        assert_eq!(patch_tables(&step), None);
        assert!(fill_tables(&step).is_none());
        for (num_rows, num_slots, gather_ctas, map_ctas) in [
            (0, 1, 0, 1),
            (1, 0, 3, 0),
            (256, 256, 768, 3),
            (1 << 20, u64::from(u32::MAX), 1 << 16, 1 << 16),
        ] {
            let step = TableStep {
                num_rows,
                num_slots,
                ..step
            };
            let (launch, filled) = fill_tables(&step).unwrap();
            assert_eq!(filled.gather_ctas, gather_ctas);
            assert_eq!(launch.grid, [gather_ctas + map_ctas, 1, 1]);
            assert_eq!(launch.block, [256, 1, 1]);
        }
        let step = TableStep {
            num_patches: 100_000,
            ..step
        };
        assert_eq!(patch_tables(&step).unwrap().grid, [1 << 16, 1, 1]);
    }
}
