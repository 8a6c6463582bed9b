//! Events: recorded timepoints.

use crate::common::*;
use leasehold::{EventFlags, View, ops};
use std::time::Duration;

#[test]
fn an_event_that_was_never_recorded_is_not_waited_for_and_has_no_time() {
    let runtime = runtime();
    for flags in [EventFlags::TIMING, EventFlags::DISABLE_TIMING] {
        let event = runtime.create_event_with(flags).unwrap();
        assert!(event.query().unwrap() && event.timepoint().is_err());
        event.synchronize().unwrap();
        event.synchronize_timeout(Duration::ZERO).unwrap();
        let before = runtime.stream().now();
        runtime.stream().wait_event(&event).unwrap();
        assert_eq!(runtime.stream().now(), before);
        assert_eq!(kind(event.elapsed_since(&event)), "InvalidState");
        assert_eq!(kind(event.timepoint()), "InvalidState");
        assert_eq!(event.serial(), 0);
    }
}

#[test]
fn elapsed_needs_timing() {
    let runtime = runtime();
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    runtime.stream().record(&event).unwrap();
    assert_eq!(kind(event.elapsed_since(&event)), "InvalidState");
}

#[test]
fn an_event_is_over_when_what_came_before_it_is() {
    let runtime = runtime();
    for flags in [EventFlags::TIMING, EventFlags::DISABLE_TIMING] {
        let event = runtime.create_event_with(flags).unwrap();
        let held = hold(runtime.stream());
        runtime.stream().host_call("nothing", || Ok(())).unwrap();
        runtime.stream().record(&event).unwrap();
        assert!(!event.query().unwrap());
        assert_eq!(kind(event.synchronize_timeout(Duration::from_millis(3))), "Timeout");
        assert_eq!(kind(event.synchronize_timeout(Duration::ZERO)), "Timeout");
        open(held);
        event.synchronize_timeout(LONG).unwrap();
        assert!(event.query().unwrap());
    }
}

#[test]
fn a_wait_binds_to_the_last_record_before_it() {
    let runtime = runtime();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let event = runtime.create_event().unwrap();
    a.record(&event).unwrap();
    b.wait_event(&event).unwrap();
    // Recorded again, behind a host timeline: who waited before is not disturbed.
    let held = hold(&a);
    a.host_call("nothing", || Ok(())).unwrap();
    a.record(&event).unwrap();
    assert_eq!(event.serial(), 2);
    b.synchronize_timeout(LONG).unwrap();
    assert!(!event.query().unwrap());
    open(held);
    event.synchronize_timeout(LONG).unwrap();
}

#[test]
fn streams_are_ordered_by_events_alone() {
    let runtime = runtime();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    let order = std::sync::Arc::new(leasehold::backend::sync::Mutex::new(Vec::new()));
    let say = |what: &'static str| {
        let order = order.clone();
        move || {
            order.lock().push(what);
            Ok(())
        }
    };
    let held = hold(&a);
    a.host_call("first", say("first")).unwrap();
    a.record(&event).unwrap();
    b.wait_event(&event).unwrap();
    b.host_call("second", say("second")).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert!(order.lock().is_empty());
    open(held);
    b.synchronize_timeout(LONG).unwrap();
    assert_eq!(*order.lock(), ["first", "second"]);
}

#[test]
fn an_event_of_another_runtime_of_the_same_device_is_refused() {
    // Both are of cpu:0, so the device's name cannot tell them apart.
    let (a, b) = (runtime(), runtime());
    let event = a.create_event().unwrap();
    assert_eq!(kind(b.stream().record(&event)), "InvalidArgument");
    assert_eq!(kind(b.stream().record(&event)), "InvalidArgument");
    a.stream().record(&event).unwrap();
    let own = b.create_event().unwrap();
    b.stream().record(&own).unwrap();
    assert_eq!(kind(own.elapsed_since(&event)), "InvalidArgument");
    assert_eq!(kind(b.event(event.handle())), "StaleHandle");
    // But its timepoint may be waited for, on the device and on the host.
    b.stream().wait_event(&event).unwrap();
    event.synchronize().unwrap();
    b.stream().synchronize().unwrap();
}

#[test]
fn an_event_of_a_poisoned_stream_tells_the_cause() {
    let runtime = runtime();
    let (stream, event) = (runtime.create_stream().unwrap(), runtime.create_event().unwrap());
    stream.record(&event).unwrap();
    poison(&stream);
    event.synchronize().unwrap();
    assert!(event.query().unwrap(), "what came before the failure is complete");
    assert_eq!(kind(stream.record(&event)), "Fault");
    let plain = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    assert_eq!(kind(stream.record(&plain)), "Fault");
    assert_eq!(kind(plain.timepoint()), "InvalidState", "a failed record records nothing");
}

#[test]
fn events_are_recycled() {
    let runtime = runtime();
    for _ in 0..10_000 {
        let event = runtime.create_event().unwrap();
        runtime.stream().record(&event).unwrap();
        assert_eq!(event.serial(), 1, "a recycled event starts afresh");
    }
    runtime.stream().synchronize().unwrap();
    let pools = runtime.pools();
    let of = |name| pools.iter().find(|p| p.0 == name).unwrap().1;
    assert!(of("event").created < 100 && of("event").live == 0, "{:?}", of("event"));
    assert_eq!(of("timestamp").live, 0, "an idle event pins no timestamp");
}

#[test]
fn a_timing_event_measures_across_streams() {
    let runtime = runtime();
    let other = runtime.create_stream().unwrap();
    let (start, end) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    runtime.stream().record(&start).unwrap();
    other.wait_event(&start).unwrap();
    other
        .host_call("nap", || {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        })
        .unwrap();
    other.record(&end).unwrap();
    assert!(end.elapsed_since(&start).unwrap() >= Duration::from_micros(1900));
}

#[test]
fn a_record_is_ordered_with_the_work_around_it() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32]).unwrap();
    let other = runtime.create_stream().unwrap();
    let event = runtime.create_event().unwrap();
    for i in 1..100u32 {
        runtime.stream().fill(x.view(), ops::Pattern::U32(i)).unwrap();
        runtime.stream().record(&event).unwrap();
        other.wait_event(&event).unwrap();
        let mut word = [0u8; 4];
        other.download(&mut word, x.view()).unwrap();
        assert_eq!(u32::from_le_bytes(word), i);
    }
}
