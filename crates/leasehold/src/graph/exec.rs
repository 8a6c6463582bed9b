//! Graphs that can be launched and updated.
//!
//! # Rules
//! Launches of one graph are serialised on its last launch. An update changes an instance that no
//! pending launch runs ([`instances`](super::instances)). A graph keeps alive everything that it
//! uses: outside buffers, kernels, host calls, its arena. Dropping it while a launch runs loses
//! nothing: memory is given back when its timepoints have passed.
//!
//! A graph whose executable was taken back is as it was, but for that. Its next launch makes the
//! executable again, without a lock of a stream, and begins anew.
//!
//! # Locks
//! A launch takes the arena's shared guard, the stream's submission lock, the graph's state, in
//! this order. Under the submission lock and the state it waits for nothing. An update, or a launch
//! that needs room for the executable, waits without the state. A suspension holds the arena's
//! guard while it saves the arena's bytes, and takes submission locks meanwhile.

use crate::event::{Event, GraphLaunch};
use crate::graph::executables::{Demand, GivenUp, Holder, Look, Made, Occasion, Seen};
use crate::graph::instances::Instances;
use crate::graph::optimise::redundant;
use crate::graph::recording::{Outside, Ruled, Signal, State};
use crate::graph::stop::LaunchCheck;
use crate::runtime::RuntimeInner;
use crate::stream::{Locked, Stream, StreamInner, check_all_present, need};
use crate::trace::track::Track;
use leasehold_alloc::{Buffer, GraphArena, LaunchGuard};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    BufferHandle, Error, Lease, PackedTimepoint, Result, Timeline, TimelineSource, Timepoint,
    WeakLease,
};
use leasehold_hal::{Op, OpList, Partition, Plan};
use std::collections::HashSet;
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

/// A buffer of the recording that somebody still held when it stopped. The graph does not keep it,
/// only its memory.
pub(crate) struct Held {
    buffer: WeakLease<Buffer>,
    handle: BufferHandle,
    writes: bool,
    /// Every lease was dropped, and the allocator has freed the buffer.
    freed: AtomicBool,
}

impl Held {
    pub(crate) fn new(lease: &Lease<Buffer>, writes: bool) -> Self {
        let (buffer, handle) = (lease.downgrade(), lease.handle());
        Self { buffer, handle, writes, freed: AtomicBool::new(false) }
    }

    /// Adds the uses that a launch must wait for although no lease of the buffer is left.
    fn gather_dropped(
        &self,
        guard: &LaunchGuard<'_>,
        timeline: &Timeline,
        waits: &mut Vec<Timepoint>,
    ) {
        if self.freed.load(Ordering::Relaxed) || self.buffer.upgrade().is_some() {
            return;
        }
        if guard.is_freed(self.handle, |p| need(timeline, p, false, waits)) {
            self.freed.store(true, Ordering::Relaxed);
        }
    }

    /// The buffer, if somebody still holds it.
    ///
    /// # Errors
    /// `Occupied` while a holder has it alone: its record would not know of the launch in time.
    fn alive(&self) -> Result<Option<Outside>> {
        if self.freed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let lease = match self.buffer.try_upgrade() {
            Err(e @ Error::Occupied { .. }) => return Err(e),
            lease => lease.ok(),
        };
        let (end, written) = (0, u64::MAX);
        Ok(lease.map(|lease| Outside { lease, reads: true, writes: self.writes, end, written }))
    }
}

/// Names an operation of a graph, by its place in the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// Node `index` of the recording, counted from 0.
    #[must_use]
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index.
    #[must_use]
    pub fn index(self) -> u32 {
        self.0
    }
}

