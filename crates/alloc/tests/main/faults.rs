//! The failure matrix: every call of the backing, failing at every index, once, from then on, or at random. After each: the state is
//! valid, later calls work, nothing is leaked but what the driver would not take back, and that stays counted.

use crate::model::Rng;
use crate::{Bench, MIB};
use leasehold_alloc::{AllocatorConfig, Call, FakeBacking, Fault, Layout, On, Policy};
use leasehold_core::Error;

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

#[test]
fn every_call_may_fail_at_every_index() {
    for policy in [Policy::Compact, Policy::Balanced] {
        for segments in [false, true] {
            for call in Call::ALL {
                for k in 0..24 {
                    one(segments, policy, call, Fault::Once(k));
                }
                for k in [0, 1, 2, 3, 5, 8, 13, 21, 34] {
                    one(segments, policy, call, Fault::From(k));
                }
                for p in [10, 100, 300, 700] {
                    one(segments, policy, call, Fault::PerMille(p));
                }
            }
        }
    }
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
