//! Annexes: what lies in them obeys streams, is freed from any thread, is found by address, and is nobody's private memory when there is
//! no other. Every thread has one from the beginning here (`annex_after: 0`); when they come and go otherwise is tested beside them.

use crate::{Bench, MIB};
use leasehold_alloc::{Allocator, AllocatorConfig, BlockState, Buffer, Layout, On, Policy};
use leasehold_alloc_bench::{Call, FakeBacking, Fault};
use leasehold_alloc_bench::{VirtualStream, pass};
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Timeline};
use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;

/// Blocks of up to 2 MiB lie in annexes, whose segments are of 8 MiB.
fn config() -> AllocatorConfig {
    AllocatorConfig { annex_after: 0, annex_bytes: 8 * MIB, ..AllocatorConfig::default() }
}

fn bench(fake: FakeBacking) -> Bench {
    Bench::with(fake, config())
}

fn both() -> [FakeBacking; 2] {
    [FakeBacking::new(1 << 30), FakeBacking::segments(1 << 30)]
}

/// Everything is free: it goes back whole.
fn empty(b: &Bench) {
    b.allocator.trim(0).expect("a trim");
    b.allocator.check().expect("the invariants");
    let stats = b.allocator.stats();
    assert_eq!((stats.live, stats.live_bytes, stats.reserved, stats.free_in_annexes), (0, 0, 0, 0), "{stats:?}");
    assert_eq!((b.fake.used(), b.fake.violations()), (0, Vec::new()));
}

#[test]
fn blocks_lie_in_segments_and_segments_go_back() {
    for fake in both() {
        let b = Bench::with(fake, AllocatorConfig { magazine_large_bytes: 0, ..config() });
        let held: Vec<_> = (0..40).map(|i| b.take(100_000 + i * 40_000)).collect();
        b.allocator.check().expect("the invariants");
        let stats = b.allocator.stats();
        assert!(stats.free_in_annexes > 0, "{stats:?}");
        assert_eq!((stats.live, stats.live_bytes), (40, held.iter().map(|h| h.len()).sum::<u64>()));
        assert!(stats.reserved <= stats.live_bytes + 10 * MIB, "{stats:?}");
        drop(held);
        b.allocator.check().expect("the invariants");
        let stats = b.allocator.stats();
        assert_eq!(stats.free_in_annexes, 8 * MIB, "one segment is kept: {stats:?}");
        b.allocator.drain();
        assert_eq!(b.allocator.stats().free_in_annexes, 0, "and given up by a drain");
        empty(&b);
    }
}

/// A block of an annex may lie in a magazine between two of the same size, which is how most of them come: the annex's own way takes twice as long.
#[test]
fn magazines_keep_blocks_of_annexes() {
    for fake in both() {
        let b = bench(fake);
        let held: Vec<_> = (0..8).map(|i| b.take(100_000 + i * 40_000)).collect();
        let hits = |n: u64, of: u64| {
            let before = b.allocator.stats().magazine_hits;
            (0..n).for_each(|_| drop(b.take(of)));
            b.allocator.stats().magazine_hits - before
        };
        // The first makes the shard the thread's.
        assert_eq!(hits(10, MIB), 8);
        let stats = b.allocator.stats();
        assert_eq!((stats.live, stats.live_bytes), (8, held.iter().map(|h| h.len()).sum::<u64>()));
        assert!(stats.free_in_magazines >= MIB && stats.free_in_annexes > 0, "{stats:?}");
        b.allocator.check().expect("the invariants");
        // Another size displaces it, into the annex.
        assert_eq!((hits(1, MIB / 2), hits(10, MIB / 2)), (0, 10));
        b.allocator.check().expect("the invariants");
        b.allocator.drain();
        assert_eq!((b.allocator.stats().free_in_magazines, hits(1, MIB / 2)), (0, 0));
        b.allocator.check().expect("the invariants");
        drop(held);
        empty(&b);
    }
}

