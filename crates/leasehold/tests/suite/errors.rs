//! Mistakes and failures: each is an error that says what it is, and leaves the rest usable.

use crate::between::World;
use crate::common::*;
use leasehold::{DeviceId, Error, EventFlags, HostTimeline, KernelSession, Timepoint, View, ops};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[test]
fn memory_and_streams_of_another_runtime_are_refused() {
    let (a, b) = (runtime(), runtime());
    let (x, y) = (a.upload(&[1u32; 4]).unwrap(), b.upload(&[2u32; 4]).unwrap());
    let refused = [
        kind(a.stream().copy(x.view(), y.view())),
        kind(b.stream().copy(x.view(), y.view())),
        kind(a.stream().fill(y.view(), 0u8)),
        kind(a.stream().upload(y.view(), &[0u32; 4])),
        kind(a.to_vec::<u32>(&y)),
        kind(a.stream().upload_owned(y.view(), vec![0u8; 16])),
        // SAFETY: nothing is touched.
        kind(unsafe { a.stream().map_read(y.view()) }),
        // SAFETY: it does nothing.
        kind(unsafe { a.stream().foreign_call("f", &[y.read()], |_, _| Ok(())) }),
    ];
    assert_eq!(refused, ["InvalidArgument"; 8]);
    let error = a.to_vec::<u32>(&y).unwrap_err().to_string();
    assert!(error.contains("16 bytes") && error.contains("it is of another context"), "{error}");
    assert_eq!(
        (a.to_vec::<u32>(&x).unwrap(), b.to_vec::<u32>(&y).unwrap()),
        (vec![1; 4], vec![2; 4])
    );
}

#[test]
fn after_a_kernel_trapped_every_call_tells_the_first_cause() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let x = runtime.upload(&vec![1u32; 50_000]).unwrap();
    let trap = trap();
    launch(&stream, &trap, &[x.read_write()], &[], 1).unwrap();
    let first = stream.synchronize_timeout(LONG).unwrap_err();
    assert!(matches!(first, Error::Fault(_)) && first.to_string().contains("trap"), "{first}");
    assert!(first.to_string().contains("a kernel that traps"), "{first}");
    let y = runtime.alloc(200_000).unwrap();
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    let settled = runtime.stream().now();
    let bytes = vec![0u8; 200_000];
    let later: Vec<Error> = vec![
        KernelSession::begin(&trap, &stream).unwrap_err(),
        stream.copy(y.view(), x.view()).unwrap_err(),
        stream.fill(y.view(), 0u8).unwrap_err(),
        stream.upload(y.view(), &bytes).unwrap_err(),
        stream.upload(y.part(..8).unwrap(), &bytes[..8]).unwrap_err(),
        stream.download(&mut vec![0u8; 200_000], y.view()).unwrap_err(),
        stream.record(&event).unwrap_err(),
        stream.wait(settled).unwrap_err(),
        stream.host_call("h", || Ok(())).unwrap_err(),
        stream.query().unwrap_err(),
        stream.failure().unwrap(),
    ];
    for error in later {
        assert_eq!(error.to_string(), first.to_string());
    }
    assert!(runtime.stream().failure().is_none());
    runtime.stream().fill(y.view(), 4u32).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), vec![4; 50_000]);
}

#[test]
fn a_failure_reaches_who_reads_its_result_and_ends_when_it_is_overwritten() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let [x, y, z] = [1u32; 3].map(|i| runtime.upload(&[i; 4]).unwrap());
    runtime.synchronize().unwrap();
    launch(&stream, &trap(), &[x.read_write()], &[], 1).unwrap();
    let cause = stream.synchronize_timeout(LONG).unwrap_err().to_string();
    let reader = runtime.create_stream().unwrap();
    let read = reader.copy(y.view(), x.view()).and_then(|()| reader.synchronize_timeout(LONG));
    assert_eq!(read.unwrap_err().to_string(), cause);
    // Two hops.
    let second = runtime.create_stream().unwrap();
    let third = second.wait(reader.now()).and_then(|()| second.synchronize_timeout(LONG));
    if reader.now().value() > 0 {
        assert_eq!(third.unwrap_err().to_string(), cause);
    }
    // A part is not all of it: the rest is still the failed one's.
    let partial = runtime.create_stream().unwrap();
    let part = partial.fill(x.part(..4).unwrap(), 0u8);
    assert!(part.and_then(|()| partial.synchronize_timeout(LONG)).is_err());
    // Nor are rows with gaps between them, though they lie in a part that is all of it.
    let rows = runtime.create_stream().unwrap();
    let copied = rows.copy_2d(x.view(), z.view(), ops::Rows::new(4, 2).src_pitch(12).dst_pitch(12));
    assert!(copied.and_then(|()| rows.synchronize_timeout(LONG)).is_err());
    // All of it is.
    runtime.stream().fill(x.view(), 9u32).unwrap();
    runtime.stream().fill(y.view(), 9u32).unwrap();
    runtime.stream().synchronize().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [9; 4]);
    let fresh = runtime.create_stream().unwrap();
    fresh.copy(y.view(), x.view()).unwrap();
    fresh.synchronize_timeout(LONG).unwrap();
}

