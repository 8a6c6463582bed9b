//! A copy reads its source after the call: a type says that its bytes stay where they are, with an
//! `unsafe impl`.
#![forbid(unsafe_code)]

use leasehold::ops;

/// In the value itself: they move with it.
struct Inline([u8; 16]);

impl ops::HostBytes for Inline {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn main() {}
