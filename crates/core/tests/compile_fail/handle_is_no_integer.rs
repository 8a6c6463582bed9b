use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

fn misuse(pool: &impl Fn(EventHandle)) {
    pool(7u64);
}

fn main() {}
