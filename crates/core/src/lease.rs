//! Counted holds on resources, and the protocol of their control word.
//!
//! # Protocol
//! Every resource has exactly one [`Header`]. Its `state` word is `generation:32 | pinned:1 |
//! frozen:1 | unique:1 | claim:1 | mapped:1 | findable:1 | asked:1 | strong:25`.
//!
//! - the owner (a pool, the allocator's block table). Operations: plain stores. Condition: `strong`
//!   is 0: no other thread writes the word then.
//! - a lease. Operations: `fetch_add` (clone), `fetch_sub` (drop), the claim, mapped, findable and
//!   pinned bits. Condition: it is itself one of `strong`.
//! - a handle or a weak lease. Operations: one CAS `strong → strong + 1`. Condition: the
//!   generation matches, `strong > 0`, findable, neither unique nor frozen.
//! - a unique lease. Operations: plain stores. Condition: the unique bit is set: CASes of handles
//!   fail, no other lease exists.
//! - leases from [`UniqueLease::share_unlisted`], or of an owner that asks for such. Operations:
//!   those of leases. Condition: `strong` counts them, and the unique bit stays set for the rest
//!   of the generation.
//! - a shutdown. Operations: CAS that sets `frozen`. Condition: `strong` is 1 and that one is the
//!   manager's own.
//!
//! Soundness: the thread whose `fetch_sub` takes `strong` from 1 to 0 is alone with the payload.
//! Every new count needs `strong > 0`: a clone holds a count, and handles and weak leases check the
//! count in their CAS. The thread runs the owner's `last`, which stores (generation + 1, 0) before
//! the slot becomes findable. So a handle that was read before sees another generation, and a CAS
//! that was prepared before fails.
//!
//! Findable: the bit is set before any other code can know the handle or have a weak lease. A sole
//! lease without this bit is alone with the word, so its drop needs no read-modify-write, which is
//! a third of the cost of a release. If a slot was asked for its handle once (`asked`), the slot is
//! findable from the start of its later generations. Those then need not set the bit.
//!
//! Mapping: a lease that was narrowed by [`Lease::map`] points into the payload, or to data that
//! the payload leads to. A `&mut` to the payload could remove this data, and a mapped lease made
//! unique would give `&mut` to shared data. So the first map sets a bit that forbids a unique lease
//! for the rest of the generation.
//!
//! Overflow: far below 2^25 clones the slot is pinned. From then on drops do not count, and the
//! resource is leaked.
//!
//! This module must not know pools, managers or payload types.

use crate::error::{Error, Result};
use crate::handle::{Handle, Tagged};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const STRONG: u64 = (1 << 25) - 1;
const ASKED: u64 = FINDABLE >> 1;
const FINDABLE: u64 = 1 << 26;
const MAPPED: u64 = 1 << 27;
const CLAIM: u64 = 1 << 28;
const UNIQUE: u64 = 1 << 29;
const FROZEN: u64 = 1 << 30;
const PINNED: u64 = 1 << 31;
const GENERATION_SHIFT: u32 = 32;
/// The count at which a slot is pinned. Half of the field, so a wrap would need 2^24 threads that
/// clone at one instant.
const PIN_AT: u64 = 1 << 24;

/// The functions of an owner of control blocks. One static value for each kind of resource.
pub struct OwnerOps {
    /// The kind of resource, for errors.
    pub name: &'static str,
    /// Runs on the thread that dropped the last lease. This thread is alone with the payload. Must
    /// neither block nor panic.
    ///
    /// # Safety
    /// - The header's `strong` has just become zero, and the header's memory belongs to the owner.
    pub last: unsafe fn(NonNull<Header>),
    /// Counts a weak lease that was made (+1) or dropped (-1).
    ///
    /// # Safety
    /// - The header belongs to this owner, whose memory is alive.
    pub weak: unsafe fn(NonNull<Header>, i32),
}

/// The first field of every owner of control blocks, which must be a `repr(C)` struct.
#[repr(C)]
pub struct Owner {
    /// The owner's behaviour.
    pub ops: &'static OwnerOps,
}

/// The control block: 32 bytes at the start of a `repr(C)` slot.
#[repr(C)]
pub struct Header {
    state: AtomicU64,
    owner: *const Owner,
    /// The next slot in a list of the owner.
    pub next: AtomicU32,
    index: u32,
    /// A word for the owner's use.
    pub user: AtomicU64,
}

