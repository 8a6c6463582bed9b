//! Launches, one or several as one submission.

use crate::kernel::{Grid, KernelBase, KernelSession, Params};
use crate::stream::Stream;
use crate::view::Operand;
use leasehold_core::Result;

/// A launch of [`Stream::launch_many`].
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a KernelBase,
    /// The operands, in the order of the kernel's bindings.
    pub operands: &'a [Operand<'a>],
    /// The bytes of the parameters.
    pub params: &'a [u8],
    /// Blocks, threads of a block and bytes of shared memory.
    pub grid: Grid,
}

impl Stream {
    /// Launches a kernel, as one submission: waits on the device for whoever used the operands
    /// before, binds them in their order, and marks their use. Does not wait for the launch. On a
    /// stream of a recording the launch is noted.
    ///
    /// [`launch_many`](Self::launch_many) has several launches in one submission.
    ///
    /// ```
    /// use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
    /// use leasehold::{Access, DeviceId, KernelBase, Runtime, View};
    ///
    /// unsafe fn scale(args: &CpuArgs<'_>) {
    ///     // SAFETY: each tile has 4 values of its own: the grid has one dimension.
    ///     let x = unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize * 4, 4) };
    ///     x.iter_mut().for_each(|x| *x *= args.params::<f32>());
    /// }
    ///
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (source, check) = (KernelSource::Cpu(scale), KernelCheck::grid_1d());
    /// let desc = KernelDesc::new("scale", source, &[Access::ReadWrite], check);
    /// // SAFETY: it touches its binding alone, within bounds that `slice_mut` checks. Each tile
    /// // writes a part of its own.
    /// let kernel = unsafe { KernelBase::new(desc.params_of::<f32>().aligned(4)) }?;
    /// let x = runtime.upload(&[1.0f32; 8])?;
    /// runtime.stream().launch(&kernel, &[x.read_write()], &3.0f32, 2)?;
    /// assert_eq!(runtime.to_vec::<f32>(&x)?, [3.0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for another number of operands, another role, another size of parameters
    /// or a misaligned or overlapping operand than the kernel declares, for a grid beyond the
    /// device's limits, for memory of another device, and for what the kernel's check refuses; what
    /// making the kernel ready says; `Occupied` while this thread has a session open on the stream;
    /// the stream's cause when it is poisoned.
    #[doc(alias("dispatch", "cuLaunchKernel"))]
    #[inline]
    pub fn launch<P: Params + ?Sized>(
        &self,
        kernel: &KernelBase,
        operands: &[Operand<'_>],
        params: &P,
        grid: impl Into<Grid>,
    ) -> Result<()> {
        let Grid { blocks, threads, shared } = grid.into();
        KernelSession::begin(kernel, self)?
            .note_dependencies(operands)?
            .stage_bindings()?
            .stage_params(params.bytes())?
            .stage_launch(blocks, threads, shared)?
            .tokens_noted()
            .finish()
            .map(drop)
    }

    /// Launches kernels in their order, as one submission: each comes after those before it. As
    /// [`launch`](Self::launch) otherwise. If one is refused, nothing is submitted. Without a
    /// launch there is nothing to do.
    ///
    /// ```
    /// use leasehold::kernel::Launch;
    /// use leasehold::prelude::*;
    ///
    /// unsafe fn double(args: &CpuArgs<'_>) {
    ///     // SAFETY: each tile has 4 values of its own: the grid has one dimension.
    ///     let x = unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize * 4, 4) };
    ///     x.iter_mut().for_each(|x| *x *= 2.0);
    /// }
    ///
    /// # fn main() -> Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (source, check) = (KernelSource::Cpu(double), KernelCheck::grid_1d());
    /// let desc = KernelDesc::new("double", source, &[Access::ReadWrite], check).aligned(4);
    /// // SAFETY: it touches its binding alone, within bounds that `slice_mut` checks. Each tile
    /// // writes a part of its own.
    /// let kernel = unsafe { KernelBase::new(desc) }?;
    /// let x = runtime.upload(&[1.0f32; 8])?;
    /// let operands = [x.read_write()];
    /// let launch = Launch { kernel: &kernel, operands: &operands, params: &[], grid: 2.into() };
    /// runtime.stream().launch_many(&[launch; 3])?;
    /// assert_eq!(runtime.to_vec(&x)?, [8.0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_many(&self, launches: &[Launch<'_>]) -> Result<()> {
        let mut staged = None;
        for &Launch { kernel, operands, params, grid } in launches {
            let session = match staged.take() {
                None => KernelSession::begin(kernel, self)?,
                Some(session) => KernelSession::kernel(session, kernel)?,
            };
            let session = session.note_dependencies(operands)?.stage_bindings()?;
            let session = session.stage_params(params)?;
            let session = session.stage_launch(grid.blocks, grid.threads, grid.shared)?;
            staged = Some(session.tokens_noted());
        }
        staged.map_or(Ok(()), |session| session.finish().map(drop))
    }
}
