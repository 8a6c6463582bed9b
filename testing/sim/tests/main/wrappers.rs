//! `hal`'s wrappers around the backend: correct calls pass unchanged, wrong ones never reach the
//! machine.

use crate::backend::order;
use crate::{bind, config};
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, TimelineOwner};
use leasehold_hal::{
    Access, Backend, BackendKind, Binding, Copy2d, CpuArgs, Device, DeviceId, Dispatch, Download,
    Fill, HostCall, KernelCheck, KernelDesc, KernelSource, MemoryKind, NodePatch, Op, OpList,
    Pipeline, Plan, Stream, StreamDesc, Traced, Upload, Validated, traced,
};
use leasehold_sim::SimBackend;
use std::borrow::Cow;
use std::fmt::Write as _;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

const READ: Access = Access::Read;
const WRITE: Access = Access::Write;

/// A backend with one stream on its first device.
struct Bench<B> {
    device: Lease<dyn Device>,
    stream: Lease<dyn Stream>,
    backend: B,
}

impl<B: Backend> Bench<B> {
    fn of(backend: B) -> Self {
        let device = backend.open(DeviceId::new(BackendKind::Sim, 0)).unwrap();
        let stream = device.stream(&StreamDesc::default()).unwrap();
        Self { device, stream, backend }
    }

    fn buffer(&self, bytes: u64) -> Lease<Buffer> {
        let memory = self.device.memory(MemoryKind::Device).unwrap();
        memory.alloc(Layout::new(bytes), On::new(&*self.stream)).unwrap()
    }

    fn kernel(&self, name: &'static str, bindings: &[Access]) -> Lease<Pipeline> {
        self.device.pipeline(&kernel(name, bindings, 0)).unwrap()
    }

    fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        submit(&*self.stream, ops)
    }
}

/// A device that lacks what its machine could do, so that these refusals can be seen too.
fn lesser(devices: u32) -> SimBackend {
    let config = config(1).devices(devices, 1 << 30).trace(true);
    // SAFETY: the description takes away two capabilities, and asks for an alignment.
    let made = unsafe {
        SimBackend::with_description(config, |caps, limits| {
            (caps.host_calls, caps.waits_for_any_timeline) = (false, false);
            limits.binding_alignment = 4;
        })
    };
    made.unwrap()
}

fn bench() -> Bench<Validated<SimBackend>> {
    Bench::of(Validated::new(lesser(2)).unwrap())
}

