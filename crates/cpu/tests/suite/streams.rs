//! Order, overlap, waits, host timelines, idle streams.

use crate::common::*;
use leasehold_core::Error;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, thread};
use leasehold_cpu::CpuConfig;
use leasehold_hal::{Access, Copy2d, Dispatch, Fill, HostCall, Op, OpList, Plan, StreamDesc};
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[test]
fn submissions_run_in_order() {
    for threads in [1, 3] {
        let rig = rig(threads);
        let digit = rig.kernel("digit", digit, &[Access::ReadWrite], 4);
        let value = [0u64];
        let bindings = [on(&value, Access::ReadWrite)];
        for d in 1..=9u32 {
            submit(&rig.stream, &[launch(&digit, 1, &bindings, &d.to_le_bytes())]).unwrap();
        }
        finish(&rig.stream).unwrap();
        // SAFETY: the work is over. The read is volatile, because the compiler does not know that
        // the kernel wrote.
        assert_eq!(unsafe { std::ptr::read_volatile(value.as_ptr()) }, 123_456_789);
    }
}

#[test]
fn values_follow_one_another_from_many_threads_and_none_is_torn() {
    let rig = rig(2);
    let log = Arc::new(Mutex::new(Vec::new()));
    thread_scope(8, |t| {
        for i in 0..50u32 {
            let note = |half: u32| {
                let log = log.clone();
                HostCall::new("note", move || {
                    log.lock().push((t, i, half));
                    Ok(())
                })
            };
            let (a, b) = (note(0), note(1));
            submit(&rig.stream, &[Op::Host(&a), Op::Host(&b)]).unwrap();
        }
    });
    finish(&rig.stream).unwrap();
    let log = log.lock();
    assert_eq!(log.len(), 800);
    for pair in log.chunks(2) {
        assert_eq!(
            (pair[0].0, pair[0].1, 0),
            (pair[1].0, pair[1].1, pair[0].2),
            "a submission was torn apart"
        );
        assert_eq!(pair[1].2, 1);
    }
    for t in 0..8 {
        let mine: Vec<_> = log.iter().filter(|e| e.0 == t && e.2 == 0).map(|e| e.1).collect();
        assert!(mine.is_sorted(), "one thread's submissions changed places");
    }
}

fn thread_scope(n: u32, f: impl Fn(u32) + Sync) {
    std::thread::scope(|s| {
        for t in 0..n {
            let f = &f;
            s.spawn(move || f(t));
        }
    });
}

#[test]
fn two_streams_overlap_even_with_one_thread() {
    let rig = rig(1);
    let other = rig.another();
    let spin = rig.kernel("spin", spin_until_flag, &[Access::ReadWrite], 0);
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cells: [AtomicU64; 2] = Default::default();
    let a = [on(&cells, Access::ReadWrite)];
    let p = submit(&rig.stream, &[launch(&spin, 1, &a, &[])]).unwrap();
    assert!(!p.is_settled());
    // A kernel of the second stream sets the flag on which the first stream spins.
    submit(&other, &[launch(&count, 1, &a, &[])]).unwrap();
    finish(&rig.stream).unwrap();
    assert_eq!(cells[1].load(Ordering::Relaxed), 1);
    finish(&other).unwrap();
}

#[test]
fn a_blocked_stream_does_not_starve_another() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    rig.stream.wait(host_timeline.timeline().at(opens)).unwrap();
    for _ in 0..10 {
        let other = rig.another();
        let call = HostCall::new("nothing", || Ok(()));
        submit(&other, &[Op::Host(&call)]).unwrap();
        finish(&other).unwrap();
    }
    assert!(!rig.stream.timeline().is_idle());
    host_timeline.signal_host(opens).unwrap();
    finish(&rig.stream).unwrap();
}

