//! How blocks come and go: the ways of a request and of the last drop of a lease, through magazines and the core.
//!
//! The hits are small functions that call nothing; what they cannot do is done by others that are never inlined into them.

use crate::allocator::{Core, Inner, On, PARKED_AT_ONCE, inner_of, kind_bits, release};
use crate::buffer::{
    ARENA, Buffer, CLASSLESS, EMPTY, FOREIGN, IMPORTED, NO_CLASS, NO_SLOT, Open, REGION, Row, WATCHED, home_line,
};
use crate::front::{Chain, Pocket, Put, Took};
use crate::heap::{Heap, passed};
use crate::layout::{Layout, MIN_ALIGN, SLAB_MAX, UNIT, UNIT_SHIFT, class_of};
use crate::mutant::mutated;
use crate::numbers::{thread_number, thread_number_there};
use crate::store::{Block, Need, Spot};
use leasehold_core::sync::MutexGuard;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Header, Lease, Line, Owner, Result, Stamp};
use std::ptr::NonNull;

/// The drop of the last lease of a row.
///
/// # Safety
/// - As [`leasehold_core::OwnerOps::last`], for a row of an allocator.
pub(crate) unsafe fn last(hdr: NonNull<Header>) {
    // SAFETY: the header is the first field of a row of our table, which is alive as long as one of its rows is out.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    if row.buffer.flags() & UNKEPT != 0 {
        // SAFETY: the header's last count went, as the caller of `last` vouches; nothing was done with the row yet.
        return unsafe { last_unkept(hdr) };
    }
    // SAFETY: the row is out until `free_own` has put it back, so its allocator is alive.
    match unsafe { inner.as_ref() }.free_own(row) {
        Freed::Done => {}
        // SAFETY: `free_own` left the row with this thread, which is alone with it.
        how => unsafe { last_how(hdr, how) },
    }
}

/// What the fast way of a free came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Freed {
    Done,
    /// Nothing was done.
    No,
    /// The row has its next generation.
    Renewed,
    /// The same, and no magazine keeps it.
    Refused,
    /// The row's generations are used up.
    Gone,
}

/// Flags of rows that no magazine of small blocks keeps.
const UNKEPT: u32 = IMPORTED | ARENA | EMPTY | WATCHED | FOREIGN | CLASSLESS;

/// # Safety
/// - As [`last`].
#[inline(never)]
unsafe fn last_unkept(hdr: NonNull<Header>) {
    // SAFETY: a header of our table lies first in its row, and the row is out, so table and allocator are alive.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    let (flags, slot) = (row.buffer.flags(), row.buffer.slot.load(Ordering::Relaxed));
    if flags & UNKEPT != CLASSLESS || slot != NO_SLOT {
        // SAFETY: the row's last count went, and nothing was done with it yet.
        unsafe { last_other(hdr) }
    // SAFETY: the row is out, so its allocator is alive.
    } else if unsafe { inner.as_ref() }.may_keep(row, flags) {
        // SAFETY: the row's last count went, and nothing was done with it yet.
        unsafe { last_kept(hdr) }
    } else {
        // SAFETY: the row's last count went, and nothing was done with it yet.
        unsafe { last_large(hdr) }
    }
}

/// The last lease of a row is gone whose block is one of its own that a magazine may keep, and nobody but its home line has used it.
///
/// # Safety
/// - As [`last`].
#[inline(never)]
unsafe fn last_kept(hdr: NonNull<Header>) {
    // SAFETY: a header of our table lies first in its row, and the row is out, so table and allocator are alive.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: the row is out until `free_kept` has put it back, so its allocator is alive.
    match unsafe { inner.as_ref() }.free_kept(row) {
        Ok(0) => {}
        // SAFETY: an orphan counts the rows that are out; these came back.
        Ok(owed) => unsafe { release(inner, owed) },
        // SAFETY: `free_kept` left the row with this thread, which is alone with it.
        Err(how) => unsafe { last_how(hdr, how) },
    }
}

