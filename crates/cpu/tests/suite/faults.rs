//! Failures of operations, and the work that they must not break.

use crate::common::*;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Fault};
use leasehold_hal::{Access, HostCall, Op, Plan};
use std::time::Duration;

fn fault(error: &Error) -> &Fault {
    match error {
        Error::Fault(f) => f,
        other => panic!("a fault, not {other:?}"),
    }
}

#[test]
fn a_panicking_kernel_poisons_its_stream_and_workers_survive() {
    for threads in [1, 2, 4] {
        let rig = rig(threads);
        let trap = rig.kernel("trap", trap, &[], 4);
        let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
        let cell = cell();
        let b = [on(&*cell, Access::ReadWrite)];
        let add = launch(&count, 8, &b, &[]);
        let at = 7u32.to_le_bytes();
        let good = submit(&rig.stream, &[add]).unwrap();
        let bad = submit(&rig.stream, &[add, launch(&trap, 64, &[], &at), add]).unwrap();
        let _ = submit(&rig.stream, &[add]);
        let cause = rig.stream.wait_host(bad.value(), LONG).unwrap_err();
        assert_eq!(fault(&cause).op, "dispatch trap");
        assert_eq!(fault(&cause).submission, bad.value());
        assert!(fault(&cause).stream.contains("cpu:0"), "{cause}");
        assert!(fault(&cause).cause.contains("the trap in tile 7"), "{cause}");
        // Values advance, so no waiter hangs.
        while !rig.stream.timeline().is_idle() {
            std::thread::yield_now();
        }
        assert!(good.is_settled());
        assert!(!bad.is_settled());
        assert_eq!(cell[0].load(Ordering::Relaxed), 16, "nothing ran after the fault");
        // Later calls return the cause.
        assert_eq!(submit(&rig.stream, &[add]).unwrap_err().to_string(), cause.to_string());
        assert!(rig.stream.signal().is_err());
        assert!(rig.device.synchronize(LONG).is_err());
        // The pool, other streams and a new stream in its place still work.
        for _ in 0..3 {
            let other = rig.another();
            submit(&other, &[add]).unwrap();
            finish(&other).unwrap();
        }
        assert_eq!(cell[0].load(Ordering::Relaxed), 40);
        drop(rig.stream);
        let other = rig.device.stream(&Default::default()).unwrap();
        submit(&other, &[add]).unwrap();
        finish(&other).unwrap();
        rig.device.synchronize(LONG).unwrap();
    }
}

/// Takes elements of binding 0 that it has not got.
///
/// # Safety
/// - None: the range is refused.
unsafe fn beyond(args: &leasehold_hal::CpuArgs<'_>) {
    // SAFETY: there are no such elements, which the call refuses.
    let _ = unsafe { args.slice_mut::<u32>(0, 1, 100) };
}

#[test]
fn a_range_beyond_a_binding_is_named_by_its_ends() {
    let rig = rig(1);
    let beyond = rig.kernel("beyond", beyond, &[Access::ReadWrite], 0);
    let cell = cell();
    let b = [on(&*cell, Access::ReadWrite)];
    let bad = submit(&rig.stream, &[launch(&beyond, 1, &b, &[])]).unwrap();
    let cause = rig.stream.wait_host(bad.value(), LONG).unwrap_err();
    assert!(fault(&cause).cause.contains("elements, not 1..101"), "{cause}");
}

#[test]
fn host_calls_fail_by_error_and_by_panic() {
    let rig = rig(1);
    for (call, text) in [
        (HostCall::new("refuse", || Err(Error::invalid("no coffee"))), "no coffee"),
        (HostCall::new("throw", || panic!("no tea")), "no tea"),
        (HostCall::new("odd", || std::panic::panic_any(7u8)), "without a message"),
    ] {
        let stream = rig.another();
        let p = submit(&stream, &[Op::Host(&call)]).unwrap();
        let cause = stream.wait_host(p.value(), LONG).unwrap_err();
        assert!(cause.to_string().contains(text), "{cause}");
        assert_eq!(fault(&cause).op, format!("host call {}", call.name));
    }
}

