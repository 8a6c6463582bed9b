//! The failure matrix: every call of the backing, failing at every index, once, from then on, or at
//! random. After each: the state is valid, later calls work, nothing is leaked but what the driver
//! would not take back, and that stays counted.
//!
//! - reserving addresses. Requirement: half as many, then segments. Test:
//!   `without_addresses_segments_are_used`; `every_call_may_fail_at_every_index`.
//! - creating, mapping, enabling, unmapping, destroying a piece; committing, decommitting a
//!   segment. Requirement: undone as far as the driver lets it; the rest is quarantined, and
//!   counted. Test: `every_call_may_fail_at_every_index`;
//!   `regressions::partial_map_failure_is_undone`,
//!   `regressions::failed_allocation_leaves_the_pool_usable`.
//! - a stream's wait, signal, host wait; the publisher, be it because a device is lost: it may be
//!   another one. Requirement: the block stays not ready; the next attempt follows. Test:
//!   `every_call_of_a_stream_may_fail_at_every_index`.
//! - the backing, because the device is lost. Requirement: every later call that needs the driver
//!   says so; leases drop. Test: `a_lost_device_fails_every_later_call_and_leases_still_drop`.
//! - a reclaimer panics. Requirement: it is not called again. Test:
//!   `a_panicking_reclaimer_is_not_called_again`.
//! - host memory. Requirement: an error, nothing changed; a free asks for none. Test:
//!   [`host_memory`](crate::host_memory): all of it.
//! - the driver goes first. Requirement: silence. Test: `the_driver_may_go_first`.
//! - the budget. Requirement: never above it. Test: `the_budget_is_hard`, model d of `models.rs`.
//! - a recording is rolled back, at every step of its life. Requirement: all of the arena's memory
//!   comes back. Test: `arena::every_illegal_edge_is_an_error_and_changes_nothing`,
//!   `a_rolled_back_recording_gives_everything_back`.
//!
//! The crate `leasehold-cuda` tests the failures that need a driver beneath. They are: events that
//! cannot be made or recorded, a capture that is invalidated, graphs that cannot be instantiated,
//! pinned memory that cannot be had. Its test `faults` fails every call of a whole life at every
//! index on the simulated driver.

use crate::model::Rng;
use crate::{Bench, MIB, free_in_use, late_stream};
use leasehold_alloc::{AllocatorConfig, CrossStream, Layout, Lifetime, On, Policy};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timeline, TimelineSource, Timepoint};
use leasehold_sim::memory::{Call, FakeBacking, Fault};
use leasehold_sim::memory::{VirtualStream, pass};
use std::time::Duration;

/// A workload that grows, moves granules, trims and grows again. `late`: its stream is some frees
/// behind.
fn workload(b: &Bench, late: Option<&VirtualStream>) {
    let mut rng = Rng(4242);
    let on = On::new(late.unwrap_or(&b.stream));
    let mut held = Vec::new();
    for i in 0..60u64 {
        let size = [300, 70_000, 3 * MIB, 9 * MIB][rng.below(4) as usize];
        if let Ok(x) = b.allocator.alloc(Layout::new(size), on) {
            held.push(x);
        }
        if rng.below(3) == 0 && !held.is_empty() {
            let x = held.swap_remove(rng.below(held.len() as u64) as usize);
            if let Some(late) = late {
                let end = free_in_use(late, x);
                late.complete(end.saturating_sub(8));
            }
        }
        if i % 20 == 19 {
            // A failing trim has given back what it could.
            let _ = b.allocator.trim(0);
        }
        b.allocator.check().expect("the invariants");
    }
}

