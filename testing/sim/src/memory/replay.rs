//! Replays a trace against this allocator or the process's heap, and reports what it cost.
//!
//! The trace's streams become streams whose epochs complete a fixed number of operations later
//! (`lag`), so that readiness is deterministic and needs no device. Replaying on a virtual device
//! ([`FakeBacking`]) maps nothing.

use crate::memory::fake::FakeBacking;
use crate::memory::system::System;
use crate::memory::trace::{Event, Trace};
use crate::memory::virtual_stream::{VirtualStream, pass};
use crate::memory::workload::Subject;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, Buffer, Layout, On, Policy, Snapshot};
use leasehold_core::sync::CachePadded;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Lease, Result, Timepoint, threads};
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// Which allocator plays the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum Player {
    /// Leasehold's.
    #[default]
    Own,
    /// The process's own heap, whatever the device.
    System,
}

/// Is told, now and then, how many more events were played. From any thread.
#[derive(Clone)]
pub struct Progress(std::sync::Arc<dyn Fn(u64) + Send + Sync>);

impl Progress {
    /// Calls `f` with the number of events since its last call.
    pub fn new(f: impl Fn(u64) + Send + Sync + 'static) -> Self {
        Self(std::sync::Arc::new(f))
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// How to replay.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which allocator plays.
    pub player: Player,
    /// Moving granules.
    pub policy: Policy,
    /// The budget as a multiple of the trace's peak, times the threads; `None`: no limit.
    pub budget: Option<f64>,
    /// How many times the trace is played; what is live at its end is freed in between.
    pub repeat: u32,
    /// Threads that each play a copy on streams of their own.
    pub threads: u32,
    /// Operations after which an epoch completes.
    pub lag: u64,
    /// Thread caches in front of the lock.
    pub thread_caches: bool,
    /// Measure each operation's time; what the clock itself takes is subtracted.
    pub timed: bool,
    /// End at the first allocation that fails.
    pub stop_at_failure: bool,
    /// The listener for the progress.
    pub progress: Option<Progress>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            player: Player::Own,
            policy: Policy::Balanced,
            budget: None,
            repeat: 1,
            threads: 1,
            lag: 32,
            thread_caches: true,
            timed: false,
            stop_at_failure: false,
            progress: None,
        }
    }
}

/// The measurements of a replay.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Report {
    /// Events played, all repetitions and threads.
    pub events: u64,
    /// The most bytes that were requested and live at one time, all threads together. Failed
    /// allocations were not live. With several threads it may be short by one part in 4,096 of the
    /// trace's peak for each.
    pub peak_requested: u64,
    /// The most bytes taken from the driver.
    pub peak_reserved: u64,
    /// The two divided.
    pub ratio: f64,
    /// The least budget, as a multiple of the trace's peak times the threads, with which the trace
    /// completes; `None` when it was not looked for.
    pub min_budget: Option<f64>,
    /// Nanoseconds per operation.
    pub ns_per_op: Times,
    /// Calls of the driver.
    pub driver_calls: DriverCalls,
    /// Episodes in which free granules were moved.
    pub remaps: u64,
    /// Waits of the host for a stream.
    pub host_waits: u64,
    /// Allocations that failed.
    pub failed: u64,
}

/// Nanoseconds per operation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Times {
    /// The mean over everything.
    pub mean: f64,
    /// The mean over the last repetition: without what only the first cost. Not among the keys of
    /// the JSON report.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub steady: f64,
    /// Half of the operations took at most this; 0 unless each was timed.
    pub p50: f64,
    /// 99 in 100.
    pub p99: f64,
    /// 999 in 1,000.
    pub p999: f64,
}

/// Calls of the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct DriverCalls {
    /// All.
    pub total: u64,
    /// In the last repetition.
    pub steady: u64,
}

/// Replays on a virtual device that has as much memory as is asked for.
///
/// # Errors
/// As [`replay`].
pub fn replay_virtual(trace: &Trace, options: &Options) -> Result<Report> {
    replay(trace, options, virtual_device()?)
}

/// A device that maps nothing and has as much memory as anybody asks for.
///
/// # Errors
/// None; the shape is that of a real device's.
pub fn virtual_device() -> Result<Box<dyn Backing>> {
    Ok(Box::new(FakeBacking::new(1 << 38)))
}

