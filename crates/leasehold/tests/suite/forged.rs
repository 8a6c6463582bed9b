//! What safe code can make up, and what the runtime says to it.

use crate::common::*;
use leasehold::{Buffer, Lease, View, ops};
use std::sync::OnceLock;

/// What the test shows for ever stays in a static, where a leak detector finds it.
static SHOWN: [OnceLock<Lease<Buffer>>; 2] = [OnceLock::new(), OnceLock::new()];

#[test]
fn a_lease_that_shows_another_buffer_than_its_own_is_refused() {
    let (a, b) = (runtime(), runtime());
    let foreign = SHOWN[0].get_or_init(|| b.alloc(64).unwrap());
    let own = SHOWN[1].get_or_init(|| a.alloc(64).unwrap());
    // Bigger than the one whose turn it takes.
    for shown in [foreign, own] {
        let forged: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |_| &**shown);
        assert_eq!(kind(a.download::<u8>(&forged)), "InvalidArgument");
        assert_eq!(kind(ops::fill(a.stream(), forged.view(), ops::Pattern::U8(1))), "InvalidArgument");
        assert!(!a.allocator().owns(&forged) && !b.allocator().owns(&forged));
    }
    // The same buffer, mapped, is still that buffer.
    let same: Lease<Buffer> = Lease::map(a.alloc(16).unwrap(), |buffer| buffer);
    assert!(a.allocator().owns(&same));
    ops::fill(a.stream(), same.view(), ops::Pattern::U8(7)).unwrap();
    assert_eq!(a.download::<u8>(&same).unwrap(), [7; 16]);
}
