//! Slot pools: where resources and their control blocks live.
//!
//! # Protocol
//! Slots stand in chunks that double in size and never move. A slot is in exactly one place: held (somebody has a count),
//! in an *idle* list (payload present), in a thread *cell* (payload present), in the *vacant* list (no payload), or retired.
//!
//! A list is a word `orphan:1 | closing:1 | tag:38 | index:24`; the tag grows with every pop and push, so that a CAS on a list that
//! was popped and pushed meanwhile fails.
//!
//! | situation | why it is safe |
//! |---|---|
//! | pop reads `next` of a slot that another thread pops | the slot's memory is the pool's; the CAS fails by the tag |
//! | create runs without a lock | the slot is in no list; a guard returns it if create fails or panics |
//! | last drop while a shutdown counts | `closing` stops pops and pushes of idle slots; the dropper destroys its payload and pushes onto the vacant list, which always takes; a push that the count did not see counts as held |
//! | last drop after the pool's owner is gone | `orphan` was set by a CAS on each list; whoever pushes onto an orphaned list takes one off the remainder, the last frees |
//! | a thread's cell during shutdown | cells hold `CLOSED`; a CAS from empty fails, the slot goes to a list |
//!
//! Generations start at an offset of the pool's own, so a handle of another pool is refused. A slot that has used all its
//! generations is retired, its payload destroyed.
//!
//! This module must not know what a payload is.

use crate::error::{Error, OutOfMemory, Result};
use crate::handle::{Handle, Tagged};
use crate::lease::{Header, Lease, Miss, Owner, OwnerOps, UniqueLease};
use crate::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use crate::sync::{CachePadded, Mutex, UnsafeCell};
use std::fmt;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

/// The tag of a payload's kind.
pub type TagOf<R> = <<R as Resource>::Payload as Tagged>::Tag;

/// How a pool makes, reuses and destroys its resources: the traits type. It owns the driver operations.
pub trait Resource: Send + Sync + 'static {
    /// The resource. A handle look-up may hand it to any thread.
    type Payload: Tagged + Send + Sync + 'static;
    /// What a caller asks for.
    type Request<'a>;
    /// The kind of resource, for errors and reports.
    const NAME: &'static str;

    /// Makes a resource. Runs without any lock; may block, fail or panic without losing a slot.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn create(&self, handle: Handle<TagOf<Self>>, request: &Self::Request<'_>) -> Result<Self::Payload>;

    /// Whether an idle resource may serve this request, and prepares it if so (an idle resource holds no parents' leases; they
    /// are taken again here). Must not block.
    fn fits(&self, idle: &mut Self::Payload, request: &Self::Request<'_>) -> bool {
        let _ = (idle, request);
        true
    }

    /// What becomes of a resource whose last lease was dropped. Gives up the parents' leases. Must neither block nor panic.
    fn recycle(&self, payload: &mut Self::Payload) -> Fate {
        let _ = payload;
        Fate::Keep
    }

    /// Ends a resource: the native object first, then the parents' leases. May run on any thread. Must not block; what may block
    /// goes on a [`RetireList`](crate::RetireList).
    fn destroy(&self, payload: Self::Payload) {
        drop(payload);
    }
}

/// What becomes of a resource that nobody holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Fate {
    /// It waits for the next request.
    Keep,
    /// It is destroyed now.
    Destroy,
}

/// How a pool is laid out.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Slots of the first chunk; later chunks double. Not zero.
    pub block: u32,
    /// Slots made at once; zero is fine.
    pub initial: u32,
    /// At most this many resources at a time.
    pub max_live: Option<u32>,
    /// Keeps one idle resource per thread cell, which makes acquire and release of cheap resources faster. Costly resources
    /// would be stranded there.
    pub thread_cells: bool,
    /// How many generations a slot lives through before it is retired; less than the 2^32 - 1 only in tests.
    pub generations: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { block: 32, initial: 0, max_live: None, thread_cells: false, generations: u32::MAX }
    }
}

impl PoolConfig {
    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for a block size of zero or beyond the pool's 2^24 slots, and for zero generations or resources.
    pub fn validate(&self) -> Result<()> {
        if self.block == 0 || self.block > SLOTS_MAX {
            return Err(Error::invalid("pool block size must be 1 to 2^24 slots"));
        }
        if self.initial > SLOTS_MAX {
            return Err(Error::invalid("pool initial capacity must be at most 2^24 slots"));
        }
        if self.generations == 0 {
            return Err(Error::invalid("a slot needs at least one generation"));
        }
        if self.max_live == Some(0) {
            return Err(Error::invalid("a pool with max_live 0 can never lend anything"));
        }
        Ok(())
    }
}

/// What a pool did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Resources created.
    pub created: u64,
    /// Resources that somebody holds.
    pub live: u64,
    /// Requests that an idle resource served.
    pub recycled: u64,
    /// The most resources that existed at a time (held or idle).
    pub peak: u64,
    /// Resources that wait for a request.
    pub idle: u64,
    /// Slots given up: generations used up, or a panic while ending the resource.
    pub retired: u64,
    /// Weak leases.
    pub weak: u64,
}

