//! Blocks across the edges of granules that are mapped at a second address: where there is no room otherwise, with nobody's memory but their own,
//! and gone again as soon as they are free.

use crate::{Bench, MIB};
use leasehold_alloc::{AllocatorConfig, Backing, BackingCaps, Buffer, Layout, On};
use leasehold_alloc_bench::{Call, FakeBacking, Fault};
use leasehold_alloc_bench::{VirtualStream, pass};
use leasehold_core::{Error, Lease};

/// Four granules that are all there may be: 1, 3, 3 and 1 MiB, one beside the other. The first and the last are dropped, so that the beginning
/// of the first granule and the end of the last are free.
fn edges(fake: FakeBacking) -> (Bench, [Lease<Buffer>; 2]) {
    let b = Bench::with(fake, AllocatorConfig { budget: 8 * MIB, ..AllocatorConfig::default() });
    let [first, low, high, last] = [1, 3, 3, 1].map(|n| b.take(n * MIB));
    assert_eq!(
        (low.addr(), high.addr(), last.addr()),
        (first.addr() + MIB, first.addr() + 4 * MIB, first.addr() + 7 * MIB)
    );
    assert_eq!(b.allocator.stats().reserved, 8 * MIB);
    (b, [low, high])
}

fn is_apart(b: &Bench, blocks: &[&Lease<Buffer>]) {
    let mut memory: Vec<(u64, u64)> = blocks.iter().flat_map(|x| b.fake.memory(x.addr(), x.len())).collect();
    memory.sort_unstable();
    assert!(memory.windows(2).all(|m| m[0].0 + m[0].1 <= m[1].0), "{memory:x?}");
}

#[test]
fn a_block_lies_across_what_is_free_at_two_ends() {
    let (b, [low, high]) = edges(FakeBacking::new(1 << 30));
    let before = [&low, &high].map(|x| b.fake.memory(x.addr(), x.len()));
    let across = b.take(2 * MIB);
    assert_eq!((b.allocator.stats().aliased, b.allocator.stats().reserved), (2 * MIB, 8 * MIB));
    assert_eq!(b.fake.memory(across.addr(), across.len()).iter().map(|m| m.1).collect::<Vec<_>>(), [MIB, MIB]);
    is_apart(&b, &[&low, &high, &across]);
    assert_eq!([&low, &high].map(|x| b.fake.memory(x.addr(), x.len())), before, "the others stay where they are");
    b.check();
    // Nothing is left, and what is not there is not counted.
    assert!(matches!(b.alloc(64 << 10), Err(Error::OutOfMemory(_))));
    // Free, it serves whom it fits as it is; and goes home for who needs the edges themselves.
    let addr = across.addr();
    drop(across);
    let again = b.take(2 * MIB);
    assert_eq!(again.addr(), addr);
    drop(again);
    drop(low);
    let large = b.take(4 * MIB);
    assert_eq!((large.addr() + 4 * MIB, b.allocator.stats().aliased), (high.addr(), 0));
    is_apart(&b, &[&large, &high]);
    b.check();
}

#[test]
fn everything_goes_back_to_the_driver() {
    let (b, [low, high]) = edges(FakeBacking::new(1 << 30));
    let across = b.take(2 * MIB);
    drop((low, high));
    b.allocator.trim(0).expect("a trim");
    // The block, and the two granules that it lies across.
    assert_eq!((b.allocator.stats().reserved, b.fake.used(), b.allocator.stats().aliased), (4 * MIB, 4 * MIB, 2 * MIB));
    b.check();
    drop(across);
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.allocator.stats().reserved, b.fake.used(), b.allocator.stats().aliased), (0, 0, 0));
    b.check();
    let (b, held) = edges(FakeBacking::new(1 << 30));
    let fake = b.fake.clone();
    let across = b.take(2 * MIB);
    drop((b, held));
    drop(across);
    assert_eq!((fake.outstanding(), fake.violations()), ((0, 0, 0, 0), Vec::new()));
}

