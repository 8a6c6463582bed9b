//! The interface of a backend under test: the backend, the test kernels for its device, and its
//! known deviations.
//!
//! This module must not know the cases.

use bytemuck::{Pod, Zeroable};
use leasehold::backend::{Access, Backend, ForeignCall, KernelDesc};
use leasehold::kernel::TensorMap;
use leasehold::{DeviceId, Result};
use leasehold_collective::driver::Host;
use leasehold_collective::{CollectiveOps, World};
use std::sync::Arc;

/// The kernels that cases run. Elements are `u32`, little-endian. A block of 64 threads (or one CPU
/// tile) computes elements `64 * block .. 64 * (block + 1)` of the output, as far as they exist.
/// Bindings and parameters are those of [`bindings`](Self::bindings) and [`params`](Self::params).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TestKernel {
    /// `out[i] = value`. Bindings: out. Parameters: value (`u32`).
    Fill,
    /// `out[i] = a[i] + b[i]`, wrapping. Bindings: a, b, out.
    Add,
    /// The same as [`Add`](Self::Add), for a kernel that waits itself for the one in front of it,
    /// and can read `a` and `b` early ([`KernelDesc::early_reads`]).
    EarlyAdd,
    /// `out[i] = a[i]` below the limit, and all ones beyond it. Bindings: a, the limit (a number of
    /// bytes, of 64 bits), out. It reads `a` only below the limit
    /// ([`KernelDesc::limits`]).
    Limited,
    /// Reads some elements of parts that grow, every `step`-th of all from the first on, and writes
    /// `value + i` there first unless `value` is 0: `out[i]` is the element, and all ones beyond
    /// its part's limit. Bindings: all parts, a limit of each (a number of bytes, of 64 bits), out.
    /// Parameters: elements of a part, `step`, `value` (`u32` each). The output has no more
    /// elements than the parts' every `step`-th.
    Parts,
    /// `out` is a box of a tensor of two dimensions, with zeros out of bounds. Bindings: the
    /// tensor, out. Parameters: [`BoxAt`]. One block. CUDA has it from compute capability 9.0 on.
    Box,
    /// The same as [`Box`](Self::Box), of a tensor whose rows are as long as the box's, and zero if
    /// the box ends beyond the limit. Bindings: the tensor, the limit (a number of bytes, of 64
    /// bits), out. It reads the tensor only below the limit ([`KernelDesc::limits`]).
    LimitedBox,
    /// A block's elements are the number of the next block in its cluster
    /// ([`CLUSTER`](Self::CLUSTER)), from that block's shared memory. Bindings: out. The grid has
    /// three dimensions, and a block's number counts x first. CUDA has it from compute capability
    /// 9.0 on, and no other device.
    Cluster,
    /// Each block adds 1 to `arrived[0]`, and waits until all have done so: all elements are the
    /// number of blocks. Bindings: arrived, out. A cooperative launch, which CUDA alone has. The
    /// grid is that of [`Cluster`](Self::Cluster).
    Together,
    /// Reads `flag[0]` repeatedly, without a cache, until it is not zero or `limit` milliseconds
    /// have passed. Then `out[0]` is 1 if the kernel saw the flag, else 2. Bindings: flag, out.
    /// Parameters: limit (`u32`). One block. Not for a device that completes one operation before
    /// it begins another's: the kernel would always spin to the limit.
    SpinUntilFlag,
    /// Fails during its execution: a trap, a panic. No bindings.
    Trap,
    /// Writes the element after the end of its binding, in a way that the device detects. Bindings:
    /// out.
    OutOfBounds,
}

/// The parameters of [`TestKernel::Box`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BoxAt {
    /// The tensor of `u32`, of two dimensions with steps of 1.
    pub map: TensorMap,
    /// The box's first column, a multiple of 4, and its first row.
    pub at: [i32; 2],
    /// The map's box, which a kernel cannot read from a driver's form of the map.
    pub size: [u32; 2],
}

impl BoxAt {
    /// The most elements of a box.
    pub const ELEMENTS: u32 = 4096;
}

