//! The one error type that crosses a public border.
//!
//! Each variant is a thing that a caller can act on; each message says what was asked, of which object, and what to do.
//! Errors are small (a result of a word fits in registers or on a line), `Clone` (a poisoned stream returns its cause to every
//! later caller), and carry no backtrace.
//!
//! This module must not know any device.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Text of an error: a literal costs nothing.
pub type Text = Cow<'static, str>;

/// A result with the runtime's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[doc(alias("INFINICORE_CHECK_ERROR", "throwError"))]
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that can never be right: a zero block size, a misaligned offset, a size that overflows.
    #[error("invalid argument: {0}")]
    InvalidArgument(Text),
    /// A call that is right at another time: a manager that is not configured, an event that was never recorded.
    #[error("invalid state: {0}")]
    InvalidState(Text),
    /// The handle's resource is gone, or the handle belongs to another pool.
    #[error(
        "stale handle: {resource} {handle} names nothing that lives; it was released or belongs to another manager"
    )]
    StaleHandle {
        /// The kind of resource.
        resource: &'static str,
        /// The handle as it prints.
        handle: Box<str>,
    },
    /// Nothing bears this name.
    #[error("not found: {0}")]
    NotFound(Text),
    /// Something holds it exclusively.
    #[error("occupied: {resource} is held exclusively; finish or drop what holds it first")]
    Occupied {
        /// The kind of resource.
        resource: &'static str,
    },
    /// A manager cannot shut down while others hold its resources.
    #[error("leases outstanding: {strong} strong and {weak} weak leases on {resource} must be dropped first")]
    LeasesOutstanding {
        /// The kind of resource.
        resource: &'static str,
        /// Resources that somebody holds.
        strong: u64,
        /// Weak leases.
        weak: u64,
    },
    /// The device, the host or a table has no room.
    #[error("out of memory: {0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The request does not fit a budget: of bytes, which the caller set, or of a pool's resources.
    #[error("over budget: {requested} {unit} requested, {used} of {limit} in use; {cure}", cure = unit.cure())]
    OverBudget {
        /// What is counted.
        unit: Budgeted,
        /// How many were asked for.
        requested: u64,
        /// How many are in use.
        used: u64,
        /// The budget.
        limit: u64,
    },
    /// The device does not answer any more. Everything on it is lost; leases still drop.
    #[error("device lost: {cause}")]
    DeviceLost {
        /// The first cause.
        cause: Arc<str>,
    },
    /// A submission failed while it ran: the stream is poisoned from that point on.
    #[error("{0}")]
    Fault(Arc<Fault>),
    /// The backend or the device is not there.
    #[error("unavailable: {0}")]
    Unavailable(Text),
    /// This backend or device cannot do it.
    #[error("unsupported: {0}")]
    Unsupported(Text),
    /// The deadline passed first; nothing was lost.
    #[error("timeout: {0}")]
    Timeout(Text),
    /// Not allowed while recording, or on what is being recorded.
    #[error("recording: {rule}")]
    Recording {
        /// The rule that was broken.
        rule: Text,
    },
    /// An update changes the shape of the graph, which this exec cannot take.
    #[error("topology changed: {0}")]
    TopologyChanged(Text),
    /// The graph's memory is suspended; resume it first.
    #[error("suspended: {0}")]
    Suspended(Text),
    /// Kernel source did not compile.
    #[error("compile error: {log}")]
    Compile {
        /// The compiler's log.
        log: Box<str>,
    },
    /// The vendor's driver refused a call for a reason that has no variant of its own.
    #[error("driver: {api} failed with {name} ({code})")]
    Driver {
        /// The driver's function.
        api: &'static str,
        /// Its code.
        code: i32,
        /// The code's name.
        name: Box<str>,
    },
}

/// What a budget counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Budgeted {
    /// Bytes of memory.
    Bytes,
    /// Streams of a device.
    Streams,
    /// Resources of a pool.
    Resources,
}

impl Budgeted {
    fn cure(self) -> &'static str {
        match self {
            Self::Bytes => "free some, or raise the budget",
            Self::Streams => "drop some (each is free again once its work is over), or let threads share one",
            Self::Resources => "drop some, or make the pool larger",
        }
    }
}

impl fmt::Display for Budgeted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes",
            Self::Streams => "streams",
            Self::Resources => "resources of the pool",
        })
    }
}

