//! One test per defect that allocators of this kind have had; the names say which.

use crate::{Bench, MIB, drain_until, free_in_use, given_back, late_stream, unreachable_stream};
use leasehold_alloc::{
    Allocator, AllocatorConfig, BackingCaps, Buffer, CrossStream, HostKind, Layout, Lifetime, On,
    Policy, Protection,
};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::thread_number::{NOBODY, thread_number_there};
use leasehold_core::{Error, Lease, TimelineSource};
use leasehold_sim::memory::VirtualStream;
use leasehold_sim::memory::{Call, FakeBacking, Fault};
use std::cell::RefCell;
use std::thread;

/// A recorded graph with one temporary of `bytes`, and the temporary's address.
fn graph(b: &Bench, bytes: u64) -> (leasehold_alloc::GraphArena, u64) {
    let arena = b.allocator.arena().expect("an arena");
    let t = arena.alloc(Layout::new(bytes)).expect("a symbolic buffer");
    let symbol = t.addr();
    drop(t);
    let used = Lifetime { symbol, first: 0, last: 3, live_at_end: false };
    // SAFETY: the backing is a fake, whose memory nobody uses.
    let bindings = unsafe { arena.seal(&[used], On::new(&b.stream)) }.expect("a sealed arena");
    let addr = bindings.resolve(symbol).expect("the temporary has an address");
    (arena, addr)
}

#[test]
fn trim_spares_memory_of_recorded_graphs() {
    let b = Bench::new(256 * MIB);
    // A block that lies cached is what the recording gets.
    drop(b.take(16 * MIB));
    let (arena, addr) = graph(&b, 16 * MIB);
    b.allocator.trim(0).expect("a trim");
    assert!(b.fake.is_backed(addr, 16 * MIB));
    assert!(b.allocator.stats().reserved >= 16 * MIB);
    drop(arena);
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
    b.check();
}

#[test]
fn recorded_temporaries_are_not_lent() {
    let b = Bench::new(256 * MIB);
    let (arena, addr) = graph(&b, 4 * MIB);
    let held: Vec<_> = (0..20).map(|_| b.take(4 * MIB)).collect();
    for h in &held {
        assert!(h.addr() + h.len() <= addr || addr + 4 * MIB <= h.addr());
    }
    arena.launch().map(drop).expect("it is sealed");
    drop((held, arena));
    b.check();
}

#[test]
fn oom_uses_what_lies_cached() {
    for fake in [FakeBacking::new(256 * MIB), FakeBacking::segments(256 * MIB)] {
        let b = Bench::with(fake, AllocatorConfig::default());
        // All of the device lies free in the cache, in pieces of other sizes.
        let pieces: Vec<_> = (0..8).map(|_| b.take(31 * MIB)).collect();
        drop(pieces);
        if b.allocator.caps().vmm {
            drop(b.take(250 * MIB));
        } else {
            // Segments cannot be joined; what fits one of them is served without the driver.
            let calls = b.allocator.stats().driver_calls;
            drop(b.take(30 * MIB));
            assert_eq!(b.allocator.stats().driver_calls, calls);
        }
        b.check();
    }
}

#[test]
fn small_requests_do_not_take_large_blocks() {
    let b = Bench::new(1 << 40);
    let held: Vec<_> = (0..1000).map(|_| b.take(300)).collect();
    assert!(b.allocator.stats().reserved <= 2 * MIB, "{:?}", b.allocator.stats());
    drop(held);
    let small = b.take(1);
    let s = b.allocator.stats();
    assert!(s.reserved <= 2 * MIB);
    drop(small);
    drop(b.take(8 << 30));
    let reserved = b.allocator.stats().reserved;
    let mid = b.take(257 * MIB);
    // The rest of the cached block is there for others.
    let rest = b.take((7 << 30) + 700 * MIB);
    assert_eq!(b.allocator.stats().reserved, reserved);
    drop((mid, rest));
    b.check();
}

