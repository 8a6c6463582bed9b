use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(mut lease: Lease<Thing>) {
    lease.0 = 1;
}

fn main() {}
