use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(weak: WeakLease<Thing>) -> u8 {
    weak.0
}

fn main() {}
