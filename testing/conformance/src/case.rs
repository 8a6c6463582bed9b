//! Cases: numbered statements about backends, with the code that checks each.
//!
//! This module must not know which code runs the cases.

use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::Error;
use std::fmt;
use std::str::FromStr;

/// The interface of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The traits of `hal`.
    Hal,
    /// `Runtime`, with the backend injected.
    Runtime,
    /// A C interface; the crates with one run such cases.
    Abi,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Hal => "hal",
            Tier::Runtime => "runtime",
            Tier::Abi => "abi",
        })
    }
}

/// A property of a device that a case requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Timelines that the host signals.
    HostTimelines,
    /// Timestamps.
    Timestamps,
    /// Graphs.
    Graphs,
    /// Loops and branches in graphs.
    Conditionals,
    /// Host calls in streams.
    HostCalls,
    /// Streams that make progress concurrently.
    ConcurrentStreams,
    /// A test kernel.
    Kernel(TestKernel),
    /// A way to delay a stream: host timelines, or the spinning kernel on concurrent streams.
    Hold,
    /// Library calls in streams.
    ForeignCalls,
    /// Device memory that keeps freed memory for reuse. Not available while each buffer comes
    /// directly from the driver
    /// ([`DebugOptions::pass_through`](leasehold::backend::DebugOptions::pass_through)).
    Pooling,
}

/// A further use of a case, beside testing a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Tag {
    /// Runs under a checker of every access (compute-sanitizer, valgrind), which is ten to a
    /// hundred times slower, with each buffer directly from the driver. The case submits work
    /// without faults and without calls that a driver refuses. The case reads no unwritten memory,
    /// needs little memory, and does not expect a freed block's address again.
    Sanitizer,
}

impl FromStr for Tag {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "sanitizer" => Ok(Tag::Sanitizer),
            _ => Err(Error::invalid(format!("tag `{text}`: there is only `sanitizer`"))),
        }
    }
}

/// The factory's backend that a case uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// [`Factory::backend`](crate::Factory::backend).
    Ordinary,
    /// [`Factory::one_worker`](crate::Factory::one_worker).
    OneWorker,
    /// [`Factory::faulty`](crate::Factory::faulty) if the factory has one, else the ordinary one.
    Faulty,
}

/// The process of a case, if the runner can start processes
/// ([`Filter::isolation`](crate::Filter::isolation)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// The runner's process.
    Shared,
    /// A process of its own, because the case is about the process itself.
    Own,
    /// A process of its own if a device fault is fatal to the process
    /// ([`Factory::fatal_faults`](crate::Factory::fatal_faults)), because the case causes one.
    OwnIfFatal,
}

/// The reason why a case ended early.
#[derive(Debug)]
pub enum Stop {
    /// The statement is false for this backend; the text describes the failure.
    Failed(String),
    /// The statement does not apply to this backend; the text is the reason.
    Skipped(String),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Failed(format!("unexpected error {}: {e}", e.kind()))
    }
}

/// The result of a case.
pub type Outcome<T = ()> = Result<T, Stop>;

/// A numbered statement about backends.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The number, which never changes.
    pub number: u16,
    /// The short statement.
    pub name: &'static str,
    /// The interface.
    pub tier: Tier,
    /// The required properties of the device.
    pub needs: &'static [Need],
    /// Says whether the case submits work through the environment, and so runs replayed too.
    pub replayed: bool,
    /// The backend that the case uses.
    pub setup: Setup,
    /// The process of the case.
    pub process: Process,
    /// Further uses of the case.
    pub tags: &'static [Tag],
    /// Checks the statement.
    pub run: fn(&Env) -> Outcome,
}

impl Case {
    /// A case over the traits of `hal`.
    pub const fn hal(
        number: u16,
        name: &'static str,
        needs: &'static [Need],
        run: fn(&Env) -> Outcome,
    ) -> Self {
        Self::new(number, name, Tier::Hal, needs, run)
    }

    /// A case over the runtime.
    pub const fn runtime(
        number: u16,
        name: &'static str,
        needs: &'static [Need],
        run: fn(&Env) -> Outcome,
    ) -> Self {
        Self::new(number, name, Tier::Runtime, needs, run)
    }

    const fn new(
        number: u16,
        name: &'static str,
        tier: Tier,
        needs: &'static [Need],
        run: fn(&Env) -> Outcome,
    ) -> Self {
        let (setup, process) = (Setup::Ordinary, Process::Shared);
        Self { number, name, tier, needs, replayed: false, setup, process, tags: &[], run }
    }

    /// Runs the case eager and replayed.
    pub const fn replayed(self) -> Self {
        Self { replayed: true, ..self }
    }

    /// Runs the case on a backend with the minimum number of workers.
    pub const fn one_worker(self) -> Self {
        Self { setup: Setup::OneWorker, ..self }
    }

    /// Runs the case on a backend whose driver fails on demand, if the factory has one.
    pub const fn faulty(self) -> Self {
        Self { setup: Setup::Faulty, ..self }
    }

    /// Runs the case in a process of its own.
    pub const fn alone(self) -> Self {
        Self { process: Process::Own, ..self }
    }

    /// Marks the case for [`Tag::Sanitizer`].
    pub const fn sanitizer(self) -> Self {
        Self { tags: &[Tag::Sanitizer], ..self }
    }

    /// Runs the case in a process of its own if its device fault is fatal to the process.
    pub const fn fatal(self) -> Self {
        Self { process: Process::OwnIfFatal, ..self }
    }
}

/// Fails the case with a message unless the condition holds.
macro_rules! check {
    ($cond:expr, $($message:tt)+) => {
        if !$cond {
            return Err($crate::case::Stop::Failed(format!($($message)+)));
        }
    };
}

/// Fails the case unless the two are equal.
macro_rules! check_eq {
    ($left:expr, $right:expr, $($message:tt)+) => {
        match (&$left, &$right) {
            (left, right) => {
                if left != right {
                    return Err($crate::case::Stop::Failed(format!("{}: {left:?}, not {right:?}", format!($($message)+))));
                }
            }
        }
    };
}

pub(crate) use {check, check_eq};

/// Fails the case.
pub(crate) fn failed<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::Failed(why.into()))
}

/// Ends a case that does not apply.
pub(crate) fn skipped<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::Skipped(why.into()))
}

/// Fails the case unless `result` is an error of this kind; returns the error.
pub(crate) fn expect_error<T>(result: Result<T, Error>, kind: &str, what: &str) -> Outcome<Error> {
    match result {
        Err(e) if e.kind() == kind => Ok(e),
        Err(e) => {
            Err(Stop::Failed(format!("{what}: {kind} is the right error, not {}: {e}", e.kind())))
        }
        Ok(_) => Err(Stop::Failed(format!("{what}: worked, where {kind} is right"))),
    }
}
