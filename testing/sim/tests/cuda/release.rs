//! The end of devices and contexts: no drop blocks, nothing ends early, and nothing leaks.

use crate::common::*;
use leasehold_core::{Error, HostTimelineOwner, Lease, Result};
use leasehold_cuda::{CompletionSource, CudaConfig};
use leasehold_hal::{Backend, Device, DeviceId, HostTimeline, Op, Stream};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};
use std::time::{Duration, Instant};

/// A limit far longer than a drop on a busy machine, and far shorter than any wait of these tests.
const AT_ONCE: Duration = Duration::from_secs(2);

fn at_once<R>(what: &str, does: impl FnOnce() -> R) -> R {
    let begun = Instant::now();
    let result = does();
    assert!(begun.elapsed() < AT_ONCE, "{what} blocked for {:?}", begun.elapsed());
    result
}

fn refused(result: Result<()>) -> &'static str {
    match result {
        Err(Error::LeasesOutstanding { resource, .. }) => resource,
        other => panic!("wanted a refusal, got {other:?}"),
    }
}

/// A released device whose only stream was dropped with work behind a host timeline.
fn released(bench: &Bench) -> Lease<dyn HostTimeline> {
    let device = bench.open(0);
    let host_timeline = device.host_timeline().unwrap();
    let a = stream(&device);
    let x = buffer(&device, &a, 4096);
    let value = submit(
        &a,
        &[
            Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1)),
            fill(&x, 1),
        ],
    )
    .unwrap();
    // SAFETY: the timepoint is of the submission to this stream that writes the buffer, made just
    // now.
    unsafe { x.mark_write(a.timeline().at(value)) };
    drop((x, a));
    let devices = bench.backend.manager().devices();
    devices.release(device.handle()).unwrap();
    let handle = device.handle();
    at_once("the drop of the last lease of a device", || drop(device));
    assert!(!devices.is_alive(handle));
    host_timeline
}

fn signal(host_timeline: &Lease<dyn HostTimeline>) {
    host_timeline.signal_host(host_timeline.timeline().submitted() + 1).unwrap();
}

/// Without a call to the backend, the device ends on a thread of the backend.
fn ends_by_itself(bench: &Bench) {
    let begun = Instant::now();
    while !bench.driver.census().is_nothing() {
        assert!(begun.elapsed() < Duration::from_secs(20), "left: {:?}", bench.driver.census());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_last_lease_of_a_device_never_waits_for_a_host_timeline() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(60), config.clone());
        let host_timeline = released(&bench);
        assert_eq!(bench.driver.census().streams, 1, "its work is still to come");
        assert_eq!(at_once("a shutdown", || refused(bench.backend.shutdown())), "stream");
        // A device that is opened again meanwhile has a new state.
        let again = bench.open(0);
        let b = stream(&again);
        let y = buffer(&again, &b, 4096);
        submit(&b, &[fill(&y, 7)]).unwrap();
        assert_eq!(read(&b, &y), [7; 4096]);
        drop((y, b, again));
        signal(&host_timeline);
        drop(host_timeline);
        bench.close();
    }
}

#[test]
fn a_released_device_ends_in_the_background_once_the_host_timeline_is_signalled() {
    let bench = Bench::with(driver_config(61), CudaConfig::default());
    let host_timeline = released(&bench);
    signal(&host_timeline);
    drop(host_timeline);
    ends_by_itself(&bench);
    bench.close();
}

#[test]
fn a_backend_that_is_dropped_while_a_host_timeline_is_down_waits_for_nothing() {
    let bench = Bench::with(driver_config(62), CudaConfig::default());
    let host_timeline = released(&bench);
    let Bench { driver, backend, .. } = bench;
    at_once("the drop of the backend", || drop(backend));
    assert!(!driver.census().is_nothing(), "the work behind the host timeline is still to come");
    signal(&host_timeline);
    drop(host_timeline);
    let begun = Instant::now();
    while !driver.census().is_nothing() {
        assert!(begun.elapsed() < Duration::from_secs(20), "left: {:?}", driver.census());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(driver.machine().take_reports(), []);
}

#[test]
fn without_threads_a_dropped_backend_fails_what_a_host_timeline_holds_back() {
    let bench = Bench::with(driver_config(63), inline());
    let host_timeline = released(&bench);
    let Bench { driver, backend, .. } = bench;
    at_once("the drop of the backend", || drop(backend));
    assert!(driver.census().is_nothing(), "{:?}", driver.census());
    signal(&host_timeline);
}

#[test]
fn a_stream_that_ends_while_the_driver_says_nothing_gives_up_nothing() {
    // It leaks on purpose, which a sanitizer takes for a mistake.
    if std::env::var_os("LEASEHOLD_SANITIZED").is_some() {
        return;
    }
    let bench = Bench::with(driver_config(65), inline());
    let device = bench.open(0);
    let host_timeline = device.host_timeline().unwrap();
    let a = stream(&device);
    let x = buffer(&device, &a, 4096);
    let bytes = Host::new(vec![1; 4096]);
    let value = submit(
        &a,
        &[
            bytes.up(&x),
            Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1)),
        ],
    )
    .unwrap();
    // SAFETY: the timepoint is of the submission to this stream that writes the buffer, made just
    // now.
    unsafe { x.mark_write(a.timeline().at(value)) };
    let (kept, timeline) = (std::sync::Arc::downgrade(&bytes.keep), a.timeline());
    drop((bytes, x, a, device));
    let failing = FaultRule::on("cuStreamSynchronize", When::Always, FaultAction::Fail(999));
    bench.driver.machine().set_faults(FaultPlan::none().with(failing));
    drop(bench);
    assert!(kept.upgrade().is_some(), "the upload may still run");
    assert!(
        timeline.check(value).is_err() && timeline.completed() < value,
        "failed, and never over"
    );
    drop(host_timeline);
}

