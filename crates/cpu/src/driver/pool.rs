//! The tile pool: helper threads around a [`Jobs`], which take part in a job if the [`Advice`] says
//! that it pays.
//!
//! With `threads` = N a job uses at most N threads: its owner (a queue's worker) and up to N − 1
//! helpers. All queues of the device share the helpers. The first job that wants helpers starts
//! them. After their last job helpers stay awake for a bounded *time*, then sleep and use no
//! processor. A thread that stays awake must not take the processor from one that works:
//! - On a loaded machine, a thread may run on the processor of the thread that it waits for. Such a
//!   thread sleeps at once.
//! - While no queue runs anything, one processor is left for the application: helpers sleep first,
//!   then the workers of idle queues.
//! - A waiting thread of the application stays awake only while jobs and workers leave a processor
//!   free.
//!
//! This module must not know operations, queues or streams.

use super::advice::Advice;
use super::jobs::{Body, Jobs};
use super::{current_cpu, float, now_nanos};
use leasehold_core::panics::caught;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold_core::sync::thread::{self, JoinHandle};
use leasehold_core::sync::{Arc, CachePadded, Mutex, spin_loop};
use leasehold_core::{ForkGuard, Result};
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::time::{Duration, Instant};

/// A thread claims this part of its share of the tiles that are left. Long ranges are read in
/// order.
const SHARES: u64 = 2;
/// The time that the worker of an idle queue lets helpers go to sleep first.
const GIVE_WAY: Duration = Duration::from_micros(5);

thread_local! {
    static ON_DEVICE: Cell<bool> = const { Cell::new(false) };
    static SCRATCH: Scratch = const { Scratch(UnsafeCell::new(Vec::new())) };
}

/// Whether this thread belongs to a CPU device.
pub(crate) fn on_device_thread() -> bool {
    ON_DEVICE.try_with(Cell::get).unwrap_or(false)
}

/// Marks this thread as a thread of the device, and sets its floating-point state.
pub(crate) fn enter_device_thread() {
    ON_DEVICE.with(|d| d.set(true));
    float::set();
}

/// A thread's scratch memory, in cache lines.
struct Scratch(UnsafeCell<Vec<CacheLine>>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Calls `f` with `bytes` bytes of scratch memory of this thread, aligned to 64 bytes. The memory
/// is kept for the next call. The call allocates only if this thread never used as many bytes
/// before. The calls must not be nested: `f` runs one tile.
pub(crate) fn with_scratch<R>(bytes: u32, f: impl FnOnce(*mut u8) -> R) -> R {
    if bytes == 0 {
        return f(64 as *mut u8);
    }
    SCRATCH.with(|scratch| {
        let lines = bytes.div_ceil(64) as usize;
        // SAFETY: the cell is this thread's, and this borrow ends before the call of `f`.
        let at = unsafe {
            let v = &mut *scratch.0.get();
            if v.capacity() < lines {
                v.reserve(lines.next_power_of_two().max(256));
            }
            v.as_mut_ptr()
        };
        f(at.cast())
    })
}

struct Shared {
    jobs: Jobs,
    cores: u32,
    spin: Duration,
    host_spin: Duration,
    /// Threads of the device that are awake.
    awake: CachePadded<AtomicU32>,
    /// Queues that run work.
    running: AtomicU32,
    /// Helpers that the current jobs could use.
    wanted: AtomicU32,
    /// The processor of the last job's owner.
    owner_cpu: AtomicU32,
    advice: Advice,
}

/// The time of some tiles on one thread.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pub(crate) nanos: u64,
    pub(crate) tiles: u64,
}

/// Helper threads and their measurements. Dropping the pool ends the threads.
pub(crate) struct TilePool {
    shared: Arc<Shared>,
    threads: u32,
    name: Box<str>,
    started: AtomicBool,
    helpers: Mutex<Vec<JoinHandle<()>>>,
    /// The process that the threads belong to.
    fork_guard: ForkGuard,
}

