//! Devices of the machine, and the objects that each owns.
//!
//! A stream does not lease its device: it holds the shared part, so no order of drops can dangle.
//! The device's pools hold no object that leads back to the device.
//!
//! This module must not know backings.

use super::event::EventManager;
use super::graph::GraphManager;
use super::host_timeline::HostTimelineManager;
use super::pipeline::{self, Kernels, PipelineManager};
use super::stream::{self, StreamManager};
use crate::machine::{KernelCall, Machine, Monitor, QueueId, SemaphoreId, Stepping};
use leasehold_alloc::AllocatorCell;
use leasehold_core::sync::atomic::AtomicU64;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    DeviceHandle, Error, Fault, FixedSlotStore, Handle, Index, Lease, PoolStats, Recycle, Resource,
    Result, Tagged, Timeline, TimelineId, TimelineOwner, Timepoint, tags,
};
use leasehold_hal::engine::buffers::outstanding;
use leasehold_hal::engine::partitions::Partitions;
use leasehold_hal::engine::shared_file::SharedFile;
use leasehold_hal::{
    BackendKind, Caps, Description, DeviceId, DeviceInfo, Dispatch, HostCall, Limits, MemoryInfo,
    OpList, Partition, PartitionSize,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomPinned;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The part that a device's streams, host timelines and graphs share.
pub struct Common {
    pub(crate) machine: Machine,
    pub(crate) device: u32,
    /// `sim:0`.
    pub(crate) name: String,
    pub(crate) kernels: Kernels,
    /// The semaphores behind timelines, of all devices of the backend.
    semaphores: Arc<Mutex<BTreeMap<TimelineId, SemaphoreId>>>,
    /// The timelines of all existing streams, including retired ones. The streams and their
    /// submitted work own them.
    pub(crate) timelines: Mutex<Vec<(&'static Timeline, Weak<TimelineOwner>)>>,
    /// The number of streams made so far, for their names.
    pub(crate) made: AtomicU64,
    /// The timeline of each queue.
    running: Mutex<BTreeMap<QueueId, &'static Timeline>>,
    /// Submissions of queues that fail once those before them are over.
    doomed: Mutex<BTreeMap<QueueId, (u64, Error)>>,
    /// Timepoints of other backends that streams wait for, of all devices of the backend. A waiting
    /// thread must make the other backends publish them.
    foreign: Arc<Mutex<Vec<Timepoint>>>,
}

thread_local! {
    /// Says whether this thread asks another backend for a timeline. That backend must not call
    /// back here.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// The time for which this machine is stepped between two requests to other backends.
const SLICE: Duration = Duration::from_micros(500);
/// The minimum time that another backend gets.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Common {
    /// A new semaphore with the timeline's present value.
    pub(crate) fn semaphore(&self, timeline: &'static Timeline) -> Result<SemaphoreId> {
        let semaphore = self.machine.semaphore_create(self.device)?;
        self.machine.semaphore_signal(semaphore, timeline.completed())?;
        self.semaphores.lock().insert(timeline.id(), semaphore);
        Ok(semaphore)
    }

    /// The semaphore behind a timeline of this backend.
    pub(crate) fn semaphore_of(&self, timeline: TimelineId) -> Option<SemaphoreId> {
        self.semaphores.lock().get(&timeline).copied()
    }

    /// Removes the records of a stream or host timeline that ends.
    pub(crate) fn forget(&self, timeline: &'static Timeline, semaphore: SemaphoreId) {
        self.semaphores.lock().remove(&timeline.id());
        self.timelines.lock().retain(|(l, _)| l.id() != timeline.id());
        self.running.lock().retain(|_, l| l.id() != timeline.id());
        // The semaphore belongs to this timeline alone.
        let _ = self.machine.semaphore_destroy(semaphore);
    }

    /// Runs all work that can run, for times when a later query is not certain.
    pub(crate) fn go_on(&self) {
        if self.machine.config().stepping == Stepping::Auto {
            self.machine.run_until_idle();
        }
        self.notice_loss();
    }

    /// A dispatch as a kernel call of the machine.
    pub(crate) fn call(&self, d: &Dispatch<'_>) -> Result<KernelCall> {
        let call = KernelCall {
            kernel: self.kernels.of(d.pipeline)?,
            grid: d.grid,
            block: d.block,
            shared: d.shared,
            cluster: [1; 3],
            cooperative: false,
            bindings: d.bindings.to_vec(),
            params: d.params.to_vec(),
            early: 0,
            dependent: false,
            partition: None,
        };
        call.check()?;
        Ok(call)
    }

    /// Partitions of these sizes, which the device has, one after the other.
    pub(crate) fn divide(
        &self,
        id: DeviceId,
        sizes: &[PartitionSize],
        units: u32,
    ) -> Result<Vec<Partition>> {
        let mut from = 0;
        let made = sizes.iter().map(|size| {
            let count = if let PartitionSize::Sms(count) = *size { count } else { units - from };
            let part = self.machine.partition_create(self.device, from..from + count)?;
            from += count;
            let machine = self.machine.clone();
            // A lost device has no partitions.
            Ok(Partition::new(id, count, part.0, move || drop(machine.partition_destroy(part))))
        });
        made.collect()
    }

    /// The cause of a stream whose operation failed.
    pub(crate) fn fault(&self, op: &str, queue: QueueId, value: u64, cause: &Error) -> Error {
        if cause.is_external() {
            return cause.clone();
        }
        let timeline = self.running.lock().get(&queue).copied();
        let stream =
            timeline.map_or_else(|| self.name.clone(), |l| format!("{} {:?}", self.name, l.id()));
        Fault::new(op.to_owned(), stream, value, cause.to_string()).into()
    }

    /// Records a stream's timeline under its queue.
    pub(crate) fn enter(&self, queue: QueueId, timeline: &'static Timeline) {
        self.running.lock().insert(queue, timeline);
    }

    /// The submission that a queue runs: the one after the last complete one.
    pub(crate) fn running(&self, queue: QueueId) -> u64 {
        self.running.lock().get(&queue).map_or(0, |l| l.completed() + 1)
    }

    /// Runs a host call; an error or a panic fails the queue.
    pub(crate) fn host_call(&self, call: &HostCall, name: &str, queue: QueueId, value: u64) {
        let timeline = self.running.lock().get(&queue).copied();
        let run = || call.run();
        if let Err(e) = timeline.map_or_else(run, |timeline| timeline.run_call(value, run)) {
            // The queue runs this call, so it exists.
            let _ = self.machine.queue_fail(queue, self.fault(name, queue, value, &e));
        }
    }

    /// Publishes the value of a completed submission, after its failure if it failed. The
    /// submission's leases are dropped in between. So their destructors find the cause, and the
    /// leases are gone before the value is published.
    pub(crate) fn publish(&self, queue: QueueId, owner: &TimelineOwner, value: u64, held: OpList) {
        if let Ok(Some(failure)) = self.machine.queue_failure(queue) {
            owner.poison(value, failure.cause);
        }
        drop(held);
        owner.complete(value);
        self.fail_next(queue, value + 1);
        self.machine.ring();
    }

    /// Fails a submission that a queue has, once those before it are over. Returns whether it will.
    pub(crate) fn fail(&self, point: Timepoint, cause: Error) -> bool {
        let (timeline, value) = (point.timeline(), point.value());
        let own = |(_, t): &(&QueueId, &&Timeline)| t.id() == timeline.id();
        let Some(queue) = self.running.lock().iter().find(own).map(|(queue, _)| *queue) else {
            return false;
        };
        if timeline.completed() >= value || timeline.failed(value) || timeline.submitted() < value {
            return false;
        }
        self.doomed.lock().entry(queue).or_insert((value, cause));
        // It may be the next one already.
        self.fail_next(queue, timeline.completed() + 1);
        true
    }

    /// Fails a queue that goes on to `value`, if that was asked for.
    fn fail_next(&self, queue: QueueId, value: u64) {
        let mut doomed = self.doomed.lock();
        if doomed.get(&queue).is_none_or(|(at, _)| *at > value) {
            return;
        }
        let due = doomed.remove(&queue);
        drop(doomed);
        if let Some((at, cause)) = due
            && at == value
        {
            // A queue that is gone has nothing to fail.
            let _ = self.machine.queue_fail(queue, cause);
        }
    }

    /// Fails all timelines of a lost device. A lost device runs no completions, so each thread that
    /// notices the loss calls this.
    pub(crate) fn notice_loss(&self) {
        let Err(cause) = self.machine.device_status(self.device) else { return };
        let owners: Vec<_> =
            self.timelines.lock().iter().filter_map(|(_, owner)| owner.upgrade()).collect();
        for owner in owners {
            let timeline = owner.timeline();
            if timeline.failure().is_none() {
                owner.poison(timeline.completed() + 1, cause.clone());
            }
            owner.complete(timeline.submitted());
        }
    }

    /// Records that a stream waits for another backend's timepoint.
    pub(crate) fn note_foreign(&self, point: Timepoint) {
        self.foreign.lock().push(point);
    }

    /// Makes other backends publish the timepoints that streams wait for. Returns whether one is
    /// still pending.
    fn ask_others(&self) -> bool {
        let mut open = self.foreign.lock();
        open.retain(|p| matches!(p.timeline().check(p.value()), Ok(false)));
        let points = open.clone();
        drop(open);
        if !ASKING.get() {
            ASKING.set(true);
            for p in &points {
                // The timeline shows the result of this wait.
                let _ = p.timeline().wait(p.value(), Some(Duration::ZERO));
            }
            ASKING.set(false);
        }
        !points.is_empty()
    }

    /// Steps until a condition holds.
    pub(crate) fn step_until(
        &self,
        timeout: Option<Duration>,
        over: &dyn Fn() -> bool,
    ) -> Result<()> {
        let begun = Instant::now();
        let deadline = timeout.and_then(|t| begun.checked_add(t));
        loop {
            if !self.ask_others() {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                // Another thread may submit a wait for another backend.
                let stop = || over() || !self.foreign.lock().is_empty();
                self.machine.wait_until(if timeout.is_some() { left } else { None }, stop)?;
                if over() {
                    return Ok(());
                }
                continue;
            }
            let left = deadline
                .map_or(SLICE, |at| SLICE.min(at.saturating_duration_since(Instant::now())));
            let waited = self.machine.wait_until(Some(left), over);
            // No work here can run, but the other backend may still be at work: wait for a bounded
            // time.
            let given_up = deadline.unwrap_or(begun + self.machine.config().timeout.max(TIMEOUT));
            if waited.is_ok() || Instant::now() >= given_up {
                return waited;
            }
        }
    }

    /// Blocks until a value of a timeline is over.
    pub(crate) fn await_timeline(
        &self,
        timeline: &'static Timeline,
        value: u64,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.notice_loss();
        if timeline.check(value)? {
            return Ok(());
        }
        let waited = self.step_until(timeout, &|| !matches!(timeline.check(value), Ok(false)));
        self.notice_loss();
        match timeline.check(value) {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err(waited.err().unwrap_or_else(|| Error::state("a wait that ended early")))
            }
            Err(e) => Err(e),
        }
    }
}

/// An open device: its description, and the managers of its resources.
pub struct DeviceState {
    pub(crate) description: Description,
    pub(crate) common: Arc<Common>,
    // Allocators before streams: they return memory through the machine, which both hold.
    pub(crate) device_memory: AllocatorCell,
    pub(crate) pinned_memory: AllocatorCell,
    pub(crate) streams: StreamManager,
    // After the streams, which hold them.
    pub(crate) partitions: Partitions,
    pub(crate) events: EventManager,
    pub(crate) host_timelines: HostTimelineManager,
    pub(crate) pipelines: PipelineManager,
    pub(crate) graphs: GraphManager,
    /// A device must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl Tagged for DeviceState {
    type Tag = tags::Device;
}

impl DeviceState {
    fn new(devices: &Devices, ordinal: u32) -> Result<Self> {
        let mut description = Description::new(describe(&devices.machine, ordinal));
        devices.machine.device_set_name(ordinal, &description.info.id.to_string())?;
        let common = Arc::new(Common {
            machine: devices.machine.clone(),
            device: ordinal,
            name: description.info.id.to_string(),
            kernels: Kernels::default(),
            semaphores: devices.semaphores.clone(),
            timelines: Mutex::new(Vec::new()),
            made: AtomicU64::new(0),
            running: Mutex::new(BTreeMap::new()),
            doomed: Mutex::new(BTreeMap::new()),
            foreign: devices.foreign.clone(),
        });
        let caps = &mut description.caps;
        caps.pinned = true;
        caps.host_timelines = true;
        caps.timestamps = true;
        caps.graphs = true;
        caps.concurrent_streams = true;
        caps.host_calls = true;
        caps.foreign_calls = true;
        caps.waits_for_any_timeline = true;
        caps.shareable = SharedFile::SUPPORTED;
        caps.growing = true;
        caps.forks = true;
        caps.partitions = true;
        caps.conditionals = true;
        let limits = &mut description.limits;
        limits.streams = devices.streams;
        limits.buffer = devices.machine.config().memory;
        (devices.describe)(caps, limits);
        Ok(Self {
            _place: PhantomPinned,
            device_memory: AllocatorCell::default(),
            pinned_memory: AllocatorCell::default(),
            streams: stream::manager(common.clone(), devices.streams)?,
            partitions: Partitions::new(description.info.id)?,
            events: EventManager::new(&common.machine, ordinal)?,
            host_timelines: HostTimelineManager::new(common.clone())?,
            pipelines: pipeline::manager(&common.machine, ordinal, common.kernels.clone())?,
            graphs: GraphManager::new(common.clone())?,
            description,
            common,
        })
    }

    /// The device's name.
    pub fn id(&self) -> DeviceId {
        self.description.info.id
    }

    /// The monitor of the device's machine.
    pub fn machine(&self) -> &Monitor {
        &self.common.machine
    }

    /// The statistics of all pools.
    pub fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        report("stream", self.streams.stats());
        report("timestamp", self.events.stats());
        report("host timeline", self.host_timelines.stats());
        report("pipeline", self.pipelines.stats());
        report("graph", self.graphs.stats());
        report("partition", self.partitions.stats());
    }

    /// Returns an error if other holders have resources of this device.
    fn outstanding(&self) -> Result<()> {
        let mut first = Ok(());
        self.pools(&mut |resource, PoolStats { live: strong, weak, .. }| {
            if first.is_ok() && (strong != 0 || weak != 0) {
                first = Err(Error::LeasesOutstanding { resource, strong, weak });
            }
        });
        first.and_then(|()| outstanding(&self.device_memory, &self.pinned_memory))
    }
}

