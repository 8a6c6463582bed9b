//! The thread's current context, its guards, and the process's default.

use crate::common::*;
use leasehold::backend::Device;
use leasehold::{Backend, BackendKind, Context, Current, DeviceId, DeviceInfo};
use std::sync::Arc;

#[test]
fn a_guard_sets_the_context_and_restores_the_former_one() {
    let (a, b) = (runtime(), runtime());
    let stream = b.create_stream().unwrap();
    assert_eq!(kind(Current::get()), "InvalidState");
    {
        let _a = a.enter().unwrap();
        assert!(Current::get().unwrap().runtime().same(&a));
        {
            let _b = stream.enter().unwrap();
            let now = Current::get().unwrap();
            assert!(now.runtime().same(&b) && now.stream().same(&stream));
            assert!(now.allocator().same(b.allocator()));
            assert_eq!(now.device().info().id, b.device());
        }
        let now = Current::get().unwrap();
        assert!(
            now.runtime().same(&a) && now.stream().same(a.stream()),
            "no stream means the default one"
        );
    }
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn guards_dropped_out_of_order_leave_no_context_behind() {
    let (a, b) = (runtime(), runtime());
    let first = a.enter().unwrap();
    let second = b.enter().unwrap();
    drop(first);
    assert!(Current::get().unwrap().runtime().same(&b));
    drop(second);
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn a_guard_restores_on_panic() {
    let runtime = runtime();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _guard = runtime.enter().unwrap();
        panic!("on purpose");
    }));
    assert!(caught.is_err());
    assert_eq!(kind(Current::get()), "InvalidState");
}

#[test]
fn a_foreign_stream_is_no_context() {
    let (a, b) = (runtime(), runtime());
    assert_eq!(kind(leasehold::infini::set_context(&a, Some(b.stream()))), "InvalidArgument");
}

/// A process of its own: its default would be the context of every other test's threads.
#[test]
fn a_new_thread_inherits_nothing_but_the_process_default() {
    if !alone("contexts::a_new_thread_inherits_nothing_but_the_process_default") {
        return;
    }
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let _guard = runtime.enter().unwrap();
    let elsewhere = || {
        std::thread::scope(|s| {
            s.spawn(|| Current::get().map(|c| c.runtime().clone())).join().unwrap()
        })
    };
    assert_eq!(kind(elsewhere()), "InvalidState");
    Current::set_process_default(Some(&runtime));
    assert!(elsewhere().unwrap().same(&runtime));
    // A recording is no default of the process: the runtime that it is of is.
    let set = |r: &leasehold::Runtime| {
        Current::set_process_default(Some(r));
        r.enter().map(drop)
    };
    runtime.record_graph(set).unwrap();
    assert!(!elsewhere().unwrap().stream().is_recording());
    // The context keeps the runtime until the default is taken back.
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
    assert!(
        error.ends_with("device \"yours:0\": unknown backend; write one of mydev:0"),
        "{error}"
    );
    let error = context.device_id("mydev:x").unwrap_err().to_string();
    assert!(error.ends_with("\"x\" is not a device number"), "{error}");
    let two = vec![BackendKind::Cpu, BackendKind::Other("mydev"), BackendKind::Cpu];
    let error = DeviceId::parse_among("yours", &two).unwrap_err().to_string();
    assert!(error.ends_with("write one of cpu:0, mydev:0"), "each name once: {error}");
    let context = Context::new();
    let error = context.runtime(DeviceId::cpu(3)).map(drop).unwrap_err().to_string();
    assert!(error.contains("cpu:3: "), "{error}");
    assert_eq!(
        kind("mydev:0".parse::<DeviceId>()),
        "InvalidArgument",
        "nobody else knows the name"
    );
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
    assert!(
        text.contains("1 streams requested") && text.contains(&format!("of {limit} in use")),
        "{text}"
    );
    assert!(text.contains("drop some") && !text.contains("bytes"), "{text}");
    drop(streams);
    runtime.create_stream().unwrap();
}