pub(super) struct ExecState {
    pub(super) instances: Instances,
    /// All that was recorded, with the buffers and parameters of now.
    pub(super) recorded: OpList,
    /// Which of it does nothing.
    pub(super) redundant: Vec<bool>,
    /// The rest, as it was instantiated.
    pub(super) plan: Plan,
    /// The names of its operations, once a trace has asked for them.
    pub(super) names: Option<Arc<[String]>>,
    pub(super) outside: Vec<Outside>,
    /// Some of them grow. An update replaces none of these.
    growing: bool,
    last: PackedTimepoint,
    launches: u64,
    /// Bytes of the last executable of the plan, if there was one.
    pub(super) known: Option<u64>,
    /// The launches before the executable was made again, if it was.
    again_at: Option<u64>,
}

pub(super) struct Inner {
    pub(super) runtime: Arc<RuntimeInner>,
    /// The stream of the runtime that recorded it.
    stream: Arc<StreamInner>,
    /// That was the device's default stream.
    by_default: bool,
    arena: GraphArena,
    /// When the arena's memory became the graph's.
    born: PackedTimepoint,
    held: Vec<Held>,
    /// The last record of each event.
    events: Vec<Signal>,
    /// The number of the last launch, which was submitted or is about to be.
    begun: Arc<AtomicU64>,
    waits: Vec<Lease<Event>>,
    points: Vec<Timepoint>,
    /// The rules of the launches.
    pub(super) rules: Vec<Ruled>,
    /// The partitions, by node of the recording.
    pub(super) partitions: Vec<(u32, Lease<Partition>)>,
    /// Checks of other crates, asked before each launch of the graph.
    checks: Vec<Arc<dyn LaunchCheck>>,
    /// Launches that have asked for room and are not submitted yet. The executable stays for them.
    wanted: AtomicU32,
    pub(super) state: Mutex<ExecState>,
}

/// A recorded graph. Clones are the same graph; any thread may launch it.
#[doc(alias = "graph::Graph")]
#[derive(Clone)]
pub struct Graph(pub(super) Arc<Inner>);

/// The last record of each event, in the order of the recording.
fn last_of_each(mut events: Vec<Signal>) -> Vec<Signal> {
    let mut seen = HashSet::new();
    events.reverse();
    events.retain(|s| seen.insert(s.event.handle()));
    events.reverse();
    events
}

/// The plan of what is not redundant, with the partitions of the recording's nodes.
pub(super) fn plan_of(
    recorded: &OpList,
    redundant: &[bool],
    partitions: &[(u32, Lease<Partition>)],
) -> Plan {
    let mut ops = recorded.clone();
    ops.retain(|i| !redundant[i]);
    let mut plan = Plan::new(ops);
    if !partitions.is_empty() {
        let mut gone = 0;
        let moved: Vec<u32> = std::iter::zip(0.., redundant)
            .map(|(i, &out): (u32, _)| {
                gone += u32::from(out);
                i - gone.min(i)
            })
            .collect();
        let kept = partitions.iter().filter(|(node, _)| !redundant[*node as usize]);
        plan.partitions = kept.map(|(node, on)| (moved[*node as usize], on.clone())).collect();
    }
    plan
}

/// The error of a launch that waited for room in vain.
#[cold]
fn no_room(error: Error, timeout: Duration) -> Error {
    match error {
        Error::Timeout(why) => Error::Timeout(
            format!(
                "no room for a graph's executable in the graph budget: the graphs that have it did not go on within {timeout:?} ({why}). What they \
                 wait for (a host timeline, a host call) must not come from the thread that launches. Nothing was launched"
            )
            .into(),
        ),
        other => other,
    }
}

/// Tells a trace the names of a graph's operations before a launch.
#[cold]
#[inline(never)]
fn tell_names(track: &Track, plan: &Plan, names: &mut Option<Arc<[String]>>) {
    let names = names.get_or_insert_with(|| plan.ops.iter().map(|op| op.name()).collect());
    track.launches(names.clone());
}

