//! Growing blocks: addresses for a maximum, with memory from the beginning up to what is in use.
//!
//! A growing block has a reservation of its own. Its pieces are the heap's: a growth takes pieces
//! in hand, pieces from under free memory and new ones, and what a block no longer needs goes back
//! to the pieces in hand. So caches, weights and activations share one pool and one budget. The
//! address never changes. Blocks side by side share one reservation, which goes with the last.
//!
//! # Invariants
//! - The first `committed` bytes of a block are backed. What is backed beyond them is its *tail*.
//! - A place goes from vacant to mapped while no work knows it, and from mapped to vacant after
//!   the last use of the block that was recorded when the tail became one. Nothing is remapped.
//! - A piece may be mapped in several blocks, at the beginning of each. It goes with the last of
//!   its mappings. A block's own memory begins behind the pieces that were ever shared.
//! - A thread that calls the driver for a block has marked it busy. No other thread changes its
//!   mappings. Places that leave are not mapped any more from the moment when the mark is set.
//!
//! # Idle memory
//! Tails are idle, and so is all memory of a *parked* block: one that nobody holds any more. A new
//! block of the same maximum adopts a parked one, with what is mapped there. Idle memory may be one
//! part in [`IDLE_SHARE`] of the budget. What is more goes back to the pieces in hand at the next
//! slow path, and all of it does before an allocation fails.
//!
//! This module must not know how a block gets longer: `growing` does.

use crate::backing::Chunk;
use crate::residency::{End, Residency, Step};
use leasehold_core::{Error, PackedTimepoint};

/// Idle memory of growing blocks is one part in so many of the budget at most.
pub(crate) const IDLE_SHARE: u64 = 8;

/// A thread's calls of the driver for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Busy {
    /// There are none.
    No,
    /// The block gets memory.
    Mapping,
    /// Memory beyond its end leaves.
    Leaving,
}

#[cold]
pub(crate) fn busy() -> Error {
    Error::Occupied { resource: "growing block (another thread maps memory for it)" }
}

/// The addresses of a growing block, and what is mapped there. All lengths are whole granules.
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// The address and the bytes of the reservation, which neighbours may share. 0 bytes: a place
    /// in it is lost, and nobody gives it back.
    pub(crate) reserved: (u64, u64),
    pub(crate) committed: u64,
    pub(crate) mapped: u64,
    /// The beginning that other blocks have too, or had: nobody writes it. Whole pieces.
    pub(crate) shared: u64,
    /// The pieces, in the order of their places.
    pub(crate) pieces: Vec<u32>,
    /// All of it, where addresses and memory are one.
    pub(crate) chunk: Option<Chunk>,
    /// The uses that may still reach the tail.
    pub(crate) until: Vec<PackedTimepoint>,
    pub(crate) held: bool,
    pub(crate) busy: Busy,
    /// The driver did not unmap a place beyond what is mapped. Nothing more is mapped here.
    pub(crate) broken: bool,
}

impl Range {
    /// Returns whether other blocks lie in the same reservation.
    pub(crate) fn is_part(&self) -> bool {
        self.reserved.1 > self.bytes
    }

    /// Bytes that may go back to the driver once their uses are over.
    pub(crate) fn tail(&self) -> u64 {
        if self.busy != Busy::No || self.chunk.is_some() && self.held {
            return 0;
        }
        self.mapped - self.committed
    }

    /// Whether memory beyond the length is the block's own. Pieces that no other block has any more
    /// become its own. The piece with the length's end stays shared.
    pub(crate) fn own_tail(&mut self, res: &Residency) -> bool {
        if self.shared <= self.committed {
            return true;
        }
        let (mut end, mut kept) = (0, 0);
        for &piece in &self.pieces {
            let begin = end;
            end += res.bytes_of(piece);
            if begin < self.committed {
                kept = end;
            } else if begin < self.shared && !res.is_alone(piece) {
                return false;
            }
        }
        self.shared = self.shared.min(kept);
        true
    }

    /// The end of the last piece that another block has too.
    pub(crate) fn end_of_forks(&self, res: &Residency) -> u64 {
        let (mut end, mut last) = (0, 0);
        for &piece in &self.pieces {
            end += res.bytes_of(piece);
            if res.pieces[piece as usize].more > 0 {
                last = end;
            }
        }
        last
    }

    /// Takes the pieces of a plan that ran, in the order of their places. Of one that failed,
    /// nothing is mapped, unless the driver kept a place: then the range is broken.
    pub(crate) fn take_pieces(&mut self, steps: &[Step], done: bool) {
        if done {
            self.pieces.extend(steps.iter().map(|s| s.piece));
            self.mapped += steps.iter().map(|s| s.bytes).sum::<u64>();
        }
        self.broken |= steps.iter().any(|s| s.end == End::LostAtTarget);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.until.iter().all(|p| p.has_passed())
    }
}

/// The growing blocks of an allocator.
#[derive(Default)]
pub(crate) struct Ranges(pub(crate) Vec<Option<Range>>);

impl Ranges {
    /// Bytes of tails and parked blocks, without shared ones.
    pub(crate) fn idle_bytes(&self) -> u64 {
        let own = |r: &Range| r.tail().min(r.mapped - r.shared.min(r.mapped));
        self.0.iter().flatten().map(own).sum()
    }

    /// Bytes that wait for uses, and the uses.
    pub(crate) fn pending(&self, mut f: impl FnMut(u64, PackedTimepoint)) {
        for range in self.0.iter().flatten().filter(|r| r.tail() > 0) {
            range.until.iter().filter(|p| !p.has_passed()).for_each(|&p| f(range.tail(), p));
        }
    }

    /// Whether no work can reach memory that nobody holds.
    pub(crate) fn is_over(&self) -> bool {
        self.0.iter().flatten().all(Range::is_over)
    }

    /// The blocks whose addresses are in the reservation that begins here.
    pub(crate) fn sharing(&mut self, base: u64) -> impl Iterator<Item = &mut Range> {
        self.0.iter_mut().flatten().filter(move |r| r.reserved.0 == base)
    }

    /// Each block.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Range> {
        self.0.iter().flatten()
    }

    /// Nobody holds the block any more, and its last use is over. Takes no host memory.
    pub(crate) fn park(&mut self, at: u32) {
        if let Some(Some(range)) = self.0.get_mut(at as usize) {
            (range.held, range.committed) = (false, 0);
            range.until.clear();
        }
    }
}