/// Replays on a backing. Epochs are virtual, so nothing must really use the memory.
///
/// # Errors
/// The allocator's errors on construction, and a lost device. Allocations that fail otherwise are
/// counted, not returned.
pub fn replay(trace: &Trace, options: &Options, backing: Box<dyn Backing>) -> Result<Report> {
    let budget = budget(trace, options, &*backing)?;
    match options.player {
        Player::Own => play(trace, options, &Own::new(backing, options, budget, 0)?),
        Player::System => play(trace, options, &System::counting(budget)),
    }
}

/// A snapshot of Leasehold's allocator at the end of one copy's replay, with the newest `events` of
/// it. What the trace does not free is live. The times are the replay's own.
///
/// # Errors
/// As [`replay`].
pub fn recorded_replay(
    trace: &Trace,
    options: &Options,
    backing: Box<dyn Backing>,
    events: usize,
) -> Result<Snapshot> {
    let options = Options { threads: 1, timed: false, ..options.clone() };
    let budget = budget(trace, &options, &*backing)?;
    let own = Own::new(backing, &options, budget, events)?;
    let mut copy = Playback::new(trace, &options, &own, None)?;
    copy.play()?;
    Ok(own.0.snapshot())
}

/// The budget in bytes.
fn budget(trace: &Trace, options: &Options, backing: &dyn Backing) -> Result<u64> {
    let (peak, granule) = (copies_peak(trace, options)?, backing.caps().granule);
    Ok(options.budget.map_or(u64::MAX, |b| (peak as f64 * b) as u64 / granule * granule))
}

/// The most bytes that the copies of all threads have live: the sum if all copies reach their peaks
/// at the same time. Refuses a trace whose events name what it does not count.
fn copies_peak(trace: &Trace, options: &Options) -> Result<u64> {
    let counted =
        |e: &Event| e.id < trace.allocations && u32::from(e.stream) < trace.streams.max(1);
    if let Some(at) = trace.events.iter().position(|e| !counted(e)) {
        let Trace { allocations, streams, .. } = trace;
        return Err(Error::invalid(format!(
            "event {at} of a trace is {:?}; it has {allocations} allocations and {streams} streams",
            trace.events[at]
        )));
    }
    let threads = options.threads.max(1);
    let all = trace.peak.checked_mul(u64::from(threads));
    all.ok_or_else(|| {
        let peak = trace.peak;
        Error::invalid(format!(
            "{threads} copies of a trace with {peak} live bytes have more than 2^64; use fewer threads"
        ))
    })
}

/// An allocator that can play a trace.
trait Plays: Sync {
    type Block: Send;
    type Stream: Send;

    fn stream(&self) -> Result<Self::Stream>;
    /// Work on a stream, which uses what is allocated or freed next; `None` where streams mean
    /// nothing.
    fn submit(&self, on: &Self::Stream) -> Result<Option<Timepoint>>;
    /// # Errors
    /// Only what ends the replay; `None` is an allocation that failed.
    fn alloc(
        &self,
        on: &Self::Stream,
        size: u64,
        at: Option<Timepoint>,
    ) -> Result<Option<Self::Block>>;
    fn free(&self, on: &Self::Stream, block: Self::Block, at: Option<Timepoint>);
    /// Peak of reserved bytes, driver calls, remaps, host waits.
    fn cost(&self) -> (u64, u64, u64, u64);
}

/// Leasehold's allocator.
struct Own(Allocator);

impl Own {
    fn new(
        backing: Box<dyn Backing>,
        options: &Options,
        budget: u64,
        trace_events: usize,
    ) -> Result<Self> {
        let config = AllocatorConfig {
            policy: options.policy,
            budget,
            thread_caches: options.thread_caches,
            name: "replay".into(),
            trace_events,
            ..AllocatorConfig::default()
        };
        Ok(Self(Allocator::new(backing, config)?))
    }
}

impl Plays for Own {
    type Block = Lease<Buffer>;
    type Stream = VirtualStream;

    fn stream(&self) -> Result<VirtualStream> {
        VirtualStream::new()
    }

    fn submit(&self, on: &VirtualStream) -> Result<Option<Timepoint>> {
        on.submit().map(Some)
    }

    #[inline]
    fn alloc(
        &self,
        on: &VirtualStream,
        size: u64,
        at: Option<Timepoint>,
    ) -> Result<Option<Lease<Buffer>>> {
        match self.0.alloc(Layout::new(size), On::new(on)) {
            Ok(buffer) => {
                if let Some(at) = at {
                    // SAFETY: the streams are virtual: nothing ever uses the memory.
                    unsafe { buffer.mark_write(at) };
                }
                Ok(Some(buffer))
            }
            Err(lost @ Error::DeviceLost { .. }) => Err(lost),
            Err(_) => Ok(None),
        }
    }