impl fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceState").field("id", &self.id()).finish_non_exhaustive()
    }
}

fn describe(machine: &Machine, ordinal: u32) -> DeviceInfo {
    let mut info = DeviceInfo::new(DeviceId::new(BackendKind::Sim, ordinal), "simulated device");
    let (used, total) = machine.device_memory(ordinal).unwrap_or_default();
    info.memory = MemoryInfo { total, free: total - used };
    info.units = machine.config().units;
    info.details = vec![("seed".into(), machine.config().seed.to_string())];
    info
}

struct Devices {
    machine: Machine,
    streams: u32,
    describe: fn(&mut Caps, &mut Limits),
    semaphores: Arc<Mutex<BTreeMap<TimelineId, SemaphoreId>>>,
    foreign: Arc<Mutex<Vec<Timepoint>>>,
}

impl Resource for Devices {
    type Payload = DeviceState;
    type Request<'a> = u32;
    const NAME: &'static str = "device";

    fn create(&self, _: Handle<tags::Device>, ordinal: &u32) -> Result<DeviceState> {
        DeviceState::new(self, *ordinal)
    }

    fn recycle(&self, _: &mut DeviceState) -> Recycle {
        Recycle::Destroy
    }
}

/// Owns the states of a machine's devices.
pub struct DeviceManager {
    machine: Machine,
    store: FixedSlotStore<Devices>,
}