#[test]
fn huge_sizes_do_not_wrap() {
    let b = Bench::new(256 * MIB);
    for size in [u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 60) + 1, 1 << 60, 1 << 48, 300 * MIB] {
        for align in [256, 4096, 2 * MIB, 1 << 62] {
            let got = b.allocator.alloc(Layout { size, align }, On::new(&b.stream));
            // An alignment that nothing has is another error, for a size that something might have.
            let strange = align > 1 << 30 && size < 1 << 40;
            assert!(
                matches!(got, Err(Error::OutOfMemory(_)))
                    || strange && matches!(got, Err(Error::Unsupported(_))),
                "{size} aligned to {align}: {got:?}"
            );
        }
    }
    assert!(matches!(
        b.allocator.alloc(Layout { size: 8, align: 3 }, On::new(&b.stream)),
        Err(Error::InvalidArgument(_))
    ));
    assert!(matches!(
        b.allocator.alloc(Layout { size: 8, align: 0 }, On::new(&b.stream)),
        Err(Error::InvalidArgument(_))
    ));
    drop(b.take(64 * MIB));
    b.check();
}

#[test]
fn pins_stop_trimming_not_sharing() {
    let b = Bench::new(256 * MIB);
    // 76 graphs, one per batch size, that never run together: the largest first.
    let first = b.allocator.arena().expect("an arena");
    let mut arenas = vec![first];
    for _ in 1..76 {
        // SAFETY: the backing is a fake, whose memory nobody uses.
        let next = unsafe { arenas[0].share() };
        arenas.push(next);
    }
    for (i, arena) in arenas.iter().enumerate() {
        let t = arena.alloc(Layout::new((76 - i as u64) * MIB)).expect("a symbolic buffer");
        let used = Lifetime { symbol: t.addr(), first: 0, last: 1, live_at_end: false };
        drop(t);
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&[used], On::new(&b.stream)) }.expect("a sealed arena");
    }
    assert!(b.allocator.stats().reserved <= 78 * MIB, "{:?}", b.allocator.stats());
    let largest = arenas.remove(0);
    drop(arenas);
    b.allocator.trim(0).expect("a trim");
    assert!(b.allocator.stats().reserved >= 76 * MIB, "the last graph still has its memory");
    drop(largest);
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
}

#[test]
fn reuse_respects_size_and_alignment() {
    let b = Bench::new(256 * MIB);
    drop(b.take(64));
    let big = b.allocator.alloc(Layout::aligned(MIB, 4096), On::new(&b.stream)).expect("1 MiB");
    assert_eq!(big.addr() % 4096, 0);
    assert!(b.fake.is_backed(big.addr(), MIB));
    for shift in 8..24 {
        let x = b
            .allocator
            .alloc(Layout::aligned(100, 1 << shift), On::new(&b.stream))
            .expect("aligned");
        assert_eq!(x.addr() % (1 << shift), 0);
    }
    b.check();
}

#[test]
fn idle_stream_does_not_strand_memory() {
    let b = Bench::new(256 * MIB);
    let side = VirtualStream::new().expect("a timeline");
    // A side stream uses most of the device once, and never again. Nobody asks it anything
    // afterwards.
    let big = b.allocator.alloc(Layout::new(200 * MIB), On::new(&side)).expect("200 MiB");
    let p = side.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { big.mark_write(p) };
    drop(big);
    side.complete(p.value());
    drop(b.take(220 * MIB));
    b.check();
}

#[test]
fn partial_map_failure_is_undone() {
    let b = Bench::new(256 * MIB);
    let keep = b.take(8 * MIB);
    for (call, most) in [(Call::Create, 3), (Call::Map, 3), (Call::Enable, 1)] {
        for k in 0..most {
            b.fake.fail(call, Fault::From(k));
            assert!(b.alloc(200 * MIB).is_err(), "{call:?} from {k}");
            b.fake.heal();
            b.check();
            assert_eq!(b.allocator.stats().reserved, b.fake.used());
        }
    }
    drop(b.take(200 * MIB));
    drop(keep);
    b.check();
}

