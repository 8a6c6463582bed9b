//! The drivers: the simulated driver against recorded traces of the real one and against CUDA's
//! rules, and the real one's bindings.

mod figures;
mod raw_stream;
#[cfg(target_os = "linux")]
mod real;
mod rules;
mod traces;
