//! The shared state of a pool, which leases reach through their control blocks, and its
//! destruction.
//!
//! # Protocol
//! Roles: the *owner* is the [`SlotPool`](super::SlotPool) value. A *holder* has a slot out of the
//! lists: it lends the slot, is about to lend it, or has just dropped its last lease.
//!
//! - `slots`, `config`, `resource`, `worn_at`: immutable after construction; chunks are added under
//!   `grow`.
//! - `idle`, `vacant`, `cells`: lock-free, see their modules.
//! - a slot's payload: its holder alone, or shared by its leases.
//! - `reserved`, `payloads`, `created`, …: counters of the cold paths.
//! - `remainder`: see below.
//!
//! Destruction: leases and weak leases may outlive the owner. While the owner exists, it keeps the
//! pool alive. The owner's drop destroys the idle payloads and sets `orphan` on all lists and
//! `WEAK_ORPHAN` on the weak count. So it learns how many slots and weak leases remain. Each later
//! return of one sees the flag and takes one off `remainder`. Such a return may come before the
//! owner has computed its sum. Therefore `remainder` begins at `BIAS`, and the owner subtracts
//! `BIAS - out`. The thread that takes `remainder` to zero frees the pool.
//!
//! No function here may keep a reference into the pool after its slot is given up. Functions that
//! give a slot up take the pool as a pointer.
//!
//! This module must not know what a payload is.

use super::cells::{Cells, this_cell};
use super::free_list::{FreeList, Pushed};
use super::resource::{PoolConfig, Recycle, Resource};
use super::slots::{SLOTS_MAX, Slot, Slots, generation_after};
use crate::error::{OutOfMemory, Result};
use crate::lease::{Header, Owner, OwnerOps};
use crate::panics::quietly;
use crate::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use crate::sync::{CachePadded, Mutex};
use std::ptr::NonNull;

#[cfg(not(loom))]
pub(super) const SHARDS: usize = 4;
#[cfg(loom)]
pub(super) const SHARDS: usize = 1;
const WEAK_ORPHAN: u64 = 1 << 63;
/// The remainder before the owner has counted: a number greater than any count of slots and weak
/// leases.
const BIAS: i64 = 1 << 62;

pub(super) type PayloadOf<R> = <R as Resource>::Payload;
pub(super) type SlotOf<R> = NonNull<Slot<PayloadOf<R>>>;

#[repr(C)]
pub(super) struct Inner<R: Resource> {
    /// First, so that a pointer to it is a pointer to the pool.
    owner: Owner,
    pub(super) slots: Slots<R::Payload>,
    pub(super) resource: R,
    pub(super) config: PoolConfig,
    pub(super) first_generation: u32,
    /// A slot whose last lease had this generation is retired.
    worn_at: u32,
    pub(super) idle: [CachePadded<FreeList>; SHARDS],
    pub(super) vacant: CachePadded<FreeList>,
    pub(super) cells: Cells,
    pub(super) capacity: AtomicU32,
    /// Held while the pool grows, while a slot is retired, and while all lists are counted.
    pub(super) grow: Mutex<()>,
    weak: AtomicU64,
    remainder: AtomicI64,
    pub(super) created: AtomicU64,
    /// Generations without a lease: failed creations.
    pub(super) lost: AtomicU64,
    /// Resources that exist or are being created; bounded by `max_live`.
    pub(super) reserved: AtomicU32,
    pub(super) payloads: AtomicU32,
    pub(super) payloads_peak: AtomicU32,
    pub(super) retired: AtomicU32,
    /// Says whether the pool was shut down. The lock is held while a shutdown decides.
    pub(super) lifecycle: Mutex<bool>,
}

impl<R: Resource> Inner<R> {
    const OPS: OwnerOps = OwnerOps { name: R::NAME, last: last::<R>, weak: weak::<R> };

    pub(super) fn new(resource: R, config: PoolConfig, first_generation: u32) -> Self {
        // Generations go round through the 2^32 - 1 values other than zero.
        let round = u64::from(u32::MAX);
        let worn_at =
            (u64::from(first_generation) - 1 + u64::from(config.generations) - 1) % round + 1;
        Self {
            owner: Owner { ops: &Self::OPS },
            slots: Slots::new(config.block),
            resource,
            config,
            first_generation,
            worn_at: worn_at as u32,
            idle: std::array::from_fn(|_| CachePadded::new(FreeList::new())),
            vacant: CachePadded::new(FreeList::new()),
            cells: Cells::new(),
            capacity: AtomicU32::new(0),
            grow: Mutex::new(()),
            weak: AtomicU64::new(0),
            remainder: AtomicI64::new(BIAS),
            created: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reserved: AtomicU32::new(0),
            payloads: AtomicU32::new(0),
            payloads_peak: AtomicU32::new(0),
            retired: AtomicU32::new(0),
            lifecycle: Mutex::new(false),
        }
    }

