//! Debug checks: each finds the defect that is planted, and is silent without it.

use crate::{Bench, MIB, given_back};
use leasehold_alloc::{
    Allocator, AllocatorConfig, Backing, BackingCaps, Chunk, DebugOptions, Finding, FindingKind,
    Layout, On, POISON_FREED, POISON_FRESH, RED_ZONE,
};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, TimelineSource};
use leasehold_sim::memory::pass;
use leasehold_sim::memory::{Call, FakeBacking};
use std::collections::HashMap;

/// A fake device whose memory has contents, which a test can read and write. Memory without backing
/// faults.
#[derive(Clone)]
struct Contents {
    fake: FakeBacking,
    pages: Arc<Mutex<HashMap<u64, Vec<u8>>>>,
}

impl Contents {
    fn new(fake: FakeBacking) -> Self {
        Self { fake, pages: Arc::default() }
    }

    /// The write of a kernel. `false`: it faults.
    #[must_use]
    fn write(&self, at: u64, byte: u8) -> bool {
        let backed = self.fake.is_backed(at, 1);
        if backed {
            self.each(at, 1, |part| part[0] = byte);
        }
        backed
    }

    fn read(&self, at: u64) -> u8 {
        assert!(self.fake.is_backed(at, 1), "a read of {at:#x} faults");
        let mut byte = 0;
        self.each(at, 1, |part| byte = part[0]);
        byte
    }

    fn each(&self, at: u64, bytes: u64, mut f: impl FnMut(&mut [u8])) {
        const PAGE: u64 = 1 << 16;
        let (mut at, end) = (at, at + bytes);
        let mut pages = self.pages.lock();
        while at < end {
            let page = pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
            let to = end.min((at / PAGE + 1) * PAGE);
            f(&mut page[(at % PAGE) as usize..][..(to - at) as usize]);
            at = to;
        }
    }
}

// SAFETY: every call is the fake backing's, whose addresses nobody can use.
unsafe impl Backing for Contents {
    fn caps(&self) -> BackingCaps {
        self.fake.caps()
    }
    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.fake.reserve(bytes)
    }
    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.commit(at, bytes) }
    }
    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.decommit(chunk) }
    }
    unsafe fn release(&self, addr: u64, bytes: u64) {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.release(addr, bytes) };
    }
    fn create(&self, bytes: u64) -> Result<u64> {
        self.fake.create(bytes)
    }
    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.destroy(handle, bytes) }
    }
    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.map(at, handle, bytes) }
    }
    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.enable(at, bytes) }
    }
    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        unsafe { self.fake.unmap(at, bytes) }
    }
    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        assert!(bytes == 0 || self.fake.is_backed(at, bytes), "a fill of {at:#x}+{bytes} faults");
        self.each(at, bytes, |part| part.fill(byte));
        Ok(())
    }
    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        assert!(bytes == 0 || self.fake.is_backed(at, bytes), "a check of {at:#x}+{bytes} faults");
        let (mut wrong, mut before) = (None, 0);
        self.each(at, bytes, |part| {
            wrong =
                wrong.or_else(|| part.iter().position(|&b| b != byte).map(|i| before + i as u64));
            before += part.len() as u64;
        });
        Ok(wrong)
    }
    fn driver_calls(&self) -> u64 {
        self.fake.driver_calls()
    }
}

fn checked(text: &str, fake: FakeBacking) -> (Bench, Contents) {
    let contents = Contents::new(fake.clone());
    let debug: DebugOptions = text.parse().expect("debug checks");
    let config = AllocatorConfig { debug, ..AllocatorConfig::default() };
    let allocator = Allocator::new(Box::new(contents.clone()), config).expect("an allocator");
    (
        Bench {
            fake,
            allocator,
            stream: leasehold_sim::memory::VirtualStream::new().expect("a timeline"),
        },
        contents,
    )
}

fn fakes() -> [FakeBacking; 2] {
    [FakeBacking::new(1 << 30), FakeBacking::segments(1 << 30)]
}

