//! Graph arenas: every state against every call, what is kept alive by whom, suspension, and the
//! packer against its bound.

use crate::model::Rng;
use crate::{Bench, MIB};
use leasehold_alloc::planner::{Interval, plan};
use leasehold_alloc::{
    Allocator, AllocatorConfig, ArenaState, Backing, BackingCaps, Buffer, Chunk,
};
use leasehold_alloc::{GraphArena, Layout, Lifetime, On, SYMBOLIC};
use leasehold_alloc_bench::FakeBacking;
use leasehold_alloc_bench::VirtualStream;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result};

fn used(symbol: u64, first: u32, last: u32) -> Lifetime {
    Lifetime { symbol, first, last, live_at_end: false }
}

/// An arena in the given state.
fn at(b: &Bench, state: ArenaState) -> GraphArena {
    let arena = b.allocator.arena().expect("an arena");
    let x = arena.alloc(Layout::new(4 * MIB)).expect("a symbolic buffer");
    let lifetimes = [used(x.addr(), 0, 1)];
    drop(x);
    let on = On::new(&b.stream);
    match state {
        ArenaState::Planning => {}
        // SAFETY: the backing is a fake, whose memory nobody uses.
        ArenaState::Sealed => drop(unsafe { arena.seal(&lifetimes, on) }.expect("seals")),
        ArenaState::Suspended => {
            // SAFETY: the backing is a fake, whose memory nobody uses.
            unsafe { arena.seal(&lifetimes, on) }.expect("seals");
            arena.suspend(on, |_, _| Ok(())).expect("suspends");
        }
        ArenaState::Aborted => arena.abort().expect("aborts"),
    }
    assert_eq!(arena.state(), state);
    arena
}

#[test]
fn every_illegal_edge_is_an_error_and_changes_nothing() {
    use ArenaState::{Aborted, Planning, Sealed, Suspended};
    let b = Bench::new(256 * MIB);
    type Step = (&'static str, fn(&Bench, &GraphArena) -> Result<()>, &'static [ArenaState]);
    let steps: [Step; 6] = [
        ("alloc", |_, a| a.alloc(Layout::new(4 * MIB)).map(drop), &[Planning]),
        // SAFETY: the backing is a fake, whose memory nobody uses.
        ("seal", |b, a| unsafe { a.seal(&[], On::new(&b.stream)) }.map(drop), &[Planning]),
        ("abort", |_, a| a.abort(), &[Planning]),
        ("launch", |_, a| a.launch().map(drop), &[Sealed]),
        ("suspend", |b, a| a.suspend(On::new(&b.stream), |_, _| Ok(())).map(drop), &[Sealed]),
        ("resume", |_, a| a.resume(|_, _| Ok(())), &[Suspended]),
    ];
    for state in [Planning, Sealed, Suspended, Aborted] {
        for (name, step, legal) in &steps {
            let arena = at(&b, state);
            let result = step(&b, &arena);
            assert_eq!(
                result.is_ok(),
                legal.contains(&state),
                "{name} while {state:?}: {result:?}"
            );
            if result.is_err() {
                assert_eq!(arena.state(), state, "{name} while {state:?}");
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

/// A stream may say that a wait is over; memory is given back by what its timeline says.
#[test]
fn a_suspension_waits_for_the_line() {
    let b = Bench::new(64 * MIB);
    let arena = at(&b, ArenaState::Sealed);
    let other = VirtualStream::new().expect("a timeline");
    other.on_wait(None);
    let p = other.submit().expect("a value");
    arena.launch().expect("launches").launched(p);
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(arena.state(), ArenaState::Sealed, "the launch still runs");
            other.complete(p.value());
        });
        arena.suspend(On::new(&b.stream), |_, _| Ok(())).expect("suspends");
        assert!(p.is_settled());
    });
}

