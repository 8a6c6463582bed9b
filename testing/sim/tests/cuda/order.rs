//! Order: deferred work, the host's part of completion, and the meaning of values.

use crate::common::*;
use leasehold_alloc::{Layout, On};
use leasehold_conformance::TestKernel;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{BufferHandle, Error, Lease, TimelineOwner, Timepoint};
use leasehold_cuda::{CompletionSource, CudaConfig};
use leasehold_hal::{
    Access, Copy2d, Device, HostCall, KeepAlive, KernelCheck, KernelDesc, KernelSource, MemoryKind,
    NodePatch, Op, OpList, Pipeline, Plan, Upload,
};
use leasehold_sim::{KernelBody, KernelSpec, Stepping};
use std::time::Duration;

#[test]
fn nothing_behind_a_host_timeline_reaches_the_driver_and_then_all_of_it_in_order() {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &a, 64));
    let host_timeline = device.host_timeline().unwrap();
    let next = host_timeline.timeline().submitted() + 1;
    submit(&a, &[Op::Wait(host_timeline.timeline().at(next)), fill(&x, 1)]).unwrap();
    for i in 2..12 {
        submit(&a, &[copy(&x, &y), fill(&x, i)]).unwrap();
    }
    let last = a.timeline().now();
    // A stream that waits for deferred work of another stream defers its own work too.
    let waiting = submit(&b, &[Op::Wait(last), fill(&y, 99)]).unwrap();
    a.flush().unwrap();
    b.flush().unwrap();
    assert_eq!((bench.calls("cuMemsetD8Async"), bench.calls("cuMemcpyDtoDAsync")), (0, 0));
    assert_eq!(a.refresh().unwrap(), last.value() - 11);
    host_timeline.signal_host(next).unwrap();
    assert_eq!(
        (bench.calls("cuMemsetD8Async"), bench.calls("cuMemcpyDtoDAsync")),
        (12, 10),
        "signalling goes on at once"
    );
    wait(&b, waiting).unwrap();
    assert!(last.is_settled(), "who sees the waiter's end sees that of what it waited for");
    assert_eq!(read(&a, &x), [11; 64]);
    assert_eq!(read(&a, &y), [99; 64]);
    drop((x, y, a, b, host_timeline, device));
    bench.close();
}

/// Records, when it is dropped, whether a timepoint was settled.
struct Observer(Timepoint, Arc<Mutex<Option<bool>>>);

impl Drop for Observer {
    fn drop(&mut self) {
        *self.1.lock() = Some(self.0.is_settled());
    }
}

#[test]
fn streams_that_wait_for_each_other_in_turn_publish_each_what_the_other_relies_on() {
    let bench = Bench::new(3);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &b, 64));
    let first = submit(&a, &[fill(&x, 1)]).unwrap();
    let first = a.timeline().at(first);
    let settled = Arc::new(Mutex::new(None));
    let host = Host::new(vec![7; 64]);
    let keep: KeepAlive = Arc::new((Observer(first, settled.clone()), host.keep.clone()));
    let Op::Upload(upload) = host.up(&y) else { panic!("not an upload") };
    let second =
        submit(&b, &[Op::Wait(first), Op::Upload(Upload { keep: Some(&keep), ..upload })]).unwrap();
    drop(keep);
    let third = submit(&a, &[Op::Wait(b.timeline().at(second)), copy(&y, &x)]).unwrap();
    // The first stream's end publishes the second's value, which relies on the first stream's
    // earlier work.
    wait(&a, third).unwrap();
    assert_eq!(*settled.lock(), Some(true));
    assert_eq!(read(&a, &x), [7; 64]);
    drop((x, y, a, b, device));
    bench.close();
}

#[test]
fn a_submission_goes_to_the_driver_up_to_the_host_timeline_in_its_middle() {
    let bench = Bench::new(2);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 64);
    let host_timeline = device.host_timeline().unwrap();
    let next = host_timeline.timeline().submitted() + 1;
    // A host call at the front signals the host timeline behind it.
    let host_timeline = Arc::new(host_timeline);
    let (signal, at) = (host_timeline.clone(), host_timeline.timeline().at(next));
    let call = HostCall::new("raises", move || signal.signal_host(next));
    let value = submit(&a, &[fill(&x, 1), Op::Host(&call), Op::Wait(at), fill(&x, 2)]).unwrap();
    assert_eq!(bench.calls("cuMemsetD8Async"), 1);
    wait(&a, value).unwrap();
    assert_eq!(read(&a, &x), [2; 64]);
    drop((call, x, a, host_timeline, device));
    bench.close();
}

