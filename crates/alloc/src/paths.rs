//! How blocks come and go: towards a block, and back.
//!
//! | towards a block | |
//! |---|---|
//! | [`Inner::alloc`] | a hit in the thread cache, for a small block |
//! | [`Inner::alloc_small`], [`Inner::alloc_large`] | the rest of the thread cache, and the depot |
//! | [`Inner::alloc_in_core`] | the heap, under its lock |
//! | [`Inner::alloc_slow`] | the out-of-memory fallback ([`fallback`](crate::fallback)) |
//!
//! - [`last`]: a hit in the thread cache, for a small block.
//! - [`Inner::free`]: what kind of block it is; the thread cache for a large one.
//! - [`Inner::give_back`]: the heap, under its lock.
//! - [`Inner::free_shared_slow`]: a block that several timelines may still be using: a deferred
//!   free ([`deferred`](crate::deferred)).

use crate::buffer::{
    ARENA, Buffer, CLASSLESS, EMPTY, FOREIGN, IMPORTED, Open, Row, WATCHED, home_line,
};
use crate::destroy::release;
use crate::layout::NO_CLASS;
use crate::layout::{Layout, MIN_ALIGN, SLAB_MAX, class_of};
use crate::list::List;
use crate::state::{Core, DEFERRED_AT_ONCE, Inner, On, inner_of, kind_bits};
use crate::store::{Block, Need};
use crate::thread_cache::{Back, Refill};
use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::MutexGuard;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::thread_number::{thread_number, thread_number_there};
use leasehold_core::{Header, Lease, Owner, PackedTimepoint, Result, Timeline};
use std::ptr::NonNull;

/// Flags of rows that no bin keeps.
const UNKEPT: u32 = IMPORTED | ARENA | EMPTY | WATCHED | FOREIGN | CLASSLESS;

/// The drop of the last lease of a row.
///
/// # Safety
/// - As [`leasehold_core::OwnerOps::last`], for a row of an allocator.
pub(crate) unsafe fn last(hdr: NonNull<Header>) {
    // SAFETY: the header is the first field of a row of our table, which is alive as long as one of
    // its rows is out.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    let (buffer, flags) = (&row.buffer, row.buffer.flags());
    let mut renewed = None;
    if flags & UNKEPT == 0 && buffer.tag() == 0 {
        // SAFETY: the row is out until it is put, so its allocator is alive.
        let inner = unsafe { inner.as_ref() };
        let class = usize::from(buffer.class.load(Ordering::Relaxed));
        let fine = inner.table.bump_generation(row);
        renewed = Some(fine);
        if fine
            && inner.caches.put(thread_number_there(), row, class, home_line(flags), buffer.len())
        {
            return;
        }
    }
    // SAFETY: the row's last count went, and this thread is alone with it.
    unsafe { last_slow(hdr, renewed) }
}

