//! Worlds, stores and communicators over threads on the CPU.

mod calls;
mod common;
mod life;
mod misuse;
mod mismatches;
mod stores;
mod variables;
