//! How blocks come and go through an annex: a short way for its owner, and one for everybody else.
//!
//! This module must not know how segments come and go.

use super::{Annex, BATCH, MOST_ROWS, Yard};
use crate::allocator::{Inner, On, PARKED_AT_ONCE, inner_of, release};
use crate::bias::Guard;
use crate::buffer::{Buffer, Open, Row};
use crate::layout::{Layout, UNIT, UNIT_SHIFT};
use crate::numbers::{thread_number, thread_number_there};
use crate::paths::last_other;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Header, Lease, Line, Result, Stamp};
use std::ptr::NonNull;

/// The last lease of a row is gone whose block lies in the annex `k`, or lay there, and nobody but its home line has used it.
///
/// # Safety
/// - As [`leasehold_core::OwnerOps::last`], for a row of an allocator.
#[inline(never)]
pub(crate) unsafe fn last_annexed(hdr: NonNull<Header>, k: usize) {
    // SAFETY: the header is the first field of a row of our table, which is alive as long as one of its rows is out.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: the row is out until `free_own_annexed` has put it back, so its allocator is alive.
    match unsafe { inner.as_ref() }.free_own_annexed(row, k) {
        Some(0) => {}
        // SAFETY: an orphan counts the rows that are out; this one came back.
        Some(owed) => unsafe { release(inner, owed) },
        // SAFETY: `free_own_annexed` did nothing, so this thread is still alone with the row.
        None => unsafe { last_other(hdr) },
    }
}

impl Inner {
    /// A block of its own of an ordinary alignment, from the annex of this thread, if there is one, or from the core.
    #[inline(never)]
    pub(crate) fn alloc_annexed(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        let me = thread_number();
        let Some(annex) = self.annexes.all.get(self.annexes.number(me)) else { return self.alloc_past(size, on) };
        // (Nothing at all is not served either.)
        if size.wrapping_sub(1) >= annex.largest.load(Ordering::Relaxed) {
            return self.alloc_past(size, on);
        }
        if let Some(mut yard) = annex.lock.lock_own(me)
            && !yard.parked.any()
            && yard.heap.nodes.ensure(2).is_ok()
            && let Some(row) = self.table.pick(me, &mut yard.stock).or_else(|| self.table.pick_any(&mut yard.stock))
        {
            self.dress_early(row, annex.name, size, on.line);
            if let Some(node) = yard.heap.take_node(units_of(size), 1, on.line) {
                return Ok(self.lend_annexed(annex, &mut yard, row, node));
            }
            yard.stock.link(row);
            drop(yard);
            return self.alloc_annexed_slow(size, on, true);
        }
        self.alloc_annexed_slow(size, on, false)
    }

    /// As [`alloc_annexed`](Self::alloc_annexed), for who does not own it, or where more is to be done. `none`: nothing in it fits.
    #[inline(never)]
    fn alloc_annexed_slow(&self, size: u64, on: On<'_>, none: bool) -> Result<Lease<Buffer>> {
        match self.take_annexed(size, on, none) {
            Some(lease) => Ok(lease),
            None => self.alloc_past(size, on),
        }
    }

    fn take_annexed(&self, size: u64, on: On<'_>, none: bool) -> Option<Lease<Buffer>> {
        let me = thread_number();
        let k = self.annexes.number(me);
        let annex = self.annexes.all.get(k)?;
        let units = units_of(size);
        let mut yard = annex.lock.lock_as(me);
        if !none {
            if yard.parked.any() {
                self.unpark_in(&mut yard, annex, PARKED_AT_ONCE);
            }
            if let Some(node) = yard.heap.take(units, 1, on.line).ok()? {
                return self.issue_annexed(annex, &mut yard, node, size, on.line);
            }
        }
        if yard.rest > 0 {
            yard.rest -= 1;
            return None;
        }
        drop(yard);
        self.extend_slow(k, units, size, on)
    }

    /// A block of its own of an ordinary alignment, or of no size, from the core.
    #[inline(never)]
    fn alloc_past(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        self.alloc_exact(Layout::new(size), on)
    }

    /// A row for a block of an annex, under its lock. `None`: there is none, and the block is given back.
    pub(super) fn issue_annexed(
        &self,
        annex: &Annex,
        yard: &mut Yard,
        node: u32,
        size: u64,
        line: &'static Line,
    ) -> Option<Lease<Buffer>> {
        let row = match self.table.pick(thread_number(), &mut yard.stock) {
            Some(row) => row,
            None => self.stock_slow(yard, node)?,
        };
        self.dress_early(row, annex.name, size, line);
        Some(self.lend_annexed(annex, yard, row, node))
    }

    /// Lends a block of an annex by a row of its stock that knows the rest. Under its lock.
    #[inline(always)]
    fn lend_annexed(&self, annex: &Annex, yard: &mut Yard, row: &Row, node: u32) -> Lease<Buffer> {
        yard.stocked -= 1;
        let units = self.dress_late(&mut yard.heap, row, node);
        Annex::add(&annex.taken, 1);
        Annex::add(&annex.used, units.into());
        let ahead = annex.ahead.load(Ordering::Relaxed).wrapping_add_unsigned(row.buffer.len());
        annex.ahead.store(ahead, Ordering::Relaxed);
        if ahead > annex.most_ahead() {
            self.tell_slow(annex);
        }
        self.lend(row)
    }