#[test]
fn what_waits_for_a_failed_host_timeline_never_reaches_the_driver() {
    let bench = Bench::new(3);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let x = buffer(&device, &a, 64);
    let host_timeline = device.host_timeline().unwrap();
    let at = host_timeline.timeline().at(host_timeline.timeline().submitted() + 1);
    let first = submit(&a, &[Op::Wait(at), fill(&x, 1)]).unwrap();
    let second = submit(&b, &[Op::Wait(a.timeline().at(first)), fill(&x, 2)]).unwrap();
    host_timeline.fail(Error::state("the cause"));
    for (s, v) in [(&a, first), (&b, second)] {
        let e = wait(s, v).unwrap_err();
        assert!(matches!(e, Error::InvalidState(_)) && e.to_string().contains("the cause"), "{e}");
        assert!(s.timeline().is_idle(), "nobody hangs");
        assert_eq!(submit(s, &[]).unwrap_err().to_string(), e.to_string());
    }
    assert_eq!(bench.calls("cuMemsetD8Async"), 0);
    drop((x, a, b, host_timeline, device));
    bench.close();
}

#[test]
fn a_dropped_host_timeline_fails_who_waits_for_it() {
    let bench = Bench::new(4);
    let device = bench.open(0);
    let a = stream(&device);
    let host_timeline = device.host_timeline().unwrap();
    let value = submit(
        &a,
        &[Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1))],
    )
    .unwrap();
    drop(host_timeline);
    assert!(wait(&a, value).unwrap_err().to_string().contains("dropped"));
    drop((a, device));
    bench.close();
}

#[test]
fn a_host_call_sees_what_landed_before_it_also_in_its_own_submission() {
    let bench = Bench::new(5);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 4096);
    let host = Arc::new(Host::new(vec![0; 4096]));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (look, tell) = (host.clone(), seen.clone());
    let call = HostCall::new("looks", move || {
        tell.lock().push(look.bytes());
        Ok(())
    });
    let v = submit(
        &a,
        &[fill(&x, 3), host.down(&x), Op::Host(&call), fill(&x, 4), host.down(&x), Op::Host(&call)],
    )
    .unwrap();
    wait(&a, v).unwrap();
    assert_eq!(*seen.lock(), [vec![3; 4096], vec![4; 4096]]);
    // The same operations as a graph, which is split at the host calls.
    let mut ops = OpList::new();
    for op in
        [fill(&x, 5), host.down(&x), Op::Host(&call), fill(&x, 6), host.down(&x), Op::Host(&call)]
    {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    seen.lock().clear();
    for _ in 0..3 {
        submit(&a, &[Op::Graph(&graph)]).unwrap();
    }
    wait(&a, a.timeline().submitted()).unwrap();
    assert_eq!(*seen.lock(), [5u8, 6, 5, 6, 5, 6].map(|b| vec![b; 4096]));
    drop((graph, call, x, a, device));
    bench.close();
}

#[test]
fn a_failed_host_call_names_itself_and_ends_its_stream_alone() {
    let bench = Bench::new(6);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let x = buffer(&device, &b, 64);
    let call = HostCall::new("breaks", || Err(Error::state("its own reason")));
    let value = submit(&a, &[Op::Host(&call), fill(&x, 1)]).unwrap();
    let e = wait(&a, value).unwrap_err().to_string();
    for part in [
        "host call breaks",
        "its own reason",
        &format!("submission {value}"),
        &format!("{:?}", a.timeline().id()),
    ] {
        assert!(e.contains(part), "{part} is not in: {e}");
    }
    assert!(a.timeline().is_idle());
    assert_eq!(bench.calls("cuMemsetD8Async"), 0);
    let v = submit(&b, &[fill(&x, 2)]).unwrap();
    wait(&b, v).unwrap();
    let panics = HostCall::new("panics", || panic!("on purpose"));
    let c = stream(&device);
    let v = submit(&c, &[Op::Host(&panics)]).unwrap();
    assert!(wait(&c, v).unwrap_err().to_string().contains("on purpose"));
    drop((call, panics, x, a, b, c, device));
    bench.close();
}

