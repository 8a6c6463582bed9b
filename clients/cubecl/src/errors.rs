//! Errors of the runtime as CubeCL's, with their text.

use cubecl_environment::backtrace::BackTrace;
use cubecl_server::compiler::CompilationError;
use cubecl_server::driver::DevicePoison;
use cubecl_server::server::{IoError, LaunchError, ServerError};
use leasehold::Error;

/// A lost device's error: all later work of the process fails with it.
fn lost(error: &Error) -> Option<DevicePoison> {
    matches!(error, Error::DeviceLost { .. }).then(|| DevicePoison::new(error.to_string()))
}

/// An error of a stream or a wait.
pub(crate) fn server(error: &Error) -> ServerError {
    if let Some(lost) = lost(error) {
        return lost.into();
    }
    ServerError::Generic { reason: error.to_string(), backtrace: BackTrace::capture() }
}

/// An error of an allocation of `size` bytes, or of a copy. CubeCL frees memory and tries again
/// after `OutOfMemory`.
pub(crate) fn io(error: &Error, size: u64) -> IoError {
    if let Some(lost) = lost(error) {
        return lost.into();
    }
    let backtrace = BackTrace::capture();
    match error {
        Error::OutOfMemory(_) => IoError::OutOfMemory { size, backtrace },
        other => IoError::Unknown { description: other.to_string(), backtrace },
    }
}

/// An error of a launch.
pub(crate) fn launch(error: &Error) -> LaunchError {
    if let Some(lost) = lost(error) {
        return lost.into();
    }
    let (reason, backtrace) = (error.to_string(), BackTrace::capture());
    match error {
        Error::Compile { .. } => {
            LaunchError::CompilationError(CompilationError::Generic { reason, backtrace })
        }
        _ => LaunchError::Unknown { reason, backtrace },
    }
}

/// A refusal of what this client does not have.
pub(crate) fn refused(what: &str) -> ServerError {
    let reason = format!("Leasehold's client for CubeCL has no {what}");
    ServerError::Generic { reason, backtrace: BackTrace::capture() }
}