// SAFETY: by contract the owner outlives the users of its headers. The owner is only read through
// the pointer, and `OwnerOps` is `Sync`.
unsafe impl Send for Header {}
// SAFETY: only holders of a count read the owner through the pointer. Everything else is atomic or
// immutable.
unsafe impl Sync for Header {}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Header>() == 32);

/// A read-only view of a lease's control block: its owner and its slot.
#[derive(Clone, Copy)]
pub struct HeaderView<'a>(&'a Header);

impl HeaderView<'_> {
    /// The slot's index.
    #[inline]
    pub fn index(self) -> u32 {
        self.0.index
    }

    /// The owner.
    #[inline]
    pub fn owner(self) -> *const Owner {
        self.0.owner
    }

    /// The present generation.
    #[inline]
    pub fn generation(self) -> u32 {
        self.0.generation()
    }

    /// The address of the control block, for its owner.
    #[inline]
    pub fn address(self) -> *const Header {
        self.0
    }

    pub(crate) fn try_freeze(self) -> bool {
        self.0.try_freeze()
    }

    pub(crate) fn unfreeze(self) {
        self.0.unfreeze();
    }
}

/// The reason why a handle gave no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum AcquireError {
    /// The generation differs, or no holder is left.
    Stale,
    /// A holder has the resource exclusively.
    Occupied,
    /// The manager is deciding on a shutdown; the caller must retry.
    Frozen,
}

impl Header {
    /// A header of slot `index` without holders.
    pub fn new(owner: *const Owner, index: u32, generation: u32) -> Self {
        Self {
            state: AtomicU64::new(u64::from(generation) << GENERATION_SHIFT),
            owner,
            next: AtomicU32::new(u32::MAX),
            index,
            user: AtomicU64::new(0),
        }
    }

    /// The slot's index.
    #[inline]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The owner.
    #[inline]
    pub fn owner(&self) -> *const Owner {
        self.owner
    }

    /// The present generation.
    #[inline]
    pub fn generation(&self) -> u32 {
        (self.state.load(Ordering::Acquire) >> GENERATION_SHIFT) as u32
    }

    /// The number of leases that hold the resource (a snapshot).
    #[inline]
    pub fn strong(&self) -> u32 {
        (self.state.load(Ordering::Acquire) & STRONG) as u32
    }

    /// Count and generation at one instant.
    pub(crate) fn snapshot(&self) -> (u32, u32) {
        let s = self.state.load(Ordering::Acquire);
        ((s & STRONG) as u32, (s >> GENERATION_SHIFT) as u32)
    }

    /// Returns whether the handle's resource was alive at this load.
    #[inline]
    pub fn is_alive(&self, generation: u32) -> bool {
        let s = self.state.load(Ordering::Acquire);
        (s >> GENERATION_SHIFT) as u32 == generation && s & STRONG != 0
    }

    /// Makes the first lease's count. Only the owner may call it, on a header without holders. From
    /// now on handles find the resource.
    #[inline]
    pub fn set_live(&self, unique: bool) {
        self.set_findable();
        self.set_live_quietly(unique);
    }

    /// Like [`set_live`](Self::set_live), but the slot becomes findable only when its handle or a
    /// weak lease is requested. Exceptions: the slot was set findable before, or its handle was
    /// requested in an earlier generation. Until then the drop costs no atomic read-modify-write.
    #[inline]
    pub fn set_live_quietly(&self, unique: bool) {
        let s = self.state.load(Ordering::Relaxed);
        debug_assert_eq!(
            s & STRONG,
            0,
            "the owner makes the first lease of a slot that nobody holds"
        );
        self.state.store(s | 1 | if unique { UNIQUE } else { 0 }, Ordering::Release);
    }

    /// Makes the slot findable before its new handle is told to any code. Only the owner may call
    /// it, on a header without holders.
    #[inline]
    pub(crate) fn set_findable(&self) {
        self.state.store(self.state.load(Ordering::Relaxed) | FINDABLE, Ordering::Relaxed);
    }

    /// Ends a generation. Only the owner may call it, on a header without holders.
    #[inline]
    pub fn set_vacant(&self, generation: u32) {
        self.state.store(u64::from(generation) << GENERATION_SHIFT, Ordering::Release);
    }

    /// Like [`set_vacant`](Self::set_vacant), for the generation after the present one, which it
    /// returns. If a handle was ever requested, the slot is findable as soon as it is live again.
    #[inline]
    pub fn set_vacant_again(&self) -> u32 {
        let s = self.state.load(Ordering::Relaxed);
        let generation = ((s >> GENERATION_SHIFT) as u32).wrapping_add(1).max(1);
        let asked = (s & ASKED) * (1 + FINDABLE / ASKED);
        self.state.store(u64::from(generation) << GENERATION_SHIFT | asked, Ordering::Release);
        generation
    }