impl DeviceManager {
    pub(crate) fn new(
        machine: Machine,
        streams: u32,
        describe: fn(&mut Caps, &mut Limits),
    ) -> Result<Self> {
        if streams == 0 {
            return Err(Error::invalid("a device without streams can do nothing"));
        }
        let count = machine.config().devices;
        let devices = Devices {
            machine: machine.clone(),
            streams,
            describe,
            semaphores: Arc::default(),
            foreign: Arc::default(),
        };
        Ok(Self { store: FixedSlotStore::new(devices, count)?, machine })
    }

    /// The number of devices.
    pub fn device_count(&self) -> u32 {
        self.store.len()
    }

    /// The descriptions of the devices, without opening them.
    pub fn describe(&self) -> Vec<DeviceInfo> {
        (0..self.store.len()).map(|i| describe(&self.machine, i)).collect()
    }

    /// Opens the device unless it is open.
    ///
    /// # Errors
    /// `NotFound`; `InvalidState` after a shutdown.
    pub fn open(&self, device: DeviceId) -> Result<Lease<DeviceState>> {
        let ordinal = device.ordinal_on(BackendKind::Sim)?;
        self.store.get(Index::new(ordinal), &ordinal)
    }

    /// Opens the device unless it is open, and returns its handle.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, device: DeviceId) -> Result<DeviceHandle> {
        self.open(device).map(|device| device.handle())
    }

    /// Returns whether the handle's device is open. One load.
    pub fn is_alive(&self, device: DeviceHandle) -> bool {
        self.store.is_alive(device)
    }

    /// Drops the manager's own lease. Other holders are not affected.
    ///
    /// # Errors
    /// `StaleHandle`.
    pub fn release(&self, device: DeviceHandle) -> Result<()> {
        self.store.release(device)
    }

    /// The state of an open device.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, device: DeviceHandle) -> Result<Lease<DeviceState>> {
        self.store.lease(device)
    }

    /// The statistics of the store.
    pub fn stats(&self) -> PoolStats {
        self.store.stats()
    }

    /// Shuts the manager down. A second call returns `Ok`.
    ///
    /// # Errors
    /// `LeasesOutstanding` while other holders have a device or one of its resources; then nothing
    /// has changed.
    pub fn shutdown(&self) -> Result<()> {
        for i in 0..self.store.len() {
            // Dropped before the store decides.
            if let Some(device) = self.store.existing(Index::new(i)) {
                device.common.go_on();
                device.outstanding()?;
            }
        }
        self.store.shutdown()
    }
}

impl fmt::Debug for DeviceManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceManager")
            .field("devices", &self.stats())
            .field("machine", &self.machine)
            .finish()
    }
}
