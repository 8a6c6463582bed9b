//! The thread's current context, its guards, and the process's default.

use crate::common::*;
use leasehold::hal::Device;
use leasehold::{Backend, BackendKind, Context, Current, DeviceId, DeviceInfo, ops};
use std::sync::Arc;

#[test]
fn a_guard_sets_the_context_and_restores_the_former_one() {
    let (a, b) = (runtime(), runtime());
    let stream = b.create_stream().unwrap();
    assert_eq!(kind(Current::get()), "InvalidState");
    {
        let _a = ops::set_context(&a, None).unwrap();
        assert!(Current::get().unwrap().runtime().same(&a));
        {
            let _b = ops::set_context(&b, Some(&stream)).unwrap();
            let now = Current::get().unwrap();
            assert!(now.runtime().same(&b) && now.stream().same(&stream));
            assert!(now.allocator().same(b.allocator()));
            assert_eq!(now.device().info().id, b.device());
        }
        let now = Current::get().unwrap();
        assert!(now.runtime().same(&a) && now.stream().same(a.stream()), "no stream means the default one");
    }
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn guards_dropped_out_of_order_leave_no_context_behind() {
    let (a, b) = (runtime(), runtime());
    let first = ops::set_context(&a, None).unwrap();
    let second = ops::set_context(&b, None).unwrap();
    drop(first);
    assert!(Current::get().unwrap().runtime().same(&b));
    drop(second);
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn a_guard_restores_on_panic() {
    let runtime = runtime();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _guard = ops::set_context(&runtime, None).unwrap();
        panic!("on purpose");
    }));
    assert!(caught.is_err());
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn a_foreign_stream_is_no_context() {
    let (a, b) = (runtime(), runtime());
    assert_eq!(kind(ops::set_context(&a, Some(b.stream()))), "InvalidArgument");
}

#[test]
fn a_new_thread_inherits_nothing_but_the_process_default() {
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let _guard = ops::set_context(&runtime, None).unwrap();
    let elsewhere = || std::thread::scope(|s| s.spawn(|| Current::get().map(|c| c.runtime().clone())).join().unwrap());
    assert_eq!(kind(elsewhere()), "InvalidState");
    Current::set_process_default(Some(&runtime));
    assert!(elsewhere().unwrap().same(&runtime));
    // It keeps the runtime, and lets it go when it is taken back.
    let serial = runtime.stream().handle();
    drop(_guard);
    drop(runtime);
    assert_eq!(kind(context.shutdown()), "LeasesOutstanding");
    assert_eq!(context.runtime(DeviceId::cpu(0)).unwrap().stream().handle(), serial);
    Current::set_process_default(None);
    assert_eq!(kind(elsewhere()), "InvalidState");
    context.shutdown().unwrap();
}

#[test]
fn every_backend_is_reported_with_its_reason() {
    let reports = Context::new().backends();
    assert_eq!(reports.len(), 3);
    for report in &reports {
        match &report.devices {
            Ok(devices) => assert_eq!(devices.len(), 1),
            Err(e) => assert!(e.kind() == "Unavailable" && e.to_string().len() > 20, "{e}"),
        }
    }
    assert!(!Context::with_backends(Vec::new()).backends().iter().any(|r| r.devices.is_ok()));
}

/// The CPU under another name.
struct Mine(leasehold::cpu::CpuBackend);

// SAFETY: all is the CPU backend's own.
unsafe impl Backend for Mine {
    fn kind(&self) -> BackendKind {
        BackendKind::Other("mydev")
    }
    fn devices(&self) -> leasehold::Result<Vec<DeviceInfo>> {
        let mut devices = self.0.devices()?;
        devices.iter_mut().for_each(|d| d.id.backend = self.kind());
        Ok(devices)
    }
    fn open(&self, device: DeviceId) -> leasehold::Result<leasehold::Lease<dyn Device>> {
        self.0.open(DeviceId::cpu(device.ordinal))
    }
    fn shutdown(&self) -> leasehold::Result<()> {
        self.0.shutdown()
    }
}

#[test]
fn a_context_reads_the_names_of_its_backends() {
    let context = Context::with_backends(vec![Arc::new(Mine(leasehold::cpu::CpuBackend::new()))]);
    let id = DeviceId::new(BackendKind::Other("mydev"), 0);
    assert_eq!(context.device_id(&id.to_string()).unwrap(), id);
    assert_eq!(context.device_id("mydev").unwrap(), id);
    assert_eq!(context.device_id("cpu:1").unwrap(), DeviceId::cpu(1));
    assert_eq!(context.runtime(context.device_id("mydev:0").unwrap()).unwrap().device(), id);
    let error = context.device_id("yours:0").unwrap_err().to_string();
    assert!(error.contains("mydev:0") && error.contains("cuda:0"), "{error}");
    assert_eq!(kind("mydev:0".parse::<DeviceId>()), "InvalidArgument", "nobody else knows the name");
}

#[test]
fn the_stream_that_is_too_many_says_what_there_are_too_many_of() {
    let runtime = runtime();
    let limit = runtime.raw_device().limits().streams;
    let mut streams = Vec::new();
    let error = loop {
        match runtime.create_stream() {
            Ok(stream) => streams.push(stream),
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), "OverBudget");
    let text = error.to_string();
    assert!(text.contains("1 streams requested") && text.contains(&format!("of {limit} in use")), "{text}");
    assert!(text.contains("drop some") && !text.contains("bytes"), "{text}");
    drop(streams);
    runtime.create_stream().unwrap();
}
