//! The native module of the Python package `leasehold`.
//!
//! The module exports the whole C ABI too (`leasehold_*`, declared in `leasehold.h` and
//! `leasehold_runtime.h`), for native code that lives beside it in a process.
//!
//! # Modules
//! `device`, `allocator` and `buffer` are the classes; `memory` keeps a buffer's memory; `layout`
//! and `dtype` say where and what its elements are; `host` has the buffer protocol and `dlpack`
//! DLPack. `copies` copies between all of them, by `grid` where elements have gaps.
//!
//! `stream`, `event`, `kernel` and `graph` are the runtime; `operators` and `model` are above it.
//! `recorded` is what a recording was given.
//! `download` is a copy to the host that is awaited. `callbacks` calls Python on the runtime's
//! threads.
//!
//! `ending` lets threads go as the interpreter ends. `arguments` checks what a call was given;
//! `errors` has the exceptions; `fork` tells a child from its parent; `waits` waits so that Ctrl-C
//! ends it.

mod allocator;
mod arguments;
mod buffer;
mod callbacks;
mod copies;
mod device;
mod dlpack;
mod download;
mod dtype;
mod ending;
mod errors;
mod event;
mod fork;
mod graph;
mod grid;
mod host;
mod kernel;
mod layout;
mod memory;
mod model;
mod operators;
mod recorded;
mod stream;
mod tensor_map;
mod waits;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

// The C ABI is for others: nothing here calls it, and the linker would leave it out.
extern crate leasehold_capi as _;
#[cfg(feature = "sim")]
extern crate leasehold_capi_sim as _;

/// Refuses all interpreters of the process but the main one: classes and devices are the process's,
/// and an interpreter that ends would take the classes with it.
fn check_interpreter() -> PyResult<()> {
    // SAFETY: the thread is attached to an interpreter.
    match unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } {
        0 => Ok(()),
        _ => Err(PyImportError::new_err(
            "leasehold does not work in a sub-interpreter; import it in the main interpreter, or use \
             threads or processes",
        )),
    }
}

/// The native part of `leasehold`.
///
/// Threads take turns by the interpreter's lock as they touch host memory.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    check_interpreter()?;
    fork::watch()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("SIMULATED", cfg!(feature = "sim"))?;
    module.add_class::<device::Device>()?;
    module.add_class::<allocator::AllocatorObject>()?;
    module.add_class::<stream::StreamObject>()?;
    module.add_class::<event::EventObject>()?;
    module.add_class::<kernel::KernelObject>()?;
    module.add_class::<tensor_map::TensorMapObject>()?;
    module.add_class::<graph::GraphObject>()?;
    module.add_class::<download::Download>()?;
    module.add_class::<model::ModelObject>()?;
    module.add_function(wrap_pyfunction!(operators::run_operator, module)?)?;
    let class = host::buffer_type(py)?;
    buffer::set_type(&class);
    module.add("Buffer", class)?;
    module.add_function(wrap_pyfunction!(device::devices, module)?)?;
    module.add_function(wrap_pyfunction!(device::opened, module)?)?;
    module.add_function(wrap_pyfunction!(device::reports, module)?)?;
    module.add_function(wrap_pyfunction!(callbacks::close, module)?)?;
    module.add_function(wrap_pyfunction!(allocator::parse_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(allocator::render, module)?)?;
    module.add_function(wrap_pyfunction!(dlpack::from_dlpack, module)?)
}