#[test]
fn failed_allocation_leaves_the_pool_usable() {
    for fake in [FakeBacking::new(64 * MIB), FakeBacking::segments(64 * MIB)] {
        let b = Bench::with(fake, AllocatorConfig::default());
        let held: Vec<_> = (0..4).map(|_| b.take(10 * MIB)).collect();
        for _ in 0..100 {
            let err = b.alloc(100 * MIB).expect_err("more than there is");
            assert!(
                matches!(&err, Error::OutOfMemory(r) if r.requested == 100 * MIB && r.live == 40 * MIB),
                "{err}"
            );
        }
        drop(held);
        drop(b.take(20 * MIB));
        b.check();
    }
}

#[test]
fn pinned_sizes_are_exact() {
    let caps = BackingCaps { physical: 1 << 40, segment: 32 * MIB, ..BackingCaps::default() };
    let config = AllocatorConfig { host_kind: HostKind::Pinned, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::with_caps(caps), config);
    let asked = 20 * 1024 * MIB + 400 * MIB;
    let pinned = b.take(asked);
    assert_eq!(pinned.host_kind(), HostKind::Pinned);
    assert!(b.allocator.stats().reserved <= asked + 2 * MIB, "{:?}", b.allocator.stats());
}

#[test]
fn foreign_thread_free_neither_syncs_nor_strands() {
    let b = Bench::new(64 * MIB);
    for _ in 0..50 {
        let buffers: Vec<_> = [1000, 100_000, 30 * MIB].into_iter().map(|n| b.take(n)).collect();
        let p = b.stream.submit().expect("a value");
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        buffers.iter().for_each(|x| unsafe { x.mark_write(p) });
        let calls = b.allocator.stats().driver_calls;
        std::thread::scope(|s| s.spawn(|| drop(buffers)).join()).expect("the freeing thread");
        assert_eq!(b.allocator.stats().driver_calls, calls);
        assert_eq!(b.stream.host_waits(), 0);
        assert_eq!(b.allocator.stats().live, 0);
    }
    b.stream.complete(b.stream.timeline().submitted());
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
    b.check();
}

#[test]
fn a_block_in_use_by_another_stream_is_taken_only_when_there_is_no_other() {
    let b = Bench::new(64 * MIB);
    let other = VirtualStream::new().expect("a timeline");
    other.on_wait(None);
    let (addr, p) = b.freed_in_use(&other, 20 * MIB);
    let y = b.take(20 * MIB);
    assert_ne!(y.addr(), addr, "there was other memory");
    let z = b.take(20 * MIB);
    let w = b.take(20 * MIB);
    assert_eq!(w.write_timepoint().timepoint(), Some(p), "the taker is told whom to wait for");
    assert!(b.stream.timeline().knows(p.into()), "the stream was made to wait");
    assert_eq!(b.allocator.stats().inserted_waits, 1);
    drop((y, z, w));
    b.check();
}

#[test]
fn never_means_never() {
    let config = AllocatorConfig {
        cross_stream: CrossStream::Never,
        budget: 24 * MIB,
        ..AllocatorConfig::default()
    };
    let b = Bench::with(FakeBacking::new(64 * MIB), config);
    let other = VirtualStream::new().expect("a timeline");
    b.freed_in_use(&other, 20 * MIB);
    drop(b.take(20 * MIB));
    let s = b.allocator.stats();
    assert_eq!((s.inserted_waits, s.host_waits), (0, 1));
}

#[test]
fn leases_outlive_their_allocator() {
    let Bench { fake, allocator, stream } = Bench::new(256 * MIB);
    let on = On::new(&stream);
    let held: Vec<_> = [0, 100, 100_000, 5 * MIB]
        .into_iter()
        .map(|n| allocator.alloc(Layout::new(n), on).expect("fits"))
        .collect();
    let weak = held[1].downgrade();
    drop(allocator);
    assert!(fake.used() > 0);
    assert!(held[1].addr() != 0 && weak.upgrade().is_some());
    std::thread::spawn(move || drop(held)).join().expect("the freeing thread");
    assert!(weak.upgrade().is_none());
    drop(weak);
    assert_eq!(fake.outstanding(), (0, 0, 0, 0));
}