fn one(segments: bool, policy: Policy, late: bool, call: Call, fault: Fault) {
    let fake = if segments { FakeBacking::segments(96 * MIB) } else { FakeBacking::new(96 * MIB) };
    if call == Call::Reserve {
        fake.fail(call, fault);
    }
    let b = Bench::with(fake, AllocatorConfig { policy, ..AllocatorConfig::default() });
    let late = late.then(late_stream);
    b.fake.fail(call, fault);
    workload(&b, late.as_ref());
    let what =
        || format!("{call:?} {fault:?} {policy:?} segments {segments} late {}", late.is_some());
    assert_eq!(b.fake.violations(), Vec::<String>::new(), "{}", what());
    b.fake.heal();
    workload(&b, late.as_ref());
    if let Some(late) = &late {
        late.complete(late.timeline().submitted());
    }
    let ok = b.alloc(10 * MIB);
    assert!(ok.is_ok(), "{}: {ok:?}", what());
    drop(ok);
    b.check();
    b.allocator.trim(0).expect("a trim on a healed device");
    let s = b.allocator.stats();
    assert_eq!(s.reserved, s.quarantined, "{}: what is not quarantined went back: {s:?}", what());
    assert!(s.reserved >= b.fake.used(), "{}: {s:?}", what());
}

/// How often a healthy run makes a call, the two workloads and what comes after them together.
fn calls(segments: bool, policy: Policy, late: bool, call: Call) -> u64 {
    let fake = if segments { FakeBacking::segments(96 * MIB) } else { FakeBacking::new(96 * MIB) };
    let b = Bench::with(fake, AllocatorConfig { policy, ..AllocatorConfig::default() });
    workload(&b, late.then(late_stream).as_ref());
    b.fake.count(call)
}

#[test]
fn every_call_may_fail_at_every_index() {
    let mut runs = 0;
    for policy in [Policy::Compact, Policy::Balanced] {
        for (segments, late) in [(false, false), (true, false), (false, true)] {
            for call in Call::ALL {
                // Some more than a healthy run makes: a failure makes others necessary.
                for k in 0..calls(segments, policy, late, call) + 8 {
                    one(segments, policy, late, call, Fault::Once(k));
                    one(segments, policy, late, call, Fault::From(k));
                    runs += 2;
                }
                for p in [10, 100, 300, 700] {
                    one(segments, policy, late, call, Fault::PerMille(p));
                }
            }
        }
    }
    assert!(runs > 1000, "only {runs} runs");
}

/// The calls that a stream can refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// Waiting on the device for another stream: an event cannot be made or recorded.
    Wait,
    /// Making completion observable.
    Signal,
    /// Waiting on the host.
    WaitHost,
    /// Publishing completion for a host that waits for another stream.
    Publisher,
}

/// When it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Once(u64),
    From(u64),
    PerMille(u64),
}

#[derive(Default)]
struct Faulty {
    armed: Option<(Refusal, When)>,
    /// It fails because a device is lost.
    loss: bool,
    seen: u64,
}

impl Faulty {
    fn ask(&mut self, what: Refusal) -> Result<()> {
        let Some((armed, when)) = self.armed.filter(|a| a.0 == what) else { return Ok(()) };
        let n = self.seen;
        self.seen += 1;
        let fails = match when {
            When::Once(k) => n == k,
            When::From(k) => n >= k,
            When::PerMille(p) => Rng(n * 2 + 1).below(1000) < p,
        };
        match fails {
            true if self.loss => Err(Error::DeviceLost { cause: "injected".into() }),
            true => Err(Error::Driver {
                api: "fake",
                code: 1,
                name: format!("{armed:?} injected").into(),
            }),
            false => Ok(()),
        }
    }
}

/// A stream whose calls fail on demand.
struct FaultyStream(VirtualStream, Arc<Mutex<Faulty>>);

// SAFETY: nothing that is submitted touches memory.
unsafe impl TimelineSource for FaultyStream {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }
    fn signal(&self) -> Result<u64> {
        self.1.lock().ask(Refusal::Signal)?;
        self.0.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }
    fn wait(&self, on: Timepoint) -> Result<()> {
        self.1.lock().ask(Refusal::Wait)?;
        self.0.wait(on)
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.1.lock().ask(Refusal::WaitHost)?;
        self.0.wait_host(value, timeout)
    }
}

