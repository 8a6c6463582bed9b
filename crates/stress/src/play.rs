//! Runs a plan on the runtime: a thread for each of the program's, and a watch that nothing hangs.
//!
//! Threads wait for each other as the plan says, and nowhere else. When calls may fail, a buffer
//! that a failed call was to write is not *trusted*: what it holds is compared again once it was
//! overwritten as a whole.

use crate::generate::Plan;
use crate::kernels::{Kernel, Params};
use crate::model::{Far, Planned};
use crate::prelude::{
    Call, Completions, Place, bytes, launch, open, refuses, resume, suspend, try_launch,
};
use crate::scenes;
use crate::step::{
    FAR_STREAM, Hand, Node, Op, PINNED, Read, Slot, Span, Step, TEMPS, Work, is_far, is_far_stream,
};
use crate::target::{Bench, Target, Weather};
use leasehold::backend::StreamDesc;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Condvar, Mutex};
use leasehold::graph::NodeId;
use leasehold::{
    Buffer, ContextGuard, Current, DeviceId, Error, Event, EventFlags, Graph, GraphUpdate,
    HostTimeline, KernelBase, Lease, Operand, Result, Runtime, Stream, View, ops,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// What is wrong with a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What, in words.
    pub what: String,
    /// Whether nothing went on.
    pub hang: bool,
    /// Where each thread was.
    pub threads: Vec<String>,
}

/// Why a step fails.
enum Trouble {
    /// The runtime says so.
    Error(Error),
    /// The runtime is wrong.
    Wrong(String),
}

impl From<Error> for Trouble {
    fn from(e: Error) -> Self {
        Trouble::Error(e)
    }
}

fn wrong<T>(what: impl Into<String>) -> std::result::Result<T, Trouble> {
    Err(Trouble::Wrong(what.into()))
}

type Outcome = std::result::Result<(), Trouble>;

