//! A failing driver call at every index of a whole life cycle: the state stays valid, and nothing
//! leaks.

use crate::common::*;
use leasehold_alloc::{Layout, On};
use leasehold_core::{Error, Result};
use leasehold_hal::{Backend, MemoryKind, Op, OpList, Plan};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

#[test]
fn a_failing_call_at_every_index_leaves_a_valid_state_and_leaks_nothing() {
    let sweep = faults::sweep::<Cuda>(
        |_| {},
        |over| {
            let (name, action) = &over.fault;
            let mut left = over.driver.census();
            if *action == FaultAction::DeviceLost
                || ["cuMemUnmap", "cuMemRelease"].contains(&name.as_str())
            {
                // If the driver reports that it did not take memory back, the memory and its
                // addresses are counted as lost.
                (left.pieces, left.reservations) = (0, 0);
            }
            assert!(left.is_nothing(), "{}: left behind: {left:?}", over.at);
            if *action != FaultAction::DeviceLost {
                // The work of a lost device never runs, and its memory is free at once.
                assert_eq!(over.reports, [], "{}", over.at);
            }
        },
    );
    assert!(sweep.calls > 200 && sweep.names > 40, "{sweep:?} is no life");
    assert!(sweep.failed > sweep.calls, "{sweep:?}: few lives noticed");
}

/// If the driver refuses pinned memory, the allocation fails with a report. Another kind of memory
/// is no substitute, because the caller relies on copies that do not wait. The pool continues with
/// the memory that it has, and grows again once the driver allows it.
#[test]
fn pinned_memory_that_cannot_be_had_is_an_error_and_the_pool_goes_on() {
    const CALL: &str = "cuMemHostAlloc";
    let mut refused = 0;
    for k in 0..6 {
        for when in [When::At(k), When::From(k), When::Probability(0.5)] {
            for action in [FaultAction::Fail(1), FaultAction::OutOfMemory] {
                let bench = Bench::new(60 + k);
                let device = bench.open(0);
                let s = stream(&device);
                let on = On { timeline: s.timeline(), source: &*s };
                // The first call is not refused, because the stream's own words lie in pinned
                // memory too.
                let pinned = device.memory(MemoryKind::Pinned).unwrap();
                let first = pinned.alloc(Layout::new(4096), on).unwrap();
                let rule = FaultRule::on(CALL, when, action.clone());
                bench.driver.machine().set_faults(FaultPlan::none().with(rule));
                let mut held = vec![first];
                for i in 0..8u64 {
                    match pinned.alloc(Layout::new((3 + i) << 20), on) {
                        Ok(x) => held.push(x),
                        Err(Error::OutOfMemory(report)) => {
                            refused += 1;
                            assert!(report.to_string().contains("pinned"), "{report}");
                        }
                        Err(e) => panic!("{when:?} {action:?}: {e}"),
                    }
                    held.push(pinned.alloc(Layout::new(4096), on).unwrap());
                    pinned.check().unwrap();
                }
                bench.driver.machine().set_faults(FaultPlan::none());
                held.push(pinned.alloc(Layout::new(20 << 20), on).unwrap());
                assert!(held.iter().all(|x| x.host_kind() == leasehold_alloc::HostKind::Pinned));
                drop(held);
                pinned.trim(0).unwrap();
                assert_eq!(pinned.stats().reserved, 0);
                drop((s, device));
                bench.close();
            }
        }
    }
    assert!(refused > 40, "only {refused} were refused");
}

/// A recording whose graph cannot be made. For every failing call, the arena's memory is free
/// afterwards, and the stream continues.
#[test]
fn a_graph_that_cannot_be_made_gives_its_arena_back() {
    let mut refused = 0;
    // The first run counts the calls.
    let mut calls = vec![(String::new(), 0)];
    let mut next = 0;
    while next < calls.len() {
        let (name, before) = calls[next].clone();
        next += 1;
        for k in before..before + 6 {
            let bench = Bench::new(70);
            let device = bench.open(0);
            let s = stream(&device);
            let on = On { timeline: s.timeline(), source: &*s };
            let memory = device.memory(MemoryKind::Device).unwrap();
            let kept = buffer(&device, &s, 4096);
            let made = bench.driver.machine().calls_by_name();
            if !name.is_empty() {
                let rule = FaultRule::on(&name, When::At(k), FaultAction::Fail(1));
                bench.driver.machine().set_faults(FaultPlan::none().with(rule));
            }
            let arena = memory.arena().unwrap();
            let graph = record(&arena, on, &device, &kept);
            let failed = graph.is_err();
            refused += u64::from(failed);
            if let Ok(graph) = graph {
                let launch = arena.launch().unwrap();
                if let Ok(value) = submit(&s, &[Op::Graph(&graph)]) {
                    // SAFETY: the timepoint is of a submission to this stream that uses the buffer,
                    // made in order.
                    unsafe { kept.mark_write(s.timeline().at(value)) };
                    launch.launched(s.timeline().at(value));
                }
            }
            drop(arena);
            bench.driver.machine().set_faults(FaultPlan::none());
            assert_eq!(memory.stats().in_graphs, 0, "{name} {k}");
            memory.check().unwrap();
            // The second attempt uses the same memory.
            let arena = memory.arena().unwrap();
            let graph = record(&arena, on, &device, &kept)
                .unwrap_or_else(|e| panic!("after {name} {k}: {e}"));
            let value = submit(&s, &[Op::Graph(&graph)]).unwrap();
            arena.launch().unwrap().launched(s.timeline().at(value));
            // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in
            // order.
            unsafe { kept.mark_write(s.timeline().at(value)) };
            assert!(read(&s, &kept).iter().all(|&b| b == 7), "after {name} {k}");
            if name.is_empty() {
                for (name, n) in bench.driver.machine().calls_by_name() {
                    let before = made.iter().find(|m| m.0 == name).map_or(0, |m| m.1);
                    // Calls that free objects are covered by the test above.
                    if n > before
                        && ["Graph", "Mem", "Event"].iter().any(|part| name.contains(part))
                    {
                        calls.push((name, before));
                    }
                }
            }
            drop((graph, arena, kept));
            memory.trim(0).unwrap();
            let stats = memory.stats();
            assert_eq!(stats.reserved, stats.quarantined, "{name} {k}");
            drop((s, device));
            bench.backend.shutdown().unwrap();
        }
    }
    assert!(refused > 5 && calls.len() > 5, "{refused} refused, {calls:?}");
}

/// A graph with a temporary: it fills the temporary, and copies it to `out`.
fn record(
    arena: &leasehold_alloc::GraphArena,
    on: On<'_>,
    device: &leasehold_core::Lease<dyn leasehold_hal::Device>,
    out: &leasehold_core::Lease<leasehold_alloc::Buffer>,
) -> Result<leasehold_core::Lease<dyn leasehold_hal::GraphExec>> {
    let temp = arena.alloc(Layout::new(5 << 20))?;
    let used =
        leasehold_alloc::Lifetime { symbol: temp.addr(), first: 0, last: 1, live_at_end: false };
    // SAFETY: the list uses each symbol within the lifetime that `used` names.
    let bindings = unsafe { arena.seal(&[used], on) }?;
    let mut ops = OpList::new();
    ops.push(&fill(&temp, 7));
    ops.push(&copy(&temp, out));
    ops.rebind(|addr| bindings.resolve(addr).map(|real| (real, bindings.native)));
    drop(temp);
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    unsafe { device.instantiate(Plan::new(ops)) }
}
