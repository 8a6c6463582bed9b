//! A description of a kernel, made step by step.

use crate::kernel::base::KernelBase;
use leasehold_core::{Error, Result};
use leasehold_hal::{
    Access, CpuFn, FromParams, KernelCheck, KernelDesc, KernelSource, LaunchInfo, Limits, Overlap,
};
use std::borrow::Cow;

/// A kernel in the making, from [`cpu`](Self::cpu). Bindings are declared in their order.
///
/// By default the kernel has no parameters and no alignment, its bindings do not overlap, and its
/// launches have one dimension: most kernels give each tile a part of its own by the tile's first
/// number, and a second dimension would give two tiles the same part.
///
/// ```
/// use leasehold::prelude::*;
///
/// const TILE: usize = 4;
///
/// /// `y = a * x`.
/// unsafe fn scale(args: &CpuArgs<'_>) {
///     let from = args.tile()[0] as usize * TILE;
///     // SAFETY: 0 is only read; each tile writes a part of 1 of its own.
///     let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, from, TILE)) };
///     std::iter::zip(y, &x[from..]).for_each(|(y, x)| *y = args.params::<f32>() * x);
/// }
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let scale = KernelBuilder::cpu("scale", scale).reads(1).writes(1).params::<f32>().aligned(4);
/// // SAFETY: it touches its bindings through slices, which check bounds. Each tile writes its
/// // own part.
/// let scale = unsafe { scale.build() }?;
/// let (x, y) = (runtime.upload(&[1.0f32; 8])?, runtime.alloc_array::<f32>(8)?);
/// runtime.stream().launch(&scale, &[x.read(), y.write()], &3.0f32, 2)?;
/// assert_eq!(runtime.to_vec(&y)?, [3.0; 8]);
/// assert!(runtime.stream().launch(&scale, &[x.read(), y.write()], &3.0f32, [1, 2, 1]).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a kernel is made by `build`"]
pub struct KernelBuilder {
    desc: KernelDesc<'static>,
}

impl KernelBuilder {
    /// A kernel of the CPU's (and of simulated devices), to be described and [built](Self::build).
    pub fn cpu(name: impl Into<Cow<'static, str>>, function: CpuFn) -> Self {
        let check = KernelCheck::grid_1d();
        Self { desc: KernelDesc::new(name, KernelSource::Cpu(function), &[], check) }
    }

    fn bind(mut self, access: Access, count: usize) -> Self {
        // One beyond the limit is refused as any larger number is.
        let count = count.min(Limits::BINDINGS as usize + 1);
        self.desc.bindings.to_mut().extend(std::iter::repeat_n(access, count));
        self
    }

    /// The next `count` bindings are read.
    pub fn reads(self, count: usize) -> Self {
        self.bind(Access::Read, count)
    }

    /// The next `count` bindings are written, and nothing of them is read.
    pub fn writes(self, count: usize) -> Self {
        self.bind(Access::Write, count)
    }

    /// The next `count` bindings are read and written.
    pub fn read_writes(self, count: usize) -> Self {
        self.bind(Access::ReadWrite, count)
    }

    /// The parameters are a `P`. Default: none.
    pub fn params<P: FromParams>(self) -> Self {
        Self { desc: self.desc.params_of::<P>() }
    }

    /// All bindings are aligned to `bytes`, a power of two. Default: 1.
    pub fn aligned(self, bytes: u32) -> Self {
        Self { desc: self.desc.aligned(bytes) }
    }

    /// Bindings may overlap by the rule `overlap`. Default: [`Overlap::Refused`].
    pub fn overlapping(self, overlap: Overlap) -> Self {
        Self { desc: self.desc.overlapping(overlap) }
    }

    /// Launches have one dimension, and are as `check` wants them.
    pub fn check(
        self,
        check: impl Fn(&LaunchInfo<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.launches(KernelCheck::new(move |launch| match launch.grid {
            [_, 1, 1] => check(launch),
            _ => Err(Error::invalid(format!("a grid of one dimension, not {:?}; launch it with a number, or give the kernel a check of its own", launch.grid))),
        }))
    }

    /// Launches are as `check` wants them, in any number of dimensions.
    pub fn launches(mut self, check: KernelCheck) -> Self {
        self.desc.check = check;
        self
    }

    /// The description, for a kernel with [several sources](KernelBase::with_sources).
    #[must_use]
    pub fn desc(self) -> KernelDesc<'static> {
        self.desc
    }

    /// The kernel.
    ///
    /// # Errors
    /// As [`KernelBase::new`].
    ///
    /// # Safety
    /// - As [`KernelBase::new`].
    pub unsafe fn build(self) -> Result<KernelBase> {
        // SAFETY: by the caller's contract.
        unsafe { KernelBase::new(self.desc) }
    }
}
