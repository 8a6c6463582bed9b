//! The machine: a deterministic simulation of devices with memory and queues, in virtual time.
//!
//! # Execution
//! An enqueue never executes. A *step* selects, by the seed, one queue whose head can run. The step
//! runs this one command (or one node of a graph) to its end and advances virtual time. No thread
//! and no clock runs commands. With [`Stepping::Auto`] a query makes a few steps, and a wait steps
//! until it is over. With [`Stepping::Manual`] only [`Monitor::step`] steps.
//!
//! # Locks
//! One lock guards the whole state. Kernels and conditions run under the lock and must not call the
//! machine. Host functions run without the lock, on the stepping thread, and may call the machine.
//! Closures and host pages are dropped after the lock is released.
//!
//! # Names of calls
//! Each entry is counted under its own name (`alloc`, `enqueue`, …), and the [`FaultPlan`] may
//! fail it. [`Monitor::note`] counts calls of a layer above, which switches the machine's own
//! counts off ([`MachineConfig::count_calls`]).
//!
//! This module must not know `hal`'s devices or a vendor's rules.

mod clock;
mod collective;
mod comm;
mod command;
mod conditional;
mod dead_lock;
mod detect;
mod enqueue;
mod fault;
mod graph;
mod ids;
mod kernel;
mod meet;
mod memory;
mod os;
mod partition;
mod perform;
mod ranks;
mod rng;
mod space;
mod step;
pub mod tensor_map;
mod wait;

pub use collective::{CommCall, CommOp, Element, Reduction};
pub use comm::{CommJoin, Link, Meet, OnMismatch};
pub use command::{Command, FillCall, HostFn, KernelCall, NodeFn, ReadyFn, Transfer};
pub use conditional::Condition;
pub use detect::{Operation, Report, ReportKind};
pub use fault::{FaultAction, FaultPlan, FaultRule, When};
pub use graph::{Node, NodeId, NodeUpdate};
pub use ids::{CommId, EventId, ExecId, GraphId, PartitionId, QueueId, SemaphoreId};
pub use kernel::{Kernel, KernelBody, KernelRegistry, KernelSpec, Launch, PollFn, RunFn};
pub use ranks::LibraryTurn;
pub use space::{DEVICE_BASE, GRANULARITY, MemoryUse, PieceId};

use clock::Clock;
use comm::Meetings;
use command::{Entry, Mark};
use detect::Detector;
use fault::{CallOutcome, Disturbance, Faults};
use graph::{Exec, Template};
use leasehold_core::sync::{Arc, Condvar, Mutex, MutexGuard};
use leasehold_core::{Error, Result, Text};
use partition::{MOST_UNITS, Units};
use rng::Rng;
use space::{MOST_DEVICES, Space};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// The party that makes steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stepping {
    /// A query makes a few steps; a wait steps until it is over.
    #[default]
    Auto,
    /// Only [`Monitor::step`] steps. A wait without steps ends with its timeout.
    Manual,
}

/// The scope of a kernel's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultScope {
    /// The device is lost permanently, as with CUDA.
    #[default]
    Device,
    /// The queue fails.
    Queue,
}

/// The default fill of memory that a kernel declares to write.
pub const POISON: u8 = 0xdb;