#[test]
fn a_wait_may_come_before_its_signal() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let base = host_timeline.timeline().completed();
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cell = cell();
    let b = [on(&*cell, Access::ReadWrite)];
    let op = launch(&count, 1, &b, &[]);
    let p = submit(&rig.stream, &[Op::Wait(host_timeline.timeline().at(base + 5)), op]).unwrap();
    host_timeline.signal_host(base + 3).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!((p.is_settled(), cell[0].load(Ordering::Relaxed)), (false, 0));
    assert!(matches!(
        rig.stream.wait_host(p.value(), Some(Duration::from_millis(5))),
        Err(Error::Timeout(_))
    ));
    assert!(
        matches!(host_timeline.signal_host(base + 3), Err(Error::InvalidArgument(_))),
        "values grow"
    );
    host_timeline.signal_host(base + 7).unwrap();
    finish(&rig.stream).unwrap();
    assert_eq!(cell[0].load(Ordering::Relaxed), 1);
}

#[test]
fn a_host_timeline_that_is_dropped_lets_nobody_hang() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    rig.stream.wait(host_timeline.timeline().at(opens)).unwrap();
    drop(host_timeline);
    let cause = finish(&rig.stream).unwrap_err();
    assert!(cause.to_string().contains("host timeline was dropped"), "{cause}");
}

#[test]
fn a_stream_waits_for_another_and_needs_no_wait_for_itself() {
    let rig = rig(2);
    let other = rig.another();
    let spin = rig.kernel("spin", spin_until_flag, &[Access::ReadWrite], 0);
    let digit = rig.kernel("digit", digit, &[Access::ReadWrite], 4);
    let cells: [AtomicU64; 2] = Default::default();
    let value = [0u64];
    let (a, b) = ([on(&cells, Access::ReadWrite)], [on(&value, Access::ReadWrite)]);
    let (one, two) = (1u32.to_le_bytes(), 2u32.to_le_bytes());
    let p = submit(&rig.stream, &[launch(&spin, 1, &a, &[]), launch(&digit, 1, &b, &one)]).unwrap();
    other.wait(p).unwrap();
    submit(&other, &[launch(&digit, 1, &b, &two)]).unwrap();
    assert!(other.timeline().knows(p.into()), "a wait teaches the waiter's timeline");
    let before = rig.stream.timeline().submitted();
    rig.stream.wait(p).unwrap();
    assert_eq!(rig.stream.timeline().submitted(), before, "waiting for oneself costs nothing");
    assert!(!other.timeline().is_idle());
    cells[0].store(1, Ordering::Release);
    finish(&other).unwrap();
    // SAFETY: the work is over.
    assert_eq!(unsafe { std::ptr::read_volatile(value.as_ptr()) }, 12);
    let ahead = rig.stream.timeline().at(rig.stream.timeline().submitted() + 1);
    assert!(matches!(submit(&rig.stream, &[Op::Wait(ahead)]), Err(Error::InvalidArgument(_))));
}

#[test]
fn ping_pong_of_two_timelines_from_two_threads() {
    const ROUNDS: u64 = 10_000;
    let rig = rig(1);
    let (a, b) = (rig.device.host_timeline().unwrap(), rig.device.host_timeline().unwrap());
    let (from_a, from_b) = (a.timeline().completed(), b.timeline().completed());
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 1..=ROUNDS {
                a.signal_host(from_a + i).unwrap();
                b.wait_host(from_b + i, LONG).unwrap();
            }
        });
        for i in 1..=ROUNDS {
            a.wait_host(from_a + i, LONG).unwrap();
            b.signal_host(from_b + i).unwrap();
        }
    });
    assert_eq!(
        (a.timeline().completed(), b.timeline().completed()),
        (from_a + ROUNDS, from_b + ROUNDS)
    );
}

#[test]
fn ping_pong_of_two_streams_by_waits() {
    const ROUNDS: u64 = 2_000;
    let rig = rig(1);
    let other = rig.another();
    let digit = rig.kernel("digit", digit, &[Access::ReadWrite], 4);
    let value = [0u64];
    let b = [on(&value, Access::ReadWrite)];
    let mut expected = 0u64;
    let mut last = rig.stream.timeline().now();
    for i in 0..ROUNDS {
        let (stream, d) = if i % 2 == 0 { (&rig.stream, 3u32) } else { (&other, 7) };
        last = submit(stream, &[Op::Wait(last), launch(&digit, 1, &b, &d.to_le_bytes())]).unwrap();
        expected = expected.wrapping_mul(10).wrapping_add(u64::from(d));
    }
    last.timeline().wait(last.value(), LONG).unwrap();
    // SAFETY: the work is over.
    assert_eq!(unsafe { std::ptr::read_volatile(value.as_ptr()) }, expected);
}

