//! Devices, libraries, events, counters and scopes.

use super::bench::{Bench, SOURCE, call, config};
use leasehold_core::Error;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_mps::driver::ops::*;
use leasehold_sim::mps::Effect;
use std::time::Duration;

#[test]
fn a_devices_architecture_may_be_null() {
    let bench = Bench::new(1);
    let device = call!(bench.driver, device_properties(bench.device)).unwrap();
    assert_eq!(device.architecture.as_deref(), Some("applegpu_g15s"));
    assert!(device.has_safe_indirect() && device.check(0).is_ok());
    let names = device.kernel_architectures();
    assert_eq!(names.first().unwrap(), "mps/apple9");
    assert_eq!(names.last().unwrap(), "mps");
    assert!(names.contains(&"mps/apple1".to_owned()) && names.contains(&"mps/metal3".to_owned()));
    let mut config = config(1);
    (config.architecture, config.paravirtual, config.apple_family) = (None, true, 5);
    let bench = Bench::with(config);
    let device = call!(bench.driver, device_properties(bench.device)).unwrap();
    assert_eq!(device.architecture, None);
    assert!(device.is_paravirtual() && !device.has_safe_indirect());
    assert_eq!(device.kernel_architectures()[0], "mps/apple5");
    for broken in [
        DeviceProperties { apple_family: 100, ..device.clone() },
        DeviceProperties { recommended_working_set: 1 << 60, ..device.clone() },
        DeviceProperties { max_buffer: 0, ..device.clone() },
        DeviceProperties { max_threads: [1024, 0, 1], ..device },
    ] {
        assert!(matches!(broken.check(0), Err(Error::Unavailable(_))), "{broken:?}");
    }
}

#[test]
fn libraries_have_the_functions_of_their_source() {
    let bench = Bench::new(1);
    let (driver, device) = (&bench.driver, bench.device);
    let compile =
        |source| call!(driver, library_from_source(device, source, &CompileOptions::default()));
    let library = compile(SOURCE).unwrap();
    let names = call!(driver, function_names(library)).unwrap();
    assert_eq!(names, ["bump", "set", "fail"]);
    let missing = call!(driver, function(library, "hidden"));
    assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
    for wrong in ["#error no", "kernel void f() {", "kernel int f() {}", "/* open"] {
        assert!(matches!(compile(wrong), Err(Error::Compile { .. })), "{wrong}");
    }
    let library = compile("kernel void unknown() {}").unwrap();
    let function = call!(driver, function(library, "unknown")).unwrap();
    let pipeline = call!(driver, pipeline_create(device, function, &PipelineDesc::default()));
    assert!(matches!(pipeline, Err(Error::Compile { .. })), "{pipeline:?}");
    let other = driver.devices().unwrap()[1];
    let function = call!(driver, function(compile(SOURCE).unwrap(), "bump")).unwrap();
    let foreign = call!(driver, pipeline_create(other, function, &PipelineDesc::default()));
    bench.refused(Effect::Abort, foreign);
    let desc = PipelineDesc { max_threads: 64, ..PipelineDesc::default() };
    let pipeline = call!(driver, pipeline_create(device, function, &desc)).unwrap();
    let info = call!(driver, pipeline_info(pipeline)).unwrap();
    assert_eq!((info.max_threads, info.simd_width), (64, 32));
    let missing = std::path::Path::new("no such library");
    let file = call!(driver, library_from_file(device, missing));
    assert!(matches!(file, Err(Error::Driver { .. })), "{file:?}");
}

#[test]
fn the_host_and_handlers_see_shared_events() {
    let bench = Bench::new(1);
    let driver = &bench.driver;
    let event = call!(driver, shared_event_create(bench.device)).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let into = seen.clone();
    let handler = Box::new(move |value| into.lock().push(value));
    call!(driver, on_signaled(event, 3, handler)).unwrap();
    assert!(!call!(driver, wait_signaled(event, 3, Duration::ZERO)).unwrap());
    let buffer = bench.command();
    call!(driver, encode_signal(buffer, event.into(), 3)).unwrap();
    assert_eq!(bench.run(buffer), None);
    driver.machine().run_until_idle();
    assert_eq!(*seen.lock(), [3]);
    // The value never falls.
    call!(driver, set_signaled_value(event, 1)).unwrap();
    assert_eq!(call!(driver, signaled_value(event)).unwrap(), 3);
}

