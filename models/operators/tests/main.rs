//! The kernels against naive references in f64, at every level that this machine supports, and on a
//! simulated device against the CPU's.

mod bounds;
#[cfg(feature = "sim")]
mod device;
mod kernels;
#[cfg(feature = "sim")]
mod offsets;
#[cfg(feature = "sim")]
mod runtimes;
