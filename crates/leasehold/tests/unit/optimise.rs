//! Tests of what a recording drops.

use super::*;
use leasehold_hal::{Copy2d, Fill};

fn fill(dst: u64, bytes: u64, pattern: u32) -> Op<'static> {
    Op::Fill(Fill { dst, native: 0, bytes, pattern, width: 4 })
}

fn copy(src: u64, dst: u64, bytes: u64) -> Op<'static> {
    Op::Copy(Copy2d::linear((src, 0), (dst, 0), bytes))
}

#[track_caller]
fn check(ops: &[Op<'_>], expect: &[bool]) {
    let mut list = OpList::new();
    for op in ops {
        list.push(op);
    }
    assert_eq!(redundant(&list), expect);
}

#[test]
fn repeats_of_what_stands_are_redundant() {
    check(&[fill(0x100, 64, 7), fill(0x100, 64, 7)], &[false, true]);
    check(&[copy(0x100, 0x200, 64), copy(0x100, 0x200, 64)], &[false, true]);
}

#[test]
fn another_pattern_or_length_is_not_a_repeat() {
    check(&[fill(0x100, 64, 7), fill(0x100, 64, 8), fill(0x100, 32, 8)], &[false; 3]);
}

#[test]
fn a_write_to_either_end_of_a_copy_makes_it_needed_again() {
    check(&[copy(0x100, 0x200, 64), fill(0x13c, 4, 1), copy(0x100, 0x200, 64)], &[false; 3]);
    check(&[copy(0x100, 0x200, 64), fill(0x23c, 4, 1), copy(0x100, 0x200, 64)], &[false; 3]);
    check(
        &[copy(0x100, 0x200, 64), fill(0x240, 4, 1), copy(0x100, 0x200, 64)],
        &[false, false, true],
    );
}

#[test]
fn empty_operations_and_copies_onto_themselves_do_nothing() {
    check(&[fill(0x100, 0, 7), copy(0x100, 0x200, 0), copy(0x100, 0x100, 64)], &[true; 3]);
}

#[test]
fn rows_count_with_the_gaps_between_them() {
    let rows =
        Op::Copy(Copy2d { rows: 4, src_pitch: 64, dst_pitch: 64, ..plain(0x1000, 0x2000, 16) });
    check(&[rows, fill(0x20d0, 16, 1), rows], &[false, false, true]);
    check(&[rows, fill(0x20c0, 4, 1), rows], &[false; 3]);
    // In a gap: needed again is the careful answer, since a fill of the extent would look the
    // same.
    check(&[rows, fill(0x2020, 16, 1), rows], &[false; 3]);
}

fn plain(src: u64, dst: u64, width: u64) -> Copy2d {
    Copy2d::linear((src, 0), (dst, 0), width)
}

#[test]
fn moving_a_buffer_moves_what_lies_in_it_and_nothing_else() {
    let mut list = OpList::new();
    let from = [0u8; 64];
    let host = from.as_ptr() as u64;
    list.push(&fill(0x110, 16, 1));
    list.push(&fill(0x200, 16, 1));
    list.push(&Op::Upload(Upload {
        src: from.as_ptr(),
        dst: 0x200,
        native: 0,
        bytes: 16,
        keep: None,
    }));
    let mut changed = vec![false; 3];
    let list = moved(list, &[(0x100, 0x100, 0x900, 5), (host, 64, 0x7000, 0)], &mut changed);
    assert_eq!(changed, [true, false, true]);
    assert!(matches!(list.get(0), Some(Op::Fill(Fill { dst: 0x910, native: 5, .. }))));
    assert!(matches!(list.get(1), Some(Op::Fill(Fill { dst: 0x200, native: 0, .. }))));
    assert!(
        matches!(list.get(2), Some(Op::Upload(Upload { src, dst: 0x200, .. })) if src as u64 == 0x7000)
    );
}
