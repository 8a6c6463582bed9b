//! The depot: small blocks that full thread caches gave away serve the next request on their
//! stream, and are given up as caches are.

use crate::Bench;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::Lease;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_sim::memory::VirtualStream;
use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
const BLOCK: u64 = 64 << 10;
const BATCH: u64 = 1000;

fn batch(b: &Bench) -> Vec<Lease<Buffer>> {
    (0..BATCH).map(|_| b.take(BLOCK)).collect()
}

/// An allocator whose depot has so many bytes, since another thread contended for its lock. The
/// other thread must meet this one, so the two try until they did.
fn filled(bytes: u64) -> Bench {
    let b = Bench::new(256 * GIB);
    let full = || b.allocator.stats().free_in_thread_caches > bytes;
    let end = Instant::now() + Duration::from_secs(60);
    while !full() {
        assert!(Instant::now() < end, "{:?}", b.allocator.stats());
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            let contender = s.spawn(|| {
                let other = VirtualStream::new().expect("a timeline");
                for i in 0.. {
                    drop(b.allocator.alloc(Layout::new((100 + i % 100) << 10), On::new(&other)));
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let _ = (0..5000).take_while(|_| !full()).map(|_| drop(batch(&b))).count();
            done.store(true, Ordering::Relaxed);
            // The end of a thread empties its cache. The end of the scope does not wait for that.
            contender.join().expect("the contending thread");
        });
    }
    b
}

#[test]
fn batches_come_from_the_depot() {
    let b = filled(BATCH * BLOCK);
    let before = b.allocator.stats();
    assert!(before.free_in_thread_caches > BATCH * BLOCK, "{before:?}");
    let held = batch(&b);
    b.check();
    let stats = b.allocator.stats();
    assert!(stats.thread_cache_hits - before.thread_cache_hits > BATCH * 9 / 10, "{stats:?}");
    assert_eq!((stats.live, stats.live_bytes), (held.len() as u64, BATCH * BLOCK));
    assert_eq!(stats.reserved, before.reserved);
}

/// Another thread's list is as good as one's own; a shard's few sets of bins do not limit it.
#[test]
fn what_one_thread_frees_another_gets() {
    let b = Bench::new(256 * GIB);
    let pass = || {
        let before = b.allocator.stats().thread_cache_hits;
        let (send, receive) = sync_channel::<Vec<Lease<Buffer>>>(2);
        std::thread::scope(|s| {
            let allocator = &b.allocator;
            s.spawn(move || {
                let other = VirtualStream::new().expect("a timeline");
                for parcel in receive {
                    drop(parcel);
                    drop(allocator.alloc(Layout::new(BLOCK), On::new(&other)));
                }
            });
            for _ in 0..200 {
                send.send((0..100).map(|_| b.take(4 << 10)).collect()).expect("the other thread");
            }
            drop(send);
        });
        b.allocator.stats().thread_cache_hits - before
    };
    // From when the two have found the heap's lock taken. A check holds it long enough to be met,
    // even by threads that share one processor.
    let done = AtomicBool::new(false);
    let reached = std::thread::scope(|s| {
        s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                b.allocator.check().expect("the invariants");
            }
        });
        let reached = (0..200).any(|_| pass() > 5_000);
        done.store(true, Ordering::Relaxed);
        reached
    });
    assert!(reached, "{:?}", b.allocator.stats());
    b.check();
    b.allocator.trim(0).expect("a trim");
    let stats = b.allocator.stats();
    assert_eq!(
        (stats.live, stats.free_in_thread_caches, stats.reserved, b.fake.used()),
        (0, 0, 0, 0)
    );
}

#[test]
fn memory_in_the_depot_is_given_up_before_more_is_taken() {
    let b = filled(BATCH / 2 * BLOCK);
    let reserved = b.allocator.stats().reserved;
    // The block fits only where the batches lay. A few granules have blocks that the other thread's
    // cache keeps, and cannot move.
    let large = b.take(reserved - (16 << 20));
    let stats = b.allocator.stats();
    // (The other thread keeps some large blocks.)
    assert!(stats.reserved == reserved && stats.free_in_thread_caches < 4 << 20, "{stats:?}");
    drop(large);
    b.check();
}

#[test]
fn blocks_in_the_depot_do_not_outlive_the_allocator() {
    let b = filled(BATCH / 2 * BLOCK);
    let last = b.take(BLOCK);
    let Bench { fake, allocator, stream } = b;
    assert!(allocator.stats().free_in_thread_caches > 0);
    drop(allocator);
    assert!(fake.used() > 0);
    drop(last);
    assert_eq!((fake.used(), fake.violations()), (0, Vec::new()));
    drop(stream);
}

/// Batches of many sizes on more streams than there are bins; two threads.
#[test]
fn no_block_is_lent_twice() {
    let b = Bench::new(256 * GIB);
    std::thread::scope(|s| {
        for seed in 1..3u64 {
            let allocator = &b.allocator;
            s.spawn(move || {
                let streams: Vec<_> =
                    (0..20).map(|_| VirtualStream::new().expect("a timeline")).collect();
                let mut state = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed);
                let mut below = move |n: u64| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) % n
                };
                let mut held = Vec::new();
                for round in 0..120 {
                    let stream = &streams[below(20) as usize];
                    let most = [BLOCK, 3000, 300][below(3) as usize];
                    for _ in 0..below(400) {
                        let size = most - below(most / 8);
                        held.push(
                            allocator.alloc(Layout::new(size), On::new(stream)).expect("memory"),
                        );
                    }
                    if round % 20 == 0 {
                        let mut lent = BTreeMap::new();
                        assert!(
                            held.iter().all(|x| lent.insert(x.addr(), x.len()).is_none()),
                            "one address twice"
                        );
                        let (from, to) = (lent.iter(), lent.keys().skip(1));
                        from.zip(to).for_each(|((at, len), next)| {
                            assert!(at + len <= *next, "blocks overlap")
                        });
                    }
                    let keep = below(held.len() as u64 + 1) as usize;
                    held.drain(keep..);
                }
            });
        }
    });
    b.check();
    assert_eq!(b.allocator.stats().live, 0);
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.fake.used(), 0);
}
