//! Events for the trace ring: mappings of memory, and waits for streams.
//!
//! This module must not know blocks.

use crate::residency::{End, Source, Step};
use crate::ring::EventKind;
use crate::state::Inner;
use leasehold_core::TimelineId;

impl Inner {
    /// Records what became of memory of the driver's.
    pub(crate) fn trace(&self, kind: EventKind, addr: u64, bytes: u64) {
        if let Some(ring) = self.watch.as_ref().and_then(|w| w.ring()) {
            ring.record(kind, 0, addr, bytes, 0, 0);
        }
    }

    /// Records what steps mapped and unmapped, and what they took, moved and gave back in all.
    /// Before anybody else may have the addresses.
    pub(crate) fn trace_steps(&self, steps: &[Step]) {
        if self.watch.as_ref().and_then(|w| w.ring()).is_none() {
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
                self.trace(EventKind::Unmap, from, s.bytes);
            }
            if s.end == End::Mapped {
                self.trace(EventKind::Map, s.addr, s.bytes);
            }
        }
        let sums =
            [(EventKind::Growth, taken), (EventKind::Remap, moved), (EventKind::Trim, given)];
        for (kind, bytes) in sums.into_iter().filter(|&(_, bytes)| bytes > 0) {
            self.trace(kind, 0, bytes);
        }
    }

    /// Records a wait for a stream.
    pub(crate) fn trace_wait(&self, kind: EventKind, stream: TimelineId, us: u64) {
        if let Some(ring) = self.watch.as_ref().and_then(|w| w.ring()) {
            ring.record(kind, 0, 0, us, stream.get(), 0);
        }
    }
}
