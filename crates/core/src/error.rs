//! The error type of all public functions.
//!
//! Each variant is a case that a caller can act on. Each message names the request, the object and
//! the remedy. Errors are small: a result of one word fits in registers or on a line. Errors are
//! `Clone`, because a poisoned stream returns its cause to every later caller. Errors carry no
//! backtrace.
//!
//! This module must not know any device.

use crate::panics::{Kept, quietly};
use std::borrow::Cow;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt::{self, Write as _};
use std::ops::Deref;
use std::sync::Arc;

/// The text of an error. A literal needs no allocation.
pub type Text = Cow<'static, str>;

/// A result with the runtime's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reasons for which a call fails.
#[doc(alias("INFINICORE_CHECK_ERROR", "throwError"))]
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is never valid: a zero block size, a misaligned offset, a size that
    /// overflows.
    #[error("invalid argument: {0}")]
    InvalidArgument(Text),
    /// A call that is valid at another time: a manager that is not configured, an event that was
    /// never recorded.
    #[error("invalid state: {0}")]
    InvalidState(Text),
    /// The handle's resource is gone, or the handle belongs to another pool.
    #[error(
        "stale handle: {resource} {handle} names nothing that lives; it was released or belongs to another manager; take the handle of a lease that is held"
    )]
    StaleHandle {
        /// The kind of resource.
        resource: &'static str,
        /// The handle as it prints.
        handle: Box<str>,
    },
    /// No object has this name.
    #[error("not found: {0}")]
    NotFound(Text),
    /// Another holder has the resource exclusively.
    #[error("occupied: {resource} is held exclusively; finish or drop what holds it first")]
    Occupied {
        /// The kind of resource.
        resource: &'static str,
    },
    /// A manager cannot shut down while other holders have its resources.
    #[error(
        "leases outstanding: {strong} strong and {weak} weak leases on {resource} must be dropped first"
    )]
    LeasesOutstanding {
        /// The kind of resource.
        resource: &'static str,
        /// Resources with a holder.
        strong: u64,
        /// Weak leases.
        weak: u64,
    },
    /// The device, the host or a table has no room.
    #[error("out of memory: {0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The request exceeds a budget: the caller's budget of bytes, or a pool's budget of resources.
    #[error("over budget: {}", unit.refusal(*requested, *used, *limit))]
    OverBudget {
        /// The counted unit.
        unit: Budgeted,
        /// The number requested.
        requested: u64,
        /// The number in use. Of bytes: those that are reserved, free ones too.
        used: u64,
        /// The budget.
        limit: u64,
    },
    /// The device does not answer any more. Everything on the device is lost. Leases can still be
    /// dropped.
    #[error("device lost: {cause}")]
    DeviceLost {
        /// The first cause.
        cause: Arc<str>,
    },
    /// A submission failed during its execution. The stream is poisoned from that timepoint on.
    #[error("{0}")]
    Fault(Arc<Fault>),
    /// A check of a stream found a value that it refuses. The stream is poisoned from the check on.
    #[error("{0}")]
    Check(Arc<Finding>),
    /// The backend or the device is not available.
    #[error("unavailable: {0}")]
    Unavailable(Text),
    /// This backend or device does not support the request.
    #[error("unsupported: {0}")]
    Unsupported(Text),
    /// The deadline passed first. The call had no other effect. As a stream's cause: a call of the
    /// stream waited for another rank in vain.
    #[error("timeout: {0}")]
    Timeout(Text),
    /// Another rank of a collective is gone, or has not come.
    #[error("rank {rank} is lost: {why}")]
    PeerLost {
        /// The rank in its communicator, or in its world.
        rank: u32,
        /// The reason to think so, and the remedy.
        why: Text,
    },
    /// Ranks made calls that do not belong together.
    #[error("mismatch: {0}")]
    Mismatch(Arc<Mismatch>),
    /// The call is not allowed while recording, or on an object that is being recorded.
    #[error("recording: {rule}")]
    Recording {
        /// The rule that was broken.
        rule: Text,
    },
    /// An update changes the graph's topology, which this executable graph does not accept.
    #[error("topology changed: {0}")]
    TopologyChanged(Text),
    /// The memory is suspended; resume it first.
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
        /// The code's name, and behind it what the driver said of the call, if it did.
        name: Box<str>,
    },
    /// A foreign error that passes through the runtime: from a host call, an operator or a
    /// writer.
    #[error("{0}")]
    Other(#[source] Foreign),
}

