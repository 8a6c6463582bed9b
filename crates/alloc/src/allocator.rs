//! The allocator: the store under a lock, the backing, and the leases on the rows of its block table.
//!
//! # Protocol
//! - Small blocks that were just freed lie in magazines in front of the lock ([`front`](crate::front)). Where it goes from thread to thread
//!   nevertheless, larger blocks lie in annexes with locks of their own, which are taken before this one ([`annex`](crate::annex)).
//! - The lock guards the store, the list of vacant rows and the retire list. It is never held across a call of the backing, of a
//!   timeline, of a reclaimer or of a foreign destructor.
//! - A free runs in the drop of the last lease: [`last`]. It makes no driver call, waits for nothing but the lock, and works on any thread.
//! - A block does not count its allocator. `refs` counts the allocator's keeper, weak leases and, once the keeper is gone, the rows that
//!   were out at that time. Whoever takes it to zero destroys the whole; memory that a stream may still be using is not given to the
//!   driver then, but put aside until it is over ([`grave`](crate::grave)).

use crate::annex::Annexes;
use crate::backing::{Backing, BackingCaps};
use crate::bias::{BiasedLock, Guard};
use crate::budget::Budget;
use crate::buffer::{
    ARENA, Buffer, CLASSLESS, EMPTY, FOREIGN, HostKind, IMPORTED, NO_CLASS, NO_SLOT, Open, REGION, Row, WATCHED,
    home_line,
};
use crate::config::{AllocStats, AllocatorConfig, Policy};
use crate::fence::{Fences, thread_number, thread_number_there};
use crate::front::{Chain, Front, Pocket, Put, Took};
use crate::heap::{STRIDE, passed};
use crate::imports::Keep;
use crate::layout::{Layout, MIN_ALIGN, SLAB_MAX, UNIT, class_of};
use crate::mutant::mutated;
use crate::parked::Parked;
use crate::stats::Counters;
use crate::store::{Block, Need, Spot, Store};
use crate::table::{Table, Vacant};
use crate::watch::Watch;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, CachePadded, Mutex, OnceLock};
use leasehold_core::{BufferHandle, Error, Header, Lease, Line, Miss, Owner, OwnerOps, Point, Result, Stamp, Timeline};
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

/// The stream that asks. A hit touches only the line; the timeline is for the slow path.
#[derive(Clone, Copy)]
pub struct On<'a> {
    /// The stream's line.
    pub line: &'static Line,
    /// The stream's timeline.
    pub timeline: &'a dyn Timeline,
}

impl<'a> On<'a> {
    /// The stream of a timeline.
    pub fn new(timeline: &'a dyn Timeline) -> Self {
        Self { line: timeline.line(), timeline }
    }
}

/// Something that can free memory when there is none: a pool above, a cache.
///
/// It is called without any lock of the allocator and may free, not allocate. It returns how many bytes it freed, as far as it knows; zero
/// ends its turn. One that panics is not called again.
pub type Reclaimer = Box<dyn Fn(u64) -> u64 + Send + Sync>;

/// Blocks the host until a point is over, or for so long at most.
pub type PointWaiter = Arc<dyn Fn(Point, Option<Duration>) -> Result<()> + Send + Sync>;

/// What the lock guards.
pub(crate) struct Core {
    pub(crate) store: Store,
    pub(crate) vacant: Vacant,
    /// The keeper is gone; what comes back counts down `refs`.
    pub(crate) orphan: bool,
    /// What imported buffers keep alive, by row.
    pub(crate) keeps: Vec<Option<Keep>>,
    /// Rows whose blocks several lines may still be using.
    pub(crate) parked: Parked,
    /// Rows whose keeps wait for their last use to be over.
    pub(crate) retired: Parked,
    pub(crate) imported: u64,
    /// The rows of imported buffers.
    pub(crate) imports: Vec<u32>,
    pub(crate) imported_bytes: u64,
    pub(crate) allocations: u64,
    /// Episodes of moving granules so far.
    pub(crate) episodes: u64,
    /// The most bytes that were live, and after how many operations the slow path saw it.
    pub(crate) peak: (u64, u64),
    /// Times that the magazines of all threads were emptied rather than new memory taken.
    pub(crate) flushes: u64,
    /// Blocks that went to the core for that.
    pub(crate) flushed: u64,
}

