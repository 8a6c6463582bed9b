//! The table of segments: where the backend's memory lies, and which native buffer spans it.
//!
//! A segment is a heap with one buffer over all of it. A lease's address is the host address of its
//! first byte in shared storage, and the device address in private storage. Device addresses and
//! host addresses may be equal by accident. So a search by an address alone finds shared storage
//! only.
//!
//! Another device reaches a segment in shared storage through a buffer of its own over the same
//! bytes, an *alias*. The table keeps the aliases: they end with the segment, or when their device
//! closes.
//!
//! All locks here are leaves and are held for a few instructions.
//!
//! This module must not know allocators.

use crate::driver::ops::{NativeBuffer, NativeHeap, Storage};
use leasehold_core::sync::RwLock;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// A segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The buffer that spans the segment.
    pub native: NativeBuffer,
    /// The heap of its memory.
    pub heap: NativeHeap,
    /// The address of its first byte, as leases have it.
    pub addr: u64,
    /// Bytes.
    pub bytes: u64,
    /// The place of its memory.
    pub storage: Storage,
    /// The ordinal of its device.
    pub device: u32,
}

/// A place in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The buffer that spans the segment.
    pub native: NativeBuffer,
    /// The offset in the buffer.
    pub offset: u64,
    /// The place of its memory.
    pub storage: Storage,
    /// The ordinal of its device.
    pub device: u32,
}

impl Span {
    /// The place of a range, if all of it lies in the segment.
    fn place(&self, addr: u64, bytes: u64) -> Option<Place> {
        let offset = addr.checked_sub(self.addr)?;
        let inside = offset <= self.bytes && bytes <= self.bytes - offset;
        let Self { native, storage, device, .. } = *self;
        inside.then_some(Place { native, offset, storage, device })
    }
}

/// A buffer of another device over a segment. The drop of `keep` releases it.
pub(crate) struct Alias {
    pub(crate) native: NativeBuffer,
    pub(crate) keep: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct Table {
    by_native: HashMap<u64, Span>,
    /// By the segment's buffer and the ordinal of the alias's device.
    aliases: HashMap<(u64, u32), Alias>,
    /// Segments in shared storage, by address: the numbers of their buffers.
    shared: BTreeMap<u64, u64>,
}

/// The segments of all devices of a backend.
#[derive(Default)]
pub struct Spans(RwLock<Table>);

impl Spans {
    /// Adds a segment.
    pub(crate) fn add(&self, span: Span) {
        let mut table = self.0.write();
        table.by_native.insert(span.native.0, span);
        if span.storage == Storage::Shared {
            table.shared.insert(span.addr, span.native.0);
        }
    }

    /// Removes the segment of a buffer, and ends its aliases.
    pub(crate) fn remove(&self, native: NativeBuffer) {
        let mut table = self.0.write();
        if let Some(span) = table.by_native.remove(&native.0)
            && span.storage == Storage::Shared
        {
            table.shared.remove(&span.addr);
        }
        let ended: Vec<_> = table.aliases.extract_if(|key, _| key.0 == native.0).collect();
        drop(table);
        // The drop makes driver calls.
        drop(ended);
    }

    /// Ends the aliases of a device that closes.
    pub(crate) fn close(&self, device: u32) {
        let ended: Vec<_> = self.0.write().aliases.extract_if(|key, _| key.1 == device).collect();
        drop(ended);
    }

    /// The segment of a buffer.
    pub(crate) fn segment(&self, native: NativeBuffer) -> Option<Span> {
        self.0.read().by_native.get(&native.0).copied()
    }

    /// A device's buffer over another device's segment.
    pub(crate) fn alias(&self, native: NativeBuffer, device: u32) -> Option<NativeBuffer> {
        self.0.read().aliases.get(&(native.0, device)).map(|alias| alias.native)
    }

    /// Adds an alias, unless the device has one. Returns the one that the table keeps.
    pub(crate) fn add_alias(
        &self,
        native: NativeBuffer,
        device: u32,
        alias: Alias,
    ) -> NativeBuffer {
        let mut table = self.0.write();
        let mut extra = None;
        let kept = match table.aliases.entry((native.0, device)) {
            Entry::Occupied(kept) => {
                extra = Some(alias.keep);
                kept.get().native
            }
            Entry::Vacant(place) => place.insert(alias).native,
        };
        drop(table);
        drop(extra);
        kept
    }

    /// The place of `bytes` bytes at an address. `native` is the number of the spanning buffer, as
    /// bindings have it, or 0 if it is not known. `None` for memory that this backend does not
    /// have, and for a range that exceeds its segment.
    #[must_use]
    pub fn of(&self, native: u64, addr: u64, bytes: u64) -> Option<Place> {
        let table = self.0.read();
        let native = match native {
            0 => *table.shared.range(..=addr).next_back()?.1,
            native => native,
        };
        table.by_native.get(&native)?.place(addr, bytes)
    }

    /// Calls `f` with each heap of a device, without the lock.
    pub fn for_each_heap(&self, device: u32, f: impl FnMut(NativeHeap)) {
        let all: Vec<NativeHeap> = {
            let table = self.0.read();
            table.by_native.values().filter(|s| s.device == device).map(|s| s.heap).collect()
        };
        all.into_iter().for_each(f);
    }
}

impl fmt::Debug for Spans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spans({})", self.0.read().by_native.len())
    }
}

#[cfg(test)]
#[path = "../tests/unit/spans.rs"]
mod tests;