/// The last lease of a row is gone whose block is one of the core's own, and nobody but its home line has used it.
///
/// # Safety
/// - As [`last`].
#[inline(never)]
unsafe fn last_large(hdr: NonNull<Header>) {
    // SAFETY: a header of our table lies first in its row, and the row is out, so table and allocator are alive.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: the row is out until `free_own_large` has put it back, so its allocator is alive.
    match unsafe { inner.as_ref() }.free_own_large(row) {
        Some(false) => {}
        // SAFETY: an orphan counts the rows that are out; this one came back.
        Some(true) => unsafe { release(inner, 1) },
        // SAFETY: the row's last count went, and nothing was done with it yet.
        None => unsafe { last_other(hdr) },
    }
}

/// # Safety
/// - As [`last`].
pub(crate) unsafe fn last_other(hdr: NonNull<Header>) {
    // SAFETY: the row's last count went, as the caller vouches, and nothing was done with it.
    unsafe { last_how(hdr, Freed::No) }
}

/// # Safety
/// - As [`last`].
#[inline(never)]
unsafe fn last_how(hdr: NonNull<Header>, how: Freed) {
    // SAFETY: a header of our table lies first in its row, and the row is out, so table and allocator are alive.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: the row is out until `free` has put it back, so its allocator is alive.
    let owed = unsafe { inner.as_ref() }.free(row, how);
    if owed > 0 {
        // SAFETY: an orphan counts the rows that are out; these came back.
        unsafe { release(inner, owed) };
    }
}

/// Bytes of the largest request that has a number of units.
const MOST_UNITS: u64 = (u32::MAX as u64) << UNIT_SHIFT;

impl Inner {
    #[inline]
    pub(crate) fn owner_ptr(&self) -> *const Owner {
        // The whole of `Inner`, not the field: `last` reaches the rest through it.
        std::ptr::from_ref(self).cast()
    }

    #[inline]
    pub(crate) fn header_ptr(&self, row: &Row) -> NonNull<Header> {
        // The whole row: `last` reaches the buffer through it.
        NonNull::from(row).cast()
    }

    /// The first lease of a row that nobody holds.
    #[inline]
    pub(crate) fn lend(&self, row: &Row) -> Lease<Buffer> {
        row.header.set_live_quietly(false);
        // SAFETY: the count that was just set is the lease's; the value lies in the header's row.
        unsafe { Lease::from_raw(self.header_ptr(row), NonNull::from(&row.buffer)) }
    }

    #[inline]
    pub(crate) fn alloc(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        if layout.align > MIN_ALIGN || !layout.align.is_power_of_two() {
            return self.alloc_aligned(layout, on);
        }
        if (1..=SLAB_MAX).contains(&layout.size) {
            let class = class_of(layout.size);
            // SAFETY: the table lives as long as the allocator, and rows in its magazines are rows of it.
            if let Some(row) = unsafe { self.front.take_own(thread_number_there(), class, on.line.id(), layout.size) } {
                row.buffer.relend(layout.size);
                return Ok(self.lend(row));
            }
            return self.alloc_small(layout.size, on);
        }
        self.alloc_unslabbed(layout.size, on)
    }

    /// A small block that does not lie in a magazine of the thread's own.
    #[inline(never)]
    fn alloc_small(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        self.alloc_other::<true>(Layout::new(size), on)
    }

    /// Any other block of the ordinary alignment.
    #[inline(never)]
    fn alloc_unslabbed(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        if self.front.holds_large(thread_number_there()) {
            self.alloc_kept(size, on)
        } else {
            self.alloc_large(size, on)
        }
    }

    /// One that a magazine may have.
    #[inline(never)]
    fn alloc_kept(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        if self.front.keeps(size) {
            let pocket = Pocket::large(size);
            // SAFETY: the table lives as long as the allocator, and rows in its magazines are rows of it.
            match unsafe { self.front.take::<true>(thread_number_there(), pocket, on.line.id(), size) } {
                Took::Row(row, ahead) => {
                    self.counters.note_live(self.counters.live().wrapping_add_signed(ahead));
                    row.buffer.relend(size);
                    return Ok(self.lend(row));
                }
                Took::Nothing(chain) if !chain.is_empty() => {
                    self.take_back(chain, 0);
                }
                Took::Nothing(_) | Took::Empty(_) => {}
            }
        }
        self.alloc_large(size, on)
    }

