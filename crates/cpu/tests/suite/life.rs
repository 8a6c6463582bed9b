//! Life cycles: configuration, opening, shutting down, dropping in every order.

use crate::common::*;
use leasehold_alloc::{Layout, On};
use leasehold_core::Error;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, thread};
use leasehold_cpu::{CpuBackend, CpuConfig, CpuExecutionManager};
use leasehold_hal::{
    Access, Backend, Device, DeviceId, HostCall, KernelSource, MemoryKind, Op, Plan, StreamDesc,
};
use std::borrow::Cow;
use std::time::Duration;

#[test]
fn configurations_are_checked_whole() {
    for threads in [0, 1025, usize::MAX] {
        assert!(matches!(
            CpuBackend::with_config(CpuConfig::threads(threads)),
            Err(Error::InvalidArgument(_))
        ));
    }
    for bad in [CpuConfig::default().streams(0), CpuConfig::default().spin(Duration::from_secs(2))]
    {
        assert!(matches!(CpuBackend::with_config(bad), Err(Error::InvalidArgument(_))));
    }
    let manager = CpuExecutionManager::new();
    assert!(matches!(manager.devices().describe(), Err(Error::InvalidState(_))));
    assert!(manager.configure(CpuConfig::threads(0)).is_err());
    manager.configure(CpuConfig::threads(1)).unwrap();
    assert!(matches!(manager.configure(CpuConfig::threads(1)), Err(Error::InvalidState(_))));
    manager.shutdown().unwrap();
    manager.shutdown().unwrap();
    assert!(CpuExecutionManager::new().shutdown().is_ok());
}

#[test]
fn devices_are_enumerated_alike_and_opened_once() {
    let backend = CpuBackend::new();
    let (a, b) = (backend.devices().unwrap(), backend.devices().unwrap());
    assert_eq!(a.len(), 1);
    assert_eq!((&a[0].id, &a[0].arch, &a[0].name), (&b[0].id, &b[0].arch, &b[0].name));
    assert_eq!(a[0].arch.last().map(String::as_str), Some("cpu"));
    assert!(
        !a[0].name.is_empty()
            && a[0].units >= 1
            && a[0].memory.total > 0
            && !a[0].details.is_empty()
    );
    let (x, y) = (backend.open(DeviceId::cpu(0)).unwrap(), backend.open(DeviceId::cpu(0)).unwrap());
    assert!(x.same(&y));
    for id in [DeviceId::cpu(1), DeviceId::cuda(0)] {
        assert!(matches!(backend.open(id), Err(Error::NotFound(_))), "{id}");
    }
    assert!(matches!(x.peer_access(DeviceId::cuda(0)), Err(Error::NotFound(_))));
    assert!(x.memory_info().unwrap().free > 0);
    x.make_current().unwrap();
}

#[test]
fn handles_name_devices() {
    let backend = CpuBackend::with_config(CpuConfig::threads(1)).unwrap();
    let devices = backend.manager().devices();
    let handle = devices.ensure_alive(DeviceId::cpu(0)).unwrap();
    assert!(devices.is_alive(handle));
    assert_eq!(devices.get_state(handle).unwrap().info().id, DeviceId::cpu(0));
    assert!(devices.ensure_alive(DeviceId::cpu(1)).is_err());
    devices.release(handle).unwrap();
    assert!(!devices.is_alive(handle));
    assert!(matches!(devices.get_state(handle), Err(Error::StaleHandle { .. })));
    let again = devices.ensure_alive(DeviceId::cpu(0)).unwrap();
    assert_ne!(handle, again);
}

