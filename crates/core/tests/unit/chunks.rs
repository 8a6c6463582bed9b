//! Tests of chunks.

use super::*;

#[test]
fn every_index_has_a_place_of_its_own() {
    for block in [1, 2, 3, 32, 1000, 1 << 24] {
        let chunks = Chunks::<u8>::new(block);
        let first = block.next_power_of_two();
        let (mut chunk, mut offset) = (0, 0);
        for index in 0..100_000u32 {
            assert_eq!(chunks.place(index), (chunk, offset), "block {block}, element {index}");
            offset += 1;
            if offset == (first as usize) << chunk {
                (chunk, offset) = (chunk + 1, 0);
            }
        }
        assert!(
            chunks.get(0).is_none()
                && chunks.get(1 << 24).is_none()
                && chunks.get(u32::MAX).is_none()
        );
    }
}

#[test]
fn elements_do_not_move_and_a_full_table_says_so() {
    let chunks = Chunks::<u32>::new(2);
    let grow = |len| chunks.grow(len, |i| i * 10);
    assert_eq!(grow(0), Ok(2));
    let first = chunks.get(1).expect("made");
    assert!(chunks.get(2).is_none(), "not made yet");
    assert_eq!(grow(2), Ok(4));
    assert_eq!((chunks.get(1), grow(2)), (Some(first), Ok(0)), "a chunk is made once");
    // SAFETY: the table lives, and nobody writes its elements.
    assert_eq!(unsafe { *chunks.get(5).expect("made").as_ref() }, 50);
    assert!(chunks.get(6).is_none());
    assert_eq!(Chunks::<u8>::new(1).grow(MOST, |_| 0), Ok(0), "full");
}
