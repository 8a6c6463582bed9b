//! Graph cases over the traits: instantiation, launch, update.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, skipped};
use crate::cases::streams::{copy, fill};
use crate::env::{Env, bind, direct};
use crate::factory::TestKernel;
use leasehold::backend::{
    Access, Binding, Dispatch, GraphExec, NodePatch, Op, OpList, Pipeline, Plan,
};
use leasehold::{Buffer, Lease};
use std::time::Duration;

const NEEDS: &[Need] =
    &[Need::Graphs, Need::Kernel(TestKernel::Fill), Need::Kernel(TestKernel::Add)];
const HELD: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Fill), Need::Hold];

pub(crate) const CASES: &[Case] = &[
    Case::hal(93, "an empty graph is valid and does nothing", &[Need::Graphs], empty),
    Case::hal(94, "a graph replayed a hundred times computes what eager work does", NEEDS, replays)
        .sanitizer(),
    Case::hal(95, "bindings, parameters and grids of a graph can be changed", NEEDS, changes)
        .sanitizer(),
    Case::hal(97, "a patch that does not fit is refused and changes nothing", NEEDS, bad_patches),
    Case::hal(98, "one graph on two streams is serialised or refused", NEEDS, two_streams)
        .sanitizer(),
    Case::hal(
        101,
        "a library call that does not join its work is refused by graphs",
        &[Need::Graphs, Need::ForeignCalls],
        unjoined,
    ),
    Case::hal(103, "a graph's lease may go while it runs", HELD, drop_in_flight).sanitizer(),
    Case::hal(106, "a graph of 4,096 nodes is bounded and right", NEEDS, large).sanitizer(),
    Case::hal(
        107,
        "timestamps in a graph belong to their nodes",
        &[Need::Graphs, Need::Timestamps],
        stamped_nodes,
    )
    .sanitizer(),
    Case::hal(150, "steady replay takes nothing from any pool", NEEDS, steady),
];

/// A counter: `b = a + one; a = b`, as a graph.
struct Counter {
    a: Lease<Buffer>,
    _b: Lease<Buffer>,
    _one: Lease<Buffer>,
    graph: Lease<dyn GraphExec>,
}

fn op<'a>(
    kernel: &'a Lease<Pipeline>,
    blocks: u32,
    bindings: &'a [leasehold::backend::Binding],
    params: &'a [u8],
) -> Op<'a> {
    let block = [TestKernel::BLOCK.min(kernel.block_threads), 1, 1];
    Op::Dispatch(Dispatch {
        pipeline: kernel,
        grid: [blocks, 1, 1],
        block,
        shared: 0,
        bindings,
        params,
    })
}

fn counter(
    env: &Env,
    stream: &Lease<dyn leasehold::backend::Stream>,
    steps: usize,
) -> Outcome<Counter> {
    let add = env.kernel(TestKernel::Add)?;
    let (a, b, one) =
        (env.buffer(stream, 512)?, env.buffer(stream, 512)?, env.buffer(stream, 512)?);
    env.write(stream, &one, &1u32.to_le_bytes().repeat(128))?;
    env.write(stream, &a, &[0; 512])?;
    let bindings = [bind(&a, Access::Read), bind(&one, Access::Read), bind(&b, Access::Write)];
    let mut ops = OpList::new();
    for _ in 0..steps {
        ops.push(&op(&add, 2, &bindings, &[]));
        ops.push(&copy(&b, &a));
    }
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
    Ok(Counter { a, _b: b, _one: one, graph })
}

fn empty(env: &Env) -> Outcome {
    let stream = env.stream()?;
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { env.device().instantiate(Plan::new(OpList::new())) }?;
    check_eq!(graph.nodes(), 0, "nodes of an empty graph");
    for _ in 0..3 {
        let value = direct(&stream, &[Op::Graph(&graph)])?;
        env.wait(&stream, value)?;
    }
    Ok(())
}

fn replays(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let c = counter(env, &stream, 3)?;
    check_eq!(c.graph.nodes(), 6, "nodes");
    for launch in 1..=100u32 {
        direct(&stream, &[Op::Graph(&c.graph)])?;
        if launch.is_power_of_two() || launch == 100 {
            let values = env.read_u32(&stream, &c.a)?;
            check!(
                values.iter().all(|&v| v == 3 * launch),
                "after {launch} launches: {} and not {}",
                values[0],
                3 * launch
            );
        }
    }
    let value = direct(&stream, &[Op::Graph(&c.graph), fill(&c.a, 0, 1), Op::Graph(&c.graph)])?;
    env.wait(&stream, value)?;
    check!(
        env.read_u32(&stream, &c.a)?.iter().all(|&v| v == 3),
        "work between two launches of one submission"
    );
    Ok(())
}

