//! The tile pool: helper threads around a [`Crew`], what a tile costs, and when helpers are worth waking.
//!
//! With `threads` = N a job uses at most N threads: its owner (a queue's worker) and N − 1 helpers, which all queues of the device share.
//! Helpers are started by the first job that wants them. After their last job they stay awake for a bounded *time*, then sleep and use no
//! processor. A thread that finds itself on the processor of the thread it waits for (a loaded machine) does not stay awake: it would keep that
//! thread from running.
//!
//! A small table remembers roughly what a tile of each kernel costs. It decides only where tiles run, never what they compute.
//!
//! This module must not know operations, queues or streams.

use super::crew::{Body, Crew, guarded};
use super::{current_cpu, float};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold_core::sync::thread::{self, JoinHandle};
use leasehold_core::sync::{Arc, CachePadded, Mutex, spin_loop};
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::time::{Duration, Instant};

/// Jobs that take less than this many nanoseconds run on one thread: handing a tile to another core and back costs about as much.
const SHARE_NANOS: u64 = 3_000;
/// Sleeping helpers are woken, one each, for this many nanoseconds of work: a wake costs some microseconds here and some more there.
const WAKE_NANOS: u64 = 15_000;
/// Ranges of tiles that each thread gets on average: enough to even out, few enough that claiming costs nothing.
const SHARES: u64 = 8;
const COSTS: usize = 512;

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
    /// The processor that the last job came from.
    owner_cpu: AtomicU32,
    costs: Box<[AtomicU32]>,
}

/// Helper threads and what they know. Dropping it ends them.
pub(crate) struct TilePool {
    shared: Arc<Shared>,
    threads: u32,
    name: Box<str>,
    started: AtomicBool,
    helpers: Mutex<Vec<JoinHandle<()>>>,
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
                owner_cpu: AtomicU32::new(u32::MAX),
                costs: (0..COSTS).map(|_| AtomicU32::new(0)).collect(),
            }),
            threads: threads.max(1),
            name: name.into(),
            started: AtomicBool::new(false),
            helpers: Mutex::new(Vec::new()),
        }
    }

    /// Threads that one job can use.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What a tile of the kernel `key` costs, in nanoseconds; 0 when unknown.
    #[inline]
    pub(crate) fn cost(&self, key: u64) -> u64 {
        u64::from(self.cost_of(key).load(Ordering::Relaxed))
    }

    #[inline]
    fn cost_of(&self, key: u64) -> &AtomicU32 {
        // Functions are aligned to 16; Fibonacci hashing spreads the rest.
        let hash = (key >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &self.shared.costs[(hash >> 55) as usize % COSTS]
    }

    /// Notes that `tiles` tiles of kernel `key` took `nanos` on one thread.
    pub(crate) fn note_cost(&self, key: u64, nanos: u64, tiles: u64) {
        let Some(new) = nanos.checked_div(tiles) else { return };
        let new = new.clamp(1, u64::from(u32::MAX)) as u32;
        let cell = self.cost_of(key);
        let old = cell.load(Ordering::Relaxed);
        // A thread that lost its processor makes a tile look costly: rise slowly.
        let mean = if old == 0 { new } else { (old / 4 * 3).saturating_add(new.min(old.saturating_mul(4)) / 4).max(1) };
        cell.store(mean, Ordering::Relaxed);
    }

    /// Runs `tiles` tiles that together take about `nanos` nanoseconds (0: unknown) here and, if it pays, on helpers. Returns how many ran on
    /// this thread.
    ///
    /// # Errors
    /// What the first panicking tile said.
    pub(crate) fn run(&self, tiles: u64, nanos: u64, body: Body<'_>) -> Result<u64, Box<str>> {
        if self.threads == 1 || tiles < 2 || (nanos != 0 && nanos < SHARE_NANOS) {
            return guarded(|| body(0, tiles)).map(|()| tiles);
        }
        if !self.started.load(Ordering::Acquire) {
            self.start_slow();
        }
        let most = tiles.min(u64::from(self.threads)) as u32 - 1;
        let ring = if self.shared.crew.sleepers() == 0 {
            0
        } else if nanos == 0 {
            most
        } else {
            most.min((nanos / WAKE_NANOS) as u32)
        };
        self.shared.owner_cpu.store(current_cpu(), Ordering::Relaxed);
        let chunk = (tiles / (u64::from(self.threads) * SHARES)).max(1);
        self.shared.crew.run(tiles, chunk, ring, body)
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
        spin(&self.shared, self.shared.spin, not_on, ready)
    }

    /// As [`spin_until`](Self::spin_until), for a thread that is not the device's own: only where a processor is to spare.
    pub(crate) fn spin_outside(&self, not_on: u32, ready: impl Fn() -> bool) -> bool {
        if self.shared.awake.load(Ordering::Relaxed) >= self.shared.cores {
            return ready();
        }
        spin(&self.shared, self.shared.host_spin, not_on, ready)
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

fn spin(shared: &Shared, time: Duration, not_on: u32, ready: impl Fn() -> bool) -> bool {
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
        if start.elapsed() > time {
            return ready();
        }
    }
}

/// A helper's life.
fn help(shared: &Shared, seat: usize) {
    enter_device_thread();
    shared.awake.fetch_add(1, Ordering::Relaxed);
    loop {
        if shared.crew.help(seat)
            || spin(shared, shared.spin, shared.owner_cpu.load(Ordering::Relaxed), || shared.crew.has_work())
        {
            // The pool is dismissed by its last owner, so there is no job then and the next round ends in `sleep`.
            continue;
        }
        shared.awake.fetch_sub(1, Ordering::Relaxed);
        let stay = shared.crew.sleep();
        shared.awake.fetch_add(1, Ordering::Relaxed);
        if !stay {
            break;
        }
    }
    shared.awake.fetch_sub(1, Ordering::Relaxed);
}
