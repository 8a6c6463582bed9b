//! Replays a trace against an allocator and reports what it cost.
//!
//! The trace's streams become streams whose epochs complete a fixed number of operations later (`lag`), so that readiness is
//! deterministic and needs no device. Replaying on a virtual device ([`FakeBacking`]) maps nothing.

use crate::allocator::{Allocator, On};
use crate::backing::Backing;
use crate::buffer::Buffer;
use crate::config::{AllocatorConfig, Policy};
use crate::fake::FakeBacking;
use crate::layout::Layout;
use crate::trace::Trace;
pub use crate::virtual_stream::{VirtualStream, pass};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Point, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How to replay.
#[derive(Debug, Clone)]
pub struct Options {
    /// Moving granules.
    pub policy: Policy,
    /// The budget as a multiple of the trace's peak; `None`: no limit.
    pub budget: Option<f64>,
    /// How many times the trace is played; what is live at its end is freed in between.
    pub repeat: u32,
    /// Threads that each play a copy on streams of their own.
    pub threads: u32,
    /// Operations after which an epoch completes.
    pub lag: u64,
    /// Magazines in front of the lock.
    pub magazines: bool,
    /// Measure each operation's time.
    pub timed: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { policy: Policy::Balanced, budget: None, repeat: 1, threads: 1, lag: 32, magazines: true, timed: false }
    }
}

/// What a replay cost.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Report {
    /// Events played, all repetitions and threads.
    pub events: u64,
    /// The most bytes requested and live at one time, all threads.
    pub peak_requested: u64,
    /// The most bytes taken from the driver.
    pub peak_reserved: u64,
    /// The two divided.
    pub ratio: f64,
    /// The least budget, as a multiple of the peak, with which the trace completes; 0 when it was not looked for.
    pub min_budget: f64,
    /// Nanoseconds per operation.
    pub ns_per_op: Times,
    /// Calls of the driver.
    pub driver_calls: DriverCalls,
    /// Episodes in which free granules were moved.
    pub remaps: u64,
    /// Waits of the host for a stream.
    pub host_waits: u64,
    /// Waits inserted into a stream.
    pub inserted_waits: u64,
    /// Allocations that failed.
    pub failed: u64,
}

/// Nanoseconds per operation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Times {
    /// The mean over everything.
    pub mean: f64,
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
/// What the allocator returns on construction. Allocations that fail are counted, not returned.
pub fn replay_virtual(trace: &Trace, options: &Options) -> Result<Report> {
    replay(trace, options, Box::new(FakeBacking::new(1 << 38)))
}

/// Replays on a backing. Epochs are virtual, so nothing must really use the memory.
///
/// # Errors
/// What the allocator returns on construction, and a lost device. Allocations that fail otherwise are counted, not returned.
pub fn replay(trace: &Trace, options: &Options, backing: Box<dyn Backing>) -> Result<Report> {
    let threads = options.threads.max(1);
    let peak = trace.peak * u64::from(threads);
    let granule = backing.caps().granule;
    let budget = options.budget.map_or(u64::MAX, |b| (peak as f64 * b) as u64 / granule * granule);
    let config = AllocatorConfig {
        policy: options.policy,
        budget,
        magazines: options.magazines,
        name: "replay".into(),
        ..AllocatorConfig::default()
    };
    let allocator = Allocator::new(backing, config)?;
    // Every wait ends at once: the epochs are virtual.
    allocator.set_waiter(Arc::new(|p: Point, _| {
        pass(p);
        Ok(())
    }));
    let mut players = Vec::new();
    for _ in 0..threads {
        players.push(Player::new(trace, options, &allocator)?);
    }
    let mut report = Report { peak_requested: peak, ..Report::default() };
    let mut spent = Duration::ZERO;
    for _ in 0..options.repeat.max(1) {
        let before = allocator.stats().driver_calls;
        let begin = Instant::now();
        if let [player] = &mut players[..] {
            player.play()?;
        } else {
            std::thread::scope(|s| {
                let all: Vec<_> = players.iter_mut().map(|p| s.spawn(|| p.play())).collect();
                all.into_iter()
                    .try_for_each(|t| t.join().unwrap_or_else(|_| Err(Error::state("a replaying thread panicked"))))
            })?;
        }
        spent += begin.elapsed();
        report.driver_calls.steady = allocator.stats().driver_calls - before;
        players.iter_mut().for_each(Player::free_all);
    }
    let stats = allocator.stats();
    report.events = trace.events.len() as u64 * u64::from(threads) * u64::from(options.repeat.max(1));
    report.peak_reserved = stats.reserved_peak;
    report.ratio = stats.reserved_peak as f64 / peak.max(1) as f64;
    report.driver_calls.total = stats.driver_calls;
    report.remaps = stats.remaps;
    report.host_waits = stats.host_waits;
    report.inserted_waits = stats.inserted_waits;
    report.failed = players.iter().map(|p| p.failed).sum();
    report.ns_per_op = times(&mut players, spent, report.events);
    Ok(report)
}

