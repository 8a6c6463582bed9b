//! The conformance suite for backends: numbered cases that run on any implementation of `hal`. A
//! backend of somebody else's runs it with one file of its own.
//!
//! # Testing a backend
//! 1. Write a [`Factory`]: the backend, and a source of each [`TestKernel`] for its device. This
//!    crate has the kernels as Rust functions, as functions to register by name, and as CUDA C and
//!    PTX. Another device needs five small kernels.
//! 2. Run the suite. Each failure names the false statement and its evidence. Each skipped case
//!    names the reason.
//!
//! ```
//! use leasehold::backend::{Backend, KernelDesc};
//! use leasehold_conformance::{Factory, Filter, TestKernel, run};
//! use leasehold_cpu::CpuBackend; // here: one's own
//! use std::sync::Arc;
//!
//! struct Mine;
//!
//! impl Factory for Mine {
//!     // A fresh one for every case, which shuts it down at its end.
//!     fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
//!         Ok(Arc::new(CpuBackend::new()))
//!     }
//!     fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
//!         Some(kernel.for_cpu()) // or `kernel.with_source(…)`
//!     }
//! }
//!
//! let report = run(Mine, &Filter::only(&[1, 11, 13]));
//! assert!(report.ok(), "{report}");
//! assert_eq!(report.passed(), [1, 11, 13]);
//! ```
//!
//! To run each case as a named test of a crate, write one file, `tests/conformance.rs`, without
//! libtest's harness:
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
//! # use leasehold::backend::{Backend, KernelDesc, NullBackend};
//! # use leasehold_conformance::{Expectation, Expectations, Factory, TestKernel};
//! # use std::sync::Arc;
//! # struct Mine;
//! # impl Factory for Mine {
//! #     fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> { Ok(Arc::new(NullBackend)) }
//! #     fn kernel(&self, _: TestKernel) -> Option<KernelDesc<'static>> { None }
//! #     fn expectations(&self) -> Expectations {
//! // In the factory: the known failures. An expected failure that passes fails the run, so
//! // the list stays true.
//! Expectations {
//!     unsupported: &[Expectation { case: 101, reason: "the driver captures nothing" }],
//!     expected_failure: &[],
//! }
//! #     }
//! # }
//!
//! fn main() -> std::process::ExitCode {
//!     leasehold_conformance::harness(Mine)
//! }
//! ```
//!
//! `cargo test --test conformance -- 013` then runs one case. Each case runs plain and under
//! [`Validated`](leasehold::backend::Validated). A case that submits work runs eager and replayed
//! from a graph. Every wait is bounded: a hang is a failure with a dump of timelines and pools.
//! `LEASEHOLD_CONFORMANCE_THOROUGH=1` runs repetitions in full; the default is a tenth of them.
//! `leasehold-workbench conformance` runs the same cases from the command line, on the command's
//! backends.
//!
//! # Optional capabilities
//! A case states its requirements ([`Need`]): host timelines, timestamps, graphs, concurrent
//! streams, a kernel. On a device without them the case is skipped. Other methods of the factory
//! provide more than one backend with one device; their defaults skip the cases. These are a second
//! device or a [`peer`](Factory::peer), a driver that [fails on demand](Factory::faulty), and a
//! machine [without devices](Factory::without_devices). Cases about collectives need
//! [ranks](Factory::ranks) and their library.
//!
//! No case accesses device memory from the host: bytes go through uploads and downloads, and only
//! pinned memory is dereferenced. A device in stepped time may make its steps in `wait_host`,
//! `refresh` and `Device::synchronize`, which the cases call during every wait. It must not treat a
//! host wait as a deadlock while other threads may still signal or submit: a wait with a deadline
//! ends at the deadline.
//!
//! # Processes
//! Cases about the process (a fork, idle threads) run in a process of their own, if the runner can
//! start one ([`Isolation`]; [`harness`] can). So do cases with a device fault, if the fault ends
//! the process's use of the driver ([`Factory::fatal_faults`]).
//!
//! # Sanitizers
//! Cases with the tag [`Tag::Sanitizer`] are suitable for compute-sanitizer and similar tools: they
//! cause no fault and read no unwritten memory. The checker sees each buffer's bounds if the
//! backend's memory is in pass-through mode. Cases that need [pooled memory](Need::Pooling) are
//! skipped then. From the command line, here for NVIDIA's tools:
//!
//! ```text
//! compute-sanitizer --tool memcheck leasehold-workbench conformance --device cuda:0 \
//!     --tag sanitizer --memory-debug pass-through
//! ```
//!
//! # Tiers
//! [`Tier::Hal`] cases use the traits of `leasehold::backend` alone. [`Tier::Runtime`] cases use
//! `leasehold::Runtime` with the backend injected. [`Tier::Abi`] is for crates with a C interface,
//! which define their cases themselves under the same numbers. [`ELSEWHERE`] lists the numbers that
//! are not cases here, with the reasons.
//!
//! # Simulated drivers
//! Feature `sim` adds the module `simulated`, for a [`Factory`] over a machine of `leasehold-sim`.
//! Feature `testbench` adds what tests of this workspace's backends share. A registry's package has
//! no such module.
//!
//! This crate must not know a concrete backend.

mod case;
mod cases;
mod elsewhere;
mod env;
mod factory;
mod filter;
mod functions;
mod isolate;
pub mod model;
mod ranks;
mod report;
mod runner;
#[cfg(feature = "sim")]
pub mod simulated;
#[cfg(feature = "testbench")]
pub mod testbench;
mod variant;

pub use case::{Case, Need, Outcome, Process, Setup, Stop, Tag, Tier};
pub use elsewhere::{ELSEWHERE, Elsewhere, Home};
pub use env::{Env, Hold, Other};
pub use factory::{
    BoxAt, Expectation, Expectations, Factory, Faults, Faulty, Injected, Ranks, TestKernel,
};
pub use filter::Filter;
pub use functions::Registration;
pub use isolate::Isolation;
pub use report::{CaseResult, Report, Status};
pub use runner::{Progress, Suite, answer, harness, run, run_with};
pub use variant::{Mode, Variant, Wrap};