#[test]
fn what_a_stream_still_uses_is_not_torn_down() {
    let Bench { fake, allocator, stream } = Bench::new(256 * MIB);
    let x = allocator.alloc(Layout::new(5 * MIB), On::new(&stream)).expect("5 MiB");
    let (addr, p) = (x.addr(), stream.submit().expect("a value"));
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { x.mark_write(p) };
    drop(allocator);
    drop(x);
    assert!(fake.is_backed(addr, 5 * MIB), "the kernel still runs");
    stream.complete(p.value());
    given_back(&fake);
}

#[test]
fn imports_are_kept_until_their_last_use_is_over() {
    use leasehold_core::sync::Arc;
    let b = Bench::new(64 * MIB);
    let memory = Arc::new(vec![0u8; 4096]);
    // SAFETY: the vector lives as long as `keep`, and nothing here touches the memory.
    let x = unsafe {
        b.allocator.import(
            memory.as_ptr() as u64,
            4096,
            0,
            Protection::ReadWrite,
            Box::new(memory.clone()),
        )
    }
    .expect("an import");
    let s = b.allocator.stats();
    assert_eq!((s.imported, s.imported_bytes, s.live_bytes, s.reserved), (1, 4096, 0, 0));
    let p = b.stream.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { x.mark_read(p) };
    drop(x);
    b.allocator.drain();
    assert_eq!(Arc::strong_count(&memory), 2, "the copy still runs");
    b.stream.complete(p.value());
    b.allocator.drain();
    assert_eq!(Arc::strong_count(&memory), 1);
    assert_eq!(b.allocator.stats().imported, 0);
}

#[test]
fn what_an_import_kept_goes_by_calls_of_others_once_its_allocator_is_gone() {
    use leasehold_core::sync::Arc;
    let Bench { allocator, stream, .. } = Bench::new(64 * MIB);
    let memory = Arc::new(vec![0u8; 4096]);
    let (at, keep) = (memory.as_ptr() as u64, Box::new(memory.clone()));
    // SAFETY: the vector lives as long as `keep`, and nothing here touches the memory.
    let x = unsafe { allocator.import(at, 4096, 0, Protection::ReadWrite, keep) }.expect("one");
    let p = stream.submit().expect("a value");
    x.used_on(p);
    drop((x, allocator));
    Bench::new(4 * MIB).allocator.drain();
    assert_eq!(Arc::strong_count(&memory), 2, "the copy still runs");
    stream.complete(p.value());
    drain_until(|| Arc::strong_count(&memory) == 1);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn eight_threads_share_one_allocator() {
    let b = Bench::new(1 << 32);
    std::thread::scope(|s| {
        for t in 0..8u64 {
            let b = &b;
            s.spawn(move || {
                let stream = VirtualStream::new().expect("a timeline");
                let mut held = Vec::new();
                let mut rng = crate::model::Rng(t * 77 + 1);
                for i in 0..2000u64 {
                    let size =
                        if rng.below(20) == 0 { rng.below(3 * MIB) } else { rng.below(9000) };
                    let x = b.allocator.alloc(Layout::new(size), On::new(&stream)).expect("fits");
                    if i % 3 == 0 {
                        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use
                        // it too early.
                        unsafe { x.mark_write(stream.submit().expect("a value")) };
                    }
                    held.push(x);
                    if held.len() > 40 {
                        drop(held.swap_remove(rng.below(40) as usize));
                    }
                    if i % 500 == 499 {
                        b.allocator.trim(0).expect("a trim");
                    }
                }
            });
        }
    });
    b.check();
    let stats = b.allocator.stats();
    assert_eq!((stats.live, stats.live_bytes), (0, 0));
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0, "{:?}", b.allocator.stats());
}

/// When only one stream was left, its pending memory did not merge with the ready memory beside it,
/// and a piece under both was never given back.
#[test]
fn memory_beside_a_stream_that_is_gone_goes_back() {
    let b = Bench::new(256 * MIB);
    let x = b.take(MIB - 4096);
    let y = {
        let other = VirtualStream::new().expect("a timeline");
        let y = b.allocator.alloc(Layout::new(MIB + 4096), On::new(&other)).expect("memory");
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { y.mark_write(other.submit().expect("a value")) };
        y
    };
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { x.mark_write(b.stream.submit().expect("a value")) };
    drop(x);
    drop(y);
    // So long that the other stream's list is given up.
    for _ in 0..5000 {
        drop(b.take(3 * MIB));
    }
    b.allocator.drain();
    leasehold_sim::memory::pass(b.stream.timeline().now());
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
    b.check();
}