    #[inline]
    fn free(&self, _: &VirtualStream, block: Lease<Buffer>, at: Option<Timepoint>) {
        if let Some(at) = at {
            // SAFETY: the streams are virtual: nothing ever uses the memory.
            unsafe { block.mark_read(at) };
        }
    }

    fn cost(&self) -> (u64, u64, u64, u64) {
        let s = self.0.stats();
        (s.reserved_peak, s.driver_calls, s.remaps, s.host_waits)
    }
}

impl Plays for System {
    type Block = <System as Subject>::Block;
    type Stream = ();

    fn stream(&self) -> Result<()> {
        Ok(())
    }

    fn submit(&self, (): &()) -> Result<Option<Timepoint>> {
        Ok(None)
    }

    #[inline]
    fn alloc(&self, on: &(), size: u64, _: Option<Timepoint>) -> Result<Option<Self::Block>> {
        Ok(Subject::alloc(self, on, size))
    }

    #[inline]
    fn free(&self, on: &(), block: Self::Block, _: Option<Timepoint>) {
        Subject::free(self, on, block);
    }

    fn cost(&self) -> (u64, u64, u64, u64) {
        (self.reserved_peak(), 0, 0, 0)
    }
}

fn play<P: Plays>(trace: &Trace, options: &Options, subject: &P) -> Result<Report> {
    let threads = options.threads.max(1);
    copies_peak(trace, options)?;
    let live = CachePadded::new(SharedLive::default());
    let shared = (threads > 1).then_some(&*live);
    let mut copies = Vec::new();
    for _ in 0..threads {
        copies.push(Playback::new(trace, options, subject, shared)?);
    }
    let mut report = Report::default();
    let (mut spent, mut steady, mut rounds) = (Duration::ZERO, Duration::ZERO, 0);
    for _ in 0..options.repeat.max(1) {
        let before = subject.cost().1;
        let begin = Instant::now();
        if let [copy] = &mut copies[..] {
            copy.play()?;
        } else {
            threads::run(copies.iter_mut().map(|p| || p.play()))?
                .into_iter()
                .collect::<Result<()>>()?;
        }
        let taken = begin.elapsed();
        (spent, steady) = (spent + taken, taken);
        rounds += 1;
        report.driver_calls.steady = subject.cost().1 - before;
        copies.iter_mut().for_each(Playback::free_all);
        if options.stop_at_failure && copies.iter().any(|c| c.failed > 0) {
            break;
        }
    }
    report.events = (trace.events.len() as u64 * u64::from(threads)).saturating_mul(rounds);
    (report.peak_reserved, report.driver_calls.total, report.remaps, report.host_waits) =
        subject.cost();
    report.peak_requested =
        shared.map_or_else(|| copies[0].live.peak, |all| all.peak.load(Ordering::Relaxed));
    report.ratio = report.peak_reserved as f64 / report.peak_requested.max(1) as f64;
    report.failed = copies.iter().map(|c| c.failed).sum();
    let per = |spent: Duration, rounds: u64| {
        spent.as_nanos() as f64 * rounds as f64 / report.events.max(1) as f64
    };
    let (mean, steady) = (per(spent, 1), per(steady, rounds));
    let percentiles =
        percentiles(copies.iter_mut().flat_map(|c| std::mem::take(&mut c.times)).collect());
    report.ns_per_op = Times { mean, steady, ..percentiles };
    Ok(report)
}

fn percentiles(mut all: Vec<u32>) -> Times {
    if !all.is_empty() {
        let clock = clock_cost();
        all.iter_mut().for_each(|t| *t = t.saturating_sub(clock));
    }
    all.sort_unstable();
    let at = |q: f64| {
        all.get(((all.len() as f64 * q) as usize).min(all.len().max(1) - 1))
            .map_or(0.0, |&n| f64::from(n))
    };
    Times { p50: at(0.5), p99: at(0.99), p999: at(0.999), ..Times::default() }
}

