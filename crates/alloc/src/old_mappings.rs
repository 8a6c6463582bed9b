//! Old mappings: ranges from which a piece was moved while the stream that gets it might still use
//! it there.
//!
//! The piece is mapped at its new place at once, and so has two mappings. The stream orders the
//! uses of both. The range of the old one is out of circulation until those uses are over. The next
//! growth or trim then unmaps it. Nobody waits for the device.

use crate::host;
use leasehold_core::{PackedTimepoint, Result};

/// A mapping to be removed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OldMapping {
    /// The range, an extent out of circulation.
    pub(crate) extent: u32,
    pub(crate) piece: u32,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// When the last use through this mapping is over.
    pub(crate) until: PackedTimepoint,
    /// A thread is unmapping it.
    pub(crate) taken: bool,
}

/// The old mappings of a heap.
#[derive(Default)]
pub(crate) struct OldMappings {
    all: Vec<OldMapping>,
    /// Entries for which plans have room.
    held: usize,
}

impl OldMappings {
    /// Makes room for so many more.
    pub(crate) fn hold(&mut self, more: usize) -> Result<()> {
        host::room(&mut self.all, self.held + more)?;
        self.held += more;
        Ok(())
    }

    pub(crate) fn unhold(&mut self, held: usize) {
        self.held -= held;
    }

    /// Adds one, for which there is room.
    pub(crate) fn push(&mut self, mapping: OldMapping) {
        debug_assert!(self.all.len() < self.all.capacity());
        self.all.push(mapping);
    }

    /// Whether a piece has one.
    pub(crate) fn has(&self, piece: u32) -> bool {
        self.all.iter().any(|m| m.piece == piece)
    }

    /// When their last uses are over.
    pub(crate) fn timepoints(&self) -> impl Iterator<Item = PackedTimepoint> {
        self.all.iter().map(|m| m.until)
    }

    /// Takes one whose uses are over.
    pub(crate) fn take(&mut self) -> Option<OldMapping> {
        let due = self.all.iter_mut().find(|m| !m.taken && m.until.has_passed())?;
        due.taken = true;
        Some(*due)
    }

    /// Forgets one that was taken. One that is not `gone` waits for its next turn, as the last one.
    pub(crate) fn end(&mut self, mapping: OldMapping, gone: bool) {
        self.all.retain(|m| m.extent != mapping.extent);
        if !gone {
            self.push(OldMapping { taken: false, ..mapping });
        }
    }
}
