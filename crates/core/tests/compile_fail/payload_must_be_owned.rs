use leasehold_core::*;

struct Things<'a>(&'a str);
struct Thing;

impl Tagged for Thing {
    type Tag = tags::Event;
}

impl<'s> Resource for Things<'s> {
    type Payload = Thing;
    type Request<'a> = ();
    const NAME: &'static str = "thing";

    fn create(&self, _: EventHandle, (): &()) -> Result<Thing> {
        Ok(Thing)
    }
}

fn main() {}
