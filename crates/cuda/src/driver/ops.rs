//! [`CudaSlowOps`]: the interface to the driver. Two types implement it: the real driver (`real`)
//! and the simulated one (`sim`).
//!
//! # Rules for all methods
//! * **Context.** New objects belong to the context that is current on the calling thread
//!   ([`ContextOps::set_current`]). The managers make the context current. Unless a method says
//!   otherwise, its objects' context must be current.
//! * **Errors.** `OutOfMemory` stands for the driver's code 2. `DeviceLost` stands for codes after
//!   which the current context is lost: from then on every call returns it with the first cause.
//!   Every other code is `Driver` with the function, the code and its name, and so is a failure
//!   because another context is lost. A call that fails creates nothing.
//! * **Blocking.** Each method says whether it may wait for the device. A method that "does not
//!   block" still takes the driver's own locks.
//! * **Threads.** Any thread may call, several at once. The caller makes calls on one stream under
//!   that stream's submission lock.
//! * **Order of arguments.** As in the driver's API.
//!
//! Handles are plain integers: they own nothing, and any program can make one up. The managers
//! ensure that each object is destroyed once. So every method that takes a handle or an address is
//! unsafe, and states what its caller vouches for.
//!
//! This module must not know managers.

use leasehold_core::Result;

mod device;
mod graph;
mod memory;
mod module;
mod partition;
mod stream;

pub use device::{CaptureMode, ContextOps, DeviceOps, DeviceProperties};
pub use graph::{GraphExecUpdate, GraphOps};
pub use memory::{HostFlags, MemoryOps, NativeMemoryInfo};
pub use module::{FunctionInfo, ModuleOps, NativeTensorMap};
pub use partition::{PartitionOps, no_partitions, too_small};
pub use stream::{
    CopyKind, EventFlags, EventOps, HostFunction, Launch, NativeBatch, NativeCopy, NativeFill,
    Progress, SourceOrder, StreamOps,
};

leasehold_hal::native_handles! {
    /// A `CUcontext`.
    NativeContext;
    /// A `CUstream`.
    NativeStream;
    /// A `CUevent`.
    NativeEvent;
    /// A `CUmodule`.
    NativeModule;
    /// A `CUfunction`.
    NativeFunction;
    /// A `CUgraph`.
    NativeGraph;
    /// A `CUgraphNode`.
    NativeNode;
    /// A `CUgraphExec`.
    NativeGraphExec;
    /// A `CUgreenCtx`.
    NativePartition;
    /// A `CUgraphConditionalHandle`: a word of the driver's, by which a graph's node decides.
    NativeCondition;
    /// A `CUmemGenericAllocationHandle`: physical memory without an address.
    NativeMemory;
}

/// The driver calls that managers, allocators, streams and graphs need.
///
/// A call through the trait costs one virtual call. The driver's own calls take from 0.1 µs
/// (`cuCtxGetCurrent`) over 2 µs (a launch) to milliseconds.
///
/// # Safety
/// An implementation reports the truth, because the backend lends memory to safe code on its word:
/// - Memory that it allocates exists, has the requested size, and belongs to no other caller until
///   it is given back.
/// - Work that it reports as over touches nothing any more.
/// - A stream's word is written after the work before it.
pub unsafe trait CudaSlowOps:
    DeviceOps
    + ContextOps
    + MemoryOps
    + StreamOps
    + EventOps
    + ModuleOps
    + GraphOps
    + PartitionOps
    + Send
    + Sync
    + 'static
{
    /// The longest sleep of a waiting thread between two queries of a word or a stream. Zero for
    /// the simulated driver, whose time advances only with queries.
    fn poll_interval(&self) -> std::time::Duration;

    /// Compiles CUDA C++ to PTX for a compute capability: NVRTC. Blocks while it compiles.
    ///
    /// # Errors
    /// - `Unavailable` without NVRTC, with the places that were searched.
    /// - `Compile` with the log.
    fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        compute_capability: (u32, u32),
    ) -> Result<Vec<u8>>;

    /// The compiler's name and version, for the key of a cache: `nvrtc 13.0`.
    fn compiler(&self) -> String;
}
