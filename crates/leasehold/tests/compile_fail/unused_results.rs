//! A value that is lost when it is dropped must not be dropped silently.

#![deny(unused_must_use)]

use leasehold::{KernelSession, Runtime, GraphUpdate, View};
use leasehold::kernel::Begun;

fn forget(runtime: &Runtime, session: KernelSession<'_, Begun>, x: &leasehold::Lease<leasehold::Buffer>) {
    runtime.stream().synchronize();
    session;
    GraphUpdate::new();
    x.part(..4);
}

fn main() {}
