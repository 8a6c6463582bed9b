//! Errors of work, which show at completion only, and the faults of the fault plan.

use super::bench::{Bench, call};
use leasehold_core::Error;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_mps::driver::ops::*;
use leasehold_sim::mps::Effect;
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};
use std::time::Duration;

#[test]
fn an_error_skips_the_signals_of_its_command_buffer() {
    for seed in 0..12 {
        let bench = Bench::new(seed);
        let (driver, memory) = (&bench.driver, bench.buffer(64));
        let (fail, bump) = (bench.pipeline("fail"), bench.pipeline("bump"));
        let event = call!(driver, shared_event_create(bench.device)).unwrap();
        let outcomes = Arc::new(Mutex::new(Vec::new()));
        let commit = |pipeline, value| {
            let buffer = bench.kernel(pipeline, memory);
            call!(driver, encode_signal(buffer, event.into(), value)).unwrap();
            let outcomes = outcomes.clone();
            let handler = Box::new(move |c: &Completion| outcomes.lock().push(c.error.clone()));
            call!(driver, on_completed(buffer, handler)).unwrap();
            bench.commit(buffer);
            buffer
        };
        let failed = commit(fail, 1);
        let (code, text) = bench.finish(failed).expect("the kernel fails");
        assert_eq!(code, code::INTERNAL);
        assert!(text.contains("on purpose") && text.contains("encoder 1"), "{text}");
        assert_eq!(call!(driver, status(failed)).unwrap(), Status::Error);
        assert_eq!(call!(driver, signaled_value(event)).unwrap(), 0);
        let never = call!(driver, wait_signaled(event, 1, Duration::from_millis(1)));
        assert!(!never.unwrap());
        // Later work of the queue runs, and its signal happens.
        assert_eq!(bench.finish(commit(bump, 2)), None);
        assert_eq!(call!(driver, signaled_value(event)).unwrap(), 2);
        assert_eq!(bench.read(memory), 1);
        let outcomes = outcomes.lock();
        assert_eq!(outcomes.len(), 2);
        assert!(outcomes[0].is_some() && outcomes[1].is_none());
        assert_eq!(bench.broken(), []);
    }
}

#[test]
fn a_signal_before_the_failing_encoder_happens() {
    let bench = Bench::new(2);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let event = call!(driver, shared_event_create(bench.device)).unwrap();
    let buffer = bench.command();
    call!(driver, encode_signal(buffer, event.into(), 1)).unwrap();
    let encoder = bench.serial(buffer);
    bench.dispatch(encoder, bench.pipeline("fail"), memory);
    bench.end(encoder);
    call!(driver, encode_signal(buffer, event.into(), 2)).unwrap();
    assert!(bench.run(buffer).is_some());
    assert_eq!(call!(driver, signaled_value(event)).unwrap(), 1);
    // The host makes up for the skipped signal.
    call!(driver, set_signaled_value(event, 2)).unwrap();
    assert!(call!(driver, wait_signaled(event, 2, Duration::ZERO)).unwrap());
}

#[test]
fn a_fault_at_the_commit_shows_at_completion() {
    let bench = Bench::new(1);
    let memory = bench.buffer(64);
    let (pipeline, machine) = (bench.pipeline("bump"), bench.driver.machine());
    for (action, expected) in [
        (FaultAction::OutOfMemory, code::OUT_OF_MEMORY),
        (FaultAction::Fail(code::TIMEOUT), code::TIMEOUT),
    ] {
        machine.add_fault(FaultRule::on("commit", When::Once, action));
        let buffer = bench.kernel(pipeline, memory);
        let (code, _) = bench.run(buffer).expect("the fault");
        assert_eq!(code, expected);
    }
    assert_eq!(bench.read(memory), 0);
}

