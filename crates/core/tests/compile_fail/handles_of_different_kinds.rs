use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn wants_a_stream(_: StreamHandle) {}

fn misuse(lease: &Lease<Thing>) {
    wants_a_stream(lease.handle());
}

fn main() {}
