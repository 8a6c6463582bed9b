//! The machine: devices with memory and queues, in virtual time that is stepped.
//!
//! # How it runs
//! Enqueuing never executes. A *step* picks one queue whose head can run, by the seed, runs that one command (or one node of a graph) to its
//! end, and advances virtual time. Nothing else makes anything happen: there is no thread and no clock. With [`Stepping::Auto`] whoever
//! asks steps a little and whoever waits steps until it is over; with [`Stepping::Manual`] only [`Monitor::step`] steps.
//!
//! # Locks
//! One lock guards everything. Kernels and conditions run under it and must not call the machine; host functions run without it, on the thread that
//! steps, and may. What is given up (closures, host pages) is dropped after the lock.
//!
//! # Names of calls
//! Each entry is counted under its own name (`alloc`, `enqueue`, …) and may be failed by the [`FaultPlan`]; [`Monitor::note`] counts calls of a layer above,
//! which switches the machine's own off ([`MachineConfig::count_calls`]).
//!
//! This module must not know `hal`'s devices or a vendor's rules.

mod clock;
mod command;
mod detect;
mod enqueue;
mod fault;
mod graph;
mod kernel;
mod memory;
mod os;
mod rng;
mod space;
mod step;
mod wait;

pub use command::{Command, FillCall, HostFn, KernelCall, NodeFn, ReadyFn, Transfer};
pub use detect::{Operation, Report, ReportKind};
pub use fault::{FaultAction, FaultPlan, FaultRule, When};
pub use graph::{ExecId, GraphId, Node, NodeId, NodeUpdate};
pub use kernel::{Kernel, KernelBody, KernelRegistry, KernelSpec, Launch, PollFn, RunFn};
pub use space::{DEVICE_BASE, GRANULARITY, MemoryUse, PieceId};

use clock::Clock;
use command::{Entry, Mark};
use detect::Detector;
use fault::{Disturbance, Faults, Verdict};
use graph::{Exec, Template};
use leasehold_core::sync::{Arc, Condvar, Mutex, MutexGuard};
use leasehold_core::{Error, Result, Text};
use rng::Rng;
use space::Space;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Names a queue. Numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueId(pub u64);

/// Names an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// Names a semaphore: a value that grows, raised by queues and the host, which queues and the host wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SemaphoreId(pub u64);

/// Who makes things happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stepping {
    /// Whoever asks steps a little; whoever waits steps until it is over.
    #[default]
    Auto,
    /// [`Monitor::step`] alone. A wait that nobody steps for ends with its timeout.
    Manual,
}

/// What a fault of a kernel ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultScope {
    /// The device, for good, as with CUDA.
    #[default]
    Device,
    /// The queue.
    Queue,
}

/// What a kernel finds in memory that it declares to write.
pub const POISON: u8 = 0xdb;

/// What a machine is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MachineConfig {
    /// Devices; 1 to 64.
    pub devices: u32,
    /// Bytes of memory of each device.
    pub memory: u64,
    /// Bytes of host memory that can be pinned.
    pub pinned: u64,
    /// From which everything follows.
    pub seed: u64,
    /// Who steps.
    pub stepping: Stepping,
    /// What a fault of a kernel ends.
    pub fault_scope: FaultScope,
    /// Which calls fail.
    pub faults: FaultPlan,
    /// Whether the machine counts its own entries as calls of the fault plan.
    pub count_calls: bool,
    /// Whether the race detector is on.
    pub detect: bool,
    /// What new memory of devices is filled with, instead of zeros: whoever reads what nobody wrote then notices.
    ///
    /// With the race detector on, what a kernel declares to write is filled before the kernel runs, with this or else with
    /// [`POISON`]. A kernel that reads it then computes something else. So does a caller that counts on bytes which the kernel leaves
    /// out, unless the kernel [says](KernelSpec::leaving_gaps) that it leaves some.
    pub poison: Option<u8>,
    /// Whether commands that ran are remembered for [`Monitor::take_trace`].
    pub trace: bool,
    /// How long, in real time, a wait without a timeout stays when nothing can run any more but another thread of the host could still help (by writing a
    /// word, raising a semaphore), before it is reported as a dead-lock. With zero there is no other thread.
    pub patience: Duration,
    /// The kernels.
    pub kernels: KernelRegistry,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 1 << 30,
            pinned: 1 << 30,
            seed: 0,
            stepping: Stepping::Auto,
            fault_scope: FaultScope::Device,
            faults: FaultPlan::none(),
            count_calls: true,
            detect: true,
            poison: None,
            trace: false,
            patience: Duration::from_secs(10),
            kernels: KernelRegistry::new(),
        }
    }
}

