//! The failure matrix: every call of the backing, failing at every index, once, from then on, or at random. After each: the state is
//! valid, later calls work, nothing is leaked but what the driver would not take back, and that stays counted.

use crate::model::Rng;
use crate::{Bench, MIB};
use leasehold_alloc::replay::{VirtualStream, pass};
use leasehold_alloc::{AllocatorConfig, Call, CrossStream, FakeBacking, Fault, Layout, On, Policy};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Line, Point, Result, Timeline};
use std::time::Duration;

/// A workload that grows, moves granules, trims and grows again.
fn workload(b: &Bench) {
    let mut rng = Rng(4242);
    let mut held = Vec::new();
    for i in 0..60u64 {
        let size = [300, 70_000, 3 * MIB, 9 * MIB][rng.below(4) as usize];
        if let Ok(x) = b.allocator.alloc(Layout::new(size), On::new(&b.stream)) {
            held.push(x);
        }
        if rng.below(3) == 0 && !held.is_empty() {
            drop(held.swap_remove(rng.below(held.len() as u64) as usize));
        }
        if i % 20 == 19 {
            // A failing trim has given back what it could.
            let _ = b.allocator.trim(0);
        }
        b.allocator.check().expect("the invariants");
    }
}

fn one(segments: bool, policy: Policy, call: Call, fault: Fault) {
    let fake = if segments { FakeBacking::segments(96 * MIB) } else { FakeBacking::new(96 * MIB) };
    if call == Call::Reserve {
        fake.fail(call, fault);
    }
    let b = Bench::with(fake, AllocatorConfig { policy, ..AllocatorConfig::default() });
    b.fake.fail(call, fault);
    workload(&b);
    let what = || format!("{call:?} {fault:?} {policy:?} segments {segments}");
    assert_eq!(b.fake.violations(), Vec::<String>::new(), "{}", what());
    b.fake.heal();
    workload(&b);
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
fn calls(segments: bool, policy: Policy, call: Call) -> u64 {
    let fake = if segments { FakeBacking::segments(96 * MIB) } else { FakeBacking::new(96 * MIB) };
    let b = Bench::with(fake, AllocatorConfig { policy, ..AllocatorConfig::default() });
    workload(&b);
    b.fake.count(call)
}

#[test]
fn every_call_may_fail_at_every_index() {
    let mut runs = 0;
    for policy in [Policy::Compact, Policy::Balanced] {
        for segments in [false, true] {
            for call in Call::ALL {
                // Some more than a healthy run makes: a failure makes others necessary.
                for k in 0..calls(segments, policy, call) + 8 {
                    one(segments, policy, call, Fault::Once(k));
                    one(segments, policy, call, Fault::From(k));
                    runs += 2;
                }
                for p in [10, 100, 300, 700] {
                    one(segments, policy, call, Fault::PerMille(p));
                }
            }
        }
    }
    assert!(runs > 1000, "only {runs} runs");
}

/// What a stream can refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// Waiting on the device for another stream: an event cannot be made or recorded.
    Wait,
    /// Making completion observable.
    Signal,
    /// Waiting on the host.
    WaitHost,
    /// The host's waiter for other streams.
    Waiter,
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
            true => Err(Error::Driver { api: "fake", code: 1, name: format!("{armed:?} injected").into() }),
            false => Ok(()),
        }
    }
}

/// A stream whose calls fail on demand.
struct FaultyStream(VirtualStream, Arc<Mutex<Faulty>>);

impl Timeline for FaultyStream {
    fn line(&self) -> &'static Line {
        self.0.line()
    }
    fn signal(&self) -> Result<u64> {
        self.1.lock().ask(Refusal::Signal)?;
        self.0.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }
    fn wait(&self, on: Point) -> Result<()> {
        self.1.lock().ask(Refusal::Wait)?;
        self.0.wait(on)
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.1.lock().ask(Refusal::WaitHost)?;
        self.0.wait_host(value, timeout)
    }
}

/// Two streams that want each other's memory within a tight budget. Returns how often each kind of call was made, by the armed one.
fn contend(cross_stream: CrossStream, armed: Option<(Refusal, When)>) -> u64 {
    let config = AllocatorConfig { budget: 24 * MIB, cross_stream, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::new(64 * MIB), config);
    let faulty = Arc::new(Mutex::new(Faulty::default()));
    let waiter = faulty.clone();
    b.allocator.set_waiter(Arc::new(move |p, _| {
        waiter.lock().ask(Refusal::Waiter)?;
        pass(p);
        Ok(())
    }));
    let streams = [(); 2].map(|()| FaultyStream(VirtualStream::new().expect("a line"), faulty.clone()));
    faulty.lock().armed = armed;
    let mut rng = Rng(99);
    let mut held = Vec::new();
    for i in 0..150 {
        let stream = &streams[rng.below(2) as usize];
        let size = [900, 70_000, MIB, 5 * MIB][rng.below(4) as usize];
        match b.allocator.alloc(Layout::new(size), On::new(stream)) {
            Ok(x) => {
                let p = stream.0.submit().expect("a value");
                x.mark_write(p);
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
    drop(b.allocator.alloc(Layout::new(20 * MIB), On::new(&streams[0])).expect("memory after the failures"));
    streams.iter().for_each(|s| pass(s.line().now()));
    b.allocator.trim(0).expect("a trim");
    b.check();
    assert_eq!(b.allocator.stats().reserved, 0, "{armed:?}");
    seen
}

#[test]
fn every_call_of_a_stream_may_fail_at_every_index() {
    for cross_stream in [CrossStream::Never, CrossStream::IfReady, CrossStream::InsertWait] {
        for refusal in [Refusal::Wait, Refusal::Signal, Refusal::WaitHost, Refusal::Waiter] {
            // Armed with what never happens, it counts.
            let calls = contend(cross_stream, Some((refusal, When::PerMille(0))));
            for k in 0..calls + 2 {
                contend(cross_stream, Some((refusal, When::Once(k))));
                contend(cross_stream, Some((refusal, When::From(k))));
            }
            for p in [100, 500] {
                contend(cross_stream, Some((refusal, When::PerMille(p))));
            }
        }
    }
    let waits = contend(CrossStream::InsertWait, Some((Refusal::Wait, When::PerMille(0))));
    let host = contend(CrossStream::Never, Some((Refusal::Waiter, When::PerMille(0))));
    assert!(waits > 3 && host > 3, "{waits} waits on the device and {host} on the host prove nothing");
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
    // What is cached needs no driver.
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
    let a = b.take(12 * MIB);
    let err = b.alloc(12 * MIB).expect_err("over the budget");
    assert!(matches!(&err, Error::OutOfMemory(r) if r.limit == 20 * MIB), "{err}");
    b.allocator.set_budget(40 * MIB);
    let c = b.take(12 * MIB);
    assert!(b.allocator.stats().reserved_peak <= 40 * MIB);
    drop((a, c));
    b.check();
}
