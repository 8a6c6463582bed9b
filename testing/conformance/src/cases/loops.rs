//! Cases of loops and branches, eager and in graphs.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::graph::{GraphBudget, NodeId, UpdateOutcome};
use leasehold::kernel::Grid;
use leasehold::{Array, Error, Graph, GraphUpdate, KernelBase, Runtime, Stream, View};

const LOOPS: &[Need] = &[Need::Conditionals, Need::Kernel(TestKernel::Add)];
const HELD: &[Need] = &[Need::Conditionals, Need::Kernel(TestKernel::Add), Need::Hold];
const GRAPHS: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Add)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(246, "a loop of a graph runs as long as its flag is set", LOOPS, counts)
        .sanitizer(),
    Case::runtime(247, "branches and loops within loops are as on the host", LOOPS, nested)
        .sanitizer(),
    Case::runtime(248, "a loop has its place in the order of nodes and streams", HELD, order)
        .sanitizer(),
    Case::runtime(249, "a loop that cannot be is refused, and loses nothing", GRAPHS, refused),
    Case::runtime(250, "a graph with a loop is updated, taken back and made again", LOOPS, updated)
        .sanitizer(),
];

/// Elements of each array: one block.
const N: usize = TestKernel::BLOCK as usize;

/// The kernel and the arrays of the bodies.
struct Work {
    runtime: Runtime,
    add: KernelBase,
    /// All ones: adding it takes one away.
    minus: Array<u32>,
    one: Array<u32>,
    /// Its first element is a flag: how often a loop still runs.
    left: Array<u32>,
    /// The number of runs of a body.
    runs: Array<u32>,
}

impl Work {
    fn new(env: &Env) -> Outcome<Self> {
        let runtime = env.runtime()?;
        Ok(Self {
            add: TestKernel::base(env.desc(TestKernel::Add)?)?,
            minus: runtime.upload(&[u32::MAX; N])?,
            one: runtime.upload(&[1u32; N])?,
            left: runtime.zeros(N)?,
            runs: runtime.zeros(N)?,
            runtime,
        })
    }

    /// `to += by`, by way of a temporary.
    fn bump(&self, on: &Runtime, to: &Array<u32>, by: &Array<u32>) -> leasehold::Result<()> {
        let sum = on.alloc_array::<u32>(N)?;
        let grid = Grid::new([1, 1, 1]).threads([TestKernel::BLOCK, 1, 1]);
        on.stream().launch(&self.add, &[to.read(), by.read(), sum.write()], &(), grid)?;
        on.stream().copy(to.view(), sum.view())
    }

    /// Runs a body `left[0]` times, and counts in `runs`.
    fn count_down(&self, stream: &Stream) -> leasehold::Result<()> {
        stream.record_while(self.left.slice(..1), |body| {
            self.bump(body, &self.runs, &self.one)?;
            self.bump(body, &self.left, &self.minus)
        })
    }

    fn set(&self, array: &Array<u32>, value: u32) -> leasehold::Result<()> {
        self.runtime.stream().fill(array.view(), value)
    }

    /// The first value; all others are equal.
    fn value(&self, array: &Array<u32>) -> Outcome<u32> {
        let values = self.runtime.to_vec(array)?;
        check_eq!(values, vec![values[0]; N], "values that are equal");
        Ok(values[0])
    }
}

fn counts(env: &Env) -> Outcome {
    let w = Work::new(env)?;
    let graph = w.runtime.record_graph(|r| w.count_down(r.stream()))?;
    check_eq!((graph.recorded(), graph.nodes()), (1, 1), "a loop is one node");
    let mut runs = 0;
    for times in [1, 0, 3, 17, env.rounds(200) as u32, 0, 2] {
        w.set(&w.left, times)?;
        let before = w.runtime.stream().now();
        let launched = graph.launch()?;
        check_eq!(launched.value(), before.value() + 1, "a launch is one submission");
        runs += times;
        check_eq!(w.value(&w.runs)?, runs, "the runs of {times} more");
        check_eq!(w.value(&w.left)?, 0, "the flag at the end");
        // The host's loop does the same.
        w.set(&w.left, times)?;
        w.count_down(w.runtime.stream())?;
        runs += times;
        check_eq!(w.value(&w.runs)?, runs, "the runs of the host's {times}");
    }
    Ok(())
}

