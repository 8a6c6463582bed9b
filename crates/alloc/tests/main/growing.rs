//! Growing blocks: against a model of their bytes, through failures of the driver, beside the heap
//! with which they share memory, and parked.

use crate::model::Rng;
use crate::{Bench, MIB, free_in_use, given_back, late_stream};
use leasehold_alloc::{
    Allocator, AllocatorConfig, Backing, Budget, Buffer, Layout, On, Policy, SuspendableBacking,
};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{BufferHandle, Error, Lease, Result};
use leasehold_sim::memory::{Call, FakeBacking, Fault, VirtualStream};
use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::channel;
use std::time::Duration;

const GRANULE: u64 = 2 * MIB;

/// A growing block, and the memory that its bytes must be in, with a value for each granule.
struct Model {
    block: Lease<Buffer>,
    addr: u64,
    most: u64,
    memory: Vec<(u64, u64)>,
    values: Vec<u64>,
}

/// The value that each granule of memory has.
#[derive(Default)]
struct World {
    values: HashMap<u64, u64>,
    next: u64,
}

impl World {
    /// Somebody writes a granule of memory.
    fn write(&mut self, memory: u64) -> u64 {
        self.next += 1;
        self.values.insert(memory / GRANULE, self.next);
        self.next
    }
}

/// The runs of memory under the block's bytes, one for each granule.
fn memory(fake: &FakeBacking, addr: u64, len: u64) -> Vec<(u64, u64)> {
    let granules = (0..len).step_by(GRANULE as usize);
    granules.flat_map(|at| fake.memory(addr + at, GRANULE.min(len - at))).collect()
}

impl Model {
    fn new(b: &Bench, most: u64) -> Result<Self> {
        let block = b.allocator.growing(most)?;
        Ok(Self { addr: block.addr(), block, most, memory: Vec::new(), values: Vec::new() })
    }

    /// Writes what the block has of its own and no value is known of, or all of it.
    fn write(&mut self, world: &mut World, all: bool) {
        let shared = (self.block.shared() / GRANULE) as usize;
        let from = if all { 0 } else { self.values.len() };
        self.values.resize(self.memory.len(), 0);
        for at in from..self.memory.len() {
            if at >= shared {
                self.values[at] = world.write(self.memory[at].0);
            } else if !all {
                // The end of shared memory: what the others have there.
                self.values[at] = world.values[&(self.memory[at].0 / GRANULE)];
            }
        }
    }