impl MachineConfig {
    /// The defaults with this seed.
    #[must_use]
    pub fn seed(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// As before, with this many devices of `memory` bytes.
    #[must_use]
    pub fn devices(mut self, devices: u32, memory: u64) -> Self {
        (self.devices, self.memory) = (devices, memory);
        self
    }

    /// As before, stepped like this.
    #[must_use]
    pub fn stepping(mut self, stepping: Stepping) -> Self {
        self.stepping = stepping;
        self
    }

    /// As before, with this end of a fault.
    #[must_use]
    pub fn fault_scope(mut self, scope: FaultScope) -> Self {
        self.fault_scope = scope;
        self
    }

    /// As before, with these faults.
    #[must_use]
    pub fn faults(mut self, faults: FaultPlan) -> Self {
        self.faults = faults;
        self
    }

    /// As before, with these kernels.
    #[must_use]
    pub fn kernels(mut self, kernels: KernelRegistry) -> Self {
        self.kernels = kernels;
        self
    }

    /// As before, with this patience.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// As before, with or without the race detector.
    #[must_use]
    pub fn detect(mut self, on: bool) -> Self {
        self.detect = on;
        self
    }

    /// As before, with new memory of devices, and what kernels are about to write, filled with this.
    #[must_use]
    pub fn poison(mut self, byte: u8) -> Self {
        self.poison = Some(byte);
        self
    }

    /// As before, with or without a trace of what ran.
    #[must_use]
    pub fn trace(mut self, on: bool) -> Self {
        self.trace = on;
        self
    }

    /// As before, counting its own entries as calls or not.
    #[must_use]
    pub fn count_calls(mut self, on: bool) -> Self {
        self.count_calls = on;
        self
    }
}

/// A command that ran, for comparing runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// What.
    pub operation: Operation,
    /// The virtual time at which it was over, in nanoseconds.
    pub nanos: u64,
}

/// Why a queue has failed.
#[derive(Debug, Clone)]
pub struct QueueFailure {
    /// The operation that failed; of a graph, with its node.
    pub operation: Operation,
    /// What happened.
    pub cause: Error,
}

/// How many objects exist beside memory; for leak checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectCounts {
    /// Queues.
    pub queues: u64,
    /// Events.
    pub events: u64,
    /// Semaphores.
    pub semaphores: u64,
    /// Graph templates.
    pub graphs: u64,
    /// Graphs that can be launched.
    pub execs: u64,
}

pub(crate) struct Queue {
    device: u32,
    agent: u32,
    epoch: u64,
    clock: Clock,
    /// Its own virtual time.
    nanos: u64,
    entries: VecDeque<Entry>,
    /// Commands enqueued so far.
    enqueued: u64,
    /// Commands that are over.
    over: u64,
    /// A host function of its head runs.
    busy: bool,
    failure: Option<QueueFailure>,
    /// The graph that a capture builds, and its last node.
    capture: Option<(GraphId, Option<NodeId>)>,
    /// It goes once its commands are over.
    closing: bool,
    /// By which index the commands that are enqueued now are named.
    index: Option<u64>,
    name: Arc<str>,
}

struct Event {
    device: u32,
    timing: bool,
    last: Option<Arc<Mark>>,
}

/// A step of a semaphore: the value, and what is known by whoever waited for it.
struct Raised {
    value: u64,
    clock: Clock,
    nanos: u64,
}

#[derive(Default)]
struct Semaphore {
    value: u64,
    raised: VecDeque<Raised>,
    failed: Option<Error>,
    /// It was given up; commands that are pending may still name it.
    closing: bool,
}

