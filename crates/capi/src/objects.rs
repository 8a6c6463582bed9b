//! The runtime's objects by handle: counted, and looked up without a lock.
//!
//! # Protocol
//! A handle is `core`'s: index and generation of a slot, and the kind in bits that no index has.
//! An object has the count of its callers, which `retain` and `release` change. While that is not
//! 0 the object holds one lease of itself. A call takes another lease for as long as it lasts. So
//! the last `release` ends the object at once, or the last call that uses it meanwhile does.
//!
//! A count of 0 is final: a call that still finds the object is told that it is unknown.
//!
//! This module must not know what an object is.

use crate::registry::unknown;
use leasehold::{Error, Handle, Lease, Result};
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Mutex, OnceLock};
use leasehold_core::{PoolConfig, Recycle, Resource, SlotPool, Tagged};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Deref;

/// A kind of objects with handles.
pub(crate) trait Kind: Send + Sync + Sized + 'static {
    /// The kind's word in messages.
    const NAME: &'static str;
    /// The kind's number in handles: not 0.
    const NUMBER: u8;
}

/// The bits of a handle that have the kind; an index lies below.
const KIND_SHIFT: u32 = 24;
const KIND_MASK: u64 = 0xff << KIND_SHIFT;

/// An object, and how many callers hold it.
pub(crate) struct Object<T> {
    callers: AtomicU32,
    /// The callers' common lease.
    own: Mutex<Option<Lease<Object<T>>>>,
    value: T,
}

impl<T: Kind> Tagged for Object<T> {
    type Tag = T;
}

/// Makes objects of values that are given.
struct Given<T>(PhantomData<fn(T)>);

impl<T: Kind> Resource for Given<T> {
    type Payload = Object<T>;
    type Request<'a> = Cell<Option<T>>;
    const NAME: &'static str = T::NAME;

    fn create(&self, _: Handle<T>, value: &Cell<Option<T>>) -> Result<Object<T>> {
        let value = value.take().ok_or_else(|| Error::state("an object was made twice"))?;
        Ok(Object { callers: AtomicU32::new(0), own: Mutex::new(None), value })
    }

    fn recycle(&self, _: &mut Object<T>) -> Recycle {
        Recycle::Destroy
    }
}

/// The objects of one kind.
pub(crate) struct Objects<T: Kind>(OnceLock<SlotPool<Given<T>>>);

/// An object in use by a call.
pub(crate) struct Used<T: Kind>(Lease<Object<T>>);

impl<T: Kind> Deref for Used<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: Kind> Objects<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn pool(&self) -> Result<&SlotPool<Given<T>>> {
        if self.0.get().is_none() {
            let made = SlotPool::new(Given(PhantomData), PoolConfig::default())?;
            // Of two threads that come first one keeps its own.
            drop(self.0.set(made));
        }
        self.0.get().ok_or_else(|| Error::state("no objects"))
    }

    /// Adds an object, which one caller holds.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory; `InvalidState` if there are too many.
    pub(crate) fn add(&self, value: T) -> Result<u64> {
        let lease = self.pool()?.acquire(&Cell::new(Some(value)))?;
        let bits = lease.handle().to_bits().get();
        if bits & KIND_MASK != 0 {
            return Err(Error::state(format!(
                "a handle has room for {} objects of a kind ({}); release some",
                1 << KIND_SHIFT,
                T::NAME
            )));
        }
        let handle = bits | u64::from(T::NUMBER) << KIND_SHIFT;
        *lease.own.lock() = Some(lease.clone());
        // A thread that guessed the handle finds nothing before.
        lease.callers.store(1, Ordering::Release);
        Ok(handle)
    }

    /// The object of a handle, for one call.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle that names nothing, or names it no more.
    #[inline(always)]
    pub(crate) fn get(&self, handle: u64) -> Result<Used<T>> {
        if handle & KIND_MASK == u64::from(T::NUMBER) << KIND_SHIFT
            && let Some(pool) = self.0.get()
            && let Some(own) = Handle::from_bits(handle & !KIND_MASK)
            && let Ok(lease) = pool.lease(own)
            && lease.callers.load(Ordering::Acquire) != 0
        {
            return Ok(Used(lease));
        }
        Err(unknown(T::NAME, handle))
    }

    /// Adds a caller.
    pub(crate) fn retain(&self, handle: u64) -> Result<()> {
        let object = self.get(handle)?;
        let more = |n: u32| if n == 0 { None } else { n.checked_add(1) };
        match object.0.callers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(()),
            Err(0) => Err(unknown(T::NAME, handle)),
            Err(_) => Err(Error::state(format!("{} {handle:#x} is held too often", T::NAME))),
        }
    }

    /// Takes a caller away. The last one ends the object, once no call uses it.
    pub(crate) fn release(&self, handle: u64) -> Result<()> {
        let object = self.get(handle)?;
        let less = |n: u32| n.checked_sub(1);
        match object.0.callers.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less) {
            Ok(1) => {
                let own = object.0.own.lock().take();
                // Without the lock: what ends may be anybody's.
                drop((own, object));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) => Err(unknown(T::NAME, handle)),
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/objects.rs"]
mod tests;