#[test]
fn what_an_operation_holds_may_panic_when_it_is_dropped() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("boom");
        }
    }
    let rig = rig(1);
    let bomb = Bomb;
    let call = HostCall::new("carry", move || {
        let _ = &bomb;
        Ok(())
    });
    submit(&rig.stream, &[Op::Host(&call)]).unwrap();
    // The last reference to the counter must drop on the worker.
    let host_timeline = HostCall::new("late", || {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    });
    let stream = rig.another();
    submit(&stream, &[Op::Host(&host_timeline), Op::Host(&call)]).unwrap();
    finish(&rig.stream).unwrap();
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(call)));
    assert!(dropped.is_ok());
    finish(&stream).unwrap();
    submit(&stream, &[Op::Host(&host_timeline)]).unwrap();
    finish(&stream).unwrap();
}

#[test]
fn a_failure_goes_two_hops_and_keeps_its_cause() {
    let rig = rig(1);
    let (b, c) = (rig.another(), rig.another());
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cell = cell();
    let bindings = [on(&*cell, Access::ReadWrite)];
    let add = launch(&count, 1, &bindings, &[]);
    let p = submit(&rig.stream, &[Op::Wait(host_timeline.timeline().at(opens)), add]).unwrap();
    let q = submit(&b, &[Op::Wait(p), add]).unwrap();
    let r = submit(&c, &[Op::Wait(q), add]).unwrap();
    host_timeline.fail(Error::state("the first cause"));
    host_timeline.fail(Error::state("the second"));
    for (stream, point) in [(&rig.stream, p), (&b, q), (&c, r)] {
        let cause = stream.wait_host(point.value(), LONG).unwrap_err();
        assert!(cause.to_string().contains("the first cause"), "{cause}");
    }
    assert!(host_timeline.signal_host(opens).is_err());
    // A wait for an old failure gives the same result.
    let d = rig.another();
    d.wait(p).unwrap();
    assert!(finish(&d).unwrap_err().to_string().contains("the first cause"));
    assert_eq!(cell[0].load(Ordering::Relaxed), 0, "nothing ran");
}

#[test]
fn a_graph_names_the_node_that_failed() {
    for threads in [1, 3] {
        let rig = rig(threads);
        let trap = rig.kernel("trap", trap, &[Access::Read], 4);
        let cells: [AtomicU64; 4] = Default::default();
        let mut ops = leasehold_hal::OpList::new();
        for i in 0..4usize {
            let b = [on(&cells[i..=i], Access::Read)];
            let never = if i == 2 { 3u32 } else { 99 };
            ops.push(&launch(&trap, 8, &b, &never.to_le_bytes()));
        }
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
        let p = submit(&rig.stream, &[Op::Graph(&exec)]).unwrap();
        let cause = rig.stream.wait_host(p.value(), LONG).unwrap_err();
        assert_eq!(fault(&cause).op, "graph node 2 (dispatch trap)");
        // The graph itself has not failed.
        let other = rig.another();
        let p = submit(&other, &[Op::Graph(&exec)]).unwrap();
        assert!(other.wait_host(p.value(), LONG).is_err());
    }
}

#[test]
fn nested_parallelism_in_a_kernel_does_not_hang() {
    /// Starts threads of its own, as a kernel does that uses another library.
    ///
    /// # Safety
    /// - Binding 0 holds an `AtomicU64`.
    unsafe fn nested(args: &leasehold_hal::CpuArgs<'_>) {
        // SAFETY: binding 0 holds an `AtomicU64` (the contract of this function).
        let cell = unsafe { &*args.pointer::<AtomicU64>(0).0 };
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| cell.fetch_add(1, Ordering::Relaxed));
            }
        });
    }
    for threads in [1, 2] {
        let rig = rig(threads);
        let nested = rig.kernel("nested", nested, &[Access::ReadWrite], 0);
        let cell = cell();
        let b = [on(&*cell, Access::ReadWrite)];
        submit(&rig.stream, &[launch(&nested, 16, &b, &[])]).unwrap();
        finish(&rig.stream).unwrap();
        assert_eq!(cell[0].load(Ordering::Relaxed), 48);
    }
}

#[test]
fn a_refused_submission_takes_no_value() {
    let rig = rig(1);
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let before = rig.stream.timeline().submitted();
    let bad = launch(&count, 1, &[], &[]);
    assert!(matches!(submit(&rig.stream, &[bad]), Err(Error::InvalidArgument(_))));
    let fill = leasehold_hal::Fill { dst: 0, native: 0, bytes: 6, pattern: 1, width: 4 };
    assert!(matches!(submit(&rig.stream, &[Op::Fill(fill)]), Err(Error::InvalidArgument(_))));
    assert_eq!(rig.stream.timeline().submitted(), before);
}