impl TestKernel {
    /// All test kernels.
    pub const ALL: [TestKernel; 12] = [
        TestKernel::Fill,
        TestKernel::Add,
        TestKernel::EarlyAdd,
        TestKernel::Limited,
        TestKernel::Parts,
        TestKernel::Box,
        TestKernel::LimitedBox,
        TestKernel::Cluster,
        TestKernel::Together,
        TestKernel::SpinUntilFlag,
        TestKernel::Trap,
        TestKernel::OutOfBounds,
    ];

    /// Threads of a block.
    pub const BLOCK: u32 = 64;

    /// Blocks of a cluster of [`Cluster`](Self::Cluster).
    pub const CLUSTER: [u32; 3] = [2, 1, 2];

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TestKernel::Fill => "conformance_fill",
            TestKernel::Add => "conformance_add",
            TestKernel::EarlyAdd => "conformance_early_add",
            TestKernel::Limited => "conformance_limited",
            TestKernel::Parts => "conformance_parts",
            TestKernel::Box => "conformance_box",
            TestKernel::LimitedBox => "conformance_limited_box",
            TestKernel::Cluster => "conformance_cluster",
            TestKernel::Together => "conformance_together",
            TestKernel::SpinUntilFlag => "conformance_spin",
            TestKernel::Trap => "conformance_trap",
            TestKernel::OutOfBounds => "conformance_out_of_bounds",
        }
    }

    /// The kernel's access to each of its bindings.
    #[must_use]
    pub fn bindings(self) -> &'static [Access] {
        match self {
            TestKernel::Fill | TestKernel::Cluster | TestKernel::OutOfBounds => &[Access::Write],
            TestKernel::Together => &[Access::ReadWrite, Access::Write],
            TestKernel::Add
            | TestKernel::EarlyAdd
            | TestKernel::Limited
            | TestKernel::LimitedBox => &[Access::Read, Access::Read, Access::Write],
            TestKernel::Parts => &[Access::ReadWrite, Access::Read, Access::Write],
            TestKernel::SpinUntilFlag | TestKernel::Box => &[Access::Read, Access::Write],
            TestKernel::Trap => &[],
        }
    }

    /// The bindings that it can read early, bit `i` for binding `i`.
    #[must_use]
    pub fn early_reads(self) -> u32 {
        if self == TestKernel::EarlyAdd { 0b11 } else { 0 }
    }

    /// The bindings that have a limit, each with the binding that has it.
    #[must_use]
    pub fn limits(self) -> &'static [(u32, u32)] {
        match self {
            TestKernel::Limited | TestKernel::Parts | TestKernel::LimitedBox => &[(0, 1)],
            _ => &[],
        }
    }

    /// The tensor maps in the parameters, each with its binding and its offset.
    #[must_use]
    pub fn maps(self) -> &'static [(u32, u32)] {
        match self {
            TestKernel::Box | TestKernel::LimitedBox => &[(0, 0)],
            _ => &[],
        }
    }

    /// Bytes of the parameters.
    #[must_use]
    pub fn params(self) -> u32 {
        match self {
            TestKernel::Fill | TestKernel::SpinUntilFlag => 4,
            TestKernel::Parts => 12,
            TestKernel::Box | TestKernel::LimitedBox => size_of::<BoxAt>() as u32,
            TestKernel::Add
            | TestKernel::EarlyAdd
            | TestKernel::Limited
            | TestKernel::Cluster
            | TestKernel::Together
            | TestKernel::Trap
            | TestKernel::OutOfBounds => 0,
        }
    }
}

/// A known deviation of a backend in one case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expectation {
    /// The case's number.
    pub case: u16,
    /// The reason.
    pub reason: &'static str,
}

/// The known deviations of a backend, as data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expectations {
    /// Cases that do not apply to the backend. They are not run.
    pub unsupported: &'static [Expectation],
    /// Cases that fail on the backend. They are run; if one passes, the run fails.
    pub expected_failure: &'static [Expectation],
}

/// A failure that a driver can be made to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Injected {
    /// The next call that submits work to the device (a launch, a fill, a copy) fails, and none of
    /// it runs. Earlier work is not affected.
    Submission,
    /// The next call that creates a driver object (a module, a pipeline state) fails.
    Creation,
    /// The next call that requests memory from the driver finds none.
    OutOfMemory,
    /// At the next call that submits work, the device is lost permanently.
    DeviceLost,
}

