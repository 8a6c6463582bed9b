//! A test of whether the traits support Metal: a backend over a Metal that records calls and runs
//! nothing, and the recorded sequences of calls.
//!
//! The mapping follows the rules of a Metal runtime. All streams share one queue, and commits are
//! batched. Encoders stay open across submissions and are always ended. Barriers derive from
//! declared accesses. A shared event orders command buffers. A buffer is a spanning native object
//! and an offset. After an error the completion handler sends the missing signals. The same backend
//! serves to test the wrappers.

mod device;
mod mtl;
mod stream;
mod wrappers;

use crate::device::MpsBackend;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Lease, Result};
use leasehold_hal::*;
use std::borrow::Cow;
use std::time::Duration;

/// A device with one stream.
struct Bench<B> {
    device: Lease<dyn Device>,
    stream: Lease<dyn Stream>,
    /// The timeline's first value; another stream may have had the timeline before.
    start: u64,
    /// Dropped last: it completes the stream's remaining work.
    backend: B,
}

impl Bench<MpsBackend> {
    fn new() -> Self {
        Self::of(MpsBackend::new(1))
    }

    /// The calls since the last query, after a check that no rule of Metal was broken.
    fn calls(&self) -> Vec<String> {
        assert_eq!(self.backend.world.broken_rules(), Vec::<String>::new());
        self.backend.world.calls()
    }
}

impl<B: Backend> Bench<B> {
    fn of(backend: B) -> Self {
        let device = backend.open(DeviceId::new(BackendKind::Mps, 0)).unwrap();
        let stream = device.stream(&StreamDesc::default()).unwrap();
        let start = stream.timeline().submitted();
        Self { device, stream, start, backend }
    }

    fn buffer(&self, bytes: u64) -> Lease<Buffer> {
        self.device
            .memory(MemoryKind::Device)
            .unwrap()
            .alloc(Layout::new(bytes), On::new(&*self.stream))
            .unwrap()
    }

    fn kernel(&self, name: &'static str, bindings: &[Access]) -> Lease<Pipeline> {
        self.device.pipeline(&kernel(name, bindings, 0)).unwrap()
    }

    fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        submit(&*self.stream, ops)
    }
}