/// Parked rows that one allocation looks at.
pub(crate) const PARKED_AT_ONCE: u32 = 4;

/// One allocator.
#[repr(C)]
pub(crate) struct Inner {
    /// First: a row's header points here.
    owner: Owner,
    refs: AtomicU64,
    pub(crate) table: Table,
    pub(crate) front: Front,
    pub(crate) annexes: Annexes,
    pub(crate) core: CachePadded<BiasedLock<Core>>,
    pub(crate) backing: Box<dyn Backing>,
    pub(crate) caps: BackingCaps,
    pub(crate) config: AllocatorConfig,
    pub(crate) budget: Budget,
    pub(crate) counters: Counters,
    pub(crate) reclaimers: Mutex<Vec<(i32, Arc<Reclaimer>)>>,
    pub(crate) retired: AtomicU32,
    /// Debug aids and the trace ring, where there are any.
    pub(crate) watch: Option<Box<Watch>>,
    /// The flags of ordinary rows.
    pub(crate) row_flags: u32,
    /// The addresses that were reserved, where there are any.
    pub(crate) reservation: Option<(u64, u64)>,
    /// The largest alignment that there is.
    most_align: u64,
    pub(crate) waiter: Mutex<Option<PointWaiter>>,
    /// The device is gone, and why: what needs the driver or a stream fails from then on.
    pub(crate) lost: OnceLock<Error>,
    /// The next of the allocators that are gone but for memory in use.
    pub(crate) next_grave: Option<Box<Inner>>,
}

static OPS: OwnerOps = OwnerOps { name: "buffer", last, weak };

/// The allocator of one kind of memory of one device. Clones are the same allocator.
///
/// Blocks do not count it: leases may outlive it, and the last one frees it all.
///
/// ```
/// use leasehold_alloc::*;
/// # use leasehold_core::*;
/// # struct Idle(LineOwner);
/// # impl Timeline for Idle {
/// #     fn line(&self) -> &'static Line { self.0.line() }
/// #     fn signal(&self) -> Result<u64> { Ok(0) }
/// #     fn refresh(&self) -> Result<u64> { Ok(0) }
/// #     fn wait(&self, _: Point) -> Result<()> { Ok(()) }
/// #     fn wait_host(&self, _: u64, _: Option<std::time::Duration>) -> Result<()> { Ok(()) }
/// # }
/// # let stream = Idle(LineOwner::take()?);
/// let allocator = Allocator::new(Box::new(FakeBacking::new(1 << 30)), AllocatorConfig::default())?;
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
#[doc(alias = "PinnableBlockAllocator")]
#[doc(alias = "DevicePinnedHostAllocator")]
pub struct Allocator(Arc<Keeper>);

struct Keeper(NonNull<Inner>);

// SAFETY: `Inner` is `Sync` by its parts (asserted below), and the keeper owns one count of it.
unsafe impl Send for Keeper {}
// SAFETY: as above.
unsafe impl Sync for Keeper {}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Table>();
    shared::<BiasedLock<Core>>();
    shared::<Allocator>();
};

impl Drop for Keeper {
    fn drop(&mut self) {
        // SAFETY: the keeper's count keeps the allocator alive up to `release`.
        unsafe {
            self.0.as_ref().orphan();
            release(self.0, 1);
        }
    }
}

/// # Safety
/// - The caller owns `n` counts of the allocator and gives them up.
unsafe fn release(inner: NonNull<Inner>, n: u64) {
    // SAFETY: the caller's counts keep it alive up to this subtraction.
    if unsafe { (*inner.as_ptr()).refs.fetch_sub(n, Ordering::AcqRel) } == n {
        // SAFETY: the count is zero: no keeper, no weak lease, no row is out. It was made from a box.
        crate::grave::bury(unsafe { Box::from_raw(inner.as_ptr()) });
    }
}

/// The drop of the last lease of a row.
unsafe fn last(hdr: NonNull<Header>) {
    // SAFETY: the header is the first field of a row of our table, which is alive as long as one of its rows is out.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: as above.
    match unsafe { inner.as_ref() }.free_own(row) {
        Freed::Done => {}
        // SAFETY: the caller's.
        how => unsafe { last_other(hdr, how) },
    }
}

