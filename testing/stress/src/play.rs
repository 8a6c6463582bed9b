//! Runs a plan on the runtime: a thread for each of the program's, and a watch that nothing hangs.
//!
//! Threads wait for each other as the plan says, and nowhere else. When calls may fail, a buffer
//! that a failed call was to write is not *trusted*: what it holds is compared again once it was
//! overwritten as a whole.

mod border;
mod steps;

use crate::generate::Plan;
use crate::kernels::Kernel;
use crate::model::{Far, Planned};
use crate::options::Border;
use crate::prelude::{Completions, Place, open};
use crate::step::{FAR_STREAM, PINNED, Read, Slot, Step, is_far, is_far_stream};
use crate::target::{Bench, Target, Weather};
use crate::work::compare;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Condvar, Mutex};
use leasehold::graph::{GraphBudget, NodeId};
use leasehold::{
    Buffer, ContextGuard, DeviceId, Error, Event, Graph, HostTimeline, KernelBase, Lease, Runtime,
    Stream,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// A defect that a run found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The defect in words.
    pub what: String,
    /// Says whether nothing went on.
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

/// The progress that the watch looks at. The watch holds no object of the runtime.
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
        self.stop();
    }

    /// Ends all threads after their step.
    fn stop(&self) {
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
    border: Border,
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

/// The objects that a thread keeps for itself.
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
    fn new(bench: &Bench, watch: Arc<Watch>, border: Border) -> Self {
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
            strict: bench.weather() != Weather::Foul,
            border,
            kernels: bench.kernels().clone(),
            far: Place::new(),
            far_device: bench.far_device(),
            far_kernels: bench.far_kernels().clone(),
            runtime: bench.runtime().clone(),
            watch,
        };
        world.streams[0].put(world.runtime.stream().clone());
        // The device is open already.
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

    /// Returns whether an error is one that calls may give when something fails under them.
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
                // An earlier record is not the one that the model means.
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
        | Step::Check(Read::On(s) | Read::Look(s), _)
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
            let _ = failed.synchronize_timeout(Duration::from_secs(5));
            drop(failed);
            if let Ok(runtime) = self.runtime(is_far_stream(*s))
                && let Ok(new) = runtime.create_stream()
            {
                place.lock().get_or_insert(new);
            }
        }
    }

    /// The remaining buffers are compared, and all objects are dropped.
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
            match runtime.to_vec::<u8>(&buffer) {
                Ok(got) if self.strict || self.trusted[*b as usize].load(Ordering::Relaxed) => {
                    compare(&got, expect).map_err(|e| format!("at the end, buffer {slot}: {e}"))?;
                }
                Ok(_) => {}
                Err(e) => said(e)?,
            }
        }
        self.graphs.iter().for_each(|p| drop(p.take()));
        self.runtime.synchronize().or_else(said)?;
        let left = GraphBudget::of(&self.runtime).stats();
        if self.strict && (left.bytes, left.executables) != (0, 0) {
            return Err(format!("executables without graphs: {left:?}"));
        }
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

/// Why a plan was not played to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The run found a defect.
    Found(Finding),
    /// The machine has no device or no thread for the program, which says nothing of the runtime.
    Unable(String),
}

impl Stop {
    fn plain(what: impl Into<String>) -> Self {
        Stop::Found(Finding { what: what.into(), hang: false, threads: Vec::new() })
    }

    /// The same in one form.
    pub(crate) fn into_finding(self) -> Finding {
        match self {
            Stop::Found(finding) => finding,
            Stop::Unable(what) => Finding { what, hang: false, threads: Vec::new() },
        }
    }
}

/// Starts a thread.
fn spawn<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> std::result::Result<std::thread::JoinHandle<T>, Stop> {
    let thread = std::thread::Builder::new().spawn(run);
    thread.map_err(|e| Stop::Unable(format!("the system gives no more threads: {e}")))
}

/// Runs a plan on a target. `timeout` is how long nothing may go on.
pub(crate) fn play(
    target: &Target,
    seed: u64,
    faults: bool,
    plan: Arc<Plan>,
    timeout: Duration,
    border: Border,
) -> std::result::Result<(), Stop> {
    let bench = target
        .open(seed, faults)
        .map_err(|e| Stop::Unable(format!("the devices cannot be opened: {e}")))?;
    let (watch, waits) = (Watch::new(plan), bench.waits());
    let world = Arc::new(World::new(&bench, watch.clone(), border));
    let conductor = spawn(move || conduct(world, bench))?;
    let mut last = (0, Instant::now());
    while !conductor.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
        let now = watch.steps();
        if now != last.0 {
            last = (now, Instant::now());
        } else if last.1.elapsed() > timeout {
            watch.find(format!("nothing went on for {timeout:?}{}", waits()), true);
            // Its threads cannot be ended.
            let finding = watch.finding.lock().clone();
            return Err(finding.map_or_else(|| Stop::plain("a hang"), Stop::Found));
        }
    }
    conductor.join().unwrap_or_else(|_| Err(Stop::plain("a panic at the end")))
}

fn conduct(world: Arc<World>, bench: Bench) -> std::result::Result<(), Stop> {
    let mut threads = Vec::new();
    let mut unable = None;
    for me in 0..world.watch.progress.len() {
        let playing = world.clone();
        match spawn(move || playing.thread(me)) {
            Ok(thread) => threads.push(thread),
            Err(why) => {
                world.watch.stop();
                unable = Some(why);
                break;
            }
        }
    }
    for (t, thread) in threads.into_iter().enumerate() {
        if thread.join().is_err() {
            world.watch.find(format!("a panic of thread {t}"), false);
        }
    }
    bench.calm();
    let finding = world.watch.finding.lock().take();
    let ended = match (finding, unable) {
        (Some(finding), _) => Err(Stop::Found(finding)),
        (None, Some(why)) => Err(why),
        (None, None) => world.finish().map_err(Stop::plain),
    };
    drop(world);
    ended?;
    bench.close().map_err(Stop::plain)
}

#[cfg(test)]
mod tests;
