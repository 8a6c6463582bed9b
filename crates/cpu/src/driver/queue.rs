//! Ordered queues: the execution of streams on this device.
//!
//! # Protocol
//! | actor | action |
//! |---|---|
//! | a submitter | under the lock: adds a submission, sets `ready`, clears `parked` |
//! | the worker, awake | spins on `ready` for a bounded time, then takes the lock |
//! | the worker, under the lock | swaps the pending list with its own empty one |
//! | the worker, without submissions | under the lock: sets `parked` and sleeps |
//!
//! To add a submission, the submitter checks the operations, takes the timeline's next value and
//! copies the operations to the pending list. If `parked` was set, the submitter notifies the
//! worker after it released the lock.
//!
//! All decisions about sleep are made under one lock, so no wake-up is lost. The two lists keep
//! their capacity, so the steady state allocates nothing. The worker drops the resources that a
//! submission holds (leases, host memory, closures), then publishes its value. So an observer of
//! the value finds everything released.
//!
//! A submission that fails poisons the timeline from its value on. The rest of it and all later
//! submissions do not run, but their values are published in order. A worker survives every failure
//! of its work.
//!
//! A forked child has no worker: submissions and waits return an error, and no call waits.
//!
//! A queue that is dropped finishes its submissions, and then its worker ends. The first submission
//! starts the worker.
//!
//! This module must not know managers.

use super::float;
use super::graph::Program;
use super::pool::{TilePool, enter_device_thread, on_device_thread};
use super::work::{Work, copy_pieces};
use super::{current_cpu, now_nanos};
use leasehold_core::panics::caught;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold_core::sync::thread::{self, JoinHandle};
use leasehold_core::sync::{Arc, CachePadded, Condvar, Mutex, MutexGuard};
use leasehold_core::{Error, Fault, Result, Timeline, TimelineOwner, Timepoint, VALUE_LIMIT};
use leasehold_hal::{Op, OpList};
use std::fmt;
use std::time::Duration;

/// The most pending operations before a submitter waits for room.
const ROOM: usize = 1 << 15;
/// The initial capacity of a list: operations, bindings, bytes of parameters.
const FIRST_ROOM: (usize, usize, usize) = (512, 2048, 32 << 10);
/// A list with more bytes than this is freed when it is empty.
const KEEP_BYTES: u64 = 16 << 20;
/// The largest scratch memory of a tile, in bytes.
pub(crate) const SHARED_MAX: u32 = 1 << 20;

/// Submissions that the worker has not taken yet.
#[derive(Default)]
struct Pending {
    ops: OpList,
    /// The end of each submission in `ops`. Their values are consecutive.
    ends: Vec<u32>,
    first: u64,
    parked: bool,
    closing: bool,
    /// The number of submitters that wait for room.
    crowd: u32,
    worker: Option<JoinHandle<()>>,
}

impl Pending {
    fn with_room() -> Self {
        let mut p = Self::default();
        p.make_room();
        p
    }

    fn make_room(&mut self) {
        let (ops, bindings, params) = FIRST_ROOM;
        self.ops.reserve(ops, bindings, params);
        self.ends.reserve(ops);
    }

    fn clear(&mut self) {
        self.ops.clear();
        self.ends.clear();
        if self.ops.bytes() > KEEP_BYTES {
            *self = Self::with_room();
        }
    }
}

struct Shared {
    owner: TimelineOwner,
    pool: Arc<TilePool>,
    pending: Mutex<Pending>,
    bell: Condvar,
    room: Condvar,
    /// The list has a submission, or the queue is closing.
    ready: CachePadded<AtomicBool>,
    /// The processors of the last submission and of the worker's last run.
    submitter_cpu: AtomicU32,
    worker_cpu: AtomicU32,
}

/// An ordered queue with a timeline. Dropping the queue never waits for work.
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

impl Queue {
    /// A queue without a thread.
    ///
    /// # Errors
    /// `OutOfMemory` without free timelines.
    pub(crate) fn new(pool: Arc<TilePool>) -> Result<Self> {
        let owner = TimelineOwner::take()?;
        Ok(Self {
            shared: Arc::new(Shared {
                owner,
                pool,
                pending: Mutex::new(Pending::default()),
                bell: Condvar::new(),
                room: Condvar::new(),
                ready: CachePadded::new(AtomicBool::new(false)),
                submitter_cpu: AtomicU32::new(u32::MAX),
                worker_cpu: AtomicU32::new(u32::MAX),
            }),
        })
    }