/// The text, which `main` prints of an error that it returns.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The finding of a check in device memory.
///
/// ```
/// use leasehold_core::{Error, Finding};
/// let error = Error::from(Finding::new("logits", 7, f64::NAN));
/// assert!(error.is_external() && error.to_string().contains("logits: element 7 is NaN"));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Finding {
    /// The name that the check was given.
    pub name: Text,
    /// The first element that the check refuses, counted from 0.
    pub index: u64,
    /// Its value.
    pub value: f64,
}

impl Finding {
    /// A finding of the check `name`: the value of element `index`.
    #[must_use]
    pub fn new(name: impl Into<Text>, index: u64, value: f64) -> Self {
        Self { name: name.into(), index, value }
    }
}

impl From<Finding> for Error {
    fn from(finding: Finding) -> Self {
        Error::Check(Arc::new(finding))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, index, value } = self;
        write!(
            f,
            "check {name}: element {index} is {value}; look for what wrote it, and go on with another stream"
        )
    }
}

/// Calls of two ranks that do not belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// The communicator's name and the call's number: `tp #183`.
    pub call: Text,
    /// The two ranks, each with its call there and the scope of the call.
    pub ranks: [(u32, Text); 2],
}

impl Mismatch {
    /// A mismatch of two ranks' calls, the lower rank first.
    #[must_use]
    pub fn new(call: impl Into<Text>, one: (u32, Text), other: (u32, Text)) -> Self {
        let ranks = if one.0 <= other.0 { [one, other] } else { [other, one] };
        Self { call: call.into(), ranks }
    }
}

impl From<Mismatch> for Error {
    fn from(mismatch: Mismatch) -> Self {
        Error::Mismatch(Arc::new(mismatch))
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [(one, first), (other, second)] = &self.ranks;
        write!(
            f,
            "{}: rank {one} {first}; rank {other} {second}; let all ranks make the same calls in the same order",
            self.call
        )
    }
}

/// Bytes of a MiB.
const MIB: u64 = 1 << 20;

/// A number of bytes, which prints with a unit up to EiB.
///
/// ```
/// use leasehold_core::Size;
/// let texts = [1000, 1 << 20, 1 << 40, u64::MAX].map(|n| Size(n).to_string());
/// assert_eq!(texts, ["1000 bytes", "1.0 MiB", "1.00 TiB", "16.00 EiB"]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let Self(n) = *self;
        let Some(unit) = (n.max(1).ilog2() / 10).checked_sub(1) else {
            return write!(f, "{n} bytes");
        };
        let value = n as f64 / (1u64 << (10 * (unit + 1))) as f64;
        write!(f, "{value:.*} {}", if unit < 2 { 1 } else { 2 }, UNITS[unit as usize])
    }
}

/// A number of bytes: exact below a MiB, from there on as a [`Size`].
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0"),
            n if n < MIB => write!(f, "{n} bytes"),
            n => Size(n).fmt(f),
        }
    }
}

/// The unit of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Budgeted {
    /// Bytes of memory.
    Bytes,
    /// Streams of a device.
    Streams,
    /// Resources of a pool.
    Resources,
    /// Bytes of the executables of graphs.
    Executables,
}