#[test]
fn suspension_gives_memory_back_and_keeps_addresses() {
    let b = Bench::new(64 * MIB);
    let arena = at(&b, ArenaState::Sealed);
    let before = b.allocator.stats().reserved;
    let mut saved = Vec::new();
    let freed = arena
        .suspend(On::new(&b.stream), |addr, bytes| {
            saved.push((addr, bytes));
            Ok(())
        })
        .expect("suspends");
    assert_eq!(freed, 4 * MIB);
    assert_eq!(b.allocator.stats().reserved, before - freed);
    assert!(matches!(arena.launch().map(drop), Err(Error::Suspended(_))));
    b.check();
    // Others may use the memory, never the addresses.
    let others: Vec<_> = (0..15).map(|_| b.take(4 * MIB)).collect();
    assert!(
        others
            .iter()
            .all(|x| x.addr() + x.len() <= saved[0].0 || saved[0].0 + saved[0].1 <= x.addr())
    );
    let full: Vec<_> = std::iter::from_fn(|| b.alloc(2 * MIB).ok()).collect();
    assert!(arena.resume(|_, _| Ok(())).is_err(), "there is no memory");
    assert_eq!(arena.state(), ArenaState::Suspended);
    b.check();
    drop((others, full));
    b.allocator.trim(0).expect("a trim");
    let mut back = Vec::new();
    arena
        .resume(|addr, bytes| {
            back.push((addr, bytes));
            Ok(())
        })
        .expect("resumes");
    assert_eq!(back, saved);
    assert!(b.fake.is_backed(saved[0].0, saved[0].1));
    drop(arena);
    b.check();
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
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
fn memory_that_arenas_share_goes_with_the_last_that_is_suspended() {
    let b = Bench::new(64 * MIB);
    let on = On::new(&b.stream);
    let first = at(&b, ArenaState::Sealed);
    let second = shared(&b, &first, 3 * MIB);
    let reserved = b.allocator.stats().reserved;
    let mut saved = 0;
    let mut save = |_, _| {
        saved += 1;
        Ok(())
    };
    assert_eq!(
        first.suspend(on, &mut save).expect("suspends"),
        0,
        "the second one may still be launched"
    );
    assert!(matches!(first.launch().map(drop), Err(Error::Suspended(_))));
    second.launch().expect("launches").launched(b.stream.submit().expect("a value"));
    assert_eq!(b.allocator.stats().reserved, reserved);
    assert_eq!(second.suspend(on, &mut save).expect("suspends"), 4 * MIB);
    assert_eq!(saved, 2, "each has contents of its own");
    assert_eq!(b.allocator.stats().reserved, reserved - 4 * MIB);
    // A third arena of the group takes the place with memory.
    let third = shared(&b, &first, MIB);
    assert_eq!(b.allocator.stats().reserved, reserved);
    assert_eq!(third.suspend(on, |_, _| Ok(())).expect("suspends"), 4 * MIB);
    // One that is resumed has memory; nobody else is.
    first.resume(|_, _| Ok(())).expect("resumes");
    assert_eq!(b.allocator.stats().reserved, reserved);
    assert!(matches!(second.launch().map(drop), Err(Error::Suspended(_))));
    first.launch().map(drop).expect("launches");
    // It is dropped: the others are as they were, and the next suspension gives the memory back.
    drop(first);
    assert!(matches!(second.resume(|_, _| Err(Error::state("no"))), Err(Error::InvalidState(_))));
    assert_eq!(
        (second.state(), b.allocator.stats().reserved),
        (ArenaState::Suspended, reserved - 4 * MIB)
    );
    second.resume(|_, _| Ok(())).expect("resumes");
    second.launch().map(drop).expect("launches");
    drop((second, third));
    b.check();
    b.allocator.trim(0).expect("a trim");
    assert_eq!((b.allocator.stats().reserved, b.allocator.stats().in_graphs), (0, 0));
}

#[test]
fn an_arena_whose_buffers_are_held_is_not_suspended_but_its_sharers_are() {
    let b = Bench::new(64 * MIB);
    let on = On::new(&b.stream);
    let first = b.allocator.arena().expect("an arena");
    let out = first.alloc(Layout::new(4 * MIB)).expect("symbolic");
    // SAFETY: the backing is a fake, whose memory nobody uses.
    unsafe { first.seal(&[used(out.addr(), 0, 0)], on) }.expect("seals");
    let second = shared(&b, &first, 3 * MIB);
    assert_eq!(second.suspend(on, |_, _| Ok(())).expect("suspends"), 0);
    assert!(matches!(first.suspend(on, |_, _| Ok(())), Err(Error::Unsupported(_))));
    assert_eq!(first.state(), ArenaState::Sealed);
    first.launch().map(drop).expect("launches");
    drop(out);
    assert_eq!(first.suspend(on, |_, _| Ok(())).expect("suspends"), 4 * MIB);
}

/// A resumption without memory leaves both of a pair suspended, whoever tries.
#[test]
fn a_pair_that_finds_no_memory_stays_suspended() {
    let b = Bench::new(32 * MIB);
    let on = On::new(&b.stream);
    let first = at(&b, ArenaState::Sealed);
    let second = shared(&b, &first, 4 * MIB);
    first.suspend(on, |_, _| Ok(())).expect("suspends");
    second.suspend(on, |_, _| Ok(())).expect("suspends");
    let hog: Vec<_> = std::iter::from_fn(|| b.alloc(2 * MIB).ok()).collect();
    for arena in [&first, &second] {
        let refused = arena.resume(|_, _| Ok(()));
        assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");
        assert_eq!(arena.state(), ArenaState::Suspended);
        assert!(matches!(arena.launch().map(drop), Err(Error::Suspended(_))));
        b.check();
    }
    drop(hog);
    b.allocator.trim(0).expect("a trim");
    second.resume(|_, _| Ok(())).expect("resumes");
    assert_eq!(first.state(), ArenaState::Suspended);
    b.check();
}

/// Two arenas side by side with a piece of memory across their border, which it takes 600 MiB to
/// make.
fn neighbours(b: &Bench) -> (GraphArena, GraphArena, Lease<Buffer>) {
    let hog = b.take(600 * MIB);
    let make = |b: &Bench| {
        let arena = b.allocator.arena().expect("an arena");
        let x = arena.alloc(Layout::new(6 * MIB)).expect("symbolic");
        let lifetimes = [used(x.addr(), 0, 0)];
        drop(x);
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
        arena
    };
    (make(b), make(b), hog)
}

#[test]
fn a_piece_across_the_border_of_two_arenas_goes_with_the_second() {
    let b = Bench::new(1 << 30);
    let on = On::new(&b.stream);
    let (low, high, hog) = neighbours(&b);
    let reserved = b.allocator.stats().reserved;
    let first = low.suspend(on, |_, _| Ok(())).expect("suspends");
    assert_eq!(first, 4 * MIB, "one piece lies across the border");
    assert!(matches!(low.launch().map(drop), Err(Error::Suspended(_))));
    let second = high.suspend(on, |_, _| Ok(())).expect("suspends");
    assert_eq!(second, 8 * MIB);
    assert_eq!(b.allocator.stats().reserved, reserved - 12 * MIB);
    b.check();
    for arena in [&low, &high] {
        arena
            .resume(|addr, bytes| {
                assert!(b.fake.is_backed(addr, bytes));
                Ok(())
            })
            .expect("resumes");
        b.check();
    }
    assert_eq!(b.allocator.stats().reserved, reserved);
    drop((low, high, hog));
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
}

/// A backing that does something in the middle of an unmapping.
struct Meanwhile(FakeBacking, Arc<Mutex<Option<GraphArena>>>);

// SAFETY: every call is the fake backing's, whose addresses nobody can use.
unsafe impl Backing for Meanwhile {
    fn caps(&self) -> BackingCaps {
        self.0.caps()
    }
    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.0.reserve(bytes)
    }
    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.commit(at, bytes) }
    }
    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.decommit(chunk) }
    }
    unsafe fn release(&self, addr: u64, bytes: u64) {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.release(addr, bytes) };
    }
    fn create(&self, bytes: u64) -> Result<u64> {
        self.0.create(bytes)
    }
    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.destroy(handle, bytes) }
    }
    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.map(at, handle, bytes) }
    }
    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.enable(at, bytes) }
    }
    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let dropped = self.1.lock().take();
        drop(dropped);
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.0.unmap(at, bytes) }
    }
}