impl Graph {
    pub(crate) fn build(
        stream: &Stream,
        state: State,
        held: Vec<Held>,
        born: Timepoint,
        checks: Vec<Arc<dyn LaunchCheck>>,
    ) -> Result<Self> {
        let State {
            ops: recorded, rules, partitions, arena, outside, events, waits, points, ..
        } = state;
        // A driver looks at the addresses.
        check_all_present(outside.values().map(|o| &*o.lease))?;
        let redundant = redundant(&recorded);
        let plan = plan_of(&recorded, &redundant, &partitions);
        let mut outside: Vec<_> = outside.into_values().collect();
        outside.sort_by_key(|o| o.lease.handle());
        outside.reserve(held.len());
        let state = ExecState {
            instances: Instances::default(),
            recorded,
            redundant,
            plan,
            names: None,
            growing: outside.iter().any(|o| o.lease.is_growing()),
            outside,
            last: PackedTimepoint::NEVER,
            launches: 0,
            known: None,
            again_at: None,
        };
        let born = born.into();
        let (events, begun) = (last_of_each(events), Arc::new(AtomicU64::new(0)));
        let (runtime, stream) = (stream.runtime.clone(), stream.under().clone());
        let by_default = Arc::ptr_eq(&stream, &runtime.default());
        let inner = Arc::new(Inner {
            runtime,
            stream,
            by_default,
            arena,
            born,
            held,
            events,
            begun,
            waits,
            points,
            rules,
            partitions,
            checks,
            wanted: AtomicU32::new(0),
            state: Mutex::new(state),
        });
        inner.ensure_executable(Occasion::New, inner.stream.timeout())?;
        let holder: Weak<dyn Holder> = Arc::<Inner>::downgrade(&inner);
        inner.runtime.executables.register(holder);
        Ok(Self(inner))
    }

    /// Launches the graph on the stream of the runtime that recorded it: one submission. Allocates
    /// nothing. Does not block, but as every call on a stream for room. If the graph's executable
    /// was taken back ([`GraphBudget`](super::GraphBudget)), the launch makes it again first, and
    /// may block on the driver and on launches of other graphs.
    ///
    /// That is the device's default stream, or the one that the runtime was [taken
    /// from](Stream::runtime), which the graph then keeps. A default stream that has failed is
    /// replaced by the one that the device has now.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; the cause of failed work whose results the graph
    /// reads; what a [`LaunchCheck`](super::LaunchCheck) says,
    /// such as the failure of a communicator whose calls the graph has; `OverBudget` if the graph
    /// budget does not hold the executable; `Timeout` if the graphs that have its room do not go on
    /// ([`Stream::set_submit_timeout`]); the driver's own.
    #[doc(alias = "execute")]
    pub fn launch(&self) -> Result<Timepoint> {
        let stream = &*self.0.stream;
        if stream.timeline.failed(stream.timeline.submitted() + 1) {
            return self.launch_elsewhere();
        }
        self.submit(stream)
    }

    /// A launch whose stream has failed: on what is the device's default stream now, if it was
    /// that.
    #[cold]
    fn launch_elsewhere(&self) -> Result<Timepoint> {
        let inner = &*self.0;
        match inner.by_default {
            true => self.submit(&inner.runtime.default()),
            false => self.submit(&inner.stream),
        }
    }

    /// Launches the graph on a stream of its device.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); `InvalidArgument` for a stream of another device; `Recording`
    /// for one of a recording, since graphs are not nested.
    pub fn launch_on(&self, stream: &Stream) -> Result<Timepoint> {
        if !Arc::ptr_eq(&stream.runtime, &self.0.runtime) {
            return Err(Error::invalid(format!(
                "{stream:?} is not a stream of {}; use one of the runtime that recorded the graph",
                self.0.runtime.id()
            )));
        }
        self.submit(stream.live("a graph cannot be launched in a recording; launch it by itself")?)
    }

    fn submit(&self, core: &StreamInner) -> Result<Timepoint> {
        self.0.checks.iter().try_for_each(|check| check.before())?;
        let point = match self.submit_checked(core) {
            Ok(point) => point,
            Err(Missed::Executable) => self.launch_again(core)?,
            Err(Missed::Error(e)) => return Err(e),
        };
        self.0.checks.iter().for_each(|check| check.launched(point));
        Ok(point)
    }

