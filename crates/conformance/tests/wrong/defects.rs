//! What can be wrong with a backend.

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// Streams wait for nobody.
    DropsWaits,
    /// A submission's operations run in reverse.
    Reorders,
    /// A value is complete as soon as it is submitted.
    CompletesEarly,
    /// Host waits report success whatever happened, and submissions to a poisoned stream too.
    LosesErrors,
    /// Each opening makes a device of its own.
    OpensAnew,
    /// A kernel is made anew each time.
    CompilesAgain,
    /// Graphs leave their last node out.
    CutsGraphs,
    /// Shutdown is always fine.
    IgnoresLeases,
    /// A lease on each stream is forgotten.
    LeaksStreams,
    /// Devices have another name each time.
    Renames,
    /// An unknown device is a panic.
    PanicsOnUnknown,
    /// Patterns are one byte.
    FillsBytes,
    /// Fills leave out the last element.
    FillsShort,
    /// Copies leave out the last byte of each row.
    CopiesShort,
    /// All stamps are equal.
    StopsTheClock,
    /// A submission returns when it is complete.
    BlocksInSubmit,
    /// Once memory has run out it is never there again.
    StaysEmpty,
    /// A host wait never returns.
    Hangs,
    /// A machine without devices has one.
    InventsDevices,
    /// In a forked child a submission never returns.
    HangsInForks,
    /// Streams are the driver's default one.
    DefaultStream,
    /// Signals of gates get lost.
    LosesSignals,
    /// Every block takes a whole granule.
    Wasteful,
    /// Only memory that was written can be read.
    ReadsWritten,
    /// Offsets have 32 bits.
    CutsOffsets,
    /// Copies between devices do nothing.
    SkipsPeers,
    /// Peer access can be asked for once.
    PeersOnce,
    /// An entry that does not exist is another one.
    AnyEntry,
    /// Graphs take library calls that misbehave.
    TakesForks,
    /// A fault of one device is every device's.
    LosesAll,
    /// A host call cannot wait for another stream.
    RefusesNested,
    /// A thread is always awake.
    Busy,
    /// Every stream is the same one.
    SameStream,
    /// A name that failed once fails for ever.
    RemembersFailures,
    /// What another thread drops stays.
    KeepsForeignDrops,
    /// A new stream makes its device the current one.
    SwitchesCurrent,
}