    /// The block has the values that it was given, whatever other blocks have done.
    fn read(&self, world: &World, what: &str) {
        let found: Vec<_> =
            self.memory.iter().map(|(at, _)| world.values[&(at / GRANULE)]).collect();
        assert_eq!(found, self.values, "{what}");
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

/// No byte of memory that is written is in two places.
fn apart(b: &Bench, models: &[Model], heap: &[Lease<Buffer>], what: &str) {
    let fake = &b.fake;
    let blocks = models.iter().map(|m| {
        let shared = m.block.shared().min(m.block.len());
        (m.addr + shared, m.block.len() - shared)
    });
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
fn program(b: &Bench, seed: u64, late: &VirtualStream) -> (u64, u64) {
    let mut rng = Rng(seed);
    let (mut models, mut heap): (Vec<Model>, Vec<Lease<Buffer>>) = Default::default();
    let mut world = World::default();
    let (mut grown, mut forked) = (0, 0);
    for step in 0..80 {
        let what = format!("seed {seed}, step {step}");
        match rng.below(11) {
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
                m.values.truncate(m.memory.len());
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
                if let Ok(block) = b.allocator.alloc(Layout::new(size), On::new(&b.stream)) {
                    for (at, _) in memory(&b.fake, block.addr(), block.len()) {
                        world.write(at);
                    }
                    heap.push(block);
                }
            }
            8..=9 if models.len() > 1 => {
                let [from, to] = [(); 2].map(|()| rng.below(models.len() as u64) as usize);
                let bytes = rng.below(models[from].block.len() + 1);
                if from != to && rng.below(3) > 0 {
                    let m = &mut models[to];
                    // SAFETY: nothing uses the memory behind a fake backing.
                    unsafe { b.allocator.shrink(&m.block, 0, &m.block) }.expect("host memory");
                    (m.memory, m.values) = Default::default();
                }
                forked += u64::from(fork(b, &mut models, (from, to), bytes, &what));
            }
            _ if !heap.is_empty() => {
                drop(heap.swap_remove(rng.below(heap.len() as u64) as usize));
            }
            _ => _ = b.allocator.trim(rng.below(24) * MIB),
        }
        models.iter_mut().for_each(|m| m.write(&mut world, false));
        models.iter().for_each(|m| m.read(&world, &what));
        if !models.is_empty() {
            let m = rng.below(models.len() as u64) as usize;
            models[m].write(&mut world, true);
            models.iter().for_each(|m| m.read(&world, &what));
        }
        apart(b, &models, &heap, &what);
        b.allocator.check().unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(b.fake.violations(), Vec::<String>::new(), "{what}");
        let s = b.allocator.stats();
        assert!(s.reserved <= s.limit && s.reserved >= b.fake.used(), "{what}: {s:?}");
    }
    assert!(b.allocator.stats().shared_in_growing == 0 || forked > 0);
    (grown, forked)
}

/// A fork of one block in another, or none: then both are as they were.
fn fork(b: &Bench, models: &mut [Model], at: (usize, usize), bytes: u64, what: &str) -> bool {
    let (from, to) = (&models[at.0], &models[at.1]);
    let before = [from, to].map(|m| (m.block.len(), m.block.shared()));
    let reserved = b.allocator.stats().reserved;
    // SAFETY: the models write beyond what is shared.
    let len = unsafe { b.allocator.fork(&from.block, &to.block, bytes) };
    assert!(b.allocator.stats().reserved <= reserved, "{what}: a fork takes no memory");
    let Ok(len) = len else {
        let now = [from, to].map(|m| (m.block.len(), m.block.shared()));
        // Memory that the other block shared beyond its length may be gone.
        assert_eq!((now[0], now[1].0), (before[0], before[1].0), "{what}");
        assert!(at.0 == at.1 || now[1].1 <= before[1].1, "{what}");
        return false;
    };
    assert!(len <= bytes && at.0 != at.1 && before[1].0 == 0, "{what}");
    assert!(bytes < GRANULE || len + 16 * GRANULE > bytes, "{what}: {len} of {bytes}");
    let granules = (len / GRANULE) as usize;
    let (memory, values) = (&from.memory[..granules], from.values[..granules].to_vec());
    let memory: Vec<_> = memory.iter().map(|&(at, _)| (at, GRANULE)).collect();
    let to = &mut models[at.1];
    (to.memory, to.values) = (memory, values);
    to.check(&b.fake, len, what);
    len > 0
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
    assert!(s.shared_in_growing == 0, "{what}: {s:?}");
    b.check();
}

#[test]
fn growing_blocks_behave_as_their_model() {
    let mut done = (0, 0);
    for seed in 1..=120u64 {
        let policy = [Policy::Balanced, Policy::Fastest, Policy::Compact][(seed % 3) as usize];
        let budget = [u64::MAX, 64 * MIB][(seed % 2) as usize];
        let (b, late) = (bench(seed % 7 == 0, policy, budget), late_stream());
        let (grown, forked) = program(&b, seed * 31, &late);
        done = (done.0 + grown, done.1 + forked);
        ends(b, late, &format!("seed {seed}"));
    }
    assert!(done.0 > 600 && done.1 > 60, "only {done:?} growths and forks");
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
    let budget = Arc::new(Budget::new(128 * MIB));
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

#[test]
fn blocks_side_by_side_grow_alone_and_end_together() {
    for seed in 1..=20u64 {
        let b = bench(false, Policy::Compact, 64 * MIB);
        let others = b.fake.outstanding().0;
        let parts = b.allocator.growing_parts(4, 30 * MIB - 5).expect("addresses");
        let addr = parts[0].addr();
        for (i, part) in (0..).zip(&parts) {
            assert_eq!((part.addr(), part.len()), (addr + i * 30 * MIB, 0));
        }
        b.allocator.grow(&parts[2], 7 * MIB).expect("memory");
        b.allocator.grow(&parts[0], 30 * MIB).expect("memory");
        assert!(b.fake.is_backed(addr, 30 * MIB) && b.fake.is_backed(parts[2].addr(), 7 * MIB));
        assert_eq!((parts[1].len(), b.fake.used()), (0, 38 * MIB));
        assert!(
            b.allocator.grow(&parts[0], 30 * MIB + 1).is_err(),
            "a part ends where the next begins"
        );
        let e = b.allocator.grow(&parts[3], 28 * MIB).expect_err("the budget");
        assert!(e.is_out_of_memory() && parts[3].is_empty(), "{e}");
        // One after the other goes, in any order, and the addresses go with the last.
        let mut rng = Rng(seed);
        let mut parts = parts;
        while !parts.is_empty() {
            drop(parts.swap_remove(rng.below(parts.len() as u64) as usize));
            b.allocator.trim(0).expect("a trim");
            assert_eq!(
                parts.is_empty(),
                others == b.fake.outstanding().0,
                "{} parts are left",
                parts.len()
            );
        }
        b.check();
    }
    let b = bench(false, Policy::Balanced, u64::MAX);
    assert!(b.allocator.growing_parts(0, MIB).is_err());
    assert!(b.allocator.growing_parts(usize::MAX, MIB).is_err());
    let e = bench(true, Policy::Balanced, u64::MAX).allocator.growing_parts(2, MIB).unwrap_err();
    assert!(matches!(e, Error::Unsupported(_)), "{e}");
}

fn shrink(allocator: &Allocator, block: &Lease<Buffer>, len: u64) {
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { allocator.shrink(block, len, block) }.expect("host memory");
}

fn forks(
    allocator: &Allocator,
    from: &Lease<Buffer>,
    to: &Lease<Buffer>,
    bytes: u64,
) -> leasehold_core::Result<u64> {
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { allocator.fork(from, to, bytes) }
}

#[test]
fn a_fork_has_its_memory_once_and_keeps_it() {
    let b = bench(false, Policy::Compact, 64 * MIB);
    let blocks = [(); 3].map(|()| b.allocator.growing(20 * MIB).expect("addresses"));
    let [parent, child, other] = &blocks;
    b.allocator.grow(parent, 9 * MIB).expect("memory");
    b.allocator.grow(other, 4 * MIB).expect("memory");
    let memory = b.fake.memory(parent.addr(), 8 * MIB);
    let len = forks(&b.allocator, parent, child, 9 * MIB).expect("a fork");
    assert_eq!((len, child.len(), b.fake.used()), (8 * MIB, 8 * MIB, 14 * MIB));
    assert_eq!(b.fake.memory(child.addr(), 8 * MIB), memory);
    let s = b.allocator.stats();
    assert_eq!((s.reserved, s.shared_in_growing), (14 * MIB, 8 * MIB), "{s:?}");
    let listed: u64 = b.allocator.snapshot().segments.iter().map(|s| s.bytes).sum();
    assert_eq!(listed, s.reserved, "a snapshot lists it once");
    assert_eq!([parent, child, other].map(|block| block.shared()), [8 * MIB, 8 * MIB, 0]);
    // Both go on, each in memory of its own.
    b.allocator.grow(child, 12 * MIB).expect("memory");
    b.allocator.grow(parent, 12 * MIB).expect("memory");
    let own = |block: &Lease<Buffer>| b.fake.memory(block.addr() + 8 * MIB, 4 * MIB);
    assert!(own(parent).iter().all(|run| !own(child).contains(run)));
    // A length that falls and rises again comes to no memory of others.
    shrink(&b.allocator, child, 2 * MIB);
    assert!(!b.allocator.try_grow(child, 6 * MIB).expect("no memory of its own is there"));
    b.allocator.grow(child, 6 * MIB).expect("memory");
    assert_eq!(child.shared(), 2 * MIB);
    assert!(b.fake.memory(child.addr() + 2 * MIB, 4 * MIB).iter().all(|run| !memory.contains(run)));
    // The parent's memory stays as long as anybody has it.
    let [parent, child, other] = blocks;
    let addr = parent.addr();
    drop(parent);
    b.allocator.trim(0).expect("a trim");
    assert!(
        !b.fake.is_backed(addr, 2 * MIB) && b.fake.memory(child.addr(), 2 * MIB)[0] == memory[0]
    );
    assert_eq!(b.allocator.stats().shared_in_growing, 0);
    // A new block of the same maximum gets none of it.
    let next = b.allocator.growing(20 * MIB).expect("addresses");
    b.allocator.grow(&next, 20 * MIB).expect("memory");
    assert!(!b.fake.memory(next.addr(), 20 * MIB).contains(&memory[0]));
    b.check();
    drop((child, other, next));
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.fake.used(), b.allocator.stats().reserved), (0, 0));
    b.check();
}

#[test]
fn a_part_that_becomes_a_fork_waits_for_nothing_and_says_so() {
    let (b, late) = (bench(false, Policy::Compact, u64::MAX), late_stream());
    let parts = b.allocator.growing_parts(3, 8 * MIB).expect("addresses");
    b.allocator.grow(&parts[0], 6 * MIB).expect("memory");
    b.allocator.grow(&parts[1], 4 * MIB).expect("memory");
    let end = late.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing.
    unsafe { parts[1].mark_read(end) };
    shrink(&b.allocator, &parts[1], 0);
    let forked = |to: usize| forks(&b.allocator, &parts[0], &parts[to], 6 * MIB);
    let e = forked(1).expect_err("work may still use what the part had");
    assert!(matches!(e, Error::Occupied { .. }) && e.to_string().contains("work"), "{e}");
    assert_eq!(forked(2).expect("a fork"), 6 * MIB);
    late.complete(end.value());
    assert_eq!(forked(1).expect("a fork"), 6 * MIB);
    assert_eq!(b.allocator.stats().shared_in_growing, 12 * MIB);
    // A fork of a fork is one more.
    shrink(&b.allocator, &parts[0], 0);
    shrink(&b.allocator, &parts[2], 0);
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.fake.used(), b.allocator.stats().shared_in_growing), (6 * MIB, 0));
    assert_eq!(forks(&b.allocator, &parts[1], &parts[0], 5 * MIB).expect("a fork"), 4 * MIB);
    // Memory that one block alone has left is its own again.
    shrink(&b.allocator, &parts[1], 0);
    shrink(&b.allocator, &parts[0], 0);
    b.allocator.grow(&parts[1], 6 * MIB).expect("memory");
    assert_eq!(parts[1].shared(), 0);
    b.check();
}

