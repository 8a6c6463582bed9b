//! Benchmarks of handles and leases against `Arc` in the same process, for this example and for
//! `leasehold-workbench bench lease`. Nothing here is a test.
//!
//! Each figure comes from rounds: in each round our operation, then the peer's, for a fraction of a
//! millisecond each. A disturbance longer than a round does not change the round's ratio. The
//! figures are medians over the rounds.

use leasehold_core::{
    EventHandle, Handle, Lease, PoolConfig, Recycle, Resource, Result, SlotPool, Tagged, tags,
};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// One figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The measured operation.
    pub name: &'static str,
    /// Nanoseconds of one operation, the median.
    pub ns: f64,
    /// The operation of the comparison; empty without one.
    pub peer: &'static str,
    /// Nanoseconds of one peer operation, the median; 0 without a peer.
    pub peer_ns: f64,
    /// The median of the rounds' ratios; 0 without a peer.
    pub ratio: f64,
    /// The limit of `ratio`, or of `ns` without a peer.
    pub limit: f64,
}

impl Figure {
    /// Returns whether the figure is within its limit.
    #[must_use]
    pub fn holds(&self) -> bool {
        (if self.peer.is_empty() { self.ns } else { self.ratio }) <= self.limit
    }
}

/// The payload: as large as a small native object with its bookkeeping.
struct Thing([u64; 4]);

impl Tagged for Thing {
    type Tag = tags::Event;
}

struct Things;

impl Resource for Things {
    type Payload = Thing;
    type Request<'a> = u64;
    const NAME: &'static str = "thing";

    fn create(&self, handle: EventHandle, request: &u64) -> Result<Thing> {
        Ok(Thing([*request, u64::from(handle.index()), 0, 0]))
    }

    #[inline]
    fn fits(&self, idle: &mut Thing, request: &u64) -> bool {
        idle.0[0] = *request;
        true
    }

    #[inline]
    fn recycle(&self, _: &mut Thing) -> Recycle {
        Recycle::Keep
    }
}

/// The pools and resources that the operations use.
pub struct Bench {
    list: SlotPool<Things>,
    cells: SlotPool<Things>,
    lease: Lease<Thing>,
    handle: Handle<tags::Event>,
    arc: Arc<Thing>,
}

/// An operation, which runs so many times.
pub type Body = fn(&Bench, u64);

impl Bench {
    /// Makes pools with one idle resource each, and one held resource.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new() -> Result<Self> {
        let list = SlotPool::new(Things, PoolConfig::default())?;
        let cells =
            SlotPool::new(Things, PoolConfig { thread_cells: true, ..PoolConfig::default() })?;
        let lease = list.acquire(&1)?;
        let handle = lease.handle();
        Ok(Self { list, cells, lease, handle, arc: Arc::new(Thing([1; 4])) })
    }

    /// Takes a recycled slot and gives it back.
    #[inline(never)]
    pub fn acquire_release(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.list.acquire(black_box(&i)) else { return };
            drop(black_box(lease));
        }
    }

    /// The same, and asks for the handle.
    #[inline(never)]
    pub fn acquire_handle_release(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.list.acquire(black_box(&i)) else { return };
            black_box(lease.handle());
            drop(black_box(lease));
        }
    }

    /// The same through a thread cell.
    #[inline(never)]
    pub fn acquire_release_cells(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.cells.acquire(black_box(&i)) else { return };
            drop(black_box(lease));
        }
    }

    /// Clones a lease and drops the clone.
    #[inline(never)]
    pub fn clone_drop(&self, n: u64) {
        for _ in 0..n {
            drop(black_box(black_box(&self.lease).clone()));
        }
    }

    /// Leases by a handle.
    #[inline(never)]
    pub fn lease_handle_drop(&self, n: u64) {
        for _ in 0..n {
            let Ok(lease) = self.list.lease(black_box(self.handle)) else { return };
            drop(black_box(lease));
        }
    }

    /// Asks whether a handle is alive.
    #[inline(never)]
    pub fn is_alive(&self, n: u64) {
        for _ in 0..n {
            black_box(self.list.is_alive(black_box(self.handle)));
        }
    }

    /// `Arc::new` and its drop.
    #[inline(never)]
    pub fn arc_new_drop(&self, n: u64) {
        for i in 0..n {
            drop(black_box(Arc::new(black_box(Thing([i, 0, 0, 0])))));
        }
    }

    /// A clone of an `Arc` and its drop.
    #[inline(never)]
    pub fn arc_clone_drop(&self, n: u64) {
        for _ in 0..n {
            drop(black_box(black_box(&self.arc).clone()));
        }
    }

    fn time(&self, body: Body, n: u64) -> f64 {
        let begin = Instant::now();
        body(self, n);
        begin.elapsed().as_nanos() as f64 / n as f64
    }
}

/// The operation of a comparison.
#[derive(Clone, Copy)]
struct Peer {
    name: &'static str,
    body: Body,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures all figures, in about a quarter of a second.
///
/// # Errors
/// `OutOfMemory`.
pub fn run() -> Result<Vec<Figure>> {
    const ROUNDS: usize = 101;
    const TIMES: u64 = 5_000;
    let new = Some(Peer { name: "Arc::new + drop", body: Bench::arc_new_drop });
    let clone = Some(Peer { name: "Arc clone + drop", body: Bench::arc_clone_drop });
    let figures: [(&str, Body, Option<Peer>, f64); 6] = [
        ("acquire + release of a recycled slot", Bench::acquire_release, new, 1.8),
        ("the same, asked for its handle", Bench::acquire_handle_release, new, 1.8),
        ("acquire + release through a thread cell", Bench::acquire_release_cells, new, 1.0),
        ("clone + drop", Bench::clone_drop, clone, 1.05),
        ("lease by handle + drop", Bench::lease_handle_drop, clone, 1.3),
        ("is_alive", Bench::is_alive, None, 4.0),
    ];
    let bench = Bench::new()?;
    let take = |(name, ours, peer, limit): (&'static str, Body, Option<Peer>, f64)| {
        let (mut ns, mut peer_ns, mut ratios) = ([0.0; ROUNDS], [0.0; ROUNDS], [0.0; ROUNDS]);
        for round in 0..ROUNDS {
            ns[round] = bench.time(ours, TIMES);
            if let Some(peer) = peer {
                peer_ns[round] = bench.time(peer.body, TIMES);
                ratios[round] = ns[round] / peer_ns[round];
            }
        }
        let (ns, peer_ns, ratio) = (median(&mut ns), median(&mut peer_ns), median(&mut ratios));
        Figure { name, ns, peer: peer.map_or("", |peer| peer.name), peer_ns, ratio, limit }
    };
    Ok(figures.into_iter().map(take).collect())
}