/// The time that reading the clock adds to a measurement, in nanoseconds.
fn clock_cost() -> u32 {
    let mut all: Vec<u32> = (0..1001).map(|_| Instant::now().elapsed().as_nanos() as u32).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

/// As [`replay`], on a fresh backing for each play: once for the figures, once more with every
/// operation timed for the percentiles, and, if `min_budget` says with which policy, as often as
/// the search for the smallest budget needs.
///
/// # Errors
/// As [`replay`]; what `make` returns.
pub fn measure(
    trace: &Trace,
    options: &Options,
    min_budget: Option<Policy>,
    make: &dyn Fn() -> Result<Box<dyn Backing>>,
) -> Result<Report> {
    let mut report = replay(trace, &Options { timed: false, ..options.clone() }, make()?)?;
    let timed = replay(trace, &Options { timed: true, repeat: 1, ..options.clone() }, make()?)?;
    let Times { mean, steady, .. } = report.ns_per_op;
    report.ns_per_op = Times { mean, steady, ..timed.ns_per_op };
    if let Some(policy) = min_budget {
        let options = Options { policy, ..options.clone() };
        report.min_budget = Some(find_min_budget_on(trace, &options, make)?);
    }
    Ok(report)
}

/// The least budget, as a multiple of the trace's peak times the threads, with which the trace
/// completes on a virtual device, to a granule.
///
/// # Errors
/// As [`replay_virtual`]; `OutOfMemory` when the trace does not complete with four times its peak.
pub fn find_min_budget(trace: &Trace, options: &Options) -> Result<f64> {
    find_min_budget_on(trace, options, &virtual_device)
}

/// As [`find_min_budget`], on backings that `make` makes.
///
/// # Errors
/// As [`find_min_budget`]; what `make` returns.
pub fn find_min_budget_on(
    trace: &Trace,
    options: &Options,
    make: &dyn Fn() -> Result<Box<dyn Backing>>,
) -> Result<f64> {
    let granule = make()?.caps().granule;
    let peak = copies_peak(trace, options)?.max(1);
    let (mut low, high) = bounds(trace, peak, granule);
    let most = high;
    let mut high = high;
    // It need not be monotone: the result is one with which the trace completes, found by
    // bisection.
    while low < high {
        let mid = low + (high - low) / 2;
        let budget = Some((mid as f64 * granule as f64) / peak as f64 + 1e-9);
        let tried =
            Options { budget, repeat: 1, timed: false, stop_at_failure: true, ..options.clone() };
        if replay(trace, &tried, make()?)?.failed == 0 { high = mid } else { low = mid + 1 }
    }
    if low == most {
        let what = leasehold_core::OutOfMemory::new("replay", trace.peak);
        return Err(what.note("the trace does not complete with four times its peak").into());
    }
    Ok(low as f64 * granule as f64 / peak as f64)
}

/// Between which numbers of granules the least budget lies: one copy's peak, and four times that of
/// all.
fn bounds(trace: &Trace, peak: u64, granule: u64) -> (u64, u64) {
    (
        trace.peak.max(1).div_ceil(granule),
        peak.div_ceil(granule).saturating_mul(4).saturating_add(64),
    )
}

/// How many events [`measure`] plays at most with such options, for whoever shows its progress.
///
/// # Errors
/// As [`measure`].
pub fn events_to_play(trace: &Trace, options: &Options, search: bool, granule: u64) -> Result<u64> {
    let (low, high) = bounds(trace, copies_peak(trace, options)?.max(1), granule.max(1));
    let trials = if search { u64::from(high.saturating_sub(low).max(1).ilog2()) + 1 } else { 0 };
    let copy = trace.events.len() as u64 * u64::from(options.threads.max(1));
    Ok(copy.saturating_mul(u64::from(options.repeat.max(1)) + 1 + trials))
}

/// Events between two reports of progress.
const STEP: usize = 1 << 13;

/// The live bytes of all copies together.
#[derive(Default)]
struct SharedLive {
    now: AtomicU64,
    peak: AtomicU64,
}

/// The live bytes of one copy. A sum over threads that each of them writes at every operation would
/// slow what is measured. So a copy tells the others when it has changed by a step, and never more
/// than it has: at every time their sum is live.
struct Live<'a> {
    now: u64,
    peak: u64,
    told: u64,
    step: u64,
    all: Option<&'a SharedLive>,
}

impl<'a> Live<'a> {
    fn new(trace: &Trace, all: Option<&'a SharedLive>) -> Self {
        Self { now: 0, peak: 0, told: 0, step: trace.peak / 4096, all }
    }