    #[inline]
    pub(crate) fn timeline(&self) -> &'static Timeline {
        self.shared.owner.timeline()
    }

    /// Submits operations as one submission; see `hal::Stream::submit`.
    ///
    /// # Errors
    /// See `hal::Stream::submit`.
    ///
    /// # Safety
    /// - See `hal::Stream::submit`.
    pub(crate) unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        self.shared.pool.check_process()?;
        let timeline = self.timeline();
        for op in ops {
            op.check(timeline, SHARED_MAX)?;
            no_overlap(op)?;
        }
        let mut pending = self.shared.pending.lock();
        loop {
            if timeline.failed(VALUE_LIMIT) {
                return Err(cause(timeline));
            }
            if pending.closing {
                return Err(Error::state("the stream is shut down"));
            }
            // The device's own threads never wait here, because one of them may have to make room.
            if pending.ops.len() < ROOM || on_device_thread() {
                break;
            }
            pending.crowd += 1;
            self.shared.room.wait(&mut pending);
            pending.crowd -= 1;
        }
        if pending.worker.is_none() {
            self.start_slow(&mut pending)?;
        }
        let value = self.shared.owner.advance()?;
        if pending.ends.is_empty() {
            pending.first = value;
        }
        for op in ops {
            if let Op::Wait(p) = op {
                self.shared.owner.learn(*p);
            }
            pending.ops.push(op);
        }
        let end = pending.ops.len() as u32;
        pending.ends.push(end);
        self.shared.submitter_cpu.store(current_cpu(), Ordering::Relaxed);
        self.shared.ready.store(true, Ordering::Release);
        let parked = std::mem::replace(&mut pending.parked, false);
        drop(pending);
        if parked {
            self.shared.bell.notify_one();
        }
        Ok(value)
    }

    #[cold]
    fn start_slow(&self, pending: &mut MutexGuard<'_, Pending>) -> Result<()> {
        pending.make_room();
        let shared = self.shared.clone();
        let name = format!(
            "lh-{}-s{}",
            self.shared.pool.name().replace(':', ""),
            self.timeline().id().get()
        );
        let handle =
            thread::Builder::new().name(name).spawn(move || work(&shared)).map_err(|e| {
                Error::Driver {
                    api: "pthread_create",
                    code: e.raw_os_error().unwrap_or(0),
                    name: e.to_string().into_boxed_str(),
                }
            })?;
        pending.worker = Some(handle);
        Ok(())
    }

    /// Blocks until `value` is over; see `TimelineSource::wait_host`.
    ///
    /// # Errors
    /// See `TimelineSource::wait_host`; `InvalidState` on the queue's own worker, which would wait
    /// for itself.
    pub(crate) fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        let timeline = self.timeline();
        if timeline.check(value)? {
            return Ok(());
        }
        self.shared.pool.check_process()?;
        timeline.check_caller(value)?;
        if timeout.is_none_or(|t| t > Duration::from_micros(100)) {
            let worker = self.shared.worker_cpu.load(Ordering::Relaxed);
            self.shared.pool.spin_outside(worker, || !matches!(timeline.check(value), Ok(false)));
        }
        timeline.wait(value, timeout)
    }

    /// Tells the worker to end after the pending submissions. If the worker is idle, the call waits
    /// for its end.
    fn close(&self) {
        if self.shared.pool.is_forked() {
            // The worker stayed in the parent, perhaps while it held the lock. The worker's
            // resources go with this process.
            return;
        }
        let worker = {
            let mut pending = self.shared.pending.lock();
            pending.closing = true;
            pending.parked = false;
            self.shared.ready.store(true, Ordering::Release);
            pending.worker.take()
        };
        self.shared.bell.notify_one();
        self.shared.room.notify_all();
        if let Some(worker) = worker
            && self.timeline().is_idle()
            && worker.thread().id() != thread::current().id()
        {
            // The worker catches the panics of its work, so the result says nothing.
            drop(worker.join());
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({:?})", self.timeline())
    }
}

/// The cause of a poisoned timeline.
#[cold]
fn cause(timeline: &Timeline) -> Error {
    timeline.failure().map_or_else(|| Error::state("the stream is poisoned"), |f| f.1)
}

/// Checks that a copy between host and device does not overlap itself. Both are memory of the host
/// here.
#[inline]
fn no_overlap(op: &Op<'_>) -> Result<()> {
    let (src, dst, bytes) = match op {
        Op::Upload(u) => (u.src as u64, u.dst, u.bytes),
        Op::Download(d) => (d.src, d.dst as u64, d.bytes),
        _ => return Ok(()),
    };
    if bytes != 0 && src.abs_diff(dst) < bytes {
        return Err(Error::invalid(format!(
            "the {} of {bytes} bytes from {src:#x} to {dst:#x} overlaps itself",
            op.kind()
        )));
    }
    Ok(())
}

