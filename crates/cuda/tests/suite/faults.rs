//! A failing driver call at every index of a whole life: the state stays valid, and nothing is leaked.

use crate::common::*;
use leasehold_conformance::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_cuda::CudaBackend;
use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_cuda::driver::sim::SimDriver;
use leasehold_hal::{Access, Backend, DeviceId, ForeignCall, HostCall, NodePatch, Op, OpList, Plan, StreamDesc};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

/// Open, allocate, copy, launch, wait across streams, call the host, record, replay, update, close.
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
    // Buffers must not be reused before what uses them is over, whatever happens.
    let used = |stream: &leasehold_core::Lease<dyn leasehold_hal::Stream>, ops: &[Op<'_>]| {
        let value = submit(stream, ops)?;
        x.mark_write(stream.line().at(value));
        y.mark_write(stream.line().at(value));
        Ok::<u64, Error>(value)
    };
    used(&a, &[Op::Stamp(&start), source.up(&x), fill(&y, 0), copy(&x, &y)])?;
    used(&a, &[dispatch(&set, &bindings, &7u32.to_le_bytes())])?;
    let first = a.line().now();
    let gate = device.gate()?;
    let next = gate.line().submitted() + 1;
    used(&b, &[Op::Wait(first), Op::Wait(gate.line().at(next)), dispatch(&add, &sum, &[])])?;
    gate.signal_host(next)?;
    let call = HostCall::new("nothing", || Ok(()));
    let over = used(&b, &[target.down(&y), Op::Host(&call), Op::Stamp(&end)])?;
    wait(&b, over)?;
    let _ = device.elapsed(&start, &end)?;
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
    let graph = device.instantiate(Plan::new(ops))?;
    for round in 0..2u32 {
        let v = used(&a, &[Op::Wait(b.line().at(over)), Op::Graph(&graph)])?;
        wait(&a, v)?;
        graph.update(&[NodePatch { node: 1, bindings: None, params: Some(&round.to_le_bytes()), grid: None }])?;
    }
    device.synchronize(None)?;
    device.memory(leasehold_hal::MemoryKind::Device)?.trim(0)?;
    Ok(())
}

/// Runs a life under a plan and ends it. Gives the life's outcome.
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
    // A failure changes what comes later, but not what came before: every index of every kind is every index.
    for (name, count) in &calls {
        for k in 0..*count {
            for action in [FaultAction::Fail(1), FaultAction::OutOfMemory, FaultAction::DeviceLost] {
                let (outcome, driver) = run(FaultPlan::none().with(FaultRule::on(name, When::At(k), action.clone())));
                failed += u64::from(outcome.is_err());
                let at = format!("{name} {k}, {action:?}, {outcome:?}");
                let mut left = driver.census();
                if action == FaultAction::DeviceLost || ["cuMemUnmap", "cuMemRelease"].contains(&name.as_str()) {
                    // Memory that the driver says it did not take back is counted as lost for good, with its addresses.
                    (left.pieces, left.reservations) = (0, 0);
                }
                assert!(left.is_nothing(), "{at}: left behind: {left:?}");
                if action != FaultAction::DeviceLost {
                    // What a dead device was given never runs, and its memory is free at once.
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
