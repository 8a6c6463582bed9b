//! The drivers: the simulated one against recorded traces of the real one, against CUDA's rules, and the cache between
//! processes.

mod cache_processes;
mod figures;
#[cfg(target_os = "linux")]
mod real;
mod rules;
mod traces;
