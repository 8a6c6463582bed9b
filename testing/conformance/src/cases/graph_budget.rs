//! Cases of the graph budget: executables that are counted, taken back and made again.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::cases::kernels::launch;
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::graph::{GraphBudget, NodeId, UpdateOutcome};
use leasehold::kernel::Grid;
use leasehold::{Array, Graph, GraphUpdate, KernelBase, Runtime, View};
use std::thread;

const GRAPHS: &[Need] = &[Need::Graphs];
const HELD: &[Need] = &[Need::Graphs, Need::Hold];
const ADDS: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Add)];
const FILLS: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Fill)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(224, "graphs beyond a budget are taken back and replayed", GRAPHS, taken_back)
        .sanitizer(),
    Case::runtime(225, "a running graph keeps its executable, and counts", HELD, running),
    Case::runtime(226, "a budget below one graph is refused, and nothing is lost", GRAPHS, refused),
    Case::runtime(227, "graphs in turn beyond the budget are noticed once", GRAPHS, thrashing),
    Case::runtime(228, "threads share the room of one graph", ADDS, threads).sanitizer(),
    Case::runtime(229, "a graph without an executable is updated", FILLS, updated).sanitizer(),
];

/// Graphs of the same number of nodes, each with memory of its own.
struct Several {
    runtime: Runtime,
    budget: GraphBudget,
    graphs: Vec<(Graph, Array<u32>)>,
    /// Bytes of each of the executables.
    each: u64,
}

impl Several {
    /// Graph `i` fills its memory with `i + 1`, by way of others.
    fn new(env: &Env, count: u32) -> Outcome<Self> {
        let runtime = env.runtime()?;
        let graphs: Vec<_> = (1..=count)
            .map(|value| {
                let out = runtime.zeros::<u32>(64)?;
                let graph = runtime.record_graph(|r| {
                    let between = [r.alloc(256)?, r.alloc(256)?];
                    r.stream().fill(between[0].view(), value)?;
                    r.stream().copy(between[1].view(), between[0].view())?;
                    r.stream().copy(out.view(), between[1].view())
                })?;
                Ok((graph, out))
            })
            .collect::<leasehold::Result<_>>()?;
        let each = graphs.first().map_or(0, |g: &(Graph, Array<u32>)| g.0.exec_bytes());
        check!(each > 0, "an executable of three nodes takes no memory");
        check!(graphs.iter().all(|g| g.0.exec_bytes() == each), "equal graphs of other sizes");
        Ok(Self { budget: GraphBudget::of(&runtime), runtime, graphs, each })
    }

    /// Launches a graph over cleared memory, and looks at what it wrote and at the budget.
    fn launch(&self, i: usize) -> Outcome {
        let (graph, out) = &self.graphs[i];
        self.runtime.stream().fill(out.view(), 0u32)?;
        graph.launch()?;
        check_eq!(self.runtime.to_vec(out)?, vec![i as u32 + 1; 64], "what graph {i} wrote");
        self.counted()
    }

    /// The numbers are those of the graphs, and within the budget.
    fn counted(&self) -> Outcome {
        let stats = self.budget.stats();
        let bytes: u64 = self.graphs.iter().map(|g| g.0.exec_bytes()).sum();
        let there = self.graphs.iter().filter(|g| g.0.exec_bytes() > 0).count();
        check_eq!((stats.bytes, stats.executables), (bytes, there as u64), "the sum of the graphs");
        check_eq!(self.runtime.allocator().stats().in_executables, bytes, "the memory's report");
        check!(stats.bytes <= stats.limit, "{} bytes of {}", stats.bytes, stats.limit);
        Ok(())
    }

    /// These graphs have executables, and no others.
    fn there(&self, expected: &[usize], what: &str) -> Outcome {
        let there: Vec<_> =
            (0..self.graphs.len()).filter(|&i| self.graphs[i].0.exec_bytes() > 0).collect();
        check_eq!(there, expected, "{what}");
        Ok(())
    }
}