/// The control of a driver's failures on demand.
pub trait Faults: Send + Sync {
    /// Arms a fault, which occurs once, at the first matching call. Returns `false` if this driver
    /// cannot fail in this way.
    fn next(&self, fault: Injected) -> bool;
}

/// A backend with its fault control.
pub type Faulty = (Arc<dyn Backend>, Arc<dyn Faults>);

/// Ranks of collectives, as threads of one process.
pub struct Ranks {
    /// The backend of their devices.
    pub backend: Arc<dyn Backend>,
    /// The world and the device of each rank.
    pub places: Vec<(World, DeviceId)>,
    /// The library of collectives.
    pub library: Arc<dyn CollectiveOps>,
}

impl Ranks {
    /// Ranks on these devices, in their order.
    ///
    /// # Errors
    /// `InvalidArgument` for no devices or more than 65,536.
    pub fn on(
        backend: Arc<dyn Backend>,
        devices: &[DeviceId],
        library: Arc<dyn CollectiveOps>,
    ) -> Result<Self> {
        let worlds = World::threads(devices.len() as u32)?;
        let places = worlds.into_iter().zip(devices.iter().copied()).collect();
        Ok(Self { backend, places, library })
    }

    /// Ranks that share `cpu:0` of this backend.
    ///
    /// # Errors
    /// `InvalidArgument` for no ranks or more than 65,536.
    pub fn on_cpu(backend: Arc<dyn Backend>, size: u32) -> Result<Self> {
        Self::on(backend, &vec![DeviceId::cpu(0); size as usize], Arc::new(Host))
    }
}

/// A backend under test. Only the first two methods are required. The others serve cases that need
/// more than one backend with one device; without them these cases are skipped.
pub trait Factory: Send + Sync + 'static {
    /// A backend, new if the driver allows it. Each case gets one and shuts it down.
    ///
    /// # Errors
    /// `Unavailable` skips all cases.
    fn backend(&self) -> Result<Arc<dyn Backend>>;

    /// The source of a test kernel; `None` if the device cannot have it.
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>>;

    /// The known deviations.
    fn expectations(&self) -> Expectations {
        Expectations::default()
    }

    /// The devices that cases may use, the device under test first. By default all available
    /// devices.
    ///
    /// # Errors
    /// `Unavailable` skips all cases.
    fn devices(&self, backend: &dyn Backend) -> Result<Vec<DeviceId>> {
        Ok(backend.devices()?.iter().map(|d| d.id).collect())
    }

    /// The same backend with the minimum number of its own threads, for cases about deadlocks. By
    /// default the ordinary backend.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    fn one_worker(&self) -> Result<Arc<dyn Backend>> {
        self.backend()
    }

    /// The same backend over a driver that fails on demand. `None` for a real driver.
    fn faulty(&self) -> Option<Result<Faulty>> {
        None
    }

    /// The same backend on a machine without devices. `None` if a device always exists, or if such
    /// a machine cannot be provided.
    fn without_devices(&self) -> Option<Result<Arc<dyn Backend>>> {
        None
    }

    /// Another backend, for cases with two devices if this backend has only one: of another kind,
    /// or another instance of this one.
    fn peer(&self) -> Option<Result<Arc<dyn Backend>>> {
        None
    }

    /// The device that the driver has current on the calling thread. `None` if the driver has no
    /// current device.
    fn current_device(&self) -> Option<DeviceId> {
        None
    }

    /// A library call that violates capture rules: it forks work to another stream and does not
    /// join it. `None` if the driver does not capture.
    fn unjoined_fork(&self) -> Option<ForeignCall> {
        None
    }

    /// Ranks for cases about collectives: at most this many, and at least two. The backend is
    /// another one than those of the other methods. `None` without a library of collectives.
    fn ranks(&self, most: u32) -> Option<Result<Ranks>> {
        let _ = most;
        None
    }

    /// Returns whether a device fault ends the process's use of the driver. If so, cases that cause
    /// one run in a process of their own, if the runner can start one.
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
    fn ranks(&self, most: u32) -> Option<Result<Ranks>> {
        (**self).ranks(most)
    }
    fn fatal_faults(&self) -> bool {
        (**self).fatal_faults()
    }
}
