//! The effect of work on bytes, and the parts of buffers that work takes.
//!
//! This module must not know who uses a buffer.

use crate::kernels::{BLOCK, Kernel};
use crate::prelude::bytes;
use crate::step::{Op, PINNED, Slot, Span, TEMPS, Work};

/// Runs `f` with a model that is wrong about the first word of every gather and about the largest
/// of all ranks' numbers. On this thread only.
#[cfg(test)]
pub(crate) fn mistaken<R>(f: impl FnOnce() -> R) -> R {
    MISTAKEN.set(true);
    let result = f();
    MISTAKEN.set(false);
    result
}

/// Returns whether this thread's model is wrong.
#[cfg(test)]
pub(crate) fn is_mistaken() -> bool {
    MISTAKEN.get()
}

#[cfg(test)]
thread_local! {
    static MISTAKEN: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

pub(super) fn part(data: &[u8], span: Span) -> &[u8] {
    &data[span.at as usize..][..span.len as usize]
}

/// Returns whether work writes all of a buffer of `len` bytes and reads none of it.
pub(super) fn whole(work: &Work, len: u32) -> bool {
    work.to.len == len
        && match work.op {
            Op::Copy2d { .. } | Op::Launch { kernel: Kernel::Mask, .. } => false,
            _ => !work.from.iter().any(|f| f.slot == work.to.slot),
        }
}

/// Returns whether the parts fit the operation. `from` and `to` are the buffers of the parts.
pub(crate) fn sensible(work: &Work, from: &[u32], to: u32) -> Option<()> {
    let len = work.to.len;
    let apart = work
        .from
        .iter()
        .zip(from)
        .all(|(f, b)| *b != to || f.at + f.len <= work.to.at || work.to.at + len <= f.at);
    let words = |s: &Span| s.at.is_multiple_of(4) && s.len.is_multiple_of(4) && s.len > 0;
    let fits = match work.op {
        Op::Fill { width, .. } => {
            from.is_empty()
                && matches!(width, 1 | 2 | 4)
                && work.to.at.is_multiple_of(width.into())
                && len.is_multiple_of(width.into())
        }
        Op::Upload { .. } => from.is_empty(),
        Op::Copy => from.len() == 1 && work.from[0].len == len,
        Op::Copies => {
            let bytes = work.from.iter().map(|f| u64::from(f.len)).sum::<u64>();
            !from.is_empty() && bytes == u64::from(len)
        }
        Op::Pinned => {
            let pinned = |s: Slot| (PINNED..TEMPS).contains(&s);
            from.len() == 1
                && work.from[0].len == len
                && pinned(work.to.slot) != pinned(work.from[0].slot)
        }
        Op::Copy2d { width, rows, from_pitch, to_pitch } => {
            let extent = |pitch: u32| {
                u64::from(rows.saturating_sub(1)) * u64::from(pitch) + u64::from(width)
            };
            from.len() == 1
                && (1..=from_pitch.min(to_pitch)).contains(&width)
                && rows > 0
                && extent(from_pitch) <= work.from[0].len.into()
                && extent(to_pitch) <= len.into()
        }
        Op::Launch { kernel, words: [first, _] } => {
            let n = kernel.bindings().len();
            let reads = if kernel == Kernel::Mask { 0 } else { n - 1 };
            from.len() == reads
                && words(&work.to)
                && work.from.iter().all(words)
                && match kernel {
                    Kernel::Gather => {
                        work.from[1].len == len && first > 0 && first <= work.from[0].len / 4
                    }
                    _ => work.from.iter().all(|f| f.len == len),
                }
        }
    };
    let device = |s: &Span| s.slot < PINNED || s.slot >= TEMPS;
    let placed = matches!(work.op, Op::Pinned | Op::Copies)
        || (device(&work.to) && work.from.iter().all(device));
    (apart && fits && placed).then_some(())
}

/// Does the work on bytes. A launch has as many `blocks` as its elements need, unless they are
/// given.
pub(crate) fn compute(work: &Work, blocks: Option<u32>, inputs: &[Vec<u8>], data: &mut [u8]) {
    let to = &mut data[work.to.at as usize..][..work.to.len as usize];
    let word = |bytes: &[u8], i: usize| {
        bytes[i * 4..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b))
    };
    match work.op {
        Op::Fill { pattern, width } => {
            let pattern = &pattern.to_le_bytes()[..usize::from(width)];
            to.chunks_exact_mut(pattern.len()).for_each(|c| c.copy_from_slice(pattern));
        }
        Op::Upload { seed, .. } => to.copy_from_slice(&bytes(seed, to.len())),
        Op::Copy | Op::Pinned => to.copy_from_slice(&inputs[0]),
        Op::Copies => to.copy_from_slice(&inputs.concat()),
        Op::Copy2d { width, rows, from_pitch, to_pitch } => {
            for row in 0..rows as usize {
                let from = &inputs[0][row * from_pitch as usize..][..width as usize];
                to[row * to_pitch as usize..][..width as usize].copy_from_slice(from);
            }
        }
        Op::Launch { kernel, words: [first, second] } => {
            let served = blocks.map_or(usize::MAX, |b| b as usize * BLOCK as usize);
            for i in 0..served.min(to.len() / 4) {
                let value = match kernel {
                    Kernel::Add => word(&inputs[0], i).wrapping_add(word(&inputs[1], i)),
                    Kernel::Mask => {
                        word(to, i) ^ first.wrapping_add((i as u32).wrapping_mul(second))
                    }
                    Kernel::Scale => word(&inputs[0], i).wrapping_mul(first).wrapping_add(second),
                    Kernel::Gather => word(&inputs[0], (word(&inputs[1], i) % first) as usize),
                };
                #[cfg(test)]
                let value = if i == 0 && kernel == Kernel::Gather && is_mistaken() {
                    value ^ 1
                } else {
                    value
                };
                to[i * 4..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}