/// The fault comes first, and what to do about it after it.
#[test]
fn messages_of_misuse_name_the_cure() {
    let (runtime, other) = (runtime(), runtime());
    let (stream, x) = (runtime.stream(), runtime.upload(&[1.0f32; 4]).unwrap());
    let y = runtime.zeros::<f32>(4).unwrap();
    let foreign = other.upload(&[1.0f32; 4]).unwrap();
    let untimed = runtime.create_event_with(EventFlags::DISABLE_TIMING).unwrap();
    let fresh = runtime.create_event().unwrap();
    let (axpy, graph) = (axpy(), other.record_graph(|_| Ok(())).unwrap());
    let axpy_with = |operands: &[leasehold::Operand<'_>], params: &[u8]| {
        launch(stream, &axpy, operands, params, 1).map(drop)
    };
    let number = 1.0f32.to_ne_bytes();
    let lent = std::cell::OnceCell::new();
    runtime.record_graph(|r| lent.set(r.clone()).map_err(|_| Error::state("twice"))).unwrap();
    let over = lent.get().unwrap();
    let cures = [
        (stream.copy(x.view(), foreign.view()), "Open both devices in one context"),
        (stream.fill(foreign.view(), 0u8), "copy through the host"),
        (stream.copy(x.view(), x.view()), "by way of another buffer"),
        (stream.copy(x.view(), x.slice(1..).view()), "take a part of the larger one"),
        (stream.copy_pinned(x.view(), x.view()), "Runtime::alloc_pinned"),
        (x.part(3..17).map(drop), "end at 16 at most"),
        (x.as_view().try_slice(3..5).map(drop), "end at 4 at most"),
        (runtime.to_vec::<[u8; 3]>(x.view()).map(drop), "take a part that is"),
        (stream.record(&other.create_event().unwrap()), "create it on the runtime of this stream"),
        (fresh.elapsed_since(&untimed).map(drop), "Runtime::create_event"),
        (fresh.elapsed_since(&fresh).map(drop), "Stream::record"),
        (stream.wait(stream.raw().timeline().at(stream.now().value() + 9)), "another stream's"),
        (runtime.wait_for_any(&[], LONG).map(drop), "give one at least"),
        (axpy_with(&[x.read()], &number), "give as many"),
        (axpy_with(&[x.read(), x.read()], &number), "bind it by `read_write()`"),
        (axpy_with(&[x.read(), x.read_write()], &number), "give it memory of its own"),
        (axpy_with(&[x.read(), y.read_write()], &[1]), "pass the type that it declares"),
        (graph.launch_on(stream).map(drop), "of the runtime that recorded the graph"),
        (runtime.stop_graph_recording().map(drop), "start_graph_recording"),
        (over.stream().fill(x.view(), 0u8), "begin another one"),
        (over.synchronize(), "the runtime that the recording was begun on"),
        (runtime.alloc(1 << 50).map(drop), "split it"),
        (runtime.alloc_array::<[u64; 1024]>(usize::MAX).map(drop), "allocate fewer"),
    ];
    for (result, cure) in cures {
        let text = result.expect_err(cure).to_string();
        assert!(text.contains(cure), "{text:?} does not say {cure:?}");
    }
}

#[test]
fn memory_of_a_failed_stream_is_as_good_as_new() {
    let runtime = runtime();
    for round in 0..20 {
        let stream = runtime.create_stream().unwrap();
        let layout = leasehold::Layout::new(1 << 20);
        let x = stream.runtime().alloc_layout(layout).unwrap();
        launch(&stream, &trap(), &[x.read_write()], &[], 1).unwrap();
        drop(x);
        assert!(stream.synchronize_timeout(LONG).is_err());
        let other = runtime.create_stream().unwrap();
        let y = other.runtime().alloc_layout(layout).unwrap();
        other.fill(y.view(), ops::Pattern::U32(round)).unwrap();
        other.synchronize_timeout(LONG).unwrap();
    }
    assert!(runtime.allocator().stats().reserved <= 64 << 20, "{:?}", runtime.allocator().stats());
}