pub(crate) struct State {
    rng: Rng,
    faults: Faults,
    disturb: Option<Disturbance>,
    space: Space,
    detector: Detector,
    queues: BTreeMap<QueueId, Queue>,
    /// Agents of queues that are gone, each with the epoch that it reached.
    agents: Vec<(u32, u64)>,
    next_agent: u32,
    events: BTreeMap<EventId, Event>,
    semaphores: BTreeMap<SemaphoreId, Semaphore>,
    graphs: BTreeMap<GraphId, Template>,
    execs: BTreeMap<ExecId, Exec>,
    next_id: u64,
    launches: u64,
    /// What is known by whoever reads a word.
    words: BTreeMap<u64, Clock>,
    host: Clock,
    host_epoch: u64,
    host_accesses: u64,
    /// The host's clock as commands take it; made anew when the host learns something.
    host_taken: Option<Arc<Clock>>,
    nanos: u64,
    host_nanos: u64,
    /// Commands that ran so far.
    steps: u64,
    lost: Vec<Option<Arc<str>>>,
    /// Of each device: what its queues that are gone did last, and when.
    gone: Vec<(Clock, u64)>,
    tracing: bool,
    trace: Vec<Ran>,
    /// Dropped after the lock.
    trash: Vec<Box<dyn Any + Send>>,
    /// Threads that wait for something to happen.
    waiters: u32,
    changed: bool,
    /// Queues whose head was asked in vain since something last happened.
    asked: Vec<(QueueId, u32)>,
}

struct Inner {
    state: Mutex<State>,
    bell: Condvar,
    config: MachineConfig,
}

/// A machine as it shows itself to those who watch: reports, time, counts, and faults to come. A clone watches the same machine; any
/// thread may call it.
///
/// It gives no way to the machine's memory, queues and words. A backend lends these to safe code, which relies on them: see
/// [`drive`](Self::drive).
#[derive(Clone)]
pub struct Monitor(Arc<Inner>);

/// A deterministic machine of simulated devices. A clone is the same machine; any thread may call it.
///
/// A backend has a machine of its own and shows its [`Monitor`].
///
/// ```
/// use leasehold_sim::{Command, FillCall, Machine, MachineConfig, Transfer};
/// let machine = Machine::new(MachineConfig::seed(7))?;
/// let queue = machine.queue_create(0)?;
/// let at = machine.alloc(0, 64)?;
/// let mut host = [0u8; 64];
/// machine.enqueue(queue, Command::Fill(FillCall::linear(at, 64, 5, 1)))?;
/// // SAFETY: nobody else uses the array until the queue is synchronised.
/// let copy = unsafe { Transfer::linear(at, host.as_mut_ptr() as u64, 64).with_host() };
/// machine.enqueue(queue, Command::Copy(copy))?;
/// machine.queue_synchronize(queue, None)?;
/// assert_eq!(host, [5; 64]);
/// assert!(machine.take_reports().is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Machine(Monitor);

impl Deref for Machine {
    type Target = Monitor;
    fn deref(&self) -> &Monitor {
        &self.0
    }
}

/// The state under its lock. Rings for those who wait and drops what was given up, after the lock.
pub(crate) struct Locked<'a> {
    inner: &'a Inner,
    guard: ManuallyDrop<MutexGuard<'a, State>>,
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.guard
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.guard
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let trash = std::mem::take(&mut self.guard.trash);
        let ring = std::mem::take(&mut self.guard.changed) && self.guard.waiters != 0;
        // SAFETY: dropped once, here; nothing uses the guard afterwards.
        unsafe { ManuallyDrop::drop(&mut self.guard) };
        if ring {
            self.inner.bell.notify_all();
        }
        drop(trash);
    }
}

