//! The kernels that programs launch: four of them, for every kind of device.
//!
//! Elements are `u32`, little-endian; a block serves 64 of them. Parameters are three words: the
//! number of elements, and two that a kernel may use. This file names nothing but the runtime's
//! public crate, so that a printed test can contain it.

use leasehold::kernel::{Access, CpuArgs, CpuFn, KernelCheck, KernelDesc, KernelSource};
use leasehold::{Error, KernelBase, Result};

/// Elements of a block.
pub const BLOCK: u32 = 64;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// `out[i] = a[i] + b[i]`. Bindings: a, b, out.
    Add,
    /// `x[i] ^= first + i * second`. Bindings: x.
    Mask,
    /// `out[i] = a[i] * first + second`. Bindings: a, out.
    Scale,
    /// `out[i] = values[places[i] % first]`. Bindings: values, places, out.
    Gather,
}

/// The parameters: elements, first, second.
pub type Params = [u32; 3];

/// The elements of a tile: from where, and how many.
fn part(args: &CpuArgs<'_>) -> (usize, usize) {
    let n = args.params::<Params>()[0] as usize;
    let from = (args.tile()[0] * BLOCK) as usize;
    (from.min(n), (BLOCK as usize).min(n.saturating_sub(from)))
}

unsafe fn add(args: &CpuArgs<'_>) {
    let (from, count) = part(args);
    // SAFETY: the first two are read, and each tile has elements of its own in the third.
    let (a, b, out) = unsafe {
        (args.slice::<u32>(0), args.slice::<u32>(1), args.slice_mut::<u32>(2, from, count))
    };
    for (i, o) in out.iter_mut().enumerate() {
        *o = a[from + i].wrapping_add(b[from + i]);
    }
}

unsafe fn mask(args: &CpuArgs<'_>) {
    let (from, count) = part(args);
    let [_, first, second] = args.params::<Params>();
    // SAFETY: each tile has elements of its own.
    for (i, x) in unsafe { args.slice_mut::<u32>(0, from, count) }.iter_mut().enumerate() {
        *x ^= first.wrapping_add(((from + i) as u32).wrapping_mul(second));
    }
}

unsafe fn scale(args: &CpuArgs<'_>) {
    let (from, count) = part(args);
    let [_, first, second] = args.params::<Params>();
    // SAFETY: the first is read, and each tile has elements of its own in the second.
    let (a, out) = unsafe { (args.slice::<u32>(0), args.slice_mut::<u32>(1, from, count)) };
    for (i, o) in out.iter_mut().enumerate() {
        *o = a[from + i].wrapping_mul(first).wrapping_add(second);
    }
}

unsafe fn gather(args: &CpuArgs<'_>) {
    let (from, count) = part(args);
    let values = args.params::<Params>()[1].max(1);
    // SAFETY: the first two are read, and each tile has elements of its own in the third.
    let (a, b, out) = unsafe {
        (args.slice::<u32>(0), args.slice::<u32>(1), args.slice_mut::<u32>(2, from, count))
    };
    for (i, o) in out.iter_mut().enumerate() {
        *o = a[(b[from + i] % values) as usize];
    }
}

impl Kernel {
    /// All of them.
    pub const ALL: [Kernel; 4] = [Kernel::Add, Kernel::Mask, Kernel::Scale, Kernel::Gather];

    /// The name, of its entry too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Add => "stress_add",
            Kernel::Mask => "stress_mask",
            Kernel::Scale => "stress_scale",
            Kernel::Gather => "stress_gather",
        }
    }

    /// The kernel's accesses to its bindings.
    #[must_use]
    pub fn bindings(self) -> &'static [Access] {
        match self {
            Kernel::Add | Kernel::Gather => &[Access::Read, Access::Read, Access::Write],
            Kernel::Mask => &[Access::ReadWrite],
            Kernel::Scale => &[Access::Read, Access::Write],
        }
    }

    /// The kernel as a Rust function.
    #[must_use]
    pub fn function(self) -> CpuFn {
        match self {
            Kernel::Add => add,
            Kernel::Mask => mask,
            Kernel::Scale => scale,
            Kernel::Gather => gather,
        }
    }

    /// Whether the kernel is described as one that can read its first binding early.
    #[must_use]
    pub fn reads_early(self) -> bool {
        self == Kernel::Scale
    }

    /// The kernel's description with a source. Compiled for compute capability 7.5, the sources for
    /// CUDA need not wait themselves, and they are described as if they did. So graphs of the
    /// simulated driver have dependent launches.
    #[must_use]
    pub fn desc(self, source: KernelSource<'static>) -> KernelDesc<'static> {
        KernelDesc {
            dependent_launch: true,
            early_reads: u32::from(self.reads_early()),
            params: size_of::<Params>() as u32,
            ..KernelDesc::new(self.name(), source, self.bindings(), self.check()).aligned(4)
        }
    }

    /// Which launches the kernel takes: those whose elements, and values to gather, lie in the
    /// bindings.
    fn check(self) -> KernelCheck {
        KernelCheck::new(move |launch| {
            let [_, 1, 1] = launch.grid else {
                return Err(Error::invalid("a grid of one dimension"));
            };
            let [n, first, _] = launch.params::<Params>()?;
            for i in 0..launch.bindings() {
                let values = self == Kernel::Gather && i == 0;
                launch.want(i, 4 * u64::from(if values { first.max(1) } else { n }))?;
            }
            Ok(())
        })
    }

    /// The kernel with a source.
    ///
    /// # Errors
    /// None: the description is within the limits.
    ///
    /// # Safety
    /// - The source is this kernel's, for one kind of device.
    pub unsafe fn base(self, source: KernelSource<'static>) -> Result<KernelBase> {
        // SAFETY: the source is this kernel's, by the contract. Each tile writes elements of its
        // own below the number that the check asks for in every binding, and gathers from below the
        // number of values that it asks for.
        unsafe { KernelBase::new(self.desc(source)) }
    }
}
