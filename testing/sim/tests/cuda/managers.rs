//! The managers' interface: they make, end and count their resources, and name them by typed
//! handles.

use crate::common::*;
use leasehold_alloc::{Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_cuda::driver::ops::{CudaSlowOps, EventFlags};
use leasehold_cuda::manager::buffer::BufferManager;
use leasehold_cuda::manager::context::ContextManager;
use leasehold_cuda::manager::device::DeviceManager;
use leasehold_cuda::manager::event::EventManager;
use leasehold_cuda::manager::stream::StreamManager;
use leasehold_hal::{Backend, DeviceId, HostTimeline, MemoryKind, Op, Stream};
use leasehold_sim::cuda::SimDriver;

fn refused(result: Result<()>) -> &'static str {
    match result {
        Err(Error::LeasesOutstanding { resource, .. }) => resource,
        other => panic!("wanted a refusal, got {other:?}"),
    }
}

#[test]
fn buffers_are_allocated_and_freed_by_their_manager() {
    let bench = Bench::new(70);
    let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
    let stream = Lease::map(device.primary().streams().acquire(0).unwrap(), |s| s as &dyn Stream);
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let buffers = device.primary().buffers(kind).unwrap();
        assert_eq!((buffers.kind(), buffers.stats().live), (kind, 0));
        let on = On { timeline: stream.timeline(), source: &*stream };
        let x = buffers.allocate(Layout::new(4096), on).unwrap();
        let handle = x.handle();
        assert!(buffers.is_alive(handle) && buffers.stats().live == 1);
        let again = buffers.lease(handle).unwrap();
        submit(&stream, &[fill(&x, 3)]).unwrap();
        if kind == MemoryKind::Device {
            assert_eq!(read(&stream, &x), [3; 4096]);
        }
        stream.wait_host(stream.timeline().submitted(), None).unwrap();
        let calls = bench.driver.machine().calls();
        buffers.free(x);
        assert!(buffers.is_alive(handle), "somebody else holds it");
        buffers.free(again);
        assert_eq!(bench.driver.machine().calls(), calls, "a free makes no driver call");
        assert!(!buffers.is_alive(handle));
        assert_eq!(buffers.lease(handle).map(drop).unwrap_err().kind(), "StaleHandle");
        assert!(buffers.trim(0).unwrap() > 0);
    }
    drop((stream, device));
    bench.close();
}

#[test]
fn events_are_made_and_ended_by_their_manager() {
    let bench = Bench::new(71);
    let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
    let events = device.primary().events();
    let created = || bench.calls("cuEventCreate");
    let before = created();
    let timed = EventFlags { timing: true, blocking: false };
    let sleeping = EventFlags { timing: false, blocking: true };
    let a = events.acquire(timed).unwrap();
    let b = events.acquire(sleeping).unwrap();
    assert_eq!((a.flags(), b.flags(), created() - before), (timed, sleeping, 2));
    assert_eq!(refused(bench.backend.shutdown()), "event", "it is held");
    let handle = a.handle();
    drop((a, b));
    // The pool recycles events for requests with the same flags only.
    assert_eq!(events.acquire(sleeping).unwrap().flags(), sleeping);
    assert_eq!(created() - before, 2);
    assert_eq!(events.acquire(EventFlags::default()).unwrap().flags(), EventFlags::default());
    assert_eq!(created() - before, 3);
    assert!(!events.is_alive(handle));
    // The manager keeps its own event until the release.
    let kept = events.ensure_alive(timed).unwrap();
    assert_eq!(events.ensure_alive(timed).unwrap(), kept);
    assert_eq!(events.get_state(kept).unwrap().flags(), timed);
    let held = events.get_state(kept).unwrap();
    events.release(kept).unwrap();
    assert!(events.is_alive(kept), "other holders are untouched");
    assert_eq!(events.release(kept).unwrap_err().kind(), "StaleHandle");
    drop(held);
    assert!(!events.is_alive(kept) && events.get_state(kept).is_err());
    events.trim(0);
    assert_eq!(bench.calls("cuEventDestroy"), created());
    // The manager's own lease does not prevent a shutdown, but another holder's lease does.
    events.ensure_alive(timed).unwrap();
    let one = events.acquire(sleeping).unwrap();
    drop(device);
    assert_eq!(refused(bench.backend.shutdown()), "event");
    drop(one);
    bench.close();
}