/// A workload without defects, then the given defect on one buffer of `len` bytes; returns what was
/// found, after all is freed.
fn found_after(text: &str, len: u64, defect: impl Fn(&Bench, &Contents, u64)) -> Vec<Finding> {
    let mut found = Vec::new();
    for fake in fakes() {
        let (b, memory) = checked(text, fake);
        let held: Vec<_> = [1, 300, 4096, 70_000].map(|n| b.take(n)).into();
        for h in &held {
            assert!(memory.write(h.addr(), 1) && memory.write(h.addr() + h.len() - 1, 2));
        }
        let victim = b.take(len);
        victim.set_tag(77);
        let at = victim.addr();
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { victim.mark_write(b.stream.submit().expect("a value")) };
        drop(held);
        drop(victim);
        defect(&b, &memory, at);
        pass(b.stream.timeline().now());
        b.allocator.trim(0).expect("a trim");
        b.check();
        let stats = b.allocator.stats();
        assert_eq!((stats.live, stats.live_bytes, stats.held_back, stats.reserved), (0, 0, 0, 0));
        let here = b.allocator.findings();
        assert_eq!(stats.findings, here.len() as u64);
        for f in &here {
            assert_eq!((f.addr, f.len, f.tag, f.stream), (at, len, 77, b.stream.timeline().id()));
        }
        drop(b.allocator);
        assert_eq!(b.fake.outstanding(), (0, 0, 0, 0));
        assert_eq!(b.fake.violations(), Vec::<String>::new());
        found.push(here);
    }
    let [a, b] = &found[..] else { unreachable!() };
    assert_eq!(
        a.iter().map(|f| (f.kind, f.offset)).collect::<Vec<_>>(),
        b.iter().map(|f| (f.kind, f.offset)).collect::<Vec<_>>()
    );
    found.remove(0)
}

#[test]
fn red_zones_find_a_write_behind_the_end() {
    for len in [1000, 100_000] {
        for text in ["red-zone=64", "red-zone=64,poison", "all", "red-zone=64,pass-through"] {
            // The last use goes on after the free: what it does wrong then is found too.
            let found = found_after(text, len, |_, m, at| assert!(m.write(at + len + 13, 0x41)));
            assert_eq!(
                found.iter().map(|f| (f.kind, f.offset)).collect::<Vec<_>>(),
                [(FindingKind::RedZone, len + 13)]
            );
            let text = found[0].to_string();
            assert!(
                text.starts_with(&format!(
                    "write behind the end of a buffer: byte {} of {len} bytes at 0x",
                    len + 13
                )),
                "{text}"
            );
            assert!(text.contains("(tag 77, allocated on timeline "), "{text}");
            assert_eq!(
                found_after("all", len, |_, m, at| assert!(m.write(at + len - 1, 0x41))),
                []
            );
        }
    }
}

#[test]
fn a_quarantine_finds_a_write_after_the_free() {
    for text in ["poison,quarantine=1M", "all", "poison,quarantine=64M,pass-through"] {
        let late = |b: &Bench, m: &Contents, at: u64| {
            pass(b.stream.timeline().now());
            // The stream is done; the next allocation notices and poisons.
            drop(b.take(1));
            assert_eq!(m.read(at), POISON_FREED);
            assert!(m.write(at + 123, 0x41));
        };
        let found = found_after(text, 1000, late);
        assert_eq!(
            found.iter().map(|f| (f.kind, f.offset)).collect::<Vec<_>>(),
            [(FindingKind::WriteAfterFree, 123)]
        );
        // The stream's own last work is no write after the free.
        assert_eq!(found_after(text, 1000, |_, m, at| assert!(m.write(at + 123, 0x41))), []);
    }
}

#[test]
fn fresh_memory_is_poisoned_and_reused_memory_too() {
    let (b, m) = checked("poison", FakeBacking::new(1 << 30));
    for round in 0..2 {
        let buffer = b.take(1000);
        for i in [0, 500, 999] {
            assert_eq!(m.read(buffer.addr() + i), POISON_FRESH, "round {round}");
            assert!(m.write(buffer.addr() + i, 3));
        }
    }
    let (b, m) = checked("red-zone=16", FakeBacking::new(1 << 30));
    let buffer = b.take(1000);
    assert_eq!((m.read(buffer.addr() + 999), m.read(buffer.addr() + 1000)), (0, RED_ZONE));
    assert_eq!((buffer.len(), b.allocator.stats().live_bytes), (1000, 1000));
}

#[test]
fn a_quarantine_keeps_memory_from_reuse_until_it_is_full() {
    let (b, _) = checked("quarantine=4K", FakeBacking::new(1 << 30));
    let mut seen = vec![b.take(1024).addr()];
    // Each free brings 1 KiB; the first one's block comes back when the fifth goes in.
    for _ in 0..4 {
        let at = b.take(1024).addr();
        assert!(!seen.contains(&at), "reused too early");
        seen.push(at);
    }
    assert_eq!(b.allocator.stats().held_back, 4096);
    assert_eq!(b.take(1024).addr(), seen[0]);
    // Memory that runs out takes it back.
    let (b, _) = checked("quarantine=1G", FakeBacking::new(8 * MIB));
    for _ in 0..10 {
        drop(b.take(5 * MIB));
    }
}