fn changes(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let set = env.kernel(TestKernel::Fill)?;
    let (x, y) = (env.buffer(&stream, 1024)?, env.buffer(&stream, 1024)?);
    let mut ops = OpList::new();
    ops.push(&op(&set, 4, &[bind(&x, Access::Write)], &1u32.to_le_bytes()));
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
    let patch = NodePatch { node: 0, bindings: None, params: None, grid: None };
    let launch = |expect_x: &[u32], expect_y: &[u32], what: &str| {
        direct(&stream, &[fill(&x, 0, 1), fill(&y, 0, 1), Op::Graph(&graph)])?;
        check_eq!(env.read_u32(&stream, &x)?, expect_x, "the first buffer {what}");
        check_eq!(env.read_u32(&stream, &y)?, expect_y, "the second buffer {what}");
        Ok(())
    };
    launch(&[1; 256], &[0; 256], "before any change")?;
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { graph.update(&[NodePatch { params: Some(&2u32.to_le_bytes()), ..patch }]) }?;
    launch(&[2; 256], &[0; 256], "after a change of parameters")?;
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe { graph.update(&[NodePatch { bindings: Some(&[bind(&y, Access::Write)]), ..patch }]) }?;
    launch(&[0; 256], &[2; 256], "after a change of bindings")?;
    // A launch's binding contains only the memory that it writes.
    let first = Binding { len: 512, ..bind(&y, Access::Write) };
    // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
    unsafe {
        graph.update(&[NodePatch { grid: Some([2, 1, 1]), bindings: Some(&[first]), ..patch }])
    }?;
    let half: Vec<u32> = (0..256).map(|i| if i < 128 { 2 } else { 0 }).collect();
    launch(&[0; 256], &half, "after a change of the grid")
}

fn bad_patches(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let c = counter(env, &stream, 1)?;
    let patch = NodePatch { node: 0, bindings: None, params: None, grid: None };
    for (bad, what) in [
        (NodePatch { node: 2, ..patch }, "a node beyond the end"),
        (NodePatch { node: 1, grid: Some([1; 3]), ..patch }, "a grid of a copy"),
        (NodePatch { params: Some(&[1]), ..patch }, "parameters of another size"),
        (NodePatch { bindings: Some(&[]), ..patch }, "another number of bindings"),
    ] {
        // With a valid patch before it: all or nothing.
        let good = NodePatch { grid: Some([0, 1, 1]), ..patch };
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        expect_error(unsafe { c.graph.update(&[good, bad]) }, "InvalidArgument", what)?;
    }
    direct(&stream, &[Op::Graph(&c.graph)])?;
    check!(
        env.read_u32(&stream, &c.a)?.iter().all(|&v| v == 1),
        "a refused patch changed the graph"
    );
    Ok(())
}

fn two_streams(env: &Env) -> Outcome {
    let (s, t) = (env.stream()?, env.stream()?);
    let c = counter(env, &s, 2)?;
    // The two launches use the same memory, so a wait orders them. The graph must allow launches on
    // two streams.
    for round in 1..=20u32 {
        let first = s.timeline().at(direct(&s, &[Op::Graph(&c.graph)])?);
        s.flush()?;
        let second = t.timeline().at(direct(&t, &[Op::Wait(first), Op::Graph(&c.graph)])?);
        t.flush()?;
        direct(&s, &[Op::Wait(second)])?;
        let values = env.read_u32(&s, &c.a)?;
        check!(values.iter().all(|&v| v == 4 * round), "round {round}: {}", values[0]);
    }
    Ok(())
}

fn drop_in_flight(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let set = env.kernel(TestKernel::Fill)?;
    let x = env.buffer(&stream, 1024)?;
    let mut ops = OpList::new();
    ops.push(&op(&set, 4, &[bind(&x, Access::Write)], &6u32.to_le_bytes()));
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
    let hold = env.hold(&stream)?;
    let value = direct(&stream, &[Op::Graph(&graph), Op::Graph(&graph)])?;
    drop(graph);
    drop(set);
    hold.release()?;
    env.wait(&stream, value)?;
    check_eq!(env.read_u32(&stream, &x)?, [6; 256], "the dropped graph's work");
    Ok(())
}