/// How far a thread is.
#[derive(Default)]
struct Progress {
    done: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Progress {
    fn advance(&self, to: u32) {
        self.done.store(to, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.ring();
        }
    }

    fn ring(&self) {
        drop(self.lock.lock());
        self.bell.notify_all();
    }

    /// Waits until so many steps are over. Gives `false` when the run is stopped first.
    fn reach(&self, count: u32, stop: &AtomicBool) -> bool {
        for _ in 0..20 {
            if self.done.load(Ordering::SeqCst) >= count {
                return true;
            }
            std::thread::yield_now();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock();
        while self.done.load(Ordering::SeqCst) < count && !stop.load(Ordering::SeqCst) {
            self.bell.wait(&mut guard);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.done.load(Ordering::SeqCst) >= count
    }
}

fn places<T>(n: usize) -> Vec<Place<T>> {
    (0..n).map(|_| Place::new()).collect()
}

/// A host timeline, and the value that was waited for last.
struct Raisable {
    host_timeline: HostTimeline,
    next: u64,
}

/// A signal that a host call makes. Where the call never runs, because its stream fails, the host
/// timeline is signalled all the same: the program would wait for it for ever.
struct Signal {
    host_timeline: HostTimeline,
    next: u64,
    always: bool,
}

impl Drop for Signal {
    fn drop(&mut self) {
        if self.always && self.next > self.host_timeline.value() {
            // Another thread may have signalled it since.
            let _ = self.host_timeline.signal(self.next);
        }
    }
}

struct Recorded {
    graph: Graph,
    /// The names of its nodes, and how many elements they write.
    nodes: Vec<(Option<NodeId>, u32)>,
}

/// Marks a step that is over.
const OVER: u32 = 1 << 31;

/// What the watch looks at. It holds nothing of the runtime's.
struct Watch {
    plan: Arc<Plan>,
    progress: Vec<Progress>,
    /// Which step of the plan each thread is at.
    at: Vec<AtomicU32>,
    stop: AtomicBool,
    finding: Mutex<Option<Finding>>,
    /// Steps of the end.
    end: AtomicU32,
}

impl Watch {
    fn new(plan: Arc<Plan>) -> Arc<Self> {
        let threads = usize::from(plan.shape.threads);
        Arc::new(Self {
            progress: (0..threads).map(|_| Progress::default()).collect(),
            at: (0..threads).map(|_| AtomicU32::new(0)).collect(),
            stop: AtomicBool::new(false),
            finding: Mutex::new(None),
            end: AtomicU32::new(0),
            plan,
        })
    }

    fn find(&self, what: String, hang: bool) {
        let mut finding = self.finding.lock();
        if finding.is_none() {
            let threads = self.at.iter().enumerate().map(|(t, at)| {
                let at = at.load(Ordering::Relaxed);
                match self.plan.steps.get((at & !OVER) as usize) {
                    Some(p) if at & OVER == 0 => {
                        format!("thread {t} is in step {at}: {:?}", p.step)
                    }
                    Some(_) => format!("thread {t} is through with step {}", at & !OVER),
                    None => format!("thread {t} is through"),
                }
            });
            *finding = Some(Finding { what, hang, threads: threads.collect() });
        }
        drop(finding);
        self.stop.store(true, Ordering::SeqCst);
        self.progress.iter().for_each(Progress::ring);
    }

    /// Steps that are over.
    fn steps(&self) -> u32 {
        self.progress.iter().map(|p| p.done.load(Ordering::Relaxed)).sum::<u32>()
            + self.end.load(Ordering::Relaxed)
    }
}

/// Everything that the threads share.
struct World {
    watch: Arc<Watch>,
    runtime: Runtime,
    kernels: [KernelBase; Kernel::ALL.len()],
    /// The other device's runtime, if there is one and it is open; its name; its kernels.
    far: Place<Runtime>,
    far_device: Option<DeviceId>,
    far_kernels: [KernelBase; Kernel::ALL.len()],
    strict: bool,
    streams: Vec<Place<Stream>>,
    buffers: Vec<Place<Lease<Buffer>>>,
    events: Vec<Place<Lease<Event>>>,
    host_timelines: Vec<Place<Raisable>>,
    graphs: Vec<Place<Recorded>>,
    /// By the buffers' numbers.
    trusted: Vec<AtomicBool>,
    calls: Arc<AtomicU64>,
    completions: Completions,
}

/// What a thread keeps for itself.
#[derive(Default)]
struct Own {
    clones: VecDeque<Option<Lease<Buffer>>>,
    entered: Vec<Option<(ContextGuard, Stream)>>,
    bytes: Vec<u8>,
}

fn get<T: Clone>(places: &[Place<T>], slot: Slot) -> Option<T> {
    places.get(usize::from(slot))?.get()
}

/// A slot is empty because a call failed before.
const EMPTY: Trouble = Trouble::Error(Error::TopologyChanged(leasehold::backend::Text::Borrowed(
    "an earlier step failed",
)));

impl World {
    fn new(bench: &Bench, watch: Arc<Watch>) -> Self {
        let shape = watch.plan.shape;
        let world = Self {
            streams: places(shape.stream_places().into()),
            buffers: places(usize::from(PINNED) * 2),
            events: places(shape.events.into()),
            host_timelines: places(shape.host_timelines.into()),
            graphs: places(shape.graphs.into()),
            trusted: (0..watch.plan.buffers).map(|_| AtomicBool::new(true)).collect(),
            calls: Arc::default(),
            completions: Completions::default(),
            strict: bench.weather != Weather::Foul,
            kernels: bench.kernels().clone(),
            far: Place::new(),
            far_device: bench.far_device(),
            far_kernels: bench.far_kernels().clone(),
            runtime: bench.runtime().clone(),
            watch,
        };
        world.streams[0].put(world.runtime.stream().clone());
        // It is open already.
        if shape.far != Far::None
            && let Some(Ok(far)) = bench.far()
        {
            world.streams[usize::from(FAR_STREAM)].put(far.stream().clone());
            world.far.put(far);
        }
        world
    }

    fn stream(&self, slot: Slot) -> std::result::Result<Stream, Trouble> {
        get(&self.streams, slot).ok_or(EMPTY)
    }

    /// The runtime of this device, or of the other one.
    fn runtime(&self, far: bool) -> std::result::Result<Runtime, Trouble> {
        if far { self.far.get().ok_or(EMPTY) } else { Ok(self.runtime.clone()) }
    }

    /// A buffer to work with: its runtime is open.
    fn buffer(&self, slot: Slot) -> std::result::Result<Lease<Buffer>, Trouble> {
        self.runtime(is_far(slot))?;
        get(&self.buffers, slot).ok_or(EMPTY)
    }

    fn event(&self, slot: Slot) -> std::result::Result<Lease<Event>, Trouble> {
        get(&self.events, slot).ok_or(EMPTY)
    }

    fn graph(&self, slot: Slot) -> std::result::Result<Graph, Trouble> {
        self.graphs[usize::from(slot)].lock().as_ref().map(|r| r.graph.clone()).ok_or(EMPTY)
    }

    /// Whether an error is one that calls may give when something fails under them.
    fn excusable(&self, e: &Error) -> bool {
        !self.strict
            && !matches!(
                e,
                Error::InvalidArgument(_)
                    | Error::StaleHandle { .. }
                    | Error::Occupied { .. }
                    | Error::Recording { .. }
            )
    }

    /// Runs the steps of a thread.
    fn thread(&self, me: usize) {
        let mut own = Own::default();
        let steps =
            self.watch.plan.steps.iter().enumerate().filter(|(_, p)| usize::from(p.thread) == me);
        for (done, (index, planned)) in steps.enumerate() {
            if !planned.after.iter().all(|&(t, count)| {
                self.watch.progress[usize::from(t)].reach(count, &self.watch.stop)
            }) || self.watch.stop.load(Ordering::SeqCst)
            {
                return;
            }
            self.watch.at[me].store(index as u32, Ordering::Relaxed);
            let outcome = catch_unwind(AssertUnwindSafe(|| self.step(planned, &mut own)));
            let result = outcome.unwrap_or_else(|_| wrong("a panic"));
            self.judge(index, planned, result);
            self.watch.at[me].store(index as u32 | OVER, Ordering::Relaxed);
            self.watch.progress[me].advance(done as u32 + 1);
        }
        self.watch.at[me].store(u32::MAX, Ordering::Relaxed);
    }

    fn judge(&self, index: usize, planned: &Planned, result: Outcome) {
        let trust = |b: u32, yes: bool| self.trusted[b as usize].store(yes, Ordering::Relaxed);
        match result {
            Ok(()) => {
                let sound =
                    planned.reads.iter().all(|b| self.trusted[*b as usize].load(Ordering::Relaxed));
                for &(b, whole) in planned.writes.iter().filter(|_| !self.strict) {
                    if !sound || whole {
                        trust(b, sound);
                    }
                }
            }
            Err(Trouble::Error(e)) if self.excusable(&e) => {
                planned.writes.iter().for_each(|w| trust(w.0, false));
                // What was recorded before is not what the model means.
                planned.records.iter().for_each(|e| drop(self.events[usize::from(*e)].take()));
                self.replace(&planned.step);
            }
            Err(Trouble::Error(e)) => {
                self.watch.find(format!("step {index}, {:?}: {e}", planned.step), false)
            }
            Err(Trouble::Wrong(what)) => {
                self.watch.find(format!("step {index}, {:?}: {what}", planned.step), false)
            }
        }
    }

    /// Puts a healthy stream in the place of one that failed.
    fn replace(&self, step: &Step) {
        let (Step::Run(s, _)
        | Step::Session(s, _)
        | Step::Sync(s)
        | Step::Query(s)
        | Step::Check(Read::On(s), _)
        | Step::Call { stream: s, .. }
        | Step::Complete(s)
        | Step::Try(s, _)
        | Step::Record { stream: s, .. }
        | Step::WaitEvent { stream: s, .. }
        | Step::Launch { stream: s, .. }) = step
        else {
            return;
        };
        let place = &self.streams[usize::from(*s)];
        let failed = place.lock().take_if(|stream| stream.failure().is_some());
        if let Some(failed) = failed {
            let _ = failed.synchronize_timeout(Some(Duration::from_secs(5)));
            drop(failed);
            if let Ok(runtime) = self.runtime(is_far_stream(*s))
                && let Ok(new) = runtime.create_stream()
            {
                place.lock().get_or_insert(new);
            }
        }
    }

    fn step(&self, planned: &Planned, own: &mut Own) -> Outcome {
        let runtime = &self.runtime;
        match planned.step {
            Step::Stream(s, priority) => {
                let made = self
                    .runtime(is_far_stream(s))?
                    .create_stream_with(&StreamDesc::priority(priority))?;
                self.streams[usize::from(s)].put(made);
            }
            Step::DropStream(s) => drop(self.streams[usize::from(s)].take()),
            Step::Alloc { slot, len, stream } => {
                let made = self.stream(stream)?.alloc(len.into())?;
                self.buffers[usize::from(slot)].put(made);
            }
            Step::New { slot, len, seed } => {
                let made = self.runtime(is_far(slot))?.upload(&bytes(seed, len as usize))?;
                self.buffers[usize::from(slot)].put(made.into_buffer());
            }
            Step::Pin { slot, len } => {
                let made = runtime.alloc_pinned(len.into())?;
                self.buffers[usize::from(slot)].put(made);
            }
            Step::Drop(slot) => drop(self.buffers[usize::from(slot)].take()),
            Step::Clone(slot) => own.clones.push_back(get(&self.buffers, slot)),
            Step::Unclone => drop(own.clones.pop_front()),
            Step::Run(stream, ref work) => {
                let stream = self.stream(stream)?;
                self.work(&stream, work, &|slot| self.buffer(slot))?;
            }
            Step::Session(stream, ref works) => self.session(&self.stream(stream)?, works)?,
            Step::Try(stream, ref work) => {
                let (stream, to) = (self.stream(stream)?, self.buffer(work.to.slot)?);
                let from = work
                    .from
                    .iter()
                    .map(|s| self.buffer(s.slot))
                    .collect::<std::result::Result<Vec<_>, _>>()?;
                let operands = operands(work, &to, &from)?;
                try_launch(&stream, self.call(work, &operands))?;
            }
            Step::Check(read, span) => self.check(read, span, planned, &mut own.bytes)?,
            Step::Sync(s) => self.stream(s)?.synchronize()?,
            Step::Query(s) => drop(self.stream(s)?.query()?),
            Step::Flush(s) => self.stream(s)?.flush()?,
            Step::SyncDevice => runtime.synchronize()?,
            Step::Enter(s) => {
                let entered = self.stream(s).and_then(|stream| {
                    let guard = stream.enter()?;
                    Ok((guard, stream))
                });
                match entered {
                    Ok(entered) => own.entered.push(Some(entered)),
                    Err(e) => {
                        own.entered.push(None);
                        return Err(e);
                    }
                }
            }
            Step::Leave => {
                drop(own.entered.pop());
                let last = own.entered.iter().rev().flatten().next();
                match (last, Current::get()) {
                    (None, Err(_)) => {}
                    (Some((_, stream)), Ok(current)) if current.stream().same(stream) => {}
                    (_, got) => return wrong(format!("the thread's current context is {got:?}")),
                }
            }
            Step::Call { stream, once } => {
                let (stream, calls) = (self.stream(stream)?, self.calls.clone());
                let count = move || {
                    calls.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                let called = if once {
                    stream.host_call_once("count", count)
                } else {
                    stream.host_call("count", count)
                };
                called?;
            }
            Step::Complete(stream) => self.completions.ask(&self.stream(stream)?)?,
            Step::Open => {
                let Some(device) = self.far_device else {
                    return wrong("there is no other device");
                };
                let far = open(runtime.context(), device)?;
                self.streams[usize::from(FAR_STREAM)].put(far.stream().clone());
                self.far.put(far);
            }
            Step::Close => {
                let streams =
                    [FAR_STREAM, FAR_STREAM + 1].map(|s| self.streams[usize::from(s)].take());
                let far = self.far.take().ok_or(EMPTY)?;
                drop(streams);
                far.close(Duration::from_secs(20))?;
            }
            Step::Closed(slot) => {
                refuses(&self.stream(0)?, &get(&self.buffers, slot).ok_or(EMPTY)?)?
            }
            Step::Trim => drop(runtime.allocator().trim(0)?),
            Step::Wrong(kind, slot) => {
                let buffer = self.buffer(slot)?;
                scenes::refused(runtime, &self.stream(0)?, &buffer, kind).or_else(wrong)?;
            }
            Step::Scene(scene) => scenes::play(runtime, &self.kernels, scene)
                .or_else(|e| if self.strict { wrong(e) } else { Ok(()) })?,
            Step::Event { .. }
            | Step::DropEvent(_)
            | Step::Record { .. }
            | Step::WaitEvent { .. }
            | Step::WaitStream { .. }
            | Step::QueryEvent(_)
            | Step::SyncEvent(_)
            | Step::Elapsed(..) => self.events(&planned.step)?,
            Step::HostTimeline(_)
            | Step::DropHostTimeline(_)
            | Step::Hold { .. }
            | Step::Signal(_)
            | Step::CallSignal { .. } => {
                self.host_timeline(&planned.step)?;
            }
            Step::Graph { slot, ref temps, ref nodes } => {
                let recorded = self.record(temps, nodes)?;
                self.graphs[usize::from(slot)].put(recorded);
            }
            Step::DropGraph(_)
            | Step::Launch { .. }
            | Step::Params { .. }
            | Step::Grid { .. }
            | Step::Swap { .. }
            | Step::Suspend { .. }
            | Step::Resume(_) => self.graph_step(&planned.step)?,
        }
        Ok(())
    }

    fn check(&self, read: Read, span: Span, planned: &Planned, again: &mut Vec<u8>) -> Outcome {
        let buffer = self.buffer(span.slot)?;
        let part = buffer.part(span.range())?;
        let mut new = Vec::new();
        let got = if read == Read::Again { again } else { &mut new };
        let runtime = self.runtime(is_far(span.slot))?;
        match read {
            Read::New => *got = runtime.download::<u8>(&part)?,
            Read::Again => runtime.stream().download_into(got, part.view())?,
            Read::On(s) => {
                got.resize(span.len as usize, 0xEE);
                self.stream(s)?.download(got, part)?;
            }
        }
        let (Some(expect), Some(&b)) = (&planned.expect, planned.reads.first()) else {
            return Ok(());
        };
        if self.strict || self.trusted[b as usize].load(Ordering::Relaxed) {
            compare(got, expect).or_else(wrong)?;
        }
        Ok(())
    }

    fn events(&self, step: &Step) -> Outcome {
        let runtime = &self.runtime;
        match *step {
            Step::Event { slot, timing } => {
                let made = runtime.create_event_with(if timing {
                    EventFlags::TIMING
                } else {
                    EventFlags::DISABLE_TIMING
                })?;
                self.events[usize::from(slot)].put(made);
            }
            Step::DropEvent(slot) => drop(self.events[usize::from(slot)].take()),
            Step::Record { event, stream } => self.stream(stream)?.record(&self.event(event)?)?,
            Step::WaitEvent { stream, event } => {
                self.stream(stream)?.wait_event(&self.event(event)?)?
            }
            Step::WaitStream { stream, on } => {
                let now = self.stream(on)?.now();
                self.stream(stream)?.wait(now)?;
            }
            Step::QueryEvent(event) => drop(self.event(event)?.query()?),
            Step::SyncEvent(event) => {
                let event = self.event(event)?;
                event.synchronize()?;
                if !event.query()? {
                    return wrong("an event is not complete after it was waited for");
                }
            }
            Step::Elapsed(a, b) => drop(self.event(b)?.elapsed_since(&*self.event(a)?)?),
            _ => {}
        }
        Ok(())
    }

    fn host_timeline(&self, step: &Step) -> Outcome {
        match *step {
            Step::HostTimeline(slot) => {
                let host_timeline = self.runtime.create_host_timeline()?;
                let next = host_timeline.value();
                self.host_timelines[usize::from(slot)].put(Raisable { host_timeline, next });
            }
            Step::DropHostTimeline(slot) => drop(self.host_timelines[usize::from(slot)].take()),
            Step::Hold { stream, host_timeline } => {
                let stream = self.stream(stream)?;
                let point = {
                    let mut place = self.host_timelines[usize::from(host_timeline)].lock();
                    let held = place.as_mut().ok_or(EMPTY)?;
                    held.next += 1;
                    held.host_timeline.at(held.next)
                };
                stream.wait(point)?;
            }
            Step::Signal(host_timeline) => {
                let (host_timeline, next) = {
                    let place = self.host_timelines[usize::from(host_timeline)].lock();
                    place.as_ref().map(|r| (r.host_timeline.clone(), r.next)).ok_or(EMPTY)?
                };
                // Nothing may have come to wait, where calls fail.
                if next > host_timeline.value() {
                    host_timeline.signal(next)?;
                }
            }
            Step::CallSignal { stream, host_timeline } => {
                // The host timeline is the call's from here: nobody else signals it, at the end
                // neither, when the call may be still to come.
                let Raisable { host_timeline, next } =
                    self.host_timelines[usize::from(host_timeline)].take().ok_or(EMPTY)?;
                let signal = Signal { host_timeline, next, always: !self.strict };
                let call = move || signal.host_timeline.signal(signal.next);
                self.stream(stream).and_then(|s| Ok(s.host_call_once("raise", call)?))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn record(&self, temps: &[u32], nodes: &[Node]) -> std::result::Result<Recorded, Trouble> {
        let runtime = &self.runtime;
        let mut names = Vec::with_capacity(nodes.len());
        runtime.start_graph_recording()?;
        let recorded = (|| -> Outcome {
            let temps =
                temps.iter().map(|&len| runtime.alloc(len.into())).collect::<Result<Vec<_>>>()?;
            let find = |slot: Slot| {
                if slot >= TEMPS {
                    Ok(temps[usize::from(slot - TEMPS)].clone())
                } else {
                    self.buffer(slot)
                }
            };
            for node in nodes {
                let elements = if let Node::Work(work) = node { work.to.len / 4 } else { 0 };
                names.push((runtime.next_node(), elements));
                match node {
                    Node::Work(work) => self.work(runtime.stream(), work, &find)?,
                    Node::Call => {
                        let calls = self.calls.clone();
                        runtime.stream().host_call("count", move || {
                            calls.fetch_add(1, Ordering::SeqCst);
                            Ok(())
                        })?;
                    }
                    Node::Record(event) => runtime.stream().record(&self.event(*event)?)?,
                }
            }
            Ok(())
        })();
        match recorded {
            Ok(()) => Ok(Recorded { graph: runtime.stop_graph_recording()?, nodes: names }),
            Err(e) => {
                runtime.abandon_graph_recording();
                Err(e)
            }
        }
    }

    fn graph_step(&self, step: &Step) -> Outcome {
        match *step {
            Step::DropGraph(slot) => drop(self.graphs[usize::from(slot)].take()),
            Step::Launch { graph, stream } => {
                self.graph(graph)?.launch_on(&self.stream(stream)?)?;
            }
            Step::Params { graph, node, words } => {
                let (name, n) = {
                    let place = self.graphs[usize::from(graph)].lock();
                    place.as_ref().and_then(|r| r.nodes.get(node as usize).copied()).ok_or(EMPTY)?
                };
                let params: Params = [n, words[0], words[1]];
                let Some(name) = name else { return wrong("a recorded node without a name") };
                let updated = self.graph(graph)?.update(&GraphUpdate::new().params(name, &params));
                self.give_up(graph, updated.map(drop).map_err(Trouble::from))?;
            }
            Step::Grid { graph, node, blocks } => {
                let name = {
                    let place = self.graphs[usize::from(graph)].lock();
                    place.as_ref().and_then(|r| r.nodes.get(node as usize).copied()).ok_or(EMPTY)?.0
                };
                let Some(name) = name else { return wrong("a recorded node without a name") };
                let updated =
                    self.graph(graph)?.update(&GraphUpdate::new().grid(name, [blocks, 1, 1]));
                self.give_up(graph, updated.map(drop).map_err(Trouble::from))?;
            }
            Step::Swap { graph, old, new } => {
                let swap = || -> Outcome {
                    let (old, new) = (self.buffer(old)?, self.buffer(new)?);
                    Ok(self
                        .graph(graph)?
                        .update(&GraphUpdate::new().buffer(&old, &new))
                        .map(drop)?)
                };
                self.give_up(graph, swap())?;
            }
            Step::Suspend { graph, stream } => {
                suspend(&self.graph(graph)?, &self.stream(stream)?)?;
            }
            Step::Resume(graph) => {
                self.give_up(graph, resume(&self.graph(graph)?).map_err(Trouble::from))?
            }
            _ => {}
        }
        Ok(())
    }

    /// A graph that could not be changed is not what the model means.
    fn give_up(&self, graph: Slot, result: Outcome) -> Outcome {
        if result.is_err() && !self.strict {
            drop(self.graphs[usize::from(graph)].take());
        }
        result
    }

    /// Does work on a stream.
    fn work(
        &self,
        stream: &Stream,
        work: &Work,
        find: &dyn Fn(Slot) -> std::result::Result<Lease<Buffer>, Trouble>,
    ) -> Outcome {
        let leases =
            work.from.iter().map(|s| find(s.slot)).collect::<std::result::Result<Vec<_>, _>>()?;
        let lease = find(work.to.slot)?;
        let to = lease.part(work.to.range())?;
        let from = |i: usize| leases[i].part(work.from[i].range());
        match work.op {
            Op::Fill { pattern, width } => {
                let pattern = match width {
                    1 => ops::Pattern::U8(pattern as u8),
                    2 => ops::Pattern::U16(pattern as u16),
                    _ => ops::Pattern::U32(pattern),
                };
                stream.fill(to, pattern)?;
            }
            Op::Upload { seed, hand } => {
                let bytes = bytes(seed, work.to.len as usize);
                match hand {
                    Hand::Asynchronous => stream.upload(to, &bytes)?,
                    Hand::Synchronous => stream.upload_blocking(to, &bytes)?,
                    Hand::Owned => stream.upload_owned(to, bytes)?,
                }
            }
            Op::Copy => stream.copy(to, from(0)?)?,
            Op::Copy2d { width, rows, from_pitch, to_pitch } => stream.copy_2d(
                to,
                from(0)?,
                ops::Rows::new(width.into(), rows.into())
                    .src_pitch(from_pitch.into())
                    .dst_pitch(to_pitch.into()),
            )?,
            Op::Pinned => stream.copy_pinned(to, from(0)?)?,
            Op::Launch { .. } => {
                let operands = operands(work, &lease, &leases)?;
                launch(stream, &[self.call(work, &operands)])?;
            }
        }
        Ok(())
    }

    fn call<'a>(&'a self, work: &Work, operands: &'a [Operand<'a>]) -> Call<'a> {
        let (kernel, words) = match work.op {
            Op::Launch { kernel, words } => (kernel, words),
            _ => (Kernel::Mask, [0; 2]),
        };
        let kernels = if is_far(work.to.slot) { &self.far_kernels } else { &self.kernels };
        Call {
            kernel: &kernels[kernel as usize],
            operands,
            params: [work.to.len / 4, words[0], words[1]],
        }
    }

    fn session(&self, stream: &Stream, works: &[Work]) -> Outcome {
        let mut leases = Vec::with_capacity(works.len());
        for work in works {
            let from = work
                .from
                .iter()
                .map(|s| self.buffer(s.slot))
                .collect::<std::result::Result<Vec<_>, _>>()?;
            leases.push((self.buffer(work.to.slot)?, from));
        }
        let mut staged = Vec::with_capacity(works.len());
        for (work, (to, from)) in works.iter().zip(&leases) {
            staged.push((work, operands(work, to, from)?));
        }
        let calls: Vec<_> =
            staged.iter().map(|(work, operands)| self.call(work, operands)).collect();
        Ok(launch(stream, &calls)?)
    }

    /// What is left is compared, and everything is dropped.
    fn finish(&self) -> std::result::Result<(), String> {
        let said = |e: Error| if self.strict { Err(e.to_string()) } else { Ok(()) };
        let step = || self.watch.end.fetch_add(1, Ordering::Relaxed);
        for place in &self.host_timelines {
            step();
            if let Some(Raisable { host_timeline, next }) = place.take()
                && next > host_timeline.value()
            {
                host_timeline.signal(next).or_else(said)?;
            }
        }
        for stream in self.streams.iter().filter_map(Place::get) {
            step();
            stream.synchronize().or_else(said)?;
        }
        if let (None, Some(device)) = (self.far.get(), self.far_device) {
            match open(self.runtime.context(), device) {
                Ok(far) => self.far.put(far),
                Err(e) => said(e)?,
            }
        }
        for (slot, b, expect) in &self.watch.plan.remains {
            step();
            let (Some(buffer), Ok(runtime)) =
                (get(&self.buffers, *slot), self.runtime(is_far(*slot)))
            else {
                continue;
            };
            match runtime.download::<u8>(&buffer) {
                Ok(got) if self.strict || self.trusted[*b as usize].load(Ordering::Relaxed) => {
                    compare(&got, expect).map_err(|e| format!("at the end, buffer {slot}: {e}"))?;
                }
                Ok(_) => {}
                Err(e) => said(e)?,
            }
        }
        self.graphs.iter().for_each(|p| drop(p.take()));
        self.runtime.synchronize().or_else(said)?;
        self.far.take().map_or(Ok(()), |far| far.synchronize()).or_else(said)?;
        let calls = self.calls.load(Ordering::SeqCst);
        if calls != self.watch.plan.calls && self.strict {
            return Err(format!("{calls} host calls ran, not {}", self.watch.plan.calls));
        }
        self.completions.check(self.strict)?;
        step();
        self.events.iter().for_each(|p| drop(p.take()));
        self.buffers.iter().for_each(|p| drop(p.take()));
        self.streams.iter().for_each(|p| drop(p.take()));
        step();
        Ok(())
    }
}

/// A launch's operands, with the roles that its kernel declares.
fn operands<'a>(
    work: &Work,
    to: &'a Lease<Buffer>,
    from: &'a [Lease<Buffer>],
) -> Result<Vec<Operand<'a>>> {
    let mut operands = Vec::with_capacity(from.len() + 1);
    for (span, lease) in work.from.iter().zip(from) {
        operands.push(lease.part(span.range())?.read());
    }
    let part = to.part(work.to.range())?;
    let role = if matches!(work.op, Op::Launch { kernel: Kernel::Mask, .. }) {
        part.read_write()
    } else {
        part.write()
    };
    operands.push(role);
    Ok(operands)
}

fn compare(got: &[u8], expect: &[u8]) -> std::result::Result<(), String> {
    if got == expect {
        return Ok(());
    }
    if got.len() != expect.len() {
        return Err(format!("{} bytes came back, not {}", got.len(), expect.len()));
    }
    let differ = got.iter().zip(expect).filter(|(g, e)| g != e).count();
    let at = got.iter().zip(expect).position(|(g, e)| g != e).unwrap_or(0);
    Err(format!(
        "byte {at} is {:#04x} and not {:#04x}; {differ} of {} bytes differ",
        got[at],
        expect[at],
        got.len()
    ))
}

/// Runs a plan on a target. `patience` is how long nothing may go on.
pub(crate) fn play(
    target: &Target,
    seed: u64,
    faults: bool,
    plan: Arc<Plan>,
    patience: Duration,
) -> std::result::Result<(), Finding> {
    let plain = |what: String| Finding { what, hang: false, threads: Vec::new() };
    let bench = target
        .open(seed, faults)
        .map_err(|e| plain(format!("the device cannot be opened: {e}")))?;
    let watch = Watch::new(plan);
    let world = Arc::new(World::new(&bench, watch.clone()));
    let conductor = std::thread::spawn(move || conduct(world, bench));
    let mut last = (0, Instant::now());
    while !conductor.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
        let now = watch.steps();
        if now != last.0 {
            last = (now, Instant::now());
        } else if last.1.elapsed() > patience {
            watch.find(format!("nothing went on for {patience:?}"), true);
            // Its threads cannot be ended.
            let finding = watch.finding.lock().clone();
            return Err(finding.unwrap_or_else(|| plain("a hang".into())));
        }
    }
    match conductor.join() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(finding)) => Err(finding),
        Err(_) => Err(plain("a panic at the end".into())),
    }
}