    // A call of its own would return a `Result` through memory.
    #[inline(always)]
    fn submit_checked(&self, core: &StreamInner) -> Result<Timepoint, Missed> {
        let inner = &*self.0;
        core.wait_for_room()?;
        let guard = inner.arena.launch()?;
        let timeline = core.timeline;
        let mut submit_guard = core.submit_guard_now()?;
        let scratch = submit_guard.scratch();
        let mut state = inner.state.lock();
        let ExecState { instances, outside, growing, last, launches, plan, names, .. } =
            &mut *state;
        let executable = instances.current().ok_or(Missed::Executable)?;
        let mut outside = WithHeld { outside: outside.len(), uses: outside };
        if !inner.held.is_empty() {
            outside.add(&inner.held)?;
        }
        scratch.waits.clear();
        let mut locked = Locked::new(timeline, outside.uses);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(&mut scratch.waits) }?;
        if *growing {
            outside.uses.iter().try_for_each(Outside::check_place)?;
        }
        // These only had the memory before; what became of them does not matter.
        for held in &inner.held {
            held.gather_dropped(&guard, timeline, &mut scratch.waits);
        }
        guard.for_each_use(|p| need(timeline, p, false, &mut scratch.waits));
        need(timeline, *last, false, &mut scratch.waits);
        need(timeline, inner.born, false, &mut scratch.waits);
        for &p in &inner.points {
            need(timeline, p.into(), true, &mut scratch.waits);
        }
        for event in &inner.waits {
            if let Some(point) = event.last() {
                need(timeline, point.into(), true, &mut scratch.waits);
            }
        }
        // From the submission on, the timestamps are this launch's.
        let number = *launches + 1;
        inner.begun.store(number, Ordering::Release);
        if let Some(track) = &scratch.trace {
            tell_names(track, plan, names);
        }
        // SAFETY: the exec is of this device; it and the graph's buffers are kept alive by their
        // owners until their timepoints have passed: outside buffers and the arena are marked
        // below, the backend holds the exec while it runs.
        let value = unsafe { core.submit(scratch, &Op::Graph(executable.exec()), outside.uses) }
            .inspect_err(|_| inner.begun.store(*launches, Ordering::Release))?;
        let point = timeline.at(value);
        // SAFETY: the launch at this timepoint waited for what was gathered, and the submission
        // lock is still ours.
        unsafe { locked.mark(point) };
        guard.launched(point);
        *last = point.into();
        executable.launched(point);
        *launches = number;
        for Signal { event, time } in &inner.events {
            match time {
                Some(time) => event.set_timed(
                    point,
                    time.clone(),
                    Some(GraphLaunch { begun: inner.begun.clone(), number }),
                ),
                None => event.set(point),
            }
        }
        Ok(point)
    }

    /// A launch of a graph whose executable was taken back.
    #[cold]
    #[inline(never)]
    fn launch_again(&self, core: &StreamInner) -> Result<Timepoint> {
        let inner = &*self.0;
        inner.wanted.fetch_add(1, Ordering::AcqRel);
        let launched = loop {
            if let Err(e) = inner.ensure_executable(Occasion::Launch, core.timeout()) {
                break Err(e);
            }
            match self.submit_checked(core) {
                Ok(point) => break Ok(point),
                // An update has given it up meanwhile.
                Err(Missed::Executable) => {}
                Err(Missed::Error(e)) => break Err(e),
            }
        };
        inner.wanted.fetch_sub(1, Ordering::AcqRel);
        launched
    }

    /// How many operations were recorded.
    #[must_use]
    pub fn recorded(&self) -> usize {
        self.0.state.lock().recorded.len()
    }

    /// How many operations a launch runs.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.0.state.lock().plan.len()
    }

    /// The operations that a launch runs, in order, with the operations that each waits for.
    #[must_use]
    pub fn describe(&self) -> Vec<(String, Vec<u32>)> {
        let state = self.0.state.lock();
        state
            .plan
            .ops
            .iter()
            .enumerate()
            .map(|(i, op)| (op.name(), state.plan.predecessors(i).to_vec()))
            .collect()
    }

    /// Bytes of the graph's own memory: its packed temporaries.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.0.arena.bytes()
    }

    /// Bytes that the instantiated graph holds beside its memory, as far as the backend knows. 0
    /// while its executable is taken back ([`GraphBudget`](super::GraphBudget)).
    #[must_use]
    pub fn exec_bytes(&self) -> u64 {
        self.0.state.lock().instances.bytes()
    }

    /// The number of its launches.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.0.state.lock().launches
    }
}

