//! The options of a run.

use crate::target::Target;
use std::time::Duration;

/// The functions that the steps of a program call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Border {
    /// The safe API of Rust.
    Rust,
    /// The C ABI, where it has the function.
    C,
}

/// The options of a run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The device.
    pub target: Target,
    /// The first seed.
    pub seed: u64,
    /// How many seeds.
    pub seeds: u64,
    /// Steps of each program.
    pub ops: u32,
    /// Its threads, 1 to 64; other numbers count as the nearest of these.
    pub threads: u8,
    /// As many [ranks](crate::ranks), 1 to 64, with a thread each; `None` for a program of threads.
    pub ranks: Option<u8>,
    /// The functions that the steps call.
    pub border: Border,
    /// Says whether calls fail. With ranks, commands come late instead.
    pub faults: bool,
    /// How long nothing may go on before that is a finding.
    pub timeout: Duration,
    /// How long a failing program is made smaller.
    pub shrink: Duration,
}

impl Options {
    /// One seed of 10,000 steps on 8 threads.
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            target,
            seed: 0,
            seeds: 1,
            ops: 10_000,
            threads: 8,
            ranks: None,
            border: Border::Rust,
            faults: false,
            timeout: Duration::from_secs(60),
            shrink: Duration::from_secs(60),
        }
    }

    /// How many ranks there are, if they are programs of ranks.
    pub(crate) fn some_ranks(&self) -> Option<u32> {
        self.ranks.map(|n| n.clamp(1, 64).into())
    }
}