    /// Adds a count if `generation` is the present one and a holder exists.
    #[inline]
    pub fn try_acquire(&self, generation: u32) -> Result<(), AcquireError> {
        let mut s = self.state.load(Ordering::Relaxed);
        loop {
            if (s >> GENERATION_SHIFT) as u32 != generation || s & STRONG == 0 || s & FINDABLE == 0
            {
                return Err(AcquireError::Stale);
            }
            if s & (UNIQUE | FROZEN) != 0 {
                return Err(if s & UNIQUE != 0 {
                    AcquireError::Occupied
                } else {
                    AcquireError::Frozen
                });
            }
            // A CAS in either case: without a count of its own, a thread must not write a word that
            // has changed.
            let counted = if s & STRONG < PIN_AT { s + 1 } else { s | PINNED };
            match self.state.compare_exchange_weak(s, counted, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(now) => s = now,
            }
        }
    }

    /// Freezes a header whose only holder is its manager, so that no handle can lease it. `false`:
    /// another holder exists.
    pub(crate) fn try_freeze(&self) -> bool {
        let s = self.state.load(Ordering::Relaxed);
        s & (STRONG | UNIQUE | CLAIM | FROZEN | PINNED) == 1
            && self
                .state
                .compare_exchange(s, s | FROZEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
    }

    /// Removes the freeze, if the header is frozen. The caller has a count.
    pub(crate) fn unfreeze(&self) {
        self.state.fetch_and(!FROZEN, Ordering::Release);
    }

    /// Sets flags for the rest of the generation. The caller has a count.
    #[inline]
    fn mark(&self, flags: u64) {
        if self.state.load(Ordering::Relaxed) & flags != flags {
            self.state.fetch_or(flags, Ordering::Relaxed);
        }
    }

    /// Makes the resource findable and returns its generation. The caller has a count.
    #[inline]
    fn publish(&self) -> u32 {
        self.mark(FINDABLE | ASKED);
        self.generation()
    }

    #[inline]
    fn add(&self) {
        let old = self.state.fetch_add(1, Ordering::Relaxed);
        if old & STRONG >= PIN_AT {
            self.pin_slow();
        }
    }

    #[cold]
    fn pin_slow(&self) {
        self.state.fetch_or(PINNED, Ordering::Relaxed);
        self.state.fetch_sub(1, Ordering::Relaxed);
    }
}

/// # Safety
/// - The caller owns one count of `hdr` and gives it up.
#[inline]
unsafe fn release(hdr: NonNull<Header>) {
    // SAFETY: the caller's count keeps the header alive. No reference to the header outlives the
    // statement.
    let s = unsafe { (*hdr.as_ptr()).state.load(Ordering::Acquire) };
    if s & (STRONG | FINDABLE | PINNED) == 1 {
        // SAFETY: this is the only lease, and no other code can find the resource. So this thread
        // is alone with the word. The load saw the drops of all former leases.
        unsafe {
            (*hdr.as_ptr()).state.store(s - 1, Ordering::Relaxed);
            last(hdr);
        }
        return;
    }
    // SAFETY: the caller's count keeps the header alive up to this subtraction. No reference to the
    // header outlives the call.
    let old = unsafe { (*hdr.as_ptr()).state.fetch_sub(1, Ordering::Release) };
    if old & (STRONG | PINNED) == 1 {
        fence(Ordering::Acquire);
        // SAFETY: this thread has just taken `strong` to zero, so the owner has not reused the slot
        // and is alive.
        unsafe { last(hdr) }
    } else if old & PINNED != 0 {
        // SAFETY: a pinned slot is never freed.
        unsafe { (*hdr.as_ptr()).state.fetch_add(1, Ordering::Relaxed) };
    }
}

/// # Safety
/// - As [`OwnerOps::last`].
#[inline]
unsafe fn last(hdr: NonNull<Header>) {
    // SAFETY: the owner is alive while one of its slots is out.
    unsafe {
        let owner = (*hdr.as_ptr()).owner;
        ((*owner).ops.last)(hdr);
    }
}

/// A counted hold on a resource. Cloning counts; the last drop gives the resource back to its
/// owner.
///
/// A lease is the only way to hold a resource. It keeps alive every other resource that its
/// resource needs. A drop never fails, blocks or panics, on any thread, with or without a current
/// context.
///
/// ```
/// # use leasehold_core::*;
/// # struct Names; struct Name(String);
/// # impl Tagged for Name { type Tag = tags::Event; }
/// # impl Resource for Names {
/// #     type Payload = Name; type Request<'a> = &'a str; const NAME: &'static str = "name";
/// #     fn create(&self, _: Handle<tags::Event>, r: &&str) -> Result<Name> {
/// #         Ok(Name(r.to_string()))
/// #     }
/// # }
/// let pool = SlotPool::new(Names, PoolConfig::default())?;
/// let a = pool.acquire(&"first")?;
/// let b = a.clone();
/// assert_eq!(b.0, "first");
/// let handle = a.handle();
/// drop((a, b));
/// assert!(!pool.is_alive(handle));
/// # Ok::<(), Error>(())
/// ```
#[must_use = "a lease that is dropped at once gives its resource back"]
pub struct Lease<T: ?Sized> {
    hdr: NonNull<Header>,
    val: NonNull<T>,
}

// SAFETY: a lease gives `&T` on any thread and may run the owner's `last` on any thread. Owners
// hold `Send + Sync` payloads.
unsafe impl<T: ?Sized + Send + Sync> Send for Lease<T> {}
// SAFETY: a shared lease gives `&T` and can be cloned, which counts atomically.
unsafe impl<T: ?Sized + Send + Sync> Sync for Lease<T> {}

impl<T: ?Sized> Lease<T> {
    /// A lease on a row of the owner's own table.
    ///
    /// # Safety
    /// - The caller owns one count of `hdr` (after [`Header::set_live`] or [`Header::try_acquire`])
    ///   and gives it to the lease.
    /// - `val` points into the same row and stays valid until the owner's `last` runs.
    #[inline]
    pub unsafe fn from_raw(hdr: NonNull<Header>, val: NonNull<T>) -> Self {
        Self { hdr, val }
    }

