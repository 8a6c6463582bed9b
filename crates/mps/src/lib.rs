//! The Metal backend of the Leasehold device runtime: its driver layer and its managers.
//!
#![doc = include_str!("../README.md")]
//!
//! # Floors
//! `driver` ← `manager`. Everything above the [`driver`] is the same code over the real driver
//! and over the simulated one.
//!
//! This crate must not know other backends, nor what lies above `hal`.

pub mod config;
pub mod driver;
pub mod manager;

pub use config::MpsConfig;
pub use manager::execution::MpsExecutionManager;
