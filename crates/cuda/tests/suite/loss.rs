//! A lost device: every call reports the first cause, and every object can be dropped.

use crate::common::*;
use leasehold_conformance::TestKernel;
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_cuda::CudaConfig;
use leasehold_hal::{Access, Backend, Op, OpList, Plan, StreamDesc};

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
    let stamp = device.timestamp().unwrap();
    let mut ops = OpList::new();
    ops.push(&fill(&x, 1));
    // SAFETY: the plan's pipelines, time stamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    let gate = device.gate().unwrap();
    let held = submit(&b, &[Op::Wait(gate.line().at(gate.line().submitted() + 1)), fill(&y, 1)]).unwrap();
    let host = Host::new(vec![9; 4096]);
    let kept = Arc::downgrade(&host.keep);
    submit(&a, &[fill(&x, 1)]).unwrap();
    let value = submit(&a, &[dispatch(&trap, &[], &[])]).unwrap();
    let after = submit(&a, &[host.down(&x), Op::Stamp(&stamp), Op::Graph(&graph)]).unwrap();
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { x.mark_write(a.line().at(after)) };
    // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in order.
    unsafe { y.mark_write(b.line().at(held)) };
    let cause = lost(wait(&a, after), "the wait");
    for part in
        ["conformance_trap", "719", &format!("{:?}", a.line().id()), &format!("submissions {} to {after}", value - 1)]
    {
        assert!(cause.contains(part), "{part} is not in: {cause}");
    }
    for s in [&a, &b, &idle] {
        assert!(s.line().is_idle(), "{s:?} is not over");
        assert_eq!(lost(submit(s, &[]), "a submission"), cause);
        assert_eq!(lost(s.signal(), "a signal"), cause);
        assert_eq!(lost(s.flush(), "a flush"), cause);
        assert_eq!(lost(s.wait_host(s.line().submitted() + 1, None), "a wait"), cause);
    }
    assert_eq!(lost(device.stream(&StreamDesc::default()).map(drop), "a stream"), cause);
    assert_eq!(lost(device.timestamp().map(drop), "a stamp"), cause);
    assert_eq!(lost(device.pipeline(&TestKernel::Add.for_cuda()).map(drop), "a pipeline"), cause);
    assert_eq!(
        lost(
            // SAFETY: an empty plan names no objects.
            unsafe { device.instantiate(Plan::new(OpList::new())) }.and_then(|g| submit(&a, &[Op::Graph(&g)])),
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
    drop((x, y, trap, stamp, graph, gate, a, b, idle));
    let mut live = Vec::new();
    device.pools(&mut |name, s| live.push((name, s.live)));
    for (name, live) in live {
        assert!(live == 0 || ["pipeline", "module", "context"].contains(&name), "{live} of {name} live");
    }
    drop((again, device));
    bench.backend.shutdown().unwrap();
    let census = bench.driver.census();
    assert_eq!(
        (census.contexts, census.streams, census.events, census.execs, census.graphs, census.modules),
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
    let point = a.line().at(submit(&a, &[dispatch(&trap, &[], &[])]).unwrap());
    let waiter = stream(&one);
    let waiting = submit(&waiter, &[Op::Wait(point), fill(&x, 1)]);
    lost(wait(&a, point.value()), "the wait");
    // The waiter's timing is not fixed: it fails with the other device's cause, or it ran.
    let _ = waiting.and_then(|v| wait(&waiter, v));
    let bindings = [bind(&x, Access::Write)];
    let v = submit(&b, &[dispatch(&set, &bindings, &5u32.to_le_bytes())]).unwrap();
    wait(&b, v).unwrap();
    assert_eq!(read(&b, &x), 5u32.to_le_bytes().repeat(1024));
    drop((x, set, trap, a, b, waiter, zero, one));
    bench.backend.shutdown().unwrap();
}