#[test]
fn a_host_call_that_waits_for_its_own_stream_is_told() {
    let bench = Bench::new(7);
    let device = bench.open(0);
    let a = stream(&device);
    let own = a.clone();
    let call = HostCall::new("waits", move || own.wait_host(own.timeline().submitted(), None));
    let v = submit(&a, &[Op::Host(&call)]).unwrap();
    assert!(wait(&a, v).unwrap_err().to_string().contains("the stream that it runs on"));
    drop((call, a, device));
    bench.close();
}

#[test]
fn what_is_kept_lives_to_completion_and_no_longer() {
    let bench = Bench::new(8);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 100_000);
    let host_timeline = device.host_timeline().unwrap();
    let next = host_timeline.timeline().submitted() + 1;
    let (source, target) =
        (Host::new((0..100_000u32).map(|i| i as u8).collect()), Host::new(vec![0; 100_000]));
    submit(&a, &[Op::Wait(host_timeline.timeline().at(next)), source.up(&x), target.down(&x)])
        .unwrap();
    let (weak_up, weak_down) = (Arc::downgrade(&source.keep), Arc::downgrade(&target.keep));
    let expected = source.bytes();
    drop(source);
    assert!(weak_up.upgrade().is_some(), "held back, and kept");
    host_timeline.signal_host(next).unwrap();
    assert_eq!(target.bytes(), [0; 100_000], "nothing has run yet");
    let value = a.timeline().submitted();
    assert!(weak_up.upgrade().is_some(), "under way, and kept");
    wait(&a, value).unwrap();
    assert_eq!(target.bytes(), expected);
    assert!(
        weak_up.upgrade().is_none() && Arc::strong_count(&target.keep) == 1,
        "over, and given up"
    );
    drop(target);
    assert!(weak_down.upgrade().is_none());
    drop((x, a, host_timeline, device));
    bench.close();
}

/// Work before a host call may be over while work after it in the same submission is not.
#[test]
fn what_a_graph_uses_after_a_host_call_lives_until_that_is_over_too() {
    let mut driver = driver_config(14);
    driver.machine = driver.machine.stepping(Stepping::Manual);
    let bench = Bench::with(driver, inline());
    // SAFETY: the machine runs the backend's work. The test reads one word of its memory while
    // nothing runs.
    let machine = unsafe { bench.driver.machine().drive() };
    let run = || machine.run_until_idle();
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &a, 64));
    let first = a.timeline().at(submit(&a, &[fill(&x, 1)]).unwrap());
    let waited = submit(&b, &[Op::Wait(first), fill(&y, 2)]).unwrap();
    let (before, after) = (Host::new(vec![3; 64]), Host::new(vec![4; 64]));
    let call = HostCall::new("passes", || Ok(()));
    let mut ops = OpList::new();
    for op in [before.up(&x), Op::Host(&call), after.up(&x)] {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    let value = submit(&a, &[Op::Graph(&graph)]).unwrap();
    let kept = Arc::downgrade(&after.keep);
    drop((graph, before, after));
    b.flush().unwrap();
    // The device reaches the host call, which runs. Then the driver gets the rest.
    run();
    a.refresh().unwrap();
    a.refresh().unwrap();
    // The other stream is over, and so is the work that it waited for.
    let other = b.refresh().unwrap();
    let half = (a.timeline().is_settled(value), kept.upgrade().is_some());
    a.flush().unwrap();
    run();
    let whole = (a.refresh().unwrap(), kept.upgrade().is_some());
    let mut bytes = [0; 64];
    machine.peek(x.addr(), &mut bytes).unwrap();
    // The end waits for the device, which advances without calls from now on.
    let over = Arc::new(AtomicU32::new(0));
    let until = over.clone();
    let steps = std::thread::spawn(move || {
        while until.load(Ordering::Relaxed) == 0 {
            machine.step();
            std::thread::yield_now();
        }
    });
    drop((call, x, y, a, b, device));
    bench.close();
    over.store(1, Ordering::Relaxed);
    steps.join().unwrap();
    assert_eq!(other, waited);
    assert_eq!(
        half,
        (false, true),
        "the second half has not run, and its bytes are still to be read"
    );
    assert_eq!(whole, (value, false), "over, and given up");
    assert_eq!(bytes, [4; 64]);
}

