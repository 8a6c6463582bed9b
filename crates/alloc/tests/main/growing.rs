//! Growing blocks: against a model of their bytes, through failures of the driver, beside the heap
//! with which they share memory, and parked.

use crate::model::Rng;
use crate::{Bench, MIB, free_in_use, given_back, late_stream};
use leasehold_alloc::{
    Allocator, AllocatorConfig, Backing, Buffer, Layout, On, Policy, SharedBudget,
    SuspendableBacking,
};
use leasehold_alloc_bench::{Call, FakeBacking, Fault, VirtualStream};
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, Lease, Result};
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::Duration;

const GRANULE: u64 = 2 * MIB;

/// A growing block, and the memory that its bytes must be in.
struct Model {
    block: Lease<Buffer>,
    addr: u64,
    most: u64,
    memory: Vec<(u64, u64)>,
}

/// The runs of memory under the block's bytes, one for each granule.
fn memory(fake: &FakeBacking, addr: u64, len: u64) -> Vec<(u64, u64)> {
    let granules = (0..len).step_by(GRANULE as usize);
    granules.flat_map(|at| fake.memory(addr + at, GRANULE.min(len - at))).collect()
}

impl Model {
    fn new(b: &Bench, most: u64) -> Result<Self> {
        let block = b.allocator.growing(most)?;
        Ok(Self { addr: block.addr(), block, most, memory: Vec::new() })
    }

    /// The block is what the model says: no byte has moved.
    fn check(&mut self, fake: &FakeBacking, len: u64, what: &str) {
        assert_eq!((self.block.addr(), self.block.len()), (self.addr, len), "{what}");
        let now = memory(fake, self.addr, len);
        let stays = self.memory.len().min(now.len());
        // (The last granule may have become longer or shorter.)
        let place = |runs: &[(u64, u64)]| runs[..stays].iter().map(|r| r.0).collect::<Vec<_>>();
        assert_eq!(place(&now), place(&self.memory), "{what}: bytes have moved");
        self.memory = now;
    }
}

/// No byte of memory is in two places.
fn apart(fake: &FakeBacking, models: &[Model], heap: &[Lease<Buffer>], what: &str) {
    let blocks = models.iter().map(|m| (m.addr, m.block.len()));
    let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
    for (addr, len) in blocks.chain(heap.iter().map(|b| (b.addr(), b.len()))) {
        if len > 0 {
            seen.extend(fake.memory(addr, len));
        }
    }
    let mut end = 0;
    for (at, bytes) in seen {
        assert!(at >= end, "{what}: memory {at:#x} is in two places");
        end = at + bytes;
    }
}

