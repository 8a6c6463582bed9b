//! The numbers that name a machine's objects.
//!
//! This module must not know the objects.

use leasehold_core::Error;
use std::fmt::Debug;

/// Names a queue. Numbers are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueId(pub u64);

/// Names an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// Names a semaphore: a growing value, raised and awaited by queues and the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SemaphoreId(pub u64);

/// Names a graph template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphId(pub u64);

/// Names an executable graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecId(pub u64);

/// Names a partition of a device's units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartitionId(pub u64);

/// Names a rank of a communicator. Numbers are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommId(pub u64);

/// The error for an object that is not there.
#[cold]
pub(super) fn missing(what: impl Debug) -> Error {
    Error::NotFound(format!("{what:?} does not exist").into())
}