#[test]
fn shutdown_with_live_children_counts_them_and_changes_nothing() {
    let rig = rig(1);
    let kernel = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let Rig { stream, device, backend } = rig;
    let host_timeline = device.host_timeline().unwrap();
    let timestamp = device.timestamp().unwrap();
    let memory = device.memory(MemoryKind::Pinned).unwrap();
    let buffer =
        memory.alloc(Layout::new(5), On { timeline: stream.timeline(), source: &*stream }).unwrap();
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let exec = unsafe { device.instantiate(Plan::default()) }.unwrap();
    drop(device);
    let refused = |what: &str| match backend.shutdown() {
        Err(Error::LeasesOutstanding { resource, strong, .. }) => {
            assert_eq!((resource, strong), (what, 1))
        }
        other => panic!("{what}: {other:?}"),
    };
    refused("stream");
    // The stream still works.
    let call = HostCall::new("nothing", || Ok(()));
    submit(&stream, &[Op::Host(&call)]).unwrap();
    finish(&stream).unwrap();
    drop(stream);
    refused("timestamp");
    drop(timestamp);
    refused("host timeline");
    drop(host_timeline);
    refused("pipeline");
    drop(kernel);
    refused("graph");
    drop(exec);
    refused("pinned buffer");
    drop(buffer);
    let device = backend.open(DeviceId::cpu(0)).unwrap();
    refused("device");
    let stream = device.stream(&StreamDesc::default()).unwrap();
    drop((stream, device));
    backend.shutdown().unwrap();
    backend.shutdown().unwrap();
    assert!(matches!(backend.open(DeviceId::cpu(0)), Err(Error::InvalidState(_))));
}

#[test]
fn a_stream_dropped_with_pending_work_finishes_it() {
    let rig = rig_with(CpuConfig::threads(1).streams(3));
    let host_timeline = rig.device.host_timeline().unwrap();
    let opens = host_timeline.timeline().completed() + 1;
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cell = cell();
    let b = [on(&*cell, Access::ReadWrite)];
    let stream = rig.another();
    let p = submit(
        &stream,
        &[Op::Wait(host_timeline.timeline().at(opens)), launch(&count, 1, &b, &[])],
    )
    .unwrap();
    let id = stream.timeline().id();
    drop(stream);
    let kept = rig.another();
    assert_ne!(kept.timeline().id(), id, "a stream with work is not lent again");
    // Retired streams count towards the limit.
    assert!(matches!(rig.device.stream(&StreamDesc::default()), Err(Error::OverBudget { .. })));
    assert!(matches!(
        rig.device.synchronize(Some(Duration::from_millis(1))),
        Err(Error::Timeout(_))
    ));
    host_timeline.signal_host(opens).unwrap();
    p.timeline().wait(p.value(), LONG).unwrap();
    assert_eq!(cell[0].load(Ordering::Relaxed), 1);
    let again = rig.another();
    assert_eq!(again.timeline().id(), id, "and is afterwards");
    let call = HostCall::new("nothing", || Ok(()));
    submit(&again, &[Op::Host(&call)]).unwrap();
    finish(&again).unwrap();
}

#[test]
fn everything_may_be_dropped_in_any_order_with_work_in_flight() {
    for order in 0..6 {
        let rig = rig(2);
        let kernel = rig.kernel("count", count, &[Access::ReadWrite], 0);
        let cell = cell();
        let b = [on(&*cell, Access::ReadWrite)];
        let host_timeline = rig.device.host_timeline().unwrap();
        let opens = host_timeline.timeline().completed() + 1;
        let mut ops = leasehold_hal::OpList::new();
        ops.push(&launch(&kernel, 64, &b, &[]));
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let exec = unsafe { rig.device.instantiate(Plan::new(ops)) }.unwrap();
        let p =
            submit(&rig.stream, &[Op::Wait(host_timeline.timeline().at(opens)), Op::Graph(&exec)])
                .unwrap();
        drop((exec, kernel));
        let Rig { stream, device, backend } = rig;
        let mut things: [Option<Box<dyn FnOnce()>>; 3] = [
            Some(Box::new(move || drop(stream))),
            Some(Box::new(move || drop(device))),
            Some(Box::new(move || drop(backend))),
        ];
        for i in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][order] {
            (things[i].take().unwrap())();
        }
        host_timeline.signal_host(opens).unwrap();
        p.timeline().wait(p.value(), LONG).unwrap();
        assert_eq!(cell[0].load(Ordering::Relaxed), 64);
    }
}