fn large(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let c = counter(env, &stream, 2048)?;
    check_eq!(c.graph.nodes(), 4096, "nodes");
    check!(c.graph.bytes() < 64 << 20, "a graph of 4,096 nodes holds {} bytes", c.graph.bytes());
    for launch in 1..=3u32 {
        direct(&stream, &[Op::Graph(&c.graph)])?;
        let values = env.read_u32(&stream, &c.a)?;
        check!(values.iter().all(|&v| v == 2048 * launch), "launch {launch}: {}", values[0]);
    }
    Ok(())
}

fn unjoined(env: &Env) -> Outcome {
    let Some(call) = env.factory().unjoined_fork() else {
        return skipped("the driver captures no library calls");
    };
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    for _ in 0..3 {
        let mut ops = OpList::new();
        ops.push(&fill(&buffer, 1, 1));
        ops.push(&Op::Foreign(&call));
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        let e = expect_error(
            unsafe { env.device().instantiate(Plan::new(ops)) },
            "Recording",
            "a graph with unjoined work",
        )?;
        check!(e.to_string().contains(call.name), "the error does not name the call: {e}");
        // The stream and later graphs are not affected.
        direct(&stream, &[fill(&buffer, 2, 1)])?;
        check_eq!(env.read(&stream, &buffer)?, [2; 64], "a fill after the refused graph");
        let mut ops = OpList::new();
        ops.push(&fill(&buffer, 3, 1));
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
        direct(&stream, &[Op::Graph(&graph)])?;
        check_eq!(env.read(&stream, &buffer)?, [3; 64], "a graph after the refused one");
    }
    Ok(())
}

fn stamped_nodes(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 8 << 20)?;
    let timestamps: Vec<_> =
        (0..4).map(|_| env.device().timestamp()).collect::<leasehold::Result<_>>()?;
    // No fills between the first two timepoints, forty between the next two, one between the last
    // two.
    let mut ops = OpList::new();
    for (timestamp, fills) in timestamps.iter().zip([0, 40, 1, 0]) {
        ops.push(&Op::WriteTimestamp(timestamp));
        for i in 0..fills {
            ops.push(&fill(&buffer, i, 1));
        }
    }
    check_eq!(ops.len(), 45, "nodes");
    // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
    // outlives the launches.
    let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
    let mut best = [Duration::MAX; 3];
    for launch in 0..5 {
        let (before, after) = (env.device().timestamp()?, env.device().timestamp()?);
        let value = direct(
            &stream,
            &[Op::WriteTimestamp(&before), Op::Graph(&graph), Op::WriteTimestamp(&after)],
        )?;
        env.wait(&stream, value)?;
        let mut total = Duration::ZERO;
        for i in 0..3 {
            // SAFETY: the timepoints are of this backend.
            let time = unsafe { env.device().elapsed(&timestamps[i], &timestamps[i + 1]) }?;
            best[i] = best[i].min(time);
            total += time;
        }
        // The timepoints are those of this launch and not of an earlier one.
        // SAFETY: the timepoints are of this backend.
        let (lead, all) = (unsafe { env.device().elapsed(&before, &timestamps[0]) }?, unsafe {
            env.device().elapsed(&before, &after)
        }?);
        // SAFETY: the timepoints are of this backend.
        let rest = unsafe { env.device().elapsed(&timestamps[3], &after) }?;
        let longest = lead.max(total).max(rest);
        check!(
            longest <= all + Duration::from_micros(50),
            "launch {launch} took {all:?}, up to its first timestamp {lead:?}, between its timestamps {total:?}, from its last one {rest:?}"
        );
    }
    check!(best[0] < best[1] && best[2] < best[1], "nothing, forty fills of 8 MiB, one: {best:?}");
    Ok(())
}

fn steady(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let c = counter(env, &stream, 8)?;
    let state = || {
        let mut all = Vec::new();
        env.backend().pools(&mut |name, s| all.push((name, s.created, s.live, s.recycled)));
        env.device().pools(&mut |name, s| all.push((name, s.created, s.live, s.recycled)));
        let stats = env.device().memory(leasehold::MemoryKind::Device).map(|m| m.stats());
        (all, stats.map(|s| (s.driver_calls, s.allocations, s.reserved)).ok())
    };
    direct(&stream, &[Op::Graph(&c.graph)])?;
    env.drain(&stream)?;
    let before = state();
    for _ in 0..env.rounds(5_000) {
        direct(&stream, &[Op::Graph(&c.graph)])?;
    }
    env.drain(&stream)?;
    check_eq!(state(), before, "pools and the allocator after steady replay");
    Ok(())
}