    #[inline]
    fn word(&self) -> &Header {
        // SAFETY: our count keeps it alive as long as `self`.
        unsafe { self.hdr.as_ref() }
    }

    /// The readable part of the control block.
    #[inline]
    pub fn header(&self) -> HeaderView<'_> {
        HeaderView(self.word())
    }

    /// Narrows or erases the type that the lease shows; the hold is the same. For the rest of this
    /// generation no lease can be unique: a holder of `&mut` could remove the data that the mapped
    /// lease shows.
    ///
    /// A mapped lease may show any value that lives as long as the resource, also a static. Code
    /// that must know that a value is the resource's own must compare its address too, as an
    /// allocator's `owns` does.
    #[inline]
    pub fn map<U: ?Sized + 'static>(this: Self, f: impl FnOnce(&T) -> &U) -> Lease<U> {
        this.word().mark(MAPPED);
        // SAFETY: our count keeps the value alive, and with it the data that it leads to: no code
        // can get `&mut` to it in this generation. `U` is `'static`, so nothing in it ends earlier.
        // If `f` panics, `this` is dropped normally.
        let val = NonNull::from(f(unsafe { this.val.as_ref() }));
        let this = ManuallyDrop::new(this);
        Lease { hdr: this.hdr, val }
    }

    /// Returns whether both hold the same resource.
    #[inline]
    pub fn same<U: ?Sized>(&self, other: &Lease<U>) -> bool {
        self.hdr == other.hdr
    }

    /// The number of leases that hold the resource (a snapshot, for reports and tests).
    pub fn strong_count(&self) -> u32 {
        self.word().strong()
    }

    /// Takes the resource's one claim, which may exist beside any number of leases.
    ///
    /// # Errors
    /// `Occupied` while another [`Claim`] lives. Never blocks.
    pub fn claim(&self) -> Result<Claim<T>> {
        let hdr = self.word();
        if hdr.state.fetch_or(CLAIM, Ordering::Acquire) & CLAIM != 0 {
            // SAFETY: the owner is alive while we hold a count.
            let name = unsafe { (*hdr.owner).ops.name };
            return Err(Error::Occupied { resource: name });
        }
        Ok(Claim(self.clone()))
    }
}

impl<T: ?Sized + Tagged> Lease<T> {
    /// The resource's handle.
    #[inline]
    pub fn handle(&self) -> Handle<T::Tag> {
        let hdr = self.word();
        Handle::new(hdr.index, hdr.publish())
    }
}

