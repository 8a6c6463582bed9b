//! The CUDA backend: NVIDIA's driver behind managers, loaded at run time.
//!
//! # Floors
//! `driver` ← `manager` ← `allocator` ← `backend`. Everything above the [`driver`] is the same code over the real driver and over the simulated one.
//!
//! This crate must not hold operators, and nothing but the registration of backends may name it.

pub mod conv;
pub mod driver;