fn kernel(name: &'static str, bindings: &[Access], params: u32) -> KernelDesc<'static> {
    let source = KernelSource::Msl(Cow::Borrowed("kernel void …"));
    KernelDesc { params, ..KernelDesc::new(name, source, bindings, KernelCheck::any()) }
}

fn submit(stream: &dyn Stream, ops: &[Op<'_>]) -> Result<u64> {
    // SAFETY: the tests keep their buffers to the end. Only copies of the completion handlers
    // access them.
    unsafe { stream.submit(ops) }
}

fn bound(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { addr: buffer.addr(), len: buffer.len(), native: buffer.native(), access }
}

fn dispatch<'a>(pipeline: &'a Lease<Pipeline>, bindings: &'a [Binding]) -> Op<'a> {
    Op::Dispatch(Dispatch {
        pipeline,
        grid: [2, 1, 1],
        block: [32, 1, 1],
        shared: 0,
        bindings,
        params: &[],
    })
}

/// Calls of the relevant kinds, without their operands.
fn kinds(calls: &[String]) -> Vec<&str> {
    let words = calls.iter().filter_map(|c| c.split(' ').next());
    words
        .filter(|w| {
            !matches!(
                *w,
                "pipeline" | "buffer" | "bytes" | "newBuffer" | "newHeap" | "newCommandQueue"
            )
        })
        .collect()
}

#[test]
fn barriers_stand_only_where_accesses_conflict_and_one_encoder_serves_several_submissions() {
    let b = Bench::new();
    let (x, y, z) = (b.buffer(1024), b.buffer(1024), b.buffer(1024));
    let copy = b.kernel("copy", &[Access::Read, Access::Write]);
    b.calls();
    let (read, write) = (Access::Read, Access::Write);
    b.submit(&[dispatch(&copy, &[bound(&x, read), bound(&y, write)])]).unwrap();
    b.submit(&[dispatch(&copy, &[bound(&x, read), bound(&z, write)])]).unwrap();
    // Reads the output of the first dispatch: the only barrier.
    b.submit(&[dispatch(&copy, &[bound(&y, read), bound(&x, write)])]).unwrap();
    assert_eq!(b.stream.timeline().completed(), b.start);
    assert_eq!(
        kinds(&b.calls()),
        [
            "commandBuffer",
            "computeEncoder",
            "waitForFence",
            "dispatch",
            "dispatch",
            "barrier",
            "dispatch"
        ]
    );
    assert_eq!(b.stream.signal().unwrap(), b.start + 3);
    assert_eq!(kinds(&b.calls()), ["updateFence", "endEncoding", "signal", "commit"]);
    b.backend.world.run();
    assert_eq!(b.stream.timeline().completed(), b.start + 3);
    b.stream.wait_host(b.start + 3, Some(Duration::ZERO)).unwrap();
}

#[test]
fn a_binding_is_its_spanning_buffer_and_an_offset() {
    let b = Bench::new();
    let (first, second) = (b.buffer(1000), b.buffer(1000));
    assert_eq!(first.native(), second.native(), "small buffers share a heap");
    let k = b.kernel("k", &[Access::Read, Access::Write]);
    b.calls();
    let tail = Binding { addr: second.addr() + 16, len: 8, ..bound(&second, Access::Write) };
    let (d, params) =
        (b.device.pipeline(&kernel("p", &[Access::Read, Access::Write], 8)).unwrap(), [7; 8]);
    let op = Dispatch {
        pipeline: &d,
        grid: [1; 3],
        block: [1; 3],
        shared: 64,
        bindings: &[bound(&first, Access::Read), tail],
        params: &params,
    };
    b.submit(&[Op::Dispatch(op)]).unwrap();
    let calls = b.calls();
    let base = calls
        .iter()
        .find_map(|c| c.strip_prefix("buffer +")?.strip_suffix(" at 0")?.parse::<u64>().ok())
        .unwrap();
    let offset = base + (second.addr() - first.addr()) + 16;
    for expected in [
        format!("buffer +{offset} at 1"),
        "bytes 8 at 2".into(),
        "threadgroup memory 64 at 0".into(),
    ] {
        assert!(calls.contains(&expected), "{expected} is not in {calls:?}");
    }
    drop(k);
}

#[test]
fn fifty_dispatches_commit_by_themselves_and_the_fence_carries_the_order() {
    let b = Bench::new();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    b.calls();
    for _ in 0..=stream::DISPATCHES_PER_BUFFER {
        b.submit(&[dispatch(&k, &bindings)]).unwrap();
    }
    let calls = b.calls();
    let kinds = kinds(&calls);
    let commit = kinds.iter().position(|k| *k == "commit").unwrap();
    assert_eq!(kinds[..commit].iter().filter(|k| **k == "dispatch").count(), 50);
    assert_eq!(
        kinds[commit + 1..],
        ["commandBuffer", "computeEncoder", "waitForFence", "dispatch"]
    );
    b.stream.flush().unwrap();
    b.backend.world.run();
    assert_eq!(b.stream.timeline().completed(), b.start + 51);
    b.calls();
    b.stream.flush().unwrap();
    assert!(b.calls().is_empty(), "nothing pending, nothing to do");
}

#[test]
fn blits_copies_fills_and_stamps_stand_in_encoders_of_their_own() {
    let b = Bench::new();
    let (x, y) = (b.buffer(1024), b.buffer(1024));
    let (start, end) = (b.device.timestamp().unwrap(), b.device.timestamp().unwrap());
    let fill = |pattern, width| {
        Op::Fill(Fill { dst: x.addr(), native: x.native(), bytes: 64, pattern, width })
    };
    b.calls();
    let copy = Copy2d {
        rows: 2,
        width: 8,
        src_pitch: 16,
        dst_pitch: 32,
        ..Copy2d::linear((x.addr(), x.native()), (y.addr(), y.native()), 8)
    };
    b.submit(&[
        Op::WriteTimestamp(&start),
        fill(7, 1),
        Op::Copy(copy),
        fill(0x1234, 2),
        Op::WriteTimestamp(&end),
    ])
    .unwrap();
    b.stream.signal().unwrap();
    assert_eq!(
        kinds(&b.calls()),
        [
            "commandBuffer",
            "computeEncoder",
            "endEncoding", // the first sample
            "blitEncoder",
            "waitForFence",
            "fill",
            "copy",
            "copy",
            "updateFence",
            "endEncoding",
            "computeEncoder",
            "waitForFence",
            "dispatch",
            "updateFence",
            "endEncoding", // two-byte patterns are a kernel
            "computeEncoder",
            "endEncoding",
            "signal",
            "commit",
        ]
    );
    // SAFETY: the timepoints are of this backend.
    assert_eq!(unsafe { b.device.elapsed(&start, &end) }.unwrap_err().kind(), "InvalidState");
    b.backend.world.run();
    // SAFETY: the timepoints are of this backend.
    assert_eq!(unsafe { b.device.elapsed(&start, &end) }.unwrap(), Duration::from_micros(1));
}

#[test]
fn a_wait_is_an_event_between_buffers_and_commits_its_source() {
    let b = Bench::new();
    let other = b.device.stream(&StreamDesc::default()).unwrap();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    b.calls();
    let value = b.submit(&[dispatch(&k, &bindings)]).unwrap();
    let after = b.stream.timeline().at(value);
    submit(&*other, &[dispatch(&k, &bindings), Op::Wait(after), dispatch(&k, &bindings)]).unwrap();
    other.flush().unwrap();
    assert_eq!(
        kinds(&b.calls()),
        [
            "commandBuffer",
            "computeEncoder",
            "waitForFence",
            "dispatch",
            "updateFence",
            "endEncoding",
            "signal",
            "commit", // the source, before the waiter takes its own lock
            "commandBuffer",
            "computeEncoder",
            "waitForFence",
            "dispatch",
            "updateFence",
            "endEncoding",
            "wait",
            "computeEncoder",
            "waitForFence",
            "dispatch",
            "updateFence",
            "endEncoding",
            "signal",
            "commit",
        ]
    );
    assert_eq!(b.backend.world.in_flight(), 2);
    b.backend.world.run();
    assert_eq!(b.backend.world.in_flight(), 0);
    assert!(other.timeline().is_idle());
}

#[test]
fn an_error_poisons_bumps_the_signal_and_reaches_who_waited() {
    let b = Bench::new();
    let other = b.device.stream(&StreamDesc::default()).unwrap();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    let value = b.submit(&[dispatch(&k, &bindings)]).unwrap();
    other.wait(b.stream.timeline().at(value)).unwrap();
    submit(&*other, &[dispatch(&k, &bindings)]).unwrap();
    other.flush().unwrap();
    assert!(b.backend.world.run_one(Some("MTLCommandBufferErrorOutOfMemory")));
    // Metal omitted the signal; the handler sent it, or the other buffer could never run.
    assert!(b.backend.world.run_one(None));
    for stream in [&b.stream, &other] {
        let last = stream.timeline().submitted();
        let e = stream.wait_host(last, Some(Duration::from_secs(5))).unwrap_err();
        assert!(e.to_string().contains("MTLCommandBufferErrorOutOfMemory"), "{e}");
        assert!(stream.timeline().is_idle(), "nobody may hang on a failed timeline");
        assert!(submit(&**stream, &[]).is_err(), "later calls return the cause");
    }
    b.calls();
}

#[test]
fn a_host_timeline_holds_back_its_stream_and_no_other_on_the_same_queue() {
    let b = Bench::new();
    let other = b.device.stream(&StreamDesc::default()).unwrap();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    let host_timeline = b.device.host_timeline().unwrap();
    let at = host_timeline.timeline().submitted() + 1;
    b.submit(&[Op::Wait(host_timeline.timeline().at(at)), dispatch(&k, &bindings)]).unwrap();
    b.stream.flush().unwrap();
    submit(&*other, &[dispatch(&k, &bindings)]).unwrap();
    other.flush().unwrap();
    b.backend.world.run();
    assert!(other.timeline().is_idle() && !b.stream.timeline().is_idle());
    host_timeline.signal_host(at).unwrap();
    assert_eq!(host_timeline.signal_host(at).unwrap_err().kind(), "InvalidArgument");
    b.backend.world.run();
    assert!(b.stream.timeline().is_idle());
    b.calls();
}

#[test]
fn host_copies_go_through_staging_and_complete_after_the_bytes_arrived() {
    let b = Bench::new();
    let x = b.buffer(1024);
    let (from, mut to) = ([1u8, 2, 3, 4], [0u8; 4]);
    let up = Upload { src: from.as_ptr(), dst: x.addr(), native: x.native(), bytes: 4, keep: None };
    let down =
        Download { src: x.addr(), native: x.native(), dst: to.as_mut_ptr(), bytes: 4, keep: None };
    b.submit(&[Op::Upload(up), Op::Download(down)]).unwrap();
    b.stream.signal().unwrap();
    b.backend.world.run();
    b.stream.wait_host(b.start + 1, None).unwrap();
    // The recording Metal copies nothing between its buffers: the result is the empty staging
    // memory.
    assert_eq!(to, [0; 4]);
    let calls = b.calls();
    assert_eq!(calls.iter().filter(|c| c.starts_with("copy +")).count(), 2);
}

#[test]
fn a_dropped_stream_ends_its_encoder_and_its_work_runs() {
    let b = Bench::new();
    let other = b.device.stream(&StreamDesc::default()).unwrap();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let value = submit(&*other, &[dispatch(&k, &[bound(&x, Access::ReadWrite)])]).unwrap();
    let point = other.timeline().at(value);
    b.calls();
    drop(other);
    assert_eq!(kinds(&b.calls()), ["updateFence", "endEncoding", "signal", "commit"]);
    // The timepoint outlives its stream.
    b.submit(&[Op::Wait(point)]).unwrap();
    b.stream.flush().unwrap();
    b.backend.world.run();
    assert!(point.is_settled() && b.stream.timeline().is_idle());
}

#[test]
fn graphs_are_encoded_anew_and_libraries_get_the_command_buffer() {
    let b = Bench::new();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    let mut ops = OpList::new();
    for _ in 0..3 {
        ops.push(&dispatch(&k, &bindings));
    }
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { b.device.instantiate(Plan::new(ops)) }.unwrap();
    let native = Arc::new(AtomicU64::new(0));
    let seen = native.clone();
    let library = ForeignCall::new("MPSMatrixMultiplication", bindings.to_vec(), move |word| {
        seen.store(word, Ordering::Relaxed);
        Ok(())
    });
    b.calls();
    b.submit(&[Op::Graph(&graph), Op::Foreign(&library), Op::Graph(&graph)]).unwrap();
    b.stream.flush().unwrap();
    let launch = [
        "computeEncoder",
        "waitForFence",
        "dispatch",
        "barrier",
        "dispatch",
        "barrier",
        "dispatch",
        "updateFence",
        "endEncoding",
    ];
    assert_eq!(
        kinds(&b.calls()),
        [&["commandBuffer"][..], &launch, &launch, &["signal", "commit"]].concat()
    );
    assert_ne!(native.load(Ordering::Relaxed), 0);
    let patch = NodePatch { node: 1, bindings: None, params: None, grid: Some([9, 1, 1]) };
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { graph.update(&[patch]) }.unwrap();
    assert_eq!(
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        unsafe { graph.update(&[NodePatch { node: 3, ..patch }]) }.unwrap_err().kind(),
        "InvalidArgument"
    );
    b.submit(&[Op::Graph(&graph)]).unwrap();
    assert!(b.calls().contains(&"dispatch [9, 1, 1] [32, 1, 1]".to_owned()));
    b.stream.flush().unwrap();
    b.backend.world.run();
}

#[test]
fn what_metal_cannot_do_is_unsupported_and_leaves_the_stream_as_it_was() {
    let b = Bench::new();
    let call = HostCall::new("call", || Ok(()));
    assert_eq!(b.submit(&[Op::Host(&call)]).unwrap_err().kind(), "Unsupported");
    assert_eq!(b.stream.timeline().submitted(), b.start);
    let e = b
        .device
        .pipeline(&KernelDesc {
            source: KernelSource::Ptx(Cow::Borrowed("")),
            ..kernel("k", &[], 0)
        })
        .unwrap_err();
    assert_eq!(e.kind(), "Unsupported");
    assert_eq!(b.device.pipeline(&kernel("missing", &[], 0)).unwrap_err().kind(), "NotFound");
    assert_eq!(b.backend.open(DeviceId::new(BackendKind::Mps, 1)).unwrap_err().kind(), "NotFound");
    b.submit(&[]).unwrap();
    b.stream.flush().unwrap();
    b.backend.world.run();
    b.calls();
}

#[test]
fn many_threads_submit_to_one_stream() {
    let b = Bench::new();
    let x = b.buffer(1024);
    let k = b.kernel("k", &[Access::ReadWrite]);
    let bindings = [bound(&x, Access::ReadWrite)];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..40 {
                    b.submit(&[dispatch(&k, &bindings)]).unwrap();
                }
            });
        }
    });
    b.stream.flush().unwrap();
    b.backend.world.run();
    assert_eq!(b.stream.timeline().completed(), b.start + 160);
    assert_eq!(kinds(&b.calls()).iter().filter(|k| **k == "dispatch").count(), 160);
}
