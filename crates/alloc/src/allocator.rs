//! The allocator: the store under a lock, the backing, and the leases on the rows of its block
//! table.
//!
//! # Protocol
//! - Blocks that were just freed lie in thread caches in front of the lock
//!   ([`thread_cache`](crate::thread_cache)).
//! - A free runs in the drop of the last lease: [`last`](crate::paths::last). It makes no driver
//!   call, waits for nothing but the lock, and works on any thread.
//! - A block does not count its allocator. `refs` counts the allocator's keeper, weak leases and,
//!   once the keeper is gone, the rows that were out at that time. The thread that takes `refs` to
//!   zero destroys the whole. Memory that a stream may still be using is not given to the driver
//!   then, but put aside until it is over ([`destroy`](crate::destroy)).

use crate::backing::{Backing, BackingCaps};
use crate::budget::Budget;
use crate::buffer::{Buffer, CHECKED, CLASSLESS, Row};
use crate::checks::{DebugChecks, SweepScope};
use crate::config::{AllocStats, AllocatorConfig, Policy};
use crate::core::Core;
use crate::core::ask_external;
use crate::debug::Finding;
use crate::destroy::{orphan, release, sweep};
use crate::heap::STRIDE;
use crate::imports::Protection;
use crate::layout::{Layout, UNIT, UNIT_SHIFT};
use crate::live::Live;
use crate::lock::Lock;
use crate::paths::last;
use crate::reclaimers::{Reclaimer, Reclaimers};
use crate::state::{Inner, inner_of};
use crate::store::Store;
use crate::stream::On;
use crate::supply::{Counter, Supply};
use crate::table::Table;
use crate::thread_cache::ThreadCaches;
use crate::trace::Ring;
use crate::trim::trim;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, CachePadded};
use leasehold_core::{
    AcquireError, BufferHandle, Error, Header, Lease, Owner, OwnerOps, Result, TryOnceLock,
    UniqueLease,
};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

static OPS: OwnerOps = OwnerOps { name: "buffer", last, weak };

/// The allocator of one kind of memory of one device. Clones are the same allocator.
///
/// Blocks do not count it: leases may outlive it, and the last one frees it all.
///
/// ```
/// use leasehold_alloc::*;
/// use leasehold_sim::memory::FakeBacking;
/// # use leasehold_core::*;
/// # struct Idle(TimelineOwner);
/// # // SAFETY: nothing is ever submitted to it.
/// # unsafe impl TimelineSource for Idle {
/// #     fn timeline(&self) -> &'static Timeline { self.0.timeline() }
/// #     fn signal(&self) -> Result<u64> { Ok(0) }
/// #     fn refresh(&self) -> Result<u64> { Ok(0) }
/// #     fn wait(&self, _: Timepoint) -> Result<()> { Ok(()) }
/// #     fn wait_host(&self, _: u64, _: Option<std::time::Duration>) -> Result<()> { Ok(()) }
/// # }
/// # let stream = Idle(TimelineOwner::take()?);
/// let fake = Box::new(FakeBacking::new(1 << 30));
/// let allocator = Allocator::new(fake, AllocatorConfig::default())?;
/// let buffer = allocator.alloc(Layout::new(1000), On::new(&stream))?;
/// assert_eq!(buffer.len(), 1000);
/// assert_eq!(buffer.addr() % 256, 0);
/// let handle = buffer.handle();
/// drop(buffer); // no driver call, on any thread
/// assert!(!allocator.is_alive(handle));
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "MemoryAllocator")]
#[derive(Clone)]
#[doc(alias("PinnableBlockAllocator", "DevicePinnedHostAllocator"))]
pub struct Allocator(Arc<Keeper>);

/// An allocator that is made at its first use.
pub type AllocatorCell = TryOnceLock<Allocator>;

struct Keeper(NonNull<Inner>);