/// The reason for which nothing was submitted.
enum Missed {
    /// The executable was taken back.
    Executable,
    Error(Error),
}

impl From<Error> for Missed {
    #[inline]
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}

impl Holder for Inner {
    fn look(&self) -> Option<Look> {
        let state = self.state.try_lock()?;
        if state.instances.is_empty() || self.wanted.load(Ordering::Acquire) > 0 {
            return None;
        }
        Some(Look {
            launches: state.launches,
            last: state.last,
            stays: !self.checks.is_empty(),
            bytes: state.instances.bytes(),
        })
    }

    fn give_up(&self) -> Option<GivenUp> {
        let mut state = self.state.try_lock()?;
        let idle = state.last.has_passed();
        if !idle || state.instances.is_empty() || self.wanted.load(Ordering::Acquire) > 0 {
            return None;
        }
        let served = state.again_at.take().map(|at| state.launches - at);
        Some(GivenUp { executables: state.instances.take(), served })
    }
}

impl Inner {
    /// Makes the executable, if there is none. Waits for room without the state.
    ///
    /// # Errors
    /// `OverBudget`; `Timeout` while nothing goes on that makes room; `Suspended` for a buffer of a
    /// suspended pool; the driver's own. The graph is as it was then.
    #[cold]
    fn ensure_executable(&self, occasion: Occasion, timeout: Duration) -> Result<()> {
        let executables = &self.runtime.executables;
        loop {
            // Declared before the state, so dropped without it.
            let mut seen = Seen::default();
            let mut state = self.state.lock();
            if !state.instances.is_empty() {
                return Ok(());
            }
            // A driver looks at the addresses.
            check_all_present(state.outside.iter().map(|o| &*o.lease))?;
            let mut demand = Demand { nodes: state.plan.total(), known: state.known, occasion };
            // SAFETY: the recording took only pipelines, timepoints and graphs of this runtime, and
            // checked each operation as an eager one, and updates did the same. The plan derives
            // its dependencies from their accesses. The graph's buffers are held until its launches
            // are over.
            let made = executables.make(&mut demand, &mut seen, || unsafe {
                self.runtime.device.instantiate(state.plan.clone())
            });
            state.known = demand.known;
            match made? {
                Made::Now(executable) => {
                    state.instances.put(executable);
                    state.again_at = (occasion == Occasion::Launch).then_some(state.launches);
                    return Ok(());
                }
                Made::After(after) => {
                    drop(state);
                    after.map_or(Ok(()), |point| {
                        self.runtime.wait_moving(point, timeout).map_err(|e| no_room(e, timeout))
                    })?;
                    self.runtime.wait_over_or_moment(after)?;
                }
            }
        }
    }
}

/// The outside buffers, and during a launch those of the recording that somebody still holds behind
/// them.
struct WithHeld<'s> {
    uses: &'s mut Vec<Outside>,
    outside: usize,
}

impl WithHeld<'_> {
    #[cold]
    fn add(&mut self, held: &[Held]) -> Result<()> {
        for held in held {
            self.uses.extend(held.alive()?);
        }
        Ok(())
    }
}

impl Drop for WithHeld<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.uses.len() > self.outside {
            self.uses.truncate(self.outside);
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the state: whoever prints may be in the middle of a launch.
        write!(f, "Graph({}, {:?})", self.0.runtime.id(), self.0.arena)
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Graph>();
};