/// Threads that allocate large blocks of the same sizes on streams of their own stood at the core's
/// lock, a hundred times slower than one of them alone.
#[test]
fn threads_with_large_blocks_of_their_own_leave_the_core_alone() {
    let b = Bench::new(1 << 36);
    drop(b.take(64 * MIB));
    b.allocator.reset_peaks();
    // One thread alone keeps the last block only.
    for i in 0..200 {
        drop(b.take((1 + i % 2) * 4 * MIB));
    }
    assert_eq!(b.allocator.stats().thread_cache_hits, 0);
    // Where threads find the lock taken, they keep their blocks.
    let pairs = |threads: u64, pairs: u64, sizes: fn(u64) -> u64| {
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    let stream = VirtualStream::new().expect("a timeline");
                    for i in 0..pairs {
                        drop(
                            b.allocator
                                .alloc(Layout::new(sizes(i)), On::new(&stream))
                                .expect("fits"),
                        );
                    }
                });
            }
        });
    };
    let mut stats = b.allocator.stats();
    for _ in 0..1000 {
        pairs(4, 1000, |i| (1 + i % 2) * 4 * MIB - i % 7);
        stats = b.allocator.stats();
        if stats.thread_cache_hits > 150 {
            break;
        }
    }
    assert!(stats.thread_cache_hits > 150, "{stats:?}");
    assert_eq!(
        (stats.live, stats.live_bytes, stats.live_peak <= 32 * MIB),
        (0, 0, true),
        "{stats:?}"
    );
    // Sizes that do not come again are not kept for long.
    pairs(1, 200, |i| (100 + i) * 65_536);
    let stats = b.allocator.stats();
    assert!(stats.free_in_thread_caches < 64 * MIB, "{stats:?}");
    b.check();
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0, "{:?}", b.allocator.stats());
}

/// A large block that is freed and asked for again took the way through the core each time.
#[test]
fn a_large_block_that_comes_again_at_once_is_the_same() {
    let b = Bench::new(1 << 36);
    let addr = b.take(3 * MIB).addr();
    for i in 0..100 {
        assert_eq!(b.take(3 * MIB - i).addr(), addr);
    }
    let stats = b.allocator.stats();
    assert!(stats.thread_cache_hits > 90, "{stats:?}");
    assert_eq!((stats.live_peak, stats.free_in_thread_caches), (3 * MIB, 3 * MIB));
    // Another size finds the memory merged.
    let other = b.take(4 * MIB);
    assert_eq!((other.addr(), b.allocator.stats().free_in_thread_caches), (addr, 0));
}

fn compact() -> Bench {
    let config = AllocatorConfig { policy: Policy::Compact, ..AllocatorConfig::default() };
    Bench::with(FakeBacking::new(1 << 30), config)
}

/// Nearly free memory was waited for only if it was all that a request lacked; otherwise all of it
/// was taken from the driver.
#[test]
fn nearly_free_memory_is_moved_though_it_is_not_enough() {
    let b = compact();
    let (first, between) = (b.take(16 * MIB), b.take(MIB));
    assert_eq!(b.allocator.stats().reserved, 18 * MIB);
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { first.mark_read(b.stream.submit().expect("a value")) };
    drop(first);
    let larger = b.take(32 * MIB);
    let stats = b.allocator.stats();
    assert_eq!((stats.reserved, stats.remaps, stats.host_waits), (34 * MIB, 1, 1));
    b.check();
    drop((between, larger));
}

