//! Kernels on the host: CUDA C++ against results of the host, and mistakes in Metal sources.

mod cuda;
mod inline;
mod maps;
mod planted;
mod products;
mod short_floats;