    /// A slot that came from a list, a cell or a header of this pool.
    #[inline]
    pub(super) fn slot(&self, index: u32) -> SlotOf<R> {
        // SAFETY: only the pool calls this function, and its lists, cells and headers hold only
        // slots that were made.
        unsafe { self.slots.made(index) }
    }

    #[inline]
    pub(super) fn next_of(&self, index: u32) -> u32 {
        // SAFETY: slots in lists were made and live as long as the pool.
        unsafe { (*self.slot(index).as_ptr()).header.next.load(Ordering::Relaxed) }
    }

    /// The number of weak leases.
    pub(super) fn weak_count(&self) -> u64 {
        self.weak.load(Ordering::Acquire) & !WEAK_ORPHAN
    }

    /// The number of slots that are not retired. The caller holds `grow`.
    pub(super) fn usable(&self) -> u64 {
        u64::from(self.capacity.load(Ordering::Acquire) - self.retired.load(Ordering::Acquire))
    }

    /// Counts a payload that was made in a slot with a reservation.
    pub(super) fn note_created(&self) {
        let now = self.payloads.fetch_add(1, Ordering::Relaxed) + 1;
        self.payloads_peak.fetch_max(now, Ordering::Relaxed);
        self.created.fetch_add(1, Ordering::Relaxed);
    }

    /// Destroys a payload. `false` if the destruction panicked.
    ///
    /// # Safety
    /// - The slot holds a payload and the caller is alone with it.
    pub(super) unsafe fn destroy_payload(&self, slot: SlotOf<R>) -> bool {
        // SAFETY: by this function's contract the slot holds a payload and the caller is alone with
        // it.
        let payload = unsafe { (*slot.as_ptr()).payload.with_mut(|p| (*p).assume_init_read()) };
        let whole = quietly(|| self.resource.destroy(payload)).is_some();
        self.payloads.fetch_sub(1, Ordering::Relaxed);
        self.reserved.fetch_sub(1, Ordering::Release);
        whole
    }
}

/// Adds a chunk unless there are vacant slots. The new slots go to the vacant list.
///
/// # Safety
/// - The pool's owner is alive during the call; `pool` is the pointer that the pool was made with.
pub(super) unsafe fn grow<R: Resource>(
    pool: NonNull<Inner<R>>,
    even_if_vacant: bool,
) -> Result<()> {
    // SAFETY: by this function's contract the pool's owner is alive during the call.
    let inner = unsafe { pool.as_ref() };
    let _guard = inner.grow.lock();
    if !even_if_vacant && !inner.vacant.looks_empty() {
        return Ok(());
    }
    let capacity = inner.capacity.load(Ordering::Relaxed);
    let owner = pool.as_ptr().cast::<Owner>().cast_const();
    let slot = |index| Slot::new(Header::new(owner, index, inner.first_generation));
    // The last chunk's slots beyond SLOTS_MAX stay unused.
    let room = SLOTS_MAX - capacity;
    let made = if room == 0 { Ok(0) } else { inner.slots.grow(capacity, slot) };
    let gained = made
        .map_err(|bytes| {
            OutOfMemory::new("the host", bytes).note(format!("slots of the {} pool", R::NAME))
        })?
        .min(room);
    if gained == 0 {
        return Err(OutOfMemory::new(format!("the {} pool", R::NAME), 1)
            .note("all 2^24 slots are in use")
            .into());
    }
    inner.capacity.store(capacity + gained, Ordering::Release);
    // In reverse, so that the list is in index order.
    for index in (capacity..capacity + gained).rev() {
        // SAFETY: the slot is new, so this call is alone with it; the owner keeps the pool alive.
        unsafe { give_vacant(pool, inner.slot(index)) };
    }
    Ok(())
}

/// Gives up a slot without a payload.
///
/// # Safety
/// - The caller is alone with the slot, which belongs to `pool`. The pool may be gone afterwards.
pub(super) unsafe fn give_vacant<R: Resource>(pool: NonNull<Inner<R>>, slot: SlotOf<R>) {
    // SAFETY: the slot keeps the pool alive up to the push; `settle` takes the slot off the
    // remainder.
    unsafe {
        let header = &raw const (*slot.as_ptr()).header;
        let vacant = &(*pool.as_ptr()).vacant;
        let list: *const FreeList = &**vacant;
        if FreeList::push(list, &raw const (*header).next, (*header).index(), false)
            == Pushed::Orphaned
        {
            settle(pool);
        }
    }
}

