//! Handles: numbers that name the ABI's objects. A handle that was closed, or never given, names
//! nothing.
//!
//! This module must not know the objects.

use crate::status::no_memory;
use leasehold::{Error, Result};
use leasehold_core::sync::{Arc, RwLock};

/// The objects of one kind.
pub(crate) struct Registry<T> {
    /// By index: the place's last handle, and the object unless it was removed.
    places: RwLock<Vec<(u64, Option<Arc<T>>)>>,
    /// The kind, in the upper bits of a handle: a device's handle is no pool's.
    kind: u64,
    what: &'static str,
}

impl<T> Registry<T> {
    pub(crate) const fn new(kind: u64, what: &'static str) -> Self {
        Self { places: RwLock::new(Vec::new()), kind: kind << 56, what }
    }

    /// Adds an object that is made with its own handle.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory.
    pub(crate) fn add(&self, make: impl FnOnce(u64) -> Arc<T>) -> Result<(u64, Arc<T>)> {
        let mut places = self.places.write();
        let at = places.iter().position(|p| p.1.is_none()).unwrap_or(places.len());
        if at == places.len() {
            places.try_reserve(1).map_err(|_| no_memory("handles", size_of::<Arc<T>>()))?;
            places.push((0, None));
        }
        let place = &mut places[at];
        // How often the place was used: 24 bits of it are enough to find mistakes.
        let used = ((place.0 >> 32) + 1) & 0xff_ffff;
        let handle = self.kind | used << 32 | at as u64;
        let object = make(handle);
        *place = (handle, Some(object.clone()));
        Ok((handle, object))
    }

    /// As [`unknown`], for this kind.
    pub(crate) fn unknown(&self, handle: u64) -> Error {
        unknown(self.what, handle)
    }

    /// The object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let places = self.places.read();
        let found = places.get((handle & 0xffff_ffff) as usize).filter(|p| p.0 == handle);
        found.and_then(|p| p.1.clone()).ok_or_else(|| self.unknown(handle))
    }

    /// Removes the object of a handle.
    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>> {
        let mut places = self.places.write();
        let place = places.get_mut((handle & 0xffff_ffff) as usize);
        // Another thread may have removed it, and the place may be another object's by now.
        let own = place.filter(|p| p.0 == handle);
        own.and_then(|p| p.1.take()).ok_or_else(|| self.unknown(handle))
    }
}

/// The kinds of counted objects: the first one has the number [`FIRST_KIND`] in its handles.
pub(crate) const KINDS: [&str; 9] = [
    "runtime",
    "buffer",
    "stream",
    "event",
    "kernel",
    "graph",
    "host timeline",
    "world",
    "communicator",
];
pub(crate) const FIRST_KIND: u8 = 0xa1;
/// The first bytes of handles of devices and pools.
pub(crate) const DEVICE: u64 = 0xd;
pub(crate) const POOL: u64 = 0xb;

/// The kind that a handle says it is of.
fn kind_of(handle: u64) -> Option<&'static str> {
    match (handle >> 56, (handle >> 24) as u8) {
        (DEVICE, _) => Some("device"),
        (POOL, _) => Some("pool"),
        (_, number) => KINDS.get(usize::from(number.wrapping_sub(FIRST_KIND))).copied(),
    }
}

/// The error for a handle that names nothing, or names it no more.
#[cold]
pub(crate) fn unknown(what: &str, handle: u64) -> Error {
    Error::invalid(match kind_of(handle).filter(|kind| *kind != what) {
        _ if handle == 0 => format!("no {what} was given: the handle is 0"),
        Some(kind) => format!("{handle:#x} (kind: {kind}) is no {what} that is open"),
        None => format!("{handle:#x} is no {what} that is open"),
    })
}

#[cfg(test)]
#[path = "../tests/unit/registry.rs"]
mod tests;