/// For each of `outer[0]` rounds: if `odd[0]`, runs a loop of `count` rounds and sets `odd` to 0;
/// then sets it again. In the end `runs` is `outer * (count + 1)`.
fn rounds(
    w: &Work,
    stream: &Stream,
    [outer, odd, count]: &[Array<u32>; 3],
) -> leasehold::Result<()> {
    stream.record_while(outer.slice(..1), |body| {
        body.stream().copy(w.left.view(), count.view())?;
        body.stream().record_if(odd.slice(..1), |branch| {
            branch.stream().fill(odd.view(), 0u32)?;
            w.count_down(branch.stream())
        })?;
        // Only a branch whose flag is not set stays away.
        body.stream()
            .record_if(odd.slice(..1), |branch| branch.stream().fill(w.runs.view(), 0u32))?;
        body.stream().copy(odd.view(), w.one.view())?;
        w.bump(body, &w.runs, &w.one)?;
        w.bump(body, outer, &w.minus)
    })
}

fn nested(env: &Env) -> Outcome {
    let w = Work::new(env)?;
    let flags = [w.runtime.zeros(N)?, w.runtime.zeros(N)?, w.runtime.zeros(N)?];
    let graph = w.runtime.record_graph(|r| rounds(&w, r.stream(), &flags))?;
    for (outer, count) in [(0, 5), (1, 0), (3, 4), (5, 1)] {
        let mut ends = Vec::new();
        for replayed in [true, false] {
            for (flag, value) in std::iter::zip(&flags, [outer, 1, count]) {
                w.set(flag, value)?;
            }
            w.set(&w.runs, 0)?;
            match replayed {
                true => drop(graph.launch()?),
                false => rounds(&w, w.runtime.stream(), &flags)?,
            }
            check_eq!(w.value(&w.runs)?, outer * (count + 1), "{outer} rounds of {count}");
            ends.push([w.value(&flags[0])?, w.value(&flags[1])?, w.value(&w.left)?]);
        }
        check_eq!(ends[0], ends[1], "what the graph and the host leave");
    }
    Ok(())
}

fn order(env: &Env) -> Outcome {
    let w = Work::new(env)?;
    let stream = w.runtime.create_stream()?;
    let [copy, later] = [w.runtime.zeros::<u32>(N)?, w.runtime.zeros::<u32>(N)?];
    // The nodes around the loop read what its body writes, and write what it reads. A temporary
    // lives through the loop, and another one may have its memory afterwards.
    let graph = w.runtime.record_graph(|r| {
        let kept = r.alloc_array::<u32>(N)?;
        r.stream().copy(kept.view(), w.one.view())?;
        r.stream().fill(w.runs.view(), 5u32)?;
        r.stream().record_while(w.left.slice(..1), |body| {
            w.bump(body, &w.runs, &kept)?;
            w.bump(body, &w.left, &w.minus)
        })?;
        r.stream().copy(copy.view(), w.runs.view())?;
        r.stream().fill(w.runs.view(), 9u32)?;
        let next = r.alloc_array::<u32>(N)?;
        r.stream().copy(next.view(), copy.view())?;
        r.stream().copy(later.view(), next.view())
    })?;
    for times in [0, 4, 1, 9] {
        // Another stream sets the flag late, and a third one reads what comes of it.
        let hold = env.hold_runtime(&stream)?;
        stream.fill(w.left.view(), times)?;
        graph.launch()?;
        let after = w.runtime.create_stream()?;
        after.copy(later.view(), copy.view())?;
        hold.release_late(env)?;
        check_eq!(w.value(&later)?, 5 + times, "the copy on another stream");
        check_eq!(w.value(&w.runs)?, 9, "the node behind the loop");
        check_eq!(w.value(&w.left)?, 0, "the flag");
    }
    Ok(())
}

/// Records a loop that cannot be, then goes on.
fn expect_refused(
    w: &Work,
    r: &Runtime,
    kind: &str,
    what: &str,
    body: impl FnMut(&Runtime) -> leasehold::Result<()>,
) -> Outcome<Error> {
    expect_error(r.stream().record_while(w.left.slice(..1), body), kind, what)
}