impl<T: ?Sized + 'static> Lease<T> {
    /// A weak lease, which keeps no payload alive.
    pub fn downgrade(&self) -> WeakLease<T> {
        // SAFETY: our count keeps the owner alive.
        unsafe { ((*self.word().owner).ops.weak)(self.hdr, 1) };
        WeakLease { hdr: self.hdr, val: self.val, generation: self.word().publish() }
    }
}

impl<T: 'static> Lease<T> {
    /// Converts the lease into the sole hold on the resource.
    ///
    /// # Errors
    /// Returns the lease if others hold the resource or have claimed it, or if it was narrowed by
    /// [`map`](Self::map).
    pub fn try_unique(self) -> Result<UniqueLease<T>, Self> {
        let hdr = self.word();
        let s = hdr.state.load(Ordering::Relaxed);
        if s & (STRONG | CLAIM | MAPPED | FROZEN | PINNED) != 1
            || hdr
                .state
                .compare_exchange(s, s | UNIQUE, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        Ok(UniqueLease { hdr: this.hdr, val: this.val, _t: PhantomData })
    }

    /// This lease, but from now on no handle and no weak lease finds the resource, as after
    /// [`UniqueLease::share_unlisted`].
    ///
    /// # Errors
    /// `Occupied` if others hold the resource.
    pub fn unlisted(self) -> Result<Self> {
        // SAFETY: the owner is alive while we hold a count.
        let resource = unsafe { (*self.word().owner).ops.name };
        let unique = self.try_unique().map_err(|_| Error::Occupied { resource })?;
        Ok(unique.share_unlisted())
    }
}

impl<T: ?Sized> Clone for Lease<T> {
    #[inline]
    fn clone(&self) -> Self {
        self.word().add();
        Self { hdr: self.hdr, val: self.val }
    }
}

impl<T: ?Sized> Drop for Lease<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this lease's count, given up once.
        unsafe { release(self.hdr) }
    }
}

impl<T: ?Sized> Deref for Lease<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: our count keeps the payload alive and shared.
        unsafe { self.val.as_ref() }
    }
}

impl<T: ?Sized> AsRef<T> for Lease<T> {
    fn as_ref(&self) -> &T {
        self
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Lease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&&**self).finish()
    }
}

/// A reference to a resource that does not hold it. It keeps only the memory of the pool alive.
pub struct WeakLease<T: ?Sized + 'static> {
    hdr: NonNull<Header>,
    val: NonNull<T>,
    generation: u32,
}

// SAFETY: an upgrade may give `&T` to any thread and drop the last lease there.
unsafe impl<T: ?Sized + Send + Sync> Send for WeakLease<T> {}
// SAFETY: a shared one can be cloned and upgraded; both count atomically.
unsafe impl<T: ?Sized + Send + Sync> Sync for WeakLease<T> {}

impl<T: ?Sized + 'static> WeakLease<T> {
    /// A lease, if the resource is alive and has no exclusive holder.
    pub fn upgrade(&self) -> Option<Lease<T>> {
        self.try_upgrade().ok()
    }

    /// Like [`upgrade`](Self::upgrade), with the reason of a failure.
    ///
    /// # Errors
    /// `StaleHandle` if the resource is gone; `Occupied` while a holder has it exclusively.
    pub fn try_upgrade(&self) -> Result<Lease<T>> {
        // SAFETY: the weak count keeps the pool's memory alive.
        let (hdr, name) = unsafe { (self.hdr.as_ref(), (*self.hdr.as_ref().owner).ops.name) };
        loop {
            match hdr.try_acquire(self.generation) {
                // SAFETY: the count that was just taken is the lease's.
                Ok(()) => return Ok(unsafe { Lease::from_raw(self.hdr, self.val) }),
                Err(AcquireError::Stale) => {
                    return Err(Error::stale(
                        name,
                        format_args!("{}.{:08x}", hdr.index, self.generation),
                    ));
                }
                Err(AcquireError::Occupied) => return Err(Error::Occupied { resource: name }),
                Err(AcquireError::Frozen) => crate::sync::thread::yield_now(),
            }
        }
    }
}

impl<T: ?Sized + 'static> Clone for WeakLease<T> {
    fn clone(&self) -> Self {
        // SAFETY: our own weak count keeps the pool alive.
        unsafe { ((*self.hdr.as_ref().owner).ops.weak)(self.hdr, 1) };
        Self { ..*self }
    }
}

impl<T: ?Sized + 'static> Drop for WeakLease<T> {
    fn drop(&mut self) {
        // SAFETY: our own weak count, given up once; nothing of the pool is touched afterwards.
        unsafe {
            let weak = (*(*self.hdr.as_ptr()).owner).ops.weak;
            weak(self.hdr, -1);
        }
    }
}

