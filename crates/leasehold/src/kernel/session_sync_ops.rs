//! The synchronisation of a session, apart from everything else: dependencies before the launch,
//! tokens after it.
//!
//! A *token* is the timepoint that an operand's record keeps of its last write and of the reads
//! since.

use crate::kernel::session::{Begun, Dispatched, KernelSession, Ready, Updated};
use crate::view::Operand;
use leasehold_core::Result;

/// Notes the launch's operands, in the order that the kernel declares, and what they make it wait
/// for. A read waits for the last write, a write for the last write and all reads since. Uses on
/// the session's own stream need no wait. For others one device-side wait per stream is submitted
/// with the launch.
///
/// # Errors
/// `InvalidArgument` for memory of another device; `Recording` for memory of somebody's recording.
#[inline]
pub fn wait<'s>(
    session: KernelSession<'s, Begun>,
    operands: &[Operand<'s>],
) -> Result<KernelSession<'s, Ready>> {
    session.note_dependencies(operands)
}

/// Notes that the operands' tokens become the submission's timepoint when the session finishes.
#[inline]
pub fn update_tokens(session: KernelSession<'_, Dispatched>) -> KernelSession<'_, Updated> {
    session.tokens_noted()
}