#[test]
fn an_arena_may_be_dropped_while_its_neighbour_carries_the_piece_between_them_off() {
    let fake = FakeBacking::new(1 << 30);
    let slot = Arc::new(Mutex::new(None));
    let backing = Meanwhile(fake.clone(), slot.clone());
    let allocator =
        Allocator::new(Box::new(backing), AllocatorConfig::default()).expect("an allocator");
    let b = Bench { fake, allocator, stream: VirtualStream::new().expect("a timeline") };
    let on = On::new(&b.stream);
    let (low, high, hog) = neighbours(&b);
    low.suspend(on, |_, _| Ok(())).expect("suspends");
    *slot.lock() = Some(low);
    assert_eq!(high.suspend(on, |_, _| Ok(())).expect("suspends"), 8 * MIB);
    assert!(slot.lock().is_none());
    b.check();
    // The addresses of the one that is gone serve others, with new memory.
    let others: Vec<_> = (0..60).map(|_| b.take(6 * MIB)).collect();
    assert!(others.iter().all(|x| b.fake.is_backed(x.addr(), x.len())));
    b.check();
    drop((others, high, hog));
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
}

#[test]
fn a_suspended_arena_may_be_dropped() {
    let b = Bench::new(64 * MIB);
    let arena = at(&b, ArenaState::Suspended);
    drop(arena);
    b.check();
    drop(b.take(60 * MIB));
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
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
    assert_eq!(arena.state(), ArenaState::Planning);
    drop(hog);
    // SAFETY: the backing is a fake, whose memory nobody uses.
    unsafe { arena.seal(&lifetimes, On::new(&b.stream)) }.expect("seals");
    assert!(!x.is_symbolic());
}

