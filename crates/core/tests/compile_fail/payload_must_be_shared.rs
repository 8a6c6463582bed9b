use leasehold_core::*;

struct Things;
struct Thing(std::cell::Cell<u8>);

impl Tagged for Thing {
    type Tag = tags::Event;
}

impl Resource for Things {
    type Payload = Thing;
    type Request<'a> = ();
    const NAME: &'static str = "thing";

    fn create(&self, _: EventHandle, (): &()) -> Result<Thing> {
        Ok(Thing(std::cell::Cell::new(0)))
    }
}

fn main() {}
