//! Events: recorded points.

use crate::common::*;
use leasehold::{EventFlags, View, ops};
use std::time::Duration;

#[test]
fn an_event_that_was_never_recorded_is_an_invalid_state_everywhere() {
    let runtime = runtime();
    for flags in [EventFlags::TIMING, EventFlags::DISABLE_TIMING] {
        let event = runtime.create_event_with_flags(flags).unwrap();
        assert_eq!(kind(runtime.query_event(&event)), "InvalidState");
        assert_eq!(kind(runtime.synchronize_event(&event)), "InvalidState");
        assert_eq!(kind(runtime.stream_wait_event(None, &event)), "InvalidState");
        assert_eq!(kind(runtime.elapsed_time(&event, &event)), "InvalidState");
        assert_eq!(kind(event.point()), "InvalidState");
        assert_eq!(event.serial(), 0);
    }
}

#[test]
fn elapsed_needs_timing() {
    let runtime = runtime();
    let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING).unwrap();
    runtime.record_event(&event, None).unwrap();
    assert_eq!(kind(runtime.elapsed(&event, &event)), "InvalidState");
}

#[test]
fn an_event_is_over_when_what_came_before_it_is() {
    let runtime = runtime();
    for flags in [EventFlags::TIMING, EventFlags::DISABLE_TIMING] {
        let event = runtime.create_event_with_flags(flags).unwrap();
        let held = hold(runtime.stream());
        ops::host_call(runtime.stream(), "nothing", || Ok(())).unwrap();
        runtime.record_event(&event, None).unwrap();
        assert!(!runtime.query_event(&event).unwrap());
        assert_eq!(kind(runtime.synchronize_event_timeout(&event, Some(Duration::from_millis(3)))), "Timeout");
        assert_eq!(kind(runtime.synchronize_event_timeout(&event, Some(Duration::ZERO))), "Timeout");
        open(held);
        runtime.synchronize_event_timeout(&event, LONG).unwrap();
        assert!(runtime.query_event(&event).unwrap());
    }
}

#[test]
fn a_wait_binds_to_the_last_record_before_it() {
    let runtime = runtime();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let event = runtime.create_event().unwrap();
    runtime.record_event(&event, Some(&a)).unwrap();
    runtime.stream_wait_event(Some(&b), &event).unwrap();
    // Recorded again, behind a gate: who waited before is not disturbed.
    let held = hold(&a);
    ops::host_call(&a, "nothing", || Ok(())).unwrap();
    runtime.record_event(&event, Some(&a)).unwrap();
    assert_eq!(event.serial(), 2);
    b.synchronize_timeout(LONG).unwrap();
    assert!(!runtime.query_event(&event).unwrap());
    open(held);
    runtime.synchronize_event_timeout(&event, LONG).unwrap();
}

#[test]
fn streams_are_ordered_by_events_alone() {
    let runtime = runtime();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING).unwrap();
    let order = std::sync::Arc::new(leasehold::core::sync::Mutex::new(Vec::new()));
    let say = |what: &'static str| {
        let order = order.clone();
        move || {
            order.lock().push(what);
            Ok(())
        }
    };
    let held = hold(&a);
    ops::host_call(&a, "first", say("first")).unwrap();
    runtime.record_event(&event, Some(&a)).unwrap();
    runtime.stream_wait_event(Some(&b), &event).unwrap();
    ops::host_call(&b, "second", say("second")).unwrap();
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
    assert_eq!(kind(b.record_event(&event, None)), "InvalidArgument");
    assert_eq!(kind(a.record_event(&event, Some(b.stream()))), "InvalidArgument");
    a.record_event(&event, None).unwrap();
    let own = b.create_event().unwrap();
    b.record_event(&own, None).unwrap();
    assert_eq!(kind(b.elapsed(&event, &own)), "InvalidArgument");
    assert_eq!(kind(b.event(event.handle())), "StaleHandle");
    // But its point may be waited for, on the device and on the host.
    b.stream_wait_event(None, &event).unwrap();
    b.synchronize_event(&event).unwrap();
    b.sync_stream().unwrap();
}

#[test]
fn an_event_of_a_poisoned_stream_tells_the_cause() {
    let runtime = runtime();
    let (stream, event) = (runtime.create_stream().unwrap(), runtime.create_event().unwrap());
    runtime.record_event(&event, Some(&stream)).unwrap();
    poison(&stream);
    runtime.synchronize_event(&event).unwrap();
    assert!(runtime.query_event(&event).unwrap(), "what came before the failure is complete");
    assert_eq!(kind(runtime.record_event(&event, Some(&stream))), "Fault");
    let plain = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING).unwrap();
    assert_eq!(kind(runtime.record_event(&plain, Some(&stream))), "Fault");
    assert_eq!(kind(plain.point()), "InvalidState", "a failed record records nothing");
}

#[test]
fn events_are_recycled() {
    let runtime = runtime();
    for _ in 0..10_000 {
        let event = runtime.create_event().unwrap();
        runtime.record_event(&event, None).unwrap();
        assert_eq!(event.serial(), 1, "a recycled event starts afresh");
    }
    runtime.sync_stream().unwrap();
    let pools = runtime.pools();
    let of = |name| pools.iter().find(|p| p.0 == name).unwrap().1;
    assert!(of("event").created < 100 && of("event").live == 0, "{:?}", of("event"));
    assert_eq!(of("timestamp").live, 0, "an idle event pins no time stamp");
}

#[test]
fn a_timing_event_measures_across_streams() {
    let runtime = runtime();
    let other = runtime.create_stream().unwrap();
    let (start, end) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    runtime.record_event(&start, None).unwrap();
    runtime.stream_wait_event(Some(&other), &start).unwrap();
    ops::host_call(&other, "nap", || {
        std::thread::sleep(Duration::from_millis(2));
        Ok(())
    })
    .unwrap();
    runtime.record_event(&end, Some(&other)).unwrap();
    assert!(runtime.elapsed_time(&start, &end).unwrap() >= 1.9);
}

#[test]
fn a_record_is_ordered_with_the_work_around_it() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32]).unwrap();
    let other = runtime.create_stream().unwrap();
    let event = runtime.create_event().unwrap();
    for i in 1..100u32 {
        ops::fill(runtime.stream(), x.view(), ops::Pattern::U32(i)).unwrap();
        runtime.record_event(&event, None).unwrap();
        runtime.stream_wait_event(Some(&other), &event).unwrap();
        let mut word = [0u8; 4];
        ops::download(&other, &mut word, x.view()).unwrap();
        assert_eq!(u32::from_le_bytes(word), i);
    }
}
