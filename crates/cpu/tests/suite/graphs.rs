//! Replays against eager runs, at every number of threads.

use crate::common::*;
use leasehold_core::Error;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, thread};
use leasehold_cpu::CpuConfig;
use leasehold_hal::{Access, Dispatch, HostCall, NodePatch, Op, OpList, Plan};
use std::time::{Duration, Instant};

#[test]
fn equal_bits_at_every_number_of_threads_eager_and_replayed() {
    const TILES: usize = 777;
    let mut seen: Option<Vec<u32>> = None;
    for threads in 1..=4 {
        let rig = rig(threads);
        let sums = rig.kernel("sums", sums, &[Access::Write], 0);
        let out: Vec<f32> = vec![0.0; TILES];
        let b = [on(&out, Access::Write)];
        let op = Op::Dispatch(Dispatch {
            pipeline: &sums,
            grid: [TILES as u32, 1, 1],
            block: [1; 3],
            shared: 1024,
            bindings: &b,
            params: &[],
        });
        let mut ops = OpList::new();
        ops.push(&op);
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
        for op in [op, Op::Graph(&exec), op, Op::Graph(&exec)] {
            submit(&rig.stream, &[op]).unwrap();
            finish(&rig.stream).unwrap();
            // SAFETY: the work is over. The read is volatile, because the compiler does not know
            // that the kernel wrote.
            let bits: Vec<u32> =
                out.iter().map(|x| unsafe { std::ptr::read_volatile(x) }.to_bits()).collect();
            assert_eq!(*seen.get_or_insert(bits.clone()), bits, "{threads} threads");
        }
    }
}

/// A graph of many shapes: `layers` of `width` nodes. Each node reads two nodes of the layer before
/// and writes its own cell.
fn lattice(rig: &Rig, cells: &[u64], layers: usize, width: usize) -> OpList {
    /// Mixes two values in the first tile. The other tiles do nothing.
    ///
    /// # Safety
    /// - Bindings 0 and 1 are read, 2 is written; each holds one `u64`.
    unsafe fn mix(args: &leasehold_hal::CpuArgs<'_>) {
        if args.tile() != [0; 3] {
            return;
        }
        // SAFETY: bindings 0 and 1 hold one `u64` each (the contract of this function).
        let (a, b) = unsafe { (args.slice::<u64>(0)[0], args.slice::<u64>(1)[0]) };
        // SAFETY: binding 2 holds one `u64` (the contract of this function), and only the first
        // tile is here.
        let own = unsafe { args.slice_mut::<u64>(2, 0, 1) };
        own[0] = a.wrapping_mul(31).wrapping_add(b.rotate_left(7)).wrapping_add(1);
    }
    let mix = rig.kernel("mix", mix, &[Access::Read, Access::Read, Access::Write], 0);
    let mut ops = OpList::new();
    for layer in 1..layers {
        for i in 0..width {
            let at = |l: usize, i: usize, a| on(&cells[l * width + i % width..][..1], a);
            let b = [
                at(layer - 1, i, Access::Read),
                at(layer - 1, i * 3 + layer, Access::Read),
                at(layer, i, Access::Write),
            ];
            ops.push(&launch(&mix, 1 + (i as u32 * 7) % 5, &b, &[]));
        }
    }
    ops
}

#[test]
fn dependencies_hold_in_wide_graphs() {
    let (layers, width) = (20, 9);
    let mut seen: Option<Vec<u64>> = None;
    for threads in 1..=4 {
        let rig = rig(threads);
        let mut cells = vec![0u64; layers * width];
        for (i, c) in cells.iter_mut().enumerate().take(width) {
            *c = i as u64 * 1_000_003;
        }
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let exec =
            unsafe { rig.device.instantiate(Plan::new(lattice(&rig, &cells, layers, width))) }
                .unwrap();
        assert_eq!(exec.nodes(), (layers - 1) * width);
        for _ in 0..70 {
            for c in &mut cells[width..] {
                *c = 0;
            }
            std::hint::black_box(&mut cells);
            submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
            finish(&rig.stream).unwrap();
            // SAFETY: the work is over.
            let now: Vec<u64> =
                cells.iter().map(|c| unsafe { std::ptr::read_volatile(c) }).collect();
            assert_eq!(*seen.get_or_insert(now.clone()), now, "{threads} threads");
        }
    }
}