    /// One that no magazine has, from the core, if its lock is free.
    #[inline(never)]
    fn alloc_large(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        let me = thread_number_there();
        if size.wrapping_sub(1) < MOST_UNITS
            && self.watch.is_none()
            && let Some(mut core) = self.core.try_lock()
            && !core.parked.any()
            && core.store.heap.nodes.ensure(2).is_ok()
            && let Some(row) = self.table.pick(me, &mut core.vacant)
        {
            let units = ((size + (UNIT - 1)) >> UNIT_SHIFT) as u32;
            self.dress_early(row, NO_SLOT, size, on.line);
            if let Some(node) = core.store.heap.take_node(units, 1, on.line) {
                core.vacant.live += 1;
                core.allocations += 1;
                self.dress_late(&mut core.store.heap, row, node);
                self.counters.add_live(row.buffer.len() as i64);
                return Ok(self.lend(row));
            }
            core.vacant.link(row);
            drop(core);
            return self.alloc_slow(Need { units, align: 1, class: None }, Layout::new(size), on);
        }
        self.alloc_large_other(size, on)
    }

    #[inline(never)]
    fn alloc_large_other(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        self.alloc_other::<false>(Layout::new(size), on)
    }

    #[cold]
    #[inline(never)]
    fn alloc_aligned(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let layout = layout.check()?;
        if layout.align <= MIN_ALIGN && (1..=SLAB_MAX).contains(&layout.size) {
            return self.alloc_small(layout.size, on);
        }
        self.alloc_other::<false>(layout, on)
    }

    /// `SMALL`: a block of a slab class.
    #[inline(always)]
    fn alloc_other<const SMALL: bool>(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        if !SMALL && layout.size == 0 {
            return self.empty(on);
        }
        if SMALL && !self.front.is_none() {
            let pocket = Pocket::small(class_of(layout.size));
            // SAFETY: the table lives as long as the allocator, and rows in its magazines are rows of it.
            let took = unsafe { self.front.take::<false>(thread_number(), pocket, on.line.id(), layout.size) };
            match took {
                Took::Row(row, _) => {
                    row.buffer.relend(layout.size);
                    return Ok(self.lend(row));
                }
                Took::Empty(more) => return self.alloc_some_slow(layout, on, more),
                Took::Nothing(chain) if !chain.is_empty() => {
                    self.take_back(chain, 0);
                }
                Took::Nothing(_) => {}
            }
        }
        if let Some(watch) = &self.watch {
            return self.alloc_watched(watch, layout, on);
        }
        if SMALL {
            let need = Need { units: 0, align: 1, class: Some(class_of(layout.size) as u16) };
            return self.alloc_in_core(need, layout, on);
        }
        self.alloc_exact(layout, on)
    }

