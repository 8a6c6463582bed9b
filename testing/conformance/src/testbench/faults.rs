//! A failing driver call at every index of a whole life cycle.

use super::work::*;
use super::{Bench, Subject, two_devices};
use crate::TestKernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{
    Access, Backend, ForeignCall, HostCall, MemoryKind, NodePatch, Op, OpList, Plan, Stream,
    StreamDesc,
};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, Report, When};

/// The life cycle: open, allocate, copy, launch, wait across streams, call the host, record,
/// replay, update, close.
fn life<S: Subject>(bench: &Bench<S>) -> Result<()> {
    let device = bench.try_open(0)?;
    let (a, b) = (device.stream(&StreamDesc::default())?, device.stream(&StreamDesc::default())?);
    let (x, y) = (try_buffer(&device, &a, 4096)?, try_buffer(&device, &a, 4096)?);
    let set = device.pipeline(&S::kernel(TestKernel::Fill))?;
    let add = device.pipeline(&S::kernel(TestKernel::Add))?;
    let (start, end) = (device.timestamp()?, device.timestamp()?);
    let (source, target) = (Host::new(vec![1; 4096]), Host::new(vec![0; 4096]));
    let bindings = [bind(&y, Access::Write)];
    let sum = [bind(&x, Access::Read), bind(&x, Access::Read), bind(&y, Access::Write)];
    // Even after a failure, buffers must not be reused before the work that uses them is over.
    let used = |stream: &Lease<dyn Stream>, ops: &[Op<'_>]| {
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
    device.memory(MemoryKind::Device)?.trim(0)?;
    Ok(())
}

/// A life cycle that is over.
pub struct Over<S: Subject> {
    /// The outcome.
    pub outcome: Result<()>,
    /// The driver that it used.
    pub driver: Arc<S::Driver>,
    /// The call that failed, and its failure.
    pub fault: (String, FaultAction),
    /// The race detector's reports.
    pub reports: Vec<Report>,
    /// The place of the failure, for messages.
    pub at: String,
}

/// The number of calls in a life cycle without a failure, the number of their names, and the number
/// of life cycles that a failing call ended.
#[derive(Debug, Clone, Copy)]
pub struct Sweep {
    /// Calls.
    pub calls: u64,
    /// Names of calls.
    pub names: usize,
    /// Life cycles with an error.
    pub failed: u64,
}

/// Runs a life cycle under a fault plan and ends it. Returns the outcome of the life cycle.
fn run<S: Subject>(mut config: S::DriverConfig, plan: FaultPlan) -> (Result<()>, Arc<S::Driver>) {
    S::machine_config(&mut config).faults = plan;
    let (driver, bench) = Bench::<S>::open_with(config, S::inline());
    let outcome = bench.and_then(|bench| {
        let outcome = life(&bench);
        let again = bench.backend.shutdown();
        assert!(again.is_ok(), "after {outcome:?} something is still held: {again:?}");
        outcome
    });
    (outcome, driver)
}

/// Runs the life cycle once without a failure, then with each failure of each call. `configure`
/// changes the driver's usual configuration. `check` looks at each life cycle with a failure.
///
/// # Panics
/// If a life cycle leaves a lease, or if the one without a failure shows anything.
pub fn sweep<S: Subject>(
    configure: impl Fn(&mut S::DriverConfig),
    check: impl Fn(&Over<S>),
) -> Sweep {
    let config = || {
        let mut config = two_devices::<S>(50);
        configure(&mut config);
        config
    };
    let (clean, driver) = run::<S>(config(), FaultPlan::none());
    clean.expect("a life cycle without a failure");
    assert_eq!(S::findings(&driver), [""; 0]);
    assert_eq!(S::machine(&driver).take_reports(), []);
    let calls = S::machine(&driver).calls_by_name();
    let mut failed = 0;
    // A failure changes the later calls, but not the earlier ones. So the indices of each name
    // cover all calls.
    for (name, count) in &calls {
        for k in 0..*count {
            for action in [FaultAction::Fail(1), FaultAction::OutOfMemory, FaultAction::DeviceLost]
            {
                let rule = FaultRule::on(name, When::At(k), action.clone());
                let (outcome, driver) = run::<S>(config(), FaultPlan::none().with(rule));
                failed += u64::from(outcome.is_err());
                let at = format!("{name} {k}, {action:?}, {outcome:?}");
                if let Err(Error::DeviceLost { .. }) = outcome {
                    assert_eq!(action, FaultAction::DeviceLost, "{at}");
                }
                let reports = S::machine(&driver).take_reports();
                check(&Over { outcome, driver, fault: (name.clone(), action), reports, at });
            }
        }
    }
    Sweep { calls: calls.iter().map(|c| c.1).sum(), names: calls.len(), failed }
}