/// A program of growths, shrinks, drops and ordinary blocks. Failures change nothing.
fn program(b: &Bench, seed: u64, late: &VirtualStream) -> u64 {
    let mut rng = Rng(seed);
    let (mut models, mut heap): (Vec<Model>, Vec<Lease<Buffer>>) = Default::default();
    let mut grown = 0;
    for step in 0..80 {
        let what = format!("seed {seed}, step {step}");
        match rng.below(9) {
            0 if models.len() < 6 => {
                models.extend(Model::new(b, [9 * MIB, 40 * MIB][rng.below(2) as usize]).ok());
            }
            1..=3 if !models.is_empty() => {
                let at = rng.below(models.len() as u64) as usize;
                let m = &mut models[at];
                let (before, len) = (m.block.len(), rng.below(m.most + 1));
                match b.allocator.grow(&m.block, len) {
                    Ok(()) => m.check(&b.fake, before.max(len), &what),
                    Err(_) => m.check(&b.fake, before, &what),
                }
                grown += u64::from(m.block.len() > before);
            }
            4 if !models.is_empty() => {
                let at = rng.below(models.len() as u64) as usize;
                let m = &mut models[at];
                let (before, len) = (m.block.len(), rng.below(m.most + 1));
                let (calls, fine) = (b.fake.driver_calls(), b.allocator.try_grow(&m.block, len));
                let now = if matches!(fine, Ok(true)) { before.max(len) } else { before };
                m.check(&b.fake, now, &what);
                assert_eq!(b.fake.driver_calls(), calls, "{what}");
            }
            5 if !models.is_empty() => {
                let at = rng.below(models.len() as u64) as usize;
                let m = &mut models[at];
                let (before, len) = (m.block.len(), rng.below(m.most + 1));
                if rng.below(2) == 0 {
                    let point = late.submit().expect("a value");
                    // SAFETY: nothing uses the memory behind a fake backing.
                    unsafe { m.block.mark_write(point) };
                    late.complete(point.value().saturating_sub(6));
                }
                let calls = b.fake.driver_calls();
                // SAFETY: as above.
                unsafe { b.allocator.shrink(&m.block, len, &m.block) }.expect("host memory");
                assert_eq!(b.fake.driver_calls(), calls, "{what}");
                m.memory.truncate(before.min(len).div_ceil(GRANULE) as usize);
                m.check(&b.fake, before.min(len), &what);
            }
            6 if !models.is_empty() => {
                let m = models.swap_remove(rng.below(models.len() as u64) as usize);
                if rng.below(2) == 0 {
                    let end = free_in_use(late, m.block);
                    late.complete(end.saturating_sub(6));
                }
            }
            7 => {
                let size = [70_000, 3 * MIB, 11 * MIB][rng.below(3) as usize];
                heap.extend(b.allocator.alloc(Layout::new(size), On::new(&b.stream)).ok());
            }
            _ if !heap.is_empty() => {
                drop(heap.swap_remove(rng.below(heap.len() as u64) as usize));
            }
            _ => _ = b.allocator.trim(rng.below(24) * MIB),
        }
        apart(&b.fake, &models, &heap, &what);
        b.allocator.check().unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(b.fake.violations(), Vec::<String>::new(), "{what}");
        let s = b.allocator.stats();
        assert!(s.reserved <= s.limit && s.reserved >= b.fake.used(), "{what}: {s:?}");
    }
    grown
}

fn bench(segments: bool, policy: Policy, budget: u64) -> Bench {
    let fake = if segments { FakeBacking::segments(96 * MIB) } else { FakeBacking::new(96 * MIB) };
    Bench::with(fake, AllocatorConfig { policy, budget, ..AllocatorConfig::default() })
}

/// All memory of a bench goes back to the driver, but for what the driver refuses.
fn ends(b: Bench, late: VirtualStream, what: &str) {
    b.fake.heal();
    late.complete(late.submit().expect("a value").value());
    b.allocator.trim(0).expect("a trim on a healed device");
    b.allocator.trim(0).expect("a trim of what the first one retired");
    let s = b.allocator.stats();
    assert_eq!(s.reserved, s.quarantined, "{what}: {s:?}");
    assert_eq!((s.live_bytes, s.idle_in_growing), (0, 0), "{what}: {s:?}");
    b.check();
}

#[test]
fn growing_blocks_behave_as_their_model() {
    let mut grown = 0;
    for seed in 1..=60u64 {
        let policy = [Policy::Balanced, Policy::Fastest, Policy::Compact][(seed % 3) as usize];
        let budget = [u64::MAX, 64 * MIB][(seed % 2) as usize];
        let (b, late) = (bench(seed % 7 == 0, policy, budget), late_stream());
        grown += program(&b, seed * 31, &late);
        ends(b, late, &format!("seed {seed}"));
    }
    assert!(grown > 300, "only {grown} growths");
}

