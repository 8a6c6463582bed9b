//! Planted defects: mistakes that a test build can contain, so that tests show that they would find
//! them. A shipped build contains none.
//!
//! This module must not know how the defects are found.

/// A mistake in the order of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Defect {
    /// A stream does not wait for another stream's value.
    MissingWait,
    /// A stream reuses a recorded event that was recorded too early.
    StaleMark,
    /// Memory goes to another stream although its last use is not over.
    ReuseBeforeCompletion,
    /// An update of a graph leaves the old addresses in the node.
    StaleGraphAddress,
    /// The keep of an upload's host memory is dropped at once.
    KeepDroppedEarly,
    /// A value is published before the host has done its part.
    EarlyPublication,
    /// Deferred submissions go to the driver in another order.
    DeferredOutOfOrder,
    /// A recorded event's event is recorded again before the driver has got the wait for it.
    EventRecycledEarly,
    /// A node of a graph lacks a dependency.
    MissingEdge,
    /// The completion word is written before the work.
    WordBeforeWork,
    /// CUDA: an epoch of an external stream is published without an event.
    ExternalUnrecorded,
    /// CUDA: an epoch of an external stream is closed by the event of an earlier epoch.
    ExternalStaleEvent,
    /// CUDA: an external stream does not wait for another stream's memory.
    ExternalWaitSkipped,
    /// Metal: a compute pass does not wait for the stream's fence.
    MissingFence,
    /// Metal: an encoder is released before it has ended.
    OpenEncoder,
    /// Metal: an upload's staging memory is given back at once.
    StagingReusedEarly,
}

impl Defect {
    /// All defects.
    pub const ALL: [Defect; 10] = [
        Defect::MissingWait,
        Defect::StaleMark,
        Defect::ReuseBeforeCompletion,
        Defect::StaleGraphAddress,
        Defect::KeepDroppedEarly,
        Defect::EarlyPublication,
        Defect::DeferredOutOfOrder,
        Defect::EventRecycledEarly,
        Defect::MissingEdge,
        Defect::WordBeforeWork,
    ];

    /// The defects that the tests of the Metal backend plant.
    pub const METAL: [Defect; 10] = [
        Defect::MissingWait,
        Defect::StaleMark,
        Defect::ReuseBeforeCompletion,
        Defect::StaleGraphAddress,
        Defect::KeepDroppedEarly,
        Defect::EarlyPublication,
        Defect::DeferredOutOfOrder,
        Defect::MissingFence,
        Defect::OpenEncoder,
        Defect::StagingReusedEarly,
    ];

    /// The defects of external streams.
    pub const EXTERNAL: [Defect; 3] =
        [Defect::ExternalUnrecorded, Defect::ExternalStaleEvent, Defect::ExternalWaitSkipped];
}
