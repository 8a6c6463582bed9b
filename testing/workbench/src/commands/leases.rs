//! Benchmarks of handles and leases against `Arc` in the same process, for
//! `leasehold-workbench bench lease`. Nothing here is a test.
//!
//! Each figure comes from rounds: in each round our operation, then the peer's, for a fraction of a
//! millisecond each. A disturbance longer than a round does not change the round's ratio. The
//! figures are medians over the rounds.

#[path = "../../../capi-sim/examples/instructions/operations.rs"]
mod operations;

use leasehold_core::Result;
use operations::{Bench, Body};
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

/// `Arc::new` and its drop.
#[inline(never)]
fn arc_new_drop(_: &Bench, n: u64) {
    for i in 0..n {
        drop(black_box(Arc::new(black_box([i, 0, 0, 0]))));
    }
}

/// A clone of an `Arc` and its drop.
#[inline(never)]
fn arc_clone_drop(_: &Bench, n: u64) {
    let arc = Arc::new([1u64; 4]);
    for _ in 0..n {
        drop(black_box(black_box(&arc).clone()));
    }
}

fn time(bench: &Bench, body: Body, n: u64) -> f64 {
    let begin = Instant::now();
    body(bench, n);
    begin.elapsed().as_nanos() as f64 / n as f64
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
    let new = Some(Peer { name: "Arc::new + drop", body: arc_new_drop });
    let clone = Some(Peer { name: "Arc clone + drop", body: arc_clone_drop });
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
            ns[round] = time(&bench, ours, TIMES);
            if let Some(peer) = peer {
                peer_ns[round] = time(&bench, peer.body, TIMES);
                ratios[round] = ns[round] / peer_ns[round];
            }
        }
        let (ns, peer_ns, ratio) = (median(&mut ns), median(&mut peer_ns), median(&mut ratios));
        Figure { name, ns, peer: peer.map_or("", |peer| peer.name), peer_ns, ratio, limit }
    };
    Ok(figures.into_iter().map(take).collect())
}