fn taken_back(env: &Env) -> Outcome {
    let several = Several::new(env, 6)?;
    several.counted()?;
    several.there(&[0, 1, 2, 3, 4, 5], "without a budget all stay")?;
    several.launch(2)?;
    several.budget.set_limit(3 * several.each);
    several.counted()?;
    check!(several.graphs[2].0.exec_bytes() > 0, "the one that was launched goes last");
    for i in [0, 1, 2, 0] {
        several.launch(i)?;
    }
    several.there(&[0, 1, 2], "those that were launched last")?;
    several.launch(5)?;
    several.there(&[0, 2, 5], "the least recent one goes")?;
    several.launch(0)?;
    several.launch(4)?;
    several.there(&[0, 4, 5], "the least recent one goes, again")?;
    for i in [3, 1, 4, 1, 5, 2, 0, 5, 3] {
        several.launch(i)?;
    }
    let bytes = several.budget.stats().bytes;
    check_eq!(several.budget.take_idle(), bytes, "all are idle");
    several.there(&[], "none is left")?;
    check_eq!(several.budget.stats().bytes, 0, "bytes of none");
    several.budget.set_limit(u64::MAX);
    (0..6).try_for_each(|i| several.launch(i))?;
    let stats = several.budget.stats();
    check_eq!(stats.made, 6 + stats.made_again, "what was made again");
    drop(several.graphs);
    check_eq!(several.budget.stats().bytes, 0, "graphs that were dropped count no more");
    Ok(())
}

fn running(env: &Env) -> Outcome {
    let several = Several::new(env, 2)?;
    let [(first, one), (second, two)] = [&several.graphs[0], &several.graphs[1]];
    let (stream, other) = (several.runtime.create_stream()?, several.runtime.create_stream()?);
    several.runtime.synchronize()?;
    let hold = env.hold_runtime(&stream)?;
    first.launch_on(&stream)?;
    let (bytes, idle) = (several.budget.stats().bytes, second.exec_bytes());
    check_eq!(several.budget.take_idle(), idle, "what is idle");
    check_eq!(several.budget.stats().bytes, bytes - idle, "what is left");
    check!(first.exec_bytes() > 0, "a running graph lost its executable");
    several.counted()?;
    // Room for one: the second waits for the first.
    several.budget.set_limit(several.each);
    let done = AtomicBool::new(false);
    let launched = thread::scope(|scope| {
        let second = scope.spawn(|| {
            let point = second.launch_on(&other);
            done.store(true, Ordering::Release);
            point
        });
        env.linger(std::time::Duration::from_millis(5));
        let early = done.load(Ordering::Acquire);
        let counted = several.counted();
        let released = hold.release();
        let point = second.join().map_err(|_| Stop::Failed("the launch panicked".into()));
        counted.and(released)?;
        check!(!early, "a launch found room while the graph that has it runs");
        Ok(point??)
    })?;
    env.reached(launched)?;
    several.there(&[1], "the first one made room")?;
    several.counted()?;
    check_eq!(several.runtime.to_vec(one)?, [1; 64], "what the first wrote");
    check_eq!(several.runtime.to_vec(two)?, [2; 64], "what the second wrote");
    // A graph that is dropped while it runs counts until it is over.
    let hold = env.hold_runtime(&other)?;
    let last = second.launch_on(&other)?;
    let Several { budget, graphs, .. } = several;
    let bytes = budget.stats().bytes;
    drop(graphs);
    check_eq!(budget.stats().bytes, bytes, "bytes of a graph that runs and is dropped");
    hold.release()?;
    env.reached(last)?;
    env.until("the bytes of a dropped graph", || budget.stats().bytes == 0)
}

fn refused(env: &Env) -> Outcome {
    let several = Several::new(env, 2)?;
    several.launch(0)?;
    several.budget.set_limit(0);
    several.there(&[], "a budget of nothing holds nothing")?;
    several.budget.set_limit(1);
    for (graph, _) in &several.graphs {
        expect_error(graph.launch().map(drop), "OverBudget", "a launch")?;
    }
    let out = several.runtime.zeros::<u32>(64)?;
    let recorded = several.runtime.record_graph(|r| r.stream().fill(out.view(), 9u32));
    expect_error(recorded.map(drop), "OverBudget", "a new graph")?;
    several.counted()?;
    several.runtime.stream().fill(out.view(), 4u32)?;
    check_eq!(several.runtime.to_vec(&out)?, [4; 64], "the stream goes on");
    several.budget.set_limit(several.each);
    several.launch(1)?;
    several.launch(0)
}

