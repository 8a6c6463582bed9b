//! Tests of result codes.

use super::*;

#[test]
fn codes_become_errors() {
    assert!(
        matches!(error("cuMemAlloc_v2", 2, "x".into(), 64), Error::OutOfMemory(r) if r.requested == 64)
    );
    let Error::Driver { api, code, .. } = error("cuMemFree_v2", 1, name_or_number(1), 0) else {
        panic!()
    };
    assert_eq!((api, code), ("cuMemFree", 1));
    for sticky in [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 806, 810] {
        assert!(is_sticky(sticky), "{sticky}");
    }
    for harmless in [0, 1, 2, 201, 400, 600, 701, 704, 709, 712, 900, 910] {
        assert!(!is_sticky(harmless), "{harmless}");
    }
    for at_init in [100, 999, 802, 803, 34, 304, 800] {
        assert!(matches!(unavailable(at_init, "x"), Error::Unavailable(_)), "{at_init}");
    }
}

#[test]
fn versions_are_cut_off_names() {
    assert_eq!(api_name("cuMemAlloc_v2"), "cuMemAlloc");
    assert_eq!(api_name("cuStreamBeginCapture_v2"), "cuStreamBeginCapture");
    assert_eq!(api_name("cuMemAllocAsync"), "cuMemAllocAsync");
    assert_eq!(api_name("cuDeviceGetUuid_v2"), "cuDeviceGetUuid");
}
