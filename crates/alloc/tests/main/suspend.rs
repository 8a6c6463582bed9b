//! Suspension of all memory of an allocator, and budgets that several allocators share: random
//! programs with failures of the driver.

use crate::MIB;
use crate::model::Rng;
use leasehold_alloc::{Allocator, AllocatorConfig, Budget, Layout, On, Policy, SuspendableBacking};
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_sim::memory::{Call, FakeBacking, Fault, VirtualStream};
use std::cell::{Cell, RefCell};

fn config(budget: &Arc<Budget>, policy: Policy) -> AllocatorConfig {
    AllocatorConfig { policy, shared_budget: Some(budget.clone()), ..AllocatorConfig::default() }
}

#[test]
fn a_suspension_gives_everything_back_and_resumes_at_the_same_addresses() {
    let (mut most_parts, mut failures) = (0, 0);
    for seed in 1..=40u64 {
        let mut rng = Rng(seed * 77);
        // Some seeds have memory for several parts of a suspension.
        let scale = [1, 8][(seed % 2) as usize];
        let fake = FakeBacking::new(scale * 512 * MIB);
        let budget = Arc::new(Budget::new(scale * 400 * MIB));
        let backing =
            SuspendableBacking::new(Box::new(fake.clone()), Some(budget.clone())).unwrap();
        let policy = [Policy::Balanced, Policy::Fastest, Policy::Compact][(seed % 3) as usize];
        let arena = Allocator::new(Box::new(backing.clone()), config(&budget, policy)).unwrap();
        let other = Allocator::new(Box::new(fake.clone()), config(&budget, policy)).unwrap();
        let stream = VirtualStream::new().unwrap();
        let on = On::new(&stream);
        let (mut held, mut beside) = (Vec::new(), Vec::new());
        // The parts whose memory went: other memory of blocks stays where it is.
        let mut away: Vec<(u64, u64)> = Vec::new();
        for _ in 0..120 {
            let large = if scale == 1 { 11 * MIB } else { 150 * MIB };
            let layout = Layout::new([400, 50_000, 3 * MIB, large][rng.below(4) as usize]);
            match rng.below(9) {
                0..=2 if !backing.is_suspended() => held.extend(arena.alloc(layout, on).ok()),
                3 => beside.extend(other.alloc(layout, on).ok()),
                4 if !held.is_empty() => {
                    drop(held.swap_remove(rng.below(held.len() as u64) as usize))
                }
                5 if !beside.is_empty() => drop(beside.pop()),
                6 => drop(arena.trim(rng.below(16) * MIB)),
                7 if backing.is_suspended() => {
                    if rng.below(3) == 0 {
                        fake.fail(
                            [Call::Create, Call::Map, Call::Enable][rng.below(3) as usize],
                            Fault::Once(rng.below(6)),
                        );
                    }
                    let before = fake.used();
                    let ranges = backing.ranges();
                    let mut restored = Vec::new();
                    // The part with this number, if any, is not restored.
                    let fails = rng.below(12);
                    let restore = |at, bytes| {
                        assert!(fake.is_backed(at, bytes), "seed {seed}");
                        restored.push((at, bytes));
                        if restored.len() as u64 == fails {
                            return Err(Error::state("no copy"));
                        }
                        Ok(())
                    };
                    let used = Cell::new(None);
                    // Copies may still run when the last part has failed.
                    let finish = || {
                        used.set(Some(fake.used()));
                        if fails == 11 { Err(Error::state("no copy")) } else { Ok(()) }
                    };
                    let resumed = backing.resume(restore, finish);
                    if let Some(used) = used.get() {
                        let back = restored.iter().flat_map(|&(at, bytes)| {
                            away.iter().map(move |&(from, len)| {
                                (at + bytes).min(from + len).saturating_sub(at.max(from))
                            })
                        });
                        assert!(used >= before + back.sum::<u64>(), "seed {seed}");
                    }
                    match resumed {
                        Ok(()) => {
                            assert_eq!(joined(restored), ranges);
                            away.clear();
                        }
                        Err(_) => assert_eq!(fake.used(), before, "seed {seed}"),
                    }
                    fake.heal();
                }
                8 if !backing.is_suspended() => {
                    let before = fake.used();
                    let [saves, copies] = [(); 2].map(|()| rng.below(9));
                    let (result, seen) = suspend(&backing, &fake, saves, copies);
                    assert_eq!(result.is_err(), seen.refused || seen.failed, "seed {seed}");
                    assert_eq!(backing.is_suspended(), !seen.refused, "seed {seed}");
                    if seen.refused {
                        // Nothing has changed.
                        assert_eq!((fake.used(), seen.gone.len()), (before, 0), "seed {seed}");
                        continue;
                    }
                    if let Ok(freed) = result {
                        assert_eq!(fake.used() + freed, before);
                        assert_eq!(seen.gone, seen.begun);
                    }
                    assert!(suspend(&backing, &fake, 8, 8).0.is_err());
                    most_parts = most_parts.max(seen.begun.len());
                    failures += usize::from(seen.failed && !seen.gone.is_empty());
                    away = seen.gone;
                }
                _ => {}
            }
            assert_eq!(budget.reserved(), fake.used(), "seed {seed}");
            assert!(fake.used() <= budget.limit());
            for block in &held {
                let (from, end) = (block.addr(), block.addr() + block.len());
                if !away.iter().any(|&(at, bytes)| from < at + bytes && at < end) {
                    assert!(fake.is_backed(from, block.len()), "seed {seed}");
                }
            }
            arena.check().unwrap();
            assert_eq!(fake.violations(), Vec::<String>::new(), "seed {seed}");
        }
        // The end of a suspended arena leaves nothing behind either.
        drop((held, beside, arena, other));
        assert_eq!(fake.violations(), Vec::<String>::new());
        assert_eq!((fake.used(), budget.reserved()), (0, 0), "seed {seed}");
        drop(backing);
    }
    assert!(most_parts >= 3 && failures >= 5, "{most_parts} parts, {failures} failures");
}

