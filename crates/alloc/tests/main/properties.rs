//! Invariants of the design that are properties of whole runs, each on its own: I9 to I12 and I16.
//! (The others are checked after every operation of the model, or by the allocator's own check.)

use crate::model::Rng;
use crate::{Bench, MIB};
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, BackingCaps, Chunk, Layout};
use leasehold_alloc::{Lifetime, On, Policy};
use leasehold_core::{Error, Result, TimelineSource};
use leasehold_sim::memory::{Call, FakeBacking, Fault};
use leasehold_sim::memory::{VirtualStream, pass};
use proptest::prelude::*;

fn policy(n: u64) -> Policy {
    [Policy::Balanced, Policy::Fastest, Policy::Compact][(n % 3) as usize]
}

fn size(rng: &mut Rng) -> u64 {
    match rng.below(4) {
        0 => 1 + rng.below(4096),
        1 => 1 + rng.below(100_000),
        2 => 1 + rng.below(3 * MIB),
        _ => 1 + rng.below(9 * MIB),
    }
}

/// Some operations on one stream, from nothing live to nothing live. Memory may run out. `each`
/// sees every block.
fn churn(b: &Bench, seed: u64, steps: u64, mut each: impl FnMut(u64, u64)) {
    let mut rng = Rng(seed | 1);
    let mut held = Vec::new();
    for _ in 0..steps {
        if rng.below(5) < 3 {
            match b.alloc(size(&mut rng)) {
                Ok(x) => {
                    each(x.addr(), x.len());
                    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it
                    // too early.
                    unsafe { x.mark_write(b.stream.submit().expect("a value")) };
                    held.push(x);
                }
                Err(Error::OutOfMemory(_) | Error::OverBudget { .. }) => {}
                Err(e) => panic!("{e}"),
            }
        } else if !held.is_empty() {
            drop(held.swap_remove(rng.below(held.len() as u64) as usize));
        }
        if rng.below(8) == 0 {
            let timeline = b.stream.timeline();
            pass(
                timeline.at(timeline.completed()
                    + rng.below(timeline.submitted() - timeline.completed() + 1)),
            );
        }
    }
    drop(held);
    pass(b.stream.timeline().now());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// I9: while a graph lives its memory is neither lent nor unmapped nor moved; after its last
    /// drop all of it can be had again.
    #[test]
    fn i9_a_graph_keeps_its_memory(seed in any::<u64>().no_shrink(), kind in 0u64..3, mib in 1u64..24) {
        let bytes = mib * MIB - seed % 5000;
        let config = AllocatorConfig { policy: policy(kind), budget: 128 * MIB, ..AllocatorConfig::default() };
        let b = Bench::with(FakeBacking::new(1 << 30), config);
        churn(&b, seed, 60, |_, _| {});
        let arena = b.allocator.arena().expect("an arena");
        let symbol = arena.alloc(Layout::new(bytes)).expect("a symbolic buffer").addr();
        let used = Lifetime { symbol, first: 0, last: 3, live_at_end: false };
        // SAFETY: the backing is a fake, whose memory nobody uses.
        let at = unsafe { arena.seal(&[used], On::new(&b.stream)) }.expect("a plan").resolve(symbol).expect("an address");
        for round in 0..3 {
            churn(&b, seed ^ round, 120, |from, len| {
                assert!(from + len <= at || at + bytes <= from, "the graph's memory at {at:#x} was lent");
            });
            b.allocator.trim(0).expect("a trim");
            prop_assert!(b.fake.is_backed(at, bytes), "the graph's memory was unmapped");
        }
        let clone = arena.clone();
        drop(arena);
        prop_assert!(b.fake.is_backed(at, bytes), "a clone still holds it");
        drop(clone);
        // The whole budget in one piece.
        let all = b.take(128 * MIB);
        prop_assert!(all.addr() != 0);
        b.check();
    }

    /// I10: within a budget, a workload that repeats comes to rest: after a few rounds no driver
    /// call any more.
    #[test]
    fn i10_what_repeats_comes_to_rest(seed in any::<u64>().no_shrink(), kind in 0u64..2) {
        come_to_rest(seed, kind);
    }

    /// I11: everything dropped and trimmed, nothing stays with the driver.
    #[test]
    fn i11_everything_goes_back(seed in any::<u64>().no_shrink(), kind in 0u64..3, segments in any::<bool>()) {
        let fake = if segments { FakeBacking::segments(1 << 28) } else { FakeBacking::new(1 << 28) };
        let b = Bench::with(fake, AllocatorConfig { policy: policy(kind), ..AllocatorConfig::default() });
        churn(&b, seed, 300, |_, _| {});
        b.allocator.trim(0).expect("a trim");
        prop_assert_eq!((b.allocator.stats().reserved, b.fake.used()), (0, 0));
        let fake = b.fake.clone();
        drop(b);
        prop_assert_eq!((fake.outstanding(), fake.violations()), ((0, 0, 0, 0), Vec::new()));
    }

    /// I12: whichever call of the driver fails, the state is valid, later operations work, nothing
    /// is leaked.
    #[test]
    fn i12_any_call_may_fail(seed in any::<u64>().no_shrink(), call in 0usize..8, k in 0u64..60, kind in 0u64..3) {
        let b = Bench::with(FakeBacking::new(1 << 27), AllocatorConfig { policy: policy(kind), ..AllocatorConfig::default() });
        b.fake.fail(Call::ALL[call], Fault::Once(k));
        let mut rng = Rng(seed | 1);
        let mut held = Vec::new();
        for _ in 0..200 {
            if rng.below(5) < 3 {
                held.extend(b.alloc(size(&mut rng)));
            } else if !held.is_empty() {
                drop(held.swap_remove(rng.below(held.len() as u64) as usize));
            }
        }
        b.check();
        b.fake.heal();
        held.clear();
        drop(b.take(20 * MIB));
        b.allocator.trim(0).expect("a trim on a healed device");
        let s = b.allocator.stats();
        prop_assert_eq!(s.reserved, s.quarantined, "{:?}", s);
    }

    /// I16: the fallback ends, and an error means that no free block would have done.
    #[test]
    fn i16_no_error_while_there_is_a_block(seed in any::<u64>().no_shrink(), kind in 0u64..3, segments in any::<bool>()) {
        run_dry(seed, kind, segments);
    }
}

