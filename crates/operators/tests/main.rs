//! The kernels against naive references in f64, at every level that this machine runs; and over a simulated device, beside the CPU's.

mod bounds;
#[cfg(feature = "sim")]
mod device;
mod kernels;
#[cfg(feature = "sim")]
mod runtimes;