fn conduct(world: Arc<World>, bench: Bench) -> std::result::Result<(), Finding> {
    let threads: Vec<_> = (0..world.watch.progress.len())
        .map(|me| {
            let world = world.clone();
            std::thread::spawn(move || world.thread(me))
        })
        .collect();
    for (t, thread) in threads.into_iter().enumerate() {
        if thread.join().is_err() {
            world.watch.find(format!("a panic of thread {t}"), false);
        }
    }
    bench.calm();
    let finding = world.watch.finding.lock().take();
    let ended = match finding {
        Some(finding) => Err(finding),
        None => world.finish().map_err(|what| Finding { what, hang: false, threads: Vec::new() }),
    };
    drop(world);
    ended?;
    bench.close().map_err(|what| Finding { what, hang: false, threads: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Program;
    use crate::model::Shape;

    fn plan(steps: Vec<Step>) -> Arc<Plan> {
        let steps: Vec<_> = steps.into_iter().map(|s| (0, s)).collect();
        let count = steps.len();
        let plan = Program { shape: Shape::new(1, Far::None), steps }.plan();
        assert_eq!(plan.steps.len(), count, "a step has no meaning");
        Arc::new(plan)
    }

    #[test]
    fn a_graph_is_given_up_where_its_new_buffer_is_missing() {
        let fill = Work {
            op: Op::Fill { pattern: 7, width: 1 },
            from: vec![],
            to: Span { slot: 0, at: 0, len: 64 },
        };
        let plan = plan(vec![
            Step::New { slot: 0, len: 64, seed: 1 },
            Step::Graph { slot: 0, temps: vec![], nodes: vec![Node::Work(fill)] },
            Step::New { slot: 1, len: 64, seed: 2 },
            Step::Swap { graph: 0, old: 0, new: 1 },
            Step::Launch { graph: 0, stream: 0 },
        ]);
        let bench = Target::new("cpu:0".parse().unwrap(), false).unwrap().open(0, false).unwrap();
        let mut world = World::new(&bench, Watch::new(plan.clone()));
        world.strict = false;
        let mut own = Own::default();
        // The second buffer cannot be made, as it were.
        let done: Vec<_> = [0, 1, 3, 4]
            .iter()
            .map(|&i: &usize| world.step(&plan.steps[i], &mut own).is_ok())
            .collect();
        assert_eq!(
            done,
            [true, true, false, false],
            "the graph is launched as it was, and the model does not know"
        );
        drop(world);
        bench.close().unwrap();
    }

    /// On the simulated device the call comes late, so that the program's end is there first.
    #[test]
    #[cfg(feature = "cuda")]
    fn a_host_timeline_that_a_call_is_to_raise_is_signalled_by_nobody_else() {
        let plan = plan(vec![
            Step::Stream(1, 0),
            Step::HostTimeline(1),
            Step::Hold { stream: 0, host_timeline: 1 },
            Step::CallSignal { stream: 1, host_timeline: 1 },
        ]);
        let target = Target::new("sim:0".parse().unwrap(), true).unwrap();
        for seed in (0..200).step_by(4) {
            assert_eq!(target.weather(seed, true), Weather::Late);
            assert_eq!(
                play(&target, seed, true, plan.clone(), Duration::from_secs(60)),
                Ok(()),
                "seed {seed}"
            );
        }
    }
}