#[cfg(not(loom))]
const SHARDS: usize = 4;
#[cfg(loom)]
const SHARDS: usize = 1;
#[cfg(not(loom))]
const CELLS: usize = 32;
#[cfg(loom)]
const CELLS: usize = 2;
const CHUNKS: usize = 25;
const INDEX_BITS: u32 = 24;
const NIL: u64 = (1 << INDEX_BITS) - 1;
const SLOTS_MAX: u32 = NIL as u32;
const TAG_ONE: u64 = 1 << INDEX_BITS;
const TAG_MASK: u64 = ((1 << 62) - 1) & !NIL;
const CLOSING: u64 = 1 << 62;
const ORPHAN: u64 = 1 << 63;
/// A cell whose pool is shutting down.
const CLOSED: u32 = u32::MAX;
const WEAK_ORPHAN: u64 = 1 << 63;
/// The remainder before the pool's owner has counted: more than there can be slots and weak leases.
const BIAS: i64 = 1 << 62;
/// How many idle resources are asked whether they fit before a new one is made.
const FIT_PROBES: usize = 8;

#[repr(C, align(64))]
struct Slot<P> {
    header: Header,
    payload: UnsafeCell<MaybeUninit<P>>,
}

#[repr(C)]
struct Inner<R: Resource> {
    owner: Owner,
    resource: R,
    config: PoolConfig,
    first_generation: u32,
    chunks: [AtomicPtr<Slot<R::Payload>>; CHUNKS],
    capacity: AtomicU32,
    grow: Mutex<()>,
    idle: [CachePadded<AtomicU64>; SHARDS],
    vacant: CachePadded<AtomicU64>,
    cells: [CachePadded<AtomicU32>; CELLS],
    weak: AtomicU64,
    remainder: AtomicI64,
    created: AtomicU64,
    lost: AtomicU64,
    payloads: AtomicU32,
    payloads_peak: AtomicU32,
    retired: AtomicU32,
    lifecycle: Mutex<bool>,
}

/// A growable pool of resources with stable addresses and lock-free acquire and release.
///
/// A pool may be dropped while leases are out: the last one frees it.
pub struct SlotPool<R: Resource>(NonNull<Inner<R>>);

// SAFETY: `Inner` is only atomics, locks and `Send + Sync` payloads reached through counted leases.
unsafe impl<R: Resource> Send for SlotPool<R> {}
// SAFETY: as above.
unsafe impl<R: Resource> Sync for SlotPool<R> {}

/// A list of free slots.
#[derive(Clone, Copy)]
enum List {
    Idle(usize),
    Vacant,
}

enum Popped {
    Index(u32),
    Empty,
    Closing,
}

fn pop(head: &AtomicU64, next_of: impl Fn(u32) -> u32, ignore_closing: bool) -> Popped {
    let mut h = head.load(Ordering::Acquire);
    loop {
        if h & CLOSING != 0 && !ignore_closing {
            return Popped::Closing;
        }
        let index = h & NIL;
        if index == NIL {
            return Popped::Empty;
        }
        let next = u64::from(next_of(index as u32)) & NIL;
        let new = (h & (CLOSING | ORPHAN)) | (h.wrapping_add(TAG_ONE) & TAG_MASK) | next;
        match head.compare_exchange_weak(h, new, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return Popped::Index(index as u32),
            Err(now) => h = now,
        }
    }
}

/// Where this thread starts among shards and cells.
#[cfg(not(loom))]
#[inline]
fn thread_seat() -> usize {
    use std::cell::Cell;
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local!(static SEAT: Cell<u32> = const { Cell::new(0) });
    SEAT.try_with(|seat| {
        let mut s = seat.get();
        if s == 0 {
            s = NEXT.fetch_add(1, Ordering::Relaxed) | 1 << 31;
            seat.set(s);
        }
        s as usize & 0x7fff_ffff
    })
    .unwrap_or(0)
}

#[cfg(loom)]
fn thread_seat() -> usize {
    loom::thread_local!(static SEAT: std::cell::Cell<u32> = std::cell::Cell::new(0));
    SEAT.with(|s| s.get() as usize)
}

/// Seats of model threads are chosen by the model.
#[cfg(loom)]
#[doc(hidden)]
pub fn next_first_generation_for_model() -> u32 {
    1
}

#[cfg(not(loom))]
fn next_first_generation() -> u32 {
    static POOLS: AtomicU32 = AtomicU32::new(1);
    // Steps of the golden ratio keep the offsets of any number of pools far apart.
    POOLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9).max(1)
}

#[cfg(loom)]
fn next_first_generation() -> u32 {
    next_first_generation_for_model()
}