/// The allocator goes while a magazine keeps a block of an annex and another one is still out.
#[test]
fn an_orphan_counts_what_magazines_kept_of_annexes() {
    for fake in both() {
        let Bench { allocator, fake, stream } = bench(fake);
        let out = allocator.alloc(Layout::new(MIB), On::new(&stream)).expect("memory");
        (0..3).for_each(|_| drop(allocator.alloc(Layout::new(2 * MIB - 1), On::new(&stream)).expect("memory")));
        assert!(allocator.stats().free_in_magazines > 0);
        drop(allocator);
        assert!(fake.used() > 0);
        drop(out);
        assert_eq!((fake.used(), fake.violations()), (0, Vec::new()));
    }
}

#[test]
fn what_is_kept_elsewhere_stays_out() {
    let graph = bench(FakeBacking::new(1 << 30));
    let _kept = [graph.take(60_000), graph.take(3 * MIB)];
    let _aligned = graph.allocator.alloc(Layout::aligned(MIB, 1 << 20), On::new(&graph.stream)).expect("memory");
    assert_eq!(graph.allocator.stats().free_in_annexes, 0);
    for config in [
        AllocatorConfig { policy: Policy::Compact, ..config() },
        AllocatorConfig { annex_bytes: 0, ..config() },
        AllocatorConfig { trace_events: 16, ..config() },
    ] {
        let b = Bench::with(FakeBacking::new(1 << 30), config);
        let _held = b.take(MIB);
        assert_eq!(b.allocator.stats().free_in_annexes, 0);
    }
}

/// I8: what a stream may still use is lent to that stream only.
#[test]
fn another_stream_waits_for_its_turn() {
    for fake in both() {
        let b = bench(fake);
        let other = VirtualStream::new().expect("a line");
        let take = |on: &VirtualStream| b.allocator.alloc(Layout::new(MIB), On::new(on)).expect("memory");
        // The other stream is known, so that lanes are apart.
        drop(take(&other));
        let block = take(&b.stream);
        let (at, used) = (block.addr(), b.stream.submit().expect("a value"));
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { block.mark_write(used) };
        drop(block);
        let theirs = take(&other);
        assert_ne!(theirs.addr(), at, "lent while it is in use");
        let mine = take(&b.stream);
        assert_eq!((mine.addr(), mine.write_stamp().point()), (at, Some(used)), "free at once for its own stream");
        drop(mine);
        pass(used);
        b.allocator.drain();
        assert_eq!(take(&other).addr(), at, "and for all once it is over");
        drop(theirs);
        empty(&b);
    }
}

/// A segment that a stream may still use goes back to the core under that stream's stamp.
#[test]
fn a_segment_goes_back_while_its_last_use_goes_on() {
    for fake in both() {
        let b = bench(fake);
        let other = VirtualStream::new().expect("a line");
        let held: Vec<_> = (0..12).map(|_| b.take(2 * MIB)).collect();
        let used = b.stream.submit().expect("a value");
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        held.iter().for_each(|h| unsafe { h.mark_write(used) });
        let ranges: Vec<_> = held.iter().map(|h| h.addr()..h.addr() + h.len()).collect();
        drop(held);
        b.allocator.check().expect("the invariants");
        let theirs: Vec<_> = (0..8)
            .map(|_| b.allocator.alloc(Layout::new(3 * MIB), On::new(&other)).expect("memory"))
            .filter(|t| ranges.iter().any(|r| r.start < t.addr() + t.len() && t.addr() < r.end))
            .collect();
        assert!(theirs.iter().all(|t| t.write_stamp().point() == Some(used)), "lent without the wait");
        pass(used);
        drop(theirs);
        empty(&b);
    }
}

