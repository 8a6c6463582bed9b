//! Workloads: what is read from files, and numbers that nothing can be done with.

mod odd_numbers;
mod torch_snapshots;
