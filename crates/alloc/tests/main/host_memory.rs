//! The host's own memory runs out: every call of the global allocator that the allocator's tables
//! make is refused at every index, once, from then on, or at random. An allocation, an import, a
//! trim or a suspension may then fail, and changes nothing; a free never asks.
//!
//! This test binary's global allocator refuses on demand, on the thread that demands it. A call
//! that cannot be refused (`Box::new`, `Vec::push`) ends the process, so that nothing of this can
//! be overlooked. The error itself, which is a box, may always be had.

use crate::MIB;
use crate::model::Rng;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, BackingCaps, Buffer, Chunk};
use leasehold_alloc::{CrossStream, Layout, Lifetime, On, Policy, Protection};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, OutOfMemory, Result, Timeline, TimelineSource, Timepoint};
use leasehold_sim::memory::{FakeBacking, Fault};
use leasehold_sim::memory::{VirtualStream, pass};
use std::alloc::{GlobalAlloc, System};
use std::cell::Cell;
use std::time::Duration;

/// The orders to refuse host memory on this thread.
#[derive(Clone, Copy)]
struct Orders {
    fault: Option<Fault>,
    /// The fake driver or the test itself asks for memory, which is not ours to refuse.
    paused: bool,
    seen: u64,
    refused: u64,
    /// Bytes that were asked for and not given back.
    held: i64,
}

const NONE: Orders = Orders { fault: None, paused: false, seen: 0, refused: 0, held: 0 };

thread_local! {
    static ORDERS: Cell<Orders> = const { Cell::new(NONE) };
}

struct Refusing;

#[global_allocator]
static REFUSING: Refusing = Refusing;

impl Refusing {
    fn refuses(layout: std::alloc::Layout) -> bool {
        let mut orders = ORDERS.get();
        let Some(fault) = orders.fault.filter(|_| !orders.paused) else { return false };
        if layout == std::alloc::Layout::new::<OutOfMemory>() {
            return false;
        }
        let n = orders.seen;
        let refuses = match fault {
            Fault::Once(k) => n == k,
            Fault::From(k) => n >= k,
            Fault::PerMille(p) => Rng(n * 2 + 1).below(1000) < u64::from(p),
        };
        orders.seen += 1;
        orders.refused += u64::from(refuses);
        ORDERS.set(orders);
        refuses
    }

    fn count(bytes: i64) {
        let orders = ORDERS.get();
        if orders.fault.is_some() && !orders.paused {
            ORDERS.set(Orders { held: orders.held + bytes, ..orders });
        }
    }
}

// SAFETY: the system's allocator, or null, which is an allocator's way to refuse.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        if Self::refuses(layout) {
            return std::ptr::null_mut();
        }
        Self::count(layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: std::alloc::Layout, bytes: usize) -> *mut u8 {
        if bytes > layout.size() && Self::refuses(layout) {
            return std::ptr::null_mut();
        }
        Self::count(bytes as i64 - layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: std::alloc::Layout) {
        Self::count(-(layout.size() as i64));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Refuses as told while `f` runs. Returns its result, and how many calls there were and were
/// refused.
fn refusing<R>(fault: Fault, f: impl FnOnce() -> R) -> (R, u64, u64) {
    ORDERS.set(Orders { fault: Some(fault), ..NONE });
    let r = f();
    let Orders { seen, refused, .. } = ORDERS.replace(NONE);
    (r, seen, refused)
}

/// Memory that is not the allocator's own.
fn paused<R>(f: impl FnOnce() -> R) -> R {
    let before = ORDERS.get().paused;
    ORDERS.set(Orders { paused: true, ..ORDERS.get() });
    let r = f();
    ORDERS.set(Orders { paused: before, ..ORDERS.get() });
    r
}

/// Counts the calls of the global allocator in `f`, all of which would be refused.
fn calls_in(f: impl FnOnce()) -> u64 {
    refusing(Fault::PerMille(0), f).1
}

/// A fake driver, which has memory of its own.
struct Apart(FakeBacking);

// SAFETY: every call is the fake backing's, whose addresses nobody can use.
unsafe impl Backing for Apart {
    fn caps(&self) -> BackingCaps {
        self.0.caps()
    }
    fn reserve(&self, bytes: u64) -> Result<u64> {
        paused(|| self.0.reserve(bytes))
    }
    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.commit(at, bytes) })
    }
    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.decommit(chunk) })
    }
    unsafe fn release(&self, addr: u64, bytes: u64) {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.release(addr, bytes) });
    }
    fn create(&self, bytes: u64) -> Result<u64> {
        paused(|| self.0.create(bytes))
    }
    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.destroy(handle, bytes) })
    }
    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.map(at, handle, bytes) })
    }
    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.enable(at, bytes) })
    }
    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this contract, which is the inner backing's.
        paused(|| unsafe { self.0.unmap(at, bytes) })
    }
}

