//! Other allocators, to be measured beside this one: emulations of the structures of PyTorch's
//! caching allocator and of RMM's pool, a plain best fit, and the process's own heap.
//!
//! The emulations are written from what those projects document and from their observable rules:
//! which lists there are, how they are searched, what is rounded and split, where a mutex is taken,
//! when an event is recorded. They make no driver call on the way and keep no statistics beyond a
//! peak, so that they are, if anything, faster than what they stand for. Their figures bear the
//! word "emulation" wherever they appear.

mod bestfit;
mod rmm_like;
mod system;
mod torch_like;

pub use bestfit::BestFit;
pub use rmm_like::RmmLike;
pub use system::System;
pub use torch_like::TorchLike;

use leasehold_alloc::{Backing, Chunk};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Result, Timepoint};

/// The memory and the driver calls that a peer took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// The most bytes taken from the driver.
    pub reserved_peak: u64,
    /// Calls of the driver.
    pub driver_calls: u64,
    /// Episodes in which free granules were moved.
    pub remaps: u64,
    /// Waits of the host for a stream.
    pub host_waits: u64,
}

/// Where a peer's memory comes from: a backing under a budget.
struct Source {
    backing: Box<dyn Backing>,
    budget: u64,
    used: AtomicU64,
    peak: AtomicU64,
    host_waits: AtomicU64,
}

impl Source {
    fn new(backing: Box<dyn Backing>, budget: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { backing, budget, used: zero(), peak: zero(), host_waits: zero() }
    }

    /// Counts bytes against the budget; callers hold their own lock.
    fn take(&self, bytes: u64) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        if used.checked_add(bytes).is_none_or(|u| u > self.budget) {
            return false;
        }
        self.used.store(used + bytes, Ordering::Relaxed);
        self.peak.fetch_max(used + bytes, Ordering::Relaxed);
        true
    }

    fn undo(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A segment, as `cudaMalloc` gives one.
    fn segment(&self, bytes: u64) -> Option<Chunk> {
        let bytes = bytes.checked_next_multiple_of(self.backing.caps().granule)?;
        if !self.take(bytes) {
            return None;
        }
        // SAFETY: at no address in particular.
        unsafe { self.backing.commit(None, bytes) }.inspect_err(|_| self.undo(bytes)).ok()
    }

    /// # Safety
    /// - `chunk` came from [`segment`](Self::segment), is given back once, and nobody uses it any
    ///   more.
    unsafe fn give_back(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: a segment is a commitment; the caller gives it back once and unused.
        unsafe { self.backing.decommit(chunk) }?;
        self.undo(chunk.bytes);
        Ok(())
    }

    fn wait(&self, point: Timepoint) {
        if !over(point) {
            self.host_waits.fetch_add(1, Ordering::Relaxed);
            crate::virtual_stream::pass(point);
        }
    }

    fn figures(&self) -> Figures {
        Figures {
            reserved_peak: self.peak.load(Ordering::Relaxed),
            driver_calls: self.backing.driver_calls(),
            remaps: 0,
            host_waits: self.host_waits.load(Ordering::Relaxed),
        }
    }
}

