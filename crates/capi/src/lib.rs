//! The C ABI of the runtime, and of its allocator and devices: `leasehold_*`, declared and
//! documented in the headers `leasehold_runtime.h` and `leasehold.h`.
//!
//! The runtime's functions are [`leasehold`]'s safe interface for C, C++ and whoever calls C:
//! buffers, streams, events, kernels, graphs, by handles that are counted. A caller vouches where
//! a kernel is defined, memory is wrapped, or a foreign call is made.
//!
//! A framework with streams of its own (PyTorch, CuPy, a C++ program) takes memory here by size and
//! stream, and gives it back without a driver call. A device has one main memory and any number of
//! pools, which share its budget. A pool is what a captured graph allocates from, or memory that
//! can be suspended and resumed at the same addresses.
//!
//! The headers are written by hand, since their comments are the documentation for C. A test lets a
//! C compiler compare them with the source: each function's type, each field and each number.
//!
//! The crate is a shared and a static library. From Rust, [`leasehold`] is the interface; the
//! functions here serve tests.
//!
//! ```
//! use leasehold_capi::ffi::*;
//! use std::ptr::null_mut;
//! let (mut device, mut at) = (0, null_mut());
//! // SAFETY: the name is a C string, and the pointers are to locals.
//! unsafe {
//!     assert_eq!(leasehold_device_open(c"cpu:0".as_ptr(), std::ptr::null(), &mut device), 0);
//!     assert_eq!(leasehold_malloc(device, 1000, 0, &mut at), 0);
//!     assert_eq!(leasehold_free(device, at), 0);
//!     assert_eq!(leasehold_device_close(device), 0);
//! }
//! ```
//!
//! # Modules
//! `ffi` translates C types and calls the rest; `plugin` has the two functions of PyTorch's plug-in
//! interface; `extend` is for a crate that adds functions; `device` owns a device's memory, pools
//! and blocks; `status` turns errors into numbers and texts; `registry` has the handles of devices
//! and pools, `objects` those of the runtime's objects, whose `kinds` have names; `callback` is a
//! function of the caller's with its context; `reserve` is for a host without memory. This crate
//! must not place blocks or order work: the allocator and the backends do.

mod blocks;
mod callback;
mod device;
pub mod extend;
pub mod ffi;
mod kinds;
mod objects;
pub mod plugin;
mod pool;
mod registry;
mod reserve;
mod source;
mod status;