impl TilePool {
    /// A pool for jobs of at most `threads` threads on `cores` processors. The device's threads
    /// stay awake for `spin` after their last work. Waiting threads of the application stay awake
    /// for `host_spin`.
    pub(crate) fn new(
        name: impl Into<Box<str>>,
        threads: u32,
        cores: u32,
        spin: Duration,
        host_spin: Duration,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                jobs: Jobs::new(),
                cores: cores.max(1),
                spin,
                host_spin,
                awake: CachePadded::new(AtomicU32::new(0)),
                running: AtomicU32::new(0),
                wanted: AtomicU32::new(0),
                owner_cpu: AtomicU32::new(u32::MAX),
                advice: Advice::new(),
            }),
            threads: threads.max(1),
            name: name.into(),
            started: AtomicBool::new(false),
            helpers: Mutex::new(Vec::new()),
            fork_guard: ForkGuard::here(),
        }
    }

    /// Whether this process is a forked child of the one that the device's threads belong to.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.fork_guard.is_forked_child()
    }

    /// Fails in a process where a call that needs a thread of the device would wait for ever.
    ///
    /// # Errors
    /// `InvalidState` in a forked child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        self.fork_guard.check(|_| {
            "this process was forked after the device was opened, and the device's threads stayed in the parent; open a backend of its own \
             here, or fork before"
                .into()
        })
    }

    /// The most threads of one job.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The measured costs.
    #[inline]
    pub(crate) fn advice(&self) -> &Advice {
        &self.shared.advice
    }

    /// Runs `tiles` tiles that together take about `nanos` nanoseconds (0: unknown). Helpers take
    /// part if that pays. Returns the time that some of the tiles took.
    ///
    /// # Errors
    /// The message of the first panicking tile.
    pub(crate) fn run(&self, tiles: u64, nanos: u64, body: Body<'_>) -> Result<Sample, String> {
        let sample = Cell::new(None);
        let timed = |from: u64, to: u64| {
            if sample.get().is_some() {
                return body(from, to);
            }
            let start = Instant::now();
            body(from, to);
            sample.set(Some(Sample { nanos: start.elapsed().as_nanos() as u64, tiles: to - from }));
        };
        let taken = || sample.get().unwrap_or_default();
        let alone = || caught(|| timed(0, tiles)).map(|()| taken());
        if self.threads == 1 || tiles < 2 || !Advice::shares(nanos) {
            return alone();
        }
        let shared = &*self.shared;
        let most = tiles.min(u64::from(self.threads)) as u32 - 1;
        let worth = shared.advice.wakes(nanos).min(most);
        if !self.started.load(Ordering::Acquire) {
            if worth == 0 {
                return alone();
            }
            self.start_slow();
        }
        let asleep = shared.jobs.sleepers();
        let ring = worth.min(asleep);
        let hands = most.min((self.threads - 1).saturating_sub(asleep) + ring);
        if hands == 0 {
            return alone();
        }
        if ring != 0 {
            shared.advice.note_ring(now_nanos());
        }
        shared.owner_cpu.store(current_cpu(), Ordering::Relaxed);
        let parts = u64::from(self.threads) * SHARES;
        shared.wanted.fetch_add(hands, Ordering::Relaxed);
        let outcome = shared.jobs.run(tiles, parts, ring, body, &timed);
        shared.wanted.fetch_sub(hands, Ordering::Relaxed);
        outcome.map(|()| taken())
    }

    /// Starts the helpers. If the system refuses threads, the pool works with fewer.
    #[cold]
    fn start_slow(&self) {
        let mut helpers = self.helpers.lock();
        if self.started.load(Ordering::Relaxed) {
            return;
        }
        for i in 1..self.threads {
            let shared = self.shared.clone();
            let named =
                thread::Builder::new().name(format!("lh-{}-t{i}", self.name.replace(':', "")));
            match named.spawn(move || help(&shared, i as usize)) {
                Ok(handle) => helpers.push(handle),
                Err(error) => {
                    tracing::warn!(%error, wanted = self.threads - 1, started = i - 1, "no more helper threads");
                    break;
                }
            }
        }
        self.started.store(true, Ordering::Release);
    }

    /// Spins until `ready`, for a bounded time, and returns whether it is ready. The call does not
    /// spin on processor `not_on`, which runs the thread that makes it ready.
    pub(crate) fn spin_until(&self, not_on: u32, ready: impl Fn() -> bool) -> bool {
        let shared = &*self.shared;
        let crowded =
            |so_far| so_far > GIVE_WAY && shared.awake.load(Ordering::Relaxed) >= shared.cores;
        spin(shared, shared.spin, not_on, ready, crowded)
    }

    /// As [`spin_until`](Self::spin_until), for a thread that does not belong to the device. The
    /// call spins only while the device leaves a processor free.
    pub(crate) fn spin_outside(&self, not_on: u32, ready: impl Fn() -> bool) -> bool {
        let shared = &*self.shared;
        let crowded = |_| {
            let awake = shared.awake.load(Ordering::Relaxed);
            awake.max(1 + shared.wanted.load(Ordering::Relaxed)) >= shared.cores
        };
        spin(shared, shared.host_spin, not_on, ready, crowded)
    }

    /// Counts a queue as running.
    pub(crate) fn begin(&self) {
        self.shared.running.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a queue as idle. The queue publishes its last value next.
    pub(crate) fn end(&self) {
        if self.shared.running.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.shared.advice.end_period();
        }
    }

    /// Counts a thread of the device as awake.
    pub(crate) fn wake_up(&self) {
        self.shared.awake.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a thread of the device as asleep.
    pub(crate) fn fall_asleep(&self) {
        self.shared.awake.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for TilePool {
    fn drop(&mut self) {
        if self.fork_guard.is_forked_child() {
            // A forked child has no helpers to wait for, and another thread may have held the lock
            // at the fork.
            std::mem::forget(std::mem::take(self.helpers.get_mut()));
            return;
        }
        self.shared.jobs.dismiss();
        let me = thread::current().id();
        for helper in self.helpers.lock().drain(..) {
            if helper.thread().id() != me {
                // Helpers catch the panics of tiles, so the result says nothing.
                drop(helper.join());
            }
        }
    }
}

impl fmt::Debug for TilePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TilePool({}, {} threads)", self.name, self.threads)
    }
}

