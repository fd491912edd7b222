//! Tables against a naive model, and the rules of single calls.

use super::*;
use proptest::prelude::*;
use std::ptr;

/// Tables in the host's memory use no stream.
const HOST: StreamRef = StreamRef::new(ptr::null_mut());

impl Tables {
    fn host(&self, group: usize) -> Result<&HostTables, TablesError> {
        self.group(group)?;
        match &self.place {
            Place::Host(groups) => Ok(&groups[group]),
            Place::Device(_) => panic!("these tests have no device"),
        }
    }

    fn table(&self, group: usize) -> Result<&[i32], TablesError> {
        self.host(group).map(|tables| tables.applied.ids())
    }

    fn input_table(&self, group: usize) -> Result<&[i32], TablesError> {
        self.host(group).map(|tables| tables.input.ids())
    }

    fn slots(&self, group: usize) -> Result<&[i64], TablesError> {
        self.host(group).map(|tables| tables.slots.as_slice())
    }
}

fn group(block_size: u64, kernel_block_size: u64, row_blocks: u64) -> GroupConfig {
    GroupConfig {
        block_size,
        kernel_block_size,
        row_blocks,
        is_replicated: false,
    }
}

fn config(groups: &[GroupConfig], max_requests: u64, max_tokens: u64) -> TablesConfig {
    TablesConfig {
        groups: groups.to_vec(),
        max_requests,
        max_tokens,
        num_blocks: Some(64),
        ranks: Ranks::ONE,
        aligned_rows: false,
        device: None,
    }
}

fn tables(groups: &[GroupConfig], max_requests: u64, max_tokens: u64) -> Tables {
    Tables::new(&config(groups, max_requests, max_tokens)).unwrap()
}

fn refused(config: &TablesConfig) -> &'static str {
    Tables::new(config).unwrap_err().kind()
}

#[test]
fn sizes_are_checked() {
    let good = config(&[group(16, 16, 4)], 2, 8);
    let with = |change: fn(&mut TablesConfig)| {
        let mut changed = good.clone();
        change(&mut changed);
        refused(&changed)
    };
    assert_eq!(with(|c| c.max_requests = 0), "bad_values");
    assert_eq!(with(|c| c.max_tokens = 0), "bad_values");
    assert_eq!(with(|c| c.max_tokens = 1 << 31), "overflow");
    assert_eq!(with(|c| c.groups[0].block_size = 0), "bad_values");
    assert_eq!(with(|c| c.groups[0].kernel_block_size = 0), "bad_values");
    assert_eq!(
        with(|c| c.groups[0].kernel_block_size = 5),
        "kernel_block_not_dividing"
    );
    assert_eq!(with(|c| c.groups[0].row_blocks = 1 << 28), "overflow");
    assert_eq!(with(|c| c.num_blocks = Some((1 << 31) + 1)), "overflow");
    assert_eq!(with(|c| c.ranks.size = 0), "bad_values");
    assert_eq!(with(|c| c.ranks.interleave = 0), "bad_values");
    assert_eq!(with(|c| c.ranks.rank = 1), "cp_rank_out_of_range");
    assert_eq!(
        with(|c| {
            c.ranks = Ranks {
                size: 2,
                rank: 0,
                interleave: 5,
            }
        }),
        "cp_interleave_not_dividing"
    );
    // One rank has no neighbours to take turns with, and state is not shared out.
    let mut one = good.clone();
    one.ranks.interleave = 5;
    assert!(Tables::new(&one).is_ok());
    one.ranks.size = 2;
    one.groups[0].is_replicated = true;
    assert!(Tables::new(&one).is_ok());
    let mut huge = good;
    huge.max_requests = i32::MAX as u64;
    huge.groups[0] = group(1, 1, 1 << 24);
    assert_eq!(refused(&huge), "out_of_host_memory");
    huge.groups[0] = group(1, 1, u64::from(u32::MAX));
    assert_eq!(refused(&huge), "overflow");
}