/// Lets two streams take turns that want each other's memory within a tight budget. Returns how
/// often each kind of call was made, by the armed one.
fn contend(cross_stream: CrossStream, armed: (Refusal, When), loss: bool) -> u64 {
    let config = AllocatorConfig { budget: 24 * MIB, cross_stream, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::new(64 * MIB), config);
    let faulty = Arc::new(Mutex::new(Faulty { armed: Some(armed), loss, ..Faulty::default() }));
    let streams = [(); 2].map(|()| {
        let stream = VirtualStream::new().expect("a timeline");
        let (timeline, publisher) = (stream.timeline(), faulty.clone());
        stream.on_wait(Some(Arc::new(move |value, _| {
            publisher.lock().ask(Refusal::Publisher)?;
            pass(timeline.at(value));
            Ok(())
        })));
        FaultyStream(stream, faulty.clone())
    });
    let mut rng = Rng(99);
    let mut held = Vec::new();
    for i in 0..150 {
        let stream = &streams[rng.below(2) as usize];
        let size = [900, 70_000, MIB, 5 * MIB][rng.below(4) as usize];
        match b.allocator.alloc(Layout::new(size), On::new(stream)) {
            Ok(x) => {
                let p = stream.0.submit().expect("a value");
                // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
                // early.
                unsafe { x.mark_write(p) };
                held.push(x);
            }
            Err(Error::OutOfMemory(_)) => {}
            Err(e) => panic!("{armed:?}: {e}"),
        }
        if rng.below(2) == 0 && !held.is_empty() {
            drop(held.swap_remove(rng.below(held.len() as u64) as usize));
        }
        if i % 10 == 9 {
            b.check();
        }
    }
    let seen = faulty.lock().seen;
    faulty.lock().armed = None;
    held.clear();
    // Nothing stays unusable, and nothing is lost.
    drop(
        b.allocator
            .alloc(Layout::new(20 * MIB), On::new(&streams[0]))
            .expect("memory after the failures"),
    );
    streams.iter().for_each(|s| pass(s.timeline().now()));
    b.allocator.trim(0).expect("a trim");
    b.check();
    assert_eq!(b.allocator.stats().reserved, 0, "{armed:?}");
    seen
}

#[test]
fn every_call_of_a_stream_may_fail_at_every_index() {
    for cross_stream in [CrossStream::Never, CrossStream::IfReady, CrossStream::InsertWait] {
        for refusal in [Refusal::Wait, Refusal::Signal, Refusal::WaitHost, Refusal::Publisher] {
            // Armed with what never happens, it counts.
            let calls = contend(cross_stream, (refusal, When::PerMille(0)), false);
            for loss in [false, true] {
                for k in 0..calls + 2 {
                    contend(cross_stream, (refusal, When::Once(k)), loss);
                    contend(cross_stream, (refusal, When::From(k)), loss);
                }
                for p in [100, 500] {
                    contend(cross_stream, (refusal, When::PerMille(p)), loss);
                }
            }
        }
    }
    let waits = contend(CrossStream::InsertWait, (Refusal::Wait, When::PerMille(0)), false);
    let host = contend(CrossStream::Never, (Refusal::Publisher, When::PerMille(0)), false);
    assert!(
        waits > 3 && host > 3,
        "{waits} waits on the device and {host} on the host prove nothing"
    );
}

/// Records, and seals the arena or drops it while it records, with temporaries and a held output;
/// a failing driver at every index.
fn roll_back(b: &Bench, seals: bool) -> Result<()> {
    let arena = b.allocator.arena()?;
    let out = arena.alloc(Layout::new(3 * MIB))?;
    let temp = arena.alloc(Layout::new(5 * MIB))?;
    let used =
        [&out, &temp].map(|x| Lifetime { symbol: x.addr(), first: 0, last: 1, live_at_end: false });
    drop(temp);
    if seals {
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&used, On::new(&b.stream)) }?;
    }
    drop(arena);
    drop(out);
    Ok(())
}