#[test]
fn bad_forks_are_refused_and_change_nothing() {
    let b = bench(false, Policy::Compact, u64::MAX);
    let blocks = [20, 4].map(|mib| b.allocator.growing(mib * MIB).expect("addresses"));
    let [from, to] = &blocks;
    let plain = b.take(MIB);
    b.allocator.grow(from, 8 * MIB).expect("memory");
    let refused = |from: &Lease<Buffer>, to: &Lease<Buffer>, bytes: u64, text: &str| {
        let e = forks(&b.allocator, from, to, bytes).expect_err(text);
        assert!(e.to_string().contains(text), "{e}");
        assert_eq!(b.allocator.stats().shared_in_growing, 0);
        b.check();
    };
    refused(from, from, MIB, "a fork of itself");
    refused(from, to, 9 * MIB, "fork what has memory");
    refused(from, to, 6 * MIB, "larger maximum");
    refused(from, &plain, MIB, "make it with `growing`");
    refused(&plain, to, MIB, "make it with `growing`");
    refused(to, from, 0, "shrink it to 0");
    let elsewhere = Bench::new(64 * MIB);
    let other = elsewhere.allocator.growing(4 * MIB).expect("addresses");
    refused(from, &other, MIB, "make it with `growing`");
    assert_eq!(forks(&b.allocator, from, to, GRANULE - 1).expect("nothing"), 0);
    let mut caps = FakeBacking::new(64 * MIB).caps();
    caps.aliases = false;
    for (fake, pool) in [(FakeBacking::with_caps(caps), false), (FakeBacking::new(64 * MIB), true)]
    {
        let backing: Box<dyn Backing> = match pool {
            true => Box::new(SuspendableBacking::new(Box::new(fake), None).unwrap()),
            false => Box::new(fake),
        };
        let allocator = Allocator::new(backing, AllocatorConfig::default()).unwrap();
        let [from, to] = [(); 2].map(|()| allocator.growing(8 * MIB).expect("addresses"));
        allocator.grow(&from, 4 * MIB).expect("memory");
        let e = forks(&allocator, &from, &to, 4 * MIB).expect_err("one address");
        assert!(matches!(e, Error::Unsupported(_)) && e.to_string().contains("copy"), "{e}");
        allocator.check().unwrap();
    }
    // A device that is lost.
    b.fake.lose();
    let e = forks(&b.allocator, from, to, 4 * MIB).expect_err("it is lost");
    assert!(matches!(e, Error::DeviceLost { .. }), "{e}");
}

