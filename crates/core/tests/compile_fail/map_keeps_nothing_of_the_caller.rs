use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(lease: Lease<Thing>) -> Lease<u8> {
    let local = 7u8;
    Lease::map(lease, |_| &local)
}

fn main() {}