/// A stream, which has memory of its own too.
struct Stream(VirtualStream);

impl Stream {
    fn new() -> Self {
        let stream = VirtualStream::new().expect("a timeline");
        let timeline = stream.timeline();
        stream.on_wait(Some(Arc::new(move |value, _| {
            paused(|| pass(timeline.at(value)));
            Ok(())
        })));
        Self(stream)
    }
}

// SAFETY: nothing that is submitted touches memory.
unsafe impl TimelineSource for Stream {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }
    fn signal(&self) -> Result<u64> {
        self.0.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }
    fn wait(&self, on: Timepoint) -> Result<()> {
        paused(|| self.0.wait(on))
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        paused(|| self.0.wait_host(value, timeout))
    }
}

/// A device, an allocator over it, and three streams.
struct Scene {
    fake: FakeBacking,
    allocator: Allocator,
    streams: Vec<Stream>,
}

impl Scene {
    fn new(segments: bool, policy: Policy, cross_stream: CrossStream) -> Self {
        Self::with(segments, AllocatorConfig { policy, cross_stream, ..AllocatorConfig::default() })
    }

    fn with(segments: bool, config: AllocatorConfig) -> Self {
        let physical = 48 * MIB;
        let fake =
            if segments { FakeBacking::segments(physical) } else { FakeBacking::new(physical) };
        let allocator =
            Allocator::new(Box::new(Apart(fake.clone())), config).expect("an allocator");
        Self { fake, allocator, streams: (0..3).map(|_| Stream::new()).collect() }
    }

    fn check(&self) {
        paused(|| {
            self.allocator.check().expect("the invariants");
            assert_eq!(self.fake.violations(), Vec::<String>::new());
        });
    }

    /// Uses a buffer on its own stream and on `others` more. The record of the third stream is a
    /// box.
    fn submit(&self, x: &Lease<Buffer>, own: usize, others: usize) {
        paused(|| {
            // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
            // early.
            unsafe { x.mark_write(self.streams[own].0.submit().expect("a value")) };
            for i in 1..=others {
                x.used_on(self.streams[(own + i) % 3].0.submit().expect("a value"));
            }
        });
    }

    /// An arena with 6 MiB, sealed.
    fn arena(&self) -> leasehold_alloc::GraphArena {
        let arena = self.allocator.arena().expect("an arena");
        let x = arena.alloc(Layout::new(6 * MIB)).expect("symbolic");
        let lifetimes = [Lifetime { symbol: x.addr(), first: 0, last: 0, live_at_end: false }];
        // SAFETY: the backing is a fake, whose memory nobody uses.
        unsafe { arena.seal(&lifetimes, On::new(&self.streams[0])) }.expect("seals");
        arena
    }