#[test]
fn a_guard_faults_behind_the_end_and_after_the_free() {
    for fake in [
        FakeBacking::new(1 << 30),
        FakeBacking::with_caps(BackingCaps { reserve: true, ..BackingCaps::default() }),
    ] {
        let (b, m) = checked("guard,quarantine=64M", fake);
        for len in [256, 4096, 2 * MIB, 3 * MIB + 256] {
            let buffer = b.take(len);
            let at = buffer.addr();
            assert!(m.write(at, 1) && m.write(at + len - 1, 1), "its own bytes");
            assert!(!m.write(at + len, 1), "one byte behind the end of {len}");
            // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
            // early.
            unsafe { buffer.mark_write(b.stream.submit().expect("a value")) };
            drop(buffer);
            assert!(m.write(at, 1), "its stream still uses it");
            pass(b.stream.timeline().now());
            let next = b.take(len);
            assert!(!m.write(at, 1), "after the free");
            assert_ne!(next.addr(), at);
        }
        b.allocator.trim(0).expect("a trim");
        assert_eq!(b.allocator.stats().reserved, 0);
        b.check();
        drop(b.allocator);
        assert_eq!(b.fake.outstanding(), (0, 0, 0, 0));
    }
    // Without a guard the same write hits the neighbour.
    let b = Bench::new(1 << 30);
    let buffer = b.take(256);
    assert!(b.fake.is_backed(buffer.addr() + 256, 1));
}

#[test]
fn a_request_beyond_the_budget_is_over_it_with_and_without_aids() {
    for text in ["poison", "pass-through", "guard"] {
        let (b, _) = checked(text, FakeBacking::new(1 << 30));
        b.allocator.set_budget(8 << 20);
        let refused = b.alloc((8 << 20) + 1);
        assert!(matches!(refused, Err(Error::OverBudget { .. })), "{text}: {refused:?}");
        assert_eq!(b.allocator.stats().failed, 1, "{text}");
        b.allocator.set_budget(u64::MAX);
        drop(b.take((8 << 20) + 1));
    }
}

#[test]
fn pass_through_makes_one_driver_call_per_allocation_and_one_per_free() {
    let (b, _) = checked("pass-through", FakeBacking::new(1 << 30));
    for n in 1..=20 {
        drop(b.take(n * 100_000));
        assert_eq!(b.fake.count(Call::Commit), n);
        assert_eq!(b.fake.count(Call::Reserve), 0);
    }
    b.allocator.drain();
    assert_eq!(b.fake.count(Call::Decommit), 20);
    let b = Bench::new(1 << 30);
    (1..=20).for_each(|n| drop(b.take(n * 100_000)));
    assert!(b.fake.driver_calls() < 10, "without it");
}

#[test]
fn aids_respect_the_budget_and_reclaimers() {
    for text in ["pass-through", "guard", "all"] {
        let (b, _) = checked(text, FakeBacking::new(1 << 30));
        b.allocator.set_budget(16 * MIB);
        let held = Arc::new(Mutex::new(vec![b.take(5 * MIB), b.take(5 * MIB)]));
        match b.alloc(8 * MIB) {
            Err(Error::OutOfMemory(report)) => {
                assert_eq!((report.live, report.limit), (10 * MIB, 16 * MIB), "{text}");
                let hint = "the budget allows no more: raise it, or free something";
                assert!(report.notes.iter().any(|n| n == hint), "{text}: {report}");
            }
            other => panic!("{text}: {other:?}"),
        }
        let cache = held.clone();
        b.allocator.add_reclaimer(0, Box::new(move |_| cache.lock().pop().map_or(0, |h| h.len())));
        let got = b.take(8 * MIB);
        assert_eq!((got.len(), held.lock().len()), (8 * MIB, 1), "{text}");
        assert!(b.allocator.stats().reserved_peak <= 16 * MIB);
        held.lock().clear();
    }
}

