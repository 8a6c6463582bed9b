//! Behaviour of the ground floor at its public API. The table in the crate's documentation says which sentence of the contracts
//! each module holds.

#![cfg(not(loom))]

mod compile_fail;
mod contracts;
mod handle;
mod lease;
mod lifecycle;
mod manager;
mod model;
mod panics;
mod pool;
mod retire;
mod support;
mod threads;
mod timeline;