/// The configuration of a machine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MachineConfig {
    /// The number of devices, 1 to 1,024; 1 by default.
    pub devices: u32,
    /// Units of each device, at most 4,096; 16 by default. A kernel occupies a unit for each of
    /// its blocks, and all units of its partition or device if it has more blocks.
    pub units: u32,
    /// Bytes of memory of each device; 1 GiB by default.
    pub memory: u64,
    /// Bytes of host memory that can be pinned; 1 GiB by default.
    pub pinned: u64,
    /// The seed of all random choices; 0 by default.
    pub seed: u64,
    /// The party that makes steps; [`Stepping::Auto`] by default.
    pub stepping: Stepping,
    /// The scope of a kernel's fault; [`FaultScope::Device`] by default.
    pub fault_scope: FaultScope,
    /// The calls that fail; none by default.
    pub faults: FaultPlan,
    /// Says whether the machine counts its own entries as calls of the fault plan; true by default.
    pub count_calls: bool,
    /// Says whether the race detector is on; true by default.
    pub detect: bool,
    /// The fill of new device memory instead of zeros (the default), which reveals reads of
    /// unwritten memory.
    ///
    /// If the race detector is on, a kernel's output bindings are filled before it runs, with this
    /// byte or else with [`POISON`]. A kernel that reads these bytes then gets another result. So
    /// does a caller that relies on bytes which the kernel does not write, unless the kernel
    /// [declares gaps](KernelSpec::leaving_gaps).
    pub poison: Option<u8>,
    /// Says whether executed commands are recorded for [`Monitor::take_trace`]; false by default.
    pub trace: bool,
    /// The real time that a wait without a timeout continues although no command can run. Meanwhile
    /// another host thread could still help, by writing a word or raising a semaphore. Afterwards
    /// the wait reports a deadlock. With zero the machine assumes no other thread.
    /// 10 seconds by default.
    pub timeout: Duration,
    /// The outcome of calls of ranks that do not fit each other; [`OnMismatch::Strict`] by default.
    pub on_mismatch: OnMismatch,
    /// The link over which ranks exchange bytes; [`Link::default`] by default.
    pub link: Link,
    /// The most rounds of a loop of a graph; 65,536 by default. A loop that has had them, and would
    /// go on, is a fault of the device: it may have no end.
    pub loop_bound: u64,
    /// The end of the text of each fault, such as how the same order comes again; none by default.
    pub hint: Option<Box<str>>,
    /// The kernels.
    /// Default: no kernels.
    pub kernels: KernelRegistry,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            devices: 1,
            units: 16,
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
            timeout: Duration::from_secs(10),
            on_mismatch: OnMismatch::default(),
            link: Link::default(),
            loop_bound: 1 << 16,
            hint: None,
            kernels: KernelRegistry::new(),
        }
    }
}

impl MachineConfig {
    /// The default configuration with this seed.
    #[must_use]
    pub fn seed(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Sets the number of devices, and the bytes of memory of each.
    #[must_use]
    pub fn devices(mut self, devices: u32, memory: u64) -> Self {
        (self.devices, self.memory) = (devices, memory);
        self
    }

    /// Sets the number of units of each device.
    #[must_use]
    pub fn units(mut self, units: u32) -> Self {
        self.units = units;
        self
    }

    /// Sets the party that makes steps.
    #[must_use]
    pub fn stepping(mut self, stepping: Stepping) -> Self {
        self.stepping = stepping;
        self
    }

    /// Sets the scope of a kernel's fault.
    #[must_use]
    pub fn fault_scope(mut self, scope: FaultScope) -> Self {
        self.fault_scope = scope;
        self
    }

    /// Sets the faults.
    #[must_use]
    pub fn faults(mut self, faults: FaultPlan) -> Self {
        self.faults = faults;
        self
    }

    /// Sets the kernels.
    #[must_use]
    pub fn kernels(mut self, kernels: KernelRegistry) -> Self {
        self.kernels = kernels;
        self
    }

    /// Sets the timeout of waits.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets what happens when calls of ranks do not fit each other.
    #[must_use]
    pub fn on_mismatch(mut self, on_mismatch: OnMismatch) -> Self {
        self.on_mismatch = on_mismatch;
        self
    }

    /// Sets the link over which ranks exchange bytes.
    #[must_use]
    pub fn link(mut self, link: Link) -> Self {
        self.link = link;
        self
    }

    /// Sets the most rounds of a loop of a graph.
    #[must_use]
    pub fn loop_bound(mut self, rounds: u64) -> Self {
        self.loop_bound = rounds;
        self
    }

    /// Switches the race detector on or off.
    #[must_use]
    pub fn detect(mut self, on: bool) -> Self {
        self.detect = on;
        self
    }

    /// Sets the fill of new device memory and of memory that kernels are about to write.
    #[must_use]
    pub fn poison(mut self, byte: u8) -> Self {
        self.poison = Some(byte);
        self
    }

    /// Switches the trace of executed commands on or off.
    #[must_use]
    pub fn trace(mut self, on: bool) -> Self {
        self.trace = on;
        self
    }

    /// Says whether the machine counts its own entries as calls.
    #[must_use]
    pub fn count_calls(mut self, on: bool) -> Self {
        self.count_calls = on;
        self
    }
}

/// An executed command, to compare runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// The operation.
    pub operation: Operation,
    /// The virtual time of its end, in nanoseconds.
    pub nanos: u64,
}

/// The failure of a queue.
#[derive(Debug, Clone)]
pub struct QueueFailure {
    /// The operation that failed; of a graph, with its node.
    pub operation: Operation,
    /// The cause.
    pub cause: Error,
}

/// The number of objects beside memory, for leak checks.
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
    /// Executable graphs.
    pub execs: u64,
    /// Partitions.
    pub partitions: u64,
}

