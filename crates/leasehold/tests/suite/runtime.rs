//! Every method of document 002's API section, in Rust's spelling.

use crate::common::*;
use leasehold::infini::InfiniRuntime;
use leasehold::{DeviceId, EventFlags, HostKind, Layout, Runtime, View};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn a_device_has_one_runtime_in_a_context() {
    let context = context();
    let a = context.runtime(DeviceId::cpu(0)).unwrap();
    let b = context.runtime(DeviceId::cpu(0)).unwrap();
    assert!(a.same(&b) && a.same(&a.clone()));
    assert!(a.stream().same(b.stream()));
    assert!(!a.same(&runtime()), "another context has its own");
    assert_eq!(a.device(), DeviceId::cpu(0));
    assert_eq!(a.raw_device().handle(), b.raw_device().handle());
    assert_eq!(a.info().id, a.device());
}

#[test]
fn opened_by_many_threads_at_once_it_is_still_one() {
    let context = context();
    let runtimes: Vec<Runtime> = std::thread::scope(|s| {
        let handles: Vec<_> =
            (0..8).map(|_| s.spawn(|| context.runtime(DeviceId::cpu(0)).unwrap())).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    assert!(runtimes.iter().all(|r| r.same(&runtimes[0])));
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let context = context();
    let missing = context.runtime(DeviceId::cpu(7)).unwrap_err();
    assert_eq!(missing.kind(), "NotFound");
    // With a driver and without one, with the backend in the build and without it.
    for name in ["cuda:99", "mps:0"] {
        let missing = context.runtime(name.parse().unwrap()).unwrap_err();
        assert!(["Unavailable", "NotFound"].contains(&missing.kind()), "{missing}");
        assert!(missing.to_string().contains(name), "{missing}");
    }
    assert!(context.runtime(DeviceId::cpu(0)).is_ok(), "a failure changes nothing");
}

#[test]
fn activate_returns_itself_and_leaves_the_current_context_alone() {
    let runtime = runtime();
    assert!(std::ptr::eq(runtime.activate().unwrap().activate().unwrap(), &runtime));
    assert_eq!(kind(leasehold::Current::get()), "InvalidState");
}

#[test]
fn sync_stream_and_sync_device_wait_for_what_was_submitted() {
    let runtime = runtime();
    let other = runtime.create_stream().unwrap();
    let x = runtime.alloc(4).unwrap();
    let held = hold(&other);
    other.fill(x.view(), 3u32).unwrap();
    runtime.stream().synchronize().unwrap();
    assert!(!other.query().unwrap(), "the default stream is not the device");
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            open(held);
        });
        runtime.synchronize().unwrap();
    });
    assert!(other.query().unwrap());
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [3]);
}

#[test]
fn memory_is_lent_and_freed_by_the_last_lease() {
    let runtime = runtime();
    let before = runtime.allocator().stats().live_bytes;
    let a = runtime.alloc(1000).unwrap();
    assert_eq!((a.len(), a.addr() % 256), (1000, 0));
    let b = a.clone();
    drop(a);
    assert_eq!(runtime.allocator().stats().live_bytes, before + 1000);
    let handle = b.handle();
    drop(b);
    assert_eq!(runtime.allocator().stats().live_bytes, before);
    assert_eq!(kind(runtime.allocator().lease(handle)), "StaleHandle");
}

#[test]
fn nothing_is_a_buffer_too() {
    let runtime = runtime();
    let empty = runtime.alloc(0).unwrap();
    assert_eq!((empty.len(), empty.addr()), (0, 0));
    assert_eq!(runtime.to_vec::<f32>(&empty).unwrap(), [0f32; 0]);
    runtime.stream().upload::<u8>(empty.view(), &[]).unwrap();
    runtime
        .stream()
        .copy(empty.view(), empty.view())
        .and_then(|()| runtime.stream().synchronize())
        .unwrap();
    assert!(runtime.upload::<u32>(&[]).unwrap().is_empty());
}

