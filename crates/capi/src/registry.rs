//! Handles: numbers that name the ABI's objects. A handle that was closed, or never given, names
//! nothing.
//!
//! This module must not know the objects.

use leasehold::{Error, Result};
use leasehold_core::sync::{Arc, RwLock};

/// The objects of one kind.
pub(crate) struct Registry<T> {
    /// By index: how often the place was used, and the object.
    places: RwLock<Vec<(u32, Option<Arc<T>>)>>,
    /// The kind, in the upper bits of a handle: a device's handle is no pool's.
    kind: u64,
    what: &'static str,
}

impl<T> Registry<T> {
    pub(crate) const fn new(kind: u64, what: &'static str) -> Self {
        Self { places: RwLock::new(Vec::new()), kind: kind << 56, what }
    }

    /// Adds an object that is made with its own handle.
    pub(crate) fn add(&self, make: impl FnOnce(u64) -> Arc<T>) -> (u64, Arc<T>) {
        let mut places = self.places.write();
        let at = places.iter().position(|p| p.1.is_none()).unwrap_or(places.len());
        if at == places.len() {
            places.push((0, None));
        }
        let place = &mut places[at];
        // 24 bits of the count are enough to find mistakes.
        place.0 = (place.0 + 1) & 0xff_ffff;
        let handle = self.kind | u64::from(place.0) << 32 | at as u64;
        let object = make(handle);
        place.1 = Some(object.clone());
        (handle, object)
    }

    fn unknown(&self, handle: u64) -> Error {
        Error::invalid(format!("{handle:#x} is no {} that is open", self.what))
    }

    /// The object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let places = self.places.read();
        let found = places
            .get((handle & 0xffff_ffff) as usize)
            .filter(|p| self.kind | u64::from(p.0) << 32 == handle & !0xffff_ffff);
        found.and_then(|p| p.1.clone()).ok_or_else(|| self.unknown(handle))
    }

    /// Removes the object of a handle.
    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>> {
        let object = self.get(handle)?;
        let mut places = self.places.write();
        let place = places.get_mut((handle & 0xffff_ffff) as usize);
        // Another thread may have removed it.
        place.and_then(|p| p.1.take()).map(|_| object).ok_or_else(|| self.unknown(handle))
    }
}
