//! The notes of a trace that are not a stream's: calls of the host, samples of the memory, and the
//! clock.
//!
//! This module must not know streams or runtimes.

use leasehold_alloc::{AllocStats, Allocator, Buffer, Layout, On};
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use leasehold_core::{Lease, Name, Result, Timepoint};
use leasehold_hal::{Device, TimestampQuery};
use std::path::{Path, PathBuf};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The most events of a trace. Later ones are counted and not kept.
pub(crate) const MOST_EVENTS: usize = 1 << 18;
/// The least time between two samples of the memory, in nanoseconds, unless it was asked for.
const BETWEEN_SAMPLES: u64 = 1_000_000;

/// A call of the host.
pub(crate) struct Call {
    pub(crate) thread: u32,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) what: What,
    pub(crate) scope: Option<Name>,
    pub(crate) error: Option<String>,
}

/// The kind of a call of the host.
pub(crate) enum What {
    /// An allocation of some bytes, with the growths and waits that it caused.
    Allocation { bytes: u64, grown: u64, host_waits: u64, inserted_waits: u64 },
    /// A wait of the host for the device.
    Wait(&'static str),
    /// A stream is told to wait for a timepoint.
    Order(Timepoint),
}

/// The memory at a time: bytes that leases hold, and bytes taken from the driver.
pub(crate) struct Sample {
    pub(crate) at: u64,
    pub(crate) live: u64,
    pub(crate) reserved: u64,
}

/// A moment of the device's clock whose time on the host's clock is known.
pub(crate) struct Anchor {
    pub(crate) query: Lease<TimestampQuery>,
    pub(crate) at: u64,
}

/// The notes of a trace. Times are nanoseconds from its start.
pub(crate) struct Recorder {
    on: AtomicBool,
    start: Instant,
    pub(crate) device: Lease<dyn Device>,
    memory: Allocator,
    kept: AtomicUsize,
    dropped: AtomicU64,
    calls: Mutex<Vec<Call>>,
    samples: Mutex<Vec<Sample>>,
    /// When the memory was sampled last.
    sampled: AtomicU64,
    threads: Mutex<Vec<(ThreadId, String)>>,
    anchor: Mutex<Option<Anchor>>,
    /// The largest error of the device's clock, in nanoseconds; the largest number if the device
    /// has no times.
    clock_error: AtomicU64,
    /// The file that the end of the runtime writes, for a trace that the environment asked for.
    file: Option<PathBuf>,
}

impl Recorder {
    pub(crate) fn new(device: Lease<dyn Device>, memory: Allocator, file: Option<PathBuf>) -> Self {
        Self {
            on: AtomicBool::new(true),
            start: Instant::now(),
            device,
            memory,
            kept: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            calls: Mutex::default(),
            samples: Mutex::default(),
            sampled: AtomicU64::new(0),
            threads: Mutex::default(),
            anchor: Mutex::default(),
            clock_error: AtomicU64::new(u64::MAX),
            file,
        }
    }

    /// Nanoseconds since the start.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns whether the trace goes on.
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Ends the trace. Streams forget it at their next submission.
    pub(crate) fn end(&self) {
        self.on.store(false, Ordering::Release);
    }

    /// Returns whether there is room for some more events, and takes it. Without room they count as
    /// dropped.
    pub(crate) fn take_room(&self, events: usize) -> bool {
        let room = |kept: usize| kept.checked_add(events).filter(|&sum| sum <= MOST_EVENTS);
        let taken = self.kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok();
        if !taken {
            self.dropped.fetch_add(events as u64, Ordering::Relaxed);
        }
        taken
    }

    /// The number of events that found no room.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The calling thread's number, from 1.
    pub(crate) fn thread(&self) -> u32 {
        let current = std::thread::current();
        let mut threads = self.threads.lock();
        let known = threads.iter().position(|(id, _)| *id == current.id());
        let index = known.unwrap_or_else(|| {
            let number = threads.len() + 1;
            let name = current.name().map_or_else(|| format!("thread {number}"), str::to_owned);
            threads.push((current.id(), name));
            threads.len() - 1
        });
        index as u32 + 1
    }