/// A block that two streams may still use keeps its row until they are done, wherever the row is by then.
#[test]
fn several_streams_may_still_use_a_block() {
    for recalled in [false, true] {
        let b = bench(FakeBacking::new(1 << 30));
        let other = VirtualStream::new().expect("a line");
        let (block, _keeps) = (b.take(MIB), b.take(MIB));
        let (mine, theirs) = (b.stream.submit().expect("a value"), other.submit().expect("a value"));
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { block.mark_write(mine) };
        block.used_on(theirs);
        let at = block.addr();
        drop(block);
        b.allocator.check().expect("the invariants");
        if recalled {
            b.allocator.trim(0).expect("a trim");
            b.allocator.check().expect("the invariants");
            assert!(b.fake.is_backed(at, MIB), "given to the driver while it is in use");
        }
        // What is aligned comes from the core.
        let layout = Layout::aligned(MIB, if recalled { MIB } else { 256 });
        let next = || b.allocator.alloc(layout, On::new(&b.stream)).expect("memory").addr();
        assert_ne!(next(), at);
        pass(mine);
        b.allocator.drain();
        assert_ne!(next(), at);
        pass(theirs);
        b.allocator.drain();
        assert_eq!(next(), at);
        b.allocator.check().expect("the invariants");
    }
}

#[test]
fn blocks_are_freed_late_on_other_threads() {
    let b = bench(FakeBacking::new(1 << 30));
    let (send, receive) = sync_channel::<Lease<Buffer>>(64);
    std::thread::scope(|s| {
        s.spawn(|| receive.into_iter().for_each(drop));
        for i in 0..3000u64 {
            send.send(b.take(70_000 + i * 7919 % 2_000_000)).expect("a consumer");
        }
        drop(send);
    });
    b.allocator.check().expect("the invariants");
    empty(&b);
}

/// I16: what is free in annexes is free for everybody when there is no other memory.
#[test]
fn memory_in_annexes_is_used_before_there_is_none() {
    for fake in both() {
        let b = Bench::with(fake, AllocatorConfig { budget: 32 * MIB, ..config() });
        let mut held: Vec<_> = (0..16).map(|_| b.take(2 * MIB)).collect();
        // Every segment keeps a block, and the free ones are large together only.
        let kept: Vec<_> = held.drain(..).enumerate().filter(|(i, _)| i % 4 == 0).map(|h| h.1).collect();
        assert!(b.allocator.stats().free_in_annexes > 0);
        let large: Vec<_> = (0..4).map(|_| b.take(6 * MIB)).collect();
        b.allocator.check().expect("the invariants");
        assert_eq!(b.allocator.stats().live_bytes, 32 * MIB);
        let refused = b.allocator.alloc(Layout::new(MIB), On::new(&b.stream));
        assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");
        drop((large, kept));
        empty(&b);
    }
}

/// The free memory is in another thread's annex, in pieces that only moving granules joins.
#[test]
fn another_threads_annex_is_recalled_and_its_granules_are_moved() {
    let b = Bench::with(FakeBacking::new(1 << 30), AllocatorConfig { budget: 32 * MIB, ..config() });
    let kept = std::thread::scope(|s| {
        let fill = || (0..16).map(|_| b.take(2 * MIB)).enumerate().filter(|(i, _)| i % 2 == 0).map(|h| h.1).collect();
        s.spawn(fill).join().expect("a thread")
    });
    let kept: Vec<Lease<Buffer>> = kept;
    let large = b.take(16 * MIB);
    b.allocator.check().expect("the invariants");
    assert!(b.fake.is_backed(large.addr(), large.len()));
    assert!(kept.iter().all(|k| b.fake.is_backed(k.addr(), k.len())));
    drop((large, kept));
    empty(&b);
}

