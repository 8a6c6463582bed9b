//! Errors as Python's exceptions: the classes of `leasehold._errors`.

use leasehold::Error;
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The names of Rust in the library's texts, and what Python has in their place.
const NAMES: &[(&str, &str)] = &[
    ("KernelSource::CudaC", "cuda="),
    ("Runtime::create_event", "Event(device, timing=True)"),
    (" (Runtime::open does)", ""),
    ("Rust and C functions", "C functions (cpu=)"),
    ("Stream::copy", "Stream.copy"),
    ("Stream::record", "Stream.record"),
    ("Stream::wait", "Stream.wait"),
];

/// A class of `leasehold._errors`.
#[derive(Clone, Copy)]
pub(crate) enum Class {
    InvalidArgument,
    ArgumentType,
    InvalidState,
    Freed,
    Export,
    OutOfMemory,
    Unavailable,
    Unsupported,
    Timeout,
    DeviceLost,
    Driver,
    Compile,
    Failed,
    Other,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Class::InvalidArgument => "InvalidArgumentError",
            Class::ArgumentType => "ArgumentTypeError",
            Class::InvalidState => "InvalidStateError",
            Class::Freed => "FreedError",
            Class::Export => "ExportError",
            Class::OutOfMemory => "OutOfMemoryError",
            Class::Unavailable => "UnavailableError",
            Class::Unsupported => "UnsupportedError",
            Class::Timeout => "TimeoutError",
            Class::DeviceLost => "DeviceLostError",
            Class::Driver => "DriverError",
            Class::Compile => "CompileError",
            Class::Failed => "FailedError",
            Class::Other => "Error",
        }
    }

    fn of(error: &Error) -> Self {
        match error {
            Error::InvalidArgument(_) | Error::StaleHandle { .. } => Class::InvalidArgument,
            Error::OutOfMemory(_) | Error::OverBudget { .. } => Class::OutOfMemory,
            Error::NotFound(_) | Error::Unavailable(_) => Class::Unavailable,
            Error::Unsupported(_) => Class::Unsupported,
            Error::InvalidState(_) | Error::Recording { .. } | Error::Suspended(_) => {
                Class::InvalidState
            }
            Error::LeasesOutstanding { .. } | Error::Occupied { .. } => Class::InvalidState,
            Error::Timeout(_) => Class::Timeout,
            Error::DeviceLost { .. } => Class::DeviceLost,
            Error::Driver { .. } => Class::Driver,
            Error::Compile { .. } => Class::Compile,
            Error::Fault(_) | Error::Other(_) => Class::Failed,
            _ => Class::Other,
        }
    }

    /// An exception of the class.
    pub(crate) fn error(self, text: impl Into<String>) -> PyErr {
        let text = text.into();
        Python::attach(|py| {
            let class = py.import("leasehold._errors").and_then(|m| m.getattr(self.name()));
            match class.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
                Ok(class) => PyErr::from_type(class, (text,)),
                Err(error) => error,
            }
        })
    }
}

/// Whether an object says by an error that it does not lend its memory so. Errors of this package
/// say more.
pub(crate) fn is_refusal(py: Python<'_>, error: &PyErr) -> bool {
    let base = py.import("leasehold._errors").and_then(|m| m.getattr("Error"));
    let is_own = base.is_ok_and(|base| error.is_instance(py, &base));
    let is_builtin = error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyRuntimeError>(py);
    is_builtin && !is_own
}

/// An error of the library as an exception. An exception that passed through it comes as it is.
pub(crate) fn raise(error: Error) -> PyErr {
    if let Error::Other(foreign) = &error
        && let Some(raised) = foreign.downcast_ref::<PyErr>()
    {
        return Python::attach(|py| raised.clone_ref(py));
    }
    let text = error.to_string();
    Class::of(&error).error(NAMES.iter().fold(text, |text, (rust, own)| text.replace(rust, own)))
}

/// Shorthand for arguments that are never valid.
pub(crate) fn invalid(text: impl Into<String>) -> PyErr {
    Class::InvalidArgument.error(text)
}
