//! What a backend supplies to be tried: itself, the test kernels for its device, and what is known about it.
//!
//! This module must not know the cases.

use leasehold::Result;
use leasehold::hal::{Access, Backend, KernelDesc};
use std::sync::Arc;

/// The kernels that cases run. Elements are `u32`, little-endian; a block of 64 threads (or one CPU tile) serves elements
/// `64 * block .. 64 * (block + 1)` of the output, as far as it goes. Bindings and parameters are as [`bindings`](Self::bindings) and
/// [`params`](Self::params) say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TestKernel {
    /// `out[i] = value`. Bindings: out. Parameters: value (`u32`).
    Fill,
    /// `out[i] = a[i] + b[i]`, wrapping. Bindings: a, b, out.
    Add,
    /// Reads `flag[0]` again and again, past any cache, until it is not zero or `limit` milliseconds are over; then `out[0]` is 1 if it
    /// saw the flag, else 2. Bindings: flag, out. Parameters: limit (`u32`). One block.
    SpinUntilFlag,
    /// Fails while it runs: a trap, a panic. No bindings.
    Trap,
    /// Writes the element after the end of its binding, in a way that the device notices. Bindings: out.
    OutOfBounds,
}

impl TestKernel {
    /// All of them.
    pub const ALL: [TestKernel; 5] =
        [TestKernel::Fill, TestKernel::Add, TestKernel::SpinUntilFlag, TestKernel::Trap, TestKernel::OutOfBounds];

    /// Threads of a block.
    pub const BLOCK: u32 = 64;

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TestKernel::Fill => "conformance_fill",
            TestKernel::Add => "conformance_add",
            TestKernel::SpinUntilFlag => "conformance_spin",
            TestKernel::Trap => "conformance_trap",
            TestKernel::OutOfBounds => "conformance_out_of_bounds",
        }
    }

    /// What it does with its bindings.
    #[must_use]
    pub fn bindings(self) -> &'static [Access] {
        match self {
            TestKernel::Fill | TestKernel::OutOfBounds => &[Access::Write],
            TestKernel::Add => &[Access::Read, Access::Read, Access::Write],
            TestKernel::SpinUntilFlag => &[Access::Read, Access::Write],
            TestKernel::Trap => &[],
        }
    }

    /// Bytes of its parameters.
    #[must_use]
    pub fn params(self) -> u32 {
        match self {
            TestKernel::Fill | TestKernel::SpinUntilFlag => 4,
            TestKernel::Add | TestKernel::Trap | TestKernel::OutOfBounds => 0,
        }
    }
}

/// Something known about a case on a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expectation {
    /// The case's number.
    pub case: u16,
    /// Why.
    pub reason: &'static str,
}

/// What is known about a backend, as data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expectations {
    /// Cases that mean nothing on it. They are not run.
    pub unsupported: &'static [Expectation],
    /// Cases that fail on it. They are run; one that passes fails the run.
    pub expected_failure: &'static [Expectation],
}

/// A backend under test.
pub trait Factory: Send + Sync + 'static {
    /// A backend, fresh where the driver allows it: each case gets one and shuts it down.
    ///
    /// # Errors
    /// `Unavailable` skips everything.
    fn backend(&self) -> Result<Arc<dyn Backend>>;

    /// The source of a test kernel; `None` where the device cannot have it.
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>>;

    /// What is known.
    fn expectations(&self) -> Expectations {
        Expectations::default()
    }
}