fn times(players: &mut [Player<'_>], spent: Duration, events: u64) -> Times {
    let mut all: Vec<u32> = players.iter_mut().flat_map(|p| std::mem::take(&mut p.times)).collect();
    all.sort_unstable();
    let at =
        |q: f64| all.get(((all.len() as f64 * q) as usize).min(all.len().max(1) - 1)).map_or(0.0, |&n| f64::from(n));
    Times { mean: spent.as_nanos() as f64 / events.max(1) as f64, p50: at(0.5), p99: at(0.99), p999: at(0.999) }
}

/// The least budget, as a multiple of the peak, with which the trace completes, to a granule.
///
/// # Errors
/// As [`replay_virtual`].
pub fn find_min_budget(trace: &Trace, options: &Options) -> Result<f64> {
    let granule = 2u64 << 20;
    let peak = (trace.peak * u64::from(options.threads.max(1))).max(1);
    let least = trace.peak.div_ceil(granule);
    let (mut low, mut high) = (least, least * 4 + 64);
    // It need not be monotone: the result is one with which the trace completes, found by bisection.
    while low < high {
        let mid = (low + high) / 2;
        let tried = Options { budget: Some((mid * granule) as f64 / peak as f64 + 1e-9), repeat: 1, ..options.clone() };
        if replay_virtual(trace, &tried)?.failed == 0 { high = mid } else { low = mid + 1 }
    }
    Ok((low * granule) as f64 / peak as f64)
}

/// One thread's copy of the trace.
struct Player<'a> {
    trace: &'a Trace,
    allocator: &'a Allocator,
    streams: Vec<VirtualStream>,
    held: Vec<Option<Lease<Buffer>>>,
    /// Epochs that complete in order, one per operation.
    pending: VecDeque<Point>,
    lag: usize,
    timed: bool,
    times: Vec<u32>,
    failed: u64,
}

impl<'a> Player<'a> {
    fn new(trace: &'a Trace, options: &Options, allocator: &'a Allocator) -> Result<Self> {
        Ok(Self {
            trace,
            allocator,
            streams: (0..trace.streams.max(1)).map(|_| VirtualStream::new()).collect::<Result<_>>()?,
            held: (0..trace.allocations).map(|_| None).collect(),
            pending: VecDeque::with_capacity(options.lag as usize + 1),
            lag: options.lag as usize,
            timed: options.timed,
            times: Vec::with_capacity(if options.timed { trace.events.len() } else { 0 }),
            failed: 0,
        })
    }

    fn play(&mut self) -> Result<()> {
        let trace = self.trace;
        for e in &trace.events {
            let stream = &self.streams[usize::from(e.stream)];
            let point = stream.submit()?;
            let slot = &mut self.held[e.id as usize];
            let begin = self.timed.then(Instant::now);
            if e.alloc {
                match self.allocator.alloc(Layout::new(e.size), On::new(stream)) {
                    Ok(buffer) => {
                        buffer.mark_write(point);
                        *slot = Some(buffer);
                    }
                    Err(lost @ Error::DeviceLost { .. }) => return Err(lost),
                    Err(_) => self.failed += 1,
                }
            } else if let Some(buffer) = slot.take() {
                buffer.mark_read(point);
                drop(buffer);
            }
            if let Some(begin) = begin {
                self.times.push(begin.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            self.pending.push_back(point);
            if self.pending.len() > self.lag
                && let Some(done) = self.pending.pop_front()
            {
                pass(done);
            }
        }
        Ok(())
    }

    fn free_all(&mut self) {
        self.held.iter_mut().for_each(|h| *h = None);
        for done in self.pending.drain(..) {
            pass(done);
        }
    }
}