#[test]
fn a_keep_whose_destructor_panics_or_submits_harms_nobody() {
    struct Bomb(Arc<AtomicU32>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("on purpose");
        }
    }
    let bench = Bench::new(9);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 64);
    let ended = Arc::new(AtomicU32::new(0));
    let bytes = Host::new(vec![7; 64]);
    let keep: KeepAlive = Arc::new(Bomb(ended.clone()));
    let Op::Upload(mut upload) = bytes.up(&x) else { unreachable!("an upload") };
    upload.keep = Some(&keep);
    let v = submit(&a, &[Op::Upload(upload)]).unwrap();
    drop(keep);
    wait(&a, v).unwrap();
    assert_eq!(ended.load(Ordering::Relaxed), 1);
    assert_eq!(read(&a, &x), [7; 64]);
    drop((x, a, device));
    bench.close();
}

#[test]
fn a_module_is_unloaded_after_the_last_launch_of_its_dropped_kernel() {
    // Without threads, and without a call that waits, nothing runs.
    let bench = Bench::with(driver_config(15), inline());
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 256);
    let make = |n: u32| {
        let mut desc = TestKernel::Fill.for_cuda();
        desc.name = format!("fill {n}").into();
        // Code of its own, and so a module of its own.
        desc.source = KernelSource::Ptx(format!("{}\n// {n}", TestKernel::PTX).into());
        device.pipeline(&desc).unwrap()
    };
    let modules = || (bench.driver.census().modules, bench.calls("cuModuleUnload"));
    let kernel = make(0);
    let bindings = [bind(&x, Access::Write)];
    submit(&a, &[dispatch(&kernel, &bindings, &7u32.to_le_bytes())]).unwrap();
    let calls = bench.driver.machine().calls();
    drop(kernel);
    assert_eq!(bench.driver.machine().calls(), calls, "the drop of a kernel calls no driver");
    let other = make(1);
    assert_eq!(modules(), (2, 0), "the launch of the first kernel is pending");
    drop(other);
    assert_eq!(read(&a, &x), 7u32.to_le_bytes().repeat(64));
    let third = make(2);
    assert_eq!(modules(), (1, 2));
    drop(third);
    device.synchronize(None).unwrap();
    assert_eq!(modules(), (0, 3));
    drop((x, a, device));
    bench.close();
}

#[test]
fn a_launch_on_a_single_stream_is_one_call_and_a_signal_now_and_then() {
    let bench = Bench::new(10);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 256);
    let kernel = device.pipeline(&TestKernel::Fill.for_cuda()).unwrap();
    device.make_current().unwrap();
    let bindings = [bind(&x, Access::Write)];
    let names = [
        "cuLaunchKernel",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuStreamWriteValue64",
        "cuEventRecord",
    ];
    let before = names.map(|n| bench.calls(n));
    let all = bench.driver.machine().calls();
    for i in 0..640u32 {
        submit(&a, &[dispatch(&kernel, &bindings, &i.to_le_bytes())]).unwrap();
    }
    let made: Vec<_> = names.iter().zip(before).map(|(n, was)| bench.calls(n) - was).collect();
    assert_eq!(made, [640, 650, 0, 10, 0], "{names:?}");
    assert_eq!(bench.driver.machine().calls() - all, 640 + 650 + 10, "and nothing else");
    assert!(a.timeline().check(a.timeline().submitted() - 640).unwrap());
    drop((kernel, x, a, device));
    bench.close();
}

#[test]
fn a_cross_stream_edge_is_one_record_and_one_wait_and_marks_are_reused() {
    let bench = Bench::new(11);
    let device = bench.open(0);
    let (a, b, c) = (stream(&device), stream(&device), stream(&device));
    let x = buffer(&device, &a, 256);
    let point = a.timeline().at(submit(&a, &[fill(&x, 1)]).unwrap());
    let calls = || (bench.calls("cuEventRecord"), bench.calls("cuStreamWaitEvent"));
    submit(&b, &[Op::Wait(point)]).unwrap();
    submit(&c, &[Op::Wait(point)]).unwrap();
    assert_eq!(calls(), (1, 2), "one mark serves both");
    submit(&b, &[Op::Wait(point)]).unwrap();
    assert_eq!(calls().0, 1);
    let later = a.timeline().at(submit(&a, &[fill(&x, 2)]).unwrap());
    submit(&b, &[Op::Wait(later)]).unwrap();
    assert_eq!(calls().0, 2, "a later value needs a later mark");
    wait(&b, b.timeline().submitted()).unwrap();
    wait(&c, c.timeline().submitted()).unwrap();
    submit(&b, &[Op::Wait(later)]).unwrap();
    assert_eq!(calls().0, 2, "what is over is waited for by nobody");
    drop((x, a, b, c, device));
    bench.close();
}