#[test]
fn packings_are_disjoint_deterministic_and_close_to_their_bound() {
    let mut rng = Rng(99);
    let (mut total, mut bound) = (0, 0);
    for _ in 0..200 {
        let n = 1 + rng.below(60);
        let list: Vec<Interval> = (0..n)
            .map(|_| {
                let first = rng.below(50) as u32;
                let (size, align) = (rng.below(1 << 20), 1 << rng.below(10));
                Interval { size, align, first, last: first + rng.below(12) as u32 }
            })
            .collect();
        let p = plan(&list).expect("a packing");
        assert_eq!(p, plan(&list).expect("a packing"));
        for (i, a) in list.iter().enumerate() {
            assert_eq!(p.offsets[i] % a.align, 0);
            assert!(p.offsets[i] + a.size <= p.total || a.size == 0);
            for (j, b) in list.iter().enumerate().skip(i + 1) {
                let apart =
                    p.offsets[i] + a.size <= p.offsets[j] || p.offsets[j] + b.size <= p.offsets[i];
                let meet = a.first <= b.last && b.first <= a.last && a.size > 0 && b.size > 0;
                assert!(apart || !meet, "{a:?} and {b:?} overlap");
            }
        }
        assert!(p.total >= p.bound);
        total += p.total;
        bound += p.bound;
    }
    assert!(total as f64 <= bound as f64 * 1.08, "{total} against {bound}");
    assert!(plan(&[Interval { size: 1, align: 3, first: 0, last: 0 }]).is_err());
    assert!(plan(&[Interval { size: u64::MAX, align: 1, first: 0, last: 0 }]).is_err());
}