/// Gives up a slot with a payload. `false`: the pool accepts none any more, and the slot is still
/// the caller's.
///
/// # Safety
/// - The caller is alone with the slot, which belongs to `pool` and whose generation no handle has.
///   On `true` the pool may be gone.
#[inline]
pub(super) unsafe fn give_idle<R: Resource>(
    pool: NonNull<Inner<R>>,
    slot: SlotOf<R>,
    shard: usize,
) -> bool {
    // SAFETY: the slot keeps the pool alive up to the push. The idle lists of an orphaned pool are
    // down, so they refuse.
    unsafe {
        let header = &raw const (*slot.as_ptr()).header;
        let list: *const FreeList = &*(&(*pool.as_ptr()).idle)[shard % SHARDS];
        FreeList::push(list, &raw const (*header).next, (*header).index(), true) != Pushed::Refused
    }
}

/// Destroys the payload and gives the slot up: to the vacant list, or, after a panic, to
/// retirement.
///
/// # Safety
/// - The caller is alone with the slot, which belongs to `pool` and holds a payload. The pool may
///   be gone afterwards.
pub(super) unsafe fn end<R: Resource>(pool: NonNull<Inner<R>>, slot: SlotOf<R>) {
    // SAFETY: the slot keeps the pool alive until it is given up.
    unsafe {
        if (*pool.as_ptr()).destroy_payload(slot) {
            give_vacant(pool, slot);
        } else {
            retire(pool);
        }
    }
}

/// Takes a slot out of use for ever.
///
/// # Safety
/// - The caller is alone with a slot of `pool` that holds no payload, and gives it up. The pool may
///   be gone afterwards.
#[cold]
pub(super) unsafe fn retire<R: Resource>(pool: NonNull<Inner<R>>) {
    // SAFETY: the slot is in no list, so the pool is alive until the slot counts as retired. After
    // that an owner keeps the pool alive; without an owner the slot is still part of the remainder.
    unsafe {
        // A retired slot must not count as held. A count reads this number under the same lock.
        let orphaned = {
            let _guard = (*pool.as_ptr()).grow.lock();
            (*pool.as_ptr()).retired.fetch_add(1, Ordering::AcqRel);
            (*pool.as_ptr()).vacant.is_orphaned()
        };
        if orphaned {
            settle(pool);
        }
    }
}

/// Ends the owner's part: `held` slots and the weak leases remain. Frees the pool if none remain.
///
/// # Safety
/// - The caller is the owner, has ended the idle payloads and set `orphan` on all lists. The pool
///   may be gone afterwards.
pub(super) unsafe fn orphan<R: Resource>(pool: NonNull<Inner<R>>, held: u64) {
    // SAFETY: the bias keeps the pool alive up to the subtraction.
    unsafe {
        let weak = (*pool.as_ptr()).weak.fetch_or(WEAK_ORPHAN, Ordering::AcqRel) & !WEAK_ORPHAN;
        let out = (held + weak) as i64;
        // Drops that already saw the flags have subtracted theirs from the bias.
        if (*pool.as_ptr()).remainder.fetch_sub(BIAS - out, Ordering::AcqRel) == BIAS - out {
            free(pool);
        }
    }
}

/// Takes one off what is still out of an orphaned pool, and frees it at zero.
///
/// # Safety
/// - The pool is orphaned and the caller gives up a slot or weak lease of it.
#[cold]
unsafe fn settle<R: Resource>(pool: NonNull<Inner<R>>) {
    // SAFETY: the slot or weak lease of the caller keeps the pool alive up to the subtraction. At
    // zero no other thread can reach the pool.
    unsafe {
        if (*pool.as_ptr()).remainder.fetch_sub(1, Ordering::AcqRel) == 1 {
            free(pool);
        }
    }
}

/// # Safety
/// - No other thread can reach the pool, and no slot holds a payload.
unsafe fn free<R: Resource>(pool: NonNull<Inner<R>>) {
    // SAFETY: the pointer is the one that `Box::into_raw` gave.
    let boxed = unsafe { Box::from_raw(pool.as_ptr()) };
    // The last lease may free the pool, and its drop must not panic.
    let _ = quietly(|| drop(boxed));
}

