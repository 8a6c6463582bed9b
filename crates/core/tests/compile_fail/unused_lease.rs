use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

use std::fmt::Debug;

#[deny(unused_must_use)]
fn misuse<R: Resource<Payload = Thing> + Debug>(lease: &Lease<Thing>) {
    lease.clone();
}

fn main() {}
