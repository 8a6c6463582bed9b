use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn copies<T: Clone>() {}

fn main() {
    copies::<UniqueLease<Thing>>();
}