#[test]
fn the_runtime_of_a_stream_makes_memory_for_that_stream() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let beside = stream.runtime();
    assert!(beside.same(&runtime) && beside.stream().same(&stream));
    assert!(runtime.stream().runtime().stream().same(runtime.stream()));
    // The default stream is held: what waits for it waits for ever.
    let held = hold(runtime.stream());
    let zeros = beside.zeros::<u32>(4).unwrap();
    assert_eq!(beside.to_vec(&zeros).unwrap(), [0; 4]);
    let x = beside.upload(&[1u32, 2, 3, 4]).unwrap();
    assert_eq!(beside.to_vec(&x).unwrap(), [1, 2, 3, 4]);
    // A block that the default stream still uses is free for that stream alone.
    let block = runtime.alloc(1 << 20).unwrap();
    runtime.stream().fill(block.view(), 1u8).unwrap();
    let addr = block.addr();
    drop(block);
    let other = beside.alloc(1 << 20).unwrap();
    assert_ne!(other.addr(), addr);
    assert_eq!(runtime.alloc(1 << 20).unwrap().addr(), addr);
    // A recording of it has its stream too, and its temporaries are for that stream.
    let graph = beside
        .record_graph(|r| {
            assert!(r.stream().is_recording() && r.same(&runtime));
            let t = r.alloc(16)?;
            r.stream().copy(t.view(), x.view())?;
            r.stream().copy(zeros.view(), t.view())
        })
        .unwrap();
    runtime.wait_for_timeout(graph.launch_on(&stream).unwrap(), LONG).unwrap();
    assert_eq!(beside.to_vec(&zeros).unwrap(), [1, 2, 3, 4]);
    // What all of the device's users share is made by the default stream.
    let made = beside.extension(|r| Ok(r.stream().same(runtime.stream()))).unwrap();
    assert!(*made && beside.stream().same(&stream));
    open(held);
    // A stream that failed is replaced by the default one.
    poison(&stream);
    let mut beside = beside;
    beside.replace_default_stream().unwrap();
    assert!(beside.stream().same(runtime.stream()));
    assert_eq!(beside.to_vec(&x).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn alignment_is_what_was_asked_for() {
    let runtime = runtime();
    for align in [1u64, 256, 4096, 1 << 16, 2 << 20] {
        let buffer = runtime.alloc_layout(Layout::aligned(100, align)).unwrap();
        assert_eq!(buffer.addr() % align.max(256), 0);
    }
    assert_eq!(kind(runtime.alloc_layout(Layout::aligned(100, 3))), "InvalidArgument");
}

#[test]
fn pinned_memory_falls_back_to_pageable_and_says_so_once() {
    let seen = Arc::new(leasehold::backend::sync::atomic::AtomicU32::new(0));
    let counter = Warnings(seen.clone());
    let runtime = runtime();
    tracing::subscriber::with_default(counter, || {
        // Should another test have warned first, where nobody listens, `tracing` would remember
        // that nobody does.
        drop(self::runtime().alloc_pinned(64).unwrap());
        tracing::callsite::rebuild_interest_cache();
        seen.store(0, leasehold::backend::sync::atomic::Ordering::Relaxed);
        let a = runtime.alloc_pinned(64).unwrap();
        let b = runtime.alloc_pinned(64).unwrap();
        assert_eq!((a.host_kind(), b.host_kind()), (HostKind::Pageable, HostKind::Pageable));
    });
    assert_eq!(seen.load(leasehold::backend::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn a_recording_of_nothing_is_warned_of() {
    let seen = Arc::new(leasehold::backend::sync::atomic::AtomicU32::new(0));
    let (runtime, warnings) = (runtime(), Warnings(seen.clone()));
    let (x, event) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.create_event().unwrap());
    tracing::subscriber::with_default(warnings, || {
        // As above.
        runtime.record_graph(|_| Ok(())).unwrap();
        tracing::callsite::rebuild_interest_cache();
        let count = |record: &dyn Fn(&Runtime) -> leasehold::Result<()>| {
            seen.store(0, leasehold::backend::sync::atomic::Ordering::Relaxed);
            runtime.record_graph(record).unwrap();
            seen.load(leasehold::backend::sync::atomic::Ordering::Relaxed)
        };
        assert_eq!(count(&|_| runtime.stream().fill(x.view(), 2u32)), 1, "by another runtime");
        assert_eq!(count(&|r| r.stream().fill(x.view(), 3u32)), 0);
        assert_eq!(count(&|r| r.stream().record(&event)), 0);
    });
}

struct Warnings(Arc<leasehold::backend::sync::atomic::AtomicU32>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, leasehold::backend::sync::atomic::Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn the_three_copies_in_both_forms() {
    let runtime = runtime();
    for asynchronous in [true, false] {
        for len in [1usize, 1000, 100_000] {
            let values: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let (a, b) = (runtime.alloc(len as u64).unwrap(), runtime.alloc(len as u64).unwrap());
            let mut source = values.clone();
            runtime.memcpy_h2d(a.view(), &source, asynchronous).unwrap();
            source.fill(0); // taken during the call
            runtime.memcpy_d2d(b.view(), a.view(), asynchronous).unwrap();
            let mut back = vec![0u8; len];
            runtime.memcpy_d2h(&mut back, b.view()).unwrap();
            assert_eq!(back, values);
        }
    }
}

#[test]
fn events_are_created_recorded_queried_waited_for_and_destroyed() {
    let runtime = runtime();
    let (start, end) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    let plain = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    assert!(start.has_timing() && !plain.has_timing());
    runtime.stream().record(&start).unwrap();
    runtime
        .stream()
        .host_call("nap", || {
            std::thread::sleep(Duration::from_millis(3));
            Ok(())
        })
        .unwrap();
    runtime.stream().record(&end).unwrap();
    runtime.stream().record(&plain).unwrap();
    plain.synchronize().unwrap();
    assert!(end.query().unwrap());
    let millis = runtime.elapsed_time(&start, &end).unwrap();
    assert!((2.9..5000.0).contains(&millis), "{millis} ms");
    let precise = end.elapsed_since(&start).unwrap();
    assert!((precise.as_secs_f64() * 1e3 - f64::from(millis)).abs() < 0.01);
    let other = runtime.create_stream().unwrap();
    other.wait_event(&end).unwrap();
    runtime.stream().wait_event(&end).unwrap();
    let handle = end.handle();
    assert!(runtime.event(handle).unwrap().same(&end));
    drop(end);
    assert_eq!(kind(runtime.event(handle)), "StaleHandle");
}

#[test]
fn a_recording_becomes_a_graph() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32, 2, 3, 4]).unwrap();
    let y = runtime.alloc(16).unwrap();
    assert!(!runtime.is_graph_recording());
    let recording = runtime.start_graph_recording().unwrap();
    assert!(runtime.is_graph_recording());
    recording.stream().copy(y.view(), x.view()).unwrap();
    let graph = runtime.stop_graph_recording().unwrap();
    assert!(!runtime.is_graph_recording());
    runtime.stream().fill(y.view(), 0u32).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [0; 4]);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn closing_waits_no_longer_than_it_is_told_to() {
    let runtime = runtime();
    let held = hold(runtime.stream());
    runtime.stream().host_call("nothing", || Ok(())).unwrap();
    assert_eq!(kind(runtime.clone().close(Duration::from_millis(5))), "Timeout");
    open(held);
    runtime.close(LONG).unwrap();
}

#[test]
fn dropping_never_waits_and_loses_nothing() {
    let (say, heard) = mpsc::channel();
    let runtime = runtime();
    let held = hold(runtime.stream());
    runtime
        .stream()
        .host_call("says", move || {
            say.send(()).ok();
            Ok(())
        })
        .unwrap();
    drop(runtime);
    assert!(heard.try_recv().is_err());
    open(held);
    heard.recv_timeout(LONG).expect("what was submitted runs to its end");
}

#[test]
fn extensions_are_made_once_and_end_with_the_runtime() {
    struct Library(Arc<()>);
    let runtime = runtime();
    let alive = Arc::new(());
    let a = runtime.extension(|_| Ok(Library(alive.clone()))).unwrap();
    let b = runtime.extension::<Library>(|_| panic!("it is there already")).unwrap();
    assert!(Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&a.0, &alive));
    let failed = runtime.extension::<u8>(|_| Err(leasehold::Error::state("not today")));
    assert_eq!(kind(failed), "InvalidState");
    assert_eq!(*runtime.extension(|_| Ok(7u8)).unwrap(), 7, "a failure keeps nothing");
    drop((a, b));
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(runtime);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn an_extension_that_is_too_many_may_use_the_runtime_as_it_goes() {
    // Two threads make one at the same time; the loser's is dropped, and asks for the slots as it
    // goes.
    struct Nosy(Runtime);
    impl Drop for Nosy {
        fn drop(&mut self) {
            let _ = self.0.extension(|_| Ok(1u64));
        }
    }
    struct Slot(leasehold::backend::sync::Mutex<Option<Nosy>>);
    let runtime = runtime();
    let both = std::sync::Barrier::new(2);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                runtime
                    .extension(|r| {
                        both.wait();
                        Ok(Slot(leasehold::backend::sync::Mutex::new(Some(Nosy(r.clone())))))
                    })
                    .unwrap();
            });
        }
    });
    // The one that stayed would keep the runtime for ever.
    let stayed = runtime.extension::<Slot>(|_| unreachable!()).unwrap();
    drop(stayed.0.lock().take());
}