/// A failure is told before what failed is over; the device is synchronised once it is.
#[test]
fn a_device_that_was_synchronised_has_nothing_at_work_even_after_a_failure() {
    let runtime = runtime();
    for _ in 0..300 {
        let x = runtime.alloc(64).unwrap();
        let stream = runtime.create_stream().unwrap();
        launch(&stream, &trap(), &[x.read_write()], &[], 1).unwrap();
        let point = stream.now();
        assert!(runtime.synchronize().is_err());
        assert!(point.timeline().completed() >= point.value(), "{point:?} is still at work");
    }
}

#[test]
fn a_stream_does_not_wait_for_itself() {
    let runtime = runtime();
    let stream = runtime.stream();
    let future = stream.raw().timeline().at(stream.now().value() + 10);
    assert_eq!(kind(stream.wait(future)), "InvalidArgument");
    stream.wait(stream.now()).unwrap();
}

#[test]
fn asking_for_too_much_is_refused_and_nothing_is_lost() {
    let runtime = runtime();
    for bytes in
        [u64::MAX, 1 << 63, (1 << 60) + 1, 1 << 59, 1 << 50, runtime.info().memory.total + 1]
    {
        let recorded = runtime.record_graph(|r| r.alloc(bytes).map(drop));
        for asked in [runtime.alloc(bytes).map(drop), recorded.map(drop)] {
            let Err(Error::OutOfMemory(report)) = asked else { panic!("{bytes} bytes: {asked:?}") };
            assert_eq!(report.requested, bytes);
            let text = report.to_string();
            assert!(text.contains(" in all: split it, or use a larger device"), "{text}");
        }
    }
    let none = leasehold::Runtime::open(DeviceId::cpu(1)).unwrap_err().to_string();
    assert_eq!(none, "not found: cpu:1: cpu:0 is the only device here");
    let text = runtime.alloc(1 << 50).unwrap_err().to_string();
    assert!(
        text.starts_with("out of memory: 1.00 PiB requested from cpu:0 device memory"),
        "{text}"
    );
    let x = runtime.upload(&[3u8; 100]).unwrap();
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), [3; 100]);
}

/// Signals a host timeline late, if nobody is faster: a wait without an end fails its test.
fn late(gate: HostTimeline, go: Timepoint) -> (Sender<()>, JoinHandle<()>) {
    let (in_time, waits) = channel();
    let watch = std::thread::spawn(move || {
        let _ = waits.recv_timeout(LONG);
        gate.signal(go.value()).unwrap();
    });
    (in_time, watch)
}

/// The work may wait for the very thread that allocates.
#[test]
fn an_allocation_waits_for_no_work_that_cannot_help() {
    let world = World::new(8);
    for name in ["cpu:0", "sim:0", "cuda:0"] {
        let runtime = world.runtime(name);
        let busy = runtime.create_stream().unwrap();
        let (gate, go) = hold(&busy);
        let (in_time, watch) = late(gate, go);
        let (held, small) = (runtime.alloc(16 << 20).unwrap(), runtime.alloc(4096).unwrap());
        busy.fill(small.view(), 1u8).unwrap();
        drop(small);
        let began = Instant::now();
        assert_eq!(kind(runtime.alloc(1 << 50)), "OutOfMemory", "{name}");
        runtime.allocator().set_budget(64 << 20);
        assert_eq!(kind(runtime.alloc(60 << 20)), "OutOfMemory", "{name}");
        assert!(began.elapsed() < LONG, "{name}: it waited");
        drop((in_time, held));
        watch.join().unwrap();
        busy.synchronize_timeout(LONG).unwrap();
    }
}