#[test]
fn every_driver_call_of_a_fork_may_fail_and_changes_nothing() {
    let mut failed = 0;
    for call in Call::ALL {
        for fault in (0..6).flat_map(|k| [Fault::Once(k), Fault::From(k)]) {
            let (b, late) = (bench(false, Policy::Compact, u64::MAX), late_stream());
            let what = format!("{call:?} {fault:?}");
            let parts = b.allocator.growing_parts(2, 16 * MIB).expect("addresses");
            b.allocator.grow(&parts[0], 11 * MIB).expect("memory");
            b.allocator.grow(&parts[1], 4 * MIB).expect("memory");
            shrink(&b.allocator, &parts[1], 0);
            let memory = b.fake.memory(parts[0].addr(), 11 * MIB);
            b.fake.fail(call, fault);
            let forked = forks(&b.allocator, &parts[0], &parts[1], 11 * MIB);
            b.fake.heal();
            let fine = forked.is_ok();
            let shared = if fine { 10 * MIB } else { 0 };
            assert_eq!(b.fake.memory(parts[0].addr(), 11 * MIB), memory, "{what}");
            assert_eq!((parts[0].len(), parts[1].len()), (11 * MIB, shared), "{what}");
            for part in &parts {
                assert_eq!(part.shared(), shared, "{what}");
            }
            assert_eq!(b.allocator.stats().shared_in_growing, shared, "{what}");
            b.check();
            failed += usize::from(!fine);
            // The part itself may be lost to the driver. The source never is.
            b.allocator.grow(&parts[0], 15 * MIB).expect("memory");
            drop(parts);
            ends(b, late, &what);
        }
    }
    assert_eq!(failed, 16, "two of them at each map and each unmap, and at the one enable");
}

#[test]
fn no_handle_leads_to_a_part_nor_to_an_unlisted_import() {
    let b = Bench::new(1 << 30);
    // Rows that were asked for a handle say the next one unasked.
    let asked: Vec<_> = (0..8).map(|_| b.take(0)).collect();
    let handles: Vec<_> = asked.iter().map(|buffer| buffer.handle()).collect();
    drop(asked);
    let parts = b.allocator.growing_parts(4, MIB).expect("addresses");
    // SAFETY: nobody uses the memory behind a fake backing.
    let import = unsafe { b.allocator.import_unlisted(4096, 64, 0, Box::new(())) }.expect("a row");
    let read_only = b.allocator.alloc_read_only(Layout::new(64), On::new(&b.stream)).expect("64");
    assert!(b.allocator.lease(read_only.handle()).is_ok_and(|found| found.is_read_only()));
    let next = |handle: &BufferHandle| BufferHandle::from_bits(handle.to_bits().get() + (1 << 32));
    let told = parts.iter().chain([&import]).map(|own| own.handle());
    for handle in handles.iter().filter_map(next).chain(told) {
        let found = b.allocator.lease(handle);
        assert!(found.as_ref().map_or(true, |found| found.same(&read_only)), "{found:?}");
    }
}