/// Runs after the last lease on a slot was dropped.
///
/// # Safety
/// - As [`OwnerOps::last`], for a header that [`grow`] made.
unsafe fn last<R: Resource>(hdr: NonNull<Header>) {
    // SAFETY: the header is the first field of a slot of an `Inner<R>`, whose first field is the
    // owner. Both were stored as pointers to the whole. Strong is zero: this thread is alone with
    // slot and payload until it gives the slot up, and until then the pool lives. `inner` is not
    // used after that.
    unsafe {
        let slot: SlotOf<R> = hdr.cast();
        let pool = NonNull::new_unchecked(hdr.as_ref().owner().cast_mut().cast::<Inner<R>>());
        let inner = &*pool.as_ptr();
        let header = &(*slot.as_ptr()).header;
        let generation = header.generation();
        let recycle = quietly(|| {
            (*slot.as_ptr()).payload.with_mut(|p| inner.resource.recycle((*p).assume_init_mut()))
        });
        header.set_vacant_again();
        if generation == inner.worn_at || recycle.is_none() {
            inner.destroy_payload(slot);
            retire(pool);
        } else if recycle == Some(Recycle::Keep) {
            let at = this_cell();
            if inner.config.thread_cells && Cells::put(&raw const inner.cells, at, header.index()) {
                return;
            }
            if !give_idle(pool, slot, at) {
                end(pool, slot);
            }
        } else {
            end(pool, slot);
        }
    }
}

/// Counts a weak lease that was made or dropped.
///
/// # Safety
/// - As [`OwnerOps::weak`], for a header that [`grow`] made.
unsafe fn weak<R: Resource>(hdr: NonNull<Header>, delta: i32) {
    // SAFETY: by contract the pool is alive, and a weak lease that is dropped is part of the
    // remainder.
    unsafe {
        let pool = NonNull::new_unchecked((*hdr.as_ptr()).owner().cast_mut().cast::<Inner<R>>());
        let inner = pool.as_ptr();
        if delta > 0 {
            if (*inner).weak.fetch_add(1, Ordering::AcqRel) & WEAK_ORPHAN != 0 {
                (*inner).remainder.fetch_add(1, Ordering::AcqRel);
            }
        } else if (*inner).weak.fetch_sub(1, Ordering::AcqRel) & WEAK_ORPHAN != 0 {
            settle(pool);
        }
    }
}

/// The slot of a creation in progress. Unless the creation succeeds, the slot returns as vacant,
/// after an error and after a panic.
pub(super) struct Creation<R: Resource> {
    pool: NonNull<Inner<R>>,
    slot: SlotOf<R>,
}

impl<R: Resource> Creation<R> {
    /// # Safety
    /// - The caller is alone with the slot, which holds no payload, and has reserved a resource;
    ///   the pool's owner outlives the value.
    pub(super) unsafe fn new(pool: NonNull<Inner<R>>, slot: SlotOf<R>) -> Self {
        Self { pool, slot }
    }

    /// The creation succeeded.
    pub(super) fn succeed(self, payload: R::Payload) -> SlotOf<R> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: by the contract of `new` this thread is alone with the slot, which has no
        // payload.
        unsafe {
            (*this.slot.as_ptr()).payload.with_mut(|p| (*p).write(payload));
            this.pool.as_ref().note_created();
        }
        this.slot
    }
}

impl<R: Resource> Drop for Creation<R> {
    #[cold]
    fn drop(&mut self) {
        // SAFETY: by the contract of `new` this thread is alone with the slot, and the pool lives.
        // The generation changes, because the failed creation may have told its handle to other
        // code.
        unsafe {
            let inner = self.pool.as_ref();
            let header = &(*self.slot.as_ptr()).header;
            let generation = header.generation();
            inner.lost.fetch_add(1, Ordering::Relaxed);
            inner.reserved.fetch_sub(1, Ordering::Release);
            header.set_vacant(generation_after(generation));
            if generation == inner.worn_at {
                retire(self.pool);
            } else {
                give_vacant(self.pool, self.slot);
            }
        }
    }
}

/// A slot that `fits` examines. If `fits` panics, the payload is in an unknown state: it is
/// destroyed and the slot retired.
pub(super) struct Probe<R: Resource> {
    pool: NonNull<Inner<R>>,
    slot: SlotOf<R>,
}

impl<R: Resource> Probe<R> {
    /// Asks whether the idle resource serves the request.
    ///
    /// # Safety
    /// - The caller is alone with the slot, which holds a payload; the pool's owner outlives the
    ///   call.
    #[inline]
    pub(super) unsafe fn fits(
        pool: NonNull<Inner<R>>,
        slot: SlotOf<R>,
        request: &R::Request<'_>,
    ) -> bool {
        let probe = Self { pool, slot };
        // SAFETY: by this function's contract the slot holds a payload, the caller is alone with
        // it, and the pool lives.
        let fits = unsafe {
            (*slot.as_ptr())
                .payload
                .with_mut(|p| pool.as_ref().resource.fits((*p).assume_init_mut(), request))
        };
        std::mem::forget(probe);
        fits
    }
}

impl<R: Resource> Drop for Probe<R> {
    #[cold]
    fn drop(&mut self) {
        // SAFETY: `fits` panicked; this thread is alone with the slot and its payload.
        unsafe {
            self.pool.as_ref().destroy_payload(self.slot);
            retire(self.pool);
        }
    }
}