/// Why there was no memory, and where it is.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Where: `cpu:0 device memory`, `lines`, `slots of the stream pool`.
    pub site: Text,
    /// Bytes (or entries) asked for.
    pub requested: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Bytes that leases hold.
    pub live: u64,
    /// Free bytes that are ready for anybody.
    pub free_ready: u64,
    /// Free bytes whose last use has not completed.
    pub free_not_ready: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// Bytes that graphs hold.
    pub in_graphs: u64,
    /// The budget; `u64::MAX` when there is none.
    pub limit: u64,
    /// Where the memory is and who holds it, in bytes, the largest first. Parts of the sums above.
    pub places: Vec<(Text, u64)>,
    /// What was tried, in order, and what to do.
    pub notes: Vec<Text>,
}

impl OutOfMemory {
    /// A report about `site` for a request of `requested` bytes; the rest is filled in by whoever knows it.
    #[must_use]
    pub fn new(site: impl Into<Text>, requested: u64) -> Self {
        Self { site: site.into(), requested, limit: u64::MAX, ..Self::default() }
    }

    /// Adds a note.
    #[must_use]
    pub fn note(mut self, note: impl Into<Text>) -> Self {
        self.notes.push(note.into());
        self
    }
}

impl From<OutOfMemory> for Error {
    fn from(report: OutOfMemory) -> Self {
        Error::OutOfMemory(Box::new(report))
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requested from {}", self.requested, self.site)?;
        if self.reserved != 0 || self.live != 0 {
            write!(
                f,
                "; {} reserved, {} live, {} free (largest {}), {} free but still in use by a stream, {} in graphs",
                self.reserved, self.live, self.free_ready, self.largest_free, self.free_not_ready, self.in_graphs
            )?;
        }
        if self.limit != u64::MAX {
            write!(f, "; budget {}", self.limit)?;
        }
        for (i, (place, bytes)) in self.places.iter().enumerate() {
            write!(f, "{}{bytes} {place}", if i == 0 { "; of it: " } else { ", " })?;
        }
        for note in &self.notes {
            write!(f, "; {note}")?;
        }
        Ok(())
    }
}

/// A submission that failed while it ran.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Fault {
    /// The operation, by the name it bears in the library (`dispatch rms_norm`, `copy`, `host call`).
    pub op: Text,
    /// The stream, as it prints.
    pub stream: Text,
    /// The submission's index on its stream.
    pub submission: u64,
    /// What happened.
    pub cause: Text,
}

impl Fault {
    /// A fault of operation `op`, submission `submission` of `stream`.
    #[must_use]
    pub fn new(op: impl Into<Text>, stream: impl Into<Text>, submission: u64, cause: impl Into<Text>) -> Self {
        Self { op: op.into(), stream: stream.into(), submission, cause: cause.into() }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::Fault(Arc::new(fault))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed in submission {} of {}: {}", self.op, self.submission, self.stream, self.cause)
    }
}

impl Error {
    /// `InvalidArgument` with a message.
    #[cold]
    pub fn invalid(what: impl Into<Text>) -> Self {
        Error::InvalidArgument(what.into())
    }

    /// `InvalidState` with a message.
    #[cold]
    pub fn state(what: impl Into<Text>) -> Self {
        Error::InvalidState(what.into())
    }

    /// `Recording` with the rule that was broken.
    #[cold]
    pub fn recording(rule: impl Into<Text>) -> Self {
        Error::Recording { rule: rule.into() }
    }

    /// `StaleHandle` for a handle of `resource`.
    #[cold]
    pub fn stale(resource: &'static str, handle: impl fmt::Debug) -> Self {
        Error::StaleHandle { resource, handle: format!("{handle:?}").into_boxed_str() }
    }

    /// A short, stable name of the variant, for tables and JSON.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Error::InvalidArgument(_) => "InvalidArgument",
            Error::InvalidState(_) => "InvalidState",
            Error::StaleHandle { .. } => "StaleHandle",
            Error::NotFound(_) => "NotFound",
            Error::Occupied { .. } => "Occupied",
            Error::LeasesOutstanding { .. } => "LeasesOutstanding",
            Error::OutOfMemory(_) => "OutOfMemory",
            Error::OverBudget { .. } => "OverBudget",
            Error::DeviceLost { .. } => "DeviceLost",
            Error::Fault(_) => "Fault",
            Error::Unavailable(_) => "Unavailable",
            Error::Unsupported(_) => "Unsupported",
            Error::Timeout(_) => "Timeout",
            Error::Recording { .. } => "Recording",
            Error::TopologyChanged(_) => "TopologyChanged",
            Error::Suspended(_) => "Suspended",
            Error::Compile { .. } => "Compile",
            Error::Driver { .. } => "Driver",
        }
    }
}

const _: () = assert!(size_of::<Error>() <= 40);
const _: () = {
    const fn shared<T: Send + Sync + 'static>() {}
    shared::<Error>();
};
