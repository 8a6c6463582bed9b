//! Signals of the host's, for gates.

use crate::gate::Gate;
use leasehold_core::{Error, Result};

/// Raises a gate to `value`: whoever waits for it or less goes on. Does not block; any thread, also in a host call.
///
/// # Errors
/// `InvalidArgument` unless the value grows; the cause after [`fail`].
#[doc(alias("signal_host", "set_event"))]
pub fn raise(gate: &Gate, value: u64) -> Result<()> {
    gate.raw.signal_host(value)
}

/// Fails a gate: whoever waits for a value that was not raised gets the error, now or later, and streams that wait for one are poisoned.
/// The first cause stays. Does not block.
pub fn fail(gate: &Gate, cause: Error) {
    gate.raw.fail(cause);
}
