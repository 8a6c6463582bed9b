//! Graph arenas: every state against every call, and what is kept alive by whom.

use crate::{Bench, MIB};
use leasehold_alloc::{AllocatorConfig, GraphArena, Layout, Lifetime, On, SYMBOLIC};
use leasehold_core::{Error, Result};
use leasehold_sim::memory::FakeBacking;

fn used(symbol: u64, first: u32, last: u32) -> Lifetime {
    Lifetime { symbol, first, last, live_at_end: false }
}

/// An arena with one temporary, sealed or not.
fn at(b: &Bench, sealed: bool) -> GraphArena {
    let arena = b.allocator.arena().expect("an arena");
    let x = arena.alloc(Layout::new(4 * MIB)).expect("a symbolic buffer");
    let lifetimes = [used(x.addr(), 0, 1)];
    drop(x);
    if sealed {
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    }
    arena
}

#[test]
fn every_illegal_edge_is_an_error_and_changes_nothing() {
    let b = Bench::new(256 * MIB);
    type Step = (&'static str, fn(&Bench, &GraphArena) -> Result<()>, bool);
    let steps: [Step; 3] = [
        ("alloc", |_, a| a.alloc(Layout::new(4 * MIB)).map(drop), false),
        // SAFETY: the backing is a fake, whose memory nobody uses.
        ("seal", |b, a| unsafe { a.seal(&[], On::new(&b.stream)) }.map(drop), false),
        ("launch", |_, a| a.launch().map(drop), true),
    ];
    for sealed in [false, true] {
        for (name, step, legal) in &steps {
            let arena = at(&b, sealed);
            let bytes = arena.bytes();
            let result = step(&b, &arena);
            assert_eq!(result.is_ok(), *legal == sealed, "{name}, sealed {sealed}: {result:?}");
            if result.is_err() {
                assert_eq!(arena.launch().is_ok(), sealed, "{name} changed the state");
                assert_eq!(arena.bytes(), bytes, "{name} changed the memory");
            }
            drop(arena);
            b.check();
        }
    }
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
}

#[test]
fn disjoint_lifetimes_share_and_overlapping_ones_do_not() {
    let b = Bench::new(256 * MIB);
    let arena = b.allocator.arena().expect("an arena");
    let sizes = [4 * MIB, 4 * MIB, 4 * MIB];
    let held: Vec<_> =
        sizes.iter().map(|&n| arena.alloc(Layout::new(n)).expect("symbolic")).collect();
    let symbols: Vec<u64> = held.iter().map(|x| x.addr()).collect();
    assert!(held.iter().all(|x| x.is_symbolic() && x.addr() & SYMBOLIC != 0));
    drop(held);
    let lifetimes = [used(symbols[0], 0, 1), used(symbols[1], 1, 2), used(symbols[2], 2, 3)];
    // SAFETY: the backing is a fake, whose memory nobody uses.
    let bindings = unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    let addr: Vec<u64> = symbols.iter().map(|&s| bindings.resolve(s).expect("bound")).collect();
    assert_eq!(addr[0], addr[2]);
    assert!(addr[1].abs_diff(addr[0]) >= 4 * MIB);
    assert_eq!(bindings.resolve(symbols[1] + 77), Some(addr[1] + 77), "views stay identifiable");
    assert_eq!(bindings.resolve(symbols[2] + 4 * MIB + 4096), None);
    assert_eq!(bindings.bytes, 8 * MIB);
}

#[test]
fn an_output_outlives_its_graph() {
    let b = Bench::new(256 * MIB);
    let arena = b.allocator.arena().expect("an arena");
    let out = arena.alloc(Layout::new(3 * MIB)).expect("symbolic");
    let temp = arena.alloc(Layout::new(3 * MIB)).expect("symbolic");
    let lifetimes = [used(out.addr(), 0, 0), used(temp.addr(), 1, 1)];
    let temp_symbol = temp.addr();
    drop(temp);
    // SAFETY: the backing is a fake, whose memory nobody uses.
    let bindings = unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    assert!(!out.is_symbolic() && b.fake.is_backed(out.addr(), 3 * MIB));
    let temp_addr = bindings.resolve(temp_symbol).expect("bound");
    assert!(temp_addr.abs_diff(out.addr()) >= 3 * MIB, "a held buffer is wanted after the list");
    let addr = out.addr();
    drop(arena);
    b.allocator.trim(0).expect("a trim");
    assert!(b.fake.is_backed(addr, 3 * MIB));
    drop(out);
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
    assert_eq!(b.allocator.stats().in_graphs, 0);
}

/// An arena, sealed, of a group, with one temporary of `bytes`.
fn shared(b: &Bench, with: &GraphArena, bytes: u64) -> GraphArena {
    // SAFETY: the backing is a fake, whose memory nobody uses.
    let arena = unsafe { with.share() };
    let x = arena.alloc(Layout::new(bytes)).expect("symbolic");
    let lifetimes = [used(x.addr(), 0, 0)];
    drop(x);
    // SAFETY: the backing is a fake, whose memory nobody uses.
    unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    arena
}

#[test]
fn arenas_of_a_group_use_the_same_memory_as_far_as_it_reaches() {
    let b = Bench::new(64 * MIB);
    let first = at(&b, true);
    let reserved = b.allocator.stats().reserved;
    let smaller = shared(&b, &first, 3 * MIB);
    assert_eq!((smaller.bytes(), b.allocator.stats().reserved), (4 * MIB, reserved));
    // A launch of one is a use of the memory, for the launches of all.
    let p = b.stream.submit().expect("a value");
    first.launch().expect("launches").launched(p);
    let mut uses = Vec::new();
    smaller.launch().expect("launches").for_each_use(|p| uses.extend(p.timepoint()));
    assert_eq!(uses, [p]);
    let larger = shared(&b, &first, 6 * MIB);
    assert_eq!(larger.bytes(), 6 * MIB, "the group's memory is too small");
    assert_eq!(b.allocator.stats().in_graphs, 10 * MIB);
    // The memory goes with the last of those that use it.
    drop(first);
    assert_eq!(b.allocator.stats().in_graphs, 10 * MIB);
    drop(smaller);
    assert_eq!(b.allocator.stats().in_graphs, 6 * MIB);
    larger.launch().map(drop).expect("launches");
    drop(larger);
    b.check();
    b.stream.complete(p.value());
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.allocator.stats().reserved, b.allocator.stats().in_graphs), (0, 0));
}

#[test]
fn a_plan_that_finds_no_memory_may_be_sealed_later() {
    let b = Bench::with(FakeBacking::new(64 * MIB), AllocatorConfig::default());
    let hog = b.take(40 * MIB);
    let arena = b.allocator.arena().expect("an arena");
    let x = arena.alloc(Layout::new(30 * MIB)).expect("symbolic");
    let lifetimes = [used(x.addr(), 0, 1)];
    assert!(matches!(
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&lifetimes, On::new(&b.stream)) },
        Err(Error::OutOfMemory(_))
    ));
    assert!(arena.launch().is_err());
    drop(hog);
    // SAFETY: the backing is a fake, whose memory nobody uses.
    unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    assert!(!x.is_symbolic());
}
