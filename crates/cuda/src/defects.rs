//! Mistakes that can be planted, so that tests show that they would be found. Never in a build that ships.
//!
//! This module must not know how they are found.

/// A mistake in the order of things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Defect {
    /// A stream does not wait for another one's value.
    MissingWait,
    /// A mark that was recorded too early is reused.
    StaleMark,
    /// Memory is given to another stream although its last use is not over.
    ReuseBeforeCompletion,
    /// An update of a graph leaves the old addresses in the node.
    StaleGraphAddress,
    /// What keeps the host memory of an upload alive is given up at once.
    KeepDroppedEarly,
    /// A value is published before the host has done its part.
    EarlyPublication,
    /// What is held back is given to the driver in another order.
    DeferredOutOfOrder,
    /// A mark's event is recorded again before the wait for it was given to the driver.
    EventRecycledEarly,
    /// A node of a graph does not wait for all that it must.
    MissingEdge,
    /// The word that says that work is over is written before the work.
    WordBeforeWork,
}

impl Defect {
    /// All of them.
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
}
