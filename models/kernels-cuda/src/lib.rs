//! The CUDA kernels of `leasehold-operators`, compiled: PTX and machine code. The sources are in
//! that crate.
//!
//! A module for each source has the PTX and the machine code of each architecture, as bytes.
//! `build.rs` unpacks them from `images`, which `kernels.lock` lists.
//!
//! This crate must not know what a kernel computes, nor a driver.

#![no_std]

include!(concat!(env!("OUT_DIR"), "/images.rs"));