/// What the fast way of a free came to.
#[derive(Clone, Copy)]
enum Freed {
    Done,
    /// Nothing was done.
    No,
    /// The row has its next generation.
    Renewed,
    /// The row's generations are used up.
    Gone,
}

/// # Safety
/// - As [`last`].
#[inline(never)]
unsafe fn last_other(hdr: NonNull<Header>, how: Freed) {
    // SAFETY: as in `last`.
    let (row, inner) = unsafe { (hdr.cast::<Row>().as_ref(), inner_of(hdr)) };
    // SAFETY: as above.
    let owed = unsafe { inner.as_ref() }.free(row, how);
    if owed > 0 {
        // SAFETY: an orphan counts the rows that are out; these came back.
        unsafe { release(inner, owed) };
    }
}

unsafe fn weak(hdr: NonNull<Header>, by: i32) {
    // SAFETY: the caller's lease or weak lease keeps the allocator alive.
    let inner = unsafe { inner_of(hdr) };
    if by > 0 {
        // SAFETY: as above.
        unsafe { inner.as_ref() }.refs.fetch_add(by.unsigned_abs().into(), Ordering::Relaxed);
    } else {
        // SAFETY: the weak lease gives its count up.
        unsafe { release(inner, by.unsigned_abs().into()) };
    }
}

/// # Safety
/// - The header belongs to a row of an allocator that is alive.
#[inline]
unsafe fn inner_of(hdr: NonNull<Header>) -> NonNull<Inner> {
    // SAFETY: rows are made with a pointer to the whole of `Inner`, whose first field is the owner.
    unsafe { NonNull::new_unchecked((*hdr.as_ptr()).owner().cast_mut().cast::<Inner>()) }
}

