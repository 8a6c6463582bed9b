use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(lease: &Lease<Thing>) {
    lease.header().set_vacant(1);
}

fn main() {}
