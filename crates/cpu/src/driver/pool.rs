//! The tile pool: helper threads around a [`Crew`], who take part when the [`Advice`] says that it pays.
//!
//! With `threads` = N a job uses at most N threads: its owner (a queue's worker) and N − 1 helpers, which all queues of the device share.
//! Helpers are started by the first job that wants them. After their last job they stay awake for a bounded *time*, then sleep and use no
//! processor. Nobody stays awake in somebody else's way:
//! - a thread that finds itself on the processor of the thread it waits for (a loaded machine) sleeps at once;
//! - while no queue runs anything one processor is left for the application: helpers sleep first, then idle queues' workers;
//! - a waiting thread of the application stays awake only while jobs and workers leave a processor to it.
//!
//! This module must not know operations, queues or streams.

use super::advice::Advice;
use super::crew::{Body, Crew, guarded};
use super::{current_cpu, float, now_nanos};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold_core::sync::thread::{self, JoinHandle};
use leasehold_core::sync::{Arc, CachePadded, Mutex, spin_loop};
use leasehold_core::{Birth, Result};
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::time::{Duration, Instant};

/// Ranges of tiles that each thread gets on average: enough to even out, few enough that claiming costs nothing.
const SHARES: u64 = 8;
/// An idle queue's worker lets helpers go to sleep first for so long.
const GIVE_WAY: Duration = Duration::from_micros(5);

thread_local! {
    static ON_DEVICE: Cell<bool> = const { Cell::new(false) };
    static SCRATCH: Scratch = const { Scratch(UnsafeCell::new(Vec::new())) };
}

/// Whether this thread is one of a CPU device's own.
pub(crate) fn on_device_thread() -> bool {
    ON_DEVICE.try_with(Cell::get).unwrap_or(false)
}

/// Makes this thread one of the device's.
pub(crate) fn enter_device_thread() {
    ON_DEVICE.with(|d| d.set(true));
    float::set();
}

