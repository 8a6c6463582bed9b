//! The drivers: the simulated driver against recorded traces of the real one and against CUDA's
//! rules, and the compile cache between processes.

mod cache_processes;
mod figures;
#[cfg(target_os = "linux")]
mod real;
mod rules;
mod traces;