impl Allocator {
    /// An allocator over `backing`. Makes at most one driver call (the reservation of addresses).
    ///
    /// # Errors
    /// `InvalidArgument` for a granule that is no power of two of at least 512 bytes; `OutOfMemory` for host memory. A reservation
    /// that fails is no error: a smaller one is tried, then the allocator works with whole segments.
    pub fn new(backing: Box<dyn Backing>, config: AllocatorConfig) -> Result<Allocator> {
        crate::grave::sweep();
        let caps = backing.caps();
        if !caps.granule.is_power_of_two() || caps.granule < UNIT {
            return Err(Error::invalid(format!(
                "granule of {} bytes: want a power of two of at least 512",
                caps.granule
            )));
        }
        let watch = Watch::new(&config, &*backing)?;
        let backing = match &watch {
            Some(watch) => watch.wrap(backing),
            None => backing,
        };
        let mut store = Store::new(caps.granule);
        let (mut reservation, mut most_align) = (None, caps.granule.max(STRIDE));
        if caps.vmm && caps.reserve && !config.debug.direct() {
            // Four times the physical memory, so that placement never fails for want of contiguous addresses.
            let most = 1u64 << 40;
            for times in [4, 2, 1] {
                let bytes = caps.physical.saturating_mul(times).min(most).next_multiple_of(caps.granule);
                if bytes == 0 {
                    break;
                }
                // The part that is used begins where large alignments hold.
                let align = (bytes / 4).clamp(caps.granule, 1 << 30);
                let align = 1 << align.ilog2();
                let all = if align > caps.granule { bytes + align } else { bytes };
                if let Ok(base) = backing.reserve(all) {
                    if let Err(e) = store.heap.add_span(base.next_multiple_of(align), bytes, 0, true) {
                        backing.release(base, all);
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
        let annexes = match watch {
            None => Annexes::new(&config, threads, caps.physical.min(limit), caps.granule),
            Some(_) => Annexes::none(),
        };
        // What lies in a magazine keeps the slab run or the granule around it from being empty.
        let fit = config.magazines && config.policy != Policy::Compact;
        let front = if fit && watch.is_none() {
            // All shards together hold back a small part of the memory at most, and give it up before any is taken from the driver.
            let most = caps.physical.min(config.budget) / 64 / (threads as u64 * 2).clamp(4, 64);
            const FEW: u64 = 1 << 20;
            let [small, large, depot] = [
                config.magazine_bytes.min(most.max(FEW)),
                config.magazine_large_bytes.min(most),
                config.depot_bytes.min(most),
            ];
            Front::new(threads, small, large, depot)
        } else {
            Front::none()
        };
        let core = Core {
            store,
            vacant: Vacant::new(),
            orphan: false,
            keeps: Vec::new(),
            parked: Parked::NONE,
            retired: Parked::NONE,
            imported: 0,
            imports: Vec::new(),
            imported_bytes: 0,
            allocations: 0,
            episodes: 0,
            peak: (0, 0),
            flushes: 0,
            flushed: 0,
        };
        // Without magazines no block is of a class of theirs.
        let classless = if front.is_none() { CLASSLESS } else { 0 };
        let row_flags = kind_bits(config.host_kind) | classless | if watch.is_some() { WATCHED } else { 0 };
        let inner = Box::new(Inner {
            owner: Owner { ops: &OPS },
            refs: AtomicU64::new(1),
            table: Table::new(),
            front,
            annexes,
            core: CachePadded::new(BiasedLock::new(core, Fences::detect())),
            backing,
            caps,
            config,
            budget: Budget::new(limit),
            counters: Counters::default(),
            reclaimers: Mutex::new(Vec::new()),
            retired: AtomicU32::new(0),
            row_flags,
            reservation,
            most_align,
            watch,
            waiter: Mutex::new(None),
            lost: OnceLock::new(),
            next_grave: None,
        });
        // SAFETY: a box is never null.
        Ok(Allocator(Arc::new(Keeper(unsafe { NonNull::new_unchecked(Box::into_raw(inner)) }))))
    }

    #[inline]
    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: the keeper's count keeps it alive.
        unsafe { self.0.0.as_ref() }
    }

    /// What the backing can do.
    pub fn caps(&self) -> BackingCaps {
        self.inner().caps
    }

    /// The settings that the allocator was made with; the budget as it was then.
    pub fn config(&self) -> &AllocatorConfig {
        &self.inner().config
    }

    /// A buffer of `layout` for the stream `on`. Zero bytes give a valid, empty buffer with a null address.
    ///
    /// The contents are unspecified. Ordinarily this is a hit: no driver call, no wait. Otherwise it climbs the ladder: memory that other
    /// streams are done with, new memory, memory that a wait makes ready, caches above, and only then an error.
    ///
    /// # Errors
    /// `InvalidArgument` for an alignment that is no power of two; `Unsupported` for one above 2 MiB, or a granule, or a quarter of the
    /// reserved addresses (up to 1 GiB), whichever is largest; `OverBudget` for a request larger than the budget; `OutOfMemory` with a
    /// report; `DeviceLost`. The allocator is usable after each of them.
    #[doc(alias = "allocateMemory")]
    #[inline]
    pub fn alloc(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        self.inner().alloc(layout, on)
    }

    /// A lease by handle: checks generation and count in one step.
    ///
    /// # Errors
    /// `StaleHandle` when nobody holds the buffer any more or the handle is another allocator's; `Occupied` while it is held exclusively.
    pub fn lease(&self, h: BufferHandle) -> Result<Lease<Buffer>> {
        let inner = self.inner();
        let Some(row) = inner.table.get(h.index()) else { return Err(Error::stale("buffer", h)) };
        loop {
            match row.header.try_acquire(h.generation()) {
                // SAFETY: the count that was just taken is the lease's; the value lies in the header's row.
                Ok(()) => return Ok(unsafe { Lease::from_raw(inner.header_ptr(row), NonNull::from(&row.buffer)) }),
                Err(Miss::Stale) => return Err(Error::stale("buffer", h)),
                Err(Miss::Occupied) => return Err(Error::Occupied { resource: "buffer" }),
                Err(Miss::Frozen) => leasehold_core::sync::thread::yield_now(),
            }
        }
    }

    /// Whether the handle's buffer was held at this load.
    #[inline]
    pub fn is_alive(&self, h: BufferHandle) -> bool {
        self.inner().table.get(h.index()).is_some_and(|r| r.header.is_alive(h.generation()))
    }

    /// Gives free memory back to the driver until at most `keep` bytes lie free; returns the bytes that went. Memory whose last use may
    /// go on stays. Blocks on the driver.
    ///
    /// # Errors
    /// `DeviceLost` and the driver's; what had gone by then is gone.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.inner().trim(keep)
    }

    /// The state in numbers. Takes the lock for a moment.
    pub fn stats(&self) -> AllocStats {
        self.inner().stats()
    }

    /// Begins new peaks from what is live and reserved now.
    pub fn reset_peaks(&self) {
        let inner = self.inner();
        inner.budget.reset_peak();
        inner.counters.live_peak.store(inner.live_bytes(), Ordering::Relaxed);
    }

    /// Brings everything whose last use is over to where every stream can take it, and drops what imports kept for such uses. Makes no
    /// driver call.
    pub fn drain(&self) {
        let inner = self.inner();
        inner.flush();
        inner.settle_annexes();
        inner.settle(&mut inner.core.lock());
        inner.sweep_retired();
        crate::grave::sweep();
    }

    /// The most bytes to take from the driver from now on. Lowering it below what is taken stops growth; `trim` gives back.
    pub fn set_budget(&self, bytes: u64) {
        self.inner().budget.set_limit(bytes);
    }

    /// How the host waits for a point of any stream of this device. Without it an allocation that must wait for another stream relies on
    /// that stream's completion being published by itself.
    pub fn set_waiter(&self, waiter: PointWaiter) {
        *self.inner().waiter.lock() = Some(waiter);
    }

    /// Registers something that can free memory when there is none; lower `priority` first.
    pub fn add_reclaimer(&self, priority: i32, reclaimer: Reclaimer) {
        let mut list = self.inner().reclaimers.lock();
        list.push((priority, Arc::new(reclaimer)));
        list.sort_by_key(|r| r.0);
    }

    /// Whether this allocator lent the buffer.
    #[inline]
    pub fn owns(&self, buffer: &Lease<Buffer>) -> bool {
        std::ptr::eq(buffer.header().owner(), self.inner().owner_ptr())
    }

    /// Whether two allocators are the same one.
    pub fn same(&self, other: &Allocator) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Checks every invariant of the allocator's tables. For tests and debugging; walks everything under the lock.
    ///
    /// # Errors
    /// What is wrong, in words.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        self.inner().check()
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.stats();
        write!(f, "Allocator({}, {} live, {} reserved)", self.inner().config.name, s.live_bytes, s.reserved)
    }
}

pub(crate) fn kind_bits(kind: HostKind) -> u32 {
    match kind {
        HostKind::None => 0,
        HostKind::Pinned => 1,
        HostKind::Pageable => 2,
    }
}

impl Inner {
    #[inline]
    pub(crate) fn owner_ptr(&self) -> *const Owner {
        // The whole of `Inner`, not the field: `last` reaches the rest through it.
        std::ptr::from_ref(self).cast()
    }

