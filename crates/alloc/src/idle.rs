//! Idle memory of growing blocks on its way back: to the pieces in hand, and addresses to the
//! driver. [`ranges`](crate::ranges) says what is idle.
//!
//! The lock is not held across a call of the backing.

use crate::backing::Chunk;
use crate::extent::NIL;
use crate::host;
use crate::ranges::{Busy, IDLE_SHARE, Range, busy};
use crate::residency::{End, Source, Step};
use crate::state::{Core, Inner};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Result};

/// Memory of a range that goes back.
struct Leaving {
    at: usize,
    steps: Vec<Step>,
    /// The range itself, if all of it goes: its reservation or its chunk.
    whole: Option<(u64, u64, Option<Chunk>)>,
}

impl Core {
    /// Takes `wanted` bytes of idle memory that nobody uses out of one range, or all that it has.
    /// Parked blocks come first.
    fn take_idle(&mut self, wanted: u64) -> Result<Option<Leaving>> {
        let (ranges, heap) = (&self.ranges.0, &self.store.heap);
        let idle = |r: &Range| {
            // A piece that reaches below the tail stays.
            let loose = r.pieces.last().is_some_and(|&p| heap.res.bytes_of(p) <= r.tail());
            // (A parked block without memory has addresses to give back.)
            r.busy == Busy::No && (loose || !r.held) && r.is_over()
        };
        let mut found = None;
        for held in [false, true] {
            let fits = |r: &Option<Range>| r.as_ref().is_some_and(|r| r.held == held && idle(r));
            found = found.or_else(|| ranges.iter().position(fits));
        }
        found.map_or(Ok(None), |at| self.take_tail(at, wanted))
    }

