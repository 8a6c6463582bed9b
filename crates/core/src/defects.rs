//! Mistakes that can be planted in the crates, so that `leasehold stress` shows that it would find
//! them. Never in a build that ships: without the feature `planted-defects` every question is
//! answered with `false` while compiling.
//!
//! With it, the variable `LEASEHOLD_DEFECT` names the one mistake of a process. This module must
//! not know how they are found.

/// A mistake, and the crate that makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Defect {
    /// `core`: a line that knows any value of another line believes to know all of them.
    KnowsTooMuch,
    /// `core`: now and then a lease that is dropped keeps its count.
    LeaseForgotten,
    /// `alloc`: freed memory counts as ready while its last use goes on.
    PassedEarly,
    /// `alloc`: reads on streams that a buffer was not allocated for are not noted.
    ReadUnmarked,
    /// `hal`: a node of a graph that reads does not wait for the one that wrote.
    ReadBeforeWrite,
    /// `leasehold`: a write does not wait for the reads since the last one.
    WriteBeforeRead,
    /// `leasehold`: a graph that reads a buffer and then writes it is taken to read it alone.
    WriteUnrecorded,
    /// `leasehold`: an update leaves the old buffers in the nodes.
    OldBuffers,
    /// `leasehold`: a copy of rows takes the smaller pitch for both sides.
    SmallerPitch,
    /// `leasehold`: submissions of two threads with a common buffer do not see each other.
    RecordUnlocked,
    /// `leasehold`: an update leaves the old grids in the nodes.
    OldGrid,
    /// `leasehold`: who does not wait for a stream's turn does not get it while work is pending
    /// either.
    TurnRefused,
    /// `leasehold`: who waits for a stream's completion does not hear of its failure.
    CompletionLost,
    /// `leasehold`: a copy between backends goes up before it has come down.
    HandoverSkipped,
    /// `leasehold`: a runtime that is opened again is not found by the next who opens it.
    OpenedTwice,
    /// `cpu`: a queue does not wait for other queues.
    WaitSkipped,
    /// `sim`: a copy leaves out its last row.
    RowLeftOut,
}

impl Defect {
    /// All of them.
    pub const ALL: [Defect; 17] = [
        Defect::KnowsTooMuch,
        Defect::LeaseForgotten,
        Defect::PassedEarly,
        Defect::ReadUnmarked,
        Defect::ReadBeforeWrite,
        Defect::WriteBeforeRead,
        Defect::WriteUnrecorded,
        Defect::OldBuffers,
        Defect::SmallerPitch,
        Defect::RecordUnlocked,
        Defect::OldGrid,
        Defect::TurnRefused,
        Defect::CompletionLost,
        Defect::HandoverSkipped,
        Defect::OpenedTwice,
        Defect::WaitSkipped,
        Defect::RowLeftOut,
    ];
}

/// Whether this mistake is made.
#[cfg(not(feature = "planted-defects"))]
#[inline(always)]
#[must_use]
pub const fn planted(_: Defect) -> bool {
    false
}

#[cfg(feature = "planted-defects")]
pub use on::*;

#[cfg(feature = "planted-defects")]
mod on {
    use super::Defect;
    use std::sync::OnceLock;

    /// The variable's value.
    pub fn named() -> Option<&'static str> {
        static NAMED: OnceLock<Option<String>> = OnceLock::new();
        NAMED.get_or_init(|| std::env::var("LEASEHOLD_DEFECT").ok()).as_deref()
    }

    /// Whether this mistake is made.
    #[must_use]
    pub fn planted(defect: Defect) -> bool {
        static WHICH: OnceLock<Option<Defect>> = OnceLock::new();
        *WHICH.get_or_init(|| Defect::ALL.into_iter().find(|d| named() == Some(&format!("{d:?}")))) == Some(defect)
    }
}