#[test]
fn completion_by_events_is_the_same() {
    let bench = Bench::with(
        driver_config(12),
        CudaConfig::default().inline(true).completion(CompletionSource::Events),
    );
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 256);
    let mut values = Vec::new();
    for i in 0..200u32 {
        values.push(submit(&a, &[fill(&x, i % 251)]).unwrap());
    }
    wait(&a, values[70]).unwrap();
    wait(&a, values[199]).unwrap();
    assert_eq!(bench.calls("cuStreamWriteValue64"), 0);
    assert_eq!(read(&a, &x), [199; 256]);
    drop((x, a, device));
    bench.close();
}

#[test]
fn timeouts_are_kept_and_a_poll_does_not_block() {
    let bench = Bench::new(13);
    let device = bench.open(0);
    let a = stream(&device);
    let host_timeline = device.host_timeline().unwrap();
    let v = submit(
        &a,
        &[Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1))],
    )
    .unwrap();
    for timeout in [Duration::ZERO, Duration::from_millis(5)] {
        assert!(matches!(a.wait_host(v, Some(timeout)), Err(Error::Timeout(_))));
        assert!(matches!(device.synchronize(Some(timeout)), Err(Error::Timeout(_))));
        // A thread that sleeps on the timeline queries the stream.
        assert!(matches!(a.timeline().wait(v, Some(timeout)), Err(Error::Timeout(_))));
    }
    host_timeline.signal_host(host_timeline.timeline().submitted() + 1).unwrap();
    a.timeline().wait(v, None).unwrap();
    device.synchronize(None).unwrap();
    drop((a, host_timeline, device));
    bench.close();
}

#[test]
fn a_line_of_another_backend_is_waited_for_and_its_failure_is_passed_on() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(14), config);
        let device = bench.open(0);
        let (a, b) = (stream(&device), stream(&device));
        let x = buffer(&device, &a, 64);
        let foreign = TimelineOwner::take().unwrap();
        let first = foreign.advance().unwrap();
        let v = submit(&a, &[Op::Wait(foreign.timeline().at(first)), fill(&x, 5)]).unwrap();
        assert!(matches!(a.wait_host(v, Some(Duration::from_millis(5))), Err(Error::Timeout(_))));
        assert_eq!(bench.calls("cuMemsetD8Async"), 0);
        foreign.complete(first);
        // No thread calls the stream: a thread that sleeps on its timeline is enough.
        a.timeline().wait(v, Some(Duration::from_secs(20))).unwrap();
        assert_eq!(read(&a, &x), [5; 64]);
        let second = foreign.advance().unwrap();
        let v = submit(&b, &[Op::Wait(foreign.timeline().at(second)), fill(&x, 6)]).unwrap();
        foreign.poison(second, Error::state("theirs"));
        foreign.complete(second);
        assert!(
            b.timeline()
                .wait(v, Some(Duration::from_secs(20)))
                .unwrap_err()
                .to_string()
                .contains("theirs")
        );
        assert_eq!(bench.calls("cuMemsetD8Async"), 1);
        drop((x, a, b, device, foreign));
        bench.close();
    }
}

#[test]
fn threads_submit_wait_and_signal_at_once() {
    let bench = Bench::with(driver_config(15), CudaConfig::default());
    let device = bench.open(0);
    let streams: Vec<_> = (0..4).map(|_| stream(&device)).collect();
    let host_timeline = device.host_timeline().unwrap();
    let base = host_timeline.timeline().submitted();
    std::thread::scope(|scope| {
        for (i, mine) in streams.iter().enumerate() {
            let (next, host_timeline) = (&streams[(i + 1) % 4], &host_timeline);
            let device = &device;
            scope.spawn(move || {
                let x = buffer(device, mine, 1024);
                let call = HostCall::new("nothing", || Ok(()));
                for round in 1..60u32 {
                    let held = Op::Wait(host_timeline.timeline().at(base + u64::from(round)));
                    let other = Op::Wait(next.timeline().now());
                    let v = submit(mine, &[held, other, fill(&x, round), Op::Host(&call)]).unwrap();
                    if round % 8 == 0 {
                        wait(mine, v).unwrap();
                        assert_eq!(read(mine, &x), [round as u8; 1024]);
                    }
                }
                wait(mine, mine.timeline().submitted()).unwrap();
            });
        }
        scope.spawn(|| {
            for round in 1..60 {
                host_timeline.signal_host(base + round).unwrap();
                std::thread::sleep(Duration::from_micros(300));
            }
        });
    });
    drop((streams, host_timeline, device));
    bench.close();
}

