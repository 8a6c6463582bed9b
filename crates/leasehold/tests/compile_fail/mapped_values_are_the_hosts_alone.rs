//! While the host has the values of a pinned array, nobody can submit work with them, and they do
//! not outlive the array.
#![forbid(unsafe_code)]

use leasehold::{PinnedArray, Stream, View};

fn copied_while_mapped(stream: &Stream, host: &mut PinnedArray<f32>, to: &leasehold::Array<f32>) {
    let mut values = host.map().unwrap();
    stream.copy(to.view(), host.view()).unwrap();
    values[0] = 1.0;
}

fn kept(mut host: PinnedArray<f32>) -> &'static [f32] {
    let values = host.map().unwrap();
    drop(host);
    &values
}

fn main() {}