#[test]
fn independent_branches_run_side_by_side_when_that_pays() {
    /// Adds one to the first counter, and waits a while for another tile to do so.
    ///
    /// # Safety
    /// - Binding 0 holds two `AtomicU64`s; binding 1 may be any memory.
    unsafe fn meet(args: &leasehold_hal::CpuArgs<'_>) {
        let at = args.pointer::<AtomicU64>(0).0;
        // SAFETY: binding 0 holds two `AtomicU64`s (the contract of this function).
        let (here, met) = unsafe { (&*at, &*at.add(1)) };
        here.fetch_add(1, Ordering::AcqRel);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(30) {
            if here.load(Ordering::Acquire) % 2 == 0 {
                met.fetch_add(1, Ordering::AcqRel);
                return;
            }
            thread::yield_now();
        }
    }
    let rig = rig(2);
    let meet = rig.kernel("meet", meet, &[Access::Read, Access::Write], 0);
    let cells: [AtomicU64; 2] = Default::default();
    let own = [0u64; 2];
    let mut ops = OpList::new();
    for i in 0..2usize {
        let b = [on(&cells, Access::Read), on(&own[i..=i], Access::Write)];
        ops.push(&launch(&meet, 1, &b, &[]));
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    // The pool learns a kernel's cost from dispatches of several tiles.
    let b = [on(&cells, Access::Read), on(&own, Access::Write)];
    submit(&rig.stream, &[launch(&meet, 2, &b, &[])]).unwrap();
    for _ in 0..20 {
        submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
        finish(&rig.stream).unwrap();
        if cells[1].load(Ordering::Acquire) > 2 {
            return;
        }
    }
    panic!("branches never met: {cells:?}");
}

#[test]
fn all_kinds_of_operations_replay() {
    let rig = rig(2);
    let from: Vec<u8> = (0..=255).collect();
    let (mid, to) = (vec![0u8; 256], vec![0u8; 256]);
    let calls = Arc::new(AtomicU64::new(0));
    let call = {
        let calls = calls.clone();
        HostCall::new("tick", move || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    };
    let timestamp = rig.device.timestamp().unwrap();
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    let mut inner = OpList::new();
    inner.push(&Op::Host(&call));
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let inner = unsafe { rig.device.instantiate(Plan::new(inner)) }.unwrap();
    let mut ops = OpList::new();
    let m = mid.as_ptr() as u64;
    ops.push(&Op::Wait(host_timeline.timeline().at(opens)));
    ops.push(&Op::Upload(leasehold_hal::Upload {
        src: from.as_ptr(),
        dst: m,
        native: 0,
        bytes: 256,
        keep: None,
    }));
    ops.push(&Op::Fill(leasehold_hal::Fill {
        dst: m + 16,
        native: 0,
        bytes: 16,
        pattern: 0xabcd,
        width: 2,
    }));
    ops.push(&Op::WriteTimestamp(&timestamp));
    ops.push(&Op::Graph(&inner));
    ops.push(&Op::Download(leasehold_hal::Download {
        src: m,
        native: 0,
        dst: to.as_ptr().cast_mut(),
        bytes: 256,
        keep: None,
    }));
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    drop((call, inner));
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    host_timeline.signal_host(opens).unwrap();
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    finish(&rig.stream).unwrap();
    let mut expected = from.clone();
    for pair in expected[16..32].chunks_mut(2) {
        pair.copy_from_slice(&[0xcd, 0xab]);
    }
    std::hint::black_box(&to);
    assert_eq!(to, expected);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert!(timestamp.get().is_some());
}

#[test]
fn an_empty_graph_is_valid() {
    let rig = rig(2);
    for plan in [Plan::default(), Plan::new(OpList::new())] {
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let exec = unsafe { rig.device.instantiate(plan) }.unwrap();
        submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
        finish(&rig.stream).unwrap();
    }
    submit(&rig.stream, &[]).unwrap();
    finish(&rig.stream).unwrap();
}

#[test]
fn updates_are_in_place_and_all_or_nothing() {
    let rig = rig(1);
    let digit = rig.kernel("digit", digit, &[Access::ReadWrite], 4);
    let (one, two) = ([0u64], [0u64]);
    let b = [on(&one, Access::ReadWrite)];
    let mut ops = OpList::new();
    ops.push(&launch(&digit, 1, &b, &1u32.to_le_bytes()));
    ops.push(&launch(&digit, 1, &b, &2u32.to_le_bytes()));
    let timestamp = rig.device.timestamp().unwrap();
    ops.push(&Op::WriteTimestamp(&timestamp));
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    let patch = |node| NodePatch { node, bindings: None, params: None, grid: None };
    let (five, long) = (5u32.to_le_bytes(), [0u8; 8]);
    for bad in [
        NodePatch { bindings: Some(&[]), ..patch(1) },
        NodePatch { params: Some(&long), ..patch(1) },
        patch(2),
        patch(3),
    ] {
        let good = NodePatch { params: Some(&five), ..patch(0) };
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        assert!(matches!(unsafe { exec.update(&[good, bad]) }, Err(Error::InvalidArgument(_))));
    }
    let other = [on(&two, Access::ReadWrite)];
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    finish(&rig.stream).unwrap();
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe {
        exec.update(&[NodePatch { params: Some(&five), bindings: Some(&other), ..patch(1) }])
    }
    .unwrap();
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    finish(&rig.stream).unwrap();
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { exec.update(&[NodePatch { grid: Some([0, 1, 1]), ..patch(0) }]) }.unwrap();
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    finish(&rig.stream).unwrap();
    // SAFETY: the work is over.
    let now =
        unsafe { (std::ptr::read_volatile(one.as_ptr()), std::ptr::read_volatile(two.as_ptr())) };
    assert_eq!(now, (121, 55));
}

#[test]
fn an_update_never_changes_running_work() {
    let rig = rig(1);
    let spin = rig.kernel("spin", spin_until_flag, &[Access::ReadWrite], 0);
    let cells: [AtomicU64; 2] = Default::default();
    let b = [on(&cells, Access::ReadWrite)];
    let mut ops = OpList::new();
    ops.push(&launch(&spin, 1, &b, &[]));
    let started = Arc::new(AtomicU64::new(0));
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
    let patch = NodePatch { node: 0, bindings: None, params: None, grid: Some([2, 1, 1]) };
    // While the launch runs, the update is refused.
    let start = Instant::now();
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    while unsafe { exec.update(&[NodePatch { grid: None, ..patch }]) }.is_ok() {
        assert!(start.elapsed() < Duration::from_secs(20), "the launch never began");
        thread::yield_now();
    }
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    assert!(matches!(unsafe { exec.update(&[patch]) }, Err(Error::InvalidState(_))));
    drop(started);
    cells[0].store(1, Ordering::Release);
    finish(&rig.stream).unwrap();
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { exec.update(&[patch]) }.unwrap();
}

#[test]
fn one_graph_on_two_streams_is_serialised_and_may_be_dropped_meanwhile() {
    let rig = rig(2);
    let digit = rig.kernel("digit", digit, &[Access::ReadWrite], 4);
    let value = [0u64];
    let b = [on(&value, Access::ReadWrite)];
    let mut ops = OpList::new();
    for _ in 0..50 {
        // The kernel is not atomic: two launches at a time would lose some updates.
        ops.push(&launch(&digit, 1, &b, &0u32.to_le_bytes()));
    }
    for _ in 0..50 {
        ops.push(&launch(&digit, 1, &b, &1u32.to_le_bytes()));
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    let other = rig.another();
    for _ in 0..50 {
        submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
        submit(&other, &[Op::Graph(&exec)]).unwrap();
    }
    drop(exec);
    finish(&rig.stream).unwrap();
    finish(&other).unwrap();
    let once = (0..50).fold(0u64, |v, _| v.wrapping_mul(10).wrapping_add(1));
    let shift = (0..100).fold(1u64, |v, _| v.wrapping_mul(10));
    let expected = (0..100).fold(0u64, |v, _| v.wrapping_mul(shift).wrapping_add(once));
    // SAFETY: the work is over.
    assert_eq!(unsafe { std::ptr::read_volatile(value.as_ptr()) }, expected);
}

#[test]
fn a_broken_plan_is_refused() {
    let rig = rig_with(CpuConfig::threads(1));
    let call = HostCall::new("nothing", || Ok(()));
    let mut ops = OpList::new();
    ops.push(&Op::Host(&call));
    let plan =
        Plan { ops, pred: vec![0], pred_at: vec![0, 1], early: Vec::new(), partitions: Vec::new() };
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    assert!(matches!(unsafe { rig.device.instantiate(plan) }, Err(Error::InvalidArgument(_))));
}
