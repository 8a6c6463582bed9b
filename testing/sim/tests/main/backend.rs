//! The backend beyond the suite: reproducible, observed by the detector, with a failure at every
//! call, beside another machine.

use crate::{bind, config, kernels};
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Name, Result};
use leasehold_hal::{
    Access, Backend, Copy2d, Device, DeviceId, Dispatch, Download, Fill, ForeignCall, HostCall,
    KeepAlive, KernelCheck, KernelDesc, KernelSource, MemoryKind, Op, OpList, Pipeline, Plan,
    Stream, StreamDesc,
};
use leasehold_sim::{
    Command, FaultAction, FaultPlan, FaultRule, FillCall, Monitor, QueueId, Ran, Report,
    ReportKind, SimBackend, When,
};
use std::time::Duration;

fn backend(seed: u64) -> SimBackend {
    SimBackend::new(config(seed).trace(true)).unwrap()
}

fn open(backend: &SimBackend) -> Result<Lease<dyn Device>> {
    backend.open(DeviceId::new(leasehold_hal::BackendKind::Sim, 0))
}

fn submit(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<u64> {
    // SAFETY: the tests keep buffers until the end of the backend, and objects are of the stream's
    // device.
    unsafe { stream.submit(ops) }
}

fn alloc(device: &dyn Device, stream: &Lease<dyn Stream>, bytes: u64) -> Result<Lease<Buffer>> {
    device
        .memory(MemoryKind::Device)?
        .alloc(Layout::new(bytes), On { timeline: stream.timeline(), source: &**stream })
}

fn fill(buffer: &Lease<Buffer>, value: u8) -> Op<'static> {
    Op::Fill(Fill {
        dst: buffer.addr(),
        native: 0,
        bytes: buffer.len(),
        pattern: value.into(),
        width: 1,
    })
}

fn copy(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Op<'static> {
    Op::Copy(Copy2d::linear((from.addr(), 0), (to.addr(), 0), from.len()))
}

fn bump(device: &dyn Device) -> Result<Lease<Pipeline>> {
    let source = KernelSource::Registered("bump".into());
    device.pipeline(
        &KernelDesc::new("bump", source, &[Access::ReadWrite], KernelCheck::any())
            .params_of::<u8>(),
    )
}

fn read(stream: &Lease<dyn Stream>, buffer: &Lease<Buffer>) -> Result<Vec<u8>> {
    let copied: Arc<leasehold_core::sync::Mutex<Vec<u8>>> =
        Arc::new(leasehold_core::sync::Mutex::new(vec![0; buffer.len() as usize]));
    let keep: KeepAlive = copied.clone();
    let dst = copied.lock().as_mut_ptr();
    let op =
        Download { src: buffer.addr(), native: 0, dst, bytes: buffer.len(), keep: Some(&keep) };
    let value = submit(stream, &[Op::Download(op)])?;
    stream.wait_host(value, None)?;
    let bytes = copied.lock().clone();
    Ok(bytes)
}

/// Two streams that pass a buffer back and forth; with `waits` they wait for each other.
fn relay(seed: u64, waits: bool) -> (Vec<u8>, Vec<Report>, Vec<Ran>) {
    let b = backend(seed);
    let device = open(&b).unwrap();
    let streams = [0, 1].map(|_| device.stream(&StreamDesc::default()).unwrap());
    let [x, y] = [0, 1].map(|_| alloc(&*device, &streams[0], 64).unwrap());
    let kernel = bump(&*device).unwrap();
    let mut last =
        streams[0].timeline().at(submit(&streams[0], &[fill(&x, 1), fill(&y, 0)]).unwrap());
    for round in 0..6usize {
        let stream = &streams[(round + 1) % 2];
        let bindings = [bind(x.addr(), 64, Access::ReadWrite)];
        let dispatch = Dispatch {
            pipeline: &kernel,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            bindings: &bindings,
            params: &[2],
        };
        let all = [Op::Wait(last), Op::Dispatch(dispatch), copy(&x, &y)];
        last = stream.timeline().at(submit(stream, &all[usize::from(!waits)..]).unwrap());
    }
    device.synchronize(None).unwrap();
    let bytes = read(&streams[0], &y).unwrap();
    (bytes, b.machine().take_reports(), b.machine().take_trace())
}

