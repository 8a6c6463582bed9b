//! A case: a numbered sentence about backends, and the code that finds out whether it is true.
//!
//! This module must not know who runs cases.

use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::Error;
use std::fmt;
use std::str::FromStr;

/// Which interface a case is stated over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The traits of `hal`.
    Hal,
    /// `Runtime`, with the backend injected.
    Runtime,
    /// A C interface; run by the crates that have one.
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

/// What a device must have for a case to mean anything on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Timelines that the host signals.
    Gates,
    /// Time stamps.
    Timestamps,
    /// Graphs.
    Graphs,
    /// Host calls in streams.
    HostCalls,
    /// Streams that make progress at the same time.
    ConcurrentStreams,
    /// A test kernel.
    Kernel(TestKernel),
    /// A way to hold a stream back: gates, or the spinning kernel on concurrent streams.
    Hold,
    /// Library calls in streams.
    ForeignCalls,
    /// Device memory that keeps what is freed and lends it again: not while each buffer comes straight from the driver
    /// ([`DebugAids::pass_through`](leasehold::backend::DebugAids::pass_through)).
    Pooling,
}

/// What a case is fit for, beside trying a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Tag {
    /// A run under a checker of every access (compute-sanitizer, valgrind), ten to a hundred times slower, with each buffer straight from
    /// the driver. The case makes work, no fault and no call that a driver refuses; it reads no memory that nobody wrote, and needs neither
    /// much memory nor a freed block's address again.
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

/// Which of the factory's backends a case works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// [`Factory::backend`](crate::Factory::backend).
    Ordinary,
    /// [`Factory::one_worker`](crate::Factory::one_worker).
    OneWorker,
    /// [`Factory::faulty`](crate::Factory::faulty) where there is such a one, else the ordinary one.
    Faulty,
}

/// Which process a case runs in, where the runner can start others ([`Filter::isolation`](crate::Filter::isolation)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// The runner's.
    Shared,
    /// One of its own: it is about the process itself.
    Own,
    /// One of its own where a device fault is fatal to the process ([`Factory::fatal_faults`](crate::Factory::fatal_faults)): it makes one.
    OwnIfFatal,
}

/// Why a case ended early.
#[derive(Debug)]
pub enum Stop {
    /// The sentence is false here, and how that showed.
    Failed(String),
    /// The sentence means nothing here, and why.
    Skipped(String),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Failed(format!("unexpected error {}: {e}", e.kind()))
    }
}

/// What a case finds.
pub type Outcome<T = ()> = Result<T, Stop>;

/// A numbered sentence about backends.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The number, the same for ever.
    pub number: u16,
    /// The sentence, short.
    pub name: &'static str,
    /// The interface.
    pub tier: Tier,
    /// What the device must have.
    pub needs: &'static [Need],
    /// Whether it makes work through the environment, and so runs replayed too.
    pub replayed: bool,
    /// The backend that it works with.
    pub setup: Setup,
    /// The process that it runs in.
    pub process: Process,
    /// What it is fit for, beside.
    pub tags: &'static [Tag],
    /// Finds out.
    pub run: fn(&Env) -> Outcome,
}

impl Case {
    /// A case over the traits.
    pub const fn hal(number: u16, name: &'static str, needs: &'static [Need], run: fn(&Env) -> Outcome) -> Self {
        Self::new(number, name, Tier::Hal, needs, run)
    }

    /// A case over the runtime.
    pub const fn runtime(number: u16, name: &'static str, needs: &'static [Need], run: fn(&Env) -> Outcome) -> Self {
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

    /// The same, run eager and replayed.
    pub const fn replayed(self) -> Self {
        Self { replayed: true, ..self }
    }

    /// The same, on a backend with as few workers as it can have.
    pub const fn one_worker(self) -> Self {
        Self { setup: Setup::OneWorker, ..self }
    }

    /// The same, on a backend whose driver can be made to fail, where there is one.
    pub const fn faulty(self) -> Self {
        Self { setup: Setup::Faulty, ..self }
    }

    /// The same, in a process of its own.
    pub const fn alone(self) -> Self {
        Self { process: Process::Own, ..self }
    }

    /// The same, fit for [`Tag::Sanitizer`].
    pub const fn sanitizer(self) -> Self {
        Self { tags: &[Tag::Sanitizer], ..self }
    }

    /// The same, in a process of its own where the device fault that it makes is fatal to the process.
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

/// Ends the case: it means nothing here.
pub(crate) fn skipped<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::Skipped(why.into()))
}

/// Fails the case unless `result` is an error of this kind; gives the error.
pub(crate) fn expect_error<T>(result: Result<T, Error>, kind: &str, what: &str) -> Outcome<Error> {
    match result {
        Err(e) if e.kind() == kind => Ok(e),
        Err(e) => Err(Stop::Failed(format!("{what}: {kind} is the right error, not {}: {e}", e.kind()))),
        Ok(_) => Err(Stop::Failed(format!("{what}: worked, where {kind} is right"))),
    }
}
