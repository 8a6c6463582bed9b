//! A failing driver call at every index of a whole life cycle: the state stays valid, and nothing
//! leaks.

use crate::common::*;
use leasehold_conformance::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{
    Access, Backend, BackendKind, DeviceId, Dispatch, ForeignCall, HostCall, MemoryKind, NodePatch,
    Op, OpList, Plan, StreamDesc,
};
use leasehold_mps::driver::sim::SimDriver;
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, KernelBody, KernelSpec, ReportKind, When};

/// The life cycle: open, allocate, copy, launch, wait across streams, call the host, record,
/// replay, update, close.
fn life(backend: &MpsBackend) -> Result<()> {
    let device = backend.open(DeviceId::new(BackendKind::Mps, 0))?;
    let (a, b) = (device.stream(&StreamDesc::default())?, device.stream(&StreamDesc::default())?);
    let (x, y) = (try_buffer(&device, &a, 4096)?, try_buffer(&device, &a, 4096)?);
    let set = device.pipeline(&TestKernel::Fill.for_mps())?;
    let add = device.pipeline(&TestKernel::Add.for_mps())?;
    let (start, end) = (device.timestamp()?, device.timestamp()?);
    let (source, target) = (Host::new(vec![1; 4096]), Host::new(vec![0; 4096]));
    let bindings = [bind(&y, Access::Write)];
    let sum = [bind(&x, Access::Read), bind(&x, Access::Read), bind(&y, Access::Write)];
    let word = 7_u32.to_le_bytes();
    let blocks = 4096 / (4 * TestKernel::BLOCK);
    let launch = |pipeline, bindings, params| {
        Op::Dispatch(Dispatch {
            pipeline,
            grid: [blocks, 1, 1],
            block: [TestKernel::BLOCK, 1, 1],
            shared: 0,
            bindings,
            params,
        })
    };
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
    used(&a, &[launch(&set, &bindings, &word)])?;
    let first = a.timeline().now();
    let host_timeline = device.host_timeline()?;
    let next = host_timeline.timeline().submitted() + 1;
    let held = Op::Wait(host_timeline.timeline().at(next));
    used(&b, &[Op::Wait(first), held, launch(&add, &sum, &[])])?;
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
        launch(&set, &bindings, &word),
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
    for round in 0..2_u32 {
        let v = used(&a, &[Op::Wait(b.timeline().at(over)), Op::Graph(&graph)])?;
        wait(&a, v)?;
        let params = round.to_le_bytes();
        let patch = NodePatch { node: 1, bindings: None, params: Some(&params), grid: None };
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        unsafe { graph.update(&[patch]) }?;
    }
    device.synchronize(None)?;
    device.memory(MemoryKind::Device)?.trim(0)?;
    Ok(())
}

/// Runs a life cycle under a fault plan and ends it. Returns the outcome of the life cycle.
fn run(plan: FaultPlan, residency_sets: bool) -> (Result<()>, Arc<SimDriver>) {
    let mut config = driver_config(50);
    config.machine = config.machine.faults(plan);
    config.residency_sets = residency_sets;
    for kernel in [TestKernel::Fill, TestKernel::Add] {
        // SAFETY: the life cycle's launches have elements for each block.
        let body = unsafe { KernelBody::cpu(kernel.function()) };
        let spec = KernelSpec::new(kernel.bindings(), kernel.params(), body);
        config.machine.kernels.register(kernel.name(), spec);
    }
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let outcome = match MpsBackend::with_ops(driver.clone(), MpsConfig::default().inline(true)) {
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
    for residency_sets in [true, false] {
        let (clean, driver) = run(FaultPlan::none(), residency_sets);
        clean.unwrap();
        assert!(driver.census().is_nothing());
        assert_eq!(driver.machine().take_reports(), []);
        let calls = driver.machine().calls_by_name();
        let all: u64 = calls.iter().map(|c| c.1).sum();
        assert!(all > 200 && calls.len() > 30, "{all} calls of {} kinds are no life", calls.len());
        let mut failed = 0;
        // A failure changes the later calls, but not the earlier ones. So the indices of each kind
        // cover all calls.
        for (name, count) in &calls {
            for k in 0..*count {
                for action in
                    [FaultAction::Fail(1), FaultAction::OutOfMemory, FaultAction::DeviceLost]
                {
                    let rule = FaultRule::on(name, When::At(k), action.clone());
                    let (outcome, driver) = run(FaultPlan::none().with(rule), residency_sets);
                    failed += u64::from(outcome.is_err());
                    let at = format!("{name} {k}, {action:?}, {outcome:?}");
                    let left = driver.census();
                    assert!(left.is_nothing(), "{at}: left behind: {left:?}");
                    assert_eq!(driver.take_broken_rules(), [], "{at}");
                    if action != FaultAction::DeviceLost {
                        // The work of a lost device never runs, and its memory is free at once.
                        let mut reports = driver.machine().take_reports();
                        // Where a write failed, nobody wrote.
                        reports.retain(|r| r.kind != ReportKind::NeverWritten);
                        assert_eq!(reports, [], "{at}");
                        assert!(driver.machine().memory_in_use().is_nothing(), "{at}");
                    }
                }
            }
        }
        assert!(failed > 100, "{failed} life cycles of {all} calls failed");
    }
}