impl Budgeted {
    /// The reason why so many more were refused, and the remedy.
    fn refusal(self, requested: u64, used: u64, limit: u64) -> String {
        let of_bytes = matches!(self, Self::Bytes | Self::Executables);
        let count = |n: u64| if of_bytes { Bytes(n).to_string() } else { n.to_string() };
        let [wanted, used, most] = [requested, used, limit].map(count);
        let cure = match self {
            Self::Bytes if requested > limit => {
                return format!(
                    "{wanted} requested, but the whole budget is {most}; raise the budget, or ask for less"
                );
            }
            Self::Bytes => {
                return format!(
                    "{wanted} requested, {used} of {most} reserved; free some, or raise the budget"
                );
            }
            Self::Streams => {
                "drop some (each is free again once its work is over), or let threads share one"
            }
            Self::Resources => "drop some, or make the pool larger",
            Self::Executables => {
                return format!(
                    "{wanted} of graph executables requested, {used} of {most} in use; raise the graph budget, or record smaller graphs"
                );
            }
        };
        format!("{wanted} {self} requested, {used} of {most} in use; {cure}")
    }
}

impl fmt::Display for Budgeted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes",
            Self::Streams => "streams",
            Self::Resources => "resources of the pool",
            Self::Executables => "bytes of graph executables",
        })
    }
}

/// The circumstances of an allocation failure.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The failing component: `cpu:0 device memory`, `timelines`, `slots of the stream pool`.
    pub site: Text,
    /// Requested bytes (or entries).
    pub requested: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Bytes that leases hold.
    pub live: u64,
    /// Free bytes that any stream can use now.
    pub free_ready: u64,
    /// Free bytes whose last use has not completed.
    pub free_not_ready: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// Bytes held by graphs.
    pub in_graphs: u64,
    /// The budget; `u64::MAX` when there is none.
    pub limit: u64,
    /// The places and holders of memory, in bytes, the largest first. These are parts of the sums
    /// above.
    pub places: Vec<(Text, u64)>,
    /// The steps that were tried, in order, and the remedy.
    pub notes: Vec<Text>,
}

impl OutOfMemory {
    /// A report about `site` for a request of `requested` bytes. The caller fills in the other
    /// fields that it knows.
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
        // Without one of the sums the request may be one of entries.
        let is_of_bytes = self.reserved != 0 || self.live != 0;
        match self.requested {
            n if is_of_bytes || n >= MIB => write!(f, "{} requested from {}", Bytes(n), self.site)?,
            n => write!(f, "{n} requested from {}", self.site)?,
        }
        if is_of_bytes {
            write!(
                f,
                "; {} reserved, {} live, {} free (largest {}), {} free but still in use by a stream, {} in graphs",
                Bytes(self.reserved),
                Bytes(self.live),
                Bytes(self.free_ready),
                Bytes(self.largest_free),
                Bytes(self.free_not_ready),
                Bytes(self.in_graphs)
            )?;
        }
        if self.limit != u64::MAX {
            write!(f, "; budget {}", Bytes(self.limit))?;
        }
        for (i, (place, bytes)) in self.places.iter().enumerate() {
            write!(f, "{}{} {place}", if i == 0 { "; of it: " } else { ", " }, Bytes(*bytes))?;
        }
        for note in &self.notes {
            write!(f, "; {note}")?;
        }
        Ok(())
    }
}

/// An error of the program or of another library. It dereferences to that error.
///
/// Its text, its debug text and its drop never panic, whatever the foreign code does: threads of
/// the runtime report and drop it. The [source](std::error::Error::source) is the foreign error
/// itself, without this care.
#[derive(Clone)]
pub struct Foreign(Kept<Arc<dyn StdError + Send + Sync>>);

impl Foreign {
    /// The text that `show` writes. A panic of `show` ends the text.
    fn text(&self, show: impl FnOnce(&mut String, &dyn StdError) -> fmt::Result) -> String {
        let mut text = String::new();
        match quietly(|| show(&mut text, &**self.0)) {
            Some(Ok(())) => {}
            Some(Err(_)) => text.push_str(" (an error whose text failed)"),
            None => text.push_str(" (an error whose text panicked)"),
        }
        text
    }
}