#[test]
fn every_driver_call_of_a_growth_may_fail_at_every_index() {
    let mut runs = 0;
    for (seed, policy) in [(5, Policy::Compact), (6, Policy::Balanced), (8, Policy::Fastest)] {
        for call in Call::ALL {
            let calls = {
                let (b, late) = (bench(false, policy, u64::MAX), late_stream());
                program(&b, seed, &late);
                b.fake.count(call)
            };
            let faults = (0..calls + 4).flat_map(|k| [Fault::Once(k), Fault::From(k)]);
            let odds = [30, 200, 600].map(Fault::PerMille);
            for fault in faults.chain(odds) {
                let (b, late) = (bench(false, policy, u64::MAX), late_stream());
                b.fake.fail(call, fault);
                program(&b, seed, &late);
                ends(b, late, &format!("{call:?} {fault:?} {policy:?}"));
                runs += 1;
            }
        }
    }
    assert!(runs > 300, "only {runs} runs");
}

#[test]
fn a_growth_takes_what_lies_free_and_the_heap_takes_it_back() {
    let b = bench(false, Policy::Compact, u64::MAX);
    let weights = b.take(80 * MIB);
    let cache = b.allocator.growing(64 * MIB).expect("addresses");
    assert_eq!((cache.len(), b.fake.used()), (0, 80 * MIB));
    drop(weights);
    b.allocator.grow(&cache, 64 * MIB).expect("free memory of the heap");
    assert_eq!(b.fake.used(), 80 * MIB, "no new memory");
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { b.allocator.shrink(&cache, 2 * MIB, &cache) }.expect("host memory");
    let again = b.take(90 * MIB);
    assert!(b.fake.used() <= 94 * MIB, "{} of the tail came back", b.fake.used());
    assert!(b.fake.is_backed(cache.addr(), 2 * MIB) && b.fake.is_backed(again.addr(), 90 * MIB));
    b.check();
}

#[test]
fn a_steady_state_makes_no_driver_call() {
    let b = Bench::new(1 << 30);
    for round in 0..40 {
        let calls = b.allocator.stats().driver_calls;
        let blocks: Vec<_> =
            (0..4).map(|_| b.allocator.growing(64 * MIB).expect("addresses")).collect();
        for block in &blocks {
            for mib in [3, 7, 20] {
                b.allocator.grow(block, mib * MIB).expect("memory");
            }
            // SAFETY: nothing uses the memory behind a fake backing.
            unsafe { b.allocator.shrink(block, MIB, block) }.expect("host memory");
            assert!(b.allocator.try_grow(block, 20 * MIB).expect("a tail"));
        }
        drop(blocks);
        if round > 0 {
            assert_eq!(b.allocator.stats().driver_calls, calls, "round {round}");
        }
    }
    assert_eq!(b.allocator.stats().idle_in_growing, 80 * MIB);
    b.check();
}

#[test]
fn idle_memory_keeps_to_its_share() {
    let b = bench(false, Policy::Balanced, 64 * MIB);
    let block = b.allocator.growing(60 * MIB).expect("addresses");
    b.allocator.grow(&block, 60 * MIB).expect("memory");
    drop(block);
    assert_eq!(b.allocator.stats().idle_in_growing, 60 * MIB, "a free calls no driver");
    let other = b.allocator.growing(4 * MIB).expect("addresses");
    let s = b.allocator.stats();
    assert!(s.idle_in_growing <= 8 * MIB, "{s:?}");
    assert_eq!(s.idle_in_growing + s.cached_pieces, 60 * MIB, "{s:?}");
    b.allocator.grow(&other, 4 * MIB).expect("pieces in hand");
    assert_eq!(b.fake.used(), 60 * MIB);
    b.check();
}

