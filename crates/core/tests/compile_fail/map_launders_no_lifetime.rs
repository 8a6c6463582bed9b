//! A mapped lease has no bound on its lifetime, so the shown value must not borrow.

use leasehold_core::*;

struct Name(String);

impl Tagged for Name {
    type Tag = tags::Event;
}

fn launder<'x>(lease: Lease<Name>, text: &'x String) -> Lease<String> {
    let short: Lease<&'x String> = Lease::map(lease, |_| Box::leak(Box::new(text)));
    Lease::map(short, |text: &&'x String| *text)
}

fn main() {}
