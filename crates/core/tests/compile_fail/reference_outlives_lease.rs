use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(lease: Lease<Thing>) -> &'static u8 {
    let inside = &lease.0;
    drop(lease);
    inside
}

fn main() {}