fn come_to_rest(seed: u64, kind: u64) {
    const WARM_UP: usize = 10;
    // Long enough for whatever the allocator does every few thousand operations.
    const ROUNDS: usize = 80;
    let config =
        AllocatorConfig { policy: policy(kind), budget: 1 << 30, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::new(1 << 34), config);
    let mut calls = [0; ROUNDS];
    for round in &mut calls {
        let before = b.allocator.stats().driver_calls;
        churn(&b, seed, 400, |_, _| {});
        *round = b.allocator.stats().driver_calls - before;
    }
    assert!(calls[0] > 0, "the first round takes memory");
    assert_eq!(calls[WARM_UP..].iter().sum::<u64>(), 0, "calls of each round: {calls:?}");
    b.check();
}

/// Thread caches tried every few thousand frees whether large blocks are worth keeping. Each trial
/// moved blocks, and some took new memory: in the 12th round, or after more than 50.
#[test]
fn what_repeats_is_not_disturbed_by_trials() {
    for (seed, kind) in [
        (2_260_563_468_123_802_964, 0),
        (11_024_261_158_085_788_797, 1),
        (14_901_925_806_129_883_751, 0),
        (16_948_617_879_446_750_516, 1),
        (1_840_717_244_397_252_622, 1),
    ] {
        come_to_rest(seed, kind);
    }
}