fn refused(env: &Env) -> Outcome {
    let w = Work::new(env)?;
    let recording = leasehold::graph::GraphRecording::begin(&w.runtime)?;
    let r = recording.runtime();
    let ends = |body: &Runtime| body.stream().fill(w.left.view(), 0u32);
    if !w.runtime.raw_device().caps().conditionals {
        let e = expect_refused(&w, r, "Unsupported", "a loop on a device without", ends)?;
        check!(e.to_string().contains("no loops"), "the refusal: {e}");
        // The host's loop is there.
        w.set(&w.left, 3)?;
        w.count_down(w.runtime.stream())?;
        check_eq!(w.value(&w.runs)?, 3, "the host's loop");
        return Ok(());
    }
    let event = w.runtime.create_event()?;
    let mut left_over = None;
    expect_refused(&w, r, "InvalidArgument", "a flag that nothing writes", |body| {
        body.stream().fill(w.runs.view(), 1u32)
    })?;
    expect_refused(&w, r, "InvalidArgument", "an empty body", |_| Ok(()))?;
    let two = r.stream().record_if(w.left.slice(..2), ends);
    expect_error(two, "InvalidArgument", "a flag of two words")?;
    let odd = r.stream().record_if(w.left.view().part(2..6)?, ends);
    expect_error(odd, "InvalidArgument", "a flag between two words")?;
    expect_refused(&w, r, "Unsupported", "a wait", |body| body.stream().wait_event(&event))?;
    expect_refused(&w, r, "Unsupported", "an event", |body| body.stream().record(&event))?;
    expect_refused(&w, r, "Unsupported", "an upload", |body| {
        body.stream().upload(w.left.view(), &[0u32; N])
    })?;
    if w.runtime.raw_device().caps().host_calls {
        expect_refused(&w, r, "Unsupported", "a host call", |body| {
            body.stream().host_call("never", || Ok(()))
        })?;
    }
    expect_refused(&w, r, "Recording", "the stop of what is around it", |body| {
        body.stop_graph_recording().map(drop)
    })?;
    expect_refused(&w, r, "Recording", "the runtime around it", |_| {
        r.stream().fill(w.left.view(), 0u32)
    })?;
    expect_refused(&w, r, "Unavailable", "the body's own error", |body| {
        w.bump(body, &w.left, &w.minus)?;
        left_over = Some(body.clone());
        Err(Error::Unavailable("on purpose".into()))
    })?;
    let late = left_over.map_or(Ok(()), |body| ends(&body));
    expect_error(late, "Recording", "a body's runtime after the body")?;
    // An error that the body keeps to itself takes back only what it was of.
    r.stream().record_if(w.left.slice(..1), |body| {
        let _ = body.stream().wait_event(&event);
        let _ = body.stream().record_if(w.runs.slice(..1), |_| Ok(()));
        ends(body)
    })?;
    check_eq!(r.stream().next_node().map(NodeId::index), Some(1), "what is left of all that");
    let graph = recording.stop()?;
    w.set(&w.left, 1)?;
    graph.launch()?;
    check_eq!((w.value(&w.left)?, w.value(&w.runs)?), (0, 0), "the one node that there is");
    Ok(())
}

fn updated(env: &Env) -> Outcome {
    let w = Work::new(env)?;
    let other = w.runtime.zeros::<u32>(N)?;
    let graph: Graph = w.runtime.record_graph(|r| {
        r.stream().fill(w.left.view(), 4u32)?;
        w.count_down(r.stream())
    })?;
    graph.launch()?;
    check_eq!(w.value(&w.runs)?, 4, "before the update");
    let change = GraphUpdate::new().grid(NodeId::new(1), [1, 1, 1]);
    expect_error(graph.update(&change), "Unsupported", "an update of a launch in the body")?;
    let change = GraphUpdate::new().buffer(&w.runs, &other);
    check_eq!(graph.update(&change)?, UpdateOutcome::Reinstantiated, "another buffer");
    graph.launch()?;
    check_eq!((w.value(&w.runs)?, w.value(&other)?), (4, 4), "the new buffer counts");
    let budget = GraphBudget::of(&w.runtime);
    w.runtime.synchronize()?;
    budget.take_idle();
    check_eq!(graph.exec_bytes(), 0, "the executable of an idle graph");
    for launches in 2..6 {
        graph.launch()?;
        check_eq!(w.value(&other)?, 4 * launches, "the graph that was made again");
    }
    Ok(())
}
