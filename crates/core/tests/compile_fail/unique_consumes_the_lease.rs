use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(lease: Lease<Thing>) {
    let unique = lease.try_unique();
    drop(lease.clone());
    drop(unique);
}

fn main() {}
