//! What a backend supplies to be tried: itself, the test kernels for its device, and what is known about it.
//!
//! This module must not know the cases.

use leasehold::backend::{Access, Backend, ForeignCall, KernelDesc};
use leasehold::{DeviceId, Result};
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
    /// saw the flag, else 2. Bindings: flag, out. Parameters: limit (`u32`). One block. Not for a device that runs one operation to its end
    /// before it begins another's: it would always spin to the limit.
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

/// Something that can go wrong in a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Injected {
    /// The next call that hands work to the device (a launch, a fill, a copy) fails, and nothing of it runs. What was there is unharmed.
    Submission,
    /// The next call that makes an object of the driver's (a module, a pipeline state) fails.
    Creation,
    /// The next call that takes memory from the driver finds none.
    OutOfMemory,
    /// At the next call that hands work to the device, the device is lost, for good.
    DeviceLost,
}

/// The switchboard of a backend whose driver can be made to fail.
pub trait Faults: Send + Sync {
    /// Arms a fault: it strikes once, whatever comes first. Gives `false` when this driver cannot fail so.
    fn next(&self, fault: Injected) -> bool;
}

/// A backend with its switchboard.
pub type Faulty = (Arc<dyn Backend>, Arc<dyn Faults>);

/// A backend under test. Only the first two methods must be written; the others let cases be tried that need more than one backend with one
/// device, and skip them otherwise.
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

    /// The devices that cases may use, the one under test first. By default all that there are.
    ///
    /// # Errors
    /// `Unavailable` skips everything.
    fn devices(&self, backend: &dyn Backend) -> Result<Vec<DeviceId>> {
        Ok(backend.devices()?.iter().map(|d| d.id).collect())
    }

    /// The same backend with as few threads of its own as it can have, for cases about dead-locks. By default the ordinary one.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    fn one_worker(&self) -> Result<Arc<dyn Backend>> {
        self.backend()
    }

    /// The same backend over a driver that can be made to fail. `None` where the driver is a real one.
    fn faulty(&self) -> Option<Result<Faulty>> {
        None
    }

    /// The same backend on a machine without devices. `None` where there is always one, or where that cannot be had.
    fn without_devices(&self) -> Option<Result<Arc<dyn Backend>>> {
        None
    }

    /// Another backend, for cases with two devices when this one has one only: of another kind, or another instance of this one.
    fn peer(&self) -> Option<Result<Arc<dyn Backend>>> {
        None
    }

    /// The device that the driver takes for the calling thread's current one. `None` where the driver has no such notion (or no device is
    /// current).
    fn current_device(&self) -> Option<DeviceId> {
        None
    }

    /// A library call that misbehaves when it is taken into a graph: it begins work beside the stream that it is given and does not join it.
    /// `None` where the driver captures nothing.
    fn unjoined_fork(&self) -> Option<ForeignCall> {
        None
    }

    /// Whether a device fault ends the process's use of the driver. Cases that make one then run in a process of their own, where the runner
    /// can start one.
    fn fatal_faults(&self) -> bool {
        false
    }
}

impl<F: Factory + ?Sized> Factory for Arc<F> {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        (**self).backend()
    }
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        (**self).kernel(kernel)
    }
    fn expectations(&self) -> Expectations {
        (**self).expectations()
    }
    fn devices(&self, backend: &dyn Backend) -> Result<Vec<DeviceId>> {
        (**self).devices(backend)
    }
    fn one_worker(&self) -> Result<Arc<dyn Backend>> {
        (**self).one_worker()
    }
    fn faulty(&self) -> Option<Result<Faulty>> {
        (**self).faulty()
    }
    fn without_devices(&self) -> Option<Result<Arc<dyn Backend>>> {
        (**self).without_devices()
    }
    fn peer(&self) -> Option<Result<Arc<dyn Backend>>> {
        (**self).peer()
    }
    fn current_device(&self) -> Option<DeviceId> {
        (**self).current_device()
    }
    fn unjoined_fork(&self) -> Option<ForeignCall> {
        (**self).unjoined_fork()
    }
    fn fatal_faults(&self) -> bool {
        (**self).fatal_faults()
    }
}
