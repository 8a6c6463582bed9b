//! Recordings over the runtime.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::cases::kernels::launch;
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::graph::NodeId;
use leasehold::ops::Pattern;
use leasehold::{Buffer, Error, Graph, Lease, Runtime, View};

const HELD: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Fill), Need::Hold];
const EARLY: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::EarlyAdd)];
const FILL: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Fill)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(96, "an update never changes a launch in flight", HELD, update_in_flight)
        .sanitizer(),
    Case::runtime(
        99,
        "what cannot be recorded is refused and the stream lives on",
        &[Need::Graphs],
        illegal_calls,
    ),
    Case::runtime(
        100,
        "another thread allocates while one records",
        &[Need::Graphs],
        other_thread_allocates,
    ),
    Case::runtime(102, "temporaries of a recording belong to its graph", &[Need::Graphs], arena)
        .sanitizer(),
    Case::runtime(104, "a graph records an event that others wait for", &[Need::Graphs], events)
        .sanitizer(),
    Case::runtime(105, "a recording survives the first use of its kernels", FILL, lazy_kernels)
        .sanitizer(),
    Case::runtime(144, "a recording is invisible to other threads", &[Need::Graphs], invisible),
    Case::runtime(145, "an operator that fails in a recording is rolled back", FILL, rolled_back),
    Case::runtime(211, "a kernel reads early only what its graph does not write", EARLY, early)
        .sanitizer(),
];

/// A graph that fills a buffer with 7.
struct Filler {
    runtime: Runtime,
    buffer: Lease<Buffer>,
    graph: Graph,
}

fn filler(env: &Env) -> Outcome<Filler> {
    let runtime = env.runtime()?;
    let kernel = TestKernel::base(env.desc(TestKernel::Fill)?)?;
    let buffer = runtime.upload(&[0u32; 256])?;
    let graph = runtime.record_graph(|rt| launch(rt, &kernel, &buffer, 7).map(drop))?;
    Ok(Filler { runtime, buffer: buffer.into_buffer(), graph })
}

fn update_in_flight(env: &Env) -> Outcome {
    let f = filler(env)?;
    let stream = f.runtime.stream();
    let seen = [f.runtime.alloc(f.buffer.len())?, f.runtime.alloc(f.buffer.len())?];
    let hold = env.hold_runtime(stream)?;
    let pending = f.graph.launch()?;
    stream.copy(seen[0].view(), f.buffer.view())?;
    for value in [8u32, 9] {
        let _ = f.graph.update(&leasehold::GraphUpdate::new().params(NodeId::new(0), &value))?;
    }
    check!(!pending.is_settled(), "the update waited for the launch in flight");
    f.graph.launch()?;
    stream.copy(seen[1].view(), f.buffer.view())?;
    hold.release()?;
    check_eq!(f.runtime.to_vec::<u32>(&seen[0])?, [7; 256], "the launch in flight");
    check_eq!(f.runtime.to_vec::<u32>(&seen[1])?, [9; 256], "the launch after the update");
    f.graph.launch()?;
    check_eq!(f.runtime.to_vec::<u32>(&f.buffer)?, [9; 256], "a launch later");
    Ok(())
}

fn illegal_calls(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.upload(&[1u8; 64])?;
    let event = runtime.create_event()?;
    let recording = runtime.start_graph_recording()?;
    check!(runtime.is_graph_recording(), "a recording that was started");
    let refused = [
        ("synchronising the stream", recording.stream().synchronize().err()),
        ("synchronising the device", recording.synchronize().err()),
        ("reading back", recording.to_vec::<u8>(&buffer).err()),
        ("querying the stream", recording.stream().query().err()),
        ("allocating host memory", recording.alloc_pinned(64).err()),
        ("a recording within it", recording.start_graph_recording().err()),
        ("a second recording", runtime.start_graph_recording().err()),
    ];
    for (what, e) in refused {
        check!(matches!(e, Some(Error::Recording { .. })), "{what} while recording gave {e:?}");
    }
    check!(event.query()?, "an event that was never recorded, while recording");
    recording.stream().fill(buffer.view(), 9u8)?;
    runtime.abandon_graph_recording();
    check!(!runtime.is_graph_recording(), "a recording that was abandoned");
    check_eq!(runtime.to_vec::<u8>(&buffer)?, [1; 64], "the buffer after an abandoned recording");
    expect_error(
        runtime.stop_graph_recording().map(drop),
        "Recording",
        "stopping without a recording",
    )?;
    runtime.stream().fill(buffer.view(), 3u8)?;
    check_eq!(runtime.to_vec::<u8>(&buffer)?, [3; 64], "the stream after an abandoned recording");
    Ok(())
}