/// Blocks straight from the backing have a loop of their own over the reclaimers.
#[test]
fn a_panicking_reclaimer_is_not_called_again_with_aids_either() {
    use leasehold_core::sync::atomic::{AtomicU32, Ordering};
    for text in ["pass-through", "guard", "all"] {
        let (b, _) = checked(text, FakeBacking::new(1 << 30));
        b.allocator.set_budget(16 * MIB);
        let held = b.take(10 * MIB);
        let calls = Arc::new(AtomicU32::new(0));
        let n = calls.clone();
        b.allocator.add_reclaimer(
            0,
            Box::new(move |_| {
                n.fetch_add(1, Ordering::Relaxed);
                panic!("a reclaimer's own defect")
            }),
        );
        for _ in 0..3 {
            assert!(matches!(b.alloc(8 * MIB), Err(Error::OutOfMemory(_))), "{text}");
            assert_eq!(calls.load(Ordering::Relaxed), 1, "{text}");
        }
        drop(held);
        drop(b.take(8 * MIB));
        b.check();
    }
}

#[test]
fn aids_that_a_backing_cannot_serve_are_refused() {
    let refused = |fake: FakeBacking, text: &str| {
        let debug = text.parse().expect("debug checks");
        let config = AllocatorConfig { debug, name: "x".into(), ..AllocatorConfig::default() };
        match Allocator::new(Box::new(fake), config) {
            Err(e @ Error::Unsupported(_)) => e.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    };
    let host = "x: poison and red zones need memory that the host can write";
    assert!(refused(FakeBacking::new(1 << 30), "poison").contains(host));
    assert!(refused(FakeBacking::new(1 << 30), "red-zone").contains(host));
    let reserve = "x: guard granules need a backing that reserves addresses";
    assert!(refused(FakeBacking::segments(1 << 30), "guard").contains(reserve));
}

#[test]
fn leases_of_an_aided_allocator_may_outlive_it() {
    for text in ["all", "guard", "pass-through,quarantine=1M"] {
        let (b, _) = checked(text, FakeBacking::new(1 << 30));
        let (x, y) = (b.take(1000), b.take(1000));
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { x.mark_write(b.stream.submit().expect("a value")) };
        drop(b.allocator);
        drop(y);
        drop(x);
        pass(b.stream.timeline().now());
        given_back(&b.fake);
        assert_eq!(b.fake.violations(), Vec::<String>::new());
    }
}

#[test]
fn graph_arenas_work_with_aids() {
    for text in ["all", "pass-through"] {
        let (b, _) = checked(text, FakeBacking::new(1 << 30));
        let arena = b.allocator.arena().expect("an arena");
        let x = arena.alloc(Layout::new(4 * MIB)).expect("a symbolic buffer");
        let used =
            leasehold_alloc::Lifetime { symbol: x.addr(), first: 0, last: 1, live_at_end: false };
        drop(x);
        let on = On::new(&b.stream);
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&[used], on) }.expect("seals");
        drop(arena);
        b.allocator.trim(0).expect("a trim");
        assert_eq!((b.allocator.stats().reserved, b.allocator.stats().findings), (0, 0), "{text}");
        b.check();
    }
}

#[test]
fn threads_share_an_aided_allocator_and_outlive_it() {
    for text in ["all", "quarantine=64K", "pass-through"] {
        let (b, m) = checked(text, FakeBacking::new(1 << 30));
        std::thread::scope(|scope| {
            for t in 0..3u64 {
                let (allocator, m) = (b.allocator.clone(), m.clone());
                scope.spawn(move || {
                    let stream = leasehold_sim::memory::VirtualStream::new().expect("a timeline");
                    let mut rng = crate::model::Rng(t + 1);
                    let mut held = Vec::new();
                    for _ in 0..300 {
                        if rng.below(5) < 3 || held.is_empty() {
                            let layout = Layout::new(1 + rng.below(5000));
                            let buffer = allocator.alloc(layout, On::new(&stream)).expect("memory");
                            assert!(m.write(buffer.addr() + layout.size - 1, t as u8));
                            // SAFETY: nothing uses the memory behind a fake backing, so nothing can
                            // use it too early.
                            unsafe { buffer.mark_write(stream.submit().expect("a value")) };
                            held.push((buffer, layout.size));
                        } else {
                            let (buffer, len) =
                                held.swap_remove(rng.below(held.len() as u64) as usize);
                            assert_eq!(
                                m.read(buffer.addr() + len - 1),
                                t as u8,
                                "somebody else wrote here"
                            );
                            drop(buffer);
                            pass(stream.timeline().now());
                        }
                    }
                    // The last of the threads takes the allocator down, in a drop.
                    drop(allocator);
                    drop(held);
                    pass(stream.timeline().now());
                });
            }
            drop(b.allocator);
        });
        given_back(&b.fake);
        assert_eq!(b.fake.violations(), Vec::<String>::new());
    }
}
