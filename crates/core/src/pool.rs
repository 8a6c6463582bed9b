//! Slot pools: stable storage for resources and their control blocks.
//!
//! # Protocol
//! Slots lie in chunks that double in size and never move. A slot is in exactly one state:
//! * held: a count exists, or a thread is about to make or destroy the payload;
//! * in an *idle* list, with a payload;
//! * in a thread *cell*, with a payload;
//! * in the *vacant* list, without a payload;
//! * retired.
//!
//! The thread that takes a slot out of a list or cell is alone with the slot.
//!
//! - a pop reads `next` of a slot that another thread pops: the slot's memory is the pool's; the
//!   CAS fails by the tag.
//! - `create` runs without a lock: the slot is in no list; a guard returns it if `create` fails or
//!   panics.
//! - last drop while a shutdown decides: `closing` stops pops, not pushes; a slot that the count
//!   did not see counts as held.
//! - last drop after a shutdown, or after the pool's owner is gone: `down` refuses idle slots: the
//!   dropping thread destroys the payload and pushes onto the vacant list, which accepts every
//!   slot.
//! - the last slot or weak lease returns after the owner is gone: a read-modify-write set `orphan`
//!   on each list; each push onto an orphaned list takes one off the remainder, and the last one
//!   frees the pool.
//! - a thread's cell during shutdown: cells hold `CLOSED`; a CAS from empty fails, so the slot goes
//!   to a list.
//! - a look-up of a handle while a shutdown decides: the manager's own leases are frozen; the
//!   look-up waits for the decision.
//!
//! Each pool's generations start at another offset, so a pool refuses another pool's handle. A slot
//! that has used all its generations is retired after its payload is destroyed.
//!
//! This module must not know what a payload is.

mod cells;
mod free_list;
mod inner;
mod resource;
mod slots;

pub use resource::{PoolConfig, PoolStats, Recycle, Resource, TagOf};

use crate::error::{Error, Result};
use crate::handle::Handle;
use crate::lease::{AcquireError, Header, Lease, UniqueLease};
use crate::sync::atomic::Ordering;
use crate::sync::thread::yield_now;
use free_list::{CLOSING, DOWN, FreeList, ORPHAN, Popped};
use inner::{Creation, Inner, Probe, SHARDS, SlotOf};
use std::fmt;
use std::ptr::NonNull;

/// The number of idle resources that are offered to `fits` before a new one is made.
const FIT_PROBES: usize = 8;
/// The number of retries of a request beyond `max_live` while an idle resource is in another
/// thread's hands.
const ROOM_TRIES: usize = 1000;

/// A growable pool of resources with stable addresses and lock-free acquire and release.
///
/// A pool may be dropped while leases exist; the last lease frees the pool's memory.
pub struct SlotPool<R: Resource>(NonNull<Inner<R>>);

// SAFETY: `Inner` has only atomics, locks and `Send + Sync` payloads that counted leases reach.
unsafe impl<R: Resource> Send for SlotPool<R> {}
// SAFETY: a shared pool gives leases, which count atomically, and reads atomics. Its lists are
// lock-free or locked.
unsafe impl<R: Resource> Sync for SlotPool<R> {}

/// The decision of a shutdown.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum ShutdownOutcome {
    /// The pool ends now: the caller destroys the idle resources, without a lock.
    Ends,
    /// The pool had ended before.
    WasDown,
}

