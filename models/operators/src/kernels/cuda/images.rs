//! The compiled kernels: for each source a module with its PTX and the machine code of each
//! architecture, as bytes. `build.rs` unpacks them from `images`, which `kernels.lock` lists.
//!
//! This module must not know what a kernel computes, nor a driver.

include!(concat!(env!("OUT_DIR"), "/images.rs"));