/// The answer to an event query.
fn over(point: Timepoint) -> bool {
    point.timeline().completed() >= point.value()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeBacking;
    use crate::virtual_stream::VirtualStream;
    use crate::workload::{Subject, Workload};

    const MIB: u64 = 1 << 20;

    fn fake() -> (FakeBacking, Box<dyn Backing>) {
        let fake = FakeBacking::new(1 << 38);
        (fake.clone(), Box::new(fake))
    }

    fn runs<S: Subject>(name: &str, subject: &S) {
        for (what, workload) in Workload::all() {
            let workload = match workload {
                Workload::Random { live, least, most } => {
                    Workload::Random { live: live.min(200), least, most }
                }
                other => other,
            };
            for threads in [1, 2] {
                let sample = workload.run(subject, threads, 1000).expect("streams");
                assert!(sample.is_some(), "{name}: {what}");
            }
        }
    }

    #[test]
    fn every_peer_bears_every_workload() {
        runs("best fit", &BestFit::new(fake().1, u64::MAX).expect("a range"));
        runs("torch-like", &TorchLike::new(fake().1, u64::MAX));
        runs("rmm-like", &RmmLike::new(fake().1, u64::MAX));
        runs("system", &System::counting(u64::MAX));
    }

    /// Live blocks are disjoint and backed, whatever the order.
    fn disjoint<S: Subject<Stream = VirtualStream>>(
        fake: &FakeBacking,
        s: &S,
        range: impl Fn(&S::Block) -> (u64, u64),
    ) {
        let on = s.stream().expect("a timeline");
        let other = s.stream().expect("a timeline");
        let mut dice = crate::workload::Dice::new(5);
        let mut live: Vec<S::Block> = Vec::new();
        let mut map = std::collections::BTreeMap::new();
        for _ in 0..3000 {
            if dice.below(5) < 3 || live.is_empty() {
                let most = if dice.below(2) == 0 { 3000 } else { 30 * MIB };
                let size = 1 + dice.below(most);
                let block = s.alloc(&on, size).expect("memory");
                let (at, len) = range(&block);
                assert!(len >= size && fake.is_backed(at, len));
                if let Some((a, b)) = map.range(..at + len).next_back() {
                    assert!(a + b <= at, "overlap");
                }
                map.insert(at, len);
                live.push(block);
            } else {
                let block = live.swap_remove(dice.below(live.len() as u64) as usize);
                map.remove(&range(&block).0);
                let by = if dice.below(4) == 0 { &other } else { &on };
                let point = by.submit().expect("a value");
                s.free(by, block);
                crate::virtual_stream::pass(point);
            }
        }
        live.into_iter().for_each(|b| s.free(&on, b));
    }

    #[test]
    fn blocks_of_the_peers_are_disjoint_and_backed() {
        let (f, b) = fake();
        disjoint(&f, &BestFit::new(b, u64::MAX).expect("a range"), |b| (b.addr, b.bytes));
        let (f, b) = fake();
        disjoint(&f, &TorchLike::new(b, u64::MAX), |b| (b.addr(), b.bytes()));
        let (f, b) = fake();
        disjoint(&f, &RmmLike::new(b, u64::MAX), |b| (b.addr, b.bytes));
    }

    #[test]
    fn the_torch_like_peer_keeps_the_rules_that_it_emulates() {
        let (fake, backing) = fake();
        let t = TorchLike::new(backing, 80 * MIB);
        let on = t.stream().expect("a timeline");
        // 2 MiB for small requests, 20 MiB below 10 MiB, else multiples of 2 MiB.
        let small = t.alloc(&on, 100).expect("memory");
        assert_eq!((small.bytes(), fake.used()), (512, 2 * MIB));
        let mid = t.alloc(&on, 3 * MIB).expect("memory");
        assert_eq!((mid.bytes(), fake.used()), (3 * MIB, 22 * MIB));
        let large = t.alloc(&on, 19 * MIB).expect("memory");
        // One MiB at the end is not split off.
        assert_eq!((large.bytes(), fake.used()), (20 * MIB, 42 * MIB));
        // Another stream cannot take what lies free on this one.
        t.free(&on, large);
        let other = t.stream().expect("a timeline");
        let theirs = t.alloc(&other, 20 * MIB).expect("memory");
        assert_eq!(fake.used(), 62 * MIB);
        // A block that another stream used comes back when that stream is done.
        let point = other.submit().expect("a value");
        t.free(&other, mid);
        let again = t.alloc(&on, 20 * MIB).expect("memory");
        assert_eq!(fake.used(), 62 * MIB, "the cached segment");
        let more = t.alloc(&on, 18 * MIB).expect("memory");
        assert_eq!(fake.used(), 80 * MIB, "the rest of the other one was not enough");
        crate::virtual_stream::pass(point);
        let whole = t.alloc(&on, 20 * MIB).expect("memory");
        assert_eq!(fake.used(), 80 * MIB, "now it is");
        [again, more, whole].into_iter().for_each(|b| t.free(&on, b));
        // Out of memory gives cached segments back first.
        let big = t.alloc(&on, 40 * MIB).expect("memory");
        t.free(&on, big);
        t.free(&other, theirs);
        t.free(&on, small);
        assert!(t.alloc(&on, 81 * MIB).is_none());
        assert_eq!(fake.used(), 0);
    }

    #[test]
    fn the_rmm_like_peer_coalesces_and_takes_from_other_streams() {
        let (fake, backing) = fake();
        let r = RmmLike::new(backing, 64 * MIB);
        let (on, other) = (r.stream().expect("a timeline"), r.stream().expect("a timeline"));
        let blocks: Vec<_> = (0..8).map(|_| r.alloc(&on, 4 * MIB).expect("memory")).collect();
        let used = fake.used();
        blocks.into_iter().for_each(|b| r.free(&on, b));
        let whole = r.alloc(&other, 32 * MIB).expect("memory");
        assert_eq!(fake.used(), used, "merged, and taken from the other stream");
        r.free(&other, whole);
        assert!(r.alloc(&on, 65 * MIB).is_none());
    }

    #[test]
    #[should_panic(expected = "a block of another allocator")]
    fn the_torch_like_peer_takes_its_own_blocks_only() {
        let ((_a, first), (_b, second)) = (fake(), fake());
        let (first, second) = (TorchLike::new(first, 64 * MIB), TorchLike::new(second, 64 * MIB));
        let on = first.stream().expect("a timeline");
        let foreign = first.alloc(&on, MIB).expect("memory");
        let own = second.alloc(&on, MIB).expect("memory");
        second.free(&on, own);
        second.free(&on, foreign);
    }

    #[test]
    fn the_systems_heap_counts_what_it_gives() {
        let s = System::counting(1 << 20);
        s.stream().expect("nothing to fail");
        let a = s.alloc(&(), 1000).expect("memory");
        assert!(s.figures().reserved_peak >= 1000);
        assert!(s.alloc(&(), 1 << 20).is_none(), "over its budget");
        s.free(&(), a);
    }
}