#[test]
fn a_host_timeline_that_nobody_signals_hangs_nothing() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(64), config);
        let host_timeline = released(&bench);
        assert_eq!(at_once("a shutdown", || refused(bench.backend.shutdown())), "stream");
        // The end of the host timeline fails its waiters.
        at_once("the drop of the host timeline", || drop(host_timeline));
        bench.close();
    }
}

#[test]
fn what_outlives_its_device_keeps_it_and_its_drop_does_not_end_it() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(65), config.clone());
        let device = bench.open(0);
        let a = stream(&device);
        let x = buffer(&device, &a, 4096);
        bench.backend.manager().devices().release(device.handle()).unwrap();
        drop(device);
        submit(&a, &[fill(&x, 9)]).unwrap();
        assert_eq!(read(&a, &x), [9; 4096]);
        assert_eq!(refused(bench.backend.shutdown()), "stream");
        let calls = bench.driver.machine().calls();
        drop(a);
        assert_eq!(refused(bench.backend.shutdown()), "buffer");
        let _ = calls;
        drop(x);
        if config == CudaConfig::default() {
            ends_by_itself(&bench);
        }
        bench.close();
    }
}

#[test]
fn a_stream_of_an_owned_context_that_nobody_leases_refuses_the_shutdown() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(66), config);
        let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
        let own = device.contexts().create_owned().unwrap();
        let held = own.streams().acquire(0).unwrap();
        drop((own, device));
        assert_eq!(refused(bench.backend.manager().shutdown()), "stream");
        assert_eq!(bench.driver.census().streams, 1);
        // Nothing has changed: the stream works as before.
        let held = Lease::map(held, |s| s as &dyn Stream);
        let call = leasehold_hal::HostCall::new("nothing", || Ok(()));
        let value = submit(&held, &[Op::Host(&call)]).unwrap();
        wait(&held, value).unwrap();
        drop(held);
        bench.close();
    }
}

#[test]
fn a_line_of_somebody_else_is_not_waited_for_either() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(67), config);
        let device: Lease<dyn Device> = bench.open(0);
        let elsewhere = HostTimelineOwner::take().unwrap();
        let a = stream(&device);
        let next = elsewhere.timeline().submitted() + 1;
        submit(&a, &[Op::Wait(elsewhere.timeline().at(next))]).unwrap();
        drop((a, device));
        assert_eq!(at_once("a shutdown", || refused(bench.backend.shutdown())), "stream");
        elsewhere.signal(next).unwrap();
        // The shutdown finishes the work that can finish.
        bench.close();
    }
}

#[test]
fn a_shutdown_finishes_what_needs_nobody() {
    for config in [inline(), CudaConfig::default()] {
        let bench = Bench::with(driver_config(68), config);
        let device = bench.open(0);
        let a = stream(&device);
        let x = buffer(&device, &a, 1 << 20);
        let ran =
            leasehold_core::sync::Arc::new(leasehold_core::sync::atomic::AtomicBool::new(false));
        let set = ran.clone();
        let call = leasehold_hal::HostCall::new("slow", move || {
            std::thread::sleep(Duration::from_millis(50));
            set.store(true, leasehold_core::sync::atomic::Ordering::Release);
            Ok(())
        });
        let value = submit(&a, &[fill(&x, 1), Op::Host(&call), fill(&x, 2)]).unwrap();
        // SAFETY: the timepoint is of the submission to this stream that writes the buffer, made
        // just now.
        unsafe { x.mark_write(a.timeline().at(value)) };
        drop((x, a, device));
        bench.close();
        assert!(ran.load(leasehold_core::sync::atomic::Ordering::Acquire));
    }
}

/// Without words a stream keeps the events that signal its values. Another stream's end may settle
/// the values first.
#[test]
fn signals_that_nobody_asks_for_any_more_do_not_keep_a_context() {
    let config = inline().completion(CompletionSource::Events);
    let bench = Bench::with(driver_config(3), config);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &b, 64));
    let first = submit(&a, &[fill(&x, 1)]).unwrap();
    a.flush().unwrap();
    let second = submit(&b, &[Op::Wait(a.timeline().at(first)), fill(&y, 2)]).unwrap();
    wait(&b, second).unwrap();
    assert!(a.timeline().is_idle(), "what it waited for is over");
    drop((x, y, a, b, device));
    bench.close();
}
