//! A lost device: every call reports the first cause, and every object can be dropped.

use crate::common::*;
use leasehold_conformance::TestKernel;
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_cuda::CudaConfig;
use leasehold_hal::{Access, Backend, DeviceId, HostCall, Op, OpList, Plan, StreamDesc};
use leasehold_sim::Stepping;

fn lost<T>(result: leasehold_core::Result<T>, what: &str) -> String {
    match result {
        Err(e @ Error::DeviceLost { .. }) => e.to_string(),
        Err(e) => panic!("{what}: {}: {e}", e.kind()),
        Ok(_) => panic!("{what} worked"),
    }
}

fn tell(config: CudaConfig) {
    let bench = Bench::with(driver_config(20), config);
    let device = bench.open(0);
    let (a, b, idle) = (stream(&device), stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 4096), buffer(&device, &b, 4096));
    let trap = device.pipeline(&TestKernel::Trap.for_cuda()).unwrap();
    let timestamp = device.timestamp().unwrap();
    let mut ops = OpList::new();
    ops.push(&fill(&x, 1));
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    let host_timeline = device.host_timeline().unwrap();
    let held = submit(
        &b,
        &[
            Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1)),
            fill(&y, 1),
        ],
    )
    .unwrap();
    let host = Host::new(vec![9; 4096]);
    let kept = Arc::downgrade(&host.keep);
    submit(&a, &[fill(&x, 1)]).unwrap();
    let value = submit(&a, &[dispatch(&trap, &[], &[])]).unwrap();
    let after =
        submit(&a, &[host.down(&x), Op::WriteTimestamp(&timestamp), Op::Graph(&graph)]).unwrap();
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { x.mark_write(a.timeline().at(after)) };
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { y.mark_write(b.timeline().at(held)) };
    let cause = lost(wait(&a, after), "the wait");
    for part in [
        "conformance_trap",
        "719",
        &format!("{:?}", a.timeline().id()),
        &format!("submissions {} to {after}", value - 1),
    ] {
        assert!(cause.contains(part), "{part} is not in: {cause}");
    }
    for s in [&a, &b, &idle] {
        assert!(s.timeline().is_idle(), "{s:?} is not over");
        assert_eq!(lost(submit(s, &[]), "a submission"), cause);
        assert_eq!(lost(s.signal(), "a signal"), cause);
        assert_eq!(lost(s.flush(), "a flush"), cause);
        assert_eq!(lost(s.wait_host(s.timeline().submitted() + 1, None), "a wait"), cause);
    }
    assert_eq!(lost(device.stream(&StreamDesc::default()).map(drop), "a stream"), cause);
    assert_eq!(lost(device.timestamp().map(drop), "a timestamp"), cause);
    assert_eq!(lost(device.pipeline(&TestKernel::Add.for_cuda()).map(drop), "a pipeline"), cause);
    assert_eq!(
        lost(
            // SAFETY: an empty plan names no objects.
            unsafe { device.instantiate(Plan::new(OpList::new())) }
                .and_then(|g| submit(&a, &[Op::Graph(&g)])),
            "a graph"
        ),
        cause
    );
    assert_eq!(lost(device.memory_info(), "the memory"), cause);
    assert_eq!(lost(device.make_current(), "making it current"), cause);
    assert_eq!(lost(device.synchronize(None), "synchronising"), cause);
    let handle = leasehold_core::Lease::handle(&device);
    let again = bench.open(0);
    assert_eq!(again.handle(), handle, "opened again, it is the same");
    assert_eq!(host.bytes(), [9; 4096], "nothing of a failed download lands");
    drop(host);
    assert!(kept.upgrade().is_none(), "what a failed submission kept is given up");
    // Leases and buffers can still be dropped and made; only the driver is gone.
    drop((x, y, trap, timestamp, graph, host_timeline, a, b, idle));
    let mut live = Vec::new();
    device.pools(&mut |name, s| live.push((name, s.live)));
    for (name, live) in live {
        assert!(
            live == 0 || ["pipeline", "module", "context"].contains(&name),
            "{live} of {name} live"
        );
    }
    drop((again, device));
    bench.backend.shutdown().unwrap();
    let census = bench.driver.census();
    assert_eq!(
        (
            census.contexts,
            census.streams,
            census.events,
            census.execs,
            census.graphs,
            census.modules
        ),
        (0, 0, 0, 0, 0, 0)
    );
}

#[test]
fn a_lost_device_tells_everybody_the_first_cause_and_lets_everything_go() {
    tell(inline());
}

#[test]
fn a_lost_device_is_the_same_with_threads() {
    tell(CudaConfig::default());
}

