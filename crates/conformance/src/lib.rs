//! What every backend must do, as numbered cases that run on any implementation of `hal`.
//!
//! # A backend of one's own
//! 1. Write a [`Factory`]: the backend, and a source of each [`TestKernel`] that its device understands. The kernels are here as Rust
//!    functions, as functions to register by name, and as CUDA C and PTX; for another device they are five small kernels to write.
//! 2. Run the suite. What fails says which sentence is not true of the backend, and how that showed. What is skipped says why.
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
//! As a test of one's crate, each case a named test, it is one file, `tests/conformance.rs`, without libtest's harness:
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
//! // In the factory: what is known. An expected failure that passes fails the run, so that the list stays true.
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
//! `cargo test --test conformance -- 013` then runs one case. Each runs plain and under
//! [`Validated`](leasehold::backend::Validated), and one that makes work runs eager and replayed from a graph. Every wait is bounded: a hang is a
//! failure with a dump of lines and pools. `LEASEHOLD_CONFORMANCE_THOROUGH=1` repeats in full what is otherwise repeated a tenth as often.
//! `leasehold conformance` runs the same cases from the command line, on the backends that the command knows.
//!
//! # What a backend need not have
//! A case says what it needs ([`Need`]): gates, time stamps, graphs, concurrent streams, a kernel. On a device without it the case is skipped.
//! More than one backend with one device comes from the factory's other methods, all with defaults that skip: a second device or a
//! [`peer`](Factory::peer), a driver that [fails on request](Factory::faulty), a machine [without devices](Factory::without_devices).
//!
//! Nothing here touches device memory from the host: bytes go through uploads and downloads, and only pinned memory is dereferenced. A device
//! whose time is stepped may do its steps in `wait_host`, `refresh` and `Device::synchronize`, which the cases call while they wait for
//! anything. It must not take a host wait for a dead-lock while other threads may still signal or submit: a wait with a deadline ends at the
//! deadline.
//!
//! # Processes
//! Cases about the process (a fork, idle threads) run in one of their own, where the runner can start one ([`Isolation`]; [`harness`] can).
//! So do those that make a device fault, where that ends the process's use of the driver ([`Factory::fatal_faults`]).
//!
//! # Sanitizers
//! Cases tagged [`Tag::Sanitizer`] are fit for compute-sanitizer and its like: no fault on purpose, no read of memory that nobody wrote. The
//! checker sees each buffer's ends when the backend's memory is in pass-through mode; cases that want [pooled memory](Need::Pooling) are
//! skipped then. From the command line, here for NVIDIA's tools:
//!
//! ```text
//! compute-sanitizer --tool memcheck leasehold conformance --device cuda:0 --tag sanitizer --memory-debug pass-through
//! ```
//!
//! # Tiers
//! [`Tier::Hal`] cases use the traits of `leasehold::backend` alone; [`Tier::Runtime`] cases use `leasehold::Runtime` with the backend
//! injected; [`Tier::Abi`] is for crates with a C interface, which state their cases themselves under the same numbers. A number that is no case
//! here is in [`ELSEWHERE`], with the reason.
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

pub use case::{Case, Need, Outcome, Process, Setup, Stop, Tag, Tier};
pub use elsewhere::{ELSEWHERE, Elsewhere, Home};
pub use env::{Env, Hold, Other};
pub use factory::{Expectation, Expectations, Factory, Faults, Faulty, Injected, TestKernel};
pub use functions::Registration;
pub use isolate::{Isolation, answer};
pub use report::{CaseResult, Report, Status};
pub use runner::{Filter, Mode, Progress, Suite, Variant, Wrap, harness, run, run_with};