// SAFETY: `Inner` is `Sync` by its parts (asserted below), and the keeper owns one count of it.
unsafe impl Send for Keeper {}
// SAFETY: a shared keeper gives `&Inner`, which is `Sync` by its parts (asserted below).
unsafe impl Sync for Keeper {}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Table>();
    shared::<Lock<Core>>();
    shared::<Allocator>();
};

impl Drop for Keeper {
    fn drop(&mut self) {
        // SAFETY: the keeper's count keeps the allocator alive up to `release`.
        unsafe {
            let inner = self.0.as_ref();
            orphan(inner);
            // The drop of a lease must ask neither the host nor the driver.
            ask_external(&inner.core, &inner.table);
            release(self.0, 1);
        }
    }
}

unsafe fn weak(hdr: NonNull<Header>, by: i32) {
    // SAFETY: the caller's lease or weak lease keeps the allocator alive.
    let inner = unsafe { inner_of(hdr) };
    if by > 0 {
        // SAFETY: alive, as the lease or weak lease that the caller has was counted.
        unsafe { inner.as_ref() }.refs.fetch_add(by.unsigned_abs().into(), Ordering::Relaxed);
    } else {
        // SAFETY: the weak lease gives its count up.
        unsafe { release(inner, by.unsigned_abs().into()) };
    }
}

impl Allocator {
    /// An allocator over `backing`. Makes at most one driver call (the reservation of addresses).
    ///
    /// # Errors
    /// `InvalidArgument` for a granule that is no power of two of at least 512 bytes; `OutOfMemory`
    /// for host memory. A reservation that fails is no error: a smaller one is tried, then the
    /// allocator works with whole segments.
    pub fn new(backing: Box<dyn Backing>, config: AllocatorConfig) -> Result<Allocator> {
        sweep();
        let caps @ BackingCaps { granule, .. } = backing.caps();
        if !granule.is_power_of_two() || granule < UNIT {
            let wanted = "want a power of two of at least 512";
            return Err(Error::invalid(format!("granule of {granule} bytes: {wanted}")));
        }
        let checks = DebugChecks::new(&config, &*backing)?;
        let trace = Ring::new(config.trace_events)?;
        let mut store = Store::new(caps.granule);
        let (mut reservation, mut most_align) = (None, caps.granule.max(STRIDE));
        if caps.vmm && caps.reserve && !config.debug.direct() {
            // Four times the physical memory, so that placement never fails for want of contiguous
            // addresses.
            let most = 1u64 << 40;
            for times in [4, 2, 1] {
                let bytes =
                    caps.physical.saturating_mul(times).min(most).next_multiple_of(caps.granule);
                if bytes == 0 {
                    break;
                }
                // The part that is used begins where large alignments hold.
                let align = (bytes / 4).clamp(caps.granule, 1 << 30);
                let align = 1 << align.ilog2();
                let all = if align > caps.granule { bytes + align } else { bytes };
                if let Ok(base) = backing.reserve(all) {
                    if let Err(e) =
                        store.heap.add_span(base.next_multiple_of(align), bytes, 0, true)
                    {
                        // SAFETY: reserved just above, and the heap took none of it.
                        unsafe { backing.release(base, all) };
                        return Err(e);
                    }
                    reservation = Some((base, all));
                    most_align = align.max(most_align);
                    break;
                }
            }
        }
        let limit = config.budget;
        let threads = std::thread::available_parallelism().map_or(4, usize::from);
        // A block in a thread cache keeps the slab run or the granule around it from being empty.
        let fit = config.thread_caches && config.policy != Policy::Compact;
        let caches = if fit && !checks.is_on() {
            // All shards together hold back a small part of the memory at most, and give it up
            // before any is taken from the driver.
            let most = caps.physical.min(limit) / 64 / (threads as u64 * 2).clamp(4, 64);
            let (small, large, depot) =
                (most.clamp(1 << 20, 16 << 20), most.min(32 << 20), most.min(64 << 20));
            ThreadCaches::new(threads, small, large, depot).within_budget(limit != u64::MAX)
        } else {
            ThreadCaches::none()
        };
        // Without thread caches no block is of a class of theirs.
        let flags = config.host_kind as u32
            | if caches.is_none() { CLASSLESS } else { 0 }
            | if checks.is_on() { CHECKED } else { 0 };
        let budget = Budget::within(config.shared_budget.clone(), limit);
        let inner = Box::into_raw(Box::new(Inner {
            owner: Owner { ops: &OPS },
            refs: AtomicU64::new(1),
            table: Table::new(flags),
            caches,
            core: CachePadded::new(Lock::new(Core::new(store))),
            supply: Supply::new(backing, budget, trace),
            config,
            live: Live::default(),
            in_graphs: AtomicU64::new(0),
            in_executables: Counter::default(),
            reclaimers: Reclaimers::default(),
            retired: AtomicU32::new(0),
            checks,
            reservation,
            most_align,
            next_deferred: None,
        }));
        // SAFETY: a box is never null.
        let inner = unsafe { NonNull::new_unchecked(inner) };
        // SAFETY: just made, and shared with nobody. The whole of it: `last` reaches the rest
        // through the owner.
        unsafe { inner.as_ref() }.table.set_owner(inner.as_ptr().cast());
        Ok(Allocator(Arc::new(Keeper(inner))))
    }

