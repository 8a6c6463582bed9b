//! Timelines that the host signals.

use crate::common::*;
use leasehold::{Error, View};
use std::time::Duration;

#[test]
fn a_stream_waits_for_a_value_that_nobody_raised_yet() {
    let runtime = runtime();
    let (gate, x) = (runtime.create_gate().unwrap(), runtime.alloc(4).unwrap());
    let two = gate.at(gate.value() + 2);
    runtime.stream().wait(two).unwrap();
    runtime.stream().fill(x.view(), 9u32).unwrap();
    gate.raise(two.value() - 1).unwrap();
    assert!(!runtime.stream().query().unwrap());
    assert_eq!(kind(runtime.stream().synchronize_timeout(Some(Duration::from_millis(5)))), "Timeout");
    gate.raise(two.value() + 5).unwrap();
    assert_eq!(runtime.download::<u32>(&x).unwrap(), [9]);
    assert_eq!(kind(gate.raise(two.value())), "InvalidArgument");
    gate.synchronize(two.value(), None).unwrap();
}

#[test]
fn a_failed_gate_poisons_who_waits_for_it_and_nobody_else() {
    let runtime = runtime();
    let (gate, x) = (runtime.create_gate().unwrap(), runtime.upload(&[1u32]).unwrap());
    let waiting = runtime.create_stream().unwrap();
    waiting.wait(gate.next()).unwrap();
    waiting.fill(x.view(), 2u32).unwrap();
    gate.fail(Error::state("the producer gave up"));
    gate.fail(Error::state("again"));
    let error = waiting.synchronize_timeout(LONG).unwrap_err();
    assert!(error.to_string().contains("the producer gave up"), "{error}");
    assert_eq!(gate.raise(gate.value() + 1).unwrap_err().to_string(), error.to_string());
    assert!(runtime.stream().synchronize().is_ok());
    assert!(waiting.failure().is_some());
}

#[test]
fn dropping_a_gate_fails_who_waits_for_it() {
    let runtime = runtime();
    let (gate, _) = hold(runtime.stream());
    drop(gate);
    assert_eq!(kind(runtime.stream().synchronize_timeout(LONG)), "InvalidState");
}

#[test]
fn host_calls_and_other_devices_may_raise_a_gate() {
    let (a, b) = (runtime(), runtime());
    let gate = a.create_gate().unwrap();
    let go = gate.next();
    b.stream().wait(go).unwrap();
    let raised = gate.clone();
    a.stream().host_call("raises", move || raised.raise(go.value())).unwrap();
    b.stream().synchronize_timeout(LONG).unwrap();
}

#[test]
fn waiting_for_all_and_for_any() {
    let runtime = runtime();
    let (a, b) = (runtime.create_gate().unwrap(), runtime.create_gate().unwrap());
    let (pa, pb) = (a.next(), b.next());
    let soon = Some(Duration::from_millis(3));
    assert_eq!(kind(runtime.wait_for_any(&[pa, pb], soon)), "Timeout");
    b.raise(pb.value()).unwrap();
    assert_eq!(runtime.wait_for_any(&[pa, pb], soon).unwrap(), 1);
    assert_eq!(kind(runtime.wait_for_all(&[pa, pb], soon)), "Timeout");
    a.raise(pa.value()).unwrap();
    runtime.wait_for_all(&[pa, pb], soon).unwrap();
    runtime.wait_for_all(&[], soon).unwrap();
    assert_eq!(kind(runtime.wait_for_any(&[], soon)), "InvalidArgument");
    runtime.wait_for(pa).unwrap();
}

#[test]
fn a_graph_can_wait_for_a_gate() {
    let runtime = runtime();
    let (gate, x) = (runtime.create_gate().unwrap(), runtime.upload(&[0u32]).unwrap());
    let go = gate.next();
    let graph = runtime
        .record_graph(|r| {
            r.stream().wait(go)?;
            r.stream().fill(x.view(), 4u32)
        })
        .unwrap();
    let point = graph.launch().unwrap();
    assert_eq!(kind(runtime.wait_for_all(&[point], Some(Duration::from_millis(3)))), "Timeout");
    gate.raise(go.value()).unwrap();
    assert_eq!(runtime.download::<u32>(&x).unwrap(), [4]);
}