impl Deref for Foreign {
    type Target = dyn StdError + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &**self.0
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text(|text, error| write!(text, "{error}")))
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alternate = f.alternate();
        f.write_str(&self.text(|text, error| match alternate {
            true => write!(text, "{error:#?}"),
            false => write!(text, "{error:?}"),
        }))
    }
}

/// A submission that failed during its execution.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Fault {
    /// The operation, by its name in the library (`dispatch rms_norm`, `copy`, `host call`).
    pub op: Text,
    /// The stream, as it prints.
    pub stream: Text,
    /// The submission's index on its stream.
    pub submission: u64,
    /// The cause.
    pub cause: Text,
}

impl Fault {
    /// A fault of operation `op`, submission `submission` of `stream`.
    #[must_use]
    pub fn new(
        op: impl Into<Text>,
        stream: impl Into<Text>,
        submission: u64,
        cause: impl Into<Text>,
    ) -> Self {
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
        write!(
            f,
            "{} failed in submission {} of {}: {}",
            self.op, self.submission, self.stream, self.cause
        )
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

    /// A foreign error, which is also the [source](std::error::Error::source) of this one.
    ///
    /// ```
    /// use leasehold_core::Error;
    /// let error = Error::other("the file has no header");
    /// assert_eq!((error.kind(), error.to_string().as_str()), ("Other", "the file has no header"));
    /// let error = Error::from(std::io::Error::other("disk full"));
    /// assert_eq!(error.to_string(), "disk full");
    /// ```
    #[cold]
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Other(Foreign(Kept::new(error.into().into())))
    }

    /// Returns whether there was no room, or not within a budget: what freeing memory may cure.
    ///
    /// ```
    /// use leasehold_core::{Budgeted, Error, OutOfMemory};
    /// let error = Error::from(OutOfMemory::new("cpu:0", 3 << 20));
    /// assert!(error.is_out_of_memory() && error.to_string().contains("3.0 MiB requested"));
    /// let unit = Budgeted::Streams;
    /// let streams = Error::OverBudget { unit, requested: 1, used: 256, limit: 256 };
    /// assert!(!streams.is_out_of_memory());
    /// ```
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory(_) | Error::OverBudget { unit: Budgeted::Bytes, .. })
    }

    /// Returns whether the cause lies outside the operation that failed: another rank, a deadline,
    /// or values that a check refuses. A stream has such a cause unchanged, not as a [`Fault`] of
    /// the operation.
    ///
    /// ```
    /// use leasehold_core::{Error, Mismatch};
    /// let (one, other) = ((2, "barrier".into()), (0, "send 1 f32 to 2".into()));
    /// let error = Error::from(Mismatch::new("tp #1", one, other));
    /// assert!(error.is_external());
    /// assert!(error.to_string().contains("tp #1: rank 0 send 1 f32 to 2; rank 2 barrier;"));
    /// ```
    #[must_use]
    pub fn is_external(&self) -> bool {
        matches!(
            self,
            Error::PeerLost { .. } | Error::Mismatch(_) | Error::Timeout(_) | Error::Check(_)
        )
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
            Error::Check(_) => "Check",
            Error::Unavailable(_) => "Unavailable",
            Error::Unsupported(_) => "Unsupported",
            Error::Timeout(_) => "Timeout",
            Error::PeerLost { .. } => "PeerLost",
            Error::Mismatch(_) => "Mismatch",
            Error::Recording { .. } => "Recording",
            Error::TopologyChanged(_) => "TopologyChanged",
            Error::Suspended(_) => "Suspended",
            Error::Compile { .. } => "Compile",
            Error::Driver { .. } => "Driver",
            Error::Other(_) => "Other",
        }
    }
}

/// A conversion that cannot fail fits where one that may is taken:
/// `impl TryInto<T, Error: Into<Error>>`.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::other(error)
    }
}

const _: () = assert!(size_of::<Error>() <= 40);
const _: () = {
    const fn shared<T: Send + Sync + 'static>() {}
    shared::<Error>();
};

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/error.rs"]
mod tests;
