//! Tests of plans for new memory.

use super::*;
use crate::backing::Backing;
use crate::fake::FakeBacking;

/// Another thread has freed memory since nothing was found: the place has all that it needs,
/// and ends within the first granule.
#[test]
fn a_plan_may_have_nothing_to_map() {
    let fake = FakeBacking::new(1 << 30);
    let base = fake.reserve(64 << 20).expect("addresses");
    let (mut heap, budget) = (Heap::new(2 << 20), Budget::new(u64::MAX));
    heap.add_span(base, 64 << 20, 0, true).expect("a span");
    let means = Means { reclaim: true, alias: None, near: None, aligned: true, piece: 1, least: 1 };
    let mut steps = Vec::new();
    for _ in 0..2 {
        let planned = heap.plan(100, 1, READY, means, &budget).expect("host memory");
        let Planned::Plan(mut plan) = planned else { panic!("{planned:?}") };
        steps.push(plan.steps.len());
        plan.run(&fake).expect("a healthy device");
        let block = heap.finish(plan, true, &budget).expect("a block");
        heap.free_ready(block);
        heap.check().expect("the invariants");
    }
    assert_eq!((steps, budget.committed()), (vec![1, 0], 2 << 20));
}

/// Completion was looked up at each comparison, and sorting panics when an order changes while
/// it sorts.
#[test]
fn streams_go_on_while_a_plan_is_made() {
    const BLOCKS: u32 = 16_000;
    const GRANULE: u64 = 64 << 10;
    let fake = FakeBacking::new(8 << 30);
    let base = fake.reserve(8 << 30).expect("addresses");
    let (mut heap, budget) = (Heap::new(GRANULE), Budget::new(u64::MAX));
    heap.add_span(base, 8 << 30, 0, true).expect("a span");
    let means = Means { reclaim: true, alias: None, near: None, aligned: true, piece: 1, least: 1 };
    let owner = leasehold_core::TimelineOwner::take().expect("a timeline");
    let list = heap.list_for(owner.timeline());
    let take = |heap: &mut Heap, units: u32| {
        let planned = heap.plan(units, 1, list, means, &budget).expect("host memory");
        let Planned::Plan(mut plan) = planned else { panic!("{planned:?}") };
        plan.run(&fake).expect("a healthy device");
        heap.finish(plan, true, &budget).expect("a block")
    };
    let granule = (GRANULE >> UNIT_SHIFT) as u32;
    // Live blocks between them keep the free ones apart.
    let mut blocks: Vec<u32> = (0..BLOCKS).map(|_| take(&mut heap, granule)).collect();
    for round in 0..4 {
        let mut values: Vec<u64> =
            (0..BLOCKS / 2).map(|_| owner.advance().expect("a value")).collect();
        let (first, last) = (values[0], values[values.len() - 1]);
        // Neither in the order of the addresses nor against it.
        values.sort_unstable_by_key(|v| v.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for (at, value) in values.into_iter().enumerate() {
            heap.free(blocks[2 * at], list, PackedTimepoint::from(owner.timeline().at(value)));
        }
        let large = std::thread::scope(|s| {
            s.spawn(|| {
                for v in first..=last {
                    owner.complete(v);
                    (0..20).for_each(|_| std::hint::spin_loop());
                }
            });
            take(&mut heap, granule * (BLOCKS / 2 + round))
        });
        heap.free_ready(large);
        heap.drain_all();
        (0..blocks.len()).step_by(2).for_each(|at| blocks[at] = take(&mut heap, granule));
    }
}
