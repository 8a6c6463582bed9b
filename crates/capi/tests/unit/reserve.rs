//! Tests of the reserve.

use super::*;

#[test]
fn parts_do_not_overlap_and_come_back() {
    let layout = |size, align| Layout::from_size_align(size, align).unwrap();
    for _ in 0..3 {
        let sizes = [(1, 1), (100, 8), (7, 64), (4096, 4096), (LARGEST, 16), (3, 2)];
        let mut parts = Vec::new();
        for (size, align) in sizes {
            let part = take(layout(size, align));
            assert!(is_part(part) && part.addr().is_multiple_of(align));
            // SAFETY: the part has this size.
            unsafe { part.write_bytes(7, size) };
            parts.push((part.addr(), size));
        }
        assert!(parts.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{parts:?}");
        assert!(take(layout(LARGEST + 1, 1)).is_null() && take(layout(1, 2 * ALIGN)).is_null());
        // A block that grows leaves its part for the system's memory.
        // SAFETY: the part is the last one, of this layout; the block is given back once.
        unsafe {
            let grown = MEMORY.realloc(parts[5].0 as *mut u8, layout(3, 2), 5000);
            assert!(!is_part(grown) && *grown == 7 && *grown.add(2) == 7);
            MEMORY.dealloc(grown, layout(5000, 2));
        }
        parts[..5].iter().for_each(|_| give());
        assert_eq!(STATE.load(Ordering::Relaxed), 0);
        let all = (0..).take_while(|_| !take(layout(LARGEST, 1)).is_null()).count();
        assert_eq!(all, SIZE / LARGEST);
        // Much is in use, but the host has memory.
        assert!(bytes_of(STATE.load(Ordering::Relaxed)) > MANY && !is_low());
        (0..all).for_each(|_| give());
    }
}
