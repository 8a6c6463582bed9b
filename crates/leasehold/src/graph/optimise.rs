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
#[path = "../../tests/unit/optimise.rs"]
mod tests;