/// The host waited for the device, up to 100 ms, before granules were moved that the same stream
/// had freed in front of its work. In the steps of a training that took the host's lead.
#[test]
fn a_stream_gets_granules_that_its_own_work_may_still_use() {
    let b = compact();
    let late = late_stream();
    let take = |size| b.allocator.alloc(Layout::new(size), On::new(&late)).expect("a block");
    let (first, between) = (take(16 * MIB), take(MIB));
    let (from, bytes) = (first.addr(), b.fake.memory(first.addr(), 16 * MIB));
    let end = free_in_use(&late, first);
    let larger = take(32 * MIB);
    let stats = b.allocator.stats();
    assert_eq!((stats.reserved, stats.remaps, stats.host_waits), (34 * MIB, 1, 1));
    // The memory is in both places. Nobody gets the old addresses.
    let moved = b.fake.memory(larger.addr(), 32 * MIB);
    assert!(bytes.iter().all(|run| moved.contains(run)), "{bytes:?} {moved:?}");
    assert_eq!(b.fake.memory(from, 16 * MIB), bytes);
    assert_eq!((b.allocator.trim(0).expect("a trim"), b.fake.used()), (0, 34 * MIB));
    let other = b.take(16 * MIB);
    assert!(other.addr() >= from + 16 * MIB || other.addr() + 16 * MIB <= from);
    b.check();
    // The work is over: the next growth removes the old mapping, and the addresses serve again.
    late.complete(end);
    let growth = b.take(14 * MIB);
    assert!(!b.fake.is_backed(from, 2 * MIB) || growth.addr() == from);
    b.check();
    free_in_use(&late, larger);
    drop((between, other, growth));
    late.complete(late.timeline().submitted());
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.allocator.stats().reserved, b.fake.used()), (0, 0));
    assert_eq!(b.fake.outstanding().2, 0, "nothing is mapped");
}

/// A piece whose old mapping the driver did not remove went back to the driver with a failed plan.
#[test]
fn a_piece_with_an_old_mapping_stays_in_hand() {
    for mapped in 0..20 {
        let b = compact();
        let late = late_stream();
        let take = |size| b.allocator.alloc(Layout::new(size), On::new(&late)).expect("a block");
        let (first, between) = (take(16 * MIB), take(MIB));
        let end = free_in_use(&late, first);
        let (larger, above) = (take(32 * MIB), take(3 * MIB));
        assert_eq!(b.allocator.stats().remaps, 1);
        late.complete(end);
        drop(larger);
        b.fake.fail(Call::Unmap, Fault::Once(0));
        b.fake.fail(Call::Map, Fault::From(mapped));
        let refused = b.alloc(40 * MIB);
        b.check();
        b.fake.heal();
        let other = b.take(40 * MIB);
        b.check();
        drop((between, above, refused, other));
        b.allocator.trim(0).expect("a trim");
        assert_eq!((b.allocator.stats().reserved, b.fake.used()), (0, 0), "{mapped} mapped");
    }
}

/// A backing that cannot map a piece twice gives new memory instead. So does every backing for a
/// stream in capture, whose waits fail: its graph may use the old addresses later.
#[test]
fn without_aliases_and_in_a_capture_a_late_stream_grows() {
    let caps = BackingCaps { vmm: true, reserve: true, physical: 1 << 30, ..Default::default() };
    let captured = unreachable_stream(|| Error::state("the stream is in capture"));
    for (fake, stream) in
        [(FakeBacking::with_caps(caps), late_stream()), (FakeBacking::new(1 << 30), captured)]
    {
        let config = AllocatorConfig { policy: Policy::Compact, ..AllocatorConfig::default() };
        let b = Bench::with(fake, config);
        let take = |size| b.allocator.alloc(Layout::new(size), On::new(&stream)).expect("a block");
        let (first, between) = (take(16 * MIB), take(MIB));
        free_in_use(&stream, first);
        let larger = take(32 * MIB);
        let stats = b.allocator.stats();
        assert_eq!((stats.reserved, stats.remaps), (50 * MIB, 0));
        drop((between, larger));
        b.check();
        stream.complete(stream.timeline().submitted());
    }
}

