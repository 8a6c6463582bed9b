//! Two devices.

use crate::common::*;
use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_hal::{Copy2d, DeviceId, Op, OpList, Plan};

fn carry(p2p: bool) {
    let mut config = driver_config(30);
    config.peers = p2p;
    let bench = Bench::with(config, inline());
    let (zero, one) = (bench.open(0), bench.open(1));
    let (a, b) = (stream(&zero), stream(&one));
    let (x, y) = (buffer(&zero, &a, 4096), buffer(&one, &b, 4096));
    let peer_copies = || bench.calls("cuMemcpyPeerAsync");
    let there_and_back = |pattern: u32| {
        let v = submit(&a, &[fill(&x, pattern), copy(&x, &y), fill(&x, 0)]).unwrap();
        // The copy runs on the other device's stream, after the first device's fill.
        let w = submit(&b, &[Op::Wait(a.timeline().at(v)), copy(&y, &x)]).unwrap();
        wait(&b, w).unwrap();
        assert_eq!(read(&a, &x), vec![pattern as u8; 4096]);
    };
    there_and_back(3);
    assert_eq!(peer_copies(), 2, "without access the driver stages");
    assert_eq!(zero.peer_access(DeviceId::cuda(1)).unwrap(), p2p);
    assert_eq!(one.peer_access(DeviceId::cuda(0)).unwrap(), p2p);
    assert!(zero.peer_access(DeviceId::cuda(0)).unwrap());
    assert_eq!(zero.peer_access(DeviceId::cuda(1)).unwrap(), p2p, "twice is fine");
    assert_eq!(zero.peer_access(DeviceId::cuda(9)).unwrap_err().kind(), "NotFound");
    let before = peer_copies();
    there_and_back(4);
    assert_eq!(peer_copies() - before, if p2p { 0 } else { 2 });
    // The access covers memory that is allocated later, and copies of rows.
    let late = buffer(&one, &b, 32 << 20);
    let rows = Copy2d {
        width: 16,
        rows: 8,
        src_pitch: 64,
        dst_pitch: 32,
        ..Copy2d::linear((x.addr(), 0), (late.addr(), 0), 0)
    };
    let cleared = submit(&b, &[fill(&late, 0)]).unwrap();
    let v = submit(&a, &[Op::Wait(b.timeline().at(cleared)), fill(&x, 6), Op::Copy(rows)]).unwrap();
    wait(&a, v).unwrap();
    let seen = read(&b, &late);
    for (i, byte) in seen[..512].iter().enumerate() {
        let inside = i % 32 < 16 && i / 32 < 8;
        assert_eq!(*byte, if inside { 6 } else { 0 }, "byte {i}");
    }
    // In a graph, the copy is a node, or a step between two segments.
    let mut ops = OpList::new();
    for op in [fill(&x, 7), copy(&x, &y), fill(&x, 8)] {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { zero.instantiate(Plan::new(ops)) }.unwrap();
    for _ in 0..2 {
        let v = submit(&a, &[Op::Graph(&graph)]).unwrap();
        wait(&a, v).unwrap();
        assert_eq!((read(&b, &y), read(&a, &x)), (vec![7; 4096], vec![8; 4096]));
    }
    drop((graph, x, y, late, a, b, zero, one));
    bench.close();
}

#[test]
fn copies_between_devices_that_reach_each_other() {
    carry(true);
}

#[test]
fn copies_between_devices_that_do_not() {
    carry(false);
}

#[test]
fn access_that_somebody_else_enabled_is_no_error() {
    let bench = Bench::new(31);
    let (zero, one) = (bench.open(0), bench.open(1));
    // Another library in this process uses the primary contexts, which all share.
    let ops: &dyn CudaSlowOps = &*bench.driver;
    let (first, second) = (ops.primary_retain(0).unwrap(), ops.primary_retain(1).unwrap());
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { ops.set_current(first) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { ops.enable_peer(second) }.unwrap();
    assert!(zero.peer_access(DeviceId::cuda(1)).unwrap());
    assert_eq!(ops.current().unwrap(), first, "what was current still is");
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { ops.primary_release(0) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { ops.primary_release(1) }.unwrap();
    drop((zero, one));
    bench.close();
}
