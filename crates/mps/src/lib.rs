#![doc = include_str!("../README.md")]
//!
//! # Floors
//! `driver` ← `manager`. Everything above the [`driver`] is the same code over the real driver
//! and over the simulated one.

pub mod config;
pub mod driver;
pub mod manager;

pub use config::MpsConfig;
pub use manager::execution::MpsExecutionManager;
