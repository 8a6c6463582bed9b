//! The defects of the wrong backends.

/// A defect of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// Streams ignore waits.
    DropsWaits,
    /// A submission's operations run in reverse.
    Reorders,
    /// A value is complete as soon as it is submitted.
    CompletesEarly,
    /// Host waits always report success, and so do submissions to a poisoned stream.
    LosesErrors,
    /// Each opening makes another device.
    OpensAnew,
    /// A pipeline is made again at each request.
    CompilesAgain,
    /// Graphs omit their last node.
    CutsGraphs,
    /// Shutdown always succeeds.
    IgnoresLeases,
    /// A lease on each stream is leaked.
    LeaksStreams,
    /// Devices have another name at each query.
    Renames,
    /// An unknown device causes a panic.
    PanicsOnUnknown,
    /// Fill patterns have one byte.
    FillsBytes,
    /// Fills omit the last element.
    FillsShort,
    /// Copies omit the last byte of each row, and the last piece of several.
    CopiesShort,
    /// All timepoints are equal.
    StopsTheClock,
    /// A submission returns only when it is complete.
    BlocksInSubmit,
    /// Once memory has run out, every later request fails too.
    StaysEmpty,
    /// A host wait never returns.
    Hangs,
    /// A machine without devices has one.
    InventsDevices,
    /// In a forked child a submission never returns.
    HangsInForks,
    /// Streams are the driver's default stream.
    DefaultStream,
    /// Signals of host timelines are lost.
    LosesSignals,
    /// Every block takes a whole granule.
    Wasteful,
    /// Only memory that was written before can be read.
    ReadsWritten,
    /// Offsets have 32 bits.
    CutsOffsets,
    /// Copies between devices do nothing.
    SkipsPeers,
    /// Peer access can be requested only once.
    PeersOnce,
    /// An entry that does not exist is replaced by another one.
    AnyEntry,
    /// Graphs accept library calls that violate capture rules.
    TakesForks,
    /// A fault of one device affects every device.
    LosesAll,
    /// A host call cannot wait for another stream.
    RefusesNested,
    /// A thread is always awake.
    Busy,
    /// Every stream is the same one.
    SameStream,
    /// A name that failed once always fails.
    RemembersFailures,
    /// Objects that another thread drops are leaked.
    KeepsForeignDrops,
    /// A new stream makes its device the current one.
    SwitchesCurrent,
}
