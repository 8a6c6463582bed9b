//! Futures of streams, timepoints, events and downloads, by a small executor and by tokio.

use crate::between::World;
use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicUsize, Ordering};
use leasehold::future::Completion;
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

/// Counts how often it wakes, and wakes a thread.
struct Count(AtomicUsize, std::thread::Thread);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        self.1.unpark();
    }
}

#[test]
fn a_future_wakes_once_when_its_work_is_over_and_not_before() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let x = runtime.zeros::<u32>(4).unwrap();
    runtime.synchronize_timeout(LONG).unwrap();
    let held = hold(&stream);
    stream.fill(x.view(), 1u32).unwrap();
    let mut future = pin!(stream.completion());
    // The future does not wait for later work.
    let behind = hold(&stream);
    let count = Arc::new(Count(AtomicUsize::new(0), std::thread::current()));
    let waker = count.clone().into();
    let mut context = Context::from_waker(&waker);
    for _ in 0..3 {
        assert!(future.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    open(held);
    let end = std::time::Instant::now() + LONG;
    while count.0.load(Ordering::SeqCst) == 0 {
        std::thread::park_timeout(Duration::from_secs(1));
        assert!(std::time::Instant::now() < end, "nobody was woken");
    }
    assert!(matches!(future.as_mut().poll(&mut context), Poll::Ready(Ok(()))));
    assert!(!stream.query().unwrap());
    open(behind);
    stream.synchronize_timeout(LONG).unwrap();
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert_eq!(runtime.to_vec(&x).unwrap(), [1; 4]);
}

#[test]
fn timepoints_of_host_timelines_and_of_other_devices_are_awaited() {
    let world = World::new(5);
    let runtime = world.runtime("cpu:0");
    let gate = runtime.create_host_timeline().unwrap();
    let open = gate.next();
    let opened = Completion::of(&runtime, open);
    for name in ["sim:0", "cuda:0"] {
        let other = world.runtime(name);
        let x = other.zeros::<u32>(16).unwrap();
        let point = other.stream().now();
        let over = Completion::of(&runtime, point);
        let values = other.stream().download_async(&x);
        // Nothing happens by itself on a simulated device.
        std::thread::scope(|s| {
            s.spawn(|| other.synchronize_timeout(LONG).unwrap());
            block_on(over).unwrap();
            assert!(point.has_passed(), "{name}");
            assert_eq!(block_on(values).unwrap(), [0; 16], "{name}");
        });
    }
    gate.signal(open.value()).unwrap();
    block_on(opened).unwrap();
    // One that fails.
    let broken = runtime.create_host_timeline().unwrap();
    let failed = Completion::of(&runtime, broken.next());
    broken.fail(leasehold::Error::other("on purpose"));
    assert!(block_on(failed).unwrap_err().to_string().contains("on purpose"));
    world.check();
}

#[test]
fn a_download_has_the_values_of_its_place_in_the_stream() {
    let runtime = runtime();
    let stream = runtime.stream();
    let x = runtime.upload(&[1u32, 2, 3]).unwrap();
    let early = stream.download_async(&x);
    stream.fill(x.view(), 7u32).unwrap();
    let late = stream.download_async(x.slice(1..));
    assert_eq!(block_on(early).unwrap(), [1, 2, 3]);
    assert_eq!(block_on(late).unwrap(), [7, 7]);
    assert!(block_on(stream.download_async(x.slice(..0))).unwrap().is_empty());
    // Twelve bytes are no whole number of values.
    assert_eq!(kind(block_on(stream.download_async::<u64>(x.buffer()))), "InvalidArgument");
    runtime
        .record_graph(|recording| {
            assert_eq!(kind(block_on(recording.stream().download_async(&x))), "Recording");
            assert_eq!(kind(block_on(recording.stream().completion())), "Recording");
            Ok(())
        })
        .unwrap();
    let failing = runtime.create_stream().unwrap();
    failing.host_call("fails", || Err(leasehold::Error::other("on purpose"))).unwrap();
    let future = failing.download_async(&x);
    assert_eq!(kind(block_on(future)), "Fault");
}

/// The copy of a future that was dropped still comes, and its memory is nobody else's before.
#[test]
fn a_dropped_download_leaves_its_memory_to_the_copy() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let x = runtime.upload(&[5u8; 1 << 16]).unwrap();
    runtime.synchronize_timeout(LONG).unwrap();
    let held = hold(&stream);
    drop(stream.download_async(&x));
    let mut other = runtime.alloc_pinned_array::<u8>(1 << 16).unwrap();
    other.map().unwrap().fill(9);
    open(held);
    stream.synchronize_timeout(LONG).unwrap();
    assert!(other.map().unwrap().iter().all(|&b| b == 9));
}