#[test]
fn race_reports_say_the_names_of_streams_buffers_and_call_sites() {
    let b = backend(3);
    let device = open(&b).unwrap();
    let streams = [0, 1].map(|_| device.stream(&StreamDesc::default()).unwrap());
    let x = alloc(&*device, &streams[0], 64).unwrap();
    x.set_name("activations");
    for (stream, name) in streams.iter().zip(["prefill", "decode"]) {
        stream.timeline().set_name(Some(name.into()));
    }
    let scope = Name::new("layer 3").scope();
    submit(&streams[0], &[fill(&x, 1)]).unwrap();
    drop(scope);
    submit(&streams[1], &[fill(&x, 2)]).unwrap();
    device.synchronize(None).unwrap();
    let reports = b.machine().take_reports();
    let [report] = &reports[..] else { panic!("{reports:?}") };
    let text = report.describe(device.memory(MemoryKind::Device).unwrap());
    for part in [
        "fill (sim:0 stream 0 \"prefill\", submission 1, in scope \"layer 3\")",
        "fill (sim:0 stream 1 \"decode\", submission 1)",
        "of a buffer of 64 bytes with name \"activations\"",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// The executed operations and their times. The values of timelines continue from run to run, so
/// they are omitted.
pub(crate) fn order(trace: &[Ran]) -> Vec<(String, Option<u64>, u64)> {
    trace.iter().map(|r| (r.operation.name.to_string(), r.operation.queue, r.nanos)).collect()
}

#[test]
fn streams_that_wait_are_clean_and_reproducible_over_200_seeds() {
    for seed in 0..200 {
        let (bytes, reports, trace) = relay(seed, true);
        assert_eq!((bytes, reports), (vec![13; 64], vec![]), "seed {seed}");
        if seed % 10 == 0 {
            assert_eq!(order(&trace), order(&relay(seed, true).2), "seed {seed}");
        }
    }
}

#[test]
fn streams_that_do_not_wait_are_reported_by_their_submissions() {
    for seed in 0..50 {
        let (_, reports, _) = relay(seed, false);
        let report = reports.iter().find(|r| r.kind == ReportKind::Unordered).expect("no report");
        let first = report.first.as_ref().unwrap();
        assert_ne!(first.queue, report.second.queue);
        assert!(first.index >= 1 && report.second.index >= 1, "{report}");
    }
}

#[test]
fn memory_that_is_freed_and_lent_to_another_stream_is_clean() {
    for seed in 0..50 {
        let b = backend(seed);
        let device = open(&b).unwrap();
        let streams = [0, 1, 2].map(|_| device.stream(&StreamDesc::default()).unwrap());
        for round in 0..20u8 {
            let stream = &streams[usize::from(round) % 3];
            let buffer = alloc(&*device, stream, 3 << 20).unwrap();
            let value = submit(stream, &[fill(&buffer, round)]).unwrap();
            // SAFETY: the timepoint is that of a submission to this stream that uses the buffer,
            // made in order.
            unsafe { buffer.mark_write(stream.timeline().at(value)) };
            drop(buffer);
            if round % 5 == 0 {
                device.memory(MemoryKind::Device).unwrap().trim(0).unwrap();
            }
        }
        device.synchronize(None).unwrap();
        assert_eq!(b.machine().take_reports(), [], "seed {seed}");
    }
}

/// A library whose calls fill a buffer.
fn library(machine: &Monitor, buffer: &Lease<Buffer>, value: u8) -> ForeignCall {
    // SAFETY: the call enqueues a fill of its own operand, in the queue of its argument.
    let (machine, at, n) = (unsafe { machine.drive() }, buffer.addr(), buffer.len());
    ForeignCall::new("library fill", vec![bind(at, n, Access::Write)], move |queue| {
        machine.enqueue(QueueId(queue), Command::Fill(FillCall::linear(at, n, value.into(), 1)))
    })
}

#[test]
fn foreign_calls_enqueue_in_their_turn_and_are_captured_into_graphs() {
    let b = backend(1);
    let device = open(&b).unwrap();
    let stream = device.stream(&StreamDesc::default()).unwrap();
    let [x, y] = [0, 1].map(|_| alloc(&*device, &stream, 64).unwrap());
    let call = library(b.machine(), &x, 7);
    submit(&stream, &[fill(&x, 1), Op::Foreign(&call), copy(&x, &y), fill(&x, 2)]).unwrap();
    assert_eq!(
        (read(&stream, &y).unwrap(), read(&stream, &x).unwrap()),
        (vec![7; 64], vec![2; 64])
    );
    let mut ops = OpList::new();
    ops.push(&fill(&x, 1));
    ops.push(&Op::Foreign(&library(b.machine(), &x, 9)));
    ops.push(&copy(&x, &y));
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    assert_eq!(graph.nodes(), 3);
    for _ in 0..2 {
        submit(&stream, &[fill(&x, 3), Op::Graph(&graph)]).unwrap();
        assert_eq!(read(&stream, &y).unwrap(), [9; 64]);
    }
    let bad = ForeignCall::new("bad", vec![], |_| Err(Error::state("the library's reason")));
    let failed = submit(&stream, &[fill(&x, 5), Op::Foreign(&bad), fill(&x, 6)]).unwrap();
    let e = stream.wait_host(failed, None).unwrap_err();
    assert!(e.to_string().contains("the library's reason") && e.to_string().contains("bad"), "{e}");
    assert_eq!(b.machine().take_reports(), []);
}

#[test]
fn a_host_call_in_a_graph_that_fails_names_the_stream_and_the_submission() {
    let b = backend(2);
    let device = open(&b).unwrap();
    let stream = device.stream(&StreamDesc::default()).unwrap();
    let mut ops = OpList::new();
    ops.push(&Op::Host(&HostCall::new("breaks", || Err(Error::state("its reason")))));
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    submit(&stream, &[]).unwrap();
    let value = submit(&stream, &[Op::Graph(&graph)]).unwrap();
    let text = stream.wait_host(value, None).unwrap_err().to_string();
    for part in [
        "host call breaks",
        "its reason",
        &value.to_string(),
        &format!("{:?}", stream.timeline().id()),
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Opens, allocates, copies, launches, records, replays and closes.
fn program(b: &SimBackend) -> Result<Vec<u8>> {
    let device = open(b)?;
    let [stream, other] =
        [device.stream(&StreamDesc::default())?, device.stream(&StreamDesc::default())?];
    let [x, y] = [alloc(&*device, &stream, 64)?, alloc(&*device, &stream, 8 << 20)?];
    let pinned = device
        .memory(MemoryKind::Pinned)?
        .alloc(Layout::new(64), On { timeline: stream.timeline(), source: &*stream })?;
    let result = (|| {
        let (host_timeline, kernel) = (device.host_timeline()?, bump(&*device)?);
        let at = host_timeline.timeline().at(host_timeline.timeline().submitted() + 1);
        let bindings = [bind(x.addr(), 64, Access::ReadWrite)];
        let dispatch = Dispatch {
            pipeline: &kernel,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            bindings: &bindings,
            params: &[1],
        };
        let first =
            stream.timeline().at(submit(&stream, &[Op::Wait(at), fill(&x, 1), fill(&y, 1)])?);
        host_timeline.signal_host(at.value())?;
        let timestamp = device.timestamp()?;
        let mut ops = OpList::new();
        ops.push(&Op::Dispatch(dispatch));
        ops.push(&Op::WriteTimestamp(&timestamp));
        ops.push(&Op::Copy(Copy2d::linear((x.addr(), 0), (pinned.addr(), 0), 64)));
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
        let last = submit(&other, &[Op::Wait(first), Op::Graph(&graph), Op::Graph(&graph)])?;
        other.wait_host(last, None)?;
        b.machine().host_read(pinned.addr(), 64);
        read(&other, &x)
    })();
    // After any failure, no work may use the buffers when they are dropped; the cause was returned
    // already.
    b.machine().set_faults(FaultPlan::none());
    let _ = device.synchronize(None);
    result
}

#[test]
fn every_call_can_fail_and_the_backend_shuts_down_with_nothing_left() {
    let calls = {
        let b = backend(1);
        assert_eq!(program(&b).unwrap(), [3; 64]);
        let calls = b.machine().calls();
        b.shutdown().unwrap();
        calls
    };
    assert!(calls > 20, "{calls} calls");
    for action in [FaultAction::OutOfMemory, FaultAction::Fail(3), FaultAction::DeviceLost] {
        let mut failed = 0;
        for k in 0..calls {
            let b = backend(k);
            b.machine()
                .set_faults(FaultPlan::none().with(FaultRule::any(When::At(k), action.clone())));
            match program(&b) {
                Ok(bytes) => assert_eq!(bytes, [3; 64], "{action:?} at call {k}"),
                Err(Error::OutOfMemory(_) | Error::Driver { .. } | Error::DeviceLost { .. }) => {
                    failed += 1
                }
                Err(e) => panic!("{action:?} at call {k}: {e}"),
            }
            assert_eq!(b.machine().take_reports(), [], "{action:?} at call {k}");
            b.machine().set_faults(FaultPlan::none());
            b.shutdown().unwrap_or_else(|e| panic!("{action:?} at call {k}: {e}"));
            if action != FaultAction::DeviceLost {
                let machine = b.machine().clone();
                drop(b);
                assert!(
                    machine.memory_in_use().is_nothing(),
                    "{action:?} at call {k}: {:?}",
                    machine.memory_in_use()
                );
                assert_eq!(machine.objects(), Default::default(), "{action:?} at call {k}");
            }
        }
        assert!(failed > 10, "{action:?}: {failed} of {calls} calls failed");
    }
}

#[test]
fn streams_of_two_machines_wait_for_each_other() {
    let (a, b) = (backend(3), backend(4));
    let (near, far) = (open(&a).unwrap(), open(&b).unwrap());
    let (s, t) =
        (near.stream(&StreamDesc::default()).unwrap(), far.stream(&StreamDesc::default()).unwrap());
    let x = alloc(&*near, &s, 64).unwrap();
    let mut point = s.timeline().at(submit(&s, &[fill(&x, 1)]).unwrap());
    for value in 2..6 {
        point = t.timeline().at(submit(&t, &[Op::Wait(point)]).unwrap());
        point = s.timeline().at(submit(&s, &[Op::Wait(point), fill(&x, value)]).unwrap());
    }
    s.wait_host(point.value(), Some(Duration::from_secs(10))).unwrap();
    assert_eq!(read(&s, &x).unwrap(), [5; 64]);
}

#[test]
fn a_kernel_that_nobody_registered_is_not_found() {
    let b = backend(5);
    let device = open(&b).unwrap();
    let desc = |name: &'static str, params| KernelDesc {
        params,
        ..KernelDesc::new(
            name,
            KernelSource::Registered(name.into()),
            &[Access::ReadWrite],
            KernelCheck::any(),
        )
    };
    assert_eq!(device.pipeline(&desc("nobody", 1)).unwrap_err().kind(), "NotFound");
    assert_eq!(device.pipeline(&desc("bump", 2)).unwrap_err().kind(), "InvalidArgument");
    drop(device.pipeline(&desc("bump", 1)).unwrap());
    assert_eq!(kernels().names().len(), 5);
}

#[test]
fn a_second_source_of_memory_fills_and_verifies_for_the_debug_aids() {
    let b = backend(6);
    let device = open(&b).unwrap();
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let source = device.backing(kind).unwrap();
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        let chunk = unsafe { source.commit(None, 2 << 20) }.unwrap();
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        unsafe { source.fill(chunk.addr, chunk.bytes, 7) }.unwrap();
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        assert_eq!(unsafe { source.verify(chunk.addr, chunk.bytes, 7) }.unwrap(), None);
        // SAFETY: the chunk belongs to this test.
        unsafe { b.machine().drive() }.poke(chunk.addr + 100_000, &[8]).unwrap();
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        assert_eq!(unsafe { source.verify(chunk.addr, chunk.bytes, 7) }.unwrap(), Some(100_000));
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        assert_eq!(unsafe { source.verify(chunk.addr, 100_000, 7) }.unwrap(), None);
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        unsafe { source.decommit(chunk) }.unwrap();
    }
    let (ranges, at) = (device.backing(MemoryKind::Device).unwrap(), 8 << 20);
    let range = ranges.reserve(at).unwrap();
    // SAFETY: the ranges are this backing's own, named in their order by this test alone.
    let chunk = unsafe { ranges.commit(Some(range), 2 << 20) }.unwrap();
    assert_eq!(chunk.addr, range);
    // A failed call leaves nothing behind.
    b.machine().set_faults(FaultPlan::none().with(FaultRule::on(
        "set_access",
        When::Always,
        FaultAction::Fail(1),
    )));
    assert_eq!(
        // SAFETY: the ranges are this backing's own, named in their order by this test alone.
        unsafe { ranges.commit(Some(range + (2 << 20)), 2 << 20) }.unwrap_err().kind(),
        "Driver"
    );
    b.machine().set_faults(FaultPlan::none());
    // SAFETY: the ranges are this backing's own, named in their order by this test alone.
    unsafe { ranges.decommit(chunk) }.unwrap();
    // SAFETY: the ranges are this backing's own, named in their order by this test alone.
    unsafe { ranges.release(range, at) };
    assert!(b.machine().memory_in_use().is_nothing(), "{:?}", b.machine().memory_in_use());
}