#[test]
fn calls_that_make_objects_fail_on_demand_and_make_nothing() {
    let bench = Bench::new(1);
    let (driver, device) = (&bench.driver, bench.device);
    let before = driver.census();
    let machine = driver.machine();
    machine.set_faults(FaultPlan::none().with(FaultRule::any(When::Always, FaultAction::Fail(9))));
    let queue = call!(driver, queue_create(device, 1, "q"));
    assert!(matches!(queue, Err(Error::Driver { code: 9, .. })), "{queue:?}");
    let options = MemoryOptions::default();
    call!(driver, buffer_create(device, 64, options)).unwrap_err();
    call!(driver, heap_create(device, &HeapDesc { size: 64, options, placement: true }))
        .unwrap_err();
    call!(driver, event_create(device)).unwrap_err();
    call!(driver, shared_event_create(device)).unwrap_err();
    call!(driver, fence_create(device)).unwrap_err();
    call!(driver, residency_create(device, 1)).unwrap_err();
    call!(driver, samples_create(device, 2)).unwrap_err();
    call!(driver, indirect_create(device, 2, 2)).unwrap_err();
    call!(driver, scope_create(bench.queue, "scope")).unwrap_err();
    call!(driver, library_from_source(device, "", &CompileOptions::default())).unwrap_err();
    call!(driver, command_buffer(bench.queue, CommandBufferDesc::default())).unwrap_err();
    driver.devices().unwrap_err();
    assert_eq!(driver.census(), before);
    assert!(machine.memory_in_use().is_nothing());
}

#[test]
fn a_lost_device_completes_its_work_with_an_error_and_calls_the_handlers() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let told = Arc::new(Mutex::new(None));
    let buffer = bench.kernel(bench.pipeline("bump"), memory);
    let into = told.clone();
    let handler = Box::new(move |c: &Completion| *into.lock() = c.error.clone());
    call!(driver, on_completed(buffer, handler)).unwrap();
    bench.commit(buffer);
    driver.machine().lose_device(0, "unplugged");
    assert_eq!(call!(driver, status(buffer)).unwrap(), Status::Error);
    assert_eq!(told.lock().take().unwrap().0, code::DEVICE_REMOVED);
    let late = call!(driver, event_create(bench.device));
    assert!(matches!(late, Err(Error::DeviceLost { .. })), "{late:?}");
    assert_eq!(bench.finish(buffer).unwrap().0, code::DEVICE_REMOVED);
}

/// Nobody may ask for the end of the earlier work, if the later work waits for it.
#[test]
fn a_commit_on_a_lost_device_calls_the_handlers_of_earlier_work_too() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let told = Arc::new(Mutex::new(Vec::new()));
    let bump = bench.pipeline("bump");
    let buffers = ["earlier", "later"].map(|name| {
        let (buffer, into) = (bench.kernel(bump, memory), told.clone());
        let handler = Box::new(move |c: &Completion| {
            into.lock().push((name, c.error.as_ref().map(|(code, _)| *code)));
        });
        call!(driver, on_completed(buffer, handler)).unwrap();
        buffer
    });
    bench.commit(buffers[0]);
    driver.machine().lose_device(0, "unplugged");
    bench.commit(buffers[1]);
    told.lock().sort_unstable();
    let lost = Some(code::DEVICE_REMOVED);
    assert_eq!(*told.lock(), [("earlier", lost), ("later", lost)]);
}

#[test]
fn memory_must_live_until_the_work_is_over() {
    let bench = Bench::new(4);
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let buffer = bench.kernel(pipeline, memory);
    bench.commit(buffer);
    bench.release(memory);
    assert_eq!(bench.broken(), [Effect::Undefined]);
    assert!(!bench.reports().is_empty());
    // Retained references keep it.
    let bench = Bench::new(4);
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let desc = CommandBufferDesc { retained: true, encoder_status: false };
    let buffer = call!(bench.driver, command_buffer(bench.queue, desc)).unwrap();
    let encoder = bench.serial(buffer);
    bench.dispatch(encoder, pipeline, memory);
    bench.end(encoder);
    bench.commit(buffer);
    bench.release(memory);
    assert_eq!(bench.finish(buffer), None);
    assert_eq!((bench.broken(), bench.reports()), (vec![], vec![]));
    assert_eq!(bench.driver.machine().memory_in_use().pinned, 0);
}

#[test]
fn a_command_buffer_does_not_use_what_was_released_before_its_commit() {
    let bench = Bench::new(4);
    let memory = bench.buffer(64);
    let buffer = bench.kernel(bench.pipeline("bump"), memory);
    bench.release(memory);
    bench.refused(Effect::Undefined, call!(bench.driver, commit(buffer)));
}
