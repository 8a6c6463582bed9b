//! Planted defects: deliberate errors that show that `leasehold stress` and the loom models would
//! find them.
//!
//! Every query is the constant `false` without the feature `planted-defects` and outside loom. No
//! shipped build has either. With the feature, the variable `LEASEHOLD_DEFECT` selects the one
//! defect of a process. Under loom a model selects it with `with_defect`. This module must not
//! know how a test finds the defects.

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
    /// `alloc`: memory beyond the end of a growing block goes before its last use is over.
    UnmappedEarly,
    /// `alloc`: the budget counts memory twice that a growing block takes from the driver.
    CountedTwice,
    /// `alloc`: memory that two growing blocks share goes with the first of them.
    SharedGivenBack,
    /// `hal`: a reading node of a graph does not wait for the writing node before it.
    ReadBeforeWrite,
    /// `hal`: a node of a graph may read early what another node of the graph writes.
    WrittenReadEarly,
    /// `hal`: the nodes around a loop or branch are not ordered by what its body writes.
    BodyUnseen,
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
    /// `leasehold`: the executables of a running graph are taken back, and no longer count.
    TakenInFlight,
    /// `leasehold`: an executable counts twice.
    ExecutableTwice,
    /// `leasehold`: the limit of a growing buffer says that all of it has memory.
    LimitMissed,
    /// `leasehold`: of growing parts whose limits change together, the last one's stays.
    PartLimitStays,
    /// `leasehold`: copies of one call are not ordered with the other uses of their last buffer.
    PieceUnordered,
    /// `leasehold`: copies of one call may read a source before its last write is over.
    SourceReadEarly,
    /// `leasehold`: a check looks at its bytes before they have come from the device.
    CheckedEarly,
    /// `capi`: a retain does not count.
    RetainLost,
    /// `capi`: the operands of a call count as only read.
    OperandAsRead,
    /// `capi`: a recording that is cancelled stays.
    RecordingLeaked,
    /// `engine`: a stream does not keep its partition.
    PartEndsEarly,
    /// `cpu`: a queue does not wait for other queues.
    WaitSkipped,
    /// `cpu`: a loop decides by the flag from before the body's run.
    FlagReadEarly,
    /// `sim`: a copy omits its last row.
    RowLeftOut,
    /// `collective`: rank 1 leaves every eighth call out.
    CallSkipped,
    /// `collective`: rank 1 gives the calls of a group to the library in the opposite order.
    OrderSwapped,
    /// `collective`: the library gets one element less than a call of several has, on all ranks.
    WrongCount,
    /// `collective`: rank 1 takes the next rank for the root.
    WrongRoot,
    /// `collective`: the order token does not order calls.
    LineMissing,
    /// `collective`: a call that fails does not fail its stream.
    LatePoison,
    /// `alloc`, in models: a thread enters a shard of the thread caches that another one is in.
    ShardUnlocked,
    /// `alloc`, in models: a thread leaves a shard before it has written the counters.
    ShardLeftEarly,
    /// `alloc`, in models: a thread leaves a shard without publishing what it wrote.
    ShardUnpublished,
    /// `alloc`, in models: two growths may take the same room of a budget.
    BudgetUnchecked,
    /// `alloc`, in models: an allocator that nobody holds does not count its live rows.
    OrphanUncounted,
    /// `core`, in models: a thread gives its number back before its last use.
    NumberReturnedEarly,
}

impl Defect {
    /// The defects that `leasehold stress` and `leasehold conformance` look for.
    pub const ALL: [Defect; 40] = [
        Defect::KnowsTooMuch,
        Defect::LeaseForgotten,
        Defect::PassedEarly,
        Defect::ReadUnmarked,
        Defect::ReadBeforeWrite,
        Defect::WrittenReadEarly,
        Defect::BodyUnseen,
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
        Defect::RetainLost,
        Defect::OperandAsRead,
        Defect::RecordingLeaked,
        Defect::WaitSkipped,
        Defect::FlagReadEarly,
        Defect::RowLeftOut,
        Defect::CallSkipped,
        Defect::OrderSwapped,
        Defect::WrongCount,
        Defect::WrongRoot,
        Defect::LineMissing,
        Defect::LatePoison,
        Defect::UnmappedEarly,
        Defect::CountedTwice,
        Defect::SharedGivenBack,
        Defect::LimitMissed,
        Defect::PartLimitStays,
        Defect::TakenInFlight,
        Defect::ExecutableTwice,
        Defect::PieceUnordered,
        Defect::SourceReadEarly,
        Defect::CheckedEarly,
        Defect::PartEndsEarly,
    ];
}

/// Returns whether this process contains the defect.
#[cfg(not(any(loom, feature = "planted-defects")))]
#[inline(always)]
#[must_use]
pub const fn planted(_: Defect) -> bool {
    false
}

#[cfg(any(loom, feature = "planted-defects"))]
pub use on::*;

#[cfg(loom)]
mod on {
    use super::Defect;
    use std::cell::Cell;

    std::thread_local! {
        // Loom runs all threads of a model on one.
        static WHICH: Cell<Option<Defect>> = const { Cell::new(None) };
    }

    /// Returns whether the model that runs contains the defect.
    #[must_use]
    pub fn planted(defect: Defect) -> bool {
        WHICH.get() == Some(defect)
    }

    /// Runs `f` with a defect.
    pub fn with_defect<T>(which: Defect, f: impl FnOnce() -> T) -> T {
        WHICH.set(Some(which));
        let result = f();
        WHICH.set(None);
        result
    }
}

#[cfg(all(feature = "planted-defects", not(loom)))]
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