#[test]
fn nothing_is_left_when_all_is_dropped() {
    let context = context();
    {
        let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
        let x = runtime.upload(&[1.0f32; 64]).unwrap();
        let y = runtime.upload(&[2.0f32; 64]).unwrap();
        let kernel = axpy();
        let stream = runtime.create_stream().unwrap();
        launch(&stream, &kernel, &[x.read(), y.read_write()], &1.0f32.to_ne_bytes(), 16).unwrap();
        let graph = runtime
            .record_graph(|r| {
                launch(r.stream(), &kernel, &[x.read(), y.read_write()], &1.0f32.to_ne_bytes(), 16)
                    .map(drop)
            })
            .unwrap();
        graph.launch_on(&stream).unwrap();
        let event = runtime.create_event().unwrap();
        stream.record(&event).unwrap();
        assert_eq!(kind(context.shutdown()), "LeasesOutstanding");
        runtime.synchronize().unwrap();
    }
    context.shutdown().unwrap();
    context.shutdown().unwrap();
    assert!(
        context.runtime(DeviceId::cpu(0)).is_err(),
        "a context that was shut down opens nothing"
    );
}

#[test]
fn leases_outlive_the_runtime() {
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let x = runtime.upload(&[5u32; 4]).unwrap();
    let stream = runtime.create_stream().unwrap();
    let event = runtime.create_event().unwrap();
    let kernel = axpy();
    kernel.prepare(&runtime).unwrap();
    drop((runtime, context));
    let y = stream.runtime().alloc(16).unwrap();
    stream.copy(y.view(), x.view()).unwrap();
    stream.record(&event).unwrap();
    stream.synchronize_timeout(LONG).unwrap();
    drop(stream);
    assert_eq!((x.len(), y.len()), (4, 16));
}

#[test]
fn a_pool_of_each_kind_is_reported() {
    let runtime = runtime();
    let _event = runtime.create_event().unwrap();
    let pools = runtime.pools();
    for name in ["event", "stream", "timestamp", "pipeline", "graph", "host timeline"] {
        assert!(pools.iter().any(|p| p.0 == name), "no {name} in {pools:?}");
    }
    assert_eq!(pools.iter().find(|p| p.0 == "event").unwrap().1.live, 1);
}