#[test]
fn a_rolled_back_recording_gives_everything_back() {
    for seals in [false, true] {
        for call in Call::ALL {
            for k in 0..12 {
                for fault in [Fault::Once(k), Fault::From(k)] {
                    let b = Bench::new(64 * MIB);
                    let other = b.take(MIB);
                    b.fake.fail(call, fault);
                    let outcome = roll_back(&b, seals);
                    b.check();
                    b.fake.heal();
                    roll_back(&b, seals)
                        .unwrap_or_else(|e| panic!("{seals} {call:?} {fault:?}, {outcome:?}: {e}"));
                    // The stream is usable, and everything but what the driver did not take back is
                    // gone.
                    drop((other, b.take(20 * MIB)));
                    b.allocator.trim(0).expect("a trim");
                    b.check();
                    let s = b.allocator.stats();
                    assert_eq!(
                        (s.reserved, s.in_graphs, s.live),
                        (s.quarantined, 0, 0),
                        "{seals} {call:?} {fault:?}"
                    );
                }
            }
        }
    }
}

/// The driver is gone before the allocator: its end makes no noise, and does not fail.
#[test]
fn the_driver_may_go_first() {
    let fake = FakeBacking::new(64 * MIB);
    let b = Bench::with(fake.clone(), AllocatorConfig::default());
    let held = b.take(4 * MIB);
    drop(b.take(9 * MIB));
    fake.lose();
    drop(held);
    let refused = b.allocator.trim(0);
    assert!(refused.is_ok() || matches!(refused, Err(Error::DeviceLost { .. })), "{refused:?}");
    drop(b);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn a_lost_device_fails_every_later_call_and_leases_still_drop() {
    let b = Bench::new(64 * MIB);
    let held = b.take(4 * MIB);
    b.fake.lose();
    assert!(matches!(b.alloc(32 * MIB), Err(Error::DeviceLost { .. })));
    drop(held);
    // Cached memory needs no driver.
    drop(b.take(4 * MIB));
    b.allocator.check().expect("the invariants");
}

#[test]
fn without_addresses_segments_are_used() {
    let fake = FakeBacking::new(64 * MIB);
    fake.fail(Call::Reserve, Fault::From(0));
    let b = Bench::with(fake, AllocatorConfig::default());
    assert_eq!(b.fake.count(Call::Reserve), 3, "four times, twice, once the physical memory");
    drop(b.take(10 * MIB));
    assert!(b.fake.count(Call::Commit) > 0);
    b.check();
}

#[test]
fn a_panicking_reclaimer_is_not_called_again() {
    use leasehold_core::sync::Arc;
    use leasehold_core::sync::atomic::{AtomicU32, Ordering};
    let b = Bench::new(16 * MIB);
    let hoard = Arc::new(leasehold_core::sync::Mutex::new(vec![b.take(12 * MIB)]));
    let calls = Arc::new(AtomicU32::new(0));
    let n = calls.clone();
    b.allocator.add_reclaimer(
        0,
        Box::new(move |_| {
            n.fetch_add(1, Ordering::Relaxed);
            panic!("a reclaimer's own defect")
        }),
    );
    let h = hoard.clone();
    b.allocator.add_reclaimer(1, Box::new(move |_| h.lock().pop().map_or(0, |x| x.len())));
    drop(b.take(10 * MIB));
    assert!(b.alloc(100 * MIB).is_err());
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    b.check();
}

#[test]
fn the_budget_is_hard() {
    let config = AllocatorConfig { budget: 20 * MIB, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::new(1 << 30), config);
    assert!(matches!(b.alloc(21 * MIB), Err(Error::OverBudget { limit, .. }) if limit == 20 * MIB));
    let whole = b.alloc(21 * MIB).expect_err("over the whole budget").to_string();
    assert!(whole.contains("21.0 MiB requested, but the whole budget is 20.0 MiB"), "{whole}");
    let a = b.take(12 * MIB);
    let err = b.alloc(12 * MIB).expect_err("over the budget");
    assert!(matches!(&err, Error::OutOfMemory(r) if r.limit == 20 * MIB), "{err}");
    b.allocator.set_budget(40 * MIB);
    let c = b.take(12 * MIB);
    assert!(b.allocator.stats().reserved_peak <= 40 * MIB);
    drop((a, c));
    b.check();
}