impl Machine {
    /// A machine.
    ///
    /// # Errors
    /// `InvalidArgument` for no devices, more than 64, or more than 4 TiB of memory; `OutOfMemory` or `Driver` when the system refuses a
    /// file or addresses.
    pub fn new(config: MachineConfig) -> Result<Self> {
        if !(1..=64).contains(&config.devices) {
            return Err(Error::invalid(format!("{} devices: want 1 to 64", config.devices)));
        }
        let mut host = Clock::default();
        host.set(detect::HOST, 1);
        let state = State {
            rng: Rng::new(config.seed),
            faults: Faults::new(config.faults.clone()),
            disturb: None,
            space: Space::new(config.devices, config.memory, config.pinned, config.poison)?,
            detector: Detector::new(config.detect, config.poison.unwrap_or(POISON)),
            queues: BTreeMap::new(),
            agents: Vec::new(),
            next_agent: 1,
            events: BTreeMap::new(),
            semaphores: BTreeMap::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            // Small numbers mean something special to some vendors: the default stream.
            next_id: 0x100,
            launches: 0,
            words: BTreeMap::new(),
            host,
            host_epoch: 1,
            host_accesses: 0,
            host_taken: None,
            nanos: 0,
            host_nanos: 0,
            steps: 0,
            lost: vec![None; config.devices as usize],
            gone: vec![(Clock::default(), 0); config.devices as usize],
            tracing: config.trace,
            trace: Vec::new(),
            trash: Vec::new(),
            waiters: 0,
            changed: false,
            asked: Vec::new(),
        };
        Ok(Self(Monitor(Arc::new(Inner { state: Mutex::new(state), bell: Condvar::new(), config }))))
    }

    /// Begins a call for a queue.
    fn enter_queue(&self, queue: QueueId, name: &str) -> Result<Locked<'_>> {
        let device = self.queue_device(queue)?;
        self.enter(device, name)
    }
}

impl Monitor {
    /// The whole machine, for libraries whose calls enqueue work in a queue of the backend's, and for tests.
    ///
    /// # Safety
    /// - What the backend made stays as it is: its memory is neither given back nor, without an order that the backend knows of, used; its
    ///   words, semaphores and events are written by it alone; its queues are given work as the backend's own is, and not given up.
    #[must_use]
    pub unsafe fn drive(&self) -> Machine {
        Machine(self.clone())
    }