    /// A row for a block of an annex, under its lock, if none lies in the thread's own list: brings some from the core. `None`: there are
    /// none, and the block is given back.
    #[cold]
    #[inline(never)]
    fn stock_slow(&self, yard: &mut Yard, node: u32) -> Option<&Row> {
        if yard.stocked == 0 {
            let mut core = self.core.lock();
            match self.table.stock(thread_number(), &mut core.vacant, &mut yard.stock, BATCH, self.owner_ptr()) {
                Ok(n) => yard.stocked = n,
                Err(_) => {
                    let stamp = yard.heap.nodes.stamp(node);
                    yard.heap.release(node, stamp);
                    return None;
                }
            }
        }
        self.table.pick_any(&mut yard.stock)
    }

    /// Gives some of many vacant rows back to the core. Under the annex's lock.
    #[cold]
    #[inline(never)]
    fn hand_rows_back(&self, yard: &mut Yard) {
        let mut core = self.core.lock();
        yard.stocked -= self.table.carry(thread_number(), &mut yard.stock, &mut core.vacant, 2 * BATCH);
    }

    /// Tells the counters how many live bytes there are. Rarely, so that threads do not meet there.
    #[cold]
    #[inline(never)]
    fn tell_slow(&self, annex: &Annex) {
        self.counters.annexed.fetch_add(annex.ahead.load(Ordering::Relaxed), Ordering::Relaxed);
        annex.ahead.store(0, Ordering::Relaxed);
        self.counters.note_live(self.counters.live());
    }

    /// Takes a row back whose block lies in the annex `k`, if that is the thread's own; `None`: nothing was done. Returns the counts that the
    /// caller owes to an orphaned allocator.
    #[inline(always)]
    fn free_own_annexed(&self, row: &Row, k: usize) -> Option<u64> {
        let me = thread_number_there();
        let annex = self.annexes.all.get(k)?;
        let mut yard = annex.lock.lock_own(me)?;
        if row.buffer.slot.load(Ordering::Relaxed) != annex.name {
            return None;
        }
        if self.front.keeps(row.buffer.len()) {
            self.front.count_refusal(me);
        }
        let gone = !self.table.renew(row);
        Some(self.free_in(annex, &mut yard, row, row.buffer.own_stamp(), row.buffer.len(), gone))
    }

    /// Takes a row back whose block lies in an annex, or lay there. `gone`: the row's generations are used up. Returns the counts that the
    /// caller owes to an orphaned allocator.
    pub(crate) fn free_annexed(&self, row: &Row, stamp: Stamp, len: u64, gone: bool) -> u64 {
        match self.yard_of(row) {
            Some((annex, mut yard)) => self.free_in(annex, &mut yard, row, stamp, len, gone),
            None => self.free_in_core(row, stamp, len, gone),
        }
    }

    /// Takes a row of an annex back, which has its next generation or is `gone`. Under the annex's lock.
    #[inline(always)]
    fn free_in(&self, annex: &Annex, yard: &mut Yard, row: &Row, stamp: Stamp, len: u64, gone: bool) -> u64 {
        let node = row.buffer.place.load(Ordering::Relaxed);
        if !gone {
            yard.stock.link(row);
            yard.stocked += 1;
        }
        self.end(annex, len);
        let slot = Self::release_in(yard, annex, node, stamp);
        if yard.heap.is_whole(slot) {
            self.hand_back(yard, annex, slot, true);
        }
        if yard.stocked > MOST_ROWS {
            self.hand_rows_back(yard);
        }
        u64::from(yard.orphan)
    }

    /// A row of an annex is not lent any more. Under its lock.
    #[inline(always)]
    fn end(&self, annex: &Annex, len: u64) {
        Annex::add(&annex.ended, 1);
        let ahead = annex.ahead.load(Ordering::Relaxed).wrapping_sub_unsigned(len);
        annex.ahead.store(ahead, Ordering::Relaxed);
        if ahead < -annex.most_ahead() {
            self.tell_slow(annex);
        }
    }

    /// As [`free_annexed`](Self::free_annexed), for a block that other lines than its home may have used.
    #[cold]
    pub(crate) fn free_annexed_shared(&self, row: &Row) -> Option<u64> {
        let (annex, mut yard) = self.yard_of(row)?;
        let (node, len, open) = (row.buffer.place.load(Ordering::Relaxed), row.buffer.len(), row.buffer.open());
        // Whether a parked one may be used again is asked once it comes back.
        let fine = self.table.renew(row);
        if open == Open::Several {
            yard.heap.park(node);
            self.append(&mut yard.parked, row);
        } else {
            row.buffer.reset();
            Self::release_in(&mut yard, annex, node, if let Open::One(stamp) = open { stamp } else { Stamp::NEVER });
            if fine {
                yard.stock.link(row);
                yard.stocked += 1;
            }
        }
        self.end(annex, len);
        Some(u64::from(yard.orphan))
    }

    /// The annex that a row's block lies in, locked.
    fn yard_of(&self, row: &Row) -> Option<(&Annex, Guard<'_, Yard>)> {
        let annex = self.annexes.all.get(row.annex()?)?;
        let yard = annex.lock.lock();
        row.annex().is_some().then_some((annex, yard))
    }

    /// Gives a used node of an annex back. Returns its span.
    #[inline(always)]
    fn release_in(yard: &mut Yard, annex: &Annex, node: u32, stamp: Stamp) -> usize {
        let n = &yard.heap.nodes[node];
        let span = usize::from(n.span);
        Annex::sub(&annex.used, n.units.into());
        yard.heap.release(node, stamp);
        span
    }
}

/// Units of a request that an annex serves.
#[inline(always)]
fn units_of(size: u64) -> u32 {
    ((size + (UNIT - 1)) >> UNIT_SHIFT) as u32
}

impl Annex {
    /// By how many live bytes it may be ahead of what it has told: two of the largest blocks.
    #[inline(always)]
    fn most_ahead(&self) -> i64 {
        (self.largest.load(Ordering::Relaxed) * 2) as i64
    }
}