    /// Allocates, imports, frees on several streams and trims while the host refuses. A graph's
    /// arena lies between.
    fn work(&self, seed: u64) {
        let mut rng = Rng(seed);
        let mut held = paused(|| Vec::with_capacity(64));
        let arena = paused(|| self.arena());
        for i in 0..90 {
            let own = rng.below(3) as usize;
            let size = [700, 5_000, 40_000, 90_000, MIB, 3 * MIB, 11 * MIB][rng.below(7) as usize];
            let lent = match rng.below(12) {
                // SAFETY: nobody touches it.
                0 => unsafe {
                    self.allocator.import(
                        1 << 40,
                        size,
                        0,
                        Protection::ReadWrite,
                        paused(|| Box::new(())),
                    )
                },
                _ => self.allocator.alloc(Layout::new(size), On::new(&self.streams[own])),
            };
            match lent {
                Ok(x) => {
                    self.submit(&x, own, rng.below(3) as usize);
                    held.push(x);
                }
                Err(Error::OutOfMemory(_)) => {}
                Err(e) => paused(|| panic!("{e}")),
            }
            if rng.below(3) > 0 && !held.is_empty() {
                let x = held.swap_remove(rng.below(held.len() as u64) as usize);
                let before = ORDERS.get().seen;
                drop(x);
                assert_eq!(ORDERS.get().seen, before, "a free asked the host for memory");
            }
            if rng.below(4) == 0 {
                paused(|| pass(self.streams[own].timeline().now()));
            }
            if i % 30 == 29 {
                // A trim that fails has given back what it could.
                let _ = self.allocator.trim(0);
            }
            if i % 10 == 0 {
                self.check();
            }
        }
        let before = ORDERS.get().seen;
        drop(arena);
        held.clear();
        assert_eq!(ORDERS.get().seen, before, "a free asked the host for memory");
        self.check();
    }

    /// Nothing stays unusable, and nothing is lost.
    fn end(self, what: &dyn Fn() -> String) {
        self.streams.iter().for_each(|s| pass(s.timeline().now()));
        drop(
            self.allocator.alloc(Layout::new(40 * MIB), On::new(&self.streams[0])).unwrap_or_else(
                |e| {
                    panic!("{}: no memory after the failures: {e}", what());
                },
            ),
        );
        self.allocator.trim(0).expect("a trim");
        self.check();
        let s = self.allocator.stats();
        assert_eq!(
            (s.reserved, s.live, s.retired, s.quarantined),
            (0, 0, 0, 0),
            "{}: {s:?}",
            what()
        );
        assert_eq!(self.fake.used(), 0, "{}", what());
    }
}

#[test]
fn every_call_for_host_memory_may_fail_at_every_index() {
    let mut runs = 0;
    for (segments, policy, cross_stream) in [
        (false, Policy::Compact, CrossStream::IfReady),
        (false, Policy::Balanced, CrossStream::InsertWait),
        (true, Policy::Balanced, CrossStream::Never),
        (false, Policy::Balanced, CrossStream::IfReady),
        (true, Policy::Fastest, CrossStream::Never),
    ] {
        let config = AllocatorConfig { policy, cross_stream, ..AllocatorConfig::default() };
        let scene = Scene::with(segments, config.clone());
        let ((), calls, _) = refusing(Fault::PerMille(0), || scene.work(7));
        scene.end(&|| "nothing failed".into());
        assert!(calls > 50, "only {calls} calls");
        let mut faults = vec![];
        for k in 0..calls + 4 {
            faults.extend([Fault::Once(k), Fault::From(k)]);
        }
        faults.extend([50, 200, 500, 1000].map(Fault::PerMille));
        for fault in faults {
            let scene = Scene::with(segments, config.clone());
            let ((), _, refused) = refusing(fault, || scene.work(7));
            runs += u64::from(refused > 0);
            scene.end(&|| format!("segments {segments} {policy:?} {cross_stream:?} {fault:?}"));
        }
    }
    assert!(runs > 400, "only {runs} runs were refused anything");
}

