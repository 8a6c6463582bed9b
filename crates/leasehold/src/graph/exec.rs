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
use crate::graph::executables::{Demand, Executable, GivenUp, Holder, Look, Made, Occasion, Seen};
use crate::graph::instances::{Change, Instances};
use crate::graph::optimise::{moved, redundant};
use crate::graph::recording::{Outside, Signal, State};
use crate::graph::stop::LaunchCheck;
use crate::kernel::rules::Rules;
use crate::runtime::{RuntimeInner, check_writable};
use crate::stream::{Locked, Stream, StreamCore, check_all_present, need};
use crate::trace::track::Track;
use crate::view::View;
use bytemuck::NoUninit;
use leasehold_alloc::{Buffer, GraphArena, LaunchGuard};
use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    BufferHandle, Error, Lease, PackedTimepoint, Result, Timeline, Timepoint, WeakLease,
};
use leasehold_hal::{LaunchInfo, Op, OpList, Plan};
use std::collections::HashSet;
use std::fmt;
use std::sync::Weak;

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
    fn alive(&self) -> Option<Outside> {
        Some(Outside { lease: self.buffer.upgrade()?, reads: true, writes: self.writes, end: 0 })
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

/// The way in which an update changed the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum UpdateOutcome {
    /// The graph was changed in place, or in another instance while launches are pending.
    InPlace,
    /// The dependencies (or what the driver can change) did not allow that: the graph was
    /// instantiated anew.
    Reinstantiated,
}

struct ExecState {
    instances: Instances,
    /// All that was recorded, with the buffers and parameters of now.
    recorded: OpList,
    /// Which of it does nothing.
    redundant: Vec<bool>,
    /// The rest, as it was instantiated.
    plan: Plan,
    /// The names of its operations, once a trace has asked for them.
    names: Option<Arc<[String]>>,
    outside: Vec<Outside>,
    /// Some of them grow. An update replaces none of these.
    growing: bool,
    last: PackedTimepoint,
    launches: u64,
    /// Bytes of the last executable of the plan, if there was one.
    known: Option<u64>,
    /// The launches before the executable was made again, if it was.
    again_at: Option<u64>,
}

struct Inner {
    runtime: Arc<RuntimeInner>,
    /// The default stream when it was recorded.
    default: Arc<StreamCore>,
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
    /// The rules of the launches, by node of the recording.
    rules: Vec<(u32, Arc<Rules>)>,
    /// Checks of other crates, asked before each launch of the graph.
    checks: Vec<Arc<dyn LaunchCheck>>,
    /// Launches that have asked for room and are not submitted yet. The executable stays for them.
    wanted: AtomicU32,
    state: Mutex<ExecState>,
}

/// A recorded graph. Clones are the same graph; any thread may launch it.
#[doc(alias = "graph::Graph")]
#[derive(Clone)]
pub struct Graph(Arc<Inner>);

/// The last record of each event, in the order of the recording.
fn last_of_each(mut events: Vec<Signal>) -> Vec<Signal> {
    let mut seen = HashSet::new();
    events.reverse();
    events.retain(|s| seen.insert(s.event.handle()));
    events.reverse();
    events
}

