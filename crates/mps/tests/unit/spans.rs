//! Tests of the table of segments.

use super::*;

fn span(native: u64, addr: u64, bytes: u64, storage: Storage) -> Span {
    Span { native: NativeBuffer(native), heap: NativeHeap(native), addr, bytes, storage, device: 0 }
}

#[test]
fn a_place_lies_in_its_segment_and_private_storage_needs_its_buffer() {
    let spans = Spans::default();
    spans.add(span(1, 0x1000, 0x1000, Storage::Shared));
    spans.add(span(2, 0x1000, 0x800, Storage::Private));
    let at = |native, addr, bytes| spans.of(native, addr, bytes).map(|p| (p.native.0, p.offset));
    assert_eq!(at(1, 0x1800, 0x800), Some((1, 0x800)));
    assert_eq!(at(0, 0x1800, 0x800), Some((1, 0x800)), "by the host's address");
    assert_eq!(at(2, 0x1400, 0x400), Some((2, 0x400)));
    assert_eq!(at(2, 0x1400, 0x401), None, "beyond the end");
    assert_eq!(at(1, 0xfff, 1), None, "before the start");
    assert_eq!(at(3, 0x1000, 1), None, "no such buffer");
    assert_eq!(at(0, 0x2000, 1), None, "beyond the end");
    assert_eq!(at(0, 0x2000, 0), Some((1, 0x1000)), "no bytes at the end");
    spans.remove(NativeBuffer(1));
    assert_eq!(at(0, 0x1800, 1), None);
    assert_eq!(at(2, 0x1000, 1), Some((2, 0)));
    let mut heaps = Vec::new();
    spans.for_each_heap(0, |heap| heaps.push(heap.0));
    assert_eq!(heaps, [2]);
    spans.for_each_heap(1, |_| unreachable!("device 1 has no heap"));
}