fn spin(
    shared: &Shared,
    time: Duration,
    not_on: u32,
    ready: impl Fn() -> bool,
    crowded: impl Fn(Duration) -> bool,
) -> bool {
    if ready() {
        return true;
    }
    if shared.cores == 1 || time.is_zero() || (not_on != u32::MAX && not_on == current_cpu()) {
        return false;
    }
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            spin_loop();
        }
        // The loop does not yield: on a loaded machine that loses a whole time slice, while a
        // sleeping thread is woken at once.
        let so_far = start.elapsed();
        if so_far > time || crowded(so_far) {
            return ready();
        }
    }
}

/// The main loop of a helper.
fn help(shared: &Shared, first: usize) {
    enter_device_thread();
    shared.awake.fetch_add(1, Ordering::Relaxed);
    loop {
        if shared.jobs.help(first) || stay_awake(shared) {
            // The pool's last owner dismisses it, so no job exists then and the next round ends in
            // `sleep`.
            continue;
        }
        shared.awake.fetch_sub(1, Ordering::Relaxed);
        let stay = shared.jobs.sleep();
        shared.awake.fetch_add(1, Ordering::Relaxed);
        shared.advice.note_arrival(now_nanos());
        if !stay {
            break;
        }
    }
    shared.awake.fetch_sub(1, Ordering::Relaxed);
}

/// Spins for work for a bounded time.
fn stay_awake(shared: &Shared) -> bool {
    let owner = shared.owner_cpu.load(Ordering::Relaxed);
    let crowded = |_| {
        shared.running.load(Ordering::Relaxed) == 0
            && shared.awake.load(Ordering::Relaxed) >= shared.cores
    };
    spin(shared, shared.spin, owner, || shared.jobs.has_work(), crowded)
}