/// The plan of what is not redundant.
fn plan_of(recorded: &OpList, redundant: &[bool]) -> Plan {
    let mut ops = recorded.clone();
    ops.retain(|i| !redundant[i]);
    Plan::new(ops)
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
        runtime: Arc<RuntimeInner>,
        state: State,
        held: Vec<Held>,
        born: Timepoint,
        checks: Vec<Arc<dyn LaunchCheck>>,
    ) -> Result<Self> {
        let State { ops: recorded, rules, arena, outside, events, waits, points, .. } = state;
        // A driver looks at the addresses.
        check_all_present(outside.values().map(|o| &*o.lease))?;
        let redundant = redundant(&recorded);
        let plan = plan_of(&recorded, &redundant);
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
        let default = runtime.default();
        let inner = Arc::new(Inner {
            runtime,
            default,
            arena,
            born,
            held,
            events,
            begun,
            waits,
            points,
            rules,
            checks,
            wanted: AtomicU32::new(0),
            state: Mutex::new(state),
        });
        inner.ensure_executable(Occasion::New)?;
        let holder: Weak<dyn Holder> = Arc::<Inner>::downgrade(&inner);
        inner.runtime.executables.register(holder);
        Ok(Self(inner))
    }

    /// Launches the graph on the default stream: one submission. Allocates nothing. Does not block,
    /// but as every call on a stream for room. If the graph's executable was taken back
    /// ([`GraphBudget`](super::GraphBudget)), the launch makes it again first, and may block on the
    /// driver and on launches of other graphs.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; what a [`LaunchCheck`](super::LaunchCheck) says,
    /// such as the failure of a communicator whose calls the graph has; `OverBudget` if the graph
    /// budget does not hold the executable; the driver's own.
    #[doc(alias = "execute")]
    pub fn launch(&self) -> Result<Timepoint> {
        let default = &*self.0.default;
        if default.timeline.failed(default.timeline.submitted() + 1) {
            return self.launch_elsewhere();
        }
        self.submit(default)
    }

    /// A launch on what is the default stream now.
    #[cold]
    fn launch_elsewhere(&self) -> Result<Timepoint> {
        let default = self.0.runtime.default();
        self.submit(&default)
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

    fn submit(&self, core: &StreamCore) -> Result<Timepoint> {
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
    fn submit_checked(&self, core: &StreamCore) -> Result<Timepoint, Missed> {
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
        let outside = WithHeld::add(outside, &inner.held);
        scratch.waits.clear();
        let mut locked = Locked::new(timeline, outside.uses);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(&mut scratch.waits) }?;
        if *growing {
            outside.uses.iter().try_for_each(Outside::check_end)?;
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
    fn launch_again(&self, core: &StreamCore) -> Result<Timepoint> {
        let inner = &*self.0;
        inner.wanted.fetch_add(1, Ordering::AcqRel);
        let launched = loop {
            if let Err(e) = inner.ensure_executable(Occasion::Launch) {
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

    /// How often it was launched.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.0.state.lock().launches
    }

    /// The arena of the graph's memory.
    #[must_use]
    pub fn arena(&self) -> &GraphArena {
        &self.0.arena
    }

    /// Changes parameters, grids and buffers for the launches that come later. All-or-nothing.
    ///
    /// Launches that are pending keep what they were launched with, and the call does not wait for
    /// them: the change is made in another instance of the graph. A graph has up to four. While all
    /// are busy, the call blocks until one is over.
    ///
    /// The graph is then what recording with the new values would have given. A change that alters
    /// which operations depend on which (a buffer that now meets another), which are redundant, or
    /// what a kernel may read early, instantiates the graph anew, and says so; so does one of a
    /// copy's or fill's buffer. The old executable goes before the new one comes. If that fails,
    /// the graph is as it was, and its next launch makes the executable again.
    ///
    /// # Errors
    /// `InvalidArgument` for a node that is no launch, another size of parameters, a grid beyond
    /// the device's limits, a buffer that the graph does not use, or one that is too small or
    /// another device's; `Unsupported` for a growing buffer; what a kernel's check says of a launch
    /// as it is with the changes, and bindings that overlap then; `Suspended` for a buffer of a
    /// suspended pool; `InvalidState` in a host call of the graph itself while all of its instances
    /// are busy.
    pub fn update(&self, update: &GraphUpdate<'_>) -> Result<UpdateOutcome> {
        let mut others = false;
        loop {
            match self.try_update(update, others)? {
                Tried::Done(outcome) => return Ok(outcome),
                // Without the lock: what goes may be anybody's closure.
                Tried::Without(old) => {
                    drop(old);
                    others = true;
                }
                Tried::After(after) => self.0.runtime.wait_over_or_moment(after)?,
            }
        }
    }

    /// Updates the graph, unless something must go or be over first. `others`: its executables have
    /// gone already.
    fn try_update(&self, update: &GraphUpdate<'_>, others: bool) -> Result<Tried> {
        let inner = &*self.0;
        // Declared before the state, so dropped without it.
        let mut seen = Seen::default();
        let mut state = inner.state.lock();
        if let Some(busy) = state.instances.obstacle() {
            return Ok(Tried::After(Some(busy)));
        }
        // A driver looks at the addresses.
        let new = update.buffers.iter().map(|(_, new)| &***new);
        check_all_present(state.outside.iter().map(|o| &*o.lease).chain(new))?;
        let mut recorded = state.recorded.clone();
        let mut changed = vec![false; recorded.len()];
        let mut swaps: Vec<Option<&Lease<Buffer>>> = vec![None; state.outside.len()];
        for (old, new) in &update.buffers {
            let Some(at) = state.outside.iter().position(|o| o.lease.same(old)) else {
                return Err(Error::invalid(
                    "the graph does not use the buffer that is to be replaced; name one that was recorded and is not a temporary",
                ));
            };
            inner.runtime.check_stand_in(old, new)?;
            // (What users only read may be a growing buffer's limit.)
            let limit = old.is_read_only() && !old.is_imported();
            if old.is_growing() || new.is_growing() || limit {
                return Err(Error::Unsupported(
                    "a growing buffer or its limit cannot be replaced in a graph, or replace another buffer; grow it, since its address stays, or record the graph anew".into(),
                ));
            }
            if state.outside[at].writes {
                check_writable(&new.write())?;
            }
            inner.runtime.refuse_symbolic(&[new.read()])?;
            if new.len() < old.len() {
                return Err(Error::invalid(format!(
                    "a buffer of {} bytes cannot stand in for one of {}; give one that is as large at least",
                    new.len(),
                    old.len()
                )));
            }
            swaps[at] = Some(new);
        }
        let ranges: Vec<_> = std::iter::zip(&state.outside, &swaps)
            .filter_map(|(o, new)| {
                new.map(|new| (o.lease.addr(), o.lease.len(), new.addr(), new.native()))
            })
            .collect();
        if !ranges.is_empty() && !planted(Defect::OldBuffers) {
            recorded = moved(recorded, &ranges, &mut changed);
        }
        let limits = &inner.runtime.limits;
        for (node, params, grid) in &update.nodes {
            if let Some(grid) = grid
                && (0..3).any(|i| grid[i] > limits.grid[i])
            {
                return Err(Error::invalid(format!(
                    "grid {grid:?} of node {}; the limit is {:?}: launch fewer blocks",
                    node.0, limits.grid
                )));
            }
            let grid = if planted(Defect::OldGrid) { None } else { *grid };
            recorded.patch(node.0 as usize, None, params.as_deref(), grid)?;
            changed[node.0 as usize] = true;
        }
        inner.check_launches(&recorded, &changed)?;
        let redundant = redundant(&recorded);
        let plan = plan_of(&recorded, &redundant);
        let same = !others
            && redundant == state.redundant
            && plan.pred == state.plan.pred
            && plan.pred_at == state.plan.pred_at
            && plan.early == state.plan.early;
        // SAFETY: the same operations as when the graph was built, with buffers and parameters that
        // were checked alike, and dependencies derived anew.
        let instantiate = || unsafe { inner.runtime.device.instantiate(plan.clone()) };
        let mut demand = Demand { nodes: plan.len(), known: state.known, occasion: Occasion::New };
        let executables = &inner.runtime.executables;
        let change = if same {
            // SAFETY: an instance that is idle was waited for above, and the lock of the state
            // keeps launches and updates out. The plan that was derived anew has the same
            // dependencies, and buffers and parameters were checked as when they were recorded.
            unsafe {
                state.instances.change(&plan, &redundant, &changed, || {
                    executables.make(&mut demand, &mut seen, instantiate)
                })
            }?
        } else {
            Change::TakesOthers
        };
        let outcome = match change {
            Change::Done => UpdateOutcome::InPlace,
            Change::After(after) => {
                state.known = demand.known;
                return Ok(Tried::After(after));
            }
            // Launches that are pending hold their instances by themselves.
            Change::TakesOthers if !state.instances.is_empty() => {
                return Ok(Tried::Without(state.instances.take()));
            }
            Change::TakesOthers => {
                demand.known = None;
                match executables.make(&mut demand, &mut seen, instantiate)? {
                    Made::Now(executable) => state.instances.put(executable),
                    Made::After(after) => return Ok(Tried::After(after)),
                }
                UpdateOutcome::Reinstantiated
            }
        };
        let old = (
            std::mem::replace(&mut state.recorded, recorded),
            std::mem::replace(&mut state.plan, plan),
        );
        state.redundant = redundant;
        state.names = None;
        state.known = demand.known;
        let old_outside = state.swap_outside(&swaps);
        drop(state);
        // Without the lock: what goes may be anybody's closure.
        drop((old, old_outside));
        Ok(Tried::Done(outcome))
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

/// The outcome of an attempt to update a graph.
enum Tried {
    Done(UpdateOutcome),
    /// These executables go first.
    Without(Vec<Executable>),
    /// This launch must be over first, or a moment pass.
    After(Option<Timepoint>),
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
        let idle = state.last.has_passed() || planted(Defect::TakenInFlight);
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
    /// `OverBudget`; `Suspended` for a buffer of a suspended pool; the driver's own. The graph is
    /// as it was then.
    #[cold]
    fn ensure_executable(&self, occasion: Occasion) -> Result<()> {
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
            let mut demand = Demand { nodes: state.plan.len(), known: state.known, occasion };
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
                    self.runtime.wait_over_or_moment(after)?;
                }
            }
        }
    }

    /// Asks the kernels about the launches that an update changed, as they are now.
    fn check_launches(&self, recorded: &OpList, changed: &[bool]) -> Result<()> {
        for (node, rules) in self.rules.iter().filter(|(node, _)| changed[*node as usize]) {
            if let Some(Op::Dispatch(d)) = recorded.get(*node as usize) {
                let shape = (d.grid, d.block, d.shared);
                rules
                    .check_bindings(d.bindings)
                    .and_then(|()| {
                        rules.check_launch(&LaunchInfo::new(shape, d.params, d.bindings))
                    })
                    .map_err(|e| match e {
                        Error::InvalidArgument(why) => {
                            Error::invalid(format!("node {node}: {why}"))
                        }
                        other => other,
                    })?;
            }
        }
        Ok(())
    }
}

/// The outside buffers, and during a launch those of the recording that somebody still holds behind
/// them.
struct WithHeld<'s> {
    uses: &'s mut Vec<Outside>,
    outside: usize,
}

impl<'s> WithHeld<'s> {
    #[inline]
    fn add(uses: &'s mut Vec<Outside>, held: &[Held]) -> Self {
        let outside = uses.len();
        if !held.is_empty() {
            uses.extend(held.iter().filter_map(Held::alive));
        }
        Self { uses, outside }
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

impl ExecState {
    /// Puts the new buffers in the places of the old ones, and returns those. Two that became one
    /// are one from then on.
    fn swap_outside(&mut self, swaps: &[Option<&Lease<Buffer>>]) -> Vec<Outside> {
        let mut new: Vec<Outside> = std::iter::zip(&self.outside, swaps)
            .map(|(o, new)| {
                let lease = new.unwrap_or(&o.lease).clone();
                // If the new buffer is longer, the graph uses a part of it, and the rest stays.
                let reads = o.reads || lease.len() > o.lease.len();
                Outside { lease, reads, writes: o.writes, end: o.end }
            })
            .collect();
        new.sort_by_key(|o| o.lease.handle());
        new.dedup_by(|gone, stays| {
            let same = gone.lease.same(&stays.lease);
            if same {
                // The order of the two uses is not known: the former contents may be read.
                stays.reads |= gone.reads || gone.writes && stays.writes;
                stays.writes |= gone.writes;
                stays.end = stays.end.max(gone.end);
            }
            same
        });
        std::mem::replace(&mut self.outside, new)
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the state: whoever prints may be in the middle of a launch.
        write!(f, "Graph({}, {:?})", self.0.runtime.id(), self.0.arena)
    }
}

/// New parameters, a new grid, or both.
type NodeChange = (NodeId, Option<Vec<u8>>, Option<[u32; 3]>);

/// Changes to a graph.
#[derive(Debug, Default)]
#[must_use = "an update does nothing until it is given to Graph::update"]
pub struct GraphUpdate<'a> {
    nodes: Vec<NodeChange>,
    buffers: Vec<(&'a Lease<Buffer>, &'a Lease<Buffer>)>,
}

impl<'a> GraphUpdate<'a> {
    /// No changes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// New parameters of a launch, of the size that its kernel declares.
    pub fn params<T: NoUninit>(self, node: NodeId, params: &T) -> Self {
        self.params_bytes(node, bytemuck::bytes_of(params))
    }

    /// New parameters of a launch as bytes, as many as its kernel declares.
    pub fn params_bytes(mut self, node: NodeId, params: &[u8]) -> Self {
        self.nodes.push((node, Some(params.to_vec()), None));
        self
    }

    /// A new grid of a launch. With a zero in it the launch does nothing.
    pub fn grid(mut self, node: NodeId, grid: [u32; 3]) -> Self {
        self.nodes.push((node, None, Some(grid)));
        self
    }

    /// Another buffer in the place of one that the graph uses, wherever it uses it. At least as
    /// long.
    pub fn buffer(mut self, old: &'a Lease<Buffer>, new: &'a Lease<Buffer>) -> Self {
        self.buffers.push((old, new));
        self
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Graph>();
};
