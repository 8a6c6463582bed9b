//! Managers: configuration, life cycle, sources of memory, contexts.

use crate::common::*;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease};
use leasehold_cuda::{CudaBackend, CudaConfig, MemorySource};
use leasehold_hal::{
    Backend, BackendKind, DeviceId, MemoryKind, Op, OpList, Plan, StreamDesc, TimestampQuery,
};
use leasehold_sim::cuda::SimDriver;

#[test]
fn without_a_driver_everything_says_why() {
    // On a machine with a driver this test checks nothing.
    let backend = CudaBackend::new();
    assert_eq!(backend.kind(), BackendKind::Cuda);
    let Err(e) = backend.devices() else { return };
    assert!(matches!(e, Error::Unavailable(_)), "{}: {e}", e.kind());
    let open = backend.open(DeviceId::cuda(0)).map(drop).unwrap_err();
    // The reason is the same, with the device in front.
    let why = e.to_string();
    let why = why.strip_prefix("unavailable: ").unwrap_or(&why);
    assert_eq!(open.to_string(), format!("unavailable: cuda:0: {why}"));
    assert_eq!(backend.open(DeviceId::cpu(0)).map(drop).unwrap_err().kind(), "NotFound");
    backend.shutdown().unwrap();
}

#[test]
fn a_wrong_configuration_changes_nothing() {
    let driver = Arc::new(SimDriver::new(driver_config(40)).unwrap());
    assert_eq!(
        CudaBackend::with_ops(driver.clone(), CudaConfig::default().streams(0)).unwrap_err().kind(),
        "InvalidArgument"
    );
    let mut config = CudaConfig::default();
    config.signal_every = 0;
    assert_eq!(config.validate().unwrap_err().kind(), "InvalidArgument");
    assert_eq!(driver.machine().calls(), 0);
}

#[test]
fn a_manager_can_be_configured_for_a_test_once() {
    use leasehold_cuda::manager::execution::CudaExecutionManager;
    let manager = CudaExecutionManager::new();
    assert!(!manager.is_configured_for_test() && !manager.is_configured());
    assert_eq!(
        manager.devices().open(DeviceId::cuda(0)).map(drop).unwrap_err().kind(),
        "InvalidState"
    );
    let driver = Arc::new(SimDriver::new(driver_config(41)).unwrap());
    manager.configure_for_test(driver.clone()).unwrap();
    assert!(manager.is_configured_for_test() && manager.is_configured());
    assert_eq!(manager.configure_for_test(driver.clone()).unwrap_err().kind(), "InvalidState");
    assert_eq!(manager.devices().device_count(), 2);
    let handle = manager.devices().ensure_alive(DeviceId::cuda(1)).unwrap();
    assert!(manager.devices().is_alive(handle));
    assert_eq!(manager.devices().get_state(handle).unwrap().id(), DeviceId::cuda(1));
    manager.devices().release(handle).unwrap();
    assert!(!manager.devices().is_alive(handle));
    manager.shutdown().unwrap();
    manager.shutdown().unwrap();
    assert!(!manager.is_configured());
    assert!(driver.census().is_nothing());
}

#[test]
fn devices_say_what_they_are() {
    let bench = Bench::new(42);
    let infos = bench.backend.devices().unwrap();
    assert_eq!(infos.len(), 2);
    assert_eq!(infos[1].id, DeviceId::cuda(1));
    assert_eq!(infos[0].arch, ["cuda/sm_90", "cuda"]);
    assert!(infos[0].uuid.starts_with("GPU-") && infos[0].uuid.len() == 40, "{}", infos[0].uuid);
    let detail = |label: &str| infos[0].details.iter().find(|d| d.0 == label).map(|d| d.1.clone());
    assert_eq!(detail("peers").as_deref(), Some("cuda:1"));
    assert_eq!(detail("driver").as_deref(), Some("CUDA 13.0"));
    let device = bench.open(0);
    assert!(
        device.caps().host_timelines
            && device.caps().pinned
            && device.caps().graphs
            && !device.caps().host_visible
            && !device.caps().vendor_libraries
    );
    assert_eq!(device.limits().streams, 256);
    assert!(device.limits().shared > 48 << 10);
    drop(device);
    bench.close();
}

