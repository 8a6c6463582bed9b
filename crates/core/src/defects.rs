//! Planted defects: deliberate errors that show that `leasehold stress` would find them.
//!
//! Without the feature `planted-defects`, every query is the constant `false`. No shipped build has
//! this feature. With the feature, the variable `LEASEHOLD_DEFECT` selects the one defect of a
//! process. This module must not know how a test finds the defects.

/// A defect, and the crate that contains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Defect {
    /// `core`: a timeline that knows any value of another timeline claims to know all its values.
    KnowsTooMuch,
    /// `core`: from time to time, a dropped lease keeps its count.
    LeaseForgotten,
    /// `alloc`: freed memory counts as ready before its last use is over.
    PassedEarly,
    /// `alloc`: the allocator does not note reads on other streams than the buffer's own.
    ReadUnmarked,
    /// `hal`: a reading node of a graph does not wait for the writing node before it.
    ReadBeforeWrite,
    /// `leasehold`: a write does not wait for the reads since the last write.
    WriteBeforeRead,
    /// `leasehold`: a graph treats a buffer that it reads and then writes as only read.
    WriteUnrecorded,
    /// `leasehold`: an update leaves the old buffers in the nodes.
    OldBuffers,
    /// `leasehold`: a copy of rows takes the smaller pitch for both sides.
    SmallerPitch,
    /// `leasehold`: submissions of two threads that share a buffer are not ordered.
    RecordUnlocked,
    /// `leasehold`: an update leaves the old grids in the nodes.
    OldGrid,
    /// `leasehold`: a non-waiting request for a stream's turn is refused even if the only obstacle
    /// is pending work.
    TurnRefused,
    /// `leasehold`: a wait for a stream's completion does not report the stream's failure.
    CompletionLost,
    /// `leasehold`: the upload half of a copy between backends starts before the download half is
    /// over.
    HandoverSkipped,
    /// `leasehold`: a second open of a runtime that was opened again makes another runtime.
    OpenedTwice,
    /// `cpu`: a queue does not wait for other queues.
    WaitSkipped,
    /// `sim`: a copy omits its last row.
    RowLeftOut,
}

impl Defect {
    /// All defects.
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

/// Returns whether this process contains the defect.
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

    /// Returns whether this process contains the defect.
    #[must_use]
    pub fn planted(defect: Defect) -> bool {
        static WHICH: OnceLock<Option<Defect>> = OnceLock::new();
        *WHICH.get_or_init(|| Defect::ALL.into_iter().find(|d| named() == Some(&format!("{d:?}"))))
            == Some(defect)
    }
}