#[test]
fn eight_host_threads_wake_on_one_value() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let at = host_timeline.timeline().completed() + 1;
    let woken = AtomicU32::new(0);
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                host_timeline.wait_host(at, LONG).unwrap();
                woken.fetch_add(1, Ordering::Relaxed);
            });
        }
        thread::sleep(Duration::from_millis(10));
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        host_timeline.signal_host(at).unwrap();
    });
    assert_eq!(woken.load(Ordering::Relaxed), 8);
}

#[test]
fn a_host_call_may_submit_more_even_to_its_own_full_stream() {
    let rig = rig(1);
    let stream = rig.stream.clone();
    let ran = Arc::new(AtomicU64::new(0));
    let call = {
        let ran = ran.clone();
        HostCall::new("more", move || {
            let ran = ran.clone();
            let one = HostCall::new("one", move || {
                ran.fetch_add(1, Ordering::Relaxed);
                Ok(())
            });
            for _ in 0..70_000 {
                submit(&stream, &[Op::Host(&one)])?;
            }
            Ok(())
        })
    };
    submit(&rig.stream, &[Op::Host(&call)]).unwrap();
    drop(call);
    while ran.load(Ordering::Relaxed) < 70_000 {
        finish(&rig.stream).unwrap();
    }
}

#[test]
fn a_full_queue_makes_its_submitter_wait_for_room() {
    let rig = rig(1);
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    rig.stream.wait(host_timeline.timeline().at(opens)).unwrap();
    let call = HostCall::new("nothing", || Ok(()));
    let submitted = AtomicU64::new(0);
    std::thread::scope(|s| {
        s.spawn(|| {
            let ops = [Op::Host(&call); 64];
            for _ in 0..4_000 {
                submit(&rig.stream, &ops).unwrap();
                submitted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut before = u64::MAX;
        while before != submitted.load(Ordering::Relaxed) || before == 0 {
            before = submitted.load(Ordering::Relaxed);
            thread::sleep(Duration::from_millis(50));
        }
        assert!(before < 4_000, "the queue has no bound");
        host_timeline.signal_host(opens).unwrap();
    });
    finish(&rig.stream).unwrap();
    assert_eq!(submitted.load(Ordering::Relaxed), 4_000);
}

#[test]
fn a_host_call_that_waits_for_its_own_stream_is_told() {
    let rig = rig(1);
    let stream = rig.stream.clone();
    let call = HostCall::new("self", move || stream.wait_host(stream.timeline().submitted(), None));
    submit(&rig.stream, &[Op::Host(&call)]).unwrap();
    drop(call);
    let cause = finish(&rig.stream).unwrap_err();
    assert!(cause.to_string().contains("waits for the stream"), "{cause}");
}

#[test]
fn query_does_not_block_and_idle_waits_return_at_once() {
    let rig = rig(1);
    let start = Instant::now();
    for _ in 0..1000 {
        rig.stream.flush().unwrap();
        assert_eq!(rig.stream.signal().unwrap(), rig.stream.timeline().submitted());
        assert_eq!(rig.stream.refresh().unwrap(), rig.stream.timeline().completed());
        finish(&rig.stream).unwrap();
    }
    rig.device.synchronize(None).unwrap();
    assert!(start.elapsed() < Duration::from_millis(500));
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    rig.stream.wait(host_timeline.timeline().at(opens)).unwrap();
    assert!(matches!(
        rig.stream.wait_host(rig.stream.timeline().submitted(), Some(Duration::ZERO)),
        Err(Error::Timeout(_))
    ));
    assert!(matches!(
        rig.device.synchronize(Some(Duration::from_millis(10))),
        Err(Error::Timeout(_))
    ));
    host_timeline.signal_host(opens).unwrap();
    rig.device.synchronize(LONG).unwrap();
}

#[test]
fn stamps_are_written_in_order() {
    let rig = rig(1);
    let (a, b) = (rig.device.timestamp().unwrap(), rig.device.timestamp().unwrap());
    // SAFETY: the timestamps are of this backend.
    assert!(matches!(unsafe { rig.device.elapsed(&a, &b) }, Err(Error::InvalidState(_))));
    let nap = HostCall::new("nap", || {
        thread::sleep(Duration::from_millis(5));
        Ok(())
    });
    submit(&rig.stream, &[Op::WriteTimestamp(&a), Op::Host(&nap), Op::WriteTimestamp(&b)]).unwrap();
    finish(&rig.stream).unwrap();
    // SAFETY: the timestamps are of this backend.
    let t = unsafe { rig.device.elapsed(&a, &b) }.unwrap();
    assert!(t >= Duration::from_millis(5) && t < Duration::from_secs(10), "{t:?}");
}

#[test]
fn idle_threads_use_no_processor() {
    if !alone("streams::idle_threads_use_no_processor") {
        return;
    }
    let rig = rig(4);
    let streams: Vec<_> = (0..8).map(|_| rig.another()).collect();
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cell = cell();
    let b = [on(&*cell, Access::ReadWrite)];
    for s in &streams {
        submit(s, &[launch(&count, 1000, &b, &[])]).unwrap();
        finish(s).unwrap();
    }
    // One stream stays blocked, which must cost no processor time either.
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    rig.stream.wait(host_timeline.timeline().at(opens)).unwrap();
    thread::sleep(Duration::from_millis(200));
    let before = cpu_time();
    thread::sleep(Duration::from_secs(1));
    let used = cpu_time() - before;
    host_timeline.signal_host(opens).unwrap();
    assert!(used < Duration::from_millis(10), "{used:?} of processor time in an idle second");
}

#[test]
fn streams_are_limited_and_recycled() {
    let rig = rig_with(CpuConfig::threads(1).streams(4));
    let mut held: Vec<_> = (0..3).map(|_| rig.another()).collect();
    let refused = rig.device.stream(&StreamDesc::default()).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { limit: 4, .. }), "{refused}");
    let call = HostCall::new("nothing", || Ok(()));
    for _ in 0..200 {
        drop(held.pop());
        let again = rig.another();
        submit(&again, &[Op::Host(&call)]).unwrap();
        finish(&again).unwrap();
        held.push(again);
    }
    let mut created = 0;
    rig.device.pools(&mut |name, stats| {
        if name == "stream" {
            created = stats.created;
        }
    });
    assert_eq!(created, 4, "idle streams are lent again with their thread");
}

#[test]
fn threads_that_make_streams_at_once_keep_to_the_limit() {
    for _ in 0..20 {
        let rig = rig_with(CpuConfig::threads(1).streams(4));
        let made = Mutex::new(Vec::new());
        let start = Barrier::new(8);
        thread_scope(8, |_| {
            start.wait();
            if let Ok(stream) = rig.device.stream(&StreamDesc::default()) {
                made.lock().push(stream);
            }
        });
        assert!(made.lock().len() <= 3, "{} streams beside the one of the rig", made.lock().len());
    }
}

#[test]
fn the_steady_state_allocates_nothing() {
    if !alone("streams::the_steady_state_allocates_nothing") {
        return;
    }
    let rig = rig(2);
    let other = rig.another();
    let sums = rig.kernel("sums", sums, &[Access::Write], 0);
    let out = vec![0f32; 64];
    let (from, to) = (vec![1u8; 1 << 20], vec![0u8; 1 << 20]);
    let b = [on(&out, Access::Write)];
    let dispatch = Op::Dispatch(Dispatch {
        pipeline: &sums,
        grid: [64, 1, 1],
        block: [1; 3],
        shared: 1024,
        bindings: &b,
        params: &[],
    });
    let copy =
        Op::Copy(Copy2d::linear((from.as_ptr() as u64, 0), (to.as_ptr() as u64, 0), 1 << 20));
    let fill =
        Op::Fill(Fill { dst: to.as_ptr() as u64, native: 0, bytes: 64, pattern: 3, width: 2 });
    let timestamp = rig.device.timestamp().unwrap();
    let mut ops = OpList::new();
    for op in [dispatch, copy, fill, dispatch, Op::WriteTimestamp(&timestamp)] {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
    let round = || {
        let p =
            submit(&rig.stream, &[dispatch, copy, fill, Op::WriteTimestamp(&timestamp)]).unwrap();
        submit(&other, &[Op::Wait(p), Op::Graph(&exec)]).unwrap();
        finish(&other).unwrap();
    };
    for _ in 0..200 {
        round();
    }
    let before = allocations();
    for _ in 0..200 {
        round();
    }
    assert_eq!(allocations() - before, 0, "allocations in 200 rounds");
}

#[test]
fn every_thread_has_the_same_floating_point_state() {
    /// Multiplies two numbers per tile. Their product is subnormal.
    ///
    /// # Safety
    /// - Binding 0 holds one `f32` for each tile.
    unsafe fn tiny(args: &leasehold_hal::CpuArgs<'_>) {
        let product = std::hint::black_box(1e-30f32) * std::hint::black_box(1e-12f32);
        // SAFETY: binding 0 holds one `f32` for each tile (the contract of this function).
        unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize, 1) }.fill(product);
        thread::sleep(Duration::from_micros(200));
    }
    let rig = rig(3);
    let tiny = rig.kernel("tiny", tiny, &[Access::Write], 0);
    let out = vec![1f32; 64];
    let b = [on(&out, Access::Write)];
    submit(&rig.stream, &[launch(&tiny, 64, &b, &[])]).unwrap();
    finish(&rig.stream).unwrap();
    // SAFETY: the work is over. The read is volatile, because the compiler does not know that the
    // kernel wrote.
    let now: Vec<u32> =
        out.iter().map(|x| unsafe { std::ptr::read_volatile(x) }.to_bits()).collect();
    assert!(now.iter().all(|&bits| bits == now[0]), "{now:x?}");
    if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        assert_eq!(now[0], 0, "subnormal results are zero");
    }
    // The backend does not change the state of the application's own threads and calls. Work after
    // such a call runs as before.
    let subnormal = || std::hint::black_box(1e-30f32) * std::hint::black_box(1e-12f32);
    assert_ne!(subnormal(), 0.0);
    let (tell, hear) = std::sync::mpsc::channel();
    let call = HostCall::new("subnormal", move || {
        tell.send(subnormal()).map_err(|e| Error::state(e.to_string()))
    });
    submit(&rig.stream, &[Op::Host(&call), launch(&tiny, 64, &b, &[])]).unwrap();
    finish(&rig.stream).unwrap();
    assert_ne!(hear.try_recv().expect("the call ran"), 0.0);
    // SAFETY: the work is over. The read is volatile, because the compiler does not know that the
    // kernel wrote.
    assert!(out.iter().all(|x| unsafe { std::ptr::read_volatile(x) }.to_bits() == now[0]));
}

/// A stream whose work outlived its holder serves again, and its next holder hears of failures.
#[test]
fn a_stream_that_serves_again_has_a_holder_who_hears_of_its_failure() {
    let rig = rig(1);
    let stream = rig.another();
    let timeline = stream.timeline();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let held_up = HostCall::new("held up", move || {
        wait.lock().recv().map_err(|_| Error::state("the test ended"))
    });
    let point = submit(&stream, &[Op::Host(&held_up)]).unwrap();
    drop(stream);
    go.send(()).unwrap();
    timeline.wait(point.value(), None).unwrap();
    let again = rig.another();
    assert_eq!(again.timeline().id(), timeline.id(), "the retired stream serves again");
    let fails = HostCall::new("fails", || Err(Error::state("of the test")));
    submit(&again, &[Op::Host(&fails)]).unwrap();
    assert!(rig.device.synchronize(None).unwrap_err().to_string().contains("of the test"));
}