#[test]
fn a_trim_moves_live_blocks_to_the_core() {
    for fake in both() {
        let b = bench(fake);
        let mut held: Vec<_> = (0..64).map(|i| b.take(80_000 + i * 30_000)).collect();
        for i in (0..32).rev() {
            drop(held.swap_remove(i * 2));
        }
        b.allocator.trim(0).expect("a trim");
        b.allocator.check().expect("the invariants");
        let stats = b.allocator.stats();
        assert_eq!((stats.free_in_annexes, stats.live), (0, 32));
        assert!(held.iter().all(|h| b.fake.is_backed(h.addr(), h.len())));
        for h in &held {
            let found = b.allocator.holding(h.addr() + h.len() / 2, 1, u32::MAX).expect("a live buffer");
            assert_eq!((found.addr, found.row), (h.addr(), h.handle().index()));
        }
        let more: Vec<_> = (0..16).map(|_| b.take(MIB)).collect();
        b.allocator.check().expect("the invariants");
        drop((held, more));
        empty(&b);
    }
}

#[test]
fn leases_outlive_their_allocator() {
    for drops_elsewhere in [false, true] {
        let Bench { fake, allocator, stream } = bench(FakeBacking::new(1 << 30));
        let take = |size| allocator.alloc(Layout::new(size), On::new(&stream)).expect("memory");
        let held: Vec<_> = (1..20).map(|i| take(i * 100_000)).collect();
        drop(take(MIB));
        drop(allocator);
        assert!(fake.used() > 0 && held.iter().all(|h| fake.is_backed(h.addr(), h.len())));
        if drops_elsewhere {
            std::thread::spawn(move || drop(held)).join().expect("a thread");
        } else {
            drop(held);
        }
        assert_eq!((fake.outstanding(), fake.violations()), ((0, 0, 0, 0), Vec::new()));
    }
}

/// The last lease goes while a stream works: the allocator waits in its grave, annexes and all.
#[test]
fn an_orphan_waits_for_its_streams() {
    let Bench { fake, allocator, stream } = bench(FakeBacking::new(1 << 30));
    let other = VirtualStream::new().expect("a line");
    let take = || allocator.alloc(Layout::new(MIB), On::new(&stream)).expect("memory");
    let (one, two) = (take(), take());
    let (mine, theirs) = (stream.submit().expect("a value"), other.submit().expect("a value"));
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { one.mark_write(mine) };
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { two.mark_write(mine) };
    two.used_on(theirs);
    let ranges = [one.addr(), two.addr()];
    drop(allocator);
    drop((one, two));
    assert!(ranges.iter().all(|&at| fake.is_backed(at, MIB)), "given to the driver while it is in use");
    pass(mine);
    pass(theirs);
    // Any allocator's slow path sweeps the graves.
    Bench::new(1 << 24).allocator.drain();
    assert_eq!((fake.outstanding(), fake.violations()), ((0, 0, 0, 0), Vec::new()));
}

#[test]
fn buffers_are_found_and_shown_where_they_lie() {
    let b = bench(FakeBacking::new(1 << 30));
    let held: Vec<_> = (1..30).map(|i| b.take(i * 70_000)).collect();
    drop(b.take(MIB));
    for h in &held {
        for at in [0, h.len() / 2, h.len() - 1] {
            let found = b.allocator.holding(h.addr() + at, 1, u32::MAX).expect("a live buffer");
            assert_eq!((found.addr, found.len, found.row), (h.addr(), h.len(), h.handle().index()));
        }
        assert!(b.allocator.holding(h.addr() + h.len(), 1, u32::MAX).is_none_or(|f| f.addr != h.addr()));
    }
    let snapshot = b.allocator.snapshot();
    let mut live = BTreeMap::new();
    for segment in &snapshot.segments {
        let mut at = segment.addr;
        for block in &segment.blocks {
            assert_eq!(block.addr, at, "the blocks do not tile {segment:?}");
            at += block.bytes;
            if block.state == BlockState::Live {
                live.insert(block.addr, block.requested);
            }
        }
        assert_eq!(at, segment.addr + segment.bytes);
    }
    assert_eq!(live, held.iter().map(|h| (h.addr(), h.len())).collect());
    assert_eq!(b.allocator.leak_report().buffers.len(), held.len());
    let stats = b.allocator.stats();
    assert!(stats.live_peak >= stats.live_bytes);
    b.allocator.reset_peaks();
    assert_eq!(b.allocator.stats().live_peak, stats.live_bytes);
}