#[test]
fn rows_that_overlap_what_they_are_read_from_are_copied_one_by_one() {
    let bench = Bench::new(16);
    let device = bench.open(0);
    let a = stream(&device);
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &a, 64));
    let bytes = Host::new((0..64).collect());
    submit(&a, &[bytes.up(&x)]).unwrap();
    let at =
        |width, rows, src_pitch| Copy2d { width, rows, src_pitch, dst_pitch: 8, ..copy_of(&x, &y) };
    for (copy, expected) in [
        // The pitch of a single row has no meaning.
        (at(12, 1, 3), (0..12).collect::<Vec<u8>>()),
        (at(8, 3, 4), (0..8).chain(4..12).chain(8..16).collect()),
    ] {
        let mut ops = OpList::new();
        ops.push(&Op::Copy(copy));
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
        for op in [Op::Copy(copy), Op::Graph(&graph)] {
            submit(&a, &[fill(&y, 0xee), op]).unwrap();
            let seen = read(&a, &y);
            assert_eq!(seen[..expected.len()], expected);
            assert!(seen[expected.len()..].iter().all(|&b| b == 0xee));
        }
    }
    drop((x, y, a, device));
    bench.close();
}

fn copy_of(
    from: &leasehold_core::Lease<leasehold_alloc::Buffer>,
    to: &leasehold_core::Lease<leasehold_alloc::Buffer>,
) -> Copy2d {
    Copy2d::linear((from.addr(), 0), (to.addr(), 0), 0)
}

#[test]
fn only_a_kernel_that_waits_itself_begins_while_the_one_kernel_before_it_runs() {
    let bench = Bench::new(8);
    let device = bench.open(0);
    let a = stream(&device);
    let [x, y, z] = [0; 3].map(|_| buffer(&device, &a, 64));
    let plain = device.pipeline(&TestKernel::Add.for_cuda()).unwrap();
    let desc = TestKernel::Add.for_cuda().dependent_launch();
    let waits = device.pipeline(&KernelDesc { name: "add that waits".into(), ..desc }).unwrap();
    // `to += from`.
    let add = |from: &_, to: &_| {
        [bind(from, Access::Read), bind(to, Access::Read), bind(to, Access::Write)]
    };
    let (first, second, apart) = (add(&x, &y), add(&y, &z), add(&z, &z));
    let (p, w) = (&plain, &waits);
    for (what, kernels, edges) in [
        ("a chain", vec![(w, &first), (w, &second), (w, &second)], 2),
        ("a kernel that does not wait", vec![(w, &first), (p, &second), (w, &second)], 0),
        ("behind one that does not wait", vec![(p, &first), (w, &second), (w, &second)], 1),
        ("no kernel in front", vec![(w, &first), (w, &apart)], 0),
    ] {
        let mut ops = OpList::new();
        for (kernel, bindings) in &kernels {
            ops.push(&dispatch(kernel, *bindings, &[]));
        }
        let before = bench.calls("cuGraphAddDependencies");
        // SAFETY: the plan's pipelines are this device's, and its memory outlives the launches.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
        assert_eq!(bench.calls("cuGraphAddDependencies") - before, edges, "{what}");
        submit(&a, &[fill(&x, 1), fill(&y, 2), fill(&z, 3), Op::Graph(&graph)]).unwrap();
        let more = kernels.len() as u8 - 1;
        assert_eq!(read(&a, &y)[0], 3, "{what}");
        if kernels.len() == 3 {
            assert_eq!(read(&a, &z)[0], 3 + 3 * more, "{what}");
        }
    }
    // A fill in front of a kernel is no kernel.
    let mut ops = OpList::new();
    ops.push(&fill(&x, 5));
    ops.push(&dispatch(&waits, &first, &[]));
    let before = bench.calls("cuGraphAddDependencies");
    // SAFETY: as above.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    assert_eq!(bench.calls("cuGraphAddDependencies"), before);
    submit(&a, &[fill(&y, 2), Op::Graph(&graph)]).unwrap();
    assert_eq!(read(&a, &y)[0], 7);
    drop((graph, plain, waits, x, y, z, a, device));
    bench.close();
}