/// A context with two simulated CUDA devices and the CPU, and the driver under them.
#[cfg(feature = "cuda")]
fn with_cuda() -> (Context, std::sync::Arc<leasehold_sim::cuda::SimDriver>) {
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
    let machine = leasehold_sim::MachineConfig::seed(1).devices(2, 1 << 28);
    let driver = std::sync::Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let config = leasehold_cuda::CudaConfig::default().inline(true);
    let cuda = leasehold_cuda::CudaBackend::with_ops(driver.clone(), config).unwrap();
    let checked = leasehold::backend::Validated::new(cuda).unwrap();
    let cpu = leasehold::cpu::CpuBackend::new();
    (Context::with_backends(vec![std::sync::Arc::new(checked), std::sync::Arc::new(cpu)]), driver)
}

#[cfg(feature = "cuda")]
#[test]
fn the_last_guard_restores_what_the_driver_had_current() {
    use leasehold_cuda::driver::ops::{ContextOps, NativeContext};
    let (context, driver) = with_cuda();
    let (a, b) =
        (context.runtime(DeviceId::cuda(0)).unwrap(), context.runtime(DeviceId::cuda(1)).unwrap());
    let cpu = context.runtime(DeviceId::cpu(0)).unwrap();
    let foreign = driver.context_create(0).unwrap();
    let natives = [&a, &b].map(|r| leasehold::cuda::device_state(r).unwrap().primary().native());
    let current = || driver.current().unwrap();
    for before in [NativeContext::NULL, foreign] {
        // SAFETY: no context, or one that lives until the end of the test.
        unsafe { driver.set_current(before) }.unwrap();
        // In order, with another driver's device between.
        let first = a.enter().unwrap();
        let between = cpu.enter().unwrap();
        let second = b.enter().unwrap();
        assert_eq!(current(), natives[1]);
        drop(second);
        assert_eq!(current(), natives[0], "the latest guard of this driver that is left");
        drop(between);
        assert_eq!(current(), natives[0]);
        drop(first);
        assert_eq!(current(), before);
        // The outermost first: what it found is kept for the last one.
        let first = a.enter().unwrap();
        let second = b.enter().unwrap();
        drop(first);
        assert_eq!(current(), natives[1]);
        let third = cpu.enter().unwrap();
        drop(second);
        assert_eq!(current(), before, "no guard of this driver is left");
        drop(third);
        assert_eq!(current(), before);
    }
    // SAFETY: none is current, then what is current; nothing was made in the foreign one.
    unsafe {
        driver.set_current(NativeContext::NULL).unwrap();
        driver.context_destroy(foreign).unwrap();
    }
    drop((a, b, cpu));
    context.shutdown().unwrap();
}

#[cfg(feature = "cuda")]
#[test]
fn the_current_context_reaches_its_backend_and_managers() {
    let (context, _driver) = with_cuda();
    let runtime = context.runtime(DeviceId::cuda(1)).unwrap();
    let guard = runtime.enter().unwrap();
    let now = Current::get().unwrap();
    assert_eq!(now.backend().unwrap().kind(), leasehold::BackendKind::Cuda);
    assert!(now.runtime().context().same(&context));
    // Through the wrapper too.
    let device = leasehold::cuda::device_state(now.runtime()).unwrap();
    assert_eq!(device.id(), DeviceId::cuda(1));
    assert!(
        device.primary().streams().stats().live >= 1
            && leasehold::cpu::device_state(now.runtime()).is_none()
    );
    drop((guard, now));
    let cpu = context.runtime(DeviceId::cpu(0)).unwrap();
    assert!(
        leasehold::cuda::device_state(&cpu).is_none()
            && leasehold::cpu::device_state(&cpu).unwrap().streams().stats().live >= 1
    );
    assert!(context.backend(leasehold::BackendKind::Sim).is_none());
    drop((runtime, cpu));
    context.shutdown().unwrap();
}
