use leasehold_core::*;

struct Thing(u8);

impl Tagged for Thing {
    type Tag = tags::Event;
}

struct Key;

fn misuse<R: Resource>() -> PoolManager<R, Key> {
    PoolManager::new()
}

fn main() {}