pub(crate) struct Queue {
    device: u32,
    agent: u32,
    epoch: u64,
    clock: Clock,
    /// The queue's own virtual time.
    nanos: u64,
    entries: VecDeque<Entry>,
    /// Commands enqueued so far.
    enqueued: u64,
    /// Commands that are over.
    over: u64,
    /// A host function of the queue's head is running.
    busy: bool,
    failure: Option<QueueFailure>,
    /// The graph that a capture builds, and its last node.
    capture: Option<(GraphId, Option<NodeId>)>,
    /// The queue is removed once its commands are over.
    closing: bool,
    /// The partition that runs its kernels, unless a kernel names another one.
    partition: Option<PartitionId>,
    /// The index by which commands that are enqueued now are named.
    index: Option<u64>,
    name: Arc<str>,
}

struct Event {
    device: u32,
    timing: bool,
    last: Option<Arc<Mark>>,
}

/// A step of a semaphore: the value, and the clock that a wait for it learns.
struct Raised {
    value: u64,
    clock: Clock,
    nanos: u64,
}

#[derive(Default)]
struct Semaphore {
    value: u64,
    signalled: VecDeque<Raised>,
    failed: Option<Error>,
    /// The semaphore was destroyed; pending commands may still name it.
    closing: bool,
}

pub(crate) struct MachineState {
    rng: Rng,
    faults: Faults,
    hint: Option<Box<str>>,
    disturb: Option<Disturbance>,
    space: Space,
    detector: Detector,
    queues: BTreeMap<QueueId, Queue>,
    /// The agents of removed queues, each with its last epoch.
    agents: Vec<(u32, u64)>,
    next_agent: u32,
    events: BTreeMap<EventId, Event>,
    semaphores: BTreeMap<SemaphoreId, Semaphore>,
    graphs: BTreeMap<GraphId, Template>,
    execs: BTreeMap<ExecId, Exec>,
    units: Units,
    meetings: Meetings,
    on_mismatch: OnMismatch,
    link: Link,
    /// Counts the calls of [`Monitor::end_hangs`].
    hangs_ended: u64,
    next_id: u64,
    launches: u64,
    /// The clock that a read of a word learns.
    words: BTreeMap<u64, Clock>,
    host: Clock,
    host_epoch: u64,
    host_accesses: u64,
    /// The host's clock as commands take it; renewed when the host learns an order.
    host_taken: Option<Arc<Clock>>,
    nanos: u64,
    host_nanos: u64,
    /// Commands that ran so far.
    steps: u64,
    lost: Vec<Option<Arc<str>>>,
    /// For each device: the clock and the virtual time of its removed queues.
    gone: Vec<(Clock, u64)>,
    tracing: bool,
    trace: Vec<Ran>,
    /// Objects to drop after the lock is released.
    trash: Vec<Box<dyn Any + Send>>,
    /// The number of threads that wait for a change.
    waiters: u32,
    changed: bool,
    /// Queues whose head was polled without success since the last change.
    asked: Vec<(QueueId, u32)>,
    /// A thread that runs everything found queues whose host functions run on other threads. These
    /// threads go on.
    owed: bool,
}

struct Inner {
    state: Mutex<MachineState>,
    bell: Condvar,
    config: MachineConfig,
}

/// An observer of a machine: reports, time, counts, and faults to come. A clone observes the same
/// machine. Any thread may call it.
///
/// A monitor gives no access to the machine's memory, queues and words. A backend lends these to
/// safe code, which relies on them; see [`drive`](Self::drive).
#[derive(Clone)]
pub struct Monitor(Arc<Inner>);

/// A deterministic machine of simulated devices. A clone is the same machine; any thread may call
/// it.
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
/// // SAFETY: no other code uses the array until the queue is synchronised.
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

/// The locked state. The drop wakes waiting threads and drops removed objects after the lock is
/// released.
pub(crate) struct Locked<'a> {
    inner: &'a Inner,
    guard: ManuallyDrop<MutexGuard<'a, MachineState>>,
}

impl Deref for Locked<'_> {
    type Target = MachineState;
    fn deref(&self) -> &MachineState {
        &self.guard
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut MachineState {
        &mut self.guard
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let trash = std::mem::take(&mut self.guard.trash);
        let ring = std::mem::take(&mut self.guard.changed) && self.guard.waiters != 0;
        // SAFETY: dropped once, here. No code uses the guard afterwards.
        unsafe { ManuallyDrop::drop(&mut self.guard) };
        if ring {
            self.inner.bell.notify_all();
        }
        drop(trash);
    }
}

