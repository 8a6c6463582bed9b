//! Models of the lock-free protocols: loom runs the very code that ships through every interleaving (up to a bound on preemptions)
//! and every value that the memory model lets a load see.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p leasehold-core --release --test loom`, or `ci/loom.sh`.
//!
//! Each model counts in how many executions the interesting thing happened, and fails if there was none: a model that never
//! gets to the race proves nothing. Payloads hold a loom cell, so that an access without an order is found.

#![cfg(loom)]

mod keyed;
mod leases;
mod lines;
mod pools;
mod support;