/// Whatever the driver refuses while a segment is taken, the request itself is served if it can be, and nothing is lost.
#[test]
fn the_driver_fails_while_a_segment_is_taken() {
    for call in [Call::Create, Call::Map, Call::Enable, Call::Commit] {
        for n in 0..6 {
            for fake in both() {
                fake.fail(call, Fault::Once(n));
                let b = bench(fake);
                let held: Vec<_> =
                    (0..24).filter_map(|_| b.allocator.alloc(Layout::new(MIB), On::new(&b.stream)).ok()).collect();
                assert!(held.len() >= 23, "{call:?} {n}");
                b.allocator.check().expect("the invariants");
                b.fake.heal();
                drop(held);
                b.allocator.trim(0).expect("a trim");
                b.allocator.check().expect("the invariants");
                assert_eq!((b.allocator.stats().reserved, b.fake.violations()), (b.fake.used(), Vec::new()));
            }
        }
    }
}

/// Threads that allocate, hand each other blocks and free them, while another recalls the annexes again and again.
#[test]
fn annexes_come_and_go_under_running_threads() {
    let steps = if cfg!(miri) { 30 } else { 20_000 };
    let b = Bench::with(FakeBacking::new(1 << 30), AllocatorConfig { budget: 192 * MIB, ..config() });
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (send, receive): (Vec<_>, Vec<_>) = (0..3).map(|_| sync_channel::<Lease<Buffer>>(4)).unzip();
        let workers: Vec<_> = receive
            .into_iter()
            .enumerate()
            .map(|(t, from)| {
                let (b, to) = (&b, send[(t + 1) % 3].clone());
                s.spawn(move || {
                    let stream = VirtualStream::new().expect("a line");
                    let mut rng = crate::model::Rng(t as u64 + 99);
                    let mut held: Vec<Lease<Buffer>> = Vec::new();
                    for _ in 0..steps {
                        let most = if rng.below(4) == 0 { 100_000 } else { 3 << 20 };
                        let size = 1 + rng.below(most);
                        let lease = b.allocator.alloc(Layout::new(size), On::new(&stream)).expect("memory");
                        if rng.below(3) == 0 {
                            let point = stream.submit().expect("a value");
                            // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
                            unsafe { lease.mark_write(point) };
                            stream.complete(point.value().saturating_sub(8));
                        }
                        held.push(lease);
                        held.extend(from.try_iter());
                        while held.len() > 14 {
                            let lease = held.swap_remove(rng.below(held.len() as u64) as usize);
                            if rng.below(4) == 0 {
                                // Nobody there any more, or busy: freed here.
                                drop(to.try_send(lease));
                            }
                        }
                    }
                    pass(stream.line().now());
                })
            })
            .collect();
        drop(send);
        let watcher = s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                b.allocator.trim(0).expect("a trim");
                b.allocator.check().expect("the invariants");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let ends: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
        done.store(true, Ordering::Relaxed);
        watcher.join().expect("the watcher");
        ends.into_iter().for_each(|end| end.expect("a worker"));
    });
    empty(&b);
}

/// The same bytes whatever the annexes do: threads on one stream.
#[test]
fn threads_share_a_stream() {
    let b = bench(FakeBacking::new(1 << 30));
    let (allocator, stream): (&Allocator, &VirtualStream) = (&b.allocator, &b.stream);
    std::thread::scope(|s| {
        for t in 0..3u64 {
            s.spawn(move || {
                let mut held = Vec::new();
                for i in 0..500u64 {
                    held.push(
                        allocator
                            .alloc(Layout::new(70_000 + (i * 31 + t) * 997 % MIB), On::new(stream))
                            .expect("memory"),
                    );
                    if held.len() > 20 {
                        drop(held.swap_remove((i * 7 % 20) as usize));
                    }
                }
            });
        }
    });
    b.allocator.check().expect("the invariants");
    empty(&b);
}