impl Machine {
    /// Makes a machine.
    ///
    /// # Errors
    /// `InvalidArgument` for no devices, more than 1,024, no units, or more than 4 TiB of memory;
    /// `OutOfMemory` or `Driver` if the system refuses a file or addresses.
    pub fn new(config: MachineConfig) -> Result<Self> {
        if !(1..=MOST_DEVICES).contains(&config.devices) {
            return Err(Error::invalid(format!(
                "{} devices: want 1 to {MOST_DEVICES}",
                config.devices
            )));
        }
        if !(1..=MOST_UNITS).contains(&config.units) {
            return Err(Error::invalid(format!("{} units: want 1 to {MOST_UNITS}", config.units)));
        }
        let mut host = Clock::default();
        host.set(detect::HOST, 1);
        let state = MachineState {
            rng: Rng::new(config.seed),
            faults: Faults::new(config.faults.clone()),
            hint: config.hint.clone(),
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
            units: Units::new(config.devices, config.units),
            meetings: Meetings::new(config.devices),
            on_mismatch: config.on_mismatch,
            link: config.link,
            hangs_ended: 0,
            // Small numbers are special for some vendors: the default stream.
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
            owed: false,
        };
        Ok(Self(Monitor(Arc::new(Inner {
            state: Mutex::new(state),
            bell: Condvar::new(),
            config,
        }))))
    }

    /// Begins a call for a queue.
    fn enter_queue(&self, queue: QueueId, name: &str) -> Result<Locked<'_>> {
        let device = self.queue_device(queue)?;
        self.enter(device, name)
    }
}

impl Monitor {
    /// The whole machine, for libraries whose calls enqueue work in a queue of the backend, and for
    /// tests.
    ///
    /// # Safety
    /// - The backend's objects stay unchanged. Its memory is not freed, and not used without an
    ///   order that the backend knows.
    /// - Only the backend writes its words, semaphores and events.
    /// - Its queues get work only under the rules of the backend's own work, and are not destroyed.
    #[must_use]
    pub unsafe fn drive(&self) -> Machine {
        Machine(self.clone())
    }