#[test]
fn an_event_belongs_to_its_device_and_a_shared_event_to_all() {
    let bench = Bench::new(1);
    let driver = &bench.driver;
    let other = driver.devices().unwrap()[1];
    let queue = call!(driver, queue_create(other, 4, "second")).unwrap();
    let (own, shared) = (
        call!(driver, event_create(bench.device)).unwrap(),
        call!(driver, shared_event_create(bench.device)).unwrap(),
    );
    let buffer = bench.command_of(queue);
    bench.refused(Effect::Abort, call!(driver, encode_wait(buffer, own.into(), 1)));
    call!(driver, encode_signal(buffer, shared.into(), 1)).unwrap();
    assert_eq!(bench.run(buffer), None);
}

#[test]
fn an_event_is_not_released_while_work_waits_for_it() {
    let bench = Bench::new(1);
    let event = call!(bench.driver, event_create(bench.device)).unwrap();
    let buffer = bench.command();
    call!(bench.driver, encode_wait(buffer, event.into(), 1)).unwrap();
    bench.commit(buffer);
    bench.release(event);
    assert_eq!(bench.broken(), [Effect::Undefined]);
}

#[test]
fn a_pass_samples_its_start_and_end() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let samples = call!(driver, samples_create(bench.device, 4)).unwrap();
    let pipeline = bench.pipeline("bump");
    let buffer = bench.command();
    let desc = ComputeDesc { concurrent: false, samples: Some((samples, 1, 2)) };
    let encoder = call!(driver, compute_encoder(buffer, &desc)).unwrap();
    bench.dispatch(encoder, pipeline, memory);
    bench.end(encoder);
    let outside = ComputeDesc { samples: Some((samples, 3, 4)), ..desc };
    bench.refused(Effect::Abort, call!(driver, compute_encoder(buffer, &outside)));
    assert_eq!(bench.run(buffer), None);
    let ticks = call!(driver, samples_resolve(samples, 0..4)).unwrap();
    assert!(ticks[1] < ticks[2], "{ticks:?}");
    assert_eq!((ticks[0], ticks[3]), (u64::MAX, u64::MAX));
    bench.refused(Effect::Abort, call!(driver, samples_resolve(samples, 0..5)));
    let outcome = call!(driver, completion(buffer)).unwrap();
    assert!(outcome.started <= ticks[1] && ticks[2] <= outcome.ended, "{outcome:?}");
    let mut config = config(1);
    config.stage_counters = false;
    let old = Bench::with(config);
    let refused = call!(old.driver, samples_create(old.device, 4));
    assert!(matches!(refused, Err(Error::Unsupported(_))));
}

#[test]
fn a_capture_scope_begins_and_ends() {
    let bench = Bench::new(1);
    let scope = call!(bench.driver, scope_create(bench.queue, "frame")).unwrap();
    call!(bench.driver, scope_begin(scope)).unwrap();
    bench.refused(Effect::Undefined, call!(bench.driver, scope_begin(scope)));
    call!(bench.driver, scope_end(scope)).unwrap();
    bench.refused(Effect::Undefined, call!(bench.driver, scope_end(scope)));
}

#[test]
fn nothing_is_left_of_the_machine_once_all_handles_are_released() {
    let bench = Bench::new(1);
    let driver = bench.driver.clone();
    let second = driver.devices().unwrap();
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    // Handles of finished, of pending and of abandoned work.
    let first = bench.kernel(pipeline, memory);
    assert_eq!(bench.run(first), None);
    let pending = bench.kernel(pipeline, memory);
    bench.commit(pending);
    bench.release(pending);
    bench.release(first);
    bench.release(bench.command());
    let last = bench.command();
    assert_eq!(bench.run(last), None);
    bench.release(last);
    [pipeline.into(), memory.into(), bench.queue.into(), bench.device.into()]
        .into_iter()
        .chain(second.into_iter().map(NativeObject::from))
        .for_each(|object: NativeObject| bench.release(object));
    assert_eq!(bench.broken(), []);
    let left = driver.census();
    assert_eq!((left.queues, left.command_buffers, left.encoders, left.buffers), (0, 0, 0, 0));
    let objects = driver.machine().objects();
    assert_eq!((objects.queues, objects.events, objects.semaphores), (0, 0, 0));
    assert!(driver.machine().memory_in_use().is_nothing());
}