/// What one stream may still be using lies across edges for that stream only.
#[test]
fn edges_that_are_in_use_are_for_their_stream() {
    let config = AllocatorConfig { budget: 8 * MIB, ..AllocatorConfig::default() };
    let b = Bench::with(FakeBacking::new(1 << 30), config);
    b.allocator.set_waiter(leasehold_core::sync::Arc::new(|_, _| Err(Error::Timeout("nobody waits".into()))));
    let side = VirtualStream::new().expect("a line");
    let [first, low, high, last] = [1, 3, 3, 1].map(|n| b.take(n * MIB));
    let uses = b.stream.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { first.mark_write(uses) };
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { last.mark_write(uses) };
    drop((first, last));
    let other = b.allocator.alloc(Layout::new(2 * MIB), On::new(&side));
    assert!(matches!(other, Err(Error::OutOfMemory(_))), "{other:?}");
    let own = b.take(2 * MIB);
    assert_eq!(own.write_stamp(), uses.into(), "it still waits for what used the edges");
    is_apart(&b, &[&low, &high, &own]);
    drop(own);
    // Nor does it go home before that is over.
    assert!(b.allocator.alloc(Layout::new(3 * MIB), On::new(&side)).is_err());
    assert_eq!(b.allocator.stats().aliased, 2 * MIB);
    pass(uses);
    let other = b.allocator.alloc(Layout::new(2 * MIB), On::new(&side)).expect("nobody uses it any more");
    is_apart(&b, &[&low, &high, &other]);
    b.check();
}

/// Across two ends a block begins within a granule, so it cannot be aligned to more than blocks are anyway.
#[test]
fn alignments_hold() {
    for (align, lies) in [(256, true), (512, true), (4096, false), (2 * MIB, false)] {
        let (b, [low, high]) = edges(FakeBacking::new(1 << 30));
        match b.allocator.alloc(Layout::aligned(2 * MIB, align), On::new(&b.stream)) {
            Ok(x) => {
                assert!(lies && x.addr().is_multiple_of(align), "{align}: {:#x}", x.addr());
                is_apart(&b, &[&low, &high, &x]);
            }
            Err(e) => assert!(!lies && matches!(e, Error::OutOfMemory(_)), "{align}: {e}"),
        }
        b.check();
    }
    // With a beginning alone it begins at a granule, and has any alignment up to that.
    let b = Bench::with(FakeBacking::new(1 << 30), AllocatorConfig { budget: 8 * MIB, ..AllocatorConfig::default() });
    let [first, low, middle, last] = [1, 3, 2, 2].map(|n| b.take(n * MIB));
    drop((first, middle));
    let x =
        b.allocator.alloc(Layout::aligned(3 * MIB, 2 * MIB), On::new(&b.stream)).expect("a granule and a beginning");
    assert!(x.addr().is_multiple_of(2 * MIB) && b.allocator.stats().aliased == MIB);
    is_apart(&b, &[&low, &last, &x]);
    b.check();
}

#[test]
fn a_backing_that_maps_a_piece_once_is_not_asked_for_more() {
    let caps = BackingCaps { alias: false, ..FakeBacking::new(1 << 30).caps() };
    let (b, _held) = edges(FakeBacking::with_caps(caps));
    assert!(matches!(b.alloc(2 * MIB), Err(Error::OutOfMemory(_))));
    assert_eq!(b.allocator.stats().aliased, 0);
    b.check();
}

/// Whichever call fails: no block has another one's memory, and nothing is lost but what the driver keeps.
#[test]
fn every_call_may_fail() {
    for call in [Call::Map, Call::Enable, Call::Unmap] {
        for fault in (0..6).flat_map(|k| [Fault::Once(k), Fault::From(k)]) {
            let (b, [low, high]) = edges(FakeBacking::new(1 << 30));
            b.fake.fail(call, fault);
            let across = b.alloc(2 * MIB);
            let mut all = vec![&low, &high];
            all.extend(&across);
            is_apart(&b, &all);
            b.allocator.check().expect("the invariants");
            drop(across);
            // It goes home, if the driver lets it.
            drop(b.alloc(3 * MIB));
            b.check();
            b.fake.heal();
            drop((low, high));
            b.allocator.trim(0).expect("a trim");
            let s = b.allocator.stats();
            assert_eq!(s.reserved, s.quarantined, "{call:?} {fault:?}: {s:?}");
            assert_eq!((s.reserved, s.aliased), (b.fake.used(), 0), "{call:?} {fault:?}");
            if matches!(call, Call::Map | Call::Enable) {
                assert_eq!(s.reserved, 0, "{call:?} {fault:?}: what was undone is not lost");
            }
            b.check();
        }
    }
}
