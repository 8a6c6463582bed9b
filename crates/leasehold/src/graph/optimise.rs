//! The redundant operations of a recording, and the effect of replaced buffers on a recording. Pure
//! functions of lists.
//!
//! This module must not know graphs, buffers or devices.

use leasehold_hal::{Download, Op, OpList, Upload};

/// Which recorded operations do nothing: empty ones, copies onto themselves, and copies or fills
/// that repeat what still stands.
///
/// Launches with an empty grid stay: a later update may give them one.
pub(crate) fn redundant(ops: &OpList) -> Vec<bool> {
    let mut standing: Vec<Op<'_>> = Vec::new();
    let overlaps = |a: (u64, u64), b: (u64, u64)| {
        a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
    };
    ops.iter()
        .map(|op| {
            let useless = match &op {
                Op::Copy(c) => {
                    c.width == 0 || c.rows == 0 || (c.src == c.dst && c.src_pitch == c.dst_pitch)
                }
                Op::Fill(f) => f.bytes == 0,
                Op::Upload(u) => u.bytes == 0,
                Op::Download(d) => d.bytes == 0,
                _ => false,
            };
            let repeats = |s: &Op<'_>| match (s, &op) {
                (Op::Copy(a), Op::Copy(b)) => a == b,
                (Op::Fill(a), Op::Fill(b)) => a == b,
                _ => false,
            };
            if useless || standing.iter().any(repeats) {
                return true;
            }
            if op.is_barrier() {
                // A host call may write anything.
                standing.clear();
            }
            op.for_each_access(|addr, len, access| {
                if access.writes() {
                    standing.retain(|s| {
                        let mut hit = false;
                        s.for_each_access(|a, l, _| hit |= overlaps((a, l), (addr, len)));
                        !hit
                    });
                }
            });
            if matches!(op, Op::Copy(_) | Op::Fill(_)) {
                standing.push(op);
            }
            false
        })
        .collect()
}

/// Where a buffer lay, how long it was, where it lies now, and its new native word.
pub(crate) type Move = (u64, u64, u64, u64);

/// The list with every address in a moved buffer replaced: of the device's memory, and of host
/// memory that copies name. Marks the operations that changed.
pub(crate) fn moved(mut ops: OpList, moves: &[Move], changed: &mut [bool]) -> OpList {
    let new = |addr: u64| {
        moves.iter().find(|m| addr >= m.0 && addr < m.0 + m.1).map(|m| (addr - m.0 + m.2, m.3))
    };
    let mut host = false;
    for (i, op) in ops.iter().enumerate() {
        op.for_each_access(|addr, _, _| changed[i] |= new(addr).is_some());
        host |= match op {
            Op::Upload(u) => new(u.src as u64).is_some(),
            Op::Download(d) => new(d.dst as u64).is_some(),
            _ => false,
        };
    }
    ops.rebind(new);
    if !host {
        return ops;
    }
    let mut all = OpList::new();
    for op in ops.iter() {
        match op {
            Op::Upload(u) if u.keep.is_none() => {
                let src = new(u.src as u64).map_or(u.src, |n| n.0 as *const u8);
                all.push(&Op::Upload(Upload { src, ..u }));
            }
            Op::Download(d) if d.keep.is_none() => {
                let dst = new(d.dst as u64).map_or(d.dst, |n| n.0 as *mut u8);
                all.push(&Op::Download(Download { dst, ..d }));
            }
            op => {
                all.push(&op);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
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
}