/// Frees of every kind.
#[test]
fn a_free_asks_the_host_for_nothing() {
    let scene = Scene::new(false, Policy::Balanced, CrossStream::IfReady);
    let alloc = |size, own: usize| {
        scene
            .allocator
            .alloc(Layout::new(size), On::new(&scene.streams[own]))
            .expect("an allocation")
    };
    for size in [100, 30_000, 200_000, 5 * MIB] {
        for others in 0..3 {
            let many: Vec<_> = (0..20).map(|_| alloc(size.min(MIB), 0)).collect();
            many.iter().for_each(|x| scene.submit(x, 0, others));
            assert_eq!(
                calls_in(|| many.into_iter().for_each(drop)),
                0,
                "{size} bytes, used on {} streams",
                others + 1
            );
            scene.check();
        }
        scene.streams.iter().for_each(|s| pass(s.timeline().now()));
    }
    // A stream that never allocated here has no list.
    let foreign = VirtualStream::new().expect("a timeline");
    let x = alloc(MIB, 0);
    x.used_on(foreign.submit().expect("a value"));
    assert_eq!(calls_in(|| drop(x)), 0, "used on a stream without a list");
    scene.check();
    // An import whose last use is not over, and a member of an arena.
    // SAFETY: nobody touches it.
    let import =
        unsafe { scene.allocator.import(1 << 40, 4096, 0, Protection::ReadWrite, Box::new(())) }
            .expect("an import");
    scene.submit(&import, 0, 2);
    assert_eq!(calls_in(|| drop(import)), 0, "an import");
    assert_eq!(scene.allocator.stats().retired, 1);
    let arena = scene.arena();
    assert_eq!(calls_in(|| drop(arena)), 0, "an arena");
    scene.check();
    // The last lease of an allocator that is gone, while a stream may be using the block.
    let other = Scene::new(false, Policy::Balanced, CrossStream::IfReady);
    let last =
        other.allocator.alloc(Layout::new(MIB), On::new(&other.streams[0])).expect("an allocation");
    other.submit(&last, 0, 2);
    let Scene { fake, allocator, streams } = other;
    drop(allocator);
    assert_eq!(calls_in(|| drop(last)), 0, "the last lease");
    assert!(fake.used() > 0, "the streams are not done");
    streams.iter().for_each(|s| pass(s.timeline().now()));
    drop(foreign);
    scene.end(&|| "frees".into());
    assert_eq!(fake.used(), 0, "the allocator that was gone is swept by another's calls");
}

/// Every request that can be refused is refused. A call that cannot be refused would have ended the
/// test above.
#[test]
fn an_allocation_without_host_memory_says_so() {
    let scene = Scene::new(false, Policy::Balanced, CrossStream::IfReady);
    let (refused, ..) = refusing(Fault::From(0), || {
        scene.allocator.alloc(Layout::new(MIB), On::new(&scene.streams[0]))
    });
    let Err(Error::OutOfMemory(report)) = refused else { panic!("{refused:?}") };
    assert!(
        report.to_string().contains("host memory") || report.to_string().contains("block table"),
        "{report}"
    );
    scene.end(&|| "refused".into());
}

/// I17, by what the global allocator was really asked for: rows, nodes, indexes, maps and thread
/// caches together are half a percent of the memory that they describe, on real programs' traces.
/// (A buffer's row is 128 bytes, so a program of nothing but tiny buffers pays more.)
#[test]
fn tables_are_half_a_percent_of_the_memory_that_they_describe() {
    use leasehold_sim::memory::trace::Trace;
    for name in ["resnet50_train", "gpt2_train", "llama_generate", "four_streams"] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testing/sim/workloads")
            .join(format!("{name}.csv.gz"));
        let trace = Trace::open(&path).expect("a recorded trace");
        let (share, ..) = refusing(Fault::PerMille(0), || {
            let fake = paused(|| FakeBacking::new(64 << 30));
            let allocator =
                Allocator::new(Box::new(Apart(fake.clone())), AllocatorConfig::default());
            let allocator = allocator.expect("an allocator");
            let mut streams = paused(std::collections::HashMap::new);
            let mut held = paused(std::collections::HashMap::new);
            let (mut peak, mut tables) = (0, 0);
            for event in &trace.events {
                if event.alloc {
                    let stream =
                        paused(|| &*streams.entry(event.stream).or_insert_with(Stream::new));
                    let x = allocator
                        .alloc(Layout::new(event.size), On::new(stream))
                        .expect("an allocation");
                    paused(|| {
                        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use
                        // it too early.
                        unsafe { x.mark_write(stream.0.submit().expect("a value")) };
                        held.insert(event.id, x);
                    });
                    let used = paused(|| fake.used());
                    if used >= peak {
                        (peak, tables) = (used, ORDERS.get().held);
                    }
                } else {
                    drop(paused(|| held.remove(&event.id)));
                }
                if held.len().is_multiple_of(32) {
                    paused(|| streams.values().for_each(|s: &Stream| pass(s.timeline().now())));
                }
            }
            let share = tables as f64 / peak as f64;
            println!("{name}: {tables} bytes of tables, {peak} of memory, {:.3} %", share * 100.0);
            paused(|| drop((held, streams)));
            share
        });
        assert!(share <= 0.005 && share > 0.0, "{name}: {share}");
    }
}