fn generation_after(generation: u32) -> u32 {
    match generation.wrapping_add(1) {
        0 => 1,
        g => g,
    }
}

/// Generations between `first` and `now`, in the order in which a slot goes through them.
fn generations_since(first: u32, now: u32) -> u32 {
    if now >= first { now - first } else { now.wrapping_sub(first).wrapping_sub(1) }
}

impl<R: Resource> Inner<R> {
    const OPS: OwnerOps = OwnerOps { name: R::NAME, last: last::<R>, weak: weak::<R> };

    /// The chunk and the offset of a slot.
    #[inline]
    fn place(&self, index: u32) -> (usize, usize) {
        let n = u64::from(index) / u64::from(self.config.block) + 1;
        let chunk = n.ilog2();
        let before = ((1u64 << chunk) - 1) * u64::from(self.config.block);
        (chunk as usize, (u64::from(index) - before) as usize)
    }

    /// The slot, if it was made.
    #[inline]
    fn slot(&self, index: u32) -> Option<NonNull<Slot<R::Payload>>> {
        if index >= self.capacity.load(Ordering::Acquire) {
            return None;
        }
        Some(self.slot_made(index))
    }

    #[inline]
    fn slot_made(&self, index: u32) -> NonNull<Slot<R::Payload>> {
        let (chunk, offset) = self.place(index);
        let base = self.chunks[chunk].load(Ordering::Acquire);
        debug_assert!(!base.is_null());
        // SAFETY: indexes below `capacity` lie in chunks that were published before it; lists hold no others.
        unsafe { NonNull::new_unchecked(base.add(offset)) }
    }

    fn next_of(&self, index: u32) -> u32 {
        // SAFETY: slots in lists were made and live as long as the pool.
        unsafe { (*self.slot_made(index).as_ptr()).header.next.load(Ordering::Relaxed) }
    }

    /// Adds a chunk. The new slots go to the vacant list.
    #[cold]
    fn grow_slow(&self) -> Result<()> {
        let _guard = self.grow.lock();
        if self.vacant.load(Ordering::Acquire) & NIL != NIL {
            return Ok(());
        }
        let capacity = self.capacity.load(Ordering::Relaxed);
        let (chunk, _) = self.place(capacity);
        let count = (u64::from(self.config.block) << chunk).min(u64::from(SLOTS_MAX - capacity)) as usize;
        if count == 0 {
            return Err(OutOfMemory::new(format!("the {} pool", R::NAME), 1).note("all 2^24 slots are in use").into());
        }
        let full = (self.config.block as usize) << chunk;
        let mut slots: Vec<Slot<R::Payload>> = Vec::new();
        if slots.try_reserve_exact(full).is_err() {
            return Err(OutOfMemory::new("the host", (full * size_of::<Slot<R::Payload>>()) as u64).into());
        }
        let owner = std::ptr::from_ref(self).cast_mut();
        for i in 0..full {
            // The owner pointer is the whole pool's, exposed by `owner_ptr`, not one made from a field.
            let header = Header::new(self.owner_ptr(owner), capacity + i as u32, self.first_generation);
            slots.push(Slot { header, payload: UnsafeCell::new(MaybeUninit::uninit()) });
        }
        let base = Box::into_raw(slots.into_boxed_slice()).cast::<Slot<R::Payload>>();
        self.chunks[chunk].store(base, Ordering::Release);
        self.capacity.store(capacity + count as u32, Ordering::Release);
        // Backwards, so that the list is in index order.
        for i in (0..count as u32).rev() {
            // SAFETY: the slot is new; the owner is in this call, so the pool outlives it.
            unsafe { push(NonNull::from(self), List::Vacant, capacity + i) };
        }
        Ok(())
    }

    fn owner_ptr(&self, whole: *mut Self) -> *const Owner {
        whole.cast::<Owner>().cast_const()
    }

    fn list(&self, list: List) -> &AtomicU64 {
        match list {
            List::Idle(shard) => &self.idle[shard],
            List::Vacant => &self.vacant,
        }
    }

    fn note_payload(&self) {
        let now = self.payloads.fetch_add(1, Ordering::Relaxed) + 1;
        self.payloads_peak.fetch_max(now, Ordering::Relaxed);
        self.created.fetch_add(1, Ordering::Relaxed);
    }

    /// Destroys a payload. `false` when that panicked.
    ///
    /// # Safety
    /// - The slot holds a payload and the caller is alone with it.
    unsafe fn destroy_payload(&self, slot: NonNull<Slot<R::Payload>>) -> bool {
        self.payloads.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: by the contract.
        let payload = unsafe { (*slot.as_ptr()).payload.with_mut(|p| (*p).assume_init_read()) };
        catch_unwind(AssertUnwindSafe(|| self.resource.destroy(payload))).is_ok()
    }

    fn closing(&self) -> bool {
        self.vacant.load(Ordering::Acquire) & (CLOSING | ORPHAN) != 0
    }
}

