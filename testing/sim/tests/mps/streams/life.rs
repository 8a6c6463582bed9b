//! Life cycles: what refuses a shutdown, and what outlives what.

use super::common::*;
use leasehold_core::{Error, Result};
use leasehold_hal::{Access, Backend, Op, OpList, Plan};

/// The resource whose leases prevent a shutdown.
fn refused(result: Result<()>) -> &'static str {
    match result {
        Err(Error::LeasesOutstanding { resource, .. }) => resource,
        other => panic!("wanted a refusal, got {other:?}"),
    }
}

#[test]
fn a_shutdown_with_a_live_lease_is_refused_and_then_fine() -> Result<()> {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 64);
    let mut ops = OpList::new();
    ops.push(&fill(&x, 1));
    // SAFETY: the buffer outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
    let (timestamp, host_timeline) = (device.timestamp()?, device.host_timeline()?);
    let value = submit(&a, &[Op::Graph(&graph), Op::WriteTimestamp(&timestamp)])?;
    a.wait_host(value, None)?;
    drop(device);
    assert_eq!(refused(bench.backend.shutdown()), "stream");
    assert_eq!(read(&a, &x), vec![1; 64], "nothing has changed");
    drop(a);
    assert_eq!(refused(bench.backend.shutdown()), "graph");
    drop(graph);
    assert_eq!(refused(bench.backend.shutdown()), "timestamp");
    drop(timestamp);
    assert_eq!(refused(bench.backend.shutdown()), "host timeline");
    drop(host_timeline);
    assert_eq!(refused(bench.backend.shutdown()), "buffer");
    drop(x);
    bench.close();
    Ok(())
}

#[test]
fn a_stream_that_is_dropped_with_pending_work_ends_in_the_background() -> Result<()> {
    for threads in [false, true] {
        let bench = Bench::with(driver_config(2), inline().inline(!threads));
        let device = bench.open(0);
        let a = stream(&device);
        let x = buffer(&device, &a, 64);
        let hold = kernel(&device, "hold");
        let point = a.timeline().at(submit(&a, &[one(&hold, &[bind(&x, Access::ReadWrite)])])?);
        // SAFETY: the timepoint is of the submission that uses the buffer.
        unsafe { x.mark_write(point) };
        drop((a, x));
        let b = stream(&device);
        assert!(!point.timeline().check(point.value())?, "the drop does not wait");
        bench.let_go();
        let y = buffer(&device, &b, 64);
        submit(&b, &[fill(&y, 2)])?;
        assert_eq!(read(&b, &y), vec![2; 64]);
        drop((b, y, hold, device));
        bench.close();
    }
    Ok(())
}

#[test]
fn a_stream_serves_again_after_its_holder_dropped_it() -> Result<()> {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let events = || bench.driver.census().events;
    let first = stream(&device);
    let x = buffer(&device, &first, 64);
    for turn in 0..20 {
        let a = stream(&device);
        submit(&a, &[fill(&x, turn)])?;
        assert_eq!(read(&a, &x), vec![turn as u8; 64]);
    }
    assert_eq!(events(), 2, "one stream served twenty holders");
    drop((x, first, device));
    bench.close();
    Ok(())
}
