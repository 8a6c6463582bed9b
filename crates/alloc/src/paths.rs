//! How blocks come and go: towards a block, and back.
//!
//! | towards a block | |
//! |---|---|
//! | [`Inner::alloc`] | a hit in the thread cache, for a small block |
//! | [`Inner::alloc_small`], [`Inner::alloc_large`] | the rest of the thread cache, and the depot |
//! | [`Inner::alloc_in_core`] (`blocks.rs`) | the heap, under its lock |
//! | [`Inner::alloc_slow`] | the out-of-memory fallback ([`fallback`](crate::fallback)) |
//!
//! - [`last`]: a hit in the thread cache, for a small block.
//! - [`Inner::free`]: what kind of block it is; the thread cache for a large one.
//! - [`Inner::return_evicted`] (`rows.rs`): the heap, under its lock.
//! - [`Inner::free_shared_slow`] (`rows.rs`): a block that several timelines may still be using: a
//!   deferred free ([`deferred`](crate::table)).

use crate::buffer::{
    ARENA, Buffer, CHECKED, CLASSLESS, EMPTY, FOREIGN, GROWING, IMPORTED, READ_ONLY, Row,
    home_timeline,
};
use crate::destroy::release;
use crate::layout::{Layout, MIN_ALIGN, SLAB_MAX, class_of};
use crate::state::{Inner, inner_of};
use crate::store::Need;
use crate::stream::On;
use crate::table::List;
use crate::thread_cache::{Evicted, Refill};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::thread_number::{thread_number, thread_number_there};
use leasehold_core::{Header, Lease, Result};
use std::ptr::NonNull;

/// Flags of rows that no bin keeps.
const UNKEPT: u32 = IMPORTED | ARENA | EMPTY | GROWING | READ_ONLY | CHECKED | FOREIGN | CLASSLESS;

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
            && inner.caches.put(
                thread_number_there(),
                row,
                class,
                home_timeline(flags),
                buffer.len(),
            )
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
                row.buffer.set_len(layout.size);
                Ok(row.first_lease())
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
            return if self.checks.is_on() {
                self.checks.alloc(self, layout, on)
            } else {
                self.alloc_in_core(need, layout, on, Evicted::NOTHING)
            };
        }
        // SAFETY: the table lives as long as the allocator, and rows in its caches are rows of it.
        let (evicted, more) =
            match unsafe { self.caches.refill(thread_number(), class, on.timeline.id(), size) } {
                Refill::Row(row, evicted) => {
                    row.buffer.set_len(size);
                    let lease = row.first_lease();
                    self.return_evicted_held(evicted);
                    return Ok(lease);
                }
                Refill::Empty(more, evicted) => (evicted, more),
            };
        if more == 0 {
            self.alloc_in_core(need, layout, on, evicted)
        } else {
            self.alloc_some(need, layout, on, evicted, more)
        }
    }

    /// A block whose alignment is no ordinary one.
    #[cold]
    #[inline(never)]
    fn alloc_aligned(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let layout = layout.check()?;
        match layout.size {
            0 => {
                let row = self.table.take(&mut self.core.lock().vacant)?;
                self.table.fill_special(row, (0, 0), 0, Some(on.timeline), EMPTY);
                Ok(row.first_lease())
            }
            _ if self.checks.is_on() => self.checks.alloc(self, layout, on),
            _ => self.alloc_block(layout, on),
        }
    }

    /// Any other block.
    #[inline(never)]
    fn alloc_large(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        let (layout, mut evicted) = (Layout::new(size), Evicted::NOTHING);
        if size == 0 || self.checks.is_on() {
            return self.alloc_aligned(layout, on);
        }
        if self.caches.keeps(size) {
            // SAFETY: the table lives as long as the allocator, and rows in its caches are rows of
            // it.
            match unsafe { self.caches.take_large(thread_number_there(), on.timeline.id(), size) } {
                Ok((row, ahead)) => {
                    if self.live.may_be_peak(ahead) {
                        self.note_peak();
                    }
                    row.buffer.set_len(size);
                    return Ok(row.first_lease());
                }
                Err(first) => evicted = first,
            }
        }
        match Need::exact(size, 1) {
            Some(need) => self.alloc_in_core(need, layout, on, evicted),
            None => Err(self.refuse(layout)),
        }
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
        evicted: Evicted,
        more: u32,
    ) -> Result<Lease<Buffer>> {
        let class = class_of(layout.size);
        let first = self.alloc_in_core(need, layout, on, evicted)?;
        let mut rows = List::EMPTY;
        {
            let mut core = self.lock_core();
            for _ in 0..more {
                let Ok(row) = self.table.take(&mut core.vacant) else { break };
                let Some(block) = core.store.slabs.take(class, on.timeline.id()) else {
                    self.table.put_bumped(&mut core.vacant, row);
                    break;
                };
                self.table.fill(row, block, layout.size, on.timeline);
                rows.push(row);
            }
        }
        // SAFETY: the table lives as long as the allocator, and its caches with it.
        unsafe { self.caches.stock(thread_number(), &mut rows, class, on.timeline.id()) };
        self.return_evicted_held(Evicted { rows, unreported: 0 });
        Ok(first)
    }

    /// Takes a row back that nobody holds. `renewed`: its generation has ended, and whether there
    /// is another one. Returns the counts that the caller owes to an orphaned allocator.
    fn free(&self, row: &Row, renewed: Option<bool>) -> u64 {
        let buffer = &row.buffer;
        let flags = buffer.flags();
        if flags & (IMPORTED | ARENA | EMPTY | GROWING | CHECKED | READ_ONLY) != 0 {
            if flags & READ_ONLY != 0 {
                buffer.set_flag(READ_ONLY, false);
                return self.free(row, renewed);
            }
            return match flags & CHECKED {
                0 => u64::from(self.free_special(row, flags)),
                _ => self.checks.free(self, row),
            };
        }
        let len = buffer.len();
        if flags & FOREIGN != 0 {
            if !buffer.is_private() {
                return self.free_shared_slow(row);
            }
            buffer.set_flag(FOREIGN, false);
        }
        let fine = renewed.unwrap_or_else(|| self.table.bump_generation(row));
        if fine {
            // A block in a cache is lent again as it is, but for the tag.
            let evicted = if flags & CLASSLESS == 0 {
                buffer.untag();
                let class = usize::from(buffer.class.load(Ordering::Relaxed));
                self.caches.put_slow(thread_number(), row, class, home_timeline(flags), len)
            } else if self.caches.keeps(len) {
                buffer.untag();
                self.caches.put_large(thread_number(), row, home_timeline(flags), len)
            } else {
                None
            };
            if let Some(evicted) = evicted {
                return self.return_evicted(evicted);
            }
        }
        let mut core = self.lock_core();
        core.store.free(row.placement(), buffer.own_timepoint());
        self.add_live(-(len as i64));
        core.vacant.live -= 1;
        if fine {
            core.vacant.link(row);
        }
        u64::from(core.orphan)
    }
}