#[test]
fn a_tail_goes_after_its_last_use_and_not_before() {
    let (b, late) = (bench(false, Policy::Balanced, 40 * MIB), late_stream());
    let block = b.allocator.growing(32 * MIB).expect("addresses");
    b.allocator.grow(&block, 32 * MIB).expect("memory");
    let end = late.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { block.mark_read(end) };
    // SAFETY: the use above is in the record.
    unsafe { b.allocator.shrink(&block, 0, &block) }.expect("host memory");
    let e = b.alloc(30 * MIB).expect_err("the work may still read the tail");
    assert!(e.is_out_of_memory() && e.to_string().contains("growing"), "{e}");
    assert!(b.fake.is_backed(block.addr(), 32 * MIB), "unmapped beside the work");
    late.complete(end.value());
    let heap = b.take(30 * MIB);
    assert!(!b.fake.is_backed(block.addr(), 32 * MIB));
    drop(heap);
    b.check();
}

#[test]
fn a_block_dropped_in_use_is_adopted_after_its_last_use() {
    let (b, late) = (Bench::new(1 << 30), late_stream());
    let block = b.allocator.growing(8 * MIB).expect("addresses");
    b.allocator.grow(&block, 8 * MIB).expect("memory");
    let addr = block.addr();
    let end = free_in_use(&late, block);
    assert_ne!(b.allocator.growing(8 * MIB).expect("addresses").addr(), addr, "still in use");
    late.complete(end);
    b.allocator.drain();
    let adopted = [(); 2].map(|()| b.allocator.growing(8 * MIB).expect("addresses"));
    assert!(adopted.iter().any(|a| a.addr() == addr), "nobody adopted the range");
    assert!(adopted.iter().all(|a| a.is_empty()));
    b.check();
}

#[test]
fn bad_use_is_refused_and_changes_nothing() {
    let b = bench(false, Policy::Balanced, 16 * MIB);
    let plain = b.take(MIB);
    let block = b.allocator.growing(64 * MIB).expect("addresses");
    b.allocator.grow(&block, 5 * MIB).expect("memory");
    let refused = |r: Result<()>, text: &str| {
        let e = r.expect_err(text);
        assert!(e.to_string().contains(text), "{e}");
        assert_eq!((block.len(), b.allocator.stats().live_bytes), (5 * MIB, 6 * MIB));
        b.check();
        e
    };
    refused(b.allocator.growing(0).map(drop), "want 1 or more");
    refused(b.allocator.grow(&block, 65 * MIB), "give it a larger maximum");
    refused(b.allocator.grow(&plain, 2 * MIB), "make it with `growing`");
    let e = refused(b.allocator.grow(&block, 40 * MIB), "");
    assert!(matches!(e, Error::OverBudget { .. }), "{e}");
    let e = refused(b.allocator.grow(&block, 15 * MIB), "");
    assert!(e.is_out_of_memory(), "{e}");
    let other = Bench::new(64 * MIB);
    refused(other.allocator.grow(&block, 6 * MIB), "make it with `growing`");
    drop(plain);
    b.allocator.grow(&block, 15 * MIB).expect("the heap's memory, which lies free");
    assert_eq!(b.allocator.trim(0).expect("a trim"), 0, "all of it is in use");
    b.check();
}

#[test]
fn two_threads_cannot_grow_one_block() {
    let fake = FakeBacking::new(64 * MIB);
    let allocator = Allocator::new(Box::new(fake.clone()), AllocatorConfig::default()).unwrap();
    let block = allocator.growing(16 * MIB).expect("addresses");
    // A mapping waits until it may go on.
    let limit = Duration::from_secs(30);
    let ((comes, come), (go, goes)) = (channel(), channel::<()>());
    let goes = Mutex::new(goes);
    fake.before(Call::Map, move || {
        let _ = comes.send(());
        let _ = goes.lock().recv_timeout(limit);
    });
    std::thread::scope(|s| {
        let first = s.spawn(|| allocator.grow(&block, 4 * MIB));
        come.recv_timeout(limit).expect("a mapping");
        for e in [allocator.grow(&block, 2 * MIB), allocator.prepare(&block, 6 * MIB)] {
            assert!(matches!(e, Err(Error::Occupied { .. })), "{e:?}");
        }
        // A call without the driver is not in the way of the growth.
        assert!(!allocator.try_grow(&block, 2 * MIB).expect("no memory yet"));
        // SAFETY: nothing uses the memory behind a fake backing.
        unsafe { allocator.shrink(&block, 0, &block) }.expect("it is shorter already");
        // Others go on meanwhile.
        let other = allocator.growing(8 * MIB).expect("addresses");
        assert_eq!(allocator.trim(0).expect("a trim"), 0);
        drop(other);
        drop(go);
        first.join().unwrap().expect("the first one");
    });
    assert_eq!(block.len(), 4 * MIB);
    allocator.grow(&block, 6 * MIB).expect("its turn is over");
    allocator.check().unwrap();
}

