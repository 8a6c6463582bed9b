//! Tests of answers that cannot be.

use super::*;

#[test]
fn what_cannot_be_is_an_error() {
    for (addr, bytes, align) in [
        (0, 1, 1),
        (1, 1, 1),
        (16, 8, 1),
        (1 << 57, 1, 1),
        (u64::MAX, 2, 1),
        (0x20001, 8, 256),
        (1 << 56, 1 << 57, 1),
    ] {
        let error = address("cuMemAlloc", addr, bytes, align).unwrap_err();
        assert!(error.to_string().contains("CUDA_SUCCESS, but"), "{error}");
    }
    assert_eq!(address("cuMemAlloc", 0x20000, 8, 256).unwrap(), 0x20000);
    for bytes in [0, 1, 3, 2048, (2 << 20) + 1, 1 << 31, u64::MAX] {
        assert!(granularity("g", bytes).is_err(), "{bytes}");
    }
    assert_eq!(granularity("g", 2 << 20).unwrap(), 2 << 20);
    assert!(object::<u8>("o", std::ptr::null_mut()).is_err());
    assert!(count("c", -1).is_err());
    assert_eq!(text(b"x\x1b[2J\x07\nwell\xff"), "x [2J  well\u{fffd}");
    assert_eq!(text(&[b'E'; 1 << 20]).len(), 200);
}