#[test]
fn every_source_of_memory_works_and_gives_all_back() {
    for source in [MemorySource::Vmm, MemorySource::Pool, MemorySource::Plain] {
        let bench = Bench::with(driver_config(43), inline().memory(source));
        let device = bench.open(0);
        let a = stream(&device);
        let buffers: Vec<_> =
            [100, 70_000, 3 << 20, 40 << 20].map(|n| buffer(&device, &a, n)).into();
        for (i, b) in buffers.iter().enumerate() {
            submit(&a, &[fill(b, i as u32 + 1)]).unwrap();
        }
        for (i, b) in buffers.iter().enumerate() {
            assert!(read(&a, b).iter().all(|&x| x == i as u8 + 1), "{source:?}");
        }
        assert_eq!(bench.calls("cuMemAddressReserve") > 0, source == MemorySource::Vmm);
        assert_eq!(bench.calls("cuMemAllocAsync") > 0, source == MemorySource::Pool);
        assert_eq!(bench.calls("cuMemAlloc") > 0, source == MemorySource::Plain);
        let calls = device.memory(MemoryKind::Device).unwrap().stats().driver_calls;
        drop(buffers);
        assert_eq!(
            device.memory(MemoryKind::Device).unwrap().stats().driver_calls,
            calls,
            "a free makes no call"
        );
        device.memory(MemoryKind::Device).unwrap().trim(0).unwrap();
        drop((a, device));
        bench.close();
    }
}

#[test]
fn memory_that_the_device_has_not_got_is_said_so() {
    let mut driver = driver_config(44);
    (driver.vmm, driver.memory_pools) = (false, false);
    let bench = Bench::with(driver.clone(), inline());
    let device = bench.open(0);
    let a = stream(&device);
    drop(buffer(&device, &a, 1000));
    assert!(bench.calls("cuMemAlloc") > 0, "the fallback");
    drop((a, device));
    bench.close();
    let bench = Bench::with(driver, inline().memory(MemorySource::Vmm));
    let device = bench.open(0);
    assert_eq!(device.memory(MemoryKind::Device).map(drop).unwrap_err().kind(), "Unsupported");
    drop(device);
    bench.close();
}

#[test]
fn an_owned_context_has_streams_of_its_own_and_shares_the_memory() {
    let bench = Bench::new(45);
    let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
    let shown = bench.open(0);
    let a = stream(&shown);
    let x = buffer(&shown, &a, 4096);
    let context = device.contexts().create_owned().unwrap();
    assert_ne!(context.native(), device.primary().native());
    let own =
        Lease::map(context.streams().acquire(0).unwrap(), |s| s as &dyn leasehold_hal::Stream);
    let filled = a.timeline().at(submit(&a, &[fill(&x, 3)]).unwrap());
    // The wait orders work across contexts.
    let v = submit(&own, &[Op::Wait(filled), fill(&x, 4)]).unwrap();
    wait(&own, v).unwrap();
    assert_eq!(read(&a, &x), [4; 4096]);
    assert!(matches!(bench.backend.shutdown(), Err(Error::LeasesOutstanding { .. })));
    let handle = context.handle();
    drop((own, context));
    device.contexts().collect();
    assert!(!device.contexts().is_alive(handle));
    drop((x, a, shown, device));
    bench.close();
}

