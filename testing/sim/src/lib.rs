//! The simulated device: a deterministic machine of virtual accelerators. It has virtual time,
//! faults on demand and a race detector.
//!
//! [`Machine`] offers the functions of a vendor's driver: devices with their own memory, queues,
//! copies, fills, kernels, host functions, events, words, semaphores and graphs. **Nothing happens
//! by itself.** A step runs one command, selected by the seed, in virtual time; the same seed gives
//! the same run. Calls fail on demand ([`FaultPlan`]). A race detector records all memory accesses
//! and their order ([`Report`]).
//!
//! Kernels are host functions that are registered by name ([`KernelRegistry`]). Ranks of a
//! communicator, each on a device of its own, meet in a [`Meet`]. The machine reports calls that do
//! not fit each other, and names dead-locks as a cycle.
//!
//! [`SimBackend`] offers a machine's devices through `hal`, as `sim:0`, `sim:1`, …. A backend's
//! simulated driver maps a vendor's calls to a [`Machine`], with the vendor's rules.
//!
//! | module | feature | content |
//! |---|---|---|
//! | [`machine`], [`backend`] | | the machine, and its devices as `sim:0` |
//! | `cuda` | `cuda` | a simulated CUDA driver |
//! | `mps` | `mps` | a simulated Metal driver |
//! | `collective` | `collective` | collectives between simulated devices |
//! | `traces` | `traces` | what a vendor's CUDA driver does, recorded, and times of it |
//! | [`memory`] | | memory without a device, and streams without work |
//! | `memory::{trace, replay, workload}` | `workloads` | allocations of programs, their replay |
//!
//! Three types to know: [`SimBackend`] is the backend, [`MachineConfig`] has its settings, and a
//! [`Report`] is a race.
//!
//! ```
//! use leasehold_hal::{Backend, StreamDesc};
//! use leasehold_sim::{MachineConfig, SimBackend};
//! let backend = SimBackend::new(MachineConfig::seed(7))?;
//! let device = backend.open("sim:0".parse()?)?;
//! let stream = device.stream(&StreamDesc::default())?;
//! stream.wait_host(stream.timeline().submitted(), None)?;
//! assert!(backend.machine().take_reports().is_empty());
//! # drop((stream, device));
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! A program on a real device must not need this crate: it serves tests, continuous integration
//! and the reproduction of reports.

pub mod allocator;
pub mod backend;
#[cfg(feature = "collective")]
pub mod collective;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dice;
pub mod machine;
pub mod manager;
pub mod memory;
#[cfg(feature = "mps")]
pub mod mps;
#[cfg(feature = "traces")]
pub mod traces;

pub use backend::SimBackend;
pub use dice::Dice;

pub use machine::{
    CommCall, CommId, CommJoin, CommOp, Command, Condition, DEVICE_BASE, Element, EventId, ExecId,
    FaultAction, FaultPlan, FaultRule, FaultScope, FillCall, GRANULARITY, GraphId, HostFn, Kernel,
    KernelBody, KernelCall, KernelRegistry, KernelSpec, Launch, LibraryTurn, Link, Machine,
    MachineConfig, Meet, MemoryUse, Monitor, Node, NodeFn, NodeId, NodeUpdate, ObjectCounts,
    OnMismatch, Operation, POISON, PartitionId, PieceId, PollFn, QueueFailure, QueueId, Ran,
    ReadyFn, Reduction, Report, ReportKind, RunFn, SemaphoreId, Stepping, Transfer, When,
};
