//! The calls of a side, and the sizes that all sides have.
//!
//! This file must not know who makes the calls.

use leasehold::Result;
use std::time::Duration;

/// How long a rank waits for the others.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Calls of a graph.
pub(super) const NODES: u32 = 64;
/// Bytes of a small call.
pub(super) const SMALL: u64 = 8 << 10;

/// Seconds of a communicator's life.
pub(super) struct Life {
    pub(super) made: f64,
    pub(super) given_back: f64,
    /// The drop alone, which does not wait.
    pub(super) dropped: Option<f64>,
}

pub(super) type Call<'s> = Box<dyn Fn() -> Result<()> + 's>;

/// A side of the comparison: the runtime, or the library alone. All ranks make the same calls of a
/// side.
pub(super) trait Side {
    /// Sums the first bytes of the side's memory, as floats and in place.
    fn all_reduce(&self, bytes: u64) -> Result<()>;
    /// Sends the first bytes to the next rank, and receives as many from the one before.
    fn exchange(&self, bytes: u64) -> Result<()>;
    /// A call that launches a graph of [`NODES`] sums.
    fn graph(&self, bytes: u64) -> Result<Call<'_>>;
    /// A call that copies the first bytes to memory of another device.
    fn peer(&self, ordinal: u32, bytes: u64) -> Result<Call<'_>>;
    /// Makes another communicator, uses it once, and gives it back.
    fn life(&self) -> Result<Life>;
    /// Waits for the side's stream.
    fn wait(&self) -> Result<()>;
}

/// The number of floats in so many bytes.
pub(super) fn floats(bytes: u64) -> usize {
    bytes as usize / size_of::<f32>()
}

/// The ranks after and before one.
pub(super) fn neighbours(rank: u32, size: u32) -> (u32, u32) {
    ((rank + 1) % size, (rank + size - 1) % size)
}