impl<T: ?Sized + 'static> fmt::Debug for WeakLease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakLease({:08x})", self.generation)
    }
}

/// The sole hold on a resource, with `&mut` access.
///
/// With `&mut` two payloads could be swapped, perhaps between two pools. A payload whose address
/// matters is therefore `!Unpin` (it has a [`PhantomPinned`](std::marker::PhantomPinned)). Its
/// unique lease gives `&T` only.
#[must_use = "a lease that is dropped at once gives its resource back"]
pub struct UniqueLease<T: 'static> {
    hdr: NonNull<Header>,
    val: NonNull<T>,
    _t: PhantomData<std::cell::Cell<T>>,
}

// SAFETY: it is the sole access to the payload, and owners hold `Send + Sync` payloads.
unsafe impl<T: Send + Sync> Send for UniqueLease<T> {}
// SAFETY: shared access to it gives `&T`.
unsafe impl<T: Send + Sync> Sync for UniqueLease<T> {}

impl<T: 'static> UniqueLease<T> {
    /// # Safety
    /// - The header's state is unique with one count, which passes to this lease; `val` is its
    ///   payload.
    #[inline]
    pub(crate) unsafe fn from_raw(hdr: NonNull<Header>, val: NonNull<T>) -> Self {
        Self { hdr, val, _t: PhantomData }
    }

    /// Converts into a shared lease. From now on handles find the resource again.
    pub fn share(self) -> Lease<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: our count keeps the header alive. No other thread writes the word while the
        // unique bit is set.
        unsafe {
            let hdr = this.hdr.as_ref();
            let s = hdr.state.load(Ordering::Relaxed);
            hdr.state.store(s & !UNIQUE, Ordering::Release);
            Lease::from_raw(this.hdr, this.val)
        }
    }

    /// As [`share`](Self::share), but no handle and no weak lease finds the resource in this
    /// generation: only clones of this lease lead to it. For what a library reads or writes
    /// without asking for other holders.
    pub fn share_unlisted(self) -> Lease<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the count passes to the lease. The unique bit keeps handles away; the drop of
        // the last lease gives the slot up with all its bits.
        unsafe { Lease::from_raw(this.hdr, this.val) }
    }
}

impl<T: Tagged + 'static> UniqueLease<T> {
    /// The resource's handle. While this lease lives, no handle gives a lease.
    pub fn handle(&self) -> Handle<T::Tag> {
        // SAFETY: our count keeps the header alive.
        let hdr = unsafe { self.hdr.as_ref() };
        Handle::new(hdr.index, hdr.publish())
    }
}

impl<T: 'static> Deref for UniqueLease<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the unique lease's count keeps the payload alive, and only this lease can write
        // it.
        unsafe { self.val.as_ref() }
    }
}

impl<T: Unpin + 'static> DerefMut for UniqueLease<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the unique bit keeps every other holder away, the lease was never mapped, and it
        // is exclusively borrowed.
        unsafe { self.val.as_mut() }
    }
}

impl<T: 'static> Drop for UniqueLease<T> {
    fn drop(&mut self) {
        // SAFETY: our count keeps the header alive. No other thread writes the word while the
        // unique bit is set. After the store of strong 0 no thread can take a count, so this thread
        // is alone with the payload, as `last` demands.
        unsafe {
            let hdr = &*self.hdr.as_ptr();
            let s = hdr.state.load(Ordering::Relaxed);
            hdr.state.store(s & !(UNIQUE | STRONG), Ordering::Relaxed);
            last(self.hdr);
        }
    }
}

impl<T: fmt::Debug + 'static> fmt::Debug for UniqueLease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UniqueLease").field(&&**self).finish()
    }
}

/// An exclusive claim on a resource that other leases may hold: one claim at a time, `&T` only.
#[must_use = "a claim that is dropped at once gives the turn back"]
pub struct Claim<T: ?Sized>(Lease<T>);

impl<T: ?Sized> Claim<T> {
    /// The lease under the claim.
    pub fn lease(&self) -> &Lease<T> {
        &self.0
    }
}

impl<T: ?Sized> Deref for Claim<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: ?Sized> Drop for Claim<T> {
    fn drop(&mut self) {
        self.0.word().state.fetch_and(!CLAIM, Ordering::Release);
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Claim<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Claim").field(&&*self.0).finish()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/lease.rs"]
mod tests;
