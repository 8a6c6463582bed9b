//! A view keeps nothing alive.

use leasehold::{Runtime, Slice, View};

fn dangle(runtime: &Runtime) -> Slice<'_> {
    let x = runtime.alloc(16).unwrap();
    x.view()
}

fn main() {}
