//! Timelines that the host signals.

use crate::common::*;
use leasehold::{Error, View};
use std::time::Duration;

#[test]
fn a_stream_waits_for_a_value_that_nobody_signalled_yet() {
    let runtime = runtime();
    let (host_timeline, x) = (runtime.create_host_timeline().unwrap(), runtime.alloc(4).unwrap());
    let two = host_timeline.at(host_timeline.value() + 2);
    runtime.stream().wait(two).unwrap();
    runtime.stream().fill(x.view(), 9u32).unwrap();
    host_timeline.signal(two.value() - 1).unwrap();
    assert!(!runtime.stream().query().unwrap());
    assert_eq!(kind(runtime.stream().synchronize_timeout(Duration::from_millis(5))), "Timeout");
    host_timeline.signal(two.value() + 5).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [9]);
    assert_eq!(kind(host_timeline.signal(two.value())), "InvalidArgument");
    runtime.wait_for(two).unwrap();
}

#[test]
fn a_failed_host_timeline_poisons_who_waits_for_it_and_nobody_else() {
    let runtime = runtime();
    let (host_timeline, x) =
        (runtime.create_host_timeline().unwrap(), runtime.upload(&[1u32]).unwrap());
    let waiting = runtime.create_stream().unwrap();
    waiting.wait(host_timeline.next()).unwrap();
    waiting.fill(x.view(), 2u32).unwrap();
    host_timeline.fail(Error::state("the producer gave up"));
    host_timeline.fail(Error::state("again"));
    let error = waiting.synchronize_timeout(LONG).unwrap_err();
    assert!(error.to_string().contains("the producer gave up"), "{error}");
    assert_eq!(
        host_timeline.signal(host_timeline.value() + 1).unwrap_err().to_string(),
        error.to_string()
    );
    assert!(runtime.stream().synchronize().is_ok());
    assert!(waiting.failure().is_some());
}

#[test]
fn dropping_a_host_timeline_fails_who_waits_for_it() {
    let runtime = runtime();
    let (host_timeline, _) = hold(runtime.stream());
    drop(host_timeline);
    assert_eq!(kind(runtime.stream().synchronize_timeout(LONG)), "InvalidState");
}

#[test]
fn host_calls_and_other_devices_may_raise_a_host_timeline() {
    let (a, b) = (runtime(), runtime());
    let host_timeline = a.create_host_timeline().unwrap();
    let go = host_timeline.next();
    b.stream().wait(go).unwrap();
    let signalled = host_timeline.clone();
    a.stream().host_call("raises", move || signalled.signal(go.value())).unwrap();
    b.stream().synchronize_timeout(LONG).unwrap();
}

#[test]
fn waiting_for_all_and_for_any() {
    let runtime = runtime();
    let (a, b) = (runtime.create_host_timeline().unwrap(), runtime.create_host_timeline().unwrap());
    let (pa, pb) = (a.next(), b.next());
    let soon = Duration::from_millis(3);
    assert_eq!(kind(runtime.wait_for_any(&[pa, pb], soon)), "Timeout");
    b.signal(pb.value()).unwrap();
    assert_eq!(runtime.wait_for_any(&[pa, pb], soon).unwrap(), 1);
    assert_eq!(kind(runtime.wait_for_timeout([pa, pb], soon)), "Timeout");
    a.signal(pa.value()).unwrap();
    runtime.wait_for_timeout([pa, pb], soon).unwrap();
    runtime.wait_for_timeout([], soon).unwrap();
    assert_eq!(kind(runtime.wait_for_any(&[], soon)), "InvalidArgument");
    runtime.wait_for(pa).unwrap();
}

#[test]
fn a_graph_can_wait_for_a_host_timeline() {
    let runtime = runtime();
    let (host_timeline, x) =
        (runtime.create_host_timeline().unwrap(), runtime.upload(&[0u32]).unwrap());
    let go = host_timeline.next();
    let graph = runtime
        .record_graph(|r| {
            r.stream().wait(go)?;
            r.stream().fill(x.view(), 4u32)
        })
        .unwrap();
    let point = graph.launch().unwrap();
    assert_eq!(kind(runtime.wait_for_timeout([point], Duration::from_millis(3))), "Timeout");
    host_timeline.signal(go.value()).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [4]);
}