/// Two pieces that different streams use serve no stream before both are over.
#[test]
fn an_allocation_waits_as_long_as_its_stream_allows() {
    const HALF: u64 = 16 << 20;
    let world = World::new(8);
    for runtime in ["cpu:0", "sim:0", "cuda:0"].map(|name| world.runtime(name)) {
        runtime.allocator().set_budget(2 * HALF);
        let streams = [(); 2].map(|()| runtime.create_stream().unwrap());
        let gates = streams.each_ref().map(hold);
        let pieces = streams.each_ref().map(|stream| stream.runtime().alloc(HALF).unwrap());
        for (stream, piece) in std::iter::zip(&streams, &pieces) {
            stream.fill(piece.view(), 1u8).unwrap();
        }
        drop(pieces);
        let (senders, watches): (Vec<_>, Vec<_>) =
            gates.into_iter().map(|(gate, go)| late(gate, go)).unzip();
        runtime.stream().set_submit_timeout(Duration::from_millis(50));
        let began = Instant::now();
        let error = runtime.alloc(2 * HALF).unwrap_err();
        let took = began.elapsed();
        assert!(error.is_out_of_memory() && error.to_string().contains("timeout"), "{error}");
        assert!(took < Duration::from_secs(5), "{took:?}");
        drop(senders);
        watches.into_iter().for_each(|watch| watch.join().unwrap());
        runtime.stream().set_submit_timeout(LONG);
        drop(runtime.alloc(2 * HALF).unwrap());
    }
}

#[test]
fn a_budget_is_kept() {
    let runtime = runtime();
    drop(runtime.alloc(1 << 20).unwrap());
    let reserved = runtime.allocator().stats().reserved;
    runtime.allocator().set_budget(reserved);
    assert!(runtime.alloc(256 << 20).is_err());
    runtime.allocator().set_budget(u64::MAX);
    drop(runtime.alloc(1 << 20).unwrap());
}

#[test]
fn errors_name_what_was_asked() {
    let runtime = runtime();
    let x = runtime.upload(&[0u8; 16]).unwrap();
    let says = |error: Error, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text:?} should say {words:?}");
    };
    says(x.part(10..20).unwrap_err(), &["10", "16 bytes"]);
    says(runtime.stream().upload(x.view(), &[0u8; 3]).unwrap_err(), &["3", "16"]);
    says(launch(runtime.stream(), &axpy(), &[x.read()], &[], 1).unwrap_err(), &["axpy", "2", "1"]);
    says(
        leasehold::Context::with_backends(Vec::new()).runtime(DeviceId::cpu(0)).unwrap_err(),
        &["cpu:0"],
    );
}

/// A failure known as the work is submitted is refused: eager work of each kind, and launches.
#[test]
fn work_that_needs_what_failed_is_refused_and_its_stream_goes_on() {
    let runtime = runtime();
    let (bad, good) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let own = good.runtime();
    let (b, c) = (runtime.upload(&[1.0f32; 4]).unwrap(), own.upload(&[2.0f32; 4]).unwrap());
    let pinned = own.alloc_pinned(16).unwrap();
    let reading = own.record_graph(|r| r.stream().copy(c.view(), b.view())).unwrap();
    runtime.synchronize().unwrap();
    let fails = |_, _: &[leasehold::backend::Binding]| Err(Error::NotFound("on purpose".into()));
    // SAFETY: the call touches no memory.
    unsafe { bad.foreign_call("fails", &[b.write()], fails) }.unwrap();
    assert!(bad.synchronize_timeout(LONG).is_err());
    let none = 1.0f32.to_le_bytes();
    let axpy = axpy();
    let refused = |what: &str, result: leasehold::Result<()>| {
        let text = result.expect_err(what).to_string();
        assert!(text.contains("on purpose"), "{what}: {text}");
        assert!(good.failure().is_none(), "{what}: the reader's stream has failed");
    };
    refused("a copy", good.copy(c.view(), b.view()));
    refused("a download", own.to_vec(&b).map(drop));
    refused("a pinned copy", good.copy_pinned(pinned.view(), b.view()));
    refused("a part", good.fill(b.slice(..1).view(), 1u32));
    refused("a launch", launch(&good, &axpy, &[b.read(), c.read_write()], &none, 1).map(drop));
    refused(
        "an accumulation",
        launch(&good, &axpy, &[c.read(), b.read_write()], &none, 1).map(drop),
    );
    refused("a launch of a graph", reading.launch().map(drop));
    refused("a launch elsewhere", reading.launch_on(&good).map(drop));
    refused("a look", good.inspect("look", b.view(), |_| Ok(())));
    // SAFETY: the call touches no memory.
    refused("a foreign call", unsafe { good.foreign_call("reads", &[b.read()], |_, _| Ok(())) });
    good.fill(c.view(), 0u32).unwrap();
    good.fill(b.view(), 0u32).unwrap();
    good.copy(c.view(), b.view()).unwrap();
    reading.launch().unwrap();
    assert_eq!(own.to_vec(&c).unwrap(), [0.0; 4]);
}