    /// The configuration of the machine.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.0.config
    }

    /// The machine's kernels.
    #[must_use]
    pub fn kernels(&self) -> &KernelRegistry {
        &self.0.config.kernels
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { inner: &self.0, guard: ManuallyDrop::new(self.0.state.lock()) }
    }

    /// Begins a call: counts it, and fails it if the fault plan demands it or the device is lost.
    fn enter(&self, device: u32, name: &str) -> Result<Locked<'_>> {
        let mut state = self.lock();
        if device >= self.0.config.devices {
            return Err(Error::NotFound(
                format!("device {device} of {}", self.0.config.devices).into(),
            ));
        }
        if self.0.config.count_calls {
            state.call(device, name)?;
        }
        let state = self.hang(state)?;
        state.alive(device)?;
        Ok(state)
    }

    /// Begins a call without a particular device. It succeeds even if a device is lost.
    fn enter_host(&self, name: &str) -> Result<Locked<'_>> {
        let mut state = self.lock();
        if self.0.config.count_calls {
            state.call(0, name)?;
        }
        self.hang(state)
    }

    /// Counts a call of a layer above under its name, on a device. The fault plan applies to it as
    /// to the machine's own calls.
    ///
    /// # Errors
    /// An error of the fault plan; `DeviceLost`.
    pub fn note(&self, device: u32, name: &str) -> Result<()> {
        let mut state = self.lock();
        if device >= self.0.config.devices {
            return Err(Error::NotFound(
                format!("device {device} of {}", self.0.config.devices).into(),
            ));
        }
        state.call(device, name)?;
        self.hang(state)?.alive(device)
    }

    /// Blocks if the fault plan demands that the call hangs, until [`end_hangs`](Self::end_hangs).
    fn hang<'a>(&'a self, mut state: Locked<'a>) -> Result<Locked<'a>> {
        if state.disturb != Some(Disturbance::Hang) {
            return Ok(state);
        }
        state.disturb = None;
        let before = state.hangs_ended;
        state.waiters += 1;
        while state.hangs_ended == before {
            self.0.bell.wait(&mut state.guard);
        }
        state.waiters -= 1;
        Err(Error::state("the fault plan let the call hang, and ended it"))
    }

    /// Ends all calls that hang now ([`FaultAction::Hang`]): each returns an error.
    pub fn end_hangs(&self) {
        let mut state = self.lock();
        state.hangs_ended += 1;
        state.changed = true;
    }

    /// The number of counted calls.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.lock().faults.calls()
    }

    /// The number of counted calls, by name.
    #[must_use]
    pub fn calls_by_name(&self) -> Vec<(String, u64)> {
        self.lock().faults.by_name()
    }

    /// Inserts a rule before those of the fault plan.
    pub fn add_fault(&self, rule: FaultRule) {
        self.lock().faults.plan.rules.insert(0, rule);
    }

    /// Replaces the fault plan; the counts continue.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.lock().faults.plan = plan;
    }

    /// Loses a device permanently: pending work never runs, and every call returns the error.
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
            return Err(Error::NotFound(
                format!("device {device} of {}", self.0.config.devices).into(),
            ));
        }
        state.alive(device)
    }

    /// Virtual time in nanoseconds: the latest end of an executed command.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.lock().nanos
    }

    /// The number of executed commands and nodes of graphs.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// Takes the race detector's reports since the last call, at most 1,024.
    #[must_use]
    pub fn take_reports(&self) -> Vec<Report> {
        let mut state = self.lock();
        let MachineState { detector, queues, .. } = &mut *state;
        detector.take_reports(|queue| queues.contains_key(&QueueId(queue)))
    }

    /// Takes the commands executed since the last call, if [`MachineConfig::trace`] is on.
    #[must_use]
    pub fn take_trace(&self) -> Vec<Ran> {
        std::mem::take(&mut self.lock().trace)
    }

    /// The memory in use.
    #[must_use]
    pub fn memory_in_use(&self) -> MemoryUse {
        self.lock().space.in_use()
    }

    /// The number of objects.
    #[must_use]
    pub fn objects(&self) -> ObjectCounts {
        let state = self.lock();
        ObjectCounts {
            queues: state.queues.values().filter(|q| !q.closing).count() as u64,
            events: state.events.len() as u64,
            semaphores: state.semaphores.values().filter(|s| !s.closing).count() as u64,
            graphs: state.graphs.len() as u64,
            execs: state.execs.len() as u64,
            partitions: state.units.count(),
        }
    }

    /// Returns whether a queue's pending work or an executable graph runs this kernel. Does not
    /// count as a call.
    #[must_use]
    pub fn is_kernel_used(&self, kernel: &Arc<Kernel>) -> bool {
        let state = self.lock();
        let mut entries = state.queues.values().flat_map(|q| &q.entries);
        entries.any(|entry| entry.action.runs(kernel))
            || state.execs.values().any(|exec| exec.runs(kernel))
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

impl MachineState {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn call(&mut self, device: u32, name: &str) -> Result<()> {
        self.host_nanos += CALL_NANOS;
        match self.faults.call(name, &mut self.rng) {
            CallOutcome::Pass => Ok(()),
            CallOutcome::Disturb(d) => {
                self.disturb = Some(d);
                Ok(())
            }
            CallOutcome::Fail(e) => Err(e),
            CallOutcome::Lose(cause) => {
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

    /// Loses a device; the first cause stays. The remaining commands of its queues are removed, and
    /// waits for them are released.
    fn lose(&mut self, device: u32, cause: &str) {
        let Some(lost) = self.lost.get_mut(device as usize) else { return };
        if lost.is_some() {
            return;
        }
        *lost = Some(cause.into());
        self.meetings.lost.insert(device);
        self.changed = true;
        let (clock, nanos) = std::mem::take(&mut self.gone[device as usize]);
        self.host_learns(&clock, nanos);
        let queues = self.queues.iter().filter(|(_, q)| q.device == device);
        let all: Vec<(QueueId, Clock, u64)> =
            queues.map(|(&id, q)| (id, q.clock.clone(), q.nanos)).collect();
        for (id, clock, nanos) in all {
            // The queue runs nothing any more, so its memory may be freed.
            self.host_learns(&clock, nanos);
            self.abandon(id);
        }
    }

    fn queue(&mut self, queue: QueueId) -> Result<&mut Queue> {
        let found = self.queues.get_mut(&queue).filter(|q| !q.closing);
        found.ok_or_else(|| Error::NotFound(Text::from(format!("{queue:?} does not exist"))))
    }

    /// Adds to the host's clock. Commands that are enqueued later know it.
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

    /// Starts a new epoch of the host if a command was enqueued since the last one: later actions
    /// of the host come after that command.
    fn host_acts(&mut self) {
        if self.host_taken.take().is_some() {
            self.host_epoch += 1;
            self.host.set(detect::HOST, self.host_epoch);
        }
    }
}

/// Virtual nanoseconds of a host call.
const CALL_NANOS: u64 = 200;
