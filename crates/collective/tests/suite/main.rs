//! Worlds, stores and communicators over threads on the CPU.

mod calls;
mod common;
mod life;
mod mismatches;
mod misuse;
#[cfg(feature = "cuda")]
mod nccl;
mod orders;
mod random;
mod stores;
mod variables;
mod watchdog;