/// A thread's scratch memory, in cache lines.
struct Scratch(UnsafeCell<Vec<Line>>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Calls `f` with `bytes` bytes of scratch memory of this thread, aligned to 64. The memory is kept for the next call; it is allocated only
/// when more is wanted than ever before on this thread. Must not be nested: `f` runs one tile.
pub(crate) fn with_scratch<R>(bytes: u32, f: impl FnOnce(*mut u8) -> R) -> R {
    if bytes == 0 {
        return f(64 as *mut u8);
    }
    SCRATCH.with(|scratch| {
        let lines = bytes.div_ceil(64) as usize;
        // SAFETY: the cell is this thread's, and this borrow ends before `f` is called.
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
    crew: Crew,
    cores: u32,
    spin: Duration,
    host_spin: Duration,
    /// Threads of the device that are not asleep.
    awake: CachePadded<AtomicU32>,
    /// Queues that run something.
    running: AtomicU32,
    /// Helpers that the jobs in progress could use.
    wanted: AtomicU32,
    /// The processor that the last job came from.
    owner_cpu: AtomicU32,
    advice: Advice,
}

/// How long some tiles took on one thread.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pub(crate) nanos: u64,
    pub(crate) tiles: u64,
}

/// Helper threads and what they know. Dropping it ends them.
pub(crate) struct TilePool {
    shared: Arc<Shared>,
    threads: u32,
    name: Box<str>,
    started: AtomicBool,
    helpers: Mutex<Vec<JoinHandle<()>>>,
    /// The process that the threads live in.
    birth: Birth,
}

impl TilePool {
    /// A pool for jobs of at most `threads` threads on `cores` processors, whose threads stay awake for `spin` after their last work, and the
    /// application's for `host_spin` when they wait.
    pub(crate) fn new(
        name: impl Into<Box<str>>,
        threads: u32,
        cores: u32,
        spin: Duration,
        host_spin: Duration,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                crew: Crew::new(),
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
            birth: Birth::here(),
        }
    }

    /// Whether this process is a forked child of the one that the device's threads live in.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.birth.left()
    }

    /// Fails where a call that needs one of the device's threads would wait for ever.
    ///
    /// # Errors
    /// `InvalidState` in a forked child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        self.birth.check(|_| {
            "this process was forked after the device was opened, and the device's threads stayed in the parent; open a backend of its own \
             here, or fork before"
                .into()
        })
    }

    /// Threads that one job can use.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What is known about costs.
    #[inline]
    pub(crate) fn advice(&self) -> &Advice {
        &self.shared.advice
    }

    /// Runs `tiles` tiles that together take about `nanos` nanoseconds (0: unknown) here and, if it pays, on helpers. Says how long some of them
    /// took.
    ///
    /// # Errors
    /// What the first panicking tile said.
    pub(crate) fn run(&self, tiles: u64, nanos: u64, body: Body<'_>) -> Result<Sample, Box<str>> {
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
        let alone = || guarded(|| timed(0, tiles)).map(|()| taken());
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
        let asleep = shared.crew.sleepers();
        let ring = worth.min(asleep);
        let hands = most.min((self.threads - 1).saturating_sub(asleep) + ring);
        if hands == 0 {
            return alone();
        }
        if ring != 0 {
            shared.advice.note_ring(now_nanos());
        }
        shared.owner_cpu.store(current_cpu(), Ordering::Relaxed);
        let chunk = (tiles / (u64::from(self.threads) * SHARES)).max(1);
        shared.wanted.fetch_add(hands, Ordering::Relaxed);
        let outcome = shared.crew.run(tiles, chunk, ring, body, &timed);
        shared.wanted.fetch_sub(hands, Ordering::Relaxed);
        outcome.map(|()| taken())
    }

    /// Starts the helpers. Where the system refuses threads, those that there are must do.
    #[cold]
    fn start_slow(&self) {
        let mut helpers = self.helpers.lock();
        if self.started.load(Ordering::Relaxed) {
            return;
        }
        for i in 1..self.threads {
            let shared = self.shared.clone();
            let named = thread::Builder::new().name(format!("lh-{}-t{i}", self.name.replace(':', "")));
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

    /// Spins until `ready`, for a bounded time; says whether it is. Does not spin on processor `not_on`, where the one who makes it ready runs.
    pub(crate) fn spin_until(&self, not_on: u32, ready: impl Fn() -> bool) -> bool {
        let shared = &*self.shared;
        let crowded = |so_far| so_far > GIVE_WAY && shared.awake.load(Ordering::Relaxed) >= shared.cores;
        spin(shared, shared.spin, not_on, ready, crowded)
    }

    /// As [`spin_until`](Self::spin_until), for a thread that is not the device's own: only as long as the device leaves a processor to spare.
    pub(crate) fn spin_outside(&self, not_on: u32, ready: impl Fn() -> bool) -> bool {
        let shared = &*self.shared;
        let crowded = |_| {
            let awake = shared.awake.load(Ordering::Relaxed);
            awake.max(1 + shared.wanted.load(Ordering::Relaxed)) >= shared.cores
        };
        spin(shared, shared.host_spin, not_on, ready, crowded)
    }

    /// A queue begins to run something.
    pub(crate) fn begin(&self) {
        self.shared.running.fetch_add(1, Ordering::Relaxed);
    }

    /// It is through, and will say so next.
    pub(crate) fn end(&self) {
        if self.shared.running.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.shared.advice.end_period();
        }
    }

    /// Counts a thread of the device as awake.
    pub(crate) fn wake_up(&self) {
        self.shared.awake.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts it as asleep.
    pub(crate) fn fall_asleep(&self) {
        self.shared.awake.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for TilePool {
    fn drop(&mut self) {
        if self.birth.left() {
            // Nobody to wait for, and a lock may have been somebody's when the process was forked.
            std::mem::forget(std::mem::take(self.helpers.get_mut()));
            return;
        }
        self.shared.crew.dismiss();
        let me = thread::current().id();
        for helper in self.helpers.lock().drain(..) {
            if helper.thread().id() != me {
                // Helpers catch what tiles throw; there is nothing to learn from the result.
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
        // No yielding in between: on a loaded machine that gives a whole time slice away, while a sleeper is woken at once.
        let so_far = start.elapsed();
        if so_far > time || crowded(so_far) {
            return ready();
        }
    }
}

/// A helper's life.
fn help(shared: &Shared, seat: usize) {
    enter_device_thread();
    shared.awake.fetch_add(1, Ordering::Relaxed);
    loop {
        if shared.crew.help(seat) || stay_awake(shared) {
            // The pool is dismissed by its last owner, so there is no job then and the next round ends in `sleep`.
            continue;
        }
        shared.awake.fetch_sub(1, Ordering::Relaxed);
        let stay = shared.crew.sleep();
        shared.awake.fetch_add(1, Ordering::Relaxed);
        shared.advice.note_arrival(now_nanos());
        if !stay {
            break;
        }
    }
    shared.awake.fetch_sub(1, Ordering::Relaxed);
}

/// Waits for work without sleeping, for a while.
fn stay_awake(shared: &Shared) -> bool {
    let owner = shared.owner_cpu.load(Ordering::Relaxed);
    let crowded =
        |_| shared.running.load(Ordering::Relaxed) == 0 && shared.awake.load(Ordering::Relaxed) >= shared.cores;
    spin(shared, shared.spin, owner, || shared.crew.has_work(), crowded)
}