    /// The configuration that it was made with.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.0.config
    }

    /// The kernels that it knows.
    #[must_use]
    pub fn kernels(&self) -> &KernelRegistry {
        &self.0.config.kernels
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { inner: &self.0, guard: ManuallyDrop::new(self.0.state.lock()) }
    }

    /// Begins a call: counts it, and fails it if the plan says so or the device is lost.
    fn enter(&self, device: u32, name: &str) -> Result<Locked<'_>> {
        let mut state = self.lock();
        if device >= self.0.config.devices {
            return Err(Error::NotFound(format!("device {device} of {}", self.0.config.devices).into()));
        }
        if self.0.config.count_calls {
            state.call(device, name)?;
        }
        state.alive(device)?;
        Ok(state)
    }

    /// Begins a call that concerns no device in particular: it goes on when one is lost.
    fn enter_host(&self, name: &str) -> Result<Locked<'_>> {
        let mut state = self.lock();
        if self.0.config.count_calls {
            state.call(0, name)?;
        }
        Ok(state)
    }

    /// Counts a call of a layer above under its name, on a device; the fault plan decides about it as about the machine's own.
    ///
    /// # Errors
    /// What the plan says; `DeviceLost`.
    pub fn note(&self, device: u32, name: &str) -> Result<()> {
        let mut state = self.lock();
        if device >= self.0.config.devices {
            return Err(Error::NotFound(format!("device {device} of {}", self.0.config.devices).into()));
        }
        state.call(device, name)?;
        state.alive(device)
    }

    /// How many calls were counted so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.lock().faults.calls()
    }

    /// How many calls were counted so far, by name.
    #[must_use]
    pub fn calls_by_name(&self) -> Vec<(String, u64)> {
        self.lock().faults.by_name()
    }

    /// Puts a rule before those of the fault plan.
    pub fn add_fault(&self, rule: FaultRule) {
        self.lock().faults.plan.rules.insert(0, rule);
    }

    /// Replaces the fault plan; counts go on.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.lock().faults.plan = plan;
    }

    /// Loses a device for good: what is pending never runs, every call says so.
    pub fn lose_device(&self, device: u32, cause: &str) {
        self.lock().lose(device, cause);
    }

    /// The error of a lost device.
    ///
    /// # Errors
    /// `DeviceLost` with the first cause; `NotFound` for a device that does not exist.
    pub fn device_status(&self, device: u32) -> Result<()> {
        let state = self.lock();
        if device >= self.0.config.devices {
            return Err(Error::NotFound(format!("device {device} of {}", self.0.config.devices).into()));
        }
        state.alive(device)
    }

    /// Virtual time in nanoseconds: the latest end of anything that ran.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.lock().nanos
    }

    /// Commands (and nodes of graphs) that ran so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// What the race detector found since the last call, at most 1,024 reports.
    #[must_use]
    pub fn take_reports(&self) -> Vec<Report> {
        let mut state = self.lock();
        let State { detector, queues, .. } = &mut *state;
        detector.take_reports(|queue| queues.contains_key(&QueueId(queue)))
    }

    /// What ran since the last call, where [`MachineConfig::trace`] is on.
    #[must_use]
    pub fn take_trace(&self) -> Vec<Ran> {
        std::mem::take(&mut self.lock().trace)
    }

    /// How much memory is in use.
    #[must_use]
    pub fn memory_in_use(&self) -> MemoryUse {
        self.lock().space.in_use()
    }

    /// How many objects exist.
    #[must_use]
    pub fn objects(&self) -> ObjectCounts {
        let state = self.lock();
        ObjectCounts {
            queues: state.queues.values().filter(|q| !q.closing).count() as u64,
            events: state.events.len() as u64,
            semaphores: state.semaphores.values().filter(|s| !s.closing).count() as u64,
            graphs: state.graphs.len() as u64,
            execs: state.execs.len() as u64,
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Machine")
            .field("devices", &self.0.config.devices)
            .field("seed", &self.0.config.seed)
            .field("queues", &state.queues.len())
            .field("steps", &state.steps)
            .field("memory", &state.space)
            .field("detector", &state.detector)
            .finish_non_exhaustive()
    }
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn call(&mut self, device: u32, name: &str) -> Result<()> {
        self.host_nanos += CALL_NANOS;
        match self.faults.call(name, &mut self.rng) {
            Verdict::Pass => Ok(()),
            Verdict::Disturb(d) => {
                self.disturb = Some(d);
                Ok(())
            }
            Verdict::Fail(e) => Err(e),
            Verdict::Lose(cause) => {
                self.lose(device, &cause);
                self.alive(device)
            }
        }
    }

    fn alive(&self, device: u32) -> Result<()> {
        match self.lost.get(device as usize) {
            Some(Some(cause)) => Err(Error::DeviceLost { cause: cause.clone() }),
            _ => Ok(()),
        }
    }

    /// Loses a device: the first cause stays. What its queues still hold is given up, and what others wait for in them is let go.
    fn lose(&mut self, device: u32, cause: &str) {
        let Some(lost) = self.lost.get_mut(device as usize) else { return };
        if lost.is_some() {
            return;
        }
        *lost = Some(cause.into());
        self.changed = true;
        let (clock, nanos) = std::mem::take(&mut self.gone[device as usize]);
        self.host_learns(&clock, nanos);
        let queues = self.queues.iter().filter(|(_, q)| q.device == device);
        let all: Vec<(QueueId, Clock, u64)> = queues.map(|(&id, q)| (id, q.clock.clone(), q.nanos)).collect();
        for (id, clock, nanos) in all {
            // Nothing of it runs any more, so memory that it used may go.
            self.host_learns(&clock, nanos);
            self.abandon(id);
        }
    }

    fn queue(&mut self, queue: QueueId) -> Result<&mut Queue> {
        let found = self.queues.get_mut(&queue).filter(|q| !q.closing);
        found.ok_or_else(|| Error::NotFound(Text::from(format!("{queue:?} does not exist"))))
    }

    /// The host learns something: commands that are enqueued from now on know it.
    fn host_learns(&mut self, clock: &Clock, nanos: u64) {
        self.host.join(clock);
        self.host_nanos = self.host_nanos.max(nanos);
        self.host_taken = None;
    }

    /// The host's clock for a command that is enqueued now.
    fn host_clock(&mut self) -> Arc<Clock> {
        if let Some(clock) = &self.host_taken {
            return clock.clone();
        }
        let clock = Arc::new(self.host.clone());
        self.host_taken = Some(clock.clone());
        clock
    }

    /// A new epoch of the host, if a command was enqueued since the last one: what the host does now comes after that.
    fn host_acts(&mut self) {
        if self.host_taken.take().is_some() {
            self.host_epoch += 1;
            self.host.set(detect::HOST, self.host_epoch);
        }
    }
}

/// Virtual nanoseconds of a call of the host's.
const CALL_NANOS: u64 = 200;
