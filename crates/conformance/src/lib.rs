//! What every backend must do, as numbered cases that run on any implementation of `hal`.
//!
//! A backend of anybody's runs the suite with one file, `tests/conformance.rs`, without libtest's harness:
//!
//! ```toml
//! [dev-dependencies]
//! leasehold-conformance = "0.1"
//!
//! [[test]]
//! name = "conformance"
//! harness = false
//! ```
//!
//! ```no_run
//! use leasehold::hal::{Backend, KernelDesc, KernelSource, NullBackend};
//! use leasehold_conformance::{Expectations, Factory, TestKernel};
//! use std::sync::Arc;
//!
//! struct Mine;
//!
//! impl Factory for Mine {
//!     fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
//!         Ok(Arc::new(NullBackend)) // here: one's own, fresh for every case
//!     }
//!     fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
//!         // Here: its source for one's own device; see `TestKernel` for what each must do.
//!         Some(kernel.with_source(KernelSource::Cpu(kernel.function())))
//!     }
//!     fn expectations(&self) -> Expectations {
//!         Expectations { unsupported: &[], expected_failure: &[] }
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     leasehold_conformance::harness(Mine)
//! }
//! ```
//!
//! `cargo test --test conformance -- 013` then runs one case. Every case is a named test; each runs plain and under
//! [`Validated`](leasehold::hal::Validated), and one that makes work runs eager and replayed from a graph. What is skipped says why.
//! Every wait is bounded: a hang is a failure with a dump of lines and pools. A case that is expected to fail and passes fails the run.
//!
//! [`run`] does the same without a command line and returns a [`Report`].
//!
//! # Tiers
//! [`Tier::Hal`] cases use the traits of `leasehold::hal` alone; [`Tier::Runtime`] cases use `leasehold::Runtime` with the backend
//! injected; [`Tier::Abi`] is for crates with a C interface, which state their cases themselves under the same numbers.
//!
//! This crate must not know a concrete backend.

mod case;
mod cases;
mod elsewhere;
mod env;
mod factory;
mod functions;
mod isolate;
mod report;
mod runner;

pub use case::{Case, Need, Outcome, Process, Setup, Stop, Tier};
pub use elsewhere::{ELSEWHERE, Elsewhere, Home};
pub use env::{Env, Hold, Other};
pub use factory::{Expectation, Expectations, Factory, Faults, Faulty, Injected, TestKernel};
pub use functions::Registration;
pub use isolate::{Isolation, answer};
pub use report::{CaseResult, Report, Status};
pub use runner::{Filter, Mode, Progress, Suite, Variant, Wrap, harness, run, run_with};
