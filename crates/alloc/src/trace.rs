//! The trace of an allocator: what it writes into its ring, if it has one.

use crate::buffer::Row;
use crate::residency::{End, Source, Step};
use crate::ring::{EventKind, Ring, TraceEvent};
use leasehold_core::{Result, TimelineId};

/// The trace ring, where there is one.
pub(crate) struct Trace(Option<Ring>);

impl Trace {
    /// A trace of the newest `events` events; of 0 none.
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub(crate) fn new(events: usize) -> Result<Self> {
        Ok(Self(if events > 0 { Some(Ring::new(events)?) } else { None }))
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The events there are, and how many were lost.
    pub(crate) fn read(&self) -> (Vec<TraceEvent>, u64) {
        self.0.as_ref().map_or((Vec::new(), 0), Ring::read)
    }

    /// Records what became of memory of the driver's.
    pub(crate) fn memory(&self, kind: EventKind, addr: u64, bytes: u64) {
        if let Some(ring) = &self.0 {
            ring.record(kind, 0, addr, bytes, 0, 0);
        }
    }

    /// Records what steps mapped and unmapped, and what they took, moved and gave back in all.
    /// Before anybody else may have the addresses.
    pub(crate) fn steps(&self, steps: &[Step]) {
        if !self.is_on() {
            return;
        }
        let (mut taken, mut moved, mut given) = (0, 0, 0);
        for s in steps {
            match (s.source, s.end) {
                (Source::New, End::Untouched | End::Destroyed) => {}
                (Source::New, _) => taken += s.bytes,
                (_, End::Destroyed) => given += s.bytes,
                (Source::Reclaimed { .. } | Source::Aliased { .. }, End::Mapped) => {
                    moved += s.bytes
                }
                _ => {}
            }
            if let (Some(from), true) =
                (s.source_addr(), !matches!(s.end, End::Untouched | End::LostAtSource))
            {
                self.memory(EventKind::Unmap, from, s.bytes);
            }
            if s.end == End::Mapped {
                self.memory(EventKind::Map, s.addr, s.bytes);
            }
        }
        let sums =
            [(EventKind::Growth, taken), (EventKind::Remap, moved), (EventKind::Trim, given)];
        for (kind, bytes) in sums.into_iter().filter(|&(_, bytes)| bytes > 0) {
            self.memory(kind, 0, bytes);
        }
    }

    /// Records a wait for a stream.
    pub(crate) fn wait(&self, kind: EventKind, stream: TimelineId, us: u64) {
        if let Some(ring) = &self.0 {
            ring.record(kind, 0, 0, us, stream.get(), 0);
        }
    }

    /// Records an allocation.
    pub(crate) fn alloc(&self, row: &Row, stream: TimelineId, tag: u32) {
        if let Some(ring) = &self.0 {
            let b = &row.buffer;
            ring.record(EventKind::Alloc, id_of(row), b.addr(), b.len(), stream.get(), tag);
        }
    }

    /// Records an allocation of `bytes` that failed.
    pub(crate) fn failed(&self, bytes: u64, stream: TimelineId, tag: u32) {
        if let Some(ring) = &self.0 {
            ring.record(EventKind::OutOfMemory, 0, 0, bytes, stream.get(), tag);
        }
    }

    /// Records a free.
    pub(crate) fn free(&self, row: &Row) {
        if let Some(ring) = &self.0 {
            let b = &row.buffer;
            let home = b.home_timeline();
            // The stream that used it last, where that is another one.
            let mut stream = home;
            b.for_each_use(|s| {
                if stream == home && !s.has_passed() {
                    stream = s.timeline_id();
                }
            });
            ring.record(EventKind::Free, id_of(row), b.addr(), b.len(), stream.get(), b.tag());
        }
    }
}

/// A name of the allocation that holds the row, never used again.
pub(crate) fn id_of(row: &Row) -> u64 {
    u64::from(row.header.generation()) << 32 | u64::from(row.header.index())
}
