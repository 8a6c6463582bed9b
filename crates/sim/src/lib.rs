//! The simulated device: a deterministic machine of virtual accelerators.
//!
//! [`Machine`] has what a vendor's driver has: devices with memory of their own, queues, copies, fills, kernels, host functions, events, words,
//! semaphores and graphs. **Nothing happens by itself.** A step runs one command, picked by the seed, in virtual time; the same seed gives the
//! same run. On demand calls fail ([`FaultPlan`]), and a detector watches who touches which memory and what orders it ([`Report`]).
//!
//! Kernels are functions of the host that are registered by name ([`KernelRegistry`]).
//!
//! [`SimBackend`] shows a machine's devices through `hal`, as `sim:0`, `sim:1`, …. A backend's simulated driver maps a vendor's calls to a [`Machine`], with the vendor's rules.
//!
//! This crate must not be needed by a library: it is for tests, for continuous integration and for reading reports.

pub mod allocator;
pub mod backend;
pub mod machine;
pub mod manager;

pub use backend::SimBackend;

pub use machine::{
    Command, DEVICE_BASE, EventId, ExecId, FaultAction, FaultPlan, FaultRule, FaultScope, FillCall, GRANULARITY,
    GraphId, HostFn, Kernel, KernelBody, KernelCall, KernelRegistry, KernelSpec, Launch, Machine, MachineConfig,
    MemoryUse, Monitor, Node, NodeFn, NodeId, NodeUpdate, ObjectCounts, Operation, POISON, PieceId, PollFn,
    QueueFailure, QueueId, Ran, ReadyFn, Report, ReportKind, RunFn, SemaphoreId, Stepping, Transfer, When,
};
