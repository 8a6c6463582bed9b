//! Lists of free slots: intrusive lock-free stacks, each with a head of one word.
//!
//! # Protocol
//! A head is `orphan:1 | closing:1 | down:1 | tag:37 | index:24`. The tag grows with every pop and
//! push. So a CAS fails if the list was popped and pushed meanwhile. The link of a slot is the
//! `next` word of its header. The thread that is alone with the slot writes the link before the CAS
//! that publishes the slot. Any pop may read the link; a stale read is harmless, because the CAS
//! fails.
//!
//! - `closing`. Set by: a shutdown that decides, and for ever after one that succeeded. Effect: no
//!   pops; pushes go on, so that a last drop never waits.
//! - `down`. Set by: a shutdown that succeeded, and the drop of the pool's owner. Effect: pushes of
//!   idle slots are refused: the dropping thread destroys the payload.
//! - `orphan`. Set by: the drop of the pool's owner. Effect: each push takes one off the pool's
//!   remainder.
//!
//! Since flags and index share the word, each push either is in the count of the flag's setter or
//! sees the flag.
//!
//! This module must not know the content of a slot or the owner of the pool.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const INDEX_BITS: u32 = 24;
/// No slot: the end of a list.
pub(super) const NIL: u32 = (1 << INDEX_BITS) - 1;
const INDEX: u64 = NIL as u64;
const TAG_ONE: u64 = 1 << INDEX_BITS;
const FLAGS: u64 = CLOSING | DOWN | ORPHAN;
const TAG: u64 = !FLAGS & !INDEX;

/// No pops: a shutdown decides, or has succeeded.
pub(super) const CLOSING: u64 = 1 << 62;
/// No pushes of slots with a payload.
pub(super) const DOWN: u64 = 1 << 61;
/// The pool's owner is gone.
pub(super) const ORPHAN: u64 = 1 << 63;

/// The result of a pop.
#[must_use]
pub(super) enum Popped {
    /// A slot; the caller is alone with it.
    Index(u32),
    /// The list is empty.
    Empty,
    /// The list gives no slots at present.
    Closing,
}

/// The result of a push.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Pushed {
    /// The slot is in the list.
    Listed,
    /// The slot is in the list of a pool without an owner: the caller must take one off the
    /// remainder.
    Orphaned,
    /// The list is down; the slot is still the caller's.
    Refused,
}

/// A list of free slots.
pub(super) struct FreeList(AtomicU64);

impl FreeList {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(INDEX))
    }

    /// Returns whether the list was empty at this load.
    #[inline]
    pub(super) fn looks_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) & INDEX == INDEX
    }

    /// Returns whether the pool's owner is gone.
    pub(super) fn is_orphaned(&self) -> bool {
        self.0.load(Ordering::Acquire) & ORPHAN != 0
    }

    /// Takes the slot that was pushed last.
    #[inline]
    pub(super) fn pop(&self, next_of: impl Fn(u32) -> u32) -> Popped {
        self.pop_unless(CLOSING, next_of)
    }

    /// Like [`pop`](Self::pop), for the thread that closed the list.
    pub(super) fn pop_closed(&self, next_of: impl Fn(u32) -> u32) -> Option<u32> {
        match self.pop_unless(0, next_of) {
            Popped::Index(index) => Some(index),
            Popped::Empty | Popped::Closing => None,
        }
    }

    #[inline]
    fn pop_unless(&self, refuse: u64, next_of: impl Fn(u32) -> u32) -> Popped {
        let mut h = self.0.load(Ordering::Acquire);
        loop {
            if h & refuse != 0 {
                return Popped::Closing;
            }
            let index = h & INDEX;
            if index == INDEX {
                return Popped::Empty;
            }
            // The acquire load of `h` saw the push of `index`, and so its link.
            let new = successor(h, next_of(index as u32));
            match self.0.compare_exchange_weak(h, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Popped::Index(index as u32),
                Err(now) => h = now,
            }
        }
    }

    /// Adds slot `index`, whose link is `next`. A list that is down refuses a slot with a payload
    /// (`idle`).
    ///
    /// The arguments are pointers and not references: a reference would promise that the pool
    /// outlives the call, which is not certain.
    ///
    /// # Safety
    /// - The caller is alone with the slot, or owns the pool; `this` and `next` belong to the pool.
    /// - Unless the push is refused, the caller gives the slot up. Another thread may then free the
    ///   pool at any time.
    #[inline]
    pub(super) unsafe fn push(
        this: *const Self,
        next: *const AtomicU32,
        index: u32,
        idle: bool,
    ) -> Pushed {
        // SAFETY: the slot is out of the lists, so the pool is alive until the CAS succeeds.
        // Nothing is accessed after that.
        unsafe {
            let head = &raw const (*this).0;
            let mut h = (*head).load(Ordering::Relaxed);
            loop {
                if idle && h & DOWN != 0 {
                    return Pushed::Refused;
                }
                (*next).store((h & INDEX) as u32, Ordering::Relaxed);
                match (*head).compare_exchange_weak(
                    h,
                    successor(h, index),
                    Ordering::Release,
                    Ordering::Relaxed,
                ) {
                    Ok(_) if h & ORPHAN != 0 => return Pushed::Orphaned,
                    Ok(_) => return Pushed::Listed,
                    Err(now) => h = now,
                }
            }
        }
    }

    /// Sets flags and counts the slots that were in the list at that instant. No pops may run
    /// afterwards.
    pub(super) fn flag(&self, flags: u64, next_of: impl Fn(u32) -> u32) -> u64 {
        let mut at = (self.0.fetch_or(flags, Ordering::AcqRel) & INDEX) as u32;
        let mut count = 0;
        while at != NIL {
            count += 1;
            at = next_of(at) & NIL;
        }
        count
    }

    /// Ends a decision that changed nothing.
    pub(super) fn reopen(&self) {
        self.0.fetch_and(!CLOSING, Ordering::AcqRel);
    }
}

/// The head after `h` with slot `index` on top: the same flags, the next tag.
#[inline]
fn successor(h: u64, index: u32) -> u64 {
    (h & FLAGS) | (h.wrapping_add(TAG_ONE) & TAG) | (u64::from(index) & INDEX)
}