    /// The names of the threads, the first being number 1.
    pub(crate) fn threads(&self) -> Vec<String> {
        self.threads.lock().iter().map(|(_, name)| name.clone()).collect()
    }

    /// Sets the moment of the device's clock that times are counted from, and how far off it may
    /// be.
    pub(crate) fn set_anchor(&self, anchor: Anchor, error: u64) {
        self.clock_error.store(error, Ordering::Relaxed);
        *self.anchor.lock() = Some(anchor);
    }

    /// The largest error of the device's times on the host's clock, in nanoseconds; `None` if the
    /// device has no times.
    pub(crate) fn clock_error(&self) -> Option<u64> {
        Some(self.clock_error.load(Ordering::Relaxed)).filter(|&error| error < u64::MAX)
    }

    /// The file that the end of the runtime writes, if there is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Gives up what the recorder holds of the device.
    pub(crate) fn let_go(&self) {
        let old = self.anchor.lock().take();
        // Without the lock: the query goes back to its pool.
        drop(old);
    }

    /// The moment that times are counted from, unless the device has no timestamps.
    pub(crate) fn anchor(&self) -> Option<(Lease<TimestampQuery>, u64)> {
        self.anchor.lock().as_ref().map(|a| (a.query.clone(), a.at))
    }

    fn note(&self, begun: u64, what: What, error: Option<String>) {
        if self.is_on() && self.take_room(1) {
            let (thread, ended, scope) = (self.thread(), self.now(), Name::current());
            self.calls.lock().push(Call { thread, begun, ended, what, scope, error });
        }
    }

    /// Notes a call of the host.
    pub(crate) fn call<R>(&self, what: What, call: impl FnOnce() -> Result<R>) -> Result<R> {
        let begun = self.now();
        let result = call();
        let error = result.as_ref().err().map(ToString::to_string);
        self.note(begun, what, error);
        result
    }

    /// Allocates, and notes what the allocator did for it: the sums of all threads.
    pub(crate) fn allocation(
        &self,
        memory: &Allocator,
        layout: Layout,
        on: On<'_>,
    ) -> Result<Lease<Buffer>> {
        let before = memory.stats();
        let begun = self.now();
        let result = memory.alloc(layout, on);
        let error = result.as_ref().err().map(ToString::to_string);
        let after = memory.stats();
        let what = What::Allocation {
            bytes: layout.size,
            grown: after.reserved.saturating_sub(before.reserved),
            host_waits: after.host_waits.saturating_sub(before.host_waits),
            inserted_waits: after.inserted_waits.saturating_sub(before.inserted_waits),
        };
        self.note(begun, what, error);
        if memory.same(&self.memory) {
            self.sample_of(&after);
        }
        result
    }

    /// Samples the memory, unless that was done a moment ago.
    pub(crate) fn sample(&self) {
        let now = self.now();
        if now.saturating_sub(self.sampled.load(Ordering::Relaxed)) >= BETWEEN_SAMPLES {
            self.sample_of(&self.memory.stats());
        }
    }

    /// Samples the memory now.
    pub(crate) fn sample_now(&self) {
        self.sample_of(&self.memory.stats());
    }

    fn sample_of(&self, stats: &AllocStats) {
        let at = self.now();
        self.sampled.store(at, Ordering::Relaxed);
        if self.is_on() && self.take_room(1) {
            let sample = Sample { at, live: stats.live_bytes, reserved: stats.reserved };
            self.samples.lock().push(sample);
        }
    }

    /// The calls and samples, which the recorder gives up.
    pub(crate) fn take_notes(&self) -> (Vec<Call>, Vec<Sample>) {
        let calls = std::mem::take(&mut *self.calls.lock());
        (calls, std::mem::take(&mut *self.samples.lock()))
    }
}

/// Nanoseconds of a duration.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