fn thrashing(env: &Env) -> Outcome {
    let several = Several::new(env, 3)?;
    several.budget.set_limit(2 * several.each);
    // Each stays for a while: no more than a few are made again.
    for i in [0, 1, 2] {
        (0..10).try_for_each(|_| several.launch(i))?;
    }
    check!(!several.budget.stats().thrashing, "graphs that stay for ten launches thrash");
    for i in [0, 1, 2, 0, 1, 2] {
        several.launch(i)?;
    }
    let stats = several.budget.stats();
    check!(stats.thrashing, "three graphs in turn in the room of two: {stats:?}");
    Ok(())
}

/// `sum = sum + one`, by a graph.
fn counter(runtime: &Runtime, add: &KernelBase) -> leasehold::Result<(Graph, Array<u32>)> {
    let (sum, one) = (runtime.zeros::<u32>(64)?, runtime.upload(&[1u32; 64])?);
    let grid = Grid::new([1, 1, 1]).threads([TestKernel::BLOCK, 1, 1]);
    let graph = runtime.record_graph(|r| {
        let next = r.alloc(256)?;
        let operands = [sum.read(), one.read(), next.write()];
        r.stream().launch(add, &operands, &(), grid)?;
        r.stream().copy(sum.view(), next.view())
    })?;
    Ok((graph, sum))
}

fn threads(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let add = TestKernel::base(env.desc(TestKernel::Add)?)?;
    let counters = [counter(&runtime, &add)?, counter(&runtime, &add)?];
    let budget = GraphBudget::of(&runtime);
    let each = counters[0].0.exec_bytes();
    budget.set_limit(each);
    let rounds = env.rounds(60) as u32;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let launches: Vec<_> = counters
            .iter()
            .chain(&counters)
            .map(|(graph, _)| {
                let runtime = &runtime;
                scope.spawn(move || -> leasehold::Result<()> {
                    let stream = runtime.create_stream()?;
                    (0..rounds).try_for_each(|_| graph.launch_on(&stream).map(drop))?;
                    stream.synchronize()
                })
            })
            .collect();
        let taker = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                budget.take_idle();
                thread::yield_now();
            }
        });
        let results: Vec<_> = launches.into_iter().map(|l| l.join()).collect();
        over.store(true, Ordering::Release);
        let taken = taker.join();
        for result in results {
            result.map_err(|_| Stop::Failed("a launch panicked".into()))??;
        }
        taken.map_err(|_| Stop::Failed("the taker panicked".into()))
    })?;
    for (_, sum) in &counters {
        check_eq!(runtime.to_vec(sum)?, vec![2 * rounds; 64], "launches of two threads");
    }
    let stats = budget.stats();
    let bytes: u64 = counters.iter().map(|c| c.0.exec_bytes()).sum();
    check_eq!(stats.bytes, bytes, "the sum of the graphs");
    check!(stats.bytes <= each, "{} bytes of {each}", stats.bytes);
    Ok(())
}

fn updated(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let fill = TestKernel::base(env.desc(TestKernel::Fill)?)?;
    let (out, other) = (runtime.zeros::<u32>(256)?, runtime.zeros::<u32>(256)?);
    let graph = runtime.record_graph(|r| launch(r, &fill, &out, 7).map(drop))?;
    let budget = GraphBudget::of(&runtime);
    check!(budget.take_idle() > 0, "a graph that was never launched is idle");
    let outcome = graph.update(&GraphUpdate::new().params(NodeId::new(0), &8u32))?;
    check_eq!((outcome, graph.exec_bytes()), (UpdateOutcome::InPlace, 0), "an update");
    graph.launch()?;
    check_eq!(runtime.to_vec(&out)?, [8; 256], "the launch after the update");
    budget.take_idle();
    let swap = GraphUpdate::new().buffer(out.buffer(), other.buffer());
    let _ = graph.update(&swap.params(NodeId::new(0), &9u32))?;
    graph.launch()?;
    check_eq!(runtime.to_vec(&other)?, [9; 256], "the launch after another buffer came");
    check_eq!(runtime.to_vec(&out)?, [8; 256], "the buffer that went");
    check_eq!(budget.stats().bytes, graph.exec_bytes(), "the sum of the graphs");
    Ok(())
}