fn other_thread_allocates(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let _recording = runtime.start_graph_recording()?;
    let there = std::thread::scope(|scope| {
        let work = || -> leasehold::Result<Vec<u8>> {
            let stream = runtime.create_stream()?;
            let buffer = stream.runtime().alloc(64)?;
            stream.fill(buffer.view(), 5u8)?;
            let mut bytes = vec![0u8; 64];
            stream.download(&mut bytes, buffer.view())?;
            Ok(bytes)
        };
        scope.spawn(work).join().map_err(|_| Stop::Failed("the other thread panicked".into()))
    });
    runtime.abandon_graph_recording();
    check_eq!(there??, [5; 64], "another thread's work while this one records");
    Ok(())
}

fn arena(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let input = runtime.upload(&[4u8; 1 << 16])?;
    let output = runtime.alloc(1 << 16)?;
    let graph = runtime.record_graph(|rt| {
        let temporary = rt.alloc(1 << 16)?;
        rt.stream().copy(temporary.view(), input.view())?;
        rt.stream().copy(output.view(), temporary.view())
        // Freed here: the memory returns to the plan, not to the pool.
    })?;
    check!(
        graph.arena_bytes() >= 1 << 16,
        "the graph holds {} bytes for its temporary",
        graph.arena_bytes()
    );
    for round in 0..5u8 {
        runtime.stream().fill(input.view(), Pattern::U8(round))?;
        graph.launch()?;
        // The general pool must not return the graph's memory meanwhile.
        let noise: Vec<_> =
            (0..8).map(|_| runtime.alloc(1 << 16)).collect::<leasehold::Result<_>>()?;
        for buffer in &noise {
            runtime.stream().fill(buffer.view(), 0xffu8)?;
        }
        check!(
            runtime.to_vec::<u8>(&output)?.iter().all(|&b| b == round),
            "round {round}: the temporary was overwritten"
        );
    }
    Ok(())
}

fn events(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.upload(&[0u8; 4096])?;
    let event = runtime.create_event_with(leasehold::EventFlags::DISABLE_TIMING)?;
    let graph = runtime.record_graph(|rt| {
        rt.stream().fill(buffer.view(), 6u8)?;
        rt.stream().record(&event)
    })?;
    graph.launch()?;
    let other = runtime.create_stream()?;
    other.wait_event(&event)?;
    let mut bytes = vec![0u8; 4096];
    other.download(&mut bytes, buffer.view())?;
    check!(bytes.iter().all(|&b| b == 6), "a wait for an event that a graph recorded");
    event.synchronize()?;
    Ok(())
}

fn lazy_kernels(env: &Env) -> Outcome {
    // The pipeline is made during the recording.
    let f = filler(env)?;
    check_eq!(f.runtime.to_vec::<u32>(&f.buffer)?, [0; 256], "the buffer after recording");
    f.graph.launch()?;
    check_eq!(f.runtime.to_vec::<u32>(&f.buffer)?, [7; 256], "the buffer after the launch");
    Ok(())
}