impl Bench<Validated<SimBackend>> {
    /// The submission is refused with its place in the message, and no call arrived.
    #[track_caller]
    fn refused(&self, ops: &[Op<'_>], kind: &str, says: &str) {
        let before = self.stream.timeline().submitted();
        let calls = self.backend.inner().machine().calls();
        let e = self.submit(ops).unwrap_err();
        let index = ops.len() - 1;
        let place = format!(
            "{} (operation {index} of submission {} of timeline",
            ops[index].name(),
            before + 1
        );
        let text = e.to_string();
        assert!(e.kind() == kind && text.contains(&place) && text.contains(says), "{e:?}");
        assert_eq!(self.stream.timeline().submitted(), before);
        assert_eq!(self.backend.inner().machine().calls(), calls);
    }
}

unsafe fn nothing(_: &CpuArgs<'_>) {}

fn kernel(name: &'static str, bindings: &[Access], params: u32) -> KernelDesc<'static> {
    let source = KernelSource::Cpu(nothing);
    KernelDesc { params, ..KernelDesc::new(name, source, bindings, KernelCheck::any()) }
}

fn missing() -> KernelDesc<'static> {
    let source = KernelSource::Registered("missing".into());
    KernelDesc::new("missing", source, &[], KernelCheck::any())
}

fn submit(stream: &dyn Stream, ops: &[Op<'_>]) -> Result<u64> {
    // SAFETY: the kernels do nothing, and the tests keep buffers and host memory until the work is
    // over. Operations that break another rule are refused.
    unsafe { stream.submit(ops) }
}

fn bound(buffer: &Lease<Buffer>, access: Access) -> Binding {
    Binding { native: buffer.native(), ..bind(buffer.addr(), buffer.len(), access) }
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

#[test]
fn dispatches_are_checked_against_their_kernel_and_the_limits() {
    let b = bench();
    let (x, y) = (b.buffer(1000), b.buffer(1000));
    let k = b.device.pipeline(&kernel("k", &[READ, WRITE], 4)).unwrap();
    let good = [bound(&x, READ), bound(&y, WRITE)];
    let op = Dispatch {
        pipeline: &k,
        grid: [1; 3],
        block: [8, 1, 1],
        shared: 0,
        bindings: &good,
        params: &[0; 4],
    };
    let wrong =
        |op: Dispatch<'_>, says: &str| b.refused(&[Op::Dispatch(op)], "InvalidArgument", says);
    wrong(Dispatch { bindings: &good[..1], ..op }, "kernel k takes 2 bindings, not 1");
    wrong(
        Dispatch { bindings: &[good[0], bound(&y, READ)], ..op },
        "binding 1 is bound as read; kernel k declares it as written",
    );
    wrong(Dispatch { params: &[0; 3], ..op }, "kernel k takes 4 bytes of parameters, not 3");
    wrong(Dispatch { block: [1025, 1, 1], ..op }, "1025 threads");
    wrong(Dispatch { block: [64, 32, 1], ..op }, "2048 threads");
    wrong(Dispatch { block: [0, 1, 1], ..op }, "has none");
    wrong(Dispatch { grid: [1, 70_000, 1], ..op }, "a grid of [1, 70000, 1]");
    wrong(Dispatch { shared: 1 << 20, ..op }, "shared memory");
    let with = |b: Binding| [good[0], b];
    let y = good[1];
    wrong(Dispatch { bindings: &with(Binding { addr: 0, ..y }), ..op }, "null");
    wrong(
        Dispatch { bindings: &with(Binding { addr: y.addr + 2, len: 8, ..y }), ..op },
        "not aligned to 4",
    );
    wrong(
        Dispatch { bindings: &with(Binding { len: 1001, ..y }), ..op },
        "go beyond their buffer, which is 1000 bytes",
    );
    wrong(Dispatch { bindings: &with(Binding { addr: 1 << 63 | 512, ..y }), ..op }, "recording");
    wrong(Dispatch { bindings: &with(Binding { native: 77, ..y }), ..op }, "native object");
    wrong(Dispatch { bindings: &with(Binding { addr: 1 << 20, ..y }), ..op }, "no live buffer");
    let gone = bound(&b.buffer(8), Access::ReadWrite);
    wrong(Dispatch { bindings: &with(gone), ..op }, "no live buffer");
    // A part of a buffer, an empty binding, more bytes than the kernel needs, an empty grid: all
    // are valid.
    for last in [Binding { len: 4, addr: y.addr + 4, ..y }, Binding { addr: 0, len: 0, ..y }] {
        b.submit(&[Op::Dispatch(Dispatch { bindings: &with(last), ..op })]).unwrap();
    }
    b.submit(&[Op::Dispatch(Dispatch {
        bindings: &with(Binding { access: Access::ReadWrite, ..y }),
        ..op
    })])
    .unwrap();
    b.submit(&[Op::Dispatch(Dispatch { grid: [0, 1, 1], ..op })]).unwrap();
}

#[test]
fn a_dropped_buffer_is_found_out_and_so_is_what_follows_a_good_operation() {
    let b = bench();
    let (x, y) = (b.buffer(100_000), b.buffer(100_000));
    let k = b.kernel("k", &[WRITE]);
    let (gone, kept) = ([bound(&x, WRITE)], [bound(&y, WRITE)]);
    drop(x);
    b.refused(
        &[dispatch(&k, &kept), dispatch(&k, &gone)],
        "InvalidArgument",
        "was the buffer dropped?",
    );
}

#[test]
fn copies_fills_and_host_copies_are_checked() {
    let b = bench();
    let (x, y) = (b.buffer(1000), b.buffer(1000));
    let copy = |from: u64, to: u64, bytes| {
        Op::Copy(Copy2d::linear((from, x.native()), (to, x.native()), bytes))
    };
    b.refused(&[copy(x.addr(), x.addr() + 8, 16)], "InvalidArgument", "overlap");
    b.refused(&[copy(x.addr(), y.addr() + 990, 16)], "InvalidArgument", "beyond");
    b.refused(&[copy(0, y.addr(), 16)], "InvalidArgument", "null");
    let fill = |at: u64, bytes, width, pattern| {
        Op::Fill(Fill { dst: at, native: x.native(), bytes, pattern, width })
    };
    b.refused(&[fill(x.addr(), 8, 3, 0)], "InvalidArgument", "pattern of a fill has 3 bytes");
    b.refused(&[fill(x.addr() + 1, 8, 2, 0)], "InvalidArgument", "aligned");
    b.refused(&[fill(x.addr(), 8, 1, 256)], "InvalidArgument", "does not fit");
    b.refused(&[fill(x.addr() + 1000, 1, 1, 0)], "InvalidArgument", "no live buffer");
    let mut host = [0u8; 8];
    let up = Upload { src: host.as_ptr(), dst: x.addr(), native: x.native(), bytes: 8, keep: None };
    let down = Download {
        src: x.addr(),
        native: x.native(),
        dst: host.as_mut_ptr(),
        bytes: 8,
        keep: None,
    };
    b.refused(
        &[Op::Upload(Upload { src: std::ptr::null(), ..up })],
        "InvalidArgument",
        "host address is null",
    );
    b.refused(
        &[Op::Download(Download { dst: std::ptr::null_mut(), ..down })],
        "InvalidArgument",
        "host address is null",
    );
    b.refused(&[Op::Download(Download { bytes: 1 << 40, ..down })], "InvalidArgument", "beyond");
    b.refused(&[Op::Host(&HostCall::new("call", || Ok(())))], "Unsupported", "no host calls");
    b.submit(&[
        copy(x.addr(), x.addr() + 16, 16),
        fill(x.addr(), 8, 2, 0xffff),
        Op::Upload(up),
        Op::Download(down),
    ])
    .unwrap();
    b.device.synchronize(None).unwrap();
}

#[test]
fn waits_name_values_that_were_submitted_or_host_timelines() {
    let b = bench();
    let (other, host_timeline) =
        (b.device.stream(&StreamDesc::default()).unwrap(), b.device.host_timeline().unwrap());
    let never = other.timeline().at(other.timeline().submitted() + 1);
    b.refused(&[Op::Wait(never)], "InvalidArgument", "was never submitted");
    assert_eq!(b.stream.wait(never).unwrap_err().kind(), "InvalidArgument");
    let own = b.stream.timeline().at(b.stream.timeline().submitted() + 2);
    b.refused(&[Op::Wait(own)], "InvalidArgument", "wait for itself");
    let foreign = TimelineOwner::take().unwrap();
    let nobody = foreign.timeline().at(foreign.timeline().submitted() + 1);
    b.refused(&[Op::Wait(nobody)], "Unsupported", "no");
    let value = submit(&*other, &[]).unwrap();
    let past = other.timeline().at(value);
    b.submit(&[
        Op::Wait(past),
        Op::Wait(host_timeline.timeline().at(host_timeline.timeline().submitted() + 5)),
    ])
    .unwrap();
    drop(other);
    b.submit(&[Op::Wait(past)]).unwrap();
    host_timeline.signal_host(host_timeline.timeline().submitted() + 5).unwrap();
    b.device.synchronize(None).unwrap();
    assert!(b.stream.timeline().is_idle());
}

#[test]
fn objects_of_another_device_are_refused_and_memory_of_another_is_for_copies_only() {
    let b = bench();
    let far = b.backend.open(DeviceId::new(BackendKind::Sim, 1)).unwrap();
    let far_stream = far.stream(&StreamDesc::default()).unwrap();
    let k = far.pipeline(&kernel("k", &[WRITE], 0)).unwrap();
    let (near, x) = (b.kernel("near", &[WRITE]), b.buffer(1000));
    b.refused(
        &[dispatch(&k, &[bound(&x, WRITE)])],
        "InvalidArgument",
        "the kernel was not made by sim:0",
    );
    let timestamp = far.timestamp().unwrap();
    b.refused(
        &[Op::WriteTimestamp(&timestamp)],
        "InvalidArgument",
        "the timestamp was not made by sim:0",
    );
    let own = b.device.timestamp().unwrap();
    // SAFETY: the timestamps are of this backend's devices.
    let refused = unsafe { b.device.elapsed(&own, &timestamp) }.unwrap_err();
    assert_eq!(refused.kind(), "InvalidArgument");
    // SAFETY: a wrong plan is refused. All else is this device's, and its memory outlives the
    // launches.
    let graph = unsafe { far.instantiate(Plan::new(OpList::new())) }.unwrap();
    b.refused(&[Op::Graph(&graph)], "InvalidArgument", "not instantiated on sim:0");
    let memory = far.memory(MemoryKind::Device).unwrap();
    let y = memory.alloc(Layout::new(1000), On::new(&*far_stream)).unwrap();
    b.refused(
        &[dispatch(&near, &[bound(&y, WRITE)])],
        "InvalidArgument",
        "no live buffer of sim:0",
    );
    let copy = Copy2d::linear((y.addr(), y.native()), (x.addr(), x.native()), 1000);
    b.submit(&[Op::Copy(copy), Op::WriteTimestamp(&own)]).unwrap();
    b.device.synchronize(None).unwrap();
    drop(y);
    b.refused(&[Op::Copy(copy)], "InvalidArgument", "no live buffer");
}

#[test]
fn plans_updates_and_launches_are_checked() {
    let b = bench();
    let (x, y) = (b.buffer(1000), b.buffer(1000));
    let k = b.device.pipeline(&kernel("k", &[WRITE], 4)).unwrap();
    let bindings = [bound(&x, WRITE)];
    let op = Dispatch {
        pipeline: &k,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: &bindings,
        params: &[0; 4],
    };
    let list = |op: Dispatch<'_>| {
        let mut ops = OpList::new();
        ops.push(&Op::Dispatch(op));
        ops
    };
    let bad = Plan::new(list(Dispatch { params: &[], ..op }));
    // SAFETY: a wrong plan is refused. All else is this device's, and its memory outlives the
    // launches.
    let e = unsafe { b.device.instantiate(bad) }.unwrap_err();
    assert!(e.to_string().contains("dispatch k (node 0 of a plan)"), "{e}");
    for (pred, pred_at) in [(vec![0], vec![0, 1]), (vec![], vec![0]), (vec![], vec![0, 1])] {
        let plan = Plan { ops: list(op), pred, pred_at, early: Vec::new(), partitions: Vec::new() };
        // SAFETY: a wrong plan is refused. All else is this device's, and its memory outlives the
        // launches.
        assert_eq!(unsafe { b.device.instantiate(plan) }.unwrap_err().kind(), "InvalidArgument");
    }
    // SAFETY: a wrong plan is refused. All else is this device's, and its memory outlives the
    // launches.
    let graph = unsafe { b.device.instantiate(Plan::new(list(op))) }.unwrap();
    let patch = NodePatch { node: 0, bindings: None, params: None, grid: None };
    for bad in [
        NodePatch { node: 1, ..patch },
        NodePatch { params: Some(&[1]), ..patch },
        NodePatch { grid: Some([1, 1, 1 << 20]), ..patch },
        NodePatch { bindings: Some(&[]), ..patch },
        NodePatch { bindings: Some(&[bound(&y, READ)]), ..patch },
        NodePatch { bindings: Some(&[Binding { len: 2000, ..bindings[0] }]), ..patch },
    ] {
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        let e = unsafe { graph.update(&[bad]) }.unwrap_err();
        assert!(e.kind() == "InvalidArgument" && e.to_string().contains("of a graph"), "{e:?}");
    }
    b.submit(&[Op::Graph(&graph)]).unwrap();
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { graph.update(&[NodePatch { bindings: Some(&[bound(&y, WRITE)]), ..patch }]) }.unwrap();
    drop(x);
    b.submit(&[Op::Graph(&graph)]).unwrap();
    b.device.synchronize(None).unwrap();
    drop(y);
    b.refused(&[Op::Graph(&graph)], "InvalidArgument", "node 0");
}

#[test]
fn a_wrapper_shares_the_life_of_what_is_inside() {
    let b = bench();
    let again = b.backend.open(DeviceId::new(BackendKind::Sim, 0)).unwrap();
    assert!(again.same(&b.device) && again.handle() == b.device.handle());
    assert_eq!(b.backend.open(DeviceId::new(BackendKind::Sim, 9)).unwrap_err().kind(), "NotFound");
    drop(again);
    let Bench { backend, device, stream, .. } = b;
    let handle = device.handle();
    assert_eq!(backend.shutdown().unwrap_err().kind(), "LeasesOutstanding");
    // Nothing has changed: the device is the same, and works.
    let device2 = backend.open(DeviceId::new(BackendKind::Sim, 0)).unwrap();
    assert_eq!(device2.handle(), handle);
    drop((device, device2));
    // A stream alone also keeps its device, and outlives the wrapper's lease.
    assert_eq!(backend.shutdown().unwrap_err().kind(), "LeasesOutstanding");
    submit(&*stream, &[]).unwrap();
    drop(stream);
    let device = backend.open(DeviceId::new(BackendKind::Sim, 0)).unwrap();
    drop(device);
    backend.shutdown().unwrap();
    backend.shutdown().unwrap();
    assert_eq!(
        backend.open(DeviceId::new(BackendKind::Sim, 0)).unwrap_err().kind(),
        "InvalidState"
    );
    let orphan = Bench::of(Validated::new(lesser(1)).unwrap());
    let Bench { backend, device, stream, .. } = orphan;
    drop((backend, device));
    submit(&*stream, &[]).unwrap();
}

#[test]
fn steady_submissions_through_both_wrappers_reach_the_device_as_without_them() {
    let run = |b: Bench<Arc<dyn Backend>>| {
        let x = b.buffer(1000);
        let k = b.kernel("k", &[WRITE]);
        let bindings = [bound(&x, WRITE)];
        let mut ops = OpList::new();
        ops.push(&dispatch(&k, &bindings));
        // SAFETY: a wrong plan is refused. All else is this device's, and its memory outlives the
        // launches.
        let graph = unsafe { b.device.instantiate(Plan::new(ops)) }.unwrap();
        for _ in 0..3 {
            b.submit(&[dispatch(&k, &bindings), Op::Graph(&graph)]).unwrap();
        }
        b.device.synchronize(None).unwrap();
    };
    let trace = |wrap: fn(SimBackend) -> Arc<dyn Backend>| {
        let inner = lesser(1);
        let machine = inner.machine().clone();
        run(Bench::of(wrap(inner)));
        assert_eq!(machine.take_reports(), []);
        order(&machine.take_trace())
    };
    let plain = trace(|b| Arc::new(b));
    assert_eq!(plain.iter().filter(|(name, ..)| name == "dispatch k").count(), 6, "{plain:?}");
    assert_eq!(trace(|b| Arc::new(Validated::new(b).unwrap())), plain);
    assert_eq!(trace(|b| Arc::new(Traced::new(b).unwrap())), plain);
    assert_eq!(trace(|b| Arc::new(Validated::new(Traced::new(b).unwrap()).unwrap())), plain);
    assert_eq!(trace(|b| Arc::new(Traced::new(Validated::new(b).unwrap()).unwrap())), plain);
}

/// Keeps events as text.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}

impl Subscriber for Listener {
    fn enabled(&self, m: &Metadata<'_>) -> bool {
        m.target() == traced::TARGET
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn traced_calls_are_events_with_operation_value_and_time() {
    let listener = Listener::default();
    let b = Bench::of(Traced::new(lesser(1)).unwrap());
    let x = b.buffer(1000);
    let k = b.kernel("norm", &[WRITE]);
    // Without a subscriber: no events, and no other change.
    b.submit(&[dispatch(&k, &[bound(&x, WRITE)])]).unwrap();
    assert!(listener.0.lock().is_empty());
    let calls = || {
        let value = b
            .submit(&[dispatch(&k, &[bound(&x, WRITE)]), Op::Wait(b.stream.timeline().now())])
            .unwrap();
        b.stream.signal().unwrap();
        assert!(b.device.pipeline(&missing()).is_err());
        value
    };
    let value = tracing::subscriber::with_default(listener.clone(), || {
        // If another test makes a call first, on a thread without a subscriber, `tracing` asks that
        // thread alone. The call then counts as one without interest. So the test makes all calls
        // once and rebuilds the cache.
        calls();
        tracing::callsite::rebuild_interest_cache();
        listener.0.lock().clear();
        calls()
    });
    let events = std::mem::take(&mut *listener.0.lock());
    let has = |words: &[&str]| {
        let found = events.iter().any(|e| words.iter().all(|w| e.contains(w)));
        assert!(found, "{words:?} in {events:#?}");
    };
    has(&["call=\"submit\"", "ops=2", &format!("value={value}"), "us=", "message=ok"]);
    has(&["index=0", "op=\"dispatch norm\""]);
    has(&["index=1", "op=\"wait\""]);
    has(&["call=\"signal\"", "us="]);
    has(&["call=\"pipeline\"", "on=sim:0", "message=failed", "nobody registered"]);
    b.device.synchronize(None).unwrap();
}

#[test]
fn the_errors_of_the_inner_backend_pass_as_they_are() {
    let b = bench();
    let e = b.device.pipeline(&KernelDesc {
        source: KernelSource::Ptx(Cow::Borrowed("")),
        ..kernel("k", &[], 0)
    });
    assert!(matches!(e, Err(Error::Unsupported(_))));
    let limit = b.device.pipeline(&kernel("k", &[READ; 31], 0)).unwrap_err();
    assert_eq!(limit.kind(), "InvalidArgument");
}
