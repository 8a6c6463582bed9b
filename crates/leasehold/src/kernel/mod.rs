//! Kernels: bases, sessions, and what a session may do.
//!
//! * [`KernelDesc`] describes a kernel: code, bindings, parameters, and which launches may run
//!   ([`KernelCheck`]).
//! * [`KernelBase`] is a kernel's key and its cache of pipelines, one per device. Making one is
//!   `unsafe`: its author vouches for the kernel. Launching is safe: each launch is checked. New
//!   convenience goes to [`session_ops`].
//! * [`Kernel`] is a base whose type says what a launch takes.
//! * [`Stream::launch`](crate::Stream::launch) is one launch,
//!   [`launch_many`](crate::Stream::launch_many) several as one submission.
//! * [`KernelSession`] is one or more launches on a stream as one submission, from `begin` to
//!   `finish`. Its type says what may come next.
//! * [`session_ops`] binds, sets parameters and dispatches; [`session_sync_ops`] waits for
//!   dependencies and updates tokens.
//! * [`Registry`] resolves a name to the kernel of the most specific architecture that a device
//!   runs.

pub mod base;
mod grid;
mod launch;
pub mod registry;
pub(crate) mod rules;
pub mod session;
pub mod session_ops;
pub mod session_sync_ops;
mod typed;

pub use base::KernelBase;
pub use grid::{Grid, Params};
pub use launch::Launch;
pub use leasehold_hal::{
    Access, Binding, CpuArgs, CpuCFn, CpuFn, CpuTile, Cubin, FromParams, Interleave, KernelCheck,
    KernelDesc, KernelSource, LaunchInfo, MapElement, Overlap, Swizzle, TensorMap,
};
pub use registry::Registry;
pub use session::{Begun, Bound, Dispatched, KernelSession, Parametrised, Ready, Updated};
pub use typed::{Arguments, Bindings, Kernel, Read, ReadWrite, TypedBinding, TypedLaunch, Write};