/// Parts that follow each other as one range.
fn joined(parts: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (at, bytes) in parts {
        match ranges.last_mut() {
            Some((from, length)) if *from + *length == at => *length += bytes,
            _ => ranges.push((at, bytes)),
        }
    }
    ranges
}

/// The observations of a suspension's caller.
#[derive(Default)]
struct Seen {
    /// The parts whose copies began.
    begun: Vec<(u64, u64)>,
    /// The parts whose copies were over, so that their memory went.
    gone: Vec<(u64, u64)>,
    /// A copy did not begin.
    refused: bool,
    /// A copy failed.
    failed: bool,
}

/// Suspends. The copy with the first number does not begin, that with the second one fails.
fn suspend(
    backing: &SuspendableBacking,
    fake: &FakeBacking,
    saves: u64,
    copies: u64,
) -> (leasehold_core::Result<u64>, Seen) {
    let seen = RefCell::new(Seen::default());
    let save = |at, bytes| {
        let mut seen = seen.borrow_mut();
        assert!(fake.is_backed(at, bytes));
        if seen.begun.len() as u64 == saves {
            seen.refused = true;
            return Err(Error::state("no room"));
        }
        seen.begun.push((at, bytes));
        Ok((at, bytes))
    };
    let finish = |(at, bytes)| {
        let mut seen = seen.borrow_mut();
        assert!(fake.is_backed(at, bytes), "the part's copy runs");
        for &(at, bytes) in &seen.gone {
            assert!(!fake.is_backed(at, 1) && !fake.is_backed(at + bytes - 1, 1));
        }
        if seen.gone.len() as u64 == copies {
            seen.failed = true;
            return Err(Error::state("no copy"));
        }
        seen.gone.push((at, bytes));
        Ok(())
    };
    // SAFETY: the memory is a fake's, which nothing uses.
    let result = unsafe { backing.suspend(save, finish) };
    (result, seen.into_inner())
}

#[test]
fn a_resumption_asks_the_budget() {
    let fake = FakeBacking::new(512 * MIB);
    let budget = Arc::new(Budget::new(200 * MIB));
    let backing = SuspendableBacking::new(Box::new(fake.clone()), Some(budget.clone())).unwrap();
    let arena =
        Allocator::new(Box::new(backing.clone()), config(&budget, Policy::Compact)).unwrap();
    let other = Allocator::new(Box::new(fake.clone()), config(&budget, Policy::Compact)).unwrap();
    let stream = VirtualStream::new().unwrap();
    let on = On::new(&stream);
    let weights = arena.alloc(Layout::new(120 * MIB), on).unwrap();
    assert!(other.alloc(Layout::new(120 * MIB), on).is_err(), "both take from one budget");
    suspend(&backing, &fake, u64::MAX, u64::MAX).0.unwrap();
    assert!(matches!(arena.alloc(Layout::new(130 * MIB), on), Err(Error::OutOfMemory(_))));
    let guest = other.alloc(Layout::new(120 * MIB), on).unwrap();
    let refused = backing.resume(|_, _| Ok(()), || Ok(())).expect_err("no room").to_string();
    assert!(refused.contains("120.0 MiB requested, 120.0 MiB of 200.0 MiB reserved;"), "{refused}");
    let whole = other.alloc(Layout::new(201 * MIB), on).expect_err("too large");
    assert!(matches!(whole, Error::OverBudget { limit, .. } if limit == 200 * MIB), "{whole}");
    drop(guest);
    other.trim(0).unwrap();
    backing.resume(|_, _| Ok(()), || Ok(())).unwrap();
    assert!(fake.is_backed(weights.addr(), weights.len()));
    assert_eq!(budget.peak(), 120 * MIB);
    assert!(backing.has_addresses());
    assert!(SuspendableBacking::new(Box::new(FakeBacking::segments(MIB)), None).is_err());
}