/// The main loop of the worker.
fn work(shared: &Shared) {
    enter_device_thread();
    let pool = &*shared.pool;
    let owner = &shared.owner;
    let timeline = owner.timeline();
    let mut mine = Pending::with_room();
    pool.wake_up();
    loop {
        pool.spin_until(shared.submitter_cpu.load(Ordering::Relaxed), || {
            shared.ready.load(Ordering::Acquire)
        });
        let mut pending = shared.pending.lock();
        while pending.ends.is_empty() {
            if pending.closing {
                pool.fall_asleep();
                return;
            }
            pending.parked = true;
            pool.fall_asleep();
            shared.bell.wait(&mut pending);
            pool.wake_up();
        }
        pending.parked = false;
        std::mem::swap(&mut pending.ops, &mut mine.ops);
        std::mem::swap(&mut pending.ends, &mut mine.ends);
        let first = pending.first;
        shared.ready.store(pending.closing, Ordering::Relaxed);
        let crowd = pending.crowd;
        drop(pending);
        shared.worker_cpu.store(current_cpu(), Ordering::Relaxed);
        if crowd != 0 {
            shared.room.notify_all();
        }
        let mut from = 0;
        let last = mine.ends.len() - 1;
        pool.begin();
        for i in 0..=last {
            let (to, value) = (mine.ends[i] as usize, first + i as u64);
            if !timeline.failed(value) {
                // SAFETY: the list holds the operations of `submit`, whose caller vouches for them
                // until the value is complete, below.
                timeline.run_call(value, || unsafe {
                    Runner { pool, owner, value }.run(&mine.ops, from, to)
                });
            }
            for index in from..to {
                mine.ops.vacate(index);
            }
            if i == last {
                pool.end();
            }
            owner.complete(value);
            from = to;
        }
        mine.clear();
    }
}

/// Runs operations of one submission.
pub(crate) struct Runner<'a> {
    pub(crate) pool: &'a TilePool,
    owner: &'a TimelineOwner,
    value: u64,
}

impl Runner<'_> {
    /// Runs operations `from..to`. The first failure poisons the timeline.
    ///
    /// # Safety
    /// - As [`operation`](Self::operation), for each of them.
    unsafe fn run(&self, ops: &OpList, from: usize, to: usize) {
        for index in from..to {
            let Some(op) = ops.get(index) else { return };
            // SAFETY: the caller vouches for the operation (the contract of this function).
            let outcome = caught(|| unsafe { self.operation(&op) });
            let failure = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(Failure::Cause(error))) => error,
                Ok(Err(Failure::Here(text))) => self.fault(op.name(), text),
                Ok(Err(Failure::At(name, text))) => self.fault(name, text),
                Err(text) => {
                    float::set();
                    self.fault(op.name(), text)
                }
            };
            self.owner.poison(self.value, failure);
            return;
        }
    }

    #[cold]
    fn fault(&self, op: String, what: String) -> Error {
        let stream = format!("{} {:?}", self.pool.name(), self.owner.timeline().id());
        Fault::new(op, stream, self.value, what).into()
    }

    /// Runs one operation. Panics of kernels and host calls pass through.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`]: the operation's addresses are valid for its
    ///   accesses, and its objects are of this device.
    #[inline]
    pub(crate) unsafe fn operation(&self, op: &Op<'_>) -> Result<(), Failure> {
        // SAFETY: a dispatch's pipeline is of this device (the contract of this function).
        if let Some(work) = unsafe { Work::of(op) } {
            // SAFETY: the operation's addresses are valid (the contract of this function).
            return unsafe { work.execute(self.pool) }.map_err(Failure::Here);
        }
        match op {
            Op::Wait(point) => self.wait(*point).map_err(Failure::Cause),
            Op::WriteTimestamp(timestamp) => {
                timestamp.set(now_nanos());
                Ok(())
            }
            Op::Host(call) => called(float::apart(|| call.run())),
            Op::Foreign(call) => called(float::apart(|| call.run(0))),
            // SAFETY: the pieces' addresses are valid (the contract of this function).
            Op::Copies(copies) => unsafe { copy_pieces(copies, self.pool) }.map_err(Failure::Here),
            Op::Graph(exec) => {
                // SAFETY: the graph is of this device (the contract of this function), so `native`
                // is the address of a program, which the lease keeps. The submitter of a graph
                // vouches for its operations too.
                unsafe { (*(exec.native() as *const Program)).launch(self) }
            }
            other => Err(Failure::Here(format!("a {} is not known here", other.kind()))),
        }
    }

    /// Blocks until the timepoint is settled.
    fn wait(&self, point: Timepoint) -> Result<()> {
        let timeline = point.timeline();
        let over = || !matches!(timeline.check(point.value()), Ok(false));
        if !over() && !self.pool.spin_until(u32::MAX, over) {
            self.pool.end();
            self.pool.fall_asleep();
            let result = timeline.wait(point.value(), None);
            self.pool.wake_up();
            self.pool.begin();
            return result;
        }
        timeline.check(point.value()).map(drop)
    }
}

/// Converts the result of a call of the program's code.
fn called(result: Result<()>) -> Result<(), Failure> {
    result.map_err(|e| match e.is_external() {
        true => Failure::Cause(e),
        false => Failure::Here(e.to_string()),
    })
}

/// The cause of an operation's failure.
pub(crate) enum Failure {
    /// The failure of another timeline or of another rank, passed on unchanged.
    Cause(Error),
    /// The operation's own failure.
    Here(String),
    /// The failure of an operation inside this one, with its name.
    At(String, String),
}
