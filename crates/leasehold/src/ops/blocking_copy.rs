//! Host memory that an operation borrows: a call returns only when nobody touches it any more.
//!
//! A failure or an impatient backend may end the wait early while the copy is still to come.
//! Neither ends the loan: the stream is cancelled where that helps, and waited for.

use crate::stream::{Stream, in_host_call};
use crate::view::Operand;
use leasehold_core::{Error, Result, Timepoint};
use leasehold_hal::Op;
use std::time::Duration;

/// Submits one operation that reads or writes borrowed host memory, and waits until it is over.
///
/// # Errors
/// As [`Stream::pass`]; the operation's own; `InvalidState` in a host call of the stream; what the
/// backend says that waits no longer.
///
/// # Safety
/// - As [`Stream::pass`], for a stream that is not recorded. Host memory that `op` names is valid
///   until this call returns, and need not be any longer.
pub(super) unsafe fn pass(stream: &Stream, op: &Op<'_>, operands: &[Operand<'_>]) -> Result<()> {
    may_wait(stream)?;
    // SAFETY: the caller's; the host memory outlives the wait below, whatever becomes of it.
    match unsafe { stream.pass(op, operands)? } {
        Some(point) => see_out(stream, point),
        None => Err(Error::recording(
            "a copy of borrowed memory cannot be recorded; upload or upload_owned keep the bytes",
        )),
    }
}

/// Waits until a timepoint is over, whatever became of it, then says what did.
pub(super) fn see_out(stream: &Stream, point: Timepoint) -> Result<()> {
    let mut nap = Duration::from_micros(1);
    loop {
        let waited = stream.runtime.wait_point(point, None);
        if point.timeline().completed() >= point.value() {
            return point.timeline().check(point.value()).map(drop);
        }
        match waited {
            // The backend waits no longer, and the work may still come: it must not.
            Err(e)
                if !point.timeline().failed(point.value())
                    && !matches!(e, Error::DeviceLost { .. }) =>
            {
                stream.under().raw.cancel(e);
            }
            // A failure is known before what failed is over, and the loss of a device before all
            // streams are told.
            _ => {}
        }
        // The timeline shows the answer of the backend.
        let _ = stream.under().raw.refresh();
        std::thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(1));
    }
}

/// Refuses to wait for a stream in one of its own host calls, before anything is submitted.
pub(super) fn may_wait(stream: &Stream) -> Result<()> {
    if in_host_call() {
        let next = stream.under().timeline.submitted() + 1;
        if let Err(e @ Error::InvalidState(_)) =
            stream.under().raw.wait_host(next, Some(Duration::ZERO))
        {
            return Err(e);
        }
    }
    Ok(())
}