/// A kernel that copies its first binding to its second and can read it early, and another one that
/// cannot. Both wait themselves.
fn copies(bench: &Bench, device: &Lease<dyn Device>) -> [Lease<Pipeline>; 2] {
    const PTX: &str = ".version 9.0 .target sm_75 .entry early() { ret; } .entry late() { ret; }";
    let kernels = bench.driver.machine().kernels();
    ["early", "late"].map(|name| {
        let body = KernelBody::run(|launch| {
            let ((from, len), (to, _)) = (launch.pointer::<u8>(0), launch.pointer::<u8>(1));
            // SAFETY: the machine checked the bindings, which have the same length.
            unsafe { std::ptr::copy(from, to, len) };
            Ok(())
        });
        let accesses = [Access::Read, Access::Write];
        let spec = KernelSpec::new(&accesses, 0, body);
        let desc =
            KernelDesc::new(name, KernelSource::Ptx(PTX.into()), &accesses, KernelCheck::any());
        let (spec, desc) = match name {
            "early" => (spec.reading_early(), desc.dependent_launch().reading_early(&[0])),
            _ => (spec, desc.dependent_launch()),
        };
        kernels.register(name, spec);
        device.pipeline(&desc).unwrap()
    })
}

#[test]
fn a_kernel_that_reads_early_what_its_graph_writes_is_found() {
    for seed in 0..20 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let a = stream(&device);
        let [early, late] = copies(&bench, &device);
        let [x, y, z, w] = [0; 4].map(|_| buffer(&device, &a, 64));
        let copy = |from: &_, to: &_| [bind(from, Access::Read), bind(to, Access::Write)];
        let (first, second, third) = (copy(&x, &y), copy(&y, &z), copy(&w, &y));
        let mut ops = OpList::new();
        for (kernel, bindings) in [(&late, &first), (&early, &second), (&early, &third)] {
            ops.push(&dispatch(kernel, bindings, &[]));
        }
        let right = Plan::new(ops);
        assert_eq!(right.early, [0, 0, 1], "`y` is written and `w` is not");
        // The same plan, with `y` granted to the second node although the first one writes it.
        let wrong = Plan { early: vec![0, 1, 1], ..right.clone() };
        for (plan, races) in [(right, 0), (wrong, 1)] {
            let before = bench.calls("cuGraphAddDependencies");
            // SAFETY: the plan's pipelines are this device's, and its memory outlives the launches.
            // The wrong grant misleads a function that takes no notice of it.
            let graph = unsafe { device.instantiate(plan) }.unwrap();
            assert_eq!(bench.calls("cuGraphAddDependencies") - before, 2);
            // Memory that was written before the launch may be read early.
            let value = submit(&a, &[fill(&x, 1), fill(&w, 2), Op::Graph(&graph)]).unwrap();
            wait(&a, value).unwrap();
            assert_eq!([read(&a, &z)[0], read(&a, &y)[0]], [1, 2]);
            let reports = bench.reports();
            assert_eq!(reports.len(), races, "{reports:?}");
            let told = "dispatch early";
            assert!(
                reports.iter().all(|r| r.contains(told) && r.contains("does not wait for node 0"))
            );
            let patch = NodePatch { node: 2, bindings: None, params: None, grid: Some([1; 3]) };
            // SAFETY: no launch is in flight, and the same buffers keep the dependencies.
            unsafe { graph.update(&[patch]) }.unwrap();
            let value = submit(&a, &[Op::Graph(&graph)]).unwrap();
            wait(&a, value).unwrap();
            assert_eq!(bench.reports().len(), races, "an update keeps the edges and the grants");
        }
        drop((early, late, x, y, z, w, a, device));
        bench.close();
    }
}

#[test]
fn a_function_takes_the_word_of_its_early_reads() {
    let bench = Bench::new(10);
    let device = bench.open(0);
    let pipelines = copies(&bench, &device);
    let kernel = |name, early: bool| {
        let accesses = [Access::Read, Access::Write];
        let source = KernelSource::Ptx(
            ".version 9.0 .target sm_75 .entry early() { ret; } .entry late() { ret; }".into(),
        );
        let desc =
            KernelDesc::new(format!("another {name}"), source, &accesses, KernelCheck::any());
        let desc = desc.entry(name).dependent_launch();
        device.pipeline(&if early { desc.reading_early(&[0]) } else { desc }).map(drop)
    };
    for (name, early) in [("early", false), ("late", true)] {
        let why = kernel(name, early).unwrap_err().to_string();
        assert!(why.contains("parameter"), "{why}");
    }
    kernel("early", true).and_then(|()| kernel("late", false)).unwrap();
    drop((pipelines, device));
    bench.close();
}