fn run_dry(seed: u64, kind: u64, segments: bool) {
    let fake = if segments { FakeBacking::segments(48 * MIB) } else { FakeBacking::new(48 * MIB) };
    let config =
        AllocatorConfig { policy: policy(kind), budget: 48 * MIB, ..AllocatorConfig::default() };
    let b = Bench::with(fake, config);
    let mut rng = Rng(seed | 1);
    let mut held = Vec::new();
    let mut refused = 0;
    for _ in 0..600 {
        let waits = b.allocator.stats().host_waits;
        if rng.below(5) < 3 {
            let size = size(&mut rng);
            match b.alloc(size) {
                Ok(x) => {
                    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it
                    // too early.
                    unsafe { x.mark_write(b.stream.submit().expect("a value")) };
                    held.push(x);
                }
                Err(Error::OutOfMemory(r)) => {
                    refused += 1;
                    assert!(
                        r.largest_free < size,
                        "{} lie free in one piece, {} were asked for",
                        r.largest_free,
                        size
                    );
                }
                Err(e) => panic!("{e}"),
            }
        } else if !held.is_empty() {
            drop(held.swap_remove(rng.below(held.len() as u64) as usize));
        }
        assert!(b.allocator.stats().host_waits - waits < 300, "the fallback waits without end");
    }
    assert!(refused > 0, "memory never ran out");
    b.check();
}

/// The lowest place that fitted was partly without memory, and none was left for it; a higher one,
/// backed throughout, was not looked at.
#[test]
fn a_higher_block_serves_where_the_lowest_place_lacks_memory() {
    run_dry(17_528_699_854_942_880_729, 0, false);
}

/// A backing of segments that begin anywhere: a granule of 64 KiB, and addresses that are no
/// multiple of it.
struct Askew(FakeBacking, u64);

// SAFETY: every call is the fake backing's, whose addresses nobody can use.
unsafe impl Backing for Askew {
    fn caps(&self) -> BackingCaps {
        BackingCaps { granule: 64 << 10, segment: MIB, ..self.0.caps() }
    }
    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.0.reserve(bytes)
    }
    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        let chunk = unsafe { self.0.commit(at, bytes) }?;
        Ok(Chunk { addr: chunk.addr + self.1, ..chunk })
    }
    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.decommit(Chunk { addr: chunk.addr - self.1, ..chunk }) }
    }
    unsafe fn release(&self, addr: u64, bytes: u64) {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.release(addr, bytes) };
    }
}

#[test]
fn alignments_hold_wherever_a_segment_begins() {
    for skew in [0, 512, 4096, 64 << 10, 448 << 10, MIB, 320 << 10] {
        let fake = FakeBacking::segments(1 << 30);
        let allocator =
            Allocator::new(Box::new(Askew(fake.clone(), skew)), AllocatorConfig::default());
        let b = Bench {
            fake,
            allocator: allocator.expect("an allocator"),
            stream: VirtualStream::new().expect("a timeline"),
        };
        let mut held = Vec::new();
        for round in 0..3 {
            for shift in 8..=21 {
                for size in [1, 1000, 70_000, MIB, 3 * MIB] {
                    let x =
                        b.allocator.alloc(Layout::aligned(size, 1 << shift), On::new(&b.stream));
                    let x = x.unwrap_or_else(|e| {
                        panic!("{size} aligned to 2^{shift}, segments at {skew:#x}: {e}")
                    });
                    assert!(
                        x.addr().is_multiple_of(1 << shift),
                        "{:#x}, 2^{shift}, segments at {skew:#x}",
                        x.addr()
                    );
                    held.push(x);
                }
                b.check();
            }
            held.retain(|x| x.addr() >> 20 & 3 == round);
            b.allocator.trim(0).expect("a trim");
            b.check();
        }
        held.clear();
        b.allocator.trim(0).expect("a trim");
        b.check();
        assert_eq!(b.allocator.stats().reserved, 0);
        let refused = b.allocator.alloc(Layout::aligned(100, 4 * MIB), On::new(&b.stream));
        assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    }
    // With addresses apart from memory larger ones hold too.
    let b = Bench::new(1 << 30);
    for shift in 8..=29 {
        let x = b
            .allocator
            .alloc(Layout::aligned(5000, 1 << shift), On::new(&b.stream))
            .expect("aligned");
        assert!(x.addr().is_multiple_of(1 << shift), "{:#x}, 2^{shift}", x.addr());
        b.check();
    }
    let refused = b.allocator.alloc(Layout::aligned(100, 4 << 30), On::new(&b.stream));
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
}