fn invisible(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.upload(&[1u8; 64])?;
    let recorder = runtime.start_graph_recording()?;
    let (recording, stopped, bytes) = std::thread::scope(|scope| {
        let look = || {
            let stopped = runtime.stop_graph_recording().map(drop);
            (runtime.is_graph_recording(), stopped, runtime.to_vec::<u8>(&buffer))
        };
        scope.spawn(look).join().map_err(|_| Stop::Failed("the other thread panicked".into()))
    })?;
    check!(!recording, "another thread sees the recording");
    expect_error(stopped, "Recording", "stopping another thread's recording")?;
    check_eq!(bytes?, [1; 64], "another thread's read-back");
    check!(runtime.is_graph_recording(), "another thread ended the recording");
    recorder.stream().fill(buffer.view(), 2u8)?;
    let graph = runtime.stop_graph_recording()?;
    check_eq!(runtime.to_vec::<u8>(&buffer)?, [1; 64], "the buffer before the launch");
    graph.launch()?;
    check_eq!(runtime.to_vec::<u8>(&buffer)?, [2; 64], "the buffer after the launch");
    Ok(())
}

/// Encodes one fill, then fails.
struct Broken<'a>(&'a Lease<Buffer>);

impl leasehold::GraphOperator for Broken<'_> {
    fn name(&self) -> &str {
        "broken"
    }
    fn accesses(&self) -> Vec<leasehold::Operand<'_>> {
        vec![self.0.write()]
    }
    fn encode(&self, stream: &leasehold::Stream) -> leasehold::Result<()> {
        stream.fill(self.0.view(), 0xbbu8)?;
        Err(Error::invalid("it was meant to fail"))
    }
}

fn rolled_back(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = TestKernel::base(env.desc(TestKernel::Fill)?)?;
    let (good, bad) = (runtime.upload(&[0u32; 64])?, runtime.upload(&[1u8; 64])?);
    let graph = runtime.record_graph(|rt| {
        launch(rt, &kernel, &good, 3)?;
        match rt.add_graph_operator(&Broken(&bad)) {
            Err(e) if e.to_string().contains("meant to fail") => Ok(()),
            other => Err(Error::state(format!("the broken operator gave {other:?}"))),
        }
    })?;
    graph.launch()?;
    check_eq!(runtime.to_vec::<u32>(&good)?, [3; 64], "what was recorded before the failure");
    check_eq!(runtime.to_vec::<u8>(&bad)?, [1; 64], "what the failed operator had encoded");
    Ok(())
}

fn early(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    // Of kernels that wait themselves, so that the second one may begin while the first one runs.
    let add = TestKernel::base(env.desc(TestKernel::EarlyAdd)?)?;
    let (x, w) = (runtime.upload(&[1u32; 4096])?, runtime.upload(&[10u32; 4096])?);
    let (y, z) = (runtime.zeros::<u32>(4096)?, runtime.zeros::<u32>(4096)?);
    let sum = |rt: &Runtime, a: &Lease<Buffer>, b: &Lease<Buffer>, out: &Lease<Buffer>| {
        let blocks = 4096 / TestKernel::BLOCK;
        let grid = leasehold::kernel::Grid::new([blocks, 1, 1]).threads([TestKernel::BLOCK, 1, 1]);
        rt.stream().launch(&add, &[a.read(), b.read(), out.write()], &(), grid).map(drop)
    };
    let graph = runtime.record_graph(|rt| {
        sum(rt, &x, &x, &y)?;
        sum(rt, &y, &w, &z)
    })?;
    for n in 2..6u32 {
        // Written before the launch, or by a node of it.
        runtime.stream().fill(x.view(), Pattern::U32(n))?;
        runtime.stream().fill(w.view(), Pattern::U32(10 * n))?;
        graph.launch()?;
        check_eq!(runtime.to_vec::<u32>(&z)?, [12 * n; 4096], "the sums of launch {n}");
    }
    // From now on the second node reads as both operands what the first one writes.
    let _ = graph.update(&leasehold::GraphUpdate::new().buffer(&w, &y))?;
    for n in 6..10u32 {
        runtime.stream().fill(x.view(), Pattern::U32(n))?;
        graph.launch()?;
        check_eq!(runtime.to_vec::<u32>(&z)?, [4 * n; 4096], "the sums after the update");
    }
    Ok(())
}
