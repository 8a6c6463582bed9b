//! One launch as one submission.

use crate::kernel::{Grid, KernelBase, KernelSession, Params};
use crate::stream::Stream;
use crate::view::Operand;
use leasehold_core::Result;

impl Stream {
    /// Launches a kernel, as one submission: waits on the device for whoever used the operands
    /// before, binds them in their order, and marks their use. Does not wait for the launch. On a
    /// stream of a recording the launch is noted.
    ///
    /// A [`KernelSession`] is the long way, for several launches in one
    /// submission.
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
}
