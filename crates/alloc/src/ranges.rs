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

use crate::backing::Chunk;
use crate::buffer::Buffer;
use crate::extent::NIL;
use crate::heap::Heap;
use crate::host;
use crate::layout::UNIT_SHIFT;
use crate::residency::{End, Plan, Residency, Source, Step};
use leasehold_core::{Error, Lease, PackedTimepoint, Result};

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
    /// The whole granules of the first `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` for more than there are addresses.
    pub(crate) fn within(&self, bytes: u64, granule: u64) -> Result<u64> {
        if bytes > self.bytes {
            return Err(Error::invalid(format!(
                "{bytes} bytes of a growing block of {} at most; give it a larger maximum",
                self.bytes
            )));
        }
        Ok(bytes.next_multiple_of(granule))
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

/// Memory of a range that goes back.
pub(crate) struct Leaving {
    pub(crate) at: usize,
    pub(crate) steps: Vec<Step>,
    /// The range itself, if all of it goes: its reservation or its chunk.
    pub(crate) whole: Option<(u64, u64, Option<Chunk>)>,
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

    /// A block.
    pub(crate) fn get(&self, at: usize) -> Option<&Range> {
        self.0.get(at).and_then(Option::as_ref)
    }

    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut Range> {
        self.0.get_mut(at).and_then(Option::as_mut)
    }

    /// Writes a block's addresses down, which lie in a reservation. It is held.
    pub(crate) fn add(
        &mut self,
        (base, bytes): (u64, u64),
        reserved: (u64, u64),
        chunk: Option<Chunk>,
    ) -> Result<usize> {
        let range = Range {
            base,
            bytes,
            reserved,
            committed: 0,
            mapped: chunk.map_or(0, |_| bytes),
            shared: 0,
            pieces: Vec::new(),
            chunk,
            until: Vec::new(),
            held: true,
            busy: Busy::No,
            broken: false,
        };
        let at = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        host::room(&mut self.0, 1)?;
        if at == self.0.len() {
            self.0.push(None);
        }
        self.0[at] = Some(range);
        Ok(at)
    }

    /// The parked block of this maximum that has the most memory, held from now on.
    pub(crate) fn adopt(&mut self, bytes: u64) -> Option<usize> {
        let fits = |r: &Range| {
            !r.held && r.busy == Busy::No && !r.broken && r.shared == 0 && r.bytes == bytes
        };
        let all = self.0.iter_mut().enumerate();
        let fitting = all.filter_map(|(at, r)| Some((at, r.as_mut().filter(|r| fits(r))?)));
        let (at, range) = fitting.max_by_key(|(_, r)| r.mapped)?;
        range.held = true;
        Some(at)
    }

    /// Nobody holds any block.
    pub(crate) fn park_all(&mut self) {
        (0..self.0.len() as u32).for_each(|at| self.park(at));
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

    /// Takes `wanted` bytes of idle memory that nobody uses out of one range, or all that it has.
    /// Parked blocks come first.
    pub(crate) fn take_idle(&mut self, heap: &mut Heap, wanted: u64) -> Result<Option<Leaving>> {
        let idle = |r: &Range| {
            // A piece that reaches below the tail stays.
            let loose = r.pieces.last().is_some_and(|&p| heap.res.bytes_of(p) <= r.tail());
            // (A parked block without memory has addresses to give back.)
            r.busy == Busy::No && (loose || !r.held) && r.is_over()
        };
        let mut found = None;
        for held in [false, true] {
            let fits = |r: &Option<Range>| r.as_ref().is_some_and(|r| r.held == held && idle(r));
            found = found.or_else(|| self.0.iter().position(fits));
        }
        found.map_or(Ok(None), |at| self.take_tail(heap, at, wanted))
    }

    /// Takes `wanted` bytes off the end of a range that is not busy, whose tail nobody uses.
    pub(crate) fn take_tail(
        &mut self,
        heap: &mut Heap,
        at: usize,
        wanted: u64,
    ) -> Result<Option<Leaving>> {
        let Some(range) = self.get_mut(at) else { return Ok(None) };
        let mut steps = Vec::new();
        host::room(&mut steps, range.pieces.len())?;
        let mut taken = 0;
        while taken < wanted
            && let Some(&piece) = range.pieces.last()
        {
            let bytes = heap.res.bytes_of(piece);
            if taken + bytes > range.mapped - range.committed {
                break;
            }
            taken += bytes;
            range.pieces.pop();
            let from_addr = range.base + range.mapped - taken;
            steps.push(if heap.res.is_alone(piece) {
                heap.leaving(piece, Source::Reclaimed { from: NIL, from_addr })
            } else {
                heap.shared_step(piece, Source::Unshared { from_addr })
            });
        }
        let whole = !range.held && (range.chunk.is_some() || taken == range.mapped);
        range.busy = Busy::Leaving;
        range.mapped -= taken;
        let whole = whole.then_some((range.reserved.0, range.reserved.1, range.chunk));
        Ok(Some(Leaving { at, steps, whole }))
    }

    /// Writes down how memory left a range. Returns its bytes, whether the range is gone, and
    /// whether its reservation may go.
    pub(crate) fn end_idle(&mut self, heap: &mut Heap, leaving: &Leaving) -> (u64, bool, bool) {
        let (mut freed, mut stays) = (0, 0);
        for step in &leaving.steps {
            heap.end_step(step);
            match step.end {
                End::Loose if heap.res.is_cached(step.piece) => freed += step.bytes,
                End::Untouched => stays += step.bytes,
                _ => {}
            }
        }
        let slot = &mut self.0[leaving.at];
        let Some(range) = slot else { return (freed, false, false) };
        range.mapped += stays;
        range.shared = range.shared.min(range.mapped);
        range.busy = Busy::No;
        range.broken |= leaving.steps.iter().any(|s| s.end == End::LostAtSource);
        // The steps went from the end, up to one that failed. (There is room: the pieces came from
        // this list.)
        let stays = leaving.steps.iter().rev().filter(|s| s.end == End::Untouched);
        range.pieces.extend(stays.map(|s| s.piece));
        let gone = leaving.whole.is_some() && range.pieces.is_empty();
        let (broken, (base, bytes)) = (range.broken, range.reserved);
        if !gone {
            return (freed, false, false);
        }
        *slot = None;
        // The last block takes the reservation along. A broken one leaves it for ever.
        let ranges = self.0.iter_mut().flatten();
        let mut others = ranges.filter(|r| r.reserved.0 == base).peekable();
        let last = others.peek().is_none();
        if broken {
            others.for_each(|r| r.reserved.1 = 0);
        }
        (freed, true, last && !broken && bytes > 0)
    }

    /// Plans the mappings of a fork. The pieces stay until the plan has come back. Also returns how
    /// much of `from` was shared before.
    pub(crate) fn plan_fork(
        &mut self,
        heap: &mut Heap,
        places: (usize, usize),
        (from, to): (&Lease<Buffer>, &Lease<Buffer>),
        bytes: u64,
    ) -> Result<(Plan, u64)> {
        // (A buffer counts its shared bytes in so many units.)
        let bytes = bytes.min(from.len()).min(u64::from(u32::MAX) << UNIT_SHIFT);
        let Some(source) = self.get(places.0) else { return Err(busy()) };
        let (mut steps, mut shared) = (Vec::new(), 0);
        host::room(&mut steps, source.pieces.len())?;
        for &piece in &source.pieces {
            let step = heap.shared_step(piece, Source::Shared);
            if shared + step.bytes > bytes {
                break;
            }
            steps.push(Step { addr: to.addr() + shared, ..step });
            shared += step.bytes;
        }
        match self.get_mut(places.1) {
            Some(range) if range.busy == Busy::No && range.mapped == 0 && to.is_empty() => {
                host::room(&mut range.pieces, steps.len())?;
                range.busy = Busy::Mapping;
            }
            _ => return Err(busy()),
        }
        steps.iter().for_each(|step| heap.res.share(step.piece));
        let mut before = 0;
        if let Some(source) = self.get_mut(places.0) {
            before = source.shared;
            source.shared = before.max(shared);
            from.set_shared(source.shared);
        }
        Ok((Plan::of_pieces(steps, 0, 0), before))
    }
}