#[test]
fn a_stream_may_be_dropped_by_its_own_host_call() {
    let rig = rig(1);
    let stream = rig.another();
    let own = stream.clone();
    let call = HostCall::new("hold", move || own.flush());
    let p = submit(&stream, &[Op::Host(&call)]).unwrap();
    drop((call, stream));
    p.timeline().wait(p.value(), LONG).unwrap();
    let next = rig.another();
    let call = HostCall::new("nothing", || Ok(()));
    submit(&next, &[Op::Host(&call)]).unwrap();
    finish(&next).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn threads_end_with_their_backend() {
    fn threads(of: &str) -> usize {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .flatten()
            .filter(|t| {
                std::fs::read_to_string(t.path().join("comm")).is_ok_and(|c| c.trim() == of)
            })
            .count()
    }
    /// Waits until `count` threads have the name. A thread's name appears shortly after its start,
    /// and disappears shortly after its end.
    fn expect(of: &str, count: usize, what: &str) {
        for _ in 0..5000 {
            if threads(of) == count {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("{what}: {} threads", threads(of));
    }
    // No other test uses eleven threads.
    let name = "lh-cpu0-t10";
    for _ in 0..20 {
        let rig = rig(11);
        let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
        let cell = cell();
        let b = [on(&*cell, Access::ReadWrite)];
        expect(name, 0, "opening starts no thread, and the last backend's ended");
        submit(&rig.stream, &[launch(&count, 100_000, &b, &[])]).unwrap();
        finish(&rig.stream).unwrap();
        assert_eq!(cell[0].load(Ordering::Relaxed), 100_000);
        expect(name, 1, "the helpers were started");
    }
    expect(name, 0, "threads were left behind");
}

#[test]
fn one_key_makes_one_pipeline() {
    let rig = rig(1);
    let all: Vec<_> = std::thread::scope(|s| {
        let each: Vec<_> = (0..16)
            .map(|_| s.spawn(|| rig.kernel("same", count, &[Access::ReadWrite], 0)))
            .collect();
        each.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(all.iter().all(|p| p.same(&all[0])));
    assert!(!rig.kernel("other", count, &[Access::ReadWrite], 0).same(&all[0]));
    assert!(!rig.kernel("same", trap, &[Access::ReadWrite], 0).same(&all[0]));
    let clash = rig.device.pipeline(&desc("same", count, &[Access::Read], 0));
    assert!(matches!(clash, Err(Error::InvalidArgument(_))));
    let mut foreign = desc("ptx", count, &[], 0);
    foreign.source = KernelSource::Ptx(Cow::Borrowed(""));
    assert!(matches!(rig.device.pipeline(&foreign), Err(Error::Unsupported(_))));
    let here = || desc("here", |_| {}, &[], 0);
    for together in [here().cluster([2, 1, 1]), here().cooperative()] {
        let refused = rig.device.pipeline(&together);
        assert!(
            matches!(&refused, Err(Error::Unsupported(why)) if why.contains("a Rust function has no clusters")),
            "{refused:?}"
        );
    }
    let pipeline = rig.device.pipeline(&here()).unwrap();
    assert!(matches!(rig.device.resident_blocks(&pipeline, 1, 0), Err(Error::Unsupported(_))));
    drop(pipeline);
    let many = vec![Access::Read; 31];
    assert!(matches!(
        rig.device.pipeline(&desc("many", count, &many, 0)),
        Err(Error::InvalidArgument(_))
    ));
}

#[test]
fn buffers_can_be_looked_up() {
    let rig = rig(1);
    let state = rig.backend.manager().devices().open(DeviceId::cpu(0)).unwrap();
    assert!(state.buffers(MemoryKind::Pinned).is_none());
    let buffer = rig.buffer(1000);
    let handle = buffer.handle();
    let buffers = state.buffers(MemoryKind::Device).unwrap();
    assert!(buffers.is_alive(handle) && buffers.lease(handle).is_ok());
    drop(buffer);
    assert!(matches!(buffers.lease(handle), Err(Error::StaleHandle { .. })));
    assert_eq!(buffers.stats().live, 0);
}

#[test]
fn many_threads_with_a_stream_each() {
    let rig = rig(3);
    let count = rig.kernel("count", count, &[Access::ReadWrite], 0);
    let cell = Arc::new(cell());
    std::thread::scope(|s| {
        for _ in 0..16 {
            s.spawn(|| {
                let b = [on(&**cell, Access::ReadWrite)];
                for _ in 0..20 {
                    let stream = rig.another();
                    for _ in 0..10 {
                        submit(&stream, &[launch(&count, 37, &b, &[])]).unwrap();
                    }
                    finish(&stream).unwrap();
                }
            });
        }
    });
    assert_eq!(cell[0].load(Ordering::Relaxed), 16 * 20 * 10 * 37);
}
