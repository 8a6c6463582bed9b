//! Kernel sources, a folder for each backend. No other place of the project has kernel sources.

mod blocks;
pub mod cpu;
pub mod cuda;
pub mod mps;

#[cfg(test)]
mod tests;