    /// A block of its own, or of no size, that is in no magazine, from the core.
    #[inline(always)]
    pub(crate) fn alloc_exact(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        if layout.size == 0 {
            return self.empty(on);
        }
        // (The ordinary alignment is no question.)
        match Need::exact(layout.size, layout.align)
            .filter(|_| layout.align <= MIN_ALIGN || layout.align <= self.most_align)
        {
            Some(need) => self.alloc_in_core(need, layout, on),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block that no magazine has.
    pub(crate) fn alloc_block(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        match Need::of(layout.size, layout.align).filter(|_| layout.align <= self.most_align) {
            Some(need) => self.alloc_in_core(need, layout, on),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block of the core, whose place in it never changes.
    #[inline(always)]
    pub(crate) fn alloc_in_core(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        {
            let me = thread_number();
            let mut core = self.lock_core();
            if core.parked.any() {
                self.unpark(&mut core, PARKED_AT_ONCE);
            }
            // (Each by itself: so what is known of a block need not lie in memory.)
            if let Some(class) = need.class {
                if let Some(block) = core.store.take_slot(class.into(), on.line)? {
                    return self.issue_to(me, &mut core, block, layout.size, on.line);
                }
            } else if let Some(node) = core.store.heap.take(need.units, need.align, on.line)? {
                let block = core.store.block(node);
                return self.issue_to(me, &mut core, block, layout.size, on.line);
            }
        }
        self.alloc_slow(need, layout, on)
    }

    /// A small block, and `more` of its class for the magazine, as far as there are any that need no new memory.
    #[cold]
    #[inline(never)]
    fn alloc_some_slow(&self, layout: Layout, on: On<'_>, more: u32) -> Result<Lease<Buffer>> {
        let class = class_of(layout.size);
        let need = Need { units: 0, align: 1, class: Some(class as u16) };
        let me = thread_number();
        let (first, mut chain) = {
            let mut core = self.lock_core();
            if core.parked.any() {
                self.unpark(&mut core, PARKED_AT_ONCE);
            }
            let Some(block) = core.store.take(need, on.line)? else {
                drop(core);
                return self.alloc_slow(need, layout, on);
            };
            let first = self.issue_to(me, &mut core, block, layout.size, on.line)?;
            let mut chain = Chain::EMPTY;
            for _ in 0..more {
                let Some(block) = core.store.take_slot_there(class, on.line) else { break };
                match self.dress(me, &mut core, block, layout.size, on.line) {
                    Ok(row) => chain.push(row),
                    Err(_) => break,
                }
            }
            (first, chain)
        };
        // SAFETY: the table lives as long as the allocator, and its front with it.
        unsafe { self.front.stock(me, &mut chain, class, on.line.id()) };
        if !chain.is_empty() {
            self.take_back(chain, 0);
        }
        Ok(first)
    }

    /// Memory for graphs.
    pub(crate) fn alloc_region(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.alloc(layout, on)
    }

    /// The core. A thread that finds its lock taken notes that for its magazines.
    #[inline(always)]
    fn lock_core(&self) -> MutexGuard<'_, Core> {
        self.core.try_lock().unwrap_or_else(|| self.lock_core_slow())
    }

    #[cold]
    #[inline(never)]
    fn lock_core_slow(&self) -> MutexGuard<'_, Core> {
        self.front.encourage(thread_number());
        self.core.lock()
    }

    /// A row for a block, under the lock.
    #[inline(always)]
    pub(crate) fn issue(&self, core: &mut Core, block: Block, size: u64, line: &'static Line) -> Result<Lease<Buffer>> {
        self.issue_to(thread_number(), core, block, size, line)
    }

    /// As [`issue`](Self::issue), for the thread of this number.
    #[inline(always)]
    fn issue_to(
        &self,
        me: u32,
        core: &mut Core,
        block: Block,
        size: u64,
        line: &'static Line,
    ) -> Result<Lease<Buffer>> {
        let row = self.dress(me, core, block, size, line)?;
        core.allocations += 1;
        self.counters.add_live(size as i64);
        Ok(self.lend(row))
    }

    /// What a row says of a block of its own of the core's heap, as the slot says, whichever it will be. Before it is taken, so
    /// that less need be kept in mind meanwhile.
    #[inline(always)]
    pub(crate) fn dress_early(&self, row: &Row, slot: u16, size: u64, line: &'static Line) {
        row.buffer.slot.store(slot, Ordering::Relaxed);
        row.buffer.class.store(NO_CLASS, Ordering::Relaxed);
        row.buffer.describe(size, Some(line), self.row_flags | CLASSLESS);
        row.buffer.inherit(Stamp::NEVER);
    }

    /// The rest, once it is taken. Returns its units.
    #[inline(always)]
    pub(crate) fn dress_late(&self, heap: &mut Heap, row: &Row, node: u32) -> u32 {
        let (addr, native, stamp, units) = heap.name(node, row.header.index());
        row.buffer.place.store(node, Ordering::Relaxed);
        row.buffer.lie_at(addr, native);
        if !stamp.is_never() && !passed(stamp) {
            row.buffer.inherit(stamp);
        }
        units
    }

    /// A row that describes a block, held by nobody yet.
    #[inline(always)]
    fn dress(&self, me: u32, core: &mut Core, block: Block, size: u64, line: &'static Line) -> Result<&Row> {
        let row = match self.table.take_for(me, &mut core.vacant, self.owner_ptr()) {
            Ok(row) => row,
            Err(e) => {
                core.store.give(block.spot, block.stamp);
                return Err(e);
            }
        };
        let (place, slot) = match block.spot {
            Spot::Node(node) => (node, NO_SLOT),
            Spot::Slot(run, slot) => (run, slot),
        };
        row.buffer.place.store(place, Ordering::Relaxed);
        row.buffer.slot.store(slot, Ordering::Relaxed);
        row.buffer.class.store(block.class, Ordering::Relaxed);
        core.store.name(block.spot, row.header.index());
        let flags = self.row_flags | if block.class == NO_CLASS { CLASSLESS } else { 0 };
        row.buffer.describe(size, Some(line), flags);
        row.buffer.lie_at(block.addr, block.native);
        row.buffer.inherit(block.stamp);
        Ok(row)
    }

    #[cold]
    fn empty(&self, on: On<'_>) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let row = self.table.take(&mut core.vacant, self.owner_ptr())?;
        row.buffer.describe(0, Some(on.line), EMPTY | kind_bits(self.config.host_kind));
        row.buffer.lie_at(0, 0);
        row.buffer.inherit(Stamp::NEVER);
        Ok(self.lend(row))
    }

    /// Takes a row back that nobody holds and that is none of the [`UNKEPT`], if it goes into a magazine of the thread's own without more ado.
    #[inline(always)]
    fn free_own(&self, row: &Row) -> Freed {
        let buffer = &row.buffer;
        let flags = buffer.flags();
        if buffer.tag() != 0 {
            return Freed::No;
        }
        let (len, class) = (buffer.len(), buffer.class.load(Ordering::Relaxed));
        if !self.table.renew(row) {
            return Freed::Gone;
        }
        let fine = self.front.put_own(thread_number_there(), row, usize::from(class), home_line(flags), len);
        if fine { Freed::Done } else { Freed::Renewed }
    }

    /// Takes a row back whose block is one of its own, if a magazine keeps it. Returns the counts that the caller owes to an orphaned allocator.
    #[inline(always)]
    fn free_kept(&self, row: &Row) -> Result<u64, Freed> {
        if self.table.renew(row) { self.put_large(row).ok_or(Freed::Refused) } else { Err(Freed::Gone) }
    }

    /// Puts a row with its next generation, whose block is one of its own, into a magazine. `None`: there it finds no room. Returns as
    /// [`free_kept`](Self::free_kept).
    #[inline(never)]
    fn put_large(&self, row: &Row) -> Option<u64> {
        let (buffer, len) = (&row.buffer, row.buffer.len());
        buffer.untag();
        match self.front.put::<true>(thread_number_there(), row, Pocket::large(len), home_line(buffer.flags()), len) {
            Put::Kept(chain, drift) if chain.is_empty() && drift == 0 => Some(0),
            Put::Kept(chain, drift) => Some(self.receive(chain, drift).1),
            Put::Refused => None,
        }
    }

    /// Whether a magazine may keep a row whose block is one of its own.
    #[inline(always)]
    fn may_keep(&self, row: &Row, flags: u32) -> bool {
        self.front.keeps(row.buffer.len()) && flags & REGION == 0 && !self.front.is_refusing(thread_number_there())
    }

    /// Takes a row back whose block is one of the core's own, if the core's lock is free and no magazine keeps the block; `None`:
    /// nothing was done. Returns whether the allocator is an orphan.
    #[inline(always)]
    fn free_own_large(&self, row: &Row) -> Option<bool> {
        let me = thread_number_there();
        let mut core = self.core.try_lock()?;
        let (buffer, len) = (&row.buffer, row.buffer.len());
        if self.front.keeps(len) && buffer.flags() & REGION == 0 {
            self.front.count_refusal(me);
        }
        if self.table.renew(row) {
            core.vacant.link(row);
        }
        core.vacant.live -= 1;
        self.counters.end_live(len);
        core.store.give(Spot::Node(buffer.place.load(Ordering::Relaxed)), buffer.own_stamp());
        Some(core.orphan)
    }

    /// Takes a row back that nobody holds. Returns the counts that the caller owes to an orphaned allocator.
    #[inline(always)]
    fn free(&self, row: &Row, how: Freed) -> u64 {
        let buffer = &row.buffer;
        let flags = buffer.flags();
        if flags & (IMPORTED | ARENA | EMPTY | WATCHED) != 0 {
            return match &self.watch {
                Some(watch) if flags & WATCHED != 0 => self.free_watched(watch, row),
                _ => u64::from(self.free_special(row, flags)),
            };
        }
        let len = buffer.len();
        if flags & FOREIGN != 0 {
            if !buffer.is_private() {
                return self.free_shared_slow(row);
            }
            buffer.set_private();
        }
        let gone = if how == Freed::No { !self.table.renew(row) } else { how == Freed::Gone };
        if gone {
            return self.free_in_core(row, buffer.own_stamp(), len);
        }
        // What lies in a magazine is lent again as it is, but for the tag.
        let put = if flags & CLASSLESS == 0 {
            buffer.untag();
            let pocket = Pocket::small(usize::from(buffer.class.load(Ordering::Relaxed)));
            self.front.put::<false>(thread_number(), row, pocket, home_line(flags), len)
        } else {
            if how != Freed::Refused && self.front.keeps(len) && flags & REGION == 0 {
                let me = thread_number();
                if self.front.is_refusing(me) {
                    self.front.count_refusal(me);
                } else if let Some(owed) = self.put_large(row) {
                    return owed;
                }
            }
            Put::Refused
        };
        if let Put::Kept(chain, drift) = put {
            return if chain.is_empty() && drift == 0 { 0 } else { self.receive(chain, drift).1 };
        }
        let stamp = buffer.own_stamp();
        let mut core = self.lock_core();
        core.store.give(row.spot(), stamp);
        self.counters.end_live(len);
        self.table.put_renewed(&mut core.vacant, row);
        u64::from(core.orphan)
    }

    /// The row's generations are used up, so it is not used again.
    #[cold]
    fn free_in_core(&self, row: &Row, stamp: Stamp, len: u64) -> u64 {
        let mut core = self.core.lock();
        core.store.give(row.spot(), stamp);
        self.counters.add_live(-(len as i64));
        core.vacant.live -= 1;
        u64::from(core.orphan)
    }

    /// Frees a block that other lines than its home may have used. Takes no host memory: while several lines may still be using the
    /// block, its row stays out of circulation and so remembers which.
    #[cold]
    pub(crate) fn free_shared_slow(&self, row: &Row) -> u64 {
        let (len, open) = (row.buffer.len(), row.buffer.open());
        let mut core = self.core.lock();
        let spot = row.spot();
        self.counters.add_live(-(len as i64));
        if open == Open::Several && core.store.park(spot) {
            self.put_aside(&mut core, row, |core| &mut core.parked);
        } else {
            row.buffer.reset();
            core.store.give(spot, if let Open::One(stamp) = open { stamp } else { Stamp::NEVER });
            self.table.put(&mut core.vacant, row);
        }
        u64::from(core.orphan)
    }

    /// Takes rows from the magazines into the core, and what they know about live bytes. Returns how many rows, and the counts that the caller
    /// owes to an orphaned allocator.
    #[cold]
    fn receive(&self, mut chain: Chain, drift: i64) -> (u64, u64) {
        if chain.is_empty() {
            self.counters.tell(drift);
            return (0, 0);
        }
        let (mut n, mut owed) = (0, 0);
        let mut core = self.core.lock();
        // SAFETY: the chain has rows of this allocator's own table.
        while let Some(row) = unsafe { chain.pop() } {
            core.store.give(row.spot(), row.buffer.own_stamp());
            self.table.put_renewed(&mut core.vacant, row);
            owed += u64::from(core.orphan);
            n += 1;
        }
        self.counters.add_live(drift);
        (n, owed)
    }

    /// Brings everything in the magazines back to the core.
    pub(crate) fn flush(&self) {
        let (chain, drift) = self.front.flush(false);
        self.take_back(chain, drift);
    }

    /// Takes rows from the magazines into the core, for who holds the allocator: nobody is owed anything then.
    /// Returns how many rows.
    pub(crate) fn take_back(&self, chain: Chain, drift: i64) -> u64 {
        let (rows, owed) = self.receive(chain, drift);
        debug_assert_eq!(owed, 0);
        rows
    }

    /// The keeper is gone: from now on rows that come back count down.
    pub(crate) fn orphan(&self) {
        let (chain, drift) = self.front.flush(true);
        let (_, owed) = self.receive(chain, drift);
        debug_assert_eq!(owed, 0);
        let mut core = self.core.lock();
        core.orphan = true;
        if !mutated('g') {
            self.refs.fetch_add(u64::from(core.vacant.live), Ordering::Relaxed);
        }
    }

    /// Whether every stream is done with the memory.
    pub(crate) fn is_over(&self) -> bool {
        if self.watch.as_ref().is_some_and(|w| !w.is_over()) {
            return false;
        }
        let mut core = self.core.lock();
        self.settle(&mut core);
        let mut over = !core.parked.any();
        core.store.slabs.pending(|_, s| over &= passed(s));
        self.each_aside(core.retired, |row| over &= row.buffer.open() == Open::Over);
        over && core.store.heap.is_over()
    }
}
