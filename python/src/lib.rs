//! The native module of the Python package `leasehold`.
//!
//! The module exports the whole C ABI too (`leasehold_*`, declared in `leasehold.h`), for native
//! code that lives beside it in a process.

use pyo3::prelude::*;

// The C ABI is for others: nothing here calls it, and the linker would leave it out.
extern crate leasehold_capi as _;

/// The native part of `leasehold`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("SIMULATED", cfg!(feature = "sim"))
}
