//! The kernels against naive references in f64, at every level that this machine runs.

mod kernels;
