//! Models of the lock-free protocols. Loom runs the shipped code through every interleaving (up to
//! a bound on preemptions) and every value that the memory model allows a load to see.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p leasehold-core --release --test loom`, or
//! `ci/sanitize.sh loom`.
//!
//! Each model counts the executions in which the interesting event occurred, and fails if the count
//! is zero: a model without the race proves nothing. Payloads contain a loom cell, so that an
//! access without an order is found.

#![cfg(loom)]

mod keyed;
mod leases;
mod pools;
mod support;
mod timelines;
