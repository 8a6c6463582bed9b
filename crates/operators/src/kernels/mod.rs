//! Kernel sources, a folder per backend: the only place in the project that has any.

pub mod cpu;