/// Tasks of an executor with threads and timers, of which half give up in time.
#[test]
fn futures_work_in_tokio_beside_its_timers() {
    let runtime = runtime();
    let tokio = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .unwrap();
    let stuck = runtime.create_stream().unwrap();
    let held = hold(&stuck);
    tokio.block_on(async {
        let tasks: Vec<_> = (0..40u32)
            .map(|i| {
                let (runtime, stuck) = (runtime.clone(), stuck.clone());
                tokio::spawn(async move {
                    if i % 2 == 0 {
                        let x = runtime.upload(&[i; 64])?;
                        return runtime.stream().download_async(&x).await.map(|values| values[63]);
                    }
                    let waits = tokio::time::timeout(Duration::from_millis(5), stuck.completion());
                    assert!(waits.await.is_err(), "the stream is held");
                    Ok(i)
                })
            })
            .collect();
        for (i, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap().unwrap(), i as u32);
        }
    });
    open(held);
    tokio.block_on(stuck.completion()).unwrap();
}

struct Panics(Arc<AtomicUsize>);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("a waker that panics, on purpose");
    }
}

#[test]
fn a_waker_that_panics_fails_no_stream_and_that_of_a_dropped_future_is_not_called() {
    let runtime = runtime();
    for (gone, own) in [(false, false), (false, true), (true, false), (true, true)] {
        let stream = runtime.create_stream().unwrap();
        let held = hold(&stream);
        let mut future = if own { stream.completion() } else { Completion::of(&runtime, held.1) };
        let woken = Arc::new(AtomicUsize::new(0));
        let waker = Arc::new(Panics(woken.clone())).into();
        assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
        let future = (!gone).then_some(future);
        open(held);
        stream.synchronize_timeout(LONG).unwrap();
        future.map(block_on).transpose().unwrap();
        let stream = stream.runtime();
        assert_eq!(stream.to_vec(&stream.upload(&[1u32]).unwrap()).unwrap(), [1]);
        assert_eq!(woken.load(Ordering::Relaxed), usize::from(!gone), "{gone} {own}");
    }
}

#[test]
fn values_of_host_timelines_are_awaited_without_streams() {
    let runtime = runtime();
    let gates: Vec<_> = (0..600).map(|_| runtime.create_host_timeline().unwrap()).collect();
    let points: Vec<_> = gates.iter().map(leasehold::HostTimeline::next).collect();
    let waits: Vec<_> = points.iter().map(|&p| Completion::of(&runtime, p)).collect();
    runtime.create_stream().unwrap();
    for (i, (gate, point)) in std::iter::zip(gates, &points).enumerate() {
        match i % 3 {
            0 => gate.signal(point.value()).unwrap(),
            1 => gate.fail(leasehold::Error::NotFound("the producer".into())),
            _ => drop(gate),
        }
    }
    for (i, wait) in waits.into_iter().enumerate() {
        let kind = block_on(wait).map_or_else(|e| e.kind(), |()| "ok");
        assert_eq!(kind, ["ok", "NotFound", "InvalidState"][i % 3]);
    }
}
