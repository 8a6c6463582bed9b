//! A view keeps nothing alive.

use leasehold::{Runtime, BufferView, View};

fn dangle(runtime: &Runtime) -> BufferView<'_> {
    let x = runtime.alloc(16).unwrap();
    x.view()
}

fn main() {}
