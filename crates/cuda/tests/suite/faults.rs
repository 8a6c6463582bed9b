//! A failing driver call at every index of a whole life cycle: the state stays valid, and nothing
//! leaks.

use crate::common::*;
use leasehold_alloc::{Layout, On};
use leasehold_conformance::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_cuda::CudaBackend;
use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_cuda::driver::sim::SimDriver;
use leasehold_hal::{
    Access, Backend, DeviceId, ForeignCall, HostCall, MemoryKind, NodePatch, Op, OpList, Plan,
    StreamDesc,
};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

/// The life cycle: open, allocate, copy, launch, wait across streams, call the host, record,
/// replay, update, close.
fn life(backend: &CudaBackend) -> Result<()> {
    let device = backend.open(DeviceId::cuda(0))?;
    let (a, b) = (device.stream(&StreamDesc::default())?, device.stream(&StreamDesc::default())?);
    let (x, y) = (try_buffer(&device, &a, 4096)?, try_buffer(&device, &a, 4096)?);
    let set = device.pipeline(&TestKernel::Fill.for_cuda())?;
    let add = device.pipeline(&TestKernel::Add.for_cuda())?;
    let (start, end) = (device.timestamp()?, device.timestamp()?);
    let (source, target) = (Host::new(vec![1; 4096]), Host::new(vec![0; 4096]));
    let bindings = [bind(&y, Access::Write)];
    let sum = [bind(&x, Access::Read), bind(&x, Access::Read), bind(&y, Access::Write)];
    // Even after a failure, buffers must not be reused before the work that uses them is over.
    let used = |stream: &leasehold_core::Lease<dyn leasehold_hal::Stream>, ops: &[Op<'_>]| {
        let value = submit(stream, ops)?;
        // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in
        // order.
        unsafe { x.mark_write(stream.timeline().at(value)) };
        // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in
        // order.
        unsafe { y.mark_write(stream.timeline().at(value)) };
        Ok::<u64, Error>(value)
    };
    used(&a, &[Op::WriteTimestamp(&start), source.up(&x), fill(&y, 0), copy(&x, &y)])?;
    used(&a, &[dispatch(&set, &bindings, &7u32.to_le_bytes())])?;
    let first = a.timeline().now();
    let host_timeline = device.host_timeline()?;
    let next = host_timeline.timeline().submitted() + 1;
    used(
        &b,
        &[Op::Wait(first), Op::Wait(host_timeline.timeline().at(next)), dispatch(&add, &sum, &[])],
    )?;
    host_timeline.signal_host(next)?;
    let call = HostCall::new("nothing", || Ok(()));
    let over = used(&b, &[target.down(&y), Op::Host(&call), Op::WriteTimestamp(&end)])?;
    wait(&b, over)?;
    // SAFETY: the timestamps are of this backend.
    let _ = unsafe { device.elapsed(&start, &end) }?;
    let mut ops = OpList::new();
    let foreign = ForeignCall::new("nothing", vec![bind(&y, Access::ReadWrite)], |_| Ok(()));
    for op in [
        fill(&x, 2),
        dispatch(&set, &bindings, &9u32.to_le_bytes()),
        copy(&x, &y),
        Op::Foreign(&foreign),
        target.down(&y),
        Op::Host(&call),
        fill(&y, 3),
    ] {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
    for round in 0..2u32 {
        let v = used(&a, &[Op::Wait(b.timeline().at(over)), Op::Graph(&graph)])?;
        wait(&a, v)?;
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        unsafe {
            graph.update(&[NodePatch {
                node: 1,
                bindings: None,
                params: Some(&round.to_le_bytes()),
                grid: None,
            }])
        }?;
    }
    device.synchronize(None)?;
    device.memory(leasehold_hal::MemoryKind::Device)?.trim(0)?;
    Ok(())
}

/// Runs a life cycle under a fault plan and ends it. Returns the outcome of the life cycle.
fn run(plan: FaultPlan) -> (Result<()>, Arc<SimDriver>) {
    let mut config = driver_config(50);
    config.machine = config.machine.faults(plan);
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let ops: Arc<dyn CudaSlowOps> = driver.clone();
    let outcome = match CudaBackend::with_ops(ops, inline()) {
        Err(e) => Err(e),
        Ok(backend) => {
            let outcome = life(&backend);
            let again = backend.shutdown();
            assert!(again.is_ok(), "after {outcome:?} something is still held: {again:?}");
            outcome
        }
    };
    (outcome, driver)
}

#[test]
fn a_failing_call_at_every_index_leaves_a_valid_state_and_leaks_nothing() {
    let (clean, driver) = run(FaultPlan::none());
    clean.unwrap();
    assert!(driver.census().is_nothing() && driver.take_leaks().is_empty());
    assert_eq!(driver.machine().take_reports(), []);
    let calls = driver.machine().calls_by_name();
    let all: u64 = calls.iter().map(|c| c.1).sum();
    assert!(all > 200 && calls.len() > 40, "{all} calls of {} kinds are no life", calls.len());
    let mut failed = 0;
    // A failure changes the later calls, but not the earlier ones. So the indices of each kind
    // cover all calls.
    for (name, count) in &calls {
        for k in 0..*count {
            for action in [FaultAction::Fail(1), FaultAction::OutOfMemory, FaultAction::DeviceLost]
            {
                let (outcome, driver) =
                    run(FaultPlan::none().with(FaultRule::on(name, When::At(k), action.clone())));
                failed += u64::from(outcome.is_err());
                let at = format!("{name} {k}, {action:?}, {outcome:?}");
                let mut left = driver.census();
                if action == FaultAction::DeviceLost
                    || ["cuMemUnmap", "cuMemRelease"].contains(&name.as_str())
                {
                    // If the driver reports that it did not take memory back, the memory and its
                    // addresses are counted as lost.
                    (left.pieces, left.reservations) = (0, 0);
                }
                assert!(left.is_nothing(), "{at}: left behind: {left:?}");
                if action != FaultAction::DeviceLost {
                    // The work of a lost device never runs, and its memory is free at once.
                    assert_eq!(driver.machine().take_reports(), [], "{at}");
                }
                if let Err(Error::DeviceLost { .. }) = outcome {
                    assert_eq!(action, FaultAction::DeviceLost, "{at}");
                }
            }
        }
    }
    assert!(failed > all, "only {failed} of {} lives noticed", 3 * all);
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