#[test]
fn rows_are_as_wide_as_whole_runs_of_128_tokens() {
    for (blocks, block, kernel, width) in [
        (295, 32, 32, 296),
        (3, 48, 48, 8),
        (3, 96, 32, 12),
        (3, 160, 32, 20),
        (1, 256, 64, 4),
        (0, 16, 16, 0),
    ] {
        assert_eq!(row_width(blocks, block, kernel), Ok(width));
    }
    assert!(row_width(u64::MAX, 16, 16).is_err());
    assert!(row_width(1, 0, 16).is_err());
    let mut aligned = config(&[group(48, 16, 3)], 1, 1);
    aligned.aligned_rows = true;
    let mut tables = Tables::new(&aligned).unwrap();
    assert_eq!(tables.width(0), Ok(24));
    tables.write_row(0, 0, &[1, 2, 3], false).unwrap();
    let error = tables.write_row(0, 0, &[4], false).unwrap_err();
    assert_eq!(error.kind(), "table_row_overflow");
}

#[test]
fn a_step_is_prepared_in_one_call() {
    let mut tables = tables(&[group(16, 16, 3), group(32, 16, 2)], 3, 6);
    tables.write_row(2, 0, &[5, 6], false).unwrap();
    tables.write_row(2, 1, &[7], false).unwrap();
    let batch = Batch {
        requests: &[2, -1],
        query_start: &[0, 2, 3],
        seq_lens: &[18, 1],
        positions: &[16, 17, 0, 99],
    };
    let extent = BatchExtent {
        num_tokens: 3,
        max_query_len: 2,
        max_seq_len: 18,
    };
    assert_eq!(tables.prepare(&batch, HOST), Ok(extent));
    assert_eq!(tables.input_table(0).unwrap(), [5, 6, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(tables.input_table(1).unwrap()[..4], [14, 15, 0, 0]);
    assert_eq!(tables.slots(0).unwrap(), [96, 97, -1, -1, -1, -1]);
    assert_eq!(tables.slots(1).unwrap(), [240, 241, -1, -1, -1, -1]);
}

#[test]
fn a_batch_that_is_refused_leaves_everything_as_it_was() {
    let good = Batch {
        requests: &[0, 1],
        query_start: &[0, 1, 3],
        seq_lens: &[1, 2],
        positions: &[0, 0, 1],
    };
    for (bad, kind) in [
        (
            Batch {
                requests: &[0],
                ..good
            },
            "per_group_array_length",
        ),
        (
            Batch {
                requests: &[0, 2],
                ..good
            },
            "unknown_request",
        ),
        (
            Batch {
                query_start: &[0, 2, 1],
                ..good
            },
            "boundaries_not_ascending",
        ),
        (
            Batch {
                query_start: &[1, 2, 3],
                ..good
            },
            "boundaries_not_ascending",
        ),
        (
            Batch {
                positions: &[0, 0],
                ..good
            },
            "boundaries_not_ascending",
        ),
        (
            Batch {
                seq_lens: &[1],
                ..good
            },
            "per_group_array_length",
        ),
        (
            Batch {
                seq_lens: &[1, 1],
                ..good
            },
            "seq_len_too_small",
        ),
        (
            Batch {
                seq_lens: &[-1, 2],
                ..good
            },
            "seq_len_too_small",
        ),
        (
            Batch {
                positions: &[0, 0, 2],
                ..good
            },
            "seq_len_too_small",
        ),
        (
            Batch {
                query_start: &[0, 1, 5],
                positions: &[0; 5],
                seq_lens: &[1, 4],
                ..good
            },
            "batch_out_of_range",
        ),
    ] {
        let mut tables = tables(&[group(16, 16, 3)], 2, 4);
        tables.write_row(0, 0, &[5], false).unwrap();
        assert_eq!(
            tables.prepare(&bad, HOST).unwrap_err().kind(),
            kind,
            "{bad:?}"
        );
        assert_eq!(tables.table(0).unwrap(), [0; 6], "nothing was applied");
        assert_eq!(tables.input_table(0).unwrap(), [0; 6]);
        assert_eq!(tables.slots(0).unwrap(), [-1; 4]);
        tables.prepare(&good, HOST).unwrap();
        assert_eq!(tables.slots(0).unwrap(), [80, -1, -1, -1]);
    }
}

#[test]
fn reads_see_what_was_applied() {
    let mut tables = tables(&[group(16, 16, 3)], 2, 4);
    tables.write_row(1, 0, &[5, 6], false).unwrap();
    assert_eq!(tables.num_entries(1, 0), Ok(2));
    assert_eq!(tables.table(0).unwrap(), [0; 6]);
    tables.gather(&[1], 1, HOST).unwrap();
    tables.map_slots(&[1], &[0, 1], &[0], HOST).unwrap();
    assert_eq!(tables.input_table(0).unwrap(), [0; 6]);
    assert_eq!(tables.slots(0).unwrap(), [-1; 4]);
    tables.apply(HOST).unwrap();
    assert_eq!(tables.table(0).unwrap(), [0, 0, 0, 5, 6, 0]);
    tables.gather(&[1], 2, HOST).unwrap();
    tables.map_slots(&[1], &[0, 2], &[17, 0], HOST).unwrap();
    assert_eq!(tables.input_table(0).unwrap(), [5, 6, 0, 0, 0, 0]);
    assert_eq!(tables.slots(0).unwrap(), [97, 80, -1, -1]);
}

#[test]
fn a_refused_write_changes_nothing() {
    let mut tables = tables(&[group(16, 16, 3), group(32, 16, 2)], 3, 4);
    tables.write_row(0, 0, &[1], false).unwrap();
    tables.write_row(0, 1, &[2], false).unwrap();
    tables.apply(HOST).unwrap();
    let before = format!("{:?}", (tables.table(0), tables.table(1)));
    let writes = |requests, starts, blocks| RowWrites {
        requests,
        overwrite: None,
        starts,
        blocks,
    };
    for (refused, kind) in [
        // The second write of one request does not fit behind the first.
        (
            writes(&[0, 0], &[0, 1, 1, 3, 3], &[3, 4, 5]),
            "table_row_overflow",
        ),
        (
            writes(&[1, 0], &[0, 1, 2, 2, 4], &[3, 4, 5, 6]),
            "table_row_overflow",
        ),
        (writes(&[1], &[0, 1, 2], &[3, 64]), "block_id_out_of_range"),
        (writes(&[1], &[0, 1, 2], &[3, -1]), "block_id_out_of_range"),
        (writes(&[3], &[0, 0, 0], &[]), "unknown_request"),
        (writes(&[-1], &[0, 0, 0], &[]), "unknown_request"),
        (writes(&[1], &[0, 1], &[3]), "per_group_array_length"),
        (
            writes(&[1], &[0, 2, 1], &[3, 4]),
            "boundaries_not_ascending",
        ),
        (
            writes(&[1], &[0, 1, 3], &[3, 4]),
            "boundaries_not_ascending",
        ),
        (
            writes(&[1], &[1, 1, 2], &[3, 4]),
            "boundaries_not_ascending",
        ),
    ] {
        assert_eq!(tables.write(&refused).unwrap_err().kind(), kind);
    }
    let error = tables.write_row(2, 1, &[1, 2, 3], false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "request 2, group 1: the row holds 0 blocks, 3 more do not fit in its 2"
    );
    let error = tables.truncate(0, 1, 2).unwrap_err();
    assert_eq!(error.kind(), "table_row_too_short");
    assert!(tables.write_row(0, 2, &[], false).is_err());
    assert!(tables.relocate(0, 3).is_err() && tables.swap(3, 0).is_err());
    assert!(tables.clear(3).is_err());
    tables.apply(HOST).unwrap();
    assert_eq!(format!("{:?}", (tables.table(0), tables.table(1))), before);
    assert_eq!(tables.num_entries(0, 0), Ok(1));
}

#[test]
fn batches_are_checked() {
    let mut tables = tables(&[group(16, 16, 3)], 3, 4);
    let kind = |result: Result<(), TablesError>| result.unwrap_err().kind();
    assert_eq!(kind(tables.gather(&[0, 1], 1, HOST)), "batch_out_of_range");
    assert_eq!(kind(tables.gather(&[0], 4, HOST)), "batch_out_of_range");
    assert_eq!(kind(tables.gather(&[3], 1, HOST)), "unknown_request");
    assert_eq!(kind(tables.gather(&[-2], 1, HOST)), "unknown_request");
    assert_eq!(kind(tables.gather_dummies(4, HOST)), "batch_out_of_range");
    assert_eq!(
        kind(tables.map_slots(&[0], &[0], &[], HOST)),
        "per_group_array_length"
    );
    for starts in [[1, 1], [0, -1], [0, 3]] {
        assert_eq!(
            kind(tables.map_slots(&[0], &starts, &[0, 1], HOST)),
            "boundaries_not_ascending"
        );
    }
    assert_eq!(
        kind(tables.map_slots(&[0], &[0, 5], &[0; 5], HOST)),
        "batch_out_of_range"
    );
    assert_eq!(
        kind(tables.map_slots(&[0; 4], &[0; 5], &[], HOST)),
        "batch_out_of_range"
    );
    assert!(tables.map_slots(&[], &[0], &[], HOST).is_ok());
}

#[test]
fn positions_that_no_block_holds_have_no_slot() {
    let mut tables = tables(&[group(16, 8, 2), group(1, 1, 2)], 2, 16);
    for request in 0..2 {
        tables.write_row(request, 0, &[5], false).unwrap();
        tables.write_row(request, 1, &[7, 9], false).unwrap();
    }
    tables.apply(HOST).unwrap();
    let positions = [
        0,
        15,
        16,
        31,
        32,
        -1,
        i64::MIN,
        i64::MAX,
        1 << 32,
        (1 << 32) + 1,
        i64::from(u32::MAX),
        1,
        i64::MIN + 1,
    ];
    tables.map_slots(&[0], &[0, 13], &positions, HOST).unwrap();
    let mut wanted = [-1; 16];
    (wanted[0], wanted[1], wanted[11]) = (80, 95, 81);
    assert_eq!(tables.slots(0).unwrap(), wanted);
    let mut wanted = [-1; 16];
    (wanted[0], wanted[11]) = (7, 9);
    assert_eq!(tables.slots(1).unwrap(), wanted);
}

#[test]
fn a_reset_empties_in_place_whatever_was_there() {
    let mut tables = tables(&[group(16, 8, 2)], 2, 4);
    let addresses = |tables: &Tables| {
        (
            tables.table(0).unwrap().as_ptr(),
            tables.input_table(0).unwrap().as_ptr(),
            tables.slots(0).unwrap().as_ptr(),
        )
    };
    let first = addresses(&tables);
    tables.write_row(1, 0, &[5], false).unwrap();
    tables.apply(HOST).unwrap();
    tables.gather(&[1], 2, HOST).unwrap();
    tables.map_slots(&[1], &[0, 2], &[0, 1], HOST).unwrap();
    tables.write_row(1, 0, &[6], false).unwrap();
    tables.reset(HOST).unwrap();
    tables.apply(HOST).unwrap();
    assert_eq!(tables.table(0).unwrap(), [0; 8]);
    assert_eq!(tables.input_table(0).unwrap(), [0; 8]);
    assert_eq!(tables.slots(0).unwrap(), [-1; 4]);
    assert_eq!(tables.num_entries(1, 0), Ok(0));
    assert_eq!(addresses(&tables), first);
}

// --- against a naive model -----------------------------------------------------------------------

#[derive(Debug, Clone)]
enum Op {
    Write(usize, usize, Vec<i32>, bool),
    Batch(Vec<(i32, bool, [Vec<i32>; 2])>),
    Truncate(usize, usize, usize),
    Relocate(usize, usize),
    Swap(usize, usize),
    Clear(usize),
    Apply,
    Gather(Vec<i32>),
    Reset,
}

const REQUESTS: usize = 4;
const GROUPS: [(u64, u64, usize); 2] = [(16, 16, 5), (48, 16, 3)];

fn op() -> impl Strategy<Value = Op> {
    let request = || 0..REQUESTS + 1;
    let blocks = || proptest::collection::vec(-1..66i32, 0..4);
    let good_blocks = || proptest::collection::vec(0..64i32, 0..3);
    let write = (
        0..REQUESTS as i32,
        any::<bool>(),
        [good_blocks(), good_blocks()],
    );
    prop_oneof![
        4 => (request(), 0..3usize, blocks(), any::<bool>())
            .prop_map(|(r, g, b, o)| Op::Write(r, g, b, o)),
        4 => proptest::collection::vec(write, 0..4).prop_map(Op::Batch),
        2 => (request(), 0..2usize, 0..4usize).prop_map(|(r, g, n)| Op::Truncate(r, g, n)),
        1 => (request(), request()).prop_map(|(a, b)| Op::Relocate(a, b)),
        1 => (request(), request()).prop_map(|(a, b)| Op::Swap(a, b)),
        1 => request().prop_map(Op::Clear),
        4 => Just(Op::Apply),
        4 => proptest::collection::vec(-1..REQUESTS as i32, 0..=REQUESTS).prop_map(Op::Gather),
        1 => Just(Op::Reset),
    ]
}

/// Blocks of each request, by group.
type Model = Vec<[Vec<i32>; 2]>;

fn model_write(model: &mut Model, r: usize, g: usize, blocks: &[i32], overwrite: bool) -> bool {
    let Some(row) = model.get_mut(r).and_then(|rows| rows.get_mut(g)) else {
        return false;
    };
    let mut new = if overwrite { Vec::new() } else { row.clone() };
    new.extend(blocks);
    let good = new.len() <= GROUPS[g].2 && blocks.iter().all(|id| (0..64).contains(id));
    if good {
        *row = new;
    }
    good
}

/// Changes the model, and says whether the call is good.
fn model_run(staged: &mut Model, applied: &mut Model, input: &mut Model, op: &Op) -> bool {
    let is = |r: usize| r < REQUESTS;
    match op {
        Op::Write(r, g, blocks, overwrite) => model_write(staged, *r, *g, blocks, *overwrite),
        Op::Batch(writes) => {
            let mut after = staged.clone();
            let good = writes.iter().all(|(r, overwrite, blocks)| {
                (0..2).all(|g| model_write(&mut after, *r as usize, g, &blocks[g], *overwrite))
            });
            if good {
                *staged = after;
            }
            good
        }
        Op::Truncate(r, g, n) => {
            let good = is(*r) && staged[*r][*g].len() >= *n;
            if good {
                staged[*r][*g].truncate(*n);
            }
            good
        }
        Op::Relocate(a, b) => {
            if is(*a) && is(*b) && a != b {
                staged[*b] = std::mem::take(&mut staged[*a]);
            }
            is(*a) && is(*b)
        }
        Op::Swap(a, b) => {
            if is(*a) && is(*b) {
                staged.swap(*a, *b);
            }
            is(*a) && is(*b)
        }
        Op::Clear(r) => {
            if is(*r) {
                staged[*r] = Default::default();
            }
            is(*r)
        }
        Op::Apply => {
            applied.clone_from(staged);
            true
        }
        Op::Gather(requests) => {
            *input = vec![Default::default(); REQUESTS];
            for (row, &request) in requests.iter().enumerate() {
                if request >= 0 {
                    input[row] = applied[request as usize].clone();
                }
            }
            true
        }
        Op::Reset => {
            for model in [staged, applied, input] {
                *model = vec![Default::default(); REQUESTS];
            }
            true
        }
    }
}

fn run(tables: &mut Tables, op: &Op) -> bool {
    let result = match op {
        Op::Write(r, g, blocks, overwrite) => tables.write_row(*r, *g, blocks, *overwrite),
        Op::Batch(writes) => {
            let mut starts = vec![0];
            let mut blocks = Vec::new();
            for (_, _, by_group) in writes {
                for of_group in by_group {
                    blocks.extend(of_group);
                    starts.push(blocks.len());
                }
            }
            let requests: Vec<i32> = writes.iter().map(|(r, _, _)| *r).collect();
            let overwrite: Vec<u8> = writes.iter().map(|(_, o, _)| u8::from(*o)).collect();
            tables.write(&RowWrites {
                requests: &requests,
                overwrite: Some(&overwrite),
                starts: &starts,
                blocks: &blocks,
            })
        }
        Op::Truncate(r, g, n) => tables.truncate(*r, *g, *n),
        Op::Relocate(a, b) => tables.relocate(*a, *b),
        Op::Swap(a, b) => tables.swap(*a, *b),
        Op::Clear(r) => tables.clear(*r),
        Op::Apply => {
            tables.apply(HOST).unwrap();
            Ok(())
        }
        Op::Gather(requests) => tables.gather(requests, requests.len(), HOST),
        Op::Reset => {
            tables.reset(HOST).unwrap();
            Ok(())
        }
    };
    result.is_ok()
}

fn expanded(model: &Model, group: usize) -> Vec<i32> {
    let (block, kernel, row_blocks) = GROUPS[group];
    let ratio = (block / kernel) as i32;
    let width = row_blocks * ratio as usize;
    let row = |rows: &[Vec<i32>; 2]| {
        let ids = rows[group].iter();
        let mut ids: Vec<i32> = ids
            .flat_map(|id| (0..ratio).map(move |k| id * ratio + k))
            .collect();
        ids.resize(width, NULL_BLOCK);
        ids
    };
    model.iter().flat_map(row).collect()
}

proptest! {
    #[test]
    fn any_sequence_of_calls_is_that_of_lists(ops in proptest::collection::vec(op(), 0..40)) {
        let groups = GROUPS.map(|(block, kernel, rows)| group(block, kernel, rows as u64));
        let mut tables = tables(&groups, REQUESTS as u64, 8);
        let mut staged: Model = vec![Default::default(); REQUESTS];
        let (mut applied, mut input) = (staged.clone(), staged.clone());
        for op in &ops {
            let good = model_run(&mut staged, &mut applied, &mut input, op);
            prop_assert_eq!(run(&mut tables, op), good, "{:?}", op);
            for (g, &(block, kernel, _)) in GROUPS.iter().enumerate() {
                for (r, rows) in staged.iter().enumerate() {
                    let entries = rows[g].len() * (block / kernel) as usize;
                    prop_assert_eq!(tables.num_entries(r, g), Ok(entries));
                }
                prop_assert_eq!(tables.table(g).unwrap(), expanded(&applied, g));
                prop_assert_eq!(tables.input_table(g).unwrap(), expanded(&input, g));
            }
        }
    }

    /// Whatever the positions, each slot is what is read off the blocks.
    #[test]
    fn slots_in_any_order_are_those_of_each_token(
        kernels in 1..4u64, kernel in 1..9u64,
        starts in proptest::collection::vec((-3..70i64, 1..20usize), 1..8),
    ) {
        let block = kernels * kernel;
        let blocks = [9, 4, 63];
        let mut tables = tables(&[group(block, kernel, 3)], 1, 256);
        tables.write_row(0, 0, &blocks, false).unwrap();
        tables.apply(HOST).unwrap();
        let positions: Vec<i64> = starts
            .iter()
            .flat_map(|&(start, count)| start..start + count as i64)
            .collect();
        let tokens = positions.len() as i32;
        tables.map_slots(&[0], &[0, tokens], &positions, HOST).unwrap();
        for (&position, &slot) in positions.iter().zip(tables.slots(0).unwrap()) {
            let at = usize::try_from(position).ok().map(|p| p / block as usize);
            let id = at.and_then(|at| blocks.get(at));
            let wanted = id.map_or(PAD_SLOT, |&id| {
                i64::from(id) * block as i64 + position % block as i64
            });
            prop_assert_eq!(slot, wanted);
        }
    }

    /// Every token is one rank's, in a slot that no other token of it has; every slot of a rank's
    /// full blocks is used.
    #[test]
    fn ranks_share_the_tokens_out(
        runs in 1..4u64, kernels in 1..4u64, size in 1..5u64, interleave in 1..5u64,
        ids in Just((0..64i32).collect::<Vec<_>>()).prop_shuffle(), row in 1..4usize,
    ) {
        let block = runs * kernels * interleave;
        let kernel = runs * interleave;
        let ids = &ids[..row];
        let tokens = block * size * row as u64;
        let positions: Vec<i64> = (0..tokens as i64).collect();
        let mut owners = vec![0; positions.len()];
        for rank in 0..size {
            let mut made = config(&[group(block, kernel, row as u64)], 1, tokens);
            made.ranks = Ranks { size, rank, interleave };
            let mut tables = Tables::new(&made).unwrap();
            tables.write_row(0, 0, ids, false).unwrap();
            tables.apply(HOST).unwrap();
            tables.map_slots(&[0], &[0, tokens as i32], &positions, HOST).unwrap();
            let mut seen = std::collections::BTreeSet::new();
            let mut local = 0;
            for (token, &slot) in tables.slots(0).unwrap().iter().enumerate() {
                let owner = token as u64 / interleave % size;
                prop_assert_eq!(slot != PAD_SLOT, owner == rank);
                if slot != PAD_SLOT {
                    owners[token] += 1;
                    // The tokens of a rank fill its blocks in order.
                    let id = i64::from(ids[local / block as usize]);
                    prop_assert_eq!(slot, id * block as i64 + (local % block as usize) as i64);
                    prop_assert!(seen.insert(slot));
                    local += 1;
                }
            }
            prop_assert_eq!(seen.len() as u64, block * row as u64);
        }
        prop_assert!(owners.iter().all(|&owners| owners == 1));
    }
}