/// A large block lay within granules that it shared with its neighbours, so that one less than it
/// filled could be moved once it was free.
#[test]
fn large_blocks_of_whole_granules_leave_whole_granules() {
    let b = compact();
    let small = b.take(100 << 10);
    let (first, beside, above) = (b.take(16 * MIB), b.take(MIB), b.take(3 * MIB));
    assert_eq!(
        (first.addr() % (2 * MIB), beside.addr()),
        (0, small.addr() + (100 << 10)),
        "its neighbour fills the gap"
    );
    assert_eq!(b.allocator.stats().reserved, 22 * MIB);
    drop(first);
    let larger = b.take(20 * MIB - MIB / 4);
    assert_eq!(b.allocator.stats().reserved, 26 * MIB, "two granules more");
    b.check();
    drop((above, larger));
}

/// A thread cache's block came back with the tag of who had it before.
#[test]
fn a_block_from_a_thread_cache_has_no_tag() {
    let allocator = Allocator::new(Box::new(FakeBacking::new(1 << 30)), AllocatorConfig::default())
        .expect("an allocator");
    let stream = VirtualStream::new().expect("a timeline");
    for size in [4 << 10, 1 << 20] {
        for _ in 0..4 {
            let block = allocator.alloc(Layout::new(size), On::new(&stream)).expect("memory");
            assert_eq!(block.tag(), 0, "{size} bytes");
            block.set_tag(7);
        }
    }
    assert!(allocator.stats().thread_cache_hits > 0);
}

#[test]
fn the_peak_of_what_is_reserved_counts_no_memory_that_the_driver_refused() {
    for fake in [FakeBacking::segments(64 << 20), FakeBacking::new(64 << 20)] {
        let allocator = Allocator::new(Box::new(fake), AllocatorConfig::default()).unwrap();
        let stream = VirtualStream::new().unwrap();
        let mut live = Vec::new();
        while let Ok(block) = allocator.alloc(Layout::new(3 << 20), On::new(&stream)) {
            live.push(block);
        }
        let stats = allocator.stats();
        assert!(stats.reserved_peak <= 64 << 20, "{} of {} bytes", stats.reserved_peak, 64 << 20);
        assert_eq!(stats.reserved_peak, stats.reserved);
        drop(live);
        allocator.trim(0).unwrap();
        assert_eq!(
            (allocator.stats().reserved, allocator.stats().reserved_peak),
            (0, stats.reserved_peak)
        );
    }
}

/// A thread still frees and allocates at its end. It has its number until its thread-local values
/// are gone, whichever of them came first.
#[test]
fn a_threads_destructors_may_allocate() {
    struct Late(Arc<(Allocator, VirtualStream)>, Vec<Lease<Buffer>>, Arc<AtomicU32>);
    impl Late {
        fn take(&mut self, bytes: u64) {
            let (allocator, stream) = &*self.0;
            self.1.push(allocator.alloc(Layout::new(bytes), On::new(stream)).expect("memory"));
        }
    }
    impl Drop for Late {
        fn drop(&mut self) {
            self.2.fetch_or(if thread_number_there() == NOBODY { 2 } else { 1 }, Ordering::Relaxed);
            (0..100).for_each(|i| self.take(512 << (i % 14)));
        }
    }
    thread_local! {
        static BEFORE: RefCell<Option<Late>> = const { RefCell::new(None) };
        static AFTER: RefCell<Option<Late>> = const { RefCell::new(None) };
    }
    let memory = FakeBacking::new(1 << 30);
    let allocator =
        Allocator::new(Box::new(memory), AllocatorConfig::default()).expect("an allocator");
    let both = Arc::new((allocator, VirtualStream::new().expect("a timeline")));
    let when = Arc::new(AtomicU32::new(0));
    for _ in 0..5 {
        let late = || Late(both.clone(), Vec::new(), when.clone());
        let (mut one, other) = (late(), late());
        let run = move || {
            BEFORE.set(None);
            (0..100).for_each(|_| one.take(4096));
            BEFORE.set(Some(one));
            AFTER.set(Some(other));
        };
        thread::spawn(run).join().expect("a thread");
    }
    both.0.check().expect("the invariants");
    assert_eq!(both.0.stats().live_bytes, 0);
    assert_eq!(when.load(Ordering::Relaxed), 1, "each came before the number went back");
}