impl<R: Resource> SlotPool<R> {
    /// A pool of the resources that `resource` makes.
    ///
    /// # Errors
    /// `InvalidArgument` if [`PoolConfig::validate`] refuses the configuration; `OutOfMemory` for
    /// the initial slots.
    pub fn new(resource: R, config: PoolConfig) -> Result<Self> {
        config.validate()?;
        let initial = config.initial;
        let inner = Box::new(Inner::new(resource, config, crate::chunks::next_first_generation()));
        // SAFETY: `into_raw` gives no null pointer.
        let pool = Self(unsafe { NonNull::new_unchecked(Box::into_raw(inner)) });
        while pool.inner().capacity.load(Ordering::Relaxed) < initial {
            // SAFETY: the pointer is the one of the new pool, and `pool` is the pool's owner.
            unsafe { inner::grow(pool.0, true)? };
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

    /// Acquires an idle resource that fits, or else a new one. Lock-free unless the pool grows.
    /// `create` may block, and a request during the decision of a shutdown waits for the decision.
    ///
    /// # Errors
    /// The error of `create`; `OverBudget` beyond `max_live`; `OutOfMemory`; `InvalidState` after
    /// shutdown.
    #[inline(always)]
    pub fn acquire(&self, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let slot = self.take(request)?;
        // SAFETY: the slot is ours and holds a payload; the count made here is the lease's.
        unsafe {
            let (hdr, val) = Self::lend(slot, false);
            Ok(Lease::from_raw(hdr, val))
        }
    }

    /// Like [`acquire`](Self::acquire), as the sole holder.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_unique(&self, request: &R::Request<'_>) -> Result<UniqueLease<R::Payload>> {
        let slot = self.take(request)?;
        // SAFETY: the slot is ours and holds a payload; the only count, made here as unique, is the
        // lease's.
        unsafe {
            let (hdr, val) = Self::lend(slot, true);
            Ok(UniqueLease::from_raw(hdr, val))
        }
    }

    /// Like [`acquire`](Self::acquire), but always creates a resource. For keyed singletons, whose
    /// idle resources belong to other keys.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_new(&self, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let slot = loop {
            if let Some(slot) = self.create_slow(request)? {
                break slot;
            }
        };
        // SAFETY: this call created the slot, which has no other holder. `lend` counts the lease
        // that is made of it.
        unsafe {
            let (hdr, val) = Self::lend(slot, false);
            Ok(Lease::from_raw(hdr, val))
        }
    }

    /// Makes the first count.
    ///
    /// # Safety
    /// - The caller is alone with the slot, which holds a payload.
    #[inline]
    unsafe fn lend(slot: SlotOf<R>, unique: bool) -> (NonNull<Header>, NonNull<R::Payload>) {
        // SAFETY: by the contract; a field's address is not null.
        unsafe {
            (*slot.as_ptr()).header.set_live_quietly(unique);
            (
                slot.cast::<Header>(),
                NonNull::new_unchecked((*slot.as_ptr()).payload.get().cast::<R::Payload>()),
            )
        }
    }

    /// Takes a slot with a fitting payload out of a cell or list, or makes one.
    ///
    /// The fast path inlines, so its slot stays in a register. A returned result would go through
    /// memory, which costs as much as a read-modify-write.
    #[inline(always)]
    fn take(&self, request: &R::Request<'_>) -> Result<SlotOf<R>> {
        match self.take_at_hand(request) {
            Some(slot) => Ok(slot),
            None => self.take_slow(request),
        }
    }

    /// Takes the slot in this thread's cell or on top of its shard's list, if its payload fits.
    #[inline]
    fn take_at_hand(&self, request: &R::Request<'_>) -> Option<SlotOf<R>> {
        let inner = self.inner();
        let at = cells::this_cell();
        let index = match inner.config.thread_cells.then(|| inner.cells.take(at)).flatten() {
            Some(index) => index,
            None => match inner.idle[at % SHARDS].pop(|i| inner.next_of(i)) {
                Popped::Index(index) => index,
                Popped::Empty | Popped::Closing => return None,
            },
        };
        let slot = inner.slot(index);
        if self.fits(slot, request) {
            return Some(slot);
        }
        self.put_idle(at, slot);
        None
    }

    #[inline]
    fn fits(&self, slot: SlotOf<R>, request: &R::Request<'_>) -> bool {
        // SAFETY: the slot was taken out of a list or cell, so this call is alone with it. `self`
        // is the owner.
        unsafe { Probe::fits(self.0, slot, request) }
    }

    /// Returns an idle slot that this call took, or destroys its payload if the pool ended
    /// meanwhile.
    #[cold]
    fn put_idle(&self, shard: usize, slot: SlotOf<R>) {
        // SAFETY: the slot was taken by this call, whose borrow keeps the pool's owner and so the
        // pool.
        unsafe {
            if !inner::give_idle(self.0, slot, shard) {
                inner::end(self.0, slot);
            }
        }
    }

    /// The slow path of `take`: looks in the other shards and cells, then creates.
    #[cold]
    fn take_slow(&self, request: &R::Request<'_>) -> Result<SlotOf<R>> {
        let at = cells::this_cell();
        loop {
            for shard in (0..SHARDS).map(|i| (at + i) % SHARDS) {
                if let Some(slot) = self.probe_list(shard, request) {
                    return Ok(slot);
                }
            }
            if let Some(slot) = self.probe_cells(at, request) {
                return Ok(slot);
            }
            if let Some(slot) = self.create_slow(request)? {
                return Ok(slot);
            }
        }
    }

    /// Offers the request the idle resources in other threads' cells. Those that do not fit go to a
    /// list.
    fn probe_cells(&self, shard: usize, request: &R::Request<'_>) -> Option<SlotOf<R>> {
        let inner = self.inner();
        if !inner.config.thread_cells {
            return None;
        }
        let mut misses = Misses { pool: self, shard, slots: [None; FIT_PROBES] };
        for miss in &mut misses.slots {
            let slot = inner.slot(inner.cells.take_any()?);
            if self.fits(slot, request) {
                return Some(slot);
            }
            *miss = Some(slot);
        }
        None
    }

    /// Offers the request the first few idle resources of a list, and returns those that do not
    /// fit.
    fn probe_list(&self, shard: usize, request: &R::Request<'_>) -> Option<SlotOf<R>> {
        let inner = self.inner();
        let mut misses = Misses { pool: self, shard, slots: [None; FIT_PROBES] };
        for miss in &mut misses.slots {
            let Popped::Index(index) = inner.idle[shard].pop(|i| inner.next_of(i)) else { break };
            let slot = inner.slot(index);
            if self.fits(slot, request) {
                return Some(slot);
            }
            *miss = Some(slot);
        }
        None
    }

    /// A slot with a new payload. `None`: a shutdown decided meanwhile and changed nothing; the
    /// caller must retry.
    #[cold]
    fn create_slow(&self, request: &R::Request<'_>) -> Result<Option<SlotOf<R>>> {
        let inner = self.inner();
        self.reserve()?;
        let index = loop {
            let outcome = match inner.vacant.pop(|i| inner.next_of(i)) {
                Popped::Index(index) => break index,
                // SAFETY: `self` is the owner, and its pointer is the one that the pool was made
                // with.
                Popped::Empty => match unsafe { inner::grow(self.0, false) } {
                    Ok(()) => continue,
                    Err(e) => Err(e),
                },
                Popped::Closing => self.refuse_if_down().map(|()| None),
            };
            inner.reserved.fetch_sub(1, Ordering::Release);
            return outcome;
        };
        let slot = inner.slot(index);
        // SAFETY: the slot was popped: this call is alone with it, and it holds no payload. `self`
        // is the owner.
        let (creation, generation) =
            unsafe { (Creation::new(self.0, slot), (*slot.as_ptr()).header.generation()) };
        // SAFETY: alone with the slot.
        unsafe { (*slot.as_ptr()).header.set_findable() };
        let payload = inner.resource.create(Handle::new(index, generation), request)?;
        Ok(Some(creation.succeed(payload)))
    }

    /// Waits while a shutdown decides.
    fn refuse_if_down(&self) -> Result<()> {
        if self.is_shut_down() {
            return Err(Error::state(format!("the {} manager is shut down", R::NAME)));
        }
        Ok(())
    }

    /// Counts a resource against `max_live` before its creation. If the pool is full, an idle
    /// resource is destroyed.
    fn reserve(&self) -> Result<()> {
        let inner = self.inner();
        let Some(max) = inner.config.max_live else {
            inner.reserved.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        for _ in 0..ROOM_TRIES {
            let reserved = inner.reserved.load(Ordering::Acquire);
            if reserved < max {
                let next = reserved + 1;
                if inner
                    .reserved
                    .compare_exchange(reserved, next, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    return Ok(());
                }
            } else if !self.destroy_one_idle() {
                self.refuse_if_down()?;
                if self.stats().idle == 0 {
                    break;
                }
                // An idle resource is in another thread's hands for a moment.
                yield_now();
            }
        }
        Err(Error::OverBudget {
            unit: crate::Budgeted::Resources,
            requested: 1,
            used: u64::from(max),
            limit: u64::from(max),
        })
    }

    fn destroy_one_idle(&self) -> bool {
        let inner = self.inner();
        let listed = || {
            inner.idle.iter().find_map(|list| match list.pop(|i| inner.next_of(i)) {
                Popped::Index(index) => Some(index),
                Popped::Empty | Popped::Closing => None,
            })
        };
        let Some(index) = listed().or_else(|| inner.cells.take_any()) else { return false };
        // SAFETY: this call took the slot, so it is alone with the slot and its payload. `self` is
        // the owner.
        unsafe { inner::end(self.0, inner.slot(index)) };
        true
    }

    /// Destroys idle resources until at most `keep` are left. Returns the number destroyed. Never
    /// blocks.
    pub fn trim(&self, keep: u64) -> u64 {
        let excess = self.stats().idle.saturating_sub(keep);
        (0..excess).take_while(|_| self.destroy_one_idle()).count() as u64
    }

    /// Returns whether the handle's resource is alive at this load. One load of the control word;
    /// never blocks.
    #[inline]
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        match self.inner().slots.get(handle.index()) {
            // SAFETY: slots live as long as the pool.
            Some(slot) => unsafe { (*slot.as_ptr()).header.is_alive(handle.generation()) },
            None => false,
        }
    }

    /// A lease on the handle's resource; generation and count are checked in one step.
    ///
    /// # Errors
    /// `StaleHandle` if the resource is gone or another pool made the handle; `Occupied` while a
    /// holder has it exclusively.
    #[inline]
    pub fn lease(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        if let Some(slot) = self.inner().slots.get(handle.index()) {
            // SAFETY: slots live as long as the pool.
            match unsafe { (*slot.as_ptr()).header.try_acquire(handle.generation()) } {
                // SAFETY: the count that was just taken is the lease's; a live slot holds a
                // payload.
                Ok(()) => unsafe {
                    let val =
                        NonNull::new_unchecked((*slot.as_ptr()).payload.get().cast::<R::Payload>());
                    return Ok(Lease::from_raw(slot.cast(), val));
                },
                Err(AcquireError::Stale) => {}
                Err(miss) => return self.lease_slow(handle, miss),
            }
        }
        Err(Error::stale(R::NAME, handle))
    }

    #[cold]
    fn lease_slow(
        &self,
        handle: Handle<TagOf<R>>,
        miss: AcquireError,
    ) -> Result<Lease<R::Payload>> {
        match miss {
            AcquireError::Occupied => Err(Error::Occupied { resource: R::NAME }),
            // Frozen after the decision to end: the manager is about to drop its own lease.
            AcquireError::Frozen if self.is_shut_down() => Err(Error::stale(R::NAME, handle)),
            AcquireError::Frozen | AcquireError::Stale => self.lease(handle),
        }
    }

    /// Statistics from a walk over the slots: a snapshot, exact while no other thread uses the
    /// pool.
    pub fn stats(&self) -> PoolStats {
        let inner = self.inner();
        let (mut live, mut taken) = (0, 0);
        for index in 0..inner.capacity.load(Ordering::Acquire) {
            // SAFETY: slots live as long as the pool.
            let (strong, generation) = unsafe { (*inner.slot(index).as_ptr()).header.snapshot() };
            let held = u64::from(strong > 0);
            live += held;
            taken += held + u64::from(slots::generations_since(inner.first_generation, generation));
        }
        let created = inner.created.load(Ordering::Relaxed);
        PoolStats {
            created,
            live,
            recycled: taken.saturating_sub(created + inner.lost.load(Ordering::Relaxed)),
            peak: u64::from(inner.payloads_peak.load(Ordering::Relaxed)),
            idle: u64::from(inner.payloads.load(Ordering::Relaxed)).saturating_sub(live),
            retired: u64::from(inner.retired.load(Ordering::Relaxed)),
            weak: inner.weak_count(),
        }
    }

    fn lists(&self) -> impl Iterator<Item = &FreeList> {
        let inner = self.inner();
        inner.idle.iter().map(|list| &**list).chain(std::iter::once(&*inner.vacant))
    }

    /// Sets flags on all lists, closes the cells, and returns the number of held slots. Slots in
    /// cells first move to a list.
    fn capture(&self, flags: u64) -> u64 {
        let inner = self.inner();
        // The lock keeps `capacity` and `retired` constant during the count.
        let _guard = inner.grow.lock();
        inner.cells.close(|index| {
            // SAFETY: the slot came out of a cell, so this call is alone with it. Lists accept idle
            // slots unless they are down, and the cells of a pool that is down are closed and
            // empty.
            let taken = unsafe { inner::give_idle(self.0, inner.slot(index), 0) };
            debug_assert!(taken);
        });
        let free: u64 = self.lists().map(|list| list.flag(flags, |i| inner.next_of(i))).sum();
        inner.usable() - free
    }

    fn reopen(&self) {
        self.lists().for_each(FreeList::reopen);
        self.inner().cells.reopen();
    }

    /// Shuts the pool down if no holders exist but the `own` leases. The decision comes before any
    /// destruction.
    ///
    /// `own` are leases that the caller itself holds, one for each resource; they are frozen during
    /// the decision. On success the idle resources are destroyed and later requests are refused.
    /// Then the caller drops its own leases, which no other code can acquire any more. A second
    /// shutdown returns `Ok`. Blocks only other shutdowns, and requests that arrive during the
    /// decision.
    ///
    /// # Errors
    /// `LeasesOutstanding` if other holders remain; then nothing has changed.
    pub fn shutdown_with(&self, own: &[Lease<R::Payload>]) -> Result<()> {
        if self.decide(own)? == ShutdownOutcome::Ends {
            self.destroy_all_idle();
        }
        Ok(())
    }

    /// The decision of a shutdown. Calls no function of the resource and destroys nothing. After
    /// [`ShutdownOutcome::Ends`] the caller drops its own leases and calls
    /// [`destroy_all_idle`](Self::destroy_all_idle).
    pub(crate) fn decide<'a>(
        &self,
        own: impl IntoIterator<Item = &'a Lease<R::Payload>, IntoIter: Clone>,
    ) -> Result<ShutdownOutcome> {
        let inner = self.inner();
        // A lease of another pool does not count here and must not be frozen.
        let own = own
            .into_iter()
            .filter(|lease| std::ptr::eq(lease.header().owner(), self.0.as_ptr().cast()));
        let mut down = inner.lifecycle.lock();
        if *down {
            return Ok(ShutdownOutcome::WasDown);
        }
        let held = self.capture(CLOSING);
        let frozen = own.clone().filter(|lease| lease.header().try_freeze()).count();
        // After the freeze: a lease that was dropped before the freeze may have left a weak lease.
        let weak = inner.weak_count();
        let strong = held.saturating_sub(frozen as u64);
        if strong != 0 || weak != 0 {
            own.for_each(|lease| lease.header().unfreeze());
            self.reopen();
            return Err(Error::LeasesOutstanding { resource: R::NAME, strong, weak });
        }
        // The own leases stay frozen. No other holders exist, so no thread pushes meanwhile.
        inner.idle.iter().for_each(|list| {
            list.flag(DOWN, |i| inner.next_of(i));
        });
        *down = true;
        Ok(ShutdownOutcome::Ends)
    }

    /// [`shutdown_with`](Self::shutdown_with) without own leases.
    ///
    /// # Errors
    /// `LeasesOutstanding` if holders remain; then nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.shutdown_with(&[])
    }

    /// Returns whether the pool was shut down. Waits while a shutdown decides.
    pub fn is_shut_down(&self) -> bool {
        *self.inner().lifecycle.lock()
    }

    /// Destroys the payloads in closed lists.
    pub(crate) fn destroy_all_idle(&self) {
        let inner = self.inner();
        for list in &inner.idle {
            while let Some(index) = list.pop_closed(|i| inner.next_of(i)) {
                // SAFETY: this call popped the slot, so it is alone with the slot and its payload.
                // `self` is the owner.
                unsafe { inner::end(self.0, inner.slot(index)) };
            }
        }
    }
}

impl<R: Resource> Drop for SlotPool<R> {
    fn drop(&mut self) {
        // Idle payloads are destroyed first: once the lists are orphaned, another thread may free
        // the pool.
        self.capture(CLOSING | DOWN);
        self.destroy_all_idle();
        let held = self.capture(ORPHAN);
        // SAFETY: this is the owner; idle lists are down and empty, and all lists are orphaned. The
        // pool is not accessed afterwards.
        unsafe { inner::orphan(self.0, held) };
    }
}

/// Idle slots that did not fit. They return in their former order, also if `fits` panics.
struct Misses<'a, R: Resource> {
    pool: &'a SlotPool<R>,
    shard: usize,
    slots: [Option<SlotOf<R>>; FIT_PROBES],
}

impl<R: Resource> Drop for Misses<'_, R> {
    fn drop(&mut self) {
        for slot in self.slots.iter().rev().flatten() {
            self.pool.put_idle(self.shard, *slot);
        }
    }
}

impl<R: Resource> fmt::Debug for SlotPool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotPool")
            .field("resource", &R::NAME)
            .field("stats", &self.stats())
            .finish()
    }
}
