//! A copy that nobody waits for must own its source.

use leasehold::{Lease, Buffer, Stream, View, ops};

struct Borrowed<'a>(&'a [u8]);

// SAFETY: none; the bytes go with the function that borrows them.
unsafe impl ops::HostBytes for Borrowed<'_> {
    fn bytes(&self) -> &[u8] {
        self.0
    }
}

fn dangle(stream: &Stream, to: &Lease<Buffer>) {
    let local = vec![0u8; 16];
    stream.upload_owned(to.view(), Borrowed(&local)).unwrap();
    stream.upload_owned(to.view(), &local[..]).unwrap();
}

fn main() {}