/// Pushes a slot onto a list; frees the pool if this was the last slot out of an orphaned one. `false`: the list takes no idle
/// slots any more, and the slot is still the caller's.
///
/// The pool is passed as a pointer: a reference would promise the compiler that the pool outlives the call, which it may not.
///
/// # Safety
/// - The caller is alone with the slot, or owns the pool. On `true` it gives the slot up, and the pool may be gone.
unsafe fn push<R: Resource>(inner: NonNull<Inner<R>>, list: List, index: u32) -> bool {
    // SAFETY: the slot is out of the lists, so the pool is alive until the CAS succeeds, and after it unless we settle.
    unsafe {
        let pool = inner.as_ptr();
        let slot = (*pool).slot_made(index).as_ptr();
        let head: *const AtomicU64 = (*pool).list(list);
        let mut h = (*head).load(Ordering::Relaxed);
        loop {
            if matches!(list, List::Idle(_)) && h & (CLOSING | ORPHAN) != 0 {
                return false;
            }
            (*slot).header.next.store((h & NIL) as u32, Ordering::Relaxed);
            let new = (h & (CLOSING | ORPHAN)) | (h.wrapping_add(TAG_ONE) & TAG_MASK) | u64::from(index);
            match (*head).compare_exchange_weak(h, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => h = now,
            }
        }
        if h & ORPHAN != 0 {
            settle(inner, 1);
        }
    }
    true
}

/// Takes `n` off what is still out of an orphaned pool, and frees it at zero.
///
/// # Safety
/// - The pool is orphaned and the caller gives up `n` slots or weak leases of it.
unsafe fn settle<R: Resource>(inner: NonNull<Inner<R>>, n: i64) {
    // SAFETY: what the caller gives up keeps the pool alive up to the subtraction; at zero nobody else can reach it.
    unsafe {
        if (*inner.as_ptr()).remainder.fetch_sub(n, Ordering::AcqRel) == n {
            free(inner);
        }
    }
}

/// # Safety
/// - Nobody else can reach the pool, and no slot holds a payload that must still be destroyed.
unsafe fn free<R: Resource>(inner: NonNull<Inner<R>>) {
    // SAFETY: by the contract; chunks were leaked from boxed slices of this length.
    unsafe {
        let boxed = Box::from_raw(inner.as_ptr());
        for (i, chunk) in boxed.chunks.iter().enumerate() {
            let base = chunk.load(Ordering::Acquire);
            if !base.is_null() {
                let len = (boxed.config.block as usize) << i;
                drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(base, len)));
            }
        }
    }
}

/// The last lease on a slot was dropped.
unsafe fn last<R: Resource>(hdr: NonNull<Header>) {
    // SAFETY: the header is the first field of a slot of an `Inner<R>`, whose first field is the owner; both were stored as
    // pointers to the whole. Strong is zero: this thread is alone with slot and payload.
    let (slot, inner) = unsafe { (hdr.cast::<Slot<R::Payload>>(), &*hdr.as_ref().owner().cast::<Inner<R>>()) };
    // SAFETY: as above.
    let (index, generation) = unsafe { ((*slot.as_ptr()).header.index(), (*slot.as_ptr()).header.generation()) };
    let next = generation_after(generation);
    let worn = generations_since(inner.first_generation, generation) + 1 >= inner.config.generations
        || next == inner.first_generation;
    // SAFETY: alone with the payload.
    let fate = catch_unwind(AssertUnwindSafe(|| unsafe {
        (*slot.as_ptr()).payload.with_mut(|p| inner.resource.recycle((*p).assume_init_mut()))
    }));
    let keep = match fate {
        Ok(Fate::Keep) => !worn && !inner.closing(),
        Ok(Fate::Destroy) => false,
        Err(_) => {
            // The payload is in an unknown state: it is leaked rather than destroyed half-way.
            inner.payloads.fetch_sub(1, Ordering::Relaxed);
            retire(NonNull::from(inner), slot, next);
            return;
        }
    };
    let pool = NonNull::from(inner);
    if keep {
        // SAFETY: alone with the slot until it is in a cell or a list.
        unsafe {
            (*slot.as_ptr()).header.set_vacant(next);
            let seat = thread_seat();
            if inner.config.thread_cells
                && inner.cells[seat % CELLS]
                    .compare_exchange(0, index + 1, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            if push(pool, List::Idle(seat % SHARDS), index) {
                return;
            }
        }
    }
    // SAFETY: alone with the payload.
    let whole = unsafe { inner.destroy_payload(slot) };
    if worn || !whole {
        retire(pool, slot, next);
        return;
    }
    // SAFETY: alone with the slot until it is pushed.
    unsafe {
        (*slot.as_ptr()).header.set_vacant(next);
        push(pool, List::Vacant, index);
    }
}

/// Takes a slot out of use for ever. The caller is alone with it; the pool may be gone afterwards.
#[cold]
fn retire<R: Resource>(inner: NonNull<Inner<R>>, slot: NonNull<Slot<R::Payload>>, next: u32) {
    // SAFETY: the slot is in no list, so the pool is alive until it is counted as retired, and after that unless it is orphaned,
    // when the slot is still part of the remainder.
    unsafe {
        (*slot.as_ptr()).header.set_vacant(next);
        // A retired slot must not count as held: the shutdown and the orphan count read this number under the same lock.
        let pool = inner.as_ptr();
        let orphaned = {
            let _guard = (*pool).grow.lock();
            (*pool).retired.fetch_add(1, Ordering::AcqRel);
            (*pool).vacant.load(Ordering::Acquire) & ORPHAN != 0
        };
        if orphaned {
            settle(inner, 1);
        }
    }
}

unsafe fn weak<R: Resource>(hdr: NonNull<Header>, delta: i32) {
    // SAFETY: by contract of `OwnerOps::weak` the pool is alive, and a weak lease that goes is part of the remainder.
    unsafe {
        let inner = NonNull::new_unchecked((*hdr.as_ptr()).owner().cast_mut().cast::<Inner<R>>());
        let pool = inner.as_ptr();
        if delta > 0 {
            if (*pool).weak.fetch_add(1, Ordering::AcqRel) & WEAK_ORPHAN != 0 {
                (*pool).remainder.fetch_add(1, Ordering::AcqRel);
            }
        } else if (*pool).weak.fetch_sub(1, Ordering::AcqRel) & WEAK_ORPHAN != 0 {
            settle(inner, 1);
        }
    }
}

/// Returns a slot to the vacant list unless a payload was made.
struct CreateGuard<'a, R: Resource> {
    inner: &'a Inner<R>,
    index: u32,
    armed: bool,
}

