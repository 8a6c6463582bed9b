//! Measures that several benchmarks compare themselves with.

use crate::failure::Failure;
use leasehold::{Runtime, View};
use serde::Serialize;
use std::time::Instant;

/// Bytes that a step reads, at the mean context of the run.
#[derive(Debug, Serialize)]
pub(super) struct Bytes {
    pub(super) weights: u64,
    pub(super) kv_cache: u64,
    pub(super) total: u64,
}

impl Bytes {
    pub(super) fn new(weights: u64, kv_cache: u64) -> Self {
        Self { weights, kv_cache, total: weights.saturating_add(kv_cache) }
    }
}

/// The bandwidth of a copy from device memory to device memory, bytes read and written, in
/// gigabytes per second: the best of some rounds.
pub(super) fn copy_bandwidth(runtime: &Runtime, simulated: bool) -> Result<f64, Failure> {
    // Beyond every cache, and long enough that the launches do not count.
    let (bytes, copies) = match (simulated, runtime.raw_device().caps().host_visible) {
        (true, _) => (1 << 20, 1),
        (false, true) => (64 << 20, 4),
        (false, false) => (256 << 20, 16),
    };
    let (from, to) = (runtime.alloc(bytes)?, runtime.alloc(bytes)?);
    let stream = runtime.stream();
    stream.fill(from.view(), 1u8)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        stream.copy(to.view(), from.view())?;
        stream.synchronize()?;
        let begin = Instant::now();
        (0..copies).try_for_each(|_| stream.copy(to.view(), from.view()))?;
        stream.synchronize()?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(2.0 * bytes as f64 * f64::from(copies) / best / 1e9)
}
