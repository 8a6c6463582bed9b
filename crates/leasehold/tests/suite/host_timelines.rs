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

#[test]
fn an_ended_host_timeline_fails_later_waits_as_those_that_were_there() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32]).unwrap();
    let gate = runtime.create_host_timeline().unwrap();
    let (point, far) = (gate.next(), gate.at(u64::MAX));
    let graph = runtime
        .record_graph(|r| {
            r.stream().wait(point)?;
            r.stream().fill(x.view(), 2u32)
        })
        .unwrap();
    drop(gate);
    for late in [point, far] {
        let stream = runtime.create_stream().unwrap();
        let waited = stream.wait(late).and_then(|()| stream.synchronize_timeout(LONG));
        let text = waited.unwrap_err().to_string();
        assert!(text.contains("dropped before the value was signalled"), "{text}");
        assert_eq!(kind(runtime.wait_for_timeout(late, LONG)), "InvalidState");
        let recorded = runtime.record_graph(|r| r.stream().wait(late)).unwrap();
        assert_eq!(kind(recorded.launch()), "InvalidState");
    }
    // The launch is refused, and the stream goes on.
    assert_eq!(kind(graph.launch()), "InvalidState");
    assert_eq!(runtime.to_vec(&x).unwrap(), [1]);
    // A value that nobody was told of, and that nobody can signal.
    let gate = runtime.create_host_timeline().unwrap();
    let (timeline, value) = (gate.next().timeline(), gate.value());
    gate.signal(value + 1).unwrap();
    drop(gate);
    let made_up = timeline.at(value + 2);
    assert_eq!(kind(runtime.stream().wait(made_up)), "InvalidArgument");
    assert_eq!(kind(runtime.record_graph(|r| r.stream().wait(made_up))), "InvalidArgument");
}