#[test]
fn without_virtual_memory_all_of_the_maximum_is_taken_at_once() {
    let b = bench(true, Policy::Balanced, 64 * MIB);
    let block = b.allocator.growing(20 * MIB).expect("memory");
    assert_eq!((block.len(), b.fake.used()), (0, 20 * MIB));
    let calls = b.fake.driver_calls();
    b.allocator.grow(&block, 20 * MIB).expect("it is there");
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { b.allocator.shrink(&block, MIB, &block) }.expect("host memory");
    assert_eq!(b.fake.driver_calls(), calls);
    assert!(matches!(b.allocator.growing(60 * MIB), Err(Error::OverBudget { .. })));
    drop(block);
    let heap = b.take(60 * MIB);
    assert_eq!(b.fake.used(), 60 * MIB, "the parked segment went first");
    drop(heap);
    b.check();
}

#[test]
fn memory_goes_back_with_the_allocator() {
    for segments in [false, true] {
        let (b, late) = (bench(segments, Policy::Balanced, u64::MAX), late_stream());
        let fake = b.fake.clone();
        let parked = b.allocator.growing(16 * MIB).expect("addresses");
        b.allocator.grow(&parked, 9 * MIB).expect("memory");
        let block = b.allocator.growing(12 * MIB).expect("addresses");
        b.allocator.grow(&block, 12 * MIB).expect("memory");
        drop(parked);
        drop(b);
        assert!(fake.used() > 0, "a buffer outlives its allocator");
        let end = free_in_use(&late, block);
        assert!(fake.used() > 0, "the work may still use it");
        late.complete(end);
        given_back(&fake);
        assert_eq!(fake.violations(), Vec::<String>::new());
    }
}

#[test]
fn growing_blocks_are_suspended_with_their_allocator() {
    let fake = FakeBacking::new(256 * MIB);
    let budget = SharedBudget::new(128 * MIB);
    let backing = SuspendableBacking::new(Box::new(fake.clone()), Some(budget.clone())).unwrap();
    let config =
        AllocatorConfig { shared_budget: Some(budget.clone()), ..AllocatorConfig::default() };
    let pool = Allocator::new(Box::new(backing.clone()), config).unwrap();
    let block = pool.growing(64 * MIB).expect("addresses");
    let addr = block.addr();
    for round in 1..=5u64 {
        pool.grow(&block, round * 7 * MIB).expect("memory");
        // SAFETY: nothing uses the memory behind a fake backing.
        unsafe { backing.suspend(|_, _| Ok(()), Ok) }.expect("a suspension");
        assert_eq!((fake.used(), budget.reserved()), (0, 0));
        let e = pool.grow(&block, 60 * MIB).expect_err("it is suspended");
        assert!(e.to_string().contains("suspended"), "{e}");
        assert_eq!(block.len(), round * 7 * MIB);
        backing.resume(|_, _| Ok(()), || Ok(())).expect("memory");
        assert!(fake.is_backed(addr, block.len()) && block.addr() == addr);
        pool.check().unwrap();
    }
    drop(block);
    pool.trim(0).unwrap();
    assert_eq!((fake.used(), budget.reserved()), (0, 0));
    assert_eq!(fake.violations(), Vec::<String>::new());
}