#[test]
fn streams_and_contexts_are_kept_until_they_are_released() {
    let bench = Bench::new(72);
    let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
    let contexts = device.contexts();
    let context = contexts.ensure_alive().unwrap();
    assert_eq!(context, device.primary().handle());
    assert!(contexts.get_state(context).unwrap().same(device.primary()));
    contexts.release(context).unwrap();
    assert!(contexts.is_alive(context), "its device holds it");
    assert_eq!(contexts.ensure_alive().unwrap(), context);

    let streams = device.primary().streams();
    let kept = streams.ensure_alive(0).unwrap();
    assert_eq!(streams.ensure_alive(0).unwrap(), kept);
    let urgent = streams.ensure_alive(100).unwrap();
    assert!(urgent != kept && streams.is_alive(urgent));
    streams.release(urgent).unwrap();
    assert!(!streams.is_alive(urgent));
    // The manager keeps a stream with work behind a host timeline: the shutdown fails, and nothing
    // waits.
    let host_timeline = device.primary().host_timelines().acquire().unwrap();
    let host_timeline: Lease<dyn HostTimeline> =
        Lease::map(host_timeline, |g| g as &dyn HostTimeline);
    let next = host_timeline.timeline().submitted() + 1;
    let stream = Lease::map(streams.get_state(kept).unwrap(), |s| s as &dyn Stream);
    submit(&stream, &[Op::Wait(host_timeline.timeline().at(next))]).unwrap();
    drop((stream, device));
    assert_eq!(refused(bench.backend.shutdown()), "stream");
    host_timeline.signal_host(next).unwrap();
    drop(host_timeline);
    bench.close();
}

#[test]
fn an_owned_context_stages_downloads_too() {
    let bench = Bench::new(73);
    let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
    let context = device.contexts().create_owned().unwrap();
    let own = Lease::map(context.streams().acquire(0).unwrap(), |s| s as &dyn Stream);
    let on = On { timeline: own.timeline(), source: &*own };
    let x = context.buffers(MemoryKind::Device).unwrap().allocate(Layout::new(4096), on).unwrap();
    submit(&own, &[fill(&x, 5)]).unwrap();
    assert_eq!(read(&own, &x), [5; 4096]);
    drop((x, own, context, device));
    bench.close();
}

#[test]
fn each_manager_can_be_configured_for_a_test_by_itself() {
    let driver = Arc::new(SimDriver::new(driver_config(74)).unwrap());
    let ops = || -> Arc<dyn CudaSlowOps> { driver.clone() };
    let id = DeviceId::cuda(1);
    let devices = DeviceManager::new();
    assert!(!devices.is_configured_for_test());
    devices.configure_for_test(ops()).unwrap();
    assert!(devices.is_configured_for_test() && devices.device_count() == 2);
    assert_eq!(devices.configure_for_test(ops()).unwrap_err().kind(), "InvalidState");
    assert_eq!(devices.open(DeviceId::cpu(0)).map(drop).unwrap_err().kind(), "NotFound");
    devices.shutdown().unwrap();

    let contexts = ContextManager::configure_for_test(ops(), id).unwrap();
    assert!(contexts.is_configured_for_test());
    let context = contexts.primary().unwrap();
    assert!(!context.streams().is_configured_for_test());
    drop(context);
    contexts.shutdown().unwrap();

    let streams = StreamManager::configure_for_test(ops(), id).unwrap();
    assert!(streams.is_configured_for_test() && streams.is_alive(streams.ensure_alive(0).unwrap()));
    streams.shutdown().unwrap();

    let events = EventManager::configure_for_test(ops(), id).unwrap();
    assert!(events.is_configured_for_test());
    drop(events.acquire(EventFlags::default()).unwrap());
    events.shutdown().unwrap();

    let buffers = BufferManager::configure_for_test(ops(), id, MemoryKind::Device).unwrap();
    assert!(buffers.is_configured_for_test() && buffers.stats().live == 0);
    for wrong in [DeviceId::cpu(0), DeviceId::cuda(7)] {
        assert!(ContextManager::configure_for_test(ops(), wrong).is_err());
        assert!(StreamManager::configure_for_test(ops(), wrong).is_err());
    }
    drop((devices, contexts, streams, events, buffers));
    assert!(driver.census().is_nothing(), "{:?}", driver.census());
}
