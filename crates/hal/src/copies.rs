//! Copies of one operation: many pieces that are given to the driver together.
//!
//! The pieces have no order among themselves. So a [`Copies`] value exists only for pieces of which
//! none reads or writes what another one writes.
//!
//! This module must not know which code copies.

use leasehold_core::{Error, Result};

/// A piece of several copies: bytes without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy1d {
    /// The source address.
    pub src: u64,
    /// Metal's spanning buffer of the source.
    pub src_native: u64,
    /// The destination address.
    pub dst: u64,
    /// Metal's spanning buffer of the destination.
    pub dst_native: u64,
    /// Bytes. The addresses of no bytes may be any numbers.
    pub bytes: u64,
}

/// Copies that make one operation. Their pieces share no byte that one of them writes.
///
/// ```
/// use leasehold_hal::{Copies, Copy1d};
/// let piece = |src, dst, bytes| Copy1d { src, src_native: 0, dst, dst_native: 0, bytes };
/// let apart = [piece(0, 64, 16), piece(0, 80, 16)];
/// assert_eq!(Copies::new(&apart)?.bytes(), 32);
/// let meeting = [piece(0, 64, 16), piece(70, 128, 16)];
/// assert!(Copies::new(&meeting).is_err());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Copies<'a> {
    pieces: &'a [Copy1d],
    settled: bool,
}

impl<'a> Copies<'a> {
    /// Checks that the pieces can be copied in any order. Pieces whose destinations ascend, apart
    /// from all sources, take one pass. Otherwise the destinations are sorted, or both sides.
    ///
    /// # Errors
    /// `InvalidArgument`, with the numbers of two pieces, if one reads or writes what the other one
    /// writes. The same for a piece that overlaps itself or wraps the address space.
    pub fn new(pieces: &'a [Copy1d]) -> Result<Self> {
        if !are_apart(pieces)? {
            check_all(pieces)?;
        }
        Ok(Self { pieces, settled: false })
    }

    /// Pieces that were checked before, and moved since as a recording's buffers do.
    pub(crate) fn again(pieces: &'a [Copy1d], settled: bool) -> Self {
        Self { pieces, settled }
    }

    /// Says that the sources are settled: a backend may read them before the stream comes to the
    /// copies.
    ///
    /// # Safety
    /// - All sources are host memory.
    /// - No work that was submitted before the copies writes a source any more, and nobody writes
    ///   one before the copies are over.
    #[must_use]
    pub unsafe fn with_settled_sources(self) -> Self {
        Self { settled: true, ..self }
    }

    /// The pieces.
    #[must_use]
    pub fn pieces(&self) -> &'a [Copy1d] {
        self.pieces
    }

    /// Whether a backend may read the sources before the stream comes to the copies.
    #[must_use]
    pub fn has_settled_sources(&self) -> bool {
        self.settled
    }

    /// The bytes of all pieces.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.bytes))
    }
}

/// Returns whether the pieces are apart where that is quickly seen: the span of all destinations
/// does not meet that of all sources, and the destinations ascend or do so once they are sorted.
fn are_apart(pieces: &[Copy1d]) -> Result<bool> {
    let (mut first_src, mut src_end) = (u64::MAX, 0);
    let (mut first_dst, mut dst_end) = (u64::MAX, 0);
    let mut ascend = true;
    for (i, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.bytes != 0) {
        let ends = (piece.src.checked_add(piece.bytes), piece.dst.checked_add(piece.bytes));
        let (Some(from), Some(to)) = ends else {
            return Err(Error::invalid(format!("piece {i} wraps the address space")));
        };
        ascend &= piece.dst >= dst_end;
        (first_src, src_end) = (first_src.min(piece.src), src_end.max(from));
        (first_dst, dst_end) = (first_dst.min(piece.dst), dst_end.max(to));
    }
    if src_end > first_dst && dst_end > first_src {
        return Ok(false);
    }
    if ascend {
        return Ok(true);
    }
    let filled = pieces.iter().filter(|piece| piece.bytes != 0);
    let mut written: Vec<_> = filled.map(|piece| (piece.dst, piece.dst + piece.bytes)).collect();
    written.sort_unstable_by_key(|range| range.0);
    Ok(written.windows(2).all(|two| two[0].1 <= two[1].0))
}

/// The end of the ranges so far, and the piece that reaches it.
#[derive(Clone, Copy, Default)]
struct Reach {
    end: u64,
    piece: usize,
}

/// Compares each range with those that begin before it, by the sorted ranges of both sides.
fn check_all(pieces: &[Copy1d]) -> Result<()> {
    let mut ranges = Vec::with_capacity(2 * pieces.len());
    for (i, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.bytes != 0) {
        ranges.push((piece.src, piece.bytes, i, false));
        ranges.push((piece.dst, piece.bytes, i, true));
    }
    ranges.sort_unstable();
    let (mut read, mut written) = (Reach::default(), Reach::default());
    for (start, bytes, piece, writes) in ranges {
        if start < written.end {
            return Err(meeting(written.piece, piece, if writes { "write" } else { "share" }));
        }
        if writes && start < read.end {
            return Err(meeting(read.piece, piece, "share"));
        }
        let reach = if writes { &mut written } else { &mut read };
        if start + bytes > reach.end {
            *reach = Reach { end: start + bytes, piece };
        }
    }
    Ok(())
}

#[cold]
fn meeting(one: usize, other: usize, what: &str) -> Error {
    let (first, second) = (one.min(other), one.max(other));
    Error::invalid(match (first == second, what) {
        (true, _) => format!(
            "piece {first} overlaps itself: its source and destination share bytes; copy by way of another buffer"
        ),
        (false, "write") => format!(
            "pieces {first} and {second} write the same bytes, and pieces of one call have no order; give one of them to a later call"
        ),
        _ => format!(
            "of pieces {first} and {second} one reads what the other one writes, and pieces of one call have no order; give one of them to a later call"
        ),
    })
}

#[cfg(test)]
#[path = "../tests/unit/copies.rs"]
mod tests;
