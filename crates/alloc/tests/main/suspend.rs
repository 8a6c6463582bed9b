//! Suspension of all memory of an allocator, and budgets that several allocators share: random
//! programs with failures of the driver.

use crate::MIB;
use crate::model::Rng;
use leasehold_alloc::{
    Allocator, AllocatorConfig, Layout, On, Policy, SharedBudget, SuspendableBacking,
};
use leasehold_alloc_bench::{Call, FakeBacking, Fault, VirtualStream};
use leasehold_core::Error;
use std::cell::Cell;

fn config(budget: &SharedBudget, policy: Policy) -> AllocatorConfig {
    AllocatorConfig { policy, shared_budget: Some(budget.clone()), ..AllocatorConfig::default() }
}

#[test]
fn a_suspension_gives_everything_back_and_resumes_at_the_same_addresses() {
    for seed in 1..=40u64 {
        let mut rng = Rng(seed * 77);
        let fake = FakeBacking::new(512 * MIB);
        let budget = SharedBudget::new(400 * MIB);
        let backing =
            SuspendableBacking::new(Box::new(fake.clone()), Some(budget.clone())).unwrap();
        let policy = [Policy::Balanced, Policy::Fastest, Policy::Compact][(seed % 3) as usize];
        let arena = Allocator::new(Box::new(backing.clone()), config(&budget, policy)).unwrap();
        let other = Allocator::new(Box::new(fake.clone()), config(&budget, policy)).unwrap();
        let stream = VirtualStream::new().unwrap();
        let on = On::new(&stream);
        let (mut held, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..120 {
            let layout = Layout::new([400, 50_000, 3 * MIB, 11 * MIB][rng.below(4) as usize]);
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
                        let restored: u64 = restored.iter().map(|(_, bytes)| bytes).sum();
                        assert!(used >= before + restored, "seed {seed}");
                    }
                    match resumed {
                        Ok(()) => assert_eq!(joined(restored), ranges),
                        Err(_) => assert_eq!(fake.used(), before, "seed {seed}"),
                    }
                    fake.heal();
                }
                8 if !backing.is_suspended() => {
                    let before = fake.used();
                    if !backing.ranges().is_empty() {
                        let refused = backing_suspend(&backing, || Err(Error::state("no room")));
                        assert!(refused.is_err() && fake.used() == before);
                        assert!(!backing.is_suspended());
                    }
                    let freed = backing_suspend(&backing, || Ok(())).unwrap();
                    assert_eq!(fake.used() + freed, before);
                    assert!(backing_suspend(&backing, || Ok(())).is_err());
                }
                _ => {}
            }
            assert_eq!(budget.reserved(), fake.used(), "seed {seed}");
            assert!(fake.used() <= budget.limit());
            if !backing.is_suspended() {
                for block in &held {
                    assert!(fake.is_backed(block.addr(), block.len()), "seed {seed}");
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

fn backing_suspend(
    backing: &SuspendableBacking,
    save: impl Fn() -> leasehold_core::Result<()>,
) -> leasehold_core::Result<u64> {
    // SAFETY: the memory is a fake's, which nothing uses.
    unsafe { backing.suspend(|_, _| save()) }
}

#[test]
fn a_resumption_asks_the_budget() {
    let fake = FakeBacking::new(512 * MIB);
    let budget = SharedBudget::new(200 * MIB);
    let backing = SuspendableBacking::new(Box::new(fake.clone()), Some(budget.clone())).unwrap();
    let arena =
        Allocator::new(Box::new(backing.clone()), config(&budget, Policy::Compact)).unwrap();
    let other = Allocator::new(Box::new(fake.clone()), config(&budget, Policy::Compact)).unwrap();
    let stream = VirtualStream::new().unwrap();
    let on = On::new(&stream);
    let weights = arena.alloc(Layout::new(120 * MIB), on).unwrap();
    assert!(other.alloc(Layout::new(120 * MIB), on).is_err(), "both take from one budget");
    backing_suspend(&backing, || Ok(())).unwrap();
    assert!(matches!(arena.alloc(Layout::new(130 * MIB), on), Err(Error::OutOfMemory(_))));
    let guest = other.alloc(Layout::new(120 * MIB), on).unwrap();
    assert!(matches!(backing.resume(|_, _| Ok(()), || Ok(())), Err(Error::OverBudget { .. })));
    drop(guest);
    other.trim(0).unwrap();
    backing.resume(|_, _| Ok(()), || Ok(())).unwrap();
    assert!(fake.is_backed(weights.addr(), weights.len()));
    assert_eq!(budget.peak(), 120 * MIB);
    assert!(backing.has_addresses());
    assert!(SuspendableBacking::new(Box::new(FakeBacking::segments(MIB)), None).is_err());
}
