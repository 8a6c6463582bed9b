//! What is CUDA's own, over the simulated driver: every run is the same, since nothing has a thread of its own.

mod common;
mod faults;
mod life;
mod loss;
mod managers;
mod order;
mod peers;
#[cfg(feature = "planted-defects")]
mod planted;
mod release;