/// # Safety
/// - As [`last`], or what it did: ended the row's generation.
#[inline(never)]
unsafe fn last_slow(hdr: NonNull<Header>, renewed: Option<bool>) {
    // SAFETY: a header of our table lies first in its row, and the row is out, so table and
    // allocator are alive.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: the row is out until `free` has put it back, so its allocator is alive.
    let owed = unsafe { inner.as_ref() }.free(row, renewed);
    if owed > 0 {
        // SAFETY: an orphan counts the rows that are out; these came back.
        unsafe { release(inner, owed) };
    }
}

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
    pub(crate) fn first_lease(&self, row: &Row) -> Lease<Buffer> {
        row.header.set_live_quietly(false);
        // SAFETY: the count that was just set is the lease's; the value lies in the header's row.
        unsafe { Lease::from_raw(self.header_ptr(row), NonNull::from(&row.buffer)) }
    }

    #[inline]
    pub(crate) fn alloc(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        if layout.align > MIN_ALIGN || !layout.align.is_power_of_two() {
            return self.alloc_aligned(layout, on);
        }
        if !(1..=SLAB_MAX).contains(&layout.size) {
            return self.alloc_large(layout.size, on);
        }
        let class = class_of(layout.size);
        // SAFETY: the table lives as long as the allocator, and rows in its caches are rows of it.
        match unsafe {
            self.caches.take(thread_number_there(), class, on.timeline.id(), layout.size)
        } {
            Some(row) => {
                row.buffer.reuse(layout.size);
                Ok(self.first_lease(row))
            }
            None => self.alloc_small(layout.size, on),
        }
    }

    /// A small block that is no hit.
    #[inline(never)]
    fn alloc_small(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        let (class, layout) = (class_of(size), Layout::new(size));
        let need = Need { units: 0, align: 1, class: Some(class as u16) };
        if self.caches.is_none() {
            return match &self.watch {
                Some(watch) => self.alloc_watched(watch, layout, on),
                None => self.alloc_in_core(need, layout, on, Back::NOTHING),
            };
        }
        // SAFETY: the table lives as long as the allocator, and rows in its caches are rows of it.
        let (back, more) =
            match unsafe { self.caches.refill(thread_number(), class, on.timeline.id(), size) } {
                Refill::Row(row, back) => {
                    row.buffer.reuse(size);
                    let lease = self.first_lease(row);
                    self.give_back_held(back);
                    return Ok(lease);
                }
                Refill::Empty(more, back) => (back, more),
            };
        if more == 0 {
            self.alloc_in_core(need, layout, on, back)
        } else {
            self.alloc_some(need, layout, on, back, more)
        }
    }

    /// A block whose alignment is no ordinary one.
    #[cold]
    #[inline(never)]
    fn alloc_aligned(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let layout = layout.check()?;
        match &self.watch {
            _ if layout.size == 0 => self.empty(on),
            Some(watch) => self.alloc_watched(watch, layout, on),
            None => self.alloc_block(layout, on),
        }
    }

    /// Any other block.
    #[inline(never)]
    fn alloc_large(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        let (layout, mut back) = (Layout::new(size), Back::NOTHING);
        if size == 0 || self.watch.is_some() {
            return self.alloc_aligned(layout, on);
        }
        if self.caches.keeps(size) {
            // SAFETY: the table lives as long as the allocator, and rows in its caches are rows of
            // it.
            match unsafe { self.caches.take_large(thread_number_there(), on.timeline.id(), size) } {
                Ok((row, ahead)) => {
                    if self.counters.exceeds_peak(self.counters.live().wrapping_add_signed(ahead)) {
                        self.note_peak();
                    }
                    row.buffer.reuse(size);
                    return Ok(self.first_lease(row));
                }
                Err(first) => back = first,
            }
        }
        match Need::exact(size, 1) {
            Some(need) => self.alloc_in_core(need, layout, on, back),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block of the heap, whatever its alignment.
    pub(crate) fn alloc_block(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        match Need::of(layout.size, layout.align).filter(|_| layout.align <= self.most_align) {
            Some(need) => self.alloc_in_core(need, layout, on, Back::NOTHING),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block of the heap, once it has taken back what a thread cache gave up.
    #[inline(always)]
    fn alloc_in_core(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        back: Back,
    ) -> Result<Lease<Buffer>> {
        {
            let mut core = self.lock_core();
            if !back.is_nothing() {
                self.take_back(&mut core, back);
            }
            if core.deferred.any() {
                self.free_deferred(&mut core, DEFERRED_AT_ONCE);
            }
            // (Each by itself: so what is known of a block need not lie in memory.)
            if let Some(class) = need.class {
                if let Some(block) = core.store.take_slot(class.into(), on.timeline)? {
                    return self.issue(&mut core, block, layout.size, on.timeline);
                }
            } else {
                core.store.heap.extents.ensure(2)?;
                let row = self.table.take(&mut core.vacant, self.owner_ptr())?;
                if let Some(extent) =
                    core.store.heap.take_extent(need.units, need.align, on.timeline)
                {
                    self.fill(row, core.store.block(extent), layout.size, on.timeline);
                    core.allocations += 1;
                    self.add_live(layout.size as i64);
                    return Ok(self.first_lease(row));
                }
                self.table.put_bumped(&mut core.vacant, row);
            }
        }
        self.alloc_slow(need, layout, on)
    }

    /// A small block, and `more` of its class for the thread cache, as far as there are any that
    /// need no new memory.
    #[cold]
    #[inline(never)]
    fn alloc_some(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        back: Back,
        more: u32,
    ) -> Result<Lease<Buffer>> {
        let class = class_of(layout.size);
        let first = self.alloc_in_core(need, layout, on, back)?;
        let mut rows = List::EMPTY;
        {
            let mut core = self.lock_core();
            for _ in 0..more {
                let Ok(row) = self.table.take(&mut core.vacant, self.owner_ptr()) else { break };
                let Some(block) = core.store.take_slot_there(class, on.timeline) else {
                    self.table.put_bumped(&mut core.vacant, row);
                    break;
                };
                self.fill(row, block, layout.size, on.timeline);
                rows.push(row);
            }
        }
        // SAFETY: the table lives as long as the allocator, and its caches with it.
        unsafe { self.caches.stock(thread_number(), &mut rows, class, on.timeline.id()) };
        self.give_back_held(Back { rows, drift: 0 });
        Ok(first)
    }

    /// The core. A thread that finds its lock taken notes that for its shard.
    #[inline(always)]
    fn lock_core(&self) -> MutexGuard<'_, Core> {
        self.core.try_lock().unwrap_or_else(|| self.lock_core_slow())
    }

    #[cold]
    #[inline(never)]
    fn lock_core_slow(&self) -> MutexGuard<'_, Core> {
        self.caches.note_contention(thread_number());
        self.core.lock()
    }

    /// A row for a block, under the lock.
    #[inline(always)]
    pub(crate) fn issue(
        &self,
        core: &mut Core,
        block: Block,
        size: u64,
        timeline: &'static Timeline,
    ) -> Result<Lease<Buffer>> {
        let row = match self.table.take(&mut core.vacant, self.owner_ptr()) {
            Ok(row) => row,
            Err(e) => {
                core.store.free(block.placement, block.timepoint);
                return Err(e);
            }
        };
        self.fill(row, block, size, timeline);
        core.allocations += 1;
        self.add_live(size as i64);
        Ok(self.first_lease(row))
    }

    /// Makes a row describe a block.
    #[inline(always)]
    fn fill(&self, row: &Row, block: Block, size: u64, timeline: &'static Timeline) {
        row.set_placement(block.placement, block.class);
        let flags = self.row_flags | if block.class == NO_CLASS { CLASSLESS } else { 0 };
        row.buffer.describe(
            (block.addr, block.native),
            size,
            Some(timeline),
            flags,
            block.timepoint,
        );
    }

    #[cold]
    fn empty(&self, on: On<'_>) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let row = self.table.take(&mut core.vacant, self.owner_ptr())?;
        row.buffer.describe(
            (0, 0),
            0,
            Some(on.timeline),
            EMPTY | kind_bits(self.config.host_kind),
            PackedTimepoint::NEVER,
        );
        Ok(self.first_lease(row))
    }

    /// Takes a row back that nobody holds. `renewed`: its generation has ended, and whether there
    /// is another one. Returns the counts that the caller owes to an orphaned allocator.
    fn free(&self, row: &Row, renewed: Option<bool>) -> u64 {
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
        let fine = renewed.unwrap_or_else(|| self.table.bump_generation(row));
        if fine {
            // A block in a cache is lent again as it is, but for the tag.
            let back = if flags & CLASSLESS == 0 {
                buffer.untag();
                let class = usize::from(buffer.class.load(Ordering::Relaxed));
                self.caches.spill(thread_number(), row, class, home_line(flags), len)
            } else if self.caches.keeps(len) {
                buffer.untag();
                self.caches.put_large(thread_number(), row, home_line(flags), len)
            } else {
                None
            };
            if let Some(back) = back {
                return self.give_back(back);
            }
        }
        let mut core = self.lock_core();
        core.store.free(row.placement(), buffer.own_timepoint());
        self.counters.end_live(len);
        core.vacant.live -= 1;
        if fine {
            core.vacant.link(row);
        }
        u64::from(core.orphan)
    }

    /// Frees a block that other timelines than its home may have used. Takes no host memory: while
    /// several timelines may still be using the block, its row stays out of circulation and so
    /// remembers which.
    #[cold]
    pub(crate) fn free_shared_slow(&self, row: &Row) -> u64 {
        let (len, open) = (row.buffer.len(), row.buffer.open());
        let mut core = self.core.lock();
        let placement = row.placement();
        self.add_live(-(len as i64));
        if open == Open::Several {
            core.store.defer(placement);
            self.put_aside(&mut core, row, |core| &mut core.deferred);
        } else {
            row.buffer.reset();
            core.store.free(
                placement,
                if let Open::One(timepoint) = open { timepoint } else { PackedTimepoint::NEVER },
            );
            self.table.put(&mut core.vacant, row);
        }
        u64::from(core.orphan)
    }

    /// Takes what a thread cache gave up into the heap. Returns the counts that the caller owes to
    /// an orphaned allocator.
    #[inline]
    fn give_back(&self, back: Back) -> u64 {
        if back.is_nothing() {
            return 0;
        }
        if back.rows.is_empty() {
            if self.counters.tell(back.drift) {
                self.note_peak();
            }
            return 0;
        }
        let mut core = self.lock_core();
        let n = self.take_back(&mut core, back);
        if core.orphan { n } else { 0 }
    }

    /// As [`give_back`](Self::give_back), for a caller that holds the allocator: nobody is owed
    /// anything then.
    pub(crate) fn give_back_held(&self, back: Back) {
        let owed = self.give_back(back);
        debug_assert_eq!(owed, 0);
    }

    /// As [`give_back`](Self::give_back), under the lock. Returns how many rows.
    #[inline(never)]
    pub(crate) fn take_back(&self, core: &mut Core, mut back: Back) -> u64 {
        let mut n = 0;
        // SAFETY: the list has rows of this allocator's own table.
        while let Some(row) = unsafe { back.rows.pop() } {
            core.store.free(row.placement(), row.buffer.own_timepoint());
            self.table.put_bumped(&mut core.vacant, row);
            n += 1;
        }
        self.add_live(back.drift);
        n
    }

    /// Brings everything in the thread caches back to the heap.
    pub(crate) fn flush(&self) {
        self.give_back_held(self.caches.flush(false));
    }

    /// The keeper is gone: from now on rows that come back count down.
    pub(crate) fn orphan(&self) {
        self.give_back_held(self.caches.flush(true));
        let mut core = self.core.lock();
        core.orphan = true;
        if !planted(Defect::OrphanUncounted) {
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
        let mut over = !core.deferred.any();
        core.store.slabs.pending(|_, s| over &= s.has_passed());
        self.each_aside(core.retired, |row| over &= row.buffer.open() == Open::Over);
        over && core.store.heap.is_over()
    }
}