impl<R: Resource> Drop for CreateGuard<'_, R> {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        let slot = self.inner.slot_made(self.index);
        self.inner.lost.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the slot is ours. The generation moves on: the failed create may have told its handle to somebody.
        let generation = unsafe { (*slot.as_ptr()).header.generation() };
        let next = generation_after(generation);
        if generations_since(self.inner.first_generation, generation) + 1 >= self.inner.config.generations
            || next == self.inner.first_generation
        {
            retire(NonNull::from(self.inner), slot, next);
            return;
        }
        // SAFETY: the slot is ours until it is pushed; the pool's owner is in the call that made this guard.
        unsafe {
            (*slot.as_ptr()).header.set_vacant(next);
            push(NonNull::from(self.inner), List::Vacant, self.index);
        }
    }
}

impl<R: Resource> SlotPool<R> {
    /// A pool of what `resource` makes.
    ///
    /// # Errors
    /// `InvalidArgument` for a configuration that [`PoolConfig::validate`] refuses; `OutOfMemory` for the initial slots.
    pub fn new(resource: R, config: PoolConfig) -> Result<Self> {
        config.validate()?;
        let initial = config.initial;
        let inner = Box::new(Inner {
            owner: Owner { ops: &Inner::<R>::OPS },
            resource,
            config,
            first_generation: next_first_generation(),
            chunks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            capacity: AtomicU32::new(0),
            grow: Mutex::new(()),
            idle: std::array::from_fn(|_| CachePadded::new(AtomicU64::new(NIL))),
            vacant: CachePadded::new(AtomicU64::new(NIL)),
            cells: std::array::from_fn(|_| CachePadded::new(AtomicU32::new(0))),
            weak: AtomicU64::new(0),
            remainder: AtomicI64::new(BIAS),
            created: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            payloads: AtomicU32::new(0),
            payloads_peak: AtomicU32::new(0),
            retired: AtomicU32::new(0),
            lifecycle: Mutex::new(false),
        });
        let pool = Self(NonNull::from(Box::leak(inner)));
        while pool.inner().capacity.load(Ordering::Relaxed) < initial {
            let made = pool.inner().capacity.load(Ordering::Relaxed);
            // Growth stops while vacant slots are left; hide them for a moment.
            let held = pool.inner().vacant.swap(NIL, Ordering::AcqRel);
            pool.inner().grow_slow()?;
            let mut index = (held & NIL) as u32;
            while u64::from(index) != NIL {
                let next = pool.inner().next_of(index);
                pool.put_back(List::Vacant, index);
                index = next;
            }
            debug_assert!(pool.inner().capacity.load(Ordering::Relaxed) > made);
        }
        Ok(pool)
    }

    #[inline]
    fn inner(&self) -> &Inner<R> {
        // SAFETY: the pool's owner keeps it alive.
        unsafe { self.0.as_ref() }
    }

    /// The traits type.
    #[inline]
    pub fn resource(&self) -> &R {
        &self.inner().resource
    }