    #[inline]
    fn header_ptr(&self, row: &Row) -> NonNull<Header> {
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
    fn alloc(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
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
        self.alloc_large(layout.size, on)
    }

    /// A small block that does not lie in a magazine of the thread's own.
    #[inline(never)]
    fn alloc_small(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
        self.alloc_other::<true>(Layout::new(size), on)
    }

    /// Any other block of the ordinary alignment.
    #[inline(never)]
    fn alloc_large(&self, size: u64, on: On<'_>) -> Result<Lease<Buffer>> {
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
        if self.front.is_none() {
        } else if SMALL {
            let pocket = Pocket::small(class_of(layout.size));
            // SAFETY: the table lives as long as the allocator, and rows in its magazines are rows of it.
            let took = unsafe { self.front.take::<false>(thread_number(), pocket, on.line.id(), layout.size) };
            match took {
                Took::Row(row, _) => {
                    row.buffer.relend(layout.size);
                    return Ok(self.lend(row));
                }
                Took::Empty(more) => return self.alloc_some_slow(layout, on, more),
                Took::Nothing(_) => {}
            }
        } else if self.front.keeps(layout.size) && layout.align <= MIN_ALIGN {
            let pocket = Pocket::large(layout.size);
            // SAFETY: as above.
            match unsafe { self.front.take::<true>(thread_number(), pocket, on.line.id(), layout.size) } {
                Took::Row(row, ahead) => {
                    self.counters.note_live(self.counters.live().wrapping_add_signed(ahead));
                    row.buffer.relend(layout.size);
                    return Ok(self.lend(row));
                }
                Took::Nothing(chain) if !chain.is_empty() => {
                    self.take_back(chain, 0);
                }
                Took::Nothing(_) | Took::Empty(_) => {}
            }
        }
        if let Some(watch) = &self.watch {
            return self.alloc_watched(watch, layout, on);
        }
        if SMALL {
            let need = Need { units: 0, align: 1, class: Some(class_of(layout.size) as u16) };
            return self.alloc_needed(need, layout, on);
        }
        // (The ordinary one is no question.)
        match Need::exact(layout.size, layout.align)
            .filter(|_| layout.align <= MIN_ALIGN || layout.align <= self.most_align)
        {
            Some(need) => self.alloc_needed(need, layout, on),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block that no magazine has.
    pub(crate) fn alloc_block(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        match Need::of(layout.size, layout.align).filter(|_| layout.align <= self.most_align) {
            Some(need) => self.alloc_needed(need, layout, on),
            None => Err(self.refuse(layout)),
        }
    }

    #[inline(always)]
    fn alloc_needed(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        if self.annexes.are_open()
            && let Some(lease) = self.alloc_annexed(need, layout.size, on)
        {
            return Ok(lease);
        }
        self.alloc_in_core(need, layout, on)
    }

    /// A block of the core, whose place in it never changes.
    #[inline(always)]
    pub(crate) fn alloc_in_core(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        {
            let me = thread_number();
            let mut core = self.core.lock_as(me);
            self.notice_contention(&core);
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
            let mut core = self.core.lock_as(me);
            self.notice_contention(&core);
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
        let apart = self.annexes.are_open() && layout.size > SLAB_MAX;
        match Need::of(layout.size, layout.align).filter(|_| apart && layout.align <= self.most_align) {
            Some(need) => self.alloc_in_core(need, layout.check()?, on),
            None => self.alloc(layout, on),
        }
    }

    /// Where the lock goes from thread to thread, large blocks are kept in front of it too.
    #[inline]
    fn notice_contention(&self, core: &Guard<'_, Core>) {
        if !core.is_own() {
            // (Not the guard itself, which would have to lie in memory for that.)
            self.notice_contention_slow(core.is_contended(), core.has_waited(), core.store.heap.tick);
        }
    }

    #[cold]
    #[inline(never)]
    fn notice_contention_slow(&self, contended: bool, waited: bool, tick: u64) {
        if contended {
            self.front.encourage(thread_number());
        }
        if waited {
            self.warm(thread_number(), tick);
        }
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
        row.buffer.describe(block.addr, block.native, size, Some(line), flags);
        row.buffer.inherit(block.stamp);
        Ok(row)
    }

    #[cold]
    fn empty(&self, on: On<'_>) -> Result<Lease<Buffer>> {
        let mut core = self.core.lock();
        let row = self.table.take(&mut core.vacant, self.owner_ptr())?;
        row.buffer.describe(0, 0, 0, Some(on.line), EMPTY | kind_bits(self.config.host_kind));
        row.buffer.inherit(Stamp::NEVER);
        Ok(self.lend(row))
    }

    /// Takes a row back that nobody holds, if it goes into a magazine of the thread's own without more ado.
    #[inline(always)]
    fn free_own(&self, row: &Row) -> Freed {
        let buffer = &row.buffer;
        let flags = buffer.flags();
        if flags & (IMPORTED | ARENA | EMPTY | WATCHED | FOREIGN | CLASSLESS) != 0 || buffer.tag() != 0 {
            return Freed::No;
        }
        let (len, class) = (buffer.len(), buffer.class.load(Ordering::Relaxed));
        if !self.table.renew(row) {
            return Freed::Gone;
        }
        let fine = self.front.put_own(thread_number_there(), row, usize::from(class), home_line(flags), len);
        if fine { Freed::Done } else { Freed::Renewed }
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
        let gone = match how {
            Freed::Gone => true,
            Freed::No => !self.table.renew(row),
            Freed::Renewed | Freed::Done => false,
        };
        if gone {
            return self.free_annexed(row, buffer.own_stamp(), len, true);
        }
        // What lies in a magazine is lent again as it is, but for the tag.
        let put = if flags & CLASSLESS == 0 {
            buffer.untag();
            let pocket = Pocket::small(usize::from(buffer.class.load(Ordering::Relaxed)));
            self.front.put::<false>(thread_number(), row, pocket, home_line(flags), len)
        } else if row.annex().is_some() {
            return self.free_annexed(row, buffer.own_stamp(), len, false);
        } else if self.front.keeps(len) && flags & REGION == 0 {
            buffer.untag();
            self.front.put::<true>(thread_number(), row, Pocket::large(len), home_line(flags), len)
        } else {
            Put::Refused
        };
        if let Put::Kept(chain, drift) = put {
            return if chain.is_empty() && drift == 0 { 0 } else { self.receive(chain, drift) };
        }
        let stamp = buffer.own_stamp();
        let mut core = self.core.lock();
        core.store.give(row.spot(), stamp);
        self.counters.end_live(len);
        self.table.put_renewed(&mut core.vacant, row);
        self.notice_contention(&core);
        u64::from(core.orphan)
    }

    /// The row's generations are used up (`gone`), so it is not used again; or its block was in an annex before.
    #[cold]
    pub(crate) fn free_in_core(&self, row: &Row, stamp: Stamp, len: u64, gone: bool) -> u64 {
        let mut core = self.core.lock();
        core.store.give(row.spot(), stamp);
        self.counters.add_live(-(len as i64));
        if gone {
            core.vacant.live -= 1;
        } else {
            self.table.put_renewed(&mut core.vacant, row);
        }
        u64::from(core.orphan)
    }

    /// Frees a block that other lines than its home may have used. Takes no host memory: while several lines may still be using the
    /// block, its row stays out of circulation and so remembers which.
    #[cold]
    pub(crate) fn free_shared_slow(&self, row: &Row) -> u64 {
        if let Some(owed) = self.free_annexed_shared(row) {
            return owed;
        }
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

    /// Takes rows from the magazines into the core, and what they know about live bytes.
    #[cold]
    fn receive(&self, mut chain: Chain, drift: i64) -> u64 {
        if chain.is_empty() {
            self.counters.tell(drift);
            return 0;
        }
        let mut n = 0;
        let mut core = self.core.lock();
        // SAFETY: the table lives as long as `self`, and the chain's rows are rows of it.
        while let Some(row) = unsafe { chain.pop() } {
            core.store.give(row.spot(), row.buffer.own_stamp());
            self.table.put_renewed(&mut core.vacant, row);
            n += 1;
        }
        self.counters.add_live(drift);
        if core.orphan { n } else { 0 }
    }

    /// Brings everything in the magazines back to the core.
    pub(crate) fn flush(&self) {
        let (chain, drift) = self.front.flush(false);
        self.take_back(chain, drift);
    }

    /// Takes rows from the magazines into the core, for who holds the allocator: nobody is owed anything then.
    pub(crate) fn take_back(&self, chain: Chain, drift: i64) {
        let owed = self.receive(chain, drift);
        debug_assert_eq!(owed, 0);
    }

    /// The keeper is gone: from now on rows that come back count down.
    fn orphan(&self) {
        let (chain, drift) = self.front.flush(true);
        let owed = self.receive(chain, drift);
        debug_assert_eq!(owed, 0);
        self.orphan_annexes(|out| _ = self.refs.fetch_add(out, Ordering::Relaxed));
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
        let annexes = self.annexes_are_over();
        let mut core = self.core.lock();
        self.settle(&mut core);
        let mut over = annexes && !core.parked.any();
        core.store.slabs.pending(|_, s| over &= passed(s));
        self.each_aside(core.retired, |row| over &= row.buffer.open() == Open::Over);
        over && core.store.heap.is_over()
    }
}

/// Every use of a buffer that may still go on.
pub(crate) fn uses(buffer: &Buffer) -> Vec<Stamp> {
    let mut stamps = Vec::new();
    buffer.for_each_use(|s| {
        if !passed(s) {
            stamps.push(s);
        }
    });
    stamps
}

impl Drop for Inner {
    /// Gives everything back to the driver. Nobody holds a row, and every stream is done with the memory.
    fn drop(&mut self) {
        crate::ladder::tear_down(self);
    }
}