    /// An allocation succeeded.
    #[inline]
    fn grow(&mut self, bytes: u64) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
        if let Some(all) = self.all
            && self.now > self.told + self.step
        {
            let sum =
                all.now.fetch_add(self.now - self.told, Ordering::Relaxed) + (self.now - self.told);
            all.peak.fetch_max(sum, Ordering::Relaxed);
            self.told = self.now;
        }
    }

    /// A free begins.
    #[inline]
    fn shrink(&mut self, bytes: u64) {
        self.now -= bytes;
        if let Some(all) = self.all
            && self.told > self.now
        {
            let least = self.now.saturating_sub(self.step);
            all.now.fetch_sub(self.told - least, Ordering::Relaxed);
            self.told = least;
        }
    }
}

/// One thread's copy of the trace.
struct Playback<'a, P: Plays> {
    trace: &'a Trace,
    subject: &'a P,
    streams: Vec<P::Stream>,
    held: Vec<Option<P::Block>>,
    /// The stream and the bytes of each held block, for its end.
    held_on: Vec<(u16, u64)>,
    live: Live<'a>,
    /// Epochs that complete in order, one per operation.
    pending: VecDeque<Timepoint>,
    lag: usize,
    options: &'a Options,
    times: Vec<u32>,
    failed: u64,
}

impl<'a, P: Plays> Playback<'a, P> {
    fn new(
        trace: &'a Trace,
        options: &'a Options,
        subject: &'a P,
        all: Option<&'a SharedLive>,
    ) -> Result<Self> {
        let lag = usize::try_from(options.lag).unwrap_or(usize::MAX).min(trace.events.len());
        Ok(Self {
            trace,
            subject,
            streams: (0..trace.streams.max(1)).map(|_| subject.stream()).collect::<Result<_>>()?,
            held: (0..trace.allocations).map(|_| None).collect(),
            held_on: vec![(0, 0); trace.allocations as usize],
            live: Live::new(trace, all),
            pending: VecDeque::with_capacity(lag + 1),
            lag,
            options,
            times: Vec::with_capacity(if options.timed { trace.events.len() } else { 0 }),
            failed: 0,
        })
    }

    fn play(&mut self) -> Result<()> {
        let trace = self.trace;
        let mut played = 0;
        for events in trace.events.chunks(STEP) {
            self.play_some(events)?;
            played += events.len();
            if let Some(Progress(tell)) = &self.options.progress {
                tell(events.len() as u64);
            }
            if self.options.stop_at_failure && self.failed > 0 {
                break;
            }
        }
        // Events that a failure makes needless count as over too.
        if let Some(Progress(tell)) = &self.options.progress {
            tell((trace.events.len() - played) as u64);
        }
        Ok(())
    }

    fn play_some(&mut self, events: &[Event]) -> Result<()> {
        let (timed, lag) = (self.options.timed, self.lag);
        for e in events {
            let stream = &self.streams[usize::from(e.stream)];
            let point = self.subject.submit(stream)?;
            let slot = &mut self.held[e.id as usize];
            // Counted before a free and after an allocation: what is counted is live.
            if !e.alloc && slot.is_some() {
                self.live.shrink(self.held_on[e.id as usize].1);
            }
            let begin = timed.then(Instant::now);
            if e.alloc {
                *slot = self.subject.alloc(stream, e.size, point)?;
            } else if let Some(block) = slot.take() {
                self.subject.free(stream, block, point);
            }
            if let Some(begin) = begin {
                self.times.push(begin.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            if e.alloc {
                self.held_on[e.id as usize] = (e.stream, e.size);
                if slot.is_some() { self.live.grow(e.size) } else { self.failed += 1 }
            }
            self.pending.extend(point);
            if self.pending.len() > lag
                && let Some(done) = self.pending.pop_front()
            {
                pass(done);
            }
        }
        Ok(())
    }

    fn free_all(&mut self) {
        for (held, &(on, bytes)) in self.held.iter_mut().zip(&self.held_on) {
            if let Some(block) = held.take() {
                self.live.shrink(bytes);
                self.subject.free(&self.streams[usize::from(on)], block, None);
            }
        }
        for done in self.pending.drain(..) {
            pass(done);
        }
    }
}

impl<P: Plays> Drop for Playback<'_, P> {
    /// A replay that ends early holds blocks that the heap does not take back by itself.
    fn drop(&mut self) {
        self.free_all();
    }
}