#[test]
fn a_held_download_takes_no_staging_memory_that_later_work_of_its_stream_uses() {
    // A small block comes from the thread's cache, a large one from the heap.
    for bytes in [64, 8 << 20] {
        let bench = Bench::new(7);
        let device = bench.open(0);
        let a = stream(&device);
        let [x, y, z] = [bytes; 3].map(|n| buffer(&device, &a, n));
        submit(&a, &[fill(&x, 1), fill(&z, 3)]).unwrap();
        let host_timeline = device.host_timeline().unwrap();
        let next = host_timeline.timeline().submitted() + 1;
        submit(&a, &[Op::Wait(host_timeline.timeline().at(next))]).unwrap();
        let host = Host::new(vec![0; bytes as usize]);
        submit(&a, &[host.down(&x)]).unwrap();
        // Memory for the host, with work that is held back behind the download.
        let on = On { timeline: a.timeline(), source: &*a };
        let pinned = device.memory(MemoryKind::Pinned).unwrap();
        let block = pinned.alloc(Layout::new(bytes), on).unwrap();
        // SAFETY: nobody has submitted work with the memory yet.
        unsafe { std::ptr::write_bytes(block.addr() as *mut u8, 2, bytes as usize) };
        let last = submit(&a, &[copy(&block, &y), copy(&z, &block)]).unwrap();
        // SAFETY: it was submitted just now, and no other thread submits.
        unsafe { block.mark_write(a.timeline().at(last)) };
        drop(block);
        host_timeline.signal_host(next).unwrap();
        wait(&a, last).unwrap();
        assert!(host.bytes().iter().all(|&b| b == 1), "later work wrote the staging memory");
        assert!(read(&a, &y).iter().all(|&b| b == 2), "the download wrote the later work's memory");
        drop((x, y, z, a, host_timeline, device));
        bench.close();
    }
}

#[test]
fn a_held_download_needs_no_memory_when_it_is_resumed() {
    let bench = Bench::new(9);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 64);
    let host_timeline = device.host_timeline().unwrap();
    let next = host_timeline.timeline().submitted() + 1;
    let (first, second) = (Host::new(vec![0; 64]), Host::new(vec![0; 64]));
    let wait_first = Op::Wait(host_timeline.timeline().at(next));
    submit(&a, &[fill(&x, 5), wait_first, first.down(&x)]).unwrap();
    let last = submit(&a, &[fill(&x, 6), second.down(&x)]).unwrap();
    let pinned = device.memory(MemoryKind::Pinned).unwrap();
    pinned.set_budget(pinned.stats().reserved);
    let mut held = Vec::new();
    for size in [1 << 20, 1 << 14, 64] {
        let on = || On { timeline: a.timeline(), source: &*a };
        held.extend(std::iter::from_fn(|| pinned.alloc(Layout::new(size), on()).ok()));
    }
    host_timeline.signal_host(next).unwrap();
    wait(&a, last).unwrap();
    assert_eq!((first.bytes(), second.bytes()), (vec![5; 64], vec![6; 64]));
    drop((held, x, a, host_timeline, device));
    bench.close();
}

#[test]
fn a_guessed_handle_leads_to_no_memory_of_a_download() {
    let bench = Bench::new(8);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 64);
    submit(&a, &[fill(&x, 1)]).unwrap();
    let pinned = device.memory(MemoryKind::Pinned).unwrap();
    let on = || On { timeline: a.timeline(), source: &*a };
    let probes: Vec<_> = (0..20).map(|_| pinned.alloc(Layout::new(64), on()).unwrap()).collect();
    let bits: Vec<u64> = probes.iter().map(|p| p.handle().to_bits().get()).collect();
    drop(probes);
    pinned.trim(0).unwrap();
    let host = Host::new(vec![0; 64]);
    let value = submit(&a, &[host.down(&x)]).unwrap();
    let next = |b: u64| (1..4u64).filter_map(move |g| BufferHandle::from_bits(b + (g << 32)));
    let found: Vec<_> = bits.into_iter().flat_map(next).map(|h| pinned.lease(h)).collect();
    assert!(found.iter().all(Result::is_err), "the staging memory has another lease");
    let occupied = found.iter().filter(|f| matches!(f, Err(Error::Occupied { .. }))).count();
    assert_eq!(occupied, 1, "the staging memory is there, and alone");
    wait(&a, value).unwrap();
    assert_eq!(host.bytes(), [1; 64]);
    drop((found, x, a, device));
    bench.close();
}