#[test]
fn a_lost_device_leaves_the_other_one_alone() {
    let bench = Bench::new(21);
    let (zero, one) = (bench.open(0), bench.open(1));
    let (a, b) = (stream(&zero), stream(&one));
    let x = buffer(&one, &b, 4096);
    let trap = zero.pipeline(&TestKernel::Trap.for_cuda()).unwrap();
    let set = one.pipeline(&TestKernel::Fill.for_cuda()).unwrap();
    // One wait for the lost device is with the driver, another one is held back behind a host
    // timeline.
    let host_timeline = one.host_timeline().unwrap();
    let next = host_timeline.timeline().submitted() + 1;
    let point = a.timeline().at(submit(&a, &[dispatch(&trap, &[], &[])]).unwrap());
    let (waiter, held) = (stream(&one), stream(&one));
    let waiting = submit(&waiter, &[Op::Wait(point), fill(&x, 1)]);
    let behind =
        submit(&held, &[Op::Wait(host_timeline.timeline().at(next)), Op::Wait(point), fill(&x, 1)])
            .unwrap();
    lost(wait(&a, point.value()), "the wait");
    host_timeline.signal_host(next).unwrap();
    // The timing of `waiter` is not fixed: it fails, or it ran. The device is not lost by that.
    for outcome in [waiting.and_then(|v| wait(&waiter, v)), wait(&held, behind)] {
        assert!(!matches!(outcome, Err(Error::DeviceLost { .. })), "{outcome:?}");
    }
    assert!(matches!(submit(&held, &[Op::Wait(point)]), Err(Error::Fault(_))));
    let late = stream(&one);
    assert!(matches!(late.wait(point), Err(Error::Fault(_))));
    let bindings = [bind(&x, Access::Write)];
    let v = submit(&b, &[dispatch(&set, &bindings, &5u32.to_le_bytes())]).unwrap();
    wait(&b, v).unwrap();
    assert_eq!(read(&b, &x), 5u32.to_le_bytes().repeat(1024));
    drop((x, set, trap, a, b, waiter, held, late, host_timeline, zero, one));
    bench.backend.shutdown().unwrap();
}

/// The driver releases a stream that waits for a lost device, and the stream's own device goes on.
#[test]
fn who_waited_for_a_lost_device_fails_although_it_runs() {
    let mut config = driver_config(24);
    config.machine = config.machine.stepping(Stepping::Manual);
    let bench = Bench::with(config, inline());
    let (zero, one) = (bench.open(0), bench.open(1));
    let (a, b) = (stream(&zero), stream(&one));
    let (x, y) = (buffer(&zero, &a, 4096), buffer(&one, &b, 4096));
    let host = Host::new(vec![9; 4096]);
    let called = Arc::new(AtomicBool::new(false));
    let set = called.clone();
    let call = HostCall::new("late", move || {
        set.store(true, Ordering::SeqCst);
        Ok(())
    });
    let before = submit(&b, &[fill(&y, 1)]).unwrap();
    let first = submit(&a, &[fill(&x, 2)]).unwrap();
    let second =
        submit(&b, &[Op::Wait(a.timeline().at(first)), copy(&x, &y), host.down(&y)]).unwrap();
    let third = submit(&b, &[Op::Host(&call)]).unwrap();
    bench.driver.machine().lose_device(0, "it fell off the bus");
    bench.driver.machine().run_until_idle();
    for _ in 0..10 {
        let _ = b.refresh();
    }
    assert!(b.timeline().is_settled(before));
    for value in [second, third] {
        assert!(
            matches!(b.timeline().check(value), Err(Error::Fault(_))),
            "{:?}",
            b.timeline().check(value)
        );
    }
    assert!(a.timeline().failed(first), "it never ran");
    assert!(b.timeline().is_idle() && a.timeline().is_idle());
    assert_eq!(host.bytes(), [9; 4096], "nothing of it lands");
    assert!(!called.load(Ordering::SeqCst));
    one.memory_info().unwrap();
    drop((x, y, a, b, zero, one, host));
    bench.backend.shutdown().unwrap();
}

#[test]
fn a_loss_fails_what_a_stream_that_has_failed_before_still_had_to_do() {
    let mut config = driver_config(23);
    config.machine = config.machine.stepping(Stepping::Manual);
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 4096);
    let host = Host::new(vec![9; 4096]);
    let pending = submit(&a, &[fill(&x, 1), host.down(&x)]).unwrap();
    let host_timeline = device.host_timeline().unwrap();
    host_timeline.fail(Error::state("given up"));
    assert!(
        submit(
            &a,
            &[Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1))]
        )
        .is_err()
    );
    assert!(!a.timeline().failed(pending) && a.timeline().completed() < pending, "it is at work");
    bench.driver.machine().lose_device(0, "it fell off the bus");
    let _ = a.refresh();
    assert!(
        a.timeline().completed() >= pending && a.timeline().failed(pending),
        "{:?}",
        a.timeline()
    );
    assert_eq!(host.bytes(), [9; 4096], "nothing of it lands");
    drop((x, a, host_timeline, device, host));
    bench.backend.shutdown().unwrap();
}

/// New memory of a device is opened to all its guests, also to one that is lost by now.
#[test]
fn a_lost_guest_does_not_keep_a_device_from_memory_or_its_work_from_being_waited_for() {
    let bench = Bench::new(22);
    let (zero, one) = (bench.open(0), bench.open(1));
    let b = stream(&one);
    let x = buffer(&one, &b, 4096);
    assert!(zero.peer_access(DeviceId::cuda(1)).unwrap());
    bench.driver.machine().lose_device(0, "it fell off the bus");
    let value = submit(&b, &[fill(&x, 7)]).unwrap();
    let y = buffer(&one, &b, 64 << 20);
    assert!(!b.timeline().is_idle(), "nobody has looked");
    let last = submit(&b, &[fill(&y, 8)]).unwrap();
    wait(&b, last).unwrap();
    assert!(b.timeline().is_settled(value));
    assert_eq!((read(&b, &x), read(&b, &y)), (vec![7; 4096], vec![8; 64 << 20]));
    lost(zero.memory_info(), "the lost device's memory");
    one.memory_info().unwrap();
    drop((x, y, b, zero, one));
    bench.backend.shutdown().unwrap();
    assert_eq!(bench.reports(), [""; 0]);
}
