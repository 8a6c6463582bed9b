//! The operations of a session on a launch: bind, set parameters, dispatch. New convenience for
//! launches belongs here, not in the base.

use crate::kernel::session::{Bound, Dispatched, KernelSession, Parametrised, Ready};
use bytemuck::NoUninit;
use leasehold_core::Result;

/// Binds the operands that the session waited for, in their order: it is the kernel's own, with the
/// roles that the kernel declares.
///
/// # Errors
/// `InvalidArgument` for another number of operands or another role, for one that is not aligned as
/// the kernel declares, and for two that overlap although the kernel does not declare that they
/// may.
#[inline]
#[doc(alias = "MpsKernelSessionOps")]
pub fn bind(session: KernelSession<'_, Ready>) -> Result<KernelSession<'_, Bound>> {
    session.stage_bindings()
}

/// Sets the parameters from a plain struct of the size that the kernel declares; `()` is one of
/// none.
///
/// # Errors
/// `InvalidArgument` for another size.
#[inline]
pub fn params<'s, T: NoUninit>(
    session: KernelSession<'s, Bound>,
    params: &T,
) -> Result<KernelSession<'s, Parametrised>> {
    session.stage_params(bytemuck::bytes_of(params))
}

/// Sets the parameters from bytes.
///
/// # Errors
/// `InvalidArgument` for another size than the kernel declares.
#[inline]
pub fn params_bytes<'s>(
    session: KernelSession<'s, Bound>,
    params: &[u8],
) -> Result<KernelSession<'s, Parametrised>> {
    session.stage_params(params)
}

/// For kernels without parameters.
///
/// # Errors
/// `InvalidArgument` when the kernel has some.
#[inline]
pub fn no_params(session: KernelSession<'_, Bound>) -> Result<KernelSession<'_, Parametrised>> {
    session.stage_params(&[])
}

/// Stages a launch of `blocks` blocks of `threads` threads.
///
/// # Errors
/// `InvalidArgument` beyond the device's limits; what the kernel's check says.
#[inline]
pub fn dispatch_1d(
    session: KernelSession<'_, Parametrised>,
    blocks: u32,
    threads: u32,
) -> Result<KernelSession<'_, Dispatched>> {
    session.stage_launch([blocks, 1, 1], [threads, 1, 1], 0)
}

/// Stages a launch of a grid of blocks.
///
/// # Errors
/// `InvalidArgument` beyond the device's limits; what the kernel's check says.
#[inline]
pub fn dispatch_3d(
    session: KernelSession<'_, Parametrised>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
) -> Result<KernelSession<'_, Dispatched>> {
    session.stage_launch(grid, block, shared)
}