#[test]
fn streams_are_recycled_by_priority_and_end_when_poisoned() {
    let bench = Bench::new(46);
    let device = bench.open(0);
    let urgent = device.stream(&StreamDesc::priority(100)).unwrap();
    let plain = stream(&device);
    assert!(urgent.priority() > plain.priority() && urgent.priority() < 100, "clamped");
    let native = urgent.native();
    drop((urgent, plain));
    let again = device.stream(&StreamDesc::priority(100)).unwrap();
    assert_eq!(again.native(), native, "an idle stream of this priority is taken again");
    let host_timeline = device.host_timeline().unwrap();
    submit(
        &again,
        &[Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 1))],
    )
    .unwrap();
    host_timeline.fail(Error::state("over"));
    drop(again);
    let fresh = device.stream(&StreamDesc::priority(100)).unwrap();
    assert_ne!(fresh.native(), native, "a poisoned one is not");
    drop((fresh, host_timeline, device));
    bench.close();
}

#[test]
fn stamps_are_unwritten_until_their_submission_is_over() {
    let bench = Bench::new(47);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 1 << 20);
    let timestamps: Vec<Lease<TimestampQuery>> =
        (0..3).map(|_| device.timestamp().unwrap()).collect();
    assert_eq!(
        // SAFETY: the timestamps are of this backend.
        unsafe { device.elapsed(&timestamps[0], &timestamps[1]) }.unwrap_err().kind(),
        "InvalidState"
    );
    let v = submit(
        &a,
        &[Op::WriteTimestamp(&timestamps[0]), fill(&x, 1), Op::WriteTimestamp(&timestamps[1])],
    )
    .unwrap();
    assert_eq!(
        // SAFETY: the timestamps are of this backend.
        unsafe { device.elapsed(&timestamps[0], &timestamps[1]) }.unwrap_err().kind(),
        "InvalidState",
        "not yet"
    );
    wait(&a, v).unwrap();
    // SAFETY: the timestamps are of this backend.
    assert!(!unsafe { device.elapsed(&timestamps[0], &timestamps[1]) }.unwrap().is_zero());
    assert!(
        // SAFETY: the timestamps are of this backend.
        unsafe { device.elapsed(&timestamps[1], &timestamps[0]) }.unwrap().is_zero(),
        "the other way round"
    );
    assert_eq!(
        // SAFETY: the timestamps are of this backend.
        unsafe { device.elapsed(&timestamps[0], &timestamps[2]) }.unwrap_err().kind(),
        "InvalidState"
    );
    // Timestamps work in a graph too.
    let mut ops = OpList::new();
    for op in [Op::WriteTimestamp(&timestamps[1]), fill(&x, 2), Op::WriteTimestamp(&timestamps[2])]
    {
        ops.push(&op);
    }
    // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    let v = submit(&a, &[Op::Graph(&graph)]).unwrap();
    wait(&a, v).unwrap();
    // SAFETY: the timestamps are of this backend.
    assert!(!unsafe { device.elapsed(&timestamps[1], &timestamps[2]) }.unwrap().is_zero());
    drop(graph);
    let native = timestamps[0].native();
    drop(timestamps);
    let again: Vec<_> = (0..3).map(|_| device.timestamp().unwrap()).collect();
    assert!(
        again.iter().any(|s| s.native() == native) && again.iter().all(|s| s.get().is_none()),
        "recycled and unwritten"
    );
    drop((again, x, a, device));
    bench.close();
}

#[test]
fn a_foreign_context_is_restored_after_every_call() {
    use leasehold_cuda::driver::ops::{ContextOps, NativeContext};
    let bench = Bench::new(48);
    let device = bench.open(0);
    let foreign = bench.driver.context_create(1).unwrap();
    for current in [foreign, NativeContext::NULL] {
        // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
        unsafe { bench.driver.set_current(current) }.unwrap();
        let a = stream(&device);
        let x = buffer(&device, &a, 1 << 22);
        submit(&a, &[fill(&x, 1)]).unwrap();
        assert_eq!(read(&a, &x)[0], 1);
        drop((x, a));
        device.memory(MemoryKind::Device).unwrap().trim(0).unwrap();
        assert_eq!(bench.driver.current().unwrap(), current);
    }
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { bench.driver.context_destroy(foreign) }.unwrap();
    drop(device);
    bench.close();
}
