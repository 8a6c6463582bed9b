//! Events as futures.

use crate::common::*;
use leasehold::{EventFlags, View};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::time::Duration;

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Arc::new(Unpark(std::thread::current())).into();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park_timeout(Duration::from_secs(10));
    }
}

#[test]
fn an_await_ends_with_the_record_and_not_with_what_comes_after() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let event = runtime.create_event().unwrap();
    block_on(async { (&*event).await }).unwrap(); // never recorded
    let held = hold(&stream);
    stream.record(&event).unwrap();
    // Both ways: the stream ends with the record, and it has gone on.
    let early = event.completion();
    let behind = hold(&stream);
    let late = event.completion();
    let mut polled = event.completion();
    let waker = Arc::new(Unpark(std::thread::current())).into();
    assert!(Pin::new(&mut polled).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(polled);
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            open(held);
        });
        block_on(late).unwrap();
        block_on(early).unwrap();
    });
    assert!(!stream.query().unwrap(), "what came after the record is held back still");
    block_on(async { (&*event).await }).unwrap(); // over already
    open(behind);
}

#[test]
fn an_await_hears_of_failures_too() {
    let runtime = runtime();
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    for goes_on in [false, true] {
        let stream = runtime.create_stream().unwrap();
        let held = hold(&stream);
        stream.host_call("fails", || Err(leasehold::Error::other("on purpose"))).unwrap();
        stream.record(&event).unwrap();
        if goes_on {
            stream.host_call("is never called", || Ok(())).unwrap();
        }
        let future = event.completion();
        open(held);
        assert_eq!(kind(block_on(future)), "Fault");
    }
}

#[test]
fn many_may_wait_at_once() {
    let runtime = runtime();
    let x = runtime.alloc(64).unwrap();
    let held = hold(runtime.stream());
    let futures: Vec<_> = (0..600u32)
        .map(|i| {
            let event = runtime.create_event().unwrap();
            runtime.stream().fill(x.view(), i).unwrap();
            runtime.stream().record(&event).unwrap();
            runtime.stream().fill(x.view(), i).unwrap();
            event.completion()
        })
        .collect();
    open(held);
    for future in futures {
        block_on(future).unwrap();
    }
}