    /// Takes a resource: an idle one that fits, else a new one.
    ///
    /// # Errors
    /// What `create` says; `OverBudget` beyond `max_live`; `OutOfMemory`; `InvalidState` after shutdown. Lock-free unless the pool grows; `create` may block.
    pub fn acquire(&self, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let (hdr, val) = self.take(request, false)?;
        // SAFETY: `take` made the first count for us.
        Ok(unsafe { Lease::from_raw(hdr, val) })
    }

    /// As [`acquire`](Self::acquire), as the sole holder.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_unique(&self, request: &R::Request<'_>) -> Result<UniqueLease<R::Payload>> {
        let (hdr, val) = self.take(request, true)?;
        // SAFETY: `take` made the only count, unique, for us.
        Ok(unsafe { UniqueLease::from_raw(hdr, val) })
    }

    #[inline]
    fn take(&self, request: &R::Request<'_>, unique: bool) -> Result<(NonNull<Header>, NonNull<R::Payload>)> {
        let inner = self.inner();
        let seat = thread_seat();
        if inner.config.thread_cells {
            let cell = &inner.cells[seat % CELLS];
            let at = cell.load(Ordering::Relaxed);
            if at != 0 && at != CLOSED && cell.compare_exchange(at, 0, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                let slot = inner.slot_made(at - 1);
                if self.idle_fits(slot, request) {
                    return Ok(Self::lend(slot, unique));
                }
                self.put_back(List::Idle(seat % SHARDS), at - 1);
            }
        }
        for i in 0..SHARDS {
            let shard = (seat + i) % SHARDS;
            let head = &inner.idle[shard];
            // A glance first: most shards are empty.
            if head.load(Ordering::Relaxed) & NIL == NIL {
                continue;
            }
            match pop(head, |n| inner.next_of(n), false) {
                Popped::Index(index) => {
                    let slot = inner.slot_made(index);
                    if self.idle_fits(slot, request) {
                        return Ok(Self::lend(slot, unique));
                    }
                    if let Some(slot) = self.probe_slow(shard, index, request) {
                        return Ok(Self::lend(slot, unique));
                    }
                }
                Popped::Empty => {}
                Popped::Closing => return self.take_closing_slow(request, unique),
            }
        }
        self.take_new_slow(request, unique)
    }

    #[inline]
    fn lend(slot: NonNull<Slot<R::Payload>>, unique: bool) -> (NonNull<Header>, NonNull<R::Payload>) {
        // SAFETY: the slot is ours, in no list, and holds a payload.
        unsafe {
            (*slot.as_ptr()).header.set_live(unique);
            (slot.cast::<Header>(), NonNull::new_unchecked((*slot.as_ptr()).payload.get().cast::<R::Payload>()))
        }
    }

    #[inline]
    fn idle_fits(&self, slot: NonNull<Slot<R::Payload>>, request: &R::Request<'_>) -> bool {
        // SAFETY: the slot was popped: we are alone with its payload.
        unsafe { (*slot.as_ptr()).payload.with_mut(|p| self.inner().resource.fits((*p).assume_init_mut(), request)) }
    }

    /// Returns a slot that this call took out of a list, or destroys its payload when a shutdown has begun meanwhile.
    fn put_back(&self, list: List, index: u32) {
        // SAFETY: the slot was taken out by this call, whose borrow keeps the pool's owner and so the pool.
        if !unsafe { push(self.0, list, index) } {
            self.destroy_idle(index);
        }
    }

    /// The first idle resource did not fit: asks a few more, and puts back what did not.
    #[cold]
    fn probe_slow(&self, shard: usize, first: u32, request: &R::Request<'_>) -> Option<NonNull<Slot<R::Payload>>> {
        let inner = self.inner();
        let head = &inner.idle[shard];
        let mut misses = [first; FIT_PROBES];
        let mut n = 1;
        let mut found = None;
        while n < FIT_PROBES {
            let Popped::Index(index) = pop(head, |i| inner.next_of(i), false) else { break };
            let slot = inner.slot_made(index);
            if self.idle_fits(slot, request) {
                found = Some(slot);
                break;
            }
            misses[n] = index;
            n += 1;
        }
        for &index in misses[..n].iter().rev() {
            self.put_back(List::Idle(shard), index);
        }
        found
    }

    /// A shutdown is deciding: wait for its decision.
    #[cold]
    fn take_closing_slow(
        &self,
        request: &R::Request<'_>,
        unique: bool,
    ) -> Result<(NonNull<Header>, NonNull<R::Payload>)> {
        let down = *self.inner().lifecycle.lock();
        if down {
            return Err(Error::state(format!("the {} manager is shut down", R::NAME)));
        }
        self.take(request, unique)
    }

    #[cold]
    fn take_new_slow(&self, request: &R::Request<'_>, unique: bool) -> Result<(NonNull<Header>, NonNull<R::Payload>)> {
        let inner = self.inner();
        // Somebody else's cell may hold what fits.
        if inner.config.thread_cells {
            for cell in &inner.cells {
                let at = cell.load(Ordering::Relaxed);
                if at != 0 && at != CLOSED && cell.compare_exchange(at, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
                {
                    let slot = inner.slot_made(at - 1);
                    if self.idle_fits(slot, request) {
                        return Ok(Self::lend(slot, unique));
                    }
                    self.put_back(List::Idle(0), at - 1);
                }
            }
        }
        if let Some(max) = inner.config.max_live {
            while inner.payloads.load(Ordering::Acquire) >= max {
                // An idle resource that does not fit makes room.
                if !self.destroy_one_idle() {
                    return Err(Error::OverBudget { requested: 1, used: u64::from(max), limit: u64::from(max) });
                }
            }
        }
        let index = loop {
            match pop(&inner.vacant, |n| inner.next_of(n), false) {
                Popped::Index(index) => break index,
                Popped::Empty => inner.grow_slow()?,
                Popped::Closing => return self.take_closing_slow(request, unique),
            }
        };
        let slot = inner.slot_made(index);
        let mut guard = CreateGuard { inner, index, armed: true };
        // SAFETY: the slot is ours.
        let generation = unsafe { (*slot.as_ptr()).header.generation() };
        let payload = inner.resource.create(Handle::new(index, generation), request)?;
        // SAFETY: the slot is ours and holds no payload.
        unsafe { (*slot.as_ptr()).payload.with_mut(|p| (*p).write(payload)) };
        guard.armed = false;
        inner.note_payload();
        Ok(Self::lend(slot, unique))
    }

    fn destroy_one_idle(&self) -> bool {
        let inner = self.inner();
        for head in &inner.idle {
            if let Popped::Index(index) = pop(head, |n| inner.next_of(n), false) {
                self.destroy_idle(index);
                return true;
            }
        }
        false
    }

    /// Destroys the payload of a slot that was popped, and makes the slot vacant.
    fn destroy_idle(&self, index: u32) {
        let inner = self.inner();
        let slot = inner.slot_made(index);
        // SAFETY: popped: we are alone with the slot and its payload.
        if unsafe { inner.destroy_payload(slot) } {
            self.put_back(List::Vacant, index);
        } else {
            // SAFETY: as above.
            let generation = unsafe { (*slot.as_ptr()).header.generation() };
            retire(NonNull::from(inner), slot, generation_after(generation));
        }
    }

    /// Destroys idle resources until at most `keep` are left, and says how many it destroyed.
    pub fn trim(&self, keep: u64) -> u64 {
        let inner = self.inner();
        let mut destroyed = 0;
        for cell in &inner.cells {
            let at = cell.load(Ordering::Relaxed);
            if at != 0 && at != CLOSED && cell.compare_exchange(at, 0, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                self.put_back(List::Idle(0), at - 1);
            }
        }
        while self.stats().idle > keep && self.destroy_one_idle() {
            destroyed += 1;
        }
        destroyed
    }

    /// Whether the handle's resource is alive at this load. One load; never blocks.
    #[inline]
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        match self.inner().slot(handle.index()) {
            // SAFETY: slots live as long as the pool.
            Some(slot) => unsafe { (*slot.as_ptr()).header.is_alive(handle.generation()) },
            None => false,
        }
    }

    /// A lease on the handle's resource; generation and count are checked in one step.
    ///
    /// # Errors
    /// `StaleHandle` when it is gone or was made by another pool; `Occupied` while somebody holds it exclusively.
    #[inline]
    pub fn lease(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        let Some(slot) = self.inner().slot(handle.index()) else {
            return Err(Error::stale(R::NAME, handle));
        };
        loop {
            // SAFETY: slots live as long as the pool.
            match unsafe { (*slot.as_ptr()).header.try_acquire(handle.generation()) } {
                // SAFETY: the count that was just taken is the lease's; a live slot holds a payload.
                Ok(()) => unsafe {
                    let val = NonNull::new_unchecked((*slot.as_ptr()).payload.get().cast::<R::Payload>());
                    return Ok(Lease::from_raw(slot.cast(), val));
                },
                Err(Miss::Stale) => return Err(Error::stale(R::NAME, handle)),
                Err(Miss::Occupied) => return Err(Error::Occupied { resource: R::NAME }),
                Err(Miss::Frozen) => drop(self.inner().lifecycle.lock()),
            }
        }
    }

    /// Counts by walking the slots; a snapshot, exact when the pool is at rest.
    pub fn stats(&self) -> PoolStats {
        let inner = self.inner();
        let capacity = inner.capacity.load(Ordering::Acquire);
        let (mut live, mut taken) = (0, 0);
        for index in 0..capacity {
            // SAFETY: slots live as long as the pool.
            let header = unsafe { &(*inner.slot_made(index).as_ptr()).header };
            let held = u64::from(header.strong() > 0);
            live += held;
            taken += held + u64::from(generations_since(inner.first_generation, header.generation()));
        }
        let created = inner.created.load(Ordering::Relaxed);
        let payloads = u64::from(inner.payloads.load(Ordering::Relaxed));
        PoolStats {
            created,
            live,
            recycled: taken.saturating_sub(created + inner.lost.load(Ordering::Relaxed)),
            peak: u64::from(inner.payloads_peak.load(Ordering::Relaxed)),
            idle: payloads.saturating_sub(live),
            retired: u64::from(inner.retired.load(Ordering::Relaxed)),
            weak: inner.weak.load(Ordering::Relaxed) & !WEAK_ORPHAN,
        }
    }

    fn heads(&self) -> impl Iterator<Item = &AtomicU64> {
        let inner = self.inner();
        inner.idle.iter().map(|h| &**h).chain(std::iter::once(&*inner.vacant))
    }

    /// Sets `flag` on all lists and counts the slots they hold at that instant. Cells are emptied into the lists' count.
    fn capture(&self, flag: u64) -> u64 {
        let inner = self.inner();
        let mut free = 0;
        for cell in &inner.cells {
            let at = cell.swap(CLOSED, Ordering::AcqRel);
            if at != 0 && at != CLOSED {
                self.put_back(List::Idle(0), at - 1);
            }
        }
        for head in self.heads() {
            let captured = head.fetch_or(flag, Ordering::AcqRel);
            let mut index = captured & NIL;
            while index != NIL {
                free += 1;
                index = u64::from(inner.next_of(index as u32)) & NIL;
            }
        }
        free
    }

    fn reopen(&self) {
        let inner = self.inner();
        for head in self.heads() {
            head.fetch_and(!CLOSING, Ordering::AcqRel);
        }
        for cell in &inner.cells {
            // From now on threads may use it again.
            let _ = cell.compare_exchange(CLOSED, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Ends the pool if nobody but the `own` leases holds anything of it; everything is decided before anything is destroyed.
    ///
    /// `own` are leases that the caller itself holds, one per resource; they are frozen during the decision. On success the
    /// idle resources are destroyed and later requests refused; the caller then drops its own leases.
    /// A second shutdown is `Ok`. Blocks only other shutdowns and requests that arrive during the decision.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown_with(&self, own: &[Lease<R::Payload>]) -> Result<()> {
        let inner = self.inner();
        let mut down = inner.lifecycle.lock();
        if *down {
            return Ok(());
        }
        // The grow lock keeps `capacity` and `retired` still while the lists are counted.
        let (free, total) = {
            let _guard = inner.grow.lock();
            let free = self.capture(CLOSING);
            (free, u64::from(inner.capacity.load(Ordering::Acquire) - inner.retired.load(Ordering::Acquire)))
        };
        let held = total.saturating_sub(free);
        let mut strong = held.saturating_sub(own.len() as u64);
        let weak = inner.weak.load(Ordering::Acquire);
        let frozen = own.iter().take_while(|l| l.header().try_freeze()).count();
        strong += (own.len() - frozen) as u64;
        if strong != 0 || weak != 0 {
            for lease in &own[..frozen] {
                lease.header().unfreeze();
            }
            self.reopen();
            return Err(Error::LeasesOutstanding { resource: R::NAME, strong, weak });
        }
        *down = true;
        drop(down);
        for lease in own {
            lease.header().unfreeze();
        }
        self.destroy_all_idle();
        Ok(())
    }

    /// [`shutdown_with`](Self::shutdown_with) without leases of one's own.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.shutdown_with(&[])
    }

    /// Whether the pool was shut down.
    pub fn is_shut_down(&self) -> bool {
        *self.inner().lifecycle.lock()
    }

    fn destroy_all_idle(&self) {
        let inner = self.inner();
        for head in &inner.idle {
            while let Popped::Index(index) = pop(head, |n| inner.next_of(n), true) {
                self.destroy_idle(index);
            }
        }
    }
}

impl<R: Resource> Drop for SlotPool<R> {
    fn drop(&mut self) {
        let inner = self.inner();
        // Idle payloads go first: once the lists are orphaned another thread may free the pool.
        self.capture(CLOSING);
        self.destroy_all_idle();
        let (listed, total) = {
            let _guard = inner.grow.lock();
            let listed = self.capture(ORPHAN);
            (listed, i64::from(inner.capacity.load(Ordering::Acquire) - inner.retired.load(Ordering::Acquire)))
        };
        let weak = inner.weak.fetch_or(WEAK_ORPHAN, Ordering::AcqRel) & !WEAK_ORPHAN;
        let out = total - listed as i64 + weak as i64;
        // Drops that already saw the flag took theirs off the bias.
        if inner.remainder.fetch_sub(BIAS - out, Ordering::AcqRel) == BIAS - out {
            // SAFETY: nothing is out and the owner is this call: nobody else can reach the pool.
            unsafe { free(self.0) };
        }
    }
}

impl<R: Resource> fmt::Debug for SlotPool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotPool").field("resource", &R::NAME).field("stats", &self.stats()).finish()
    }
}
