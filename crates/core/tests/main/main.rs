//! Behaviour of `core` at its public API. The table in the crate's documentation maps the contracts
//! to these modules.

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
