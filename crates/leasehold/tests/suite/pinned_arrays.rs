//! Typed pinned memory: the host has it alone while it is mapped.

use crate::common::*;
use leasehold::{Error, GraphUpdate, View};
use std::time::Duration;

#[test]
fn a_map_waits_for_what_uses_the_memory() {
    let runtime = runtime();
    let mut host = runtime.alloc_pinned_array::<u64>(1000).unwrap();
    let x = runtime.alloc_array::<u64>(1000).unwrap();
    host.map().unwrap().fill(3);
    let held = hold(runtime.stream());
    runtime.stream().copy(x.view(), host.view()).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            open(held);
        });
        // Were it not to wait, the copy would see sevens.
        host.map().unwrap().fill(7);
    });
    assert_eq!(runtime.to_vec(&x).unwrap(), [3; 1000]);
    // A copy to the host, and what a loan wrote is seen by what comes after it.
    runtime.stream().copy(host.view(), x.view()).unwrap();
    let mut values = host.map().unwrap();
    assert_eq!((values[0], values[999], values.len()), (3, 3, 1000));
    values[999] = 5;
    drop(values);
    runtime.stream().copy(x.view(), host.view()).unwrap();
    assert_eq!(runtime.to_vec(x.slice(998..)).unwrap(), [3, 5]);
}

#[test]
fn who_else_holds_the_buffer_keeps_the_host_out() {
    let runtime = runtime();
    let mut host = runtime.alloc_pinned_array::<u32>(4).unwrap();
    host.map().unwrap().copy_from_slice(&[1, 2, 3, 4]);
    let x = runtime.alloc_array::<u32>(4).unwrap();
    let clone = host.view().buffer().clone();
    assert_eq!(kind(host.map()), "Occupied");
    let (handle, weak) = (clone.handle(), clone.downgrade());
    drop(clone);
    let graph = runtime.record_graph(|r| r.stream().copy(x.view(), host.view())).unwrap();
    graph.launch().unwrap();
    assert_eq!(kind(host.map()), "Occupied", "the graph may be launched while the host writes");
    let other = runtime.alloc_pinned(16).unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(host.view().buffer(), &other)).unwrap();
    let values = host.map().unwrap();
    assert_eq!(values[..], [1, 2, 3, 4]);
    // Nor does a handle find it meanwhile.
    let pool = runtime.raw_device().memory(leasehold::MemoryKind::Pinned).unwrap();
    assert!(pool.lease(handle).is_err() && weak.upgrade().is_none());
    drop(values);
    assert!(pool.lease(handle).is_ok() && weak.upgrade().is_some());
    assert_eq!(runtime.to_vec(&x).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn a_failed_copy_is_told_and_a_loan_that_is_forgotten_hurts_nobody() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let mut host = runtime.alloc_pinned_array::<u32>(4).unwrap();
    let x = runtime.upload(&[8u32; 4]).unwrap();
    stream.host_call("fails", || Err(Error::other("on purpose"))).unwrap();
    let submitted = stream.copy(host.view(), x.view());
    assert!(submitted.is_err() || host.map().is_err());
    let _ = stream.synchronize();
    runtime.stream().copy(host.view(), x.view()).unwrap();
    assert_eq!(host.map().unwrap()[..], [8; 4]);
    let mut nothing = runtime.alloc_pinned_array::<u64>(0).unwrap();
    assert!(nothing.is_empty() && nothing.map().unwrap().is_empty());
    // The loan's memory leaks by intention, and a leak detector would report it.
    if std::env::var_os("LEASEHOLD_SANITIZED").is_none() {
        std::mem::forget(host.map().unwrap());
        assert_eq!(kind(host.map()), "InvalidState");
    }
}