    #[inline]
    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: the keeper's count keeps it alive.
        unsafe { self.0.0.as_ref() }
    }

    /// The capabilities of the backing.
    pub fn caps(&self) -> BackingCaps {
        self.inner().supply.caps
    }

    /// The settings that the allocator was made with; the budget as it was then.
    pub fn config(&self) -> &AllocatorConfig {
        &self.inner().config
    }

    /// A buffer of `layout` for the stream `on`. Zero bytes give a valid, empty buffer with a null
    /// address.
    ///
    /// The contents are unspecified. Ordinarily this is a hit: no driver call, no wait. Otherwise
    /// the fallback tries: memory that other streams are done with, new memory, memory that a wait
    /// makes ready, caches above, and only then an error. A wait on the host is for what can help,
    /// and has a [limit](leasehold_core::TimelineSource::timeout).
    ///
    /// # Errors
    /// `InvalidArgument` for an alignment that is no power of two; `Unsupported` for one above 2
    /// MiB, or a granule, or a quarter of the reserved addresses (up to 1 GiB), whichever is
    /// largest; `OverBudget` for a request larger than the budget; `OutOfMemory` with a report;
    /// `DeviceLost`. The allocator is usable after each of them.
    #[doc(alias = "allocateMemory")]
    #[inline]
    pub fn alloc(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.inner().alloc(layout, on)
    }

    /// As [`alloc`](Self::alloc), with the sole lease: while it lives, no handle and no weak lease
    /// leads to the buffer. For memory that a library uses without asking its record.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); `Occupied` if a thread with a guessed handle came first.
    pub fn alloc_unique(&self, layout: Layout, on: On<'_>) -> Result<UniqueLease<Buffer>> {
        let lease = self.alloc(layout, on)?;
        lease.try_unique().map_err(|_| Error::Occupied { resource: "buffer" })
    }

    /// Somebody else's memory as a buffer: `bytes` at `addr`, spanned by the native object `native`
    /// (or 0). Counted as imported, not as reserved. `keep` is dropped once nobody holds the buffer
    /// and the last use that was recorded on it is over. If that is not yet so at the last drop, a
    /// later call drops it: an import, a trim, a drain, or an allocation that takes the slow path.
    /// The call is one of this allocator, or of any other once nobody holds this one.
    ///
    /// `keep` should lead neither to this allocator nor to a lease of one of its buffers. A runtime
    /// and a context lead to it. If everything else is dropped while work is pending, only `keep`
    /// holds the allocator, nobody can call it, and both leak.
    ///
    /// # Errors
    /// `InvalidArgument` for a range that wraps; `OutOfMemory` for host memory.
    ///
    /// # Safety
    /// - `[addr, addr + bytes)` is memory that this allocator's device (or the host) may access as
    ///   `protection` says, and stays so until `keep` is dropped.
    /// - Until then nobody writes it but through this buffer; with [`Protection::ReadWrite`] nobody
    ///   else reads it either.
    pub unsafe fn import(
        &self,
        addr: u64,
        bytes: u64,
        native: u64,
        protection: Protection,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Lease<Buffer>> {
        let first = Row::first_lease;
        // SAFETY: the caller's promise is this one.
        unsafe { self.inner().import((addr, native), bytes, protection, keep, first) }
    }

    /// As [`import`](Self::import), to be read and written, but no handle leads to the buffer: only
    /// clones of the lease. For memory that a library uses under another buffer's record.
    ///
    /// # Errors
    /// As [`import`](Self::import).
    ///
    /// # Safety
    /// - As [`import`](Self::import).
    pub unsafe fn import_unlisted(
        &self,
        addr: u64,
        bytes: u64,
        native: u64,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Lease<Buffer>> {
        let (place, both, unlisted) = ((addr, native), Protection::ReadWrite, Row::unlisted_lease);
        // SAFETY: the caller's promise is this one.
        unsafe { self.inner().import(place, bytes, both, keep, unlisted) }
    }

    /// A lease by handle: checks generation and count in one step.
    ///
    /// # Errors
    /// `StaleHandle` when nobody holds the buffer any more or the handle is another allocator's;
    /// `Occupied` while it is held exclusively.
    pub fn lease(&self, h: BufferHandle) -> Result<Lease<Buffer>> {
        let inner = self.inner();
        let Some(row) = inner.table.get(h.index()) else { return Err(Error::stale("buffer", h)) };
        loop {
            match row.header.try_acquire(h.generation()) {
                // SAFETY: the count that was just taken is the lease's.
                Ok(()) => return Ok(unsafe { row.counted_lease() }),
                Err(AcquireError::Stale) => return Err(Error::stale("buffer", h)),
                Err(AcquireError::Occupied) => return Err(Error::Occupied { resource: "buffer" }),
                Err(AcquireError::Frozen) => leasehold_core::sync::thread::yield_now(),
            }
        }
    }

    /// Whether the handle's buffer was held at this load.
    #[inline]
    pub fn is_alive(&self, h: BufferHandle) -> bool {
        self.inner().table.get(h.index()).is_some_and(|r| r.header.is_alive(h.generation()))
    }

    /// Gives free memory back to the driver until at most `keep` bytes lie free; returns the bytes
    /// that went. Memory whose last use may go on stays. Blocks on the driver.
    ///
    /// # Errors
    /// `DeviceLost` and the driver's; what had gone by then is gone.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let inner = self.inner();
        let (core, supply, table) = (&inner.core, &inner.supply, &inner.table);
        supply.check_lost()?;
        inner.flush();
        ask_external(core, table);
        inner.sweep_retired();
        inner.checks.sweep(core, supply, SweepScope::All);
        sweep();
        trim(core, supply, table, keep)
    }

    /// The wrong uses of memory that the debug checks found so far, the first 1,000 of them;
    /// [`AllocStats`] has their number. A block that is freed but still in use by a stream, or in
    /// the quarantine, is not yet decided; [`trim`](Self::trim) empties the quarantine.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let inner = self.inner();
        inner.checks.sweep(&inner.core, &inner.supply, SweepScope::Due);
        inner.checks.findings()
    }

    /// Notes the bytes that executables of graphs take now, for the reports. They are their
    /// manager's, and no memory of this allocator.
    pub fn note_executables(&self, bytes: u64) {
        self.inner().in_executables.set(bytes);
    }

    /// The state in numbers. Takes the lock for a moment.
    pub fn stats(&self) -> AllocStats {
        let inner = self.inner();
        let Inner { supply, caches, .. } = inner;
        let (held_back, findings) = inner.checks.numbers();
        let core = inner.core.lock();
        let (rows, kept, hits, _) = caches.stats();
        let (free_ready, free_not_ready) = core.free_bytes(&inner.table);
        let (heap, slabs) = (&core.store.heap, &core.store.slabs);
        let live = inner.live.bytes(caches);
        AllocStats {
            live: u64::from(core.vacant.live).saturating_sub(core.imported + rows),
            live_bytes: live,
            live_peak: inner.live.peak().max(live),
            reserved: supply.budget.reserved(),
            reserved_peak: supply.budget.peak(),
            imported: core.imported,
            imported_bytes: core.imported_bytes,
            free_ready,
            free_not_ready,
            free_in_slabs: slabs.bytes().1,
            free_in_thread_caches: kept,
            cached_pieces: heap.res.cached_bytes(),
            idle_in_growing: core.ranges.idle_bytes(),
            shared_in_growing: heap.res.shared,
            quarantined: heap.res.quarantined + supply.kept_by_driver.get(),
            held_back,
            findings,
            in_graphs: inner.in_graphs.load(Ordering::Relaxed),
            in_executables: inner.in_executables.get(),
            allocations: core.allocations + hits,
            thread_cache_hits: hits,
            growths: supply.growths.get(),
            remaps: supply.remaps.get(),
            host_waits: supply.host_waits.get(),
            inserted_waits: supply.inserted_waits.get(),
            failed: supply.failed.get(),
            retired: inner.retired.load(Ordering::Relaxed).into(),
            driver_calls: supply.backing.driver_calls(),
            metadata: heap.host_bytes()
                + slabs.host_bytes()
                + u64::from(inner.table.len()) * size_of::<Row>() as u64,
            limit: supply.budget.limit(),
        }
    }

    /// The largest free range that has memory, in bytes, whatever stream may still use it. A
    /// request of this size may need more: an alignment, or a wait. Walks the heap under the lock.
    pub fn largest_free(&self) -> u64 {
        u64::from(self.inner().core.lock().store.heap.largest_free()) << UNIT_SHIFT
    }

    /// Begins new peaks from what is live and reserved now.
    pub fn reset_peaks(&self) {
        let inner = self.inner();
        inner.supply.budget.reset_peak();
        inner.live.reset_peak(&inner.caches);
    }

    /// Brings everything whose last use is over to where every stream can take it, and drops what
    /// imports kept for such uses. Makes no driver call, but for memory that external streams used:
    /// their events are recorded and asked.
    pub fn drain(&self) {
        let inner = self.inner();
        inner.flush();
        ask_external(&inner.core, &inner.table);
        inner.core.lock().settle(&inner.table);
        inner.sweep_retired();
        sweep();
    }

    /// The most bytes to take from the driver from now on. Lowering it below what is taken stops
    /// growth; `trim` gives back.
    pub fn set_budget(&self, bytes: u64) {
        self.inner().supply.budget.set_limit(bytes);
    }

    /// Registers something that can free memory when there is none; lower `priority` first.
    pub fn add_reclaimer(&self, priority: i32, reclaimer: Reclaimer) {
        self.inner().reclaimers.add(priority, reclaimer);
    }

    /// Whether this allocator lent the buffer, and the lease shows that buffer: a lease that was
    /// mapped to another one does not.
    #[inline]
    pub fn owns(&self, buffer: &Lease<Buffer>) -> bool {
        let header = buffer.header();
        std::ptr::eq(header.owner(), self.inner().table.owner())
            && std::ptr::eq(Row::buffer_of(header), &raw const **buffer)
    }

    /// Whether two allocators are the same one.
    pub fn same(&self, other: &Allocator) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, s) = (&self.inner().config.name, self.stats());
        write!(f, "Allocator({name}, {} live, {} reserved)", s.live_bytes, s.reserved)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/cell.rs"]
mod tests;