    /// Takes `wanted` bytes off the end of a range that is not busy, whose tail nobody uses.
    fn take_tail(&mut self, at: usize, wanted: u64) -> Result<Option<Leaving>> {
        let (heap, Some(range)) = (&mut self.store.heap, self.ranges.0[at].as_mut()) else {
            return Ok(None);
        };
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
    fn end_idle(&mut self, leaving: &Leaving) -> (u64, bool, bool) {
        let (mut freed, mut stays) = (0, 0);
        for step in &leaving.steps {
            self.store.heap.end_step(step);
            match step.end {
                End::Loose if self.store.heap.res.is_cached(step.piece) => freed += step.bytes,
                End::Untouched => stays += step.bytes,
                _ => {}
            }
        }
        let slot = &mut self.ranges.0[leaving.at];
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
        let mut others = self.ranges.sharing(base).peekable();
        let last = others.peek().is_none();
        if broken {
            others.for_each(|r| r.reserved.1 = 0);
        }
        (freed, true, last && !broken && bytes > 0)
    }

    /// Checks the growing blocks against the pieces. For tests.
    pub(crate) fn check_ranges(&self) -> std::result::Result<(), String> {
        let pieces = &self.store.heap.res.pieces;
        let mut seen = vec![0; pieces.len()];
        for (at, range) in self.ranges.0.iter().enumerate() {
            let Some(range) = range.as_ref().filter(|r| r.busy == Busy::No) else {
                continue;
            };
            let bytes: u64 = range.pieces.iter().map(|&p| self.store.heap.res.bytes_of(p)).sum();
            if range.chunk.is_none() && bytes != range.mapped || range.committed > range.mapped {
                let (committed, mapped) = (range.committed, range.mapped);
                return Err(format!("block {at} has {bytes} of {mapped}, uses {committed}"));
            }
            let mut end = 0;
            for &piece in &range.pieces {
                end += self.store.heap.res.bytes_of(piece);
                seen[piece as usize] += 1;
                if seen[piece as usize] > 1 + pieces[piece as usize].more {
                    return Err(format!("piece {piece} is in {} places", seen[piece as usize]));
                }
                if pieces[piece as usize].more > 0 && end > range.shared {
                    return Err(format!("piece {piece} is shared, and block {at} may write it"));
                }
                self.store.heap.res.check_elsewhere(piece)?;
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Brings idle memory whose uses are over back to the pieces in hand, `wanted` bytes if there
    /// are so many. Calls the driver. Returns the bytes. Called without the lock.
    pub(crate) fn give_back_idle(&self, wanted: u64) -> u64 {
        let mut freed = 0;
        while freed < wanted {
            // Without host memory for the list the memory stays where it is.
            let Ok(Some(leaving)) = self.core.lock().take_idle(wanted - freed) else { break };
            let (bytes, moved) = self.send_away(leaving);
            freed += bytes;
            if !moved {
                break;
            }
        }
        freed
    }

    /// Unmaps what leaves a range. Returns the bytes that are in hand now or with the driver, and
    /// whether anything has left.
    fn send_away(&self, mut leaving: Leaving) -> (u64, bool) {
        for step in &mut leaving.steps {
            if step.obtain(&*self.backing).is_err() {
                break;
            }
        }
        self.trace_steps(&leaving.steps);
        let (mut bytes, gone, whole) = self.core.lock().end_idle(&leaving);
        if let (Some((base, size, chunk)), true) = (leaving.whole, whole) {
            bytes += self.release_range(base, size, chunk);
        }
        (bytes, gone || leaving.steps.iter().any(|s| s.end == End::Loose))
    }

    /// Unmaps all pieces beyond the length of a block.
    ///
    /// # Errors
    /// `Occupied` while work may still use them, or another thread maps memory for the block;
    /// `InvalidState` if the driver keeps one.
    pub(crate) fn empty_tail(&self, at: usize) -> Result<()> {
        let mut core = self.core.lock();
        let leaving = match core.ranges.0[at].as_ref() {
            Some(range) if range.mapped == range.committed => None,
            Some(range) if range.busy != Busy::No => return Err(busy()),
            Some(range) if !range.is_over() => {
                return Err(Error::Occupied {
                    resource: "memory that a growing block had (work may still use it)",
                });
            }
            _ => core.take_tail(at, u64::MAX)?,
        };
        drop(core);
        if let Some(leaving) = leaving {
            self.send_away(leaving);
        }
        match &self.core.lock().ranges.0[at] {
            Some(range) if range.broken => Err(Error::state(
                "the driver did not unmap a place of the growing block; make another block",
            )),
            _ => Ok(()),
        }
    }

    /// Gives addresses without memory back to the driver, or a chunk. Returns the chunk's bytes.
    pub(crate) fn release_range(&self, base: u64, bytes: u64, chunk: Option<Chunk>) -> u64 {
        let Some(chunk) = chunk else {
            // SAFETY: the range was reserved for a block that is gone, nothing is mapped in it, and
            // it was taken out of the table.
            unsafe { self.backing.release(base, bytes) };
            return 0;
        };
        // SAFETY: the chunk was committed for a block that is gone, and was taken out of the table.
        if unsafe { self.backing.decommit(chunk) }.is_err() {
            self.core.lock().store.heap.res.quarantined += chunk.bytes;
            return 0;
        }
        self.budget.give_back(chunk.bytes);
        chunk.bytes
    }

    /// Brings idle memory beyond its share back to the pieces in hand.
    #[inline]
    pub(crate) fn trim_idle(&self) {
        if self.grows.load(Ordering::Relaxed) {
            self.trim_idle_slow();
        }
    }

    #[cold]
    fn trim_idle_slow(&self) {
        let most = self.budget.limit().min(self.caps.physical) / IDLE_SHARE;
        let idle = self.core.lock().ranges.idle_bytes();
        if idle > most {
            self.give_back_idle(idle - most);
        }
    }

    /// The end of all growing blocks: nobody holds one.
    pub(crate) fn end_ranges(&mut self) {
        let ranges = &mut self.core.get_mut().ranges;
        (0..ranges.0.len() as u32).for_each(|at| ranges.park(at));
        self.give_back_idle(u64::MAX);
    }
}
